"""The planner: what holds for every batch, and what it should choose for a few."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import random_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from repack_jax.checks import ConfigError
from repack_jax.config import MODES, ClusterConfig, DataConfig, ModelConfig, PlannerConfig, RunConfig
from repack_jax.plan.plan import CHILDREN, MOST_HALO_HOPS, PARENTS, Group, Plan, PlanError
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.costs import Costs
from repack_jax.predict.simulator import simulate
from repack_jax.solver import SampleTooLong, solve, solve_modes
from repack_jax.solver.search import search

ROOT = Path(__file__).resolve().parents[1]
MODEL = ModelConfig(num_heads=32, num_kv_heads=4)
DENSE = dataclasses.replace(MODEL, pattern='FS', num_experts=0, remat='none')
# Attention is slow enough that long samples want many ranks, and links between nodes that children pay off.
RATES = {
  'matmul_flops_per_s': 2e9, 'attention_flops_per_s': 2e8, 'intra_node_bytes_per_s': 5e7,
  'inter_node_bytes_per_s': 7.1e6,
}  # fmt: skip
MESHES = {  # name: (domains, nodes, ranks a node)
  'one rank': (1, 1, 1),
  'a node': (1, 1, 8),
  'nodes of one rank': (1, 4, 1),
  'two nodes': (1, 2, 8),
  'four nodes': (1, 4, 8),
  'two domains': (2, 2, 4),
  'three domains': (3, 2, 2),
}


def cluster_of(mesh: str, **changes: float) -> ClusterConfig:
  domains, nodes, ranks_per_node = MESHES[mesh]
  return ClusterConfig(nodes=nodes, ranks_per_node=ranks_per_node, domains=domains, **(RATES | changes))


def costs_of(mesh: str, model: ModelConfig = MODEL, **changes: float) -> Costs:
  return model_costs(cluster_of(mesh, **changes), model)


def plans_of(lengths, mesh: str, mode: str, capacity: int, **config: int) -> tuple[Plan, ...]:
  return solve(lengths, costs_of(mesh), PlannerConfig(mode=mode, capacity_tokens=capacity, **config)).plans


def sizes(groups) -> list[int]:
  """Of the groups that hold samples."""
  return [group.size for group in groups if group.samples]


def check(plans: tuple[Plan, ...], lengths: list[int], mesh: str, mode: str, capacity: int) -> None:
  """What must hold of every batch's plans."""
  cluster = cluster_of(mesh)
  assert sorted(sample for plan in plans for sample in plan.sample_ids) == list(range(len(lengths)))
  for plan in plans:
    plan.validate(MODEL.wire)
    assert plan.lengths == tuple(lengths[sample] for sample in plan.sample_ids)
    assert (plan.mode, plan.capacity_tokens, plan.num_ranks) == (mode, capacity, cluster.num_ranks)
    assert plan.rank_tokens.sum() == plan.total_tokens and plan.rank_tokens.max() <= capacity
    for groups in (plan.parents, plan.children):
      assert [rank for group in groups for rank in group.ranks] == list(range(cluster.num_ranks))
    for child in plan.children:
      first_node, last_node = (r // cluster.ranks_per_node for r in (child.first_rank, child.end_rank - 1))
      assert first_node == last_node or child in plan.parents
      assert any(p.first_rank <= child.first_rank and child.end_rank <= p.end_rank for p in plan.parents)
    assert mode in ('parents_solo', 'solve') or not plan.solo
    assert mode in ('repack', 'solve') or plan.parents == plan.children
  if mode == 'static':
    # Ranks that no sample took are groups of one.
    assert len({size for plan in plans for size in sizes(plan.parents)}) <= 1


# --- every batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('mesh', MESHES)
def test_random_batches(mesh, mode):
  rng = np.random.default_rng(sum(map(ord, mesh + mode)))
  ranks = cluster_of(mesh).domain_ranks
  for _ in range(6):
    capacity = int(rng.choice([1, 7, 64, 500]))
    lengths = random_lengths(rng, ranks * capacity)[:20]
    plans = plans_of(lengths, mesh, mode, capacity)
    check(plans, lengths, mesh, mode, capacity)
    again = plans_of(np.array(lengths), mesh, mode, capacity)
    assert [plan.digest() for plan in plans] == [plan.digest() for plan in again]


@pytest.mark.parametrize('mode', MODES)
def test_plans_for_links_that_pad_rows_hold_whole_ones(mode):
  """Ranks full to the last slot among them."""
  rng = np.random.default_rng(sum(map(ord, mode)))
  costs = costs_of('four nodes', wire_row_bytes=512)
  cluster, row = costs.cluster, 16  # at SP32 a rank sends back one head of 8 floats
  rounded = 0
  for number in range(12):
    capacity = row * int(rng.integers(1, 40))
    config = PlannerConfig(mode=mode, capacity_tokens=capacity)
    lengths = random_lengths(rng, cluster.domain_ranks * capacity)
    if number == 0:
      lengths = [cluster.domain_ranks * capacity]
    for plan in solve(lengths, costs, config).plans:
      plan.validate(MODEL.wire)
      assert plan.row_tokens == row and plan.capacity_tokens == capacity
      rounded += int((plan.shared_slots - plan.shared_tokens).sum())
  assert rounded
  uneven = dataclasses.replace(config, capacity_tokens=row + 1, capacity_step_tokens=1)
  with pytest.raises(PlanError, match='a capacity of 17 is not a multiple of 16 tokens'):
    solve([3], costs, uneven)
  with pytest.raises(ConfigError, match=r'PlannerConfig\.capacity_tokens = 17: must be a multiple of 16'):
    RunConfig(cluster=cluster, model=MODEL, planner=uneven, data=DataConfig(max_document_tokens=16))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_batch(data):
  mesh, mode = data.draw(st.sampled_from(list(MESHES))), data.draw(st.sampled_from(MODES))
  capacity = data.draw(st.integers(1, 40))
  widest = data.draw(st.sampled_from([1, 2, 4, 32]))
  longest = min(cluster_of(mesh).domain_ranks, widest) * capacity
  lengths = data.draw(st.lists(st.integers(1, longest), max_size=30))
  plans = plans_of(lengths, mesh, mode, capacity, max_sp_degree=widest)
  check(plans, lengths, mesh, mode, capacity)
  assert all(plan.widest(PARENTS) <= widest for plan in plans)


@pytest.mark.long
def test_sweep_of_batches_of_any_kind(tmp_path):
  """Legal, complete, and no slower than without repacking; the script names the batches that are not."""
  script, rows = ROOT / 'scripts/bench_planner.py', tmp_path / 'rows.json'
  command = [sys.executable, script, '--only', 'sweep', '--sweep', '300', '--sweep-from', '50000']
  process = subprocess.run([*command, '--json', rows], capture_output=True, text=True, cwd=ROOT)
  assert process.returncode == 0, process.stderr
  (swept,) = json.loads(rows.read_text())['results']['sweep']
  assert (swept['batches'], swept['failures']) == (300, 0)


# Each mode, and those that it may not be slower than; `None` is `solve` without solo samples.
SLOWER = {
  'parents': ('static',),
  'parents_solo': ('parents',),
  'repack': ('parents',),
  None: ('repack',),
  'solve': ('parents_solo', 'repack', None),
}


@pytest.mark.parametrize('prefetch_layers', [0, 1])
@pytest.mark.parametrize('model', [MODEL, DENSE], ids=['experts', 'dense'])
@pytest.mark.parametrize('mesh', MESHES)
def test_no_mode_is_slower_than_one_that_allows_less(mesh, model, prefetch_layers):
  """Whole steps, also of several micro-batches, each mode with its own; all kinds of exchange and meeting."""
  rng = np.random.default_rng(len(mesh) + prefetch_layers)
  for step, meets, exchange in ((0, 'span', 'ragged'), (1, 'group', 'ragged'), (0, 'span', 'dense')):
    costs = costs_of(mesh, model, prefetch_layers=prefetch_layers, exchange_meets=meets, exchange=exchange)
    capacity = int(rng.choice([7, 64, 300]))
    lengths = random_lengths(rng, costs.cluster.domain_ranks * capacity)[:24]
    config = PlannerConfig(capacity_tokens=capacity, capacity_step_tokens=step)
    configs = {mode: dataclasses.replace(config, mode=mode or 'solve', solo=bool(mode)) for mode in
               ('static', *SLOWER)}  # fmt: skip
    together = solve_modes(lengths, costs, config, configs)
    for mode, found in together.items():
      if mode in ('static', 'solve'):  # one by one as all at once
        assert found.plans == solve(lengths, costs, configs[mode]).plans
      assert found.simulated.step_s == pytest.approx(simulate(costs, found.plans).step_s)
      for fewer in SLOWER.get(mode, ()):
        assert found.simulated.step_s <= together[fewer].simulated.step_s * (1 + 1e-9)


@pytest.mark.parametrize('prefetch_layers', [0, 1])
@pytest.mark.parametrize('mesh', ['one rank', 'two nodes', 'two domains'])
def test_the_better_exchange_of_sparse_layers_is_taken(mesh, prefetch_layers):
  """`auto` is never slower than either; by halo too no mode is slower than one that allows less."""
  rng = np.random.default_rng(len(mesh) + prefetch_layers)
  taken = set()
  for step, model in enumerate((MODEL, DENSE)):
    costs = costs_of(mesh, model, prefetch_layers=prefetch_layers, exchange_meets=('span', 'group')[step])
    for lengths in ([2000, 300, *[60] * 20], random_lengths(rng, costs.cluster.domain_ranks * 300)[:24]):
      lengths = [min(n, 300 * costs.cluster.domain_ranks) for n in lengths]
      config = PlannerConfig(capacity_tokens=300, capacity_step_tokens=step)
      found = {
        (mode, how): solve(lengths, costs, dataclasses.replace(config, mode=mode, sparse_exchange=how))
        for mode in ('static', 'parents', 'parents_solo', 'solve')
        for how in ('ulysses', 'halo', 'auto')
      }
      seconds = {name: of.simulated.step_s for name, of in found.items()}
      for mode in ('static', 'parents', 'parents_solo', 'solve'):
        assert seconds[mode, 'auto'] <= min(seconds[mode, how] for how in ('ulysses', 'halo')) * (1 + 1e-9)
        for fewer in SLOWER.get(mode, ()):
          for how in ('halo', 'auto'):
            if (fewer, how) in seconds:
              assert seconds[mode, how] <= seconds[fewer, how] * (1 + 1e-9)
      for (_, how), of in found.items():
        for plan in of.plans:
          plan.validate(model.wire)
          assert plan.halo_tokens in {'ulysses': [None], 'halo': [127, None], 'auto': [127, None]}[how]
          if plan.halo_tokens is not None:
            assert plan.halo_hops(127) <= MOST_HALO_HOPS
          elif how == 'halo':  # too many ranks hold too little
            assert plan.halo_hops(127) > MOST_HALO_HOPS
          taken.add((how, plan.halo_tokens is not None))
        assert of.baseline_simulated.step_s == seconds['parents', how]
  assert ('halo', True) in taken


def test_layers_without_a_bound_never_run_by_halo():
  """Nor where one of several kinds in the children's layout has none."""
  costs = costs_of('two nodes', DENSE)
  layers = tuple(dataclasses.replace(layer, halo_tokens=None) for layer in costs.layers)
  unbounded = dataclasses.replace(costs, layers=(*costs.layers, layers[-1]))
  assert costs.halo_tokens == 127 and unbounded.halo_tokens is None
  for how in ('halo', 'auto'):
    config = PlannerConfig(capacity_tokens=300, sparse_exchange=how)
    plans = solve([2000, 300], unbounded, config).plans
    assert (
      plans == solve([2000, 300], unbounded, dataclasses.replace(config, sparse_exchange='ulysses')).plans
    )


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('mesh', MESHES)
def test_baseline_is_what_mode_parents_gives(mesh, mode):
  """With every mode come the plans of `parents`, as that mode makes them, and their simulated step."""
  rng = np.random.default_rng(len(mesh + mode))
  for model, step in itertools.product((MODEL, DENSE), (0, 16)):
    costs = costs_of(mesh, model, prefetch_layers=int(rng.integers(2)))
    capacity = int(rng.choice([7, 64, 300]))
    lengths = random_lengths(rng, costs.cluster.domain_ranks * capacity)[:60]
    config = PlannerConfig(mode, capacity_tokens=capacity, capacity_step_tokens=step)
    found = solve(lengths, costs, config)
    disabled = solve(lengths, costs, dataclasses.replace(config, mode='parents'))
    assert disabled.plans == disabled.baseline_plans == found.baseline_plans
    assert disabled.simulated.step_s == found.baseline_simulated.step_s
    for plans, step_of_plans in (
      (found.plans, found.simulated),
      (found.baseline_plans, found.baseline_simulated),
    ):
      assert step_of_plans.step_s == simulate(costs, plans).step_s
    if mode != 'static':
      assert found.simulated.step_s <= found.baseline_simulated.step_s
  nothing = solve([], costs, config)
  assert nothing.plans == nothing.baseline_plans == ()
  assert nothing.simulated.step_s == nothing.baseline_simulated.step_s == costs.optimizer_s


@pytest.mark.parametrize('row_bytes', [1, 512])
def test_plans_depend_on_nothing_that_only_the_mesh_knows(row_bytes):
  """Whatever platform the config names or leaves open, plans are those of the processes that run them."""
  lengths = random_lengths(np.random.default_rng(8), 32 * 64)
  digests = set()
  for platform in ('cpu', 'gpu', 'tpu', 'auto'):
    cluster = dataclasses.replace(cluster_of('four nodes', wire_row_bytes=row_bytes), platform=platform)
    for mode in MODES:
      plans = solve(lengths, model_costs(cluster, MODEL), PlannerConfig(mode, capacity_tokens=64)).plans
      digests.add((mode, *(plan.digest() for plan in plans)))
  assert len(digests) == len(MODES)


@pytest.mark.parametrize('mode', MODES)
def test_capacity_follows_the_fullest_rank(mode):
  rng = np.random.default_rng(4)
  for step in (1, 16, 50):
    for mesh in ('two nodes', 'two domains'):
      lengths = random_lengths(rng, cluster_of(mesh).domain_ranks * 64)
      for plan in plans_of(lengths, mesh, mode, 64, capacity_step_tokens=step):
        rounded_up = -(-int(plan.rank_tokens.max()) // step) * step
        assert plan.validate().capacity_tokens == min(64, rounded_up)


def test_plans_are_the_same_in_every_process():
  code = (
    'import numpy as np, test_solver as t; rng = np.random.default_rng(3);'
    "print([p.digest() for mode in ('repack', 'solve') for mesh in t.MESHES"
    ' for p in t.plans_of(t.random_lengths(rng, 32), mesh, mode, 32)])'
  )
  shown = set()
  for seed in ('1', '77'):
    env = os.environ | {'PYTHONHASHSEED': seed, 'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "tests"}'}
    run = subprocess.run([sys.executable, '-c', code], env=env, check=True, capture_output=True, text=True)
    shown.add(run.stdout)
  assert len(shown) == 1 and len(shown.pop()) > 200


# --- refusals and extremes ------------------------------------------------------------------------------


@pytest.mark.parametrize('mode', MODES)
def test_sample_too_long(mode):
  longest = 16 * 10
  assert len(plans_of([longest, 1], 'two nodes', mode, 10)) == 2
  message = (
    r'sample 1 has 161 tokens; the widest group, SP16 at 10 tokens a rank, holds 160. '
    'Raise PlannerConfig.capacity_tokens, or lower DataConfig.max_document_tokens'
  )
  with pytest.raises(SampleTooLong, match=re.escape(message)):
    plans_of([1, longest + 1], 'two nodes', mode, 10)
  with pytest.raises(SampleTooLong, match='the widest group, SP4 at 10'):
    plans_of([41], 'two nodes', mode, 10, max_sp_degree=4)


def test_empty_batch_and_empty_samples():
  for mode in MODES:
    assert plans_of([], 'two nodes', mode, 10) == ()
    with pytest.raises(PlanError, match='sample 1 has length 0'):
      plans_of([3, 0], 'two nodes', mode, 10)


def test_the_search_is_compiled_once():
  """An array of another dtype, such as NumPy makes of no samples, would compile it again, for a minute."""
  for lengths in ([5], [5, 3, 2], [1] * 40):
    for mesh in MESHES:
      plans_of(lengths, mesh, 'solve', 10)
  assert len(search.signatures) == 1


@pytest.mark.parametrize('mode', MODES)
def test_one_token_samples_by_the_thousand(mode):
  (plan,) = plans_of([1] * 3000, 'two nodes', mode, 200)
  assert plan.rank_tokens.max() == 188  # 3,000 / 16, rounded up: no rank can be less full
  assert plan.widest(PARENTS) == plan.widest(CHILDREN) == 1


def test_micro_batches_where_capacity_asks_for_them():
  plans = plans_of([8] * 33, 'a node', 'repack', 16)  # 264 tokens, 128 slots
  assert len(plans) == 3
  assert sorted(len(plan.lengths) for plan in plans) == [11, 11, 11]
  # As many slots as tokens, but one rank's worth of them would have to be cut.
  assert len(plans_of([16] * 7 + [8, 8], 'a node', 'repack', 16)) == 1
  assert len(plans_of([11] * 9, 'a node', 'repack', 16, max_sp_degree=1)) == 2


@pytest.mark.parametrize('mode', MODES)
def test_domains_share_a_batch_evenly(mode):
  """Four copies of the same samples: one in each domain of each of two micro-batches."""
  lengths = [60, 50, 40, 8, 2]
  plans = plans_of(lengths * 4, 'two domains', mode, 25)
  assert len(plans) == 2
  for plan in plans:
    for first in (0, 8):
      inside = [
        s for g in (*plan.parents, *plan.solo) if first <= g.first_rank < first + 8 for s in g.samples
      ]
      assert sum(plan.lengths[s] for s in inside) == sum(lengths)


# --- choices by hand ------------------------------------------------------------------------------------


def test_sizes_of_groups():
  """One sample as long as the mesh takes all ranks; its copy a rank each takes one."""
  (plan,) = plans_of([64], 'a node', 'parents', 64)
  assert plan.parents == (Group(0, 8, (0,)),)
  (plan,) = plans_of([64] * 8, 'a node', 'parents', 64)
  assert [group.size for group in plan.parents] == [1] * 8
  (plan,) = plans_of([500] + [40] * 4, 'a node', 'parents', 300)
  assert plan.parents == (Group(0, 8, (0, 1, 2, 3, 4)),)  # nobody waits for the long one


def test_static_takes_one_degree():
  config = PlannerConfig(capacity_tokens=10)
  degrees = [config.smallest_degree((1, 2, 4, 8), longest) for longest in (1, 10, 11, 40, 41)]
  assert degrees == [1, 1, 2, 4, 8]
  (plan,) = plans_of([33, 5, 5, 5], 'a node', 'static', 10)
  assert [group.size for group in plan.parents] == [4, 4]
  (plan,) = plans_of([15, 5, 5, 5], 'a node', 'static', 10)
  assert sizes(plan.parents) == [2] * 4
  (plan,) = plans_of([15, 5, 5, 5], 'a node', 'static', 10, static_sp_degree=4)
  assert [group.size for group in plan.parents] == [4, 4]


def test_equal_work_rather_than_equal_tokens():
  """Where attention dominates, the squares of the lengths are balanced and tokens are not."""
  quadratic = dataclasses.replace(
    MODEL, d_model=1, num_layers=8, pattern='F', num_experts=0, dense_width=1, head_dim=512
  )
  cluster = ClusterConfig(nodes=1, ranks_per_node=2, **(RATES | {'intra_node_bytes_per_s': 1e15}))

  def groups(lengths, max_sp_degree):
    config = PlannerConfig(mode='parents', capacity_tokens=100, max_sp_degree=max_sp_degree)
    (plan,) = solve(lengths, model_costs(cluster, quadratic), config).plans
    return [(group.size, [plan.lengths[s] for s in group.samples]) for group in plan.parents]

  # By tokens, 12 would get the company of at most one 4; by work, none of them comes near.
  assert groups([12, 4, 4, 4, 4, 4], 1) == [(1, [12]), (1, [4] * 5)]
  assert groups([4, 12], 1) == [(1, [12]), (1, [4])]
  # 12 alone is more than half of all work, so both ranks share it.
  assert groups([4, 12], 2) == [(2, [12, 4])]


def test_repacking_keeps_the_childrens_layers_inside_nodes():
  lengths = [3000, 900, 700, 500, 400, 300, 200, 100]
  (plan,) = plans_of(lengths, 'two nodes', 'repack', 640)
  assert plan.widest(PARENTS) == 16 and plan.widest(CHILDREN) == 8
  costs = costs_of('two nodes')
  assert costs.cross_node_bytes(plan) > 0
  only_full = costs_of('two nodes', dataclasses.replace(MODEL, num_layers=1, pattern='F'))
  assert costs.cross_node_bytes(plan) == only_full.cross_node_bytes(plan)
  (disabled,) = plans_of(lengths, 'two nodes', 'parents', 640)
  assert costs.cross_node_bytes(disabled) == 4 * costs.cross_node_bytes(plan)  # FSSS


@pytest.mark.parametrize('mode', ['repack', 'solve'])
def test_wide_layout_is_kept_where_children_would_lose(mode):
  """One sample over two nodes: half the ranks would idle, and with links this fast that costs more."""
  fast = costs_of('two nodes', inter_node_bytes_per_s=1e12, intra_node_bytes_per_s=1e12)
  (plan,) = solve([3000], fast, PlannerConfig(mode=mode, capacity_tokens=640)).plans
  assert plan.parents == plan.children == (Group(0, 16, (0,)),) and not plan.solo


def test_wide_layout_is_kept_where_no_node_holds_a_sample():
  (plan,) = plans_of([8 * 640 + 1], 'two nodes', 'solve', 640)
  assert plan.parents == plan.children == (Group(0, 16, (0,)),)


def test_solo_samples_beside_a_giant():
  """The giant takes all ranks, and what is left of each holds a short sample that no exchange carries."""
  lengths = [16 * 560] + [70] * 16
  (plan,) = plans_of(lengths, 'two nodes', 'solve', 640)
  assert plan.parents == (Group(0, 16, (0,)),)
  assert [(group.first_rank, len(group.samples)) for group in plan.solo] == [(rank, 1) for rank in range(16)]
  assert plan.shared_tokens.tolist() == [560] * 16 and plan.rank_tokens.tolist() == [630] * 16
  costs = costs_of('two nodes')
  (repacked,) = plans_of(lengths, 'two nodes', 'repack', 640)
  assert simulate(costs, [plan]).step_s < simulate(costs, [repacked]).step_s
  assert costs.cross_node_bytes(plan) < costs.cross_node_bytes(repacked)


def test_no_solo_samples_where_all_exceed_a_rank():
  rng = np.random.default_rng(6)
  for _ in range(10):
    for plan in plans_of(rng.integers(65, 400, 8).tolist(), 'two nodes', 'solve', 64):
      assert not plan.solo and min(sizes(plan.children)) >= 2
