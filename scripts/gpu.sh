#!/bin/sh
# Runs tests/gpu/run.py with the package in gpu-kit/, and passes its arguments on. Builds the kit if it is
# missing and the machine has a GPU.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ ! -d gpu-kit/site ] && [ -e /dev/nvidiactl ]; then
    if ! command -v "${CARGO:-cargo}" >/dev/null 2>&1; then
        echo 'gpu: gpu-kit/ is missing, and there is no cargo to build it:' >&2
        echo 'gpu: run `make gpu-kit` on a machine with Rust, and copy the folder gpu-kit/ here' >&2
        exit 1
    fi
    sh scripts/gpu-kit.sh
fi
PYTHONPATH=$(pwd)/gpu-kit/site${PYTHONPATH:+:$PYTHONPATH} exec "$python" tests/gpu/run.py "$@"
