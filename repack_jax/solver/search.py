"""The search for degrees: a grid of thresholds, then changes of single samples' degrees."""

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


class _Starts(NamedTuple):
  """The best of the grid for each choice of loads and solo limit.

  Attributes:
    seconds: float64 [starts], judged.
    parents, children: int64 [starts, samples], degrees.
  """

  seconds: np.ndarray
  parents: np.ndarray
  children: np.ndarray


@compiled
def search(problem: Problem, options: Options, given: Groups) -> Found:
  """Returns the degrees of the best layout found.

  Args:
    given: parents that stay, or no groups: then they are chosen too.
  """
  samples = len(problem.tokens)
  few = samples <= FEW_SAMPLES
  starts = _grid(problem, options, given)
  found = Found(Degrees(np.ones(samples, np.int64), np.ones(samples, np.int64)), False)
  best = np.inf
  for start in np.argsort(starts.seconds)[: CLIMBS_OF_FEW if few else 1]:
    by_step, seconds = _by_step(given, start), starts.seconds[start]
    degrees = Degrees(starts.parents[start], starts.children[start])
    if options.use_solo and not few:
      seconds = _change_limit(problem, options, given, by_step, seconds, degrees)
    if seconds < np.inf:
      seconds = _change_degrees(problem, options, given, by_step, seconds, degrees)
    if seconds < best:
      best, found = seconds, Found(degrees, by_step)
  return found


@compiled
def _by_step(given: Groups, start: int) -> bool:
  """Returns whether the parents of a start balance `step_loads`: every other one, where they are chosen."""
  return given.number[0] == 0 and start % 2 == 1


@compiled
def _grid(problem: Problem, options: Options, given: Groups) -> _Starts:
  samples = len(problem.tokens)
  choose_parents = given.number[0] == 0
  count = (2 if choose_parents else 1) * (len(SOLO_LIMITS) if options.use_solo else 1)
  starts = _Starts(
    np.full(count, np.inf), np.ones((count, samples), np.int64), np.ones((count, samples), np.int64)
  )
  seen = {0}
  for start in range(count):
    by_step = _by_step(given, start)
    load = (problem.step_loads if by_step else problem.layer_loads)[:, 0].copy()  # contiguous, as tokens are
    limits = LIMITS if samples <= FEW_SAMPLES else LIMITS[:LIMITS_OF_MANY]
    for limit in limits[: len(limits) if choose_parents else 1]:
      for j in range(len(limits)):
        if options.use_solo and samples > FEW_SAMPLES and 0 < j < len(limits) - 1:
          continue  # left to `_change_limit`
        degrees = degrees_by_limits(problem, options.repack, load, limit, LIMITS[j], options.widest)
        if options.use_solo:
          make_solo(problem, SOLO_LIMITS[start // 2], degrees)
        code = _code(degrees, by_step)
        if code in seen:
          continue
        seen.add(code)
        seconds, _ = lay_out(problem, options.repack, by_step, degrees, given)
        if seconds < starts.seconds[start]:
          starts.seconds[start] = seconds
          starts.parents[start], starts.children[start] = degrees.parents, degrees.children
  return starts


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
  for limit in LIMITS[:LIMITS_OF_MANY]:
    children = smallest_degrees(problem, problem.tokens, limit, options.widest)
    seconds, _ = lay_out(problem, options.repack, by_step, Degrees(degrees.parents, children), given)
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
  seconds, layout = lay_out(problem, options.repack, by_step, degrees, given)
  moves = MOVES_OF_FEW if len(problem.tokens) <= FEW_SAMPLES else 0
  if moves and seconds < np.inf:
    seconds = improve(problem, given.number[0] > 0, moves, layout)
  return seconds
