// What the page knows, and what it reads out of a snapshot. Knows no elements.

export const SPAN = 120; // seconds of the curves

export const state = {
  tag: "", server: null, engine: null, latency: null, ended: null, view: null, history: [], lastEvent: 0, group: 0,
  chosen: null, hovered: null, shown: null, // ids of requests: chosen by the user, under the pointer, in the block table
  own: new Map(), // requests that this page has sent: id -> {prompt: [token id], made: [token id] or null}
};

// Owners, reference counts and filled slots of the blocks.
export function read(engine) {
  const { pool } = engine, n = pool.blocks;
  const view = {
    count: n, size: pool.block_size, touched: pool.touched, ids: engine.requests.map((each) => each.id),
    refs: new Uint16Array(n), owner: new Int32Array(n).fill(-1), fill: new Uint16Array(n), cached: new Uint8Array(n),
    logical: 0, filled: 0, used: 0, shared: 0, host: [],
  };
  const fill = (block, slots) => {
    view.filled += Math.max(0, slots - view.fill[block]);
    view.fill[block] = Math.max(view.fill[block], slots);
  };
  engine.requests.forEach((request, index) => {
    const onHost = new Set();
    for (const sequence of request.sequences) {
      for (const table of sequence.tables) table.forEach((block, place) => {
        if (block < 0) return;
        if (request.status === "swapped") {
          onHost.add(block);
          return;
        }
        view.refs[block] += 1;
        view.logical += 1;
        if (view.owner[block] < 0) view.owner[block] = index;
        fill(block, Math.min(pool.block_size, sequence.computed - place * pool.block_size));
      });
    }
    for (let i = 0; i < onHost.size; i += 1) view.host.push(request.id);
  });
  for (const block of pool.pinned) {
    view.refs[block] += 1;
    fill(block, pool.block_size);
  }
  for (const block of pool.cached) view.cached[block] = 1;
  for (let b = 0; b < n; b += 1) {
    view.used += view.refs[b] > 0;
    view.shared += view.refs[b] > 1;
  }
  return view;
}

const running = (engine) => engine.requests.filter((each) => each.status === "running");

// Where a block stands: [{request, number of its sequence, group of layers, place in the table}].
export function places(engine, block) {
  return running(engine).flatMap((request) => request.sequences.flatMap((sequence, number) => {
    const group = sequence.tables.findIndex((table) => table.includes(block));
    return group < 0 ? [] : [{ request, number, group, place: sequence.tables[group].indexOf(block) }];
  }));
}

// 1 for the blocks of a request.
export function mask(engine, id) {
  const marks = new Uint8Array(engine.pool.blocks);
  for (const request of running(engine)) {
    if (request.id !== id) continue;
    for (const sequence of request.sequences) for (const block of sequence.tables.flat()) if (block >= 0) marks[block] = 1;
  }
  return marks;
}

// Bytes that the requests on the device take in blocks, would take without sharing, and in contiguous memory.
export function memory({ engine, view, server }) {
  const { pool } = engine, most = server.max_model_len;
  const reserved = (tokens) => running(engine).reduce((total, each) => total + each.width * tokens(each), 0);
  const perToken = (pool.bytes / pool.block_size) * pool.kinds.length; // every group of layers
  return {
    filled: (view.filled * pool.bytes) / pool.block_size,
    used: view.used * pool.bytes,
    unshared: view.logical * pool.bytes,
    limit: perToken * reserved((each) => each.limit),
    most: most ? perToken * reserved(() => most) : null,
    pool: pool.blocks * pool.bytes,
  };
}

// Begins the curves with what the server has kept: [time, tokens, in use, shared, with cached, first token, between].
export function recall({ history }, rows) {
  rows.forEach(([time, generated, used, shared, cached, first, between], index) => {
    const [then, before] = rows[Math.max(0, index - 1)], seconds = time - then;
    if (seconds > 3) history.push({ ...history[history.length - 1], time: then + 0.4, rate: 0 }, { ...history[history.length - 1], time: time - 0.4, rate: 0 });
    history.push({ time, generated, used, shared, cached, first, between, rate: seconds > 0 ? Math.max(0, generated - before) / seconds : 0 });
  });
}

// Adds a snapshot to the curves.
export function remember({ engine, latency, view, history }) {
  const last = history[history.length - 1];
  if (last && engine.time - last.time > 3) { // nothing has happened between them
    const quiet = { ...last, rate: 0, first: null, between: null };
    history.push({ ...quiet, time: last.time + 0.4 }, { ...quiet, time: engine.time - 0.4 });
  }
  const before = history.findLast((each) => each.time <= engine.time - 0.9) || history[0];
  const seconds = before ? engine.time - before.time : 0;
  history.push({
    time: engine.time, generated: engine.counters.generated_tokens,
    rate: seconds > 0 ? Math.max(0, engine.counters.generated_tokens - before.generated) / seconds : 0,
    first: latency.first_token, between: latency.between_tokens,
    used: view.used / view.count, shared: view.shared / view.count, cached: (view.used + engine.pool.cached.length) / view.count,
  });
  while (history[0].time < engine.time - SPAN - 5) history.shift();
}

// The turn of a cached block, as far as the eviction tells: the clock passes over blocks that were found again, and
// a function of the owner's may choose any.
export function turnOf(block, cached, eviction) {
  const turn = `${cached.indexOf(block) + 1} of ${cached.length}`;
  if (eviction === "lru") return ` It is number ${turn} by its last use.`;
  return eviction === "clock" ? ` The clock comes to it as number ${turn}, and passes over it if it was found again.` : "";
}
