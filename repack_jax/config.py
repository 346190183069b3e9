"""The six configs of a run: frozen dataclasses, checked when they are made.

Nothing here imports JAX: `train.py` reads a config before it starts JAX, since the config says how
many devices to emulate, and the planner and simulator use configs on machines without JAX.
Loading them from gin files is in `gin_files.py`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass

FULL, SPARSE = 'F', 'S'
MODES = ('static', 'parents', 'repack')
MAX_DOMAIN_RANKS = 32  # GPU ragged all-to-alls beyond this crash in some XLA versions (openxla/xla#47283)


class ConfigError(ValueError):
  """A user's mistake in a config or on the command line: field, value and remedy, in one message."""


def _is_power_of_two(n: int) -> bool:
  return n > 0 and n & (n - 1) == 0


def _require(ok: bool, field: str, value: object, remedy: str) -> None:
  if not ok:
    raise ConfigError(f'{field} = {value!r}: {remedy}')


def _check_types(config: object) -> None:
  """Raises ConfigError where a field's value is not of its annotated type (int is taken for float)."""
  hints = typing.get_type_hints(type(config))
  for field in dataclasses.fields(config):  # type: ignore[arg-type]
    value = getattr(config, field.name)
    hint = hints[field.name]
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    ok = any(
      (kind is float and isinstance(value, int | float) and not isinstance(value, bool))
      or (kind is int and isinstance(value, int) and not isinstance(value, bool))
      or (kind not in (int, float) and isinstance(value, kind))
      for kind in allowed
    )
    names = ' or '.join(kind.__name__ for kind in allowed)
    hint_quotes = ' (quote strings in gin)' if allowed == (str,) else ''
    name = f'{type(config).__name__}.{field.name}'
    _require(ok, name, value, f'must be of type {names}{hint_quotes}')
    _require(not isinstance(value, float) or math.isfinite(value), name, value, 'must be a finite number')


def _check_choice(config: object, **choices: tuple[str, ...]) -> None:
  for name, allowed in choices.items():
    value = getattr(config, name)
    _require(
      value in allowed, f'{type(config).__name__}.{name}', value, f'choose one of {", ".join(allowed)}'
    )


def _check_min(config: object, minimum: float, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    _require(value >= minimum, f'{type(config).__name__}.{name}', value, f'must be at least {minimum}')


@dataclass(frozen=True)
class ClusterConfig:
  """The machines: `domains` x `nodes` x `ranks_per_node` ranks, and the rates the planner reckons with.

  Attributes:
    nodes: nodes of a domain, that is of what one parent can reach. A power of two.
    ranks_per_node: ranks on one fast link. A power of two. A domain has at most 32 ranks.
    domains: copies of the domain along the outer mesh axis `data`.
    platform: `cpu` emulates the ranks on this machine, `gpu` and `tpu` use real devices,
      `auto` takes the accelerator that JAX finds and emulates where there is none.
    sustained_flops_per_s: compute rate of a rank that the planner assumes.
    peak_flops_per_s: the rate that MFU is counted against; 0 where unknown, and no MFU is printed.
    intra_node_bytes_per_s: what one rank sends to the others of its node.
    inter_node_bytes_per_s: what one rank sends to other nodes.
  """

  nodes: int = 2
  ranks_per_node: int = 8
  domains: int = 1
  platform: str = 'auto'
  sustained_flops_per_s: float = 4.0e14
  peak_flops_per_s: float = 0.0
  intra_node_bytes_per_s: float = 1.5e11
  inter_node_bytes_per_s: float = 1.5e11 / 7.0

  def __post_init__(self) -> None:
    _check_types(self)
    _check_choice(self, platform=('auto', 'cpu', 'gpu', 'tpu'))
    _check_min(self, 1, 'domains')
    for name in ('nodes', 'ranks_per_node'):
      _require(
        _is_power_of_two(getattr(self, name)),
        f'ClusterConfig.{name}',
        getattr(self, name),
        'must be a power of two, since groups are aligned power-of-two blocks of ranks',
      )
    _require(
      self.domain_ranks <= MAX_DOMAIN_RANKS, 'ClusterConfig.nodes', self.nodes,
      f'{self.nodes} nodes x {self.ranks_per_node} ranks are more than the {MAX_DOMAIN_RANKS} ranks that one '
      'exchange may span; set ClusterConfig.domains for more ranks',
    )  # fmt: skip
    for name in ('sustained_flops_per_s', 'intra_node_bytes_per_s', 'inter_node_bytes_per_s'):
      _require(getattr(self, name) > 0, f'ClusterConfig.{name}', getattr(self, name), 'must be above 0')
    _check_min(self, 0, 'peak_flops_per_s')

  @property
  def domain_ranks(self) -> int:
    return self.nodes * self.ranks_per_node

  @property
  def num_ranks(self) -> int:
    return self.domains * self.domain_ranks


@dataclass(frozen=True)
class ModelConfig:
  """A hybrid-attention decoder: layer i is full or sparse by `pattern[i % len(pattern)]`.

  Attributes:
    pattern: `F` for a full-attention layer, `S` for a sparse one; `FSSS` is 1F3S.
    num_heads, num_kv_heads, head_dim: query heads, key/value heads (grouped queries), width of each.
    window_tokens: a sparse layer's query sees this many last tokens of its sample, itself included.
    num_experts: experts a layer, 0 for dense feed-forward layers throughout.
    dense_layers: this many first layers have a dense feed-forward block instead of experts.
    expert_placement: `spread` over the ranks of a node (expert parallelism) or `replicated`.
    expert_capacity_factor: receive buffers of spread experts hold this many times the assignments that
      a rank would get under perfect balance; what goes beyond is dropped and counted. 0 takes the
      smallest buffers that can never drop.
    balance_loss_weight, router_z_loss_weight: weights of the two auxiliary losses.
    compute_dtype: of activations and gathered weights; master weights are float32 always.
    remat: `none` saves a layer's activations; `layer` recomputes all but what the exchanges moved.
    loss_vocab_chunk: logits exist for this many vocabulary entries at a time.
  """

  vocab_size: int = 256
  d_model: int = 128
  num_layers: int = 4
  pattern: str = 'FSSS'
  num_heads: int = 16
  num_kv_heads: int = 4
  head_dim: int = 8
  window_tokens: int = 128
  qk_norm: bool = True
  rope_theta: float = 10000.0
  norm_eps: float = 1e-6
  num_experts: int = 8
  experts_per_token: int = 2
  expert_width: int = 128
  shared_expert_width: int = 0
  dense_layers: int = 0
  dense_width: int = 512
  expert_placement: str = 'spread'
  expert_capacity_factor: float = 0.0
  balance_loss_weight: float = 0.01
  router_z_loss_weight: float = 0.001
  tie_embeddings: bool = False
  init_std: float = 0.02
  compute_dtype: str = 'float32'
  remat: str = 'layer'
  loss_vocab_chunk: int = 8192

  def __post_init__(self) -> None:
    _check_types(self)
    name = 'ModelConfig'
    _check_choice(
      self,
      expert_placement=('spread', 'replicated'),
      compute_dtype=('float32', 'bfloat16'),
      remat=('none', 'layer'),
    )
    _check_min(
      self, 1, 'vocab_size', 'd_model', 'num_layers', 'num_heads', 'num_kv_heads', 'head_dim',
      'window_tokens', 'loss_vocab_chunk',
    )  # fmt: skip
    _check_min(
      self, 0, 'num_experts', 'shared_expert_width', 'dense_layers', 'expert_capacity_factor',
      'balance_loss_weight', 'router_z_loss_weight',
    )  # fmt: skip
    _require(
      self.pattern != '' and set(self.pattern) <= {FULL, SPARSE},
      f'{name}.pattern', self.pattern, "use only 'F' (full) and 'S' (sparse), for example 'FSSS'",
    )  # fmt: skip
    _require(
      self.num_heads % self.num_kv_heads == 0, f'{name}.num_kv_heads', self.num_kv_heads,
      f'must divide num_heads = {self.num_heads}',
    )  # fmt: skip
    _require(self.head_dim % 2 == 0, f'{name}.head_dim', self.head_dim, 'must be even (rotary pairs)')
    if self.num_experts:
      _check_min(self, 1, 'experts_per_token', 'expert_width')
      _require(
        self.experts_per_token <= self.num_experts, f'{name}.experts_per_token', self.experts_per_token,
        f'must be at most num_experts = {self.num_experts}',
      )  # fmt: skip
    if self.dense_layers or not self.num_experts:
      _check_min(self, 1, 'dense_width')

  @property
  def layer_kinds(self) -> str:
    """`F` or `S` for each layer, as one string of length num_layers."""
    return ''.join(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

  def has_experts(self, layer: int) -> bool:
    return self.num_experts > 0 and layer >= self.dense_layers

  @property
  def sp_degrees(self) -> tuple[int, ...]:
    """SP degrees that the head counts allow: each rank gets whole query heads and whole key/value heads."""
    heads, kv = self.num_heads, self.num_kv_heads
    powers = [1 << i for i in range(heads.bit_length())]
    return tuple(p for p in powers if heads % p == 0 and (kv % p == 0 or p % kv == 0))


@dataclass(frozen=True)
class DataConfig:
  """The documents and how they become batches. Batches depend on this config alone, never on the mesh.

  Attributes:
    source: a folder (one document a file), a `.jsonl` file (one document a line), or `stdlib`: the
      source files of the Python that runs, which every machine has. `~` is expanded.
    file_glob: which files of a folder are documents; hidden ones never are.
    text_field: the field of a `.jsonl` line that holds the text.
    batch_tokens: a batch takes samples until the next one would exceed this many tokens.
    max_document_tokens: longest sample; what happens to longer documents is `long_documents`:
      `split` (into samples of at most this length, nothing is lost), `truncate`, `drop` or `error`.
    seed: of the order of samples, which is drawn anew each epoch.
  """

  source: str = 'stdlib'
  file_glob: str = '**/*'
  text_field: str = 'text'
  batch_tokens: int = 8192
  max_document_tokens: int = 4096
  long_documents: str = 'split'
  seed: int = 0

  def __post_init__(self) -> None:
    _check_types(self)
    _check_choice(self, long_documents=('split', 'truncate', 'drop', 'error'))
    _check_min(self, 1, 'batch_tokens', 'max_document_tokens')
    _check_min(self, 0, 'seed')
    _require(self.source != '', 'DataConfig.source', self.source, "name a folder, a .jsonl file or 'stdlib'")
    _require(
      self.batch_tokens >= self.max_document_tokens, 'DataConfig.batch_tokens', self.batch_tokens,
      f'must be at least max_document_tokens = {self.max_document_tokens}, or one sample exceeds a batch',
    )  # fmt: skip


@dataclass(frozen=True)
class PlannerConfig:
  """How samples are laid on ranks.

  Attributes:
    mode: `static` (one SP degree for everything), `parents` (mixed SP degrees, the same in all layers:
      repacking disabled) or `repack` (node-local children inside the parents).
    capacity_tokens: token slots of a rank in the compiled program.
    max_sp_degree: widest group the planner makes.
    static_sp_degree: the degree of mode `static`; 0 takes the smallest that holds a sample of
      `DataConfig.max_document_tokens`.
    lookahead_steps: batches planned and packed ahead of the device, in the background.
  """

  mode: str = 'repack'
  capacity_tokens: int = 512
  max_sp_degree: int = 32
  static_sp_degree: int = 0
  lookahead_steps: int = 2

  def __post_init__(self) -> None:
    _check_types(self)
    _check_choice(self, mode=MODES)
    _check_min(self, 1, 'capacity_tokens', 'lookahead_steps')
    _require(
      _is_power_of_two(self.max_sp_degree), 'PlannerConfig.max_sp_degree', self.max_sp_degree,
      'must be a power of two',
    )  # fmt: skip
    _require(
      self.static_sp_degree == 0 or _is_power_of_two(self.static_sp_degree),
      'PlannerConfig.static_sp_degree', self.static_sp_degree, 'must be 0 or a power of two',
    )  # fmt: skip


@dataclass(frozen=True)
class OptimizerConfig:
  """AdamW with linear warmup and a decay to `final_learning_rate_fraction` of the peak."""

  learning_rate: float = 3e-3
  warmup_steps: int = 10
  schedule: str = 'cosine'
  final_learning_rate_fraction: float = 0.1
  beta1: float = 0.9
  beta2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 1.0

  def __post_init__(self) -> None:
    _check_types(self)
    _check_choice(self, schedule=('cosine', 'linear', 'constant'))
    _check_min(self, 0, 'warmup_steps', 'final_learning_rate_fraction', 'weight_decay')
    for name in ('learning_rate', 'eps', 'clip_norm'):
      _require(getattr(self, name) > 0, f'OptimizerConfig.{name}', getattr(self, name), 'must be above 0')
    for name in ('beta1', 'beta2'):
      value = getattr(self, name)
      _require(0 <= value < 1, f'OptimizerConfig.{name}', value, 'must lie in [0, 1)')


@dataclass(frozen=True)
class TrainConfig:
  """The run.

  Attributes:
    steps: optimizer steps in all (a resumed run counts those done before).
    seed: of the initial weights.
    checkpoint_every: steps between checkpoints; 0 keeps only the one written at the end.
    keep_checkpoints: how many of the latest are kept.
    exchange: `ragged` (one native ragged all-to-all; TPU and GPU), `dense` (padded all-to-all; runs
      everywhere) or `auto` (ragged where the backend has it).
    attention: `blockwise` (portable), `reference` (dense mask; tests) or `auto`.
  """

  steps: int = 100
  seed: int = 0
  checkpoint_every: int = 0
  keep_checkpoints: int = 2
  exchange: str = 'auto'
  attention: str = 'auto'

  def __post_init__(self) -> None:
    _check_types(self)
    _check_choice(self, exchange=('auto', 'ragged', 'dense'), attention=('auto', 'blockwise', 'reference'))
    _check_min(self, 1, 'steps', 'keep_checkpoints')
    _check_min(self, 0, 'seed', 'checkpoint_every')


def allowed_sp_degrees(cluster: ClusterConfig, model: ModelConfig, planner: PlannerConfig) -> tuple[int, ...]:
  """SP degrees that heads, mesh and planner all allow, ascending; 1 is always among them."""
  widest = min(cluster.domain_ranks, planner.max_sp_degree)
  return tuple(p for p in model.sp_degrees if p <= widest)


@dataclass(frozen=True)
class RunConfig:
  """All six configs, checked against each other."""

  cluster: ClusterConfig = ClusterConfig()
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  planner: PlannerConfig = PlannerConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  train: TrainConfig = TrainConfig()

  def __post_init__(self) -> None:
    cluster, model, data, planner = self.cluster, self.model, self.data, self.planner
    degrees = allowed_sp_degrees(cluster, model, planner)
    widest_possible = min(cluster.domain_ranks, planner.max_sp_degree)
    _require(
      widest_possible == 1 or len(degrees) > 1, 'ModelConfig.num_heads', model.num_heads,
      f'no SP degree above 1 divides {model.num_heads} query and {model.num_kv_heads} key/value heads; '
      f'use a multiple of {widest_possible} to reach SP{widest_possible}',
    )  # fmt: skip
    _require(
      data.max_document_tokens <= degrees[-1] * planner.capacity_tokens,
      'DataConfig.max_document_tokens', data.max_document_tokens,
      f'a sample this long fits no group: the widest is SP{degrees[-1]} '
      f'({cluster.domain_ranks} ranks a domain, {model.num_heads} heads, max_sp_degree '
      f'{planner.max_sp_degree}) at {planner.capacity_tokens} tokens a rank. Raise '
      'PlannerConfig.capacity_tokens or the number of ranks, or lower it',
    )  # fmt: skip
    if planner.mode == 'static' and planner.static_sp_degree:
      _require(
        planner.static_sp_degree in degrees
        and data.max_document_tokens <= planner.static_sp_degree * planner.capacity_tokens,
        'PlannerConfig.static_sp_degree', planner.static_sp_degree,
        f'must be one of {degrees} and hold max_document_tokens = {data.max_document_tokens} '
        f'at {planner.capacity_tokens} tokens a rank',
      )  # fmt: skip
    if model.num_experts and model.expert_placement == 'spread':
      _require(
        model.num_experts % cluster.ranks_per_node == 0, 'ModelConfig.num_experts', model.num_experts,
        f'must be a multiple of ClusterConfig.ranks_per_node = {cluster.ranks_per_node} to spread over '
        "it; or set ModelConfig.expert_placement = 'replicated'",
      )  # fmt: skip
    _require(
      model.vocab_size >= 256, 'ModelConfig.vocab_size', model.vocab_size,
      'documents are tokenized into bytes, which needs at least 256 entries',
    )  # fmt: skip

  def sections(self) -> tuple[object, ...]:
    """The six configs in the order of the fields."""
    return tuple(getattr(self, field.name) for field in dataclasses.fields(self))
