"""Batches: an endless, resumable sequence that depends on the data config and the source alone."""

from __future__ import annotations

import typing
from dataclasses import dataclass

import numpy as np

from repack_jax.config import ConfigError, DataConfig
from repack_jax.data.samples import Sample, Tokenizer, cut_document, tokenize_bytes
from repack_jax.data.sources import Source

# Where the stream of samples goes on ...
_CURSOR = ('position', 'offset', 'batches')
# ... what has gone by ...
_COUNTERS = ('documents', 'samples', 'tokens', 'split', 'truncated', 'dropped', 'empty', 'lost_tokens')
# ... and what the order of documents depends on.
_IDENTITY = ('num_documents', 'seed')

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

  The order of documents is shuffled anew each epoch. A batch takes samples in that order until the next
  one would exceed `batch_tokens`; that one begins the next batch. Batches run on over the end of an
  epoch, so every sample is in exactly one batch an epoch. One document is in memory at a time, besides
  the batch being made.

  The state is a dict of ints, which JSON can hold:
    position: the document that comes next, in the endless order: epoch * num_documents + place in it.
    offset: tokens of that document that earlier batches already had (above 0 inside a split document).
    batches: batches made.
    documents, samples, tokens: how many the batches held; a split document counts once, with its first
      sample.
    split, truncated, dropped, empty: documents that were cut, shortened, left out for their length, or
      left out for having no tokens.
    lost_tokens: tokens that truncation and dropping left out.
    num_documents, seed: of the run that made the state.
  """

  def __init__(
    self,
    config: DataConfig,
    source: Source,
    state: State | None = None,
    tokenize: Tokenizer = tokenize_bytes,
  ):
    """Begins at the first epoch, or where `state` says.

    Raises:
      ConfigError: `state` is broken, or of a run with other documents or another seed.
    """
    self._config, self._source, self._tokenize = config, source, tokenize
    self._order = _shuffled_order(len(source), config.seed)
    identity = {'num_documents': len(source), 'seed': config.seed}
    self._state = dict.fromkeys(_CURSOR + _COUNTERS, 0) | identity
    if state is not None:
      _check_state(state, identity)
      self._state = dict(state)
    self._state_after_batch = dict(self._state)
    # Of the document at `position`, once it has been read: the samples still to come, and its length.
    self._pending: tuple[Sample, ...] | None = None
    self._document_tokens = 0

  def state(self) -> State:
    """A copy of the state after the last batch that was made."""
    return dict(self._state_after_batch)

  def __iter__(self) -> typing.Self:
    return self

  def __next__(self) -> Batch:
    """Raises ConfigError where a document cannot be read or used, or where no document gives a sample."""
    self._find_sample()
    epoch = self._state['position'] // len(self._source)
    samples: list[Sample] = []
    room_tokens = self._config.batch_tokens
    while room_tokens > 0 and len(self._find_sample()) <= room_tokens:
      samples.append(self._take_sample())
      room_tokens -= len(samples[-1])
    self._state['batches'] += 1
    self._state_after_batch = dict(self._state)
    return Batch(tuple(samples), self._state['batches'] - 1, epoch, self.state())

  def _find_sample(self) -> Sample:
    """The next sample, which stays the next; documents that give none are counted and passed over."""
    # Any run of this many entries has a whole epoch in it: the only usable document may come first in one
    # epoch and last in the next.
    for _ in range(2 * len(self._source)):
      if self._pending is None:
        self._read_document()
      if self._pending:
        return self._pending[0]
      self._pass_document()
    raise ConfigError(
      f'DataConfig.source = {self._config.source!r}: none of its {len(self._source)} documents can be used: '
      f'each is empty or longer than DataConfig.max_document_tokens = {self._config.max_document_tokens}; '
      "raise that or set DataConfig.long_documents = 'split'"
    )

  def _read_document(self) -> None:
    document = int(self._order[self._state['position']])
    tokens = self._tokenize(self._source[document])
    self._document_tokens = len(tokens)
    self._pending = cut_document(
      document, tokens, self._config, self._source.name(document), start=self._state['offset']
    )

  def _pass_document(self) -> None:
    """Leaves a document that gives no sample."""
    lost_tokens = self._document_tokens - self._state['offset']
    self._state['dropped' if lost_tokens else 'empty'] += 1
    self._state['lost_tokens'] += lost_tokens
    self._next_document()

  def _take_sample(self) -> Sample:
    """Moves on by one sample. A document is counted with its first: until then, a state may hold it back."""
    assert self._pending
    sample, *rest = self._pending
    if sample.offset == 0:
      lost_tokens = self._document_tokens - sum(map(len, self._pending))
      self._state['documents'] += 1
      self._state['split'] += len(rest) > 0
      self._state['truncated'] += lost_tokens > 0
      self._state['lost_tokens'] += lost_tokens
    self._state['samples'] += 1
    self._state['tokens'] += len(sample)
    if rest:
      self._pending = tuple(rest)
      self._state['offset'] = rest[0].offset
    else:
      self._next_document()
    return sample

  def _next_document(self) -> None:
    self._pending = None
    self._state['position'] += 1
    self._state['offset'] = 0


def _shuffled_order(num_documents: int, seed: int) -> typing.Any:
  """The endless order: entry `epoch * num_documents + i` is the i-th document of that epoch.

  It is computed entry by entry, so that it takes no memory and a resumed run pays for no entry it skips.
  """
  import grain  # Here, since it imports JAX, which this module's other users may not have started yet.

  # grain seeds an epoch with the sum of seed and epoch; run seeds 0 and 1 as they are would give the same
  # orders, one epoch apart.
  scattered_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
  return grain.MapDataset.range(num_documents).shuffle(seed=scattered_seed).repeat()


def _check_state(state: State, identity: State) -> None:
  """Raises ConfigError unless a Batcher with this `identity` can go on from `state`."""
  expected = {*_CURSOR, *_COUNTERS, *_IDENTITY}
  if set(state) != expected or not all(type(value) is int and value >= 0 for value in state.values()):
    raise ConfigError(
      f'checkpoint: data state {state!r}: must map {", ".join(sorted(expected))} to whole numbers; it is '
      'of another version or damaged, so start a new run'
    )
  for name, value in identity.items():
    if state[name] != value:
      subject = 'DataConfig.seed' if name == 'seed' else 'documents of DataConfig.source'
      raise ConfigError(
        f'{subject} = {value}: the run to resume had {state[name]}, and its order of documents depends on '
        'it; set what it had, or start a new run'
      )
