"""`train.py` as a user runs it, in processes of its own: runs, resumes, kills, signals, meshes and modes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from repack_jax.config.gin_files import load
from repack_jax.training.workdir import new_folder

ROOT = Path(__file__).resolve().parents[1]
MINI = ROOT / 'tests' / 'mini.gin'
STEPS = 15
COMPARED = 2
FIELDS = {
  'step', 'loss', 'grad_norm', 'lr', 'tokens', 'target_tokens', 'padding_fraction', 'tokens_per_s', 'step_s',
  'compile_s', 'plan_s', 'data_wait_s', 'imbalance', 'widest_parent', 'children', 'cross_node_bytes',
  'cross_node_bytes_disabled', 'compiles', 'mode', 'plan_digest', 'micro_batches', 'epoch', 'balance_loss',
  'router_z_loss', 'dropped_assignments', 'predicted_s', 'predicted_s_disabled', 'solo_tokens',
  'halo_micro_batches', 'skipped',
}  # fmt: skip

# Runs train.py and sends its own process signals once the record of a step is written and, if a path is
# given, once that exists.
SIGNALLED = """
import os, signal, sys, time
import train
from repack_jax.training.metrics import MetricsFile

names, step, awaited, *argv = sys.argv[1:]
write = MetricsFile.write

def write_and_signal(self, record):
  write(self, record)
  if record['step'] == int(step):
    while awaited and not os.path.exists(awaited):
      time.sleep(0.01)
    for name in names.split():
      os.kill(os.getpid(), getattr(signal, name))

MetricsFile.write = write_and_signal
sys.exit(train.main(argv))
"""


class Finished(NamedTuple):
  out: str
  err: str


class Runs:
  """Starts runs of the mini config on one file of documents."""

  def __init__(self, folder: Path):
    self.folder = folder
    self.processes: list[subprocess.Popen] = []
    self.documents = folder / 'documents.jsonl'
    text = 'layer pack rank node token plan ' * 4
    lines = [json.dumps({'text': text[i % 7 :][: (100, 60, 30)[i % 3]]}) for i in range(60)]
    self.documents.write_text('\n'.join(lines))

  def arguments(self, workdir: str | None, *settings: str, config: Path = MINI) -> list[str]:
    settings = (f"DataConfig.source='{self.documents}'", *settings)
    named = [] if workdir is None else ['--workdir', str(self.folder / workdir)]
    return ['--config', str(config), *(part for s in settings for part in ('--set', s)), *named]

  def start(
    self, arguments: list[str], signalled: tuple[str, ...] = (), program: str = SIGNALLED, **env: str
  ) -> subprocess.Popen:
    """`signalled` is what the program takes: (names of signals, step, path to await or '')."""
    command = ['-c', program, *signalled] if signalled else [str(ROOT / 'train.py')]
    quick = {
      'JAX_COMPILATION_CACHE_DIR': str(Path(jax.config.jax_compilation_cache_dir).resolve()),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    process = subprocess.Popen(
      [sys.executable, *command, *arguments],
      cwd=self.folder,
      env=os.environ | quick | {'PYTHONPATH': str(ROOT)} | env,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    self.processes.append(process)
    return process

  def run(self, *args: object, code: int = 0, **kwargs: object) -> Finished:
    return finish(self.start(self.arguments(*args, **kwargs)), code)  # type: ignore[arg-type]

  def records(self, workdir: str) -> list[dict]:
    return [json.loads(line) for line in (self.folder / workdir / 'metrics.jsonl').read_text().splitlines()]

  def losses(self, workdir: str) -> list[float]:
    """The loss of each step; every step must be there once, in order."""
    records = self.records(workdir)
    assert [record['step'] for record in records] == list(range(1, len(records) + 1))
    return [record['loss'] for record in records]

  def checkpoints(self, workdir: str) -> set[str]:
    return {path.name for path in (self.folder / workdir / 'checkpoints').iterdir()}


def finish(process: subprocess.Popen, code: int = 0) -> Finished:
  out, err = process.communicate(timeout=300)
  assert process.returncode == code, err
  assert 'Traceback' not in err and 'warning' not in err.lower(), err
  return Finished(out, err)


@pytest.fixture(scope='module')
def runs(tmp_path_factory) -> Iterator[Runs]:
  runs = Runs(tmp_path_factory.mktemp('runs'))
  yield runs
  for process in runs.processes:  # those that a failed test left running
    with process:
      process.kill()


@pytest.fixture(scope='module')
def straight(runs) -> Finished:
  """The uninterrupted run that others must equal."""
  return runs.run('straight', f'TrainConfig.compare_steps={COMPARED}')


def test_a_run_and_its_records(runs, straight):
  records = runs.records('straight')
  assert [record['step'] for record in records] == list(range(1, STEPS + 1))
  for record in records:
    # Of the first steps, the loss with repacking disabled too: the same but for roundings.
    assert set(record) == FIELDS | ({'loss_disabled'} if record['step'] <= COMPARED else set())
    assert abs(record.get('loss_disabled', record['loss']) - record['loss']) < 1e-5
    assert 0 <= record['compile_s'] <= record['step_s']
    assert 0 < record['target_tokens'] < record['tokens'] <= 200
    assert record['padding_fraction'] == 1 - record['tokens'] / (4 * 64)
    assert record['tokens_per_s'] == record['tokens'] / (record['step_s'] + record['data_wait_s'])
    assert min(record['step_s'], record['plan_s'], record['data_wait_s'], record['grad_norm']) > 0
    assert 1 <= record['imbalance'] <= 4 and record['mode'] == 'solve'
    assert 0 < record['predicted_s'] <= record['predicted_s_disabled'] * (1 + 1e-9)
    assert 0 <= record['solo_tokens'] <= record['tokens']
    assert record['halo_micro_batches'] == 0  # by default heads are exchanged
    assert len(record['plan_digest']) == 16 and record['dropped_assignments'] == 0
  assert [record['lr'] for record in records[:3]] == pytest.approx([0.005, 0.0075, 0.01])
  assert len({r['widest_parent'] > 2 for r in records}) <= records[-1]['compiles'] <= 4
  assert max(record['widest_parent'] for record in records) == 4
  assert any(record['cross_node_bytes'] < record['cross_node_bytes_disabled'] for record in records)
  losses = runs.losses('straight')
  assert abs(losses[0] - np.log(256)) < 0.1 and losses[-1] < 0.7 * losses[0]


def test_what_a_run_prints(runs, straight):
  opening, _, ending = straight.out.partition('\n\nrun in ')
  workdir, *lines = ending.rstrip().splitlines()
  assert workdir == str(runs.folder / 'straight')
  assert [line[2:22].strip() for line in lines] == [
    'final loss', 'first losses', 'repacking disabled', 'tokens trained', 'documents', 'expert assignments',
    'compiles', 'widest parent', 'children', 'crossed nodes', '', 'predicted', 'largest saving', 'its plan',
  ]  # fmt: skip
  assert 'mesh: data 1 x node 2 x local 2 on cpu' in straight.err
  assert 'exchange: dense' in straight.err and f'{STEPS}/{STEPS}' in straight.err
  assert f'{STEPS} steps of at most 200 tokens' in opening and 'up to 6 programs' in opening
  assert f'the first {COMPARED} steps also run with repacking disabled' in opening
  assert opening.endswith(f'writes to {workdir}')
  assert (
    'planning the first step' in straight.err and 'compiling program 1 of at most 6 (parents' in straight.err
  )


def test_the_step_that_saves_most_is_drawn(runs, straight):
  saved = {
    r['step']: r['cross_node_bytes_disabled'] - r['cross_node_bytes'] for r in runs.records('straight')
  }
  shown = next(line for line in straight.out.splitlines() if 'largest saving' in line)
  step = int(shown.split('step ')[1].split(':')[0])
  assert saved[step] == max(saved.values()) > 0
  (page,) = (runs.folder / 'straight' / 'plans').iterdir()
  assert f'Step {step} of straight' in page.read_text() and straight.out.rstrip().endswith(str(page))


def test_resolved_config_is_that_of_the_run(runs, straight):
  settings = [f"DataConfig.source='{runs.documents}'", f'TrainConfig.compare_steps={COMPARED}']
  assert load([str(runs.folder / 'straight' / 'resolved.gin')], []) == load([str(MINI)], settings)


@pytest.mark.long
def test_resolved_config_repeats_the_run_and_modes_agree(runs, straight):
  resolved = runs.folder / 'straight' / 'resolved.gin'
  started = [runs.start(['--config', str(resolved), '--workdir', str(runs.folder / 'again')])]
  for mode in ('static', 'parents'):
    started.append(runs.start(runs.arguments(mode, f"PlannerConfig.mode='{mode}'")))
  for process in started:
    finish(process)
  assert (runs.folder / 'again' / 'resolved.gin').read_text() == resolved.read_text()
  assert runs.losses('again') == runs.losses('straight')
  for mode in ('static', 'parents'):
    np.testing.assert_allclose(runs.losses(mode), runs.losses('straight'), rtol=1e-4)
    for got, want in zip(runs.records(mode), runs.records('straight'), strict=True):
      assert got['mode'] == mode
      assert (got['tokens'], got['target_tokens']) == (want['tokens'], want['target_tokens'])
      assert got['cross_node_bytes_disabled'] == want['cross_node_bytes_disabled']


def assert_goes_on(runs, name):
  """A resumed run has compiled fewer programs; another one may run a plan, and round otherwise."""
  np.testing.assert_allclose(runs.losses(name), runs.losses('straight'), rtol=1e-6)


def test_resume_twice_is_exact_and_other_meshes_lose_nothing(runs, straight):
  runs.run('stopped', 'TrainConfig.steps=5')
  shutil.copytree(runs.folder / 'stopped', runs.folder / 'moved')
  # 4 ranks -> 2 -> 8, beside the same mesh all along
  meshes = {
    10: ('ClusterConfig.ranks_per_node=1',),
    STEPS: ('ClusterConfig.ranks_per_node=2', 'ClusterConfig.domains=2'),
  }
  for steps, mesh in meshes.items():
    moved = runs.start(runs.arguments('moved', f'TrainConfig.steps={steps}', *mesh))
    resumed = runs.run('stopped', f'TrainConfig.steps={steps}')
    assert f'after step {steps - 5}' in resumed.err and f'of {steps} steps' in resumed.out
    finish(moved)
  assert_goes_on(runs, 'stopped')
  np.testing.assert_allclose(runs.losses('moved'), runs.losses('straight'), rtol=1e-4)
  for got, want in zip(runs.records('moved'), runs.records('straight'), strict=True):
    assert (got['tokens'], got['target_tokens']) == (want['tokens'], want['target_tokens'])
  assert runs.records('moved')[7]['micro_batches'] == 2
  for row in ('tokens trained', 'documents', 'crossed nodes', 'largest saving'):
    (of_both,) = {line for out in (straight.out, resumed.out) for line in out.splitlines() if row in line}
    assert of_both


def test_a_run_that_diverges_is_stopped_before_it_destroys_itself(runs):
  huge = 'OptimizerConfig.learning_rate=1e38'
  for _ in range(2):  # the same command resumes from before the step, and finds the same
    stopped = runs.run('diverged', huge, code=3)
    assert re.search(
      r'error: step 2: the loss is \S+ and the gradient norm (nan|inf); its update', stopped.err
    )
    assert 'the state after step 1 is saved' in stopped.err and runs.checkpoints('diverged') == {'1'}
    assert len(runs.losses('diverged')) == 1 and np.isfinite(runs.losses('diverged')).all()
  left = json.loads((runs.folder / 'diverged' / 'diverged' / 'step-000002.json').read_text())
  assert left['measured']['grad_norm'] is None and left['step'] == 2
  assert sum(sample['tokens'] for sample in left['samples']) <= 200
  skipping = ("TrainConfig.on_divergence='skip'", 'TrainConfig.max_skipped_steps=2')
  skipped = runs.run('diverged', huge, *skipping, code=3)
  assert 'error: step 4: the loss is' in skipped.err and 'as in the 2 steps before it' in skipped.err
  records = runs.records('diverged')
  assert [(r['step'], r['skipped'], r['grad_norm'] is None) for r in records] == [
    (1, 0, False), (2, 1, True), (3, 1, True), (4, 1, True)
  ]  # fmt: skip
  assert len({r['lr'] for r in records[1:]}) == 1  # the schedule goes by updates
  assert '3 steps whose loss or gradients were not finite' in skipped.out
  assert '4' in runs.checkpoints('diverged')


def test_killed_run_goes_on_from_its_last_whole_checkpoint(runs, straight):
  often = 'TrainConfig.checkpoint_every=2'
  workdir = runs.folder / 'killed'
  killed = runs.start(runs.arguments('killed', often), ('SIGKILL', '7', str(workdir / 'checkpoints' / '6')))
  finish(killed, -signal.SIGKILL)
  with (workdir / 'metrics.jsonl').open('a') as metrics:
    metrics.write('{"step": 8, "loss": 3.')
  whole = workdir / 'checkpoints' / '6'
  shutil.copytree(whole, whole.with_name('8.orbax-checkpoint-tmp'))
  shutil.copytree(whole, whole.with_name('10')).joinpath('commit_success.txt').unlink()
  shutil.rmtree(shutil.copytree(whole, whole.with_name('12')) / 'data')
  whole.with_name('14').mkdir()
  resumed = runs.run('killed', often)
  assert 'after step 6' in resumed.err
  aside = re.findall(r'checkpoints/(\d+): this checkpoint is incomplete', resumed.err)
  assert set(aside) == {'10', '12', '14'}
  assert_goes_on(runs, 'killed')
  assert {'14', '15'} <= runs.checkpoints('killed')


def test_two_runs_never_share_a_workdir(runs, straight):
  go_on = runs.folder / 'go on'
  first = runs.start(runs.arguments('shared'), ('SIGTERM', '2', str(go_on)))
  metrics = runs.folder / 'shared' / 'metrics.jsonl'
  while not metrics.exists() or metrics.read_text().count('\n') < 2:
    assert first.poll() is None
    time.sleep(0.05)
  second = runs.run('shared', code=2)
  assert f'shared: process {first.pid} on ' in second.err and 'is writing there' in second.err
  go_on.touch()
  finish(first, 143)
  runs.run('shared')
  assert_goes_on(runs, 'shared')


def test_default_names_never_collide(tmp_path):
  path = tmp_path / 'runs' / 'tiny-20261201-120000'
  assert [new_folder(path).name for _ in range(3)] == [path.name, f'{path.name}-2', f'{path.name}-3']


@pytest.mark.long
def test_signals_save_and_exit(runs, straight):
  codes = {'SIGTERM': 143, 'SIGINT': 130, 'SIGINT SIGINT': 130}
  started = {names: runs.start(runs.arguments(names), (names, '4', '')) for names in codes}
  for names, code in codes.items():
    stopped = finish(started[names], code)
    name, *second = names.split()
    assert f'{name}: saving after the step that runs, or in 15 s at the latest' in stopped.err
    assert second or (f'stopped by {name}, saved' in stopped.out and 'of 4 steps' in stopped.out)
    assert runs.checkpoints(names) == {'4'}
  runs.run('SIGTERM')
  assert_goes_on(runs, 'SIGTERM')


# Runs train.py and compiles for ever once a step is done, when a SIGTERM comes.
COMPILING = """
import os, signal, sys, time
import train
from repack_jax.training.step import TrainStep

step, *argv = sys.argv[1:]
update = TrainStep.update

def update_and_compile(self, state, *args):
  after = update(self, state, *args)
  if int(after[0].step) == int(step):
    def for_ever(*_):
      with self._compiling('for ever', object()):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)
    self.accumulate = for_ever
  return after

TrainStep.update = update_and_compile
sys.exit(train.main(argv))
"""


def test_a_compilation_does_not_eat_the_grace_time(runs, straight):
  """What was trained before it is saved; the run goes on from there."""
  process = runs.start(runs.arguments('grace', 'TrainConfig.grace_s=1.0'), ('3',), program=COMPILING)
  stopped = finish(process, 143)
  assert 'SIGTERM: saving after the step that runs, or in 1 s at the latest' in stopped.err
  assert 'SIGTERM: ends now; the state after step 3 is saved' in stopped.err
  assert runs.checkpoints('grace') == {'3'}
  runs.run('grace')
  assert_goes_on(runs, 'grace')


def test_sigterm_during_the_first_compilation(runs):
  smaller = ("ModelConfig.pattern='F'", 'ModelConfig.num_layers=1', 'TrainConfig.steps=5')
  dumps = runs.folder / 'dumps'
  process = runs.start(
    runs.arguments('compiling', *smaller), JAX_ENABLE_COMPILATION_CACHE='0', JAX_DUMP_IR_TO=str(dumps)
  )
  while not list(dumps.glob('*accumulate*')):  # written when a program is traced, before it is compiled
    assert process.poll() is None
    time.sleep(0.05)
  assert (runs.folder / 'compiling' / 'metrics.jsonl').read_text() == ''
  process.send_signal(signal.SIGTERM)
  finish(process, 143)
  assert len(runs.losses('compiling')) == 1 and runs.checkpoints('compiling') == {'1'}
  runs.run('compiling', *smaller)
  assert len(runs.losses('compiling')) == 5
