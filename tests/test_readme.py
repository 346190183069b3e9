"""What README shows is what its commands print.

A comment before a block or a picture says which command it is from:

    <!-- output of: repack-plan --config sim/paper_1f3s.gin --batch 6 -->

The block then has lines of the command, in order; `...` stands for any that are left out between two.
`python` stands for the block of Python above. To refresh a picture, run its command from the checkout.
"""

import contextlib
import functools
import importlib
import io
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import TPU_CHECK

from repack_jax.config.gin_files import load
from repack_jax.data.batches import Batcher
from repack_jax.data.index import index_samples
from repack_jax.data.sources import open_source
from repack_jax.plan.program import Program
from repack_jax.training.loop import Position, StepDone
from repack_jax.training.metrics import step_record, summary
from repack_jax.training.planned_steps import planned_steps

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / 'README.md').read_text(encoding='utf-8')
# What blocks of commands may begin their lines with; all other blocks show an output and must say of what.
COMMANDS = ('make ', 'pip ', '.venv/bin/', '  --', '$ ')
SLOW = ('repack-simulate', 'scripts/compile_check.py')


class Shown(NamedTuple):
  """A block or a picture, and the command it is from."""

  command: str
  content: str
  before: str  # README up to it

  @property
  def lines(self) -> list[str]:
    return [line.rstrip() for line in self.content.splitlines()]


def bound(kind: str, pattern: str) -> list[Shown]:
  found = re.finditer(rf'<!-- {kind} of: (.+?) -->\n+{pattern}', README, re.DOTALL)
  return [Shown(match[1], match[2], README[: match.start()]) for match in found]


OUTPUTS = bound('output', r'```\n(.*?)\n```\n')
PICTURES = bound('picture', r'!\[[^]]*\]\(([^)]*)\)')


def printed(command: str) -> list[str]:
  """The lines of one of the package's own commands, run in this process in the checkout."""
  name, *args = shlex.split(command)
  module = importlib.import_module(f'repack_jax.commands.{name.removeprefix("repack-")}')
  out = io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.chdir(ROOT):
    module.main(args)
  return [line.rstrip() for line in out.getvalue().splitlines()]


def of_script(command: str, code: int) -> list[str]:
  script, *args = shlex.split(command)
  process = subprocess.run(
    [sys.executable, script, *args], cwd=ROOT, env=os.environ | {'PYTHONPATH': str(ROOT)},
    capture_output=True, text=True, timeout=1200,
  )  # fmt: skip
  assert process.returncode == code, process.stderr
  return [line.rstrip() for line in (process.stdout + process.stderr).splitlines()]


def check(shown: list[str], lines: list[str]) -> None:
  """Asserts that what is shown is a stretch of the lines, or several with `...` between them."""
  parts = '\n'.join(shown).strip('\n').split('\n...\n') if '...' in shown else ['\n'.join(shown)]
  text, at = '\n'.join(['', *lines, '']), 0
  for part in parts:
    part = '\n'.join(line for line in part.split('\n') if line != '...')
    found = text.find(f'\n{part}\n', at)
    assert found >= 0, f'README shows\n\n{part}\n\nand the command prints\n\n{text}'
    at = found + len(part) + 1


def test_every_output_and_picture_says_what_it_is_of():
  blocks = re.findall(r'^```(\w*)\n(.*?)^```\n', README, re.DOTALL | re.MULTILINE)
  known = {output.content for output in OUTPUTS}
  for block in (block for language, block in blocks if not language):
    commands = all(line.startswith(COMMANDS) or not line for line in block.splitlines())
    assert commands or block.rstrip('\n') in known, f'no command for this block of README:\n{block}'
  assert len(PICTURES) == README.count('![')


@pytest.mark.parametrize(
  'output',
  [
    pytest.param(o, id=o.command, marks=[pytest.mark.long] if o.command.startswith(SLOW) else [])
    for o in OUTPUTS
    if o.command.startswith(('repack-', 'scripts/', 'train.py'))
  ],
)
def test_outputs_of_commands(output, request):
  mistake = output.lines[-1].startswith('error: ')
  if output.command.startswith('repack-'):
    check(output.lines, printed(output.command))
  elif output.command == TPU_CHECK:
    check(output.lines, [line.rstrip() for line in request.getfixturevalue('tpu_check')[0].splitlines()])
  else:
    check(
      [line for line in output.lines if not line.startswith('$ ')], of_script(output.command, 2 * mistake)
    )


@pytest.mark.parametrize('output', [o for o in OUTPUTS if o.command == 'python'])
def test_outputs_of_python(output):
  code = re.findall(r'```python\n(.*?)```', output.before, re.DOTALL)[-1]
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    exec(compile(code, 'README.md', 'exec'), {})
  check(output.lines, [line.rstrip() for line in out.getvalue().splitlines()])


@functools.cache
def planned_summary() -> dict[str, str]:
  """The rows at the end of `make train`, of its plans alone: nothing is trained, and losses are 0."""
  run = load([str(ROOT / 'configs/tiny_cpu.gin')], [])
  source = open_source(run.data)
  index = index_samples(source, run.data)
  steps = planned_steps(run, Batcher(run.data, source, None, index), lambda arrays: None)
  records, programs = [], set()
  for number in range(1, run.train.steps + 1):
    planned = next(steps)
    programs |= set(planned.programs)
    if number <= run.train.compare_steps:
      programs |= {Program.of_plan(plan, run.sp_degrees) for plan in planned.solution.baseline_plans}
    position = Position(number, None, None)  # type: ignore[arg-type]
    done = StepDone(planned, position, {'loss': 0.0, 'skipped': 0}, 1.0, 0.0, 0.0, len(programs))
    records.append(step_record(run, done))
  best = max(records, key=lambda r: r['cross_node_bytes_disabled'] - r['cross_node_bytes'])
  return rows(summary(records, index.counts).splitlines()) | {
    'largest saving': f'step {best["step"]}: {best["cross_node_bytes"]:,} bytes across nodes, '
    f'{best["cross_node_bytes_disabled"]:,} with repacking disabled'
  }


def rows(lines: list[str]) -> dict[str, str]:
  """Row -> what it says; one without a name belongs to that above."""
  found, name = {}, ''
  for line in lines:
    if line.startswith('  '):
      name = line[2:22].strip() or f'{name}, on'
      found[name] = line[22:]
  return found


def test_the_end_of_make_train():
  (output,) = (o for o in OUTPUTS if o.command == 'make train')
  shown, found = rows(output.lines), planned_summary()
  assert set(found) <= set(shown), 'README lacks rows that a run prints'
  assert f'of {load([str(ROOT / "configs/tiny_cpu.gin")], []).train.steps} steps' in shown['final loss']
  version = re.search(r'of Python (\d+\.\d+\.\d+)', README)
  assert version, 'README must say of which Python the documents are'
  # The documents are the standard library's: another Python has others.
  if version[1] == platform.python_version() and shown['documents'] == found['documents']:
    assert {name: shown[name] for name in found if name != 'final loss'} == {
      name: value for name, value in found.items() if name != 'final loss'
    }
  # The sentences below it repeat two of its figures.
  fewer = shown['crossed nodes, on'].split(' in ')[-1]
  less = re.search(r'\(-([\d.]+)%\)', shown['crossed nodes'])
  assert f'{fewer}\n' in README and less and f'{float(less[1]):.0f} % fewer' in README


@pytest.mark.parametrize('picture', PICTURES, ids=lambda picture: picture.content)
def test_pictures_are_what_their_commands_draw(picture, tmp_path):
  drawn = tmp_path / 'drawn.svg'
  printed(picture.command.replace(picture.content, str(drawn)))
  same = drawn.read_text(encoding='utf-8') == (ROOT / picture.content).read_text(encoding='utf-8')
  assert same, f'{picture.content} is stale; run in the checkout: {picture.command}'
