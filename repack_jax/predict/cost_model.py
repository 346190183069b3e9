"""Predicted seconds and exact bytes of the parts of a layer, from the model's and the cluster's configs.

Everything is of the forward pass of one layer unless it says otherwise; `ATTENTION_BACKWARD_OVER_FORWARD` and
`CostModel.linear_backward` say what the backward pass takes. The planner and the simulator reckon with these;
the byte counts are also what the metrics report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from repack_jax.checks import require
from repack_jax.config import FULL, SPARSE, ModelConfig, PlannerConfig, allowed_sp_degrees
from repack_jax.config.cluster import ClusterConfig
from repack_jax.plan.plan import Plan
from repack_jax.predict import flops
from repack_jax.predict.sizes import (
  DTYPE_BYTES,
  GRADIENT_BYTES,
  expert_ranks,
  layer_parameters,
  table_parameters,
  total_parameters,
)

# Two products forward, five backward, since the scores are computed again (Dao et al. 2022).
ATTENTION_BACKWARD_OVER_FORWARD = 2.5
# AdamW reads a weight, its gradient and two moments, and writes all but the gradient; float32 each.
_UPDATE_BYTES_PER_PARAMETER = 28
PADDED_ROW_BYTES = 512  # a TPU pads the rows of a ragged all-to-all to this (compiled for v5p, v6e and v7)


def heads_per_peer(model: ModelConfig, degree: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
  """Heads a token sends to each rank of its group: (dispatch: q, k and v; combine), int64 [...]."""
  degree = np.asarray(degree, np.int64)
  query = model.num_heads // degree
  return query + 2 * np.maximum(1, model.num_kv_heads // degree), query


def bytes_per_peer(model: ModelConfig, degree: np.ndarray | int) -> np.ndarray:
  """Bytes a token sends to one rank of its group in both sites of a layer, forward pass."""
  dispatch, combine = heads_per_peer(model, degree)
  return (dispatch + combine) * model.head_dim * DTYPE_BYTES[model.compute_dtype]


def row_tokens(cluster: ClusterConfig, model: ModelConfig, planner: PlannerConfig) -> int:
  """Ranks of a child hold multiples of so many slots: 1, but on TPU as many as fill whole rows on the wire.

  The smallest power of two for which what so many tokens send to a peer is a multiple of 512 bytes, at every
  SP degree and both sites.

  Raises:
    ConfigError: where the capacity is not a multiple of it.
  """
  if cluster.platform != 'tpu':
    return 1
  degrees = np.array(allowed_sp_degrees(cluster, model, planner))
  head_bytes = model.head_dim * DTYPE_BYTES[model.compute_dtype]
  sent = np.concatenate(heads_per_peer(model, degrees)) * head_bytes
  common = math.gcd(*sent.tolist(), PADDED_ROW_BYTES)  # a power of two, since 512 is one
  row = PADDED_ROW_BYTES // common
  require(
    planner.capacity_tokens % row == 0, 'PlannerConfig.capacity_tokens', planner.capacity_tokens,
    f'must be a multiple of {row}, so that what a rank of a TPU sends fills rows of {PADDED_ROW_BYTES} bytes',
  )  # fmt: skip
  return row


def cross_node_bytes(plan: Plan, model: ModelConfig) -> int:
  """Bytes that the attention exchanges of all layers send between nodes, forward and backward, all ranks.

  An aligned group of P ranks covers whole nodes or lies in one, so each token has
  `max(0, P - ranks_per_node)` peers in other nodes. Exchanges of spread experts never leave a node.
  """
  total = 0
  for kind in (FULL, SPARSE):
    layers = model.layer_kinds.count(kind)
    layout = plan.layout(kind)
    peers = np.maximum(0, layout.size - plan.ranks_per_node)
    total += 2 * layers * int((layout.slots * peers * bytes_per_peer(model, layout.size)).sum())
  return total


@dataclass(frozen=True)
class CostModel:
  """Seconds on one rank. What a token or a sample costs is in rank-seconds: a group shares it evenly."""

  cluster: ClusterConfig
  model: ModelConfig

  @cached_property
  def expert_ranks(self) -> int:
    return expert_ranks(self.model, self.cluster)

  @cached_property
  def linear_backward(self) -> float:
    """Backward seconds of linear work over forward ones; recomputation runs the forward pass again."""
    return 2.0 + (self.model.remat == 'layer')

  # --- computation --------------------------------------------------------------------------------------

  def before_s(self) -> float:
    """Per token: what runs ahead of dispatch, that is the query, key and value projections."""
    return flops.qkv_flops_per_token(self.model) / self.cluster.matmul_flops_per_s

  def after_s(self, layer: int) -> float:
    """Per token: what runs behind combine where the token lies, that is all but the routed experts."""
    own = flops.output_flops_per_token(self.model) + flops.own_feed_forward_flops_per_token(self.model, layer)
    return own / self.cluster.matmul_flops_per_s

  def routed_s(self, layer: int) -> float:
    """Per token: its chosen experts."""
    return flops.routed_flops_per_token(self.model, layer) / self.cluster.matmul_flops_per_s

  def logits_s(self) -> float:
    """Per token: the logits."""
    return flops.logits_flops_per_token(self.model) / self.cluster.matmul_flops_per_s

  def slot_s(self) -> float:
    """Per token slot of a rank, both passes: what runs where the token lies in all layers, and the logits."""
    layers_s = sum(self.before_s() + self.after_s(layer) for layer in range(self.model.num_layers))
    return (1 + self.linear_backward) * layers_s + 3 * self.logits_s()

  def attention_s(self, length: np.ndarray | int, kind: str) -> np.ndarray:
    """Per sample: the attention core of a layer."""
    return flops.attention_flops(self.model, length, kind) / self.cluster.attention_flops_per_s

  def optimizer_s(self) -> float:
    """The update of a rank's shards of all parameters."""
    shard = total_parameters(self.model) / self.cluster.domain_ranks
    return shard * _UPDATE_BYTES_PER_PARAMETER / self.cluster.memory_bytes_per_s

  # --- links --------------------------------------------------------------------------------------------

  def link_s(
    self, intra_bytes: np.ndarray | float, inter_bytes: np.ndarray | float, crosses: np.ndarray | bool
  ) -> np.ndarray:
    """A transfer of so many bytes a rank over both links at once, and the latency of the slower one used."""
    cluster = self.cluster
    latency_s = np.where(crosses, cluster.inter_node_latency_s, cluster.intra_node_latency_s)
    return latency_s + np.maximum(
      intra_bytes / cluster.intra_node_bytes_per_s, inter_bytes / cluster.inter_node_bytes_per_s
    )

  def exchange_s(self, degree: int) -> float:
    """Per token of a rank in a balanced group: both exchanges of a layer, without latency."""
    in_node = min(degree, self.cluster.ranks_per_node)
    sent = float(bytes_per_peer(self.model, degree))
    return max(
      (in_node - 1) * sent / self.cluster.intra_node_bytes_per_s,
      (degree - in_node) * sent / self.cluster.inter_node_bytes_per_s,
    )

  def exchange_latency_s(self, degree: int) -> float:
    """Both exchanges of a layer, however little they move."""
    if degree == 1:
      return 0.0
    cluster = self.cluster
    wide = degree > cluster.ranks_per_node
    return 2 * (cluster.inter_node_latency_s if wide else cluster.intra_node_latency_s)

  def expert_bytes_per_token(self) -> float:
    """Bytes a token sends to the experts of other ranks (or receives from them) under an even router."""
    row = self.model.d_model * DTYPE_BYTES[self.model.compute_dtype]
    return self.model.experts_per_token * row * (1 - 1 / self.expert_ranks)

  # --- parameters ---------------------------------------------------------------------------------------

  def _collective_s(self, whole: float, spread: float) -> float:
    """Gathering (or reduce-scattering) `whole` bytes over the domain and `spread` bytes over the nodes.

    Every node takes in what the others hold, over the links of all its ranks at once; of spread experts a
    rank takes in its own only.
    """
    nodes, local = self.cluster.nodes, self.cluster.ranks_per_node
    inter = (whole + spread) / local * (nodes - 1) / nodes
    intra = whole * (local - 1) / local + (0 if self.expert_ranks > 1 else spread * (local - 1) / local)
    if self.cluster.domain_ranks == 1:
      return 0.0
    return float(self.link_s(intra, inter, nodes > 1))

  def gather_s(self, layer: int) -> float:
    """A layer's parameters in the compute dtype, from their shards."""
    itemsize = DTYPE_BYTES[self.model.compute_dtype]
    own, routed = layer_parameters(self.model, layer)
    return self._collective_s(own * itemsize, routed * itemsize)

  def reduce_s(self, layer: int) -> float:
    """A layer's gradients in float32, to their shards."""
    own, routed = layer_parameters(self.model, layer)
    return self._collective_s(own * GRADIENT_BYTES, routed * GRADIENT_BYTES)

  def table_s(self) -> tuple[float, float]:
    """(gathering, reducing) a vocabulary table."""
    parameters, itemsize = table_parameters(self.model), DTYPE_BYTES[self.model.compute_dtype]
    return self._collective_s(parameters * itemsize, 0), self._collective_s(parameters * GRADIENT_BYTES, 0)

  def data_reduce_s(self) -> float:
    """A micro-batch's gradients summed over domains: a ring all-reduce of each rank's shards."""
    domains = self.cluster.domains
    if domains == 1:
      return 0.0
    shard = total_parameters(self.model) / self.cluster.domain_ranks * GRADIENT_BYTES
    return self.cluster.inter_node_latency_s + (
      2 * shard * (domains - 1) / domains / self.cluster.inter_node_bytes_per_s
    )
