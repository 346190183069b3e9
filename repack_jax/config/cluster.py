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
  """The machines: `domains` x `nodes` x `ranks_per_node` ranks. The default rates are about those of H100s.

  Attributes:
    nodes: nodes of a domain, that is of what one parent can reach. A power of two.
    ranks_per_node: ranks on one fast link. A power of two. A domain has at most 32 ranks.
    domains: copies of the domain along the outer mesh axis `data`.
    platform: `cpu` emulates the ranks on this machine, `gpu` and `tpu` use real devices,
      `auto` takes the accelerator that JAX finds and emulates where there is none.
    matmul_flops_per_s: what projections, experts and logits sustain on a rank.
    attention_flops_per_s: what an attention core sustains, counted on query-key pairs that are not masked; of
      long samples, where `attention_curve` says more.
    attention_curve: (tokens, share) pairs, tokens ascending: cores of samples of so many tokens sustain that
      share of `attention_flops_per_s`. Between two of them it goes with the logarithm of the tokens; beyond
      the first and the last it stays. Empty: all lengths sustain the same.
    peak_flops_per_s: the rate that MFU is counted against; 0 where unknown, and no MFU is printed.
    intra_node_bytes_per_s: what one rank sends to the others of its node in an exchange, while it receives as
      much.
    inter_node_bytes_per_s: what one rank sends to other nodes in an exchange, while it receives as much.
    parameter_intra_node_bytes_per_s, parameter_inter_node_bytes_per_s: the same of collectives of parameters
      and gradients; 0 takes the exchanges' rate.
    intra_node_latency_s, inter_node_latency_s: what a collective takes however little it moves, inside a node
      and across nodes.
    peer_latency_s: what an exchange takes on top for each peer that it addresses, however little it gets.
    exchange: how heads are exchanged: `ragged`, one variable-size all-to-all a site, or `dense`, a padded one
      for each SP degree that the program knows, all slots of all ranks. Emulated ranks run `dense` whatever
      this says, since XLA has no ragged all-to-all on CPUs.
    exchange_chunks: chunks of heads that an exchange is cut into at most, each an exchange of its own, so
      that what one sends travels while the core computes another: as many as give each chunk the same heads.
    exchange_meets: who waits for whom at either site of a ragged exchange, and is addressed: `span`, all
      ranks that the program's exchange spans (a node's, or the domain's), or `group`, those of the SP group
      alone.
    halo_queries: attention cores by halo work on the halo's queries too and drop what they give, as cuDNN's
      do, whose calls have as many queries as keys.
    prefetch_layers: the program gathers parameters this many layers ahead of their use and reduces gradients
      as many behind, so that ranks may be as many layers apart; 0 where they meet at each layer. The training
      step here can do 0 and 1.
    share_inter_node_link: an exchange between nodes and a collective of parameters that run at the same time
      have half the link each; otherwise neither slows the other. Matters where parameters are gathered ahead.
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
  attention_curve: tuple[tuple[float, ...], ...] = ()
  peak_flops_per_s: float = 0.0
  intra_node_bytes_per_s: float = 3.4e11
  inter_node_bytes_per_s: float = 3.4e11 / 7.0
  parameter_intra_node_bytes_per_s: float = 0.0
  parameter_inter_node_bytes_per_s: float = 0.0
  intra_node_latency_s: float = 15e-6
  inter_node_latency_s: float = 35e-6
  peer_latency_s: float = 0.0
  exchange: str = 'ragged'
  exchange_chunks: int = 1
  exchange_meets: str = 'span'
  halo_queries: bool = False
  prefetch_layers: int = 0
  share_inter_node_link: bool = True
  memory_bytes: float = 0.0
  memory_bytes_per_s: float = 3.35e12
  wire_row_bytes: int = 1

  def __post_init__(self) -> None:
    check_types(self)
    check_choice(
      self, platform=('auto', 'cpu', 'gpu', 'tpu'), exchange=('ragged', 'dense'),
      exchange_meets=('span', 'group'),
    )  # fmt: skip
    check_min(self, 1, 'domains', 'exchange_chunks')
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
      self, 0, 'peak_flops_per_s', 'intra_node_latency_s', 'inter_node_latency_s', 'peer_latency_s',
      'prefetch_layers', 'memory_bytes', 'parameter_intra_node_bytes_per_s',
      'parameter_inter_node_bytes_per_s',
    )  # fmt: skip
    _check_curve(self.attention_curve)

  @property
  def domain_ranks(self) -> int:
    return self.nodes * self.ranks_per_node

  @property
  def num_ranks(self) -> int:
    return self.domains * self.domain_ranks

  @property
  def span_meets(self) -> bool:
    """Returns whether all ranks that an exchange spans meet at its sites, whatever their groups."""
    return self.exchange == 'dense' or self.exchange_meets == 'span'

  @property
  def parameter_rates(self) -> tuple[float, float]:
    """Returns bytes a second of a rank in collectives of parameters, inside its node and across nodes."""
    return (
      self.parameter_intra_node_bytes_per_s or self.intra_node_bytes_per_s,
      self.parameter_inter_node_bytes_per_s or self.inter_node_bytes_per_s,
    )

  def exchange_ratio(self, degree: int) -> float:
    """Returns how many times slower an all-to-all of so many ranks is than one that fills a node.

    Effective rates: what a rank sends to all its peers over the time that the slower link takes.
    """

    def rate(size: int) -> float:
      local = min(size, self.ranks_per_node)
      slowest_s = max((local - 1) / self.intra_node_bytes_per_s, (size - local) / self.inter_node_bytes_per_s)
      return (size - 1) / slowest_s

    return rate(self.ranks_per_node) / rate(degree)


def _check_curve(curve: tuple[tuple[float, ...], ...]) -> None:
  """Raises ConfigError unless the pairs ascend in tokens and the shares are above 0."""
  tokens = [pair[0] for pair in curve if len(pair) == 2]
  require(
    len(tokens) == len(curve) and tokens == sorted(set(tokens))
    and all(n >= 1 and share > 0 for n, share in curve),
    'ClusterConfig.attention_curve', curve,
    'must be pairs of tokens, ascending from 1 on, and a share above 0: ((512, 0.6), (16384, 1.0))',
  )  # fmt: skip
