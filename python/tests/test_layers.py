"""Layers whose result depends on the whole batch: a step that uses one is not split, unless the program accepts it."""

from __future__ import annotations

import functools
import unittest
from typing import Any

import support  # puts the package under test on the path
from exact import ExactCase

import cushion
from cushion import _layers

# Globals that the steps below refer to.
model: Any = None


class Refusing(ExactCase):
    def normed(self) -> Any:
        nn = self.torch.nn
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    def refused(self, step: Any, *arguments: Any, **options: Any) -> str:
        """Checks that CannotSplit is raised before the step runs, without a shortage. Returns the message."""
        calls: list[int] = []
        options = {"split": cushion.split_batch, "combine": list, **options}
        with self.assertRaises(cushion.CannotSplit) as raised:
            cushion.retry(step, *(arguments or (self.torch.randn(8, 6),)), **options)
        return str(raised.exception)

    def test_batch_norm_in_training(self) -> None:
        normed, calls = self.normed(), []

        @cushion.retry(split=cushion.split_batch, loss="mean", grads=normed)
        def step(inputs: Any) -> Any:
            calls.append(len(inputs))
            loss = normed(inputs).square().mean()
            loss.backward()
            return loss.detach()

        inputs = self.torch.randn(8, 6)
        with self.assertRaises(cushion.CannotSplit) as raised:
            step(inputs)
        self.assertIn("the result of 1 (BatchNorm1d) depends on the whole batch", str(raised.exception))
        for advice in ("remove split=", "evaluation", "inexact=True"):
            self.assertIn(advice, str(raised.exception))
        self.assertEqual(calls, [])
        self.assertEqual(int(normed[1].num_batches_tracked), 0)
        # The mode of the layers is checked at each call.
        normed.eval()
        step(inputs)
        normed.train()
        with self.assertRaises(cushion.CannotSplit):
            step(inputs)

    def test_many_layers(self) -> None:
        nn = self.torch.nn
        many = nn.Sequential(*(nn.BatchNorm1d(6) for _ in range(7)))
        self.assertIn("0 (BatchNorm1d), 1 (BatchNorm1d), 2 (BatchNorm1d) and 4 more", self.refused(many, grads=many))
        # A layer that is found in two ways counts once.
        optimizer = self.torch.optim.SGD(many.parameters(), 0.1)
        self.assertIn(" and 4 more", self.refused(many, grads=[many, optimizer]))

    def test_accepted(self) -> None:
        normed, inputs = self.normed(), self.torch.randn(8, 6)

        def step(inputs: Any) -> Any:
            self.at_most(4, inputs)
            loss = normed(inputs).square().mean()
            loss.backward()
            return loss.detach()

        cushion.retry(step, inputs, split=cushion.split_batch, loss="mean", grads=normed, inexact=True)
        # Each part was normalised separately.
        self.assertEqual(int(normed[1].num_batches_tracked), 2)

    def test_in_evaluation(self) -> None:
        """Batch norm in evaluation uses its running statistics, so parts are exact."""
        normed, inputs = self.normed(), self.torch.randn(11, 6)
        normed(inputs)
        normed.eval()

        def step(inputs: Any) -> Any:
            self.at_most(3, inputs)
            loss = normed(inputs).square().mean()
            loss.backward()
            return loss.detach()

        _, expected = self.expected(normed, lambda: normed(inputs).square().mean())
        cushion.retry(step, inputs, split=cushion.split_batch, loss="mean", grads=normed)
        self.assert_close(self.gradients(normed), expected)

    def test_a_step_that_sets_training_mode(self) -> None:
        """The mode is noticed only when the batch is split: the whole batch is exact."""
        normed, inputs = self.normed().eval(), self.torch.randn(8, 6)

        @cushion.retry(split=cushion.split_batch, loss="mean", grads=normed)
        def step(inputs: Any) -> Any:
            normed.train()
            self.at_most(4, inputs)

        with self.assertRaises(RuntimeError) as raised:
            step(inputs)
        self.assertIsInstance(raised.exception, self.torch.cuda.OutOfMemoryError)
        if hasattr(raised.exception, "__notes__"):
            self.assertIn("depends on the whole batch", raised.exception.__notes__[0])

    def test_which_layers(self) -> None:
        nn = self.torch.nn
        inputs = self.torch.randn(8, 6)

        def named(name: str, base: Any = nn.Module) -> Any:
            return type(name, (base,), {})

        learns_nothing = nn.BatchNorm1d(6, track_running_stats=False).eval()
        of_a_library = named("TripletMarginLoss")
        of_a_library.__module__ = "pytorch_metric_learning.losses.triplet_margin_loss"
        own = named("SpeedyNorm", nn.BatchNorm2d)
        refused = [nn.BatchNorm3d(2), nn.LazyBatchNorm1d(), nn.SyncBatchNorm(4), learns_nothing, own(4), of_a_library()]
        losses = ("ClipLoss", "SigLipLoss", "NTXentLoss", "NT_Xent", "SupConLoss", "InfoNCE", "BarlowTwinsLoss")
        losses += ("VICRegLoss", "MultipleNegativesRankingLoss")
        refused += [named(name)() for name in losses]
        # A loss compares samples in evaluation too.
        refused += [named(name)().eval() for name in losses]
        refused += [named("CLIPModel")(), named("InPlaceABN")()]
        for layer in refused:
            for holder in (layer, nn.Sequential(nn.Linear(2, 2), layer)):
                text = self.refused(lambda inputs: None, inputs, grads=holder)
                self.assertIn(f"({type(layer).__name__})", text)
        frozen = named("FrozenBatchNorm2d", nn.BatchNorm2d)
        accepted = [nn.BatchNorm1d(6).eval(), frozen(4), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.InstanceNorm1d(6)]
        for layer in (*accepted, nn.Dropout(), named("CLIPModel")().eval(), nn.CrossEntropyLoss()):
            cushion.retry(lambda inputs: None, inputs, split=cushion.split_batch, combine=list, grads=layer)

    # ---- where they are found ----

    def test_layers_that_a_step_refers_to(self) -> None:
        """A loss is often a separate module, which is not part of `grads=`."""
        nn = self.torch.nn
        contrastive = type("ClipLoss", (nn.Module,), {})()
        plain, normed = self.plain(), self.normed()
        global model
        model = contrastive

        class Trainer:
            def __init__(self) -> None:
                self.criterion = contrastive
                self.other = normed
                self.steps = 0

            def compute(self, inputs: Any) -> Any:
                return self.criterion(inputs)

            def step(self, inputs: Any) -> Any:
                return self.compute(inputs)

            def harmless(self, inputs: Any) -> Any:
                self.steps += 1

        class Callable:
            def __init__(self, of: Any) -> None:
                self.of = of

            def __call__(self, inputs: Any) -> Any:
                return self.of(inputs)

        trainer, callable_, models = Trainer(), Callable(contrastive), {"loss": contrastive}

        def helper(inputs: Any) -> Any:
            return contrastive(inputs)

        def with_default(inputs: Any, loss: Any = contrastive) -> Any:
            return loss(inputs)

        def partly(loss: Any, inputs: Any) -> Any:
            return loss(inputs)

        steps: dict[str, Any] = {
            "what it closes over": lambda inputs: contrastive(inputs),
            "a global": lambda inputs: model(inputs),
            "a function that it calls": lambda inputs: helper(inputs),
            "a function inside of it": lambda inputs: (lambda: contrastive(inputs))(),
            "a default": with_default,
            "a partial": functools.partial(partly, contrastive),
            "an attribute": lambda inputs: trainer.criterion(inputs),
            "a dict": lambda inputs: models["loss"](inputs),
            "its owner, by another method": trainer.step,
            "an object that is called": callable_,
            "one that it calls": lambda inputs: callable_(inputs),
            "itself": contrastive,
            "a function without gradients": self.torch.no_grad()(helper),
        }
        for name, step in steps.items():
            for options in ({}, {"grads": plain}):
                with self.subTest(name):
                    self.assertIn("(ClipLoss)", self.refused(step, **options))
        # An argument.
        self.assertIn("(ClipLoss)", self.refused(lambda inputs, loss: None, self.torch.randn(8, 6), contrastive))
        self.assertIn("(BatchNorm1d)", self.refused(normed, combine=self.torch.cat))
        # An attribute whose name does not occur in the code is not used.
        for step in (trainer.harmless, lambda inputs: trainer.steps, lambda inputs: plain(inputs)):
            cushion.retry(step, self.torch.randn(8, 6), split=cushion.split_batch, combine=list)
        model = None

    def test_steps_without_layers(self) -> None:
        def unassigned() -> Any:
            def step(inputs: Any) -> Any:
                return later

            found = _layers.modules_of(step)
            later = 5
            return found

        self.assertEqual(unassigned(), [])
        for step in (print, len, int, self.torch.relu, functools.partial(print), object()):
            self.assertEqual(_layers.modules_of(step), [])


class WithoutTorch(unittest.TestCase):
    def test_no_modules(self) -> None:
        self.assertEqual(_layers.modules_among([1, "two", None]), [])


if __name__ == "__main__":
    unittest.main()
