"""Checkpoints: the last good one is taken, whatever has happened to the newest, and faults are one line."""

import errno
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repack_jax.checks import ConfigError
from repack_jax.training.checkpoints import Checkpoints
from repack_jax.training.loop import Position
from repack_jax.training.step import TrainState


def position(step: int) -> Position:
  weights = np.random.default_rng(step).normal(size=(64, 32)).astype(np.float32)
  state = TrainState({'w': jnp.asarray(weights)}, {'m': jnp.full(7, step, jnp.float32)}, (), jnp.int32(step))
  return Position(step, state, {'position': 10 * step, 'tokenizer': 'bytes'})


SHAPES = jax.eval_shape(lambda: position(0).state)


def restored(checkpoints: Checkpoints) -> int:
  """The step that is restored, whose state must be as it was."""
  shapes = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
    SHAPES,
  )
  state, data = checkpoints.restore(shapes)
  step = int(state.step)
  jax.tree.map(np.testing.assert_array_equal, state, position(step).state)
  assert data == position(step).data_state
  return step


@pytest.fixture(scope='module')
def saved(tmp_path_factory) -> Path:
  """Steps 1 to 4, of which two are kept."""
  workdir = tmp_path_factory.mktemp('saved')
  checkpoints = Checkpoints(workdir, keep=2)
  for step in range(1, 5):
    checkpoints.save(position(step))
    checkpoints.save(position(step))  # once is enough
  checkpoints.close()
  assert {path.name for path in (workdir / 'checkpoints').iterdir()} == {'3', '4'}
  assert {path.name for path in (workdir / 'checksums').iterdir()} == {'3.json', '4.json'}
  return workdir


def largest(folder: Path) -> Path:
  return max((path for path in folder.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


DAMAGES = {
  'nothing': lambda folder: None,
  'a flipped bit': lambda folder: flip(largest(folder)),
  'a truncated file': lambda folder: os.truncate(largest(folder), 100),
  'an empty file': lambda folder: os.truncate(largest(folder), 0),
  'garbage': lambda folder: largest(folder).write_bytes(os.urandom(5000)),
  'a missing file': lambda folder: largest(folder).unlink(),
  'a flipped bit of metadata': lambda folder: flip(next(folder.rglob('_METADATA'))),
  'no data state': lambda folder: shutil.rmtree(folder / 'data'),
  'an empty folder': lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_the_last_good_one_is_taken(saved, tmp_path, caplog, damage):
  workdir = Path(shutil.copytree(saved, tmp_path / 'copy'))
  DAMAGES[damage](workdir / 'checkpoints' / '4')
  checkpoints = Checkpoints(workdir, keep=2)
  expected = 4 if damage == 'nothing' else 3
  assert checkpoints.latest_step == restored(checkpoints) == expected
  assert ('checkpoints/4: this checkpoint is' in caplog.text) == (expected == 3)
  checkpoints.save(position(5))  # and the run goes on
  checkpoints.close()
  again = Checkpoints(workdir, keep=2)
  assert restored(again) == 5
  again.close()


def test_no_good_one_is_an_error(saved, tmp_path):
  workdir = Path(shutil.copytree(saved, tmp_path / 'copy'))
  for step in ('3', '4'):
    flip(largest(workdir / 'checkpoints' / step))
  for _ in range(2):  # the same command finds the same
    with pytest.raises(ConfigError, match=r'checkpoints/4: this checkpoint is damaged .* no good one before'):
      Checkpoints(workdir, keep=2)
  (tmp_path / 'file').mkdir()
  (tmp_path / 'file' / 'checkpoints').touch()
  with pytest.raises(ConfigError, match=r'checkpoints: cannot be written'):
    Checkpoints(tmp_path / 'file', keep=2)


def test_an_interrupted_deletion_leaves_no_checkpoint(saved, tmp_path):
  workdir = Path(shutil.copytree(saved, tmp_path / 'copy'))
  (workdir / 'checkpoints' / '3').rename(workdir / 'checkpoints' / '3.deleted')
  checkpoints = Checkpoints(workdir, keep=2)
  assert {path.name for path in (workdir / 'checkpoints').iterdir()} == {'4'}
  checkpoints.close()


def test_what_cannot_be_written_is_said_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
  checkpoints = Checkpoints(tmp_path, keep=2)
  checkpoints.save(position(1))

  def full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  for name in ('save', 'wait_until_finished'):
    with monkeypatch.context() as faulty:
      checkpoints._settle()
      faulty.setattr(checkpoints._manager, name, full)
      checkpoints.save(position(2))
      checkpoints._settle()
    assert 'the checkpoint of step 2 could not be written ([Errno 28] No space left' in caplog.text
    assert 'the last good one is of step 1' in caplog.text and checkpoints.latest_step == 1
    caplog.clear()
    shutil.rmtree(tmp_path / 'checkpoints' / '2', ignore_errors=True)
    checkpoints._manager.reload()
  checkpoints.save(position(3))
  checkpoints.close()
  assert checkpoints.latest_step == 3


def test_checkpoints_by_time(tmp_path):
  for name in ('never', 'always'):
    (tmp_path / name).mkdir()
  never = Checkpoints(tmp_path / 'never', keep=2)
  always = Checkpoints(tmp_path / 'always', keep=2, every_s=1e-9)
  for step in (1, 2, 3):
    for checkpoints in (never, always):
      checkpoints.tend(position(step))
  for checkpoints in (never, always):
    checkpoints.close()
  assert (never.latest_step, always.latest_step) == (None, 3)
