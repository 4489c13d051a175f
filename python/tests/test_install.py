"""`cushion.install()`: when it raises, and which functions of PyTorch it calls. Small packages named `torch` replace
PyTorch here."""

from __future__ import annotations

import logging
import tempfile
import textwrap
import unittest
from pathlib import Path

import support

# The attributes that install() uses.
FAKE_TORCH = """
    import types

    __version__ = {version!r}
    version = types.SimpleNamespace(cuda={cuda!r}, hip={hip!r})
    calls = []

    class _Inner:
        def __getattr__(self, name):
            return lambda address: calls.append((name, address))

    class CUDAPluggableAllocator:
        def __init__(self, path, alloc, free):
            calls.append(("load", path, alloc, free))

        def allocator(self):
            return _Inner()

    def _change(allocator):
        calls.append(("change",))
        if {refuses!r}:
            raise RuntimeError("Can't swap an already initialized allocator")

    class _Benchmark:
        def __get__(self, *_):
            return {benchmark!r}
        setter = None

    class _Cudnn(types.ModuleType):
        benchmark = _Benchmark()

    cuda = types.SimpleNamespace(
        is_initialized=lambda: {initialised!r},
        mem_get_info=lambda *_: (0, 0),
        memory=types.SimpleNamespace(
            CUDAPluggableAllocator=CUDAPluggableAllocator, change_current_allocator=_change
        ),
    )
    backends = types.SimpleNamespace(cudnn=_Cudnn("cudnn"))
    UntypedStorage = type("UntypedStorage", (), {{}})
    _C = types.SimpleNamespace(_set_cudnn_benchmark=lambda value: None, _cuda_memoryStats=None)
"""

REPORT = """
    import sys, cushion
    try:
        cushion.install({arguments})
    except Exception as error:
        print(type(error).__module__.split(".")[0], type(error).__name__, error, sep="|")
    else:
        print("installed")
    print(cushion.is_installed())
"""


class Fake(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def torch(self, **differences: object) -> None:
        asked = {
            "version": "2.11.0+cu130",
            "cuda": "13.0",
            "hip": None,
            "initialised": False,
            "benchmark": False,
            "refuses": False,
            **differences,
        }
        (self.folder / "torch.py").write_text(textwrap.dedent(FAKE_TORCH).format(**asked))

    def run_python(self, code: str, **changes: str | None) -> list[str]:
        path = f"{self.folder}:{support.environment()['PYTHONPATH']}"
        done = support.python("-c", textwrap.dedent(code), changes={"PYTHONPATH": path, "LD_PRELOAD": None, **changes})
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines()

    def install(self, arguments: str = "", **changes: str | None) -> list[str]:
        return self.run_python(REPORT.format(arguments=arguments), **changes)

    def assert_refused(self, *words: str) -> None:
        result, installed = self.install()
        self.assertTrue(result.startswith("cushion|InstallError|"), result)
        for word in words:
            self.assertIn(word, result)
        self.assertEqual(installed, "False")


class Refusals(Fake):
    def test_no_torch(self) -> None:
        (self.folder / "torch.py").write_text("raise ImportError('none here')")
        self.assert_refused("needs PyTorch", "install it")

    def test_too_old(self) -> None:
        for version in ("2.2.2+cu121", "1.13.1"):
            with self.subTest(version):
                self.torch(version=version)
                self.assert_refused(version, "too old", "2.3")

    def test_the_oldest_version_and_unusual_version_strings_are_accepted(self) -> None:
        for version in ("2.3.0", "2.10.0a0+git123", "3.0", "nightly"):
            with self.subTest(version):
                self.torch(version=version)
                self.assertEqual(self.install(), ["installed", "True"])

    def test_without_cuda(self) -> None:
        self.torch(version="2.11.0+cpu", cuda=None)
        self.assert_refused("2.11.0+cpu", "without CUDA")

    def test_for_rocm(self) -> None:
        self.torch(version="2.11.0+rocm6", cuda=None, hip="6.0")
        self.assert_refused("ROCm")

    def test_cuda_in_use(self) -> None:
        self.torch(initialised=True)
        self.assert_refused("CUDA is in use already", "cushion.install()", "cushion run")

    def test_cuda_in_use_under_ray(self) -> None:
        """Ray Train sets the GPU of a worker before it calls the training function."""
        self.torch(initialised=True)
        hook = 'ray.init(runtime_env={"worker_process_setup_hook": "cushion.install"})'
        self.assertNotIn("Ray", self.install()[0])
        (self.folder / "ray.py").touch()
        result, installed = self.run_python("import ray\n" + textwrap.dedent(REPORT.format(arguments="")))
        self.assertIn("CUDA is in use already", result)
        self.assertIn(hook, result)
        self.assertEqual(installed, "False")

    def test_another_allocator_was_first(self) -> None:
        self.torch(refuses=True)
        self.assert_refused("Can't swap an already initialized allocator", "Another allocator")

    def test_install_error_is_a_runtime_error(self) -> None:
        import cushion

        self.assertTrue(issubclass(cushion.InstallError, RuntimeError))

    def test_an_invalid_option_is_found_before_torch_is_imported(self) -> None:
        result, installed = self.install('policy="best"')
        self.assertTrue(result.startswith("builtins|ValueError|"), result)
        self.assertEqual(installed, "False")

    def test_install_can_be_called_again_after_an_error(self) -> None:
        self.torch(initialised=True)
        lines = self.run_python(
            """
            import cushion, torch
            try:
                cushion.install()
            except cushion.InstallError:
                print("refused")
            torch.cuda.is_initialized = lambda: False
            cushion.install()
            print(cushion.is_installed())
            """
        )
        self.assertEqual(lines, ["refused", "True"])


class Taking(Fake):
    def test_loads_the_extension_and_sets_every_hook_before_the_change(self) -> None:
        self.torch()
        lines = self.run_python(
            """
            import cushion, torch
            from cushion import _cushion
            cushion.install()
            first, *setters, last = torch.calls
            assert first == ("load", _cushion.__file__, "cushion_alloc", "cushion_free"), first
            assert last == ("change",), last
            assert dict(setters) == _cushion.hooks(), setters
            assert all(address > 0 for _, address in setters) and len(setters) == 8
            print(torch._C._cuda_memoryStats is _cushion.memory_stats)
            """
        )
        self.assertEqual(lines, ["True"])

    def test_a_second_call_changes_only_options(self) -> None:
        self.torch()
        lines = self.run_python(
            """
            import cushion, torch
            from cushion import _cushion
            cushion.install()
            before = len(torch.calls)
            cushion.install(policy="expandable", conf="max_split_size_mb:64")
            print(len(torch.calls) - before, _cushion.conf())
            """
        )
        self.assertEqual(lines[0].split()[0], "0")
        self.assertIn("expandable_segments:True", lines[0])
        self.assertIn("max_split_size_mb:64", lines[0])

    def test_warnings_raised_as_errors_do_not_undo_it(self) -> None:
        self.torch(benchmark=True)
        lines = self.run_python(
            """
            import cushion, torch, warnings
            from cushion import _cushion
            warnings.simplefilter("error")
            try:
                cushion.install(policy="segments")
            except UserWarning as warning:
                print("benchmark stays False" in str(warning))
            print(cushion.is_installed(), _cushion.conf(), torch._C._cuda_memoryStats is _cushion.memory_stats)
            cushion.install()
            """
        )
        self.assertEqual(lines, ["True", "True paged:False True"])

    def test_from_many_threads_at_once(self) -> None:
        self.torch()
        lines = self.run_python(
            """
            import cushion, threading, torch
            barrier = threading.Barrier(8)
            def install():
                barrier.wait()
                cushion.install()
            threads = [threading.Thread(target=install) for _ in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            print(sum(call == ("change",) for call in torch.calls))
            """
        )
        self.assertEqual(lines, ["1"])

    def test_backend_is_removed_from_the_environment(self) -> None:
        self.torch()
        code = """
            import cushion, os
            cushion.install()
            print(os.environ["PYTORCH_CUDA_ALLOC_CONF"])
            """
        for conf in ("backend:native,max_split_size_mb:64", "max_split_size_mb:64,backend:cudaMallocAsync"):
            self.assertEqual(self.run_python(code, PYTORCH_CUDA_ALLOC_CONF=conf), ["max_split_size_mb:64"])


class Logging(Fake):
    CODE = """
        import cushion, logging, sys
        if {records}:
            logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
        cushion.install(enable_logging={enable})
        cushion.install()
        """

    def run_both(self, records: bool, enable: bool | None, **changes: str) -> tuple[str, str]:
        self.torch()
        path = f"{self.folder}:{support.environment()['PYTHONPATH']}"
        code = textwrap.dedent(self.CODE).format(records=records, enable=enable)
        done = support.python("-c", code, changes={"PYTHONPATH": path, "LD_PRELOAD": None, **changes})
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout, done.stderr

    def test_silent_by_default(self) -> None:
        out, err = self.run_both(False, None)
        self.assertEqual(out, "")
        # The fake torch does not have PyTorch's exception, which causes a warning.
        self.assertIn("UserWarning: PyTorch 2.11.0+cu130 gets a RuntimeError when memory runs out", err)
        self.assertEqual(len(err.splitlines()), 1, err)

    def test_to_standard_error_once_each(self) -> None:
        out, err = self.run_both(False, None, CUSHION_LOG="1")
        self.assertEqual(out, "")
        self.assertEqual(err.count("\ncushion: cushion 0."), 2, err)
        self.assertEqual(err.count("installed: policy paged"), 2, err)

    def test_a_second_install_leaves_it_on(self) -> None:
        _, err = self.run_both(False, True)
        self.assertEqual(err.count("installed: policy paged"), 2, err)

    def test_a_second_install_turns_it_on_and_off(self) -> None:
        self.torch()
        code = """
            import cushion, logging, sys
            logger = logging.getLogger("cushion")
            logger.setLevel(logging.ERROR)
            cushion.install()
            for wanted in (True, None, False, None):
                cushion.install(enable_logging=wanted)
                print(logger.getEffectiveLevel(), logger.propagate, len(logger.handlers))
            """
        lines = self.run_python(code)
        on, off = f"{logging.INFO} True 2", f"{logging.ERROR} True 1"
        self.assertEqual(lines, [on, on, off, off])

    def test_to_the_program_s_own_log(self) -> None:
        out, err = self.run_both(True, None)
        self.assertIn("cushion INFO cushion ", out)
        self.assertNotIn("installed", err)


if __name__ == "__main__":
    unittest.main()
