// The frame of the page: the address behind #, the feed that a view follows, and what views share.
// Text of others gets into the page as text only: `h` makes elements, never markup.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// Put new children into an element; what has the focus there keeps it, by its place.
export function redraw(element, ...children) {
  const reached = () => [...element.querySelectorAll("a, button, summary, [tabindex]")];
  const at = reached().indexOf(document.activeElement);
  element.replaceChildren(...children);
  if (at >= 0) reached()[at]?.focus({ preventScroll: true });
}

async function ask(path, query, options) {
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`, options);
  if (!answer.ok) throw new Error((await answer.text()).trim() || `${answer.status}`);
  return answer.json();
}

export async function get(path, query) {
  const found = await ask(path, query, {});
  wasRead(found.taken_at ?? Date.now() / 1000);
  return found;
}
export const post = (path, query, headers) => ask(path, query, { method: "POST", headers });

const pad = (number) => String(number).padStart(2, "0");

export function clock(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const date = new Date(seconds * 1000);
  const time = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  return Date.now() - date < 86400e3 ? time : `${day} ${time}`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)}m ${pad(s % 60)}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}h ${pad(Math.floor(s / 60) % 60)}m`;
  return `${Math.floor(s / 86400)}d ${pad(Math.floor(s / 3600) % 24)}h`;
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; bytes >= 1024 && at < 4; at++) bytes /= 1024;
  return `${at && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[at]}`;
}

export function table(columns, rows) {
  const head = h("tr", {}, columns.map(([name, kind]) => h("th", { class: kind }, name)));
  const body = rows.map(({ cells, ...attributes }) => h("tr", attributes, cells.map((cell, i) =>
    h("td", { class: columns[i][1] }, cell === null || cell === undefined ? "–" : cell))));
  const label = `Table: ${columns.map(([name]) => name).join(", ")}`; // a phone scrolls in it
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

export const state = (run) =>
  h("span", { class: `state ${run.bad ? "bad" : run.live ? "live" : ""}` }, run.state);

const main = document.getElementById("main");
const pulse = document.getElementById("pulse");
const TABS = [["", "Overview"], ["metrics", "Metrics"], ["logs", "Logs"], ["checkpoints", "Checkpoints"], ["failures", "Failures"], ["stacks", "Stacks"]];
let leave = () => {}, since = "";

function wasRead(seconds) {
  since = `read at ${clock(seconds)}`;
  pulse.className = "";
  pulse.textContent = since;
}

function lost(why) {
  pulse.className = "lost";
  pulse.textContent = why;
}

// A feed sends the whole document at each change; it rests while nobody looks at the page.
// Why it is refused, an event source does not show: that is asked for once more.
export function follow(path, query, show, refused = lost) {
  let source = null;
  const open = () => {
    const own = source = new EventSource(`${path}?${new URLSearchParams(query)}`);
    source.onmessage = (event) => {
      const found = JSON.parse(event.data);
      wasRead(found.read_at ?? Date.now() / 1000);
      show(found);
    };
    source.onerror = () => {
      const silent = () => lost(since ? `${since}, no answer since` : "the dashboard does not answer");
      if (own.readyState !== EventSource.CLOSED) silent();
      else get(path, query).then(silent, ({ message }) => { if (own === source) refused(message); });
    };
  };
  const look = () => { source?.close(); if (!document.hidden) open(); };
  document.addEventListener("visibilitychange", look);
  look();
  return () => { source?.close(); source = null; document.removeEventListener("visibilitychange", look); };
}

function runsView(root, first) {
  return follow("/api/runs", {}, ({ runs, first: chosen }) => {
    if (first && chosen) { location.replace(`#/run/${encodeURIComponent(chosen)}`); return; }
    const live = runs.filter((run) => run.live).length;
    redraw(root,
      h("h1", {}, "Runs"),
      h("p", { class: "quiet" }, runs.length
        ? `${runs.length} ${runs.length === 1 ? "run" : "runs"}, ${live} running`
        : "No run of this user is recorded here yet: elaunch run train.py begins one."),
      runs.length ? table(
        [["Run"], ["State"], ["Round", "number spare"], ["Restarts", "number spare"], ["Ranks", "number spare"],
          ["Started", "spare"], ["Lasted", "number"], ["Why", "wide"]],
        runs.map((run) => {
          const to = `#/run/${encodeURIComponent(run.key)}`;
          return {
            class: "link", onclick: () => { location.hash = to; },
            cells: [h("a", { href: to }, run.name_shown), state(run),
              run.round, run.restarts?.used, run.world_size, clock(run.started_at), span(run.duration_s),
              run.awaited ? h("strong", {}, `attention: ${run.awaited.text}`) : run.reason ?? ""],
          };
        })) : "");
  });
}

function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; } // typed by hand
}

async function route() {
  leave();
  leave = () => {};
  const [, kind, key, page = ""] = location.hash.split("?")[0].split("/").map(decoded);
  const asked = new URLSearchParams(location.hash.split("?")[1] ?? "");
  const tabs = document.getElementById("tabs");
  const root = h("div", {});
  main.replaceChildren(root);
  pulse.textContent = since = "";
  document.title = key ? `${key} – elaunch` : "elaunch";
  const named = document.getElementById("run");
  named.textContent = kind === "run" ? decoded(key) : "";
  named.href = kind === "run" ? `#/run/${encodeURIComponent(key)}` : "#/";
  tabs.replaceChildren(...(kind === "run" ? TABS : []).map(([name, text]) => h("a", {
    href: `#/run/${encodeURIComponent(key)}${name && "/" + name}`, "aria-current": name === page && "page",
  }, text)));
  const known = TABS.some(([name]) => name === page);
  if (kind !== "run" || !known) { leave = runsView(root, location.hash === ""); return; }
  const view = await import(`/static/${page || "run"}.js`);
  if (root.isConnected) leave = view.default(root, key, asked) ?? (() => {});
}

document.getElementById("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const shown = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = localStorage.theme = shown === "dark" ? "light" : "dark";
});
if (localStorage.theme) document.documentElement.dataset.theme = localStorage.theme;
addEventListener("hashchange", route);
route();
