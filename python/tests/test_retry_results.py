"""What `cushion.retry` returns: the same type whether a batch was split or not."""

from __future__ import annotations

import unittest
from collections import OrderedDict
from typing import Any
from unittest import mock

import support  # puts the package under test on the path
from exact import ExactCase
from steps import Card, Rows

import cushion


def returning(result: Any, room: int = 100) -> Any:
    """Returns a step that returns `result` for every part."""

    def step(rows: Any) -> Any:
        if len(rows.values if isinstance(rows, Rows) else rows) > room:
            raise MemoryError("CUDA out of memory.")
        return result

    return step


class ModelOutput(OrderedDict[str, Any]):
    """A mapping like the outputs of Hugging Face models, without update()."""

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("You cannot use `update` on a ModelOutput instance.")


class Refusing(unittest.TestCase):
    def test_results_other_than_a_loss_are_refused_at_the_first_call(self) -> None:
        results = (True, 1, "text", (1.0, 2.0), [1.0], {"loss": 1.0, "accuracy": 0.9, "rate": 3e-4})
        for result in (*results, ModelOutput(loss=1.0), Rows([1.0]), object(), complex(1, 1)):
            for loss in ("mean", "sum"):
                with self.subTest(result=result, loss=loss):
                    name = type(result).__name__
                    # Without a shortage: one part and one try.
                    with self.assertRaisesRegex(TypeError, f"returning.*returned a {name}.* give combine=, "):
                        cushion.retry(returning(result), Rows(range(4)), split=cushion.split_batch, loss=loss, grads=())

    def test_a_loss_for_only_some_parts(self) -> None:
        results = [None, 1.0]

        def step(rows: Rows) -> Any:
            if len(rows.values) > 2:
                raise MemoryError
            return results.pop()

        with self.assertRaisesRegex(TypeError, "a loss for some parts of a batch and None for others"):
            cushion.retry(step, Rows(range(4)), split=cushion.split_batch, loss="mean", grads=())


class Returning(unittest.TestCase):
    def results(self, result: Any, **options: Any) -> tuple[Any, Any]:
        """Returns the result of a whole step, and that of four parts."""
        options = {"split": cushion.split_batch, **options}
        return tuple(  # type: ignore[return-value]
            cushion.retry(returning(result, room), Rows(range(8)), **options) for room in (100, 2)
        )

    def test_losses(self) -> None:
        for loss, expected in (("mean", 2.5), ("sum", 10.0)):
            whole, parts = self.results(2.5, loss=loss, grads=())
            self.assertEqual((whole, parts), (2.5, expected))
            self.assertIs(type(parts), float)
        self.assertEqual(self.results(None, loss="mean", grads=()), (None, None))

    def test_combine_is_called_for_one_part_too(self) -> None:
        for result in (True, 7, "text", {"accuracy": 0.9}, ModelOutput(loss=1.0), None):
            whole, parts = self.results(result, combine=list)
            self.assertEqual((whole, parts), ([result], [result] * 4))
        # Together with a loss, whose gradients are weighted as usual.
        combine = mock.Mock(side_effect=lambda results: sum(it["rows"] for it in results))
        self.assertEqual(self.results({"rows": 2}, combine=combine, loss="mean", grads=()), (2, 8))
        self.assertEqual([len(call.args[0]) for call in combine.call_args_list], [1, 4])

    def test_results_are_in_the_order_of_the_rows(self) -> None:
        card = Card(2)
        results = cushion.retry(card.step, Rows(range(6)), split=cushion.split_batch, combine=list)
        self.assertEqual(results, [0, 3, 3, 9])

    def test_an_error_in_combine_is_raised(self) -> None:
        def combine(results: list[Any]) -> Any:
            raise KeyError("no")

        with self.assertRaises(KeyError):
            self.results(1, combine=combine)


class ReturningTensors(ExactCase):
    def test_types_do_not_depend_on_a_shortage(self) -> None:
        torch = self.torch
        import numpy

        for value in (1.5, numpy.float64(1.5), torch.tensor(1.5), torch.tensor(1.5, dtype=torch.float16), None):
            found = []
            for room in (100, 3):

                @cushion.retry(split=cushion.split_batch, loss="mean", grads=())
                def step(rows: Any) -> Any:
                    self.at_most(room, rows)
                    return value

                found.append(step(torch.zeros(8, 2)))
            with self.subTest(value=value):
                self.assertIs(type(found[0]), type(found[1]))
                self.assertEqual(getattr(found[0], "dtype", None), getattr(found[1], "dtype", None))
                self.assertEqual(getattr(found[0], "shape", None), getattr(found[1], "shape", None))
                self.assertEqual(found[0], found[1])

    def test_tensors_that_are_not_a_loss(self) -> None:
        torch = self.torch
        for value in (torch.tensor(3), torch.tensor(True), torch.ones(1), torch.ones(2, 2)):
            with self.assertRaisesRegex(TypeError, "returned a Tensor"):
                cushion.retry(lambda rows: value, torch.zeros(8, 2), split=cushion.split_batch, loss="mean", grads=())

    def test_one_tensor_is_not_copied_to_be_joined(self) -> None:
        torch = self.torch
        result = torch.ones(8, 2)
        for join in (torch.cat, torch.concat):
            got = cushion.retry(lambda rows: result, torch.zeros(8), split=cushion.split_batch, combine=join)
            self.assertIs(got, result)


if __name__ == "__main__":
    unittest.main()
