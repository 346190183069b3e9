"""Times attention and the training step on one NVIDIA GPU, checked first, in a few minutes in all.

    python scripts/bench_gpu.py --json gpu.json

Attention: every implementation that serves bfloat16 heads of 128 there, on one document and on a mix of
lengths, full and windowed, interleaved with `jax.nn.dot_product_attention(implementation='cudnn')` on one
document of as many tokens. Before it is timed, each is compared with the dense reference, values and
gradients. The step: one rank of a mixture of experts of real width, forward, backward and update.

What goes wrong becomes the text of its row, and the rest goes on. Nothing starts after `--budget-s`; what
that leaves out is said. `--tiny` runs the same on small shapes anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import time
from typing import Any, Literal

# Three quarters of the memory, JAX's default share, would not hold the step.
os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.94')

import bench_common
import jax
import jax.numpy as jnp
import numpy as np
from bench_attention import kind_in_words, mixed_segments

from models.transformer import Decoder
from repack_jax.checks import ConfigError
from repack_jax.commands import command_line
from repack_jax.config import DataConfig, ModelConfig, PlannerConfig, RunConfig, TrainConfig
from repack_jax.config.cluster import ClusterConfig
from repack_jax.data.samples import Sample
from repack_jax.files import write_whole
from repack_jax.kinds import ChunkedAttention, FullAttention, LayerKind, SlidingWindowAttention
from repack_jax.ops.attention import IMPLEMENTATIONS, AttentionCase, attention, blockwise
from repack_jax.parallel import mesh
from repack_jax.plan.arrays import NO_TARGET, pack
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.flops import TRAIN_OVER_FORWARD, sample_flops
from repack_jax.solver import solve
from repack_jax.training.step import TrainStep

H200_PEAK_FLOPS_PER_S = 9.894e14  # dense bf16, as in configs/clusters/h200.gin
# Of `blockwise` in a case: a tile is several launches, tens of microseconds, so more would eat the budget.
MOST_BLOCKWISE_TILES = 40_000
# Bytes that a parameter takes in a step: master weight, two moments, two gradients, and its bf16 copy.
STEP_BYTES_PER_PARAMETER = 22
STEP_OTHER_BYTES = 20e9
BASELINE = 'jax.nn'
MIX_SEED = 11  # of a mix of 32 documents in 32 Ki tokens, the longest 9 Ki; 55 and 79 Ki in 128 Ki

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shapes:
  """What is run: of attention, of its check, and of the step."""

  tokens: tuple[int, ...] = (32768, 131072)
  heads: int = 8
  kv_heads: int = 1
  width: int = 128
  window: int = 4096
  dtype: str = 'bfloat16'
  check_tokens: int = 9000  # three buckets of `cudnn`, one of which takes two calls; no multiple of any tile
  check_heads: int = 4
  check_window: int = 500
  # Of the largest value: bfloat16 has 8 bits, and probabilities are rounded to it too.
  tolerance: float = 2**-6
  step_tokens: int = 32768
  experts: int = 64


TINY = Shapes((256,), 4, 2, 8, 32, 'float32', 300, 4, 20, 1e-4, 512, 4)


class Budget:
  """Seconds since the start, and what was not begun after too many."""

  def __init__(self, budget_s: float):
    self.begun, self.budget_s, self.left_out = time.perf_counter(), budget_s, list[str]()

  def spent_s(self) -> float:
    return time.perf_counter() - self.begun

  def allows(self, name: str) -> bool:
    if self.spent_s() < self.budget_s:
      bench_common.progress(f'{self.spent_s():.0f} s: {name}')
      return True
    self.left_out.append(name)
    return False


def in_words(error: Exception) -> str:
  """The first line of an error, not too long."""
  return f'{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ""}'[:200]


def served(case: AttentionCase) -> list[str]:
  """Implementations to run here, `reference` aside."""
  impls = [impl for name, impl in IMPLEMENTATIONS.items() if name != 'reference']
  return [impl.name for impl in impls if not impl.why_not(jax.default_backend(), case)]


# --- attention ----------------------------------------------------------------------------------------------


def values(shapes: Shapes, tokens: int, heads: int, kv_heads: int) -> tuple[jax.Array, ...]:
  """q, k, v and the gradient of the result."""
  keys = jax.random.split(jax.random.key(0), 4)
  return tuple(
    jax.random.normal(key, (tokens, n, shapes.width), jnp.dtype(shapes.dtype))
    for key, n in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
  )


def both_passes(function, q, k, v, dout):
  out, pullback = jax.vjp(function, q, k, v)
  return out, *pullback(dout)


def check_segments(tokens: int) -> np.ndarray:
  """Long and short samples, many of them, one of one token, and padding in front and between; none behind."""
  lengths = [tokens * 2 // 5, tokens // 8, 1, *[max(1, tokens // 200)] * 80]
  gaps = [tokens // 100, tokens // 50]
  lengths.append(tokens - sum(lengths) - sum(gaps))
  assert lengths[-1] > 0
  runs = [(-1, gaps[0]), (0, lengths[0]), (-1, gaps[1]), *enumerate(lengths[1:], start=1)]
  return np.concatenate([np.full(n, sample, np.int32) for sample, n in runs])


def check_row(shapes: Shapes, name: str, kind: LayerKind) -> Row:
  """Compares an implementation, padding full of NaN, with the reference in float32."""
  segments = jnp.asarray(check_segments(shapes.check_tokens))
  clean = values(shapes, shapes.check_tokens, shapes.check_heads, 1)
  padding = (segments < 0)[:, None, None]
  poisoned = [jnp.where(padding, jnp.nan, x) for x in clean]

  def run(name, arrays):
    return jax.jit(lambda *xs: both_passes(lambda q, k, v: attention(q, k, v, segments, kind, name), *xs))(
      *arrays
    )

  got = run(name, poisoned)
  want = run('reference', [x.astype(jnp.float32) for x in clean])
  row: Row = {'implementation': name, 'attention': kind_in_words(kind), 'tolerance': shapes.tolerance}
  for label, g, w in zip(('out', 'dq', 'dk', 'dv'), got, want, strict=True):
    row[label] = float(jnp.abs(g.astype(jnp.float32) - w).max() / jnp.abs(w).max())
  row['padding'] = 'zero' if all(not jnp.where(padding, x, 0).any() for x in got) else 'NOT ZERO'
  good = all(row[label] <= shapes.tolerance for label in ('out', 'dq', 'dk', 'dv'))
  return row | {'verdict': 'ok' if good and row['padding'] == 'zero' else 'WRONG'}


def check_rows(shapes: Shapes, budget: Budget) -> list[Row]:
  rows: list[Row] = []
  local = shapes.check_window
  for kind in (
    FullAttention(),
    SlidingWindowAttention(window_tokens=local),
    ChunkedAttention(chunk_tokens=local),
  ):
    words = kind_in_words(kind)
    case = AttentionCase(kind, shapes.dtype, shapes.check_tokens, shapes.check_heads, 1, shapes.width)
    for name in served(case):
      if budget.allows(f'check {name}, {words}'):
        try:
          rows.append(check_row(shapes, name, kind))
        except Exception as error:
          rows.append({'implementation': name, 'attention': words, 'verdict': in_words(error)})
  return rows


def one_document(q, k, v, kind: LayerKind):
  """The baseline: JAX's own attention on one document; cuDNN's on a GPU."""
  local = (kind.window_tokens - 1, 0) if isinstance(kind, SlidingWindowAttention) else None
  which: Literal['cudnn', 'xla'] = 'cudnn' if jax.default_backend() == 'gpu' else 'xla'
  return jax.nn.dot_product_attention(
    q[None], k[None], v[None], is_causal=True, local_window_size=local, implementation=which
  )[0]


@functools.cache
def compiled(shapes: Shapes, name: str, tokens: int, kind: LayerKind, backward: bool):
  """The program of a candidate, `(q, k, v, dout, segments)`, whatever the pack."""

  def program(q, k, v, dout, segments):
    def function(q, k, v):
      if name == BASELINE:
        return one_document(q, k, v, kind)
      return attention(q, k, v, segments, kind, name)

    return both_passes(function, q, k, v, dout) if backward else function(q, k, v)

  heads = (shapes.heads, shapes.kv_heads, shapes.kv_heads, shapes.heads)
  arrays = [jax.ShapeDtypeStruct((tokens, n, shapes.width), jnp.dtype(shapes.dtype)) for n in heads]
  return jax.jit(program).lower(*arrays, jax.ShapeDtypeStruct((tokens,), jnp.int32)).compile()


def attention_rows(
  shapes: Shapes, tokens: int, pack_name: str, kind: LayerKind, backward: bool, budget: Budget
) -> list[Row]:
  """A row for each implementation, all timed side by side with the baseline."""
  segments = np.zeros(tokens, np.int32) if pack_name == 'one' else mixed_segments(tokens, MIX_SEED)
  pairs, one_pairs = int(kind.pairs(np.bincount(segments)).sum()), int(kind.pairs(tokens))
  # Two products of D in the forward pass; five in the backward pass, of which four count as is usual.
  flops = 4 * shapes.heads * shapes.width * (TRAIN_OVER_FORWARD if backward else 1)
  arrays = (*values(shapes, tokens, shapes.heads, shapes.kv_heads), jnp.asarray(segments))
  case: Row = {
    'tokens': tokens, 'documents': int(segments[-1]) + 1, 'longest': int(np.bincount(segments).max()),
    'attention': kind_in_words(kind), 'pass': 'forward+backward' if backward else 'forward',
  }  # fmt: skip
  programs, rows = {}, dict[str, Row]()
  served_case = AttentionCase(kind, shapes.dtype, tokens, shapes.heads, shapes.kv_heads, shapes.width)
  for name in (BASELINE, *served(served_case)):
    rows[name] = case | {'implementation': name}
    if name == 'blockwise' and pairs / blockwise.block_tokens(tokens) ** 2 > MOST_BLOCKWISE_TILES:
      rows[name]['error'] = 'left out: it would take most of the budget'
      continue
    try:
      program = compiled(shapes, name, tokens, kind, backward)
      jax.block_until_ready(program(*arrays))
      programs[name] = functools.partial(program, *arrays)
      rows[name]['temp_mib'] = program.memory_analysis().temp_size_in_bytes / 2**20
    except Exception as error:
      rows[name]['error'] = in_words(error)
  room_s = min(8.0, budget.budget_s - budget.spent_s())
  for name, seconds in bench_common.measure(programs, rounds=9, budget_s=room_s).items():
    done = one_pairs if name == BASELINE else pairs
    rows[name] |= {'ms': seconds * 1e3, 'tflop_per_s': flops * done / seconds / 1e12}
  base = rows[BASELINE]
  for row in rows.values():
    if row is not base and 'ms' in row and 'ms' in base:
      row['rate_over_baseline'] = row['tflop_per_s'] / base['tflop_per_s']
  base['documents'], base['longest'] = 1, tokens
  return list(rows.values())


# --- the step -----------------------------------------------------------------------------------------------


def step_config(shapes: Shapes, tiny: bool, experts: int, attention_name: str, exchange: str) -> RunConfig:
  """One rank with 1F3S, four layers; of real width unless tiny."""
  tokens = shapes.step_tokens
  model = ModelConfig(
    vocab_size=32768, d_model=4096, num_layers=4, pattern='FSSS', num_heads=32, num_kv_heads=4, head_dim=128,
    num_experts=experts, experts_per_token=4, expert_width=1536,
    compute_dtype='bfloat16', remat='layer',
  )  # fmt: skip
  if tiny:
    model = ModelConfig(num_heads=4, num_kv_heads=2, num_experts=experts)
  return RunConfig(
    cluster=ClusterConfig(
      nodes=1, ranks_per_node=1, peak_flops_per_s=H200_PEAK_FLOPS_PER_S, exchange=exchange
    ),
    model=model.with_kind(SlidingWindowAttention(window_tokens=shapes.window)),
    data=DataConfig(batch_tokens=tokens, max_document_tokens=tokens),
    planner=PlannerConfig(mode='repack', capacity_tokens=tokens),
    train=TrainConfig(attention=attention_name),
  )


def step_samples(shapes: Shapes, vocab_size: int) -> list[Sample]:
  """Documents of mixed lengths that fill a rank."""
  rng = np.random.default_rng(0)
  samples: list[Sample] = []
  for length in np.bincount(mixed_segments(shapes.step_tokens, MIX_SEED)):
    tokens = rng.integers(vocab_size, size=length + 1, dtype=np.int32)
    tokens[-1] = NO_TARGET
    samples.append(Sample(len(samples), 0, tokens[:-1], tokens[1:]))
  return samples


def time_step(run: RunConfig, samples: list[Sample], steps: int) -> Row:
  """Seconds of whole steps, accumulate and update, after one that compiles."""
  step = TrainStep(run, mesh.make_mesh(run.cluster), Decoder(run.model))
  lengths = [len(sample) for sample in samples]
  (plan,) = solve(lengths, model_costs(run.cluster, run.model), run.batch_planner).plans
  program = step.program(plan)
  arrays = step.put(pack(plan, samples, program))
  targets = sum(int((sample.targets != NO_TARGET).sum()) for sample in samples)
  state, sums, times_s = step.init_state(), step.zero_sums(), []
  for _ in range(steps + 1):
    begun = time.perf_counter()
    sums = step.accumulate(state, sums, program, arrays)
    state, metrics, sums = step.update(state, sums, targets)
    jax.block_until_ready((state, sums))
    times_s.append(time.perf_counter() - begun)
  flops = TRAIN_OVER_FORWARD * int(sample_flops(run.model, np.array(lengths)).sum())
  step_s = float(np.median(times_s[1:]))
  memory = jax.local_devices()[0].memory_stats() or {}
  return {
    'attention': step.chosen.attention.name,
    'exchange': step.chosen.exchange,
    'grouped': step.chosen.grouped,
    'parameters': sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    'compile_s': times_s[0] - step_s,
    'step_s': step_s,
    'tokens_per_s': sum(lengths) / step_s,
    'mfu': flops / step_s / H200_PEAK_FLOPS_PER_S,
    'peak_memory_gib': memory.get('peak_bytes_in_use', 0) / 2**30,
    'loss': float(metrics['loss']),
  }


def step_row(shapes: Shapes, tiny: bool, attention_name: str, budget: Budget) -> Row:
  """Tries fewer experts, then the dense exchange, where memory or the platform demands it."""
  experts, exchange, tried = shapes.experts, 'ragged', list[str]()
  limit = (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit', np.inf)
  while experts > 4 and experts * 4 * 3 * 4096 * 1536 * STEP_BYTES_PER_PARAMETER + STEP_OTHER_BYTES > limit:
    experts //= 2
  while True:
    name = f'step, attention {attention_name}, {experts} experts, exchange {exchange}'
    row: Row = {'asked': attention_name, 'experts': experts}
    if not budget.allows(name):
      return row | {'error': '; '.join(tried) or 'left out'}
    try:
      run = step_config(shapes, tiny, experts, attention_name, exchange)
      return (
        row
        | time_step(run, step_samples(shapes, run.model.vocab_size), steps=3)
        | {'tried': '; '.join(tried)}
      )
    except Exception as error:
      tried.append(f'{name}: {in_words(error)}')
      memory = 'RESOURCE_EXHAUSTED' in str(error) or 'ut of memory' in str(error)
    jax.clear_caches()
    if memory and experts > 4:
      experts //= 2
    elif exchange == 'ragged' and not memory:
      exchange = 'dense'
    else:
      return row | {'error': '; '.join(tried)}


# --- all of it ----------------------------------------------------------------------------------------------


def main() -> None:
  parser = bench_common.parser(__doc__)
  parser.add_argument('--budget-s', type=float, default=330, help='start nothing after so many seconds (330)')
  parser.add_argument('--tiny', action='store_true', help='small shapes, on whatever device there is')
  args = parser.parse_args()
  if jax.default_backend() != 'gpu' and not args.tiny:
    raise ConfigError(f'needs an NVIDIA GPU, and JAX finds only {jax.default_backend()} here; try --tiny')
  shapes, budget = TINY if args.tiny else Shapes(), Budget(args.budget_s)
  found: Row = {'machine': bench_common.machine(), 'shapes': dataclasses.asdict(shapes)}
  print(', '.join(f'{key} {value}' for key, value in found['machine'].items()))
  tables: dict[str, list] = {'check': check_rows(shapes, budget), 'attention': [], 'step': []}
  show('check', tables['check'], args, found)
  for tokens in shapes.tokens:
    for backward in (True, False):
      for kind in (FullAttention(), SlidingWindowAttention(window_tokens=shapes.window)):
        for pack_name in ('one', 'mix'):
          name = f'attention, {tokens} tokens, {pack_name}, {kind_in_words(kind)}, backward {backward}'
          if budget.allows(name):
            tables['attention'] += attention_rows(shapes, tokens, pack_name, kind, backward, budget)
    show('attention', tables['attention'], args, found)
    if tokens == shapes.tokens[0]:
      tables['step'].append(step_row(shapes, args.tiny, 'auto', budget))
      show('step', tables['step'], args, found)
  tables['step'].append(step_row(shapes, args.tiny, 'blockwise', budget))
  show('step', tables['step'], args, found)
  found |= {'left_out': budget.left_out, 'spent_s': budget.spent_s()}
  write(args, found)
  print(f'\n{budget.spent_s():.0f} s' + ''.join(f'\nleft out: {name}' for name in budget.left_out))


def show(title: str, rows: list, args: argparse.Namespace, found: Row) -> None:
  """Prints a table so far, and writes all so far, so that a run that is cut short leaves something."""
  print(f'\n{title}', flush=True)
  if rows:
    bench_common.print_table(rows)
  found[title] = rows
  write(args, found)


def write(args: argparse.Namespace, found: Row) -> None:
  if args.json:
    write_whole(args.json, json.dumps(found, indent=2) + '\n')


if __name__ == '__main__':
  command_line.run(main)
