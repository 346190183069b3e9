"""Which tiles the TPU kernels of packed attention work on: their sizes, and lists of them made from segments.

Axes as in `pallas_tpu`: T tokens, S slots of keys (S' in whole key blocks, of which queries have the last
T'), g query heads that a kernel takes at once,
R rows of a query block, D head width, L tiles in a list.
"""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

from repack_jax.kinds import LayerKind
from repack_jax.ops.attention.blockwise import visible_intervals
from repack_jax.ops.attention.case import AttentionCase

LANES = 128  # blocks are whole multiples, and head widths are padded to it, as a TPU's layouts do anyway

# A list of tiles may take little more than half of the 1 MiB of scalar memory. This is the triangle of 512
# query blocks against 512 key blocks, or of 1024 against 256, rounded up.
_MAX_TILES = 132 * 1024
# The two block numbers of a tile share an int32, and the upper one must not reach its sign.
BLOCK_BITS = 16

# Most rows of a query block and tokens of a key block, of `_ROW_BYTES` each (bfloat16, D = 128); the first
# pair whose list is short enough is taken. A tile of 1024 rows does 1024 operations for each byte of keys and
# values it reads, enough for any TPU so far. All but the last two fit the 16 MiB of VMEM that XLA grants by
# default.
_SIZES = ((1024, 1024), (1024, 2048), (2048, 2048), (2048, 4096), (4096, 4096))
_ROW_BYTES = 256
_MAX_ROWS = 2048  # at the smallest query block; more heads than that are taken in turn
# Float32 scores that one step holds at once: 2 MiB forward. Backward holds them and their gradients.
_FORWARD_SCORES, _BACKWARD_SCORES = 512 * 1024, 256 * 1024


@dataclasses.dataclass(frozen=True)
class Blocks:
  """Sizes of tiles in tokens: powers of two from 128 on, none above `key`.

  Attributes:
    query: tokens of a query block.
    key: tokens of a key block.
    forward_step, backward_step: keys that are worked on at a time.
  """

  query: int
  key: int
  forward_step: int
  backward_step: int


@dataclasses.dataclass(frozen=True)
class Geometry:
  """What a kernel knows when it is compiled.

  Attributes:
    blocks: sizes of tiles.
    groups: g. `splits` such groups of query heads share a key/value head.
    splits: see `groups`.
    parts: parts that a list is cut into; a chip of two cores runs them side by side.
    scale: what scores are multiplied by.
    precision: of matrix products.
    halo: S' - T', slots of keys ahead of the first query: whole query blocks.
  """

  blocks: Blocks
  groups: int
  splits: int
  parts: int
  scale: float
  precision: jax.lax.Precision
  halo: int

  @property
  def rows(self) -> int:
    """R, rows of a query block."""
    return self.groups * self.blocks.query


@dataclasses.dataclass(frozen=True)
class Lists:
  """What the kernels hold in scalar memory, int32; in a kernel, references to it.

  The list is sorted by its *major* blocks, query blocks or key blocks; each has at least one tile. Query
  blocks are counted from the first that has queries.

  Attributes:
    tiles: [L], `major << 16 | minor`.
    first, last: [major blocks], the minor block of the first and of the last tile.
    cuts: [parts + 1], where each part of the list begins, and where the last one ends.
    lowest, highest: [query blocks], smallest and largest first key of the rows; S' for padding.
  """

  tiles: chex.Array
  first: chex.Array
  last: chex.Array
  cuts: chex.Array
  lowest: chex.Array
  highest: chex.Array


def heads_at_once(case: AttentionCase) -> int:
  """Returns g, query heads of one key/value head that a kernel takes at once."""
  shared = case.heads // case.kv_heads
  most = max(1, _MAX_ROWS // _row_weight(case) // LANES)
  return max(n for n in range(1, min(shared, most) + 1) if shared % n == 0)


def choose_blocks(case: AttentionCase) -> Blocks | None:
  """Returns sizes of tiles: small ones, unless the list of tiles would not fit scalar memory.

  None where that of the largest tiles does not fit either.
  """
  weight, groups = _row_weight(case), heads_at_once(case)
  longest = _power_of_two(2 * max(case.slots, LANES) - 1)  # one block of this many holds all tokens
  for rows, keys in _SIZES:
    query = min(longest, max(LANES, _power_of_two(rows // weight // groups)))
    key = min(longest, max(query, _power_of_two(keys // weight)))
    tiles = max_tiles(case.slots, query, key, case.kind, case.halo_tokens)
    if tiles <= _MAX_TILES and case.slots // query < 1 << (BLOCK_BITS - 1):
      steps = (_power_of_two(n // weight // (groups * query)) for n in (_FORWARD_SCORES, _BACKWARD_SCORES))
      return Blocks(query, key, *(min(key, max(LANES, step)) for step in steps))
  return None


def max_tiles(slots: int, query: int, key: int, kind: LayerKind, halo: int = 0) -> int:
  """Returns a bound on the tiles that S slots touch, `halo` of them without queries.

  In blocks of `query` and `key` slots. Key blocks of a halo that no query sees have a tile too.
  """
  reach, front = kind.reach_tokens(slots), -halo % query
  blocks = -(-(front + slots) // key) * (key // query)
  first = (front + halo) // query
  tiles = sum(i * query // key + 1 - max(0, i * query - reach) // key for i in range(first, blocks))
  return tiles + first * query // key


def _power_of_two(n: int) -> int:
  """The largest one that is not above n; 0 for 0."""
  return 1 << n.bit_length() >> 1


def _row_weight(case: AttentionCase) -> int:
  """What a row takes in VMEM, in units of `_ROW_BYTES`."""
  return -(-case.head_dim // LANES) * LANES * jnp.dtype(case.dtype).itemsize // _ROW_BYTES


def geometry_of(case: AttentionCase, blocks: Blocks | None = None) -> Geometry:
  """Returns what the kernels know of a case when they are compiled; `blocks` are chosen where not given."""
  blocks = blocks or choose_blocks(case)
  assert blocks is not None, 'such a case is refused by `pallas_tpu.why_not`'
  groups = heads_at_once(case)
  # An odd number of head groups would leave one of two cores idle at the end, or all the time.
  parts = 2 if case.heads // groups % 2 and case.tokens > blocks.key else 1
  precision = jax.lax.Precision.HIGHEST if case.dtype == 'float32' else jax.lax.Precision.DEFAULT
  splits = case.heads // case.kv_heads // groups
  halo = -(-case.halo_tokens // blocks.query) * blocks.query
  return Geometry(blocks, groups, splits, parts, 1 / math.sqrt(case.head_dim), precision, halo)


def tile_lists(
  segments: chex.Array, tokens: int, kind: LayerKind, geometry: Geometry
) -> tuple[chex.Array, chex.Array, Lists, Lists]:
  """Returns `(valid bool [S'], first_key int32 [query blocks, 1, Blocks.query], Lists by query, by key)`.

  Args:
    segments: int32 [S].
    tokens: T.
  """
  query, key = geometry.blocks.query, geometry.blocks.key
  (slots,) = segments.shape
  front, skipped = geometry.halo - (slots - tokens), geometry.halo // query
  segments = jnp.pad(segments, (front, -(front + slots) % key), constant_values=-1)
  valid, padded = segments >= 0, segments.shape[0]
  first_key, last_query = visible_intervals(segments, kind)
  place = jnp.arange(padded, dtype=jnp.int32)
  limit = max_tiles(slots, query, key, kind, slots - tokens)

  # Queries have keys up to their own block, keys have queries from their own place on. A block that meets
  # nothing still has a tile, without work, that writes its zeros.
  rows, place_by_key = (
    first_key.reshape(-1, query)[skipped:],
    jnp.where(valid, place, padded).reshape(-1, key),
  )
  lowest, highest = rows.min(1), rows.max(1)
  last = place[::query][skipped:] // key
  first = jnp.where(lowest < padded, lowest // key, last)
  by_query = Lists(*_list_tiles(first, last, geometry.parts, limit), lowest, highest)
  first = jnp.where(place_by_key.min(1) < padded, place_by_key.min(1), place[::key]) // query
  first = jnp.maximum(first - skipped, 0)
  last = jnp.maximum(last_query.reshape(-1, key).max(1) // query - skipped, first)
  by_key = Lists(*_list_tiles(first, last, geometry.parts, limit), lowest, highest)
  return valid, rows[:, None], by_query, by_key


def _list_tiles(
  first: chex.Array, last: chex.Array, parts: int, limit: int
) -> tuple[chex.Array, chex.Array, chex.Array, chex.Array]:
  """Lists each major block's minor blocks, `first` to `last`; returns the first four fields of `Lists`.

  Args:
    first, last: int32 [major blocks].
    parts: see `Geometry`.
    limit: L.
  """
  ends = jnp.cumsum(last - first + 1, dtype=jnp.int32)
  starts = ends - (last - first + 1)
  entry = jnp.arange(limit, dtype=jnp.int32)
  # Comparing with all starts fuses into sums; gathers are slow on a TPU, and long prefix sums to compile.
  begun = starts <= entry[:, None]
  major = begun.sum(1, dtype=jnp.int32) - 1
  minor = entry + jnp.where(begun, jnp.diff(first - starts, prepend=0), 0).sum(1, dtype=jnp.int32)
  cuts = [jnp.zeros(1, jnp.int32), ends[-1:]]
  if parts == 2:
    # Parts are whole major blocks, at least one each: what a part writes, only it writes.
    middle = jnp.clip((starts < ends[-1] // 2).sum(), 1, len(starts) - 1)
    cuts.insert(1, starts[middle][None])
  return major << BLOCK_BITS | minor, first, last, jnp.concatenate(cuts)
