"""Machines that are not there, as JAX devices to compile for.

XLA's compilers for TPU (package `libtpu`) and GPU (JAX's CUDA plugin) run on any Linux CPU. What they make
for such devices can be read, not run.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from repack_jax.checks import ConfigError, is_power_of_two

_TPU_NODE_DEVICES = 8  # of a box of nearest neighbours; of GPUs the topology says how many a node has


@dataclass(frozen=True)
class Machine:
  """A kind of accelerator.

  Attributes:
    platform: JAX's name of it.
    profile: the file of `configs/clusters/` with its rates and its memory.
    example: a topology, for messages.
    devices_per_chip: JAX devices of one TPU chip.
  """

  platform: str
  profile: str
  example: str
  devices_per_chip: int = 1


MACHINES = {
  'v5p': Machine('tpu', 'tpu_v5p.gin', 'v5p:2x4x4'),
  'v6e': Machine('tpu', 'tpu_v6e.gin', 'v6e:4x8'),
  'tpu7x': Machine('tpu', 'tpu_7x.gin', 'tpu7x:2x2x4', devices_per_chip=2),
  'h100': Machine('gpu', 'h100.gin', 'h100:4x8'),
  'h200': Machine('gpu', 'h200.gin', 'h200:4x8'),
}

# What XLA:GPU asks of a device before it compiles for it: NVIDIA's H100 SXM, from its data sheet and the CUDA
# programming guide's table for compute capability 9.0. The H200 differs in its memory alone.
_HOPPER = """
gpu_device_info {{
  name: "{name}"
  cuda_compute_capability {{ major: 9 }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800 memory_bandwidth: {memory_bytes_per_s} device_memory_size: {memory_bytes}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
"""
# So that libtpu neither looks for a TPU, nor locks the machine's only one, nor complains that there is none.
_NO_TPU_HERE = {
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-1',
  'TPU_MIN_LOG_LEVEL': '3',
  'TPU_STDERR_LOG_LEVEL': '3',
}
_GPU_NAMES = {'h100': 'NVIDIA H100 80GB HBM3', 'h200': 'NVIDIA H200'}


@dataclass(frozen=True)
class Topology:
  """A machine of some size.

  Attributes:
    name: as it was asked for, for example `v5p:2x4x4` (chips) or `h100:4x8` (nodes x GPUs).
    shape: the numbers behind the colon.
    num_devices: JAX devices.
    ranks_per_node: of them on one fast link.
  """

  name: str
  machine: Machine
  shape: tuple[int, ...]
  num_devices: int
  ranks_per_node: int


def parse(name: str) -> Topology:
  """Returns a topology from its name; raises ConfigError that says which there are."""
  kind, _, size = name.partition(':')
  known = ', '.join(machine.example for machine in MACHINES.values())
  if kind not in MACHINES or not re.fullmatch(r'\d+(x\d+)*', size):
    raise ConfigError(f'--topology {name}: unknown; say one like {known}')
  machine, shape = MACHINES[kind], tuple(int(n) for n in size.split('x'))
  if len(shape) != machine.example.count('x', len(kind)) + 1 or 0 in shape:
    raise ConfigError(f'--topology {name}: has {len(shape)} dimensions; say one like {machine.example}')
  devices = machine.devices_per_chip
  for n in shape:
    devices *= n
  node = shape[1] if machine.platform == 'gpu' else min(_TPU_NODE_DEVICES, devices)
  if not is_power_of_two(devices) or not is_power_of_two(node):
    raise ConfigError(f'--topology {name}: {devices} devices, {node} a node; both must be powers of two')
  return Topology(name, machine, shape, devices, node)


def prepare(topology: Topology, flags: str) -> None:
  """Sets what the compilers read from the environment. Call it before JAX is imported.

  Args:
    flags: for XLA, in the manner of `XLA_FLAGS`.
  """
  os.environ['JAX_PLATFORMS'] = 'cpu'  # no real device is touched
  os.environ['XLA_FLAGS'] = flags
  if topology.machine.platform == 'tpu':
    for variable, value in _NO_TPU_HERE.items():
      os.environ.setdefault(variable, value)
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')


def devices(topology: Topology, memory_bytes: float, memory_bytes_per_s: float) -> list[Any]:
  """Returns the topology's devices, to compile for.

  Raises:
    ConfigError: where JAX lacks the compiler for them.
  """
  from jax.experimental import topologies

  machine, kind = topology.machine, topology.name.partition(':')[0]
  try:
    if machine.platform == 'tpu':
      return list(topologies.get_topology_desc(topology.name, platform='tpu').devices)
    target = _HOPPER.format(
      name=_GPU_NAMES[kind], memory_bytes=int(memory_bytes), memory_bytes_per_s=int(memory_bytes_per_s)
    )
    nodes, local = topology.shape
    # Partitions on one NVLink, hosts of each, GPUs of each host.
    found = topologies.get_topology_desc(
      _GPU_NAMES[kind], platform='cuda', topology=f'{nodes}x1x{local}', target_config=target
    )
    return list(found.devices)
  except Exception as error:  # plugins raise what they will: not installed, no such topology, a wrong version
    lines = str(error).strip().splitlines() or [type(error).__name__]
    raise ConfigError(
      f'--topology {topology.name}: JAX cannot compile for it here ({lines[0]}). Install the compiler: '
      f'pip install -r requirements-{machine.platform}.txt'
    ) from error
