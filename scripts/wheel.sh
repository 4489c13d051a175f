#!/bin/sh
# Builds the wheel to release into the folder given, for every Linux with glibc 2.17 or later (manylinux_2_17).
#
# The system's own linker would tie it to the C library of this machine; zig's links against an old one. But zig
# puts an unwinder of its own into what it links, and an exception thrown by PyTorch's C++ library must meet one
# unwinder only: libgcc's is named first, so that zig's is not needed. CARGO_TARGET_DIR moves the build.
set -eu
cd "$(dirname "$0")/.."
bin=$(sh scripts/python.sh maturin ziglang)
unwinder=$("${CC:-cc}" -print-file-name=libgcc_s.so.1)
[ -e "$unwinder" ] || { echo 'wheel.sh: there is no libgcc_s.so.1 beside the C compiler' >&2; exit 1; }
PATH="$bin:$PATH" RUSTFLAGS="-C link-arg=$unwinder" "$bin/maturin" build --release --locked --zig \
    --compatibility manylinux_2_17 --out "$1"
# What would go wrong if the order of libraries changed one day.
for wheel in "$1"/*.whl; do
    "$bin/python" - "$wheel" <<'PYTHON'
import sys, zipfile
library = zipfile.ZipFile(sys.argv[1]).read("cushion/_cushion.abi3.so")
assert b"libgcc_s.so.1\0" in library, "the library does not name libgcc's unwinder"
assert b"_Unwind_RaiseException\0" in library, "the library does not take the unwinder from outside"
PYTHON
done
