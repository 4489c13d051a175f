// Text and tables: the head, findings, policies, failures, origins, notes.

/** Makes a table. A column is { head, num, cls }; a row is a list of cells, the first a row header. */
function table(caption, columns, rows, cls) {
  const cell = (content, index) => {
    const column = columns[index];
    const style = [column.num ? "num" : "", column.cls || ""].join(" ").trim() || null;
    const attributes = { class: style, "data-label": column.head };
    // The roles stay even if a narrow window shows rows as cards.
    return index === 0
      ? h("th", { scope: "row", role: "rowheader", ...attributes }, content)
      : h("td", { role: "cell", ...attributes }, content);
  };
  const heads = columns.map((column) =>
    h("th", { scope: "col", role: "columnheader", class: [column.num ? "num" : "", column.cls || ""].join(" ").trim() || null }, column.head));
  const made = h("table", { class: cls, role: "table" },
    h("caption", { class: "unseen" }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)),
    h("tbody", { role: "rowgroup" }, rows.map((row) => h("tr", { role: "row" }, row.map(cell)))));
  const scroll = h("div", { class: "scroll", role: "region", "aria-label": caption }, made);
  // A region that scrolls must be reachable by keyboard; others must not be tab stops.
  new ResizeObserver(() => {
    if (scroll.scrollWidth > scroll.clientWidth) scroll.tabIndex = 0;
    else scroll.removeAttribute("tabindex");
  }).observe(scroll);
  return scroll;
}

const sub = (text, cls) => h("span", { class: cls ? `sub ${cls}` : "sub" }, text);

function drawHead() {
  const { trace } = report;
  document.title = `${trace.name} – Cushion report`;
  byId("name").textContent = trace.name;
  const ended = trace.oom
    ? `out of memory at event ${number(trace.oom.event)}` + (trace.oom.count > 1 ? ` (${plural(trace.oom.count, "refusal", "refusals")})` : "")
    : "no out-of-memory error recorded";
  const facts = [
    ["Recorded policy", trace.policy ? `${trace.policy} (${aboutPolicy(trace.policy)})` : "another allocator"],
    trace.policy ? ["PYTORCH_CUDA_ALLOC_CONF", trace.conf || "not set"] : null,
    ["Device", trace.devices > 1 ? `${trace.device} (of ${trace.devices} with events)` : String(trace.device)],
    ["Events", number(trace.events)],
    ["Allocations", number(trace.allocs)],
    trace.duration_us ? ["Lasted", duration(trace.duration_us)] : null,
    ["Ended", ended],
    report.capacity ? ["Judged on", asked(report.capacity)] : null,
    trace.begins_in_the_middle ? ["Begins", "in the middle of a run"] : null,
  ];
  byId("facts").append(...facts.filter(Boolean).map(([term, text]) => h("div", {}, h("dt", {}, term), h("dd", {}, text))));
  for (const section of document.querySelectorAll("main > section:not([hidden])")) {
    const heading = section.dataset.short || section.querySelector("h2").textContent;
    byId("sections").append(h("li", {}, h("a", { href: `#${section.id}` }, heading)));
  }
  byId("made").textContent =
    `Made by cushion ${report.version}. This file is self-contained and uses no network.`;
}

const aboutPolicy = (name) => (report.policies.find((run) => run.name === name) || { about: name }).about;

function drawFindings() {
  const [first, ...rest] = report.findings;
  byId("lead").textContent = unbroken(first.text);
  const words = { good: "Good: ", bad: "Problem: ", plain: "" };
  byId("more").append(...rest.map(({ tone, text }) =>
    h("li", { class: tone }, words[tone] ? h("b", {}, words[tone]) : null, unbroken(text))));
}

function drawPolicies() {
  const most = Math.max(report.capacity || 0, ...report.policies.map((run) => run.reserved_peak));
  const judged = report.capacity !== null;
  byId("policies-caption").textContent =
    `Each policy replayed ${judged ? `on a device of ${asked(report.capacity)}` : "with no limit"}, with the ladder ${report.trace.ladder}. ` +
    "Live is the memory the program requested; reserved is the memory the allocator held for it; excess is reserved peak over live peak. " +
    "The smallest device is the least memory with which the whole trace passes.";
  const columns = [
    { head: "policy" },
    { head: "live peak, and reserved beyond it", cls: "barcell" },
    { head: "live peak", num: true },
    { head: "reserved peak", num: true },
    { head: "excess", num: true },
    { head: "smallest device", num: true },
    { head: "driver time", num: true },
    { head: judged ? `on ${asked(report.capacity)}` : "smallest card" },
  ];
  const rows = report.policies.map((run) => [
    [run.name, sub(run.recorded ? `${run.about}; as recorded` : run.about)],
    peakBar(run.live_peak, run.reserved_peak, most),
    [bytes(run.live_peak), sub(`event ${number(run.live_peak_event)}`)],
    [bytes(run.reserved_peak), sub(`event ${number(run.reserved_peak_event)}`)],
    run.excess === null ? "–" : run.excess.toFixed(4),
    run.smallest === null ? "none" : bytes(run.smallest),
    `${(run.driver_us / 1000).toFixed(1)} ms`,
    run.refusal
      ? [h("span", { class: "no" }, "out of memory"), sub(`at event ${number(run.refusal.event)}`)]
      : judged ? h("span", { class: "yes" }, "fits") : card(run.card),
  ]);
  rows.push([
    ["floor", sub("no allocator could reserve less")],
    peakBar(report.floor, report.floor, most),
    "–", bytes(report.floor), "–", bytes(report.floor_device), "–",
    judged ? h("span", { class: report.floor > report.capacity ? "no" : "yes" }, report.floor > report.capacity ? "cannot fit" : "could fit") : card(report.floor_card),
  ]);
  byId("policy-table").append(table("Policies compared", columns, rows, "cards"));
}

const card = (gb) => (gb === null ? "no common card" : `${gb} GB`);

function peakBar(live, reserved, most) {
  const part = (cls, size) => {
    const made = h("i", { class: cls });
    made.style.width = `${(size / most) * 100}%`;
    return made;
  };
  const bar = h("span", { class: "stackbar", "aria-hidden": "true" },
    part("a", Math.min(live, reserved)), part("b", Math.max(0, reserved - live)));
  if (report.capacity) {
    const mark = h("i", { class: "cap" });
    mark.style.left = `calc(${(report.capacity / most) * 100}% - 1px)`;
    bar.append(mark);
  }
  return bar;
}

function drawFailures() {
  const failed = report.policies.filter((run) => run.refusal);
  if (!failed.length) return;
  byId("failure").hidden = false;
  const columns = ["policy", "event", "requested", "live", "reserved", "largest free block", "request made in"]
    .map((head, index) => ({ head, num: index > 0 && index < 6 }));
  const rows = failed.map(({ name, refusal }) => [
    [name, sub(refusal.recorded ? "PyTorch refused it too" : "only in this replay")],
    refusal.at_beginning ? "before the first" : number(refusal.event), refusal.at_beginning ? "–" : bytes(refusal.requested), bytes(refusal.live), bytes(refusal.reserved), bytes(refusal.largest_free),
    refusal.site === null ? "no stack recorded" : where(refusal.site),
  ]);
  byId("failure-list").append(table("Where memory ran out", columns, rows, "cards"));
}

/** Makes a folded stack: shows the telling lines, and opens to all lines. */
function where(site) {
  const [first, ...callers] = tellingFrames(site, 3);
  return h("details", { class: "where" },
    h("summary", { class: "mono" }, h("b", {}, first || "an empty stack"),
      callers.map((frame) => h("span", { class: "quiet" }, [" ← ", frame].join("")))),
    stackList(site));
}

function drawLargest() {
  const { peak } = report;
  byId("largest-caption").textContent =
    `${bytes(peak.live)} in ${plural(peak.allocations, "allocation", "allocations")} were live at event ${number(peak.event)}, ` +
    `grouped by ${peak.has_stacks ? "the stack of the request" : "size and stream, because no stacks were recorded"}. ` +
    (report.capacity && report.trace.oom ? `As replayed under ${peak.policy}, with requests that PyTorch refused if they fit.` : "Recorded, and the same under every policy.");
  const most = Math.max(1, ...peak.groups.map((group) => group.bytes));
  const columns = [
    { head: "where" }, { head: "bytes", num: true }, { head: "share", cls: "sharecell" },
    { head: "count", num: true }, { head: "largest", num: true, cls: "optional" }, { head: "held to the end", num: true, cls: "optional" },
  ];
  const rows = peak.groups.map((group) => {
    const bar = h("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${(group.bytes / most) * 100}%`;
    return [
      origin(group.origin), bytes(group.bytes), h("span", { class: "share" }, percent(group.bytes, peak.live), bar), number(group.count),
      bytes(group.largest), group.origin === "before" ? "not known" : percent(group.kept, group.bytes),
    ];
  });
  if (peak.other_groups) {
    rows.push([plural(peak.other_groups, "smaller group", "smaller groups"), bytes(peak.other_bytes), percent(peak.other_bytes, peak.live), "", "", ""]);
  }
  byId("largest-table").append(table("Largest allocations at the peak", columns, rows, "dense"));
}

function origin(from) {
  if (from === "before") return "allocated before the trace began, stack not known";
  if (from.size) return [`${bytes(from.size.size)} each `, h("span", { class: "quiet" }, `${from.size.stream}${report.peak.has_stacks ? ", no stack recorded" : ""}`)];
  return where(from.site);
}

function drawNotes() {
  byId("notes-list").append(...report.notes.map((note) => h("li", {}, note)));
}
