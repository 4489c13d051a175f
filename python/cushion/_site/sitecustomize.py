"""Found first on the path by programs that `cushion run` starts: installs Cushion once torch is imported, and
hands over to the `sitecustomize` that it hides."""

import importlib
import importlib.abc
import os
import sys


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
            # Only now: programs look for torch before they import it, and may try again after a failure.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                # Last, so that it hides nothing: where `cushion run` found the package, if this Python has it nowhere.
                sys.path.append(os.environ["CUSHION_FOUND_IN"])
                import cushion

                cushion.install()

        spec.loader.exec_module = exec_module
        return spec


def _run_the_hidden_one():
    here = os.path.dirname(os.path.abspath(__file__))
    path, ours = sys.path[:], sys.modules.pop(__name__, None)
    sys.path[:] = [entry for entry in path if os.path.abspath(entry or os.curdir) != here]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.path[:] = path
        sys.modules[__name__] = ours


sys.meta_path.insert(0, _AfterTorch())
if __name__ == "sitecustomize":
    _run_the_hidden_one()
