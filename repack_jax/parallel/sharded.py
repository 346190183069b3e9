"""Sharded parameters: where each lies, how it is gathered for a layer, and how its gradient comes back.

Master weights are float32, sharded over the domain; a layer's weights exist whole only while it runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from repack_jax.config import weights
from repack_jax.config.weights import Weight
from repack_jax.ops.rows import Table
from repack_jax.parallel.mesh import ALL_AXES, NODE, TILE_COLUMNS, TILE_ROWS, parameter_spec

Tree = Any
_TILE = TILE_ROWS * TILE_COLUMNS


@dataclass(frozen=True)
class Sharded:
  """Where a parameter lies: a leaf of a tree like the parameters' own.

  Attributes:
    weight: what it is.
    stacked: leading axes along which the weights of alike layers are stacked.
    spec: its sharding, leading axes included.
    at_once: it is gathered over all its axes in one collective, rather than over one after the other.
  """

  weight: Weight
  stacked: int
  spec: PartitionSpec
  at_once: bool

  @property
  def of_layer(self) -> Sharded:
    """Returns the same for one layer of a stack."""
    return replace(self, stacked=0, spec=PartitionSpec(*self.spec[self.stacked :]))

  @property
  def axes(self) -> list[tuple[str, ...]]:
    """Returns the mesh axes that each dimension is sharded over."""
    return [(entry,) if isinstance(entry, str) else entry or () for entry in self.spec]

  def gathered(self) -> tuple[int, tuple[str, ...]] | None:
    """Returns the dimension to gather and its axes. Spread experts, sharded over `local` alone, stay so."""
    for dimension, axes in enumerate(self.axes):
      if NODE in axes:
        return dimension, axes
    return None


def shard(declared: Tree, shapes: Tree, expert_ranks: int, mesh: Mesh) -> Tree:
  """Returns a `Sharded` for each parameter; stacked ones are sharded along a layer's own dimensions.

  Args:
    declared: a `Weight` for each parameter.
    shapes: the parameters' shapes, with leading axes where they are stacked.
    expert_ranks: ranks that experts are spread over.
  """

  # A torus has no slow link between nodes, and one collective hides where two in a row would not (compiled).
  at_once = mesh.devices.flat[0].platform == 'tpu'

  def place(weight: Weight, leaf: jax.ShapeDtypeStruct) -> Sharded:
    stacked = len(leaf.shape) - len(weight.shape)
    assert leaf.shape[stacked:] == weight.shape, 'a parameter is not of the shape that its table says'
    spread = expert_ranks > 1 and weight.of_experts
    spec = parameter_spec(weight.shape, 0 if spread else None, mesh)
    return Sharded(weight, stacked, PartitionSpec(*(None,) * stacked, *spec), at_once)

  return jax.tree.map(place, declared, shapes)


def specs(placed: Tree) -> Tree:
  """Returns the PartitionSpecs of a tree of `Sharded`."""
  return jax.tree.map(lambda leaf: leaf.spec, placed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(
  shards: tuple[jax.Array, ...],
  dimensions: tuple[int, ...],
  axes: tuple[str, ...],
  at_once: bool,
  dtype: jnp.dtype,
) -> tuple[jax.Array, ...]:
  """Gathers shards along a dimension each: several as one buffer.

  One axis at a time, the minor first: each rank takes a share over the slow link, then all share locally; or
  over all at once. Gradients are reduced one axis at a time: XLA:TPU makes a reduce-scatter over several at
  once an all-reduce of the whole, twice the bytes.
  """

  def all_gather(shard: jax.Array, dimension: int) -> jax.Array:
    for axis in (axes,) if at_once else reversed(axes):
      shard = lax.all_gather(shard, axis, axis=dimension, tiled=True)
    return shard

  if len(shards) == 1:
    return (all_gather(shards[0].astype(dtype), dimensions[0]),)
  flat = _tiled(jnp.concatenate([shard.astype(dtype).reshape(1, -1) for shard in shards], axis=1))
  ranks = lax.axis_size(axes)
  sizes = [shard.size for shard in shards]
  of_ranks = all_gather(flat, 0).reshape(ranks, -1)[:, : sum(sizes)]
  parts = jnp.split(of_ranks, np.cumsum(sizes)[:-1], axis=1)
  whole = []
  for part, shard, dimension in zip(parts, shards, dimensions, strict=True):
    apart = jnp.moveaxis(part.reshape(ranks, *shard.shape), 0, dimension)
    whole.append(apart.reshape(*shard.shape[:dimension], -1, *shard.shape[dimension + 1 :]))
  # XLA:TPU would take their order into the products that use them, and multiply several times as much.
  return lax.optimization_barrier(tuple(whole))


def _gather_fwd(shards, dimensions, axes, at_once, dtype):
  return _gather(shards, dimensions, axes, at_once, dtype), None


def _gather_bwd(dimensions, axes, at_once, dtype, _, grads):
  return (_reduce_scatter(grads, dimensions, axes),)


def _reduce_scatter(
  grads: Sequence[jax.Array], dimensions: tuple[int, ...], axes: tuple[str, ...]
) -> tuple[jax.Array, ...]:
  """What `_gather` does, transposed: gradients are summed over ranks in float32, whatever the dtype."""

  def scatter(grad: jax.Array, dimension: int) -> jax.Array:
    for axis in axes:
      grad = lax.psum_scatter(grad, axis, scatter_dimension=dimension, tiled=True)
    return grad

  grads = [grad.astype(jnp.float32) for grad in grads]
  if len(grads) == 1:
    return (scatter(grads[0], dimensions[0]),)
  ranks = lax.axis_size(axes)
  shapes, parts = [], []
  for grad, dimension in zip(grads, dimensions, strict=True):
    before, size, behind = grad.shape[:dimension], grad.shape[dimension], grad.shape[dimension + 1 :]
    shapes.append((*before, size // ranks, *behind))
    apart = grad.reshape(*before, ranks, size // ranks, *behind)
    parts.append(jnp.moveaxis(apart, dimension, 0).reshape(ranks, -1))
  sizes = [math.prod(shape) for shape in shapes]
  flat = scatter(_tiled(jnp.concatenate(parts, axis=1)), 0).reshape(-1)[: sum(sizes)]
  split = jnp.split(flat, np.cumsum(sizes)[:-1])
  return tuple(part.reshape(shape) for part, shape in zip(split, shapes, strict=True))


def _tiled(x: jax.Array) -> jax.Array:
  """Rows of equal length, padded to whole tiles and cut into rows of one.

  Of other shapes XLA:TPU makes all-reduces in place of gathers and reduce-scatters.
  """
  return jnp.pad(x, ((0, 0), (0, -x.shape[1] % _TILE))).reshape(-1, TILE_COLUMNS)


_gather.defvjp(_gather_fwd, _gather_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_table(shard: jax.Array, where: Sharded, dtype: jnp.dtype) -> Table:
  """Returns a whole vocabulary table from a rank's shard; its users' gradients are added up in float32."""
  whole = gather_parameters(shard, where, dtype)
  return Table(lax.stop_gradient(whole), jnp.zeros(whole.shape, jnp.float32))


def _gather_table_fwd(shard, where, dtype):
  return gather_table(shard, where, dtype), None


def _gather_table_bwd(where, dtype, _, grad):
  return (reduce_parameters(grad.gradient, where, dtype),)


gather_table.defvjp(_gather_table_fwd, _gather_table_bwd)


def gather_parameters(shards: Tree, placed: Tree, dtype: jnp.dtype) -> Tree:
  """Returns whole parameters in the compute dtype from a rank's shards; spread experts keep their own only.

  Args:
    placed: a `Sharded` for each, of one layer.
  """

  def alone(shard: jax.Array, where: Sharded) -> jax.Array:
    return shard.astype(where.weight.dtype(jnp.dtype(dtype).name))

  return _in_bundles(shards, placed, dtype, alone, _gather)


def reduce_parameters(grads: Tree, placed: Tree, dtype: jnp.dtype) -> Tree:
  """Returns float32 gradients of a rank's shards from those of the whole weights that it had gathered.

  They are partial sums still over the mesh axes that `reduce_gradients` adds up.

  Args:
    placed: a `Sharded` for each, of one layer.
    dtype: the compute dtype.
  """

  def together(
    grads: tuple[jax.Array, ...], dimensions: tuple[int, ...], axes: tuple[str, ...], *_: object
  ) -> tuple[jax.Array, ...]:
    return _reduce_scatter(grads, dimensions, axes)

  return _in_bundles(grads, placed, dtype, lambda grad, _: grad.astype(jnp.float32), together)


def _in_bundles(tree: Tree, placed: Tree, dtype: jnp.dtype, alone: Callable, together: Callable) -> Tree:
  """What `together` makes of each bundle's leaves, and `alone` of each that is not gathered."""
  leaves, structure = jax.tree.flatten(tree)
  where = jax.tree.leaves(placed)
  for place, of in enumerate(where):
    if of.gathered() is None:
      leaves[place] = alone(leaves[place], of)
  for places, *how in _bundles(where, dtype):
    made = together(tuple(leaves[i] for i in places), *how)
    for i, leaf in zip(places, made, strict=True):
      leaves[i] = leaf
  return jax.tree.unflatten(structure, leaves)


def _bundles(
  where: Sequence[Sharded], dtype: DTypeLike
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...], bool, jnp.dtype]]:
  """What is gathered as one buffer: places among the weights, their dimensions, the axes, how, the dtype."""
  compute_dtype = jnp.dtype(dtype).name
  gathered = [(place, of.weight, *found) for place, of in enumerate(where) if (found := of.gathered())]
  keyed = [((axes, weight.dtype(compute_dtype)), weight) for _, weight, _, axes in gathered]
  for bundle in weights.bundles(keyed):
    (axes, kind), _ = keyed[bundle[0]]
    places, _, dimensions, _ = zip(*(gathered[i] for i in bundle), strict=True)
    yield places, dimensions, axes, where[places[0]].at_once, jnp.dtype(kind)


def buffer_elements(placed: Tree, dtype: DTypeLike, mesh: Mesh) -> list[int]:
  """Returns the elements of a rank's shards in each buffer that a layer's parameters are gathered in.

  Args:
    placed: a `Sharded` for each, of one layer or of alike layers that are stacked.
    dtype: the compute dtype.
  """
  where = jax.tree.leaves(placed)

  def shard_elements(of: Sharded) -> int:
    return of.weight.size // math.prod(mesh.shape[axis] for axes in of.axes for axis in axes)

  buffers = []
  for places, *_ in _bundles(where, dtype):
    elements = sum(shard_elements(where[i]) for i in places)
    buffers.append(elements if len(places) == 1 else elements + -elements % _TILE)
  return buffers


def save_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
  """Returns whether to save a value: a policy of `jax.checkpoint` under which weights are gathered again.

  A policy by name would not do: the result of the gather itself, before it got its name, would be saved.
  """
  del primitive
  body = params.get('call_jaxpr')  # of a custom_vjp, such as `_gather`
  return body is None or all(eqn.primitive.name != 'all_gather' for eqn in body.eqns)


def reduce_gradients(grads: Tree, placed: Tree) -> Tree:
  """Returns gradients summed over the mesh axes that still hold partial sums: the one place that does so.

  Gathered parameters were reduce-scattered over their own axes on the way back.
  """

  def reduce(grad: jax.Array, where: Sharded) -> jax.Array:
    mine = {axis for axes in where.axes for axis in axes}
    rest = tuple(axis for axis in ALL_AXES if axis not in mine)
    return lax.psum(grad, rest)

  return jax.tree.map(reduce, grads, placed)
