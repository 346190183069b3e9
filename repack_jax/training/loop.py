"""The training loop: planned steps in, trained state out, hooks in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from repack_jax.config.run import TrainConfig
from repack_jax.parallel.agreement import check_same_plan
from repack_jax.training.hooks import Every, call_hooks
from repack_jax.training.planned_steps import PlannedStep
from repack_jax.training.step import TrainState, TrainStep

DataState = dict[str, int | str]


@dataclass(frozen=True)
class Position:
  """Where a run is: all that a checkpoint holds.

  Attributes:
    done: steps done.
    state: the training state after them.
    data_state: gives a `Batcher` the batches after them; None where none were read.
  """

  done: int
  state: TrainState
  data_state: DataState | None


@dataclass(frozen=True)
class StepDone:
  """What hooks learn of a step.

  Attributes:
    planned: what it trained on.
    position: where the run is after it.
    measured: what the devices returned, by name.
    step_s: seconds from having its arrays to having its metrics; one that compiles includes that.
    compile_s: seconds of those that went into calls that compiled.
    wait_s: seconds that it waited for its arrays.
    compiles: programs compiled so far, of the forward and backward pass.
  """

  planned: PlannedStep
  position: Position
  measured: dict[str, float]
  step_s: float
  compile_s: float
  wait_s: float
  compiles: int


class Diverged(Exception):
  """The loss or the gradients of a step are not finite, and the run may not go on.

  Attributes:
    done: that step; the run's position is the one before, or with `skip` the one after it.
    skipped: steps in a row that were not finite, this one included.
  """

  def __init__(self, done: StepDone, skipped: int):
    super().__init__(f'step {done.planned.step} is not finite')
    self.done, self.skipped = done, skipped

  def describe(self, config: TrainConfig, saved: str) -> str:
    """Returns what happened, what is saved and what to do, in a line without a full stop.

    Args:
      saved: as `Checkpoints.saved` has it.
    """
    step, measured = self.done.planned.step, self.done.measured
    what = f'step {step}: the loss is {measured["loss"]:g} and the gradient norm {measured["grad_norm"]:g}'
    if config.on_divergence == 'stop':
      return (
        f'{what}; its update was not applied, and {saved}. Lower '
        "OptimizerConfig.learning_rate, set TrainConfig.on_divergence = 'skip', or look at the documents"
      )
    return (
      f'{what}, as in the {self.skipped - 1} steps before it, more than TrainConfig.max_skipped_steps = '
      f'{config.max_skipped_steps}; no update of theirs was applied, and {saved}. Lower '
      'OptimizerConfig.learning_rate'
    )


class TrainLoop:
  """Runs steps from a position on; `position` is always that of whole steps, whatever interrupts it."""

  def __init__(self, step: TrainStep, position: Position, hooks: Sequence[Every[StepDone]]):
    self.position = position
    self._step, self._hooks = step, hooks

  def run(
    self, planned_steps: Iterator[tuple[PlannedStep, float]], until: int, stop: Callable[[], object]
  ) -> None:
    """Trains until so many steps are done, or `stop()` is true between two.

    Args:
      planned_steps: yields (a step, seconds waited for it), the first one following `position`.

    Raises:
      Diverged: as `TrainConfig.on_divergence` and `max_skipped_steps` say.
    """
    step, first, skipped = self._step, self.position.done, 0
    config = step.run.train
    sums = step.zero_sums()
    while self.position.done < until and not stop():
      planned, wait_s = next(planned_steps)
      if self.position.done == first:
        check_same_plan(planned.plan_digest)
      start, compiled_s = time.perf_counter(), step.compile_s
      for program, arrays in zip(planned.programs, planned.arrays, strict=True):
        sums = step.accumulate(self.position.state, sums, program, arrays)
      state, metrics, sums = step.update(self.position.state, sums, planned.target_tokens)
      # Replaced at once: an interrupt later on, even in the wait for the values, finds a whole position.
      before = self.position
      self.position = Position(before.done + 1, state, planned.batch.state_after)
      measured = {name: value.item() for name, value in metrics.items()}
      step_s = time.perf_counter() - start
      compile_s = step.compile_s - compiled_s
      compiles = step.traces['accumulate']
      done = StepDone(planned, self.position, measured, step_s, compile_s, wait_s, compiles)
      skipped = skipped + 1 if measured['skipped'] else 0
      if skipped and config.on_divergence == 'stop':
        self.position = Position(before.done, state, before.data_state)  # nothing of the state has changed
        raise Diverged(done, skipped)
      call_hooks(self._hooks, self.position.done, done)
      if skipped > config.max_skipped_steps:
        raise Diverged(done, skipped)


def initial_position(step: TrainStep) -> Position:
  """Returns the position of a run that begins."""
  return Position(0, step.init_state(), None)


def restored_position(state: Any, data_state: DataState) -> Position:
  """Returns the position of a checkpoint."""
  return Position(int(state.step), state, data_state)
