#!/bin/sh
# Runs PyTorch (a CUDA build) on a machine with no GPU, over stand-ins for the CUDA runtime and driver.
#
#   tests/torch/standin.sh FOLDER                  builds into FOLDER and prints the environment to use
#   tests/torch/standin.sh FOLDER COMMAND [ARG]... builds and runs COMMAND in it
#
# The driver is the file STANDIN_DRIVER (libcushion_standin.so); with none, the runtime's stand-in answers
# by itself: STANDIN_DEVICES devices (1) of STANDIN_CAPACITY bytes (16 GiB).
set -eu

[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
source=$(dirname "$0")/cudart_standin.c
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
flags="-std=gnu11 -O1 -g -Wall -Wextra -Wno-unused-parameter -Werror -shared -fPIC"

# Under other names first: a program may be running over what is there.
${CC:-cc} $flags -o "$folder/.runtime.$$" "$source" -ldl -lpthread
mv "$folder/.runtime.$$" "$folder/libcudart_standin.so"
if [ -n "${STANDIN_DRIVER:-}" ]; then
    cp "$STANDIN_DRIVER" "$folder/.driver.$$"
else
    ${CC:-cc} $flags -DNO_DRIVER -Wl,-soname,libcuda.so.1 -o "$folder/.driver.$$" "$source"
fi
mv "$folder/.driver.$$" "$folder/libcuda.so.1"
# NVML is in the same file, and a link to it: a copy would know nothing of what happens in the other.
rm -f "$folder/libnvidia-ml.so.1"
[ -z "${STANDIN_DRIVER:-}" ] || ln -s libcuda.so.1 "$folder/libnvidia-ml.so.1"

preload=$folder/libcudart_standin.so${LD_PRELOAD:+:$LD_PRELOAD}
path=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
if [ $# -eq 0 ]; then
    echo "LD_PRELOAD=$preload LD_LIBRARY_PATH=$path"
else
    LD_PRELOAD=$preload LD_LIBRARY_PATH=$path exec "$@"
fi
