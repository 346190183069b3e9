"""Attention of one layer over a group of ranks by the exchange of heads: dispatch, core, combine.

Axis legend as in `collectives.py`. The core runs under a `lax.switch` on the rank's SP degree, so ranks
of different degrees share one program. It is a `custom_vjp` of its own on the flat rows: differentiating
the switch would save the residuals of every branch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
  alone: Sequence[jax.Array] = (),
) -> jax.Array:
  """Returns attention inside each sample of the rank's group: q [T, H, D], k and v [T, K, D] -> [T, H, D].

  Args:
    alone: that of the rank's solo samples in chunks of heads, [T, h, D] each (`solo_attention`). It is added:
      each is zero on the other's rows. A chunk of it is computed before the same chunk of the group's, so
      that it hides the exchange that this one waits for.
  """
  with jax.named_scope('dispatch'):
    rows = list(dispatch(ex, operands, route))
    for chunk, of_chunk in enumerate(alone):
      # What is added is not of the barrier, or the backward pass would exchange again to have it.
      rows[chunk], _ = lax.optimization_barrier((rows[chunk], of_chunk))
    rows[0] = checkpoint_name(rows[0], KEPT)
  outs: list[jax.Array] = []
  for chunk in range(ex.wire.chunks):
    with jax.named_scope('core'):
      out = _core(ex, impl, kind, chunk, tuple(rows[source] for source in ex.sources(chunk)), route)
    if chunk + 1 < ex.wire.chunks:
      # The next chunk need not be here before this core is done, so it travels meanwhile.
      rows[chunk + 1], out = lax.optimization_barrier((rows[chunk + 1], out))
      rows[chunk + 1] = checkpoint_name(rows[chunk + 1], KEPT)
    outs.append(out)
  with jax.named_scope('combine'):
    out = checkpoint_name(combine(ex, tuple(outs), route), KEPT)
  return out + jnp.concatenate(alone, axis=1) if alone else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _core(
  ex: Exchange, impl: AttentionImpl, kind: LayerKind, chunk: int, rows: tuple[jax.Array, ...], route: Route
) -> jax.Array:
  """Attention of a chunk of heads; `rows` are those dispatched of `Exchange.sources`."""
  return _core_fwd(ex, impl, kind, chunk, rows, route)[0]


def _core_fwd(ex, impl, kind, chunk, rows, route):
  heads_of = ex.wire.combined(chunk)
  most = max(degree * heads_of(degree) for degree in ex.degrees) * ex.capacity_tokens

  def forward(degree: int):
    if not heads_of(degree):
      return join_rows(ex, heads_of, jnp.zeros(0, rows[0].dtype)), jnp.zeros(most, jnp.float32)
    tokens = degree * ex.capacity_tokens
    out, lse = impl.forward(*split_heads(ex, rows, degree, chunk), route.segments[:tokens], kind)
    return join_rows(ex, heads_of, out), jnp.pad(lse.reshape(-1), (0, most - lse.size))

  out, lse = lax.switch(route.branch, [functools.partial(forward, p) for p in ex.degrees])
  out, lse = checkpoint_name(out, KEPT), checkpoint_name(lse, KEPT)
  return out, (rows, out, lse, route)


def _core_bwd(ex, impl, kind, chunk, residuals, grad):
  rows, out, lse, route = residuals
  heads_of = ex.wire.combined(chunk)

  def backward(degree: int):
    tokens, h = degree * ex.capacity_tokens, heads_of(degree)

    def heads(x):
      return x[: ex.rows(heads_of, degree)].reshape(tokens, h, ex.wire.head_dim)

    grads = impl.backward(
      *split_heads(ex, rows, degree, chunk),
      route.segments[:tokens],
      kind,
      heads(out),
      lse[: tokens * h].reshape(tokens, h),
      heads(grad),
    )
    return _join_grads(ex, grads, degree, chunk)

  def nothing(degree: int):
    return tuple(map(jnp.zeros_like, rows))

  branches = [functools.partial(backward if heads_of(p) else nothing, p) for p in ex.degrees]
  return lax.switch(route.branch, branches), None


_core.defvjp(_core_fwd, _core_bwd)


def _join_grads(ex: Exchange, grads: Sequence[jax.Array], degree: int, chunk: int) -> tuple[jax.Array, ...]:
  """Gradients of the operands of a chunk's core, as rows of the chunks that these came with."""
  sources = ex.wire.chunk_sources(degree, chunk)

  def of_chunk(source: int) -> jax.Array:
    sent = ex.wire.chunk_heads(degree, source)
    parts = [
      grad if of == source else jnp.zeros((len(grad), heads, ex.wire.head_dim), grad.dtype)
      for grad, of, heads in zip(grads, sources, sent, strict=True)
    ]
    return join_rows(ex, ex.wire.dispatched(source), jnp.concatenate(parts, axis=1))

  return tuple(map(of_chunk, ex.sources(chunk)))


def solo_attention(
  ex: Exchange,
  impl: AttentionImpl,
  kind: LayerKind,
  operands: tuple[jax.Array, ...],
  segments: jax.Array,
  route: Route,
) -> list[jax.Array]:
  """Returns attention of a rank's solo samples in chunks of heads, as a lone rank has them.

  q [T, H, D], k and v [T, K, D], segments [T] -> [T, h, D] each. Zero at padding and at what belongs to the
  group's stream, which comes first on a rank.
  """
  shared = jnp.arange(segments.shape[0]) < route.counts[route.place]
  with jax.named_scope('solo'):
    alone = jnp.where(shared, PADDING_SEGMENT, segments)
    return [
      attend(impl, kind, *(x[:, heads] for x, heads in zip(operands, of_chunk, strict=True)), alone)
      for of_chunk in (ex.wire.core_heads(1, chunk) for chunk in range(ex.wire.chunk_count(1)))
    ]
