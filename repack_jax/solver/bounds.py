"""Lower bounds: what no plan of a batch can beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repack_jax.config.run import PlannerConfig
from repack_jax.plan.plan import CHILDREN
from repack_jax.predict.costs import Costs, OfLengths


def compute_bound_s(lengths: np.ndarray, costs: Costs) -> float:
  """Returns seconds of a step's computation, shared evenly by all ranks: no exchanges, padding or waiting."""
  lengths = np.asarray(lengths, np.int64)
  seconds = float(lengths.sum()) * (costs.slot_s + costs.routed_s)
  seconds += float(costs.all_attention_s(lengths).sum())
  return seconds / costs.cluster.num_ranks


def lower_bound_s(lengths: Sequence[int] | np.ndarray, costs: Costs, config: PlannerConfig) -> float:
  """Returns seconds below which no plans of a batch can be, by the simulator or by `predicted_s`, added up.

  Perfect balance of all work, and for each sample the cheapest exchange that its length and the capacity
  allow (none in layers that may run by halo); and nothing is faster than a rank of the slowest sample's
  groups at that sample's best SP degrees. No latencies. Where all ranks meet at each layer, both hold layer
  by layer, which is tighter.
  """
  lengths = np.asarray(lengths, np.int64)
  if not len(lengths):
    return 0.0
  cluster = costs.cluster
  tokens = float(lengths.sum()) / cluster.num_ranks
  both = 1 + costs.linear_backward
  own_s = tokens * costs.slot_s
  of_layer: list[tuple[float, np.ndarray]] = []  # (mean over ranks, each sample's fastest group)
  may_halo = config.sparse_exchange != 'ulysses' and costs.halo_tokens is not None
  for layer in costs.layers:
    by_halo = may_halo and layer.layout == CHILDREN
    mean_s, longest_s = _attention_bounds_s(lengths, costs, config, layer.attention_s, by_halo)
    mean_s += tokens * both * layer.routed_s
    if layer.has_experts:
      expert_bytes = 2 * sum(costs.expert_round_trips) * tokens * costs.expert_bytes_per_token
      mean_s += expert_bytes / cluster.intra_node_bytes_per_s
    of_layer.append((mean_s, longest_s))
  if cluster.prefetch_layers == 0 and cluster.domains == 1:
    return own_s + sum(max(mean_s, float(longest_s.max())) for mean_s, longest_s in of_layer)
  mean_s = sum(mean_s for mean_s, _ in of_layer)
  return own_s + max(mean_s, float(np.sum([longest_s for _, longest_s in of_layer], axis=0).max()))


def _attention_bounds_s(
  lengths: np.ndarray, costs: Costs, config: PlannerConfig, attention_s: OfLengths, by_halo: bool
) -> tuple[float, np.ndarray]:
  """Attention and its exchanges in one layer, both passes: (mean over ranks, each sample's fastest group).

  Args:
    by_halo: whether the layer may run by halo. Then a rank of a group has at least an even share of the
      tokens but one, whatever these cost: nothing is said of the fastest group.
  """
  core_s = (1 + costs.attention_backward) * attention_s(lengths)
  if by_halo:
    return float(core_s.sum()) / costs.cluster.num_ranks, np.zeros(len(lengths))
  cheapest, best = np.full(len(lengths), np.inf), np.full(len(lengths), np.inf)
  for degree in costs.degrees(config):
    fits = lengths <= degree * config.capacity_tokens
    exchange_s = 2 * lengths * costs.exchange_s(degree)
    cheapest = np.where(fits, np.minimum(cheapest, exchange_s), cheapest)
    best = np.where(fits, np.minimum(best, (core_s + exchange_s) / degree), best)
  return float((core_s + cheapest).sum()) / costs.cluster.num_ranks, best
