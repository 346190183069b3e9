"""The optimizer: AdamW after clipping, and its learning rate."""

from __future__ import annotations

from typing import Any

import jax
import optax

from repack_jax.config.run import OptimizerConfig

Tree = Any


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Returns a linear warmup to the peak, then the decay of the config over the rest of the run."""
  peak, final = config.learning_rate, config.learning_rate * config.final_learning_rate_fraction
  decay_steps = max(1, steps - config.warmup_steps)
  decay = {
    'cosine': optax.cosine_decay_schedule(peak, decay_steps, config.final_learning_rate_fraction),
    'linear': optax.linear_schedule(peak, final, decay_steps),
    'constant': optax.constant_schedule(peak),
  }[config.schedule]
  if not config.warmup_steps:
    return decay
  warmup = optax.linear_schedule(peak / config.warmup_steps, peak, config.warmup_steps)
  return optax.join_schedules([warmup, decay], [config.warmup_steps])


def make_optimizer(
  config: OptimizerConfig, schedule: optax.Schedule, weights: Tree
) -> optax.GradientTransformation:
  """Returns AdamW after clipping by the global norm.

  Args:
    weights: a `Weight` for each parameter, which says whether it is decayed.
  """
  decayed = jax.tree.map(lambda weight: weight.is_decayed, weights)
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      schedule, config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay, mask=decayed
    ),
  )
