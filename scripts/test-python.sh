#!/bin/sh
# Tests the Python package: assembles the package and the stand-ins for CUDA, which `make test-python` has built, and runs
# python/tests with them. No GPU is needed. With TORCH, a version of PyTorch to install, or TORCH_PYTHON, a Python that
# has a CUDA build of it, no test is skipped.
#
#   scripts/test-python.sh [ARGUMENT OF unittest discover]...
set -eu

cd "$(dirname "$0")/.."
target=$(mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)
if [ -z "${TORCH_PYTHON:-}" ] && [ -n "${TORCH:-}" ]; then
    TORCH_PYTHON=$(sh scripts/setup-torch.sh "$TORCH") || TORCH_PYTHON=
fi
python=${TORCH_PYTHON:-${PYTHON:-python3}}
if ! "$python" -c 'import torch' 2>/dev/null; then
    echo 'test-python: there is no PyTorch here, so tests that need it are SKIPPED;'
    echo 'test-python: `make test-python TORCH=2.11.0` installs one, in 5 GB'
fi

rm -rf "$target/python"
mkdir -p "$target/python"
cp -R python/cushion python/gcAllocator python/custom_cuda_allocator "$target/python"
cp "$target/debug/lib_cushion.so" "$target/python/cushion/_cushion.abi3.so"
STANDIN_DRIVER=$target/debug/libcushion_standin.so sh tests/torch/standin.sh "$target/standin" >/dev/null

export CUSHION_PACKAGE="$target/python" CUSHION_STANDIN="$target/standin"
if [ $# -gt 0 ]; then
    exec "$python" -B -m unittest discover -s python/tests "$@"
fi
# Most tests wait for child processes, so three groups at a time take little longer than one.
rm -f "$target"/python-tests-*.log
running=
for first in a-e f-q '!a-q'; do
    "$python" -B -m unittest discover -s python/tests -p "test_[$first]*.py" >"$target/python-tests-$first.log" 2>&1 &
    running="$running $!"
done
status=0
for group in $running; do
    wait "$group" || status=$?
done
cat "$target"/python-tests-*.log >&2
exit $status
