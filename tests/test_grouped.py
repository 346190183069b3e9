"""Grouped products against a plain loop over groups: values and gradients, every way that rows can split."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repack_jax.ops import grouped
from repack_jax.ops.grouped import block_size, choose_grouped, grouped_matmul, num_blocks, product_rows

ROWS, D, F = 100, 12, 20
SPLITS = {
  'even': [25, 25, 25, 25],
  'uneven': [3, 0, 61, 36],
  'one has all': [0, 0, 100, 0],
  'first has all': [100, 0, 0, 0],
  'rows left over': [7, 9, 8, 17],
  'none': [0, 0, 0, 0],
  'ones': [1, 1, 1, 1],
  'the worst for blocks': [49, 1, 49, 1],
}


def by_loop(x, weights, sizes):
  out, start = np.zeros((len(x), weights.shape[2]), x.dtype), 0
  for group, size in enumerate(sizes):
    out[start : start + size] = x[start : start + size] @ weights[group]
    start += size
  return out


@pytest.fixture(scope='module')
def programs():
  """Values and both gradients; of `ragged_dot` with either way to the gradient of the weights."""

  def make(implementation, native):
    def both(x, weights, sizes, grad):
      with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, 'NATIVE_WEIGHT_GRADIENT', native)
        out, vjp = jax.vjp(lambda x, w: grouped_matmul(implementation, x, w, sizes), x, weights)
        return out, *vjp(grad)

    return jax.jit(both)

  return {
    'ragged_dot': make('ragged_dot', True),
    'ragged_dot, weights by blocks': make('ragged_dot', False),
    'blocks': make('blocks', True),
  }


@pytest.mark.parametrize('implementation', ['ragged_dot', 'ragged_dot, weights by blocks', 'blocks'])
@pytest.mark.parametrize('split', SPLITS)
def test_values_and_gradients(programs, implementation, split):
  rng, sizes = np.random.default_rng(0), SPLITS[split]
  x, weights, grad = (
    rng.normal(size=shape).astype(np.float32) for shape in ((ROWS, D), (4, D, F), (ROWS, F))
  )
  out, dx, dw = programs[implementation](x, weights, jnp.array(sizes, jnp.int32), grad)
  np.testing.assert_allclose(out, by_loop(x, weights, sizes), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(dx, by_loop(grad, weights.swapaxes(1, 2), sizes), rtol=1e-5, atol=1e-5)
  ends = np.cumsum(sizes)
  for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
    mine = slice(end - size, end)
    np.testing.assert_allclose(dw[group], x[mine].T @ grad[mine], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('groups', [1, 4])
@pytest.mark.parametrize('implementation', ['ragged_dot', 'blocks'])
def test_rows_past_the_groups_may_hold_anything(implementation, groups):
  rng, sizes = np.random.default_rng(1), jnp.full(groups, 40 // groups, jnp.int32)
  x, weights = rng.normal(size=(60, 8)).astype(np.float32), rng.normal(size=(groups, 8, 5)).astype(np.float32)
  both = jax.vjp(lambda x, w: grouped_matmul(implementation, x, w, sizes), x, weights)
  x[40:] = np.nan
  poisoned = jax.vjp(lambda x, w: grouped_matmul(implementation, x, w, sizes), x, weights)
  np.testing.assert_array_equal(both[0], poisoned[0])
  for clean, got in zip(both[1](both[0]), poisoned[1](both[0]), strict=True):
    np.testing.assert_allclose(got, clean, rtol=1e-6)


def test_bfloat16_is_summed_in_float32(programs):
  """600 rows of one: in bfloat16 the sum would stop at 256."""
  x, weights = jnp.ones((600, 8), jnp.bfloat16), jnp.ones((2, 8, 8), jnp.bfloat16)
  out, _, dw = programs['blocks'](
    x, weights, jnp.array([600, 0], jnp.int32), jnp.ones((600, 8), jnp.bfloat16)
  )
  assert out.dtype == dw.dtype == jnp.bfloat16
  assert (dw[0] == jnp.bfloat16(600)).all() and not dw[1].any()


@pytest.mark.parametrize('rows,groups', [(131072, 64), (100, 4), (7, 3), (1, 1), (5120, 8)])
def test_blocks_hold_the_worst_split(rows, groups):
  block = block_size(rows, groups)
  worst = [1] * (groups - 1) + [max(0, rows - groups + 1)]
  assert sum(-(-size // block) for size in worst) <= num_blocks(rows, groups)
  assert product_rows('blocks', rows, groups) == (block * num_blocks(rows, groups) if groups > 1 else rows)
  assert product_rows('ragged_dot', rows, groups) == rows


def test_no_more_than_a_quarter_is_lost_at_real_size():
  assert product_rows('blocks', 131072, 64) <= 1.25 * 131072


def test_choice_is_logged_and_explicit_ones_stand(caplog):
  with caplog.at_level(logging.INFO, 'repack_jax.ops.grouped'):
    assert [choose_grouped('auto', platform) for platform in ('tpu', 'gpu', 'cpu')] == [
      'ragged_dot', 'blocks', 'blocks',
    ]  # fmt: skip
    assert choose_grouped('ragged_dot', 'gpu') == 'ragged_dot'
  assert 'ragged_dot (as asked, on gpu)' in caplog.text and len(caplog.records) == 4
