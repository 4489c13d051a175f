// Runs inside a copy of a report and posts what it finds to the surrounding page.
window.addEventListener("load", () => setTimeout(() => {
  const report = JSON.parse(document.getElementById("data").textContent);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const shown = (element) => element.getClientRects().length > 0;
  const text = (element) => (element ? element.textContent.trim() : "");

  // Controls: each must be reachable by keyboard, and have a name.
  const name = (element) => element.getAttribute("aria-label") || text(element) || [...(element.labels || [])].map(text).join(" ");
  const usable = all("a, button, input, summary, select, [tabindex='0'], [role=button]").filter(shown);
  const unreachable = usable.filter((element) => element.tabIndex < 0 || element.disabled).map((e) => e.outerHTML.slice(0, 120));
  const unnamed = usable.filter((element) => !name(element)).map((e) => e.outerHTML.slice(0, 120));
  const silent = all("canvas, svg").filter((e) => e.getAttribute("aria-hidden") !== "true" && !e.getAttribute("aria-label")).length;
  const levels = all("h1, h2, h3").filter(shown).map((e) => Number(e.tagName[1]));
  const ids = all("[id]").map((e) => e.id);

  // The highest point drawn, in bytes, and the bytes of half a pixel.
  const plot = document.querySelector("#plot svg");
  const { most, top, bottom } = Object.fromEntries(Object.entries(plot.dataset).map(([key, value]) => [key, Number(value)]));
  const highest = {};
  for (const path of plot.querySelectorAll("[data-curve]")) {
    const ys = [...path.getAttribute("d").matchAll(/[ML][-\d.]+ ([-\d.]+)/g)].map((match) => Number(match[1]));
    highest[path.dataset.curve] = (most * (bottom - Math.min(...ys))) / (bottom - top);
  }

  // A jump to a peak shows the table's figure.
  const readouts = {};
  for (const button of document.querySelectorAll("#jumps button")) {
    button.click();
    readouts[text(button)] = text(document.getElementById("readout"));
  }
  const slider = document.getElementById("moment");
  const before = text(document.getElementById("readout"));
  slider.value = 0;
  slider.dispatchEvent(new Event("input"));
  const moved = text(document.getElementById("readout")) !== before && !!slider.getAttribute("aria-valuetext");

  // Each switch changes the page.
  const curves = () => plotCurves().length;
  const plotCurves = () => all("#plot [data-curve]");
  const drawn = curves();
  const box = document.querySelector("#legend input");
  box.click();
  const hides = curves() === drawn - 1;
  box.click();
  const path = () => plotCurves().map((e) => e.getAttribute("d")).join();
  const byEvents = path();
  const time = document.querySelector("#axis input[value=time]");
  if (time) time.click();
  const axis = time ? path() !== byEvents : null;
  const walk = document.querySelector("#maps input[type=range]");
  const detail = () => text(document.querySelector("#maps .detail"));
  const first = detail();
  walk.value = walk.value === "0" ? walk.max : 0;
  walk.dispatchEvent(new Event("input"));
  const walks = Number(walk.max) === 0 || detail() !== first;

  // Something is painted on every map.
  const blank = all("#maps canvas").filter((canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return !data.some((value) => value !== 0);
  }).length;

  // The contrast of text and background.
  const channels = (colour) => colour.match(/[\d.]+/g).slice(0, 3).map(Number);
  const light = (colour) => {
    const [r, g, b] = channels(colour).map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const { backgroundColor } = getComputedStyle(at);
      if (!/^rgba\(.*, 0\)$|^transparent$/.test(backgroundColor)) return backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  const faint = all("body *").filter((element) => shown(element)
    && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) && !element.closest("script, style"))
    .map((element) => {
      const style = getComputedStyle(element);
      const [a, b] = [light(element instanceof SVGElement ? style.fill : style.color), light(behind(element))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), element.outerHTML.slice(0, 100)];
    }).filter(([contrast]) => contrast < 4.5).map((found) => found.join(" "));

  parent.postMessage({
    errors: window.faults, drawn: document.documentElement.dataset.drawn, title: document.title,
    lead: text(document.getElementById("lead")), text: document.body.innerText, usable: usable.length,
    unreachable, unnamed, silent, levels, twice: ids.filter((id, index) => ids.indexOf(id) !== index),
    highest, half: most / (bottom - top) / 2, readouts, moved, hides, axis, walks, blank, faint,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    wide: all("main *, header *, nav *").filter((e) => shown(e) && !e.closest(".scroll, .unseen") && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
      .map((e) => e.outerHTML.slice(0, 100)),
    background: getComputedStyle(document.body).backgroundColor, hacked: window.hacked === true,
    width: document.documentElement.clientWidth, policies: report.policies.map((run) => run.name),
  }, "*");
}, 50));
