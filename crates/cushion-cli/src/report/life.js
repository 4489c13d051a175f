// Lifetimes of allocations: one table of bars, by events or by time.

function drawLifetimes() {
  const { lifetimes } = report;
  byId("lifetimes-caption").textContent =
    `From request to completed free, for the ${plural(lifetimes.all.count, "allocation", "allocations")} of the trace (recorded). ` +
    "Bytes allocated counts each allocation once, however short; live at the peak counts the allocations held when live was highest.";
  if (lifetimes.by_time) {
    radios(byId("life-axis"), "life", [["events", "events"], ["time", "recorded time"]], paintLifetimes);
  }
  paintLifetimes("events");
}

function paintLifetimes(axis) {
  const { lifetimes } = report;
  const bins = axis === "time" ? lifetimes.by_time : lifetimes.by_events;
  const range = axis === "time"
    ? ({ from, to }) => (from ? `${duration(from)} to ${duration(to)}` : `under ${duration(to)}`)
    : ({ from, to }) => (from ? `${number(from)} to ${number(to - 1)} events` : `under ${number(to)} events`);
  const rows = bins.map((bin) => [range(bin), bin]);
  rows.push(["never freed in the trace", lifetimes.to_the_end]);
  if (lifetimes.from_before.count) rows.push(["made before the trace began", { ...lifetimes.from_before, count: 0, bytes: 0 }]);
  const sum = (key) => rows.reduce((total, [, life]) => total + life[key], 0);
  const sums = { count: sum("count"), bytes: sum("bytes"), at_peak: sum("at_peak") };
  const most = (key) => Math.max(1, ...rows.map(([, life]) => life[key]));
  const tops = { count: most("count"), bytes: most("bytes"), at_peak: most("at_peak") };
  const cell = (life, key, text) => {
    const bar = h("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${(life[key] / tops[key]) * 100}%`;
    if (!life[key]) return h("span", { class: "quiet" }, "–");
    return h("span", { class: "lived" }, h("span", {}, text, h("span", { class: "quiet" }, ` ${percent(life[key], sums[key])}`)), bar);
  };
  const columns = [{ head: "lived for" }, { head: "allocations" }, { head: "bytes allocated" }, { head: "live at the peak" }];
  byId("lifetimes-table").replaceChildren(table("Lifetimes", columns, rows.map(([name, life]) => [
    name, cell(life, "count", number(life.count)), cell(life, "bytes", bytes(life.bytes)), cell(life, "at_peak", bytes(life.at_peak)),
  ]), "dense lifetimes"));
}
