"""Times dispatch and combine against a plain all-to-all of the same bytes.

    python scripts/bench_exchange.py --json exchange.json

`plain` runs the same all-to-alls, one for each SP degree that the exchange knows, on buffers that are already
in place: what is on top of it is packing and compaction. `payload` is one all-to-all over all ranks of the
exchange that carries just the bytes of the heads, without padding or degrees: what an exchange could cost at
the least.
"""

from __future__ import annotations

import bench_common
import jax
import numpy as np
from jax import lax

from repack_jax.commands import command_line
from repack_jax.config import ClusterConfig
from repack_jax.exchange import collectives
from repack_jax.parallel import mesh
from repack_jax.plan import arrays
from repack_jax.plan.plan import PARENTS, Group, Plan
from repack_jax.plan.program import Program
from repack_jax.plan.wire import Wire


def equal_plan(cluster: ClusterConfig, degree: int, capacity_tokens: int, fill: float) -> Plan:
  """Groups of one degree, each with one sample that fills this share of its slots."""
  firsts = range(0, cluster.num_ranks, degree)
  groups = tuple(Group(first, degree, (i,)) for i, first in enumerate(firsts))
  lengths = (max(1, int(degree * capacity_tokens * fill)),) * len(groups)
  return Plan(
    tuple(range(len(groups))), lengths, groups, groups, 'parents', capacity_tokens, cluster.num_ranks,
    cluster.domain_ranks, cluster.ranks_per_node,
  ).validate()  # fmt: skip


def programs(ex: collectives.Exchange, device_mesh: jax.sharding.Mesh, route: arrays.Route, degree: int):
  """(name -> program without arguments) for one exchange, all on data that lies on the devices."""
  place = mesh.sharding(device_mesh, mesh.RANK_BLOCKS)
  ranks = device_mesh.size
  route = jax.device_put(route, place)

  def filled(*shape: int) -> jax.Array:
    return jax.device_put(np.ones((ranks, *shape), np.float32), place)

  def compiled(function, *inputs):
    def block(*args):
      return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))

    spec = mesh.RANK_BLOCKS
    mapped = jax.shard_map(block, mesh=device_mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(mapped).lower(*inputs).compile()
    return lambda: program(*inputs)

  def plain(heads_of):
    sizes = [(p, ex.rows(heads_of, p)) for p in ex.degrees if p > 1]

    def exchanges(*buffers):
      return [
        lax.all_to_all(
          x.reshape(p, -1, x.shape[1]), ex.axis_name, 0, 0,
          axis_index_groups=[list(range(i, i + p)) for i in range(0, ex.span, p)],
        )
        for (p, _), x in zip(sizes, buffers, strict=True)
      ]  # fmt: skip

    return compiled(exchanges, *(filled(rows, ex.row_width) for _, rows in sizes))

  def payload(heads_of):
    rows = -(-ex.rows(heads_of, degree) // ex.span)
    buffer = filled(ex.span, rows, ex.row_width)
    return compiled(lambda x: lax.all_to_all(x, ex.axis_name, 0, 0), buffer)

  wire, t = ex.wire, ex.capacity_tokens
  operands = tuple(filled(t, heads, wire.head_dim) for heads in wire.operand_heads)
  rows = filled(*ex.buffer_shape(wire.combine_heads))
  return {
    'dispatch': {
      'exchange': compiled(lambda *args: collectives.dispatch(ex, args[:-1], args[-1]), *operands, route),
      'plain': plain(wire.dispatch_heads),
      'payload': payload(wire.dispatch_heads),
    },
    'combine': {
      'exchange': compiled(lambda rows, route: collectives.combine(ex, (rows,), route), rows, route),
      'plain': plain(wire.combine_heads),
      'payload': payload(wire.combine_heads),
    },
  }


def main() -> None:
  parser = bench_common.parser(__doc__)
  parser.add_argument('--nodes', type=int, default=2, help='emulated nodes (2)')
  parser.add_argument('--ranks-per-node', type=int, default=8, help='ranks of each (8)')
  parser.add_argument('--tokens', type=int, default=1024, help='token slots of a rank (1024)')
  parser.add_argument('--heads', type=int, default=16, help='query heads (16)')
  parser.add_argument('--kv-heads', type=int, default=4, help='key/value heads (4)')
  parser.add_argument('--head-dim', type=int, default=64, help='head width (64)')
  parser.add_argument('--rounds', type=int, default=15, help='timed rounds of a case (15)')
  args = parser.parse_args()
  cluster = ClusterConfig(nodes=args.nodes, ranks_per_node=args.ranks_per_node, platform='cpu')
  wire = Wire.of_attention(args.heads, args.kv_heads, args.head_dim, 'float32')
  mesh.start_devices(cluster)
  device_mesh = mesh.make_mesh(cluster)
  rows = []
  for scope, size in (('local', cluster.ranks_per_node), ('domain', cluster.domain_ranks)):
    degrees = wire.degrees(size)
    plan = equal_plan(cluster, degrees[-1], args.tokens, 0.9)
    for known in (degrees[-1:], degrees):
      program = Program.of_plan(plan, known)
      ex = collectives.Exchange.of_program(
        program, PARENTS, wire, mesh.DOMAIN_AXES, device_mesh.shape, 'dense'
      )
      route = arrays.route_arrays(plan, PARENTS, program)
      bench_common.progress(f'{scope} exchange that knows {len(known)} degrees')
      for site, candidates in programs(ex, device_mesh, route, degrees[-1]).items():
        seconds = bench_common.measure(candidates, args.rounds, budget_s=30)
        rows.append(
          {'scope': scope, 'site': site, 'knows': 'SP' + ', '.join(map(str, known))}
          | {f'{name}_ms': value * 1e3 for name, value in seconds.items()}
          | {
            'over_plain': seconds['exchange'] / seconds['plain'],
            'over_payload': seconds['exchange'] / seconds['payload'],
          }
        )
  title = (
    f'exchange, dense, {args.tokens} tokens a rank, {args.heads}/{args.kv_heads} heads of {args.head_dim}'
  )
  bench_common.report(title, rows, args.json)


if __name__ == '__main__':
  command_line.run(main)
