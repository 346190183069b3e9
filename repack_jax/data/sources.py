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

from repack_jax.checks import ConfigError
from repack_jax.config import STDLIB, DataConfig
from repack_jax.config.paths import no_such_path

# Third-party packages and compiled files are no part of the standard library; its tests are left out
# because many distributions do not install them.
_STDLIB_SKIPPED = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'}

_SOURCE_REMEDY = "set DataConfig.source to a folder, a .jsonl file or 'stdlib'"


class Source(abc.ABC):
  """A sequence of documents, numbered 0 ... len - 1."""

  @abc.abstractmethod
  def __len__(self) -> int:
    """Number of documents."""

  @abc.abstractmethod
  def name(self, index: int) -> str:
    """Where document `index` comes from, for messages: `file` or `file:line`."""

  @abc.abstractmethod
  def size_bytes(self, index: int) -> int:
    """The length of document `index`; raises ConfigError where it cannot be had."""

  @abc.abstractmethod
  def read(self, index: int, start: int, end: int) -> bytes:
    """Bytes `start` ... `end - 1` of document `index`, or fewer where it ends before.

    Raises:
      ConfigError: the document cannot be read, or it is seen to have changed.
    """


class FileSource(Source):
  """One document a file, in the given order."""

  def __init__(self, root: Path, relative_paths: list[str]):
    self._root, self._relative_paths = str(root), relative_paths

  def __len__(self) -> int:
    return len(self._relative_paths)

  def name(self, index: int) -> str:
    return os.path.join(self._root, self._relative_paths[index])

  def size_bytes(self, index: int) -> int:
    try:
      return os.stat(self.name(index)).st_size
    except OSError as error:
      raise _unreadable(self.name(index), error.strerror) from None

  def read(self, index: int, start: int, end: int) -> bytes:
    # Only that much of the file, so that the pieces of a huge one cost no more than those of others.
    try:
      with open(self.name(index), 'rb') as file:
        file.seek(start)
        return file.read(end - start)
    except OSError as error:
      raise _unreadable(self.name(index), error.strerror) from None


class JsonlSource(Source):
  """One document a line of a `.jsonl` file: the text of one field, as UTF-8. Blank lines are skipped.

  Every line is read and checked at once; in memory stay where it is and the length of its text.
  """

  def __init__(self, path: Path, text_field: str):
    """Raises ConfigError where the file cannot be read or a line is no document."""
    self._path, self._text_field = path, text_field
    starts, ends, lines, sizes = [], [], [], []
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
            sizes.append(len(_text(f'{path}:{number}', line, text_field)))
          position += len(line)
    except OSError as error:
      raise _unreadable(path, error.strerror) from None
    self._starts, self._ends, self._lines, self._sizes = (
      np.array(x, np.int64) for x in (starts, ends, lines, sizes)
    )

  def __len__(self) -> int:
    return len(self._starts)

  def name(self, index: int) -> str:
    return f'{self._path}:{self._lines[index]}'

  def size_bytes(self, index: int) -> int:
    return int(self._sizes[index])

  def read(self, index: int, start: int, end: int) -> bytes:
    line_start, line_end = int(self._starts[index]), int(self._ends[index])
    try:
      with self._path.open('rb') as file:
        file.seek(line_start)
        line = file.read(line_end - line_start)
    except OSError as error:
      raise _unreadable(self._path, error.strerror) from None
    try:
      text = _text(self.name(index), line, self._text_field)
    except ConfigError:  # it was fine before
      raise changed(self.name(index)) from None
    if len(text) != self._sizes[index]:
      raise changed(self.name(index))
    return text[start:end]


def changed(name: str) -> ConfigError:
  """The error for a document that is not as long as when it was indexed."""
  return ConfigError(
    f'{name}: changed while the run was on; restore it and resume, or start a new run with what it is now'
  )


def open_source(config: DataConfig) -> Source:
  """Returns the documents that `config.source` names: at least one.

  - a folder: its regular files that match `file_glob`, sorted by relative path; names that begin with a
    dot, and what is inside such folders, are left out;
  - a `.jsonl` file: its lines that are not blank;
  - `stdlib`: the .py files of the running Python's standard library, without tests and installed packages.

  Raises:
    ConfigError: the source does not exist, is of no known kind, cannot be read or has no documents, or a
      `.jsonl` line is no document.
  """
  if config.source == STDLIB:
    root = Path(sysconfig.get_paths()['stdlib'])
    paths = (path for path in root.rglob('*.py') if not _STDLIB_SKIPPED.intersection(_parents(path, root)))
    return _file_source(root, paths, 'no .py files there: this Python comes without its library')
  path = Path(os.path.expanduser(config.source))
  if not os.path.exists(path):
    raise ConfigError(f'{no_such_path("DataConfig.source", config.source)}; {_SOURCE_REMEDY}')
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


def _text(where: str, line: bytes, field: str) -> bytes:
  """The text field of a `.jsonl` line, encoded; raises ConfigError where the line has none."""
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


def _unreadable(path: str | Path, reason: str | None) -> ConfigError:
  return ConfigError(
    f'{path}: cannot read it ({reason}); make it readable or take it out of DataConfig.source'
  )
