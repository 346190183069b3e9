"""Every section of `bench_planner.py` in miniature, and what it measures by."""

import bench_planner
import numpy as np
import planner_cases
import planner_measure
import planner_sections
import pytest

from repack_jax.predict.plan_times import predicted_s
from repack_jax.predict.simulator import simulate
from repack_jax.solver.bounds import lower_bound_s

FILES = {'short': np.array([40, 300, 700, 2_000]), 'skewed': np.array([100] * 30 + [9_000])}
MINIATURE = {
  'time': '--batches 1',
  'exact': '--cases 2 --exact-limit-s 0.5',
  'bound': '--bound-batches 1',
  'peers': '--batches 1 --milp-limit-s 0.2',
  'micro': '--micro-batches 1 --micro-samples 60 --milp-limit-s 0.2',
  'equal': '--equal-counts 3 --equal-thousands 25 100 --milp-limit-s 0.5',
  'capacity': '--capacity-batches 1 --capacity-samples 60',
  'sweep': '--sweep 20',
}


def rows_of(section: str, more: str = '') -> list[dict]:
  args = bench_planner.parser().parse_args(f'{MINIATURE[section]} {more}'.split())
  return bench_planner.SECTIONS[section](FILES, args)


def test_miniatures_are_of_every_section():
  assert list(MINIATURE) == list(bench_planner.SECTIONS)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
  monkeypatch.setattr(bench_planner, 'SIZES', ((1, 60, 0.025), (2, 90, 0.250)))
  monkeypatch.setattr(bench_planner, 'BOUND_AIMS', {(64, 'short'): 5.0})


def test_time():
  rows = rows_of('time')
  assert [(row['ranks'], row['lengths']) for row in rows] == [
    (ranks, name) for ranks in (32, 64) for name in FILES
  ]
  assert rows[0]['aim_ms'] == 25 and rows[0]['solve_ms'] > 0


def test_exact():
  rows = rows_of('exact')
  assert {row['mode'] for row in rows} == {'parents', 'solve'}
  assert all(-1e-3 <= row['median_%'] <= row['worst_%'] for row in rows)


def test_bound():
  rows = rows_of('bound')
  assert [row.get('aim_%') for row in rows] == [None, None, 5.0, None]
  for row in rows:
    assert 0 <= row['solve_%'] <= row['parents_%'] + 1e-9
    causes = sum(row[f'{cause}_%'] for cause in ('slots', 'parents_layers', 'children_layers', 'latency'))
    assert causes <= row['solve_%'] + 0.05


def test_peers():
  rows = rows_of('peers')
  assert [row['planner'] for row in rows[:4]] == ['solve', 'parents', 'flexsp_milp', 'longest_first_greedy']
  assert all(row['step_over_solve'] == 1 for row in rows if row['planner'] == 'solve')


def test_micro(monkeypatch):
  """Modes, and each peer on the micro-batches of `solve` and on its own, none below the bound."""
  monkeypatch.setattr(planner_sections, 'MICRO_BATCHES', (3,))
  rows = rows_of('micro')
  peers = [
    f'{peer}, {whose}' for whose in ('same', 'own') for peer in ('flexsp_milp', 'longest_first_greedy')
  ]
  planners = [*reversed(planner_measure.COMPARED), *peers]
  assert [(row['lengths'], row['planner']) for row in rows] == [
    (name, planner) for name in FILES for planner in planners
  ]
  for row in rows:
    assert 1 <= row['mean'] <= row['worst'] and row['made'] >= 2
    assert ('aim_worst' in row) == (row['planner'] == 'solve')
    assert bool(row['milps']) == row['planner'].startswith('flexsp')


def test_equal(capsys):
  rows = rows_of('equal')
  assert [(row['capacity'], row['batches']) for row in rows] == [('1.25 x need', 2), ('65,536', 2)]
  for row in rows:
    assert row['mean'] <= row['worst'] and row['worst_batch'] in ('3 x 25,000', '3 x 100,000')
    assert bool(row['above_aim']) == (row['worst'] > planner_sections.EQUAL_AIM)


def test_capacity():
  rows = rows_of('capacity')
  assert [row['capacity_over_mean'] for row in rows] == 2 * [1.1, 1.25, 1.5, 2.0]
  assert all(0 < row['mean'] <= row['worst'] for row in rows)


def test_sweep():
  (row,) = rows_of('sweep')
  assert (row['batches'], row['failures']) == (20, 0)


def test_a_step_is_what_predicted_s_says_and_the_collectives_of_more_micro_batches():
  costs = planner_cases.costs_of(nodes=2, ranks_per_node=4)
  case = next(planner_cases.micro_cases('skewed', FILES['skewed'], 3, 80, 1))
  assert planner_measure.fewest_micro_batches(case) == 3
  plans = planner_measure.plans_of(case, 'solve')
  more = len(plans) - 3
  assert planner_measure.step_s(plans, case) == pytest.approx(
    sum(predicted_s(plan, case.costs) for plan in plans) + more * case.costs.shown_parameters_s
  )
  one_each = [plan for plan in plans for _ in range(2)]  # as many collectives again
  added_s = simulate(case.costs, one_each).step_s - simulate(case.costs, plans).step_s
  alone_s = sum(predicted_s(plan, case.costs) for plan in plans)
  assert added_s == pytest.approx(alone_s + len(plans) * case.costs.shown_parameters_s)
  assert costs.shown_parameters_s > 0
  assert lower_bound_s(case.lengths, case.costs, case.config) <= planner_measure.step_s(plans, case)


def test_micro_batches_are_forced():
  """By tokens; of batches whose longest sample asks for more capacity, fewer."""
  for number in (4, 8):
    (case,) = planner_cases.micro_cases('short', FILES['short'], number, 500, 1)
    assert planner_measure.fewest_micro_batches(case) == number
  (case,) = planner_cases.micro_cases('one', np.array([5_000]), 8, 3, 1)
  assert planner_measure.fewest_micro_batches(case) == 3 and case.config.capacity_tokens * 32 >= 5_000
