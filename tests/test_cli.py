"""The command line of `train.py`: help, dry run, and one message with exit code 2 for each mistake."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import train
from repack_jax.config import RunConfig
from repack_jax.config.gin_files import load, resolved
from repack_jax.data.jsonl import JsonlSource
from repack_jax.parallel import mesh
from repack_jax.training.checkpoints import Checkpoints

ROOT = Path(__file__).resolve().parents[1]
MINI = str(ROOT / 'tests' / 'mini.gin')
DOCUMENTS = 'docs.jsonl'


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
  """Each test in an empty folder, on the devices that the suite has started."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(mesh, 'start_devices', lambda cluster: None)
  return tmp_path


def write_documents(sizes, broken_line: int | None = None) -> str:
  lines = [json.dumps({'text': 'abcd' * (size // 4)}) for size in sizes]
  if broken_line is not None:
    lines[broken_line] = '{"text": "no end'
  Path(DOCUMENTS).write_text('\n'.join(lines))
  return f"DataConfig.source='{DOCUMENTS}'"


def arguments(*settings: str, config: str = MINI) -> list[str]:
  return ['--config', config, *(part for setting in settings for part in ('--set', setting))]


def json_lines(path: Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def error_of(capsys, argv: list[str]) -> str:
  """The one message of a run that a mistake ends."""
  capsys.readouterr()
  assert train.main(argv) == 2
  out, err = capsys.readouterr()
  errors = [line for line in err.splitlines() if line.startswith('error: ')]
  assert len(errors) == 1 and err.endswith(f'{errors[0]}\n') and 'Traceback' not in out + err
  return errors[0].removeprefix('error: ')


def subprocess_without_jax(argv: list[str]) -> subprocess.CompletedProcess:
  code = "import sys; sys.modules['jax'] = None; import train; sys.exit(train.main(sys.argv[1:]))"
  return subprocess.run(
    [sys.executable, '-c', code, *argv],
    env=os.environ | {'PYTHONPATH': str(ROOT)}, capture_output=True, text=True, timeout=60,
  )  # fmt: skip


def test_help_and_config_mistakes_do_not_start_jax():
  shown = subprocess_without_jax(['--help'])
  assert shown.returncode == 0 and shown.stderr == ''
  for part in (
    '--config FILE',
    '--set CLASS.FIELD=VALUE',
    '--workdir DIR',
    '--dry-run',
    'Exit codes: 0 done',
  ):
    assert part in shown.stdout
  wrong = subprocess_without_jax(arguments('TrainConfig.stepz=3'))
  assert (wrong.returncode, wrong.stdout) == (2, '')
  assert wrong.stderr == "error: --set: TrainConfig.stepz: no such field; did you mean 'steps'?\n"


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    (['TrainConfig.steps=1.5'], 'TrainConfig.steps = 1.5: must be of type int'),
    (['PlannerConfig.mode=repack'], "quote the string, and the whole for the shell"),
    (["PlannerConfig.mode='wide'"], "mode = 'wide': choose one of static, parents, parents_solo"),
    (['TrainConfig.steps'], 'write Class.field=value'),
    (['ModelConfig.num_heads=3', 'ModelConfig.num_kv_heads=3'], 'use a multiple of 4 to reach SP4'),
    (['DataConfig.max_document_tokens=300', 'DataConfig.batch_tokens=300'], 'the widest is SP4 (4 ranks'),
    (['DataConfig.max_document_tokens=201'], 'must be at least max_document_tokens = 201'),
    (['ModelConfig.num_experts=3'], 'must be a multiple of ClusterConfig.ranks_per_node = 2'),
    (['ClusterConfig.nodes=3'], 'ClusterConfig.nodes = 3: must be a power of two'),
    (['ClusterConfig.nodes=32'], 'set ClusterConfig.domains for more ranks'),
    (["PlannerConfig.mode='static'", 'PlannerConfig.static_sp_degree=1'], 'must be one of (1, 2, 4)'),
  ],
)  # fmt: skip
def test_mistakes_in_the_config(capsys, settings, expected):
  assert expected in error_of(capsys, arguments(*settings))
  assert expected in error_of(capsys, [*arguments(*settings), '--dry-run'])
  assert list(Path().iterdir()) == []


def test_missing_config_file_and_unknown_flag(capsys):
  Path('mini.gin').write_text('')
  assert "did you mean 'mini.gin'?" in error_of(capsys, arguments(config='minni.gin'))
  with pytest.raises(SystemExit) as caught:
    train.main(['--steps', '3'])
  assert caught.value.code == 2
  assert 'unrecognized arguments: --steps 3' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    (["DataConfig.source='nowhere'"], "DataConfig.source = 'nowhere': no such file or folder"),
    (["DataConfig.source='empty'"], "DataConfig.file_glob = '**/*': no file there matches"),
    (["DataConfig.source='image.png'"], "/image.png': not a source of documents"),
    (['ClusterConfig.domains=16'], '16 x 2 x 2 = 64 ranks, but JAX sees 32 cpu devices'),
  ],
)
def test_mistakes_found_while_setting_up(capsys, settings, expected):
  """Nothing is written, no workdir either."""
  source = write_documents([40] * 8)
  Path('empty').mkdir()
  Path('image.png').write_bytes(b'')
  before = sorted(Path().rglob('*'))
  assert expected in error_of(capsys, arguments(source, *settings))
  assert sorted(Path().rglob('*')) == before


def test_devices_that_are_not_there():
  process = subprocess.run(
    [sys.executable, str(ROOT / 'train.py'), *arguments("ClusterConfig.platform='tpu'")],
    capture_output=True, text=True, timeout=120, env=os.environ | {'JAX_PLATFORMS': ''},
  )  # fmt: skip
  assert process.returncode == 2, process.stderr
  errors = [line for line in process.stderr.splitlines() if line.startswith('error: ')]
  assert len(errors) == 1 and 'Traceback' not in process.stderr
  assert "ClusterConfig.platform = 'tpu': JAX finds no such devices here" in errors[0]


def test_documents_that_no_policy_takes(capsys):
  source = write_documents([40, 40, 160])
  policy = "DataConfig.long_documents='error'"
  message = error_of(capsys, [*arguments(source, policy), '--workdir', 'run'])
  assert message.startswith(
    f'{Path(DOCUMENTS).resolve()}:3: 160 tokens, more than DataConfig.max_document_tokens = 120'
  )


def test_bad_line_is_found_before_anything_is_written(capsys):
  source = write_documents([100] * 10, broken_line=7)
  message = error_of(capsys, [*arguments(source), '--workdir', 'run'])
  assert message.startswith(f'{Path(DOCUMENTS).resolve()}:8: not JSON (')
  assert not Path('run').exists()


def test_document_that_changes_in_the_middle_of_a_run_loses_nothing(capsys, monkeypatch):
  source = write_documents([100] * 10)
  few = (source, "ModelConfig.pattern='S'", 'ModelConfig.num_layers=1', 'PlannerConfig.lookahead_steps=1')
  argv = [*arguments(*few, 'TrainConfig.steps=12'), '--workdir', 'run']
  read, reads = JsonlSource.read, itertools.count()

  def read_and_change(*args):
    if next(reads) == 6:
      write_documents([100] * 9 + [96])
    return read(*args)

  monkeypatch.setattr(JsonlSource, 'read', read_and_change)
  message = error_of(capsys, argv)
  assert message.startswith(
    f'{Path(DOCUMENTS).resolve()}:10: changed while the run was on; restore it and resume'
  )
  trained = len(json_lines(Path('run/metrics.jsonl')))
  assert trained >= 1
  checkpoints = Checkpoints(Path('run'), 2)
  assert checkpoints.latest_step == trained
  checkpoints.close()
  assert 'its samples (10 of 996 tokens in all' in error_of(capsys, argv)
  write_documents([100] * 10)
  assert train.main(argv) == 0
  assert [record['step'] for record in json_lines(Path('run/metrics.jsonl'))] == list(range(1, 13))


def test_workdir_of_another_run_and_workdir_that_is_none(capsys):
  source = write_documents([40] * 8)
  Path('run').mkdir()
  Path('run/resolved.gin').write_text(resolved(load([MINI], [source, 'ModelConfig.d_model=32'])))
  argv = [*arguments(source), '--workdir', 'run']
  assert 'ModelConfig.d_model = 16: the run in run has 32' in error_of(capsys, argv)
  window = 'SlidingWindowAttention.window_tokens=32'
  Path('run/resolved.gin').write_text(resolved(load([MINI], [source, window])))
  assert 'SlidingWindowAttention.window_tokens = 16: the run in run has 32' in error_of(capsys, argv)
  cosine, steps = "OptimizerConfig.schedule='cosine'", 'TrainConfig.steps=5'
  for before, now, message in (
    (
      ['OptimizerConfig.beta1=0.5'],
      [],
      'OptimizerConfig.beta1 = 0.9: the run in run has 0.5. Resume it with',
    ),
    (
      ['TrainConfig.seed=1'],
      [],
      'TrainConfig.seed = 0: the run in run has 1. Resume it with the same value, or',
    ),
    (
      [cosine, steps],
      [cosine],
      'TrainConfig.steps = 15: the run in run has 5, which its learning rates follow.',
    ),
  ):
    Path('run/resolved.gin').write_text(resolved(load([MINI], [source, *before])))
    found = error_of(capsys, [*arguments(source, *now), '--workdir', 'run'])
    assert message in found and found.rstrip().endswith('say --allow-change')
  Path('run/resolved.gin').write_text('ModelConfig.d_mo')
  assert 'run/resolved.gin: cannot be read back' in error_of(capsys, argv)
  Path('file').write_text('mine')
  argv = [*arguments(source), '--workdir', 'file']
  assert '--workdir file: cannot be written' in error_of(capsys, argv)
  assert Path('file').read_text() == 'mine'


def test_damaged_checkpoint(capsys):
  source = write_documents([40] * 8)
  small = (source, "ModelConfig.pattern='S'", 'ModelConfig.num_layers=1', 'TrainConfig.steps=1')
  argv = [*arguments(*small), '--workdir', 'run']
  assert train.main(argv) == 0
  Path('run/metrics.jsonl').unlink()
  capsys.readouterr()
  assert train.main(argv) == 0  # without its records too
  assert 'all 1 steps are done: nothing to do' in capsys.readouterr().out
  for file in Path('run/checkpoints/1/state').rglob('d/*'):
    if file.is_file():
      file.write_bytes(file.read_bytes()[:10])
  assert 'run/checkpoints/1: this checkpoint' in error_of(capsys, argv)


def test_dry_run_shows_all_and_writes_nothing(capsys):
  source = write_documents([100, 60, 32] * 4)
  before = sorted(Path().rglob('*'))
  assert train.main([*arguments(source), '--dry-run']) == 0
  out = capsys.readouterr().out
  assert resolved(load([MINI], [source])) in out
  expected = ('parameters: ', 'documents: 12', 'total_tokens: 768', 'first batch: ', 'mode solve, ',
              'parent SP', 'parameters_bytes: ', 'optimizer_bytes: ', 'gradients_bytes: ',
              'activations_and_buffers_bytes: ')  # fmt: skip
  for part in expected:
    assert part in out
  buffers = out.split('activations_and_buffers_bytes: ')[1].split(' a rank')[0]
  assert int(buffers.replace(',', '')) > 100_000
  assert sorted(Path().rglob('*')) == before


def test_default_config_is_loadable_and_resolves():
  assert load([str(ROOT / 'configs' / 'tiny_cpu.gin')], []).cluster.num_ranks == 16
  assert load([], []) == RunConfig()
