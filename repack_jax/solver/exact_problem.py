"""The plans of one domain and their predicted seconds as a program for CP-SAT; `exact.py` solves it.

Seconds are whole numbers of `PlanProblem.unit_s`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from repack_jax.config.run import PlannerConfig
from repack_jax.plan.plan import CHILDREN, PARENTS
from repack_jax.predict.costs import Costs, LayerCosts
from repack_jax.solver.bounds import lower_bound_s

_UNITS = 1e9  # what the lower bound is worth
_MOST_UNITS = 1 << 44  # of one pass of one layer; times the layers it stays far inside int64


class Block(NamedTuple):
  """An aligned power-of-two block of ranks."""

  first: int
  size: int

  @property
  def ranks(self) -> range:
    return range(self.first, self.first + self.size)

  @property
  def halves(self) -> tuple[Block, Block]:
    half = self.size // 2
    return Block(self.first, half), Block(self.first + half, half)

  def holds(self, other: Block) -> bool:
    return self.first <= other.first and other.first + other.size <= self.first + self.size


class Groups(NamedTuple):
  """Which blocks are groups of a layer kind, and in which block a sample is."""

  chosen: dict[Block, cp_model.IntVar]
  member: dict[tuple[int, Block], cp_model.IntVar]


class PlanProblem:
  """Blocks chosen as children and parents, samples put in them or solo, and `predicted_s` of that.

  Samples are numbered longest first. A block that is not chosen takes no time, so the times of all blocks
  around a rank add up to that of its group. That sum, rather than each block alone, bounds a layer: this is
  what makes the linear relaxation good.

  Attributes:
    order: int64 [samples], their numbers in the batch.
    children, parents: the same object where they must be equal.
    solo: whether a sample is on a rank alone, by (sample, rank); empty where the mode does not allow it.
  """

  def __init__(self, lengths: np.ndarray, costs: Costs, config: PlannerConfig):
    self.lengths, self.costs, self.config = lengths, costs, config
    self.order = np.argsort(-lengths, kind='stable')
    self.tokens = [int(tokens) for tokens in lengths[self.order]]
    self.samples = range(len(lengths))
    self.ranks = range(costs.cluster.domain_ranks)
    degrees = costs.degrees(config)
    self.blocks = [Block(first, size) for size in degrees for first in self.ranks[::size]]
    self.around = [[b for b in self.blocks if rank in b.ranks] for rank in self.ranks]
    self.model = cp_model.CpModel()
    free = config.mode == 'solve'
    alone = ((s, rank) for s in self.samples for rank in self.ranks) if free else ()
    self.solo = {(s, rank): self.model.new_bool_var(f'solo{rank} {s}') for s, rank in alone}
    self.children = self._groups('child')
    self.parents = self._groups('parent') if free else self.children
    if free:
      self._nest()
    self._break_symmetry()
    self._minimize()

  # --- which groups, and who is in them -----------------------------------------------------------------

  def _groups(self, name: str) -> Groups:
    """Blocks that tile the ranks, each sample in one or solo. Empty ones have one rank, which is free."""
    chosen = {b: self.model.new_bool_var(f'{name}{b}') for b in self.blocks}
    member = {(s, b): self.model.new_bool_var(f'{name}{b} {s}') for s in self.samples for b in self.blocks}
    for around in self.around:
      self.model.add_exactly_one(chosen[b] for b in around)
    for s in self.samples:
      alone = [self.solo[s, rank] for rank in self.ranks] if self.solo else []
      self.model.add_exactly_one([*alone, *(member[s, b] for b in self.blocks)])
    for b in self.blocks:
      for s in self.samples:
        self.model.add_implication(member[s, b], chosen[b])
      if b.size > 1:
        self.model.add_bool_or([~chosen[b], *(member[s, b] for s in self.samples)])
    return Groups(chosen, member)

  def _nest(self) -> None:
    """Children lie in parents, which hold their samples; one wider than a node is its parent."""
    model, parent, child = self.model, self.parents.chosen, self.children.chosen
    for b in self.blocks:
      if b.size > self.costs.cluster.ranks_per_node:
        model.add_implication(child[b], parent[b])
      else:
        model.add_bool_or([~child[b], *(parent[p] for p in self.blocks if p.holds(b))])
      for s in self.samples:
        inside = [self.children.member[s, c] for c in self.blocks if b.holds(c)]
        model.add_bool_or([~self.parents.member[s, b], *inside])
        for member in inside:
          model.add_bool_or([~member, ~parent[b], self.parents.member[s, b]])
    for (_, rank), alone in self.solo.items():  # in a parent of one rank it would be the same
      model.add_implication(alone, ~parent[Block(rank, 1)])

  def _inside(self, s: int, block: Block) -> list[cp_model.IntVar]:
    """The ways for a sample to lie in a block."""
    alone = [self.solo[s, rank] for rank in block.ranks] if self.solo else []
    return alone + [self.children.member[s, b] for b in self.blocks if block.holds(b)]

  def _break_symmetry(self) -> None:
    """Halves of an aligned block can change places, and so can samples of one length.

    Of all plans that this makes of one, take the one whose list of the first ranks that hold each sample is
    lexicographically least. In each aligned block, the first sample that lies in one half lies in the left
    one, or it would be less with the halves swapped; and equal samples are in order of rank.
    """
    for size in (2**i for i in range(1, len(self.ranks).bit_length())):
      for first in self.ranks[::size]:
        left, right = Block(first, size).halves
        earlier: list[cp_model.IntVar] = []
        for s in self.samples:
          for way in self._inside(s, right):
            self.model.add_bool_or([~way, *earlier])
          earlier += self._inside(s, left)
    first_ranks = [
      sum(b.first * self.children.member[s, b] for b in self.blocks)
      + sum(rank * self.solo[s, rank] for rank in self.ranks if self.solo)
      for s in self.samples
    ]
    for s in self.samples[1:]:
      if self.tokens[s] == self.tokens[s - 1]:
        self.model.add(first_ranks[s - 1] <= first_ranks[s])

  # --- seconds, in units --------------------------------------------------------------------------------

  def _minimize(self) -> None:
    costs = self.costs
    # A unit that divides the seconds of a slot, if it takes any: others are of whole samples and round well.
    bound_s = lower_bound_s(self.lengths, costs, self.config)
    slot_units = max(1, round(costs.slot_s / bound_s * _UNITS)) if costs.slot_s else 0
    self.unit_s = costs.slot_s / slot_units if slot_units else bound_s / _UNITS
    total: cp_model.LinearExpr = slot_units * self._slots()
    exchange = {
      PARENTS: {p: self._exchange(p) for p in self.blocks},
      CHILDREN: {b: self._even_exchange(self.children, b) for b in self.blocks},
    }
    for number, (layer, count) in enumerate(costs.sorts.items()):
      experts = self._experts(layer) if layer.has_experts else {}
      for backward in (False, True):
        meets = self._attention(layer, backward, exchange[layer.layout])
        if layer.has_experts:
          meets = [a + b for a, b in zip(meets, experts[backward], strict=True)]
        total += count * self._largest(f'sort {number} {backward}', meets)
    self.model.minimize(total)

  def _units(self, seconds: float) -> int:
    return round(seconds / self.unit_s)

  def _largest(self, name: str, expressions: Iterable[cp_model.LinearExpr]) -> cp_model.IntVar:
    variable = self.model.new_int_var(0, _MOST_UNITS, name)
    for expression in expressions:
      self.model.add(variable >= expression)
    return variable

  def _slots(self) -> cp_model.IntVar:
    """Token slots of a rank, as `solve` rounds them; whole tokens of groups and solo samples fit in them."""
    capacity, step = self.config.capacity_tokens, self.config.capacity_step_tokens
    slots = self.model.new_int_var(0, capacity, 'slots')
    steps = self.model.new_int_var(0, -(-capacity // step) if step else 1, 'steps')
    self.model.add_min_equality(slots, [step * steps, capacity] if step else [capacity])
    widest = self.blocks[-1].size
    for rank, around in enumerate(self.around):
      shared = self.model.new_int_var(0, capacity, f'shared{rank}')
      ways = [(widest // b.size, s, self.children.member[s, b]) for b in around for s in self.samples]
      self.model.add(widest * shared >= sum(share * self.tokens[s] * way for share, s, way in ways))
      self.model.add(
        slots >= shared + sum(self.tokens[s] * self.solo[s, rank] for s in self.samples if self.solo)
      )
    return slots

  def _held(self, ranks: Iterable[int], token_s: float, with_solo: bool) -> cp_model.LinearExpr:
    """Tokens that these ranks hold of their groups, or in all, at so many seconds each."""
    wanted = set(ranks)
    shares = [(b, len(wanted.intersection(b.ranks)) / b.size) for b in self.blocks]
    terms = [
      (self.children.member[s, b], self._units(share * self.tokens[s] * token_s))
      for b, share in shares if share for s in self.samples
    ]  # fmt: skip
    if with_solo:
      terms += [
        (way, self._units(self.tokens[s] * token_s)) for (s, r), way in self.solo.items() if r in wanted
      ]
    return cp_model.LinearExpr.weighted_sum([way for way, _ in terms], [units for _, units in terms])

  def _even_exchange(self, groups: Groups, b: Block) -> cp_model.LinearExpr:
    """Both exchanges of a group whose ranks hold the same, without latency."""
    units = [self._units(tokens * self.costs.exchange_s(b.size) / b.size) for tokens in self.tokens]
    return cp_model.LinearExpr.weighted_sum([groups.member[s, b] for s in self.samples], units)

  def _exchange(self, p: Block) -> cp_model.LinearExpr:
    """Both exchanges of a parent, without latency: the most its ranks send or receive, as in `plan_times`."""
    cluster, node = self.costs.cluster, self.costs.cluster.ranks_per_node
    even = self._even_exchange(self.parents, p)  # the mean, so never more
    if p.size == 1 or self.parents is self.children:
      return even
    sent = float(self.costs.wire.bytes_per_peer(p.size))
    everyone = frozenset(p.ranks)
    moves: dict[tuple[frozenset[int], float], None] = {}  # (whose tokens, seconds of each), each once
    for rank in p.ranks:
      near = everyone.intersection(range(rank - rank % node, rank - rank % node + node))
      moves[frozenset([rank]), self.costs.exchange_s(p.size)] = None
      moves[near - {rank}, sent / cluster.intra_node_bytes_per_s] = None
      moves[everyone - near, sent / cluster.inter_node_bytes_per_s] = None
    seconds = self._largest(f'exchange{p}', [even])
    for ranks, token_s in moves:
      held = self._held(ranks, token_s, with_solo=False)
      self.model.add(seconds >= held).only_enforce_if(self.parents.chosen[p])
    return seconds

  def _attention(
    self, layer: LayerCosts, backward: bool, exchange: dict[Block, cp_model.LinearExpr]
  ) -> list[cp_model.LinearExpr]:
    """Attention of each rank in one pass of a layer: its group's and its solo samples'."""
    groups = self.parents if layer.layout == PARENTS else self.children
    factor = self.costs.attention_backward if backward else 1.0
    core_s = (factor * layer.attention_s(np.array(self.tokens))).tolist()
    of_block = {}
    for b in self.blocks:
      core = [self._units(seconds / b.size) for seconds in core_s]
      latency = self._units(2 * float(self.costs.site_latency_s(b.size))) * groups.chosen[b]
      members = [groups.member[s, b] for s in self.samples]
      of_block[b] = cp_model.LinearExpr.weighted_sum(members, core) + exchange[b] + latency
    alone = [
      [self._units(core_s[s]) * way for (s, r), way in self.solo.items() if r == rank] for rank in self.ranks
    ]
    return [
      cp_model.LinearExpr.sum([*(of_block[b] for b in around), *solo])
      for around, solo in zip(self.around, alone, strict=True)
    ]

  def _experts(self, layer: LayerCosts) -> dict[bool, list[cp_model.LinearExpr]]:
    """backward -> what each rank waits for beside attention in a layer with experts, one pass."""
    costs, node = self.costs, self.costs.cluster.ranks_per_node
    passes = ((False, layer.routed_s), (True, costs.linear_backward * layer.routed_s))
    if costs.expert_ranks == 1:
      return {way: [self._held([rank], s, with_solo=True) for rank in self.ranks] for way, s in passes}
    token_s = 2 * costs.expert_bytes_per_token / costs.cluster.intra_node_bytes_per_s
    times: dict[bool, list[cp_model.LinearExpr]] = {False: [], True: []}
    for first in self.ranks[::node]:
      ranks = range(first, first + node)
      held = (self._held([rank], token_s, with_solo=True) for rank in ranks)
      trip = self._largest(f'experts{first}', held) + self._units(2 * costs.cluster.intra_node_latency_s)
      for way, seconds in passes:
        exchanges = costs.expert_round_trips[way] * trip
        times[way] += [exchanges + self._held(ranks, seconds / node, with_solo=True)] * node
    return times
