"""Small models run on emulated meshes: what the model tests share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from models.transformer import Decoder
from repack_jax.config import (
  ClusterConfig,
  DataConfig,
  ModelConfig,
  PlannerConfig,
  RunConfig,
  TrainConfig,
)
from repack_jax.data.samples import Sample
from repack_jax.kinds import SlidingWindowAttention
from repack_jax.parallel import mesh
from repack_jax.plan.arrays import PlanArrays, pack
from repack_jax.plan.plan import Plan
from repack_jax.plan.program import Program
from repack_jax.predict.cost_model import model_costs
from repack_jax.solver import solve
from repack_jax.training.step import Sums, TrainStep

MODEL = ModelConfig(
  d_model=32, num_layers=2, pattern='FS', num_heads=32, num_kv_heads=4, head_dim=4,
  num_experts=8, experts_per_token=2, expert_width=16, shared_expert_width=8, dense_layers=0,
  loss_vocab_chunk=100, init_std=0.2,
).with_kind(SlidingWindowAttention(window_tokens=7))  # fmt: skip
MESHES = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (1, 8), 16: (2, 8), 32: (4, 8)}  # ranks: (nodes, a node)
SLOTS = 256  # of the whole mesh
LENGTHS = {
  'giant': [SLOTS],
  'giant and short': [60, 30, 30, 20, 20, 9, 3, 2, 1, 1],
  'long and short': [110, 40, 30, 20, 5, 1],
  'many of one token': [40] + [1] * 150,
  'equal': [32] * 7,
  'nearly empty': [3, 1],
}


def run_config(
  ranks: int, mode: str = 'repack', model: ModelConfig = MODEL, slots: int = SLOTS, **train: object
) -> RunConfig:
  """Rates that make the planner use wide parents with local children where lengths allow."""
  nodes, ranks_per_node = MESHES[ranks]
  return RunConfig(
    cluster=ClusterConfig(
      nodes=nodes, ranks_per_node=ranks_per_node, platform='cpu', matmul_flops_per_s=2e9,
      attention_flops_per_s=2e8, intra_node_bytes_per_s=1e8, inter_node_bytes_per_s=2e7,
      intra_node_latency_s=0, inter_node_latency_s=0,
    ),
    model=model,
    data=DataConfig(max_document_tokens=slots, batch_tokens=slots),
    planner=PlannerConfig(mode=mode, capacity_tokens=slots // ranks),
    train=TrainConfig(**train),  # type: ignore[arg-type]
  )  # fmt: skip


def on_cluster(run: RunConfig, **changes: object) -> RunConfig:
  """The same run with these fields of its cluster."""
  return dataclasses.replace(run, cluster=dataclasses.replace(run.cluster, **changes))  # type: ignore[arg-type]


@functools.cache
def program(run: RunConfig) -> TrainStep:
  """One a config, so that tests share compiled programs."""
  return TrainStep(run, mesh.make_mesh(run.cluster), Decoder(run.model))


@functools.cache
def _gradients(run: RunConfig):
  return jax.jit(program(run).gradients, static_argnames='program')


@functools.cache
def parameters(run: RunConfig):
  return program(run).init_state().params


def samples(lengths: Sequence[int], seed: int = 0) -> list[Sample]:
  """Samples of random bytes; each token's target is the next one, the last has none."""
  rng = np.random.default_rng(seed)
  made = []
  for number, length in enumerate(lengths):
    tokens = rng.integers(0, 256, length).astype(np.int32)
    made.append(Sample(number, 0, tokens, np.append(tokens[1:], -1).astype(np.int32)))
  return made


def without_targets(sample: Sample) -> Sample:
  return dataclasses.replace(sample, targets=np.full_like(sample.targets, -1))


def plans_of(run: RunConfig, lengths: Sequence[int], mode: str | None = None) -> tuple[Plan, ...]:
  """The plans of a batch in a mode, the run's own by default."""
  planner = run.batch_planner if mode is None else dataclasses.replace(run.batch_planner, mode=mode)
  return solve(lengths, model_costs(run.cluster, run.model), planner).plans


def widest_program(run: RunConfig, row_tokens: int = 1) -> Program:
  """A program that serves every plan of the run: one compile for all that need not have one of their own."""
  ranks = run.cluster.domain_ranks
  degrees = run.sp_degrees
  return Program(ranks, ranks, degrees, degrees, run.planner.capacity_tokens, row_tokens, has_solo=True)


def packed(run: RunConfig, plan: Plan, batch: Sequence[Sample], runs_it: Program) -> PlanArrays:
  return program(run).put(pack(plan, batch, runs_it))


def sums_of_plan(run: RunConfig, plan: Plan, batch: Sequence[Sample], runs_it: Program | None = None) -> Sums:
  """Losses and gradients of one micro-batch as NumPy arrays, not divided by anything.

  Args:
    runs_it: the program; by default the plan's own, which knows no other degrees.
  """
  runs_it = runs_it or Program.of_plan(plan)
  experts = max(1, run.model.num_experts)
  share = np.arange(1, experts + 1, dtype=np.float32)  # not uniform: the balance loss has a gradient
  load = np.tile(share / share.sum(), (run.model.num_layers, 1))
  result = _gradients(run)(parameters(run), load, packed(run, plan, batch, runs_it), program=runs_it)
  return jax.tree.map(np.asarray, result)


def sums_of_batch(run: RunConfig, batch: Sequence[Sample]) -> Sums:
  """The same for a batch, over all micro-batches of its plans."""
  parts = [sums_of_plan(run, plan, batch) for plan in plans_of(run, [len(s) for s in batch])]
  return jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *parts)


def assert_same(got: Sums, want: Sums, tolerance: float = 2e-4) -> None:
  """Losses, counts and every gradient agree, each gradient relative to its own largest entry."""
  np.testing.assert_array_equal(got.losses.expert_counts, want.losses.expert_counts)
  assert int(got.losses.dropped) == int(want.losses.dropped) == 0
  for name in ('cross_entropy', 'balance', 'router_z'):
    np.testing.assert_allclose(getattr(got.losses, name), getattr(want.losses, name), rtol=2e-5)
  got_leaves, want_leaves = (jax.tree_util.tree_leaves_with_path(s.grads) for s in (got, want))
  for (path, g), (_, w) in zip(got_leaves, want_leaves, strict=True):
    scale = np.abs(w).max()
    assert np.isfinite(g).all() and scale > 0, jax.tree_util.keystr(path)
    np.testing.assert_allclose(g, w, atol=tolerance * scale, rtol=0, err_msg=jax.tree_util.keystr(path))


def equations(jaxpr: Any, *names: str) -> list[Any]:
  """Every equation of these primitives, in functions called too; a loop's body once."""
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name in names:
      found.append(eqn)
    for value in eqn.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(inner, 'jaxpr', inner)
        if hasattr(inner, 'eqns'):
          found += equations(inner, *names)
  return found
