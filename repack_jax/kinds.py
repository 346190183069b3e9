"""Layer kinds: whose groups of ranks the attention of a layer spans, and what it computes there. No JAX here.

A kind is one frozen object. It owns its mask and tiles, what its exchanges carry, its operations and its
settings; every attention kernel takes it as it is. Everything else of the library speaks of layouts only. A
new kind is a class here (`docs/extending.md`).

In all kinds a query sees keys of its own sample at or before its own place, and those are one interval that
ends at itself. So where the interval begins is the whole mask. Places are numbers of tokens in a stream;
`first_key` and `last_query` take and return NumPy or JAX arrays.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from repack_jax.checks import check_min, check_types
from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS
from repack_jax.plan.program import Program
from repack_jax.plan.wire import Wire

Array = Any  # of NumPy or of JAX

LAYER_SCOPES = {layout: f'{layout}_layer' for layout in LAYOUTS}  # in profiles and compiled programs
_MOST_TOKENS = 2**31 - 1  # places are int32: a setting above it means all of a sample


@dataclass(frozen=True)
class LayerKind(abc.ABC):
  """Softmax attention over an interval of keys.

  Attributes:
    letter: what stands for it in `ModelConfig.pattern`.
    layout: `PARENTS` or `CHILDREN`, whose groups of ranks its exchanges span.
    title: what reports call such layers.
    rope_theta: base of the rotary positions; 0 for none.
  """

  letter: ClassVar[str]
  layout: ClassVar[str]
  title: ClassVar[str]

  rope_theta: float = 10000.0

  def __post_init__(self) -> None:
    check_types(self)
    check_min(self, 0, 'rope_theta')

  @abc.abstractmethod
  def first_key(self, place: Array, start: Array) -> Array:
    """Returns the first key that the query at each place sees.

    Args:
      place: [T], the places 0 .. T - 1.
      start: [T], place of the first token of each one's sample.
    """

  @abc.abstractmethod
  def last_query(self, place: Array, start: Array, last: Array) -> Array:
    """Returns the last query that sees the key at each place; `last` [T] is its sample's last token."""

  @abc.abstractmethod
  def sees(self, query: Array, key: Array) -> Array:
    """Returns whether queries at these positions of a sample see the keys at those; never a later one.

    For oracles, and for the edge of a halo: it shares nothing with `first_key` and `last_query`.
    """

  @abc.abstractmethod
  def reach_tokens(self, tokens: int) -> int:
    """Returns how many tokens before its own a query sees at most, in a stream of so many tokens."""

  @property
  def halo_tokens(self) -> int | None:
    """Returns how many tokens before its own a query sees at most, whatever its sample; None: no bound.

    With a bound, a rank's queries need no more than so many tokens ahead of its own in the stream (a halo).
    """
    return None

  def halo_slots(self, program: Program) -> int | None:
    """Returns the slots of the halo with which a program runs such layers; None where they exchange heads."""
    return program.halo_slots(self.layout, self.halo_tokens)

  @abc.abstractmethod
  def pairs(self, length: np.ndarray | int) -> np.ndarray:
    """Returns the query-key pairs of whole samples of these lengths, float64 [...]: squares outgrow int64."""

  def wire(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str) -> Wire:
    """Returns what the exchanges of such a layer carry."""
    return Wire.of_attention(num_heads, num_kv_heads, head_dim, dtype)

  def flops(self, wire: Wire, length: np.ndarray | int) -> np.ndarray:
    """Returns the operations of scores and weighted values of whole samples, forward pass, float64 [...]."""
    return 4 * wire.result_heads * wire.head_dim * self.pairs(length)

  def describe(self) -> str:
    """Returns what a report says of its settings; '' for nothing."""
    return ''


@dataclass(frozen=True)
class FullAttention(LayerKind):
  """A query sees all of its sample up to itself."""

  letter: ClassVar[str] = 'F'
  layout: ClassVar[str] = PARENTS
  title: ClassVar[str] = 'full'

  def first_key(self, place: Array, start: Array) -> Array:
    return start

  def last_query(self, place: Array, start: Array, last: Array) -> Array:
    return last

  def sees(self, query: Array, key: Array) -> Array:
    return key <= query

  def reach_tokens(self, tokens: int) -> int:
    return tokens - 1

  def pairs(self, length: np.ndarray | int) -> np.ndarray:
    length = np.asarray(length, np.float64)
    return length * (length + 1) / 2


@dataclass(frozen=True)
class SlidingWindowAttention(LayerKind):
  """A query sees the last `window_tokens` tokens of its sample, itself included."""

  letter: ClassVar[str] = 'S'
  layout: ClassVar[str] = CHILDREN
  title: ClassVar[str] = 'sliding-window'

  window_tokens: int = 128

  def __post_init__(self) -> None:
    super().__post_init__()
    check_min(self, 1, 'window_tokens')

  def first_key(self, place: Array, start: Array) -> Array:
    return (place - self.reach_tokens(place.shape[0])).clip(start)

  def last_query(self, place: Array, start: Array, last: Array) -> Array:
    return (place + self.reach_tokens(place.shape[0])).clip(None, last)

  def sees(self, query: Array, key: Array) -> Array:
    return (key <= query) & (query - key < min(self.window_tokens, _MOST_TOKENS))

  def reach_tokens(self, tokens: int) -> int:
    return min(self.window_tokens, tokens) - 1

  @property
  def halo_tokens(self) -> int:
    return self.window_tokens - 1

  def pairs(self, length: np.ndarray | int) -> np.ndarray:
    length = np.asarray(length, np.float64)
    seen = np.minimum(length, self.window_tokens)
    return seen * (seen + 1) / 2 + (length - seen) * seen

  def describe(self) -> str:
    return f'windows of {self.window_tokens:,} tokens'


@dataclass(frozen=True)
class ChunkedAttention(LayerKind):
  """A query sees the tokens of its own chunk up to itself, as in the local layers of Llama 4.

  Each sample is cut into chunks of `chunk_tokens` tokens from its first token on; the last may be shorter.
  """

  letter: ClassVar[str] = 'C'
  layout: ClassVar[str] = CHILDREN
  title: ClassVar[str] = 'chunked'

  chunk_tokens: int = 8192

  def __post_init__(self) -> None:
    super().__post_init__()
    check_min(self, 1, 'chunk_tokens')

  def first_key(self, place: Array, start: Array) -> Array:
    return place - (place - start) % min(self.chunk_tokens, place.shape[0])

  def last_query(self, place: Array, start: Array, last: Array) -> Array:
    return (self.first_key(place, start) + self.reach_tokens(place.shape[0])).clip(None, last)

  def sees(self, query: Array, key: Array) -> Array:
    chunk = min(self.chunk_tokens, _MOST_TOKENS)
    return (key <= query) & (query // chunk == key // chunk)

  def reach_tokens(self, tokens: int) -> int:
    return min(self.chunk_tokens, tokens) - 1

  @property
  def halo_tokens(self) -> int:
    return self.chunk_tokens - 1

  def pairs(self, length: np.ndarray | int) -> np.ndarray:
    length = np.asarray(length, np.float64)
    chunk = length.clip(1, self.chunk_tokens)
    whole, rest = np.divmod(length, chunk)
    return whole * (chunk * (chunk + 1) / 2) + rest * (rest + 1) / 2

  def describe(self) -> str:
    return f'chunks of {self.chunk_tokens:,} tokens'


KINDS: dict[str, type[LayerKind]] = {
  kind.letter: kind for kind in (FullAttention, SlidingWindowAttention, ChunkedAttention)
}
