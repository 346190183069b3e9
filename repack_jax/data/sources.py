"""Sources: random-access sequences of documents, read from disk when they are needed.

The order of a source is fixed (sorted paths, or lines as they come), so that a document's number means
the same on every machine that has the same data. Nothing here imports JAX.
"""

from __future__ import annotations

import abc
import json
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from repack_jax.config import ConfigError, DataConfig

STDLIB = 'stdlib'

# Third-party packages and compiled files are no part of the standard library; its tests are left out
# because many distributions do not install them.
_STDLIB_SKIPPED = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'}

_SOURCE_REMEDY = "set DataConfig.source to a folder, a .jsonl file or 'stdlib'"


class Source(abc.ABC):
  """A sequence of documents. Reading one may raise ConfigError, which names it by `name`."""

  @abc.abstractmethod
  def __len__(self) -> int:
    """Number of documents."""

  @abc.abstractmethod
  def __getitem__(self, index: int) -> bytes:
    """The content of document `index`, in 0 ... len - 1."""

  @abc.abstractmethod
  def name(self, index: int) -> str:
    """Where document `index` comes from, for messages: `file` or `file:line`."""

  @abc.abstractmethod
  def size_bytes(self, index: int) -> int:
    """The length of document `index`, got as cheaply as the source allows."""

  def read(self, index: int, start: int, end: int) -> bytes:
    """Bytes `start` ... `end - 1` of document `index`, or fewer where it ends before."""
    return self[index][start:end]


class FileSource(Source):
  """One document a file, in the given order."""

  def __init__(self, root: Path, relative_paths: list[str]):
    self._root, self._relative_paths = str(root), relative_paths

  def __len__(self) -> int:
    return len(self._relative_paths)

  def __getitem__(self, index: int) -> bytes:
    return self.read(index, 0, -1)

  def name(self, index: int) -> str:
    return os.path.join(self._root, self._relative_paths[index])

  def size_bytes(self, index: int) -> int:
    try:
      return os.stat(self.name(index)).st_size
    except OSError as error:
      raise _unreadable(self.name(index), error.strerror) from None

  def read(self, index: int, start: int, end: int) -> bytes:
    """As documented in Source; no more than that is read, so pieces of a huge file cost their own size."""
    try:
      with open(self.name(index), 'rb', buffering=0) as file:
        file.seek(start)
        return file.read(end - start)
    except OSError as error:
      raise _unreadable(self.name(index), error.strerror) from None


class JsonlSource(Source):
  """One document a line of a `.jsonl` file: the text of one field, as UTF-8. Blank lines are skipped.

  Only the offsets of the lines are kept in memory; a line is read and checked when its document is.
  """

  def __init__(self, path: Path, text_field: str):
    self._path, self._text_field = path, text_field
    starts, ends, lines = [], [], []
    position = 0
    try:
      with path.open('rb') as file:
        for number, line in enumerate(file, start=1):
          if number == 1 and line.startswith(b'\xef\xbb\xbf'):  # a byte order mark is no part of the JSON
            position, line = 3, line[3:]
          if line.strip():
            starts.append(position)
            ends.append(position + len(line))
            lines.append(number)
          position += len(line)
    except OSError as error:
      raise _unreadable(path, error.strerror) from None
    self._starts, self._ends, self._lines = (np.array(x, np.int64) for x in (starts, ends, lines))

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, index: int) -> bytes:
    start, end = int(self._starts[index]), int(self._ends[index])
    try:
      with self._path.open('rb') as file:
        file.seek(start)
        return self._text(index, file.read(end - start))
    except OSError as error:
      raise _unreadable(self._path, error.strerror) from None

  def name(self, index: int) -> str:
    return f'{self._path}:{int(self._lines[index])}'

  def size_bytes(self, index: int) -> int:
    return len(self[index])

  def _text(self, index: int, line: bytes) -> bytes:
    """The text field of a line, encoded; raises ConfigError where the line has none."""
    where = self.name(index)
    try:
      record = json.loads(line.decode('utf-8'))
    except UnicodeDecodeError as error:
      raise ConfigError(f'{where}: not UTF-8 at byte {error.start} of the line; save it as UTF-8') from None
    except (ValueError, RecursionError) as error:
      reason = 'nested too deeply' if isinstance(error, RecursionError) else str(error)
      raise ConfigError(f'{where}: not JSON ({reason}); correct or remove the line') from None
    if not isinstance(record, dict):
      raise ConfigError(
        f'{where}: a JSON {type(record).__name__}, not an object; write {{"{self._text_field}": "..."}}'
      )
    if self._text_field not in record:
      fields = ', '.join(map(repr, record)) or 'none'
      raise ConfigError(
        f'{where}: no field {self._text_field!r}; the fields are: {fields}. '
        'Set DataConfig.text_field to the one that holds the text'
      )
    text = record[self._text_field]
    if not isinstance(text, str):
      raise ConfigError(
        f'{where}: field {self._text_field!r} is of type {type(text).__name__}, not a string; correct the '
        'line or set DataConfig.text_field to the field that holds the text'
      )
    try:
      return text.encode('utf-8')
    except UnicodeEncodeError as error:
      raise ConfigError(
        f'{where}: field {self._text_field!r} has half a surrogate pair at character {error.start}, which '
        'no UTF-8 text can hold; correct or remove the line'
      ) from None


def open_source(config: DataConfig) -> Source:
  """Returns the documents that `config.source` names: at least one.

  - a folder: its regular files that match `file_glob`, sorted by relative path; names that begin with a
    dot, and what is inside such folders, are left out;
  - a `.jsonl` file: its lines that are not blank;
  - `stdlib`: the .py files of the running Python's standard library, without tests and installed packages.

  Raises:
    ConfigError: the source does not exist, is of no known kind, cannot be read or has no documents.
  """
  if config.source == STDLIB:
    root = Path(sysconfig.get_paths()['stdlib'])
    paths = (path for path in root.rglob('*.py') if not _STDLIB_SKIPPED.intersection(_parents(path, root)))
    return _file_source(root, paths, 'no .py files there: this Python comes without its library')
  path = Path(os.path.expanduser(config.source))
  if not os.path.exists(path):
    raise ConfigError(f'DataConfig.source = {config.source!r}: no such file or folder; {_SOURCE_REMEDY}')
  if path.is_dir():
    remedy = 'no file there matches; correct one of the two'
    return _file_source(
      path, _glob(path, config.file_glob), f'DataConfig.file_glob = {config.file_glob!r}: {remedy}'
    )
  if path.suffix != '.jsonl' or not path.is_file():
    raise ConfigError(f'DataConfig.source = {config.source!r}: not a source of documents; {_SOURCE_REMEDY}')
  source = JsonlSource(path, config.text_field)
  if not len(source):
    raise ConfigError(f'DataConfig.source = {config.source!r}: the file has no lines; {_SOURCE_REMEDY}')
  return source


def describe(source: Source, config: DataConfig) -> dict[str, int]:
  """Returns what a summary shows of a source. It reads no folder's files, but every line of a `.jsonl`.

  Returns:
    `documents`, `empty_documents`, `long_documents` (those above `max_document_tokens`), `total_bytes`,
    and of the documents' lengths `min_bytes`, `median_bytes`, `p99_bytes` and `max_bytes`. A byte is a
    token.
  """
  sizes = np.array([source.size_bytes(i) for i in range(len(source))], np.int64)
  low, median, p99, high = np.percentile(sizes, [0, 50, 99, 100], method='nearest')
  return {
    'documents': len(sizes),
    'empty_documents': int((sizes == 0).sum()),
    'long_documents': int((sizes > config.max_document_tokens).sum()),
    'total_bytes': int(sizes.sum()),
    'min_bytes': int(low),
    'median_bytes': int(median),
    'p99_bytes': int(p99),
    'max_bytes': int(high),
  }


def _glob(root: Path, pattern: str) -> list[Path]:
  try:
    if '..' in Path(pattern).parts:
      raise ValueError("'..' leaves the folder")
    return list(root.glob(pattern))
  except (ValueError, NotImplementedError) as error:
    raise ConfigError(
      f"DataConfig.file_glob = {pattern!r}: {error}; give a pattern inside the folder, such as '**/*.txt'"
    ) from None


def _file_source(root: Path, paths: Iterable[Path], if_none: str) -> FileSource:
  """The visible regular files among `paths`, sorted; raises ConfigError where there are none."""
  visible = (path for path in paths if not any(part.startswith('.') for part in path.relative_to(root).parts))
  relative_paths = sorted(path.relative_to(root).as_posix() for path in visible if path.is_file())
  if not relative_paths:
    raise ConfigError(f'{root}: {if_none}')
  for relative_path in relative_paths:
    # Now, not hours into the run when its turn comes.
    if not os.access(root / relative_path, os.R_OK):
      raise _unreadable(root / relative_path, 'Permission denied')
  return FileSource(root, relative_paths)


def _parents(path: Path, root: Path) -> tuple[str, ...]:
  return path.relative_to(root).parts[:-1]


def _unreadable(path: Path, reason: str | None) -> ConfigError:
  return ConfigError(
    f'{path}: cannot read it ({reason}); make it readable or take it out of DataConfig.source'
  )
