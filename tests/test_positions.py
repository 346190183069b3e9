"""Rotary positions of the attention block: by the base of the layer's kind, or none."""

import types

import jax
import numpy as np
import pytest
from flax import nnx

from models.attention import Attention
from models.layers import rotary
from repack_jax.config import ModelConfig, weights
from repack_jax.kinds import FullAttention, SlidingWindowAttention


@pytest.mark.parametrize('letter', ['F', 'S'])
def test_queries_are_turned_by_the_base_of_their_kind(letter):
  """The core is left out: the block's queries take the place of what it would return."""
  model = ModelConfig(d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=False)
  model = model.with_kind(FullAttention(rope_theta=0)).with_kind(SlidingWindowAttention(rope_theta=50))
  block = Attention(model, model.kind(letter), weights.attention(model), nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (6, 64))
  batch = types.SimpleNamespace(positions=np.arange(6, dtype=np.int32))
  context = types.SimpleNamespace(attend=lambda kind, q, k, v, batch: q)
  q = (x @ block.query[...]).reshape(6, 4, 16)
  turned = rotary(q, batch.positions, 50) if letter == 'S' else q
  assert letter == 'F' or not np.allclose(turned[1:], q[1:])
  np.testing.assert_allclose(block(x, batch, context), turned.reshape(6, 64) @ block.out[...], rtol=1e-6)
