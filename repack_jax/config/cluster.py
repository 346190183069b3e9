"""The machines: their shape, and the rates that the planner and the simulator reckon with.

`configs/clusters/` has profiles; `scripts/calibrate.py` measures one.
"""

from __future__ import annotations

from dataclasses import dataclass

from repack_jax.checks import check_choice, check_min, check_types, is_power_of_two, require
from repack_jax.plan.wire import MOST_ROW_BYTES

MAX_DOMAIN_RANKS = 32  # GPU ragged all-to-alls beyond this crash in some XLA versions (openxla/xla#47283)


@dataclass(frozen=True)
class ClusterConfig:
  """The machines: `domains` x `nodes` x `ranks_per_node` ranks. The default rates are those of H100 nodes.

  Attributes:
    nodes: nodes of a domain, that is of what one parent can reach. A power of two.
    ranks_per_node: ranks on one fast link. A power of two. A domain has at most 32 ranks.
    domains: copies of the domain along the outer mesh axis `data`.
    platform: `cpu` emulates the ranks on this machine, `gpu` and `tpu` use real devices,
      `auto` takes the accelerator that JAX finds and emulates where there is none.
    matmul_flops_per_s: what projections, experts and logits sustain on a rank.
    attention_flops_per_s: what an attention core sustains, counted on query-key pairs that are not masked.
    peak_flops_per_s: the rate that MFU is counted against; 0 where unknown, and no MFU is printed.
    intra_node_bytes_per_s: what one rank sends to the others of its node, while it receives as much.
    inter_node_bytes_per_s: what one rank sends to other nodes, while it receives as much.
    intra_node_latency_s, inter_node_latency_s: what a collective takes however little it moves, inside a node
      and across nodes.
    prefetch_layers: the program gathers parameters this many layers ahead of their use and reduces gradients
      behind the backward pass, so that ranks may be as many layers apart; 0 where ranks meet at each layer.
    memory_bytes: of a rank; 0 where unknown.
    memory_bytes_per_s: of a rank; what the optimizer's update is bound by.
    wire_row_bytes: what the links pad shorter rows to, so that exchanges send whole ones: 512 on TPUs, 1
      elsewhere. A power of two. Plans depend on it.
  """

  nodes: int = 2
  ranks_per_node: int = 8
  domains: int = 1
  platform: str = 'auto'
  matmul_flops_per_s: float = 6.9e14
  attention_flops_per_s: float = 5.9e14
  peak_flops_per_s: float = 0.0
  intra_node_bytes_per_s: float = 3.4e11
  inter_node_bytes_per_s: float = 3.4e11 / 7.0
  intra_node_latency_s: float = 15e-6
  inter_node_latency_s: float = 35e-6
  prefetch_layers: int = 1
  memory_bytes: float = 0.0
  memory_bytes_per_s: float = 3.35e12
  wire_row_bytes: int = 1

  def __post_init__(self) -> None:
    check_types(self)
    check_choice(self, platform=('auto', 'cpu', 'gpu', 'tpu'))
    check_min(self, 1, 'domains')
    for name in ('nodes', 'ranks_per_node'):
      require(
        is_power_of_two(getattr(self, name)),
        f'ClusterConfig.{name}',
        getattr(self, name),
        'must be a power of two, since groups are aligned power-of-two blocks of ranks',
      )
    require(
      is_power_of_two(self.wire_row_bytes) and self.wire_row_bytes <= MOST_ROW_BYTES,
      'ClusterConfig.wire_row_bytes', self.wire_row_bytes,
      f'must be a power of two up to {MOST_ROW_BYTES}: 512 for TPUs, 1 elsewhere',
    )  # fmt: skip
    require(
      self.domain_ranks <= MAX_DOMAIN_RANKS, 'ClusterConfig.nodes', self.nodes,
      f'{self.nodes} nodes x {self.ranks_per_node} ranks are more than the {MAX_DOMAIN_RANKS} ranks that one '
      'exchange may span; set ClusterConfig.domains for more ranks',
    )  # fmt: skip
    for name in (
      'matmul_flops_per_s', 'attention_flops_per_s', 'intra_node_bytes_per_s', 'inter_node_bytes_per_s',
      'memory_bytes_per_s',
    ):  # fmt: skip
      require(getattr(self, name) > 0, f'ClusterConfig.{name}', getattr(self, name), 'must be above 0')
    check_min(
      self, 0, 'peak_flops_per_s', 'intra_node_latency_s', 'inter_node_latency_s', 'prefetch_layers',
      'memory_bytes',
    )  # fmt: skip

  @property
  def domain_ranks(self) -> int:
    return self.nodes * self.ranks_per_node

  @property
  def num_ranks(self) -> int:
    return self.domains * self.domain_ranks
