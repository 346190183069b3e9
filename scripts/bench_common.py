"""What the benchmarks share: naming the machine, and timing programs side by side."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from repack_jax.commands import command_line
from repack_jax.files import write_whole


def parser(doc: str) -> argparse.ArgumentParser:
  """A parser that describes a script by its docstring and knows `--json`."""
  made = command_line.described(doc)
  made.add_argument(
    '--json', type=command_line.output_file, metavar='FILE', help='also write the results here'
  )
  return made


def machine() -> dict[str, object]:
  """Names what a benchmark runs on: JAX's devices too, where the benchmark has imported JAX."""
  cpu = platform.processor()
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  if cpuinfo.exists():
    names = [line.split(':')[1].strip() for line in cpuinfo.read_text().splitlines() if 'model name' in line]
    cpu = names[0] if names else cpu
  about: dict[str, object] = {'cpu': cpu, 'cores': os.cpu_count()}
  if jax := sys.modules.get('jax'):
    devices = jax.devices()
    about |= {'device': f'{len(devices)} x {devices[0].device_kind}', 'jax': jax.__version__}
  return about | {'python': platform.python_version(), 'load_average': round(os.getloadavg()[0], 2)}


def measure(programs: Mapping[str, Callable[[], object]], rounds: int, budget_s: float) -> dict[str, float]:
  """Median seconds of each program, after one warm-up of each.

  A round runs every program in turn, so that a drift of the machine's speed meets all alike. No round
  starts after `budget_s`.
  """
  import jax  # not for the benchmarks of the host alone

  times_s: dict[str, list[float]] = {name: [] for name in programs}
  for program in programs.values():
    jax.block_until_ready(program())
  start = time.perf_counter()
  for done in range(rounds):
    if done and time.perf_counter() - start > budget_s:
      break
    for name, program in programs.items():
      begun = time.perf_counter()
      jax.block_until_ready(program())
      times_s[name].append(time.perf_counter() - begun)
  return {name: statistics.median(values) for name, values in times_s.items()}


def progress(text: str) -> None:
  """A word to whoever waits for the table."""
  print(f'... {text}', file=sys.stderr, flush=True)


def report(title: str, rows: Sequence[Mapping[str, object]], json_file: pathlib.Path | None) -> None:
  """Prints the machine and a table with a row a case; writes both as JSON where a file is given."""
  about = machine()
  print(f'{title}\n' + ', '.join(f'{key} {value}' for key, value in about.items()) + '\n')
  print_table(rows)
  if json_file:
    write_whole(json_file, json.dumps({'machine': about, 'results': list(rows)}, indent=2) + '\n')


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
  """Prints a row a case; a column that a row lacks stays empty."""
  columns = list(dict.fromkeys(key for row in rows for key in row))
  cells = [[_text(row.get(column, '')) for column in columns] for row in rows]
  widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
  for line in (columns, *cells):
    first, *rest = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
    print('  '.join([first.strip().ljust(widths[0]), *rest]))


def _text(value: object) -> str:
  return f'{value:.4g}' if isinstance(value, float) else str(value)
