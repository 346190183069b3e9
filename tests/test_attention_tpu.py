"""The TPU kernels of packed attention, interpreted on the CPU, against the reference; and their tiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from test_attention import FULL, chunked, pack, short_name, sliding, tensors

from repack_jax.kinds import LayerKind
from repack_jax.ops.attention import AttentionCase, get_attention, pallas_tiles, pallas_tpu, reference
from repack_jax.ops.attention.pallas_tiles import Blocks

TOKENS = 700
# Three key blocks of two query blocks each, the last of them beyond the last token.
SMALL = Blocks(query=128, key=256, forward_step=256, backward_step=128)

# All of 700 tokens, so that one compiled program serves them.
PACKS = {
  'giant': [700],
  'one_token_samples': [1] * 700,
  'short': [7] * 100,
  'skewed': [1, 450, 3, 2, 140, 1, 103],
  'on_block_edges': [128, 128, 256, 188],
  'all_padding': [-700],
  'padding_head': [-300, 350, 50],
  'padding_inside': [-3, 140, -330, 70, -1, 156],
  'padding_tail': [90, 30, -580],
}


@functools.cache
def compiled(name: str, kind: LayerKind, blocks: Blocks | None = None):
  """Jitted `(q, k, v, segments, dout)` to `(out, lse, dq, dk, dv)`."""
  if name == 'reference':
    forward, backward = reference.forward, reference.backward
  else:
    forward, backward = (
      functools.partial(f, blocks=blocks, interpret=True) for f in (pallas_tpu.forward, pallas_tpu.backward)
    )

  def both(q, k, v, segments, dout):
    out, lse = forward(q, k, v, segments, kind)
    return out, lse, *backward(q, k, v, segments, kind, out, lse, dout)

  return jax.jit(both)


def run(name, arrays, segments, kind=FULL, blocks=None, dtype=jnp.float32):
  """Returns out, lse, dq, dk, dv as float32, and checks their dtypes."""
  *qkv, dout = (jnp.asarray(x, dtype) for x in arrays)
  results = compiled(name, kind, blocks)(*qkv, jnp.asarray(segments), dout)
  assert [x.dtype for x in results] == [dtype, jnp.float32, dtype, dtype, dtype]
  return [np.asarray(x, np.float32) for x in results]


def assert_near(results, wanted, tolerance):
  """Largest difference relative to the largest wanted value, array by array."""
  for name, got, want in zip(('out', 'lse', 'dq', 'dk', 'dv'), results, wanted, strict=True):
    assert got.shape == want.shape and np.isfinite(got).all(), name
    assert np.abs(got - want).max() <= tolerance * max(1, np.abs(want).max()), name


@pytest.mark.parametrize('kind', [FULL, sliding(1), sliding(130), chunked(130)], ids=short_name)
@pytest.mark.parametrize('runs', PACKS.values(), ids=PACKS)
def test_packs(runs, kind):
  segments = pack(runs)
  assert len(segments) == TOKENS
  arrays = tensors(TOKENS, 2, 1, 16)
  results = run('pallas', arrays, segments, kind, SMALL)
  assert_near(results, run('reference', arrays, segments, kind), 5e-6)
  for x in results:
    assert (x[segments < 0] == 0).all()


@pytest.mark.parametrize('kind', [sliding(130), chunked(130)], ids=short_name)
@pytest.mark.parametrize('runs', ['all_padding', 'padding_head', 'padding_inside', 'padding_tail'])
def test_padding_is_inert(runs, kind):
  segments = pack(PACKS[runs])
  clean = tensors(TOKENS, 2, 1, 16)
  poisoned = [np.where((segments < 0)[:, None, None], np.nan, x) for x in clean]
  results = (run('pallas', x, segments, kind, SMALL) for x in (clean, poisoned))
  for a, b in zip(*results, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('kind, halo', [(sliding(150), 300), (chunked(150), 256)], ids=short_name)
def test_keys_ahead_of_the_queries(kind, halo):
  """As with queries for all slots, whose results nobody wants; halos of whole blocks and others."""
  q, k, v, dout = tensors(TOKENS, 4, 2, 16)
  for runs in ('giant', 'skewed', 'padding_head', 'padding_inside', 'all_padding'):
    segments = pack(PACKS[runs])
    ahead = [q, k, v, np.where(np.arange(TOKENS)[:, None, None] < halo, 0, dout)]
    out, lse, dq, dk, dv = run('reference', ahead, segments, kind)
    behind = [q[halo:], k, v, dout[halo:]]
    wanted = out[halo:], lse[halo:], dq[halo:], dk, dv
    assert_near(run('reference', behind, segments, kind), wanted, 1e-6)
    results = run('pallas', behind, segments, kind, SMALL)
    assert_near(results, wanted, 5e-6)
    poisoned = [np.where((segments < 0)[len(segments) - len(x) :, None, None], np.nan, x) for x in behind]
    for a, b in zip(results, run('pallas', poisoned, segments, kind, SMALL), strict=True):
      np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('halo', [128, 300])
def test_tiles_leave_the_queries_of_a_halo_out(halo):
  kind, blocks = sliding(130), SMALL
  geometry = pallas_tiles.geometry_of(AttentionCase(kind, 'float32', TOKENS - halo, 1, 1, 8, halo), blocks)
  segments = jnp.asarray(pack([TOKENS]))
  _, first_key, by_query, by_key = pallas_tiles.tile_lists(segments, TOKENS - halo, kind, geometry)
  assert first_key.shape[0] == len(by_query.first) < len(by_key.first) * 2
  front = geometry.halo - halo  # which fills the halo up to whole query blocks
  padded = np.pad(pack([TOKENS]), (front, -(front + TOKENS) % 256), constant_values=-1)
  seen = np.asarray(reference.visible(padded, kind))
  touched = seen.reshape(len(seen) // 128, 128, -1, 256).any((1, 3))[geometry.halo // 128 :]
  for of, table in ((by_query, touched), (by_key, touched.T)):
    assert of.cuts[-1] <= len(of.tiles)
    tiles = np.asarray(of.tiles)[: of.cuts[-1]]
    major, minor = tiles >> 16, tiles & 0xFFFF
    listed = set(zip(major.tolist(), minor.tolist(), strict=True))
    wanted = {(int(a), int(b)) for a, b in zip(*table.nonzero(), strict=True)}
    assert wanted <= listed and len(listed - wanted) <= (~table.any(1)).sum()
    assert set(major.tolist()) == set(range(len(table)))


@pytest.mark.parametrize(
  'heads, kv_heads, width, kind',
  [(1, 1, 8, FULL), (8, 1, 24, sliding(150)), (4, 2, 130, FULL)],
  ids=short_name,
)
def test_heads(heads, kv_heads, width, kind):
  segments = pack([5, 137, 170, -20])
  arrays = tensors(len(segments), heads, kv_heads, width)
  results = run('pallas', arrays, segments, kind, SMALL)
  assert_near(results, run('reference', arrays, segments, kind), 5e-6)


def test_query_heads_that_are_taken_in_turn():
  segments = pack([60, 70])
  arrays = tensors(len(segments), 20, 1, 8)
  geometry = pallas_tiles.geometry_of(AttentionCase.of(*(jnp.asarray(x) for x in arrays[:2]), FULL))
  assert (geometry.groups, geometry.splits) == (5, 4)
  assert_near(run('pallas', arrays, segments), run('reference', arrays, segments), 5e-6)


def test_bfloat16():
  segments = pack([5, 337, 70, -20])
  arrays = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in tensors(len(segments), 4, 2, 32)]
  wanted = run('reference', arrays, segments, sliding(133))
  results = run('pallas', arrays, segments, sliding(133), SMALL, jnp.bfloat16)
  # 8 bits of mantissa: 2^-8 for the rounded result, as much again for the rounded probabilities.
  assert_near(results, wanted, 2**-7)


def test_one_token():
  segments, arrays = pack([1]), tensors(1, 2, 2, 8)
  assert_near(run('pallas', arrays, segments), run('reference', arrays, segments), 5e-6)


def test_large_scores_do_not_overflow():
  segments = pack([200, 500])
  q, k, v, dout = tensors(TOKENS, 2, 1, 16)
  arrays = [q * 100, k * 100, v, dout]
  wanted = run('reference', arrays, segments)
  # Scores reach 4e4, where float32 has steps of 4e-3: that much relative error in each probability.
  for got, want in zip(run('pallas', arrays, segments, FULL, SMALL), wanted, strict=True):
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= 1e-2 * np.abs(want).max()


def test_two_cores_and_memory_that_nothing_has_written():
  # JAX's simulator of a TPU: what no kernel has written is NaN, and two cores share the parts of a list.
  simulator = pltpu.InterpretParams(uninitialized_memory='nan', num_cores_or_threads=2)
  segments = pack([-3, 140, -100, 57])
  arrays = [jnp.asarray(x) for x in tensors(len(segments), 2, 1, 16)]
  args = *arrays[:3], jnp.asarray(segments), sliding(130)
  forward, backward = (
    jax.jit(functools.partial(f, blocks=SMALL, interpret=simulator), static_argnums=4)
    for f in (pallas_tpu.forward, pallas_tpu.backward)
  )
  out, lse = forward(*args)
  gradients = backward(*args, out, lse, arrays[3])
  results = [np.asarray(x) for x in (out, lse, *gradients)]
  assert_near(results, run('reference', arrays, segments, sliding(130)), 5e-6)


def test_plans_are_data():
  arrays = tensors(TOKENS, 2, 1, 16)
  for runs in PACKS.values():
    run('pallas', arrays, pack(runs), sliding(130), SMALL)
  assert compiled('pallas', sliding(130), SMALL)._cache_size() == 1


@functools.cache
def lists(kind: LayerKind, blocks: Blocks, parts: int):
  """Jitted segments to `(entries, cuts)` of the list by query block and of the one by key block."""
  geometry = pallas_tiles.Geometry(blocks, 1, 1, parts, 1.0, jax.lax.Precision.DEFAULT, halo=0)

  def both(segments):
    _, _, by_query, by_key = pallas_tiles.tile_lists(segments, len(segments), kind, geometry)
    return (by_query.tiles, by_query.cuts), (by_key.tiles, by_key.cuts)

  return jax.jit(both)


@pytest.mark.parametrize(
  'kind', [FULL, *map(sliding, (1, 40, 130)), *map(chunked, (1, 130, 2**40))], ids=short_name
)
@pytest.mark.parametrize(
  'blocks, parts', [(Blocks(128, 128, 128, 128), 2), (SMALL, 1)], ids=['equal', 'unequal']
)
def test_lists_hold_what_is_visible_and_one_tile_for_each_block(blocks, parts, kind):
  limit = pallas_tiles.max_tiles(TOKENS, blocks.query, blocks.key, kind)
  for runs in PACKS.values():
    segments = pack(runs)
    segments = np.pad(segments, (0, 768 - TOKENS), constant_values=-1)
    seen = np.asarray(reference.visible(segments, kind))
    touched = seen.reshape(768 // blocks.query, blocks.query, -1, blocks.key).any((1, 3))
    for by_query, (entries, cuts) in zip((True, False), lists(kind, blocks, parts)(pack(runs)), strict=True):
      assert len(entries) == limit and 0 < cuts[-1] <= limit
      major, minor = np.asarray(entries)[: cuts[-1]] >> 16, np.asarray(entries)[: cuts[-1]] & 0xFFFF
      table = touched if by_query else touched.T
      wanted = {(int(a), int(b)) for a, b in zip(*table.nonzero(), strict=True)}
      sizes = (blocks.query, blocks.key) if by_query else (blocks.key, blocks.query)
      wanted |= {(a, a * sizes[0] // sizes[1]) for a in range(len(table)) if not table[a].any()}
      assert list(zip(major.tolist(), minor.tolist(), strict=True)) == sorted(wanted)
      # One sample touches all that any pack can, but for chunks, which lie elsewhere in every pack.
      assert len(runs) > 1 or runs[0] < 0 or cuts[-1] == limit or kind == chunked(130)
      # Parts are not empty, and no block is in two.
      assert (np.diff(cuts) > 0).all() and len(cuts) == parts + 1
      assert all(major[c - 1] != major[c] for c in np.asarray(cuts)[1:-1])


def case(tokens=1024, heads=1, head_dim=128, dtype='bfloat16', kind=FULL):
  return AttentionCase(kind, dtype, tokens, heads, 1, head_dim)


@pytest.mark.parametrize('kind', [FULL, sliding(4096), chunked(8192)], ids=short_name)
@pytest.mark.parametrize('log2_tokens, groups', [(5, 1), (9, 16), (15, 8), (18, 4), (20, 1), (20, 3)])
def test_chosen_blocks_fit(log2_tokens, groups, kind):
  for tokens in (2**log2_tokens, 2**log2_tokens + 1):
    blocks = pallas_tiles.choose_blocks(case(tokens, groups, kind=kind))
    sizes = (blocks.query, blocks.key, blocks.forward_step, blocks.backward_step)
    assert all(n >= 128 and n & (n - 1) == 0 for n in sizes) and max(sizes) == blocks.key
    assert pallas_tiles.max_tiles(tokens, blocks.query, blocks.key, kind) * 4 < 0.52 * 2**20
    assert blocks.key < 2 * max(tokens, 128)


def why_not(platform='tpu', **of_case):
  return get_attention('pallas_tpu').why_not(platform, case(**of_case))


def test_too_many_tokens():
  assert 'list of tiles fits scalar memory, not for full attention over 16777216 tokens' in why_not(
    tokens=2**24
  )
  assert why_not(tokens=2**20, heads=4) is None
  assert '1048576 tokens with 8 query heads at once' in why_not(tokens=2**20, heads=8)


def test_what_it_serves():
  assert why_not() is None
  assert why_not(head_dim=8, dtype='float32') is None
  assert 'platform' in why_not('cpu')
  assert 'float16' in why_not(dtype='float16')
  assert '512' in why_not(head_dim=512)
