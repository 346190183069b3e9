"""The decoder: embedding, hybrid-attention layers, final norm, loss.

Axis legend: T tokens on this rank, d model width, V vocabulary, E experts, N layers.

Layers are scanned, so that a program's size does not grow with their number: a *stack* is a stretch of
consecutive layers that repeats, made of *runs* of layers of one kind. A run's weights are stacked along two
leading axes, repeats of the stack and layers of the run. Leading dense layers and a last incomplete repeat
are stacks that repeat once.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from models.attention import Attention
from models.experts import Experts, ExpertStats
from models.layers import GatedMLP, RMSNorm
from repack_jax.config import LAYER_SCOPES, ModelConfig
from repack_jax.ops.attention import KEPT
from repack_jax.ops.loss import token_losses
from repack_jax.parallel.mesh import parameter_spec
from repack_jax.parallel.sharded import EXPERT_NAMES, gather_parameters, leaf_name, save_all_but_gathered
from repack_jax.plan.arrays import PlanArrays
from repack_jax.training.context import StepContext

Tree = Any


class LossSums(NamedTuple):
  """Sums over this rank's tokens of one micro-batch.

  Attributes:
    cross_entropy: float32, over target tokens.
    balance, router_z: float32, means over expert layers of the auxiliary losses' sums.
    expert_counts: int32 [N, E], zero rows for dense layers.
    dropped: int32, assignments that did not fit the experts' receive buffers.
  """

  cross_entropy: jax.Array
  balance: jax.Array
  router_z: jax.Array
  expert_counts: jax.Array
  dropped: jax.Array


class Layer(nnx.Module):
  """Norm, attention, norm, experts (or a dense feed-forward block), each added to the residual stream."""

  def __init__(self, config: ModelConfig, index: int, rngs: nnx.Rngs):
    out_std = config.init_std / (2 * config.num_layers) ** 0.5
    self.config, self.kind = config, config.layer_kinds[index]
    self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
    self.attention = Attention(config, self.kind, out_std, rngs)
    self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
    if config.has_experts(index):
      self.experts = Experts(config, out_std, rngs)
    else:
      self.dense = GatedMLP(config.d_model, config.dense_width, config.init_std, out_std, rngs)

  def __call__(
    self, x: jax.Array, load: jax.Array, batch: PlanArrays, ctx: StepContext
  ) -> tuple[jax.Array, ExpertStats]:
    """x [T, d], load float32 [E] -> ([T, d], stats)."""
    with jax.named_scope(LAYER_SCOPES[self.kind]):
      with jax.named_scope('attention'):
        x = x + self.attention(self.attention_norm(x), batch, ctx)
      with jax.named_scope('feed_forward'):
        y = self.feed_forward_norm(x)
        if hasattr(self, 'experts'):
          y, stats = self.experts(y, batch.segments >= 0, load, ctx)
        else:
          y, stats = self.dense(y), _no_experts(self.config)
        return x + y, stats


def _no_experts(config: ModelConfig) -> ExpertStats:
  zero = jnp.float32(0)
  return ExpertStats(zero, zero, jnp.zeros(max(1, config.num_experts), jnp.int32), jnp.int32(0))


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
    """The layers of a run, int [repeats, layers of the run]."""
    place = self.first + sum(self.runs[:run]) + np.arange(self.runs[run])
    return place + self.length * np.arange(self.repeats)[:, None]


def stacks(config: ModelConfig) -> list[Stack]:
  """The layers of the model as stacks of runs."""
  period = len(config.pattern)
  dense = config.dense_layers if config.num_experts else 0
  head = min(-(-dense // period) * period, config.num_layers)
  repeats = (config.num_layers - head) // period
  tail = head + repeats * period

  def runs(first: int, end: int) -> tuple[int, ...]:
    sorts = ((config.layer_kinds[i], config.has_experts(i)) for i in range(first, end))
    return tuple(len(list(same)) for _, same in itertools.groupby(sorts))

  found = [
    Stack(0, runs(0, head), 1),
    Stack(head, runs(head, head + period) if repeats else (), repeats),
    Stack(tail, runs(tail, config.num_layers), 1),
  ]
  return [stack for stack in found if stack.runs]


def init_parameters(config: ModelConfig, seed: int) -> Tree:
  """Float32 master weights. A layer's depend on the seed and its index alone."""
  key = jax.random.key(seed)

  def layer_state(index: jax.Array, like: int) -> Tree:
    rngs = nnx.Rngs(params=jax.random.fold_in(key, index))
    return nnx.state(Layer(config, like, rngs), nnx.Param)

  def stacked(stack: Stack, run: int) -> Tree:
    layers = stack.run_layers(run)
    return jax.vmap(jax.vmap(lambda i: layer_state(i, int(layers[0, 0]))))(jnp.asarray(layers))

  table = (config.vocab_size, config.d_model)
  embed_key, head_key = (jax.random.fold_in(key, config.num_layers + i) for i in range(2))
  params = {
    'embedding': config.init_std * jax.random.normal(embed_key, table, jnp.float32),
    'stacks': [[stacked(s, run) for run in range(len(s.runs))] for s in stacks(config)],
    'final_norm': nnx.state(RMSNorm(config.d_model, config.norm_eps), nnx.Param),
  }
  if not config.tie_embeddings:
    params['head'] = config.init_std * jax.random.normal(head_key, table, jnp.float32)
  return params


def parameter_specs(config: ModelConfig, expert_ranks: int, mesh: Mesh) -> Tree:
  """A PartitionSpec for each parameter; stacked ones are sharded along a layer's own dimensions."""
  shapes = jax.eval_shape(functools.partial(init_parameters, config, 0))

  def spec(path: tuple, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
    stacked = getattr(path[0], 'key', None) == 'stacks'
    spread = expert_ranks > 1 and leaf_name(path) in EXPERT_NAMES
    inner = parameter_spec(leaf.shape[2:] if stacked else leaf.shape, 0 if spread else None, mesh)
    return PartitionSpec(None, None, *inner) if stacked else inner

  return jax.tree_util.tree_map_with_path(spec, shapes)


def loss_sums(
  params: Tree, specs: Tree, load: jax.Array, batch: PlanArrays, ctx: StepContext
) -> tuple[jax.Array, LossSums]:
  """Runs the model on this rank's block of a micro-batch, inside `shard_map`.

  Args:
    params: this rank's shards; specs as `parameter_specs` gives them.
    load: float32 [N, E], each expert's share of the step before.
    batch: the rank's own arrays, without the axis of ranks.

  Returns:
    (the rank's own *sum* loss, not divided by anything; its parts).
  """
  config, dtype = ctx.model, ctx.dtype
  embedding = gather_parameters(params['embedding'], specs['embedding'], dtype)
  x = embedding[batch.tokens]
  counts = []
  balance, router_z, dropped = jnp.float32(0), jnp.float32(0), jnp.int32(0)
  for stack, weights, stack_specs in zip(stacks(config), params['stacks'], specs['stacks'], strict=True):
    x, stats = _run_stack(stack, weights, stack_specs, load[stack.first : stack.end], x, batch, ctx)
    counts.append(stats.counts)
    balance, router_z = balance + stats.balance.sum(), router_z + stats.router_z.sum()
    dropped = dropped + stats.dropped.sum()

  norm = nnx.merge(
    _graph(functools.partial(RMSNorm, config.d_model, config.norm_eps)),
    gather_parameters(params['final_norm'], specs['final_norm'], dtype),
  )
  table = embedding
  if not config.tie_embeddings:
    table = gather_parameters(params['head'], specs['head'], dtype)
  with jax.named_scope('loss'):
    cross_entropy = token_losses(config.loss_vocab_chunk, norm(x), table, batch.targets).sum()
  expert_layers = max(1, sum(config.has_experts(i) for i in range(config.num_layers)))
  balance, router_z = balance / expert_layers, router_z / expert_layers
  total = cross_entropy + config.balance_loss_weight * balance + config.router_z_loss_weight * router_z
  return total, LossSums(cross_entropy, balance, router_z, jnp.concatenate(counts), dropped)


def _graph(make: Any) -> nnx.GraphDef:
  """The static part of a module, made without allocating its weights."""
  return nnx.split(nnx.eval_shape(make), nnx.Param)[0]


def _run_stack(
  stack: Stack,
  weights: list[Tree],
  specs: list[Tree],
  load: jax.Array,
  x: jax.Array,
  batch: PlanArrays,
  ctx: StepContext,
) -> tuple[jax.Array, ExpertStats]:
  """Scans a stack over its repeats; stats come back with a leading axis of layers."""
  policy = save_all_but_gathered
  if ctx.model.remat == 'layer':
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)

  def run_layer(run: int, x: jax.Array, xs: tuple[Tree, jax.Array]):
    shards, load = xs
    first = int(stack.run_layers(run)[0, 0])
    graph = _graph(lambda: Layer(ctx.model, first, nnx.Rngs(0)))
    inner_specs = jax.tree.map(lambda spec: PartitionSpec(*spec[2:]), specs[run])
    layer = nnx.merge(graph, gather_parameters(shards, inner_specs, ctx.dtype))
    return layer(x, load, batch, ctx)

  def repeat(x: jax.Array, xs: tuple[list[Tree], jax.Array]):
    shards, loads = xs
    starts = np.cumsum(stack.runs)[:-1]
    stats = []
    for run, run_loads in enumerate(jnp.split(loads, starts)):
      layer = jax.checkpoint(functools.partial(run_layer, run), policy=policy)
      x, run_stats = jax.lax.scan(layer, x, (shards[run], run_loads))
      stats.append(run_stats)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *stats)

  loads = load.reshape(stack.repeats, stack.length, -1)
  x, stats = jax.lax.scan(repeat, x, (weights, loads))
  return x, jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), stats)
