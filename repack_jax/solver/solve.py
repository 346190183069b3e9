"""From a batch's lengths to its plans: deterministic, on the host, one call."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from repack_jax.config.run import HALO_WAYS, WAYS, PlannerConfig
from repack_jax.plan.plan import MOST_HALO_HOPS, PARENTS, Plan, PlanError
from repack_jax.predict.costs import Costs
from repack_jax.predict.simulator import Simulated, simulate
from repack_jax.solver.bins import Items, equal_numbers, fill_up, micro_batches, spread
from repack_jax.solver.bounds import lower_bound_s
from repack_jax.solver.domain import Domain, Layouts

T = TypeVar('T')

BASELINE = 'parents'  # the mode that is the same system with repacking disabled
_OF_BASELINE = ''  # the name of its steps, beside those of modes
# More micro-batches than the capacity asks for are tried where there are at most so many samples a rank.
_FEW_A_RANK = 2
# The ways of every mode that a config can ask for, so that none misses a mixture that another one finds. All
# domains run by halo, or none: that is compiled in.
_ALL_WAYS = tuple(
  dict.fromkeys(
    PlannerConfig(mode=mode, solo=solo, sparse_exchange=sparse_exchange).ways()
    for sparse_exchange in ('ulysses', 'halo')
    for mode in WAYS
    for solo in (True, False)
  )
)
_EVERY_WAY = PlannerConfig(mode='solve', sparse_exchange='auto').ways()
# Tokens of a domain over the mean, at most, where solo samples even out seconds.
_UNEVEN = (1.02, 1.04)
# Above so many micro-batches, the first way to make them in which all fits is taken.
_MANY_MICRO_BATCHES = 16


class SampleTooLong(ValueError):
  """A sample that the widest group cannot hold."""


@dataclass(frozen=True)
class Solution:
  """The plans of a batch, and those that it would have with repacking disabled.

  Attributes:
    plans: one a micro-batch; every sample is in exactly one.
    simulated: the step that they make.
    baseline_plans, baseline_simulated: the same of mode `parents`, with micro-batches of its own; its sparse
      layers run by halo where the config allows that.
  """

  plans: tuple[Plan, ...]
  simulated: Simulated
  baseline_plans: tuple[Plan, ...]
  baseline_simulated: Simulated


def solve(lengths: Sequence[int] | np.ndarray, costs: Costs, config: PlannerConfig) -> Solution:
  """Returns the plans of a batch: by the simulator the fastest that were found; none for an empty one.

  No mode is slower, by the simulator, than one whose layouts it allows too (`config.run.WAYS`): `parents`
  than `static`, `parents_solo` and `repack` than `parents`, and `solve` than all others; without
  `config.solo` than all but `parents_solo`.

  Args:
    lengths: tokens of each sample of the batch, at least 1.
    costs: what costs what, and on what cluster.
    config: its `mode` says which layouts are allowed.

  Raises:
    SampleTooLong: where a sample exceeds the widest group's capacity.
    PlanError: where a length is below 1, or the capacity is no multiple of the tokens that fill a row.
  """
  return solve_modes(lengths, costs, config, {config.mode: config})[config.mode]


def solve_modes(
  lengths: Sequence[int] | np.ndarray, costs: Costs, config: PlannerConfig, modes: Mapping[str, PlannerConfig]
) -> dict[str, Solution]:
  """Returns what `solve` does for each of several configs, by their names: each layout is searched once.

  Args:
    config: what the configs share, all but `mode`, `solo` and `sparse_exchange`, which the baseline has.
    modes: by any names.
  """
  lengths = np.asarray(lengths, np.int64)
  _check_lengths(lengths, costs.degrees(config)[-1], config.capacity_tokens)
  batch = _Batch(lengths, costs, config)
  can_halo = costs.halo_tokens is not None
  ways = {name: of.ways(can_halo) for name, of in modes.items()}
  of_baseline = replace(config, mode=BASELINE).ways(can_halo)
  sharing = {name: of for name, of in ways.items() if set(of) >= set(of_baseline)}
  steps = batch.steps({_OF_BASELINE: of_baseline} | sharing)
  for name, of in ways.items():
    if name not in steps:  # it may need other micro-batches than the baseline
      steps |= batch.steps({name: of})

  def made(step: _Step, mode: str) -> tuple[tuple[Plan, ...], Simulated]:
    plans = tuple(found.plan.with_mode(mode) for found in step)
    return plans, step[0].simulated if len(step) == 1 else simulate(costs, plans)

  baseline = made(steps[_OF_BASELINE], BASELINE)
  solutions = {}
  for name, of_mode in modes.items():
    plans, simulated = made(steps[name], of_mode.mode)
    for plan in plans:
      plan.validate(costs.wire)
    solutions[name] = Solution(plans, simulated, *baseline)
  return solutions


def _check_lengths(lengths: np.ndarray, widest: int, capacity_tokens: int) -> None:
  if not len(lengths):
    return
  if lengths.min() < 1:
    sample = int(lengths.argmin())
    raise PlanError(f'sample {sample} has length {lengths[sample]}; lengths are at least 1 token')
  if lengths.max() > widest * capacity_tokens:
    raise SampleTooLong(
      f'sample {int(lengths.argmax())} has {lengths.max()} tokens; the widest group, SP{widest} at '
      f'{capacity_tokens} tokens a rank, holds {widest * capacity_tokens}. Raise '
      'PlannerConfig.capacity_tokens, or lower DataConfig.max_document_tokens'
    )


@dataclass(frozen=True)
class _Candidate:
  """A plan of a micro-batch, the step that it would make alone, and its seconds without the update."""

  plan: Plan
  simulated: Simulated
  seconds: float


_Step = list[_Candidate]  # one a micro-batch


def _step_s(step: _Step) -> float:
  return sum(candidate.seconds for candidate in step)


# Of each mode that is asked for, by its name: the steps that were found, or what is found of a micro-batch.
_Steps = dict[str, list[_Step]]
_Planned = dict[str, _Candidate | None]


class _Batch:
  """The samples of a step, and their plans in any modes."""

  def __init__(self, lengths: np.ndarray, costs: Costs, config: PlannerConfig):
    self.lengths, self.costs, self.cluster, self.config = lengths, costs, costs.cluster, config
    self.row_tokens = costs.wire.row_tokens(costs.degrees(config)[-1], costs.cluster.wire_row_bytes)
    if config.capacity_tokens % self.row_tokens:
      raise PlanError(
        f'a capacity of {config.capacity_tokens} is not a multiple of {self.row_tokens} tokens, which fill a '
        f'row of ClusterConfig.wire_row_bytes = {self.cluster.wire_row_bytes}: change '
        'PlannerConfig.capacity_tokens'
      )
    self.longest_first = np.argsort(-lengths, kind='stable')
    self.load_s = _load_s(lengths, costs, config)
    self.static_degree = config.static_sp_degree
    if not self.static_degree:
      self.static_degree = config.smallest_degree(costs.degrees(config), int(lengths.max(initial=1)))
    self._planned: dict[Any, _Planned] = {}  # by lengths, since ways to make micro-batches share many

  def steps(self, ways: Mapping[str, tuple[str, ...]]) -> dict[str, _Step]:
    """Returns each mode's fastest step, by the ways it may choose from; all have those of the first."""
    samples = len(self.lengths)
    if not samples:
      return {name: [] for name in ways}
    first = next(iter(ways))
    steps: _Steps = {name: [] for name in ways}
    count = max(1, -(-int(self.lengths.sum()) // self._room(self.cluster.num_ranks)))
    self._add_steps(steps, ways, count)
    while not steps[first]:
      count += 1
      assert count <= samples, 'a sample that has a micro-batch for itself fits'
      self._add_steps(steps, ways, count)
    if samples <= _FEW_A_RANK * self.cluster.num_ranks * count:
      self._try_more(steps, ways, count, lambda: min(map(_step_s, steps[first])))
    return {name: min(found, key=_step_s) for name, found in steps.items()}

  def _room(self, ranks: int) -> int:
    return ranks * self.config.capacity_tokens

  def _try_more(
    self, steps: _Steps, ways: Mapping[str, tuple[str, ...]], count: int, slowest_s: Callable[[], float]
  ) -> None:
    """Adds steps of more micro-batches: few samples may fill the ranks unevenly in the fewest.

    One more, and as many as have a group of one degree for each sample. What is tried depends on the batch
    and the first mode alone, so that no other misses what it finds.
    """
    samples, ranks = len(self.lengths), self.cluster.num_ranks
    if count < samples and self._least_s(count + 1) < slowest_s():
      self._add_steps(steps, ways, count + 1)
    for degree in self.costs.degrees(self.config):
      each = ranks // degree
      more = -(-samples // each)
      if samples <= each or more > 2 * count + 1 or self._least_s(more) >= slowest_s():
        continue
      way = equal_numbers(self._items(self.longest_first), each, self._room(ranks))
      if way:
        self._add_way(steps, ways, way)

  def _least_s(self, count: int) -> float:
    """Seconds below which no plans in so many micro-batches can be, the update aside."""
    costs, config = self.costs, self.config
    seconds = lower_bound_s(self.lengths, costs, config) + count * costs.shown_parameters_s
    if not config.capacity_step_tokens:  # all slots are worked on
      mean_tokens = float(self.lengths.sum()) / self.cluster.num_ranks
      seconds += (count * config.capacity_tokens - mean_tokens) * costs.slot_s
    return seconds

  def _items(self, samples: np.ndarray) -> Items:
    return Items(self.lengths[samples], self.load_s[samples])

  def _add_steps(self, steps: _Steps, ways: Mapping[str, tuple[str, ...]], count: int) -> None:
    """Adds the steps of so many micro-batches in which all samples fit."""
    items = self._items(self.longest_first)
    for way in micro_batches(items, count, self._room(self.cluster.num_ranks)):
      found = self._add_way(steps, ways, way)
      if found and count > _MANY_MICRO_BATCHES:
        return

  def _add_way(self, steps: _Steps, ways: Mapping[str, tuple[str, ...]], way: Sequence[np.ndarray]) -> bool:
    """Adds the steps of one way to make micro-batches, unless one has no plan; returns whether it did.

    Where the first mode finds no plan, others hardly do.
    """
    planned = []
    for part in way:
      planned.append(self._plan(self.longest_first[part], ways))
      if None in planned[-1].values():
        return False
    for name, found in steps.items():
      found.append([candidate for of in planned if (candidate := of[name])])
    return True

  def _plan(self, samples: np.ndarray, ways: Mapping[str, tuple[str, ...]]) -> _Planned:
    """A micro-batch's fastest plan by simulation in each mode; None where the samples don't fit.

    Args:
      samples: int64 [n], longest first.
    """
    items = self._items(samples)
    key = (tuple(ways), items.tokens.tobytes())
    if key not in self._planned:
      self._planned[key] = self._plan_items(items, ways)
    return {
      name: found and replace(found, plan=found.plan.with_samples(samples.tolist()))
      for name, found in self._planned[key].items()
    }

  def _plan_items(self, items: Items, ways: Mapping[str, tuple[str, ...]]) -> _Planned:
    """As `_plan`; samples are numbered within the micro-batch."""
    parts = spread(items, self.cluster.domains, self._room(self.cluster.domain_ranks))
    if parts is None:
      return dict.fromkeys(ways)
    domains = [
      Domain(part, items.tokens, self.static_degree, self.row_tokens, self.costs, self.config, first_rank)
      for part, first_rank in zip(
        parts, range(0, self.cluster.num_ranks, self.cluster.domain_ranks), strict=True
      )
    ]
    wanted = [way for way in _EVERY_WAY if any(way in of for of in ways.values())]
    found = _in_threads(lambda domain: domain.layouts(wanted), domains)
    # A child between nodes in one domain makes exchanges of all span nodes: with such ones, and without.
    in_nodes = [{way: layouts for way, layouts in of.items() if not layouts.wide_children} for of in found]
    numbers, lengths = tuple(range(len(items.tokens))), tuple(items.tokens.tolist())
    played: dict[tuple[tuple[Layouts, ...], bool], _Candidate] = {}

    @functools.cache
    def spread_again(layouts: tuple[Layouts, ...]) -> list[tuple[Layouts, ...]]:
      return list(self._spread_again(items, domains, layouts))

    def candidates(allowed: Sequence[str]) -> Iterator[_Candidate]:
      """Yields what fits of these ways: for several domains, the best mixture of them and of fewer ways.

      Mixtures with solo samples come a second time, with these spread again. What was searched for heads
      comes by halo as well where that is allowed.
      """
      choices: list[tuple[str, ...]] = [(way,) for way in allowed if way in found[0]]
      if len(found) > 1:
        fewer = [of for of in _ALL_WAYS if set(of) <= set(allowed)]
        mixed = (self._mixed(kept, of) for of in dict.fromkeys(fewer) for kept in (found, in_nodes))
        choices = list(dict.fromkeys(choice for choice in mixed if choice))
      tried = [tuple(of[way] for of, way in zip(found, choice, strict=True)) for choice in choices]
      may_halo = any(way in HALO_WAYS.values() for way in allowed)
      for layouts in (*tried, *chain.from_iterable(map(spread_again, tried))):
        for by_halo in dict.fromkeys((layouts[0].by_halo, may_halo)):
          if (layouts, by_halo) not in played:
            plan = self._built(numbers, lengths, layouts, by_halo)
            step = simulate(self.costs, [plan])
            played[layouts, by_halo] = _Candidate(plan, step, step.step_s - self.costs.optimizer_s)
          yield played[layouts, by_halo]

    return {
      name: min(candidates(of), key=lambda item: item.seconds, default=None) for name, of in ways.items()
    }

  def _spread_again(
    self, items: Items, domains: Sequence[Domain], layouts: Sequence[Layouts]
  ) -> Iterator[tuple[Layouts, ...]]:
    """Yields the layouts with their solo samples spread over the domains by what these take besides.

    That is known only once all are laid out: waiting is no sample's own. All domains work on as many slots
    as the fullest rank needs, so tokens may become as uneven as `_UNEVEN` says and no more. Nothing where
    there is one domain, or one without solo samples.
    """
    solo = [of.samples[of.layout.solo.of >= 0] for of in layouts]
    if len(domains) == 1 or not all(map(len, solo)):
      return
    ranks, slot_s = self.cluster.domain_ranks, self.costs.slot_s
    beside = list(zip(layouts, solo, strict=True))
    held = [float(items.tokens[of.samples].sum() - items.tokens[own].sum()) for of, own in beside]
    busy_s = [ranks * (of.judged_s - slot_s * of.most_tokens) - items.load_s[own].sum() for of, own in beside]
    pool = np.sort(np.concatenate(solo))
    for uneven in _UNEVEN:
      most = min(uneven * items.tokens.sum() / len(domains), self._room(ranks))
      bin_of = fill_up(items.of(pool), np.array(held), np.array(busy_s), most)
      if bin_of is None:
        continue
      parts = [
        (domain, of, pool[bin_of == b]) for b, (domain, of) in enumerate(zip(domains, layouts, strict=True))
      ]
      again = _in_threads(lambda part: part[0].with_solo(part[1], part[2]), parts)
      if all(again):
        yield tuple(again)

  def _mixed(self, found: Sequence[dict[str, Layouts]], ways: Sequence[str]) -> tuple[str, ...] | None:
    """The way of each domain that makes the slowest of them fastest; None where one fits in no way.

    All work on as many slots as the fullest rank of any domain needs: so for each number of slots, the
    fastest that need no more.
    """
    fitting = [[way for way in ways if way in of] for of in found]
    if not all(fitting):
      return None
    slot_s = self.costs.slot_s

    # Of each domain: (seconds but those of its slots, its slots, way), fastest first.
    sorts = [
      sorted((of[way].judged_s - of[way].most_tokens * slot_s, of[way].most_tokens, way) for way in ways_of)
      for of, ways_of in zip(found, fitting, strict=True)
    ]

    def chosen(most_tokens: float) -> tuple[float, tuple[str, ...]]:
      firsts = [next(one for one in of if one[1] <= most_tokens) for of in sorts]
      return max(firsts)[0] + slot_s * most_tokens, tuple(way for _, _, way in firsts)

    least = max(min(slots for _, slots, _ in of) for of in sorts)
    return min(map(chosen, sorted({slots for of in sorts for _, slots, _ in of if slots >= least})))[1]

  def _built(
    self, samples: tuple[int, ...], lengths: tuple[int, ...], layouts: Sequence[Layouts], by_halo: bool
  ) -> Plan:
    """A plan from each domain's layouts; by halo unless halos would come from too many ranks."""
    plan = Plan(
      sample_ids=samples,
      lengths=lengths,
      parents=tuple(chain.from_iterable(of.parents for of in layouts)),
      children=tuple(chain.from_iterable(of.children for of in layouts)),
      solo=tuple(chain.from_iterable(of.solo for of in layouts)),
      mode=self.config.mode,
      capacity_tokens=self.config.capacity_tokens,
      num_ranks=self.cluster.num_ranks,
      domain_ranks=self.cluster.domain_ranks,
      ranks_per_node=self.cluster.ranks_per_node,
      row_tokens=self.row_tokens,
    )
    plan = plan.with_slots(self.config.capacity_step_tokens)
    halo_tokens = self.costs.halo_tokens if by_halo else None
    if halo_tokens is not None and plan.halo_hops(halo_tokens) <= MOST_HALO_HOPS:
      return plan.with_halo(halo_tokens)
    return plan


def _in_threads(function: Callable[[Any], T], domains: Sequence[Any]) -> list[T]:
  """Returns what the function gives for each domain; on all cores, since compiled code lets others run."""
  cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
  if min(cores, len(domains)) == 1:
    return list(map(function, domains))
  with ThreadPoolExecutor(min(cores, len(domains))) as threads:
    return list(threads.map(function, domains))


def _load_s(lengths: np.ndarray, costs: Costs, config: PlannerConfig) -> np.ndarray:
  """Rank-seconds of each sample in a step, float64 [samples]: what domains balance besides tokens.

  Attention, experts, and the exchanges in a group in which it takes no more than a rank's share of attention.
  What runs on all slots is left out: the fullest rank of any domain decides on them for all.
  """
  attention_s = costs.all_attention_s(lengths)
  share_s = attention_s.sum() / costs.cluster.num_ranks
  exchange_s = np.zeros(len(lengths))
  for degree in reversed(costs.degrees(config)):
    enough = (attention_s <= degree * share_s) & (lengths <= degree * config.capacity_tokens)
    of_layer_s = 2 * lengths * costs.exchange_s(degree)
    exchange_s = np.where(enough | (degree == costs.degrees(config)[-1]), of_layer_s, exchange_s)
  return lengths * costs.routed_s + attention_s + costs.layers_in(PARENTS) * exchange_s
