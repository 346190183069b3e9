"""The folder of a run: whose it is, and what it says of its config."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from repack_jax.checks import ConfigError
from repack_jax.config.gin_files import load, resolved
from repack_jax.config.model import ModelConfig
from repack_jax.config.paths import is_path
from repack_jax.config.run import DataConfig, RunConfig
from repack_jax.files import write_whole
from repack_jax.kinds import LayerKind

# Sections that a run cannot change when it is resumed.
_FIXED = (ModelConfig, LayerKind, DataConfig)


def check_workdir(run: RunConfig, workdir: Path) -> None:
  """Raises ConfigError where the workdir holds a run with another model or data, naming the first field."""
  saved = workdir / 'resolved.gin'
  if not saved.exists():
    return
  for old, new in zip(load([str(saved)], []).sections(), run.sections(), strict=True):
    if not isinstance(old, _FIXED):
      continue
    for field in dataclasses.fields(old):
      name, value = field.name, getattr(old, field.name)
      # Data may move: what is in them is checked against the checkpoint. Kinds are sections of their own.
      if name != 'kinds' and not is_path(field, value) and value != getattr(new, name):
        raise ConfigError(
          f'{type(new).__name__}.{name} = {getattr(new, name)!r}: the run in {workdir} has {value!r}. '
          'Resume it with the same value, or give another --workdir'
        )


@contextlib.contextmanager
def claimed_workdir(run: RunConfig, workdir: Path | None, name: str) -> Iterator[Path]:
  """Makes the workdir, writes `resolved.gin` and yields the folder, which no other run can claim meanwhile.

  The lock is the process': it is free again when that ends, however it does.

  Args:
    workdir: by default a new one in `runs/`, called by the name and the time.

  Raises:
    ConfigError: where it cannot be written, or another run has claimed it.
  """
  try:
    if workdir is None:
      workdir = new_folder(Path('runs') / f'{name}-{time.strftime("%Y%m%d-%H%M%S")}')
    workdir.mkdir(parents=True, exist_ok=True)
    lock = (workdir / '.lock').open('a+', encoding='utf-8')
  except OSError as error:
    raise ConfigError(f'--workdir {workdir}: cannot be written ({error.strerror})') from error
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      lock.seek(0)
      raise ConfigError(
        f'--workdir {workdir}: {lock.read().strip() or "another run"} is writing there. Wait for its end, or '
        'give another --workdir'
      ) from error
    lock.truncate(0)
    lock.write(f'process {os.getpid()} on {socket.gethostname()}\n')
    lock.flush()
    write_whole(workdir / 'resolved.gin', resolved(run))
    yield workdir


def new_folder(path: Path) -> Path:
  """Makes a folder that was not there, this one or with a number behind its name; returns it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  for number in itertools.count(1):
    folder = path if number == 1 else path.with_name(f'{path.name}-{number}')
    with contextlib.suppress(FileExistsError):
      folder.mkdir()
      return folder
  raise AssertionError
