"""Plans, what is packed from them and what they cost: values worked by hand, every rule broken once."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import cases
import jax
import numpy as np
import pytest

from models.transformer import init_parameters
from repack_jax.config import FULL, SPARSE, ClusterConfig, ModelConfig, PlannerConfig
from repack_jax.data.samples import Sample
from repack_jax.kinds import SlidingWindowAttention
from repack_jax.parallel.sharded import EXPERT_NAMES, leaf_name
from repack_jax.plan.arrays import NO_TARGET, PADDING_SEGMENT, pack, route_arrays
from repack_jax.plan.plan import DOMAIN, LOCAL, Group, Plan, PlanError, Program
from repack_jax.predict import cost_model as cost
from repack_jax.predict import flops
from repack_jax.predict import sizes as memory

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

# The same with solo samples on ranks 0 and 3, on rank 3 two.
SOLO = dataclasses.replace(
  PLAN,
  sample_ids=(5, 2, 7, 4, 0, 8, 1),
  lengths=(5, 3, 2, 1, 2, 1, 3),
  solo=(Group(0, 1, (4,)), Group(3, 1, (6, 5))),
  mode='solve',
  capacity_tokens=6,
).validate(num_heads=8, num_kv_heads=2)


def changed(plan: Plan = PLAN, **values: object) -> Plan:
  return dataclasses.replace(plan, **values)


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
  assert full.slots.tolist() == sparse.slots.tolist() == PLAN.rank_tokens.tolist()
  assert (PLAN.scope(FULL), PLAN.scope(SPARSE)) == (DOMAIN, LOCAL)
  assert (PLAN.widest(FULL), PLAN.widest(SPARSE), PLAN.total_tokens) == (4, 2, 11)
  assert PLAN.imbalance == 4 / (11 / 4)
  assert PLAN.child_sizes() == {1: 1, 2: 1}  # the child that holds nothing is not counted
  assert PLAN.program == Program(DOMAIN, LOCAL, 4, False)


def test_solo_plan_by_hand():
  """Solo samples count on their ranks, and in nothing that exchanges."""
  assert SOLO.shared_tokens.tolist() == [4, 4, 3, 0] and SOLO.rank_tokens.tolist() == [6, 4, 3, 4]
  for kind in (FULL, SPARSE):
    for ours, without in zip(vars(SOLO.layout(kind)).values(), vars(PLAN.layout(kind)).values(), strict=True):
      assert ours.tolist() == without.tolist()
  assert SOLO.total_tokens == 17 and SOLO.imbalance == 6 / (17 / 4)
  assert (SOLO.child_sizes(), SOLO.widest(FULL)) == (PLAN.child_sizes(), 4)
  assert SOLO.program == Program(DOMAIN, LOCAL, 6, True)
  only_solo = changed(SOLO, lengths=(3,), sample_ids=(9,), solo=(Group(1, 1, (0,)),),
                      parents=(Group(0, 4),), children=(Group(0, 2), Group(2, 2)))  # fmt: skip
  assert only_solo.validate().rank_tokens.tolist() == [0, 3, 0, 0] and not only_solo.shared_tokens.any()


def test_whole_rows_by_hand():
  """Children of 8 and 3 tokens in rows of 3: a padding slot behind the last token of the first."""
  solo = (Group(1, 1, (4,)),)
  plan = changed(PLAN, lengths=(5, 3, 2, 1, 2), sample_ids=(0, 1, 2, 3, 4), solo=solo, mode='solve',
                 row_tokens=3, capacity_tokens=9).validate()  # fmt: skip
  assert plan.shared_tokens.tolist() == [3, 5, 3, 0] and plan.shared_slots.tolist() == [3, 6, 3, 0]
  assert plan.rank_tokens.tolist() == [3, 7, 3, 0] and plan.rank_slots.tolist() == [3, 8, 3, 0]
  assert plan.layout(FULL).stream_start.tolist() == [0, 3, 9, 12]
  arrays = packed(plan)
  assert arrays.full.counts[0].tolist() == [3, 6, 3, 0]
  assert arrays.full.segments[0, :13].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, -1, 3, 2, 2, -1]
  assert arrays.segments[1].tolist() == [0, 0, 1, 1, 1, -1, 4, 4, -1]
  assert plan.with_slots(2).capacity_tokens == 9 and plan.with_slots(1).capacity_tokens == 9
  for capacity, message in ((8, 'capacity of 8 is not a multiple of 3'), (6, 'rank 1 holds 8 tokens, over')):
    with pytest.raises(PlanError, match=message):
      changed(plan, capacity_tokens=capacity).validate()


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


def test_solo_samples_are_packed_behind_the_stream():
  batch = [document(number, length) for number, length in enumerate((2, 3, 3, 9, 1, 5, 9, 2, 1))]
  arrays = pack(SOLO, batch, {FULL: 4, SPARSE: 2})
  assert arrays.tokens.tolist() == [
    [5001, 5002, 5003, 5004, 1, 2],
    [5005, 2001, 2002, 2003, 0, 0],
    [4001, 7001, 7002, 0, 0, 0],
    [1001, 1002, 1003, 8001, 0, 0],
  ]
  assert arrays.targets.tolist() == [
    [5002, 5003, 5004, 5005, 2, -1],
    [-1, 2002, 2003, -1, -1, -1],
    [-1, 7002, -1, -1, -1, -1],
    [1002, 1003, -1, -1, -1, -1],
  ]
  assert arrays.positions.tolist() == [
    [0, 1, 2, 3, 0, 1],
    [4, 0, 1, 2, 0, 0],
    [0, 0, 1, 0, 0, 0],
    [0, 1, 2, 0, 0, 0],
  ]
  assert arrays.segments.tolist() == [
    [0, 0, 0, 0, 4, 4],
    [0, 1, 1, 1, -1, -1],
    [3, 2, 2, -1, -1, -1],
    [6, 6, 6, 5, -1, -1],
  ]
  # The routes know nothing of them.
  assert arrays.full.counts.tolist() == [[4, 4, 3, 0]] * 4
  assert arrays.sparse.counts.tolist() == [[4, 4], [4, 4], [3, 0], [0, 0]]
  assert arrays.full.segments.tolist() == [[0] * 5 + [1] * 3 + [3, 2, 2] + [-1] * 13] * 4


def test_table_by_hand():
  assert PLAN.table() == (
    'plan 752e59525da7e79c: mode repack, 4 samples, 11 tokens on 4 ranks x 4 slots, imbalance 1.455\n'
    'group                        samples   tokens  a rank  longest\n'
    'parent SP4 @0                      4       11       4        5\n'
    '  child SP2 @0                     2        8       4        5\n'
    '  child SP1 @2                     2        3       3        2\n'
    '  child SP1 @3                     0        0       0        0'
  )
  assert one_group_plan(8, 2, 5).table().count('\n') == 2  # a parent that is its own child is one row
  head, *rows = SOLO.table().splitlines()
  assert '7 samples, 17 tokens on 4 ranks x 6 slots, imbalance 1.412' in head
  assert rows == [
    *PLAN.table().splitlines()[1:],
    'solo on 2 ranks                    3        6       4        3',
  ]
  groups = (Group(0, 2, (0,)), Group(2, 1), Group(3, 1))
  idle = Plan((0,), (8,), groups, groups, 'parents', 4, 4, 4, 2).validate()
  assert [row.rstrip() for row in idle.table().splitlines()[2:]] == [
    'parent SP2 @0                      1        8       4        8',
    'in no group: 2 ranks',
  ]


def test_digest_is_pinned_and_the_same_everywhere():
  assert PLAN.digest() == '752e59525da7e79c'
  code = 'import test_plan; print(test_plan.PLAN.digest(), hash(test_plan.PLAN) == hash(test_plan.changed()))'
  for seed in ('0', '1234'):
    env = os.environ | {'PYTHONHASHSEED': seed, 'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "tests"}'}
    shown = subprocess.run([sys.executable, '-c', code], env=env, check=True, capture_output=True, text=True)
    assert shown.stdout.split() == ['752e59525da7e79c', 'True']
  different = [
    changed(sample_ids=(5, 2, 7, 3)), changed(lengths=(5, 3, 2, 2)), changed(capacity_tokens=5),
    changed(mode='static'), changed(children=(Group(0, 2, (1, 0)), *PLAN.children[1:])),
    changed(ranks_per_node=4), SOLO, changed(SOLO, solo=(Group(0, 1, (4,)), Group(3, 1, (5, 6)))),
    changed(SOLO, solo=(Group(1, 1, (4,)), Group(3, 1, (6, 5)))),
  ]  # fmt: skip
  assert len({plan.digest() for plan in (PLAN, *different)}) == 10


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
    (changed(children=(TWO, Group(2, 1, (3,)), EMPTY)), 'sample 7 is in 0 child or solo groups; it must be'),
    (
      changed(children=(TWO, ONE, Group(3, 1, (0,)))),
      'sample 5 is in 2 child or solo groups; it must be in one',
    ),
    (
      changed(parents=(Group(0, 4, (0, 1, 3, 2, 0)),)),
      'sample 5 is in 2 parent or solo groups; it must be in one',
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
    (changed(SOLO, capacity_tokens=5), 'rank 0 holds 6 tokens, over its capacity of 5'),
    (changed(SOLO, mode='repack'), 'mode repack: only plans of mode solve have solo samples'),
    (changed(SOLO, mode='parents', children=SOLO.parents), 'mode parents: only plans of mode solve'),
    (
      changed(SOLO, solo=SOLO.solo[::-1]),
      'solo SP1 on ranks 0..0: must be one rank of 4, in ascending order',
    ),
    (
      changed(SOLO, solo=(Group(3, 1, (4,)), Group(3, 1, (6, 5)))),
      'solo SP1 on ranks 3..3: must be one rank of 4, in ascending order',
    ),
    (
      changed(SOLO, solo=(Group(0, 1, (4,)), Group(2, 2, (6, 5)))),
      'solo SP2 on ranks 2..3: must be one rank of 4',
    ),
    (changed(SOLO, solo=(SOLO.solo[0], Group(4, 1, (6, 5)))), 'solo SP1 on ranks 4..4: must be one rank'),
    (changed(SOLO, solo=(Group(-1, 1, (4,)), SOLO.solo[1])), 'solo SP1 on ranks -1..-1: must be one rank'),
    (changed(SOLO, solo=SOLO.solo[:1]), 'sample 8 is in 0 parent or solo groups; it must be in one'),
    (changed(SOLO, solo=(Group(0, 1, (4, 0)), SOLO.solo[1])), 'sample 5 is in 2 parent or solo groups'),
    (changed(SOLO, solo=(Group(0, 1, (4, 6)), SOLO.solo[1])), 'sample 1 is in 2 parent or solo groups'),
    (changed(SOLO, solo=(Group(0, 1, (4, 7)), SOLO.solo[1])), 'names a sample that the plan does not have'),
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
    solo = 0.7 if number % 2 else 0.0
    row = (1, 1, 4)[number % 3]
    yield cases.random_plan(
      rng, ranks, 7 * row, domain, ranks_per_node=node, domain_ranks=domain, solo=solo, row_tokens=row
    )


@pytest.mark.parametrize('seed', range(20))
def test_each_token_is_packed_once(seed):
  for plan in random_plans(seed):
    arrays = packed(plan)
    held = arrays.segments >= 0
    assert held.sum(axis=1).tolist() == plan.rank_tokens.tolist()
    assert not held[np.arange(plan.capacity_tokens) >= plan.rank_slots[:, None]].any()
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
        assert size == layout.size[rank] and route.counts[rank, place] == plan.shared_slots[rank]
        assert rank // scope * scope + route.first[rank] + place == rank
        assert (route.counts[rank, size:] == 0).all()
        # What the rank holds is one contiguous run of its group's stream.
        start = route.counts[rank, :place].sum()
        assert start == layout.stream_start[rank]
        mine = route.segments[rank, start : start + plan.shared_slots[rank]]
        assert mine.tolist() == arrays.segments[rank, : plan.shared_slots[rank]].tolist()
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
  d_model=8, num_layers=3, pattern='FSS', num_heads=4, num_kv_heads=2, head_dim=2,
  num_experts=4, experts_per_token=2, expert_width=5, shared_expert_width=3, dense_layers=1, dense_width=7,
  vocab_size=256,
).with_kind(SlidingWindowAttention(window_tokens=3))  # fmt: skip


def test_flops_by_hand():
  assert flops.attention_pairs(np.array([1, 3, 5]), None).tolist() == [1, 6, 15]
  assert flops.attention_pairs(np.array([1, 3, 5]), 3).tolist() == [1, 6, 3 + 3 + 6]
  assert flops.qkv_flops_per_token(MODEL) == 2 * 8 * (8 + 4 + 4)
  assert flops.output_flops_per_token(MODEL) == 2 * 8 * 8
  assert flops.own_feed_forward_flops_per_token(MODEL, 0) == 3 * 2 * 8 * 7
  assert flops.own_feed_forward_flops_per_token(MODEL, 1) == 3 * 2 * 8 * 3 + 2 * 8 * 4
  assert [flops.routed_flops_per_token(MODEL, layer) for layer in (0, 1)] == [0, 3 * 2 * 8 * 2 * 5]
  linear = 3 * 384 + 336 + 2 * 688 + 2 * 8 * 256
  assert flops.linear_flops_per_token(MODEL) == linear
  # Scores and weighted values: two products of 2 * (4 heads x 2) a pair.
  assert flops.attention_flops(MODEL, 5, FULL) == 2 * 2 * 8 * 15
  assert flops.sample_flops(MODEL, 5) == 5 * linear + 2 * 2 * 8 * (15 + 12 + 12)


def test_bytes_by_hand():
  # 4 query and 2 key/value heads of 2 floats: SP1 sends 4 + 2 * 2 and 4 heads to itself, and so on.
  for degree, heads in ((1, (8, 4)), (2, (4, 2)), (4, (3, 1))):
    assert cost.heads_per_peer(MODEL, degree) == heads
    assert cost.bytes_per_peer(MODEL, degree) == sum(heads) * 2 * 4
  assert cost.bytes_per_peer(MODEL, np.array([1, 2, 4])).tolist() == [96, 48, 32]
  half = dataclasses.replace(MODEL, compute_dtype='bfloat16')
  assert cost.bytes_per_peer(half, 4) == 16
  # PLAN: in the full layer each of 11 tokens has two peers in the other node; no child leaves its node.
  assert cost.cross_node_bytes(PLAN, MODEL) == 11 * 2 * 64
  assert cost.cross_node_bytes(SOLO, MODEL) == 11 * 2 * 64  # 17 tokens, of which 6 stay where they are
  wide = changed(children=PLAN.parents).validate()
  assert cost.cross_node_bytes(wide, MODEL) == 3 * 11 * 2 * 64


def cost_model(model: ModelConfig = MODEL, **changes: object) -> cost.CostModel:
  """Rates that make seconds easy to read."""
  rates = {
    'nodes': 2, 'ranks_per_node': 2, 'matmul_flops_per_s': 100, 'attention_flops_per_s': 50,
    'intra_node_bytes_per_s': 64, 'inter_node_bytes_per_s': 8, 'intra_node_latency_s': 3,
    'inter_node_latency_s': 5, 'memory_bytes_per_s': 7,
  }  # fmt: skip
  return cost.CostModel(ClusterConfig(**(rates | changes)), model)


def test_seconds_of_computation_by_hand():
  model = cost_model()
  assert model.before_s() == pytest.approx(2 * 8 * 16 / 100)
  # Behind the attention: its output projection; the dense block, or a shared expert and the router.
  assert model.after_s(0) == pytest.approx((2 * 8 * 8 + 3 * 2 * 8 * 7) / 100)
  assert model.after_s(1) == pytest.approx((2 * 8 * 8 + 3 * 2 * 8 * 3 + 2 * 8 * 4) / 100)
  assert model.routed_s(0) == 0 and model.routed_s(1) == pytest.approx(3 * 2 * 8 * 2 * 5 / 100)
  assert model.logits_s() == pytest.approx(2 * 8 * 256 / 100)
  whole = sum(model.before_s() + model.after_s(i) + model.routed_s(i) for i in range(3)) + model.logits_s()
  assert whole == pytest.approx(flops.linear_flops_per_token(MODEL) / 100)
  assert model.attention_s(np.array([1, 5]), FULL) == pytest.approx([32 / 50, 32 * 15 / 50])
  assert model.attention_s(5, SPARSE) == pytest.approx(32 * 12 / 50)
  assert model.linear_backward == 3  # the forward pass again, and two products for each of its own
  assert cost_model(dataclasses.replace(MODEL, remat='none')).linear_backward == 2


def test_seconds_of_links_by_hand():
  model = cost_model()
  # The slower of the two links, and the latency of the farther one.
  assert model.link_s(np.float64(128), np.float64(8), np.bool_(True)) == 5 + 2
  assert model.link_s(np.float64(64), np.float64(40), np.bool_(True)) == 5 + 5
  assert model.link_s(np.array([64.0, 0]), np.zeros(2), np.bool_(False)).tolist() == [4, 3]
  # A token sends 48 bytes to its peer of SP2; of SP4, 32 to one in its node and to each of two outside.
  assert [model.exchange_s(degree) for degree in (1, 2, 4)] == [0, 48 / 64, 2 * 32 / 8]
  assert [model.exchange_latency_s(degree) for degree in (1, 2, 4)] == [0, 6, 10]
  fast = cost_model(inter_node_bytes_per_s=1000)
  assert fast.exchange_s(4) == 32 / 64  # now the peer in the node takes longest
  # Two experts a token, rows of 8 floats, and half of all experts on the other rank of the node.
  assert model.expert_ranks == 2 and model.expert_bytes_per_token() == 2 * 8 * 4 / 2
  assert cost_model(ranks_per_node=4).expert_bytes_per_token() == 2 * 8 * 4 * 3 / 4
  for changes in ({'expert_placement': 'replicated'}, {'num_experts': 0}):
    alone = cost_model(dataclasses.replace(MODEL, **changes))
    assert alone.expert_ranks == 1 and alone.expert_bytes_per_token() == 0


def test_seconds_of_parameters_by_hand():
  model = cost_model(intra_node_bytes_per_s=2)
  own, routed = memory.layer_parameters(MODEL, 1)
  assert own == 8 * 12 * 2 + 8 * 2 * 2 * 2 - 8 * 4 * 2 + 2 * 8 + 2 * 2 + 8 * 4 + 3 * 8 * 3
  assert routed == 3 * 4 * 8 * 5
  # Each node takes in the half that the other holds, over both its ranks' links; a rank takes in what the
  # other of its node holds, of spread experts nothing. The slower of the two links decides.
  inter_s, intra_s = (own + routed) / 2 / 2 * 4 / 8, own / 2 * 4 / 2
  assert inter_s < intra_s and model.gather_s(1) == model.reduce_s(1) == 5 + intra_s
  assert cost_model().gather_s(1) == cost_model().reduce_s(1) == 5 + inter_s
  half = cost_model(dataclasses.replace(MODEL, compute_dtype='bfloat16'), intra_node_bytes_per_s=2)
  assert half.gather_s(1) - 5 == (model.gather_s(1) - 5) / 2 and half.reduce_s(1) == model.reduce_s(1)
  everywhere = cost_model(dataclasses.replace(MODEL, expert_placement='replicated'), intra_node_bytes_per_s=2)
  assert everywhere.gather_s(1) == 5 + (own + routed) / 2 * 4 / 2
  assert model.table_s() == (5 + 8 * 256 / 2 * 4 / 2,) * 2
  assert half.table_s() == (5 + 8 * 256 / 2 * 2 / 2, 5 + 8 * 256 / 2 * 4 / 2)
  one_node = cost_model(nodes=1)
  assert one_node.table_s() == (3 + 8 * 256 / 2 * 4 / 64,) * 2
  alone = cost_model(nodes=1, ranks_per_node=1)
  assert (alone.gather_s(1), alone.reduce_s(1), alone.table_s()) == (0, 0, (0, 0))


def test_seconds_of_the_update_by_hand():
  total = memory.total_parameters(MODEL)
  assert cost_model().optimizer_s() == pytest.approx(total / 4 * 7 * 4 / 7)  # seven floats read or written
  assert cost_model().data_reduce_s() == 0
  # A ring over three domains: each rank sends a third of its shard four times.
  assert cost_model(domains=3).data_reduce_s() == pytest.approx(5 + total / 4 * 4 * 4 / 3 / 8)


MODELS = {
  'mixed': MODEL,
  'experts throughout': dataclasses.replace(MODEL, dense_layers=0, shared_expert_width=0, qk_norm=False),
  'dense': dataclasses.replace(MODEL, num_experts=0, tie_embeddings=True, num_layers=4),
  'defaults': ModelConfig(),
}


@pytest.mark.parametrize('name', MODELS)
def test_parameters_are_those_of_the_model(name):
  """Counted from the configs as the model makes them, in all and a layer."""
  model = MODELS[name]
  shapes = jax.eval_shape(lambda: init_parameters(model, 0))
  assert memory.total_parameters(model) == sum(leaf.size for leaf in jax.tree.leaves(shapes))
  assert memory.table_parameters(model) == shapes['embedding'].size
  own, routed = zip(
    *(memory.layer_parameters(model, layer) for layer in range(model.num_layers)), strict=True
  )
  in_layers = jax.tree_util.tree_leaves_with_path(shapes['stacks'])
  of_experts = [leaf.size for path, leaf in in_layers if leaf_name(path) in EXPERT_NAMES]
  assert sum(routed) == sum(of_experts)
  assert sum(own) == sum(leaf.size for _, leaf in in_layers) - sum(of_experts)


def test_memory_of_a_rank_by_hand():
  cluster = ClusterConfig(nodes=2, ranks_per_node=2)
  planner = PlannerConfig(capacity_tokens=10)
  needed = memory.rank_bytes(MODEL, cluster, planner)
  own = [memory.layer_parameters(MODEL, layer)[0] for layer in range(3)]
  rows = (4 + 2 * 4) * 2  # a token's q, k and v for all of SP4: two key/value heads go to two ranks each
  received = 2 * 2 * 8  # two experts' inputs and results
  assert needed['parameters_and_optimizer_bytes'] == 20 * memory.total_parameters(MODEL) // 4
  assert needed['gathered_weights_bytes'] == (2 * (max(own) + 3 * 4 * 8 * 5 // 2) + 256 * 8) * 4
  assert needed['whole_gradients_bytes'] == (max(own) + 3 * 4 * 8 * 5 // 2 + 256 * 8) * 4
  # A layer's input and what its exchanges moved; and all that one layer keeps while it is recomputed.
  layers = 3 * (8 + rows + 4 * 2) + 2 * received
  attention = 2 * 8 + (4 + 4) * 2 + rows + 2 * 4 * 2
  largest = attention + 8 + 2 * (8 + 3 * 5) + received + 3 * 3
  assert needed['activations_bytes'] == (layers + largest) * 10 * 4
  assert needed['exchange_buffers_bytes'] == 2 * max(rows, received) * 10 * 4
  assert needed['logits_bytes'] == 3 * 4 * 10 * 256
  kept = memory.rank_bytes(dataclasses.replace(MODEL, remat='none'), cluster, planner)
  dense = attention + 8 + 3 * 7
  assert kept['activations_bytes'] == (dense + 2 * largest) * 10 * 4
  half = memory.rank_bytes(dataclasses.replace(MODEL, compute_dtype='bfloat16'), cluster, planner)
  assert half['activations_bytes'] * 2 == needed['activations_bytes']
  assert half['parameters_and_optimizer_bytes'] == needed['parameters_and_optimizer_bytes']
  narrow = memory.rank_bytes(MODEL, cluster, dataclasses.replace(planner, max_sp_degree=2))
  assert narrow['exchange_buffers_bytes'] == 2 * max((4 + 2 * 2) * 2, received) * 10 * 4
