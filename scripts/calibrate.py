"""Measures the rates of ClusterConfig on the devices that JAX sees, and writes a gin file that binds them.

    python scripts/calibrate.py --config configs/tiny_cpu.gin --output calibration.gin
    python train.py --config configs/tiny_cpu.gin --config calibration.gin

The mesh is the config's, and so are the model and its dtype; all ranks work at the same time, so that what
they share shows. Measured are the products of a layer, the attention core of one document that fills a rank,
and an all-to-all inside the nodes and one across them, at several sizes each. A link that the mesh lacks is
left out of the file. Which ranks make a node is what the config says: nothing checks that a slower link lies
between two of them.

Every step runs many times in one program and feeds the next, so neither launches nor a clever compiler hide
in the figures.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

import bench_common
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from repack_jax.commands import command_line
from repack_jax.config import ModelConfig, RunConfig
from repack_jax.config.gin_files import load
from repack_jax.kinds import FullAttention
from repack_jax.ops.attention import AttentionCase, choose_attention
from repack_jax.parallel import mesh
from repack_jax.predict.costs import ATTENTION_BACKWARD_OVER_FORWARD

ROUNDS = 15
PROGRAM_S = 0.05  # a timed program repeats its step for about this long, which launching it must not distort
MOST_REPEATS = 100
SIZES = 5  # of an exchange, each four times the one before
LARGEST_BYTES = (2**20, 64 * 2**20)  # bounds of the largest: so that a slope shows, and that memory holds
MOST_BYTES_PER_S = 1e15  # no link: a fit beyond it is noise
WORTH_SAYING = 1.25  # a fitted line that misses a size by this factor
EMULATED = (
  'these ranks are emulated on one CPU: links are memory copies and ranks share cores, so the rates say '
  'nothing of a cluster'
)


@dataclasses.dataclass(frozen=True)
class Rate:
  """A field of ClusterConfig: its value (None: not measured), what was run, and what to know of the value."""

  field: str
  value: float | None
  how: str
  note: str = ''


@dataclasses.dataclass(frozen=True)
class TimedStep:
  """A step to time on every rank: `step(carry, *constants)` returns the next carry.

  The arrays are [ranks, ...] and lie on their ranks; the step sees its rank's part.
  """

  step: Callable[..., object]
  carry: object
  constants: tuple[jax.Array, ...] = ()


def filled(device_mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
  """Normal values [ranks, *shape], made where they lie."""
  place = mesh.sharding(device_mesh, mesh.RANK_BLOCKS)
  make = jax.jit(lambda key: jax.random.normal(key, (device_mesh.size, *shape), dtype), out_shardings=place)
  return make(jax.random.key(seed))


def repeated(device_mesh: jax.sharding.Mesh, case: TimedStep, repeats: int) -> Callable[[], object]:
  """A program without arguments that runs the case's step this many times on all ranks.

  The count is static: with one that is not, a GPU asks the host after each step whether to go on.
  """

  def block(carry, constants):
    carry, constants = jax.tree.map(lambda x: x[0], (carry, constants))
    carry = lax.fori_loop(0, repeats, lambda _, c: case.step(c, *constants), carry)
    return jax.tree.map(lambda x: x[None], carry)

  spec = mesh.RANK_BLOCKS
  mapped = jax.shard_map(block, mesh=device_mesh, in_specs=spec, out_specs=spec, check_vma=False)
  program = jax.jit(mapped).lower(case.carry, case.constants).compile()
  return lambda: program(case.carry, case.constants)


def timed(
  device_mesh: jax.sharding.Mesh, cases: Mapping[str, TimedStep], budget_s: float
) -> dict[str, float]:
  """Seconds of one step of each case, the cases side by side."""
  programs, repeats = {}, {}
  for name, case in cases.items():
    once = repeated(device_mesh, case, 1)
    seconds = bench_common.measure({name: once}, rounds=1, budget_s=0)[name]
    repeats[name] = min(MOST_REPEATS, max(1, round(PROGRAM_S / seconds)))
    programs[name] = once if repeats[name] == 1 else repeated(device_mesh, case, repeats[name])
  seconds_of = bench_common.measure(programs, ROUNDS, budget_s)
  return {name: seconds / repeats[name] for name, seconds in seconds_of.items()}


def layer_widths(model: ModelConfig) -> dict[int, int]:
  """Width f -> how often a token's d_model values meet a [d, f] or an [f, d] matrix in all layers.

  Routers, which are small, and logits, which are no layer's, are left out.
  """
  counts: dict[int, int] = {}
  for layer in range(model.num_layers):
    products = [(model.num_heads * model.head_dim, 2), (model.num_kv_heads * model.head_dim, 2)]
    if model.has_experts(layer):
      products += [(model.expert_width, 3 * model.experts_per_token), (model.shared_expert_width, 3)]
    else:
      products.append((model.dense_width, 3))
    for width, times in products:
      if width:
        counts[width] = counts.get(width, 0) + times
  return counts


def matmul_rate(run: RunConfig, device_mesh: jax.sharding.Mesh, budget_s: float) -> Rate:
  """[T, d] x [d, f] for each width, weighted as in the model.

  Each goes there and back, [T, d] -> [T, f] -> [T, d], which is also the shape of its gradient.
  """
  model, tokens, dim = run.model, run.planner.capacity_tokens, run.model.d_model
  widths = layer_widths(model)

  def step(x, there, back):
    # Without the barrier a compiler might multiply the two matrices instead.
    return lax.optimization_barrier(x @ there) @ back

  cases = {}
  for width in widths:
    there = filled(device_mesh, (dim, width), model.compute_dtype, seed=width)
    # The largest gain of `there` and its transpose is about the square of this: the values stay finite.
    gain = dim**0.5 + width**0.5
    back = jax.jit(lambda x, scale: jnp.swapaxes(x, 1, 2) * scale)(there, there.dtype.type(gain**-2))
    x = filled(device_mesh, (tokens, dim), model.compute_dtype, seed=0)
    cases[str(width)] = TimedStep(step, x, (there, back))
  seconds = timed(device_mesh, cases, budget_s)
  product_s = {width: seconds[str(width)] / 2 for width in widths}
  product_flops = {width: 2 * tokens * dim * width for width in widths}
  rate = sum(times * product_flops[width] for width, times in widths.items()) / sum(
    times * product_s[width] for width, times in widths.items()
  )
  each = ', '.join(f'f = {w} at {product_flops[w] / product_s[w]:.3g} flop/s' for w in sorted(widths))
  how = f'[{tokens}, {dim}] x [{dim}, f] and back in {model.compute_dtype}, weighted as in the layers: {each}'
  return Rate('matmul_flops_per_s', rate, how)


def attention_rate(run: RunConfig, device_mesh: jax.sharding.Mesh, budget_s: float) -> Rate:
  """One causal document that fills a rank, both passes; counted as the planner counts them."""
  model, tokens = run.model, run.planner.capacity_tokens
  platform = device_mesh.devices.flat[0].platform
  kind, sizes = FullAttention(), (model.num_heads, model.num_kv_heads, model.head_dim)
  case = AttentionCase(kind, model.compute_dtype, tokens, *sizes)
  impl = choose_attention(run.train.attention, platform, [case])

  def step(carry, segments):
    q, k, v, dout = carry
    out, lse = impl.forward(q, k, v, segments, kind)
    grads = impl.backward(q, k, v, segments, kind, out, lse, dout)
    # A small step along the gradients: the next run depends on all of this one, and values stay finite.
    moved = [x + (1e-3 * grad).astype(x.dtype) for x, grad in zip((q, k, v), grads, strict=True)]
    return (*moved, dout)

  heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
  carry = tuple(
    filled(device_mesh, (tokens, n, model.head_dim), model.compute_dtype, seed)
    for seed, n in enumerate(heads)
  )
  place = mesh.sharding(device_mesh, mesh.RANK_BLOCKS)
  segments = jax.device_put(np.zeros((device_mesh.size, tokens), np.int32), place)
  seconds = timed(device_mesh, {'attention': TimedStep(step, carry, (segments,))}, budget_s)['attention']
  counted = (1 + ATTENTION_BACKWARD_OVER_FORWARD) * int(kind.flops(model.wire, tokens))
  how = (
    f'{impl.name}, forward and backward, one document of {tokens} tokens, {model.num_heads}/'
    f'{model.num_kv_heads} heads of {model.head_dim}, {model.compute_dtype}'
  )
  return Rate('attention_flops_per_s', counted / seconds, how)


def fit_line(sent_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, str]:
  """(bytes/s, latency in seconds, a note or '') of the line seconds = latency + bytes / rate.

  Least squares of the relative error, or the largest size alone would decide. The sizes ascend.
  """
  sent, took = np.asarray(sent_bytes, float), np.asarray(seconds, float)
  slope, latency = np.polyfit(sent, took, 1, w=1 / took)
  if slope * MOST_BYTES_PER_S <= 1:
    note = 'time did not grow with size (noise): the rate is that of the largest size, the latency is 0'
    return float(sent[-1] / took[-1]), 0.0, note
  note = ''
  if latency < 0:
    slope, latency = (sent / took).sum() / ((sent / took) ** 2).sum(), 0.0
    note = 'the fit gave a latency below 0: fitted again without one'
  miss = np.exp(np.abs(np.log((latency + slope * sent) / took)).max())
  if miss > WORTH_SAYING and not note:
    note = f'no straight line: it misses one of the sizes by a factor of {miss:.2g}'
  return float(1 / slope), float(latency), note


def link_rates(
  run: RunConfig, device_mesh: jax.sharding.Mesh, name: str, axis: str, budget_s: float
) -> list[Rate]:
  """Rate and latency of an all-to-all along one axis of the mesh, all its groups at the same time."""
  model, peers = run.model, device_mesh.shape[axis]
  fields = (f'{name}_bytes_per_s', f'{name}_latency_s')
  if peers == 1:
    lacking = 'a node has one rank' if axis == mesh.LOCAL_AXIS else 'a domain has one node'
    return [Rate(field, None, 'nothing', f'not measured: {lacking}') for field in fields]

  def step(x):
    # There and back: what comes back can take the place of what was sent, so the loop need not copy.
    there = lax.optimization_barrier(lax.all_to_all(x, axis, 0, 0))
    return lax.all_to_all(there, axis, 0, 0)

  # The largest is what a dispatch carries in this config, within bounds.
  itemsize = jnp.dtype(model.compute_dtype).itemsize
  wire = model.wire
  dispatched = run.planner.capacity_tokens * sum(wire.operand_heads) * wire.head_dim * wire.itemsize
  largest = min(max(dispatched, LARGEST_BYTES[0]), LARGEST_BYTES[1])
  parts = [max(1, largest // 4**i // peers // itemsize) for i in reversed(range(SIZES))]
  cases = {
    str(part): TimedStep(step, filled(device_mesh, (peers, part), model.compute_dtype, seed=0))
    for part in parts
  }
  seconds = timed(device_mesh, cases, budget_s)
  sent = [(peers - 1) * part * itemsize for part in parts]
  took = [seconds[str(part)] / 2 for part in parts]
  rate, latency_s, note = fit_line(sent, took)
  points = ', '.join(f'{size} in {1e6 * s:.4g} us' for size, s in zip(sent, took, strict=True))
  how = f'all-to-all of {peers} ranks, bytes a rank sends to the others: {points}'
  return [Rate(fields[0], rate, how, note), Rate(fields[1], latency_s, 'the same: seconds at 0 bytes')]


def measured_rates(run: RunConfig, device_mesh: jax.sharding.Mesh, budget_s: float) -> list[Rate]:
  """All rates, each of the four kinds with a quarter of the budget."""
  share_s = budget_s / 4
  bench_common.progress('matmul')
  rates = [matmul_rate(run, device_mesh, share_s)]
  bench_common.progress('attention')
  rates.append(attention_rate(run, device_mesh, share_s))
  for name, axis in (('intra_node', mesh.LOCAL_AXIS), ('inter_node', mesh.NODE)):
    bench_common.progress(f'{name} link')
    rates += link_rates(run, device_mesh, name, axis, share_s)
  return rates


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
      text += f'{name} = {float(f"{rate.value:.4g}")!r}\n'
  return text


def table_rows(rates: Sequence[Rate], run: RunConfig) -> list[dict[str, object]]:
  rows: list[dict[str, object]] = []
  for rate in rates:
    own, value = float(getattr(run.cluster, rate.field)), rate.value
    row: dict[str, object] = {'field': rate.field, 'measured': '-' if value is None else value, 'config': own}
    row['over_config'] = '-' if value is None or not own else value / own
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
  args.output.write_text(gin_text(rates, about), encoding='utf-8')
  bench_common.report(f'rates of ClusterConfig, mesh {shape}', table_rows(rates, run), args.json)
  print('\n' + '\n'.join([*warnings, f'wrote {args.output}', about[1]]))


if __name__ == '__main__':
  command_line.run(main)
