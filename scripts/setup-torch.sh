#!/bin/sh
# Makes a virtual environment with a CUDA build of PyTorch, of the given version, and with the frameworks that Cushion
# is tested with, unless it exists, and prints its Python:
#     python=$(sh scripts/setup-torch.sh 2.11.0)
# It needs five gigabytes. If it cannot be installed, this says why and fails.
set -eu
cd "$(dirname "$0")/.."
say() { echo "setup-torch: $*" >&2; }
mkdir -p "${CARGO_TARGET_DIR:-target}"
venv=$(cd "${CARGO_TARGET_DIR:-target}" && pwd)/torch-$1

# The version of mypy is that of the other checks.
mypy=$(sed -n 's/.*echo \(mypy==[0-9.]*\).*/\1/p' scripts/python.sh)
frameworks="accelerate==1.15.0 lightning==2.6.6 transformers==5.22.2 ray[train]==2.60.0 $mypy"

# An environment that was made for other versions of these is made again.
if [ "$(cat "$venv/whole" 2>/dev/null)" != "$frameworks" ]; then
    free=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print int($4 / 1048576) }')
    if [ "$free" -lt 10 ]; then
        say "PyTorch needs 5 GiB, and 5 GiB more during the installation; $free GiB are free"
        exit 1
    fi
    say "installing PyTorch $1 (ten minutes at most)"
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv" >&2
    if ! timeout 600 "$venv/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
        "torch==$1" 'numpy<3' $frameworks >&2; then
        say "PyTorch $1 could not be installed"
        rm -rf "$venv"
        exit 1
    fi
    echo "$frameworks" >"$venv/whole"
fi
echo "$venv/bin/python"
