"""Steps in parts: their gradients and losses are those of the whole batch, for all ways that parts add up."""

from __future__ import annotations

import unittest
from typing import Any

import support  # puts the package under test on the path
from exact import ExactCase
from steps import Rows

import cushion


class Losses(ExactCase):
    def check(self, model: Any, step: Any, arguments: tuple[Any, ...], compute: Any, **options: Any) -> None:
        """Checks that a step in 2, 4 and more parts gives the loss and the gradients of the whole.

        :param step: called with the arguments of a part; fails if they have more rows than `self.room`
        :param compute: the loss of the whole
        """
        loss, expected = self.expected(model, compute)
        for self.room in (100, 6, 3, 2, 1):
            with self.subTest(room=self.room):
                got = cushion.retry(step, *arguments, split=cushion.split_batch, grads=model, **options)
                self.assert_close(self.gradients(model), expected)
                self.assert_close([got], [loss])

    def check_labels(self, model: Any, inputs: Any, labels: Any) -> None:
        """As `check`, for a mean over the labels that are not ignored."""

        def step(inputs: Any, labels: Any) -> Any:
            self.at_most(self.room, inputs)
            loss = self.cross_entropy(model, inputs, labels)
            loss.backward()
            return loss.detach()

        compute = lambda: self.cross_entropy(model, inputs, labels)  # noqa: E731
        self.check(model, step, (inputs, labels), compute, weight=lambda inputs, labels: (labels != -100).sum())

    def test_a_mean_over_parts_of_unequal_size(self) -> None:
        model, inputs, targets = self.plain(), self.torch.randn(11, 6), self.torch.randn(11, 4)
        mse = self.torch.nn.functional.mse_loss

        def step(inputs: Any, targets: Any) -> Any:
            self.at_most(self.room, inputs)
            loss = mse(model(inputs), targets)
            loss.backward()
            return loss.detach()

        self.check(model, step, (inputs, targets), lambda: mse(model(inputs), targets), loss="mean")

    def test_a_sum(self) -> None:
        model, inputs, targets = self.plain(), self.torch.randn(11, 6), self.torch.randn(11, 4)

        def total(inputs: Any, targets: Any) -> Any:
            return (model(inputs) - targets).square().sum()

        def step(inputs: Any, targets: Any) -> Any:
            self.at_most(self.room, inputs)
            loss = total(inputs, targets)
            loss.backward()
            return loss.detach()

        self.check(model, step, (inputs, targets), lambda: total(inputs, targets), loss="sum")

    def test_ignored_labels(self) -> None:
        model, (inputs, labels) = self.plain(), self.labelled()
        # These two rows have no labels, as one part or as two.
        labels[6:8] = -100
        self.check_labels(model, inputs, labels)

    def test_one_part_has_all_the_labels(self) -> None:
        model, (inputs, labels) = self.plain(), self.labelled()
        labels[1:] = -100
        self.check_labels(model, inputs, labels)

    def test_no_labels_at_all(self) -> None:
        # The whole divides by zero, and so does each part.
        model, (inputs, labels) = self.plain(), self.labelled()
        labels[:] = -100

        def step(inputs: Any, labels: Any) -> Any:
            self.at_most(4, inputs)
            loss = self.cross_entropy(model, inputs, labels)
            loss.backward()
            return loss.detach()

        weight = lambda inputs, labels: (labels != -100).sum()  # noqa: E731
        loss = cushion.retry(step, inputs, labels, split=cushion.split_batch, grads=model, weight=weight)
        self.assertTrue(bool(loss.isnan()))

    def test_a_mean_weighted_by_class(self) -> None:
        model, (inputs, labels) = self.plain(), self.labelled()
        of_class = self.torch.tensor([0.1, 3.0, 0.7, 1.9])

        def step(inputs: Any, labels: Any) -> Any:
            self.at_most(self.room, inputs)
            loss = self.cross_entropy(model, inputs, labels, weight=of_class)
            loss.backward()
            return loss.detach()

        def weight(inputs: Any, labels: Any) -> Any:
            return of_class[labels[labels != -100]].sum()

        compute = lambda: self.cross_entropy(model, inputs, labels, weight=of_class)  # noqa: E731
        self.check(model, step, (inputs, labels), compute, weight=weight)

    def test_a_step_that_takes_its_share(self) -> None:
        model, inputs, targets = self.plain(), self.torch.randn(11, 6), self.torch.randn(11, 4)
        mse = self.torch.nn.functional.mse_loss

        def step(inputs: Any, targets: Any, share: float = 1.0) -> Any:
            self.at_most(self.room, inputs)
            loss = mse(model(inputs), targets) * share
            loss.backward()
            return loss.detach()

        self.check(model, step, (inputs, targets), lambda: mse(model(inputs), targets))
        # A share that the program passes by position is divided among the parts.
        self.check(model, step, (inputs, targets, 0.5), lambda: mse(model(inputs), targets) * 0.5)

    def test_a_step_that_takes_its_share_by_weight(self) -> None:
        model, (inputs, labels) = self.plain(), self.labelled()
        labels[6:8] = -100

        def step(inputs: Any, labels: Any, share: float = 1.0) -> Any:
            self.at_most(self.room, inputs)
            loss = self.cross_entropy(model, inputs, labels) * share
            loss.backward()
            return loss.detach()

        def weight(inputs: Any, labels: Any) -> Any:
            return (labels != -100).sum()

        self.check(model, step, (inputs, labels), lambda: self.cross_entropy(model, inputs, labels), weight=weight)
        half = lambda: self.cross_entropy(model, inputs, labels) * 0.5  # noqa: E731
        self.check(model, step, (inputs, labels, 0.5), half, weight=weight)

    def test_terms_of_several_kinds(self) -> None:
        """A mean over rows, a sum over rows, and a term that does not depend on rows."""
        model, inputs, targets = self.plain(), self.torch.randn(11, 6), self.torch.randn(11, 4)
        mse = self.torch.nn.functional.mse_loss

        def loss_of(inputs: Any, targets: Any, share: float) -> Any:
            outputs = model(inputs)
            decay = sum(parameter.square().sum() for parameter in model.parameters())
            return mse(outputs, targets) * share + 0.01 * outputs.abs().sum() + 0.1 * decay * share

        def step(inputs: Any, targets: Any, share: float = 1.0) -> Any:
            self.at_most(self.room, inputs)
            loss = loss_of(inputs, targets, share)
            loss.backward()
            return loss.detach()

        self.check(model, step, (inputs, targets), lambda: loss_of(inputs, targets, 1.0))

    def test_several_terms_with_a_backward_each(self) -> None:
        model, inputs, targets = self.plain(), self.torch.randn(11, 6), self.torch.randn(11, 4)
        mse, autograd = self.torch.nn.functional.mse_loss, self.torch.autograd

        def terms(inputs: Any, targets: Any) -> tuple[Any, Any, Any]:
            outputs = model(inputs)
            return mse(outputs, targets), outputs.square().mean(), outputs.mean(dim=0)

        def step(inputs: Any, targets: Any) -> Any:
            self.at_most(self.room, inputs)
            first, second, third = terms(inputs, targets)
            first.backward(retain_graph=True)
            # Several at once; one is not a scalar, and has its own gradient.
            ones = self.torch.ones_like(third)
            autograd.backward([second, third], [None, ones])
            return (first + second + third.sum()).detach()

        def compute() -> Any:
            first, second, third = terms(inputs, targets)
            return first + second + third.sum()

        self.check(model, step, (inputs, targets), compute, loss="mean")

    def test_a_checkpoint_that_calls_backward_within_backward(self) -> None:
        from torch.utils.checkpoint import checkpoint

        for reentrant in (True, False):
            model, inputs = self.plain(), self.torch.randn(11, 6, requires_grad=True)

            def mean(inputs: Any) -> Any:
                return checkpoint(model, inputs, use_reentrant=reentrant).square().mean()

            def step(inputs: Any) -> Any:
                self.at_most(self.room, inputs)
                loss = mean(inputs)
                loss.backward()
                return loss.detach()

            with self.subTest(reentrant=reentrant):
                self.check(model, step, (inputs,), lambda: mean(inputs), loss="mean")

    def test_a_loss_whose_backward_the_program_calls(self) -> None:
        model, inputs, targets = self.plain(), self.torch.randn(11, 6), self.torch.randn(11, 4)
        mse = self.torch.nn.functional.mse_loss

        def step(inputs: Any, targets: Any) -> Any:
            self.at_most(self.room, inputs)
            return mse(model(inputs), targets)

        loss, expected = self.expected(model, lambda: mse(model(inputs), targets))
        for self.room in (100, 6, 2):
            got = cushion.retry(step, inputs, targets, split=cushion.split_batch, loss="mean")
            got.backward()
            self.assert_close(self.gradients(model), expected)
            self.assert_close([got.detach()], [loss])

    def test_outputs_from_which_the_program_computes_a_loss(self) -> None:
        model, inputs, targets = self.plain(), self.torch.randn(11, 6), self.torch.randn(11, 4)
        mse = self.torch.nn.functional.mse_loss

        def infer(inputs: Any) -> Any:
            self.at_most(3, inputs)
            return model(inputs)

        _, expected = self.expected(model, lambda: mse(model(inputs), targets))
        outputs = cushion.retry(infer, inputs, split=cushion.split_batch, combine=self.torch.cat)
        mse(outputs, targets).backward()
        self.assert_close(self.gradients(model), expected)

    def test_nested(self) -> None:
        """Both in parts: a backward() multiplies by the factors of both."""
        model, inputs = self.plain(), self.torch.randn(11, 6)
        inner_parts: list[int] = []

        def inner(inputs: Any) -> Any:
            self.at_most(2, inputs)
            inner_parts.append(len(inputs))
            loss = model(inputs).square().mean()
            loss.backward()
            return loss.detach()

        def outer(inputs: Any) -> Any:
            self.at_most(7, inputs)
            return cushion.retry(inner, inputs, split=cushion.split_batch, loss="mean", grads=model)

        loss, expected = self.expected(model, lambda: model(inputs).square().mean())
        got = cushion.retry(outer, inputs, split=cushion.split_batch, loss="mean", grads=model)
        self.assert_close(self.gradients(model), expected)
        self.assert_close([got], [loss])
        self.assertEqual(max(inner_parts), 2)

    def test_a_custom_split(self) -> None:
        """The number of rows is the length of the first tensor, or of the first list."""
        model, inputs = self.plain(), self.torch.randn(11, 6)

        def uneven(parts: int, batch: Any) -> Any:
            return [((batch[:2],), {}), ((batch[2:],), {})]

        def step(batch: Any) -> Any:
            self.at_most(9, batch)
            rows = batch if self.torch.is_tensor(batch) else self.torch.stack(batch)
            loss = model(rows).square().mean()
            loss.backward()
            return loss.detach()

        _, expected = self.expected(model, lambda: model(inputs).square().mean())
        cushion.retry(step, inputs, split=uneven, loss="mean", grads=model)
        self.assert_close(self.gradients(model), expected)

        def names(parts: int, names: list[str]) -> Any:
            return [((names[:2],), {}), ((names[2:],), {})]

        def step_of_names(names: list[str]) -> Any:
            self.at_most(9, names)
            loss = model(self.torch.stack([inputs[int(name)] for name in names])).square().mean()
            loss.backward()
            return loss.detach()

        cushion.retry(step_of_names, [str(row) for row in range(11)], split=names, loss="mean", grads=model)
        self.assert_close(self.gradients(model), expected)

    def test_samples_of_different_shapes(self) -> None:
        model = self.plain()
        images = [self.torch.randn(3, 6 + size, 6) for size in range(7)]
        targets = [{"box": self.torch.randn(4)} for _ in images]

        def loss_of(images: Any, targets: Any) -> Any:
            each = [(model(image).mean((0, 1)) - it["box"]).square().mean() for image, it in zip(images, targets)]
            return self.torch.stack(each).mean()

        def step(images: Any, targets: Any) -> Any:
            self.at_most(3, images)
            loss = loss_of(images, targets)
            loss.backward()
            return loss.detach()

        _, expected = self.expected(model, lambda: loss_of(images, targets))
        cushion.retry(step, images, targets, split=cushion.split_batch.samples, loss="mean", grads=model)
        self.assert_close(self.gradients(model), expected)

    def test_a_part_that_weighs_nothing_has_a_result(self) -> None:
        """`combine` gets the results of all parts; a part without weight adds no gradients, which would be NaN."""
        model, (inputs, labels) = self.plain(), self.labelled(rows=8)
        labels[2:4] = -100

        def mean(inputs: Any, labels: Any) -> Any:
            """Divides by the number of labels, as a program does that computes the mean itself."""
            counted = labels != -100
            each = (model(inputs).sum(dim=-1) - labels).square()
            return (each * counted).sum() / counted.sum()

        def weight(inputs: Any, labels: Any) -> Any:
            return (labels != -100).sum()

        def plain_step(inputs: Any, labels: Any) -> Any:
            self.at_most(2, inputs)
            mean(inputs, labels).backward()
            return inputs.sum(dim=(1, 2))

        def step_with_share(inputs: Any, labels: Any, share: float = 1.0) -> Any:
            self.at_most(2, inputs)
            (mean(inputs, labels) * share).backward()
            return inputs.sum(dim=(1, 2))

        _, expected = self.expected(model, lambda: mean(inputs, labels))
        options: Any = {"split": cushion.split_batch, "combine": self.torch.cat, "grads": model, "weight": weight}
        for step in (plain_step, step_with_share):
            sums = cushion.retry(step, inputs, labels, **options)
            self.assert_close([sums], [inputs.sum(dim=(1, 2))])
            self.assert_close(self.gradients(model), expected)

    def test_an_evaluation_has_no_gradients(self) -> None:
        model, inputs = self.plain(), self.torch.randn(11, 6)

        @self.torch.no_grad()
        def evaluate(inputs: Any) -> Any:
            self.at_most(4, inputs)
            return model(inputs).square().mean()

        loss = model(inputs).square().mean().detach()
        for grads in (model, ()):
            got = cushion.retry(evaluate, inputs, split=cushion.split_batch, loss="mean", grads=grads)
            self.assert_close([got], [loss])
        self.assertTrue(all(it.grad is None for it in model.parameters()))

    def test_gradients_that_cannot_be_weighted(self) -> None:
        """Gradients that a step writes without backward() are refused in parts: they would be too large."""
        model, inputs = self.plain(), self.torch.randn(11, 6)

        @cushion.retry(split=cushion.split_batch, loss="mean", grads=model)
        def step(inputs: Any) -> Any:
            self.at_most(self.room, inputs)
            loss = model(inputs).square().mean()
            parameters = list(model.parameters())
            for parameter, grad in zip(parameters, self.torch.autograd.grad(loss, parameters)):
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            return loss.detach()

        for before in (False, True):
            for parameter in model.parameters():
                parameter.grad = self.torch.ones_like(parameter) if before else None
            step.forget()
            self.room = 100
            step(inputs)
            self.room = 4
            with self.assertRaisesRegex(RuntimeError, "without backward.*share=1.0"):
                step(inputs)

    def test_an_edge_of_the_graph(self) -> None:
        """PyTorch accepts edges instead of tensors: with a gradient they are weighted, without one they are refused."""
        model, inputs = self.plain(), self.torch.randn(11, 6)
        edge_of = self.torch.autograd.graph.get_gradient_edge

        def step(inputs: Any, gradient: Any) -> Any:
            self.at_most(4, inputs)
            loss = model(inputs).square().mean()
            self.torch.autograd.backward(edge_of(loss), gradient)
            return loss.detach()

        _, expected = self.expected(model, lambda: model(inputs).square().mean())
        split = cushion.split_batch.whole("gradient")
        cushion.retry(step, inputs, self.torch.ones(()), split=split, loss="mean", grads=model)
        self.assert_close(self.gradients(model), expected)
        with self.assertRaisesRegex(RuntimeError, "edge of the graph"):
            cushion.retry(step, inputs, None, split=split, loss="mean", grads=model)


class Saying(ExactCase):
    """The program has to state how parts add up, and errors are found at the first call."""

    def test_without_grads(self) -> None:
        model, inputs = self.plain(), self.torch.randn(8, 6)
        calls: list[int] = []

        def step(inputs: Any) -> Any:
            calls.append(len(inputs))
            loss = model(inputs).square().mean()
            loss.backward()
            return loss.detach()

        # At the first call, without a shortage.
        with self.assertRaisesRegex(TypeError, r"give their owner as grads=, such as grads=model"):
            cushion.retry(step, inputs, split=cushion.split_batch, loss="mean")
        self.assertEqual(calls, [8])

    def test_weights(self) -> None:
        model, inputs, targets = self.plain(), self.torch.randn(8, 6), self.torch.randn(8, 4)
        calls: list[int] = []

        def step(inputs: Any, targets: Any) -> Any:
            calls.append(len(inputs))
            self.at_most(4, inputs)
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            return loss.detach()

        options: Any = {"split": cushion.split_batch, "grads": model}
        # A function that does not accept the step's arguments is found before the step runs.
        with self.assertRaisesRegex(
            TypeError, r"weight= cannot be called with the arguments of .*step.*\(inputs, targets\)"
        ):
            cushion.retry(step, inputs, targets, weight=lambda targets: 1, **options)
        self.assertEqual(calls, [])
        for weight in (-1.0, float("nan"), float("inf")):
            with self.assertRaisesRegex(ValueError, f"weight= returned {weight}, and has to return 0 or more"):
                cushion.retry(step, inputs, targets, weight=lambda *_: weight, **options)


class SayingWithoutTorch(unittest.TestCase):
    def test_how_parts_add_up_is_checked_by_the_decorator(self) -> None:
        with self.assertRaises(TypeError) as raised:

            @cushion.retry(split=cushion.split_batch, grads=())
            def step(rows: Rows) -> float:
                return 0.0

        text = str(raised.exception)
        for line in ('loss="mean"', 'loss="sum"', "weight=lambda", "combine=torch.cat", "`share=1.0`"):
            self.assertIn(line, text)
        with self.assertRaises(TypeError):
            cushion.retry(lambda rows: 0.0, Rows(range(2)), split=cushion.split_batch)

    def test_contradictory_options(self) -> None:
        def takes_share(rows: Rows, share: float = 1.0) -> float:
            return share

        def plain(rows: Rows) -> float:
            return 0.0

        split: Any = {"split": cushion.split_batch}
        with self.assertRaisesRegex(ValueError, "loss is 'median'"):
            cushion.retry(loss="median", **split)(plain)
        with self.assertRaisesRegex(TypeError, 'remove loss="sum" or weight='):
            cushion.retry(loss="sum", weight=len, **split)(plain)
        with self.assertRaisesRegex(TypeError, "takes `share` and multiplies by it itself: remove loss='mean'"):
            cushion.retry(loss="mean", **split)(takes_share)


if __name__ == "__main__":
    unittest.main()
