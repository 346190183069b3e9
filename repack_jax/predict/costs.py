"""`Costs`: what costs what, in seconds of a rank and bytes. All that the planner and the simulator know.

They know nothing of models: `model_costs` (`cost_model.py`) makes the costs of the models here, and a trainer
of another model fills in its own. Everything is of the forward pass of one layer unless it says otherwise; a
token's or a sample's costs are in rank-seconds, which a group shares evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from repack_jax.checks import check_choice, require
from repack_jax.config.cluster import ClusterConfig
from repack_jax.config.run import PlannerConfig, allowed_sp_degrees
from repack_jax.plan.plan import CHILDREN, LAYOUTS, Plan
from repack_jax.plan.program import Program
from repack_jax.plan.wire import Wire

# Two products forward, five backward, since the scores are computed again (Dao et al. 2022).
ATTENTION_BACKWARD_OVER_FORWARD = 2.5

OfLengths = Callable[[np.ndarray], np.ndarray]  # tokens of samples int64 [n] -> float64 [n]


@dataclass(frozen=True)
class LayerCosts:
  """A layer. Raises ConfigError for an unknown layout.

  Attributes:
    layout: `PARENTS` or `CHILDREN`: whose groups run its attention.
    attention_s: seconds of the attention core for whole samples, by their tokens. Layers of one kind should
      share one function: what is the same is computed once.
    before_s: per token, what runs ahead of dispatch.
    after_s: per token, what runs behind combine where the token lies.
    routed_s: per token, its experts, which a node's ranks share where `Costs.expert_ranks` says so.
    has_experts: whether its experts exchange tokens.
    gather_s, reduce_s: collecting its parameters, and summing up their gradients.
    halo_tokens: how many tokens before its own a query sees at most, whatever its sample
      (`LayerKind.halo_tokens`): what a halo has to hold. None for no bound.
  """

  layout: str
  attention_s: OfLengths
  before_s: float = 0.0
  after_s: float = 0.0
  routed_s: float = 0.0
  has_experts: bool = False
  gather_s: float = 0.0
  reduce_s: float = 0.0
  halo_tokens: int | None = None

  def __post_init__(self) -> None:
    check_choice(self, layout=LAYOUTS)


@dataclass(frozen=True)
class Costs:
  """A training step on a cluster. Raises ConfigError where its parts contradict each other.

  Attributes:
    cluster: shape and links.
    wire: what the exchanges of every layer carry; in chunks as `cluster` says, whatever it was given with.
    layers: first to last.
    linear_backward: backward seconds of everything but attention cores and logits over forward ones; 3 where
      the backward pass recomputes the forward one.
    attention_backward: the same for attention cores.
    logits_s: per token, the logits, all passes of a step.
    table_gather_s, table_reduce_s: as those of a layer, of a vocabulary table.
    vocabulary_tables: 2 where the logits have a table of their own, 1 where they share the embedding's.
    expert_ranks: ranks that the experts of a layer are spread over; 1 where each has them all.
    expert_bytes_per_token: what a token sends to experts on other ranks, or gets back.
    expert_round_trips: how often tokens go to the experts of a layer and back, in the forward and the
      backward pass.
    hidden_bytes: of a token's hidden state; what redistribution, which nothing here does, would move.
    data_reduce_s: summing a micro-batch's gradients over domains.
    optimizer_s: the update.
    flops: operations of the forward pass of whole samples, by their tokens; None where MFU is of no interest.
  """

  cluster: ClusterConfig
  wire: Wire
  layers: tuple[LayerCosts, ...]
  linear_backward: float = 2.0
  attention_backward: float = ATTENTION_BACKWARD_OVER_FORWARD
  logits_s: float = 0.0
  table_gather_s: float = 0.0
  table_reduce_s: float = 0.0
  vocabulary_tables: int = 2
  expert_ranks: int = 1
  expert_bytes_per_token: float = 0.0
  expert_round_trips: tuple[int, int] = (1, 1)
  hidden_bytes: float = 0.0
  data_reduce_s: float = 0.0
  optimizer_s: float = 0.0
  flops: OfLengths | None = None

  def __post_init__(self) -> None:
    node_ranks = self.cluster.ranks_per_node
    object.__setattr__(self, 'wire', self.wire.cut(self.cluster.exchange_chunks))
    require(bool(self.layers), 'Costs.layers', self.layers, 'name at least one layer')
    require(
      self.expert_ranks in (1, node_ranks), 'Costs.expert_ranks', self.expert_ranks,
      f'must be 1, or all ranks of a node: ClusterConfig.ranks_per_node = {node_ranks}',
    )  # fmt: skip
    require(
      self.expert_ranks > 1 or self.expert_bytes_per_token == 0, 'Costs.expert_bytes_per_token',
      self.expert_bytes_per_token, 'must be 0 with Costs.expert_ranks = 1: no expert is on another rank',
    )  # fmt: skip

  def degrees(self, planner: PlannerConfig) -> tuple[int, ...]:
    """Returns the SP degrees that heads, mesh and planner all allow, ascending; 1 is always among them."""
    return allowed_sp_degrees(self.cluster, self.wire, planner)

  @cached_property
  def sorts(self) -> dict[LayerCosts, int]:
    """Returns each sort of layer, and how many there are, in the order of their first layers."""
    return dict(Counter(self.layers))

  @cached_property
  def halo_tokens(self) -> int | None:
    """Returns the tokens of the longest halo of the layers in the children's layout.

    None where one of them has no bound, or there are none: these layers can't run by halo.
    """
    needed = [layer.halo_tokens for layer in self.layers if layer.layout == CHILDREN]
    bounded = [tokens for tokens in needed if tokens is not None]
    return max(bounded) if bounded and len(bounded) == len(needed) else None

  def layers_in(self, layout: str) -> int:
    """Returns how many layers run in a layout."""
    return sum(layer.layout == layout for layer in self.layers)

  def attention_s(self, lengths: np.ndarray, layout: str) -> np.ndarray:
    """Returns seconds of the attention core of samples, float64 [n]: the mean over the layers of a layout."""
    kinds = Counter(layer.attention_s for layer in self.layers if layer.layout == layout)
    total = np.zeros(len(lengths))
    for attention_s, count in kinds.items():
      total += attention_s(lengths) * (count / kinds.total())
    return total

  def all_attention_s(self, lengths: np.ndarray) -> np.ndarray:
    """Returns seconds of the attention cores of samples, float64 [n]: all layers, both passes."""
    both = 1 + self.attention_backward
    return sum(
      (both * self.layers_in(layout) * self.attention_s(lengths, layout) for layout in LAYOUTS),
      np.zeros(len(lengths)),
    )

  @cached_property
  def slot_s(self) -> float:
    """Returns seconds per token slot of a rank, both passes: what runs where a token lies, and the logits."""
    layers_s = sum(layer.before_s + layer.after_s for layer in self.layers)
    return (1 + self.linear_backward) * layers_s + self.logits_s

  @cached_property
  def routed_s(self) -> float:
    """Returns seconds per token, both passes, of its experts in all layers."""
    return (1 + self.linear_backward) * sum(layer.routed_s for layer in self.layers)

  @property
  def shown_parameters_s(self) -> float:
    """Returns seconds of a micro-batch's collectives of parameters that nothing hides."""
    first_and_last_s = self.table_gather_s + self.data_reduce_s
    if self.cluster.prefetch_layers:
      return first_and_last_s
    tables_s = (self.vocabulary_tables - 1) * (
      self.table_gather_s + self.table_reduce_s
    ) + self.table_reduce_s
    return first_and_last_s + tables_s + sum(2 * layer.gather_s + layer.reduce_s for layer in self.layers)

  # --- links --------------------------------------------------------------------------------------------

  def exchange_s(self, degree: int) -> float:
    """Returns seconds per token of a rank in a balanced group: the exchanges of a layer, without latency.

    In chunks those of the first dispatch and the last combine, as if the core hid all others.
    """
    heads = sum(self.wire.shown_heads(degree))
    return self._peers_s(degree, float(heads * self.wire.head_dim * self.wire.itemsize))

  def dense_site_s(self, degree: int, heads: int) -> float:
    """Returns seconds of the all-to-all of one SP degree in a site of a dense exchange, latency included.

    Args:
      heads: that a rank sends to each of its group: its slots times heads of each.
    """
    sent = heads * self.wire.head_dim * self.wire.itemsize
    return float(self.site_latency_s(degree)) + self._peers_s(degree, sent)

  def _peers_s(self, degree: int, peer_bytes: float) -> float:
    """Seconds in which a rank sends so many bytes to each other one of its group, without latency."""
    cluster = self.cluster
    in_node = min(degree, cluster.ranks_per_node)
    return max(
      (in_node - 1) * peer_bytes / cluster.intra_node_bytes_per_s,
      (degree - in_node) * peer_bytes / cluster.inter_node_bytes_per_s,
    )

  def site_latency_s(self, ranks: np.ndarray | int) -> np.ndarray:
    """Returns seconds of one exchange between so many ranks, however little it moves; 0 for one alone.

    Args:
      ranks: those that it addresses (`ClusterConfig.exchange_meets`), any shape.
    """
    cluster, ranks = self.cluster, np.asarray(ranks)
    wide = ranks > cluster.ranks_per_node
    latency_s = np.where(wide, cluster.inter_node_latency_s, cluster.intra_node_latency_s)
    return np.where(ranks > 1, latency_s + (ranks - 1) * cluster.peer_latency_s, 0.0)

  def cross_node_bytes(self, plan: Plan, program: Program | None = None) -> int:
    """Returns bytes that the attention exchanges of all layers send between nodes, both passes, all ranks.

    An aligned group of P ranks covers whole nodes or lies in one, so each token has
    `max(0, P - ranks_per_node)` peers in other nodes. Exchanges of spread experts never leave a node.

    Args:
      program: what runs the plan; by default one made for it.
    """
    program = program or Program.of_plan(plan)
    total = 0
    for layer, count in self.sorts.items():
      if (halo_slots := program.halo_slots(layer.layout, layer.halo_tokens)) is not None:
        _, across = halo_peers(plan, program)
        sent = across * self.halo_bytes(program, halo_slots)
      else:
        placement = plan.placement(layer.layout)
        _, sent = self.exchange_bytes(program, layer.layout, placement.slots, placement.size)
      total += 2 * count * sum(map(int, sent.tolist()))  # which can't wrap around
    return total

  def exchange_bytes(
    self, program: Program, layout: str, slots: np.ndarray, degree: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes that each rank sends at both sites of a layer: (inside its node, to other nodes).

    One pass; float64 [num_ranks] each. A dense exchange sends all slots at each degree that the program
    knows.

    Args:
      slots: that each rank holds of its group's stream, [num_ranks].
      degree: SP degree of each rank's group, [num_ranks].
    """
    of_degrees = [(slots, degree)]
    if self.cluster.exchange == 'dense':
      all_slots = np.full(len(slots), program.capacity_tokens)
      of_degrees = [(all_slots, np.full(len(slots), known)) for known in program.degrees(layout)]
    near, across = np.zeros(len(slots)), np.zeros(len(slots))
    for sent, size in of_degrees:
      local = np.minimum(size, self.cluster.ranks_per_node)
      peer_bytes = sent.astype(np.float64) * self.wire.bytes_per_peer(size)
      near, across = near + peer_bytes * (local - 1), across + peer_bytes * (size - local)
    return near, across

  def halo_bytes(self, program: Program, halo_slots: int) -> int:
    """Returns what a rank sends in one hop of a halo of so many slots: static, whatever it holds."""
    return min(halo_slots, program.capacity_tokens) * self.wire.halo_bytes


def halo_peers(plan: Plan, program: Program, ahead: bool = False) -> tuple[np.ndarray, np.ndarray]:
  """Returns with how many ranks of its node, and of other nodes, each shares a halo: int64 [num_ranks] each.

  A rank shifts its last tokens to the next `halo_hops` of the program's span, whether these are of its group
  or not.

  Args:
    ahead: those that it gets from, rather than those that it sends to.
  """
  span, rank = program.span(CHILDREN), np.arange(plan.num_ranks)
  near, across = np.zeros(plan.num_ranks, np.int64), np.zeros(plan.num_ranks, np.int64)
  for hop in range(1, program.halo_hops + 1):
    peer = rank - hop if ahead else rank + hop
    inside = peer // span == rank // span
    crosses = rank // plan.ranks_per_node != peer // plan.ranks_per_node
    near += inside & ~crosses
    across += inside & crosses
  return near, across


def link_s(
  cluster: ClusterConfig,
  intra_bytes: np.ndarray | float,
  inter_bytes: np.ndarray | float,
  crosses: np.ndarray | bool,
) -> np.ndarray:
  """Returns seconds of a transfer of so many bytes a rank over both links at once.

  The latency is that of the slower link used.
  """
  latency_s = np.where(crosses, cluster.inter_node_latency_s, cluster.intra_node_latency_s)
  return latency_s + np.maximum(
    intra_bytes / cluster.intra_node_bytes_per_s, inter_bytes / cluster.inter_node_bytes_per_s
  )
