"""What the page shows, as plain Python data that turns into JSON: `page_data`.

Samples are named by their position in a micro-batch's `lengths`; its `ids` say which of the batch they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from repack_jax.config import RunConfig
from repack_jax.plan.plan import PARENTS, Group, Plan
from repack_jax.plan.wire import Wire
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.costs import Costs
from repack_jax.predict.simulator import CAUSES
from repack_jax.report import words
from repack_jax.report.case import FAMILIES, Case, check_cases, family
from repack_jax.report.timeline import pattern_period, timeline

Data = dict[str, Any]
# [sample, amount, sample, amount, ...] in the order in which they lie.
Blocks = list[float]


def page_data(run: RunConfig, cases: Sequence[Case]) -> Data:
  """Returns everything that the page shows; raises ValueError where the cases cannot be compared."""
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
    'layer_titles': [run.model.kind(letter).title for letter in run.model.layer_kinds],
    'period': pattern_period(run.model),
    'about': [
      ['Cluster', words.describe_cluster(run)],
      ['Rates', words.describe_rates(run)],
      ['Model', words.describe_model(run.model)],
      ['Batch', words.describe_batch(lengths)],
    ],
    'exchange': _exchange(run, cases),
    'causes': [[cause, family(cause)] for cause in CAUSES],
    'families': list(FAMILIES),
    'samples': sorted(lengths, key=lambda sample: (-lengths[sample], sample)),
    'tick_s': tick_s,
    'cases': [_case(run, case, cases[0], tick_s) for case in cases],
  }


def _case(run: RunConfig, case: Case, baseline: Case, tick_s: float) -> Data:
  simulated = case.simulated
  costs = model_costs(run.cluster, run.model)
  return {
    'name': case.name,
    'step_s': simulated.step_s,
    'speed': baseline.simulated.step_s / simulated.step_s,
    'mfu': simulated.mfu or None,
    'tokens_per_s': sum(plan.total_tokens for plan in case.plans) / simulated.step_s,
    'cross_node_bytes': simulated.cross_node_bytes,
    'tokens': sum(plan.total_tokens for plan in case.plans),
    'solo_samples': sum(len(group.samples) for plan in case.plans for group in plan.solo),
    'solo_tokens': sum(int((plan.rank_tokens - plan.shared_tokens).sum()) for plan in case.plans),
    'seconds': [simulated.mean_s([cause]) for cause in CAUSES],
    'micro_batches': [layout_data(plan, costs) for plan in case.plans],
    'timeline': timeline(run.model, case, tick_s),
  }


def _exchange(run: RunConfig, cases: Sequence[Case]) -> dict[str, list[int]]:
  """SP degree -> `exchange_bytes`, for every degree of the cases' groups."""
  plans = [plan for case in cases for plan in case.plans]
  sizes = {group.size for plan in plans for group in (*plan.parents, *plan.children)}
  return {
    str(size): exchange_bytes(run.model.wire, size, run.cluster.ranks_per_node) for size in sorted(sizes)
  }


def exchange_bytes(wire: Wire, size: int, ranks_per_node: int) -> list[int]:
  """Returns bytes that a token of a group sends in a layer, forward: [inside nodes, between nodes]."""
  each = wire.bytes_per_peer(size)
  return [each * (min(size, ranks_per_node) - 1), each * max(0, size - ranks_per_node)]


def layout_data(plan: Plan, costs: Costs) -> Data:
  """Returns a plan's two layouts.

  Returns, besides what the plan says of itself:
    parents, children: [first rank, size, number of samples] of each group.
    held, solo_held: blocks of tokens that each rank holds, of its child's stream and of solo samples.
    halo: [tokens, ranks that they come from] at most, where layers in the children's layout run by halo.
    work, solo_work: blocks of seconds of the attention core of a layer in the parents' layout: of each
      parent, what every rank of it computes, and of each rank, what it computes of solo samples.
  """
  held, solo_held = held_blocks(plan)
  work, solo_work = work_blocks(plan, costs, PARENTS)
  return {
    'mode': plan.mode,
    'capacity': plan.capacity_tokens,
    'ids': list(plan.sample_ids),
    'lengths': list(plan.lengths),
    'parents': [_group(group) for group in plan.parents],
    'children': [_group(group) for group in plan.children],
    'held': held,
    'solo_held': solo_held,
    'halo': None if plan.halo_tokens is None else [plan.halo_tokens, plan.halo_hops(plan.halo_tokens)],
    'work': work,
    'solo_work': solo_work,
  }


def _group(group: Group) -> list[int]:
  return [group.first_rank, group.size, len(group.samples)]


def held_blocks(plan: Plan) -> tuple[list[Blocks], list[Blocks]]:
  """Returns of each rank its run of its child's stream, cut at samples' borders, and its solo samples."""
  held: list[Blocks] = []
  for child in plan.children:
    ends = np.cumsum([plan.lengths[s] for s in child.samples], dtype=np.int64)
    edges = np.concatenate([[0], np.cumsum(plan.shared_tokens[child.first_rank : child.end_rank])])
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
      blocks: Blocks = []
      for at in range(int(np.searchsorted(ends, low, 'right')), len(ends)):
        begin = max(low, int(ends[at]) - plan.lengths[child.samples[at]])
        if begin >= high:
          break
        blocks += [child.samples[at], min(high, int(ends[at])) - begin]
      held.append(blocks)
  return held, _solo_blocks(plan, plan.lengths)


def work_blocks(plan: Plan, costs: Costs, layout: str) -> tuple[list[Blocks], list[Blocks]]:
  """Returns seconds of an attention core: what every rank of each group spends, and solo samples by rank."""
  seconds = costs.attention_s(np.array(plan.lengths, np.int64), layout).tolist()
  return [_blocks(group, seconds) for group in plan.groups(layout)], _solo_blocks(plan, seconds)


def _solo_blocks(plan: Plan, amounts: Sequence[float]) -> list[Blocks]:
  """The solo samples of each rank, whole."""
  of_rank = {group.first_rank: _blocks(group, amounts) for group in plan.solo}
  return [of_rank.get(rank, []) for rank in range(plan.num_ranks)]


def _blocks(group: Group, amounts: Sequence[float]) -> Blocks:
  """What a rank of the group has of each of its samples, an even share."""
  blocks: Blocks = []
  for sample in group.samples:
    share = amounts[sample] / group.size
    # Tokens are whole; six figures of seconds are finer than a pixel and keep the page small.
    blocks += [sample, int(share) if share == int(share) else float(f'{share:.6g}')]
  return blocks
