"""The configs of a run: frozen dataclasses, checked when they are made.

Nothing here imports JAX: `train.py` reads a config before it starts JAX, since the config says how
many devices to emulate, and the planner and simulator use configs on machines without JAX.
Loading them from gin files is in `gin_files.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from repack_jax.checks import check_choice, check_min, check_types, is_power_of_two, require
from repack_jax.config.cluster import ClusterConfig
from repack_jax.config.model import ModelConfig
from repack_jax.config.paths import path_field
from repack_jax.documents.tokenizers import TOKENIZERS
from repack_jax.plan.wire import Wire

# The modes of the planner, and the ways to lay out samples that each may choose from. A mode is never slower,
# by the simulator, than one that allows fewer.
WAYS = {
  'static': ('static',),
  'parents': ('static', 'parents'),
  'parents_solo': ('static', 'parents', 'parents_solo'),
  'repack': ('static', 'parents', 'repack'),
  'solve': ('static', 'parents', 'repack', 'solve', 'parents_solo', 'solve_solo'),
}
_SOLO_WAYS = ('parents_solo', 'solve_solo')
# The same for plans whose layers in the children's layout run by halo: these need no children of their own.
HALO_WAYS = {'static': 'static_halo', 'parents': 'parents_halo', 'parents_solo': 'parents_solo_halo'}
MODES = tuple(WAYS)
SPARSE_EXCHANGES = ('ulysses', 'halo', 'auto')
STDLIB = 'stdlib'
MOST_GROUP_TOKENS = 2**31 - 1  # slots of a group: positions in its stream are int32 on devices
MOST_BATCH_TOKENS = 2**31 - 1  # an expert's share of them is counted in int32 there


def _check_seed(config: DataConfig | SimulatorConfig | TrainConfig, bits: int) -> None:
  """Raises ConfigError unless the seed is one of the 2 ** bits that its generator tells apart."""
  check_min(config, 0, 'seed')
  remedy = f'must be below 2 ** {bits}, since larger seeds may repeat the random numbers of smaller ones'
  require(config.seed < 1 << bits, f'{type(config).__name__}.seed', config.seed, remedy)


@dataclass(frozen=True)
class DataConfig:
  """The documents and how they become batches. Batches depend on this config alone, never on the mesh.

  Attributes:
    source: a folder (one document a file), a `.jsonl` file (one document a line), or `stdlib`: the source
      files of the running Python's standard library, which every machine has. `~` is expanded.
    file_glob: which files of a folder are documents; hidden ones never are.
    text_field: the field of a `.jsonl` line that holds the text.
    tokenizer: what the tokens of a document are: `bytes` (a byte a token).
    batch_tokens: a batch takes samples until the next one would exceed this many tokens.
    max_document_tokens: tokens of the longest sample.
    long_documents: what happens to longer documents: `split` (into samples of at most that length; nothing
      is lost), `truncate`, `drop` or `error`.
    seed: of the order of samples, which is drawn anew each epoch; below 2 ** 128.
    group_long_documents: samples of at least this many tokens are brought together in the order, so that
      fewer batches hold one; 0 leaves the order as it is drawn.
    group_window_batches: they are brought together within windows of about this many batches, so no sample
      moves further than that.
  """

  source: str = path_field(STDLIB, no_paths=(STDLIB,))
  file_glob: str = '**/*'
  text_field: str = 'text'
  tokenizer: str = 'bytes'
  batch_tokens: int = 8192
  max_document_tokens: int = 4096
  long_documents: str = 'split'
  seed: int = 0
  group_long_documents: int = 0
  group_window_batches: int = 8

  def __post_init__(self) -> None:
    check_types(self)
    check_choice(self, long_documents=('split', 'truncate', 'drop', 'error'), tokenizer=tuple(TOKENIZERS))
    check_min(self, 1, 'batch_tokens', 'max_document_tokens', 'group_window_batches')
    check_min(self, 0, 'group_long_documents')
    _check_seed(self, bits=128)
    require(self.source != '', 'DataConfig.source', self.source, "name a folder, a .jsonl file or 'stdlib'")
    require(
      self.batch_tokens <= MOST_BATCH_TOKENS, 'DataConfig.batch_tokens', self.batch_tokens,
      f'must be at most {MOST_BATCH_TOKENS}, since tokens are counted in int32 on devices',
    )  # fmt: skip
    require(
      self.batch_tokens >= self.max_document_tokens, 'DataConfig.batch_tokens', self.batch_tokens,
      f'must be at least max_document_tokens = {self.max_document_tokens}, or one sample exceeds a batch',
    )  # fmt: skip
    require(
      self.group_long_documents <= self.max_document_tokens,
      'DataConfig.group_long_documents', self.group_long_documents,
      f'no sample is longer than max_document_tokens = {self.max_document_tokens}; lower it, or set 0 to '
      'group none',
    )  # fmt: skip


@dataclass(frozen=True)
class PlannerConfig:
  """How samples are laid on ranks.

  Attributes:
    mode: `static` (one SP degree for everything), `parents` (mixed SP degrees, the same in all layers:
      repacking disabled), `parents_solo` (these, and short samples alone on a rank), `repack` (node-local
      children inside the parents) or `solve` (all of that, and parents chosen for what their children can
      reach).
    solo: whether `solve` may put short samples alone on a rank.
    sparse_exchange: how layers in the children's layout get what they need from other ranks: `ulysses` (heads
      of all tokens, inside a child), `halo` (the last keys and values of the rank before, where all such
      layers have a bounded reach and no halo comes from too many ranks; else as `ulysses`) or `auto` (of
      both, for each plan, what is predicted to be faster).
    capacity_tokens: token slots of a rank at most.
    capacity_step_tokens: a plan has as many slots a rank as its fullest rank needs, rounded up to a multiple
      of this. 0 always takes `capacity_tokens`, so that plans differ in no slots and share programs.
    compile_s: seconds that compiling a program is reckoned to take: a plan runs on a program that there is,
      with more slots or a wider span than it needs, unless one of its own would save more than that over the
      rest of the run.
    max_sp_degree: widest group the planner makes.
    static_sp_degree: the degree of mode `static`; 0 takes the smallest that holds a sample of
      `DataConfig.max_document_tokens`.
    lookahead_steps: batches planned and packed ahead of the device, in the background.
  """

  mode: str = 'solve'
  solo: bool = True
  sparse_exchange: str = 'ulysses'
  capacity_tokens: int = 512
  capacity_step_tokens: int = 0
  compile_s: float = 120.0
  max_sp_degree: int = 32
  static_sp_degree: int = 0
  lookahead_steps: int = 2

  def __post_init__(self) -> None:
    check_types(self)
    check_choice(self, mode=MODES, sparse_exchange=SPARSE_EXCHANGES)
    check_min(self, 1, 'capacity_tokens', 'lookahead_steps')
    check_min(self, 0, 'capacity_step_tokens', 'compile_s')
    require(
      is_power_of_two(self.max_sp_degree), 'PlannerConfig.max_sp_degree', self.max_sp_degree,
      'must be a power of two',
    )  # fmt: skip
    require(
      self.static_sp_degree == 0 or is_power_of_two(self.static_sp_degree),
      'PlannerConfig.static_sp_degree', self.static_sp_degree, 'must be 0 or a power of two',
    )  # fmt: skip

  def ways(self, can_halo: bool = True) -> tuple[str, ...]:
    """Returns the ways to lay out samples that the mode may choose from.

    Args:
      can_halo: whether the layers in the children's layout can run by halo (`Costs.halo_tokens`).
    """
    left_out = _SOLO_WAYS if self.mode == 'solve' and not self.solo else ()
    ways = tuple(way for way in WAYS[self.mode] if way not in left_out)
    by_halo = tuple(HALO_WAYS[way] for way in ways if way in HALO_WAYS)
    sparse_exchange = self.sparse_exchange if can_halo else 'ulysses'
    return {'ulysses': ways, 'halo': by_halo, 'auto': ways + by_halo}[sparse_exchange]

  def smallest_degree(self, degrees: Sequence[int], longest_tokens: int) -> int:
    """Returns the smallest of these SP degrees, which ascend, whose group holds the longest sample."""
    return next(p for p in degrees if p * self.capacity_tokens >= longest_tokens)


@dataclass(frozen=True)
class SimulatorConfig:
  """What `repack-simulate` plays: where its lengths come from.

  Attributes:
    lengths: a file of lengths (`repack_jax/data/lengths.py` says which kinds there are); `DataConfig` says
      how they become batches.
    steps: steps to simulate, with each seed.
    seed: of the order, or of the draw where the file is a histogram; below 2 ** 128.
    seeds: how many of them, from `seed` on: each is a run of its own.
    tail_from_tokens, tail_scale: lengths of at least `tail_from_tokens` are multiplied by `tail_scale`.
  """

  lengths: str = path_field('')
  steps: int = 200
  seed: int = 0
  seeds: int = 1
  tail_from_tokens: int = 0
  tail_scale: float = 1.0

  def __post_init__(self) -> None:
    check_types(self)
    check_min(self, 1, 'steps', 'seeds')
    check_min(self, 0, 'tail_from_tokens')
    _check_seed(self, bits=128)
    require(self.tail_scale > 0, 'SimulatorConfig.tail_scale', self.tail_scale, 'must be above 0')


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
    check_types(self)
    check_choice(self, schedule=('cosine', 'linear', 'constant'))
    check_min(self, 0, 'warmup_steps', 'final_learning_rate_fraction', 'weight_decay')
    for name in ('learning_rate', 'eps', 'clip_norm'):
      require(getattr(self, name) > 0, f'OptimizerConfig.{name}', getattr(self, name), 'must be above 0')
    for name in ('beta1', 'beta2'):
      value = getattr(self, name)
      require(0 <= value < 1, f'OptimizerConfig.{name}', value, 'must lie in [0, 1)')


@dataclass(frozen=True)
class TrainConfig:
  """The run.

  Attributes:
    steps: optimizer steps in all (a resumed run counts those done before).
    seed: of the initial weights; below 2 ** 32.
    grace_s: seconds between SIGTERM or Ctrl-C and the end of the process at the latest, besides those that
      saving takes; before that it ends behind the step that runs.
    checkpoint_minutes: time between checkpoints; 0 for none by time. One is written at the end in any case.
    checkpoint_every: steps between checkpoints, besides; 0 for none by steps.
    keep_checkpoints: how many of the latest are kept.
    compare_steps: the first so many steps are also run with repacking disabled, from the same initial state,
      to compare the losses; takes a second copy of the state as long. A resumed run does not do it again.
    draw_every_steps: steps between pages with a plan, which go to the workdir; 0 draws none of these. The
      step where repacking saves most is drawn when the run ends in any case.
    on_divergence: what happens at a step whose loss or gradient norm is not finite; its update is never
      applied. `stop` ends the run with the state before it saved, `skip` goes on with the next batch.
    max_skipped_steps: with `skip`, more of them in a row end the run.
    attention: `pallas_tpu`, `cudnn` (bfloat16 on GPU), `blockwise` (portable), `reference` (dense mask, for
      tests) or `auto` (the platform's own where it serves the model, else blockwise).
    grouped: the experts' products: `ragged_dot` (XLA's: a grouped kernel on TPU, mostly dense elsewhere),
      `blocks` (a loop over rows of one expert) or `auto` (ragged_dot on TPU, else blocks).
  """

  steps: int = 100
  seed: int = 0
  grace_s: float = 15.0
  checkpoint_minutes: float = 10.0
  checkpoint_every: int = 0
  keep_checkpoints: int = 2
  compare_steps: int = 0
  draw_every_steps: int = 0
  on_divergence: str = 'stop'
  max_skipped_steps: int = 10
  attention: str = 'auto'
  grouped: str = 'auto'

  def __post_init__(self) -> None:
    check_types(self)
    check_choice(
      self,
      on_divergence=('stop', 'skip'),
      attention=('auto', 'pallas_tpu', 'cudnn', 'blockwise', 'reference'),
      grouped=('auto', 'ragged_dot', 'blocks'),
    )
    check_min(self, 1, 'steps', 'keep_checkpoints', 'max_skipped_steps')
    check_min(
      self, 0, 'grace_s', 'checkpoint_minutes', 'checkpoint_every', 'compare_steps', 'draw_every_steps'
    )
    _check_seed(self, bits=32)


def allowed_sp_degrees(cluster: ClusterConfig, wire: Wire, planner: PlannerConfig) -> tuple[int, ...]:
  """Returns the SP degrees that heads, mesh and planner all allow, ascending; 1 is always among them."""
  return wire.degrees(min(cluster.domain_ranks, planner.max_sp_degree))


def parts(config: Any) -> dict[str, tuple[Any, ...]]:
  """Returns the configs that the fields of a config hold, each alone or in a tuple, by the field's name."""
  held = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    values = value if isinstance(value, tuple) else (value,)
    if values and all(dataclasses.is_dataclass(item) for item in values):
      held[field.name] = values
  return held


def sections(config: Any) -> Iterator[Any]:
  """Yields a config, then its parts, each with its own behind it."""
  yield config
  for held in parts(config).values():
    for part in held:
      yield from sections(part)


@dataclass(frozen=True)
class RunConfig:
  """All configs, checked against each other."""

  cluster: ClusterConfig = ClusterConfig()
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  planner: PlannerConfig = PlannerConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  train: TrainConfig = TrainConfig()
  simulator: SimulatorConfig = SimulatorConfig()

  def __post_init__(self) -> None:
    cluster, model, data, planner = self.cluster, self.model, self.data, self.planner
    degrees = self.sp_degrees
    widest_possible = min(cluster.domain_ranks, planner.max_sp_degree)
    require(
      widest_possible == 1 or len(degrees) > 1, 'ModelConfig.num_heads', model.num_heads,
      f'no SP degree above 1 divides {model.num_heads} query and {model.num_kv_heads} key/value heads; '
      f'use a multiple of {widest_possible} to reach SP{widest_possible}',
    )  # fmt: skip
    require(
      data.max_document_tokens <= degrees[-1] * planner.capacity_tokens,
      'DataConfig.max_document_tokens', data.max_document_tokens,
      f'a sample this long fits no group: the widest is SP{degrees[-1]} '
      f'({cluster.domain_ranks} ranks a domain, {model.num_heads} heads, max_sp_degree '
      f'{planner.max_sp_degree}) at {planner.capacity_tokens} tokens a rank. Raise '
      'PlannerConfig.capacity_tokens or the number of ranks, or lower it',
    )  # fmt: skip
    group_tokens = degrees[-1] * planner.capacity_tokens
    require(
      group_tokens <= MOST_GROUP_TOKENS, 'PlannerConfig.capacity_tokens', planner.capacity_tokens,
      f'the stream of a group, up to SP{degrees[-1]} here, would have {group_tokens} '
      f'slots, and its positions are int32 on the devices: at most {MOST_GROUP_TOKENS}. Lower it, or '
      'PlannerConfig.max_sp_degree',
    )  # fmt: skip
    if planner.mode == 'static' and planner.static_sp_degree:
      require(
        planner.static_sp_degree in degrees
        and data.max_document_tokens <= planner.static_sp_degree * planner.capacity_tokens,
        'PlannerConfig.static_sp_degree', planner.static_sp_degree,
        f'must be one of {degrees} and hold max_document_tokens = {data.max_document_tokens} '
        f'at {planner.capacity_tokens} tokens a rank',
      )  # fmt: skip
    row = model.wire.cut(cluster.exchange_chunks).row_tokens(degrees[-1], cluster.wire_row_bytes)
    require(
      planner.capacity_tokens % row == 0, 'PlannerConfig.capacity_tokens', planner.capacity_tokens,
      f'must be a multiple of {row}, so that what a rank sends fills rows of ClusterConfig.wire_row_bytes = '
      f'{cluster.wire_row_bytes}',
    )  # fmt: skip
    if model.num_experts and model.expert_placement == 'spread':
      require(
        model.num_experts % cluster.ranks_per_node == 0, 'ModelConfig.num_experts', model.num_experts,
        f'must be a multiple of ClusterConfig.ranks_per_node = {cluster.ranks_per_node} to spread over '
        "it; or set ModelConfig.expert_placement = 'replicated'",
      )  # fmt: skip
    tokenizer = TOKENIZERS[data.tokenizer]
    require(
      model.vocab_size >= tokenizer.vocab_size, 'ModelConfig.vocab_size', model.vocab_size,
      f'must be at least {tokenizer.vocab_size}, the vocabulary of DataConfig.tokenizer = {tokenizer.name!r}',
    )  # fmt: skip

  @property
  def sp_degrees(self) -> tuple[int, ...]:
    """Returns the SP degrees that heads, mesh and planner all allow, ascending."""
    return allowed_sp_degrees(self.cluster, self.model.wire, self.planner)

  @property
  def batch_planner(self) -> PlannerConfig:
    """Returns the planner's config with the degree of mode `static` filled in, one for the whole run."""
    planner = self.planner
    degree = planner.static_sp_degree or planner.smallest_degree(
      self.sp_degrees, self.data.max_document_tokens
    )
    return dataclasses.replace(planner, static_sp_degree=degree)

  def sections(self) -> tuple[Any, ...]:
    """Returns the configs that fields are bound in, in the order of the fields, each before its parts."""
    return tuple(section for part in parts(self).values() for config in part for section in sections(config))
