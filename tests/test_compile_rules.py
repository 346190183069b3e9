"""Reading a compiled program, and the rules for it: programs made by hand, each rule broken once."""

import dataclasses
import itertools
from pathlib import Path

import cases
import numpy as np
import pytest

from repack_jax.checks import ConfigError
from repack_jax.compile_check import hlo, rules, topology
from repack_jax.compile_check.collectives import Collective, Shadow, collectives
from repack_jax.config import ClusterConfig, ModelConfig
from repack_jax.parallel import xla_flags
from repack_jax.parallel.mesh import neighbour_order
from repack_jax.plan.plan import CHILDREN, LAYOUTS, PARENTS
from repack_jax.plan.program import Program
from repack_jax.predict import flops
from repack_jax.predict.cost_model import model_costs

SCHEDULES = Path(__file__).parent / 'schedules'
PROGRAM = (SCHEDULES / 'by_hand.txt').read_text()


def test_collectives_of_a_program_by_hand():
  program = hlo.CompiledProgram(PROGRAM)
  assert program.times['inner_body'] == 18 and program.times['wrapped'] == 1
  by_kind = {}
  for one in collectives(program):
    by_kind.setdefault(one.kind, []).append(one)
  dispatch, lost = by_kind['ragged-all-to-all']
  assert (dispatch.overlap, dispatch.times, dispatch.groups) == ('idle', 1, ((0, 1), (2, 3)))
  assert dispatch.scope == 'jit(f)/parents_layer/attention/dispatch/ragged_all_to_all'
  # One that lost its name takes that of what uses it; its bf16 rows of 128 are padded to 512 bytes.
  assert (lost.overlap, lost.times, lost.groups) == ('no', 18, ((0, 2), (1, 3)))
  assert 'children_layer/attention/combine' in lost.scope and lost.results[0].row_bytes == (256, 512)
  (gather,) = by_kind['all-gather']
  # One convolution and one kernel run beside it.
  assert gather.shadow == Shadow(2 * 64 * 256 * 512, 1) and gather.groups == ((0, 2), (1, 3))
  assert [(array.dtype, array.dims) for array in gather.results] == [('f32', (32, 4)), ('s32', (8,))]
  assert [one.results[0].dims for one in by_kind['all-reduce']] == [(4,)]


@pytest.mark.parametrize('name', ['sparse_cores', 'updates', 'fusions'])
def test_what_runs_beside_the_collectives_of_a_schedule(name):
  """Of XLA for TPUs: gathers of a loop's next weights, inside nodes and between them, beside a product; an
  exchange that waits for it; and around the loop the first gathers, a product and a reduce-scatter.

  On v5p's SparseCores, on TPU7x where an update is the real start, and on v5p in fusions with the product,
  which takes the gather inside nodes alone.
  """
  program = hlo.CompiledProgram((SCHEDULES / f'{name}.txt').read_text())
  found = sorted(
    (one.kind, 'while' in one.scope, len(one.groups[0]), one.times, one.overlap)
    for one in collectives(program)
  )
  alone = 'no' if name == 'fusions' else 'idle'
  assert found == [
    ('all-gather', False, 2, 1, alone),
    ('all-gather', False, 8, 1, alone),
    ('all-gather', True, 2, 5, alone),  # nothing but the exchange is beside it
    ('all-gather', True, 8, 5, 'hidden'),
    ('all-to-all', True, 8, 5, 'no'),
    ('reduce-scatter', False, 8, 1, alone),
  ]
  (hidden,) = (one.shadow for one in collectives(program) if one.overlap == 'hidden')
  assert hidden == Shadow(2 * 2048 * 1024 * 1024, 0)


def test_a_program_without_a_schedule():
  with pytest.raises(ValueError, match='not scheduled'):
    collectives(hlo.CompiledProgram(PROGRAM.replace(', is_scheduled=true', '')))


DONE = '%done = bf16[64,256]{1,0} async-done(%start)'
DOT = '%dot = f32[64,512]{1,0} convolution(%arg, %w.2), dim_labels=bf_io->bf'
UPDATE = '%step = ((bf16[64,256]), bf16[64,256], u32[]) async-update(%start)'
SWITCH = '%switch = f32[64,512]{1,0} conditional(%arg), branch_computations={%inner_body, %wrapped}'


@pytest.mark.parametrize('before,after,shadow', [
  (DONE, DONE.replace('%start', '%other'), None),
  ('calls=%wrapped', 'calls=%wrapped, backend_config={"is_sync":true}', None),
  (DONE, f'{DOT}\n  {DONE}', Shadow(2 * 64 * 256 * 512, 0)),
  (DONE, f'{DOT}\n  {UPDATE}\n  {DONE.replace("%start", "%step")}', Shadow(0, 0)),  # it begins at the update
  (DONE, f'{SWITCH}\n  {DONE}', Shadow(2 * 2 * 64 * 256 * 512, 0)),
], ids=['no end', 'synchronous', 'product', 'update', 'branches'])  # fmt: skip
def test_starts_and_ends(before, after, shadow):
  assert before in PROGRAM
  dispatch, _ = (
    one for one in collectives(hlo.CompiledProgram(PROGRAM.replace(before, after)))
    if one.kind == 'ragged-all-to-all'
  )  # fmt: skip
  assert dispatch.shadow == shadow


def test_matrix_products_of_a_program_by_hand():
  """18 dots outside the cores and one convolution, of 64 x 256 x 512 each."""
  assert hlo.CompiledProgram(PROGRAM).matmul_flops(rules.CORES) == 19 * 2 * 64 * 256 * 512
  assert hlo.CompiledProgram(PROGRAM).matmul_flops('nothing') == 37 * 2 * 64 * 256 * 512


@pytest.mark.parametrize('text,held,taken', [
  ('f32[640,128]{1,0:T(8,128)}', 512, 512),
  ('bf16[640,2,128]{2,1,0:T(2,128)(2,1)}', 512, 512),
  ('bf16[640,1,128]{2,1,0:T(2,128)(2,1)}', 256, 512),
  ('bf16[640,1,64]{2,1,0:T(2,128)(2,1)}', 128, 512),
  ('f32[640,16]{1,0}', 64, 64),
])  # fmt: skip
def test_rows_as_they_lie_in_memory(text, held, taken):
  (array,) = hlo.arrays(text)
  assert array.row_bytes == (held, taken)


@pytest.mark.parametrize('text,groups', [
  ('replica_groups={{0,1,2,3},{4,5,6,7}}, x', ((0, 1, 2, 3), (4, 5, 6, 7))),
  ('replica_groups=[2,4]<=[8], x', ((0, 1, 2, 3), (4, 5, 6, 7))),
  ('replica_groups=[4,2]<=[2,4]T(1,0), x', ((0, 4), (1, 5), (2, 6), (3, 7))),
  ("replica_groups=mesh['node'=2,'local'=4] {'node'}, x", ((0, 4), (1, 5), (2, 6), (3, 7))),
  ("replica_groups=mesh['node'=2,'local'=4] {'node','local'}, x", (tuple(range(8)),)),
  ('source_target_pairs={{0,1},{1,0}}, x', ((0, 1), (1, 0))),
])  # fmt: skip
def test_groups_in_every_form(text, groups):
  assert hlo.replica_groups(text) == groups


# --- the rules ------------------------------------------------------------------------------------------

MODEL = ModelConfig(num_layers=8, num_heads=16, num_kv_heads=4, head_dim=8, num_experts=0)
PLAN = cases.wide_plan(16, 8, 32)
EVERY, NODES = (tuple(range(16)),), (tuple(range(8)), tuple(range(8, 16)))
OWN = Program.of_plan(PLAN)
COSTS = model_costs(ClusterConfig(), MODEL)
ROWS = {
  (PARENTS, 'dispatch', 0): 96, (PARENTS, 'combine', 0): 32,
  (CHILDREN, 'dispatch', 0): 80, (CHILDREN, 'combine', 0): 32,
}  # fmt: skip


def exchange(layout: str, direction: str, site: str, row: int = 128, **changes: object) -> Collective:
  """One instruction for all layers of a layout; rows of 128 float32 are 512 bytes."""
  path = 'jvp()' if direction == 'forward' else 'transpose(jvp())'
  rows = ROWS[layout, site, 0]
  array = hlo.arrays(f'f32[{rows},1,{row}]{{2,1,0:T(1,128)}}')[0]
  one = Collective(
    'ragged-all-to-all', (array,), EVERY if layout == PARENTS else NODES, None,
    COSTS.layers_in(layout), f'{path}/while/{layout}_layer/attention/{site}/cond',
  )  # fmt: skip
  return dataclasses.replace(one, **changes)


GOOD = [
  exchange(layout, direction, site)
  for layout in LAYOUTS for direction in ('forward', 'backward') for site in ('dispatch', 'combine')
]  # fmt: skip


def test_dense_exchanges_by_rule():
  """An all-to-all a site and degree, of all slots; one too many, or a wider one, is found."""
  costs = model_costs(ClusterConfig(exchange='dense'), MODEL)
  assert (OWN.parents_degrees, OWN.children_degrees) == ((16,), (4, 8))

  def dense(layout: str, direction: str, site: str, degree: int) -> Collective:
    heads = {'dispatch': MODEL.wire.dispatch_heads, 'combine': MODEL.wire.combine_heads}[site](degree)
    groups = tuple(tuple(range(first, first + degree)) for first in range(0, 16, degree))
    array = hlo.arrays(f'f32[{degree},{32 * heads},8]{{2,1,0}}')[0]
    return dataclasses.replace(
      exchange(layout, direction, site), kind='all-to-all', results=(array,), groups=groups
    )

  good = [
    dense(layout, direction, site, degree)
    for layout in LAYOUTS for direction in ('forward', 'backward') for site in ('dispatch', 'combine')
    for degree in OWN.degrees(layout) if degree > 1
  ]  # fmt: skip
  wide = [dataclasses.replace(one, groups=EVERY) if one.groups == good[-1].groups else one for one in good]
  for compiled, passed in ((good, True), ([*good, good[-1]], False), (wide, False)):
    found = rules.classify(compiled, {1}, 'dense')
    checks = rules.exchange_checks(found, MODEL, PLAN, OWN, costs.cluster)
    checks += rules.byte_checks(found, MODEL, costs, PLAN, OWN, ROWS)
    assert all(check.passed for check in checks) == passed, [c for c in checks if not c.passed]
  assert checks[0].name == 'two or 4 all-to-all a layer and direction: attention exchange'
  # Where exchanges are ragged, the same is XLA's rewrite of them.
  assert {one.purpose for one in rules.classify(good, {1})} == {rules.OTHER}


def test_exchanges_in_chunks_by_rule():
  """Each site once for each chunk: two at SP4 and SP8; of one head a rank, as at SP16, there are none."""
  costs = model_costs(ClusterConfig(exchange_chunks=2), MODEL)
  buffers = ROWS | {
    (CHILDREN, 'dispatch', 0): 60,
    (CHILDREN, 'dispatch', 1): 20,
    (CHILDREN, 'combine', 1): 32,
  }

  def chunk(direction: str, rows: int) -> Collective:
    array = hlo.arrays(f'f32[{rows},1,128]{{2,1,0:T(1,128)}}')[0]
    return exchange(CHILDREN, direction, 'dispatch', results=(array,))

  of_parents = [one for one in GOOD if one.groups == EVERY]
  good = of_parents + [chunk(way, rows) for way in ('forward', 'backward') for rows in (60, 20, 32, 32)]
  for compiled, passed in ((good, True), (good[:-1], False), (GOOD, False)):
    found = rules.classify(compiled, {1})
    checks = rules.exchange_checks(found, MODEL, PLAN, OWN, costs.cluster)
    checks += rules.byte_checks(found, MODEL, costs, PLAN, OWN, buffers)
    assert all(check.passed for check in checks) == passed, [c for c in checks if not c.passed]
  moved = rules.plan_bytes(PLAN, costs.wire)
  whole = rules.plan_bytes(PLAN, MODEL.wire)
  for layout, site in itertools.product(LAYOUTS, rules.SITES):
    parts = [moved[layout, site, chunk] for chunk in (0, 1)]
    assert np.sum(parts, axis=0) == pytest.approx(whole[layout, site, 0])


def gathered(text: str, groups: tuple, scope: str = 'jit(f)/while') -> Collective:
  return Collective('all-gather', tuple(hlo.arrays(text)), groups, None, 3, scope)


def failed(collectives: list[Collective], program: Program = OWN) -> set[str]:
  sizes = rules.parameter_sizes([(64, 8)], nodes=2, local=8)
  found = rules.classify(collectives, sizes)
  checks = rules.exchange_checks(found, MODEL, PLAN, program, COSTS.cluster)
  checks += rules.byte_checks(found, MODEL, COSTS, PLAN, program, ROWS)
  assert all(check.found and check.remedy for check in checks)
  return {check.name for check in checks if not check.passed}


COUNT = 'two ragged-all-to-all a layer and direction: attention exchange'
MOVED, ACROSS = "bytes moved are the plan's", "bytes moved across nodes are the plan's"
STRAY, STAY = 'no other collective on activations', "exchanges in the children's layout stay inside nodes"


def test_a_good_step_breaks_no_rule():
  parameters = gathered('(f32[64,64], f32[1024,8], f32[64,8])', EVERY)
  sums = Collective('all-reduce', tuple(hlo.arrays('f32[77]')), EVERY, None, 1, 'jit(f)/psum')
  metadata = Collective(
    'all-to-all', tuple(hlo.arrays('s64[4,8,4]')), EVERY, None, 9, 'jit(f)/parents_layer/attention'
  )
  assert failed([*GOOD, parameters, sums, metadata]) == set()
  rows = rules.table(rules.classify(GOOD, {1}), 8)
  assert [(row['layer'], row['direction'], row['times'], row['span']) for row in rows] == [
    ('children', 'forward', 12, 'inside a node'), ('children', 'backward', 12, 'inside a node'),
    ('parents', 'forward', 4, 'across nodes'), ('parents', 'backward', 4, 'across nodes'),
  ]  # fmt: skip


def test_a_layout_of_lone_ranks_exchanges_nothing():
  of_parents = [one for one in GOOD if f'{PARENTS}_layer' in one.scope]
  lone = OWN._replace(children_degrees=(1,))
  for compiled, names in ((of_parents, set()), (GOOD, {COUNT})):
    checks = rules.exchange_checks(rules.classify(compiled, {1}), MODEL, PLAN, lone, COSTS.cluster)
    assert {check.name for check in checks if not check.passed} == names


def test_what_is_gathered_ahead_has_to_begin_ahead():
  """Where nothing but its own start and done stands between, it does; exposed is all that nothing hides."""
  idle, hiding = Shadow(0, 0), Shadow(5, 0)
  one = dataclasses.replace(gathered('f32[64,64]', EVERY), shadow=hiding)  # 3 times 16,384 bytes
  cases = (([one] * 9, True, 0), ([one] * 9 + [dataclasses.replace(one, shadow=idle)], True, 1),
           ([one] * 8 + [dataclasses.replace(one, shadow=None)] * 2, False, 2))  # fmt: skip
  for ahead, passed, count in cases:
    found = rules.classify(ahead + GOOD, {64 * 64})
    assert rules.overlap_check(found).passed == passed
    shown, total = rules.exposed(found)[rules.PARAMETERS]
    assert (shown, total) == (count * 3 * 16384, len(ahead) * 3 * 16384)
    moved, all_moved = rules.exposed(found)[rules.ATTENTION]  # in line
    assert moved == all_moved == 4 * sum(COSTS.layers_in(layout) * (
      ROWS[layout, 'dispatch', 0] + ROWS[layout, 'combine', 0]) * 128 for layout in LAYOUTS) * 2  # fmt: skip


@pytest.mark.parametrize('change,broken', [
  (lambda good: good[1:], {COUNT, MOVED, ACROSS}),
  (lambda good: [*good, good[4]], {COUNT, MOVED}),  # remat that repeats a children's exchange
  (lambda good: [dataclasses.replace(one, groups=EVERY) for one in good], {STAY}),
  (lambda good: [exchange(CHILDREN, 'forward', 'dispatch', row=64), *good[:4], *good[5:]], {MOVED}),
  (lambda good: [*good, gathered('f32[3072,128]', EVERY)], {STRAY, MOVED, ACROSS}),
  (lambda good: [*good, gathered('(f32[64,64], f32[96,99])', EVERY)], {STRAY, MOVED, ACROSS}),
  (lambda good: [*good, Collective('all-to-all', tuple(hlo.arrays('s32[16]')), EVERY, None, 1,
                                   'jit(f)/parents_layer/attention/all_to_all')],
   {'no exchange of offsets of our own'}),
], ids=['one lost', 'one repeated', 'all across nodes', 'padded rows', 'gathered', 'gathered in passing',
        'own offsets'])  # fmt: skip
def test_each_rule_broken(change, broken):
  assert failed(change(list(GOOD))) == broken


BY_HALO = OWN._replace(children_span=16, halo_tokens=127, halo_hops=1)
PAIRS = tuple((rank, rank + 1) for rank in range(15))


def shift(direction: str, slots: int = 32, **changes: object) -> Collective:
  """One instruction for all layers: keys and values of a whole rank, since windows are longer than that."""
  path = 'jvp()' if direction == 'forward' else 'transpose(jvp())'
  one = Collective(
    'collective-permute', tuple(hlo.arrays(f'f32[{slots},8,8]{{2,1,0}}')), PAIRS, None, 6,
    f'{path}/while/children_layer/attention/halo/ppermute',
  )  # fmt: skip
  return dataclasses.replace(one, **changes)


HALO_COUNT = '1 collective-permute a layer and direction: halo'


@pytest.mark.parametrize('more,broken', [
  ([], set()),
  ([shift('forward')], {HALO_COUNT, MOVED}),  # by remat; across nodes heads are nearly all
  ([exchange(CHILDREN, 'forward', 'dispatch')], {COUNT, MOVED}),
  ([gathered('f32[3072,128]', EVERY)], {STRAY, MOVED, ACROSS}),
], ids=['good', 'one repeated', 'heads as well', 'gathered'])  # fmt: skip
def test_a_step_by_halo(more, broken):
  """Full layers exchange heads; windows shift keys and values, in the plan's bytes and no more."""
  of_parents = [one for one in GOOD if 'parents_layer' in one.scope]
  good = [*of_parents, shift('forward'), shift('backward')]
  assert failed([*good, *more], BY_HALO) == broken
  assert failed(good[:-1], BY_HALO) == {HALO_COUNT, MOVED}
  longer = [*of_parents, shift('forward', slots=64), shift('backward')]
  assert failed(longer, BY_HALO) == {MOVED}
  rows = rules.table(rules.classify(good, {1}), 8)
  assert {(row['purpose'], row['collective']) for row in rows} == {
    ('attention exchange', 'ragged-all-to-all'), ('halo', 'collective-permute'),
  }  # fmt: skip


def test_expert_exchanges_are_counted_apart():
  model = dataclasses.replace(MODEL, num_experts=8)
  experts = [
    dataclasses.replace(exchange(layout, direction, 'dispatch', groups=NODES),
                        times=2 * COSTS.layers_in(layout),
                        scope=f'{path}/{layout}_layer/feed_forward/ragged')
    for layout in LAYOUTS for direction, path in (('forward', 'jvp()'), ('backward', 'transpose(jvp())'))
  ]  # fmt: skip
  names = [
    check.name
    for check in rules.exchange_checks(rules.classify(GOOD + experts, {1}), model, PLAN, OWN, COSTS.cluster)
    if not check.passed
  ]
  assert names == []
  again = rules.exchange_checks(
    rules.classify(GOOD + experts + experts[:1], {1}), model, PLAN, OWN, COSTS.cluster
  )
  assert [check.name for check in again if not check.passed] == [COUNT.replace('attention', 'expert')]


def test_bytes_of_a_plan_are_those_of_the_metrics():
  moved = rules.plan_bytes(PLAN, MODEL.wire)
  across = sum(2 * COSTS.layers_in(layout) * one.cross_node for (layout, *_), one in moved.items())
  assert across == COSTS.cross_node_bytes(PLAN) > 0
  assert moved[CHILDREN, 'dispatch', 0].cross_node == 0 < moved[CHILDREN, 'dispatch', 0].total
  of_parents = sum(one.cross_node for (layout, *_), one in moved.items() if layout == PARENTS)
  across = 2 * COSTS.layers_in(PARENTS) * of_parents
  shifted = rules.halo_bytes(PLAN, MODEL, BY_HALO)
  assert across + shifted.cross_node == COSTS.cross_node_bytes(PLAN, BY_HALO)
  assert (shifted.total, shifted.cross_node) == (15 * 12 * 32 * 8 * 8 * 4, 12 * 32 * 8 * 8 * 4)


def test_memory_and_products_against_what_they_may_be():
  assert rules.memory_check({'a': 60, 'b': 40}, 100).passed and not rules.memory_check({'a': 101}, 100).passed
  model = dataclasses.replace(MODEL, num_experts=8, remat='none')
  slots = 64
  own = 3 * slots * flops.linear_flops_per_token(model) + slots * flops.logits_flops_per_token(model)
  rows = slots * model.experts_per_token
  assert rules.matmul_check(own, model, slots, rows).passed
  dense = own + 3 * slots * 3 * sum(flops.routed_flops_per_token(model, layer) for layer in range(8))
  assert not rules.matmul_check(dense, model, slots, rows).passed  # all 8 experts for each token, not 2
  assert rules.matmul_check(dense, model, slots, 4 * rows).passed  # as many as buffers have room for


# --- machines that are not there ------------------------------------------------------------------------


@pytest.mark.parametrize('name,devices,node', [
  ('v5p:2x4x4', 32, 8), ('v6e:4x8', 32, 8), ('tpu7x:2x2x4', 32, 8), ('h100:2x8', 16, 8), ('h200:4x8', 32, 8),
])  # fmt: skip
def test_topologies(name, devices, node):
  found = topology.parse(name)
  assert (found.num_devices, found.ranks_per_node) == (devices, node)


@pytest.mark.parametrize(
  'name', ['v4:2x2x1', 'v5p', 'v5p:4x8', 'h100:8', 'h100:3x8', 'v5p:2x0x4', 'h100:axb']
)
def test_unknown_topologies(name):
  with pytest.raises(ConfigError, match=f'--topology {name}: '):
    topology.parse(name)


@pytest.mark.parametrize('size,cores,box', [
  ((2, 4, 4), 1, (2, 2, 2, 1)), ((4, 8, 1), 1, (4, 2, 1, 1)), ((2, 2, 4), 2, (2, 2, 1, 2)),
  ((4, 4, 4), 1, (2, 2, 2, 1)),
])  # fmt: skip
def test_local_ranks_are_neighbours(size, cores, box):
  """Each 8 ranks in a row fill a box, whatever order JAX has the devices in."""
  x, y, z = size
  places = [(0, i, j, k, core) for k in range(z) for j in range(y) for i in range(x) for core in range(cores)]
  np.random.default_rng(0).shuffle(places)
  order = neighbour_order(places, 8)
  assert sorted(order) == list(range(len(places)))
  for first in range(0, len(places), 8):
    block = np.array([places[i] for i in order[first : first + 8]])
    assert (np.ptp(block, axis=0)[1:] + 1).tolist() == list(box)


def test_neighbours_stay_in_their_slice():
  places = [(s, i, j, 0, 0) for i in range(2) for j in range(4) for s in range(2)]
  blocks = np.array([places[i] for i in neighbour_order(places, 4)]).reshape(4, 4, 5)
  assert (np.ptp(blocks, axis=1)[:, 0] == 0).all()


def test_flags_that_keep_the_exchange_native_and_let_it_overlap(caplog):
  flags = xla_flags.with_gpu_flags('--xla_other=1')
  assert flags == ' '.join(
    ['--xla_other=1', *(f'--{name}={flag.value}' for name, flag in xla_flags.GPU_FLAGS.items())]
  )
  assert xla_flags.with_gpu_flags(flags) == flags
  assert f'--{xla_flags.DECOMPOSER}=0' in xla_flags.with_gpu_flags(f'--{xla_flags.DECOMPOSER}=0')
  assert not caplog.records
  for name, flag in xla_flags.GPU_FLAGS.items():
    other = 'true' if flag.value == 'false' else '7'
    assert xla_flags.with_gpu_flags(f'--{name}={other}').startswith(f'--{name}={other}')
    assert f'--{name}={other}' in caplog.text and flag.otherwise in caplog.text


def test_local_ranks_that_are_no_neighbours_are_found():
  box = [(0, i, j, 0, 0) for i in range(2) for j in range(2)]
  assert rules.placement_check([box, [(0, i, j, 1, 0) for i in range(2) for j in range(2)]]).passed
  assert not rules.placement_check([box, [(0, i, 0, 0, 0) for i in range(0, 8, 2)]]).passed
  assert rules.placement_check([[(0,)] * 8, [(1,)] * 8]).passed
  assert not rules.placement_check([[(0,)] * 4 + [(1,)] * 4]).passed


def test_sparse_cores_get_what_has_something_to_run_beside():
  """On v5p and v6e, where collectives are in line by default: parameters ahead, and exchanges in chunks."""
  for kind, ahead, chunks, expected in (
    ('TPU v5', 1, 1, {'all_gather', '2d_all_gather', '3d_all_gather', 'reduce_scatter', 'nd_reduce_scatter'}),
    ('TPU v6 lite', 0, 2, {'ragged_all_to_all'}),
    ('TPU v5p', 0, 1, set()),
    ('TPU7x', 1, 2, set()),
    ('NVIDIA H200', 1, 2, set()),
  ):
    options = xla_flags.compiler_options(kind, ClusterConfig(prefetch_layers=ahead, exchange_chunks=chunks))
    assert {name.rpartition('offload_')[2] for name in options} == expected
    assert set(options.values()) <= {'true'}
