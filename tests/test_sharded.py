"""Parameters in shards: whole for a layer, gradients back to the shards, small ones in one buffer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_runs import equations, run_config

from repack_jax.config.weights import Weight
from repack_jax.parallel.mesh import ALL_AXES, LOCAL_AXIS, make_mesh, sharding
from repack_jax.parallel.sharded import (
  buffer_elements,
  gather_parameters,
  reduce_gradients,
  reduce_parameters,
  shard,
  specs,
)

TABLE = {
  'rows': Weight((32, 3)),
  'columns': Weight((3, 5, 8)),
  'scale': Weight((4,), is_float32=True),
  'router': Weight((8, 3), is_float32=True),
  'nowhere': Weight((3,)),
  'experts': {'up': Weight((4, 3, 6), of_experts=True), 'down': Weight((4, 6, 3), of_experts=True)},
}


@pytest.mark.parametrize('at_once', [False, True])
@pytest.mark.parametrize('expert_ranks', [1, 2])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16], ids=['float32', 'bfloat16'])
def test_there_and_back(dtype, expert_ranks, at_once):
  mesh, rng = make_mesh(run_config(4).cluster), np.random.default_rng(0)  # 2 nodes of 2
  values = jax.tree.map(lambda weight: rng.integers(-9, 9, weight.shape).astype(np.float32), TABLE)
  placed = shard(TABLE, values, expert_ranks, mesh)
  assert not any(leaf.at_once for leaf in jax.tree.leaves(placed))  # on TPUs alone
  placed = jax.tree.map(lambda leaf: dataclasses.replace(leaf, at_once=at_once), placed)
  grads = jax.tree.map(lambda x: rng.integers(-9, 9, (4, *x.shape)).astype(np.float32), values)

  def own(grad: jax.Array, weight: Weight) -> jax.Array:
    """Those experts of the whole that a rank has after the gather."""
    if expert_ranks == 1 or not weight.of_experts:
      return grad
    return jax.lax.dynamic_slice_in_dim(grad, jax.lax.axis_index(LOCAL_AXIS) * 2, 2)

  def one_rank(shards, grads):
    mine = jax.tree.map(lambda grad, weight: own(grad[0], weight), grads, TABLE)
    whole, vjp = jax.vjp(lambda shards: gather_parameters(shards, placed, dtype), shards)
    (back,) = vjp(jax.tree.map(lambda x, grad: grad.astype(x.dtype), whole, mine))
    by_hand = reduce_parameters(mine, placed, dtype)
    return (
      jax.tree.map(lambda x: x[None], whole),
      *(reduce_gradients(x, placed) for x in (back, by_hand)),
    )

  of_ranks = jax.sharding.PartitionSpec(ALL_AXES)
  run = jax.shard_map(
    one_rank, mesh=mesh, in_specs=(specs(placed), of_ranks),
    out_specs=(of_ranks, specs(placed), specs(placed)), check_vma=False,
  )  # fmt: skip
  shards = jax.device_put(values, jax.tree.map(functools.partial(sharding, mesh), specs(placed)))
  whole, *gradients = jax.jit(run)(shards, grads)

  def check_whole(got, want, weight):
    assert got.dtype == (jnp.float32 if weight.is_float32 else dtype)
    for rank in range(4):
      spread = weight.of_experts and expert_ranks > 1
      mine = want[rank % 2 * 2 :][:2] if spread else want
      np.testing.assert_array_equal(np.float32(got[rank]), mine)

  jax.tree.map(check_whole, whole, values, TABLE)

  def check_gradients(got, grads, weight):
    want = grads.sum(axis=0)
    if weight.of_experts and expert_ranks > 1:  # of the ranks at their place in both nodes
      want = np.concatenate([grads[rank::2, rank * 2 :][:, :2].sum(axis=0) for rank in range(2)])
    np.testing.assert_array_equal(got, want)

  for found in gradients:
    jax.tree.map(check_gradients, found, grads, TABLE)
  # A buffer of each dtype, and one of experts where they are spread, over one axis less.
  several = 1 if dtype == jnp.float32 else 2
  buffers = several + (expert_ranks > 1)
  expected = 2 * several + (expert_ranks > 1)
  jaxpr = jax.make_jaxpr(run)(shards, grads).jaxpr
  assert len(equations(jaxpr, 'all_gather')) == (buffers if at_once else expected)
  assert len(equations(jaxpr, 'reduce_scatter')) == 2 * expected  # ours, and those of autodiff
  # Each of fewer elements than a tile has, and so padded to one.
  assert buffer_elements(placed, dtype, mesh) == [8 * 128] * buffers
