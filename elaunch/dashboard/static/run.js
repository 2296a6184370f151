// One run: what needs attention, how far it is, its rounds, its nodes and ranks.
import { clock, follow, get, h, post, redraw, size, span, state, table } from "./app.js";

const MANY = 256; // ranks beyond which cells are small
const PAGES = { failures: "The whole report", checkpoints: "The checkpoints", logs: "The logs", stacks: "The stacks" };
const SURE_MS = 5000;
const ACTIONS = [["restart", "Restart the round", "Really end the round on all nodes?"],
  ["preempt", "Preempt", "Really save and end, to go on later?"], ["stop", "Stop", "Really stop the job on this node?"]];
const LISTED = 32; // ranks in the table below the grid, the worst first

export default function view(root, key) {
  const parts = Object.fromEntries(["head", "control", "attention", "facts", "time", "rounds", "grid", "ranks", "more"].map(
    (name) => [name, root.appendChild(h("section", { id: name }))]));
  parts.head.append(h("p", { class: "quiet" }, "Reading …"));
  const memory = { chosen: null, key, shown: {} };
  parts.grid.addEventListener("click", (event) => event.target.dataset.rank && choose(Number(event.target.dataset.rank)));
  parts.grid.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: memory.width, ArrowUp: -memory.width }[event.key];
    if (by) { event.preventDefault(); choose(Math.max(0, (memory.chosen ?? -by) + by)); }
  });
  function choose(rank) {
    memory.chosen = rank;
    draw(parts, memory, memory.run, "grid");
  }
  get("/api/control", {}).then((found) => {
    memory.allowed = found.key;
    if (memory.run) draw(parts, memory, memory.run, "control");
  }).catch(() => {}); // no buttons; a server that is gone is told beside the tabs
  return follow("/api/run", { run: key }, (run) => {
    memory.run = run;
    for (const name of Object.keys(parts)) draw(parts, memory, run, name);
  });
}

// A part is drawn again only where what it shows has changed, so that focus and selection stay.
function draw(parts, memory, run, name) {
  const made = PARTS[name](run, memory);
  const text = JSON.stringify(made.of ?? null);
  if (made.of !== undefined && memory.shown[name] === text) return;
  memory.shown[name] = text;
  redraw(parts[name], ...made.build());
}

const PARTS = {
  head: (run) => ({
    of: [run.run_id, run.state, run.live, run.reason, run.exit_code, run.attention],
    build: () => [
      h("div", { class: "title" }, h("h1", {}, run.run_id), state(run),
        run.live || run.exit_code === null || run.exit_code === undefined ? "" : h("span", { class: "quiet" }, `exit code ${run.exit_code}`)),
      run.reason && !run.bad && !run.attention.some(({ title }) => title.includes(run.reason)) ? h("div", { class: "quiet" }, run.reason) : "",
    ].filter(Boolean),
  }),
  control: (run, memory) => ({ of: [memory.allowed, run.live, run.launcher], build: () => control(run, memory) }),
  attention: (run, { key }) => ({
    of: run.attention,
    build: () => run.attention.map(({ level, title, detail, page }) => h("div", { class: `note ${level}`, role: level === "bad" ? "alert" : null },
      h("strong", {}, title), detail ? h("p", {}, detail) : "",
      PAGES[page] ? h("a", { href: `#/run/${encodeURIComponent(key)}/${page}` }, PAGES[page]) : "")),
  }),
  facts: (run) => ({
    of: run.started_at === undefined ? null : facts(run),
    build: () => run.started_at === undefined ? [] : [h("dl", { class: "facts" }, facts(run).map(([name, value, note]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value, note ? h("small", {}, note) : ""))))],
  }),
  time: (run) => ({ of: [run.job_timing ?? run.timing, run.lateness, run.verdict], build: () => time(run) }),
  rounds: (run) => ({ of: [run.history?.map((round) => ({ ...round, duration_s: 0, lasted_s: 0 })), run.state, run.live && Math.round(run.duration_s / 2)], build: () => rounds(run) }),
  grid: (run, memory) => ({ of: [run.grid, run.workers, memory.chosen], build: () => grid(run, memory) }),
  ranks: (run) => ({ of: run.workers, build: () => ranks(run) }),
  more: (run) => ({ of: [run.dir, run.argv], build: () => more(run) }),
};

// A button is pressed twice: it asks first, and forgets that after SURE_MS.
function control(run, { allowed, key }) {
  if (!allowed || !run.live || run.launcher) return [];
  const note = h("span", { class: "quiet", role: "status" });
  const buttons = ACTIONS.map(([op, text, sure]) => {
    let timer = null;
    const forget = () => { clearTimeout(timer); timer = null; button.textContent = text; };
    const button = h("button", { type: "button", id: `do-${op}`, onclick: async () => {
      if (timer === null) {
        button.textContent = sure;
        timer = setTimeout(forget, SURE_MS);
        return;
      }
      forget();
      button.disabled = true;
      note.textContent = "Asking …";
      try {
        note.textContent = (await post("/api/control", { run: key, op }, { "x-elaunch-control": allowed })).done;
      } catch (error) { note.textContent = error.message; }
      button.disabled = false;
    } }, text);
    return button;
  });
  return [h("div", { class: "bar below" }, buttons, note)];
}

function facts(run) {
  const steps = run.workers.map((worker) => field(run, worker, "step")).filter((step) => step !== null);
  const low = Math.min(...steps), high = Math.max(...steps);
  const latest = run.latest_checkpoint, saves = run.saves;
  const allowed = run.restarts.budget === "lifetime" ? "" : `, ${run.restarts.without_progress} without progress`;
  return [
    ["Step", steps.length ? (low === high ? `${high}` : `${low} – ${high}`) : "–",
      steps.length ? "" : !run.progress ? "not watched" : run.round ? `none in round ${run.round}` : run.live ? "none reported yet" : "none was reported"],
    [run.live ? "Running for" : "Lasted", span(run.duration_s), `since ${clock(run.started_at)}`],
    ["Round", `${run.round}`, run.resumed ?? (run.checkpoint ? `from step ${run.checkpoint.step}` : "")],
    ["Restarts", `${run.restarts.used}`, `${run.restarts.max} allowed${allowed}`],
    ["Ranks", `${run.world_size ?? "–"}`, run.grid.length > 1 ? `on ${run.node_count ?? run.grid.length} nodes` : run.agent.host],
    ...(run.checkpoint_dir ? [["Checkpoint", latest ? `step ${latest.step}` : "none yet",
      saves?.saving !== undefined && saves?.saving !== null && run.live ? `step ${saves.saving} is being written`
        : latest ? `at ${clock(run.read_at - latest.age_s)}` : ""]] : []),
  ];
}

// Where the time went: classes of the same kind share a hue, and what is small is named in the table only.
function time(run) {
  const timing = run.job_timing ?? run.timing;
  if (!timing || !(timing.wall_s > 0)) return [];
  const order = Object.keys(run.time_classes), part = (name) => (timing.seconds[name] ?? 0) / timing.wall_s;
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const named = ["train", ...order.filter((name) => name !== "train").sort((a, b) => part(b) - part(a))].filter((name) => part(name) >= 0.0005);
  const bar = h("div", { class: "time", role: "img", "aria-label": named.map((name) => `${run.time_classes[name]} ${percent(part(name))}`).join(", ") },
    named.map((name) => {
      const piece = h("i", { class: `t-${name}`, title: `${run.time_classes[name]}: ${span(timing.seconds[name])}, ${percent(part(name))}` });
      piece.style.width = `${100 * part(name)}%`;
      return piece;
    }));
  const legend = h("ul", { class: "legend time-legend" }, named.map((name) => h("li", {}, h("i", { class: `t-${name}` }), `${run.time_classes[name]} `, h("b", {}, percent(part(name))))));
  const rows = [...(run.verdict ?? []).filter(([name]) => name !== "goodput"), ...(run.lateness ? [["comes last", late(run.lateness)]] : [])];
  return [h("h2", {}, "Where the time went"), bar, legend, h("dl", { class: "said" }, rows.map(([name, text]) => h("div", { class: name === "advice" ? "advice" : "" }, h("dt", {}, name), h("dd", {}, text))))];
}

function late({ ranks: [first], collectives, held, seconds, why }) {
  if (!first) return "no rank";
  return `rank ${first.rank} in ${first.last} of ${collectives} collectives, ${(1000 * first.behind_s).toPrecision(3)} ms behind; the others waited ${Math.round(100 * held)} % of ${span(seconds)}${why ? `; ${why}` : ""}`;
}

const field = (run, worker, name) => worker[run.worker_fields.indexOf(name)];

function rounds(run) {
  if (!run.history?.length) return [];
  const begin = run.history[0].started_at;
  const end = Math.max(run.live ? run.read_at : run.ended_at ?? 0, ...run.history.map((r) => r.ended_at ?? r.started_at));
  const place = (at) => 100 * (at - begin) / Math.max(end - begin, 0.001);
  const failed = new Set(run.failures.map((failure) => failure.round));
  const bar = h("div", { class: "rounds", role: "img", "aria-label": `${run.history.length} rounds over ${span(end - begin)}` },
    run.history.map((round) => {
      const until = round.ended_at ?? end;
      const piece = h("i", { class: `${round.ended_at === null && run.live ? "live" : ""} ${failed.has(round.round) ? "failed" : ""}`,
        title: `round ${round.round}: ${lasted(round)}${round.reason ? `, after: ${round.reason}` : ""}` });
      piece.style.left = `${place(round.started_at)}%`;
      piece.style.width = `${place(until) - place(round.started_at)}%`;
      return piece;
    }));
  const causes = Object.fromEntries(run.failures.map((failure) => [failure.round, failure]));
  const rows = [...run.history].reverse().map((round) => ({ cells: [round.round, clock(round.started_at),
    lasted(round), round.recovery_s === null ? "–" : `${round.recovery_s.toFixed(3)} s`,
    round.resumed_step, round.ended_at === null && run.live ? "runs" : how(causes[round.round]) ?? after(run, round)] }));
  return [h("h2", {}, "Rounds"), bar, h("div", { class: "scale" }, h("span", {}, clock(begin)), h("span", {}, run.live ? "now" : clock(end))),
    table([["Round", "number"], ["Started"], ["Lasted", "number"], ["Recovery", "number spare"], ["From step", "number spare"], ["How it ended", "wide"]], rows)];
}

const lasted = (round) => round.duration_s === null ? "–" : span(round.duration_s);
// A headline has the message of its rank; that of the first to fail may be a victim's.
const how = (failure) => failure && [failure.summary, failure.summary === failure.ended ? failure.message : ""].filter(Boolean).join(": ");

function after(run, round) {
  const next = run.history.find((other) => other.round > round.round);
  return next?.reason ?? (run.live ? "–" : run.reason ?? run.state);
}

function grid(run, memory) {
  if (!run.grid?.length || !run.grid.some((node) => node.slots)) return [];
  const workers = new Map(run.workers.map((worker) => [worker[0], worker]));
  const limit = run.progress?.limit_s;
  memory.width = Math.max(...run.grid.map((node) => node.slots)) > 16 ? 8 : run.grid[0].slots;
  const cells = (node) => Array.from({ length: node.slots }, (_, slot) => {
    const worker = workers.get(node.first + slot);
    const silent = worker && limit && field(run, worker, "silent_s") > limit / 2;
    return h("i", { class: `${worker ? worker[2] : "far"} ${silent ? "quiet-rank" : ""} ${memory.chosen === node.first + slot ? "chosen" : ""}`,
      "data-rank": node.first + slot, title: `rank ${node.first + slot}` });
  });
  const counts = {};
  for (const worker of run.workers) counts[worker[2]] = (counts[worker[2]] ?? 0) + 1;
  const summary = Object.entries(counts).map(([name, number]) => `${number} ${name.toLowerCase()}`).join(", ");
  const chosen = workers.get(memory.chosen);
  const text = chosen ? described(run, chosen) : memory.chosen === null ? `${summary}. Choose a rank with a click or the arrow keys.`
    : `rank ${memory.chosen}: ${noteOf(run, memory.chosen) || "its node has not answered yet"}`;
  return [h("h2", {}, "Nodes and ranks"),
    h("div", { class: `grid ${run.world_size > MANY ? "many" : ""}`, tabindex: 0, role: "group", "aria-label": "Ranks by node" },
      run.grid.map((node) => h("div", { class: "node" }, h("b", { title: node.host }, node.host), node.note ? h("small", { class: "quiet" }, node.note) : "", h("div", { class: "slots" }, cells(node))))),
    h("p", { class: "legend", "aria-live": "polite" }, text, chosen ? [" · ", h("a", { href: `#/run/${encodeURIComponent(run.key)}/logs?ranks=${memory.chosen}` }, "its log")] : "")];
}

const noteOf = (run, rank) => run.grid.find((node) => rank >= node.first && rank < node.first + node.slots)?.note;

function described(run, worker) {
  const { rank, state, step, doing, silent_s, cpu_percent, rss_bytes, pid, exit } = Object.fromEntries(
    run.worker_fields.map((name, i) => [name, worker[i]]));
  return [noteOf(run, rank), `rank ${rank}: ${state}`, step !== null && `step ${step}`, doing && `last call ${doing}`, silent_s !== null && `reported ${span(silent_s)} ago`,
    cpu_percent !== null && `CPU ${Math.round(cpu_percent)} %`, rss_bytes !== null && size(rss_bytes), pid && `pid ${pid}`, exit].filter(Boolean).join(" · ");
}

function ranks(run) {
  if (!run.workers.length) return [];
  const worst = { FAILED: 0, GONE: 1, STOPPED: 2, STARTING: 3 };
  const order = [...run.workers].sort((a, b) => (worst[a[2]] ?? 9) - (worst[b[2]] ?? 9)
    || (run.workers.length > LISTED ? (field(run, b, "silent_s") ?? 0) - (field(run, a, "silent_s") ?? 0) : 0) || a[0] - b[0]);
  const number = (name, text) => (worker) => { const value = field(run, worker, name); return value === null ? null : text(value); };
  const columns = [["Rank", "number", (w) => w[0]], ["State", "", (w) => w[2]], ["Step", "number", number("step", String)],
    ["Reported", "number", number("silent_s", (s) => `${span(s)} ago`)], ["CPU", "number", number("cpu_percent", (c) => `${Math.round(c)} %`)],
    ["Memory", "number spare", number("rss_bytes", size)], ["pid", "number spare", number("pid", String)],
    ["", "wide", (w) => [field(run, w, "doing") && `last call ${field(run, w, "doing")}`, field(run, w, "exit")].filter(Boolean).join(", ") || null]]
    .filter(([, , of], i) => i < 2 || run.workers.some((worker) => of(worker) !== null));
  return [run.workers.length > LISTED ? h("h2", {}, `The ${LISTED} ranks to look at first, of ${run.workers.length}`) : "",
    table(columns, order.slice(0, LISTED).map((worker) => ({ cells: columns.map(([, , of]) => of(worker)) })))];
}

function more(run) {
  if (!run.argv) return [h("p", { class: "quiet mono" }, run.dir)];
  const rows = [["Command", run.launcher ? run.argv.join(" ") : ["elaunch", ...run.argv.slice(1)].join(" ")], ["Directory", run.cwd],
    [run.launcher ? "Script" : "Agent", `pid ${run.agent.pid} on ${run.agent.host}, user ${run.agent.user}`],
    ["Record", run.dir], ["Logs", run.log_dir ?? "–"], ["Checkpoints", run.checkpoint_dir ?? "–"]];
  return [h("details", {}, h("summary", {}, "Details"),
    table([[""], ["", "wide"]], rows.map(([name, text]) => ({ cells: [name, h("span", { class: "mono" }, text)] }))))];
}
