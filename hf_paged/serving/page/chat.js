// The conversation: sends prompts to the server itself, by its own routes, and shows the answers as they come.

import { $, make, post, text } from "./common.js";
import { state } from "./model.js";

const turns = []; // {role, content}
const pictures = []; // {name, url}: of the next prompt, as data URLs
const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
let stop = null; // of the answer that is coming

export const isAnswering = () => stop !== null;

export function startChat(server, onChange) {
  const form = $("ask"), area = $("ask-text");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (stop === null && area.value.trim()) send(server, area.value.trim(), pictures.splice(0), onChange);
    showPictures();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  $("ask-stop").addEventListener("click", () => stop && stop.abort());
  $("ask-new").addEventListener("click", () => { turns.length = 0; $("talk").replaceChildren(); });
  $("ask-tokens").max = String(server.max_model_len || 4096);
  if (!server.has_chat_template) text($("ask-new"), "Clear");
  if (server.has_chat_template && server.takes_images) startPictures(form, area);
}

// Pictures come by a button, by dragging, and from the clipboard.
function startPictures(form, area) {
  const files = $("ask-files"), button = $("ask-attach");
  button.hidden = false;
  button.addEventListener("click", () => files.click());
  files.addEventListener("change", () => { add(files.files); files.value = ""; });
  area.addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"])
    form.addEventListener(kind, (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      form.classList.toggle("drop", kind === "dragenter" || kind === "dragover");
      if (kind === "drop") add(event.dataTransfer.files);
    });
}

async function add(files) {
  for (const file of files) {
    if (!IMAGES.includes(file.type)) {
      show("error", `${file.name || "this file"} is ${file.type || "of an unknown type"}; pictures are PNG, JPEG, WebP or GIF`);
      continue;
    }
    const reader = new FileReader();
    const loaded = new Promise((done, failed) => { reader.onload = done; reader.onerror = () => failed(reader.error); });
    reader.readAsDataURL(file);
    try {
      await loaded;
      pictures.push({ name: file.name || "picture", url: reader.result });
    } catch (error) {
      show("error", `${file.name}: ${error.message}`);
    }
  }
  showPictures();
}

function showPictures() {
  const buttons = pictures.map((each, index) => {
    const label = `Remove ${each.name}`;
    const button = make("button", { type: "button", title: label, "aria-label": label }, thumbnail(each));
    button.addEventListener("click", () => { pictures.splice(index, 1); showPictures(); $("ask-attach").focus(); });
    return button;
  });
  $("ask-images").replaceChildren(...buttons);
  $("ask-images").hidden = !buttons.length;
}

const thumbnail = ({ name, url }) => make("img", { src: url, alt: name });

function show(kind, ...children) {
  const turn = make("div", { class: `turn ${kind}` }, ...children);
  $("talk").append(turn);
  $("talk").scrollTop = $("talk").scrollHeight;
  return turn;
}

async function send(server, prompt, images, onChange) {
  for (const id of [...state.own.keys()].slice(0, -200)) state.own.delete(id);
  const kind = $("ask-kind").value, times = Number($("ask-times").value);
  stop = new AbortController();
  $("ask-stop").hidden = false;
  $("ask-send").disabled = true;
  $("ask-text").value = "";
  show("user", ...(images.length ? [make("div", { class: "pictures" }, ...images.map(thumbnail))] : []), prompt);
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  turns.push({ role: "user", content: images.length ? [...parts, { type: "text", text: prompt }] : prompt });
  try {
    const answer = await (times > 1 ? sendMany(server, times, kind) : sendOne(server, kind, onChange));
    if (answer !== null && server.has_chat_template) turns.push({ role: "assistant", content: answer });
    else turns.pop();
  } catch (error) {
    turns.pop();
    const isStopped = error.name === "AbortError";
    show("error", isStopped ? "stopped" : String(error.message));
    if (!isStopped && !$("ask-text").value) $("ask-text").value = prompt; // to be sent again
  }
  stop = null;
  $("ask-stop").hidden = true;
  $("ask-send").disabled = false;
}

function options(kind) {
  const tokens = Number($("ask-tokens").value) || 64;
  if (kind === "beams") return { max_tokens: tokens, n: 4, use_beam_search: true, stream: true };
  return kind === "1" ? { max_tokens: tokens, stream: true } : { max_tokens: tokens, n: Number(kind), temperature: 1, stream: true };
}

// The events of an answer. Raises an Error with the server's words if it refuses or fails.
async function* events(path, body) {
  const answer = await post(path, body, { signal: stop.signal });
  if (!answer.ok) {
    const problem = await answer.json().catch(() => null);
    throw new Error(problem && problem.error ? problem.error.message : `the server answers ${answer.status}`);
  }
  const ids = (answer.headers.get("x-engine-request-ids") || "").split(",").filter(Boolean);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield { ids, event };
    }
  }
}

async function sendOne(server, kind, onChange) {
  const n = kind === "beams" ? 4 : Number(kind), isChat = server.has_chat_template;
  const prompt = isChat ? { messages: turns } : { prompt: turns[turns.length - 1].content };
  const boxes = Array.from({ length: n }, () => make("div", { class: "turn" }, kind === "beams" ? "searching …" : "…"));
  const foot = make("p", { class: "foot" }), texts = Array(n).fill(""), shown = Array(n).fill(""), began = performance.now();
  show("answer", make("div", { class: n > 1 ? "answers" : "" }, ...boxes), foot);
  const more = { return_token_ids: true, stream_options: { include_usage: true } };
  for await (const { ids, event } of events(isChat ? "v1/chat/completions" : "v1/completions", { ...prompt, ...options(kind), ...more })) {
    const own = state.own.get(ids[0]) || { prompt: [], made: n === 1 ? [] : null };
    if (!state.own.has(ids[0])) state.own.set(ids[0], own);
    for (const choice of event.choices) {
      const piece = choice.delta ? choice.delta.content || "" : choice.text;
      const thought = (choice.delta && choice.delta.reasoning_content) || "";
      own.prompt = choice.prompt_token_ids || own.prompt;
      if (own.made) own.made.push(...(choice.token_ids || []));
      if (!piece && !thought) continue;
      if (!shown.some(Boolean)) onChange(); // its first step has ended: the request has blocks
      texts[choice.index] += piece; // goes back to the model in the next turn; its reasoning does not
      shown[choice.index] += thought + piece;
      text(boxes[choice.index], shown[choice.index].trim());
      $("talk").scrollTop = $("talk").scrollHeight;
    }
    if (event.prompt_token_ids) {
      own.prompt = event.prompt_token_ids;
      onChange();
    }
    if (event.usage) {
      const { prompt_tokens: read, completion_tokens: made, prompt_tokens_details: { cached_tokens: cached } } = event.usage;
      text(foot, `${ids[0]}: ${read} prompt tokens, ${cached} of them from the prefix cache; ${made} made in ${((performance.now() - began) / 1000).toFixed(1)} s`);
    }
  }
  return texts[0];
}

// The same prompt many times in one request, as independent samples: a small load.
async function sendMany(server, times, kind) {
  const foot = show("answer", "sending"), began = performance.now();
  if (turns.some((turn) => Array.isArray(turn.content))) throw new Error("a chat with pictures is sent once; choose that, or begin a new chat");
  let prompt = turns[turns.length - 1].content, made = 0;
  if (server.has_chat_template) {
    const answer = await post("tokenize", { messages: turns }, { signal: stop.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    prompt = (await answer.json()).tokens;
  }
  const body = { prompt: Array(times).fill(prompt), ...options(kind), return_token_ids: true };
  if (kind === "1") body.temperature = 1;
  for await (const { ids, event } of events("v1/completions", body)) {
    for (const id of ids) if (!state.own.has(id)) state.own.set(id, { prompt: Array.isArray(prompt) ? prompt : [], made: null });
    for (const choice of event.choices) made += (choice.token_ids || []).length;
    text(foot, `${times} requests, ${ids[0]} to ${ids[ids.length - 1]}: ${made} tokens in ${((performance.now() - began) / 1000).toFixed(1)} s`);
  }
  return null;
}
