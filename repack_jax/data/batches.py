"""Batches: an endless, resumable sequence that depends on the data config and the source alone."""

from __future__ import annotations

import typing
from dataclasses import dataclass

import numpy as np

from repack_jax.checks import ConfigError
from repack_jax.config import DataConfig
from repack_jax.data.grouping import GroupedOrder
from repack_jax.data.index import SampleIndex, index_samples
from repack_jax.data.samples import Sample, make_sample
from repack_jax.documents.documents import Source, changed
from repack_jax.documents.tokenizers import TOKENIZERS

State = dict[str, int | str]

# Two seeds below this give different first words of `np.random.SeedSequence`; this one's is that of 14375.
_FIRST_AMBIGUOUS_SEED = 53572


@dataclass(frozen=True, eq=False)
class Batch:
  """What one optimizer step trains on.

  Attributes:
    samples: at least one, at most `batch_tokens` tokens in all.
    index: the batch's number, from 0; a resumed run counts on.
    epoch: that of the first sample, from 0. A batch may run on into the next epoch.
    state_after: what a `Batcher` takes to go on after this batch.
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
  other. Where `group_long_documents` is set, long samples are then brought together (`grouping.py`), which
  leaves each in its epoch. A batch takes samples in that order until the next one would exceed
  `batch_tokens`; that one begins the next batch. Batches run on over the end of an epoch, so every sample is
  in exactly one batch an epoch. In memory are the index, a window of the order where samples are grouped,
  and the batch being made.

  The state is a dict of whole numbers and one name, which JSON can hold. Where the run is:
    position: the place in the endless order of the sample that comes next: epoch * num_samples + place in
      the epoch. As the order begins at 0, it is also the number of samples that the batches held.
    batches, tokens: how many batches were made, and the tokens they held.
  What its samples depend on, which a resumed run must share:
    tokenizer, seed: those of the config.
    num_samples, epoch_tokens: how many samples and tokens an epoch has.
    samples_crc32: a checksum of which pieces of which documents the samples are.
    group_long_documents, group_window_samples: that of the config, and the samples of a window; both 0 where
      samples are not grouped.
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
      ConfigError: `state` is damaged, or of a run with another tokenizer, another seed, another grouping or
        other samples; or there is no `index` and `index_samples` raises.
    """
    self._config, self._source, self._tokenizer = config, source, TOKENIZERS[config.tokenizer]
    self.index = index_samples(source, config) if index is None else index
    self._order = _shuffled_order(len(self.index), config.seed)
    window_samples = 0
    if config.group_long_documents:
      self._order = GroupedOrder(self._order, self.index.length, self.index.counts['epoch_tokens'], config)
      window_samples = self._order.window_samples
    self._identity: State = {
      'group_long_documents': config.group_long_documents,
      'group_window_samples': window_samples,
      'tokenizer': config.tokenizer,
      'seed': config.seed,
      'num_samples': len(self.index),
      'epoch_tokens': self.index.counts['epoch_tokens'],
      'samples_crc32': self.index.crc32(),
    }
    self._position = self._batches = self._tokens = 0
    if state is not None:
      self._check(state)
      self._position, self._batches, self._tokens = (int(state[x]) for x in ('position', 'batches', 'tokens'))

  def state(self) -> State:
    """Returns the state after the last batch that was made."""
    cursor: State = {'position': self._position, 'batches': self._batches, 'tokens': self._tokens}
    return cursor | self._identity

  def __iter__(self) -> typing.Self:
    return self

  def __next__(self) -> Batch:
    """Makes the next batch.

    Raises:
      ConfigError: a document cannot be read or tokenized, or is not what it was when it was indexed.
    """
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
    """Returns the number in the index of the sample that is `ahead` places on in the order."""
    return int(self._order[self._position + ahead])

  def _read(self, sample: int) -> Sample:
    index = self.index
    number, offset, length = (int(x[sample]) for x in (index.document, index.offset, index.length))
    document = self._source[number]
    tokens = self._tokenizer.encode(document, offset, offset + length + 1)
    expected_tokens = min(length + 1, int(index.document_tokens[number]) - offset)
    if len(tokens) != expected_tokens or document.size_bytes != index.document_bytes[number]:
      raise changed(document)
    # Embeddings would clamp it without a word.
    assert tokens.min() >= 0 and tokens.max() < self._tokenizer.vocab_size, f'{document.name}: no such token'
    return make_sample(number, offset, length, tokens)

  def _check(self, state: State) -> None:
    """Raises ConfigError unless this Batcher can go on from `state`."""
    expected = self.state()
    numbers = [name for name in expected if name != 'tokenizer']
    if (
      set(state) != set(expected)
      or type(state['tokenizer']) is not str
      or not all(type(n := state[name]) is int and n >= 0 for name in numbers)
    ):
      raise ConfigError(
        f'checkpoint: data state {state!r}: must map tokenizer to a name and {", ".join(numbers)} to whole '
        'numbers; it is of another version or damaged, so start a new run'
      )
    if state['tokenizer'] != self._config.tokenizer:
      raise ConfigError(
        f'DataConfig.tokenizer = {self._config.tokenizer!r}: the run to resume had {state["tokenizer"]!r}, '
        'and its samples and its model are made of those tokens; set what it had, or start a new run'
      )
    for name in ('seed', 'group_long_documents'):
      if state[name] != expected[name]:
        raise ConfigError(
          f'DataConfig.{name} = {expected[name]}: the run to resume had {state[name]}, and the order of its '
          'samples depends on it; set what it had, or start a new run'
        )
    if any(state[name] != expected[name] for name in ('num_samples', 'epoch_tokens', 'samples_crc32')):
      raise ConfigError(
        f'DataConfig.source = {self._config.source!r}: its samples ({_epoch_size(expected)}) are not those '
        f'of the run to resume ({_epoch_size(state)}): the source, its documents, '
        'DataConfig.max_document_tokens or DataConfig.long_documents changed; restore what that run had, '
        'or start a new run'
      )
    window_samples = expected['group_window_samples']
    if state['group_window_samples'] != window_samples:
      # The samples are the same, so of what makes a window only these two can differ.
      raise ConfigError(
        f'DataConfig.group_window_batches = {self._config.group_window_batches}: of DataConfig.batch_tokens '
        f'= {self._config.batch_tokens} each are windows of {window_samples} samples; the run to resume had '
        f'{state["group_window_samples"]}, and the order of its samples depends on it; set both to what it '
        'had, or start a new run'
      )


def _epoch_size(state: State) -> str:
  return (
    f'{state["num_samples"]} of {state["epoch_tokens"]} tokens in all, checksum {state["samples_crc32"]:08x}'
  )


def _shuffled_order(num_samples: int, seed: int) -> typing.Any:
  """Returns the endless order: entry `epoch * num_samples + i` is the i-th sample of that epoch.

  It is computed entry by entry, so that it takes no memory and a resumed run pays for no entry it skips.
  """
  import grain  # Here, since it imports JAX, which this module's other users may not have started yet.

  order = grain.MapDataset.range(num_samples)
  for word in _shuffle_seeds(seed):
    order = order.shuffle(seed=word)
  return order.repeat()


def _shuffle_seeds(seed: int) -> list[int]:
  """Returns the seeds of the shuffles that make an epoch's order, each below 2 ** 32, the first one's first.

  No two seeds below 2 ** 128 have the same: on four words of a seed, SeedSequence is one-to-one. Its first
  word alone is not, but tells small seeds apart.
  """
  # grain seeds an epoch with the sum of seed and epoch; run seeds 0 and 1 as they are would give the same
  # orders, one epoch apart.
  words = np.random.SeedSequence(seed).generate_state(1 if seed < _FIRST_AMBIGUOUS_SEED else 4)
  return [int(word) for word in words]
