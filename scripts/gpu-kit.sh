#!/bin/sh
# Builds gpu-kit/ on a machine with Rust. Copy it to a machine with a GPU that has no Rust:
#     gpu-kit/wheel         the Python package
#     gpu-kit/site          the same, unpacked, for PYTHONPATH
#     gpu-kit/gpu_contract  the tests of the CUDA layer
#     gpu-kit/examples      the compiled examples, and the tests of the library for C and C++
# CARGO, PYTHON, CC and CXX are the commands to build with.
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
"$cargo" build -p cushion-capi --release --locked
# Link the compiler's own libraries dynamically: the static libraries of a new compiler need a newer glibc.
library="${CARGO_TARGET_DIR:-target}/release/libcushion_c.a -lgcc_s -lpthread -lm -ldl"
for program in capi_c:tests/capi/c.c c_alloc:examples/c/alloc.c; do
    ${CC:-cc} -std=c99 -D_XOPEN_SOURCE=700 -O2 -Iinclude -o "gpu-kit/examples/${program%%:*}" "${program#*:}" $library
done
for program in capi_cpp:tests/capi/cpp.cpp cpp_buffers:examples/cpp/buffers.cpp; do
    ${CXX:-c++} -std=c++11 -O2 -Iinclude -o "gpu-kit/examples/${program%%:*}" "${program#*:}" $library
done
sh scripts/wheel.sh gpu-kit/wheel
# This comes last: an existing gpu-kit/site means that the kit is complete.
"$python" -m zipfile -e gpu-kit/wheel/*.whl gpu-kit/site
du -sh gpu-kit/site gpu-kit/gpu_contract
