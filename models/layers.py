"""Small layers that others are made of. Axes: T tokens on this rank, d model width, D head width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def normal_param(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
  """A float32 master weight."""
  return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


class RMSNorm(nnx.Module):
  """Root-mean-square norm over the last axis, in float32 (Zhang & Sennrich 2019)."""

  def __init__(self, width: int, eps: float):
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    return (y * self.scale[...]).astype(x.dtype)


class GatedMLP(nnx.Module):
  """`down(silu(gate(x)) * up(x))`: [T, d] -> [T, d] (Shazeer 2020)."""

  def __init__(self, d_model: int, width: int, std: float, out_std: float, rngs: nnx.Rngs):
    self.gate = normal_param(rngs, (d_model, width), std)
    self.up = normal_param(rngs, (d_model, width), std)
    self.down = normal_param(rngs, (width, d_model), out_std)

  def __call__(self, x: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
  """Rotary position embedding of x [T, heads, D] at positions int32 [T] (Su et al. 2021), halves paired."""
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions.astype(jnp.float32)[:, None, None] * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
