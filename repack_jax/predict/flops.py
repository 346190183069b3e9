"""Floating-point operations of the model, counted from its config. A multiply-add is two.

Forward pass only; a training step is `TRAIN_OVER_FORWARD` times that (the backward pass computes two
products for each of the forward's). Recomputation is not counted, as is usual for MFU.
"""

from __future__ import annotations

import numpy as np

from repack_jax.config import ModelConfig

TRAIN_OVER_FORWARD = 3


def qkv_flops_per_token(model: ModelConfig) -> int:
  """Query, key and value projections of one layer."""
  return 2 * model.d_model * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim


def output_flops_per_token(model: ModelConfig) -> int:
  """The projection behind attention of one layer."""
  return 2 * model.d_model * model.num_heads * model.head_dim


def routed_flops_per_token(model: ModelConfig, layer: int) -> int:
  """The chosen experts of a token; 0 where the layer has none."""
  return 6 * model.d_model * model.experts_per_token * model.expert_width if model.has_experts(layer) else 0


def own_feed_forward_flops_per_token(model: ModelConfig, layer: int) -> int:
  """What of the feed-forward block runs where the token is: router and shared expert, or the dense block."""
  if not model.has_experts(layer):
    return 6 * model.d_model * model.dense_width
  return 6 * model.d_model * model.shared_expert_width + 2 * model.d_model * model.num_experts


def logits_flops_per_token(model: ModelConfig) -> int:
  return 2 * model.d_model * model.vocab_size


def linear_flops_per_token(model: ModelConfig) -> int:
  """Everything whose cost goes with the number of tokens: all layers and the logits."""
  attention = qkv_flops_per_token(model) + output_flops_per_token(model)
  layers = sum(
    attention + routed_flops_per_token(model, layer) + own_feed_forward_flops_per_token(model, layer)
    for layer in range(model.num_layers)
  )
  return layers + logits_flops_per_token(model)


def attention_pairs(length: np.ndarray | int, window_tokens: int | None) -> np.ndarray:
  """Query-key pairs of causal attention over samples, int64 [...]; a query sees its last W tokens."""
  length = np.asarray(length, np.int64)
  seen = length if window_tokens is None else np.minimum(length, window_tokens)
  return seen * (seen + 1) // 2 + (length - seen) * seen


def attention_flops(model: ModelConfig, length: np.ndarray | int, kind: str) -> np.ndarray:
  """Scores and weighted values of one layer for samples of these lengths, int64 [...]."""
  return 4 * model.num_heads * model.head_dim * model.kind(kind).pairs(length)


def sample_flops(model: ModelConfig, length: np.ndarray | int) -> np.ndarray:
  """Forward pass of whole samples of these lengths, int64 [...]."""
  attention = sum(attention_flops(model, length, kind) for kind in model.layer_kinds)
  return np.asarray(length, np.int64) * linear_flops_per_token(model) + attention
