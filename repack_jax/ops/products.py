"""Matrix products in the precision of their operands, on every platform.

By default a TPU multiplies float32 in passes of bfloat16, and a GPU may in TF32. What is float32 here is to
stay so: routers, and models whose compute dtype it is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def precision_of(x: jax.Array) -> lax.Precision | None:
  """Returns the precision of products of this operand: the highest for float32, the default for less."""
  return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns x [..., d] times weight [d, f], [..., f] in their dtype."""
  return jnp.matmul(x, weight, precision=precision_of(x))


def einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns an einsum of operands of one dtype that is summed in float32, and float32 itself."""
  return jnp.einsum(spec, a, b, precision=precision_of(a), preferred_element_type=jnp.float32)
