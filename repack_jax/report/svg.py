"""`plan_svg`: who holds and computes what in a plan, as one picture for documents."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from repack_jax.config import RunConfig
from repack_jax.plan.plan import CHILDREN, PARENTS, Group, Plan
from repack_jax.predict.cost_model import model_costs
from repack_jax.report.data import Blocks, held_blocks, work_blocks

# Pixels.
_ROW, _NODE_GAP, _TOP, _LEFT, _PANEL, _BRACKET, _BETWEEN = 11, 8, 54, 62, 330, 48, 24
_SOLO_GAP = 2
_TEXT_FROM = 44  # blocks from this width on say how many tokens their sample has
_COLORS = ('#4e79a7', '#f28e2b', '#59a14f', '#e15759', '#b07aa1', '#edc948', '#76b7b2', '#ff9da7')
_OTHERS = ('#9c755f', '#86bcb6', '#8cd17d', '#d4a6c8', '#a0cbe8', '#d7b5a6')


def plan_svg(run: RunConfig, plan: Plan, title: str) -> str:
  """Returns a picture of a plan: a rank a row, a sample a block, once for each layout.

  Left is what ranks compute of attention cores in layers in the parents' layout, right what they hold, in
  which the layers in the children's layout run. Blocks of the same colour are of one sample; solo samples
  are faint.
  """
  costs = model_costs(run.cluster, run.model)
  groups_s, solo_s = work_blocks(plan, costs, PARENTS)
  work = [blocks for group, blocks in zip(plan.parents, groups_s, strict=True) for _ in range(group.size)]
  held, solo_held = held_blocks(plan)
  second = _LEFT + _PANEL + _BRACKET + _BETWEEN
  width, height = second + _PANEL + _BRACKET, _y(run, plan.num_ranks) + 14
  colors = _sample_colors(plan)
  layouts = (
    (_LEFT, PARENTS, "layers in the parents' layout", 'time of attention cores', work, solo_s),
    (second, CHILDREN, "layers in the children's layout", 'tokens held', held, solo_held),
  )
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="10">',
    '<rect width="100%" height="100%" fill="#ffffff"/>',
    f'<text x="8" y="17" font-size="13" font-weight="bold">{html.escape(title)}</text>',
  ]
  for node in range(plan.num_ranks // run.cluster.ranks_per_node):
    middle = _y(run, node * run.cluster.ranks_per_node) + run.cluster.ranks_per_node * _ROW / 2
    parts.append(f'<text x="8" y="{middle + 4:g}" font-weight="bold">node {node}</text>')
  for x, layout, heading, measure, shared, solo in layouts:
    parts.append(f'<text x="{x}" y="36" font-weight="bold">{heading}</text>')
    parts.append(f'<text x="{x}" y="48" fill="#666666">{measure}</text>')
    parts += _ranks(run, plan, x, shared, solo, colors)
    parts += (_bracket(run, group, x + _PANEL + 4) for group in plan.groups(layout) if group.samples)
  return '\n'.join([*parts, '</svg>', ''])


def _y(run: RunConfig, rank: int) -> int:
  return _TOP + rank * _ROW + rank // run.cluster.ranks_per_node * _NODE_GAP


def _sample_colors(plan: Plan) -> list[str]:
  """A colour for each sample: the longest have their own, the others share some."""
  by_length = sorted(range(len(plan.lengths)), key=lambda sample: -plan.lengths[sample])
  colors = [''] * len(by_length)
  for place, sample in enumerate(by_length):
    colors[sample] = _COLORS[place] if place < len(_COLORS) else _OTHERS[place % len(_OTHERS)]
  return colors


def _ranks(
  run: RunConfig, plan: Plan, x: int, shared: Sequence[Blocks], solo: Sequence[Blocks], colors: Sequence[str]
) -> Iterator[str]:
  most = max(sum(a[1::2]) + sum(b[1::2]) for a, b in zip(shared, solo, strict=True))
  scale = (_PANEL - _SOLO_GAP) / most
  for rank, parts in enumerate(zip(shared, solo, strict=True)):
    y, at = _y(run, rank), float(x)
    yield f'<rect x="{x}" y="{y}" width="{_PANEL}" height="{_ROW - 1}" fill="#f1f3f4"/>'
    for blocks, opacity in zip(parts, (1.0, 0.35), strict=True):
      for sample, amount in zip(blocks[::2], blocks[1::2], strict=True):
        wide = amount * scale
        faint = f' opacity="{opacity}"' if opacity < 1 else ''
        yield (
          f'<rect x="{at:.1f}" y="{y}" width="{max(0.2, wide - 0.4):.1f}" height="{_ROW - 1}" '
          f'fill="{colors[int(sample)]}"{faint}/>'
        )
        if wide >= _TEXT_FROM and opacity == 1:
          yield f'<text x="{at + 3:.1f}" y="{y + 8}" font-size="8">{plan.lengths[int(sample)]:,}</text>'
        at += wide
      at += _SOLO_GAP


def _bracket(run: RunConfig, group: Group, x: int) -> str:
  top, bottom = _y(run, group.first_rank), _y(run, group.end_rank - 1) + _ROW - 1
  return (
    f'<path d="M{x} {top}h4V{bottom}h-4" fill="none" stroke="#444444"/>'
    f'<text x="{x + 8}" y="{(top + bottom) / 2 + 4:g}">SP{group.size}</text>'
  )
