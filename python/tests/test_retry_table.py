"""Every loss with every model, and a failure at every operation of the step, forward and backward.

A mode of PyTorch's dispatcher sees each operation and raises out of memory at the n-th. The step is then tried again
whole, or in 2 and 4 parts. Its gradients are compared with those of a step without failures: equal to the bit if the
whole runs again, and within 1e-12 in float64 if parts are added up."""

from __future__ import annotations

import gc
import logging
import unittest
from collections.abc import Callable
from typing import Any

import support  # puts the package under test on the path
from exact import ExactCase

import cushion

LOSSES = ("mean", "sum", "ignored labels", "weighted classes", "several terms")
MODELS = ("plain", "dropout by row", "batch norm in evaluation", "tied", "partly frozen", "scaled", "accumulated")
ROWS, LENGTH, WIDTH, CLASSES = 7, 3, 5, 4
MICRO_BATCHES = 3


class TableCase(ExactCase):
    def setUp(self) -> None:
        super().setUp()
        self.mode = make_mode(self.out_of_memory)
        with self.mode:
            self.torch.ones(2).sum()
        # Otherwise each failed try runs a full collection over all objects that the mode has imported.
        gc.collect()
        gc.freeze()
        # Otherwise thousands of failures log a line each.
        logging.getLogger("cushion").setLevel(logging.ERROR)
        torch = self.torch
        self.of_class = torch.tensor([0.1, 3.0, 0.7, 1.9])
        labels = torch.randint(0, CLASSES, (ROWS, LENGTH))
        for row in range(ROWS):
            labels[row, 1 + row % LENGTH :] = -100
        # The last two rows have no labels.
        labels[-2:] = -100
        targets, masks = torch.randn(ROWS, LENGTH, CLASSES), (torch.rand(ROWS, LENGTH, WIDTH) > 0.5).double() * 2
        self.batches = [(torch.randn(ROWS, LENGTH, 6), labels, targets, masks) for _ in range(MICRO_BATCHES)]

    # ---- models ----

    def net(self, kind: str) -> Any:
        torch, nn = self.torch, self.torch.nn

        class Net(nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES)
                if kind == "tied":
                    self.again = nn.Linear(6, WIDTH)
                    self.again.weight = self.first.weight
                if kind == "partly frozen":
                    self.first.requires_grad_(False)
                if kind.startswith("batch norm"):
                    self.norm = nn.BatchNorm1d(WIDTH)
                if kind == "batch norm and dropout in training":
                    self.dropout = nn.Dropout(0.5)

            def forward(self, inputs: Any, masks: Any) -> Any:
                hidden = torch.tanh(self.first(inputs))
                if kind == "tied":
                    hidden = hidden + self.again(inputs.flip(-1))
                if kind == "dropout by row":
                    hidden = hidden * masks
                if kind.startswith("batch norm"):
                    hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
                if kind == "batch norm and dropout in training":
                    hidden = self.dropout(hidden)
                return self.last(hidden)

        net = Net()
        if kind == "batch norm in evaluation":
            net(self.batches[0][0], None)
            net.eval()
        return net

    # ---- losses ----

    def loss(self, kind: str, net: Any) -> Callable[..., Any]:
        functional = self.torch.nn.functional

        def mean(inputs: Any, labels: Any, targets: Any, masks: Any) -> Any:
            return functional.mse_loss(net(inputs, masks), targets)

        def total(inputs: Any, labels: Any, targets: Any, masks: Any) -> Any:
            return (net(inputs, masks) - targets).square().sum()

        def labelled(inputs: Any, labels: Any, targets: Any, masks: Any, **options: Any) -> Any:
            return functional.cross_entropy(net(inputs, masks).flatten(0, 1), labels.flatten(), **options)

        def weighted(*arguments: Any) -> Any:
            return labelled(*arguments, weight=self.of_class)

        def several(inputs: Any, labels: Any, targets: Any, masks: Any, share: float = 1.0) -> Any:
            outputs = net(inputs, masks)
            decay = sum(parameter.square().sum() for parameter in net.parameters())
            return functional.mse_loss(outputs, targets) * share + 0.1 * outputs.abs().sum() + 0.1 * decay * share

        return dict(zip(LOSSES, (mean, total, labelled, weighted, several)))[kind]

    def adding(self, kind: str) -> dict[str, Any]:
        """Returns the options that state how parts of a loss add up."""

        def labels_in(inputs: Any, labels: Any, targets: Any, masks: Any) -> Any:
            return (labels != -100).sum()

        def weight_in(inputs: Any, labels: Any, targets: Any, masks: Any) -> Any:
            return self.of_class[labels[labels != -100]].sum()

        ways = ({"loss": "mean"}, {"loss": "sum"}, {"weight": labels_in}, {"weight": weight_in}, {})
        return dict(zip(LOSSES, ways))[kind]

    # ---- steps ----

    def step(self, loss_kind: str, model_kind: str, net: Any) -> Callable[..., Any]:
        loss_of = self.loss(loss_kind, net)
        scaler = self.torch.amp.GradScaler("cpu", init_scale=65536.0)
        # A GradScaler creates its tensors at its first use.
        scaler.scale(self.torch.ones(1))

        def backward(loss: Any) -> Any:
            if model_kind == "accumulated":
                loss = loss / MICRO_BATCHES
            (scaler.scale(loss) if model_kind == "scaled" else loss).backward()
            return loss.detach()

        if loss_kind == "several terms":
            # Only this step takes `share`.
            def step(inputs: Any, labels: Any, targets: Any, masks: Any, share: float = 1.0) -> Any:
                with self.mode:
                    return backward(loss_of(inputs, labels, targets, masks, share=share))

            return step

        def plain(inputs: Any, labels: Any, targets: Any, masks: Any) -> Any:
            with self.mode:
                return backward(loss_of(inputs, labels, targets, masks))

        return plain

    def micro_batches(self, model_kind: str) -> list[Any]:
        return self.batches if model_kind == "accumulated" else self.batches[:1]

    # ---- failures ----

    def fail_at(self, *operations: int) -> None:
        """Makes these operations of steps fail, counted from 0 over all tries."""
        self.mode.seen, self.mode.failing = 0, operations


def make_mode(out_of_memory: Callable[[], Exception]) -> Any:
    """Returns a dispatch mode that counts the operations of steps, and makes them fail."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        seen = 0
        failing: tuple[int, ...] = ()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            if self.seen - 1 in self.failing:
                raise out_of_memory()
            return function(*args, **(kwargs or {}))

    return Mode()


class Whole(TableCase):
    def check(self, loss_kind: str, model_kind: str) -> int:
        """Checks one case. Returns the number of failures."""
        torch = self.torch
        net = self.net(model_kind)
        step, batches = self.step(loss_kind, model_kind, net), self.micro_batches(model_kind)
        start = [buffer.clone() for buffer in net.buffers()]

        def state() -> list[Any]:
            found = [*(it.clone() for it in net.buffers()), *self.gradients(net), torch.get_rng_state().clone()]
            for buffer, before in zip(net.buffers(), start):
                buffer.copy_(before)
            torch.manual_seed(7)
            return found

        state()
        self.fail_at()
        losses = [step(*batch) for batch in batches]
        expected = state()
        number = self.mode.seen
        self.assertGreater(number, 15)
        before = cushion.retry_stats()["retried"]
        for at in range(number):
            self.fail_at(at)
            got = [cushion.retry(step, *batch, grads=net) for batch in batches]
            self.assert_equal_bits([*got, *state()], [*losses, *expected])
        # Each failure led to one retry.
        self.assertEqual(cushion.retry_stats()["retried"] - before, number)
        return number

    def test_a_failure_at_every_operation(self) -> None:
        for loss_kind in LOSSES:
            for model_kind in (*MODELS, "batch norm and dropout in training"):
                with self.subTest(loss=loss_kind, model=model_kind):
                    self.check(loss_kind, model_kind)


class InParts(TableCase):
    def check(self, loss_kind: str, model_kind: str, every: int) -> None:
        net = self.net(model_kind)
        step, batches = self.step(loss_kind, model_kind, net), self.micro_batches(model_kind)
        self.fail_at()
        losses = [step(*batch) for batch in batches]
        expected = self.gradients(net)
        number = self.mode.seen // len(batches)
        retried = cushion.retry(split=cushion.split_batch, grads=net, **self.adding(loss_kind))(step)

        def run(*operations: int) -> None:
            self.fail_at(*operations)
            got = []
            for batch in batches:
                # Each micro-batch begins whole.
                retried.forget()
                got.append(retried(*batch))
            self.assert_close(got, losses)
            self.assert_close(self.gradients(net), expected)

        def lost(calls: list[tuple[int, ...]]) -> int:
            """Returns how many more tries than calls there were."""
            before = retried.stats()
            for operations in calls:
                run(*operations)
            after = retried.stats()
            return after["tries"] - before["tries"] - (after["calls"] - before["calls"])

        # A failure in the whole: the step goes on in two parts. With accumulation, the last micro-batch fails.
        start = number * (len(batches) - 1)
        in_whole = [(start + at,) for at in range(0, number, every)]
        self.assertEqual(lost(in_whole), len(in_whole))
        # A second failure, in one of the two parts: the step goes on in four parts.
        in_parts = [(start, start + 1 + at) for at in range(0, 2 * number, every)]
        self.assertEqual(lost(in_parts), 2 * len(in_parts))
        self.assertEqual(retried.stats()["split"], len(in_whole) + len(in_parts))

    def test_failures_at_operations_of_the_whole_and_of_parts(self) -> None:
        for loss_kind in LOSSES:
            for model_kind in MODELS:
                with self.subTest(loss=loss_kind, model=model_kind):
                    self.check(loss_kind, model_kind, every=5)


if __name__ == "__main__":
    unittest.main()
