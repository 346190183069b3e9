"""Times packed attention: `blockwise` against two dense ones, on one document and on a real mix of lengths.

    python scripts/bench_attention.py --lengths 2048 8192 32768 --json attention.json

Dense ones: `reference` (this project's oracle) and `jax.nn.dot_product_attention` with an explicit boolean
mask. All candidates of a case run interleaved, and each time is the median wall time after a warm-up. The
temporary memory is XLA's own figure for the compiled program.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import bench_common
import jax
import jax.numpy as jnp
import numpy as np

from repack_jax.commands import command_line
from repack_jax.config import ModelConfig
from repack_jax.kinds import FullAttention, LayerKind, SlidingWindowAttention
from repack_jax.ops.attention import attention
from repack_jax.ops.attention.reference import visible

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


def kind_in_words(kind: LayerKind) -> str:
  return kind.describe() or kind.title


def jax_nn(q, k, v, segments, kind: LayerKind):
  mask = visible(segments, kind)[None, None]
  return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=mask)[0]


CANDIDATES: dict[str, Callable[..., jax.Array]] = {
  'blockwise': functools.partial(attention, implementation='blockwise'),
  'reference': functools.partial(attention, implementation='reference'),
  'jax.nn': jax_nn,
}


def compile_one(name: str, kind: LayerKind, backward: bool, arrays: tuple):
  """Returns the compiled program for `arrays`, (q, k, v, segments, dout)."""

  def program(q, k, v, segments, dout):
    out, pullback = jax.vjp(lambda q, k, v: CANDIDATES[name](q, k, v, segments, kind), q, k, v)
    return (out, *pullback(dout)) if backward else out

  return jax.jit(program).lower(*arrays).compile()


def dense_bytes(tokens: int, heads: int, itemsize: int, backward: bool) -> int:
  """What a dense one must at least hold: its scores, and in the backward pass their gradient as well."""
  return tokens**2 * heads * itemsize * (2 if backward else 1)


def bench_case(
  args: argparse.Namespace, tokens: int, pack: str, kind: LayerKind, backward: bool
) -> dict[str, object]:
  """All candidates on one pack: a row of the table."""
  bench_common.progress(
    f'{tokens} tokens, {pack}, {kind_in_words(kind)}, {"both passes" if backward else "forward"}'
  )
  one = np.zeros(tokens, np.int32)
  segments = one if pack == 'one' else mixed_segments(tokens, args.seed)
  rng = np.random.default_rng(args.seed)
  q, k, v, dout = (
    jnp.asarray(rng.normal(size=(tokens, n, args.head_dim)), args.dtype)
    for n in (args.heads, args.kv_heads, args.kv_heads, args.heads)
  )
  arrays = (q, k, v, jnp.asarray(segments), dout)
  needs_gib = dense_bytes(tokens, args.heads, 4, backward) / 2**30
  names = [name for name in CANDIDATES if name == 'blockwise' or needs_gib <= args.dense_limit_gib]
  programs = {name: compile_one(name, kind, backward, arrays) for name in names}
  calls = {name: lambda p=program: p(*arrays) for name, program in programs.items()}
  seconds = bench_common.measure(calls, args.rounds, args.budget_s)
  row: dict[str, object] = {
    'tokens': tokens,
    'documents': int(segments[-1]) + 1,
    'longest': int(np.bincount(segments).max()),
    'attention': kind_in_words(kind),
    'pass': 'forward+backward' if backward else 'forward',
  }
  for name in CANDIDATES:
    skipped = name not in programs
    row[f'{name}_s'] = f'needs over {needs_gib:.2g} GiB' if skipped else seconds[name]
    if name != 'blockwise' and not skipped:
      row[f'{name}_over_blockwise'] = seconds[name] / seconds['blockwise']
  for name, program in programs.items():
    row[f'{name}_temp_mib'] = program.memory_analysis().temp_size_in_bytes / 2**20
  return row


def main() -> None:
  parser = bench_common.parser(__doc__)
  parser.add_argument(
    '--lengths', type=int, nargs='+', default=[2048, 8192, 32768], metavar='T', help='tokens in a pack'
  )
  parser.add_argument('--heads', type=int, default=4, help='query heads (4)')
  parser.add_argument('--kv-heads', type=int, default=1, help='key/value heads (1)')
  parser.add_argument('--head-dim', type=int, default=64, help='head width (64)')
  parser.add_argument('--window', type=int, default=512, help='window of the windowed case, tokens (512)')
  parser.add_argument('--dtype', choices=('float32', 'bfloat16'), default='float32')
  parser.add_argument('--seed', type=int, default=0, help='of the lengths and the values (0)')
  parser.add_argument('--rounds', type=int, default=5, help='at most this many timed rounds a case (5)')
  parser.add_argument('--budget-s', type=float, default=40, help='start no round of a case after this (40)')
  parser.add_argument('--dense-limit-gib', type=float, default=4, help='skip dense ones that need more (4)')
  args = parser.parse_args()
  # Raises what a user should know of these.
  ModelConfig(num_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=args.head_dim)
  full, windowed = FullAttention(), SlidingWindowAttention(window_tokens=args.window)
  rows = [
    bench_case(args, tokens, pack, kind, backward)
    for tokens in args.lengths
    for pack, kind in (('one', full), ('mix', full), ('one', windowed))
    for backward in (False, True)
  ]
  title = f'attention, {args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.dtype}'
  bench_common.report(title, rows, args.json)


if __name__ == '__main__':
  command_line.run(main)
