// Where a rank's time goes: a bar of all causes a case, and all but useful work on a scale of its own.

const LOSSES = page.families.filter((family) => family !== 'compute');

// The causes of a family in the order of the simulator.
const causesOf = (family) =>
  page.causes.map((_, cause) => cause).filter((cause) => page.causes[cause][1] === family);
const familySeconds = (one, family) => causesOf(family).reduce((sum, cause) => sum + one.seconds[cause], 0);
const lossSeconds = (one) => LOSSES.reduce((sum, family) => sum + familySeconds(one, family), 0);

// Seconds of a case, and by how much they differ from the first case's.
function figure(one, of, digits) {
  const made = element('span', seconds(of(one), digits), { class: 'figure' });
  const change = of(one) - of(page.cases[0]);
  // Less than a ten-thousandth of a step is nothing to see.
  if (Math.abs(change) > 1e-4 * page.cases[0].step_s) {
    const less = change < 0;
    const text = `${less ? '\u2212' : '+'}${seconds(Math.abs(change), 3)}`;
    made.append(' ', element('b', text, less ? { class: 'less' } : {}));
  }
  return made;
}

// One piece a cause, `longest` seconds over the whole width; names in those that are wide enough.
function stack(one, causes, longest, fits) {
  const made = element('div', null, { class: 'stack', role: 'img' });
  const said = [];
  for (const cause of causes) {
    const value = one.seconds[cause],
      part = value / longest,
      name = page.causes[cause][0];
    if (part < 5e-4) continue;
    const piece = element('i', !isWait(cause) && fits(name, part) ? name : '');
    piece.style.width = `${100 * part}%`;
    piece.style.background = cssOfCause(cause);
    if (!isWait(cause)) piece.style.color = inkOn(colours.cause[cause]);
    piece.addEventListener('pointermove', (event) =>
      showTip(
        [name, `${seconds(value)}, ${percent(value / one.step_s)} of the step`, `case ${one.name}`],
        event,
      ),
    );
    piece.addEventListener('pointerleave', () => showTip(null));
    made.append(piece);
    said.push(`${name} ${seconds(value)}`);
  }
  made.setAttribute('aria-label', said.join(', '));
  return made;
}

function showBars() {
  const longest = Math.max(...page.cases.map((one) => one.step_s));
  const ink = document.createElement('canvas').getContext('2d'),
    probe = element('div', null, { class: 'bar' });
  probe.append(element('span'), element('div'), element('span'));
  byId('bars').replaceChildren(probe);
  const full = probe.children[1].clientWidth;
  pictures.parents.font(ink, 13);
  const fits = (name, part) => ink.measureText(name).width + 8 < part * full;
  const causes = page.families.flatMap(causesOf);
  byId('bars').replaceChildren(
    ...page.cases.map((one) => {
      const bar = element('div', null, { class: 'bar' });
      bar.append(
        element('span', one.name),
        stack(one, causes, longest, fits),
        figure(one, (of) => of.step_s, 4),
      );
      return bar;
    }),
  );
  showLosses();
}

// A column a family, all on one scale, so that what a case saves is seen where it saves it.
function showLosses() {
  const used = LOSSES.filter((family) => page.cases.some((one) => familySeconds(one, family) > 0));
  const longest = Math.max(
    1e-12,
    ...page.cases.flatMap((one) => used.map((family) => familySeconds(one, family))),
  );
  const table = byId('losses'),
    head = element('tr');
  head.append(...['case', ...used, 'together'].map((name) => element('th', name, { scope: 'col' })));
  const body = page.cases.map((one) => {
    const row = element('tr');
    row.append(element('th', one.name, { scope: 'row' }));
    for (const family of used) {
      const cell = element('td');
      const value = (of) => familySeconds(of, family);
      cell.append(
        stack(one, causesOf(family), longest, () => false),
        figure(one, value, 3),
      );
      row.append(cell);
    }
    const cell = element('td');
    cell.append(figure(one, lossSeconds, 3));
    row.append(cell);
    return row;
  });
  table.replaceChildren(element('thead'), element('tbody'));
  table.tHead.append(head);
  table.tBodies[0].append(...body);
}
