"""Attention of one layer by halo: a rank on its own tokens, with those that come ahead of them in the stream.

A layer whose queries see no further back than some tokens needs no exchange of heads: its ranks shift the
last keys and values of their stretch of the stream to the next rank, or to the next few where ranks hold
fewer tokens than a halo has. Nothing else moves, whatever the groups: where a rank's first token begins a
sample, what arrives is masked. Solo samples are further segments behind, so one core serves all.

Axis legend as in `collectives.py`; L slots of a halo, B of what a rank sends, N hops.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from repack_jax.kinds import LayerKind
from repack_jax.ops.attention import KEPT, AttentionImpl, attend
from repack_jax.plan.arrays import PADDING_SEGMENT, PlanArrays, Route


def halo_attention(
  impl: AttentionImpl,
  kind: LayerKind,
  operands: tuple[jax.Array, jax.Array, jax.Array],
  batch: PlanArrays,
  halo_slots: int,
  hops: int,
  axes: Sequence[str],
) -> jax.Array:
  """Returns attention of all that a rank holds: q [T, H, D], k and v [T, K, D] -> [T, H, D].

  `hops` collectives forward and as many backward: gradients of the halo are shifted back and added. A token
  has one from its own rank and one from each of the next `hops`, so in bfloat16 the sum is rounded so often.

  Args:
    batch: the rank's own arrays of the plan.
    halo_slots: L.
    hops: N; a plan's halos come from no more ranks (`Program.check`).
    axes: mesh axes whose ranks hold the groups of the kind's layout, major to minor.
  """
  q, k, v = operands
  with jax.named_scope('halo'):
    ahead = halo_of(jnp.concatenate([k, v], axis=1), batch.route(kind.layout), halo_slots, hops, axes)
    keys, values = (jnp.concatenate(parts) for parts in zip(jnp.split(ahead, 2, axis=1), (k, v), strict=True))
    segments = jnp.concatenate([halo_segments(kind, batch, halo_slots), batch.segments])
  with jax.named_scope('core'):
    return attend(impl, kind, q, keys, values, segments)


def halo_of(x: jax.Array, route: Route, halo_slots: int, hops: int, axes: Sequence[str]) -> jax.Array:
  """Returns the L slots that come ahead of the rank's own in its group's stream, [T, n, D] -> [L, n, D].

  Whatever is there where the stream begins.
  """
  sent = min(halo_slots, x.shape[0])
  if not sent:
    return x[:0]
  # The last slots of the rank's share of the stream; behind it may be solo samples.
  count = route.counts[route.place]
  last = lax.dynamic_slice_in_dim(jnp.pad(x, ((sent, 0), (0, 0), (0, 0))), count, sent)
  axis_name = tuple(axes)
  ranks = lax.axis_size(axis_name)
  halo = jnp.zeros((sent + halo_slots, *x.shape[1:]), x.dtype)
  end = jnp.int32(sent + halo_slots)
  for hop in range(1, hops + 1):  # the nearest first: what a rank lacks of B slots, those ahead of it have
    pairs = [(rank, rank + hop) for rank in range(ranks - hop)]
    arrived = checkpoint_name(lax.ppermute(last, axis_name, pairs), KEPT)
    halo = lax.dynamic_update_slice_in_dim(halo, arrived, end - sent, axis=0)
    held = route.counts[jnp.maximum(route.place - hop, 0)]
    end = jnp.maximum(end - held, sent)
  return halo[sent:]


def halo_segments(kind: LayerKind, batch: PlanArrays, halo_slots: int) -> jax.Array:
  """Returns the samples of a halo's slots, int32 [L]: padding where the rank's first token does not see them.

  Later ones see no further back. So a halo begins where a sample does, or its first token's sight.
  """
  segment, position = batch.segments[0], batch.positions[0]
  key = position - jnp.arange(halo_slots, 0, -1, dtype=jnp.int32)
  seen = (key >= 0) & kind.sees(position, key)
  return jnp.where(seen, segment, PADDING_SEGMENT)
