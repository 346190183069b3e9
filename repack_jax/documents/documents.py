"""What a source is: a sequence of documents, each read from disk when it is needed, a range at a time.

The order of a source is fixed, so that a document's number means the same on every machine that has the
same data. Nothing here imports JAX.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from pathlib import Path

from repack_jax.checks import ConfigError


class Document(abc.ABC):
  """A document of a source. It knows where its content is and holds none of it."""

  @property
  @abc.abstractmethod
  def name(self) -> str:
    """Returns where the document comes from, for messages: `file` or `file:line`."""

  @property
  @abc.abstractmethod
  def size_bytes(self) -> int:
    """Returns the length of the content; raises ConfigError where it cannot be determined."""

  @abc.abstractmethod
  def read(self, start_byte: int = 0, end_byte: int | None = None) -> bytes:
    """Returns bytes `start_byte` ... `end_byte - 1`, to the end by default.

    Returns fewer where the document ends before `end_byte`. A short range of a long document costs about
    as much as a short document: samples come in random order, so nothing else stays linear in its length.

    Raises:
      ConfigError: the document cannot be read, or is seen to have changed since the source was opened.
    """


class Source(abc.ABC):
  """A sequence of documents, numbered 0 ... len - 1."""

  @abc.abstractmethod
  def __len__(self) -> int:
    """Returns the number of documents."""

  @abc.abstractmethod
  def __getitem__(self, index: int) -> Document:
    """Returns document `index`, without reading it."""

  def __iter__(self) -> Iterator[Document]:
    return (self[index] for index in range(len(self)))


def changed(document: Document) -> ConfigError:
  """Returns the error for a document that is no longer what it was when it was indexed."""
  return ConfigError(
    f'{document.name}: changed while the run was on; restore it and resume, or start a new run with what it '
    'is now'
  )


def unreadable(path: str | Path, reason: str | None) -> ConfigError:
  """Returns the error for a file of a source that the system does not let us read."""
  return ConfigError(
    f'{path}: cannot read it ({reason}); make it readable or take it out of DataConfig.source'
  )
