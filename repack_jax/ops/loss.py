"""Cross entropy over vocabulary chunks: the logits of all of a rank's tokens never exist at once.

Axis legend: T tokens, d model width, V vocabulary, C vocabulary chunk.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from repack_jax.ops.products import einsum
from repack_jax.ops.rows import Table


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_losses(chunk: int, hidden: jax.Array, table: Table, targets: jax.Array) -> jax.Array:
  """Returns the negative log-likelihood of each target in float32 [T]; 0 where the target is negative.

  Args:
    chunk: C, vocabulary entries whose logits exist at a time.
    hidden: [T, d], of the table's dtype.
    table: [V, d]. Its gradient is summed in float32.
    targets: int32 [T].
  """
  return _forward(chunk, hidden, table.rows, targets)[0]


def _chunks(table: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
  """The table as [V/C, C, d], zeros behind, and the vocabulary entry of each row."""
  chunk = min(chunk, table.shape[0])
  count = -(-table.shape[0] // chunk)
  padded = jnp.pad(table, ((0, count * chunk - table.shape[0]), (0, 0)))
  return padded.reshape(count, chunk, -1), jnp.arange(count * chunk).reshape(count, chunk)


def _logits(hidden: jax.Array, rows: jax.Array, entries: jax.Array, vocab: int) -> jax.Array:
  logits = einsum('td,cd->tc', hidden, rows)
  return jnp.where(entries < vocab, logits, -jnp.inf)


def _forward(chunk, hidden, table, targets):
  def body(carry, xs):
    top, total, target_logit = carry
    rows, entries = xs
    logits = _logits(hidden, rows, entries, table.shape[0])
    new_top = jnp.maximum(top, logits.max(axis=1))
    total = total * jnp.exp(top - new_top) + jnp.exp(logits - new_top[:, None]).sum(axis=1)
    hit = targets[:, None] == entries
    return (new_top, total, target_logit + jnp.where(hit, logits, 0).sum(axis=1)), None

  zeros = jnp.zeros(hidden.shape[0], jnp.float32)
  start = (jnp.full_like(zeros, -jnp.finfo(jnp.float32).max), zeros, zeros)
  (top, total, target_logit), _ = lax.scan(body, start, _chunks(table, chunk))
  lse = top + jnp.log(total)
  return jnp.where(targets >= 0, lse - target_logit, 0), lse


def _fwd(chunk, hidden, table, targets):
  losses, lse = _forward(chunk, hidden, table.rows, targets)
  return losses, (hidden, table, targets, lse)


def _bwd(chunk, residuals, grad):
  hidden, whole, targets, lse = residuals
  table = whole.rows
  grad = jnp.where(targets >= 0, grad, 0)

  def body(grad_hidden, xs):
    rows, entries = xs
    probabilities = jnp.exp(_logits(hidden, rows, entries, table.shape[0]) - lse[:, None])
    grad_logits = (probabilities - (targets[:, None] == entries)) * grad[:, None]
    grad_logits = grad_logits.astype(hidden.dtype)
    grad_hidden += einsum('tc,cd->td', grad_logits, rows)
    return grad_hidden, einsum('tc,td->cd', grad_logits, hidden)

  start = jnp.zeros(hidden.shape, jnp.float32)
  grad_hidden, grad_rows = lax.scan(body, start, _chunks(table, chunk))
  grad_table = grad_rows.reshape(-1, table.shape[1])[: table.shape[0]]
  return grad_hidden.astype(hidden.dtype), Table(jnp.zeros_like(table), grad_table), None


token_losses.defvjp(_fwd, _bwd)
