// A picture with ranks as rows, nodes set apart, and a scale along x: two canvases, the upper for highlights.

const RANKS = page.ranks;
const ROW = RANKS <= 16 ? 22 : RANKS <= 32 ? 17 : RANKS <= 64 ? 12 : RANKS <= 128 ? 6 : 4;
const THIN = ROW < 10; // no room for a label a rank
const DOMAINS = RANKS / page.domain_ranks;
// Above the rows: a title, names of marks, labels of the scale.
const TOP = 58,
  BOTTOM = 24;

// The top of each rank's row, and the nodes' and domains' bands.
const rows = (() => {
  const top = [],
    nodes = [],
    domains = [];
  let y = TOP;
  for (let rank = 0; rank < RANKS; rank++) {
    if (DOMAINS > 1 && rank % page.domain_ranks === 0) {
      y += rank ? 10 : 0;
      domains.push({ y, name: `domain ${rank / page.domain_ranks}` });
      y += 18;
    } else if (rank && rank % page.ranks_per_node === 0) y += THIN ? 4 : 9;
    if (rank % page.ranks_per_node === 0)
      nodes.push({ first: rank, y, name: `node ${rank / page.ranks_per_node}` });
    top.push(y);
    y += ROW;
    if ((rank + 1) % page.ranks_per_node === 0) nodes[nodes.length - 1].end = y;
  }
  return { top, nodes, domains, height: y + BOTTOM, end: y };
})();

function rankAt(y) {
  for (let rank = 0; rank < RANKS; rank++) if (y >= rows.top[rank] && y < rows.top[rank] + ROW) return rank;
  return null;
}

// Round steps along an axis of about so many labels.
function niceStep(range, count) {
  const rough = range / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}

class Rows {
  constructor(host, label, rightGutter) {
    this.host = host;
    this.left = THIN ? 74 : 78;
    this.rightGutter = rightGutter;
    this.range = [0, 1];
    host.style.height = `${rows.height}px`;
    this.base = element('canvas', null, { tabindex: '0', role: 'img', 'aria-label': label });
    this.over = element('canvas', null, { 'aria-hidden': 'true' });
    host.append(this.base, this.over);
    this.base.addEventListener('pointermove', (event) => this.point(event));
    this.base.addEventListener('pointerleave', () => {
      showTip(null);
      this.leave();
    });
    new ResizeObserver(() => this.draw()).observe(host);
  }

  get width() {
    return this.host.clientWidth;
  }
  get right() {
    return this.width - this.rightGutter;
  }
  x(value) {
    return this.left + ((value - this.range[0]) / (this.range[1] - this.range[0])) * (this.right - this.left);
  }
  value(x) {
    return this.range[0] + ((x - this.left) / (this.right - this.left)) * (this.range[1] - this.range[0]);
  }

  // A canvas of the host's size, empty, in CSS pixels.
  context(canvas) {
    const ratio = Math.max(1, devicePixelRatio || 1);
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(rows.height * ratio);
    canvas.style.width = `${this.width}px`;
    canvas.style.height = `${rows.height}px`;
    const context = canvas.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.textBaseline = 'middle';
    return context;
  }

  font(context, size, weight = '') {
    context.font = `${weight} ${size}px system-ui, 'Segoe UI', 'Helvetica Neue', sans-serif`;
  }

  drawGround(context, title, format) {
    const { left, right } = this;
    this.font(context, 12);
    context.fillStyle = colours.node;
    for (const node of rows.nodes) context.fillRect(left, node.y - 1, right - left, node.end - node.y + 1);
    const span = this.range[1] - this.range[0];
    const step = niceStep(span, (right - left) / 110);
    context.textAlign = 'center';
    for (let n = Math.ceil(this.range[0] / step - 1e-9); n * step <= this.range[1] + 1e-9 * span; n++) {
      const x = Math.round(this.x(n * step)) + 0.5;
      context.strokeStyle = colours.grid;
      context.beginPath();
      context.moveTo(x, TOP - 3);
      context.lineTo(x, rows.end + 3);
      context.stroke();
      context.fillStyle = colours.soft;
      const text = format(n * step, step),
        half = context.measureText(text).width / 2;
      const at = Math.min(x, this.width - half - 1);
      context.fillText(text, at, TOP - 11);
      context.fillText(text, at, rows.end + 12);
    }
    context.textAlign = 'left';
    context.fillStyle = colours.text;
    context.fillText(title, left, 9);
    this.drawNames(context);
  }

  // Nodes in the left gutter, and ranks where there is room.
  drawNames(context) {
    let last = -Infinity;
    for (const node of rows.nodes) {
      const middle = (node.y + node.end) / 2;
      if (middle - last < 12) continue;
      last = middle;
      this.font(context, 12, '600');
      context.fillStyle = colours.text;
      context.fillText(node.name, 0, middle);
    }
    for (const domain of rows.domains) {
      this.font(context, 12, '600');
      context.fillStyle = colours.soft;
      context.fillText(domain.name, 0, domain.y + 8);
    }
    if (THIN) return;
    this.font(context, 11);
    context.textAlign = 'right';
    context.fillStyle = colours.soft;
    rows.top.forEach((y, rank) => context.fillText(String(rank), this.left - 7, y + ROW / 2));
    context.textAlign = 'left';
  }

  // A dashed line down all rows, its name above the rows.
  drawMark(context, value, text, line, textY = 27, textFrom = 0) {
    const x = Math.round(this.x(value)) + 0.5;
    context.strokeStyle = context.fillStyle = colours.mark;
    context.setLineDash(line);
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x, TOP - 4);
    context.lineTo(x, rows.end + 2);
    context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
    this.font(context, 12, '600');
    const width = context.measureText(text).width;
    context.fillText(text, Math.max(textFrom, Math.min(x - width / 2, this.width - width - 1)), textY);
  }

  place(event) {
    const box = this.base.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  leave() {}
}
