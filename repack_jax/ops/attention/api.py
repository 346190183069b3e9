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
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from repack_jax.checks import ConfigError
from repack_jax.ops.attention import blockwise, cudnn, pallas_tpu, reference

KEPT = 'kept'  # the name of what remat must keep, so that no core and no exchange runs twice

_log = logging.getLogger(__name__)


def _serves_all(platform: str, dtype: jnp.dtype, head_dim: int) -> None:
  """The `why_not` of an implementation without limits."""


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
    why_not: `(platform, dtype, head_dim)` to None where it serves such a case, else to the reason in words.
  """

  name: str
  forward: Callable[..., tuple[chex.Array, chex.Array]]
  backward: Callable[..., tuple[chex.Array, chex.Array, chex.Array]]
  why_not: Callable[[str, jnp.dtype, int], str | None]


IMPLEMENTATIONS = {
  'pallas_tpu': AttentionImpl('pallas_tpu', pallas_tpu.forward, pallas_tpu.backward, pallas_tpu.why_not),
  'cudnn': AttentionImpl('cudnn', cudnn.forward, cudnn.backward, cudnn.why_not),
  'blockwise': AttentionImpl('blockwise', blockwise.forward, blockwise.backward, _serves_all),
  'reference': AttentionImpl('reference', reference.forward, reference.backward, _serves_all),
}
_OF_PLATFORM = {'tpu': 'pallas_tpu', 'gpu': 'cudnn'}  # what `auto` takes where it serves the case


def get_attention(name: str) -> AttentionImpl:
  """Returns the implementation called `name`; raises ValueError where there is none."""
  if name not in IMPLEMENTATIONS:
    raise ValueError(f'unknown attention implementation {name!r}; known: {", ".join(IMPLEMENTATIONS)}')
  return IMPLEMENTATIONS[name]


def choose_attention(name: str, platform: str, dtype: jnp.dtype, head_dim: int) -> AttentionImpl:
  """The implementation for a run, logged: an explicit choice stands, `auto` takes the platform's own.

  Raises:
    ConfigError: where an explicit choice does not serve the case.
  """
  if name != 'auto':
    if reason := get_attention(name).why_not(platform, dtype, head_dim):
      raise ConfigError(f"TrainConfig.attention = {name!r}: {reason}. Use 'blockwise', or 'auto'")
    _log.info('attention: %s (as asked, on %s)', name, platform)
    return get_attention(name)
  own = _OF_PLATFORM.get(platform)
  reason = own and IMPLEMENTATIONS[own].why_not(platform, dtype, head_dim)
  chosen = own if own and not reason else 'blockwise'
  because = f'; {own} does not serve this: {reason}' if reason else ''
  _log.info('attention: %s (chosen by auto, on %s%s)', chosen, platform, because)
  return IMPLEMENTATIONS[chosen]


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
  return attend(get_attention(implementation), window, q, k, v, segments)


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
def attend(
  impl: AttentionImpl,
  window: int | None,
  q: chex.Array,
  k: chex.Array,
  v: chex.Array,
  segments: chex.Array,
) -> chex.Array:
  """`attention` without checks, by an implementation at hand."""
  return _attend_fwd(impl, window, q, k, v, segments)[0]


def _attend_fwd(impl, window, q, k, v, segments):
  out, lse = impl.forward(q, k, v, segments, window)
  out, lse = checkpoint_name(out, KEPT), checkpoint_name(lse, KEPT)
  return out, (q, k, v, segments, out, lse)


def _attend_bwd(impl, window, residuals, dout):
  q, k, v, segments, out, lse = residuals
  return (*impl.backward(q, k, v, segments, window, out, lse, dout), None)


attend.defvjp(_attend_fwd, _attend_bwd)
