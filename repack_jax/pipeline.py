"""Batches -> planned, packed micro-batches on devices, made ahead of the step that trains on them."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from repack_jax.arrays import HasTokens
from repack_jax.config import RunConfig, allowed_sp_degrees
from repack_jax.cost import cross_node_bytes
from repack_jax.data.batches import Batch, Batcher
from repack_jax.plan import Plan
from repack_jax.solver import solve, static_degree

PackAndPut = Callable[[Plan, Sequence[HasTokens]], Any]


@dataclass(frozen=True)
class PlannedStep:
  """One optimizer step, ready to run.

  Attributes:
    plans: one a micro-batch.
    arrays: for each plan its packed arrays on the devices.
    target_tokens: tokens of the batch that have a target.
    plan_s: seconds that planning and packing took.
    cross_node_bytes, cross_node_bytes_disabled: what the exchanges of this step send between nodes, and
      what they would with repacking disabled (mode `parents` on the same batch).
  """

  batch: Batch
  plans: tuple[Plan, ...]
  arrays: tuple[Any, ...]
  target_tokens: int
  plan_s: float
  cross_node_bytes: int
  cross_node_bytes_disabled: int

  @property
  def plan_digest(self) -> str:
    """One digest for all the step's plans; the plan's own where there is one."""
    digests = [plan.digest() for plan in self.plans]
    return digests[0] if len(digests) == 1 else hashlib.sha256(''.join(digests).encode()).hexdigest()[:16]


def plan_batch(run: RunConfig, batch: Batch, mode: str) -> list[Plan]:
  """The plans of a batch in a mode; they depend on the batch's lengths and the configs alone."""
  planner = dataclasses.replace(run.planner, mode=mode)
  if mode == 'static' and not planner.static_sp_degree:
    degrees = allowed_sp_degrees(run.cluster, run.model, planner)
    degree = static_degree(degrees, planner.capacity_tokens, run.data.max_document_tokens)
    planner = dataclasses.replace(planner, static_sp_degree=degree)
  return solve([len(sample) for sample in batch.samples], run.cluster, run.model, planner)


def planned_steps(run: RunConfig, batcher: Batcher, pack_and_put: PackAndPut) -> Iterator[PlannedStep]:
  """Endless: each batch of the batcher, planned and packed."""
  for batch in batcher:
    start = time.perf_counter()
    plans = plan_batch(run, batch, run.planner.mode)
    arrays = tuple(pack_and_put(plan, batch.samples) for plan in plans)
    plan_s = time.perf_counter() - start
    disabled = plans if run.planner.mode == 'parents' else plan_batch(run, batch, 'parents')
    yield PlannedStep(
      batch=batch,
      plans=tuple(plans),
      arrays=arrays,
      target_tokens=sum(int((sample.targets >= 0).sum()) for sample in batch.samples),
      plan_s=plan_s,
      cross_node_bytes=sum(cross_node_bytes(plan, run.model) for plan in plans),
      cross_node_bytes_disabled=sum(cross_node_bytes(plan, run.model) for plan in disabled),
    )
