"""`.jsonl` files as sources: one document a line, the text of one field.

A piece of a long line must not cost as much as the line: with the line parsed anew for each of its pieces,
an epoch of 50 MB in samples of 4,096 bytes took an hour. A cache of parsed lines would not help where samples
come in random order from more text than fits in memory. So opening a file notes where the text of each long
line can be entered: the bounds of blocks that decode on their own.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from repack_jax.checks import ConfigError
from repack_jax.documents.documents import Document, Source, changed, unreadable

# Shorter lines are parsed whole, and blocks end as soon as they may beyond this.
_BLOCK_BYTES = 1 << 16

# Where a block of what stands between a JSON string's quotes may end, so that it splits no character of
# UTF-8, no escape and no pair of escaped surrogates: where no escape began in the last 6 bytes, or where one
# begins that is no second surrogate. A backslash surely begins an escape if the byte before it is another
# one; so blocks grow longer in runs of nothing but backslashes, and only there.
_BLOCK_END = re.compile(rb'(?<=[^\\]{6})[^\\\x80-\xbf]|(?<=[^\\])\\(?!u[dD][c-fC-F])')

_WHITESPACE = re.compile(r'[ \t\r\n]*')


@dataclass(frozen=True, eq=False)
class _Blocks:
  """`B` consecutive blocks of a line's text.

  Attributes:
    file_bounds: int64 [B + 1], where in the file the blocks begin, and where the last one ends.
    text_bounds: int64 [B + 1], the same in the bytes of the text.
    crc32: uint32 [B], of what the file holds between the bounds.
  """

  file_bounds: np.ndarray
  text_bounds: np.ndarray
  crc32: np.ndarray


@dataclass(frozen=True)
class JsonlDocument(Document):
  """Line `index` of a source's file, of the lines that are not blank."""

  source: JsonlSource
  index: int

  @property
  def name(self) -> str:
    return self.source.name(self.index)

  @property
  def size_bytes(self) -> int:
    """Returns the length that the text had when the file was opened."""
    return self.source.size_bytes(self.index)

  def read(self, start_byte: int = 0, end_byte: int | None = None) -> bytes:
    end_byte = self.size_bytes if end_byte is None else min(end_byte, self.size_bytes)
    return self.source.read(self.index, start_byte, end_byte) if start_byte < end_byte else b''


class JsonlSource(Source):
  """One document a line of a `.jsonl` file: the text of one field, as UTF-8. Blank lines are skipped.

  Opening it reads and checks every line. What stays in memory is where each line is, the length of its
  text, and the blocks of long lines.
  """

  def __init__(self, path: Path, text_field: str):
    """Raises ConfigError where the file cannot be read or a line is no document."""
    self._path, self._text_field = path, text_field
    self._blocks: dict[int, _Blocks] = {}
    starts: list[int] = []
    ends: list[int] = []
    lines: list[int] = []
    sizes: list[int] = []
    position = 0
    try:
      with path.open('rb') as file:
        for number, line in enumerate(file, start=1):
          if number == 1 and line.startswith(b'\xef\xbb\xbf'):  # a byte order mark is no part of the JSON
            position, line = 3, line[3:]
          if line.strip():
            text = _text(f'{path}:{number}', line, text_field)
            if len(line) > _BLOCK_BYTES:
              self._blocks[len(starts)] = _blocks_of(line, text_field, position)
            starts.append(position)
            ends.append(position + len(line))
            lines.append(number)
            sizes.append(len(text))
          position += len(line)
    except OSError as error:
      raise unreadable(path, error.strerror) from None
    self._starts, self._ends, self._lines, self._sizes = (
      np.array(x, np.int64) for x in (starts, ends, lines, sizes)
    )

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, index: int) -> JsonlDocument:
    return JsonlDocument(self, index)

  def name(self, index: int) -> str:
    return f'{self._path}:{self._lines[index]}'

  def size_bytes(self, index: int) -> int:
    return int(self._sizes[index])

  def read(self, index: int, start_byte: int, end_byte: int) -> bytes:
    """Returns bytes `start_byte` ... `end_byte - 1` of a text that has them, and at least one of them.

    Raises ConfigError as `Document.read` does.
    """
    blocks = self._blocks.get(index)
    if blocks is None:
      return self._whole_text(index)[start_byte:end_byte]
    first = int(np.searchsorted(blocks.text_bounds, start_byte, side='right')) - 1
    last = int(np.searchsorted(blocks.text_bounds, end_byte, side='left'))
    raw_bounds = blocks.file_bounds[first : last + 1]
    raw = self._read_file(raw_bounds[0], raw_bounds[-1])
    ends = (raw_bounds - raw_bounds[0]).tolist()
    for (start, end), crc32 in zip(itertools.pairwise(ends), blocks.crc32[first:last], strict=True):
      if zlib.crc32(raw[start:end]) != crc32:
        raise changed(self[index])
    text_start = int(blocks.text_bounds[first])
    return _decode(raw)[start_byte - text_start : end_byte - text_start]

  def _whole_text(self, index: int) -> bytes:
    line = self._read_file(self._starts[index], self._ends[index])
    try:
      text = _text(self.name(index), line, self._text_field)
    except ConfigError:  # it was fine before
      raise changed(self[index]) from None
    if len(text) != self._sizes[index]:
      raise changed(self[index])
    return text

  def _read_file(self, start: int, end: int) -> bytes:
    try:
      with self._path.open('rb') as file:
        file.seek(start)
        return file.read(end - start)
    except OSError as error:
      raise unreadable(self._path, error.strerror) from None


def _blocks_of(line: bytes, field: str, position: int) -> _Blocks:
  """Returns the blocks of a line that `_text` accepts and that begins at `position` of the file."""
  decoded = line.decode('utf-8')
  start, end = (len(decoded[:place].encode()) for place in _string_span(decoded, field))
  bounds, sizes, crc32 = [start], [0], []
  while bounds[-1] < end:
    found = _BLOCK_END.search(line, min(bounds[-1] + _BLOCK_BYTES, end), end)
    raw = line[bounds[-1] : found.start() if found else end]
    bounds.append(bounds[-1] + len(raw))
    sizes.append(len(_decode(raw)))
    crc32.append(zlib.crc32(raw))
  return _Blocks(np.array(bounds, np.int64) + position, np.cumsum(sizes), np.array(crc32, np.uint32))


def _string_span(line: str, field: str) -> tuple[int, int]:
  """Returns where the string of a field begins and ends between its quotes, in characters of the line.

  The line is a valid JSON object with that field. Of several such fields the last counts, as for `json`.
  """

  def skip_blanks(place: int) -> int:
    blanks = _WHITESPACE.match(line, place)
    assert blanks is not None
    return blanks.end()

  decode = json.JSONDecoder().raw_decode
  span = (0, 0)
  place = skip_blanks(skip_blanks(0) + 1)
  while line[place] != '}':
    name, place = decode(line, place)
    start = skip_blanks(skip_blanks(place) + 1)
    _, end = decode(line, start)
    if name == field:
      span = (start + 1, end - 1)
    place = skip_blanks(end)
    if line[place] == ',':
      place = skip_blanks(place + 1)
  return span


def _decode(raw: bytes) -> bytes:
  """Returns the text of what stands between a JSON string's quotes."""
  text: str = json.loads(f'"{raw.decode("utf-8")}"')
  return text.encode('utf-8')


def _text(where: str, line: bytes, field: str) -> bytes:
  """Returns the text field of a line, encoded; raises ConfigError where the line has none."""
  try:
    record = json.loads(line.decode('utf-8'))
  except UnicodeDecodeError as error:
    raise ConfigError(f'{where}: not UTF-8 at byte {error.start} of the line; save it as UTF-8') from None
  except (ValueError, RecursionError) as error:
    reason = 'nested too deeply' if isinstance(error, RecursionError) else str(error)
    raise ConfigError(f'{where}: not JSON ({reason}); correct or remove the line') from None
  if not isinstance(record, dict):
    raise ConfigError(f'{where}: a JSON {type(record).__name__}, not an object; write {{"{field}": "..."}}')
  if field not in record:
    fields = ', '.join(map(repr, record)) or 'none'
    raise ConfigError(
      f'{where}: no field {field!r}; the fields are: {fields}. '
      'Set DataConfig.text_field to the one that holds the text'
    )
  text = record[field]
  if not isinstance(text, str):
    raise ConfigError(
      f'{where}: field {field!r} is of type {type(text).__name__}, not a string; correct the line or set '
      'DataConfig.text_field to the field that holds the text'
    )
  try:
    return text.encode('utf-8')
  except UnicodeEncodeError as error:
    raise ConfigError(
      f'{where}: field {field!r} has half a surrogate pair at character {error.start}, which no UTF-8 text '
      'can hold; correct or remove the line'
    ) from None
