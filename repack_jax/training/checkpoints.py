"""Checkpoints with orbax: the training state, and the exact position in the data.

Orbax writes into a temporary folder, puts its marks there when all is written, and renames it. A folder
without the marks, such as an interrupted copy leaves, is set aside and never taken. Arrays are stored by
their global shapes and can be restored onto any mesh.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from repack_jax.checks import ConfigError
from repack_jax.training.loop import Position

log = logging.getLogger(__name__)

_MARKS = ('commit_success.txt', 'state/commit_success.txt', 'data/commit_success.txt')


class Checkpoints:
  """The checkpoints of a run, in `WORKDIR/checkpoints`."""

  def __init__(self, workdir: Path, keep: int):
    self._folder = workdir / 'checkpoints'
    _set_incomplete_aside(self._folder)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
    self._manager = ocp.CheckpointManager(self._folder.resolve(), options=options)

  @property
  def latest_step(self) -> int | None:
    """Returns steps done at the latest complete checkpoint, None where there is none."""
    return self._manager.latest_step()

  def save(self, position: Position) -> None:
    """Copies the state off the devices and writes it in the background.

    Does nothing where no step was done or this one is saved.
    """
    if position.data_state is None or self.latest_step == position.done:
      return
    parts = ocp.args.Composite(
      state=ocp.args.StandardSave(position.state),
      data=ocp.args.JsonSave(position.data_state),
    )
    self._manager.save(position.done, args=parts)

  def restore(self, shapes: Any) -> tuple[Any, dict[str, int | str]]:
    """Returns the latest checkpoint as (state, data state).

    Args:
      shapes: the state as ShapeDtypeStructs with the shardings that it is wanted in.

    Raises:
      ConfigError: where the checkpoint does not fit these shapes or cannot be read.
    """
    step = self.latest_step
    parts = ocp.args.Composite(
      state=ocp.args.StandardRestore(shapes),
      data=ocp.args.JsonRestore(),
    )
    try:
      restored = self._manager.restore(step, args=parts)
    except (ValueError, KeyError, FileNotFoundError) as error:
      reason = str(error).strip().splitlines()[0]
      raise ConfigError(
        f'{self._folder / str(step)}: this checkpoint does not fit the run ({reason}). Use the config it was '
        'made with, which is in resolved.gin beside it, or another --workdir'
      ) from error
    return restored['state'], restored['data']

  def close(self) -> None:
    """Waits until what is being saved is complete."""
    self._manager.wait_until_finished()
    self._manager.close()


def _set_incomplete_aside(folder: Path) -> None:
  for step in folder.glob('*'):
    if step.name.isdigit() and not all((step / mark).exists() for mark in _MARKS):
      aside = step.with_name(f'{step.name}.incomplete-{time.time_ns()}')
      log.warning('%s: an incomplete checkpoint, renamed to %s and not used', step, aside.name)
      step.rename(aside)
