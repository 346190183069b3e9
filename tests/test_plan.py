"""Plans and what is packed from them: values worked by hand, every rule broken once, each token once."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import cases
import numpy as np
import pytest

from repack_jax import cost, flops
from repack_jax.arrays import NO_TARGET, PADDING_SEGMENT, pack, route_arrays
from repack_jax.config import FULL, SPARSE, ClusterConfig, ModelConfig
from repack_jax.data.samples import Sample
from repack_jax.plan import DOMAIN, LOCAL, Group, Plan, PlanError

ROOT = Path(__file__).resolve().parents[1]


def one_group_plan(length: int, ranks: int, capacity: int) -> Plan:
  group = (Group(0, ranks, (0,)),)
  return Plan((0,), (length,), group, group, 'parents', capacity, ranks, ranks, ranks).validate()


def document(number: int, length: int) -> Sample:
  """Tokens 1 ... length of document 0, 1001 ... of document 1, and so on, so that each token is known."""
  tokens = np.arange(1, length + 1, dtype=np.int32) + 1000 * number
  return Sample(number, 0, tokens, np.append(tokens[1:], NO_TARGET).astype(np.int32))


def packed(plan: Plan):
  batch = [document(number, length) for number, length in enumerate(plan.lengths)]
  widest = {kind: plan.ranks_per_node if plan.scope(kind) == LOCAL else plan.domain_ranks for kind in 'FS'}
  return pack(plan, batch, widest)


# Two nodes of two ranks: an SP4 parent over both, its children SP2 on node 0 and twice SP1 on node 1.
PLAN = Plan(
  sample_ids=(5, 2, 7, 4),
  lengths=(5, 3, 2, 1),
  parents=(Group(0, 4, (0, 1, 3, 2)),),
  children=(Group(0, 2, (0, 1)), Group(2, 1, (3, 2)), Group(3, 1)),
  mode='repack',
  capacity_tokens=4,
  num_ranks=4,
  domain_ranks=4,
  ranks_per_node=2,
).validate(num_heads=8, num_kv_heads=2)


def changed(**values: object) -> Plan:
  return dataclasses.replace(PLAN, **values)


def test_labels_are_shifted_before_splitting():
  arrays = packed(one_group_plan(8, ranks=2, capacity=5))
  assert arrays.tokens.tolist() == [[1, 2, 3, 4, 0], [5, 6, 7, 8, 0]]
  assert arrays.targets.tolist() == [[2, 3, 4, 5, -1], [6, 7, 8, -1, -1]]
  assert arrays.positions.tolist() == [[0, 1, 2, 3, 0], [4, 5, 6, 7, 0]]
  assert arrays.segments.tolist() == [[0, 0, 0, 0, -1], [0, 0, 0, 0, -1]]


def test_length_that_ranks_do_not_divide():
  plan = one_group_plan(13, ranks=4, capacity=4)
  assert plan.rank_tokens.tolist() == [3, 3, 3, 4]
  assert [row[row > 0].tolist() for row in packed(plan).tokens] == [
    [1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12, 13],
  ]  # fmt: skip


def test_plan_by_hand():
  assert PLAN.rank_tokens.tolist() == [4, 4, 3, 0]
  full, sparse = PLAN.layout(FULL), PLAN.layout(SPARSE)
  assert (full.first_rank.tolist(), full.size.tolist()) == ([0, 0, 0, 0], [4, 4, 4, 4])
  assert full.stream_start.tolist() == [0, 4, 8, 11]
  assert (sparse.first_rank.tolist(), sparse.size.tolist()) == ([0, 0, 2, 3], [2, 2, 1, 1])
  assert sparse.stream_start.tolist() == [0, 4, 0, 0]
  assert full.tokens.tolist() == sparse.tokens.tolist() == PLAN.rank_tokens.tolist()
  assert (PLAN.scope(FULL), PLAN.scope(SPARSE)) == (DOMAIN, LOCAL)
  assert (PLAN.widest(FULL), PLAN.widest(SPARSE), PLAN.total_tokens) == (4, 2, 11)
  assert PLAN.imbalance == 4 / (11 / 4)
  assert PLAN.child_sizes() == {1: 1, 2: 1}  # the child that holds nothing is not counted


def test_arrays_by_hand():
  batch = [document(number, length) for number, length in enumerate((9, 9, 3, 9, 1, 5, 9, 2))]
  arrays = pack(PLAN, batch, {FULL: 4, SPARSE: 2})  # sample_ids are places in this batch
  assert arrays.tokens.tolist() == [
    [5001, 5002, 5003, 5004],
    [5005, 2001, 2002, 2003],
    [4001, 7001, 7002, 0],
    [0, 0, 0, 0],
  ]
  assert arrays.targets.tolist() == [
    [5002, 5003, 5004, 5005],
    [-1, 2002, 2003, -1],
    [-1, 7002, -1, -1],
    [-1, -1, -1, -1],
  ]
  assert arrays.positions.tolist() == [[0, 1, 2, 3], [4, 0, 1, 2], [0, 0, 1, 0], [0, 0, 0, 0]]
  assert arrays.segments.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1], [3, 2, 2, -1], [-1, -1, -1, -1]]
  assert arrays.full.log2_size.tolist() == [2, 2, 2, 2]
  assert arrays.full.first.tolist() == [0, 0, 0, 0]
  assert arrays.full.place.tolist() == [0, 1, 2, 3]
  assert arrays.full.counts.tolist() == [[4, 4, 3, 0]] * 4
  assert arrays.full.segments.tolist() == [[0] * 5 + [1] * 3 + [3, 2, 2] + [-1] * 5] * 4
  assert arrays.sparse.log2_size.tolist() == [1, 1, 0, 0]
  assert arrays.sparse.first.tolist() == [0, 0, 0, 1]  # counted from the start of the node
  assert arrays.sparse.place.tolist() == [0, 1, 0, 0]
  assert arrays.sparse.counts.tolist() == [[4, 4], [4, 4], [3, 0], [0, 0]]
  assert arrays.sparse.segments.tolist() == [
    [0] * 5 + [1] * 3, [0] * 5 + [1] * 3, [3, 2, 2] + [-1] * 5, [-1] * 8,
  ]  # fmt: skip
  leaves = [*arrays[:4], *arrays.full, *arrays.sparse]
  assert all(leaf.dtype == np.int32 and leaf.shape[0] == 4 for leaf in leaves)


def test_table_by_hand():
  assert PLAN.table() == (
    'plan 661a9262145805a0: mode repack, 4 samples, 11 tokens on 4 ranks x 4 slots, imbalance 1.455\n'
    'group                        samples   tokens  a rank  longest\n'
    'parent SP4 @0                      4       11       4        5\n'
    '  child SP2 @0                     2        8       4        5\n'
    '  child SP1 @2                     2        3       3        2\n'
    '  child SP1 @3                     0        0       0        0'
  )
  assert one_group_plan(8, 2, 5).table().count('\n') == 2  # a parent that is its own child is one row


def test_digest_is_pinned_and_the_same_everywhere():
  assert PLAN.digest() == '661a9262145805a0'
  code = 'import test_plan; print(test_plan.PLAN.digest(), hash(test_plan.PLAN) == hash(test_plan.changed()))'
  for seed in ('0', '1234'):
    env = os.environ | {'PYTHONHASHSEED': seed, 'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "tests"}'}
    shown = subprocess.run([sys.executable, '-c', code], env=env, check=True, capture_output=True, text=True)
    assert shown.stdout.split() == ['661a9262145805a0', 'True']
  different = [
    changed(sample_ids=(5, 2, 7, 3)), changed(lengths=(5, 3, 2, 2)), changed(capacity_tokens=5),
    changed(mode='static'), changed(children=(Group(0, 2, (1, 0)), *PLAN.children[1:])),
    changed(ranks_per_node=4),
  ]  # fmt: skip
  assert len({plan.digest() for plan in (PLAN, *different)}) == 7


TWO, ONE, EMPTY = PLAN.children


@pytest.mark.parametrize(
  ('broken', 'message'),
  [
    (changed(sample_ids=(5, 2, 7)), '3 sample ids for 4 lengths'),
    (changed(sample_ids=(5, 2, 7, 7)), 'sample 7 is in the plan more than once'),
    (changed(lengths=(5, 0, 2, 1)), 'sample 2 has length 0; lengths are at least 1 token'),
    (changed(children=(Group(0, 3, (0, 1)), EMPTY)), 'SP3 on ranks 0..2: its size is not a power of two'),
    (changed(parents=(Group(0, 8, (0, 1, 3, 2)),)), 'SP8 on ranks 0..7: wider than a domain of 4 ranks'),
    (
      changed(children=(Group(0, 1), Group(1, 2, (0, 1, 3, 2)), EMPTY)),
      'child SP2 on ranks 1..2: its first rank is not a multiple of its size',
    ),
    (changed(children=(TWO, EMPTY)), 'child SP1 on ranks 3..3: expected to start at rank 2'),
    (changed(children=(TWO, TWO, ONE, EMPTY)), 'child SP2 on ranks 0..1: expected to start at rank 2'),
    (changed(children=(TWO, ONE)), 'the child groups end at rank 3 of 4'),
    (changed(parents=()), 'the parent groups end at rank 0 of 4'),
    (changed(children=(TWO, Group(2, 1, (3,)), EMPTY)), 'sample 7 is in 0 child groups; it must be in one'),
    (
      changed(children=(TWO, ONE, Group(3, 1, (0,)))),
      'sample 5 is in 2 child groups; it must be in one',
    ),
    (
      changed(parents=(Group(0, 4, (0, 1, 3, 2, 0)),)),
      'sample 5 is in 2 parent groups; it must be in one',
    ),
    (
      changed(parents=(Group(0, 4, (0, 1, 3, 2, 4)),)),
      'a parent group names a sample that the plan does not have',
    ),
    (
      changed(parents=(Group(0, 2, (0, 1)), Group(2, 1, (3, 2)), Group(3, 1)),
              children=(Group(0, 4, (0, 1, 3, 2)),)),
      'child SP4 on ranks 0..3 is not inside parent SP2 on ranks 0..1',
    ),
    (
      changed(ranks_per_node=1),
      'child SP2 on ranks 0..1 spans nodes of 1 ranks; only a parent that keeps the wide layout',
    ),
    (
      changed(parents=(Group(0, 4, (0, 1, 2, 3)),)),
      "parent SP4 on ranks 0..3: its stream is not its children's streams end to end",
    ),
    (changed(mode='parents'), 'mode parents: children must equal parents'),
    (changed(mode='static'), 'mode static: children must equal parents'),
    (changed(capacity_tokens=3), 'rank 0 holds 4 tokens, over its capacity of 3'),
  ],
)  # fmt: skip
def test_each_rule_is_checked(broken, message):
  with pytest.raises(PlanError) as caught:
    broken.validate()
  assert message in str(caught.value)


@pytest.mark.parametrize(
  ('heads', 'message'),
  [
    ((6, 6), 'parent SP4 on ranks 0..3: its size fits neither way with 6 heads'),
    ((2, 1), 'parent SP4 on ranks 0..3: its size does not divide the 2 query heads'),
    ((12, 3), 'parent SP4 on ranks 0..3: its size fits neither way with 3 heads'),
  ],
)
def test_sizes_must_fit_the_heads(heads, message):
  with pytest.raises(PlanError) as caught:
    PLAN.validate(*heads)
  assert message in str(caught.value)
  assert PLAN.validate(4, 1) is PLAN


def test_wide_layout_may_be_kept_by_the_whole_parent():
  wide = changed(children=PLAN.parents).validate()
  assert wide.scope(SPARSE) == DOMAIN


def random_plans(number: int):
  rng = np.random.default_rng(number)
  for ranks, node, domain in ((1, 1, 1), (2, 1, 2), (8, 8, 8), (16, 4, 8), (32, 8, 32)):
    yield cases.random_plan(rng, ranks, 7, domain, ranks_per_node=node, domain_ranks=domain)


@pytest.mark.parametrize('seed', range(20))
def test_each_token_is_packed_once(seed):
  for plan in random_plans(seed):
    arrays = packed(plan)
    held = np.arange(plan.capacity_tokens) < plan.rank_tokens[:, None]
    assert (arrays.segments[~held] == PADDING_SEGMENT).all() and (arrays.targets[~held] == NO_TARGET).all()
    assert (arrays.tokens[~held] == 0).all() and (arrays.positions[~held] == 0).all()
    documents = [document(number, length) for number, length in enumerate(plan.lengths)]
    tokens = np.concatenate([np.empty(0, np.int64), *(d.tokens for d in documents)])
    assert sorted(arrays.tokens[held].tolist()) == sorted(tokens.tolist())
    for number, sample in enumerate(documents):
      mine = arrays.segments == number  # rows are ranks in order, and so the sample's tokens come in order
      assert arrays.tokens[mine].tolist() == sample.tokens.tolist()
      assert arrays.targets[mine].tolist() == sample.targets.tolist()
      assert arrays.positions[mine].tolist() == list(range(len(sample)))


@pytest.mark.parametrize('seed', range(20))
def test_routes_say_who_holds_what(seed):
  for plan in random_plans(seed):
    arrays = packed(plan)
    for kind, route in ((FULL, arrays.full), (SPARSE, arrays.sparse)):
      layout = plan.layout(kind)
      scope = plan.ranks_per_node if plan.scope(kind) == LOCAL else plan.domain_ranks
      for rank in range(plan.num_ranks):
        size, place = 1 << route.log2_size[rank], route.place[rank]
        assert size == layout.size[rank] and route.counts[rank, place] == plan.rank_tokens[rank]
        assert rank // scope * scope + route.first[rank] + place == rank
        assert (route.counts[rank, size:] == 0).all()
        # What the rank holds is one contiguous run of its group's stream.
        start = route.counts[rank, :place].sum()
        assert start == layout.stream_start[rank]
        mine = route.segments[rank, start : start + plan.rank_tokens[rank]]
        assert mine.tolist() == arrays.segments[rank, : plan.rank_tokens[rank]].tolist()
        assert (route.segments[rank, route.counts[rank].sum() :] == PADDING_SEGMENT).all()


def test_arrays_have_the_same_shapes_for_every_plan_of_a_scope():
  shapes = set()
  for seed in range(10):
    plan = cases.random_plan(np.random.default_rng(seed), 16, 5, 16, ranks_per_node=4)
    shapes.add((plan.scope(FULL), route_arrays(plan, FULL, 16).counts.shape))
  assert shapes <= {(LOCAL, (16, 4)), (DOMAIN, (16, 16))} and len(shapes) == 2


def test_plan_of_another_batch_is_refused():
  batch = [document(number, 9) for number in range(8)]
  with pytest.raises(ValueError, match='sample 5 has 9 tokens, its plan says 5: this plan was made for'):
    pack(PLAN, batch, {FULL: 4, SPARSE: 2})


MODEL = ModelConfig(
  d_model=8, num_layers=3, pattern='FSS', num_heads=4, num_kv_heads=2, head_dim=2, window_tokens=3,
  num_experts=4, experts_per_token=2, expert_width=5, shared_expert_width=3, dense_layers=1, dense_width=7,
  vocab_size=256,
)  # fmt: skip


def test_flops_by_hand():
  assert flops.attention_pairs(np.array([1, 3, 5]), None).tolist() == [1, 6, 15]
  assert flops.attention_pairs(np.array([1, 3, 5]), 3).tolist() == [1, 6, 3 + 3 + 6]
  assert flops.projection_flops_per_token(MODEL) == 2 * 8 * (8 + 4 + 4 + 8)
  assert flops.feed_forward_flops_per_token(MODEL, 0) == 3 * 2 * 8 * 7
  assert flops.feed_forward_flops_per_token(MODEL, 1) == 3 * 2 * 8 * (2 * 5 + 3) + 2 * 8 * 4
  linear = 3 * 384 + 336 + 2 * 688 + 2 * 8 * 256
  assert flops.linear_flops_per_token(MODEL) == linear
  # Scores and weighted values: two products of 2 * (4 heads x 2) a pair.
  assert flops.attention_flops(MODEL, 5, FULL) == 2 * 2 * 8 * 15
  assert flops.sample_flops(MODEL, 5) == 5 * linear + 2 * 2 * 8 * (15 + 12 + 12)


def test_bytes_by_hand():
  # 4 query and 2 key/value heads of 2 floats: SP1 sends 4 + 2 * 2 and 4 heads to itself, and so on.
  for degree, heads in ((1, 12), (2, 6), (4, 4)):
    assert cost.exchanged_bytes_per_peer(MODEL, degree) == 2 * heads * 2 * 4
  # PLAN: in the full layer each of 11 tokens has two peers in the other node; no child leaves its node.
  assert cost.cross_node_bytes(PLAN, MODEL) == 11 * 2 * 64
  wide = changed(children=PLAN.parents).validate()
  assert cost.cross_node_bytes(wide, MODEL) == 3 * 11 * 2 * 64


def test_seconds_by_hand():
  cluster = ClusterConfig(
    nodes=2, ranks_per_node=2, matmul_flops_per_s=100, attention_flops_per_s=100, intra_node_bytes_per_s=64, inter_node_bytes_per_s=8
  )
  model = cost.CostModel(cluster, MODEL)
  linear = flops.linear_flops_per_token(MODEL)
  assert model.linear_s(5, 4) == pytest.approx(3 * 5 * linear / 100 / 4)
  assert model.attention_s(5, 2, SPARSE) == pytest.approx(2 * 3 * 32 * 12 / 100 / 2)
  # SP4: one peer in the node, two outside; 5/4 tokens of 64 bytes to each.
  assert model.exchange_s(5, 4, FULL) == pytest.approx(5 / 4 * (64 / 64 + 2 * 64 / 8))
  assert model.exchange_s(5, 1, FULL) == 0
  parts = model.linear_s(5, 4) + sum(model.attention_s(5, 4, k) + model.exchange_s(5, 4, k) for k in 'FS')
  assert model.parent_s(5, 4) == pytest.approx(parts)
  full = model.attention_s(5, 4, FULL) + model.exchange_s(5, 4, FULL)
  assert model.child_s(5, 4) == pytest.approx(parts - full)
  assert model.parent_s(np.array([5, 9]), 4).shape == (2,)
