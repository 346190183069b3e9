"""Tokenizers: what a document's tokens are. Nothing else in the package knows how many bytes a token has.

Nothing here imports JAX or the configs, which check `DataConfig.tokenizer` against `TOKENIZERS`.
"""

from __future__ import annotations

import abc

import numpy as np

from repack_jax.documents.documents import Document


class Tokenizer(abc.ABC):
  """Makes tokens of documents. The same document always has the same tokens.

  Attributes:
    name: what `DataConfig.tokenizer` calls it. Checkpoints record it, so tokenizers that differ in any token
      need different names.
    vocab_size: tokens are 0 ... vocab_size - 1.
  """

  name: str
  vocab_size: int

  @abc.abstractmethod
  def count(self, document: Document) -> int:
    """Returns the number of tokens in a document; raises ConfigError where it cannot be read or tokenized."""

  @abc.abstractmethod
  def encode(self, document: Document, start: int, end: int) -> np.ndarray:
    """Returns tokens `start` ... `end - 1` of a document, int32 [end - start].

    Returns fewer where the document ends before `end`. Long documents are asked for piece by piece, in
    random order: a tokenizer that has to begin at the front each time takes time that grows with the
    square of their length.

    Raises:
      ConfigError: the document cannot be read or tokenized, or is seen to have changed.
    """


class ByteTokenizer(Tokenizer):
  """A byte a token."""

  name = 'bytes'
  vocab_size = 256

  def count(self, document: Document) -> int:
    return document.size_bytes

  def encode(self, document: Document, start: int, end: int) -> np.ndarray:
    return np.frombuffer(document.read(start, end), np.uint8).astype(np.int32)


TOKENIZERS: dict[str, Tokenizer] = {tokenizer.name: tokenizer for tokenizer in (ByteTokenizer(),)}
