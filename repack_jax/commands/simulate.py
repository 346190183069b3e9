"""Plays training steps on a cluster that need not exist, in every mode, and compares them.

    repack-simulate --config sim/paper_1f3s.gin
    repack-simulate --config sim/paper_1f3s.gin --config sim/wikipedia.gin

The config names a file of lengths, the model and the cluster's rates. All times are simulated: they follow
from those rates (repack_jax/predict/simulator.py says what is assumed). `bound` is computation alone, shared
evenly by all ranks: no communication, no padding, no waiting.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from tqdm import tqdm

from repack_jax.checks import ConfigError
from repack_jax.commands import command_line
from repack_jax.config import RunConfig
from repack_jax.config.gin_files import load
from repack_jax.data.lengths import length_batches, read_lengths
from repack_jax.plan.plan import PARENTS
from repack_jax.predict import sizes as memory
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.simulator import COMPUTE, TRANSFER, WAIT, Simulated, simulate
from repack_jax.report.words import amount, describe_cluster, describe_model, describe_rates
from repack_jax.solver import SampleTooLong
from repack_jax.solver.bounds import compute_bound_s
from repack_jax.solver.compare import BASELINE, SIMULATED_MODES, simulate_modes

BOUND = 'bound'
# What the training step cannot do yet, played on the plans of `solve`: exchanges in so many chunks of heads
# that overlap the attention core.
WHAT_IF = {'solve, exchanges in 4 chunks': 4}
# Layerwise Repacking as published, on the steps with SP16/32 parents: (step time in %, MFU in points).
PUBLISHED = {'repack': (-5.95, 3.75), 'solve': (-7.61, 4.83)}


class Tally:
  """What is summed up over some of the steps, for each mode."""

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

  def mean_s(self, name: str) -> float:
    return self.step_s[name] / self.steps

  def mfu(self, name: str, run: RunConfig) -> float:
    """Returns the MFU of all these steps together; 0 where the cluster's peak is unknown."""
    peak = run.cluster.peak_flops_per_s * run.cluster.num_ranks
    return self.model_flops / (self.step_s[name] * peak) if peak else 0.0


def play(run: RunConfig) -> tuple[Tally, Tally, Counter[int]]:
  """Returns the steps whose parents cross nodes in the baseline, all steps, and widest parent -> steps."""
  batches = length_batches(read_lengths(run.simulator.lengths, run.data), run.data, run.simulator)
  wide, everything, widest = Tally(), Tally(), Counter[int]()
  costs = model_costs(run.cluster, run.model)
  for _ in tqdm(range(run.simulator.steps), unit='step', desc='simulating', disable=None):
    lengths = next(batches)
    try:
      found = simulate_modes(lengths, costs, run.batch_planner, SIMULATED_MODES)
    except SampleTooLong as error:
      raise ConfigError(f'{run.simulator.lengths}: {error}') from None
    played = {mode: step for mode, (_, step) in found.items()}
    for name, chunks in WHAT_IF.items():
      played[name] = simulate(costs, found['solve'][0], exchange_chunks=chunks)
    bound_s = compute_bound_s(lengths, costs)
    everything.add(played, bound_s)
    degree = max(plan.widest(PARENTS) for plan in found[BASELINE][0])
    widest[degree] += 1
    if degree > run.cluster.ranks_per_node:
      wide.add(played, bound_s)
  return wide, everything, widest


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
    f'batches  {simulator.steps} of at most {data.batch_tokens:,} tokens from {simulator.lengths}{tail}, '
    f'longest {data.max_document_tokens:,} ({data.long_documents} beyond){grouping}\n'
    f'memory   about {amount(total, "B")}{room} a rank ({parts}){warning}'
  )


def comparison(tally: Tally, run: RunConfig, published: bool) -> str:
  """Returns a row a mode: step time and MFU, against the baseline and the bound."""
  base_s, bound_s = tally.mean_s(BASELINE), tally.mean_s(BOUND)
  lines = [f'{"mode":<38}{"step s":>8}{"change":>9}{"MFU":>8}{"points":>8}{"way to bound":>14}']
  if published:
    lines[0] += f'{"published":>21}'
  for name in (*SIMULATED_MODES, BOUND, *WHAT_IF):
    seconds, mfu = tally.mean_s(name), tally.mfu(name, run)
    way = (base_s - seconds) / (base_s - bound_s) if base_s > bound_s else 0.0
    shown = f'what if: {name}' if name in WHAT_IF else name
    line = f'{shown:<38}{seconds:>8.4f}{100 * (seconds / base_s - 1):>+8.2f}%'
    line += f'{100 * mfu:>7.2f}%{100 * (mfu - tally.mfu(BASELINE, run)):>+8.2f}{100 * way:>13.0f}%'
    if published and name in PUBLISHED:
      change, points = PUBLISHED[name]
      line += f'{change:>+11.2f}%{points:>+9.2f}'
    lines.append(line)
  return '\n'.join(lines)


def causes(tally: Tally) -> str:
  """Returns a row a cause: seconds of a step in each mode, mean over ranks."""
  names = list(SIMULATED_MODES)
  lines = [f'{"seconds a step, mean of ranks":<30}' + ''.join(f'{name:>14}' for name in names)]
  for family in (COMPUTE, TRANSFER, WAIT):
    for cause in family:
      values = [tally.causes_s[name][cause] / tally.steps for name in names]
      if any(values):
        lines.append(f'{cause:<30}' + ''.join(f'{value:>14.4f}' for value in values))
  return '\n'.join(lines)


def results(tally: Tally, run: RunConfig) -> dict[str, dict[str, float]]:
  """Returns mode -> its mean step seconds and MFU; no modes where there were no such steps."""
  if not tally.steps:
    return {}
  names = (*SIMULATED_MODES, BOUND, *WHAT_IF)
  return {name: {'step_s': tally.mean_s(name), 'mfu': tally.mfu(name, run)} for name in names}


def main(argv: Sequence[str] | None = None) -> None:
  parser = command_line.described(__doc__, 'repack-simulate')
  command_line.add_config_arguments(parser, required=True)
  parser.add_argument(
    '--json', type=command_line.output_file, metavar='FILE', help='also write the results here'
  )
  args = parser.parse_args(argv)
  run = load(args.config, args.set)
  print(describe(run), flush=True)
  wide, everything, widest = play(run)
  spread = ', '.join(f'SP{degree}: {count}' for degree, count in sorted(widest.items()))
  print(f'\nwidest parent of the baseline: {spread}; simulated')
  for tally, title in ((wide, 'steps whose parents cross nodes'), (everything, 'all steps')):
    if tally.steps:
      print(f'\n{tally.steps} {title}\n{comparison(tally, run, published=tally is wide)}\n\n{causes(tally)}')
  if args.json:
    report = {
      'steps': everything.steps,
      'wide_steps': wide.steps,
      'wide': results(wide, run),
      'all': results(everything, run),
      'wide_causes_s': {
        name: {c: s / wide.steps for c, s in of.items()} for name, of in wide.causes_s.items()
      },
    }
    args.json.write_text(json.dumps(report, indent=2) + '\n')


def command() -> None:
  """Runs the console script `repack-simulate`."""
  command_line.run(main)
