"""What has to hold of a compiled training step, and the table of what was found. No compiler needed.

Axis legend as in `exchange/collectives.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from repack_jax.compile_check.collectives import HIDDEN, IN_LINE, Collective
from repack_jax.compile_check.hlo import Array
from repack_jax.config.cluster import ClusterConfig
from repack_jax.config.model import ModelConfig
from repack_jax.exchange import reference
from repack_jax.kinds import LAYER_SCOPES
from repack_jax.parallel.xla_flags import DECOMPOSER
from repack_jax.plan.plan import CHILDREN, LAYOUTS, Plan
from repack_jax.plan.program import Program
from repack_jax.plan.wire import Wire
from repack_jax.predict import flops
from repack_jax.predict.costs import Costs, halo_peers

ATTENTION, HALO, EXPERTS, PARAMETERS, METADATA, OTHER = (
  'attention exchange', 'halo', 'expert exchange', 'parameters and sums', 'metadata', 'activations otherwise'
)  # fmt: skip
TOLERANCE = 0.05  # of bytes against the plan's
MOST_IN_LINE = 0.1  # of parameters' bytes, where they are gathered ahead
# Of matrix products against the model's own count; a dense lowering of E experts does E / k times the work.
MOST_FLOPS_RATIO = 1.15
SHIFT = 'collective-permute'
SITES = ('dispatch', 'combine')
EXCHANGES = {'ragged': 'ragged-all-to-all', 'dense': 'all-to-all'}  # by `ClusterConfig.exchange`
CORES = r'attention/(core|solo)'  # the scopes of attention cores, whose work follows the plan


class Found(NamedTuple):
  """A collective of the program and what it is for.

  Attributes:
    layout: of the layer it is in, or '' outside layers.
    direction: `forward` or `backward`.
    stray: the arrays of it that are neither parameters nor metadata, where it is not an exchange.
  """

  collective: Collective
  purpose: str
  layout: str
  direction: str
  stray: tuple[Array, ...] = ()


@dataclass(frozen=True)
class Check:
  """One rule: what was found, and what to do where it does not hold."""

  name: str
  passed: bool
  found: str
  remedy: str


def classify(
  collectives: Iterable[Collective], parameter_sizes: Iterable[int], exchange: str = 'ragged'
) -> list[Found]:
  """Returns what each collective is for.

  Args:
    exchange: as in `ClusterConfig`.
    parameter_sizes: elements that a parameter, of one layer, has on a rank, on a node's way and whole.
  """
  sizes = np.unique(list(parameter_sizes))
  found = []
  for collective in collectives:
    scope = collective.scope
    layout = next((layout for layout, layer in LAYER_SCOPES.items() if layer in scope), '')
    direction = 'backward' if 'transpose(' in scope else 'forward'
    stray: tuple[Array, ...] = ()
    if all(array.is_integer for array in collective.results):
      purpose = METADATA
    elif collective.kind == EXCHANGES[exchange] and (layout or exchange == 'ragged'):
      purpose = EXPERTS if 'feed_forward' in scope else ATTENTION
    elif collective.kind == SHIFT and 'attention/halo' in scope:
      purpose = HALO
    else:
      stray = tuple(
        a for a in collective.results if not a.is_integer and not _is_parameter(a, sizes, collective, layout)
      )
      purpose = OTHER if stray else PARAMETERS
    found.append(Found(collective, purpose, layout, direction, stray))
  return found


def _is_parameter(array: Array, sizes: np.ndarray, collective: Collective, layout: str) -> bool:
  """A parameter, or the step's sums.

  XLA pads what it scatters by a few rows, and shifts those to where they belong with permutations.
  """
  if not layout and collective.kind in ('all-reduce', SHIFT):
    return True
  place = np.searchsorted(sizes, array.elements, side='right') - 1
  return bool(place >= 0 and array.elements <= 1.05 * sizes[place])


def parameter_sizes(shard_shapes: Iterable[tuple[int, ...]], nodes: int, local: int) -> set[int]:
  """Returns elements of a parameter's shard, of what a node's gather gives, and of the whole."""
  elements = {int(np.prod(shape)) for shape in shard_shapes}
  return {n * ways for n in elements for ways in (1, nodes, local, nodes * local)}


def table(found: Sequence[Found], ranks_per_node: int) -> list[dict[str, object]]:
  """Returns a row for each layout, direction, purpose and kind of collective, all that are alike together."""
  rows: dict[tuple, dict[str, object]] = {}
  for one in found:
    groups = one.collective.groups
    across = spans_nodes(groups, ranks_per_node)
    size = len(groups[0]) if groups else 0
    key = (one.layout, one.direction, one.purpose, one.collective.kind, len(groups), size, across,
           one.collective.overlap)  # fmt: skip
    row = rows.setdefault(
      key,
      {
        'layer': one.layout or '-',
        'direction': one.direction,
        'purpose': one.purpose,
        'collective': one.collective.kind,
        'times': 0,
        'groups': f'{len(groups)} x {size}',
        'span': 'across nodes' if across else 'inside a node',
        'buffer_bytes': 0,
        'overlap': one.collective.overlap,
      },
    )
    row['times'] += one.collective.times  # type: ignore[operator]
    row['buffer_bytes'] += one.collective.result_bytes  # type: ignore[operator]
  order = {purpose: i for i, purpose in enumerate((ATTENTION, HALO, EXPERTS, OTHER, PARAMETERS, METADATA))}
  return sorted(
    rows.values(),
    key=lambda r: (order[str(r['purpose'])], str(r['layer']), str(r['direction']) == 'backward'),
  )


def exposed(found: Sequence[Found]) -> dict[str, tuple[int, int]]:
  """Returns by purpose the bytes that no products or kernels hide, and all bytes, of a device.

  Of the arrays that collectives give, all executions.
  """
  bytes_of: dict[str, tuple[int, int]] = {}
  for one in found:
    if one.purpose != METADATA:
      size, (shown, total) = one.collective.result_bytes, bytes_of.get(one.purpose, (0, 0))
      bytes_of[one.purpose] = shown + size * (one.collective.overlap != HIDDEN), total + size
  return bytes_of


def overlap_check(found: Sequence[Found]) -> Check:
  """Returns the check that what is gathered ahead, or reduced behind, begins before it is needed."""
  of_parameters = (one.collective for one in found if one.purpose == PARAMETERS)
  moved = [one for one in of_parameters if one.kind in ('all-gather', 'reduce-scatter')]
  total = sum(one.result_bytes for one in moved)
  in_line = sum(one.result_bytes for one in moved if one.overlap == IN_LINE)
  return Check(
    'what is gathered ahead begins ahead', in_line <= MOST_IN_LINE * total,
    f'{in_line / 1e6:,.1f} MB of {total / 1e6:,.1f} MB of parameters and gradients are in line',
    'the compiler makes synchronous collectives of them: see docs/hardware.md for flags, or set '
    'ClusterConfig.prefetch_layers = 0, which plans for that',
  )  # fmt: skip


def spans_nodes(groups: Sequence[Sequence[int]], ranks_per_node: int) -> bool:
  return any(len({rank // ranks_per_node for rank in group}) > 1 for group in groups)


# --- the rules ------------------------------------------------------------------------------------------


def exchange_checks(
  found: Sequence[Found], model: ModelConfig, plan: Plan, program: Program, cluster: ClusterConfig
) -> list[Check]:
  """Returns checks of the exchanges: two a layer and direction, children's inside nodes, none else.

  Two for each chunk that they are cut into; of dense ones also for each SP degree that the program knows; of
  layers by halo instead a shift a hop and direction.
  """
  checks, exchange = [], cluster.exchange
  wire = model.wire.cut(cluster.exchange_chunks)
  for purpose in (ATTENTION, HALO, EXPERTS):
    each_of = dict.fromkeys(LAYOUTS, program.halo_hops if purpose == HALO else 2)
    if purpose == ATTENTION:  # nothing is exchanged at SP1
      chunks = {
        layout: [wire.chunk_count(degree) for degree in program.degrees(layout) if degree > 1]
        for layout in LAYOUTS
      }
      each_of = {
        layout: 2 * (sum(counts) if exchange == 'dense' else max(counts, default=0))
        for layout, counts in chunks.items()
      }
    repeats = model.expert_round_trips if purpose == EXPERTS else (1, 1)
    layers_of = {layout: _layers(model, layout, purpose, program) for layout in LAYOUTS}
    times: dict[tuple[str, str], int] = defaultdict(int)
    for one in found:
      if one.purpose == purpose:
        times[one.layout, one.direction] += one.collective.times
    expected = {
      (layout, direction): each_of[layout] * times * layers
      for layout, layers in layers_of.items()
      for direction, times in zip(('forward', 'backward'), repeats, strict=True) if each_of[layout] * layers
    }  # fmt: skip
    if not times and (purpose == EXPERTS or not expected):
      continue
    text = ', '.join(
      f'{layout or "outside layers"} {direction} {n} of {expected.get((layout, direction), 0)}'
      for (layout, direction), n in sorted(times.items())
    )
    each = ' or '.join('two' if n == 2 else str(n) for n in dict.fromkeys(each_of.values()) if n)
    what = f'{each} {SHIFT if purpose == HALO else EXCHANGES[exchange]}'
    checks.append(Check(
      f'{what} a layer and direction: {purpose}', dict(times) == expected, text or 'none',
      'the compiler changed the exchange, or remat repeats it: see the table',
    ))  # fmt: skip
  own = [one for one in found if one.purpose == METADATA and 'all_to_all' in one.collective.scope
         and '/attention/' in one.collective.scope]  # fmt: skip
  checks.append(Check(
    'no exchange of offsets of our own', not own, f'{len(own)} in attention',
    'the custom gradient of dispatch and combine was lost: differentiate `ulysses_attention` as it is',
  ))  # fmt: skip
  strays = [
    f'{one.collective.kind} of {array.dtype}{list(array.dims)}' for one in found for array in one.stray
  ]
  checks.append(Check(
    'no other collective on activations', not strays, '; '.join(strays) or 'none',
    "on GPU this is XLA's rewrite of ragged all-to-alls across hosts: leave "
    f'--{DECOMPOSER}=false in XLA_FLAGS',
  ))  # fmt: skip
  if program.span(CHILDREN) == plan.ranks_per_node:
    exchanges = [
      one for one in found if one.layout == CHILDREN and one.purpose in (ATTENTION, HALO, EXPERTS, OTHER)
    ]
    none_due = program.children_degrees == (1,)
    outside = [one for one in exchanges if spans_nodes(one.collective.groups, plan.ranks_per_node)]
    checks.append(Check(
      "exchanges in the children's layout stay inside nodes", not outside and bool(exchanges or none_due),
      f'{len(outside)} of {len(exchanges)} leave them',
      "the exchange was built for another span than the plan's",
    ))  # fmt: skip
  return checks


def _layers(model: ModelConfig, layout: str, purpose: str, program: Program) -> int:
  """Layers of a layout that have this exchange."""
  kinds = [(layer, model.kind(letter)) for layer, letter in enumerate(model.layer_kinds)]
  of_layout = [(layer, kind) for layer, kind in kinds if kind.layout == layout]
  if purpose == EXPERTS:
    return sum(model.has_experts(layer) for layer, _ in of_layout)
  return sum((kind.halo_slots(program) is not None) == (purpose == HALO) for _, kind in of_layout)


class Moved(NamedTuple):
  """Bytes of one micro-batch's activations, both passes, all ranks: between ranks, and between nodes."""

  total: float
  cross_node: float


def plan_bytes(plan: Plan, wire: Wire) -> dict[tuple[str, str, int], Moved]:
  """Returns what the plan itself moves in one exchange, by layout, site and chunk."""
  ranks = np.arange(plan.num_ranks)
  others = ranks[:, None] != ranks
  nodes = ranks // plan.ranks_per_node
  across = nodes[:, None] != nodes
  head_bytes = wire.head_dim * wire.itemsize
  moved = {}
  for layout in LAYOUTS:
    sent = reference.sent_elements(plan, layout, *wire.operand_heads[:2])
    of_sites = (wire.dispatched, wire.dispatch_heads), (wire.combined, wire.combine_heads)
    for site, heads, (of_chunk, whole) in zip(SITES, sent, of_sites, strict=True):
      for chunk in range(wire.chunks):
        share = [of_chunk(chunk)(degree) / whole(degree) for degree in plan.placement(layout).size.tolist()]
        bytes_sent = heads * np.array(share)[:, None] * head_bytes
        moved[layout, site, chunk] = Moved(*(float(bytes_sent[where].sum()) for where in (others, across)))
  return moved


def halo_bytes(plan: Plan, model: ModelConfig, program: Program) -> Moved:
  """Returns what all layers by halo shift, both passes: the program's slots, whatever is in them."""
  near, across = (int(peers.sum()) for peers in halo_peers(plan, program))
  slots = [model.kind(letter).halo_slots(program) for letter in model.layer_kinds]
  one = sum(min(n, program.capacity_tokens) for n in slots if n is not None) * model.wire.halo_bytes
  return Moved(2.0 * one * (near + across), 2.0 * one * across)


def byte_checks(
  found: Sequence[Found],
  model: ModelConfig,
  costs: Costs,
  plan: Plan,
  program: Program,
  buffer_rows: dict[tuple[str, str, int], int],
) -> list[Check]:
  """Returns checks that the bytes which the compiled operations move are the plan's.

  A ragged all-to-all moves the rows that its sizes say, of the length that the layout gives them; any other
  collective moves all of its arrays, a halo's from each rank that sends one. What dense exchanges move is the
  program's.

  Args:
    buffer_rows: rows of the buffer that each (layout, site, chunk) receives into: it tells them apart. Those
      that receive into equal ones are equally often there.
  """
  own, dense = plan_bytes(plan, costs.wire), costs.cluster.exchange == 'dense'
  wanted = np.array(halo_bytes(plan, model, program))
  for layout in LAYOUTS:
    of_layer = sum(np.array(moved) for (of, *_), moved in own.items() if of == layout)
    if dense:
      ranks = np.ones(plan.num_ranks, np.int64)
      near, across = (sent.sum() for sent in costs.exchange_bytes(program, layout, ranks, ranks))
      of_layer = np.array([near + across, across])
    wanted += 2 * _layers(model, layout, ATTENTION, program) * of_layer
  compiled = np.zeros(2)
  padded = set()
  for one in found:
    if one.purpose == ATTENTION and dense:
      for array in one.collective.results:
        compiled += one.collective.times * np.array(_moved(one.collective, array, plan))
    elif one.purpose == ATTENTION and one.layout:
      (array, *_) = one.collective.results
      held, taken = array.row_bytes
      # Backward, the combine's buffer is the dispatch's and the other way round.
      alike = [key for key, rows in buffer_rows.items() if key[0] == one.layout and rows == array.dims[0]]
      total, cross = np.mean([own[key] for key in alike or [(one.layout, 'dispatch', 0)]], axis=0)
      if not spans_nodes(one.collective.groups, plan.ranks_per_node):
        total, cross = total - cross, 0.0
      compiled += one.collective.times * np.array([total, cross]) * taken / held
      if taken != held:
        padded.add(f'rows of {held} bytes take {taken}')
    if one.purpose == HALO:
      pairs = one.collective.groups
      across = sum(source // plan.ranks_per_node != target // plan.ranks_per_node for source, target in pairs)
      sent = sum(array.elements * array.item_bytes for array in one.collective.results)
      compiled += one.collective.times * sent * np.array([len(pairs), across])
    for array in one.stray:
      compiled += one.collective.times * np.array(_moved(one.collective, array, plan))
  checks = []
  for name, got, want in zip(('moved', 'moved across nodes'), compiled, wanted, strict=True):
    ratio = got / want if want else 1.0 if not got else np.inf
    checks.append(Check(
      f"bytes {name} are the plan's", bool(abs(ratio - 1) <= TOLERANCE),
      '; '.join([f'{got / 1e6:,.1f} MB of {want / 1e6:,.1f} MB ({ratio:.3f} times)', *sorted(padded)]),
      'rows are padded on the wire (a TPU pads them to 512 bytes: set ClusterConfig.wire_row_bytes, as its '
      'profile does), or a collective moves whole buffers: see the table',
    ))  # fmt: skip
  return checks


def _moved(collective: Collective, array: Array, plan: Plan) -> Moved:
  """What each rank of a group receives from the others in a collective that is not ragged, all ranks."""
  whole = array.elements * array.item_bytes
  if collective.kind == 'reduce-scatter':
    whole *= max(map(len, collective.groups), default=1)
  passes = 2 if collective.kind == 'all-reduce' else 1
  total = cross = 0.0
  for group in collective.groups:
    nodes = np.array(group) // plan.ranks_per_node
    for node in nodes:
      total += passes * whole * (len(group) - 1) / len(group)
      cross += passes * whole * (nodes != node).sum() / len(group)
  return Moved(total, cross)


def matmul_check(counted: int, model: ModelConfig, slots: int, expert_rows: int) -> Check:
  """Returns the check of matrix products outside cores: the model's own count, and what is computed again.

  Args:
    slots: token slots of a rank.
    expert_rows: rows that its experts' products have room for: more than its slots' where they are spread.
  """
  passes = flops.layer_passes(model)
  layers = flops.linear_flops_per_token(model) - flops.logits_flops_per_token(model)
  routed = sum(flops.routed_flops_per_token(model, layer) for layer in range(model.num_layers))
  own = passes * slots * (layers - routed)
  own += passes * expert_rows * routed // max(1, model.experts_per_token)
  own += flops.LOGITS_PASSES * slots * flops.logits_flops_per_token(model)
  ratio = counted / own
  return Check(
    "matrix products are the model's own", 1 / MOST_FLOPS_RATIO <= ratio <= MOST_FLOPS_RATIO,
    f'{counted / 1e9:,.2f} GFLOP of {own / 1e9:,.2f} a rank ({ratio:.3f} times), attention cores apart',
    'grouped products run as dense ones, or products are computed more often than remat asks for',
  )  # fmt: skip


def placement_check(places: Sequence[Sequence[tuple[int, ...]]]) -> Check:
  """Returns the check that `local` lies on the fast link: a box of the torus, or one host.

  Args:
    places: of each device of each row, as `mesh.device_place` has it.
  """
  spans = [np.ptp(row, axis=0) + 1 for row in np.asarray(places)]
  is_torus = len(spans[0]) > 1
  good = [np.prod(span) == (len(row) if is_torus else 1) for span, row in zip(spans, places, strict=True)]
  box = ' x '.join(str(n) for n in spans[0][1:]) if is_torus else 'one host'
  return Check(
    '`local` lies on the fast link', all(good), f'{sum(good)} of {len(places)} nodes, the first of {box}',
    'no box of so many neighbours tiles the topology: set another ClusterConfig.ranks_per_node',
  )  # fmt: skip


def memory_check(sizes: dict[str, int], memory_bytes: float) -> Check:
  """Returns the check of all that a device holds during the step against what it has."""
  total = sum(sizes.values())
  return fits(
    not memory_bytes or total <= memory_bytes, f'{total / 1e9:,.2f} GB of {memory_bytes / 1e9:,.1f} GB'
  )


def fits(passed: bool, found: str) -> Check:
  remedy = 'lower PlannerConfig.capacity_tokens, take more nodes, or a smaller model'
  return Check('the step fits the device', passed, found, remedy)
