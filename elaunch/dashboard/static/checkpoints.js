// What is in the run's checkpoint directory, the newest first.
import { clock, get, h, size, table } from "./app.js";

export default function view(root, key) {
  get("/api/checkpoints", { run: key }).then((found) => {
    const all = [...(found.unfinished ?? []), ...(found.checkpoints ?? []).slice().reverse(), ...(found.quarantined ?? [])];
    // A metric is there by its name and as group.name, which says more where two groups have it.
    const repeats = (name) => all.every(({ metrics: of = {} }) => !(name in of) || of[name] === of[name.slice(name.indexOf(".") + 1)]);
    const metrics = [...new Set(all.flatMap((one) => Object.keys(one.metrics ?? {})))].filter((name) => !name.includes(".") || !repeats(name)).slice(0, 4);
    const number = (value) => typeof value === "number" ? +value.toPrecision(6) : value ?? null;
    const state = (one) => [one.state, one.reason, found.resumed_from?.[one.name] && `${found.resumed_from[one.name]} has resumed from it`, one.pinned && "pinned"].filter(Boolean).join(", ");
    root.replaceChildren(h("h1", {}, "Checkpoints"), h("p", { class: "quiet mono" }, found.directory ?? "This run has no --checkpoint-dir."),
      all.length ? table([["Step", "number"], ["Name"], ["State", "wide"], ["Size", "number"], ["Written"], ["Round", "number spare"], ["Format", "spare"], ...metrics.map((name) => [name, "number spare"])],
        all.map((one) => ({ class: one.state === "committed" || one.state === "complete" ? "" : "gone", cells: [one.step, h("span", { class: "mono" }, one.name),
          h("span", { class: one.state === "damaged" || one.state === "quarantined" ? "state bad" : "" }, state(one)), size(one.size), clock(one.written), one.round, one.format, ...metrics.map((name) => number(one.metrics?.[name]))] })))
        : found.directory ? h("p", { class: "quiet" }, "Nothing was saved yet.") : "");
  }).catch((error) => root.replaceChildren(h("p", { class: "note bad" }, error.message)));
}
