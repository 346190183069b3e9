"""Attention over packed samples: one interface, a readable oracle, and a portable implementation."""

from repack_jax.attention.api import (
  IMPLEMENTATIONS,
  AttentionImpl,
  attention,
  get_attention,
)

__all__ = ['IMPLEMENTATIONS', 'AttentionImpl', 'attention', 'get_attention']
