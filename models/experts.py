"""Mixture of experts: router, and gated experts on every rank or spread over the ranks of a node.

Axis legend: T tokens on this rank, d model width, E experts, A = T * k assignments, L ranks that experts are
spread over, C rows of the block that a rank sends to each of them.

Padding slots are assigned to no expert: they are not sent, not counted and take no capacity.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from models.layers import GatedMLP, parameter
from repack_jax.config.model import ModelConfig
from repack_jax.config.weights import Table
from repack_jax.exchange.collectives import exchange_blocks
from repack_jax.ops.grouped import grouped_matmul
from repack_jax.ops.products import matmul
from repack_jax.ops.rows import Move, from_rows, to_rows
from repack_jax.parallel.mesh import LOCAL_AXIS
from repack_jax.plan.arrays import PlanArrays
from repack_jax.training.context import StepContext

# The name of what remat must keep so that no exchange of experts runs twice.
KEPT_OF_EXPERTS = 'kept of experts'


class ExpertStats(NamedTuple):
  """Sums over the tokens of this rank in one layer.

  Attributes:
    balance, router_z: float32 scalars, the two auxiliary losses, not yet weighted. Tokens without a target
      don't count, since the means of all losses are taken over those with one.
    counts: int32 [E], assignments of all tokens to each expert.
    dropped: float32, assignments beyond the receive buffers.
  """

  balance: jax.Array
  router_z: jax.Array
  counts: jax.Array
  dropped: jax.Array


def block_rows(config: ModelConfig, capacity_tokens: int, expert_ranks: int) -> int:
  """Returns C, the rows of the block that a rank sends to each expert rank.

  `expert_capacity_factor` times a perfectly balanced share; 0, or a factor beyond it, gives the most that
  can ever be sent: a token goes to a rank once for each of its chosen experts there.
  """
  most = capacity_tokens * min(config.experts_per_token, config.num_experts // expert_ranks)
  share = capacity_tokens * config.experts_per_token / expert_ranks
  return (
    min(most, math.ceil(config.expert_capacity_factor * share)) if config.expert_capacity_factor else most
  )


class Experts(nnx.Module):
  """Top-k routed experts, weights of the chosen renormalized to sum to one, and an optional shared expert."""

  def __init__(self, config: ModelConfig, table: Table, rngs: nnx.Rngs):
    self.config = config
    self.router = parameter(table['router'], rngs)
    self.expert_gate = parameter(table['expert_gate'], rngs)
    self.expert_up = parameter(table['expert_up'], rngs)
    self.expert_down = parameter(table['expert_down'], rngs)
    if config.shared_expert_width:
      self.shared = GatedMLP(table['shared'], rngs)

  def __call__(
    self, x: jax.Array, batch: PlanArrays, load: jax.Array, ctx: StepContext
  ) -> tuple[jax.Array, ExpertStats]:
    """x [T, d], load float32 [E] -> ([T, d], stats).

    `load` is each expert's share of all assignments in the step before, over all ranks and micro-batches.
    The balance loss E * sum_e load_e * p_e (Fedus et al. 2021, with the share of one step ago) is then a
    sum over tokens, whatever the plan made of the batch.
    """
    k, e = self.config.experts_per_token, self.config.num_experts
    logits = matmul(x.astype(jnp.float32), self.router[...])
    probabilities = jax.nn.softmax(logits)
    weights, chosen = lax.top_k(probabilities, k)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    # Expert e does not exist: padding goes nowhere.
    chosen = jnp.where((batch.segments >= 0)[:, None], chosen, e)
    counts = jnp.bincount(chosen.reshape(-1), length=e + 1)[:e].astype(jnp.int32)

    rows, dropped = self._apply(x, chosen.reshape(-1), counts, ctx)
    # In float32, whose sums over d are the gradient of the weights.
    y = (rows.reshape(-1, k, x.shape[1]).astype(jnp.float32) * weights[..., None]).sum(axis=1).astype(x.dtype)
    if self.config.shared_expert_width:
      y = y + self.shared(x)
    balance = e * (probabilities * load).sum(axis=-1)
    router_z = jax.nn.logsumexp(logits, axis=-1) ** 2
    counted = batch.targets >= 0
    stats = ExpertStats(
      jnp.where(counted, balance, 0).sum(), jnp.where(counted, router_z, 0).sum(), counts, dropped
    )
    return y, stats

  def _apply(
    self, x: jax.Array, chosen: jax.Array, counts: jax.Array, ctx: StepContext
  ) -> tuple[jax.Array, jax.Array]:
    """Each assignment's expert output, [A, d], zero where there is none; and how many were dropped."""
    k, experts = self.config.experts_per_token, self.config.num_experts
    order = jnp.argsort(chosen, stable=True)  # by expert; padding last
    place = jnp.argsort(order)  # of each assignment in that order
    exists = chosen < experts
    if ctx.chosen.expert_ranks == 1:
      move = Move(order, jnp.arange(order.size) < counts.sum(), place, exists)
      return from_rows(self._grouped(to_rows(k, x, move), counts, ctx), move), jnp.float32(0)

    ranks, per_rank = ctx.chosen.expert_ranks, experts // ctx.chosen.expert_ranks
    block = block_rows(self.config, x.shape[0], ranks)
    to_rank = counts.reshape(ranks, per_rank)
    start = jnp.cumsum(to_rank.sum(axis=1)) - to_rank.sum(axis=1)
    kept = jnp.diff(jnp.minimum(jnp.cumsum(to_rank, axis=1), block), prepend=0, axis=1)  # [L, E/L]
    sent = kept.sum(axis=1)
    slot = jnp.arange(block)
    rank = jnp.minimum(chosen // per_rank, ranks - 1)
    row = place - start[rank]
    made_it = exists & (row < sent[rank])
    move = Move(
      item=order[jnp.minimum(start[:, None] + slot, order.size - 1)].reshape(-1),
      filled=(slot < sent[:, None]).reshape(-1),
      row=jnp.where(made_it, rank * block + row, 0),
      kept=made_it,
    )

    blocks = to_rows(k, x, move).reshape(ranks, block, -1)
    theirs = lax.all_to_all(kept, LOCAL_AXIS, split_axis=0, concat_axis=0)  # [L, E/L], a few integers
    received = exchange_blocks(LOCAL_AXIS, ctx.chosen.exchange, blocks, sent, theirs.sum(axis=1))
    received = checkpoint_name(received, KEPT_OF_EXPERTS)
    outputs = self._grouped_by_block(received, theirs, ctx)
    returned = exchange_blocks(LOCAL_AXIS, ctx.chosen.exchange, outputs, theirs.sum(axis=1), sent)
    returned = checkpoint_name(returned, KEPT_OF_EXPERTS)
    dropped = (counts.sum() - sent.sum()).astype(jnp.float32)
    return from_rows(returned.reshape(ranks * block, -1), move), dropped

  def _grouped_by_block(self, blocks: jax.Array, counts: jax.Array, ctx: StepContext) -> jax.Array:
    """Expert outputs of rows [L, C, d], of which block i holds counts[i] [E/L] rows of each local expert."""
    ends = jnp.cumsum(counts, axis=1)
    expert = (jnp.arange(blocks.shape[1])[None, :, None] >= ends[:, None, :]).sum(axis=-1).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    move = Move(order, jnp.arange(order.size) < counts.sum(), jnp.argsort(order), expert < counts.shape[1])
    rows = self._grouped(to_rows(1, blocks.reshape(order.size, -1), move), counts.sum(axis=0), ctx)
    return from_rows(rows, move).reshape(blocks.shape)

  def _grouped(self, rows: jax.Array, sizes: jax.Array, ctx: StepContext) -> jax.Array:
    """Expert outputs of rows sorted by expert; rows past the sum of sizes come out as zero."""

    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
      return grouped_matmul(ctx.chosen.grouped, x, weights, sizes.astype(jnp.int32))

    hidden = jax.nn.silu(product(rows, self.expert_gate[...])) * product(rows, self.expert_up[...])
    return product(hidden, self.expert_down[...])
