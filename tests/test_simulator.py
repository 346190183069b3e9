"""The simulated step, worked by hand."""

import dataclasses

import numpy as np
import pytest
from steps import DENSE, MODEL, MODELS, computed_s, cores_s, costs_of, parameters_s, plan_of, random_plan

from repack_jax.kinds import SlidingWindowAttention
from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS, Group, Plan
from repack_jax.predict import flops
from repack_jax.predict.costs import Costs
from repack_jax.predict.plan_times import plan_times
from repack_jax.predict.simulator import COMPUTE, TRANSFER, WAIT, simulate


@pytest.mark.parametrize('name', MODELS)
def test_one_rank_computes_and_nothing_else(name):
  costs = costs_of((1, 1, 1), MODELS[name])
  groups = [Group(0, 1, (0, 1))]
  step = simulate(costs, [plan_of([7, 4], groups, groups, costs.cluster)])
  assert step.step_s == pytest.approx(computed_s(costs, 16, 11, cores_s(costs, 7, 4)))
  assert step.mean_s(COMPUTE) == pytest.approx(step.step_s)
  assert step.mean_s(TRANSFER) == step.mean_s(WAIT) == 0
  # Five of the 16 slots are empty in everything that runs on slots.
  layers = (1 + costs.linear_backward) * sum(layer.before_s + layer.after_s for layer in costs.layers)
  assert step.seconds['padding'] == pytest.approx(5 * (layers + costs.logits_s))
  assert step.seconds['logits'] == pytest.approx(11 * costs.logits_s)
  assert step.seconds['projections'] == pytest.approx(11 * layers)
  # Two micro-batches take twice as long, but for the one update.
  twice = simulate(costs, [plan_of([7, 4], groups, groups, costs.cluster)] * 2)
  assert twice.step_s == pytest.approx(2 * step.step_s - costs.optimizer_s)


def test_one_sample_on_a_node():
  """All ranks alike: a step is computation, exchanges and parameters, and nobody waits."""
  costs = costs_of('a node')
  groups = [Group(0, 8, (0,))]
  step = simulate(costs, [plan_of([40], groups, groups, costs.cluster)])
  attention_s = {layout: seconds / 8 for layout, seconds in cores_s(costs, 40).items()}
  # A token's bytes to each of 7 peers: 2 query and 2 times 1 key/value heads, then 2 heads back.
  dispatch_s, combine_s = (1e-4 + 5 * 7 * heads * 2 * 4 / 4e5 for heads in (4, 2))
  assert dispatch_s + combine_s == pytest.approx(5 * costs.exchange_s(8) + 2 * costs.site_latency_s(8))
  experts_s = 1e-4 + 5 * 2 * 8 * 4 * 7 / 8 / 4e5
  exchanges_s = 2 * 4 * (dispatch_s + combine_s) + 4 * 3 * experts_s  # the first layer has no experts
  computed = computed_s(costs, 16, 5, attention_s)
  assert step.step_s == pytest.approx(computed + exchanges_s + parameters_s(costs))
  assert step.seconds["parents' exchange"] == pytest.approx(2 * (dispatch_s + combine_s))
  assert step.seconds["children's exchange"] == pytest.approx(6 * (dispatch_s + combine_s))
  assert step.seconds['expert exchange'] == pytest.approx(12 * experts_s)
  assert step.seconds["parents' attention"] == pytest.approx(3.5 * attention_s[PARENTS])
  assert step.seconds["children's attention"] == pytest.approx(3 * 3.5 * attention_s[CHILDREN])
  assert step.seconds['parameters'] == pytest.approx(parameters_s(costs))
  assert step.mean_s(WAIT) == pytest.approx(0)
  # Bytes: each rank sends what the seconds say, latencies aside.
  intra, inter = step.sent["children's exchange"]
  assert intra == pytest.approx(6 * 5 * 7 * 6 * 2 * 4) and not inter.any()
  assert step.sent['expert exchange'][0] == pytest.approx(12 * 5 * 2 * 8 * 4 * 7 / 8)


def test_exchanges_of_experts_that_are_repeated():
  """Two more in the backward pass of each layer with experts, and nothing else."""
  kept = costs_of('a node')
  repeated = costs_of('a node', dataclasses.replace(MODEL, remat='layer_and_experts'))
  groups = [Group(0, 8, (0,))]
  plan = plan_of([40], groups, groups, kept.cluster)
  few, more = simulate(kept, [plan]), simulate(repeated, [plan])
  once_s = 3 * 2 * (1e-4 + 5 * 2 * 8 * 4 * 7 / 8 / 4e5)  # the first layer has no experts
  assert few.seconds['expert exchange'] == pytest.approx(2 * once_s)
  assert more.seconds['expert exchange'] == pytest.approx(3 * once_s)
  assert more.step_s == pytest.approx(few.step_s + once_s)
  assert more.sent['expert exchange'][0] == pytest.approx(1.5 * few.sent['expert exchange'][0])


@pytest.mark.parametrize(
  ('inter_bytes_per_s', 'slower_s'), [(1e5, 4 * 4 / 1e5), (1e7, 4 * 3 / 4e5)], ids=['inter', 'intra']
)
def test_one_sample_on_two_nodes(inter_bytes_per_s, slower_s):
  """The slower of both links decides: 4 peers in the other node, 3 in the own, 4 tokens a rank."""
  costs = costs_of('two nodes', DENSE, inter_node_bytes_per_s=inter_bytes_per_s)
  groups = [Group(0, 8, (0,))]
  step = simulate(costs, [plan_of([32], groups, groups, costs.cluster)])
  dispatch_s, combine_s = (3e-4 + heads * 2 * 4 * slower_s for heads in (4, 2))
  attention_s = {layout: seconds / 8 for layout, seconds in cores_s(costs, 32).items()}
  exchanges_s = 2 * 2 * (dispatch_s + combine_s)
  computed = computed_s(costs, 16, 4, attention_s)
  assert step.step_s == pytest.approx(computed + exchanges_s + parameters_s(costs))
  assert step.seconds["parents' exchange"] == pytest.approx(exchanges_s / 2)
  for exchange in ("parents' exchange", "children's exchange"):
    intra, inter = step.sent[exchange]
    assert intra == pytest.approx(2 * 4 * 3 * 6 * 2 * 4) and inter == pytest.approx(2 * 4 * 4 * 6 * 2 * 4)
  assert step.cross_node_bytes == pytest.approx(2 * 2 * 32 * 4 * 6 * 2 * 4)


def test_exchange_of_unequal_ranks_takes_what_the_fullest_sends():
  """SP4 over two nodes of two ranks, with 6, 2, 1 and 0 of its 9 tokens on them."""
  costs = costs_of((1, 2, 2), DENSE, exchange_meets='group')
  children = [Group(0, 1, (0,)), Group(1, 1, (1,)), Group(2, 1, (2,)), Group(3, 1)]
  plan = plan_of([6, 2, 1], [Group(0, 4, (0, 1, 2))], children, costs.cluster)
  times = plan_times(plan, costs)
  parents, own = times.layouts[PARENTS], times.layouts[CHILDREN]
  parents_core, own_core = (times.core(layer) for layer in costs.layers)
  row_bytes = 6 * 2 * 4, 4 * 2 * 4  # of 16 heads and 4 key/value heads, 4 + 2 * 1 to a peer and 4 back
  # Rank 0 sends its 6 to one rank of its node and to two of the other's.
  for found, row in zip((parents.dispatch_s, parents.combine_s), row_bytes, strict=True):
    assert found == pytest.approx(np.full((1, 4), 3e-4 + max(6 * row / 4e5, 12 * row / 1e5)))
  assert parents.attention.intra.tolist() == [tokens * sum(row_bytes) for tokens in (6, 2, 1, 0)]
  assert parents.attention.inter.tolist() == [2 * tokens * sum(row_bytes) for tokens in (6, 2, 1, 0)]
  assert parents_core.group_s == pytest.approx(cores_s(costs, 6, 2, 1)[PARENTS] / 4)
  assert not own.dispatch_s.any() and not own.combine_s.any() and not own.attention.intra.any()
  assert own_core.group_s.tolist() == pytest.approx([*costs.attention_s(np.array([6, 2, 1]), CHILDREN), 0])
  assert not parents_core.solo_s.any() and not own_core.solo_s.any()


@pytest.mark.parametrize('chunks', [2, 100])
def test_chunked_exchanges_by_hand(chunks):
  """A rank has two query heads, so two chunks; the keys and values of both travel with the first."""
  whole, costs = (
    costs_of('a node', DENSE, exchange_chunks=count, intra_node_bytes_per_s=2e5) for count in (1, chunks)
  )
  groups = [Group(0, 8, (0,))]
  plan = plan_of([40], groups, groups, costs.cluster)
  latency_s, head_s = 1e-4, 5 * 7 * 2 * 4 / 2e5  # a head of 2 float32 of 5 tokens to 7 peers
  passes_s = [factor * core_s / 8 for core_s in cores_s(costs, 40).values() for factor in (1, 2.5)]
  beside_s = latency_s + head_s  # beside the first core the second dispatch, then the first combine
  assert min(passes_s) / 2 < beside_s < max(passes_s) / 2
  change_s = sum(
    (2 * latency_s + 4 * head_s) + 2 * max(core_s / 2, beside_s)  # first dispatch and last combine
    - (2 * latency_s + 6 * head_s) - core_s
    for core_s in passes_s
  )  # fmt: skip
  found_s = simulate(costs, [plan]).step_s
  assert found_s == pytest.approx(simulate(whole, [plan]).step_s + change_s)
  assert costs.exchange_s(8) == pytest.approx(4 * head_s / 5)
  # Lone ranks have as many chunks, so that nobody waits for whole cores of theirs.
  groups = [Group(0, 4, (0,)), *(Group(rank, 1, (rank - 3,)) for rank in range(4, 8))]
  plan = plan_of([20, 1, 1, 1, 1], groups, groups, costs.cluster)
  times, count = plan_times(plan, costs).layouts[PARENTS], min(chunks, 4)
  assert times.core_share.tolist() == [[1 / count] * 8] * count and times.solo_share.sum() == 1
  assert (times.dispatch_s >= latency_s).all()


def test_idle_rank_waits():
  """Both ranks run on all slots, but only one has attention: the other waits for just that."""
  costs = costs_of((1, 1, 2), DENSE, exchange_meets='group')
  groups = [Group(0, 1, (0,)), Group(1, 1)]
  step = simulate(costs, [plan_of([9], groups, groups, costs.cluster)])
  attention_s = cores_s(costs, 9)
  assert step.step_s == pytest.approx(computed_s(costs, 16, 9, attention_s) + parameters_s(costs))
  waited = sum(step.seconds[cause] for cause in WAIT)
  assert waited == pytest.approx([0, 3.5 * (attention_s[PARENTS] + attention_s[CHILDREN])])
  assert step.seconds['padding'][1] > 0 and step.seconds['projections'][1] == 0


@pytest.mark.parametrize('placement', ['spread', 'replicated'])
def test_experts_meet_in_their_node_where_they_are_spread(placement):
  """One layer: spread experts share the work of both ranks; replicated ones leave it where the tokens are."""
  model = dataclasses.replace(
    MODEL, num_layers=1, pattern='S', dense_layers=0, expert_placement=placement
  ).with_kind(SlidingWindowAttention(window_tokens=100))
  costs = costs_of((1, 1, 2), model, exchange_meets='group')
  groups = [Group(0, 1, (0,)), Group(1, 1, (1,))]
  step = simulate(costs, [plan_of([10, 2], groups, groups, costs.cluster)])
  attention_s = costs.attention_s(np.array([10, 2]), CHILDREN)
  routed = [6, 6] if placement == 'spread' else [10, 2]
  assert step.seconds['experts'] == pytest.approx(4 * costs.layers[0].routed_s * np.array(routed))
  expected = computed_s(costs, 16, routed[0], {CHILDREN: attention_s[0]})
  if placement == 'spread':
    # A rank with 10 tokens sends 10; 6 come in.
    expected += 4 * (1e-4 + 10 * costs.expert_bytes_per_token / 4e5)
    assert step.seconds['wait: experts'] == pytest.approx([0, attention_s[0] - attention_s[1]])
    assert step.sent['expert exchange'][0] == pytest.approx(
      2 * costs.expert_bytes_per_token * np.array([10 + 6, 2 + 6])
    )
  assert step.step_s == pytest.approx(expected + parameters_s(costs))


def test_solo_samples_by_hand():
  """8 tokens over two ranks and 3 of a solo sample on one: these are in no exchange but the experts'."""
  model = dataclasses.replace(MODEL, num_layers=1, pattern='F', dense_layers=0)
  costs = costs_of((1, 1, 2), model, exchange_meets='group')
  group = (Group(0, 2, (0,)),)
  plan = Plan((0, 1), (8, 3), group, group, 'solve', 16, 2, 2, 2, (Group(0, 1, (1,)),)).validate()
  step, without = simulate(costs, [plan]), simulate(costs, [dataclasses.replace(plan, lengths=(8, 1))])
  shared_s, solo_s = cores_s(costs, 8)[PARENTS] / 2, cores_s(costs, 3)[PARENTS]
  exchange_s = 2 * (4 * costs.exchange_s(2) + 2 * costs.site_latency_s(2))
  experts_s = 4 * (1e-4 + 7 * costs.expert_bytes_per_token / 4e5)
  assert step.seconds["parents' exchange"] == pytest.approx(exchange_s)
  assert step.seconds["parents' attention"] == pytest.approx([3.5 * (shared_s + solo_s), 3.5 * shared_s])
  assert step.seconds['expert exchange'] == pytest.approx(experts_s)
  assert step.seconds['experts'] == pytest.approx(4 * 11 / 2 * costs.layers[0].routed_s)
  assert step.seconds['logits'] == pytest.approx(costs.logits_s * np.array([7, 4]))
  assert step.seconds['wait: experts'] == pytest.approx([0, solo_s])
  computed = computed_s(costs, 16, 0, {PARENTS: shared_s + solo_s}) + 4 * 11 / 2 * costs.layers[0].routed_s
  assert step.step_s == pytest.approx(computed + exchange_s + experts_s + parameters_s(costs))
  np.testing.assert_array_equal(step.sent["parents' exchange"], without.sent["parents' exchange"])
  sent = 2 * costs.expert_bytes_per_token * (np.array([7, 4]) + 11 / 2)
  assert step.sent['expert exchange'][0] == pytest.approx(sent)


def two_ranks(**changes: object) -> Costs:
  """Two ranks with links so fast that only computation and waiting, for those of a group, take time."""
  links = {'intra_node_bytes_per_s': 1e30, 'intra_node_latency_s': 0, 'exchange_meets': 'group'}
  return costs_of((1, 1, 2), DENSE, **(links | changes))


def test_unequal_children_meet_where_their_parent_exchanges():
  """Layers F and S, samples of 10 and 8 tokens: the shorter's rank gets to the next full layer early."""
  costs = two_ranks(prefetch_layers=1)
  plan = plan_of([10, 8], [Group(0, 2, (0, 1))], [Group(0, 1, (0,)), Group(1, 1, (1,))], costs.cluster)
  step = simulate(costs, [plan])
  shared_s = cores_s(costs, 10, 8)[PARENTS] / 2
  longer_s, shorter_s = costs.attention_s(np.array([10, 8]), CHILDREN)
  early_s = 3.5 * (longer_s - shorter_s)
  assert early_s < 16 * costs.logits_s  # or it would have to wait for parameters
  assert step.seconds["wait: parents' exchange"] == pytest.approx([0, early_s])
  assert step.mean_s(WAIT) == pytest.approx(early_s / 2)
  assert step.step_s == pytest.approx(computed_s(costs, 16, 10, {PARENTS: shared_s, CHILDREN: longer_s}))


def test_prefetched_layers_let_ranks_drift():
  """A sample of 8 tokens is slow in full layers, eight of 2 in sparse ones: both count where ranks meet."""
  lengths = [8] + [2] * 8
  groups = [Group(0, 1, (0,)), Group(1, 1, tuple(range(1, 9)))]

  def attention_s(costs: Costs, rank: int) -> dict[str, float]:
    return cores_s(costs, *(lengths[s] for s in groups[rank].samples))

  for prefetch_layers, slowest in ((0, (0, 1)), (1, (0, 0))):  # in the parents' layers and the children's
    costs = two_ranks(prefetch_layers=prefetch_layers)
    step = simulate(costs, [plan_of(lengths, groups, groups, costs.cluster)])
    expected = {
      layout: attention_s(costs, rank)[layout] for layout, rank in zip(LAYOUTS, slowest, strict=True)
    }
    assert step.step_s == pytest.approx(computed_s(costs, 16, 16, expected))
  long_s, short_s = (attention_s(costs, rank) for rank in (0, 1))
  assert long_s[PARENTS] > short_s[PARENTS] and long_s[CHILDREN] < short_s[CHILDREN]


def test_domains_meet_once_a_micro_batch():
  """Slow in domain 0, then in domain 1: gradients are summed after each, so that both take their time."""
  costs = costs_of((2, 1, 1), DENSE)

  def micro_batch(first: int, second: int) -> Plan:
    groups = [Group(0, 1, (0,)), Group(1, 1, (1,))]
    return plan_of([first, second], groups, groups, costs.cluster)

  def rank_s(tokens: int) -> float:
    return computed_s(costs, 16, tokens, cores_s(costs, tokens)) - costs.optimizer_s

  crossed = simulate(costs, [micro_batch(15, 2), micro_batch(2, 15)])
  together = simulate(costs, [micro_batch(15, 15), micro_batch(2, 2)])
  more = 2 * costs.data_reduce_s + costs.optimizer_s
  assert crossed.step_s == pytest.approx(2 * rank_s(15) + more)
  assert together.step_s == pytest.approx(rank_s(15) + rank_s(2) + more)
  assert crossed.seconds['wait: parameters'] == pytest.approx([rank_s(15) - rank_s(2)] * 2)
  assert crossed.seconds['parameters'] == pytest.approx([2 * costs.data_reduce_s] * 2)


def test_redistribution_by_hand():
  """Ranks of 6 and 2 tokens hold 4 each in the full layer: 2 tokens go over, and back, in each pass once."""
  costs = costs_of((1, 1, 2), DENSE)
  plan = plan_of([6, 2], [Group(0, 2, (0, 1))], [Group(0, 1, (0,)), Group(1, 1, (1,))], costs.cluster)
  step, without = simulate(costs, [plan], redistribute=True), simulate(costs, [plan])
  # The model starts with its full layer, so that one is left forward and entered backward.
  row = 8 * 4
  assert step.seconds['redistribution'] == pytest.approx(2 * (1e-4 + 2 * row / 4e5))
  assert step.sent['redistribution'][0].tolist() == [2 * row] * 2 and not step.sent['redistribution'][1].any()
  exchange_s = sum(1e-4 + 4 * heads * 2 * 4 / 4e5 for heads in (8 + 2 * 2, 8))
  assert step.seconds["parents' exchange"] == pytest.approx(2 * exchange_s)
  assert step.sent["parents' exchange"][0].tolist() == [2 * 4 * (12 + 8) * 2 * 4] * 2
  assert without.seconds['redistribution'].sum() == without.sent['redistribution'][0].sum() == 0
  saved_s = without.seconds["parents' exchange"][0] - step.seconds["parents' exchange"][0]
  assert saved_s == pytest.approx(
    2 * 2 * (12 + 8) * 2 * 4 / 4e5
  )  # the fullest rank has 4 tokens instead of 6
  assert step.step_s - without.step_s == pytest.approx(step.seconds['redistribution'][0] - saved_s)


def test_redistribution_enters_and_leaves_full_layers_inside_the_model():
  """S F S F: the first full layer is entered and left, the last one entered; backward the other way round."""
  model = dataclasses.replace(DENSE, num_layers=4, pattern='SF')
  costs = costs_of((1, 2, 1), model)
  plan = plan_of([6, 2], [Group(0, 2, (0, 1))], [Group(0, 1, (0,)), Group(1, 1, (1,))], costs.cluster)
  step = simulate(costs, [plan], redistribute=True)
  assert step.seconds['redistribution'] == pytest.approx(6 * (3e-4 + 2 * 32 / 1e5))
  assert step.sent['redistribution'][1].tolist() == [3 * 2 * 32] * 2
  attention = costs.cross_node_bytes(plan)
  assert step.cross_node_bytes == pytest.approx(attention + 6 * 2 * 32)


def test_mfu_by_hand():
  costs = costs_of('a node')
  plans = [random_plan(costs.cluster, seed) for seed in (0, 1)]
  step = simulate(costs, plans)
  lengths = np.array([*plans[0].lengths, *plans[1].lengths])
  assert step.model_flops == 3 * int(flops.sample_flops(MODEL, lengths).sum())
  assert step.mfu == pytest.approx(step.model_flops / (step.step_s * 8 * 4e6))
  assert simulate(costs_of('a node', peak_flops_per_s=0), plans).mfu == 0
  unknown = simulate(dataclasses.replace(costs, flops=None), plans)
  assert unknown.mfu == unknown.model_flops == 0 and unknown.step_s == step.step_s


def test_mfu_of_a_rank_that_only_computes():
  """Full slots and no recomputation, but of scores and logits in the backward pass."""
  model = MODELS['windows only']
  costs = costs_of((1, 1, 1), model, attention_flops_per_s=2e6, peak_flops_per_s=2e6, memory_bytes_per_s=1e30)
  groups = [Group(0, 1, (0,))]
  whole = simulate(costs, [plan_of([16], groups, groups, costs.cluster)])
  attention = 3 * float(model.kind('S').flops(model.wire, 16))
  logits = 16 * 2 * 8 * 256
  assert whole.mfu == pytest.approx(whole.model_flops / (whole.model_flops + 0.5 * attention + logits))


def test_empty_step():
  """No micro-batch: the update alone."""
  costs = costs_of('a node')
  assert simulate(costs, []).step_s == pytest.approx(costs.optimizer_s)
