"""One domain of a micro-batch: its samples as a problem of `search.py`, and what was found as groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from repack_jax.plan.plan import CHILDREN, PARENTS, Group
from repack_jax.predict.costs import Costs
from repack_jax.solver import search

# Effort. Short samples are searched in bundles of a rank's mean tokens over _BUNDLES (over _SMALL_BUNDLES
# where there is little room) and placed one by one only in the end. The others bound how many layouts are
# judged: more where there are few samples.
_BUNDLES, _SMALL_BUNDLES = 8, 32
_MOST_SINGLE = 64
_ROUNDS, _ROUNDS_OF_FEW = 40, 40
_MANY_LAYOUTS, _FEW_LAYOUTS = 20_000, 300


@dataclass(frozen=True)
class Layouts:
  """Parents, children and solo groups of a domain, ranks counted from its first, samples as in the batch."""

  parents: list[Group]
  children: list[Group]
  solo: list[Group]


class Domain:
  """The samples of one domain in one micro-batch, and its layouts in each mode.

  Args:
    samples: int64 [n], their numbers in the batch, longest first.
    lengths: int64, of the whole batch.
    widest: the widest SP degree allowed.
    row_tokens: a rank's share of a child is rounded up to a multiple of this (`Plan.row_tokens`).
  """

  def __init__(
    self,
    samples: np.ndarray,
    lengths: np.ndarray,
    widest: int,
    capacity_tokens: int,
    row_tokens: int,
    costs: Costs,
  ):
    self.samples, self._widest, self._row_tokens = samples, widest, row_tokens
    self._problem = _problem(lengths[samples], capacity_tokens, costs)

  def static(self, degree: int) -> Layouts | None:
    """Groups of one degree for everything; None where the samples don't fit."""
    degrees, layout = np.full(len(self.samples), degree), self._empty()
    loads = self._problem.step_loads
    fits = search.lay_out(self._problem, False, loads, degrees, degrees, layout) < np.inf
    return self._layouts(layout) if fits else None

  def parents(self) -> search.Groups | None:
    """The best groups of mixed degrees with all layers alike; None where the samples don't fit."""
    found = self._search(self._problem, repack=False)
    return found and found.children

  def disabled(self, parents: search.Groups) -> Layouts:
    """Every layer in the parents' layout."""
    groups = self._groups(parents.of, parents)
    return Layouts(groups, groups, [])

  def repack(self, parents: search.Groups) -> Layouts:
    """Children inside given parents."""
    found = self._search(self._problem, repack=True, given=parents)
    assert found is not None, 'a parent can always be its own child'
    return self._layouts(found)

  def solve(self) -> Layouts | None:
    """Solo samples, and for the rest parents chosen for their children."""
    # The search counts tokens; rounding up a rank's share leaves that much less room for its solo samples.
    problem = self._problem._replace(capacity=self._problem.capacity - (self._row_tokens - 1))
    if self._problem.tokens.max(initial=0) > self._widest * problem.capacity:
      return None
    found = self._search(problem, repack=True, use_solo=True)
    return found and self._layouts(found)

  def _empty(self) -> search.Layout:
    return search.empty_layout(self._problem.ranks, len(self.samples))

  def _search(
    self,
    problem: search.Problem,
    repack: bool,
    use_solo: bool = False,
    given: search.Groups | None = None,
  ) -> search.Layout | None:
    """Searches over bundles, places every sample by the degrees found, then moves single samples."""
    bundle_of, few = _bundled(problem, None if given is None else given.of)
    few_parents = search.empty_groups(few.ranks, len(few.tokens))
    if given is not None:
      search.copy_groups(given._replace(of=few_parents.of), few_parents)
      few_parents.of[bundle_of] = given.of
    degree, child_degree = np.ones((2, len(few.tokens)), np.int64)
    thorough = len(self.samples) <= search.FEW_SAMPLES
    rounds = _ROUNDS_OF_FEW if thorough else _ROUNDS
    by_step = search.search(
      few, repack, use_solo, few_parents, self._widest, rounds, thorough, degree, child_degree
    )
    loads = problem.step_loads if by_step else problem.layer_loads
    layout = self._empty()
    child_degrees = child_degree[bundle_of]
    widest = np.full(len(self.samples), self._widest)
    if given is not None:
      search.copy_groups(given, layout.parents)
      search.lay_out_children(problem, repack, widest, child_degrees, layout)
    elif all(
      search.lay_out(problem, repack, loads, degrees, child_degrees, layout) == np.inf
      for degrees in (degree[bundle_of], widest)
    ):
      return None
    budget = _MANY_LAYOUTS if thorough else _FEW_LAYOUTS
    search.improve(problem, given is not None, budget, layout)
    return layout

  def _layouts(self, layout: search.Layout) -> Layouts:
    parents, children = (self._groups(found.of, found) for found in (layout.parents, layout.children))
    ranks = self._problem.ranks
    alone = self._members(layout.solo.of, ranks)
    solo = [Group(rank, 1, samples) for rank, samples in enumerate(alone) if samples]
    return Layouts(parents, children, solo)

  def _groups(self, of: np.ndarray, found: search.Groups) -> list[Group]:
    count = int(found.number[0])
    return [
      Group(int(first), int(size), samples)
      for first, size, samples in zip(
        found.first[:count], found.size[:count], self._members(of, count), strict=True
      )
    ]

  def _members(self, of: np.ndarray, count: int) -> list[tuple[int, ...]]:
    """The samples of each group, from the group of each sample (-1 for none)."""
    order = np.argsort(of, kind='stable')
    edges = np.cumsum(np.bincount(of + 1, minlength=count + 1))
    return [tuple(part.tolist()) for part in np.split(self.samples[order], edges[:-1])[1:]]


def _problem(tokens: np.ndarray, capacity_tokens: int, costs: Costs) -> search.Problem:
  """Seconds of forward and backward pass of layers, mean over the layers of a layout."""
  cluster, layers = costs.cluster, costs.layers
  both = 1.0 + costs.linear_backward
  attention = 1.0 + costs.attention_backward
  degrees = 2 ** np.arange(cluster.domain_ranks.bit_length())
  peer_bytes = 2.0 * costs.wire.bytes_per_peer(np.minimum(degrees, costs.wire.result_heads))
  routed_s = sum(layer.routed_s for layer in layers) / len(layers)
  full_s, sparse_s = (attention * costs.attention_s(tokens, layout) for layout in (PARENTS, CHILDREN))
  full_layers, sparse_layers = (costs.layers_in(layout) for layout in (PARENTS, CHILDREN))
  step_s = full_layers * full_s + sparse_layers * sparse_s + tokens * both * routed_s * len(layers)
  token_share, full_share, sparse_share, step_share = (
    values / max(values.sum(), 1e-300) for values in (tokens, full_s, sparse_s, step_s)
  )
  expert_bytes = 4 * costs.expert_bytes_per_token * any(layer.has_experts for layer in layers)
  return search.Problem(
    tokens=tokens.astype(np.float64),
    full_s=full_s,
    sparse_s=sparse_s,
    step_s=step_s,
    layer_loads=np.stack([full_share, token_share], axis=1),
    step_loads=np.stack([step_share, step_share], axis=1),
    child_loads=np.stack([sparse_share, token_share], axis=1),
    ranks=cluster.domain_ranks,
    node_ranks=cluster.ranks_per_node,
    node_of=np.arange(cluster.domain_ranks) // cluster.ranks_per_node,
    capacity=float(capacity_tokens),
    solo_slack=0.0,
    intra_s=peer_bytes / cluster.intra_node_bytes_per_s,
    inter_s=peer_bytes / cluster.inter_node_bytes_per_s,
    latency_s=np.array([2 * costs.exchange_latency_s(int(degree)) for degree in degrees]),
    own_s=costs.slot_s,
    routed_s=both * routed_s,
    routed_spread=costs.expert_ranks > 1,
    expert_exchange_s=expert_bytes / cluster.intra_node_bytes_per_s,
    full_layers=full_layers,
    sparse_layers=sparse_layers,
    all_meet=cluster.prefetch_layers == 0,
  )


def _bundled(problem: search.Problem, parent_of: np.ndarray | None) -> tuple[np.ndarray, search.Problem]:
  """(bundle of each sample, the problem of the bundles): short samples together, those of a parent apart."""
  samples = len(problem.tokens)
  mean = problem.tokens.sum() / problem.ranks
  limit = min(max(problem.capacity - mean, mean / _SMALL_BUNDLES), mean / _BUNDLES)
  single = max(int(np.searchsorted(-problem.tokens, -limit)), min(samples, _MOST_SINGLE))
  bundle_of = np.arange(samples)
  if single < samples:
    parent = np.zeros(samples - single, np.int64) if parent_of is None else parent_of[single:]
    order = np.argsort(parent, kind='stable')
    filled = np.cumsum(problem.tokens[single:][order]) // limit
    fresh = (np.diff(filled, prepend=filled[0]) != 0) | (
      np.diff(parent[order], prepend=parent[order][0]) != 0
    )
    bundle_of[single + order] = single + np.cumsum(fresh)
  count = int(bundle_of.max(initial=-1)) + 1

  def summed(values: np.ndarray) -> np.ndarray:
    return np.bincount(bundle_of, values, count)

  def summed_loads(loads: np.ndarray) -> np.ndarray:
    return np.stack([summed(loads[:, i]) for i in range(2)], axis=1)

  return bundle_of, problem._replace(
    solo_slack=limit if single < samples else 0.0,
    tokens=summed(problem.tokens),
    full_s=summed(problem.full_s),
    sparse_s=summed(problem.sparse_s),
    step_s=summed(problem.step_s),
    layer_loads=summed_loads(problem.layer_loads),
    step_loads=summed_loads(problem.step_loads),
    child_loads=summed_loads(problem.child_loads),
  )
