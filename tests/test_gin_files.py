"""Config files and overrides: what they load to, and the one message for each mistake."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import gin
import pytest
from messages import message_of as message

from repack_jax.checks import ConfigError
from repack_jax.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  RunConfig,
  SimulatorConfig,
  TrainConfig,
  gin_files,
  paths,
)
from repack_jax.data.lengths import Histogram, read_lengths
from repack_jax.data.sources import open_source
from repack_jax.kinds import KINDS, FullAttention, SlidingWindowAttention


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
  assert (run.train.steps, run.train.seed, run.data.seed, run.data.source) == (
    4, 2, 1, str(Path('a b').resolve()),
  )  # fmt: skip
  second = Path('second.gin')
  second.write_text('TrainConfig.seed = 5\n')
  assert gin_files.load(['run.gin', 'second.gin'], []).train == TrainConfig(steps=2, seed=5)


def test_include_is_found_beside_the_including_file(working_directory):
  folder = working_directory / 'configs'
  folder.mkdir()
  (folder / 'base.gin').write_text('TrainConfig.steps = 1\n')
  (folder / 'run.gin').write_text("include 'base.gin'\n")
  assert gin_files.load(['configs/run.gin'], []).train.steps == 1


def test_include_of_a_config_that_comes_with_the_package(working_directory):
  assert load("include 'clusters/h200.gin'\n").cluster.memory_bytes == 1.41e11
  (working_directory / 'clusters').mkdir()
  (working_directory / 'clusters/h200.gin').write_text('ClusterConfig.memory_bytes = 7\n')
  assert load("include 'clusters/h200.gin'\n").cluster.memory_bytes == 7


def test_configs_that_come_with_the_package_are_found_by_name(working_directory):
  paper = gin_files.load(['sim/paper_1f3s.gin'], [])
  assert paper.cluster.num_ranks == 32
  lengths = Path(paper.simulator.lengths)
  assert lengths.is_absolute() and lengths.is_file() and '..' not in lengths.parts
  (working_directory / 'sim').mkdir()
  assert gin_files.load(['sim/paper_1f3s.gin'], []) == paper  # a folder of that name hides nothing
  (working_directory / 'sim/paper_1f3s.gin').write_text('TrainConfig.steps = 7\n')
  assert gin_files.load(['sim/paper_1f3s.gin'], []).train.steps == 7
  with pytest.raises(ConfigError) as caught:
    gin_files.load(['clusters/h900.gin'], [])
  packaged = paths.packaged_configs() / 'clusters/h900.gin'
  assert str(caught.value) == (
    "clusters/h900.gin: no such config file; did you mean 'clusters/h200.gin'? "
    f'(tried {working_directory}/clusters/h900.gin and {packaged})'
  )


@pytest.fixture
def folders(working_directory):
  """A config in `there/`, and the current folder `here/`; `files` writes more."""
  for name in ('here', 'there/deep'):
    (working_directory / name).mkdir(parents=True)
  os.chdir(working_directory / 'here')
  return working_directory


def lengths_of(folder, text, *overrides):
  file = folder / 'there/run.gin'
  file.write_text(text)
  return gin_files.load([str(file)], list(overrides)).simulator.lengths


def test_a_path_is_looked_up_beside_its_file_and_then_in_the_current_folder(folders):
  text = "SimulatorConfig.lengths = 'x.csv'\n"
  (folders / 'here/x.csv').write_text('')
  assert lengths_of(folders, text) == str(folders / 'here/x.csv')
  (folders / 'there/x.csv').write_text('')
  assert lengths_of(folders, text) == str(folders / 'there/x.csv')
  assert lengths_of(folders, text, "SimulatorConfig.lengths='x.csv'") == str(folders / 'here/x.csv')
  (folders / 'here/x.csv').unlink()
  assert not os.path.exists(lengths_of(folders, text, "SimulatorConfig.lengths='x.csv'"))
  assert lengths_of(folders, "SimulatorConfig.lengths = '../there/deep/../x.csv'") == str(
    folders / 'there/x.csv'
  )
  assert lengths_of(folders, f"SimulatorConfig.lengths = '{folders}/there/x.csv'") == str(
    folders / 'there/x.csv'
  )


def test_a_path_behind_an_include_or_a_macro_belongs_to_the_file_it_is_written_in(folders):
  (folders / 'there/deep/base.gin').write_text("file = 'x.csv'\nSimulatorConfig.lengths = %file\n")
  for name in ('there/deep', 'there', 'here'):
    (folders / name / 'x.csv').write_text('')
  included = "include 'deep/base.gin'\n"
  assert lengths_of(folders, included) == str(folders / 'there/deep/x.csv')
  assert lengths_of(folders, included + "file = 'x.csv'\n") == str(folders / 'there/x.csv')
  assert lengths_of(folders, included, "file='x.csv'") == str(folders / 'here/x.csv')


def test_paths_through_links_and_the_home_folder(folders, monkeypatch):
  monkeypatch.setenv('HOME', str(folders / 'there'))
  (folders / 'there/x.csv').write_text('')
  assert lengths_of(folders, "SimulatorConfig.lengths = '~/x.csv'") == str(folders / 'there/x.csv')
  (folders / 'here/docs.jsonl').symlink_to(folders / 'there/x.csv')
  run = gin_files.load([], ["DataConfig.source='docs.jsonl'"])
  assert run.data.source == str(folders / 'here/docs.jsonl')  # a link keeps its name, whose suffix counts
  (folders / 'here/link').symlink_to(folders / 'there/deep')
  found = lengths_of(folders, '', "SimulatorConfig.lengths='link/../x.csv'")
  assert found == str(folders / 'there/x.csv')


def test_words_that_are_no_paths_stay(folders):
  (folders / 'here/stdlib').mkdir()
  assert gin_files.load([], ["DataConfig.source='stdlib'"]).data.source == 'stdlib'
  assert gin_files.load([], ["DataConfig.source='./stdlib'"]).data.source == str(folders / 'here/stdlib')
  assert lengths_of(folders, "SimulatorConfig.lengths = ''\n") == ''


def test_a_file_that_is_nowhere_is_a_mistake_where_it_is_opened(folders):
  file = folders / 'there/run.gin'
  file.write_text("SimulatorConfig.lengths = 'no.csv'\nDataConfig.source = '../docs'\n")
  run = gin_files.load([str(file)], [])
  assert message(read_lengths, run.simulator.lengths) == (
    f"{file}:1: SimulatorConfig.lengths = 'no.csv': no such file or folder "
    f'(tried {folders}/there/no.csv and {folders}/here/no.csv); name a file of lengths'
  )
  assert message(open_source, run.data).startswith(
    f"{file}:2: DataConfig.source = '../docs': no such file or folder (tried {folders}/docs); set DataConfig."
  )
  run = gin_files.load([], ["SimulatorConfig.lengths='no.csv'"])
  assert message(read_lengths, run.simulator.lengths) == (
    f"--set: SimulatorConfig.lengths = 'no.csv': no such file or folder (tried {folders}/here/no.csv); "
    'name a file of lengths'
  )
  assert copy.deepcopy(run) == run
  (folders / 'here/no.csv').write_text('low,high,count\n1,2,3\n')
  assert isinstance(read_lengths(run.simulator.lengths), Histogram)  # it has come in the meantime


def test_resolved_means_the_same_in_any_folder(folders):
  for name in ('here/docs', 'there/docs'):
    (folders / name).mkdir()
  for name in ('here/x.csv', 'there/x.csv'):
    (folders / name).write_text('')
  for lengths in ('x.csv', 'no.csv'):
    settings = ["DataConfig.source='docs'", f"SimulatorConfig.lengths='{lengths}'"]
    os.chdir(folders / 'here')
    run = gin_files.load([], settings)
    (folders / 'there/resolved.gin').write_text(gin_files.resolved(run), encoding='utf-8')
    for name in ('here', 'there', 'there/deep'):
      os.chdir(folders / name)
      assert gin_files.load([str(folders / 'there/resolved.gin')], []) == run


def test_resolved_writes_a_relative_path_as_what_it_means_here(folders):
  (folders / 'here/x.csv').write_text('')
  text = gin_files.resolved(RunConfig(simulator=SimulatorConfig(lengths='x.csv')))
  assert lengths_of(folders, text) == str(folders / 'here/x.csv')


def test_settings_of_layer_kinds():
  text = 'SlidingWindowAttention.window_tokens = 4096\nFullAttention:\n  rope_theta = 0\n'
  model = load(text, 'SlidingWindowAttention.window_tokens=64').model
  bound = (FullAttention(rope_theta=0), SlidingWindowAttention(window_tokens=64))
  assert model.kinds[:2] == bound and model.kinds[2:] == ModelConfig().kinds[2:]
  assert model.kind('S').window_tokens == 64 and model.kind('F').rope_theta == 0
  assert (
    model.with_kind(FullAttention())
    == load(text, 'FullAttention.rope_theta=10000', 'SlidingWindowAttention.window_tokens=64').model
  )
  resolved = gin_files.resolved(RunConfig(model=model))
  assert 'FullAttention.rope_theta = 0\n' in resolved and 'kinds' not in resolved


def test_sections_are_all_configs_that_hold_fields():
  names = [type(section).__name__ for section in RunConfig().sections()]
  assert names == [
    'ClusterConfig', 'ModelConfig', *(kind.__name__ for kind in KINDS.values()), 'DataConfig',
    'PlannerConfig', 'OptimizerConfig', 'TrainConfig', 'SimulatorConfig',
  ]  # fmt: skip


def test_a_model_has_one_object_of_each_kind_in_order():
  assert [kind.letter for kind in ModelConfig().kinds] == list(KINDS)
  for kinds in ((), (SlidingWindowAttention(), FullAttention()), (FullAttention(),)):
    assert 'must be one object of each of FullAttention, SlidingWindowAttention, Chunked' in message(
      lambda kinds=kinds: ModelConfig(kinds=kinds)
    )
  assert 'must be of type tuple of LayerKind' in message(lambda: ModelConfig(kinds=(3,)))

  class Mine(FullAttention):
    pass

  assert 'Mine is not in repack_jax.kinds.KINDS' in message(ModelConfig().with_kind, Mine())
  with pytest.raises(KeyError):
    ModelConfig().kind('X')


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
      model=ModelConfig(qk_norm=False, norm_eps=1 / 3).with_kind(SlidingWindowAttention(1, 7)),
      data=DataConfig(source='/it\'s a "path"\\ with\n\u00e9 and \u2028', seed=2**40),
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
    (
      'ModelConfig.window_tokens = 64',
      '1: ModelConfig.window_tokens: no such field; did you mean SlidingWindowAttention.window_tokens?',
    ),
    (
      'ModelConfig.rope_theta = 64',
      'did you mean FullAttention.rope_theta or SlidingWindowAttention.rope_theta or ',
    ),
    (
      'ModelConfig.kinds = 3',
      'run.gin:1: ModelConfig.kinds: not bound as a whole; bind the fields of FullAttention or Sliding',
    ),
    ("FullAttention.letter = 'X'", 'run.gin:1: FullAttention.letter: no such field; choose one of rope_'),
    (
      "ModelConfig.pattern = 'FX'",
      "run.gin:1: ModelConfig.pattern = 'FX': use only the letters F (full), S (sliding-window), C (chunked)",
    ),
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
    ("include 'gone.gin'", "run.gin:1: include 'gone.gin': no such config file; give the path of a .gin "),
    ("include 'runn.gin'", "run.gin:1: include 'runn.gin': no such config file; did you mean 'run.gin'?"),
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
    (
      'SlidingWindowAttention.window_tokens=0',
      '--set: SlidingWindowAttention.window_tokens = 0: must be at least 1',
    ),
    ('window_tokens=3', 'a field needs its class; write SlidingWindowAttention.window_tokens'),
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
    (
      'PlannerConfig.capacity_tokens=134217728',
      '--set: PlannerConfig.capacity_tokens = 134217728: the stream of a group, up to SP16 here, would have '
      '2147483648 slots, and its positions are int32 on the devices: at most 2147483647. Lower it, or',
    ),
    ('ClusterConfig.exchange_meets=all', "exchange_meets='all'"),
    ("ClusterConfig.exchange_meets='all'", "exchange_meets = 'all': choose one of span, group"),
    ('ClusterConfig.peer_latency_s=-1', 'ClusterConfig.peer_latency_s = -1: must be at least 0'),
    ('ClusterConfig.parameter_inter_node_bytes_per_s=-1', 'inter_node_bytes_per_s = -1: must be at least 0'),
    ('ClusterConfig.attention_curve=((8, 1.0), (2, 0.5))', 'must be pairs of tokens, ascending from 1 on'),
    ('ClusterConfig.attention_curve=(512, 0.6)', 'must be of type tuple of tuple of float'),
    ('PlannerConfig.capacity_step_tokens=-1', 'capacity_step_tokens = -1: must be at least 0'),
  ],
)
def test_mistakes_in_an_override(override, expected):
  assert expected in message_of('n = 3\nTrainConfig.seed = %n', override)


def test_the_longest_stream_that_a_device_can_count():
  """One slot a rank fewer than the error's, or narrower groups."""
  for overrides in (
    ['PlannerConfig.capacity_tokens=134217727'],
    ['PlannerConfig.capacity_tokens=134217728', 'PlannerConfig.max_sp_degree=8'],
  ):
    run = gin_files.load([], overrides)
    assert run.sp_degrees[-1] * run.planner.capacity_tokens < 2**31


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
  code = (
    "import sys; sys.modules['jax'] = None; from repack_jax.config import gin_files; gin_files.load([], [])"
  )
  root = Path(gin_files.__file__).parents[2]
  subprocess.run([sys.executable, '-c', code], check=True, env=os.environ | {'PYTHONPATH': str(root)})
