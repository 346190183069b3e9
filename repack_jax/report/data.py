"""What the page shows, as plain Python data that turns into JSON: `page_data`.

Samples are named by their position in a micro-batch's `lengths`; its `ids` say which of the batch they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from repack_jax.config import FULL, RunConfig
from repack_jax.cost import CostModel
from repack_jax.plan import Group, Plan
from repack_jax.report import words
from repack_jax.report.case import FAMILIES, Case, check_cases, family
from repack_jax.report.timeline import pattern_period, timeline
from repack_jax.simulator import CAUSES

Data = dict[str, Any]


def page_data(run: RunConfig, cases: Sequence[Case]) -> Data:
  """Everything that the page shows; raises ValueError where the cases cannot be compared."""
  check_cases(run, cases)
  cluster = run.cluster
  lengths = cases[0].lengths()
  longest_step_s = max(case.simulated.step_s for case in cases)
  # Between a million and ten million ticks a step: finer than a pixel at any zoom that makes sense.
  tick_s = 10.0 ** math.floor(math.log10(longest_step_s / 1e6))
  return {
    'ranks': cluster.num_ranks,
    'ranks_per_node': cluster.ranks_per_node,
    'domain_ranks': cluster.domain_ranks,
    'layer_kinds': run.model.layer_kinds,
    'period': pattern_period(run.model),
    'about': [
      ['Cluster', words.describe_cluster(run)],
      ['Rates', words.describe_rates(run)],
      ['Model', words.describe_model(run.model)],
      ['Batch', words.describe_batch(lengths)],
    ],
    'causes': [[cause, family(cause)] for cause in CAUSES],
    'families': list(FAMILIES),
    'samples': sorted(lengths, key=lambda sample: (-lengths[sample], sample)),
    'tick_s': tick_s,
    'cases': [_case(run, case, cases[0], tick_s) for case in cases],
  }


def _case(run: RunConfig, case: Case, baseline: Case, tick_s: float) -> Data:
  simulated = case.simulated
  cost = CostModel(run.cluster, run.model)
  return {
    'name': case.name,
    'step_s': simulated.step_s,
    'speed': baseline.simulated.step_s / simulated.step_s,
    'mfu': simulated.mfu or None,
    'tokens_per_s': sum(plan.total_tokens for plan in case.plans) / simulated.step_s,
    'cross_node_bytes': simulated.cross_node_bytes,
    'seconds': [simulated.mean_s([cause]) for cause in CAUSES],
    'micro_batches': [layout_data(plan, cost) for plan in case.plans],
    'timeline': timeline(run.model, case, tick_s),
  }


def layout_data(plan: Plan, cost: CostModel) -> Data:
  """A plan's two layouts.

  Returns, besides what the plan says of itself:
    parents, children: [first rank, size, number of samples] of each group.
    held: for each rank [sample, tokens, sample, tokens, ...] in stream order: what it holds in sparse layers.
    work: for each parent [sample, seconds, sample, seconds, ...] in stream order: what each of its ranks
      computes of a full layer's attention core, which is 1 / size of the sample's pairs.
  """
  return {
    'mode': plan.mode,
    'capacity': plan.capacity_tokens,
    'ids': list(plan.sample_ids),
    'lengths': list(plan.lengths),
    'parents': [_group(group) for group in plan.parents],
    'children': [_group(group) for group in plan.children],
    'held': held_blocks(plan),
    'work': work_blocks(plan, cost),
  }


def _group(group: Group) -> list[int]:
  return [group.first_rank, group.size, len(group.samples)]


def held_blocks(plan: Plan) -> list[list[int]]:
  """Each rank's run of its child's stream, cut at the samples' borders (the plan's rule 1)."""
  held: list[list[int]] = []
  for child in plan.children:
    ends = np.cumsum([plan.lengths[s] for s in child.samples], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    for i in range(child.size):
      low, high = i * total // child.size, (i + 1) * total // child.size
      blocks: list[int] = []
      for at in range(int(np.searchsorted(ends, low, 'right')), len(ends)):
        begin = max(low, int(ends[at]) - plan.lengths[child.samples[at]])
        if begin >= high:
          break
        blocks += [child.samples[at], min(high, int(ends[at])) - begin]
      held.append(blocks)
  return held


def work_blocks(plan: Plan, cost: CostModel) -> list[list[float]]:
  """Each parent's samples and the seconds of a full layer's core that every rank of it spends on them."""
  seconds = cost.attention_s(np.array(plan.lengths, np.int64), FULL)
  work: list[list[float]] = []
  for parent in plan.parents:
    blocks: list[float] = []
    for sample in parent.samples:
      # Six figures are finer than a pixel and keep the page small.
      blocks += [sample, float(f'{seconds[sample] / parent.size:.6g}')]
    work.append(blocks)
  return work
