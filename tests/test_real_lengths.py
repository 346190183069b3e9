"""Batches of real lengths, in one or many micro-batches and domains: no plan is far from the bound."""

from pathlib import Path

import numpy as np
import planner_cases
import planner_measure
import pytest

from repack_jax.config import PlannerConfig
from repack_jax.data.lengths import read_lengths
from repack_jax.plan.plan import LAYOUTS
from repack_jax.predict.simulator import simulate
from repack_jax.solver import solve
from repack_jax.solver.bounds import lower_bound_s

LENGTHS = Path(__file__).resolve().parents[1] / 'configs' / 'lengths'
MOST_OVER_BOUND = 1.2


def over_bound(name: str, domains: int, micro_batches: int, number: int) -> float:
  """The step over the lower bound, less what no plans can avoid; a batch that fills 90 % of the slots."""
  costs = planner_cases.costs_of(domains=domains)
  rng = np.random.default_rng([domains, micro_batches, number])
  lengths = planner_cases.draw(read_lengths(LENGTHS / f'{name}.csv'), rng, 700 * domains * micro_batches)
  slots = lengths.sum() / (0.9 * micro_batches * costs.cluster.num_ranks)
  capacity = int(np.ceil(max(slots, lengths.max() / costs.cluster.domain_ranks)))
  config = PlannerConfig(capacity_tokens=capacity, capacity_step_tokens=planner_cases.STEP_TOKENS)
  case = planner_cases.PlanCase(name, lengths, costs, config)
  found = solve(lengths, costs, config)
  return planner_measure.step_s(found.plans, case) / lower_bound_s(lengths, costs, config)


@pytest.mark.parametrize('name', ['web_documents', 'wikipedia'])
@pytest.mark.parametrize(('domains', 'micro_batches'), [(1, 1), (1, 4), (3, 1), (2, 2)])
def test_no_step_is_far_from_the_bound(name, domains, micro_batches):
  assert over_bound(name, domains, micro_batches, 0) <= MOST_OVER_BOUND


def test_dense_exchanges_are_planned_with_few_degrees():
  """Each degree sends all slots once more: plans that know that beat those made for ragged exchanges."""
  lengths, rng = read_lengths(LENGTHS / 'web_documents.csv'), np.random.default_rng(0)
  ragged, dense = (planner_cases.costs_of(exchange=exchange) for exchange in ('ragged', 'dense'))
  seconds, degrees = [], []
  for _ in range(6):
    batch = planner_cases.draw(lengths, rng, 700)
    slots = max(batch.sum() / (0.9 * dense.cluster.num_ranks), batch.max() / dense.cluster.domain_ranks)
    for mode in ('parents', 'solve'):
      config = PlannerConfig(mode=mode, capacity_tokens=int(np.ceil(slots)))
      plans = [solve(batch, costs, config).plans for costs in (ragged, dense)]
      seconds.append([simulate(dense, of).step_s for of in plans])
      degrees.append([sum(len(plan.degrees(layout)) for plan in of for layout in LAYOUTS) for of in plans])
  (unaware_s, aware_s), (unaware, aware) = np.mean(seconds, axis=0), np.mean(degrees, axis=0)
  assert aware_s < 0.99 * unaware_s and aware < unaware


@pytest.mark.long
@pytest.mark.parametrize('name', ['web_documents', 'wikipedia'])
@pytest.mark.parametrize('domains', [1, 2, 4, 16])
@pytest.mark.parametrize('micro_batches', [1, 2, 3, 8])
def test_sweep_of_real_lengths(name, domains, micro_batches):
  found = [over_bound(name, domains, micro_batches, number) for number in range(1, 2 if domains > 4 else 4)]
  assert max(found) <= MOST_OVER_BOUND, found
