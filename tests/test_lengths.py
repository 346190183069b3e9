"""Files of lengths, the messages for what is none, and the batches that lengths make."""

import dataclasses
import io
import itertools
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from documents import ListSource, check_grouped
from messages import message_of

from repack_jax.config import DataConfig, SimulatorConfig
from repack_jax.config.run import MOST_BATCH_TOKENS
from repack_jax.data import lengths as lengths_module
from repack_jax.data.grouping import window_samples
from repack_jax.data.index import index_samples
from repack_jax.data.lengths import Histogram, file_order_batches, length_batches, read_lengths

SHIPPED = Path(__file__).parent.parent / 'configs' / 'lengths'
DTYPES = (np.int8, np.uint8, np.int32, np.uint64, '>i4')


def saved(array, allow_pickle=False):
  buffer = io.BytesIO()
  np.save(buffer, array, allow_pickle=allow_pickle)
  return buffer.getvalue()


def archive(**members):
  """A .npz file of arrays, each given as the bytes of its .npy file."""
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, 'w') as file:
    for name, content in members.items():
      file.writestr(f'{name}.npy', content)
  return buffer.getvalue()


def config(batch_tokens=10, max_document_tokens=5, long_documents='split'):
  return DataConfig(
    batch_tokens=batch_tokens, max_document_tokens=max_document_tokens, long_documents=long_documents
  )


def as_lists(batches, count=None):
  return [batch.tolist() for batch in itertools.islice(batches, count)]


ARRAY_FILES = {
  'a.npy': saved(np.array([3, 1, 70])),
  'A.NPY': saved(np.array([3, 1, 70])),
  'other.npz': archive(other=saved(np.array([3, 1, 70]))),
  'several.npz': archive(a=saved(np.array([9])), lengths=saved(np.array([3, 1, 70]))),
  'a.txt': b'3\n1\n70\n',
  'no_suffix': b'\xef\xbb\xbf# tokens\r\n 3 \r\n\r\n\t#1\r\n001\r\n70',
  'a.jsonl': json.dumps({'text': 'abc'}).encode()
  + b'\n\n{"text": "a"}\n{"text": ""}\n'
  + json.dumps({'text': '\u00e9\u4e2d' * 14}).encode(),
}


@pytest.mark.parametrize('name', ARRAY_FILES)
def test_arrays(name, tmp_path):
  (tmp_path / name).write_bytes(ARRAY_FILES[name])
  for path in (tmp_path / name, str(tmp_path / name)):
    lengths = read_lengths(path)
    assert lengths.dtype == np.int64 and lengths.tolist() == [3, 1, 70]


def test_home_text_field_and_dtypes(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'a.jsonl').write_text('{"body": "four"}')
  assert read_lengths('~/a.jsonl', DataConfig(text_field='body')).tolist() == [4]
  np.save(tmp_path / 'a.npy', np.array([2**40]))
  assert read_lengths(tmp_path / 'a.npy').tolist() == [2**40]
  for dtype in DTYPES:
    np.save(tmp_path / 'a.npy', np.array([1, 127], dtype))
    lengths = read_lengths(tmp_path / 'a.npy')
    assert lengths.dtype == np.dtype(np.int64) and lengths.tolist() == [1, 127]


def test_histogram_file(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_bytes(b'\n# source\r\nlow, high,count\r\n1,1,0\n\n2,10,4\r\n 11 ,1099511627776,1\n')
  histogram = read_lengths(path)
  assert isinstance(histogram, Histogram)
  columns = (histogram.low, histogram.high, histogram.count)
  assert [x.tolist() for x in columns] == [[1, 2, 11], [1, 10, 2**40], [0, 4, 1]]
  assert {x.dtype for x in columns} == {np.dtype(np.int64)}


LONG = '9' * 5000
# Name of the file, its content, and how the message goes on after the path.
BROKEN = [
  ('a.txt', b'', ': holds no lengths; give it at least one'),
  ('a.txt', b'# nothing\n\n', ': holds no lengths; '),
  ('a.txt', b'1\n-2\n', ":2: '-2' must be at least 1; correct or remove the line"),
  ('a.txt', b'# 1\n\n0\n', ":3: '0' must be at least 1; "),
  ('a.txt', b'-' + LONG.encode(), ":1: '-9999"),
  ('a.txt', b'12.0\n', ":1: '12.0' is not a whole number; write digits alone"),
  ('a.txt', b'1\nnan\n', ":2: 'nan' is not a whole number; "),
  ('a.txt', b'1_000', ":1: '1_000' is not a whole number; "),
  ('a.txt', '\u0663'.encode(), r":1: '\u0663' is not a whole number; "),
  ('a.txt', b'1 2', ":1: '1 2' is not a whole number; "),
  ('a.txt', b'x' * 1000, f":1: '{'x' * 56}... is not a whole number; "),
  ('a.txt', b'\x00\x01\n', r":1: '\x00\x01' is not a whole number; "),
  ('a.txt', b'1\n\xff\xfe', ': not text in UTF-8 at byte 2; name a text file, or give a NumPy file its'),
  ('a.txt', b'1099511627777', ":1: '1099511627777' must be at most 1099511627776; correct the line"),
  ('a.txt', b'9223372036854775808', ":1: '9223372036854775808' must be at most 1099511627776; "),
  ('a.txt', LONG.encode(), ":1: '9999"),
  ('a.csv', b'', ': holds no lengths; '),
  ('a.csv', b'1\n2\n', ":1: '1' is not the header; begin the file with 'low,high,count', or name it .txt"),
  ('a.csv', b'Low,High,Count\n', ":1: 'Low,High,Count' is not the header; "),
  ('a.csv', b'low,high,count,share\n1,2,3,4', ":1: 'low,high,count,share' is not the header; "),
  ('a.csv', b'low,high,count\n', ': no bins below the header; '),
  ('a.csv', b'low,high,count\n1,2\n', ":2: '1,2' is no bin; write three whole numbers, low,high,count"),
  ('a.csv', b'low,high,count\n1,2,3,4\n', ":2: '1,2,3,4' is no bin; "),
  ('a.csv', b'low,high,count\n1,2,3\n5,4,1\n', ':3: low = 5 is above high = 4; swap or correct them'),
  ('a.csv', b'low,high,count\n0,4,1\n', ":2: low = '0' must be at least 1; "),
  ('a.csv', b'low,high,count\n1,4,-1\n', ":2: count = '-1' must be at least 0; "),
  ('a.csv', b'low,high,count\n1,4,0.5\n', ":2: count = '0.5' is not a whole number; "),
  ('a.csv', b'low,high,count\n1,,5\n', ":2: high = '' is not a whole number; "),
  ('a.csv', b'low,high,count\n1,9223372036854775808,5\n', ":2: high = '9223372036854775808' must be at"),
  ('a.csv', b'low,high,count\n1,2,0\n3,4,0\n', ': all counts are 0; give at least one bin a count'),
  ('a.csv', b'PK\x03\x04\x80', ': not text in UTF-8 at byte 4; '),
  ('a.jsonl', b'', ': holds no lengths; '),
  ('a.jsonl', b'{"text": ""}\n', ': holds no lengths; '),
  ('a.jsonl', b'{"text": "a"}\n{"text"\n', ':2: not JSON ('),
  ('a.jsonl', b'{"body": "a"}', ":1: no field 'text'; the fields are: 'body'. Set DataConfig.text_field"),
  ('a.jsonl', b'{"text": 5}', ":1: field 'text' is of type int, not a string; "),
  ('a.jsonl', b'[5]', ':1: a JSON list, not an object; '),
  ('a.jsonl', b'\xff', ':1: not UTF-8 at byte 0 of the line; '),
  ('a.npy', b'', ': not a NumPy file of plain numbers (No data left in file); save one 1-D array'),
  ('a.npy', b'1\n2\n', ': not a NumPy file of plain numbers (pickled objects, or no NumPy file at all); '),
  ('a.npy', pickle.dumps([1]), ': not a NumPy file of plain numbers (pickled objects, or no '),
  ('a.npy', saved(np.array([1, None]), True), ': not a NumPy file of plain numbers (pickled objects, or '),
  ('a.npy', saved(np.arange(1, 99))[:-3], ': not a NumPy file of plain numbers ('),
  ('a.npy', saved(np.arange(1, 99))[:30], ': not a NumPy file of plain numbers ('),
  ('a.npy', saved(np.array([], int)), ': holds no lengths; '),
  ('a.npy', saved(np.array(5)), ': of shape (), not 1-D; save one 1-D array of integers with np.save'),
  ('a.npy', saved(np.ones((2, 3), int)), ': of shape (2, 3), not 1-D; '),
  ('a.npy', saved(np.array([4, -2])), ': entry 1 (from 0) is -2: a length is at least 1; remove or'),
  ('a.npy', saved(np.array([4, 1, 0])), ': entry 2 (from 0) is 0: a length is at least 1; '),
  ('a.npy', saved(np.array([1, 12.0])), ": of dtype 'float64', not integers; convert to integers: array.as"),
  ('a.npy', saved(np.array([1, np.nan])), ': entry 1 (from 0) is nan: not a finite number; remove or'),
  ('a.npy', saved(np.array([1, -np.inf])), ': entry 1 (from 0) is -inf: not a finite number; '),
  ('a.npy', saved(np.array([1, 2.5], np.float32)), ': entry 1 (from 0) is 2.5: not a whole number; '),
  ('a.npy', saved(np.array([True])), ": of dtype 'bool', not integers; "),
  ('a.npy', saved(np.array(['a\n'])), ": of dtype '<U2', not integers; "),
  ('a.npy', saved(np.array([1j])), ": of dtype 'complex128', not integers; "),
  ('a.npy', saved(np.zeros(2, [('a', int)])), ': of dtype "[(\'a\', \'<i8\')]", not integers; '),
  ('a.npy', saved(np.array([1, 2**63], np.uint64)), ': entry 1 (from 0) is 9223372036854775808: more than'),
  ('a.npz', b'PK', ': not a NumPy file of plain numbers ('),
  ('a.npz', archive(), ': an archive without arrays; save one 1-D array'),
  ('a.npz', archive(**{'a\n': b'', 'b': b''}), r": several arrays ('a\n', 'b'), none of them named len"),
  ('a.npz', archive(**dict.fromkeys('012345', b'')), ": several arrays ('0', '1', '2', '3', '4', ...), none"),
  ('a.npz', archive(lengths=saved(np.array([1, 0]))), "['lengths']: entry 1 (from 0) is 0: a len"),
  ('a.npz', archive(x=b''), "['x']: not a NumPy array; "),
  ('a.npz', archive(x=saved(np.array([None]), True)), ': not a NumPy file of plain numbers ('),
]  # fmt: skip


@pytest.mark.parametrize(
  ('name', 'content', 'expected'), BROKEN, ids=[f'{i}-{row[0]}' for i, row in enumerate(BROKEN)]
)
def test_broken_files(name, content, expected, tmp_path):
  path = tmp_path / name
  path.write_bytes(content)
  message = message_of(read_lengths, path)
  assert message.startswith(f'{path}{expected}') and len(message) < len(str(path)) + 260
  assert ';' in message or '. Set ' in message  # what to do about it


def test_paths_that_are_no_files(tmp_path, monkeypatch):
  os.mkfifo(tmp_path / 'pipe.txt')
  cases = {'nowhere.npz': 'no such file', '': 'a folder', 'pipe.txt': 'no regular file'}
  for name, expected in cases.items():
    path = tmp_path / name
    assert message_of(read_lengths, path) == f'{path}: {expected}; name a file of lengths'
  for name in ('a\0', 'x' * 5000):
    assert message_of(read_lengths, name) == f'{name}: no such file; name a file of lengths'
  assert message_of(read_lengths, '').startswith("SimulatorConfig.lengths = '': name a file of lengths")

  def refuse(*_):
    raise PermissionError(13, 'Permission denied')

  names = ('a.npy', 'a.jsonl', 'a.txt', 'a.csv')
  for name in names:
    (tmp_path / name).touch()
  monkeypatch.setattr(Path, 'open', refuse)
  for name in names:
    assert message_of(read_lengths, tmp_path / name).startswith(
      f'{tmp_path / name}: cannot read it (Permission denied); make it readable'
    )


POLICIES = {
  'split': [[5, 5], [2, 3, 5], [5, 4], [5, 5], [5, 1]],
  'truncate': [[5, 3], [5, 5], [5, 1]],
  'drop': [[3, 5, 1]],
}


@pytest.mark.parametrize('policy', POLICIES)
def test_policies_in_file_order(policy):
  lengths = np.array([12, 3, 5, 9, 15, 1])
  batches = list(file_order_batches(lengths, config(long_documents=policy)))
  assert as_lists(batches) == POLICIES[policy]
  assert {batch.dtype for batch in batches} == {np.dtype(np.int64)}
  fitting = np.array([5, 5, 1])
  assert as_lists(file_order_batches(fitting, config(long_documents='error'))) == [[5, 5], [1]]


TOO_LONG = (
  'DataConfig.max_document_tokens = 5: less than the longest document, of 15 tokens; raise it, or set '
  "DataConfig.long_documents to 'split', 'truncate' or 'drop'"
)
ALL_DROPPED = (
  "DataConfig.long_documents = 'drop': leaves nothing, as the shortest document has 6 tokens; raise "
  "DataConfig.max_document_tokens = 5, or set this to 'split' or 'truncate'"
)


def test_long_documents_that_are_mistakes():
  simulator = SimulatorConfig()
  array, histogram = (
    np.array([6, 15]),
    Histogram(*np.array([[1, 5, 0], [6, 7, 2], [10, 15, 1], [9, 99, 0]]).T),
  )
  for lengths in (array, histogram):
    assert message_of(length_batches, lengths, config(long_documents='error'), simulator) == TOO_LONG
    assert message_of(length_batches, lengths, config(long_documents='drop'), simulator) == ALL_DROPPED
  assert message_of(file_order_batches, array, config(long_documents='error')) == TOO_LONG
  assert message_of(file_order_batches, array, config(long_documents='drop')) == ALL_DROPPED


def test_long_documents_that_the_tail_makes():
  grow, shrink = (SimulatorConfig(tail_from_tokens=4, tail_scale=scale) for scale in (2.0, 0.25))
  for lengths in (np.array([3, 4, 5]), Histogram(*np.array([[3, 5, 1]]).T)):
    message = message_of(length_batches, lengths, config(long_documents='error'), grow)
    assert 'the longest document, of 10 tokens' in message
    next(length_batches(lengths, config(max_document_tokens=3, long_documents='error'), shrink))
    kept = next(length_batches(lengths, config(long_documents='drop'), grow))
    assert set(kept.tolist()) == {3}
  lengths = Histogram(*np.array([[4, 9, 1]]).T)
  assert 'the shortest document has 8' in message_of(
    length_batches, lengths, config(long_documents='drop'), grow
  )
  # A tail that shrinks: the longest may be just below it, the shortest at its start.
  shrink = SimulatorConfig(tail_from_tokens=150, tail_scale=0.1)
  lengths = Histogram(*np.array([[100, 900, 1]]).T)
  message = message_of(length_batches, lengths, config(100, 100, 'error'), shrink)
  assert 'the longest document, of 149 tokens' in message
  assert set(next(length_batches(lengths, config(15, 15, 'drop'), shrink)).tolist()) == {15}
  for scale in (1e12, 1e308):
    simulator = SimulatorConfig(tail_from_tokens=4, tail_scale=scale)
    for lengths in (np.array([3, 400]), Histogram(*np.array([[3, 400, 1]]).T)):
      message = message_of(length_batches, lengths, config(), simulator)
      assert message.startswith(f'SimulatorConfig.tail_scale = {scale}: makes 400 tokens ')
      assert message.endswith('more than the 1099511627776 that a length may have; lower it')


def test_tail():
  data = config(batch_tokens=1000, max_document_tokens=100, long_documents='error')

  def scaled(lengths, **tail):
    flat = np.concatenate(as_lists(length_batches(np.array(lengths), data, SimulatorConfig(**tail)), 40))
    return sorted(set(flat.tolist()))

  assert scaled([7, 9, 10, 31], tail_from_tokens=10, tail_scale=1.25) == [7, 9, 12, 39]
  assert scaled([1, 2, 30], tail_from_tokens=1, tail_scale=0.1) == [1, 3]
  assert scaled([7, 10], tail_from_tokens=0, tail_scale=9.0) == [7, 10]
  assert scaled([7, 10], tail_from_tokens=10**30, tail_scale=9.0) == [7, 10]


def slow_batches(lengths, data):
  """What the batches of lengths in this order should be, sample by sample."""
  batches = [[]]
  for length in lengths:
    pieces = [length]
    if length > data.max_document_tokens:
      limit = data.max_document_tokens
      pieces = {
        'split': [limit] * (length // limit) + [length % limit] * (length % limit > 0),
        'truncate': [limit],
        'drop': [],
      }[data.long_documents]
    for piece in pieces:
      if sum(batches[-1]) + piece > data.batch_tokens:
        batches.append([])
      batches[-1].append(piece)
  return [batch for batch in batches if batch]


@pytest.mark.parametrize('chunk_samples', [1, 7, 1 << 14])
@pytest.mark.parametrize('policy', POLICIES)
def test_batches_equal_a_slow_loop(policy, chunk_samples, monkeypatch):
  monkeypatch.setattr(lengths_module, '_CHUNK_SAMPLES', chunk_samples)
  rng = np.random.default_rng(5)
  for _ in range(40):
    limit = int(rng.integers(1, 30))
    data = config(int(rng.integers(limit, 200)), limit, policy)
    lengths = np.append(rng.integers(1, 60, size=rng.integers(0, 60)), 1)
    assert as_lists(file_order_batches(lengths, data)) == slow_batches(lengths.tolist(), data)


@pytest.mark.parametrize('chunk_samples', [3, 40, 1 << 14])
@pytest.mark.parametrize('policy', POLICIES)
def test_epochs(policy, chunk_samples, monkeypatch):
  """Each epoch holds each length once, in an order of its own, and batches run on over its end."""
  monkeypatch.setattr(lengths_module, '_CHUNK_SAMPLES', chunk_samples)
  data = config(50, 10, policy)
  lengths = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 26, 31])  # a piece below 10 is a document's last
  batches = as_lists(length_batches(lengths, data, SimulatorConfig(seed=3)), 40)
  documents, tokens = [], 0
  for piece in itertools.chain.from_iterable(batches):
    tokens += piece
    if piece < 10 or policy == 'truncate':
      documents.append(tokens)
      tokens = 0
  assert slow_batches(itertools.chain.from_iterable(batches), data) == batches
  expected = {
    'split': lengths.tolist(),
    'truncate': np.minimum(lengths, 10).tolist(),
    'drop': lengths[:9].tolist(),
  }[policy]
  epochs = [documents[i : i + len(expected)] for i in range(0, len(documents), len(expected))][:-1]
  assert len(epochs) >= 9
  assert all(sorted(epoch) == expected for epoch in epochs)
  assert len(set(map(tuple, epochs))) == len(epochs)


def flat(lengths, data, seed, count):
  pieces = itertools.chain.from_iterable(length_batches(lengths, data, SimulatorConfig(seed=seed)))
  return [int(piece) for piece in itertools.islice(pieces, count)]


@pytest.mark.parametrize('chunk_samples', [3, 1 << 14])
@pytest.mark.parametrize('policy', POLICIES)
def test_long_samples_come_together_within_windows(policy, chunk_samples, monkeypatch):
  monkeypatch.setattr(lengths_module, '_CHUNK_SAMPLES', chunk_samples)
  lengths = np.append(np.random.default_rng(4).integers(1, 60, 101), 20)
  data = config(150, 50, policy)
  kept = np.concatenate(list(file_order_batches(lengths, data)))
  epoch = len(kept)
  ungrouped = flat(lengths, data, 3, 4 * epoch)
  for threshold, window_batches in ((40, 4), (40, 1), (50, 10**30), (1, 4)):
    grouped = dataclasses.replace(data, group_long_documents=threshold, group_window_batches=window_batches)
    window = window_samples(grouped, epoch, int(kept.sum()))
    order = flat(lengths, grouped, 3, 4 * epoch)
    check_grouped(order, ungrouped, threshold.__le__, window, epoch)
    assert sorted(order[:epoch]) == sorted(kept.tolist())
    assert (order == ungrouped) is (not kept.max() >= threshold > kept.min())


def test_long_draws_come_together_within_windows():
  histogram = Histogram(*np.array([[10, 10, 1], [11, 11, 1]]).T)
  data = config(205, 11)
  grouped = dataclasses.replace(data, group_long_documents=11)
  window = 8 * 205 * 2 // 21  # far enough from a whole number for the mean of draws to tell
  for seed in (0, 1):
    found, ungrouped = (flat(histogram, each, seed, 300 * window) for each in (grouped, data))
    places = check_grouped(found, ungrouped, lambda length: length == 11, window, window)
    assert len(set(places)) > 10


def test_batches_over_many_chunks():
  data = config(200_001, 2, 'split')
  for lengths in (np.array([1]), np.ones(70_000, int), Histogram(*np.array([[1, 1, 5]]).T)):
    batches = length_batches(lengths, data, SimulatorConfig())
    assert [len(next(batches)) for _ in range(3)] == [200_001] * 3
  assert len(next(length_batches(np.array([2**40]), data, SimulatorConfig()))) == 100_000
  huge = config(MOST_BATCH_TOKENS, MOST_BATCH_TOKENS, 'truncate')
  lengths = [MOST_BATCH_TOKENS - 1, 1]
  assert as_lists(file_order_batches(np.array(lengths), huge)) == [lengths]


GOLDEN = {
  'array': [[2, 10, 1, 8], [10, 10, 4, 5], [6, 9, 1, 3, 10]],
  'histogram': [[7, 10, 10], [8, 10, 5], [8, 5, 5, 10]],
}


def test_determinism():
  data = config(30, 10)
  histogram = Histogram(*np.array([[1, 5, 3], [6, 30, 4]]).T)
  golden = {}
  for name, lengths in {'array': np.arange(1, 15), 'histogram': histogram}.items():
    first, again, other = (
      as_lists(length_batches(lengths, data, SimulatorConfig(seed=seed)), 50) for seed in (1, 1, 2)
    )
    assert first == again and first != other
    golden[name] = first[:3]
  # A change of these is a change of every simulated result.
  assert golden == GOLDEN


def test_seeds_give_batches_of_their_own():
  seeds = [0, 14375, 53572, 2**32, 2**63, 2**64, 2**127]
  for lengths in (np.arange(1, 101), Histogram(*np.array([[1, 100, 1]]).T)):
    batches = [
      as_lists(length_batches(lengths, config(100, 100), SimulatorConfig(seed=seed)), 5) for seed in seeds
    ]
    assert len({str(batch) for batch in batches}) == len(seeds)


@pytest.mark.parametrize('policy', POLICIES)
def test_documents_and_their_lengths_make_the_same_samples(policy):
  lengths = np.random.default_rng(2).integers(1, 60, 300)
  data = config(40, 20, policy)
  index = index_samples(ListSource(b'x' * n for n in lengths), data)
  assert np.concatenate(list(file_order_batches(lengths, data))).tolist() == index.length.tolist()


def test_the_arguments_and_the_batches_share_no_memory():
  lengths = np.array([1, 2, 3])
  for batches in (
    file_order_batches(lengths, config()),
    length_batches(lengths, config(), SimulatorConfig()),
  ):
    next(batches)[:] = 99
  assert lengths.tolist() == [1, 2, 3]


def mean_tokens(low, high):
  """Mean of a log-uniform length, [B]."""
  return np.where(low == high, low, (high - low) / np.log(np.where(low == high, 2, high / low)))


def test_draws():
  histogram = Histogram(*np.array([[7, 7, 10], [50, 60, 0], [100, 10_000, 60], [20_000, 30_000, 30]]).T)
  lengths = histogram.draw(np.random.default_rng(0), 200_000)
  assert lengths.dtype == np.int64 and lengths.shape == (200_000,)
  inside = (lengths[:, None] >= histogram.low) & (lengths[:, None] <= histogram.high)
  assert inside.any(axis=1).all()
  np.testing.assert_allclose(inside.mean(axis=0), [0.1, 0, 0.6, 0.3], atol=0.005)
  for low, high in ((100, 10_000), (20_000, 30_000)):
    drawn = lengths[(lengths >= low) & (lengths <= high)]
    np.testing.assert_allclose(drawn.mean(), mean_tokens(np.array(low), np.array(high)), rtol=0.01)
    # Log-uniform: half of them lie below the geometric mean.
    np.testing.assert_allclose((drawn < np.sqrt(low * high)).mean(), 0.5, atol=0.005)
  assert len(histogram.draw(np.random.default_rng(0), 0)) == 0
  edges = Histogram(*np.array([[3, 4, 1]]).T).draw(np.random.default_rng(0), 100)
  assert set(edges.tolist()) == {3, 4}


# Documents, mean tokens, and the shares of documents and tokens above 4K, 32K and 128K tokens.
SHARES = {
  'wikipedia.csv': (
    1_000_000,
    1018,
    ((4096, 0.0439, 0.430), (32768, 0.0013, 0.076), (131072, 0.00005, 0.011)),
  ),
  'web_documents.csv': (
    13_463_214,
    1717,
    ((4096, 0.0563, 0.57), (32768, 0.0044, 0.26), (131072, 0.0014, 0.13)),
  ),
}


@pytest.mark.parametrize('name', SHARES)
def test_shipped_histograms(name):
  documents, mean, shares = SHARES[name]
  histogram = read_lengths(SHIPPED / name)
  low, high, count = histogram.low, histogram.high, histogram.count
  assert count.sum() == documents
  assert (low[1:] > high[:-1]).all()
  tokens = count * mean_tokens(low, high)
  np.testing.assert_allclose(tokens.sum() / count.sum(), mean, rtol=0.001)
  for limit, *expected in shares:
    assert not ((low <= limit) & (high > limit)).any()  # a bin ends there, so these are what draws give
    above = low > limit
    actual = (count[above].sum() / count.sum(), tokens[above].sum() / tokens.sum())
    np.testing.assert_allclose(actual, expected, rtol=0.035)  # the README gives two digits
  lengths = histogram.draw(np.random.default_rng(0), 500_000)
  limit, *expected = shares[0]
  is_long = lengths > limit
  np.testing.assert_allclose((is_long.mean(), lengths[is_long].sum() / lengths.sum()), expected, rtol=0.03)


def test_the_readme_names_the_shipped_files():
  readme = (SHIPPED / 'README.md').read_text()
  names = {path.name for path in SHIPPED.iterdir()} - {'README.md'}
  assert names == set(SHARES) and all(f'`{name}`' in readme for name in names)
  for name in names:
    documents, mean, _ = SHARES[name]
    assert f'{documents:,}' in readme and f'{mean:,}' in readme
