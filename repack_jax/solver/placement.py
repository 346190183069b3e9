"""Placing samples on a block of ranks: aligned power-of-two groups, longest first, least load.

Used twice: for parents in a domain (by the seconds of whole samples) and for children in a node (by the
seconds of what runs in the children's layout).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from repack_jax.plan import Group


@dataclass
class _Open:
  """A group being filled."""

  first_rank: int
  size: int
  tokens: int = 0
  load_s: float = 0.0
  samples: list[int] = field(default_factory=list)


class _FreeRanks:
  """Aligned free blocks of ranks, split like a buddy allocator."""

  def __init__(self, first_rank: int, num_ranks: int):
    self._starts: dict[int, list[int]] = {num_ranks: [first_rank]}

  def smallest(self, size: int) -> int | None:
    """Size of the smallest free block of at least `size` ranks."""
    return min((s for s, starts in self._starts.items() if s >= size and starts), default=None)

  def take(self, size: int) -> int:
    block = self.smallest(size)
    assert block is not None, 'take() follows smallest()'
    first = min(self._starts[block])
    self._starts[block].remove(first)
    while block > size:
      block //= 2
      self._starts.setdefault(block, []).append(first + block)
    return first

  def rest(self) -> list[Group]:
    """The ranks that no sample took, as groups of one."""
    return [
      Group(rank, 1)
      for size, starts in self._starts.items()
      for first in starts
      for rank in range(first, first + size)
    ]


def place(
  samples: Sequence[int],
  lengths: Sequence[int],
  degree: dict[int, int],
  work_s: dict[int, float],
  first_rank: int,
  num_ranks: int,
  capacity_tokens: int,
) -> list[Group] | None:
  """Groups that tile `num_ranks` ranks from `first_rank` and hold all samples; None where they don't fit.

  Args:
    samples: sample numbers, indices into `lengths`.
    degree: the SP degree each sample needs at least; at most `num_ranks`.
    work_s: seconds of each sample on one rank; a group shares them evenly.
  """
  free = _FreeRanks(first_rank, num_ranks)
  groups: list[_Open] = []
  for sample in sorted(samples, key=lambda s: (-degree[s], -work_s[s], s)):
    fitting = [
      group
      for group in groups
      if group.size >= degree[sample] and group.tokens + lengths[sample] <= group.size * capacity_tokens
    ]
    best = min(fitting, key=lambda g: ((g.load_s + work_s[sample]) / g.size, g.first_rank), default=None)
    can_open = (
      free.smallest(degree[sample]) is not None and lengths[sample] <= degree[sample] * capacity_tokens
    )
    if can_open and (
      best is None or work_s[sample] / degree[sample] <= (best.load_s + work_s[sample]) / best.size
    ):
      best = _Open(free.take(degree[sample]), degree[sample])
      groups.append(best)
    if best is None:
      return None
    best.tokens += lengths[sample]
    best.load_s += work_s[sample]
    best.samples.append(sample)
  placed = [Group(g.first_rank, g.size, tuple(g.samples)) for g in groups]
  return sorted(placed + free.rest())
