"""Packed attention: an interface, a readable oracle, and what runs on TPU, GPU and everywhere."""

from repack_jax.ops.attention.api import (
  IMPLEMENTATIONS,
  KEPT,
  AttentionImpl,
  attend,
  attention,
  choose_attention,
  get_attention,
)
from repack_jax.ops.attention.case import AttentionCase

__all__ = [
  'IMPLEMENTATIONS',
  'KEPT',
  'AttentionCase',
  'AttentionImpl',
  'attend',
  'attention',
  'choose_attention',
  'get_attention',
]
