"""Records of a step and the summary of a run, by hand."""

import json

import pytest
from model_runs import samples

from repack_jax.config import ClusterConfig, RunConfig
from repack_jax.data.batches import Batch
from repack_jax.predict import flops
from repack_jax.training.loop import Position, StepDone
from repack_jax.training.metrics import HOST_METRICS, MetricsFile, status, step_record, summary
from repack_jax.training.planned_steps import planned_steps


def record(step: int, **values: object) -> dict:
  return {
    'step': step, 'loss': 5.0 - step, 'tokens': 1000, 'target_tokens': 100 * step,
    'children': {'8': 1, '2': 3}, 'cross_node_bytes': 60,
    'cross_node_bytes_disabled': 80, 'solo_tokens': 250, 'predicted_s': 0.9 + 0.1 * step,
    'predicted_s_disabled': 1.25, 'dropped_assignments': 0, 'compiles': 2, 'widest_parent': 16,
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
  return StepDone(planned, position, {'loss': 1.5, 'dropped_assignments': 0}, 2.0, 1.5, 0.5, 1)


def test_mfu_by_hand(monkeypatch):
  """Against a peak of 1,000 FLOP/s on each of 16 ranks: 3 x 7 x 100 tokens' forward work in 2 s."""
  monkeypatch.setattr(flops, 'sample_flops', lambda model, lengths: 7 * lengths)
  run = RunConfig(cluster=ClusterConfig(peak_flops_per_s=1000.0))
  found = step_record(run, step_done(run))
  assert found['mfu'] == pytest.approx(3 * 7 * 100 / (2 * 16 * 1000))
  assert 'mfu' not in step_record(RunConfig(), step_done(RunConfig()))


def test_a_record_holds_what_hosts_and_devices_report():
  found = step_record(RunConfig(), step_done(RunConfig()))
  assert set(found) == {*HOST_METRICS, 'loss', 'dropped_assignments', 'mode'}
  assert found['loss'] == 1.5 and found['step'] == 1 and found['mode'] == 'solve'
  assert found['tokens_per_s'] == 100 / 2.5 and found['target_tokens'] == 98
  assert found['padding_fraction'] == 1 - 100 / (16 * 512)
  # 2 s of which 1.5 compiled, and half a second of waiting.
  assert 'loss 1.500, 100 tokens/s' in status(found)
