"""Checks what `cushion convert` writes with PyTorch's own tools.

    python3 check.py CUSHION CACHE [MEMORYVIZ_JS]

CUSHION is the command, CACHE a folder for downloads. `torch/cuda/_memory_viz.py` comes from an installed torch, or from
a wheel that pip downloads (only this file is used, and torch is not installed). Its reports on converted snapshots have
to be equal to those on the originals. If neither is available the check is skipped with a message.

MEMORYVIZ_JS is the viewer's code, which wheels do not contain: `torch/utils/viz/MemoryViz.js` of PyTorch's sources,
with the other files of its folder. With it and node, the viewer itself is run too."""

import base64
import contextlib
import glob
import gzip
import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

VERSION = "2.11.0"
# The smallest wheel, independent of this machine: the file is the same in all wheels.
WHEEL = ["--platform", "macosx_11_0_arm64", "--python-version", "3.11", "--only-binary=:all:"]
SHA256 = "7b6a60d48062809f58595509c524b88e6ddec3ebe25833d6462eeab81e5f2ce4"
MODULE = "torch/cuda/_memory_viz.py"
SECONDS = 240

HERE = os.path.dirname(os.path.abspath(__file__))
TRACES = os.path.join(HERE, "..", "traces")


class Skip(Exception):
    """Raised if something cannot be checked; the message says why."""


def module_of_torch(cache):
    """Returns the path of PyTorch's `_memory_viz.py`, and its source."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = os.path.join(folder, "cuda", "_memory_viz.py")
        if os.path.exists(path):
            return path, "the torch installed"
    path = os.path.join(cache, f"_memory_viz-{VERSION}.py")
    if not os.path.exists(path):
        download(path)
    return path, f"torch {VERSION}'s wheel"


def download(path):
    with tempfile.TemporaryDirectory() as folder:
        wanted = os.path.join(folder, "wanted.txt")
        with open(wanted, "w") as file:
            file.write(f"torch=={VERSION} --hash=sha256:{SHA256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command = pip + WHEEL + ["--dest", folder, "--requirement", wanted]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Skip(f"torch is not installed, and its wheel did not come: {error}") from error
        if done.returncode != 0:
            why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise Skip(f"torch is not installed, and its wheel did not come: {why}")
        [wheel] = glob.glob(os.path.join(folder, "*.whl"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with zipfile.ZipFile(wheel) as archive, archive.open(MODULE) as source:
            # Written under another name first: a check may be stopped at any time.
            with open(path + ".part", "wb") as target:
                shutil.copyfileobj(source, target)
        os.replace(path + ".part", path)


def load_module(path):
    spec = importlib.util.spec_from_file_location("memory_viz", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def convert(cushion, source, target):
    done = subprocess.run([cushion, "convert", source, target], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"viz: {source}: {done.stderr}")
    if "left out" in done.stderr:
        sys.exit(f"viz: {source} is not converted whole: {done.stderr}")


def reports(viz, path):
    """Returns the reports of PyTorch's tools on a snapshot."""

    def fresh():
        with open(path, "rb") as file:
            data = pickle.load(file)
        # Some shipped traces have no stacks. PyTorch writes an empty stack there, Cushion writes none.
        for event in (event for events in data["device_traces"] for event in events):
            event.setdefault("compile_context", "N/A")
            event.setdefault("user_metadata", "")
            event.setdefault("frames", [])
        return data

    def plain(lines):
        return lines  # instead of a plot, which needs another program

    data = fresh()
    events = sum(map(len, data["device_traces"]))
    said = {
        "stats": viz.segsum(data),
        "segments": viz.segments(data, format_flamegraph=plain),
        "memory": viz.memory(data, format_flamegraph=plain),
    }
    # This report searches all segments for each address.
    if events * len(data["segments"]) < 20_000_000:
        said["trace"] = viz.trace(data)
    for name, page in [
        ("trace_plot", viz.trace_plot(data)),
        ("trace_plot of segments", viz.trace_plot(data, plot_segments=True)),
        ("segment_plot", viz.segment_plot(data)),
    ]:
        if page_data(page) != data:
            sys.exit(f"viz: {name} has another snapshot inside")
    with contextlib.redirect_stdout(io.StringIO()):
        left = page_data(viz.trace_plot(fresh(), filter_freed=True))
    said["trace_plot of what is left"] = left["device_traces"]
    return said


def page_data(page):
    """Returns the snapshot inside a page."""
    files = json.loads(re.search(r"const local_files = (\[.*\])", page).group(1))
    return pickle.loads(base64.b64decode(files[0]["base64"]))


def check(viz, cushion, script):
    with tempfile.TemporaryDirectory() as folder:
        original, pickled, text = (os.path.join(folder, n) for n in ("a.pickle", "b.pickle", "c.json"))
        traces = sorted(glob.glob(os.path.join(TRACES, "**", "*.pickle.gz"), recursive=True))
        shown = 0
        for trace in traces:
            name = os.path.relpath(trace, TRACES)
            with gzip.open(trace) as source, open(original, "wb") as target:
                shutil.copyfileobj(source, target)
            convert(cushion, trace, pickled)
            if viz is not None:
                expected, found = reports(viz, original), reports(viz, pickled)
                for kind, said in expected.items():
                    if found[kind] != said:
                        sys.exit(f"viz: {name}: `{kind}` says something else of the converted snapshot")
            # The viewer walks back from the end for every event, so large traces take too long.
            if script is not None and os.path.getsize(original) < 4_000_000:
                convert(cushion, trace, text)
                run = ["node", os.path.join(HERE, "viewer.mjs"), script, original, pickled, text]
                done = subprocess.run(run, capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(f"viz: {name}: {done.stderr}")
                shown += 1
        if not traces:
            sys.exit("viz: no traces")
        return len(traces), shown


def main():
    cushion, cache = sys.argv[1:3]
    script = sys.argv[3] if len(sys.argv) > 3 and sys.argv[3] else None
    viz, origin = None, None
    try:
        path, origin = module_of_torch(cache)
        viz = load_module(path)
    except Skip as why:
        print(f"viz: SKIPPED _memory_viz.py: {why}")
    if script is None:
        print("viz: SKIPPED the viewer's own code: no wheel has it; MEMORYVIZ_JS=PATH says where it is")
    elif shutil.which("node") is None:
        print("viz: SKIPPED the viewer's own code: there is no node")
        script = None
    if viz is None and script is None:
        return
    traces, shown = check(viz, cushion, script)
    if viz is not None:
        print(f"viz: {traces} converted snapshots read by _memory_viz.py of {origin}: all reports equal")
    if script is not None:
        print(f"viz: {shown} of them, as pickle and JSON, in the viewer: every view works, figures equal")


if __name__ == "__main__":
    main()
