"""First on the path of programs that `cushion run` starts: installs Cushion once torch is imported, and runs the
`sitecustomize` that this module hides.

The Python may belong to another environment, without Cushion's packages. If Cushion cannot be installed, a message on
standard error says so, and the program runs with PyTorch's own allocator: `import torch` does not fail."""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Packages(importlib.abc.MetaPathFinder):
    """Finds the packages of Cushion's wheel in the folder that this file is installed in, and no others there."""

    NAMES = ("cushion", "gcAllocator", "custom_cuda_allocator")

    def find_spec(self, name, path=None, target=None):
        if name not in self.NAMES:
            return None
        return importlib.machinery.PathFinder.find_spec(name, [os.path.dirname(os.path.dirname(_HERE))])


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Calls `cushion.install()` right after the first `import torch`."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            # Not in find_spec: programs look for torch before they import it, and may try again after a failure.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _install()

        spec.loader.exec_module = exec_module
        return spec


def _install():
    try:
        import cushion

        cushion.install()
    except Warning as warning:
        # With `-W error`, a warning is raised. Cushion is installed by then.
        _say(warning)
    except Exception as error:
        _do_without(error)


def _say(text):
    if sys.stderr is not None:
        sys.stderr.write(f"cushion: {text}\n")


def _do_without(error):
    """Reports that Cushion is not installed. An exception inside `import torch` would leave torch half imported, and a
    second import would fail."""
    kind = type(error).__name__
    why = str(error) if kind == "InstallError" else f"{kind}: {error}"
    where = f"process {os.getpid()} ({sys.executable})"
    required = os.environ.get("CUSHION_REQUIRED", "").strip().lower() not in ("", "0", "false", "no", "off")
    what = "{} ends, because Cushion is required" if required else "{} runs with PyTorch's own allocator"
    _say(f"{what.format(where)}: {why}")
    if required:
        sys.exit(1)


def _run_the_hidden_one():
    path, ours = sys.path[:], sys.modules.pop(__name__, None)
    sys.path[:] = [entry for entry in path if os.path.abspath(entry or os.curdir) != _HERE]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.path[:] = path
        sys.modules[__name__] = ours


sys.meta_path.insert(0, _AfterTorch())
# Last, so that installed packages come first: this one is for a Python without them.
sys.meta_path.append(_Packages())
if __name__ == "sitecustomize":
    _run_the_hidden_one()
