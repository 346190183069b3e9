"""Config files and overrides: what they load to, and the one message for each mistake."""

import os
import subprocess
import sys
from pathlib import Path

import gin
import pytest

from repack_jax.checks import ConfigError
from repack_jax.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig, gin_files


def load(text, *overrides):
  Path('run.gin').write_text(text, encoding='utf-8')
  return gin_files.load(['run.gin'], list(overrides))


def message_of(text, *overrides):
  with pytest.raises(ConfigError) as caught:
    load(text, *overrides)
  assert type(caught.value) is ConfigError
  message = str(caught.value)
  assert '\n' not in message and 'Traceback' not in message and 'In call to' not in message
  return message


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  return tmp_path


def test_nothing_given_is_the_defaults():
  assert gin_files.load([], []) == RunConfig()


def test_later_bindings_win():
  Path('base.gin').write_text('TrainConfig.steps = 1\nTrainConfig.seed = 1\nDataConfig.seed = 1\n')
  run = load(
    "include 'base.gin'\nTrainConfig.steps = 2\nTrainConfig.seed = 2\n",
    'TrainConfig.steps = 3',
    "DataConfig.source='a b'",
    'TrainConfig.steps=4',
  )
  assert (run.train.steps, run.train.seed, run.data.seed, run.data.source) == (4, 2, 1, 'a b')
  second = Path('second.gin')
  second.write_text('TrainConfig.seed = 5\n')
  assert gin_files.load(['run.gin', 'second.gin'], []).train == TrainConfig(steps=2, seed=5)


def test_include_is_found_beside_the_including_file(working_directory):
  folder = working_directory / 'configs'
  folder.mkdir()
  (folder / 'base.gin').write_text('TrainConfig.steps = 1\n')
  (folder / 'run.gin').write_text("include 'base.gin'\n")
  assert gin_files.load(['configs/run.gin'], []).train.steps == 1


def test_blocks_and_macros():
  text = 'n = 20\nTrainConfig:\n  steps = %n  # of the run\n  seed = 3\n'
  assert load(text).train == TrainConfig(steps=20, seed=3)
  assert load(text, 'n=5').train.steps == 5
  assert load(text, 'TrainConfig.steps=6').train.steps == 6


def test_global_state_is_cleared_before_and_after():
  gin.parse_config('TrainConfig.steps = 77')
  assert gin_files.load([], []).train.steps == TrainConfig().steps
  load('TrainConfig.steps = 5')
  assert gin.config_str().strip() == ''
  message_of('TrainConfig.steps = 5\nTrainConfig.nope = 1')
  assert gin.config_str().strip() == ''


@pytest.mark.parametrize(
  'run',
  [
    RunConfig(),
    RunConfig(
      model=ModelConfig(qk_norm=False, rope_theta=1, norm_eps=1 / 3),
      data=DataConfig(source='it\'s a "path"\\ with\n\u00e9 and \u2028', seed=2**40),
      optimizer=OptimizerConfig(learning_rate=1e-300, eps=1.7976931348623157e308),
    ),
  ],
)
def test_resolved_round_trip(run):
  text = gin_files.resolved(run)
  assert load(text) == run
  assert text.startswith('# ')
  assert gin_files.resolved(load(text)) == text
  assert load(text, 'TrainConfig.steps=5').train.steps == 5


def test_resolved_refuses_what_gin_cannot_hold():
  run = RunConfig(model=ModelConfig(init_std=0.5))
  object.__setattr__(run.model, 'init_std', float('inf'))
  with pytest.raises(ConfigError, match=r'ModelConfig.init_std = inf: must be a finite number'):
    gin_files.resolved(run)


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('\nTrainConfig.stepz = 20', "run.gin:2: TrainConfig.stepz: no such field; did you mean 'steps'?"),
    ('TrainConfg.steps = 20', "run.gin:1: TrainConfg: no such class; did you mean 'TrainConfig'?"),
    ('Xyzzy.steps = 20', 'run.gin:1: Xyzzy: no such class; choose one of ClusterConfig, '),
    ('TrainConfg:\n  steps = 20', "run.gin:1: TrainConfg: no such class; did you mean 'TrainConfig'?"),
    ("TrainConfig.mode = 'a'", 'TrainConfig.mode: no such field; did you mean PlannerConfig.mode?'),
    ("\n\nTrainConfig.steps = '20'", "run.gin:3: TrainConfig.steps = '20': must be of type int"),
    ('TrainConfig.steps = 0', 'run.gin:1: TrainConfig.steps = 0: must be at least 1'),
    ('TrainConfig.steps = @TrainConfig()', 'run.gin:1: TrainConfig.steps = @TrainConfig(): must be of type'),
    ('n = 0\nTrainConfig.steps = %n', 'run.gin:2: TrainConfig.steps = 0: must be at least 1'),
    ('n = 1\nTrainConfig.steps = %m', 'run.gin:2: %m: no such macro; '),
    ('n = %n\nTrainConfig.steps = %n', 'macros %n: one of them refers to itself'),
    ('steps = 3', 'run.gin:1: steps: a field needs its class; write TrainConfig.steps'),
    ('TrainConfig = 3', 'run.gin:1: TrainConfig: a class needs a field; write TrainConfig.field = value'),
    ('mine = 3', 'run.gin:1: mine: nothing uses this macro; remove it'),
    ('a/TrainConfig.steps = 3', "run.gin:1: a/TrainConfig: scopes are not used here; remove 'a/'"),
    ('TrainConfig.steps = %a/n', 'run.gin:1: %a/n: scopes are not used here'),
    ('import os', 'run.gin:1: import: a config only binds fields'),
    ('TrainConfig.seed = 1\n\nTrainConfig.seed = 2', 'run.gin:3: TrainConfig.seed: also bound in line 1'),
    ('# a\nTrainConfig.steps 3', 'run.gin:2: cannot read `TrainConfig.steps 3`: a line is Class.field ='),
    ('TrainConfig.steps = ten', 'cannot read `TrainConfig.steps = ten`: write a number of type int'),
    ('TrainConfig.steps = (3', 'run.gin:1: cannot read `TrainConfig.steps = (3`: write a number of type int'),
    ('ModelConfig.qk_norm = true', 'cannot read `ModelConfig.qk_norm = true`: write True or False'),
    ('PlannerConfig.mode = repack  # a', "quote the string: PlannerConfig.mode='repack'"),
    ("PlannerConfig.mode = 'repack", "quote the string: PlannerConfig.mode='repack'"),
    ('PlannerConfig.mod = repack', "run.gin:1: PlannerConfig.mod: no such field; did you mean 'mode'?"),
    ('  TrainConfig.seed = 3\n TrainConfig.steps = 3', 'run.gin:2: cannot read `TrainConfig.steps = 3`: '),
    ('TrainConfig.steps = ' + '(' * 5000, 'run.gin:1: cannot read `TrainConfig.steps = ((('),
    ("include 'gone.gin'", "run.gin:1: include 'gone.gin': there is no file 'gone.gin'; correct the path"),
  ],
)  # fmt: skip
def test_mistakes_in_a_file(text, expected):
  assert expected in message_of(text)


@pytest.mark.parametrize(
  ('override', 'expected'),
  [
    ('steps', '--set steps: write Class.field=value, for example --set TrainConfig.steps=20'),
    ('TrainConfig.steps=', '--set TrainConfig.steps=: write Class.field=value'),
    ('=3', '--set =3: write Class.field=value'),
    ('TrainConfig.steps=3\nTrainConfig.seed=4', 'write Class.field=value'),
    ("include 'a=b'", 'write Class.field=value'),
    ('steps=3', '--set steps=3: steps: a field needs its class; write TrainConfig.steps'),
    ('nn=3', "--set nn=3: nn: no such macro; did you mean 'n'?"),
    ('PlannerConfig.mode=repack', "PlannerConfig.mode='repack'"),
    ('DataConfig.source=/data/x', "DataConfig.source='/data/x'"),
    ('TrainConfig.stepz=3', "--set: TrainConfig.stepz: no such field; did you mean 'steps'?"),
    ('trainconfig.steps=3', "--set: trainconfig: no such class; did you mean 'TrainConfig'?"),
    ('TrainConfig.steps=0', '--set: TrainConfig.steps = 0: must be at least 1'),
    ('TrainConfig.steps=1e3', '--set: TrainConfig.steps = 1000.0: must be of type int'),
    ('ModelConfig.num_experts=7', '--set: ModelConfig.num_experts = 7: must be a multiple of'),
    ('ClusterConfig.nodes=3', '--set: ClusterConfig.nodes = 3: must be a power of two'),
    ('ClusterConfig.nodes=8', '--set: ClusterConfig.nodes = 8: 8 nodes x 8 ranks are more than the 32'),
    ('ClusterConfig.inter_node_bytes_per_s=0', 'ClusterConfig.inter_node_bytes_per_s = 0: must be above 0'),
    ('ClusterConfig.intra_node_latency_s=-1', 'intra_node_latency_s = -1: must be at least 0'),
    ('ClusterConfig.prefetch_layers=0.5', 'ClusterConfig.prefetch_layers = 0.5: must be of type int'),
    ('PlannerConfig.capacity_step_tokens=-1', 'capacity_step_tokens = -1: must be at least 0'),
  ],
)
def test_mistakes_in_an_override(override, expected):
  assert expected in message_of('n = 3\nTrainConfig.seed = %n', override)


@pytest.mark.parametrize(
  'text',
  [
    "include 'base.gin'\ninclude 'base.gin'",
    "TrainConfig.seed = 3\ninclude 'base.gin'",
    "include 'nested.gin'",
  ],
)
def test_one_include_in_front(text):
  Path('base.gin').write_text('TrainConfig.steps = 7\n')
  Path('nested.gin').write_text("include 'base.gin'\n")
  assert "include 'base.gin': a file includes at most one other" in message_of(text)


def test_mistake_in_an_included_file_names_that_file():
  Path('base.gin').write_text('\nTrainConfig.steps = 0\n')
  assert message_of("include 'base.gin'").startswith('base.gin:2: TrainConfig.steps = 0: ')


def test_unreadable_files():
  Path('tiny.gin').write_text('TrainConfig.steps = 7\n')
  Path('bytes.gin').write_bytes(b'\xff\xfe\x00')
  os.mkdir('folder.gin')
  for name, expected in {
    'tinny.gin': "tinny.gin: no such config file; did you mean 'tiny.gin'?",
    'nowhere/xyz.gin': 'nowhere/xyz.gin: no such config file; give the path of a .gin file',
    'bytes.gin': 'bytes.gin: the config file is not UTF-8 text',
    'folder.gin': 'folder.gin: cannot read the config file',
  }.items():
    with pytest.raises(ConfigError) as caught:
      gin_files.load([name], [])
    assert str(caught.value).startswith(expected)


def test_imports_without_jax():
  code = "import sys; sys.modules['jax'] = None; from repack_jax import gin_files; gin_files.load([], [])"
  root = Path(gin_files.__file__).parents[1]
  subprocess.run([sys.executable, '-c', code], check=True, env=os.environ | {'PYTHONPATH': str(root)})
