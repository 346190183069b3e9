"""Samples: documents or pieces of them, as tokens and targets.

The target of a token is the document's next one, wherever the document is cut: the last token of a piece
has the first token of the next piece as its target, and only a document's last token has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from repack_jax.plan.arrays import NO_TARGET


def tokenize_bytes(content: bytes) -> np.ndarray:
  """Returns the bytes as tokens 0 ... 255, int32 [n]."""
  return np.frombuffer(content, np.uint8).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Sample:
  """A document or a piece of one.

  Attributes:
    document: its number in the source.
    offset: where in the document the sample begins, in tokens. Within an epoch (document, offset) names
      a sample.
    tokens: int32 [n], n >= 1, read-only.
    targets: int32 [n], read-only: the document's token after each one, NO_TARGET after its last.
  """

  document: int
  offset: int
  tokens: np.ndarray
  targets: np.ndarray

  def __len__(self) -> int:
    return len(self.tokens)


def make_sample(document: int, offset: int, length: int, content: bytes) -> Sample:
  """Returns a sample of `length` tokens.

  Args:
    content: those tokens and the document's next one, which is missing where the document ends with the
      sample. With `truncate`, too, the last kept token has the one after it as its target: that one is
      real data.
  """
  assert len(content) in (length, length + 1)
  tokens = np.append(tokenize_bytes(content), np.int32(NO_TARGET))
  tokens.setflags(write=False)
  return Sample(document, offset, tokens[:length], tokens[1 : length + 1])
