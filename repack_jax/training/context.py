"""The static half of a compiled step: everything that the layers need besides weights and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from repack_jax.config import FULL, SPARSE, ModelConfig, RunConfig, allowed_sp_degrees
from repack_jax.exchange.collectives import Exchange, choose_implementation, row_width
from repack_jax.exchange.ulysses import solo_attention, ulysses_attention
from repack_jax.kinds import FullAttention, LayerKind, SlidingWindowAttention
from repack_jax.ops.attention import AttentionCase, AttentionImpl, choose_attention
from repack_jax.ops.grouped import choose_grouped
from repack_jax.parallel.mesh import LOCAL_AXIS, domain_size, scope_axes
from repack_jax.plan.arrays import PlanArrays
from repack_jax.plan.plan import DOMAIN, LOCAL, Program
from repack_jax.predict.cost_model import row_tokens


def layer_kind(model: ModelConfig, letter: str) -> LayerKind:
  """Returns the kind that stands for a letter of `ModelConfig.pattern`."""
  return FullAttention() if letter == FULL else SlidingWindowAttention(window_tokens=model.window_tokens)


@dataclass(frozen=True)
class StepContext:
  """What a layer knows at trace time.

  Attributes:
    exchange: the exchange of full (`F`) and of sparse (`S`) layers.
    expert_ranks: ranks that the experts are spread over, 1 where each rank has them all.
    grouped: how their products are computed, as `grouped.grouped_matmul` takes it.
    has_solo: whether plans have samples that take no part in exchanges.
  """

  model: ModelConfig
  exchange: Mapping[str, Exchange]
  attention: AttentionImpl
  expert_ranks: int
  grouped: str
  has_solo: bool

  @property
  def dtype(self) -> jnp.dtype:
    return jnp.dtype(self.model.compute_dtype)

  def attend(self, kind: str, q: jax.Array, k: jax.Array, v: jax.Array, batch: PlanArrays) -> jax.Array:
    """Attention of a layer of this kind: q [T, H, D], k and v [T, K, D] -> [T, H, D].

    Over the rank's group for what it holds of the group's stream, and on the rank alone for solo samples;
    each part is zero on the other's rows.
    """
    layer = layer_kind(self.model, kind)
    route = batch.full if kind == FULL else batch.sparse
    out = ulysses_attention(self.exchange[kind], self.attention, layer, q, k, v, route)
    if self.has_solo:
      out = out + solo_attention(self.attention, layer, q, k, v, batch.segments, route)
    return out

  @property
  def implementation(self) -> str:
    return self.exchange[FULL].implementation


def scope_degrees(run: RunConfig, scope: str) -> tuple[int, ...]:
  """The SP degrees that a program of this exchange scope knows."""
  degrees = allowed_sp_degrees(run.cluster, run.model, run.planner)
  return degrees if scope == DOMAIN else tuple(p for p in degrees if p <= run.cluster.ranks_per_node)


def attention_cases(run: RunConfig) -> list[AttentionCase]:
  """Returns whatever the layers may ask of an attention core: each kind at each SP degree."""
  model, planner = run.model, run.planner
  sizes = planner.capacity_tokens, model.num_heads, model.num_kv_heads, model.head_dim
  return [
    AttentionCase(layer_kind(model, letter), model.compute_dtype, *sizes).at_degree(degree)
    for letter in dict.fromkeys(model.layer_kinds)
    for degree in allowed_sp_degrees(run.cluster, model, planner)
  ]


class Contexts:
  """Makes the context of each program; implementations are chosen, and logged, once."""

  def __init__(self, run: RunConfig, mesh: Mesh):
    self._run, self._mesh = run, mesh
    platform = mesh.devices.flat[0].platform
    self.implementation = choose_implementation(run.train.exchange, platform)
    self.attention = choose_attention(run.train.attention, platform, attention_cases(run))
    self.grouped = choose_grouped(run.train.grouped, platform) if run.model.num_experts else ''
    self.row_tokens = row_tokens(run.cluster, run.model, run.planner)
    spread = run.model.expert_placement == 'spread'
    self.expert_ranks = mesh.shape[LOCAL_AXIS] if spread else 1

  def exchange(self, scope: str, capacity_tokens: int) -> Exchange:
    run, model, mesh = self._run, self._run.model, self._mesh
    degrees = scope_degrees(run, scope)
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    dtype = jnp.dtype(model.compute_dtype)
    return Exchange(
      axes=scope_axes(scope),
      scope_ranks=mesh.shape[LOCAL_AXIS] if scope == LOCAL else domain_size(mesh),
      degrees=degrees,
      capacity_tokens=capacity_tokens,
      num_heads=model.num_heads,
      num_kv_heads=model.num_kv_heads,
      head_dim=model.head_dim,
      row_tokens=self.row_tokens,
      row_width=row_width(degrees, *heads, dtype, self.row_tokens),
      implementation=self.implementation,
    )

  def context(self, program: Program) -> StepContext:
    capacity = program.capacity_tokens
    return StepContext(
      model=self._run.model,
      exchange={
        FULL: self.exchange(program.full_scope, capacity),
        SPARSE: self.exchange(program.sparse_scope, capacity),
      },
      attention=self.attention,
      expert_ranks=self.expert_ranks,
      grouped=self.grouped,
      has_solo=program.has_solo,
    )
