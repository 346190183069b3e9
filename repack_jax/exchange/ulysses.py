"""Attention of one layer over a group of ranks by the exchange of heads: dispatch, core, combine.

Axis legend as in `collectives.py`. The core runs under a `lax.switch` on the rank's SP degree, so ranks
of different degrees share one program. It is a `custom_vjp` of its own on the flat rows: differentiating
the switch would save the residuals of every branch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from repack_jax.exchange.collectives import (
  Exchange,
  combine,
  dispatch,
  join_rows,
  split_heads,
)
from repack_jax.kinds import LayerKind
from repack_jax.ops.attention import KEPT, AttentionImpl, attend
from repack_jax.plan.arrays import PADDING_SEGMENT, Route


def ulysses_attention(
  ex: Exchange,
  impl: AttentionImpl,
  kind: LayerKind,
  operands: tuple[jax.Array, ...],
  route: Route,
  alone: jax.Array | None = None,
) -> jax.Array:
  """Returns attention inside each sample of the rank's group: q [T, H, D], k and v [T, K, D] -> [T, H, D].

  Args:
    alone: that of the rank's solo samples, [T, H, D], which is added: each is zero on the other's rows. It is
      computed before the group's core, so that it hides the exchange that the core waits for.
  """
  with jax.named_scope('dispatch'):
    rows = dispatch(ex, operands, route)
    if alone is not None:
      # What is added is not of the barrier, or the backward pass would exchange again to have it.
      rows, _ = lax.optimization_barrier((rows, alone))
    rows = checkpoint_name(rows, KEPT)
  with jax.named_scope('core'):
    out = _core(ex, impl, kind, rows, route)
  with jax.named_scope('combine'):
    out = checkpoint_name(combine(ex, out, route), KEPT)
  return out if alone is None else out + alone


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _core(ex: Exchange, impl: AttentionImpl, kind: LayerKind, rows: jax.Array, route: Route) -> jax.Array:
  return _core_fwd(ex, impl, kind, rows, route)[0]


def _core_fwd(ex, impl, kind, rows, route):
  def forward(degree: int):
    tokens = degree * ex.capacity_tokens
    out, lse = impl.forward(*split_heads(ex, rows, degree), route.segments[:tokens], kind)
    return join_rows(ex, ex.wire.combine_heads, out), lse.reshape(-1)

  out, lse = lax.switch(route.branch, [functools.partial(forward, p) for p in ex.degrees])
  out, lse = checkpoint_name(out, KEPT), checkpoint_name(lse, KEPT)
  return out, (rows, out, lse, route)


def _core_bwd(ex, impl, kind, residuals, grad):
  rows, out, lse, route = residuals

  def backward(degree: int):
    tokens, h = degree * ex.capacity_tokens, ex.wire.combine_heads(degree)
    shape = (tokens, h, ex.wire.head_dim)

    def heads(x):
      return x[: ex.rows(ex.wire.combine_heads, degree)].reshape(shape)

    grads = impl.backward(
      *split_heads(ex, rows, degree),
      route.segments[:tokens],
      kind,
      heads(out),
      lse.reshape(tokens, h),
      heads(grad),
    )
    return join_rows(ex, ex.wire.dispatch_heads, jnp.concatenate(grads, axis=1))

  return lax.switch(route.branch, [functools.partial(backward, p) for p in ex.degrees]), None


_core.defvjp(_core_fwd, _core_bwd)


def solo_attention(
  impl: AttentionImpl,
  kind: LayerKind,
  operands: tuple[jax.Array, ...],
  segments: jax.Array,
  route: Route,
) -> jax.Array:
  """Returns attention of a rank's solo samples: q [T, H, D], k and v [T, K, D], segments [T] -> [T, H, D].

  Zero at padding and at what belongs to the group's stream, which comes first on a rank.
  """
  shared = jnp.arange(segments.shape[0]) < route.counts[route.place]
  with jax.named_scope('solo'):
    return attend(impl, kind, *operands, jnp.where(shared, PADDING_SEGMENT, segments))
