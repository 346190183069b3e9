"""The plan of one micro-batch: which ranks hold which samples, in each of its two layouts.

Two rules give everything else in closed form:

1. A child's stream is its samples end to end; its i-th rank of c holds `stream[i*n//c : (i+1)*n//c]`.
2. A parent's stream is its children's streams end to end, in rank order.

So what a rank holds of them is one contiguous run of its child's stream and of its parent's. Behind it a
rank may hold *solo* samples, whole ones that take no part in any exchange. NumPy only: this module imports
without JAX.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from repack_jax.plan.wire import Wire

# The two layouts of a plan: whose groups of ranks the exchanges of a layer span.
PARENTS, CHILDREN = 'parents', 'children'
LAYOUTS = (PARENTS, CHILDREN)
SOLO = 'solo'
# A halo comes from this many ranks at most; where a plan would need more, its layers exchange heads.
MOST_HALO_HOPS = 4


class PlanError(ValueError):
  """A plan that breaks a rule; names the sample or group, and the rule."""


@dataclass(frozen=True, order=True)
class Group:
  """An aligned block of `size` consecutive ranks and the samples whose tokens it holds, in stream order.

  `samples` are positions in the plan's `lengths`.
  """

  first_rank: int
  size: int
  samples: tuple[int, ...] = ()

  @property
  def end_rank(self) -> int:
    return self.first_rank + self.size

  @property
  def ranks(self) -> range:
    return range(self.first_rank, self.end_rank)

  def __str__(self) -> str:
    return f'SP{self.size} on ranks {self.first_rank}..{self.end_rank - 1}'


@dataclass(frozen=True)
class Placement:
  """Each rank's group in one layout, and its place in it. All arrays int64 of shape [num_ranks].

  Attributes:
    first_rank, size: the group that the rank belongs to.
    slots: what the rank holds of its group's stream (the same in both layouts of a plan).
    stream_start: position of the rank's first slot in its group's stream.
  """

  first_rank: np.ndarray
  size: np.ndarray
  slots: np.ndarray
  stream_start: np.ndarray


@dataclass(frozen=True)
class Plan:
  """Who holds what in one micro-batch. Frozen and hashable; `validate()` checks every rule.

  Attributes:
    sample_ids: for each sample of this micro-batch, its position in the batch.
    lengths: tokens of each sample, in the order of sample_ids.
    parents: groups that run the attention of layers in the parents' layout; they tile all ranks.
    children: groups that hold the tokens, and run everything else; they tile all ranks.
    mode: the mode that made the plan.
    capacity_tokens: token slots of a rank.
    num_ranks, domain_ranks, ranks_per_node: the mesh that the plan is for.
    solo: groups of one rank, ascending, whose samples run on it alone in every layer. They are in no parent
      and no child.
    row_tokens: a child's ranks hold multiples of so many slots, so that what they send fills whole rows on
      the wire (`Wire.row_tokens`). The slots past a child's last token are padding.
    halo_tokens: layers in the children's layout run by halo, each rank on its own tokens, with so many more
      at most that come ahead of them in its child's stream; None where they exchange heads as all others do.
  """

  sample_ids: tuple[int, ...]
  lengths: tuple[int, ...]
  parents: tuple[Group, ...]
  children: tuple[Group, ...]
  mode: str
  capacity_tokens: int
  num_ranks: int
  domain_ranks: int
  ranks_per_node: int
  solo: tuple[Group, ...] = ()
  row_tokens: int = 1
  halo_tokens: int | None = None

  @cached_property
  def sample_tokens(self) -> np.ndarray:
    """Returns `lengths` as an array, int64 [samples]."""
    return np.array(self.lengths, np.int64)

  @cached_property
  def rank_tokens(self) -> np.ndarray:
    """Returns the tokens each rank holds, int64 [num_ranks]."""
    tokens = self.shared_tokens.copy()
    first = np.array([group.first_rank for group in self.solo], np.int64)
    tokens[first] += self.group_sums(SOLO, self.sample_tokens).astype(np.int64)
    return tokens

  @cached_property
  def rank_slots(self) -> np.ndarray:
    """Returns the slots each rank fills: its tokens and the padding at its child's end, int64 [num_ranks]."""
    return self.rank_tokens + self.shared_slots - self.shared_tokens

  @cached_property
  def shared_tokens(self) -> np.ndarray:
    """Returns the tokens each rank holds of its child's stream, int64 [num_ranks], by rule 1."""
    first, sizes = np.array([(child.first_rank, child.size) for child in self.children], np.int64).T
    totals = self.group_sums(CHILDREN, self.sample_tokens).astype(np.int64)
    total, size = np.repeat(totals, sizes), np.repeat(sizes, sizes)
    place = np.arange(len(size)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rows = -(-total // self.row_tokens)
    edges = (np.minimum((place + i) * rows // size * self.row_tokens, total) for i in range(2))
    tokens = np.zeros(self.num_ranks, np.int64)
    tokens[np.repeat(first, sizes) + place] = -np.subtract(*edges)
    return tokens

  @cached_property
  def shared_slots(self) -> np.ndarray:
    """Returns the slots that each rank's share of its child's stream takes, whole rows: int64 [num_ranks]."""
    return -(-self.shared_tokens // self.row_tokens) * self.row_tokens

  def halo_hops(self, halo_tokens: int) -> int:
    """Returns how many ranks ahead of it a rank gets its halo from, at most.

    A halo has no more than `halo_tokens`, and none of another sample than the rank's first token.
    """
    starts = np.cumsum(self.shared_tokens) - self.shared_tokens  # of all children's streams, end to end
    samples, _ = self.members[CHILDREN]
    begins = np.cumsum(self.sample_tokens[samples]) - self.sample_tokens[samples]
    holding = np.flatnonzero(self.shared_tokens)
    if not holding.size:
      return 0
    own = starts[holding]
    sample_start = begins[np.searchsorted(begins, own, side='right') - 1]
    reached = np.searchsorted(starts, np.maximum(sample_start, own - halo_tokens), side='right') - 1
    return int((holding - reached).max())

  def with_slots(self, step_tokens: int) -> Plan:
    """Returns the plan with as many slots a rank as its fullest needs, in multiples of `step_tokens`.

    Never more than it has; 0 leaves them as they are.
    """
    if not step_tokens:
      return self
    step_tokens = math.lcm(step_tokens, self.row_tokens)
    needed = -(-int(self.rank_slots.max()) // step_tokens) * step_tokens
    return self._with(capacity_tokens=min(self.capacity_tokens, needed))

  def with_samples(self, sample_ids: Sequence[int]) -> Plan:
    """Returns the plan for other samples of the same lengths."""
    return self._with(sample_ids=tuple(sample_ids))

  def with_halo(self, halo_tokens: int | None) -> Plan:
    """Returns the plan with layers in the children's layout run by halo, or without."""
    return self if halo_tokens == self.halo_tokens else self._with(halo_tokens=halo_tokens)

  def with_mode(self, mode: str) -> Plan:
    """Returns the plan as one of another mode."""
    return self if mode == self.mode else self._with(mode=mode)

  def _with(self, **changes: Any) -> Plan:
    """The plan with changes that leave who holds what as it is, which need not be counted again."""
    changed = dataclasses.replace(self, **changes)
    for name in ('shared_tokens', 'shared_slots', 'rank_tokens', 'rank_slots', 'sample_tokens', 'members'):
      if name in vars(self):
        vars(changed)[name] = vars(self)[name]
    return changed

  def groups(self, layout: str) -> tuple[Group, ...]:
    """Returns the groups of a layout, or the solo ones."""
    return {PARENTS: self.parents, CHILDREN: self.children, SOLO: self.solo}[layout]

  def group_sums(self, layout: str, values: np.ndarray) -> np.ndarray:
    """Returns each group's sum of its samples' values, [samples] -> float64 [groups]; exact below 2 ** 53."""
    samples, of = self.members[layout]
    sums = np.bincount(of, values[samples], len(self.groups(layout)))
    return sums.astype(np.float64, copy=False)  # integers where there are no samples

  @cached_property
  def members(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns (samples in order, the group of each) of each layout's and the solo groups: int64 [samples]."""
    members = {}
    for layout in (*LAYOUTS, SOLO):
      groups = self.groups(layout)
      counts = [len(group.samples) for group in groups]
      samples = np.fromiter(chain.from_iterable(group.samples for group in groups), np.int64, sum(counts))
      members[layout] = samples, np.repeat(np.arange(len(groups)), counts)
    return members

  def placement(self, layout: str) -> Placement:
    """Returns each rank's group in a layout, and its place in it."""
    first, size = np.zeros(self.num_ranks, np.int64), np.ones(self.num_ranks, np.int64)
    for group in self.groups(layout):
      first[group.first_rank : group.end_rank] = group.first_rank
      size[group.first_rank : group.end_rank] = group.size
    before = np.concatenate([[0], np.cumsum(self.shared_slots)])
    start = before[np.arange(self.num_ranks)] - before[first]
    return Placement(first, size, self.shared_slots, start)

  def degrees(self, layout: str) -> tuple[int, ...]:
    """Returns the SP degrees of a layout's groups that hold samples, ascending; 1 alone where none do."""
    return tuple(sorted({group.size for group in self.groups(layout) if group.samples})) or (1,)

  def widest(self, layout: str) -> int:
    """Returns the SP degree of the widest group of a layout that holds samples."""
    return self.degrees(layout)[-1]

  def span(self, layout: str) -> int:
    """Returns the ranks that exchanges of a layout span: a node's where none of its groups needs more."""
    return self.ranks_per_node if self.widest(layout) <= self.ranks_per_node else self.domain_ranks

  @property
  def total_tokens(self) -> int:
    return sum(self.lengths)

  @property
  def imbalance(self) -> float:
    """Returns the largest over the mean tokens of a rank; 1.0 is perfect."""
    return float(self.rank_tokens.max() / max(self.rank_tokens.mean(), 1e-9)) if self.lengths else 1.0

  def child_sizes(self) -> dict[int, int]:
    """Returns how many children that hold tokens there are of each SP degree."""
    return dict(sorted(Counter(child.size for child in self.children if child.samples).items()))

  def digest(self) -> str:
    """Returns a hash of the whole plan, the same on every host and in every process."""
    digest = hashlib.sha256(self.mode.encode())
    numbers = (self.capacity_tokens, self.num_ranks, self.domain_ranks, self.ranks_per_node, self.row_tokens)
    parts: list[Sequence[int]] = [numbers, self.sample_ids, self.lengths]
    for groups in (self.parents, self.children, self.solo):
      parts.append([n for group in groups for n in (group.first_rank, group.size, len(group.samples))])
      parts.append([s for group in groups for s in group.samples])
    if self.halo_tokens is not None:
      parts.append([self.halo_tokens])
    for part in parts:
      digest.update(np.array((len(part), *part), '<i8').tobytes())
    return digest.hexdigest()[:16]

  def validate(self, wire: Wire | None = None) -> Plan:
    """Returns the plan itself; raises PlanError naming the sample or group and the rule it breaks.

    Args:
      wire: heads that the groups must be able to share, where they are known.
    """
    _check_lengths(self)
    _check_solo(self)
    for name, groups in (('parent', self.parents), ('child', self.children)):
      _check_tiling(self, name, groups)
      _check_samples(self, name, groups)
      for group in groups:
        for heads in wire.operand_heads if wire else ():
          if heads % group.size and group.size % heads:
            raise PlanError(f'{name} {group}: its size fits neither way with {heads} heads')
        if wire and wire.result_heads % group.size:
          raise PlanError(f'{name} {group}: its size does not divide the {wire.result_heads} query heads')
    _check_nesting(self)
    if self.capacity_tokens % self.row_tokens:
      raise PlanError(f'a capacity of {self.capacity_tokens} is not a multiple of {self.row_tokens} tokens')
    over = np.flatnonzero(self.rank_slots > self.capacity_tokens)
    if over.size:
      rank = int(over[0])
      raise PlanError(
        f'rank {rank} holds {self.rank_slots[rank]} tokens, over its capacity of {self.capacity_tokens}'
      )
    return self

  def table(self) -> str:
    """Returns the plan as text for people: parents, and inside each its children."""
    lines = [
      f'plan {self.digest()}: mode {self.mode}, {len(self.lengths)} samples, {self.total_tokens} tokens on '
      f'{self.num_ranks} ranks x {self.capacity_tokens} slots, imbalance {self.imbalance:.3f}',
      f'{"group":<28}{"samples":>8}{"tokens":>9}{"a rank":>8}{"longest":>9}',
    ]
    empty = sum(parent.size for parent in self.parents if not parent.samples)
    for parent in self.parents:
      if not parent.samples:
        continue
      lines.append(self._row('parent', parent))
      inside = [c for c in self.children if parent.first_rank <= c.first_rank < parent.end_rank]
      if inside != [parent]:
        lines += [self._row('  child', child) for child in inside]
    if empty:
      lines.append(f'{f"in no group: {empty} ranks":<28}')
    if self.halo_tokens is not None:
      hops = self.halo_hops(self.halo_tokens)
      ranks = f'{hops} rank{"" if hops == 1 else "s"}'
      lines.append(f"children's layers by halo: up to {self.halo_tokens} tokens of the {ranks} before")
    if self.solo:
      lengths = [self.lengths[s] for group in self.solo for s in group.samples]
      most = int((self.rank_tokens - self.shared_tokens).max())
      label = f'solo on {len(self.solo)} rank{"" if len(self.solo) == 1 else "s"}'
      lines.append(f'{label:<28}{len(lengths):>8}{sum(lengths):>9}{most:>8}{max(lengths):>9}')
    return '\n'.join(lines)

  def _row(self, name: str, group: Group) -> str:
    lengths = [self.lengths[s] for s in group.samples]
    most = int(self.shared_tokens[group.first_rank : group.end_rank].max())
    label = f'{name} SP{group.size} @{group.first_rank}'
    return f'{label:<28}{len(lengths):>8}{sum(lengths):>9}{most:>8}{max(lengths, default=0):>9}'


def _check_lengths(plan: Plan) -> None:
  if len(plan.sample_ids) != len(plan.lengths):
    raise PlanError(f'{len(plan.sample_ids)} sample ids for {len(plan.lengths)} lengths')
  if len(set(plan.sample_ids)) != len(plan.sample_ids):
    twice = next(s for s, n in Counter(plan.sample_ids).items() if n > 1)
    raise PlanError(f'sample {twice} is in the plan more than once')
  if min(plan.lengths, default=1) < 1:
    sample = plan.lengths.index(min(plan.lengths))
    raise PlanError(
      f'sample {plan.sample_ids[sample]} has length {plan.lengths[sample]}; lengths are at least 1 token'
    )


def _check_tiling(plan: Plan, name: str, groups: Sequence[Group]) -> None:
  """Groups are aligned powers of two inside a domain, cover every rank once, hold every sample once."""
  rank = 0
  for group in groups:
    if group.size < 1 or group.size & (group.size - 1):
      raise PlanError(f'{name} {group}: its size is not a power of two')
    if group.size > plan.domain_ranks:
      raise PlanError(f'{name} {group}: wider than a domain of {plan.domain_ranks} ranks')
    if group.first_rank % group.size:
      raise PlanError(f'{name} {group}: its first rank is not a multiple of its size')
    if group.first_rank != rank:
      raise PlanError(f'{name} {group}: expected to start at rank {rank}; groups tile the ranks in order')
    rank = group.end_rank
  if rank != plan.num_ranks:
    raise PlanError(f'the {name} groups end at rank {rank} of {plan.num_ranks}')


def _check_samples(plan: Plan, name: str, groups: Sequence[Group]) -> None:
  """Every sample is in one of these groups, or solo."""
  held = np.array([s for group in (*groups, *plan.solo) for s in group.samples], np.int64)
  if held.size and not 0 <= held.min() <= held.max() < len(plan.lengths):
    raise PlanError(f'a {name} group names a sample that the plan does not have')
  times = np.bincount(held, minlength=len(plan.lengths))
  if (times != 1).any():
    sample = int(np.argmax(times != 1))
    raise PlanError(
      f'sample {plan.sample_ids[sample]} is in {times[sample]} {name} or solo groups; it must be in one'
    )


def _check_solo(plan: Plan) -> None:
  """Solo groups are single ranks, each at most once, and only in a mode that knows them."""
  before = -1
  for group in plan.solo:
    if group.size != 1 or not before < group.first_rank < plan.num_ranks:
      raise PlanError(f'solo {group}: must be one rank of {plan.num_ranks}, in ascending order')
    before = group.first_rank
  if plan.solo and plan.mode not in ('parents_solo', 'solve'):
    raise PlanError(f'mode {plan.mode}: only plans of modes parents_solo and solve have solo samples')


def _check_nesting(plan: Plan) -> None:
  """Children lie inside parents, parents' streams are their children's, and children inside nodes."""
  children = iter(plan.children)
  for parent in plan.parents:
    rank = parent.first_rank
    stream: list[int] = []
    while rank < parent.end_rank:
      child = next(children)
      if child.end_rank > parent.end_rank:
        raise PlanError(f'child {child} is not inside parent {parent}')
      stream += child.samples
      rank = child.end_rank
      if child.size > plan.ranks_per_node and (child.first_rank, child.size) != (
        parent.first_rank,
        parent.size,
      ):
        raise PlanError(
          f'child {child} spans nodes of {plan.ranks_per_node} ranks; only a parent that keeps the wide '
          "layout in the children's layers may"
        )
    if tuple(stream) != parent.samples:
      raise PlanError(f"parent {parent}: its stream is not its children's streams end to end")
  if plan.mode in ('static', 'parents', 'parents_solo') and plan.parents != plan.children:
    raise PlanError(f'mode {plan.mode}: children must equal parents')
