"""Simulated devices, and memory by address on them."""

from __future__ import annotations

import unittest

import support
from support import GIB, MIB, in_threads


class Simulate(support.ProcessCase):
    changes = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None}

    def test_sizes(self) -> None:
        import cushion
        from cushion import _cushion

        self.assertFalse(_cushion.is_simulated())
        for size in ("16GiB", "8GB", 1 << 30):
            cushion.simulate(size)
        self.assertTrue(_cushion.is_simulated())
        self.assertEqual(_cushion.memory_info(0), (GIB, GIB))
        for size in ("large", 0, "-1", "9999TiB"):
            with self.subTest(size), self.assertRaises(ValueError):
                cushion.simulate(size)

    def test_too_late(self) -> None:
        import cushion
        from cushion import _cushion

        cushion.simulate("1GiB")
        _cushion.allocate(1)
        cushion.simulate("1GiB")
        with self.assertRaisesRegex(RuntimeError, "in use already"):
            cushion.simulate("2GiB")

    def test_install_refuses(self) -> None:
        import cushion

        cushion.simulate("1GiB")
        with self.assertRaisesRegex(cushion.InstallError, "PyTorch cannot use simulated memory"):
            cushion.install()

    @support.process(CUSHION_SIMULATE="1GiB")
    def test_install_refuses_with_the_variable(self) -> None:
        import cushion

        with self.assertRaisesRegex(cushion.InstallError, "CUSHION_SIMULATE"):
            cushion.install()

    @support.process(CUSHION_SIMULATE="a lot")
    def test_an_invalid_variable(self) -> None:
        import cushion

        with self.assertRaisesRegex(ValueError, "CUSHION_SIMULATE cannot be `a lot`: it takes a size"):
            cushion.install()

    def test_the_error_without_a_gpu_suggests_simulation(self) -> None:
        from cushion import _cushion

        with self.assertRaisesRegex(RuntimeError, "Cushion cannot use GPU 0: "):
            _cushion.allocate(1)
        self.assertEqual(_cushion.devices_in_use(), [])


class Addresses(support.ProcessCase):
    changes = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None}

    def setUp(self) -> None:
        import cushion
        from cushion import _cushion

        cushion.simulate("1GiB")
        self.addCleanup(_cushion.check_invariants, 0)

    def test_the_device_of_an_address(self) -> None:
        from cushion import _cushion

        addresses = [_cushion.allocate(MIB, device) for device in (0, 1, 127)]
        self.assertEqual([_cushion.device_of(address) for address in addresses], [0, 1, 127])
        self.assertEqual(_cushion.devices_in_use(), [0, 1, 127])
        _cushion.deallocate(addresses[1])
        self.assertEqual(_cushion.memory_stats(1)["allocated_bytes"]["all"]["current"], 0)
        self.assertEqual(_cushion.memory_stats(0)["allocated_bytes"]["all"]["current"], MIB)
        self.assertEqual(_cushion.device_of(addresses[1]), 1)
        _cushion.empty_cache()
        self.assertIsNone(_cushion.device_of(addresses[1]))
        self.assertIsNone(_cushion.device_of(0))

    def test_history_has_the_caller(self) -> None:
        from cushion import _cushion

        _cushion.record_memory_history("all", "all", 100, True, [])
        address = _cushion.allocate(MIB)
        stack = _cushion.allocation_traceback(address)
        self.assertIn("test_history_has_the_caller", [frame["name"] for frame in stack or []])

    def test_observers_are_called_for_refusals(self) -> None:
        from cushion import _cushion

        told: list[tuple[int, ...]] = []
        _cushion.observe_refusals(lambda *figures: told.append(figures))
        with self.assertRaises(MemoryError):
            _cushion.allocate(2 * GIB)
        self.assertEqual(told, [(0, 2 * GIB, GIB, GIB)])

    def test_from_many_threads(self) -> None:
        from cushion import _cushion

        def work() -> None:
            for size in range(1, 300):
                _cushion.deallocate(_cushion.allocate(size * 1000))

        in_threads([work] * 8)
        stats = _cushion.memory_stats(0)["allocation"]["all"]
        self.assertEqual((stats["current"], stats["allocated"]), (0, 8 * 299))


if __name__ == "__main__":
    unittest.main()
