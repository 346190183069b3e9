// What each rank does when: spans as coloured stretches, one row a rank.

function unpack(packed) {
  const raw = Uint8Array.from(atob(packed.data), (letter) => letter.charCodeAt(0));
  return packed.bits === 8
    ? raw
    : packed.bits === 16
      ? new Uint16Array(raw.buffer)
      : new Uint32Array(raw.buffer);
}

// A case's spans with the ticks at which each begins; made when it is first shown.
const unpackedCases = new Map();
function spansOf(one) {
  if (!unpackedCases.has(one)) {
    const { first, tags, tag, ticks } = one.timeline;
    const lasting = unpack(ticks),
      begin = new Float64Array(lasting.length);
    for (let rank = 0; rank < RANKS; rank++) {
      for (let at = first[rank], tick = 0; at < first[rank + 1]; tick += lasting[at], at++) begin[at] = tick;
    }
    unpackedCases.set(one, { first, tags, tag: unpack(tag), ticks: lasting, begin });
  }
  return unpackedCases.get(one);
}

class Timeline extends Rows {
  constructor(host) {
    super(host, '', 14);
    this.spans = null;
    this.grabbed = null;
    this.base.addEventListener('pointerdown', (event) => {
      this.grabbed = this.place(event)[0];
      this.base.setPointerCapture(event.pointerId);
    });
    this.base.addEventListener('pointerup', (event) => this.release(event));
    this.base.addEventListener('pointercancel', () => {
      this.grabbed = null;
      this.drawOver();
    });
    this.base.addEventListener('dblclick', () => setState({ time: 'step' }));
    this.base.addEventListener('keydown', (event) => {
      const move = {
        ArrowLeft: [-0.25, 1],
        ArrowRight: [0.25, 1],
        '+': [0, 0.5],
        '=': [0, 0.5],
        '-': [0, 2],
      }[event.key];
      if (!move) return;
      event.preventDefault();
      this.zoom(...move);
    });
  }

  get whole() {
    return [0, Math.max(1, shownCase().step_s / page.tick_s)];
  }

  load() {
    this.spans = spansOf(shownCase());
    const period = shownCase().timeline.periods[state.mb] ?? this.whole;
    this.range = state.time === 'step' ? this.whole : state.time === 'period' ? period : state.time;
    // Cases start their first layer at different times; what compares is the width.
    if (state.time === 'period') {
      const widest = Math.max(
        ...page.cases.map((one) => {
          const other = one.timeline.periods[state.mb];
          return other ? other[1] - other[0] : 0;
        }),
      );
      if (widest) this.range = [period[0], period[0] + widest * 1.01];
    } else if (state.time === 'step') {
      this.range = [0, Math.max(...page.cases.map((one) => one.step_s)) / page.tick_s];
    }
    const [from, to] = this.range.map((tick) => Math.min(tick * page.tick_s, shownCase().step_s));
    byId('time-facts').textContent =
      `${seconds(from)} to ${seconds(to)} of a step of ${seconds(shownCase().step_s)}`;
    this.base.setAttribute(
      'aria-label',
      `Timeline of case ${shownCase().name}, ${byId('time-facts').textContent}`,
    );
  }

  // Shifts by a part of the width shown, and scales it.
  zoom(shift, factor) {
    const [from, to] = this.range,
      half = ((to - from) / 2) * factor;
    const middle = (from + to) / 2 + shift * (to - from),
      end = this.whole[1];
    if (2 * half < 10) return;
    const low = Math.max(0, Math.min(middle - half, end - 2 * half));
    setState({ time: [low, Math.min(low + 2 * half, Math.max(end, to))] });
  }

  // The span of a rank at a tick, or where to begin drawing.
  at(rank, tick) {
    const { first, begin } = this.spans;
    let low = first[rank],
      high = first[rank + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (begin[middle] <= tick) low = middle + 1;
      else high = middle;
    }
    return Math.max(first[rank], low - 1);
  }

  draw() {
    if (!this.spans || this.width < 100) return;
    const context = this.context(this.base);
    const last = this.range[1] * page.tick_s,
      [size, unit] = SECONDS.find(([size]) => last >= size) ?? SECONDS.at(-1);
    this.drawGround(context, `time since the step's start, in ${unit}`, (ticks, step) => {
      const digits = Math.max(0, -Math.floor(Math.log10((step * page.tick_s) / size) + 1e-9));
      return ((ticks * page.tick_s) / size).toFixed(digits);
    });
    for (let rank = 0; rank < RANKS; rank++) this.drawRank(context, rank);
    this.drawLayers(context);
    const period = shownCase().timeline.periods[state.mb];
    if (period && state.time === 'period') {
      // Beside the title, since the layers' names have the row below.
      this.drawMark(
        context,
        period[1],
        `layer ${page.period - 1} ends on all ranks`,
        [6, 4],
        9,
        this.left + 240,
      );
    }
    this.drawOver();
  }

  drawRank(context, rank) {
    const { first, tags, tag, ticks, begin } = this.spans;
    const y = rows.top[rank],
      height = THIN ? ROW : ROW - 1;
    let layer = null;
    for (let at = this.at(rank, this.range[0]); at < first[rank + 1] && begin[at] < this.range[1]; at++) {
      const [cause, ofLayer] = tags[tag[at]];
      // Edges on whole pixels: a stretch of spans too short to see shows a fair sample of them.
      const from = Math.round(Math.max(this.left, this.x(begin[at])));
      const to = Math.round(Math.min(this.right, this.x(begin[at] + ticks[at])));
      const newLayer = ofLayer !== layer && layer !== null && !THIN;
      layer = ofLayer;
      if (to <= from) continue;
      context.fillStyle = cause < 0 ? colours.missing : this.fill(context, cause);
      context.fillRect(from, y, to - from, height);
      if (newLayer) {
        context.fillStyle = colours.text;
        context.fillRect(from, y, 1, height);
      }
      if (ROW >= 16 && cause >= 0 && to - from > 40) this.drawText(context, cause, from, to, y + height / 2);
    }
  }

  fill(context, cause) {
    if (!isWait(cause)) return colours.cause[cause];
    return hatch(context, colours['wait-ground'], colours.cause[cause]);
  }

  drawText(context, cause, from, to, middle) {
    const text = page.causes[cause][0];
    this.font(context, 11);
    const width = context.measureText(text).width;
    if (width > to - from - 8) return;
    if (isWait(cause)) {
      context.fillStyle = colours['wait-ground'];
      context.fillRect(from + 3, middle - 6, width + 4, 12);
    }
    context.fillStyle = isWait(cause) ? colours.text : inkOn(colours.cause[cause]);
    context.fillText(text, from + 5, middle + 0.5);
  }

  // Above the rows: where the first rank's layers begin, since others may be ahead or behind.
  drawLayers(context) {
    const { first, tags, tag, ticks, begin } = this.spans;
    this.font(context, 11);
    context.fillStyle = colours.soft;
    context.textAlign = 'right';
    context.fillText('layers of rank 0:', this.left - 1 + 96, 27);
    context.textAlign = 'left';
    let before = null,
      free = this.left + 104;
    for (let at = this.at(0, this.range[0]); at < first[1] && begin[at] < this.range[1]; at++) {
      const [cause, layer, batch, backward] = tags[tag[at]];
      const key = `${layer} ${batch} ${backward}`,
        x = Math.max(this.left, this.x(begin[at]));
      if (key === before || cause < 0 || this.x(begin[at] + ticks[at]) < this.left) continue;
      before = key;
      if (layer < 0) continue;
      const text = `${layer} ${page.layer_kinds[layer]}`;
      if (x < free - 8 && x > this.left + 1) continue;
      context.fillText(text, Math.max(x, free - 8) + 1, 27);
      free = Math.max(x, free - 8) + context.measureText(text).width + 16;
    }
  }

  drawOver(to = null) {
    const context = this.context(this.over);
    if (this.grabbed === null || to === null) return;
    context.fillStyle = colours.accent;
    context.globalAlpha = 0.25;
    context.fillRect(Math.min(this.grabbed, to), TOP, Math.abs(to - this.grabbed), rows.end - TOP);
  }

  release(event) {
    if (this.grabbed === null) return;
    const edges = [this.grabbed, this.place(event)[0]].sort((a, b) => a - b);
    this.grabbed = null;
    this.drawOver();
    if (edges[1] - edges[0] < 5) return;
    const [from, to] = edges.map((x) => this.value(Math.min(Math.max(x, this.left), this.right)));
    if (to - from >= 10) setState({ time: [from, to] });
  }

  point(event) {
    const [x, y] = this.place(event),
      rank = rankAt(y);
    if (this.grabbed !== null) this.drawOver(x);
    const found = rank === null || x < this.left || x > this.right ? null : this.at(rank, this.value(x));
    const { first, tags, tag, ticks, begin } = this.spans;
    if (found === null || found >= first[rank + 1] || this.value(x) > begin[found] + ticks[found])
      return showTip(null);
    const [cause, layer, batch, backward] = tags[tag[found]];
    if (cause < 0) return showTip([`rank ${rank}`, 'this page does not hold these spans'], event);
    const where =
      layer < 0
        ? 'outside layers'
        : `layer ${layer} (${page.layer_titles[layer]})`;
    const many = shownCase().micro_batches.length > 1 ? `, micro-batch ${batch}` : '';
    return showTip(
      [
        page.causes[cause][0],
        `${where}, ${backward ? 'backward' : 'forward'}${many}`,
        `from ${seconds(begin[found] * page.tick_s, 6)} for ${seconds(ticks[found] * page.tick_s)}`,
        `rank ${rank}, node ${Math.floor(rank / page.ranks_per_node)}`,
      ],
      event,
    );
  }
}
