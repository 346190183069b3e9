"""Portable attention in tiles: pure JAX, memory linear in T, work that follows the samples.

Axes: T tokens, S slots of keys (a halo, then the T tokens), h query heads, k key/value heads, g = h / k query
heads a key/value head, D head width; N blocks of B slots, and a tile is one query block against one key
block. Blocks are counted over all slots; query blocks begin behind the halo, which is rounded up to whole
blocks.

The forward pass is the online softmax of FlashAttention-2 (Dao 2023, algorithm 1); the backward pass rebuilds
each tile's probabilities from the saved `lse` (algorithm 2). Because the tokens of a sample are one
contiguous run, what a query sees is one interval of keys that ends at itself, so which tiles hold any work is
a pair of bounds per block. The bounds are data: loops run from one to the other, and a new pack never
recompiles.
"""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

from repack_jax.kinds import LayerKind
from repack_jax.ops.products import einsum

# Tokens in a block. Of 64, 128, 256 and 512, on one core of an AMD EPYC (float32, D = 64 or 128): on one long
# sample 128 and 256 are equal and best up to 16 heads; at 32 heads 64 is up to a fifth faster. On samples of
# 700 tokens 128 takes 0.78 times what 256 does and 1.05 times what 64 does.
_BLOCK_TOKENS = 128
# Fewer tokens than that are one block of a power of two, this at the least.
_MIN_BLOCK_TOKENS = 8

# Below every score that float32 attention can meet, yet finite: the difference of two such row maxima, in a
# row that has seen no key so far, must not be NaN.
_LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class Tiles:
  """The interval of blocks each block meets, `[first, end)`; all fields int32.

  Attributes:
    key_first, key_end: [N], key blocks that query block i meets; equal where it meets none.
    query_first, query_end: [N], query blocks that key block j meets.
    blocks: [], blocks up to the last that holds a token of a sample.
  """

  key_first: chex.Array
  key_end: chex.Array
  query_first: chex.Array
  query_end: chex.Array
  blocks: chex.Array


def block_tokens(tokens: int) -> int:
  """Returns the tokens in a block, a power of two, for T tokens."""
  return min(_BLOCK_TOKENS, max(_MIN_BLOCK_TOKENS, 1 << (tokens - 1).bit_length()))


def running_max(x: chex.Array) -> chex.Array:
  """Returns the largest of each prefix of x, int32 [n], none negative.

  In two levels, of rows and of their ends: for a TPU, XLA takes half a minute to compile a flat one of 1 Mi.
  """
  (n,) = x.shape
  width = 1 << math.isqrt(n).bit_length()
  rows = jax.lax.cummax(jnp.pad(x, (0, -n % width)).reshape(-1, width), axis=1)
  before = jnp.pad(jax.lax.cummax(rows[:-1, -1]), (1, 0))
  return jnp.maximum(rows, before[:, None]).reshape(-1)[:n]


def visible_intervals(segments: chex.Array, kind: LayerKind) -> tuple[chex.Array, chex.Array]:
  """Returns the keys each query sees, and the queries that see each key, as intervals.

  Args:
    segments: int32 [T], each sample one contiguous run, -1 for padding.
    kind: what queries see.

  Returns:
    `(first_key, last_query)`, int32 [T] each: query t sees keys `first_key[t] .. t`, and key t is seen by
    queries `t .. last_query[t]`. At padding they are T and -1, which make both intervals empty.
  """
  (tokens,) = segments.shape
  place = jnp.arange(tokens, dtype=jnp.int32)
  change = segments[1:] != segments[:-1]
  edge = jnp.ones(1, bool)
  begins, ends = jnp.concatenate([edge, change]), jnp.concatenate([change, edge])
  first = running_max(jnp.where(begins, place, 0))
  # A running minimum from the end, counted from the end.
  last = tokens - 1 - running_max(jnp.where(ends, tokens - 1 - place, 0)[::-1])[::-1]
  valid = segments >= 0
  first_key, last_query = kind.first_key(place, first), kind.last_query(place, first, last)
  return jnp.where(valid, first_key, tokens), jnp.where(valid, last_query, -1)


def tile_bounds(first_key: chex.Array, last_query: chex.Array, block: int) -> Tiles:
  """Returns which tiles hold work: every tile in these bounds has a query that sees one of its keys.

  Args:
    first_key, last_query: int32 [T] from `visible_intervals`, for a T that `block` divides.
    block: tokens in a block.
  """
  first_key, last_query = first_key.reshape(-1, block), last_query.reshape(-1, block)
  n = first_key.shape[0]
  own = jnp.arange(n, dtype=jnp.int32)
  used = (last_query >= 0).any(1)
  return Tiles(
    key_first=jnp.where(used, first_key.min(1) // block, own),
    key_end=jnp.where(used, own + 1, own),
    query_first=own,
    query_end=jnp.where(used, last_query.max(1) // block + 1, own),
    blocks=jnp.where(used, own + 1, 0).max(),
  )


def _to_blocks(x: chex.Array, valid: chex.Array, block: int, kv_heads: int) -> chex.Array:
  """[T, k * g, D] to [N, k, g * B, D], zero where `valid` [N * B] says padding (which may hold NaN)."""
  tokens, heads, width = x.shape
  x = jnp.pad(x, ((0, valid.shape[0] - tokens), (0, 0), (0, 0)))
  x = jnp.where(valid[:, None, None], x, 0)
  x = x.reshape(-1, block, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)
  return x.reshape(-1, kv_heads, heads // kv_heads * block, width)


def _from_blocks(x: chex.Array, block: int) -> chex.Array:
  """[N, k, g * B, D] to [N * B, k * g, D]."""
  n, kv_heads, rows, width = x.shape
  x = x.reshape(n, kv_heads, rows // block, block, width).transpose(0, 3, 1, 2, 4)
  return x.reshape(n * block, -1, width)


def _at(x: chex.Array, i: chex.Array) -> chex.Array:
  return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _put(x: chex.Array, value: chex.Array, i: chex.Array) -> chex.Array:
  return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), i, 0)


def _mask(first_key: chex.Array, i: chex.Array, j: chex.Array, block: int, groups: int) -> chex.Array:
  """Which keys of block j the rows of query block i see: bool [g * B, B], from its first_key [B]."""
  lane = jnp.arange(block, dtype=jnp.int32)
  query, key = i * block + lane, j * block + lane
  return jnp.tile((key >= first_key[:, None]) & (key <= query[:, None]), (groups, 1))


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """The slots in whole blocks.

  Attributes:
    block: B.
    front: padding ahead of a halo that fills no whole blocks.
    halo: blocks of the halo, which have no queries.
    kv_heads: k.
    valid: bool [N * B].
    first_key: int32 [N, B].
    tiles: which of them hold work.
  """

  block: int
  front: int
  halo: int
  kv_heads: int
  valid: chex.Array
  first_key: chex.Array
  tiles: Tiles

  @classmethod
  def of(cls, q: chex.Array, k: chex.Array, segments: chex.Array, kind: LayerKind) -> _Blocks:
    tokens, (slots, kv_heads, _) = q.shape[0], k.shape
    block = block_tokens(tokens)
    front = -(slots - tokens) % block
    segments = jnp.pad(segments, (front, -tokens % block), constant_values=-1)
    first_key, last_query = visible_intervals(segments, kind)
    tiles = tile_bounds(first_key, last_query, block)
    halo = (front + slots - tokens) // block
    return cls(block, front, halo, kv_heads, segments >= 0, first_key.reshape(-1, block), tiles)

  def of_queries(self, x: chex.Array) -> chex.Array:
    """Returns [T, h, D] as [N - halo, k, g * B, D]."""
    return _to_blocks(x, self.valid[self.halo * self.block :], self.block, self.kv_heads)

  def of_keys(self, x: chex.Array) -> chex.Array:
    """Returns [S, k, D] as [N, k, B, D]."""
    return _to_blocks(jnp.pad(x, ((self.front, 0), (0, 0), (0, 0))), self.valid, self.block, self.kv_heads)

  def to_queries(self, x: chex.Array, tokens: int) -> chex.Array:
    """Returns what `of_queries` took."""
    return _from_blocks(x, self.block)[:tokens]

  def to_keys(self, x: chex.Array, slots: int) -> chex.Array:
    """Returns what `of_keys` took."""
    return _from_blocks(x, self.block)[self.front : self.front + slots]


def forward(
  q: chex.Array, k: chex.Array, v: chex.Array, segments: chex.Array, kind: LayerKind
) -> tuple[chex.Array, chex.Array]:
  """Returns `(out [T, h, D] in q's dtype, lse float32 [T, h])`; see `api.AttentionImpl`."""
  tokens, heads, width = q.shape
  of = _Blocks.of(q, k, segments, kind)
  qb, kb, vb, tiles = of.of_queries(q), of.of_keys(k), of.of_keys(v), of.tiles
  scale = 1 / math.sqrt(width)
  rows = qb.shape[1:3]

  def query_block(i, carry):
    q_i, first_i = _at(qb, i - of.halo), _at(of.first_key, i)

    def tile(j, state):
      acc, top, total = state
      scores = einsum('kqd,ksd->kqs', q_i, _at(kb, j)) * scale
      scores = jnp.where(_mask(first_i, i, j, of.block, heads // of.kv_heads), scores, -jnp.inf)
      new_top = jnp.maximum(top, scores.max(-1))
      weights = jnp.exp(scores - new_top[..., None])
      keep = jnp.exp(top - new_top)
      acc = acc * keep[..., None] + einsum('kqs,ksd->kqd', weights.astype(v.dtype), _at(vb, j))
      return acc, new_top, total * keep + weights.sum(-1)

    start = (
      jnp.zeros((*rows, width), jnp.float32),
      jnp.full(rows, _LOWEST, jnp.float32),
      jnp.zeros(rows, jnp.float32),
    )
    acc, top, total = jax.lax.fori_loop(_at(tiles.key_first, i), _at(tiles.key_end, i), tile, start)
    seen = total > 0  # padding rows have seen nothing
    total = jnp.where(seen, total, 1)
    out, lse = carry
    lse_i = jnp.where(seen, top + jnp.log(total), 0)
    return _put(out, acc / total[..., None], i - of.halo), _put(lse, lse_i, i - of.halo)

  start = jnp.zeros_like(qb), jnp.zeros(qb.shape[:3], jnp.float32)
  out, lse = jax.lax.fori_loop(of.halo, tiles.blocks, query_block, start)
  return of.to_queries(out, tokens), of.to_queries(lse[..., None], tokens)[..., 0]


def backward(
  q: chex.Array,
  k: chex.Array,
  v: chex.Array,
  segments: chex.Array,
  kind: LayerKind,
  out: chex.Array,
  lse: chex.Array,
  dout: chex.Array,
) -> tuple[chex.Array, chex.Array, chex.Array]:
  """Returns `(dq, dk, dv)`, each like its input; see `api.AttentionImpl`.

  One pass over key blocks: dk and dv of a block are sums over its query blocks, dq is added to in place.
  Tiles are held key by query, and dq as [N, k, D, g * B], so that no matrix product contracts over the
  leading axis of a tile: XLA:CPU takes 2.5 times as long for that (measured, jax 0.10.2).
  """
  tokens, heads, width = q.shape
  of = _Blocks.of(q, k, segments, kind)
  (qb, outb, doutb), (kb, vb), tiles = map(of.of_queries, (q, out, dout)), map(of.of_keys, (k, v)), of.tiles
  # Rows lie along the last axis from here on: lse and delta are [N - halo, k, 1, g * B].
  lseb = of.of_queries(lse[..., None]).swapaxes(2, 3)
  # The softmax's share of the gradient, one number a row: the sum over D of out * dout.
  delta = (outb.astype(jnp.float32) * doutb.astype(jnp.float32)).sum(-1)[:, :, None]
  scale = 1 / math.sqrt(width)

  def key_block(j, carry):
    k_j, v_j = _at(kb, j), _at(vb, j)
    k_j_t = k_j.swapaxes(1, 2)

    def tile(i, state):
      dq, dk_j, dv_j = state
      row = i - of.halo
      q_i, dout_i = _at(qb, row), _at(doutb, row)
      mask = _mask(_at(of.first_key, i), i, j, of.block, heads // of.kv_heads).T
      scores = einsum('ksd,kqd->ksq', k_j, q_i) * scale
      weights = jnp.where(mask, jnp.exp(scores - _at(lseb, row)), 0)
      dweights = einsum('ksd,kqd->ksq', v_j, dout_i)
      dscores = (weights * (dweights - _at(delta, row)) * scale).astype(q.dtype)
      dv_j = dv_j + einsum('ksq,kqd->ksd', weights.astype(q.dtype), dout_i)
      dk_j = dk_j + einsum('ksq,kqd->ksd', dscores, q_i)
      return _put(dq, _at(dq, row) + einsum('kds,ksq->kdq', k_j_t, dscores), row), dk_j, dv_j

    dq, dk, dv = carry
    zero = jnp.zeros(k_j.shape, jnp.float32)
    first, end = jnp.maximum(_at(tiles.query_first, j), of.halo), _at(tiles.query_end, j)
    dq, dk_j, dv_j = jax.lax.fori_loop(first, end, tile, (dq, zero, zero))
    return dq, _put(dk, dk_j, j), _put(dv, dv_j, j)

  start = jnp.zeros(qb.swapaxes(2, 3).shape, jnp.float32), jnp.zeros_like(kb), jnp.zeros_like(vb)
  dq, dk, dv = jax.lax.fori_loop(0, tiles.blocks, key_block, start)
  dq = of.to_queries(dq.swapaxes(2, 3).astype(q.dtype), tokens)
  return dq, of.to_keys(dk, k.shape[0]), of.to_keys(dv, k.shape[0])
