"""What a compiled program can run: plans that it refuses, saying what to do, and those that it serves."""

import re

import cases
import numpy as np
import pytest
from cases import PLAN, SOLO, document, packed

from repack_jax.plan.arrays import NO_TARGET, PADDING_SEGMENT, pack
from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS, Group, Plan, PlanError
from repack_jax.plan.program import Program

# Whole nodes of two ranks, domains of four.
LARGE = Program(4, 4, (1, 2, 4), (1, 2, 4), capacity_tokens=8, row_tokens=1, has_solo=True)
DEGREES = (1, 2, 4, 8, 16)
ROWS_OF_TWO = Plan(
  (0,), (7,), (Group(0, 4, (0,)),), (Group(0, 4, (0,)),), 'parents', 4, 4, 4, 2, row_tokens=2
)


def test_spans_and_degrees():
  own, all_degrees = Program.of_plan(PLAN), Program.of_plan(PLAN, (1, 2, 4, 8))
  assert (own.span(PARENTS), own.span(CHILDREN)) == (4, 2)
  assert (own.degrees(PARENTS), own.degrees(CHILDREN)) == ((4,), (1, 2))
  assert (all_degrees.degrees(PARENTS), all_degrees.degrees(CHILDREN)) == ((1, 2, 4), (1, 2))


@pytest.mark.parametrize(
  ('plan', 'changes', 'message'),
  [
    (
      PLAN,
      {'parents_degrees': (1, 2)},
      'this plan has parents of SP4; the program knows SP1, SP2 over 4 ranks. Make the program from this '
      'plan, or of more degrees',
    ),
    (
      PLAN,
      {'parents_degrees': (2, 8)},
      'this plan has parents of SP4; the program knows SP2, SP8 over 4 ranks. Make the program from',
    ),
    (
      PLAN,
      {'children_span': 1, 'children_degrees': (1,)},
      'this plan has children of SP2; the program knows SP1 over 1 ranks. Make the',
    ),
    (
      PLAN,
      {'capacity_tokens': 3},
      'this plan fills 4 slots of a rank; the program has 3. Make the program from this plan, or plan with '
      'that capacity',
    ),
    (SOLO, {'capacity_tokens': 5}, 'this plan fills 6 slots of a rank; the program has 5.'),
    # Seven tokens fill eight slots in rows of two, and the fullest rank with them.
    (ROWS_OF_TWO, {'capacity_tokens': 1}, 'this plan fills 2 slots of a rank; the program has 1.'),
    (
      PLAN,
      {'row_tokens': 2},
      'this plan has rows of 1 tokens; the program sends rows of 2. Plan with the wire_row_bytes that the '
      'program was made with',
    ),
    (ROWS_OF_TWO, {'row_tokens': 4}, 'this plan has rows of 2 tokens; the program sends rows of 4.'),
    (
      SOLO,
      {'has_solo': False},
      'this plan has solo samples; the program has no core for them: make one with has_solo',
    ),
  ],
)
def test_plans_that_a_program_cannot_run_are_refused(plan, changes, message):
  LARGE.check(plan)
  for check in (LARGE._replace(**changes).check, lambda plan: packed(plan, LARGE._replace(**changes))):
    with pytest.raises(PlanError, match=re.escape(message)):
      check(plan)


def test_a_plan_has_no_program_of_fewer_degrees():
  with pytest.raises(PlanError, match='this plan has parents of SP4; the program knows SP1, SP2 over 4'):
    Program.of_plan(PLAN, (1, 2))


def test_smaller_plan_in_a_larger_program_by_hand():
  """The tokens lie where they do in the plan's own program; routes reach further and say the same."""
  own, arrays = packed(PLAN), packed(PLAN, LARGE)
  for ours, large, empty in zip(own[:4], arrays[:4], (0, NO_TARGET, 0, PADDING_SEGMENT), strict=True):
    assert large[:, :4].tolist() == ours.tolist() and (large[:, 4:] == empty).all()
  assert arrays.parents.counts.tolist() == [[4, 4, 3, 0]] * 4
  assert arrays.parents.segments.tolist() == [[0] * 5 + [1] * 3 + [3, 2, 2] + [-1] * 21] * 4
  # Children's exchanges span the domain here, so that ranks are counted from its start.
  assert arrays.children.first.tolist() == [0, 0, 2, 3]
  assert arrays.children.place.tolist() == [0, 1, 0, 0]
  assert arrays.children.counts.tolist() == [[4, 4, 0, 0], [4, 4, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]]
  assert arrays.children.segments[2].tolist() == [3, 2, 2] + [-1] * 29


@pytest.mark.parametrize('seed', range(10))
def test_one_program_serves_every_smaller_plan(seed):
  rng = np.random.default_rng(seed)
  program = Program(16, 16, DEGREES, DEGREES, capacity_tokens=40, row_tokens=2, has_solo=True)
  row, solo = int(rng.choice([2, 4])), float(rng.choice([0.0, 0.7]))
  plan = cases.random_plan(rng, 32, 5 * row, 8, 4, 16, solo=solo, row_tokens=row)
  own, arrays = packed(plan), packed(plan, program)
  slots = plan.capacity_tokens
  for ours, large, empty in zip(own[:4], arrays[:4], (0, NO_TARGET, 0, PADDING_SEGMENT), strict=True):
    assert large.shape == (32, 40)
    assert (large[:, :slots] == ours).all() and (large[:, slots:] == empty).all()
  for layout in LAYOUTS:
    route, of_own = arrays.route(layout), own.route(layout)
    assert route.counts.shape == (32, 16) and route.segments.shape == (32, 16 * 40)
    span, ranks = plan.span(layout), np.arange(32)
    assert (ranks // 16 * 16 + route.first == ranks // span * span + of_own.first).all()
    assert (route.place == of_own.place).all()
    for name, empty in (('counts', 0), ('segments', PADDING_SEGMENT)):
      large, ours = getattr(route, name), getattr(of_own, name)
      width = ours.shape[1]
      assert (large[:, :width] == ours).all() and (large[:, width:] == empty).all()


def test_plan_of_another_batch_is_refused():
  batch = [document(number, 9) for number in range(8)]
  with pytest.raises(ValueError, match='sample 5 has 9 tokens, its plan says 5: this plan was made for'):
    pack(PLAN, batch, Program.of_plan(PLAN))
  with pytest.raises(ValueError, match='sample 7, the batch has 7 samples: this plan was made for another'):
    pack(PLAN, batch[:7], Program.of_plan(PLAN))
