"""The best plan of a small batch, found by CP-SAT: what the fast planner is measured against.

This and `exact_problem.py` alone need OR-tools (`pip install 'repack-jax[exact]'`); nothing else of the
package imports them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ortools.sat.python import cp_model

from repack_jax.config.run import PlannerConfig
from repack_jax.plan.plan import Group, Plan
from repack_jax.predict.costs import Costs
from repack_jax.predict.plan_times import predicted_s
from repack_jax.solver.exact_problem import Block, PlanProblem
from repack_jax.solver.solve import solve

_STOP = 1e-5  # the relative gap at which the search is done


def exact(
  lengths: Sequence[int] | np.ndarray,
  costs: Costs,
  config: PlannerConfig,
  limit_s: float = 60.0,
  num_search_workers: int = 2,
) -> tuple[Plan, bool]:
  """Returns the best plan of a batch in one micro-batch of one domain, and whether it is proven.

  By `predicted_s`.

  It is at most as slow as what `solve` finds, which the search starts from. What is proven has tokens as
  divisible where `predicted_s` rounds those of a rank, but for its slots, and is within 1e-5 of the optimum.
  The seconds of a proven plan are the same in every run; of a plan that the limit ends on, nothing is.

  Args:
    lengths: tokens of each sample, at least 1; a dozen samples take seconds.
    config: its mode is `parents` (children equal parents) or `solve` (any plan that is legal).
    limit_s: wall-clock seconds of the search.

  Raises:
    ValueError: for several domains, another mode, layers that may run by halo, rows of several tokens,
      exchanges in chunks or that meet in their whole span, no samples, or samples that do not fit one
      micro-batch, or were not made to within the limit; SampleTooLong and PlanError as `solve`.
  """
  lengths = np.asarray(lengths, np.int64)
  if costs.cluster.domains != 1:
    raise ValueError(f'ClusterConfig.domains = {costs.cluster.domains}: exact plans are of one domain')
  if config.mode not in ('parents', 'solve'):
    raise ValueError(f"PlannerConfig.mode = {config.mode!r}: exact plans are of mode 'parents' or 'solve'")
  if config.sparse_exchange != 'ulysses':
    raise ValueError(
      f"PlannerConfig.sparse_exchange = {config.sparse_exchange!r}: exact plans exchange heads; set 'ulysses'"
    )
  row_bytes = costs.cluster.wire_row_bytes
  if costs.wire.row_tokens(costs.degrees(config)[-1], row_bytes) > 1:
    raise ValueError(
      f'ClusterConfig.wire_row_bytes = {row_bytes}: exact plans are of rows of one token; set 1'
    )
  if costs.cluster.exchange_chunks > 1:
    raise ValueError(
      f'ClusterConfig.exchange_chunks = {costs.cluster.exchange_chunks}: exact plans are of whole exchanges; '
      'set 1'
    )
  if costs.cluster.span_meets:
    raise ValueError(
      'ClusterConfig.exchange_meets: exact plans are of ragged exchanges that meet in groups: set '
      "exchange = 'ragged' and exchange_meets = 'group'"
    )
  if not len(lengths):
    raise ValueError('no samples: an empty batch has no plan')
  plans = list(solve(lengths, costs, config).plans)
  program = PlanProblem(lengths, costs, config)
  if len(plans) == 1:
    _hint(program, plans[0])
  else:
    plans = []
  solver = cp_model.CpSolver()
  solver.parameters.random_seed = 0
  solver.parameters.num_workers = num_search_workers
  solver.parameters.max_time_in_seconds = limit_s
  solver.parameters.relative_gap_limit = _STOP
  # On, this presolve step of OR-tools 9.15 loses optima and proves worse ones (google/or-tools issue 5293).
  solver.parameters.presolve_inclusion_work_limit = 0
  status = solver.solve(program.model)
  if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
    plans.append(_plan(program, solver).validate(costs.wire))
  if not plans:
    why = 'do not fit' if status == cp_model.INFEASIBLE else f'were not made to fit within {limit_s:g} s'
    raise ValueError(f'{len(lengths)} samples of {lengths.sum()} tokens {why} into one micro-batch')
  best = min(plans, key=lambda plan: predicted_s(plan, costs))
  # A claim above what is at hand would be such a lost optimum.
  right = solver.objective_value * program.unit_s <= predicted_s(best, costs) * (1 + 2 * _STOP)
  return best, status == cp_model.OPTIMAL and right


def _hint(program: PlanProblem, plan: Plan) -> None:
  """Starts the search from a plan, turned into the one that the program's symmetry breaking leaves of it."""
  number = {int(sample): s for s, sample in enumerate(program.order)}
  children, parents = ([Block(g.first_rank, g.size) for g in of] for of in (plan.children, plan.parents))
  home: dict[int, tuple[Block, bool]] = {}  # of each sample, and whether it is solo there
  for group in (*plan.children, *plan.solo):
    block = Block(group.first_rank, group.size)
    solo = group in plan.solo and block not in parents
    home |= {number[sample]: (block, solo) for sample in group.samples}
  before: dict[int, tuple[Block, bool]] = {}
  while home != before:
    before = dict(home)
    order = _left_first(Block(0, plan.num_ranks), {s: block for s, (block, _) in home.items()})
    place = {rank: i for i, rank in enumerate(order)}
    children, parents = ([_moved(b, place) for b in blocks] for blocks in (children, parents))
    home = {s: (_moved(block, place), solo) for s, (block, solo) in home.items()}
    for length in set(program.tokens):
      equal = [s for s in program.samples if program.tokens[s] == length]
      home |= zip(equal, sorted(home[s] for s in equal), strict=True)
  values = {program.solo[key]: home[key[0]] == (Block(key[1], 1), True) for key in program.solo}
  for groups, blocks in ((program.children, children), (program.parents, parents)):
    values |= {groups.chosen[b]: b in blocks for b in program.blocks}
    values |= {
      way: b in blocks and b.holds(home[s][0]) and not home[s][1] for (s, b), way in groups.member.items()
    }
  for variable, value in values.items():
    program.model.add_hint(variable, value)


def _left_first(block: Block, home: dict[int, Block]) -> list[int]:
  """The block's ranks, halves swapped wherever the right one holds a sample before the left one does."""
  if block.size == 1:
    return [block.first]
  halves = [
    (min((s for s, inside in home.items() if half.holds(inside)), default=len(home)), half)
    for half in block.halves
  ]
  return [rank for _, half in sorted(halves) for rank in _left_first(half, home)]


def _moved(block: Block, place: dict[int, int]) -> Block:
  """Where a block lies once each rank is at its place; its ranks stay together."""
  return Block(min(place[rank] for rank in block.ranks), block.size)


def _plan(program: PlanProblem, solver: cp_model.CpSolver) -> Plan:
  """What the solver found, as `solve` builds plans."""
  children, parents = (
    sorted(b for b in program.blocks if solver.boolean_value(groups.chosen[b]))
    for groups in (program.children, program.parents)
  )
  held: dict[Block, list[int]] = {c: [] for c in children}
  for (s, b), member in program.children.member.items():
    if solver.boolean_value(member):
      held[b].append(int(program.order[s]))
  alone: dict[int, list[int]] = {}
  for (s, rank), way in program.solo.items():
    if solver.boolean_value(way):
      alone.setdefault(rank, []).append(int(program.order[s]))
  cluster, config = program.costs.cluster, program.config
  plan = Plan(
    sample_ids=tuple(range(len(program.lengths))),
    lengths=tuple(program.lengths.tolist()),
    parents=tuple(Group(*p, tuple(s for c in children if p.holds(c) for s in held[c])) for p in parents),
    children=tuple(Group(*c, tuple(held[c])) for c in children),
    mode=config.mode,
    capacity_tokens=config.capacity_tokens,
    num_ranks=cluster.num_ranks,
    domain_ranks=cluster.domain_ranks,
    ranks_per_node=cluster.ranks_per_node,
    solo=tuple(Group(rank, 1, tuple(samples)) for rank, samples in sorted(alone.items())),
  )
  return plan.with_slots(config.capacity_step_tokens)
