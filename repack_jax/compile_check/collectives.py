"""The collectives of an optimized XLA program, and what it runs while one is under way.

The instructions of a scheduled computation are in the order in which they begin. A collective that XLA
overlaps is two of them, a start and a done; what stands between runs meanwhile. It hides the collective where
it is work for the matrix units: products, or kernels. Other collectives and elementwise work don't count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from repack_jax.compile_check.hlo import (
  Array,
  CompiledProgram,
  Instruction,
  arrays,
  product_flops,
  replica_groups,
)

COLLECTIVES = (
  'ragged-all-to-all',
  'all-to-all',
  'all-gather',
  'reduce-scatter',
  'all-reduce',
  'collective-permute',
  'collective-broadcast',
)
# Starts, updates and ends of what runs in a computation of its own, on another thread of the device.
_STARTS, _UPDATES = ('async-start', 'call-start'), ('async-update', 'call-update')
# XLA:TPU's fusions of a collective with what starts it, with computation beside it, and with what ends it.
# Each holds the collective.
_FUSED_START, _FUSED_DONE = 'async-collective-start', 'async-collective-done'
_KERNEL = re.compile(
  r'custom_call_target="(tpu_custom_call|mosaic|__cudnn|cudnn|triton|__gpu\$xla\.gpu\.triton)'
)


# How a collective runs: in line, beside nothing for the matrix units, or beside products or kernels.
IN_LINE, IDLE, HIDDEN = 'no', 'idle', 'hidden'


class Shadow(NamedTuple):
  """What runs between the start and the done of a collective, each time.

  Attributes:
    product_flops: operations of matrix products.
    kernels: custom kernels, such as attention cores.
  """

  product_flops: int
  kernels: int

  @property
  def hides(self) -> bool:
    """Returns whether there is any work for the matrix units."""
    return self.product_flops > 0 or self.kernels > 0


@dataclass(frozen=True)
class Collective:
  """A collective of the program, all its executions together.

  Attributes:
    results: the arrays that it gives on a device.
    groups: the devices that take part with each other, by their place in the mesh.
    shadow: what runs while it is under way, of branches all; None where it is synchronous.
    times: how often it runs.
    scope: as `CompiledProgram.scope` gives it.
  """

  kind: str
  results: tuple[Array, ...]
  groups: tuple[tuple[int, ...], ...]
  shadow: Shadow | None
  times: int
  scope: str

  @property
  def overlap(self) -> str:
    """Returns `IN_LINE`, `IDLE` or `HIDDEN`."""
    return IN_LINE if self.shadow is None else HIDDEN if self.shadow.hides else IDLE

  @property
  def result_bytes(self) -> int:
    """Returns the bytes of the arrays that it gives on a device, of all executions."""
    return self.times * sum(array.elements * array.item_bytes for array in self.results)


def collectives(program: CompiledProgram) -> list[Collective]:
  """Returns a program's collectives, in its order.

  Raises:
    ValueError: for a program that is not scheduled, whose text says nothing of an order.
  """
  if not program.is_scheduled:
    raise ValueError('this program is not scheduled: take the text of a compiled one')
  starts, rest = _wrapped(program)
  found = []
  for name, instructions in program.computations.items():
    if name in rest or not program.times[name]:
      continue
    for instruction in instructions.values():
      kind = instruction.opcode.removesuffix('-start')
      if kind not in COLLECTIVES:
        continue
      is_start = instruction.opcode != kind
      place, start = starts.get(name, (name, instruction if is_start else None))
      if start and any('"is_sync":true' in one.attributes for one in (instruction, start)):
        start = None
      # A start's result is what it reads, then what it gives, and at times flags.
      result = _last_element(instruction.result, kind) if is_start else instruction.result
      found.append(
        Collective(
          kind=kind,
          results=tuple(arrays(result)),
          groups=replica_groups(instruction.attributes),
          shadow=_shadow(program, place, start) if start else None,
          times=program.times[name],
          scope=program.scope(name, instruction),
        )
      )
  return found


def _wrapped(program: CompiledProgram) -> tuple[dict[str, tuple[str, Instruction]], set[str]]:
  """Of computations that start a collective, where and by what they are called; those that go on with one."""
  starts: dict[str, tuple[str, Instruction]] = {}
  fused: set[str] = set()
  for name, instructions in program.computations.items():
    for instruction in instructions.values():
      called = program.reached(program.calls(instruction))
      if instruction.opcode in _STARTS or _is_fused(instruction, _FUSED_START):
        starts |= dict.fromkeys(called, (name, instruction))
      elif instruction.opcode == 'fusion':
        fused |= called
  channels = {channel for name in starts for channel in _channels(program, name)}
  rest = {name for name in fused if name not in starts and channels.intersection(_channels(program, name))}
  return starts, rest


def _channels(program: CompiledProgram, computation: str) -> set[str]:
  """The channels of the collectives in a computation; fusions that have parts of one name the same."""
  return {
    channel for one in program.computations[computation].values()
    if one.opcode in COLLECTIVES for channel in re.findall(r'channel_id=(\d+)', one.attributes)
  }  # fmt: skip


def _is_fused(instruction: Instruction, kind: str) -> bool:
  return instruction.opcode == 'fusion' and instruction.name.startswith(kind)


def _shadow(program: CompiledProgram, computation: str, start: Instruction) -> Shadow | None:
  """What runs behind a start until its done; None where it has none."""
  siblings = program.computations[computation]
  between: list[Instruction] = []
  under_way = {start.name}
  names = list(siblings)
  for name in names[names.index(start.name) + 1 :]:
    instruction = siblings[name]
    if not under_way.intersection(instruction.operands):
      between.append(instruction)
    elif instruction.opcode in _UPDATES:  # only here does begin what was asked for
      under_way.add(name)
      between.clear()
    elif instruction.opcode.endswith('-done') or _is_fused(instruction, _FUSED_DONE):
      return _work(program, between, siblings)
    elif instruction.opcode in ('get-tuple-element', 'fusion'):  # a part of what is under way, or beside it
      under_way.add(name)
      between.append(instruction)
  return None


def _work(
  program: CompiledProgram, instructions: Iterable[Instruction], siblings: dict[str, Instruction]
) -> Shadow:
  flops = kernels = 0
  for instruction in instructions:
    flops += product_flops(instruction, siblings)
    kernels += bool(_KERNEL.search(instruction.attributes))
    trips = program.trips(instruction) if instruction.opcode == 'while' else 1
    for called in program.calls(instruction):
      of_called = program.computations.get(called, {})
      inside = _work(program, of_called.values(), of_called)
      flops, kernels = flops + trips * inside.product_flops, kernels + trips * inside.kernels
  return Shadow(flops, kernels)


def _last_element(result: str, kind: str) -> str:
  """What a `-start` gives, from the type of its result."""
  parts, depth = [''], 0
  for letter in result.strip()[1:-1]:
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ',' and depth == 0:
      parts.append('')
    else:
      parts[-1] += letter
  if kind == 'all-reduce' or len(parts) == 1:
    return result
  return parts[1]
