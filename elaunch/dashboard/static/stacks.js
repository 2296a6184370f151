// Where the ranks of a running job are, of all its nodes; read when the button is pressed only.
import { clock, get, h } from "./app.js";
import { ranks } from "./failures.js";

export default function view(root, key) {
  const button = h("button", { type: "button", onclick: read }, "Read the stacks");
  const note = h("p", { class: "quiet", role: "status" }, "Every worker is asked where its Python code is; it goes on meanwhile.");
  const place = h("div", {});
  root.append(h("h1", {}, "Stacks"), h("div", { class: "bar below" }, button, note), place);
  async function read() {
    button.disabled = true;
    note.textContent = "Asking …";
    try {
      const found = await get("/api/stacks", { run: key });
      note.textContent = `Read at ${clock(found.taken_at)}; again at most every ${found.every_s} s.`;
      place.replaceChildren(...shown(found));
    } catch (error) { note.textContent = error.message; }
    button.disabled = false;
  }
}

function shown({ groups, problems, silent }) {
  const missing = [...problems.map((one) => [ranks(one.ranks), one.text]), ...silent.map((one) => [`node ${one.node}`, one.text])];
  const stack = (frames) => h("pre", { tabindex: 0 }, frames.join("\n"));
  return [...missing.map(([whose, why]) => h("div", { class: "note" }, h("strong", {}, `No stacks of ${whose}`), h("p", {}, why))),
    ...groups.map((group) => h("article", { class: "card" },
      h("div", { class: "title" }, h("strong", {}, ranks(group.ranks)), groups.length > 1 ? h("span", { class: "quiet" }, `${group.ranks.length} of ${groups.reduce((sum, one) => sum + one.ranks.length, 0)}`) : ""),
      stack(group.main), group.threads.map((thread) => h("details", {}, h("summary", {}, `Another thread of ${ranks(thread.ranks)}`), stack(thread.stack))))),
    groups.length || missing.length ? "" : h("p", { class: "quiet" }, "No worker runs now.")].filter(Boolean);
}
