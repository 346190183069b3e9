"""The simulated step: steps worked by hand, what holds for any plan, and what it says of a step's traffic."""

import dataclasses
import itertools

import cases
import numpy as np
import pytest

from repack_jax.config import FULL, SPARSE, ClusterConfig, ModelConfig
from repack_jax.kinds import SlidingWindowAttention
from repack_jax.plan.plan import Group, Plan
from repack_jax.predict import flops
from repack_jax.predict.cost_model import CostModel, bytes_per_peer, cross_node_bytes
from repack_jax.predict.plan_times import plan_times, predicted_s
from repack_jax.predict.simulator import CAUSES, COMPUTE, TRANSFER, WAIT, simulate

MODEL = ModelConfig(
  vocab_size=256, d_model=8, num_layers=4, pattern='FSSS', num_heads=16, num_kv_heads=4, head_dim=2,
  num_experts=4, experts_per_token=2, expert_width=16, shared_expert_width=4, dense_layers=1,
  dense_width=24,
).with_kind(SlidingWindowAttention(window_tokens=3))  # fmt: skip
MODELS = {
  'experts': MODEL,
  'no remat': dataclasses.replace(MODEL, remat='none'),
  'replicated': dataclasses.replace(MODEL, expert_placement='replicated', dense_layers=0),
  'dense': dataclasses.replace(MODEL, num_experts=0, tie_embeddings=True, pattern='FS'),
  'sparse only': dataclasses.replace(MODEL, pattern='S', num_layers=3, remat='none'),
  'full only': dataclasses.replace(MODEL, pattern='F', num_layers=2, compute_dtype='bfloat16'),
}
DENSE = dataclasses.replace(MODEL, num_layers=2, pattern='FS', num_experts=0)
# Rates at which computation, both links and the latencies all matter.
RATES = {
  'matmul_flops_per_s': 2e6, 'attention_flops_per_s': 1e6, 'intra_node_bytes_per_s': 4e5,
  'inter_node_bytes_per_s': 1e5, 'intra_node_latency_s': 1e-4, 'inter_node_latency_s': 3e-4,
  'memory_bytes_per_s': 1e7, 'peak_flops_per_s': 4e6,
}  # fmt: skip
MESHES = {  # name: (domains, nodes, ranks a node)
  'a node': (1, 1, 8),
  'two nodes': (1, 2, 4),
  'four nodes': (1, 4, 4),
  'two domains': (2, 2, 2),
}


def cluster_of(mesh: str | tuple[int, int, int], **changes: float) -> ClusterConfig:
  domains, nodes, ranks_per_node = MESHES[mesh] if isinstance(mesh, str) else mesh
  return ClusterConfig(nodes=nodes, ranks_per_node=ranks_per_node, domains=domains, **(RATES | changes))


def random_plan(cluster: ClusterConfig, seed: int, solo: float = 0.0, wide_children: float = 0.2) -> Plan:
  return cases.random_plan(
    np.random.default_rng(seed), cluster.num_ranks, 12, 16, cluster.ranks_per_node, cluster.domain_ranks,
    solo=solo, wide_children=wide_children,
  )  # fmt: skip


def plan_of(
  lengths: list[int], parents: list[Group], children: list[Group], cluster: ClusterConfig, capacity: int = 16
) -> Plan:
  return Plan(
    tuple(range(len(lengths))), tuple(lengths), tuple(parents), tuple(children), 'repack', capacity,
    cluster.num_ranks, cluster.domain_ranks, cluster.ranks_per_node,
  ).validate()  # fmt: skip


def computed_s(cost: CostModel, slots: int, tokens: int, attention_s: dict[str, float]) -> float:
  """A rank's computation in a step, with these forward seconds of its attention in a layer of each kind."""
  seconds = 3 * slots * cost.logits_s() + cost.optimizer_s()
  for layer, kind in enumerate(cost.model.layer_kinds):
    own = slots * (cost.before_s() + cost.after_s(layer)) + tokens * cost.routed_s(layer)
    seconds += (1 + cost.linear_backward) * own + 3.5 * attention_s[kind]
  return seconds


def parameters_s(cost: CostModel) -> float:
  """A micro-batch's parameter collectives one after the other: gathered twice, for each pass, and reduced."""
  gather_table_s, reduce_table_s = cost.table_s()
  layers = sum(2 * cost.gather_s(layer) + cost.reduce_s(layer) for layer in range(cost.model.num_layers))
  return layers + (gather_table_s + reduce_table_s) * (1 if cost.model.tie_embeddings else 2)


# --- by hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', MODELS)
def test_one_rank_computes_and_nothing_else(name):
  cost = CostModel(cluster_of((1, 1, 1)), MODELS[name])
  groups = [Group(0, 1, (0, 1))]
  step = simulate(cost, [plan_of([7, 4], groups, groups, cost.cluster)])
  attention_s = {kind: float(cost.attention_s(np.array([7, 4]), kind).sum()) for kind in (FULL, SPARSE)}
  assert step.step_s == pytest.approx(computed_s(cost, 16, 11, attention_s))
  assert step.mean_s(COMPUTE) == pytest.approx(step.step_s)
  assert step.mean_s(TRANSFER) == step.mean_s(WAIT) == 0
  # Five of the 16 slots are empty in everything that runs on slots.
  layers = (1 + cost.linear_backward) * sum(
    cost.before_s() + cost.after_s(i) for i in range(cost.model.num_layers)
  )
  assert step.seconds['padding'] == pytest.approx(5 * (layers + 3 * cost.logits_s()))
  assert step.seconds['logits'] == pytest.approx(11 * 3 * cost.logits_s())
  assert step.seconds['projections'] == pytest.approx(11 * layers)
  # Two micro-batches take twice as long, but for the one update.
  twice = simulate(cost, [plan_of([7, 4], groups, groups, cost.cluster)] * 2)
  assert twice.step_s == pytest.approx(2 * step.step_s - cost.optimizer_s())


def test_one_sample_on_a_node():
  """All ranks alike: a step is computation, exchanges and parameters, and nobody waits."""
  cost = CostModel(cluster_of('a node', prefetch_layers=0), MODEL)
  groups = [Group(0, 8, (0,))]
  step = simulate(cost, [plan_of([40], groups, groups, cost.cluster)])
  attention_s = {kind: float(cost.attention_s(40, kind)) / 8 for kind in (FULL, SPARSE)}
  # A token's bytes to each of 7 peers: 2 query and 2 times 1 key/value heads, then 2 heads back.
  dispatch_s, combine_s = (1e-4 + 5 * 7 * heads * 2 * 4 / 4e5 for heads in (4, 2))
  assert dispatch_s + combine_s == pytest.approx(5 * cost.exchange_s(8) + cost.exchange_latency_s(8))
  experts_s = 1e-4 + 5 * 2 * 8 * 4 * 7 / 8 / 4e5
  exchanges_s = 2 * 4 * (dispatch_s + combine_s) + 4 * 3 * experts_s  # the first layer has no experts
  computed = computed_s(cost, 16, 5, attention_s)
  assert step.step_s == pytest.approx(computed + exchanges_s + parameters_s(cost))
  assert step.seconds['full exchange'] == pytest.approx(2 * (dispatch_s + combine_s))
  assert step.seconds['sparse exchange'] == pytest.approx(6 * (dispatch_s + combine_s))
  assert step.seconds['expert exchange'] == pytest.approx(12 * experts_s)
  assert step.seconds['full attention'] == pytest.approx(3.5 * attention_s[FULL])
  assert step.seconds['sparse attention'] == pytest.approx(3 * 3.5 * attention_s[SPARSE])
  assert step.seconds['parameters'] == pytest.approx(parameters_s(cost))
  assert step.mean_s(WAIT) == pytest.approx(0)
  # Bytes: each rank sends what the seconds say, latencies aside.
  intra, inter = step.sent['sparse exchange']
  assert intra == pytest.approx(6 * 5 * 7 * 6 * 2 * 4) and not inter.any()
  assert step.sent['expert exchange'][0] == pytest.approx(12 * 5 * 2 * 8 * 4 * 7 / 8)


@pytest.mark.parametrize(
  ('inter_bytes_per_s', 'slower_s'), [(1e5, 4 * 4 / 1e5), (1e7, 4 * 3 / 4e5)], ids=['inter', 'intra']
)
def test_one_sample_on_two_nodes(inter_bytes_per_s, slower_s):
  """The slower of both links decides: 4 peers in the other node, 3 in the own, 4 tokens a rank."""
  cost = CostModel(
    cluster_of('two nodes', inter_node_bytes_per_s=inter_bytes_per_s, prefetch_layers=0), DENSE
  )
  groups = [Group(0, 8, (0,))]
  step = simulate(cost, [plan_of([32], groups, groups, cost.cluster)])
  dispatch_s, combine_s = (3e-4 + heads * 2 * 4 * slower_s for heads in (4, 2))
  attention_s = {kind: float(cost.attention_s(32, kind)) / 8 for kind in (FULL, SPARSE)}
  exchanges_s = 2 * 2 * (dispatch_s + combine_s)
  computed = computed_s(cost, 16, 4, attention_s)
  assert step.step_s == pytest.approx(computed + exchanges_s + parameters_s(cost))
  assert step.seconds['full exchange'] == pytest.approx(exchanges_s / 2)
  for kind in ('full', 'sparse'):
    intra, inter = step.sent[f'{kind} exchange']
    assert intra == pytest.approx(2 * 4 * 3 * 6 * 2 * 4) and inter == pytest.approx(2 * 4 * 4 * 6 * 2 * 4)
  assert step.cross_node_bytes == pytest.approx(2 * 2 * 32 * 4 * 6 * 2 * 4)


def test_exchange_of_unequal_ranks_takes_what_the_fullest_sends():
  """SP4 over two nodes of two ranks, with 6, 2, 1 and 0 of its 9 tokens on them."""
  cost = CostModel(cluster_of((1, 2, 2)), DENSE)
  children = [Group(0, 1, (0,)), Group(1, 1, (1,)), Group(2, 1, (2,)), Group(3, 1)]
  plan = plan_of([6, 2, 1], [Group(0, 4, (0, 1, 2))], children, cost.cluster)
  times = plan_times(plan, cost)
  full, sparse = times.kinds[FULL], times.kinds[SPARSE]
  row_bytes = 6 * 2 * 4, 4 * 2 * 4  # of 16 heads and 4 key/value heads, 4 + 2 * 1 to a peer and 4 back
  # Rank 0 sends its 6 to one rank of its node and to two of the other's.
  for found, row in zip((full.dispatch_s, full.combine_s), row_bytes, strict=True):
    assert found.tolist() == pytest.approx([3e-4 + max(6 * row / 4e5, 12 * row / 1e5)] * 4)
  assert full.attention.intra.tolist() == [tokens * sum(row_bytes) for tokens in (6, 2, 1, 0)]
  assert full.attention.inter.tolist() == [2 * tokens * sum(row_bytes) for tokens in (6, 2, 1, 0)]
  assert full.core_s == pytest.approx(float(cost.attention_s(np.array([6, 2, 1]), FULL).sum()) / 4)
  assert not sparse.dispatch_s.any() and not sparse.combine_s.any() and not sparse.attention.intra.any()
  assert sparse.core_s.tolist() == pytest.approx([*cost.attention_s(np.array([6, 2, 1]), SPARSE), 0])


def test_chunked_exchanges_by_hand():
  """Cut into chunks, the shorter of core and exchanges shows with its first chunk only."""
  cost = CostModel(cluster_of('a node', prefetch_layers=0), DENSE)
  groups = [Group(0, 8, (0,))]
  plan = plan_of([40], groups, groups, cost.cluster)
  exchanges_s = 5 * cost.exchange_s(8) + cost.exchange_latency_s(8)
  cores_s = [factor * float(cost.attention_s(40, kind)) / 8 for kind in (FULL, SPARSE) for factor in (1, 2.5)]
  assert min(cores_s) < exchanges_s < max(cores_s)
  hidden_s = sum(min(core_s, exchanges_s) for core_s in cores_s)
  step_s = simulate(cost, [plan]).step_s
  for chunks in (2, 100):  # a rank has two query heads
    chunked_s = simulate(cost, [plan], exchange_chunks=chunks).step_s
    assert chunked_s == pytest.approx(step_s - hidden_s / 2)


def test_idle_rank_waits():
  """Both ranks run on all slots, but only one has attention: the other waits for just that."""
  cost = CostModel(cluster_of((1, 1, 2), prefetch_layers=0), DENSE)
  groups = [Group(0, 1, (0,)), Group(1, 1)]
  step = simulate(cost, [plan_of([9], groups, groups, cost.cluster)])
  attention_s = {kind: float(cost.attention_s(9, kind)) for kind in (FULL, SPARSE)}
  assert step.step_s == pytest.approx(computed_s(cost, 16, 9, attention_s) + parameters_s(cost))
  waited = sum(step.seconds[cause] for cause in WAIT)
  assert waited == pytest.approx([0, 3.5 * (attention_s[FULL] + attention_s[SPARSE])])
  assert step.seconds['padding'][1] > 0 and step.seconds['projections'][1] == 0


@pytest.mark.parametrize('placement', ['spread', 'replicated'])
def test_experts_meet_in_their_node_where_they_are_spread(placement):
  """One layer: spread experts share the work of both ranks; replicated ones leave it where the tokens are."""
  model = dataclasses.replace(
    MODEL, num_layers=1, pattern='S', dense_layers=0, expert_placement=placement
  ).with_kind(SlidingWindowAttention(window_tokens=100))
  cost = CostModel(cluster_of((1, 1, 2), prefetch_layers=0), model)
  groups = [Group(0, 1, (0,)), Group(1, 1, (1,))]
  step = simulate(cost, [plan_of([10, 2], groups, groups, cost.cluster)])
  attention_s = cost.attention_s(np.array([10, 2]), SPARSE)
  routed = [6, 6] if placement == 'spread' else [10, 2]
  assert step.seconds['experts'] == pytest.approx(4 * cost.routed_s(0) * np.array(routed))
  expected = computed_s(cost, 16, routed[0], {SPARSE: attention_s[0]})
  if placement == 'spread':
    # A rank with 10 tokens sends 10; 6 come in.
    expected += 4 * (1e-4 + 10 * cost.expert_bytes_per_token() / 4e5)
    assert step.seconds['wait: experts'] == pytest.approx([0, attention_s[0] - attention_s[1]])
    assert step.sent['expert exchange'][0] == pytest.approx(
      2 * cost.expert_bytes_per_token() * np.array([10 + 6, 2 + 6])
    )
  assert step.step_s == pytest.approx(expected + parameters_s(cost))


def test_solo_samples_by_hand():
  """8 tokens over two ranks and 3 of a solo sample on one: these are in no exchange but the experts'."""
  model = dataclasses.replace(MODEL, num_layers=1, pattern='F', dense_layers=0)
  cost = CostModel(cluster_of((1, 1, 2), prefetch_layers=0), model)
  group = (Group(0, 2, (0,)),)
  plan = Plan((0, 1), (8, 3), group, group, 'solve', 16, 2, 2, 2, (Group(0, 1, (1,)),)).validate()
  step, without = simulate(cost, [plan]), simulate(cost, [dataclasses.replace(plan, lengths=(8, 1))])
  shared_s, solo_s = float(cost.attention_s(8, FULL)) / 2, float(cost.attention_s(3, FULL))
  exchange_s = 2 * (4 * cost.exchange_s(2) + cost.exchange_latency_s(2))
  experts_s = 4 * (1e-4 + 7 * cost.expert_bytes_per_token() / 4e5)
  assert step.seconds['full exchange'] == pytest.approx(exchange_s)
  assert step.seconds['full attention'] == pytest.approx([3.5 * (shared_s + solo_s), 3.5 * shared_s])
  assert step.seconds['expert exchange'] == pytest.approx(experts_s)
  assert step.seconds['experts'] == pytest.approx(4 * 11 / 2 * cost.routed_s(0))
  assert step.seconds['logits'] == pytest.approx(3 * cost.logits_s() * np.array([7, 4]))
  assert step.seconds['wait: experts'] == pytest.approx([0, solo_s])
  computed = computed_s(cost, 16, 0, {FULL: shared_s + solo_s}) + 4 * 11 / 2 * cost.routed_s(0)
  assert step.step_s == pytest.approx(computed + exchange_s + experts_s + parameters_s(cost))
  np.testing.assert_array_equal(step.sent['full exchange'], without.sent['full exchange'])
  sent = 2 * cost.expert_bytes_per_token() * (np.array([7, 4]) + 11 / 2)
  assert step.sent['expert exchange'][0] == pytest.approx(sent)


def two_ranks(**changes: float) -> CostModel:
  """Two ranks with links so fast that only computation and waiting take time."""
  links = {'intra_node_bytes_per_s': 1e30, 'intra_node_latency_s': 0}
  return CostModel(cluster_of((1, 1, 2), **(links | changes)), DENSE)


def test_unequal_children_meet_where_their_parent_exchanges():
  """Layers F and S, samples of 10 and 8 tokens: the shorter's rank gets to the next full layer early."""
  cost = two_ranks(prefetch_layers=1)
  plan = plan_of([10, 8], [Group(0, 2, (0, 1))], [Group(0, 1, (0,)), Group(1, 1, (1,))], cost.cluster)
  step = simulate(cost, [plan])
  full_s = float(cost.attention_s(np.array([10, 8]), FULL).sum()) / 2
  longer_s, shorter_s = cost.attention_s(np.array([10, 8]), SPARSE)
  early_s = 3.5 * (longer_s - shorter_s)
  assert early_s < 16 * 3 * cost.logits_s()  # or it would have to wait for parameters
  assert step.seconds['wait: full exchange'] == pytest.approx([0, early_s])
  assert step.mean_s(WAIT) == pytest.approx(early_s / 2)
  assert step.step_s == pytest.approx(computed_s(cost, 16, 10, {FULL: full_s, SPARSE: longer_s}))


def test_prefetched_layers_let_ranks_drift():
  """A sample of 8 tokens is slow in full layers, eight of 2 in sparse ones: both count where ranks meet."""
  lengths = [8] + [2] * 8
  groups = [Group(0, 1, (0,)), Group(1, 1, tuple(range(1, 9)))]

  def attention_s(cost: CostModel, rank: int, kind: str) -> float:
    return float(cost.attention_s(np.array(lengths)[list(groups[rank].samples)], kind).sum())

  for prefetch_layers, slowest in ((0, (0, 1)), (1, (0, 0))):  # in full and sparse layers
    cost = two_ranks(prefetch_layers=prefetch_layers)
    step = simulate(cost, [plan_of(lengths, groups, groups, cost.cluster)])
    expected = {kind: attention_s(cost, rank, kind) for kind, rank in zip('FS', slowest, strict=True)}
    assert step.step_s == pytest.approx(computed_s(cost, 16, 16, expected))
  assert attention_s(cost, 0, FULL) > attention_s(cost, 1, FULL)
  assert attention_s(cost, 0, SPARSE) < attention_s(cost, 1, SPARSE)


def test_domains_meet_once_a_micro_batch():
  """Slow in domain 0, then in domain 1: gradients are summed after each, so that both take their time."""
  cost = CostModel(cluster_of((2, 1, 1)), DENSE)

  def micro_batch(first: int, second: int) -> Plan:
    groups = [Group(0, 1, (0,)), Group(1, 1, (1,))]
    return plan_of([first, second], groups, groups, cost.cluster)

  def rank_s(tokens: int) -> float:
    attention_s = {kind: float(cost.attention_s(tokens, kind)) for kind in (FULL, SPARSE)}
    return computed_s(cost, 16, tokens, attention_s) - cost.optimizer_s()

  crossed = simulate(cost, [micro_batch(15, 2), micro_batch(2, 15)])
  together = simulate(cost, [micro_batch(15, 15), micro_batch(2, 2)])
  more = 2 * cost.data_reduce_s() + cost.optimizer_s()
  assert crossed.step_s == pytest.approx(2 * rank_s(15) + more)
  assert together.step_s == pytest.approx(rank_s(15) + rank_s(2) + more)
  assert crossed.seconds['wait: parameters'] == pytest.approx([rank_s(15) - rank_s(2)] * 2)
  assert crossed.seconds['parameters'] == pytest.approx([2 * cost.data_reduce_s()] * 2)


def test_redistribution_by_hand():
  """Ranks of 6 and 2 tokens hold 4 each in the full layer: 2 tokens go over, and back, in each pass once."""
  cost = CostModel(cluster_of((1, 1, 2), prefetch_layers=0), DENSE)
  plan = plan_of([6, 2], [Group(0, 2, (0, 1))], [Group(0, 1, (0,)), Group(1, 1, (1,))], cost.cluster)
  step, without = simulate(cost, [plan], redistribute=True), simulate(cost, [plan])
  # The model starts with its full layer, so that one is left forward and entered backward.
  row = 8 * 4
  assert step.seconds['redistribution'] == pytest.approx(2 * (1e-4 + 2 * row / 4e5))
  assert step.sent['redistribution'][0].tolist() == [2 * row] * 2 and not step.sent['redistribution'][1].any()
  exchange_s = sum(1e-4 + 4 * heads * 2 * 4 / 4e5 for heads in (8 + 2 * 2, 8))
  assert step.seconds['full exchange'] == pytest.approx(2 * exchange_s)
  assert step.sent['full exchange'][0].tolist() == [2 * 4 * (12 + 8) * 2 * 4] * 2
  assert without.seconds['redistribution'].sum() == without.sent['redistribution'][0].sum() == 0
  saved_s = without.seconds['full exchange'][0] - step.seconds['full exchange'][0]
  assert saved_s == pytest.approx(
    2 * 2 * (12 + 8) * 2 * 4 / 4e5
  )  # the fullest rank has 4 tokens instead of 6
  assert step.step_s - without.step_s == pytest.approx(step.seconds['redistribution'][0] - saved_s)


def test_redistribution_enters_and_leaves_full_layers_inside_the_model():
  """S F S F: the first full layer is entered and left, the last one entered; backward the other way round."""
  model = dataclasses.replace(DENSE, num_layers=4, pattern='SF')
  cost = CostModel(cluster_of((1, 2, 1), prefetch_layers=0), model)
  plan = plan_of([6, 2], [Group(0, 2, (0, 1))], [Group(0, 1, (0,)), Group(1, 1, (1,))], cost.cluster)
  step = simulate(cost, [plan], redistribute=True)
  assert step.seconds['redistribution'] == pytest.approx(6 * (3e-4 + 2 * 32 / 1e5))
  assert step.sent['redistribution'][1].tolist() == [3 * 2 * 32] * 2
  attention = cross_node_bytes(plan, model)
  assert step.cross_node_bytes == pytest.approx(attention + 6 * 2 * 32)


def test_mfu_by_hand():
  cost = CostModel(cluster_of('a node'), MODEL)
  plans = [random_plan(cost.cluster, seed) for seed in (0, 1)]
  step = simulate(cost, plans)
  lengths = np.array([*plans[0].lengths, *plans[1].lengths])
  assert step.model_flops == 3 * int(flops.sample_flops(MODEL, lengths).sum())
  assert step.mfu == pytest.approx(step.model_flops / (step.step_s * 8 * 4e6))
  unknown = CostModel(cluster_of('a node', peak_flops_per_s=0), MODEL)
  assert simulate(unknown, plans).mfu == 0
  # One rank, full slots, no recomputation and nothing else to do: only the backward attention's second look.
  alone = CostModel(
    cluster_of((1, 1, 1), attention_flops_per_s=2e6, peak_flops_per_s=2e6, memory_bytes_per_s=1e30),
    MODELS['sparse only'],
  )
  groups = [Group(0, 1, (0,))]
  whole = simulate(alone, [plan_of([16], groups, groups, alone.cluster)])
  attention = 3 * float(flops.attention_flops(alone.model, 16, SPARSE))
  assert whole.mfu == pytest.approx(whole.model_flops / (whole.model_flops + 0.5 * attention))


def test_empty_step():
  """No micro-batch: the update alone."""
  cost = CostModel(cluster_of('a node'), MODEL)
  assert simulate(cost, []).step_s == pytest.approx(cost.optimizer_s())


# --- any plan -------------------------------------------------------------------------------------------


@pytest.mark.parametrize('mesh', ['a node', 'two nodes', 'four nodes'])
@pytest.mark.parametrize('name', MODELS)
def test_prediction_is_the_step_where_ranks_meet_at_each_layer(name, mesh):
  cost = CostModel(cluster_of(mesh, prefetch_layers=0), MODELS[name])
  for seed in range(6):
    plan = random_plan(cost.cluster, seed, solo=0.5 * (seed % 2))
    expected = predicted_s(plan, cost) + parameters_s(cost) + cost.optimizer_s()
    assert simulate(cost, [plan]).step_s == pytest.approx(expected, rel=1e-12)


def test_domains_are_never_slower_than_predicted():
  """The prediction lets all ranks meet at each layer; domains do once a micro-batch."""
  cost = CostModel(cluster_of('two domains', prefetch_layers=0), MODEL)
  for seed in range(8):
    plan = random_plan(cost.cluster, seed, solo=0.5 * (seed % 2))
    more = parameters_s(cost) + cost.data_reduce_s() + cost.optimizer_s()
    assert simulate(cost, [plan]).step_s <= (predicted_s(plan, cost) + more) * (1 + 1e-12)


FLAGS = [
  {'redistribute': redistribute, 'exchange_chunks': chunks}
  for redistribute, chunks in itertools.product((False, True), (1, 3))
]


@pytest.mark.parametrize('flags', FLAGS, ids=str)
@pytest.mark.parametrize('mesh', MESHES)
def test_every_second_of_every_rank_has_a_cause(mesh, flags):
  for seed, (model, prefetch) in enumerate(itertools.product(MODELS.values(), (0, 1, 3))):
    cost = CostModel(cluster_of(mesh, prefetch_layers=prefetch), model)
    solo = 0.0 if flags['redistribute'] else 0.5 * (seed % 2)
    plans = [random_plan(cost.cluster, 10 * seed + i, solo) for i in range(1 + seed % 3)]
    step = simulate(cost, plans, **flags)
    assert tuple(step.seconds) == CAUSES
    total = sum(step.seconds.values())
    assert total == pytest.approx(np.full(cost.cluster.num_ranks, step.step_s), rel=1e-12)
    assert all((seconds >= -1e-12).all() for seconds in step.seconds.values())


@pytest.mark.parametrize('mesh', MESHES)
def test_spans_cover_the_step_on_every_rank(mesh):
  for seed, model in enumerate(MODELS.values()):
    cost = CostModel(cluster_of(mesh, prefetch_layers=seed % 2), model)
    plans = [random_plan(cost.cluster, 10 * seed + i, 0.5) for i in range(2)]
    step = simulate(cost, plans, spans=True)
    spans = step.spans
    assert (np.diff(spans.rank) >= 0).all()
    for rank in range(cost.cluster.num_ranks):
      start_s, end_s = (times[spans.rank == rank] for times in (spans.start_s, spans.end_s))
      assert start_s[0] == 0 and end_s[-1] == step.step_s
      assert (start_s[1:] == end_s[:-1]).all() and (start_s < end_s).all()
    for number, cause in enumerate(CAUSES):
      mine = spans.cause == number
      lasting = np.bincount(spans.rank[mine], (spans.end_s - spans.start_s)[mine], cost.cluster.num_ranks)
      assert lasting == pytest.approx(step.seconds[cause], abs=1e-12)
    assert set(spans.micro_batch) == {0, 1}
    assert set(spans.layer) == {-1, *range(model.num_layers)}
    layers = spans.layer >= 0
    kinds = np.array(list(model.layer_kinds))[spans.layer[layers]]
    names = np.array(CAUSES)[spans.cause[layers]]
    assert set(names[kinds == FULL]).isdisjoint({'sparse attention', 'sparse exchange'})
    assert set(names[kinds == SPARSE]).isdisjoint({'full attention', 'full exchange'})
    assert simulate(cost, plans).spans is None


@pytest.mark.parametrize('prefetch_layers', [0, 1])
@pytest.mark.parametrize('mesh', MESHES)
def test_better_machines_are_never_slower(mesh, prefetch_layers):
  changes = [
    {name: RATES[name] * factor}
    for name, factor in itertools.product(RATES, (0.5, 2.0))
    if name != 'peak_flops_per_s'
  ]
  for seed, model in enumerate(MODELS.values()):
    base = cluster_of(mesh, prefetch_layers=prefetch_layers)
    plans = [random_plan(base, 10 * seed + i, 0.5 * (seed % 2)) for i in range(2)]
    step_s = simulate(CostModel(base, model), plans).step_s
    for change in changes:
      ((name, value),) = change.items()
      changed_s = simulate(CostModel(dataclasses.replace(base, **change), model), plans).step_s
      better = (value < RATES[name]) == name.endswith('latency_s')
      assert changed_s <= step_s * (1 + 1e-12) if better else changed_s >= step_s * (1 - 1e-12)


@pytest.mark.parametrize('mesh', MESHES)
def test_gathering_further_ahead_is_never_slower(mesh):
  for seed, model in enumerate(MODELS.values()):
    plans = [random_plan(cluster_of(mesh), 10 * seed + i, 0.5 * (seed % 2)) for i in range(2)]
    steps_s = [
      simulate(CostModel(cluster_of(mesh, prefetch_layers=ahead), model), plans).step_s
      for ahead in (0, 1, 2, 3, 20)
    ]
    assert all(more <= fewer * (1 + 1e-12) for fewer, more in itertools.pairwise(steps_s))
    assert steps_s[1] < steps_s[0]


@pytest.mark.parametrize('prefetch_layers', [0, 1])
@pytest.mark.parametrize('mesh', MESHES)
def test_chunked_exchanges_are_never_slower(mesh, prefetch_layers):
  for seed, model in enumerate(MODELS.values()):
    cost = CostModel(cluster_of(mesh, prefetch_layers=prefetch_layers), model)
    plans = [random_plan(cost.cluster, 10 * seed + i, 0.5 * (seed % 2)) for i in range(2)]
    steps = [simulate(cost, plans, exchange_chunks=chunks) for chunks in (1, 2, 4, 100)]
    assert all(more.step_s <= fewer.step_s * (1 + 1e-12) for fewer, more in itertools.pairwise(steps))
    # They hide nothing of the core, and send the same bytes.
    for step, cause in itertools.product(steps, ('full attention', 'sparse attention')):
      assert step.seconds[cause] == pytest.approx(steps[0].seconds[cause])
    for step in steps:
      np.testing.assert_array_equal(list(step.sent.values()), list(steps[0].sent.values()))


@pytest.mark.parametrize('mesh', MESHES)
def test_bytes_between_nodes_are_those_of_the_metrics(mesh):
  """What the played exchanges of attention send, forward and backward in all layers."""
  cluster = cluster_of(mesh)
  for seed, model in enumerate(MODELS.values()):
    plans = [random_plan(cluster, 10 * seed + i, 0.5 * (seed % 2), wide_children=0.5) for i in range(2)]
    step = simulate(CostModel(cluster, model), plans)
    expected = sum(cross_node_bytes(plan, model) for plan in plans)
    inter = sum(step.sent[f'{kind} exchange'][1].sum() for kind in ('full', 'sparse'))
    assert inter == pytest.approx(expected) and step.cross_node_bytes == pytest.approx(expected)
    # In all, a token of a group goes to each of its peers.
    for kind, name in ((FULL, 'full exchange'), (SPARSE, 'sparse exchange')):
      layouts = [plan.layout(kind) for plan in plans]
      sent = sum((x.slots * (x.size - 1) * bytes_per_peer(model, x.size)).sum() for x in layouts)
      found = sum(link.sum() for link in step.sent[name])
      assert found == pytest.approx(2 * model.layer_kinds.count(kind) * int(sent))


@pytest.mark.parametrize('mesh', MESHES)
def test_redistribution_costs_nothing_where_ranks_are_even(mesh):
  """Where parents are their own children, or all ranks of a parent hold as many tokens, nothing moves."""
  cluster = cluster_of(mesh)
  cost = CostModel(cluster, MODEL)
  size, ranks = cluster.domain_ranks, cluster.num_ranks
  parents = [Group(first, size, tuple(range(first, first + size))) for first in range(0, ranks, size)]
  children = [Group(rank, 1, (rank,)) for rank in range(ranks)]
  even = plan_of([5] * ranks, parents, children, cluster)
  own = random_plan(cluster, 3, wide_children=1.0)
  for plan in (even, dataclasses.replace(own, children=own.parents)):
    step, without = simulate(cost, [plan], redistribute=True), simulate(cost, [plan])
    assert step.step_s == without.step_s and not step.seconds['redistribution'].any()


def test_redistribution_moves_what_changes_hands():
  """The bytes that ranks send in all: of each token whose rank is another in the parents' even layout."""
  cluster = cluster_of('four nodes')
  cost = CostModel(cluster, MODEL)
  for seed in range(6):
    plan = random_plan(cluster, seed)
    moved = np.zeros(2)
    for parent in plan.parents:
      held = plan.rank_tokens[parent.first_rank : parent.end_rank]
      even = np.diff(np.arange(parent.size + 1) * int(held.sum()) // parent.size)
      was, now = (np.repeat(np.arange(parent.size), tokens) + parent.first_rank for tokens in (held, even))
      near = was // cluster.ranks_per_node == now // cluster.ranks_per_node
      moved += np.array([((was != now) & near).sum(), (~near).sum()])
    step = simulate(cost, [plan], redistribute=True)
    sent = [link.sum() for link in step.sent['redistribution']]
    assert sent == pytest.approx(2 * moved * MODEL.d_model * 4)  # FSSS: left forward, entered backward


def test_parameters_are_hidden_behind_enough_work():
  """With slow computation only those at both ends show, where there is nothing to hide them."""
  cost = CostModel(cluster_of('two nodes', matmul_flops_per_s=1e3), MODEL)
  groups = [Group(0, 8, (0,))]
  step = simulate(cost, [plan_of([40], groups, groups, cost.cluster)])
  gather_table_s, reduce_table_s = cost.table_s()
  shown_s = gather_table_s + cost.gather_s(0) + cost.reduce_s(0) + reduce_table_s
  # Which of the last two runs while ranks wait is not told apart.
  assert step.seconds['parameters'] + step.seconds['wait: parameters'] == pytest.approx(shown_s)
