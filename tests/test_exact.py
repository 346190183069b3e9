"""The exact solver against every plan there is and against the fast planner; the benchmarks' peers."""

import dataclasses
import itertools

import numpy as np
import planner_peers
import pytest

from repack_jax.config import ClusterConfig, ModelConfig, PlannerConfig
from repack_jax.plan.plan import Group, Plan, PlanError
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.costs import Costs
from repack_jax.predict.plan_times import predicted_s
from repack_jax.predict.simulator import simulate
from repack_jax.solver import solve
from repack_jax.solver.bounds import lower_bound_s
from repack_jax.solver.exact import exact

MODEL = ModelConfig(
  d_model=256, num_heads=16, num_kv_heads=4, head_dim=16, num_experts=8, compute_dtype='bfloat16'
)  # fmt: skip
# Computation and links matter about as much, and none of the latencies.
RATES = {
  'matmul_flops_per_s': 1e12, 'attention_flops_per_s': 2e11, 'intra_node_bytes_per_s': 1e10,
  'inter_node_bytes_per_s': 2e9, 'intra_node_latency_s': 1e-6, 'inter_node_latency_s': 2e-6,
}  # fmt: skip


def costs_of(nodes: int, ranks_per_node: int, domains: int = 1, **changes: float) -> Costs:
  """Ranks meet at each layer, as `predicted_s` has it."""
  shape = {'nodes': nodes, 'ranks_per_node': ranks_per_node, 'domains': domains, 'prefetch_layers': 0,
           'exchange_meets': 'group'}  # fmt: skip
  return model_costs(ClusterConfig(**(shape | RATES | changes)), MODEL)


def skewed(rng: np.random.Generator, count: int) -> list[int]:
  """Lengths that ranks share without remainders, so that nothing is rounded; sometimes two are equal."""
  lengths = 8 * np.clip(np.exp(rng.normal(4, 1.2, count)), 1, 2000).astype(int)
  if rng.random() < 0.3:
    lengths[-1] = lengths[0]
  return lengths.tolist()


def config_of(lengths: list[int], costs: Costs, mode: str, slack: float = 1.3) -> PlannerConfig:
  cluster = costs.cluster
  capacity = max(slack * sum(lengths) / cluster.num_ranks, max(lengths) / cluster.domain_ranks)
  return PlannerConfig(mode=mode, capacity_tokens=int(capacity) + 1, capacity_step_tokens=1)


# --- every plan there is --------------------------------------------------------------------------------


def tilings(first: int, size: int, degrees: tuple[int, ...]) -> list[list[tuple[int, int]]]:
  """All ways to cut a block into aligned groups: (first rank, size) each."""
  whole = [[(first, size)]] if size in degrees else []
  if size == 1:
    return whole
  half = size // 2
  left, right = tilings(first, half, degrees), tilings(first + half, half, degrees)
  return whole + [a + b for a, b in itertools.product(left, right)]


def all_plans(lengths: list[int], costs: Costs, config: PlannerConfig):
  """Each sample in any group or alone on any rank, for all ways to cut ranks into children and parents."""
  free, ranks = config.mode == 'solve', costs.cluster.domain_ranks
  shapes = tilings(0, ranks, costs.degrees(config))
  for shape, around in itertools.product(shapes, shapes) if free else zip(shapes, shapes, strict=True):
    for homes in itertools.product(range(len(shape) + ranks * free), repeat=len(lengths)):
      held = [tuple(s for s, home in enumerate(homes) if home == c) for c in range(len(shape) + ranks)]
      children = tuple(Group(*block, samples) for block, samples in zip(shape, held, strict=False))
      parents = tuple(
        Group(
          first, size, tuple(s for c in children if first <= c.first_rank < first + size for s in c.samples)
        )
        for first, size in around
      )
      solo = tuple(
        Group(rank, 1, held[len(shape) + rank]) for rank in range(ranks) if held[len(shape) + rank]
      )
      plan = Plan(
        tuple(range(len(lengths))), tuple(lengths), parents, children, config.mode, config.capacity_tokens,
        ranks, ranks, costs.cluster.ranks_per_node, solo,
      )  # fmt: skip
      try:
        plan.validate()
      except PlanError:  # a child outside its parent or in two nodes, or a rank too full
        continue
      yield dataclasses.replace(plan, capacity_tokens=int(plan.rank_tokens.max()))


@pytest.mark.parametrize('mode', ['parents', 'solve'])
@pytest.mark.parametrize('mesh', [(2, 2), (1, 4), (4, 1)])
def test_no_plan_is_faster(mesh, mode):
  rng = np.random.default_rng(sum(mesh) + len(mode))
  costs = costs_of(*mesh)
  for count in (2, 3):
    lengths = skewed(rng, count)
    config = config_of(lengths, costs, mode)
    plan, proven = exact(lengths, costs, config)
    fastest = min(predicted_s(p, costs) for p in all_plans(lengths, costs, config))
    assert proven and predicted_s(plan, costs) == pytest.approx(fastest, rel=1e-5)


# --- by hand --------------------------------------------------------------------------------------------


def test_obvious_plans():
  costs = costs_of(2, 2)
  equal = exact([400] * 4, costs, PlannerConfig(capacity_tokens=400))
  assert equal[1] and [(g.size, len(g.samples)) for g in equal[0].children] == [(1, 1)] * 4
  (alone, proven) = exact([4000], costs, PlannerConfig(capacity_tokens=1000))
  assert proven and alone.parents == alone.children == (Group(0, 4, (0,)),)
  # Two long samples, a node each: the other ranks of a node would idle with anything narrower.
  pair, proven = exact([2000, 2000], costs, PlannerConfig(capacity_tokens=2000))
  assert proven and [(g.first_rank, g.size, len(g.samples)) for g in pair.parents] == [(0, 2, 1), (2, 2, 1)]


def test_solo_samples_beside_a_long_one():
  """All ranks share the long sample, and each has a short one that stays out of its exchanges."""
  costs, lengths = costs_of(2, 2), [2000, 500, 500, 500, 500]
  config = PlannerConfig(capacity_tokens=1000)
  plan, proven = exact(lengths, costs, config)
  assert proven and plan.parents == plan.children == (Group(0, 4, (0,)),)
  assert [group.first_rank for group in plan.solo] == [0, 1, 2, 3]
  disabled, proven = exact(lengths, costs, dataclasses.replace(config, mode='parents'))
  assert proven and disabled.parents == disabled.children == (Group(0, 4, (0, 1, 2, 3, 4)),)


def test_what_it_refuses():
  costs, config = costs_of(2, 2), PlannerConfig(capacity_tokens=100)
  with pytest.raises(ValueError, match=r'ClusterConfig.domains = 2: exact plans are of one domain'):
    exact([1], costs_of(2, 2, domains=2), config)
  with pytest.raises(ValueError, match="exact plans are of mode 'parents' or 'solve'"):
    exact([1], costs, PlannerConfig(mode='repack'))
  with pytest.raises(
    ValueError, match=r'ClusterConfig\.wire_row_bytes = 512: exact plans are of rows of one'
  ):
    exact([1], costs_of(2, 2, wire_row_bytes=512), dataclasses.replace(config, capacity_tokens=128))
  by_halo = PlannerConfig(mode='solve', sparse_exchange='auto')
  with pytest.raises(ValueError, match="sparse_exchange = 'auto': exact plans exchange heads; set 'ulysses'"):
    exact([3], costs, by_halo)
  with pytest.raises(ValueError, match='no samples'):
    exact([], costs, config)
  with pytest.raises(ValueError, match='2 samples of 600 tokens do not fit into one micro-batch'):
    exact([300, 300], costs, config)
  with pytest.raises(ValueError, match='the widest group, SP4'):
    exact([401], costs, config)


# --- beside the fast planner and the bound --------------------------------------------------------------


def test_between_bound_and_planner():
  rng = np.random.default_rng(5)
  for _ in range(10):
    costs = costs_of(2, int(rng.choice([2, 4])))
    lengths = skewed(rng, int(rng.integers(2, 7)))
    for mode in ('parents', 'solve'):
      config = config_of(lengths, costs, mode)
      best, _ = exact(lengths, costs, config, limit_s=10)
      seconds = predicted_s(best, costs)
      plans = solve(lengths, costs, config).plans
      assert lower_bound_s(lengths, costs, config) <= seconds * (1 + 1e-6)
      assert seconds <= sum(predicted_s(plan, costs) for plan in plans) * (1 + 1e-6)


# --- peers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('mesh', [(2, 4), (1, 2), (2, 2, 3)])
def test_peers_make_legal_plans(mesh):
  rng = np.random.default_rng(sum(mesh))
  costs = costs_of(*mesh)
  for slack, count in ((1.4, 30), (0.5, 12)):  # one micro-batch, or three
    lengths = skewed(rng, count)
    config = config_of(lengths, costs, 'parents', slack)
    outcomes: list[str] = []
    makers = (planner_peers.longest_first_greedy, planner_peers.flexsp_milp)
    for maker, extra in zip(makers, ({}, {'limit_s': 0.5, 'outcomes': outcomes}), strict=True):
      plans = maker(lengths, costs, config, **extra)
      assert sorted(s for plan in plans for s in plan.sample_ids) == list(range(count))
      assert len(plans) >= (2 if slack < 1 else 1)
      for plan in plans:
        plan.validate(MODEL.wire)
        assert plan.parents == plan.children and plan.num_ranks == costs.cluster.num_ranks
        assert plan.lengths == tuple(lengths[s] for s in plan.sample_ids)
    assert len(outcomes) >= costs.cluster.domains and set(outcomes) <= {'optimal', 'limit', 'greedy'}


def test_greedy_by_hand():
  def groups(lengths: list[int], capacity: int) -> list[tuple[int, list[int]]]:
    config = PlannerConfig(capacity_tokens=capacity)
    (plan,) = planner_peers.longest_first_greedy(lengths, costs_of(1, 4), config)
    return [(group.size, [lengths[s] for s in group.samples]) for group in plan.parents]

  assert groups([15, 3, 2, 2], 10) == [(2, [15]), (1, [3]), (1, [2, 2])]
  assert groups([15, 3], 10) == [(2, [15]), (2, [3])]  # a rank is left over
  assert groups([5], 10) == [(4, [5])]
  assert planner_peers.longest_first_greedy([], costs_of(1, 4), PlannerConfig()) == []
  with pytest.raises(ValueError, match='a sample of 41 tokens exceeds SP4 at 10'):
    groups([41], 10)


def test_milp_by_hand():
  """Two long samples share a node each, where every sample is a bucket of its own."""
  lengths, costs = [2000, 2000, 8, 16], costs_of(2, 2)
  outcomes: list[str] = []
  config = PlannerConfig(capacity_tokens=1500)
  (plan,) = planner_peers.flexsp_milp(lengths, costs, config, outcomes=outcomes)
  assert [group.size for group in plan.parents] == [2, 2] and outcomes == ['optimal']
  assert [sum(s < 2 for s in group.samples) for group in plan.parents] == [1, 1]


def test_buckets_add_the_fewest_tokens():
  lengths = np.array([9, 1, 10, 2, 30, 2])
  bucket_of, longest = planner_peers._buckets(lengths, 3)
  assert longest.tolist() == [2, 10, 30] and longest[bucket_of].tolist() == [10, 2, 10, 2, 30, 2]
  assert planner_peers._buckets(lengths, 9)[1].tolist() == [1, 2, 9, 10, 30]


def test_micro_batches_by_length():
  """Consecutive ones of even tokens, emptier the more there are; as many as there are samples always fit."""

  def cut(lengths: list[int], bins: int, room: int = 100) -> list[list[int]] | None:
    made = planner_peers.by_length(np.array(lengths), bins, room)
    return made and [[lengths[s] for s in samples] for samples in made]

  assert cut([1, 9, 3, 5], 2) == [[9], [5, 3, 1]]
  assert sorted(map(len, cut([4, 4, 4, 4, 4, 4], 4))) == [1, 1, 2, 2]
  assert cut([9, 4, 5, 3, 3], 3) == [[9], [5, 4], [3, 3]]
  assert cut([9, 4, 5, 3, 3], 4) == [[9], [5], [4], [3, 3]]  # though the first is as full as ever
  assert cut([1, 9, 3, 5], 1) == [[9, 5, 3, 1]]
  assert cut([1, 9, 3, 5], 2, room=8) is None
  assert cut([2, 9], 3) == [[9], [2]]


def test_micro_batches_by_squares():
  made = planner_peers.by_squares(np.array([4, 9, 3, 5]), 2, 100)
  assert made is not None and [sorted(samples.tolist()) for samples in made] == [[1], [0, 2, 3]]
  assert planner_peers.by_squares(np.array([4, 9, 3, 5]), 2, 10) is None


@pytest.mark.parametrize('mesh', [(2, 4), (2, 2, 3)])
def test_peers_try_more_micro_batches_and_take_the_best(mesh):
  rng = np.random.default_rng(sum(mesh))
  costs = costs_of(*mesh)
  for _ in range(5):
    lengths = skewed(rng, 20)
    config = config_of(lengths, costs, 'parents', 0.5)
    seconds = []
    for numbers in (1, 2, 3):
      plans = planner_peers.longest_first_greedy(lengths, costs, config, numbers)
      assert sorted(s for plan in plans for s in plan.sample_ids) == list(range(20))
      seconds.append(simulate(costs, plans).step_s)
    assert seconds == sorted(seconds, reverse=True)


def test_peers_lay_out_the_micro_batches_of_others():
  """Each as a batch of its own, so that it becomes several where a peer finds no room for it."""
  rng = np.random.default_rng(3)
  costs = costs_of(2, 4)
  lengths = skewed(rng, 40)
  config = config_of(lengths, costs, 'solve', 0.4)
  ours = solve(lengths, costs, config).plans

  def peer(of: np.ndarray) -> list:
    return planner_peers.longest_first_greedy(of, costs, config)

  theirs = planner_peers.in_micro_batches_of(ours, peer)
  assert len(theirs) >= len(ours) > 1
  whose = {s: number for number, plan in enumerate(ours) for s in plan.sample_ids}
  assert sorted(s for plan in theirs for s in plan.sample_ids) == list(range(40))
  for plan in theirs:
    plan.validate(MODEL.wire)
    assert plan.lengths == tuple(lengths[s] for s in plan.sample_ids)
    assert len({whose[s] for s in plan.sample_ids}) == 1
