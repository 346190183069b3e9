"""What a model costs, from its weights: operations, seconds, parameters and bytes, all worked by hand."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import PLAN, SOLO
from messages import message_of

from models.transformer import Decoder
from repack_jax.config import ClusterConfig, ModelConfig, PlannerConfig, weights
from repack_jax.kinds import ChunkedAttention, FullAttention, SlidingWindowAttention
from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS
from repack_jax.predict import flops, sizes
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.costs import Costs, link_s

MODEL = ModelConfig(
  d_model=8, num_layers=3, pattern='FSS', num_heads=4, num_kv_heads=2, head_dim=2,
  num_experts=4, experts_per_token=2, expert_width=5, shared_expert_width=3, dense_layers=1, dense_width=7,
  vocab_size=256,
).with_kind(SlidingWindowAttention(window_tokens=3))  # fmt: skip


def costs_of(model: ModelConfig = MODEL, **changes: object) -> Costs:
  """Rates that make seconds easy to read."""
  rates = {
    'nodes': 2, 'ranks_per_node': 2, 'matmul_flops_per_s': 100, 'attention_flops_per_s': 50,
    'intra_node_bytes_per_s': 64, 'inter_node_bytes_per_s': 8, 'intra_node_latency_s': 3,
    'inter_node_latency_s': 5, 'memory_bytes_per_s': 7,
  }  # fmt: skip
  return model_costs(ClusterConfig(**(rates | changes)), model)


def test_flops_by_hand():
  assert FullAttention().pairs(np.array([1, 3, 5])).tolist() == [1, 6, 15]
  assert SlidingWindowAttention(window_tokens=3).pairs(np.array([1, 3, 5])).tolist() == [1, 6, 3 + 3 + 6]
  assert flops.qkv_flops_per_token(MODEL) == 2 * 8 * (8 + 4 + 4)
  assert flops.output_flops_per_token(MODEL) == 2 * 8 * 8
  assert flops.own_feed_forward_flops_per_token(MODEL, 0) == 3 * 2 * 8 * 7
  assert flops.own_feed_forward_flops_per_token(MODEL, 1) == 3 * 2 * 8 * 3 + 2 * 8 * 4
  assert [flops.routed_flops_per_token(MODEL, layer) for layer in (0, 1)] == [0, 3 * 2 * 8 * 2 * 5]
  assert flops.logits_flops_per_token(MODEL) == 2 * 8 * 256
  linear = 3 * 384 + 336 + 2 * 688 + 2 * 8 * 256
  assert flops.linear_flops_per_token(MODEL) == linear
  # Scores and weighted values: two products of 2 * (4 heads x 2) a pair.
  assert MODEL.kind('F').flops(MODEL.wire, 5) == 2 * 2 * 8 * 15
  assert flops.sample_flops(MODEL, 5) == 5 * linear + 2 * 2 * 8 * (15 + 12 + 12)
  assert costs_of().flops(np.array([5, 5])).tolist() == [flops.sample_flops(MODEL, 5)] * 2


def test_bytes_by_hand():
  # 4 query and 2 key/value heads of 2 floats: SP1 sends 4 + 2 * 2 and 4 heads to itself, and so on.
  wire = MODEL.wire
  for degree, heads in ((1, (8, 4)), (2, (4, 2)), (4, (3, 1))):
    assert (wire.dispatch_heads(degree), wire.combine_heads(degree)) == heads
    assert wire.bytes_per_peer(degree) == sum(heads) * 2 * 4
  assert wire.bytes_per_peer(np.array([1, 2, 4])).tolist() == [96, 48, 32]
  half = dataclasses.replace(MODEL, compute_dtype='bfloat16')
  assert half.wire.bytes_per_peer(4) == 16
  # PLAN: in the parents' layer each of 11 tokens has two peers in the other node; no child leaves its node.
  costs = costs_of()
  assert costs.cross_node_bytes(PLAN) == 11 * 2 * 64
  assert costs.cross_node_bytes(SOLO) == 11 * 2 * 64  # 17 tokens, of which 6 stay where they are
  wide = dataclasses.replace(PLAN, children=PLAN.parents).validate()
  assert costs.cross_node_bytes(wide) == 3 * 11 * 2 * 64


def test_seconds_of_computation_by_hand():
  costs = costs_of()
  first, second, _ = layers = costs.layers
  assert [layer.layout for layer in layers] == [PARENTS, CHILDREN, CHILDREN]
  assert [layer.has_experts for layer in layers] == [False, True, True]
  assert first.before_s == second.before_s == pytest.approx(2 * 8 * 16 / 100)
  # Behind the attention: its output projection; the dense block, or a shared expert and the router.
  assert first.after_s == pytest.approx((2 * 8 * 8 + 3 * 2 * 8 * 7) / 100)
  assert second.after_s == pytest.approx((2 * 8 * 8 + 3 * 2 * 8 * 3 + 2 * 8 * 4) / 100)
  assert first.routed_s == 0 and second.routed_s == pytest.approx(3 * 2 * 8 * 2 * 5 / 100)
  # The logits' one product in the forward pass; once more in the backward pass, and its own two.
  assert costs.logits_s == pytest.approx(4 * 2 * 8 * 256 / 100)
  whole = sum(layer.before_s + layer.after_s + layer.routed_s for layer in layers) + costs.logits_s / 4
  assert whole == pytest.approx(flops.linear_flops_per_token(MODEL) / 100)
  assert costs.slot_s == pytest.approx(4 * sum(x.before_s + x.after_s for x in layers) + costs.logits_s)
  assert first.attention_s(np.array([1, 5])) == pytest.approx([32 / 50, 32 * 15 / 50])
  assert second.attention_s(np.array([5])) == pytest.approx(32 * 12 / 50)
  for layer in (first, second):
    assert costs.attention_s(np.array([1, 5]), layer.layout).tolist() == (
      layer.attention_s(np.array([1, 5])).tolist()
    )
  assert costs.all_attention_s(np.array([5])) == pytest.approx(3.5 * (32 * 15 + 2 * 32 * 12) / 50)
  assert costs.linear_backward == 3  # the forward pass again, and two products for each of its own
  assert costs_of(dataclasses.replace(MODEL, remat='none')).linear_backward == 2


def test_layers_that_cost_the_same_are_of_one_sort():
  """The dense layer and the first with experts differ; equal ones are computed once."""
  first, second, third = costs_of().layers
  assert second == third and costs_of().sorts == {first: 1, second: 2}
  assert [costs_of().layers_in(layout) for layout in LAYOUTS] == [1, 2]


def test_seconds_of_links_by_hand():
  costs = costs_of()
  # The slower of the two links, and the latency of the farther one.
  assert link_s(costs.cluster, 128.0, 8.0, True) == 5 + 2
  assert link_s(costs.cluster, 64.0, 40.0, True) == 5 + 5
  assert link_s(costs.cluster, np.array([64.0, 0]), np.zeros(2), False).tolist() == [4, 3]
  # A token sends 48 bytes to its peer of SP2; of SP4, 32 to one in its node and to each of two outside.
  assert [costs.exchange_s(degree) for degree in (1, 2, 4)] == [0, 48 / 64, 2 * 32 / 8]
  # A site: nothing for a rank alone, else the latency of the farther link, and of each peer.
  assert costs.site_latency_s(np.array([1, 2, 4])).tolist() == [0, 3, 5]
  assert costs_of(peer_latency_s=0.25).site_latency_s(np.array([1, 2, 4])).tolist() == [0, 3.25, 5.75]
  fast = costs_of(inter_node_bytes_per_s=1000)
  assert fast.exchange_s(4) == 32 / 64  # now the peer in the node takes longest
  # Two experts a token, rows of 8 floats, and half of all experts on the other rank of the node.
  assert costs.expert_ranks == 2 and costs.expert_bytes_per_token == 2 * 8 * 4 / 2
  assert costs_of(ranks_per_node=4).expert_bytes_per_token == 2 * 8 * 4 * 3 / 4
  for changes in ({'expert_placement': 'replicated'}, {'num_experts': 0}):
    alone = costs_of(dataclasses.replace(MODEL, **changes))
    assert alone.expert_ranks == 1 and alone.expert_bytes_per_token == 0
  assert costs.hidden_bytes == 8 * 4


def tables_s(costs: Costs) -> tuple[float, float]:
  return costs.table_gather_s, costs.table_reduce_s


def test_seconds_of_parameters_by_hand():
  costs = costs_of()
  own, routed = sizes.layer_parameters(MODEL, 1)
  assert own == 8 * 12 * 2 + 8 * 2 * 2 * 2 - 8 * 4 * 2 + 2 * 8 + 2 * 2 + 8 * 4 + 3 * 8 * 3
  assert routed == 3 * 4 * 8 * 5
  # One axis after the other, spread experts in a buffer and all else in one. Over the nodes a rank takes in
  # what the other of its place holds; inside its node half of a layer, of spread experts nothing.
  inter_s = (own + routed) * 4 / 2 / 2 / 8
  layer = costs.layers[1]
  assert layer.gather_s == layer.reduce_s == pytest.approx(2 * 5 + inter_s + 3 + own * 4 / 2 / 64)
  half = costs_of(dataclasses.replace(MODEL, compute_dtype='bfloat16')).layers[1]  # norms and router stay
  assert half.gather_s - (3 * 5 + 2 * 3) == pytest.approx((layer.gather_s - (2 * 5 + 3)) / 2)
  assert half.reduce_s == pytest.approx(layer.reduce_s + 5 + 3)
  everywhere = costs_of(dataclasses.replace(MODEL, expert_placement='replicated')).layers[1]
  assert everywhere.gather_s == pytest.approx(5 + inter_s + 3 + (own + routed) * 4 / 2 / 64)
  dense = costs.layers[0]
  own_dense, _ = sizes.layer_parameters(MODEL, 0)
  assert dense.gather_s == pytest.approx(5 + 3 + own_dense * 4 / 2 * (1 / 2 / 8 + 1 / 64))
  table = 8 * 256 / 2 / 2 / 8 + 8 * 256 / 2 / 64
  assert tables_s(costs) == pytest.approx((5 + 3 + 4 * table,) * 2)
  in_half = costs_of(dataclasses.replace(MODEL, compute_dtype='bfloat16'))
  assert tables_s(in_half) == pytest.approx((5 + 3 + 2 * table, 5 + 3 + 4 * table))
  assert costs.vocabulary_tables == 2
  assert costs_of(dataclasses.replace(MODEL, tie_embeddings=True)).vocabulary_tables == 1
  one_node, one_rank = costs_of(nodes=1), costs_of(ranks_per_node=1)
  assert tables_s(one_node) == pytest.approx((3 + 8 * 256 / 2 * 4 / 64,) * 2)
  assert tables_s(one_rank) == pytest.approx((5 + 8 * 256 / 2 * 4 / 8,) * 2)
  alone = costs_of(nodes=1, ranks_per_node=1)
  assert (alone.layers[1].gather_s, alone.layers[1].reduce_s, tables_s(alone)) == (0, 0, (0, 0))


def test_large_weights_travel_alone():
  small, large = weights.Weight((weights.MOST_BUNDLED,)), weights.Weight((weights.MOST_BUNDLED + 1,))
  of = [('a', small), ('a', large), ('b', small), ('a', small), ('a', large)]
  assert weights.bundles(of) == [[0, 3], [1], [2], [4]]
  # Of 12 parameters wide, all but the experts' three of a layer would be small.
  wide = dataclasses.replace(MODEL, expert_width=2**20, expert_placement='replicated')
  fast = {'intra_node_bytes_per_s': 1e30, 'inter_node_bytes_per_s': 1e30}
  wide_s, layer_s = (costs_of(model, **fast).layers[1].gather_s for model in (wide, MODEL))
  assert (wide_s, layer_s) == pytest.approx((4 * (5 + 3), 2 * 5 + 3))


def test_parameters_have_rates_of_their_own():
  own, routed = sizes.layer_parameters(MODEL, 1)
  changed = {'parameter_intra_node_bytes_per_s': 32, 'parameter_inter_node_bytes_per_s': 2}
  costs, same = costs_of(domains=3, **changed), costs_of(domains=3)
  assert costs.cluster.parameter_rates == (32, 2) and same.cluster.parameter_rates == (64, 8)
  expected = 2 * 5 + (own + routed) * 4 / 2 / 2 / 2 + 3 + own * 4 / 2 / 32
  assert costs.layers[1].gather_s == costs.layers[1].reduce_s == pytest.approx(expected)
  assert costs.table_gather_s == pytest.approx(5 + 8 * 256 / 2 / 2 * 4 / 2 + 3 + 8 * 256 / 2 * 4 / 32)
  total = sizes.total_parameters(MODEL)
  assert costs.data_reduce_s == pytest.approx(5 + total / 4 * 4 * 4 / 3 / 2)
  # Exchanges keep theirs.
  assert costs.exchange_s(4) == same.exchange_s(4) and costs.site_latency_s(4) == same.site_latency_s(4)
  only = costs_of(parameter_inter_node_bytes_per_s=2).cluster
  assert only.parameter_rates == (64, 2)


def test_collectives_of_parameters_that_show():
  """What of them a micro-batch waits for: all where they run in line, both ends where they run ahead."""
  costs, ahead = costs_of(domains=2), costs_of(domains=2, prefetch_layers=1)
  layers = sum(2 * layer.gather_s + layer.reduce_s for layer in costs.layers)
  expected = layers + 2 * (costs.table_gather_s + costs.table_reduce_s) + costs.data_reduce_s
  assert costs.shown_parameters_s == pytest.approx(expected)
  assert ahead.shown_parameters_s == pytest.approx(costs.table_gather_s + costs.data_reduce_s)
  tied = costs_of(dataclasses.replace(MODEL, tie_embeddings=True))
  assert tied.shown_parameters_s == pytest.approx(layers + tied.table_gather_s + tied.table_reduce_s)


def test_attention_curve_by_hand():
  """Shares go with the logarithm of the tokens between two points, and stay beyond the first and the last."""
  curve = ((2, 0.5), (8, 1.0), (32, 0.8))
  lengths, shares = np.array([1, 2, 4, 8, 16, 32, 500]), [0.5, 0.5, 0.75, 1.0, 0.9, 0.8, 0.8]
  costs, flat = costs_of(attention_curve=curve), costs_of()
  for layout in LAYOUTS:
    assert costs.attention_s(lengths, layout) == pytest.approx(flat.attention_s(lengths, layout) / shares)
  assert costs.layers[0].attention_s(np.array([4])) == pytest.approx(32 * 10 / (50 * 0.75))
  one = costs_of(attention_curve=((4, 0.5),))
  assert one.attention_s(lengths, PARENTS) == pytest.approx(2 * flat.attention_s(lengths, PARENTS))
  # Layers of one kind stay one sort, operations and all else what they were.
  assert list(costs.sorts.values()) == list(flat.sorts.values()) and costs.slot_s == flat.slot_s
  assert costs.flops(lengths).tolist() == flat.flops(lengths).tolist()


@pytest.mark.parametrize(
  'curve', [((2, 1, 1),), ((2,),), ((8, 1.0), (2, 1.0)), ((2, 1.0), (2, 0.5)), ((0, 1.0),), ((2, 0.0),)]
)
def test_curves_that_are_mistakes(curve):
  message = message_of(lambda: ClusterConfig(attention_curve=curve))
  assert message.startswith(f'ClusterConfig.attention_curve = {curve!r}: must be pairs of tokens')


@pytest.mark.parametrize('letters', ['FSS', 'C'])
def test_operations_of_lengths_beyond_int64(letters):
  """Float64 that is positive, ascends and equals whole numbers of any size but for its rounding."""
  model = dataclasses.replace(MODEL, pattern=letters).with_kind(ChunkedAttention(chunk_tokens=128))
  lengths = np.array([10_000_000, 2**25, 2**40])
  linear = flops.linear_flops_per_token(model)

  def exact(length: int) -> int:
    pairs = {
      'F': length * (length + 1) // 2,
      'S': 6 + (length - 3) * 3,
      'C': length // 128 * (128 * 129 // 2) + length % 128 * (length % 128 + 1) // 2,
    }
    return length * linear + sum(2 * 2 * 8 * pairs[letter] for letter in model.layer_kinds)

  found = flops.sample_flops(model, lengths)
  assert found.dtype == np.float64 and (found > 0).all() and (np.diff(found) > 0).all()
  for value, length in zip(found.tolist(), lengths.tolist(), strict=True):
    assert abs(int(value) - exact(length)) <= exact(length) * 1e-12
    assert flops.sample_flops(model, length) == value
  costs = costs_of(model, attention_curve=((512, 0.5), (2**30, 1.0)))
  assert (costs.flops(lengths) == found).all()
  seconds = costs.all_attention_s(lengths)
  assert (seconds > 0).all() and (np.diff(seconds) > 0).all() and np.isfinite(seconds).all()


def test_effective_ratio_of_the_links_by_hand():
  """7 / 7 of a link against 8 peers of 15 behind one that is 7 times slower, and 24 of 31."""
  cluster = ClusterConfig(nodes=4, ranks_per_node=8, intra_node_bytes_per_s=70, inter_node_bytes_per_s=10)
  ratios = [cluster.exchange_ratio(degree) for degree in (8, 16, 32)]
  assert ratios == pytest.approx([1, 8 * 7 / 15, 24 * 7 / 31])
  assert [f'{ratio:.1f}' for ratio in ratios[1:]] == ['3.7', '5.4']


def test_seconds_of_the_update_by_hand():
  total = sizes.total_parameters(MODEL)
  assert costs_of().optimizer_s == pytest.approx(total / 4 * 7 * 4 / 7)  # seven floats read or written
  assert costs_of().data_reduce_s == 0
  # A ring over three domains: each rank sends a third of its shard four times.
  assert costs_of(domains=3).data_reduce_s == pytest.approx(5 + total / 4 * 4 * 4 / 3 / 8)


MODELS = {
  'mixed': MODEL,
  'experts throughout': dataclasses.replace(MODEL, dense_layers=0, shared_expert_width=0, qk_norm=False),
  'dense': dataclasses.replace(MODEL, num_experts=0, tie_embeddings=True, num_layers=4),
  'defaults': ModelConfig(),
}


@pytest.mark.parametrize('name', MODELS)
def test_parameters_are_those_of_the_model(name):
  """Counted from the configs as the model makes them, in all and a layer."""
  model = MODELS[name]
  shapes = jax.eval_shape(lambda: Decoder(model).init(0))
  assert sizes.total_parameters(model) == sum(leaf.size for leaf in jax.tree.leaves(shapes))
  assert sizes.table_parameters(model) == shapes['embedding'].size
  own, routed = zip(*(sizes.layer_parameters(model, layer) for layer in range(model.num_layers)), strict=True)
  in_layers = jax.tree_util.tree_leaves_with_path(shapes['stacks'])
  of_experts = [leaf.size for path, leaf in in_layers if 'expert_' in jax.tree_util.keystr(path)]
  assert bool(of_experts) == bool(model.num_experts)
  assert sum(routed) == sum(of_experts)
  assert sum(own) == sum(leaf.size for _, leaf in in_layers) - sum(of_experts)


def test_memory_of_a_rank_by_hand():
  cluster = ClusterConfig(nodes=2, ranks_per_node=2)
  planner = PlannerConfig(capacity_tokens=10)
  needed = sizes.rank_bytes(MODEL, cluster, planner)
  own = [sizes.layer_parameters(MODEL, layer).own for layer in range(3)]
  rows = (4 + 2 * 4) * 2  # a token's q, k and v for all of SP4: two key/value heads go to two ranks each
  received = 2 * 2 * 8  # two experts' inputs and results
  assert needed['parameters_and_optimizer_bytes'] == 20 * sizes.total_parameters(MODEL) // 4
  assert needed['gathered_weights_bytes'] == (2 * (max(own) + 3 * 4 * 8 * 5 // 2) + 256 * 8) * 4
  assert needed['whole_gradients_bytes'] == (max(own) + 3 * 4 * 8 * 5 // 2 + 256 * 8) * 4
  # A layer's input and what its exchanges moved; and all that one layer keeps while it is recomputed.
  layers = 3 * (8 + rows + 4 * 2) + 2 * received
  attention = 2 * 8 + (4 + 4) * 2 + rows + 2 * 4 * 2
  largest = attention + 8 + 2 * (8 + 3 * 5) + received + 3 * 3
  assert needed['activations_bytes'] == (layers + largest) * 10 * 4
  assert needed['exchange_buffers_bytes'] == 2 * max(rows, received) * 10 * 4
  assert needed['logits_bytes'] == 3 * 4 * 10 * 256
  kept = sizes.rank_bytes(dataclasses.replace(MODEL, remat='none'), cluster, planner)
  dense = attention + 8 + 3 * 7
  assert kept['activations_bytes'] == int(2.6 * (dense + 2 * largest)) * 10 * 4
  half = sizes.rank_bytes(dataclasses.replace(MODEL, compute_dtype='bfloat16'), cluster, planner)
  assert half['activations_bytes'] * 2 == needed['activations_bytes']
  assert half['parameters_and_optimizer_bytes'] == needed['parameters_and_optimizer_bytes']
  narrow = sizes.rank_bytes(MODEL, cluster, dataclasses.replace(planner, max_sp_degree=2))
  assert narrow['exchange_buffers_bytes'] == 2 * max((4 + 2 * 2) * 2, received) * 10 * 4
