"""What `DataConfig.long_documents` makes of documents longer than `max_document_tokens`. NumPy only.

Everything here works on arrays of lengths in tokens, so that documents and files of mere lengths are treated
alike: `check_long_documents` refuses, `kept_tokens` shortens, `Pieces` cuts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from repack_jax.checks import ConfigError
from repack_jax.config import DataConfig

# Longer than any document, and such that it and the sums of it with a chunk of lengths stay in int64.
_NO_LIMIT_TOKENS = 1 << 62


def check_long_documents(
  lengths: np.ndarray, data: DataConfig, name_of: Callable[[int], str] | None = None
) -> None:
  """Raises ConfigError where `long_documents` is `error` and a length exceeds the limit, or none is kept.

  Args:
    lengths: int64 [n], n >= 1.
    name_of: the name of the document at a place in `lengths`, where they are those of `data.source`.
  """
  limit = data.max_document_tokens
  is_long = lengths > limit
  longest = int(lengths.argmax())
  if data.long_documents == 'error' and is_long.any():
    if name_of is None:
      raise ConfigError(
        f'DataConfig.max_document_tokens = {limit}: less than the longest document, of {lengths[longest]} '
        "tokens; raise it, or set DataConfig.long_documents to 'split', 'truncate' or 'drop'"
      )
    raise ConfigError(
      f'{name_of(longest)}: {lengths[longest]} tokens, more than DataConfig.max_document_tokens = {limit}, '
      f'and the longest of {is_long.sum()} such documents; raise that, or set DataConfig.long_documents to '
      "'split', 'truncate' or 'drop'"
    )
  if not kept_tokens(lengths, data).any():
    if name_of is None:
      raise ConfigError(
        f"DataConfig.long_documents = 'drop': leaves nothing, as the shortest document has {lengths.min()} "
        f"tokens; raise DataConfig.max_document_tokens = {limit}, or set this to 'split' or 'truncate'"
      )
    raise ConfigError(
      f'DataConfig.source = {data.source!r}: none of its {len(lengths)} documents can be used: each is '
      f'empty or longer than DataConfig.max_document_tokens = {limit}; raise that or set '
      "DataConfig.long_documents = 'split'"
    )


def kept_tokens(lengths: np.ndarray, data: DataConfig) -> np.ndarray:
  """Returns how many tokens of each document are used, int64 [n]: 0 where it is dropped."""
  limit = min(data.max_document_tokens, _NO_LIMIT_TOKENS)
  if data.long_documents == 'truncate':
    return np.minimum(lengths, limit)
  return np.where(lengths > limit, 0, lengths) if data.long_documents == 'drop' else lengths


class Pieces:
  """The samples that documents are cut into, in order: each of `max_document_tokens`, or what is left.

  Only those that are asked for exist: one length may stand for more pieces than memory holds.
  """

  def __init__(self, kept: np.ndarray, data: DataConfig):
    """Args:
    kept: what `kept_tokens` returns, int64 [n].
    """
    self._kept, self._limit = kept, min(data.max_document_tokens, _NO_LIMIT_TOKENS)
    self.of_document = -(-kept // self._limit)
    """How many pieces each document has, int64 [n]."""
    self._ends = np.cumsum(self.of_document)

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  def between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (document, offset in it, length) of pieces `start` ... `stop - 1`, int64 [stop - start] each.

    Offsets and lengths are in tokens, and a length is at least 1.
    """
    piece = np.arange(start, stop)
    document = np.searchsorted(self._ends, piece, side='right')
    offset = (piece - (self._ends - self.of_document)[document]) * self._limit
    return document, offset, np.minimum(self._kept[document] - offset, self._limit)
