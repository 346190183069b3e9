"""Parameters of the model, and the memory that a rank needs: counted from the configs, not measured.

`train.py --dry-run` prints what the compiled program takes, where there is a compiler for the machine.
"""

from __future__ import annotations

from repack_jax.config import ModelConfig, PlannerConfig, allowed_sp_degrees
from repack_jax.config.cluster import ClusterConfig

DTYPE_BYTES = {'float32': 4, 'bfloat16': 2}
GRADIENT_BYTES = 4  # of a weight, float32 whatever the compute dtype
_STATE_BYTES = 20  # float32 each: weight, two moments, a micro-batch's gradient, the sum of gradients


def expert_ranks(model: ModelConfig, cluster: ClusterConfig) -> int:
  """Ranks that a layer's experts are spread over; 1 where every rank has them all, or there are none."""
  return cluster.ranks_per_node if model.num_experts and model.expert_placement == 'spread' else 1


def layer_parameters(model: ModelConfig, layer: int) -> tuple[int, int]:
  """Parameters of a layer: (all but routed experts, routed experts)."""
  d = model.d_model
  attention = d * (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
  norms = 2 * d + (2 * model.head_dim if model.qk_norm else 0)
  if not model.has_experts(layer):
    return attention + norms + 3 * d * model.dense_width, 0
  own = d * model.num_experts + 3 * d * model.shared_expert_width
  return attention + norms + own, 3 * model.num_experts * d * model.expert_width


def table_parameters(model: ModelConfig) -> int:
  """Of one vocabulary table: the embedding, or the logits' where the two are not tied."""
  return model.vocab_size * model.d_model


def total_parameters(model: ModelConfig) -> int:
  layers = sum(sum(layer_parameters(model, layer)) for layer in range(model.num_layers))
  return layers + table_parameters(model) * (1 if model.tie_embeddings else 2) + model.d_model


def rank_bytes(model: ModelConfig, cluster: ClusterConfig, planner: PlannerConfig) -> dict[str, int]:
  """Bytes a rank needs at its full capacity, by purpose. An estimate: compilers keep and fuse as they will.

  Activations are those that the backward pass reads: with `remat = 'none'` each product's operands, with
  `layer` a layer's input and what the exchanges moved, plus one layer's own while it is recomputed.
  """
  itemsize = DTYPE_BYTES[model.compute_dtype]
  tokens = planner.capacity_tokens
  widest = allowed_sp_degrees(cluster, model, planner)[-1]
  heads, kv, width = model.num_heads, model.num_kv_heads, model.head_dim
  rows = (heads + 2 * max(kv, widest)) * width  # elements a token has in the heads' layout, all peers
  k = model.experts_per_token if model.num_experts else 0
  received = 2 * k * model.d_model if expert_ranks(model, cluster) > 1 else 0

  def all_of(layer: int) -> int:
    """Elements a token leaves in a layer that keeps everything."""
    attention = 2 * model.d_model + (heads + 2 * kv) * width + rows + 2 * heads * width
    if not model.has_experts(layer):
      return attention + model.d_model + 3 * model.dense_width
    routed = k * (model.d_model + 3 * model.expert_width) + received
    return attention + model.d_model + routed + 3 * model.shared_expert_width

  layers = range(model.num_layers)
  if model.remat == 'none':
    kept = sum(all_of(layer) for layer in layers)
  else:
    exchanged = model.d_model + rows + heads * width
    kept = sum(exchanged + (received if model.has_experts(layer) else 0) for layer in layers)
    kept += max(all_of(layer) for layer in layers)
  own, routed = zip(*(layer_parameters(model, layer) for layer in layers), strict=True)
  gathered = max(own) + max(routed) // expert_ranks(model, cluster)
  return {
    'parameters_and_optimizer_bytes': _STATE_BYTES * total_parameters(model) // cluster.domain_ranks,
    'gathered_weights_bytes': (2 * gathered + table_parameters(model)) * itemsize,
    'whole_gradients_bytes': (gathered + table_parameters(model)) * GRADIENT_BYTES,
    'activations_bytes': kept * tokens * itemsize,
    'exchange_buffers_bytes': 2 * max(rows, received) * tokens * itemsize,
    'logits_bytes': 3 * 4 * tokens * min(model.loss_vocab_chunk, model.vocab_size),
  }
