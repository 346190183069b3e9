"""Sharded parameters: where each lies, how it is gathered for a layer, and how its gradient comes back.

Master weights are float32, sharded over the domain; a layer's weights exist whole only while it runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from repack_jax.config.weights import Weight
from repack_jax.ops.rows import Table
from repack_jax.parallel.mesh import ALL_AXES, NODE, parameter_spec

Tree = Any


@dataclass(frozen=True)
class Sharded:
  """Where a parameter lies: a leaf of a tree like the parameters' own.

  Attributes:
    weight: what it is.
    stacked: leading axes along which the weights of alike layers are stacked.
    spec: its sharding, leading axes included.
  """

  weight: Weight
  stacked: int
  spec: PartitionSpec

  @property
  def of_layer(self) -> Sharded:
    """Returns the same for one layer of a stack."""
    return Sharded(self.weight, 0, PartitionSpec(*self.spec[self.stacked :]))

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


def shard(weights: Tree, shapes: Tree, expert_ranks: int, mesh: Mesh) -> Tree:
  """Returns a `Sharded` for each parameter; stacked ones are sharded along a layer's own dimensions.

  Args:
    weights: a `Weight` for each parameter.
    shapes: the parameters' shapes, with leading axes where they are stacked.
    expert_ranks: ranks that experts are spread over.
  """

  def place(weight: Weight, leaf: jax.ShapeDtypeStruct) -> Sharded:
    stacked = len(leaf.shape) - len(weight.shape)
    assert leaf.shape[stacked:] == weight.shape, 'a parameter is not of the shape that its table says'
    spread = expert_ranks > 1 and weight.of_experts
    spec = parameter_spec(weight.shape, 0 if spread else None, mesh)
    return Sharded(weight, stacked, PartitionSpec(*(None,) * stacked, *spec))

  return jax.tree.map(place, weights, shapes)


def specs(placed: Tree) -> Tree:
  """Returns the PartitionSpecs of a tree of `Sharded`."""
  return jax.tree.map(lambda leaf: leaf.spec, placed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(shard: jax.Array, dimension: int, axes: tuple[str, ...], dtype: jnp.dtype) -> jax.Array:
  """One axis at a time, the minor first: each rank takes a share over the slow link, then all share locally.

  XLA:TPU makes a reduce-scatter over several axes at once an all-reduce of the whole, twice the bytes.
  """
  whole = shard.astype(dtype)
  for axis in reversed(axes):
    whole = lax.all_gather(whole, axis, axis=dimension, tiled=True)
  return whole


def _gather_fwd(shard, dimension, axes, dtype):
  return _gather(shard, dimension, axes, dtype), None


def _gather_bwd(dimension, axes, dtype, _, grad):
  return (_reduce_scatter(grad, dimension, axes),)


def _reduce_scatter(grad: jax.Array, dimension: int, axes: tuple[str, ...]) -> jax.Array:
  """Gradients are summed over ranks in float32, whatever the compute dtype."""
  grad = grad.astype(jnp.float32)
  for axis in axes:
    grad = lax.psum_scatter(grad, axis, scatter_dimension=dimension, tiled=True)
  return grad


_gather.defvjp(_gather_fwd, _gather_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_table(shard: jax.Array, where: Sharded, dtype: jnp.dtype) -> Table:
  """Returns a whole vocabulary table from a rank's shard; its users' gradients are added up in float32."""
  whole = gather_parameters(shard, where, dtype)
  return Table(lax.stop_gradient(whole), jnp.zeros(whole.shape, jnp.float32))


def _gather_table_fwd(shard, where, dtype):
  return gather_table(shard, where, dtype), None


def _gather_table_bwd(where, dtype, _, grad):
  return (reduce_parameters(grad.gradient, where),)


gather_table.defvjp(_gather_table_fwd, _gather_table_bwd)


def gather_parameters(shards: Tree, placed: Tree, dtype: jnp.dtype) -> Tree:
  """Returns whole parameters in the compute dtype from a rank's shards; spread experts keep their own only.

  Args:
    placed: a `Sharded` for each, of one layer.
  """

  def gather(shard: jax.Array, where: Sharded) -> jax.Array:
    kind = jnp.dtype(jnp.float32) if where.weight.is_float32 else dtype
    found = where.gathered()
    return shard.astype(kind) if found is None else _gather(shard, *found, kind)

  return jax.tree.map(gather, shards, placed)


def reduce_parameters(grads: Tree, placed: Tree) -> Tree:
  """Returns float32 gradients of a rank's shards from those of the whole weights that it had gathered.

  They are partial sums still over the mesh axes that `reduce_gradients` adds up.

  Args:
    placed: a `Sharded` for each, of one layer.
  """

  def reduce(grad: jax.Array, where: Sharded) -> jax.Array:
    found = where.gathered()
    return grad.astype(jnp.float32) if found is None else _reduce_scatter(grad, *found)

  return jax.tree.map(reduce, grads, placed)


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
