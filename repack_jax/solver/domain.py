"""One domain of a micro-batch: its samples as a problem of `search.py`, and what was found as groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from repack_jax.config import FULL, SPARSE
from repack_jax.cost import ATTENTION_BACKWARD_OVER_FORWARD, CostModel, bytes_per_peer
from repack_jax.plan import Group
from repack_jax.solver import search

# Effort. Short samples are searched in bundles of a rank's mean share over _BUNDLES, and placed one by one only
# in the end; the others bound how many layouts are judged.
_BUNDLES = 8
_MOST_SINGLE = 64
_ROUNDS = 60
_IMPROVE_LAYOUTS = 12_000


@dataclass(frozen=True)
class Layouts:
  """Parents and children of a domain, ranks counted from its first, samples as in the batch."""

  parents: list[Group]
  children: list[Group]


class Domain:
  """The samples of one domain in one micro-batch, and its layouts in each mode.

  Args:
    samples: int64 [n], their numbers in the batch, longest first.
    lengths: int64, of the whole batch.
    widest: the widest SP degree allowed.
  """

  def __init__(
    self, samples: np.ndarray, lengths: np.ndarray, widest: int, capacity_tokens: int, cost: CostModel
  ):
    self.samples, self._widest = samples, widest
    self._problem = _problem(lengths[samples], capacity_tokens, cost)

  def static(self, degree: int) -> Layouts | None:
    """Groups of one degree for everything; None where the samples don't fit."""
    degrees = np.full(len(self.samples), degree)
    parents, children = self._empty(), self._empty()
    fits = search.lay_out(self._problem, False, degrees, degrees, parents, children) < np.inf
    return self._layouts(parents, children) if fits else None

  def parents(self) -> search.Groups | None:
    """The best groups of mixed degrees with all layers alike; None where the samples don't fit."""
    found = self._search(False, None)
    return found and found[0]

  def disabled(self, parents: search.Groups) -> Layouts:
    """Every layer in the parents' layout."""
    return self._layouts(parents, parents)

  def repack(self, parents: search.Groups) -> Layouts:
    """Children inside given parents."""
    found = self._search(True, parents)
    assert found is not None, 'a parent can always be its own child'
    return self._layouts(*found)

  def solve(self) -> Layouts | None:
    """Parents chosen for their children."""
    found = self._search(True, None)
    return found and self._layouts(*found)

  def _empty(self) -> search.Groups:
    return search.empty_groups(self._problem.ranks, len(self.samples))

  def _search(
    self, repack: bool, given: search.Groups | None
  ) -> tuple[search.Groups, search.Groups] | None:
    """Searches over bundles, places every sample by the degrees found, then moves single samples."""
    problem = self._problem
    bundle_of, few = _bundled(problem, None if given is None else given.of)
    few_parents = search.empty_groups(few.ranks, len(few.tokens))
    if given is not None:
      search.copy_groups(given._replace(of=few_parents.of), few_parents)
      few_parents.of[bundle_of] = given.of
    degree, child_degree = np.ones((2, len(few.tokens)), np.int64)
    search.search(few, repack, few_parents, self._widest, _ROUNDS, degree, child_degree)
    parents, children = self._empty(), self._empty()
    widest = np.full(len(self.samples), self._widest)
    if given is not None:
      search.copy_groups(given, parents)
      search.lay_out_children(problem, repack, child_degree[bundle_of], parents, children)
    elif all(
      search.lay_out(problem, repack, degrees, child_degree[bundle_of], parents, children) == np.inf
      for degrees in (degree[bundle_of], widest)
    ):
      return None
    search.improve(problem, given is not None, _IMPROVE_LAYOUTS, parents, children)
    return (parents, children) if repack else (children, children)

  def _layouts(self, parents: search.Groups, children: search.Groups) -> Layouts:
    return Layouts(self._groups(parents), self._groups(children))

  def _groups(self, found: search.Groups) -> list[Group]:
    count = int(found.count[0])
    members = np.argsort(found.of, kind='stable')
    edges = np.cumsum(np.bincount(found.of, minlength=count))
    parts = np.split(self.samples[members], edges[:-1])
    return [
      Group(int(first), int(size), tuple(part.tolist()))
      for first, size, part in zip(found.first[:count], found.size[:count], parts, strict=True)
    ]


def _problem(tokens: np.ndarray, capacity_tokens: int, cost: CostModel) -> search.Problem:
  """Seconds of forward and backward pass of layers, mean over the layers of a kind."""
  model, cluster = cost.model, cost.cluster
  layers = range(model.num_layers)
  both = 1.0 + cost.linear_backward
  attention = 1.0 + ATTENTION_BACKWARD_OVER_FORWARD
  degrees = 2 ** np.arange(cluster.domain_ranks.bit_length())
  peer_bytes = 2.0 * bytes_per_peer(model, np.minimum(degrees, model.num_heads))
  routed_s = sum(cost.routed_s(layer) for layer in layers) / model.num_layers
  expert_bytes = 4 * cost.expert_bytes_per_token() * any(model.has_experts(layer) for layer in layers)
  return search.Problem(
    tokens=tokens.astype(np.float64),
    full_s=attention * cost.attention_s(tokens, FULL),
    sparse_s=attention * cost.attention_s(tokens, SPARSE),
    ranks=cluster.domain_ranks,
    node_ranks=cluster.ranks_per_node,
    capacity=float(capacity_tokens),
    intra_s=peer_bytes / cluster.intra_node_bytes_per_s,
    inter_s=peer_bytes / cluster.inter_node_bytes_per_s,
    latency_s=np.array([2 * cost.exchange_latency_s(int(degree)) for degree in degrees]),
    own_s=both * sum(cost.before_s() + cost.after_s(layer) for layer in layers) + 3 * cost.logits_s(),
    routed_s=both * routed_s,
    routed_spread=cost.expert_ranks > 1,
    expert_exchange_s=expert_bytes / cluster.intra_node_bytes_per_s,
    full_layers=model.layer_kinds.count(FULL),
    sparse_layers=model.layer_kinds.count(SPARSE),
  )


def _bundled(problem: search.Problem, parent_of: np.ndarray | None) -> tuple[np.ndarray, search.Problem]:
  """(bundle of each sample, the problem of the bundles): short samples together, those of a parent apart."""
  samples = len(problem.tokens)
  limit = problem.tokens.sum() / problem.ranks / _BUNDLES
  single = max(int(np.searchsorted(-problem.tokens, -limit)), min(samples, _MOST_SINGLE))
  bundle_of = np.arange(samples)
  if single < samples:
    parent = np.zeros(samples - single, np.int64) if parent_of is None else parent_of[single:]
    order = np.argsort(parent, kind='stable')
    filled = np.cumsum(problem.tokens[single:][order]) // limit
    fresh = (np.diff(filled, prepend=filled[0]) != 0) | (np.diff(parent[order], prepend=parent[order][0]) != 0)
    bundle_of[single + order] = single + np.cumsum(fresh)
  count = int(bundle_of.max(initial=-1)) + 1
  sums = (np.bincount(bundle_of, values, count) for values in (problem.tokens, problem.full_s, problem.sparse_s))
  tokens, full_s, sparse_s = sums
  return bundle_of, problem._replace(tokens=tokens, full_s=full_s, sparse_s=sparse_s)
