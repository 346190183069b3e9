"""The commands that need no devices, repack-plan and repack-simulate, as a user runs them."""

import gzip
import importlib
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from repack_jax.commands import command_line

ROOT = Path(__file__).resolve().parents[1]
PAPER = str(ROOT / 'configs/sim/paper_1f3s.gin')
TINY = str(ROOT / 'configs/tiny_cpu.gin')
MODES = {'static', 'parents', 'redistribute', 'repack', 'solve, no solo', 'parents_solo', 'solve', 'bound'}


def command(name: str):
  return importlib.import_module(f'repack_jax.commands.{name}')


def shown(capsys, name: str, *args: str) -> str:
  command(name).main(args)
  return capsys.readouterr().out


def error_of(capsys, name: str, *args: str) -> str:
  """The one line of a mistake, which must end with exit code 2 and no traceback."""
  with pytest.raises(SystemExit) as end:
    command_line.run(lambda: command(name).main(args))
  assert end.value.code == 2
  lines = capsys.readouterr().err.strip().splitlines()
  assert not any('Traceback' in line for line in lines)
  return lines[-1]


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
  """Each test in an empty folder: a config finds its own files."""
  monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize('name', ['plan', 'simulate'])
def test_help_says_what_to_type_and_where_files_are_found(name, capsys):
  with pytest.raises(SystemExit) as end:
    command(name).main(['--help'])
  shown = ' '.join(capsys.readouterr().out.split())
  assert end.value.code == 0 and shown.startswith(f'usage: repack-{name} ')
  for part in ('--config sim/paper_1f3s.gin', 'those that come with the package', 'then in the current one'):
    assert part in shown


def test_simulate_prints_and_writes_the_comparison(capsys, tmp_path):
  file = tmp_path / 'out.json'
  settings = ('--set', 'SimulatorConfig.steps=3', '--set', 'SimulatorConfig.seeds=2')
  text = shown(capsys, 'simulate', '--config', PAPER, *settings, '--json', str(file))
  result = json.loads(file.read_text())
  assert (result['seeds'], result['steps']) == (2, 6) and 0 <= result['wide_steps'] <= 6
  assert set(result['all']) >= MODES and (result['wide_steps'] == 0) == (not result['wide'])
  by_mode = result['all']
  for mode, of in by_mode.items():
    assert len(of['change_percent']) == 2 and (mode != 'parents' or of['change_percent'] == [0, 0])
  times = [by_mode[mode]['step_s'] for mode in ('parents', 'repack', 'solve, no solo', 'solve', 'bound')]
  assert times == sorted(times, reverse=True)
  assert by_mode['solve']['step_s'] <= by_mode['parents_solo']['step_s']
  assert set(result['programs']) == set(result['crossing_steps']) == MODES - {'bound'}
  assert all(1 <= programs <= 3 for programs in result['programs'].values())
  assert all(lost >= -1e-9 for lost in result['lost_points'].values())
  assert all(0.2 < of['mfu'] < 1 for of in by_mode.values())
  assert 'all steps: 6 steps' in text and 'simulated' in text and 'bound' in text
  (solved,) = (line for line in text.splitlines() if line.startswith('solve  '))
  assert f'{sum(by_mode["solve"]["change_percent"]) / 2:+.2f}%' in solved
  assert f'{by_mode["parents"]["step_s"]:.4f} s on average' in text


def test_simulate_is_deterministic(capsys):
  grouped = ('--set', 'DataConfig.group_long_documents=48000')
  args = ('--config', PAPER, '--set', 'SimulatorConfig.steps=2', '--set', 'SimulatorConfig.seeds=1')
  once, again, other = (shown(capsys, 'simulate', *args, *more) for more in (grouped, grouped, ()))
  assert once == again
  together = ', those from 48,000 tokens on together within 8 batches'
  assert together in once and together not in other


@pytest.mark.parametrize(
  'config',
  [
    'k_exaone_like',
    'llama4_like',
    'paper_1f3s+wikipedia',
    'paper_1f3s+ranks_64',
    'paper_1f3s+ranks_256',
    'paper_1f3s+mfu_59',
  ],
)
def test_every_simulated_config_runs(config, capsys):
  args = [arg for name in config.split('+') for arg in ('--config', str(ROOT / f'configs/sim/{name}.gin'))]
  settings = ('--set', 'SimulatorConfig.steps=1', '--set', 'SimulatorConfig.seeds=1')
  assert 'all steps: 1 steps' in shown(capsys, 'simulate', *args, *settings)


@pytest.mark.parametrize(
  'args, message',
  [
    (['--config', 'configs/sim/nothing.gin'], 'configs/sim/nothing.gin: no such config file'),
    (
      ['--config', PAPER, '--set', "SimulatorConfig.lengths='no.csv'"],
      "SimulatorConfig.lengths = 'no.csv': no such file or folder (tried ",
    ),
    (['--config', PAPER, '--set', 'ClusterConfig.inter_node_bytes_per_s=0'], 'must be above 0'),
    (['--config', TINY], 'SimulatorConfig.lengths'),
    (['--config', PAPER, '--json', 'no/such/folder/x.json'], 'cannot be written'),
    ([], 'the following arguments are required: --config'),
  ],
)
def test_simulate_explains_mistakes(args, message, capsys):
  assert message in error_of(capsys, 'simulate', *args)


LENGTHS = [3000, 900, 700, 500, 400, 300, 200, 100]


@pytest.fixture(params=['npy', 'npz', 'txt', 'jsonl', 'csv'])
def lengths_file(request, tmp_path) -> Path:
  path = tmp_path / f'lengths.{request.param}'
  if request.param == 'npy':
    np.save(path, np.array(LENGTHS))
  elif request.param == 'npz':
    np.savez(path, lengths=np.array(LENGTHS))
  elif request.param == 'txt':
    path.write_text('\n'.join(map(str, LENGTHS)))
  elif request.param == 'jsonl':
    path.write_text('\n'.join(json.dumps({'text': 'x' * length}) for length in LENGTHS))
  else:
    path.write_text('low,high,count\n100,3000,8\n')
  return path


def test_plan_reads_every_format(lengths_file, capsys, tmp_path):
  outputs = {name: tmp_path / f'out.{name}' for name in ('json', 'html', 'perfetto.gz')}
  text = shown(
    capsys, 'plan', str(lengths_file), '--config', TINY, '--json', str(outputs['json']),
    '--html', str(outputs['html']), '--perfetto', str(outputs['perfetto.gz']),
  )  # fmt: skip
  result = json.loads(outputs['json'].read_text())
  (plan,) = result['plans']
  if lengths_file.suffix != '.csv':
    assert sorted(plan['lengths'], reverse=True) == LENGTHS and '8 samples, 6100 tokens' in text
  held = [s for groups in (plan['children'], plan['solo']) for _, _, samples in groups for s in samples]
  assert sorted(held) == list(range(len(plan['lengths'])))
  assert [row['mode'] for row in result['modes']] == ['parents', 'repack', 'solve']
  assert result['modes'][-1]['over_baseline'] <= 1 and result['bound_s'] < result['modes'][-1]['step_s']
  assert plan['digest'] in text and 'bound' in text
  assert outputs['html'].read_text().lower().startswith('<!doctype html>')
  assert json.loads(gzip.decompress(outputs['perfetto.gz'].read_bytes()))['traceEvents']


@pytest.mark.parametrize(
  'content, message',
  [
    ('', 'holds no lengths'),
    ('5\n-3\n', "lengths.txt:2: '-3' must be at least 1"),
    ('5\n3.5\n', "lengths.txt:2: '3.5'"),
    ('abc\n', "lengths.txt:1: 'abc'"),
  ],
)
def test_plan_explains_bad_lengths(content, message, capsys, tmp_path):
  path = tmp_path / 'lengths.txt'
  path.write_text(content)
  assert message in error_of(capsys, 'plan', str(path), '--config', TINY)


@pytest.mark.parametrize(
  'args, message',
  [
    (['--batch', '2'], '--batch 2: '),
    (['--batch', '0'], '0: must be a whole number, 1 or more'),
    (['--html', 'no/such/folder/x.html'], 'cannot be written'),
    (['--set', "DataConfig.long_documents='error'"], 'DataConfig.max_document_tokens'),
    (
      ['--config', 'clusters/h900.gin'],
      "clusters/h900.gin: no such config file; did you mean 'clusters/h",
    ),
  ],
)
def test_plan_explains_mistakes(args, message, capsys, tmp_path):
  path = tmp_path / 'lengths.txt'
  path.write_text('5000\n100\n')
  assert message in error_of(capsys, 'plan', str(path), '--config', TINY, *args)


def test_plan_draws_every_rank_and_group(capsys, tmp_path):
  file, lengths = tmp_path / 'plan.svg', tmp_path / 'lengths.txt'
  lengths.write_text('\n'.join(map(str, LENGTHS)))
  shown(capsys, 'plan', str(lengths), '--config', TINY, '--svg', str(file))
  drawn = ElementTree.parse(file).getroot()
  texts = [text.text for text in drawn.iter('{http://www.w3.org/2000/svg}text')]
  assert {'Batch 1 of lengths.txt', 'node 0', 'node 1', 'SP16', 'SP8', '3,000'} <= set(texts)
  blocks = [rect for rect in drawn.iter('{http://www.w3.org/2000/svg}rect') if rect.get('height') == '10']
  width = float(drawn.get('width'))
  assert len(blocks) > 2 * 16
  assert all(float(b.get('width')) > 0 and float(b.get('x')) + float(b.get('width')) < width for b in blocks)
