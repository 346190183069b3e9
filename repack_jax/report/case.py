"""What a report compares: the same batch, planned in several ways and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from repack_jax.config import RunConfig
from repack_jax.plan.plan import Plan
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.simulator import TRANSFER, WAIT, Simulated, Spans
from repack_jax.solver import BASELINE
from repack_jax.solver.compare import simulate_modes

# What a cause of `simulator.CAUSES` is a kind of, in the order of legends.
FAMILIES = ('compute', 'padding', 'exchange', 'parameters', 'waiting')


@dataclass(frozen=True)
class Case:
  """One way to run a batch.

  Attributes:
    name: what the report calls it, such as the mode that made the plans.
    plans: one a micro-batch.
    simulated: the step of these plans, with spans.
  """

  name: str
  plans: tuple[Plan, ...]
  simulated: Simulated

  def __post_init__(self) -> None:
    if not self.plans:
      raise ValueError(f'case {self.name!r} has no plans')
    if self.simulated.spans is None:
      raise ValueError(f'case {self.name!r} has no spans; call simulate(..., spans=True)')

  @property
  def spans(self) -> Spans:
    assert self.simulated.spans is not None
    return self.simulated.spans

  def lengths(self) -> dict[int, int]:
    """Returns the length of each sample id, over all micro-batches."""
    return {
      sample: length
      for plan in self.plans
      for sample, length in zip(plan.sample_ids, plan.lengths, strict=True)
    }


def check_cases(run: RunConfig, cases: Sequence[Case]) -> None:
  """Raises ValueError unless the cases are of the run's cluster, hold one batch and differ in name."""
  if not cases:
    raise ValueError('a report needs at least one case')
  for number, case in enumerate(cases):
    if case.name in (other.name for other in cases[:number]):
      raise ValueError(f'two cases are called {case.name!r}')
    if case.lengths() != cases[0].lengths():
      raise ValueError(f'case {case.name!r} holds other samples than case {cases[0].name!r}')
    for plan in case.plans:
      if plan.num_ranks != run.cluster.num_ranks:
        raise ValueError(
          f'case {case.name!r} has a plan for {plan.num_ranks} ranks; the run has {run.cluster.num_ranks}'
        )


def family(cause: str) -> str:
  """Returns which of `FAMILIES` a cause of the simulator belongs to."""
  if cause in WAIT:
    return 'waiting'
  if cause == 'parameters':
    return 'parameters'
  if cause in TRANSFER:
    return 'exchange'
  return 'padding' if cause == 'padding' else 'compute'


def cases_of(run: RunConfig, lengths: Sequence[int] | np.ndarray) -> list[Case]:
  """Returns what a picture of a batch shows: the baseline first, then the modes up to the config's own."""
  own = run.planner.mode
  modes = {'static': (BASELINE, 'static'), 'solve': (BASELINE, 'repack', 'solve')}.get(own, (BASELINE, own))
  costs = model_costs(run.cluster, run.model)
  found = simulate_modes(lengths, costs, run.batch_planner, tuple(dict.fromkeys(modes)), spans=True)
  return [Case(mode, plans, step) for mode, (plans, step) in found.items()]
