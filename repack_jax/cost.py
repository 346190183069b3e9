"""Predicted seconds and exact bytes of the parts of a layer, from the model's and the cluster's configs.

The planner decides by these; the byte counts are also what the metrics report.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from repack_jax import flops
from repack_jax.config import FULL, SPARSE, ClusterConfig, ModelConfig
from repack_jax.plan import Plan

_DTYPE_BYTES = {'float32': 4, 'bfloat16': 2}


def heads_per_peer(model: ModelConfig, degree: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
  """Heads a token sends to each rank of its group: (dispatch: q, k and v; combine), int64 [...]."""
  degree = np.asarray(degree, np.int64)
  query = model.num_heads // degree
  return query + 2 * np.maximum(1, model.num_kv_heads // degree), query


def exchanged_bytes_per_peer(model: ModelConfig, degree: np.ndarray | int) -> np.ndarray:
  """Bytes a token sends to one rank of its group in both sites of a layer, forward and backward."""
  dispatch, combine = heads_per_peer(model, degree)
  return 2 * (dispatch + combine) * model.head_dim * _DTYPE_BYTES[model.compute_dtype]


def cross_node_bytes(plan: Plan, model: ModelConfig) -> int:
  """Bytes that the attention exchanges of all layers send between nodes, forward and backward, all ranks.

  An aligned group of P ranks covers whole nodes or lies in one, so each token has
  `max(0, P - ranks_per_node)` peers in other nodes. Exchanges of spread experts never leave a node.
  """
  total = 0
  for kind in (FULL, SPARSE):
    layers = model.layer_kinds.count(kind)
    layout = plan.layout(kind)
    peers = np.maximum(0, layout.size - plan.ranks_per_node)
    total += layers * int((layout.tokens * peers * exchanged_bytes_per_peer(model, layout.size)).sum())
  return total


@dataclass(frozen=True)
class CostModel:
  """Seconds of training (forward and backward) on one rank of a group of `degree` ranks.

  Work is taken as evenly shared in a group: `(a * length**2 + b * length) / degree` for compute, and an
  exchange costs its bytes over the link's rate.
  """

  cluster: ClusterConfig
  model: ModelConfig

  def _compute_s(self, forward_flops: np.ndarray) -> np.ndarray:
    return flops.TRAIN_OVER_FORWARD * forward_flops / self.cluster.sustained_flops_per_s

  def linear_s(self, length: np.ndarray | int, degree: np.ndarray | int) -> np.ndarray:
    """Projections, experts and logits of all layers."""
    length = np.asarray(length, np.float64)
    return self._compute_s(length * flops.linear_flops_per_token(self.model)) / degree

  def attention_s(self, length: np.ndarray | int, degree: np.ndarray | int, kind: str) -> np.ndarray:
    """Attention cores of all layers of one kind."""
    layers = self.model.layer_kinds.count(kind)
    return layers * self._compute_s(flops.attention_flops(self.model, length, kind)) / degree

  def exchange_s(self, length: np.ndarray | int, degree: np.ndarray | int, kind: str) -> np.ndarray:
    """Both exchanges of all layers of one kind."""
    degree = np.asarray(degree, np.int64)
    in_node = np.minimum(degree, self.cluster.ranks_per_node)
    per_byte = (in_node - 1) / self.cluster.intra_node_bytes_per_s
    per_byte = per_byte + (degree - in_node) / self.cluster.inter_node_bytes_per_s
    tokens = np.asarray(length, np.float64) / degree
    layers = self.model.layer_kinds.count(kind)
    return layers * tokens * exchanged_bytes_per_peer(self.model, degree) * per_byte

  def parent_s(self, length: np.ndarray | int, degree: np.ndarray | int) -> np.ndarray:
    """A whole sample where all layers run at one degree."""
    parts = [self.linear_s(length, degree)]
    for kind in (FULL, SPARSE):
      parts += [self.attention_s(length, degree, kind), self.exchange_s(length, degree, kind)]
    return sum(parts[1:], parts[0])

  def child_s(self, length: np.ndarray | int, degree: np.ndarray | int) -> np.ndarray:
    """What runs in the children's layout: all linear work, and sparse attention with its exchanges."""
    sparse = self.attention_s(length, degree, SPARSE) + self.exchange_s(length, degree, SPARSE)
    return self.linear_s(length, degree) + sparse
