"""The first run, `make train`, shows layerwise repacking at work; by its plans alone."""

from pathlib import Path

import pytest

from repack_jax.config.gin_files import load
from repack_jax.data.batches import Batcher
from repack_jax.data.sources import open_source
from repack_jax.plan.plan import CHILDREN, PARENTS
from repack_jax.predict.cost_model import model_costs
from repack_jax.solver import solve

CONFIGS = Path(__file__).resolve().parents[1] / 'configs'


@pytest.mark.parametrize(
  ('config', 'parents', 'least'), [('tiny_cpu.gin', 16, 0.6), ('tiny_cpu_sp32.gin', 32, 0.5)]
)
def test_most_steps_repack_and_send_a_tenth_fewer_bytes_across_nodes(config, parents, least):
  """One micro-batch, wide parents over children inside nodes, against the plans with repacking disabled."""
  run = load([str(CONFIGS / config)], [])
  costs = model_costs(run.cluster, run.model)
  batches = Batcher(run.data, open_source(run.data))
  repacked = 0
  for _ in range(run.train.steps):
    solution = solve([len(sample) for sample in next(batches).samples], costs, run.batch_planner)
    (plan,) = solution.plans
    sent = costs.cross_node_bytes(plan)
    disabled = sum(map(costs.cross_node_bytes, solution.baseline_plans))
    inside = plan.widest(CHILDREN) <= run.cluster.ranks_per_node
    repacked += plan.widest(PARENTS) == parents and inside and sent <= 0.9 * disabled
  assert repacked >= least * run.train.steps
