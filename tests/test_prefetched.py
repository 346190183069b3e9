"""Parameters gathered a layer ahead: the same losses and gradients, and no layer keeps its weights."""

import dataclasses

import cases
import jax
import pytest
from model_runs import (
  MODEL,
  SLOTS,
  assert_same,
  equations,
  on_cluster,
  packed,
  program,
  run_config,
  samples,
  sums_of_batch,
  sums_of_plan,
)

from repack_jax.checks import ConfigError
from repack_jax.config import weights

TWO_TURNS = dataclasses.replace(MODEL, num_layers=6, pattern='FSS')
# A dense layer and what is left of its turn of the pattern, two turns, and an incomplete one.
MIXED = {'num_layers': 10, 'dense_layers': 1, 'dense_width': 48}


@pytest.mark.parametrize(
  ('ranks', 'changes'),
  [
    (4, {}),
    pytest.param(4, MIXED | {'remat': 'none', 'expert_placement': 'replicated'}, marks=pytest.mark.long),
  ],
)
def test_gradients_are_those_of_one_rank_in_line(ranks, changes):
  model = dataclasses.replace(TWO_TURNS, **changes)
  run = on_cluster(run_config(ranks, model=model), prefetch_layers=1)
  plan = cases.wide_plan(ranks, run.cluster.ranks_per_node, SLOTS // ranks)
  batch = samples(plan.lengths)
  assert_same(sums_of_plan(run, plan, batch), sums_of_batch(run_config(1, model=model), batch))


@pytest.mark.parametrize('remat', ['none', 'layer'])
def test_no_layer_keeps_its_weights_for_the_backward_pass(remat):
  """None of what a loop hands on from each of its turns is the whole of a weight."""
  model = dataclasses.replace(TWO_TURNS, remat=remat, experts_per_token=3, expert_placement='replicated')
  run = on_cluster(run_config(4, model=model), prefetch_layers=1)
  step, plan = program(run), cases.wide_plan(4, 2, SLOTS // 4)
  runs_it = step.program(plan)
  arrays, state = packed(run, plan, samples(plan.lengths), runs_it), step.state_shapes()
  traced = jax.make_jaxpr(step.gradients, static_argnums=3)(state.params, state.carry, arrays, runs_it)
  stacked = [
    out.aval.shape[1:]
    for loop in equations(traced.jaxpr, 'scan')
    for out in loop.outvars[loop.params['num_carry'] :]
  ]
  matrices = [weight for weight in weights.leaves(weights.layer(model, 2)) if len(weight.shape) > 1]
  assert (SLOTS // 4, model.d_model) in stacked, 'the inputs of layers, at least'
  assert not {weight.shape for weight in matrices}.intersection(stacked)


def test_more_layers_ahead_can_be_simulated_only():
  with pytest.raises(ConfigError, match=r'prefetch_layers = 2: the training step gathers .* at most 1 layer'):
    program(on_cluster(run_config(2), prefetch_layers=2))
