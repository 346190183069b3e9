"""Rows taken from others, whose gradients are sums in float32.

The transpose of indexing adds rows up in their own dtype. In bfloat16, what is added to a sum of 256 times
its size is lost, so the gradient of a frequent token's row came out up to nine tenths too small.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Table(NamedTuple):
  """A table of rows, one a vocabulary entry, as its users need it.

  Attributes:
    rows: [V, d], in the compute dtype.
    gradient: float32 zeros [V, d]: differentiate by this. `rows` have no gradient of their own, since that
      would be of their dtype, and the users' gradients would be added up in it.
  """

  rows: jax.Array
  gradient: jax.Array


@jax.custom_vjp
def lookup(table: Table, entries: jax.Array) -> jax.Array:
  """Returns the rows of these entries, int32 [T] -> [T, d]."""
  return table.rows[entries]


def _lookup_fwd(table, entries):
  return lookup(table, entries), (table, entries)


def _lookup_bwd(residuals, grad):
  table, entries = residuals
  gradient = jnp.zeros(table.gradient.shape, jnp.float32).at[entries].add(grad.astype(jnp.float32))
  return Table(jnp.zeros_like(table.rows), gradient), None


lookup.defvjp(_lookup_fwd, _lookup_bwd)


class Move(NamedTuple):
  """Which of A items are in which of R rows; each is in at most one, and a row holds at most one.

  Attributes:
    item: int32 [R], the item in each row, any number where there is none.
    filled: bool [R], whether there is one.
    row: int32 [A], the row of each item, any number where it has none.
    kept: bool [A], whether it has one.
  """

  item: jax.Array
  filled: jax.Array
  row: jax.Array
  kept: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def to_rows(copies: int, x: jax.Array, move: Move) -> jax.Array:
  """Returns the items in their rows, zeros elsewhere: [A / copies, d] -> [R, d].

  Args:
    copies: items that each row of x is, one after the other.
  """
  return jnp.where(move.filled[:, None], x[move.item // copies], 0)


def _to_rows_fwd(copies, x, move):
  return to_rows(copies, x, move), move


def _to_rows_bwd(copies, move, grad):
  of_items = from_rows(grad, move).reshape(-1, copies, grad.shape[1])
  return of_items.astype(jnp.float32).sum(axis=1).astype(grad.dtype), None


to_rows.defvjp(_to_rows_fwd, _to_rows_bwd)


@jax.custom_vjp
def from_rows(rows: jax.Array, move: Move) -> jax.Array:
  """Returns the items from their rows, zeros for those that have none: [R, d] -> [A, d]."""
  return jnp.where(move.kept[:, None], rows[move.row], 0)


def _from_rows_fwd(rows, move):
  return from_rows(rows, move), move


def _from_rows_bwd(move, grad):
  return to_rows(1, grad, move), None


from_rows.defvjp(_from_rows_fwd, _from_rows_bwd)
