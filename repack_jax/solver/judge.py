"""A closed form of what the simulator plays, with tokens as divisible and both passes taken together.

Sequential float64 arithmetic in a fixed order, so every host gets the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from repack_jax.solver.compiled import compiled
from repack_jax.solver.problem import Layout, Problem, log2

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


@compiled
def judge(problem: Problem, layout: Layout) -> Judged:
  """Returns the predicted seconds of a layout, and what decides them.

  Ranks that meet (of a parent; of a node too where it shares experts) are as slow as their slowest in each
  layer. Those that don't are as slow as the slowest in all layers together, or in each where `all_meet`.
  """
  parents, children, solo = layout
  ranks, node_of, nodes = problem.ranks, problem.node_of, problem.ranks // problem.node_ranks
  shared_tokens, rank_s = np.zeros(ranks), np.zeros(ranks)  # of children; of a layer in their layout
  experts_s, most_tokens = np.zeros(nodes), np.zeros(nodes)
  routed_s = 0.0 if problem.routed_spread else problem.routed_s
  tokens, squares, by_tokens = 0.0, 0.0, 0
  for c in range(children.number[0]):
    first, size = children.first[c], children.size[c]
    shared = children.tokens[c] / size
    seconds = children.work_s[c] / size
    if size > 1:
      seconds += problem.latency_s[log2(size)] + shared * even_exchange_s(problem, size)
    for r in range(first, first + size):
      held = shared + solo.tokens[r]
      shared_tokens[r] = shared
      rank_s[r] = seconds + solo.children_s[r] + held * routed_s
      experts_s[node_of[r]] += held
      most_tokens[node_of[r]] = max(most_tokens[node_of[r]], held)
      squares += held * held
      if held > tokens:
        tokens, by_tokens = held, node_of[r]
  for n in range(nodes if problem.routed_spread else 0):
    shared = experts_s[n] / problem.node_ranks
    experts_s[n] = shared * problem.routed_s + most_tokens[n] * problem.expert_exchange_s
  parents_s, children_s, both_s, both_squares = 0.0, 0.0, 0.0, 0.0
  by_parents, by_children, by_both = 0, 0, 0
  met_parents_s, met_children_s, met_until = 0.0, 0.0, 0
  for g in range(parents.number[0]):
    first, size = parents.first[g], parents.size[g]
    first_node, last_node = node_of[first], node_of[first + size - 1]
    own_parents_s, own_children_s = 0.0, 0.0
    for r in range(first, first + size):
      own_parents_s = max(own_parents_s, solo.parents_s[r] + (shared_tokens[r] + solo.tokens[r]) * routed_s)
      own_children_s = max(own_children_s, rank_s[r])
    own_parents_s = parents.work_s[g] / size + own_parents_s
    if size > 1:
      own_parents_s += uneven_exchange_s(problem, first, size, shared_tokens)
    if problem.routed_spread:
      slow = experts_s[first_node]
      for n in range(first_node + 1, last_node + 1):
        slow = max(slow, experts_s[n])
      own_parents_s += slow
      own_children_s += slow
    if own_parents_s > parents_s:
      parents_s, by_parents = own_parents_s, first_node
    if own_children_s > children_s:
      children_s, by_children = own_children_s, first_node
    if problem.routed_spread and first < met_until:  # another parent of the same node
      met_parents_s, met_children_s = max(met_parents_s, own_parents_s), max(met_children_s, own_children_s)
    else:
      met_parents_s, met_children_s = own_parents_s, own_children_s
    met_until = (last_node + 1) * problem.node_ranks
    together_s = problem.parents_layers * met_parents_s + problem.children_layers * met_children_s
    both_squares += size * together_s * together_s
    if together_s > both_s:
      both_s, by_both = together_s, first_node
  if problem.all_meet:
    both_s = problem.parents_layers * parents_s + problem.children_layers * children_s
  seconds = tokens * problem.own_s + both_s
  if tokens > 0.0:
    evenness = squares / (ranks * tokens) * problem.own_s + both_squares / (ranks * max(both_s, 1e-30))
    seconds += EVENNESS * evenness
  return Judged(seconds, (by_tokens, by_parents, by_children, by_both))


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
