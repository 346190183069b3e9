"""Packed attention: blockwise against the float64 reference, hand-worked values, and what it costs."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repack_jax.checks import ConfigError
from repack_jax.kinds import ChunkedAttention, FullAttention, LayerKind, SlidingWindowAttention
from repack_jax.ops.attention import (
  AttentionCase,
  attention,
  blockwise,
  choose_attention,
  get_attention,
  reference,
)

FULL = FullAttention()

# Tokens, query and key/value heads and width of most tests, so that few programs are compiled; others have
# tests of their own.
TOKENS, *HEADS = 300, 4, 2, 8
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


def sliding(window_tokens: int) -> SlidingWindowAttention:
  return SlidingWindowAttention(window_tokens=window_tokens)


def chunked(chunk_tokens: int) -> ChunkedAttention:
  return ChunkedAttention(chunk_tokens=chunk_tokens)


def short_name(kind: object) -> str | None:
  """A kind's letter and setting, for names of tests; None for anything else."""
  if not isinstance(kind, LayerKind):
    return None
  return kind.letter + ''.join(str(value) for name, value in vars(kind).items() if name != 'rope_theta')


def tensors(tokens: int, heads: int, kv_heads: int, width: int, seed: int = 0) -> list[np.ndarray]:
  """Float64 q, k, v and dout."""
  rng = np.random.default_rng(seed)
  return [rng.normal(size=(tokens, n, width)) for n in (heads, kv_heads, kv_heads, heads)]


@functools.cache
def compiled(name, kind):
  """Jitted `(q, k, v, segments, dout)` to `(out, dq, dk, dv)`."""

  def both(q, k, v, segments, dout):
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, segments, kind, name), q, k, v)
    return out, *pullback(dout)

  return jax.jit(both)


def run(name, arrays, segments, kind=FULL, dtype=jnp.float32):
  """Returns out, dq, dk, dv and checks their dtype."""
  *qkv, dout = (jnp.asarray(x, dtype) for x in arrays)
  results = compiled(name, kind)(*qkv, jnp.asarray(segments), dout)
  assert all(x.dtype == dtype for x in results)
  return [np.asarray(x.astype(jnp.float32) if dtype == jnp.bfloat16 else x) for x in results]


def oracle(arrays, segments, kind=FULL):
  """The reference's results in float64; padded, so that one program serves all lengths up to `TOKENS`."""
  tokens = len(segments)
  behind = [(0, max(0, TOKENS - tokens))]
  arrays = [np.pad(x, behind + [(0, 0)] * 2) for x in arrays]
  with jax.enable_x64(True):
    results = run('reference', arrays, np.pad(segments, behind, constant_values=-1), kind, jnp.float64)
  return [x[:tokens] for x in results]


def assert_near(results, wanted, tolerance):
  """Largest difference relative to the largest wanted value, array by array."""
  for name, got, want in zip(('out', 'dq', 'dk', 'dv'), results, wanted, strict=True):
    assert np.isfinite(got).all(), name
    assert np.abs(got - want).max() <= tolerance * max(1, np.abs(want).max()), name


@pytest.mark.parametrize('kind', [FULL, *map(sliding, (1, 2, 100, 2**40)), chunked(100)], ids=short_name)
@pytest.mark.parametrize('runs', PACKS.values(), ids=PACKS)
def test_packs(runs, kind):
  segments = pack(runs)
  arrays = tensors(TOKENS, *HEADS)
  wanted = oracle(arrays, segments, kind)
  results = run('blockwise', arrays, segments, kind)
  assert_near(results, wanted, 3e-6)
  for x in results:
    assert (x[segments < 0] == 0).all()


@pytest.mark.parametrize(
  'kind, halo', [(sliding(40), 39), (sliding(2), 200), (chunked(100), 128)], ids=short_name
)
@pytest.mark.parametrize('name', ['blockwise', 'reference'])
def test_keys_ahead_of_the_queries(name, kind, halo):
  """As with queries for all slots, whose results nobody wants; NaN in padding is inert in a halo too."""
  q, k, v, dout = tensors(TOKENS, *HEADS)
  whole = [q, k, v, np.where(np.arange(TOKENS)[:, None, None] < halo, 0, dout)]
  for runs in PACKS.values():
    segments = pack(runs)
    out, dq, dk, dv = oracle(whole, segments, kind)
    padding = (segments < 0)[:, None, None]
    behind = [np.where(padding[TOKENS - len(x) :], np.nan, x) for x in (q[halo:], k, v, dout[halo:])]
    results = run(name, behind, segments, kind)
    assert_near(results, (out[halo:], dq[halo:], dk, dv), 3e-6)


@pytest.mark.parametrize('runs', [[1], [2], [7, 2], [127], [100, 29]], ids=sum)
def test_lengths(runs):
  segments = pack(runs)
  arrays = tensors(len(segments), *HEADS)
  assert_near(run('blockwise', arrays, segments), oracle(arrays, segments), 3e-6)


def test_thousands_of_samples():
  q, k, v, dout = arrays = tensors(2100, *HEADS)
  # A sample of one token sees itself alone.
  wanted = [v.repeat(2, 1), np.zeros_like(q), np.zeros_like(k), dout.reshape(-1, 2, 2, 8).sum(2)]
  assert_near(run('blockwise', arrays, pack([1] * 2100)), wanted, 3e-6)


@pytest.mark.parametrize(
  'heads, kv_heads, width, kind',
  [
    (1, 1, 64, FULL),
    (4, 1, 32, sliding(50)),
    (8, 2, 16, FULL),
    (8, 2, 16, sliding(50)),
    (6, 3, 5, sliding(50)),
    (32, 8, 8, FULL),
  ],
  ids=short_name,
)
def test_heads(heads, kv_heads, width, kind):
  segments = pack([5, 137, 70, -20])
  arrays = tensors(len(segments), heads, kv_heads, width)
  assert_near(run('blockwise', arrays, segments, kind), oracle(arrays, segments, kind), 3e-6)


@pytest.mark.parametrize('kind', [FULL, sliding(100)], ids=short_name)
def test_bfloat16(kind):
  segments = pack([5, 205, 70, -20])
  arrays = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in tensors(TOKENS, *HEADS)]
  # 8 bits of mantissa: 2^-8 for the rounded result, as much again for the rounded probabilities.
  wanted = oracle(arrays, segments, kind)
  assert_near(run('blockwise', arrays, segments, kind, jnp.bfloat16), wanted, 2**-7)


def test_large_scores_do_not_overflow():
  segments = pack([200, 100])
  q, k, v, dout = tensors(TOKENS, *HEADS)
  arrays = [q * 120, k * 120, v, dout]
  # Scores reach 4e4, where float32 has steps of 4e-3: that much relative error in each probability.
  for got, want in zip(run('blockwise', arrays, segments), oracle(arrays, segments), strict=True):
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= 1e-2 * np.abs(want).max()


@pytest.mark.parametrize('name', ['blockwise', 'reference'])
def test_window_by_hand(name):
  v = np.zeros((TOKENS, 2, 8))
  v[:4] = np.arange(4).reshape(4, 1, 1)
  zero = np.zeros((TOKENS, 4, 8))
  # Two query heads share a key/value head.
  out, _, _, dv = run(name, [zero, zero[:, :2], v, zero + 0.5], pack([4, -296]), sliding(2))
  np.testing.assert_array_equal(out[:4, 1, 1], [0, 0.5, 1.5, 2.5])
  np.testing.assert_array_equal(dv[:4, 1, 1], [1.5, 1, 1, 0.5])


@pytest.mark.parametrize('name', ['blockwise', 'reference'])
def test_chunks_by_hand(name):
  segments = pack([2, 7, -291])  # chunks are counted from where their sample begins, at 2
  v = np.zeros((TOKENS, 2, 8))
  v[2:9] = np.arange(7).reshape(7, 1, 1)
  zero = np.zeros((TOKENS, 4, 8))
  # Two query heads share a key/value head.
  out, _, _, dv = run(name, [zero, zero[:, :2], v, zero + 0.5], segments, chunked(3))
  np.testing.assert_allclose(out[2:9, 1, 1], [0, 0.5, 1, 3, 3.5, 4, 6], rtol=1e-6)
  np.testing.assert_allclose(dv[2:9, 1, 1], np.array([11, 5, 2, 11, 5, 2, 6]) / 6, rtol=1e-6)


@pytest.mark.parametrize('runs', ['giant', 'skewed'])
@pytest.mark.parametrize('chunk_tokens', [1, 300, 2**40])
def test_shortest_and_longest_chunks(runs, chunk_tokens):
  segments, arrays = pack(PACKS[runs]), tensors(TOKENS, *HEADS)
  results = run('blockwise', arrays, segments, chunked(chunk_tokens))
  if chunk_tokens > 1:
    wanted = run('blockwise', arrays, segments)
    for got, want in zip(results, wanted, strict=True):
      np.testing.assert_array_equal(got, want)
  else:
    q, k, v, dout = arrays
    wanted = [v.repeat(2, 1), np.zeros_like(q), np.zeros_like(k), dout.reshape(TOKENS, 2, 2, 8).sum(2)]
    assert_near(results, wanted, 3e-6)


def test_settings_beyond_int32_mean_all_of_a_sample():
  segments = jnp.asarray(pack(PACKS['skewed']))
  wanted = reference.visible(segments, FULL)
  for kind in (sliding(2**40), chunked(2**40)):
    np.testing.assert_array_equal(reference.visible(segments, kind), wanted)
    got = blockwise.visible_intervals(segments, kind)
    np.testing.assert_array_equal(got, blockwise.visible_intervals(segments, FULL))


@pytest.mark.parametrize('name', ['blockwise', 'reference'])
def test_log_sum_exp(name):
  # Three equal scores of 0, then two; padding is 0 by agreement.
  zero = jnp.zeros((6, 2, 4))
  _, lse = get_attention(name).forward(zero, zero, zero, jnp.asarray(pack([3, 2, -1])), FULL)
  assert lse.dtype == jnp.float32
  np.testing.assert_allclose(lse[:, 1], np.log([1, 2, 3, 1, 2, 1]), rtol=1e-6)


@pytest.mark.parametrize('poison', [np.nan, np.inf])
@pytest.mark.parametrize('runs', ['padding_tail', 'padding_inside', 'all_padding'])
@pytest.mark.parametrize('kind', [FULL, chunked(100)], ids=short_name)
@pytest.mark.parametrize('name', ['blockwise', 'reference'])
def test_padding_is_inert(name, kind, runs, poison):
  segments = pack(PACKS[runs])
  clean = tensors(TOKENS, *HEADS)
  poisoned = [np.where((segments < 0)[:, None, None], poison, x) for x in clean]
  for a, b in zip(*(run(name, x, segments, kind) for x in (clean, poisoned)), strict=True):
    np.testing.assert_array_equal(a, b)
    assert np.isfinite(b).all() and (b[segments < 0] == 0).all()


@pytest.mark.parametrize('kind', [FULL, sliding(100), chunked(100)], ids=short_name)
def test_samples_are_isolated(kind):
  segments = pack([70, 90, 140])
  arrays = tensors(TOKENS, *HEADS)
  other = [np.where((segments == segments[70])[:, None, None], x * 3 + 1, x) for x in arrays]
  kept = np.r_[0:70, 160:300]
  for a, b in zip(
    run('blockwise', arrays, segments, kind), run('blockwise', other, segments, kind), strict=True
  ):
    np.testing.assert_array_equal(a[kept], b[kept])
    assert (a[70:160] != b[70:160]).any()


def test_plans_are_data():
  arrays, program = tensors(TOKENS, *HEADS), compiled('blockwise', sliding(100))
  run('blockwise', arrays, pack([300]), sliding(100))
  size = program._cache_size()
  for runs in PACKS.values():
    run('blockwise', arrays, pack(runs), sliding(100))
  assert program._cache_size() == size


@functools.partial(jax.jit, static_argnums=(1, 2))
def bounds(segments, kind, block):
  """`(first, end)` of the tiles of each block of the forward and of the backward pass."""
  tiles = blockwise.tile_bounds(*blockwise.visible_intervals(segments, kind), block)
  # Behind the last token loops do not go.
  inside = jnp.arange(len(tiles.key_first)) < tiles.blocks
  of_passes = (tiles.key_first, tiles.key_end), (tiles.query_first, tiles.query_end)
  return [tuple(jnp.where(inside, x, 0) for x in of_pass) for of_pass in of_passes]


def tile_counts(runs, kind=FULL, block=64):
  """Tiles of the forward and of the backward pass."""
  return tuple(int((end - first).sum()) for first, end in bounds(jnp.asarray(pack(runs)), kind, block))


def test_work_follows_tiles():
  assert tile_counts([64 * 16]) == (136, 136)  # the triangle of 16 blocks
  assert tile_counts([64] * 16) == (16, 16)  # only the diagonal
  assert tile_counts([1] * 1024) == (16, 16)
  assert tile_counts([128, -896]) == (3, 3)  # padding costs nothing
  assert tile_counts([-512, 128, -384]) == (3, 3)
  assert tile_counts([-1024]) == (0, 0)
  assert tile_counts([1024], sliding(1)) == (16, 16)
  assert tile_counts([1024], sliding(65)) == (31, 31)  # the diagonal and one block before it
  assert tile_counts([1024], sliding(66)) == (45, 45)
  assert tile_counts([1024], chunked(1)) == tile_counts([1024], chunked(64)) == (16, 16)
  assert tile_counts([1024], chunked(128)) == (24, 24)  # eight triangles of two blocks
  assert tile_counts([32, 992], chunked(64)) == (31, 31)  # chunks that lie across two blocks
  assert tile_counts([100, 28, 64, -832]) == (4, 4)  # blocks 0 and 1 share a sample, block 2 is alone


def test_tiles_cover_what_is_visible_and_no_more():
  rng = np.random.default_rng(0)
  for _ in range(10):
    runs = [int(n) for n in rng.integers(1, 90, 12) * rng.choice([1, 1, 1, -1], 12)]
    runs.append(sum(map(abs, runs)) - 1088)  # one length, so that shapes compile once
    segments, position = pack(runs), np.concatenate([np.arange(abs(n)) for n in runs])
    same = (segments[:, None] == segments) & (segments >= 0)
    for kind in (FULL, *map(sliding, (1, 7, 40, 1000)), *map(chunked, (1, 7, 40, 1000))):
      seen = same & kind.sees(position[:, None], position)
      touched = seen.reshape(len(segments) // 16, 16, -1, 16).any((1, 3))
      assert tile_counts(runs, kind, 16) == (touched.sum(),) * 2


def test_memory_is_linear():
  def temp_bytes(tokens):
    q, k, v, _ = (jax.ShapeDtypeStruct((tokens, n, 16), jnp.float32) for n in (4, 1, 1, 4))
    loss = jax.value_and_grad(lambda q, k, v, s: attention(q, k, v, s, FULL, 'blockwise').sum(), (0, 1, 2))
    lowered = jax.jit(loss).lower(q, k, v, jax.ShapeDtypeStruct((tokens,), jnp.int32))
    return lowered.compile().memory_analysis().temp_size_in_bytes

  assert temp_bytes(8192) < 6 * temp_bytes(2048)


def test_inside_shard_map_switch_and_checkpoint():
  mesh = jax.make_mesh((1,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
  segments = pack([100, 60, -140])
  *qkv, dout = (jnp.asarray(x, jnp.float32) for x in tensors(TOKENS, *HEADS))
  spec = jax.sharding.PartitionSpec('x')
  kinds = FULL, sliding(2)

  def loss(q, k, v, s, dout, choice):
    branches = [lambda *a, kind=kind: attention(*a, kind, 'blockwise') for kind in kinds]
    core = jax.checkpoint(lambda *a: jax.lax.switch(choice[0], branches, *a))
    return (core(q, k, v, s) * dout).sum()

  grad = jax.jit(
    jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=(spec,) * 6, out_specs=spec, check_vma=False)
  )
  for choice, kind in enumerate(kinds):
    got = grad(*qkv, jnp.asarray(segments), dout, jnp.array([choice]))
    for a, b in zip(got, run('blockwise', [*qkv, dout], segments, kind)[1:], strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def case(dtype='bfloat16', tokens=1024, heads=8, kv_heads=1, head_dim=128, kind=FULL):
  return AttentionCase(kind, dtype, tokens, heads, kv_heads, head_dim)


def test_choice_of_implementation(caplog):
  good, in_float32 = [case()], [case(), case('float32')]
  with caplog.at_level(logging.INFO, 'repack_jax.ops.attention.api'):
    assert choose_attention('auto', 'cpu', [case('float32', head_dim=8)]).name == 'blockwise'
    assert choose_attention('auto', 'tpu', good).name == 'pallas_tpu'
    assert choose_attention('auto', 'gpu', good).name == 'cudnn'
    assert choose_attention('auto', 'gpu', in_float32).name == 'blockwise'
    assert choose_attention('reference', 'tpu', good).name == 'reference'
  lines = [record.getMessage() for record in caplog.records]
  assert lines[0] == 'attention: blockwise (chosen by auto, on cpu)'
  assert lines[3].startswith('attention: blockwise (chosen by auto, on gpu; cudnn does not serve this: ')
  assert lines[4:] == ['attention: reference (as asked, on tpu)']
  with pytest.raises(ConfigError, match=r"TrainConfig.attention = 'cudnn': .*Use 'blockwise', or 'auto'"):
    choose_attention('cudnn', 'gpu', in_float32)
  with pytest.raises(ConfigError, match=r"TrainConfig.attention = 'pallas_tpu'"):
    choose_attention('pallas_tpu', 'cpu', good)
  with pytest.raises(ValueError, match=r'flash3.*blockwise, reference'):
    get_attention('flash3')


@pytest.mark.parametrize(
  'platform, name, words', [('gpu', 'cudnn', '32 bits'), ('tpu', 'pallas_tpu', 'list of tiles')]
)
def test_limits_show_before_anything_is_traced(platform, name, words, caplog):
  # 32 Ki tokens a rank: the widest streams have too many elements, and too long a list of tiles.
  alone = case(tokens=32768, heads=512, kv_heads=8)
  cases = [alone.at_degree(degree) for degree in (1, 8, 32)]
  assert cases[1:] == [case(tokens=2**18, heads=64, kv_heads=1), case(tokens=2**20, heads=16, kv_heads=1)]
  assert choose_attention(name, platform, [case()]).name == name
  with caplog.at_level(logging.INFO, 'repack_jax.ops.attention.api'):
    assert choose_attention('auto', platform, [case(), *cases]).name == 'blockwise'
  assert words in caplog.text
  with pytest.raises(ConfigError, match=rf"TrainConfig.attention = '{name}': .*{words}"):
    choose_attention(name, platform, [case(), *cases])


def test_bad_arguments():
  q, k, v = (jnp.zeros((4, n, 8)) for n in (4, 2, 2))
  segments = jnp.zeros(4, jnp.int32)
  with pytest.raises(ValueError, match=r'4 query heads .* 3 key/value'):
    attention(q, jnp.zeros((4, 3, 8)), jnp.zeros((4, 3, 8)), segments, FULL, 'blockwise')
  with pytest.raises(AssertionError):
    attention(q, k, v, segments[:3], FULL, 'blockwise')
  with pytest.raises(AssertionError):
    attention(q, k.astype(jnp.bfloat16), v, segments, FULL, 'blockwise')
  with pytest.raises(ValueError, match="'cudnn' is for bfloat16 and float16 only, not for float32"):
    attention(q, k, v, segments, FULL, 'cudnn')
