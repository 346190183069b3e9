"""`scripts/calibrate.py`: the file it writes, its fits, its mistakes; the profiles in `configs/clusters`."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from repack_jax.commands import command_line
from repack_jax.config import ClusterConfig, ModelConfig, gin_files
from repack_jax.config.paths import packaged_configs
from repack_jax.parallel import mesh
from repack_jax.predict import flops

ROOT = Path(__file__).resolve().parents[1]
MINI = str(ROOT / 'tests' / 'mini.gin')
PROFILES = sorted((ROOT / 'configs' / 'clusters').glob('*.gin'))
COMPUTE = ('matmul_flops_per_s', 'attention_flops_per_s')
INTRA = ('intra_node_bytes_per_s', 'intra_node_latency_s')
INTER = ('inter_node_bytes_per_s', 'inter_node_latency_s')
PARAMETERS = ('parameter_intra_node_bytes_per_s', 'parameter_inter_node_bytes_per_s')

import calibrate  # noqa: E402
import measured_rates  # noqa: E402


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
  """Each test in an empty folder, on the devices that the suite has started, with few programs to compile."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(mesh, 'start_devices', lambda cluster: None)
  monkeypatch.setattr(measured_rates, 'SIZES', 3)


def bound_fields(file: str) -> list[str]:
  return re.findall(r'^ClusterConfig\.(\w+) = ', Path(file).read_text(), re.MULTILINE)


def calibrated(*settings: str) -> list[str]:
  argv = ['--config', MINI, '--output', 'made.gin', '--json', 'made.json', '--budget-s', '0.1']
  calibrate.main([*argv, *(part for setting in settings for part in ('--set', setting))])
  return bound_fields('made.gin')


def exit_of(capsys, argv: list[str]) -> str:
  """The last line of standard error of a run that a mistake ends, which is all but argparse's usage."""
  capsys.readouterr()
  with pytest.raises(SystemExit) as caught:
    command_line.run(lambda: calibrate.main(argv))
  out, err = capsys.readouterr()
  assert caught.value.code == 2 and out == '' and '...' not in err
  lines = [line for line in err.splitlines() if 'error: ' in line]
  assert len(lines) == 1 and err.endswith(f'{lines[0]}\n')
  return lines[0].partition('error: ')[2]


def test_file_binds_positive_rates_and_loads_after_the_config(capsys):
  assert calibrated() == [*COMPUTE, *INTRA, *INTER, 'exchange', *PARAMETERS]
  base, run = gin_files.load([MINI], []), gin_files.load([MINI, 'made.gin'], [])
  for field in (*COMPUTE, INTRA[0], INTER[0], *PARAMETERS):
    value = getattr(run.cluster, field)
    assert value > 0 and value != getattr(base.cluster, field)
  assert run.cluster.intra_node_latency_s >= 0 and run.cluster.inter_node_latency_s >= 0
  others = {
    field: getattr(base.cluster, field) for field in (*COMPUTE, *INTRA, *INTER, 'exchange', *PARAMETERS)
  }
  assert dataclasses.replace(run, cluster=dataclasses.replace(run.cluster, **others)) == base

  text, out = Path('made.gin').read_text(), capsys.readouterr().out
  note = 'NOTE: these ranks are emulated on one CPU: links are memory copies and ranks share cores'
  assert note in out and f'# {note}' in text
  assert f'# Use: --config {MINI} --config made.gin' in text
  assert '# Mesh: data 1 x node 2 x local 2;' in text
  assert '# blockwise, forward and backward, one document of 64 tokens, 4/2 heads of 4, float32' in text
  assert '# dense all-to-all of 2 ranks, bytes a rank sends to the others: ' in text
  assert (
    "# all-gather in float32 and reduce-scatter in float32 of 2 ranks, in the sizes of a layer's wei" in text
  )
  # What this mesh and these capacities have no measure of says why.
  for lacking in (
    'attention_curve: not measured: a rank holds no more than 64 tokens',
    'peer_latency_s: not measured: takes nodes of four ranks or more',
  ):
    assert f'# ClusterConfig.{lacking}' in text.splitlines()
  rows = json.loads(Path('made.json').read_text())['results']
  assert [row['field'] for row in rows] == [
    *COMPUTE, 'attention_curve', *INTRA, *INTER, 'exchange', 'peer_latency_s', *PARAMETERS
  ]  # fmt: skip
  assert rows[0]['config'] == 2e9 and rows[0]['over_config'] == rows[0]['measured'] / 2e9


@pytest.mark.long
@pytest.mark.parametrize(
  ('setting', 'fields', 'lacking'),
  [
    ('ClusterConfig.nodes=1', (*INTRA, 'exchange', PARAMETERS[0]),
     '# ClusterConfig.inter_node_latency_s: not measured: a domain has one node'),
    ('ClusterConfig.ranks_per_node=1', (*INTER, 'exchange', PARAMETERS[1]),
     '# ClusterConfig.intra_node_bytes_per_s: not measured: a node has one rank'),
  ],
)  # fmt: skip
def test_link_that_is_not_there_is_left_out(capsys, setting, fields, lacking):
  assert calibrated(setting) == [*COMPUTE, *fields]
  assert lacking in Path('made.gin').read_text().splitlines()
  assert lacking.partition(': ')[2] in capsys.readouterr().out
  gin_files.load([MINI, 'made.gin'], [setting])


@pytest.mark.long
def test_attention_of_several_lengths_and_latency_of_a_peer():
  """Packs of 512 tokens beside one document of the capacity; groups of 2 and of 4 ranks in a node."""
  settings = ('PlannerConfig.capacity_tokens=600', 'ClusterConfig.nodes=1', 'ClusterConfig.ranks_per_node=4')
  found = calibrated(*settings)
  assert found == [
    COMPUTE[0],
    COMPUTE[1],
    'attention_curve',
    *INTRA,
    'exchange',
    'peer_latency_s',
    PARAMETERS[0],
  ]
  cluster = gin_files.load([MINI, 'made.gin'], [*settings]).cluster
  (shorter, share), (longest, whole) = cluster.attention_curve
  assert (shorter, longest, whole) == (512, 600, 1.0) and share > 0
  assert cluster.peer_latency_s >= 0
  text = Path('made.gin').read_text()
  assert 'one document of 600 tokens' in text and '# the same 600 tokens as packs of documents' in text
  assert '# dense all-to-alls of 512 bytes a peer in a node, by ranks: 2 in ' in text


def test_lengths_of_packs():
  assert measured_rates.packs(64) == [64] and measured_rates.packs(512) == [512]
  assert measured_rates.packs(32768) == [512, 2048, 8192, 32768]


@pytest.mark.long
@pytest.mark.parametrize('per_peer_us', [0.0, 12.0])
def test_latencies_of_ranks_and_peers_are_told_apart(monkeypatch, per_peer_us):
  """Machines whose exchanges take 20 us, some for each peer, and a byte a nanosecond."""
  run = gin_files.load([MINI], ['ClusterConfig.ranks_per_node=8', 'ModelConfig.num_experts=8'])
  device_mesh = mesh.make_mesh(run.cluster)

  def timed(device_mesh, cases, budget_s):
    shapes = {name: case.carry.shape[1:] for name, case in cases.items()}
    return {
      name: 2 * (20e-6 + (peers - 1) * (1e-6 * per_peer_us + rows * 512 * 1e-9))
      for name, (peers, rows, _) in shapes.items()
    }

  monkeypatch.setattr(measured_rates, 'timed', timed)
  of_peer = measured_rates.peer_latency(run, device_mesh, 'dense', 1.0)
  # A peer's one row counts as latency: half a microsecond here.
  assert of_peer.value == pytest.approx((per_peer_us + 0.512) * 1e-6)
  for name, axis, peers in (('intra_node', 'local', 7), ('inter_node', 'node', 1)):
    rate, latency = measured_rates.link_rates(run, device_mesh, 'dense', name, axis, per_peer_us * 1e-6, 1.0)
    assert rate.value == pytest.approx(1e9) and latency.value == pytest.approx(20e-6, rel=1e-4)
    assert (f'less {peers} x peer_latency_s' in latency.how) == bool(per_peer_us)


def test_the_better_kind_of_exchange_is_taken(monkeypatch):
  """On a machine that has both: the ragged operation is emulated, and its seconds are made up."""
  from jax import lax
  from ragged import emulated_ragged_all_to_all

  run = gin_files.load([MINI], [])
  device_mesh = mesh.make_mesh(run.cluster)
  only = measured_rates.exchange_kind(run, device_mesh, 0.0)
  assert (only.value, only.how) == ('dense', 'the only kind that XLA has on cpu')
  monkeypatch.setattr(lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  monkeypatch.setattr(measured_rates, 'choose_exchange', lambda name, platform: name)
  rate, _ = measured_rates.link_rates(run, device_mesh, 'ragged', 'intra_node', 'local', 0.0, 0.0)
  assert rate.value > 0 and rate.how.startswith('ragged all-to-all of 2 ranks')
  for ragged_s, kind in ((3e-6, 'ragged'), (7e-6, 'dense')):  # SP2 alone: one dense all-to-all a site
    monkeypatch.setattr(measured_rates, 'timed', lambda *_, s=ragged_s: {'ragged': s, 'dense': 6e-6})
    found = measured_rates.exchange_kind(run, device_mesh, 0.0)
    assert found.value == kind and 'dense in 3 us; a dense site has one for each of 1 degrees' in found.how


def test_a_newline_in_the_command_stays_in_the_comment():
  rate = measured_rates.Rate('intra_node_latency_s', 2e-7, 'how')
  Path('made.gin').write_text(calibrate.gin_text([rate], ['command\nClusterConfig.nodes = 3']))
  assert gin_files.load(['made.gin'], []).cluster == ClusterConfig(intra_node_latency_s=2e-7)


@pytest.mark.parametrize(
  ('seconds', 'rate', 'latency_s', 'note'),
  [
    ([2.0, 3.0, 5.0], 100.0, 1.0, ''),
    ([5.0, 4.0, 4.0], 100.0, 0.0, 'did not grow'),
    ([4.0, 4.0, 4.0], 100.0, 0.0, 'did not grow'),
    ([0.1, 1.9, 4.0], None, 0.0, 'below 0'),
    ([1.0, 2.2, 2.4], None, None, 'misses one of the sizes'),
  ],
)
def test_fit(seconds, rate, latency_s, note):
  found = measured_rates.fit_line([100, 200, 400], seconds)
  assert found[0] > 0 and found[0] == pytest.approx(rate or found[0])
  assert found[1] == pytest.approx(found[1] if latency_s is None else latency_s) and found[1] >= 0
  assert note in found[2] and bool(note) == bool(found[2])


@pytest.mark.parametrize(
  'model',
  [
    ModelConfig(shared_expert_width=64, dense_layers=1),
    ModelConfig(num_experts=0, num_kv_heads=16, num_layers=3),
  ],
)
def test_widths_are_all_products_of_the_layers(model):
  counted = sum(
    2 * model.d_model * width * times for width, times in measured_rates.layer_widths(model).items()
  )
  router = sum(2 * model.d_model * model.num_experts for i in range(model.num_layers) if model.has_experts(i))
  assert counted + router == flops.linear_flops_per_token(model) - flops.logits_flops_per_token(model)


@pytest.mark.parametrize('output', ['nowhere/made.gin', '.'])
def test_output_that_cannot_be_written_is_found_first(capsys, monkeypatch, output):
  monkeypatch.setattr(calibrate, 'load', None)
  message = exit_of(capsys, ['--config', MINI, '--output', output])
  assert message == f'argument --output: {output}: cannot be written; name a file in a folder that exists'


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    (['--set', 'ClusterConfig.nodes=3'], 'ClusterConfig.nodes = 3: must be a power of two'),
    (['--set', 'ClusterConfig.domains=16'], '16 x 2 x 2 = 64 ranks, but JAX sees 32 cpu devices'),
    (['--config', 'nowhere.gin'], 'nowhere.gin: no such config file'),
  ],
)
def test_mistakes_in_the_config(capsys, settings, expected):
  assert expected in exit_of(capsys, ['--config', MINI, '--output', 'made.gin', *settings])
  assert not Path('made.gin').exists()


def test_command_line_by_itself():
  process = subprocess.run(
    [sys.executable, str(ROOT / 'scripts/calibrate.py'), '--config', 'nowhere.gin', '--output', 'made.gin'],
    capture_output=True, text=True, timeout=60,
  )  # fmt: skip
  assert (process.returncode, process.stdout) == (2, '')
  assert process.stderr.splitlines() == [
    'error: nowhere.gin: no such config file; give the path of a .gin file '
    f'(tried {Path("nowhere.gin").resolve()} and {packaged_configs() / "nowhere.gin"})'
  ]


@pytest.mark.parametrize('profile', PROFILES, ids=lambda path: path.stem)
def test_profiles(profile):
  cluster = gin_files.load([str(profile)], []).cluster
  is_tpu = profile.stem.startswith('tpu')
  # About a seventh: the ratio that exchanges across nodes are planned by.
  assert cluster.inter_node_bytes_per_s == pytest.approx(cluster.intra_node_bytes_per_s / 7.0, rel=0.01)
  assert cluster.attention_flops_per_s < cluster.matmul_flops_per_s < 0.8 * cluster.peak_flops_per_s
  assert (
    (cluster.exchange, cluster.exchange_meets) == ('ragged', 'span')
    and cluster.prefetch_layers == cluster.exchange_chunks == 1
    and cluster.peer_latency_s == 0
  )
  rates = (cluster.intra_node_bytes_per_s, cluster.inter_node_bytes_per_s)
  assert cluster.parameter_rates == pytest.approx(rates, rel=0.01)
  assert (cluster.platform == 'tpu') == is_tpu
  assert cluster.wire_row_bytes == (512 if is_tpu else 1)
  assert cluster.attention_curve == (() if is_tpu else ((512, 0.6), (16384, 1.0)))
  # Every rate stands there with its source, or that it is assumed; nothing is left to a default.
  text = profile.read_text()
  bound = set(bound_fields(str(profile)))
  named = set(re.findall(r'^# ClusterConfig\.(\w+): ', text, re.MULTILINE))
  fields = {field.name for field in dataclasses.fields(ClusterConfig)}
  assert bound | named == fields - {'nodes', 'domains'} - ({'platform', 'wire_row_bytes'} - bound)
  assert named == ({'attention_curve'} if is_tpu else set())
  assert len(bound) == len(bound_fields(str(profile))) and not re.search('measured here', text, re.IGNORECASE)
  for block in text.split('\n\n'):
    if 'ClusterConfig.' in block:
      assert block.startswith('#') or 'platform' in block, block


def test_there_are_profiles_and_a_file_can_include_one():
  assert [path.stem for path in PROFILES] == ['h100', 'h200', 'tpu_7x', 'tpu_v5p', 'tpu_v6e']
  Path('clusters').mkdir()
  Path('clusters/h200.gin').write_text(PROFILES[1].read_text())
  Path('run.gin').write_text("include 'clusters/h200.gin'\nClusterConfig.nodes = 4\n")
  cluster = gin_files.load(['run.gin'], []).cluster
  assert (cluster.nodes, cluster.ranks_per_node, cluster.memory_bytes) == (4, 8, 1.41e11)
