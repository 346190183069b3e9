"""Batches: an endless, resumable sequence that depends on the data config and the source alone."""

from __future__ import annotations

import typing
from dataclasses import dataclass

import numpy as np

from repack_jax.checks import ConfigError
from repack_jax.config import DataConfig
from repack_jax.data.index import SampleIndex, index_samples
from repack_jax.data.samples import Sample, make_sample
from repack_jax.data.sources import Source, changed

State = dict[str, int]


@dataclass(frozen=True, eq=False)
class Batch:
  """What one optimizer step trains on.

  Attributes:
    samples: at least one, at most `batch_tokens` tokens in all.
    index: the batch's number, from 0; a resumed run counts on.
    epoch: of the first sample, from 0. A batch may run on into the next epoch.
    state_after: give it to a `Batcher` to get the batches after this one.
  """

  samples: tuple[Sample, ...]
  index: int
  epoch: int
  state_after: State

  @property
  def num_tokens(self) -> int:
    return sum(len(sample) for sample in self.samples)


class Batcher:
  """An endless iterator over batches.

  Each epoch is a fresh random order of all samples; the pieces of a split document are samples like any
  other. A batch takes samples in that order until the next one would exceed `batch_tokens`; that one
  begins the next batch. Batches run on over the end of an epoch, so every sample is in exactly one batch
  an epoch. In memory are the index and the batch being made.

  The state is a dict of ints, which JSON can hold:
    position: the sample that comes next, in the endless order: epoch * num_samples + place in it. As the
      order begins at 0, it is also the number of samples that the batches held.
    batches, tokens: how many batches were made, and the tokens they held.
    seed, num_samples, epoch_tokens, samples_crc32: of the run that made the state: its seed, the samples
      and tokens of its epoch, and a checksum of which pieces of which documents the samples are.
  """

  def __init__(
    self,
    config: DataConfig,
    source: Source,
    state: State | None = None,
    index: SampleIndex | None = None,
  ):
    """Begins at the first epoch, or where `state` says.

    Args:
      index: of this source and config, where there is one already.

    Raises:
      ConfigError: `state` is broken, or of a run with other samples or another seed; or there is no
        `index` and `index_samples` raises.
    """
    self._config, self._source = config, source
    self.index = index_samples(source, config) if index is None else index
    self._order = _shuffled_order(len(self.index), config.seed)
    self._identity = {
      'seed': config.seed,
      'num_samples': len(self.index),
      'epoch_tokens': self.index.counts['epoch_tokens'],
      'samples_crc32': self.index.crc32(),
    }
    self._position = self._batches = self._tokens = 0
    if state is not None:
      self._check(state)
      self._position, self._batches, self._tokens = state['position'], state['batches'], state['tokens']

  def state(self) -> State:
    """The state after the last batch that was made."""
    cursor = {'position': self._position, 'batches': self._batches, 'tokens': self._tokens}
    return cursor | self._identity

  def __iter__(self) -> typing.Self:
    return self

  def __next__(self) -> Batch:
    """Raises ConfigError where a document cannot be read or is not what it was when it was indexed."""
    chosen: list[int] = []
    room_tokens = self._config.batch_tokens
    # No sample is longer than a batch or shorter than a token: at least one fits, and a full batch ends.
    while (length := self.index.length[sample := self._sample_at(len(chosen))]) <= room_tokens:
      chosen.append(sample)
      room_tokens -= int(length)
    samples = tuple(self._read(sample) for sample in chosen)
    epoch = self._position // len(self.index)
    self._position += len(samples)
    self._batches += 1
    self._tokens += self._config.batch_tokens - room_tokens
    return Batch(samples, self._batches - 1, epoch, self.state())

  def _sample_at(self, ahead: int) -> int:
    """The number in the index of the sample that is so far ahead in the order."""
    return int(self._order[self._position + ahead])

  def _read(self, sample: int) -> Sample:
    index = self.index
    document, offset, length = (int(x[sample]) for x in (index.document, index.offset, index.length))
    document_tokens = index.document_tokens[document]
    content = self._source.read(document, offset, offset + length + 1)
    expected_tokens = min(length + 1, document_tokens - offset)
    if len(content) != expected_tokens or self._source.size_bytes(document) != document_tokens:
      raise changed(self._source.name(document))
    return make_sample(document, offset, length, content)

  def _check(self, state: State) -> None:
    """Raises ConfigError unless this Batcher can go on from `state`."""
    expected = self.state()
    if set(state) != set(expected) or not all(type(n) is int and n >= 0 for n in state.values()):
      raise ConfigError(
        f'checkpoint: data state {state!r}: must map {", ".join(expected)} to whole numbers; it is of '
        'another version or damaged, so start a new run'
      )
    if state['seed'] != self._config.seed:
      raise ConfigError(
        f'DataConfig.seed = {self._config.seed}: the run to resume had {state["seed"]}, and the order of its '
        'samples depends on it; set what it had, or start a new run'
      )
    if any(state[name] != value for name, value in self._identity.items()):
      raise ConfigError(
        f'DataConfig.source = {self._config.source!r}: its samples ({_epoch_size(expected)}) are not those '
        f'of the run to resume ({_epoch_size(state)}): the source, its documents, '
        'DataConfig.max_document_tokens or DataConfig.long_documents changed; restore what that run had, '
        'or start a new run'
      )


def _epoch_size(state: State) -> str:
  return (
    f'{state["num_samples"]} of {state["epoch_tokens"]} tokens in all, checksum {state["samples_crc32"]:08x}'
  )


def _shuffled_order(num_samples: int, seed: int) -> typing.Any:
  """The endless order: entry `epoch * num_samples + i` is the i-th sample of that epoch.

  It is computed entry by entry, so that it takes no memory and a resumed run pays for no entry it skips.
  """
  import grain  # Here, since it imports JAX, which this module's other users may not have started yet.

  # grain seeds an epoch with the sum of seed and epoch; run seeds 0 and 1 as they are would give the same
  # orders, one epoch apart.
  scattered_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
  return grain.MapDataset.range(num_samples).shuffle(seed=scattered_seed).repeat()
