"""What `bench_planner.py` plans: one model, its clusters, and batches of real and made-up lengths."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from repack_jax.config import MODES, ClusterConfig, ModelConfig, PlannerConfig
from repack_jax.data.lengths import Histogram
from repack_jax.kinds import SlidingWindowAttention
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.costs import Costs

# 1F3S with experts, of the size that a few dozen GPUs train.
MODEL = ModelConfig(
  vocab_size=128256, d_model=4096, num_layers=24, pattern='FSSS', num_heads=32, num_kv_heads=4, head_dim=128,
  num_experts=64, experts_per_token=4, expert_width=2048, compute_dtype='bfloat16',
).with_kind(SlidingWindowAttention(window_tokens=4096))  # fmt: skip
# Slots follow the fullest rank: rounding them, or taking all of the capacity, would hide what planning gains.
STEP_TOKENS = 1


@dataclass(frozen=True)
class PlanCase:
  """A batch to plan: all that `solve` takes. `name` says what kind of batch it is."""

  name: str
  lengths: np.ndarray
  costs: Costs
  config: PlannerConfig


def costs_of(nodes: int = 4, ranks_per_node: int = 8, domains: int = 1, **changes: Any) -> Costs:
  """`MODEL` at the default rates; ranks meet at each layer, which is what `predicted_s` predicts."""
  shape = {'nodes': nodes, 'ranks_per_node': ranks_per_node, 'domains': domains, 'prefetch_layers': 0}
  return model_costs(ClusterConfig(**(shape | changes)), MODEL)


def capacity_of(lengths: np.ndarray, cluster: ClusterConfig, slack: float = 1.25) -> int:
  """Slots of a rank: so many times the mean, or what the longest sample needs over a domain."""
  longest = lengths.max() / cluster.domain_ranks
  return math.ceil(max(slack * lengths.sum() / cluster.num_ranks, longest))


def draw(lengths: np.ndarray | Histogram, rng: np.random.Generator, n: int) -> np.ndarray:
  """n lengths, int64 [n], of what `read_lengths` returns."""
  return lengths.draw(rng, n) if isinstance(lengths, Histogram) else rng.choice(lengths, n)


def real_cases(
  name: str, lengths: np.ndarray | Histogram, domains: int, samples: int, count: int
) -> Iterator[PlanCase]:
  """Batches of a domain's or more: 4 nodes of 8 ranks each, mode `solve`."""
  costs = costs_of(domains=domains)
  for number in range(count):
    batch = draw(lengths, np.random.default_rng([domains, samples, number]), samples)
    capacity = capacity_of(batch, costs.cluster)
    yield PlanCase(
      name, batch, costs, PlannerConfig(capacity_tokens=capacity, capacity_step_tokens=STEP_TOKENS)
    )


def micro_cases(
  name: str, lengths: np.ndarray | Histogram, micro_batches: int, samples: int, count: int, full: float = 0.9
) -> Iterator[PlanCase]:
  """Batches that fill so much of so many micro-batches of 32 ranks; of fewer, with one very long sample."""
  for case in real_cases(name, lengths, 1, samples, count):
    capacity = capacity_of(case.lengths, case.costs.cluster, 1 / (full * micro_batches))
    yield dataclasses.replace(case, config=dataclasses.replace(case.config, capacity_tokens=capacity))


def equal_cases(
  counts: Sequence[int], thousands: Sequence[int], capacity_tokens: int = 65_536
) -> Iterator[PlanCase]:
  """A few long samples of one length on 32 ranks: at 1.25 times what they need, and at a fixed capacity.

  So few leave no short ones to even out what whole samples in groups of powers of two leave uneven.
  """
  costs = costs_of()
  for count, thousand in itertools.product(counts, thousands):
    batch = np.full(count, 1000 * thousand)
    for name, capacity in (
      ('1.25 x need', capacity_of(batch, costs.cluster)),
      (f'{capacity_tokens:,}', capacity_tokens),
    ):
      config = PlannerConfig(capacity_tokens=capacity, capacity_step_tokens=STEP_TOKENS)
      yield PlanCase(name, batch, costs, config)


def small_cases(files: Mapping[str, np.ndarray | Histogram], count: int) -> Iterator[PlanCase]:
  """Batches small enough for the exact solver: 2 .. 12 samples on two nodes of 4 or 8 ranks, mode `solve`."""
  makers = [*files, 'lognormal', 'uniform', 'one giant', 'two sizes']
  for number in range(count):
    rng = np.random.default_rng([7, number])
    n = int(rng.integers(2, 13))
    name = makers[number % len(makers)]
    if name in files:
      drawn = draw(files[name], rng, 100 * n)
      batch = rng.permutation(np.concatenate([drawn[drawn >= 256], np.full(n, 256)])[:n])
    elif name == 'lognormal':
      batch = np.clip(np.exp(rng.normal(8.5, 1.5, n)), 64, 500_000).astype(np.int64)
    elif name == 'uniform':
      batch = rng.integers(512, 65_537, n)
    elif name == 'one giant':
      batch = np.append(rng.integers(256, 16_385, n - 1), rng.integers(65_536, 524_289))
    else:
      batch = rng.choice(rng.integers(1024, 131_073, 2), n)
    # The exact solver knows exchanges that are meetings of their groups.
    costs = costs_of(nodes=2, ranks_per_node=int(rng.choice([4, 8])), exchange_meets='group')
    capacity = capacity_of(batch, costs.cluster, float(rng.choice([1.1, 1.25, 1.5, 2.5])))
    config = PlannerConfig(capacity_tokens=capacity, capacity_step_tokens=STEP_TOKENS)
    yield PlanCase(name, batch.astype(np.int64), costs, config)


def random_case(number: int) -> PlanCase:
  """A batch of any kind on any mesh in any mode: number and kind alone make it. Few layers, for speed."""
  rng = np.random.default_rng([11, number])
  cluster = ClusterConfig(
    nodes=int(2 ** rng.integers(0, 3)),
    ranks_per_node=int(2 ** rng.integers(0, 4)),
    domains=int(rng.integers(1, 4)),
    prefetch_layers=int(rng.integers(0, 2)),
    exchange_meets=str(rng.choice(['span', 'group'])),
    exchange=str(rng.choice(['ragged', 'ragged', 'dense'])),
    wire_row_bytes=int(rng.choice([1, 512])),
  )
  placement, pattern = str(rng.choice(['spread', 'replicated'])), ('FSSS', 'FS', 'F', 'S')[number % 4]
  model = ModelConfig(
    pattern=pattern, num_heads=32, num_kv_heads=4, num_experts=8, expert_placement=placement
  )
  config = PlannerConfig(
    mode=str(rng.choice(MODES)),
    capacity_tokens=int(np.exp(rng.uniform(0, np.log(5000)))),
    capacity_step_tokens=int(rng.choice([0, 1, 64])),
    max_sp_degree=int(2 ** rng.integers(0, 6)),
  )
  costs = model_costs(cluster, model)
  widest = costs.degrees(config)[-1]
  row = costs.wire.row_tokens(widest, cluster.wire_row_bytes)
  config = dataclasses.replace(config, capacity_tokens=-(-config.capacity_tokens // row) * row)
  longest = widest * config.capacity_tokens
  name = str(rng.choice(['empty', 'one', 'equal', 'giant', 'dust', 'lognormal', 'uniform', 'too long']))
  n = int(np.exp(rng.uniform(0, np.log(300))))
  if name == 'empty':
    lengths = np.zeros(0, np.int64)
  elif name == 'one':
    lengths = rng.integers(1, longest + 1, 1)
  elif name == 'equal':
    lengths = np.full(n, rng.integers(1, longest + 1))
  elif name == 'giant':
    lengths = np.append(rng.integers(1, max(2, longest // 50), n), longest)
  elif name == 'dust':
    lengths = rng.integers(1, min(4, longest + 1), n)
  elif name == 'lognormal':
    lengths = np.clip(np.exp(rng.normal(np.log(longest) - 3, 1.5, n)), 1, longest).astype(np.int64)
  else:
    lengths = rng.integers(1, longest + 1, n)
    if name == 'too long':
      lengths[rng.integers(n)] = longest + rng.integers(1, 10)
  return PlanCase(name, lengths, costs, config)
