"""The configs of a run, and their gin files. Nothing here imports JAX."""

from repack_jax.checks import ConfigError
from repack_jax.config.cluster import ClusterConfig
from repack_jax.config.model import FULL, LAYER_SCOPES, SPARSE, ModelConfig
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
from repack_jax.kinds import KINDS, FullAttention, LayerKind, SlidingWindowAttention

__all__ = [
  'FULL',
  'KINDS',
  'LAYER_SCOPES',
  'MODES',
  'SPARSE',
  'STDLIB',
  'ClusterConfig',
  'ConfigError',
  'DataConfig',
  'FullAttention',
  'LayerKind',
  'ModelConfig',
  'OptimizerConfig',
  'PlannerConfig',
  'RunConfig',
  'SimulatorConfig',
  'SlidingWindowAttention',
  'TrainConfig',
  'allowed_sp_degrees',
]
