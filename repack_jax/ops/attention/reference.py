"""The oracle: dense masked softmax, written to be read. Time and memory grow with S squared.

Axes: T tokens, S slots of keys (a halo, then the T tokens), h query heads, k key/value heads, g = h / k query
heads a key/value head, D head width.
Computes in the input dtype, promoted to at least float32; float64 inputs stay float64.
"""

import chex
import jax
import jax.numpy as jnp

from repack_jax.kinds import LayerKind


def visible(segments: chex.Array, kind: LayerKind) -> chex.Array:
  """Returns which keys each query sees: bool [S, S], query by key, from `segments` int32 [S]."""
  same = (segments[:, None] == segments[None, :]) & (segments[:, None] >= 0)
  position = jnp.tril(same, -1).sum(1)  # in its sample: how many tokens of that come before
  return same & kind.sees(position[:, None], position[None, :])


def forward(
  q: chex.Array, k: chex.Array, v: chex.Array, segments: chex.Array, kind: LayerKind
) -> tuple[chex.Array, chex.Array]:
  """Returns `(out [T, h, D] in q's dtype, lse float32 [T, h])`; see `api.AttentionImpl`."""
  tokens, heads, width = q.shape
  kv_heads = k.shape[1]
  dtype = jnp.promote_types(q.dtype, jnp.float32)
  valid, halo = (segments >= 0)[:, None, None], k.shape[0] - tokens
  # `where`, not a product: padding may hold NaN.
  q, out_dtype = jnp.where(valid[halo:], q, 0).astype(dtype), q.dtype
  k, v = (jnp.where(valid, x, 0).astype(dtype) for x in (k, v))
  q = q.reshape(tokens, kv_heads, heads // kv_heads, width)

  scores = jnp.einsum('qkgd,skd->kgqs', q, k, precision='highest') / jnp.sqrt(jnp.array(width, dtype))
  scores = jnp.where(visible(segments, kind)[halo:], scores, -jnp.inf)
  top = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(dtype).min)  # finite where a row sees nothing
  weights = jnp.exp(scores - jax.lax.stop_gradient(top))
  total = weights.sum(-1, keepdims=True)
  seen = total > 0
  total = jnp.where(seen, total, 1)
  out = jnp.einsum('kgqs,skd->qkgd', weights / total, v, precision='highest')
  lse = jnp.where(seen, top + jnp.log(total), 0)[..., 0]  # [k, g, T]
  return out.reshape(tokens, heads, width).astype(out_dtype), lse.reshape(heads, tokens).T.astype(jnp.float32)


def backward(
  q: chex.Array,
  k: chex.Array,
  v: chex.Array,
  segments: chex.Array,
  kind: LayerKind,
  out: chex.Array,
  lse: chex.Array,
  dout: chex.Array,
) -> tuple[chex.Array, chex.Array, chex.Array]:
  """Returns `(dq, dk, dv)` by differentiating `forward`; `out` and `lse` are not needed."""
  del out, lse
  _, pullback = jax.vjp(lambda q, k, v: forward(q, k, v, segments, kind)[0], q, k, v)
  valid = (segments >= 0)[k.shape[0] - q.shape[0] :]
  return pullback(jnp.where(valid[:, None, None], dout, 0))
