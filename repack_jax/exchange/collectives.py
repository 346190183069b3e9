"""The two sites of a layer's attention: `dispatch` (tokens to heads) and `combine` (heads to tokens).

Each does the head exchange and the change of layout in one variable-size all-to-all, or in one for each chunk
of heads that the exchange is cut into (`plan/wire.py`). Both run inside `shard_map`; whom a rank exchanges
with comes in as data (`arrays.Route`), so ranks of different SP degree run the same program and a plan never
recompiles it.

Axis legend: T capacity (token slots of a rank), H query heads, K key/value heads, D head width, P ranks of
a group (its SP degree), S ranks that the exchange spans, h = H/P, k = max(1, K/P), c heads that a token sends
to one peer (in dispatch those of all operands, h + 2k of queries, keys and values; h in combine), W elements
of a row on the wire. In a chunk, c are those of the chunk.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from repack_jax.plan.arrays import Route
from repack_jax.plan.plan import PlanError
from repack_jax.plan.program import Program
from repack_jax.plan.wire import HeadsOf, Wire

log = logging.getLogger(__name__)


def choose_exchange(name: str, platform: str) -> str:
  """Returns what a platform runs for `ClusterConfig.exchange`: on the CPU always `dense`."""
  chosen = 'dense' if platform == 'cpu' else name
  reason = '' if chosen == name else f' for {name}, which XLA does not have'
  log.info('exchange: %s%s, on %s', chosen, reason, platform)
  return chosen


@dataclass(frozen=True)
class Exchange:
  """The static half of an exchange: shapes and mesh axes. Hashable; one a compiled layout.

  Attributes:
    axes: mesh axes that it spans, major to minor.
    span: S, ranks along them.
    degrees: SP degrees that the program knows in the layout, ascending.
    capacity_tokens: T.
    wire: what it carries, in as many chunks as the exchange has; ranks of some SP degrees have fewer.
    row_tokens: ranks hold multiples of so many slots of their group's stream (`Plan.row_tokens`).
    implementation: `ragged` or `dense`.
  """

  axes: tuple[str, ...]
  span: int
  degrees: tuple[int, ...]
  capacity_tokens: int
  wire: Wire
  row_tokens: int
  implementation: str

  @classmethod
  def of_program(
    cls,
    program: Program,
    layout: str,
    wire: Wire,
    axes: Sequence[str],
    axis_sizes: Mapping[str, int],
    implementation: str,
  ) -> Exchange:
    """Returns the exchange of a layout in a program.

    Args:
      axes: mesh axes of a domain, major to minor; ranks are numbered along them.
      axis_sizes: ranks along each.

    Raises:
      PlanError: where no minor axes hold just the ranks that the program's exchanges span.
    """
    spanned = spanned_axes(program.span(layout), axes, axis_sizes)
    return cls(
      axes=spanned,
      span=program.span(layout),
      degrees=program.degrees(layout),
      capacity_tokens=program.capacity_tokens,
      wire=wire.fitted(program.degrees(layout)),
      row_tokens=program.row_tokens,
      implementation=implementation,
    )

  @property
  def axis_name(self) -> str | tuple[str, ...]:
    """Returns the axes as JAX's collectives take them."""
    return self.axes if len(self.axes) > 1 else self.axes[0]

  @functools.cached_property
  def row_width(self) -> int:
    """Returns W; what `row_tokens` tokens send to a peer is a whole number of rows, for every degree."""
    return self.wire.row_elements(self.degrees, self.row_tokens)

  def sources(self, chunk: int) -> tuple[int, ...]:
    """Returns the chunks of dispatch that a chunk's core works on, at whatever SP degree; ascending."""
    cut = (degree for degree in self.degrees if chunk < self.wire.chunk_count(degree))
    return tuple(sorted({source for degree in cut for source in self.wire.chunk_sources(degree, chunk)}))

  def rows(self, heads_of: HeadsOf, degree: int) -> int:
    """Returns rows of the slots or stream form of one degree; the buffers are as large as the largest."""
    return degree * self.capacity_tokens * heads_of(degree) * self.wire.head_dim // self.row_width

  def buffer_shape(self, heads_of: HeadsOf) -> tuple[int, int]:
    """Returns [rows, W] of a chunk's buffer; `heads_of` is `Wire.dispatched` or `Wire.combined` of it."""
    return max(self.rows(heads_of, p) for p in self.degrees), self.row_width


def spanned_axes(span: int, axes: Sequence[str], axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the minor ones of a domain's axes that hold `span` ranks together, as few as do.

  Raises:
    PlanError: where none do: the plan was made for nodes or domains of another size.
  """
  for count in range(1, len(axes) + 1):
    minor = tuple(axes[-count:])
    if math.prod(axis_sizes[axis] for axis in minor) == span:
      return minor
  shape = ' x '.join(f'{axis} {axis_sizes[axis]}' for axis in axes)
  raise PlanError(
    f'exchanges of this plan span {span} ranks, but no minor axes of the mesh ({shape}) hold that many: plan '
    "with the mesh's own numbers of nodes and of ranks a node"
  )


# --- dispatch and combine -------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(ex: Exchange, operands: tuple[jax.Array, ...], route: Route) -> tuple[jax.Array, ...]:
  """Sends each rank of the group its heads of every token: q [T, H, D], k and v [T, K, D] -> rows of chunks.

  Each is the stream form of a chunk with all operands' heads side by side; `split_heads` gives them apart.
  Where P > K each key/value head goes to P / K ranks, and its gradient is the sum over them.
  """
  t, d = ex.capacity_tokens, ex.wire.head_dim
  for x, heads in zip(operands, ex.wire.operand_heads, strict=True):
    chex.assert_shape(x, (t, heads, d))

  def slots(degree: int, chunk: int) -> jax.Array:
    of_core, sent = ex.wire.core_heads(degree, chunk), ex.wire.chunk_heads(degree, chunk)

    def by_peer(x: jax.Array, worked_on: slice, sent: int) -> jax.Array:
      if x.shape[1] < degree:
        x = jnp.repeat(x, degree // x.shape[1], axis=1)
      return x.reshape(t, degree, -1, d)[:, :, worked_on][:, :, :sent]

    return jnp.concatenate(list(map(by_peer, operands, of_core, sent)), axis=2).swapaxes(0, 1)

  def moved(chunk: int) -> jax.Array:
    heads_of = ex.wire.dispatched(chunk)
    rows = _by_degree(ex, heads_of, route, functools.partial(slots, chunk=chunk))
    return to_stream(ex, heads_of, rows, route)

  return tuple(map(moved, range(ex.wire.chunks)))


def _dispatch_fwd(ex, operands, route):
  return dispatch(ex, operands, route), route


def _dispatch_bwd(ex, route, grad_rows):
  t, d = ex.capacity_tokens, ex.wire.head_dim
  sites = [ex.wire.dispatched(chunk) for chunk in range(ex.wire.chunks)]
  # The backward pass goes through the chunks from the last to the first.
  rows = _in_turn(ex, list(zip(sites, grad_rows, strict=True))[::-1], route)[::-1]

  def gradients(degree: int) -> tuple[jax.Array, ...]:
    of_chunks = []
    for chunk in range(ex.wire.chunk_count(degree)):
      heads = ex.wire.chunk_heads(degree, chunk)
      slots = _view(ex, sites[chunk], rows[chunk], degree).reshape(degree, t, sum(heads), d)
      of_chunks.append(jnp.split(slots.swapaxes(0, 1), np.cumsum(heads)[:-1], axis=2))

    def whole(parts: tuple[jax.Array, ...], heads: int) -> jax.Array:
      copies = max(1, degree // heads)  # of each key/value head, side by side
      return jnp.concatenate(parts, axis=2).reshape(t, heads, copies, d).sum(axis=2)

    grads = map(whole, zip(*of_chunks, strict=True), ex.wire.operand_heads)
    return tuple(_owned(ex, grad, route) for grad in grads)

  branches = [functools.partial(gradients, p) for p in ex.degrees]
  return lax.switch(route.branch, branches), None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(ex: Exchange, rows: tuple[jax.Array, ...], route: Route) -> jax.Array:
  """Sends each token's owner its heads: the stream forms of all chunks -> [T, H, D], zero in padding."""
  t, d = ex.capacity_tokens, ex.wire.head_dim
  sites = [ex.wire.combined(chunk) for chunk in range(ex.wire.chunks)]
  for heads_of, x in zip(sites, rows, strict=True):
    chex.assert_shape(x, ex.buffer_shape(heads_of))
  received = _in_turn(ex, list(zip(sites, rows, strict=True)), route)

  def whole(degree: int) -> jax.Array:
    of_chunks = [
      _view(ex, sites[chunk], received[chunk], degree).reshape(degree, t, sites[chunk](degree), d)
      for chunk in range(ex.wire.chunk_count(degree))
    ]
    return jnp.concatenate(of_chunks, axis=2).swapaxes(0, 1).reshape(t, ex.wire.result_heads, d)

  out = lax.switch(route.branch, [functools.partial(whole, p) for p in ex.degrees])
  return _owned(ex, out, route)


def _combine_fwd(ex, rows, route):
  return combine(ex, rows, route), route


def _combine_bwd(ex, route, grad):
  t, d = ex.capacity_tokens, ex.wire.head_dim

  def moved(chunk: int) -> jax.Array:
    heads_of = ex.wire.combined(chunk)

    def slots(degree: int) -> jax.Array:
      each, heads = ex.wire.combine_heads(degree), heads_of(degree)
      first = chunk * heads
      return grad.reshape(t, degree, each, d)[:, :, first : first + heads].swapaxes(0, 1)

    return to_stream(ex, heads_of, _by_degree(ex, heads_of, route, slots), route)

  return tuple(map(moved, range(ex.wire.chunks))), None


combine.defvjp(_combine_fwd, _combine_bwd)


def _in_turn(ex: Exchange, chunks: Sequence[tuple[HeadsOf, jax.Array]], route: Route) -> list[jax.Array]:
  """Moves chunks from stream to slots, each when the one before has arrived: so it hides behind a core."""
  received: list[jax.Array] = []
  for heads_of, rows in chunks:
    if received:
      received[-1], rows = lax.optimization_barrier((received[-1], rows))
    received.append(to_slots(ex, heads_of, rows, route))
  return received


def split_heads(ex: Exchange, rows: Sequence[jax.Array], degree: int, chunk: int) -> list[jax.Array]:
  """Returns the operands that a chunk's core works on, [P*T, heads, D] each, for a rank of this SP degree.

  Args:
    rows: those dispatched of `Exchange.sources`.
  """
  of_source = dict(zip(ex.sources(chunk), rows, strict=True))
  operands = []
  for operand, source in enumerate(ex.wire.chunk_sources(degree, chunk)):
    heads = ex.wire.chunk_heads(degree, source)
    x = _view(ex, ex.wire.dispatched(source), of_source[source], degree)
    x = x.reshape(degree * ex.capacity_tokens, sum(heads), ex.wire.head_dim)
    operands.append(jnp.split(x, np.cumsum(heads)[:-1], axis=1)[operand])
  return operands


def join_rows(ex: Exchange, heads_of: HeadsOf, x: jax.Array) -> jax.Array:
  """Returns [P*T, c, D] (or slots) as rows of the static buffer size, zeros behind: the inverse of a view."""
  rows, width = ex.buffer_shape(heads_of)
  x = x.reshape(-1, width)
  return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))


def _view(ex: Exchange, heads_of: HeadsOf, rows: jax.Array, degree: int) -> jax.Array:
  return rows[: ex.rows(heads_of, degree)]


def _by_degree(ex: Exchange, heads_of: HeadsOf, route: Route, make: Callable) -> jax.Array:
  """Rows of the form that `make(degree)` gives for the rank's own degree."""
  branches = [lambda p=p: join_rows(ex, heads_of, make(p)) for p in ex.degrees]
  return lax.switch(route.branch, branches)


def _owned(ex: Exchange, x: jax.Array, route: Route) -> jax.Array:
  """Zeros in the slots past the rank's own tokens, whatever was left there."""
  mine = jnp.arange(ex.capacity_tokens) < route.counts[route.place]
  return jnp.where(mine[:, None, None], x, 0)


# --- the move between slots and stream ------------------------------------------------------------------


def to_stream(ex: Exchange, heads_of: HeadsOf, rows: jax.Array, route: Route) -> jax.Array:
  """Moves slots to stream: block j of `rows` goes to the group's rank j, behind tokens of ranks before."""
  return _move(ex, heads_of, rows, route, stream=True)


def to_slots(ex: Exchange, heads_of: HeadsOf, rows: jax.Array, route: Route) -> jax.Array:
  """Moves stream to slots: each token's row back to the rank that owns it. The inverse of `to_stream`."""
  return _move(ex, heads_of, rows, route, stream=False)


def _move(ex, heads_of, rows, route, stream):
  if ex.degrees[-1] == 1:
    return rows
  move = _ragged_move if ex.implementation == 'ragged' else _dense_move
  return move(ex, heads_of, rows, route, stream)


def ragged_offsets(
  ex: Exchange, heads_of: HeadsOf, route: Route, stream: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns the operands of the ragged all-to-all in rows, int32 [S] each, for every rank of the span.

  Returns `(input_offsets, send_sizes, output_offsets, recv_sizes)`; output_offsets are positions on the
  *receiver*. Ranks outside the group get zero rows.
  """
  rows = [ex.row_tokens * heads_of(p) * ex.wire.head_dim // ex.row_width for p in ex.degrees]
  unit = jnp.array(rows, jnp.int32)[route.branch]  # rows that `row_tokens` slots make
  place = jnp.arange(ex.span, dtype=jnp.int32) - route.first
  inside = (place >= 0) & (place < jnp.array(ex.degrees, jnp.int32)[route.branch])
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

  def moved(degree: int) -> Callable[[], jax.Array]:
    if degree == 1 or not heads_of(degree):
      return lambda: rows
    groups = [list(range(i, i + degree)) for i in range(0, ex.span, degree)]
    received = lax.all_to_all(
      to_wire(degree), ex.axis_name, split_axis=0, concat_axis=0, axis_index_groups=groups
    )
    return functools.partial(from_wire, received, degree)

  return lax.switch(route.branch, [moved(degree) for degree in ex.degrees])


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
