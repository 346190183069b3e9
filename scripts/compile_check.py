"""Compiles the training step for a cluster that is not there, and checks what the compiler made of it.

    python scripts/compile_check.py --config configs/tiny_cpu.gin --topology v5p:2x2x4
    python scripts/compile_check.py --config configs/moe_1f3s_31b.gin --topology h200:4x8

Topologies: TPU v5p:2x4x4, v6e:4x8, tpu7x:2x2x4 (chips); GPU h100:2x8, h100:4x8, h200:4x8 (nodes x GPUs);
other sizes in the same manner. Nothing runs: collectives, memory and operations are read from the compiled
program. Bytes are counted for the config's first plan with parents across nodes and children inside them.

Exit codes: 0 all rules hold; 1 one does not; 2 a mistake in the arguments, or the compiler is not installed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from repack_jax.checks import ConfigError
from repack_jax.commands import command_line
from repack_jax.compile_check import hlo, topology
from repack_jax.compile_check.collectives import collectives
from repack_jax.compile_check.rules import (
  CORES,
  SITES,
  Check,
  byte_checks,
  classify,
  exchange_checks,
  exposed,
  fits,
  matmul_check,
  memory_check,
  overlap_check,
  parameter_sizes,
  placement_check,
  table,
)
from repack_jax.config import RunConfig
from repack_jax.config.cluster import MAX_DOMAIN_RANKS
from repack_jax.config.gin_files import load
from repack_jax.config.paths import packaged_configs
from repack_jax.data.batches import Batcher
from repack_jax.data.index import index_samples
from repack_jax.data.lengths import length_batches, read_lengths
from repack_jax.data.sources import open_source
from repack_jax.files import write_whole
from repack_jax.parallel import xla_flags
from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS, Plan
from repack_jax.plan.program import Program
from repack_jax.predict.cost_model import model_costs
from repack_jax.solver import SampleTooLong, solve

_SEARCHED_BATCHES = 64


class DoesNotFit(Exception):
  """A program for which the compiler found no room."""


def run_on(run: RunConfig, where: topology.Topology) -> RunConfig:
  """Returns the run with the topology's shape, memory and rows; the rates it plans with stay."""
  profile = load([str(packaged_configs() / 'clusters' / where.machine.profile)], []).cluster
  cluster = dataclasses.replace(
    run.cluster,
    platform=where.machine.platform,
    domains=max(1, where.num_devices // MAX_DOMAIN_RANKS),
    nodes=min(MAX_DOMAIN_RANKS, where.num_devices) // where.ranks_per_node,
    ranks_per_node=where.ranks_per_node,
    memory_bytes=profile.memory_bytes,
    memory_bytes_per_s=profile.memory_bytes_per_s,
    wire_row_bytes=profile.wire_row_bytes,
  )
  return dataclasses.replace(run, cluster=cluster)


def batches_of(run: RunConfig) -> Iterator[Sequence[int]]:
  """Lengths of the config's batches, from its file of lengths or from its documents."""
  if run.simulator.lengths:
    lengths = read_lengths(run.simulator.lengths, run.data)
    for batch in length_batches(lengths, run.data, run.simulator):
      yield batch.tolist()
  source = open_source(run.data)
  for documents in Batcher(run.data, source, None, index_samples(source, run.data)):
    yield [len(sample) for sample in documents.samples]


def plan_of(run: RunConfig) -> Plan:
  """The first plan with parents across nodes, and children inside them where the mode has children."""
  cluster = run.cluster
  children_stay = run.planner.mode in ('repack', 'solve') and run.planner.sparse_exchange != 'halo'
  wanted = cluster.domain_ranks, cluster.ranks_per_node if children_stay else cluster.domain_ranks
  costs, fallback = model_costs(cluster, run.model), None
  for lengths in itertools.islice(batches_of(run), _SEARCHED_BATCHES):
    try:
      plans = solve(lengths, costs, run.batch_planner).plans
    except SampleTooLong as error:
      raise ConfigError(str(error)) from None
    for plan in plans:
      if (plan.span(PARENTS), plan.span(CHILDREN)) == wanted:
        return plan
      if fallback is None or plan.widest(PARENTS) > fallback.widest(PARENTS):
        fallback = plan
  assert fallback is not None
  return fallback


def compile_step(
  run: RunConfig, program: Program, devices: Sequence[Any]
) -> tuple[Any, dict[str, Any], dict[str, float]]:
  """(the step, its compiled programs, seconds that each took).

  Raises:
    DoesNotFit: where the compiler finds that a program needs more memory than the device has.
  """
  import jax

  from models.transformer import Decoder
  from repack_jax.parallel.mesh import mesh_of
  from repack_jax.training.step import TrainStep

  step = TrainStep(run, mesh_of(devices, run.cluster), Decoder(run.model))
  programs, seconds = {}, {}
  for name, lowered in step.lowered(program).items():
    begun = time.perf_counter()
    try:
      programs[name] = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      raise DoesNotFit(str(error).splitlines()[0]) from None
    seconds[name] = time.perf_counter() - begun
  return step, programs, seconds


def examine(
  run: RunConfig, plan: Plan, program: Program, step: Any, programs: dict[str, Any]
) -> dict[str, Any]:
  """The table, the memory and the checks."""
  import jax

  from repack_jax.ops.attention import cudnn
  from repack_jax.parallel.mesh import device_place
  from repack_jax.parallel.sharded import buffer_elements

  shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(step.state_shapes().params)]
  # A layer's own out of its stack, whose first two dimensions are repeats and layers.
  shards += [shape[2:] for shape in shards if len(shape) > 2]
  for of_run in itertools.chain.from_iterable(step.placed['stacks']):
    shards += [(n,) for n in buffer_elements(of_run, run.model.compute_dtype, step.mesh)]
  cluster, node = run.cluster, run.cluster.ranks_per_node
  sizes = parameter_sizes(shards, cluster.nodes, node)
  accumulate, update = (hlo.CompiledProgram(programs[name].as_text()) for name in ('accumulate', 'update'))
  exchange = step.chosen.exchange
  found = classify(collectives(accumulate), sizes, exchange)
  buffer_rows = receive_rows(step, program)
  memory = step.memory_bytes(programs['accumulate'])
  if step.chosen.attention.name == 'cudnn':
    model = run.model
    halos = (model.kind(letter).halo_slots(program) for letter in model.layer_kinds)
    slots = plan.capacity_tokens + max(halo or 0 for halo in halos)
    # As many tokens times heads in a group of any degree.
    memory['cudnn_workspace_bytes'] = cudnn.workspace_bytes(slots, model.num_heads, model.head_dim)
  in_update = classify(collectives(update), sizes, exchange)
  checks = [
    *exchange_checks(found, run.model, plan, program, cluster),
    *byte_checks(found, run.model, model_costs(cluster, run.model), plan, program, buffer_rows),
    matmul_check(accumulate.matmul_flops(CORES), run.model, plan.capacity_tokens, expert_rows(step, plan)),
    *([overlap_check(found)] if cluster.prefetch_layers else []),
    placement_check([[device_place(d) for d in local] for local in step.mesh.devices.reshape(-1, node)]),
    memory_check(memory, cluster.memory_bytes),
  ]
  return {
    'rows': table(found, node),
    'exposed_bytes': exposed(found),
    'update_rows': table(in_update, node),
    'memory': memory,
    'checks': checks,
  }


def receive_rows(step: Any, program: Program) -> dict[tuple[str, str, int], int]:
  """Returns rows of the buffer that each (layout, site, chunk) receives into."""
  from repack_jax.exchange.collectives import Exchange
  from repack_jax.parallel.mesh import DOMAIN_AXES

  wire, rows = step.run.model.wire.cut(step.chosen.exchange_chunks), {}
  for layout in LAYOUTS:
    exchange = Exchange.of_program(program, layout, wire, DOMAIN_AXES, step.mesh.shape, step.chosen.exchange)
    for chunk in range(exchange.wire.chunks):
      of_sites = exchange.wire.dispatched(chunk), exchange.wire.combined(chunk)
      for site, heads_of in zip(SITES, of_sites, strict=True):
        rows[layout, site, chunk] = exchange.buffer_shape(heads_of)[0]
  return rows


def expert_rows(step: Any, plan: Plan) -> int:
  """Rows that a rank's grouped products multiply: those of its buffers, and what blocks lose."""
  from models.experts import block_rows
  from repack_jax.ops.grouped import product_rows

  model, spread = step.run.model, step.chosen.expert_ranks
  if not model.num_experts:
    return 0
  rows = plan.capacity_tokens * model.experts_per_token
  if spread > 1:
    rows = spread * block_rows(model, plan.capacity_tokens, spread)
  return product_rows(step.chosen.grouped, rows, model.num_experts // spread)


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
  print(f'\n{title}')
  print(
    f'{"layer":<10}{"direction":<11}{"purpose":<23}{"collective":<20}{"times":>6}{"groups":>9}  {"span":<15}'
    f'{"buffers":>11}  {"overlap"}'
  )
  for row in rows:
    print(
      f'{row["layer"]:<10}{row["direction"]:<11}{row["purpose"]:<23}{row["collective"]:<20}{row["times"]:>6}'
      f'{row["groups"]:>9}  {row["span"]:<15}{row["buffer_bytes"] / 1e6:>8,.1f} MB  '
      f'{row["overlap"]}'
    )


def report(checks: Sequence[Check]) -> bool:
  """Prints each rule; whether all hold."""
  print()
  for check in checks:
    print(f'{"ok    " if check.passed else "FAILED"}  {check.name}: {check.found}')
    if not check.passed:
      print(f'        remedy: {check.remedy}')
  return all(check.passed for check in checks)


def main(argv: Sequence[str] | None = None) -> None:
  parser = command_line.described(__doc__)
  command_line.add_config_arguments(parser, required=True)
  parser.add_argument(
    '--topology', required=True, metavar='NAME', help='what to compile for, for example v5p:2x4x4'
  )
  parser.add_argument(
    '--own-degrees', action='store_true',
    help="of SP degrees, the program knows the plan's alone: it compiles in a fraction of the time",
  )  # fmt: skip
  parser.add_argument(
    '--json', type=command_line.output_file, metavar='FILE', help='also write the results here'
  )
  args = parser.parse_args(argv)
  where = topology.parse(args.topology)
  run = run_on(load(args.config, args.set), where)
  topology.prepare(where, xla_flags.with_gpu_flags(os.environ.get('XLA_FLAGS', '')))
  logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stdout)
  logging.getLogger('jax').setLevel(logging.WARNING)
  logging.getLogger('absl').setLevel(logging.WARNING)

  plan = plan_of(run)
  devices = topology.devices(where, run.cluster.memory_bytes, run.cluster.memory_bytes_per_s)
  program = Program.of_plan(plan, None if args.own_degrees else run.sp_degrees)
  print(f'compiling for {where.name}: {len(devices)} devices, {program}', flush=True)
  try:
    step, programs, seconds = compile_step(run, program, devices)
  except DoesNotFit as error:
    report([fits(False, str(error))])
    sys.exit(1)
  print(', '.join(f'{name} compiled in {s:.1f} s' for name, s in seconds.items()))
  found = examine(run, plan, program, step, programs)
  print_table(
    'collectives of a micro-batch, forward and backward; buffers of all times together', found['rows']
  )
  print_table('collectives of the update', found['update_rows'])
  shown = (
    f'{purpose} {shown / 1e6:,.1f} of {total / 1e6:,.1f} MB'
    for purpose, (shown, total) in found['exposed_bytes'].items()
  )
  print(f'\nnot hidden by products or kernels: {"; ".join(shown)}')
  print('\nmemory of a device, bytes')
  for name, size in found['memory'].items():
    print(f'  {name.removesuffix("_bytes"):<28}{size:>18,}')
  passed = report(found['checks'])
  if args.json:
    found['checks'] = [dataclasses.asdict(check) for check in found['checks']]
    write_whole(
      args.json, json.dumps({'topology': where.name, 'compile_s': seconds, **found}, indent=1) + '\n'
    )
  if not passed:
    sys.exit(1)


if __name__ == '__main__':
  command_line.run(main)
