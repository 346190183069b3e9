"""Attention over packed samples: one interface, a readable oracle, and implementations for TPU, GPU and everywhere."""

from repack_jax.attention.api import (
  IMPLEMENTATIONS,
  KEPT,
  AttentionImpl,
  attend,
  attention,
  choose_attention,
  get_attention,
)

__all__ = [
  'IMPLEMENTATIONS',
  'KEPT',
  'AttentionImpl',
  'attend',
  'attention',
  'choose_attention',
  'get_attention',
]
