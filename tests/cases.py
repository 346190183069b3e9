"""Hand-made plans, random ones, and documents whose every token is known: what several tests share."""

from __future__ import annotations

import dataclasses

import numpy as np

from repack_jax.data.samples import NO_TARGET, Sample
from repack_jax.plan.arrays import PlanArrays, pack
from repack_jax.plan.plan import Group, Plan
from repack_jax.plan.program import Program
from repack_jax.plan.wire import Wire


def wire_of(num_heads: int, num_kv_heads: int) -> Wire:
  return Wire.of_attention(num_heads, num_kv_heads, 2, 'float32')


# Two nodes of two ranks: an SP4 parent over both, its children SP2 on node 0 and twice SP1 on node 1.
PLAN = Plan(
  sample_ids=(5, 2, 7, 4),
  lengths=(5, 3, 2, 1),
  parents=(Group(0, 4, (0, 1, 3, 2)),),
  children=(Group(0, 2, (0, 1)), Group(2, 1, (3, 2)), Group(3, 1)),
  mode='repack',
  capacity_tokens=4,
  num_ranks=4,
  domain_ranks=4,
  ranks_per_node=2,
).validate(wire_of(8, 2))

# The same with solo samples on ranks 0 and 3, on rank 3 two.
SOLO = dataclasses.replace(
  PLAN,
  sample_ids=(5, 2, 7, 4, 0, 8, 1),
  lengths=(5, 3, 2, 1, 2, 1, 3),
  solo=(Group(0, 1, (4,)), Group(3, 1, (6, 5))),
  mode='solve',
  capacity_tokens=6,
).validate(wire_of(8, 2))


def document(number: int, length: int) -> Sample:
  """Tokens 1 ... length of document 0, 1001 ... of document 1, and so on, so that each token is known."""
  tokens = np.arange(1, length + 1, dtype=np.int32) + 1000 * number
  return Sample(number, 0, tokens, np.append(tokens[1:], NO_TARGET).astype(np.int32))


def packed(plan: Plan, program: Program | None = None) -> PlanArrays:
  """A plan's documents, numbered by its sample ids, packed for a program, its own without one."""
  length_of = dict(zip(plan.sample_ids, plan.lengths, strict=True))
  batch = [document(number, length_of.get(number, 1)) for number in range(max(length_of, default=0) + 1)]
  return pack(plan, batch, program or Program.of_plan(plan))


def random_lengths(rng: np.random.Generator, longest: int, most: int = 40) -> list[int]:
  """A batch: many short samples or a few long ones, equal ones, or the longest that fits among dust."""
  sort = rng.integers(4)
  count = int(rng.integers(1, most))
  if sort == 0:
    return np.clip(rng.lognormal(np.log(longest) / 2, 1, count).astype(int), 1, longest).tolist()
  if sort == 1:
    return rng.integers(1, longest + 1, count).tolist()
  if sort == 2:
    return [int(rng.integers(1, longest + 1))] * count
  return [longest] * int(rng.integers(1, 3)) + [1] * count


def random_plan(
  rng: np.random.Generator,
  num_ranks: int,
  capacity_tokens: int,
  max_degree: int,
  ranks_per_node: int = 8,
  domain_ranks: int | None = None,
  fill: float = 0.8,
  wide_children: float = 0.2,
  solo: float = 0.0,
  row_tokens: int = 1,
) -> Plan:
  """A random legal plan: random tilings, skewed sample lengths, some empty groups, some full ones.

  With `solo`, that share of the ranks fill what their child leaves them with samples of their own.
  """
  domain_ranks = domain_ranks or num_ranks
  parents, children, lengths = [], [], []

  def tile(first: int, size: int, widest: int) -> list[tuple[int, int]]:
    if size > widest or (size > 1 and rng.random() < 0.5):
      half = size // 2
      return tile(first, half, widest) + tile(first + half, half, widest)
    return [(first, size)]

  for domain in range(0, num_ranks, domain_ranks):
    for first, size in tile(domain, domain_ranks, max_degree):
      inside = tile(first, size, ranks_per_node)
      if rng.random() < wide_children:
        inside = [(first, size)]
      stream: list[int] = []
      for child_first, child_size in inside:
        room = child_size * capacity_tokens
        choice = rng.random()
        budget = 0 if choice < 0.2 else room if choice > 0.9 else int(room * fill * rng.random())
        samples = []
        while budget > 0:
          length = budget if rng.random() < 0.3 else int(rng.integers(1, budget + 1))
          samples.append(len(lengths))
          lengths.append(length)
          budget -= length
        children.append(Group(child_first, child_size, tuple(samples)))
        stream += samples
      parents.append(Group(first, size, tuple(stream)))
  mode = 'solve' if solo else 'repack'
  plan = Plan(
    tuple(range(len(lengths))), tuple(lengths), tuple(parents), tuple(children), mode, capacity_tokens,
    num_ranks, domain_ranks, min(ranks_per_node, domain_ranks), row_tokens=row_tokens,
  )  # fmt: skip
  return _with_solo(rng, plan, solo).validate()


def _with_solo(rng: np.random.Generator, plan: Plan, share: float) -> Plan:
  """One or two solo samples on that share of the ranks, as far as there is room."""
  groups, lengths = [], list(plan.lengths)
  for rank, held in enumerate(plan.rank_slots):
    room = plan.capacity_tokens - int(held)
    if room and rng.random() < share:
      first = int(rng.integers(1, room + 1))
      own = [first, room - first] if rng.random() < 0.5 and first < room else [first]
      groups.append(Group(rank, 1, tuple(range(len(lengths), len(lengths) + len(own)))))
      lengths += own
  ids = tuple(range(len(lengths)))
  return dataclasses.replace(plan, sample_ids=ids, lengths=tuple(lengths), solo=tuple(groups))


def wide_plan(num_ranks: int, ranks_per_node: int, capacity_tokens: int, solo: bool = True) -> Plan:
  """One parent over all ranks, children of a whole node, of halves of the next and so on, and solo samples.

  Where a node has several children the last is empty, and but for solo samples so are its ranks.
  """
  children, lengths = [], []
  for first in range(0, num_ranks, ranks_per_node):
    size = max(1, ranks_per_node >> (first // ranks_per_node))
    for rank in range(first, first + ranks_per_node, size):
      last = rank + size == first + ranks_per_node and size < ranks_per_node
      tokens = 0 if last else 3 * size * capacity_tokens // 4
      own = [n for n in (tokens // 3, tokens - tokens // 3) if n]
      children.append(Group(rank, size, tuple(range(len(lengths), len(lengths) + len(own)))))
      lengths += own
  stream = tuple(range(len(lengths)))
  parent = Group(0, num_ranks, stream)
  plan = Plan(
    stream, tuple(lengths), (parent,), tuple(children), 'solve', capacity_tokens, num_ranks, num_ranks,
    ranks_per_node,
  )  # fmt: skip
  return _with_solo(np.random.default_rng(0), plan, 0.8 if solo else 0.0).validate()
