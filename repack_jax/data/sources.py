"""`open_source`: what `DataConfig.source` can name, and folders of files. Nothing here imports JAX."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from repack_jax.checks import ConfigError
from repack_jax.config import STDLIB, DataConfig
from repack_jax.config.paths import no_such_path
from repack_jax.data.jsonl import JsonlSource
from repack_jax.documents.documents import Document, Source, unreadable

# Third-party packages and compiled files are no part of the standard library; its tests are left out
# because many distributions do not install them.
_STDLIB_SKIPPED = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'}

_SOURCE_REMEDY = "set DataConfig.source to a folder, a .jsonl file or 'stdlib'"


@dataclass(frozen=True)
class FileDocument(Document):
  """A file."""

  path: str

  @property
  def name(self) -> str:
    return self.path

  @property
  def size_bytes(self) -> int:
    """Returns the file's length now."""
    try:
      return os.stat(self.path).st_size
    except OSError as error:
      raise unreadable(self.path, error.strerror) from None

  def read(self, start_byte: int = 0, end_byte: int | None = None) -> bytes:
    # No more of the file than that, so that a piece of a huge one costs what any other sample does.
    try:
      with open(self.path, 'rb') as file:
        file.seek(start_byte)
        return file.read() if end_byte is None else file.read(max(0, end_byte - start_byte))
    except OSError as error:
      raise unreadable(self.path, error.strerror) from None


class FileSource(Source):
  """One document a file, in the given order."""

  def __init__(self, root: Path, relative_paths: list[str]):
    self._root, self._relative_paths = str(root), relative_paths

  def __len__(self) -> int:
    return len(self._relative_paths)

  def __getitem__(self, index: int) -> FileDocument:
    return FileDocument(os.path.join(self._root, self._relative_paths[index]))


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
      raise unreadable(root / relative_path, 'Permission denied')
  return FileSource(root, relative_paths)


def _parents(path: Path, root: Path) -> tuple[str, ...]:
  return path.relative_to(root).parts[:-1]
