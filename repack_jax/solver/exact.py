"""The best plan of a small batch, found by CP-SAT: what the fast planner is measured against.

This alone needs OR-tools (`pip install ortools`); nothing else of the package imports it. Seconds as the
solver sees them are whole units of about 1e-9 of the result, and it stops within a relative 1e-5.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from repack_jax.cluster import ClusterConfig
from repack_jax.config import FULL, SPARSE, ModelConfig, PlannerConfig, allowed_sp_degrees
from repack_jax.cost import ATTENTION_BACKWARD_OVER_FORWARD, CostModel, bytes_per_peer
from repack_jax.plan import Group, Plan
from repack_jax.solver.bounds import lower_bound_s
from repack_jax.solver.solve import solve
from repack_jax.timing import predicted_s

_UNITS = 1e9  # what the bound is worth
_STOP = 1e-5
_MOST_UNITS = 1 << 44  # of one pass of one layer; times the layers it stays far inside int64


def exact(
  lengths: Sequence[int] | np.ndarray,
  cluster: ClusterConfig,
  model: ModelConfig,
  config: PlannerConfig,
  limit_s: float = 60.0,
  num_search_workers: int = 2,
) -> tuple[Plan, bool]:
  """The best plan of a batch in one micro-batch of one domain, by `timing.predicted_s`; whether it is proven.

  It is at most as slow as what `solve` finds, which the search starts from. What is proven has tokens as
  divisible where `predicted_s` rounds those of a rank; slots are whole here too. How long a proven optimum
  takes is the same in every run; of a plan that the limit ends on, nothing is.

  Args:
    lengths: tokens of each sample, at least 1; a dozen samples take seconds.
    config: its mode is `parents` (children equal parents) or `solve`.
    limit_s: wall-clock seconds of the search.

  Raises:
    ValueError: for several domains, another mode, no samples, or samples that do not fit one micro-batch,
      or were not made to within the limit; SampleTooLong and PlanError as `solve`.
  """
  lengths = np.asarray(lengths, np.int64)
  if cluster.domains != 1:
    raise ValueError(f'ClusterConfig.domains = {cluster.domains}: exact plans are of one domain')
  if config.mode not in ('parents', 'solve'):
    raise ValueError(f"PlannerConfig.mode = {config.mode!r}: exact plans are of mode 'parents' or 'solve'")
  if not len(lengths):
    raise ValueError('no samples: an empty batch has no plan')
  plans = solve(lengths, cluster, model, config)
  cost = CostModel(cluster, model)
  program = _Program(lengths, cost, config)
  if len(plans) == 1:
    program.hint(plans[0])
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
    plans.append(program.plan(solver).validate(model.num_heads, model.num_kv_heads))
  if not plans:
    why = 'do not fit' if status == cp_model.INFEASIBLE else f'were not made to fit within {limit_s:g} s'
    raise ValueError(f'{len(lengths)} samples of {lengths.sum()} tokens {why} into one micro-batch')
  best = min(plans, key=lambda plan: predicted_s(plan, cost))
  # A claim above what is at hand would be such a lost optimum.
  right = solver.objective_value * program.unit_s <= predicted_s(best, cost) * (1 + 2 * _STOP)
  return best, status == cp_model.OPTIMAL and right


class _Block(NamedTuple):
  """An aligned power-of-two block of ranks."""

  first: int
  size: int

  @property
  def ranks(self) -> range:
    return range(self.first, self.first + self.size)

  @property
  def halves(self) -> tuple[_Block, _Block]:
    half = self.size // 2
    return _Block(self.first, half), _Block(self.first + half, half)

  def holds(self, other: _Block) -> bool:
    return self.first <= other.first and other.first + other.size <= self.first + self.size

  def moved(self, place: dict[int, int]) -> _Block:
    """Where the block lies once each rank is at its place; its ranks stay together."""
    return _Block(min(place[rank] for rank in self.ranks), self.size)


class _Groups(NamedTuple):
  """Which blocks are groups of a layer kind, and in which block a sample is."""

  chosen: dict[_Block, cp_model.IntVar]
  member: dict[tuple[int, _Block], cp_model.IntVar]


class _Program:
  """Blocks chosen as children and parents, samples put in them, and the seconds of `timing.predicted_s`.

  Samples are numbered longest first. A block that is not chosen takes no time, so the times of all blocks
  around a rank add up to that of its group. That sum, rather than each block alone, bounds a layer: this is
  what makes the linear relaxation good.
  """

  def __init__(self, lengths: np.ndarray, cost: CostModel, config: PlannerConfig):
    self.lengths, self.cost, self.config = lengths, cost, config
    self.order = np.argsort(-lengths, kind='stable')
    self.tokens = [int(tokens) for tokens in lengths[self.order]]
    self.samples = range(len(lengths))
    self.ranks = range(cost.cluster.domain_ranks)
    degrees = allowed_sp_degrees(cost.cluster, cost.model, config)
    self.blocks = [_Block(first, size) for size in degrees for first in self.ranks[::size]]
    self.around = [[b for b in self.blocks if rank in b.ranks] for rank in self.ranks]
    self.model = cp_model.CpModel()
    self.children = self._groups('child')
    self.parents = self._groups('parent') if config.mode == 'solve' else self.children
    for b in self.blocks:
      held = sum(self.tokens[s] * self.children.member[s, b] for s in self.samples)
      self.model.add(held <= b.size * config.capacity_tokens * self.children.chosen[b])
    if self.parents is not self.children:
      self._nest()
    self._break_symmetry()
    self._minimize()

  # --- which groups, and who is in them -----------------------------------------------------------------

  def _groups(self, name: str) -> _Groups:
    """Blocks that tile the ranks, each sample in one. An empty one has one rank: then it costs nothing."""
    chosen = {b: self.model.new_bool_var(f'{name}{b}') for b in self.blocks}
    member = {(s, b): self.model.new_bool_var(f'{name}{b}{s}') for s in self.samples for b in self.blocks}
    for around in self.around:
      self.model.add_exactly_one(chosen[b] for b in around)
    for s in self.samples:
      self.model.add_exactly_one(member[s, b] for b in self.blocks)
    for b in self.blocks:
      for s in self.samples:
        self.model.add_implication(member[s, b], chosen[b])
      if b.size > 1:
        self.model.add_bool_or([~chosen[b], *(member[s, b] for s in self.samples)])
    return _Groups(chosen, member)

  def _nest(self) -> None:
    """Children lie in parents, which hold their samples; one wider than a node is its parent."""
    model, parent, child = self.model, self.parents.chosen, self.children.chosen
    for b in self.blocks:
      if b.size > self.cost.cluster.ranks_per_node:
        model.add_implication(child[b], parent[b])
      else:
        model.add_bool_or([~child[b], *(parent[p] for p in self.blocks if p.holds(b))])
      for s in self.samples:
        inside = [self.children.member[s, c] for c in self.blocks if b.holds(c)]
        model.add_bool_or([~self.parents.member[s, b], *inside])
        for member in inside:
          model.add_bool_or([~member, ~parent[b], self.parents.member[s, b]])

  def _break_symmetry(self) -> None:
    """Halves of an aligned block can change places, and so can samples of one length.

    Of all plans that this makes of one, take the one whose list of the samples' children's first ranks is
    lexicographically least. In each aligned block, the first sample that lies in one half lies in the left
    one, or it would be less with the halves swapped; and equal samples are in order of rank.
    """
    member = self.children.member
    for size in (2**i for i in range(1, len(self.ranks).bit_length())):
      for first in self.ranks[::size]:
        left, right = ([b for b in self.blocks if half.holds(b)] for half in _Block(first, size).halves)
        earlier: list[cp_model.IntVar] = []
        for s in self.samples:
          for b in right:
            self.model.add_bool_or([~member[s, b], *earlier])
          earlier += [member[s, b] for b in left]
    for s in self.samples[1:]:
      if self.tokens[s] == self.tokens[s - 1]:
        before, rank = (sum(b.first * member[i, b] for b in self.blocks) for i in (s - 1, s))
        self.model.add(before <= rank)

  # --- seconds, in units --------------------------------------------------------------------------------

  def _minimize(self) -> None:
    cost, model = self.cost, self.cost.model
    layers = range(model.num_layers)
    both = 1 + cost.linear_backward
    slot_s = both * sum(cost.before_s() + cost.after_s(layer) for layer in layers) + 3 * cost.logits_s()
    # A unit that divides the seconds of a slot: the others are of whole samples and round well.
    slot_units = max(
      1, round(slot_s / lower_bound_s(self.lengths, cost.cluster, model, self.config) * _UNITS)
    )
    self.unit_s = slot_s / slot_units
    total: cp_model.LinearExpr = slot_units * self._slots()
    exchange = {
      FULL: {p: self._exchange(p) for p in self.blocks},
      SPARSE: {b: self._even_exchange(self.children, b) for b in self.blocks},
    }
    experts = self._experts() if model.num_experts else {}
    sorts = Counter((kind, model.has_experts(layer)) for layer, kind in enumerate(model.layer_kinds))
    for (kind, has_experts), count in sorts.items():
      for backward in (False, True):
        attention = self._attention(kind, backward, exchange[kind])
        meets = [cp_model.LinearExpr.sum([attention[b] for b in around]) for around in self.around]
        if has_experts:
          meets = [a + b for a, b in zip(meets, experts[backward], strict=True)]
        total += count * self._largest(f'{kind}{has_experts}{backward}', meets)
    self.model.minimize(total)

  def _units(self, seconds: float) -> int:
    return round(seconds / self.unit_s)

  def _largest(self, name: str, expressions: Iterable[cp_model.LinearExpr]) -> cp_model.IntVar:
    variable = self.model.new_int_var(0, _MOST_UNITS, name)
    for expression in expressions:
      self.model.add(variable >= expression)
    return variable

  def _slots(self) -> cp_model.IntVar:
    """Token slots of a rank, as `solve` rounds them."""
    capacity, step = self.config.capacity_tokens, self.config.capacity_step_tokens
    if not step:
      return self.model.new_constant(capacity)
    steps = self.model.new_int_var(0, -(-capacity // step), 'steps')
    slots = self.model.new_int_var(0, capacity, 'slots')
    self.model.add_min_equality(slots, [step * steps, capacity])
    widest = self.blocks[-1].size
    for around in self.around:
      terms = (
        (widest // b.size * self.tokens[s], self.children.member[s, b]) for b in around for s in self.samples
      )
      self.model.add(widest * slots >= sum(tokens * member for tokens, member in terms))
    return slots

  def _held(self, ranks: Iterable[int], token_s: float) -> cp_model.LinearExpr:
    """Tokens that these ranks hold, at so many seconds each."""
    wanted = set(ranks)
    terms = []
    for b in self.blocks:
      if share := len(wanted.intersection(b.ranks)) / b.size:
        terms += [
          (self.children.member[s, b], self._units(share * self.tokens[s] * token_s)) for s in self.samples
        ]
    return cp_model.LinearExpr.weighted_sum([member for member, _ in terms], [units for _, units in terms])

  def _even_exchange(self, groups: _Groups, b: _Block) -> cp_model.LinearExpr:
    """Both exchanges of a group whose ranks hold the same, without latency."""
    units = [self._units(tokens * self.cost.exchange_s(b.size) / b.size) for tokens in self.tokens]
    return cp_model.LinearExpr.weighted_sum([groups.member[s, b] for s in self.samples], units)

  def _exchange(self, p: _Block) -> cp_model.LinearExpr:
    """Both exchanges of a parent, without latency: what its ranks send or receive at most, as in `timing`."""
    cluster, node = self.cost.cluster, self.cost.cluster.ranks_per_node
    even = self._even_exchange(self.parents, p)  # the mean, so never more
    if p.size == 1 or self.parents is self.children:
      return even
    sent = float(bytes_per_peer(self.cost.model, p.size))
    everyone = frozenset(p.ranks)
    moves: dict[tuple[frozenset[int], float], None] = {}  # (whose tokens, seconds of each), each once
    for rank in p.ranks:
      near = everyone.intersection(range(rank - rank % node, rank - rank % node + node))
      moves[frozenset([rank]), self.cost.exchange_s(p.size)] = None
      moves[near - {rank}, sent / cluster.intra_node_bytes_per_s] = None
      moves[everyone - near, sent / cluster.inter_node_bytes_per_s] = None
    seconds = self._largest(f'exchange{p}', [even])
    for ranks, token_s in moves:
      self.model.add(seconds >= self._held(ranks, token_s)).only_enforce_if(self.parents.chosen[p])
    return seconds

  def _attention(
    self, kind: str, backward: bool, exchange: dict[_Block, cp_model.LinearExpr]
  ) -> dict[_Block, cp_model.LinearExpr]:
    """Attention of each block in one pass of a layer."""
    groups = self.parents if kind == FULL else self.children
    core_s = self.cost.attention_s(np.array(self.tokens), kind).tolist()
    times = {}
    for b in self.blocks:
      share = (ATTENTION_BACKWARD_OVER_FORWARD if backward else 1.0) / b.size
      members = [groups.member[s, b] for s in self.samples]
      core = cp_model.LinearExpr.weighted_sum(members, [self._units(share * s) for s in core_s])
      times[b] = core + exchange[b] + self._units(self.cost.exchange_latency_s(b.size)) * groups.chosen[b]
    return times

  def _experts(self) -> dict[bool, list[cp_model.LinearExpr]]:
    """backward -> what each rank waits for beside attention in a layer with experts, one pass."""
    cost, node = self.cost, self.cost.cluster.ranks_per_node
    spread = cost.expert_ranks > 1
    token_s = 2 * cost.expert_bytes_per_token() / cost.cluster.intra_node_bytes_per_s
    exchange: list[cp_model.LinearExpr] = []
    for first in self.ranks[::node] if spread else ():
      slowest = self._largest(
        f'experts{first}', (self._held([r], token_s) for r in range(first, first + node))
      )
      exchange += [slowest + self._units(2 * cost.cluster.intra_node_latency_s)] * node
    times = {}
    for backward in (False, True):
      # Of dense layers, which come first, it is 0.
      routed_s = cost.routed_s(cost.model.num_layers - 1) * (cost.linear_backward if backward else 1.0)
      if spread:
        nodes = [range(rank - rank % node, rank - rank % node + node) for rank in self.ranks]
        times[backward] = [
          a + self._held(ranks, routed_s / node) for a, ranks in zip(exchange, nodes, strict=True)
        ]
      else:
        times[backward] = [self._held([rank], routed_s) for rank in self.ranks]
    return times

  # --- from and to plans --------------------------------------------------------------------------------

  def hint(self, plan: Plan) -> None:
    """Starts the search from a plan, turned into the one that `_break_symmetry` leaves of it."""
    number = {int(sample): s for s, sample in enumerate(self.order)}
    blocks = {kind: [_Block(g.first_rank, g.size) for g in plan.groups(kind)] for kind in (FULL, SPARSE)}
    child_of = {number[s]: _Block(c.first_rank, c.size) for c in plan.children for s in c.samples}
    before: dict[int, _Block] = {}
    while child_of != before:
      before = dict(child_of)
      place = {rank: i for i, rank in enumerate(_left_first(_Block(0, len(self.ranks)), child_of))}
      blocks = {kind: [b.moved(place) for b in of_kind] for kind, of_kind in blocks.items()}
      for length in set(self.tokens):
        equal = [s for s in self.samples if self.tokens[s] == length]
        child_of |= zip(equal, sorted(before[s].moved(place) for s in equal), strict=True)
    for groups, of_kind in ((self.children, blocks[SPARSE]), (self.parents, blocks[FULL])):
      for b in self.blocks if groups is not self.parents or self.parents is not self.children else ():
        self.model.add_hint(groups.chosen[b], b in of_kind)
        for s in self.samples:
          self.model.add_hint(groups.member[s, b], b in of_kind and b.holds(child_of[s]))

  def plan(self, solver: cp_model.CpSolver) -> Plan:
    """What the solver found, as `solve` builds plans."""
    children, parents = (
      sorted(b for b in self.blocks if solver.boolean_value(groups.chosen[b]))
      for groups in (self.children, self.parents)
    )
    held: dict[_Block, list[int]] = {c: [] for c in children}
    for (s, b), member in self.children.member.items():
      if solver.boolean_value(member):
        held[b].append(int(self.order[s]))
    cluster, capacity, step = self.cost.cluster, self.config.capacity_tokens, self.config.capacity_step_tokens
    plan = Plan(
      sample_ids=tuple(range(len(self.lengths))),
      lengths=tuple(self.lengths.tolist()),
      parents=tuple(Group(*p, tuple(s for c in children if p.holds(c) for s in held[c])) for p in parents),
      children=tuple(Group(*c, tuple(held[c])) for c in children),
      mode=self.config.mode,
      capacity_tokens=capacity,
      num_ranks=cluster.num_ranks,
      domain_ranks=cluster.domain_ranks,
      ranks_per_node=cluster.ranks_per_node,
    )
    needed = -(-int(plan.rank_tokens.max()) // step) * step if step else capacity
    return dataclasses.replace(plan, capacity_tokens=min(capacity, needed))


def _left_first(block: _Block, child_of: dict[int, _Block]) -> list[int]:
  """The block's ranks, halves swapped wherever the right one holds a sample before the left one does."""
  if block.size == 1:
    return [block.first]
  halves = [
    (min((s for s, child in child_of.items() if half.holds(child)), default=len(child_of)), half)
    for half in block.halves
  ]
  return [rank for _, half in sorted(halves) for rank in _left_first(half, child_of)]
