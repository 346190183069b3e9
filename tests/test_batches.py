"""Documents to an index of samples, samples to batches, and resuming."""

import collections
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from documents import ListSource, batches, check_grouped, config, ids, names, random_source, samples
from messages import message_of

from repack_jax.checks import ConfigError
from repack_jax.config import DataConfig, SimulatorConfig, TrainConfig
from repack_jax.data import index as index_module
from repack_jax.data.batches import _FIRST_AMBIGUOUS_SEED, Batcher, _shuffle_seeds
from repack_jax.data.index import index_samples
from repack_jax.data.prefetch import Prefetcher
from repack_jax.data.samples import NO_TARGET, make_sample

# --- documents to samples ---


def test_targets_are_those_of_the_whole_document():
  def made(n, **changes):
    found = samples(n, config(**changes), ListSource([range(1, 9)]))
    return [(s.offset, s.tokens.tolist(), s.targets.tolist()) for s in sorted(found, key=lambda s: s.offset)]

  assert made(1) == [(0, [1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8, NO_TARGET])]
  assert made(2, max_document_tokens=4) == [
    (0, [1, 2, 3, 4], [2, 3, 4, 5]), (4, [5, 6, 7, 8], [6, 7, 8, NO_TARGET])
  ]  # fmt: skip
  assert made(3, max_document_tokens=3) == [
    (0, [1, 2, 3], [2, 3, 4]), (3, [4, 5, 6], [5, 6, 7]), (6, [7, 8], [8, NO_TARGET])
  ]  # fmt: skip
  assert made(1, max_document_tokens=4, long_documents='truncate') == [(0, [1, 2, 3, 4], [2, 3, 4, 5])]


def test_one_token_document_has_no_target():
  sample = make_sample(0, 0, 1, np.array([97], np.int32))
  assert (sample.tokens.tolist(), sample.targets.tolist()) == ([97], [NO_TARGET])
  assert sample.tokens.dtype == sample.targets.dtype == np.int32
  assert not sample.tokens.flags.writeable and not sample.targets.flags.writeable


@pytest.mark.parametrize(
  ('policy', 'expected', 'counts'),
  [
    ('split', [(0, 0, 3), (1, 0, 64), (1, 64, 64), (1, 128, 2)], {'split_documents': 1, 'epoch_tokens': 133}),
    ('truncate', [(0, 0, 3), (1, 0, 64)], {'truncated_documents': 1, 'epoch_tokens': 67, 'lost_tokens': 66}),
    ('drop', [(0, 0, 3)],
     {'dropped_documents': 1, 'used_documents': 1, 'epoch_tokens': 3, 'lost_tokens': 130}),
  ],
)  # fmt: skip
def test_long_document_policies(policy, expected, counts):
  """The input of a fault seen elsewhere: lengths 3 and 130 with a limit of 64; and an empty document."""
  source = ListSource([b'abc', b'x' * 130, b''])
  data_config = config(long_documents=policy, batch_tokens=64)
  index = index_samples(source, data_config)
  rows = (index.document, index.offset, index.length)
  assert list(zip(*(row.tolist() for row in rows), strict=True)) == expected
  assert index.document_tokens.tolist() == index.document_bytes.tolist() == [3, 130, 0]
  assert index.counts == {
    'documents': 3, 'used_documents': 2, 'split_documents': 0, 'truncated_documents': 0,
    'dropped_documents': 0, 'empty_documents': 1, 'samples': len(expected), 'lost_tokens': 0,
  } | counts  # fmt: skip
  assert all(type(value) is int for value in index.counts.values())
  assert sorted(names(samples(len(expected), data_config, source))) == expected


def test_lengths_around_the_limit():
  index = index_samples(ListSource([b'x' * n for n in (63, 64, 65, 128, 129, 1)]), config())
  assert index.document.tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 4, 5]
  assert index.offset.tolist() == [0, 0, 0, 64, 0, 64, 0, 64, 128, 0]
  assert index.length.tolist() == [63, 64, 64, 1, 64, 64, 64, 64, 1, 1]


def test_error_policy_names_the_longest_document():
  source = ListSource([b'abc', b'x' * 65, b'x' * 130])
  message = message_of(Batcher, config(long_documents='error'), source)
  assert message.startswith(
    'document 2: 130 tokens, more than DataConfig.max_document_tokens = 64, and the longest of 2 such '
    'documents; raise that, or set'
  )
  fits = config(long_documents='error', max_document_tokens=130)
  assert len(index_samples(source, fits)) == 3


def test_no_usable_document_is_an_error_and_not_an_endless_loop():
  message = message_of(Batcher, config(long_documents='drop'), ListSource([b'', b'x' * 65, b'']))
  assert 'none of its 3 documents can be used' in message and "'split'" in message


def test_describe():
  index = index_samples(ListSource([b'x' * n for n in (0, 5, 70, 10, 100)]), config())
  assert index.describe() == index.counts | {
    'total_tokens': 185, 'min_tokens': 0, 'median_tokens': 10, 'p99_tokens': 100, 'max_tokens': 100,
  }  # fmt: skip
  assert all(type(value) is int for value in index.describe().values())


# --- batches ---


def test_each_epoch_has_an_order_of_its_own():
  source = ListSource([b'a'] * 20 + [b'a' * (20 * 64)])
  found = names(samples(120, config(), source))
  epochs = [found[:40], found[40:80], found[80:]]
  assert all(set(epoch) == set(epochs[0]) and len(set(epoch)) == 40 for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
  assert names(samples(40, config(seed=1), source)) not in epochs
  samples(1, config(seed=2**70), source)


def orders(seeds):
  source = ListSource([b'a'] * 200)
  return [[sample.document for sample in samples(400, config(seed=seed), source)] for seed in seeds]


def test_seeds_give_orders_of_their_own():
  """The inputs of a fault seen elsewhere, and two seeds that share a word of 32 bits."""
  seeds = [0, 1, 14375, 53572, 2**32, 2**32 + 1, 2**63, 2**64, 2**96 + 1, 2**127, 2**128 - 1]
  assert len({tuple(order) for order in orders(seeds)}) == len(seeds)


def test_seeds_of_the_shuffles_are_distinct():
  words = [tuple(_shuffle_seeds(seed)) for seed in range(_FIRST_AMBIGUOUS_SEED)]
  assert len(set(words)) == _FIRST_AMBIGUOUS_SEED and set(map(len, words)) == {1}
  first_word = np.random.SeedSequence(_FIRST_AMBIGUOUS_SEED).generate_state(1).tolist()
  assert tuple(first_word) == words[14375]
  rng = np.random.default_rng(0)
  near = [int(n) + (int(high) << int(bits)) for n, high, bits in rng.integers(0, 97, (20_000, 3))]
  seeds = {seed for seed in near if seed < 2**128}
  assert len({tuple(_shuffle_seeds(seed)) for seed in seeds}) == len(seeds) > 10_000


def test_seeds_beyond_what_gives_an_order_of_its_own():
  for made, bits in ((DataConfig, 128), (SimulatorConfig, 128), (TrainConfig, 32)):
    name = f'{made.__name__}.seed'
    message = message_of(functools.partial(made, seed=2**bits))
    assert message.startswith(f'{name} = {2**bits}: must be below 2 ** {bits}, since larger seeds may repeat')
    assert message_of(functools.partial(made, seed=-1)) == f'{name} = -1: must be at least 0'
    assert made(seed=2**bits - 1).seed == 2**bits - 1


def test_pieces_of_a_document_are_spread_over_the_epoch():
  """A long document once filled as many batches in a row as it had pieces."""
  source = ListSource([b'x' * (64 * 100)] + [b'y' * 64] * 900)
  first = samples(1000, config(batch_tokens=64 * 10), source)
  places = np.flatnonzero([sample.document == 0 for sample in first])
  assert len(places) == 100
  assert max(collections.Counter(places // 100).values()) <= 25 and min(np.bincount(places // 100)) >= 2
  assert [first[place].offset for place in places] != [64 * i for i in range(100)]


def test_batches_fill_up_in_order_and_run_over_the_end_of_an_epoch():
  source = ListSource([b'a' * n for n in (60, 50, 40, 30, 20, 10)])
  many = batches(40, config(), source)
  assert [batch.index for batch in many] == list(range(40))
  for batch, following in itertools.pairwise(many):
    assert batch.num_tokens <= 150 < batch.num_tokens + len(following.samples[0])
  documents = [sample.document for batch in many for sample in batch.samples]
  position = tokens = 0
  for batch in many:
    assert batch.epoch == position // 6
    position, tokens = position + len(batch.samples), tokens + batch.num_tokens
    assert (batch.state_after['position'], batch.state_after['tokens']) == (position, tokens)
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
  source = ListSource([b'a'] * 5 + [b'b' * 9] * 5)
  grouped = config(seed=7, batch_tokens=64, group_long_documents=9)
  assert [sample.document for sample in samples(20, grouped, source)] == [
    3, 2, 1, 0, 8, 9, 5, 7, 6, 4, 2, 0, 4, 3, 1, 5, 8, 7, 9, 6
  ]  # fmt: skip


def test_long_samples_come_together_within_windows():
  source = random_source()
  index = index_samples(source, config())
  epoch, tokens = len(index), index.counts['epoch_tokens']
  ungrouped = names(samples(3 * epoch, config(), source))
  for threshold, window_batches in ((40, 1), (40, 3), (64, 3), (64, 10**30), (1, 3)):
    grouped = config(group_long_documents=threshold, group_window_batches=window_batches)
    window = Batcher(grouped, source).state()['group_window_samples']
    assert window == min(epoch, window_batches * 150 * epoch // tokens)
    order = names(samples(3 * epoch, grouped, source))
    places = check_grouped(order, ungrouped, lambda name, limit=threshold: name[2] >= limit, window, epoch)
    if threshold == 1:
      assert order == ungrouped
    else:
      assert len(set(places)) > 1


def test_no_sample_is_long():
  source = random_source()
  whole = {'batch_tokens': 200, 'max_document_tokens': 200}
  grouped, ungrouped = config(**whole, group_long_documents=200), config(**whole)
  assert ids(batches(20, grouped, source)) == ids(batches(20, ungrouped, source))


def test_fewer_batches_hold_a_long_sample():
  source = ListSource([b'a' * 10] * 500 + [b'b' * 60] * 20)

  def with_long(**changes):
    many = batches(100, config(**changes), source)
    return sum(any(len(sample) == 60 for sample in batch.samples) for batch in many)

  assert with_long(group_long_documents=60) < 0.7 * with_long()


def test_groupings_that_are_mistakes():
  assert message_of(functools.partial(config, group_long_documents=65)) == (
    'DataConfig.group_long_documents = 65: no sample is longer than max_document_tokens = 64; lower it, or '
    'set 0 to group none'
  )
  for name, value, remedy in (
    ('group_long_documents', -1, 'must be at least 0'),
    ('group_window_batches', 0, 'must be at least 1'),
    ('group_window_batches', 1.5, 'must be of type int'),
  ):
    message = message_of(functools.partial(config, **{name: value}))
    assert message == f'DataConfig.{name} = {value}: {remedy}'


@pytest.mark.parametrize('change', [b'', b'a' * 129, b'a' * 131])
def test_document_that_changes_after_indexing(change):
  source = ListSource([b'abc', b'x' * 130])
  batcher = Batcher(config(batch_tokens=64), source)
  source.documents[1].content = change
  with pytest.raises(ConfigError, match=r'document 1: changed while the run was on; restore it and resume'):
    for _ in range(4):
      next(batcher)
  state = batcher.state()  # of the batches before
  source.documents[1].content = b'x' * 130
  assert ids([next(batcher)]) == ids(batches(1, config(batch_tokens=64), source, state))


# --- resume ---


GROUPED = {'group_long_documents': 40, 'group_window_batches': 3}


@pytest.mark.parametrize(
  'changes',
  [{'long_documents': 'split'}, {'long_documents': 'truncate'}, {'long_documents': 'drop'}, GROUPED],
  ids=str,
)
def test_resume_after_every_batch(changes):
  source, data_config = random_source(), config(**changes)
  straight = batches(60, data_config, source)
  for batch, following in itertools.pairwise(straight):
    # A checkpoint is JSON, so the state goes through it.
    state = json.loads(json.dumps(batch.state_after))
    (resumed,) = batches(1, data_config, source, state)
    assert ids([resumed]) == ids([following])
    assert resumed.index == following.index and resumed.epoch == following.epoch
    assert resumed.state_after == following.state_after
  assert straight[-1].epoch >= 1


@pytest.mark.parametrize('changes', [{}, {'group_long_documents': 64}], ids=str)
def test_resume_twice_between_the_pieces_of_a_document(changes):
  source = ListSource([b'ab', bytes(range(200)) * 5, b'cd'])
  data_config = config(batch_tokens=64, **changes)
  straight = batches(40, data_config, source)
  first = batches(4, data_config, source)
  assert 0 < first[-1].state_after['position'] < len(index_samples(source, data_config))
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


def test_batches_through_prefetch_resume_where_the_consumer_stopped():
  source = random_source()
  straight = batches(12, config(), source)
  with Prefetcher(Batcher(config(), source), lookahead=5) as prefetched:
    consumed = [next(prefetched)[0] for _ in range(6)]
  assert ids(consumed + batches(6, config(), source, consumed[-1].state_after)) == ids(straight)


@pytest.mark.parametrize(
  ('changes', 'documents'),
  [
    ({}, [b'a' * 65, b'a' * 100, b'a']),  # one more
    ({}, [b'a' * 64, b'a' * 101]),  # as many samples and tokens
    ({'max_document_tokens': 60}, None),  # likewise
    ({'max_document_tokens': 100}, None),
    ({'long_documents': 'truncate'}, None),
    ({'long_documents': 'drop', 'max_document_tokens': 70}, None),
  ],
)
def test_states_of_other_samples(changes, documents):
  state = batches(1, config(), ListSource([b'a' * 65, b'a' * 100]))[0].state_after
  source = ListSource(documents or [b'a' * 65, b'a' * 100])
  message = message_of(Batcher, config(**changes), source, state)
  assert message.startswith("DataConfig.source = 'stdlib': its samples (")
  assert '(4 of 165 tokens in all, checksum ' in message and message.endswith('or start a new run')


def test_states_that_do_not_fit():
  source = ListSource([b'a'] * 5)
  state = batches(1, config(), source)[0].state_after
  message = message_of(Batcher, config(seed=1), source, state)
  assert message.startswith('DataConfig.seed = 1: the run to resume had 0')
  for broken in ({}, {'position': -1}, {'tokens': 1.5}, {'more': 1}, {'tokenizer': 3}, {'seed': '0'}):
    broken = broken and state | broken
    assert 'it is of another version or damaged' in message_of(Batcher, config(), source, broken)
  without = {name: value for name, value in state.items() if name != 'tokenizer'}
  assert 'must map tokenizer to a name and position, ' in message_of(Batcher, config(), source, without)


def test_states_of_another_grouping():
  source = random_source()

  def state(**changes):
    return batches(1, config(**changes), source)[0].state_after

  grouped, ungrouped = state(**GROUPED), state(group_window_batches=3)
  for changes, resumed, (mine, other) in (
    (GROUPED, ungrouped, (40, 0)),
    ({}, grouped, (0, 40)),
    (GROUPED | {'group_long_documents': 41}, grouped, (41, 40)),
  ):
    assert message_of(Batcher, config(**changes), source, resumed) == (
      f'DataConfig.group_long_documents = {mine}: the run to resume had {other}, and the order of its '
      'samples depends on it; set what it had, or start a new run'
    )
  had = f'; the run to resume had {grouped["group_window_samples"]}, and the order'
  for changes in ({'group_window_batches': 4}, {'batch_tokens': 200}):
    message = message_of(Batcher, config(**GROUPED | changes), source, grouped)
    assert message.startswith('DataConfig.group_window_batches = ') and had in message
  # Where nothing is grouped, neither length matters.
  changes = {'group_window_batches': 5, 'batch_tokens': 200}
  assert Batcher(config(**changes), source, ungrouped).state() == ungrouped


def test_imports_without_jax():
  modules = 'batches, grouping, index, jsonl, lengths, long_documents, prefetch, samples, sources'
  code = (
    f"import sys; sys.modules['jax'] = None; from repack_jax.data import {modules};"
    'from repack_jax.documents import documents, tokenizers;'
    'from repack_jax.config import DataConfig as C; index.index_samples(sources.open_source(C()), C())'
  )
  root = Path(index_module.__file__).parents[2]
  subprocess.run([sys.executable, '-c', code], check=True, env=os.environ | {'PYTHONPATH': str(root)})
