"""The decoder: embedding, hybrid-attention layers, final norm, loss.

Axis legend: T tokens on this rank, d model width, V vocabulary, E experts, N layers.

Layers are scanned, so that a program's size does not grow with their number: a *stack* is a stretch of
consecutive layers that repeats, made of *runs* of layers of one kind. A run's weights are stacked along two
leading axes, repeats of the stack and layers of the run. Leading dense layers, what is left of their turn of
the pattern, and a last incomplete turn are stacks that repeat once. So a stack's layers have weights of the
same shapes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.attention import Attention
from models.experts import KEPT_OF_EXPERTS, Experts, ExpertStats
from models.layers import GatedMLP, RMSNorm
from repack_jax.config import weights
from repack_jax.config.model import ModelConfig
from repack_jax.kinds import LAYER_SCOPES
from repack_jax.ops.attention import KEPT
from repack_jax.ops.loss import token_losses
from repack_jax.ops.rows import Table, lookup
from repack_jax.parallel.prefetched import LayerFunction, run_prefetched
from repack_jax.parallel.sharded import gather_parameters, gather_table, save_all_but_gathered
from repack_jax.plan.arrays import PlanArrays
from repack_jax.training.context import StepContext

Tree = Any
_SAVED = {  # by ModelConfig.remat; `none` is no remat of layers
  'layer': jax.checkpoint_policies.save_only_these_names(KEPT, KEPT_OF_EXPERTS),
  'layer_and_experts': jax.checkpoint_policies.save_only_these_names(KEPT),
}


class LossSums(NamedTuple):
  """Sums over this rank's tokens of one micro-batch.

  Attributes:
    cross_entropy: float32, over target tokens.
    balance, router_z: float32, over target tokens; means over expert layers of the auxiliary losses.
    expert_counts: int32 [N, E], zero rows for dense layers. None can wrap: of the tokens of a batch, fewer
      than 2 ** 31, each counts once at most.
    dropped: float32, assignments that did not fit the experts' receive buffers; exact up to 2 ** 24.
  """

  cross_entropy: jax.Array
  balance: jax.Array
  router_z: jax.Array
  expert_counts: jax.Array
  dropped: jax.Array


class Layer(nnx.Module):
  """Norm, attention, norm, experts (or a dense feed-forward block), each added to the residual stream."""

  def __init__(self, config: ModelConfig, index: int, rngs: nnx.Rngs):
    table = weights.layer(config, index)
    self.config, self.kind = config, config.kind(config.layer_kinds[index])
    self.attention_norm = RMSNorm(table['attention_norm'], config.norm_eps, rngs)
    self.attention = Attention(config, self.kind, table['attention'], rngs)
    self.feed_forward_norm = RMSNorm(table['feed_forward_norm'], config.norm_eps, rngs)
    if config.has_experts(index):
      self.experts = Experts(config, table['experts'], rngs)
    else:
      self.dense = GatedMLP(table['dense'], rngs)

  def __call__(
    self, x: jax.Array, load: jax.Array, batch: PlanArrays, ctx: StepContext
  ) -> tuple[jax.Array, ExpertStats]:
    """x [T, d], load float32 [E] -> ([T, d], stats)."""
    with jax.named_scope(LAYER_SCOPES[self.kind.layout]):
      with jax.named_scope('attention'):
        x = x + self.attention(self.attention_norm(x), batch, ctx)
      with jax.named_scope('feed_forward'):
        y = self.feed_forward_norm(x)
        if hasattr(self, 'experts'):
          y, stats = self.experts(y, batch, load, ctx)
        else:
          y, stats = self.dense(y), _no_experts(self.config)
        return x + y, stats


def _no_experts(config: ModelConfig) -> ExpertStats:
  zero = jnp.float32(0)
  return ExpertStats(zero, zero, jnp.zeros(max(1, config.num_experts), jnp.int32), zero)


@dataclass(frozen=True)
class Stack:
  """Layers `first .. first + sum(runs) - 1`, and as many behind for each further repeat.

  `runs` are numbers of consecutive layers that have the same kind and the same feed-forward block.
  """

  first: int
  runs: tuple[int, ...]
  repeats: int

  @property
  def length(self) -> int:
    return sum(self.runs)

  @property
  def end(self) -> int:
    return self.first + self.length * self.repeats

  def run_layers(self, run: int) -> np.ndarray:
    """Returns the layers of a run, int [repeats, layers of the run]."""
    place = self.first + sum(self.runs[:run]) + np.arange(self.runs[run])
    return place + self.length * np.arange(self.repeats)[:, None]


def stacks(config: ModelConfig) -> list[Stack]:
  """Returns the layers of the model as stacks of runs."""
  period = len(config.pattern)
  dense = config.dense_layers if config.num_experts else 0
  head = min(-(-dense // period) * period, config.num_layers)
  repeats = (config.num_layers - head) // period
  tail = head + repeats * period

  def runs(first: int, end: int) -> tuple[int, ...]:
    sorts = ((config.layer_kinds[i], config.has_experts(i)) for i in range(first, end))
    return tuple(len(list(same)) for _, same in itertools.groupby(sorts))

  found = [
    Stack(0, runs(0, dense), 1),
    Stack(dense, runs(dense, head), 1),
    Stack(head, runs(head, head + period) if repeats else (), repeats),
    Stack(tail, runs(tail, config.num_layers), 1),
  ]
  return [stack for stack in found if stack.runs]


@dataclass(frozen=True)
class Decoder:
  """The model that a config describes, as the training step takes it (`step.Model`)."""

  config: ModelConfig

  # --- weights --------------------------------------------------------------------------------------------

  def init(self, seed: int) -> Tree:
    """Returns float32 master weights. A layer's depend on the seed and its index alone."""
    config, key = self.config, jax.random.key(seed)

    def layer_weights(index: jax.Array, like: int) -> Tree:
      rngs = nnx.Rngs(params=jax.random.fold_in(key, index))
      return nnx.to_pure_dict(nnx.state(Layer(config, like, rngs), nnx.Param))

    def stacked(stack: Stack, run: int) -> Tree:
      layers = stack.run_layers(run)
      return jax.vmap(jax.vmap(lambda i: layer_weights(i, int(layers[0, 0]))))(jnp.asarray(layers))

    outside = weights.vocabulary(config)
    keys = {
      name: jax.random.fold_in(key, config.num_layers + i) for i, name in enumerate(('embedding', 'head'))
    }

    def table(name: str) -> jax.Array:
      return outside[name].init_std * jax.random.normal(keys[name], outside[name].shape, jnp.float32)

    params = {
      'embedding': table('embedding'),
      'stacks': [[stacked(s, run) for run in range(len(s.runs))] for s in stacks(config)],
      'final_norm': nnx.to_pure_dict(nnx.state(self._final_norm(), nnx.Param)),
    }
    return params if config.tie_embeddings else params | {'head': table('head')}

  def weights(self) -> Tree:
    """Returns a `Weight` for each parameter."""

    def of_run(stack: Stack, run: int) -> Tree:
      return weights.layer(self.config, int(stack.run_layers(run)[0, 0]))

    runs = [[of_run(s, run) for run in range(len(s.runs))] for s in stacks(self.config)]
    return weights.vocabulary(self.config) | {'stacks': runs}

  def _final_norm(self) -> RMSNorm:
    table = weights.vocabulary(self.config)['final_norm']
    return RMSNorm(table, self.config.norm_eps, nnx.Rngs(0))

  # --- from step to step ----------------------------------------------------------------------------------

  def init_carry(self) -> jax.Array:
    """Returns each expert's share of a step's assignments, float32 [N, E]: as if all were equal."""
    experts = max(1, self.config.num_experts)
    return jnp.full((self.config.num_layers, experts), 1 / experts, jnp.float32)

  def next_carry(self, losses: LossSums) -> jax.Array:
    """Returns each expert's share of the step's assignments, float32 [N, E]."""
    counts = losses.expert_counts.astype(jnp.float32)  # integers would wrap at 2 ** 31 assignments
    totals = counts.sum(axis=-1, keepdims=True)
    return jnp.where(totals > 0, counts / jnp.maximum(totals, 1), self.init_carry())

  def zero_losses(self) -> LossSums:
    """Returns losses of nothing."""
    counts = jnp.zeros((self.config.num_layers, max(1, self.config.num_experts)), jnp.int32)
    zero = jnp.float32(0)
    return LossSums(zero, zero, zero, counts, zero)

  def metrics(self, losses: LossSums, target_tokens: jax.Array) -> dict[str, jax.Array]:
    """Returns means over target tokens, the loss in nats, the auxiliary losses not weighted; and a count."""
    return {
      'loss': losses.cross_entropy / target_tokens,
      'balance_loss': losses.balance / target_tokens,
      'router_z_loss': losses.router_z / target_tokens,
      'dropped_assignments': losses.dropped,
    }

  # --- one micro-batch ------------------------------------------------------------------------------------

  def loss_sums(
    self, params: Tree, placed: Tree, carry: jax.Array, batch: PlanArrays, ctx: StepContext
  ) -> tuple[jax.Array, LossSums]:
    """Runs the model on this rank's block of a micro-batch, inside `shard_map`.

    Args:
      params: this rank's shards; `placed` has a `Sharded` for each.
      carry: float32 [N, E], each expert's share of the step before.
      batch: the rank's own arrays, without the axis of ranks.

    Returns:
      (the rank's own *sum* loss, not divided by anything; its parts).
    """
    config, dtype = self.config, jnp.dtype(self.config.compute_dtype)

    def table(name: str) -> Table:
      return gather_table(params[name], placed[name], dtype)

    embedding = table('embedding')
    x = lookup(embedding, batch.tokens)
    counts = []
    balance = router_z = dropped = jnp.float32(0)
    for stack, shards, of_stack in zip(stacks(config), params['stacks'], placed['stacks'], strict=True):
      x, stats = _run_stack(config, stack, shards, of_stack, carry[stack.first : stack.end], x, batch, ctx)
      counts.append(stats.counts)
      balance, router_z = balance + stats.balance.sum(), router_z + stats.router_z.sum()
      dropped = dropped + stats.dropped.sum()

    norm = _with_weights(
      self._final_norm, gather_parameters(params['final_norm'], placed['final_norm'], dtype)
    )
    head = embedding if config.tie_embeddings else table('head')
    with jax.named_scope('loss'):
      cross_entropy = token_losses(config.loss_vocab_chunk, norm(x), head, batch.targets).sum()
    expert_layers = max(1, sum(config.has_experts(i) for i in range(config.num_layers)))
    balance, router_z = balance / expert_layers, router_z / expert_layers
    total = cross_entropy + config.balance_loss_weight * balance + config.router_z_loss_weight * router_z
    return total, LossSums(cross_entropy, balance, router_z, jnp.concatenate(counts), dropped)


def _with_weights(make: Any, params: Tree) -> Any:
  """The module that `make` makes, with these weights; its own are never allocated."""
  graph, state = nnx.split(nnx.eval_shape(make), nnx.Param)
  nnx.replace_by_pure_dict(state, params)
  return nnx.merge(graph, state)


def _run_stack(
  config: ModelConfig,
  stack: Stack,
  shards: list[Tree],
  placed: list[Tree],
  load: jax.Array,
  x: jax.Array,
  batch: PlanArrays,
  ctx: StepContext,
) -> tuple[jax.Array, ExpertStats]:
  """Runs a stack as often as it repeats; stats come back with a leading axis of layers."""
  dtype = jnp.dtype(config.compute_dtype)
  of_layer = [jax.tree.map(lambda leaf: leaf.of_layer, of_run) for of_run in placed]
  loads = load.reshape(stack.repeats, stack.length, -1)

  def run_layer(run: int, weights: Tree, x: jax.Array, load: jax.Array, batch: PlanArrays):
    first = int(stack.run_layers(run)[0, 0])
    layer = _with_weights(lambda: Layer(config, first, nnx.Rngs(0)), weights)
    return layer(x, load, batch, ctx)

  if ctx.chosen.prefetch_layers:
    layers = [_differentiated(config, functools.partial(run_layer, run)) for run in range(len(stack.runs))]
    x, (balance, router_z), (counts, dropped) = run_prefetched(
      layers, stack.runs, of_layer, dtype, x, shards, loads, batch
    )
    stats = ExpertStats(balance, router_z, counts, dropped)
  else:
    x, stats = _scan_in_line(config, stack, run_layer, of_layer, shards, loads, x, batch)
  return x, jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), stats)


def _differentiated(config: ModelConfig, run_layer: Callable) -> LayerFunction:
  """A layer as `run_prefetched` takes it, which saves for the backward pass what `remat` says."""

  def layer(weights: Tree, x: jax.Array, load: jax.Array, batch: PlanArrays):
    x, stats = run_layer(weights, x, load, batch)
    return (x, (stats.balance, stats.router_z)), (stats.counts, stats.dropped)

  return jax.checkpoint(layer, policy=_SAVED[config.remat]) if config.remat in _SAVED else layer


def _scan_in_line(
  config: ModelConfig,
  stack: Stack,
  run_layer: Callable,
  placed: list[Tree],
  shards: list[Tree],
  loads: jax.Array,
  x: jax.Array,
  batch: PlanArrays,
) -> tuple[jax.Array, ExpertStats]:
  """Scans the repeats, and in each its runs; a layer gathers its weights when it begins, in both passes."""
  policy = _SAVED.get(config.remat, save_all_but_gathered)

  def gathered_layer(run: int, x: jax.Array, xs: tuple[Tree, jax.Array]):
    shards, load = xs
    weights = gather_parameters(shards, placed[run], jnp.dtype(config.compute_dtype))
    return run_layer(run, weights, x, load, batch)

  def repeat(x: jax.Array, xs: tuple[list[Tree], jax.Array]):
    shards, loads = xs
    starts = np.cumsum(stack.runs)[:-1]
    stats = []
    for run, run_loads in enumerate(jnp.split(loads, starts)):
      layer = jax.checkpoint(functools.partial(gathered_layer, run), policy=policy)
      x, run_stats = jax.lax.scan(layer, x, (shards[run], run_loads))
      stats.append(run_stats)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *stats)

  return jax.lax.scan(repeat, x, (shards, loads))
