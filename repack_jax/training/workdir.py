"""The folder of a run: whose it is, and what it says of its config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from repack_jax.checks import ConfigError
from repack_jax.config.gin_files import load, resolved
from repack_jax.config.model import ModelConfig
from repack_jax.config.paths import is_path
from repack_jax.config.run import DataConfig, RunConfig
from repack_jax.kinds import LayerKind

# Sections that a run cannot change when it is resumed.
_FIXED = (ModelConfig, LayerKind, DataConfig)


def check_workdir(run: RunConfig, workdir: Path) -> None:
  """Raises ConfigError where the workdir holds a run with another model or data, naming the first field."""
  saved = workdir / 'resolved.gin'
  if not saved.exists():
    return
  for old, new in zip(load([str(saved)], []).sections(), run.sections(), strict=True):
    if not isinstance(old, _FIXED):
      continue
    for field in dataclasses.fields(old):
      name, value = field.name, getattr(old, field.name)
      # Data may move: what is in them is checked against the checkpoint. Kinds are sections of their own.
      if name != 'kinds' and not is_path(field, value) and value != getattr(new, name):
        raise ConfigError(
          f'{type(new).__name__}.{name} = {getattr(new, name)!r}: the run in {workdir} has {value!r}. '
          'Resume it with the same value, or give another --workdir'
        )


def claim_workdir(run: RunConfig, workdir: Path) -> None:
  """Makes the workdir and writes `resolved.gin`; raises ConfigError where it cannot be written."""
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / 'resolved.gin').write_text(resolved(run), encoding='utf-8')
  except OSError as error:
    raise ConfigError(f'--workdir {workdir}: cannot be written ({error.strerror})') from error
