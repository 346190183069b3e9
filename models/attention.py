"""The attention block. Axis legend: T tokens on this rank, H query heads, K key/value heads, D head width."""

from __future__ import annotations

import jax
from flax import nnx

from models.layers import RMSNorm, normal_param, rotary
from repack_jax.config import ModelConfig
from repack_jax.plan.arrays import PlanArrays
from repack_jax.training.context import StepContext


class Attention(nnx.Module):
  """Grouped-query attention: projections and the kind's rotary positions here, the core in the group."""

  def __init__(self, config: ModelConfig, kind: str, out_std: float, rngs: nnx.Rngs):
    heads, kv, width = config.num_heads, config.num_kv_heads, config.head_dim
    self.kind, self.config = kind, config
    self.query = normal_param(rngs, (config.d_model, heads * width), config.init_std)
    self.key = normal_param(rngs, (config.d_model, kv * width), config.init_std)
    self.value = normal_param(rngs, (config.d_model, kv * width), config.init_std)
    self.out = normal_param(rngs, (heads * width, config.d_model), out_std)
    if config.qk_norm:
      self.query_norm = RMSNorm(width, config.norm_eps)
      self.key_norm = RMSNorm(width, config.norm_eps)

  def __call__(self, x: jax.Array, batch: PlanArrays, ctx: StepContext) -> jax.Array:
    """x [T, d] -> [T, d]."""
    config = self.config
    q = (x @ self.query[...]).reshape(-1, config.num_heads, config.head_dim)
    k = (x @ self.key[...]).reshape(-1, config.num_kv_heads, config.head_dim)
    v = (x @ self.value[...]).reshape(-1, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
      q, k = self.query_norm(q), self.key_norm(k)
    theta = config.kind(self.kind).rope_theta
    if theta:
      q, k = (rotary(x, batch.positions, theta) for x in (q, k))
    y = ctx.attend(self.kind, q, k, v, batch)
    return y.reshape(-1, config.num_heads * config.head_dim) @ self.out[...]
