// Runs the code of PyTorch's memory viewer, without a browser, on snapshots.
//
//     node viewer.mjs MemoryViz.js ORIGINAL.pickle FILE...
//
// Each FILE (pickle or JSON) has to load, to be plotted, and to show the state of the allocator at its
// events, with the same figures as the original. Fails at the first file that does not.

import {existsSync, readFileSync} from 'node:fs';
import {dirname, join} from 'node:path';

// Replaces d3, the page and everything else that the viewer draws with: every property exists, can be
// called, and does nothing.
const nothing = new Proxy(function () {}, {
  get: (_, key) => (key === Symbol.toPrimitive ? () => 0 : key === Symbol.iterator ? undefined : nothing),
  apply: () => nothing,
  construct: () => nothing,
  set: () => true,
});

/// Returns the viewer's functions. Its modules run as one script, in which imports from other packages
/// are `nothing`.
function load(path) {
  const importing = /^import\s+(?:\*\s+as\s+(\w+)|\{([^}]*)\})\s+from\s+["']([^"']+)["'];?/gms;
  const source = (file) =>
    readFileSync(file, 'utf8')
      .replace(importing, (_, all, some, from) => {
        const near = join(dirname(file), from);
        if (from.startsWith('.') && existsSync(near)) {
          return source(near);
        }
        const names = all ? [all] : some.split(',').map(x => x.trim()).filter(x => x);
        return names.map(name => `const ${name} = nothing;`).join(' ');
      })
      .replace(/^export\s*\{[^}]*\};?/gms, '')
      .replace(/^export\s+/gm, '');
  const wanted = ['unpickle', 'annotate_snapshot', 'process_alloc_data', 'MemoryView'];
  const body = `${source(path)}\nreturn {${wanted.join(', ')}};`;
  const quiet = {log() {}, warn() {}, error() {}};
  const outside = ['nothing', 'window', 'document', 'console', 'localStorage', 'location'];
  const code = new Function(...outside, body.replace(/^'use strict';/m, ''));
  return code(nothing, nothing, nothing, quiet, nothing, nothing);
}

function read(viewer, path) {
  const bytes = readFileSync(path);
  const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  // The viewer tries JSON first.
  const snapshot = viewer.unpickle(buffer);
  viewer.annotate_snapshot(snapshot);
  return snapshot;
}

/// Returns the figures that the views show.
function figures(viewer, path) {
  const snapshot = read(viewer, path);
  return snapshot.device_traces.map((events, device) => {
    const plots = [false, true].map(segments => {
      const plot = viewer.process_alloc_data(snapshot, device, segments, 15000);
      return [plot.max_size, plot.elements_length, plot.max_at_time.length];
    });
    const view = viewer.MemoryView(nothing, {register() {}}, snapshot, device);
    // At every event of a short trace; at some events of a long one, including the first.
    const step = Math.max(1, Math.floor(events.length ** 2 / 20_000_000));
    const states = [];
    for (let index = 0; index < events.length; index += step) {
      states.push(view.draw(index));
    }
    states.push(view.draw(events.length - 1));
    return {events: events.length, plots, states};
  });
}

const [code, original, ...files] = process.argv.slice(2);
const viewer = load(code);
const expected = JSON.stringify(figures(viewer, original));
for (const file of files) {
  const found = figures(viewer, file);
  if (JSON.stringify(found) !== expected) {
    console.error(`${file}: the viewer shows something else than of ${original}`);
    process.exit(1);
  }
  const states = found.reduce((sum, device) => sum + device.states.length, 0);
  console.log(`${file}: loaded, plotted, shown at ${states} events`);
}
