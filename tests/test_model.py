"""The whole model: loss and gradients don't depend on the plan; nothing leaks or counts that shouldn't."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_runs import (
  LENGTHS,
  MODEL,
  SLOTS,
  assert_same,
  equations,
  on_cluster,
  packed,
  plans_of,
  program,
  run_config,
  samples,
  sums_of_batch,
  sums_of_plan,
  widest_program,
  without_targets,
)
from ragged import emulated_ragged_all_to_all

from models.experts import block_rows
from models.transformer import Decoder, stacks
from repack_jax.config import MODES
from repack_jax.exchange.attention import repacked_attention
from repack_jax.kinds import ChunkedAttention, FullAttention, SlidingWindowAttention
from repack_jax.ops.attention import attention, get_attention
from repack_jax.ops.loss import token_losses
from repack_jax.ops.rows import Table
from repack_jax.parallel.mesh import DOMAIN_AXES, RANK_BLOCKS, make_mesh
from repack_jax.parallel.sharded import buffer_elements
from repack_jax.plan.arrays import pack
from repack_jax.plan.plan import CHILDREN, PARENTS, Group, Plan
from repack_jax.plan.program import Program
from repack_jax.predict import flops
from repack_jax.training.step import TrainStep


@pytest.fixture(scope='module')
def one_rank():
  """What one rank gives for each batch."""
  return {name: sums_of_batch(run_config(1), samples(lengths)) for name, lengths in LENGTHS.items()}


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('ranks', [*(pytest.param(n, marks=pytest.mark.long) for n in (2, 8, 16)), 4, 32])
def test_loss_and_gradients_do_not_depend_on_mesh_and_mode(one_rank, ranks, mode):
  run = run_config(ranks)  # one program for all modes: the mode is the planner's alone
  for name, lengths in LENGTHS.items():
    (plan,) = plans_of(run, lengths, mode)
    assert_same(sums_of_plan(run, plan, samples(lengths), widest_program(run)), one_rank[name])


@pytest.mark.long
@pytest.mark.parametrize('ranks', [4, 16])
def test_every_program_that_plans_ask_for_agrees(one_rank, ranks):
  """The narrowest program of each plan, over nodes or the domain, with solo samples or without."""
  run, used = run_config(ranks), set()
  for mode in MODES:
    for name, lengths in LENGTHS.items():
      (plan,) = plans_of(run, lengths, mode)
      runs_it = program(run).program(plan)
      if runs_it not in used:
        used.add(runs_it)
        assert_same(sums_of_plan(run, plan, samples(lengths), runs_it), one_rank[name])
  assert {(p.parents_span, p.children_span) for p in used} >= {
    (ranks, run.cluster.ranks_per_node),
    (ranks, ranks),
  }
  assert {p.has_solo for p in used} == {False, True}


def test_the_planner_gives_these_batches_what_the_test_means_to_test():
  def plan(name: str, ranks: int, mode: str) -> Plan:
    return plans_of(run_config(ranks), LENGTHS[name], mode)[0]

  narrow = plan('long and short', 16, 'repack')
  assert narrow.widest(PARENTS) == 16 and narrow.widest(CHILDREN) == 8
  assert plan('giant', 32, 'repack').widest(CHILDREN) == 32  # it fits no node: the wide layout stays
  assert len(plan('giant and short', 32, 'repack').child_sizes()) > 1
  assert (plan('nearly empty', 32, 'repack').rank_tokens == 0).sum() > 16
  beside = plan('many of one token', 16, 'solve')
  assert beside.widest(PARENTS) == 16 and len(beside.solo) > 1


@pytest.mark.parametrize(
  ('ranks', 'remat', 'chunks'), [(32, 'layer', 2), pytest.param(4, 'none', 4, marks=pytest.mark.long)]
)
def test_solo_samples_beside_a_wide_parent_with_local_children(ranks, remat, chunks):
  """A layout by hand: children of every size in nodes of their own, full and empty ranks, solo on most.

  In chunks of heads; a group of 32 has one head a rank, and so none.
  """
  run = run_config(ranks, model=dataclasses.replace(MODEL, remat=remat))
  run = on_cluster(run, exchange_chunks=chunks)
  plan = cases.wide_plan(ranks, run.cluster.ranks_per_node, SLOTS // ranks)
  assert (plan.span(PARENTS), plan.span(CHILDREN)) == (ranks, run.cluster.ranks_per_node)
  assert plan.widest(PARENTS) == ranks
  assert len(plan.child_sizes()) == run.cluster.nodes and len(plan.solo) > ranks // 2
  batch = samples(plan.lengths)
  assert_same(sums_of_plan(run, plan, batch), sums_of_batch(run_config(1), batch))


@pytest.mark.parametrize('seeds', [range(7), pytest.param(range(7, 60), marks=pytest.mark.long)])
@pytest.mark.parametrize('ranks', [4, pytest.param(16, marks=pytest.mark.long), 32])
def test_random_legal_plans_agree_with_one_rank(ranks, seeds):
  run = run_config(ranks)
  for seed in seeds:
    rng = np.random.default_rng(seed)
    solo = 0.7 if seed % 2 else 0.0
    row = 4 if seed % 3 == 2 else 1  # ranks that hold whole rows have padding among the tokens of a stream
    plan = cases.random_plan(
      rng, ranks, SLOTS // ranks, ranks, run.cluster.ranks_per_node, solo=solo, row_tokens=row
    )
    if plan.lengths:
      batch = samples(plan.lengths, seed)
      got = sums_of_plan(run, plan, batch, widest_program(run, row))
      assert_same(got, sums_of_batch(run_config(1), batch))


def test_twenty_random_batches_compile_once_a_scope():
  """Through the step that training runs: 20 batches of other lengths, no more programs than scopes."""
  run = run_config(4)
  step = program(run)
  state, sums = step.init_state(), step.zero_sums()
  used = set()
  for seed in range(20):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, int(rng.integers(2, 130)), 9)
    lengths = lengths[lengths.cumsum() <= SLOTS]
    for plan in plans_of(run, lengths):
      runs_it = step.program(plan)
      sums = step.accumulate(state, sums, runs_it, packed(run, plan, samples(lengths, seed), runs_it))
      used.add(runs_it)
    state, metrics, sums = step.update(state, sums, int((lengths - 1).sum()))
    assert np.isfinite(metrics['loss']) and int(state.step) == seed + 1
  assert len(used) >= 2 and step.traces['accumulate'] == len(used) and step.traces['update'] == 1
  assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(sums))


def test_two_domains_agree_with_one_rank(one_rank):
  base = run_config(16)
  cluster = dataclasses.replace(base.cluster, nodes=1, domains=2)
  run = dataclasses.replace(
    base, cluster=cluster, data=dataclasses.replace(base.data, max_document_tokens=128)
  )
  for name in ('giant and short', 'equal'):
    (plan,) = plans_of(run, LENGTHS[name])
    assert_same(sums_of_plan(run, plan, samples(LENGTHS[name])), one_rank[name])


@pytest.mark.parametrize(
  'changes',
  [
    {'remat': 'layer_and_experts'},
    pytest.param({'expert_placement': 'replicated'}, marks=pytest.mark.long),
    pytest.param(
      {'tie_embeddings': True, 'qk_norm': False, 'shared_expert_width': 0}, marks=pytest.mark.long
    ),
    {'num_layers': 3, 'dense_layers': 1, 'dense_width': 24},
    pytest.param(
      {'num_layers': 5, 'pattern': 'FSS', 'dense_layers': 1, 'dense_width': 24}, marks=pytest.mark.long
    ),
    {'num_experts': 0, 'dense_width': 24, 'num_kv_heads': 32},
    pytest.param({'remat': 'none'}, marks=pytest.mark.long),
  ],
  ids=str,
)
def test_model_variants_do_not_depend_on_the_mesh(changes):
  model = dataclasses.replace(MODEL, **changes)
  batch = samples(LENGTHS['giant and short'])
  want = sums_of_batch(run_config(1, model=model), batch)
  assert_same(sums_of_batch(run_config(4, model=model), batch), want)


@pytest.mark.parametrize('ranks', [4, pytest.param(16, marks=pytest.mark.long)])
def test_kinds_in_one_layout_do_not_depend_on_the_mesh(ranks):
  """Windows and chunks, both in the children's layout, beside full layers without rotary positions."""
  model = dataclasses.replace(MODEL, num_layers=3, pattern='FSC', expert_placement='replicated')
  model = model.with_kind(ChunkedAttention(chunk_tokens=5)).with_kind(FullAttention(rope_theta=0))
  batch = samples(LENGTHS['giant and short'])
  want = sums_of_batch(run_config(1, model=model), batch)
  assert_same(sums_of_batch(run_config(ranks, model=model), batch), want)


@pytest.mark.parametrize('ranks', [1, pytest.param(8, marks=pytest.mark.long)])
def test_attention_implementations_agree(one_rank, ranks):
  run = run_config(ranks, attention='reference')
  batch = samples(LENGTHS['giant and short'])
  assert_same(sums_of_batch(run, batch), one_rank['giant and short'])


@pytest.mark.long
def test_ragged_exchange_agrees(monkeypatch, one_rank):
  """The whole model on the emulated operation, experts spread by it too."""
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  monkeypatch.setattr('repack_jax.training.context.choose_exchange', lambda name, platform: 'ragged')
  run = run_config(4, steps=7)  # a step of its own: that of other tests is dense
  assert program(run).chosen.exchange == 'ragged'
  for name in ('giant and short', 'nearly empty'):
    (plan,) = plans_of(run, LENGTHS[name])
    assert_same(sums_of_plan(run, plan, samples(LENGTHS[name])), one_rank[name])
  plan = cases.wide_plan(4, 2, SLOTS // 4)
  batch = samples(plan.lengths)
  assert_same(sums_of_plan(run, plan, batch), sums_of_batch(run_config(1), batch))


def test_remat_changes_nothing(one_rank):
  run = run_config(1, model=dataclasses.replace(MODEL, remat='none'))
  batch = samples(LENGTHS['equal'])
  assert_same(sums_of_batch(run, batch), one_rank['equal'], tolerance=1e-5)


@pytest.mark.parametrize('ranks', [1, pytest.param(8, marks=pytest.mark.long)])
def test_micro_batches_add_up(one_rank, ranks):
  """Half the slots: the batch takes two micro-batches, of unequal sizes, and gives the same sums."""
  lengths = LENGTHS['giant and short']
  run = run_config(ranks, slots=SLOTS // 2)
  plans = plans_of(run, lengths)
  assert len(plans) == 2 and len({plan.total_tokens for plan in plans}) == 2
  assert_same(sums_of_batch(run, samples(lengths)), one_rank['giant and short'])


@pytest.mark.parametrize('ranks', [4, pytest.param(16, marks=pytest.mark.long)])
def test_no_document_sees_another(ranks):
  """Changing document A leaves document B's loss, in full and sparse layers alike, as it was to the bit."""
  run = run_config(ranks)
  a, b, c = samples([90, 60, 30])
  (plan,) = plans_of(run, [90, 60, 30])
  other_a = samples([90], seed=1)[0]
  losses = [
    sums_of_plan(run, plan, [without_targets(first), b, c], widest_program(run)).losses.cross_entropy
    for first in (a, other_a)
  ]
  assert losses[0] == losses[1] and not np.array_equal(a.tokens, other_a.tokens)


@pytest.mark.parametrize('ranks', [4, pytest.param(16, marks=pytest.mark.long)])
def test_positions_restart_in_each_sample(ranks):
  run = run_config(ranks)
  sample = samples([50])[0]
  (plan,) = plans_of(run, [50, 50])
  first, second, both = (
    sums_of_plan(run, plan, batch, widest_program(run)).losses.cross_entropy
    for batch in ([sample, without_targets(sample)], [without_targets(sample), sample], [sample, sample])
  )
  np.testing.assert_allclose(first, second, rtol=1e-6)
  np.testing.assert_allclose(first + second, both, rtol=1e-6)


@pytest.mark.parametrize('ranks', [1, pytest.param(8, marks=pytest.mark.long)])
def test_padding_is_invisible(one_rank, ranks):
  """Twice the slots, so that over half are padding: the same losses, counts and gradients."""
  run = run_config(ranks, slots=2 * SLOTS)
  batch = samples(LENGTHS['equal'])
  assert_same(sums_of_batch(run, batch), one_rank['equal'])
  tokens = sum(LENGTHS['equal'])
  counts = one_rank['equal'].losses.expert_counts
  assert (counts.sum(axis=1) == tokens * MODEL.experts_per_token).all()


@pytest.mark.parametrize('ranks', [4, pytest.param(8, marks=pytest.mark.long)])
def test_tight_expert_buffers_drop_and_count(ranks):
  model = dataclasses.replace(MODEL, expert_capacity_factor=1.0)
  run = run_config(ranks, model=model)
  losses = sums_of_batch(run, samples(LENGTHS['giant'])).losses
  assert 0 < int(losses.dropped) < losses.expert_counts.sum()
  assert np.isfinite(losses.cross_entropy)
  # Padding takes no room: mostly empty ranks drop nothing at the same tightness.
  assert int(sums_of_batch(run, samples([8] * 8)).losses.dropped) == 0


def test_block_rows_never_drop_by_default():
  assert block_rows(MODEL, 100, 8) == 100  # one expert a rank: a token goes there at most once
  assert block_rows(dataclasses.replace(MODEL, num_experts=16), 100, 8) == 200
  tight = dataclasses.replace(MODEL, expert_capacity_factor=1.0)
  assert block_rows(tight, 100, 8) == 25


@pytest.mark.parametrize(
  ('remat', 'solo', 'prefetch_layers', 'chunks'),
  [
    *[('none', False, 0, 1), ('none', True, 1, 1), ('layer', True, 0, 4), ('layer', False, 1, 1)],
    *(
      pytest.param(*case, marks=pytest.mark.long)
      for case in [('none', False, 1, 4), ('none', True, 0, 2), ('layer', True, 1, 2), ('layer', False, 0, 1)]
    ),
  ],
)
def test_two_exchanges_a_layer_and_direction(monkeypatch, remat, solo, prefetch_layers, chunks):
  """In the step's program with `ragged`: F and S layers, dispatch and combine, forward and backward: 8.

  As often as there are chunks, each with a part of the heads. None is repeated by remat; a sparse layer's
  stay on the local axis; nothing else moves activations. Solo samples add none.
  """
  monkeypatch.setattr('repack_jax.training.context.choose_exchange', lambda name, platform: 'ragged')
  model = dataclasses.replace(MODEL, remat=remat, num_layers=4, expert_placement='replicated')
  run = on_cluster(run_config(16, model=model), prefetch_layers=prefetch_layers, exchange_chunks=chunks)
  step = TrainStep(run, make_mesh(run.cluster), Decoder(model))
  plan = cases.wide_plan(16, 8, SLOTS // 16, solo)
  runs_it = step.program(plan)
  assert runs_it == Program(16, 8, (1, 2, 4, 8, 16), (1, 2, 4, 8), SLOTS // 16, 1, solo)
  arrays = pack(plan, samples(plan.lengths), runs_it)
  shapes, load = step.state_shapes(), np.zeros((4, 8), np.float32)
  gradients = jax.make_jaxpr(step.gradients, static_argnums=3)
  jaxpr = gradients(shapes.params, load, arrays, runs_it).jaxpr
  axes = [tuple(np.atleast_1d(eqn.params['axis_name'])) for eqn in equations(jaxpr, 'ragged_all_to_all')]
  assert sorted(axes) == [('local',)] * 4 * chunks + [('node', 'local')] * 4 * chunks
  assert not equations(jaxpr, 'all_to_all')
  gathers = equations(jaxpr, 'all_gather')
  (of_layer,) = {
    n for stack in step.placed['stacks'] for run in stack for n in buffer_elements(run, 'float32', step.mesh)
  }
  outside = [shapes.params[name].size // 16 for name in ('embedding', 'head')] + [MODEL.d_model // 16]
  allowed = {n * nodes for n in (of_layer, *outside) for nodes in (1, 2)}  # a rank's, and gathered over nodes
  assert all(eqn.invars[0].aval.size in allowed for eqn in gathers)  # parameters, nothing else
  assert all(eqn.params['axis_name'] in (('node',), ('local',)) for eqn in gathers)
  # Those of layers are gathered again in the backward pass, where it needs them, and not kept.
  scattered = [e for e in equations(jaxpr, 'reduce_scatter') if e.outvars[0].aval.size == of_layer]
  assert len([e for e in gathers if e.invars[0].aval.size == of_layer]) == 2 * len(scattered) > 0


@pytest.mark.parametrize(('remat', 'times'), [('layer', 4), ('layer_and_experts', 6)])
def test_exchanges_of_spread_experts(monkeypatch, remat, times):
  """There and back a layer and direction; twice in the backward pass where remat says so."""
  monkeypatch.setattr('repack_jax.training.context.choose_exchange', lambda name, platform: 'ragged')
  model = dataclasses.replace(MODEL, remat=remat)
  run = run_config(4, model=model)
  step, plan = TrainStep(run, make_mesh(run.cluster), Decoder(model)), cases.wide_plan(4, 2, SLOTS // 4)
  runs_it, state = step.program(plan), step.state_shapes()
  arrays = pack(plan, samples(plan.lengths), runs_it)
  traced = jax.make_jaxpr(step.gradients, static_argnums=3)(state.params, state.carry, arrays, runs_it)
  block = block_rows(model, SLOTS // 4, 2)
  exchanged = [eqn.invars[0].aval.shape for eqn in equations(traced.jaxpr, 'ragged_all_to_all')]
  assert exchanged.count((2 * block, model.d_model)) == 2 * times


@pytest.mark.parametrize(
  'kind', [FullAttention(), SlidingWindowAttention(window_tokens=7)], ids=lambda kind: kind.title
)
@pytest.mark.parametrize(('implementation', 'chunks'), [('dense', 1), ('ragged', 1), ('dense', 4)])
def test_attention_of_shared_and_solo_samples(monkeypatch, implementation, chunks, kind):
  """Each sample's attention is that of the sample alone, with its gradients, and NaN in padding is inert."""
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  run = run_config(4)
  mesh, plan = make_mesh(run.cluster), cases.wide_plan(4, 2, 12)
  runs_it, impl = Program.of_plan(plan), get_attention('blockwise')
  arrays = pack(plan, samples(plan.lengths), runs_it)

  def one_rank(q, k, v, grad, batch):
    q, k, v, grad, batch = jax.tree.map(lambda x: x[0], (q, k, v, grad, batch))
    out, vjp = jax.vjp(
      lambda q, k, v: repacked_attention(
        kind, q, k, v, batch, runs_it, DOMAIN_AXES, impl, implementation, chunks
      ),
      q, k, v,
    )  # fmt: skip
    return jax.tree.map(lambda x: x[None], (out, *vjp(grad)))

  on_ranks = jax.jit(
    jax.shard_map(one_rank, mesh=mesh, in_specs=RANK_BLOCKS, out_specs=RANK_BLOCKS, check_vma=False)
  )
  rng, padding = np.random.default_rng(0), arrays.segments < 0
  heads = (MODEL.num_heads, MODEL.num_kv_heads, MODEL.num_kv_heads, MODEL.num_heads)
  inputs = [rng.normal(size=(4, 12, n, MODEL.head_dim)).astype(np.float32) for n in heads]
  for x in inputs:
    x[padding] = np.nan
  results = [np.asarray(x) for x in on_ranks(*inputs, arrays)]
  assert padding.any() and all((x[padding] == 0).all() for x in results)
  # All samples end to end; rows are ranks in order, and so each sample's tokens come in order.
  place = [np.argwhere(arrays.segments == sample) for sample in range(len(plan.lengths))]
  ranks, slots = np.concatenate(place).T
  q, k, v, grad = (jnp.asarray(x[ranks, slots]) for x in inputs)
  end_to_end = jnp.repeat(jnp.arange(len(place)), np.array(plan.lengths))
  want, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, end_to_end, kind, 'reference'), q, k, v)
  for got, expected in zip(results, (want, *vjp(grad)), strict=True):
    np.testing.assert_allclose(got[ranks, slots], expected, rtol=1e-4, atol=1e-5)


def test_chunked_loss_equals_whole_logits():
  rng = np.random.default_rng(0)
  hidden, table = rng.normal(size=(11, 6)), rng.normal(size=(23, 6))
  targets = jnp.asarray([3, 22, -1, 0, 5, -1, 7, 9, 10, 22, 1])

  def whole(hidden, table):
    logp = jax.nn.log_softmax(hidden @ table.T)
    picked = jnp.take_along_axis(logp, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    return -jnp.where(targets >= 0, picked, 0).sum()

  hidden, table = jnp.float32(hidden), jnp.float32(table)
  for chunk in (1, 7, 23, 100):
    # A gradient by the table is one by its second part.
    chunked = jax.value_and_grad(
      lambda h, g, c=chunk: token_losses(c, h, Table(table, g), targets).sum(), argnums=(0, 1)
    )
    got = chunked(hidden, jnp.zeros_like(table))
    want = jax.value_and_grad(whole, argnums=(0, 1))(hidden, table)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def test_stacks_cover_the_layers_in_order():
  model = dataclasses.replace(MODEL, num_layers=15, pattern='FSSS', dense_layers=2)
  found = stacks(model)
  assert [(s.first, s.runs, s.repeats) for s in found] == [
    (0, (1, 1), 1), (2, (2,), 1), (4, (1, 3), 2), (12, (1, 2), 1)
  ]  # fmt: skip
  assert [int(i) for s in found for r in range(s.repeats) for run in range(len(s.runs))
          for i in s.run_layers(run)[r]] == list(range(15))  # fmt: skip


def test_flops_by_hand():
  model = dataclasses.replace(
    MODEL, num_experts=0, dense_width=64, d_model=64, num_layers=2, remat='none', loss_vocab_chunk=256
  )
  linear = flops.linear_flops_per_token(model)
  by_hand = 2 * (2 * 64 * (32 + 8 + 32) * 4 + 6 * 64 * 64) + 2 * 64 * 256
  assert linear == by_hand
  pairs = SlidingWindowAttention(window_tokens=4).pairs(np.array([1, 4, 10]))
  assert pairs.tolist() == [1, 10, 10 + 6 * 4]
  assert FullAttention().pairs(10) == 55
  assert flops.sample_flops(model, 10) == 10 * linear + 4 * 128 * (55 + model.kind('S').pairs(10))


def test_plan_of_another_batch_is_refused():
  run = run_config(4)
  plan = Plan((0,), (5,), (Group(0, 4, (0,)),), (Group(0, 4, (0,)),), 'repack', 64, 4, 4, 2)
  with pytest.raises(ValueError, match='made for another batch'):
    sums_of_plan(run, plan, samples([6]))
