"""The byte tokenizer, and that nothing else knows what a token is: tokens of two bytes, and of words."""

import itertools
import json

import numpy as np
import pytest
from documents import ListSource, MemoryDocument, batches, config, ids, random_source, samples
from messages import message_of

from repack_jax.checks import ConfigError
from repack_jax.config import DataConfig, ModelConfig, RunConfig
from repack_jax.data.batches import Batcher
from repack_jax.data.index import index_samples
from repack_jax.data.lengths import read_lengths
from repack_jax.data.samples import NO_TARGET
from repack_jax.data.sources import open_source
from repack_jax.documents.tokenizers import TOKENIZERS, ByteTokenizer, Tokenizer

WORDS = ['a', 'fox', 'and', 'grapes', '\u00e9t\u00e9', '\u4e2d\u6587']


class PairTokenizer(Tokenizer):
  """Two bytes a token; the last byte of an odd number is one of its own."""

  name = 'pairs'
  vocab_size = 256 * 256 + 256

  def count(self, document):
    return -(-document.size_bytes // 2)

  def encode(self, document, start, end):
    content = document.read(2 * start, 2 * end)
    pairs = np.frombuffer(content[: len(content) // 2 * 2], '>u2').astype(np.int32)
    return np.append(pairs, np.int32(256 * 256 + content[-1])) if len(content) % 2 else pairs


class WordTokenizer(Tokenizer):
  """A word of a fixed vocabulary a token."""

  name = 'words'
  vocab_size = len(WORDS)

  def count(self, document):
    return len(self._tokens(document))

  def encode(self, document, start, end):
    return self._tokens(document)[start:end]

  def _tokens(self, document):
    words = document.read().decode().split()
    if unknown := set(words).difference(WORDS):
      raise ConfigError(f'{document.name}: the word {min(unknown)!r} is not in the vocabulary; correct it')
    return np.array([WORDS.index(word) for word in words], np.int32)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
  for tokenizer in (PairTokenizer(), WordTokenizer()):
    monkeypatch.setitem(TOKENIZERS, tokenizer.name, tokenizer)


def word_source(seed=0, documents=23, max_tokens=200):
  """Documents of words of several lengths, blanks between and around them."""
  rng = np.random.default_rng(seed)
  blanks = (' ', '  \n', '\t')
  return ListSource(
    ''.join(
      str(rng.choice(WORDS)) + str(rng.choice(blanks)) for _ in range(rng.integers(0, max_tokens))
    ).encode()
    or b' \n'
    for _ in range(documents)
  )


SOURCES = {'bytes': random_source, 'pairs': random_source, 'words': word_source}


def expected_tokens(tokenizer, content):
  """The tokens of a document, not made by the tokenizers."""
  if tokenizer == 'bytes':
    return list(content)
  if tokenizer == 'words':
    return [WORDS.index(word) for word in content.decode().split()]
  pairs = [content[i : i + 2] for i in range(0, len(content), 2)]
  return [256 * pair[0] + pair[1] if len(pair) == 2 else 65536 + pair[0] for pair in pairs]


# --- the byte tokenizer ---


def test_tokens_are_bytes():
  document = MemoryDocument('all', bytes(range(256)))
  tokens = ByteTokenizer().encode(document, 0, 256)
  assert tokens.dtype == np.int32 and tokens.tolist() == list(range(256))
  assert ByteTokenizer().count(document) == ByteTokenizer.vocab_size == 256


def test_a_piece_reads_no_more_than_itself():
  document = MemoryDocument('long', bytes(range(256)) * 4000)
  tokens = ByteTokenizer()
  assert tokens.count(document) == 1_024_000 and document.read_bytes == 0
  assert tokens.encode(document, 300, 303).tolist() == [44, 45, 46] and document.read_bytes == 3
  assert tokens.encode(document, 1_023_999, 1_024_005).tolist() == [255]
  assert tokens.encode(document, 1_024_000, 1_024_005).tolist() == []
  source = ListSource([document.content])
  data_config = config(batch_tokens=4096, max_document_tokens=4096)
  assert len(samples(250, data_config, source)) == 250
  assert source[0].read_bytes == 1_024_000 + 249  # and the last targets of all pieces but one


# --- any tokenizer ---


@pytest.mark.parametrize('tokenizer', SOURCES)
@pytest.mark.parametrize('policy', ['split', 'truncate', 'drop'])
@pytest.mark.parametrize('seed', [0, 1])
def test_every_token_once_an_epoch(tokenizer, policy, seed):
  source = SOURCES[tokenizer](seed)
  data_config = config(long_documents=policy, seed=seed, tokenizer=tokenizer)
  documents = [np.array(expected_tokens(tokenizer, x.content), np.int32) for x in source]
  index = index_samples(source, data_config)
  assert index.document_tokens.tolist() == [len(tokens) for tokens in documents]
  assert index.document_bytes.tolist() == [len(document.content) for document in source]
  assert max(map(len, documents)) > 64 > min(map(len, documents))
  counts = index.counts
  found = samples(3 * counts['samples'], data_config, source)
  for epoch in range(3):
    seen = [np.zeros(len(tokens), int) for tokens in documents]
    for sample in found[epoch * counts['samples'] : (epoch + 1) * counts['samples']]:
      document = documents[sample.document]
      span = slice(sample.offset, sample.offset + len(sample))
      np.testing.assert_array_equal(sample.tokens, document[span])
      np.testing.assert_array_equal(sample.targets, np.append(document[1:], NO_TARGET)[span])
      assert sample.tokens.dtype == sample.targets.dtype == np.int32
      seen[sample.document][span] += 1
    for times in seen:
      kept = {'split': len(times), 'truncate': 64, 'drop': len(times) if len(times) <= 64 else 0}[policy]
      assert (times[:kept] == 1).all() and not times[kept:].any()
    assert sum(times.sum() for times in seen) == counts['epoch_tokens']
    assert sum(len(times) for times in seen) == counts['epoch_tokens'] + counts['lost_tokens']


@pytest.mark.parametrize('tokenizer', SOURCES)
def test_resume_after_every_batch(tokenizer):
  source, data_config = SOURCES[tokenizer](), config(tokenizer=tokenizer)
  straight = batches(40, data_config, source)
  assert straight[-1].epoch >= 1
  for batch, following in itertools.pairwise(straight):
    (resumed,) = batches(1, data_config, source, json.loads(json.dumps(batch.state_after)))
    assert ids([resumed]) == ids([following]) and resumed.state_after == following.state_after
    for one, other in zip(resumed.samples, following.samples, strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_array_equal(one.targets, other.targets)


def test_summaries_count_tokens():
  source = ListSource([b'', b' \n', b'a fox', b'a fox and grapes ' * 20])
  index = index_samples(source, config(tokenizer='words', long_documents='truncate'))
  assert index.describe() == {
    'documents': 4, 'used_documents': 2, 'split_documents': 0, 'truncated_documents': 1,
    'dropped_documents': 0, 'empty_documents': 2, 'samples': 2, 'epoch_tokens': 66, 'lost_tokens': 16,
    'total_tokens': 82, 'min_tokens': 0, 'median_tokens': 2, 'p99_tokens': 80, 'max_tokens': 80,
  }  # fmt: skip


def test_long_documents_are_long_in_tokens():
  source = ListSource([b'grapes ' * 10, b'a ' * 12, b'a'])
  refused = config(tokenizer='words', max_document_tokens=10, long_documents='error')
  message = message_of(index_samples, source, refused)
  assert message.startswith('document 1: 12 tokens, more than DataConfig.max_document_tokens = 10, and the ')
  assert (
    len(index_samples(source, config(tokenizer='words', max_document_tokens=12, long_documents='error'))) == 3
  )


@pytest.mark.parametrize('tokenizer', SOURCES)
@pytest.mark.parametrize('kind', ['jsonl', 'folder'])
def test_files(tokenizer, kind, tmp_path):
  """A long line or file, and short ones, from disk to samples; and their lengths."""
  texts = ['a fox and grapes', '', '\u00e9t\u00e9', '\u4e2d\u6587 a\n' * 20_000, ' ']
  path = tmp_path / 'a.jsonl'
  if kind == 'jsonl':
    path.write_text('\n'.join(json.dumps({'body': text}) for text in texts))
  else:
    for i, text in enumerate(texts):
      (tmp_path / f'{i}.txt').write_text(text, encoding='utf-8')
  data_config = config(
    source=str(path if kind == 'jsonl' else tmp_path), text_field='body', tokenizer=tokenizer,
    max_document_tokens=5000, batch_tokens=5000,
  )  # fmt: skip
  expected = [expected_tokens(tokenizer, text.encode()) for text in texts]
  source = open_source(data_config)
  index = index_samples(source, data_config)
  assert index.document_tokens.tolist() == [len(tokens) for tokens in expected]
  found = sorted(samples(len(index), data_config, source), key=lambda s: (s.document, s.offset))
  assert [sample.document for sample in found] == index.document.tolist()
  joined = np.concatenate([sample.tokens for sample in found])
  assert joined.tolist() == list(itertools.chain.from_iterable(expected))
  if kind == 'jsonl':
    assert read_lengths(path, data_config).tolist() == [len(tokens) for tokens in expected if tokens]


def test_documents_that_a_tokenizer_refuses(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"text": "a fox"}\n{"text": "a wolf"}\n')
  data_config = config(source=str(path), tokenizer='words')
  expected = f"{path}:2: the word 'wolf' is not in the vocabulary; correct it"
  assert message_of(index_samples, open_source(data_config), data_config) == expected
  assert message_of(read_lengths, path, data_config) == expected


def test_document_that_changes_but_for_the_number_of_its_tokens():
  source = ListSource([b'a fox'])
  batcher = Batcher(config(tokenizer='words'), source)
  source[0].content = b'a grapes'
  assert message_of(next, batcher).startswith('document 0: changed while the run was on; ')


def test_tokens_beyond_the_vocabulary(monkeypatch):
  monkeypatch.setattr(TOKENIZERS['words'], 'vocab_size', 3)
  with pytest.raises(AssertionError, match='document 0: no such token'):
    next(Batcher(config(tokenizer='words'), ListSource([b'a fox and grapes'])))


# --- configs and states ---


def test_states_of_another_tokenizer():
  source = ListSource([b'a' * 10])
  state = batches(1, config(tokenizer='pairs'), source)[0].state_after
  assert state['tokenizer'] == 'pairs'
  assert message_of(Batcher, config(), source, state) == (
    "DataConfig.tokenizer = 'bytes': the run to resume had 'pairs', and its samples and its model are made "
    'of those tokens; set what it had, or start a new run'
  )


def test_unknown_tokenizer():
  message = message_of(lambda: DataConfig(tokenizer='byte'))
  assert message == "DataConfig.tokenizer = 'byte': choose one of bytes, pairs, words"


@pytest.mark.parametrize(('tokenizer', 'vocab_size'), [('bytes', 256), ('pairs', 65792), ('words', 6)])
def test_the_model_needs_the_vocabulary_of_the_tokenizer(tokenizer, vocab_size):
  def made(vocab_size):
    return RunConfig(model=ModelConfig(vocab_size=vocab_size), data=DataConfig(tokenizer=tokenizer))

  made(vocab_size)
  assert message_of(made, vocab_size - 1) == (
    f'ModelConfig.vocab_size = {vocab_size - 1}: must be at least {vocab_size}, the vocabulary of '
    f'DataConfig.tokenizer = {tokenizer!r}'
  )
