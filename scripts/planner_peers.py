"""Planners in the manner of other systems, for benchmarks: mixed SP degrees, the same groups in all layers.

Both return plans of mode `parents`, so that one prediction judges everyone's. Neither is the original: the
MILP gets this project's costs instead of coefficients fitted to measurements, both get groups that are
aligned blocks of ranks, and both choose among numbers of micro-batches by the simulator. `flexsp_milp` needs
OR-tools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from repack_jax.config import ClusterConfig, PlannerConfig
from repack_jax.plan.plan import Group, Plan
from repack_jax.predict.costs import Costs
from repack_jax.predict.simulator import simulate

# From lengths, a number of micro-batches and the tokens that one holds at most, to the samples of each
# micro-batch; None where they find no room.
Compose = Callable[[np.ndarray, int, int], list[np.ndarray] | None]
Members = tuple[int, list[int]]  # a group's size and its samples
LayOut = Callable[[np.ndarray], list[Members] | None]  # groups of at most a domain's ranks; None: no room

_BUCKETS = 16


def longest_first_greedy(
  lengths: Sequence[int] | np.ndarray, costs: Costs, config: PlannerConfig, numbers: int = 1
) -> list[Plan]:
  """Plans in the manner of Megatron-Core's hybrid context parallelism (its `hybrid_cp_schedule.py`).

  A sample's degree is the smallest that holds it, its work `length^2 / degree`. Longest first, it goes to
  ranks that are free, or else to the group of at least its degree with the least work. Ranks left over double
  the narrowest groups. Micro-batches are filled in the same manner: longest first, to the one with the least
  sum of squared lengths.

  Args:
    numbers: how many numbers of micro-batches are tried, from the least that holds the batch upward.

  Raises:
    ValueError: a sample exceeds the widest group.
  """
  degrees, ranks = costs.degrees(config), costs.cluster.domain_ranks

  def lay_out(samples: np.ndarray) -> list[Members] | None:
    return _greedy(samples, np.asarray(lengths), degrees, ranks, config.capacity_tokens)

  return _plans(lengths, costs, config, lay_out, by_squares, numbers)


def flexsp_milp(
  lengths: Sequence[int] | np.ndarray,
  costs: Costs,
  config: PlannerConfig,
  numbers: int = 1,
  limit_s: float = 10.0,
  outcomes: list[str] | None = None,
) -> list[Plan]:
  """Plans in the manner of FlexSP (Wang et al., ASPLOS 2025): a MILP over buckets of lengths, solved by SCIP.

  It chooses how many groups of each degree there are and how many samples of each bucket are in each; a
  sample counts as the longest of its bucket. It minimizes the slowest group's work, shared evenly, plus its
  exchanges over the links of its degree, with tokens a rank capped. Micro-batches are the batch sorted by
  length and cut, with tokens as even as can be.

  Args:
    numbers: how many numbers of micro-batches are tried, from the least that holds the batch upward.
    limit_s: wall-clock seconds a domain's MILP may take; the best found by then counts.
    outcomes: receives `optimal`, `limit` or, where nothing was found and the greedy stands in, `greedy`, for
      each domain of each micro-batch tried.

  Raises:
    ValueError: a sample exceeds the widest group.
  """
  degrees, ranks = costs.degrees(config), costs.cluster.domain_ranks
  said = [] if outcomes is None else outcomes

  def lay_out(samples: np.ndarray) -> list[Members] | None:
    of_batch = np.asarray(lengths)
    bucket_of, longest = _buckets(of_batch[samples], _BUCKETS)
    outcome, groups = _milp(np.bincount(bucket_of), longest, degrees, costs, config.capacity_tokens, limit_s)
    said.append(outcome)
    if groups is None:
      return _greedy(samples, of_batch, degrees, ranks, config.capacity_tokens)
    return _fill(samples, of_batch, bucket_of, groups)

  return _plans(lengths, costs, config, lay_out, by_length, numbers)


def in_micro_batches_of(plans: Sequence[Plan], planner: Callable[[np.ndarray], Sequence[Plan]]) -> list[Plan]:
  """What a planner makes of each micro-batch of these plans; more than one plan where it finds no room."""
  made = []
  for plan in plans:
    for part in planner(np.array(plan.lengths, np.int64)):
      ids = tuple(plan.sample_ids[s] for s in part.sample_ids)
      made.append(dataclasses.replace(part, sample_ids=ids))
  return made


# --- micro-batches --------------------------------------------------------------------------------------


def by_squares(lengths: np.ndarray, bins: int, room: int) -> list[np.ndarray] | None:
  """Samples longest first to the bin with the least sum of squares that has room; None where none has."""
  work, held = np.zeros(bins), np.zeros(bins, np.int64)
  members: list[list[int]] = [[] for _ in range(bins)]
  for s in np.argsort(-lengths, kind='stable').tolist():
    least = int(np.where(held + lengths[s] <= room, work, np.inf).argmin())
    if held[least] + lengths[s] > room:
      return None
    members[least].append(s)
    held[least] += lengths[s]
    work[least] += float(lengths[s]) ** 2
  return [np.array(of_bin, np.int64) for of_bin in members]


def by_length(lengths: np.ndarray, bins: int, room: int) -> list[np.ndarray] | None:
  """Samples longest first, cut into so many bins with tokens as even as can be; None where one has no room.

  That is the cut with the least sum of squared tokens. Making the fullest bin as empty as can be would not
  do: where one sample fills a bin, all others might be as full, and more of them no emptier.
  """
  order = np.argsort(-lengths, kind='stable')
  if bins >= len(order):  # a bin for each: a cut could leave some together that find no layout
    return list(order[:, None])
  reached = np.concatenate([[0], np.cumsum(lengths[order])]).astype(float)
  tokens = reached - reached[:, None]
  squares = np.where((tokens > 0) & (tokens <= room), tokens**2, np.inf)
  ends = _cheapest_cut(squares, bins)
  return None if ends is None else np.split(order, ends[:-1])


def _cheapest_cut(costs: np.ndarray, parts: int) -> list[int] | None:
  """Ends of consecutive parts of items whose costs add up to the least; None where there are none.

  Args:
    costs: float64 [n + 1, n + 1], of one part of the items i .. j - 1; infinite where there can be none.
  """
  least, begins = costs[0], []
  for _ in range(parts - 1):
    whole = least[:, None] + costs
    begins.append(whole.argmin(0))
    least = whole.min(0)
  if not np.isfinite(least[-1]):
    return None
  ends = [len(costs) - 1]
  for begin in reversed(begins):
    ends.append(int(begin[ends[-1]]))
  return sorted(ends)


# --- what both share ------------------------------------------------------------------------------------


def _plans(
  lengths: Sequence[int] | np.ndarray,
  costs: Costs,
  config: PlannerConfig,
  lay_out: LayOut,
  compose: Compose,
  numbers: int,
) -> list[Plan]:
  """The fastest by the simulator of so many numbers of micro-batches, from the least that holds the batch."""
  lengths, cluster = np.asarray(lengths, np.int64), costs.cluster
  if not len(lengths):
    return []
  widest = costs.degrees(config)[-1]
  if lengths.max() > widest * config.capacity_tokens:
    raise ValueError(f'a sample of {lengths.max()} tokens exceeds SP{widest} at {config.capacity_tokens}')
  number = -(-int(lengths.sum()) // (cluster.num_ranks * config.capacity_tokens))
  while (plans := _plans_of(number, lengths, costs, config, lay_out, compose)) is None:
    number += 1
  tried = [plans]
  for more in range(1, numbers):
    if number + more <= len(lengths):
      plans = _plans_of(number + more, lengths, costs, config, lay_out, compose)
      tried += [plans] if plans is not None else []
  return min(tried, key=lambda plans: simulate(costs, plans).step_s)


def _plans_of(
  number: int,
  lengths: np.ndarray,
  costs: Costs,
  config: PlannerConfig,
  lay_out: LayOut,
  compose: Compose,
) -> list[Plan] | None:
  """Plans of at most so many micro-batches, whose domains are given samples by squares; None without room."""
  cluster = costs.cluster
  composed = compose(lengths, number, cluster.num_ranks * config.capacity_tokens)
  if composed is None:
    return None
  plans = []
  for samples in composed:
    domains = by_squares(lengths[samples], cluster.domains, cluster.domain_ranks * config.capacity_tokens)
    if domains is None:
      return None
    groups = []
    for of_domain in domains:
      laid_out = lay_out(samples[of_domain])
      if laid_out is None:
        return None
      groups.append(laid_out)
    plans.append(_plan(lengths, groups, cluster, config).validate(costs.wire))
  return plans


def _plan(
  lengths: np.ndarray, domains: list[list[Members]], cluster: ClusterConfig, config: PlannerConfig
) -> Plan:
  """Groups widest first, so that they are aligned, and ranks left over alone."""
  ids = np.sort([s for groups in domains for _, samples in groups for s in samples]).astype(np.int64)
  laid: list[Group] = []
  for domain, groups in enumerate(domains):
    rank, end = domain * cluster.domain_ranks, (domain + 1) * cluster.domain_ranks
    for size, samples in sorted(groups, key=lambda group: -group[0]):
      laid.append(Group(rank, size, tuple(np.searchsorted(ids, samples).tolist())))
      rank += size
    laid += [Group(alone, 1) for alone in range(rank, end)]
  return Plan(
    sample_ids=tuple(ids.tolist()),
    lengths=tuple(lengths[ids].tolist()),
    parents=tuple(laid),
    children=tuple(laid),
    mode='parents',
    capacity_tokens=config.capacity_tokens,
    num_ranks=cluster.num_ranks,
    domain_ranks=cluster.domain_ranks,
    ranks_per_node=cluster.ranks_per_node,
  ).with_slots(config.capacity_step_tokens)


# --- the greedy -----------------------------------------------------------------------------------------


def _greedy(
  samples: np.ndarray, lengths: np.ndarray, degrees: Sequence[int], ranks: int, capacity_tokens: int
) -> list[Members] | None:
  """Groups for samples that come longest first."""
  sizes: list[int] = []
  members: list[list[int]] = []
  held: list[int] = []
  work: list[float] = []
  free = ranks
  for s in samples.tolist():
    length = int(lengths[s])
    needed = next(p for p in degrees if p * capacity_tokens >= length)
    with_room = [
      g for g, size in enumerate(sizes) if size >= needed and held[g] + length <= size * capacity_tokens
    ]
    if free >= needed:
      free -= needed
      chosen = len(sizes)
      sizes.append(needed)
      members.append([])
      held.append(0)
      work.append(0.0)
    elif with_room:
      chosen = min(with_room, key=lambda g: work[g])
    else:
      return None
    members[chosen].append(s)
    held[chosen] += length
    work[chosen] += length**2 / sizes[chosen]
  while sizes and min(sizes) <= free and 2 * min(sizes) in degrees:
    narrowest = sizes.index(min(sizes))
    free -= sizes[narrowest]
    sizes[narrowest] *= 2
  return list(zip(sizes, members, strict=True))


# --- the MILP -------------------------------------------------------------------------------------------


def _buckets(lengths: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
  """(bucket of each sample, longest of each bucket): intervals of lengths that add the fewest tokens."""
  distinct, position, counts = np.unique(lengths, return_inverse=True, return_counts=True)
  n = len(distinct)
  if n <= most:
    return position, distinct
  samples, tokens = (np.concatenate([[0], np.cumsum(x)]) for x in (counts, counts * distinct))
  # added[i, j]: of one bucket of the distinct lengths i .. j - 1.
  added = np.concatenate([[0], distinct]) * (samples[None] - samples[:, None]) - (
    tokens[None] - tokens[:, None]
  )
  ends = _cheapest_cut(np.where(np.arange(n + 1)[:, None] < np.arange(n + 1), added, np.inf), most)
  assert ends is not None
  return np.searchsorted(ends, position, side='right'), distinct[np.array(ends) - 1]


def _milp(
  counts: np.ndarray,
  bucket_tokens: np.ndarray,
  degrees: Sequence[int],
  costs: Costs,
  capacity_tokens: int,
  limit_s: float,
) -> tuple[str, list[tuple[int, np.ndarray]] | None]:
  """(outcome, each group's size and how many samples of each bucket it holds: int64 [buckets])."""
  from ortools.linear_solver import pywraplp

  ranks, layers = costs.cluster.domain_ranks, len(costs.layers)
  work_ms = 1e3 * _work_s(bucket_tokens, costs)
  solver = pywraplp.Solver.CreateSolver('SCIP')
  solver.SetTimeLimit(int(1e3 * limit_s))
  slowest_ms = solver.NumVar(0, solver.infinity(), '')
  candidates = [p for p in degrees for _ in range(ranks // p)]
  used = [solver.BoolVar('') for _ in candidates]
  holds = [[solver.IntVar(0, int(count), '') for count in counts] for _ in candidates]
  for p, chosen, held in zip(candidates, used, holds, strict=True):
    exchange_s, latency_s = 2 * layers * costs.exchange_s(p), 4 * layers * float(costs.site_latency_s(p))
    of_one = (work_ms + 1e3 * exchange_s * bucket_tokens) / p
    busy = sum(ms * n for ms, n in zip(of_one.tolist(), held, strict=True)) + 1e3 * latency_s * chosen
    solver.Add(busy <= slowest_ms)
    tokens = sum(tokens * n for tokens, n in zip(bucket_tokens.tolist(), held, strict=True))
    solver.Add(tokens <= p * capacity_tokens * chosen)
  solver.Add(sum(p * chosen for p, chosen in zip(candidates, used, strict=True)) <= ranks)
  for bucket, count in enumerate(counts.tolist()):
    solver.Add(sum(held[bucket] for held in holds) == count)
  for i in range(1, len(candidates)):  # groups of one degree are alike
    if candidates[i] == candidates[i - 1]:
      solver.Add(used[i] <= used[i - 1])
  solver.Minimize(slowest_ms)
  status = solver.Solve()
  if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
    return 'greedy', None
  found = [np.rint([n.solution_value() for n in held]).astype(np.int64) for held in holds]
  groups = [(p, held) for p, held in zip(candidates, found, strict=True) if held.any()]
  return 'optimal' if status == pywraplp.Solver.OPTIMAL else 'limit', groups


def _work_s(lengths: np.ndarray, costs: Costs) -> np.ndarray:
  """Computation of samples in all layers, both passes, in rank-seconds: float64 [n]."""
  return lengths * (costs.slot_s + costs.routed_s) + costs.all_attention_s(lengths)


def _fill(
  samples: np.ndarray, lengths: np.ndarray, bucket_of: np.ndarray, groups: list[tuple[int, np.ndarray]]
) -> list[Members]:
  """Real samples, longest first, to their buckets' places in the groups, the least loaded group first.

  No sample is longer than its bucket's longest, so no group gets more tokens than the MILP gave it.
  """
  places = np.array([held for _, held in groups])
  sizes = np.array([size for size, _ in groups])
  work = np.zeros(len(groups))
  members: list[list[int]] = [[] for _ in groups]
  for s, bucket in zip(samples.tolist(), bucket_of.tolist(), strict=True):
    chosen = int(np.where(places[:, bucket] > 0, work, np.inf).argmin())
    places[chosen, bucket] -= 1
    work[chosen] += float(lengths[s]) ** 2 / sizes[chosen]
    members[chosen].append(s)
  return list(zip(sizes.tolist(), members, strict=True))
