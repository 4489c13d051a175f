// The address map: for each policy a strip of all reserved memory, wrapped into rows. All maps have
// one scale, so a shorter map holds less. Each is a canvas, because there may be thousands of blocks.

const KINDS = {
  K: ["live, held to the end of the trace", "--kept"],
  B: ["live, from before the trace began", "--before"],
  L: ["live, freed later", "--used"],
  P: ["pending: freed, another stream may still use it", "--pending"],
  F: ["free: a hole", "--free"],
  M: ["several small blocks of different kinds", "--mixed"],
};
const ROW = 13, GAP = 3, LABEL = 19;

function drawMaps() {
  const failed = report.policies.some((run) => run.refusal);
  byId("map-caption").textContent =
    `Simulated: every byte each policy holds at its reserved peak${failed ? ", or when a request was refused" : ""}, in address order, ` +
    "by pool and stream. All maps have one scale. Marks above a row show where a segment begins.";
  const used = new Set(report.policies.flatMap((run) => [...new Set(run.map.rects.kind)]));
  byId("map-keys").append(...Object.entries(KINDS).filter(([kind]) => used.has(kind)).map(([kind, [text]]) => {
    const sample = h("canvas", { class: "swatch", width: 48, height: 26, "aria-hidden": "true" });
    sample.style.width = "24px";
    sample.style.height = "13px";
    sample.dataset.kind = kind;
    return h("li", {}, sample, text);
  }));
  const maps = report.policies.map(makeMap);
  const paint = () => {
    paintKeys();
    maps.forEach((map) => map.paint());
  };
  new ResizeObserver(paint).observe(byId("maps"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  paint();
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(name).trim();
}

/** Returns the fill of a kind of block; holes are hatched, so that colour is not the only difference. */
function filler(context, kind, colour) {
  const plain = colour(KINDS[kind][1]);
  if (kind !== "F" && kind !== "M") return plain;
  const tile = h("canvas", { width: 10, height: 10 });
  const pen = tile.getContext("2d");
  pen.fillStyle = plain;
  pen.fillRect(0, 0, 10, 10);
  pen.strokeStyle = colour(kind === "F" ? "--hatch" : "--kept");
  pen.lineWidth = 1;
  pen.beginPath();
  for (const shift of [-10, 0, 10]) {
    pen.moveTo(shift - 1, 11);
    pen.lineTo(shift + 11, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

function paintKeys() {
  const colour = colours();
  for (const sample of byId("map-keys").querySelectorAll("canvas")) {
    const pen = sample.getContext("2d");
    pen.fillStyle = filler(pen, sample.dataset.kind, colour);
    pen.fillRect(0, 0, 48, 26);
  }
}

function makeMap(run) {
  const { map } = run;
  const rects = flatten(map);
  const canvas = h("canvas", { role: "img", "aria-label": mapSummary(run) });
  const slider = h("input", { type: "range", min: 0, max: Math.max(0, rects.length - 1), step: 1, id: `walk-${run.name}` });
  const detail = h("div", { class: "detail" });
  const button = (text, action) => {
    const made = h("button", { type: "button", "aria-label": `${text}, ${run.name}` }, text);
    made.addEventListener("click", action);
    return made;
  };
  const largest = rects.reduce((best, rect, index) => (rect.kind === "F" && rect.size > (best < 0 ? 0 : rects[best].size) ? index : best), -1);
  const nextHole = () => {
    const after = rects.findIndex((rect, index) => index > state.at && rect.kind === "F");
    show(after < 0 ? rects.findIndex((rect) => rect.kind === "F") : after);
  };
  const when = run.refusal ? "when a request was refused" : map.reserved < run.reserved_peak ? "near its peak" : "at its reserved peak";
  byId("maps").append(h("section", { class: "onemap", "aria-label": `Address map, ${run.name}` },
    h("h3", {}, `${run.name}: ${bytes(map.reserved)} reserved ${when}, event ${number(map.event)}`),
    h("p", { class: "split" }, unbroken(mapSplit(map))),
    canvas,
    h("div", { class: "walk" },
      h("label", { for: slider.id }, "Block"), slider,
      largest < 0 ? null : h("div", { class: "jumps" }, button("Largest hole", () => show(largest)), button("Next hole", nextHole))),
    detail,
    map.largest_holes.length ? h("details", {}, h("summary", {}, `The largest of ${plural(map.holes, "hole", "holes")}, as a table`), holesTable(run)) : null));

  const state = { at: Math.max(0, largest), runs: [] };
  const show = (index) => {
    if (index < 0 || index >= rects.length) return;
    state.at = index;
    const words = describe(rects[index]);
    detail.replaceChildren(...words.map((line) => h("p", {}, line)));
    if (rects[index].site >= 0) detail.append(stackList(rects[index].site));
    slider.value = index;
    slider.setAttribute("aria-valuetext", words.join(" "));
    paint();
  };
  slider.addEventListener("input", () => show(Number(slider.value)));
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const found = rectAt(state.runs, event.clientX - box.left, event.clientY - box.top);
    if (found !== undefined && found !== state.at) show(found);
  });
  const paint = () => {
    state.runs = paintMap(canvas, map, rects, state.at);
  };
  show(state.at);
  return { paint };
}

/** Turns the columns of the report into objects, each with its segment. */
function flatten(map) {
  const rects = [];
  const merged = new Map(map.rects.merged.map(([index, blocks, free]) => [index, { blocks, free }]));
  map.groups.forEach((group, groupIndex) => {
    for (const strip of group.strips) {
      for (let i = 0; i < strip.rects; i += 1) {
        const index = rects.length;
        rects.push({
          size: map.rects.size[index], kind: map.rects.kind[index], event: map.rects.event[index], site: map.rects.site[index],
          merged: merged.get(index), strip, first: i === 0, group, groupIndex,
        });
      }
    }
  });
  return rects;
}

function describe({ size, kind, event, merged, strip, group }) {
  const what = merged
    ? `${plural(merged.blocks, "block", "blocks")} drawn as one, ${bytes(merged.free)} of it free`
    : KINDS[kind][0];
  const made = event >= 0 ? `, allocated at event ${number(event)}` : "";
  const place = strip.segments > 1 ? `${number(strip.segments)} segments from ${strip.address}` : `segment at ${strip.address}`;
  const gap = strip.unmapped ? `; ${bytes(strip.unmapped)} of addresses before it are unmapped` : "";
  return [`${bytes(size)}: ${what}${made}.`, `${group.label}; ${place}${gap}.`];
}

/** Lays the strip out in rows, paints it, and returns the position of each part: [x, y, width, index]. */
function paintMap(canvas, map, rects, chosen) {
  const width = Math.max(200, canvas.parentElement.clientWidth);
  const most = Math.max(...report.policies.map((run) => run.map.reserved));
  const perRow = most / (width > 640 ? 26 : 44);
  const unit = width / perRow;
  const pieces = [], labels = [], marks = [];
  let y = 0, x = 0, group = -1, minor = false;
  rects.forEach((rect, index) => {
    if (rect.groupIndex !== group) {
      group = rect.groupIndex;
      const small = rect.group.size < perRow / 3;
      if (!small || !minor) {
        if (index) y += ROW + GAP + 4;
        labels.push([y, small ? "smaller groups" : groupLabel(rect.group)]);
        y += LABEL;
        x = 0;
      }
      minor = small;
    }
    if (rect.first) marks.push([x, y]);
    let left = rect.size * unit;
    while (left > 0) {
      if (x >= width - 0.01) {
        x = 0;
        y += ROW + GAP;
      }
      const part = Math.min(left, width - x);
      pieces.push([x, y, part, index]);
      x += part;
      left -= part;
      if (part < 1e-9) break;
    }
  });
  paintPieces(canvas, { width, height: y + ROW + 4, pieces, labels, marks, rects, chosen });
  return pieces;
}

function groupLabel(group) {
  return `${group.label}: ${bytes(group.size)} in ${plural(group.segments, "segment", "segments")}, ${percent(group.free, group.size)} free`;
}

function paintPieces(canvas, { width, height, pieces, labels, marks, rects, chosen }) {
  const sharp = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * sharp);
  canvas.height = Math.round(height * sharp);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(sharp, sharp);
  const colour = colours();
  const fills = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, filler(pen, kind, colour)]));
  for (const [x, y, part, index] of pieces) {
    pen.fillStyle = fills[rects[index].kind];
    pen.fillRect(x, y, part, ROW);
  }
  // A hairline separates neighbours of one kind, if there is room.
  pen.fillStyle = colour("--bg");
  for (const [x, y, part] of pieces) {
    if (part > 3) pen.fillRect(x, y, 0.6, ROW);
  }
  pen.fillStyle = colour("--ink");
  for (const [x, y] of marks) pen.fillRect(Math.min(x, width - 1.5), y - 2, 1.5, ROW / 2);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  for (const [y, text] of labels) {
    pen.fillStyle = colour("--muted");
    pen.fillText(text, 0, y + LABEL / 2, width);
  }
  pen.strokeStyle = colour("--ink");
  pen.lineWidth = 2;
  for (const [x, y, part, index] of pieces) {
    if (index === chosen) pen.strokeRect(Math.max(1, x - 1), y - 1, Math.max(part, 2) + 1, ROW + 2);
  }
}

function rectAt(pieces, x, y) {
  const found = pieces.find(([left, top, part]) => y >= top - 1 && y < top + ROW + 2 && x >= left && x < left + part);
  return found && found[3];
}

function mapSplit(map) {
  const share = (size) => `${bytes(size)} (${percent(size, map.reserved)})`;
  const parts = [`live ${share(map.live)}`];
  if (map.pending) parts.push(`pending ${share(map.pending)}`);
  if (map.rounding) parts.push(`rounding ${share(map.rounding)}`);
  parts.push(`free ${share(map.free)} in ${plural(map.holes, "hole", "holes")}`);
  const merged = map.merged ? `; the smallest ${number(map.merged)} of ${number(map.blocks)} blocks are drawn with a neighbour` : "";
  return `${parts.join(", ")}${merged}.`;
}

function mapSummary(run) {
  const hole = run.map.largest_holes[0];
  return `Address map of ${run.name}: ${mapSplit(run.map)}${hole ? ` The largest hole is ${bytes(hole.size)}.` : ""}`;
}

function holesTable({ name, map }) {
  const columns = [{ head: "size", num: false }, { head: "address" }, { head: "pool and stream" }];
  return table(`Largest holes, ${name}`, columns, map.largest_holes.map((hole) => [
    bytes(hole.size), h("span", { class: "mono" }, hole.address), map.groups[hole.group].label,
  ]));
}
