"""What one call of packed attention asks for, known before anything is traced. No JAX here."""

from __future__ import annotations

import dataclasses

from repack_jax.kinds import Array, LayerKind


@dataclasses.dataclass(frozen=True)
class AttentionCase:
  """The static side of a call.

  Attributes:
    kind: what queries see.
    dtype: of queries, keys and values, by name: 'bfloat16'.
    tokens: T, of the stream: its queries.
    heads, kv_heads, head_dim: h, k and D.
    halo_tokens: S - T, slots of keys and values alone that come ahead of them.
  """

  kind: LayerKind
  dtype: str
  tokens: int
  heads: int
  kv_heads: int
  head_dim: int
  halo_tokens: int = 0

  @property
  def slots(self) -> int:
    """Returns S, the slots of keys and values."""
    return self.halo_tokens + self.tokens

  @classmethod
  def of(cls, q: Array, k: Array, kind: LayerKind) -> AttentionCase:
    """Returns the case of q [T, h, D] and k [S, k, D]."""
    tokens, heads, head_dim = q.shape
    return cls(kind, q.dtype.name, tokens, heads, k.shape[1], head_dim, k.shape[0] - tokens)

  def at_degree(self, degree: int, chunks: int = 1) -> AttentionCase:
    """Returns what a rank in a group of `degree` ranks is asked for, where this is what a lone rank is.

    Args:
      chunks: that exchanges are cut into at most.
    """
    wire = self.kind.wire(self.heads, self.kv_heads, self.head_dim, self.dtype).cut(chunks)
    heads, kv_heads, _ = wire.chunk_heads(degree, 0)  # the first chunk brings all that its core works on
    return dataclasses.replace(self, tokens=degree * self.tokens, heads=heads, kv_heads=kv_heads)
