"""The exchange in slow, readable NumPy: the oracle of the tests. Loops over ranks, no offsets.

Axis legend: T tokens on a rank, H query heads, K key/value heads, D head width, P ranks of a group.
"""

from __future__ import annotations

import numpy as np

from repack_jax.plan.plan import Plan


def _heads_of(index: int, size: int, num_heads: int) -> slice:
  """Which of `num_heads` the group's rank `index` works on; shared by several ranks if size > num_heads."""
  if size <= num_heads:
    each = num_heads // size
    return slice(index * each, (index + 1) * each)
  head = index * num_heads // size
  return slice(head, head + 1)


def _heads_to_peers(plan: Plan, layout: str, tensors: list[np.ndarray]) -> list[np.ndarray]:
  """From each rank's [T, heads, D] to each rank's own heads of all its group's tokens, in stream order."""
  received = []
  placement = plan.placement(layout)
  for rank in range(plan.num_ranks):
    first, size = int(placement.first_rank[rank]), int(placement.size[rank])
    heads = _heads_of(rank - first, size, tensors[0].shape[1])
    received.append(np.concatenate([tensors[peer][:, heads] for peer in range(first, first + size)]))
  return received


def dispatch(
  plan: Plan, layout: str, q: list[np.ndarray], k: list[np.ndarray], v: list[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Returns each rank's slices of the group, tokens to heads, from its q [T, H, D], k and v [T, K, D].

  Returns for each rank (q [T_group, H/P, D], k, v [T_group, max(1, K/P), D]), tokens in stream order.
  """
  parts = (_heads_to_peers(plan, layout, tensors) for tensors in (q, k, v))
  return list(zip(*parts, strict=True))


def combine(plan: Plan, layout: str, out: list[np.ndarray]) -> list[np.ndarray]:
  """Returns each rank's [T, H, D], heads to tokens, from each rank's [T_group, H/P, D]."""
  received = []
  placement = plan.placement(layout)
  for rank in range(plan.num_ranks):
    first, size = int(placement.first_rank[rank]), int(placement.size[rank])
    start = int(placement.stream_start[rank])
    mine = slice(start, start + int(placement.slots[rank]))
    received.append(np.concatenate([out[peer][mine] for peer in range(first, first + size)], axis=1))
  return received


def combine_gradient(plan: Plan, layout: str, grads: list[np.ndarray]) -> list[np.ndarray]:
  """Returns the gradient of `combine`: from each rank's [T, H, D] to each rank's [T_group, H/P, D]."""
  return _heads_to_peers(plan, layout, grads)


def dispatch_gradient(
  plan: Plan, layout: str, grads: list[tuple[np.ndarray, np.ndarray, np.ndarray]], num_kv_heads: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Returns the gradient of `dispatch`; key/value heads that went to several ranks get the sum of theirs."""
  num_heads = grads[0][0].shape[1] * int(plan.placement(layout).size[0])
  received = []
  placement = plan.placement(layout)
  for rank in range(plan.num_ranks):
    first, size = int(placement.first_rank[rank]), int(placement.size[rank])
    start, tokens = int(placement.stream_start[rank]), int(placement.slots[rank])
    sums = []
    for part, total_heads in enumerate((num_heads, num_kv_heads, num_kv_heads)):
      sample = grads[rank][part]
      total = np.zeros((tokens, total_heads, sample.shape[2]), sample.dtype)
      for peer in range(first, first + size):
        total[:, _heads_of(peer - first, size, total_heads)] += grads[peer][part][start : start + tokens]
      sums.append(total)
    received.append((sums[0], sums[1], sums[2]))
  return received


def sent_elements(
  plan: Plan, layout: str, num_heads: int, num_kv_heads: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns head-rows (of D elements) that rank i sends to rank j, int64 [ranks, ranks]: (dispatch, combine).

  The diagonal holds what a rank keeps. Counted slice by slice from what `dispatch` and `combine` move.
  """
  shape = (plan.num_ranks, plan.num_ranks)
  to_heads, to_tokens = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
  placement = plan.placement(layout)
  for source in range(plan.num_ranks):
    first, size = int(placement.first_rank[source]), int(placement.size[source])
    for peer in range(first, first + size):
      slices = [_heads_of(peer - first, size, n) for n in (num_heads, num_kv_heads, num_kv_heads)]
      heads = [s.stop - s.start for s in slices]
      to_heads[source, peer] = placement.slots[source] * sum(heads)
      to_tokens[peer, source] = placement.slots[source] * heads[0]
  return to_heads, to_tokens
