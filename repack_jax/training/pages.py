"""The pages with plans that a run leaves in its workdir, in `plans/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repack_jax.config.run import RunConfig
from repack_jax.files import write_whole
from repack_jax.report import plan_page
from repack_jax.report.case import cases_of

if TYPE_CHECKING:  # drawing a step needs no JAX, training it does
  from repack_jax.training.planned_steps import PlannedStep

LARGEST_SAVING = 'largest_saving.html'


class _Drawn(NamedTuple):
  """What a page is made from, which is little to keep.

  Attributes:
    saving: bytes across nodes and predicted seconds that repacking saves.
  """

  step: int
  lengths: list[int]
  saving: tuple[float, float]

  @classmethod
  def of(cls, planned: PlannedStep) -> _Drawn:
    solution = planned.solution
    saving = (
      planned.cross_node_bytes_disabled - planned.cross_node_bytes,
      solution.baseline_simulated.step_s - solution.simulated.step_s,
    )
    return cls(planned.step, [len(sample) for sample in planned.batch.samples], saving)


class PlanPages:
  """Draws steps of a run: any that is asked for, and at the end the one where repacking saves most."""

  def __init__(self, run: RunConfig, workdir: Path):
    self._run, self._folder = run, workdir / 'plans'
    self._title = workdir.name
    self._best: _Drawn | None = None

  def draw(self, planned: PlannedStep) -> None:
    """Writes the page of a step."""
    self._write(f'step-{planned.step:06d}.html', _Drawn.of(planned))

  def note(self, planned: PlannedStep) -> None:
    """Remembers the step that was trained if none of this process saved more."""
    found = _Drawn.of(planned)
    if self._best is None or found.saving > self._best.saving:
      self._best = found

  def draw_largest_saving(self, records: Sequence[Mapping[str, Any]]) -> tuple[Path, str] | None:
    """Writes the page of the step that saved most bytes across nodes, or seconds where none saved bytes.

    Args:
      records: of all steps of the run. Of a resumed run, the page drawn before stays if no later step saves
        more.

    Returns:
      (the page, what it shows in a few words); None where repacking saved nothing.
    """
    best = max(records, key=_saved, default=None)
    if best is None or max(_saved(best)) <= 0:
      return None
    page = self._folder / LARGEST_SAVING
    if self._best is not None and self._best.step == best['step']:
      self._write(LARGEST_SAVING, self._best)
    elif not page.exists():
      return None
    sent, disabled = best['cross_node_bytes'], best['cross_node_bytes_disabled']
    return page, f'step {best["step"]}: {sent:,} bytes across nodes, {disabled:,} with repacking disabled'

  def _write(self, name: str, drawn: _Drawn) -> None:
    self._folder.mkdir(exist_ok=True)
    page = plan_page(self._run, cases_of(self._run, drawn.lengths), f'Step {drawn.step} of {self._title}')
    write_whole(self._folder / name, page)


def _saved(record: Mapping[str, Any]) -> tuple[float, float]:
  """Bytes across nodes and predicted seconds that repacking saves, of a record."""
  return (
    record['cross_node_bytes_disabled'] - record['cross_node_bytes'],
    record['predicted_s_disabled'] - record['predicted_s'],
  )
