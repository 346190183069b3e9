"""Lower bounds: no plan in any mode is faster, played or predicted; and values worked by hand."""

import dataclasses

import numpy as np
import pytest
from cases import random_lengths

from repack_jax.config import MODES, ClusterConfig, ModelConfig, PlannerConfig
from repack_jax.kinds import SlidingWindowAttention
from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.costs import Costs
from repack_jax.predict.plan_times import predicted_s
from repack_jax.predict.simulator import simulate
from repack_jax.solver import solve
from repack_jax.solver.bounds import compute_bound_s, lower_bound_s

MODEL = ModelConfig(
  vocab_size=256, d_model=16, num_layers=4, pattern='FSSS', num_heads=16, num_kv_heads=4, head_dim=4,
  num_experts=8, experts_per_token=2, expert_width=16, dense_layers=1, dense_width=24,
).with_kind(SlidingWindowAttention(window_tokens=16))  # fmt: skip
MODELS = {
  'experts': MODEL,
  'replicated': dataclasses.replace(MODEL, expert_placement='replicated', remat='none'),
  'dense': dataclasses.replace(MODEL, num_experts=0, pattern='SF').with_kind(
    SlidingWindowAttention(window_tokens=60)
  ),
  'windows only': dataclasses.replace(MODEL, pattern='S', remat='layer_and_experts'),
}
# The bounds leave out latencies, so there are none here.
RATES = {
  'matmul_flops_per_s': 2e9, 'attention_flops_per_s': 2e8, 'intra_node_bytes_per_s': 4e7,
  'inter_node_bytes_per_s': 8e6, 'intra_node_latency_s': 0, 'inter_node_latency_s': 0,
}  # fmt: skip
MESHES = {'one rank': (1, 1, 1), 'a node': (1, 1, 8), 'two nodes': (1, 2, 4), 'two domains': (2, 2, 2)}


def cluster_of(mesh: str | tuple[int, int, int], **changes: object) -> ClusterConfig:
  domains, nodes, ranks_per_node = MESHES[mesh] if isinstance(mesh, str) else mesh
  return ClusterConfig(nodes=nodes, ranks_per_node=ranks_per_node, domains=domains, **(RATES | changes))


def costs_of(mesh: str | tuple[int, int, int], model: ModelConfig = MODEL, **changes: object) -> Costs:
  return model_costs(cluster_of(mesh, **changes), model)


def bounded(costs: Costs) -> Costs:
  """What the bounds leave out takes no time, so that it hides no mistake: parameters and the update."""
  layers = tuple(dataclasses.replace(layer, gather_s=0.0, reduce_s=0.0) for layer in costs.layers)
  return dataclasses.replace(
    costs, layers=layers, table_gather_s=0.0, table_reduce_s=0.0, data_reduce_s=0.0, optimizer_s=0.0
  )


def played_s(lengths: list[int], costs: Costs, config: PlannerConfig) -> float:
  """The step of the planner's plans, but for what the bounds leave out."""
  return simulate(bounded(costs), solve(lengths, costs, config).plans).step_s


def own_s(costs: Costs) -> float:
  """A token in all passes where it lies: the logits, and layers with a forward pass more for remat."""
  layers_s = sum(layer.before_s + layer.after_s for layer in costs.layers)
  return costs.logits_s + 4 * layers_s


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('mesh', MESHES)
def test_no_plan_is_faster(mesh, name):
  model = MODELS[name]
  rng = np.random.default_rng(len(mesh) + len(name))
  for number in range(3):
    meets, exchange = ('span', 'group')[number % 2], ('ragged', 'dense')[number // 2]
    meeting, drifting = (
      costs_of(mesh, model, prefetch_layers=ahead, exchange_meets=meets, exchange=exchange)
      for ahead in (0, 1)
    )
    capacity = int(rng.choice([8, 64, 200]))
    lengths = random_lengths(rng, min(16, meeting.cluster.domain_ranks) * capacity, most=20)
    for mode in MODES:
      config = PlannerConfig(
        mode=mode, capacity_tokens=capacity, capacity_step_tokens=number % 2,
        sparse_exchange=('ulysses', 'halo', 'auto')[number],
      )  # fmt: skip
      for costs in (meeting, drifting):
        plans = solve(lengths, costs, config).plans
        bound_s = lower_bound_s(lengths, costs, config)
        assert bound_s * (1 - 1e-9) <= sum(predicted_s(plan, costs) for plan in plans)
        assert bound_s * (1 - 1e-9) <= simulate(bounded(costs), plans).step_s
      bounds_s = [lower_bound_s(lengths, costs, config) for costs in (meeting, drifting)]
      assert compute_bound_s(lengths, meeting) * (1 - 1e-9) <= bounds_s[1]
      assert bounds_s[0] * (1 + 1e-9) >= bounds_s[1]


def test_computation_by_hand():
  """All work over all ranks: linear work four times as there is remat, attention 3.5 times, all logits."""
  lengths = [5, 30]
  costs = costs_of('two domains')
  attention_s = sum(float(layer.attention_s(np.array(lengths)).sum()) for layer in costs.layers)
  forward_s = sum(layer.before_s + layer.after_s + layer.routed_s for layer in costs.layers)
  expected = (35 * (4 * forward_s + costs.logits_s) + 3.5 * attention_s) / 8
  assert compute_bound_s(lengths, costs) == pytest.approx(expected)
  without = costs_of('two domains', dataclasses.replace(MODEL, remat='none'))
  assert compute_bound_s(lengths, without) == pytest.approx(expected - 35 * forward_s / 8)
  assert lower_bound_s([], costs, PlannerConfig()) == 0
  assert compute_bound_s([], costs) == 0


@pytest.mark.parametrize('name', MODELS)
def test_one_rank_reaches_the_bound(name):
  """There is nothing to balance and nobody to wait for."""
  costs = costs_of('one rank', MODELS[name])
  config = PlannerConfig(capacity_tokens=64, capacity_step_tokens=1)
  bound_s = lower_bound_s([20, 7, 3], costs, config)
  assert bound_s == pytest.approx(compute_bound_s([20, 7, 3], costs))
  assert bound_s == pytest.approx(played_s([20, 7, 3], costs, config))


def test_samples_that_fit_a_rank_need_no_exchange():
  """And those that do not need that of the narrowest group that holds them, or a cheaper one."""
  model = dataclasses.replace(MODELS['dense'], pattern='F')
  costs, config = costs_of('two nodes', model), PlannerConfig(capacity_tokens=16)
  computed_s = compute_bound_s([16] * 8, costs)
  assert lower_bound_s([16] * 8, costs, config) == pytest.approx(computed_s)
  computed_s = compute_bound_s([128], costs)
  exchanged_s = 4 * 2 * 128 / 8 * costs.exchange_s(8)  # only SP8 holds it
  assert lower_bound_s([128], costs, config) == pytest.approx(computed_s + exchanged_s)
  narrowest = min(costs.exchange_s(degree) for degree in (2, 4, 8))
  lower = lower_bound_s([32] * 8, costs, config)
  assert lower == pytest.approx(compute_bound_s([32] * 8, costs) + 4 * 2 * 32 * narrowest)
  assert lower_bound_s([32] * 8, costs, dataclasses.replace(config, max_sp_degree=2)) >= lower


def test_slowest_sample_by_hand():
  """Links so slow that a long sample stays on one rank: no layer is faster than its attention there."""
  model = dataclasses.replace(MODEL, num_layers=2, pattern='FS', num_experts=0)
  config = PlannerConfig(capacity_tokens=100)
  slow = {'intra_node_bytes_per_s': 1, 'inter_node_bytes_per_s': 1}
  lengths = [100] + [2] * 6
  for ahead in (0, 1):  # where ranks meet at each layer, and where they drift
    costs = costs_of('a node', model, prefetch_layers=ahead, **slow)
    longest_s = 3.5 * sum(float(layer.attention_s(np.array([100]))[0]) for layer in costs.layers)
    expected = sum(lengths) / 8 * own_s(costs) + longest_s
    assert lower_bound_s(lengths, costs, config) == pytest.approx(expected)
    assert played_s(lengths, costs, config) >= expected


def test_where_ranks_drift_layers_balance_each_other():
  """One layer is bound by the longest sample, the other by all work: they add up only where ranks meet."""
  model = dataclasses.replace(MODEL, num_layers=2, pattern='FS', num_experts=0)
  model = model.with_kind(SlidingWindowAttention(window_tokens=4))
  config = PlannerConfig(capacity_tokens=80, max_sp_degree=1)
  lengths = [80] + [4] * 40
  meeting, drifting = (costs_of((1, 1, 2), model, prefetch_layers=ahead) for ahead in (0, 1))
  work_s = {layout: 3.5 * meeting.attention_s(np.array(lengths), layout) for layout in LAYOUTS}
  mean_s = {layout: float(work_s[layout].sum()) / 2 for layout in LAYOUTS}
  longest_s = {layout: float(work_s[layout].max()) for layout in LAYOUTS}
  assert longest_s[PARENTS] > mean_s[PARENTS] and longest_s[CHILDREN] < mean_s[CHILDREN]
  linear_s = 120 * own_s(meeting)
  meeting_s, drifting_s = (lower_bound_s(lengths, costs, config) for costs in (meeting, drifting))
  assert meeting_s == pytest.approx(linear_s + longest_s[PARENTS] + mean_s[CHILDREN])
  assert drifting_s == pytest.approx(linear_s + max(sum(longest_s.values()), sum(mean_s.values())))
  assert drifting_s < meeting_s


def test_domains_drift_even_where_their_ranks_meet():
  """The bound layer by layer holds within a domain only."""
  model = dataclasses.replace(MODEL, num_layers=2, pattern='FS', num_experts=0)
  model = model.with_kind(SlidingWindowAttention(window_tokens=4))
  config = PlannerConfig(capacity_tokens=160, capacity_step_tokens=1, max_sp_degree=1)
  lengths = [80] + [4] * 40
  apart, together = (costs_of(mesh, model) for mesh in ((2, 1, 1), (1, 1, 2)))
  bound_s = lower_bound_s(lengths, apart, config)
  assert bound_s <= played_s(lengths, apart, config)
  assert bound_s < lower_bound_s(lengths, together, config)
