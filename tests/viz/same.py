"""Compares two snapshots, pickle or JSON, plain or gzip, as Python reads them.

    python3 same.py ORIGINAL CONVERTED

Every key of the original has to be in the other with the same value, except for those that Cushion does not keep. Fails
at the first difference.
"""

import gzip
import json
import pickle
import sys

# Keys that Cushion does not keep, or writes itself.
NOT_KEPT = {
    "external_annotations",
    "host_segments",
    "host_traces",
    "forward_frames",
    "compile_context",
    "user_metadata",
    "internal_metadata",
    "fx_node_op",
    "fx_node_name",
    "fx_node_target",
    "fx_original_trace",
}
# Keys that PyTorch 2.11 writes, also if the original lacks them.
ADDED = {"compile_context": "N/A", "user_metadata": "", "external_annotations": []}


def load(path):
    with open(path, "rb") as file:
        data = file.read()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    # These snapshots contain no classes.
    return json.loads(data) if data[:1] == b"{" else pickle.loads(data)


def compare(original, converted, place):
    if isinstance(original, dict):
        for key, value in original.items():
            if key in NOT_KEPT or (key == "frames" and value == [] and key not in converted):
                continue
            if key not in converted:
                sys.exit(f"{place}: {key} is missing")
            compare(value, converted[key], f"{place}.{key}")
        for key, value in converted.items():
            if key not in original and ADDED.get(key) != value:
                sys.exit(f"{place}: {key} is new, {value!r}")
    elif isinstance(original, (list, tuple)):
        if len(original) != len(converted):
            sys.exit(f"{place}: {len(converted)} in place of {len(original)}")
        for index, (left, right) in enumerate(zip(original, converted)):
            compare(left, right, f"{place}[{index}]")
    elif original != converted or type(original) is not type(converted):
        sys.exit(f"{place}: {converted!r} in place of {original!r}")


if __name__ == "__main__":
    compare(load(sys.argv[1]), load(sys.argv[2]), "snapshot")
