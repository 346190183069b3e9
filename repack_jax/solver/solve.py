"""From a batch's lengths to its plans: deterministic, NumPy only, one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repack_jax.config import ClusterConfig, ModelConfig, PlannerConfig, allowed_sp_degrees
from repack_jax.cost import CostModel
from repack_jax.plan import Group, Plan
from repack_jax.solver.children import children_of_parent
from repack_jax.solver.parents import needed_degrees, parents_of_domain, split_into_bins


class SampleTooLong(ValueError):
  """A sample that the widest group cannot hold."""


def static_degree(degrees: Sequence[int], capacity_tokens: int, longest_tokens: int) -> int:
  """The smallest SP degree whose group holds the longest sample."""
  return next(p for p in degrees if p * capacity_tokens >= longest_tokens)


def solve(
  lengths: Sequence[int] | np.ndarray, cluster: ClusterConfig, model: ModelConfig, config: PlannerConfig
) -> list[Plan]:
  """Plans for a batch, one a micro-batch; every sample is in exactly one. No plans for an empty batch.

  Args:
    lengths: tokens of each sample of the batch, at least 1.
    config: its `mode` says which layouts are allowed.

  Raises:
    SampleTooLong: where a sample exceeds the widest group's capacity.
    PlanError: where a length is below 1.
  """
  lengths = np.asarray(lengths, np.int64)
  degrees = allowed_sp_degrees(cluster, model, config)
  capacity = config.capacity_tokens
  if not len(lengths):
    return []
  if lengths.max() > degrees[-1] * capacity:
    raise SampleTooLong(
      f'sample {int(lengths.argmax())} has {lengths.max()} tokens; the widest group, SP{degrees[-1]} at '
      f'{capacity} tokens a rank, holds {degrees[-1] * capacity}. Raise PlannerConfig.capacity_tokens, '
      'or lower DataConfig.max_document_tokens'
    )
  cost = CostModel(cluster, model)
  domain_tokens = cluster.domain_ranks * capacity
  num_plans = max(1, -(-int(lengths.sum()) // (cluster.domains * domain_tokens)))
  while (parents := _try_parents(lengths, num_plans, degrees, cluster, config, cost)) is None:
    num_plans += 1
  plans = []
  for groups in parents:
    children = groups
    if config.mode == 'repack':
      children = [
        child
        for parent in groups
        for child in children_of_parent(parent, lengths, degrees, cluster.ranks_per_node, capacity, cost)
      ]
    plans.append(_build_plan(lengths, groups, children, cluster, config))
  return [plan.validate(model.num_heads, model.num_kv_heads) for plan in plans]


def _try_parents(
  lengths: np.ndarray,
  num_plans: int,
  degrees: Sequence[int],
  cluster: ClusterConfig,
  config: PlannerConfig,
  cost: CostModel,
) -> list[list[Group]] | None:
  """Parents of each micro-batch, or None where the batch doesn't fit into so many."""
  capacity, ranks = config.capacity_tokens, cluster.domain_ranks
  work_s = cost.parent_s(lengths, 1)
  bins = split_into_bins(lengths, work_s, num_plans * cluster.domains, ranks * capacity)
  if bins is None:
    return None
  if config.mode == 'static':
    fixed = config.static_sp_degree or static_degree(degrees, capacity, int(lengths.max()))
    degree, max_degree = np.full(len(lengths), fixed), fixed
  else:
    rank_s = float(work_s.sum()) / (cluster.num_ranks * num_plans)
    degree, max_degree = needed_degrees(lengths, degrees, rank_s, capacity, cost), degrees[-1]
  micro_batches: list[list[Group]] = []
  for index, samples in enumerate(bins):
    domain = index % cluster.domains
    groups = parents_of_domain(samples, lengths, degree, work_s, domain * ranks, ranks, max_degree, capacity)
    if groups is None:
      return None
    if domain == 0:
      micro_batches.append([])
    micro_batches[-1] += groups
  return micro_batches


def _build_plan(
  lengths: np.ndarray,
  parents: Sequence[Group],
  children: Sequence[Group],
  cluster: ClusterConfig,
  config: PlannerConfig,
) -> Plan:
  """Renumbers the batch's samples to the plan's, and orders parents' streams as their children's."""
  sample_ids = tuple(sorted(s for group in children for s in group.samples))
  number = {sample: i for i, sample in enumerate(sample_ids)}

  def renumbered(group: Group, samples: Sequence[int]) -> Group:
    return Group(group.first_rank, group.size, tuple(number[s] for s in samples))

  def stream(parent: Group) -> list[int]:
    inside = (c for c in children if parent.first_rank <= c.first_rank < parent.end_rank)
    return [s for child in inside for s in child.samples]

  return Plan(
    sample_ids=sample_ids,
    lengths=tuple(int(lengths[s]) for s in sample_ids),
    parents=tuple(renumbered(p, stream(p)) for p in parents),
    children=tuple(renumbered(c, c.samples) for c in children),
    mode=config.mode,
    capacity_tokens=config.capacity_tokens,
    num_ranks=cluster.num_ranks,
    domain_ranks=cluster.domain_ranks,
    ranks_per_node=cluster.ranks_per_node,
  )
