"""Measures the planner: its time, what it leaves on the table, and whether its plans are legal. On one core.

    python scripts/bench_planner.py --only time bound --json planner.json

Sections, all with one model on H100 nodes (`planner_cases.py`):

    time      milliseconds to plan a batch of real lengths, on 32, 512 and 4,096 ranks, after a warm-up
    exact     step over that of the best plan there is, for small batches (needs OR-tools)
    bound     step over a lower bound for real lengths, and where the difference comes from
    peers     step of planners in the manner of other systems over this one's (needs OR-tools)
    micro     step over a lower bound where 4 or 8 micro-batches are needed, peers' too (needs OR-tools)
    equal     step over that of the best peer for a few long samples of one length (needs OR-tools)
    capacity  step at a capacity over the best at smaller ones
    sweep     legality of plans of random batches

A step is what the simulator plays, less what no plans of the batch can avoid: the optimizer, and the
parameter collectives of as many micro-batches as its tokens fill (`planner_measure.step_s`). So a micro-batch
more counts with its collectives, and ratios are not drawn to 1 by what planning cannot change.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import bench_common
import planner_cases
import planner_peers
import planner_sections
from planner_cases import PlanCase
from planner_measure import COMPARED, Files, Rows, counted, percent, plans_of, solution_of, step_s, timed

from repack_jax.commands import command_line
from repack_jax.data.lengths import read_lengths
from repack_jax.files import write_whole
from repack_jax.plan.plan import LAYOUTS, Group, Plan
from repack_jax.solver import BASELINE, SampleTooLong, Solution
from repack_jax.solver.bounds import lower_bound_s

ROOT = pathlib.Path(__file__).resolve().parent.parent

SIZES = ((1, 1_000, 0.025), (16, 16_000, 0.250), (128, 131_000, 2.0))  # domains, samples, seconds aimed at
# Mean gaps to the bound aimed at, in percent.
BOUND_AIMS = {(512, 'web_documents'): 5.0, (512, 'wikipedia'): 8.0}


# --- time -----------------------------------------------------------------------------------------------


def time_rows(files: Files, args: argparse.Namespace) -> Rows:
  """Median over batches; `worst_ms` and `micro_batches` are of mode `solve`."""
  rows: Rows = []
  for domains, samples, aim_s in SIZES:
    for name, lengths in files.items():
      bench_common.progress(f'{32 * domains} ranks, {name}')
      warm_up, *cases = planner_cases.real_cases(name, lengths, domains, samples, args.batches + 1)
      row: dict[str, Any] = {
        'ranks': 32 * domains,
        'samples': samples,
        'lengths': name,
        'aim_ms': 1e3 * aim_s,
      }
      for mode in COMPARED:
        plans_of(warm_up, mode)
        found = [timed(partial(plans_of, case, mode)) for case in cases]
        row[f'{mode}_ms'] = round(1e3 * statistics.median(seconds for _, seconds in found), 1)
      row['worst_ms'] = round(1e3 * max(seconds for _, seconds in found), 1)
      row['micro_batches'] = max(len(plans) for plans, _ in found)
      rows.append(row)
  return rows


# --- exact ----------------------------------------------------------------------------------------------


def exact_rows(files: Files, args: argparse.Namespace) -> Rows:
  """Gaps to the best plan by mode and mesh; `split` cases, which `solve` gives micro-batches, count apart."""
  from repack_jax.solver.exact import exact

  found: Rows = []
  for number, case in enumerate(planner_cases.small_cases(files, args.cases)):
    for mode in ('parents', 'solve'):
      config = dataclasses.replace(case.config, mode=mode)
      plans = plans_of(case, mode)
      begun = time.perf_counter()
      try:
        best, proven = exact(case.lengths, case.costs, config, args.exact_limit_s, 1)
      except ValueError:  # needs micro-batches, or so it seems
        continue
      found.append(
        {
          'case': number,
          'kind': case.name,
          'mode': mode,
          'mesh': f'{case.costs.cluster.nodes} x {case.costs.cluster.ranks_per_node}',
          'gap': step_s(plans, case) / step_s([best], case) - 1,
          'proven': proven,
          'exact_s': time.perf_counter() - begun,
          'split': len(plans) > 1,
          'lengths': case.lengths.tolist(),
          'capacity_tokens': config.capacity_tokens,
          'found': ' | '.join(layout_text(plan) for plan in plans),
          'best': layout_text(best),
        }
      )
    if number % 20 == 19:
      bench_common.progress(f'{number + 1} of {args.cases}, worst {max(row["gap"] for row in found):.2%}')
  worst_first = sorted(found, key=lambda row: -row['gap'])
  of_mode = {mode: [row for row in worst_first if row['mode'] == mode] for mode in ('solve', 'parents')}
  for row in of_mode['solve'][:6] + of_mode['parents'][:6]:
    print(f'gap {row["gap"]:.2%}: case {row["case"]}, {row["kind"]}, mode {row["mode"]}, {row["mesh"]} ranks')
    print(f'  capacity {row["capacity_tokens"]}, proven {row["proven"]}, lengths {row["lengths"]}')
    print(f'  found: {row["found"]}\n  best:  {row["best"]}')
  meshes = [*sorted({row['mesh'] for row in found}), 'all']
  return [summary(mode, mesh, found) for mode in ('parents', 'solve') for mesh in meshes]


def summary(mode: str, mesh: str, found: Rows) -> dict[str, Any]:
  chosen = [row for row in found if row['mode'] == mode and mesh in (row['mesh'], 'all')]
  whole = [row for row in chosen if not row['split']]
  gaps = [row['gap'] for row in whole]
  return {
    'mode': mode,
    'mesh': mesh,
    'cases': len(whole),
    'proven': sum(row['proven'] for row in whole),
    'median_%': percent(gaps, 0.5),
    'p90_%': percent(gaps, 0.9),
    'worst_%': percent(gaps, 1.0),
    'exact_s': statistics.mean(row['exact_s'] for row in whole),
    'split': len(chosen) - len(whole),
  }


def layout_text(plan: Plan) -> str:
  """The groups that are not empty, as `SP degree @ first rank [lengths]`."""

  def text(groups: Sequence[Group]) -> str:
    held = ((group, [plan.lengths[s] for s in group.samples]) for group in groups if group.samples)
    return ' '.join(f'{group.size}@{group.first_rank}{lengths}'.replace(', ', ',') for group, lengths in held)

  children = '' if plan.parents == plan.children else f'; children {text(plan.children)}'
  return f'parents {text(plan.parents)}{children}' + (f'; solo {text(plan.solo)}' if plan.solo else '')


# --- bound ----------------------------------------------------------------------------------------------


def bound_rows(files: Files, args: argparse.Namespace) -> Rows:
  """Gaps to the lower bound in percent of it, and solve's mean gap by cause."""
  rows: Rows = []
  for domains, samples, _ in SIZES[:2]:
    for name, lengths in files.items():
      bench_common.progress(f'{32 * domains} ranks, {name}')
      gaps: dict[str, list[float]] = {mode: [] for mode in COMPARED}
      parts: list[dict[str, float]] = []
      for case in planner_cases.real_cases(name, lengths, domains, samples, args.bound_batches):
        bound_s = lower_bound_s(case.lengths, case.costs, case.config)
        for mode in COMPARED:
          plans = plans_of(case, mode)
          gaps[mode].append(step_s(plans, case) / bound_s - 1)
        parts.append({cause: s / bound_s for cause, s in causes_s(plans, case).items()})
      row: dict[str, Any] = {'ranks': 32 * domains, 'lengths': name}
      if aim := BOUND_AIMS.get((32 * domains, name)):
        row['aim_%'] = aim
      for mode in reversed(COMPARED):
        row |= {f'{mode}_%': percent(gaps[mode]), f'{mode}_worst_%': percent(gaps[mode], 1.0)}
      row |= {f'{cause}_%': percent([part[cause] for part in parts]) for cause in parts[0]}
      rows.append(row)
  return rows


def causes_s(plans: Sequence[Plan], case: PlanCase) -> dict[str, float]:
  """Seconds over the bound by cause, which add up unless one sample is the bound of several domains' layers.

  Those of the layers in a layout are their attention, exchanges and experts.
  """
  cluster = dataclasses.replace(case.costs.cluster, intra_node_latency_s=0.0, inter_node_latency_s=0.0)
  fast = dataclasses.replace(case.costs, cluster=cluster)
  slots = (
    sum(plan.capacity_tokens for plan in plans) - sum(plan.total_tokens for plan in plans) / cluster.num_ranks
  )
  causes = {'slots': slots * fast.slot_s}
  for layout in LAYOUTS:  # a model of these layers alone
    part = dataclasses.replace(fast, layers=tuple(layer for layer in fast.layers if layer.layout == layout))
    bound_s = lower_bound_s(case.lengths, part, case.config)
    of_part_s = step_s(plans, dataclasses.replace(case, costs=part))
    causes[f'{layout}_layers'] = of_part_s - bound_s - slots * part.slot_s
  return causes | {'latency': step_s(plans, case) - step_s(plans, dataclasses.replace(case, costs=fast))}


# --- peers ----------------------------------------------------------------------------------------------


def peers_rows(files: Files, args: argparse.Namespace) -> Rows:
  """Predicted steps over that of mode `solve` on 32 ranks, and seconds of planning."""
  rows: Rows = []
  for name, lengths in files.items():
    outcomes: list[str] = []
    ratios: dict[str, list[float]] = {}
    planning_s: dict[str, list[float]] = {}
    for number, case in enumerate(planner_cases.real_cases(name, lengths, 1, 1_000, args.batches)):
      bench_common.progress(f'{name}, batch {number}')
      arguments = (case.lengths, case.costs, case.config)
      makers: dict[str, Callable[[], Sequence[Plan]]] = {
        'solve': partial(plans_of, case, 'solve'),
        'parents': partial(plans_of, case, 'parents'),
        'flexsp_milp': partial(
          planner_peers.flexsp_milp, *arguments, limit_s=args.milp_limit_s, outcomes=outcomes
        ),
        'longest_first_greedy': partial(planner_peers.longest_first_greedy, *arguments),
      }
      found = {planner: timed(make) for planner, make in makers.items()}
      for planner, (plans, seconds) in found.items():
        best_s = step_s(found['solve'][0], case)
        ratios.setdefault(planner, []).append(step_s(plans, case) / best_s)
        planning_s.setdefault(planner, []).append(seconds)
    for planner, values in ratios.items():
      seconds = statistics.median(planning_s[planner])
      rows.append(
        {
          'lengths': name,
          'planner': planner,
          'step_over_solve': round(statistics.mean(values), 4),
          'least': round(min(values), 4),
          'most': round(max(values), 4),
          'planning_s': round(seconds, 4),
          'milp_over_it': round(statistics.median(planning_s['flexsp_milp']) / seconds, 1),
          'milps': counted(outcomes) if planner == 'flexsp_milp' else '',
        }
      )
  return rows


# --- sweep ----------------------------------------------------------------------------------------------


def sweep_rows(files: Files, args: argparse.Namespace) -> Rows:
  """Random batches, and what failed; `planner_cases.random_case(number)` makes a batch again."""
  failed: dict[str, list[int]] = {}
  plans, too_long, begun = 0, 0, time.perf_counter()
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    for number in range(args.sweep_from, args.sweep_from + args.sweep):
      case = planner_cases.random_case(number)
      widest = case.costs.degrees(case.config)[-1]
      must_refuse = bool((case.lengths > widest * case.config.capacity_tokens).any())
      try:
        found = solution_of(case, case.config.mode)
        plans += len(found.plans)
        wrong = 'accepted a sample that is too long' if must_refuse else what_is_wrong(found, case)
      except SampleTooLong:
        too_long += 1
        wrong = '' if must_refuse else 'SampleTooLong, though all fit'
      except Exception as error:  # whatever it is, it is a finding
        wrong = f'{type(error).__name__}: {error}'
      if wrong:
        failed.setdefault(wrong, []).append(number)
      if number % 1000 == 999:
        bench_common.progress(
          f'{number + 1 - args.sweep_from} of {args.sweep}, {sum(map(len, failed.values()))} failures'
        )
  rate = round(args.sweep / (time.perf_counter() - begun), 1)
  about = {'batches_per_s': rate, 'plans': plans, 'refused': too_long}
  all_failed = {'failures': sum(map(len, failed.values()))}
  return [
    {'what': 'all', 'batches': args.sweep, **about, **all_failed},
    *({'what': wrong, 'failures': len(of), 'cases': str(of[:5])} for wrong, of in failed.items()),
  ]


def what_is_wrong(found: Solution, case: PlanCase) -> str:
  """What of the plans breaks a rule; empty where nothing does."""
  for plan in found.plans:
    plan.validate(case.costs.wire)
    if plan.lengths != tuple(case.lengths[list(plan.sample_ids)].tolist()):
      return 'lengths are not those of the batch'
  if sorted(s for plan in found.plans for s in plan.sample_ids) != list(range(len(case.lengths))):
    return 'not each sample once'
  if found.baseline_plans != plans_of(case, BASELINE):
    return 'the baseline is not what its mode gives'
  for mode in ('static', 'parents'):  # which all other modes allow, by the simulator: see `solve`
    simpler_s = solution_of(case, mode).simulated.step_s
    if case.config.mode != 'static' and found.simulated.step_s > simpler_s * (1 + 1e-9):
      return f'slower than in mode {mode}'
  return ''


SECTIONS = {
  'time': time_rows,
  'exact': exact_rows,
  'bound': bound_rows,
  'peers': peers_rows,
  'micro': planner_sections.micro_rows,
  'equal': planner_sections.equal_rows,
  'capacity': planner_sections.capacity_rows,
  'sweep': sweep_rows,
}


def parser() -> argparse.ArgumentParser:
  made = bench_common.parser(__doc__ or '')
  add = made.add_argument
  add('--lengths', metavar='FILE', help='a file of lengths (the two histograms in configs/lengths)')
  add('--only', nargs='+', choices=SECTIONS, default=list(SECTIONS), metavar='SECTION')
  add('--batches', type=int, default=5, help='timed batches of a case, and of `peers` (5)')
  add('--bound-batches', type=int, default=20, help='batches of a case of `bound` (20)')
  add('--cases', type=int, default=240, help='cases of `exact` (240)')
  add('--exact-limit-s', type=float, default=30.0, help='seconds of the exact solver a case (30)')
  add('--milp-limit-s', type=float, default=5.0, help='seconds of a MILP of a peer (5)')
  add('--micro-batches', type=int, default=10, help='batches of a case of `micro` (10)')
  add('--micro-samples', type=int, default=1_000, help='samples of each (1000)')
  counts, thousands = (3, 5, 9, 12, 16, 24, 33, 48), (25, 50, 100, 150, 200, 300)
  add('--equal-counts', type=int, nargs='+', default=counts, help='samples of a batch of `equal` (3 .. 48)')
  add('--equal-thousands', type=int, nargs='+', default=thousands, help='their tokens / 1000 (25 .. 300)')
  add('--capacity-batches', type=int, default=10, help='batches of `capacity` (10)')
  add('--capacity-samples', type=int, default=1_000, help='samples of each (1000)')
  add('--sweep', type=int, default=2_000, help='batches of `sweep` (2000)')
  add('--sweep-from', type=int, default=0, help='number of its first batch (0)')
  return made


def main() -> None:
  args = parser().parse_args()
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  names = [args.lengths] if args.lengths else sorted((ROOT / 'configs' / 'lengths').glob('*.csv'))
  files: Files = {pathlib.Path(name).stem: read_lengths(name) for name in names}
  about, results = bench_common.machine(), {}
  print(', '.join(f'{key} {value}' for key, value in about.items()))
  for section in args.only:
    rows = results[section] = SECTIONS[section](files, args)
    print(f'\n{section}: {SECTIONS[section].__doc__ or ""}')
    bench_common.print_table(rows)
    sys.stdout.flush()
    if args.json:
      write_whole(args.json, json.dumps({'machine': about, 'results': results}, indent=2) + '\n')


if __name__ == '__main__':
  command_line.run(main)
