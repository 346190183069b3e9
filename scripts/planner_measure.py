"""How the planner's benchmarks measure: a planner's modes on a case, seconds of a step, and of planning."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from planner_cases import PlanCase

from repack_jax.data.lengths import Histogram
from repack_jax.plan.plan import Plan
from repack_jax.predict.simulator import simulate
from repack_jax.solver import Solution, solve

Files = Mapping[str, 'np.ndarray | Histogram']
Rows = list[dict[str, Any]]

COMPARED = ('parents', 'parents_solo', 'repack', 'solve')  # modes, in the order of what they allow


def solution_of(case: PlanCase, mode: str) -> Solution:
  return solve(case.lengths, case.costs, dataclasses.replace(case.config, mode=mode))


def plans_of(case: PlanCase, mode: str) -> Sequence[Plan]:
  return solution_of(case, mode).plans


def step_s(plans: Sequence[Plan], case: PlanCase) -> float:
  """The simulated step less what no plans of the batch can avoid: so ratios are of what planning decides.

  That is the optimizer, and the parameter collectives of as many micro-batches as the batch's tokens fill. A
  micro-batch more counts with its collectives. Without one, it is the sum of `predicted_s`.
  """
  assert case.costs.cluster.prefetch_layers == 0, 'what collectives that run ahead hide depends on the plans'
  unavoidable_s = fewest_micro_batches(case) * case.costs.shown_parameters_s + case.costs.optimizer_s
  return simulate(case.costs, plans).step_s - unavoidable_s


def fewest_micro_batches(case: PlanCase) -> int:
  """As many as hold the tokens, if samples could be cut anywhere."""
  return -(-int(case.lengths.sum()) // (case.costs.cluster.num_ranks * case.config.capacity_tokens))


def timed(make: Callable[[], Sequence[Plan]]) -> tuple[Sequence[Plan], float]:
  """What it makes, and its seconds of the processor: planners run on one core, and others may share it."""
  begun = time.process_time()
  return make(), time.process_time() - begun


def percent(values: Sequence[float], q: float | None = None) -> float:
  """The mean, or a quantile, in percent and to a hundredth."""
  return round(100 * float(np.mean(values) if q is None else np.quantile(values, q)), 2)


def counted(outcomes: Sequence[str]) -> str:
  """How often which outcome was, as one word of a row."""
  return ', '.join(f'{outcomes.count(x)} {x}' for x in sorted(set(outcomes)))
