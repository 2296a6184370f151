// One metric on a canvas: lines with a band where ranks are folded, markers, a crosshair, zoom.
import { clock, h } from "./app.js";

const LEFT = 58, BOTTOM = 22, TOP = 8;
const short = (value) => Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(5));

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * unit >= raw) * unit;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

export class Chart {
  // `zoomed` is called with the part of x that was chosen, or with null for all of it.
  constructor(title, zoomed) {
    this.canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": title });
    this.output = h("output");
    this.element = h("figure", { class: "chart" }, h("h3", {}, title), h("button", { type: "button", class: "png",
      "aria-label": `PNG of ${title}`, onclick: () => this.save(title) }, "PNG"), this.output, this.canvas);
    this.element.style.margin = "0 0 20px";
    this.data = { curves: [], markers: [], axis: "step" };
    this.at = null;
    this.from = null;
    const x = (event) => this.value(event.clientX - this.canvas.getBoundingClientRect().left);
    this.canvas.addEventListener("pointerdown", (event) => { this.from = x(event); this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointermove", (event) => { this.at = x(event); this.near = event.offsetY; this.draw(); });
    this.canvas.addEventListener("pointerup", (event) => {
      const to = x(event), from = this.from;
      this.from = null;
      if (from !== null && Math.abs(this.place(to) - this.place(from)) > 6) zoomed([Math.min(from, to), Math.max(from, to)]);
      else this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    this.canvas.addEventListener("dblclick", () => zoomed(null));
    this.canvas.addEventListener("keydown", (event) => {
      const [low, high] = this.range(), middle = this.at ?? (low + high) / 2, step = (high - low) / 50;
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") { event.preventDefault(); this.at = middle + (event.key === "ArrowLeft" ? -step : step); this.draw(); }
      if (event.key === "+") zoomed([middle - (high - low) / 4, middle + (high - low) / 4]);
      if (event.key === "Escape") zoomed(null);
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  save(title) {
    const { canvas } = this, ratio = devicePixelRatio || 1, picture = h("canvas", { width: canvas.width, height: canvas.height + 30 * ratio }), pen = picture.getContext("2d");
    const style = getComputedStyle(canvas);
    pen.fillStyle = this.resolve(style, "--page");
    pen.fillRect(0, 0, picture.width, picture.height);
    pen.fillStyle = this.resolve(style, "--text");
    pen.font = `${14 * ratio}px system-ui, sans-serif`;
    pen.fillText(title, 8 * ratio, 20 * ratio);
    pen.drawImage(canvas, 0, 30 * ratio);
    picture.toBlob((blob) => {
      const link = h("a", { href: URL.createObjectURL(blob), download: `${title.replaceAll(/[^\w.-]+/g, "-")}.png` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }

  show(data) { this.data = data; this.draw(); }

  range() {
    const xs = this.data.curves.filter((curve) => curve.x.length).flatMap(({ x }) => [x[0], x[x.length - 1]]);
    const [low, high] = this.data.zoom ?? [Math.min(...xs), Math.max(...xs)];
    return low < high ? [low, high] : [low - 0.5, low + 0.5];
  }

  place(value) { const [low, high] = this.range(); return LEFT + (value - low) / (high - low) * (this.width - LEFT - 8); }
  value(place) { const [low, high] = this.range(); return low + (place - LEFT) / (this.width - LEFT - 8) * (high - low); }

  draw() {
    const { canvas, data } = this, ratio = devicePixelRatio || 1, pen = canvas.getContext("2d");
    this.width = canvas.clientWidth;
    const height = canvas.clientHeight, { curves, markers, axis } = data;
    if (!this.width || !curves.some((curve) => curve.x.length)) return;
    canvas.width = this.width * ratio;
    canvas.height = height * ratio;
    pen.scale(ratio, ratio);
    const style = getComputedStyle(canvas), colour = (name) => { pen.strokeStyle = pen.fillStyle = this.resolve(style, name); };
    let low = Infinity, high = -Infinity;
    for (const { y, low: l, high: u } of curves) for (const values of [l ?? y, u ?? y]) for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
    if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
    const up = (v) => TOP + (high - v) / (high - low) * (height - TOP - BOTTOM), [first, last] = this.range();
    pen.font = "12px system-ui, sans-serif";
    pen.lineWidth = 1;
    for (const v of ticks(low, high, 5)) {
      colour("--line"); this.line(pen, [LEFT, this.width - 8], [up(v), up(v)]);
      colour("--quiet"); pen.textAlign = "right"; pen.fillText(short(v), LEFT - 8, up(v) + 4);
    }
    const written = (v) => axis === "time" ? clock(v).slice(-8) : short(v);
    for (const v of ticks(first, last, Math.max(4, this.width / 110))) { pen.textAlign = "center"; pen.fillText(written(v), this.place(v), height - 5); }
    pen.save(); pen.beginPath(); pen.rect(LEFT, 0, this.width - LEFT - 8, height - BOTTOM + 1); pen.clip();
    for (const marker of markers.filter((m) => m[axis] !== null && m[axis] !== undefined)) {
      colour(marker.kind === "restart" ? "--bad" : "--idle");
      pen.setLineDash(marker.kind === "restart" ? [] : [2, 4]);
      this.line(pen, [this.place(marker[axis]), this.place(marker[axis])], [TOP, height - BOTTOM]);
    }
    pen.setLineDash([]);
    const chosen = this.nearest(curves, up);
    for (const curve of curves) {
      const xs = curve.x.map((v) => this.place(v));
      colour("--accent");
      if (curve.low) {
        pen.globalAlpha = 0.18; pen.beginPath();
        xs.forEach((x, i) => pen.lineTo(x, up(curve.high[i])));
        for (let i = xs.length - 1; i >= 0; i--) pen.lineTo(xs[i], up(curve.low[i]));
        pen.fill();
      }
      pen.globalAlpha = curves.length === 1 || curve === chosen?.curve ? 1 : 0.35;
      pen.lineWidth = 1.5;
      this.line(pen, xs, curve.y.map(up));
      if (xs.length === 1) pen.fillRect(xs[0] - 2, up(curve.y[0]) - 2, 4, 4);
    }
    pen.globalAlpha = 1;
    if (this.from !== null && this.at !== null) { pen.globalAlpha = 0.12; pen.fillRect(this.place(this.from), TOP, this.place(this.at) - this.place(this.from), height); pen.globalAlpha = 1; }
    if (chosen) { colour("--quiet"); this.line(pen, [this.place(chosen.x), this.place(chosen.x)], [TOP, height - BOTTOM]); colour("--accent"); pen.beginPath(); pen.arc(this.place(chosen.x), up(chosen.y), 3.5, 0, 7); pen.fill(); }
    pen.restore();
    this.output.textContent = chosen ? this.said(chosen, axis, written, markers) : "";
  }

  resolve(style, name) { // a canvas knows no light-dark(): the browser resolves it on an element
    this.canvas.style.color = `var(${name})`;
    return style.color;
  }

  line(pen, xs, ys) { pen.beginPath(); xs.forEach((x, i) => pen.lineTo(x, ys[i])); pen.stroke(); }

  nearest(curves, up) {
    if (this.at === null) return null;
    let best = null;
    for (const curve of curves) {
      let i = 0, j = curve.x.length - 1;
      if (j < 0) continue;
      while (j - i > 1) { const middle = (i + j) >> 1; if (curve.x[middle] < this.at) i = middle; else j = middle; }
      const k = Math.abs(curve.x[i] - this.at) <= Math.abs(curve.x[j] - this.at) ? i : j;
      const far = Math.abs(this.place(curve.x[k]) - this.place(this.at)) + Math.abs(up(curve.y[k]) - (this.near ?? 0)) / 4;
      if (!best || far < best.far) best = { curve, x: curve.x[k], y: curve.y[k], low: curve.low?.[k], high: curve.high?.[k], far };
    }
    return best;
  }

  said({ curve, x, y, low, high }, axis, written, markers) {
    const marker = markers.find((m) => m[axis] !== null && m[axis] !== undefined && Math.abs(this.place(m[axis]) - this.place(x)) < 5);
    const who = curve.rank === null ? `median ${short(y)}, ${short(low)} to ${short(high)}` : `rank ${curve.rank}: ${short(y)}`;
    return `${axis === "step" ? `step ${x}` : written(x)} · ${who}${marker ? ` · ${marker.text}` : ""}`;
  }
}
