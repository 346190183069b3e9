"""The planner's compiled functions: machine code on disk is used again, and never outlives its sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repack_jax.solver import compiled as compiled_module
from repack_jax.solver.compiled import compiled, drop_stale

ROOT = Path(__file__).resolve().parents[1]
INNER = 'from repack_jax.solver.compiled import compiled\n\n@compiled\ndef inner(x):\n  return x + 1\n'
OUTER = (
  'from repack_jax.solver.compiled import compiled\nfrom tiny.inner import inner\n\n'
  '@compiled\ndef outer(x):\n  return 10 * inner(x)\n'
)
RUN = (
  'from tiny.outer import outer; found = outer(1); stats = getattr(outer, "stats", None);'
  'print(found, stats and sum(stats.cache_hits.values()))'
)


@pytest.fixture
def tiny(tmp_path):
  """A package of two files: a compiled function calls one of the other file."""
  package = tmp_path / 'tiny'
  package.mkdir()
  for name, text in (('__init__.py', ''), ('inner.py', INNER), ('outer.py', OUTER)):
    (package / name).write_text(text)
  return package


def run(package: Path, **environment: str) -> str:
  """What a process of its own finds for `outer(1)`, and how much of it came from disk."""
  path = f'{package.parent}{os.pathsep}{ROOT}'
  env = os.environ | {'PYTHONPATH': path, 'PYTHONDONTWRITEBYTECODE': '1'} | environment
  done = subprocess.run([sys.executable, '-c', RUN], env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return done.stdout.strip()


@pytest.mark.parametrize('elsewhere', [False, True], ids=['beside the sources', 'NUMBA_CACHE_DIR'])
def test_a_change_in_another_file_compiles_anew(tiny, tmp_path, elsewhere):
  environment = {'NUMBA_CACHE_DIR': str(tmp_path / 'numba')} if elsewhere else {}
  assert run(tiny, **environment) == '20 0'
  assert run(tiny, **environment) == '20 1'
  inner, before = tiny / 'inner.py', (tiny / 'inner.py').stat()
  inner.write_text(INNER.replace('x + 1', 'x + 2'))
  os.utime(inner, ns=(before.st_atime_ns, before.st_mtime_ns))  # as an archive or a package may set it
  assert run(tiny, **environment) == '30 0'
  assert run(tiny, **environment) == '30 1'


def test_without_a_folder_to_write_to(tiny, tmp_path):
  (tiny / '__pycache__').write_text('a file where numba wants a folder')
  (tmp_path / 'home').write_text('')
  nowhere = {'XDG_CACHE_HOME': str(tmp_path / 'home'), 'HOME': str(tmp_path / 'home')}
  assert run(tiny, **nowhere) == '20 0'


def test_without_numba(tiny):
  assert run(tiny, NUMBA_DISABLE_JIT='1') == '20 None'


@pytest.fixture
def cache(tmp_path):
  """A folder of machine code, and of other files."""
  cache = tmp_path / 'cache'
  cache.mkdir()
  for name in ('inner.inner-4.py311.nbi', 'inner.inner-4.py311.1.nbc', 'inner.cpython-311.pyc'):
    (cache / name).write_bytes(b'old')
  return cache


def held(cache: Path) -> set[str]:
  return {file.suffix for file in cache.iterdir()} - {'.sha256'}


def test_machine_code_goes_when_any_source_changes(tiny, cache):
  assert drop_stale(cache, tiny) and held(cache) == {'.pyc'}  # of unknown sources
  for change in (
    lambda: (tiny / 'outer.py').write_text(OUTER + '\n'),
    lambda: (tiny / 'another.py').write_text(''),
    lambda: (tiny / 'another.py').rename(tiny / 'renamed.py'),
    lambda: (tiny / 'renamed.py').unlink(),
    lambda: (cache / compiled_module._STAMP).write_bytes(b'\xff damaged'),
  ):
    (cache / 'outer.outer-4.py311.1.nbc').write_bytes(b'new')
    assert drop_stale(cache, tiny) and held(cache) == {'.pyc', '.nbc'}
    change()
    assert drop_stale(cache, tiny) and held(cache) == {'.pyc'}


def test_sources_and_machine_code_that_vanish_meanwhile(tiny, cache):
  """An editor's lock, which is a link to nothing; files that another process has removed; no folder."""
  (tiny / '.#inner.py').symlink_to('nobody@nowhere')
  for name in ('gone.1.nbc', 'gone.nbi'):
    (cache / name).symlink_to('nothing')
  assert drop_stale(cache, tiny) and held(cache) == {'.pyc'}
  assert drop_stale(tiny / 'none', tiny)


def test_machine_code_that_cannot_be_removed_is_not_used(tiny, cache, monkeypatch):
  def refuse(file, missing_ok=False):
    raise PermissionError(file)

  monkeypatch.setattr(Path, 'unlink', refuse)
  assert not drop_stale(cache, tiny)
  monkeypatch.setattr(compiled_module, 'drop_stale', lambda cache, sources: False)

  def double(x):
    return 2 * x

  function = compiled(double)
  assert function(4) == 8 and function.stats.cache_path is None
