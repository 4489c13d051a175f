#!/bin/sh
# Installs the library for C and C++: the header, both libraries and a file for pkg-config.
#
#   scripts/install-c.sh PREFIX FOLDER     FOLDER is where cargo built them, such as target/release
#
# With DESTDIR, everything is installed below it, for packagers.
set -eu
[ $# -eq 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
prefix=$1
case $prefix in /*) ;; *) echo "install-c: $prefix is not an absolute path" >&2; exit 2 ;; esac
built=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
root=${DESTDIR:-}$prefix
version=$(sed -n 's/^#define CUSHION_VERSION "\(.*\)"/\1/p' include/cushion.h)

mkdir -p "$root/include" "$root/lib/pkgconfig"
cp include/cushion.h "$root/include/"
cp "$built/libcushion_c.a" "$root/lib/"
# Programs load libcushion_c.so.0 at run time (crates/cushion-capi/build.rs) and link libcushion_c.so. The copy gets a
# temporary name first, because a program may be running with the present file.
cp "$built/libcushion_c.so" "$root/lib/.libcushion_c.so.$$"
mv -f "$root/lib/.libcushion_c.so.$$" "$root/lib/libcushion_c.so.0"
ln -sf libcushion_c.so.0 "$root/lib/libcushion_c.so"
cat >"$root/lib/pkgconfig/cushion.pc" <<PC
prefix=$prefix
includedir=\${prefix}/include
libdir=\${prefix}/lib

Name: cushion
Description: A caching CUDA memory allocator that keeps GPU programs alive when memory runs out
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lcushion_c
Libs.private: -lgcc_s -lutil -lrt -lpthread -lm -ldl
PC
echo "cushion.h, libcushion_c.so, libcushion_c.a and cushion.pc are in $root"
