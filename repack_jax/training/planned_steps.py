"""Batches -> planned, packed micro-batches on devices, made ahead of the step that trains on them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from repack_jax.config.run import RunConfig
from repack_jax.data.batches import Batch
from repack_jax.plan.arrays import NO_TARGET, PlanArrays, pack
from repack_jax.plan.plan import Plan
from repack_jax.plan.program import Program
from repack_jax.predict.cost_model import model_costs
from repack_jax.solver import Solution, solve
from repack_jax.solver.programs import Programs
from repack_jax.training.hooks import Every, call_hooks

Put = Callable[[PlanArrays], Any]


@dataclass(frozen=True)
class PlannedStep:
  """One optimizer step, ready to run.

  Attributes:
    step: its number; the first is 1.
    solution: its plans, and those with repacking disabled.
    programs, arrays: for each plan what runs it, and its packed arrays on the devices.
    target_tokens: tokens of the batch that have a target.
    plan_s: seconds that planning and packing took.
    cross_node_bytes, cross_node_bytes_disabled: what the plans' exchanges send between nodes, and what they
      would with repacking disabled.
  """

  step: int
  batch: Batch
  solution: Solution
  programs: tuple[Program, ...]
  arrays: tuple[Any, ...]
  target_tokens: int
  plan_s: float
  cross_node_bytes: int
  cross_node_bytes_disabled: int

  @property
  def plans(self) -> tuple[Plan, ...]:
    """Returns the plans, one a micro-batch."""
    return self.solution.plans

  @property
  def plan_digest(self) -> str:
    """Returns one digest for all the step's plans; the plan's own where there is one."""
    digests = [plan.digest() for plan in self.plans]
    return digests[0] if len(digests) == 1 else hashlib.sha256(''.join(digests).encode()).hexdigest()[:16]


def planned_steps(
  run: RunConfig,
  batches: Iterable[Batch],
  put: Put,
  hooks: Sequence[Every[PlannedStep]] = (),
) -> Iterator[PlannedStep]:
  """Yields each batch, planned and packed.

  Args:
    put: brings arrays to the devices of the step that runs them.
    hooks: called with steps as they are planned, in the thread that plans ahead.
  """
  costs, planner = model_costs(run.cluster, run.model), run.batch_planner
  chooser = Programs(costs, planner, run.train.steps)
  for batch in batches:
    start = time.perf_counter()
    solution = solve([len(sample) for sample in batch.samples], costs, planner)
    programs = chooser.choose(batch.index + 1, solution.plans)
    arrays = tuple(
      put(pack(plan, batch.samples, program)) for plan, program in zip(solution.plans, programs, strict=True)
    )
    plan_s = time.perf_counter() - start
    planned = PlannedStep(
      step=batch.index + 1,
      batch=batch,
      solution=solution,
      programs=programs,
      arrays=arrays,
      target_tokens=sum(int((sample.targets != NO_TARGET).sum()) for sample in batch.samples),
      plan_s=plan_s,
      cross_node_bytes=sum(map(costs.cross_node_bytes, solution.plans, programs)),
      cross_node_bytes_disabled=sum(map(costs.cross_node_bytes, solution.baseline_plans)),
    )
    call_hooks(hooks, planned.step, planned)
    yield planned
