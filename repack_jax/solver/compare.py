"""One batch of lengths in several modes: the plans of each, and the step they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from repack_jax.config.run import PlannerConfig
from repack_jax.plan.plan import Plan
from repack_jax.predict.costs import Costs
from repack_jax.predict.simulator import Simulated, simulate
from repack_jax.solver.solve import BASELINE, solve_modes

REDISTRIBUTE = 'redistribute'
SOLVE_NO_SOLO = 'solve, no solo'
# What can be simulated. All but `redistribute`, which is what repacking avoids, can be run as well.
SIMULATED_MODES = ('static', BASELINE, REDISTRIBUTE, 'repack', SOLVE_NO_SOLO, 'parents_solo', 'solve')

# The same system with sparse layers by halo: without repacking, which these do not need, and the better of
# both for each plan. Names of (mode, `PlannerConfig.sparse_exchange`).
HALO_MODES = {
  'parents, halo': (BASELINE, 'halo'),
  'parents_solo, halo': ('parents_solo', 'halo'),
  'solve, auto': ('solve', 'auto'),
}

Played = tuple[tuple[Plan, ...], Simulated]


def config_of(planner: PlannerConfig, mode: str) -> PlannerConfig:
  """Returns the config that makes the plans of one of `SIMULATED_MODES` or `HALO_MODES`.

  The rest is as in `planner`.
  """
  if mode in HALO_MODES:
    own, sparse_exchange = HALO_MODES[mode]
    return dataclasses.replace(planner, mode=own, sparse_exchange=sparse_exchange)
  if mode == SOLVE_NO_SOLO:
    return dataclasses.replace(planner, mode='solve', solo=False)
  return dataclasses.replace(planner, mode='repack' if mode == REDISTRIBUTE else mode)


def simulate_modes(
  lengths: Sequence[int] | np.ndarray,
  costs: Costs,
  planner: PlannerConfig,
  modes: Sequence[str],
  spans: bool = False,
) -> dict[str, Played]:
  """Returns a batch's plans in each of these modes, and the step as it is played.

  Args:
    planner: all but the mode, and but how sparse layers exchange in `HALO_MODES`.
    modes: of `SIMULATED_MODES` and `HALO_MODES`.
    spans: record every span of every rank, for pictures.
  """
  solutions = solve_modes(lengths, costs, planner, {mode: config_of(planner, mode) for mode in modes})
  played: dict[str, Played] = {}
  for mode, solution in solutions.items():
    redistribute = mode == REDISTRIBUTE
    step = solution.simulated
    if redistribute or spans:
      step = simulate(costs, solution.plans, redistribute=redistribute, spans=spans)
    played[mode] = solution.plans, step
  return played
