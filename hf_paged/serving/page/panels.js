// The parts of the page beside the block map: figures, bars, curves, the list of requests and a block table.

import { $, bytes, count, make, millis, percent, post, text } from "./common.js";
import { color, drawCurve, ownColor, shareName } from "./draw.js";
import { SPAN, state } from "./model.js";

export function showTiles({ engine, server, latency, history, ended }, view, held) {
  const by = (status) => engine.requests.filter((each) => each.status === status).length, last = history[history.length - 1];
  const hits = engine.counters.prefix_cache_query_tokens ? engine.counters.prefix_cache_hit_tokens / engine.counters.prefix_cache_query_tokens : 0;
  const pair = (values) => (values ? [millis(values[0]), `p95 ${millis(values[1])}`] : ["–", "nothing lately"]);
  const tiles = [
    ["Tokens per second", last.rate.toFixed(0), `${engine.counters.generated_tokens.toLocaleString("en")} so far`],
    ["Running requests", String(by("running")), `${engine.waiting} waiting · ${by("swapped")} swapped`],
    ["Finished requests", ended.finished.toLocaleString("en"), `${ended.failed} failed · ${ended.refused} refused`],
    ["Blocks in use", percent(view.used / view.count), `${view.used} of ${view.count} · ${view.shared} shared`],
    ["From prefix cache", server.prefix_caching ? percent(hits) : "off", `${count(engine.counters.prefix_cache_evictions, "block")} evicted`],
    ["Preemptions", String(engine.counters.preemptions_swap + engine.counters.preemptions_recompute), `${engine.counters.preemptions_swap} by swapping`],
    ["Copies on write", engine.counters.cow_copies.toLocaleString("en"), `sharing saves ${bytes(Math.max(0, held.unshared - held.used))}`],
    ["Time to first token", ...pair(latency.first_token)],
    ["Between tokens", ...pair(latency.between_tokens)],
  ];
  const list = $("tiles");
  while (list.children.length < tiles.length) list.append(make("div", {}, make("dt"), make("dd", { class: "big" }), make("dd", { class: "small" })));
  tiles.forEach((tile, index) => tile.forEach((value, part) => text(list.children[index].children[part], value)));
}

export function showLegend() {
  const key = (style) => make("span", { class: "key", style });
  const ramp = make("span", { class: "ramp" }, ...["share2", "share3", "share5", "share9"].map((name) => key({ background: color(name) })));
  const hues = make("span", { class: "ramp" }, ...["1", "2", "3", "4"].map((id) => key({ background: ownColor(id) })));
  const item = (...parts) => make("li", {}, ...parts);
  $("legend").replaceChildren(
    item(hues, "in use: a hue for each request, as high as it is filled"),
    item(ramp, "shared by 2, 3, 5, 9 or more block tables"),
    item(key({ border: `2px solid ${color("cached")}` }), "kept by the prefix cache"),
    item(key({ background: color("free") }), "free"),
    item(key({ background: color("fresh"), border: `1px solid ${color("line")}` }), "never used"),
    item(key({ border: `2px solid ${color("flash")}` }), "just evicted"),
    item(key({ border: `2px solid ${color("copy")}` }), "just copied on write"),
  );
}

const some = (blocks, most) => blocks.slice(0, most).join(", ") + (blocks.length > most ? ", …" : "");

function copied(blocks) {
  const pairs = Array.from({ length: blocks.length / 2 }, (_, i) => `${blocks[2 * i]} → ${blocks[2 * i + 1]}`);
  return some(pairs, 5);
}

// Lists what is new, copies and evictions since the last snapshot together; returns the blocks of these by kind.
export function noteEvents(engine) {
  const list = $("events"), isFirst = state.lastEvent === 0, fresh = { copy: [], evict: [] };
  const add = (step, kind, head, rest) => list.prepend(make("li", { class: kind }, `step ${step}  `, make("b", {}, head), rest));
  for (const [number, step, kind, id, blocks] of engine.events) {
    if (number <= state.lastEvent) continue;
    state.lastEvent = number;
    if (kind in fresh) fresh[kind].push(...blocks);
    else if (kind === "admit") add(step, kind, `${id} starts`, blocks.length ? ` with ${count(blocks.length, "cached block")}: ${some(blocks, 10)}` : "");
    else if (kind === "recompute") add(step, kind, `${id} is preempted`, ": its blocks are freed, and computed again later");
    else if (kind === "swap_out") add(step, kind, `${id} is preempted`, ": its blocks move to host memory");
    else if (kind === "swap_in") add(step, kind, `${id} returns`, ": its blocks come back from host memory");
  }
  if (fresh.evict.length) add(engine.counters.steps, "evict", "evicted", ` from the prefix cache to make room: ${count(fresh.evict.length, "block")}: ${some(fresh.evict, 10)}`);
  if (fresh.copy.length) add(engine.counters.steps, "copy", "copied on write", `, because others read the block too: ${copied(fresh.copy)}`);
  while (list.children.length > 12) list.lastElementChild.remove();
  return isFirst ? { copy: [], evict: [] } : fresh;
}

export function showBars(held, server) {
  const rows = [
    ["In blocks, now", held.used, [[held.filled, "accent"], [held.used - held.filled, "line"]]],
    ["The same without sharing", held.unshared, [[held.unshared, "share3"]]],
    ["Contiguous, for each request's limit", held.limit, [[held.limit, "soft"]]],
  ];
  if (held.most) rows.push([`Contiguous, ${count(server.max_model_len, "token")} a sequence`, held.most, [[held.most, "soft"]]]);
  const top = Math.max(held.pool, ...rows.map((row) => row[1])) || 1;
  const note = `The red line is the end of the pool, ${bytes(held.pool)}: what lies beyond it could not run at the same time.`;
  $("bars").replaceChildren(...rows.flatMap(([name, value, parts], index) => {
    const bar = make("span", { class: "bar" }, ...parts.map(([size, fill]) => make("i", { style: { width: `${(100 * size) / top}%`, background: color(fill) } })));
    bar.append(make("span", { class: "limit", style: { left: `calc(${(100 * held.pool) / top}% - 2px)`, height: "100%" } }));
    const more = !held.used ? "" : index ? ` · ${(value / held.used).toFixed(1)}×` : ` · ${percent(held.filled / held.used)} filled`;
    return [make("span", { class: "name" }, name), bar, make("span", { class: "value" }, bytes(value) + more)];
  }), make("p", { class: "name wide" }, note));
}

export function showCurves({ history }) {
  const last = history[history.length - 1], share = (value) => `${(100 * value).toFixed(0)} %`;
  const line = (label, of, stroke, more = {}) => ({ label, color: color(stroke), values: history.map((each) => [each.time, of(each)]), ...more });
  const pair = (name) => [line("p95", (each) => each[name] && each[name][1], "soft", { dash: [3, 3] }), line("median", (each) => each[name] && each[name][0], "accent")];
  const figures = [
    ["tokens per second", last.rate.toFixed(0), [line("generated", (each) => each.rate, "accent", { area: true })], (value) => value.toFixed(0), 10],
    ["blocks", share(last.used), [line("with cached", (each) => each.cached, "cached", { dash: [3, 3] }), line("in use", (each) => each.used, "accent", { area: true }), line("shared", (each) => each.shared, "share3", { area: true })], share, 0.895],
    ["time to first token", last.first ? millis(last.first[0]) : "", pair("first"), millis, 0.01],
    ["time between tokens", last.between ? millis(last.between[0]) : "", pair("between"), millis, 0.004],
  ];
  const box = $("curves");
  while (box.children.length < figures.length) box.append(make("figure", {}, make("figcaption", {}, make("span"), make("b")), make("p", { class: "lines" }), make("canvas", { role: "img" })));
  figures.forEach(([name, value, lines, format, least], index) => {
    const [caption, labels, canvas] = box.children[index].children;
    labels.replaceChildren(...lines.map((each) => make("span", { style: { color: each.color } }, each.label)));
    text(caption.children[0], name);
    text(caption.children[1], value);
    canvas.setAttribute("aria-label", `${name}: ${value || "nothing yet"}`);
    drawCurve(canvas, lines, last.time, SPAN, format, least);
  });
}

// -- the list of requests --------------------------------------------------------------------------------------------

const rank = { running: 0, swapped: 1, waiting: 2 };

export function showRequests({ engine }, choose, hover) {
  const rows = [...engine.requests].sort((a, b) => rank[a.status] - rank[b.status]), box = $("requests");
  const number = (name) => (name === "waiting" ? engine.waiting : rows.filter((each) => each.status === name).length);
  text($("requests-note"), rows.length ? Object.keys(rank).map((name) => `${number(name)} ${name}`).join(", ") : "none at the moment");
  $("invite").hidden = rows.length > 0;
  text($("invite"), `Nothing is running. Ask the model below, or send a request to ${location.origin}/v1 and watch its blocks here.`);
  const known = new Map([...box.children].map((row) => [row.dataset.id, row]));
  rows.forEach((request, index) => {
    const row = known.get(request.id) || newRow(request.id, choose, hover);
    known.delete(request.id);
    fillRow(row, request);
    if (box.children[index] !== row) box.insertBefore(row, box.children[index] || null);
  });
  for (const row of known.values()) row.remove();
}

function newRow(id, choose, hover) {
  const progress = make("span", { class: "progress" }, make("i", { class: "hit" }), make("i", { class: "prompt" }), make("i", { class: "made" }));
  const row = make("button", { type: "button" }, make("span", { class: "key", style: { background: ownColor(id) } }), make("span", { class: "id" }),
    make("span", { class: "status" }), progress, make("span", { class: "what" }));
  row.dataset.id = id;
  row.addEventListener("click", () => choose(state.chosen === id ? null : id));
  for (const name of ["pointerenter", "focus"]) row.addEventListener(name, () => hover(id));
  for (const name of ["pointerleave", "blur"]) row.addEventListener(name, () => hover(null));
  return row;
}

function fillRow(row, request) {
  const longest = Math.max(0, ...request.sequences.map((each) => each.tokens)), computed = Math.max(0, ...request.sequences.map((each) => each.computed));
  const made = Math.max(0, longest - request.prompt), isOwn = state.own.has(request.id), { length } = request.sequences;
  const [, id, status, progress, what] = row.children;
  row.className = `request ${request.status}${request.id === state.shown ? " chosen" : ""}${isOwn ? " mine" : ""}`;
  row.setAttribute("aria-pressed", String(request.id === state.chosen));
  text(id, isOwn ? `${request.id} you` : request.id);
  const isReading = request.status === "running" && computed < request.prompt;
  text(status, (isReading ? "prompt" : request.status) + (request.preemptions ? ` ↺${request.preemptions}` : ""));
  const hit = request.status === "waiting" ? 0 : Math.min(request.cached, computed);
  const parts = [hit, Math.min(request.prompt, computed) - hit, request.status === "waiting" ? 0 : made];
  parts.forEach((size, index) => progress.children[index].style.setProperty("width", `${(100 * Math.max(0, size)) / request.limit}%`));
  text(what, `${length > 1 ? `${length} × ` : ""}${request.prompt} + ${made}`);
  row.title = `${count(request.prompt, "prompt token")}, ${request.cached} of them from the prefix cache; ${made} made, of at most ${request.limit - request.prompt}; ` +
    `${count(length, "sequence")}; ${count(request.preemptions, "preemption")}; arrived ${request.seconds.toFixed(1)} s ago`;
}

// -- the block table -------------------------------------------------------------------------------------------------

const MOST_COLUMNS = 8;
const texts = new Map(); // of the page's own requests, by token ids

function textOf(tokens) {
  const key = tokens.join(",");
  if (!texts.has(key)) {
    if (texts.size > 4000) texts.clear();
    texts.set(key, "");
    post("detokenize", { tokens }).then((answer) => (answer.ok ? answer.json() : { prompt: "" }))
      .then(({ prompt }) => texts.set(key, prompt)).catch(() => texts.delete(key));
  }
  return texts.get(key);
}

export function showTable({ engine, group }, view) {
  const request = engine.requests.find((each) => each.id === state.shown), box = $("table");
  if (!request) {
    text($("table-note"), box.querySelector("table") ? "as it was when the request ended" : "");
    showTexts(box, view.size); // they arrive after the blocks
    if (!box.children.length) box.append(make("p", { class: "name" }, "Shows for one request which physical block holds which part of its text."));
    return;
  }
  const { size } = view, tables = request.sequences.map((each) => each.tables[group] || []), columns = tables.slice(0, MOST_COLUMNS);
  const longest = Math.max(0, ...tables.map((each) => each.length)), known = state.own.get(request.id);
  text($("table-title"), `Block table of ${request.id}`);
  text($("table-note"), request.status === "waiting" ? "waits, and holds no block" : `${count(tables.length, "sequence")}, ${count(longest, "logical block")}`);
  const where = request.status === "swapped" ? "host" : "physical";
  const titles = columns.map((_, index) => make("th", { scope: "col" }, tables.length > 1 ? `${where}, ${index + 1}` : `${where} block`));
  const head = make("tr", {}, make("th", { scope: "col" }, "tokens"), ...titles, make("th", { scope: "col" }, known ? "text" : ""));
  const body = make("tbody");
  for (let place = 0; place < longest; place += 1) {
    const row = make("tr", {}, make("th", { scope: "row" }, `${place * size}–${place * size + size - 1}`));
    columns.forEach((table, index) => row.append(cell(request, table[place], request.sequences[index].computed - place * size, view, tables, place)));
    if (known) row.append(make("td", { class: "text" }));
    body.append(row);
  }
  const top = box.scrollTop, isAtEnd = top > 0 && top + box.clientHeight >= box.scrollHeight - 40;
  box.replaceChildren(make("table", {}, make("thead", {}, head), body));
  box.dataset.id = request.id;
  showTexts(box, size);
  if (tables.length > MOST_COLUMNS) box.append(make("p", { class: "name" }, `and ${tables.length - MOST_COLUMNS} more sequences`));
  box.scrollTop = isAtEnd ? box.scrollHeight : top;
}

function showTexts(box, size) {
  const known = state.own.get(box.dataset.id);
  if (!known) return;
  const tokens = [...known.prompt, ...(known.made || [])];
  box.querySelectorAll("td.text").forEach((each, place) => {
    const part = tokens.slice(place * size, (place + 1) * size);
    text(each, part.length ? textOf(part).replace(/\n/g, "⏎") : "");
  });
}

function cell(request, block, filled, view, tables, place) {
  if (block === undefined) return make("td");
  if (block < 0) return make("td", { class: "block" }, "left the window");
  const refs = request.status === "running" ? view.refs[block] : tables.filter((table) => table[place] === block).length;
  const slots = Math.max(0, Math.min(view.size, filled));
  const made = make("td", { class: refs > 8 ? "block on-dark" : "block on-color", style: { background: refs > 1 ? color(shareName(refs)) : ownColor(request.id) } }, `${block}${refs > 1 ? ` ×${refs}` : ""}`);
  if (slots < view.size) made.append(` ${slots}/${view.size}`, make("span", { class: "fill", style: { width: `${(100 * slots) / view.size}%` } }));
  return made;
}
