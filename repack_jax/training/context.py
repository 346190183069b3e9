"""What the layers of a model need of the library inside a compiled step, besides weights and arrays."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from repack_jax.checks import require
from repack_jax.config.run import RunConfig
from repack_jax.exchange.attention import repacked_attention
from repack_jax.exchange.collectives import choose_exchange
from repack_jax.kinds import LayerKind
from repack_jax.ops.attention import AttentionCase, AttentionImpl, choose_attention
from repack_jax.ops.grouped import choose_grouped
from repack_jax.parallel.mesh import DOMAIN_AXES
from repack_jax.plan.arrays import PlanArrays
from repack_jax.plan.plan import CHILDREN, MOST_HALO_HOPS
from repack_jax.plan.program import Program
from repack_jax.predict.sizes import expert_ranks

MOST_PREFETCHED_LAYERS = 1


@dataclass(frozen=True)
class Implementations:
  """What computes what in a run, chosen once.

  Attributes:
    attention: the attention cores.
    exchange: `ragged` or `dense`.
    grouped: products of experts, as `grouped_matmul` takes it; '' where there are no experts.
    expert_ranks: ranks of a node that the experts are spread over, 1 where each rank has them all.
    exchange_chunks: chunks of heads that exchanges are cut into at most.
    prefetch_layers: layers ahead of its use that a layer's parameters are gathered.
  """

  attention: AttentionImpl
  exchange: str
  grouped: str
  expert_ranks: int
  exchange_chunks: int
  prefetch_layers: int

  @classmethod
  def choose(cls, run: RunConfig, mesh: Mesh) -> Implementations:
    """Returns those for a run on a mesh, each logged; raises ConfigError where a choice cannot be served."""
    platform = mesh.devices.flat[0].platform
    model, train = run.model, run.train
    ahead = run.cluster.prefetch_layers
    require(
      ahead <= MOST_PREFETCHED_LAYERS, 'ClusterConfig.prefetch_layers', ahead,
      f'the training step gathers parameters at most {MOST_PREFETCHED_LAYERS} layer ahead; more can be '
      'simulated only',
    )  # fmt: skip
    return cls(
      exchange=choose_exchange(run.cluster.exchange, platform),
      attention=choose_attention(train.attention, platform, attention_cases(run)),
      grouped=choose_grouped(train.grouped, platform) if model.num_experts else '',
      expert_ranks=expert_ranks(model, run.cluster),
      exchange_chunks=run.cluster.exchange_chunks,
      prefetch_layers=ahead,
    )


def attention_cases(run: RunConfig) -> list[AttentionCase]:
  """Returns whatever the layers may ask of an attention core: each kind at each SP degree, and by halo."""
  model, tokens = run.model, run.planner.capacity_tokens
  heads = model.num_heads, model.num_kv_heads, model.head_dim
  kinds = [model.kind(letter) for letter in dict.fromkeys(model.layer_kinds)]
  alone = [AttentionCase(kind, model.compute_dtype, tokens, *heads) for kind in kinds]
  # Whole, where a program has too few heads or no wide groups, and in chunks.
  cuts = {1, run.cluster.exchange_chunks}
  cases = [lone.at_degree(degree, cut) for lone in alone for degree in run.sp_degrees for cut in cuts]
  if run.planner.sparse_exchange == 'ulysses':
    return cases
  most = MOST_HALO_HOPS * tokens
  halos = ((lone, lone.kind.halo_tokens) for lone in alone if lone.kind.layout == CHILDREN)
  return cases + [
    dataclasses.replace(lone, halo_tokens=min(halo, most)) for lone, halo in halos if halo is not None
  ]


@dataclass(frozen=True)
class StepContext:
  """What a layer knows at trace time."""

  program: Program
  chosen: Implementations

  def attend(self, kind: LayerKind, q: jax.Array, k: jax.Array, v: jax.Array, batch: PlanArrays) -> jax.Array:
    """Returns attention of a layer of this kind: q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
    chosen = self.chosen
    return repacked_attention(
      kind, q, k, v, batch, self.program, DOMAIN_AXES, chosen.attention, chosen.exchange,
      chosen.exchange_chunks,
    )  # fmt: skip
