"""The decorator of the planner's compiled functions: numba, whose machine code on disk never gets stale.

numba compiles a cached function anew when the file it is in changes, but not when a function that it calls
changes in another file. So a digest of all sources of the folder lies beside the machine code, and all of it
is removed when one of them changes. Compiled functions may therefore use what their own folder defines only.

Two habits keep them fast to run and to compile. numba counts references to the arrays of tuples, by atomic
operations, wherever a function gives a nested tuple a local name or calls a function that is not inlined; so
what runs for every layout makes few calls and writes `layout.solo.tokens` in full. And an argument that is a
literal number has the function compiled once more for that number.
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


def compiled(function: F) -> F:
  """Returns the function as numba compiles it at its first call, from disk where its sources are unchanged.

  Divisions by zero give infinity or NaN, as in NumPy. Where no folder can be written to, each process
  compiles for itself; the environment variable NUMBA_CACHE_DIR names another folder.
  """
  try:
    kept = _numba(function, cache=True)
  except RuntimeError:  # numba found no folder
    return _numba(function, cache=False)
  # With NUMBA_DISABLE_JIT it is the function itself.
  cache = kept.stats.cache_path if hasattr(kept, 'stats') else None
  if cache is None or drop_stale(Path(cache), Path(function.__code__.co_filename).parent):
    return kept
  return _numba(function, cache=False)


def _numba(function: Callable[..., Any], cache: bool) -> Any:
  return njit(function, cache=cache, nogil=True, error_model='numpy')


def drop_stale(cache: Path, sources: Path) -> bool:
  """Removes the machine code in a folder unless it was compiled from the sources as they are now.

  Contents count and not times, which copies, archives and packages carry over. Several processes may do this
  at once: what one has just compiled may go with the rest, which costs another compilation. A process that
  still runs old sources can put old machine code back, which is not noticed.

  Args:
    cache: where numba keeps the machine code of the functions in `sources`, and of no others.
    sources: a folder; its `*.py` count, without those of folders inside.

  Returns whether all that is left is up to date; False where stale files cannot be removed.
  """
  digest, stamp = _digest(sources), cache / _STAMP
  with contextlib.suppress(OSError, UnicodeDecodeError):  # there is none yet, or it is damaged
    if stamp.read_text() == digest:
      return True
  try:
    for file in cache.glob('*.nb[ic]'):
      file.unlink(missing_ok=True)
  except OSError:
    return False
  with contextlib.suppress(OSError):  # then the next process removes everything once more
    stamp.write_text(digest)
  return True


def _digest(sources: Path) -> str:
  digest = hashlib.sha256()
  for file in sorted(sources.glob('*.py')):
    with contextlib.suppress(OSError):  # gone meanwhile, or an editor's lock
      content = file.read_bytes()
      digest.update(f'{file.name} {len(content)} '.encode() + content)
  return digest.hexdigest()
