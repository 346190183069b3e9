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
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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

  A turn of a loop does not know that it is the first or the last. So a layer's parameters are gathered for
  nothing behind either pass, and zeros are reduced before the first gradients.

  Args:
    layers: the function of each run of layers that are alike. The weights of all are alike in shape.
    runs: how many layers in a row each run has.
    placed: of each run, a `Sharded` for each parameter of one layer.
    dtype: the compute dtype, which weights are gathered in.
    shards: of each run, this rank's shards, [repeats, layers of the run, ...].
    own: what each layer is given besides, [repeats, layers, ...].
    shared: what all layers are given. Neither has a gradient.

  Returns:
    (x, sums, counts), the last two with leading axes [repeats, layers].
  """
  repeats = jax.tree.leaves(shards[0])[0].shape[0]
  stack = _Stack(tuple(layers), tuple(runs), tuple(placed), dtype, repeats)
  run = jax.custom_vjp(lambda *arguments: stack.forward(*arguments)[0])
  run.defvjp(stack.forward, stack.backward)
  return run(x, list(shards), own, shared)


@dataclass(frozen=True)
class _Stack:
  """Both passes of a stretch of layers; arguments as in `run_prefetched`."""

  layers: tuple[LayerFunction, ...]
  runs: tuple[int, ...]
  placed: tuple[Tree, ...]
  dtype: jnp.dtype
  repeats: int

  @property
  def _at(self) -> _Places:
    return _Places(self.runs, self.repeats)

  def _gather(self, x: jax.Array, mine: Tree, run: int) -> tuple[jax.Array, Tree]:
    """(x, a layer's weights), which are not gathered before there is x."""
    x, mine = lax.optimization_barrier((x, mine))
    return x, gather_parameters(mine, self.placed[run], self.dtype)

  def _reduce(self, grads: Tree, run: int) -> Tree:
    return reduce_parameters(grads, self.placed[run], self.dtype)

  def _of_run(self, tree: Tree, run: int) -> Tree:
    """What is a run's of trees with a leading axis of layers."""
    return jax.tree.map(lambda leaf: jnp.split(leaf, np.cumsum(self.runs)[:-1])[run], tree)

  def forward(self, x: jax.Array, shards: Sequence[Tree], own: Tree, shared: Tree) -> tuple[Any, Any]:
    """Returns ((x, sums, counts), what `backward` needs)."""

    def repeat(carry: Any, xs: tuple[jax.Array, Tree]) -> tuple[Any, Any]:
      number, of_layers = xs
      kept, outputs = [], []
      for run, layer in enumerate(self.layers):

        def turn(carry: Any, xs: tuple[jax.Array, Tree], run: int = run, layer: LayerFunction = layer) -> Any:
          x, weights = carry
          i, mine = xs
          x, gathered = self._gather(x, self._at.after(shards, run, number, i), run)
          pull: Any
          (x, sums), pull, counts = jax.vjp(layer, weights, x, mine, shared, has_aux=True)
          pull.args_res[0] = pull.args_res[2] = pull.args_res[3] = None  # the backward pass has them
          return lax.optimization_barrier((x, gathered)), (pull, (sums, counts))

        carry, (pulls, of_run) = lax.scan(
          turn, carry, (jnp.arange(self.runs[run]), self._of_run(of_layers, run))
        )
        kept.append(pulls)
        outputs.append(of_run)
      return carry, (kept, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs))

    x, first = self._gather(x, jax.tree.map(lambda leaf: leaf[0, 0], shards[0]), 0)
    (x, _), (kept, (sums, counts)) = lax.scan(repeat, (x, first), (jnp.arange(self.repeats), own))
    return (x, sums, counts), (kept, shards, own, shared)

  def backward(self, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    """Returns the gradients of x and of the shards; none of what is the layers' own or shared."""
    kept, shards, own, shared = residuals
    dx, dsums, _ = cotangents

    def repeat(carry: Any, xs: tuple[Any, ...]) -> tuple[Any, None]:
      number, kept, of_layers, of_sums = xs
      for run in reversed(range(len(self.layers))):

        def turn(carry: Any, xs: tuple[Any, ...], run: int = run) -> tuple[Any, None]:
          dx, weights, behind, grads = carry
          i, pull, mine, sums = xs
          dx, gathered = self._gather(dx, self._at.before(shards, run, number, i), run)
          grads = self._at.put_after(grads, self._reduce(behind, run), run, number, i)
          pull.args_res[0], pull.args_res[2], pull.args_res[3] = weights, mine, shared
          behind, dx, _, _ = pull((dx, sums))
          return lax.optimization_barrier((dx, gathered, behind, grads)), None

        of_run = (self._of_run(tree, run) for tree in (of_layers, of_sums))
        carry, _ = lax.scan(turn, carry, (jnp.arange(self.runs[run]), kept[run], *of_run), reverse=True)
      return carry, None

    last = len(self.layers) - 1
    dx, weights = self._gather(dx, jax.tree.map(lambda leaf: leaf[-1, -1], shards[last]), last)
    zeros = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), of_run) for of_run in shards]
    carry = dx, weights, jax.tree.map(jnp.zeros_like, weights), zeros
    of_repeats = jnp.arange(self.repeats), kept, own, dsums
    (dx, _, behind, grads), _ = lax.scan(repeat, carry, of_repeats, reverse=True)
    first = self._reduce(behind, 0)
    grads[0] = jax.tree.map(lambda to, grad: to.at[0, 0].set(grad), grads[0], first)
    return dx, grads, None, None


class _Places:
  """Neighbours of a layer, number i of a run in a repeat, among trees of [repeats, layers of a run, ...].

  Beyond the first layer and the last it is a layer of the same repeat.
  """

  def __init__(self, runs: tuple[int, ...], repeats: int):
    self.runs, self.repeats = runs, repeats

  def after(self, trees: Sequence[Tree], run: int, repeat: jax.Array, i: jax.Array) -> Tree:
    following, turn = self._next_run(run, repeat)
    own, other = i + 1 < self.runs[run], trees[following]
    return jax.tree.map(
      lambda mine, its: jnp.where(own, mine[repeat, jnp.minimum(i + 1, self.runs[run] - 1)], its[turn, 0]),
      trees[run],
      other,
    )

  def before(self, trees: Sequence[Tree], run: int, repeat: jax.Array, i: jax.Array) -> Tree:
    preceding = (run or len(self.runs)) - 1
    turn = repeat if run else jnp.maximum(repeat - 1, 0)
    return jax.tree.map(
      lambda mine, its: jnp.where(i > 0, mine[repeat, jnp.maximum(i - 1, 0)], its[turn, -1]),
      trees[run],
      trees[preceding],
    )

  def put_after(
    self, trees: Sequence[Tree], values: Tree, run: int, repeat: jax.Array, i: jax.Array
  ) -> list[Tree]:
    following, turn = self._next_run(run, repeat)
    changed = list(trees)
    for which, place, here in (
      (run, (repeat, jnp.minimum(i + 1, self.runs[run] - 1)), i + 1 < self.runs[run]),
      (following, (turn, 0), i + 1 == self.runs[run]),
    ):
      changed[which] = jax.tree.map(
        lambda to, value, place=place, here=here: to.at[place].set(jnp.where(here, value, to[place])),
        changed[which],
        values,
      )
    return changed

  def _next_run(self, run: int, repeat: jax.Array) -> tuple[int, jax.Array]:
    if run + 1 < len(self.runs):
      return run + 1, repeat
    return 0, jnp.minimum(repeat + 1, self.repeats - 1)
