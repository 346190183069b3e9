"""What plans, simulates and reports runs on machines without JAX, and `train.py` reads its config there."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The rooms whose modules may import JAX, and what in them may not. All else runs on hosts without it.
JAX_ROOMS = ('exchange', 'ops', 'parallel', 'training')
WITHOUT_JAX = {
  'exchange.reference', 'parallel.xla_flags', 'training.hooks', 'training.metrics', 'training.planned_steps',
  'training.signals', 'training.workdir',
}  # fmt: skip


def test_host_side_imports_without_jax():
  package = ROOT / 'repack_jax'
  found = {
    '.'.join(path.relative_to(package).with_suffix('').parts).removesuffix('__init__').rstrip('.')
    for path in package.rglob('*.py')
  }
  assert found >= WITHOUT_JAX | {'plan.plan', 'solver.solve', 'report.html', 'commands.plan', 'config.run'}
  of_host = sorted(name for name in found if name.split('.')[0] not in JAX_ROOMS or name in WITHOUT_JAX)
  imports = '; '.join(f'import {f"repack_jax.{name}".rstrip(".")}' for name in of_host)
  code = f"import sys; sys.modules['jax'] = None; {imports}; import train; print('all')"
  run = subprocess.run(
    [sys.executable, '-c', code], env=os.environ | {'PYTHONPATH': str(ROOT)}, capture_output=True, text=True
  )
  assert run.stdout == 'all\n', run.stderr
