"""What a run shows while it goes on: what will happen, then a bar of steps."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from repack_jax.config.run import RunConfig
from repack_jax.predict.sizes import total_parameters
from repack_jax.report.words import count, describe_cluster

_TICK_S = 1.0
_TICKS_A_LINE_IN_LOGS = 15  # where there is no terminal, each time that the bar is shown is a line


def opening(run: RunConfig, device: str, workdir: object, done: int) -> str:
  """Returns what is going to happen, in a few lines, before anything takes long.

  Args:
    device: what a rank is, such as `emulated on cpu`.
    done: steps done before, of a run that is resumed.
  """
  train, left = run.train, max(0, run.train.steps - done)
  programs = count(most_programs(run) + 1, 'program')
  lines = [
    f'trains {total_parameters(run.model):,} parameters on {describe_cluster(run)}, {device}: '
    f'{count(left, "step")} of at most {run.data.batch_tokens:,} tokens',
    f'compiles up to {programs}, each when a plan first needs it; small ones typically in under a minute',
    "the bar's time left is an estimate from the steps done; compiling comes on top",
  ]
  if train.compare_steps and not done:
    first = count(min(train.compare_steps, left), 'step')
    lines.append(f'the first {first} also run with repacking disabled, to compare the losses')
  lines.append(f'writes to {workdir}')
  return '\n'.join(lines)


def most_programs(run: RunConfig) -> int:
  """Returns how many programs of the forward and backward pass there may be, but for those that save time."""
  planner, cluster = run.planner, run.cluster
  crossing = cluster.domain_ranks > cluster.ranks_per_node
  # Parents and children each inside nodes or across them; children are never wider than their parents.
  alike = planner.mode in ('parents', 'parents_solo')
  spans = 1 if planner.mode == 'static' else 1 + crossing if alike else 1 + 2 * crossing
  if run.train.compare_steps and planner.mode not in ('parents', 'repack'):  # it has programs of its own
    spans += 1 + crossing
  return spans


class Progress:
  """A bar of steps. A context manager.

  Time that goes into anything else than steps, such as compiling, is left out of its rate and of the time
  that it says is left.
  """

  def __init__(self, run: RunConfig, done: int):
    # Without smoothing, tqdm's rate is steps over the time since `start_t`, which `_leave_out` moves.
    self._bar: Any = tqdm(
      total=run.train.steps, initial=done, unit='step', dynamic_ncols=True, smoothing=0, file=sys.stderr
    )
    self._most_programs = most_programs(run) + 1
    self._programs = 0
    self._doing: list[tuple[str, float]] = []  # what goes on instead of steps, and since when; may be nested
    self._left_out_until = 0.0

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *exception: object) -> None:
    self._bar.close()

  def step(self, status: str) -> None:
    """Counts a step and shows a few words about it."""
    self._bar.set_postfix_str(status, refresh=False)
    self._bar.update()

  def compiling(self, program: str) -> contextlib.AbstractContextManager[None]:
    """Returns what a compilation runs in; see `doing`."""
    self._programs += 1
    return self.doing(f'compiling program {self._programs} of at most {self._most_programs} ({program})')

  @contextlib.contextmanager
  def doing(self, what: str) -> Iterator[None]:
    """Shows what goes on in the block instead of steps, with its seconds, and leaves them out of the rate."""
    self._doing.append((what, time.monotonic()))
    try:
      if len(self._doing) > 1:
        self._show()
        yield
        return
      self._left_out_until = time.time()
      over = threading.Event()
      ticking = threading.Thread(target=self._tick, args=(over,), name='progress', daemon=True)
      ticking.start()
      try:
        yield
      finally:
        over.set()
        ticking.join()
        self._leave_out()
    finally:
      self._doing.pop()

  def _tick(self, over: threading.Event) -> None:
    between = 1 if sys.stderr.isatty() else _TICKS_A_LINE_IN_LOGS
    ticks = 0
    with contextlib.suppress(OSError):  # nobody reads any more; the thread of the steps will notice
      self._show()
      while not over.wait(_TICK_S):
        self._leave_out()
        ticks += 1
        if ticks % between == 0:
          self._show()

  def _show(self) -> None:
    what, since = self._doing[-1]
    self._bar.set_postfix_str(f'{what}: {time.monotonic() - since:.0f} s', refresh=False)
    # tqdm would keep its lock where writing fails, and the thread of the steps wait for it for ever.
    with self._bar.get_lock():
      self._bar.refresh(nolock=True)

  def _leave_out(self) -> None:
    now = time.time()  # the clock of tqdm
    self._bar.start_t += now - self._left_out_until
    self._left_out_until = now
