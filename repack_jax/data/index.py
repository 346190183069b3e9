"""The samples of an epoch, known before a document is read: which pieces of which documents.

One function, `index_samples(source, config) -> SampleIndex`, NumPy alone. A byte is a token, so the
lengths of the documents are all it needs.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from repack_jax.checks import ConfigError
from repack_jax.config import DataConfig
from repack_jax.data.sources import Source


@dataclass(frozen=True, eq=False)
class SampleIndex:
  """`S` samples of `D` documents, in the order of the source.

  Attributes:
    document: int64 [S], the number of the sample's document.
    offset: int64 [S], where in the document the sample begins, in tokens.
    length: int64 [S], its tokens, at least 1.
    document_tokens: int64 [D], the whole documents' lengths.
    counts: `documents` in the source, of which `used_documents` have samples; `split_documents`,
      `truncated_documents`, `dropped_documents` and `empty_documents`; the `samples` and `epoch_tokens` of
      an epoch, and the `lost_tokens` that truncating and dropping leave out of it.
  """

  document: np.ndarray
  offset: np.ndarray
  length: np.ndarray
  document_tokens: np.ndarray
  counts: dict[str, int]

  def __len__(self) -> int:
    return len(self.document)

  def crc32(self) -> int:
    """A number that two indices share where their samples are the same."""
    return zlib.crc32(np.stack([self.document, self.offset, self.length]).tobytes())

  def describe(self) -> dict[str, int]:
    """Returns what a summary shows: `counts`, `total_bytes`, and what the documents' lengths are like."""
    sizes = self.document_tokens
    names = ('min_bytes', 'median_bytes', 'p99_bytes', 'max_bytes')
    percentiles = np.percentile(sizes, [0, 50, 99, 100], method='nearest')
    lengths = {name: int(size) for name, size in zip(names, percentiles, strict=True)}
    return self.counts | {'total_bytes': int(sizes.sum())} | lengths


def index_samples(source: Source, config: DataConfig) -> SampleIndex:
  """Returns the samples that `max_document_tokens` and `long_documents` make of the source's documents.

  Raises:
    ConfigError: a document cannot be used, or is too long where `long_documents` is `error`, or no
      document gives a sample.
  """
  limit, policy = config.max_document_tokens, config.long_documents
  sizes = np.fromiter((source.size_bytes(i) for i in range(len(source))), np.int64, len(source))
  is_long = sizes > limit
  if policy == 'error' and is_long.any():
    longest = int(sizes.argmax())
    raise ConfigError(
      f'{source.name(longest)}: {sizes[longest]} tokens, more than DataConfig.max_document_tokens = {limit}, '
      f'and the longest of {is_long.sum()} such documents; raise that, or set DataConfig.long_documents to '
      "'split', 'truncate' or 'drop'"
    )
  kept = {
    'split': sizes,
    'truncate': np.minimum(sizes, limit),
    'drop': np.where(is_long, 0, sizes),
    'error': sizes,
  }[policy]
  if not kept.any():
    raise ConfigError(
      f'DataConfig.source = {config.source!r}: none of its {len(source)} documents can be used: each is '
      f'empty or longer than DataConfig.max_document_tokens = {limit}; raise that or set '
      "DataConfig.long_documents = 'split'"
    )
  pieces = -(-kept // limit)
  document = np.repeat(np.arange(len(sizes)), pieces)
  piece = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
  offset = piece * limit
  counts = {
    'documents': len(sizes),
    'used_documents': (kept > 0).sum(),
    'split_documents': (pieces > 1).sum(),
    'truncated_documents': ((kept > 0) & (kept < sizes)).sum(),
    'dropped_documents': ((kept == 0) & (sizes > 0)).sum(),
    'empty_documents': (sizes == 0).sum(),
    'samples': len(document),
    'epoch_tokens': kept.sum(),
    'lost_tokens': (sizes - kept).sum(),
  }
  return SampleIndex(
    document=document,
    offset=offset,
    length=np.minimum(kept[document] - offset, limit),
    document_tokens=sizes,
    counts={name: int(count) for name, count in counts.items()},
  )
