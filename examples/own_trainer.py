"""Trains a small model that is not this project's, on a mesh of its own, with layerwise repacking.

Run it as it is, `python examples/own_trainer.py`; `docs/library.md` leads through it.
"""

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import repack_jax as rj

AXES, VOCAB, D, HEADS, KV_HEADS, WIDTH = ('host', 'chip'), 64, 32, 8, 2, 4
KINDS = (rj.FullAttention(), rj.SlidingWindowAttention(window_tokens=16))  # one layer of each

# What costs what, in seconds of a rank. The rates are made up: 10^8 operations/s, 10^8 and 10^7 bytes/s.
CLUSTER = rj.ClusterConfig(nodes=2, ranks_per_node=4, intra_node_bytes_per_s=1e8, inter_node_bytes_per_s=1e7)
WIRE = rj.Wire.of_attention(HEADS, KV_HEADS, WIDTH, 'float32')
PLANNER = rj.PlannerConfig(capacity_tokens=64)
Sample = namedtuple('Sample', ['tokens', 'targets'])  # int32 [n] each; target -1: none


def layer(kind):
  return rj.LayerCosts(kind.layout, lambda lengths: kind.flops(WIRE, lengths) / 1e8, after_s=1e-5)


COSTS = rj.Costs(CLUSTER, WIRE, tuple(map(layer, KINDS)))


def init(key):
  shapes = {'qkv': (2, D, (HEADS + 2 * KV_HEADS) * WIDTH), 'out': (2, HEADS * WIDTH, D), 'table': (VOCAB, D)}
  return {name: 0.2 * jax.random.normal(key, shape) for name, shape in shapes.items()}


def rank_loss(params, batch, program):
  """The sum over this rank's own tokens."""
  x = params['table'][batch.tokens]
  for kind, qkv, out in zip(KINDS, params['qkv'], params['out'], strict=True):
    q, k, v = jnp.split((x @ qkv).reshape(len(x), -1, WIDTH), (HEADS, HEADS + KV_HEADS), axis=1)
    x += rj.repacked_attention(kind, q, k, v, batch, program, AXES).reshape(len(x), -1) @ out
  losses = -jnp.take_along_axis(jax.nn.log_softmax(x @ params['table'].T), batch.targets[:, None], axis=1)
  return jnp.where(batch.targets >= 0, losses[:, 0], 0).sum()


def loss_and_gradients(mesh, params, arrays, program):
  def rank(params, arrays):
    own = jax.tree.map(lambda x: x[0], arrays)
    return jax.lax.psum(jax.value_and_grad(rank_loss)(params, own, program), AXES)

  everywhere, ranks = PartitionSpec(), PartitionSpec(AXES)
  mapped = jax.shard_map(rank, mesh=mesh, in_specs=(everywhere, ranks), out_specs=everywhere, check_vma=False)
  return mapped(params, arrays)


def train(mesh, batches, rate=0.3):
  """Yields each batch's loss and plans."""
  params, step = init(jax.random.key(0)), jax.jit(loss_and_gradients, static_argnames=('mesh', 'program'))
  for batch in batches:
    plans = rj.solve([len(sample.tokens) for sample in batch], COSTS, PLANNER).plans
    programs = [rj.Program.of_plan(plan, COSTS.degrees(PLANNER)) for plan in plans]
    parts = [step(mesh, params, rj.pack(plan, batch, p), p) for plan, p in zip(plans, programs, strict=True)]
    targets = sum(int((sample.targets >= 0).sum()) for sample in batch)
    loss, grads = jax.tree.map(lambda *sums, n=targets: sum(sums) / n, *parts)
    params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    yield float(loss), plans


def samples(rng, lengths):
  """Documents that repeat a few tokens over and over."""
  tokens = [np.resize(rng.integers(VOCAB, size=7), n).astype(np.int32) for n in lengths]
  return [Sample(x, np.append(x[1:], -1).astype(np.int32)) for x in tokens]


if __name__ == '__main__':
  jax.config.update('jax_num_cpu_devices', 8)  # ranks emulated on this machine
  ranks = jax.make_mesh((2, 4), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
  batch = samples(np.random.default_rng(0), (200, 150, 60, 40, 9, 5))
  for loss, plans in train(ranks, [batch] * 20):
    print(f'loss {loss:.3f}, parents', *(f'SP{group.size}' for group in plans[0].parents if group.samples))
  print(plans[0].table())
