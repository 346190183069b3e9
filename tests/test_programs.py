"""Which program runs which plan: few serve all, and one more is compiled where that pays."""

import dataclasses

import numpy as np
import pytest
from cases import random_lengths

from repack_jax.config import ClusterConfig, ModelConfig, PlannerConfig
from repack_jax.plan.plan import Group, Plan
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.simulator import simulate
from repack_jax.solver import solve
from repack_jax.solver.programs import Programs

CLUSTER = ClusterConfig(nodes=2, ranks_per_node=2, prefetch_layers=0)
COSTS = model_costs(CLUSTER, ModelConfig(num_heads=4, num_kv_heads=2))
CONFIG = PlannerConfig(mode='parents', capacity_tokens=16, max_sp_degree=4)


def plan_of(parents: int, children: int, length: int = 8, solo: bool = False, **changes: int) -> Plan:
  """One sample in the first parent and its first child, of these sizes; perhaps a solo one."""

  def tiled(size: int) -> tuple[Group, ...]:
    return tuple(Group(first, size, (0,) if first == 0 else ()) for first in range(0, 4, size))

  return Plan(
    sample_ids=(0, 1) if solo else (0,),
    lengths=(length, 3) if solo else (length,),
    parents=tiled(parents),
    children=tiled(children),
    mode='solve',
    **({'capacity_tokens': 16, 'num_ranks': 4, 'domain_ranks': 4, 'ranks_per_node': 2} | changes),
    solo=(Group(3, 1, (1,)),) if solo else (),
  ).validate()


def test_a_program_serves_what_needs_less():
  programs = Programs(COSTS, dataclasses.replace(CONFIG, mode='solve', compile_s=1e9), 100)
  (wide,) = programs.choose(1, [plan_of(4, 2, solo=True)])
  assert (wide.parents_span, wide.children_span, wide.has_solo) == (4, 2, True)
  assert programs.choose(2, [plan_of(2, 2), plan_of(4, 2), plan_of(1, 1, length=16)]) == (wide,) * 3
  (widest,) = programs.choose(3, [plan_of(4, 4)])
  assert widest.children_span == 4 and programs.compiled == [wide, widest]
  assert programs.choose(4, [plan_of(2, 2)]) == (wide,)  # the faster of those that serve it
  seconds = [simulate(COSTS, [plan_of(2, 2)], programs=[program]).step_s for program in (wide, widest)]
  assert seconds[0] < seconds[1]


def test_solo_cores_are_in_every_program_of_modes_that_may_need_them():
  for mode, solo, has_solo in (('solve', True, True), ('solve', False, False), ('repack', True, False),
                               ('parents_solo', True, True), ('parents', True, False)):  # fmt: skip
    config = dataclasses.replace(CONFIG, mode=mode, solo=solo)
    (program,) = Programs(COSTS, config, 100).choose(1, [plan_of(2, 2)])
    assert program.has_solo == has_solo


def test_one_more_is_compiled_where_it_saves_more_than_its_compilation():
  """Saved so far, a step, times the steps left."""
  wide, narrow = plan_of(4, 2), plan_of(2, 2)
  first = Programs(COSTS, CONFIG, 10)
  (program,) = first.choose(1, [wide])
  (own,) = Programs(COSTS, CONFIG, 10).choose(1, [narrow])
  saved_s = simulate(COSTS, [narrow], programs=[program]).step_s - simulate(COSTS, [narrow]).step_s
  assert saved_s > 0
  # The second of ten steps: a saving every other step, and nine steps left.
  for compile_s, expected in ((4.6 * saved_s, program), (4.4 * saved_s, own)):
    programs = Programs(COSTS, dataclasses.replace(CONFIG, compile_s=compile_s), 10)
    programs.choose(1, [wide])
    assert programs.choose(2, [narrow]) == (expected,)
  # It is not worth it at the end of a run, however often it is asked for.
  programs = Programs(COSTS, dataclasses.replace(CONFIG, compile_s=2 * saved_s), 10)
  programs.choose(1, [wide])
  assert {programs.choose(step, [narrow]) for step in (9, 10)} == {(program,)}


def test_a_program_of_the_plans_own_degrees_pays_where_exchanges_are_dense():
  """The first knows all degrees and sends at each; ragged exchanges have nothing to gain."""
  plan = plan_of(4, 2)
  for exchange, own_degrees in (('ragged', (1, 2, 4)), ('dense', (4,))):
    costs = dataclasses.replace(COSTS, cluster=dataclasses.replace(CLUSTER, exchange=exchange))
    programs = Programs(costs, dataclasses.replace(CONFIG, compile_s=0.0), 100)
    (first,) = programs.choose(1, [plan])
    assert (first.parents_degrees, first.children_degrees) == ((1, 2, 4), (1, 2))
    (second,) = programs.choose(2, [plan])
    assert second.parents_degrees == own_degrees
    assert costs.cross_node_bytes(plan, first) == costs.cross_node_bytes(plan, second)  # at SP4 alone
    assert (
      simulate(costs, [plan], programs=[second]).step_s <= simulate(costs, [plan], programs=[first]).step_s
    )


def test_programs_by_halo_serve_plans_of_fewer_hops():
  costs = model_costs(CLUSTER, ModelConfig(num_heads=4, num_kv_heads=2, pattern='S'))
  config = dataclasses.replace(CONFIG, sparse_exchange='halo', compile_s=1e9)
  programs = Programs(costs, config, 10)
  near, far, whole = (plan_of(4, 4, n).with_halo(127) for n in (8, 2, 1))
  assert [plan.halo_hops(127) for plan in (near, far, whole)] == [3, 2, 0]
  (program,) = programs.choose(1, [whole])
  assert program.halo_hops == 1  # the first serves samples over two ranks as well
  (further,) = programs.choose(2, [near])
  assert further.halo_hops == 3 and programs.choose(3, [far, whole]) == (further, program)
  # Heads can be exchanged in any program that has no halo, by plans of either sort.
  (heads,) = Programs(costs, CONFIG, 10).choose(1, [near.with_halo(None)])
  assert heads.halo_tokens is None and heads.serves(near)


def test_programs_of_fewer_slots_come_only_where_they_pay():
  fuller, emptier = plan_of(2, 2, length=30), plan_of(2, 2, length=8, capacity_tokens=4)
  for compile_s, slots in ((1e9, [16]), (0.0, [16, 4])):
    programs = Programs(COSTS, dataclasses.replace(CONFIG, compile_s=compile_s), 100)
    for step, plan in enumerate((emptier, fuller, emptier), start=1):
      (program,) = programs.choose(step, [plan])
      assert program.serves(plan)
    assert [program.capacity_tokens for program in programs.compiled] == slots


@pytest.mark.parametrize('mode', ['parents', 'solve'])
def test_all_plans_of_a_run_are_served_by_few(mode):
  rng = np.random.default_rng(3)
  config = dataclasses.replace(CONFIG, mode=mode, capacity_tokens=64, compile_s=1e9)
  choosers = [Programs(COSTS, config, 40) for _ in range(2)]
  for step in range(1, 41):
    plans = solve(random_lengths(rng, 4 * 64), COSTS, config).plans
    chosen = [chooser.choose(step, plans) for chooser in choosers]
    assert chosen[0] == chosen[1]  # in every process alike
    assert all(program.serves(plan) for program, plan in zip(chosen[0], plans, strict=True))
  assert len(choosers[0].compiled) <= 3
