"""A trainer that is not this project's: its own model and mesh axes, with layerwise repacking in its attention.

python examples/own_trainer.py
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import repack_jax as rj

HOSTS, CHIPS, AXES = 2, 4, ('host', 'chip')
VOCAB, MODEL, HEADS, KV_HEADS, WIDTH = 64, 32, 8, 2, 4
KINDS = (rj.FullAttention(), rj.SlidingWindowAttention(window_tokens=16))

# What costs what on this machine, in seconds of a rank: made-up rates here, on which planning depends.
cluster = rj.ClusterConfig(
  nodes=HOSTS, ranks_per_node=CHIPS, intra_node_bytes_per_s=1e8, inter_node_bytes_per_s=2e7
)
wire = rj.Wire.of_attention(HEADS, KV_HEADS, WIDTH, 'float32')
layers = [rj.LayerCosts(kind.layout, lambda n, kind=kind: kind.flops(wire, n) / 1e8) for kind in KINDS]
costs, planner = rj.Costs(cluster, wire, tuple(layers)), rj.PlannerConfig(capacity_tokens=128)


class Sample(NamedTuple):
  tokens: np.ndarray
  targets: np.ndarray  # -1: none


def init(key):
  shapes = {
    'qkv': (2, MODEL, (HEADS + 2 * KV_HEADS) * WIDTH),
    'out': (2, HEADS * WIDTH, MODEL),
    'table': (VOCAB, MODEL),
  }
  return {
    name: 0.2 * jax.random.normal(jax.random.fold_in(key, i), shape)
    for i, (name, shape) in enumerate(shapes.items())
  }


def rank_loss(params, batch, program):
  """The sum of losses over this rank's own tokens."""
  x = params['table'][batch.tokens]
  for kind, qkv, out in zip(KINDS, params['qkv'], params['out'], strict=True):
    heads = (x @ qkv).reshape(len(x), -1, WIDTH)
    q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
    x = x + rj.repacked_attention(kind, q, k, v, batch, program, AXES).reshape(len(x), -1) @ out
  losses = -jnp.take_along_axis(jax.nn.log_softmax(x @ params['table'].T), batch.targets[:, None], 1)[:, 0]
  return jnp.where(batch.targets >= 0, losses, 0).sum()


def make_step(mesh):
  def step(params, arrays, program):
    def rank(params, arrays):
      own = jax.tree.map(lambda x: x[0], arrays)
      return jax.lax.psum(jax.value_and_grad(rank_loss)(params, own, program), AXES)

    specs = PartitionSpec(), PartitionSpec(AXES)
    return jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(
      params, arrays
    )

  return jax.jit(step, static_argnames='program')


def train(mesh, batches, rate=0.5):
  """Yields each batch's mean loss."""
  params, step = init(jax.random.key(0)), make_step(mesh)
  for batch in batches:
    total, targets = None, sum(int((sample.targets >= 0).sum()) for sample in batch)
    for plan in rj.solve([len(sample.tokens) for sample in batch], costs, planner).plans:
      program = plan.program(costs.degrees(planner)[-1])
      sums = step(params, rj.pack(plan, batch, program), program)
      total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    params = jax.tree.map(lambda p, g: p - rate * g / targets, params, total[1])
    yield float(total[0]) / targets
