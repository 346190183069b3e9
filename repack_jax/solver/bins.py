"""Samples to micro-batches, which run one after the other, and to domains, which run side by side."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from repack_jax.solver.compiled import compiled

# Shares of the room above the mean that bins are filled to, at first: what comes last needs some of it.
_SLACKS = (0.5, 1.0)


class Composition(NamedTuple):
  """A way to make micro-batches: some are led by the longest samples, the others share the rest evenly.

  Attributes:
    leads: so many micro-batches take the longest samples in turn.
    fill: up to this share of an even part of all tokens; the shortest samples then fill the part up.
  """

  leads: int
  fill: float


def compositions(micro_batches: int) -> list[Composition]:
  """Returns what is tried: all alike, sorted by length, and waves of long samples over short ones."""
  tried = [Composition(0, 1.0), Composition(micro_batches, 1.0)]
  tried += [Composition(micro_batches // 2, 0.85), Composition(micro_batches - 1, 0.85)]
  return list(dict.fromkeys(tried)) if micro_batches > 1 else tried[:1]


def micro_batches(
  lengths: np.ndarray, work_s: np.ndarray, count: int, room_tokens: int, composition: Composition
) -> list[np.ndarray] | None:
  """Returns the samples of each micro-batch, longest first, int64 [n] each; None where some find no room.

  Args:
    lengths: int64 [samples], longest first.
    work_s: float64 [samples], seconds of attention.
    room_tokens: what a micro-batch holds.
  """
  share = lengths.sum() / count
  ends = np.cumsum(lengths)
  lead: list[np.ndarray] = []
  first, last = 0, len(lengths)
  for number in range(composition.leads):
    if first >= last:
      return None
    before = ends[first - 1] if first else 0
    # An even part of what is left, so that the last lead takes all of it where there is nothing else.
    most = min(room_tokens, (ends[last - 1] - before) / (count - number))
    end = int(np.searchsorted(ends, before + composition.fill * most, side='right'))
    end = min(max(end, first + 1), last)
    if composition.leads == count and number == count - 1:
      end = last
    held = ends[end - 1] - before
    begin = last
    if composition.fill < 1:  # the shortest, as many as the part still holds
      tail = np.cumsum(lengths[end:last][::-1])
      begin = last - int(np.searchsorted(tail, share - held, side='right'))
    lead.append(np.concatenate([np.arange(first, end), np.arange(begin, last)]))
    if held > room_tokens:
      return None
    first, last = end, begin
  rest = np.arange(first, last)
  others = count - composition.leads
  if not others:
    return lead
  if len(rest) < others:
    return None
  found = spread(lengths[rest], work_s[rest], others, room_tokens)
  return None if found is None else lead + [rest[samples] for samples in found]


def spread(lengths: np.ndarray, work_s: np.ndarray, bins: int, room_tokens: int) -> list[np.ndarray] | None:
  """Returns the samples of each of some bins that are to be alike, int64 [n] each; None where they don't fit.

  Args:
    lengths, work_s: int64 and float64 [samples], longest first.
    room_tokens: what a bin holds.
  """
  if bins == 1:
    return [np.arange(len(lengths))] if lengths.sum() <= room_tokens else None
  tokens = lengths.astype(np.float64)
  mean_tokens = tokens.sum() / bins
  # Attention that costs nothing decides nothing; 0 / 0 would find no bin.
  mean_s = max(float(work_s.sum()), 1e-300) / bins
  for slack in _SLACKS:
    most = mean_tokens + slack * (room_tokens - mean_tokens)
    bin_of = _fill_bins(tokens, work_s, bins, max(most, float(lengths[:1].sum())), mean_tokens, mean_s)
    if len(bin_of):
      order = np.argsort(bin_of, kind='stable')
      return np.split(order, np.cumsum(np.bincount(bin_of, minlength=bins))[:-1])
  return None


@compiled
def _fill_bins(
  tokens: np.ndarray, work_s: np.ndarray, bins: int, bin_tokens: float, mean_tokens: float, mean_work_s: float
) -> np.ndarray:
  """Puts samples, in their order, in the bin with the least: the worse of tokens and work over their means.

  Args:
    tokens, work_s: float64 [samples], longest first.
    bin_tokens: what a bin holds.
    mean_tokens, mean_work_s: of a bin.

  Returns the bin of each sample, int64 [samples]; [0] where a sample finds no room.
  """
  bin_of = np.zeros(len(tokens), np.int64)
  held, load = np.zeros(bins), np.zeros(bins)
  for s in range(len(tokens)):
    best, best_score = -1, np.inf
    for b in range(bins):
      if held[b] + tokens[s] <= bin_tokens:
        score = max((load[b] + work_s[s]) / mean_work_s, (held[b] + tokens[s]) / mean_tokens)
        if score < best_score:
          best, best_score = b, score
    if best < 0:
      return bin_of[:0]
    bin_of[s] = best
    held[best] += tokens[s]
    load[best] += work_s[s]
  return bin_of
