"""The report's page and trace: nothing is lost between a plan, its simulated step and what is drawn."""

import base64
import dataclasses
import gzip
import html.parser
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import packed, random_plan

import repack_jax.report
from repack_jax.config import ClusterConfig, DataConfig, ModelConfig, PlannerConfig, RunConfig
from repack_jax.plan.plan import LAYOUTS, Group, Plan
from repack_jax.predict.cost_model import model_costs
from repack_jax.predict.plan_times import plan_times
from repack_jax.predict.simulator import CAUSES, simulate
from repack_jax.report import Case, plan_page, trace, write_trace
from repack_jax.report.data import exchange_bytes, held_blocks, page_data, work_blocks
from repack_jax.report.timeline import NOT_SHOWN, timeline

CAPACITY = 2048
FOLDER = Path(repack_jax.report.__file__).parent
HOSTILE = '</script><script>alert(1)</script> "$title" & <b>'


def make_run(nodes=2, ranks_per_node=8, domains=1, **model):
  return RunConfig(
    cluster=ClusterConfig(nodes=nodes, ranks_per_node=ranks_per_node, domains=domains),
    model=ModelConfig(**{'num_heads': 32, 'num_experts': 0, **model}),
    data=DataConfig(max_document_tokens=CAPACITY),
    planner=PlannerConfig(capacity_tokens=CAPACITY),
  )


def make_plans(run, seed=0, micro_batches=1, solo=0.0):
  """Random plans whose samples are of one batch; that share of the ranks holds solo samples."""
  rng, cluster, plans, count = np.random.default_rng(seed), run.cluster, [], 0
  for _ in range(micro_batches):
    plan = random_plan(
      rng, cluster.num_ranks, CAPACITY, cluster.domain_ranks, cluster.ranks_per_node, cluster.domain_ranks,
      solo=solo,
    )  # fmt: skip
    ids = tuple(range(count, count + len(plan.lengths)))
    plans.append(dataclasses.replace(plan, sample_ids=ids))
    count += len(ids)
  return plans


def make_case(run, name, plans, **how):
  costs = model_costs(run.cluster, run.model)
  return Case(name, tuple(plans), simulate(costs, plans, spans=True, **how))


def make_cases(run, plans):
  if any(plan.solo for plan in plans):
    wide = [dataclasses.replace(plan, children=plan.parents) for plan in plans]
    return [make_case(run, 'wide', wide), make_case(run, 'solve', plans)]
  wide = [dataclasses.replace(plan, children=plan.parents, mode='parents') for plan in plans]
  return [
    make_case(run, 'parents', wide),
    make_case(run, 'redistribute', plans, redistribute=True),
    make_case(run, 'repack', plans),
  ]


# A run, its micro-batches, and the share of ranks that hold solo samples.
RUNS = {
  '16 ranks': (make_run(), 1, 0.0),
  'three micro-batches': (make_run(), 3, 0.0),
  'one rank': (make_run(1, 1), 1, 0.0),
  'nodes of one rank': (make_run(8, 1), 1, 0.0),
  '256 ranks': (make_run(4, 8, 8), 1, 0.0),
  'solo samples': (make_run(), 2, 0.7),
}


@pytest.fixture(scope='module', params=RUNS)
def told(request):
  """A run and its cases."""
  run, micro_batches, solo = RUNS[request.param]
  return run, make_cases(run, make_plans(run, 3, micro_batches, solo))


class Elements(html.parser.HTMLParser):
  """The start tags of a page and the text in each kind of element."""

  def __init__(self, page):
    super().__init__()
    self.tags, self.text = [], {}
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_data(self, data):
    tag = self.tags[-1][0] if self.tags else ''
    self.text[tag] = self.text.get(tag, '') + data


def embedded(page):
  """The page's data, as a browser reads it."""
  return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


# --- the page --------------------------------------------------------------------------------------------


def test_page_holds_its_data_and_needs_nothing_else(told):
  run, cases = told
  page = plan_page(run, cases, 'A plan')
  assert embedded(page) == page_data(run, cases)
  assert [case['name'] for case in embedded(page)['cases']] == [case.name for case in cases]
  for outside in ('http:', 'https:', 'src=', 'href=', '@import', 'url(', 'import('):
    assert outside not in page
  assert not re.search(r'\binnerHTML\b|\bfetch\(', page)


def test_hostile_text_stays_text():
  run = make_run()
  page = plan_page(run, [make_case(run, HOSTILE, make_plans(run))], HOSTILE)
  elements = Elements(page)
  assert [tag for tag, _ in elements.tags].count('script') == 2
  assert elements.text['title'].strip() == HOSTILE
  assert elements.text['h1'].strip() == HOSTILE
  assert embedded(page)['cases'][0]['name'] == HOSTILE


def test_scripts_styles_and_markup_agree():
  """Whatever the scripts look up is there, and every cause has a colour, light and dark."""
  markup = (FOLDER / 'plan.html').read_text()
  scripts = '\n'.join(path.read_text() for path in sorted(FOLDER.glob('*.js')))
  for name in set(re.findall(r"byId\('([\w-]+)'\)", scripts)):
    assert f'id="{name}"' in markup, name
  light, dark = (FOLDER / 'plan.css').read_text().split('@media (prefers-color-scheme: dark)')
  for cause in CAUSES:
    name = re.sub("'s?", '', cause.removeprefix('wait: ')).replace(' ', '-')
    name = 'waiting' if name == 'step-end' else name
    assert f'--{name}:' in light
    assert f'--{name}:' in dark


def test_page_compares_with_the_first_case(told):
  run, cases = told
  data = page_data(run, cases)
  for shown, case in zip(data['cases'], cases, strict=True):
    assert shown['speed'] == cases[0].simulated.step_s / case.simulated.step_s
    assert shown['cross_node_bytes'] == case.simulated.cross_node_bytes
    assert shown['mfu'] is None
    assert sum(shown['seconds']) == pytest.approx(case.simulated.step_s)
  lengths = cases[0].lengths()
  assert sorted(data['samples']) == sorted(lengths)
  shown = [lengths[sample] for sample in data['samples']]
  assert shown == sorted(shown, reverse=True)


def test_layers_by_halo_are_named():
  """And their exchange is not told as one of heads."""
  run = make_run(num_kv_heads=4)
  plans = make_plans(run, solo=0.5, micro_batches=2)
  costs = model_costs(run.cluster, run.model)
  halos = [plan.with_halo(costs.halo_tokens) for plan in plans]
  data = page_data(run, [make_case(run, 'heads', plans), make_case(run, 'halo', halos)])
  heads, halo = ([batch['halo'] for batch in case['micro_batches']] for case in data['cases'])
  assert heads == [None, None] and halo == [[127, plan.halo_hops(127)] for plan in halos]
  assert data['cases'][1]['cross_node_bytes'] == sum(map(costs.cross_node_bytes, halos))


def test_mfu_where_the_peak_is_known():
  run = make_run()
  run = dataclasses.replace(run, cluster=dataclasses.replace(run.cluster, peak_flops_per_s=1e15))
  case = make_case(run, 'repack', make_plans(run))
  assert page_data(run, [case])['cases'][0]['mfu'] == case.simulated.mfu > 0


def test_cases_that_cannot_be_compared_are_refused():
  run = make_run()
  plans = make_plans(run)
  case = make_case(run, 'repack', plans)
  with pytest.raises(ValueError, match='at least one case'):
    page_data(run, [])
  with pytest.raises(ValueError, match="two cases are called 'repack'"):
    page_data(run, [case, case])
  with pytest.raises(ValueError, match='holds other samples'):
    page_data(run, [case, make_case(run, 'other', make_plans(run, 1))])
  with pytest.raises(ValueError, match='16 ranks; the run has 32'):
    trace(make_run(4), [case])
  with pytest.raises(ValueError, match='spans=True'):
    Case('repack', tuple(plans), simulate(model_costs(run.cluster, run.model), plans))
  with pytest.raises(ValueError, match='no plans'):
    Case('repack', (), case.simulated)


# --- the layouts -----------------------------------------------------------------------------------------


def amounts(blocks):
  """What the blocks of each row add up to."""
  return np.array([sum(row[1::2]) for row in blocks])


@pytest.mark.parametrize('solo', [0.0, 0.7])
@pytest.mark.parametrize('seed', range(10))
def test_blocks_hold_every_token(seed, solo):
  plan = make_plans(make_run(), seed, solo=solo)[0]
  held, alone = held_blocks(plan)
  assert amounts(held).tolist() == plan.shared_tokens.tolist()
  assert (amounts(held) + amounts(alone)).tolist() == plan.rank_tokens.tolist()
  assert any(alone) == bool(solo)
  of_sample = np.zeros(len(plan.lengths), np.int64)
  for blocks in (*held, *alone):
    np.add.at(of_sample, blocks[::2], blocks[1::2])
    assert all(tokens > 0 and isinstance(tokens, int) for tokens in blocks[1::2])
  assert of_sample.tolist() == list(plan.lengths)


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('solo', [0.0, 0.7])
@pytest.mark.parametrize('seed', range(5))
def test_blocks_hold_all_work(seed, solo, layout):
  run = make_run()
  plan = make_plans(run, seed, solo=solo)[0]
  costs = model_costs(run.cluster, run.model)
  times = plan_times(plan, costs)
  (core,) = times.layouts[layout].cores.values()
  work, alone = work_blocks(plan, costs, layout)
  assert [tuple(blocks[::2]) for blocks in work] == [group.samples for group in plan.groups(layout)]
  of_rank = amounts(work)[times.layouts[layout].groups.of]
  np.testing.assert_allclose(of_rank, core.group_s, rtol=1e-5)
  np.testing.assert_allclose(amounts(alone), core.solo_s, rtol=1e-5)
  assert core.solo_s.any() == bool(solo)


def test_exchange_is_what_the_ranks_send():
  """A sample's bytes by its group's degree add up to all that is sent; solo samples add nothing."""
  run = make_run(4)
  plan = make_plans(run, 3, solo=0.7)[0]
  wire, times = run.model.wire, plan_times(plan, model_costs(run.cluster, run.model))
  for layout in LAYOUTS:
    sent = np.zeros(2)
    for group in plan.groups(layout):
      tokens = sum(plan.lengths[s] for s in group.samples)
      sent += tokens * np.array(exchange_bytes(wire, group.size, run.cluster.ranks_per_node))
    traffic = times.layouts[layout].attention
    np.testing.assert_allclose(sent, [traffic.intra.sum(), traffic.inter.sum()])
  assert exchange_bytes(wire, 1, 8) == [0, 0]
  data = page_data(run, [make_case(run, 'solve', [plan])])
  sizes = {group.size for group in (*plan.parents, *plan.children)}
  assert data['exchange'] == {str(size): exchange_bytes(wire, size, 8) for size in sizes}


def test_solo_samples_are_counted():
  run = make_run()
  plans = make_plans(run, 3, 2, 0.7)
  shown = page_data(run, [make_case(run, 'solve', plans)])['cases'][0]
  alone = [(plan, s) for plan in plans for group in plan.solo for s in group.samples]
  assert shown['solo_samples'] == len(alone) > 0
  assert shown['solo_tokens'] == sum(plan.lengths[s] for plan, s in alone)
  assert shown['tokens'] == sum(plan.total_tokens for plan in plans)
  for batch, plan in zip(shown['micro_batches'], plans, strict=True):
    assert [rank for rank, row in enumerate(batch['solo_held']) if row] == [g.first_rank for g in plan.solo]
    assert [row[::2] for row in batch['solo_work']] == [row[::2] for row in batch['solo_held']]


@pytest.mark.parametrize('seed', range(10))
def test_blocks_are_what_is_packed(seed):
  """On each rank, in rows of several tokens too: child by child, where lengths fill no whole rows."""
  rng = np.random.default_rng(seed)
  row = int(rng.choice([1, 2, 8]))
  plan = random_plan(rng, 16, 3 * row, 16, 8, solo=0.7 * (seed % 2), row_tokens=row)
  held, alone = held_blocks(plan)
  assert amounts(held).tolist() == plan.shared_tokens.tolist()
  assert (amounts(held) + amounts(alone)).tolist() == plan.rank_tokens.tolist()
  segments = packed(plan).segments
  for rank, begin in enumerate(plan.shared_slots):
    for blocks, slots in ((held[rank], segments[rank, :begin]), (alone[rank], segments[rank, begin:])):
      filled = slots[slots >= 0]
      assert np.repeat(blocks[::2], blocks[1::2]).tolist() == filled.tolist()


def test_blocks_in_rows_of_two_tokens():
  """A child of 5 and 2 tokens over 4 ranks: whole rows but for the last token."""
  groups = (Group(0, 4, (1, 0)),)
  plan = Plan((0, 1), (2, 5), groups, groups, 'parents', 2, 4, 4, 4, row_tokens=2).validate()
  assert plan.shared_tokens.tolist() == [2, 2, 2, 1] and plan.shared_slots.tolist() == [2] * 4
  assert held_blocks(plan) == ([[1, 2], [1, 2], [1, 1, 0, 1], [0, 1]], [[]] * 4)


def test_blocks_follow_the_stream():
  parents, children = (Group(0, 4, (2, 0, 1)),), (Group(0, 2, (2, 0)), Group(2, 2, (1,)))
  plan = Plan((4, 2, 9), (5, 2, 4), parents, children, 'repack', 8, 4, 4, 4).validate()
  assert held_blocks(plan) == ([[2, 4], [0, 5], [1, 1], [1, 1]], [[]] * 4)
  solo = (Group(1, 1, (4,)), Group(3, 1, (5, 3)))
  lengths = (5, 2, 4, 1, 3, 6)
  plan = Plan(tuple(range(6)), lengths, parents, children, 'solve', 8, 4, 4, 4, solo).validate()
  assert held_blocks(plan) == ([[2, 4], [0, 5], [1, 1], [1, 1]], [[], [4, 3], [], [5, 6, 3, 1]])


def test_empty_ranks_and_an_empty_batch():
  run = make_run()
  parents = (Group(0, 8), Group(8, 8, (0,)))
  one = Plan((3,), (9,), parents, parents, 'parents', CAPACITY, 16, 16, 8).validate()
  data = page_data(run, [make_case(run, 'one', [one])])['cases'][0]['micro_batches'][0]
  assert data['held'][:8] == [[]] * 8
  assert data['work'][0] == []
  assert data['parents'] == [[0, 8, 0], [8, 8, 1]]
  none = Plan((), (), (Group(0, 16),), (Group(0, 16),), 'static', CAPACITY, 16, 16, 8).validate()
  page = plan_page(run, [make_case(run, 'none', [none])], 'Empty')
  assert ['Batch', 'no samples'] in embedded(page)['about']


# --- the timeline ----------------------------------------------------------------------------------------


def unpacked(values):
  return np.frombuffer(base64.b64decode(values['data']), f'<u{values["bits"] // 8}').astype(np.int64)


def shown_spans(data, tick_s):
  """[rank, cause, layer, micro-batch, backward, start, end] of each span that the page draws, in seconds."""
  tag, ticks = unpacked(data['tag']), unpacked(data['ticks'])
  for rank, (begin, stop) in enumerate(itertools.pairwise(data['first'])):
    ends = np.cumsum(ticks[begin:stop])
    for at, end in zip(range(begin, stop), ends, strict=True):
      yield [rank, *data['tags'][tag[at]], (end - ticks[at]) * tick_s, end * tick_s]


def recorded_spans(case):
  """The same of each span of the simulator, in the order of ranks, then of time."""
  spans = case.spans
  return zip(*(getattr(spans, field.name).tolist() for field in dataclasses.fields(spans)), strict=True)


def test_timeline_shows_every_span(told):
  run, cases = told
  data = page_data(run, cases)
  for case, of_case in zip(cases, data['cases'], strict=True):
    shown = list(shown_spans(of_case['timeline'], data['tick_s']))
    recorded = [
      (*span[:5], round(span[5] / data['tick_s']), round(span[6] / data['tick_s']))
      for span in recorded_spans(case)
    ]
    drawn = [(*span[:5], *(round(edge / data['tick_s']) for edge in span[5:])) for span in shown]
    # What is shorter than a tick cannot be seen.
    assert drawn == [span for span in recorded if span[6] > span[5]]
    assert of_case['timeline']['spans'] == len(drawn)
    assert of_case['timeline']['left_out'] == ''
    assert not any(span[1] == NOT_SHOWN for span in shown)
    last = [0.0] * run.cluster.num_ranks
    for span in shown:
      last[span[0]] = span[6]
    assert last == pytest.approx([case.simulated.step_s] * run.cluster.num_ranks, abs=data['tick_s'])


@pytest.mark.parametrize('micro_batches', [1, 3])
def test_timeline_with_too_many_spans_keeps_the_ends(micro_batches):
  run = make_run(num_layers=16)
  case = make_case(run, 'repack', make_plans(run, 0, micro_batches))
  tick_s = case.simulated.step_s / 1e6
  whole = list(shown_spans(timeline(run.model, case, tick_s), tick_s))
  most = len(whole) * 3 // 4
  data = timeline(run.model, case, tick_s, most)
  kept = [span for span in shown_spans(data, tick_s) if span[1] != NOT_SHOWN]
  assert data['spans'] == len(kept) <= most
  assert kept == [s for s in whole if (0 <= s[2] < 8 and not s[4]) or (0 <= s[2] < 4 and s[4])]
  assert f'{data["total"]:,} spans' in data['left_out']
  assert all(period is not None for period in data['periods'])
  least = timeline(run.model, case, tick_s, 1)
  assert {span[3] for span in shown_spans(least, tick_s) if span[1] != NOT_SHOWN} == {0}
  assert [period is not None for period in least['periods']] == [at == 0 for at in range(micro_batches)]


# --- the trace -------------------------------------------------------------------------------------------


def test_trace_events_follow_each_other_and_fill_the_step(told, tmp_path):
  run, cases = told
  told_trace = trace(run, cases)
  write_trace(tmp_path / 'trace.json', run, cases)
  assert json.loads((tmp_path / 'trace.json').read_text()) == told_trace
  ranks, nodes = run.cluster.num_ranks, run.cluster.num_ranks // run.cluster.ranks_per_node
  threads, names = {}, {}
  for event in told_trace['traceEvents']:
    if event['ph'] == 'X':
      assert set(event) == {'ph', 'name', 'cat', 'pid', 'tid', 'ts', 'dur', 'args'}
      assert event['args']['direction'] in ('forward', 'backward')
      assert event['cat'] in ('compute', 'padding', 'exchange', 'parameters', 'waiting')
      assert event['dur'] > 0
      threads.setdefault((event['pid'], event['tid']), []).append(event)
    else:
      assert event['ph'] == 'M'
      names[event['name'], event['pid'], event.get('tid')] = event['args'].get('name')
  assert len(threads) == len(cases) * ranks
  assert not {pid for pid, _ in threads} & set(range(ranks))
  for (pid, rank), events in threads.items():
    case, node = cases[pid // 1000 - 1], rank // run.cluster.ranks_per_node
    assert names['process_name', pid, None] == f'{case.name}: node {node}'
    assert names['thread_name', pid, rank] == f'rank {rank}'
    for before, after in itertools.pairwise(events):
      assert before['ts'] + before['dur'] == pytest.approx(after['ts'], abs=1e-4)
    assert events[0]['ts'] == 0
    assert sum(event['dur'] for event in events) == pytest.approx(1e6 * case.simulated.step_s, abs=1e-3)
  assert sum(name == 'process_name' for name, _, _ in names) == len(cases) * nodes


def test_trace_can_be_compressed(tmp_path):
  run = make_run(1, 1)
  cases = [make_case(run, 'static', make_plans(run))]
  write_trace(tmp_path / 'trace.json.gz', run, cases)
  assert json.loads(gzip.decompress((tmp_path / 'trace.json.gz').read_bytes())) == trace(run, cases)


def test_report_does_without_jax():
  code = "import sys, repack_jax.report; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, '-c', code], cwd=FOLDER.parent.parent).returncode == 0


def test_scripts_use_pictures_and_elements_that_exist():
  scripts = '\n'.join(file.read_text() for file in FOLDER.glob('*.js'))
  made = set(re.findall(r'pictures\.(\w+) = ', scripts))
  assert made and set(re.findall(r'pictures\.(\w+)', scripts)) == made
  elements = set(re.findall(r'id="([\w-]+)"', (FOLDER / 'plan.html').read_text()))
  assert set(re.findall(r"byId\('([\w-]+)'\)", scripts)) <= elements
  style = (FOLDER / 'plan.css').read_text()
  for cause in CAUSES:
    name = re.sub("'s?", '', cause.removeprefix('wait: '), count=1).replace(' ', '-')
    assert f'--{name}:' in style or cause.startswith('wait: step'), cause
