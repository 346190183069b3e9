"""Who waits for whom at an exchange, what a meeting costs, and links that are shared, by hand."""

import dataclasses

import numpy as np
import pytest
from steps import DENSE, computed_s, cores_s, costs_of, parameters_s, plan_of

from repack_jax.config import ClusterConfig
from repack_jax.kinds import SlidingWindowAttention
from repack_jax.plan.plan import CHILDREN, PARENTS, Group, Plan
from repack_jax.plan.program import Program
from repack_jax.plan.wire import Wire
from repack_jax.predict.costs import Costs, LayerCosts
from repack_jax.predict.plan_times import plan_times, predicted_s
from repack_jax.predict.simulator import simulate

FULL = dataclasses.replace(DENSE, num_layers=1, pattern='F')
PEER_S = 1e-5


def pair_and_others(costs: Costs) -> Plan:
  """Four ranks: two that share a sample, one with a longer one of its own, one with nothing."""
  groups = [Group(0, 2, (0,)), Group(2, 1, (1,)), Group(3, 1)]
  return plan_of([8, 12], groups, groups, costs.cluster)


@pytest.mark.parametrize('meets', ['span', 'group'])
def test_who_waits_at_an_exchange(meets):
  costs = costs_of((1, 1, 4), FULL, exchange_meets=meets, peer_latency_s=PEER_S)
  plan = pair_and_others(costs)
  step = simulate(costs, [plan])
  shared_s, alone_s = cores_s(costs, 8)[PARENTS] / 2, cores_s(costs, 12)[PARENTS]
  assert alone_s > shared_s
  # 4 tokens to one peer: of 16 heads and twice 4 key/value heads half, then half of 16 back.
  dispatch_s, combine_s = (4 * heads * 2 * 4 / 4e5 for heads in (8 + 2 * 2, 8))
  passes = (1, costs.attention_backward)
  waited = step.seconds["wait: parents' exchange"]
  if meets == 'span':
    # All ranks of the node are at both sites: each pays for three peers; combine begins with the last.
    site_s = 1e-4 + 3 * PEER_S
    cores = [max(dispatch_s + factor * shared_s, factor * alone_s) for factor in passes]
    pass_s = sum(cores) + 2 * (2 * site_s + combine_s)
    assert waited[3] == pytest.approx(sum(cores))
    assert waited[2] == pytest.approx(sum(cores) - 3.5 * alone_s)
    sites = step.seconds["parents' exchange"]
    assert sites == pytest.approx(4 * site_s + 2 * np.array([dispatch_s + combine_s] * 2 + [0, 0]))
  else:
    # The pair pays for one peer, and the others do not know of it.
    sites_s = 2 * (1e-4 + PEER_S) + dispatch_s + combine_s
    pass_s = sum(max(sites_s + factor * shared_s, factor * alone_s) for factor in passes)
    assert not waited.any()
    assert step.seconds["parents' exchange"] == pytest.approx([2 * sites_s] * 2 + [0, 0])
  expected = computed_s(costs, 16, 0, {PARENTS: 0.0}) + pass_s
  assert step.step_s == pytest.approx(expected + parameters_s(costs))
  assert predicted_s(plan, costs) == pytest.approx(expected - costs.optimizer_s)


def test_a_rank_alone_waits_for_solo_samples_elsewhere_in_the_span():
  """A rank is done when its solo samples are: where the span meets, combine begins behind them."""
  group = (Group(0, 1), Group(1, 1))
  for meets, waited_s in (('span', 3.5), ('group', 0.0)):
    costs = costs_of((1, 1, 2), FULL, exchange_meets=meets)
    plan = Plan((0,), (9,), group, group, 'solve', 16, 2, 2, 2, (Group(0, 1, (0,)),)).validate()
    core_s = cores_s(costs, 9)[PARENTS]
    found = simulate(costs, [plan]).seconds["wait: parents' exchange"]
    assert found == pytest.approx([0, waited_s * core_s])


def test_a_program_wider_than_the_plan_costs_its_own():
  """Groups inside nodes, in a program whose exchanges span both, with more slots than the plan needs."""
  costs = costs_of((1, 2, 2), DENSE, peer_latency_s=PEER_S)
  groups = [Group(0, 2, (0,)), Group(2, 2, (1,))]
  plan = plan_of([16, 16], groups, groups, costs.cluster)
  own = Program.of_plan(plan)
  step, same = simulate(costs, [plan]), simulate(costs, [plan], programs=[own])
  assert same.step_s == step.step_s
  # Two layers, two passes, two sites: the latency of the farther link, and two peers more.
  wide = simulate(costs, [plan], programs=[own._replace(parents_span=4, children_span=4)])
  assert wide.step_s - step.step_s == pytest.approx(8 * (3e-4 - 1e-4 + 2 * PEER_S))
  half = simulate(costs, [plan], programs=[own._replace(parents_span=4)])
  assert half.step_s - step.step_s == pytest.approx(4 * (3e-4 - 1e-4 + 2 * PEER_S))
  slots = simulate(costs, [plan], programs=[own._replace(capacity_tokens=40)])
  assert slots.step_s - step.step_s == pytest.approx(24 * costs.slot_s)
  assert slots.seconds['padding'] - step.seconds['padding'] == pytest.approx(24 * costs.slot_s)
  # It sends no more; and a meeting of groups is the plan's own, whatever the program.
  for played in (wide, slots):
    np.testing.assert_array_equal(played.sent["parents' exchange"], step.sent["parents' exchange"])
  grouped = costs_of((1, 2, 2), DENSE, peer_latency_s=PEER_S, exchange_meets='group')
  times, wider = (
    plan_times(plan, grouped, program).layouts[PARENTS]
    for program in (own, own._replace(parents_span=4, children_span=4))
  )
  np.testing.assert_array_equal(times.dispatch_s, wider.dispatch_s)
  with pytest.raises(ValueError, match='zip'):
    simulate(costs, [plan, plan], programs=[own])


def test_a_dense_exchange_takes_and_sends_all_degrees():
  """Two nodes of two ranks, one layer in groups of two: whatever ranks hold, all slots go at each degree."""
  costs = costs_of((1, 2, 2), FULL, exchange='dense', exchange_meets='group', peer_latency_s=PEER_S)
  groups = [Group(0, 2, (0,)), Group(2, 1, (1,)), Group(3, 1)]
  plan = dataclasses.replace(plan_of([8, 1], groups, groups, costs.cluster), capacity_tokens=16)
  own = Program.of_plan(plan)
  assert own.degrees(PARENTS) == (1, 2)
  # A head of 2 float32 is 8 bytes. Of 16 heads and twice 4 key/value heads half, then half of 16 back.
  pair = {'dispatch': 16 * (8 + 2 * 2) * 8, 'combine': 16 * 8 * 8}
  all_four = {'dispatch': 16 * (4 + 2 * 1) * 8, 'combine': 16 * 4 * 8}
  for program, degrees in ((own, [2]), (own._replace(parents_span=4, parents_degrees=(1, 2, 4)), [2, 4])):
    times = plan_times(plan, costs, program).layouts[PARENTS]
    for site, seconds in (('dispatch', times.dispatch_s), ('combine', times.combine_s)):
      expected = 1e-4 + PEER_S + pair[site] / 4e5
      if 4 in degrees:  # one peer in the node, two in the other
        expected += 3e-4 + 3 * PEER_S + max(all_four[site] / 4e5, 2 * all_four[site] / 1e5)
      assert seconds == pytest.approx(np.full((1, 4), expected))
    across = 2 * sum(all_four.values()) if 4 in degrees else 0
    assert times.attention.inter == pytest.approx([across] * 4)
    near = sum(pair.values()) + (sum(all_four.values()) if 4 in degrees else 0)
    assert times.attention.intra == pytest.approx([near] * 4)
    assert costs.cross_node_bytes(plan, program) == 2 * 4 * across
    assert times.meets.max(np.arange(4.0)).tolist() == ([3] * 4 if 4 in degrees else [1, 1, 3, 3])


def two_long_layers(shape: dict[str, int], gather_s: float, share: bool) -> Costs:
  """Layers of nothing but exchanges of a second a site, a core of half a second, and parameters."""
  cluster = ClusterConfig(
    **shape, prefetch_layers=1, share_inter_node_link=share, intra_node_bytes_per_s=16,
    inter_node_bytes_per_s=16, intra_node_latency_s=0, inter_node_latency_s=0,
  )  # fmt: skip
  layer = LayerCosts(PARENTS, lambda tokens: tokens / 8, gather_s=gather_s)
  return Costs(cluster, Wire((2,), 2, 1, 4), (layer, layer), vocabulary_tables=1)


@pytest.mark.parametrize(
  ('gather_s', 'alone_s', 'shared_s'),
  [
    # Of 3 s: the second layer's gather runs beside both sites of the first, which end at 3 + 2 + 0.5 + 2 and
    # it at 6 + 2; backward, from 13.5 on, beside one site and 0.75 s of the other, until 18.5. Then one more.
    (3.0, 18.0, 21.75),
    # Of half a second: over within the dispatch, which lasts that much longer; once forward, once backward.
    (0.5, 12.5, 13.5),
  ],
)
def test_exchanges_between_nodes_share_the_link_with_parameters(gather_s, alone_s, shared_s):
  groups = [Group(0, 2, (0,))]

  def step_s(shape: dict[str, int], share: bool) -> float:
    costs = two_long_layers(shape, gather_s, share)
    return simulate(costs, [plan_of([8], groups, groups, costs.cluster)]).step_s

  between, inside = {'nodes': 2, 'ranks_per_node': 1}, {'nodes': 1, 'ranks_per_node': 2}
  assert step_s(between, share=True) == pytest.approx(shared_s)
  assert step_s(between, share=False) == pytest.approx(alone_s)
  assert step_s(inside, share=True) == step_s(inside, share=False) == pytest.approx(alone_s)


def test_a_shared_link_is_never_faster_and_follows_both():
  """Slower by no more than all that runs at once, and continuous in when it begins."""
  groups = [Group(0, 2, (0,))]
  shape = {'nodes': 2, 'ranks_per_node': 1}
  steps_s = []
  for gather_s in np.linspace(0, 4, 41):
    alone, shared = (two_long_layers(shape, gather_s, share) for share in (False, True))
    plan = plan_of([8], groups, groups, shared.cluster)
    alone_s, shared_s = (simulate(costs, [plan]).step_s for costs in (alone, shared))
    assert alone_s <= shared_s <= alone_s + 2 * min(2, gather_s) + 1e-9
    steps_s.append(shared_s)
  assert (np.diff(steps_s) >= 0).all() and (np.diff(steps_s) <= 6 * 0.1 + 1e-9).all()


WINDOWS = dataclasses.replace(DENSE, num_layers=1, pattern='S')  # of 3 tokens


def test_halo_by_hand():
  """One sample of 16 tokens and one of 6, on two nodes of two ranks: each works on its own share."""
  costs = costs_of((1, 2, 2), WINDOWS, peer_latency_s=PEER_S)
  groups = [Group(0, 4, (0, 1))]
  plan = plan_of([16, 6], groups, groups, costs.cluster).with_halo(2)
  assert plan.shared_tokens.tolist() == [5, 6, 5, 6] and Program.of_plan(plan).halo_hops == 1
  # Pairs of query and key: 3 a token but for a sample's first two. Ranks begin at places 0, 5, 11 and 0.
  pairs = np.array([1 + 2 + 3 * 3, 6 * 3, 5 * 3, 1 + 2 + 4 * 3])
  core_s = 4 * 16 * 2 * pairs / 1e6
  step = simulate(costs, [plan])
  assert step.seconds["children's attention"] == pytest.approx(3.5 * core_s)
  # Keys and values of two tokens, to the next rank: 0 and 3 have one neighbour, in their node; 1 and 2 two.
  sent_bytes = 2 * 2 * 4 * 2 * 4
  near_s, far_s = 1e-4 + PEER_S + sent_bytes / 4e5, 3e-4 + PEER_S + sent_bytes / 1e5
  both_s = 1e-4 + 3e-4 + 2 * PEER_S + max(sent_bytes / 4e5, sent_bytes / 1e5)
  assert step.seconds["children's exchange"] == pytest.approx(2 * np.array([near_s, both_s, both_s, near_s]))
  assert both_s > far_s
  # Backward, gradients are shifted once a rank and its neighbours have made theirs.
  waited = 2.5 * (np.maximum.reduce([core_s, np.roll(core_s, 1), np.roll(core_s, -1)]) - core_s)
  waited[0], waited[3] = 2.5 * (core_s[1] - core_s[0]), 2.5 * max(core_s[2] - core_s[3], 0.0)
  assert step.seconds["wait: children's exchange"] == pytest.approx(waited)
  assert step.sent["children's exchange"][0].tolist() == [2 * sent_bytes, 0, 2 * sent_bytes, 0]
  assert step.sent["children's exchange"][1].tolist() == [0, 2 * sent_bytes, 0, 0]


def test_queries_of_a_halo_by_hand():
  """A rank that begins inside a sample computes as many queries ahead of its own as the sample has."""
  plans = costs_of((1, 1, 4), WINDOWS), costs_of((1, 1, 4), WINDOWS, halo_queries=True)
  groups = [Group(0, 4, (0, 1, 2))]
  cores = []
  for costs in plans:
    plan = plan_of([7, 4, 1], groups, groups, costs.cluster).with_halo(2)
    assert plan.shared_tokens.tolist() == [3, 3, 3, 3]
    cores.append(plan_times(plan, costs).core(costs.layers[0]).group_s)
  # Ranks begin 0, 3 and 6 tokens into the first sample and 2 into the second: at most two queries each.
  more_s = cores_s(costs, 2)[CHILDREN]
  assert cores[1] - cores[0] == pytest.approx([0, more_s, more_s, more_s])


def test_a_halo_has_hops_of_its_program():
  """Ranks of two tokens and windows of eight: four hops; a rank waits for those as far away as that."""
  costs = costs_of((1, 1, 8), WINDOWS.with_kind(SlidingWindowAttention(window_tokens=8)))
  groups = [Group(0, 8, (0,))]
  plan = plan_of([16], groups, groups, costs.cluster).with_halo(7)
  own = Program.of_plan(plan)
  assert own.halo_hops == 4
  found = plan_times(plan, costs, own).halo(costs.layers[0])
  of_two = plan_times(plan, costs, own._replace(halo_hops=2)).halo(costs.layers[0])
  # Ranks in the middle send to four and get from four; of two hops each to two.
  one_s = 7 * 2 * 4 * 2 * 4 / 4e5 + 1e-4
  assert found.seconds == pytest.approx(one_s * np.array([4, 4, 4, 4, 4, 4, 4, 4]))
  assert of_two.seconds == pytest.approx(one_s * np.full(8, 2))
  assert of_two.slowest(np.arange(8.0)).tolist() == [2, 3, 4, 5, 6, 7, 7, 7]
  assert found.slowest(-np.arange(8.0)).tolist() == [0, 0, 0, 0, 0, -1, -2, -3]


def test_ranks_without_a_halo_to_get_wait_for_nobody():
  """Each rank begins a sample: no hops, no exchange."""
  costs = costs_of((1, 2, 2), WINDOWS)
  groups = [Group(rank, 1, (rank,)) for rank in range(4)]
  step = simulate(costs, [plan_of([16, 6, 3, 1], groups, groups, costs.cluster).with_halo(2)])
  assert not step.seconds["children's exchange"].any() and not step.seconds["wait: children's exchange"].any()
  assert step.seconds["children's attention"] == pytest.approx(
    [3.5 * cores_s(costs, n)[CHILDREN] for n in (16, 6, 3, 1)]
  )
