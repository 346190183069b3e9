"""Moves and swaps of single samples in a layout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from repack_jax.solver.compiled import compiled
from repack_jax.solver.judge import judge
from repack_jax.solver.problem import Layout, Problem

# A sample is swapped with one of so many next shorter ones.
SWAP_PARTNERS = 64
# What a change has to gain, as a share of the seconds: more than rounding alone can.
LEAST_GAIN = 1e-9


class _Nesting(NamedTuple):
  """The parent of each child and the child of each rank, int64 [ranks] each."""

  parent_of: np.ndarray
  child_of: np.ndarray


@compiled
def improve(problem: Problem, keep_parents: bool, budget: int, layout: Layout) -> float:
  """Moves and swaps single samples out of the nodes that decide, while that is judged faster.

  Args:
    keep_parents: samples stay in their parents.
    budget: the layouts to judge, give or take those of one sample.
    layout: changed in place.

  Returns the judged seconds.
  """
  nesting = _nesting(problem, layout)
  best, critical = judge(problem, layout)
  improved = True
  while improved and budget > 0:
    improved = False
    for s in range(len(problem.tokens) - 1, -1, -1):
      if not _decides(problem, layout, s, critical):
        continue
      best_before, budget_before = best, budget
      best, budget = _move(problem, layout, nesting, keep_parents, s, best, budget)
      if budget <= 0:
        break
      best, budget = _swap(problem, layout, nesting, keep_parents, s, best, budget)
      improved = improved or best < best_before
      if budget < budget_before:  # even moving there and back rounds the sums
        critical = judge(problem, layout).critical
  return best


@compiled
def _nesting(problem: Problem, layout: Layout) -> _Nesting:
  parents, children = layout.parents, layout.children
  parent_of = np.zeros(problem.ranks, np.int64)
  child_of = np.zeros(problem.ranks, np.int64)
  for c in range(children.number[0]):
    child_of[children.first[c] : children.first[c] + children.size[c]] = c
    for g in range(parents.number[0]):
      if parents.first[g] <= children.first[c] < parents.first[g] + parents.size[g]:
        parent_of[c] = g
  return _Nesting(parent_of, child_of)


@compiled
def _place_of(layout: Layout, s: int) -> int:
  """Returns the rank of a solo sample, the child of any other; the number that it lacks is -1."""
  return max(layout.solo.of[s], layout.children.of[s])


@compiled
def _decides(problem: Problem, layout: Layout, s: int, critical: tuple[int, int, int, int]) -> bool:
  """Returns whether a sample lies on one of these nodes."""
  place = _place_of(layout, s)
  first, last = layout.children.first[place], layout.children.first[place] + layout.children.size[place] - 1
  if layout.solo.of[s] >= 0:
    first = last = place
  first_node, last_node = problem.node_of[first], problem.node_of[last]
  found = False
  for node in critical:
    found = found or first_node <= node <= last_node
  return found


@compiled
def _move(
  problem: Problem, layout: Layout, nesting: _Nesting, keep_parents: bool, s: int, best: float, budget: int
) -> tuple[float, int]:
  """Moves a sample wherever that is judged faster; returns (judged seconds, budget left)."""
  children, tokens = layout.children, problem.tokens
  alone, here = layout.solo.of[s] >= 0, _place_of(layout, s)
  for target in range(problem.ranks if alone else children.number[0]):
    if target == here or not _allowed(nesting, keep_parents, alone, here, target):
      continue
    if not alone and children.tokens[target] + tokens[s] > children.size[target] * problem.capacity:
      continue
    budget -= 1
    _shift(problem, layout, nesting, s, target)
    seconds = np.inf
    if _fits(problem, layout, nesting, alone, target):
      seconds = judge(problem, layout).seconds
    if seconds < best * (1 - LEAST_GAIN):
      best, here = seconds, target
    else:
      _shift(problem, layout, nesting, s, here)
  return best, budget


@compiled
def _swap(
  problem: Problem, layout: Layout, nesting: _Nesting, keep_parents: bool, s: int, best: float, budget: int
) -> tuple[float, int]:
  """Swaps a sample with the first shorter one for which that is judged faster; returns as `_move`."""
  alone, here = layout.solo.of[s] >= 0, _place_of(layout, s)
  for other in range(s + 1, min(len(problem.tokens), s + 1 + SWAP_PARTNERS)):
    if (layout.solo.of[other] >= 0) != alone or problem.tokens[other] == problem.tokens[s]:
      continue
    there = _place_of(layout, other)
    if there == here or not _allowed(nesting, keep_parents, alone, here, there):
      continue
    budget -= 1
    _shift(problem, layout, nesting, s, there)
    _shift(problem, layout, nesting, other, here)
    seconds = np.inf
    if _fits(problem, layout, nesting, alone, there):
      seconds = judge(problem, layout).seconds
    if seconds < best * (1 - LEAST_GAIN):
      return seconds, budget
    _shift(problem, layout, nesting, other, there)
    _shift(problem, layout, nesting, s, here)
  return best, budget


@compiled
def _allowed(nesting: _Nesting, keep_parents: bool, alone: bool, here: int, there: int) -> bool:
  """Returns whether samples may change between these ranks (solo ones), or between these children."""
  return alone or not keep_parents or nesting.parent_of[there] == nesting.parent_of[here]


@compiled
def _shift(problem: Problem, layout: Layout, nesting: _Nesting, s: int, target: int) -> None:
  """Moves a sample to another child and its parent; a solo one to another rank."""
  tokens, parents_s, children_s = problem.tokens[s], problem.parents_s[s], problem.children_s[s]
  rank, child = layout.solo.of[s], layout.children.of[s]
  parent, into = layout.parents.of[s], nesting.parent_of[target]
  if rank >= 0:
    layout.solo.tokens[rank] -= tokens
    layout.solo.tokens[target] += tokens
    layout.solo.parents_s[rank] -= parents_s
    layout.solo.parents_s[target] += parents_s
    layout.solo.children_s[rank] -= children_s
    layout.solo.children_s[target] += children_s
    layout.solo.of[s] = target
  if child >= 0:
    layout.children.tokens[child] -= tokens
    layout.children.tokens[target] += tokens
    layout.children.work_s[child] -= children_s
    layout.children.work_s[target] += children_s
    layout.children.of[s] = target
  if parent >= 0 and parent != into:
    layout.parents.tokens[parent] -= tokens
    layout.parents.tokens[into] += tokens
    layout.parents.work_s[parent] -= parents_s
    layout.parents.work_s[into] += parents_s
    layout.parents.of[s] = into


@compiled
def _fits(problem: Problem, layout: Layout, nesting: _Nesting, alone: bool, changed: int) -> bool:
  """Returns whether the ranks of this child (this rank alone) hold no more than their capacity."""
  children, solo = layout.children, layout.solo
  c = nesting.child_of[changed] if alone else changed
  # A group's last token makes one rank fuller than the rest.
  room = problem.capacity - np.ceil(children.tokens[c] / children.size[c])
  first, last = (changed, changed + 1) if alone else (children.first[c], children.first[c] + children.size[c])
  return solo.tokens[first:last].max() <= room
