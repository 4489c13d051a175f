// Shortages and their outcomes, in the replays and in a file of receipts.

function drawShortages() {
  if (!report.shortages.length) return;
  byId("shortages").hidden = false;
  const replayed = report.shortages.some((run) => !run.from_file);
  byId("shortages-caption").textContent =
    (replayed ? `Requests that fell short of memory in the replays${report.capacity ? ` on a device of ${asked(report.capacity)}` : ""}, with the ladder ${report.trace.ladder}. ` : "") +
    "A rung is one step that tries to win memory; a refused request shows what would have made it fit. " +
    "The largest groups of live allocations are those at the end of the shortage.";
  byId("shortages-list").append(...report.shortages.flatMap(shortagesOf));
}

function shortagesOf(run) {
  const hidden = run.all - run.rows.length;
  const more = [
    hidden > 0 ? `${plural(hidden, "other is", "others are")} not shown.` : "",
    run.torn > 0 ? `${plural(run.torn, "line ends", "lines end")} too early, as after a killed process.` : "",
  ].filter(Boolean).join(" ");
  const columns = [
    { head: "shortage" }, { head: "requested", num: true }, { head: "outcome" }, { head: "steps tried" },
    { head: "time lost", num: true }, { head: "largest live groups", cls: "optional" },
  ];
  return [
    h("h3", {}, run.from_file ? `Receipts in ${run.name}` : `Replayed under ${run.name}`),
    h("p", { class: "caption" }, unbroken(`${run.told}. ${more}`)),
    run.rows.length ? table(`Shortages of ${run.name}`, columns, run.rows.map(shortageRow), "cards shortages") : "",
  ];
}

function shortageRow(row) {
  const lines = (texts) => h("span", { class: "lines" }, texts.map((text) => h("span", {}, unbroken(text))));
  const vain = row.rungs.filter((rung) => rung.in_vain).map((rung) => rung.rung);
  const tried = row.rungs.filter((rung) => !rung.in_vain).map((rung) =>
    `${rung.rung} ${rung.ended}` + (rung.won ? `, ${bytes(rung.won)}` : "") + (rung.ms >= 0.05 ? `, ${milliseconds(rung.ms)}` : ""));
  if (vain.length) tried.push(`without effect: ${vain.join(", ")}`);
  tried.push(...row.answers.map((answer) => `callback ${answer}`));
  const outcome = h("span", { class: "lines" },
    h("span", { class: row.survived ? "yes" : "no" }, row.outcome),
    row.remedies.map((remedy) => h("span", {}, unbroken(remedy))),
    row.injected ? h("span", {}, "injected, for a test") : null);
  return [
    [number(row.number), sub(row.device ? `${row.who}, device ${row.device}` : row.who)],
    bytes(row.requested), outcome, lines(tried), milliseconds(row.ms),
    lines(row.groups.map((group) => `${number(group.count)} × ${bytes(group.each)}${group.at ? ` at ${group.at}` : ""}`)),
  ];
}

const milliseconds = (ms) => `${ms.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} ms`;
