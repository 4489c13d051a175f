#!/bin/sh
# Checks converted snapshots with PyTorch's own tools (tests/viz/check.py). $1 is the cushion command, $2
# the optional code of the viewer. Checks that cannot run here are reported as skipped.
set -u
here=$(dirname "$0")/..
if ! command -v python3 >/dev/null 2>&1; then
    echo "viz: SKIPPED: there is no python3"
    exit 0
fi
exec python3 "$here/tests/viz/check.py" "$1" "$(dirname "$1")/../viz" "${2-}"
