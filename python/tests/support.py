"""Shared by the tests: finds the package and the stand-ins, and runs tests in processes of their own.

Cushion can be installed once per process, and a test must not see another test's allocator. A test of `ProcessCase`
therefore runs in its own process: a wrapper replaces its method, starts the process, and fails or skips as the process
reports. `call` does the same for one function, and returns its result.

Importing torch takes seconds. Processes that need it are forked from one process that has only imported it.
`warm=False` starts a fresh process instead, for tests of what torch reads at import, and of the end of a program.

    CUSHION_PACKAGE   folder that holds the package under test; by default the installed one
    CUSHION_STANDIN   folder of the stand-ins for CUDA, libcuda.so.1 and libcudart_standin.so
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import unittest
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRACES = ROOT / "tests" / "traces"
PACKAGE = os.environ.get("CUSHION_PACKAGE")
STANDIN = os.environ.get("CUSHION_STANDIN")
# Prefixes of variables that configure an allocator or the stand-ins.
CONFIGURING = ("CUSHION_", "PYTORCH_", "STANDIN_", "CUDART_STANDIN_", "GC_ALLOCATOR_", "OOM_")
MIB = 1 << 20
GIB = 1 << 30
# Seconds after which a forked child counts as hanging.
_LONGEST_CHILD = 20

if PACKAGE and PACKAGE not in sys.path:
    sys.path.insert(0, PACKAGE)


def _find_torch() -> tuple[str | None, str | None]:
    """Returns the version of torch and of its CUDA, without importing it."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return None, None
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return version.get("__version__"), version.get("cuda")


TORCH, TORCH_CUDA = _find_torch()
TORCH_VERSION = tuple(int(part) for part in TORCH.split(".")[:2]) if TORCH else (0, 0)


def why_no_standin() -> str | None:
    if not STANDIN:
        return "CUSHION_STANDIN does not say where the stand-in for CUDA is"
    missing = [name for name in ("libcuda.so.1", "libcudart_standin.so") if not Path(STANDIN, name).exists()]
    return f"{STANDIN} has no {' and no '.join(missing)}" if missing else None


def why_no_torch() -> str | None:
    if TORCH is None:
        return f"{sys.executable} has no torch"
    if TORCH_CUDA is None:
        return f"torch {TORCH} is built without CUDA"
    if TORCH_VERSION < (2, 3):
        return f"torch {TORCH} is older than 2.3"
    return why_no_standin()


needs_standin = unittest.skipIf(why_no_standin(), why_no_standin() or "")
needs_torch = unittest.skipIf(why_no_torch(), why_no_torch() or "")


def environment(changes: dict[str, str | None] | None = None) -> dict[str, str]:
    """Returns the environment for a child: that of the tests, without variables that configure an allocator."""
    result = {name: value for name, value in os.environ.items() if not name.startswith(CONFIGURING)}
    for name in ("CUSHION_PACKAGE", "CUSHION_STANDIN"):
        if name in os.environ:
            result[name] = os.environ[name]
    path = [*filter(None, [PACKAGE]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    result["PYTHONPATH"] = os.pathsep.join(path)
    if not why_no_standin():
        libraries = [str(STANDIN), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        result["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
        result["LD_PRELOAD"] = str(Path(str(STANDIN), "libcudart_standin.so"))
    for name, value in (changes or {}).items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def python(
    *arguments: str, changes: dict[str, str | None] | None = None, timeout: float = 60, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs this Python, and captures its output as text."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout,
        **options,
    )


# ---- threads and forks ----


def in_threads(targets: Iterable[Callable[[], object]]) -> None:
    """Runs functions in threads, all at once, and waits for their end."""
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fork_while(
    work: Callable[[int], object],
    act: Callable[[], object],
    *,
    children: int,
    end: Callable[[int], object] = os._exit,
) -> None:
    """Forks children one after the other, while three threads of this process call `work(number of the thread)` again
    and again. Each child calls `act()` and `end(0)`. A child that waits for a lock that a thread held at the fork would
    hang, and is ended by a signal."""
    stop, failures = threading.Event(), []

    def loop(number: int) -> None:
        try:
            while not stop.is_set():
                work(number)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    workers = [threading.Thread(target=loop, args=(number,)) for number in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for worker in workers:
        worker.start()
    try:
        for _ in range(children):
            child = os.fork()
            if child == 0:
                signal.alarm(_LONGEST_CHILD)
                try:
                    act()
                except BaseException:  # noqa: BLE001
                    os._exit(3)
                end(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == 0, f"a child ended with status {status}"
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        sys.setswitchinterval(before)
    assert not failures, failures


# ---- functions in processes of their own ----


class ChildFailed(AssertionError):
    """A process failed: the message has its exit status and its output."""


def call(
    function: Callable[..., Any],
    *arguments: Any,
    changes: dict[str, str | None] | None = None,
    warm: bool = True,
    timeout: float = 90,
) -> Any:
    """Calls a function of a test module in a new process. Arguments and result have to be JSON."""
    return _call([function.__module__, function.__qualname__], list(arguments), changes, warm, timeout)


def _call(target: list[str], arguments: list[Any], changes: Any, warm: bool, timeout: float) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "target": target,
            "arguments": arguments,
            "environment": environment(changes),
            "report": os.path.join(folder, "report"),
            "output": os.path.join(folder, "output"),
            "hurry": warm,
        }
        status = _in_fork(job, timeout) if warm else _from_scratch(job, timeout)
        output = Path(job["output"]).read_text(errors="replace")[-6000:]
        try:
            report = json.loads(Path(job["report"]).read_text())
        except (OSError, ValueError):
            report = {"error": "it left no report"}
        if "error" in report:
            raise ChildFailed(f"{report['error']}\n--- the process ended with {status}; it printed:\n{output}")
        if status != 0:
            raise ChildFailed(f"the process ended with {status}; it printed:\n{output}")
        return report["result"]


def _from_scratch(job: dict[str, Any], timeout: float) -> int | str:
    with open(job["output"], "wb") as output:
        command = [sys.executable, str(HERE / "support.py"), json.dumps(job)]
        process = subprocess.Popen(command, env=job["environment"], stdout=output, stderr=output)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"nothing for {timeout:.0f} seconds, and was stopped"


class _Nursery:
    """A process that has imported torch, and forks."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, str(HERE / "support.py"), "--nursery", str(theirs.fileno())]
        self.process = subprocess.Popen(command, env=environment(), pass_fds=[theirs.fileno()])
        theirs.close()
        self.socket = ours
        self.lines = ours.makefile("rw")
        atexit.register(self.end)

    def run(self, job: dict[str, Any], timeout: float) -> int | str:
        self.socket.settimeout(None)
        self.lines.write(json.dumps(job) + "\n")
        self.lines.flush()
        pid = self.lines.readline()
        if not pid:
            raise ChildFailed(f"the process that forks ended with {self.process.wait()}")
        child = int(pid)
        timer = threading.Timer(timeout, os.kill, (child, signal.SIGKILL))
        timer.start()
        status = os.waitstatus_to_exitcode(int(self.lines.readline()))
        timed_out = not timer.is_alive() and status == -signal.SIGKILL
        timer.cancel()
        timer.join()
        return f"nothing for {timeout:.0f} seconds, and was stopped" if timed_out else status

    def end(self) -> None:
        self.lines.close()
        self.socket.close()
        self.process.wait()


@functools.cache
def _nursery() -> _Nursery:
    return _Nursery()


def _in_fork(job: dict[str, Any], timeout: float) -> int | str:
    return _nursery().run(job, timeout)


def _raise_children(descriptor: int) -> dict[str, Any] | None:
    """Runs the nursery: forks a child for each job. Returns the job in the child, and None in the nursery at its
    end."""
    import gc

    import torch

    # PyTorch 2.3 deadlocks if two threads parse arguments for the first time at once.
    torch.empty(1, dtype=torch.uint8, device="cpu")
    # Otherwise the collector of every child would touch, and so copy, all these objects.
    gc.collect()
    gc.freeze()
    lines = socket.socket(fileno=descriptor).makefile("rw")
    for line in lines:
        job: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            # Not closed: a closed pipe tells the tests that the nursery has ended.
            output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, standard in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(source, standard)
            os.environ.clear()
            os.environ.update(job["environment"])
            return job
        lines.write(f"{child}\n")
        lines.flush()
        lines.write(f"{os.waitpid(child, 0)[1]}\n")
        lines.flush()
    return None


def _do(job: dict[str, Any]) -> None:
    """Runs a job in a child."""
    module, name = job["target"]
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        report = {"result": found(*job["arguments"])}
    except BaseException:
        report = {"error": traceback.format_exc()}
    Path(job["report"]).write_text(json.dumps(report))
    if job["hurry"]:
        # Skips the shutdown of torch, which takes as long as most tests. Fresh processes test the shutdown.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run_method(module: str, name: str, method: str) -> dict[str, str]:
    """Runs a test of a `ProcessCase` in this process."""
    test = getattr(importlib.import_module(module), name)(method)
    test.in_own_process = True
    result = unittest.TestResult()
    test.run(result)
    texts = [f"{failed}\n{text}" if failed is not test else text for failed, text in result.failures + result.errors]
    if texts:
        return {"failed": "\n".join(texts)}
    return {"skipped": result.skipped[0][1]} if result.skipped else {}


def process(*, warm: bool = True, timeout: float = 90, **changes: str | None) -> Callable[..., Any]:
    """Sets how the process of a test is started, and which variables differ in its environment."""

    def mark(method: Any) -> Any:
        method.process = {"warm": warm, "timeout": timeout, "changes": changes}
        return method

    return mark


class ProcessCase(unittest.TestCase):
    """Runs each test in its own process, over the stand-in for the CUDA driver."""

    warm = False
    changes: dict[str, str | None] = {}
    in_own_process = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, method in list(vars(cls).items()):
            if name.startswith("test") and callable(method):
                setattr(cls, name, _elsewhere(name, method))
            elif name == "setUp":
                cls.setUp = _only_there(method)  # type: ignore[method-assign]


def _only_there(method: Any) -> Any:
    """Wraps setUp and tearDown so that they run only in the process of the test, not in the one that starts it."""

    @functools.wraps(method)
    def set_up(self: ProcessCase) -> None:
        if self.in_own_process:
            method(self)

    return set_up


def _elsewhere(name: str, method: Any) -> Any:
    asked = getattr(method, "process", {})

    @functools.wraps(method)
    def run(self: ProcessCase) -> None:
        if self.in_own_process:
            method(self)
            return
        cls = type(self)
        changes = {**cls.changes, **asked.get("changes", {})}
        warm = cls.warm and asked.get("warm", True)
        target = ["support", "run_method"]
        arguments = [cls.__module__, cls.__qualname__, name]
        report = _call(target, arguments, changes, warm, asked.get("timeout", 90))
        if "failed" in report:
            self.fail("in its own process:\n" + report["failed"])
        if "skipped" in report:
            self.skipTest(report["skipped"])

    return run


@needs_standin
class StandinCase(ProcessCase):
    """Tests over the stand-in for the driver, without torch."""


@needs_torch
class TorchCase(ProcessCase):
    """Tests with torch, over both stand-ins. `install` makes Cushion its allocator, unless the class has no policy:
    such a class runs the tests with PyTorch's own allocator, to show that they expect what PyTorch does."""

    warm = True
    policy: str | None = "segments"

    def install(self, **settings: Any) -> Any:
        import torch

        if self.policy is None:
            return torch
        import cushion

        cushion.install(**{"policy": self.policy, **settings})
        self.addCleanup(self.check)
        return torch

    def check(self) -> None:
        """Checks the engine's invariants after every test."""
        from cushion import _cushion

        _cushion.check_invariants(0)


# ---- the stand-in's hooks ----


class Standin:
    """Controls and queries the stand-in for the driver."""

    NOT_READY, INVALID_VALUE, OUT_OF_MEMORY, UNKNOWN = 600, 1, 2, 999

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.standin_calls.restype = ctypes.c_uint64
        self.library.standin_held.restype = ctypes.c_uint64

    def calls(self, name: str | None = None) -> int:
        return int(self.library.standin_calls(name and name.encode()))

    def held(self, device: int = 0) -> int:
        """Returns how many bytes are held on a device."""
        return int(self.library.standin_held(device))

    def fail(self, nth: int, code: int) -> None:
        """Makes the nth call from now on fail with this code."""
        self.library.standin_fail(ctypes.c_uint64(nth), code)

    def tenant(self, held: int, device: int = 0) -> None:
        """Sets how much memory another program holds."""
        assert self.library.standin_set_tenant(device, ctypes.c_uint64(held)) == 1

    def launch(self, stream: int, device: int = 0) -> None:
        """Queues work that ends only at `finish`."""
        self.library.standin_launch(device, ctypes.c_uint64(stream))

    def finish(self, stream: int, device: int = 0) -> None:
        self.library.standin_finish(device, ctypes.c_uint64(stream))

    def finish_all(self) -> None:
        self.library.standin_finish_all()

    def begin_capture(self, stream: int, device: int = 0) -> None:
        self.library.standin_begin_capture(device, ctypes.c_uint64(stream))

    def end_capture(self, stream: int, device: int = 0) -> None:
        self.library.standin_end_capture(device, ctypes.c_uint64(stream))

    def block(self, name: str) -> None:
        """Makes calls of this function wait from now on."""
        self.library.standin_block(name.encode())

    def unblock(self) -> None:
        self.library.standin_block(None)

    def await_blocked(self) -> None:
        """Waits until a call of the function waits."""
        self.library.standin_await_blocked()


if __name__ == "__main__":
    # Imports itself as `support`, as the tests do, so that its state exists once.
    import support

    if sys.argv[1] == "--nursery":
        task = support._raise_children(int(sys.argv[2]))
    else:
        task = json.loads(sys.argv[1])
    if task is not None:
        support._do(task)
