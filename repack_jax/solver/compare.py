"""One batch of lengths in several modes: the plans of each, and the step they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from repack_jax.config import RunConfig, allowed_sp_degrees
from repack_jax.plan.plan import Plan
from repack_jax.predict.cost_model import CostModel
from repack_jax.predict.simulator import Simulated, simulate
from repack_jax.solver import solve, static_degree

BASELINE = 'parents'
REDISTRIBUTE = 'redistribute'
# What can be simulated. All but `redistribute`, which is what repacking avoids, can be run as well.
SIMULATED_MODES = ('static', BASELINE, REDISTRIBUTE, 'repack', 'solve')


def plan_lengths(run: RunConfig, lengths: Sequence[int] | np.ndarray, mode: str) -> list[Plan]:
  """The plans of a batch in a mode of the planner; they depend on its lengths and the configs alone."""
  planner = dataclasses.replace(run.planner, mode=mode)
  if mode == 'static' and not planner.static_sp_degree:
    degrees = allowed_sp_degrees(run.cluster, run.model, planner)
    degree = static_degree(degrees, planner.capacity_tokens, run.data.max_document_tokens)
    planner = dataclasses.replace(planner, static_sp_degree=degree)
  return solve(lengths, run.cluster, run.model, planner)


def simulate_modes(
  run: RunConfig, lengths: Sequence[int] | np.ndarray, modes: Sequence[str], spans: bool = False
) -> dict[str, tuple[tuple[Plan, ...], Simulated]]:
  """Plans a batch in each of these `SIMULATED_MODES` and plays the step."""
  cost = CostModel(run.cluster, run.model)
  found: dict[str, tuple[tuple[Plan, ...], Simulated]] = {}
  for mode in modes:
    redistribute = mode == REDISTRIBUTE
    plans = tuple(plan_lengths(run, lengths, 'repack' if redistribute else mode))
    found[mode] = plans, simulate(cost, plans, redistribute=redistribute, spans=spans)
  return found
