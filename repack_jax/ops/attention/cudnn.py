"""Packed attention on NVIDIA GPUs by cuDNN's fused kernels, in their packed ("ragged") layout.

Axes: T tokens, padded to T' here, h query heads, k key/value heads, D head width; S sequences of one call, M
tokens that the longest of them may have.

XLA offers cuDNN's attention as a custom call. In its packed layout a call takes up to S sequences, each by
the offset of its first element and by its length; gaps between sequences and lengths of 0 are allowed, so
padding may lie anywhere. But workspace and softmax statistics are as large as S sequences of M tokens,
whatever they really hold: with S = 256 and M = T the backward pass of 32 Ki tokens and 32 heads would take
over 100 GiB.

So samples are served by length: a *bucket* takes those of over M / 4 and up to M tokens, of which T' tokens
hold fewer than 4 T' / M = S. Buckets go down by factors of 4, so every call is as large as four times the
tokens. A bucket without samples costs nothing: each is a loop whose trip count is data. The last one, of all
shorter samples, goes round as often as it takes where they are more than S. So one program serves any pack.

Chunked attention is full attention inside each chunk: there, chunks take the place of samples.

Calls have as many queries as keys. A halo, keys without queries, therefore gets queries of its own whose
results are dropped: where T queries see W keys each, a share of (W - 1) / T more work at most.

A call sees the tokens as [T' / M, M, h, D] and not as [1, T', h, D], since it takes M from the shape; offsets
count from the first element of all, so sequences lie across those rows as they like.

The custom call is made by `jax.ffi`, not by `jax._src.cudnn`: that scales the offsets of keys by the query
heads before JAX 0.12 (jax-ml/jax#39521), silently wrong with grouped queries, and asks a local GPU before it
compiles for another. `tests/test_attention_cudnn.py` holds the two calls against each other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from repack_jax.kinds import ChunkedAttention, FullAttention, LayerKind, SlidingWindowAttention
from repack_jax.ops.attention.case import AttentionCase

# Sequences that a call has room for, over the tokens it sees as one row: also the factor between buckets.
_RATIO = 4
# Buckets end where M is at most this: shorter samples are cheap.
_LAST_ROW_TOKENS = 2048
# Rows are whole multiples of this: the kernels' tiles are.
_ROW_MULTIPLE_TOKENS = 64

# All of Hopper's and Blackwell's kernels take this, forward and backward; some take more.
_MAX_HEAD_DIM = 128
_HEAD_DIM_MULTIPLE = 8
# What XLA and JAX ask of a GPU for the packed layout: Hopper.
_LEAST_CAPABILITY = (9, 0)
_ELEMENT_TYPES = {'bfloat16': 'BF16', 'float16': 'F16'}
# Logarithm of a row's sum that leaves no score a weight: of a halo's queries in the backward pass.
_NO_WEIGHT = 1e30
_MAX_ELEMENTS = 2**31 - 1  # offsets are int32
_KINDS: tuple[type[LayerKind], ...] = (FullAttention, SlidingWindowAttention, ChunkedAttention)

_FORWARD_TARGET = '__cudnn$fmhaSoftmax'
_BACKWARD_TARGET = '__cudnn$fmhaSoftmaxBackward'
_API_VERSION = 2  # custom calls that XLA itself implements take their config as a string
_BTNH_OF_BNTH = (0, 2, 1, 3)


@dataclasses.dataclass(frozen=True)
class Bucket:
  """The samples that calls of one size serve.

  Attributes:
    rows: rows that a call sees the tokens as, T' / M.
    row_tokens: M, the most tokens of a sample.
    over_tokens: samples have more tokens than that.
  """

  rows: int
  row_tokens: int
  over_tokens: int

  @property
  def sequences(self) -> int:
    """S, the samples that a call has room for."""
    return _RATIO * self.rows


class Runs(NamedTuple):
  """The samples, told at each token. int32 [T'] each.

  Attributes:
    place: the token's own number.
    start: number of the first token of its sample.
    length: tokens of its sample; 0 at padding.
  """

  place: chex.Array
  start: chex.Array
  length: chex.Array


class Sequences(NamedTuple):
  """What one call serves. int32.

  Attributes:
    starts [S + 1]: first token of each sequence; T' behind the last.
    lengths [S]: tokens of each; 0 behind the last.
    stats_row [T']: row of each served token among the S * M of statistics; S * M for other tokens.
  """

  starts: chex.Array
  lengths: chex.Array
  stats_row: chex.Array


def why_not(case: AttentionCase) -> str | None:
  """Returns why cuDNN does not serve a case here, in a few words; None where it does."""
  if type(case.kind) not in _KINDS:
    return f'for {", ".join(kind.title for kind in _KINDS)} attention only, not for {case.kind.title}'
  if case.dtype not in _ELEMENT_TYPES:
    return f'for {" and ".join(_ELEMENT_TYPES)} only, not for {case.dtype}'
  if case.head_dim > _MAX_HEAD_DIM or case.head_dim % _HEAD_DIM_MULTIPLE:
    return (
      f'for head widths that are multiples of {_HEAD_DIM_MULTIPLE} up to {_MAX_HEAD_DIM}, not {case.head_dim}'
    )
  if buckets(case.slots)[0] * case.heads * case.head_dim > _MAX_ELEMENTS:
    return (
      'for what it can count in 32 bits: queries of '
      f'{case.slots} tokens x {case.heads} heads x {case.head_dim} are too many elements'
    )
  return _why_not_device(_local_gpu_capability())


def _why_not_device(capability: str | None) -> str | None:
  if capability is None:  # none here: a compile for GPUs elsewhere
    return None
  numbers = re.fullmatch(r'(\d+)\.(\d+)', capability)
  if not numbers:
    return f'for NVIDIA GPUs only, not for {capability}'
  if tuple(map(int, numbers.groups())) < _LEAST_CAPABILITY:
    least = '.'.join(map(str, _LEAST_CAPABILITY))
    return f'for compute capability {least} (Hopper) and later, not {capability}'
  return None


def _local_gpu_capability() -> str | None:
  """What this process's first GPU says of itself, such as '9.0'; None where it has no GPU."""
  try:
    device, *_ = jax.local_devices(backend='gpu')
  except RuntimeError:
    return None
  return str(device.compute_capability)


def buckets(tokens: int) -> tuple[int, tuple[Bucket, ...]]:
  """Returns T' and the buckets, longest samples first, for T tokens."""
  rows = 1
  while tokens > rows * _LAST_ROW_TOKENS:
    rows *= _RATIO
  row_tokens = -(-tokens // (rows * _ROW_MULTIPLE_TOKENS)) * _ROW_MULTIPLE_TOKENS
  padded = rows * row_tokens
  made = [Bucket(rows, row_tokens, 0)]
  while rows > 1:
    rows //= _RATIO
    made.append(Bucket(rows, padded // rows, made[-1].row_tokens))
  return padded, tuple(reversed(made))


def find_runs(segments: chex.Array, kind: LayerKind) -> Runs:
  """Returns the samples, or chunks, of `segments` int32 [T'], each one contiguous run, -1 for padding."""
  (tokens,) = segments.shape
  place = jnp.arange(tokens, dtype=jnp.int32)
  change, edge = segments[1:] != segments[:-1], jnp.ones(1, bool)
  begins, ends = jnp.concatenate([edge, change]), jnp.concatenate([change, edge])
  start = jax.lax.cummax(jnp.where(begins, place, 0))
  last = jax.lax.cummin(jnp.where(ends, place, tokens - 1), reverse=True)
  if isinstance(kind, ChunkedAttention):
    start, last = kind.first_key(place, start), kind.last_query(place, start, last)
  return Runs(place, start, jnp.where(segments >= 0, last - start + 1, 0))


def rank_samples(runs: Runs, bucket: Bucket) -> tuple[chex.Array, chex.Array]:
  """Numbers the samples of a bucket.

  Returns:
    `(rank int32 [T'], count int32 [])`: at each token of a sample of the bucket its number among them, -1 at
    every other token; and how many there are.
  """
  inside = (runs.length > bucket.over_tokens) & (runs.length <= bucket.row_tokens)
  begun = jnp.cumsum(inside & (runs.place == runs.start), dtype=jnp.int32)
  return jnp.where(inside, begun - 1, -1), begun[-1]


def take_sequences(runs: Runs, bucket: Bucket, rank: chex.Array, round_number: chex.Array) -> Sequences:
  """Returns the samples with ranks `round_number * S` and up, at most S of them."""
  n, (tokens,) = bucket.sequences, rank.shape
  slot = rank - round_number * n
  served = (rank >= 0) & (slot >= 0) & (slot < n)
  slot = jnp.where(served, slot, n)
  first = jnp.where(runs.place == runs.start, slot, n + 1)  # out of bounds, so dropped, at every other token
  starts = jnp.full(n + 1, tokens, jnp.int32).at[first].set(runs.place, mode='drop')
  lengths = jnp.zeros(n + 1, jnp.int32).at[first].set(runs.length, mode='drop')[:n]
  # Tokens of other samples wrote to the last entries, which are not of any sequence.
  starts = starts.at[n].set(tokens)
  row = slot * bucket.row_tokens + runs.place - runs.start
  return Sequences(starts, lengths, jnp.where(served, row, n * bucket.row_tokens))


def stats_to_lse(stats: chex.Array, stats_row: chex.Array) -> chex.Array:
  """Returns lse [T', h] of cuDNN's statistics float32 [S, h, M]; arbitrary where `stats_row` has no row.

  Both are the natural logarithm of a row's sum of exponentiated scaled scores.
  """
  rows = stats.swapaxes(1, 2).reshape(-1, stats.shape[1])
  return rows[jnp.minimum(stats_row, rows.shape[0] - 1)]


def lse_to_stats(lse: chex.Array, stats_row: chex.Array, bucket: Bucket) -> chex.Array:
  """Returns what `stats_to_lse` was given; zero behind the end of each sequence."""
  rows = jnp.zeros((bucket.sequences * bucket.row_tokens, lse.shape[1]), jnp.float32)
  rows = rows.at[stats_row].set(lse, mode='drop')
  return rows.reshape(bucket.sequences, bucket.row_tokens, -1).swapaxes(1, 2)


def workspace_bytes(tokens: int, heads: int, head_dim: int) -> int:
  """Returns what a backward call takes beyond its arguments: dq in float32, S sequences of M tokens.

  XLA asks cuDNN for it on the device, and counts nothing where it compiles for one that is not there.
  """
  return _RATIO * tokens * heads * head_dim * 4


def forward(
  q: chex.Array, k: chex.Array, v: chex.Array, segments: chex.Array, kind: LayerKind
) -> tuple[chex.Array, chex.Array]:
  """Returns `(out [T, h, D] in q's dtype, lse float32 [T, h])`; see `api.AttentionImpl`."""
  tokens, halo = segments.shape[0], k.shape[0] - q.shape[0]
  padded, all_buckets = buckets(tokens)
  segments = jnp.pad(segments, (0, padded - tokens), constant_values=-1)
  q = _behind_halo(q, halo)
  q, k, v = (_masked_pad(x, segments) for x in (q, k, v))

  def body(bucket, sequences, carry):
    call = _Call.of(bucket, q, k, kind)
    new, stats = _fused_forward(call, q, k, v, sequences)
    served = (sequences.stats_row < bucket.sequences * bucket.row_tokens)[:, None]
    out, lse = carry
    new_lse = stats_to_lse(stats, sequences.stats_row)
    return jnp.where(served[..., None], new, out), jnp.where(served, new_lse, lse)

  start = jnp.zeros_like(q), jnp.zeros(q.shape[:2], jnp.float32)
  out, lse = _all_rounds(all_buckets, find_runs(segments, kind), body, start)
  return out[halo:tokens], lse[halo:tokens]


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
  """Returns `(dq, dk, dv)`, each like its input; see `api.AttentionImpl`."""
  tokens, halo = segments.shape[0], k.shape[0] - q.shape[0]
  padded, all_buckets = buckets(tokens)
  segments = jnp.pad(segments, (0, padded - tokens), constant_values=-1)
  q, out, dout = (_behind_halo(x, halo) for x in (q, out, dout))
  q, k, v, out, dout = (_masked_pad(x, segments) for x in (q, k, v, out, dout))
  lse = jnp.pad(_behind_halo(lse, halo, _NO_WEIGHT), ((0, padded - tokens), (0, 0)))

  def body(bucket, sequences, carry):
    call = _Call.of(bucket, q, k, kind)
    stats = lse_to_stats(lse, sequences.stats_row, bucket)
    new = _fused_backward(call, q, k, v, stats, out, dout, sequences)
    served = (sequences.stats_row < bucket.sequences * bucket.row_tokens)[:, None, None]
    return tuple(jnp.where(served, x, old) for x, old in zip(new, carry, strict=True))

  start = tuple(map(jnp.zeros_like, (q, k, v)))
  dq, dk, dv = _all_rounds(all_buckets, find_runs(segments, kind), body, start)
  return dq[halo:tokens], dk[:tokens], dv[:tokens]


def _all_rounds(all_buckets: tuple[Bucket, ...], runs: Runs, body: Callable, carry: tuple) -> tuple:
  """Runs `body(bucket, sequences, carry)` for each call that the samples need; returns the last carry."""
  for bucket in all_buckets:
    rank, count = rank_samples(runs, bucket)

    def one_round(i, carry, bucket=bucket, rank=rank):
      return body(bucket, take_sequences(runs, bucket, rank, i), carry)

    carry = jax.lax.fori_loop(0, -(-count // bucket.sequences), one_round, carry)
  return carry


def _window_tokens(kind: LayerKind, tokens: int) -> int:
  """What cuDNN is told of a kind: how many last tokens a query sees; 0 for all of its sequence."""
  if isinstance(kind, SlidingWindowAttention) and kind.window_tokens < tokens:
    return kind.window_tokens
  return 0


def _behind_halo(x: chex.Array, halo: int, value: float = 0.0) -> chex.Array:
  """[T, ...] to [S, ...], of this value at the queries of a halo."""
  return jnp.pad(x, ((halo, 0), *[(0, 0)] * (x.ndim - 1)), constant_values=value)


def _masked_pad(x: chex.Array, segments: chex.Array) -> chex.Array:
  """[T, n, D] to [T', n, D], zero at padding: tiles may read past a sequence's end, and NaN would spread."""
  x = jnp.pad(x, ((0, segments.shape[0] - x.shape[0]), (0, 0), (0, 0)))
  return jnp.where((segments >= 0)[:, None, None], x, 0)


# --- the custom calls ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
  """The static side of a custom call: its bucket, heads, head width, dtype and window (0 for none)."""

  bucket: Bucket
  heads: int
  kv_heads: int
  width: int
  dtype: np.dtype
  window_tokens: int

  @classmethod
  def of(cls, bucket: Bucket, q: chex.Array, k: chex.Array, kind: LayerKind) -> _Call:
    """Returns that of q [T', h, D] and k [T', k, D]."""
    tokens, heads, width = q.shape
    return cls(bucket, heads, k.shape[1], width, q.dtype, _window_tokens(kind, tokens))

  def rows(self, x: chex.Array) -> chex.Array:
    """[T', n, D] to [T' / M, M, n, D]."""
    return x.reshape(self.bucket.rows, self.bucket.row_tokens, *x.shape[1:])

  def result(self, heads: int) -> jax.ShapeDtypeStruct:
    """What a call returns for [T', heads, D]: heads before tokens by name, but not in memory."""
    return jax.ShapeDtypeStruct((self.bucket.rows, heads, self.bucket.row_tokens, self.width), self.dtype)

  def tokens(self, x: chex.Array) -> chex.Array:
    """A result to [T', n, D]."""
    return x.transpose(_BTNH_OF_BNTH).reshape(-1, x.shape[1], self.width)

  def sequence_arrays(self, sequences: Sequences) -> tuple[chex.Array, ...]:
    """Lengths of queries and of keys, int32 [T' / M, 4], then offsets in elements, [T' / M, 5].

    A call reads lengths and offsets as one row each: S and S + 1 entries, and none of what follows.
    """
    rows = self.bucket.rows
    lengths = sequences.lengths.reshape(rows, _RATIO)
    starts = jnp.pad(sequences.starts, (0, rows - 1), mode='edge').reshape(rows, _RATIO + 1)
    return lengths, lengths, starts * (self.heads * self.width), starts * (self.kv_heads * self.width)

  def config(self, is_backward: bool) -> str:
    """XLA's `GpuBackendConfig` of the call, as JSON."""
    # Of queries and keys, [batch, tokens, heads, D], and of scores [batch, heads, queries, keys] with those.
    of_queries, of_scores, of_transposed = (
      _product((0, 2), 3, 3), _product((0, 1), 3, 1), _product((0, 1), 2, 1)
    )  # fmt: skip
    products = {'bmm1': of_queries, 'bmm2': of_scores}
    if is_backward:
      products = {
        'bmm1_grad_gemm1': of_transposed, 'bmm1_grad_gemm2': of_scores,
        'bmm2_grad_gemm1': of_transposed, 'bmm2_grad_gemm2': of_queries,
      }  # fmt: skip
    rows, row_tokens = self.bucket.rows, self.bucket.row_tokens
    attention = {
      'algorithm': {
        'algo_id': '0', 'math_type': 'TENSOR_OP_MATH', 'tuning_knobs': {'17': '1', '24': '0'},
        'is_cudnn_frontend': True, 'workspace_size': '0',
      },
      'fmha_scale': 1 / math.sqrt(self.width),
      'intermediate_tensor_shape': {
        'element_type': _ELEMENT_TYPES[self.dtype.name],
        'dimensions': [str(n) for n in (rows, self.heads, row_tokens, row_tokens)],
        'layout': {'minor_to_major': ['3', '2', '1', '0']},
        'is_dynamic_dimension': [False] * 4,
      },
      'is_flash_attention': True,
      'mask_type': 'PADDING_CAUSAL',
      'dropout_rate': 0.0,
      'seed': 0,
      'sliding_window_length': self.window_tokens,  # as here, the query itself is one of them
      'max_seg_per_batch': _RATIO,
      'is_paged_attention': False,
    } | {f'{name}_dot_dimension_numbers': value for name, value in products.items()}  # fmt: skip
    return json.dumps({'operation_queue_id': '0', 'cudnn_fmha_backend_config': attention})


def _product(lhs_batch: tuple[int, int], lhs: int, rhs: int) -> dict[str, list[str]]:
  """XLA's `DotDimensionNumbers` for contracting axis `lhs` of one operand with axis `rhs` of the other."""
  axes = {'lhs_contracting': (lhs,), 'rhs_contracting': (rhs,), 'lhs_batch': lhs_batch, 'rhs_batch': (0, 2)}
  return {f'{name}_dimensions': [str(axis) for axis in value] for name, value in axes.items()}


def _custom_call(call: _Call, target: str, results: list, layouts: list, operands: tuple):
  """Makes the call; every result but the last, which is its workspace."""
  *made, _ = jax.ffi.ffi_call(
    target,
    [*results, jax.ShapeDtypeStruct((0,), jnp.uint8)],
    output_layouts=[*layouts, None],
    custom_call_api_version=_API_VERSION,
    legacy_backend_config=call.config(target == _BACKWARD_TARGET),
  )(*operands)
  return made


def _fused_forward(call: _Call, q, k, v, sequences: Sequences) -> tuple[chex.Array, chex.Array]:
  """`(out [T', h, D], statistics float32 [S, h, M])`; arbitrary at tokens of no sequence."""
  stats = (call.bucket.sequences, call.heads, call.bucket.row_tokens)
  out, stats = _custom_call(
    call,
    _FORWARD_TARGET,
    [call.result(call.heads), jax.ShapeDtypeStruct(stats, jnp.float32)],
    [_BTNH_OF_BNTH, None],
    (*map(call.rows, (q, k, v)), *call.sequence_arrays(sequences)),
  )
  return call.tokens(out), stats


def _fused_backward(call: _Call, q, k, v, stats, out, dout, sequences: Sequences) -> tuple[chex.Array, ...]:
  """`(dq [T', h, D], dk, dv [T', k, D])`; arbitrary at tokens of no sequence."""
  grads = _custom_call(
    call,
    _BACKWARD_TARGET,
    [call.result(n) for n in (call.heads, call.kv_heads, call.kv_heads)],
    [_BTNH_OF_BNTH] * 3,
    (*map(call.rows, (q, k, v)), stats, call.rows(dout), call.rows(out), *call.sequence_arrays(sequences)),
  )
  return tuple(map(call.tokens, grads))
