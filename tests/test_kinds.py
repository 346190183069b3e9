"""Layer kinds: what each sees by hand, and that all that a kind says of its mask is one mask. NumPy only."""

import dataclasses

import numpy as np
import pytest

from repack_jax.checks import ConfigError
from repack_jax.kinds import KINDS, ChunkedAttention, FullAttention, SlidingWindowAttention

STREAMS = [[1], [2], [13], [7, 1, 1, 5, 2], [3, 3, 4, 9], [1] * 6]


def with_setting(kind, value):
  """The kind with all its settings that are whole numbers at one value."""
  whole = [field.name for field in dataclasses.fields(kind) if field.type == 'int']
  return kind(**dict.fromkeys(whole, value))


VARIANTS = list(
  dict.fromkeys(with_setting(kind, n) for kind in KINDS.values() for n in (1, 2, 3, 4, 7, 12, 13, 2**40))
)


def dense(kind, lengths):
  """`(place, start, last, seen [query, key])` of samples end to end, by `sees`, one pair at a time."""
  start = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
  last = np.repeat(np.cumsum(lengths) - 1, lengths)
  seen = np.zeros((len(start),) * 2, bool)
  for query, first in enumerate(start):
    for key in range(first, last[query] + 1):
      seen[query, key] = kind.sees(np.int32(query - first), np.int32(key - first))
  return np.arange(len(start)), start, last, seen


@pytest.mark.parametrize('dtype', [np.int32, np.int64])
@pytest.mark.parametrize('kind', VARIANTS, ids=repr)
def test_a_kind_is_one_mask(kind, dtype):
  for lengths in STREAMS:
    place, start, last, seen = dense(kind, lengths)
    assert seen.diagonal().all() and not np.triu(seen, 1).any()
    args = [x.astype(dtype) for x in (place, start, last)]
    first_key, last_query = kind.first_key(*args[:2]), kind.last_query(*args)
    assert first_key.dtype == last_query.dtype == dtype
    # What a query sees is one interval up to itself; what sees a key, one from it on.
    np.testing.assert_array_equal(seen, (place >= first_key[:, None]) & (place <= place[:, None]))
    np.testing.assert_array_equal(seen.T, (place <= last_query[:, None]) & (place >= place[:, None]))
    sizes = kind.pairs(np.array(lengths))
    assert sizes.dtype == np.float64
    ends = np.cumsum(lengths)
    wanted = [seen[end - n : end].sum() for end, n in zip(ends, lengths, strict=True)]
    np.testing.assert_array_equal(sizes, wanted)
    reach = (np.arange(len(seen)) - first_key).max()
    assert reach <= kind.reach_tokens(len(seen))
    assert len(lengths) > 1 or reach == kind.reach_tokens(len(seen))
    # With a bound whatever the sample, what is out of a query's sight is out of that of all later ones: a
    # halo has what its first query sees.
    if kind.halo_tokens is not None:
      assert kind.reach_tokens(len(seen)) == min(kind.halo_tokens, len(seen) - 1)
      assert (np.diff(first_key) >= 0).all()


def pairs_in_whole_numbers(kind, length):
  """By Python's own, which grow as they need."""
  if isinstance(kind, ChunkedAttention):
    chunks, rest = divmod(length, kind.chunk_tokens)
    return chunks * (kind.chunk_tokens * (kind.chunk_tokens + 1) // 2) + rest * (rest + 1) // 2
  seen = min(length, kind.window_tokens) if isinstance(kind, SlidingWindowAttention) else length
  return seen * (seen + 1) // 2 + (length - seen) * seen


@pytest.mark.parametrize('kind', VARIANTS, ids=repr)
def test_pairs_of_any_length(kind):
  """Float64, exact as long as it can be and then to its last places: squares of lengths outgrow int64."""
  assert kind.pairs(0) == 0
  small, large = [1, 10, 1000, 2**20], [10_000_000, 2**25, 2**31 - 1, 2**40]
  for dtype, lengths in ((np.int32, [10, 2**31 - 1]), (np.int64, [*small, *large])):
    found = kind.pairs(np.array(lengths, dtype))
    assert found.dtype == np.float64 and (found > 0).all() and (np.diff(found) > 0).all()
    for value, length in zip(found.tolist(), lengths, strict=True):
      exact = pairs_in_whole_numbers(kind, length)
      assert abs(int(value) - exact) <= (0 if length in small else exact * 1e-12)
      assert kind.pairs(length) == value


def test_chunks_by_hand():
  position = np.arange(7)
  seen = ChunkedAttention(chunk_tokens=3).sees(position[:, None], position)
  wanted = [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [6]]
  assert [row.nonzero()[0].tolist() for row in seen] == wanted
  # Of the sample and not of the stream: one of 7 tokens that begins at place 2.
  place = np.arange(9)
  start, last = np.where(place < 2, 0, 2), np.where(place < 2, 1, 8)
  kind = ChunkedAttention(chunk_tokens=3)
  assert kind.first_key(place, start).tolist() == [0, 0, 2, 2, 2, 5, 5, 5, 8]
  assert kind.last_query(place, start, last).tolist() == [1, 1, 4, 4, 4, 7, 7, 7, 8]


@pytest.mark.parametrize('chunk_tokens', [7, 8, 2**31 - 1, 2**31, 2**40])
def test_chunks_that_no_sample_fills_are_full_attention(chunk_tokens):
  kind, position = ChunkedAttention(chunk_tokens=chunk_tokens), np.arange(7, dtype=np.int32)
  np.testing.assert_array_equal(kind.sees(position[:, None], position), np.tri(7, dtype=bool))
  assert (kind.first_key(position, 0 * position) == 0).all() and kind.pairs(7) == 28


def test_chunks_of_one_token_see_themselves():
  kind, position = ChunkedAttention(chunk_tokens=1), np.arange(7)
  np.testing.assert_array_equal(kind.sees(position[:, None], position), np.eye(7, dtype=bool))
  assert kind.pairs(7) == 7 and kind.reach_tokens(7) == 0


def test_pairs_by_hand():
  lengths = np.array([0, 1, 3, 7])
  assert FullAttention().pairs(lengths).tolist() == [0, 1, 6, 28]
  assert SlidingWindowAttention(window_tokens=3).pairs(lengths).tolist() == [0, 1, 6, 6 + 4 * 3]
  assert SlidingWindowAttention(window_tokens=2**40).pairs(lengths).tolist() == [0, 1, 6, 28]
  assert ChunkedAttention(chunk_tokens=3).pairs(lengths).tolist() == [0, 1, 6, 2 * 6 + 1]
  assert ChunkedAttention(chunk_tokens=2**40).pairs(lengths).tolist() == [0, 1, 6, 28]


def test_settings_are_checked():
  with pytest.raises(ConfigError, match=r'SlidingWindowAttention.window_tokens = 0: must be at least 1'):
    SlidingWindowAttention(window_tokens=0)
  with pytest.raises(ConfigError, match=r'ChunkedAttention.chunk_tokens = 0: must be at least 1'):
    ChunkedAttention(chunk_tokens=0)
  with pytest.raises(ConfigError, match='rope_theta'):
    FullAttention(rope_theta=-1.0)
