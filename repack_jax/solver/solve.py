"""From a batch's lengths to its plans: deterministic, on the host, one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from repack_jax.config.run import PlannerConfig
from repack_jax.plan.plan import CHILDREN, PARENTS, Group, Plan, PlanError
from repack_jax.predict.costs import Costs
from repack_jax.predict.simulator import Simulated, simulate
from repack_jax.solver.bins import fill_bins
from repack_jax.solver.domain import Domain, Layouts

BASELINE = 'parents'  # the mode that is the same system with repacking disabled


class SampleTooLong(ValueError):
  """A sample that the widest group cannot hold."""


@dataclass(frozen=True)
class Solution:
  """The plans of a batch, and those that it would have with repacking disabled.

  Attributes:
    plans: one a micro-batch; every sample is in exactly one.
    simulated: the step that they make.
    baseline_plans, baseline_simulated: the same of mode `parents`.
  """

  plans: tuple[Plan, ...]
  simulated: Simulated
  baseline_plans: tuple[Plan, ...]
  baseline_simulated: Simulated


def solve(lengths: Sequence[int] | np.ndarray, costs: Costs, config: PlannerConfig) -> Solution:
  """Returns the plans of a batch, as few micro-batches as are found to hold it; no plans for an empty one.

  By the simulator, no plan of mode `repack` or `solve` is slower than that of the same samples in mode
  `parents`.

  Args:
    lengths: tokens of each sample of the batch, at least 1.
    costs: what costs what, and on what cluster.
    config: its `mode` says which layouts are allowed.

  Raises:
    SampleTooLong: where a sample exceeds the widest group's capacity.
    PlanError: where a length is below 1, or the capacity is no multiple of the tokens that fill a row.
  """
  lengths = np.asarray(lengths, np.int64)
  _check_lengths(lengths, costs.degrees(config)[-1], config.capacity_tokens)
  batch = _Batch(lengths, costs, config)
  plans, baseline = batch.solve()
  if config.mode not in ('repack', 'solve'):
    baseline = plans
  if config.mode == 'static':
    baseline, _ = _Batch(lengths, costs, dataclasses.replace(config, mode=BASELINE)).solve()
  simulated, baseline_simulated = batch.simulated(plans), batch.simulated(baseline)
  # What was a candidate of the mode is planned as the mode `parents` plans it.
  baseline = [dataclasses.replace(plan, mode=BASELINE) for plan in baseline]
  for plan in plans:
    plan.validate(costs.wire)
  return Solution(tuple(plans), simulated, tuple(baseline), baseline_simulated)


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


class _Batch:
  """The samples of a step, and their plans for a number of micro-batches."""

  def __init__(self, lengths: np.ndarray, costs: Costs, config: PlannerConfig):
    self.lengths, self.costs, self.cluster, self.config = lengths, costs, costs.cluster, config
    self.degrees = costs.degrees(config)
    self.row_tokens = costs.wire.row_tokens(self.degrees[-1], costs.cluster.wire_row_bytes)
    if config.capacity_tokens % self.row_tokens:
      raise PlanError(
        f'a capacity of {config.capacity_tokens} is not a multiple of {self.row_tokens} tokens, which fill a '
        f'row of ClusterConfig.wire_row_bytes = {self.cluster.wire_row_bytes}: change '
        'PlannerConfig.capacity_tokens'
      )
    self.longest_first = np.argsort(-lengths, kind='stable')
    self._simulated: dict[tuple[int, ...], tuple[tuple[Plan, ...], Simulated]] = {}

  def solve(self) -> tuple[list[Plan], list[Plan]]:
    """Returns the plans of the mode, and those of the same micro-batches with repacking disabled, if any."""
    if not len(self.lengths):
      return [], []
    room = self.cluster.num_ranks * self.config.capacity_tokens
    num_plans = max(1, -(-int(self.lengths.sum()) // room))
    while (found := self.plans(num_plans)) is None:
      num_plans += 1
      assert num_plans <= len(self.lengths), 'a sample that has a micro-batch for itself fits'
    plans, baseline = zip(*found, strict=True)
    return list(plans), [plan for plan in baseline if plan is not None]

  def simulated(self, plans: Iterable[Plan]) -> Simulated:
    """Returns the step of these plans, played once."""
    plans = tuple(plans)
    key = tuple(map(id, plans))  # the plans are kept beside the result, so ids stay theirs
    if key not in self._simulated:
      self._simulated[key] = plans, simulate(self.costs, plans)
    return self._simulated[key][1]

  def plans(self, num_plans: int) -> list[tuple[Plan, Plan | None]] | None:
    """Returns (plan, plan with repacking disabled) of each micro-batch; None where samples don't fit."""
    domains = self.cluster.domains
    sorted_lengths = self.lengths[self.longest_first]
    tokens = sorted_lengths.astype(np.float64)
    work_s = self.costs.attention_s(sorted_lengths, PARENTS if self.costs.layers_in(PARENTS) else CHILDREN)
    bins = num_plans * domains
    room = self.cluster.domain_ranks * self.config.capacity_tokens
    # Attention that costs nothing decides nothing; 0 / 0 would find no bin.
    mean_s = max(float(work_s.sum()), 1e-300) / bins
    bin_of = fill_bins(tokens, work_s, bins, float(room), tokens.sum() / bins, mean_s)
    if not len(bin_of):
      return None
    by_bin = np.split(
      self.longest_first[np.argsort(bin_of, kind='stable')],
      np.cumsum(np.bincount(bin_of, minlength=bins))[:-1],
    )
    plans = []
    for first in range(0, bins, domains):
      found = self._plan([self._domain(samples) for samples in by_bin[first : first + domains]])
      if found is None:
        return None
      plans.append(found)
    return plans

  def _domain(self, samples: np.ndarray) -> Domain:
    capacity, row = self.config.capacity_tokens, self.row_tokens
    return Domain(samples, self.lengths, self.degrees[-1], capacity, row, self.costs)

  def _plan(self, domains: list[Domain]) -> tuple[Plan, Plan | None] | None:
    """The plan of a micro-batch in the config's mode: the fastest by prediction of those it allows.

    And the one with repacking disabled.
    """
    mode, config = self.config.mode, self.config
    if mode == 'static':
      longest = int(self.lengths.max())
      degree = config.static_sp_degree or config.smallest_degree(self.degrees, longest)
      plan = self._built(domains, [domain.static(degree) for domain in domains])
      return None if plan is None else (plan, None)
    pairs = [(domain, found) for domain in domains if (found := domain.parents()) is not None]
    if len(pairs) < len(domains):
      return None
    disabled = self._built(domains, [domain.disabled(found) for domain, found in pairs])
    if disabled is None:
      return None
    candidates: list[Plan | None] = [disabled]
    if mode == 'repack':
      candidates.append(self._built(domains, [domain.repack(found) for domain, found in pairs]))
    if mode == 'solve':
      candidates.append(self._built(domains, [domain.solve() for domain in domains]))
    plans = [plan for plan in candidates if plan is not None]
    if len(plans) == 1:
      return disabled, disabled
    return min(plans, key=lambda plan: self.simulated([plan]).step_s), disabled

  def _built(self, domains: list[Domain], layouts: Sequence[Layouts | None]) -> Plan | None:
    """A plan from each domain's layouts; None where one has none."""
    if any(found is None for found in layouts):
      return None
    sample_ids = np.sort(np.concatenate([domain.samples for domain in domains]))

    def renumbered(group: Group, domain: int, stream: Sequence[int]) -> Group:
      numbers = np.searchsorted(sample_ids, stream)
      return Group(group.first_rank + domain * self.cluster.domain_ranks, group.size, tuple(numbers.tolist()))

    parents, children, solo = [], [], []
    for domain, found in enumerate(layouts):
      assert found is not None
      solo += [renumbered(group, domain, group.samples) for group in found.solo]
      children += [renumbered(child, domain, child.samples) for child in found.children]
      inside = iter(found.children)
      for parent in found.parents:
        stream: list[int] = []
        reached = parent.first_rank
        while reached < parent.end_rank:
          child = next(inside)
          stream += child.samples
          reached = child.end_rank
        parents.append(renumbered(parent, domain, stream))
    plan = Plan(
      sample_ids=tuple(sample_ids.tolist()),
      lengths=tuple(self.lengths[sample_ids].tolist()),
      parents=tuple(parents),
      children=tuple(children),
      solo=tuple(solo),
      mode=self.config.mode,
      capacity_tokens=self.config.capacity_tokens,
      num_ranks=self.cluster.num_ranks,
      domain_ranks=self.cluster.domain_ranks,
      ranks_per_node=self.cluster.ranks_per_node,
      row_tokens=self.row_tokens,
    )
    return plan.with_slots(self.config.capacity_step_tokens)
