"""The model: a hybrid-attention decoder, described by numbers. Nothing here imports JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from repack_jax.checks import ConfigError, check_choice, check_min, check_types, require
from repack_jax.kinds import KINDS, LayerKind
from repack_jax.plan.wire import Wire


def _default_kinds() -> tuple[LayerKind, ...]:
  return tuple(kind() for kind in KINDS.values())


@dataclass(frozen=True)
class ModelConfig:
  """A hybrid-attention decoder: layer i is of the kind whose letter is `pattern[i % len(pattern)]`.

  Attributes:
    pattern: letters of `repack_jax.kinds.KINDS`, such as `F` for full attention and `S` for a sliding window;
      `FSSS` is 1F3S.
    kinds: the settings of each kind, one object of each class in `KINDS`, in its order. A gin file binds them
      by class, as in `SlidingWindowAttention.window_tokens = 4096`.
    num_heads, num_kv_heads, head_dim: query heads, key/value heads (grouped queries), width of each.
    num_experts: experts a layer, 0 for dense feed-forward layers throughout.
    dense_layers: this many first layers have a dense feed-forward block instead of experts.
    expert_placement: `spread` over the ranks of a node (expert parallelism) or `replicated`.
    expert_capacity_factor: receive buffers of spread experts hold this many times the assignments that
      a rank would get under perfect balance; what goes beyond is dropped and counted. 0 takes the
      smallest buffers that can never drop.
    balance_loss_weight, router_z_loss_weight: weights of the two auxiliary losses.
    compute_dtype: of activations and gathered weights; master weights are float32 always.
    remat: `none` saves a layer's activations; `layer` recomputes all but what the exchanges moved;
      `layer_and_experts` repeats the exchanges of spread experts as well, which takes less memory.
    loss_vocab_chunk: logits exist for this many vocabulary entries at a time.
  """

  vocab_size: int = 256
  d_model: int = 128
  num_layers: int = 4
  pattern: str = 'FSSS'
  kinds: tuple[LayerKind, ...] = dataclasses.field(default_factory=_default_kinds)
  num_heads: int = 16
  num_kv_heads: int = 4
  head_dim: int = 8
  qk_norm: bool = True
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
      remat=('none', 'layer', 'layer_and_experts'),
    )
    check_min(
      self, 1, 'vocab_size', 'd_model', 'num_layers', 'num_heads', 'num_kv_heads', 'head_dim',
      'loss_vocab_chunk',
    )  # fmt: skip
    check_min(
      self, 0, 'num_experts', 'shared_expert_width', 'dense_layers', 'expert_capacity_factor',
      'balance_loss_weight', 'router_z_loss_weight',
    )  # fmt: skip
    known = ', '.join(f'{letter} ({kind.title})' for letter, kind in KINDS.items())
    require(
      self.pattern != '' and set(self.pattern) <= set(KINDS), f'{name}.pattern', self.pattern,
      f"use only the letters {known}, for example 'FSSS'",
    )  # fmt: skip
    classes = ', '.join(kind.__name__ for kind in KINDS.values())
    require(
      [type(kind) for kind in self.kinds] == list(KINDS.values()), f'{name}.kinds', self.kinds,
      f'must be one object of each of {classes}, in this order; replace one by ModelConfig.with_kind',
    )  # fmt: skip
    require(
      self.num_heads % self.num_kv_heads == 0, f'{name}.num_kv_heads', self.num_kv_heads,
      f'must divide num_heads = {self.num_heads}',
    )  # fmt: skip
    require(
      len(set(self._wires())) == 1, f'{name}.pattern', self.pattern,
      'mixes kinds whose exchanges carry different arrays, which the planner does not price yet',
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
  def expert_round_trips(self) -> tuple[int, int]:
    """Returns how often a layer's tokens go to spread experts and back, in the forward and backward pass."""
    return 1, 2 if self.remat == 'layer_and_experts' else 1

  @property
  def layer_kinds(self) -> str:
    """Returns the letter of each layer's kind, as one string of length num_layers."""
    return ''.join(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

  def kind(self, letter: str) -> LayerKind:
    """Returns the settings of the kind with this letter; raises KeyError where there is none."""
    return {kind.letter: kind for kind in self.kinds}[letter]

  def with_kind(self, kind: LayerKind) -> ModelConfig:
    """Returns the same model with this object in place of the one of its class.

    Raises:
      ConfigError: the class is not in `repack_jax.kinds.KINDS`.
    """
    if type(kind) not in KINDS.values():
      raise ConfigError(f'ModelConfig.kinds: {type(kind).__name__} is not in repack_jax.kinds.KINDS; add it')
    kinds = tuple(kind if type(own) is type(kind) else own for own in self.kinds)
    return dataclasses.replace(self, kinds=kinds)

  def has_experts(self, layer: int) -> bool:
    return self.num_experts > 0 and layer >= self.dense_layers

  @property
  def wire(self) -> Wire:
    """Returns what the exchanges of every layer carry."""
    return self._wires()[0]

  def _wires(self) -> list[Wire]:
    """What the exchanges of each kind in the pattern carry."""
    heads = self.num_heads, self.num_kv_heads, self.head_dim, self.compute_dtype
    return [self.kind(letter).wire(*heads) for letter in dict.fromkeys(self.pattern)]
