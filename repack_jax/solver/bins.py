"""Samples to micro-batches and domains."""

from __future__ import annotations

import numpy as np

from repack_jax.solver.compiled import compiled


@compiled
def fill_bins(
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
