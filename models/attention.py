"""The attention block. Axis legend: T tokens on this rank, H query heads, K key/value heads, D head width."""

from __future__ import annotations

import jax
from flax import nnx

from models.layers import RMSNorm, parameter, rotary
from repack_jax.config.model import ModelConfig
from repack_jax.config.weights import Table
from repack_jax.kinds import LayerKind
from repack_jax.ops.products import matmul
from repack_jax.plan.arrays import PlanArrays
from repack_jax.training.context import StepContext


class Attention(nnx.Module):
  """Grouped-query attention with rotary positions: projections on this rank's tokens, core on the group's."""

  def __init__(self, config: ModelConfig, kind: LayerKind, table: Table, rngs: nnx.Rngs):
    self.kind, self.config = kind, config
    self.query = parameter(table['query'], rngs)
    self.key = parameter(table['key'], rngs)
    self.value = parameter(table['value'], rngs)
    self.out = parameter(table['out'], rngs)
    if config.qk_norm:
      self.query_norm = RMSNorm(table['query_norm'], config.norm_eps, rngs)
      self.key_norm = RMSNorm(table['key_norm'], config.norm_eps, rngs)

  def __call__(self, x: jax.Array, batch: PlanArrays, ctx: StepContext) -> jax.Array:
    """x [T, d] -> [T, d]."""
    config = self.config
    q = matmul(x, self.query[...]).reshape(-1, config.num_heads, config.head_dim)
    k = matmul(x, self.key[...]).reshape(-1, config.num_kv_heads, config.head_dim)
    v = matmul(x, self.value[...]).reshape(-1, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
      q, k = self.query_norm(q), self.key_norm(k)
    q, k = (rotary(x, batch.positions, self.kind.rope_theta) for x in (q, k))
    y = ctx.attend(self.kind, q, k, v, batch)
    return matmul(y.reshape(-1, config.num_heads * config.head_dim), self.out[...])
