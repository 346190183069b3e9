"""Documents into tokens, tokens into samples.

Targets are made of a whole document, before it is cut: the last token of a piece has the first token of
the next piece as its target, and only a document's last token has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from repack_jax.config import ConfigError, DataConfig

NO_TARGET = -1

# A tokenizer turns a document into int32 [n], in the same way every time.
Tokenizer = Callable[[bytes], np.ndarray]


def tokenize_bytes(document: bytes) -> np.ndarray:
  """Returns the document's bytes as tokens 0 ... 255, int32 [n]."""
  return np.frombuffer(document, np.uint8).astype(np.int32)


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


def cut_document(
  document: int, tokens: np.ndarray, config: DataConfig, name: str, start: int = 0
) -> tuple[Sample, ...]:
  """Returns the samples of one document; none where it is empty or dropped.

  With `truncate`, the last token that is kept still has the token after it as its target: that one is
  real data, and the document does not end there.

  Args:
    document: its number in the source.
    tokens: int32 [n], the whole document.
    config: `max_document_tokens` and `long_documents` decide what becomes of a longer document.
    name: of the document, for the message.
    start: cut from this token on: a resumed run has had those before it.

  Raises:
    ConfigError: the document is too long and `long_documents` is `error`.
  """
  limit, policy = config.max_document_tokens, config.long_documents
  n = len(tokens)
  if n > limit and policy == 'error':
    raise ConfigError(
      f'{name}: {n} tokens, more than DataConfig.max_document_tokens = {limit}; raise that, or set '
      "DataConfig.long_documents to 'split', 'truncate' or 'drop'"
    )
  if n == 0 or (n > limit and policy == 'drop'):
    return ()
  targets = np.append(tokens[1:], np.int32(NO_TARGET))
  for array in (tokens, targets):
    array.setflags(write=False)
  kept = min(n, limit) if policy == 'truncate' else n
  return tuple(
    Sample(document, offset, tokens[offset : offset + limit], targets[offset : offset + limit])
    for offset in range(start, kept, limit)
  )
