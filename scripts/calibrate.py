"""Measures the rates of ClusterConfig on the devices that JAX sees, and writes a gin file that binds them.

    python scripts/calibrate.py --config configs/tiny_cpu.gin --output calibration.gin
    python train.py --config configs/tiny_cpu.gin --config calibration.gin

The mesh is the config's, and so are the model and its dtype; all ranks work at the same time, so that what
they share shows. Measured are the products of a layer; the attention core of one document that fills a rank,
and of packs of shorter ones; both kinds of exchange, and the better one inside nodes and across, at several
sizes and among several ranks; and collectives of parameters in the sizes of a layer's weights. What the mesh
lacks is left out of the file. Which ranks make a node is what the config says: nothing checks that a slower
link lies between two of them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import bench_common
from measured_rates import Rate, measured_rates

from repack_jax.commands import command_line
from repack_jax.config import RunConfig
from repack_jax.config.gin_files import load
from repack_jax.files import write_whole
from repack_jax.parallel import mesh

EMULATED = (
  'these ranks are emulated on one CPU: links are memory copies and ranks share cores, so the rates say '
  'nothing of a cluster'
)


def gin_text(rates: Sequence[Rate], about: Sequence[str]) -> str:
  """The file: comments, and a binding for each rate that was measured."""

  def comment(text: str) -> str:
    return '# ' + ' '.join(text.split()) + '\n'  # on one line, whatever the command held

  text = ''.join(comment(line) for line in about)
  for rate in rates:
    name = f'ClusterConfig.{rate.field}'
    if rate.value is None:
      text += '\n' + comment(f'{name}: {rate.note}')
    else:
      text += '\n' + comment(rate.how) + (comment(rate.note) if rate.note else '')
      value = float(f'{rate.value:.4g}') if isinstance(rate.value, float) else rate.value
      text += f'{name} = {value!r}\n'
  return text


def table_rows(rates: Sequence[Rate], run: RunConfig) -> list[dict[str, object]]:
  rows: list[dict[str, object]] = []
  for rate in rates:
    own, value = getattr(run.cluster, rate.field), rate.value
    row: dict[str, object] = {'field': rate.field, 'measured': '-' if value is None else value, 'config': own}
    row['over_config'] = value / own if isinstance(value, float) and own else '-'
    rows.append(row | ({'note': rate.note} if rate.note else {}))
  return rows


def main(argv: list[str] | None = None) -> None:
  parser = bench_common.parser(__doc__)
  parser.add_argument('--config', action='append', required=True, metavar='FILE', help='as in train.py')
  parser.add_argument(
    '--set', action='append', default=[], metavar='CLASS.FIELD=VALUE', help='as in train.py'
  )
  parser.add_argument(
    '--output', type=command_line.output_file, required=True, metavar='FILE', help='the gin file to write'
  )
  parser.add_argument(
    '--budget-s', type=float, default=60,
    help='start no round after this many seconds of them, compiling aside; one round always runs (60)',
  )  # fmt: skip
  args = parser.parse_args(argv)
  run = load(args.config, args.set)
  mesh.start_devices(run.cluster)
  device_mesh = mesh.make_mesh(run.cluster)
  warnings = [f'NOTE: {EMULATED}'] if device_mesh.devices.flat[0].platform == 'cpu' else []
  rates = measured_rates(run, device_mesh, args.budget_s)
  shape = ' x '.join(f'{name} {size}' for name, size in device_mesh.shape.items())
  about = [
    f'Rates measured by: python scripts/calibrate.py {shlex.join(sys.argv[1:] if argv is None else argv)}',
    f'Use: {shlex.join(part for file in (*args.config, str(args.output)) for part in ("--config", file))}',
    'Machine: ' + ', '.join(f'{key} {value}' for key, value in bench_common.machine().items()),
    f'Mesh: {shape}; all ranks worked at the same time.',
    *warnings,
  ]
  write_whole(args.output, gin_text(rates, about))
  bench_common.report(f'rates of ClusterConfig, mesh {shape}', table_rows(rates, run), args.json)
  print('\n' + '\n'.join([*warnings, f'wrote {args.output}', about[1]]))


if __name__ == '__main__':
  command_line.run(main)
