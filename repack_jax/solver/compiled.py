"""The decorator of the planner's compiled functions: numba, with no stale machine code left on disk.

numba compiles a cached function anew when the file it is in changes, but not when a function that it calls
changes in another file. So the machine code of a folder carries a digest of all of the folder's sources, and
goes as a whole when one of them changes. Compiled functions may use functions and constants of their own
folder only.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

F = TypeVar('F', bound=Callable[..., Any])

_STAMP = 'numba_sources.sha256'
# Divisions by zero give infinity or NaN, as in NumPy.
_OPTIONS: dict[str, Any] = {'nogil': True, 'error_model': 'numpy'}


def compiled(function: F) -> F:
  """Returns the function as numba compiles it at its first call, from disk where its sources are unchanged.

  Where no folder can be written to, nothing is kept and each process compiles for itself; the environment
  variable NUMBA_CACHE_DIR names another folder.
  """
  try:
    kept = njit(cache=True, **_OPTIONS)(function)
  except RuntimeError:  # numba found no folder
    return njit(**_OPTIONS)(function)
  cache = kept.stats.cache_path if hasattr(kept, 'stats') else None  # NUMBA_DISABLE_JIT: the function itself
  if cache is None or drop_stale(Path(cache), Path(function.__code__.co_filename).parent):
    return kept
  return njit(**_OPTIONS)(function)


def drop_stale(cache: Path, sources: Path) -> bool:
  """Removes the machine code in a folder unless it was compiled from the sources as they are now.

  Contents count, not times, which copies, archives and packages carry over. Other processes may do the same
  at the same time: what they compiled meanwhile may go with the rest, which costs them a compilation.

  Args:
    cache: where numba keeps the machine code of the functions in `sources`, and of no others.
    sources: a folder; its `*.py` count, not those of folders inside.

  Returns whether all that is left is up to date; False where stale files cannot be removed.
  """
  digest, stamp = _digest(sources), cache / _STAMP
  try:
    if stamp.read_text() == digest:
      return True
  except (OSError, UnicodeDecodeError):
    pass  # none yet, or damaged
  try:
    for file in cache.glob('*.nb[ic]'):
      file.unlink(missing_ok=True)
  except OSError:
    return False
  with contextlib.suppress(OSError):  # the next process removes once more
    stamp.write_text(digest)
  return True


def _digest(sources: Path) -> str:
  digest = hashlib.sha256()
  for file in sorted(sources.glob('*.py')):
    try:
      content = file.read_bytes()
    except OSError:
      continue  # gone meanwhile, or an editor's lock
    digest.update(f'{file.name} {len(content)} '.encode())
    digest.update(content)
  return digest.hexdigest()
