"""Trains a hybrid-attention model with layerwise repacking.

    python train.py --config configs/tiny_cpu.gin
    python train.py --config configs/tiny_cpu.gin --set 'TrainConfig.steps=20' --workdir runs/mine

A workdir that holds a checkpoint is resumed. Exit codes: 0 done, 2 a mistake in the config or the data, 3
the loss or its gradients were not finite, 4 the last steps could not be saved, 130 or 143 stopped by Ctrl-C
or SIGTERM after saving a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from repack_jax.checks import ConfigError
from repack_jax.commands.command_line import add_config_arguments
from repack_jax.config.gin_files import load, resolved
from repack_jax.config.run import RunConfig

if TYPE_CHECKING:  # JAX starts only when the config has said how many devices to emulate
  from repack_jax.training.checkpoints import Checkpoints
  from repack_jax.training.loop import DataState, Position, StepDone
  from repack_jax.training.metrics import MetricsFile
  from repack_jax.training.pages import PlanPages
  from repack_jax.training.planned_steps import PlannedStep
  from repack_jax.training.signals import StopSignals

DIVERGED, NOT_SAVED = 3, 4  # exit codes

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
    return train(run, args.workdir, name, args.allow_change)
  except ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 128 + signal.SIGINT


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description='Train a hybrid-attention model with layerwise repacking.',
    epilog='Exit codes: 0 done; 2 a mistake in the config or the data; 3 the loss or its gradients were not '
    'finite; 4 the last steps could not be saved; 130, 143 stopped by a signal, saved.',
  )
  add_config_arguments(parser)
  parser.add_argument(
    '--workdir', type=Path, metavar='DIR',
    help='where checkpoints and metrics go; resumed if it holds a checkpoint (default: a new one in runs/)',
  )  # fmt: skip
  parser.add_argument(
    '--allow-change', action='store_true',
    help='resume with another optimizer, schedule or seed than the run had so far',
  )  # fmt: skip
  parser.add_argument(
    '--dry-run', action='store_true',
    help='everything up to the first compiled step: config, model, mesh, documents, first plan, memory',
  )  # fmt: skip
  return parser.parse_args(argv)


class Setup:
  """What a run is made of, in the order it comes to be: devices, documents, mesh, programs."""

  def __init__(self, run: RunConfig):
    from repack_jax.parallel import mesh as meshes

    meshes.start_devices(run.cluster)
    from models.transformer import Decoder
    from repack_jax.data.index import index_samples
    from repack_jax.data.sources import open_source
    from repack_jax.training.step import TrainStep

    self.run = run
    self.source = open_source(run.data)
    self.index = index_samples(self.source, run.data)
    self.mesh = meshes.make_mesh(run.cluster)
    self.step = TrainStep(run, self.mesh, Decoder(run.model))
    first = self.mesh.devices.flat[0]
    emulated = first.platform == 'cpu'
    self.device = "emulated on this machine's CPU" if emulated else f'each a {first.device_kind}'
    log.info('mesh: data %d x node %d x local %d on %s', *self.mesh.devices.shape, first.device_kind)
    if first.platform == 'gpu':
      log.info('XLA_FLAGS: %s', os.environ['XLA_FLAGS'])

  def planned_steps(
    self, data_state: DataState | None, pages: PlanPages | None = None
  ) -> Iterator[PlannedStep]:
    """Returns the steps from here on, planned and packed; some are drawn on the way."""
    from repack_jax.data.batches import Batcher
    from repack_jax.training.hooks import Every
    from repack_jax.training.planned_steps import planned_steps

    hooks: list[Every[PlannedStep]] = []
    if pages is not None:
      hooks.append(Every(self.run.train.draw_every_steps, pages.draw))
    batches = Batcher(self.run.data, self.source, data_state, self.index)
    return planned_steps(self.run, batches, self.step.put, hooks)


def train(run: RunConfig, workdir: Path | None, name: str, allow_change: bool = False) -> int:
  """Runs or resumes a run in its workdir, or in a new one of this name; returns the exit code."""
  from repack_jax.training.checkpoints import Checkpoints
  from repack_jax.training.diverged import write_diverged
  from repack_jax.training.loop import Diverged, initial_position, restored_position
  from repack_jax.training.metrics import MetricsFile, summary
  from repack_jax.training.pages import PlanPages
  from repack_jax.training.progress import opening
  from repack_jax.training.signals import collected_signals
  from repack_jax.training.workdir import check_workdir, claimed_workdir

  diverged = None
  with collected_signals(run.train.grace_s) as stop:
    if workdir is not None:
      check_workdir(run, workdir, allow_change)
    setup = Setup(run)
    with (
      claimed_workdir(run, workdir, name) as workdir,
      contextlib.closing(
        Checkpoints(workdir, run.train.keep_checkpoints, 60 * run.train.checkpoint_minutes)
      ) as checkpoints,
    ):
      print(opening(run, setup.device, workdir, checkpoints.latest_step or 0), flush=True)
      if checkpoints.latest_step is None:
        position = initial_position(setup.step)
      else:
        position = restored_position(*checkpoints.restore(setup.step.state_shapes()))
        log.info('resuming %s after step %d', workdir, position.done)
      if position.done >= run.train.steps:
        print(f'all {run.train.steps} steps are done: nothing to do. Raise TrainConfig.steps to go on')
      pages = PlanPages(run, workdir)
      with contextlib.closing(MetricsFile(workdir / 'metrics.jsonl', position.done)) as metrics:
        try:
          _train_steps(setup, position, checkpoints, metrics, pages, stop)
        except Diverged as error:
          diverged = error
  stopped, done = '', metrics.records[-1]['step'] if metrics.records else 0
  if stop.received:
    nothing = checkpoints.latest_step is None
    saved = 'before its first step was done, so nothing is saved' if nothing else 'saved'
    stopped = f' (stopped by {stop.received[0].name}, {saved}; the same command with --workdir resumes)'
  print(f'\nrun in {workdir}{stopped}\n{summary(metrics.records, setup.index.counts)}')
  if drawn := pages.draw_largest_saving(metrics.records):
    page, what = drawn
    print(f'  {"largest saving":<20}{what}\n  {"its plan":<20}{page}')
  if diverged is not None:
    left = write_diverged(workdir, diverged)
    what = diverged.describe(run.train, checkpoints.saved)
    print(f'error: {what}; its documents are in {left}', file=sys.stderr)
    return DIVERGED
  if done > (checkpoints.latest_step or 0):
    print(f'error: the state after step {done} could not be saved, see above', file=sys.stderr)
    return NOT_SAVED
  return 128 + stop.received[0] if stop.received else 0


def _train_steps(
  setup: Setup,
  start: Position,
  checkpoints: Checkpoints,
  metrics: MetricsFile,
  pages: PlanPages,
  stop: StopSignals,
) -> None:
  """Trains with what goes on beside it: a record and the progress bar each step, checkpoints as asked for."""
  from repack_jax.data.prefetch import Prefetcher
  from repack_jax.training.comparison import Comparison
  from repack_jax.training.hooks import Every
  from repack_jax.training.loop import TrainLoop
  from repack_jax.training.metrics import status, step_record
  from repack_jax.training.progress import Progress

  config = setup.run.train
  comparison = Comparison(setup.step, 0 if start.done else config.compare_steps)

  def record(step: StepDone) -> None:
    found = step_record(setup.run, step)
    if not comparison.is_over:
      with progress.doing(f'step {step.position.done} with repacking disabled'):
        found['loss_disabled'] = comparison.loss(step.planned)
    metrics.write(found)
    pages.note(step.planned)
    progress.step(status(found))

  def first_shown(planned: Iterator[tuple[PlannedStep, float]]) -> Iterator[tuple[PlannedStep, float]]:
    with progress.doing('planning the first step'):
      first = next(planned)
    yield first
    yield from planned

  hooks = [
    Every(1, record),
    Every(1, lambda step: checkpoints.tend(step.position)),
    Every(config.checkpoint_every, lambda step: checkpoints.save(step.position)),
  ]
  loop = TrainLoop(setup.step, start, hooks)

  def last_resort() -> str:
    """Saves what was trained, whatever the main thread is at; only an update under way owns the state."""
    checkpoints.save(loop.position)
    checkpoints.close()
    return checkpoints.saved

  planned = Prefetcher(setup.planned_steps(start.data_state, pages), setup.run.planner.lookahead_steps)
  with planned, Progress(setup.run, start.done) as progress:
    setup.step.watch_compile = progress.compiling
    stop.last_resort = last_resort
    try:
      loop.run(first_shown(planned), config.steps, lambda: stop.received)
    finally:  # whatever ends the loop, what was trained is kept
      stop.is_ending.set()
      checkpoints.save(loop.position)


def dry_run(run: RunConfig) -> int:
  """Prints all that is known before the first step, compiles it, and returns."""
  from repack_jax.predict.sizes import total_parameters

  print(resolved(run))
  setup = Setup(run)
  print(f'parameters: {total_parameters(run.model):,}')
  for name, value in setup.index.describe().items():
    print(f'{name}: {value:,}')
  planned = next(setup.planned_steps(None))
  print(
    f'\nfirst batch: {planned.batch.num_tokens} tokens in {len(planned.batch.samples)} samples, '
    f'{len(planned.plans)} micro-batch(es)'
  )
  print(planned.plans[0].table())
  print('\ncompiling the first step ...')
  compiled = setup.step.lowered(planned.programs[0])['accumulate'].compile()
  for name, value in setup.step.memory_bytes(compiled).items():
    print(f'{name}: {value:,} a rank')
  return 0


if __name__ == '__main__':
  sys.exit(main())
