#!/bin/sh
# Tests the library for C and C++ on simulated devices and over the stand-in for CUDA's driver. No GPU is needed.
# `make test-capi` builds the libraries first. CC and CXX are the compilers.
set -eu
cd "$(dirname "$0")/.."
target=$(mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)
cc=${CC:-cc}
cxx=${CXX:-c++}
warnings='-Wall -Wextra -Wpedantic -Werror'
work=$target/capi
installed=$work/installed
say() { echo "test-capi: $*"; }
fail() { say "FAILED: $*" >&2; exit 1; }

for tool in "$cc" "$cxx"; do
    # CC and CXX may contain options.
    command -v "${tool%% *}" >/dev/null 2>&1 || { say "SKIPPED: there is no $tool"; exit 0; }
done

# The programs use the library as installed, in a folder of its own.
rm -rf "$work"
mkdir -p "$work/driver"
sh scripts/install-c.sh "$installed" "$target/debug" >/dev/null
ln -s "$target/debug/libcushion_standin.so" "$work/driver/libcuda.so.1"

# The library exports exactly the functions that the header declares.
sed -n 's/^\(cushion_status \|const char \*\)\(cushion_[a-z_]*\)(.*/\2/p' include/cushion.h | sort >"$work/declared"
nm -D --defined-only "$installed/lib/libcushion_c.so" | sed -n 's/.* T \(.*\)/\1/p' | sort >"$work/exported"
[ -s "$work/declared" ] || fail 'the header declares no function'
diff "$work/declared" "$work/exported" || fail 'the header and the library differ'

# The header compiles alone, in each language, with every compiler found.
echo '#include <cushion.h>' >"$work/alone.c"
cp "$work/alone.c" "$work/alone.cpp"
header() {
    for standard in $3; do
        $1 -std="$standard" $warnings -Wshadow -I"$installed/include" -fsyntax-only "$work/alone.$2"
    done
}
header "$cc" c 'c99 c11'
header "$cxx" cpp 'c++11 c++14 c++17'
if command -v clang >/dev/null 2>&1; then header clang c 'c99 c11'; fi
if command -v clang++ >/dev/null 2>&1; then header clang++ cpp 'c++11 c++14 c++17'; fi

# The test programs, with the shared and with the static library.
shared="-L$installed/lib -lcushion_c -lpthread -ldl"
static="$installed/lib/libcushion_c.a -lgcc_s -lutil -lrt -lpthread -lm -ldl"
flags="-g -O1 $warnings -I$installed/include"
for kind in shared static; do
    eval "libraries=\$$kind"
    $cc -std=c99 -D_XOPEN_SOURCE=700 $flags -o "$work/c_$kind" tests/capi/c.c $libraries
    $cxx -std=c++11 $flags -o "$work/cpp_$kind" tests/capi/cpp.cpp $libraries
done
# The examples, built as their comments say.
pc=$shared
if command -v pkg-config >/dev/null 2>&1; then
    pc=$(PKG_CONFIG_PATH=$installed/lib/pkgconfig pkg-config --cflags --libs cushion)
fi
$cc -std=c99 $flags -o "$work/alloc" examples/c/alloc.c $pc
$cxx -std=c++11 $flags -o "$work/buffers" examples/cpp/buffers.cpp $pc

# with FOLDERS PROGRAM [ARGUMENT]: runs the program with FOLDERS as library path.
with() {
    folders=$1
    shift
    LD_LIBRARY_PATH=$folders${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$@"
}
# passes FOLDERS PROGRAM ARGUMENT: fails unless the program prints ok, so that a skip does not count as a pass.
passes() {
    with "$@" >"$work/out" 2>&1 || { cat "$work/out"; fail "$2 $3"; }
    [ "$(tail -n 1 "$work/out")" = ok ] || { cat "$work/out"; fail "$2 $3 did not pass"; }
    say "$(basename "$2") $3: $(grep -c ': ok: ' "$work/out") tests passed"
}
for kind in shared static; do
    for language in c cpp; do
        passes "$installed/lib" "$work/${language}_$kind" simulated
        passes "$work/driver:$installed/lib" "$work/${language}_$kind" cuda
    done
done
for example in alloc buffers; do
    with "$installed/lib" "$work/$example" >"$work/out" 2>&1 || { cat "$work/out"; fail "the example $example"; }
    [ "$(tail -n 1 "$work/out")" = ok ] || { cat "$work/out"; fail "the example $example"; }
    say "the example $example: passed"
done

# The C program leaks no host memory and makes no invalid access.
if command -v valgrind >/dev/null 2>&1; then
    with "$installed/lib" valgrind --fair-sched=yes --leak-check=full --show-leak-kinds=all \
        --errors-for-leak-kinds=definite,indirect,possible --error-exitcode=1 \
        --suppressions=scripts/valgrind.supp "$work/c_shared" simulated \
        >"$work/out" 2>&1 || { cat "$work/out"; fail 'valgrind'; }
    sed -n 's/^==[0-9]*== *\(in use at exit\|total heap usage\|definitely lost\|All heap blocks\|ERROR SUMMARY\)/\1/p' \
        "$work/out" | while read -r line; do say "valgrind: $line"; done
else
    say 'SKIPPED: there is no valgrind to check the C program for leaks'
fi
