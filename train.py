"""Trains a hybrid-attention model with layerwise repacking.

    python train.py --config configs/tiny_cpu.gin
    python train.py --config configs/tiny_cpu.gin --set 'TrainConfig.steps=20' --workdir runs/mine

A workdir that holds a checkpoint is resumed. Exit codes: 0 done, 2 a mistake in the config or the data,
130 or 143 stopped by Ctrl-C or SIGTERM after saving a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from repack_jax.checks import ConfigError
from repack_jax.commands.command_line import add_config_arguments
from repack_jax.config import RunConfig
from repack_jax.config.gin_files import load, resolved

log = logging.getLogger('train')


def main(argv: list[str] | None = None) -> int:
  args = _parse(argv)
  logging.basicConfig(level=logging.WARNING, format='%(message)s')
  for name in ('train', 'repack_jax', 'models'):
    logging.getLogger(name).setLevel(logging.INFO)
  try:
    run = load(args.config, args.set)
    if args.dry_run:
      return dry_run(run)
    name = Path(args.config[-1]).stem if args.config else 'default'
    workdir = args.workdir or Path('runs') / f'{name}-{time.strftime("%Y%m%d-%H%M%S")}'
    return train(run, workdir)
  except ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 128 + signal.SIGINT


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description='Train a hybrid-attention model with layerwise repacking.',
    epilog='Exit codes: 0 done; 2 a mistake in the config or the data; 130, 143 stopped by a signal, saved.',
  )
  add_config_arguments(parser)
  parser.add_argument(
    '--workdir', type=Path, metavar='DIR',
    help='where checkpoints and metrics go; resumed if it holds a checkpoint (default: a new one in runs/)',
  )  # fmt: skip
  parser.add_argument(
    '--dry-run', action='store_true',
    help='everything up to the first compiled step: config, model, mesh, documents, first plan, memory',
  )  # fmt: skip
  return parser.parse_args(argv)


class Setup:
  """What a run is made of, in the order it comes to be: devices, mesh, documents, programs."""

  def __init__(self, run: RunConfig):
    from repack_jax.parallel import mesh as meshes

    meshes.start_devices(run.cluster)
    from repack_jax.data.index import index_samples
    from repack_jax.data.sources import open_source
    from repack_jax.training.step import TrainStep

    self.source = open_source(run.data)
    self.index = index_samples(self.source, run.data)
    self.mesh = meshes.make_mesh(run.cluster)
    self.step = TrainStep(run, self.mesh)
    self.run = self.step.run
    log.info(
      'mesh: data %d x node %d x local %d on %s',
      *self.mesh.devices.shape, self.mesh.devices.flat[0].device_kind,
    )  # fmt: skip
    if self.run.cluster.platform == 'gpu':
      log.info('XLA_FLAGS: %s', os.environ['XLA_FLAGS'])

  def planned_steps(self, data_state: dict[str, int] | None, draw: Any = None) -> Iterator[Any]:
    from repack_jax.data.batches import Batcher
    from repack_jax.plan.arrays import pack
    from repack_jax.training.planned_steps import planned_steps

    step = self.step
    return planned_steps(
      self.run,
      Batcher(self.run.data, self.source, data_state, self.index),
      lambda plan, samples: step.put(pack(plan, samples, step.widest_degree(plan))),
      draw,
    )


def train(run: RunConfig, workdir: Path) -> int:
  """Runs or resumes a run in its workdir; returns the exit code."""
  from repack_jax.training.checkpoints import Checkpoints
  from repack_jax.training.metrics import MetricsFile, summary

  with _signals() as stop:
    _check_workdir(run, workdir)
    setup = Setup(run)
    _claim_workdir(run, workdir)
    with contextlib.closing(Checkpoints(workdir, run.train.keep_checkpoints)) as checkpoints:
      if checkpoints.latest_step is None:
        state, data_state, done = setup.step.init_state(), None, 0
      else:
        state, data_state = checkpoints.restore(setup.step.state_shapes())
        done = int(state.step)
        log.info('resuming %s after step %d', workdir, done)
      with contextlib.closing(MetricsFile(workdir / 'metrics.jsonl', keep_steps=done)) as metrics:
        _train_steps(setup, workdir, state, data_state, done, checkpoints, metrics, stop)
  stopped = f' (stopped by {stop[0].name}, saved; the same command with --workdir resumes)' if stop else ''
  print(f'\nrun in {workdir}{stopped}\n{summary(metrics.records, setup.index.counts)}')
  return 128 + stop[0] if stop else 0


def _train_steps(
  setup: Setup,
  workdir: Path,
  state: Any,
  data_state: dict[str, int] | None,
  done: int,
  checkpoints: Any,
  metrics: Any,
  stop: list[signal.Signals],
) -> None:
  """The loop: one planned step, its micro-batches, the update, a record; saves as the config says."""
  from tqdm import tqdm

  from repack_jax.data.prefetch import Prefetcher
  from repack_jax.parallel.agreement import check_same_plan
  from repack_jax.training.metrics import step_record

  train, program, first = setup.run.train, setup.step, done
  sums = program.zero_sums()
  draw = functools.partial(_draw, setup.run, workdir)
  planned_steps = Prefetcher(setup.planned_steps(data_state, draw), setup.run.planner.lookahead_steps)
  with planned_steps, tqdm(total=train.steps, initial=done, unit='step', dynamic_ncols=True) as bar:
    bar.set_postfix_str('compiling the first step')
    try:
      while done < train.steps and not stop:
        planned, wait_s = next(planned_steps)
        if done == first:
          check_same_plan(planned.plan_digest)
        start = time.perf_counter()
        for plan, arrays in zip(planned.plans, planned.arrays, strict=True):
          sums = program.accumulate(state, sums, plan, arrays)
        # One assignment: an interrupt later on, even in the wait for the values, finds all three of one step.
        (state, measured, sums), done, data_state = (
          program.update(state, sums, planned.target_tokens), done + 1, planned.batch.state_after,
        )  # fmt: skip
        values = {name: getattr(measured, name).item() for name in _SCALARS}
        step_s = time.perf_counter() - start
        compiles = program.traces['accumulate']
        record = step_record(setup.run, done, planned, values, step_s, wait_s, compiles)
        metrics.write(record)
        bar.set_postfix_str(_status(record), refresh=False)
        bar.update()
        if train.checkpoint_every and done % train.checkpoint_every == 0:
          checkpoints.save(done, state, data_state)
    finally:  # whatever ends the loop, what was trained is kept
      if data_state is not None:
        checkpoints.save(done, state, data_state)


_SCALARS = ('loss', 'grad_norm', 'learning_rate', 'balance', 'router_z', 'dropped')


def _draw(run: RunConfig, workdir: Path, step: int, lengths: Sequence[int]) -> None:
  """Writes a page with the plan of a step. Called in the thread that plans ahead."""
  from repack_jax.report import plan_page
  from repack_jax.report.case import cases_of

  folder = workdir / 'plans'
  folder.mkdir(exist_ok=True)
  page = plan_page(run, cases_of(run, lengths), f'Step {step} of {workdir.name}')
  (folder / f'step-{step:06d}.html').write_text(page)


def _status(record: dict[str, Any]) -> str:
  return (
    f'loss {record["loss"]:.3f}, {record["tokens_per_s"]:,.0f} tokens/s, '
    f'padding {record["padding_fraction"]:.0%}, imbalance {record["imbalance"]:.2f}'
  )


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
  """Collects SIGTERM and Ctrl-C, whenever they come; the loop looks after each step.

  Python runs a handler between its own instructions, so one that comes during a compilation is seen when
  that ends. A second Ctrl-C stops at once.
  """
  received: list[signal.Signals] = []

  def note(number: int, frame: object) -> None:
    if received and number == signal.SIGINT:
      raise KeyboardInterrupt
    received.append(signal.Signals(number))
    # Not print: it may have been interrupted in the middle, and is not reentrant.
    os.write(2, f'\n{received[-1].name}: saving after the step that runs\n'.encode())

  before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield received
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _check_workdir(run: RunConfig, workdir: Path) -> None:
  """Raises ConfigError where the workdir holds a run with another model or data, naming the first field."""
  saved = workdir / 'resolved.gin'
  if saved.exists():
    before = load([str(saved)], [])
    held = (
      (*before.model.kinds, before.model, before.data),
      (*run.model.kinds, run.model, run.data),
    )
    for old, new in zip(*held, strict=True):
      for name, value in vars(old).items():
        if value != getattr(new, name):
          raise ConfigError(
            f'{type(new).__name__}.{name} = {getattr(new, name)!r}: the run in {workdir} has {value!r}. '
            'Resume it with the same value, or give another --workdir'
          )


def _claim_workdir(run: RunConfig, workdir: Path) -> None:
  """Makes the workdir and writes `resolved.gin`; raises ConfigError where it cannot be written."""
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / 'resolved.gin').write_text(resolved(run), encoding='utf-8')
  except OSError as error:
    raise ConfigError(f'--workdir {workdir}: cannot be written ({error.strerror})') from error


def dry_run(run: RunConfig) -> int:
  """Prints all that is known before the first step, compiles it, and returns."""
  import jax
  import numpy as np

  print(resolved(run))
  setup = Setup(run)
  shapes = setup.step.state_shapes()
  parameters = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes.params))
  print(f'parameters: {parameters:,}')
  for name, value in setup.index.describe().items():
    print(f'{name}: {value:,}')
  planned = next(setup.planned_steps(None))
  print(
    f'\nfirst batch: {planned.batch.num_tokens} tokens in {len(planned.batch.samples)} samples, '
    f'{len(planned.plans)} micro-batch(es)'
  )
  print(planned.plans[0].table())
  print('\ncompiling the first step ...')
  compiled = setup.step.lowered(planned.plans[0].program)['accumulate'].compile()
  for name, value in setup.step.memory_bytes(compiled).items():
    print(f'{name}: {value:,} a rank')
  return 0


if __name__ == '__main__':
  sys.exit(main())
