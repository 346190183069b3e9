"""Plan -> fixed-shape int32 arrays of a micro-batch, one block a rank: what the compiled step reads.

A plan is data, not code: group sizes, counts and segments are inputs, so one program serves many plans. NumPy
only. Axis legend: R ranks, T capacity (token slots of a rank), S ranks that an exchange spans, G slots of the
widest group that the program knows (its degree times T).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from repack_jax.plan.plan import CHILDREN, PARENTS, Plan
from repack_jax.plan.program import Program

Array = Any  # NumPy's as packed, JAX's on the devices

PADDING_SEGMENT = -1
NO_TARGET = -1


class Route(NamedTuple):
  """Who a rank exchanges with in one layout. int32, each with a leading axis of ranks.

  Attributes:
    branch [R]: which of the degrees that the program knows the group has (`Program.degrees`). Where it holds
      nothing, the first of them, and the rank is its only one, whatever its size.
    first [R]: the group's first rank, counted from the start of what the exchange spans.
    place [R]: the rank's place in its group.
    counts [R, S]: slots that the group's ranks hold, in order; 0 past the group's size.
    segments [R, G]: for each slot of the group's stream the sample it belongs to, -1 in padding (behind the
      tokens of each child) and past the stream.
  """

  branch: Array
  first: Array
  place: Array
  counts: Array
  segments: Array


class PlanArrays(NamedTuple):
  """A packed micro-batch. int32, each with a leading axis of ranks.

  Attributes:
    tokens [R, T]: token ids, 0 in padding.
    targets [R, T]: the token that follows in the document; -1 where there is none, and in padding.
    positions [R, T]: of the token in its sample, 0 in padding.
    segments [R, T]: the sample that the token belongs to, -1 in padding. A rank's share of its child's stream
      comes first, then its solo samples.
    parents, children: the routes of the two layouts.
  """

  tokens: Array
  targets: Array
  positions: Array
  segments: Array
  parents: Route
  children: Route

  def route(self, layout: str) -> Route:
    """Returns the route of a layout."""
    return self.parents if layout == PARENTS else self.children


class HasTokens(Protocol):
  """A sample as the data pipeline makes it: tokens and targets, int32 [n] each."""

  @property
  def tokens(self) -> np.ndarray: ...
  @property
  def targets(self) -> np.ndarray: ...


def route_arrays(plan: Plan, layout: str, program: Program) -> Route:
  """Returns the routes of one layout for all ranks."""
  placement, span = plan.placement(layout), program.span(layout)
  counts = np.zeros((plan.num_ranks, span), np.int32)
  widest_slots = program.degrees(layout)[-1] * program.capacity_tokens
  segments = np.full((plan.num_ranks, widest_slots), PADDING_SEGMENT, np.int32)
  ranks = np.arange(plan.num_ranks)
  branch, first = np.zeros(plan.num_ranks, np.int32), ranks.copy()  # of a rank whose group holds nothing
  for group in plan.groups(layout):
    if group.samples:
      members = slice(group.first_rank, group.end_rank)
      counts[members, : group.size] = placement.slots[members]
      branch[members], first[members] = program.degrees(layout).index(group.size), group.first_rank
  for child in plan.children:
    begin = placement.first_rank[child.first_rank]
    members = slice(begin, begin + placement.size[child.first_rank])
    stream = np.repeat(child.samples, [plan.lengths[s] for s in child.samples])
    start = placement.stream_start[child.first_rank]
    segments[members, start : start + len(stream)] = stream
  return Route(
    branch=branch,
    first=(first % span).astype(np.int32),
    place=(ranks - first).astype(np.int32),
    counts=counts,
    segments=segments,
  )


def _streams(plan: Plan, batch: Sequence[HasTokens], numbers: Sequence[int]) -> list[np.ndarray]:
  """Returns the tokens, targets, positions and segments of these samples, end to end."""
  samples = [batch[plan.sample_ids[s]] for s in numbers]
  for number, sample in zip(numbers, samples, strict=True):
    if len(sample.tokens) != plan.lengths[number]:
      raise ValueError(
        f'sample {plan.sample_ids[number]} has {len(sample.tokens)} tokens, its plan says '
        f'{plan.lengths[number]}: this plan was made for another batch'
      )
  lengths = [len(s.tokens) for s in samples]
  return [
    np.concatenate([s.tokens for s in samples]),
    np.concatenate([s.targets for s in samples]),
    np.concatenate([np.arange(length) for length in lengths]),
    np.repeat(numbers, lengths),
  ]


def pack(plan: Plan, batch: Sequence[HasTokens], program: Program) -> PlanArrays:
  """Packs the samples of a batch that the plan names into per-rank arrays.

  Args:
    batch: the samples of the whole batch; `plan.sample_ids` are positions in it.
    program: what is to run them; it gives the arrays their shapes.

  Raises:
    PlanError: where the program cannot run the plan.
    ValueError: where the batch lacks a sample, or its length is not the plan's.
  """
  program.check(plan)
  last = max(plan.sample_ids, default=-1)
  if last >= len(batch):
    raise ValueError(
      f'the plan has sample {last}, the batch has {len(batch)} samples: this plan was made for another batch'
    )
  shape = (plan.num_ranks, program.capacity_tokens)
  tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  targets, segments = np.full(shape, NO_TARGET, np.int32), np.full(shape, PADDING_SEGMENT, np.int32)
  arrays = (tokens, targets, positions, segments)
  for child in plan.children:
    if child.samples:
      streams = _streams(plan, batch, child.samples)
      edges = np.concatenate([[0], np.cumsum(plan.shared_tokens[child.first_rank : child.end_rank])])
      for rank, start, end in zip(child.ranks, edges[:-1], edges[1:], strict=True):
        for array, stream in zip(arrays, streams, strict=True):
          array[rank, : end - start] = stream[start:end]
  for group in plan.solo:
    begin, end = plan.shared_slots[group.first_rank], plan.rank_slots[group.first_rank]
    for array, stream in zip(arrays, _streams(plan, batch, group.samples), strict=True):
      array[group.first_rank, begin:end] = stream
  routes = (route_arrays(plan, layout, program) for layout in (PARENTS, CHILDREN))
  return PlanArrays(tokens, targets, positions, segments, *routes)
