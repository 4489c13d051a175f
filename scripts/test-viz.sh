#!/bin/sh
# Checks converted snapshots with PyTorch's own tools (tests/viz/check.py). $1 is the cushion command, $2
# the viewer's code, if there is any. What cannot be checked here is skipped, and said.
set -u
here=$(dirname "$0")/..
if ! command -v python3 >/dev/null 2>&1; then
    echo "viz: SKIPPED: there is no python3"
    exit 0
fi
exec python3 "$here/tests/viz/check.py" "$1" "$(dirname "$1")/../viz" "${2-}"
