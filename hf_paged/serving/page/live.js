// The live page: asks the server for snapshots of its engine while the page is visible, and shows them.

import { isAnswering, startChat } from "./chat.js";
import { $, ask, bytes, count, keys, make, text } from "./common.js";
import { BlockMap, drawHost } from "./draw.js";
import { mask, memory, places, read, recall, remember, state, turnOf } from "./model.js";
import { noteEvents, showBars, showCurves, showLegend, showRequests, showTable, showTiles } from "./panels.js";

const PERIOD = 350; // ms between two questions
const SOON = 120; // the same while the page itself waits for an answer, which may be short
const map = new BlockMap($("map"));
let timer = 0;

// -- the server ------------------------------------------------------------------------------------------------------

function askForKey() {
  if (keys.get() !== null) text($("key-note"), "The server does not know this key.");
  keys.forget();
  $("key-form").hidden = false;
  $("main").hidden = true;
  setStatus("locked", "");
  $("key").focus();
}

function setStatus(words, kind) {
  text($("state"), words);
  $("state").className = kind;
}

async function look() {
  const began = performance.now();
  let wait = 2000; // after an error
  try {
    wait = document.hidden || !$("key-form").hidden ? PERIOD : await lookOnce();
  } catch (error) {
    state.tag = "";
    setStatus("no connection, trying again", "bad");
    if (!(error instanceof TypeError)) throw error; // fetch raises it if there is no connection
  } finally {
    if (isAnswering()) wait = Math.min(wait, SOON);
    clearTimeout(timer);
    timer = setTimeout(look, Math.max(wait, 4 * (performance.now() - began))); // a slow server is asked less often
  }
}

async function lookOnce() {
  const answer = await ask("live", { headers: state.tag ? { "if-none-match": state.tag } : {} });
  if (answer.status === 401) askForKey();
  else if (answer.status === 200) {
    state.tag = answer.headers.get("etag") || "";
    receive(await answer.json());
  } else if (answer.status === 304) {
    const isBusy = state.engine && state.engine.requests.length;
    setStatus(isBusy ? "running" : "idle", isBusy ? "busy" : "");
    if (state.engine) showTable(state, state.view); // texts may have arrived
  } else {
    setStatus(answer.status === 503 ? "the engine has stopped" : `the server answers ${answer.status}`, "bad");
    return 2000;
  }
  return PERIOD;
}

function receive({ server, engine, latency, ended, history }) {
  const isFirst = !state.server;
  if (state.server && state.server.run !== server.run) { // it was started again
    Object.assign(state, { engine: null, history: [], lastEvent: 0, chosen: null, shown: null });
    state.own.clear();
  }
  Object.assign(state, { server, latency, ended });
  if (history && !state.history.length) recall(state, history);
  $("main").hidden = false;
  text($("model"), `${server.model} · ${server.architecture} · ${server.dtype} on ${server.device} · version ${server.version}`);
  if (isFirst) startChat(server, look);
  if (!engine) {
    setStatus("a long step is running", "busy");
    return;
  }
  state.engine = engine;
  state.view = read(engine);
  remember(state);
  setStatus(engine.requests.length ? "running" : "idle", engine.requests.length ? "busy" : "");
  for (const [kind, blocks] of Object.entries(noteEvents(engine))) if (blocks.length) map.flash(kind, blocks);
  show();
}

// -- showing it ------------------------------------------------------------------------------------------------------

function show() {
  const { engine } = state;
  if (!engine) return;
  const { view } = state, held = memory(state);
  follow();
  showTiles(state, view, held);
  showMap(view);
  showBars(held, state.server);
  showCurves(state);
  showRequests(state, choose, hover);
  showTable(state, view);
}

// The request in the block table is the user's choice, or the one with the most to see.
function follow() {
  const { engine } = state, held = engine.requests.filter((each) => each.status !== "waiting");
  const has = (requests, id) => requests.some((each) => each.id === id);
  if (!has(engine.requests, state.chosen)) state.chosen = null;
  if (state.chosen) state.shown = state.chosen;
  else {
    const own = held.filter((each) => state.own.has(each.id));
    const wide = [...held].sort((a, b) => b.sequences.length - a.sequences.length);
    if (own.length) state.shown = has(own, state.shown) ? state.shown : own[0].id;
    else if (!has(held, state.shown)) state.shown = wide.length ? wide[0].id : null;
  }
  const lit = state.hovered || state.chosen;
  map.lit = has(engine.requests, lit) ? lit : null;
}

function showMap(view) {
  const { engine } = state, { pool } = engine;
  view.mask = (id) => mask(engine, id);
  map.draw(view);
  const each = map.grid.per > 1 ? `a cell is ${map.grid.per} blocks` : "a cell is a block";
  text($("map-note"), `${count(view.count, "block")} of ${pool.block_size} tokens, ${bytes(view.count * pool.bytes)}; ${each}`);
  $("map").setAttribute("aria-label", `Block map: ${view.used} of ${view.count} blocks in use, ${view.shared} shared, ${pool.cached.length} kept by the prefix cache`);
  $("host").hidden = view.host.length === 0;
  if (view.host.length) drawHost($("host-map"), view.host, map.lit);
  $("group-label").hidden = pool.kinds.length < 2;
  for (let index = $("group").options.length; index < pool.kinds.length; index += 1) {
    $("group").append(make("option", { value: index }, `${index + 1}, with ${pool.kinds[index]}`));
  }
}

// -- pointer and keyboard --------------------------------------------------------------------------------------------

function choose(id) {
  state.chosen = id;
  if (id === null) state.shown = null;
  show();
}

function hover(id) {
  if (state.hovered === id || !state.engine) return;
  state.hovered = id;
  follow();
  map.draw();
}

const holder = (block) => {
  const { view } = state;
  return (block >= 0 && view && view.ids[view.owner[block]]) || null;
};

function describe(block) {
  const { engine, view } = state, { pool } = engine, { per } = map.grid;
  if (per > 1) return describeMany(view, block, Math.min(view.count, block + per));
  if (view.cached[block]) {
    return `Block ${block}: kept by the prefix cache\nNo request uses it.${turnOf(block, pool.cached, state.server.prefix_eviction)}`;
  }
  if (!view.refs[block]) return `Block ${block}: ${block < view.touched ? "free" : "never used"}`;
  const found = places(engine, block), last = (place) => place * view.size + view.fill[block] - 1;
  const lines = found.slice(0, 8).map(({ request, number, place }) => {
    const sequence = request.sequences.length > 1 ? `, sequence ${number + 1}` : "";
    return `${request.id}${sequence}: logical block ${place}, tokens ${place * view.size} to ${last(place)}`;
  });
  if (found.length > 8) lines.push(`and ${found.length - 8} more`);
  if (pool.pinned.includes(block)) lines.push("a pinned prefix");
  return `Block ${block}: ${view.fill[block]} of ${view.size} slots filled, in ${count(view.refs[block], "block table")}\n${lines.join("\n")}`;
}

function describeMany(view, start, end) {
  const kinds = new Map();
  for (let b = start; b < end; b += 1) {
    const kind = view.refs[b] > 1 ? "shared" : view.refs[b] ? "of one sequence" : view.cached[b] ? "kept by the prefix cache" : "free";
    kinds.set(kind, (kinds.get(kind) || 0) + 1);
  }
  return `Blocks ${start} to ${end - 1}\n${[...kinds].map(([kind, n]) => `${n} ${kind}`).join(", ")}`;
}

function tip(block, x, y) {
  const box = $("tip");
  box.hidden = block < 0 || !state.engine;
  if (box.hidden) return;
  text(box, describe(block));
  box.style.left = `${Math.max(0, Math.min(x + 14, innerWidth - 350))}px`;
  box.style.top = `${Math.max(0, Math.min(y + 14, innerHeight - box.offsetHeight - 8))}px`;
}

function onMapKey(event) {
  if (!map.grid) return;
  const { per, columns, count: blocks } = map.grid;
  const step = { ArrowRight: per, ArrowLeft: -per, ArrowDown: columns * per, ArrowUp: -columns * per }[event.key];
  if (event.key === "Escape") choose(null);
  else if (event.key === "Enter") choose(holder(map.cursor));
  else if (event.key === "Home") map.cursor = 0;
  else if (step && map.cursor < 0) map.cursor = 0;
  else if (step) map.cursor = map.cursor + step < 0 || map.cursor + step >= blocks ? map.cursor : map.cursor + step;
  else return;
  event.preventDefault();
  if (map.cursor >= 0) {
    const box = $("map").getBoundingClientRect(), [x, y] = map.corner(map.cursor);
    tip(map.cursor, box.left + x + 12, box.top + y + 12);
    text($("map-status"), describe(map.cursor));
  }
  map.draw();
}

function listen() {
  const canvas = $("map");
  canvas.addEventListener("pointermove", (event) => {
    const block = map.blockAt(event);
    tip(block, event.clientX, event.clientY);
    hover(holder(block));
  });
  canvas.addEventListener("pointerleave", () => { tip(-1); hover(null); });
  canvas.addEventListener("click", (event) => choose(holder(map.blockAt(event))));
  canvas.addEventListener("focus", () => map.draw());
  canvas.addEventListener("blur", () => { map.cursor = -1; tip(-1); map.draw(); });
  canvas.addEventListener("keydown", onMapKey);
  $("group").addEventListener("change", () => { state.group = Number($("group").value); show(); });
  $("help-button").addEventListener("click", () => {
    $("help").hidden = !$("help").hidden;
    $("help-button").setAttribute("aria-expanded", String(!$("help").hidden));
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keys.set($("key").value.trim());
    $("key").value = "";
    $("key-form").hidden = true;
    setStatus("connecting", "");
  });
  $("theme").addEventListener("click", () => {
    const next = { system: "light", light: "dark", dark: "system" }[localStorage.getItem("hf-paged-theme") || "system"];
    localStorage.setItem("hf-paged-theme", next);
    applyTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
  addEventListener("resize", show);
}

function applyTheme() {
  const wanted = localStorage.getItem("hf-paged-theme") || "system", isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = wanted === "system" ? (isDark ? "dark" : "light") : wanted;
  text($("theme"), `Theme: ${wanted}`);
  showLegend();
  show();
}

applyTheme();
listen();
look();
