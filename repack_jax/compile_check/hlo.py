"""Reads an optimized XLA program: its instructions and its matrix products, with how often each runs.

The text of a compiled program (`compiled.as_text()`) is a list of computations, each a list of instructions;
loops, branches and fusions call computations by name. A collective in the body of a loop of 18 layers is one
instruction that runs 18 times.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

_ITEM_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4,
               'f32': 4, 's64': 8, 'u64': 8, 'f64': 8, 'c64': 8}  # fmt: skip
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$')
_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.\-]+) .*\{$')
_ARRAY = re.compile(r'\b([a-z]+\d*)\[([\d,]*)\](?:\{([^{}]*)\})?')
_CALLED = re.compile(r'\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)')
_CALLED_LISTS = re.compile(r'\b(?:branch_computations|called_computations)=\{([^}]*)\}')


@dataclass(frozen=True)
class Array:
  """An array as it lies in memory.

  Attributes:
    dims: logical.
    laid_out_dims: with the padding of the layout's first tiling, major to minor.
  """

  dtype: str
  dims: tuple[int, ...]
  laid_out_dims: tuple[int, ...]

  @property
  def elements(self) -> int:
    return math.prod(self.dims)

  @property
  def item_bytes(self) -> int:
    return _ITEM_BYTES.get(self.dtype, 1)

  @property
  def is_integer(self) -> bool:
    return self.dtype[0] in 'sup'

  @property
  def row_bytes(self) -> tuple[int, int]:
    """Returns the bytes of one entry of the first dimension: (what it holds, what it takes)."""
    rows = max(1, self.dims[0]) if self.dims else 1
    laid_out = math.prod(self.laid_out_dims)
    return self.elements // rows * self.item_bytes, laid_out // rows * self.item_bytes


@dataclass(frozen=True)
class Instruction:
  """One line of a computation. `operands` are names; `attributes` is the rest of the line."""

  name: str
  result: str
  opcode: str
  operands: tuple[str, ...]
  attributes: str

  @property
  def op_name(self) -> str:
    """Returns where in the model it comes from: the path of JAX's named scopes; '' where XLA lost it."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found.group(1) if found else ''


def arrays(text: str) -> list[Array]:
  """Returns all arrays of a type, a tuple's one after the other."""
  found = []
  for dtype, dims_text, layout in _ARRAY.findall(text):
    dims = tuple(int(n) for n in dims_text.split(',') if n)
    found.append(Array(dtype, dims, _laid_out(dims, layout)))
  return found


def _laid_out(dims: tuple[int, ...], layout: str) -> tuple[int, ...]:
  """Dimensions major to minor, the minor ones rounded up to the layout's first tile: `{1,0:T(8,128)}`.

  A second tile packs elements of few bits inside the first and adds nothing.
  """
  order, _, tiling = layout.partition(':')
  minor_to_major = [int(n) for n in order.split(',') if n] or list(range(len(dims)))[::-1]
  physical = [dims[d] for d in reversed(minor_to_major)]
  tile = re.search(r'T\(([\d,]+)\)', tiling)
  if tile:
    sizes = [int(n) for n in tile.group(1).split(',')]
    physical = [1] * (len(sizes) - len(physical)) + physical
    for place, size in enumerate(reversed(sizes), start=1):
      physical[-place] = -(-physical[-place] // size) * size
  return tuple(physical)


class CompiledProgram:
  """The instructions of a compiled program, by computation, and how often each computation runs.

  Attributes:
    computations: instructions by name, in the order of the text, by the name of their computation.
    is_scheduled: whether that is the order in which they begin.
    times: how often each computation runs.
  """

  def __init__(self, text: str):
    self.computations: dict[str, dict[str, Instruction]] = {}
    self.is_scheduled = 'is_scheduled=true' in text.partition('\n')[0]
    self._entry = ''
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
      if found := _INSTRUCTION.match(line):
        name, result, opcode, rest = found.groups()
        operands, attributes = _split_operands(rest)
        current[name] = Instruction(name, result, opcode, operands, attributes)
      elif found := _COMPUTATION.match(line):
        current = self.computations.setdefault(found.group(1), {})
        if line.startswith('ENTRY'):
          self._entry = found.group(1)
    self.times = self._times()

  def calls(self, instruction: Instruction) -> Iterator[str]:
    """Yields the computations that an instruction runs, but for the condition of a loop."""
    yield from _CALLED.findall(instruction.attributes)
    for names in _CALLED_LISTS.findall(instruction.attributes):
      yield from (name.strip().lstrip('%') for name in names.split(','))

  def _times(self) -> Counter[str]:
    """Executions of each computation: its callers', times the trips of loops. Of branches, each counts."""
    callers: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, instructions in self.computations.items():
      for instruction in instructions.values():
        trips = self.trips(instruction) if instruction.opcode == 'while' else 1
        for called in self.calls(instruction):
          callers[called].append((name, trips))
    times: Counter[str] = Counter({self._entry: 1})

    def count(name: str) -> int:
      if name not in times:
        times[name] = sum(count(caller) * trips for caller, trips in callers[name])
      return times[name]

    for name in self.computations:
      count(name)
    return times

  def trips(self, loop: Instruction) -> int:
    """Returns the trips of a loop whose bounds are constants; 1 where they are data.

    XLA says how many there are, or the condition compares a counter with a constant. (A counter that starts
    above 0 is one that XLA has peeled the first trips of; it says so itself.)
    """
    if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
      return int(found.group(1))
    found = re.search(r'condition=%?([\w.\-]+)', loop.attributes)
    names = self.reached(found.groups() if found else ())
    condition = [one for name in names for one in self.computations.get(name, {}).values()]
    bounds = [
      int(one.operands[0]) for one in condition
      if one.opcode == 'constant' and one.result.startswith('s32[]') and one.operands[0].isdecimal()
    ]  # fmt: skip
    compares = [one for one in condition if one.opcode == 'compare']
    if len(bounds) == 1 and len(compares) == 1 and 'direction=LT' in compares[0].attributes:
      return bounds[0]
    return 1

  def reached(self, names: Iterable[str]) -> set[str]:
    """Returns these computations, and all that they call, whatever by."""
    front, reached = list(names), set[str]()
    while front:
      name = front.pop()
      if name not in reached:
        reached.add(name)
        front += [called for one in self.computations.get(name, {}).values() for called in self.calls(one)]
    return reached

  def scope(self, computation: str, instruction: Instruction) -> str:
    """Returns the path of JAX's named scopes, of the nearest instruction that has one where XLA lost its own.

    Nearest among those that it takes its operands from, then among all of its computation that use it.
    """
    if instruction.op_name:
      return instruction.op_name
    siblings = self.computations[computation]
    for neighbours in (self._operands_of, self._users_of):
      seen, front = {instruction.name}, [instruction]
      while front:
        front = [
          other for one in front for other in neighbours(siblings, one)
          if other.name not in seen and not seen.add(other.name)  # type: ignore[func-returns-value]
        ]  # fmt: skip
        for other in front:
          if '/' in other.op_name:
            return other.op_name
    return ''

  @staticmethod
  def _operands_of(siblings: dict[str, Instruction], one: Instruction) -> Iterator[Instruction]:
    yield from (siblings[name] for name in one.operands if name in siblings)

  @staticmethod
  def _users_of(siblings: dict[str, Instruction], one: Instruction) -> Iterator[Instruction]:
    yield from (other for other in siblings.values() if one.name in other.operands)

  def matmul_flops(self, skipped: str) -> int:
    """Returns operations of all matrix products but those whose scope matches `skipped`, a regex.

    A multiply-add is two. Counts dots, the convolutions that XLA:TPU makes of them, cuBLAS calls, and grouped
    products (`jax.lax.ragged_dot`) that run as kernels of XLA's.
    """
    total = 0
    for name, instructions in self.computations.items():
      for instruction in instructions.values():
        product = product_flops(instruction, instructions)
        if product and not re.search(skipped, self.scope(name, instruction)):
          total += self.times[name] * product
    return total


def _split_operands(rest: str) -> tuple[tuple[str, ...], str]:
  """What stands between the parentheses of an instruction, and behind them."""
  depth = 1
  end = len(rest)
  for place, letter in enumerate(rest):
    depth += (letter == '(') - (letter == ')')
    if not depth:
      end = place
      break
  inside, behind = re.sub(r'/\*.*?\*/', '', rest[:end]), rest[end + 1 :]
  return tuple(part.strip().split(' ')[-1].lstrip('%') for part in inside.split(',')), behind


def replica_groups(attributes: str) -> tuple[tuple[int, ...], ...]:
  """Returns the groups of a collective, in any of the forms that XLA prints; for a permutation its pairs."""
  if found := re.search(r'(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}', attributes):
    return tuple(tuple(map(int, group.split(','))) for group in re.findall(r'\{([\d,]+)\}', found.group(1)))
  if found := re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', attributes):
    shape, reshape, order = ([int(n) for n in part.split(',')] if part else [] for part in found.groups())
    ids = np.arange(math.prod(reshape)).reshape(reshape)
    return tuple(map(tuple, (ids.transpose(order) if order else ids).reshape(shape).tolist()))
  if found := re.search(r'replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}', attributes):
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found.group(1))}
    axes = re.findall(r"'(\w+)'", found.group(2))
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    names = list(sizes)
    order = [names.index(n) for n in names if n not in axes] + [names.index(n) for n in axes]
    return tuple(map(tuple, ids.transpose(order).reshape(-1, math.prod(sizes[a] for a in axes)).tolist()))
  return ()


def product_flops(instruction: Instruction, siblings: dict[str, Instruction]) -> int:
  """Returns the operations of one matrix product; 0 where it is none.

  Args:
    siblings: the instructions of its computation, by name.
  """
  operands = [arrays(siblings[name].result) for name in instruction.operands if name in siblings]
  inputs = [found[0] for found in operands if len(found) == 1]
  results = arrays(instruction.result)
  if not results:
    return 0
  out = results[0]
  if instruction.opcode == 'dot':
    found = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', instruction.attributes)
    contracted = [inputs[0].dims[int(d)] for d in found.group(1).split(',') if d] if found else []
    return 2 * out.elements * math.prod(contracted)
  if instruction.opcode == 'convolution':
    found = re.search(r'dim_labels=\w+_(\w+)->', instruction.attributes)
    features = inputs[1].dims[found.group(1).index('o')] if found else 1
    # Batched products are windows over a dilated input, of which all but one place in so many are zeros.
    dilation = re.search(r'lhs_dilate=([\dx]+)', instruction.attributes)
    zeros = math.prod(int(n) for n in dilation.group(1).split('x')) if dilation else 1
    return 2 * out.elements * inputs[1].elements // max(1, features) // zeros
  if instruction.opcode != 'custom-call':
    return 0
  if '"__cublas$' in instruction.attributes:
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
    contracted = [inputs[0].dims[int(d)] for d in re.findall(r'\d+', found.group(1))] if found else []
    return 2 * out.elements * math.prod(contracted)
  if instruction.name.startswith('ragged-dot') and not out.is_integer:
    # Of tokens by features, features of each group by columns, and their product, two are matrices of tokens.
    of_tokens = [a for a in (*inputs, out) if len(a.dims) == 2 and not a.is_integer]
    for one, other in itertools.combinations(of_tokens, 2):
      if one.dims[0] == other.dims[0]:
        return 2 * one.elements * other.dims[1]
  return 0
