"""From degrees to a layout: parents, children inside them, and solo samples in what room is left."""

from __future__ import annotations

import numpy as np

from repack_jax.solver.compiled import compiled
from repack_jax.solver.judge import even_exchange_s, judge, uneven_exchange_s
from repack_jax.solver.problem import (
  Degrees,
  Groups,
  Layout,
  Problem,
  Solo,
  empty_groups,
  log2,
  no_solo,
)


@compiled
def lay_out(
  problem: Problem, repack: bool, try_wide: bool, by_step: bool, degrees: Degrees, given: Groups
) -> tuple[float, Layout]:
  """Returns (judged seconds, layout) of these degrees.

  Where the samples don't fit, the seconds are infinity and the layout is incomplete.

  Args:
    repack: children may be narrower than their parents.
    try_wide: then a parent across nodes stays wide in the children's layout where that is judged faster.
    by_step: parents balance `step_loads` rather than `layer_loads`.
    given: parents, which the layout then shares; where it has no groups, parents are made from the degrees.
  """
  parents = given
  if given.number[0] == 0:
    parents = empty_groups(problem.ranks, len(problem.tokens))
    loads = problem.step_loads if by_step else problem.layer_loads
    widest_first = _widest_first(degrees.parents, np.arange(len(problem.tokens)), problem.ranks)
    if not _place(problem, loads, degrees.parents, widest_first, problem.ranks, problem.parents_s, parents):
      return np.inf, Layout(parents, given, no_solo(problem.ranks, len(problem.tokens)))
  wide = np.full(parents.number[0], not repack)
  best, layout = _lay_out_inside(problem, degrees, parents, wide)
  if repack and try_wide:
    for g in range(parents.number[0]):
      if parents.size[g] <= problem.node_ranks:
        continue
      wide[g] = True
      seconds, other = _lay_out_inside(problem, degrees, parents, wide)
      if seconds < best:
        best, layout = seconds, other
      else:
        wide[g] = False
  return best, layout


@compiled
def _lay_out_inside(
  problem: Problem, degrees: Degrees, parents: Groups, wide: np.ndarray
) -> tuple[float, Layout]:
  """Returns as `lay_out`, with those parents wide in the children's layout that have `wide` set."""
  children = _make_children(problem, parents, degrees.children, wide)
  return lay_out_solo(problem, degrees.parents, parents, children)


# --- groups ---------------------------------------------------------------------------------------------


@compiled
def _place(
  problem: Problem,
  loads: np.ndarray,
  degree: np.ndarray,
  widest_first: np.ndarray,
  ranks: int,
  work_s: np.ndarray,
  groups: Groups,
) -> bool:
  """Appends groups that tile the next `ranks` ranks and hold these samples.

  One after the other: into the group that stays least loaded, or a new one where that is no worse.

  Args:
    loads: float64 [samples, 2], what to balance; a group is as loaded as the worse of the two.
    degree: int64 [samples], the size of group that a sample needs at least.
    widest_first: int64 [n], the samples in the order in which they are placed (`_widest_first`).
    work_s: float64 [samples], what the groups' `work_s` adds up.

  Returns False where a sample finds no room; what was appended is then of no use.
  """
  tokens, capacity = problem.tokens, problem.capacity
  begin, free, made = groups.number[0], ranks, 0
  # Of each group made here: the loads it holds, tokens that still fit, and one over its size, which is exact.
  held0, held1, room, share = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
  after = np.empty(ranks)
  for s in widest_first:
    p, length, load0, load1 = min(degree[s], ranks), tokens[s], loads[s, 0], loads[s, 1]
    for i in range(made):  # apart from the search for the least, so that it can be vectorized
      load = max(held0[i] + load0, held1[i] + load1) * share[i]
      after[i] = load if length <= room[i] else np.inf
    best, best_load = -1, np.inf
    for i in range(made):
      if after[i] < best_load:
        best, best_load = i, after[i]
    if p <= free and length <= p * capacity and max(load0, load1) / p <= best_load:
      best = made
      room[best], share[best] = p * capacity, 1.0 / p
      _append(groups, p)
      free -= p
      made += 1
    if best < 0:
      return False
    held0[best] += load0
    held1[best] += load1
    room[best] -= length
    _put(problem, work_s, s, groups, begin + best)
  for _ in range(free):
    _append(groups, 1)
  return True


@compiled
def _widest_first(degree: np.ndarray, samples: np.ndarray, widest: int) -> np.ndarray:
  """Returns these samples, those of the widest degree first, else in their order; without those of degree 0.

  Args:
    degree: int64 [samples of the problem], powers of two; `widest` stands for wider ones too.
  """
  begins = np.zeros(log2(widest) + 3, np.int64)
  for s in samples:
    if degree[s] > 0:
      begins[log2(widest) - log2(min(degree[s], widest)) + 1] += 1
  begins = np.cumsum(begins)
  ordered = np.empty(begins[-1], np.int64)
  for s in samples:
    if degree[s] > 0:
      place = log2(widest) - log2(min(degree[s], widest))
      ordered[begins[place]] = s
      begins[place] += 1
  return ordered


@compiled
def _append(groups: Groups, size: int) -> int:
  """Appends a group of the next `size` ranks, still empty; returns its number."""
  g = groups.number[0]
  groups.first[g] = groups.first[g - 1] + groups.size[g - 1] if g > 0 else 0
  groups.size[g], groups.tokens[g], groups.work_s[g] = size, 0.0, 0.0
  groups.number[0] = g + 1
  return g


@compiled
def _put(problem: Problem, work_s: np.ndarray, s: int, groups: Groups, g: int) -> None:
  groups.of[s] = g
  groups.tokens[g] += problem.tokens[s]
  groups.work_s[g] += work_s[s]


@compiled
def _make_children(problem: Problem, parents: Groups, degree: np.ndarray, wide: np.ndarray) -> Groups:
  """Returns the children of all parents.

  Those with `wide` set, and those whose samples fit no other way, are their own only child.
  """
  children = empty_groups(problem.ranks, len(problem.tokens))
  begins = np.zeros(parents.number[0] + 2, np.int64)  # of each parent in `by_parent`, those of none first
  for g in parents.of:
    begins[g + 2] += 1
  begins = np.cumsum(begins)
  place = begins.copy()
  by_parent = np.empty(len(problem.tokens), np.int64)
  for s in range(len(problem.tokens)):
    by_parent[place[parents.of[s] + 1]] = s
    place[parents.of[s] + 1] += 1
  for g in range(parents.number[0]):
    begin, size = children.number[0], parents.size[g]
    samples = by_parent[begins[g + 1] : place[g + 1]]
    if wide[g] or size == 1 or not _append_narrow(problem, samples, size, degree, children):
      children.number[0] = begin
      _append(children, size)
      for s in samples:
        _put(problem, problem.children_s, s, children, begin)
  return children


@compiled
def _append_narrow(
  problem: Problem, samples: np.ndarray, size: int, degree: np.ndarray, children: Groups
) -> bool:
  """Appends a parent's children inside nodes, by its samples' degrees; False where they don't fit."""
  block = min(size, problem.node_ranks)
  blocks = size // block
  held = np.zeros(blocks)
  block_of = np.empty(len(samples), np.int64)
  for i in range(len(samples)):
    s, best = samples[i], -1
    for b in range(blocks):
      fits = held[b] + problem.tokens[s] <= block * problem.capacity
      if fits and (best < 0 or held[b] < held[best]):
        best = b
    if best < 0:
      return False
    block_of[i] = best
    held[best] += problem.tokens[s]
  for b in range(blocks):
    ordered = _widest_first(degree, samples[block_of == b], block)
    if not _place(problem, problem.children_loads, degree, ordered, block, problem.children_s, children):
      return False
  return True


# --- solo samples ---------------------------------------------------------------------------------------


@compiled
def lay_out_solo(
  problem: Problem, degree: np.ndarray, parents: Groups, children: Groups
) -> tuple[float, Layout]:
  """Returns as `lay_out`, with these groups, and solo what has degree 0."""
  fits, solo = _place_solo(problem, degree, parents, children)
  layout = Layout(parents, children, solo)
  return (judge(problem, layout).seconds if fits else np.inf), layout


@compiled
def _place_solo(problem: Problem, degree: np.ndarray, parents: Groups, children: Groups) -> tuple[bool, Solo]:
  """Puts samples of degree 0, longest first, on the rank with the least to do.

  To do is the worse of all seconds of a step and of the tokens at their mean price.

  Returns (whether all found room, the solo samples).
  """
  solo = no_solo(problem.ranks, len(problem.tokens))
  if len(degree) == 0 or degree.min() > 0:
    return True, solo
  held, busy_s = _rank_work(problem, parents, children)
  price = problem.step_s.sum() / problem.tokens.sum()
  most, loads = problem.capacity + problem.solo_slack, np.empty(problem.ranks)
  for s in range(len(problem.tokens)):
    if degree[s] != 0:
      continue
    tokens, seconds = problem.tokens[s], problem.step_s[s]
    for r in range(problem.ranks):  # apart from the search for the least, so that it can be vectorized
      after = held[r] + tokens
      loads[r] = max(busy_s[r] + seconds, after * price) if after <= most else np.inf
    best, best_load = -1, np.inf
    for r in range(problem.ranks):
      if loads[r] < best_load:
        best, best_load = r, loads[r]
    if best < 0:
      return False, solo
    held[best] += problem.tokens[s]
    busy_s[best] += problem.step_s[s]
    solo.of[s] = best
    solo.tokens[best] += problem.tokens[s]
    solo.parents_s[best] += problem.parents_s[s]
    solo.children_s[best] += problem.children_s[s]
  return True, solo


@compiled
def _rank_work(problem: Problem, parents: Groups, children: Groups) -> tuple[np.ndarray, np.ndarray]:
  """Returns (tokens, seconds of a step) of the groups on each rank, float64 [ranks] each.

  Seconds are without latencies and without what all tokens cost alike.
  """
  held, busy_s = np.zeros(problem.ranks), np.zeros(problem.ranks)
  for c in range(children.number[0]):
    first, size = children.first[c], children.size[c]
    tokens = children.tokens[c] / size
    seconds = children.work_s[c] / size
    if size > 1 and not problem.by_halo:
      seconds += tokens * even_exchange_s(problem, size)
    for r in range(first, first + size):
      held[r] = tokens
      busy_s[r] = problem.children_layers * seconds
  layers = problem.parents_layers + problem.children_layers
  for g in range(parents.number[0]):
    first, size = parents.first[g], parents.size[g]
    seconds = parents.work_s[g] / size
    if size > 1:
      seconds += uneven_exchange_s(problem, first, size, held)
    for r in range(first, first + size):
      busy_s[r] += problem.parents_layers * seconds + layers * held[r] * problem.routed_s
  return held, busy_s
