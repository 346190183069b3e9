"""The inner loops of the planner, compiled: placing samples in groups and judging a layout of one domain.

A layout is judged by the predicted seconds of a micro-batch whose ranks meet at every layer, as in
`timing.predicted_s`, but with tokens as divisible and both passes taken together. Everything is sequential
float64 arithmetic in a fixed order, so every host gets the same result.

Samples are numbered within the domain, longest first. Groups are arrays: `first`, `size` and sums over their
samples. A group holds `sample`s by `group_of[sample]`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

# Weight of the mean of squares in `judge`: small against what decides, but it tells apart layouts that have
# the same slowest rank, so that the search gets past the first of two equally slow ones.
EVENNESS = 1e-3
# A sample's degree is the smallest at which its share of a rank is at most so many times the mean; 0 asks for
# the widest, 1e9 for the smallest that holds it.
LIMITS = (1.0, 1.1, 1.3, 1.7, 2.5, 5.0, 1e9, 0.0)

_compiled = njit(cache=True, nogil=True, error_model='numpy')


class Problem(NamedTuple):
  """One domain of a micro-batch. Seconds are of forward and backward pass together.

  Attributes:
    tokens, full_s, sparse_s: float64 [samples], each sample's tokens and attention in one layer of each kind.
    ranks, node_ranks, capacity: of the domain, of a node, token slots of a rank.
    intra_s, inter_s: float64 [degrees], per token and peer over either link, by log2 of the degree.
    latency_s: float64 [degrees], of all exchanges of a layer.
    own_s: per token and over all layers, what runs where the token lies.
    routed_s: per token and layer, its experts. routed_spread: whether a node shares them.
    expert_exchange_s: per token and layer, the experts' exchanges.
    full_layers, sparse_layers: how many there are.
  """

  tokens: np.ndarray
  full_s: np.ndarray
  sparse_s: np.ndarray
  ranks: int
  node_ranks: int
  capacity: float
  intra_s: np.ndarray
  inter_s: np.ndarray
  latency_s: np.ndarray
  own_s: float
  routed_s: float
  routed_spread: bool
  expert_exchange_s: float
  full_layers: int
  sparse_layers: int


class Groups(NamedTuple):
  """Groups that tile a domain's ranks: arrays [ranks], of which the first `count[0]` entries count.

  Attributes:
    first, size: int64. tokens, work_s: float64 sums over samples. of: int64 [samples].
  """

  first: np.ndarray
  size: np.ndarray
  tokens: np.ndarray
  work_s: np.ndarray
  of: np.ndarray
  count: np.ndarray


@_compiled
def empty_groups(ranks, samples):
  return Groups(
    np.zeros(ranks, np.int64), np.zeros(ranks, np.int64), np.zeros(ranks), np.zeros(ranks),
    np.full(samples, -1, np.int64), np.zeros(1, np.int64),
  )  # fmt: skip


@_compiled
def copy_groups(source, target):
  target.first[:] = source.first
  target.size[:] = source.size
  target.tokens[:] = source.tokens
  target.work_s[:] = source.work_s
  target.of[:] = source.of
  target.count[:] = source.count


@_compiled
def log2(size):
  power = 0
  while size > 1:
    size >>= 1
    power += 1
  return power


@_compiled
def place(tokens, work_s, degree, inside, first, ranks, capacity, mean_tokens, mean_work_s, out):
  """Appends groups that tile `ranks` ranks from `first` and hold the samples with `inside`.

  Widest first, then longest: into the group that stays least loaded, by the worse of tokens and work over
  their means, or a new one where that is no worse. Returns False where a sample finds no room.
  """
  begin = out.count[0]
  end = begin
  free = first
  last = first + ranks
  p = ranks
  while p >= 1:
    for s in range(len(tokens)):
      if not inside[s] or degree[s] != p:
        continue
      best = -1
      best_score = np.inf
      for g in range(begin, end):
        if out.tokens[g] + tokens[s] <= out.size[g] * capacity:
          score = max(
            (out.work_s[g] + work_s[s]) / (out.size[g] * mean_work_s),
            (out.tokens[g] + tokens[s]) / (out.size[g] * mean_tokens),
          )
          if score < best_score:
            best, best_score = g, score
      if free + p <= last and tokens[s] <= p * capacity:
        alone = max(work_s[s] / (p * mean_work_s), tokens[s] / (p * mean_tokens))
        if alone <= best_score:
          best = end
          out.first[end], out.size[end], out.tokens[end], out.work_s[end] = free, p, 0.0, 0.0
          end += 1
          free += p
      if best < 0:
        return False
      out.tokens[best] += tokens[s]
      out.work_s[best] += work_s[s]
      out.of[s] = best
    p >>= 1
  while free < last:
    out.first[end], out.size[end], out.tokens[end], out.work_s[end] = free, 1, 0.0, 0.0
    end += 1
    free += 1
  out.count[0] = end
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
def judge(problem, parents, children, critical):
  """Predicted seconds of a layout of the domain.

  `critical` int64 [3] receives the nodes that decide: by tokens of a rank, in full and in sparse layers.
  """
  ranks, node = problem.ranks, problem.node_ranks
  nodes = ranks // node
  rank_tokens = np.zeros(ranks)
  full_s, sparse_s, node_tokens, most = np.zeros(nodes), np.zeros(nodes), np.zeros(nodes), np.zeros(nodes)
  for c in range(children.count[0]):
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
      rank_tokens[r] = held
      n = r // node
      node_tokens[n] += held
      most[n] = max(most[n], held)
      sparse_s[n] = max(sparse_s[n], seconds)
  for g in range(parents.count[0]):
    first, size = parents.first[g], parents.size[g]
    seconds = parents.work_s[g] / size
    if size > 1:
      total = 0.0
      longest = 0.0
      for r in range(first, first + size):
        total += rank_tokens[r]
        longest = max(longest, rank_tokens[r])
      seconds += _wide_exchange_s(problem, size, first, longest, rank_tokens, total)
    for n in range(first // node, (first + size - 1) // node + 1):
      full_s[n] = max(full_s[n], seconds)
  slowest, full, sparse = 0.0, 0.0, 0.0
  squares, full_squares, sparse_squares = 0.0, 0.0, 0.0
  for r in range(ranks):
    squares += rank_tokens[r] * rank_tokens[r]
  for n in range(nodes):
    if problem.routed_spread:
      experts = node_tokens[n] / node * problem.routed_s + most[n] * problem.expert_exchange_s
    else:
      experts = most[n] * problem.routed_s
    if most[n] > slowest:
      slowest, critical[0] = most[n], n
    full_squares += (full_s[n] + experts) ** 2
    sparse_squares += (sparse_s[n] + experts) ** 2
    if full_s[n] + experts > full:
      full, critical[1] = full_s[n] + experts, n
    if sparse_s[n] + experts > sparse:
      sparse, critical[2] = sparse_s[n] + experts, n
  if slowest == 0.0:
    return 0.0
  seconds = slowest * problem.own_s + problem.full_layers * full + problem.sparse_layers * sparse
  evenness = (
    squares / (ranks * slowest) * problem.own_s
    + problem.full_layers * full_squares / (nodes * max(full, 1e-30))
    + problem.sparse_layers * sparse_squares / (nodes * max(sparse, 1e-30))
  )
  return seconds + EVENNESS * evenness


@_compiled
def children_inside(problem, parents, g, degree, mean_tokens, mean_sparse_s, out):
  """Appends the children of parent g: node-local ones by the samples' degrees. False where they don't fit."""
  samples = len(problem.tokens)
  first, size = parents.first[g], parents.size[g]
  block = min(size, problem.node_ranks)
  blocks = size // block
  load = np.zeros(blocks)
  node_of = np.full(samples, -1, np.int64)
  for s in range(samples):
    if parents.of[s] != g:
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
    ok = place(
      problem.tokens, problem.sparse_s, limited, node_of == b, first + b * block, block, problem.capacity,
      mean_tokens, mean_sparse_s, out,
    )  # fmt: skip
    if not ok:
      return False
  return True


@_compiled
def append_wide(problem, parents, g, out):
  """Appends parent g itself as the only child of its samples."""
  c = out.count[0]
  out.first[c], out.size[c], out.tokens[c], out.work_s[c] = parents.first[g], parents.size[g], 0.0, 0.0
  for s in range(len(problem.tokens)):
    if parents.of[s] == g:
      out.of[s] = c
      out.tokens[c] += problem.tokens[s]
      out.work_s[c] += problem.sparse_s[s]
  out.count[0] = c + 1


@_compiled
def make_children(problem, parents, degree, mean_tokens, mean_sparse_s, wide, out):
  """Children of all parents; those with `wide` set, and those whose samples fit no other way, stay wide."""
  out.count[0] = 0
  for g in range(parents.count[0]):
    begin = out.count[0]
    if not wide[g] and children_inside(problem, parents, g, degree, mean_tokens, mean_sparse_s, out):
      continue
    out.count[0] = begin
    append_wide(problem, parents, g, out)


@_compiled
def lay_out(problem, repack, degree, child_degree, parents, children):
  """Parents by `degree`, and inside them children by `child_degree` (the parents themselves unless `repack`).

  Returns the judged seconds; infinity where the samples don't fit.
  """
  samples = len(problem.tokens)
  mean_tokens = max(problem.tokens.sum() / problem.ranks, 1e-30)
  mean_full_s = max(problem.full_s.sum() / problem.ranks, 1e-30)
  parents.count[0] = 0
  fits = place(
    problem.tokens, problem.full_s, degree, np.ones(samples, np.bool_), 0, problem.ranks, problem.capacity,
    mean_tokens, mean_full_s, parents,
  )  # fmt: skip
  if not fits:
    return np.inf
  return lay_out_children(problem, repack, child_degree, parents, children)


@_compiled
def lay_out_children(problem, repack, child_degree, parents, children):
  """Children inside given parents; a parent across nodes stays wide where that is judged faster."""
  mean_tokens = max(problem.tokens.sum() / problem.ranks, 1e-30)
  mean_sparse_s = max(problem.sparse_s.sum() / problem.ranks, 1e-30)
  critical = np.zeros(3, np.int64)
  wide = np.full(parents.count[0], not repack)
  make_children(problem, parents, child_degree, mean_tokens, mean_sparse_s, wide, children)
  best = judge(problem, parents, children, critical)
  if repack:
    for g in range(parents.count[0]):
      if parents.size[g] > problem.node_ranks:
        wide[g] = True
        make_children(problem, parents, child_degree, mean_tokens, mean_sparse_s, wide, children)
        seconds = judge(problem, parents, children, critical)
        if seconds < best:
          best = seconds
        else:
          wide[g] = False
    make_children(problem, parents, child_degree, mean_tokens, mean_sparse_s, wide, children)
  return best


@_compiled
def smallest_degrees(problem, seconds, limit_s, widest, out):
  """For each sample the smallest degree that holds it and brings `seconds / degree` to at most `limit_s`."""
  for s in range(len(problem.tokens)):
    p = 1
    while p < widest and (problem.tokens[s] > p * problem.capacity or seconds[s] > limit_s * p):
      p *= 2
    out[s] = p


@_compiled
def search(problem, repack, given, widest, rounds, degree, child_degree):
  """Degrees of the best layout found: a grid of thresholds, then changes of single samples' degrees.

  Args:
    given: parents that stay, or none of them (count 0): then they are chosen too.
    rounds: degrees to change, one at a time.
    degree, child_degree: int64 [samples], receive the parents' and the children's degrees.

  Returns the judged seconds, infinity where no layout fits.
  """
  samples = len(problem.tokens)
  free_parents = given.count[0] == 0
  parents, children = empty_groups(problem.ranks, samples), empty_groups(problem.ranks, samples)
  if not free_parents:
    copy_groups(given, parents)
  trial, child_trial = np.ones(samples, np.int64), np.ones(samples, np.int64)
  mean_full_s = problem.full_s.sum() / problem.ranks
  mean_tokens = problem.tokens.sum() / problem.ranks
  best = np.inf
  for limit in LIMITS:
    for child_limit in LIMITS:
      smallest_degrees(problem, problem.tokens, child_limit * mean_tokens, widest, child_trial)
      if free_parents:
        smallest_degrees(problem, problem.full_s, limit * mean_full_s, widest, trial)
        if not repack:  # a parent is its own child, and has to balance tokens as well
          trial[:] = np.maximum(trial, child_trial)
        seconds = lay_out(problem, repack, trial, child_trial, parents, children)
      else:
        seconds = lay_out_children(problem, repack, child_trial, parents, children)
      if seconds < best:
        best = seconds
        degree[:], child_degree[:] = trial, child_trial
    if not free_parents:
      break
  if best < np.inf and samples > 0:
    best = _change_degrees(
      problem, repack, free_parents, widest, rounds, best, degree, child_degree, parents, children
    )
  return best


@_compiled
def _change_degrees(
  problem, repack, free_parents, widest, rounds, best, degree, child_degree, parents, children
):
  """Doubles or halves the degree of a random one of the longest samples, and keeps what is not worse."""
  longest = min(len(problem.tokens), 2 * problem.ranks)
  random = 12345
  for _ in range(rounds):
    random = (random * 1103515245 + 12345) & 0x7FFFFFFF
    s = (random >> 8) % longest
    s = s * s // longest  # more often the longer ones
    of_child = repack and (not free_parents or (random >> 6) & 1 == 1)
    changed = child_degree if of_child else degree
    before = changed[s]
    after = before * 2 if (random >> 5) & 1 else before // 2
    if after < 1 or after > widest or (not of_child and problem.tokens[s] > after * problem.capacity):
      continue
    changed[s] = after
    if free_parents:
      seconds = lay_out(problem, repack, degree, child_degree, parents, children)
    else:
      seconds = lay_out_children(problem, repack, child_degree, parents, children)
    if seconds <= best:
      best = seconds
    else:
      changed[s] = before
  return best


@_compiled
def _shift(problem, parents, children, s, parent_of, target):
  """Moves a sample to another child, and to its parent."""
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
def improve(problem, keep_parents, budget, parents, children):
  """Moves and swaps single samples out of the nodes that decide, while that is judged faster.

  Args:
    keep_parents: samples stay in their parents.
    budget: layouts to judge at most.
  """
  samples, count = len(problem.tokens), children.count[0]
  critical = np.zeros(3, np.int64)
  parent_of = np.zeros(count, np.int64)
  for c in range(count):
    for g in range(parents.count[0]):
      if parents.first[g] <= children.first[c] < parents.first[g] + parents.size[g]:
        parent_of[c] = g
  best = judge(problem, parents, children, critical)
  improved = True
  while improved and budget > 0:
    improved = False
    for s in range(samples - 1, -1, -1):
      c = children.of[s]
      begin = children.first[c] // problem.node_ranks
      end = (children.first[c] + children.size[c] - 1) // problem.node_ranks
      decides = False
      for i in range(3):
        decides = decides or begin <= critical[i] <= end
      if not decides:
        continue
      for target in range(count):
        if target == c or (keep_parents and parent_of[target] != parent_of[c]):
          continue
        if children.tokens[target] + problem.tokens[s] > children.size[target] * problem.capacity:
          continue
        budget -= 1
        _shift(problem, parents, children, s, parent_of, target)
        seconds = judge(problem, parents, children, critical)
        if seconds < best * (1 - 1e-9):
          best, improved, c = seconds, True, target
        else:
          _shift(problem, parents, children, s, parent_of, c)
      if budget <= 0:
        break
      # Against shorter samples elsewhere, where moving alone did not help.
      for other in range(s + 1, min(samples, s + 65)):
        d = children.of[other]
        if d == c or problem.tokens[other] == problem.tokens[s]:
          continue
        if keep_parents and parent_of[d] != parent_of[c]:
          continue
        grown = children.tokens[d] + problem.tokens[s] - problem.tokens[other]
        if grown > children.size[d] * problem.capacity:
          continue
        budget -= 1
        _shift(problem, parents, children, s, parent_of, d)
        _shift(problem, parents, children, other, parent_of, c)
        seconds = judge(problem, parents, children, critical)
        if seconds < best * (1 - 1e-9):
          best, improved = seconds, True
          break
        _shift(problem, parents, children, other, parent_of, d)
        _shift(problem, parents, children, s, parent_of, c)
      judge(problem, parents, children, critical)
  return best


@_compiled
def fill_bins(tokens, work_s, bins, bin_tokens, mean_tokens, mean_work_s, out):
  """Samples, longest first, to the least loaded of equal bins by the worse of tokens and work over their means.

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
