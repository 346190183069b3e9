"""Folders, .jsonl files and the standard library as documents, and the messages for what is none."""

import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from messages import message_of

from repack_jax.config import DataConfig
from repack_jax.data.batches import Batcher
from repack_jax.data.index import index_samples
from repack_jax.data.jsonl import JsonlSource
from repack_jax.data.sources import open_source


def contents(source):
  return [document.read() for document in source]


def test_folder(tmp_path):
  files = {'b.txt': b'bb', 'a/z.txt': b'az', 'a.md': b'm', '.git/x.txt': b'h', 'a/.h.txt': b'h', 'B.txt': b''}
  for name, content in files.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
  os.mkfifo(tmp_path / 'pipe.txt')
  (tmp_path / 'gone.txt').symlink_to(tmp_path / 'nowhere')
  source = open_source(DataConfig(source=str(tmp_path), file_glob='**/*.txt'))
  names = [Path(document.name).relative_to(tmp_path).as_posix() for document in source]
  assert names == ['B.txt', 'a/z.txt', 'b.txt']
  assert contents(source) == [b'', b'az', b'bb']
  assert len(open_source(DataConfig(source=str(tmp_path)))) == 4
  (tmp_path / 'b.txt').unlink()
  for read in (lambda: source[2].read(0, 1), lambda: source[2].size_bytes):
    assert message_of(read).startswith(f'{tmp_path}/b.txt: cannot read it (No such file or directory); ')


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
  assert contents(source) == [b'one', b'two']
  lines = content.split(b'\n')
  number = next(i for i, line in enumerate(lines, start=1) if b'two' in line)
  assert source[1].name == f'{path}:{number}'


def test_jsonl_unicode(tmp_path):
  texts = ['\u00e9\u4e2d\U0001f600', 'a\u2028b\u0085c\nd\r\ne', '', 'plain']
  path = tmp_path / 'a.jsonl'
  lines = [json.dumps({'id': 1, 'body': text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
  path.write_text('\n'.join(lines), encoding='utf-8', newline='')
  source = open_source(DataConfig(source=str(path), text_field='body'))
  assert [content.decode() for content in contents(source)] == texts
  assert [document.size_bytes for document in source] == [len(text.encode()) for text in texts]


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
  assert message_of(open_source, DataConfig(source=str(path))).startswith(f'{path}:3: {expected}')


CHANGES = {
  'shorter': b'{"text": "fine"}\n{"text": "tw"}\n',
  'moved': b'\n\n\n\n\n{"text": "fine"}\n{"text": "two"}\n',
  'cut': b'{"text": "fine"}\n',
  'another field': b'{"text": "fine"}\n{"body": "two"}\n',
}


@pytest.mark.parametrize('content', CHANGES.values(), ids=CHANGES)
def test_jsonl_that_changes_after_opening(content, tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'{"text": "fine"}\n{"text": "two"}\n')
  source = open_source(DataConfig(source=str(path)))
  with path.open('ab') as file:  # more lines do no harm
    file.write(b'{"text": "three"}\n')
  assert contents(source) == [b'fine', b'two']
  path.write_bytes(content)
  assert message_of(source[1].read, 0, 3).startswith(f'{path}:2: changed while the run was on; restore it')
  path.unlink()
  assert message_of(source[1].read, 0, 3).startswith(f'{path}: cannot read it (No such file or directory)')


def test_reading_a_range(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": "0123456789"}')
  (tmp_path / 'a.txt').write_text('0123456789')
  for data_config in (
    DataConfig(source=str(tmp_path / 'a.jsonl')),
    DataConfig(source=str(tmp_path), file_glob='*.txt'),
  ):
    source = open_source(data_config)
    ranges = [source[0].read(*bounds) for bounds in ((0, 3), (3, 10), (7, 11), (10, 12))]
    assert ranges == [b'012', b'3456789', b'789', b'']
    assert [source[0].read(*bounds) for bounds in ((), (8,), (5, 5), (7, 3))] == [
      b'0123456789',
      b'89',
      b'',
      b'',
    ]


LONG_TEXTS = {
  'plain': 'some words of a text ' * 20_000,
  'short lines': 'a line\n\t"quoted"\n' * 20_000,
  'few bytes apart': 'abcdef\n' * 30_000,
  'Chinese': '\u4e2d\u6587 ' * 40_000,
  'surrogate pairs': '\U0001f600' * 60_000,
  'pairs and letters': 'a\U0001f600\u4e2d' * 40_000,
  'backslashes': '\\' * 150_000,
  'backslashes and letters': 'u\\\\\\ud83d' * 40_000,
  'mixed': ''.join(np.random.default_rng(0).choice(list('abc \n"\\\u00e9\u4e2d\U0001f600'), 200_000)),
}


@pytest.mark.parametrize('ensure_ascii', [False, True])
@pytest.mark.parametrize('name', LONG_TEXTS)
def test_pieces_of_a_long_line(name, ensure_ascii, tmp_path):
  """Each piece is exact, and decodes a little of the line alone."""
  content = LONG_TEXTS[name].encode()
  record = {'text': 'not this one', 'id': [1, {'text': 'x'}], 'a "b\\': None}
  line = json.dumps(record, ensure_ascii=ensure_ascii)[:-1] + ' , "text" :\t'
  line += json.dumps(LONG_TEXTS[name], ensure_ascii=ensure_ascii) + ' , "more": "\u00e9" }\r\n'
  path = tmp_path / 'a.jsonl'
  path.write_text('\ufeff\n{"text": "first"}\n  ' + line + '{"text": "last"}', encoding='utf-8', newline='')
  source = open_source(DataConfig(source=str(path)))
  assert [document.size_bytes for document in source] == [5, len(content), 4]
  assert contents(source) == [b'first', content, b'last']
  bounds = [0, 1, *range(500, len(content), 7919), len(content)]
  assert b''.join(source[1].read(*pair) for pair in itertools.pairwise(bounds)) == content
  for start in (0, 65_530, 65_536, len(content) - 3, len(content), len(content) + 5):
    assert source[1].read(start, start + 70_000) == content[start : start + 70_000]
    assert source[1].read(start, start) == b''


def test_cost_of_a_long_line_is_linear(tmp_path, monkeypatch):
  """Each piece once parsed the whole line."""
  read_bytes = []
  read_file = JsonlSource._read_file

  def read_and_count(self, start, end):
    read_bytes.append(end - start)
    return read_file(self, start, end)

  monkeypatch.setattr(JsonlSource, '_read_file', read_and_count)
  path = tmp_path / 'a.jsonl'
  for size_bytes in (500_000, 5_000_000):
    path.write_text(json.dumps({'text': 'some words of a text\n' * (size_bytes // 21)}))
    batcher = Batcher(DataConfig(source=str(path)), open_source(DataConfig(source=str(path))))
    read_bytes.clear()
    for _ in range(50):
      next(batcher)
    assert max(read_bytes) < 140_000  # two blocks


@pytest.mark.parametrize(
  'change',
  [
    lambda content: content.replace(b'67 word', b'67 WORD'),  # as long as before
    lambda content: b'\n' + content,
    lambda content: content[:400_000],
    lambda content: content[:150_000],
    lambda content: content.replace(b'"text"', b'"body"').replace(b'1 word', b'2 word'),
  ],
  ids=['other words', 'moved', 'cut', 'cut shorter', 'other field'],
)
def test_long_line_that_changes_after_opening(change, tmp_path):
  path = tmp_path / 'a.jsonl'
  text = ''.join(f'{i} word\n' for i in range(30_000)) * 2
  path.write_text(json.dumps({'text': text}) + '\n')
  source = open_source(DataConfig(source=str(path)))
  with path.open('ab') as file:  # more lines do no harm
    file.write(b'{"text": "two"}\n')
  assert contents(source) == [text.encode()]
  path.write_bytes(change(path.read_bytes()))
  for bounds in ((), (0, 590_000)):
    assert message_of(source[0].read, *bounds).startswith(f'{path}:1: changed while the run was on; restore')


def test_stdlib():
  data_config = DataConfig()
  source = open_source(data_config)
  names = [document.name for document in source]
  parts = [set(Path(name).parts[-3:]) for name in names]
  assert not any(part & {'site-packages', '__pycache__', 'test', 'tests'} for part in parts)
  assert names == [document.name for document in open_source(data_config)]
  summary = index_samples(source, data_config).describe()
  assert summary['documents'] == len(source) > 300
  assert summary['min_tokens'] < 500 and summary['max_tokens'] > 50_000
  assert summary['total_tokens'] > 1_000_000
  document = next(document for document in source if document.name.endswith('argparse.py'))
  content = document.read(0, 10**9)
  assert b'ArgumentParser' in content and len(content) == document.size_bytes
  batch = next(Batcher(data_config, source))
  assert batch.num_tokens <= data_config.batch_tokens
