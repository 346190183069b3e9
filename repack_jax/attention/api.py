"""The interface of packed attention.

Axes: T tokens, h query heads, k key/value heads (k divides h), D head width.

Every implementation computes the same function. `segments [T]` holds each token's sample id: the tokens of
a sample are one contiguous run, -1 marks padding, and ids need no order. A query attends to the tokens of
its own sample at or before its own place; with `window=W`, to the last W of them, itself included. Query
head i reads key/value head `i // (h // k)`; scores are scaled by `1 / sqrt(D)`. Padding rows, whatever they
hold (NaN included), give zero output and zero gradients and change nothing elsewhere.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable

import chex
import jax

from repack_jax.attention import blockwise, reference

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AttentionImpl:
  """A packed attention core as two plain functions, for callers that write their own `custom_vjp`.

  `window` is static (None, or at least 1); everything else is an array.

  Attributes:
    name: the name it is chosen by.
    forward: `(q [T, h, D], k [T, k, D], v [T, k, D], segments int32 [T], window)` to
      `(out [T, h, D] in q's dtype, lse float32 [T, h])`. `lse` is the natural logarithm of each row's sum
      of exponentiated scaled scores, and 0 at padding rows.
    backward: `(q, k, v, segments, window, out, lse, dout [T, h, D])` to `(dq, dk, dv)`, each like its input.
      Neither function is itself differentiable by JAX: use `attention` for that.
  """

  name: str
  forward: Callable[..., tuple[chex.Array, chex.Array]]
  backward: Callable[..., tuple[chex.Array, chex.Array, chex.Array]]


IMPLEMENTATIONS = {
  'blockwise': AttentionImpl('blockwise', blockwise.forward, blockwise.backward),
  'reference': AttentionImpl('reference', reference.forward, reference.backward),
}


def get_attention(name: str) -> AttentionImpl:
  """Returns the implementation called `name`; 'auto' chooses one and logs which.

  Raises:
    ValueError: no implementation has that name.
  """
  if name == 'auto':
    choice = 'blockwise'
    _log.info("attention: 'auto' chose %r on platform %r", choice, jax.default_backend())
    return IMPLEMENTATIONS[choice]
  if name not in IMPLEMENTATIONS:
    raise ValueError(f'unknown attention implementation {name!r}; known: auto, {", ".join(IMPLEMENTATIONS)}')
  return IMPLEMENTATIONS[name]


def attention(
  q: chex.Array,
  k: chex.Array,
  v: chex.Array,
  segments: chex.Array,
  window: int | None,
  implementation: str,
) -> chex.Array:
  """Causal grouped-query attention inside each packed sample, differentiable in q, k and v.

  Args:
    q: queries, float [T, h, D].
    k: keys, [T, k, D] of q's dtype.
    v: values, [T, k, D] of q's dtype.
    segments: int32 [T], see the top of this module.
    window: how many of its sample's last tokens a query sees, itself included; None for all of them.
    implementation: a name for `get_attention`.

  Returns:
    [T, h, D] in q's dtype; zero at padding rows.

  Raises:
    ValueError: unknown implementation, a window below 1, or heads that k does not divide.
    AssertionError: shapes that do not fit together.
  """
  check_arguments(q, k, v, segments, window)
  return _attention(get_attention(implementation), window, q, k, v, segments)


def check_arguments(
  q: chex.Array, k: chex.Array, v: chex.Array, segments: chex.Array, window: int | None
) -> None:
  """Checks the shapes of one attention call; raises as `attention` says."""
  chex.assert_rank([q, k, v], 3)
  tokens, heads, width = q.shape
  kv_heads = k.shape[1]
  chex.assert_shape([k, v], (tokens, kv_heads, width))
  chex.assert_shape(segments, (tokens,))
  if heads % kv_heads:
    raise ValueError(f'{heads} query heads cannot share {kv_heads} key/value heads evenly')
  if window is not None and window < 1:
    raise ValueError(f'window must be None or at least 1, got {window}')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(impl: AttentionImpl, window: int | None, q, k, v, segments):
  return impl.forward(q, k, v, segments, window)[0]


def _attention_fwd(impl, window, q, k, v, segments):
  out, lse = impl.forward(q, k, v, segments, window)
  return out, (q, k, v, segments, out, lse)


def _attention_bwd(impl, window, residuals, dout):
  q, k, v, segments, out, lse = residuals
  return (*impl.backward(q, k, v, segments, window, out, lse, dout), None)


_attention.defvjp(_attention_fwd, _attention_bwd)
