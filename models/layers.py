"""Small layers that others are made of. Axes: T tokens on this rank, d model width, D head width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from repack_jax.config.weights import Table, Weight
from repack_jax.ops.products import matmul


def parameter(weight: Weight, rngs: nnx.Rngs) -> nnx.Param:
  """Returns a float32 master weight with its initial values."""
  if weight.init_std is None:
    return nnx.Param(jnp.ones(weight.shape, jnp.float32))
  return nnx.Param(weight.init_std * jax.random.normal(rngs.params(), weight.shape, jnp.float32))


class RMSNorm(nnx.Module):
  """Root-mean-square norm over the last axis, in float32 (Zhang & Sennrich 2019)."""

  def __init__(self, table: Table, eps: float, rngs: nnx.Rngs):
    self.scale = parameter(table['scale'], rngs)
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    return (y * self.scale[...]).astype(x.dtype)


class GatedMLP(nnx.Module):
  """`down(silu(gate(x)) * up(x))`: [T, d] -> [T, d] (Shazeer 2020)."""

  def __init__(self, table: Table, rngs: nnx.Rngs):
    self.gate = parameter(table['gate'], rngs)
    self.up = parameter(table['up'], rngs)
    self.down = parameter(table['down'], rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(matmul(x, self.gate[...])) * matmul(x, self.up[...])
    return matmul(hidden, self.down[...])


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
  """Returns x [T, heads, D] with rotary positions int32 [T] (Su et al. 2021), halves paired.

  As it is where theta is 0.
  """
  if not theta:
    return x
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions.astype(jnp.float32)[:, None, None] * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
