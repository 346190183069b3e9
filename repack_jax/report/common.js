'use strict';
// Shared by all pictures: the data, the state, numbers as text, colours, and a canvas with ranks as rows.

const page = JSON.parse(document.getElementById('data').textContent);
const byId = (id) => document.getElementById(id);
addEventListener('error', (event) => {
  byId('error').hidden = false;
  byId('error').textContent = 'This page could not be drawn: ' + event.message;
});

// What is shown. `time` is 'period', 'step' or [start, end] in ticks; `sample` is a sample's id or null.
const state = { case: 0, mb: 0, time: 'period', sample: null, hover: null };
const shownCase = () => page.cases[state.case];
const shownBatch = () => shownCase().micro_batches[state.mb];
const marked = () => state.hover ?? state.sample;

// A sample's place in a micro-batch by its id in the batch; undefined where it is in another one.
const places = new Map();
function placeOf(batch, id) {
  if (!places.has(batch)) places.set(batch, new Map(batch.ids.map((of, at) => [of, at])));
  return places.get(batch).get(id);
}

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== null && text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// The micro-batch's samples, longest first.
const samplesHere = () => page.samples.filter((id) => placeOf(shownBatch(), id) !== undefined);

// --- numbers as text -------------------------------------------------------------------------------------

// `+ 0` since a rounded zero may be -0.
const whole = (number) => (Math.round(number) + 0).toLocaleString('en-US');
const plural = (number, noun) => `${whole(number)} ${noun}${number === 1 ? '' : 's'}`;
const percent = (part) => `${(100 * part).toFixed(1)}%`;

function figures(value, digits = 3) {
  if (!value) return '0';
  return Math.abs(value) >= 10 ** digits ? whole(value) : String(Number(value.toPrecision(digits)));
}

function scaled(value, units, digits) {
  const [size, unit] = units.find(([size]) => Math.abs(value) >= 0.9995 * size) ?? units[units.length - 1];
  return `${figures(value / size, digits)} ${unit}`;
}

const SECONDS = [
  [1, 's'],
  [1e-3, 'ms'],
  [1e-6, 'µs'],
  [1e-9, 'ns'],
];
const BYTES = [
  [1e12, 'TB'],
  [1e9, 'GB'],
  [1e6, 'MB'],
  [1e3, 'kB'],
  [1, 'B'],
];
const seconds = (value, digits = 4) => (value ? scaled(value, SECONDS, digits) : '0 s');
const bytes = (value) => (value ? scaled(value, BYTES, 3) : '0 B');

// --- colours ---------------------------------------------------------------------------------------------

const darkMode = matchMedia('(prefers-color-scheme: dark)');
let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue('--' + name).trim();
  colours = { cause: [], sample: new Map(), solo: new Map() };
  for (const name of [
    'bg',
    'text',
    'soft',
    'line',
    'grid',
    'accent',
    'mark',
    'node',
    'dust',
    'dust-line',
    'solo-dust',
    'solo-dust-line',
    'missing',
    'wait-ground',
    'waiting',
  ])
    colours[name] = read(name);
  for (const [cause, family] of page.causes) {
    // What one waits for gives the colour of the wait's hatching.
    const name = cause.replace('wait: ', '').replace(/'s?/, '').replaceAll(' ', '-');
    colours.cause.push(read(name) || read(family));
  }
  page.samples.forEach((id, place) => {
    const colour = sampleColour(place);
    colours.sample.set(id, colour);
    colours.solo.set(id, mixed(colour, colours.bg, darkMode.matches ? 0.4 : 0.5));
  });
}

// The longest samples get colours that one can tell apart, the others muted ones that part neighbours.
const DISTINCT = [
  '#4e79a7',
  '#f28e2b',
  '#59a14f',
  '#e15759',
  '#b07aa1',
  '#edc948',
  '#3aa6a0',
  '#ff9da7',
  '#9c755f',
  '#86bcf0',
  '#d37295',
  '#8cd17d',
  '#b6992d',
  '#6f63c4',
  '#c94f2f',
  '#2f7d5b',
];

function sampleColour(place) {
  if (place < DISTINCT.length) return DISTINCT[place];
  const hue = (place * 137.508) % 360;
  return darkMode.matches
    ? hslHex(hue, 0.2, 0.4 + 0.06 * (place % 3))
    : hslHex(hue, 0.26, 0.64 + 0.06 * (place % 3));
}

function hslHex(hue, saturation, light) {
  const part = (n) => {
    const k = (n + hue / 30) % 12;
    const value = light - saturation * Math.min(light, 1 - light) * Math.max(-1, Math.min(k - 3, 9 - k, 1));
    return Math.round(255 * value)
      .toString(16)
      .padStart(2, '0');
  };
  return '#' + part(0) + part(8) + part(4);
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// A colour with so much of another in it.
function mixed(hex, other, part) {
  const into = channels(other);
  return (
    '#' +
    channels(hex)
      .map((value, at) =>
        Math.round(value + part * (into[at] - value))
          .toString(16)
          .padStart(2, '0'),
      )
      .join('')
  );
}

// Black or white, whichever reads better on a colour.
function inkOn(hex) {
  const [r, g, b] = channels(hex).map((channel) => {
    const value = channel / 255;
    return value <= 0.04 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? '#101010' : '#ffffff';
}

const hatches = new Map();
function hatch(context, ground, line) {
  const key = ground + line;
  if (!hatches.has(key)) {
    const tile = document.createElement('canvas');
    tile.width = tile.height = 8;
    const paint = tile.getContext('2d');
    paint.fillStyle = ground;
    paint.fillRect(0, 0, 8, 8);
    paint.strokeStyle = line;
    paint.lineWidth = 1.6;
    paint.beginPath();
    for (const shift of [-8, 0, 8]) {
      paint.moveTo(shift, 8);
      paint.lineTo(shift + 8, 0);
    }
    paint.stroke();
    hatches.set(key, context.createPattern(tile, 'repeat'));
  }
  return hatches.get(key);
}

const isWait = (cause) => page.causes[cause][1] === 'waiting';
const cssOfCause = (cause) =>
  isWait(cause)
    ? `repeating-linear-gradient(135deg, ${colours['wait-ground']} 0 4px, ${colours.cause[cause]} 4px 5.5px)`
    : colours.cause[cause];

// --- the tip ---------------------------------------------------------------------------------------------

function showTip(lines, event) {
  const tip = byId('tip');
  tip.hidden = !lines;
  if (!lines) return;
  tip.textContent = lines.join('\n');
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - width - 10 : event.clientX + 14;
  const top = event.clientY + 14 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}
