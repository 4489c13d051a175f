#!/bin/sh
# Runs tests/gpu/run.py with gpu-kit/'s package; the arguments are the runner's. The kit is built if it
# is missing and there is a GPU to use it on.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ ! -d gpu-kit/site ] && [ -e /dev/nvidiactl ]; then
    if ! command -v "${CARGO:-cargo}" >/dev/null 2>&1; then
        echo 'gpu: there is no gpu-kit/, and no cargo to build it with:' >&2
        echo 'gpu: run `make gpu-kit` on a machine with Rust, and copy the folder gpu-kit/ here' >&2
        exit 1
    fi
    sh scripts/gpu-kit.sh
fi
PYTHONPATH=$(pwd)/gpu-kit/site${PYTHONPATH:+:$PYTHONPATH} exec "$python" tests/gpu/run.py "$@"
