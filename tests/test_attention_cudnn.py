"""cuDNN's packed attention without a GPU: what it is told, and what is made of what it returns.

The kernels themselves are emulated by their documented semantics, on the arguments that they would get.
"""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as theirs
from test_attention import FULL, PACKS, chunked, pack, short_name, sliding, tensors

from repack_jax.ops.attention import AttentionCase, attention, cudnn, get_attention, reference

HEADS, KV_HEADS, WIDTH = 4, 2, 8


@functools.cache
def jitted(function):
  """Compiled once for each kind, the fifth argument."""
  return jax.jit(function, static_argnums=4)


def samples_of(segments, chunk_tokens=10**9):
  """`(start, length)` of each sample, or chunk of it, in order, by a plain loop."""
  found, start = [], 0
  for i in range(1, len(segments) + 1):
    if i == len(segments) or segments[i] != segments[start] or i - start == chunk_tokens:
      if segments[start] >= 0:
        found.append((start, i - start))
      start = i
  return found


def calls_of(segments, kind=FULL):
  """Every call that a pack leads to, as `(bucket, [(start, length)], stats_row)`."""
  padded, all_buckets = cudnn.buckets(len(segments))
  take_sequences = jax.jit(cudnn.take_sequences, static_argnums=1)
  behind = (0, padded - len(segments))
  segments = jnp.asarray(np.pad(segments, behind, constant_values=-1))
  runs = jax.jit(cudnn.find_runs, static_argnums=1)(segments, kind)
  calls = []
  for bucket in all_buckets:
    rank, count = jax.jit(cudnn.rank_samples, static_argnums=1)(runs, bucket)
    for i in range(-(-int(count) // bucket.sequences)):
      starts, lengths, row = map(np.asarray, take_sequences(runs, bucket, rank, i))
      assert starts.shape == (bucket.sequences + 1,) and lengths.shape == (bucket.sequences,)
      assert starts[-1] == padded and (np.diff(starts) >= lengths).all()
      used = lengths > 0
      assert (starts[:-1][~used] == padded).all() and not used[used.sum() :].any()
      calls.append((bucket, list(zip(starts[:-1][used].tolist(), lengths[used].tolist(), strict=True)), row))
  return calls


PACKS_HERE = {name: PACKS[name] for name in ('one_token_samples', 'all_padding', 'padding_inside')} | {
  'three_buckets': [-7, 9000, 300, -100, 5000, 2048, 2049, 1, -1, 513, 20000],
  'more_than_a_call_takes': [3] * 200 + [-5] + [700] * 3 + [-50],
  'whole': [8192],
}


@pytest.mark.parametrize('kind', [FULL, chunked(700)], ids=short_name)
@pytest.mark.parametrize('runs', PACKS_HERE)
def test_every_sample_is_served_once(runs, kind):
  segments = pack(PACKS_HERE[runs])
  calls = calls_of(segments, kind)
  wanted = samples_of(segments) if kind == FULL else samples_of(segments, kind.chunk_tokens)
  assert sorted(sample for _, served, _ in calls for sample in served) == wanted
  for bucket, served, row in calls:
    assert all(bucket.over_tokens < n <= bucket.row_tokens for _, n in served)
    expected = np.full(len(row), bucket.sequences * bucket.row_tokens)
    for slot, (start, n) in enumerate(served):
      expected[start : start + n] = slot * bucket.row_tokens + np.arange(n)
    np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize('tokens', [1, 64, 2048, 2049, 28672, 32768, 100_001, 2**20])
def test_buckets_leave_no_length_out_and_stay_small(tokens):
  padded, kinds = cudnn.buckets(tokens)
  assert tokens <= padded < tokens + 64 * kinds[-1].rows
  assert kinds[0].row_tokens == padded and kinds[-1].over_tokens == 0 and kinds[-1].row_tokens <= 2048
  for longer, shorter in itertools.pairwise(kinds):
    assert longer.over_tokens == shorter.row_tokens
    # As many samples of that length as there can be fit one call.
    assert padded // (longer.over_tokens + 1) <= longer.sequences
  for bucket in kinds:
    assert bucket.rows * bucket.row_tokens == padded
    assert bucket.sequences * bucket.row_tokens == 4 * padded


def test_stats_and_lse_are_inverse():
  bucket, served, row = calls_of(pack([-3, 40, 5, -2, 30, -44]))[0]
  assert len(served) == 3
  lse = np.random.default_rng(0).normal(size=(len(row), HEADS)).astype(np.float32)
  stats = np.asarray(cudnn.lse_to_stats(lse, row, bucket))
  assert stats.shape == (bucket.sequences, HEADS, bucket.row_tokens)
  for slot, (start, n) in enumerate(served):
    np.testing.assert_array_equal(stats[slot, :, :n], lse[start : start + n].T)
    assert not stats[slot, :, n:].any()
  back = np.asarray(cudnn.stats_to_lse(stats, row))
  inside = row < bucket.sequences * bucket.row_tokens
  np.testing.assert_array_equal(back[inside], lse[inside])


def why_not(platform='gpu', dtype='bfloat16', head_dim=128, tokens=1024, heads=8):
  return get_attention('cudnn').why_not(platform, AttentionCase(FULL, dtype, tokens, heads, 1, head_dim))


@pytest.mark.parametrize(
  ('case', 'words'),
  [
    ({}, None),
    ({'dtype': 'float16', 'head_dim': 8}, None),
    ({'platform': 'cpu'}, "not for platform 'cpu'"),
    ({'platform': 'tpu'}, "not for platform 'tpu'"),
    ({'dtype': 'float32'}, 'not for float32'),
    ({'head_dim': 100}, 'not 100'),
    ({'head_dim': 136}, 'not 136'),
    # Below 2^31 elements, and at it.
    ({'tokens': 2**20 - 65536, 'heads': 16}, None),
    ({'tokens': 2**20, 'heads': 16}, '32 bits'),
  ],
)
def test_why_not(case, words):
  reason = why_not(**case)
  assert reason is None if words is None else words in reason


def test_why_not_asks_the_gpu_that_is_here(monkeypatch):
  for capability, words in (('8.9', 'not 8.9'), ('gfx942', 'not for gfx942'), ('9.0', None), ('12.0', None)):
    monkeypatch.setattr(cudnn, '_local_gpu_capability', lambda c=capability: c)
    reason = why_not()
    assert reason is None if words is None else words in reason


class OwnKind(type(FULL)):
  """A kind that cuDNN has never heard of."""

  title = 'own'


def test_unserved_arguments_raise():
  x, segments = jnp.zeros((64, 1, 8), jnp.float32), jnp.zeros(64, jnp.int32)
  with pytest.raises(ValueError, match='not for float32'):
    attention(x, x, x, segments, FULL, 'cudnn')
  x = x.astype(jnp.bfloat16)
  with pytest.raises(ValueError, match='for full, sliding-window, chunked attention only, not for own'):
    attention(x, x, x, segments, OwnKind(), 'cudnn')
  huge = jax.ShapeDtypeStruct((2**20, 32, 128), jnp.bfloat16)
  with pytest.raises(ValueError, match='32 bits'):
    jax.eval_shape(
      lambda x, s: attention(x, x, x, s, FULL, 'cudnn'), huge, jax.ShapeDtypeStruct((2**20,), jnp.int32)
    )


# --- what is made of what the kernels return ---------------------------------------------------------------


def sequences_in(call, operands):
  """Of the arguments of a call: `(first query, first key, tokens)` of each sequence, as cuDNN reads them."""
  lengths, kv_lengths, offsets, kv_offsets = (np.asarray(x).ravel() for x in operands)
  for n, kv_n, offset, kv_offset in zip(
    *(x[: call.bucket.sequences] for x in (lengths, kv_lengths, offsets, kv_offsets)), strict=True
  ):
    assert n == kv_n <= call.bucket.row_tokens
    yield offset // (call.heads * call.width), kv_offset // (call.kv_heads * call.width), n


def dense(call, q, k, v, dout=None):
  """One sequence in NumPy, as a callback must not run JAX: out, or with `dout` gradients, then lse [n, h]."""
  groups, back = call.heads // call.kv_heads, np.subtract.outer(np.arange(len(q)), np.arange(len(q)))
  seen = (back >= 0) & (back < (call.window_tokens or len(q)))
  k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
  scale = 1 / np.sqrt(call.width)
  scores = np.where(seen, np.einsum('qhd,shd->hqs', q, k) * scale, -np.inf)
  lse = np.log(np.exp(scores).sum(-1))
  weights = np.exp(scores - lse[..., None])
  out = np.einsum('hqs,shd->qhd', weights, v)
  if dout is None:
    return out, lse.T
  dweights = np.einsum('qhd,shd->hqs', dout, v)
  dscores = weights * (dweights - (out * dout).sum(-1).T[..., None]) * scale
  dk, dv = np.einsum('hqs,qhd->shd', dscores, q), np.einsum('hqs,qhd->shd', weights, dout)
  dk, dv = (x.reshape(len(q), call.kv_heads, groups, call.width).sum(2) for x in (dk, dv))
  return np.einsum('hqs,shd->qhd', dscores, k), dk, dv, lse.T


def emulated(call, target, results, layouts, operands):
  """The custom call by its documented semantics. What it would not write is NaN."""
  del layouts
  is_forward = target == '__cudnn$fmhaSoftmax'
  assert [x.dtype for x in operands[-4:]] == [jnp.int32] * 4

  def on_host(*operands):
    q, k, v, *rest = (np.asarray(x, np.float32) for x in operands[:-4])
    q, k, v, *grads = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, *rest[1:]))
    assert all(np.isfinite(x).all() for x in (q, k, v, *grads))
    stats = rest[0] if grads else np.full(results[1].shape, np.nan, np.float32)
    written = [np.full_like(x, np.nan) for x in ((q, k, v) if grads else (q,))]
    for slot, (first, kv_first, n) in enumerate(sequences_in(call, operands[-4:])):
      at, kv_at = slice(first, first + n), slice(kv_first, kv_first + n)
      *made, lse = dense(call, q[at], k[kv_at], v[kv_at], *(x[at] for x in grads[:1]))
      for whole, part, one in zip(written, (at, kv_at, kv_at), made, strict=False):
        whole[part] = one
      if is_forward:
        stats[slot, :, :n] = lse.T
      else:
        known = np.where(stats[slot, :, :n] == cudnn._NO_WEIGHT, lse.T, stats[slot, :, :n])
        np.testing.assert_allclose(known, lse.T, rtol=1e-2, atol=1e-2)
    rows = call.bucket.rows, call.bucket.row_tokens
    made = [x.reshape(*rows, *x.shape[1:]).swapaxes(1, 2) for x in written] + [stats] * is_forward
    return [x.astype(r.dtype) for x, r in zip(made, results, strict=True)]

  return jax.pure_callback(on_host, results, *operands)


@pytest.mark.parametrize('kind', [FULL, sliding(33), chunked(33)], ids=short_name)
@pytest.mark.parametrize('runs', ['skewed', 'all_padding', 'padding_inside', 'one_token_samples', 'buckets'])
def test_values_and_gradients_from_emulated_kernels(monkeypatch, runs, kind):
  monkeypatch.setattr(cudnn, '_custom_call', emulated)
  # As many buckets for hundreds of tokens as for thousands.
  monkeypatch.setattr(cudnn, '_LAST_ROW_TOKENS', 64)
  segments = pack(PACKS.get(runs, [-9, 150, 3, 20, -2, 33, 70, 1, 12]))
  q, k, v, dout = (jnp.asarray(x, jnp.bfloat16) for x in tensors(len(segments), HEADS, KV_HEADS, WIDTH))
  padding = (segments < 0)[:, None, None]
  poisoned = [jnp.where(padding, jnp.nan, x) for x in (q, k, v)]
  out, lse = jitted(cudnn.forward)(*poisoned, segments, kind)
  poisoned_out, poisoned_dout = (jnp.where(padding, jnp.nan, x) for x in (out, dout))
  grads = jitted(cudnn.backward)(*poisoned, segments, kind, poisoned_out, lse, poisoned_dout)
  assert lse.dtype == jnp.float32 and all(x.dtype == jnp.bfloat16 for x in (out, *grads))

  exact = [x.astype(jnp.float32) for x in (q, k, v)]
  wanted = jitted(reference.forward)(*exact, segments, kind)
  wanted_grads = jitted(reference.backward)(*exact, segments, kind, out, lse, dout.astype(jnp.float32))
  for got, want in zip((out, lse, *grads), (*wanted, *wanted_grads), strict=True):
    got, want = np.asarray(got, np.float32), np.asarray(want)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-8 * max(1.0, np.abs(want).max()))
    assert not got[segments < 0].any()


@pytest.mark.parametrize('kind', [sliding(33), chunked(33)], ids=short_name)
def test_keys_ahead_of_the_queries(monkeypatch, kind):
  """Their queries are made up: no result is theirs, and nothing comes back from them."""
  monkeypatch.setattr(cudnn, '_custom_call', emulated)
  monkeypatch.setattr(cudnn, '_LAST_ROW_TOKENS', 64)
  segments, halo = pack([-9, 150, 3, 20, -2, 33, 70, 1, 12]), 40
  q, k, v, dout = (jnp.asarray(x, jnp.bfloat16) for x in tensors(len(segments), HEADS, KV_HEADS, WIDTH))
  args = q[halo:], k, v, segments, kind
  out, lse = jitted(cudnn.forward)(*args)
  grads = jitted(cudnn.backward)(*args, out, lse, dout[halo:])
  args = *(x.astype(jnp.float32) for x in args[:3]), segments, kind
  wanted = jitted(reference.forward)(*args)
  wanted_grads = jitted(reference.backward)(*args, out, lse, dout[halo:].astype(jnp.float32))
  for got, want in zip((out, lse, *grads), (*wanted, *wanted_grads), strict=True):
    got, want = np.asarray(got, np.float32), np.asarray(want)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-8 * max(1.0, np.abs(want).max()))


# --- the custom call itself --------------------------------------------------------------------------------


def custom_calls(program, *shapes):
  """`(name, config, layouts and types)` of each cuDNN call that a program lowers to for CUDA."""
  text = jax.jit(program).trace(*shapes).lower(lowering_platforms=('cuda',)).as_text()
  calls = re.findall(
    r'custom_call @(__cudnn\S*?)\(.*?backend_config = "(.*?)", (?:called_computations = \[\], )?(.*)', text
  )
  return [(name, json.loads(config.replace('\\22', '"')), rest) for name, config, rest in calls]


def prune(config, like):
  """A config without the fields that `like` does not have: those hold protobuf's defaults."""
  if isinstance(config, dict):
    dropped = [v for k, v in config.items() if k not in like]
    assert all(v in ([], '0', 'PRIMITIVE_TYPE_INVALID') for v in dropped), dropped
    return {k: prune(v, like[k]) for k, v in config.items() if k in like}
  return config


@pytest.mark.parametrize(
  'kind, window', [(FULL, None), (sliding(48), 48), (sliding(2**40), None), (chunked(48), None)]
)
def test_the_call_is_the_one_of_jax(monkeypatch, kind, window):
  """Name, config, types and layouts, as JAX's own module makes them for the same call."""
  (bucket,) = cudnn.buckets(256)[1]
  dtype, rows = jnp.bfloat16, (bucket.rows, bucket.row_tokens)
  q, k = (jax.ShapeDtypeStruct((256, n, 64), dtype) for n in (HEADS, KV_HEADS))
  lse = jax.ShapeDtypeStruct((256, HEADS), jnp.float32)
  segments = jax.ShapeDtypeStruct((256,), jnp.int32)
  ours = [
    *custom_calls(lambda q, k, v, s: cudnn.forward(q, k, v, s, kind), q, k, k, segments),
    *custom_calls(
      lambda q, k, v, s, o, l, g: cudnn.backward(q, k, v, s, kind, o, l, g), q, k, k, segments, q, lse, q
    ),
  ]

  monkeypatch.setattr(theirs, 'check_cudnn_version', lambda: 91300)
  monkeypatch.setattr(theirs, 'check_compute_capability', lambda capability: True)
  monkeypatch.setattr(theirs, 'is_cuda_compute_capability_equal', lambda capability: False)

  def attend(q, k, v, lengths, offsets):
    return theirs.dot_product_attention(
      q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
      scale=1 / 8, seed=0, mask_type=theirs.MaskType.PADDING_CAUSAL, sliding_window_length=window,
    )  # fmt: skip

  def both(q, k, v, lengths, offsets):
    out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, lengths, offsets), q, k, v)
    return pullback(out)

  shapes = [jax.ShapeDtypeStruct((*rows, n, 64), dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]
  shapes += [jax.ShapeDtypeStruct((bucket.rows, n), jnp.int32) for n in (4, 5)]
  wanted = custom_calls(both, *shapes)
  assert [name for name, _, _ in ours] == ['__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward']
  for (name, config, rest), (wanted_name, wanted_config, wanted_rest) in zip(ours, wanted, strict=True):
    assert name == wanted_name and rest == wanted_rest
    assert config == prune(wanted_config, config)
    assert config['cudnn_fmha_backend_config']['sliding_window_length'] == (window or 0)


def test_one_call_a_bucket():
  q, k = (jax.ShapeDtypeStruct((32768, n, 128), jnp.bfloat16) for n in (32, 4))
  segments = jax.ShapeDtypeStruct((32768,), jnp.int32)
  calls = custom_calls(lambda q, k, v, s: cudnn.forward(q, k, v, s, sliding(4096)), q, k, k, segments)
  assert [c['cudnn_fmha_backend_config']['intermediate_tensor_shape']['dimensions'] for _, c, _ in calls] == [
    ['1', '32', '32768', '32768'],
    ['4', '32', '8192', '8192'],
    ['16', '32', '2048', '2048'],
  ]
