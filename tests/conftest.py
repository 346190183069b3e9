"""32 emulated CPU devices for the whole suite, fixed before JAX starts; too few is an error, never a skip."""

import gc
import json
import os
import pathlib
import shlex
import subprocess
import sys

from jaxlib.version import __version_info__ as JAXLIB

NUM_DEVICES = 32
MOST_MEMORY_MAPS = 25_000
# Files that take minutes come first, so that no worker is left with one at the end. The first but one needs
# no planner: its machine code is compiled once, meanwhile.
LONGEST = ('test_train.py', 'test_attention_tpu.py', 'test_model.py', 'test_solver.py', 'test_halo.py')
TPU_CHECK = 'scripts/compile_check.py --config configs/tiny_cpu.gin --topology v5p:2x2x4'

os.environ['JAX_PLATFORMS'] = 'cpu'
# The suite compiles far more than it runs, so XLA's backend optimizes little here. Its older way to emit
# fusions compiles in a third of the time; newer versions have it no longer, and end at the unknown flag.
FAST_COMPILES = ['--xla_backend_optimization_level=0']
if JAXLIB[:2] == (0, 10):
  FAST_COMPILES.append('--xla_cpu_use_fusion_emitters=false')
os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *FAST_COMPILES])

# Tracing makes objects by the million and hardly a cycle; the collector would take a tenth of all time.
gc.set_threshold(50_000, 20, 20)

import filelock  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent

jax.config.update('jax_num_cpu_devices', NUM_DEVICES)
cache = os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(ROOT / '.cache' / 'jax'))
jax.config.update('jax_compilation_cache_dir', cache)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


def pytest_collection_modifyitems(items):
  place = {name: number for number, name in enumerate(LONGEST)}
  items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_sessionstart(session):
  assert len(jax.devices()) == NUM_DEVICES, 'the suite needs 32 emulated CPU devices'


@pytest.fixture(autouse=True)
def _drop_compiled_programs():
  """Compiled programs take thousands of memory maps each; at the kernel's limit, 65,530, XLA crashes."""
  yield
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > MOST_MEMORY_MAPS:
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope='session')
def tpu_check(tmp_path_factory):
  """What `TPU_CHECK` prints, and its results: run once for all workers, since it compiles for minutes."""
  folder = tmp_path_factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:
    folder = folder.parent
  printed, report = folder / 'tpu_check.txt', folder / 'tpu_check.json'
  with filelock.FileLock(folder / 'tpu_check.lock'):
    if not printed.exists():
      process = subprocess.run(
        [sys.executable, *shlex.split(TPU_CHECK), '--json', str(report)],
        cwd=ROOT, env=os.environ | {'PYTHONPATH': str(ROOT)}, capture_output=True, text=True, timeout=1200,
      )  # fmt: skip
      assert process.returncode == 0, process.stdout + process.stderr
      printed.write_text(process.stdout)
  return printed.read_text(), json.loads(report.read_text())
