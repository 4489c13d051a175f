#!/bin/sh
# Installs the package as users do, into an environment of its own, and uses it: `pip install .`, then
# `pip install -e .`.
set -eu
cd "$(dirname "$0")/.."
# This tests the installation, not the speed, so a build that takes a quarter of the time is enough.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_OPT_LEVEL=1
# Use the maturin of the tools' environment, so that nothing is downloaded twice.
bin=$(sh scripts/python.sh maturin)
export PATH="$bin:$PATH"
trap '"$bin/python" -m pip uninstall --quiet --yes cushion >/dev/null 2>&1; rm -f python/cushion/_cushion*.so' EXIT
pip="$bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps"
expected=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml)

check() {
    # Run outside the repository, so that Python does not find its folders.
    (
        cd /
        [ "$("$bin/cushion" --version)" = "cushion $expected" ]
        "$bin/cushion" run --help >/dev/null
        "$bin/python" - "$expected" <<'PYTHON'
import importlib.metadata, pathlib, sys
import cushion
folder = pathlib.Path(cushion.__file__).parent
for name in ("py.typed", "_cushion.pyi", "_site/sitecustomize.py"):
    assert (folder / name).is_file(), name
import custom_cuda_allocator, gcAllocator
for package in (custom_cuda_allocator, gcAllocator):
    assert pathlib.Path(package.__file__).with_name("py.typed").is_file(), package
assert cushion.__version__ == importlib.metadata.version("cushion") == sys.argv[1], cushion.__version__
assert "torch" not in sys.modules
try:
    cushion.install()
except cushion.InstallError as error:
    assert "PyTorch" in str(error), error
cushion.simulate("1GiB")
with gcAllocator.GCAllocator() as counting:
    custom_cuda_allocator.CUDAAllocator().allocate(1 << 20)
    assert counting.get_stats().current_bytes_allocated == 1 << 20, counting.get_stats()
PYTHON
    )
    "$bin/python" -m cushion replay tests/traces/corners/churn.pickle.gz --verify >/dev/null 2>&1
}

$pip --force-reinstall .
check
tag=$("$bin/python" -c 'import importlib.metadata as m; print([l for l in m.distribution("cushion").read_text("WHEEL").splitlines() if l.startswith("Tag")])')
echo "wheel: pip install . works; $tag"
$pip --editable .
check
echo 'wheel: pip install -e . works'
echo '2 passed, 0 failed'
