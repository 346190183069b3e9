"""What `DataConfig.group_long_documents` makes of an order of samples. NumPy only.

Long samples that share batches leave more batches without any, and those need no wide groups. An epoch's
order is cut into windows, the last one shorter than the others or not, and samples move inside their window
alone: each still comes once an epoch, and about where it would have come. `grouped_order` says how they
move, for documents and for files of mere lengths alike.
"""

from __future__ import annotations

import typing

import numpy as np

from repack_jax.config import DataConfig


def window_samples(data: DataConfig, num_samples: int, num_tokens: int) -> int:
  """Returns how many samples fill `group_window_batches` batches on average, at least 1.

  Args:
    num_samples, num_tokens: those of an epoch, at least 1 each; or of any other part of the order that is
      large enough for its mean.
  """
  return max(1, data.group_window_batches * data.batch_tokens * num_samples // num_tokens)


def grouped_order(lengths: np.ndarray, data: DataConfig, seed: int, window: int) -> np.ndarray:
  """Returns the order of a window's samples that brings the long ones together, int64 [n].

  Long samples keep their order, and so do the others. How many of the others come before the long ones is
  drawn, so that no step of a run is one with long samples, or without, at every multiple of some number.

  Args:
    lengths: of the window's samples in the order they had, int64 [n], in tokens.
    seed: of the order, at least 0.
    window: the window's number in the endless order, from 0.
  """
  is_long = lengths >= data.group_long_documents
  long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
  # NumPy keeps these words the same in all versions; it does not promise that of what a Generator draws.
  (word,) = np.random.SeedSequence(seed, spawn_key=(window,)).generate_state(1, np.uint64)
  place = int(word) % (len(short) + 1)
  return np.concatenate([short[:place], long, short[place:]])


class GroupedOrder:
  """An endless order of samples in which the long ones of each window follow one another.

  Any place can be looked up; a look-up computes its window, of which the last one is kept. A place thus
  costs what it does in the order beneath where places are looked up one after another.

  Attributes:
    window_samples: the samples of a window; the last one of an epoch has what is left.
  """

  def __init__(self, order: typing.Any, length: np.ndarray, epoch_tokens: int, data: DataConfig):
    """Args:
    order: entry `epoch * S + i` is the i-th sample of that epoch.
    length: int64 [S], the tokens of each sample.
    epoch_tokens: their sum.
    """
    self._order, self._length, self._data = order, length, data
    self.window_samples = min(len(length), window_samples(data, len(length), epoch_tokens))
    self._windows_per_epoch = -(-len(length) // self.window_samples)
    self._window, self._samples = -1, np.zeros(0, np.int64)

  def __getitem__(self, position: int) -> int:
    """Returns the number of the sample at a place of the endless order, from 0."""
    num_samples = len(self._length)
    epoch, place = divmod(position, num_samples)
    in_epoch, place = divmod(place, self.window_samples)
    window = epoch * self._windows_per_epoch + in_epoch
    if window != self._window:
      start = position - place
      stop = min(start + self.window_samples, (epoch + 1) * num_samples)
      samples = np.array([self._order[i] for i in range(start, stop)], np.int64)
      order = grouped_order(self._length[samples], self._data, self._data.seed, window)
      self._window, self._samples = window, samples[order]
    return int(self._samples[place])
