"""The model: a hybrid-attention decoder, described by numbers. Nothing here imports JAX."""

from __future__ import annotations

from dataclasses import dataclass

from repack_jax.checks import check_choice, check_min, check_types, require
from repack_jax.kinds import FullAttention, LayerKind, SlidingWindowAttention
from repack_jax.plan.wire import Wire

FULL, SPARSE = 'F', 'S'
LAYER_SCOPES = {FULL: 'full_layer', SPARSE: 'sparse_layer'}  # in profiles and compiled programs


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
    check_types(self)
    name = 'ModelConfig'
    check_choice(
      self,
      expert_placement=('spread', 'replicated'),
      compute_dtype=('float32', 'bfloat16'),
      remat=('none', 'layer'),
    )
    check_min(
      self, 1, 'vocab_size', 'd_model', 'num_layers', 'num_heads', 'num_kv_heads', 'head_dim',
      'window_tokens', 'loss_vocab_chunk',
    )  # fmt: skip
    check_min(
      self, 0, 'num_experts', 'shared_expert_width', 'dense_layers', 'expert_capacity_factor',
      'balance_loss_weight', 'router_z_loss_weight',
    )  # fmt: skip
    require(
      self.pattern != '' and set(self.pattern) <= {FULL, SPARSE},
      f'{name}.pattern', self.pattern, "use only 'F' (full) and 'S' (sparse), for example 'FSSS'",
    )  # fmt: skip
    require(
      self.num_heads % self.num_kv_heads == 0, f'{name}.num_kv_heads', self.num_kv_heads,
      f'must divide num_heads = {self.num_heads}',
    )  # fmt: skip
    require(self.head_dim % 2 == 0, f'{name}.head_dim', self.head_dim, 'must be even (rotary pairs)')
    if self.num_experts:
      check_min(self, 1, 'experts_per_token', 'expert_width')
      require(
        self.experts_per_token <= self.num_experts, f'{name}.experts_per_token', self.experts_per_token,
        f'must be at most num_experts = {self.num_experts}',
      )  # fmt: skip
    if self.dense_layers or not self.num_experts:
      check_min(self, 1, 'dense_width')

  @property
  def layer_kinds(self) -> str:
    """`F` or `S` for each layer, as one string of length num_layers."""
    return ''.join(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

  def has_experts(self, layer: int) -> bool:
    return self.num_experts > 0 and layer >= self.dense_layers

  def kind(self, letter: str) -> LayerKind:
    return {
      'F': FullAttention(self.rope_theta),
      'S': SlidingWindowAttention(self.rope_theta, self.window_tokens),
    }[letter]

  @property
  def wire(self) -> Wire:
    """Returns what the exchanges of every layer carry."""
    kind = self.kind(self.pattern[0])
    return kind.wire(self.num_heads, self.num_kv_heads, self.head_dim, self.compute_dtype)
