"""The wheel: what it holds, and that its commands run where there is no checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = ('.*', '__pycache__', 'build', 'runs', '*.egg-info')
# Another checkout on these paths must not stand in for what is installed.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith('PYTHON')}


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
  """Standard output of a command that must succeed."""
  process = subprocess.run(
    list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT | environment
  )
  assert process.returncode == 0, process.stdout + process.stderr
  return process.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> Path:
  """Built from a copy, since building leaves files beside the sources."""
  folder = tmp_path_factory.mktemp('wheel')
  shutil.copytree(ROOT, folder / 'copy', symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
  options = ('--no-deps', '--no-build-isolation', '--no-index', '--wheel-dir', folder)
  run(sys.executable, '-m', 'pip', 'wheel', *options, folder / 'copy')
  (built,) = folder.glob('*.whl')
  return built


def new_environment(folder: Path, wheel: Path, *options: str) -> Path:
  """An empty virtual environment with the wheel installed; returns the folder of its commands."""
  run(sys.executable, '-m', 'venv', '--without-pip', folder)
  python = folder / 'bin' / 'python'
  run(sys.executable, '-m', 'pip', '--python', python, 'install', *options, wheel)
  return folder / 'bin'


def site_packages(commands: Path) -> Path:
  return Path(
    run(commands / 'python', '-c', "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
  )


def check_commands(commands: Path, folder: Path, **environment: str) -> None:
  """Plans, draws and simulates from a folder with nothing but lengths in it."""
  folder.mkdir()
  (folder / 'lengths.txt').write_text('3000\n900\n700\n500\n')
  installed = run(commands / 'python', '-c', 'import repack_jax; print(repack_jax.__file__)', cwd=folder)
  assert Path(installed.strip()).is_relative_to(site_packages(commands))
  shown = run(
    commands / 'repack-plan', 'lengths.txt', '--config', 'clusters/h200.gin', '--html', 'plan.html',
    cwd=folder, **environment,
  )  # fmt: skip
  assert 'batch 1 of lengths.txt: 4 samples, 5100 tokens, longest 3000' in shown and 'solve' in shown
  assert '<script>' in (folder / 'plan.html').read_text()
  simulated = run(
    commands / 'repack-simulate', '--config', 'sim/paper_1f3s.gin', '--set', 'SimulatorConfig.steps=1',
    '--set', 'SimulatorConfig.seeds=1', cwd=folder, **environment,
  )  # fmt: skip
  assert f'{site_packages(commands)}/repack_jax/configs/lengths/web_documents.csv' in simulated


def test_it_holds_the_package_and_nothing_else(wheel):
  held = zipfile.ZipFile(wheel)
  files = {
    os.path.relpath(os.path.join(folder, name), ROOT)
    for folder, _, names in os.walk(ROOT / 'repack_jax', followlinks=True)
    for name in names
    if not folder.endswith('__pycache__')
  }
  for name in (
    'py.typed',
    'report/plan.html',
    'report/plan.css',
    'report/page.js',
    'configs/clusters/h200.gin',
  ):
    assert f'repack_jax/{name}' in files
  assert {name for name in held.namelist() if '.dist-info/' not in name} == files
  assert all(held.read(name) == (ROOT / name).read_bytes() for name in files)


def test_commands_run_without_the_checkout_and_without_jax(wheel, tmp_path):
  commands = new_environment(tmp_path / 'environment', wheel, '--no-deps', '--no-index')
  packages = site_packages(commands)
  # The dependencies are those of the environment that runs the tests. Its own repack_jax comes second.
  (packages / 'dependencies.pth').write_text(sysconfig.get_path('purelib'))
  (packages / 'jax.py').write_text("raise ImportError('JAX is blocked')")
  # Compiling the planner's loops anew would take half a minute.
  check_commands(commands, tmp_path / 'elsewhere', NUMBA_DISABLE_JIT='1')


@pytest.mark.long
def test_pip_installs_all_that_the_commands_need(wheel, tmp_path):
  commands = new_environment(tmp_path / 'environment', wheel)
  check_commands(commands, tmp_path / 'elsewhere')
  run(commands / 'python', '-c', 'import jax, flax, optax, orbax.checkpoint, grain')
