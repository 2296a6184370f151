// The failed rounds of a run, the newest first: report, and the stacks that were taken.
import { get, h } from "./app.js";

export const ranks = (numbers) => `${numbers.length === 1 ? "rank" : "ranks"} ${numbers.slice(0, 16).join(", ")}${numbers.length > 16 ? " …" : ""}`;

export default function view(root, key) {
  get("/api/failures", { run: key }).then((cards) => {
    root.replaceChildren(h("h1", {}, "Failures"), cards.length ? "" : h("p", { class: "quiet" }, "No round has failed on this node."),
      ...cards.map(({ round, text, problem, card }) => h("article", { class: "card" },
        h("div", { class: "title" }, h("strong", {}, `Round ${round}`), h("span", { class: "quiet" }, [card?.code, card?.host].filter(Boolean).join(" · "))),
        text ? h("pre", {}, text) : "", problem ? h("p", { class: "quiet" }, problem) : "",
        stacks(card?.hang ?? card?.meanwhile))));
  }).catch((error) => root.replaceChildren(h("p", { class: "note bad" }, error.message)));
}

function stacks(found) {
  if (!Array.isArray(found?.stacks) || !found.stacks.length) return "";
  return h("div", {}, h("h2", {}, "Stacks, the smallest group first"), found.stacks.map((group) => h("details", { open: true },
    h("summary", {}, ranks(group.ranks ?? [])), h("pre", {}, (group.main ?? []).join("\n")))));
}
