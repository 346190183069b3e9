"""A closed form of what the simulator plays, with tokens as divisible and both passes taken together.

Sequential float64 arithmetic in a fixed order, so every host gets the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from repack_jax.solver.compiled import compiled
from repack_jax.solver.problem import Groups, Layout, Problem, log2

# Weight of the mean of squares: small against what decides, but it tells apart layouts that have the same
# slowest rank, so that the search gets past the first of two equally slow ones.
EVENNESS = 1e-3


class Judged(NamedTuple):
  """What a layout of the domain is predicted to take.

  Attributes:
    seconds: with evenness in it, so only to compare layouts of one problem.
    critical: the nodes that decide: by tokens, by layers in the parents' layout, by those in the children's,
      by all together. Of a parent across nodes, its first.
  """

  seconds: float
  critical: tuple[int, int, int, int]


class _Seconds(NamedTuple):
  """float64 [parents]: seconds of a layer that runs in the parents' layout, and of one in the children's."""

  parents: np.ndarray
  children: np.ndarray


@compiled
def judge(problem: Problem, layout: Layout) -> Judged:
  """Returns the predicted seconds of a layout, and what decides them.

  Ranks that meet are as slow as their slowest in each layer: those of a parent, or where `span_meets` of all
  nodes that the exchanges span, and of a node where it shares experts. Those that don't are as slow as the
  slowest in all layers together, or in each where `all_meet`.
  """
  if problem.span_meets:
    return _judge_spans(problem, layout)
  return _judge_groups(problem, layout)


# --- exchanges that are meetings of their groups ----------------------------------------------------------


@compiled
def _judge_groups(problem: Problem, layout: Layout) -> Judged:
  parents, children, solo = layout
  nodes = problem.ranks // problem.node_ranks
  shared_tokens, rank_s = np.zeros(problem.ranks), np.zeros(problem.ranks)
  node_tokens, most_tokens = np.zeros(nodes), np.zeros(nodes)
  routed_s = 0.0 if problem.routed_spread else problem.routed_s
  # Each rank in a layer of the children's layout.
  for c in range(children.number[0]):
    first, size = children.first[c], children.size[c]
    held = children.tokens[c] / size
    seconds = children.work_s[c] / size + problem.halo_s
    if size > 1 and not problem.by_halo:
      seconds += problem.latency_s[log2(size)] + held * even_exchange_s(problem, size)
    for r in range(first, first + size):
      n, tokens = problem.node_of[r], held + solo.tokens[r]
      shared_tokens[r] = held
      rank_s[r] = seconds + solo.children_s[r] + tokens * routed_s
      node_tokens[n] += tokens
      most_tokens[n] = max(most_tokens[n], tokens)
  experts_s = node_tokens / problem.node_ranks * problem.routed_s + most_tokens * problem.expert_exchange_s
  # Each parent in a layer of either layout, as slow as its slowest rank.
  slowest = _Seconds(np.zeros(parents.number[0]), np.zeros(parents.number[0]))
  for g in range(parents.number[0]):
    first, size = parents.first[g], parents.size[g]
    children_s, alone_s, shared_s = 0.0, 0.0, 0.0
    for r in range(first, first + size):
      children_s = max(children_s, rank_s[r])
      alone_s = max(alone_s, solo.parents_s[r] + (shared_tokens[r] + solo.tokens[r]) * routed_s)
    parents_s = parents.work_s[g] / size + alone_s
    if size > 1:
      parents_s += uneven_exchange_s(problem, first, size, shared_tokens)
    if problem.routed_spread:
      for n in range(problem.node_of[first], problem.node_of[first + size - 1] + 1):
        shared_s = max(shared_s, experts_s[n])
    slowest.parents[g], slowest.children[g] = parents_s + shared_s, children_s + shared_s
  return _judged(problem, parents, slowest, shared_tokens, solo.tokens)


@compiled
def _judged(
  problem: Problem, parents: Groups, slowest: _Seconds, shared_tokens: np.ndarray, solo_tokens: np.ndarray
) -> Judged:
  """Combines the seconds of all parents, and tokens float64 [ranks]."""
  most_tokens, squares = 0.0, 0.0
  by_tokens, by_parents, by_children, by_both = 0, 0, 0, 0
  for r in range(problem.ranks):
    tokens = shared_tokens[r] + solo_tokens[r]
    squares += tokens * tokens
    if tokens > most_tokens:
      most_tokens, by_tokens = tokens, problem.node_of[r]
  parents_s, children_s, both_s, both_squares = 0.0, 0.0, 0.0, 0.0
  met_parents_s, met_children_s, met_until = 0.0, 0.0, 0
  for g in range(parents.number[0]):
    first, size = parents.first[g], parents.size[g]
    n = problem.node_of[first]
    if slowest.parents[g] > parents_s:
      parents_s, by_parents = slowest.parents[g], n
    if slowest.children[g] > children_s:
      children_s, by_children = slowest.children[g], n
    if problem.routed_spread and first < met_until:  # another parent of the same node
      met_parents_s = max(met_parents_s, slowest.parents[g])
      met_children_s = max(met_children_s, slowest.children[g])
    else:
      met_parents_s, met_children_s = slowest.parents[g], slowest.children[g]
    met_until = (problem.node_of[first + size - 1] + 1) * problem.node_ranks
    together_s = problem.parents_layers * met_parents_s + problem.children_layers * met_children_s
    both_squares += size * together_s * together_s
    if together_s > both_s:
      both_s, by_both = together_s, n
  if problem.all_meet:
    both_s = problem.parents_layers * parents_s + problem.children_layers * children_s
  seconds = most_tokens * problem.own_s + both_s
  if most_tokens > 0.0:
    evenness = squares / (problem.ranks * most_tokens) * problem.own_s
    evenness += both_squares / (problem.ranks * max(both_s, 1e-30))
    seconds += EVENNESS * evenness
  return Judged(seconds, (by_tokens, by_parents, by_children, by_both))


# --- exchanges that are meetings of their whole span --------------------------------------------------------


class _Layer(NamedTuple):
  """float64 [nodes], the slowest rank of a node in a layer: up to its second meeting, and behind it."""

  first: np.ndarray
  then: np.ndarray


@compiled
def _judge_spans(problem: Problem, layout: Layout) -> Judged:
  """As `judge`. All ranks of a node meet at both sites, or all of the domain where a group is wider."""
  parents, children, solo = layout
  ranks, nodes = problem.ranks, problem.ranks // problem.node_ranks
  shared_tokens, busy_s = np.zeros(ranks), np.zeros(ranks)
  node_tokens, most_of_node = np.zeros(nodes), np.zeros(nodes)
  of_parents, of_children = _Layer(np.zeros(nodes), np.zeros(nodes)), _Layer(np.zeros(nodes), np.zeros(nodes))
  routed_s = 0.0 if problem.routed_spread else problem.routed_s
  widest_parent, widest_child = 1, 1
  parents_known, children_known = 0, 0  # degrees of groups that hold something, or-ed
  for c in range(children.number[0]):
    first, size = children.first[c], children.size[c]
    widest_child = max(widest_child, size)
    if children.tokens[c] > 0.0:
      children_known |= size
    held = children.tokens[c] / size
    core_s, second_s = children.work_s[c] / size + problem.halo_s, 0.0
    if size > 1 and not problem.by_halo:
      exchange_s = held * even_exchange_s(problem, size)
      second_s = exchange_s * problem.second_site[log2(size)]
      core_s += exchange_s - second_s
    for r in range(first, first + size):
      n, tokens = problem.node_of[r], held + solo.tokens[r]
      shared_tokens[r] = held
      node_tokens[n] += tokens
      most_of_node[n] = max(most_of_node[n], tokens)
      first_s, then_s = core_s + solo.children_s[r], second_s + tokens * routed_s
      if problem.by_halo:  # no meeting comes between
        first_s, then_s = 0.0, first_s + then_s
      of_children.first[n] = max(of_children.first[n], first_s)
      of_children.then[n] = max(of_children.then[n], then_s)
      busy_s[r] = problem.children_layers * (first_s + then_s)
  for g in range(parents.number[0]):
    first, size = parents.first[g], parents.size[g]
    widest_parent = max(widest_parent, size)
    if parents.tokens[g] > 0.0:
      parents_known |= size
    core_s, second_s = parents.work_s[g] / size, 0.0
    if size > 1:
      exchange_s = uneven_exchange_s(problem, first, size, shared_tokens)
      second_s = exchange_s * problem.second_site[log2(size)]
      core_s += exchange_s - second_s
    for r in range(first, first + size):
      n, tokens = problem.node_of[r], shared_tokens[r] + solo.tokens[r]
      first_s, then_s = core_s + solo.parents_s[r], second_s + tokens * routed_s
      of_parents.first[n] = max(of_parents.first[n], first_s)
      of_parents.then[n] = max(of_parents.then[n], then_s)
      busy_s[r] += problem.parents_layers * (first_s + then_s)
  wide_parents, wide_children = widest_parent > problem.node_ranks, widest_child > problem.node_ranks
  # The nodes that decide; their seconds in a layer of either layout, and in all.
  by_tokens, by_parents, by_children, by_both = 0, 0, 0, 0
  most_tokens, parents_s, children_s, both_s = 0.0, 0.0, 0.0, 0.0
  for n in range(nodes):
    shared_s = 0.0
    if problem.routed_spread:
      shared_s = node_tokens[n] / problem.node_ranks * problem.routed_s
      shared_s += most_of_node[n] * problem.expert_exchange_s
    of_parents_s, of_children_s = of_parents.first[n], of_children.first[n]
    if wide_parents:
      of_parents_s = of_parents.first.max()
    if wide_children:
      of_children_s = of_children.first.max()
    of_parents_s += of_parents.then[n] + shared_s
    of_children_s += of_children.then[n] + shared_s
    together_s = problem.parents_layers * of_parents_s + problem.children_layers * of_children_s
    if most_of_node[n] > most_tokens:
      most_tokens, by_tokens = most_of_node[n], n
    if of_parents_s > parents_s:
      parents_s, by_parents = of_parents_s, n
    if of_children_s > children_s:
      children_s, by_children = of_children_s, n
    if together_s > both_s:
      both_s, by_both = together_s, n
  if wide_parents:
    by_parents = int(np.argmax(of_parents.first))
  if problem.all_meet:
    both_s = problem.parents_layers * parents_s + problem.children_layers * children_s
  even_s = (busy_s * busy_s).sum() / (ranks * max(both_s, 1e-30))
  tokens = shared_tokens + solo.tokens
  even_s += (tokens * tokens).sum() / (ranks * max(most_tokens, 1e-30)) * problem.own_s
  seconds = most_tokens * problem.own_s + both_s + EVENNESS * even_s
  seconds += problem.parents_layers * (
    problem.span_latency_s[int(wide_parents)] + known_s(problem, parents_known)
  )
  if not problem.by_halo:
    seconds += problem.children_layers * (
      problem.span_latency_s[int(wide_children)] + known_s(problem, children_known)
    )
  return Judged(seconds, (by_tokens, by_parents, by_children, by_both))


# --- both -------------------------------------------------------------------------------------------------


@compiled
def most_tokens(layout: Layout) -> float:
  """Returns the tokens of the fullest rank."""
  children, solo = layout.children, layout.solo
  most = 0.0
  for c in range(children.number[0]):
    first, size = children.first[c], children.size[c]
    most = max(most, np.ceil(children.tokens[c] / size) + solo.tokens[first : first + size].max())
  return most


@compiled
def known_s(problem: Problem, degrees: int) -> float:
  """Returns the seconds of one layer's dense exchanges, of these degrees or-ed."""
  seconds = 0.0
  for j in range(len(problem.dense_s)):
    if degrees >> j & 1:
      seconds += problem.dense_s[j]
  return seconds


@compiled
def even_exchange_s(problem: Problem, size: int) -> float:
  """Returns the seconds of one layer's exchanges per token of a rank, latencies aside.

  For a group of more than one rank, all with as many tokens.
  """
  j = log2(size)
  local = min(size, problem.node_ranks)
  return max((local - 1) * problem.intra_s[j], (size - local) * problem.inter_s[j])


@compiled
def uneven_exchange_s(problem: Problem, first: int, size: int, rank_tokens: np.ndarray) -> float:
  """Returns the seconds of one layer's exchanges of a group whose ranks hold different numbers of tokens.

  A link is as slow as the rank that sends most or receives most over it. Zero where no rank holds any.

  Args:
    first, size: the group's ranks, more than one.
    rank_tokens: float64 [ranks of the domain].
  """
  total, most = 0.0, 0.0
  for r in range(first, first + size):
    total += rank_tokens[r]
    most = max(most, rank_tokens[r])
  if total == 0.0:
    return 0.0
  j = log2(size)
  local = min(size, problem.node_ranks)
  intra, inter = most * (local - 1), most * (size - local)  # tokens sent, times peers
  least_near = total
  for start in range(first, first + size, local):  # tokens received: all but those already there
    near, least = 0.0, np.inf
    for r in range(start, start + local):
      near += rank_tokens[r]
      least = min(least, rank_tokens[r])
    intra = max(intra, near - least)
    least_near = min(least_near, near)
  if size > local:
    inter = max(inter, total - least_near)
  return problem.latency_s[j] + max(intra * problem.intra_s[j], inter * problem.inter_s[j])
