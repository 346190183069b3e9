"""Records of a step and the summary of a run, by hand."""

import json

import pytest
from model_runs import samples

from repack_jax.config import ClusterConfig, RunConfig
from repack_jax.data.batches import Batch
from repack_jax.predict import flops
from repack_jax.training.metrics import MetricsFile, step_record, summary
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
  records = [record(1), record(2, children={'1': 4}, widest_parent=32, dropped_assignments=7)]
  assert summary(records, counts).splitlines() == [
    '  final loss          3.3333 over the last 2 of 2 steps (first 4.0000)',
    '  tokens trained      2,000 (1.25 epochs)',
    '  documents           12,345 in the source: 2 split, 3 dropped, 4 truncated, 5 empty',
    '  expert assignments  7 dropped',
    '  compiles            2 of the forward and backward program',
    '  widest parent       SP32',
    '  children            SP1: 4, SP2: 3, SP8: 1; 25% of tokens in none, on single ranks',
    '  crossed nodes       120 bytes; 160 with repacking disabled (-25.0%)',
    '  predicted           a step takes 0.840 times as long as with repacking disabled, by the '
    "config's rates",
  ]
  assert summary([], {}) == 'no steps were run'


def test_mfu_by_hand(monkeypatch):
  """Against a peak of 1,000 FLOP/s on each of 16 ranks: 3 x 7 x 100 tokens' forward work in 2 s."""
  monkeypatch.setattr(flops, 'sample_flops', lambda model, lengths: 7 * lengths)
  run = RunConfig(cluster=ClusterConfig(peak_flops_per_s=1000.0))
  batch = Batch(samples=tuple(samples([60, 40])), index=0, epoch=0, state_after={})
  planned = next(planned_steps(run, iter([batch]), lambda plan, samples: None))  # type: ignore[arg-type]
  names = ('loss', 'grad_norm', 'learning_rate', 'balance', 'router_z', 'dropped')
  found = step_record(run, 1, planned, dict.fromkeys(names, 0), step_s=2.0, data_wait_s=0.0, compiles=1)
  assert found['mfu'] == pytest.approx(3 * 7 * 100 / (2 * 16 * 1000))
  assert 'mfu' not in step_record(RunConfig(), 1, planned, dict.fromkeys(names, 0), 2.0, 0.0, 1)
