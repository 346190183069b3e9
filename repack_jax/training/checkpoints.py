"""Checkpoints with orbax: the training state, and the exact position in the data.

Orbax writes into a temporary folder, puts its marks there when all is written, and renames it. Then the sizes
and checksums of its files are noted in `WORKDIR/checksums`, and only then older checkpoints go. A folder that
lacks the marks, such as an interrupted copy leaves, or whose files are others than noted, is set aside and
never taken; the one before it is. Arrays are stored by their global shapes and can be restored onto any mesh.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from repack_jax.checks import ConfigError
from repack_jax.files import write_whole
from repack_jax.training.loop import Position

log = logging.getLogger(__name__)

_MARKS = ('commit_success.txt', 'state/commit_success.txt', 'data/commit_success.txt')
_BLOCK_BYTES = 1 << 22


class Checkpoints:
  """The checkpoints of a run, in `WORKDIR/checkpoints`.

  Raises ConfigError where that cannot be written, or holds checkpoints but no good one.
  """

  def __init__(self, workdir: Path, keep: int, every_s: float = 0.0):
    self._folder, self._sums, self._keep = workdir / 'checkpoints', workdir / 'checksums', keep
    self._every_s, self._saved_s = every_s, time.monotonic()
    for folder in (self._folder, self._sums):
      try:
        folder.mkdir(exist_ok=True)
      except OSError as error:
        raise ConfigError(f'{folder}: cannot be written ({error.strerror})') from error
    self.latest_step = self._set_bad_ones_aside()
    # Older checkpoints are deleted here, once newer ones are known to be good.
    options = ocp.CheckpointManagerOptions(create=False, max_to_keep=None)
    self._manager = ocp.CheckpointManager(self._folder.resolve(), options=options)
    self._thread = ThreadPoolExecutor(1, thread_name_prefix='checksums')
    self._lock = threading.RLock()  # a signal's last resort saves in a thread of its own
    self._writing: int | None = None
    self._sealing: Future[None] | None = None

  @property
  def saved(self) -> str:
    """Returns what is saved, in words."""
    return (
      'nothing is saved' if self.latest_step is None else f'the state after step {self.latest_step} is saved'
    )

  # --- saving -------------------------------------------------------------------------------------------

  def tend(self, position: Position) -> None:
    """Saves where that is due by time, and looks after what is being saved; called after each step."""
    with self._lock:
      if self._writing is not None and not self._manager.is_saving_in_progress():
        self._finish_writing()
      if self._every_s and time.monotonic() - self._saved_s >= self._every_s:
        self.save(position)

  def save(self, position: Position) -> None:
    """Copies the state off the devices and writes it in the background.

    Does nothing where no step was done or this one is saved. Where it cannot be written a warning says so.
    """
    with self._lock:
      if position.data_state is None or position.done in (self.latest_step, self._writing):
        return
      self._settle()
      parts = ocp.args.Composite(
        state=ocp.args.StandardSave(position.state),
        data=ocp.args.JsonSave(position.data_state),
      )
      self._saved_s = time.monotonic()
      try:
        self._manager.save(position.done, args=parts)
      except Exception as error:  # whatever file systems, tensorstore and orbax make of a fault
        self._failed(position.done, error)
        return
      self._writing = position.done

  def close(self) -> None:
    """Waits until what is being saved is complete."""
    with self._lock:
      self._settle()
      self._thread.shutdown()
      self._manager.close()

  def _settle(self) -> None:
    """Waits for what is being written, and for its checksums."""
    if self._writing is not None:
      self._finish_writing()
    if self._sealing is not None:
      self._sealing.result()
      self._sealing = None

  def _finish_writing(self) -> None:
    step, self._writing = self._writing, None
    assert step is not None
    try:
      self._manager.wait_until_finished()
    except Exception as error:
      self._failed(step, error)
      return
    self.latest_step = step
    self._sealing = self._thread.submit(self._seal, step)  # of one thread, so in turn

  def _failed(self, step: int, error: Exception) -> None:
    good = 'none is there yet'
    if self.latest_step is not None:
      good = f'the last good one is of step {self.latest_step}'
    log.warning(
      '%s: the checkpoint of step %d could not be written (%s); %s', self._folder, step, _reason(error), good
    )

  def _seal(self, step: int) -> None:
    """Notes the checksums of a checkpoint, and deletes those that it makes too many."""
    try:
      write_whole(self._sums / f'{step}.json', json.dumps(_checksums(self._folder / str(step))))
      for old in _steps(self._folder)[: -self._keep]:
        path = self._folder / str(old)
        gone = path.with_name(f'{old}.deleted')
        path.rename(gone)  # at once: what is left of a deletion that is interrupted is no checkpoint
        shutil.rmtree(gone, ignore_errors=True)
        (self._sums / f'{old}.json').unlink(missing_ok=True)
    except (ConfigError, OSError) as error:
      log.warning(
        '%s: checksums of step %d are not noted, or older ones not gone (%s)', self._folder, step, error
      )

  # --- restoring ----------------------------------------------------------------------------------------

  def restore(self, shapes: Any) -> tuple[Any, dict[str, int | str]]:
    """Returns the latest checkpoint as (state, data state).

    Args:
      shapes: the state as ShapeDtypeStructs with the shardings that it is wanted in.

    Raises:
      ConfigError: where the checkpoint does not fit these shapes or cannot be read.
    """
    parts = ocp.args.Composite(
      state=ocp.args.StandardRestore(shapes),
      data=ocp.args.JsonRestore(),
    )
    try:
      restored = self._manager.restore(self.latest_step, args=parts)
    except Exception as error:  # whatever tensorstore and orbax make of it
      raise ConfigError(
        f'{self._folder / str(self.latest_step)}: this checkpoint does not fit the run ({_reason(error)}). '
        'Use the config it was made with, which is in resolved.gin beside it, or another --workdir'
      ) from error
    return restored['state'], restored['data']

  def _set_bad_ones_aside(self) -> int | None:
    """Renames incomplete checkpoints, and damaged ones back to a good one, whose step it returns."""
    for left in self._folder.glob('*.deleted'):
      shutil.rmtree(left, ignore_errors=True)
    for step in self._folder.glob('*'):
      if step.name.isdigit() and not all((step / mark).exists() for mark in _MARKS):
        _set_aside(step, 'incomplete', 'lacks marks of its end')
    damages = {}
    for number in reversed(_steps(self._folder)):
      damages[number] = self._damage(number)
      if not damages[number]:
        for bad in list(damages)[:-1]:
          _set_aside(self._folder / str(bad), 'damaged', damages[bad])
        return number
    if damages:  # none is touched, or the same command would begin anew
      newest = max(damages)
      raise ConfigError(
        f'{self._folder / str(newest)}: this checkpoint is damaged ({damages[newest]}), and there is no good '
        'one before it. Bring back a copy of one, or give another --workdir'
      )
    return None

  def _damage(self, step: int) -> str:
    """What is wrong with the files of a checkpoint, in a few words; '' for nothing."""
    noted = self._sums / f'{step}.json'
    if not noted.exists():  # it ended before they were noted
      return ''
    try:
      expected = {name: tuple(of) for name, of in json.loads(noted.read_text(encoding='utf-8')).items()}
      found = _checksums(self._folder / str(step))
    except (OSError, ValueError, AttributeError) as error:
      return f'{noted.name} or its files cannot be read ({error})'
    changed = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    return f'{changed[0]} is not what was written' if changed else ''


def _reason(error: Exception) -> str:
  """The first line of an error, which of tensorstore's is long."""
  return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _steps(folder: Path) -> list[int]:
  """Returns the steps of which there are folders, ascending."""
  return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and path.is_dir())


def _set_aside(step: Path, kind: str, why: str) -> None:
  aside = step.with_name(f'{step.name}.{kind}-{time.time_ns()}')
  log.warning('%s: this checkpoint is %s (%s), renamed to %s and not used', step, kind, why, aside.name)
  step.rename(aside)


def _checksums(folder: Path) -> dict[str, tuple[int, int]]:
  """Returns (bytes, CRC-32) of each file under a folder, by its path from there."""
  found = {}
  for path in sorted(folder.rglob('*')):
    if path.is_file():
      size = crc = 0
      with path.open('rb') as file:
        while block := file.read(_BLOCK_BYTES):
          size, crc = size + len(block), zlib.crc32(block, crc)
      found[path.relative_to(folder).as_posix()] = size, crc
  return found
