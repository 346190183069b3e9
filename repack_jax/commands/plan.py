"""Shows how a batch of lengths would be laid on a cluster, and what that would bring.

    repack-plan my_lengths.npy --config sim/paper_1f3s.gin
    repack-plan docs.jsonl --config tiny_cpu.gin --html plan.html --perfetto trace.json.gz

Lengths come from .npy, .npz, .jsonl (documents), .csv (a histogram: low,high,count) or text (one a line).
The config says what makes a batch of them (DataConfig.batch_tokens), on what cluster and with what model. A
histogram is drawn from, lists are taken in order. Seconds are simulated from the config's rates.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from repack_jax.checks import ConfigError
from repack_jax.commands import command_line
from repack_jax.config import RunConfig
from repack_jax.config.gin_files import load
from repack_jax.data.lengths import Histogram, file_order_batches, length_batches, read_lengths
from repack_jax.files import write_whole
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.costs import Costs
from repack_jax.report import Case, plan_page, write_trace
from repack_jax.report.case import cases_of
from repack_jax.report.svg import plan_svg
from repack_jax.report.words import amount, describe_cluster, describe_rates
from repack_jax.solver import SampleTooLong
from repack_jax.solver.bounds import compute_bound_s
from repack_jax.solver.compare import BASELINE

Row = dict[str, Any]


def batch_of(run: RunConfig, file: str, number: int) -> np.ndarray:
  """Returns the lengths of one batch of a file, int64 [n]; batches are counted from 1."""
  lengths = read_lengths(file, run.data)
  batches = (
    length_batches(lengths, run.data, run.simulator)
    if isinstance(lengths, Histogram)
    else file_order_batches(lengths, run.data)
  )
  batch = next(itertools.islice(batches, number - 1, None), None)
  if batch is None:
    raise ConfigError(
      f'--batch {number}: {file} fills fewer batches of DataConfig.batch_tokens = {run.data.batch_tokens}; '
      'lower one of the two'
    )
  return batch


def summary(costs: Costs, cases: Sequence[Case], bound_s: float) -> list[Row]:
  """Returns a row a mode: seconds against the baseline and the bound, bytes across nodes, imbalance."""
  base_s = next(case.simulated.step_s for case in cases if case.name == BASELINE)
  return [
    {
      'mode': case.name,
      'step_s': case.simulated.step_s,
      'over_baseline': case.simulated.step_s / base_s,
      'over_bound': case.simulated.step_s / bound_s,
      'mfu': case.simulated.mfu,
      'cross_node_bytes': sum(costs.cross_node_bytes(plan) for plan in case.plans),
      'imbalance': float(
        sum(plan.rank_tokens.max() for plan in case.plans)
        / sum(plan.rank_tokens.mean() for plan in case.plans)
      ),
      'micro_batches': len(case.plans),
    }
    for case in cases
  ]


def as_text(rows: Sequence[Row], bound_s: float) -> str:
  lines = [
    f'{"mode":<12}{"step s":>10}{"baseline":>10}{"bound":>8}{"MFU":>8}{"across nodes":>14}{"imbalance":>11}'
    f'{"micro-batches":>15}'
  ]
  for row in rows:
    mfu = f'{row["mfu"]:.1%}' if row['mfu'] else '-'
    lines.append(
      f'{row["mode"]:<12}{row["step_s"]:>10.4g}{row["over_baseline"]:>9.3f}x{row["over_bound"]:>7.3f}x'
      f'{mfu:>8}{amount(row["cross_node_bytes"], "B"):>14}{row["imbalance"]:>11.3f}'
      f'{row["micro_batches"]:>15}'
    )
  lines.append(f'{"bound":<12}{bound_s:>10.4g}   computation alone, shared evenly by all ranks')
  return '\n'.join(lines)


def as_json(run: RunConfig, case: Case, rows: Sequence[Row], bound_s: float) -> dict[str, object]:
  """Returns the comparison, and the plans of the config's mode: groups as [first rank, size, samples]."""
  plans = [
    {
      'digest': plan.digest(),
      'sample_ids': plan.sample_ids,
      'lengths': plan.lengths,
      'capacity_tokens': plan.capacity_tokens,
      'halo_tokens': plan.halo_tokens,
      'rank_tokens': plan.rank_tokens.tolist(),
    }
    | {
      name: [(group.first_rank, group.size, group.samples) for group in groups]
      for name, groups in (('parents', plan.parents), ('children', plan.children), ('solo', plan.solo))
    }
    for plan in case.plans
  ]
  return {
    'modes': list(rows),
    'bound_s': bound_s,
    'plans': plans,
  }


def main(argv: Sequence[str] | None = None) -> None:
  parser = command_line.described(__doc__, 'repack-plan')
  parser.add_argument('lengths', nargs='?', help='a file of lengths (default: SimulatorConfig.lengths)')
  command_line.add_config_arguments(parser, required=True)
  parser.add_argument(
    '--batch', type=_positive, default=1, metavar='N', help='which batch of the file (default: 1)'
  )
  for name, what in (
    ('json', 'the plan and the comparison, for machines'),
    ('html', 'a page with the layouts and the timeline'),
    ('svg', "a picture of both layouts (of the first micro-batch of the config's mode)"),
    ('perfetto', 'a trace for ui.perfetto.dev (.json or .json.gz)'),
  ):
    parser.add_argument(f'--{name}', type=command_line.output_file, metavar='FILE', help=f'also write {what}')
  args = parser.parse_args(argv)
  run = load(args.config, args.set)
  file = args.lengths or run.simulator.lengths
  lengths = batch_of(run, file, args.batch)
  try:
    cases = cases_of(run, lengths)
  except SampleTooLong as error:
    raise ConfigError(f'{file}: {error}') from None
  costs = model_costs(run.cluster, run.model)
  bound_s = compute_bound_s(lengths, costs)
  own = next(case for case in cases if case.name == run.planner.mode)
  rows = summary(costs, cases, bound_s)
  print(
    f'batch {args.batch} of {file}: {len(lengths)} samples, {lengths.sum()} tokens, longest {lengths.max()}'
  )
  print(f'{describe_cluster(run)}; {describe_rates(run)}\n')
  for plan in own.plans:
    print(plan.table() + '\n')
  print('simulated:\n' + as_text(rows, bound_s))
  if args.json:
    write_whole(args.json, json.dumps(as_json(run, own, rows, bound_s), indent=1) + '\n')
  if args.html:
    write_whole(args.html, plan_page(run, cases, f'Batch {args.batch} of {Path(file).name}'))
  if args.svg:
    write_whole(args.svg, plan_svg(run, own.plans[0], f'Batch {args.batch} of {Path(file).name}'))
  if args.perfetto:
    write_trace(args.perfetto, run, cases)


def _positive(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text}: must be a whole number, 1 or more')
  return int(text)


def command() -> None:
  """Runs the console script `repack-plan`."""
  command_line.run(main)
