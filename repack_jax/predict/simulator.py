"""Plays a training step on a cluster: a clock a rank; a collective waits for the slowest of its group.

Assumed: routers are even, computation and links keep their rates, a transfer between nodes and one inside
them go on at once, and solo samples are attended to before combine. Collectives of parameters have a stream
of their own; what of them runs beside an exchange between nodes shares its link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from repack_jax.plan.plan import CHILDREN, PARENTS, Plan
from repack_jax.plan.program import Program
from repack_jax.predict.costs import Costs, LayerCosts
from repack_jax.predict.flops import TRAIN_OVER_FORWARD
from repack_jax.predict.plan_times import Halo, LayoutTimes, PlanTimes, Tiling, plan_times

# What a rank does with its time. Compute, then exchanges and parameters, then waiting for others.
ATTENTION = {PARENTS: "parents' attention", CHILDREN: "children's attention"}
EXCHANGE = {PARENTS: "parents' exchange", CHILDREN: "children's exchange"}
COMPUTE = ('projections', *ATTENTION.values(), 'experts', 'logits', 'padding', 'optimizer')
TRANSFER = (*EXCHANGE.values(), 'expert exchange', 'redistribution', 'parameters')
WAIT = (
  *(f'wait: {exchange}' for exchange in EXCHANGE.values()), 'wait: experts', 'wait: redistribution',
  'wait: parameters', 'wait: step end',
)  # fmt: skip
CAUSES = COMPUTE + TRANSFER + WAIT


@dataclass(frozen=True)
class Spans:
  """What each rank did when, one entry a span of time: arrays of one length.

  Attributes:
    rank, cause (an index into CAUSES), layer (-1 outside layers), micro_batch: int64.
    backward: bool.
    start_s, end_s: float64 from the step's start.
  """

  rank: np.ndarray
  cause: np.ndarray
  layer: np.ndarray
  micro_batch: np.ndarray
  backward: np.ndarray
  start_s: np.ndarray
  end_s: np.ndarray


@dataclass(frozen=True)
class Simulated:
  """A step as it was played.

  Attributes:
    step_s: seconds from start to the last rank's end.
    model_flops: of the step, forward and backward, recomputation and padding not counted.
    peak_flops_per_s: of all ranks; 0 where unknown.
    seconds: cause -> float64 [num_ranks]; over all causes they add up to step_s on every rank.
    sent: cause -> (bytes each rank sent inside its node, to other nodes), float64 [num_ranks].
    spans: where they were asked for.
  """

  step_s: float
  model_flops: float
  peak_flops_per_s: float
  seconds: dict[str, np.ndarray]
  sent: dict[str, tuple[np.ndarray, np.ndarray]]
  spans: Spans | None = None

  @property
  def mfu(self) -> float:
    """Returns model FLOPs over what all ranks could do at their peak; 0 where the peak is unknown."""
    possible = self.step_s * self.peak_flops_per_s
    return self.model_flops / possible if possible else 0.0

  def mean_s(self, causes: Sequence[str]) -> float:
    """Returns seconds spent on these causes, mean over ranks."""
    return float(sum(self.seconds[cause] for cause in causes).mean())  # type: ignore[union-attr]

  @property
  def cross_node_bytes(self) -> float:
    """Returns the bytes that attention exchanges and redistribution sent between nodes, all ranks."""
    return float(sum(inter.sum() for _, inter in self.sent.values()))


def simulate(
  costs: Costs,
  plans: Sequence[Plan],
  *,
  programs: Sequence[Program] | None = None,
  redistribute: bool = False,
  spans: bool = False,
) -> Simulated:
  """Returns an optimizer step as it is played: each plan's micro-batch forward and backward, then the update.

  Args:
    programs: what runs each plan; by default one made for it.
    redistribute: layers in parents' layout run in one of their own, reached by a pass (`plan_times`).
    spans: also record every span of every rank, for pictures.
  """
  player = _Player(costs, spans)
  of_plans: Sequence[Program | None] = programs or [None] * len(plans)
  for number, (plan, program) in enumerate(zip(plans, of_plans, strict=True)):
    player.micro_batch = number
    player.play(plan_times(plan, costs, program, redistribute))
  player.meet_all('wait: step end')
  player.add('optimizer', np.full(player.ranks, costs.optimizer_s))
  lengths = np.concatenate([np.zeros(0, np.int64), *(plan.sample_tokens for plan in plans)])
  return Simulated(
    step_s=float(player.clock.max()),
    model_flops=TRAIN_OVER_FORWARD * float(np.sum(costs.flops(lengths))) if costs.flops else 0.0,
    peak_flops_per_s=costs.cluster.peak_flops_per_s * costs.cluster.num_ranks,
    seconds=player.seconds,
    sent=player.sent,
    spans=player.recorded() if spans else None,
  )


@dataclass
class _Parameters:
  """The stream of parameter collectives, one clock a domain.

  Attributes:
    free_s: when the last collective so far ends, [domains].
    ahead: (seconds, end [domains]) of each gather that was started and is not yet used.
    to_start: seconds of those to come, in the order of use.
  """

  free_s: np.ndarray
  ahead: list[tuple[float, np.ndarray]] = field(default_factory=list)
  to_start: list[float] = field(default_factory=list)

  def start_next(self, not_before_s: np.ndarray) -> None:
    if self.to_start:
      seconds = self.to_start.pop(0)
      self.free_s = np.maximum(self.free_s, not_before_s) + seconds
      self.ahead.append((seconds, self.free_s))

  def share(self, clock: np.ndarray, shared_s: np.ndarray, domain_starts: np.ndarray) -> None:
    """Delays what runs or waits behind exchanges that have half the link, by as much as runs beside them.

    Args:
      clock: when each rank's exchange begins, [num_ranks].
      shared_s: what the exchange lasts with the whole link, [num_ranks]; 0 where it does not use it.
      domain_starts: first ranks, [domains].
    """
    of_domain = np.diff(domain_starts, append=len(clock))

    def delayed(end_s: np.ndarray) -> np.ndarray:
      beside_s = np.minimum(shared_s, np.maximum(0, np.repeat(end_s, of_domain) - clock))
      return end_s + np.maximum.reduceat(beside_s, domain_starts)

    self.ahead = [(lasts_s, delayed(end_s)) for lasts_s, end_s in self.ahead]
    self.free_s = delayed(self.free_s)


class _Player:
  """The clocks of a step, and where their time went."""

  def __init__(self, costs: Costs, spans: bool):
    self.costs, self.cluster = costs, costs.cluster
    self.ranks = self.cluster.num_ranks
    self.clock = np.zeros(self.ranks)
    self.seconds = {cause: np.zeros(self.ranks) for cause in CAUSES}
    self.sent = {
      cause: (np.zeros(self.ranks), np.zeros(self.ranks))
      for cause in (*EXCHANGE.values(), 'expert exchange', 'redistribution')
    }
    self.domain_starts = np.arange(0, self.ranks, self.cluster.domain_ranks)
    self.micro_batch, self.layer, self.backward, self.alike = 0, -1, False, 1
    self._spans: list[tuple] | None = [] if spans else None
    self.parameters = _Parameters(np.zeros(self.cluster.domains))

  # --- the clocks ---------------------------------------------------------------------------------------

  def work(self, cause: str, seconds: np.ndarray) -> None:
    """Adds what takes so many seconds in each of the layers that are played at once."""
    self.add(cause, seconds * self.alike)

  def add(self, cause: str, seconds: np.ndarray) -> None:
    """Adds so many seconds, for a cause, to the clock of every rank."""
    if self._spans is not None:
      self._spans.append(
        (cause, self.layer, self.micro_batch, self.backward, self.clock.copy(), seconds.copy())
      )
    self.seconds[cause] += seconds
    self.clock += seconds

  def meet(self, cause: str, groups: Tiling) -> None:
    """Makes ranks wait for the slowest of their group."""
    self.add(cause, groups.max(self.clock) - self.clock)

  def meet_all(self, cause: str) -> None:
    self.meet(cause, Tiling.at(np.zeros(1, np.int64), self.ranks))

  def recorded(self) -> Spans:
    """Returns all spans that took any time, in the order of ranks, then of time."""
    assert self._spans is not None
    count = len(self._spans)
    cause, layer, micro_batch, backward, start_s, seconds = zip(*self._spans, strict=True)
    starts, lasting = np.stack(start_s, axis=1), np.stack(seconds, axis=1)
    rank, event = np.nonzero(starts + lasting > starts)
    return Spans(
      rank=rank,
      cause=np.array([CAUSES.index(name) for name in cause])[event],
      layer=np.array(layer)[event],
      micro_batch=np.array(micro_batch)[event],
      backward=np.array(backward)[event],
      start_s=starts.reshape(-1, count)[rank, event],
      end_s=(starts + lasting)[rank, event],
    )

  # --- a micro-batch ------------------------------------------------------------------------------------

  def play(self, times: PlanTimes) -> None:
    """Plays the forward and backward pass of one micro-batch."""
    costs, layers = self.costs, self._layers(times)
    own_table = costs.vocabulary_tables == 2
    self.layer, self.backward = -1, False
    layer_gathers_s = [alike * layer.gather_s for _, layer, alike in layers]
    logits_gather_s = costs.table_gather_s if own_table else 0.0
    self.parameters.to_start = [*layer_gathers_s, logits_gather_s, *reversed(layer_gathers_s)]
    # The embedding is needed at once.
    self._collect(costs.table_gather_s)
    for _ in range(self.cluster.prefetch_layers):
      self.parameters.start_next(self._last_s())
    for self.layer, layer, self.alike in layers:
      self._begin()
      self._forward(times, layer)
    self.layer, self.alike = -1, 1
    self._begin()
    self._linear('logits', times.layouts[CHILDREN], costs.logits_s)
    self.backward = True
    self._reduce(costs.table_reduce_s)
    for self.layer, layer, self.alike in reversed(layers):
      self._begin()
      self._backward(times, layer)
      self._reduce(self.alike * layer.reduce_s)
    self.layer, self.alike = -1, 1
    self._reduce(costs.table_reduce_s if own_table else 0.0)
    self._wait_for(self.parameters.free_s, costs.table_reduce_s)
    if self.cluster.domains > 1:
      self.meet_all('wait: parameters')
    self.add('parameters', np.full(self.ranks, costs.data_reduce_s))

  def _layers(self, times: PlanTimes) -> list[tuple[int, LayerCosts, int]]:
    """(its number, a layer, how many like it are played at once).

    Where all ranks of a domain meet before each layer and after it, layers that are alike take as long one as
    the other: one of them is played, and lasts as much longer.
    """
    layers = self.costs.layers
    moves = any(of.move is not None for of in times.layouts.values())
    if self.cluster.prefetch_layers or self._spans is not None or moves:
      return [(number, layer, 1) for number, layer in enumerate(layers)]
    return [(layers.index(layer), layer, count) for layer, count in self.costs.sorts.items()]

  def _forward(self, times: PlanTimes, layer: LayerCosts) -> None:
    of = times.layouts[layer.layout]
    if self._enters(-1):
      self._move(of)
    self._linear('projections', of, layer.before_s)
    self._attention(times, layer, 1.0)
    self._linear('projections', of, layer.after_s)
    if layer.has_experts:
      self._experts(times, of, layer.routed_s)
    if self._enters(1):
      self._move(of)

  def _backward(self, times: PlanTimes, layer: LayerCosts) -> None:
    of, linear = times.layouts[layer.layout], self.costs.linear_backward
    if self._enters(1):
      self._move(of)
    if layer.has_experts:
      self._experts(times, of, linear * layer.routed_s)
    self._linear('projections', of, linear * layer.after_s)
    self._attention(times, layer, self.costs.attention_backward)
    self._linear('projections', of, linear * layer.before_s)
    if self._enters(-1):
      self._move(of)

  def _enters(self, step: int) -> bool:
    """Whether a layout of the parents' own would be entered or left on this side of the layer."""
    layers, beside = self.costs.layers, self.layer + step
    return (
      layers[self.layer].layout == PARENTS and 0 <= beside < len(layers) and layers[beside].layout != PARENTS
    )

  def _linear(self, cause: str, of: LayoutTimes, per_token_s: float) -> None:
    """Work on all slots of a rank; what runs on empty ones is padding."""
    self.work(cause, of.tokens * per_token_s)
    self.work('padding', (of.slots - of.tokens) * per_token_s)

  def _attention(self, times: PlanTimes, layer: LayerCosts, core_factor: float) -> None:
    of, core = times.layouts[layer.layout], times.core(layer)
    attention, exchange = ATTENTION[layer.layout], EXCHANGE[layer.layout]
    halo = times.halo(layer)
    if halo is not None:
      self._halo(of, layer, halo, core_factor * (core.group_s + core.solo_s))
      return
    self.meet(f'wait: {exchange}', of.meets)
    self._exchange(exchange, of, of.dispatch_s[0])
    for group_s, solo_s, beside_s in of.stages(core):
      begin_s = of.meets.max(self.clock)
      self.work(attention, core_factor * group_s)
      if self.cluster.span_meets:
        self.work(attention, core_factor * solo_s)
      if beside_s is not None:
        # Exchanges of other chunks go on meanwhile, from when all are there.
        beside_s = self._beside_parameters(of, beside_s, begin_s)
        self.add(f'wait: {exchange}', np.maximum(0, begin_s - self.clock))
        self.add(exchange, np.maximum(0, begin_s + self.alike * beside_s - self.clock))
    if self.cluster.span_meets:
      self.meet(f'wait: {exchange}', of.meets)
    self._exchange(exchange, of, of.combine_s[-1])
    if not self.cluster.span_meets:
      self.work(attention, core_factor * core.solo_s)
    self._count(exchange, of.attention.intra, of.attention.inter)

  def _halo(self, of: LayoutTimes, layer: LayerCosts, halo: Halo, core_s: np.ndarray) -> None:
    """A layer by halo: keys and values are shifted ahead of the core, their gradients behind it.

    A rank waits for its neighbours, who must both be there.
    """
    attention, exchange = ATTENTION[layer.layout], EXCHANGE[layer.layout]
    if self.backward:
      self.work(attention, core_s)
    self.add(f'wait: {exchange}', halo.slowest(self.clock) - self.clock)
    self._exchange(exchange, of, halo.seconds)
    if not self.backward:
      self.work(attention, core_s)
    self._count(exchange, halo.sent.intra, halo.sent.inter)

  def _exchange(self, cause: str, of: LayoutTimes, seconds: np.ndarray) -> None:
    """An exchange that every rank waits for."""
    self.work(cause, self._beside_parameters(of, seconds, self.clock))

  def _beside_parameters(self, of: LayoutTimes, seconds: np.ndarray, begin_s: np.ndarray) -> np.ndarray:
    """What exchanges last that share the link between nodes with collectives of parameters.

    Args:
      seconds: what they last with the whole link, [num_ranks].
      begin_s: when each rank's begin, [num_ranks].
    """
    if not (self.cluster.share_inter_node_link and self.cluster.prefetch_layers and of.crosses.any()):
      return seconds
    # Both have half the link until one of the two is done: each takes as much longer as the other runs.
    shared_s = np.where(of.crosses, seconds, 0.0)
    busy_s = np.maximum(0, np.repeat(self.parameters.free_s, self.cluster.domain_ranks) - begin_s)
    self.parameters.share(begin_s, shared_s, self.domain_starts)
    return seconds + np.minimum(shared_s, busy_s)

  def _experts(self, times: PlanTimes, of: LayoutTimes, per_token_s: float) -> None:
    if self.costs.expert_ranks > 1:
      self.meet('wait: experts', times.nodes)
    trips = self.costs.expert_round_trips[self.backward]
    self.work('expert exchange', trips * of.expert_exchange_s)
    self.work('experts', of.routed_tokens * per_token_s)
    self.work('expert exchange', trips * of.expert_exchange_s)
    self._count('expert exchange', trips * of.experts.intra, trips * of.experts.inter)

  def _move(self, of: LayoutTimes) -> None:
    if of.move_s is None or of.move is None:
      return
    self.meet('wait: redistribution', of.groups)
    self.work('redistribution', of.move_s)
    self._count('redistribution', of.move.intra, of.move.inter)

  def _count(self, cause: str, intra: np.ndarray, inter: np.ndarray) -> None:
    for total, sent in zip(self.sent[cause], (intra, inter), strict=True):
      total += sent * self.alike

  # --- parameters ---------------------------------------------------------------------------------------

  def _last_s(self) -> np.ndarray:
    """When the last rank of each domain gets here, [domains]."""
    return np.maximum.reduceat(self.clock, self.domain_starts)

  def _begin(self) -> None:
    """Waits for the next layer's parameters, and starts gathering those of the next one to be prefetched."""
    stream = self.parameters
    if not self.cluster.prefetch_layers:
      stream.start_next(self._last_s())
    seconds, done_s = stream.ahead.pop(0)
    self._wait_for(done_s, seconds)
    if self.cluster.prefetch_layers:
      stream.start_next(self._last_s())

  def _reduce(self, reduce_s: float) -> None:
    """Reduces gradients that the last rank has just made; behind the computation, where that is allowed."""
    if not self.cluster.prefetch_layers:
      self._collect(reduce_s)
      return
    self.parameters.free_s = np.maximum(self.parameters.free_s, self._last_s()) + reduce_s

  def _collect(self, seconds: float) -> None:
    """A collective over the domain that every rank waits for."""
    self.parameters.free_s = np.maximum(self.parameters.free_s, self._last_s()) + seconds
    self._wait_for(self.parameters.free_s, seconds)

  def _wait_for(self, done_s: np.ndarray, lasts_s: float) -> None:
    """Every rank waits for its domain's collective; the part while it runs is the parameters' own."""
    repeat = self.cluster.domain_ranks
    missing = np.maximum(0, np.repeat(done_s, repeat) - self.clock)
    own = np.minimum(missing, lasts_s)
    self.add('wait: parameters', missing - own)
    self.add('parameters', own)
