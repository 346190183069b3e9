"""Samples to micro-batches, which run one after the other, and to domains, which run side by side."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from repack_jax.solver.compiled import compiled

# Shares of the room above the mean that bins are filled to, at first: what comes last needs some of it.
_SLACKS = (0.5, 1.0)
# Micro-batches run one after the other, so they need not be alike; what costs is unlike samples in one. So
# each but the last takes the longest left, up to these shares of an even part of the tokens, and then the
# shortest, which even out what long ones leave uneven. With 1.0 samples are sorted by length.
_HEADS = (0.85, 0.5, 1.0)


class Items(NamedTuple):
  """Samples to distribute, longest first.

  Attributes:
    tokens: int64 [samples].
    load_s: float64 [samples], rank-seconds of a step.
  """

  tokens: np.ndarray
  load_s: np.ndarray

  def of(self, chosen: np.ndarray) -> Items:
    return Items(self.tokens[chosen], self.load_s[chosen])


def micro_batches(items: Items, count: int, room_tokens: int) -> Iterator[list[np.ndarray]]:
  """Yields each way that is tried to make so many micro-batches: the samples of each, longest first.

  Those in which some find no room are left out.

  Args:
    room_tokens: what a micro-batch holds.
  """
  if count == 1:
    if items.tokens.sum() <= room_tokens:
      yield [np.arange(len(items.tokens))]
    return
  ways = (_headed(items.tokens, count, head) for head in _HEADS)
  for way in itertools.chain(ways, [spread(items, count, room_tokens)]):
    if way and all(items.tokens[part].sum() <= room_tokens for part in way):
      yield way


def equal_numbers(items: Items, each: int, room_tokens: int) -> list[np.ndarray] | None:
  """Returns micro-batches of so many samples, sorted by length; None where one finds no room."""
  way = [
    np.arange(first, min(first + each, len(items.tokens))) for first in range(0, len(items.tokens), each)
  ]
  return way if all(items.tokens[part].sum() <= room_tokens for part in way) else None


def _headed(tokens: np.ndarray, count: int, head: float) -> list[np.ndarray] | None:
  """Micro-batches that take the longest left up to this share of their part, and then the shortest."""
  ends = np.concatenate([[0], np.cumsum(tokens)])
  first, last = 0, len(tokens)
  way = []
  for left in range(count, 1, -1):
    if last - first < left:
      return None
    part = (ends[last] - ends[first]) / left
    middle = int(np.searchsorted(ends, ends[first] + head * part, side='right')) - 1
    middle = min(max(middle, first + 1), last - left + 1)
    held = ends[middle] - ends[first]
    end = last
    if head < 1:
      end = int(np.searchsorted(ends, ends[last] - max(0, part - held), side='left'))
      end = min(max(end, middle), last)
    way.append(np.concatenate([np.arange(first, middle), np.arange(end, last)]))
    first, last = middle, end
  return [*way, np.arange(first, last)] if first < last else None


def spread(items: Items, bins: int, room_tokens: int) -> list[np.ndarray] | None:
  """Returns the samples of each of some bins that are to be alike, longest first; None where they don't fit.

  Args:
    room_tokens: what a bin holds.
  """
  tokens = items.tokens.astype(np.float64)
  mean_tokens = tokens.sum() / bins
  # Loads that are all zero decide nothing; 0 / 0 would find no bin.
  mean_s = max(float(items.load_s.sum()), 1e-300) / bins
  for slack in _SLACKS:
    most = mean_tokens + slack * (room_tokens - mean_tokens)
    bin_of = _fill_bins(tokens, items.load_s, np.zeros(bins), np.zeros(bins), most, mean_tokens, mean_s)
    if len(bin_of):
      order = np.argsort(bin_of, kind='stable')
      return np.split(order, np.cumsum(np.bincount(bin_of, minlength=bins))[:-1])
  return None


def fill_up(
  items: Items, held_tokens: np.ndarray, busy_s: np.ndarray, bin_tokens: float
) -> np.ndarray | None:
  """Returns the bin of each sample, int64 [samples], where each goes to the one with the least load.

  None where one finds no room.

  Args:
    held_tokens, busy_s: float64 [bins], what the bins hold already.
    bin_tokens: what a bin holds.
  """
  bin_of = _fill_bins(
    items.tokens.astype(np.float64), items.load_s, held_tokens, busy_s, bin_tokens, np.inf, 1.0
  )
  return bin_of if len(bin_of) else None


@compiled
def _fill_bins(
  tokens: np.ndarray,
  load_s: np.ndarray,
  held_tokens: np.ndarray,
  busy_s: np.ndarray,
  bin_tokens: float,
  mean_tokens: float,
  mean_load_s: float,
) -> np.ndarray:
  """Puts samples, in their order, in the bin with the least: the worse of tokens and load over their means.

  Args:
    tokens, load_s: float64 [samples], longest first.
    held_tokens, busy_s: float64 [bins], what the bins hold already.
    bin_tokens: what a bin holds.
    mean_tokens, mean_load_s: of a bin.

  Returns the bin of each sample, int64 [samples]; [0] where a sample finds no room.
  """
  bin_of, bins = np.zeros(len(tokens), np.int64), len(held_tokens)
  held, load = held_tokens.copy(), busy_s.copy()
  for s in range(len(tokens)):
    best, best_score = -1, np.inf
    for b in range(bins):
      if held[b] + tokens[s] <= bin_tokens:
        score = max((load[b] + load_s[s]) / mean_load_s, (held[b] + tokens[s]) / mean_tokens)
        if score < best_score:
          best, best_score = b, score
    if best < 0:
      return bin_of[:0]
    bin_of[s] = best
    held[best] += tokens[s]
    load[best] += load_s[s]
  return bin_of
