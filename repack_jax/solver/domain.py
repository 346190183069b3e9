"""One domain of a micro-batch: its samples as a `Problem`, and what was found as groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from repack_jax.plan.plan import CHILDREN, PARENTS, Group
from repack_jax.predict.costs import Costs
from repack_jax.solver.improve import improve
from repack_jax.solver.layout import lay_out
from repack_jax.solver.problem import Degrees, Groups, Layout, Problem, empty_groups
from repack_jax.solver.search import FEW_SAMPLES, Options, search

# Effort. Short samples are searched in bundles of a rank's mean tokens over _BUNDLES (over _SMALL_BUNDLES
# where there is little room) and placed one by one only in the end, with at most so many layouts judged: more
# where there are few samples.
_BUNDLES, _SMALL_BUNDLES = 8, 32
_MOST_SINGLE = 64
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
    """Returns groups of one degree for everything; None where the samples don't fit."""
    degrees = np.full(len(self.samples), degree)
    no_parents = empty_groups(self._problem.ranks, len(self.samples))
    seconds, layout = lay_out(self._problem, False, True, Degrees(degrees, degrees), no_parents)
    return self._layouts(layout) if seconds < np.inf else None

  def parents(self) -> Groups | None:
    """Returns the best groups of mixed degrees with all layers alike; None where the samples don't fit."""
    found = self._search(self._problem, repack=False)
    return found and found.children

  def disabled(self, parents: Groups) -> Layouts:
    """Returns layouts in which every layer runs as the parents do."""
    groups = self._groups(parents.of, parents)
    return Layouts(groups, groups, [])

  def repack(self, parents: Groups) -> Layouts:
    """Returns the best children inside given parents."""
    found = self._search(self._problem, repack=True, given=parents)
    assert found is not None, 'a parent can always be its own child'
    return self._layouts(found)

  def solve(self) -> Layouts | None:
    """Returns the best layouts: solo samples, and for the rest parents chosen for their children."""
    # The search counts tokens; rounding up a rank's share leaves that much less room for its solo samples.
    problem = self._problem._replace(capacity=self._problem.capacity - (self._row_tokens - 1))
    if self._problem.tokens.max(initial=0) > self._widest * problem.capacity:
      return None
    found = self._search(problem, repack=True, use_solo=True)
    return found and self._layouts(found)

  def _search(
    self,
    problem: Problem,
    repack: bool,
    use_solo: bool = False,
    given: Groups | None = None,
  ) -> Layout | None:
    """Searches over bundles, places every sample by the degrees found, then moves single samples."""
    bundle_of, few = _bundled(problem, None if given is None else given.of)
    few_parents = empty_groups(few.ranks, len(few.tokens))
    if given is not None:
      few_parents.of[bundle_of] = given.of
      few_parents = given._replace(of=few_parents.of)
    found = search(few, Options(repack, use_solo, self._widest), few_parents)
    parents, children = (degree[bundle_of] for degree in found.degrees)
    widest = np.full(len(self.samples), self._widest)
    stay = empty_groups(problem.ranks, len(self.samples)) if given is None else given
    for degree in (parents, widest):
      seconds, layout = lay_out(problem, repack, found.by_step, Degrees(degree, children), stay)
      if seconds < np.inf:
        break
    else:
      return None
    budget = _MANY_LAYOUTS if len(self.samples) <= FEW_SAMPLES else _FEW_LAYOUTS
    improve(problem, given is not None, budget, layout)
    return layout

  def _layouts(self, layout: Layout) -> Layouts:
    parents, children = (self._groups(found.of, found) for found in (layout.parents, layout.children))
    ranks = self._problem.ranks
    alone = self._members(layout.solo.of, ranks)
    solo = [Group(rank, 1, samples) for rank, samples in enumerate(alone) if samples]
    return Layouts(parents, children, solo)

  def _groups(self, of: np.ndarray, found: Groups) -> list[Group]:
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


def _problem(tokens: np.ndarray, capacity_tokens: int, costs: Costs) -> Problem:
  """Seconds of forward and backward pass of layers, mean over the layers of a layout."""
  cluster, layers = costs.cluster, costs.layers
  both = 1.0 + costs.linear_backward
  attention = 1.0 + costs.attention_backward
  degrees = 2 ** np.arange(cluster.domain_ranks.bit_length())
  peer_bytes = 2.0 * costs.wire.bytes_per_peer(np.minimum(degrees, costs.wire.result_heads))
  routed_s = sum(layer.routed_s for layer in layers) / len(layers)
  parents_s, children_s = (attention * costs.attention_s(tokens, layout) for layout in (PARENTS, CHILDREN))
  parents_layers, children_layers = (costs.layers_in(layout) for layout in (PARENTS, CHILDREN))
  step_s = parents_layers * parents_s + children_layers * children_s + tokens * both * routed_s * len(layers)
  token_share, parents_share, children_share, step_share = (
    values / max(values.sum(), 1e-300) for values in (tokens, parents_s, children_s, step_s)
  )
  span_meets = cluster.exchange_meets == 'span'
  expert_bytes = 4 * costs.expert_bytes_per_token * any(layer.has_experts for layer in layers)
  return Problem(
    tokens=tokens.astype(np.float64),
    parents_s=parents_s,
    children_s=children_s,
    step_s=step_s,
    layer_loads=np.stack([parents_share, token_share], axis=1),
    step_loads=np.stack([step_share, step_share], axis=1),
    children_loads=np.stack([children_share, token_share], axis=1),
    ranks=cluster.domain_ranks,
    node_ranks=cluster.ranks_per_node,
    node_of=np.arange(cluster.domain_ranks) // cluster.ranks_per_node,
    capacity=float(capacity_tokens),
    solo_slack=0.0,
    intra_s=peer_bytes / cluster.intra_node_bytes_per_s,
    inter_s=peer_bytes / cluster.inter_node_bytes_per_s,
    latency_s=np.zeros(len(degrees)) if span_meets else 4 * costs.site_latency_s(degrees),
    span_latency_s=4 * costs.site_latency_s(np.array([cluster.ranks_per_node, cluster.domain_ranks]))
    if span_meets
    else np.zeros(2),
    span_meets=span_meets,
    own_s=costs.slot_s,
    routed_s=both * routed_s,
    routed_spread=costs.expert_ranks > 1,
    expert_exchange_s=expert_bytes / cluster.intra_node_bytes_per_s,
    parents_layers=parents_layers,
    children_layers=children_layers,
    all_meet=cluster.prefetch_layers == 0,
  )


def _bundled(problem: Problem, parent_of: np.ndarray | None) -> tuple[np.ndarray, Problem]:
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
    parents_s=summed(problem.parents_s),
    children_s=summed(problem.children_s),
    step_s=summed(problem.step_s),
    layer_loads=summed_loads(problem.layer_loads),
    step_loads=summed_loads(problem.step_loads),
    children_loads=summed_loads(problem.children_loads),
  )
