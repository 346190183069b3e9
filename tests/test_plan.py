"""Plans and what is packed from them: values worked by hand, every rule broken once, what always holds."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import cases
import numpy as np
import pytest
from cases import PLAN, SOLO, document, packed, wire_of

from repack_jax.plan.arrays import NO_TARGET, PADDING_SEGMENT, pack, route_arrays
from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS, Group, Plan, PlanError
from repack_jax.plan.program import Program

ROOT = Path(__file__).resolve().parents[1]


def one_group_plan(length: int, ranks: int, capacity: int) -> Plan:
  group = (Group(0, ranks, (0,)),)
  return Plan((0,), (length,), group, group, 'parents', capacity, ranks, ranks, ranks).validate()


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
  parents, children = PLAN.placement(PARENTS), PLAN.placement(CHILDREN)
  assert (parents.first_rank.tolist(), parents.size.tolist()) == ([0, 0, 0, 0], [4, 4, 4, 4])
  assert parents.stream_start.tolist() == [0, 4, 8, 11]
  assert (children.first_rank.tolist(), children.size.tolist()) == ([0, 0, 2, 3], [2, 2, 1, 1])
  assert children.stream_start.tolist() == [0, 4, 0, 0]
  assert parents.slots.tolist() == children.slots.tolist() == PLAN.rank_tokens.tolist()
  assert (PLAN.groups(PARENTS), PLAN.groups(CHILDREN)) == (PLAN.parents, PLAN.children)
  assert (PLAN.span(PARENTS), PLAN.span(CHILDREN)) == (4, 2)  # a domain, a node
  assert (PLAN.widest(PARENTS), PLAN.widest(CHILDREN), PLAN.total_tokens) == (4, 2, 11)
  assert PLAN.imbalance == 4 / (11 / 4)
  assert PLAN.child_sizes() == {1: 1, 2: 1}  # the child that holds nothing is not counted
  assert Program.of_plan(PLAN) == Program(4, 2, (4,), (1, 2), 4, 1, False)


def test_solo_plan_by_hand():
  """Solo samples count on their ranks, and in nothing that exchanges."""
  assert SOLO.shared_tokens.tolist() == [4, 4, 3, 0] and SOLO.rank_tokens.tolist() == [6, 4, 3, 4]
  for layout in LAYOUTS:
    ours, without = (vars(plan.placement(layout)) for plan in (SOLO, PLAN))
    assert {name: array.tolist() for name, array in ours.items()} == {
      name: array.tolist() for name, array in without.items()
    }
  assert SOLO.total_tokens == 17 and SOLO.imbalance == 6 / (17 / 4)
  assert (SOLO.child_sizes(), SOLO.widest(PARENTS)) == (PLAN.child_sizes(), 4)
  assert Program.of_plan(SOLO) == Program(4, 2, (4,), (1, 2), 6, 1, True)
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
  assert plan.placement(PARENTS).stream_start.tolist() == [0, 3, 9, 12]
  arrays = packed(plan)
  assert arrays.parents.counts[0].tolist() == [3, 6, 3, 0]
  assert arrays.parents.segments[0, :13].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, -1, 3, 2, 2, -1]
  assert arrays.segments[1].tolist() == [0, 0, 1, 1, 1, -1, 4, 4, -1]
  assert plan.with_slots(2).capacity_tokens == 9 and plan.with_slots(1).capacity_tokens == 9
  for capacity, message in ((8, 'capacity of 8 is not a multiple of 3'), (6, 'rank 1 holds 8 tokens, over')):
    with pytest.raises(PlanError, match=message):
      changed(plan, capacity_tokens=capacity).validate()


def test_arrays_by_hand():
  batch = [document(number, length) for number, length in enumerate((9, 9, 3, 9, 1, 5, 9, 2))]
  arrays = pack(PLAN, batch, Program.of_plan(PLAN, (1, 2, 4)))  # sample_ids are places in this batch
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
  assert arrays.parents.branch.tolist() == [2, 2, 2, 2]
  assert arrays.parents.first.tolist() == [0, 0, 0, 0]
  assert arrays.parents.place.tolist() == [0, 1, 2, 3]
  assert arrays.parents.counts.tolist() == [[4, 4, 3, 0]] * 4
  assert arrays.parents.segments.tolist() == [[0] * 5 + [1] * 3 + [3, 2, 2] + [-1] * 5] * 4
  assert arrays.children.branch.tolist() == [1, 1, 0, 0]
  assert arrays.children.first.tolist() == [0, 0, 0, 1]  # counted from the start of the node
  assert arrays.children.place.tolist() == [0, 1, 0, 0]
  assert arrays.children.counts.tolist() == [[4, 4], [4, 4], [3, 0], [0, 0]]
  assert arrays.children.segments.tolist() == [
    [0] * 5 + [1] * 3, [0] * 5 + [1] * 3, [3, 2, 2] + [-1] * 5, [-1] * 8,
  ]  # fmt: skip
  leaves = [*arrays[:4], *arrays.parents, *arrays.children]
  assert all(leaf.dtype == np.int32 and leaf.shape[0] == 4 for leaf in leaves)


def test_solo_samples_are_packed_behind_the_stream():
  batch = [document(number, length) for number, length in enumerate((2, 3, 3, 9, 1, 5, 9, 2, 1))]
  arrays = pack(SOLO, batch, Program.of_plan(SOLO, (1, 2, 4)))
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
  assert arrays.parents.counts.tolist() == [[4, 4, 3, 0]] * 4
  assert arrays.children.counts.tolist() == [[4, 4], [4, 4], [3, 0], [0, 0]]
  assert arrays.parents.segments.tolist() == [[0] * 5 + [1] * 3 + [3, 2, 2] + [-1] * 13] * 4


def test_table_by_hand():
  assert PLAN.table() == (
    'plan fb5a5f8348551551: mode repack, 4 samples, 11 tokens on 4 ranks x 4 slots, imbalance 1.455\n'
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
  assert PLAN.digest() == 'fb5a5f8348551551'
  code = 'import test_plan; print(test_plan.PLAN.digest(), hash(test_plan.PLAN) == hash(test_plan.changed()))'
  for seed in ('0', '1234'):
    env = os.environ | {'PYTHONHASHSEED': seed, 'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "tests"}'}
    shown = subprocess.run([sys.executable, '-c', code], env=env, check=True, capture_output=True, text=True)
    assert shown.stdout.split() == ['fb5a5f8348551551', 'True']
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
    (changed(SOLO, mode='repack'), 'mode repack: only plans of modes parents_solo and solve'),
    (changed(SOLO, mode='parents', children=SOLO.parents), 'mode parents: only plans of modes parents_solo'),
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
    PLAN.validate(wire_of(*heads))
  assert message in str(caught.value)
  assert PLAN.validate(wire_of(4, 1)) is PLAN


def test_wide_layout_may_be_kept_by_the_whole_parent():
  wide = changed(children=PLAN.parents).validate()
  assert wide.span(CHILDREN) == 4


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
    for layout in LAYOUTS:
      placement, span, route = plan.placement(layout), plan.span(layout), arrays.route(layout)
      degrees = Program.of_plan(plan).degrees(layout)
      for rank in range(plan.num_ranks):
        if not route.counts[rank].any():  # its group holds nothing, or solo samples alone
          assert (route.branch[rank], route.place[rank], route.first[rank]) == (0, 0, rank % span)
          continue
        size, place = degrees[route.branch[rank]], route.place[rank]
        assert size == placement.size[rank] and route.counts[rank, place] == plan.shared_slots[rank]
        assert rank // span * span + route.first[rank] + place == rank
        assert (route.counts[rank, size:] == 0).all()
        # What the rank holds is one contiguous run of its group's stream.
        start = route.counts[rank, :place].sum()
        assert start == placement.stream_start[rank]
        mine = route.segments[rank, start : start + plan.shared_slots[rank]]
        assert mine.tolist() == arrays.segments[rank, : plan.shared_slots[rank]].tolist()
        assert (route.segments[rank, route.counts[rank].sum() :] == PADDING_SEGMENT).all()


def test_arrays_have_the_same_shapes_for_every_plan_of_a_program():
  shapes = set()
  for seed in range(10):
    plan = cases.random_plan(np.random.default_rng(seed), 16, 5, 16, ranks_per_node=4)
    route = route_arrays(plan, PARENTS, Program.of_plan(plan, (1, 2, 4, 8, 16)))
    shapes.add((plan.span(PARENTS), route.counts.shape, route.segments.shape))
  assert shapes == {(4, (16, 4), (16, 4 * 5)), (16, (16, 16), (16, 16 * 5))}
