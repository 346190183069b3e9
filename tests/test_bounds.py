"""Lower bounds: no plan in any mode is faster, played or predicted; and values worked by hand."""

import dataclasses

import numpy as np
import pytest

from repack_jax.config import FULL, MODES, SPARSE, ClusterConfig, ModelConfig, PlannerConfig
from repack_jax.kinds import SlidingWindowAttention
from repack_jax.plan.plan import Plan
from repack_jax.predict.cost_model import CostModel
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
  'sparse only': dataclasses.replace(MODEL, pattern='S'),
}
# The bounds leave out latencies, so there are none here.
RATES = {
  'matmul_flops_per_s': 2e9, 'attention_flops_per_s': 2e8, 'intra_node_bytes_per_s': 4e7,
  'inter_node_bytes_per_s': 8e6, 'intra_node_latency_s': 0, 'inter_node_latency_s': 0,
}  # fmt: skip
MESHES = {'one rank': (1, 1, 1), 'a node': (1, 1, 8), 'two nodes': (1, 2, 4), 'two domains': (2, 2, 2)}


def cluster_of(mesh: str | tuple[int, int, int], **changes: float) -> ClusterConfig:
  domains, nodes, ranks_per_node = MESHES[mesh] if isinstance(mesh, str) else mesh
  return ClusterConfig(nodes=nodes, ranks_per_node=ranks_per_node, domains=domains, **(RATES | changes))


def random_lengths(rng: np.random.Generator, longest: int) -> list[int]:
  count = int(rng.integers(1, 20))
  sort = rng.integers(4)
  if sort == 0:
    return np.clip(rng.lognormal(np.log(longest) / 2, 1, count).astype(int), 1, longest).tolist()
  if sort == 1:
    return rng.integers(1, longest + 1, count).tolist()
  if sort == 2:
    return [int(rng.integers(1, longest + 1))] * count
  return [longest] + [int(rng.integers(1, 9))] * count


class Bounded(CostModel):
  """What the bounds leave out takes no time, so that it hides no mistake: parameters and the update."""

  def _collective_s(self, whole: float, spread: float) -> float:
    return 0.0

  def data_reduce_s(self) -> float:
    return 0.0

  def optimizer_s(self) -> float:
    return 0.0


def played_s(plans: list[Plan], cluster: ClusterConfig, model: ModelConfig) -> float:
  return simulate(Bounded(cluster, model), plans).step_s


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('mesh', MESHES)
def test_no_plan_is_faster(mesh, name):
  model = MODELS[name]
  rng = np.random.default_rng(len(mesh) + len(name))
  for number in range(8):
    clusters = {ahead: cluster_of(mesh, prefetch_layers=ahead) for ahead in (0, 1)}
    capacity = int(rng.choice([8, 64, 200]))
    lengths = random_lengths(rng, min(16, clusters[0].domain_ranks) * capacity)
    for mode in MODES:
      config = PlannerConfig(mode=mode, capacity_tokens=capacity, capacity_step_tokens=number % 2)
      for cluster in clusters.values():
        plans = solve(lengths, cluster, model, config)
        bound_s = lower_bound_s(lengths, cluster, model, config)
        assert bound_s * (1 - 1e-9) <= sum(predicted_s(plan, CostModel(cluster, model)) for plan in plans)
        assert bound_s * (1 - 1e-9) <= played_s(plans, cluster, model)
      bounds_s = [lower_bound_s(lengths, cluster, model, config) for cluster in clusters.values()]
      assert compute_bound_s(lengths, clusters[0], model) * (1 - 1e-9) <= bounds_s[1]
      assert bounds_s[0] * (1 + 1e-9) >= bounds_s[1]


def test_computation_by_hand():
  """All work over all ranks: linear work four times as there is remat, attention 3.5 and logits 3 times."""
  lengths = [5, 30]
  cluster = cluster_of('two domains')
  cost = CostModel(cluster, MODEL)
  attention_s = sum(float(cost.attention_s(np.array(lengths), kind).sum()) for kind in 'FSSS')
  a_token_s = 4 * sum(cost.before_s() + cost.after_s(i) + cost.routed_s(i) for i in range(4))
  expected = (35 * (a_token_s + 3 * cost.logits_s()) + 3.5 * attention_s) / 8
  assert compute_bound_s(lengths, cluster, MODEL) == pytest.approx(expected)
  without = dataclasses.replace(MODEL, remat='none')
  saved = 35 * sum(cost.before_s() + cost.after_s(i) + cost.routed_s(i) for i in range(4)) / 8
  assert compute_bound_s(lengths, cluster, without) == pytest.approx(expected - saved)
  assert lower_bound_s([], cluster, MODEL, PlannerConfig()) == 0
  assert compute_bound_s([], cluster, MODEL) == 0


@pytest.mark.parametrize('name', MODELS)
def test_one_rank_reaches_the_bound(name):
  """There is nothing to balance and nobody to wait for."""
  cluster = cluster_of('one rank')
  config = PlannerConfig(capacity_tokens=64, capacity_step_tokens=1)
  plans = solve([20, 7, 3], cluster, MODELS[name], config)
  bound_s = lower_bound_s([20, 7, 3], cluster, MODELS[name], config)
  assert bound_s == pytest.approx(compute_bound_s([20, 7, 3], cluster, MODELS[name]))
  assert bound_s == pytest.approx(played_s(plans, cluster, MODELS[name]))


def test_samples_that_fit_a_rank_need_no_exchange():
  """And those that do not need that of the narrowest group that holds them, or a cheaper one."""
  model = dataclasses.replace(MODELS['dense'], pattern='F')
  cluster = cluster_of('two nodes', prefetch_layers=0)
  cost, config = CostModel(cluster, model), PlannerConfig(capacity_tokens=16)
  computed_s = compute_bound_s([16] * 8, cluster, model)
  assert lower_bound_s([16] * 8, cluster, model, config) == pytest.approx(computed_s)
  computed_s = compute_bound_s([128], cluster, model)
  exchanged_s = 4 * 2 * 128 / 8 * cost.exchange_s(8)  # only SP8 holds it
  assert lower_bound_s([128], cluster, model, config) == pytest.approx(computed_s + exchanged_s)
  narrowest = min(cost.exchange_s(degree) for degree in (2, 4, 8))
  lower = lower_bound_s([32] * 8, cluster, model, config)
  assert lower == pytest.approx(compute_bound_s([32] * 8, cluster, model) + 4 * 2 * 32 * narrowest)
  assert lower_bound_s([32] * 8, cluster, model, dataclasses.replace(config, max_sp_degree=2)) >= lower


def test_slowest_sample_by_hand():
  """Links so slow that a long sample stays on one rank: no layer is faster than its attention there."""
  model = dataclasses.replace(MODEL, num_layers=2, pattern='FS', num_experts=0)
  config = PlannerConfig(capacity_tokens=100)
  slow = {'intra_node_bytes_per_s': 1, 'inter_node_bytes_per_s': 1}
  lengths = [100] + [2] * 6
  meeting, drifting = (cluster_of('a node', prefetch_layers=ahead, **slow) for ahead in (0, 1))
  cost = CostModel(meeting, model)
  own_s = (
    sum(lengths) / 8 * (3 * cost.logits_s() + 4 * sum(cost.before_s() + cost.after_s(i) for i in (0, 1)))
  )
  longest_s = 3.5 * sum(float(cost.attention_s(100, kind)) for kind in (FULL, SPARSE))
  for cluster in (meeting, drifting):
    assert lower_bound_s(lengths, cluster, model, config) == pytest.approx(own_s + longest_s)
    plans = solve(lengths, cluster, model, config)
    assert played_s(plans, cluster, model) >= own_s + longest_s


def test_where_ranks_drift_layers_balance_each_other():
  """One layer is bound by the longest sample, the other by all work: they add up only where ranks meet."""
  model = dataclasses.replace(MODEL, num_layers=2, pattern='FS', num_experts=0)
  model = model.with_kind(SlidingWindowAttention(window_tokens=4))
  config = PlannerConfig(capacity_tokens=80, max_sp_degree=1)
  lengths = [80] + [4] * 40
  clusters = [cluster_of((1, 1, 2), prefetch_layers=ahead) for ahead in (0, 1)]
  cost = CostModel(clusters[0], model)
  work_s = {kind: 3.5 * cost.attention_s(np.array(lengths), kind) for kind in (FULL, SPARSE)}
  mean_s = {kind: float(work_s[kind].sum()) / 2 for kind in work_s}
  longest_s = {kind: float(work_s[kind].max()) for kind in work_s}
  assert longest_s[FULL] > mean_s[FULL] and longest_s[SPARSE] < mean_s[SPARSE]
  own_s = 120 * (3 * cost.logits_s() + 4 * sum(cost.before_s() + cost.after_s(i) for i in (0, 1)))
  meeting_s, drifting_s = (lower_bound_s(lengths, cluster, model, config) for cluster in clusters)
  assert meeting_s == pytest.approx(own_s + longest_s[FULL] + mean_s[SPARSE])
  assert drifting_s == pytest.approx(own_s + max(sum(longest_s.values()), sum(mean_s.values())))
  assert drifting_s < meeting_s


def test_domains_drift_even_where_their_ranks_meet():
  """The bound layer by layer holds within a domain only."""
  model = dataclasses.replace(MODEL, num_layers=2, pattern='FS', num_experts=0)
  model = model.with_kind(SlidingWindowAttention(window_tokens=4))
  config = PlannerConfig(capacity_tokens=160, capacity_step_tokens=1, max_sp_degree=1)
  lengths = [80] + [4] * 40
  apart, together = (cluster_of(mesh, prefetch_layers=0) for mesh in ((2, 1, 1), (1, 1, 2)))
  bound_s = lower_bound_s(lengths, apart, model, config)
  assert bound_s <= played_s(solve(lengths, apart, model, config), apart, model)
  assert bound_s < lower_bound_s(lengths, together, model, config)
