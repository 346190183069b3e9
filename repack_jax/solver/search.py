"""The inner loops of the planner, compiled: placing samples in groups, judging layouts of a domain, search.

A layout is judged by a closed form of what the simulator plays, with tokens as divisible and both passes
taken together. Everything is sequential float64 arithmetic in a fixed order, so every host gets the same
result.

All of it is one file since numba, which keeps compiled functions on disk, notices a change of the file that a
function is in, but not of other files whose functions it calls.

Samples are numbered within the domain, longest first. Groups are arrays: `first`, `size` and sums over their
samples; `of` holds the group of each sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

# Weight of the mean of squares in `judge`: small against what decides, but it tells apart layouts that have
# the same slowest rank, so that the search gets past the first of two equally slow ones.
EVENNESS = 1e-3
# A sample's degree is the smallest at which its share of a rank is at most so many times the mean; 0 asks for
# the widest, 1e9 for the smallest that holds it, -p for the smallest of at least p.
LIMITS = np.array([1.0, 1.15, 1.5, 2.5, 1e9, 0.0, -4.0, -8.0])
# Samples of up to so many times a rank's mean tokens are solo; with -1 those that fit, but for the shortest
# that are not enough for one more on each rank.
SOLO_LIMITS = np.array([1e9, 1.2, 0.9, 0.6, 0.3, 0.0, -1.0])
# With so few samples, degrees are changed from several starts, and each layout is improved by so many moves.
FEW_SAMPLES, CLIMBS_OF_FEW, MOVES_OF_FEW = 16, 4, 60

_compiled = njit(cache=True, nogil=True, error_model='numpy')


class Problem(NamedTuple):
  """One domain of a micro-batch. Seconds are of forward and backward pass together.

  Attributes:
    tokens, full_s, sparse_s: float64 [samples], each sample's tokens and attention in one layer of each kind.
    step_s: float64 [samples], all of a sample's work in a step but projections and logits.
    layer_loads, step_loads, child_loads: float64 [samples, 2], what parents balance where ranks meet at each
      layer (full attention and tokens, over their means) and where they don't (all seconds), and children.
    ranks, node_ranks, capacity: of the domain, of a node, token slots of a rank.
    node_of: int64 [ranks].
    solo_slack: tokens that solo samples may exceed the capacity by, since bundles fill a rank less well than
      the samples in them will.
    intra_s, inter_s: float64 [degrees], per token and peer over either link, by log2 of the degree.
    latency_s: float64 [degrees], of all exchanges of a layer.
    own_s: per token and over all layers, what runs where the token lies.
    routed_s: per token and layer, its experts. routed_spread: whether a node shares them.
    expert_exchange_s: per token and layer, the experts' exchanges.
    full_layers, sparse_layers: how many there are.
    all_meet: whether all ranks of the domain meet at each layer, or only those that exchange.
  """

  tokens: np.ndarray
  full_s: np.ndarray
  sparse_s: np.ndarray
  step_s: np.ndarray
  layer_loads: np.ndarray
  step_loads: np.ndarray
  child_loads: np.ndarray
  ranks: int
  node_ranks: int
  node_of: np.ndarray
  capacity: float
  solo_slack: float
  intra_s: np.ndarray
  inter_s: np.ndarray
  latency_s: np.ndarray
  own_s: float
  routed_s: float
  routed_spread: bool
  expert_exchange_s: float
  full_layers: int
  sparse_layers: int
  all_meet: bool


class Groups(NamedTuple):
  """Groups that tile a domain's ranks: arrays [ranks], of which the first `number[0]` entries count.

  Attributes:
    first, size: int64. tokens, work_s: float64 sums over samples. of: int64 [samples].
  """

  first: np.ndarray
  size: np.ndarray
  tokens: np.ndarray
  work_s: np.ndarray
  of: np.ndarray
  number: np.ndarray


class Solo(NamedTuple):
  """Samples on single ranks, in no group: their rank or -1, int64 [samples], and sums float64 [ranks]."""

  tokens: np.ndarray
  full_s: np.ndarray
  sparse_s: np.ndarray
  of: np.ndarray


class Layout(NamedTuple):
  """Where each sample of a domain is: solo, or in a parent and a child."""

  parents: Groups
  children: Groups
  solo: Solo


@_compiled
def empty_groups(ranks, samples):
  return Groups(
    np.zeros(ranks, np.int64), np.zeros(ranks, np.int64), np.zeros(ranks), np.zeros(ranks),
    np.full(samples, -1, np.int64), np.zeros(1, np.int64),
  )  # fmt: skip


@_compiled
def empty_layout(ranks, samples):
  solo = Solo(np.zeros(ranks), np.zeros(ranks), np.zeros(ranks), np.full(samples, -1, np.int64))
  return Layout(empty_groups(ranks, samples), empty_groups(ranks, samples), solo)


@_compiled
def copy_groups(source, target):
  target.first[:] = source.first
  target.size[:] = source.size
  target.tokens[:] = source.tokens
  target.work_s[:] = source.work_s
  target.of[:] = source.of
  target.number[:] = source.number


@_compiled
def log2(size):
  power = 0
  while size > 1:
    size >>= 1
    power += 1
  return power


@_compiled
def place(problem, loads, degree, inside, first, ranks, work_s, out):
  """Appends groups that tile `ranks` ranks from `first` and hold the samples with `inside`.

  Widest first, then longest: into the group that stays least loaded, or a new one where that is no worse.

  Args:
    loads: float64 [samples, 2], what to balance; a group is as loaded as the worse of the two.
    degree: int64 [samples], the size of group that a sample needs at least; 0 leaves it out.
    work_s: what the groups' work_s adds up.

  Returns False where a sample finds no room.
  """
  tokens, capacity = problem.tokens, problem.capacity
  begin = out.number[0]
  end = begin
  free, last = first, first + ranks
  held = np.zeros((ranks, 2))
  p = ranks
  while p >= 1:
    for s in range(len(tokens)):
      if not inside[s] or degree[s] != p:
        continue
      best = -1
      best_load = np.inf
      for g in range(begin, end):
        if out.tokens[g] + tokens[s] <= out.size[g] * capacity:
          i = g - begin
          load = max(held[i, 0] + loads[s, 0], held[i, 1] + loads[s, 1]) / out.size[g]
          if load < best_load:
            best, best_load = g, load
      if free + p <= last and tokens[s] <= p * capacity and max(loads[s, 0], loads[s, 1]) / p <= best_load:
        best = end
        out.first[end], out.size[end], out.tokens[end], out.work_s[end] = free, p, 0.0, 0.0
        end += 1
        free += p
      if best < 0:
        return False
      held[best - begin, 0] += loads[s, 0]
      held[best - begin, 1] += loads[s, 1]
      out.tokens[best] += tokens[s]
      out.work_s[best] += work_s[s]
      out.of[s] = best
    p >>= 1
  while free < last:
    out.first[end], out.size[end], out.tokens[end], out.work_s[end] = free, 1, 0.0, 0.0
    end += 1
    free += 1
  out.number[0] = end
  return True


@_compiled
def _wide_exchange_s(problem, size, first, most, rank_tokens, total):
  """Both sites of a layer, both passes, of a group whose ranks hold different numbers of tokens."""
  j = log2(size)
  node = problem.node_ranks
  local = min(size, node)
  least_near = total
  intra = most * (local - 1)
  inter = most * (size - local)
  if size > node:
    for start in range(first, first + size, node):
      near = 0.0
      least = np.inf
      for r in range(start, start + node):
        near += rank_tokens[r]
        least = min(least, rank_tokens[r])
      intra = max(intra, near - least)
      least_near = min(least_near, near)
    inter = max(inter, total - least_near)
  else:
    least = np.inf
    for r in range(first, first + size):
      least = min(least, rank_tokens[r])
    intra = max(intra, total - least)
  return problem.latency_s[j] + max(intra * problem.intra_s[j], inter * problem.inter_s[j])


@_compiled
def judge(problem, layout, critical):
  """Predicted seconds of a layout of the domain.

  Ranks that meet (of a parent; of a node too where it shares experts) are as slow as their slowest in each
  layer. Those that don't are as slow as the slowest in all layers together, or in each where `all_meet`.

  `critical` int64 [4] receives the nodes that decide: by tokens, in full layers, in sparse ones, in all.
  """
  parents, children, solo = layout
  ranks, node = problem.ranks, problem.node_ranks
  nodes = ranks // node
  shared, rank_sparse_s = np.zeros(ranks), np.zeros(ranks)
  experts, most = np.zeros(nodes), np.zeros(nodes)
  slowest, squares = 0.0, 0.0
  rank_routed_s = 0.0 if problem.routed_spread else problem.routed_s
  for c in range(children.number[0]):
    first, size = children.first[c], children.size[c]
    held = children.tokens[c] / size
    seconds = children.work_s[c] / size
    if size > 1:
      j = log2(size)
      local = min(size, node)
      seconds += problem.latency_s[j] + held * max(
        (local - 1) * problem.intra_s[j], (size - local) * problem.inter_s[j]
      )
    for r in range(first, first + size):
      n = problem.node_of[r]
      shared[r] = held
      every = held + solo.tokens[r]
      rank_sparse_s[r] = seconds + solo.sparse_s[r] + every * rank_routed_s
      experts[n] += every
      most[n] = max(most[n], every)
      squares += every * every
      if every > slowest:
        slowest, critical[0] = every, n
  if problem.routed_spread:
    for n in range(nodes):
      experts[n] = experts[n] / node * problem.routed_s + most[n] * problem.expert_exchange_s
  full, sparse, both = 0.0, 0.0, 0.0
  met_full, met_sparse, met_until = 0.0, 0.0, 0
  both_squares = 0.0
  for g in range(parents.number[0]):
    first, size = parents.first[g], parents.size[g]
    total, longest, sparse_s, alone_s = 0.0, 0.0, 0.0, 0.0
    for r in range(first, first + size):
      total += shared[r]
      longest = max(longest, shared[r])
      sparse_s = max(sparse_s, rank_sparse_s[r])
      alone_s = max(alone_s, solo.full_s[r] + (shared[r] + solo.tokens[r]) * rank_routed_s)
    full_s = parents.work_s[g] / size + alone_s
    if size > 1 and total > 0:
      full_s += _wide_exchange_s(problem, size, first, longest, shared, total)
    n = problem.node_of[first]
    if problem.routed_spread:
      slow = 0.0
      for m in range(n, problem.node_of[first + size - 1] + 1):
        slow = max(slow, experts[m])
      full_s += slow
      sparse_s += slow
    if full_s > full:
      full, critical[1] = full_s, n
    if sparse_s > sparse:
      sparse, critical[2] = sparse_s, n
    if problem.routed_spread and first < met_until:  # another parent of the same node
      met_full, met_sparse = max(met_full, full_s), max(met_sparse, sparse_s)
    else:
      met_full, met_sparse = full_s, sparse_s
    met_until = (problem.node_of[first + size - 1] + 1) * node
    together = problem.full_layers * met_full + problem.sparse_layers * met_sparse
    both_squares += size * together * together
    if together > both:
      both, critical[3] = together, n
  if slowest == 0.0:
    return 0.0
  if problem.all_meet:
    both = problem.full_layers * full + problem.sparse_layers * sparse
  seconds = slowest * problem.own_s + both
  evenness = squares / (ranks * slowest) * problem.own_s + both_squares / (ranks * max(both, 1e-30))
  return seconds + EVENNESS * evenness


@_compiled
def children_inside(problem, parents, g, degree, out):
  """Appends the children of parent g: node-local ones by the samples' degrees. False where they don't fit."""
  samples = len(problem.tokens)
  first, size = parents.first[g], parents.size[g]
  block = min(size, problem.node_ranks)
  blocks = size // block
  load = np.zeros(blocks)
  node_of = np.full(samples, -1, np.int64)
  for s in range(samples):
    if parents.of[s] != g:  # of another parent, or solo
      continue
    best = -1
    for b in range(blocks):
      room = load[b] + problem.tokens[s] <= block * problem.capacity
      if room and (best < 0 or load[b] < load[best]):
        best = b
    if best < 0:
      return False
    node_of[s] = best
    load[best] += problem.tokens[s]
  limited = np.minimum(degree, block)
  for b in range(blocks):
    inside = node_of == b
    if not place(
      problem, problem.child_loads, limited, inside, first + b * block, block, problem.sparse_s, out
    ):
      return False
  return True


@_compiled
def append_wide(problem, parents, g, out):
  """Appends parent g itself as the only child of its samples."""
  c = out.number[0]
  out.first[c], out.size[c], out.tokens[c], out.work_s[c] = parents.first[g], parents.size[g], 0.0, 0.0
  for s in range(len(problem.tokens)):
    if parents.of[s] == g:
      out.of[s] = c
      out.tokens[c] += problem.tokens[s]
      out.work_s[c] += problem.sparse_s[s]
  out.number[0] = c + 1


@_compiled
def make_children(problem, parents, degree, wide, out):
  """Children of all parents; those with `wide` set, and those whose samples fit no other way, stay wide."""
  out.number[0] = 0
  for g in range(parents.number[0]):
    begin = out.number[0]
    if not wide[g] and children_inside(problem, parents, g, degree, out):
      continue
    out.number[0] = begin
    append_wide(problem, parents, g, out)


@_compiled
def lay_out(problem, repack, loads, degree, child_degree, layout):
  """Parents by `degree`, balancing `loads`, then what is in them.

  Returns the judged seconds; infinity where the samples don't fit.
  """
  layout.parents.number[0] = 0
  layout.parents.of[:] = -1
  everything = np.ones(len(problem.tokens), np.bool_)
  if not place(problem, loads, degree, everything, 0, problem.ranks, problem.full_s, layout.parents):
    return np.inf
  return lay_out_children(problem, repack, degree, child_degree, layout)


@_compiled
def lay_out_children(problem, repack, degree, child_degree, layout):
  """Children by `child_degree` inside given parents (themselves unless `repack`), then solo samples.

  A parent across nodes stays wide in sparse layers where that is judged faster.
  """
  critical = np.zeros(4, np.int64)
  parents, children = layout.parents, layout.children
  wide = np.full(parents.number[0], not repack)
  best = np.inf
  for g in range(-1, parents.number[0]):  # all narrow, then one after the other wide
    if g >= 0:
      if not repack or parents.size[g] <= problem.node_ranks:
        continue
      wide[g] = True
    children.of[:] = -1
    make_children(problem, parents, child_degree, wide, children)
    seconds = np.inf
    if fill_solo(problem, degree, layout):
      seconds = judge(problem, layout, critical)
    if seconds < best:
      best = seconds
    elif g >= 0:
      wide[g] = False
  children.of[:] = -1
  make_children(problem, parents, child_degree, wide, children)
  if not fill_solo(problem, degree, layout):
    return np.inf
  return best


@_compiled
def fill_solo(problem, degree, layout):
  """Samples of degree 0, longest first, to the rank with the least to do. False where one finds no room.

  To do is the worse of all seconds of a step and of the tokens at their mean price.
  """
  parents, children, solo = layout
  solo.of[:] = -1
  solo.tokens[:] = 0.0
  solo.full_s[:] = 0.0
  solo.sparse_s[:] = 0.0
  if len(degree) == 0 or degree.min() > 0:
    return True
  held, busy_s = np.zeros(problem.ranks), np.zeros(problem.ranks)
  for c in range(children.number[0]):
    size = children.size[c]
    tokens = children.tokens[c] / size
    seconds = children.work_s[c] / size
    if size > 1:
      j, local = log2(size), min(size, problem.node_ranks)
      seconds += tokens * max((local - 1) * problem.intra_s[j], (size - local) * problem.inter_s[j])
    for r in range(children.first[c], children.first[c] + size):
      held[r] = tokens
      busy_s[r] = problem.sparse_layers * seconds
  layers = problem.full_layers + problem.sparse_layers
  for g in range(parents.number[0]):
    size, longest, total = parents.size[g], 0.0, 0.0
    for r in range(parents.first[g], parents.first[g] + size):
      longest = max(longest, held[r])
      total += held[r]
    seconds = parents.work_s[g] / size
    if size > 1 and total > 0:
      seconds += _wide_exchange_s(problem, size, parents.first[g], longest, held, total)
    for r in range(parents.first[g], parents.first[g] + size):
      busy_s[r] += problem.full_layers * seconds + layers * held[r] * problem.routed_s
  price = problem.step_s.sum() / problem.tokens.sum()
  for s in range(len(problem.tokens)):
    if degree[s] != 0:
      continue
    best, best_load = -1, np.inf
    for r in range(problem.ranks):
      if held[r] + problem.tokens[s] <= problem.capacity + problem.solo_slack:
        load = max(busy_s[r] + problem.step_s[s], (held[r] + problem.tokens[s]) * price)
        if load < best_load:
          best, best_load = r, load
    if best < 0:
      return False
    held[best] += problem.tokens[s]
    busy_s[best] += problem.step_s[s]
    solo.of[s] = best
    solo.tokens[best] += problem.tokens[s]
    solo.full_s[best] += problem.full_s[s]
    solo.sparse_s[best] += problem.sparse_s[s]
  return True


@_compiled
def smallest_degrees(problem, load, limit, widest, out):
  """For each sample the smallest degree that holds it and satisfies one of `LIMITS` for its load."""
  least = 1
  if limit < 0:
    least, limit = min(int(-limit), widest), 1e9
  most = limit * load.sum() / problem.ranks
  for s in range(len(problem.tokens)):
    p = least
    while p < widest and (problem.tokens[s] > p * problem.capacity or load[s] > most * p):
      p *= 2
    out[s] = p


@_compiled
def _shift(problem, layout, s, parent_of, target):
  """Moves a sample to another child and its parent; a solo one to another rank."""
  parents, children, solo = layout
  if solo.of[s] >= 0:
    r = solo.of[s]
    for sums, own in (
      (solo.tokens, problem.tokens), (solo.full_s, problem.full_s), (solo.sparse_s, problem.sparse_s)
    ):  # fmt: skip
      sums[r] -= own[s]
      sums[target] += own[s]
    solo.of[s] = target
    return
  c = children.of[s]
  g, h = parent_of[c], parent_of[target]
  children.tokens[c] -= problem.tokens[s]
  children.tokens[target] += problem.tokens[s]
  children.work_s[c] -= problem.sparse_s[s]
  children.work_s[target] += problem.sparse_s[s]
  children.of[s] = target
  if g != h:
    parents.tokens[g] -= problem.tokens[s]
    parents.tokens[h] += problem.tokens[s]
    parents.work_s[g] -= problem.full_s[s]
    parents.work_s[h] += problem.full_s[s]
    parents.of[s] = h


@_compiled
def _fits(problem, layout, child_of_rank, alone, target):
  """Whether the ranks of this child (this rank alone) hold no more than their capacity."""
  children, solo = layout.children, layout.solo
  c = child_of_rank[target] if alone else target
  # A group's last token makes one rank fuller than the rest.
  room = problem.capacity - np.ceil(children.tokens[c] / children.size[c])
  first, last = (target, target + 1) if alone else (children.first[c], children.first[c] + children.size[c])
  return solo.tokens[first:last].max() <= room


@_compiled
def improve(problem, keep_parents, budget, layout):
  """Moves and swaps single samples out of the nodes that decide, while that is judged faster.

  Args:
    keep_parents: samples stay in their parents.
    budget: layouts to judge at most.
  """
  parents, children, solo = layout
  samples, count = len(problem.tokens), children.number[0]
  critical = np.zeros(4, np.int64)
  parent_of = np.zeros(count, np.int64)
  child_of_rank = np.zeros(problem.ranks, np.int64)
  for c in range(count):
    child_of_rank[children.first[c] : children.first[c] + children.size[c]] = c
    for g in range(parents.number[0]):
      if parents.first[g] <= children.first[c] < parents.first[g] + parents.size[g]:
        parent_of[c] = g
  best = judge(problem, layout, critical)
  improved = True
  while improved and budget > 0:
    improved = False
    for s in range(samples - 1, -1, -1):
      alone = solo.of[s] >= 0
      here = solo.of[s] if alone else children.of[s]
      first = problem.node_of[here if alone else children.first[here]]
      last = problem.node_of[here if alone else children.first[here] + children.size[here] - 1]
      decides = False
      for i in range(4):
        decides = decides or first <= critical[i] <= last
      if not decides:
        continue
      for target in range(problem.ranks if alone else count):
        if target == here or (not alone and keep_parents and parent_of[target] != parent_of[here]):
          continue
        if (
          not alone and children.tokens[target] + problem.tokens[s] > children.size[target] * problem.capacity
        ):
          continue
        budget -= 1
        _shift(problem, layout, s, parent_of, target)
        seconds = np.inf
        if _fits(problem, layout, child_of_rank, alone, target):
          seconds = judge(problem, layout, critical)
        if seconds < best * (1 - 1e-9):
          best, improved, here = seconds, True, target
        else:
          _shift(problem, layout, s, parent_of, here)
      if budget <= 0:
        break
      # Against shorter samples elsewhere, where moving alone did not help.
      for other in range(s + 1, min(samples, s + 65)):
        if (solo.of[other] >= 0) != alone or problem.tokens[other] == problem.tokens[s]:
          continue
        there = solo.of[other] if alone else children.of[other]
        if there == here or (not alone and keep_parents and parent_of[there] != parent_of[here]):
          continue
        budget -= 1
        _shift(problem, layout, s, parent_of, there)
        _shift(problem, layout, other, parent_of, here)
        seconds = np.inf
        if _fits(problem, layout, child_of_rank, alone, there):
          seconds = judge(problem, layout, critical)
        if seconds < best * (1 - 1e-9):
          best, improved = seconds, True
          break
        _shift(problem, layout, other, parent_of, there)
        _shift(problem, layout, s, parent_of, here)
      judge(problem, layout, critical)
  return best


@_compiled
def search(problem, repack, use_solo, given, widest, rounds, thorough, degree, child_degree):
  """Degrees of the best layout found: a grid of thresholds, then changes of single samples' degrees.

  Args:
    use_solo: samples may be solo, which is degree 0.
    given: parents that stay, or none of them (number 0): then they are chosen too.
    rounds: degrees to change, one at a time.
    thorough: for few samples: the whole grid, and degrees changed from several of its best.
    degree, child_degree: int64 [samples], receive the parents' and the children's degrees.

  Returns whether the parents balance `step_loads` rather than `layer_loads`.
  """
  samples = len(problem.tokens)
  free_parents = given.number[0] == 0
  layout = empty_layout(problem.ranks, samples)
  if not free_parents:
    copy_groups(given, layout.parents)
  trial, child_trial = np.ones(samples, np.int64), np.ones(samples, np.int64)
  # A start for each choice of loads and solo limit: the best of its grid.
  starts = (2 if free_parents else 1) * (len(SOLO_LIMITS) if use_solo else 1)
  start_s = np.full(starts, np.inf)
  start_degree, start_child = np.ones((starts, samples), np.int64), np.ones((starts, samples), np.int64)
  seen = np.zeros(1, np.int64)
  for start in range(starts):
    by_step = free_parents and start % 2 == 1
    loads = problem.step_loads if by_step else problem.layer_loads
    for limit in LIMITS[: len(LIMITS) if free_parents else 1]:
      for j in range(len(LIMITS)):
        if use_solo and not thorough and 0 < j < len(LIMITS) - 1:
          continue
        limits = (SOLO_LIMITS[start // 2] if use_solo else 0.0, limit, LIMITS[j])
        _degrees(problem, repack, use_solo, loads, widest, limits, trial, child_trial)
        code = _code(trial, child_trial, by_step)
        if np.any(seen == code):
          continue
        seen = np.append(seen, code)
        seconds = _try(problem, repack, free_parents, loads, 0, trial, child_trial, layout)
        if seconds < start_s[start]:
          start_s[start] = seconds
          start_degree[start], start_child[start] = trial, child_trial
  best, best_by_step = np.inf, False
  for start in np.argsort(start_s)[: CLIMBS_OF_FEW if thorough else 1]:
    by_step = free_parents and start % 2 == 1
    loads = problem.step_loads if by_step else problem.layer_loads
    own, child_own = start_degree[start], start_child[start]
    seconds = start_s[start]
    for limit in LIMITS[: len(LIMITS) if use_solo and not thorough else 0]:  # those that the grid left out
      smallest_degrees(problem, problem.tokens, limit, widest, child_trial)
      tried_s = _try(problem, repack, free_parents, loads, 0, own, child_trial, layout)
      if tried_s < seconds:
        seconds = tried_s
        child_own[:] = child_trial
    if seconds < np.inf:
      seconds = _change_degrees(
        problem, repack, use_solo, free_parents, loads, widest, rounds, seconds, own, child_own, layout
      )
    if seconds < best:
      best, best_by_step = seconds, by_step
      degree[:], child_degree[:] = own, child_own
  return best_by_step


@_compiled
def _degrees(problem, repack, use_solo, loads, widest, limits, degree, child_degree):
  """The degrees that follow from one of `SOLO_LIMITS`, and of `LIMITS` for parents and for children."""
  solo_limit, limit, child_limit = limits
  smallest_degrees(problem, problem.tokens, child_limit, widest, child_degree)
  smallest_degrees(problem, loads[:, 0], limit, widest, degree)
  if not repack:  # a parent is its own child, and has to balance tokens as well
    degree[:] = np.maximum(degree, child_degree)
  if use_solo:
    samples = len(problem.tokens)
    longest = min(abs(solo_limit) * problem.tokens.sum() / problem.ranks, problem.capacity)
    if solo_limit < 0:
      longest, samples = problem.capacity, samples // problem.ranks * problem.ranks
    for s in range(samples):
      if problem.tokens[s] <= longest:
        degree[s] = 0


@_compiled
def _try(problem, repack, free_parents, loads, moves, degree, child_degree, layout):
  """The judged seconds of the layout of these degrees, after at most so many layouts of `improve`."""
  if free_parents:
    seconds = lay_out(problem, repack, loads, degree, child_degree, layout)
  else:
    seconds = lay_out_children(problem, repack, degree, child_degree, layout)
  if moves and seconds < np.inf:
    seconds = improve(problem, not free_parents, moves, layout)
  return seconds


@_compiled
def _code(degree, child_degree, meets):
  """A number for a choice of degrees; the children's of solo samples don't matter."""
  code = np.int64(meets + 1)
  for s in range(len(degree)):
    if degree[s] > 0:
      code = (code * 1000003) ^ (s * 4096 + degree[s] * 64 + child_degree[s])
  return code


@_compiled
def _change_degrees(
  problem, repack, use_solo, free_parents, loads, widest, rounds, best, degree, child_degree, layout
):
  """Changes the degree of a random one of the longest samples, and keeps what is not worse.

  Half the changes are to the next degree, half to any.
  """
  longest = min(len(problem.tokens), 2 * problem.ranks)
  moves = MOVES_OF_FEW if len(problem.tokens) <= FEW_SAMPLES else 0
  if moves:
    best = _try(problem, repack, free_parents, loads, moves, degree, child_degree, layout)
  random = 12345
  for _ in range(rounds if longest else 0):
    random = (random * 1103515245 + 12345) & 0x7FFFFFFF
    s = (random >> 8) % longest
    s = s * s // longest  # more often the longer ones
    of_child = repack and (not free_parents or (random >> 6) & 1 == 1)
    changed = child_degree if of_child else degree
    before = changed[s]
    up = (random >> 5) & 1 == 1
    after = max(1, before * 2) if up else before // 2
    if (random >> 7) & 1 == 1:
      after = (1 << (random >> 20) % (log2(widest) + 2)) >> 1
    if after == before:
      continue
    if after > widest or (after == 0 and (of_child or not use_solo)):
      continue
    if not of_child and problem.tokens[s] > max(after, 1) * problem.capacity:
      continue
    changed[s] = after
    seconds = _try(problem, repack, free_parents, loads, moves, degree, child_degree, layout)
    if seconds <= best:
      best = seconds
    else:
      changed[s] = before
  return best


@_compiled
def fill_bins(tokens, work_s, bins, bin_tokens, mean_tokens, mean_work_s, out):
  """Samples, longest first, to the bin with the least, by the worse of tokens and work over their means.

  Returns False where a sample finds no room.
  """
  held, load = np.zeros(bins), np.zeros(bins)
  for s in range(len(tokens)):
    best, best_score = -1, np.inf
    for b in range(bins):
      if held[b] + tokens[s] <= bin_tokens:
        score = max((load[b] + work_s[s]) / mean_work_s, (held[b] + tokens[s]) / mean_tokens)
        if score < best_score:
          best, best_score = b, score
    if best < 0:
      return False
    out[s] = best
    held[best] += tokens[s]
    load[best] += work_s[s]
  return True
