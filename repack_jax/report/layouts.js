// The two layouts of a micro-batch: what each rank computes in the parents', and holds in the children's.

const BRACKETS = 46; // the right gutter, for the groups
const THINNEST = 1.5; // blocks below this many pixels are drawn together
const THINNEST_SOLO = 3; // the same for solo samples, of which there are many
const SOLO_GAP = 3; // pixels between what a group shares and a rank's solo samples

// Rows that share samples need no line between them where there is little room.
const rowHeight = (solo) => (THIN ? (solo ? ROW - 0.5 : ROW) : ROW - 1);

class Layout extends Rows {
  constructor(host, ofParents) {
    super(host, '', BRACKETS);
    this.ofParents = ofParents;
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

  // Of each rank: samples in the order in which they lie, where each ends along x, and how many of them come
  // before the solo ones.
  load() {
    const batch = shownBatch();
    this.groups = this.ofParents ? batch.parents : batch.children;
    const solo = this.ofParents ? batch.solo_work : batch.solo_held;
    const shared = this.ofParents
      ? batch.parents.flatMap(([, size], at) => Array(size).fill(batch.work[at]))
      : batch.held;
    this.blocks = shared.map((flat, rank) => {
      const samples = [],
        ends = [];
      let end = 0;
      for (const part of [flat, solo[rank]]) {
        for (let i = 0; i < part.length; i += 2) {
          samples.push(part[i]);
          ends.push((end += part[i + 1]));
        }
      }
      const before = flat.length / 2;
      return { samples, ends, total: end, shared: before, sharedEnd: before ? ends[before - 1] : 0 };
    });
    this.range = [0, 1.04 * (this.ofParents ? mostWork() || 1 : mostHeld())];
    const totals = this.blocks.map((block) => block.total);
    this.mean = totals.reduce((sum, total) => sum + total, 0) / totals.length;
    this.most = Math.max(...totals);
    this.describe();
  }

  describe() {
    const sizes = new Map();
    for (const [, size, samples] of this.groups) if (samples) sizes.set(size, (sizes.get(size) ?? 0) + 1);
    // An empty group of one rank is no group but a rank for solo samples.
    const solo = shownBatch().solo_held.filter((flat) => flat.length);
    const empty = this.groups.filter(([, size, samples]) => !samples && !(size === 1 && solo.length)).length;
    const groups = [...sizes].sort((a, b) => b[0] - a[0]).map(([size, count]) => `${count} x SP${size}`);
    if (empty) groups.push(`${empty} empty`);
    if (solo.length) {
      const samples = solo.reduce((sum, flat) => sum + flat.length / 2, 0);
      groups.push(`${plural(samples, 'solo sample')} on ${plural(solo.length, 'rank')}`);
    }
    const over = this.mean ? `, ${(this.most / this.mean).toFixed(2)} times the mean` : '';
    const facts = this.ofParents
      ? `the busiest rank computes ${seconds(this.most)} of attention core a layer${over}`
      : `the fullest rank holds ${whole(this.most)} of ${plural(shownBatch().capacity, 'slot')}${over}`;
    const text = `${groups.join(', ')}; ${facts}`;
    byId(this.ofParents ? 'parents-facts' : 'children-facts').textContent = text;
    const whose = this.ofParents ? "parents'" : "children's";
    this.base.setAttribute('aria-label', `Layers in the ${whose} layout: ${text}`);
  }

  draw() {
    if (!this.blocks.length || this.width < 100) return;
    const context = this.context(this.base);
    if (this.ofParents) this.drawGround(context, 'forward attention core of one such layer', (v) => seconds(v, 3));
    else this.drawGround(context, 'tokens that a rank holds', whole);
    this.blocks.forEach((block, rank) => this.drawRank(context, block, rank));
    if (this.ofParents) this.drawMark(context, this.mean, `mean ${seconds(this.mean, 3)}`, [3, 4]);
    else this.drawMark(context, shownBatch().capacity, `capacity ${whole(shownBatch().capacity)}`, [6, 4]);
    for (const group of this.groups) {
      if (group[1] === 1 && !group[2]) continue;
      const colour = group[2] ? colours.text : colours.line;
      this.drawBracket(context, group, colour);
      this.drawFrame(context, group, colour);
    }
    this.drawOver();
  }

  drawRank(context, block, rank) {
    const y = rows.top[rank];
    let begin = this.left,
      dust = null;
    const flush = (solo) => {
      if (dust === null) return;
      const [ground, line] = solo ? ['solo-dust', 'solo-dust-line'] : ['dust', 'dust-line'];
      context.fillStyle = THIN ? colours[ground] : hatch(context, colours[ground], colours[line]);
      context.fillRect(dust, y, Math.max(1, begin - dust), rowHeight(solo));
      dust = null;
    };
    block.samples.forEach((sample, at) => {
      const end = this.x(block.ends[at]),
        solo = at >= block.shared;
      if (at === block.shared) {
        flush(false);
        if (at) begin = Math.min(begin + SOLO_GAP, Math.max(begin, this.x(block.total) - 1));
      }
      if (end - begin < (solo ? THINNEST_SOLO : THINNEST)) dust ??= begin;
      else {
        flush(solo);
        this.drawBlock(context, sample, begin, end, y, solo);
        // Once a node is enough where ranks in a row work on the same sample.
        const again = rank % page.ranks_per_node && this.blocks[rank - 1].samples.includes(sample);
        if (!THIN && !again) this.drawText(context, sample, begin, end, y + (ROW - 1) / 2, solo);
      }
      begin = Math.max(begin, end);
    });
    flush(block.samples.length > block.shared);
  }

  drawBlock(context, sample, begin, end, y, solo) {
    const gap = end - begin > 4 ? 1 : 0,
      id = shownBatch().ids[sample];
    context.fillStyle = solo ? colours.solo.get(id) : colours.sample.get(id);
    context.fillRect(begin, y, end - begin - gap, rowHeight(solo));
  }

  // Around what the group shares. Its ranks' shares differ by a token at most.
  drawFrame(context, [first, size, samples], colour) {
    if (!samples) return;
    const top = rows.top[first] - 0.5,
      end = rows.top[first + size - 1] + ROW - (THIN ? 0 : 0.5);
    const shares = this.blocks.slice(first, first + size).map((block) => block.sharedEnd);
    const right = Math.round(this.x(Math.max(...shares))) + 0.5;
    context.strokeStyle = colour;
    context.strokeRect(this.left - 0.5, top, right - this.left + 0.5, end - top);
  }

  drawText(context, sample, begin, end, middle, solo) {
    const batch = shownBatch(),
      id = batch.ids[sample];
    this.font(context, 11);
    context.fillStyle = inkOn((solo ? colours.solo : colours.sample).get(id));
    const fits = (text) => context.measureText(text).width <= end - begin - 8;
    // Numbers alone of hundreds of solo samples would be noise.
    const text = [`${id}: ${whole(batch.lengths[sample])}`, ...(solo ? [] : [String(id)])].find(fits);
    if (text) context.fillText(text, begin + 4, middle + 0.5);
  }

  drawBracket(context, [first, size, samples], colour) {
    const top = rows.top[first] + 0.5,
      end = rows.top[first + size - 1] + ROW - 1.5,
      x = this.right + 4.5;
    context.strokeStyle = colour;
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

  // The marked sample in full colour and the group that exchanges it, all else faded.
  drawOver() {
    const context = this.context(this.over),
      id = marked();
    const sample = id === null ? undefined : placeOf(shownBatch(), id);
    if (sample === undefined) return;
    context.fillStyle = colours.bg;
    context.globalAlpha = 0.72;
    context.fillRect(this.left, TOP - 4, this.right - this.left, rows.end - TOP + 6);
    context.globalAlpha = 1;
    let holder = null;
    this.blocks.forEach((block, rank) => {
      const at = block.samples.indexOf(sample);
      if (at < 0) return;
      if (at < block.shared) holder ??= rank;
      const begin = at ? this.x(block.ends[at - 1]) : this.left,
        wide = Math.max(3, this.x(block.ends[at]) - begin);
      context.fillStyle = colours.sample.get(id);
      context.fillRect(begin, rows.top[rank], wide, ROW - (THIN ? 0 : 1));
      context.strokeStyle = colours.text;
      if (!THIN) context.strokeRect(begin + 0.5, rows.top[rank] + 0.5, wide - 1, ROW - 2);
    });
    if (holder === null) return;
    const group = this.groupOf(holder);
    context.lineWidth = 2.5;
    if (group[1] > 1) this.drawFrame(context, group, colours.accent);
    this.drawBracket(context, group, colours.accent);
  }

  groupOf(rank) {
    return this.groups.find(([first, size]) => rank < first + size);
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
    return { rank, id: batch.ids[sample], length: batch.lengths[sample], here, solo: at >= block.shared };
  }

  point(event) {
    const found = this.find(event);
    setHover(found ? found.id : null);
    if (!found) return showTip(null);
    const [first, size, samples] = this.groupOf(found.rank);
    const where = `rank ${found.rank}, node ${Math.floor(found.rank / page.ranks_per_node)}`;
    const group = samples
      ? `${this.ofParents ? 'parent' : 'child'} SP${size} on ${rankSpan(first, size)}`
      : 'no shared samples';
    const total = this.blocks[found.rank].total;
    if (found.id === null) {
      const all = this.ofParents ? `${seconds(total)} a layer in all` : `${plural(total, 'token')} in all`;
      return showTip([all, where, group], event);
    }
    const here = this.ofParents
      ? `${seconds(found.here)} of this rank's ${seconds(total)} a layer`
      : `${plural(found.here, 'token')} here, of the rank's ${whole(total)}`;
    const name = `sample ${found.id}: ${plural(found.length, 'token')}`;
    if (found.solo) return showTip([name, here, `solo on ${where}`, exchangeText(found.length, 1)], event);
    const exchange = this.ofParents
      ? exchangeText(found.length, size)
      : childExchangeText(shownBatch(), found.length, size);
    showTip([name, here, where, group, exchange], event);
  }

  leave() {
    setHover(null);
  }
}

const rankSpan = (first, size) => (size === 1 ? `rank ${first}` : `ranks ${first} to ${first + size - 1}`);

// What a sample's tokens send in one layer of a group of so many ranks.
function exchangeText(tokens, size) {
  const [inside, across] = (page.exchange[size] ?? [0, 0]).map((each) => each * tokens);
  if (!inside && !across) return 'takes part in no exchange';
  const far = across ? `, ${bytes(across)} of it to other nodes` : ', inside its node';
  return `exchanges ${bytes(inside + across)} in a layer's forward pass${far}`;
}

// The same of a layer in the children's layout, which may run by halo.
function childExchangeText(batch, tokens, size) {
  if (!batch.halo) return exchangeText(tokens, size);
  const [most, ranks] = batch.halo;
  if (!ranks || size === 1) return 'by halo, of which it needs none';
  const from = ranks === 1 ? 'the rank before' : `the ${plural(ranks, 'rank')} before`;
  return `by halo: each rank gets keys and values of up to ${plural(most, 'token')} from ${from}`;
}

// The longest rows of all cases, so that their pictures compare.
const allBatches = page.cases.flatMap((one) => one.micro_batches);
const mostHeld = () => Math.max(...allBatches.map((batch) => batch.capacity));
let workOfAll = null;
function mostWork() {
  const sum = (flat) => flat.reduce((total, value, at) => total + (at % 2 ? value : 0), 0);
  const most = (batch) => {
    const solo = batch.solo_work.map(sum);
    return Math.max(
      ...batch.parents.map(([first, size], at) => {
        return sum(batch.work[at]) + Math.max(...solo.slice(first, first + size));
      }),
    );
  };
  workOfAll ??= Math.max(...allBatches.map(most));
  return workOfAll;
}

// Where a sample is, in words.
function sampleFacts(id) {
  const batch = shownBatch(),
    sample = placeOf(batch, id);
  if (sample === undefined) return `Sample ${id} is in another micro-batch of this case.`;
  const has = (flat) => flat.some((value, at) => at % 2 === 0 && value === sample);
  const alone = batch.solo_held.findIndex(has);
  if (alone >= 0) {
    const tokens = batch.lengths[sample];
    return (
      `${plural(tokens, 'token')}. Solo on rank ${alone}, whole and in all layers; ` +
      `${exchangeText(tokens, 1)}.`
    );
  }
  const parent = batch.parents[batch.work.findIndex(has)];
  const holders = batch.held.flatMap((flat, rank) => (has(flat) ? [rank] : []));
  const child = batch.children.find(([first, size]) => holders[0] >= first && holders[0] < first + size);
  const exchange = ([, size]) => exchangeText(batch.lengths[sample], size);
  const ofChild = childExchangeText(batch, batch.lengths[sample], child[1]);
  return (
    `${plural(batch.lengths[sample], 'token')}. ` +
    `In the parents' layout: SP${parent[1]} on ${rankSpan(parent[0], parent[1])}, ${exchange(parent)}. ` +
    `In the children's: SP${child[1]}, held by ${rankSpan(holders[0], holders.length)}, ${ofChild}.`
  );
}
