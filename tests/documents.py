"""Documents from memory, and the samples and batches that they make."""

import itertools

import numpy as np

from repack_jax.config import DataConfig
from repack_jax.data.batches import Batcher
from repack_jax.documents.documents import Document, Source


class MemoryDocument(Document):
  """Counts the bytes that are read of it."""

  def __init__(self, name, content):
    self._name, self.content, self.read_bytes = name, bytes(content), 0

  @property
  def name(self):
    return self._name

  @property
  def size_bytes(self):
    return len(self.content)

  def read(self, start_byte=0, end_byte=None):
    content = self.content[start_byte:end_byte]
    self.read_bytes += len(content)
    return content


class ListSource(Source):
  """Documents named by their numbers."""

  def __init__(self, contents):
    self.documents = [MemoryDocument(f'document {i}', content) for i, content in enumerate(contents)]

  def __len__(self):
    return len(self.documents)

  def __getitem__(self, index):
    return self.documents[index]


def random_source(seed=0, documents=23, max_tokens=200):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(0, max_tokens, documents)
  return ListSource(rng.integers(0, 256, n, dtype=np.uint8) for n in lengths)


def config(**changes):
  defaults = {'batch_tokens': 150, 'max_document_tokens': 64}
  return DataConfig(**(defaults | changes))


def batches(n, data_config, source, state=None):
  return list(itertools.islice(Batcher(data_config, source, state), n))


def samples(n, data_config, source, state=None):
  """The first n samples."""
  found = (sample for batch in Batcher(data_config, source, state) for sample in batch.samples)
  return list(itertools.islice(found, n))


def check_grouped(order, ungrouped, is_long, window, epoch):
  """Asserts that an order is another one whose long samples were brought together, window by window.

  Returns how many samples of each window come before its long ones.
  """
  assert len(order) == len(ungrouped) and len(order) % epoch == 0
  places = []
  for first in range(0, len(order), epoch):
    for start in range(first, first + epoch, window):
      inside = slice(start, min(start + window, first + epoch))
      for kind in (True, False):
        kept, expected = ([x for x in each[inside] if is_long(x) is kind] for each in (order, ungrouped))
        assert kept == expected
      found = [place for place, x in enumerate(order[inside]) if is_long(x)]
      assert not found or found == list(range(found[0], found[-1] + 1))
      places += found[:1]
  return places


def names(many):
  return [(sample.document, sample.offset, len(sample)) for sample in many]


def ids(many):
  return [names(batch.samples) for batch in many]
