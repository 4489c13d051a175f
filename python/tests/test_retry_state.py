"""The changes of a failed try are undone: gradients, buffers, random numbers and the state of a GradScaler."""

from __future__ import annotations

import functools
import gc
import random
import unittest
import weakref
from typing import Any
from unittest import mock

import support  # puts the package under test on the path
from exact import ExactCase

import cushion


class StateCase(ExactCase):
    def step(self, model: Any, fails: int = 1) -> Any:
        """Returns a step that adds to all gradients and then runs out of memory, the first `fails` times."""
        left = [fails]

        def step(inputs: Any) -> Any:
            loss = model(inputs).square().mean()
            loss.backward()
            if left[0] > 0:
                left[0] -= 1
                raise self.out_of_memory()
            return loss.detach()

        return step


class Gradients(StateCase):
    def test_all_forms_of_grads(self) -> None:
        torch = self.torch
        model, inputs = self.plain(), torch.randn(8, 6)
        first, second = model[0], model[2]
        _, expected = self.expected(model, lambda: model(inputs).square().mean())

        def optimizer(module: Any) -> Any:
            return torch.optim.SGD(module.parameters(), 0.1)

        for name, grads in {
            "a module": model,
            "an optimizer": optimizer(model),
            "a list of parameters": list(model.parameters()),
            "parameters as they are given out": model.parameters(),
            "modules": [first, second],
            "a module and an optimizer": [first, optimizer(second)],
            "a module and parameters": (first, second.weight, second.bias),
            "a list of lists": [[first], [optimizer(second), []]],
            "the same twice": [model, optimizer(model)],
        }.items():
            with self.subTest(name):
                cushion.retry(self.step(model), inputs, grads=grads)
                self.assert_equal_bits(self.gradients(model), expected)
        for grads in ("weight", {"params": 1}, [model, None]):
            with self.assertRaisesRegex(TypeError, "has to be a module, an optimizer, parameters"):
                cushion.retry(self.step(model), inputs, grads=grads)
        # A generator of parameters can serve several decorated steps.
        decorate = cushion.retry(grads=model.parameters())
        for step in (decorate(self.step(model)), decorate(self.step(model))):
            step(inputs)
            self.assert_equal_bits(self.gradients(model), expected)
        # Gradients of parameters that are not in grads= are not restored.
        cushion.retry(self.step(model), inputs, grads=first)
        got = self.gradients(model)
        self.assert_equal_bits(got[:2], expected[:2])
        self.assert_equal_bits(got[2:], [2 * it for it in expected[2:]])

    def test_accumulation(self) -> None:
        """Gradients of earlier micro-batches stay, also with `reset=optimizer.zero_grad`."""
        torch = self.torch
        model = self.plain()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = [torch.randn(4, 6) for _ in range(4)]
        for inputs in batches:
            (model(inputs).square().mean() / 4).backward()
        expected = self.gradients(model)

        ways: dict[str, dict[str, Any]] = {
            "grads": {"grads": model},
            "zero_grad of the optimizer": {"reset": optimizer.zero_grad},
            "zero_grad of the model": {"reset": model.zero_grad},
            "both": {"grads": model, "reset": optimizer.zero_grad},
        }
        for name, options in ways.items():
            for fails_at in range(4):
                for fails in (1, 2):
                    with self.subTest(name, fails_at=fails_at, fails=fails):
                        left = [fails]

                        def micro(at: int) -> None:
                            (model(batches[at]).square().mean() / 4).backward()
                            if at == fails_at and left[0] > 0:
                                left[0] -= 1
                                raise self.out_of_memory()

                        for at in range(4):
                            cushion.retry(micro, at, **options)
                        self.assert_equal_bits(self.gradients(model), expected)

    def test_in_parts_within_accumulation(self) -> None:
        torch = self.torch
        model = self.plain()
        batches = [torch.randn(7, 6) for _ in range(3)]
        for inputs in batches:
            (model(inputs).square().mean() / 3).backward()
        expected = self.gradients(model)
        for room in (4, 2, 1):

            @cushion.retry(split=cushion.split_batch, loss="mean", grads=model)
            def step(inputs: Any) -> Any:
                loss = model(inputs).square().mean() / 3
                loss.backward()
                # Parts have added to gradients before a later part fails.
                self.at_most(room, inputs)
                return loss.detach()

            for inputs in batches:
                step(inputs)
            self.assert_close(self.gradients(model), expected)

    def test_the_same_tensor_holds_them(self) -> None:
        """A view of a gradient, as some optimizers have, sees what the second try adds."""
        model, inputs = self.plain(), self.torch.randn(8, 6)
        model(inputs).square().mean().backward()
        views = [parameter.grad.view(-1) for parameter in model.parameters()]
        held = [parameter.grad for parameter in model.parameters()]

        def step() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            again()

        again = mock.Mock(side_effect=[self.out_of_memory(), None], spec=[])
        expected = [view.clone() for view in views]
        cushion.retry(self.step(model), inputs, grads=model)
        for parameter, view, grad, before in zip(model.parameters(), views, held, expected):
            self.assertIs(parameter.grad, grad)
            self.assert_close([view], [2 * before])
        # Also if the failed try has replaced the tensor.
        with mock.patch.object(cushion._retry._tries._Run, "_prepare_next", lambda run: "enough"):
            again.side_effect = [self.out_of_memory()]
            with self.assertRaises(RuntimeError):
                cushion.retry(step, grads=model)
        for parameter, grad in zip(model.parameters(), held):
            self.assertIs(parameter.grad, grad)

    def test_missing_gradients_are_none_again(self) -> None:
        model, inputs = self.plain(), self.torch.randn(8, 6)
        for parameter in model[0].parameters():
            parameter.grad = self.torch.ones_like(parameter)
        with self.assertRaises(RuntimeError):
            cushion.retry(self.step(model, fails=9), inputs, grads=model)
        # It gave up, so nothing was added.
        self.assertTrue(all(parameter.grad is None for parameter in model[2].parameters()))
        for parameter in model[0].parameters():
            self.assert_equal_bits([parameter.grad], [self.torch.ones_like(parameter)])

    def test_frozen_and_tied(self) -> None:
        torch = self.torch

        class Tied(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.embed = torch.nn.Embedding(10, 6)
                self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
                self.out = torch.nn.Linear(6, 10, bias=False)
                self.out.weight = self.embed.weight

            def forward(self, tokens: Any) -> Any:
                return self.out(self.frozen(self.embed(tokens)))

        model, tokens = Tied(), torch.randint(0, 10, (8, 3))
        for grads in (model, torch.optim.SGD([model.embed.weight], 0.1)):
            for before in (None, torch.randn(10, 6)):
                model.embed.weight.grad = None if before is None else before.clone()
                model(tokens).square().mean().backward()
                expected = self.gradients(model)
                model.embed.weight.grad = None if before is None else before.clone()
                cushion.retry(self.step(model, fails=2), tokens, grads=grads)
                self.assertTrue(all(parameter.grad is None for parameter in model.frozen.parameters()))
                self.assert_equal_bits(self.gradients(model), expected)

    def test_sparse(self) -> None:
        torch = self.torch
        embed, other = torch.nn.Embedding(10, 6, sparse=True), torch.nn.Linear(6, 4)
        model = torch.nn.Sequential(embed, other)
        tokens = [torch.randint(0, 10, (8, 3)) for _ in range(3)]
        for one in tokens:
            model(one).square().mean().backward()
        self.assertTrue(embed.weight.grad.is_sparse)
        expected = self.gradients(model)
        for one in tokens:
            cushion.retry(self.step(model, fails=2), one, grads=model)
        self.assertTrue(embed.weight.grad.is_sparse)
        self.assert_close(self.gradients(model), expected)

    def test_without_room_for_copies(self) -> None:
        """The copies are made on the host, without clone(), which fails here."""
        model, inputs = self.plain(), self.torch.randn(8, 6)
        model(inputs).square().mean().backward()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        with mock.patch.object(self.torch.Tensor, "clone", side_effect=self.out_of_memory()):
            cushion.retry(self.step(model, fails=2), inputs, grads=model)
        self.assert_close(self.gradients(model), [2 * it for it in before])

    def notes(self, error: BaseException) -> str:
        # Python 3.10 has no notes.
        return " ".join(getattr(error, "__notes__", ["grads=model step() afterwards"]))

    def test_a_failure_in_backward_without_grads(self) -> None:
        torch = self.torch
        model, inputs = self.plain(), torch.randn(8, 6)
        calls: list[int] = []

        class Fails(torch.autograd.Function):  # type: ignore[misc, name-defined]
            @staticmethod
            def forward(context: Any, value: Any) -> Any:
                return value.clone()

            @staticmethod
            def backward(context: Any, gradient: Any) -> Any:
                raise self.out_of_memory()

        def step(inputs: Any) -> None:
            calls.append(1)
            model[2](Fails.apply(model[0](inputs))).mean().backward()

        with self.assertRaises(torch.cuda.OutOfMemoryError) as raised:
            cushion.retry(step, inputs)
        self.assertEqual(len(calls), 1)
        self.assertIn("grads=model", self.notes(raised.exception))
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            cushion.retry(step, inputs, grads=model)
        self.assertEqual(len(calls), 4)

    def test_a_failure_after_backward_without_grads(self) -> None:
        model, inputs = self.plain(), self.torch.randn(8, 6)
        _, expected = self.expected(model, lambda: model(inputs).square().mean())
        with self.assertRaises(RuntimeError) as raised:
            cushion.retry(self.step(model), inputs)
        self.assertIn("grads=model", self.notes(raised.exception))
        # Added once, not twice.
        self.assert_equal_bits(self.gradients(model), expected)
        # The program restores the gradients itself.
        cushion.retry(self.step(model), inputs, reset=lambda: model.zero_grad())
        self.assert_equal_bits(self.gradients(model), expected)
        # A failure before backward() has added nothing.
        again = mock.Mock(side_effect=[self.out_of_memory(), None], spec=[])

        def step(inputs: Any) -> None:
            again()
            model(inputs).square().mean().backward()

        cushion.retry(step, inputs)
        self.assert_equal_bits(self.gradients(model), expected)


class Buffers(StateCase):
    def normed(self) -> Any:
        nn = self.torch.nn
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))

    def state(self, model: Any) -> list[Any]:
        found = [buffer.clone() for buffer in model.buffers()] + self.gradients(model)
        for buffer, start in zip(model.buffers(), self.start):
            buffer.copy_(start)
        self.torch.manual_seed(3)
        return found

    def test_running_statistics(self) -> None:
        model, inputs = self.normed(), self.torch.randn(8, 6) + 5
        optimizer = self.torch.optim.SGD(model.parameters(), 0.1)
        wrapped = self.torch.nn.Sequential(model)
        self.start = [buffer.clone() for buffer in model.buffers()]
        self.torch.manual_seed(3)
        self.step(model, 0)(inputs)
        expected = self.state(model)
        self.assertEqual(int(expected[2]), 1, "one batch was tracked")
        for name, grads in {
            "a module": model,
            "its owner": wrapped,
            "an optimizer": optimizer,
            "parameters": list(model.parameters()),
        }.items():
            with self.subTest(name):
                cushion.retry(self.step(model, 2), inputs, grads=grads)
                self.assert_equal_bits(self.state(model), expected)

    def test_modules_are_found_by_their_parameters(self) -> None:
        """Given an optimizer or parameters, the modules that own them are searched for once."""
        model, inputs = self.normed(), self.torch.randn(8, 6) + 5
        self.start = [buffer.clone() for buffer in model.buffers()]
        self.torch.manual_seed(3)
        self.step(model, 0)(inputs)
        expected = self.state(model)
        for grads in (self.torch.optim.SGD(model.parameters(), 0.1), list(model.parameters())):
            with mock.patch.object(gc, "get_objects", wraps=gc.get_objects) as searched:
                for _ in range(3):
                    # A new step each time, as in a loop that defines it.
                    step = self.step(model, 2)
                    cushion.retry(lambda inputs: step(inputs), inputs, grads=grads)
                    self.assert_equal_bits(self.state(model), expected)
            searched.assert_called_once()
        # A new parameter group starts a new search.
        optimizer = self.torch.optim.SGD(model.parameters(), 0.1)
        other = self.normed()
        cushion.retry(self.step(model, 1), inputs, grads=optimizer)
        optimizer.add_param_group({"params": list(other.parameters())})
        tracked = other[1].num_batches_tracked
        cushion.retry(self.step(other, 1), inputs, grads=optimizer)
        self.assertEqual(int(tracked), 1)

    def test_a_search_among_all_objects(self) -> None:
        """Some objects raise when they are inspected, and frozen objects are hidden from the search."""
        model, inputs = self.normed(), self.torch.randn(8, 6) + 5
        # Modules that own each other in a cycle.
        model[0].owner = model
        # gc.get_objects() does not return frozen objects. The step refers to this one.
        gc.freeze()

        class Gone:
            pass

        gone = Gone()
        dead = weakref.proxy(gone)
        del gone

        class Strange:
            @property
            def __class__(self) -> Any:
                raise RuntimeError("not now")

        strange = Strange()
        # isinstance() on these objects raises.
        for one, error in ((dead, ReferenceError), (strange, RuntimeError)):
            with self.assertRaises(error):
                isinstance(one, self.torch.nn.Module)
        for step in (self.step(model, 1), functools.partial(self.step(model, 1))):
            before = int(model[1].num_batches_tracked)
            cushion.retry(step, inputs, grads=self.torch.optim.SGD(model.parameters(), 0.1))
            self.assertEqual(int(model[1].num_batches_tracked), before + 1)
        del dead, strange

    def test_buffers_that_a_step_replaces(self) -> None:
        torch = self.torch

        class Averages(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(6))
                self.register_buffer("mean", torch.zeros(6))
                self.register_buffer("first", None)

            def forward(self, inputs: Any) -> Any:
                self.mean = 0.9 * self.mean + 0.1 * inputs.mean(dim=0)
                if self.first is None:
                    self.first = inputs[0]
                else:
                    self.first = self.first + inputs[0]
                return inputs * self.weight - self.mean

        model, inputs = Averages(), torch.randn(8, 6)
        cushion.retry(self.step(model, 2), inputs, grads=model)
        self.assert_equal_bits([model.mean, model.first], [0.1 * inputs.mean(dim=0), inputs[0]])

    def test_in_evaluation_they_are_not_copied(self) -> None:
        model = self.normed().eval()
        with mock.patch.object(cushion._retry._undo, "_copy") as copied:
            cushion.retry(lambda: None, grads=model)
        copied.assert_not_called()


class RandomNumbers(StateCase):
    def test_of_pytorch_numpy_and_python(self) -> None:
        import numpy

        def draw() -> list[float]:
            return [*self.torch.rand(3).tolist(), *numpy.random.rand(3).tolist(), random.random(), random.gauss(0, 1)]

        for start in range(3):
            drawn: list[list[float]] = []

            def step() -> None:
                drawn.append(draw())
                if len(drawn) < 3:
                    raise self.out_of_memory()

            self.torch.manual_seed(start)
            numpy.random.seed(start)
            random.seed(start)
            cushion.retry(step)
            self.assertEqual(drawn[0], drawn[1])
            self.assertEqual(drawn[0], drawn[2])
            after = draw()
            self.torch.manual_seed(start)
            numpy.random.seed(start)
            random.seed(start)
            # The same numbers as in a step without a failure.
            self.assertEqual((draw(), draw()), (drawn[0], after))

    def test_when_it_gives_up(self) -> None:
        self.torch.manual_seed(1)
        expected = self.torch.rand(3)
        self.torch.manual_seed(1)

        def step() -> None:
            self.torch.rand(3)
            raise self.out_of_memory()

        with self.assertRaises(RuntimeError):
            cushion.retry(step)
        self.assert_equal_bits([self.torch.rand(3)], [expected])

    def test_a_whole_step_in_training(self) -> None:
        """Dropout draws the same masks, and batch norm has the same statistics: equal to the bit."""
        nn = self.torch.nn
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        inputs = self.torch.randn(8, 6)
        step = self.step(model, 2)
        start = [buffer.clone() for buffer in model.buffers()]
        self.torch.manual_seed(5)
        got = cushion.retry(step, inputs, grads=model)
        got_state = [it.clone() for it in model.buffers()] + self.gradients(model)
        for buffer, before in zip(model.buffers(), start):
            buffer.copy_(before)
        self.torch.manual_seed(5)
        expected = step(inputs)
        self.assert_equal_bits([got, *got_state], [expected, *model.buffers(), *self.gradients(model)])


if __name__ == "__main__":
    unittest.main()
