"""Packed attention for TPUs as Pallas (Mosaic) kernels: one forward, one for dq, one for dk and dv.

Axes: T tokens, S slots of keys (a halo, then the T tokens), h query heads, k key/value heads, g query heads
that a kernel takes at once, D head width, L tiles in a list. A *query block* is `Blocks.query` tokens of g
heads, R = g * Blocks.query rows; a *key block* is `Blocks.key` tokens of one head, worked on in steps of
fewer keys. A *tile* is one against the other. Primes mark padded sizes: S' is whole key blocks, of which
queries have the last T', and D' whole lanes.

Because the tokens of a sample are one contiguous run, the key blocks that a query block meets are one
interval, and so are the query blocks of a key block. Both are turned into lists of tiles, which the kernels
hold in scalar memory, and the grid is as long as the list: work follows what samples and windows touch, and a
new pack never recompiles. The mathematics is that of FlashAttention-2 (Dao 2023), as in `blockwise`.

Scores are held key by query, [keys, R]. So what there is one of for each row, its maximum or `lse`, is a
[1, R] that takes no more memory than it has numbers, reductions over keys run down sublanes instead of across
lanes, and no matrix product needs the transpose of a tile of scores.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from repack_jax.kinds import LayerKind
from repack_jax.ops.attention.case import AttentionCase
from repack_jax.ops.attention.pallas_tiles import (
  BLOCK_BITS,
  LANES,
  Blocks,
  Geometry,
  Lists,
  choose_blocks,
  geometry_of,
  heads_at_once,
  tile_lists,
)

_DTYPES = ('float32', 'bfloat16')
_MAX_HEAD_DIM = 256

_UNROLL_STEPS = 4
_VMEM_LIMIT_BYTES = 32 * 1024 * 1024  # of 64 MiB on a TPU7x core, 128 MiB on v5 and v6e

# Start of a running maximum: below every score, yet finite, so that no difference of two is NaN. A score that
# is masked lies so far below even that that its exponential is zero.
_LOWEST = -1e30
_MASKED = -3e38
_LOG2_E = math.log2(math.e)


def why_not(case: AttentionCase) -> str | None:
  """Returns why these kernels do not serve a case, in a few words; None where they do."""
  if case.dtype not in _DTYPES:
    return f'for {" and ".join(_DTYPES)} only, not for {case.dtype}'
  if case.head_dim > _MAX_HEAD_DIM:
    return f'for head widths up to {_MAX_HEAD_DIM} only, not for {case.head_dim}'
  if choose_blocks(case) is None:
    return (
      f'for streams whose list of tiles fits scalar memory, not for {case.kind.title} attention over '
      f'{case.slots} tokens with {heads_at_once(case)} query heads at once'
    )
  return None


def forward(
  q: chex.Array,
  k: chex.Array,
  v: chex.Array,
  segments: chex.Array,
  kind: LayerKind,
  *,
  blocks: Blocks | None = None,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[chex.Array, chex.Array]:
  """Returns `(out [T, h, D] in q's dtype, lse float32 [T, h])`; see `api.AttentionImpl`.

  Args:
    q, k, v, segments, kind: as in `api.AttentionImpl`.
    blocks: sizes of tiles; None to choose them.
    interpret: for tests, run the kernel as plain JAX, or in JAX's simulator of a TPU: anywhere, and slowly.
  """
  tokens, heads, width = q.shape
  geometry = geometry_of(AttentionCase.of(q, k, kind), blocks)
  valid, first_key, lists, _ = tile_lists(segments, tokens, kind, geometry)
  front = geometry.halo - (k.shape[0] - tokens)
  q, k, v = _to_rows(q, valid, geometry), _to_heads(k, valid, front), _to_heads(v, valid, front)

  inputs = [('rows', q), ('keys', k), ('keys', v), ('first_key', first_key)]
  scalars = (q.shape[0], first_key.shape[0], 1, geometry.rows)
  outputs = [('rows', q.shape, q.dtype), ('row_scalars', scalars, jnp.float32)]
  scratch = [(q.shape[-1], geometry.rows), (1, geometry.rows), (1, geometry.rows)]
  out, lse = _call('forward', _forward_kernel, geometry, lists, True, inputs, outputs, scratch, interpret)
  lse = lse.reshape(*scalars[:2], geometry.groups, -1).swapaxes(1, 2).reshape(heads, -1)
  return _from_heads(out, tokens, width), lse.T[:tokens]


def backward(
  q: chex.Array,
  k: chex.Array,
  v: chex.Array,
  segments: chex.Array,
  kind: LayerKind,
  out: chex.Array,
  lse: chex.Array,
  dout: chex.Array,
  *,
  blocks: Blocks | None = None,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[chex.Array, chex.Array, chex.Array]:
  """Returns `(dq, dk, dv)`, each like its input; see `api.AttentionImpl`, and `forward` for the keywords."""
  tokens, _, width = q.shape
  slots = k.shape[0]
  geometry = geometry_of(AttentionCase.of(q, k, kind), blocks)
  valid, first_key, by_query, by_key = tile_lists(segments, tokens, kind, geometry)
  front = geometry.halo - (slots - tokens)
  # The softmax's share of the gradient, one number a row.
  delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
  lse, delta = (_to_row_scalars(x, valid, geometry) for x in (lse * _LOG2_E, delta))
  q, dout = (_to_rows(x, valid, geometry) for x in (q, dout))
  k, v = (_to_heads(x, valid, front) for x in (k, v))

  inputs = [('rows', q), ('keys', k), ('keys', v), ('rows', dout)]
  inputs += [('row_scalars', lse), ('row_scalars', delta), ('first_key', first_key)]
  outputs, scratch = [('rows', q.shape, q.dtype)], [(q.shape[-1], geometry.rows)]
  (dq,) = _call('dq', _dq_kernel, geometry, by_query, True, inputs, outputs, scratch, interpret)
  # Each group of query heads has a gradient of its own for the key/value head that it shares.
  dtype = k.dtype if geometry.splits == 1 else jnp.float32
  outputs = [('own_keys', (q.shape[0], *k.shape[1:]), dtype)] * 2
  scratch = [(geometry.blocks.key, q.shape[-1])] * 2
  dk, dv = _call('dkv', _dkv_kernel, geometry, by_key, False, inputs, outputs, scratch, interpret)
  dk, dv = (x.reshape(-1, geometry.splits, *x.shape[1:]).sum(1).astype(k.dtype) for x in (dk, dv))
  dk, dv = (_from_heads(x, front + slots, width)[front:] for x in (dk, dv))
  return _from_heads(dq, tokens, width), dk, dv


def _to_heads(x: chex.Array, valid: chex.Array, front: int = 0) -> chex.Array:
  """[S, n, D] to [n, S', D'] behind `front` slots, zero where `valid` [S'] says padding (it may hold NaN)."""
  slots, _, width = x.shape
  x = jnp.where(valid[front : front + slots, None, None], x, 0)
  behind = valid.shape[0] - front - slots
  return jnp.pad(x, ((front, behind), (0, 0), (0, -width % LANES))).swapaxes(0, 1)


def _to_rows(x: chex.Array, valid: chex.Array, geometry: Geometry) -> chex.Array:
  """[T, h, D] to [h / g, g, T', D']; `valid` [S']."""
  x = _to_heads(x, valid[geometry.halo :])
  return x.reshape(-1, geometry.groups, *x.shape[1:])


def _from_heads(x: chex.Array, tokens: int, width: int) -> chex.Array:
  """[..., T', D'] to [T, n, D], where n is all leading axes."""
  return x.reshape(-1, *x.shape[-2:]).swapaxes(0, 1)[:tokens, :, :width]


def _to_row_scalars(x: chex.Array, valid: chex.Array, geometry: Geometry) -> chex.Array:
  """[T, h] to [h / g, query blocks, 1, R], zero at padding; `valid` [S']."""
  valid = valid[geometry.halo :]
  x = jnp.pad(jnp.where(valid[: x.shape[0], None], x, 0), ((0, valid.shape[0] - x.shape[0]), (0, 0)))
  x = x.T.reshape(-1, geometry.groups, valid.shape[0] // geometry.blocks.query, geometry.blocks.query)
  return x.swapaxes(1, 2).reshape(x.shape[0], -1, 1, geometry.rows)


def _call(
  name: str,
  kernel: Callable[..., None],
  geometry: Geometry,
  lists: Lists,
  query_major: bool,
  inputs: list[tuple[str, chex.Array]],
  outputs: list[tuple],
  scratch: list[tuple[int, int]],
  interpret: bool | pltpu.InterpretParams,
) -> list[chex.Array]:
  """Runs a kernel on every tile of a list, for every group of query heads.

  Args:
    name: what profiles call it.
    kernel: see `_forward_kernel`.
    geometry: its static sizes.
    lists: its tiles.
    query_major: whether they are sorted by query block, or by key block.
    inputs: arrays, each after the name of how it is cut into blocks.
    outputs: likewise; shape and dtype.
    scratch: shapes of float32 scratch memory.
    interpret: see `forward`.
  """
  blocks, groups, parts = geometry.blocks, geometry.groups, geometry.parts

  def cut(kind: str, width: int) -> pl.BlockSpec:
    shape, place = {
      'rows': ((None, groups, blocks.query, width), lambda head, i, j: (head, 0, i, 0)),
      'row_scalars': ((None, None, 1, geometry.rows), lambda head, i, j: (head, i, 0, 0)),
      'first_key': ((None, 1, blocks.query), lambda head, i, j: (i, 0, 0)),
      'keys': ((None, blocks.key, width), lambda head, i, j: (head // geometry.splits, j, 0)),
      'own_keys': ((None, blocks.key, width), lambda head, i, j: (head, j, 0)),
    }[kind]

    def index_map(row, step, *lists):
      i, j, _ = _at(Lists(*lists), row, step, parts, query_major)
      return place(row // parts, i, j)

    return pl.BlockSpec(shape, index_map)

  prefetched = [getattr(lists, field.name) for field in dataclasses.fields(lists)]
  return pl.pallas_call(
    functools.partial(kernel, geometry, functools.partial(_locate, geometry, query_major)),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(prefetched),
      grid=(inputs[0][1].shape[0] * parts, jnp.diff(lists.cuts).max()),
      in_specs=[cut(kind, x.shape[-1]) for kind, x in inputs],
      out_specs=[cut(kind, shape[-1]) for kind, shape, _ in outputs],
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    ),
    out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=_VMEM_LIMIT_BYTES
    ),
    name=f'packed_attention_{name}',
    interpret=interpret,
  )(*prefetched, *(x for _, x in inputs))


def _at(lists: Lists, row: chex.Array, step: chex.Array, parts: int, query_major: bool):
  """Query block and key block of a step of the grid, and whether it is one: short parts repeat their last."""
  entry, end = lists.cuts[row % parts] + step, lists.cuts[row % parts + 1]
  tile = lists.tiles[jnp.minimum(entry, end - 1)]
  major, minor = tile >> BLOCK_BITS, tile & ((1 << BLOCK_BITS) - 1)
  return *((major, minor) if query_major else (minor, major)), entry < end


@dataclasses.dataclass(frozen=True)
class _Tile:
  """The tile that a kernel is at; int32 and bool scalars.

  Attributes:
    query, key: first tokens of its query block and key block.
    lowest: the first key that any row sees.
    works: whether there is anything to do, at most.
    full: whether every row sees every key.
    opens, closes: whether it is its major block's first, or last.
  """

  query: chex.Array
  key: chex.Array
  lowest: chex.Array
  works: chex.Array
  full: chex.Array
  opens: chex.Array
  closes: chex.Array


def _locate(geometry: Geometry, query_major: bool, *refs) -> _Tile:
  lists = Lists(*refs)
  i, j, works = _at(lists, pl.program_id(0), pl.program_id(1), geometry.parts, query_major)
  major, minor = (i, j) if query_major else (j, i)
  query, key = geometry.halo + i * geometry.blocks.query, j * geometry.blocks.key
  full = (lists.highest[i] <= key) & (query >= key + geometry.blocks.key - 1)
  opens, closes = works & (minor == lists.first[major]), works & (minor == lists.last[major])
  return _Tile(query, key, lists.lowest[i], works, full, opens, closes)


def _walk(geometry: Geometry, tile: _Tile, step: int, body: Callable[[pl.Slice, bool], None]) -> None:
  """Runs `body(keys of the tile, whether to mask)` for steps that hold work; half as long ones to mask."""
  keys, edge = geometry.blocks.key, max(LANES, step // 2)

  def at(c, step):
    return pl.ds(pl.multiple_of(c * step, step), step)

  @pl.when(tile.works & tile.full)
  def _():
    unroll = min(keys // step, _UNROLL_STEPS)
    jax.lax.fori_loop(0, keys // step, lambda c, _: body(at(c, step), False), None, unroll=unroll)

  @pl.when(tile.works & ~tile.full)
  def _():
    begin = jnp.maximum(tile.lowest - tile.key, 0) // edge
    end = jnp.minimum((tile.query + geometry.blocks.query - tile.key + edge - 1) // edge, keys // edge)
    jax.lax.fori_loop(begin, end, lambda c, _: body(at(c, edge), True), None)


def _mask(geometry: Geometry, tile: _Tile, scores: chex.Array, keys: pl.Slice, first_key) -> chex.Array:
  """Scores [keys, R] with what rows do not see put out of reach."""
  offset = tile.key + keys.start
  first = jnp.concatenate([first_key[...]] * geometry.groups, axis=1) - offset
  lane = jax.lax.broadcasted_iota(jnp.int32, first.shape, 1) & (geometry.blocks.query - 1)
  own = lane + (tile.query - offset)
  key = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
  return jnp.where((key >= first) & (key <= own), scores, _MASKED)


def _dot(geometry: Geometry, a: chex.Array, b: chex.Array, contract: tuple[int, int] = (1, 0)) -> chex.Array:
  """Product of two matrices, accumulated in float32, over one axis of each."""
  dims = (((contract[0],), (contract[1],)), ((), ()))
  return jax.lax.dot_general(a, b, dims, precision=geometry.precision, preferred_element_type=jnp.float32)


def _rows_of(ref) -> chex.Array:
  """[g, Blocks.query, D] as [R, D]."""
  return ref[...].reshape(-1, ref.shape[-1])


def _forward_kernel(geometry: Geometry, locate: Callable, *refs) -> None:
  """One tile of the online softmax. `refs` are to `Lists`, inputs, outputs and scratch, as in `forward`."""
  *lists, q, k, v, first_key, out, lse, acc, top, total = refs
  tile = locate(*lists)

  @pl.when(tile.opens)
  def _():
    acc[...] = jnp.zeros_like(acc)
    top[...] = jnp.full_like(top, _LOWEST)
    total[...] = jnp.zeros_like(total)

  def body(keys, masked):
    scores = _dot(geometry, k[keys, :], _rows_of(q), (1, 1))
    if masked:
      scores = _mask(geometry, tile, scores, keys, first_key)
    new_top = jnp.maximum(top[...], scores.max(0, keepdims=True))
    # Scores are scaled inside the exponential, which is one of base 2 in hardware.
    weights = jnp.exp2((scores - new_top) * (geometry.scale * _LOG2_E))
    keep = jnp.exp2((top[...] - new_top) * (geometry.scale * _LOG2_E))
    total[...] = total[...] * keep + weights.sum(0, keepdims=True)
    acc[...] = acc[...] * keep + _dot(geometry, v[keys, :].T, weights.astype(v.dtype))
    top[...] = new_top

  _walk(geometry, tile, geometry.blocks.forward_step, body)

  @pl.when(tile.closes)
  def _():
    seen = total[...] > 0  # padding rows have seen nothing
    divisor = jnp.where(seen, total[...], 1)
    out[...] = (acc[...] / divisor).T.astype(out.dtype).reshape(out.shape)
    lse[...] = jnp.where(seen, top[...] * geometry.scale + jnp.log(divisor), 0)


def _gradients(geometry, tile, keys, masked, q, k, v, dout, lse, delta, first_key):
  """A step's probabilities and the gradient of its scores before scaling, both [keys, R]; `lse` in base 2."""
  scores = _dot(geometry, k[keys, :], _rows_of(q), (1, 1))
  if masked:
    scores = _mask(geometry, tile, scores, keys, first_key)
  weights = jnp.exp2(scores * (geometry.scale * _LOG2_E) - lse[...])
  dweights = _dot(geometry, v[keys, :], _rows_of(dout), (1, 1))
  return weights.astype(q.dtype), (weights * (dweights - delta[...])).astype(q.dtype)


def _dq_kernel(geometry: Geometry, locate: Callable, *refs) -> None:
  """One tile of dq; references as in `_forward_kernel`."""
  *lists, q, k, v, dout, lse, delta, first_key, dq, acc = refs
  tile = locate(*lists)

  @pl.when(tile.opens)
  def _():
    acc[...] = jnp.zeros_like(acc)

  def body(keys, masked):
    _, dscores = _gradients(geometry, tile, keys, masked, q, k, v, dout, lse, delta, first_key)
    acc[...] += _dot(geometry, k[keys, :].T, dscores)

  _walk(geometry, tile, geometry.blocks.backward_step, body)

  @pl.when(tile.closes)
  def _():
    dq[...] = (acc[...] * geometry.scale).T.astype(dq.dtype).reshape(dq.shape)


def _dkv_kernel(geometry: Geometry, locate: Callable, *refs) -> None:
  """One tile of dk and dv; references as in `_forward_kernel`."""
  *lists, q, k, v, dout, lse, delta, first_key, dk, dv, dk_acc, dv_acc = refs
  tile = locate(*lists)

  @pl.when(tile.opens)
  def _():
    dk_acc[...] = jnp.zeros_like(dk_acc)
    dv_acc[...] = jnp.zeros_like(dv_acc)

  def body(keys, masked):
    weights, dscores = _gradients(geometry, tile, keys, masked, q, k, v, dout, lse, delta, first_key)
    dv_acc[keys, :] += _dot(geometry, weights, _rows_of(dout))
    dk_acc[keys, :] += _dot(geometry, dscores, _rows_of(q))

  _walk(geometry, tile, geometry.blocks.backward_step, body)

  @pl.when(tile.closes)
  def _():
    dk[...] = (dk_acc[...] * geometry.scale).astype(dk.dtype)
    dv[...] = dv_acc[...].astype(dv.dtype)
