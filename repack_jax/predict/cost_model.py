"""The costs of the models here, from their configs: one maker of `Costs`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from repack_jax.config import weights
from repack_jax.config.cluster import ClusterConfig
from repack_jax.config.model import ModelConfig
from repack_jax.kinds import LayerKind
from repack_jax.plan.wire import DTYPE_BYTES, Wire
from repack_jax.predict import flops
from repack_jax.predict.costs import Costs, LayerCosts
from repack_jax.predict.sizes import (
  GRADIENT_BYTES,
  expert_ranks,
  layer_parameters,
  table_parameters,
  total_parameters,
)

# AdamW reads a weight, its gradient and two moments, and writes all but the gradient; float32 each.
_UPDATE_BYTES_PER_PARAMETER = 28


@dataclass(frozen=True)
class _AttentionSeconds:
  """Seconds of a kind's attention core for whole samples. Equal for layers of one kind, unlike a closure."""

  kind: LayerKind
  wire: Wire
  flops_per_s: float
  curve: tuple[tuple[float, ...], ...]

  def __call__(self, lengths: np.ndarray) -> np.ndarray:
    seconds = self.kind.flops(self.wire, lengths) / self.flops_per_s
    if not self.curve:
      return seconds
    tokens, share = np.array(self.curve).T
    return seconds / np.interp(np.log(lengths), np.log(tokens), share)


def model_costs(cluster: ClusterConfig, model: ModelConfig) -> Costs:
  """Returns the costs of a step of the model, by the rates of the cluster.

  Products take their operations over `matmul_flops_per_s`, attention cores theirs over
  `attention_flops_per_s`, parameter collectives and the update their bytes over the links and the memory.
  As in `parallel/sharded.py`, small weights of a layer share a collective, and large ones have their own.
  """
  itemsize, spread = DTYPE_BYTES[model.compute_dtype], expert_ranks(model, cluster)
  matmul = cluster.matmul_flops_per_s

  def collective_s(own: float, routed: float, table: weights.Table) -> float:
    keyed = [
      ((spread > 1 and weight.of_experts, weight.dtype(model.compute_dtype)), weight)
      for weight in weights.leaves(table)
    ]
    over_nodes = [keyed[bundle[0]][0] for bundle in weights.bundles(keyed)]
    inside = sum(not apart for apart, _ in over_nodes)
    return _collective_s(cluster, spread > 1, own, routed, len(over_nodes), inside)

  def layer_costs(layer: int) -> LayerCosts:
    kind = model.kind(model.layer_kinds[layer])
    own, routed = layer_parameters(model, layer)
    table = weights.layer(model, layer)
    behind = flops.output_flops_per_token(model) + flops.own_feed_forward_flops_per_token(model, layer)
    return LayerCosts(
      layout=kind.layout,
      attention_s=_AttentionSeconds(kind, model.wire, cluster.attention_flops_per_s, cluster.attention_curve),
      before_s=flops.qkv_flops_per_token(model) / matmul,
      after_s=behind / matmul,
      routed_s=flops.routed_flops_per_token(model, layer) / matmul,
      has_experts=model.has_experts(layer),
      gather_s=collective_s(own * itemsize, routed * itemsize, table),
      reduce_s=collective_s(own * GRADIENT_BYTES, routed * GRADIENT_BYTES, table),
      halo_tokens=kind.halo_tokens,
    )

  hidden_bytes = model.d_model * itemsize
  table, shard = table_parameters(model), total_parameters(model) / cluster.domain_ranks
  embedding = {'embedding': weights.vocabulary(model)['embedding']}
  return Costs(
    cluster=cluster,
    wire=model.wire,
    layers=tuple(layer_costs(layer) for layer in range(model.num_layers)),
    linear_backward=flops.layer_passes(model) - 1.0,
    logits_s=flops.LOGITS_PASSES * (flops.logits_flops_per_token(model) / matmul),
    table_gather_s=collective_s(table * itemsize, 0, embedding),
    table_reduce_s=collective_s(table * GRADIENT_BYTES, 0, embedding),
    vocabulary_tables=1 if model.tie_embeddings else 2,
    expert_ranks=spread,
    expert_bytes_per_token=model.experts_per_token * hidden_bytes * (1 - 1 / spread),
    expert_round_trips=model.expert_round_trips,
    hidden_bytes=hidden_bytes,
    data_reduce_s=_data_reduce_s(cluster, shard * GRADIENT_BYTES),
    optimizer_s=shard * _UPDATE_BYTES_PER_PARAMETER / cluster.memory_bytes_per_s,
    flops=lambda lengths: flops.sample_flops(model, lengths),
  )


def _collective_s(
  cluster: ClusterConfig, experts_spread: bool, own: float, routed: float, over_nodes: int, inside: int
) -> float:
  """Seconds to gather (or reduce-scatter) `own` bytes over the domain, and `routed` bytes of experts.

  One mesh axis after the other: over the nodes, in so many collectives, a rank takes in its own share of what
  the others hold; then over the ranks of a node all the rest. Of spread experts it has its own by then.
  """
  nodes, local = cluster.nodes, cluster.ranks_per_node
  intra_rate, inter_rate = cluster.parameter_rates
  seconds = 0.0
  if nodes > 1:
    seconds += over_nodes * cluster.inter_node_latency_s
    seconds += (own + routed) / local * (nodes - 1) / nodes / inter_rate
  if local > 1:
    seconds += inside * cluster.intra_node_latency_s
    seconds += (own + (0 if experts_spread else routed)) * (local - 1) / local / intra_rate
  return seconds


def _data_reduce_s(cluster: ClusterConfig, shard_bytes: float) -> float:
  """A ring all-reduce of each rank's shards over the domains."""
  domains = cluster.domains
  if domains == 1:
    return 0.0
  return cluster.inter_node_latency_s + (
    2 * shard_bytes * (domains - 1) / domains / cluster.parameter_rates[1]
  )
