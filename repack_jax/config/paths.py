"""Paths in configs: which fields hold them, and where they are looked up. Nothing here imports JAX."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

CURRENT_FOLDER = Path()
_NO_PATHS = 'no_paths'  # in the metadata of a field that holds a path


def path_field(default: str, no_paths: tuple[str, ...] = ()) -> Any:
  """Returns a dataclass field that holds a path, or one of the words `no_paths`, which are none."""
  return dataclasses.field(default=default, metadata={_NO_PATHS: ('', *no_paths)})


def is_path(field: dataclasses.Field[Any], text: str) -> bool:
  """Returns whether a field that is bound to this text holds a path."""
  return _NO_PATHS in field.metadata and text not in field.metadata[_NO_PATHS]


class MissingPath(str):
  """A path that led to nothing when the config was loaded, with the message for whoever needs the file.

  A config may name files that a command never opens, so that loading it is no time to complain.
  """

  problem: str

  def __new__(cls, path: str, problem: str = '') -> MissingPath:
    self = super().__new__(cls, path)
    self.problem = problem
    return self


def no_such_path(field: str, path: str) -> str:
  """Returns what is wrong with a field's path that leads to nothing, and which places were tried."""
  return path.problem if isinstance(path, MissingPath) else f'{field} = {path!r}: no such file or folder'


def packaged_configs() -> Path:
  """Returns the folder of the configs that come with the package."""
  return Path(str(resources.files('repack_jax') / 'configs'))


def places(path: str, folders: Iterable[Path]) -> list[Path]:
  """Returns what a path may mean, once each: inside each folder, or itself if absolute. `~` is expanded."""
  expanded = os.path.expanduser(path)
  by_absolute: dict[str, Path] = {}
  for folder in folders:
    by_absolute.setdefault(os.path.abspath(folder / expanded), folder / expanded)
  return list(by_absolute.values())


def tried(places_tried: Iterable[Path]) -> str:
  """Returns the tail of a message about a file that is in none of these places."""
  return f'(tried {" and ".join(os.path.abspath(place) for place in places_tried)})'


def located(field: str, path: str, folders: Iterable[Path]) -> str:
  """Returns the absolute path of the first place where there is a file or folder; else a MissingPath.

  A MissingPath is the first place: absolute as well, so that it means the same to whoever reads it later.

  Args:
    field: `Class.field`, with where it was bound in front, for the message.
    path: the path as it was written.
    folders: where to look up a relative path, in this order.
  """
  candidates = places(path, folders)
  for place in candidates:
    if os.path.exists(place):
      absolute = os.path.abspath(place)
      # Behind a link, `..` leads elsewhere than the text says.
      return absolute if _is_same(absolute, place) else os.path.realpath(place)
  problem = f'{field} = {path!r}: no such file or folder {tried(candidates)}'
  return MissingPath(os.path.abspath(candidates[0]), problem)


def _is_same(path: str, other: Path) -> bool:
  return os.path.exists(path) and os.path.samefile(path, other)
