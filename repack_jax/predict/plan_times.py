"""From a plan to seconds and bytes: how long each rank computes and each group exchanges, in each layout.

Within a micro-batch all layers of a layout take the same but for their attention cores and what `LayerCosts`
says of them, so this is all that the simulator and the planner need to know of a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS, SOLO, Plan
from repack_jax.plan.program import Program
from repack_jax.plan.wire import HeadsOf
from repack_jax.predict.costs import Costs, LayerCosts, OfLengths, halo_peers, link_s


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
    begins = np.zeros(num_ranks, np.int64)
    begins[starts] = 1
    return cls(starts, np.cumsum(begins) - 1)

  def max(self, values: np.ndarray) -> np.ndarray:
    """Returns the largest value of each rank's group, [num_ranks] -> [num_ranks]."""
    return np.maximum.reduceat(values, self.starts)[self.of]

  def sum(self, values: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, self.starts)[self.of]


@dataclass(frozen=True)
class Traffic:
  """Bytes that each rank sends inside its node and to other nodes, float64 [num_ranks]."""

  intra: np.ndarray
  inter: np.ndarray


@dataclass(frozen=True)
class Core:
  """An attention core, float64 [num_ranks].

  Attributes:
    group_s: of what the rank's group holds, equal within a group; by halo, of the rank's share of it.
    solo_s: of the rank's solo samples.
  """

  group_s: np.ndarray
  solo_s: np.ndarray


@dataclass(frozen=True)
class Halo:
  """What a pass of a layer by halo shifts from rank to rank.

  Attributes:
    hops: ranks before and behind a rank that it waits for.
    span: ranks that shift to each other: all, whatever their groups, since that is compiled in.
    seconds: of all hops, float64 [num_ranks].
    sent: bytes.
  """

  hops: int
  span: int
  seconds: np.ndarray
  sent: Traffic

  def slowest(self, values: np.ndarray) -> np.ndarray:
    """Returns the largest value of a rank and of those that it waits for, [num_ranks] -> [num_ranks]."""
    of_span = np.pad(values.reshape(-1, self.span), ((0, 0), (self.hops, self.hops)), constant_values=-np.inf)
    shifted = [of_span[:, hop : hop + self.span] for hop in range(2 * self.hops + 1)]
    return np.max(shifted, axis=0).reshape(-1)


@dataclass(frozen=True)
class LayoutTimes:
  """The forward pass of a layer in one layout. Arrays are float64 [num_ranks] unless said otherwise.

  Attributes:
    slots: rows that projections and logits run on, padding included.
    tokens: of each rank while the layer runs.
    groups: that exchange.
    meets: ranks that wait for each other at either site (`ClusterConfig.exchange_meets`).
    crosses: whether the rank's group lies on several nodes, bool.
    cores: of each attention function of the layers in this layout.
    dispatch_s, combine_s: the attention's exchanges, float64 [chunks, num_ranks]; equal within a group,
      latency included.
    core_share: the share of a group's core that each chunk is, float64 [chunks, num_ranks].
    solo_share: that of the solo samples' core, float64 [chunks].
    routed_tokens: tokens whose experts' work is the rank's.
    expert_exchange_s: one exchange of the experts; equal within a node.
    attention, experts: bytes of two exchanges of either, there and back.
    halos: where layers run by halo, what they shift, by their `halo_tokens`. Then exchanges take and send
      nothing.
    move_s, move: a redistribution pass into or out of this layer's layout, where there is one; bytes are the
      mean of both, of which a step has as many.
  """

  slots: int
  tokens: np.ndarray
  groups: Tiling
  meets: Tiling
  crosses: np.ndarray
  cores: dict[OfLengths, Core]
  dispatch_s: np.ndarray
  combine_s: np.ndarray
  core_share: np.ndarray
  solo_share: np.ndarray
  routed_tokens: np.ndarray
  expert_exchange_s: np.ndarray
  attention: Traffic
  experts: Traffic
  halos: dict[int, Halo] = dataclasses.field(default_factory=dict)
  move_s: np.ndarray | None = None
  move: Traffic | None = None

  def stages(self, core: Core) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Yields, for each chunk between the first dispatch and the last combine, what goes on at once.

    Seconds, float64 [num_ranks] each: (the group's core; the solo samples'; the exchanges beside them, which
    are the next chunk's dispatch and the last one's combine, None where there is neither).
    """
    last = len(self.core_share) - 1
    for chunk, share in enumerate(self.core_share):
      beside = [self.dispatch_s[chunk + 1]] if chunk < last else []
      beside += [self.combine_s[chunk - 1]] if chunk else []
      solo_s = core.solo_s * self.solo_share[chunk]
      yield core.group_s * share, solo_s, np.sum(beside, axis=0) if beside else None


@dataclass(frozen=True)
class PlanTimes:
  """A micro-batch: the times of its two layouts, and its nodes."""

  layouts: dict[str, LayoutTimes]
  nodes: Tiling

  def core(self, layer: LayerCosts) -> Core:
    """Returns the attention core of a layer."""
    return self.layouts[layer.layout].cores[layer.attention_s]

  def halo(self, layer: LayerCosts) -> Halo | None:
    """Returns what a layer shifts; None where it exchanges heads."""
    halos = self.layouts[layer.layout].halos
    return halos[layer.halo_tokens] if halos and layer.halo_tokens is not None else None


def plan_times(
  plan: Plan, costs: Costs, program: Program | None = None, redistribute: bool = False
) -> PlanTimes:
  """Returns the times of a plan as a program runs it; by default one made for this plan.

  With `redistribute`, layers in the parents' layout run in an even layout of their own instead (each rank of
  a parent holds an equal share of its stream) and a pass of hidden states leads into and out of it: what
  repacking avoids.
  """
  program = program or Program.of_plan(plan)
  layouts = {layout: _layout_times(plan, costs, program, layout, plan.shared_tokens) for layout in LAYOUTS}
  if costs.halo_tokens is not None and program.halo_slots(CHILDREN, costs.halo_tokens) is not None:
    layouts[CHILDREN] = _by_halo(plan, costs, program, layouts[CHILDREN])
  assert not (redistribute and plan.solo), 'only plans of mode repack can be redistributed'
  if redistribute and plan.parents != plan.children:
    layouts[PARENTS] = _redistributed(plan, costs, program)
  return PlanTimes(layouts, _nodes(plan))


def _nodes(plan: Plan) -> Tiling:
  return Tiling.at(np.arange(0, plan.num_ranks, plan.ranks_per_node), plan.num_ranks)


def _cores(plan: Plan, costs: Costs, layout: str, group_of: np.ndarray) -> dict[OfLengths, Core]:
  """Every attention core of a layout, each function of lengths once; `group_of` is the group of each rank."""
  size = np.array([group.size for group in plan.groups(layout)])
  cores = {}
  for attention_s in dict.fromkeys(layer.attention_s for layer in costs.sorts if layer.layout == layout):
    work_s = attention_s(plan.sample_tokens)
    solo_s = np.zeros(plan.num_ranks)
    solo_s[[group.first_rank for group in plan.solo]] = plan.group_sums(SOLO, work_s)
    cores[attention_s] = Core((plan.group_sums(layout, work_s) / size)[group_of], solo_s)
  return cores


def _by_halo(plan: Plan, costs: Costs, program: Program, times: LayoutTimes) -> LayoutTimes:
  """The times of layers in the children's layout where these run by halo: each rank on its own tokens."""
  cluster, zeros = costs.cluster, np.zeros(plan.num_ranks)
  sent_near, sent_across = halo_peers(plan, program)
  near, across = map(np.maximum, (sent_near, sent_across), halo_peers(plan, program, ahead=True))
  latency_s = near * cluster.intra_node_latency_s + across * cluster.inter_node_latency_s
  latency_s = latency_s + (near + across) * cluster.peer_latency_s

  def halo(halo_tokens: int) -> Halo:
    slots = program.halo_slots(CHILDREN, halo_tokens)
    assert slots is not None
    one_bytes = costs.halo_bytes(program, slots)
    seconds = np.maximum(
      near * one_bytes / cluster.intra_node_bytes_per_s, across * one_bytes / cluster.inter_node_bytes_per_s
    )
    sent = Traffic(sent_near * float(one_bytes), sent_across * float(one_bytes))
    return Halo(program.halo_hops, program.span(CHILDREN), latency_s + seconds, sent)

  of_layout = [layer for layer in costs.sorts if layer.layout == CHILDREN]
  needed = {layer.halo_tokens for layer in of_layout}
  queries = {layer.attention_s: (layer.halo_tokens or 0) * cluster.halo_queries for layer in of_layout}
  return dataclasses.replace(
    times,
    cores={
      attention_s: Core(_share_s(plan, attention_s, queries[attention_s]), core.solo_s)
      for attention_s, core in times.cores.items()
    },
    crosses=across > 0,
    dispatch_s=zeros[None],
    combine_s=zeros[None],
    core_share=np.ones((1, plan.num_ranks)),
    solo_share=np.ones(1),
    attention=Traffic(zeros, zeros),
    halos={tokens: halo(tokens) for tokens in needed if tokens is not None},
  )


def _share_s(plan: Plan, attention_s: OfLengths, halo_queries: int) -> np.ndarray:
  """Seconds of the attention core of what each rank holds of its child's stream, float64 [num_ranks].

  What queries do depends on their place in their sample: a run of it takes what it takes up to the run's end,
  less what it takes up to the run's start.

  Args:
    halo_queries: of the tokens ahead of a rank's own, how many queries are computed as well, at most. They
      see none before them, and so take what a sample of their own would.
  """
  samples, _ = plan.members[CHILDREN]
  if not len(samples):
    return np.zeros(plan.num_ranks)
  lengths = plan.sample_tokens[samples]
  ends, whole_s = np.cumsum(lengths), np.cumsum(attention_s(lengths))
  edges = np.concatenate([[0], np.cumsum(plan.shared_tokens)])
  sample = np.minimum(np.searchsorted(ends, edges, side='right'), len(samples) - 1)
  into = edges - (ends - lengths)[sample]
  before_s = np.concatenate([[0.0], whole_s[:-1]])[sample]
  until_s = before_s + np.where(into > 0, attention_s(np.maximum(into, 1)), 0.0)
  own_s = np.maximum(np.diff(until_s), 0.0)
  ahead = np.where(plan.shared_tokens > 0, np.minimum(into[:-1], halo_queries), 0)
  return own_s + np.where(ahead > 0, attention_s(np.maximum(ahead, 1)), 0.0)


def _layout_times(plan: Plan, costs: Costs, program: Program, layout: str, shared: np.ndarray) -> LayoutTimes:
  """Times where the ranks hold these tokens of their groups' streams."""
  wire, groups = costs.wire.fitted(program.degrees(layout)), plan.groups(layout)
  tiling = Tiling.at(np.array([group.first_rank for group in groups]), plan.num_ranks)
  degree = np.array([group.size if group.samples else 1 for group in groups])[tiling.of]
  known, place = np.unique(degree, return_inverse=True)

  def on_ranks(of_degree: HeadsOf) -> np.ndarray:
    return np.array([of_degree(int(one)) for one in known])[place]

  tokens = shared.astype(np.float64)
  sent = -(-tokens // plan.row_tokens) * plan.row_tokens  # whole rows travel, padding and all
  span = program.span(layout)
  if costs.cluster.exchange == 'dense':
    crosses, site_s = np.full(plan.num_ranks, span > plan.ranks_per_node), _dense_s(costs, program, layout)
  else:
    crosses = degree > plan.ranks_per_node
    site_s = _ragged_s(plan, costs, span, tiling, degree, sent, on_ranks)
  counts, alone = on_ranks(wire.chunk_count), wire.chunk_count(1)
  held = tokens + (plan.rank_tokens - plan.shared_tokens)
  routed, expert_s, expert_bytes = _expert_times(plan, costs, held)
  return LayoutTimes(
    slots=program.capacity_tokens,
    tokens=held,
    groups=tiling,
    meets=Tiling.at(np.arange(0, plan.num_ranks, span), plan.num_ranks)
    if costs.cluster.span_meets
    else tiling,
    crosses=crosses,
    cores=_cores(plan, costs, layout, tiling.of),
    dispatch_s=np.stack([site_s(wire.dispatched(chunk)) for chunk in range(wire.chunks)]),
    combine_s=np.stack([site_s(wire.combined(chunk)) for chunk in range(wire.chunks)]),
    core_share=np.stack([(chunk < counts) / counts for chunk in range(wire.chunks)]),
    solo_share=np.array([1 / alone if chunk < alone else 0.0 for chunk in range(wire.chunks)]),
    routed_tokens=routed,
    expert_exchange_s=expert_s,
    attention=Traffic(*costs.exchange_bytes(program, layout, sent, degree)),
    experts=Traffic(expert_bytes, np.zeros(plan.num_ranks)),
  )


def _ragged_s(
  plan: Plan,
  costs: Costs,
  span: int,
  groups: Tiling,
  degree: np.ndarray,
  sent: np.ndarray,
  on_ranks: Callable[[HeadsOf], np.ndarray],
) -> Callable[[HeadsOf], np.ndarray]:
  """Seconds of an exchange by the heads that it sends, [num_ranks].

  A link is as slow as who sends or receives most.

  Args:
    span: ranks that the exchange spans.
    degree: SP degree of each rank's group.
    sent: slots of each rank's share of its group's stream.
    on_ranks: gives a function of the degree for each rank, [num_ranks].
  """
  cluster, wire = costs.cluster, costs.wire
  local = np.minimum(degree, plan.ranks_per_node)
  of_group = groups.sum(sent)
  # A group lies in a node or covers whole nodes.
  near = np.where(degree > plan.ranks_per_node, _nodes(plan).sum(sent), of_group)
  intra = np.maximum(sent * (local - 1), near - sent)
  inter = np.maximum(sent * (degree - local), of_group - near)
  latency_s = costs.site_latency_s(np.full(len(degree), span) if cluster.span_meets else degree)

  def site_s(heads_of: HeadsOf) -> np.ndarray:
    heads = on_ranks(heads_of)
    row_bytes = heads * wire.itemsize * wire.head_dim
    seconds = np.maximum(
      intra * row_bytes / cluster.intra_node_bytes_per_s, inter * row_bytes / cluster.inter_node_bytes_per_s
    )
    # Of a chunk that its group does not have, a rank need not take part but for the others of the span.
    return groups.max(seconds) + np.where((heads > 0) | cluster.span_meets, latency_s, 0.0)

  return site_s


def _dense_s(costs: Costs, program: Program, layout: str) -> Callable[[HeadsOf], np.ndarray]:
  """As `_ragged_s`, the same on all ranks: of each degree that the program knows."""
  known, slots = program.degrees(layout), program.capacity_tokens

  def site_s(heads_of: HeadsOf) -> np.ndarray:
    sent = {degree: slots * heads_of(degree) for degree in known if heads_of(degree)}
    return np.full(
      costs.cluster.num_ranks, sum(costs.dense_site_s(degree, heads) for degree, heads in sent.items())
    )

  return site_s


def _expert_times(plan: Plan, costs: Costs, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(tokens whose experts run on the rank, seconds of one exchange, bytes sent in both)."""
  if costs.expert_ranks == 1:
    return tokens, np.zeros(plan.num_ranks), np.zeros(plan.num_ranks)
  nodes = _nodes(plan)
  share = nodes.sum(tokens) / costs.expert_ranks
  row_bytes = costs.expert_bytes_per_token
  seconds = np.maximum(tokens, share) * row_bytes / costs.cluster.intra_node_bytes_per_s
  seconds = seconds + costs.site_latency_s(costs.expert_ranks)
  return share, nodes.max(seconds), (tokens + share) * row_bytes


def _redistributed(plan: Plan, costs: Costs, program: Program) -> LayoutTimes:
  """Layers in the parents' even layout, and the pass that leads there."""
  held = plan.rank_tokens
  even = np.zeros_like(held)
  for parent in plan.parents:
    total = int(held[parent.first_rank : parent.end_rank].sum())
    edges = np.arange(parent.size + 1) * total // parent.size
    even[parent.first_rank : parent.end_rank] = np.diff(edges)
  times = _layout_times(plan, costs, program, PARENTS, even)
  row = costs.hidden_bytes
  move = _moved(held, even, times.groups.starts, plan.ranks_per_node, row)
  back = _moved(even, held, times.groups.starts, plan.ranks_per_node, row)
  intra, inter = (np.maximum(getattr(move, link), getattr(back, link)) for link in ('intra', 'inter'))
  seconds = times.groups.max(link_s(costs.cluster, intra, inter, inter > 0))
  mean = Traffic((move.intra + back.intra) / 2, (move.inter + back.inter) / 2)
  return dataclasses.replace(times, move_s=np.where(intra + inter > 0, seconds, 0.0), move=mean)


def _moved(
  before: np.ndarray, after: np.ndarray, starts: np.ndarray, ranks_per_node: int, row_bytes: float
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


def predicted_s(plan: Plan, costs: Costs) -> float:
  """Returns seconds of a micro-batch's layers and logits, both passes, if ranks meet at each layer.

  Those of a domain do where parameters are gathered a layer at a time and not ahead: a closed form of what
  the simulator plays with `prefetch_layers = 0`, without the parameter collectives. Of the slowest domain.
  """
  times = plan_times(plan, costs)
  starts = np.arange(0, plan.num_ranks, plan.domain_ranks)
  total = np.full(len(starts), plan.capacity_tokens * costs.logits_s)
  for layer, count in costs.sorts.items():
    for backward in (False, True):
      total += count * np.maximum.reduceat(_layer_s(times, costs, layer, backward), starts)
  return float(total.max())


def _layer_s(times: PlanTimes, costs: Costs, layer: LayerCosts, backward: bool) -> np.ndarray:
  """One pass of one layer from a common start to each rank's end, float64 [num_ranks]."""
  of, core = times.layouts[layer.layout], times.core(layer)
  linear = costs.linear_backward if backward else 1.0
  of_core = costs.attention_backward if backward else 1.0
  solo = of_core * core.solo_s
  halo = times.halo(layer)
  if halo is not None:
    attention = of_core * core.group_s + solo + (0.0 if backward else halo.seconds)
  else:
    attention = of.dispatch_s[0]
    for group_s, solo_s, beside_s in of.stages(core):
      computed = attention + of_core * (group_s + solo_s * costs.cluster.span_meets)
      attention = computed if beside_s is None else np.maximum(computed, of.meets.max(attention) + beside_s)
    if costs.cluster.span_meets:
      attention = of.meets.max(attention) + of.combine_s[-1]
    else:
      attention = attention + of.combine_s[-1] + solo
  experts = np.zeros(len(solo))
  if layer.has_experts:
    exchanges_s = 2 * costs.expert_round_trips[backward] * of.expert_exchange_s
    experts = exchanges_s + linear * of.routed_tokens * layer.routed_s
  # Projections run on all slots, so ranks reach each meeting at the same time but for the exchanges' own.
  if backward and halo is not None:  # gradients are shifted back behind the core
    both = halo.slowest(experts + attention) + halo.seconds
  elif backward:
    both = of.meets.max(experts) + attention
  else:
    meets = costs.expert_ranks > 1 and layer.has_experts
    both = (times.nodes.max(attention) if meets else attention) + experts
  return both + linear * of.slots * (layer.before_s + layer.after_s)
