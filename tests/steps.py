"""Small clusters, models and plans whose steps can be worked by hand: what the simulator's tests share."""

from __future__ import annotations

import dataclasses

import cases
import numpy as np

from repack_jax.config import ClusterConfig, ModelConfig
from repack_jax.kinds import SlidingWindowAttention
from repack_jax.plan.plan import LAYOUTS, Group, Plan
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.costs import Costs

MODEL = ModelConfig(
  vocab_size=256, d_model=8, num_layers=4, pattern='FSSS', num_heads=16, num_kv_heads=4, head_dim=2,
  num_experts=4, experts_per_token=2, expert_width=16, shared_expert_width=4, dense_layers=1,
  dense_width=24,
).with_kind(SlidingWindowAttention(window_tokens=3))  # fmt: skip
MODELS = {
  'experts': MODEL,
  'no remat': dataclasses.replace(MODEL, remat='none'),
  'replicated': dataclasses.replace(MODEL, expert_placement='replicated', dense_layers=0),
  'dense': dataclasses.replace(MODEL, num_experts=0, tie_embeddings=True, pattern='FS'),
  'windows only': dataclasses.replace(MODEL, pattern='S', num_layers=3, remat='none'),
  'full only': dataclasses.replace(MODEL, pattern='F', num_layers=2, compute_dtype='bfloat16'),
}
DENSE = dataclasses.replace(MODEL, num_layers=2, pattern='FS', num_experts=0)
# Rates at which computation, both links and the latencies all matter.
RATES = {
  'matmul_flops_per_s': 2e6, 'attention_flops_per_s': 1e6, 'intra_node_bytes_per_s': 4e5,
  'inter_node_bytes_per_s': 1e5, 'intra_node_latency_s': 1e-4, 'inter_node_latency_s': 3e-4,
  'memory_bytes_per_s': 1e7, 'peak_flops_per_s': 4e6,
}  # fmt: skip
MESHES = {  # name: (domains, nodes, ranks a node)
  'a node': (1, 1, 8),
  'two nodes': (1, 2, 4),
  'four nodes': (1, 4, 4),
  'two domains': (2, 2, 2),
}


def costs_of(mesh: str | tuple[int, int, int], model: ModelConfig = MODEL, **changes: object) -> Costs:
  """At `RATES`, but for the changes."""
  domains, nodes, ranks_per_node = MESHES[mesh] if isinstance(mesh, str) else mesh
  shape = {'nodes': nodes, 'ranks_per_node': ranks_per_node, 'domains': domains}
  return model_costs(ClusterConfig(**(shape | RATES | changes)), model)


def random_plan(
  cluster: ClusterConfig, seed: int, solo: float = 0.0, wide_children: float = 0.2, row_tokens: int = 1
) -> Plan:
  return cases.random_plan(
    np.random.default_rng(seed), cluster.num_ranks, 12, 16, cluster.ranks_per_node, cluster.domain_ranks,
    solo=solo, wide_children=wide_children, row_tokens=row_tokens,
  )  # fmt: skip


def plan_of(
  lengths: list[int], parents: list[Group], children: list[Group], cluster: ClusterConfig, capacity: int = 16
) -> Plan:
  return Plan(
    tuple(range(len(lengths))), tuple(lengths), tuple(parents), tuple(children), 'repack', capacity,
    cluster.num_ranks, cluster.domain_ranks, cluster.ranks_per_node,
  ).validate()  # fmt: skip


def cores_s(costs: Costs, *lengths: int) -> dict[str, float]:
  """Seconds of the attention core of these samples, forward pass, in a layer of each layout."""
  return {layout: float(costs.attention_s(np.array(lengths), layout).sum()) for layout in LAYOUTS}


def computed_s(costs: Costs, slots: int, tokens: int, attention_s: dict[str, float]) -> float:
  """A rank's computation in a step, with these forward seconds of its attention in a layer of each layout."""
  seconds = slots * costs.logits_s + costs.optimizer_s
  for layer in costs.layers:
    own = slots * (layer.before_s + layer.after_s) + tokens * layer.routed_s
    seconds += (1 + costs.linear_backward) * own + 3.5 * attention_s[layer.layout]
  return seconds


def parameters_s(costs: Costs) -> float:
  """A micro-batch's parameter collectives one after the other: gathered twice, for each pass, and reduced."""
  layers = sum(2 * layer.gather_s + layer.reduce_s for layer in costs.layers)
  return layers + costs.vocabulary_tables * (costs.table_gather_s + costs.table_reduce_s)
