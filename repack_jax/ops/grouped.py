"""Products of rows with the weights of their group: what experts compute.

Axis legend: A rows, sorted by group, G groups, d and f features, B rows of a block, N blocks.

Two implementations of one function. `ragged_dot` is XLA's own: a grouped kernel on TPU (before JAX 0.12 but
for the gradient of the weights, which is by blocks there), on GPU and CPU mostly a dense product of all rows
with all groups, G times the work. `blocks` is plain JAX: a loop over blocks of B rows of one group each, with
as many trips as the worst split of rows needs, so that it never recompiles and no bound is read back from the
device.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from repack_jax.ops.products import einsum, matmul, precision_of

_MOST_BLOCK_ROWS = 512
_BLOCKS_A_GROUP = 4  # at an even split: a group's last block is half empty on average, so an eighth is lost
_LEAST_BLOCK_ROWS = 8

# For v5p, JAX 0.10.2 compiles it to a product of all rows with all groups, 0.12.0.1 to a grouped kernel.
NATIVE_WEIGHT_GRADIENT = tuple(int(n) for n in jax.__version__.split('.')[:2]) >= (0, 12)

log = logging.getLogger(__name__)


def choose_grouped(name: str, platform: str) -> str:
  """Returns `ragged_dot` or `blocks`, logged: an explicit choice stands, `auto` takes the faster one."""
  chosen = name if name != 'auto' else ('ragged_dot' if platform == 'tpu' else 'blocks')
  log.info(
    'grouped products: %s (%s, on %s)', chosen, 'chosen by auto' if name == 'auto' else 'as asked', platform
  )
  return chosen


def block_size(rows: int, groups: int) -> int:
  """Returns B: a power of two, a quarter of an even group, within limits."""
  even = max(1, rows // (groups * _BLOCKS_A_GROUP))
  return min(_MOST_BLOCK_ROWS, max(_LEAST_BLOCK_ROWS, 1 << (even.bit_length() - 1)))


def num_blocks(rows: int, groups: int) -> int:
  """Returns N, the blocks of the worst split, in which each group's last block holds one row."""
  return rows // block_size(rows, groups) + groups


def product_rows(implementation: str, rows: int, groups: int) -> int:
  """Returns the rows that an implementation multiplies for A rows, whatever the split."""
  plain = implementation == 'ragged_dot' or groups == 1
  return rows if plain else num_blocks(rows, groups) * block_size(rows, groups)


def grouped_matmul(implementation: str, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
  """Returns x [A, d] times weights [G, d, f]: [A, f] in x's dtype, differentiable in both.

  Args:
    sizes: int32 [G], rows of each group, in order; rows past their sum come out as zero.
  """
  inside = (jnp.arange(x.shape[0]) < sizes.sum())[:, None]
  if implementation == 'ragged_dot':
    if NATIVE_WEIGHT_GRADIENT:
      product = lax.ragged_dot(x, weights, sizes, precision=precision_of(x))
    else:
      product = _ragged_dot(x, weights, sizes, precision_of(x))
    return jnp.where(inside, product, 0)
  if weights.shape[0] == 1:  # an expert a rank: a plain product, of rows whose rest may hold anything
    return matmul(jnp.where(inside, x, 0), weights[0])
  return _by_blocks(x, weights, sizes)


class _Blocks(NamedTuple):
  """The group, the first row and the end of the group's rows of each block, int32 [N].

  Blocks without work come last and lie behind all rows.
  """

  group: jax.Array
  start: jax.Array
  end: jax.Array


def _layout(rows: int, sizes: jax.Array) -> _Blocks:
  groups = sizes.shape[0]
  block = block_size(rows, groups)
  ends = jnp.cumsum(sizes)
  blocks_before = jnp.cumsum(-(-sizes // block))  # up to and with each group
  number = jnp.arange(num_blocks(rows, groups), dtype=jnp.int32)
  group = jnp.minimum((blocks_before[None, :] <= number[:, None]).sum(axis=1), groups - 1)
  first = blocks_before - -(-sizes // block)
  start = (ends - sizes)[group] + (number - first[group]) * block
  works = number < blocks_before[-1]
  return _Blocks(group, jnp.where(works, start, rows), jnp.where(works, ends[group], rows))


def _padded(x: jax.Array, block: int) -> jax.Array:
  """With room for the last block behind all rows."""
  return jnp.pad(x, ((0, block), (0, 0)))


def _rows_by_blocks(x: jax.Array, weights: jax.Array, sizes: jax.Array, spec: str) -> jax.Array:
  """Each block times its group's weights. A tail in the next group's rows is overwritten by that."""
  rows, block = x.shape[0], block_size(x.shape[0], sizes.shape[0])
  layout, padded = _layout(rows, sizes), _padded(x, block)
  width = jax.eval_shape(lambda a, w: jnp.einsum(spec, a, w), x, weights[0]).shape[1]

  def body(i, out):
    some = lax.dynamic_slice_in_dim(padded, layout.start[i], block)
    own = lax.dynamic_index_in_dim(weights, layout.group[i], keepdims=False)
    product = einsum(spec, some, own)
    return lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), layout.start[i], 0)

  out = lax.fori_loop(0, len(layout.start), body, jnp.zeros((rows + block, width), x.dtype))[:rows]
  return jnp.where((jnp.arange(rows) < sizes.sum())[:, None], out, 0)


@jax.custom_vjp
def _by_blocks(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
  return _rows_by_blocks(x, weights, sizes, 'ad,df->af')


def _by_blocks_fwd(x, weights, sizes):
  return _by_blocks(x, weights, sizes), (x, weights, sizes)


def _by_blocks_bwd(residuals, grad):
  x, weights, sizes = residuals
  dx = _rows_by_blocks(grad, weights, sizes, 'af,df->ad')
  return dx, _weight_gradient(x, grad, sizes).astype(weights.dtype), None


_by_blocks.defvjp(_by_blocks_fwd, _by_blocks_bwd)


def _weight_gradient(x: jax.Array, grad: jax.Array, sizes: jax.Array) -> jax.Array:
  """float32 [G, d, f]: of each group the sum over its rows of x [A, d] times grad [A, f]."""
  rows, block = x.shape[0], block_size(x.shape[0], sizes.shape[0])
  layout, padded, padded_grad = _layout(rows, sizes), _padded(x, block), _padded(grad, block)

  def body(i, sums):
    start, group = layout.start[i], layout.group[i]
    mine = (start + jnp.arange(block) < layout.end[i])[:, None]
    some = jnp.where(mine, lax.dynamic_slice_in_dim(padded, start, block), 0)
    grads = jnp.where(mine, lax.dynamic_slice_in_dim(padded_grad, start, block), 0)
    product = einsum('ad,af->df', some, grads)
    return sums.at[group].add(product)

  start = jnp.zeros((sizes.shape[0], x.shape[1], grad.shape[1]), jnp.float32)
  return lax.fori_loop(0, len(layout.start), body, start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _ragged_dot(
  x: jax.Array, weights: jax.Array, sizes: jax.Array, precision: lax.Precision | None
) -> jax.Array:
  """`lax.ragged_dot` with the gradient of the weights by blocks."""
  return lax.ragged_dot(x, weights, sizes, precision=precision)


def _ragged_dot_fwd(x, weights, sizes, precision):
  return _ragged_dot(x, weights, sizes, precision), (x, weights, sizes)


def _ragged_dot_bwd(precision, residuals, grad):
  x, weights, sizes = residuals
  _, pullback = jax.vjp(lambda x: lax.ragged_dot(x, weights, sizes, precision=precision), x)
  return *pullback(grad), _weight_gradient(x, grad, sizes).astype(weights.dtype), None


_ragged_dot.defvjp(_ragged_dot_fwd, _ragged_dot_bwd)
