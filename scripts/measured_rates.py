"""What `scripts/calibrate.py` measures: rates of ClusterConfig, each by a step that all ranks run at once.

Every step runs many times in one program and feeds the next, so neither launches nor a clever compiler hide
in the figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import bench_common
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from repack_jax.config import ModelConfig, RunConfig, weights
from repack_jax.exchange.collectives import choose_exchange, exchange_blocks
from repack_jax.kinds import FullAttention
from repack_jax.ops.attention import AttentionCase, choose_attention
from repack_jax.parallel import mesh
from repack_jax.predict.costs import ATTENTION_BACKWARD_OVER_FORWARD

ROUNDS = 15
PROGRAM_S = 0.05  # a timed program repeats its step for about this long, which launching it must not distort
MOST_REPEATS = 100
SIZES = 5  # of an exchange, each four times the one before; of weights at most as many
SHORTEST_TOKENS = (
  512  # of the packs that the curve of attention is measured with, each four times the one before
)
ROW_BYTES = 512  # of an exchange: whole rows on every wire
LARGEST_BYTES = (2**20, 64 * 2**20)  # bounds of the largest: so that a slope shows, and that memory holds
MOST_BYTES_PER_S = 1e15  # no link: a fit beyond it is noise
WORTH_SAYING = 1.25  # a fitted line that misses a size by this factor


Curve = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Rate:
  """A field of ClusterConfig: its value (None: not measured), what was run, and what to know of the value."""

  field: str
  value: float | str | Curve | None
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


def filled(device_mesh: Mesh, shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
  """Normal values [ranks, *shape], made where they lie."""
  place = mesh.sharding(device_mesh, mesh.RANK_BLOCKS)
  make = jax.jit(lambda key: jax.random.normal(key, (device_mesh.size, *shape), dtype), out_shardings=place)
  return make(jax.random.key(seed))


def repeated(device_mesh: Mesh, case: TimedStep, repeats: int) -> Callable[[], object]:
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


def timed(device_mesh: Mesh, cases: Mapping[str, TimedStep], budget_s: float) -> dict[str, float]:
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


def matmul_rate(run: RunConfig, device_mesh: Mesh, budget_s: float) -> Rate:
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


def packs(tokens: int) -> list[int]:
  """Returns the lengths of documents that attention is measured with, the last of which fills a rank."""
  lengths, length = [], SHORTEST_TOKENS
  while length < tokens:
    lengths.append(length)
    length *= 4
  return [*lengths, tokens]


def attention_rates(run: RunConfig, device_mesh: Mesh, budget_s: float) -> list[Rate]:
  """Causal documents of several lengths that fill a rank, both passes; counted as the planner counts them."""
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
  cases, counted = {}, {}
  for length in packs(tokens):
    documents = np.array([length] * (tokens // length) + [tokens % length] * (tokens % length > 0))
    row = np.repeat(np.arange(len(documents), dtype=np.int32), documents)
    segments = jax.device_put(np.tile(row, (device_mesh.size, 1)), place)
    cases[str(length)] = TimedStep(step, carry, (segments,))
    counted[length] = (1 + ATTENTION_BACKWARD_OVER_FORWARD) * float(kind.flops(model.wire, documents).sum())
  seconds = timed(device_mesh, cases, budget_s)
  rates = {length: flops / seconds[str(length)] for length, flops in counted.items()}
  how = (
    f'{impl.name}, forward and backward, one document of {tokens} tokens, {model.num_heads}/'
    f'{model.num_kv_heads} heads of {model.head_dim}, {model.compute_dtype}'
  )
  longest = Rate('attention_flops_per_s', rates[tokens], how)
  if len(rates) == 1:
    reason = f'not measured: a rank holds no more than {tokens} tokens'
    return [longest, Rate('attention_curve', None, 'nothing', reason)]
  curve = tuple((length, float(f'{rate / rates[tokens]:.3g}')) for length, rate in rates.items())
  how = f'the same {tokens} tokens as packs of documents of so many'
  return [longest, Rate('attention_curve', curve, how)]


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


def exchange_kind(run: RunConfig, device_mesh: Mesh, budget_s: float) -> Rate:
  """`ragged` or `dense`, whichever takes less for what a dispatch carries in a node, at all SP degrees.

  A dense site has an all-to-all for each degree that a program knows, a ragged one has one in all.
  """
  platform, local = device_mesh.devices.flat[0].platform, device_mesh.shape[mesh.LOCAL_AXIS]
  kinds = list(dict.fromkeys(choose_exchange(name, platform) for name in ('ragged', 'dense')))
  if len(kinds) == 1:
    return Rate('exchange', kinds[0], f'the only kind that XLA has on {platform}')
  if local == 1:
    return Rate('exchange', None, 'nothing', 'not measured: a node has one rank')
  rows = max(1, _dispatched_bytes(run) // local // ROW_BYTES)
  cases = {
    kind: _exchange(device_mesh, mesh.LOCAL_AXIS, kind, run.model.compute_dtype, rows) for kind in kinds
  }
  seconds = {kind: took / 2 for kind, took in timed(device_mesh, cases, budget_s).items()}
  degrees = sum(1 < degree <= local for degree in run.sp_degrees)
  chosen = 'dense' if degrees * seconds['dense'] < seconds['ragged'] else 'ragged'
  each = ', '.join(f'{kind} in {1e6 * took:.4g} us' for kind, took in seconds.items())
  how = (
    f'{rows * ROW_BYTES} bytes a peer of {local}: {each}; a dense site has one for each of {degrees} degrees'
  )
  return Rate('exchange', chosen, how)


def _dispatched_bytes(run: RunConfig) -> int:
  """What a dispatch carries of a full rank in this config, within bounds."""
  wire = run.model.wire
  dispatched = run.planner.capacity_tokens * sum(wire.operand_heads) * wire.head_dim * wire.itemsize
  return min(max(dispatched, LARGEST_BYTES[0]), LARGEST_BYTES[1])


def link_rates(
  run: RunConfig, device_mesh: Mesh, kind: str, name: str, axis: str, peer_s: float, budget_s: float
) -> list[Rate]:
  """Rate and latency of an exchange along one axis of the mesh, all its groups at the same time.

  Args:
    kind: `ragged` or `dense`.
    peer_s: the part of the latency that is each peer's.
  """
  peers = device_mesh.shape[axis]
  fields = (f'{name}_bytes_per_s', f'{name}_latency_s')
  if peers == 1:
    return [_not_there(field, axis) for field in fields]
  rows = sorted({max(1, _dispatched_bytes(run) // 4**i // peers // ROW_BYTES) for i in range(SIZES)})
  seconds = timed(
    device_mesh,
    {str(n): _exchange(device_mesh, axis, kind, run.model.compute_dtype, n) for n in rows},
    budget_s,
  )
  sent = [(peers - 1) * n * ROW_BYTES for n in rows]
  took = [seconds[str(n)] / 2 for n in rows]
  rate, latency_s, note = fit_line(sent, took)
  how = f'{kind} all-to-all of {peers} ranks, bytes a rank sends to the others: {_points(sent, took)}'
  at_0 = 'the same: seconds at 0 bytes' + (f', less {peers - 1} x peer_latency_s' if peer_s else '')
  return [
    Rate(fields[0], rate, how, note),
    Rate(fields[1], max(0.0, latency_s - (peers - 1) * peer_s), at_0),
  ]


def peer_latency(run: RunConfig, device_mesh: Mesh, kind: str, budget_s: float) -> Rate:
  """What each peer adds to an exchange of next to nothing: groups of 2, 4, ... ranks, up to a node's."""
  field, local = 'peer_latency_s', device_mesh.shape[mesh.LOCAL_AXIS]
  sizes = [2**i for i in range(1, local.bit_length())]
  if len(sizes) < 2:
    return Rate(field, None, 'nothing', 'not measured: takes nodes of four ranks or more')
  took = []
  for size in sizes:
    # The same ranks, with their nodes cut into smaller ones.
    parts = Mesh(device_mesh.devices.reshape(-1, 1, size), mesh.ALL_AXES, axis_types=device_mesh.axis_types)
    case = _exchange(parts, mesh.LOCAL_AXIS, kind, run.model.compute_dtype, rows=1)
    took.append(timed(parts, {'': case}, budget_s / len(sizes))[''] / 2)
  slope_s, _ = np.polyfit(np.array(sizes) - 1, took, 1)
  points = ', '.join(f'{size} in {1e6 * s:.4g} us' for size, s in zip(sizes, took, strict=True))
  how = f'{kind} all-to-alls of {ROW_BYTES} bytes a peer in a node, by ranks: {points}'
  note = '' if slope_s > 0 else 'time did not grow with the ranks (noise, or all are addressed at once)'
  return Rate(field, max(0.0, float(slope_s)), how, note)


def parameter_rate(run: RunConfig, device_mesh: Mesh, name: str, axis: str, budget_s: float) -> Rate:
  """Weights gathered along one axis of the mesh in the compute dtype, and reduce-scattered in float32."""
  model, field, ranks = run.model, f'parameter_{name}_bytes_per_s', device_mesh.shape[axis]
  if ranks == 1:
    return _not_there(field, axis)
  # What a rank has of a weight before it is gathered along this axis: over nodes first, then inside them.
  local = device_mesh.shape[mesh.LOCAL_AXIS]
  share = ranks if axis == mesh.LOCAL_AXIS else ranks * local
  all_sizes = {
    min(max(1, weight.size // share), LARGEST_BYTES[1] // 4 // ranks)
    for layer in range(model.num_layers)
    for weight in weights.leaves(weights.layer(model, layer))
  }
  found = sorted(all_sizes | ({4 * max(all_sizes)} if len(all_sizes) == 1 else set()))
  sizes = sorted({found[round(i * (len(found) - 1) / (SIZES - 1))] for i in range(SIZES)})

  def step(shard):
    whole = lax.optimization_barrier(lax.all_gather(shard, axis, tiled=True))
    summed = lax.psum_scatter(whole.astype(jnp.float32), axis, tiled=True)
    return (summed / ranks).astype(shard.dtype)

  seconds = timed(
    device_mesh,
    {str(n): TimedStep(step, filled(device_mesh, (n,), model.compute_dtype, seed=0)) for n in sizes},
    budget_s,
  )
  moved = [(ranks - 1) * n * (jnp.dtype(model.compute_dtype).itemsize + 4) for n in sizes]
  took = [seconds[str(n)] for n in sizes]
  rate, latency_s, note = fit_line(moved, took)
  how = (
    f'all-gather in {model.compute_dtype} and reduce-scatter in float32 of {ranks} ranks, in the sizes of a '
    f"layer's weights, bytes of both that a rank takes in: {_points(moved, took)}; each takes "
    f'{1e6 * latency_s / 2:.4g} us at 0 bytes'
  )
  return Rate(field, rate, how, note)


def _not_there(field: str, axis: str) -> Rate:
  lacking = 'a node has one rank' if axis == mesh.LOCAL_AXIS else 'a domain has one node'
  return Rate(field, None, 'nothing', f'not measured: {lacking}')


def _points(sent: Sequence[int], took: Sequence[float]) -> str:
  return ', '.join(f'{size} in {1e6 * s:.4g} us' for size, s in zip(sent, took, strict=True))


def _exchange(device_mesh: Mesh, axis: str, kind: str, dtype: str, rows: int) -> TimedStep:
  """Two exchanges of so many rows a peer, there and back: what returns can take the place of what went."""
  peers = device_mesh.shape[axis]
  sizes = jnp.full(peers, rows, jnp.int32)

  def step(blocks):
    there = lax.optimization_barrier(exchange_blocks(axis, kind, blocks, sizes, sizes))
    return exchange_blocks(axis, kind, there, sizes, sizes)

  shape = (peers, rows, ROW_BYTES // jnp.dtype(dtype).itemsize)
  return TimedStep(step, filled(device_mesh, shape, dtype, seed=0))


def measured_rates(run: RunConfig, device_mesh: Mesh, budget_s: float) -> list[Rate]:
  """All rates, each of the eight kinds of steps with its share of the budget."""
  share_s = budget_s / 8
  bench_common.progress('matmul')
  rates = [matmul_rate(run, device_mesh, share_s)]
  bench_common.progress('attention')
  rates += attention_rates(run, device_mesh, share_s)
  bench_common.progress('kinds of exchange')
  of_kind = exchange_kind(run, device_mesh, share_s)
  kind = of_kind.value if isinstance(of_kind.value, str) else run.cluster.exchange
  bench_common.progress('latency of a peer')
  of_peer = peer_latency(run, device_mesh, kind, share_s)
  peer_s = of_peer.value if isinstance(of_peer.value, float) else 0.0
  axes = (('intra_node', mesh.LOCAL_AXIS), ('inter_node', mesh.NODE))
  for name, axis in axes:
    bench_common.progress(f'{name} link')
    rates += link_rates(run, device_mesh, kind, name, axis, peer_s, share_s)
  rates += [of_kind, of_peer]
  for name, axis in axes:
    bench_common.progress(f'parameters over the {name} link')
    rates.append(parameter_rate(run, device_mesh, name, axis, share_s))
  return rates
