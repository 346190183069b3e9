"""The two sites of a layer's attention: `dispatch` (tokens to heads) and `combine` (heads to tokens).

Each does the head exchange and the change of layout in one variable-size all-to-all. Both run inside
`shard_map`; whom a rank exchanges with comes in as data (`arrays.Route`), so ranks of different SP degree
run the same program and a plan never recompiles it.

Axis legend: T capacity (token slots of a rank), H query heads, K key/value heads, D head width, P ranks of
a group (its SP degree), S ranks that the scope spans, h = H/P, k = max(1, K/P), c heads that a token sends
to one peer (h + 2k in dispatch, h in combine), W elements of a row on the wire.

Two forms of the same data travel between the sites, both flat rows `[rows, W]` of a static size:

- *slots*: `[P, T, c, D]`, one block a peer, a rank's own tokens in front of each block;
- *stream*: `[P*T, c, D]`, the group's tokens end to end in stream order, the rest undefined or zero.

`to_stream` and `to_slots` move between them and are each other's inverse and transpose, which gives the
backward passes without an exchange of offsets.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
from jax import lax

from repack_jax.checks import ConfigError
from repack_jax.plan.arrays import Route
from repack_jax.predict.cost_model import PADDED_ROW_BYTES

log = logging.getLogger(__name__)


def choose_implementation(name: str, platform: str) -> str:
  """`ragged` or `dense`: an explicit choice stands; `auto` takes ragged where the platform has it.

  Raises:
    ConfigError: for an explicit `ragged` on the CPU.
  """
  if name == 'ragged' and platform == 'cpu':
    raise ConfigError(
      "TrainConfig.exchange = 'ragged': XLA has no ragged all-to-all on the CPU. Use 'dense', or 'auto', "
      'which takes ragged on TPU and GPU'
    )
  chosen = name if name != 'auto' else ('dense' if platform == 'cpu' else 'ragged')
  log.info('exchange: %s (%s, on %s)', chosen, 'chosen by auto' if name == 'auto' else 'as asked', platform)
  return chosen


@dataclass(frozen=True)
class Exchange:
  """The static half of an exchange: shapes and mesh axes. Hashable; one a compiled scope.

  Attributes:
    axes: mesh axes that the scope spans.
    scope_ranks: S, ranks along them.
    degrees: SP degrees that the program knows: 1, 2, 4, ... ascending.
    capacity_tokens: T.
    num_heads, num_kv_heads, head_dim: H, K, D.
    row_tokens: ranks hold multiples of so many slots of their group's stream (`cost.row_tokens`).
    row_width: W; what `row_tokens` tokens send to a peer is a whole number of rows, for every degree.
    implementation: `ragged` or `dense`.
  """

  axes: tuple[str, ...]
  scope_ranks: int
  degrees: tuple[int, ...]
  capacity_tokens: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  row_tokens: int
  row_width: int
  implementation: str

  @property
  def axis_name(self) -> str | tuple[str, ...]:
    """The axes as JAX's collectives take them."""
    return self.axes if len(self.axes) > 1 else self.axes[0]

  def heads(self, degree: int) -> tuple[int, int]:
    """(h, k): query and key/value heads of a rank in a group of `degree`."""
    return self.num_heads // degree, max(1, self.num_kv_heads // degree)

  def dispatch_heads(self, degree: int) -> int:
    h, k = self.heads(degree)
    return h + 2 * k

  def combine_heads(self, degree: int) -> int:
    return self.heads(degree)[0]

  def rows(self, heads_of: Callable[[int], int], degree: int) -> int:
    """Rows of the slots or stream form of one degree; the buffers are as large as the largest."""
    return degree * self.capacity_tokens * heads_of(degree) * self.head_dim // self.row_width

  def buffer_shape(self, heads_of: Callable[[int], int]) -> tuple[int, int]:
    return max(self.rows(heads_of, p) for p in self.degrees), self.row_width

  @property
  def widest(self) -> int:
    return self.degrees[-1]


def row_width(
  degrees: tuple[int, ...],
  num_heads: int,
  num_kv_heads: int,
  head_dim: int,
  dtype: jnp.dtype,
  row_tokens: int = 1,
) -> int:
  """W: as many elements as fill a row of 512 bytes and divide what `row_tokens` tokens send to a peer."""
  counts = [num_heads // p for p in degrees]
  counts += [num_heads // p + 2 * max(1, num_kv_heads // p) for p in degrees]
  common = math.gcd(*counts) * head_dim * row_tokens
  fitting = max(head_dim, PADDED_ROW_BYTES // jnp.dtype(dtype).itemsize)
  return max(w for w in range(1, fitting + 1) if common % w == 0)


# --- dispatch and combine -------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(ex: Exchange, q: jax.Array, k: jax.Array, v: jax.Array, route: Route) -> jax.Array:
  """Sends each rank of the group its heads of every token: q [T, H, D], k and v [T, K, D] -> stream rows.

  The result is the stream form with c = h + 2k; `split_heads` gives its q, k and v. Where P > K each
  key/value head goes to P / K ranks, and its gradient is the sum over them.
  """
  t, d = ex.capacity_tokens, ex.head_dim
  chex.assert_shape(q, (t, ex.num_heads, d))
  chex.assert_shape([k, v], (t, ex.num_kv_heads, d))

  def slots(degree: int) -> jax.Array:
    def by_peer(x: jax.Array) -> jax.Array:
      heads = x.shape[1]
      if heads < degree:
        x = jnp.repeat(x, degree // heads, axis=1)
      return x.reshape(t, degree, -1, d)

    return jnp.concatenate([by_peer(q), by_peer(k), by_peer(v)], axis=2).swapaxes(0, 1)

  return to_stream(ex, ex.dispatch_heads, _by_degree(ex, ex.dispatch_heads, route, slots), route)


def _dispatch_fwd(ex, q, k, v, route):
  return dispatch(ex, q, k, v, route), route


def _dispatch_bwd(ex, route, grad_rows):
  t, d = ex.capacity_tokens, ex.head_dim
  rows = to_slots(ex, ex.dispatch_heads, grad_rows, route)

  def gradients(degree: int) -> tuple[jax.Array, ...]:
    h, k = ex.heads(degree)
    slots = _view(ex, ex.dispatch_heads, rows, degree).reshape(degree, t, h + 2 * k, d).swapaxes(0, 1)
    parts = jnp.split(slots, (h, h + k), axis=2)

    def whole(x: jax.Array, heads: int) -> jax.Array:
      copies = max(1, degree // heads)  # of each key/value head, side by side
      return x.reshape(t, heads, copies, d).sum(axis=2)

    grads = (
      whole(parts[0], ex.num_heads),
      whole(parts[1], ex.num_kv_heads),
      whole(parts[2], ex.num_kv_heads),
    )
    return tuple(_owned(ex, grad, route) for grad in grads)

  branches = [functools.partial(gradients, p) for p in ex.degrees]
  return (*lax.switch(route.log2_size, branches), None)


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(ex: Exchange, rows: jax.Array, route: Route) -> jax.Array:
  """Sends each token's owner its heads: the stream form with c = h -> [T, H, D], zero in padding."""
  t, d = ex.capacity_tokens, ex.head_dim
  chex.assert_shape(rows, ex.buffer_shape(ex.combine_heads))
  received = to_slots(ex, ex.combine_heads, rows, route)

  def whole(degree: int) -> jax.Array:
    slots = _view(ex, ex.combine_heads, received, degree).reshape(degree, t, ex.num_heads // degree, d)
    return slots.swapaxes(0, 1).reshape(t, ex.num_heads, d)

  out = lax.switch(route.log2_size, [functools.partial(whole, p) for p in ex.degrees])
  return _owned(ex, out, route)


def _combine_fwd(ex, rows, route):
  return combine(ex, rows, route), route


def _combine_bwd(ex, route, grad):
  t, d = ex.capacity_tokens, ex.head_dim

  def slots(degree: int) -> jax.Array:
    return grad.reshape(t, degree, ex.num_heads // degree, d).swapaxes(0, 1)

  return to_stream(ex, ex.combine_heads, _by_degree(ex, ex.combine_heads, route, slots), route), None


combine.defvjp(_combine_fwd, _combine_bwd)


def split_heads(ex: Exchange, rows: jax.Array, degree: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The q [P*T, h, D], k and v [P*T, k, D] in dispatched rows, for a rank of this SP degree."""
  h, k = ex.heads(degree)
  heads = _view(ex, ex.dispatch_heads, rows, degree).reshape(
    degree * ex.capacity_tokens, h + 2 * k, ex.head_dim
  )
  return heads[:, :h], heads[:, h : h + k], heads[:, h + k :]


def join_rows(ex: Exchange, heads_of: Callable[[int], int], x: jax.Array) -> jax.Array:
  """The inverse of a view: [P*T, c, D] (or slots) as rows of the static buffer size, zeros behind."""
  rows, width = ex.buffer_shape(heads_of)
  x = x.reshape(-1, width)
  return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))


def _view(ex: Exchange, heads_of: Callable[[int], int], rows: jax.Array, degree: int) -> jax.Array:
  return rows[: ex.rows(heads_of, degree)]


def _by_degree(ex: Exchange, heads_of: Callable[[int], int], route: Route, make: Callable) -> jax.Array:
  """Rows of the form that `make(degree)` gives for the rank's own degree."""
  branches = [lambda p=p: join_rows(ex, heads_of, make(p)) for p in ex.degrees]
  return lax.switch(route.log2_size, branches)


def _owned(ex: Exchange, x: jax.Array, route: Route) -> jax.Array:
  """Zeros in the slots past the rank's own tokens, whatever was left there."""
  mine = jnp.arange(ex.capacity_tokens) < route.counts[route.place]
  return jnp.where(mine[:, None, None], x, 0)


# --- the move between slots and stream ------------------------------------------------------------------


def to_stream(ex: Exchange, heads_of: Callable[[int], int], rows: jax.Array, route: Route) -> jax.Array:
  """Slots -> stream: block j of `rows` goes to the group's rank j, behind the tokens of ranks before."""
  return _move(ex, heads_of, rows, route, stream=True)


def to_slots(ex: Exchange, heads_of: Callable[[int], int], rows: jax.Array, route: Route) -> jax.Array:
  """Stream -> slots: each token's row goes back to the rank that owns it. The inverse of `to_stream`."""
  return _move(ex, heads_of, rows, route, stream=False)


def _move(ex, heads_of, rows, route, stream):
  if ex.scope_ranks == 1:
    return rows
  move = _ragged_move if ex.implementation == 'ragged' else _dense_move
  return move(ex, heads_of, rows, route, stream)


def ragged_offsets(
  ex: Exchange, heads_of: Callable[[int], int], route: Route, stream: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Operands of the ragged all-to-all in rows, int32 [S] each, for every rank of the scope.

  Returns `(input_offsets, send_sizes, output_offsets, recv_sizes)`; output_offsets are positions on the
  *receiver*. Ranks outside the group get zero rows.
  """
  rows = [ex.row_tokens * heads_of(p) * ex.head_dim // ex.row_width for p in ex.degrees]
  unit = jnp.array(rows, jnp.int32)[route.log2_size]  # rows that `row_tokens` slots make
  place = jnp.arange(ex.scope_ranks, dtype=jnp.int32) - route.first
  inside = (place >= 0) & (place < jnp.left_shift(1, route.log2_size))
  place = jnp.where(inside, place, 0)
  held = route.counts // ex.row_tokens
  before = jnp.cumsum(held) - held
  slot_rows = ex.capacity_tokens // ex.row_tokens * unit
  mine = jnp.where(inside, held[route.place], 0) * unit
  theirs = jnp.where(inside, held[place], 0) * unit
  in_slots = jnp.where(inside, place * slot_rows, 0)  # where a peer's block starts here
  in_stream = jnp.where(inside, before[place], 0) * unit  # where a peer's tokens start in the stream
  my_slot = jnp.where(inside, route.place, 0) * slot_rows  # where my block starts on a peer
  my_stream = jnp.where(inside, before[route.place], 0) * unit
  if stream:
    return in_slots, mine, my_stream, theirs
  return in_stream, theirs, my_slot, mine


def _ragged_move(ex, heads_of, rows, route, stream):
  input_offsets, send_sizes, output_offsets, recv_sizes = ragged_offsets(ex, heads_of, route, stream)
  return lax.ragged_all_to_all(
    rows,
    jnp.zeros_like(rows),
    input_offsets,
    send_sizes,
    output_offsets,
    recv_sizes,
    axis_name=ex.axis_name,
  )


def _dense_move(ex, heads_of, rows, route, stream):
  """One padded all-to-all an SP degree over equal aligned groups, every rank taking part in each.

  What a rank gets from the exchanges of degrees not its own is ignored. Rows are laid out as slots on the
  wire, so the stream side gathers them.
  """
  before = jnp.cumsum(route.counts) - route.counts

  def to_wire(degree: int) -> jax.Array:
    x = _view(ex, heads_of, rows, degree)
    if stream:
      return x.reshape(degree, -1, x.shape[1])
    x = x.reshape(degree * ex.capacity_tokens, -1)
    slot = jnp.arange(ex.capacity_tokens)
    source = jnp.minimum(before[:degree, None] + slot[None, :], x.shape[0] - 1)
    return x[source]

  def from_wire(x: jax.Array, degree: int) -> jax.Array:
    if not stream:
      return join_rows(ex, heads_of, x)
    x = x.reshape(degree * ex.capacity_tokens, -1)
    token = jnp.arange(x.shape[0])
    peer = jnp.clip(jnp.searchsorted(before[:degree], token, side='right') - 1, 0, degree - 1)
    source = peer * ex.capacity_tokens + token - before[peer]
    inside = token < route.counts[:degree].sum()
    return join_rows(ex, heads_of, jnp.where(inside[:, None], x[jnp.where(inside, source, 0)], 0))

  received = [rows]
  for degree in ex.degrees[1:]:
    groups = [list(range(i, i + degree)) for i in range(0, ex.scope_ranks, degree)]
    received.append(
      lax.all_to_all(to_wire(degree), ex.axis_name, split_axis=0, concat_axis=0, axis_index_groups=groups)
    )
  branches = [lambda: rows]
  branches += [
    functools.partial(from_wire, x, degree) for x, degree in zip(received[1:], ex.degrees[1:], strict=True)
  ]
  return lax.switch(route.log2_size, branches)


# --- experts: equal blocks whose fill is known at run time only -------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchange_blocks(
  axis: str, implementation: str, blocks: jax.Array, send_rows: jax.Array, recv_rows: jax.Array
) -> jax.Array:
  """Sends block j of [L, C, d] to the axis' rank j, which keeps it as block i for the sender's place i.

  Args:
    blocks: L blocks of C rows; the first `send_rows[j]` of block j count.
    send_rows, recv_rows: int32 [L]. `ragged` ships only these rows; `dense` ships whole blocks.

  Returns:
    [L, C, d]; rows past `recv_rows[i]` of block i are undefined.
  """
  count, rows, width = blocks.shape
  if implementation == 'dense':
    return lax.all_to_all(blocks, axis, split_axis=0, concat_axis=0)
  starts = jnp.arange(count, dtype=jnp.int32) * rows
  mine = jnp.broadcast_to(lax.axis_index(axis).astype(jnp.int32) * rows, starts.shape)
  flat = blocks.reshape(count * rows, width)
  received = lax.ragged_all_to_all(
    flat, jnp.zeros_like(flat), starts, send_rows, mine, recv_rows, axis_name=axis
  )
  return received.reshape(blocks.shape)


def _exchange_blocks_fwd(axis, implementation, blocks, send_rows, recv_rows):
  return exchange_blocks(axis, implementation, blocks, send_rows, recv_rows), (send_rows, recv_rows)


def _exchange_blocks_bwd(axis, implementation, residuals, grad):
  send_rows, recv_rows = residuals
  return exchange_blocks(axis, implementation, grad, recv_rows, send_rows), None, None


exchange_blocks.defvjp(_exchange_blocks_fwd, _exchange_blocks_bwd)
