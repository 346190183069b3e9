"""From a batch's lengths to its plans: deterministic, on the host, one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repack_jax.config import FULL, ModelConfig, PlannerConfig, allowed_sp_degrees
from repack_jax.config.cluster import ClusterConfig
from repack_jax.plan.plan import Group, Plan, PlanError
from repack_jax.predict.cost_model import CostModel, row_tokens
from repack_jax.predict.simulator import simulate
from repack_jax.solver.bins import fill_bins
from repack_jax.solver.domain import Domain, Layouts


class SampleTooLong(ValueError):
  """A sample that the widest group cannot hold."""


def static_degree(degrees: Sequence[int], capacity_tokens: int, longest_tokens: int) -> int:
  """The smallest SP degree whose group holds the longest sample."""
  return next(p for p in degrees if p * capacity_tokens >= longest_tokens)


def solve(
  lengths: Sequence[int] | np.ndarray, cluster: ClusterConfig, model: ModelConfig, config: PlannerConfig
) -> list[Plan]:
  """Plans for a batch, one a micro-batch; every sample is in exactly one. No plans for an empty batch.

  By the simulator, no plan of mode `repack` or `solve` is slower than that of the same samples in mode
  `parents`.

  Args:
    lengths: tokens of each sample of the batch, at least 1.
    config: its `mode` says which layouts are allowed.

  Raises:
    SampleTooLong: where a sample exceeds the widest group's capacity.
    PlanError: where a length is below 1.
  """
  lengths = np.asarray(lengths, np.int64)
  if not len(lengths):
    return []
  degrees = allowed_sp_degrees(cluster, model, config)
  _check_lengths(lengths, degrees[-1], config.capacity_tokens)
  batch = _Batch(lengths, cluster, model, config, degrees)
  domain_tokens = cluster.domain_ranks * config.capacity_tokens
  num_plans = max(1, -(-int(lengths.sum()) // (cluster.domains * domain_tokens)))
  while (plans := batch.plans(num_plans)) is None:
    num_plans += 1
  return [plan.validate(model.num_heads, model.num_kv_heads) for plan in plans]


def _check_lengths(lengths: np.ndarray, widest: int, capacity_tokens: int) -> None:
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

  def __init__(
    self,
    lengths: np.ndarray,
    cluster: ClusterConfig,
    model: ModelConfig,
    config: PlannerConfig,
    degrees: Sequence[int],
  ):
    self.row_tokens = row_tokens(cluster, model, config)
    self.lengths, self.cluster, self.config, self.degrees = lengths, cluster, config, degrees
    self.cost = CostModel(cluster, model)
    self.longest_first = np.argsort(-lengths, kind='stable')

  def plans(self, num_plans: int) -> list[Plan] | None:
    """One plan a micro-batch; None where the samples don't fit into so many."""
    domains = self.cluster.domains
    tokens = self.lengths[self.longest_first].astype(np.float64)
    work_s = self.cost.attention_s(self.lengths[self.longest_first], FULL)
    bins = num_plans * domains
    room = self.cluster.domain_ranks * self.config.capacity_tokens
    bin_of = fill_bins(tokens, work_s, bins, float(room), tokens.sum() / bins, work_s.sum() / bins)
    if not len(bin_of):
      return None
    by_bin = np.split(
      self.longest_first[np.argsort(bin_of, kind='stable')],
      np.cumsum(np.bincount(bin_of, minlength=bins))[:-1],
    )
    plans = []
    for first in range(0, bins, domains):
      plan = self._plan([self._domain(samples) for samples in by_bin[first : first + domains]])
      if plan is None:
        return None
      plans.append(plan)
    return plans

  def _domain(self, samples: np.ndarray) -> Domain:
    capacity, row = self.config.capacity_tokens, self.row_tokens
    return Domain(samples, self.lengths, self.degrees[-1], capacity, row, self.cost)

  def _plan(self, domains: list[Domain]) -> Plan | None:
    """The plan of a micro-batch in the config's mode: the fastest by prediction of those it allows."""
    mode, config = self.config.mode, self.config
    if mode == 'static':
      longest = int(self.lengths.max())
      degree = config.static_sp_degree or static_degree(self.degrees, config.capacity_tokens, longest)
      return self._built(domains, [domain.static(degree) for domain in domains])
    pairs = [(domain, found) for domain in domains if (found := domain.parents()) is not None]
    if len(pairs) < len(domains):
      return None
    candidates: list[list[Layouts | None]] = [[domain.disabled(found) for domain, found in pairs]]
    if mode == 'repack':
      candidates.append([domain.repack(found) for domain, found in pairs])
    if mode == 'solve':
      candidates.append([domain.solve() for domain in domains])
    plans = [plan for layouts in candidates if (plan := self._built(domains, layouts)) is not None]
    return min(plans, key=lambda plan: simulate(self.cost, [plan]).step_s)

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
