"""Batches -> planned, packed micro-batches on devices, made ahead of the step that trains on them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from repack_jax.config import RunConfig
from repack_jax.data.batches import Batch, Batcher
from repack_jax.plan.arrays import HasTokens
from repack_jax.plan.plan import Plan
from repack_jax.predict.cost_model import CostModel, cross_node_bytes
from repack_jax.predict.simulator import simulate
from repack_jax.solver.compare import BASELINE, plan_lengths

PackAndPut = Callable[[Plan, Sequence[HasTokens]], Any]
Draw = Callable[[int, Sequence[int]], None]


@dataclass(frozen=True)
class PlannedStep:
  """One optimizer step, ready to run.

  Attributes:
    plans: one a micro-batch.
    arrays: for each plan its packed arrays on the devices.
    target_tokens: tokens of the batch that have a target.
    plan_s: seconds that planning and packing took.
    predicted_s, cross_node_bytes: what the simulator gives for these plans by the config's rates, and what
      their exchanges send between nodes.
    predicted_s_disabled, cross_node_bytes_disabled: the same with repacking disabled (mode `parents` on the
      same batch).
  """

  batch: Batch
  plans: tuple[Plan, ...]
  arrays: tuple[Any, ...]
  target_tokens: int
  plan_s: float
  predicted_s: float
  predicted_s_disabled: float
  cross_node_bytes: int
  cross_node_bytes_disabled: int

  @property
  def plan_digest(self) -> str:
    """One digest for all the step's plans; the plan's own where there is one."""
    digests = [plan.digest() for plan in self.plans]
    return digests[0] if len(digests) == 1 else hashlib.sha256(''.join(digests).encode()).hexdigest()[:16]


def planned_steps(
  run: RunConfig, batcher: Batcher, pack_and_put: PackAndPut, draw: Draw | None = None
) -> Iterator[PlannedStep]:
  """Endless: each batch of the batcher, planned and packed.

  Args:
    draw: called with a step's number and lengths every `TrainConfig.draw_every_steps`.
  """
  mode, every = run.planner.mode, run.train.draw_every_steps
  cost = CostModel(run.cluster, run.model)
  for batch in batcher:
    lengths = [len(sample) for sample in batch.samples]
    start = time.perf_counter()
    plans = plan_lengths(run, lengths, mode)
    arrays = tuple(pack_and_put(plan, batch.samples) for plan in plans)
    plan_s = time.perf_counter() - start
    disabled = plans if mode == BASELINE else plan_lengths(run, lengths, BASELINE)
    step = batch.index + 1
    if draw and every and step % every == 0:
      draw(step, lengths)
    yield PlannedStep(
      batch=batch,
      plans=tuple(plans),
      arrays=arrays,
      target_tokens=sum(int((sample.targets >= 0).sum()) for sample in batch.samples),
      plan_s=plan_s,
      predicted_s=simulate(cost, plans).step_s,
      predicted_s_disabled=simulate(cost, disabled).step_s,
      cross_node_bytes=sum(cross_node_bytes(plan, run.model) for plan in plans),
      cross_node_bytes_disabled=sum(cross_node_bytes(plan, run.model) for plan in disabled),
    )
