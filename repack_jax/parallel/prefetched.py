"""Layers whose parameters are gathered a layer ahead, and whose gradients are reduced one behind.

Autodiff of a scan that carries the next layer's weights would keep those of every layer for the backward
pass. So both passes are written out: the forward one keeps of each layer what its `jax.vjp` does, less the
weights; the backward one gathers these again, a layer ahead there too.

Optimization barriers before a layer and behind it hold the collectives beside the one that is to hide them: a
compiler may neither begin them earlier, which would take the memory of several layers' weights, nor put them
off until they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from repack_jax.parallel.sharded import gather_parameters, reduce_parameters

Tree = Any
# (whole weights, x, what is the layer's own beside them, what all layers share) -> ((x, sums), counts). Only
# x and the sums are differentiated, and by the weights and x alone.
LayerFunction = Callable[[Tree, jax.Array, Tree, Tree], tuple[tuple[jax.Array, Tree], Tree]]


def run_prefetched(
  layers: Sequence[LayerFunction],
  runs: Sequence[int],
  placed: Sequence[Tree],
  dtype: jnp.dtype,
  x: jax.Array,
  shards: Sequence[Tree],
  own: Tree,
  shared: Tree,
) -> tuple[jax.Array, Tree, Tree]:
  """Runs a stretch of layers as often as their parameters are stacked.

  Where the stretch is repeated, a layer's parameters are gathered for nothing behind either pass, and zeros
  are reduced before the first gradients: a turn of the loop does not know that it is the first or the last.

  Args:
    layers: the functions of the stretch's layers, in their order. Their weights are alike in shape.
    runs: how many of them in a row share a tree of `shards`.
    placed: of each run, a `Sharded` for each parameter of one layer.
    dtype: the compute dtype, which weights are gathered in.
    shards: of each run, this rank's shards, [repeats, layers of the run, ...].
    own: what each layer is given besides, [repeats, layers, ...].
    shared: what all layers are given. Neither has a gradient.

  Returns:
    (x, sums, counts), the last two with leading axes [repeats, layers].
  """
  places = [(run, i) for run, count in enumerate(runs) for i in range(count)]
  last = len(places) - 1
  repeats = jax.tree.leaves(shards[0])[0].shape[0]

  def gather(x: jax.Array, shards: Sequence[Tree], repeat: jax.Array, k: int) -> tuple[jax.Array, Tree]:
    """(x, a layer's weights), which are not gathered before there is x."""
    run, i = places[k]
    x, mine = lax.optimization_barrier((x, jax.tree.map(lambda leaf: leaf[repeat, i], shards[run])))
    return x, gather_parameters(mine, placed[run], dtype)

  def after(repeat: jax.Array, k: int) -> tuple[jax.Array, int]:
    return (repeat, k + 1) if k < last else (jnp.minimum(repeat + 1, repeats - 1), 0)

  def before(repeat: jax.Array, k: int) -> tuple[jax.Array, int]:
    return (repeat, k - 1) if k > 0 else (jnp.maximum(repeat - 1, 0), last)

  def forward(x: jax.Array, shards: Sequence[Tree], own: Tree, shared: Tree) -> tuple[Any, Any]:
    def repeat(carry: tuple[jax.Array, Tree], xs: tuple[jax.Array, Tree]) -> tuple[Any, Any]:
      x, weights = carry
      number, of_layers = xs
      kept, outputs = [], []
      for k, layer in enumerate(layers):
        gathered = weights
        if k < last or repeats > 1:
          x, gathered = gather(x, shards, *after(number, k))
        mine = jax.tree.map(lambda leaf, k=k: leaf[k], of_layers)
        pull: Any
        (x, sums), pull, counts = jax.vjp(layer, weights, x, mine, shared, has_aux=True)
        pull.args_res[0] = pull.args_res[2] = pull.args_res[3] = None  # the backward pass has them
        kept.append(pull)
        outputs.append((sums, counts))
        x, weights = lax.optimization_barrier((x, gathered))
      return (x, weights), (kept, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs))

    x, first = gather(x, shards, jnp.int32(0), 0)
    (x, _), (kept, (sums, counts)) = lax.scan(repeat, (x, first), (jnp.arange(repeats), own))
    return (x, sums, counts), (kept, shards, own, shared)

  def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    kept, shards, own, shared = residuals
    dx, dsums, _ = cotangents
    zeros = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), of_run) for of_run in shards]

    def add(grads: list[Tree], whole: Tree, repeat: jax.Array, k: int) -> list[Tree]:
      run, i = places[k]
      reduced = reduce_parameters(whole, placed[run])
      put = jax.tree.map(lambda to, grad: to.at[repeat, i].set(grad), grads[run], reduced)
      return [*grads[:run], put, *grads[run + 1 :]]

    def repeat(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[Any, None]:
      dx, weights, behind, grads = carry
      number, pulls, of_layers, of_sums = xs
      for k in reversed(range(len(layers))):
        gathered = weights
        if k > 0 or repeats > 1:
          dx, gathered = gather(dx, shards, *before(number, k))
        if k < last or repeats > 1:  # in the first turn zeros, which the last repeat's own replace
          grads = add(grads, behind, *after(number, k))
        pull = pulls[k]
        pull.args_res[0], pull.args_res[3] = weights, shared
        pull.args_res[2] = jax.tree.map(lambda leaf, k=k: leaf[k], of_layers)
        behind, dx, _, _ = pull((dx, jax.tree.map(lambda leaf, k=k: leaf[k], of_sums)))
        dx, weights, behind, grads = lax.optimization_barrier((dx, gathered, behind, grads))
      return (dx, weights, behind, grads), None

    dx, weights = gather(dx, shards, jnp.int32(repeats - 1), last)
    carry = dx, weights, jax.tree.map(jnp.zeros_like, weights), zeros
    (dx, _, behind, grads), _ = lax.scan(repeat, carry, (jnp.arange(repeats), kept, own, dsums), reverse=True)
    return dx, add(grads, behind, jnp.int32(0), 0), None, None

  run = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
  run.defvjp(forward, backward)
  return run(x, list(shards), own, shared)
