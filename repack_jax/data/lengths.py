"""Lengths without documents: files of lengths, and the batches that they make. NumPy only.

The simulator needs nothing of a document but its length, so it can play corpora that are not on this
machine. A file is either a list of lengths or a histogram of them; `read_lengths` says which kinds there
are, and `configs/lengths` holds some histograms.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from repack_jax.checks import ConfigError, require
from repack_jax.config import DataConfig, SimulatorConfig
from repack_jax.config.paths import MissingPath
from repack_jax.data.grouping import grouped_order, window_samples
from repack_jax.data.jsonl import JsonlSource
from repack_jax.data.long_documents import Pieces, check_long_documents, kept_tokens
from repack_jax.documents.tokenizers import TOKENIZERS

# No document is longer, and sums over a chunk or a large file stay far inside int64.
MAX_LENGTH_TOKENS = 1 << 40

_CHUNK_SAMPLES = 1 << 14
_HEADER = 'low,high,count'
_SAVE_REMEDY = 'save one 1-D array of integers with np.save or np.savez(path, lengths=...)'


@dataclass(frozen=True, eq=False)
class Histogram:
  """How many documents have which lengths, in `B` bins. Bins may leave gaps or overlap.

  Attributes:
    low, high: int64 [B], tokens of the shortest and the longest document in a bin, 1 <= low <= high.
    count: int64 [B], documents in a bin, at least 0, and not all of them 0.
  """

  low: np.ndarray
  high: np.ndarray
  count: np.ndarray

  def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
    """Returns n lengths, int64 [n]: a bin by its share of the documents, then log-uniform inside it."""
    ends = np.cumsum(self.count)
    bins = np.searchsorted(ends, rng.integers(ends[-1], size=n), side='right')
    low, high = self.low[bins], self.high[bins]
    drawn = np.rint(np.exp(rng.uniform(np.log(low), np.log(high)))).astype(np.int64)
    return np.clip(drawn, low, high)


def read_lengths(path: str | Path, data: DataConfig = DataConfig()) -> np.ndarray | Histogram:
  """Returns the lengths in a file, int64 [n], n >= 1, each at least 1; or a Histogram. `~` is expanded.

  What a file holds goes by its suffix:
  - `.npy`: one 1-D array of integers; `.npz`: the same, named `lengths` or the only one;
  - `.csv`: a Histogram, a bin a line below the header `low,high,count`, `high` inclusive;
  - `.jsonl`: documents, their `data.text_field` in tokens of `data.tokenizer`. Those without a token are left
    out, as in training;
  - any other: text, one length a line.
  In `.csv` and text, blank lines and those that begin with `#` are skipped.

  Raises:
    ConfigError: there is no such file, it cannot be read, or it holds no lengths or something else.
  """
  require(str(path) != '', 'SimulatorConfig.lengths', '', 'name a file of lengths, such as a .csv or .npz')
  if isinstance(path, MissingPath) and not os.path.exists(path):
    raise ConfigError(f'{path.problem}; name a file of lengths')
  path = Path(os.path.expanduser(path))
  if not os.path.isfile(path):
    kind = (
      'a folder' if os.path.isdir(path) else 'no regular file' if os.path.exists(path) else 'no such file'
    )
    raise ConfigError(f'{path}: {kind}; name a file of lengths')
  try:
    with path.open('rb'):
      pass  # Whether it can be read at all is the same question for all kinds.
  except OSError as error:
    raise _unreadable(path, error) from None
  suffix = path.suffix.lower()
  if suffix in ('.npy', '.npz'):
    return _read_numpy(path)
  if suffix == '.csv':
    return _read_histogram(path)
  if suffix == '.jsonl':
    source, tokenizer = JsonlSource(path, data.text_field), TOKENIZERS[data.tokenizer]
    tokens = np.fromiter((tokenizer.count(document) for document in source), np.int64, len(source))
    lengths = tokens[tokens > 0]
  else:
    lengths = np.array([_whole_number(where, line, 1) for where, line in _lines(path)], np.int64)
  if not len(lengths):
    raise _empty(path)
  return lengths


def length_batches(
  lengths: np.ndarray | Histogram, data: DataConfig, simulator: SimulatorConfig
) -> Iterator[np.ndarray]:
  """Returns endless batches of lengths, int64 [samples of the batch] each, in tokens.

  An array gives each of its lengths once an epoch, in an order drawn anew; a Histogram gives draws. The
  same arguments always give the same batches. Lengths of at least `simulator.tail_from_tokens` (where
  that is not 0) are multiplied by `simulator.tail_scale`, rounded, and at least 1. Then come
  `data.long_documents`, whose pieces of a document follow one another; `data.group_long_documents`, which
  brings the long ones of all pieces together, in windows of an epoch, or of the draws of a Histogram; and
  `data.batch_tokens`: a batch takes samples until the next one would exceed it. Batches run on over the end
  of an epoch.

  Args:
    lengths: what `read_lengths` returns: at least one, each 1 ... MAX_LENGTH_TOKENS.

  Raises:
    ConfigError: now, not at the first batch: a length is beyond `data.max_document_tokens` and
      `data.long_documents` is `error`, or it is `drop` and all are; or the tail grows beyond
      MAX_LENGTH_TOKENS. Of a Histogram, what its bins allow counts, whether it would be drawn or not.
  """
  rng = np.random.default_rng(simulator.seed)
  if isinstance(lengths, Histogram):
    check_long_documents(_scale_tail(_extremes(lengths, simulator), simulator), data)
    samples = _split(_drawn(lengths, rng, data, simulator), data)
    # Draws of their own, the same for all seeds, tell how long a window is.
    some = _drawn(lengths, np.random.default_rng(0), data, simulator)
  else:
    lengths = _scale_tail(np.asarray(lengths, np.int64), simulator)
    check_long_documents(lengths, data)
    # Before the order is drawn: where few of many are kept, an epoch costs no more than those.
    kept = _shorten(lengths, data)
    samples = _split(_shuffled(kept, rng), data)
    some = iter([kept])
  if data.group_long_documents:
    samples = _grouped(samples, some, not isinstance(lengths, Histogram), data, simulator.seed)
  return _batches(samples, data)


def file_order_batches(lengths: np.ndarray, data: DataConfig) -> Iterator[np.ndarray]:
  """Returns the batches that the lengths make in the order they have, once through.

  So there is no seed, no tail, and no `data.group_long_documents`, which would change the order. As
  `length_batches` otherwise, in arguments, batches and errors.
  """
  lengths = np.asarray(lengths, np.int64)
  check_long_documents(lengths, data)
  return _batches(_split(_chunks(_shorten(lengths, data)), data), data)


def _batches(chunks: Iterable[np.ndarray], data: DataConfig) -> Iterator[np.ndarray]:
  """Cuts a stream of the lengths of samples into batches."""
  batch_tokens = min(data.batch_tokens, 1 << 62)  # so that a sum with a chunk's tokens stays in int64
  parts: list[np.ndarray] = []
  room_tokens = batch_tokens
  for chunk in chunks:
    ends = np.cumsum(chunk)
    start = used_tokens = 0
    while start < len(chunk):
      stop = int(np.searchsorted(ends, used_tokens + room_tokens, side='right'))
      parts.append(chunk[start:stop])
      if stop == len(chunk):
        room_tokens -= int(ends[-1]) - used_tokens
        break
      # No sample is longer than a batch, so this one is not empty.
      yield np.concatenate(parts)
      parts, room_tokens = [], batch_tokens
      start, used_tokens = stop, int(ends[stop - 1]) if stop else 0
  if parts:
    yield np.concatenate(parts)


def _grouped(
  chunks: Iterator[np.ndarray], some: Iterator[np.ndarray], are_epochs: bool, data: DataConfig, seed: int
) -> Iterator[np.ndarray]:
  """Yields chunks of an endless stream of samples whose long ones are brought together in each window.

  Args:
    chunks: of the lengths of samples, in tokens, as are those that it yields.
    some: lengths of documents like theirs, shortened but not split; the first chunk gives the mean.
    are_epochs: whether that is an epoch of the stream, whose end no window then crosses.
  """
  kept = next(filter(len, some))
  epoch_samples = len(Pieces(kept, data))
  window = window_samples(data, epoch_samples, int(kept.sum()))
  if not are_epochs:
    epoch_samples = window
  starts = itertools.chain.from_iterable(range(0, epoch_samples, window) for _ in itertools.count())
  rest = np.zeros(0, np.int64)
  for number, start in enumerate(starts):
    size = min(window, epoch_samples - start)
    parts, held = [rest], len(rest)
    while held < size:
      parts.append(next(chunks))
      held += len(parts[-1])
    rest = parts[0] if len(parts) == 1 else np.concatenate(parts)
    samples, rest = rest[:size], rest[size:]
    yield from _chunks(samples[grouped_order(samples, data, seed, number)])


def _split(chunks: Iterable[np.ndarray], data: DataConfig) -> Iterator[np.ndarray]:
  """Yields chunks of the lengths of the pieces that a stream of lengths is cut into, in order."""
  for lengths in chunks:
    if not len(lengths) or lengths.max() <= data.max_document_tokens:
      yield lengths
      continue
    pieces = Pieces(lengths, data)
    for start in range(0, len(pieces), _CHUNK_SAMPLES):
      _, _, length = pieces.between(start, min(start + _CHUNK_SAMPLES, len(pieces)))
      yield length


def _drawn(
  histogram: Histogram, rng: np.random.Generator, data: DataConfig, simulator: SimulatorConfig
) -> Iterator[np.ndarray]:
  """Yields chunks of endless draws, with the simulator's tail and shortened."""
  while True:
    yield _shorten(_scale_tail(histogram.draw(rng, _CHUNK_SAMPLES), simulator), data)


def _shuffled(lengths: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
  """Yields chunks of an endless stream of epochs, each a fresh order of the lengths, int64 [n]."""
  epochs = max(1, _CHUNK_SAMPLES // len(lengths))  # at once, so that few lengths are as fast as many
  while True:
    orders = rng.permuted(np.tile(np.arange(len(lengths)), (epochs, 1)), axis=1)
    for order in _chunks(orders.ravel()):
      yield lengths[order]


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
  return (array[start : start + _CHUNK_SAMPLES] for start in range(0, len(array), _CHUNK_SAMPLES))


def _scale_tail(lengths: np.ndarray, simulator: SimulatorConfig) -> np.ndarray:
  """Returns the lengths with the simulator's tail; raises ConfigError where one grows out of bounds."""
  if not simulator.tail_from_tokens:
    return lengths
  in_tail = lengths >= simulator.tail_from_tokens
  with np.errstate(over='ignore'):  # infinity is out of bounds like any other
    scaled = np.where(in_tail, np.maximum(np.rint(lengths * float(simulator.tail_scale)), 1), lengths)
  longest = int(lengths.argmax())
  require(
    scaled.max() <= MAX_LENGTH_TOKENS, 'SimulatorConfig.tail_scale', simulator.tail_scale,
    f'makes {lengths[longest]} tokens {scaled[longest]:g}, more than the {MAX_LENGTH_TOKENS} that a length '
    'may have; lower it',
  )  # fmt: skip
  return scaled.astype(np.int64)


def _extremes(histogram: Histogram, simulator: SimulatorConfig) -> np.ndarray:
  """Lengths among which are the shortest and the longest that the histogram gives, also after the tail."""
  filled = histogram.count > 0
  low, high = histogram.low[filled], histogram.high[filled]
  first = min(simulator.tail_from_tokens, MAX_LENGTH_TOKENS + 1)
  # The tail may shrink, so the last length below it and the first in it count as much as the bins' ends.
  return np.concatenate([low, high, np.clip(first - 1, low, high), np.clip(first, low, high)])


def _shorten(lengths: np.ndarray, data: DataConfig) -> np.ndarray:
  """Returns what `long_documents` keeps of each length, without those of which it keeps nothing.

  Splitting comes later.
  """
  kept = kept_tokens(lengths, data)
  return kept[kept > 0]


def _read_numpy(path: Path) -> np.ndarray:
  """Returns the lengths of a `.npy` or `.npz` file; which of the two it is, its content says."""
  where = str(path)
  try:
    with path.open('rb') as file:
      loaded = np.load(file, allow_pickle=False)
      if isinstance(loaded, np.lib.npyio.NpzFile):
        names = loaded.files
        name = names[0] if len(names) == 1 else 'lengths'
        if name not in names:
          raise ConfigError(f'{path}: {_several(names)}; {_SAVE_REMEDY}')
        where, loaded = f'{path}[{_show(name)}]', loaded[name]
  except ConfigError:
    raise
  except Exception as error:  # broken headers and archives raise of nearly every kind
    reason = ' '.join(str(error).split())[:100] or type(error).__name__
    if 'pickle' in reason:  # NumPy's own words advise to load it unsafely, and name all garbage so
      reason = 'pickled objects, or no NumPy file at all'
    raise ConfigError(f'{path}: not a NumPy file of plain numbers ({reason}); {_SAVE_REMEDY}') from None
  if not isinstance(loaded, np.ndarray):
    raise ConfigError(f'{where}: not a NumPy array; {_SAVE_REMEDY}')
  return _checked_array(where, loaded)


def _several(names: list[str]) -> str:
  some = ', '.join(map(_show, names[:5])) + (', ...' if len(names) > 5 else '')
  return f'several arrays ({some}), none of them named lengths' if names else 'an archive without arrays'


def _checked_array(where: str, array: np.ndarray) -> np.ndarray:
  """Returns an array from a file as int64 [n]; raises ConfigError where it is not of lengths."""
  if array.ndim != 1:
    raise ConfigError(f'{where}: of shape {array.shape}, not 1-D; {_SAVE_REMEDY}')
  if not len(array):
    raise _empty(where)
  if array.dtype.kind == 'f':
    _check_entries(where, array, ~np.isfinite(array), 'not a finite number; remove or correct it')
    _check_entries(where, array, array != np.rint(array), 'not a whole number; lengths are counts of tokens')
  if array.dtype.kind not in 'iu':
    dtype = _show(str(array.dtype))
    raise ConfigError(f'{where}: of dtype {dtype}, not integers; convert to integers: array.astype(np.int64)')
  _check_entries(where, array, array < 1, 'a length is at least 1; remove or correct it')
  too_long = f'more than the {MAX_LENGTH_TOKENS} tokens that a length may have; correct it'
  _check_entries(where, array, array > MAX_LENGTH_TOKENS, too_long)
  return array.astype(np.int64)


def _check_entries(where: str, array: np.ndarray, is_wrong: np.ndarray, remedy: str) -> None:
  if is_wrong.any():
    index = int(is_wrong.argmax())
    raise ConfigError(f'{where}: entry {index} (from 0) is {array[index]}: {remedy}')


def _read_histogram(path: Path) -> Histogram:
  """Returns the bins of a `.csv` file."""
  lines = _lines(path)
  where, header = next(lines, ('', ''))
  if not header:
    raise _empty(path)
  if [name.strip() for name in header.split(',')] != _HEADER.split(','):
    raise ConfigError(
      f'{where}: {_show(header)} is not the header; begin the file with {_HEADER!r}, or name it '
      '.txt if it is a list of lengths'
    )
  bins = []
  for where, line in lines:
    fields = line.split(',')
    if len(fields) != 3:
      raise ConfigError(f'{where}: {_show(line)} is no bin; write three whole numbers, {_HEADER}')
    row = [
      _whole_number(where, field.strip(), minimum, f'{name} = ')
      for field, minimum, name in zip(fields, (1, 1, 0), _HEADER.split(','), strict=True)
    ]
    if row[0] > row[1]:
      raise ConfigError(f'{where}: low = {row[0]} is above high = {row[1]}; swap or correct them')
    bins.append(row)
  low, high, count = np.array(bins, np.int64).reshape(-1, 3).T
  if not count.any():
    problem = 'all counts are 0' if bins else 'no bins below the header'
    raise ConfigError(f'{path}: {problem}; give at least one bin a count, or name another file')
  return Histogram(low, high, count)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
  """Yields `file:line` and the text of each line that is not blank and not a comment."""
  try:
    text = path.read_bytes().decode('utf-8-sig')
  except OSError as error:
    raise _unreadable(path, error) from None
  except UnicodeDecodeError as error:
    raise ConfigError(
      f'{path}: not text in UTF-8 at byte {error.start}; name a text file, or give a NumPy file its suffix, '
      '.npy or .npz'
    ) from None
  for number, line in enumerate(text.replace('\r\n', '\n').replace('\r', '\n').split('\n'), start=1):
    stripped = line.strip()
    if stripped and not stripped.startswith('#'):
      yield f'{path}:{number}', stripped


def _whole_number(where: str, text: str, minimum: int, name: str = '') -> int:
  """Returns the number in a field; raises ConfigError where it is not minimum ... MAX_LENGTH_TOKENS."""
  digits = text.removeprefix('-')
  if not (digits.isascii() and digits.isdecimal()):  # int() would take 1_000 and the digits of all scripts
    raise ConfigError(f'{where}: {name}{_show(text)} is not a whole number; write digits alone, such as 1024')
  # int() refuses thousands of digits.
  number = int(text) if len(digits) < 1000 else MAX_LENGTH_TOKENS + 1
  if text.startswith('-') or number < minimum:
    raise ConfigError(f'{where}: {name}{_show(text)} must be at least {minimum}; correct or remove the line')
  if number > MAX_LENGTH_TOKENS:
    raise ConfigError(f'{where}: {name}{_show(text)} must be at most {MAX_LENGTH_TOKENS}; correct the line')
  return number


def _show(value: object) -> str:
  """Returns a value as it may stand in a message: in ASCII, and short."""
  text = ascii(value)
  return text if len(text) <= 60 else text[:57] + '...'


def _unreadable(path: Path, error: OSError) -> ConfigError:
  return ConfigError(f'{path}: cannot read it ({error.strerror}); make it readable, or name another file')


def _empty(where: str | Path) -> ConfigError:
  return ConfigError(f'{where}: holds no lengths; give it at least one, or name another file')
