"""Plays training steps on a cluster that need not exist, in every mode, and compares them.

    repack-simulate --config sim/paper_1f3s.gin
    repack-simulate --config sim/paper_1f3s.gin --config sim/wikipedia.gin

The config names a file of lengths, the model and the cluster's rates. All times are simulated: they follow
from those rates (repack_jax/predict/simulator.py says what is assumed). `bound` is computation alone, shared
evenly by all ranks: no communication, no padding, no waiting.

In all modes sparse layers exchange heads, as in the published system. Where `PlannerConfig.sparse_exchange`
allows a halo instead, there are rows of that besides: `parents, halo` has no repacking.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from repack_jax.checks import ConfigError
from repack_jax.commands import command_line
from repack_jax.config import RunConfig
from repack_jax.config.gin_files import load
from repack_jax.data.lengths import length_batches, read_lengths
from repack_jax.files import write_whole
from repack_jax.plan.plan import PARENTS, Plan
from repack_jax.predict import sizes as memory
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.costs import Costs
from repack_jax.predict.simulator import COMPUTE, TRANSFER, WAIT, Simulated, simulate
from repack_jax.report.words import amount, describe_cluster, describe_model, describe_rates
from repack_jax.solver import SampleTooLong
from repack_jax.solver.bounds import compute_bound_s
from repack_jax.solver.compare import (
  BASELINE,
  HALO_MODES,
  REDISTRIBUTE,
  SIMULATED_MODES,
  SOLVE_NO_SOLO,
  config_of,
  simulate_modes,
)
from repack_jax.solver.programs import Programs

BOUND = 'bound'
# Layerwise Repacking as published, on the steps with SP16/32 parents: (step time in %, MFU in points). Its
# solver knows no solo samples.
PUBLISHED = {'repack': (-5.95, 3.75), SOLVE_NO_SOLO: (-7.61, 4.83)}


class Tally:
  """What is summed up over some of the steps of one order of the lengths, for each mode."""

  def __init__(self) -> None:
    self.steps = 0
    self.step_s: Counter[str] = Counter()
    self.causes_s: dict[str, Counter[str]] = {}
    self.model_flops = 0.0

  def add(self, played: dict[str, Simulated], bound_s: float) -> None:
    self.steps += 1
    self.model_flops += played[BASELINE].model_flops
    self.step_s[BOUND] += bound_s  # type: ignore[assignment]
    for name, step in played.items():
      self.step_s[name] += step.step_s  # type: ignore[assignment]
      causes = self.causes_s.setdefault(name, Counter())
      for cause, seconds in step.seconds.items():
        causes[cause] += float(seconds.mean())  # type: ignore[assignment]

  def change(self, name: str) -> float:
    """Returns the change of the step's time against the baseline, in percent."""
    return 100 * (self.step_s[name] / self.step_s[BASELINE] - 1)


class Played:
  """Steps of several orders of the lengths: those whose parents cross nodes in the baseline, and all.

  Attributes:
    wide, everything: one tally a seed.
    widest: widest parent of the baseline -> steps.
    crossing: steps of a mode in which its own parents cross nodes.
    programs: compiled programs of a mode, the most of any seed.
    own_s: seconds of all steps if each plan had a program of its own.
    modes: those that are played.
  """

  def __init__(self, run: RunConfig, modes: Sequence[str]):
    self.run, self.modes = run, tuple(modes)
    self.wide: list[Tally] = []
    self.everything: list[Tally] = []
    self.widest: Counter[int] = Counter()
    self.crossing: Counter[str] = Counter()
    self.programs: Counter[str] = Counter()
    self.own_s: Counter[str] = Counter()

  @property
  def rows(self) -> tuple[str, ...]:
    """Returns the rows of tables."""
    return (*self.modes, BOUND)

  def mean_s(self, tallies: Sequence[Tally], name: str) -> float:
    return sum(tally.step_s[name] for tally in tallies) / sum(tally.steps for tally in tallies)

  def mfu(self, tallies: Sequence[Tally], name: str) -> float:
    """Returns the MFU of all these steps together; 0 where the cluster's peak is unknown."""
    peak = self.run.cluster.peak_flops_per_s * self.run.cluster.num_ranks
    seconds = sum(tally.step_s[name] for tally in tallies)
    return sum(tally.model_flops for tally in tallies) / (seconds * peak) if peak else 0.0

  def changes(self, tallies: Sequence[Tally], name: str) -> list[float]:
    """Returns the change of each seed that has such steps, in percent."""
    return [tally.change(name) for tally in tallies if tally.steps]

  def lost_points(self, name: str) -> float:
    """Returns the points of MFU that sharing programs costs."""
    mfu, shared_s = self.mfu(self.everything, name), sum(tally.step_s[name] for tally in self.everything)
    return 100 * mfu * (shared_s / self.own_s[name] - 1)


def play(run: RunConfig) -> Played:
  """Returns the steps of all seeds, each mode on the programs that it would compile."""
  costs, simulator = model_costs(run.cluster, run.model), run.simulator
  may_halo = run.planner.sparse_exchange != 'ulysses' and costs.halo_tokens is not None
  planner = dataclasses.replace(run.batch_planner, sparse_exchange='ulysses')
  played = Played(run, (*SIMULATED_MODES, *HALO_MODES) if may_halo else SIMULATED_MODES)
  file = read_lengths(simulator.lengths, run.data)
  total = simulator.seeds * simulator.steps
  with tqdm(total=total, unit='step', desc='simulating', disable=None) as bar:
    for seed in range(simulator.seed, simulator.seed + simulator.seeds):
      batches = length_batches(file, run.data, dataclasses.replace(simulator, seed=seed))
      programs = {mode: Programs(costs, config_of(planner, mode), simulator.steps) for mode in played.modes}
      played.wide.append(Tally())
      played.everything.append(Tally())
      for step in range(1, simulator.steps + 1):
        lengths = next(batches)
        try:
          found = simulate_modes(lengths, costs, planner, played.modes)
        except SampleTooLong as error:
          raise ConfigError(f'{simulator.lengths}: {error}') from None
        _add_step(played, costs, lengths, found, programs, step)
        bar.update()
      for mode, of in programs.items():
        played.programs[mode] = max(played.programs[mode], len(of.compiled))
  return played


def _add_step(
  played: Played,
  costs: Costs,
  lengths: np.ndarray,
  found: dict[str, tuple[tuple[Plan, ...], Simulated]],
  programs: dict[str, Programs],
  step: int,
) -> None:
  node_ranks = played.run.cluster.ranks_per_node
  as_run = {}
  for mode, (plans, own) in found.items():
    chosen = programs[mode].choose(step, plans)
    as_run[mode] = simulate(costs, plans, programs=chosen, redistribute=mode == REDISTRIBUTE)
    played.own_s[mode] += own.step_s  # type: ignore[assignment]
    played.crossing[mode] += max(plan.widest(PARENTS) for plan in plans) > node_ranks
  bound_s = compute_bound_s(lengths, costs)
  played.everything[-1].add(as_run, bound_s)
  widest = max(plan.widest(PARENTS) for plan in found[BASELINE][0])
  played.widest[widest] += 1
  if widest > node_ranks:
    played.wide[-1].add(as_run, bound_s)


def describe(run: RunConfig) -> str:
  """Returns what is simulated, in a few lines."""
  simulator, data = run.simulator, run.data
  tail = ''
  if simulator.tail_from_tokens and simulator.tail_scale != 1:
    tail = f', those from {simulator.tail_from_tokens:,} tokens on times {simulator.tail_scale:g}'
  grouping = ''
  if data.group_long_documents:
    grouping = (
      f', those from {data.group_long_documents:,} tokens on together within {data.group_window_batches:,} '
      'batches'
    )
  needed = memory.rank_bytes(run.model, run.cluster, run.planner)
  total = sum(needed.values())
  room = f' of {amount(run.cluster.memory_bytes, "B")}' if run.cluster.memory_bytes else ''
  warning = ''
  if run.cluster.memory_bytes and total > run.cluster.memory_bytes:
    warning = '\nwarning: that does not fit; lower PlannerConfig.capacity_tokens, or use more ranks or remat'
  parts = ', '.join(f'{name.removesuffix("_bytes")} {amount(size, "B")}' for name, size in needed.items())
  return (
    f'cluster  {describe_cluster(run)}; {describe_rates(run)}\n'
    f'model    {describe_model(run.model)}; {amount(memory.total_parameters(run.model), "")}parameters\n'
    f'batches  {simulator.seeds} x {simulator.steps} of at most {data.batch_tokens:,} tokens from '
    f'{simulator.lengths}{tail}, '
    f'longest {data.max_document_tokens:,} ({data.long_documents} beyond){grouping}\n'
    f'memory   about {amount(total, "B")}{room} a rank ({parts}){warning}'
  )


def comparison(played: Played) -> str:
  """Returns a row a mode: step time and MFU against the baseline, on the wide steps and on all."""
  run, wide, everything = played.run, played.wide, played.everything
  groups = [(wide, 'parents cross nodes'), (everything, 'all steps')]
  lines = [f'{"":<27}']
  for tallies, title in groups:
    steps = sum(tally.steps for tally in tallies)
    lines[0] += f'| {f"{title}: {steps} steps":<{44 if tallies is wide else 29}}'
  head = f'{"change":>9}{"spread":>7}{"MFU":>7}{"points":>7}'
  lines += [f'{"mode":<27}|{head}{"published":>15}|{head} |{"crossing":>9}{"programs":>9}{"lost":>6}']
  for name in played.rows:
    line = f'{name:<27}'
    for tallies, _ in groups:
      line += '|' + _cells(played, tallies, name)
      if tallies is wide:
        change, points = PUBLISHED.get(name, (0, 0))
        line += f'{change:>+8.2f}%{points:>+6.2f}' if change else ' ' * 15
    line += ' |'
    if name in played.programs:
      lost = f'{max(0.0, played.lost_points(name)):>6.2f}' if run.cluster.peak_flops_per_s else ''
      line += f'{played.crossing[name]:>9}{played.programs[name]:>9}{lost}'
    lines.append(line.rstrip())
  return '\n'.join(lines)


def _cells(played: Played, tallies: Sequence[Tally], name: str) -> str:
  changes = played.changes(tallies, name)
  if not changes:
    return f'{"-":>9}{"":>7}{"":>7}{"":>7}'
  mfu, base = (100 * played.mfu(tallies, row) for row in (name, BASELINE))
  spread = f'{max(changes) - min(changes):.2f}' if len(changes) > 1 else '-'
  return f'{np.mean(changes):>+8.2f}%{spread:>7}{mfu:>6.1f}%{mfu - base:>+7.2f}'


LEGEND = """\
change: of the step's time against `parents`, mean of the seeds; spread: largest less smallest of them.
MFU, and points of it against `parents`. crossing: steps in which the mode's own parents cross nodes.
programs: that a run compiles, the most of any seed; lost: points of MFU that sharing them costs."""


def causes(tallies: Sequence[Tally], names: Sequence[str]) -> str:
  """Returns a row a cause: seconds of a step in each of these modes, mean over ranks."""
  steps, widths = sum(tally.steps for tally in tallies), [max(15, len(name) + 2) for name in names]
  tallies = [tally for tally in tallies if tally.steps]
  heads = (f'{name:>{width}}' for name, width in zip(names, widths, strict=True))
  lines = [f'{"seconds a step, mean of ranks":<30}' + ''.join(heads)]
  for family in (COMPUTE, TRANSFER, WAIT):
    for cause in family:
      values = [sum(tally.causes_s[name][cause] for tally in tallies) / steps for name in names]
      if any(values):
        cells = (f'{value:>{width}.4f}' for value, width in zip(values, widths, strict=True))
        lines.append(f'{cause:<30}' + ''.join(cells))
  return '\n'.join(lines)


def results(played: Played, tallies: Sequence[Tally]) -> dict[str, Any]:
  """Returns mode -> its mean step seconds, MFU and change of each seed; no modes where there are no steps."""
  if not any(tally.steps for tally in tallies):
    return {}
  return {
    name: {
      'step_s': played.mean_s(tallies, name),
      'mfu': played.mfu(tallies, name),
      'change_percent': played.changes(tallies, name),
    }
    for name in played.rows
  }


def main(argv: Sequence[str] | None = None) -> None:
  parser = command_line.described(__doc__, 'repack-simulate')
  command_line.add_config_arguments(parser, required=True)
  parser.add_argument(
    '--json', type=command_line.output_file, metavar='FILE', help='also write the results here'
  )
  args = parser.parse_args(argv)
  run = load(args.config, args.set)
  print(describe(run), flush=True)
  played = play(run)
  spread = ', '.join(f'SP{degree}: {count}' for degree, count in sorted(played.widest.items()))
  base_s = played.mean_s(played.everything, BASELINE)
  print(f'\nwidest parent of the baseline: {spread}; its step takes {base_s:.4f} s on average; simulated')
  print(f'\n{comparison(played)}\n\n{LEGEND}')
  for tallies, title in ((played.wide, 'where parents cross nodes'), (played.everything, 'all steps')):
    if any(tally.steps for tally in tallies):
      print(f'\n{title}\n{causes(tallies, played.modes)}')
  if args.json:
    report = {
      'seeds': run.simulator.seeds,
      'steps': sum(tally.steps for tally in played.everything),
      'wide_steps': sum(tally.steps for tally in played.wide),
      'wide': results(played, played.wide),
      'all': results(played, played.everything),
      'programs': dict(played.programs),
      'crossing_steps': dict(played.crossing),
      'lost_points': {mode: played.lost_points(mode) for mode in played.modes},
    }
    write_whole(args.json, json.dumps(report, indent=2) + '\n')


def command() -> None:
  """Runs the console script `repack-simulate`."""
  command_line.run(main)
