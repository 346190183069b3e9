"""The samples of an epoch, known before training begins: which pieces of which documents.

One function, `index_samples(source, config) -> SampleIndex`, in NumPy alone. The number of tokens in each
document is all it needs.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from repack_jax.config import DataConfig
from repack_jax.data.long_documents import Pieces, check_long_documents, kept_tokens
from repack_jax.documents.documents import Source
from repack_jax.documents.tokenizers import TOKENIZERS


@dataclass(frozen=True, eq=False)
class SampleIndex:
  """`S` samples of `D` documents, in the order of the source.

  Attributes:
    document: int64 [S], the number of the sample's document.
    offset: int64 [S], where in the document the sample begins, in tokens.
    length: int64 [S], its tokens, at least 1.
    document_tokens: int64 [D], the tokens of each whole document.
    document_bytes: int64 [D], its size, by which it is seen to have changed.
    counts: `documents` in the source, of which `used_documents` have samples; `split_documents`,
      `truncated_documents`, `dropped_documents` and `empty_documents`; the `samples` and `epoch_tokens` of
      an epoch, and the `lost_tokens` that truncating and dropping leave out of it.
  """

  document: np.ndarray
  offset: np.ndarray
  length: np.ndarray
  document_tokens: np.ndarray
  document_bytes: np.ndarray
  counts: dict[str, int]

  def __len__(self) -> int:
    return len(self.document)

  def crc32(self) -> int:
    """Returns a checksum of the samples: which pieces of which documents they are."""
    return zlib.crc32(np.stack([self.document, self.offset, self.length]).tobytes())

  def describe(self) -> dict[str, int]:
    """Returns what a summary shows: `counts`, `total_tokens`, and how long the documents are."""
    lengths = self.document_tokens
    names = ('min_tokens', 'median_tokens', 'p99_tokens', 'max_tokens')
    percentiles = np.percentile(lengths, [0, 50, 99, 100], method='nearest')
    spread = {name: int(length) for name, length in zip(names, percentiles, strict=True)}
    return self.counts | {'total_tokens': int(lengths.sum())} | spread


def index_samples(source: Source, config: DataConfig) -> SampleIndex:
  """Returns the samples that `max_document_tokens` and `long_documents` make of the source's documents.

  Raises:
    ConfigError: a document cannot be used, or is too long where `long_documents` is `error`, or no
      document gives a sample.
  """
  tokenizer = TOKENIZERS[config.tokenizer]
  document_bytes = np.fromiter((document.size_bytes for document in source), np.int64, len(source))
  document_tokens = np.fromiter((tokenizer.count(document) for document in source), np.int64, len(source))
  check_long_documents(document_tokens, config, lambda number: source[number].name)
  kept = kept_tokens(document_tokens, config)
  pieces = Pieces(kept, config)
  document, offset, length = pieces.between(0, len(pieces))
  counts = {
    'documents': len(document_tokens),
    'used_documents': (kept > 0).sum(),
    'split_documents': (pieces.of_document > 1).sum(),
    'truncated_documents': ((kept > 0) & (kept < document_tokens)).sum(),
    'dropped_documents': ((kept == 0) & (document_tokens > 0)).sum(),
    'empty_documents': (document_tokens == 0).sum(),
    'samples': len(pieces),
    'epoch_tokens': kept.sum(),
    'lost_tokens': (document_tokens - kept).sum(),
  }
  return SampleIndex(
    document=document,
    offset=offset,
    length=length,
    document_tokens=document_tokens,
    document_bytes=document_bytes,
    counts={name: int(count) for name, count in counts.items()},
  )
