"""Times packed attention: `blockwise` against two dense ones, on one document and on a real mix of lengths.

  python scripts/bench_attention.py --lengths 2048 8192 32768 --json attention.json

Dense ones: `reference` (this project's oracle) and `jax.nn.dot_product_attention` with an explicit boolean
mask. All candidates of a case run interleaved, and each time is the median wall time after a warm-up. The
temporary memory is XLA's own figure for the compiled program.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from repack_jax.attention import attention
from repack_jax.attention.reference import visible

# Documents of a web corpus by length in tokens: (lowest, highest, how many).
WEB_LENGTHS = (
  (1, 10, 30254),
  (11, 50, 391188),
  (51, 100, 699596),
  (101, 200, 1377757),
  (201, 500, 3794735),
  (501, 1024, 3316785),
  (1025, 2048, 2106566),
  (2049, 4096, 988525),
  (4097, 8192, 410002),
  (8193, 16384, 173574),
  (16385, 32768, 115007),
  (32769, 65536, 18428),
  (65537, 131072, 22513),
  (131073, 196608, 18284),
)


def mixed_segments(tokens: int, seed: int) -> np.ndarray:
  """Segments int32 [T] of documents drawn from `WEB_LENGTHS` (log-uniform in a bin) until T is full.

  A document that would pass the end is cut there.
  """
  rng = np.random.default_rng(seed)
  lows, highs, counts = np.array(WEB_LENGTHS).T
  segments, filled, sample = np.empty(tokens, np.int32), 0, 0
  while filled < tokens:
    bin_ = rng.choice(len(counts), p=counts / counts.sum())
    length = round(float(np.exp(rng.uniform(np.log(lows[bin_]), np.log(highs[bin_])))))
    segments[filled : filled + length] = sample
    filled, sample = filled + length, sample + 1
  return segments


def jax_nn(q, k, v, segments, window):
  return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=visible(segments, window)[None, None])[
    0
  ]


CANDIDATES = {
  'blockwise': lambda *args: attention(*args, 'blockwise'),
  'reference': lambda *args: attention(*args, 'reference'),
  'jax.nn': jax_nn,
}


def compile_one(name: str, window: int | None, backward: bool, arrays: tuple):
  """Returns the compiled program for `arrays`, (q, k, v, segments, dout)."""

  def program(q, k, v, segments, dout):
    out, pullback = jax.vjp(lambda q, k, v: CANDIDATES[name](q, k, v, segments, window), q, k, v)
    return (out, *pullback(dout)) if backward else out

  return jax.jit(program).lower(*arrays).compile()


def dense_bytes(tokens: int, heads: int, itemsize: int, backward: bool) -> int:
  """What a dense one must at least hold: its scores, and in the backward pass their gradient as well."""
  return tokens**2 * heads * itemsize * (2 if backward else 1)


def measure(programs: dict, arrays: tuple, repeats: int, budget_s: float) -> tuple[dict[str, float], int]:
  """Median seconds of each program, and the number of rounds.

  A round runs every program once, in turn; after `budget_s` no round starts.
  """
  times_s = {name: [] for name in programs}
  for program in programs.values():
    jax.block_until_ready(program(*arrays))
  start = time.perf_counter()
  for done in range(repeats):
    if done and time.perf_counter() - start > budget_s:
      break
    for name, program in programs.items():
      begun = time.perf_counter()
      jax.block_until_ready(program(*arrays))
      times_s[name].append(time.perf_counter() - begun)
  medians_s = {name: statistics.median(values) for name, values in times_s.items()}
  return medians_s, len(times_s['blockwise'])


def machine() -> dict[str, object]:
  """Names what this runs on."""
  cpu = platform.processor()
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    cpu = next(line.split(':')[1].strip() for line in lines if line.startswith('model name'))
  except (OSError, StopIteration):
    pass
  devices = jax.devices()
  return {
    'cpu': cpu,
    'cores': os.cpu_count(),
    'device': f'{len(devices)} x {devices[0].device_kind}',
    'jax': jax.__version__,
    'python': platform.python_version(),
    'load_average': round(os.getloadavg()[0], 2),
  }


def parse_arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument('--lengths', type=int, nargs='+', default=[2048, 8192, 32768], help='tokens in a pack')
  parser.add_argument('--heads', type=int, default=4, help='query heads (4)')
  parser.add_argument('--kv-heads', type=int, default=1, help='key/value heads (1)')
  parser.add_argument('--head-dim', type=int, default=64, help='head width (64)')
  parser.add_argument('--window', type=int, default=512, help='window of the windowed case, tokens (512)')
  parser.add_argument('--dtype', choices=('float32', 'bfloat16'), default='float32')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--repeats', type=int, default=7, help='at most this many timed rounds a case (7)')
  parser.add_argument('--budget-s', type=float, default=20, help='start no round of a case after this (20)')
  parser.add_argument('--dense-limit-gib', type=float, default=4, help='skip dense ones that need more (4)')
  parser.add_argument('--json', type=pathlib.Path, help='also write the results to this file')
  return parser.parse_args()


def bench_case(args: argparse.Namespace, tokens: int, pack: str, window: int | None, backward: bool) -> dict:
  """Measures all candidates on one pack; prints and returns one record."""
  one = np.zeros(tokens, np.int32)
  segments = one if pack == 'one document' else mixed_segments(tokens, args.seed)
  rng = np.random.default_rng(args.seed)
  q, k, v, dout = (
    jnp.asarray(rng.normal(size=(tokens, n, args.head_dim)), args.dtype)
    for n in (args.heads, args.kv_heads, args.kv_heads, args.heads)
  )
  arrays = (q, k, v, jnp.asarray(segments), dout)

  skipped = {}
  needs_gib = dense_bytes(tokens, args.heads, 4, backward) / 2**30
  if needs_gib > args.dense_limit_gib:
    skipped = {name: f'needs over {needs_gib:.2g} GiB' for name in CANDIDATES if name != 'blockwise'}
  programs = {name: compile_one(name, window, backward, arrays) for name in CANDIDATES if name not in skipped}
  times_s, rounds = measure(programs, arrays, args.repeats, args.budget_s)
  temp_bytes = {name: p.memory_analysis().temp_size_in_bytes for name, p in programs.items()}
  record = {
    'tokens': tokens,
    'pack': pack,
    'documents': int(segments[-1]) + 1,
    'longest_document_tokens': int(np.bincount(segments).max()),
    'window_tokens': window,
    'pass': 'forward+backward' if backward else 'forward',
    'median_s': times_s,
    'rounds': rounds,
    'times_slower_than_blockwise': {name: s / times_s['blockwise'] for name, s in times_s.items()},
    'temp_bytes': temp_bytes,
    'skipped': skipped,
  }
  print_row(record)
  return record


def print_header() -> None:
  columns = ''.join(f'| {name + ": s, ratio, MiB":>28} ' for name in CANDIDATES)
  print(f'{"tokens":>6} {"documents":>9} {"longest":>7} {"window":>6} {"pass":16} {"rounds":>6} {columns}')


def print_row(record: dict) -> None:
  cells = []
  for name in CANDIDATES:
    if name in record['skipped']:
      cells.append(f'| {"skipped: " + record["skipped"][name]:>28} ')
    else:
      ratio = f'{record["times_slower_than_blockwise"][name]:.1f}x'
      mib = record['temp_bytes'][name] / 2**20
      cells.append(f'| {record["median_s"][name]:>10.4f} {ratio:>8} {mib:>8.1f} ')
  window = record['window_tokens'] or '-'
  print(
    f'{record["tokens"]:>6} {record["documents"]:>9} {record["longest_document_tokens"]:>7} {window:>6} '
    f'{record["pass"]:16} {record["rounds"]:>6} {"".join(cells)}',
    flush=True,
  )


def main() -> None:
  args = parse_arguments()
  where = machine()
  print(', '.join(f'{key} {value}' for key, value in where.items()))
  print(f'{args.heads} query heads, {args.kv_heads} key/value heads of width {args.head_dim}, {args.dtype}')
  print('median wall seconds; ratio to blockwise in the same run; temporary memory of the compiled program')
  print_header()
  records = [
    bench_case(args, tokens, pack, window, backward)
    for tokens in args.lengths
    for pack, window in (('one document', None), ('web mix', None), ('one document', args.window))
    for backward in (False, True)
  ]
  if args.json:
    shown = {
      key: str(value) if isinstance(value, pathlib.Path) else value for key, value in vars(args).items()
    }
    args.json.write_text(
      json.dumps({'machine': where, 'arguments': shown, 'cases': records}, indent=2) + '\n'
    )
    print(f'wrote {args.json}')


if __name__ == '__main__':
  main()
