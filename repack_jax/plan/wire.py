"""What a token sends to its peers in an attention layer: the one place of this arithmetic. NumPy only.

Dispatch carries the operands of the attention core (queries, keys and values) from tokens to heads, combine
carries its result back. A rank in a group of P ranks works on a P-th of the heads of each; where an operand
has fewer than P heads, each of them goes to several ranks. Degrees may be integers or arrays of them.

Exchanges may be cut into chunks of the heads that a rank works on, so that what one chunk sends travels while
the core computes another. The core of a chunk works on a part of the queries, and on their keys and values;
a head of these that several chunks share travels with the first of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

DTYPE_BYTES = {'float32': 4, 'bfloat16': 2}
# Rows on the wire are as long as this where what each degree sends allows: a TPU's links pad shorter ones
# to it (compiled for v5p, v6e and v7).
MOST_ROW_BYTES = 512
Degree = TypeVar('Degree', int, np.ndarray)
HeadsOf = Callable[[int], int]  # SP degree -> heads that a token sends to, or gets from, a peer


@dataclass(frozen=True)
class Wire:
  """Heads and widths of what the exchanges of a layer carry.

  Attributes:
    operand_heads: heads of each operand that dispatch carries, queries first.
    result_heads: heads of what combine carries back.
    head_dim: elements of a head, the same for all.
    itemsize: bytes of an element.
    chunks: that an exchange is cut into, at most.
  """

  operand_heads: tuple[int, ...]
  result_heads: int
  head_dim: int
  itemsize: int
  chunks: int = 1

  @classmethod
  def of_attention(cls, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str) -> Wire:
    """Returns the wire of softmax attention: queries, keys and values there, one value a query head back."""
    return cls((num_heads, num_kv_heads, num_kv_heads), num_heads, head_dim, DTYPE_BYTES[dtype])

  def degrees(self, widest: int) -> tuple[int, ...]:
    """Returns the SP degrees up to `widest` that give each rank whole heads: powers of two without a gap."""
    heads = (*self.operand_heads, self.result_heads)
    powers = (1 << i for i in range(widest.bit_length()))
    return tuple(
      p for p in powers if self.result_heads % p == 0 and all(n % p == 0 or p % n == 0 for n in heads)
    )

  def rank_heads(self, degree: Degree) -> tuple[Degree, ...]:
    """Returns the heads of each operand that a token sends to one rank of its group."""
    return tuple(np.maximum(1, n // degree) if isinstance(degree, np.ndarray) else max(1, n // degree)
                 for n in self.operand_heads)  # fmt: skip

  def dispatch_heads(self, degree: Degree) -> Degree:
    """Returns the heads, of all operands, that a token sends to one rank of its group in dispatch."""
    return sum(self.rank_heads(degree))  # type: ignore[return-value]

  def combine_heads(self, degree: Degree) -> Degree:
    """Returns the heads that a token gets from one rank of its group in combine."""
    return self.result_heads // degree

  def bytes_per_peer(self, degree: Degree) -> Degree:
    """Returns the bytes a token sends to one rank of its group in both sites of a layer, forward pass."""
    return (self.dispatch_heads(degree) + self.combine_heads(degree)) * self.head_dim * self.itemsize

  @property
  def halo_bytes(self) -> int:
    """Returns the bytes of a token's operands but its queries: what a halo carries of it."""
    return sum(self.operand_heads[1:]) * self.head_dim * self.itemsize

  def cut(self, chunks: int) -> Wire:
    """Returns the same in exchanges of so many chunks at most."""
    return dataclasses.replace(self, chunks=chunks)

  def fitted(self, degrees: Iterable[int]) -> Wire:
    """Returns the same in no more chunks than groups of these SP degrees have."""
    return self.cut(max((self.chunk_count(degree) for degree in degrees if degree > 1), default=1))

  # --- chunks -------------------------------------------------------------------------------------------

  def chunk_count(self, degree: int) -> int:
    """Returns the chunks of ranks of an SP degree: as many as give each the same heads.

    Of an operand with fewer heads than chunks, each head is of as many chunks. Cores of lone ranks are cut
    too, so that nobody waits for them between chunks.
    """

    def fits(count: int) -> bool:
      return self.combine_heads(degree) % count == 0 and all(
        heads % count == 0 or count % heads == 0 for heads in self.rank_heads(degree)
      )

    return max(count for count in range(1, self.chunks + 1) if fits(count))

  def chunk_heads(self, degree: int, chunk: int) -> tuple[int, ...]:
    """Returns the heads of each operand that a token sends to one rank of its group in a chunk."""
    count = self.chunk_count(degree)
    if chunk >= count:
      return (0,) * len(self.operand_heads)
    return tuple(
      heads // count if heads >= count else int(chunk % (count // heads) == 0)
      for heads in self.rank_heads(degree)
    )

  def chunk_sources(self, degree: int, chunk: int) -> tuple[int, ...]:
    """Returns, for each operand, the chunk with which the heads travel that a chunk's core works on."""
    count = self.chunk_count(degree)
    return tuple(chunk - chunk % max(1, count // heads) for heads in self.rank_heads(degree))

  def core_heads(self, degree: int, chunk: int) -> list[slice]:
    """Returns which heads of each operand a chunk's core works on, of those that a rank works on."""
    count = self.chunk_count(degree)
    first = [chunk * heads // count for heads in self.rank_heads(degree)]
    return [
      slice(start, start + max(1, heads // count))
      for start, heads in zip(first, self.rank_heads(degree), strict=True)
    ]

  def dispatched(self, chunk: int) -> HeadsOf:
    """Returns a function of the SP degree: heads that a token sends to a rank in a chunk of dispatch."""
    return lambda degree: sum(self.chunk_heads(degree, chunk))

  def combined(self, chunk: int) -> HeadsOf:
    """Returns a function of the SP degree: heads that a token gets from a rank in a chunk of combine."""

    def heads_of(degree: int) -> int:
      count = self.chunk_count(degree)
      return self.combine_heads(degree) // count if chunk < count else 0

    return heads_of

  def shown_heads(self, degree: int) -> tuple[int, int]:
    """Returns the heads of the first dispatch and of the last combine, which no core of the group hides."""
    return self.dispatched(0)(degree), self.combined(0)(degree)

  # --- rows ---------------------------------------------------------------------------------------------

  def row_tokens(self, widest: int, row_bytes: int) -> int:
    """Returns the least power of two of tokens that send each peer whole rows of `row_bytes`.

    At every SP degree up to `widest` and at both sites; 1 where rows may have any length (`row_bytes` 1).

    Args:
      row_bytes: a power of two.
    """
    head_bytes = self.head_dim * self.itemsize
    return row_bytes // math.gcd(*(n * head_bytes for n in self._peer_heads(self.degrees(widest))), row_bytes)

  def row_elements(self, degrees: tuple[int, ...], row_tokens: int) -> int:
    """Returns the elements of a row on the wire: as many as fit `MOST_ROW_BYTES`, but a head at least.

    They divide what `row_tokens` tokens send to a peer at each of these degrees and both sites.
    """
    common = math.gcd(*self._peer_heads(degrees)) * self.head_dim * row_tokens
    most = max(self.head_dim, MOST_ROW_BYTES // self.itemsize)
    return max(n for n in range(1, most + 1) if common % n == 0)

  def _peer_heads(self, degrees: tuple[int, ...]) -> list[int]:
    """Heads that a token sends to a peer, at each of these degrees, in each chunk of both sites."""
    sites = [of(chunk) for of in (self.dispatched, self.combined) for chunk in range(self.chunks)]
    return [of(degree) for of in sites for degree in degrees]
