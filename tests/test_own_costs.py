"""Costs that no `ModelConfig` made: planned, played, bounded and solved exactly like those of a model."""

import dataclasses
import functools

import numpy as np
import pytest
from cases import random_lengths
from messages import message_of

from repack_jax.config import MODES, ClusterConfig, ModelConfig, PlannerConfig
from repack_jax.kinds import SlidingWindowAttention
from repack_jax.plan.plan import CHILDREN, PARENTS
from repack_jax.plan.wire import Wire
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.costs import Costs, LayerCosts
from repack_jax.predict.plan_times import predicted_s
from repack_jax.predict.simulator import simulate
from repack_jax.solver import solve
from repack_jax.solver.bounds import compute_bound_s, lower_bound_s
from repack_jax.solver.exact import exact

# Rates are powers of two, so that seconds are the same to the last bit however they are worked out.
MATMUL, ATTENTION = 2.0**31, 2.0**28
WINDOW = 24


def cluster_of(
  nodes: int, ranks_per_node: int, domains: int = 1, prefetch_layers: int = 0, exchange_meets: str = 'span'
) -> ClusterConfig:
  return ClusterConfig(
    nodes=nodes, ranks_per_node=ranks_per_node, domains=domains, prefetch_layers=prefetch_layers,
    exchange_meets=exchange_meets,
    matmul_flops_per_s=MATMUL, attention_flops_per_s=ATTENTION, intra_node_bytes_per_s=5e7,
    inter_node_bytes_per_s=7e6,
  )  # fmt: skip


def by_hand(cluster: ClusterConfig) -> Costs:
  """The layers of `MODEL` as whoever knows no `ModelConfig` would write them."""
  pair_s = 4 * 16 * 4 / ATTENTION  # scores and values of 16 heads of 4

  def full_s(tokens: np.ndarray) -> np.ndarray:
    return pair_s * (tokens * (tokens + 1) // 2)

  def window_s(tokens: np.ndarray) -> np.ndarray:
    seen = np.minimum(tokens, WINDOW)
    return pair_s * (seen * (seen + 1) // 2 + (tokens - seen) * seen)

  # Projections to 16 query heads and to 4 of keys and of values; back, and a block of width 24.
  before_s, after_s = 2 * 32 * (16 + 4 + 4) * 4 / MATMUL, 2 * 32 * (16 * 4 + 3 * 24) / MATMUL
  parents = LayerCosts(PARENTS, full_s, before_s, after_s)
  children = LayerCosts(CHILDREN, window_s, before_s, after_s)
  return Costs(
    cluster=cluster,
    wire=Wire(operand_heads=(16, 4, 4), result_heads=16, head_dim=4, itemsize=4),
    layers=(parents, children, children),
    linear_backward=3.0,
    logits_s=4 * 2 * 32 * 256 / MATMUL,
  )


MODEL = ModelConfig(
  d_model=32, num_layers=3, pattern='FSS', num_heads=16, num_kv_heads=4, head_dim=4, num_experts=0,
  dense_width=24,
).with_kind(SlidingWindowAttention(window_tokens=WINDOW))  # fmt: skip


def of_model(cluster: ClusterConfig) -> Costs:
  """The model's own, but for parameters and the update, of which the ones by hand say nothing."""
  costs = model_costs(cluster, MODEL)
  layers = tuple(dataclasses.replace(layer, gather_s=0.0, reduce_s=0.0) for layer in costs.layers)
  return dataclasses.replace(
    costs, layers=layers, table_gather_s=0.0, table_reduce_s=0.0, data_reduce_s=0.0, optimizer_s=0.0
  )


def unlike_any_model(cluster: ClusterConfig, free_tokens: bool = False) -> Costs:
  """Layers of one layout that differ, cores that are no multiple of pairs, and experts in one layer only."""
  token_s = 0.0 if free_tokens else 2e-6
  return Costs(
    cluster=cluster,
    wire=Wire(operand_heads=(8, 8), result_heads=8, head_dim=16, itemsize=2),
    layers=(
      LayerCosts(CHILDREN, lambda tokens: 3e-6 * tokens, token_s, token_s, 3 * token_s, has_experts=True),
      LayerCosts(PARENTS, lambda tokens: 4e-8 * tokens**2.0, token_s, 2 * token_s, gather_s=1e-4),
      LayerCosts(PARENTS, lambda tokens: 1e-8 * tokens**2.5, token_s, gather_s=1e-4, reduce_s=2e-4),
    ),
    expert_ranks=cluster.ranks_per_node,
    expert_bytes_per_token=64.0 if cluster.ranks_per_node > 1 else 0.0,
  )


MESHES = ((1, 1), (1, 8), (2, 4), (2, 2, 2))


@pytest.mark.parametrize('prefetch_layers', [0, 1])
@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_costs_by_hand_are_those_of_the_model(mesh, prefetch_layers):
  rng = np.random.default_rng(len(mesh) + prefetch_layers)
  cluster = cluster_of(*mesh, prefetch_layers=prefetch_layers)
  ours, models = by_hand(cluster), of_model(cluster)
  assert ours.slot_s == models.slot_s and ours.wire == models.wire
  for number in range(4):
    lengths = random_lengths(rng, cluster.domain_ranks * 64, most=20)
    assert compute_bound_s(lengths, ours) == compute_bound_s(lengths, models)
    for mode in MODES:
      config = PlannerConfig(mode=mode, capacity_tokens=64, capacity_step_tokens=number % 2)
      assert ours.degrees(config) == models.degrees(config)
      assert lower_bound_s(lengths, ours, config) == lower_bound_s(lengths, models, config)
      own, of_the_model = (solve(lengths, costs, config) for costs in (ours, models))
      assert own.plans == of_the_model.plans and own.baseline_plans == of_the_model.baseline_plans
      for plan in own.plans:
        assert predicted_s(plan, ours) == predicted_s(plan, models)
        assert ours.cross_node_bytes(plan) == models.cross_node_bytes(plan)
      assert own.simulated.step_s == of_the_model.simulated.step_s
      for cause, seconds in own.simulated.seconds.items():
        np.testing.assert_array_equal(seconds, of_the_model.simulated.seconds[cause])
      assert own.simulated.model_flops == 0  # they don't say


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_costs_unlike_any_model(mesh, mode):
  """Bounded, planned, predicted and played by one reckoning, whoever meets at an exchange."""
  rng = np.random.default_rng(len(mesh) + len(mode))
  config = PlannerConfig(mode=mode, capacity_tokens=64, max_sp_degree=8)
  for number in range(5):
    costs = unlike_any_model(cluster_of(*mesh, exchange_meets=('span', 'group')[number % 2]))
    lengths = random_lengths(rng, min(8, costs.cluster.domain_ranks) * 64)
    found = solve(lengths, costs, config)
    for plan in found.plans:
      parameters_s = sum(2 * layer.gather_s + layer.reduce_s for layer in costs.layers)
      expected = predicted_s(plan, costs) + parameters_s
      played = simulate(costs, [plan]).step_s
      if costs.cluster.domains == 1:
        assert played == pytest.approx(expected, rel=1e-12)
      assert played <= expected * (1 + 1e-12)
    predicted = sum(predicted_s(plan, costs) for plan in found.plans)
    assert lower_bound_s(lengths, costs, config) <= min(predicted, found.simulated.step_s) * (1 + 1e-9)
    total = sum(found.simulated.seconds.values())
    assert total == pytest.approx(np.full(costs.cluster.num_ranks, found.simulated.step_s))
    if mode != 'static':
      assert found.simulated.step_s <= found.baseline_simulated.step_s * (1 + 1e-12)


@pytest.mark.parametrize('free_tokens', [False, True])
@pytest.mark.parametrize('mode', ['parents', 'solve'])
def test_exact_plans_of_costs_unlike_any_model(mode, free_tokens):
  """Between the bound and the planner, also where nothing but attention and exchanges takes time.

  Exact plans are of exchanges whose groups alone meet.
  """
  rng = np.random.default_rng(3)
  costs = unlike_any_model(cluster_of(2, 2, exchange_meets='group'), free_tokens)
  for _ in range(3):
    lengths = (8 * rng.integers(1, 40, 5)).tolist()
    config = PlannerConfig(mode=mode, capacity_tokens=max(160, sum(lengths) // 3), capacity_step_tokens=1)
    best, proven = exact(lengths, costs, config)
    seconds = predicted_s(best, costs)
    planned_s = sum(predicted_s(plan, costs) for plan in solve(lengths, costs, config).plans)
    assert proven and lower_bound_s(lengths, costs, config) <= seconds * (1 + 1e-6)
    assert seconds <= planned_s * (1 + 1e-6)


def test_costs_that_contradict_themselves():
  layer, wire, cluster = LayerCosts(PARENTS, np.asarray), Wire((4, 4, 4), 4, 2, 4), cluster_of(1, 4)
  message = "LayerCosts.layout = 'full': choose one of parents, children"
  assert message in message_of(LayerCosts, 'full', np.asarray)
  assert 'Costs.layers = (): name at least one layer' in message_of(Costs, cluster, wire, ())
  of_experts = functools.partial(Costs, cluster, wire, (layer,))
  message = 'Costs.expert_ranks = 2: must be 1, or all ranks of a node: ClusterConfig.ranks_per_node = 4'
  assert message in message_of(functools.partial(of_experts, expert_ranks=2))
  message = 'Costs.expert_bytes_per_token = 8.0: must be 0 with Costs.expert_ranks = 1: no expert is on anoth'
  assert message in message_of(functools.partial(of_experts, expert_bytes_per_token=8.0))


@pytest.mark.parametrize('layouts', [(PARENTS,), (CHILDREN,), (PARENTS, CHILDREN)], ids='-'.join)
@pytest.mark.parametrize('mode', MODES)
def test_attention_that_costs_nothing(mode, layouts):
  """Tokens alone decide: the batch is planned, evenly, and a bound is reached: nobody meets anyone."""
  free = tuple(LayerCosts(layout, lambda tokens: 0.0 * tokens, after_s=1e-6) for layout in layouts)
  costs = Costs(cluster_of(1, 4, exchange_meets='group'), Wire((4, 4, 4), 4, 2, 4), free)
  config = PlannerConfig(mode=mode, capacity_tokens=16, capacity_step_tokens=1)
  found = solve([4] * 16 + [16] * 8, costs, config)
  assert [plan.rank_tokens.tolist() for plan in found.plans] == [[16] * 4] * 3
  assert found.simulated.step_s == pytest.approx(lower_bound_s([4] * 16 + [16] * 8, costs, config))
