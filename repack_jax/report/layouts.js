// The two layouts of a micro-batch: what each rank computes in full layers, and holds in sparse ones.

const BRACKETS = 46; // the right gutter, for the groups
const THINNEST = 1.5; // blocks below this many pixels are drawn together

class Layout extends Rows {
  constructor(host, full) {
    super(host, '', BRACKETS);
    this.full = full;
    this.blocks = [];
    this.base.addEventListener('click', (event) => {
      const found = this.find(event);
      setState({ sample: found && found.id !== state.sample ? found.id : null });
    });
    this.base.addEventListener('keydown', (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const here = samplesHere(),
        at = here.indexOf(state.sample);
      if (here.length) setState({ sample: here[Math.min(here.length - 1, Math.max(0, at + step))] });
    });
  }

  // Of each rank: samples in stream order and where each ends along x. Ranks of a parent share theirs.
  load() {
    const batch = shownBatch();
    const cut = (flat) => {
      const samples = [],
        ends = [];
      for (let i = 0, end = 0; i < flat.length; i += 2) {
        samples.push(flat[i]);
        ends.push((end += flat[i + 1]));
      }
      return { samples, ends, total: ends.length ? ends[ends.length - 1] : 0 };
    };
    this.groups = this.full ? batch.parents : batch.children;
    if (this.full) {
      const parents = batch.work.map(cut);
      this.blocks = batch.parents.flatMap(([, size], at) => Array(size).fill(parents[at]));
    } else this.blocks = batch.held.map(cut);
    this.range = [0, this.full ? mostWork() * 1.04 || 1 : batch.capacity * 1.04];
    const totals = this.blocks.map((block) => block.total);
    this.mean = totals.reduce((sum, total) => sum + total, 0) / totals.length;
    this.most = Math.max(...totals);
    this.describe();
  }

  describe() {
    const sizes = new Map();
    for (const [, size, samples] of this.groups) if (samples) sizes.set(size, (sizes.get(size) ?? 0) + 1);
    const empty = this.groups.filter(([, , samples]) => !samples).length;
    const groups = [...sizes].sort((a, b) => b[0] - a[0]).map(([size, count]) => `${count} x SP${size}`);
    if (empty) groups.push(`${empty} empty`);
    const over = this.mean ? `, ${(this.most / this.mean).toFixed(2)} times the mean` : '';
    const facts = this.full
      ? `the busiest rank computes ${seconds(this.most)} of attention core a layer${over}`
      : `the fullest rank holds ${whole(this.most)} of ${plural(shownBatch().capacity, 'slot')}${over}`;
    const text = `${groups.join(', ')}; ${facts}`;
    byId(this.full ? 'full-facts' : 'sparse-facts').textContent = text;
    this.base.setAttribute('aria-label', `${this.full ? 'Full' : 'Sparse'} layers: ${text}`);
  }

  draw() {
    if (!this.blocks.length || this.width < 100) return;
    const context = this.context(this.base);
    if (this.full) this.drawGround(context, 'forward attention core of one full layer', (v) => seconds(v, 3));
    else this.drawGround(context, 'tokens that a rank holds', whole);
    this.blocks.forEach((block, rank) => this.drawRank(context, block, rank));
    if (this.full) this.drawMark(context, this.mean, `mean ${seconds(this.mean, 3)}`, [3, 4]);
    else this.drawMark(context, shownBatch().capacity, `capacity ${whole(shownBatch().capacity)}`, [6, 4]);
    this.groups.forEach((group) => this.drawBracket(context, group));
    this.drawOver();
  }

  drawRank(context, block, rank) {
    const y = rows.top[rank],
      height = ROW - (THIN ? 0.5 : 1);
    let begin = this.left,
      dust = null;
    const flush = () => {
      if (dust === null) return;
      context.fillStyle = THIN ? colours.dust : hatch(context, colours.dust, colours['dust-line']);
      context.fillRect(dust, y, begin - dust, height);
      dust = null;
    };
    block.samples.forEach((sample, at) => {
      const end = this.x(block.ends[at]);
      if (end - begin < THINNEST) dust ??= begin;
      else {
        flush();
        this.drawBlock(context, sample, begin, end, y, height);
        // Once a node is enough where ranks in a row work on the same sample.
        const again = rank % page.ranks_per_node && this.blocks[rank - 1].samples.includes(sample);
        if (!THIN && !again) this.drawText(context, sample, begin, end, y + height / 2);
      }
      begin = end;
    });
    flush();
  }

  drawBlock(context, sample, begin, end, y, height) {
    const gap = end - begin > 4 ? 1 : 0;
    context.fillStyle = colours.sample.get(shownBatch().ids[sample]);
    context.fillRect(begin, y, end - begin - gap, height);
  }

  drawText(context, sample, begin, end, middle) {
    const batch = shownBatch(),
      id = batch.ids[sample];
    this.font(context, 11);
    context.fillStyle = inkOn(colours.sample.get(id));
    const fits = (text) => context.measureText(text).width <= end - begin - 8;
    const text = [`${id}: ${whole(batch.lengths[sample])}`, String(id)].find(fits);
    if (text) context.fillText(text, begin + 4, middle + 0.5);
  }

  drawBracket(context, [first, size, samples]) {
    const top = rows.top[first] + 0.5,
      end = rows.top[first + size - 1] + ROW - 1.5,
      x = this.right + 4.5;
    context.strokeStyle = samples ? colours.text : colours.line;
    context.beginPath();
    context.moveTo(x - 3, top);
    context.lineTo(x, top);
    context.lineTo(x, end);
    context.lineTo(x - 3, end);
    context.stroke();
    if (end - top < 9) return;
    this.font(context, 11);
    context.fillStyle = samples ? colours.text : colours.soft;
    context.fillText(`SP${size}`, x + 4, (top + end) / 2 + 0.5);
  }

  // The marked sample in full colour, all else faded.
  drawOver() {
    const context = this.context(this.over),
      id = marked();
    const sample = id === null ? undefined : placeOf(shownBatch(), id);
    if (sample === undefined) return;
    context.fillStyle = colours.bg;
    context.globalAlpha = 0.72;
    context.fillRect(this.left, TOP - 4, this.right - this.left, rows.end - TOP + 6);
    context.globalAlpha = 1;
    this.blocks.forEach((block, rank) => {
      const at = block.samples.indexOf(sample);
      if (at < 0) return;
      const begin = at ? this.x(block.ends[at - 1]) : this.left,
        wide = Math.max(3, this.x(block.ends[at]) - begin);
      context.fillStyle = colours.sample.get(id);
      context.fillRect(begin, rows.top[rank], wide, ROW - (THIN ? 0 : 1));
      context.strokeStyle = colours.text;
      if (!THIN) context.strokeRect(begin + 0.5, rows.top[rank] + 0.5, wide - 1, ROW - 2);
    });
  }

  find(event) {
    const [x, y] = this.place(event),
      rank = rankAt(y);
    if (rank === null || x < this.left || x > this.right) return null;
    const block = this.blocks[rank],
      at = block.ends.findIndex((end) => this.x(end) > x);
    if (at < 0) return { rank, id: null };
    const batch = shownBatch(),
      sample = block.samples[at];
    const here = block.ends[at] - (block.ends[at - 1] ?? 0);
    return { rank, id: batch.ids[sample], length: batch.lengths[sample], here };
  }

  point(event) {
    const found = this.find(event);
    setHover(found ? found.id : null);
    if (!found) return showTip(null);
    const [first, size] = this.groups.find(([first, size]) => found.rank < first + size);
    const where = `rank ${found.rank}, node ${Math.floor(found.rank / page.ranks_per_node)}`;
    const group = `${this.full ? 'parent' : 'child'} SP${size} on ${rankSpan(first, size)}`;
    const total = this.blocks[found.rank].total;
    if (found.id === null) {
      const all = this.full ? `${seconds(total)} a layer in all` : `${plural(total, 'token')} in all`;
      return showTip([all, where, group], event);
    }
    const here = this.full
      ? `${seconds(found.here)} of this rank's ${seconds(total)} a layer`
      : `${plural(found.here, 'token')} here, of the rank's ${whole(total)}`;
    return showTip([`sample ${found.id}: ${plural(found.length, 'token')}`, here, where, group], event);
  }

  leave() {
    setHover(null);
  }
}

const rankSpan = (first, size) => (size === 1 ? `rank ${first}` : `ranks ${first} to ${first + size - 1}`);

// The longest row of all cases, so that their pictures compare.
let workOfAll = null;
function mostWork() {
  workOfAll ??= Math.max(
    0,
    ...page.cases
      .flatMap((one) => one.micro_batches)
      .map((batch) =>
        Math.max(
          0,
          ...batch.work.map((flat) => flat.reduce((sum, value, at) => sum + (at % 2 ? value : 0), 0)),
        ),
      ),
  );
  return workOfAll;
}

// Where a sample is, in words.
function sampleFacts(id) {
  const batch = shownBatch(),
    sample = placeOf(batch, id);
  if (sample === undefined) return `Sample ${id} is in another micro-batch of this case.`;
  const has = (flat) => flat.some((value, at) => at % 2 === 0 && value === sample);
  const parent = batch.parents[batch.work.findIndex(has)];
  const holders = batch.held.flatMap((flat, rank) => (has(flat) ? [rank] : []));
  const child = batch.children.find(([first, size]) => holders[0] >= first && holders[0] < first + size);
  return (
    `${plural(batch.lengths[sample], 'token')}. ` +
    `Full layers: SP${parent[1]} on ${rankSpan(parent[0], parent[1])}. ` +
    `Sparse layers: SP${child[1]}, held by ${rankSpan(holders[0], holders.length)}.`
  );
}
