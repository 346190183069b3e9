"""The configs of a run, and their gin files. Nothing here imports JAX."""

from repack_jax.checks import ConfigError
from repack_jax.config.cluster import ClusterConfig
from repack_jax.config.model import ModelConfig
from repack_jax.config.run import (
  MODES,
  STDLIB,
  DataConfig,
  OptimizerConfig,
  PlannerConfig,
  RunConfig,
  SimulatorConfig,
  TrainConfig,
  allowed_sp_degrees,
)

__all__ = [
  'MODES',
  'STDLIB',
  'ClusterConfig',
  'ConfigError',
  'DataConfig',
  'ModelConfig',
  'OptimizerConfig',
  'PlannerConfig',
  'RunConfig',
  'SimulatorConfig',
  'TrainConfig',
  'allowed_sp_degrees',
]
