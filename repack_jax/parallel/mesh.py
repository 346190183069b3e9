"""The device mesh: axis names and shardings, in this file only.

`data` holds copies of the domain; a domain is `node` x `local`, and `local` lies on the fast link.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from repack_jax.checks import ConfigError
from repack_jax.config.cluster import ClusterConfig
from repack_jax.parallel.xla_flags import with_gpu_flags

DATA, NODE, LOCAL_AXIS = 'data', 'node', 'local'
DOMAIN_AXES = (NODE, LOCAL_AXIS)
ALL_AXES = (DATA, NODE, LOCAL_AXIS)
TILE_ROWS, TILE_COLUMNS = 8, 128  # a TPU's tiles; shards of fewer are padded to them
RANK_BLOCKS = PartitionSpec(ALL_AXES)
REPLICATED = PartitionSpec()


def start_devices(cluster: ClusterConfig) -> None:
  """Readies JAX for the config's ranks; call it before anything touches a device.

  On the CPU each rank is an emulated device. Many of them share few cores, so one may wait long for
  another: XLA's limit on that, meant for real deadlocks, is raised.
  """
  flags = os.environ.get('XLA_FLAGS', '')
  if cluster.platform in ('auto', 'gpu'):
    flags = with_gpu_flags(flags)
  for kind in ('warn_stuck', 'terminate'):
    name = f'--xla_cpu_collective_call_{kind}_timeout_seconds'
    if name not in flags:
      flags += f' {name}=1800'
  os.environ['XLA_FLAGS'] = flags.strip()
  if cluster.platform != 'auto':
    jax.config.update('jax_platforms', {'gpu': 'cuda'}.get(cluster.platform, cluster.platform))
  jax.config.update('jax_num_cpu_devices', cluster.num_ranks)


def make_mesh(cluster: ClusterConfig) -> Mesh:
  """Returns the mesh of the config over JAX's devices.

  Raises:
    ConfigError: where there are more or fewer devices than ranks, or none of the platform.
  """
  try:
    devices = jax.devices()
  except RuntimeError as error:
    raise ConfigError(
      f'ClusterConfig.platform = {cluster.platform!r}: JAX finds no such devices here. Install the JAX of '
      "that platform, or set ClusterConfig.platform = 'cpu' to emulate the ranks"
    ) from error
  if len(devices) < cluster.num_ranks or (devices[0].platform != 'cpu' and len(devices) != cluster.num_ranks):
    raise ConfigError(
      f'ClusterConfig.domains x nodes x ranks_per_node = {cluster.domains} x {cluster.nodes} x '
      f'{cluster.ranks_per_node} = {cluster.num_ranks} ranks, but JAX sees {len(devices)} '
      f"{devices[0].platform} devices. Change these to fit, or set ClusterConfig.platform = 'cpu' to emulate"
    )
  return mesh_of(devices[: cluster.num_ranks], cluster)


def mesh_of(devices: Sequence[Any], cluster: ClusterConfig) -> Mesh:
  """Returns a mesh of these devices, `local` on the fast link.

  That is a host's devices in JAX's order, or on TPU, where the torus goes on across hosts, blocks of nearest
  neighbours.
  """
  if devices[0].platform == 'tpu':
    places = [device_place(device) for device in devices]
    devices = [devices[i] for i in neighbour_order(places, cluster.ranks_per_node)]
  grid = np.asarray(devices).reshape(cluster.domains, cluster.nodes, cluster.ranks_per_node)
  return Mesh(grid, ALL_AXES, axis_types=(AxisType.Auto,) * len(ALL_AXES))


def device_place(device: Any) -> tuple[int, ...]:
  """Returns a TPU's slice, its coordinates on the slice's torus and its core on the chip; else its host."""
  if device.platform == 'tpu':
    return getattr(device, 'slice_index', 0), *device.coords, device.core_on_chip
  return (device.process_index,)


def neighbour_order(places: Sequence[tuple[int, ...]], block: int) -> list[int]:
  """Returns an order of devices in which each `block` in a row are a box of nearest neighbours.

  Of the boxes that tile the torus it takes the one whose two farthest devices are the fewest links apart.

  Args:
    places: of each device, as `device_place` has it.
    block: devices of a box, a power of two.
  """
  grid = np.asarray(places) - np.min(places, axis=0)
  size = grid.max(axis=0) + 1
  boxes = [
    box for box in np.ndindex(*(size + 1))
    if math.prod(box) == block and box[0] == 1 and not (size % np.maximum(box, 1)).any()
  ]  # fmt: skip
  if not boxes or math.prod(size) != len(places):  # no box divides it: leave JAX's order
    return list(range(len(places)))
  # Cores of a chip are no link apart; among equals the box that is longest in the first dimensions.
  box = np.array(min(boxes, key=lambda box: (sum(box[:-1]), max(box[:-1]), [-n for n in box])))
  keys = np.concatenate([grid // box, grid % box], axis=1)
  return [int(i) for i in np.lexsort(keys.T[::-1])]


def domain_size(mesh: Mesh) -> int:
  return mesh.shape[NODE] * mesh.shape[LOCAL_AXIS]


def parameter_spec(shape: tuple[int, ...], expert_axis: int | None, mesh: Mesh) -> PartitionSpec:
  """Returns how a parameter is sharded: over the domain, along one dimension that the ranks divide.

  The first of which each rank gets a whole tile, since shards of major dimensions are contiguous; else the
  largest. `local` is the major axis: gathering over `node` comes first, each rank its own share, then inside
  nodes. Spread experts are sharded over `local` along the expert dimension and over `node` along another. A
  parameter with no such dimension is replicated. All copies along `data` are equal.
  """
  entries: list[object] = [None] * len(shape)
  axes: tuple[str, ...] = DOMAIN_AXES[::-1]
  ways = domain_size(mesh)
  if expert_axis is not None:
    entries[expert_axis] = LOCAL_AXIS
    axes, ways = (NODE,), mesh.shape[NODE]
  free = [d for d in range(len(shape)) if d != expert_axis and shape[d] % ways == 0]
  if free and ways > 1:
    tiled = [d for d in free if shape[d] // ways >= TILE_ROWS]
    entries[tiled[0] if tiled else max(free, key=lambda d: shape[d])] = axes
  return PartitionSpec(*entries)


def sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
  return NamedSharding(mesh, spec)
