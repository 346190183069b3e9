"""Attention of one layer over a group of ranks: dispatch, core, combine.

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
  choose_exchange,
  combine,
  dispatch,
  join_rows,
  split_heads,
)
from repack_jax.kinds import LayerKind
from repack_jax.ops.attention import KEPT, AttentionCase, AttentionImpl, attend, choose_attention
from repack_jax.plan.arrays import PADDING_SEGMENT, PlanArrays, Route
from repack_jax.plan.plan import Program


def repacked_attention(
  kind: LayerKind,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  batch: PlanArrays,
  program: Program,
  axes: Sequence[str],
  attention: AttentionImpl | None = None,
  exchange: str | None = None,
) -> jax.Array:
  """Returns the attention of a layer of this kind, [T, H, D], by a plan. Call it inside `shard_map`.

  Over the rank's group for what it holds of the group's stream, and on the rank alone for its solo samples.
  Padding slots are zero in the result and inert. Exactly two exchanges forward and two backward.

  Args:
    q, k, v: of the rank's own token slots, [T, H, D] and [T, K, D] of one dtype.
    batch: the rank's own arrays of the plan, without the axis of ranks (`pack`).
    program: what the arrays were packed for.
    axes: mesh axes of a domain, major to minor, in which ranks are numbered.
    attention: what computes the core; by default what `auto` takes on JAX's default platform.
    exchange: `ragged` or `dense`; by default likewise.

  Raises:
    PlanError: where the program's exchanges span other ranks than the mesh has.
  """
  platform = jax.default_backend()
  exchange = exchange or choose_exchange('auto', platform)
  if attention is None:
    lone = AttentionCase.of(q, k, kind)
    cases = [lone.at_degree(degree) for degree in program.degrees(kind.layout)]
    attention = choose_attention('auto', platform, cases)
  wire = kind.wire(q.shape[1], k.shape[1], q.shape[2], q.dtype.name)
  sizes = {axis: lax.axis_size(axis) for axis in axes}
  ex = Exchange.of_program(program, kind.layout, wire, axes, sizes, exchange)
  route = batch.route(kind.layout)
  out = ulysses_attention(ex, attention, kind, (q, k, v), route)
  if program.has_solo:  # each part is zero on the other's rows
    out = out + solo_attention(attention, kind, (q, k, v), batch.segments, route)
  return out


def ulysses_attention(
  ex: Exchange, impl: AttentionImpl, kind: LayerKind, operands: tuple[jax.Array, ...], route: Route
) -> jax.Array:
  """Returns attention inside each sample of the rank's group: q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
  with jax.named_scope('dispatch'):
    rows = checkpoint_name(dispatch(ex, operands, route), KEPT)
  with jax.named_scope('core'):
    out = _core(ex, impl, kind, rows, route)
  with jax.named_scope('combine'):
    return checkpoint_name(combine(ex, out, route), KEPT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _core(ex: Exchange, impl: AttentionImpl, kind: LayerKind, rows: jax.Array, route: Route) -> jax.Array:
  return _core_fwd(ex, impl, kind, rows, route)[0]


def _core_fwd(ex, impl, kind, rows, route):
  def forward(degree: int):
    tokens = degree * ex.capacity_tokens
    out, lse = impl.forward(*split_heads(ex, rows, degree), route.segments[:tokens], kind)
    return join_rows(ex, ex.wire.combine_heads, out), lse.reshape(-1)

  out, lse = lax.switch(route.log2_size, [functools.partial(forward, p) for p in ex.degrees])
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

  return lax.switch(route.log2_size, [functools.partial(backward, p) for p in ex.degrees]), None


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
