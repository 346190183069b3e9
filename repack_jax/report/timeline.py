"""A case's spans in few bytes: integers in ticks, one run of spans a rank without gaps."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from repack_jax.config import ModelConfig
from repack_jax.predict.simulator import Spans
from repack_jax.report.case import Case

# With more spans than these the page holds only some layers. Eight characters a span: 1.6 MB a case.
MOST_SPANS = 200_000
NOT_SHOWN = -1  # the cause of a stretch that the page does not hold


def pattern_period(model: ModelConfig) -> int:
  """Returns layers until the pattern of layer kinds comes again."""
  return min(len(model.pattern), model.num_layers)


def timeline(model: ModelConfig, case: Case, tick_s: float, most_spans: int = MOST_SPANS) -> dict[str, Any]:
  """Returns a case's spans for the page.

  Returns:
    first: of each rank, where its spans begin in `tag` and `ticks`; one more entry at the end.
    tags: the distinct [cause, layer, micro-batch, backward] of spans; `tag` packs an index into it a span.
    ticks: packed, how long each span lasts; a rank's first starts at 0 and each where the last ends.
    spans: how many there are, stretches that are left out (cause `NOT_SHOWN`) not counted.
    total: how many the simulator recorded.
    left_out: '' or a sentence that says what the page lacks.
    periods: for each micro-batch [start, end] in ticks of its first pattern period forward, or None.
  """
  spans, ranks = case.spans, len(next(iter(case.simulated.seconds.values())))
  period = pattern_period(model)
  keep, left_out = _kept(spans, period, len(case.plans), most_spans)
  start, end = (np.rint(times / tick_s).astype(np.int64) for times in (spans.start_s, spans.end_s))
  periods = [_period(spans, start, end, period, number, keep) for number in range(len(case.plans))]
  # Too short for a tick: remainders of rounding.
  keep &= end > start
  chosen = np.flatnonzero(keep)
  chosen = chosen[np.lexsort((start[chosen], spans.rank[chosen]))]
  keys = np.stack([spans.cause, spans.layer, spans.micro_batch, spans.backward.astype(np.int64)], axis=1)
  tags, tag = np.unique(keys[chosen], axis=0, return_inverse=True)
  first, tag, ticks = _with_stretches(
    spans.rank[chosen], tag.reshape(-1), start[chosen], end[chosen], ranks, len(tags)
  )
  return {
    'first': first.tolist(),
    'tags': [*tags.tolist(), [NOT_SHOWN, -1, 0, 0]],
    'tag': packed(tag),
    'ticks': packed(ticks),
    'spans': len(chosen),
    'total': len(spans.rank),
    'left_out': left_out,
    'periods': periods,
  }


def _kept(spans: Spans, period: int, micro_batches: int, most_spans: int) -> tuple[np.ndarray, str]:
  """(which spans the page holds, what it lacks in words)."""
  everything = len(spans.rank)
  if everything <= most_spans:
    return np.ones(everything, bool), ''
  early = ~spans.backward & (spans.layer >= 0) & (spans.layer < 2 * period)
  last = spans.backward & (spans.layer >= 0) & (spans.layer < period)
  keep = early | last
  what = 'the first two pattern periods forward and the last one backward'
  of_each = np.bincount(spans.micro_batch[keep], minlength=micro_batches)
  held = max(1, int(np.searchsorted(np.cumsum(of_each), most_spans, 'right')))
  if held < micro_batches:
    keep &= spans.micro_batch < held
    what += ' of the first micro-batch' if held == 1 else f' of the first {held} micro-batches'
  elif micro_batches > 1:
    what += ' of each micro-batch'
  return keep, f'The step has {everything:,} spans; this page holds {what}.'


def _period(
  spans: Spans, start: np.ndarray, end: np.ndarray, period: int, micro_batch: int, keep: np.ndarray
) -> list[int] | None:
  """From the first rank's start to the last one's end, since domains need not run in step."""
  inside = keep & ~spans.backward & (spans.layer >= 0) & (spans.layer < period)
  inside &= spans.micro_batch == micro_batch
  return [int(start[inside].min()), int(end[inside].max())] if inside.any() else None


def _with_stretches(
  rank: np.ndarray, tag: np.ndarray, start: np.ndarray, end: np.ndarray, ranks: int, stretch: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Fills what lies between a rank's spans, so that lengths alone say when each one is.

  Returns (first, tag, ticks); `stretch` is the tag of what was filled in.
  """
  new_rank = np.diff(rank, prepend=-1) != 0
  before = np.where(new_rank, 0, np.roll(end, 1)) if len(end) else end
  missing = np.flatnonzero(start > before)
  filled_rank = np.insert(rank, missing, rank[missing])
  filled_tag = np.insert(tag, missing, stretch)
  ticks = np.insert(end - start, missing, (start - before)[missing])
  return np.searchsorted(filled_rank, np.arange(ranks + 1)), filled_tag, ticks


def packed(values: np.ndarray) -> dict[str, Any]:
  """Returns unsigned integers as base64 of the narrowest little-endian type that holds them."""
  most = int(values.max(initial=0))
  bits = next(bits for bits in (8, 16, 32) if most < 1 << bits)
  data = values.astype(f'<u{bits // 8}').tobytes()
  return {'bits': bits, 'data': base64.b64encode(data).decode('ascii')}
