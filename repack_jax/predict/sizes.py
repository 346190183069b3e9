"""Parameters of the model, and the memory that a rank needs: counted from the weights, not measured.

`train.py --dry-run` prints what the compiled program takes, where there is a compiler for the machine.
"""

from __future__ import annotations

from typing import NamedTuple

from repack_jax.config import weights
from repack_jax.config.cluster import ClusterConfig
from repack_jax.config.model import ModelConfig
from repack_jax.config.run import PlannerConfig, allowed_sp_degrees
from repack_jax.plan.plan import CHILDREN, MOST_HALO_HOPS
from repack_jax.plan.wire import DTYPE_BYTES

GRADIENT_BYTES = 4  # of a weight, float32 whatever the compute dtype
# What autodiff keeps of a layer over the operands of its products: a larger config, compiled for H200.
_KEPT_OVER_OPERANDS = 2.6
_STATE_BYTES = 20  # float32 each: weight, two moments, a micro-batch's gradient, the sum of gradients


class Parameters(NamedTuple):
  """Numbers of parameters: of routed experts, and of all else."""

  own: int
  routed: int


def expert_ranks(model: ModelConfig, cluster: ClusterConfig) -> int:
  """Returns the ranks that a layer's experts are spread over; 1 where each has all, or there are none."""
  return cluster.ranks_per_node if model.num_experts and model.expert_placement == 'spread' else 1


def layer_parameters(model: ModelConfig, layer: int) -> Parameters:
  """Returns the parameters of a layer."""
  own = routed = 0
  for weight in weights.leaves(weights.layer(model, layer)):
    own, routed = (own, routed + weight.size) if weight.of_experts else (own + weight.size, routed)
  return Parameters(own, routed)


def table_parameters(model: ModelConfig) -> int:
  """Returns those of one vocabulary table: the embedding, or the logits' where the two are not tied."""
  return weights.vocabulary(model)['embedding'].size


def total_parameters(model: ModelConfig) -> int:
  """Returns the parameters of the model."""
  layers = sum(sum(layer_parameters(model, layer)) for layer in range(model.num_layers))
  return layers + sum(weight.size for weight in weights.leaves(weights.vocabulary(model)))


def rank_bytes(model: ModelConfig, cluster: ClusterConfig, planner: PlannerConfig) -> dict[str, int]:
  """Returns bytes a rank needs at its full capacity, by purpose. An estimate: compilers keep what they like.

  Activations are those that the backward pass reads: with `remat = 'none'` 2.6 times each product's operands,
  with `layer` a layer's input and what the exchanges moved (`layer_and_experts`: those of attention alone),
  plus one layer's own while it is recomputed.
  """
  itemsize = DTYPE_BYTES[model.compute_dtype]
  tokens = planner.capacity_tokens
  degrees = allowed_sp_degrees(cluster, model.wire, planner)
  wire = model.wire.cut(cluster.exchange_chunks).fitted(degrees)
  # What is sent and what arrives; dense exchanges receive at each degree.
  buffers = 1 + (len(degrees) - 1 if cluster.exchange == 'dense' else 1)
  # Elements that a token has: before dispatch, behind it with all peers, and in the core's result.
  operands, result = sum(wire.operand_heads) * wire.head_dim, wire.result_heads * wire.head_dim
  rows = sum(
    max(wire.dispatched(chunk)(degree) * degree for degree in degrees) for chunk in range(wire.chunks)
  )
  rows *= wire.head_dim
  # By halo, keys and values stand once more behind those that a rank gets; not all plans run so.
  halo = _halo_elements(model, planner)
  k = model.experts_per_token if model.num_experts else 0
  received = 2 * k * model.d_model if expert_ranks(model, cluster) > 1 else 0

  def moved(layer: int) -> int:
    """Returns elements of a token behind dispatch, or with its share of a halo."""
    return max(rows, halo.get(model.layer_kinds[layer], 0))

  def all_of(layer: int) -> int:
    """Returns elements a token leaves in a layer that keeps everything."""
    attention = 2 * model.d_model + operands + moved(layer) + 2 * result
    if not model.has_experts(layer):
      return attention + model.d_model + 3 * model.dense_width
    routed = k * (model.d_model + 3 * model.expert_width) + received
    return attention + model.d_model + routed + 3 * model.shared_expert_width

  layers = range(model.num_layers)
  if model.remat == 'none':
    kept = int(_KEPT_OVER_OPERANDS * sum(all_of(layer) for layer in layers))
  else:
    of_experts = received if model.remat == 'layer' else 0
    kept = sum(
      model.d_model + moved(layer) + result + (of_experts if model.has_experts(layer) else 0)
      for layer in layers
    )
    kept += max(all_of(layer) for layer in layers)
  of_layers = [layer_parameters(model, layer) for layer in layers]
  gathered = max(of.own for of in of_layers)
  gathered += max(of.routed for of in of_layers) // expert_ranks(model, cluster)
  table = table_parameters(model)
  # A layer's weights and gradients. Ahead: the next one's weights, and the gradients of the one behind.
  held = 4 if cluster.prefetch_layers else 2
  return {
    'parameters_and_optimizer_bytes': _STATE_BYTES * total_parameters(model) // cluster.domain_ranks,
    'gathered_weights_bytes': (held * gathered + table) * itemsize,
    'whole_gradients_bytes': (gathered + table) * GRADIENT_BYTES,
    'activations_bytes': kept * tokens * itemsize,
    'exchange_buffers_bytes': max(buffers * rows, 2 * received) * tokens * itemsize,
    'logits_bytes': 3 * 4 * tokens * min(model.loss_vocab_chunk, model.vocab_size),
  }


def _halo_elements(model: ModelConfig, planner: PlannerConfig) -> dict[str, int]:
  """Keys and values that a rank works on in a layer by halo, elements a token slot, by letters of kinds."""
  if planner.sparse_exchange == 'ulysses':
    return {}
  tokens, own = planner.capacity_tokens, sum(model.wire.operand_heads[1:]) * model.wire.head_dim
  kinds = {letter: model.kind(letter) for letter in dict.fromkeys(model.layer_kinds)}
  halos = {
    letter: min(kind.halo_tokens, MOST_HALO_HOPS * tokens)
    for letter, kind in kinds.items()
    if kind.layout == CHILDREN and kind.halo_tokens is not None
  }
  return {letter: own * -(-(tokens + halo) // tokens) for letter, halo in halos.items()}
