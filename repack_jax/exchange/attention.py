"""Attention of one layer by a plan: by the exchange of heads, or by halo where the program says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax import lax

from repack_jax.exchange.collectives import Exchange, choose_exchange, spanned_axes
from repack_jax.exchange.halo import halo_attention
from repack_jax.exchange.ulysses import solo_attention, ulysses_attention
from repack_jax.kinds import LayerKind
from repack_jax.ops.attention import AttentionCase, AttentionImpl, choose_attention
from repack_jax.plan.arrays import PlanArrays
from repack_jax.plan.program import Program


def attention_cases(
  kind: LayerKind, lone: AttentionCase, program: Program, exchange_chunks: int = 1
) -> list[AttentionCase]:
  """Returns what layers of a kind ask of an attention core in a program.

  Args:
    lone: what a rank alone is asked for.
    exchange_chunks: as in `ClusterConfig`.
  """
  halo = kind.halo_slots(program)
  if halo is not None:
    return [dataclasses.replace(lone, halo_tokens=halo)]
  cuts = {1, exchange_chunks}
  return [lone.at_degree(degree, cut) for cut in cuts for degree in program.degrees(kind.layout)]


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
  exchange_chunks: int = 1,
) -> jax.Array:
  """Returns the attention of a layer of this kind, [T, H, D], by a plan. Call it inside `shard_map`.

  Over the rank's group for what it holds of the group's stream, and on the rank alone for its solo samples.
  Padding slots are zero in the result and inert. Exactly two exchanges a chunk forward and two backward;
  where the program runs such layers by halo, a shift a hop each way instead.

  Args:
    q, k, v: of the rank's own token slots, [T, H, D] and [T, K, D] of one dtype.
    batch: the rank's own arrays of the plan, without the axis of ranks (`pack`).
    program: what the arrays were packed for.
    axes: mesh axes of a domain, major to minor, in which ranks are numbered.
    attention: what computes the core; by default what `auto` takes on JAX's default platform.
    exchange: `ragged` or `dense`; by default ragged where the platform has it.
    exchange_chunks: as in `ClusterConfig`; what the plan was made for.

  Raises:
    PlanError: where the program's exchanges span other ranks than the mesh has.
  """
  platform = jax.default_backend()
  sizes = {axis: lax.axis_size(axis) for axis in axes}
  if attention is None:
    cases = attention_cases(kind, AttentionCase.of(q, k, kind), program, exchange_chunks)
    attention = choose_attention('auto', platform, cases)
  halo_slots = kind.halo_slots(program)
  if halo_slots is not None:
    spanned = spanned_axes(program.span(kind.layout), axes, sizes)
    return halo_attention(attention, kind, (q, k, v), batch, halo_slots, program.halo_hops, spanned)
  exchange = exchange or choose_exchange('ragged', platform)
  wire = kind.wire(q.shape[1], k.shape[1], q.shape[2], q.dtype.name).cut(exchange_chunks)
  ex = Exchange.of_program(program, kind.layout, wire, axes, sizes, exchange)
  route = batch.route(kind.layout)
  if not program.has_solo:
    return ulysses_attention(ex, attention, kind, (q, k, v), route)
  alone = solo_attention(ex, attention, kind, (q, k, v), batch.segments, route)
  return ulysses_attention(ex, attention, kind, (q, k, v), route, alone)
