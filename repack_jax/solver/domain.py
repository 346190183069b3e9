"""One domain of a micro-batch: its samples as a `Problem`, and what was found as groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from repack_jax.config.run import HALO_WAYS, PlannerConfig
from repack_jax.plan.plan import CHILDREN, PARENTS, Group
from repack_jax.predict.costs import Costs, link_s
from repack_jax.solver.improve import improve
from repack_jax.solver.judge import most_tokens
from repack_jax.solver.layout import lay_out, lay_out_solo
from repack_jax.solver.problem import Degrees, Groups, Layout, Problem, empty_groups
from repack_jax.solver.search import FEW_SAMPLES, Options, search

# Effort. Short samples are searched in bundles of a rank's mean tokens over _BUNDLES (over _SMALL_BUNDLES
# where there is little room), after a first look in larger ones, and placed one by one only in the end, with
# at most so many layouts judged: more where there are few samples.
_LARGE_BUNDLES, _BUNDLES, _SMALL_BUNDLES = 8, 16, 32
_MOST_SINGLE = 64
_MANY_LAYOUTS, _FEW_LAYOUTS = 20_000, 300


@dataclass(frozen=True, eq=False)
class Layouts:
  """Parents, children and solo groups of a domain, made from its layout when they are asked for.

  Attributes:
    samples: int64 [n], what the layout numbers: their numbers in the micro-batch.
    first_rank: of the domain.
    judged_s: the seconds that it is judged to take.
    most_tokens: of its fullest rank.
    wide_children: whether a child lies on several nodes.
    by_halo: whether it was searched for layers by halo in the children's layout.
  """

  samples: np.ndarray
  layout: Layout
  first_rank: int
  judged_s: float
  most_tokens: float
  wide_children: bool
  by_halo: bool

  @cached_property
  def children(self) -> list[Group]:
    of, children = self.layout.children.of, self.layout.children
    return self._groups(children, self._members(of, int(children.number[0])))

  @cached_property
  def parents(self) -> list[Group]:
    """Each with its samples in the order of its stream, that of its children."""
    parents = self.layout.parents
    streams: list[tuple[int, ...]] = []
    inside = iter(self.children)
    for size in parents.size[: parents.number[0]].tolist():
      stream: tuple[int, ...] = ()
      while size:
        child = next(inside)
        stream += child.samples
        size -= child.size
      streams.append(stream)
    return self._groups(parents, streams)

  @cached_property
  def solo(self) -> list[Group]:
    alone = self._members(self.layout.solo.of, len(self.layout.solo.tokens))
    return [Group(self.first_rank + rank, 1, samples) for rank, samples in enumerate(alone) if samples]

  def _groups(self, found: Groups, streams: Sequence[tuple[int, ...]]) -> list[Group]:
    count = int(found.number[0])
    first, size = (self.first_rank + found.first[:count]).tolist(), found.size[:count].tolist()
    return [Group(*group) for group in zip(first, size, streams, strict=True)]

  def _members(self, of: np.ndarray, count: int) -> list[tuple[int, ...]]:
    """The samples of each group, from the group of each sample (-1 for none)."""
    samples = self.samples[np.argsort(of, kind='stable')].tolist()
    edges = np.cumsum(np.bincount(of + 1, minlength=count + 1)).tolist()
    return [tuple(samples[begin:end]) for begin, end in pairwise(edges)]


class _Found(NamedTuple):
  """A layout, its judged seconds, and whether they are those of layers by halo."""

  layout: Layout
  seconds: float
  by_halo: bool


class _Bundled(NamedTuple):
  """The bundle of each sample, int64 [samples], and the problem of the bundles."""

  of: np.ndarray
  problem: Problem

  def parents(self, given: Groups | None) -> Groups:
    """Returns these parents of the samples as those of the bundles, or none."""
    parents = empty_groups(self.problem.ranks, len(self.problem.tokens))
    if given is None:
      return parents
    parents.of[self.of] = given.of
    return given._replace(of=parents.of)


class Domain:
  """The samples of one domain in one micro-batch, and its layouts in each way (`PlannerConfig.ways`).

  Args:
    samples: int64 [n], their numbers in the micro-batch, longest first.
    lengths: int64, of the whole micro-batch.
    static_degree: of the way `static`.
    row_tokens: a rank's share of a child is rounded up to a multiple of this (`Plan.row_tokens`).
    first_rank: of the domain.
  """

  def __init__(
    self,
    samples: np.ndarray,
    lengths: np.ndarray,
    static_degree: int,
    row_tokens: int,
    costs: Costs,
    config: PlannerConfig,
    first_rank: int,
  ):
    self.samples, self._row_tokens, self._static_degree = samples, row_tokens, static_degree
    self._first_rank, self._widest = first_rank, costs.degrees(config)[-1]
    self._lengths, self._costs = lengths, costs
    self._problem = _problem(lengths[samples], config.capacity_tokens, costs)
    # Small bundles and large ones where no parents are given, by capacity and whether layers run by halo:
    # ways share them.
    self._bundles: dict[tuple[float, bool], tuple[_Bundled, _Bundled]] = {}

  def layouts(self, ways: Iterable[str]) -> dict[str, Layouts]:
    """Returns the best layouts that were found in each of these ways; without those in which nothing fits."""
    found: dict[str, _Found | None] = {}
    by_heads = {of: way for way, of in HALO_WAYS.items()}
    for way in ways:
      problem = _by_halo(self._problem, self._costs) if way in by_heads else self._problem
      match by_heads.get(way, way):
        case 'static':
          found[way] = self._static(problem)
        case 'parents':
          found[way] = self._search(problem, repack=False)
        case 'repack':
          if parents := found.get('parents'):  # a parent can always be its own child
            found[way] = self._search(problem, repack=True, given=parents.layout.parents)
        case 'parents_solo':
          found[way] = self._with_solo(problem, repack=False)
        case 'solve':
          found[way] = self._search(problem, repack=True)
        case 'solve_solo':
          found[way] = self._with_solo(problem, repack=True)
        case _:
          raise AssertionError(f'{way}: no such way')
    layouts: dict[bytes, Layouts] = {}  # ways that found the same share one
    return {way: self._layouts(of, layouts) for way, of in found.items() if of}

  def with_solo(self, layouts: Layouts, solo: np.ndarray) -> Layouts | None:
    """Returns a layout's groups with other solo samples; None where these find no room.

    Args:
      solo: int64 [n], their numbers in the micro-batch.
    """
    shared = layouts.samples[layouts.layout.solo.of < 0]
    samples = np.sort(np.concatenate([shared, solo]))
    place = np.searchsorted(samples, shared)
    capacity = int(self._problem.capacity) - (self._row_tokens - 1)  # as in `_with_solo`
    problem = _problem(self._lengths[samples], capacity, self._costs)
    if layouts.by_halo:
      problem = _by_halo(problem, self._costs)
    degree = np.zeros(len(samples), np.int64)
    degree[place] = 1
    parents, children = (
      _renumbered(groups, layouts.layout.solo.of < 0, place, len(samples)) for groups in layouts.layout[:2]
    )
    seconds, layout = lay_out_solo(problem, degree, parents, children)
    if seconds == np.inf:
      return None
    seconds = improve(problem, False, _FEW_LAYOUTS, layout)
    return replace(layouts, samples=samples, layout=layout, judged_s=seconds, most_tokens=most_tokens(layout))

  def _static(self, problem: Problem) -> _Found | None:
    degrees = np.full(len(self.samples), self._static_degree)
    no_parents = empty_groups(problem.ranks, len(self.samples))
    seconds, layout = lay_out(problem, False, False, True, Degrees(degrees, degrees), no_parents)
    return _Found(layout, seconds, problem.by_halo) if seconds < np.inf else None

  def _with_solo(self, problem: Problem, repack: bool) -> _Found | None:
    # The search counts tokens; rounding up a rank's share leaves that much less room for its solo samples.
    problem = problem._replace(capacity=problem.capacity - (self._row_tokens - 1))
    if self._problem.tokens.max(initial=0) > self._widest * problem.capacity:
      return None
    return self._search(problem, repack, use_solo=True)

  def _search(
    self,
    problem: Problem,
    repack: bool,
    use_solo: bool = False,
    given: Groups | None = None,
  ) -> _Found | None:
    """Searches over bundles, places every sample by the degrees found, then moves single samples."""
    fine, coarse = self._bundled(problem, given)
    found = search(
      fine.problem,
      coarse.problem,
      Options(repack, use_solo, self._widest),
      fine.parents(given),
      coarse.parents(given),
    )
    parents, children = (degree[fine.of] for degree in found.degrees)
    widest = np.full(len(self.samples), self._widest)
    stay = empty_groups(problem.ranks, len(self.samples)) if given is None else given
    for degree in (parents, widest):
      seconds, layout = lay_out(problem, repack, True, found.by_step, Degrees(degree, children), stay)
      if seconds < np.inf:
        break
    else:
      return None
    budget = _MANY_LAYOUTS if len(self.samples) <= FEW_SAMPLES else _FEW_LAYOUTS
    return _Found(layout, improve(problem, given is not None, budget, layout), problem.by_halo)

  def _bundled(self, problem: Problem, given: Groups | None) -> tuple[_Bundled, _Bundled]:
    """Small bundles and large ones."""
    if given is not None:
      return _bundled(problem, given.of, _BUNDLES), _bundled(problem, given.of, _LARGE_BUNDLES)
    key = problem.capacity, problem.by_halo
    if key not in self._bundles:
      self._bundles[key] = _bundled(problem, None, _BUNDLES), _bundled(problem, None, _LARGE_BUNDLES)
    return self._bundles[key]

  def _layouts(self, found: _Found, known: dict[bytes, Layouts]) -> Layouts:
    parents, children, solo = layout = found.layout
    key = b''.join(part.tobytes() for part in (parents.size, parents.of, children.size, children.of, solo.of))
    key += bytes([found.by_halo])
    if key not in known:
      wide = bool(children.size[: children.number[0]].max() > self._problem.node_ranks)
      known[key] = Layouts(
        self.samples, layout, self._first_rank, found.seconds, most_tokens(layout), wide, found.by_halo
      )
    return known[key]


def _renumbered(groups: Groups, chosen: np.ndarray, place: np.ndarray, samples: int) -> Groups:
  """The groups of some samples where these have other numbers, `place`, among so many."""
  of = np.full(samples, -1, np.int64)
  of[place] = groups.of[chosen]
  first, size, tokens, work_s, _, number = (part.copy() for part in groups)
  return Groups(first, size, tokens, work_s, of, number)


def _problem(tokens: np.ndarray, capacity_tokens: int, costs: Costs) -> Problem:
  """Seconds of forward and backward pass of layers, mean over the layers of a layout."""
  cluster, layers = costs.cluster, costs.layers
  both = 1.0 + costs.linear_backward
  attention = 1.0 + costs.attention_backward
  degrees = 2 ** np.arange(cluster.domain_ranks.bit_length())
  shared = np.minimum(degrees, costs.wire.result_heads)
  # Of exchanges in chunks those that no core hides, as if cores were long enough to hide all others.
  shown_heads = np.array([costs.wire.shown_heads(p) for p in shared.tolist()], np.float64)
  peer_bytes = 2.0 * shown_heads.sum(axis=1) * costs.wire.head_dim * costs.wire.itemsize
  routed_s = sum(layer.routed_s for layer in layers) / len(layers)
  parents_s, children_s = (attention * costs.attention_s(tokens, layout) for layout in (PARENTS, CHILDREN))
  parents_layers, children_layers = (costs.layers_in(layout) for layout in (PARENTS, CHILDREN))
  step_s = parents_layers * parents_s + children_layers * children_s + tokens * both * routed_s * len(layers)
  token_share, parents_share, children_share, step_share = (
    values / max(values.sum(), 1e-300) for values in (tokens, parents_s, children_s, step_s)
  )
  # A ragged exchange takes seconds by what a group exchanges in it, a dense one by its degree alone.
  dense = cluster.exchange == 'dense'
  ragged_bytes = np.zeros(len(degrees)) if dense else peer_bytes
  latency_s, span_latency_s = np.zeros(len(degrees)), np.zeros(2)
  if not cluster.span_meets:
    latency_s = 4 * costs.site_latency_s(degrees)
  elif not dense:
    span_latency_s = 4 * costs.site_latency_s(np.array([cluster.ranks_per_node, cluster.domain_ranks]))
  expert_bytes = 2 * sum(costs.expert_round_trips) * costs.expert_bytes_per_token
  expert_bytes *= any(layer.has_experts for layer in layers)
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
    intra_s=ragged_bytes / cluster.intra_node_bytes_per_s,
    inter_s=ragged_bytes / cluster.inter_node_bytes_per_s,
    latency_s=latency_s,
    span_latency_s=span_latency_s,
    dense_s=_dense_s(capacity_tokens, shared, costs) if dense else np.zeros(len(degrees)),
    second_site=shown_heads[:, 1] / shown_heads.sum(axis=1),
    span_meets=cluster.span_meets,
    own_s=costs.slot_s,
    routed_s=both * routed_s,
    routed_spread=costs.expert_ranks > 1,
    expert_exchange_s=expert_bytes / cluster.intra_node_bytes_per_s,
    parents_layers=parents_layers,
    children_layers=children_layers,
    by_halo=False,
    halo_s=0.0,
    all_meet=cluster.prefetch_layers == 0,
  )


def _dense_s(capacity_tokens: int, degrees: np.ndarray, costs: Costs) -> np.ndarray:
  """Seconds that each SP degree adds to a layer with dense exchanges, both passes, float64 [degrees]."""
  sites_s = [
    [costs.dense_site_s(p, capacity_tokens * heads) for heads in costs.wire.shown_heads(p)]
    for p in degrees.tolist()
  ]
  return 2 * np.sum(sites_s, axis=1)


def _by_halo(problem: Problem, costs: Costs) -> Problem:
  """The problem where the children's layers run by halo, of one hop across nodes where there are several."""
  assert costs.halo_tokens is not None
  cluster = costs.cluster
  halo_bytes = min(costs.halo_tokens, problem.capacity) * costs.wire.halo_bytes
  both_s = 2 * float(link_s(cluster, halo_bytes, halo_bytes * (cluster.nodes > 1), cluster.nodes > 1))
  if cluster.halo_queries:
    queries = np.array([costs.halo_tokens])
    both_s += (1 + costs.attention_backward) * float(costs.attention_s(queries, CHILDREN)[0])
  return problem._replace(by_halo=True, halo_s=both_s)


def _bundled(problem: Problem, parent_of: np.ndarray | None, bundles: int) -> _Bundled:
  """Short samples together, those of a parent apart: a rank's mean tokens in so many bundles."""
  samples = len(problem.tokens)
  mean = problem.tokens.sum() / problem.ranks
  limit = min(max(problem.capacity - mean, mean / _SMALL_BUNDLES), mean / bundles)
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
    sums = np.bincount(bundle_of, values, count)
    return sums.astype(np.float64, copy=False)  # integers where there are none

  def summed_loads(loads: np.ndarray) -> np.ndarray:
    return np.stack([summed(loads[:, i]) for i in range(2)], axis=1)

  return _Bundled(
    bundle_of,
    problem._replace(
      solo_slack=limit if single < samples else 0.0,
      tokens=summed(problem.tokens),
      parents_s=summed(problem.parents_s),
      children_s=summed(problem.children_s),
      step_s=summed(problem.step_s),
      layer_loads=summed_loads(problem.layer_loads),
      step_loads=summed_loads(problem.step_loads),
      children_loads=summed_loads(problem.children_loads),
    ),
  )
