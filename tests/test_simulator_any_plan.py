"""The simulated step of any plan: what holds on every mesh, and what it says of a step's traffic."""

import dataclasses
import itertools

import numpy as np
import pytest
from steps import MESHES, MODEL, MODELS, RATES, costs_of, parameters_s, plan_of, random_plan

from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS, Group, Plan
from repack_jax.plan.program import Program
from repack_jax.predict.costs import Costs
from repack_jax.predict.plan_times import predicted_s
from repack_jax.predict.simulator import CAUSES, EXCHANGE, simulate


def by_halo(plan: Plan, costs: Costs) -> Plan:
  """The plan with windows by halo, as far as the model has any."""
  return plan.with_halo(costs.halo_tokens)


@pytest.mark.parametrize('chunks', [1, 4])
@pytest.mark.parametrize('meets', ['span', 'group'])
@pytest.mark.parametrize('mesh', ['a node', 'two nodes', 'four nodes'])
@pytest.mark.parametrize('name', MODELS)
def test_prediction_is_the_step_where_ranks_meet_at_each_layer(name, mesh, meets, chunks):
  costs = costs_of(mesh, MODELS[name], exchange_meets=meets, exchange_chunks=chunks, peer_latency_s=2e-5)
  for seed in range(6):
    by_heads = random_plan(costs.cluster, seed, solo=0.5 * (seed % 2))
    for plan in (by_heads, by_halo(by_heads, costs)):
      expected = predicted_s(plan, costs) + parameters_s(costs) + costs.optimizer_s
      assert simulate(costs, [plan]).step_s == pytest.approx(expected, rel=1e-12)


def test_domains_are_never_slower_than_predicted():
  """The prediction lets all ranks meet at each layer; domains do once a micro-batch."""
  for seed, meets in itertools.product(range(8), ('span', 'group')):
    costs = costs_of('two domains', exchange_meets=meets)
    plan = random_plan(costs.cluster, seed, solo=0.5 * (seed % 2))
    plan = by_halo(plan, costs) if seed % 3 == 1 else plan
    more = parameters_s(costs) + costs.data_reduce_s + costs.optimizer_s
    assert simulate(costs, [plan]).step_s <= (predicted_s(plan, costs) + more) * (1 + 1e-12)


@pytest.mark.parametrize('meets', ['span', 'group'])
@pytest.mark.parametrize('chunks', [1, 3])
@pytest.mark.parametrize('mesh', MESHES)
def test_alike_layers_played_at_once_are_those_played_one_by_one(mesh, chunks, meets):
  """Recording spans plays each layer by itself."""
  for seed, model in enumerate(MODELS.values()):
    of_nine = dataclasses.replace(model, num_layers=9)
    costs = costs_of(mesh, of_nine, exchange_meets=meets, exchange_chunks=chunks)
    assert len(costs.sorts) < 9
    plans = [random_plan(costs.cluster, 10 * seed + i, 0.5 * (seed % 2)) for i in range(2)]
    plans[1] = by_halo(plans[1], costs)
    once, each = (simulate(costs, plans, spans=spans) for spans in (False, True))
    assert once.step_s == pytest.approx(each.step_s, rel=1e-12)
    for cause in CAUSES:
      assert once.seconds[cause] == pytest.approx(each.seconds[cause], rel=1e-9, abs=1e-12)
    for cause, links in each.sent.items():
      for found, sent in zip(once.sent[cause], links, strict=True):
        assert found == pytest.approx(sent, rel=1e-12)


@pytest.mark.parametrize('prefetch_layers', [0, 1])
@pytest.mark.parametrize('mesh', MESHES)
def test_meetings_of_fewer_ranks_are_never_slower(mesh, prefetch_layers):
  """Where collectives of parameters don't get in the way: ranks that drift meet more of them."""
  for seed, model in enumerate(MODELS.values()):
    plans = [random_plan(costs_of(mesh).cluster, 10 * seed + i, 0.5 * (seed % 2)) for i in range(2)]
    group_s, span_s = (
      simulate(
        costs_of(
          mesh, model, prefetch_layers=prefetch_layers, exchange_meets=meets, share_inter_node_link=False
        ),
        plans,
      ).step_s
      for meets in ('group', 'span')
    )
    assert group_s <= span_s * (1 + 1e-12)


@pytest.mark.parametrize('chunks', [1, 3])
@pytest.mark.parametrize('redistribute', [False, True])
@pytest.mark.parametrize('mesh', MESHES)
def test_every_second_of_every_rank_has_a_cause(mesh, redistribute, chunks):
  for seed, (model, prefetch) in enumerate(itertools.product(MODELS.values(), (0, 1, 3))):
    costs = costs_of(mesh, model, prefetch_layers=prefetch, exchange_chunks=chunks)
    solo = 0.0 if redistribute else 0.5 * (seed % 2)
    plans = [random_plan(costs.cluster, 10 * seed + i, solo) for i in range(1 + seed % 3)]
    plans[0] = by_halo(plans[0], costs) if seed % 4 == 1 else plans[0]
    step = simulate(costs, plans, redistribute=redistribute)
    assert tuple(step.seconds) == CAUSES
    total = sum(step.seconds.values())
    assert total == pytest.approx(np.full(costs.cluster.num_ranks, step.step_s), rel=1e-12)
    assert all((seconds >= -1e-12).all() for seconds in step.seconds.values())


@pytest.mark.parametrize('mesh', MESHES)
def test_spans_cover_the_step_on_every_rank(mesh):
  for seed, model in enumerate(MODELS.values()):
    costs = costs_of(mesh, model, prefetch_layers=seed % 2)
    plans = [random_plan(costs.cluster, 10 * seed + i, 0.5) for i in range(2)]
    plans[0] = by_halo(plans[0], costs)
    step = simulate(costs, plans, spans=True)
    spans = step.spans
    assert (np.diff(spans.rank) >= 0).all()
    for rank in range(costs.cluster.num_ranks):
      start_s, end_s = (times[spans.rank == rank] for times in (spans.start_s, spans.end_s))
      assert start_s[0] == 0 and end_s[-1] == step.step_s
      assert (start_s[1:] == end_s[:-1]).all() and (start_s < end_s).all()
    for number, cause in enumerate(CAUSES):
      mine = spans.cause == number
      lasting = np.bincount(spans.rank[mine], (spans.end_s - spans.start_s)[mine], costs.cluster.num_ranks)
      assert lasting == pytest.approx(step.seconds[cause], abs=1e-12)
    assert set(spans.micro_batch) == {0, 1}
    assert set(spans.layer) == {-1, *range(model.num_layers)}
    layers = spans.layer >= 0
    layouts = np.array([layer.layout for layer in costs.layers])[spans.layer[layers]]
    names = np.array(CAUSES)[spans.cause[layers]]
    assert set(names[layouts == PARENTS]).isdisjoint({"children's attention", "children's exchange"})
    assert set(names[layouts == CHILDREN]).isdisjoint({"parents' attention", "parents' exchange"})
    assert simulate(costs, plans).spans is None


MORE_RATES = RATES | {
  'peer_latency_s': 2e-5, 'parameter_intra_node_bytes_per_s': 2e5, 'parameter_inter_node_bytes_per_s': 5e4,
}  # fmt: skip


@pytest.mark.parametrize('prefetch_layers', [0, 1])
@pytest.mark.parametrize('mesh', MESHES)
def test_better_machines_are_never_slower(mesh, prefetch_layers):
  changes = [
    {name: MORE_RATES[name] * factor}
    for name, factor in itertools.product(MORE_RATES, (0.5, 2.0))
    if name != 'peak_flops_per_s'
  ]
  for seed, model in enumerate(MODELS.values()):
    base = costs_of(mesh, model, prefetch_layers=prefetch_layers, **MORE_RATES)
    plans = [random_plan(base.cluster, 10 * seed + i, 0.5 * (seed % 2)) for i in range(2)]
    plans[1] = by_halo(plans[1], base)
    step_s = simulate(base, plans).step_s
    for change in changes:
      ((name, value),) = change.items()
      changed = costs_of(mesh, model, prefetch_layers=prefetch_layers, **(MORE_RATES | change))
      changed_s = simulate(changed, plans).step_s
      better = (value < MORE_RATES[name]) == name.endswith('latency_s')
      assert changed_s <= step_s * (1 + 1e-12) if better else changed_s >= step_s * (1 - 1e-12)


@pytest.mark.parametrize('mesh', MESHES)
def test_gathering_further_ahead_is_never_slower(mesh):
  """Where collectives have a link of their own. Where they share it, more of them may get in the way."""
  for seed, model in enumerate(MODELS.values()):
    plans = [random_plan(costs_of(mesh).cluster, 10 * seed + i, 0.5 * (seed % 2)) for i in range(2)]
    alone_s, shared_s = (
      [
        simulate(costs_of(mesh, model, prefetch_layers=ahead, share_inter_node_link=share), plans).step_s
        for ahead in (0, 1, 2, 3, 20)
      ]
      for share in (False, True)
    )
    assert all(more <= fewer * (1 + 1e-12) for fewer, more in itertools.pairwise(alone_s))
    assert alone_s[1] < alone_s[0] == shared_s[0]
    assert all(alone <= shared * (1 + 1e-12) for alone, shared in zip(alone_s, shared_s, strict=True))
    assert max(shared_s[1:]) < shared_s[0]


@pytest.mark.parametrize('prefetch_layers', [0, 1])
@pytest.mark.parametrize('mesh', MESHES)
def test_chunked_exchanges_are_never_slower(mesh, prefetch_layers):
  """Latencies apart, of which there are more."""
  for seed, model in enumerate(MODELS.values()):
    cut = [
      costs_of(
        mesh, model, prefetch_layers=prefetch_layers, exchange_chunks=chunks, share_inter_node_link=False,
        intra_node_latency_s=0, inter_node_latency_s=0,
      )
      for chunks in (1, 2, 4)
    ]  # fmt: skip
    plans = [random_plan(cut[0].cluster, 10 * seed + i, 0.5 * (seed % 2)) for i in range(2)]
    steps = [simulate(costs, plans) for costs in cut]
    assert all(more.step_s <= fewer.step_s * (1 + 1e-12) for fewer, more in itertools.pairwise(steps))
    # They hide nothing of the core, and send the same bytes.
    for step, cause in itertools.product(steps, ("parents' attention", "children's attention")):
      assert step.seconds[cause] == pytest.approx(steps[0].seconds[cause])
    for step in steps:
      np.testing.assert_array_equal(list(step.sent.values()), list(steps[0].sent.values()))


@pytest.mark.parametrize('row_tokens', [1, 4])
@pytest.mark.parametrize('mesh', MESHES)
def test_bytes_between_nodes_are_those_of_the_metrics(mesh, row_tokens):
  """What the played exchanges of attention send, both passes of all layers, padding of rows included."""
  for seed, model in enumerate(MODELS.values()):
    costs, solo = costs_of(mesh, model), 0.5 * (seed % 2)
    plans = [random_plan(costs.cluster, 10 * seed + i, solo, 0.5, row_tokens) for i in range(2)]
    step = simulate(costs, plans)
    expected = sum(costs.cross_node_bytes(plan) for plan in plans)
    inter = sum(step.sent[exchange][1].sum() for exchange in EXCHANGE.values())
    assert inter == pytest.approx(expected) and step.cross_node_bytes == pytest.approx(expected)
    # In all, a token of a group goes to each of its peers.
    for layout in LAYOUTS:
      placements = [plan.placement(layout) for plan in plans]
      sent = sum((x.slots * (x.size - 1) * model.wire.bytes_per_peer(x.size)).sum() for x in placements)
      found = sum(link.sum() for link in step.sent[EXCHANGE[layout]])
      assert found == pytest.approx(2 * costs.layers_in(layout) * int(sent))


@pytest.mark.parametrize('mesh', MESHES)
def test_a_halo_sends_what_is_compiled_in(mesh):
  """As many slots a hop to each next rank of the span, whatever is in them; heads of full layers apart."""
  costs = costs_of(mesh)
  window = min(2, 12) * 2 * MODEL.num_kv_heads * MODEL.head_dim * 4
  for seed in range(4):
    plan = by_halo(random_plan(costs.cluster, seed, 0.5), costs)
    program = Program.of_plan(plan)
    step = simulate(costs, [plan], programs=[program])
    span, rank = program.span(CHILDREN), np.arange(plan.num_ranks)
    pairs = [(r, r + hop) for r in rank for hop in range(1, program.halo_hops + 1) if r % span + hop < span]
    across = sum(a // plan.ranks_per_node != b // plan.ranks_per_node for a, b in pairs)
    intra, inter = (links.sum() for links in step.sent[EXCHANGE[CHILDREN]])
    assert (intra + inter, inter) == (6 * window * len(pairs), 6 * window * across)
    of_parents = step.sent[EXCHANGE[PARENTS]][1].sum()
    assert costs.cross_node_bytes(plan, program) == pytest.approx(of_parents + inter)
    # The program decides: one that exchanges heads runs the same layout, and sends those.
    by_heads = program._replace(halo_tokens=None, halo_hops=0)
    heads = simulate(costs, [plan], programs=[by_heads])
    assert heads.step_s == simulate(costs, [plan.with_halo(None)], programs=[by_heads]).step_s
    assert costs.cross_node_bytes(plan, by_heads) == costs.cross_node_bytes(plan.with_halo(None), by_heads)


@pytest.mark.parametrize('mesh', MESHES)
def test_redistribution_costs_nothing_where_ranks_are_even(mesh):
  """Where parents are their own children, or all ranks of a parent hold as many tokens, nothing moves."""
  costs = costs_of(mesh)
  cluster = costs.cluster
  size, ranks = cluster.domain_ranks, cluster.num_ranks
  parents = [Group(first, size, tuple(range(first, first + size))) for first in range(0, ranks, size)]
  children = [Group(rank, 1, (rank,)) for rank in range(ranks)]
  even = plan_of([5] * ranks, parents, children, cluster)
  own = random_plan(cluster, 3, wide_children=1.0)
  for plan in (even, dataclasses.replace(own, children=own.parents)):
    step, without = simulate(costs, [plan], redistribute=True), simulate(costs, [plan])
    assert step.step_s == pytest.approx(without.step_s, rel=1e-12)
    assert not step.seconds['redistribution'].any()


def test_redistribution_moves_what_changes_hands():
  """The bytes that ranks send in all: of each token whose rank is another in the parents' even layout."""
  costs = costs_of('four nodes')
  cluster = costs.cluster
  for seed in range(6):
    plan = random_plan(cluster, seed)
    moved = np.zeros(2)
    for parent in plan.parents:
      held = plan.rank_tokens[parent.first_rank : parent.end_rank]
      even = np.diff(np.arange(parent.size + 1) * int(held.sum()) // parent.size)
      was, now = (np.repeat(np.arange(parent.size), tokens) + parent.first_rank for tokens in (held, even))
      near = was // cluster.ranks_per_node == now // cluster.ranks_per_node
      moved += np.array([((was != now) & near).sum(), (~near).sum()])
    step = simulate(costs, [plan], redistribute=True)
    sent = [link.sum() for link in step.sent['redistribution']]
    assert sent == pytest.approx(2 * moved * MODEL.d_model * 4)  # FSSS: left forward, entered backward


def test_parameters_are_hidden_behind_enough_work():
  """With slow computation only those at both ends show, where there is nothing to hide them."""
  costs = costs_of('two nodes', matmul_flops_per_s=1e3, prefetch_layers=1)
  groups = [Group(0, 8, (0,))]
  step = simulate(costs, [plan_of([40], groups, groups, costs.cluster)])
  first = costs.layers[0]
  shown_s = costs.table_gather_s + first.gather_s + first.reduce_s + costs.table_reduce_s
  # Which of the last two runs while ranks wait is not told apart.
  assert step.seconds['parameters'] + step.seconds['wait: parameters'] == pytest.approx(shown_s)
