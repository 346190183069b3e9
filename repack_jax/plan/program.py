"""What of a plan is compiled in, and which plans a program serves. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS, Plan, PlanError


class Program(NamedTuple):
  """What of a plan is compiled in: plans that agree in it share one program. The rest of a plan is data.

  Attributes:
    parents_span, children_span: ranks that the exchanges of each layout span, a node's or a domain's.
    parents_degrees, children_degrees: the SP degrees that the program knows in each layout, ascending. Each
      is compiled apart, and with the `dense` exchange each is sent apart too.
    capacity_tokens: token slots of a rank.
    row_tokens: ranks hold multiples of so many slots of their group's stream (`Plan.row_tokens`).
    has_solo: whether there is a core for solo samples.
    halo_tokens: as in `Plan`; None where all layers exchange heads.
    halo_hops: how many ranks ahead of it a rank gets the tokens of its halo from, at most.
  """

  parents_span: int
  children_span: int
  parents_degrees: tuple[int, ...]
  children_degrees: tuple[int, ...]
  capacity_tokens: int
  row_tokens: int
  has_solo: bool
  halo_tokens: int | None = None
  halo_hops: int = 0

  @classmethod
  def of_plan(cls, plan: Plan, degrees: Sequence[int] | None = None) -> Program:
    """Returns the program of a plan: one that knows no more than this plan needs, but for its degrees.

    Args:
      degrees: the SP degrees that plans of the run may have, ascending, so that they share programs; the
        program knows those of them that its spans hold. By default just the plan's own.

    Raises:
      PlanError: where the plan has others.
    """

    def known(layout: str) -> tuple[int, ...]:
      if degrees is None:
        return plan.degrees(layout)
      return tuple(degree for degree in degrees if degree <= plan.span(layout))

    program = cls(
      plan.span(PARENTS), plan.span(CHILDREN), known(PARENTS), known(CHILDREN), plan.capacity_tokens,
      plan.row_tokens, bool(plan.solo), plan.halo_tokens,
      0 if plan.halo_tokens is None else plan.halo_hops(plan.halo_tokens),
    )  # fmt: skip
    program.check(plan)
    return program

  def span(self, layout: str) -> int:
    """Returns the ranks that the exchanges of a layout span."""
    return self.parents_span if layout == PARENTS else self.children_span

  def degrees(self, layout: str) -> tuple[int, ...]:
    """Returns the SP degrees that the program knows in a layout, ascending."""
    return self.parents_degrees if layout == PARENTS else self.children_degrees

  def halo_slots(self, layout: str, halo_tokens: int | None) -> int | None:
    """Returns the slots of the halo that layers have; None where they exchange heads.

    Args:
      layout: that they run in.
      halo_tokens: that their queries see ahead of their own at most; None for no bound.
    """
    if layout != CHILDREN or self.halo_tokens is None or halo_tokens is None:
      return None
    if halo_tokens > self.halo_tokens:  # the hops were counted for less
      return None
    return min(halo_tokens, self.halo_hops * self.capacity_tokens)

  def serves(self, plan: Plan) -> bool:
    """Returns whether this program can run the plan."""
    try:
      self.check(plan)
    except PlanError:
      return False
    return True

  def check(self, plan: Plan) -> None:
    """Raises PlanError, with what to do, unless this program can run the plan.

    A group of a degree that the program does not know would not fail on the devices: an index into its
    branches is clamped there, and the numbers would be wrong.
    """
    for layout in LAYOUTS:
      known = self.degrees(layout)
      for degree in plan.degrees(layout):
        if degree not in known:
          names = ', '.join(f'SP{one}' for one in known)
          raise PlanError(
            f'this plan has {layout} of SP{degree}; the program knows {names} over {self.span(layout)} '
            'ranks. Make the program from this plan, or of more degrees'
          )
    if plan.rank_slots.max(initial=0) > self.capacity_tokens:
      raise PlanError(
        f'this plan fills {plan.rank_slots.max()} slots of a rank; the program has {self.capacity_tokens}. '
        'Make the program from this plan, or plan with that capacity'
      )
    if plan.row_tokens % self.row_tokens or self.capacity_tokens % self.row_tokens:
      raise PlanError(
        f'this plan has rows of {plan.row_tokens} tokens; the program sends rows of {self.row_tokens}. Plan '
        'with the wire_row_bytes that the program was made with'
      )
    if plan.solo and not self.has_solo:
      raise PlanError('this plan has solo samples; the program has no core for them: make one with has_solo')
    hops = 0 if self.halo_tokens is None else plan.halo_hops(self.halo_tokens)
    if hops > self.halo_hops:
      raise PlanError(
        f'in this plan halos of {self.halo_tokens} tokens come from {hops} ranks; the program knows '
        f"{self.halo_hops}. Make the program from this plan, or plan with sparse_exchange = 'ulysses'"
      )
