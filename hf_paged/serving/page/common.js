// What all parts of the page use: elements, numbers as text, and requests with the API key.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value);
  }
  element.append(...children); // strings become text, never HTML
  return element;
}

export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
export const millis = (s) => (s === 0 ? "0" : s >= 9.95 ? `${s.toFixed(0)} s` : s >= 0.9995 ? `${s.toFixed(1)} s` : `${(1000 * s).toFixed(s < 0.00995 ? 1 : 0)} ms`);
export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1000 && unit < units.length - 1; unit += 1) n /= 1024;
  return `${n.toFixed(n >= 100 || unit === 0 ? 0 : 1)} ${units[unit]}`;
}

const KEY = "hf-paged-key";
export const keys = {
  get: () => sessionStorage.getItem(KEY),
  set: (key) => sessionStorage.setItem(KEY, key),
  forget: () => sessionStorage.removeItem(KEY),
};

export function ask(path, options = {}) {
  const headers = { ...options.headers, ...(keys.get() ? { authorization: `Bearer ${keys.get()}` } : {}) };
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
}

export const post = (path, body, options = {}) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), ...options });
