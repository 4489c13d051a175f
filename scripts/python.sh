#!/bin/sh
# Makes a virtual environment with the named Python tools, in the versions below, unless it exists, and
# prints the folder of their commands:
#     bin=$(sh scripts/python.sh maturin)
# PYTHON is the interpreter of the environment.
set -eu
cd "$(dirname "$0")/.."
venv=${CARGO_TARGET_DIR:-target}/venv

pinned() {
    case $1 in
    maturin) echo maturin==1.16.0 ;;
    mypy) echo mypy==2.4.1 ;;
    ruff) echo ruff==0.17.4 ;;
    ziglang) echo ziglang==0.17.0 ;;
    *)
        echo "python.sh: no version of $1 is pinned" >&2
        return 2
        ;;
    esac
}

if ! "$venv/bin/python" -c '' 2>/dev/null; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv" >&2
fi
for tool in "$@"; do
    wanted=$(pinned "$tool")
    if [ ! -e "$venv/$wanted" ]; then
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wanted" >&2
        : >"$venv/$wanted"
    fi
done
cd "$venv/bin" && pwd
