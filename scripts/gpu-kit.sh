#!/bin/sh
# Builds gpu-kit/ where there is Rust, to be carried to a machine with a GPU that has none:
#     gpu-kit/wheel         the Python package
#     gpu-kit/site          the same, unpacked, for PYTHONPATH
#     gpu-kit/gpu_contract  the tests of the CUDA layer
#     gpu-kit/examples      the examples that are compiled
# CARGO and PYTHON are the commands to build with.
set -eu
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
python=${PYTHON:-python3}
messages=$(mktemp)
trap 'rm -f "$messages"' EXIT

rm -rf gpu-kit
mkdir gpu-kit
"$cargo" test -p cushion-cuda --test gpu_contract --release --no-run --locked \
    --message-format=json >"$messages"
cp "$("$python" scripts/executable.py gpu_contract <"$messages")" gpu-kit/gpu_contract
mkdir gpu-kit/examples
"$cargo" build -p cushion --examples --features cudarc --release --locked --message-format=json >"$messages"
for example in buffers kernel; do
    cp "$("$python" scripts/executable.py "$example" <"$messages")" "gpu-kit/examples/$example"
done
sh scripts/wheel.sh gpu-kit/wheel
# Last: what is unpacked says that the kit is whole.
"$python" -m zipfile -e gpu-kit/wheel/*.whl gpu-kit/site
du -sh gpu-kit/site gpu-kit/gpu_contract
