"""In bfloat16 too, gradients don't depend on the plan, as far as bfloat16 goes; what is float32 stays so."""

import dataclasses
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_runs import (
  MODEL,
  SLOTS,
  equations,
  packed,
  parameters,
  plans_of,
  program,
  run_config,
  samples,
  sums_of_batch,
  sums_of_plan,
  widest_program,
)

from repack_jax.checks import ConfigError
from repack_jax.config import DataConfig
from repack_jax.data.samples import Sample
from repack_jax.kinds import SlidingWindowAttention
from repack_jax.ops.grouped import grouped_matmul
from repack_jax.ops.rows import Move, from_rows, to_rows

# All experts for every token: with a choice, one near a tie goes to another expert in bfloat16.
SINGLE = dataclasses.replace(MODEL, experts_per_token=MODEL.num_experts)
HALF = dataclasses.replace(SINGLE, compute_dtype='bfloat16')
# A frequent token, and nothing but the tables to be wrong about.
TABLES = dataclasses.replace(
  MODEL, num_layers=1, pattern='S', num_experts=0, dense_width=16, tie_embeddings=True
).with_kind(SlidingWindowAttention(window_tokens=7))
LENGTHS = {'long and short': [110, 40, 30, 20, 5, 1], 'equal': [32] * 7, 'many': [60, 9] + [3] * 50}


def differences(got, want) -> dict[str, float]:
  """Of each gradient, the norm of the difference over the norm of what is wanted."""
  leaves = (jax.tree_util.tree_leaves_with_path(sums.grads) for sums in (got, want))
  return {
    jax.tree_util.keystr(path): float(np.linalg.norm(g - w) / np.linalg.norm(w))
    for (path, g), (_, w) in zip(*leaves, strict=True)
  }


def assert_near(got, want, tolerance: float) -> None:
  """Scales of norms are a few sums over all tokens in which much cancels: three times as far."""
  assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(got.grads))
  assert got.losses.cross_entropy.dtype == np.float32
  np.testing.assert_allclose(got.losses.cross_entropy, want.losses.cross_entropy, rtol=2e-3)
  far = {
    name: value
    for name, value in differences(got, want).items()
    if not value < tolerance * (3 if 'scale' in name else 1)
  }
  assert not far, far


@pytest.mark.parametrize(
  'ranks', [4, pytest.param(1, marks=pytest.mark.long), pytest.param(16, marks=pytest.mark.long)]
)
def test_gradients_in_bfloat16_are_those_in_float32(ranks):
  """Over planned and random plans."""
  one, run = run_config(1, model=SINGLE), run_config(ranks, model=HALF)
  runs_it = widest_program(run)
  found = [
    (plans_of(run, lengths, mode)[0], samples(lengths))
    for lengths in LENGTHS.values()
    for mode in (('parents', 'solve') if ranks > 1 else ('static',))
  ]
  for seed in range(2 if ranks > 1 else 0):
    plan = cases.random_plan(
      np.random.default_rng(seed), ranks, SLOTS // ranks, ranks, run.cluster.ranks_per_node, solo=seed / 2
    )
    if plan.lengths:
      found.append((plan, samples(plan.lengths, seed)))
  for plan, batch in found:
    assert_near(sums_of_plan(run, plan, batch, runs_it), sums_of_batch(one, batch), 0.1)


@pytest.mark.parametrize('tied', [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_gradient_of_a_frequent_token(tied):
  """8,192 tokens, nine tenths of them one byte: a sum in bfloat16 stops at 256 times what is added."""
  slots = 8192
  rng = np.random.default_rng(0)
  tokens = np.where(rng.random(slots) < 0.9, 32, rng.integers(0, 256, slots)).astype(np.int32)
  cuts = [0, 4000, 6000, *range(6200, slots + 1, 249)]
  batch = [
    Sample(n, 0, tokens[a:b], np.append(tokens[a + 1 : b], -1).astype(np.int32))
    for n, (a, b) in enumerate(itertools.pairwise(cuts))
  ]
  model = dataclasses.replace(TABLES, tie_embeddings=tied)
  half = dataclasses.replace(model, compute_dtype='bfloat16')
  want = sums_of_batch(run_config(1, model=model, slots=slots), batch)
  for mode in ('static', 'repack', 'solve'):
    run = run_config(4, mode, model=half, slots=slots)
    (plan,) = plans_of(run, [len(sample) for sample in batch])
    assert_near(sums_of_plan(run, plan, batch, widest_program(run)), want, 0.04)


def test_rows_go_there_and_back():
  """Each move is the other's transpose: items of three copies in rows with holes, some without a row."""
  rng = np.random.default_rng(0)
  x, rows = rng.normal(size=(4, 5)).astype(np.float32), rng.normal(size=(20, 5)).astype(np.float32)
  kept = rng.random(12) < 0.7
  row = np.where(kept, rng.permutation(20)[:12], 0)
  item, filled = rng.integers(0, 12, 20), np.zeros(20, bool)
  item[row[kept]], filled[row[kept]] = np.flatnonzero(kept), True
  move = Move(jnp.asarray(item), jnp.asarray(filled), jnp.asarray(row), jnp.asarray(kept))
  there, back = jax.vjp(lambda x: to_rows(3, x, move), x)
  by_hand = np.zeros((20, 5), np.float32)
  for i in np.flatnonzero(kept):
    by_hand[row[i]] = x[i // 3]
  np.testing.assert_array_equal(there, by_hand)
  np.testing.assert_allclose((there * rows).sum(), (x * back(jnp.asarray(rows))[0]).sum(), rtol=1e-5)
  items, transposed = jax.vjp(lambda rows: from_rows(rows, move), rows)
  np.testing.assert_array_equal(items, np.where(kept[:, None], rows[row], 0))
  grads = rng.normal(size=(12, 5)).astype(np.float32)
  np.testing.assert_allclose(
    (items * grads).sum(), (rows * transposed(jnp.asarray(grads))[0]).sum(), rtol=1e-5
  )


PRODUCTS = ('dot_general', 'ragged_dot_general', 'ragged_dot')


def is_highest(precision) -> bool:
  both = precision if isinstance(precision, tuple) else (precision,)
  return all(one == jax.lax.Precision.HIGHEST for one in both)


@pytest.mark.parametrize('model', [SINGLE, HALF], ids=['float32', 'bfloat16'])
def test_no_float32_product_is_left_to_the_platform(model):
  """A TPU would take bfloat16 passes, a GPU might take TF32."""
  run = run_config(4, model=model)
  step = program(run)
  (plan,) = plans_of(run, LENGTHS['equal'])
  runs_it = widest_program(run)
  arrays = packed(run, plan, samples(LENGTHS['equal']), runs_it)
  traced = jax.make_jaxpr(step.gradients, static_argnums=3)(
    parameters(run), step.model.init_carry(), arrays, runs_it
  )
  found = equations(traced.jaxpr, *PRODUCTS)
  single = [eqn for eqn in found if eqn.invars[0].aval.dtype == np.float32]
  assert len(found) > 30 and len(single) >= 3, 'the routers, at least'
  assert (len(single) == len(found)) == (model is SINGLE)
  for eqn in single:
    assert is_highest(eqn.params['precision']), eqn


@pytest.mark.parametrize('implementation', ['blocks', 'ragged_dot'])
def test_grouped_products_keep_their_precision(implementation):
  def summed(x, weights):
    return grouped_matmul(implementation, x, weights, jnp.array([3, 2], jnp.int32)).sum()

  traced = jax.make_jaxpr(jax.grad(summed, argnums=(0, 1)))(jnp.ones((6, 4)), jnp.ones((2, 4, 3)))
  found = equations(traced.jaxpr, *PRODUCTS)
  assert len(found) >= 3 and all(is_highest(eqn.params['precision']) for eqn in found)


def test_more_assignments_than_an_int32_holds():
  """2 ** 31 of them over all experts, as a large cluster may make: shares are still shares."""
  model = program(run_config(1)).model
  losses = model.zero_losses()
  counts = jnp.full(losses.expert_counts.shape, 2**29, jnp.int32).at[:, 0].set(2**30)
  carry = np.asarray(model.next_carry(losses._replace(expert_counts=counts)))
  np.testing.assert_allclose(carry.sum(axis=1), 1, rtol=1e-6)
  np.testing.assert_allclose(carry[:, 0], 2 / 9, rtol=1e-6)
  with pytest.raises(ConfigError, match='batch_tokens = 2147483648: must be at most 2147483647'):
    DataConfig(batch_tokens=2**31)


def test_auxiliary_losses_count_the_tokens_that_the_loss_counts():
  """A sample's last token has no target: its routing is in neither sum."""
  run = run_config(1)
  batch = samples([40, 7, 1])
  without = [dataclasses.replace(s, targets=np.full_like(s.targets, -1)) for s in batch[1:]]
  (plan,) = plans_of(run, [40, 7, 1])
  half = sums_of_plan(run, plan, [batch[0], *without])
  alone = sums_of_plan(run, plans_of(run, [40])[0], batch[:1])
  for name in ('cross_entropy', 'balance', 'router_z'):
    np.testing.assert_allclose(getattr(half.losses, name), getattr(alone.losses, name), rtol=1e-5)
  assert half.losses.expert_counts.sum() > alone.losses.expert_counts.sum()
