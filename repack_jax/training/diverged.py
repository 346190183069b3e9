"""What is left of a step whose loss or gradients are not finite: enough to run it again."""

from __future__ import annotations

import json
from pathlib import Path

from repack_jax.files import write_whole
from repack_jax.training.loop import Diverged
from repack_jax.training.metrics import finite


def write_diverged(workdir: Path, error: Diverged) -> Path:
  """Writes the step's documents and plans to `WORKDIR/diverged/`; returns the file.

  Raises:
    ConfigError: where it cannot be written.
  """
  planned = error.done.planned
  path = workdir / 'diverged' / f'step-{planned.step:06d}.json'
  path.parent.mkdir(exist_ok=True)
  found = {
    'step': planned.step,
    'measured': finite(error.done.measured),
    'plans': [plan.digest() for plan in planned.plans],
    'samples': [
      {'document': sample.document, 'offset': sample.offset, 'tokens': len(sample)}
      for sample in planned.batch.samples
    ],
  }
  write_whole(path, json.dumps(found, indent=1) + '\n')
  return path
