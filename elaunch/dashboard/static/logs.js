// The logs of a run: the newest lines that fit the filter, and those that come.
import { clock, follow, get, h, size } from "./app.js";

const MOST = 4000; // lines on the page

export default function view(root, key, asked) {
  let stop = () => {}, older = null, typing = 0, typed = 0;
  const input = (name, attributes) => h("input", { "aria-label": name, value: asked.get(name.toLowerCase()) ?? "", oninput: soon, ...attributes });
  const ranks = input("Ranks", { class: "short", placeholder: "0,3,7-9" }), node = input("Node", { class: "short", placeholder: "all" });
  const round = input("Round", { class: "short", placeholder: "all", inputmode: "numeric" });
  const text = input("Text", { type: "search", placeholder: "Only lines with this text" });
  const stream = h("select", { "aria-label": "Stream", onchange: open }, ["", "stdout", "stderr"].map((name) => h("option", { value: name }, name || "both")));
  const keep = h("input", { type: "checkbox", checked: true });
  const back = h("button", { type: "button", onclick: more }, "Older lines");
  const note = h("p", { class: "quiet", role: "status" }, "Reading …");
  const log = h("div", { class: "log", tabindex: 0, role: "log", "aria-label": "Lines", "aria-live": "off" });
  root.append(h("div", { class: "bar" }, text, h("label", {}, "Ranks", ranks), h("label", {}, "Round", round), h("label", {}, "Node", node), stream,
    h("label", {}, keep, "Stay at the end")), log, h("div", { class: "bar" }, back, note));

  const query = () => ({ run: key, ranks: ranks.value, round: round.value, node: node.value, stream: stream.value, text: text.value });
  function soon({ timeStamp }) { // a key that closely follows another waits for the next
    clearTimeout(typing);
    typing = setTimeout(open, timeStamp - typed < 60 ? 60 : 0);
    typed = timeStamp;
  }
  function open() {
    stop();
    let first = true;
    stop = follow("/api/logs", query(), (found) => {
      if ("older" in found) { first = true; sized(found); }
      if (found.ended) { stop(); note.textContent += " The run has ended."; }
      add(found.lines, first);
      first = false;
    }, (reason) => { note.textContent = reason; });
  }
  function sized(found) {
    older = found.older;
    back.disabled = !older;
    const read = size(found.bytes - found.left);
    note.textContent = found.left ? `${read} of ${size(found.bytes)} in ${found.files} files were read, from the end.` : `All of ${found.files} files, ${read}, was read.`;
  }
  function add(lines, anew) {
    const made = lines.map(line);
    if (anew) log.replaceChildren(...made); else log.append(...made);
    while (log.childElementCount > MOST) log.firstChild.remove();
    if (keep.checked) log.scrollTop = log.scrollHeight;
  }
  async function more() {
    back.disabled = true;
    const found = await get("/api/logs", { ...query(), older: JSON.stringify(older) }).catch((error) => { note.textContent = error.message; });
    if (!found) return;
    const height = log.scrollHeight;
    log.prepend(...found.lines.map(line));
    log.scrollTop += log.scrollHeight - height;
    sized(found);
  }
  function line([came, rank, name, number, said]) {
    const where = h("span", { title: `round ${number}, ${name}, at ${clock(came)} or up to 0.1 s before` }, `${clock(came).slice(-8)} ${String(rank).padStart(3)}  `);
    return h("div", { class: name }, where, ...marked(said, text.value.toLowerCase()));
  }
  open();
  return () => { stop(); clearTimeout(typing); };
}

function marked(said, needle) {
  const found = [], low = said.toLowerCase();
  let at = 0;
  for (let next; needle && (next = low.indexOf(needle, at)) >= 0; at = next + needle.length) found.push(said.slice(at, next), h("mark", {}, said.slice(next, next + needle.length)));
  return [...found, said.slice(at)];
}
