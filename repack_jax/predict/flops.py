"""Floating-point operations of the model, counted from its weights. A multiply-add is two.

Forward pass only; a training step is `TRAIN_OVER_FORWARD` times that (the backward pass computes two
products for each of the forward's). Recomputation is not counted, as is usual for MFU.
"""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np

from repack_jax.config import weights
from repack_jax.config.model import ModelConfig

TRAIN_OVER_FORWARD = 3
# The logits are computed in the forward pass and again in the backward one, which has two products more: what
# `ops/loss.py` does, and what its compiled program is counted to do in the tests.
LOGITS_PASSES = TRAIN_OVER_FORWARD + 1


def _matmul(*matrices: weights.Weight) -> int:
  """Returns the operations of a token's products with these matrices."""
  return 2 * sum(matrix.size for matrix in matrices)


def layer_passes(model: ModelConfig) -> int:
  """Returns how often a step computes a layer's products: once more where it recomputes."""
  return TRAIN_OVER_FORWARD + (model.remat != 'none')


def qkv_flops_per_token(model: ModelConfig) -> int:
  """Returns those of the query, key and value projections of one layer."""
  table = weights.attention(model)
  return _matmul(table['query'], table['key'], table['value'])


def output_flops_per_token(model: ModelConfig) -> int:
  """Returns those of the projection behind attention of one layer."""
  return _matmul(weights.attention(model)['out'])


def routed_flops_per_token(model: ModelConfig, layer: int) -> int:
  """Returns those of the chosen experts of a token; 0 where the layer has none."""
  if not model.has_experts(layer):
    return 0
  of_experts = [weight for weight in weights.leaves(weights.experts(model)) if weight.of_experts]
  return _matmul(*of_experts) // model.num_experts * model.experts_per_token


def own_feed_forward_flops_per_token(model: ModelConfig, layer: int) -> int:
  """Returns those of the feed-forward block that run where the token is: all but its chosen experts."""
  table = weights.layer(model, layer)
  block = table['experts'] if model.has_experts(layer) else table['dense']
  return _matmul(*(weight for weight in weights.leaves(block) if not weight.of_experts))


def logits_flops_per_token(model: ModelConfig) -> int:
  """Returns those of the logits, once."""
  return _matmul(weights.vocabulary(model)['embedding'])


@functools.cache
def linear_flops_per_token(model: ModelConfig) -> int:
  """Returns those of everything whose cost goes with the number of tokens: all layers and the logits."""
  attention = qkv_flops_per_token(model) + output_flops_per_token(model)
  layers = sum(
    attention + routed_flops_per_token(model, layer) + own_feed_forward_flops_per_token(model, layer)
    for layer in range(model.num_layers)
  )
  return layers + logits_flops_per_token(model)


def sample_flops(model: ModelConfig, length: np.ndarray | int) -> np.ndarray:
  """Returns those of the forward pass of whole samples of these lengths, float64 [...]."""
  letters = Counter(model.layer_kinds)
  attention = sum(count * model.kind(letter).flops(model.wire, length) for letter, count in letters.items())
  return np.asarray(length, np.float64) * linear_flops_per_token(model) + attention
