"""Do all processes of a run hold the same plan? Each makes its own, from the same lengths and config."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils


class PlansDiffer(RuntimeError):
  """Processes of one run made different plans: their data, config or software differ."""


def check_same_plan(digest: str) -> None:
  """Compares the digest of a step's plans over all processes; every process must call it.

  Raises:
    PlansDiffer: in every process, with the digests of those that differ from process 0.
  """
  if jax.process_count() == 1:
    return
  own = np.frombuffer(digest.encode().ljust(64), np.uint8)
  digests = [bytes(row).decode().strip() for row in np.asarray(multihost_utils.process_allgather(own))]
  others = {process: other for process, other in enumerate(digests) if other != digests[0]}
  if others:
    raise PlansDiffer(
      f'plans differ between processes: {digests[0]} in process 0, '
      + ', '.join(f'{other} in process {process}' for process, other in others.items())
      + '. They must read the same documents with the same config, and the same versions of numpy and numba'
    )
