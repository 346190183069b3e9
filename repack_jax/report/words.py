"""A run in words, for the head of a report."""

from __future__ import annotations

from collections.abc import Mapping

from repack_jax.config import ClusterConfig, ModelConfig, RunConfig

_PREFIXES = ((1e15, 'P'), (1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k'), (1.0, ''))


def amount(value: float, unit: str) -> str:
  """Returns three figures and a prefix: `amount(6.5e14, 'FLOP/s')` is '650 TFLOP/s'."""
  scale, prefix = next((p for p in _PREFIXES if abs(value) >= p[0]), _PREFIXES[-1])
  figures = f'{value / scale:.3g}' if abs(value) < 1000 * scale else f'{value / scale:,.0f}'
  return f'{figures} {prefix}{unit}'


def count(number: int, noun: str) -> str:
  return f'{number:,} {noun}' if number == 1 else f'{number:,} {noun}s'


def describe_cluster(run: RunConfig) -> str:
  cluster = run.cluster
  shape = f'{count(cluster.nodes, "node")} x {count(cluster.ranks_per_node, "rank")}'
  if cluster.domains > 1:
    shape = f'{count(cluster.domains, "domain")} x {shape}'
  return f'{shape} = {count(cluster.num_ranks, "rank")}'


def describe_rates(run: RunConfig) -> str:
  """Returns what the simulated times follow from."""
  cluster = run.cluster
  parts = [
    f'{amount(cluster.matmul_flops_per_s, "FLOP/s")} in matrix products and '
    f'{amount(cluster.attention_flops_per_s, "FLOP/s")} in attention cores a rank{_curve(cluster)}',
    f'{amount(cluster.intra_node_bytes_per_s, "B/s")} inside a node and '
    f'{amount(cluster.inter_node_bytes_per_s, "B/s")} across nodes a rank in exchanges{_ratios(cluster)}',
    f'parameters gathered {count(cluster.prefetch_layers, "layer")} ahead'
    if cluster.prefetch_layers
    else 'parameters gathered as they are needed',
    f'{cluster.exchange} exchanges'
    + (f' in up to {cluster.exchange_chunks} chunks of heads' if cluster.exchange_chunks > 1 else '')
    + ', which are meetings of '
    + ('all ranks that they span' if cluster.span_meets else 'their groups'),
  ]
  return '; '.join(parts)


def _curve(cluster: ClusterConfig) -> str:
  if not cluster.attention_curve:
    return ''
  points = (f'{share:.0%} of it at {tokens:,.0f} tokens' for tokens, share in cluster.attention_curve)
  return f' ({", ".join(points)})'


def _ratios(cluster: ClusterConfig) -> str:
  """How many times slower all-to-alls between nodes are than inside one, effectively."""
  widths = [2**i for i in range(cluster.ranks_per_node.bit_length(), cluster.domain_ranks.bit_length())]
  if not widths or cluster.ranks_per_node == 1:
    return ''
  ratios = ' and '.join(f'{cluster.exchange_ratio(width):.1f} at SP{width}' for width in widths)
  return f' (an all-to-all is effectively {ratios} times slower than at SP{cluster.ranks_per_node})'


def describe_model(model: ModelConfig) -> str:
  letters = model.layer_kinds
  each = []
  for letter in dict.fromkeys(letters):
    kind = model.kind(letter)
    settings = kind.describe()
    each.append(f'{letters.count(letter)} {kind.title}' + (f' ({settings})' if settings else ''))
  parts = [f'{count(len(letters), "layer")} of pattern {model.pattern}: {", ".join(each)}']
  parts.append(
    f'width {model.d_model:,}, {count(model.num_heads, "query head")} and {model.num_kv_heads} for '
    f'keys and values, {model.head_dim} wide'
  )
  if model.num_experts:
    experts = f'{model.num_experts} experts of width {model.expert_width:,}'
    parts.append(f'{experts}, {model.experts_per_token} a token')
  else:
    parts.append(f'dense feed-forward blocks of width {model.dense_width:,}')
  parts.append(f'vocabulary of {model.vocab_size:,}')
  recomputed = 'layers recomputed' if model.remat != 'none' else 'no recomputation'
  parts.append(f'{model.compute_dtype}, {recomputed}')
  return '; '.join(parts)


def describe_batch(lengths: Mapping[int, int]) -> str:
  if not lengths:
    return 'no samples'
  return (
    f'{count(len(lengths), "sample")}, {count(sum(lengths.values()), "token")}, '
    f'the longest {count(max(lengths.values()), "token")}'
  )
