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
from repack_jax.config import ClusterConfig, DataConfig, ModelConfig, PlannerConfig, RunConfig
from repack_jax.exchange import collectives, reference
from repack_jax.parallel import mesh
from repack_jax.plan import arrays
from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS, Group, Plan, PlanError
from repack_jax.plan.program import Program
from repack_jax.plan.wire import Wire
from repack_jax.predict.cost_model import model_costs

SHAPES = {  # ranks: (ranks a node, query heads, key/value heads, head width, capacity)
  1: (1, 4, 2, 4, 5),
  2: (2, 4, 2, 4, 6),
  4: (2, 8, 2, 4, 5),
  8: (8, 8, 8, 2, 9),
  16: (8, 16, 4, 8, 7),
  32: (8, 32, 8, 2, 5),
}


def make_program(ranks: int, span: int, row_tokens: int = 1, degrees: tuple[int, ...] = ()) -> Program:
  """A program whose exchanges span so many ranks in both layouts; it knows all degrees, or just these."""
  degrees = degrees or tuple(1 << i for i in range(span.bit_length()))
  return Program(span, span, degrees, degrees, SHAPES[ranks][4] * row_tokens, row_tokens, has_solo=True)


def make_exchange(
  ranks: int,
  span: int,
  implementation: str = 'dense',
  row_tokens: int = 1,
  degrees: tuple[int, ...] = (),
  chunks: int = 1,
) -> collectives.Exchange:
  ranks_per_node, heads, kv, width, _ = SHAPES[ranks]
  wire = Wire.of_attention(heads, kv, width, 'float32').cut(chunks)
  sizes = {'node': ranks // ranks_per_node, 'local': ranks_per_node}
  program = make_program(ranks, span, row_tokens, degrees)
  return collectives.Exchange.of_program(program, PARENTS, wire, mesh.DOMAIN_AXES, sizes, implementation)


def make_mesh(ranks: int):
  ranks_per_node = SHAPES[ranks][0]
  return mesh.make_mesh(ClusterConfig(nodes=ranks // ranks_per_node, ranks_per_node=ranks_per_node))


@functools.cache
def exchange_program(
  ranks: int, span: int, implementation: str, row_tokens: int, degrees: tuple[int, ...], chunks: int
):
  """Jitted: dispatch, combine of given head outputs, and both gradients."""
  ex = make_exchange(ranks, span, implementation, row_tokens, degrees, chunks)

  def one_rank(q, k, v, out_rows, dispatched_grad, combined_grad, route):
    q, k, v, out_rows, dispatched_grad, combined_grad, route = jax.tree.map(
      lambda x: x[0], (q, k, v, out_rows, dispatched_grad, combined_grad, route)
    )
    rows, dispatch_vjp = jax.vjp(lambda *qkv: collectives.dispatch(ex, qkv, route), q, k, v)
    combined, combine_vjp = jax.vjp(lambda rows: collectives.combine(ex, rows, route), out_rows)
    results = (rows, combined, dispatch_vjp(dispatched_grad), combine_vjp(combined_grad)[0])
    return jax.tree.map(lambda x: x[None], results)

  program = jax.shard_map(
    one_rank, mesh=make_mesh(ranks), in_specs=mesh.RANK_BLOCKS, out_specs=mesh.RANK_BLOCKS, check_vma=False
  )
  return jax.jit(program)


def whole_numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
  return rng.integers(-99, 100, shape).astype(np.float32)


def check_against_oracle(
  plan: Plan,
  layout: str,
  implementation: str,
  span: int,
  seed: int,
  degrees: tuple[int, ...] = (),
  chunks: int = 1,
) -> None:
  """In a program that spans so many ranks and knows all degrees, which may be more than the plan needs."""
  ranks, tokens, row = plan.num_ranks, plan.shared_slots, plan.row_tokens
  _, heads, kv, width, _ = SHAPES[ranks]
  capacity = plan.capacity_tokens
  ex, rng = make_exchange(ranks, span, implementation, row, degrees, chunks), np.random.default_rng(seed)
  wire, placement = ex.wire, plan.placement(layout)
  q, combined_grad = (whole_numbers(rng, ranks, capacity, heads, width) for _ in range(2))
  k, v = (whole_numbers(rng, ranks, capacity, kv, width) for _ in range(2))
  for x in (q, k, v, combined_grad):  # whatever padding and solo samples hold must not matter
    x[np.arange(capacity) >= tokens[:, None]] = np.nan
  out_rows, dispatched_grad = (
    tuple(whole_numbers(rng, ranks, *ex.buffer_shape(of(chunk))) for chunk in range(ex.wire.chunks))
    for of in (wire.combined, wire.dispatched)
  )
  route = arrays.route_arrays(plan, layout, make_program(ranks, span, row, degrees))
  results = exchange_program(ranks, span, implementation, row, degrees, chunks)(
    q, k, v, out_rows, dispatched_grad, combined_grad, route
  )
  rows, combined, dispatch_grads, combine_grad = jax.tree.map(np.asarray, results)

  def own(x):
    return [x[r, : tokens[r]] for r in range(ranks)]

  def streams(chunk_rows, of, rank):
    """Of each chunk that the rank's group has."""
    degree = int(placement.size[rank])
    members = slice(int(placement.first_rank[rank]), int(placement.first_rank[rank]) + degree)
    for chunk, x in enumerate(chunk_rows[: wire.chunk_count(degree)]):
      flat = x[rank, : ex.rows(of(chunk), degree)].reshape(degree * capacity, of(chunk)(degree), width)
      yield flat[: tokens[members].sum()]

  def results_of(chunk_rows, rank):
    return np.concatenate(list(streams(chunk_rows, wire.combined, rank)), axis=1)

  def parts(chunk_rows, rank):
    degree, of_chunks = int(placement.size[rank]), []
    for chunk, x in enumerate(streams(chunk_rows, wire.dispatched, rank)):
      of_chunks.append(np.split(x, np.cumsum(wire.chunk_heads(degree, chunk))[:-1], axis=1))
    return tuple(np.concatenate(of, axis=1) for of in zip(*of_chunks, strict=True))

  expected = reference.dispatch(plan, layout, own(q), own(k), own(v))
  for rank in range(ranks):
    for got, want in zip(parts(rows, rank), expected[rank], strict=True):
      np.testing.assert_array_equal(got, want)
  outs = [results_of(out_rows, r) for r in range(ranks)]
  for rank, want in enumerate(reference.combine(plan, layout, outs)):
    np.testing.assert_array_equal(combined[rank, : tokens[rank]], want)
    assert not combined[rank, tokens[rank] :].any()
  for rank, want in enumerate(reference.combine_gradient(plan, layout, own(combined_grad))):
    np.testing.assert_array_equal(results_of(combine_grad, rank), want)
  grads = [parts(dispatched_grad, r) for r in range(ranks)]
  for rank, wants in enumerate(reference.dispatch_gradient(plan, layout, grads, kv)):
    for got, want in zip(dispatch_grads, wants, strict=True):
      np.testing.assert_array_equal(got[rank, : tokens[rank]], want)
      assert not got[rank, tokens[rank] :].any()


@pytest.mark.parametrize('seeds', [range(4), pytest.param(range(4, 40), marks=pytest.mark.long)])
@pytest.mark.parametrize('implementation', ['dense', 'ragged'])
@pytest.mark.parametrize('ranks', SHAPES)
def test_exchange_equals_oracle_over_the_domain(monkeypatch, ranks, implementation, seeds):
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  ranks_per_node, capacity = SHAPES[ranks][0], SHAPES[ranks][4]
  for seed in seeds:
    rng, solo = np.random.default_rng(seed), 0.5 * (seed % 2)
    plan = cases.random_plan(rng, ranks, capacity, ranks, ranks_per_node, solo=solo)
    for layout in LAYOUTS:
      check_against_oracle(plan, layout, implementation, ranks, seed)


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
    for layout in LAYOUTS:
      check_against_oracle(plan, layout, implementation, ranks, seed)
  assert padding


@pytest.mark.parametrize('implementation', ['dense', 'ragged'])
@pytest.mark.parametrize('ranks', [4, 16, 32])
def test_exchange_equals_oracle_inside_nodes(monkeypatch, ranks, implementation):
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  ranks_per_node, capacity = SHAPES[ranks][0], SHAPES[ranks][4]
  for seed in range(4):
    rng, solo = np.random.default_rng(100 + seed), 0.5 * (seed % 2)
    plan = cases.random_plan(rng, ranks, capacity, ranks, ranks_per_node, wide_children=0, solo=solo)
    assert plan.span(CHILDREN) == ranks_per_node
    check_against_oracle(plan, CHILDREN, implementation, ranks_per_node, seed)


def test_two_domains_exchange_apart():
  rng = np.random.default_rng(0)
  plan = cases.random_plan(rng, 32, SHAPES[32][4], 16, ranks_per_node=8, domain_ranks=16)
  assert max(group.end_rank for group in plan.parents if group.first_rank < 16) == 16
  check_against_oracle(plan, PARENTS, 'dense', 32, 0)


def skewed_plan() -> Plan:
  """16 ranks, 2 nodes: a wide parent of a node-filling child, a small child, and 6 empty ranks."""
  children = (Group(0, 8, (0,)), Group(8, 1, (1, 2)), Group(9, 1), Group(10, 2), Group(12, 4))
  parents = (Group(0, 16, (0, 1, 2)),)
  return Plan((0, 1, 2), (53, 1, 3), parents, children, 'repack', 7, 16, 16, 8).validate()


@pytest.mark.parametrize('implementation', ['dense', 'ragged'])
def test_skewed_and_empty_ranks(monkeypatch, implementation):
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  check_against_oracle(skewed_plan(), PARENTS, implementation, 16, 1)
  check_against_oracle(skewed_plan(), CHILDREN, implementation, 8, 1)


@pytest.mark.parametrize('implementation', ['dense', 'ragged'])
def test_programs_that_know_the_plans_degrees_alone(monkeypatch, implementation):
  """Groups that hold nothing, of other sizes, are none of them."""
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  plan = skewed_plan()
  assert (plan.degrees(PARENTS), plan.degrees(CHILDREN)) == ((16,), (1, 8))
  check_against_oracle(plan, PARENTS, implementation, 16, 1, plan.degrees(PARENTS))
  check_against_oracle(plan, CHILDREN, implementation, 8, 1, plan.degrees(CHILDREN))


@pytest.mark.parametrize('implementation', ['dense', 'ragged'])
@pytest.mark.parametrize(
  'ranks,chunks', [(4, 4), (8, 2), (16, 3), pytest.param(16, 8, marks=pytest.mark.long)]
)
def test_chunks_of_heads_are_parts_of_the_whole(monkeypatch, ranks, chunks, implementation):
  """Also where heads of keys and values are of several chunks, and where groups have fewer chunks or none."""
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated_ragged_all_to_all)
  ranks_per_node, capacity = SHAPES[ranks][0], SHAPES[ranks][4]
  for seed in range(300, 302):
    plan = cases.random_plan(np.random.default_rng(seed), ranks, capacity, ranks, ranks_per_node, solo=0.4)
    for layout in LAYOUTS:
      check_against_oracle(plan, layout, implementation, ranks, seed, chunks=chunks)


def test_a_dense_exchange_has_an_all_to_all_a_degree():
  for degrees in ((1,), (8,), (1, 2, 8)):
    ex = make_exchange(8, 8, 'dense', degrees=degrees)
    route = arrays.route_arrays(cases.wide_plan(8, 8, ex.capacity_tokens), PARENTS, make_program(8, 8))

    def combined(rows, route, ex=ex):
      return collectives.combine(ex, (rows[0],), jax.tree.map(lambda x: x[0], route))[None]

    rows = np.zeros((8, *ex.buffer_shape(ex.wire.combine_heads)), np.float32)
    spec = mesh.RANK_BLOCKS
    mapped = jax.shard_map(combined, mesh=make_mesh(8), in_specs=spec, out_specs=spec, check_vma=False)
    assert str(jax.make_jaxpr(mapped)(rows, route)).count('= all_to_all[') == len(set(degrees) - {1})


@pytest.mark.parametrize('layout,span', [(PARENTS, 16), (CHILDREN, 8)])
def test_ragged_operands_are_the_oracles(layout, span):
  """Sizes against what the oracle moves; each chunk lands on the receiver right behind the one before."""
  rng = np.random.default_rng(7)
  for plan in (
    skewed_plan(),
    cases.random_plan(rng, 16, 7, 16, wide_children=0, solo=0.5),
    cases.random_plan(np.random.default_rng(13), 16, 7 * 16, 16, wide_children=0, solo=0.5, row_tokens=16),
  ):
    assert plan.span(layout) == span
    ex = make_exchange(16, span, 'ragged', plan.row_tokens)
    route = arrays.route_arrays(plan, layout, make_program(16, span, plan.row_tokens))
    placement, width = plan.placement(layout), ex.wire.head_dim
    sent = reference.sent_elements(plan, layout, *SHAPES[16][1:3])
    for heads_of, stream, elements in (
      (ex.wire.dispatch_heads, True, sent[0]),
      (ex.wire.combine_heads, False, sent[1]),
    ):
      for rank in range(16):
        mine = jax.tree.map(lambda x, rank=rank: x[rank], route)
        mine = mine._replace(**{f: jnp.asarray(v) for f, v in mine._asdict().items()})
        offsets = collectives.ragged_offsets(ex, heads_of, mine, stream)
        input_offsets, send, output_offsets, recv = (np.asarray(x) for x in offsets)
        start = rank - rank % ex.span
        peers = slice(start, start + ex.span)
        np.testing.assert_array_equal(send * ex.row_width, elements[rank, peers] * width)
        np.testing.assert_array_equal(recv * ex.row_width, elements[peers, rank] * width)
        if not send.any() and not recv.any():  # its group holds nothing: offsets don't matter
          continue
        unit = heads_of(int(placement.size[rank])) * width / ex.row_width
        group = slice(int(placement.first_rank[rank]), int(placement.first_rank[rank] + placement.size[rank]))
        inside = np.zeros(ex.span, bool)
        inside[group.start - start : group.stop - start] = True
        slots = np.arange(inside.sum()) * ex.capacity_tokens * unit
        starts = placement.stream_start[group] * unit
        my_slot = (rank - group.start) * ex.capacity_tokens * unit
        my_start = placement.stream_start[rank] * unit
        np.testing.assert_array_equal(input_offsets[inside], slots if stream else starts)
        np.testing.assert_array_equal(output_offsets[inside], my_start if stream else my_slot)
        assert not send[~inside].any() and not recv[~inside].any()


def test_ragged_lowers_to_one_operation_a_site():
  ex = make_exchange(16, 16, 'ragged')
  route = arrays.route_arrays(skewed_plan(), PARENTS, make_program(16, 16))
  blocks = functools.partial(
    jax.shard_map, mesh=make_mesh(16), in_specs=mesh.RANK_BLOCKS, out_specs=mesh.RANK_BLOCKS, check_vma=False
  )

  def block(tree):
    return jax.tree.map(lambda x: x[0], tree)

  def dispatch(q, k, v, route):
    return collectives.dispatch(ex, (q[0], k[0], v[0]), block(route))[0][None]

  def combine(rows, route):
    return collectives.combine(ex, (rows[0],), block(route))[None]

  def shape(*dims):
    return jax.ShapeDtypeStruct((16, *dims), jnp.float32)

  q, k, _ = (shape(ex.capacity_tokens, heads, ex.wire.head_dim) for heads in ex.wire.operand_heads)
  for program, inputs in (
    (dispatch, (q, k, k)),
    (combine, (shape(*ex.buffer_shape(ex.wire.combine_heads)),)),
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
  received = reference.dispatch(plan, PARENTS, q, k, k)
  assert received[0][0].reshape(-1).tolist() == [0, 10, 100, 110, 120]
  assert received[1][0].reshape(-1).tolist() == [1, 11, 101, 111, 121]
  assert received[0][1].tolist() == received[1][1].tolist()  # the one key/value head goes to both
  assert reference.combine(plan, PARENTS, [received[0][0], received[1][0]])[1].tolist() == q[1].tolist()
  gradients = reference.dispatch_gradient(plan, PARENTS, received, 1)
  assert gradients[0][1].reshape(-1).tolist() == [1.0, 21.0]  # twice 0.5 and 10.5


def test_cross_node_bytes_are_what_the_exchange_sends():
  config = ModelConfig(num_heads=16, num_kv_heads=4, head_dim=8, num_layers=5, pattern='FSSS')
  costs = model_costs(ClusterConfig(), config)
  for seed in range(5):
    plan = cases.random_plan(np.random.default_rng(seed), 16, 7, 16, solo=0.5 * (seed % 2))
    node = np.arange(16) // 8
    across = node[:, None] != node[None, :]
    expected = 0
    for letter in config.layer_kinds:
      for elements in reference.sent_elements(plan, config.kind(letter).layout, 16, 4):
        expected += 2 * int(elements[across].sum()) * 8 * 4  # forward and backward; float32 rows of D
    assert costs.cross_node_bytes(plan) == expected
  local = cases.random_plan(np.random.default_rng(0), 16, 7, 8, wide_children=0)
  assert costs.cross_node_bytes(local) == 0


def test_rows_on_the_wire_are_512_bytes():
  wide, tiny = Wire.of_attention(32, 8, 128, 'bfloat16'), Wire.of_attention(16, 4, 8, 'float32')
  degrees = (1, 2, 4, 8)
  assert wide.row_elements(degrees, 1) == 256  # 4 + 2 heads to a peer at SP8
  assert Wire.of_attention(32, 8, 128, 'float32').row_elements(degrees, 1) == 128
  assert wide.row_elements((*degrees, 16, 32), 1) == 128  # 1 + 2 at SP32
  assert wide.row_elements((*degrees, 16, 32), 2) == 256
  assert tiny.row_elements((1,), 1) == 64
  assert tiny.row_elements((1, 2, 4, 8, 16), 16) == 128


@pytest.mark.parametrize('nodes,heads,kv,width,dtype,expected', [
  (4, 32, 8, 128, 'bfloat16', 2),  # one head of 256 bytes at SP32
  (1, 32, 8, 128, 'bfloat16', 1),  # 4 + 2 and 4 heads at SP8
  (2, 16, 4, 8, 'float32', 16),  # one head of 32 bytes at SP16
  (2, 48, 16, 80, 'bfloat16', 16),  # a head of 160 bytes, 5 times 32
])  # fmt: skip
def test_ranks_hold_whole_rows_where_the_wire_pads(nodes, heads, kv, width, dtype, expected):
  wire = Wire.of_attention(heads, kv, width, dtype)
  assert wire.row_tokens(8 * nodes, 512) == expected
  assert wire.row_tokens(8 * nodes, 1) == 1
  model = ModelConfig(num_heads=heads, num_kv_heads=kv, head_dim=width, compute_dtype=dtype)
  run = RunConfig(
    cluster=ClusterConfig(nodes=nodes, wire_row_bytes=512), model=model,
    data=DataConfig(batch_tokens=512, max_document_tokens=512), planner=PlannerConfig(capacity_tokens=1024),
  )  # fmt: skip
  if expected > 1:
    with pytest.raises(ConfigError, match=rf'capacity_tokens = 1023: must be a multiple of {expected}'):
      dataclasses.replace(run, planner=PlannerConfig(capacity_tokens=1023))


def test_a_plan_for_other_nodes_is_refused():
  with pytest.raises(PlanError, match=r'span 8 ranks, but no minor axes of the mesh \(node 4 x local 4\)'):
    collectives.spanned_axes(8, mesh.DOMAIN_AXES, {'node': 4, 'local': 4})
  assert collectives.spanned_axes(4, mesh.DOMAIN_AXES, {'node': 4, 'local': 4}) == ('local',)
  assert collectives.spanned_axes(4, mesh.DOMAIN_AXES, {'node': 1, 'local': 4}) == ('local',)
  assert collectives.spanned_axes(16, ('rack', 'host', 'chip'), {'rack': 2, 'host': 4, 'chip': 4}) == (
    'host',
    'chip',
  )


def test_exchange_of_a_platform(caplog):
  with caplog.at_level(logging.INFO, 'repack_jax.exchange.collectives'):
    assert collectives.choose_exchange('ragged', 'cpu') == 'dense'
    assert collectives.choose_exchange('ragged', 'tpu') == 'ragged'
    assert collectives.choose_exchange('dense', 'gpu') == 'dense'
  assert 'dense for ragged, which XLA does not have, on cpu' in caplog.text
  assert 'exchange: dense, on gpu' in caplog.text
