"""Sections of `bench_planner.py`: several micro-batches, a few long equal samples, and several capacities."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import bench_common
import numpy as np
import planner_cases
import planner_peers
from planner_cases import PlanCase
from planner_measure import (
  COMPARED,
  Files,
  Rows,
  counted,
  plans_of,
  step_s,
  timed,
)

from repack_jax.plan.plan import Plan
from repack_jax.solver.bounds import lower_bound_s

MICRO_BATCHES = (4, 8)
MICRO_AIMS = {'aim_mean': 1.08, 'aim_worst': 1.15}  # of mode `solve`
EQUAL_AIM = 1.01
CAPACITIES = (1.05, 1.1, 1.25, 1.5, 2.0)  # times a rank's mean tokens
CAPACITY_AIM = 1.002
OWN_NUMBERS = 2  # numbers of micro-batches that peers try where they compose them: the least, and one more

Planner = Callable[[np.ndarray], Sequence[Plan]]


# --- micro ----------------------------------------------------------------------------------------------


@dataclass
class _Found:
  """What a planner made of a section's batches."""

  over_bound: list[float] = field(default_factory=list)
  micro_batches: list[int] = field(default_factory=list)
  planning_s: list[float] = field(default_factory=list)


def micro_rows(files: Files, args: argparse.Namespace) -> Rows:
  """Steps over the lower bound, which holds for any number of micro-batches, where 4 or 8 are needed.

  Peers lay out the micro-batches of `solve`, and then their own. The first compares layouts alone, if they
  find room for each; one that they don't becomes several, and `made` is more than that of `solve`.
  """
  rows: Rows = []
  for number in MICRO_BATCHES:
    for name, lengths in files.items():
      found: dict[str, _Found] = {}
      outcomes: dict[str, list[str]] = {}
      cases = planner_cases.micro_cases(name, lengths, number, args.micro_samples, args.micro_batches)
      for i, case in enumerate(cases):
        bench_common.progress(f'{number} micro-batches, {name}, batch {i}')
        bound_s = lower_bound_s(case.lengths, case.costs, case.config)
        for planner, make in micro_makers(case, args.milp_limit_s, outcomes).items():
          plans, seconds = timed(make)
          of = found.setdefault(planner, _Found())
          of.over_bound.append(step_s(plans, case) / bound_s)
          of.micro_batches.append(len(plans))
          of.planning_s.append(seconds)
      for planner, of in found.items():
        rows.append(
          {
            'micro_batches': number,
            'lengths': name,
            'planner': planner,
            'mean': round(statistics.mean(of.over_bound), 4),
            'worst': round(max(of.over_bound), 4),
            **(MICRO_AIMS if planner == 'solve' else {}),
            'made': round(statistics.mean(of.micro_batches), 1),
            'planning_s': round(statistics.median(of.planning_s), 4),
            'milps': counted(outcomes.get(planner, [])),
          }
        )
  return rows


def micro_makers(
  case: PlanCase, milp_limit_s: float, outcomes: dict[str, list[str]]
) -> dict[str, Callable[[], Sequence[Plan]]]:
  """Planners by name, called to plan the case; `outcomes` receives those of MILPs by the same names."""
  makers: dict[str, Callable[[], Sequence[Plan]]] = {
    mode: partial(plans_of, case, mode) for mode in reversed(COMPARED)
  }
  solved = plans_of(case, 'solve')
  said = outcomes.setdefault('flexsp_milp, same', [])
  for peer, planner in peers_of(case, milp_limit_s, 1, said).items():
    makers[f'{peer}, same'] = partial(planner_peers.in_micro_batches_of, solved, planner)
  said = outcomes.setdefault('flexsp_milp, own', [])
  for peer, planner in peers_of(case, milp_limit_s, OWN_NUMBERS, said).items():
    makers[f'{peer}, own'] = partial(planner, case.lengths)
  return makers


def peers_of(
  case: PlanCase, milp_limit_s: float, numbers: int, outcomes: list[str] | None = None
) -> dict[str, Planner]:
  """The peers as planners of some of a case's samples; `numbers` and `outcomes` as in `planner_peers`."""

  def milp(lengths: np.ndarray) -> list[Plan]:
    return planner_peers.flexsp_milp(lengths, case.costs, case.config, numbers, milp_limit_s, outcomes)

  def greedy(lengths: np.ndarray) -> list[Plan]:
    return planner_peers.longest_first_greedy(lengths, case.costs, case.config, numbers)

  return {'flexsp_milp': milp, 'longest_first_greedy': greedy}


# --- equal ----------------------------------------------------------------------------------------------


def equal_rows(files: Files, args: argparse.Namespace) -> Rows:
  """Steps of mode `solve` over the best peer's, for a few long samples of one length on 32 ranks."""
  found: Rows = []
  for number, case in enumerate(planner_cases.equal_cases(args.equal_counts, args.equal_thousands)):
    plans = {'solve': plans_of(case, 'solve')}
    plans |= {
      peer: planner(case.lengths) for peer, planner in peers_of(case, args.milp_limit_s, OWN_NUMBERS).items()
    }
    seconds = {planner: step_s(of, case) for planner, of in plans.items()}
    best = min((planner for planner in plans if planner != 'solve'), key=lambda planner: seconds[planner])
    found.append(
      {
        'capacity': case.name,
        'over': seconds['solve'] / seconds[best],
        'best': best,
        'samples': f'{len(case.lengths)} x {case.lengths[0]:,}',
        'made': f'{len(plans["solve"])} micro-batches, the peer {len(plans[best])}',
      }
    )
    if number % 20 == 19:
      bench_common.progress(f'{number + 1} batches, worst {max(row["over"] for row in found):.4f}')
  for row in sorted(found, key=lambda row: -row['over'])[:8]:
    if row['over'] > EQUAL_AIM:
      about = f'{row["samples"]} tokens, capacity {row["capacity"]}, best peer {row["best"]}'
      print(f'{row["over"]:.4f}: {about}; {row["made"]}')
  rows: Rows = []
  for capacity in dict.fromkeys(row['capacity'] for row in found):
    of = [row for row in found if row['capacity'] == capacity]
    over = [row['over'] for row in of]
    rows.append(
      {
        'capacity': capacity,
        'batches': len(of),
        'mean': round(statistics.mean(over), 4),
        'worst': round(max(over), 4),
        'aim_worst': EQUAL_AIM,
        'above_aim': sum(value > EQUAL_AIM for value in over),
        'worst_batch': max(of, key=lambda row: row['over'])['samples'],
      }
    )
  return rows


# --- capacity -------------------------------------------------------------------------------------------


def capacity_rows(files: Files, args: argparse.Namespace) -> Rows:
  """Steps of mode `solve` at a capacity over the best at smaller ones, whose plans are legal there too."""
  rows: Rows = []
  for name, lengths in files.items():
    bench_common.progress(name)
    over: dict[float, list[float]] = {slack: [] for slack in CAPACITIES[1:]}
    for case in planner_cases.real_cases(name, lengths, 1, args.capacity_samples, args.capacity_batches):
      best_s = np.inf
      for slack in CAPACITIES:
        capacity = planner_cases.capacity_of(case.lengths, case.costs.cluster, slack)
        at = replace(case, config=replace(case.config, capacity_tokens=capacity))
        seconds = step_s(plans_of(at, 'solve'), at)
        if slack in over:
          over[slack].append(seconds / best_s)
        best_s = min(best_s, seconds)
    rows += [
      {
        'lengths': name,
        'capacity_over_mean': slack,
        'mean': round(statistics.mean(values), 4),
        'worst': round(max(values), 4),
        'aim_worst': CAPACITY_AIM,
        'above_aim': sum(value > CAPACITY_AIM for value in values),
      }
      for slack, values in over.items()
    ]
  return rows
