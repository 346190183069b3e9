"""One record a step, as lines of JSON, and the summary of a run."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from repack_jax.checks import ConfigError
from repack_jax.config.run import RunConfig
from repack_jax.files import write_whole
from repack_jax.plan.plan import PARENTS
from repack_jax.predict import flops
from repack_jax.report.words import count

if TYPE_CHECKING:  # the loop needs JAX, what it says of a step does not
  from repack_jax.training.loop import StepDone

Record = dict[str, Any]

log = logging.getLogger(__name__)


def _children(step: StepDone) -> dict[str, int]:
  sizes = sum((Counter(plan.child_sizes()) for plan in step.planned.plans), Counter[int]())
  return {str(size): count for size, count in sorted(sizes.items())}


def _imbalance(step: StepDone) -> float:
  most = sum(int(plan.rank_tokens.max()) for plan in step.planned.plans)
  return most / sum(float(plan.rank_tokens.mean()) for plan in step.planned.plans)


def _padding_fraction(step: StepDone) -> float:
  return 1 - step.planned.batch.num_tokens / sum(
    plan.num_ranks * plan.capacity_tokens for plan in step.planned.plans
  )


def _solo_tokens(step: StepDone) -> int:
  return sum(int((plan.rank_tokens - plan.shared_tokens).sum()) for plan in step.planned.plans)


# What `metrics.jsonl` holds of a step besides what the model and the optimizer report from the devices
# (`Model.metrics` and `TrainStep`): name -> how it is had from the step.
HOST_METRICS: dict[str, Callable[[StepDone], Any]] = {
  'step': lambda step: step.position.done,
  'tokens': lambda step: step.planned.batch.num_tokens,
  'target_tokens': lambda step: step.planned.target_tokens,
  'padding_fraction': _padding_fraction,
  'tokens_per_s': lambda step: step.planned.batch.num_tokens / (step.step_s + step.wait_s),
  'step_s': lambda step: step.step_s,
  'compile_s': lambda step: step.compile_s,
  'plan_s': lambda step: step.planned.plan_s,
  'data_wait_s': lambda step: step.wait_s,
  'imbalance': _imbalance,
  'widest_parent': lambda step: max(plan.widest(PARENTS) for plan in step.planned.plans),
  'children': _children,
  'solo_tokens': _solo_tokens,
  'halo_micro_batches': lambda step: sum(of.halo_tokens is not None for of in step.planned.programs),
  'predicted_s': lambda step: step.planned.solution.simulated.step_s,
  'predicted_s_disabled': lambda step: step.planned.solution.baseline_simulated.step_s,
  'cross_node_bytes': lambda step: step.planned.cross_node_bytes,
  'cross_node_bytes_disabled': lambda step: step.planned.cross_node_bytes_disabled,
  'compiles': lambda step: step.compiles,
  'plan_digest': lambda step: step.planned.plan_digest,
  'micro_batches': lambda step: len(step.planned.plans),
  'epoch': lambda step: step.planned.batch.epoch,
}


def step_record(run: RunConfig, step: StepDone) -> Record:
  """Returns what `metrics.jsonl` holds of a step."""
  record = {name: of(step) for name, of in HOST_METRICS.items()} | step.measured | {'mode': run.planner.mode}
  if run.cluster.peak_flops_per_s:
    lengths = np.array([len(sample) for sample in step.planned.batch.samples])
    work = flops.TRAIN_OVER_FORWARD * float(flops.sample_flops(run.model, lengths).sum())
    record['mfu'] = work / (step.step_s * run.cluster.num_ranks * run.cluster.peak_flops_per_s)
  return record


def status(record: Record) -> str:
  """Returns a step in a few words, for a progress bar; its tokens a second are those without compiling."""
  spent_s = record['step_s'] - record['compile_s'] + record['data_wait_s']
  skipped = ', skipped' if record['skipped'] else ''
  return (
    f'loss {record["loss"]:.3f}{skipped}, {record["tokens"] / spent_s:,.0f} tokens/s, '
    f'padding {record["padding_fraction"]:.0%}, imbalance {record["imbalance"]:.2f}'
  )


def finite(record: Mapping[str, Any]) -> Record:
  """Returns the record with None in place of numbers that JSON does not have: NaN and infinities."""
  return {
    name: None if isinstance(value, float) and not math.isfinite(value) else value
    for name, value in record.items()
  }


class MetricsFile:
  """Appends records to `metrics.jsonl`; a resumed run first drops those after its checkpoint.

  Where the file can't be written, on a full disk say, records are kept and written with a later one: training
  goes on. Raises ConfigError where what is there cannot be read.
  """

  def __init__(self, path: Path, keep_steps: int):
    self._path = path
    self.records = [finite(record) for record in _read(path) if record['step'] <= keep_steps]
    missing = keep_steps - len({record['step'] for record in self.records})
    if missing:
      log.warning('%s: lacks the records of %s before step %d', path, count(missing, 'step'), keep_steps)
    write_whole(path, ''.join(_line(record) for record in self.records))
    self._pending, self._failed = b'', False
    self._size = path.stat().st_size

  def write(self, record: Record) -> None:
    """Adds the record of a step."""
    self.records.append(finite(record))
    self._pending += _line(self.records[-1]).encode()
    self._write_pending()

  def close(self) -> None:
    """Writes what could not be written before, if it can be now."""
    if self._pending:
      self._write_pending()

  def _write_pending(self) -> None:
    try:
      with self._path.open('r+b') as file:
        file.truncate(self._size)  # what a failed attempt has left
        file.seek(self._size)
        file.write(self._pending)
    except OSError as error:
      if not self._failed:
        log.warning('%s: cannot be written (%s); records are kept for later', self._path, error.strerror)
      self._failed = True
      return
    self._failed = False
    self._size, self._pending = self._size + len(self._pending), b''


def _line(record: Record) -> str:
  return json.dumps(record, allow_nan=False) + '\n'


def _read(path: Path) -> list[Record]:
  """The whole records of a file; a last line that a kill has cut short is left out."""
  try:
    lines = path.read_bytes().splitlines() if path.exists() else []
  except OSError as error:
    raise ConfigError(f'{path}: cannot be read ({error.strerror})') from error
  records = []
  for number, line in enumerate(lines, 1):
    try:
      record = json.loads(line)
      if not isinstance(record.get('step'), int):
        raise ValueError('no step')
    except (ValueError, AttributeError) as error:
      if number == len(lines):
        break
      raise ConfigError(
        f'{path}, line {number}: is not the record of a step; the file is damaged. Repair or remove it: a '
        'run resumes without it'
      ) from error
    records.append(record)
  return records


def _mean_loss(records: Sequence[Record]) -> float:
  """Over target tokens, not steps: a mean of means would favour short batches. Without skipped steps."""
  losses = [(record['loss'], record['target_tokens']) for record in records if record['loss'] is not None]
  return sum(loss * targets for loss, targets in losses) / max(1, sum(targets for _, targets in losses))


def _compared(records: Sequence[Record]) -> list[tuple[str, str]]:
  """Rows with the losses of the first steps, as trained and with repacking disabled; none where none were."""
  both = [
    (record['loss'], record['loss_disabled'])
    for record in records
    if None not in (record['loss'], record.get('loss_disabled'))
  ]
  if not both:
    return []
  own, disabled = (' '.join(f'{loss:.5f}' for loss in losses) for losses in zip(*both, strict=True))
  apart = max(abs(a - b) for a, b in both)
  return [
    ('first losses', own),
    ('repacking disabled', f'{disabled}, the same batches: at most {apart:.1g} apart'),
  ]


def summary(records: Sequence[Record], data_counts: Mapping[str, int]) -> str:
  """Returns the run in a few lines, for people; `data_counts` are the `SampleIndex.counts` of its data."""
  if not records:
    return 'no steps were run'
  last, tail = records[-1], records[-10:]
  children: Counter[str] = sum((Counter(record['children']) for record in records), Counter())
  sent = sum(record['cross_node_bytes'] for record in records)
  disabled = sum(record['cross_node_bytes_disabled'] for record in records)
  histogram = ', '.join(f'SP{size}: {children[size]}' for size in sorted(children, key=int))
  change = f' ({sent / disabled - 1:+.1%})' if disabled else ''
  fewer = sum(10 * r['cross_node_bytes'] <= 9 * r['cross_node_bytes_disabled'] != 0 for r in records)
  predicted = sum(record['predicted_s'] for record in records)
  faster = predicted / sum(record['predicted_s_disabled'] for record in records)
  dropped = sum(record.get('dropped_assignments', 0) for record in records)  # 0 where a model has no experts
  skipped = sum(record['skipped'] for record in records)
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
      f'{_mean_loss(records[:1]):.4f})',
    ),
    *_compared(records),
    ('tokens trained', f'{tokens:,} ({epochs:.2f} epochs)'),
    ('documents', f'{data_counts["documents"]:,} in the source: {fates}'),
    ('expert assignments', f'{dropped:,.0f} dropped'),
    *([('skipped', f'{skipped} steps whose loss or gradients were not finite')] if skipped else []),
    ('compiles', f'{last["compiles"]} of the forward and backward program'),
    ('widest parent', f'SP{max(record["widest_parent"] for record in records)}'),
    ('children', f'{histogram}; {solo:.0%} of tokens in none, on single ranks'),
    ('crossed nodes', f'{sent:,} bytes; {disabled:,} with repacking disabled{change}'),
    ('', f'at least a tenth fewer bytes in {fewer} of {len(records)} steps'),
    (
      'predicted',
      f"a step takes {faster:.3f} times as long as with repacking disabled, by the config's rates",
    ),
  ]
  return '\n'.join(f'  {name:<20}{value}' for name, value in rows)
