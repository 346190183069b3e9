"""One record a step, as lines of JSON, and the summary of a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from repack_jax.config import FULL, RunConfig
from repack_jax.predict import flops
from repack_jax.training.planned_steps import PlannedStep

Record = dict[str, Any]


def step_record(
  run: RunConfig,
  step: int,
  planned: PlannedStep,
  measured: Mapping[str, float],
  step_s: float,
  data_wait_s: float,
  compiles: int,
) -> Record:
  """What `metrics.jsonl` holds of a step.

  Args:
    step: steps done, this one included.
    measured: what the devices returned: loss, grad_norm, learning_rate, balance, router_z, dropped.
    step_s: from having the step's arrays to having its metrics. A step that compiles includes that.
  """
  plans = planned.plans
  tokens = planned.batch.num_tokens
  slots = sum(plan.num_ranks * plan.capacity_tokens for plan in plans)
  most = sum(int(plan.rank_tokens.max()) for plan in plans)
  mean = sum(float(plan.rank_tokens.mean()) for plan in plans)
  children = sum((Counter(plan.child_sizes()) for plan in plans), Counter())
  record = {
    'step': step,
    'loss': float(measured['loss']),
    'grad_norm': float(measured['grad_norm']),
    'lr': float(measured['learning_rate']),
    'tokens': tokens,
    'target_tokens': planned.target_tokens,
    'padding_fraction': 1 - tokens / slots,
    'tokens_per_s': tokens / (step_s + data_wait_s),
    'step_s': step_s,
    'plan_s': planned.plan_s,
    'data_wait_s': data_wait_s,
    'imbalance': most / mean,
    'widest_parent': max(plan.widest(FULL) for plan in plans),
    'children': {str(size): count for size, count in sorted(children.items())},
    'solo_tokens': sum(int((plan.rank_tokens - plan.shared_tokens).sum()) for plan in plans),
    'predicted_s': planned.predicted_s,
    'predicted_s_disabled': planned.predicted_s_disabled,
    'cross_node_bytes': planned.cross_node_bytes,
    'cross_node_bytes_disabled': planned.cross_node_bytes_disabled,
    'compiles': compiles,
    'mode': run.planner.mode,
    'plan_digest': planned.plan_digest,
    'micro_batches': len(plans),
    'epoch': planned.batch.epoch,
    'balance_loss': float(measured['balance']),
    'router_z_loss': float(measured['router_z']),
    'dropped_assignments': int(measured['dropped']),
  }
  if run.cluster.peak_flops_per_s:
    lengths = np.array([len(sample) for sample in planned.batch.samples])
    work = flops.TRAIN_OVER_FORWARD * int(flops.sample_flops(run.model, lengths).sum())
    record['mfu'] = work / (step_s * run.cluster.num_ranks * run.cluster.peak_flops_per_s)
  return record


class MetricsFile:
  """Appends records to `metrics.jsonl`; a resumed run first drops those after its checkpoint."""

  def __init__(self, path: Path, keep_steps: int):
    self.records = [record for record in _read(path) if record['step'] <= keep_steps]
    path.write_text(''.join(json.dumps(record) + '\n' for record in self.records))
    self._file = path.open('a')

  def write(self, record: Record) -> None:
    self.records.append(record)
    self._file.write(json.dumps(record) + '\n')
    self._file.flush()

  def close(self) -> None:
    self._file.close()


def _read(path: Path) -> list[Record]:
  """The whole records of a file; a line cut short by a kill is left out."""
  records = []
  for line in path.read_text().splitlines() if path.exists() else []:
    try:
      records.append(json.loads(line))
    except json.JSONDecodeError:
      continue
  return records


def _mean_loss(records: Sequence[Record]) -> float:
  """Over target tokens, not over steps: a mean of means would favour short batches."""
  targets = sum(record['target_tokens'] for record in records)
  return sum(record['loss'] * record['target_tokens'] for record in records) / max(1, targets)


def summary(records: Sequence[Record], data_counts: Mapping[str, int]) -> str:
  """The run in a few lines, for people; `data_counts` are the `SampleIndex.counts` of its data."""
  if not records:
    return 'no steps were run'
  last, tail = records[-1], records[-10:]
  children: Counter[str] = sum((Counter(record['children']) for record in records), Counter())
  sent = sum(record['cross_node_bytes'] for record in records)
  disabled = sum(record['cross_node_bytes_disabled'] for record in records)
  histogram = ', '.join(f'SP{size}: {children[size]}' for size in sorted(children, key=int))
  change = f' ({sent / disabled - 1:+.1%})' if disabled else ''
  predicted = sum(record['predicted_s'] for record in records)
  faster = predicted / sum(record['predicted_s_disabled'] for record in records)
  dropped = sum(record['dropped_assignments'] for record in records)
  tokens = sum(record['tokens'] for record in records)
  solo = sum(record['solo_tokens'] for record in records) / tokens
  epochs = tokens / data_counts['epoch_tokens']
  fates = ', '.join(
    f'{data_counts[f"{fate}_documents"]} {fate}' for fate in ('split', 'dropped', 'truncated', 'empty')
  )
  rows = [
    (
      'final loss',
      f'{_mean_loss(tail):.4f} over the last {len(tail)} of {last["step"]} steps (first '
      f'{records[0]["loss"]:.4f})',
    ),
    ('tokens trained', f'{tokens:,} ({epochs:.2f} epochs)'),
    ('documents', f'{data_counts["documents"]:,} in the source: {fates}'),
    ('expert assignments', f'{dropped} dropped'),
    ('compiles', f'{last["compiles"]} of the forward and backward program'),
    ('widest parent', f'SP{max(record["widest_parent"] for record in records)}'),
    ('children', f'{histogram}; {solo:.0%} of tokens in none, on single ranks'),
    ('crossed nodes', f'{sent:,} bytes; {disabled:,} with repacking disabled{change}'),
    (
      'predicted',
      f"a step takes {faster:.3f} times as long as with repacking disabled, by the config's rates",
    ),
  ]
  return '\n'.join(f'  {name:<20}{value}' for name, value in rows)
