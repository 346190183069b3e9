"""What the compiled search works on: the problem of one domain, and layouts of its samples on its ranks.

Samples are numbered within the domain, longest first. Attention runs in two layouts, the parents' and the
children's; which layers run in which does not matter here, only how many, and what a sample costs in one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from repack_jax.solver.compiled import compiled


class Problem(NamedTuple):
  """One domain of a micro-batch. Seconds are those of forward and backward pass together.

  Attributes:
    tokens: float64 [samples].
    parents_s, children_s: float64 [samples], each sample's attention in one layer that runs in that layout.
    step_s: float64 [samples], all of a sample's work in a step but projections and logits.
    layer_loads: float64 [samples, 2], what parents balance where ranks meet at each layer: attention in the
      parents' layers, and tokens. Loads are shares of the domain's sum.
    step_loads: float64 [samples, 2], what parents balance where ranks don't meet: all seconds, twice.
    children_loads: float64 [samples, 2], what children balance: attention in their layers, and tokens.
    ranks, node_ranks: ranks of the domain and of a node.
    node_of: int64 [ranks].
    capacity: token slots of a rank.
    solo_slack: tokens that solo samples may exceed the capacity by, since bundles fill a rank less well than
      the samples in them will.
    intra_s, inter_s: float64 [degrees], per token and peer over either link, by log2 of the degree.
    latency_s: float64 [degrees], of all exchanges of a layer, where groups meet for themselves; else zeros.
    span_latency_s: float64 [2], the same where all ranks of a node or of the domain meet; else zeros.
    dense_s: float64 [degrees], of a layer that knows this degree, whatever is exchanged at it; zeros where
      exchanges are ragged, and all other seconds of exchanges are where they are dense.
    second_site: float64 [degrees], the share of an exchange's seconds that its second site has.
    span_meets: whether all ranks meet that a layout's exchanges span: a node's, or the domain's where a group
      of the layout is wider.
    own_s: per token and over all layers, what runs where the token lies.
    routed_s: per token and layer, its experts.
    routed_spread: whether the ranks of a node share the experts.
    expert_exchange_s: per token and layer, the experts' exchanges.
    parents_layers, children_layers: how many layers run in each layout.
    by_halo: whether the children's layers run by halo: they exchange no heads, and nobody meets there.
    halo_s: then, of a rank, all that a layer shifts.
    all_meet: whether all ranks of the domain meet at each layer, or only those that exchange.
  """

  tokens: np.ndarray
  parents_s: np.ndarray
  children_s: np.ndarray
  step_s: np.ndarray
  layer_loads: np.ndarray
  step_loads: np.ndarray
  children_loads: np.ndarray
  ranks: int
  node_ranks: int
  node_of: np.ndarray
  capacity: float
  solo_slack: float
  intra_s: np.ndarray
  inter_s: np.ndarray
  latency_s: np.ndarray
  span_latency_s: np.ndarray
  dense_s: np.ndarray
  second_site: np.ndarray
  span_meets: bool
  own_s: float
  routed_s: float
  routed_spread: bool
  expert_exchange_s: float
  parents_layers: int
  children_layers: int
  by_halo: bool
  halo_s: float
  all_meet: bool


class Degrees(NamedTuple):
  """What a layout is made from: for each sample the smallest group that it may be placed in.

  Attributes:
    parents: int64 [samples], powers of two; 0 makes a sample solo.
    children: int64 [samples], powers of two.
  """

  parents: np.ndarray
  children: np.ndarray


class Groups(NamedTuple):
  """Groups that tile a domain's ranks, in the order of their ranks.

  Attributes:
    first, size: int64 [ranks], of which the first `number[0]` entries count, as of all arrays [ranks] here.
    tokens, work_s: float64 [ranks], sums over the samples of a group; work is attention in one layer.
    of: int64 [samples], the group of each sample, -1 for none.
    number: int64 [1].
  """

  first: np.ndarray
  size: np.ndarray
  tokens: np.ndarray
  work_s: np.ndarray
  of: np.ndarray
  number: np.ndarray


class Solo(NamedTuple):
  """Samples on single ranks, in no group.

  Attributes:
    tokens, parents_s, children_s: float64 [ranks], sums over the samples of a rank.
    of: int64 [samples], the rank of each sample, -1 for none.
  """

  tokens: np.ndarray
  parents_s: np.ndarray
  children_s: np.ndarray
  of: np.ndarray


class Layout(NamedTuple):
  """Where each sample of a domain is: solo, or in a parent and a child."""

  parents: Groups
  children: Groups
  solo: Solo


@compiled
def empty_groups(ranks: int, samples: int) -> Groups:
  """Returns no groups yet, with room for `ranks` of them."""
  return Groups(
    first=np.zeros(ranks, np.int64),
    size=np.zeros(ranks, np.int64),
    tokens=np.zeros(ranks),
    work_s=np.zeros(ranks),
    of=np.full(samples, -1, np.int64),
    number=np.zeros(1, np.int64),
  )


@compiled
def no_solo(ranks: int, samples: int) -> Solo:
  """Returns no solo samples."""
  return Solo(
    tokens=np.zeros(ranks),
    parents_s=np.zeros(ranks),
    children_s=np.zeros(ranks),
    of=np.full(samples, -1, np.int64),
  )


@compiled
def log2(size: int) -> int:
  """Returns the exponent of a power of two."""
  power = 0
  while size > 1:
    size >>= 1
    power += 1
  return power
