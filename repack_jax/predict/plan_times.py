"""From a plan to seconds and bytes: how long each rank computes and each group exchanges, a layer kind.

Within a micro-batch all layers of a kind take the same, so this is all that the simulator and the planner
need to know of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from repack_jax.config import FULL, SPARSE
from repack_jax.plan.plan import Group, Plan
from repack_jax.predict.cost_model import ATTENTION_BACKWARD_OVER_FORWARD, CostModel, heads_per_peer
from repack_jax.predict.sizes import DTYPE_BYTES


@dataclass(frozen=True)
class Tiling:
  """Groups of consecutive ranks that cover all of them.

  Attributes:
    starts: first ranks, int64 [groups].
    of: the group of each rank, int64 [num_ranks].
  """

  starts: np.ndarray
  of: np.ndarray

  @classmethod
  def at(cls, starts: np.ndarray, num_ranks: int) -> Tiling:
    return cls(starts, np.repeat(np.arange(len(starts)), np.diff(starts, append=num_ranks)))

  def max(self, values: np.ndarray) -> np.ndarray:
    """The largest value of each rank's group, [num_ranks] -> [num_ranks]."""
    return np.maximum.reduceat(values, self.starts)[self.of]

  def sum(self, values: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, self.starts)[self.of]


@dataclass(frozen=True)
class Traffic:
  """Bytes that each rank sends inside its node and to other nodes, float64 [num_ranks]."""

  intra: np.ndarray
  inter: np.ndarray


@dataclass(frozen=True)
class LayerTimes:
  """The forward pass of a layer of one kind. Arrays are float64 [num_ranks] unless said otherwise.

  Attributes:
    slots: rows that projections and logits run on, padding included.
    tokens: of each rank while the layer runs.
    groups: that exchange.
    dispatch_s, combine_s, core_s: the attention's exchanges and core; equal within a group.
    solo_s: the attention cores of the rank's solo samples.
    query_heads: that a rank of the group works on.
    routed_tokens: tokens whose experts' work is the rank's.
    expert_exchange_s: one of the experts' two exchanges; equal within a node.
    attention, experts: bytes of both exchanges of either.
    move_s, move: a redistribution pass into or out of this layer's layout, where there is one; bytes are the
      mean of both, of which a step has as many.
  """

  slots: int
  tokens: np.ndarray
  groups: Tiling
  dispatch_s: np.ndarray
  combine_s: np.ndarray
  core_s: np.ndarray
  solo_s: np.ndarray
  query_heads: np.ndarray
  routed_tokens: np.ndarray
  expert_exchange_s: np.ndarray
  attention: Traffic
  experts: Traffic
  move_s: np.ndarray | None = None
  move: Traffic | None = None


@dataclass(frozen=True)
class PlanTimes:
  """A micro-batch: the times of its two layer kinds, and its nodes."""

  kinds: dict[str, LayerTimes]
  nodes: Tiling


def plan_times(plan: Plan, cost: CostModel, redistribute: bool = False) -> PlanTimes:
  """Times of a plan.

  With `redistribute`, full layers run in their parents' own layout instead (each rank of a parent holds an
  equal share of its stream) and a pass of hidden states leads into and out of it: what repacking avoids.
  """
  kinds = {kind: _layer_times(plan, cost, kind, plan.shared_tokens) for kind in (FULL, SPARSE)}
  assert not (redistribute and plan.solo), 'only plans of mode repack can be redistributed'
  if redistribute and plan.parents != plan.children:
    kinds[FULL] = _redistributed(plan, cost)
  return PlanTimes(kinds, _nodes(plan))


def _nodes(plan: Plan) -> Tiling:
  return Tiling.at(np.arange(0, plan.num_ranks, plan.ranks_per_node), plan.num_ranks)


def group_work(groups: tuple[Group, ...], work_s: np.ndarray) -> np.ndarray:
  """The samples' work added up a group, float64 [groups]."""
  members = [s for group in groups for s in group.samples]
  of_group = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
  return np.bincount(of_group, work_s[members], len(groups)) if members else np.zeros(len(groups))


def _layer_times(plan: Plan, cost: CostModel, kind: str, shared: np.ndarray) -> LayerTimes:
  """Times where the ranks hold these tokens of their groups' streams."""
  model, ranks = cost.model, plan.num_ranks
  groups = plan.groups(kind)
  tiling = Tiling.at(np.array([group.first_rank for group in groups]), ranks)
  size = np.array([group.size for group in groups])
  tokens = shared.astype(np.float64)
  work_s = cost.attention_s(np.array(plan.lengths, np.int64), kind)
  core_s = group_work(groups, work_s) / size
  solo_s = np.zeros(ranks)
  solo_s[[group.first_rank for group in plan.solo]] = group_work(plan.solo, work_s)
  degree = size[tiling.of]
  nodes = _nodes(plan)
  itemsize = DTYPE_BYTES[model.compute_dtype] * model.head_dim
  dispatch, combine = (heads * itemsize for heads in heads_per_peer(model, degree))

  local = np.minimum(degree, plan.ranks_per_node)
  group_tokens = tiling.sum(tokens)
  # A group lies in a node or covers whole nodes.
  near_tokens = np.where(degree > plan.ranks_per_node, nodes.sum(tokens), group_tokens)
  intra = np.maximum(tokens * (local - 1), near_tokens - tokens)
  inter = np.maximum(tokens * (degree - local), group_tokens - near_tokens)

  def site_s(row_bytes: np.ndarray) -> np.ndarray:
    seconds = cost.link_s(intra * row_bytes, inter * row_bytes, degree > local)
    return np.where(degree > 1, tiling.max(seconds), 0.0)

  both = dispatch + combine
  held = tokens + (plan.rank_tokens - plan.shared_tokens)
  routed, expert_s, sent = _expert_times(plan, cost, held, nodes)
  return LayerTimes(
    slots=plan.capacity_tokens,
    tokens=held,
    groups=tiling,
    dispatch_s=site_s(dispatch),
    combine_s=site_s(combine),
    core_s=core_s[tiling.of],
    solo_s=solo_s,
    query_heads=model.num_heads // degree,
    routed_tokens=routed,
    expert_exchange_s=expert_s,
    attention=Traffic(tokens * (local - 1) * both, tokens * (degree - local) * both),
    experts=Traffic(sent, np.zeros(ranks)),
  )


def _expert_times(
  plan: Plan, cost: CostModel, tokens: np.ndarray, nodes: Tiling
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(tokens whose experts run on the rank, seconds of one exchange, bytes sent in both)."""
  if cost.expert_ranks == 1:
    return tokens, np.zeros(plan.num_ranks), np.zeros(plan.num_ranks)
  share = nodes.sum(tokens) / cost.expert_ranks
  row_bytes = cost.expert_bytes_per_token()
  seconds = cost.link_s(np.maximum(tokens, share) * row_bytes, 0.0, False)
  return share, nodes.max(seconds), (tokens + share) * row_bytes


def _redistributed(plan: Plan, cost: CostModel) -> LayerTimes:
  """Full layers in the parents' even layout, and the pass that leads there."""
  held = plan.rank_tokens
  even = np.zeros_like(held)
  for parent in plan.parents:
    total = int(held[parent.first_rank : parent.end_rank].sum())
    edges = np.arange(parent.size + 1) * total // parent.size
    even[parent.first_rank : parent.end_rank] = np.diff(edges)
  times = _layer_times(plan, cost, FULL, even)
  row = cost.model.d_model * DTYPE_BYTES[cost.model.compute_dtype]
  move = _moved(held, even, times.groups.starts, plan.ranks_per_node, row)
  back = _moved(even, held, times.groups.starts, plan.ranks_per_node, row)
  intra, inter = (np.maximum(getattr(move, link), getattr(back, link)) for link in ('intra', 'inter'))
  seconds = times.groups.max(cost.link_s(intra, inter, inter > 0))
  mean = Traffic((move.intra + back.intra) / 2, (move.inter + back.inter) / 2)
  return LayerTimes(**{**vars(times), 'move_s': np.where(intra + inter > 0, seconds, 0.0), 'move': mean})


def _moved(
  before: np.ndarray, after: np.ndarray, starts: np.ndarray, ranks_per_node: int, row_bytes: int
) -> Traffic:
  """Bytes each rank sends where runs of the groups' streams change owners."""
  ranks = len(before)
  intra, inter = np.zeros(ranks), np.zeros(ranks)
  for first, end in zip(starts, np.append(starts[1:], ranks), strict=True):
    was, now = (np.concatenate([[0], np.cumsum(x[first:end])]) for x in (before, after))
    for sender in range(end - first):
      overlap = np.minimum(was[sender + 1], now[1:]) - np.maximum(was[sender], now[:-1])
      overlap = np.maximum(overlap, 0) * row_bytes
      overlap[sender] = 0
      near = (first + np.arange(end - first)) // ranks_per_node == (first + sender) // ranks_per_node
      intra[first + sender], inter[first + sender] = overlap[near].sum(), overlap[~near].sum()
  return Traffic(intra, inter)


def _layer_sorts(cost: CostModel) -> dict[tuple[str, bool], tuple[int, int]]:
  """(kind, has experts) -> (a layer of that sort, how many there are)."""
  found: dict[tuple[str, bool], tuple[int, int]] = {}
  for layer, kind in enumerate(cost.model.layer_kinds):
    sort = (kind, cost.model.has_experts(layer))
    found[sort] = (found.get(sort, (layer, 0))[0], found.get(sort, (layer, 0))[1] + 1)
  return found


def predicted_s(plan: Plan, cost: CostModel) -> float:
  """Seconds of a micro-batch's layers and logits, both passes, if a domain's ranks all meet at each layer.

  They do where parameters are gathered a layer at a time and not ahead: a closed form of what the simulator
  plays with `prefetch_layers = 0`, without the parameter collectives. The slowest domain's seconds.
  """
  times = plan_times(plan, cost)
  starts = np.arange(0, plan.num_ranks, plan.domain_ranks)
  total = np.full(len(starts), 3 * times.kinds[SPARSE].slots * cost.logits_s())
  for (kind, _), (layer, count) in _layer_sorts(cost).items():
    for backward in (False, True):
      total += count * np.maximum.reduceat(_layer_s(times, cost, kind, layer, backward), starts)
  return float(total.max())


def _layer_s(times: PlanTimes, cost: CostModel, kind: str, layer: int, backward: bool) -> np.ndarray:
  """One pass of one layer from a common start to each rank's end, float64 [num_ranks]."""
  of = times.kinds[kind]
  linear = cost.linear_backward if backward else 1.0
  core = ATTENTION_BACKWARD_OVER_FORWARD if backward else 1.0
  attention = of.dispatch_s + core * of.core_s + of.combine_s
  solo = core * of.solo_s
  experts = 2 * of.expert_exchange_s + linear * of.routed_tokens * cost.routed_s(layer)
  spread_experts = cost.expert_ranks > 1 and cost.model.has_experts(layer)
  if not cost.model.has_experts(layer):
    experts = 0 * experts
  # Projections run on all slots, so ranks reach each meeting at the same time but for the exchanges' own.
  if backward:
    both = of.groups.max(experts) + attention + solo
  else:
    attention = attention + solo
    both = (times.nodes.max(attention) if spread_experts else attention) + experts
  return both + linear * of.slots * (cost.before_s() + cost.after_s(layer))
