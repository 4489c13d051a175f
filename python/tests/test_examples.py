"""Runs the examples: without a GPU, and with PyTorch over the stand-ins."""

from __future__ import annotations

import tempfile
import unittest

import support

EXAMPLES = support.ROOT / "examples" / "python"
NO_GPU = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None, "CUDA_VISIBLE_DEVICES": ""}


class Examples(unittest.TestCase):
    def example(self, name: str, changes: dict[str, str | None], *arguments: str, ranks: int = 1) -> str:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [*launcher, str(EXAMPLES / name), *arguments]
        done = support.python(*command, changes=changes, timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        if not done.stdout.startswith("SKIPPED: "):
            self.assertEqual(done.stdout.splitlines()[-1], "ok")
        return done.stdout


class WithoutGpu(Examples):
    def test_gcallocator(self) -> None:
        said = self.example("gcallocator_door.py", NO_GPU)
        self.assertIn("on a simulated device of 16 GiB", said)
        self.assertIn("4 MiB are kept: 4.00 MiB in use (peak 20.00 MiB); allocations: 2", said)
        self.assertIn("tracked, not Cushion's: 64.00 MiB in use", said)
        self.assertIn("Peak memory: 20.00 MiB, and 0 times out of memory", said)

    def test_custom_cuda_allocator(self) -> None:
        said = self.example("custom_cuda_allocator_door.py", {**NO_GPU, "CUSHION_POLICY": "segments"})
        self.assertIn("With 1 GiB: 1.00 GB used / 16.00 GB total, 1.00 GB allocated, 0.00 GB cached", said)
        self.assertIn("Given back: 1.00 GB used / 16.00 GB total, 0.00 GB allocated, 1.00 GB cached", said)
        said = self.example("custom_cuda_allocator_door.py", NO_GPU)
        self.assertIn("on a simulated device of 16 GiB", said)
        # The last page is larger than the request.
        self.assertRegex(said, r"With 1 GiB: 1\.0\d GB used / 16\.00 GB total, 1\.00 GB allocated, 0\.0\d GB cached")
        self.assertRegex(said, r"Given back: 1\.0\d GB used / 16\.00 GB total, 0\.00 GB allocated, 1\.0\d GB cached")
        self.assertIn("Cleared: 0.00 GB used", said)
        self.assertIn("A PiB is refused: CUDA out of memory.", said)

    def test_training_is_skipped(self) -> None:
        names = ["train_with_one_line", "retry_steps", "accelerate_habits", "lightning_habits", "offload_state"]
        for name in [f"{name}.py" for name in (*names, "checkpoint_before_refusal")]:
            with self.subTest(name):
                self.assertTrue(self.example(name, NO_GPU).startswith("SKIPPED: "))

    def test_injected_failures(self) -> None:
        said = self.example("test_your_recovery.py", NO_GPU)
        self.assertIn("on a simulated device of 4 GiB", said)
        self.assertRegex(said, r"of 20 entries \d+ are kept, after [1-9]\d* failures")
        said = self.example("test_your_recovery.py", {**NO_GPU, "CUSHION_INJECT": "every=7"})
        self.assertIn("of 20 entries 17 are kept, after 3 failures", said)

    def test_replay(self) -> None:
        first, segments, expandable, paged, _ = self.example("replay_snapshot.py", NO_GPU).splitlines()
        self.assertEqual(first, "graphs_serving.pickle.gz on 4.5GiB:")
        self.assertIn("segments: out of memory at a request of 0.40 GiB; the smallest card is 4.58 GiB", segments)
        self.assertIn("expandable: fits", expandable)
        self.assertIn("paged: fits", paged)


@support.needs_torch
class OnRanks(Examples):
    """On the CPU, with a rank that runs out of memory once. The end of these programs is tested too: threads that wait
    for other ranks run until then."""

    def losses(self, said: str) -> list[str]:
        return [line for line in said.splitlines() if ": loss " in line]

    def test_torchrun(self) -> None:
        said = self.example("torchrun_ddp.py", NO_GPU, "--short", "1", ranks=2)
        self.assertIn("steps: 5; tries: 6; in parts: 3", said)
        sharded = self.example("torchrun_ddp.py", NO_GPU, "--short", "0", "--fsdp2", ranks=2)
        self.assertIn("steps: 5; tries: 6; in parts: 3", sharded)
        self.assertEqual(len(self.losses(said)), 5)
        self.assertEqual(self.losses(said), self.losses(sharded))

    def test_one_rank(self) -> None:
        self.assertIn("steps: 5; tries: 5; in parts: 0", self.example("torchrun_ddp.py", NO_GPU))

    def test_hugging_face_trainer(self) -> None:
        said = self.example("hf_trainer.py", NO_GPU, "--short", "1", ranks=2)
        if said.startswith("SKIPPED: "):
            self.skipTest(said)
        self.assertIn("steps: 6; tries: 7; in parts: 5", said)
        self.assertEqual(len(self.losses(said)), 3)

    def test_ray(self) -> None:
        with tempfile.TemporaryDirectory() as home:
            said = self.example("ray_train.py", {**NO_GPU, "HOME": home}, "--short", "1")
        if said.startswith("SKIPPED: "):
            self.skipTest(said)
        self.assertIn("step 5: loss 0.205", said)
        self.assertIn("steps: 5; tries: 6; in parts: 3", said)


@support.needs_torch
class OverStandins(Examples):
    GPU = {"STANDIN_CAPACITY": str(8 * support.GIB)}

    def test_gcallocator(self) -> None:
        said = self.example("gcallocator_door.py", self.GPU)
        self.assertNotIn("simulated", said)
        self.assertIn("A tensor is kept: 3.81 MiB in use", said)

    def test_custom_cuda_allocator(self) -> None:
        said = self.example("custom_cuda_allocator_door.py", self.GPU)
        self.assertNotIn("simulated", said)
        self.assertRegex(said, r"With 1 GiB: 1\.0\d GB used / 8\.00 GB total")
        self.assertIn("Tensors: torch.float32 and torch.float16 on cuda:0", said)
        self.assertIn("A PiB is refused: CUDA out of memory.", said)

    def test_retry(self) -> None:
        def tries(said: str) -> list[int]:
            return [int(line.rsplit(": ", 1)[1]) for line in said.splitlines() if line.startswith("step ")]

        said = self.example("retry_steps.py", {**self.GPU, "CUSHION_POLICY": "segments"})
        self.assertEqual(tries(said), [1, 3, 1, 2, 1])
        self.assertIn("steps: 5; in parts: 3; tries: 8", said)
        # Under the default policy, scattered cached memory serves the fourth step too.
        said = self.example("retry_steps.py", self.GPU)
        self.assertEqual((tries(said)[1], tries(said)[3]), (3, 1))

    def test_injected_failures(self) -> None:
        self.assertNotIn("simulated", self.example("test_your_recovery.py", self.GPU))

    def test_offloading(self) -> None:
        for policy in ("segments", "expandable", "paged"):
            with self.subTest(policy):
                said = self.example("offload_state.py", {**self.GPU, "CUSHION_POLICY": policy})
                self.assertIn("to the host", said)

    def test_retry_in_training_loops_of_frameworks(self) -> None:
        for name, package in (("accelerate_habits.py", "Accelerate"), ("lightning_habits.py", "Lightning")):
            with self.subTest(name):
                said = self.example(name, self.GPU)
                if not said.startswith(f"SKIPPED: {package} is not installed"):
                    self.assertIn("steps: 3; in parts: 3; tries: 5", said)


if __name__ == "__main__":
    unittest.main()
