"""The folder of a run: whose it is, and what it says of its config."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from repack_jax.checks import ConfigError
from repack_jax.config.gin_files import load, resolved
from repack_jax.config.model import ModelConfig
from repack_jax.config.paths import is_path
from repack_jax.config.run import DataConfig, OptimizerConfig, RunConfig, parts
from repack_jax.files import write_whole
from repack_jax.kinds import LayerKind

# Sections that a run cannot change when it is resumed, and those that change what it means.
_FIXED = (ModelConfig, LayerKind, DataConfig)
_MEANING = (OptimizerConfig,)

log = logging.getLogger(__name__)


class _Change(NamedTuple):
  section: str
  field: str
  old: object
  new: object

  @property
  def name(self) -> str:
    return f'{self.section}.{self.field}'


def check_workdir(run: RunConfig, workdir: Path, allow_change: bool = False) -> None:
  """Raises ConfigError where the workdir holds a run of another meaning, naming the first field.

  Model and data can't change. The optimizer and its schedule, which a run of other steps has another of, may
  where `allow_change` says so. Whatever else has changed is a line of the log.
  """
  saved = workdir / 'resolved.gin'
  if not saved.exists():
    return
  try:
    before = load([str(saved)], [])
  except (ConfigError, UnicodeDecodeError) as error:
    raise ConfigError(
      f'{saved}: cannot be read back, so it was changed or damaged ({error}). Remove it to resume with this '
      'config as it is, or give another --workdir'
    ) from error
  changes = []
  for old, new in zip(before.sections(), run.sections(), strict=False):
    for change in _changes(old, new):
      changes.append(change)
      refused = f'{change.name} = {change.new!r}: the run in {workdir} has {change.old!r}. '
      if isinstance(old, _FIXED):
        raise ConfigError(refused + 'Resume it with the same value, or give another --workdir')
      bends = change.name == 'TrainConfig.steps' and run.optimizer.schedule != 'constant'
      if not allow_change and (isinstance(old, _MEANING) or bends or change.name == 'TrainConfig.seed'):
        why = 'which its learning rates follow. ' if bends else ''
        raise ConfigError(
          f'{refused.rstrip(". ")}{", " + why if why else ". "}Resume it with the same value, or say '
          '--allow-change'
        )
  if changes:
    log.info('other than before: %s', ', '.join(f'{c.name} = {c.new!r} ({c.old!r})' for c in changes))


def _changes(old: Any, new: Any) -> Iterator[_Change]:
  """Yields the fields of a section that differ, but for paths and parts that are sections of their own."""
  if type(old) is not type(new):
    return
  held = parts(old)
  for field in dataclasses.fields(old):
    before, after = getattr(old, field.name), getattr(new, field.name)
    # Data may move: what is in them is checked against the checkpoint.
    if field.name not in held and not is_path(field, before) and before != after:
      yield _Change(type(new).__name__, field.name, before, after)


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
