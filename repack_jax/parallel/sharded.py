"""Sharded parameters: how they are gathered for a layer, and how their gradients come back.

Master weights are float32, sharded over the domain; a layer's weights exist whole only while it runs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from repack_jax.parallel.mesh import ALL_AXES, NODE

FLOAT32_NAMES = ('scale', 'router')  # small, and used in float32
EXPERT_NAMES = ('expert_gate', 'expert_up', 'expert_down')  # first dimension: experts

Tree = Any


def leaf_name(path: tuple) -> str:
  """The attribute name of a parameter, from its path in a tree."""
  names = [str(getattr(key, 'key', getattr(key, 'name', ''))) for key in path]
  return next((name for name in reversed(names) if name not in ('', 'value')), '')


def _gathered_dimension(spec: PartitionSpec) -> tuple[int, tuple[str, ...]] | None:
  """The dimension to gather and its axes. The expert dimension, sharded over `local` alone, stays so."""
  for dimension, entry in enumerate(spec):
    axes = (entry,) if isinstance(entry, str) else entry
    if axes and NODE in axes:
      return dimension, axes
  return None


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
  """Gradients are summed over ranks in float32, whatever the compute dtype."""
  grad = grad.astype(jnp.float32)
  for axis in axes:
    grad = lax.psum_scatter(grad, axis, scatter_dimension=dimension, tiled=True)
  return (grad,)


_gather.defvjp(_gather_fwd, _gather_bwd)


def gather_parameters(shards: Tree, specs: Tree, dtype: jnp.dtype) -> Tree:
  """Whole parameters in the compute dtype from a rank's shards; spread experts keep their own only."""

  def gather(path: tuple, shard: jax.Array, spec: PartitionSpec) -> jax.Array:
    kind = jnp.dtype(jnp.float32) if leaf_name(path) in FLOAT32_NAMES else dtype
    found = _gathered_dimension(spec)
    return shard.astype(kind) if found is None else _gather(shard, *found, kind)

  return jax.tree_util.tree_map_with_path(gather, shards, specs)


def save_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
  """A policy of `jax.checkpoint`: gathered weights are gathered again, so that they don't pile up.

  A policy by name would not do: the result of the gather itself, before it got its name, would be saved.
  """
  del primitive
  body = params.get('call_jaxpr')  # of a custom_vjp, such as `_gather`
  return body is None or all(eqn.primitive.name != 'all_gather' for eqn in body.eqns)


def reduce_gradients(grads: Tree, specs: Tree) -> Tree:
  """Sums gradients over the mesh axes that still hold partial sums: the one place that reduces them.

  Gathered parameters were reduce-scattered over their own axes on the way back.
  """

  def reduce(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
    mine = {axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)}
    rest = tuple(axis for axis in ALL_AXES if axis not in mine)
    return lax.psum(grad, rest)

  return jax.tree.map(reduce, grads, specs)
