"""Documents to samples to batches, resuming, and the messages for data that cannot be used."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from repack_jax.config import ConfigError, DataConfig
from repack_jax.data import samples as samples_module
from repack_jax.data.batches import Batcher
from repack_jax.data.prefetch import Prefetcher
from repack_jax.data.samples import NO_TARGET, cut_document, tokenize_bytes
from repack_jax.data.sources import Source, describe, open_source


class ListSource(Source):
  """Documents from memory."""

  def __init__(self, documents):
    self._documents = [bytes(document) for document in documents]

  def __len__(self):
    return len(self._documents)

  def __getitem__(self, index):
    return self._documents[index]

  def name(self, index):
    return f'document {index}'

  def size_bytes(self, index):
    return len(self._documents[index])


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
  """At least the first n samples."""
  found = (sample for batch in Batcher(data_config, source, state) for sample in batch.samples)
  return list(itertools.islice(found, n))


def ids(many):
  return [[(sample.document, sample.offset, len(sample)) for sample in batch.samples] for batch in many]


def message_of(function, *arguments):
  with pytest.raises(ConfigError) as caught:
    function(*arguments)
  message = str(caught.value)
  assert '\n' not in message
  return message


# --- documents to samples ---


def test_targets_are_shifted_before_splitting():
  tokens = np.arange(1, 9, dtype=np.int32)
  (whole,) = cut_document(3, tokens, config(), 'a')
  assert whole.targets.tolist() == [2, 3, 4, 5, 6, 7, 8, NO_TARGET]
  first, second = cut_document(3, tokens, config(max_document_tokens=4), 'a')
  assert (first.document, first.offset, first.tokens.tolist()) == (3, 0, [1, 2, 3, 4])
  assert first.targets.tolist() == [2, 3, 4, 5]
  assert (second.document, second.offset, second.tokens.tolist()) == (3, 4, [5, 6, 7, 8])
  assert second.targets.tolist() == [6, 7, 8, NO_TARGET]
  (kept,) = cut_document(3, tokens, config(max_document_tokens=4, long_documents='truncate'), 'a')
  assert kept.targets.tolist() == [2, 3, 4, 5]
  assert whole.tokens.dtype == whole.targets.dtype == np.int32


def test_one_token_document_has_no_target():
  (sample,) = cut_document(0, tokenize_bytes(b'a'), config(), 'a')
  assert (sample.tokens.tolist(), sample.targets.tolist()) == ([97], [NO_TARGET])


def test_tokens_are_bytes():
  tokens = tokenize_bytes(bytes(range(256)))
  assert tokens.dtype == np.int32 and tokens.tolist() == list(range(256))


@pytest.mark.parametrize(
  ('policy', 'lengths', 'counts'),
  [
    ('split', [2, 3, 64, 64], {'split': 1, 'documents': 2, 'samples': 4, 'tokens': 133, 'lost_tokens': 0}),
    ('truncate', [3, 64], {'truncated': 1, 'documents': 2, 'samples': 2, 'tokens': 67, 'lost_tokens': 66}),
    ('drop', [3], {'dropped': 1, 'documents': 1, 'samples': 1, 'tokens': 3, 'lost_tokens': 130}),
  ],
)
@pytest.mark.parametrize('seed', [0, 1])
def test_long_document_policies(policy, lengths, counts, seed):
  """The input of a fault seen elsewhere: lengths 3 and 130 with a limit of 64; and an empty document."""
  source = ListSource([b'abc', b'x' * 130, b''])
  data_config = config(long_documents=policy, batch_tokens=64, seed=seed)
  assert sorted(map(len, samples(len(lengths), data_config, source))) == lengths
  batcher = Batcher(data_config, source)
  states = (batch.state_after for batch in itertools.islice(batcher, 200))
  state = next(state for state in states if state['position'] % len(source) == 0)  # an epoch's end
  epochs = state['position'] // len(source)
  expected = dict.fromkeys(('split', 'truncated', 'dropped'), 0) | counts | {'empty': 1}
  assert {name: state[name] / epochs for name in expected} == expected


def test_error_policy_names_the_document():
  source = ListSource([b'abc', b'x' * 130])
  message = message_of(samples, 2, config(long_documents='error'), source)
  assert message.startswith(
    'document 1: 130 tokens, more than DataConfig.max_document_tokens = 64; raise that'
  )


def test_no_usable_document_is_an_error_and_not_an_endless_loop():
  message = message_of(samples, 1, config(long_documents='drop'), ListSource([b'', b'x' * 65, b'']))
  assert 'none of its 3 documents can be used' in message and "'split'" in message


# --- batches ---


@pytest.mark.parametrize('policy', ['split', 'truncate', 'drop'])
@pytest.mark.parametrize('seed', [0, 1])
def test_every_token_once_an_epoch(policy, seed):
  source, epochs = random_source(seed), 3
  seen = [np.zeros(source.size_bytes(i), int) for i in range(len(source))]
  batcher = Batcher(config(long_documents=policy, seed=seed), source)
  while batcher.state()['position'] < epochs * len(source):
    batch = next(batcher)
    assert 0 < batch.num_tokens <= 150
    for sample in batch.samples:
      document = tokenize_bytes(source[sample.document])
      span = slice(sample.offset, sample.offset + len(sample))
      np.testing.assert_array_equal(sample.tokens, document[span])
      np.testing.assert_array_equal(sample.targets, np.append(document[1:], NO_TARGET)[span])
      seen[sample.document][span] += 1
  state = batcher.state()
  # The last batch may have begun the next epoch, so a few tokens are one ahead.
  extra = sum((counts > epochs).sum() for counts in seen)
  assert extra < 150
  for counts in seen:
    limit = len(counts) if policy == 'split' else min(len(counts), 64)
    if policy == 'drop' and len(counts) > 64:
      limit = 0
    assert set(counts[:limit]) <= {epochs, epochs + 1} and not counts[limit:].any()
  assert sum(counts.sum() for counts in seen) == state['tokens']


def test_each_epoch_has_an_order_of_its_own():
  source = ListSource([b'a'] * 40)
  order = [sample.document for sample in samples(120, config(), source)]
  epochs = [order[:40], order[40:80], order[80:]]
  assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
  other = [sample.document for sample in samples(40, config(seed=1), source)]
  assert other not in epochs
  samples(1, config(seed=2**70), source)


def test_batches_fill_up_in_order_and_run_over_the_end_of_an_epoch():
  source = ListSource([b'a' * n for n in (60, 50, 40, 30, 20, 10)])
  many = batches(40, config(), source)
  assert [batch.index for batch in many] == list(range(40))
  for batch, following in itertools.pairwise(many):
    assert batch.num_tokens <= 150 < batch.num_tokens + len(following.samples[0])
  documents = [sample.document for batch in many for sample in batch.samples]
  position = 0
  for batch in many:
    assert batch.epoch == position // 6
    position += len(batch.samples)
  for start in range(0, len(documents) - 6, 6):
    assert sorted(documents[start : start + 6]) == list(range(6))


def test_exactly_full_batch():
  assert ids(batches(2, config(batch_tokens=64), ListSource([b'a' * 64]))) == [[(0, 0, 64)]] * 2


def test_batches_are_the_same_every_time():
  one, two = (ids(batches(50, config(seed=3), random_source())) for _ in range(2))
  assert one == two


def test_order_is_pinned():
  """The order of a seed is part of what a checkpoint relies on: a change here breaks resuming."""
  order = [sample.document for sample in samples(10, config(seed=7), ListSource([b'a'] * 5))]
  assert order == [3, 4, 2, 1, 0, 2, 0, 4, 3, 1]


# --- resume ---


@pytest.mark.parametrize('policy', ['split', 'truncate', 'drop'])
def test_resume_after_every_batch(policy):
  source, data_config = random_source(), config(long_documents=policy)
  straight = batches(60, data_config, source)
  offsets = set()
  for batch, following in itertools.pairwise(straight):
    # A checkpoint is JSON, so the state goes through it.
    state = json.loads(json.dumps(batch.state_after))
    (resumed,) = batches(1, data_config, source, state)
    assert ids([resumed]) == ids([following])
    assert resumed.index == following.index and resumed.epoch == following.epoch
    assert resumed.state_after == following.state_after  # the counters too
    offsets.add(state['offset'])
  if policy == 'split':
    assert len(offsets) > 2  # some of the stops were inside a split document
  assert straight[-1].epoch >= 1


def test_resume_twice_inside_a_split_document():
  source = ListSource([b'ab', bytes(range(200)) * 5, b'cd'])
  data_config = config(batch_tokens=64)
  straight = batches(40, data_config, source)
  first = batches(4, data_config, source)
  assert first[-1].state_after['offset'] > 0
  second = batches(5, data_config, source, first[-1].state_after)
  third = batches(31, data_config, source, second[-1].state_after)
  assert ids(first + second + third) == ids(straight)
  assert third[-1].state_after == straight[-1].state_after


def test_state_of_a_batch_is_not_moved_by_running_ahead():
  batcher = Batcher(config(), random_source())
  batch = next(batcher)
  before = dict(batch.state_after)
  assert batcher.state() == before
  next(batcher)
  assert batch.state_after == before and batcher.state()['batches'] == 2


def test_resume_with_another_limit_loses_nothing():
  source = ListSource([bytes(range(200))])
  state = batches(1, config(batch_tokens=64), source)[0].state_after
  resumed = samples(2, config(batch_tokens=100, max_document_tokens=100), source, state)
  assert [(sample.offset, len(sample)) for sample in resumed] == [(64, 100), (164, 36)]
  assert resumed[0].targets.tolist() == list(range(65, 165))


def test_states_that_do_not_fit():
  source = ListSource([b'a'] * 5)
  state = batches(1, config(), source)[0].state_after
  message = message_of(Batcher, config(seed=1), source, state)
  assert message.startswith('DataConfig.seed = 1: the run to resume had 0')
  message = message_of(Batcher, config(), ListSource([b'a'] * 6), state)
  assert message.startswith('documents of DataConfig.source = 6: the run to resume had 5')
  for broken in ({}, state | {'position': -1}, state | {'tokens': 1.5}, state | {'more': 1}):
    assert 'it is of another version or damaged' in message_of(Batcher, config(), source, broken)


# --- sources ---


def test_folder(tmp_path):
  files = {'b.txt': b'bb', 'a/z.txt': b'az', 'a.md': b'm', '.git/x.txt': b'h', 'a/.h.txt': b'h', 'B.txt': b''}
  for name, content in files.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
  os.mkfifo(tmp_path / 'pipe.txt')
  (tmp_path / 'gone.txt').symlink_to(tmp_path / 'nowhere')
  source = open_source(DataConfig(source=str(tmp_path), file_glob='**/*.txt'))
  names = [Path(source.name(i)).relative_to(tmp_path).as_posix() for i in range(len(source))]
  assert names == ['B.txt', 'a/z.txt', 'b.txt']
  assert [source[i] for i in range(3)] == [b'', b'az', b'bb']
  assert len(open_source(DataConfig(source=str(tmp_path)))) == 4
  (tmp_path / 'b.txt').unlink()
  for read in (source.__getitem__, source.size_bytes):
    assert message_of(read, 2).startswith(f'{tmp_path}/b.txt: cannot read it (No such file or directory); ')


def test_folder_mistakes(tmp_path, monkeypatch):
  (tmp_path / 'a.txt').write_text('a')
  source = str(tmp_path)
  message = message_of(open_source, DataConfig(source=source, file_glob='*.md'))
  assert message.startswith(f"{source}: DataConfig.file_glob = '*.md': no file there matches")
  for pattern in ('', '/x/*', '../*', '**x'):
    if pattern != '**x' or sys.version_info < (3, 13):
      message = message_of(open_source, DataConfig(source=source, file_glob=pattern))
      assert message.startswith(f'DataConfig.file_glob = {pattern!r}: ') and 'give a pattern' in message
  monkeypatch.setattr(os, 'access', lambda *_: False)
  message = message_of(open_source, DataConfig(source=source))
  assert message.startswith(f'{source}/a.txt: cannot read it (Permission denied); make it readable')


def test_path_mistakes(tmp_path):
  (tmp_path / 'a.txt').write_text('a')
  (tmp_path / 'empty.jsonl').write_text('\n \r\n')
  for name, expected in {
    'nowhere': 'no such file or folder; set DataConfig.source to a folder, a .jsonl file or',
    'x' * 5000: 'no such file or folder; ',
    'a.txt': 'not a source of documents; set DataConfig.source to',
    'empty.jsonl': 'the file has no lines; ',
  }.items():
    path = str(tmp_path / name)
    assert message_of(open_source, DataConfig(source=path)).startswith(
      f'DataConfig.source = {path!r}: {expected}'
    )


JSONL = {
  'plain': b'{"text": "one"}\n{"text": "two"}\n',
  'no final newline': b'{"text": "one"}\n{"text": "two"}',
  'CRLF': b'{"text": "one"}\r\n{"text": "two"}\r\n',
  'blank lines': b'\n{"text": "one"}\n  \n\r\n{"text": "two"}\n\n',
  'byte order mark': b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n',
  'mark and blank': b'\xef\xbb\xbf\n{"text": "one"}\n{"text": "two"}\n',
}


@pytest.mark.parametrize('content', JSONL.values(), ids=JSONL)
def test_jsonl(content, tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(content)
  source = open_source(DataConfig(source=str(path)))
  assert [source[i] for i in range(len(source))] == [b'one', b'two']
  lines = content.split(b'\n')
  number = next(i for i, line in enumerate(lines, start=1) if b'two' in line)
  assert source.name(1) == f'{path}:{number}'


def test_jsonl_unicode(tmp_path):
  texts = ['\u00e9\u4e2d\U0001f600', 'a\u2028b\u0085c\nd\r\ne', '', 'plain']
  path = tmp_path / 'a.jsonl'
  lines = [json.dumps({'id': 1, 'body': text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
  path.write_text('\n'.join(lines), encoding='utf-8', newline='')
  source = open_source(DataConfig(source=str(path), text_field='body'))
  assert [source[i].decode() for i in range(len(source))] == texts
  assert [source.size_bytes(i) for i in range(4)] == [len(text.encode()) for text in texts]


@pytest.mark.parametrize(
  ('line', 'expected'),
  [
    (b'{"text": "a"', 'not JSON ('),
    (b'[' * 100_000, 'not JSON ('),
    (b'{"text": ' + b'9' * 5000 + b'}', 'not JSON ('),
    (b'{"text": "\xff"}', 'not UTF-8 at byte 10 of the line; save it as UTF-8'),
    (b'["text"]', 'a JSON list, not an object; write {"text": "..."}'),
    (b'{"body": "a", "id": 1}', "no field 'text'; the fields are: 'body', 'id'. Set DataConfig.text_field"),
    (b'{}', "no field 'text'; the fields are: none."),
    (b'{"text": null}', "field 'text' is of type NoneType, not a string; "),
    (b'{"text": "a\\ud800"}', "field 'text' has half a surrogate pair at character 1"),
  ],
)
def test_bad_jsonl_lines(line, expected, tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n')
  source = open_source(DataConfig(source=str(path)))
  assert source[0] == b'fine'
  message = message_of(source.__getitem__, 1)
  assert message.startswith(f'{path}:3: {expected}')
  assert message_of(describe, source, DataConfig()) == message


def test_stdlib():
  data_config = DataConfig()
  source = open_source(data_config)
  names = [source.name(i) for i in range(len(source))]
  parts = [set(Path(name).parts[-3:]) for name in names]
  assert not any(part & {'site-packages', '__pycache__', 'test', 'tests'} for part in parts)
  assert names == [source.name(i) for i in range(len(open_source(data_config)))]
  summary = describe(source, data_config)
  assert summary['documents'] == len(source) > 300
  assert summary['min_bytes'] < 500 and summary['max_bytes'] > 50_000
  assert summary['total_bytes'] > 1_000_000
  index = names.index(next(name for name in names if name.endswith('argparse.py')))
  assert b'ArgumentParser' in source[index] and len(source[index]) == source.size_bytes(index)
  batch = next(Batcher(data_config, source))
  assert batch.num_tokens <= data_config.batch_tokens


def test_describe():
  summary = describe(ListSource([b'x' * n for n in (0, 5, 70, 10, 100)]), config())
  assert summary == {
    'documents': 5, 'empty_documents': 1, 'long_documents': 2, 'total_bytes': 185,
    'min_bytes': 0, 'median_bytes': 10, 'p99_bytes': 100, 'max_bytes': 100,
  }  # fmt: skip
  assert all(type(value) is int for value in summary.values())


# --- prefetch ---


def prefetch_threads():
  return [thread for thread in threading.enumerate() if thread.name == 'prefetch']


def test_prefetch_passes_everything_in_order():
  with Prefetcher(range(100), lookahead=3) as prefetched:
    items = list(prefetched)
    assert list(prefetched) == []  # the end stays the end
  assert [item for item, _ in items] == list(range(100))
  assert all(wait_s >= 0 for _, wait_s in items)
  assert not prefetch_threads()


def test_prefetch_takes_a_function():
  with Prefetcher(iter('abc').__next__, lookahead=1) as prefetched:
    assert [item for item, _ in prefetched] == ['a', 'b', 'c']


@pytest.mark.parametrize('error', [ConfigError('bad'), OSError(5, 'io'), SystemExit(3)])
def test_prefetch_raises_what_the_producer_raised(error):
  def producer():
    yield 1
    raise error

  with pytest.raises(type(error)) as caught, Prefetcher(producer(), lookahead=4) as prefetched:
    for item, _ in prefetched:
      assert item == 1
  assert caught.value is error
  assert not prefetch_threads()


def test_prefetch_raises_where_iteration_cannot_begin():
  with pytest.raises(TypeError), Prefetcher(7, lookahead=1) as prefetched:
    next(prefetched)


def test_prefetch_stays_within_its_lookahead_and_closes_early():
  made, moved = [], threading.Semaphore(0)

  def producer():
    for i in itertools.count():
      made.append(i)
      moved.release()
      yield i

  with Prefetcher(producer(), lookahead=3) as prefetched:
    for _ in range(3):
      assert moved.acquire(timeout=10)
    time.sleep(0.05)
    assert made == [0, 1, 2]
    assert next(prefetched)[0] == 0
    assert moved.acquire(timeout=10)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3]
  assert not prefetch_threads()
  assert list(prefetched) == []


def test_prefetch_closes_when_the_consumer_raises():
  with pytest.raises(KeyError), Prefetcher(itertools.count(), lookahead=2) as prefetched:
    next(prefetched)
    raise KeyError
  assert not prefetch_threads()


def test_prefetch_measures_the_wait():
  finished = threading.Event()

  def producer():
    time.sleep(0.1)
    yield 'slow'
    yield 'ready'
    finished.set()

  with Prefetcher(producer(), lookahead=3) as prefetched:
    _, first_s = next(prefetched)
    assert finished.wait(timeout=10)
    _, second_s = next(prefetched)
  assert first_s > 0.05 > second_s


def test_prefetch_needs_a_lookahead():
  with pytest.raises(ValueError, match='lookahead = 0: must be at least 1'):
    Prefetcher([], 0)


def test_batches_through_prefetch_resume_where_the_consumer_stopped():
  source = random_source()
  straight = batches(12, config(), source)
  with Prefetcher(Batcher(config(), source), lookahead=5) as prefetched:
    consumed = [next(prefetched)[0] for _ in range(6)]
  assert ids(consumed + batches(6, config(), source, consumed[-1].state_after)) == ids(straight)


def test_imports_without_jax():
  code = (
    "import sys; sys.modules['jax'] = None; from repack_jax.data import batches, prefetch, samples, sources;"
    'from repack_jax.config import DataConfig; len(sources.open_source(DataConfig()))'
  )
  root = Path(samples_module.__file__).parents[2]
  subprocess.run([sys.executable, '-c', code], check=True, env=os.environ | {'PYTHONPATH': str(root)})
