"""The bar of a run: what it says is left, and what it shows beside steps."""

import dataclasses
import time

import pytest

from repack_jax.config import ClusterConfig, PlannerConfig, RunConfig
from repack_jax.config.run import TrainConfig
from repack_jax.training.progress import Progress, most_programs, opening

RUN = RunConfig(train=TrainConfig(steps=10, compare_steps=2))


def test_time_in_anything_else_than_steps_is_left_out_of_the_rate(capsys):
  with Progress(RUN, 0) as progress:
    with progress.compiling('parents over 16 ranks'), progress.doing('inside'):
      time.sleep(1.3)
    time.sleep(0.05)
    progress.step('loss 1.0')
    elapsed_s = progress._bar.format_dict['elapsed']
  assert 0.05 <= elapsed_s < 1.0
  shown = capsys.readouterr().err
  assert 'compiling program 1 of at most 6 (parents over 16 ranks): 0 s' in shown and 'inside: 0 s' in shown


def test_what_ends_in_an_error_ends_the_clock_too():
  with Progress(RUN, 0) as progress:
    with pytest.raises(KeyError), progress.doing('x'):
      raise KeyError
    with progress.doing('y'):
      pass


def test_a_stream_that_nobody_reads_does_not_block_the_steps(monkeypatch):
  with Progress(RUN, 0) as progress:
    with monkeypatch.context() as broken:

      def fail(*args, **kwargs):
        raise BrokenPipeError

      broken.setattr(progress._bar, 'display', fail)
      with progress.doing('x'):
        time.sleep(0.2)
    for lock in progress._bar.get_lock().locks:
      assert lock.acquire(timeout=2)
      lock.release()
    progress.step('goes on')


@pytest.mark.parametrize(
  ('mode', 'nodes', 'step_tokens', 'most'),
  [('static', 2, 0, 1), ('parents', 2, 0, 2), ('repack', 2, 0, 3), ('solve', 2, 0, 3), ('solve', 1, 0, 1),
   ('repack', 2, 200, 3)],
)  # fmt: skip
def test_most_programs(mode, nodes, step_tokens, most):
  planner = PlannerConfig(mode=mode, capacity_step_tokens=step_tokens)
  run = RunConfig(cluster=ClusterConfig(nodes=nodes), planner=planner)
  assert most_programs(run) == most


def test_opening_says_what_will_happen():
  shown = opening(RUN, 'emulated', 'runs/x', 0)
  assert '10 steps of at most 8,192 tokens' in shown and 'up to 6 programs' in shown
  assert 'the first 2 steps also run with repacking disabled' in shown and shown.endswith('writes to runs/x')
  resumed = opening(RUN, 'emulated', 'runs/x', 4)
  assert '6 steps' in resumed and 'repacking' not in resumed
  silent = dataclasses.replace(RUN, train=TrainConfig(steps=10))
  assert 'repacking' not in opening(silent, 'emulated', 'runs/x', 0)
