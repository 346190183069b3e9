"""Packed attention: blockwise against the float64 reference, hand-worked values, and what it costs."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repack_jax.checks import ConfigError
from repack_jax.ops.attention import attention, blockwise, choose_attention, get_attention

# All of 300 tokens, so that one compiled program serves them; other lengths have a test of their own.
PACKS = {
  'giant': [300],
  'one_token_samples': [1] * 300,
  'equal': [60] * 5,
  'skewed': [1, 150, 3, 2, 40, 1, 103],
  'all_padding': [-300],
  'padding_inside': [-3, 40, -130, 70, -1, 56],
  'padding_tail': [90, 30, -180],
}


def pack(runs: list[int]) -> np.ndarray:
  """Segments int32 [T] of runs of tokens; a negative run is padding. Sample ids fall: order is not needed."""
  ids = np.concatenate([np.full(abs(n), -1 if n < 0 else len(runs) - i) for i, n in enumerate(runs)])
  return ids.astype(np.int32)


def tensors(tokens: int, heads: int, kv_heads: int, width: int, seed: int = 0) -> list[np.ndarray]:
  """Float64 q, k, v and dout."""
  rng = np.random.default_rng(seed)
  return [rng.normal(size=(tokens, n, width)) for n in (heads, kv_heads, kv_heads, heads)]


@functools.cache
def compiled(name, window):
  """Jitted `(q, k, v, segments, dout)` to `(out, dq, dk, dv)`."""

  def both(q, k, v, segments, dout):
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, segments, window, name), q, k, v)
    return out, *pullback(dout)

  return jax.jit(both)


def run(name, arrays, segments, window=None, dtype=jnp.float32):
  """Returns out, dq, dk, dv and checks their dtype."""
  *qkv, dout = (jnp.asarray(x, dtype) for x in arrays)
  results = compiled(name, window)(*qkv, jnp.asarray(segments), dout)
  assert all(x.dtype == dtype for x in results)
  return [np.asarray(x.astype(jnp.float32) if dtype == jnp.bfloat16 else x) for x in results]


def oracle(arrays, segments, window=None):
  with jax.enable_x64(True):
    return run('reference', arrays, segments, window, jnp.float64)


def assert_near(results, wanted, tolerance):
  """Largest difference relative to the largest wanted value, array by array."""
  for name, got, want in zip(('out', 'dq', 'dk', 'dv'), results, wanted, strict=True):
    assert np.isfinite(got).all(), name
    assert np.abs(got - want).max() <= tolerance * max(1, np.abs(want).max()), name


@pytest.mark.parametrize('window', [None, 1, 2, 100, 5000])
@pytest.mark.parametrize('runs', PACKS.values(), ids=PACKS)
def test_packs(runs, window):
  segments = pack(runs)
  arrays = tensors(len(segments), 2, 1, 8)
  wanted = oracle(arrays, segments, window)
  results = run('blockwise', arrays, segments, window)
  assert_near(results, wanted, 3e-6)
  for x in results:
    assert (x[segments < 0] == 0).all()


@pytest.mark.parametrize('runs', [[1], [2], [7, 2], [127], [100, 29], [1] * 2100], ids=sum)
def test_lengths(runs):
  segments = pack(runs)
  arrays = tensors(len(segments), 2, 1, 8)
  assert_near(run('blockwise', arrays, segments), oracle(arrays, segments), 3e-6)


@pytest.mark.parametrize(
  'heads, kv_heads, width, window',
  [(1, 1, 64, None), (4, 1, 32, 50), (8, 2, 16, None), (8, 2, 16, 50), (6, 3, 5, 50), (32, 8, 8, None)],
)
def test_heads(heads, kv_heads, width, window):
  segments = pack([5, 137, 70, -20])
  arrays = tensors(len(segments), heads, kv_heads, width)
  assert_near(run('blockwise', arrays, segments, window), oracle(arrays, segments, window), 3e-6)


@pytest.mark.parametrize('window', [None, 33])
def test_bfloat16(window):
  segments = pack([5, 237, 70, -20])
  arrays = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in tensors(len(segments), 4, 2, 32)]
  # 8 bits of mantissa: 2^-8 for the rounded result, as much again for the rounded probabilities.
  wanted = oracle(arrays, segments, window)
  assert_near(run('blockwise', arrays, segments, window, jnp.bfloat16), wanted, 2**-7)


def test_large_scores_do_not_overflow():
  segments = pack([200, 100])
  q, k, v, dout = tensors(300, 1, 1, 16)
  arrays = [q * 100, k * 100, v, dout]
  # Scores reach 4e4, where float32 has steps of 4e-3: that much relative error in each probability.
  for got, want in zip(run('blockwise', arrays, segments), oracle(arrays, segments), strict=True):
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= 1e-2 * np.abs(want).max()


@pytest.mark.parametrize('name', ['blockwise', 'reference'])
def test_window_by_hand(name):
  v = np.arange(4.0).reshape(4, 1, 1)
  zero = np.zeros((4, 1, 1))
  out, _, _, dv = run(name, [zero, zero, v, np.ones((4, 1, 1))], pack([4]), window=2)
  np.testing.assert_array_equal(out.ravel(), [0, 0.5, 1.5, 2.5])
  np.testing.assert_array_equal(dv.ravel(), [1.5, 1, 1, 0.5])


@pytest.mark.parametrize('name', ['blockwise', 'reference'])
def test_log_sum_exp(name):
  # Three equal scores of 0, then two; padding is 0 by agreement.
  zero = jnp.zeros((6, 2, 4))
  _, lse = get_attention(name).forward(zero, zero, zero, jnp.asarray(pack([3, 2, -1])), None)
  assert lse.dtype == jnp.float32
  np.testing.assert_allclose(lse[:, 1], np.log([1, 2, 3, 1, 2, 1]), rtol=1e-6)


@pytest.mark.parametrize('poison', [np.nan, np.inf])
@pytest.mark.parametrize('runs', ['padding_tail', 'padding_inside', 'all_padding'])
@pytest.mark.parametrize('name', ['blockwise', 'reference'])
def test_padding_is_inert(name, runs, poison):
  segments = pack(PACKS[runs])
  clean = tensors(len(segments), 4, 2, 8)
  poisoned = [np.where((segments < 0)[:, None, None], poison, x) for x in clean]
  for a, b in zip(run(name, clean, segments), run(name, poisoned, segments), strict=True):
    np.testing.assert_array_equal(a, b)
    assert np.isfinite(b).all() and (b[segments < 0] == 0).all()


@pytest.mark.parametrize('window', [None, 16])
def test_samples_are_isolated(window):
  segments = pack([70, 90, 140])
  arrays = tensors(300, 4, 2, 16)
  other = [np.where((segments == segments[70])[:, None, None], x * 3 + 1, x) for x in arrays]
  kept = np.r_[0:70, 160:300]
  for a, b in zip(
    run('blockwise', arrays, segments, window), run('blockwise', other, segments, window), strict=True
  ):
    np.testing.assert_array_equal(a[kept], b[kept])
    assert (a[70:160] != b[70:160]).any()


def test_plans_are_data():
  traces = []

  @jax.jit
  def step(q, k, v, segments):
    traces.append(1)
    return jax.grad(lambda q: attention(q, k, v, segments, None, 'blockwise').sum())(q)

  q, k, v, _ = tensors(300, 2, 1, 8)
  for runs in ([300], [100, 200], [1] * 300, [-300]):
    step(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(pack(runs)))
  assert len(traces) == 1


def tile_counts(runs, window=None, block=64):
  """Tiles of the forward and of the backward pass."""
  segments = np.pad(pack(runs), (0, -sum(map(abs, runs)) % block), constant_values=-1)
  tiles = blockwise.tile_bounds(*blockwise.visible_intervals(jnp.asarray(segments), window), block)
  n = int(tiles.blocks)
  return tuple(
    int((end - first)[:n].sum())
    for first, end in ((tiles.key_first, tiles.key_end), (tiles.query_first, tiles.query_end))
  )


def test_work_follows_tiles():
  assert tile_counts([64 * 16]) == (136, 136)  # the triangle of 16 blocks
  assert tile_counts([64] * 16) == (16, 16)  # only the diagonal
  assert tile_counts([1] * 1024) == (16, 16)
  assert tile_counts([128, -896]) == (3, 3)  # padding costs nothing
  assert tile_counts([-512, 128, -384]) == (3, 3)
  assert tile_counts([-1024]) == (0, 0)
  assert tile_counts([1024], window=1) == (16, 16)
  assert tile_counts([1024], window=65) == (31, 31)  # the diagonal and one block before it
  assert tile_counts([1024], window=66) == (45, 45)
  assert tile_counts([100, 28, 64]) == (4, 4)  # blocks 0 and 1 share a sample, block 2 is alone


def test_tiles_cover_what_is_visible_and_no_more():
  rng = np.random.default_rng(0)
  for window in (None, 1, 7, 40, 1000):
    for _ in range(10):
      runs = [int(n) for n in rng.integers(1, 90, 12) * rng.choice([1, 1, 1, -1], 12)]
      runs.append(sum(map(abs, runs)) - 1088)  # one length, so that shapes compile once
      segments = pack(runs)
      place = np.arange(len(segments))
      back = place[:, None] - place
      seen = (segments[:, None] == segments) & (segments >= 0) & (back >= 0) & (back < (window or 10**6))
      touched = seen.reshape(len(segments) // 16, 16, -1, 16).any((1, 3))
      assert tile_counts(runs, window, 16) == (touched.sum(),) * 2


def test_memory_is_linear():
  def temp_bytes(tokens):
    q, k, v, _ = (jax.ShapeDtypeStruct((tokens, n, 16), jnp.float32) for n in (4, 1, 1, 4))
    loss = jax.value_and_grad(lambda q, k, v, s: attention(q, k, v, s, None, 'blockwise').sum(), (0, 1, 2))
    lowered = jax.jit(loss).lower(q, k, v, jax.ShapeDtypeStruct((tokens,), jnp.int32))
    return lowered.compile().memory_analysis().temp_size_in_bytes

  assert temp_bytes(8192) < 6 * temp_bytes(2048)


def test_inside_shard_map_switch_and_checkpoint():
  mesh = jax.make_mesh((1,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
  segments = pack([100, 60, -8])
  *qkv, dout = (jnp.asarray(x, jnp.float32) for x in tensors(168, 4, 2, 8))
  spec = jax.sharding.PartitionSpec('x')

  def loss(q, k, v, s, dout, choice):
    branches = [lambda *a, w=w: attention(*a, w, 'blockwise') for w in (None, 3)]
    core = jax.checkpoint(lambda *a: jax.lax.switch(choice[0], branches, *a))
    return (core(q, k, v, s) * dout).sum()

  grad = jax.shard_map(
    jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=(spec,) * 6, out_specs=spec, check_vma=False
  )
  for choice, window in enumerate((None, 3)):
    got = jax.jit(grad)(*qkv, jnp.asarray(segments), dout, jnp.array([choice]))
    for a, b in zip(got, run('blockwise', [*qkv, dout], segments, window)[1:], strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_choice_of_implementation(caplog):
  bfloat16, float32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
  with caplog.at_level(logging.INFO, 'repack_jax.ops.attention.api'):
    assert choose_attention('auto', 'cpu', float32, 8).name == 'blockwise'
    assert choose_attention('auto', 'tpu', bfloat16, 128).name == 'pallas_tpu'
    assert choose_attention('auto', 'gpu', bfloat16, 128).name == 'cudnn'
    assert choose_attention('auto', 'gpu', float32, 128).name == 'blockwise'
    assert choose_attention('reference', 'tpu', bfloat16, 128).name == 'reference'
  lines = [record.getMessage() for record in caplog.records]
  assert lines[0] == 'attention: blockwise (chosen by auto, on cpu)'
  assert lines[3].startswith('attention: blockwise (chosen by auto, on gpu; cudnn does not serve this: ')
  assert lines[4:] == ['attention: reference (as asked, on tpu)']
  with pytest.raises(ConfigError, match=r"TrainConfig.attention = 'cudnn': .*Use 'blockwise', or 'auto'"):
    choose_attention('cudnn', 'gpu', float32, 128)
  with pytest.raises(ConfigError, match=r"TrainConfig.attention = 'pallas_tpu'"):
    choose_attention('pallas_tpu', 'cpu', float32, 128)
  with pytest.raises(ValueError, match=r'flash3.*blockwise, reference'):
    get_attention('flash3')


def test_bad_arguments():
  q, k, v = (jnp.zeros((4, n, 8)) for n in (4, 2, 2))
  segments = jnp.zeros(4, jnp.int32)
  with pytest.raises(ValueError, match=r'window .* got 0'):
    attention(q, k, v, segments, 0, 'blockwise')
  with pytest.raises(ValueError, match=r'4 query heads .* 3 key/value'):
    attention(q, jnp.zeros((4, 3, 8)), jnp.zeros((4, 3, 8)), segments, None, 'blockwise')
  with pytest.raises(AssertionError):
    attention(q, k, v, segments[:3], None, 'blockwise')
