"""Parents: the SP degree each sample needs, the micro-batches, and the groups of each domain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repack_jax.cost import CostModel
from repack_jax.plan import Group
from repack_jax.solver.placement import place


def needed_degrees(
  lengths: np.ndarray, degrees: Sequence[int], rank_s: float, capacity_tokens: int, cost: CostModel
) -> np.ndarray:
  """For each sample the smallest SP degree that fits it and lets nobody wait for it, int64 [samples].

  Nobody waits if the sample's time is at most `rank_s`, the mean load of a rank in a micro-batch; where no
  degree gets there (a wider one can be slower again, since it crosses nodes), the fastest that fits is taken.
  """
  options = np.asarray(degrees)
  seconds = np.stack([cost.parent_s(lengths, p) for p in degrees])
  fits = np.stack([lengths <= p * capacity_tokens for p in degrees])
  seconds = np.where(fits, seconds, np.inf)
  quick = seconds <= rank_s
  return options[np.where(quick.any(0), quick.argmax(0), seconds.argmin(0))]


def split_into_bins(
  lengths: np.ndarray, work_s: np.ndarray, num_bins: int, bin_tokens: int
) -> list[list[int]] | None:
  """Samples over bins (a domain of a micro-batch each), longest first into the least loaded with room.

  Returns None where a sample finds no bin with room.
  """
  bins: list[list[int]] = [[] for _ in range(num_bins)]
  load_s, tokens = np.zeros(num_bins), np.zeros(num_bins, np.int64)
  for sample in sorted(range(len(lengths)), key=lambda s: (-work_s[s], s)):
    room = tokens + lengths[sample] <= bin_tokens
    if not room.any():
      return None
    chosen = int(np.where(room, load_s, np.inf).argmin())
    bins[chosen].append(sample)
    load_s[chosen] += work_s[sample]
    tokens[chosen] += lengths[sample]
  return bins


def parents_of_domain(
  samples: Sequence[int],
  lengths: np.ndarray,
  degree: np.ndarray,
  work_s: np.ndarray,
  first_rank: int,
  num_ranks: int,
  max_degree: int,
  capacity_tokens: int,
) -> list[Group] | None:
  """Parents on the ranks of one domain; None where the samples don't fit.

  Groups of the needed degrees may leave no room for a last sample though the tokens would fit: then all
  degrees are doubled, until one group of the whole domain takes everything.
  """
  widening = 1
  while True:
    degrees = {s: int(min(degree[s] * widening, max_degree)) for s in samples}
    work = {s: float(work_s[s]) for s in samples}
    groups = place(samples, lengths.tolist(), degrees, work, first_rank, num_ranks, capacity_tokens)
    if groups is not None or widening >= max_degree:
      return groups
    widening *= 2
