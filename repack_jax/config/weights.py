"""The weights of the decoder that `ModelConfig` describes: of each, all there is to say. Imports without JAX.

Tables are nested dictionaries of the same structure as the modules that hold the weights, which are made from
them. Sizes, operations, shardings, dtypes and weight decay all follow from these. The model's parameters are
stacked along leading axes where layers are alike; a table's shapes are of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from repack_jax.config.model import ModelConfig

Table = dict[str, Any]  # of weights, or of tables

# Weights of up to so many parameters travel in one buffer: at the bandwidths of memories and links of today,
# copying one there takes no longer than the latencies that this saves.
MOST_BUNDLED = 2**23


@dataclass(frozen=True)
class Weight:
  """A weight, or all of its kind in layers that are alike.

  Attributes:
    shape: of one layer.
    init_std: standard deviation of its initial values, which are normal around 0; None: they are ones.
    of_experts: its first dimension is experts, which may be spread over the ranks of a node.
    is_float32: small, and used in float32 whatever the compute dtype.
    is_decayed: weight decay applies to it.
  """

  shape: tuple[int, ...]
  init_std: float | None = None
  of_experts: bool = False
  is_float32: bool = False
  is_decayed: bool = True

  @property
  def size(self) -> int:
    """Returns its number of parameters in one layer."""
    return math.prod(self.shape)

  def dtype(self, compute_dtype: str) -> str:
    """Returns what it is used in."""
    return 'float32' if self.is_float32 else compute_dtype


def leaves(table: Table) -> Iterator[Weight]:
  """Yields the weights of a table, in its order."""
  for entry in table.values():
    if isinstance(entry, Weight):
      yield entry
    else:
      yield from leaves(entry)


def bundles(of: Sequence[tuple[Hashable, Weight]]) -> list[list[int]]:
  """Returns which weights of a layer are gathered, and their gradients reduced, as one buffer: their places.

  Small ones with equal keys go together, and each other one by itself.

  Args:
    of: for each weight a key of what must be equal, such as the dtype, and the weight.
  """
  found: dict[Hashable, list[int]] = {}
  for place, (key, weight) in enumerate(of):
    found.setdefault((key, None if weight.size <= MOST_BUNDLED else place), []).append(place)
  return list(found.values())


def norm(width: int) -> Table:
  """Returns the scale of a norm."""
  return {'scale': Weight((width,), is_float32=True, is_decayed=False)}


def gated_mlp(d_model: int, width: int, std: float, out_std: float) -> Table:
  """Returns the weights of `down(silu(gate(x)) * up(x))`."""
  up = Weight((d_model, width), std)
  return {'gate': up, 'up': up, 'down': Weight((width, d_model), out_std)}


def attention(model: ModelConfig) -> Table:
  """Returns the weights of an attention block."""
  heads, kv, width = model.num_heads, model.num_kv_heads, model.head_dim
  key = Weight((model.d_model, kv * width), model.init_std)
  table: Table = {
    'query': Weight((model.d_model, heads * width), model.init_std),
    'key': key,
    'value': key,
    'out': Weight((heads * width, model.d_model), _out_std(model)),
  }
  if model.qk_norm:
    table |= {'query_norm': norm(width), 'key_norm': norm(width)}
  return table


def experts(model: ModelConfig) -> Table:
  """Returns the weights of a router, its experts, and a shared expert where there is one."""
  e, d, f = model.num_experts, model.d_model, model.expert_width
  up = Weight((e, d, f), model.init_std, of_experts=True)
  table: Table = {
    'router': Weight((d, e), model.init_std, is_float32=True),
    'expert_gate': up,
    'expert_up': up,
    'expert_down': Weight((e, f, d), _out_std(model), of_experts=True),
  }
  if model.shared_expert_width:
    table['shared'] = gated_mlp(d, model.shared_expert_width, model.init_std, _out_std(model))
  return table


def layer(model: ModelConfig, index: int) -> Table:
  """Returns the weights of a layer."""
  table = {
    'attention_norm': norm(model.d_model),
    'attention': attention(model),
    'feed_forward_norm': norm(model.d_model),
  }
  if model.has_experts(index):
    return table | {'experts': experts(model)}
  return table | {'dense': gated_mlp(model.d_model, model.dense_width, model.init_std, _out_std(model))}


def vocabulary(model: ModelConfig) -> Table:
  """Returns the weights outside layers: the embedding, the last norm, and the logits' table unless tied."""
  table = Weight((model.vocab_size, model.d_model), model.init_std)
  outside: Table = {'embedding': table, 'final_norm': norm(model.d_model)}
  return outside if model.tie_embeddings else outside | {'head': table}


def _out_std(model: ModelConfig) -> float:
  """For what adds to the residual stream: smaller the more layers add (Radford et al. 2019)."""
  return model.init_std / (2 * model.num_layers) ** 0.5
