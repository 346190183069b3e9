"""What XLA is told so that the exchange stays what the design says it is. Imports without JAX.

By default XLA:GPU rewrites a ragged all-to-all that spans hosts: it gathers whole send buffers across hosts,
the very bytes that repacking saves. And its one-shot path inside hosts crashed above 32 ranks
(openxla/xla#47283) and gave corrupt gradients in some versions (marin-community/marin#8077).
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

DECOMPOSER = 'xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer'
GPU_FLAGS = {
  DECOMPOSER: 'false',
  'xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel': 'false',
}


def with_gpu_flags(flags: str) -> str:
  """Returns `flags` (as in XLA_FLAGS) and the `GPU_FLAGS` it lacks; warns where it sets other values."""
  given = dict(flag.lstrip('-').partition('=')[::2] for flag in flags.split())
  for name, value in GPU_FLAGS.items():
    if name not in given:
      flags += f' --{name}={value}'
    elif given[name].lower() not in (value, '0'):
      log.warning(
        'warning: XLA_FLAGS has --%s=%s, which makes exchanges slow across hosts or wrong; leave it out, or '
        'set it to %s', name, given[name], value,
      )  # fmt: skip
  return flags.strip()
