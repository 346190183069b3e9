"""The interface of packed attention.

Axes: T tokens, S slots of keys (S - T slots of a halo, then the T tokens; mostly S = T), h query heads, k
key/value heads (k divides h), D head width.

Every implementation computes the same function. `segments [S]` holds the sample id of each slot: the tokens
of a sample are one contiguous run, -1 marks padding, and ids need no order. A query attends to tokens of its
own sample at or before its own place; to which of them is up to the kind of layer (`repack_jax/kinds.py`).
Queries are those of the last T slots. What comes ahead of these is a halo: keys and values alone, for queries
that see further back than their own stretch of a stream. Places are counted over all S slots, and what is
counted from a sample's first token is counted from the first of its run. Query head i reads key/value head `i
// (h // k)`; scores are scaled by `1 / sqrt(D)`. Padding rows, whatever they hold (NaN included), give zero
output and zero gradients and change nothing elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

import chex
import jax
from jax.ad_checkpoint import checkpoint_name

from repack_jax.checks import ConfigError
from repack_jax.kinds import LayerKind
from repack_jax.ops.attention import blockwise, cudnn, pallas_tpu, reference
from repack_jax.ops.attention.case import AttentionCase

KEPT = 'kept'  # the name of what remat must keep, so that no core and no exchange runs twice

_log = logging.getLogger(__name__)


def _serves_all(case: AttentionCase) -> None:
  """Returns None: an implementation without limits."""


@dataclasses.dataclass(frozen=True)
class AttentionImpl:
  """A packed attention core as two plain functions, for callers that write their own `custom_vjp`.

  Neither is itself differentiable by JAX: use `attention` for that. `kind` is static; everything else is an
  array.

  Attributes:
    name: the name it is chosen by.
    platform: the one it is for, by JAX's name; None for all.
    core_forward, core_backward: `forward` and `backward` for arguments that have been checked.
    unserved: a case to None where the platform serves it, else to the reason in words.
  """

  name: str
  platform: str | None
  core_forward: Callable[..., tuple[chex.Array, chex.Array]]
  core_backward: Callable[..., tuple[chex.Array, chex.Array, chex.Array]]
  unserved: Callable[[AttentionCase], str | None]

  def why_not(self, platform: str, *cases: AttentionCase) -> str | None:
    """Returns why it does not serve one of these cases on a platform, in words; None where it serves all."""
    if self.platform not in (None, platform):
      return f'for platform {self.platform!r} only, not for platform {platform!r}'
    return next(filter(None, map(self.unserved, cases)), None)

  def forward(
    self, q: chex.Array, k: chex.Array, v: chex.Array, segments: chex.Array, kind: LayerKind
  ) -> tuple[chex.Array, chex.Array]:
    """Returns `(out [T, h, D] in q's dtype, lse float32 [T, h])`.

    `lse` is the natural logarithm of each row's sum of exponentiated scaled scores, and 0 at padding rows.
    Arguments and errors are those of `attention`.
    """
    self._check(q, k, v, segments, kind)
    return self.core_forward(q, k, v, segments, kind)

  def backward(
    self,
    q: chex.Array,
    k: chex.Array,
    v: chex.Array,
    segments: chex.Array,
    kind: LayerKind,
    out: chex.Array,
    lse: chex.Array,
    dout: chex.Array,
  ) -> tuple[chex.Array, chex.Array, chex.Array]:
    """Returns `(dq, dk, dv)`, each like its input, from what `forward` returned and `dout` [T, h, D]."""
    self._check(q, k, v, segments, kind)
    chex.assert_equal_shape([q, out, dout])
    chex.assert_shape(lse, q.shape[:2])
    return self.core_backward(q, k, v, segments, kind, out, lse, dout)

  def _check(
    self, q: chex.Array, k: chex.Array, v: chex.Array, segments: chex.Array, kind: LayerKind
  ) -> None:
    """Raises, as `attention` says, where the arguments do not fit together or are not served."""
    chex.assert_rank([q, k, v], 3)
    tokens, heads, width = q.shape
    slots, kv_heads, _ = k.shape
    chex.assert_shape([k, v], (slots, kv_heads, width))
    chex.assert_shape(segments, (slots,))
    assert slots >= tokens, f'{slots} slots of keys for {tokens} queries'
    chex.assert_equal(k.dtype, q.dtype)
    chex.assert_equal(v.dtype, q.dtype)
    if heads % kv_heads:
      raise ValueError(f'{heads} query heads cannot share {kv_heads} key/value heads evenly')
    if reason := self.unserved(AttentionCase.of(q, k, kind)):
      raise ValueError(f'attention {self.name!r} is {reason}')


IMPLEMENTATIONS = {
  impl.name: impl
  for impl in (
    AttentionImpl('pallas_tpu', 'tpu', pallas_tpu.forward, pallas_tpu.backward, pallas_tpu.why_not),
    AttentionImpl('cudnn', 'gpu', cudnn.forward, cudnn.backward, cudnn.why_not),
    AttentionImpl('blockwise', None, blockwise.forward, blockwise.backward, _serves_all),
    AttentionImpl('reference', None, reference.forward, reference.backward, _serves_all),
  )
}


def get_attention(name: str) -> AttentionImpl:
  """Returns the implementation called `name`; raises ValueError where there is none."""
  if name not in IMPLEMENTATIONS:
    raise ValueError(f'unknown attention implementation {name!r}; known: {", ".join(IMPLEMENTATIONS)}')
  return IMPLEMENTATIONS[name]


def choose_attention(name: str, platform: str, cases: Sequence[AttentionCase]) -> AttentionImpl:
  """Returns the implementation for a run, and logs it.

  An explicit choice stands; `auto` takes the platform's own where that serves all cases, else `blockwise`.

  Args:
    name: `TrainConfig.attention`.
    platform: by JAX's name.
    cases: whatever the run may ask for: its layer kinds at all SP degrees.

  Raises:
    ConfigError: an explicit choice does not serve one of the cases.
  """
  if name != 'auto':
    chosen = get_attention(name)
    if reason := chosen.why_not(platform, *cases):
      raise ConfigError(f"TrainConfig.attention = {name!r}: {reason}. Use 'blockwise', or 'auto'")
    _log.info('attention: %s (as asked, on %s)', name, platform)
    return chosen
  own = next((impl for impl in IMPLEMENTATIONS.values() if impl.platform == platform), None)
  reason = own.why_not(platform, *cases) if own else None
  chosen = own if own and not reason else IMPLEMENTATIONS['blockwise']
  because = f'; {own.name} does not serve this: it is {reason}' if own and reason else ''
  _log.info('attention: %s (chosen by auto, on %s%s)', chosen.name, platform, because)
  return chosen


def attention(
  q: chex.Array,
  k: chex.Array,
  v: chex.Array,
  segments: chex.Array,
  kind: LayerKind,
  implementation: str,
) -> chex.Array:
  """Returns causal grouped-query attention inside each packed sample, differentiable in q, k and v.

  Args:
    q: queries, float [T, h, D].
    k: keys, [S, k, D] of q's dtype.
    v: values, [S, k, D] of q's dtype.
    segments: int32 [S], see the top of this module.
    kind: what queries see.
    implementation: a name for `get_attention`.

  Returns:
    [T, h, D] in q's dtype; zero at padding rows.

  Raises:
    ValueError: an unknown implementation, one that does not serve the case, or heads that k does not divide.
    AssertionError: shapes or dtypes that do not fit together.
  """
  return attend(get_attention(implementation), kind, q, k, v, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
  impl: AttentionImpl,
  kind: LayerKind,
  q: chex.Array,
  k: chex.Array,
  v: chex.Array,
  segments: chex.Array,
) -> chex.Array:
  """Returns what `attention` does, by an implementation at hand."""
  return _attend_fwd(impl, kind, q, k, v, segments)[0]


def _attend_fwd(impl, kind, q, k, v, segments):
  out, lse = impl.forward(q, k, v, segments, kind)
  out, lse = checkpoint_name(out, KEPT), checkpoint_name(lse, KEPT)
  return out, (q, k, v, segments, out, lse)


def _attend_bwd(impl, kind, residuals, dout):
  q, k, v, segments, out, lse = residuals
  return (*impl.backward(q, k, v, segments, kind, out, lse, dout), None)


attend.defvjp(_attend_fwd, _attend_bwd)
