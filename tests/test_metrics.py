"""Records of a step and the summary of a run, by hand."""

import errno
import json
import os
from pathlib import Path

import pytest
from model_runs import samples

from repack_jax.checks import ConfigError
from repack_jax.config import ClusterConfig, RunConfig
from repack_jax.data.batches import Batch
from repack_jax.files import write_whole
from repack_jax.predict import flops
from repack_jax.training.loop import Position, StepDone
from repack_jax.training.metrics import HOST_METRICS, MetricsFile, status, step_record, summary
from repack_jax.training.planned_steps import planned_steps


def record(step: int, **values: object) -> dict:
  return {
    'step': step, 'loss': 5.0 - step, 'tokens': 1000, 'target_tokens': 100 * step,
    'children': {'8': 1, '2': 3}, 'cross_node_bytes': 60,
    'cross_node_bytes_disabled': 80, 'solo_tokens': 250, 'predicted_s': 0.9 + 0.1 * step,
    'predicted_s_disabled': 1.25, 'dropped_assignments': 0, 'compiles': 2, 'widest_parent': 16, 'skipped': 0,
  } | values  # fmt: skip


def test_metrics_file_keeps_the_steps_of_the_checkpoint(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  written = MetricsFile(path, keep_steps=0)
  for step in (1, 2, 3):
    written.write(record(step))
  written.close()
  with path.open('a') as file:
    file.write('{"step": 4, "lo')  # a kill in the middle of a write
  again = MetricsFile(path, keep_steps=2)
  assert [r['step'] for r in again.records] == [1, 2]
  again.write(record(3, loss=0.5))
  again.close()
  assert [json.loads(line) for line in path.read_text().splitlines()] == [
    record(1),
    record(2),
    record(3, loss=0.5),
  ]


def test_damage_in_the_middle_of_a_metrics_file_is_named(tmp_path, caplog):
  path = tmp_path / 'metrics.jsonl'
  for damage in (b'{"step": 2, "lo\n', b'\x00\xff\n', b'[2]\n', b'{"loss": 2}\n'):
    path.write_bytes(json.dumps(record(1)).encode() + b'\n' + damage + json.dumps(record(3)).encode() + b'\n')
    with pytest.raises(ConfigError, match=r'metrics\.jsonl, line 2: is not the record of a step'):
      MetricsFile(path, keep_steps=3)
  path.write_text(json.dumps(record(1)) + '\n')
  MetricsFile(path, keep_steps=4)
  assert 'lacks the records of 3 steps before step 4' in caplog.text


def test_records_wait_for_a_disk_that_is_full(tmp_path, monkeypatch, caplog):
  """Nothing is lost or written twice, and what a failed write has left is gone."""
  path = tmp_path / 'metrics.jsonl'
  metrics, is_full = MetricsFile(path, keep_steps=0), True
  whole = Path.open

  def opened(self, mode='r', *args, **kwargs):
    if is_full and mode == 'r+b':
      with whole(self, 'ab') as file:
        file.write(b'{"st')
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return whole(self, mode, *args, **kwargs)

  monkeypatch.setattr(Path, 'open', opened)
  metrics.write(record(1))
  metrics.write(record(2, loss=float('nan')))
  assert caplog.text.count('cannot be written (No space left on device)') == 1
  is_full = False
  metrics.write(record(3))
  metrics.close()
  found = [json.loads(line) for line in path.read_text().splitlines()]
  assert found == [record(1), record(2, loss=None), record(3)] == metrics.records


def test_small_files_are_whole_or_as_they_were(tmp_path, monkeypatch):
  path = tmp_path / 'a page.html'
  path.touch()
  mode = path.stat().st_mode
  write_whole(path, 'ä first')
  assert path.read_text(encoding='utf-8') == 'ä first' and path.stat().st_mode == mode

  def full(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(ConfigError, match=r'a page\.html: cannot be written \(No space left on device\)'):
    write_whole(path, 'second')
  assert path.read_text(encoding='utf-8') == 'ä first' and list(tmp_path.iterdir()) == [path]
  write_whole(Path(os.devnull), 'as it is')
  assert Path(os.devnull).is_char_device()


def test_summary_by_hand():
  fates = {'split_documents': 2, 'dropped_documents': 3, 'truncated_documents': 4, 'empty_documents': 5}
  counts = fates | {'documents': 12345, 'epoch_tokens': 1600}
  records = [
    record(1, cross_node_bytes=46, loss_disabled=4.5),
    record(
      2, cross_node_bytes=74, children={'1': 4}, widest_parent=32, dropped_assignments=7.0, loss_disabled=3.0
    ),
  ]
  assert summary(records, counts).splitlines() == [
    '  final loss          3.3333 over the last 2 of 2 steps (first 4.0000)',
    '  first losses        4.00000 3.00000',
    '  repacking disabled  4.50000 3.00000, the same batches: at most 0.5 apart',
    '  tokens trained      2,000 (1.25 epochs)',
    '  documents           12,345 in the source: 2 split, 3 dropped, 4 truncated, 5 empty',
    '  expert assignments  7 dropped',
    '  compiles            2 of the forward and backward program',
    '  widest parent       SP32',
    '  children            SP1: 4, SP2: 3, SP8: 1; 25% of tokens in none, on single ranks',
    '  crossed nodes       120 bytes; 160 with repacking disabled (-25.0%)',
    '                      at least a tenth fewer bytes in 1 of 2 steps',
    '  predicted           a step takes 0.840 times as long as with repacking disabled, by the '
    "config's rates",
  ]
  assert summary([], {}) == 'no steps were run'


def step_done(run: RunConfig) -> StepDone:
  """A step of 100 tokens that took 2 s."""
  batch = Batch(samples=tuple(samples([60, 40])), index=0, epoch=0, state_after={})
  planned = next(planned_steps(run, [batch], lambda arrays: None))
  position = Position(1, None, {})  # type: ignore[arg-type]
  return StepDone(planned, position, {'loss': 1.5, 'skipped': 0, 'dropped_assignments': 0}, 2.0, 1.5, 0.5, 1)


def test_mfu_by_hand(monkeypatch):
  """Against a peak of 1,000 FLOP/s on each of 16 ranks: 3 x 7 x 100 tokens' forward work in 2 s."""
  monkeypatch.setattr(flops, 'sample_flops', lambda model, lengths: 7 * lengths)
  run = RunConfig(cluster=ClusterConfig(peak_flops_per_s=1000.0))
  found = step_record(run, step_done(run))
  assert found['mfu'] == pytest.approx(3 * 7 * 100 / (2 * 16 * 1000))
  assert 'mfu' not in step_record(RunConfig(), step_done(RunConfig()))


def test_a_record_holds_what_hosts_and_devices_report():
  found = step_record(RunConfig(), step_done(RunConfig()))
  assert set(found) == {*HOST_METRICS, 'loss', 'skipped', 'dropped_assignments', 'mode'}
  assert found['loss'] == 1.5 and found['step'] == 1 and found['mode'] == 'solve'
  assert found['tokens_per_s'] == 100 / 2.5 and found['target_tokens'] == 98
  assert found['padding_fraction'] == 1 - 100 / (16 * 512)
  # 2 s of which 1.5 compiled, and half a second of waiting.
  assert 'loss 1.500, 100 tokens/s' in status(found)
