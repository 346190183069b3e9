"""The training step: gradients summed over micro-batches, then one update.

Two compiled programs: `accumulate` (forward and backward of one micro-batch, under `shard_map`), compiled
once for each `Program` that plans ask for, and `update` (clip, AdamW), compiled once.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from models.transformer import LossSums, init_parameters, loss_sums, parameter_specs
from repack_jax.config import FULL, SPARSE, OptimizerConfig, RunConfig
from repack_jax.parallel.mesh import ALL_AXES, RANK_BLOCKS, REPLICATED, sharding, with_platform
from repack_jax.parallel.sharded import leaf_name, reduce_gradients
from repack_jax.plan.arrays import PlanArrays, Route
from repack_jax.plan.plan import Plan, Program
from repack_jax.training.context import Contexts, scope_degrees

Tree = Any


class TrainState(NamedTuple):
  """What a checkpoint holds.

  Attributes:
    params: float32 master weights.
    optimizer: the state of optax.
    expert_load: float32 [N, E], each expert's share of the last step's assignments.
    step: int32, steps done.
  """

  params: Tree
  optimizer: Tree
  expert_load: jax.Array
  step: jax.Array


class Sums(NamedTuple):
  """What a step's micro-batches add up to: gradients of the sum loss, and the loss's parts."""

  grads: Tree
  losses: LossSums


class StepMetrics(NamedTuple):
  """Of one step: means over its target tokens, and a count.

  Attributes:
    loss: cross entropy in nats. balance, router_z: the auxiliary losses, not weighted.
    dropped: assignments without room at their expert.
  """

  loss: jax.Array
  balance: jax.Array
  router_z: jax.Array
  grad_norm: jax.Array
  learning_rate: jax.Array
  dropped: jax.Array


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Linear warmup to the peak, then the decay of the config over the rest of the run."""
  peak, final = config.learning_rate, config.learning_rate * config.final_learning_rate_fraction
  decay_steps = max(1, steps - config.warmup_steps)
  decay = {
    'cosine': optax.cosine_decay_schedule(peak, decay_steps, config.final_learning_rate_fraction),
    'linear': optax.linear_schedule(peak, final, decay_steps),
    'constant': optax.constant_schedule(peak),
  }[config.schedule]
  if not config.warmup_steps:
    return decay
  warmup = optax.linear_schedule(peak / config.warmup_steps, peak, config.warmup_steps)
  return optax.join_schedules([warmup, decay], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
  """AdamW after clipping by the global norm; norm scales are not decayed."""

  def decayed(params: Tree) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, _: leaf_name(path) != 'scale', params)

  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      schedule, config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay, mask=decayed
    ),
  )


def _placed(shapes: Tree, shardings: Tree) -> Tree:
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, shardings
  )


class TrainStep:
  """The compiled programs of a run on a mesh.

  Attributes:
    run: the run with the mesh's platform in it; plans for this step are made from it.
    specs: a PartitionSpec for each parameter.
    traces: how often each program was traced, which is how often it was compiled.
  """

  def __init__(self, run: RunConfig, mesh: Mesh):
    run = with_platform(run, mesh)
    self.run, self.mesh = run, mesh
    self.contexts = Contexts(run, mesh)
    self.specs = parameter_specs(run.model, self.contexts.expert_ranks, mesh)
    self.schedule = learning_rate_schedule(run.optimizer, run.train.steps)
    self.optimizer = make_optimizer(run.optimizer, self.schedule)
    self.traces: Counter[str] = Counter()
    self.state_shardings = self._state_shardings()
    replicated = sharding(mesh, REPLICATED)
    self._sums_shardings = Sums(self.state_shardings.params, LossSums(*(replicated,) * len(LossSums._fields)))
    self._accumulate = jax.jit(
      self._traced_accumulate,
      static_argnames=('program',),
      donate_argnames=('sums',),
      out_shardings=self._sums_shardings,
    )
    self._update = jax.jit(
      self._traced_update,
      donate_argnames=('state', 'sums'),
      out_shardings=(self.state_shardings, replicated, self._sums_shardings),
    )

  # --- state ----------------------------------------------------------------------------------------------

  def init_state(self) -> TrainState:
    """The initial state, each rank holding its shards only."""
    return jax.jit(self._initial_state, out_shardings=self.state_shardings)()

  def zero_sums(self) -> Sums:
    return jax.jit(self._zero_sums, out_shardings=self._sums_shardings)()

  def state_shapes(self) -> TrainState:
    """Shapes, dtypes and shardings of the state: what a checkpoint is restored into."""
    return _placed(jax.eval_shape(self._initial_state), self.state_shardings)

  def _initial_state(self) -> TrainState:
    params = init_parameters(self.run.model, self.run.train.seed)
    return TrainState(params, self.optimizer.init(params), self._uniform_load(), jnp.int32(0))

  def _uniform_load(self) -> jax.Array:
    experts = max(1, self.run.model.num_experts)
    return jnp.full((self.run.model.num_layers, experts), 1 / experts, jnp.float32)

  def _zero_sums(self) -> Sums:
    params = init_parameters(self.run.model, 0)
    counts = jnp.zeros_like(self._uniform_load(), jnp.int32)
    zero = jnp.float32(0)
    losses = LossSums(zero, zero, zero, counts, jnp.int32(0))
    return Sums(jax.tree.map(jnp.zeros_like, params), losses)

  def _state_shardings(self) -> TrainState:
    """Optimizer moments lie where their parameters do; everything small is replicated."""
    replicated = sharding(self.mesh, REPLICATED)
    params = jax.tree.map(functools.partial(sharding, self.mesh), self.specs)
    shapes = jax.eval_shape(self._initial_state)
    moments = optax.tree_map_params(
      self.optimizer,
      lambda _, place: place,
      shapes.optimizer,
      params,
      transform_non_params=lambda _: replicated,
    )
    return TrainState(params, moments, replicated, replicated)

  # --- one step -------------------------------------------------------------------------------------------

  def widest_degree(self, plan: Plan) -> dict[str, int]:
    """For `arrays.pack`: the widest SP degree that the program of this plan's scopes knows."""
    return {kind: scope_degrees(self.run, plan.scope(kind))[-1] for kind in (FULL, SPARSE)}

  def put(self, arrays: PlanArrays) -> PlanArrays:
    """Host arrays to devices, one block a rank."""
    return jax.device_put(arrays, sharding(self.mesh, RANK_BLOCKS))

  def accumulate(self, state: TrainState, sums: Sums, plan: Plan, arrays: PlanArrays) -> Sums:
    """Adds one micro-batch's gradients and losses to `sums`, which is donated."""
    assert plan.row_tokens == self.contexts.row_tokens, 'this plan was made for another platform'
    return self._accumulate(state.params, state.expert_load, sums, arrays, program=plan.program)

  def update(self, state: TrainState, sums: Sums, target_tokens: int) -> tuple[TrainState, StepMetrics, Sums]:
    """The step's update from its sums; both are donated. Also returns zeroed sums for the next step."""
    return self._update(state, sums, jnp.float32(max(1, target_tokens)))

  def lowered(self, program: Program) -> dict[str, jax.stages.Lowered]:
    """The step's two programs, `accumulate` and `update`, for compiling ahead of any data."""
    state, arrays = self.state_shapes(), self._array_shapes(program)
    sums = _placed(jax.eval_shape(self._zero_sums), self._sums_shardings)
    tokens = jax.ShapeDtypeStruct((), jnp.float32)
    return {
      'accumulate': self._accumulate.lower(state.params, state.expert_load, sums, arrays, program=program),
      'update': self._update.lower(state, sums, tokens),
    }

  def _array_shapes(self, program: Program) -> PlanArrays:
    ranks, slots = self.run.cluster.num_ranks, program.capacity_tokens

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((ranks, *dims), jnp.int32, sharding=sharding(self.mesh, RANK_BLOCKS))

    def route(scope: str) -> Route:
      exchange = self.contexts.exchange(scope, slots)
      return Route(shape(), shape(), shape(), shape(exchange.scope_ranks), shape(exchange.widest * slots))

    token_arrays = (shape(slots) for _ in range(4))
    return PlanArrays(*token_arrays, route(program.full_scope), route(program.sparse_scope))

  def memory_bytes(self, compiled: jax.stages.Compiled) -> dict[str, int]:
    """What a rank holds while the compiled `accumulate` runs."""
    state, analysis = self.state_shapes(), compiled.memory_analysis()

    def shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
      assert leaf.sharding is not None
      return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    # XLA:CPU's peak leaves temporaries out; XLA:TPU's sum of temporaries counts what never lives at once.
    buffers = analysis.peak_memory_in_bytes - analysis.argument_size_in_bytes
    if self.run.cluster.platform == 'cpu':
      buffers = analysis.temp_size_in_bytes
    parts = {'parameters_bytes': state.params, 'optimizer_bytes': state.optimizer}
    sizes = {name: sum(map(shard_bytes, jax.tree.leaves(tree))) for name, tree in parts.items()}
    return sizes | {
      'gradients_bytes': sizes['parameters_bytes'],
      'activations_and_buffers_bytes': buffers,
      'program_bytes': analysis.generated_code_size_in_bytes,
    }

  def gradients(self, params: Tree, load: jax.Array, arrays: PlanArrays, program: Program) -> Sums:
    """Gradients and losses of one micro-batch, summed over all ranks. Traceable."""
    ctx = self.contexts.context(program)

    def rank_gradients(params: Tree, load: jax.Array, arrays: PlanArrays) -> Sums:
      batch = jax.tree.map(lambda x: x[0], arrays)
      own = jax.value_and_grad(loss_sums, has_aux=True)
      (_, losses), grads = own(params, self.specs, load, batch, ctx)
      return Sums(reduce_gradients(grads, self.specs), lax.psum(losses, ALL_AXES))

    return jax.shard_map(
      rank_gradients,
      mesh=self.mesh,
      in_specs=(self.specs, REPLICATED, RANK_BLOCKS),
      out_specs=Sums(self.specs, PartitionSpec()),
      check_vma=False,
    )(params, load, arrays)

  def _traced_accumulate(
    self, params: Tree, load: jax.Array, sums: Sums, arrays: PlanArrays, program: Program
  ) -> Sums:
    self.traces['accumulate'] += 1
    return jax.tree.map(jnp.add, sums, self.gradients(params, load, arrays, program))

  def _traced_update(
    self, state: TrainState, sums: Sums, target_tokens: jax.Array
  ) -> tuple[TrainState, StepMetrics, Sums]:
    self.traces['update'] += 1
    losses = sums.losses
    grads = jax.tree.map(lambda g: g / target_tokens, sums.grads)
    updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
    totals = losses.expert_counts.sum(axis=-1, keepdims=True)
    load = jnp.where(totals > 0, losses.expert_counts / jnp.maximum(totals, 1), self._uniform_load())
    metrics = StepMetrics(
      losses.cross_entropy / target_tokens,
      losses.balance / target_tokens,
      losses.router_z / target_tokens,
      optax.tree.norm(grads),
      jnp.float32(self.schedule(state.step)),
      losses.dropped,
    )
    new_state = TrainState(optax.apply_updates(state.params, updates), optimizer, load, state.step + 1)
    return new_state, metrics, jax.tree.map(jnp.zeros_like, sums)
