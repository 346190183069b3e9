"""Layerwise repacking for a trainer of your own: plan, pack, attend. `docs/library.md` leads through it.

Names are imported when they are first asked for: planning needs no JAX, and configs need no planner.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from repack_jax.config.cluster import ClusterConfig
  from repack_jax.config.run import PlannerConfig
  from repack_jax.exchange.attention import repacked_attention
  from repack_jax.kinds import ChunkedAttention, FullAttention, SlidingWindowAttention
  from repack_jax.plan.arrays import pack
  from repack_jax.plan.program import Program
  from repack_jax.plan.wire import Wire
  from repack_jax.predict.costs import Costs, LayerCosts
  from repack_jax.solver import solve

_HOMES = {
  'ChunkedAttention': 'kinds',
  'ClusterConfig': 'config.cluster',
  'Costs': 'predict.costs',
  'FullAttention': 'kinds',
  'LayerCosts': 'predict.costs',
  'PlannerConfig': 'config.run',
  'Program': 'plan.program',
  'SlidingWindowAttention': 'kinds',
  'Wire': 'plan.wire',
  'pack': 'plan.arrays',
  'repacked_attention': 'exchange.attention',
  'solve': 'solver',
}
__all__ = [
  'ChunkedAttention',
  'ClusterConfig',
  'Costs',
  'FullAttention',
  'LayerCosts',
  'PlannerConfig',
  'Program',
  'SlidingWindowAttention',
  'Wire',
  'pack',
  'repacked_attention',
  'solve',
]


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'{__name__}.{_HOMES[name]}'), name)
