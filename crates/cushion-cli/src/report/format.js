// Text and elements. Text from a trace reaches the page only as text nodes, through `h`.

const report = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

/** Makes an element with attributes and children; strings become text. */
function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Makes an SVG element. */
function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const KIB = 1024, MIB = 1024 * KIB, GIB = 1024 * MIB;

/** Formats bytes as `cushion_core::size::display` does. */
function bytes(count) {
  if (count <= KIB) return `${count} bytes`;
  if (count <= MIB) return `${(count / KIB).toFixed(2)} KiB`;
  if (count <= GIB) return `${(count / MIB).toFixed(2)} MiB`;
  return `${(count / GIB).toFixed(2)} GiB`;
}

/** Formats a given size: 24 GiB rather than 24.00 GiB. */
const asked = (count) => bytes(count).replace(".00 ", " ");

/** Keeps a figure and its unit on one line. */
const unbroken = (text) => text.replace(/ (%|bytes|[KMG]iB|GB|ms|s)(?![A-Za-z])/g, "\u00a0$1");

const number = (count) => count.toLocaleString("en-US");

function percent(part, whole) {
  const share = whole > 0 ? (part / whole) * 100 : 0;
  return share > 0 && share < 0.1 ? "<0.1 %" : `${share.toFixed(share < 10 ? 1 : 0)} %`;
}

function plural(count, one, many) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

/** Formats microseconds. */
function duration(us) {
  if (us < 1000) return `${Math.round(us)} µs`;
  if (us < 1e6) return `${trim(us / 1e3)} ms`;
  if (us < 120e6) return `${trim(us / 1e6)} s`;
  if (us < 7200e6) return `${trim(us / 60e6)} min`;
  return `${trim(us / 3600e6)} h`;
}

const trim = (value) => String(Number(value.toPrecision(3)));

/** The colour of a policy, and the pattern of its line. */
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const policyColour = (index) => `var(--p${index % 4})`;
const policyDash = (index) => DASHES[index % DASHES.length];

/** Makes an ordered list of a stack, innermost line first. */
function stackList(site) {
  return h("ol", { class: "stack mono" }, report.sites[site].map((frame) => h("li", {}, report.frames[frame])));
}

/** Returns the most telling lines of a stack: one for each file, without PyTorch's module calls. */
function tellingFrames(site, most) {
  const frames = report.sites[site].map((frame) => report.frames[frame]);
  const telling = frames.filter((frame) => !/^_(wrapped_)?call_impl /.test(frame));
  const file = (frame) => frame.replace(/:\d+\)$/, "").replace(/^.*\(/, "");
  const turns = telling.filter((frame, index) => index === 0 || file(frame) !== file(telling[index - 1]));
  return (turns.length ? turns : frames).slice(0, most);
}

/** Adds radio buttons to a fieldset; calls back with the selected value. */
function radios(fieldset, name, choices, chosen) {
  fieldset.hidden = false;
  choices.forEach(([value, label], index) => {
    const input = h("input", { type: "radio", name, value, checked: index === 0 });
    input.addEventListener("change", () => chosen(value));
    fieldset.append(h("label", {}, input, label));
  });
}
