#!/bin/sh
# Builds the wheel to release, for every Linux with glibc 2.17 or later (manylinux_2_17), into the folder $1.
#
# The system's linker would require the C library of this machine; zig's linker uses an old one. But zig adds its own
# unwinder to the library, and an exception of PyTorch's C++ library must meet one unwinder only. So libgcc's unwinder
# comes first on the command line, and zig's is not linked. CARGO_TARGET_DIR moves the build.
set -eu
cd "$(dirname "$0")/.."
bin=$(sh scripts/python.sh maturin ziglang)
unwinder=$("${CC:-cc}" -print-file-name=libgcc_s.so.1)
[ -e "$unwinder" ] || { echo 'wheel.sh: there is no libgcc_s.so.1 beside the C compiler' >&2; exit 1; }
PATH="$bin:$PATH" RUSTFLAGS="-C link-arg=$unwinder" "$bin/maturin" build --release --locked --zig \
    --compatibility manylinux_2_17 --out "$1"
# Fail if the order of libraries has changed and zig's unwinder is linked.
for wheel in "$1"/*.whl; do
    "$bin/python" - "$wheel" <<'PYTHON'
import sys, zipfile
library = zipfile.ZipFile(sys.argv[1]).read("cushion/_cushion.abi3.so")
assert b"libgcc_s.so.1\0" in library, "the library does not name libgcc's unwinder"
assert b"_Unwind_RaiseException\0" in library, "the library does not import the unwinder"
PYTHON
done
