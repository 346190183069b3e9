"""The first steps of a run once more with repacking disabled: the same losses, whatever the layout."""

from __future__ import annotations

from repack_jax.plan.arrays import pack
from repack_jax.training.planned_steps import PlannedStep
from repack_jax.training.step import TrainState, TrainStep


class Comparison:
  """Trains a second copy of the initial state on the batches of a run, in the baseline's plans.

  The copy is made with the first batch and freed after the last.
  """

  def __init__(self, step: TrainStep, steps: int):
    """Args:
    steps: how many to run, from the first of the run on.
    """
    self._step, self._left = step, steps
    self._state: TrainState | None = None

  @property
  def is_over(self) -> bool:
    """Returns whether no step is left to compare."""
    return self._left == 0

  def loss(self, planned: PlannedStep) -> float:
    """Returns the loss of this step, the run's next, with repacking disabled, before its update."""
    assert not self.is_over, 'all steps were compared'
    step = self._step
    state = step.init_state() if self._state is None else self._state
    sums = step.zero_sums()
    for plan in planned.solution.baseline_plans:
      program = step.program(plan)
      arrays = step.put(pack(plan, planned.batch.samples, program))
      sums = step.accumulate(state, sums, program, arrays)
    state, metrics, _ = step.update(state, sums, planned.target_tokens)
    self._left -= 1
    self._state = state if self._left else None
    return float(metrics['loss'])
