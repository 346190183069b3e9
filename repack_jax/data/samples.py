"""Samples: documents or pieces of them, as tokens and targets.

The target of a token is the document's next one, wherever the document is cut: the last token of a piece
has the first token of the next piece as its target, and only a document's last token has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from repack_jax.plan.arrays import NO_TARGET


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


def make_sample(document: int, offset: int, length: int, tokens: np.ndarray) -> Sample:
  """Returns a sample of `length` tokens.

  Args:
    tokens: int32, those tokens and the document's next one, which is missing where the document ends with
      the sample. The last token that `truncate` keeps also has the one after it, which is real data, as
      its target.
  """
  assert len(tokens) in (length, length + 1)
  tokens = np.append(tokens, np.int32(NO_TARGET))
  tokens.setflags(write=False)
  return Sample(document, offset, tokens[:length], tokens[1 : length + 1])
