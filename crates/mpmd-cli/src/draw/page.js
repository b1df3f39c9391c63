"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
document.documentElement.classList.add("js");

// The data to draw: one object per row, with bars as columns.
const MOVE = 5, OTHER = 4;
const LEAST_PITCH = 10, LEAST_WITH_MOVES = 20, MOST_PITCH = 108, TALL = 38, NARROW = 4;
const rows = data.rows.map((row, index) => {
  const chunk = new Map(row.stages.map((stage, i) => [stage, i]));
  const columns = (c) => {
    const n = c.start ? c.start.length : 0;
    return { n, ...c, kind: Uint8Array.from(c.kind || []), start: Float64Array.from(c.start || []), end: Float64Array.from(c.end || []),
      chunk: Uint16Array.from({ length: n }, (_, i) => (c.stage && chunk.get(c.stage[i])) || 0) };
  };
  const bars = columns(row.bars), moves = columns(row.moves);
  // Each move takes the first free lane. If none is free, it shares the last lane.
  const free = [0, 0, 0];
  moves.lane = Uint8Array.from({ length: moves.n }, (_, i) => {
    let lane = free.findIndex((until) => until <= moves.start[i]);
    if (lane < 0) lane = 2;
    free[lane] = Math.max(free[lane], moves.end[i]);
    return lane;
  });
  moves.lanes = moves.lane.reduce((most, lane) => Math.max(most, lane + 1), 0);
  // The longest move limits the search for moves that began before the visible range.
  moves.longest = moves.start.reduce((most, start, i) => Math.max(most, moves.end[i] - start), 0);
  return { ...row, index, bars, moves };
});
const end = data.end > 0 ? data.end : 1;
const hasMemory = rows.some((row) => row.memory.length > 0);
const hasMoves = rows.some((row) => row.moves.n > 0);
const mostMemory = rows.reduce((most, row) => Math.max(most, row.peak || 0), 0);
const shortest = rows.reduce((least, { bars }) => {
  for (let i = 0; i < bars.n; i++) { const length = bars.end[i] - bars.start[i]; if (length > 0 && length < least) least = length; }
  return least;
}, end);
// The time that a rank is busy with one microbatch. Stretches of this length look alike.
const cycle = (() => {
  const seen = new Set();
  let busy = 0;
  for (const { bars } of rows) for (let i = 0; i < bars.n; i++) { busy += bars.end[i] - bars.start[i]; if (bars.microbatch && bars.microbatch[i] != null) seen.add(bars.microbatch[i]); }
  return seen.size > 1 ? busy / rows.length / seen.size : shortest;
})();
const longestNumber = rows.reduce((most, { bars }) => Math.max(most, ...(bars.microbatch || []).slice(-1).map((it) => String(it == null ? "" : it).length)), 1);
const LETTERS = ["F", "B", "I", "W", "", ""];
const byMicrobatch = new Map();
for (const row of rows) for (let i = 0; i < row.bars.n; i++) {
  const microbatch = row.bars.microbatch && row.bars.microbatch[i];
  if (microbatch == null) continue;
  if (!byMicrobatch.has(microbatch)) byMicrobatch.set(microbatch, []);
  byMicrobatch.get(microbatch).push([row, i]);
}

// Numbers for people, formatted as in the head of the page.
const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "\u00b5s"], [1e-9, "ns"]];
const timeUnit = (largest) => data.unit === "s" ? SECONDS.find(([one]) => largest >= one) || SECONDS[3]
  : [1, data.unit === "unit" || data.unit === "" ? "units" : data.unit];
const number = (value, digits = 4) => {
  const before = value === 0 ? 1 : Math.floor(Math.log10(Math.abs(value))) + 1;
  const text = value.toFixed(Math.min(6, Math.max(0, digits - before)));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
};
const time = (value) => {
  const [one, name] = timeUnit(Math.abs(value)), text = number(value / one);
  return text === "1" && name === "units" ? "1 unit" : text + " " + name;
};
// A point in time needs more digits than a length.
const point = (value) => { const [one, name] = timeUnit(end); const text = number(value / one, 6); return text === "1" && name === "units" ? "1 unit" : text + " " + name; };
const percent = (share) => (100 * share).toFixed(1) + " %";
const bytes = (amount) => {
  let unit = "B";
  if (amount < 1024) return Math.round(amount) + " B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB", "PiB"]) { if (amount < 1023.95) break; amount /= 1024; unit = larger; }
  return amount.toFixed(1) + " " + unit;
};
const memory = (amount) => data.memoryUnit === "B" ? bytes(amount) : number(amount);
const memoryWithUnit = (amount) => data.memoryUnit === "B" ? bytes(amount) : number(amount) + " " + (amount === 1 ? data.memoryUnit.replace(/s$/, "") : data.memoryUnit);
const text = (numbers, i) => numbers && numbers[i] != null ? data.texts[numbers[i]] : "";

// The layout. All lengths are in CSS pixels.
const scroll = $("scroll"), rowsBox = $("rows"), tip = $("tip");
const canvases = { bars: $("bars"), marked: $("marked"), overview: document.querySelector("#overview canvas") };
// Opens at one step if there are several, or if the timeline has other parts.
const opened = data.opened[1] > data.opened[0] ? { from: data.opened[0], until: data.opened[1] } : { from: 0, until: end };
const isPart = opened.from > 0 || opened.until < end;
let view = opened;
let place = null;
let shown = { moves: false, planned: true, memory: true };
let summed = false, chosen = null, pending = 0, theme = "light", style = null;

function size(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; canvas.style.width = width + "px"; canvas.style.height = height + "px"; }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function measure(texts, font) {
  const context = canvases.bars.getContext("2d");
  context.font = font;
  return texts.reduce((most, it) => Math.max(most, context.measureText(it).width), 0);
}

function arrange() {
  const family = getComputedStyle(document.body).fontFamily;
  const chart = $("chart");
  // The height for the rows: the rest of the window. More rows are reached by scrolling.
  const rest = Math.max(200, window.innerHeight - chart.getBoundingClientRect().top - window.scrollY - 34 - (isPart ? 15 : 0) - 20 - 18 - 10);
  const n = Math.max(1, rows.length);
  const pitch = Math.min(MOST_PITCH, Math.max(shown.moves ? LEAST_WITH_MOVES : LEAST_PITCH, Math.floor(10 * rest / n) / 10));
  const letters = Math.min(13, Math.max(9.5, pitch - 1));
  const font = letters + "px " + family;
  // If the names are numbered and the rows are low, only the numbers are shown, in a larger font.
  const short = data.prefix !== "" && pitch < 16;
  const names = rows.map((row) => short ? row.name.slice(data.prefix.length) : row.name);
  const corner = short ? data.prefix.trim() : "";
  const left = Math.min(190, Math.max(28, Math.ceil(Math.max(measure(names, font), measure([corner, "all"], "11px " + family))) + 3));
  const idle = Math.ceil(measure(["100.0 %"], font)) + 10;
  const peaks = hasMemory ? Math.ceil(measure(rows.map((row) => row.peak == null ? "" : memory(row.peak)).concat("peak"), font)) + 8 : 0;
  const tall = pitch >= TALL && hasMemory;
  const spark = hasMemory && !tall ? 64 : 0;
  rowsBox.style.height = n * pitch + "px";
  scroll.style.height = Math.min(n * pitch, rest) + "px";
  const width = scroll.clientWidth, height = scroll.clientHeight;
  place = { pitch, letters, family, left: left + 6, width: Math.max(40, width - left - 6 - idle - peaks - spark - (spark ? 8 : 2)), idle, peaks, spark, tall, full: width, height, names };
  const right = place.left + place.width;
  place.sparkLeft = right + idle + 4;
  // Names stand beside the bars, not beside the strips below them.
  const beside = pitch < 24 ? pitch - 1 : parts().bars;
  rowsBox.replaceChildren(...rows.map((row, i) => {
    const line = document.createElement("div");
    const span = (kind, value, css) => {
      const it = document.createElement("span");
      it.className = kind; it.textContent = value;
      Object.assign(it.style, { height: beside + "px", lineHeight: beside + "px", fontSize: letters + "px" }, css);
      line.append(it);
    };
    Object.assign(line.style, { top: i * pitch + "px", height: pitch + "px" });
    line.dataset.row = i;
    span("name", names[i], { width: left + "px" });
    span("idle", percent(idleShare(row)), { left: right + "px", width: idle + "px" });
    if (row.peak != null) span("peak", memory(row.peak), { left: right + idle + spark + "px", width: width - right - idle - spark + "px" });
    return line;
  }));
  $("corner").textContent = corner;
  for (const it of document.querySelectorAll(".corner")) it.style.width = left + "px";
  Object.assign($("idle-head").style, { left: right + "px", width: idle + "px" });
  Object.assign($("memory-head").style, { left: right + idle + spark + "px", width: Math.max(0, width - right - idle - spark) + "px" });
  $("memory-head").hidden = !hasMemory;
  $("steps").hidden = !isPart;
  const moved = document.querySelector("#legend [data-kind='" + MOVE + "']");
  if (moved) moved.parentElement.hidden = !shown.moves;
  place.shares = shares(0, end, Math.max(8, Math.floor(place.width / 3)));
  place.overview = null;
  draw();
}

function idleShare(row) {
  const [from, until] = data.stepped;
  let busy = 0;
  for (let i = 0; i < row.bars.n; i++) busy += Math.max(0, Math.min(row.bars.end[i], until) - Math.max(row.bars.start[i], from));
  return until > from ? Math.max(0, 1 - busy / (until - from)) : 0;
}

const x = (at) => place.left + (at - view.from) / (view.until - view.from) * place.width;
const timeAt = (px) => view.from + (px - place.left) / place.width * (view.until - view.from);

// Returns the index of the first bar that ends after `at`. Bars of a row are in order and do not
// overlap.
function firstAfter(ends, at) {
  let low = 0, high = ends.length;
  while (low < high) { const middle = (low + high) >> 1; if (ends[middle] <= at) low = middle + 1; else high = middle; }
  return low;
}

// Sums the shares of all rows, by part of the time and by kind, for the overview.
function shares(from, until, parts) {
  const kinds = data.kinds.length, sums = new Float64Array(parts * kinds), part = (until - from) / parts;
  for (const { bars } of rows) for (let i = 0; i < bars.n; i++) {
    let p = Math.max(0, Math.floor((bars.start[i] - from) / part));
    for (; p < parts && from + p * part < bars.end[i]; p++) {
      const within = Math.min(bars.end[i], from + (p + 1) * part) - Math.max(bars.start[i], from + p * part);
      if (within > 0) sums[p * kinds + bars.kind[i]] += within / part / rows.length;
    }
  }
  return sums;
}

function dark() {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
}

function readStyle() {
  const computed = getComputedStyle(document.documentElement);
  theme = dark() ? "dark" : "light";
  style = {};
  if (place) place.overview = null;
  for (const name of ["ground", "plot", "text", "muted", "line", "stripe", "memory", "curve", "planned", "mark", "edge", "accent"]) style[name] = computed.getPropertyValue("--" + name).trim();
  // Diagonal lines, as in the legend.
  const ratio = window.devicePixelRatio || 1, side = Math.round(6 * ratio), tile = document.createElement("canvas");
  tile.width = tile.height = side;
  const context = tile.getContext("2d");
  context.strokeStyle = style.stripe; context.lineWidth = 1.5 * ratio; context.lineCap = "square";
  for (const shift of [-side, 0, side]) { context.beginPath(); context.moveTo(shift, side); context.lineTo(shift + side, 0); context.stroke(); }
  style.idle = canvases.bars.getContext("2d").createPattern(tile, "repeat");
  style.idle.setTransform(new DOMMatrix().scale(1 / ratio));
  for (const it of document.querySelectorAll("#legend i[data-kind]")) it.style.background = colour(+it.dataset.kind, +it.dataset.chunk);
}

const colour = (kind, chunk) => (data.colours[theme][kind][chunk] || data.colours[theme][kind][0])[0];
const ink = (kind, chunk) => (data.colours[theme][kind][chunk] || data.colours[theme][kind][0])[1];

// Returns the heights of a row's parts, from top to bottom: bars, moves, the plan, memory.
function parts() {
  const { pitch, tall } = place;
  const space = pitch >= 24 ? 5 : pitch >= 14 ? 2 : 1;
  const strip = tall && shown.memory ? Math.floor(pitch * 0.3) : 0;
  const planned = shown.planned && !summed && $("show-planned") ? (pitch >= 24 ? 4 : 2) : 0;
  const moves = shown.moves ? Math.max(3, Math.min(15, Math.floor((pitch - strip) * 0.3))) : 0;
  const bars = pitch - space - strip - planned - moves;
  return { bars, moves, planned, strip, movesTop: bars + 1, plannedTop: bars + moves + 1, stripTop: pitch - space + 1 - strip };
}

function draw() {
  if (pending) return;
  pending = requestAnimationFrame(() => { pending = 0; drawNow(); });
}

function drawNow() {
  const { left, width, pitch, full, height, family } = place;
  const context = size(canvases.bars, full, height);
  const top = scroll.scrollTop, first = Math.max(0, Math.floor(top / pitch)), last = Math.min(rows.length, Math.ceil((top + height) / pitch));
  const span = view.until - view.from;
  let count = 0, busy = 0;
  for (const { bars } of rows.slice(first, last)) {
    const from = firstAfter(bars.end, view.from);
    for (let i = from; i < bars.n && bars.start[i] < view.until; i++) { count++; busy += bars.end[i] - bars.start[i]; }
  }
  const mean = count ? busy / count / span * width : Infinity;
  summed = mean < NARROW;
  const part = parts(), tallest = Math.min(12, part.bars - 1.5);
  // Letters of passes stand before the numbers if most bars have room for both. W is the widest
  // letter.
  const both = (mean - 5) / (0.66 * longestNumber + 1.15), lettered = both >= Math.min(tallest, 9.5);
  const letters = Math.min(tallest, lettered ? both : Math.max(8.5, (mean - 3) / (0.62 * longestNumber)));
  context.save();
  context.beginPath(); context.rect(left, 0, width, height); context.clip();
  const until = Math.min(left + width, x(end));
  for (let r = first; r < last; r++) {
    context.fillStyle = style.plot; context.fillRect(left, r * pitch - top, width, part.bars);
    context.fillStyle = style.idle; context.fillRect(x(0), r * pitch - top, until - x(0), part.bars);
  }
  const ticks = axis();
  steps();
  context.fillStyle = style.line;
  for (const at of ticks) context.fillRect(Math.round(x(at)), 0, 1, height);
  for (let r = first; r < last; r++) {
    const y = r * pitch - top;
    if (summed) drawSums(context, rows[r], y, part.bars);
    else drawBars(context, rows[r], y, part, family, letters, lettered);
    if (shown.moves) drawMoves(context, rows[r], y + part.movesTop, part.moves);
    if (part.strip && rows[r].memory.length) drawMemory(context, rows[r], x, view.from, view.until, left, left + width, y + part.stripTop, part.strip - 1);
  }
  if (shown.moves) drawArrows(context, part, first, last, top);
  context.setLineDash([4, 3]); context.strokeStyle = style.mark; context.globalAlpha = 0.6;
  for (const at of new Set(data.marks.map(([at]) => at).concat(data.stepped[1] < end ? [data.stepped[1]] : []))) { context.beginPath(); context.moveTo(Math.round(x(at)) + 0.5, 0); context.lineTo(Math.round(x(at)) + 0.5, height); context.stroke(); }
  context.restore();
  if (place.spark && shown.memory) for (let r = first; r < last; r++) {
    const from = place.sparkLeft, to = from + place.spark - 6;
    if (rows[r].memory.length) drawMemory(context, rows[r], (at) => from + at / end * (to - from), 0, end, from, to, r * pitch - top + 0.5, pitch - Math.min(4, pitch * 0.2), true);
  }
  drawOverview();
  drawMarked();
  const chart = $("chart");
  chart.dataset.from = view.from; chart.dataset.until = view.until; chart.dataset.mode = summed ? "sums" : "bars"; chart.dataset.drawn = count;
  $("note").textContent = summed ? "Single passes are too narrow here: the heights of the colours are their shares of the time. Zoom in to see each; point at any place to ask."
    : isPart && view.from === opened.from && view.until === opened.until ? "This is one step, of median length. Reset (0) shows all of it." : "";
  $("out").disabled = $("reset").disabled = view.from <= 0 && view.until >= end;
}

function axis() {
  const span = view.until - view.from, [one, unit] = timeUnit(Math.max(Math.abs(view.from), Math.abs(view.until)));
  const room = Math.max(2, Math.floor(place.width / 90)), least = span / one / room;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least * 0.999) || 10 * power;
  const decimals = Math.min(12, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const ticks = [], labels = [];
  for (let i = Math.ceil(view.from / one / step - 1e-6); i * step * one <= view.until + span * 1e-9; i++) {
    const at = i * step * one, px = x(at);
    ticks.push(at);
    const it = document.createElement("span");
    it.textContent = (i * step).toFixed(decimals) + " " + unit;
    it.style.left = px + "px";
    // A label that would reach over the end of the axis is left out, but its line is drawn.
    const half = it.textContent.length * 3.4;
    if (px < place.left - 1 || px + half > place.left + place.width + 8) continue;
    // A label at the start stands right of its line, so that it does not cover the names.
    if (px - half < place.left) it.style.transform = "none";
    labels.push(it);
  }
  $("ticks").replaceChildren(...labels);
  return ticks;
}

// Shows the names of marks. A step that began before the visible range has its name at the left
// edge.
function steps() {
  const labels = [], edge = place.left + place.width;
  data.marks.forEach(([at, name, until], i) => {
    const from = Math.max(place.left, x(at)), to = Math.min(edge, x(i + 1 < data.marks.length ? data.marks[i + 1][0] : until ?? end));
    if (!name || to - from < name.length * 6.6 + 8) return;
    const it = document.createElement("span");
    it.textContent = name;
    it.style.left = from + "px";
    labels.push(it);
  });
  $("steps").replaceChildren(...labels);
}

function drawBars(context, row, y, part, family, letters, lettered) {
  const { bars } = row, from = firstAfter(bars.end, view.from), width = place.width;
  const labelled = letters >= 7.5, labels = [];
  for (let i = from; i < bars.n && bars.start[i] < view.until; i++) {
    const begin = Math.max(x(bars.start[i]), place.left - 2), close = Math.min(x(bars.end[i]), place.left + width + 2), w = close - begin;
    context.fillStyle = colour(bars.kind[i], bars.chunk[i]);
    context.fillRect(begin, y, w > 5 ? w - 1 : Math.max(w, 0.7), part.bars);
    if (labelled && w >= 9) labels.push([i, begin, w]);
    if (part.planned && bars.plannedStart && bars.plannedStart[i] != null) {
      const px = x(bars.plannedStart[i]), pw = x(bars.plannedEnd[i]) - px;
      context.fillStyle = style.planned;
      context.fillRect(px, y + part.plannedTop, pw > 5 ? pw - 1 : pw, part.planned > 2 ? 2 : 1.5);
    }
  }
  context.textAlign = "center"; context.textBaseline = "middle";
  context.font = (part.bars >= 16 ? "600 " : "") + letters + "px " + family;
  for (const [i, begin, w] of labels) {
    const microbatch = bars.microbatch && bars.microbatch[i], name = text(bars.name, i);
    const fits = Math.floor((w - 3) / (letters * 0.62));
    let label = microbatch == null ? name : String(microbatch);
    if (microbatch != null && lettered && label.length + 2 <= (w - 3) / (letters * 0.6)) label = LETTERS[bars.kind[i]] + label;
    if (label.length > fits) { if (microbatch != null || fits < 4) continue; label = label.slice(0, fits - 1) + "\u2026"; }
    context.fillStyle = ink(bars.kind[i], bars.chunk[i]);
    context.fillText(label, begin + (w - 1) / 2, y + part.bars / 2 + 0.5);
  }
}

// Draws sums over stretches of time. They begin at multiples of their length, so that they stay the
// same when the view moves.
function drawSums(context, row, y, height) {
  const { bars } = row, least = (view.until - view.from) / place.width * 6;
  const even = (one) => one * Math.max(1, Math.ceil(least / one)), part = even(cycle) <= 3 * least ? even(cycle) : even(shortest);
  let i = firstAfter(bars.end, Math.floor(view.from / part) * part);
  const chunks = data.chunks, sums = new Float64Array(data.kinds.length * chunks);
  for (let p = Math.floor(view.from / part); p * part < view.until && i < bars.n; p++) {
    const from = p * part, until = from + part;
    sums.fill(0);
    let some = false;
    while (i < bars.n && bars.start[i] < until) {
      const within = Math.min(bars.end[i], until) - Math.max(bars.start[i], from);
      if (within > 0) { sums[bars.kind[i] * chunks + bars.chunk[i]] += within / part; some = true; }
      if (bars.end[i] > until) break;
      i++;
    }
    if (!some) continue;
    const begin = Math.round(x(from)), close = Math.round(x(until));
    // In the last stretch, shares refer to the time before the end only.
    const scale = until > end ? part / (end - from) : 1, stop = until > end ? Math.round(x(end)) : close;
    let at = y;
    for (let k = 0; k < data.kinds.length; k++) {
      let sum = 0, chunk = 0;
      for (let c = 0; c < chunks; c++) { sum += sums[k * chunks + c]; chunk += c * sums[k * chunks + c]; }
      if (sum <= 0) continue;
      // The mean shade of several chunks.
      context.fillStyle = between(k, chunk / sum);
      context.fillRect(begin, at, stop - begin, sum * scale * height);
      at += sum * scale * height;
    }
  }
}

// Returns the shade of a chunk, also between two chunks.
function between(kind, chunk) {
  const low = Math.floor(chunk), share = Math.round(4 * (chunk - low)) / 4;
  if (share === 0) return colour(kind, low);
  const parts = (shade) => [1, 3, 5].map((i) => parseInt(shade.slice(i, i + 2), 16));
  const [a, b] = [parts(colour(kind, low)), parts(colour(kind, low + 1))];
  return "rgb(" + a.map((part, i) => Math.round(part + share * (b[i] - part))).join(" ") + ")";
}

function eachMove(row, each) {
  const { moves } = row;
  let low = 0, high = moves.n;
  const after = view.from - moves.longest;
  while (low < high) { const middle = (low + high) >> 1; if (moves.start[middle] < after) low = middle + 1; else high = middle; }
  for (let i = low; i < moves.n && moves.start[i] < view.until; i++) if (moves.end[i] >= view.from) each(i);
}

function lane(row, i, y, height) {
  const lanes = Math.max(1, row.moves.lanes), h = height / lanes;
  return [y + row.moves.lane[i] * h, Math.max(1, h - (h > 3 ? 1 : 0.4))];
}

function drawMoves(context, row, y, height) {
  context.fillStyle = colour(MOVE, 0);
  eachMove(row, (i) => {
    const [top, h] = lane(row, i, y, height);
    context.fillRect(x(row.moves.start[i]), top, Math.max(1, x(row.moves.end[i]) - x(row.moves.start[i])), h);
  });
}

// Draws an arrow from each move's source row to its destination, unless there are too many.
function drawArrows(context, part, first, last, top) {
  const found = [];
  for (const row of rows.slice(first, last)) {
    if (!row.moves.to) continue;
    eachMove(row, (i) => { if (row.moves.to[i] != null && rows[row.moves.to[i]]) found.push([row, i]); });
    if (found.length > 600) return;
  }
  context.save();
  context.globalAlpha = found.length > 150 ? 0.35 : 0.7;
  for (const [row, i] of found) arrow(context, row, i, part, top, colour(MOVE, 0), 1);
  context.restore();
}

function arrow(context, row, i, part, top, stroke, line) {
  const { pitch } = place, to = row.moves.to[i], down = to > row.index;
  const [y, h] = lane(row, i, row.index * pitch - top + part.movesTop, part.moves || 3);
  const tall = to * pitch - top + (down ? 0 : part.bars), begin = [x(row.moves.start[i]), y + h / 2], close = [x(row.moves.end[i]), tall];
  context.strokeStyle = context.fillStyle = stroke; context.lineWidth = line;
  context.beginPath(); context.moveTo(...begin); context.lineTo(...close); context.stroke();
  const angle = Math.atan2(close[1] - begin[1], close[0] - begin[0]), head = pitch > 20 ? 6 : 3;
  context.beginPath(); context.moveTo(...close);
  for (const side of [-0.45, 0.45]) context.lineTo(close[0] - head * Math.cos(angle + side), close[1] - head * Math.sin(angle + side));
  context.fill();
}

function drawMemory(context, row, at, from, until, left, right, y, height, small) {
  const points = row.memory, n = points.length / 2;
  const level = (used) => y + height * (1 - used / (mostMemory || 1));
  // The last point before the visible range gives the level at its start.
  let low = 0, high = n;
  while (low < high) { const middle = (low + high) >> 1; if (points[2 * middle] <= from) low = middle + 1; else high = middle; }
  const line = new Path2D();
  let used = low > 0 ? points[2 * low - 1] : 0, before = left, most = used, least = used;
  line.moveTo(left, level(used));
  for (let i = low; i < n && points[2 * i] < until; i++) {
    const px = Math.min(right, Math.max(left, at(points[2 * i])));
    if (px - before < 1) { most = Math.max(most, points[2 * i + 1]); least = Math.min(least, points[2 * i + 1]); used = points[2 * i + 1]; continue; }
    // Changes within a pixel become one stroke from minimum to maximum. A small curve shows the
    // maximum.
    if (small) used = most;
    else { line.lineTo(before, level(least)); line.lineTo(before, level(most)); }
    line.lineTo(before, level(used)); line.lineTo(px, level(used));
    used = most = least = points[2 * i + 1]; before = px;
    if (!small) line.lineTo(px, level(used));
  }
  line.lineTo(before, level(most)); line.lineTo(before, level(used));
  const stop = Math.min(right, at(end));
  line.lineTo(stop, level(used));
  const area = new Path2D(line);
  area.lineTo(stop, y + height); area.lineTo(left, y + height); area.closePath();
  context.fillStyle = style.memory; context.fill(area);
  context.strokeStyle = style.curve; context.lineWidth = 1; context.stroke(line);
}

// Draws the overview without marked bars, once for each size and theme.
function drawAll(like, left, width, height) {
  const canvas = document.createElement("canvas"), { shares: sums } = place, kinds = data.kinds.length, parts = sums.length / kinds;
  canvas.width = like.width; canvas.height = like.height;
  const context = canvas.getContext("2d");
  context.setTransform(window.devicePixelRatio || 1, 0, 0, window.devicePixelRatio || 1, 0, 0);
  context.fillStyle = style.plot; context.fillRect(left, 2, width, height);
  context.fillStyle = style.idle; context.fillRect(left, 2, width, height);
  for (let p = 0; p < parts; p++) {
    const begin = Math.round(left + p / parts * width), close = Math.round(left + (p + 1) / parts * width);
    let y = 2 + height;
    for (let k = 0; k < kinds; k++) {
      const h = sums[p * kinds + k] * height;
      if (h <= 0) continue;
      context.fillStyle = colour(k, 0); y -= h;
      context.fillRect(begin, y, close - begin, h);
    }
  }
  return canvas;
}

function drawOverview() {
  const canvas = canvases.overview, box = canvas.parentElement, context = size(canvas, box.clientWidth, box.clientHeight);
  const height = box.clientHeight - 4, { left, width } = place;
  if (!place.overview) place.overview = drawAll(context.canvas, left, width, height);
  context.drawImage(place.overview, 0, 0, box.clientWidth, box.clientHeight);
  const at = (t) => left + t / end * width;
  if (view.from > 0 || view.until < end) {
    context.fillStyle = style.ground; context.globalAlpha = 0.68;
    context.fillRect(left, 2, at(view.from) - left, height); context.fillRect(at(view.until), 2, left + width - at(view.until), height);
    context.globalAlpha = 1;
    context.strokeStyle = style.mark; context.lineWidth = 1.5;
    context.strokeRect(at(view.from), 1.75, Math.max(2, at(view.until) - at(view.from)), height + 0.5);
  }
}

// Draws the chosen bar, and all bars of the same microbatch.
function drawMarked() {
  const { full, height, left, width, pitch } = place, context = size(canvases.marked, full, height);
  for (const it of rowsBox.children) it.classList.toggle("on", chosen != null && +it.dataset.row === chosen.row.index);
  if (!chosen) return;
  const part = parts(), top = scroll.scrollTop;
  context.save();
  context.beginPath(); context.rect(left, 0, width, height); context.clip();
  const microbatch = chosen.bar != null && chosen.row.bars.microbatch ? chosen.row.bars.microbatch[chosen.bar] : null;
  if (microbatch != null) {
    for (const [row, i] of byMicrobatch.get(microbatch)) {
      const begin = x(row.bars.start[i]), w = Math.max(2.5, x(row.bars.end[i]) - begin - 1), y = row.index * pitch - top;
      if (begin + w < left || begin > left + width || y + pitch < 0 || y > height) continue;
      if (w > 8) { context.strokeStyle = style.mark; context.lineWidth = 1.5; context.strokeRect(begin + 0.75, y + 0.75, w - 1.5, part.bars - 1.5); }
      else {
        context.fillStyle = style.ground; context.fillRect(begin - 1, y, w + 2, part.bars);
        context.fillStyle = style.mark; context.fillRect(begin, y, w, part.bars);
      }
    }
  }
  const [from, until, y, h] = box(chosen, part, top);
  context.strokeStyle = style.ground; context.lineWidth = 4; context.strokeRect(from, y, Math.max(2, until - from), h);
  context.strokeStyle = style.accent; context.lineWidth = 2.5; context.strokeRect(from, y, Math.max(2, until - from), h);
  if (chosen.move != null && chosen.row.moves.to && rows[chosen.row.moves.to[chosen.move]]) arrow(context, chosen.row, chosen.move, part, top, style.accent, 2);
  context.restore();
}

function box(what, part, top) {
  const y = what.row.index * place.pitch - top;
  if (what.bar != null) return [x(what.row.bars.start[what.bar]), x(what.row.bars.end[what.bar]) - 1, y, part.bars];
  if (what.move != null) { const [at, h] = lane(what.row, what.move, y + part.movesTop, part.moves); return [x(what.row.moves.start[what.move]), x(what.row.moves.end[what.move]), at, h]; }
  return [x(what.from), x(what.until), y, part.bars];
}

// Returns the item at a place: a move, a bar, or the time between bars.
function find(px, py) {
  const { pitch, left, width } = place;
  if (px < left || px > left + width) return null;
  const offset = py + scroll.scrollTop, row = rows[Math.floor(offset / pitch)];
  if (!row) return null;
  const at = timeAt(px), part = parts(), within = offset - row.index * pitch;
  if (shown.moves && within >= part.movesTop - 1 && within <= part.movesTop + part.moves) {
    let best = null, least = 4;
    eachMove(row, (i) => {
      const [y, h] = lane(row, i, part.movesTop, part.moves);
      const away = Math.max(0, x(row.moves.start[i]) - px, px - x(row.moves.end[i])) + Math.max(0, y - within, within - y - h);
      if (away < least) { least = away; best = i; }
    });
    if (best != null) return { row, move: best };
  }
  if (at < 0 || at > end) return null;
  const i = firstAfter(row.bars.end, at);
  if (i < row.bars.n && row.bars.start[i] <= at) return { row, bar: i };
  const gap = row.gaps.find(([from, until]) => from <= at && at < until);
  const from = gap ? gap[0] : i > 0 ? row.bars.end[i - 1] : 0, until = gap ? gap[1] : i < row.bars.n ? row.bars.start[i] : end;
  return { row, from, until, waits: gap ? data.texts[gap[2]] : "" };
}

function lines(what) {
  const { row } = what, said = [];
  const say = (name, value) => { if (value) said.push([name, value]); };
  if (what.bar == null && what.move == null) {
    say("from", point(what.from)); say("until", point(what.until)); say("length", time(what.until - what.from));
    say("waited for", what.waits || (what.until >= end ? "nothing: it is done" : ""));
    return { title: "Bubble \u00b7 " + row.name, lines: said };
  }
  const bars = what.bar != null ? row.bars : row.moves, i = what.bar != null ? what.bar : what.move;
  const kind = bars.kind[i], of = (column) => bars[column] ? bars[column][i] : null;
  const name = text(bars.name, i), title = [];
  title.push(kind === OTHER && name ? name : data.kinds[kind].replace(/^./, (c) => c.toUpperCase()));
  if (of("stage") != null) title.push("stage " + of("stage"));
  if (of("microbatch") != null) title.push("microbatch " + of("microbatch"));
  const to = of("to"), length = bars.end[i] - bars.start[i];
  say("on", row.name + (row.process != null && !row.name.startsWith("process") ? ", process " + row.process : "") + (to != null && rows[to] ? " to " + rows[to].name : ""));
  if (kind !== OTHER && name) say("name", name);
  say("start", point(bars.start[i])); say("length", time(length)); say("end", point(bars.end[i]));
  if (of("plannedStart") != null) {
    const late = bars.start[i] - of("plannedStart"), longer = length - (of("plannedEnd") - of("plannedStart")), small = end * 1e-9;
    const by = (value, more, less) => Math.abs(value) < small ? "" : time(Math.abs(value)) + " " + (value > 0 ? more : less);
    const differs = [by(late, "later", "earlier"), by(longer, "longer", "shorter")].filter(Boolean).join(", ") || "as it was";
    say("planned", point(of("plannedStart")) + " to " + point(of("plannedEnd")) + ": " + differs);
  }
  say("waited for", text(bars.waitedFor, i));
  if (of("issued") != null) say("issued", point(of("issued")) + ", " + time(bars.start[i] - of("issued")) + " before it began");
  if (of("bytes") != null) say("moves", bytes(of("bytes")) + (data.unit === "s" && length > 0 ? ", " + bytes(of("bytes") / length) + "/s" : ""));
  if (row.memory.length && what.bar != null) say("memory", memoryWithUnit(usedAt(row, bars.start[i])) + " in use then");
  if (of("op") != null) say("operation", "#" + of("op"));
  say("line", text(bars.at, i));
  return { title: title.join(" \u00b7 "), colour: colour(kind, bars.chunk[i]), lines: said };
}

function usedAt(row, at) {
  let used = 0;
  for (let i = 0; i < row.memory.length && row.memory[i] <= at; i += 2) used = row.memory[i + 1];
  return used;
}

function choose(what, px, py) {
  const same = chosen && what && chosen.row === what.row && chosen.bar === what.bar && chosen.move === what.move && chosen.from === what.from;
  chosen = what;
  if (!what) { tip.hidden = true; drawMarked(); return; }
  if (!same) {
    const said = lines(what), title = document.createElement("strong"), list = document.createElement("dl");
    if (said.colour) { const swatch = document.createElement("i"); swatch.style.background = said.colour; title.append(swatch); }
    title.append(said.title);
    for (const [name, value] of said.lines) {
      const term = document.createElement("dt"), description = document.createElement("dd");
      term.textContent = name; description.textContent = value; list.append(term, description);
    }
    tip.replaceChildren(title, list);
    tip.hidden = false;
    drawMarked();
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  let left = px + 16, top = py + 18;
  if (left + width > window.innerWidth - 8) left = Math.max(8, px - width - 12);
  if (top + height > window.innerHeight - 8) top = Math.max(8, py - height - 14);
  tip.style.left = left + "px"; tip.style.top = top + "px";
}

// Zooms and moves the view.
function show(from, until) {
  const least = Math.min(end, Math.max(shortest * 2, end * 1e-7));
  let span = Math.min(end, Math.max(least, until - from));
  if (span !== until - from) from = (from + until - span) / 2;
  from = Math.min(end - span, Math.max(0, from));
  view = { from, until: from + span };
  if (view.until > end) view.until = end;
  draw();
}
function zoom(by, at = (view.from + view.until) / 2) { show(at - (at - view.from) * by, at + (view.until - at) * by); }
function shift(by) { const d = by * (view.until - view.from); show(view.from + d, view.until + d); }

scroll.addEventListener("wheel", (event) => {
  const px = event.clientX - scroll.getBoundingClientRect().left;
  const step = event.deltaMode === 1 ? 33 : event.deltaMode === 2 ? 400 : 1;
  const sideways = event.shiftKey ? event.deltaX || event.deltaY : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
  if (sideways) { event.preventDefault(); shift(sideways * step / place.width); return; }
  // Over the names, and right of the bars, the wheel scrolls.
  if (px < place.left || px > place.left + place.width) return;
  event.preventDefault();
  zoom(Math.exp(Math.max(-300, Math.min(300, event.deltaY * step)) * 0.002), timeAt(px));
}, { passive: false });

let drag = null;
scroll.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || event.offsetX >= scroll.clientWidth) return;
  drag = { x: event.clientX, y: event.clientY, view: { ...view }, top: scroll.scrollTop, moved: false };
});
window.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
  if (!drag.moved && Math.hypot(dx, dy) < 4) return;
  if (!drag.moved) { drag.moved = true; scroll.classList.add("dragging"); choose(null); }
  const by = -dx / place.width * (drag.view.until - drag.view.from);
  if (event.pointerType !== "touch") scroll.scrollTop = drag.top - dy;
  show(drag.view.from + by, drag.view.until + by);
});
for (const kind of ["pointerup", "pointercancel"]) window.addEventListener(kind, () => { drag = null; scroll.classList.remove("dragging"); });
scroll.addEventListener("pointermove", (event) => {
  if (drag && drag.moved) return;
  const at = scroll.getBoundingClientRect();
  choose(find(event.clientX - at.left, event.clientY - at.top), event.clientX, event.clientY);
});
scroll.addEventListener("pointerleave", () => choose(null));
scroll.addEventListener("dblclick", (event) => {
  const px = event.clientX - scroll.getBoundingClientRect().left;
  if (px >= place.left && px <= place.left + place.width) zoom(0.4, timeAt(px));
});
scroll.addEventListener("scroll", draw);

let brush = null;
canvases.overview.addEventListener("pointerdown", (event) => { canvases.overview.setPointerCapture(event.pointerId); brush = overviewTime(event); });
canvases.overview.addEventListener("pointermove", (event) => {
  if (brush == null) return;
  const at = overviewTime(event);
  if (Math.abs(at - brush) / end * place.width > 4) show(Math.min(at, brush), Math.max(at, brush));
});
canvases.overview.addEventListener("pointerup", (event) => {
  const at = overviewTime(event), span = view.until - view.from;
  // A click moves the view there.
  if (brush != null && Math.abs(at - brush) / end * place.width <= 4) show(at - span / 2, at + span / 2);
  brush = null;
});
const overviewTime = (event) => Math.min(end, Math.max(0, (event.clientX - canvases.overview.getBoundingClientRect().left - place.left) / place.width * end));

// Moves from bar to bar by keys. The chosen bar is shown as with the pointer.
function step(rowBy, barBy) {
  if (!chosen || chosen.bar == null) {
    const row = chosen ? chosen.row : rows.find((it) => it.bars.n > 0);
    if (!row || !row.bars.n) return;
    return reach(row, Math.min(row.bars.n - 1, firstAfter(row.bars.end, chosen ? chosen.from || 0 : view.from)));
  }
  if (!rowBy) return reach(chosen.row, Math.min(chosen.row.bars.n - 1, Math.max(0, chosen.bar + barBy)));
  const at = (chosen.row.bars.start[chosen.bar] + chosen.row.bars.end[chosen.bar]) / 2;
  for (let r = chosen.row.index + rowBy; rows[r]; r += rowBy) if (rows[r].bars.n) return reach(rows[r], Math.min(rows[r].bars.n - 1, firstAfter(rows[r].bars.end, at)));
}
function reach(row, bar) {
  const { start, end: ends } = row.bars, span = view.until - view.from, y = row.index * place.pitch;
  if (start[bar] < view.from || ends[bar] > view.until) show((start[bar] + ends[bar] - span) / 2, (start[bar] + ends[bar] + span) / 2);
  if (y < scroll.scrollTop) scroll.scrollTop = y;
  if (y + place.pitch > scroll.scrollTop + place.height) scroll.scrollTop = y + place.pitch - place.height;
  const at = scroll.getBoundingClientRect(), middle = Math.min(place.left + place.width, Math.max(place.left, (x(start[bar]) + x(ends[bar])) / 2));
  choose({ row, bar }, at.left + middle, at.top + y - scroll.scrollTop + place.pitch / 2);
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("button, input, select, summary")) {
    if (event.key !== "Escape") return;
  }
  const on = document.activeElement === scroll, last = chosen ? chosen.row : rows[0];
  const act = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "_": () => zoom(1 / 0.6), "0": () => show(0, end),
    Escape: () => { choose(null); $("help").open = false; },
    ArrowLeft: () => event.shiftKey || !on ? shift(-0.2) : step(0, -1), ArrowRight: () => event.shiftKey || !on ? shift(0.2) : step(0, 1),
    ArrowUp: on && (() => step(-1, 0)), ArrowDown: on && (() => step(1, 0)),
    Home: on && last && last.bars.n && (() => reach(last, 0)), End: on && last && last.bars.n && (() => reach(last, last.bars.n - 1)),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
});
scroll.addEventListener("blur", () => choose(null));

$("in").addEventListener("click", () => zoom(0.6));
$("out").addEventListener("click", () => zoom(1 / 0.6));
$("reset").addEventListener("click", () => show(0, end));
for (const what of ["moves", "planned", "memory"]) {
  const it = $("show-" + what);
  if (!it) continue;
  shown[what] = it.checked;
  it.addEventListener("change", () => { shown[what] = it.checked; choose(null); arrange(); });
}
function setTheme(to) {
  if (to === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = to;
  readStyle();
}
$("theme").addEventListener("change", () => { setTheme($("theme").value); draw(); });
// On paper: light colours, and a width that A4 and Letter have in landscape. The picture has to be there at once.
for (const [event, width] of [["beforeprint", "980px"], ["afterprint", ""]]) {
  window.addEventListener(event, () => {
    document.body.style.width = width;
    setTheme(width ? "light" : $("theme").value);
    arrange(); drawNow();
  });
}
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readStyle(); draw(); });
window.addEventListener("resize", () => { readStyle(); arrange(); });

readStyle();
arrange();
})();
