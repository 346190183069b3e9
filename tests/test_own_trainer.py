"""The example of another trainer: it learns, repacks, and gives what one rank gives."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import repack_jax as rj

FILE = Path(__file__).resolve().parents[1] / 'examples' / 'own_trainer.py'


@pytest.fixture(scope='module')
def example():
  spec = importlib.util.spec_from_file_location('own_trainer', FILE)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def mesh_of(hosts: int, chips: int) -> jax.sharding.Mesh:
  return jax.make_mesh(
    (hosts, chips), ('host', 'chip'), (AxisType.Auto,) * 2, devices=jax.devices()[: hosts * chips]
  )


def test_another_trainer_learns_by_repacked_layers(example, monkeypatch):
  batch = example.samples(np.random.default_rng(0), (200, 150, 60, 40, 9, 5))
  trained = list(example.train(mesh_of(2, 4), [batch] * 8))
  losses = [loss for loss, _ in trained]
  assert losses[-1] < losses[0] - 0.5
  (plan,) = trained[0][1]
  assert [group.size for group in plan.parents] == [8] and [group.size for group in plan.children] == [4, 4]
  # The same on one rank, which has nobody to exchange with.
  costs = dataclasses.replace(example.COSTS, cluster=rj.ClusterConfig(nodes=1, ranks_per_node=1))
  monkeypatch.setattr(example, 'COSTS', costs)
  monkeypatch.setattr(example, 'PLANNER', rj.PlannerConfig(capacity_tokens=512))
  alone = [loss for loss, _ in example.train(mesh_of(1, 1), [batch] * 8)]
  np.testing.assert_allclose(losses, alone, rtol=1e-4)


def test_it_is_as_short_as_the_docs_say():
  lines = [line for line in FILE.read_text().splitlines() if line.strip()]
  assert len(lines) < 60


def test_the_facade_names_what_it_has():
  assert {name: getattr(rj, name) for name in rj.__all__}
  with pytest.raises(AttributeError, match="no attribute 'unknown'"):
    rj.unknown  # noqa: B018
