"""Lower bounds: what no plan of a batch can beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repack_jax.config import FULL, SPARSE, ModelConfig, PlannerConfig, allowed_sp_degrees
from repack_jax.config.cluster import ClusterConfig
from repack_jax.predict import flops
from repack_jax.predict.cost_model import ATTENTION_BACKWARD_OVER_FORWARD, CostModel


def compute_bound_s(lengths: np.ndarray, cluster: ClusterConfig, model: ModelConfig) -> float:
  """Seconds of a step's computation shared evenly by all ranks, with no communication, padding or waiting."""
  cost = CostModel(cluster, model)
  lengths = np.asarray(lengths, np.int64)
  linear = flops.linear_flops_per_token(model) - flops.logits_flops_per_token(model)
  seconds = float(lengths.sum()) * (
    (1 + cost.linear_backward) * linear / cluster.matmul_flops_per_s + 3 * cost.logits_s()
  )
  for kind in model.layer_kinds:
    seconds += (1 + ATTENTION_BACKWARD_OVER_FORWARD) * float(cost.attention_s(lengths, kind).sum())
  return seconds / cluster.num_ranks


def lower_bound_s(
  lengths: Sequence[int] | np.ndarray, cluster: ClusterConfig, model: ModelConfig, config: PlannerConfig
) -> float:
  """Seconds below which no plans of a batch can be, by the simulator or by `timing.predicted_s`, added up.

  Perfect balance of all work, and for each sample the cheapest exchange that its length and the capacity
  allow; and nothing is faster than a rank of the slowest sample's groups at that sample's best SP degrees. No
  latencies. Where all ranks meet at each layer, both hold layer by layer, which is tighter.
  """
  lengths = np.asarray(lengths, np.int64)
  if not len(lengths):
    return 0.0
  cost = CostModel(cluster, model)
  tokens = float(lengths.sum()) / cluster.num_ranks
  both = 1 + cost.linear_backward
  own_s = tokens * cost.slot_s()
  attention = {kind: _attention_bounds_s(lengths, cost, config, kind) for kind in (FULL, SPARSE)}
  mean_s, longest_s = np.zeros(model.num_layers), np.zeros((model.num_layers, len(lengths)))
  for layer, kind in enumerate(model.layer_kinds):
    mean_s[layer], longest_s[layer] = attention[kind]
    mean_s[layer] += tokens * both * cost.routed_s(layer)
    if model.has_experts(layer):
      mean_s[layer] += 4 * tokens * cost.expert_bytes_per_token() / cluster.intra_node_bytes_per_s
  if cluster.prefetch_layers == 0 and cluster.domains == 1:
    return own_s + float(np.maximum(mean_s, longest_s.max(axis=1)).sum())
  return own_s + max(float(mean_s.sum()), float(longest_s.sum(axis=0).max()))


def _attention_bounds_s(
  lengths: np.ndarray, cost: CostModel, config: PlannerConfig, kind: str
) -> tuple[float, np.ndarray]:
  """Attention and its exchanges in one layer, both passes: (mean over ranks, each sample's fastest group)."""
  core_s = (1 + ATTENTION_BACKWARD_OVER_FORWARD) * cost.attention_s(lengths, kind)
  cheapest, best = np.full(len(lengths), np.inf), np.full(len(lengths), np.inf)
  for degree in allowed_sp_degrees(cost.cluster, cost.model, config):
    fits = lengths <= degree * config.capacity_tokens
    exchange_s = 2 * lengths * cost.exchange_s(degree)
    cheapest = np.where(fits, np.minimum(cheapest, exchange_s), cheapest)
    best = np.where(fits, np.minimum(best, (core_s + exchange_s) / degree), best)
  return float((core_s + cheapest).sum()) / cost.cluster.num_ranks, best
