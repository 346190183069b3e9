"""Small files that are there whole or as they were before, whatever happens meanwhile."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from repack_jax.checks import ConfigError


def write_whole(path: Path, text: str) -> None:
  """Writes a file as UTF-8 beside and renames it: readers, crashes and full disks never find a part of it.

  Pipes and devices, such as `/dev/stdout`, are written as they are.

  Raises:
    ConfigError: where it cannot be written.
  """
  try:
    if path.exists() and not path.is_file():
      path.write_text(text, encoding='utf-8')
      return
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name[:100]}-')
    try:
      with os.fdopen(handle, 'w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), 0o666 & ~_umask())
      os.replace(beside, path)
    except BaseException:
      os.unlink(beside)
      raise
  except OSError as error:
    raise ConfigError(f'{path}: cannot be written ({error.strerror})') from error


def _umask() -> int:
  """The process' mask of file modes, which can be read only by setting it."""
  mask = os.umask(0)
  os.umask(mask)
  return mask
