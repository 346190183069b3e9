"""The exchange against the NumPy oracle, to the bit: values and gradients, both implementations.

XLA:CPU has no ragged all-to-all, so `ragged` runs here on an emulation of the operation's documented
semantics, and its operands and its lowering are checked as they are.
"""

import dataclasses
import functools
import logging

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import emulated_ragged_all_to_all

from repack_jax.checks import ConfigError
from repack_jax.config import FULL, SPARSE, ClusterConfig, ModelConfig, PlannerConfig
from repack_jax.exchange import collectives, reference
from repack_jax.parallel import mesh
from repack_jax.plan import arrays
from repack_jax.plan.plan import DOMAIN, LOCAL, Group, Plan
from repack_jax.predict import cost_model as cost

SHAPES = {  # ranks: (ranks a node, query heads, key/value heads, head width, capacity)
  1: (1, 4, 2, 4, 5),
  2: (2, 4, 2, 4, 6),
  4: (2, 8, 2, 4, 5),
  8: (8, 8, 8, 2, 9),
  16: (8, 16, 4, 8, 7),
  32: (8, 32, 8, 2, 5),
}


def make_exchange(
  ranks: int, scope: str, implementation: str = 'dense', row_tokens: int = 1
) -> collectives.Exchange:
  ranks_per_node, heads, kv, width, capacity = SHAPES[ranks]
  size = ranks_per_node if scope == LOCAL else ranks
  degrees = tuple(1 << i for i in range(size.bit_length()))
  row = collectives.row_width(degrees, heads, kv, width, jnp.float32, row_tokens)
  return collectives.Exchange(
    mesh.scope_axes(scope), size, degrees, capacity * row_tokens, heads, kv, width, row_tokens, row,
    implementation,
  )  # fmt: skip


def make_mesh(ranks: int):
  ranks_per_node = SHAPES[ranks][0]
  return mesh.make_mesh(ClusterConfig(nodes=ranks // ranks_per_node, ranks_per_node=ranks_per_node))


@functools.cache
def exchange_program(ranks: int, scope: str, implementation: str, row_tokens: int):
  """Jitted: dispatch, combine of given head outputs, and both gradients."""
  ex = make_exchange(ranks, scope, implementation, row_tokens)

  def one_rank(q, k, v, out_rows, dispatched_grad, combined_grad, route):
    q, k, v, out_rows, dispatched_grad, combined_grad, route = jax.tree.map(
      lambda x: x[0], (q, k, v, out_rows, dispatched_grad, combined_grad, route)
    )
    rows, dispatch_vjp = jax.vjp(lambda q, k, v: collectives.dispatch(ex, q, k, v, route), q, k, v)
    combined, combine_vjp = jax.vjp(lambda rows: collectives.combine(ex, rows, route), out_rows)
    results = (rows, combined, dispatch_vjp(dispatched_grad), combine_vjp(combined_grad)[0])
    return jax.tree.map(lambda x: x[None], results)

  program = jax.shard_map(
    one_rank, mesh=make_mesh(ranks), in_specs=mesh.RANK_BLOCKS, out_specs=mesh.RANK_BLOCKS, check_vma=False
  )
  return jax.jit(program)


def whole_numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
  return rng.integers(-99, 100, shape).astype(np.float32)


def check_against_oracle(plan: Plan, kind: str, implementation: str, scope: str, seed: int) -> None:
  ranks, tokens, row = plan.num_ranks, plan.shared_slots, plan.row_tokens
  _, heads, kv, width, _ = SHAPES[ranks]
  capacity = plan.capacity_tokens
  ex, rng, layout = (
    make_exchange(ranks, scope, implementation, row),
    np.random.default_rng(seed),
    plan.layout(kind),
  )
  q, combined_grad = (whole_numbers(rng, ranks, capacity, heads, width) for _ in range(2))
  k, v = (whole_numbers(rng, ranks, capacity, kv, width) for _ in range(2))
  for x in (q, k, v, combined_grad):  # whatever padding and solo samples hold must not matter
    x[np.arange(capacity) >= tokens[:, None]] = np.nan
  out_rows = whole_numbers(rng, ranks, *ex.buffer_shape(ex.combine_heads))
  dispatched_grad = whole_numbers(rng, ranks, *ex.buffer_shape(ex.dispatch_heads))
  route = arrays.route_arrays(plan, kind, ex.widest)
  # The plan's scope may be narrower than the program's, which then counts ranks from its own start.
  size = ex.scope_ranks
  counts = np.zeros((ranks, size), np.int32)
  counts[:, : route.counts.shape[1]] = route.counts
  route = route._replace(first=(layout.first_rank % size).astype(np.int32), counts=counts)
  results = exchange_program(ranks, scope, implementation, row)(
    q, k, v, out_rows, dispatched_grad, combined_grad, route
  )
  rows, combined, dispatch_grads, combine_grad = jax.tree.map(np.asarray, results)

  def own(x):
    return [x[r, : tokens[r]] for r in range(ranks)]

  def stream(x, heads_of, rank):
    degree = int(layout.size[rank])
    members = slice(int(layout.first_rank[rank]), int(layout.first_rank[rank]) + degree)
    flat = x[rank, : ex.rows(heads_of, degree)].reshape(degree * capacity, heads_of(degree), width)
    return flat[: tokens[members].sum()]

  def parts(x, rank):
    h, kk = ex.heads(int(layout.size[rank]))
    return tuple(np.split(stream(x, ex.dispatch_heads, rank), (h, h + kk), axis=1))

  expected = reference.dispatch(plan, kind, own(q), own(k), own(v))
  for rank in range(ranks):
    for got, want in zip(parts(rows, rank), expected[rank], strict=True):
      np.testing.assert_array_equal(got, want)
  outs = [stream(out_rows, ex.combine_heads, r) for r in range(ranks)]
  for rank, want in enumerate(reference.combine(plan, kind, outs)):
    np.testing.assert_array_equal(combined[rank, : tokens[rank]], want)
    assert not combined[rank, tokens[rank] :].any()
  for rank, want in enumerate(reference.combine_gradient(plan, kind, own(combined_grad))):
    np.testing.assert_array_equal(stream(combine_grad, ex.combine_heads, rank), want)
  grads = [parts(dispatched_grad, r) for r in range(ranks)]
  for rank, wants in enumerate(reference.dispatch_gradient(plan, kind, grads, kv)):
    for got, want in zip(dispatch_grads, wants, strict=True):
      np.testing.assert_array_equal(got[rank, : tokens[rank]], want)
      assert not got[rank, tokens[rank] :].any()


@pytest.mark.parametrize('implementation', ['dense', 'ragged'])
@pytest.mark.parametrize('ranks', SHAPES)
def test_exchange_equals_oracle_over_the_domain(monkeypatch, ranks, implementation):
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  ranks_per_node, capacity = SHAPES[ranks][0], SHAPES[ranks][4]
  for seed in range(4):
    rng, solo = np.random.default_rng(seed), 0.5 * (seed % 2)
    plan = cases.random_plan(rng, ranks, capacity, ranks, ranks_per_node, solo=solo)
    for kind in (FULL, SPARSE):
      check_against_oracle(plan, kind, implementation, DOMAIN, seed)


@pytest.mark.parametrize('implementation', ['dense', 'ragged'])
@pytest.mark.parametrize('ranks,row_tokens', [(4, 4), (16, 16), (32, 2)])
def test_exchange_of_whole_rows_equals_oracle(monkeypatch, ranks, row_tokens, implementation):
  """Ranks hold whole rows of the wire; the padding at a child's end travels with its tokens."""
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  ranks_per_node, capacity = SHAPES[ranks][0], SHAPES[ranks][4] * row_tokens
  padding = 0
  for seed in range(3):
    rng = np.random.default_rng(200 + seed)
    plan = cases.random_plan(rng, ranks, capacity, ranks, ranks_per_node, solo=0.4, row_tokens=row_tokens)
    padding += int((plan.shared_slots - plan.shared_tokens).sum())
    for kind in (FULL, SPARSE):
      check_against_oracle(plan, kind, implementation, DOMAIN, seed)
  assert padding


@pytest.mark.parametrize('implementation', ['dense', 'ragged'])
@pytest.mark.parametrize('ranks', [4, 16, 32])
def test_exchange_equals_oracle_inside_nodes(monkeypatch, ranks, implementation):
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  ranks_per_node, capacity = SHAPES[ranks][0], SHAPES[ranks][4]
  for seed in range(4):
    rng, solo = np.random.default_rng(100 + seed), 0.5 * (seed % 2)
    plan = cases.random_plan(rng, ranks, capacity, ranks, ranks_per_node, wide_children=0, solo=solo)
    assert plan.scope(SPARSE) == LOCAL
    check_against_oracle(plan, SPARSE, implementation, LOCAL, seed)


def test_two_domains_exchange_apart():
  rng = np.random.default_rng(0)
  plan = cases.random_plan(rng, 32, SHAPES[32][4], 16, ranks_per_node=8, domain_ranks=16)
  assert max(group.end_rank for group in plan.parents if group.first_rank < 16) == 16
  check_against_oracle(plan, FULL, 'dense', DOMAIN, 0)


def skewed_plan() -> Plan:
  """16 ranks, 2 nodes: a wide parent of a node-filling child, a small child, and 6 empty ranks."""
  children = (Group(0, 8, (0,)), Group(8, 1, (1, 2)), Group(9, 1), Group(10, 2), Group(12, 4))
  parents = (Group(0, 16, (0, 1, 2)),)
  return Plan((0, 1, 2), (53, 1, 3), parents, children, 'repack', 7, 16, 16, 8).validate()


@pytest.mark.parametrize('implementation', ['dense', 'ragged'])
def test_skewed_and_empty_ranks(monkeypatch, implementation):
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  check_against_oracle(skewed_plan(), FULL, implementation, DOMAIN, 1)
  check_against_oracle(skewed_plan(), SPARSE, implementation, LOCAL, 1)


@pytest.mark.parametrize('kind,scope', [(FULL, DOMAIN), (SPARSE, LOCAL)])
def test_ragged_operands_are_the_oracles(kind, scope):
  """Sizes against what the oracle moves; each chunk lands on the receiver right behind the one before."""
  rng = np.random.default_rng(7)
  for plan in (
    skewed_plan(),
    cases.random_plan(rng, 16, 7, 16, wide_children=0, solo=0.5),
    cases.random_plan(np.random.default_rng(13), 16, 7 * 16, 16, wide_children=0, solo=0.5, row_tokens=16),
  ):
    assert plan.scope(kind) == scope
    ex = make_exchange(16, scope, 'ragged', plan.row_tokens)
    route = arrays.route_arrays(plan, kind, ex.widest)
    layout = plan.layout(kind)
    sent = reference.sent_elements(plan, kind, ex.num_heads, ex.num_kv_heads)
    for heads_of, stream, elements in (
      (ex.dispatch_heads, True, sent[0]),
      (ex.combine_heads, False, sent[1]),
    ):
      for rank in range(16):
        mine = jax.tree.map(lambda x, rank=rank: x[rank], route)
        mine = mine._replace(**{f: jnp.asarray(v) for f, v in mine._asdict().items()})
        offsets = collectives.ragged_offsets(ex, heads_of, mine, stream)
        input_offsets, send, output_offsets, recv = (np.asarray(x) for x in offsets)
        start = rank - rank % ex.scope_ranks
        peers = slice(start, start + ex.scope_ranks)
        np.testing.assert_array_equal(send * ex.row_width, elements[rank, peers] * ex.head_dim)
        np.testing.assert_array_equal(recv * ex.row_width, elements[peers, rank] * ex.head_dim)
        unit = heads_of(int(layout.size[rank])) * ex.head_dim / ex.row_width
        group = slice(int(layout.first_rank[rank]), int(layout.first_rank[rank] + layout.size[rank]))
        inside = np.zeros(ex.scope_ranks, bool)
        inside[group.start - start : group.stop - start] = True
        slots = np.arange(inside.sum()) * ex.capacity_tokens * unit
        starts = layout.stream_start[group] * unit
        my_slot = (rank - group.start) * ex.capacity_tokens * unit
        my_start = layout.stream_start[rank] * unit
        np.testing.assert_array_equal(input_offsets[inside], slots if stream else starts)
        np.testing.assert_array_equal(output_offsets[inside], my_start if stream else my_slot)
        assert not send[~inside].any() and not recv[~inside].any()


def test_ragged_lowers_to_one_operation_a_site():
  ex = make_exchange(16, DOMAIN, 'ragged')
  route = arrays.route_arrays(skewed_plan(), FULL, ex.widest)
  blocks = functools.partial(
    jax.shard_map, mesh=make_mesh(16), in_specs=mesh.RANK_BLOCKS, out_specs=mesh.RANK_BLOCKS, check_vma=False
  )

  def block(tree):
    return jax.tree.map(lambda x: x[0], tree)

  def dispatch(q, k, v, route):
    return collectives.dispatch(ex, q[0], k[0], v[0], block(route))[None]

  def combine(rows, route):
    return collectives.combine(ex, rows[0], block(route))[None]

  def shape(*dims):
    return jax.ShapeDtypeStruct((16, *dims), jnp.float32)

  q = shape(ex.capacity_tokens, ex.num_heads, ex.head_dim)
  k = shape(ex.capacity_tokens, ex.num_kv_heads, ex.head_dim)
  for program, inputs in (
    (dispatch, (q, k, k)),
    (combine, (shape(*ex.buffer_shape(ex.combine_heads)),)),
  ):
    for gradient in (False, True):
      f = blocks(program)
      if gradient:
        inner = f

        def f(*args, inner=inner):
          return jax.vjp(lambda *xs: inner(*xs, args[-1]), *args[:-1])[1](inner(*args))

      text = jax.jit(f).lower(*inputs, route).as_text()
      assert text.count('ragged_all_to_all') == (2 if gradient else 1)
      assert 'all_gather' not in text and '"stablehlo.all_to_all"' not in text


def test_dispatch_worked_by_hand():
  """2 ranks, 3 + 2 tokens, 2 query heads and 1 key/value head; a value is 100 * rank + 10 * token + head."""
  plan = Plan((0,), (5,), (Group(0, 2, (0,)),), (Group(0, 2, (0,)),), 'repack', 3, 2, 2, 2).validate()
  assert plan.rank_tokens.tolist() == [2, 3]
  q = [
    np.array([[[100.0 * r + 10 * t + h] for h in range(2)] for t in range(n)]) for r, n in ((0, 2), (1, 3))
  ]
  k = [x[:, :1] + 0.5 for x in q]
  received = reference.dispatch(plan, FULL, q, k, k)
  assert received[0][0].reshape(-1).tolist() == [0, 10, 100, 110, 120]
  assert received[1][0].reshape(-1).tolist() == [1, 11, 101, 111, 121]
  assert received[0][1].tolist() == received[1][1].tolist()  # the one key/value head goes to both
  assert reference.combine(plan, FULL, [received[0][0], received[1][0]])[1].tolist() == q[1].tolist()
  gradients = reference.dispatch_gradient(plan, FULL, received, 1)
  assert gradients[0][1].reshape(-1).tolist() == [1.0, 21.0]  # twice 0.5 and 10.5


def test_cross_node_bytes_are_what_the_exchange_sends():
  config = ModelConfig(num_heads=16, num_kv_heads=4, head_dim=8, num_layers=5, pattern='FSSS')
  for seed in range(5):
    plan = cases.random_plan(np.random.default_rng(seed), 16, 7, 16, solo=0.5 * (seed % 2))
    node = np.arange(16) // 8
    across = node[:, None] != node[None, :]
    expected = 0
    for kind in config.layer_kinds:
      for elements in reference.sent_elements(plan, kind, 16, 4):
        expected += 2 * int(elements[across].sum()) * 8 * 4  # forward and backward; float32 rows of D
    assert cost.cross_node_bytes(plan, config) == expected
  local = cases.random_plan(np.random.default_rng(0), 16, 7, 8, wide_children=0)
  assert cost.cross_node_bytes(local, config) == 0


def test_rows_on_the_wire_are_512_bytes():
  degrees = (1, 2, 4, 8)
  assert collectives.row_width(degrees, 32, 8, 128, jnp.bfloat16) == 256  # 4 + 2 heads to a peer at SP8
  assert collectives.row_width(degrees, 32, 8, 128, jnp.float32) == 128
  assert collectives.row_width((*degrees, 16, 32), 32, 8, 128, jnp.bfloat16) == 128  # 1 + 2 at SP32
  assert collectives.row_width((*degrees, 16, 32), 32, 8, 128, jnp.bfloat16, row_tokens=2) == 256
  assert collectives.row_width((1,), 16, 4, 8, jnp.float32) == 64
  assert collectives.row_width((1, 2, 4, 8, 16), 16, 4, 8, jnp.float32, row_tokens=16) == 128


@pytest.mark.parametrize('nodes,heads,kv,width,dtype,expected', [
  (4, 32, 8, 128, 'bfloat16', 2),  # one head of 256 bytes at SP32
  (1, 32, 8, 128, 'bfloat16', 1),  # 4 + 2 and 4 heads at SP8
  (2, 16, 4, 8, 'float32', 16),  # one head of 32 bytes at SP16
  (2, 48, 16, 80, 'bfloat16', 16),  # a head of 160 bytes, 5 times 32
])  # fmt: skip
def test_ranks_hold_whole_rows_on_tpu(nodes, heads, kv, width, dtype, expected):
  model = ModelConfig(num_heads=heads, num_kv_heads=kv, head_dim=width, compute_dtype=dtype)
  planner = PlannerConfig(capacity_tokens=1024)
  cluster = ClusterConfig(nodes=nodes, platform='tpu')
  assert cost.row_tokens(cluster, model, planner) == expected
  assert cost.row_tokens(dataclasses.replace(cluster, platform='auto'), model, planner) == 1
  if expected > 1:
    with pytest.raises(ConfigError, match=rf'capacity_tokens = 1023: must be a multiple of {expected}'):
      cost.row_tokens(cluster, model, dataclasses.replace(planner, capacity_tokens=1023))


def test_explicit_ragged_on_the_cpu_is_an_error_and_auto_says_what_it_takes(caplog):
  with pytest.raises(ConfigError, match='no ragged all-to-all on the CPU'):
    collectives.choose_implementation('ragged', 'cpu')
  with caplog.at_level(logging.INFO, 'repack_jax.collectives'):
    assert collectives.choose_implementation('auto', 'cpu') == 'dense'
    assert collectives.choose_implementation('auto', 'tpu') == 'ragged'
    assert collectives.choose_implementation('dense', 'gpu') == 'dense'
  assert 'dense (chosen by auto, on cpu)' in caplog.text and 'dense (as asked, on gpu)' in caplog.text
