"""Children: each parent's samples on node-local groups inside it, or the wide layout where that is faster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repack_jax.cost import CostModel
from repack_jax.plan import Group
from repack_jax.solver.parents import split_into_bins
from repack_jax.solver.placement import place


def children_of_parent(
  parent: Group,
  lengths: np.ndarray,
  degrees: Sequence[int],
  ranks_per_node: int,
  capacity_tokens: int,
  cost: CostModel,
) -> list[Group]:
  """The children of one parent, in rank order; `[parent]` where no node-local layout is faster.

  Candidates: children as narrow as the balance allows, one child a node, and the parent itself.
  """
  if not parent.samples or parent.size == 1:
    return [parent]
  block = min(parent.size, ranks_per_node)
  work_s = cost.child_s(lengths, 1)
  inside = np.asarray(parent.samples)
  nodes = split_into_bins(lengths[inside], work_s[inside], parent.size // block, block * capacity_tokens)
  if nodes is None:
    return [parent]
  usable = [p for p in degrees if p <= block]
  rank_tokens = lengths[inside].sum() / parent.size
  candidates = [[parent]]
  for narrowest in (1, usable[-1]):
    degree = {int(s): _narrowest(lengths[s], rank_tokens, narrowest, usable) for s in inside}
    placed = [
      place(
        inside[members].tolist(),
        lengths.tolist(),
        degree,
        {int(s): float(work_s[s]) for s in inside},
        parent.first_rank + node * block,
        block,
        capacity_tokens,
      )
      for node, members in enumerate(nodes)
    ]
    if all(groups is not None for groups in placed):
      candidates.append([group for groups in placed for group in groups or ()])
  return min(candidates, key=lambda groups: slowest_child_s(groups, lengths, cost))


def _narrowest(length: int, rank_tokens: float, narrowest: int, degrees: Sequence[int]) -> int:
  """The smallest degree, at least `narrowest`, at which a sample alone is within a rank's mean share."""
  wanted = (p for p in degrees if p >= narrowest and length <= p * rank_tokens)
  return next(wanted, degrees[-1])


def slowest_child_s(groups: Sequence[Group], lengths: np.ndarray, cost: CostModel) -> float:
  """Predicted seconds of the slowest rank for all that runs in the children's layout."""
  return max(float(cost.child_s(lengths[list(g.samples)], g.size).sum()) for g in groups)
