"""Times the training step: modes side by side on an emulated mesh, and one rank against a plain model.

    python scripts/bench_step.py --json step.json

The modes run the same batches of real documents in one process, round by round; a step is all micro-batches
of a batch and the update. The last rows are one rank's forward and backward pass through plans, exchange and
`shard_map`, and the same model under `jax.jit` alone. Compile time stands apart.

On emulated ranks that share cores this measures the work that all ranks do together, not what slow links
between nodes would add: for that see the byte counts.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import bench_common
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from models.transformer import Decoder
from repack_jax.commands import command_line
from repack_jax.config import MODES, RunConfig
from repack_jax.config.gin_files import load
from repack_jax.data.batches import Batch, Batcher
from repack_jax.data.sources import open_source
from repack_jax.ops.attention import attention
from repack_jax.parallel import mesh
from repack_jax.plan.arrays import pack
from repack_jax.plan.plan import Plan
from repack_jax.predict.cost_model import model_costs
from repack_jax.solver import solve
from repack_jax.training.context import StepContext
from repack_jax.training.step import TrainStep

Row = dict[str, Any]


class PlainContext(StepContext):
  """The same layers without groups: attention on the rank's own tokens, no exchange."""

  def attend(self, kind, q, k, v, batch):
    return attention(q, k, v, batch.segments, kind, self.chosen.attention.name)


def plans_of(run: RunConfig, batch: Batch, mode: str) -> tuple[Plan, ...]:
  planner = dataclasses.replace(run.batch_planner, mode=mode)
  return solve([len(sample) for sample in batch.samples], model_costs(run.cluster, run.model), planner).plans


def mode_rows(run: RunConfig, batches: list, rounds: int) -> list[Row]:
  """Seconds of a step and tokens/s of each mode, over the same batches."""
  step = TrainStep(run, mesh.make_mesh(run.cluster), Decoder(run.model))
  state, sums = step.init_state(), step.zero_sums()
  runs, rows = {}, list[Row]()

  def make(mode: str):
    prepared = []
    for batch in batches:
      programs = {plan: step.program(plan) for plan in plans_of(run, batch, mode)}
      arrays = [step.put(pack(plan, batch.samples, program)) for plan, program in programs.items()]
      targets = sum(int((s.targets >= 0).sum()) for s in batch.samples)
      prepared.append((list(programs.values()), arrays, targets))

    def steps():
      nonlocal state, sums
      for programs, arrays, targets in prepared:
        for program, packed in zip(programs, arrays, strict=True):
          sums = step.accumulate(state, sums, program, packed)
        state, metrics, sums = step.update(state, sums, targets)
      return metrics

    return steps, prepared

  for mode in MODES:
    bench_common.progress(f'mode {mode}')
    runs[mode], prepared = make(mode)
    begun, traces = time.perf_counter(), step.traces['accumulate']
    jax.block_until_ready(runs[mode]())
    rows.append(
      {
        'case': mode,
        'compiles': step.traces['accumulate'] - traces,
        'compile_s': time.perf_counter() - begun,
        'micro_batches': sum(len(programs) for programs, _, _ in prepared),
      }
    )
  seconds = bench_common.measure(runs, rounds, budget_s=240)
  tokens = sum(batch.num_tokens for batch in batches)
  for row in rows:
    step_s = seconds[str(row['case'])] / len(batches)
    row['compile_s'] = max(0.0, float(row['compile_s']) - step_s * len(batches)) if row['compiles'] else 0.0
    row |= {
      'step_s': step_s,
      'tokens_per_s': tokens / len(batches) / step_s,
      'over_parents': step_s * len(batches) / seconds['parents'],
    }
  return rows


def one_rank_rows(run: RunConfig, batch, rounds: int) -> list[Row]:
  """One rank's forward and backward pass against the same model without plans, exchange and shard_map."""
  bench_common.progress('one rank')
  cluster = dataclasses.replace(run.cluster, nodes=1, ranks_per_node=1)
  planner = dataclasses.replace(run.planner, capacity_tokens=run.data.batch_tokens)
  model = dataclasses.replace(run.model, remat='none')  # remat's names are those of the exchange
  run = dataclasses.replace(run, cluster=cluster, planner=planner, model=model)
  step = TrainStep(run, mesh.make_mesh(cluster), Decoder(model))
  (plan,) = plans_of(run, batch, 'repack')
  program = step.program(plan)
  arrays = step.put(pack(plan, batch.samples, program))
  state, zeros = step.init_state(), step.zero_sums()
  ctx = PlainContext(program, step.chosen)
  unsharded = jax.tree.map(lambda leaf: dataclasses.replace(leaf, spec=PartitionSpec()), step.placed)

  def with_plans(params, carry, arrays, sums):
    return jax.tree.map(jnp.add, sums, step.gradients(params, carry, arrays, program))

  def plain(params, carry, arrays, sums):
    own = jax.value_and_grad(step.model.loss_sums, has_aux=True)
    (_, losses), grads = own(params, unsharded, carry, jax.tree.map(lambda x: x[0], arrays), ctx)
    return jax.tree.map(jnp.add, sums, type(sums)(grads, losses))

  inputs = (state.params, state.carry, arrays, zeros)
  compiled = {
    name: jax.jit(f).lower(*inputs).compile()
    for name, f in (('one rank, plain', plain), ('one rank', with_plans))
  }
  losses = {name: float(program(*inputs).losses.cross_entropy) for name, program in compiled.items()}
  np.testing.assert_allclose(losses['one rank'], losses['one rank, plain'], rtol=1e-5)
  programs = {name: lambda p=program: p(*inputs) for name, program in compiled.items()}
  seconds = bench_common.measure(programs, rounds, budget_s=120)
  return [
    {
      'case': name,
      'step_s': value,
      'tokens_per_s': batch.num_tokens / value,
      'over_plain': value / seconds['one rank, plain'],
    }
    for name, value in seconds.items()
  ]


def main() -> None:
  parser = bench_common.parser(__doc__)
  parser.add_argument('--config', default='configs/tiny_cpu.gin', help='a gin file (configs/tiny_cpu.gin)')
  parser.add_argument(
    '--set', action='append', default=[], metavar='CLASS.FIELD=VALUE', help='as in train.py'
  )
  parser.add_argument('--batches', type=int, default=2, help='batches in a round (2)')
  parser.add_argument('--rounds', type=int, default=7, help='timed rounds of a case (7)')
  args = parser.parse_args()
  run = load([args.config], args.set)
  mesh.start_devices(run.cluster)
  batcher = Batcher(run.data, open_source(run.data))
  batches = [next(batcher) for _ in range(args.batches)]
  rows = mode_rows(run, batches, args.rounds) + one_rank_rows(run, batches[0], args.rounds)
  title = (
    f'step of {args.config}, {run.cluster.num_ranks} emulated ranks, {run.data.batch_tokens} tokens a batch'
  )
  bench_common.report(title, rows, args.json)


if __name__ == '__main__':
  command_line.run(main)
