"""The search for degrees: a grid of limits, then changes of single samples' degrees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from repack_jax.solver.compiled import compiled
from repack_jax.solver.degrees import (
  LIMITS,
  LIMITS_OF_MANY,
  SOLO_LIMITS,
  degrees_by_limits,
  make_solo,
  smallest_degrees,
)
from repack_jax.solver.improve import improve
from repack_jax.solver.layout import lay_out
from repack_jax.solver.problem import Degrees, Groups, Problem, log2

# Degrees to change, one at a time.
ROUNDS = 40
# With so few samples the whole grid is tried, degrees are changed from several of its best, and each layout
# is improved by so many moves and swaps.
FEW_SAMPLES, CLIMBS_OF_FEW, MOVES_OF_FEW = 16, 4, 60


class Options(NamedTuple):
  """What layouts are allowed.

  Attributes:
    repack: children may be narrower than their parents.
    use_solo: samples may be solo.
    widest: the widest SP degree.
  """

  repack: bool
  use_solo: bool
  widest: int


class Found(NamedTuple):
  """The best degrees, and whether their parents balance `step_loads` rather than `layer_loads`."""

  degrees: Degrees
  by_step: bool


class _Start(NamedTuple):
  """What degrees to begin with.

  Attributes:
    by_step: whether parents balance `step_loads`.
    parents, children: which of `LIMITS`.
    solo: which of `SOLO_LIMITS`; any where samples may not be solo.
  """

  by_step: bool
  parents: int
  children: int
  solo: int


@compiled
def search(problem: Problem, coarse: Problem, options: Options, given: Groups, coarse_given: Groups) -> Found:
  """Returns the degrees of the best layout found.

  Args:
    coarse: the same samples in larger bundles, for a first look at many degrees.
    given, coarse_given: parents that stay, or no groups: then they are chosen too.
  """
  samples = len(problem.tokens)
  few = samples <= FEW_SAMPLES  # of more, `lay_out` tries wide children only in the end
  seconds, starts = _grid(coarse, options, coarse_given)
  if seconds.min() == np.inf:  # larger bundles need more room
    seconds, starts = _grid(problem, options, given)
  if not few:
    for i in range(len(starts)):
      degrees = _degrees(problem, options, starts[i])
      seconds[i], _ = lay_out(problem, options.repack, few, starts[i].by_step, degrees, given)
  found = Found(Degrees(np.ones(samples, np.int64), np.ones(samples, np.int64)), False)
  best = np.inf
  for i in np.argsort(seconds)[: CLIMBS_OF_FEW if few else 1]:
    by_step = starts[i].by_step
    degrees = _degrees(problem, options, starts[i])
    at_s = seconds[i]
    if options.use_solo and not few:
      at_s = _change_limit(problem, options, given, by_step, at_s, degrees)
    if at_s < np.inf:
      at_s = _change_degrees(problem, options, given, by_step, at_s, degrees)
    if at_s < best:
      best, found = at_s, Found(degrees, by_step)
  return found


@compiled
def _degrees(problem: Problem, options: Options, start: _Start) -> Degrees:
  load = (problem.step_loads if start.by_step else problem.layer_loads)[:, 0].copy()  # contiguous, as tokens
  limits = LIMITS[start.parents], LIMITS[start.children]
  degrees = degrees_by_limits(problem, options.repack, load, limits[0], limits[1], options.widest)
  if options.use_solo:
    make_solo(problem, SOLO_LIMITS[start.solo], degrees)
  return degrees


@compiled
def _grid(problem: Problem, options: Options, given: Groups) -> tuple[np.ndarray, list[_Start]]:
  """Returns the best start for each choice of loads and solo limit, and its judged seconds."""
  samples = len(problem.tokens)
  few = samples <= FEW_SAMPLES
  choose_parents = given.number[0] == 0
  count = (2 if choose_parents else 1) * (len(SOLO_LIMITS) if options.use_solo else 1)
  limits = len(LIMITS) if few else LIMITS_OF_MANY
  best_s, starts = np.full(count, np.inf), [_Start(False, 0, 0, 0) for _ in range(count)]
  seen = {0}
  for n in range(count):
    # Where parents are chosen, every other start balances the step.
    by_step = choose_parents and n % 2 == 1
    for i in range(limits if choose_parents else 1):
      for j in range(limits):
        if options.use_solo and not few and (0 < j < limits - 1 or (j > 0 and not options.repack)):
          continue  # left to `_change_limit`
        start = _Start(by_step, i, j, n // 2)
        degrees = _degrees(problem, options, start)
        code = _code(degrees, by_step)
        if code in seen:
          continue
        seen.add(code)
        seconds, _ = lay_out(problem, options.repack, few, by_step, degrees, given)
        if seconds < best_s[n]:
          best_s[n], starts[n] = seconds, start
  return best_s, starts


@compiled
def _code(degrees: Degrees, by_step: bool) -> int:
  """Returns a number for a choice of degrees; the children's of solo samples don't matter."""
  code = by_step + 1
  for s in range(len(degrees.parents)):
    if degrees.parents[s] > 0:
      code = (code * 1000003) ^ (s * 4096 + degrees.parents[s] * 64 + degrees.children[s])
  return code


@compiled
def _change_limit(
  problem: Problem, options: Options, given: Groups, by_step: bool, best: float, degrees: Degrees
) -> float:
  """Changes the children's degrees to those of another limit where that is faster; returns the seconds."""
  few = False
  for limit in LIMITS[:LIMITS_OF_MANY]:
    children = smallest_degrees(problem, problem.tokens, limit, options.widest)
    seconds, _ = lay_out(problem, options.repack, few, by_step, Degrees(degrees.parents, children), given)
    if seconds < best:
      best = seconds
      degrees.children[:] = children
  return best


@compiled
def _change_degrees(
  problem: Problem, options: Options, given: Groups, by_step: bool, best: float, degrees: Degrees
) -> float:
  """Changes the degree of a random one of the longest samples, and keeps what is not worse.

  Half the changes are to the next degree, half to any. Returns the seconds.
  """
  choose_parents = given.number[0] == 0
  longest = min(len(problem.tokens), 2 * problem.ranks)
  if len(problem.tokens) <= FEW_SAMPLES:
    best = _improved_s(problem, options, given, by_step, degrees)
  random = 12345
  for _ in range(ROUNDS if longest else 0):
    random = (random * 1103515245 + 12345) & 0x7FFFFFFF
    s = (random >> 8) % longest
    s = s * s // longest  # more often the longer ones
    of_child = options.repack and (not choose_parents or (random >> 6) & 1 == 1)
    changed = degrees.children if of_child else degrees.parents
    before = changed[s]
    up = (random >> 5) & 1 == 1
    after = max(1, before * 2) if up else before // 2
    if (random >> 7) & 1 == 1:
      after = (1 << (random >> 20) % (log2(options.widest) + 2)) >> 1
    if after == before:
      continue
    if after > options.widest or (after == 0 and (of_child or not options.use_solo)):
      continue
    if not of_child and problem.tokens[s] > max(after, 1) * problem.capacity:
      continue
    changed[s] = after
    seconds = _improved_s(problem, options, given, by_step, degrees)
    if seconds <= best:
      best = seconds
    else:
      changed[s] = before
  return best


@compiled
def _improved_s(problem: Problem, options: Options, given: Groups, by_step: bool, degrees: Degrees) -> float:
  """Returns the judged seconds of these degrees, for few samples with their layout improved."""
  few = len(problem.tokens) <= FEW_SAMPLES
  seconds, layout = lay_out(problem, options.repack, few, by_step, degrees, given)
  moves = MOVES_OF_FEW
  if few and seconds < np.inf:
    seconds = improve(problem, given.number[0] > 0, moves, layout)
  return seconds
