// Draws on canvases: the block map, the swapped blocks and the curves. Knows nothing of the server.

const ring = 800; // ms that an event is shown
const margin = 3; // px around the cells, for rings
const mostArrows = 8, mostRings = 40; // more could not be told apart
const still = matchMedia("(prefers-reduced-motion: reduce)");
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Seven hues by two shades: 14 requests in a row have colours that can be told apart. Warm hues are for shared blocks.
const hues = [222, 96, 292, 178, 134, 262, 322];
export function ownColor(id) {
  const number = parseInt(id.replace(/\D+/g, "") || "0", 10), shade = Math.floor(number / hues.length) % 2 ? 1 : -1;
  return `hsl(${hues[number % hues.length]} ${color("own-s")} calc(${color("own-l")} + ${15 * shade}%))`;
}
export const shareName = (refs) => (refs > 8 ? "share9" : refs > 4 ? "share5" : refs > 2 ? "share3" : "share2");

function fit(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width];
}

function path(pen, x, y, w, h, r) {
  pen.beginPath();
  if (r > 0 && pen.roundRect) pen.roundRect(x, y, w, h, r);
  else pen.rect(x, y, w, h);
}

export class BlockMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.flashes = []; // {kind, blocks, from}
    this.cursor = -1;
    this.lit = null; // id of the request whose blocks stand out
    this.view = null;
  }

  // Cells as large as the width allows, each for `per` blocks if there are too many for cells that can be seen.
  layout(count) {
    const width = this.canvas.clientWidth - 2 * margin, most = 420;
    let pitch = 26;
    while (pitch > 7 && Math.ceil(count / Math.floor(width / pitch)) * pitch > most) pitch -= 1;
    const columns = Math.max(1, Math.floor(width / pitch));
    const per = Math.max(1, Math.ceil(count / (columns * Math.floor(most / pitch))));
    const rows = Math.ceil(Math.ceil(count / per) / columns);
    const size = pitch - (pitch > 11 ? 3 : pitch > 9 ? 2 : 1);
    pitch = Math.max(pitch, Math.min(pitch + 1, width / columns)); // fills the width
    return { pitch, size, columns, rows, per, count };
  }

  flash(kind, blocks) {
    this.flashes.push({ kind, blocks, from: performance.now() });
    if (this.flashes.length > 60) this.flashes.shift();
  }

  blockAt(event) {
    const grid = this.grid, box = this.canvas.getBoundingClientRect();
    if (!grid) return -1;
    const column = Math.floor((event.clientX - box.left - margin) / grid.pitch), row = Math.floor((event.clientY - box.top - margin) / grid.pitch);
    const block = (row * grid.columns + column) * grid.per;
    return column >= 0 && column < grid.columns && row >= 0 && block < grid.count ? block : -1;
  }

  corner(block) {
    const cell = Math.floor(block / this.grid.per);
    const at = (place) => margin + Math.round(place * this.grid.pitch);
    return [at(cell % this.grid.columns), at(Math.floor(cell / this.grid.columns))];
  }

  draw(view = this.view) {
    this.view = view;
    if (!view) return;
    const grid = (this.grid = this.layout(view.count));
    const [pen] = fit(this.canvas, Math.ceil(grid.rows * grid.pitch) + 2 * margin);
    const palette = Object.fromEntries(["free", "fresh", "cached", "share2", "share3", "share5", "share9"].map((n) => [n, color(n)]));
    this.mask = this.lit === null ? null : view.mask(this.lit);
    const own = new Map(view.ids.map((id) => [id, ownColor(id)]));
    for (let block = 0; block < view.count; block += grid.per) this.cell(pen, view, block, palette, own);
    this.events(pen);
    if (this.cursor >= 0 && document.activeElement === this.canvas) {
      const [x, y] = this.corner(this.cursor);
      pen.strokeStyle = color("focus");
      pen.lineWidth = 2;
      pen.strokeRect(x - 0.5, y - 0.5, grid.size + 1, grid.size + 1);
    }
  }

  cell(pen, view, block, palette, own) {
    const { size, per } = this.grid, [x, y] = this.corner(block), radius = size > 12 ? 3 : size > 8 ? 2 : 0;
    if (per > 1) return this.heap(pen, view, block, palette, own, x, y);
    const refs = view.refs[block], isLit = !this.mask || this.mask[block];
    pen.globalAlpha = isLit ? 1 : 0.16;
    path(pen, x, y, size, size, radius);
    if (refs > 0) {
      pen.fillStyle = refs > 1 ? palette[shareName(refs)] : own.get(view.ids[view.owner[block]]) || palette.free;
      const filled = view.fill[block] / view.size;
      pen.globalAlpha *= filled < 1 ? 0.4 : 1;
      pen.fill();
      if (filled < 1) {
        pen.globalAlpha = isLit ? 1 : 0.16;
        path(pen, x, y + size * (1 - filled), size, size * filled, filled * size > radius ? radius : 0);
        pen.fill();
      }
      if (refs > 1 && size >= 13) {
        pen.fillStyle = refs > 8 ? "#ffffff" : "#14181f";
        pen.font = `600 ${Math.min(11, size - 4)}px system-ui, sans-serif`;
        pen.textAlign = "center";
        pen.textBaseline = "middle";
        pen.fillText(refs > 99 ? "+" : String(refs), x + size / 2, y + size / 2 + 0.5);
      }
    } else if (view.cached[block]) {
      pen.strokeStyle = palette.cached;
      pen.globalAlpha *= 0.55; // quieter than blocks in use
      pen.lineWidth = 1;
      path(pen, x + 1, y + 1, size - 2, size - 2, radius);
      pen.stroke();
    } else {
      pen.fillStyle = block < view.touched ? palette.free : palette.fresh;
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  // Several blocks in one cell: a small column for each kind, from the bottom up.
  heap(pen, view, block, palette, own, x, y) {
    const { size, per } = this.grid, end = Math.min(view.count, block + per), parts = new Map();
    for (let b = block; b < end; b += 1) {
      const refs = view.refs[b];
      let key = b < view.touched ? palette.free : palette.fresh, rank = 9;
      if (refs > 1) [key, rank] = [palette[shareName(refs)], 0];
      else if (refs === 1) [key, rank] = [own.get(view.ids[view.owner[b]]) || palette.free, 1];
      else if (view.cached[b]) [key, rank] = [palette.cached, 2];
      const isLit = !this.mask || Boolean(this.mask[b]);
      const part = parts.get(key + isLit) || { key, rank, isLit, count: 0 };
      part.count += 1;
      parts.set(key + isLit, part);
    }
    let bottom = y + size;
    for (const part of [...parts.values()].sort((a, b) => a.rank - b.rank)) {
      const height = (size * part.count) / (end - block);
      pen.globalAlpha = (part.isLit ? 1 : 0.16) * (part.rank === 2 ? 0.5 : 1);
      pen.fillStyle = part.key;
      pen.fillRect(x, bottom - height, size, height);
      bottom -= height;
    }
    pen.globalAlpha = 1;
  }

  events(pen) {
    const now = performance.now(), { size } = this.grid;
    this.flashes = this.flashes.filter((each) => now - each.from < ring);
    for (const each of this.flashes) {
      const age = still.matches ? 0 : (now - each.from) / ring;
      pen.strokeStyle = pen.fillStyle = color(each.kind === "copy" ? "copy" : "flash");
.6;
      const grow = still.matches ? 1 : 0.5 + 3 * age;
      const marked = each.kind === "copy" ? each.blocks.filter((_, i) => i % 2) : each.blocks;
      for (const block of marked.slice(-mostRings)) {
        if (block >= this.grid.count) continue;
        const [x, y] = this.corner(block);
        path(pen, x - grow, y - grow, size + 2 * grow, size + 2 * grow, 3);
        pen.stroke();
      }
      if (each.kind === "copy" && each.blocks.length <= 2 * mostArrows) this.arrows(pen, each.blocks);
    }
    pen.globalAlpha = 1;
    if (this.flashes.length && !still.matches && !this.waiting) {
      this.waiting = true;
      setTimeout(() => { this.waiting = false; this.draw(); }, 60);
    }
  }

  arrows(pen, pairs) {
    const half = this.grid.size / 2;
    for (let i = 0; i + 1 < pairs.length; i += 2) {
      const [ax, ay] = this.corner(pairs[i]), [bx, by] = this.corner(pairs[i + 1]);
      pen.beginPath();
      pen.moveTo(ax + half, ay + half);
      pen.quadraticCurveTo((ax + bx) / 2 + (ay - by) / 6, (ay + by) / 2 + (bx - ax) / 6, bx + half, by + half);
      pen.lineWidth = 1.2;
      pen.stroke();
    }
  }
}

// Blocks in host memory, one after the other: `blocks` are the ids of their requests.
export function drawHost(canvas, blocks, lit) {
  const pitch = blocks.length > 400 ? 7 : 12, columns = Math.max(1, Math.floor(canvas.clientWidth / pitch));
  const [pen] = fit(canvas, Math.max(1, Math.ceil(blocks.length / columns)) * pitch);
  blocks.forEach((id, index) => {
    const x = (index % columns) * pitch, y = Math.floor(index / columns) * pitch, size = pitch - 2;
    pen.globalAlpha = lit === null || lit === id ? 1 : 0.16;
    pen.fillStyle = ownColor(id);
    pen.fillRect(x, y, size, size);
    pen.fillStyle = color("card");
    pen.fillRect(x + size * 0.35, y, size * 0.3, size); // a stripe: it is not in the pool
  });
}

// lines: [{color, values: [[seconds, value]...], area}]; the last `span` seconds before `now`.
export function drawCurve(canvas, lines, now, span, format, least) {
  const height = 96, [pen, width] = fit(canvas, height), left = 40, bottom = height - 14;
  const shown = lines.map((line) => line.values.filter(([time]) => time >= now - span - 2));
  const top = Math.max(least, ...shown.flat().map(([, value]) => value || 0)) * 1.12;
  const at = ([time, value]) => [left + ((time - now + span) / span) * (width - left), bottom - (value / top) * (bottom - 6)];
  pen.font = "10px system-ui, sans-serif";
  pen.textBaseline = "middle";
  for (const share of [0, 0.5, 1]) {
    const y = bottom - (share / 1.12) * (bottom - 6);
    pen.strokeStyle = color("line");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(left, Math.round(y) + 0.5);
    pen.lineTo(width, Math.round(y) + 0.5);
    pen.stroke();
    pen.fillStyle = color("soft");
    pen.textAlign = "right";
    pen.fillText(format((top / 1.12) * share), left - 5, y);
  }
  pen.textAlign = "left";
  pen.fillText("-2 min", left, height - 5);
  pen.textAlign = "right";
  pen.fillText("now", width, height - 5);
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, width - left, height);
  pen.clip();
  lines.forEach((line, index) => {
    let open = false;
    pen.beginPath();
    for (const point of shown[index]) {
      if (point[1] === null) { open = false; continue; }
      const [x, y] = at(point);
      if (open) pen.lineTo(x, y);
      else pen.moveTo(x, y);
      open = true;
    }
    pen.strokeStyle = line.color;
    pen.lineWidth = 1.8;
    pen.lineJoin = "round";
    pen.setLineDash(line.dash || []);
    pen.stroke();
    pen.setLineDash([]);
    const solid = shown[index].filter(([, value]) => value !== null);
    if (line.area && solid.length > 1) {
      pen.beginPath();
      solid.forEach((point, place) => pen[place ? "lineTo" : "moveTo"](...at(point)));
      pen.lineTo(at(solid[solid.length - 1])[0], bottom);
      pen.lineTo(at(solid[0])[0], bottom);
      pen.closePath();
      pen.globalAlpha = 0.18;
      pen.fillStyle = line.color;
      pen.fill();
      pen.globalAlpha = 1;
    }
  });
  pen.restore();
}
