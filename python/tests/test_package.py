"""The package: its names, its stubs, and what importing it must not do."""

from __future__ import annotations

import ast
import inspect
import unittest
from pathlib import Path

import support

import cushion
from cushion import _cushion

STUBS = Path(cushion.__file__).with_name("_cushion.pyi")


def parameters(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    """Returns the names of a stub's parameters, and whether each has a default."""
    arguments = function.args.posonlyargs + function.args.args
    without = len(arguments) - len(function.args.defaults)
    return [(argument.arg, at >= without) for at, argument in enumerate(arguments)]


class Names(unittest.TestCase):
    def test_the_package_has_all_names_in_its_all(self) -> None:
        for name in cushion.__all__:
            self.assertTrue(hasattr(cushion, name), name)
        expected = """CannotSplit InstallError Memory Offloader OutOfMemoryError RankError Receipt SplitBatch
            __version__ alloc_async alloc_future allocate_tensor budget find_batch_size inject install is_installed
            is_out_of_memory keep_receipts offloader on_refusal on_shortage prefetch receipt_of receipts
            remove_callback retry retry_stats simulate split_batch stats"""
        self.assertEqual(sorted(cushion.__all__), expected.split())

    def test_version(self) -> None:
        manifest = (support.ROOT / "Cargo.toml").read_text()
        self.assertIn(f'version = "{cushion.__version__}"', manifest)

    def test_not_installed_yet(self) -> None:
        self.assertIs(cushion.is_installed(), False)

    def test_typed(self) -> None:
        self.assertTrue(STUBS.with_name("py.typed").exists())


class Stubs(unittest.TestCase):
    def setUp(self) -> None:
        self.tree = ast.parse(STUBS.read_text())

    def test_stubs_have_the_names_of_the_module(self) -> None:
        stubbed = set()
        for node in self.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                stubbed.add(node.name)
            elif isinstance(node, ast.AnnAssign):
                stubbed.add(node.target.id)  # type: ignore[union-attr]
        there = {name for name in dir(_cushion) if not name.startswith("__")} | {"__version__"}
        self.assertEqual(stubbed, there)

    def test_stubs_have_the_signatures_of_the_module(self) -> None:
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                with self.subTest(node.name):
                    signature = inspect.signature(getattr(_cushion, node.name))
                    real = [
                        (name, parameter.default is not parameter.empty)
                        for name, parameter in signature.parameters.items()
                    ]
                    self.assertEqual(parameters(node), real)

    def test_classes_have_the_attributes_of_their_stubs(self) -> None:
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                stubbed = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
                there = {name for name in vars(getattr(_cushion, node.name)) if not name.startswith("_")}
                self.assertEqual(stubbed, there)


class Importing(unittest.TestCase):
    def test_does_not_import_torch(self) -> None:
        done = support.python("-c", "import cushion, sys; sys.exit('torch' in sys.modules)")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_needs_no_cuda(self) -> None:
        code = "import cushion._cushion as c; print(c.memory_stats(0)['num_ooms'], c.memory_snapshot()['segments'])"
        done = support.python("-c", code, changes={"LD_PRELOAD": None, "LD_LIBRARY_PATH": None})
        self.assertEqual((done.stdout, done.returncode), ("0 []\n", 0), done.stderr)


if __name__ == "__main__":
    unittest.main()
