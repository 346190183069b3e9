"""The training step: gradients summed over micro-batches, then one update.

Two compiled programs: `accumulate` (forward and backward of one micro-batch, under `shard_map`), compiled
once for each `Program` that plans ask for, and `update` (clip, AdamW), compiled once.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from repack_jax.config.run import RunConfig
from repack_jax.parallel.mesh import ALL_AXES, RANK_BLOCKS, REPLICATED, sharding
from repack_jax.parallel.sharded import reduce_gradients, shard, specs
from repack_jax.parallel.xla_flags import compiler_options
from repack_jax.plan.arrays import PlanArrays, Route
from repack_jax.plan.plan import CHILDREN, PARENTS, Plan
from repack_jax.plan.program import Program
from repack_jax.training.context import Implementations, StepContext
from repack_jax.training.optimizer import learning_rate_schedule, make_optimizer

Tree = Any
Metrics = dict[str, jax.Array]


class Model(Protocol):
  """What the step needs of a model. Losses are a tree of sums over tokens."""

  def init(self, seed: int) -> Tree:
    """Returns float32 master weights. Traceable."""

  def weights(self) -> Tree:
    """Returns a `Weight` for each of them."""

  def init_carry(self) -> Tree:
    """Returns what the first step is given; later ones are given what the last one's losses make of it."""

  def next_carry(self, losses: Tree) -> Tree:
    """Returns what the next step is given, from a step's summed losses."""

  def zero_losses(self) -> Tree:
    """Returns losses of nothing."""

  def metrics(self, losses: Tree, target_tokens: jax.Array) -> Metrics:
    """Returns what is reported of a step's summed losses: scalars, by name."""

  def loss_sums(
    self, params: Tree, placed: Tree, carry: Tree, batch: PlanArrays, ctx: StepContext
  ) -> tuple[jax.Array, Tree]:
    """Runs this rank's block of a micro-batch, inside `shard_map`.

    Args:
      params: this rank's shards; `placed` has a `Sharded` for each.
      carry: as `next_carry` made it.
      batch: the rank's own arrays, without the axis of ranks.

    Returns:
      (the rank's own *sum* loss, not divided by anything; its losses).
    """


class TrainState(NamedTuple):
  """What a checkpoint holds.

  Attributes:
    params: float32 master weights.
    optimizer: the state of optax.
    carry: what the model hands from step to step.
    step: int32, steps done.
  """

  params: Tree
  optimizer: Tree
  carry: Tree
  step: Any


class Sums(NamedTuple):
  """What a step's micro-batches add up to: gradients of the sum loss, and the losses."""

  grads: Tree
  losses: Tree


def _placed(shapes: Tree, shardings: Tree) -> Tree:
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, shardings
  )


class TrainStep:
  """The compiled programs of a run on a mesh.

  Attributes:
    placed: a `Sharded` for each parameter.
    traces: how often each program was traced, which is how often it was compiled.
    compile_s: seconds spent in calls that compiled.
    watch_compile: what such a call runs in; it is given what is compiled, in words.
  """

  def __init__(self, run: RunConfig, mesh: Mesh, model: Model):
    self.run, self.mesh, self.model = run, mesh, model
    self.chosen = Implementations.choose(run, mesh)
    weights = model.weights()
    shapes = jax.eval_shape(functools.partial(model.init, 0))
    self.placed = shard(weights, shapes, self.chosen.expert_ranks, mesh)
    self.schedule = learning_rate_schedule(run.optimizer, run.train.steps)
    self.optimizer = make_optimizer(run.optimizer, self.schedule, weights)
    self.traces: Counter[str] = Counter()
    self.compile_s = 0.0
    self.watch_compile: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    self._compiled: set[Program | None] = set()  # None stands for the update
    self.state_shardings = self._state_shardings()
    replicated = sharding(mesh, REPLICATED)
    losses = jax.tree.map(lambda _: replicated, jax.eval_shape(model.zero_losses))
    self._sums_shardings = Sums(self.state_shardings.params, losses)
    self._accumulate = jax.jit(
      self._traced_accumulate,
      static_argnames=('program',),
      donate_argnames=('sums',),
      out_shardings=self._sums_shardings,
      compiler_options=compiler_options(mesh.devices.flat[0].device_kind, run.cluster),
    )
    self._update = jax.jit(
      self._traced_update,
      donate_argnames=('state', 'sums'),
      out_shardings=(self.state_shardings, replicated, self._sums_shardings),
    )

  # --- state ----------------------------------------------------------------------------------------------

  def init_state(self) -> TrainState:
    """Returns the initial state, each rank holding its shards only."""
    return jax.jit(self._initial_state, out_shardings=self.state_shardings)()

  def zero_sums(self) -> Sums:
    """Returns the sums of no micro-batch."""
    return jax.jit(self._zero_sums, out_shardings=self._sums_shardings)()

  def state_shapes(self) -> TrainState:
    """Returns shapes, dtypes and shardings of the state: what a checkpoint is restored into."""
    return _placed(jax.eval_shape(self._initial_state), self.state_shardings)

  def _initial_state(self) -> TrainState:
    params = self.model.init(self.run.train.seed)
    return TrainState(params, self.optimizer.init(params), self.model.init_carry(), jnp.int32(0))

  def _zero_sums(self) -> Sums:
    return Sums(jax.tree.map(jnp.zeros_like, self.model.init(0)), self.model.zero_losses())

  def _state_shardings(self) -> TrainState:
    """Optimizer moments lie where their parameters do; everything small is replicated."""
    replicated = sharding(self.mesh, REPLICATED)
    params = jax.tree.map(functools.partial(sharding, self.mesh), specs(self.placed))
    shapes = jax.eval_shape(self._initial_state)
    moments = optax.tree_map_params(
      self.optimizer,
      lambda _, place: place,
      shapes.optimizer,
      params,
      transform_non_params=lambda _: replicated,
    )
    carry = jax.tree.map(lambda _: replicated, shapes.carry)
    return TrainState(params, moments, carry, replicated)

  # --- one step -------------------------------------------------------------------------------------------

  def program(self, plan: Plan) -> Program:
    """Returns the program that runs a plan; raises PlanError where the run has none that can."""
    return Program.of_plan(plan, self.run.sp_degrees)

  def put(self, arrays: PlanArrays) -> PlanArrays:
    """Returns host arrays on the devices, one block a rank."""
    return jax.device_put(arrays, sharding(self.mesh, RANK_BLOCKS))

  def accumulate(self, state: TrainState, sums: Sums, program: Program, arrays: PlanArrays) -> Sums:
    """Returns `sums`, which is donated, with one micro-batch's gradients and losses added."""
    solo = ' and solo samples' if program.has_solo else ''
    halo = '' if program.halo_tokens is None else ' by halo'
    what = f'parents over {program.parents_span} ranks, children over {program.children_span}{halo}{solo}'
    with self._compiling(what, program):
      return self._accumulate(state.params, state.carry, sums, arrays, program=program)

  def update(self, state: TrainState, sums: Sums, target_tokens: int) -> tuple[TrainState, Metrics, Sums]:
    """Returns the state after the update, the step's metrics, and zeroed sums; state and sums are donated.

    Where the loss or the gradient norm is not finite, the update is not applied: the metric `skipped` is 1,
    and the state is as before, but for its step where the run goes on (`TrainConfig.on_divergence`).
    """
    with self._compiling('the update'):
      return self._update(state, sums, jnp.float32(max(1, target_tokens)))

  @contextlib.contextmanager
  def _compiling(self, what: str, program: Program | None = None) -> Iterator[None]:
    """Runs a call; the first of each program, which compiles it, in `watch_compile`."""
    if program in self._compiled:
      yield
      return
    start = time.perf_counter()
    with self.watch_compile(what):
      yield
    self._compiled.add(program)
    self.compile_s += time.perf_counter() - start

  def gradients(self, params: Tree, carry: Tree, arrays: PlanArrays, program: Program) -> Sums:
    """Returns gradients and losses of one micro-batch, summed over all ranks. Traceable."""
    ctx = StepContext(program, self.chosen)

    def rank_gradients(params: Tree, carry: Tree, arrays: PlanArrays) -> Sums:
      batch = jax.tree.map(lambda x: x[0], arrays)
      own = jax.value_and_grad(self.model.loss_sums, has_aux=True)
      (_, losses), grads = own(params, self.placed, carry, batch, ctx)
      return Sums(reduce_gradients(grads, self.placed), lax.psum(losses, ALL_AXES))

    return jax.shard_map(
      rank_gradients,
      mesh=self.mesh,
      in_specs=(specs(self.placed), REPLICATED, RANK_BLOCKS),
      out_specs=Sums(specs(self.placed), PartitionSpec()),
      check_vma=False,
    )(params, carry, arrays)

  def _traced_accumulate(
    self, params: Tree, carry: Tree, sums: Sums, arrays: PlanArrays, program: Program
  ) -> Sums:
    self.traces['accumulate'] += 1
    return jax.tree.map(jnp.add, sums, self.gradients(params, carry, arrays, program))

  def _traced_update(
    self, state: TrainState, sums: Sums, target_tokens: jax.Array
  ) -> tuple[TrainState, Metrics, Sums]:
    self.traces['update'] += 1
    grads = jax.tree.map(lambda g: g / target_tokens, sums.grads)
    updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
    metrics = self.model.metrics(sums.losses, target_tokens) | {'grad_norm': optax.tree.norm(grads)}
    finite = jnp.isfinite(metrics['loss']) & jnp.isfinite(metrics['grad_norm'])
    # Of updates, which are fewer than steps where some were skipped.
    (_, updated), *_ = optax.tree_utils.tree_get_all_with_path(state.optimizer, 'count')
    metrics |= {'lr': jnp.float32(self.schedule(updated)), 'skipped': jnp.int32(~finite)}
    params = optax.apply_updates(state.params, updates)
    goes_on = finite | (self.run.train.on_divergence == 'skip')
    after = TrainState(params, optimizer, self.model.next_carry(sums.losses), state.step)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
    new_state = kept._replace(step=state.step + goes_on.astype(state.step.dtype))
    return new_state, metrics, jax.tree.map(jnp.zeros_like, sums)

  # --- ahead of any data ------------------------------------------------------------------------------------

  def lowered(self, program: Program) -> dict[str, jax.stages.Lowered]:
    """Returns the step's two programs, `accumulate` and `update`, for compiling ahead of any data."""
    state, arrays = self.state_shapes(), self._array_shapes(program)
    sums = _placed(jax.eval_shape(self._zero_sums), self._sums_shardings)
    tokens = jax.ShapeDtypeStruct((), jnp.float32)
    return {
      'accumulate': self._accumulate.lower(state.params, state.carry, sums, arrays, program=program),
      'update': self._update.lower(state, sums, tokens),
    }

  def _array_shapes(self, program: Program) -> PlanArrays:
    ranks, slots = self.run.cluster.num_ranks, program.capacity_tokens

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((ranks, *dims), jnp.int32, sharding=sharding(self.mesh, RANK_BLOCKS))

    def route(layout: str) -> Route:
      widest_slots = program.degrees(layout)[-1] * slots
      return Route(shape(), shape(), shape(), shape(program.span(layout)), shape(widest_slots))

    of_slots = shape(slots)
    return PlanArrays(of_slots, of_slots, of_slots, of_slots, route(PARENTS), route(CHILDREN))

  def memory_bytes(self, compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns what a rank holds while the compiled `accumulate` runs, by purpose."""
    state, analysis = self.state_shapes(), compiled.memory_analysis()
    assert analysis is not None, 'this backend does not say what a program takes'

    def shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
      assert leaf.sharding is not None
      return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    # XLA:CPU's peak leaves temporaries out; XLA:TPU's sum of temporaries counts what never lives at once.
    buffers = analysis.peak_memory_in_bytes - analysis.argument_size_in_bytes
    if self.mesh.devices.flat[0].platform == 'cpu':
      buffers = analysis.temp_size_in_bytes
    parts = {'parameters_bytes': state.params, 'optimizer_bytes': state.optimizer}
    sizes = {name: sum(map(shard_bytes, jax.tree.leaves(tree))) for name, tree in parts.items()}
    return sizes | {
      'gradients_bytes': sizes['parameters_bytes'],
      'activations_and_buffers_bytes': buffers,
      'program_bytes': analysis.generated_code_size_in_bytes,
    }
