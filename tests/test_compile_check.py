"""The training step compiled for machines that are not there, by the command, as a user runs it."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = str(ROOT / 'configs/tiny_cpu.gin')


where_libtpu_is = pytest.mark.skipif(
  (sys.platform, platform.machine()) != ('linux', 'x86_64'), reason='libtpu is made for Linux on x86 alone'
)


def checked(*args: str) -> subprocess.CompletedProcess:
  command = [sys.executable, str(ROOT / 'scripts/compile_check.py'), *args]
  return subprocess.run(command, capture_output=True, text=True, timeout=1200)


@pytest.mark.long
@where_libtpu_is
def test_tiny_step_for_a_tpu(tpu_check):
  """Wide parents with local children, experts spread over nodes, the Pallas kernels: all rules hold."""
  printed, found = tpu_check
  assert 'parents_span=16, children_span=8' in printed
  assert 'attention: pallas_tpu (chosen by auto, on tpu)' in printed
  assert len(found['checks']) == 10 and all(check['passed'] for check in found['checks'])
  times = {}
  for row in found['rows']:
    if row['collective'] == 'ragged-all-to-all':
      key = row['layer'], row['direction'], row['purpose'], row['span']
      times[key] = times.get(key, 0) + row['times']
  across, inside = 'across nodes', 'inside a node'
  assert times == {
    (layer, direction, purpose, span): count
    for layer, purpose, span, count in (
      ('parents', 'attention exchange', across, 2), ('parents', 'expert exchange', inside, 2),
      ('children', 'attention exchange', inside, 6), ('children', 'expert exchange', inside, 6),
    )
    for direction in ('forward', 'backward')
  }  # fmt: skip


@pytest.mark.long
@where_libtpu_is
def test_tiny_step_for_a_tpu_with_parameters_ahead():
  """The step tells the compiler to use the SparseCores, by default all would be in line; all rules hold."""
  process = checked(
    '--config', TINY, '--topology', 'v5p:2x2x4', '--set', 'ClusterConfig.prefetch_layers=1'
  )  # fmt: skip
  assert process.returncode == 0, process.stdout + process.stderr
  assert 'xla_tpu_enable_sparse_core_collective_offload_all_gather=true' in process.stdout
  assert 'ok      what is gathered ahead begins ahead: 0.0 MB of ' in process.stdout


@pytest.mark.parametrize('args,expected', [
  (('--config', TINY, '--topology', 'v4:2x2x1'), 'error: --topology v4:2x2x1: unknown; say one like v5p:'),
  (('--config', 'nowhere.gin', '--topology', 'v5p:2x4x4'), 'error: nowhere.gin: no such config file; '),
  (('--config', TINY, '--topology', 'v5p:2x4x4', '--set', 'PlannerConfig.capacity_tokens=650'),
   'error: PlannerConfig.capacity_tokens = 650: must be a multiple of 16, '),
])  # fmt: skip
def test_mistakes(args, expected):
  process = checked(*args)
  assert process.returncode == 2 and process.stderr.startswith(expected)
  assert len(process.stderr.splitlines()) == 1
