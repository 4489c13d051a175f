// Live and reserved bytes over the run: an SVG that is redrawn when its width changes, with a slider
// over the same buckets for keyboards and screen readers.

const chart = {
  axis: "events",
  hidden: new Set(),
  at: 0,
  /** Curves, in the order they are drawn: { key, label, colour, dash, curve, peak, peakEvent }. */
  curves: [],
};

function drawChart() {
  const { timeline, trace } = report;
  chart.curves = [
    { key: "live", label: "live", colour: "var(--live)", dash: "", curve: timeline.live, peak: timeline.live_peak, peakEvent: timeline.live_peak_event, area: true },
    ...report.policies.map((run, index) => ({
      key: run.name, label: `reserved, ${run.name}`, colour: policyColour(index), dash: policyDash(index),
      curve: run.reserved, peak: run.reserved_peak, peakEvent: run.reserved_peak_event, refusal: run.refusal,
    })),
  ];
  byId("time-caption").textContent =
    `Live is recorded and is the same under every policy; reserved is simulated for each. ` +
    (report.capacity && trace.oom ? "A request that PyTorch refused, but that fits here, is live for a moment. " : "") +
    (trace.events > timeline.buckets
      ? `${number(trace.events)} events are drawn in ${number(timeline.buckets)} steps; each keeps its minimum and maximum, so no peak is lost. `
      : "Every event is drawn. ") +
    "Use the arrow keys on the slider to step through the run.";
  for (const curve of chart.curves) {
    const input = h("input", { type: "checkbox", checked: true });
    input.addEventListener("change", () => {
      if (input.checked) chart.hidden.delete(curve.key);
      else chart.hidden.add(curve.key);
      paintChart();
    });
    byId("legend").append(h("label", {}, input, lineSample(curve), curve.label));
  }
  if (timeline.times) {
    radios(byId("axis"), "axis", [["events", "event number"], ["time", "recorded time"]], (axis) => {
      chart.axis = axis;
      paintChart();
    });
  }
  const slider = byId("moment");
  slider.max = timeline.buckets - 1;
  slider.addEventListener("input", () => moveTo(Number(slider.value)));
  for (const curve of chart.curves) {
    const jump = h("button", { type: "button" }, curve.area ? "Live peak" : `${curve.key} peak`);
    jump.addEventListener("click", () => moveTo(bucketOf(curve.peakEvent)));
    byId("jumps").append(jump);
  }
  chart.at = bucketOf(chart.curves[0].peakEvent);
  new ResizeObserver(() => paintChart()).observe(byId("plot"));
  paintChart();
  drawChartTable();
}

function lineSample({ colour, dash, area }) {
  return svg("svg", { class: "swatch", width: 26, height: 12, "aria-hidden": "true" }, area
    ? svg("rect", { x: 0, y: 1, width: 26, height: 10, style: `fill:${colour}`, "fill-opacity": 0.45 })
    : svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, style: `stroke:${colour}`, "stroke-width": 2.5, "stroke-dasharray": dash }));
}

/** The first event of a bucket, and the bucket of an event. */
const firstEvent = (bucket) => Math.ceil((bucket * report.trace.events) / report.timeline.buckets);
const bucketOf = (event) => Math.min(report.timeline.buckets - 1, Math.floor((event * report.timeline.buckets) / report.trace.events));

/** Returns about `count` round ticks for an axis up to `most`. */
function ticks(most, count, units) {
  const rough = most / count;
  let step = units.find((unit) => unit >= rough);
  if (!step) {
    const power = 10 ** Math.floor(Math.log10(rough));
    step = [1, 2, 5, 10].map((factor) => factor * power).find((unit) => unit >= rough);
  }
  const found = [];
  for (let at = 0; at <= most * 1.0001; at += step) found.push(at);
  return found;
}

const BYTE_STEPS = [];
for (let unit = KIB; unit <= 1024 * GIB; unit *= 1024) {
  for (const factor of [1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 200, 256, 500, 512]) BYTE_STEPS.push(factor * unit);
}

function paintChart() {
  const plot = byId("plot");
  const width = Math.max(280, Math.floor(plot.clientWidth));
  const wide = width > 640;
  const height = wide ? 380 : 300;
  const box = { left: 62, right: wide ? 178 : 8, top: 12, bottom: 40 };
  box.width = width - box.left - box.right;
  box.height = height - box.top - box.bottom;
  const shown = chart.curves.filter((curve) => !chart.hidden.has(curve.key));
  const most = Math.max(1, report.capacity || 0, ...chart.curves.map((curve) => curve.peak)) * 1.03;
  const y = (value) => box.top + box.height * (1 - value / most);
  const { x, end, label, name } = scaleX(box);
  chart.scale = { x, y, box, width };

  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": chartSummary(), "data-most": most, "data-top": box.top, "data-bottom": box.top + box.height });
  for (const tick of ticks(most, 6, BYTE_STEPS)) {
    root.append(
      svg("line", { class: "grid", x1: box.left, x2: box.left + box.width, y1: y(tick), y2: y(tick) }),
      svg("text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, tick ? shortBytes(tick) : "0"));
  }
  for (const tick of ticks(end, wide ? 7 : 3, [])) {
    const at = box.left + (box.width * tick) / end;
    root.append(
      svg("line", { class: "grid", x1: at, x2: at, y1: box.top + box.height, y2: box.top + box.height + 5 }),
      svg("text", { x: at, y: box.top + box.height + 19, "text-anchor": tick ? "middle" : "start" }, label(tick)));
  }
  root.append(svg("text", { x: box.left + box.width, y: height - 4, "text-anchor": "end" }, name));
  for (const curve of shown) root.append(...paintCurve(curve, x, y));
  const labels = shown.map((curve) => ({
    at: y(curve.peak), from: x(bucketOf(curve.peakEvent)), colour: curve.colour, text: `${curve.key} ${bytes(curve.peak)}`,
  }));
  if (report.capacity) {
    labels.push({ at: y(report.capacity), from: box.left, colour: "var(--bad)", text: `device ${asked(report.capacity)}`, line: true });
  }
  paintLabels(root, labels, box, wide);
  const cursor = svg("g", { id: "cursor", "aria-hidden": "true" });
  root.append(cursor);
  root.addEventListener("pointermove", (event) => {
    const place = event.clientX - root.getBoundingClientRect().left;
    moveTo(bucketAt(place));
  });
  plot.replaceChildren(root);
  moveTo(chart.at);
}

/** Returns the position of each bucket on the selected axis. */
function scaleX(box) {
  const { times, buckets } = report.timeline;
  if (chart.axis === "time") {
    const end = Math.max(1, report.trace.duration_us);
    const x = (bucket) => box.left + box.width * (bucket >= buckets ? 1 : times[bucket] / end);
    return { x, end, label: (us) => (us ? duration(us) : "0"), name: "recorded time" };
  }
  const end = report.trace.events;
  return { x: (bucket) => box.left + (box.width * firstEvent(bucket)) / end, end, label: number, name: "event" };
}

function paintCurve({ key, curve, colour, dash, area, refusal }, x, y) {
  const n = curve.hi.length;
  let top = "", band = "", back = "";
  for (let i = 0; i < n; i += 1) {
    const a = x(i).toFixed(1), b = x(i + 1).toFixed(1), hi = y(curve.hi[i]).toFixed(1), lo = y(curve.lo[i]).toFixed(1);
    top += `${i ? "L" : "M"}${a} ${hi}L${b} ${hi}`;
    back = `L${b} ${lo}L${a} ${lo}${back}`;
  }
  band = `${top}${back}Z`;
  const made = [];
  if (area) {
    made.push(
      svg("path", { d: `${top}L${x(n).toFixed(1)} ${y(0)}L${x(0)} ${y(0)}Z`, style: `fill:${colour}`, "fill-opacity": 0.22 }),
      svg("path", { d: band, style: `fill:${colour}`, "fill-opacity": 0.35 }));
  }
  made.push(svg("path", {
    d: top, fill: "none", style: `stroke:${colour}`, "stroke-width": area ? 1 : 2, "stroke-dasharray": dash,
    "stroke-linejoin": "round", "data-curve": key,
  }));
  if (refusal) {
    const px = x(bucketOf(refusal.event)), py = y(refusal.reserved);
    made.push(svg("path", {
      d: `M${px - 6} ${py - 6}l12 12m0 -12l-12 12`, style: "stroke:var(--bad)", "stroke-width": 3, fill: "none",
    }, svg("title", {}, `${key}: a request of ${bytes(refusal.requested)} was refused here`)));
  }
  return made;
}

/** Draws names and peaks beside the plot, moved apart if they would overlap. */
function paintLabels(root, labels, box, wide) {
  const right = box.left + box.width;
  for (const { at, from, colour, line } of labels) {
    root.append(svg("line", {
      x1: from, x2: right, y1: at, y2: at, style: `stroke:${colour}`, "stroke-width": line ? 1.5 : 1,
      "stroke-dasharray": line ? "10 3" : "1 3",
    }));
  }
  if (!wide) {
    // No room beside the plot; the legend and the readout name the curves.
    for (const { at, colour, text } of labels.filter((label) => label.line)) {
      root.append(svg("text", { x: box.left + 4, y: at + 14, class: "strong", style: `fill:${colour}` }, text));
    }
    return;
  }
  const placed = [...labels].sort((a, b) => a.at - b.at);
  placed.forEach((label, index) => {
    label.y = Math.max(label.at, index ? placed[index - 1].y + 15 : 8);
  });
  for (const { at, y, colour, text } of placed) {
    root.append(
      svg("path", { d: `M${right + 1} ${at}L${right + 9} ${y}`, style: `stroke:${colour}`, fill: "none" }),
      svg("text", { x: right + 12, y: y + 4, class: "strong", style: `fill:${colour}` }, text));
  }
}

const shortBytes = (count) =>
  count >= GIB ? `${+(count / GIB).toFixed(2)} GiB` : count >= MIB ? `${+(count / MIB).toFixed(1)} MiB` : bytes(count);

function chartSummary() {
  const peaks = chart.curves.map((curve) => `${curve.label} peaks at ${bytes(curve.peak)} at event ${number(curve.peakEvent)}`);
  return `Memory over time. ${peaks.join("; ")}.`;
}

/** Returns the bucket at a position: the last that begins there or before. */
function bucketAt(place) {
  const { x } = chart.scale;
  let low = 0, high = report.timeline.buckets - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (x(middle) <= place) low = middle;
    else high = middle - 1;
  }
  return low;
}

function moveTo(bucket) {
  chart.at = bucket;
  const { x, y, box } = chart.scale;
  const at = (x(bucket) + x(bucket + 1)) / 2;
  const cursor = byId("cursor");
  cursor.replaceChildren(svg("line", { class: "cursor", x1: at, x2: at, y1: box.top, y2: box.top + box.height }));
  const [from, to] = [firstEvent(bucket), Math.max(firstEvent(bucket), firstEvent(bucket + 1) - 1)];
  const entries = [[from === to ? "event" : "events", from === to ? number(from) : `${number(from)} to ${number(to)}`]];
  if (report.timeline.times) entries.push(["recorded time", duration(report.timeline.times[bucket])]);
  for (const { key, label, curve, colour } of chart.curves) {
    const [lo, hi] = [curve.lo[bucket], curve.hi[bucket]];
    if (hi === undefined) entries.push([label, "ended before"]);
    else entries.push([label, lo === hi ? bytes(hi) : `${bytes(lo)} to ${bytes(hi)}`]);
    if (hi !== undefined && !chart.hidden.has(key)) {
      cursor.append(svg("circle", { cx: at, cy: y(hi), r: 3.5, style: `fill:${colour}` }));
    }
  }
  byId("readout").replaceChildren(...entries.map(([term, text]) => h("div", {}, h("dt", {}, term), h("dd", {}, text))));
  const slider = byId("moment");
  slider.value = bucket;
  slider.setAttribute("aria-valuetext", entries.map((entry) => entry.join(" ")).join(", "));
}

/** Writes the curves as a table of a few rows. */
function drawChartTable() {
  const { buckets } = report.timeline;
  const parts = Math.min(24, buckets);
  const columns = [{ head: "events" }, ...chart.curves.map((curve) => ({ head: `${curve.label}, most`, num: true }))];
  const rows = [];
  for (let part = 0; part < parts; part += 1) {
    const from = Math.floor((part * buckets) / parts), to = Math.floor(((part + 1) * buckets) / parts);
    const last = Math.max(firstEvent(from), firstEvent(to) - 1);
    rows.push([`${number(firstEvent(from))} to ${number(last)}`, ...chart.curves.map(({ curve }) => {
      const values = curve.hi.slice(from, to);
      return values.length ? bytes(Math.max(...values)) : "ended before";
    })]);
  }
  byId("time-table").append(table("Live and reserved over the run", columns, rows));
}
