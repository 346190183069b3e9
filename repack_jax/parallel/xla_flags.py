"""What XLA is told so that exchanges stay what the design says, and overlap. Imports without JAX."""

from __future__ import annotations

import logging
from typing import NamedTuple

from repack_jax.config.cluster import ClusterConfig

log = logging.getLogger(__name__)


class Flag(NamedTuple):
  """A value that a flag of XLA has to have, and what goes wrong with another."""

  value: str
  otherwise: str


DECOMPOSER = 'xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer'
GPU_FLAGS = {
  DECOMPOSER: Flag(
    'false', 'whole send buffers are gathered across hosts, the very bytes that repacking saves'
  ),
  # It crashed above 32 ranks (openxla/xla#47283) and gave corrupt gradients (marin-community/marin#8077).
  'xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel': Flag(
    'false', 'exchanges inside hosts may crash or be wrong'
  ),
  # XLA leaves it out of programs that hold a ragged all-to-all.
  'xla_gpu_enable_latency_hiding_scheduler': Flag('true', 'all collectives wait in line'),
  'xla_gpu_experimental_parallel_collective_overlap_limit': Flag(
    '4', 'collectives of parameters and exchanges wait for each other'
  ),
}
# By default these TPUs have all collectives in line. Their SparseCores can do them beside products. Those of
# several dimensions are across nodes.
_SPARSE_CORE_KINDS = ('TPU v5', 'TPU v5p', 'TPU v6 lite')
_SPARSE_CORES = 'xla_tpu_enable_sparse_core_collective_offload_'
_OF_PARAMETERS = ('all_gather', '2d_all_gather', '3d_all_gather', 'reduce_scatter', 'nd_reduce_scatter')
_OF_EXCHANGES = ('ragged_all_to_all',)
_SPELLINGS = {'1': 'true', '0': 'false'}


def compiler_options(device_kind: str, cluster: ClusterConfig) -> dict[str, str]:
  """Returns what XLA is told when it compiles a micro-batch, so that collectives run beside it.

  Just those that have something to run beside: parameters gathered ahead, and exchanges in chunks.

  Args:
    device_kind: JAX's name of the devices.
  """
  if device_kind not in _SPARSE_CORE_KINDS:
    return {}
  names = [
    *(_OF_PARAMETERS if cluster.prefetch_layers else ()),
    *(_OF_EXCHANGES if cluster.exchange_chunks > 1 else ()),
  ]
  options = {_SPARSE_CORES + name: 'true' for name in names}
  if options:
    log.info('to the SparseCores of %s: %s', device_kind, ' '.join(f'{k}={v}' for k, v in options.items()))
  return options


def with_gpu_flags(flags: str) -> str:
  """Returns `flags` (as in XLA_FLAGS) and the `GPU_FLAGS` it lacks; warns where it sets other values."""
  given = dict(flag.lstrip('-').partition('=')[::2] for flag in flags.split())
  for name, (value, otherwise) in GPU_FLAGS.items():
    if name not in given:
      flags += f' --{name}={value}'
      continue
    found = given[name].lower()
    if value not in (found, _SPELLINGS.get(found)):
      log.warning(
        'warning: XLA_FLAGS has --%s=%s, with which %s; leave it out, or set it to %s',
        name, given[name], otherwise, value,
      )  # fmt: skip
  return flags.strip()
