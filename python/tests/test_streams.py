"""Memory on several streams, in captures and in private pools."""

from __future__ import annotations

import unittest
from typing import Any

from support import GIB, MIB, Standin, TorchCase


class Streams(TorchCase):
    changes = {"STANDIN_CAPACITY": str(2 * GIB)}

    def test_not_reused_while_another_stream_works_on_it(self) -> None:
        torch = self.install()
        standin, side = Standin(), torch.cuda.Stream()
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        address = kept.data_ptr()
        standin.launch(side.cuda_stream)
        kept.record_stream(side)
        del kept
        others = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        self.assertNotIn(address, [other.data_ptr() for other in others])
        states = [b["state"] for s in torch.cuda.memory_snapshot() for b in s["blocks"] if b["address"] == address]
        self.assertEqual(states, ["active_pending_free"])
        standin.finish(side.cuda_stream)
        again = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(again.data_ptr(), address)

    def test_every_stream_that_used_it_must_be_done(self) -> None:
        torch = self.install()
        standin, sides = Standin(), [torch.cuda.Stream() for _ in range(3)]
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        address = kept.data_ptr()
        for side in sides:
            standin.launch(side.cuda_stream)
            kept.record_stream(side)
        del kept
        for side in sides:
            other = torch.empty(MIB, dtype=torch.uint8, device="cuda")
            self.assertNotEqual(other.data_ptr(), address)
            standin.finish(side.cuda_stream)
        self.assertEqual(torch.empty(MIB, dtype=torch.uint8, device="cuda").data_ptr(), address)

    def test_work_queued_after_the_free_does_not_count(self) -> None:
        torch = self.install()
        standin, side = Standin(), torch.cuda.Stream()
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        address = kept.data_ptr()
        kept.record_stream(side)
        del kept
        standin.launch(side.cuda_stream)
        self.assertEqual(torch.empty(MIB, dtype=torch.uint8, device="cuda").data_ptr(), address)

    def test_a_view_records_for_all_of_the_memory(self) -> None:
        torch = self.install()
        standin, side = Standin(), torch.cuda.Stream()
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        address = kept.data_ptr()
        standin.launch(side.cuda_stream)
        kept[1000:].record_stream(side)
        del kept
        self.assertNotEqual(torch.empty(MIB, dtype=torch.uint8, device="cuda").data_ptr(), address)

    def test_recording_its_own_stream_needs_no_event(self) -> None:
        torch = self.install()
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        Standin().launch(0)
        kept.record_stream(torch.cuda.default_stream())
        address = kept.data_ptr()
        del kept
        self.assertEqual(Standin().calls("cuEventRecord"), 0)
        self.assertEqual(torch.empty(MIB, dtype=torch.uint8, device="cuda").data_ptr(), address)

    def test_memory_that_is_not_ours(self) -> None:
        torch = self.install()
        side = torch.cuda.Stream()
        torch.empty(0, device="cuda").record_stream(side)
        torch.empty(1, device="cuda").record_stream(side)

    def test_empty_cache_does_not_wait_for_live_memory(self) -> None:
        torch = self.install()
        standin, side = Standin(), torch.cuda.Stream()
        kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        standin.launch(side.cuda_stream)
        kept.record_stream(side)
        torch.cuda.empty_cache()
        self.assertEqual(torch.cuda.memory_allocated(), 30 * MIB)
        del kept
        torch.cuda.empty_cache()
        self.assertEqual((torch.cuda.memory_reserved(), standin.held()), (0, 0))


class StreamsExpandable(Streams):
    policy = "expandable"


class StreamsPaged(Streams):
    policy = "paged"


class StreamsOfPyTorch(Streams):
    policy = None


class Graphs(TorchCase):
    changes = {"STANDIN_CAPACITY": str(2 * GIB)}

    def pools(self, torch: Any) -> dict[tuple[int, int], int]:
        """Returns the reserved bytes of each pool."""
        result: dict[tuple[int, int], int] = {}
        for segment in torch.cuda.memory_snapshot():
            pool = tuple(segment["segment_pool_id"])
            result[pool] = result.get(pool, 0) + segment["total_size"]
        return result

    def capture(self, torch: Any, size: int, pool: Any = None) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            kept = torch.empty(size, dtype=torch.uint8, device="cuda")
        return graph, kept

    def test_a_private_pool(self) -> None:
        torch = self.install()
        outside = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        graph, inside = self.capture(torch, 40 * MIB)
        pools = self.pools(torch)
        self.assertEqual(len(pools), 2)
        self.assertEqual(pools[tuple(graph.pool())], 40 * MIB)
        # Free memory in the pool does not serve requests outside it.
        address = inside.data_ptr()
        del inside
        self.assertNotEqual(torch.empty(40 * MIB, dtype=torch.uint8, device="cuda").data_ptr(), address)
        graph.replay()
        del outside

    def test_memory_comes_back_with_the_graph(self) -> None:
        torch = self.install()
        graph, inside = self.capture(torch, 40 * MIB)
        torch.cuda.empty_cache()
        self.assertIn(tuple(graph.pool()), self.pools(torch))
        del inside
        torch.cuda.empty_cache()
        self.assertIn(tuple(graph.pool()), self.pools(torch))
        graph.reset()
        torch.cuda.empty_cache()
        self.assertNotIn(40 * MIB, self.pools(torch).values())
        self.assertEqual(Standin().held(), torch.cuda.memory_reserved())

    def test_live_memory_outlives_the_graph(self) -> None:
        torch = self.install()
        graph, inside = self.capture(torch, 40 * MIB)
        before = torch.cuda.memory_allocated()
        graph.reset()
        torch.cuda.empty_cache()
        self.assertEqual(torch.cuda.memory_allocated(), before)
        del inside
        torch.cuda.empty_cache()
        self.assertEqual(torch.cuda.memory_allocated(), before - 40 * MIB)
        self.assertNotIn(40 * MIB, self.pools(torch).values())

    def test_several_graphs_share_a_pool(self) -> None:
        torch = self.install()
        pool = torch.cuda.graph_pool_handle()
        first, inside = self.capture(torch, 40 * MIB, pool)
        address = inside.data_ptr()
        del inside
        second, inside = self.capture(torch, 40 * MIB, pool)
        # The later graph may use free memory of the earlier one: they run one after the other.
        self.assertEqual(inside.data_ptr(), address)
        self.assertEqual(self.pools(torch)[tuple(pool)], 40 * MIB)
        del inside
        first.reset()
        torch.cuda.empty_cache()
        self.assertIn(tuple(pool), self.pools(torch))
        second.reset()
        torch.cuda.empty_cache()
        self.assertNotIn(tuple(pool), self.pools(torch))

    def test_two_pools_do_not_mix(self) -> None:
        torch = self.install()
        first, a = self.capture(torch, 40 * MIB)
        address = a.data_ptr()
        del a
        second, b = self.capture(torch, 40 * MIB)
        self.assertNotEqual(b.data_ptr(), address)
        self.assertNotEqual(tuple(first.pool()), tuple(second.pool()))

    def test_other_streams_allocate_outside_the_pool_during_a_capture(self) -> None:
        torch = self.install()
        side = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            inside = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
            with torch.cuda.stream(side):
                outside = torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
        pools = {
            tuple(segment["segment_pool_id"])
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["address"] == outside.data_ptr()
        }
        self.assertEqual(pools, {(0, 0)})
        self.assertEqual(self.pools(torch)[tuple(graph.pool())], 40 * MIB)
        del inside, outside

    def test_cuda_fails_in_a_capture(self) -> None:
        """PyTorch's query of the capture throws then. The exception must not pass through Cushion."""
        torch = self.install()
        if self.policy is None:
            self.skipTest("it is about Cushion")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
            Standin().fail(1, 719)
            try:
                torch.empty(MIB, dtype=torch.uint8, device="cuda")
            except RuntimeError as error:
                self.assertIn("719", str(error))
        self.assertGreater(torch.empty(MIB, dtype=torch.uint8, device="cuda").data_ptr(), 0)

    def test_nothing_is_queried_or_waited_for_in_a_capture(self) -> None:
        torch = self.install()
        standin, side = Standin(), torch.cuda.Stream()
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Freed with an event, which must not be queried in a capture.
            standin.launch(side.cuda_stream)
            kept.record_stream(side)
            del kept
            before = [
                standin.calls(name) for name in ("cuEventQuery", "cuEventSynchronize", "cuMemFree_v2", "cuMemUnmap")
            ]
            inside = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
            after = [
                standin.calls(name) for name in ("cuEventQuery", "cuEventSynchronize", "cuMemFree_v2", "cuMemUnmap")
            ]
        self.assertEqual(after, before)
        del inside

    def test_a_capture_that_fails_leaves_a_program_that_works(self) -> None:
        torch = self.install()
        graph = torch.cuda.CUDAGraph()
        with self.assertRaises(ZeroDivisionError), torch.cuda.graph(graph):
            inside = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
            raise ZeroDivisionError
        del graph
        inside = None  # noqa: F841
        torch.cuda.empty_cache()
        self.assertNotIn(40 * MIB, self.pools(torch).values())
        graph, inside = self.capture(torch, 40 * MIB)

    def test_a_hundred_captures_leave_nothing_allocated(self) -> None:
        torch = self.install()
        torch.empty(1, device="cuda")
        self.capture(torch, 40 * MIB)
        torch.cuda.empty_cache()
        held = Standin().held()
        for _ in range(100):
            self.capture(torch, 40 * MIB)
        torch.cuda.empty_cache()
        self.assertEqual(Standin().held(), held)

    def test_snapshot_of_one_pool(self) -> None:
        torch = self.install()
        outside = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        graph, inside = self.capture(torch, 60 * MIB)
        found = torch._C._cuda_memorySnapshot(tuple(graph.pool()))["segments"] if self.accepts_pool(torch) else None
        if found is None:
            self.skipTest(f"torch {torch.__version__} has no snapshot of one pool")
        self.assertEqual([segment["total_size"] for segment in found], [60 * MIB])
        del outside, inside

    def accepts_pool(self, torch: Any) -> bool:
        import inspect

        return "mempool_id" in inspect.signature(torch.cuda.memory_snapshot).parameters


class GraphsExpandable(Graphs):
    policy = "expandable"


class GraphsPaged(Graphs):
    policy = "paged"
    # These expect PyTorch's sizes, to the byte.
    test_a_private_pool = None  # type: ignore[assignment]
    test_several_graphs_share_a_pool = None  # type: ignore[assignment]
    test_other_streams_allocate_outside_the_pool_during_a_capture = None  # type: ignore[assignment]
    test_snapshot_of_one_pool = None  # type: ignore[assignment]


class GraphsOfPyTorch(Graphs):
    policy = None
    # The stand-in does not support captures in which other threads and streams are unrestricted.
    test_other_streams_allocate_outside_the_pool_during_a_capture = None  # type: ignore[assignment]


if __name__ == "__main__":
    unittest.main()
