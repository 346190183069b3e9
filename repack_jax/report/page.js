// Puts the page together: head, controls, tables and legends; the state is kept in the address.

const pictures = {};

// --- the state and the address ---------------------------------------------------------------------------

function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const named = page.cases.findIndex((one) => one.name === asked.get('case'));
  state.case = Math.max(0, named);
  state.mb = Math.min(shownCase().micro_batches.length - 1, Math.max(0, Number(asked.get('mb')) || 0));
  const time = asked.get('time') ?? 'period';
  const range = time.split('..').map((value) => Number(value) / page.tick_s);
  if (time === 'step') state.time = time;
  else state.time = range.length === 2 && range[1] > range[0] ? range : 'period';
  const sample = asked.get('sample');
  state.sample = sample !== null && page.samples.includes(Number(sample)) ? Number(sample) : null;
}

function writeAddress() {
  const text = (tick) => (tick * page.tick_s).toPrecision(6);
  const time = typeof state.time === 'string' ? state.time : state.time.map(text).join('..');
  const said = new URLSearchParams({ case: shownCase().name, mb: state.mb, time });
  if (state.sample !== null) said.set('sample', state.sample);
  history.replaceState(null, '', '#' + said);
}

function setState(change) {
  Object.assign(state, change);
  state.mb = Math.min(state.mb, shownCase().micro_batches.length - 1);
  writeAddress();
  show();
}

function setHover(id) {
  if (id === state.hover) return;
  state.hover = id;
  pictures.parents.drawOver();
  pictures.children.drawOver();
}

function show() {
  const many = shownCase().micro_batches.length > 1;
  byId('mb-label').hidden = !many;
  byId('mb-choice').replaceChildren(
    ...shownCase().micro_batches.map((_, at) => element('option', String(at), { value: at })),
  );
  byId('mb-choice').value = state.mb;
  for (const input of document.querySelectorAll('[name=case]'))
    input.checked = Number(input.value) === state.case;
  for (const input of document.querySelectorAll('[name=time]')) input.checked = input.value === state.time;
  byId('sample-choice').value = state.sample ?? '';
  byId('sample-facts').textContent = state.sample === null ? '' : sampleFacts(state.sample);
  byId('left-out').hidden = !shownCase().timeline.left_out;
  byId('left-out').textContent = shownCase().timeline.left_out;
  showTiles();
  showCases();
  showSampleLegend();
  showCauseLegend();
  for (const picture of Object.values(pictures)) {
    picture.load();
    picture.draw();
  }
}

// --- head and tables -------------------------------------------------------------------------------------

function showTiles() {
  const one = shownCase(),
    baseline = page.cases[0];
  const tiles = [[seconds(one.step_s), 'a step']];
  if (state.case) tiles.push([`${one.speed.toFixed(2)}x`, `as fast as ${baseline.name}`]);
  if (one.mfu !== null) tiles.push([percent(one.mfu), 'MFU']);
  tiles.push(
    [whole(one.tokens_per_s), 'tokens a second'],
    [bytes(one.cross_node_bytes), 'across nodes a step'],
  );
  if (one.solo_samples)
    tiles.push([
      percent(one.solo_tokens / one.tokens),
      `of tokens in ${plural(one.solo_samples, 'solo sample')}`,
    ]);
  const halos = one.micro_batches.filter((batch) => batch.halo).length;
  if (halos) {
    const of = one.micro_batches.length > 1 ? ` of ${halos} of ${one.micro_batches.length} micro-batches` : '';
    tiles.push(['by halo', `layers in the children's layout${of}`]);
  }
  byId('tiles').replaceChildren(
    ...tiles.map(([value, name]) => {
      const tile = element('div');
      tile.append(element('b', value), element('span', name));
      return tile;
    }),
  );
}

function fillTable(table, head, body, current) {
  const headRow = element('tr');
  headRow.append(...head.map((text) => element('th', text, { scope: 'col' })));
  const top = element('thead'),
    rest = element('tbody');
  top.append(headRow);
  body.forEach((cells, at) => {
    const row = element('tr', null, at === current ? { 'aria-current': 'true' } : {});
    row.append(
      ...cells.map((text, column) => element(column ? 'td' : 'th', text, column ? {} : { scope: 'row' })),
    );
    rest.append(row);
  });
  table.replaceChildren(top, rest);
}

function showCases() {
  const known = page.cases.some((one) => one.mfu !== null);
  const several = page.cases.some((one) => one.micro_batches.length > 1);
  const head = ['case', 'step', `speed against ${page.cases[0].name}`];
  if (known) head.push('MFU');
  head.push('tokens a second', 'across nodes');
  const solo = page.cases.some((one) => one.solo_samples);
  if (solo) head.push('solo samples', 'solo tokens');
  if (several) head.push('micro-batches');
  const body = page.cases.map((one) => {
    const cells = [one.name, seconds(one.step_s), `${one.speed.toFixed(2)}x`];
    if (known) cells.push(one.mfu === null ? 'unknown' : percent(one.mfu));
    cells.push(whole(one.tokens_per_s), bytes(one.cross_node_bytes));
    if (solo) cells.push(whole(one.solo_samples), percent(one.solo_tokens / one.tokens));
    if (several) cells.push(String(one.micro_batches.length));
    const shares = page.families.map((family) => percent(familySeconds(one, family) / one.step_s));
    return [...cells, ...shares];
  });
  fillTable(byId('cases'), [...head, ...page.families], body, state.case);
}

function showSeconds() {
  const used = page.causes
    .map((_, cause) => cause)
    .filter((cause) => page.cases.some((one) => one.seconds[cause] > 0));
  fillTable(
    byId('seconds'),
    ['cause', ...page.cases.map((one) => one.name)],
    used.map((cause) => [page.causes[cause][0], ...page.cases.map((one) => seconds(one.seconds[cause]))]),
  );
}

// --- legends ---------------------------------------------------------------------------------------------

function entry(background, text) {
  const item = element('li'),
    swatch = element('span', null, { class: 'swatch' });
  swatch.style.background = background;
  item.append(swatch, element('span', text));
  return item;
}

function showCauseLegend() {
  for (const list of document.querySelectorAll('.cause-legend')) {
    list.replaceChildren();
    for (const family of page.families) {
      const members = page.causes
        .map(([, of], cause) => (of === family ? cause : -1))
        .filter((cause) => cause >= 0 && page.cases.some((one) => one.seconds[cause] > 1e-9 * one.step_s));
      const items = members.map((cause) =>
        entry(cssOfCause(cause), page.causes[cause][0].replace('wait: ', '')),
      );
      // With the first one, so that no line ends between them.
      if (items.length && (items.length > 1 || family === 'waiting'))
        items[0].prepend(element('span', `${family}:`, { class: 'family' }));
      list.append(...items);
    }
    if (shownCase().timeline.left_out) list.append(entry(colours.missing, 'not on this page'));
  }
}

function showSampleLegend() {
  const batch = shownBatch(),
    here = samplesHere().slice(0, 8);
  const solo = new Set(batch.solo_held.flatMap((flat) => flat.filter((_, at) => at % 2 === 0)));
  const items = here.map((id) => {
    const sample = placeOf(batch, id);
    const colour = (solo.has(sample) ? colours.solo : colours.sample).get(id);
    return entry(colour, `sample ${id}: ${plural(batch.lengths[sample], 'token')}`);
  });
  const line = `repeating-linear-gradient(135deg, ${colours.dust} 0 4px, ${colours['dust-line']} 4px 5.5px)`;
  items.push(entry(THIN ? colours.dust : line, 'samples too short to draw apart'));
  if (solo.size) {
    const [first] = solo;
    const text = 'faint, behind a gap: solo samples, each whole on one rank and in no exchange';
    items.push(entry(colours.solo.get(batch.ids[first]), text));
  }
  byId('sample-legend').replaceChildren(...items);
}

// --- the start -------------------------------------------------------------------------------------------

function radio(name, value, text) {
  const label = element('label'),
    input = element('input', null, { type: 'radio', name, value });
  label.append(input, element('span', text));
  return label;
}

function addControls() {
  byId('case-choice').append(...page.cases.map((one, at) => radio('case', at, one.name)));
  byId('case-choice').addEventListener('change', (event) => setState({ case: Number(event.target.value) }));
  byId('mb-choice').addEventListener('change', (event) => setState({ mb: Number(event.target.value) }));
  const lengths = new Map(
    page.cases[0].micro_batches.flatMap((batch) => batch.ids.map((id, at) => [id, batch.lengths[at]])),
  );
  byId('sample-choice').append(
    element('option', 'none kept', { value: '' }),
    ...page.samples.map((id) =>
      element('option', `${id}: ${plural(lengths.get(id), 'token')}`, { value: id }),
    ),
  );
  byId('sample-choice').addEventListener('change', (event) => {
    setState({ sample: event.target.value === '' ? null : Number(event.target.value) });
  });
  byId('period-label').textContent =
    page.period === 1
      ? 'First layer forward'
      : `First ${page.period} layers forward (${page.layer_kinds.slice(0, page.period)})`;
  for (const input of document.querySelectorAll('[name=time]')) {
    input.addEventListener('change', () => setState({ time: input.value }));
  }
  const moves = { earlier: [-0.5, 1], later: [0.5, 1], 'zoom-in': [0, 0.5], 'zoom-out': [0, 2] };
  for (const [id, [shift, factor]] of Object.entries(moves)) {
    byId(id).addEventListener('click', () => pictures.timeline.zoom(shift, factor));
  }
  addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && state.sample !== null) setState({ sample: null });
  });
  addEventListener('hashchange', () => {
    readAddress();
    show();
  });
  darkMode.addEventListener('change', paint);
  new ResizeObserver(showBars).observe(byId('bars'));
}

// All that depends on colours.
function paint() {
  readColours();
  showBars();
  show();
}

byId('about').append(...page.about.flatMap(([name, text]) => [element('dt', name), element('dd', text)]));
byId('cases-note').textContent =
  `Speed is the step of ${page.cases[0].name} over a case's own. Shares are of a rank's time, ` +
  'mean over ranks; padding is work on slots that hold no token. ' +
  'Bytes are those of attention exchanges and redistribution.' +
  (page.cases.some((one) => one.solo_samples)
    ? ' Solo samples stay whole on one rank in all layers and are in no exchange of attention.'
    : '');
byId('losses-note').textContent = `beside each number, how it differs from ${page.cases[0].name}`;
pictures.parents = new Layout(byId('parents'), true);
pictures.children = new Layout(byId('children'), false);
pictures.timeline = new Timeline(byId('timeline'));
readAddress();
addControls();
showSeconds();
paint();
