// The metrics of a run: a chart for each, of some ranks or of all in one, by step or by time.
import { get, h } from "./app.js";
import { Chart } from "./chart.js";

const AGAIN_MS = 3000;

export default function view(root, key) {
  const charts = new Map();
  let axis = "step", zoom = null, stopped = false, timer = 0;
  const ranks = h("input", { class: "short", placeholder: "all", "aria-label": "Ranks", onchange: () => load() });
  const button = (name) => h("button", { type: "button", "aria-pressed": String(name === axis), onclick: () => choose(name) }, `By ${name}`);
  const buttons = { step: button("step"), time: button("time") };
  const whole = h("button", { type: "button", hidden: true, onclick: () => zoomTo(null) }, "Show all");
  const note = h("p", { class: "quiet" }, "Reading …");
  const place = h("div", { class: "charts" });
  root.append(h("div", { class: "bar" }, h("label", {}, "Ranks", ranks), buttons.step, buttons.time, whole,
    h("a", { href: `/api/csv?${new URLSearchParams({ run: key })}`, download: true }, "CSV")), note, place);

  function choose(name) {
    axis = name;
    for (const [other, element] of Object.entries(buttons)) element.setAttribute("aria-pressed", String(other === name));
    zoomTo(null);
  }
  function zoomTo(range) {
    zoom = range;
    whole.hidden = !range;
    load();
  }
  async function load() {
    clearTimeout(timer);
    try {
      const found = await get("/api/metrics", { run: key });
      if (stopped) return;
      note.textContent = said(found);
      await Promise.all(found.metrics.map(async ({ group, name }) => {
        const id = JSON.stringify([group, name]);
        if (!charts.has(id)) {
          charts.set(id, new Chart(`${group} · ${name}`, zoomTo));
          place.append(charts.get(id).element);
        }
        const range = zoom ? { from: zoom[0], to: zoom[1] } : {};
        const { curves } = await get("/api/curves", { run: key, group, name, x: axis, ranks: ranks.value, ...range });
        charts.get(id).show({ curves, axis, zoom, markers: found.markers });
      }));
    } catch (error) {
      note.textContent = error.message;
    }
    if (!stopped) timer = setTimeout(() => document.hidden || load(), AGAIN_MS);
  }
  const woken = () => document.hidden || load();
  document.addEventListener("visibilitychange", woken);
  load();
  return () => { stopped = true; clearTimeout(timer); document.removeEventListener("visibilitychange", woken); };
}

function said({ metrics, torn, separate }) {
  if (!metrics.length) return "Nothing was reported on this node: ctx.train.report_training_metrics(…) does.";
  const lost = metrics.reduce((sum, metric) => sum + metric.not_finite, 0);
  const most = Math.max(...metrics.map((metric) => metric.ranks));
  return ["Drag to zoom, double-click to go back.",
    most > separate && `${most} ranks are folded: the median, with all between the lowest and the highest.`,
    "Red: a round began anew. Dotted: a checkpoint.",
    lost && `${lost} values are no finite numbers and not drawn.`, torn && `${torn} lines are no rows.`].filter(Boolean).join(" ");
}
