"""Layers by halo: the same attention, losses and gradients on any plan, and only a shift a hop."""

import dataclasses
import functools

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
  plans_of,
  run_config,
  samples,
  sums_of_batch,
  sums_of_plan,
  widest_program,
  without_targets,
)
from test_precision import HALF, SINGLE, assert_near

from models.transformer import Decoder
from repack_jax.exchange.attention import repacked_attention
from repack_jax.kinds import ChunkedAttention, FullAttention, SlidingWindowAttention
from repack_jax.ops.attention import attention, get_attention
from repack_jax.parallel.mesh import DOMAIN_AXES, RANK_BLOCKS, make_mesh
from repack_jax.plan.arrays import pack
from repack_jax.plan.plan import CHILDREN, MOST_HALO_HOPS, PARENTS, Group, Plan, PlanError
from repack_jax.plan.program import Program
from repack_jax.training.step import TrainStep


def one_group(lengths, ranks, capacity_tokens=8, row_tokens=1) -> Plan:
  group = Group(0, ranks, tuple(range(len(lengths))))
  ids = tuple(range(len(lengths)))
  return Plan(
    ids, tuple(lengths), (group,), (group,), 'parents', capacity_tokens, ranks, ranks, ranks,
    row_tokens=row_tokens,
  ).validate()  # fmt: skip


@pytest.mark.parametrize(
  ('lengths', 'ranks', 'halo_tokens', 'hops'),
  [
    ([16], 4, 0, 0),
    ([16], 4, 1, 1),
    ([16], 4, 4, 1),
    ([16], 4, 5, 2),  # of the last rank's first token, at 12: back to 7
    ([16], 4, 2**40, 3),
    ([4, 4, 4, 4], 4, 2**40, 0),  # every rank begins a sample
    ([1] * 16, 4, 7, 0),
    ([4, 12], 4, 2**40, 2),
    ([6, 10], 4, 2**40, 2),
    ([2], 4, 5, 2),  # ranks 1 and 3 hold a token each
    ([3], 8, 1, 3),  # ranks 2, 5 and 7
    ([], 4, 5, 0),
  ],
)
def test_hops_by_hand(lengths, ranks, halo_tokens, hops):
  assert one_group(lengths, ranks).halo_hops(halo_tokens) == hops


@pytest.mark.parametrize('seed', range(20))
def test_hops_reach_what_first_tokens_see(seed):
  """By the packed arrays, token by token."""
  rng = np.random.default_rng(seed)
  row = int(rng.choice([1, 2]))
  plan = cases.random_plan(rng, 16, 8, 16, 4, solo=0.3, row_tokens=row)
  arrays, halo_tokens = cases.packed(plan), int(rng.integers(0, 12))
  hops = 0
  for child in plan.children:
    of = np.repeat(np.arange(child.size), plan.shared_tokens[child.first_rank : child.end_rank])
    for place, rank in enumerate(child.ranks):
      if plan.shared_tokens[rank]:
        first = int(np.argmax(of == place))
        back = min(halo_tokens, int(arrays.positions[rank, 0]))
        hops = max(hops, place - int(of[first - back]))
  assert plan.halo_hops(halo_tokens) == hops


def test_a_program_serves_plans_whose_halos_it_reaches():
  plan = one_group([16], 4)
  own = Program.of_plan(plan.with_halo(5))
  assert own == Program.of_plan(plan)._replace(halo_tokens=5, halo_hops=2)
  # By halo or not, a plan is the same layout: any program that reaches far enough runs it.
  for served in (plan, plan.with_halo(5), plan.with_halo(9)):
    assert own.serves(served) and Program.of_plan(plan).serves(served)
  with pytest.raises(PlanError, match=r'halos of 5 tokens come from 2 ranks; the program knows 1\. Make the'):
    own._replace(halo_hops=1).check(plan)
  assert plan.digest() != plan.with_halo(0).digest() != plan.with_halo(5).digest()


def test_slots_of_a_kind():
  program = Program(
    4, 4, (4,), (4,), capacity_tokens=8, row_tokens=1, has_solo=False, halo_tokens=11, halo_hops=1
  )
  assert SlidingWindowAttention(window_tokens=12).halo_slots(program) == 8  # all that one rank may hold
  assert ChunkedAttention(chunk_tokens=5).halo_slots(program) == 4
  assert SlidingWindowAttention(window_tokens=1).halo_slots(program) == 0
  assert SlidingWindowAttention(window_tokens=13).halo_slots(program) is None  # further than hops are counted
  assert FullAttention().halo_slots(program) is None
  assert SlidingWindowAttention().halo_slots(program._replace(halo_tokens=None)) is None


@functools.cache
def on_ranks(kind, runs_it: Program):
  """Jitted attention of four ranks, and its gradients: arrays [ranks, slots, ...] and a plan's."""
  mesh, impl = make_mesh(run_config(4).cluster), get_attention('blockwise')

  def one_rank(q, k, v, grad, batch):
    q, k, v, grad, batch = jax.tree.map(lambda x: x[0], (q, k, v, grad, batch))

    def attend(q, k, v):
      return repacked_attention(kind, q, k, v, batch, runs_it, DOMAIN_AXES, impl)

    out, vjp = jax.vjp(attend, q, k, v)
    return jax.tree.map(lambda x: x[None], (out, *vjp(grad)))

  return jax.jit(
    jax.shard_map(one_rank, mesh=mesh, in_specs=RANK_BLOCKS, out_specs=RANK_BLOCKS, check_vma=False)
  )


PLANS = {
  'giant': one_group([48], 4, 12),
  'one token each': one_group([1] * 48, 4, 12),
  'ranks of two tokens': one_group([8], 4, 12),
  'empty ranks': one_group([3], 4, 12),
  'rows': one_group([5, 20, 8], 4, 12, row_tokens=4),
  'children of all sizes, and solo samples': cases.wide_plan(4, 2, 12),
}


@pytest.mark.parametrize(
  'kind',
  [
    *(SlidingWindowAttention(window_tokens=n) for n in (1, 2, 7, 2**40)),
    *(ChunkedAttention(chunk_tokens=n) for n in (5, 16)),
  ],
  ids=lambda kind: kind.describe(),
)
def test_attention_by_halo(kind):
  """Each sample's attention is that of the sample alone, with its gradients, and NaN in padding is inert."""
  runs_it = Program(
    4, 4, (1, 2, 4), (1, 2, 4), 12, 1, has_solo=False, halo_tokens=kind.halo_tokens, halo_hops=3
  )
  for name, plan in PLANS.items():
    arrays = pack(plan, samples(plan.lengths), runs_it._replace(has_solo=True))
    rng, padding = np.random.default_rng(0), arrays.segments < 0
    heads = (8, 2, 2, 8)
    inputs = [rng.normal(size=(4, 12, n, MODEL.head_dim)).astype(np.float32) for n in heads]
    for x in inputs:
      x[padding] = np.nan
    results = [np.asarray(x) for x in on_ranks(kind, runs_it)(*inputs, arrays)]
    assert all((x[padding] == 0).all() for x in results), name
    # All samples end to end; rows are ranks in order, and so each sample's tokens come in order.
    place = [np.argwhere(arrays.segments == sample) for sample in range(len(plan.lengths))]
    ranks, slots = np.concatenate(place).T
    q, k, v, grad = (jnp.asarray(x[ranks, slots]) for x in inputs)
    end_to_end = jnp.repeat(jnp.arange(len(place)), np.array(plan.lengths))
    want, vjp = jax.vjp(lambda *qkv, of=end_to_end: attention(*qkv, of, kind, 'reference'), q, k, v)
    for got, expected in zip(results, (want, *vjp(grad)), strict=True):
      np.testing.assert_allclose(got[ranks, slots], expected, rtol=1e-4, atol=1e-5, err_msg=name)


@functools.cache
def one_rank(name: str):
  return sums_of_batch(run_config(1), samples(LENGTHS[name]))


def by_halo(run, row_tokens: int = 1, hops: int = MOST_HALO_HOPS) -> Program:
  """A program that serves every plan of the run whose halos come from no more ranks."""
  return widest_program(run, row_tokens)._replace(halo_tokens=MODEL.kind('S').halo_tokens, halo_hops=hops)


@pytest.mark.parametrize('ranks', [4, pytest.param(32, marks=pytest.mark.long)])
def test_loss_and_gradients_do_not_depend_on_mesh_and_mode(ranks):
  """Parents as children, children of their own, solo samples; windows of 7 where ranks may hold one token."""
  run = run_config(ranks)
  plans = {(name, *plans_of(run, LENGTHS[name], mode)) for name in LENGTHS for mode in ('parents', 'solve')}
  served = [(name, plan) for name, plan in sorted(plans, key=str) if by_halo(run).serves(plan)]
  # A sample over ranks that are mostly empty is left to the exchange of heads.
  assert {name for name, _ in plans} - {name for name, _ in served} <= {'nearly empty'}
  assert any(plan.halo_hops(6) > 0 and plan.widest(PARENTS) == ranks for _, plan in served)
  for name, plan in served:
    assert_same(sums_of_plan(run, plan, samples(LENGTHS[name]), by_halo(run)), one_rank(name))


@pytest.mark.long
def test_random_legal_plans_agree_with_one_rank():
  run, several = run_config(16), 0
  for seed in range(30):
    rng = np.random.default_rng(seed)
    row = 4 if seed % 3 == 2 else 1
    plan = cases.random_plan(
      rng, 16, SLOTS // 16, 16, run.cluster.ranks_per_node, solo=0.7 * (seed % 2), row_tokens=row
    )
    if plan.lengths and by_halo(run, row).serves(plan):
      several += plan.halo_hops(6) > 1
      batch = samples(plan.lengths, seed)
      got = sums_of_plan(run, plan, batch, by_halo(run, row))
      assert_same(got, sums_of_batch(run_config(1), batch))
  assert several


def test_gradients_in_bfloat16_are_those_in_float32():
  """A token's gradients come back from up to four ranks, and are added in bfloat16."""
  one, run = run_config(1, model=SINGLE), run_config(4, model=HALF)
  for lengths in ([110, 40, 30, 20, 5, 1], [9, 9]):
    plan = dataclasses.replace(one_group(lengths, 4, SLOTS // 4), ranks_per_node=2)
    assert 0 < plan.halo_hops(6) <= MOST_HALO_HOPS
    batch = samples(lengths)
    assert_near(sums_of_plan(run, plan, batch, by_halo(run)), sums_of_batch(one, batch), 0.1)


@pytest.mark.parametrize('remat', ['none', 'layer'])
def test_a_shift_a_hop_and_direction(monkeypatch, remat):
  """In the step's program: F layers exchange heads, S layers shift keys and values, twice a hop."""
  monkeypatch.setattr('repack_jax.training.context.choose_exchange', lambda name, platform: 'ragged')
  model = dataclasses.replace(MODEL, remat=remat, num_layers=4, expert_placement='replicated')
  run = run_config(16, model=model)
  step = TrainStep(run, make_mesh(run.cluster), Decoder(model))
  plan = cases.wide_plan(16, 8, SLOTS // 16, solo=True).with_halo(6)
  runs_it = step.program(plan)
  assert (runs_it.halo_tokens, runs_it.halo_hops, runs_it.span(CHILDREN)) == (6, 1, 8)
  for hops in (1, 2):
    runs_it = runs_it._replace(halo_hops=hops)
    arrays = pack(plan, samples(plan.lengths), runs_it)
    gradients = jax.make_jaxpr(step.gradients, static_argnums=3)
    jaxpr = gradients(step.state_shapes().params, np.zeros((4, 8), np.float32), arrays, runs_it).jaxpr
    shifts = equations(jaxpr, 'ppermute')
    # Two stacks' worth of layers, FS twice, are one body: of each pass and hop one.
    assert len(shifts) == 2 * hops
    assert all(np.atleast_1d(eqn.params['axis_name']).tolist() == ['local'] for eqn in shifts)
    assert all(eqn.invars[0].aval.shape == (6, 2 * MODEL.num_kv_heads, MODEL.head_dim) for eqn in shifts)
    axes = [tuple(np.atleast_1d(e.params['axis_name'])) for e in equations(jaxpr, 'ragged_all_to_all')]
    assert axes == [('node', 'local')] * 4
    assert not equations(jaxpr, 'all_to_all')


def test_no_document_sees_another():
  """Changing document A leaves document B's loss as it was to the bit, with B's halo full of A's tokens."""
  run = run_config(4)
  a, b = samples([100, 90])
  plan = dataclasses.replace(one_group([100, 90], 4, SLOTS // 4), ranks_per_node=2)
  other_a = samples([100], seed=1)[0]
  losses = [
    sums_of_plan(run, plan, [without_targets(first), b], by_halo(run)).losses.cross_entropy
    for first in (a, other_a)
  ]
  assert losses[0] == losses[1] and not np.array_equal(a.tokens, other_a.tokens)
  assert plan.widest(PARENTS) == 4
