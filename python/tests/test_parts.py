"""`cushion.split_batch`: which arguments it splits, and which it refuses because they could be split in two ways."""

from __future__ import annotations

import dataclasses
import types
import unittest
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import support  # puts the package under test on the path
from exact import ExactCase
from steps import Rows, failing

import cushion


class Shaped:
    """A tensor of any shape. Slices have the right shape and no data."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __getitem__(self, index: tuple[slice, ...]) -> Shaped:
        lengths = [len(range(length)[at]) for length, at in zip(self.shape, index)]
        return Shaped(*lengths, *self.shape[len(index) :])


@dataclasses.dataclass(frozen=True)
class Batch:
    inputs: Any
    name: str = "batch"
    more: Any = None


class Immutable(Mapping[str, Any]):
    """A mapping that is created from a dict, and cannot be changed."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Unlike(Immutable):
    """A mapping that cannot be created from a dict."""

    def __init__(self) -> None:
        super().__init__({"inputs": Shaped(8, 2)})


class ModelOutput(OrderedDict[str, Any]):
    """A mapping like the outputs of Hugging Face models, without update()."""

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("You cannot use `update` on a ModelOutput instance.")


class Cutting(unittest.TestCase):
    def lengths(self, take: Callable[[Any], Any], *arguments: Any, split: Any = cushion.split_batch) -> list[int]:
        """Returns the number of rows in each of 3 parts."""
        return [take(args).shape[0] for args, _ in split(3, *arguments)]

    def test_containers(self) -> None:
        Pair = namedtuple("Pair", "inputs name")
        for batch in (
            {"inputs": Shaped(8, 2), "name": "batch"},
            OrderedDict(inputs=Shaped(8, 2), name="batch"),
            UserDict(inputs=Shaped(8, 2), name="batch"),
            ModelOutput(inputs=Shaped(8, 2), name="batch"),
            types.MappingProxyType({"inputs": Shaped(8, 2), "name": "batch"}),
            Immutable({"inputs": Shaped(8, 2), "name": "batch"}),
        ):
            with self.subTest(type(batch).__name__):
                parts = [args[0] for args, _ in cushion.split_batch(3, batch)]
                self.assertEqual([it["inputs"].shape for it in parts], [(2, 2), (3, 2), (3, 2)])
                self.assertEqual({type(it) for it in parts}, {type(batch)})
                self.assertEqual({it["name"] for it in parts}, {"batch"})
                self.assertEqual(batch["inputs"].shape, (8, 2))
        for batch in (Batch(Shaped(8, 2)), Pair(Shaped(8, 2), "batch")):
            with self.subTest(type(batch).__name__):
                parts = [args[0] for args, _ in cushion.split_batch(3, batch)]
                self.assertEqual([it.inputs.shape for it in parts], [(2, 2), (3, 2), (3, 2)])
                self.assertEqual({type(it) for it in parts}, {type(batch)})
                self.assertEqual({it.name for it in parts}, {"batch"})

    def test_nested_containers(self) -> None:
        batch = {"more": [(Batch(types.MappingProxyType({"inputs": (Shaped(8, 2),)})),)]}
        self.assertEqual(self.lengths(lambda args: args[0]["more"][0][0].inputs["inputs"][0], batch), [2, 3, 3])

    def test_lists_as_pytorch_s_dataloader_makes_them(self) -> None:
        for batch in ([Shaped(8, 2), Shaped(8)], [[Shaped(8, 2), Shaped(8, 3)], [Shaped(8), Shaped(8)]]):
            parts = cushion.split_batch(2, batch)
            self.assertEqual(len(parts), 2)
        self.assertEqual(self.lengths(lambda args: args[0][1], [Shaped(8, 2), Shaped(8)]), [2, 3, 3])
        self.assertEqual(self.lengths(lambda args: args[0][0], [Shaped(8, 2), "names", 3]), [2, 3, 3])

    def test_a_mapping_that_cannot_be_created_from_a_dict(self) -> None:
        with self.assertRaisesRegex(cushion.CannotSplit, "a Unlike cannot be made from a dict"):
            cushion.split_batch(2, Unlike())


class Samples(unittest.TestCase):
    def refused(self, *arguments: Any, split: Any = cushion.split_batch) -> str:
        with self.assertRaises(cushion.CannotSplit) as raised:
            split(2, *arguments)
        return str(raised.exception)

    def test_a_list_of_images_is_not_cut_by_channels(self) -> None:
        text = self.refused([Shaped(3, 32, 32), Shaped(3, 40, 40)])
        self.assertIn("a list of 2 tensors, the first of shape (3, 32, 32), can be a batch of samples", text)
        self.assertIn("split=cushion.split_batch.samples", text)
        self.refused([Shaped(3, 32, 32), Shaped(3, 32, 32)])
        self.refused([Shaped(1, 28, 28)] * 4, [Shaped(5)] * 4)
        # The result of tuple(zip(*samples)).
        self.assertIn("a tuple of 2 tensors", self.refused((Shaped(3, 32, 32), Shaped(3, 40, 40))))

    def test_a_list_of_samples_of_any_shape(self) -> None:
        self.refused([Shaped(17, 5), Shaped(23, 5)])
        for sample in (
            {"image": Shaped(3, 32, 32), "label": 1},
            (Shaped(3, 32, 32), 1),
            (Shaped(16, 5), Shaped(16, 5)),
            Batch(Shaped(16, 5)),
        ):
            with self.subTest(sample=type(sample).__name__):
                text = self.refused([sample, sample])
                self.assertIn(f"a list of 2 values of type {type(sample).__name__} can be a batch of samples", text)

    def test_refused_at_the_first_call(self) -> None:
        calls: list[int] = []

        @cushion.retry(split=cushion.split_batch, combine=list)
        def step(images: Any) -> None:
            calls.append(1)

        with self.assertRaises(cushion.CannotSplit) as raised:
            step([Shaped(3, 32, 32), Shaped(3, 40, 40)])
        self.assertIn('or .rows("images") for the tensors of one batch', str(raised.exception))
        self.assertEqual(calls, [])

    def test_rows_of_tensors_that_look_like_images(self) -> None:
        # Tensors of three dimensions with three rows look like images.
        batch = [Shaped(3, 7, 5), Shaped(3, 7, 2)]
        self.refused(batch)
        parts = cushion.split_batch.rows("batch").named(["batch"])(3, batch)
        self.assertEqual([[it.shape for it in args[0]] for args, _ in parts], [[(1, 7, 5), (1, 7, 2)]] * 3)
        parts = cushion.split_batch(3, tuple(batch[:1]) + (Shaped(3),))
        self.assertEqual(len(parts), 3)

    def test_samples(self) -> None:
        images = [Shaped(3, size, size) for size in (32, 40, 48, 56, 64)]
        targets = [{"boxes": Shaped(number, 4)} for number in range(5)]
        split = cushion.split_batch.samples
        parts = split(2, images, targets, Shaped(5, 7), ["a", "b"], Shaped(3))
        self.assertEqual([args[0] for args, _ in parts], [images[:2], images[2:]])
        self.assertEqual([args[1] for args, _ in parts], [targets[:2], targets[2:]])
        # A tensor with a row for each sample is split too; all other arguments are whole.
        self.assertEqual([args[2].shape for args, _ in parts], [(2, 7), (3, 7)])
        self.assertEqual([args[3] for args, _ in parts], [["a", "b"]] * 2)
        self.assertEqual([args[4].shape for args, _ in parts], [(3,), (3,)])
        # The lists may be in a dict.
        parts = split(5, {"images": images, "targets": targets})
        self.assertEqual([args[0]["images"] for args, _ in parts], [[image] for image in images])
        self.assertIn("no argument is a list of samples", self.refused(Shaped(8, 2), split=split))

    def test_a_packed_sequence(self) -> None:
        class PackedSequence(namedtuple("PackedSequence", "data batch_sizes")):
            pass

        text = self.refused(PackedSequence(Shaped(20, 4), Shaped(7)))
        self.assertIn("write your own function for split=", text)


class Masks(unittest.TestCase):
    def refused(self, split: Any, *arguments: Any, **named: Any) -> str:
        with self.assertRaises(cushion.CannotSplit) as raised:
            split(2, *arguments, **named)
        return str(raised.exception)

    def test_a_mask_over_positions(self) -> None:
        """With as many positions as rows, the mask could be rows of the batch."""
        text = self.refused(cushion.split_batch, Shaped(8, 8, 4), mask=Shaped(8, 8))
        self.assertIn("`mask` has the shape (8, 8)", text)
        self.assertIn('.rows("mask") or .whole("mask")', text)
        # Also if the batch has the same shape: the name contains "mask".
        self.refused(cushion.split_batch, Shaped(8, 8), causal_mask=Shaped(8, 8))
        # Positional arguments have the names of the parameters, and values of a mapping those of their keys.
        by_position = cushion.split_batch.named(["inputs", "mask"])
        self.assertIn("`mask`", self.refused(by_position, Shaped(8, 8, 4), Shaped(8, 8)))
        self.assertIn("`mask`", self.refused(cushion.split_batch, {"inputs": Shaped(8, 8, 4), "mask": Shaped(8, 8)}))
        self.refused(cushion.split_batch, Shaped(8, 8, 4), Shaped(8, 8))

    def test_whole_or_rows(self) -> None:
        names = ["inputs", "mask"]
        for split, length in ((cushion.split_batch.whole("mask"), 8), (cushion.split_batch.rows("mask"), 4)):
            for parts in (
                [args[1] for args, _ in split.named(names)(2, Shaped(8, 8, 4), Shaped(8, 8))],
                [named["mask"] for _, named in split(2, Shaped(8, 8, 4), mask=Shaped(8, 8))],
                [args[0]["mask"] for args, _ in split(2, {"inputs": Shaped(8, 8, 4), "mask": Shaped(8, 8)})],
                [args[0].more for args, _ in split.whole("more")(2, Batch(Shaped(8, 8, 4), more=Shaped(8, 8)))],
            )[: 3 if length == 4 else 4]:
                self.assertEqual([it.shape for it in parts], [(length, 8)] * 2)
        # A whole argument does not give the length of the batch.
        parts = cushion.split_batch.whole("mask").named(["mask", "inputs"])(2, Shaped(5, 5), Shaped(8, 2))
        self.assertEqual([args[1].shape for args, _ in parts], [(4, 2)] * 2)

    def test_tensors_that_cannot_be_masks(self) -> None:
        parts = cushion.split_batch(2, inputs=Shaped(8, 8), targets=Shaped(8, 8), labels=Shaped(8), mask=Shaped(8, 9))
        for _, named in parts:
            self.assertEqual({it.shape[0] for it in named.values()}, {4})
        # Other lengths.
        parts = cushion.split_batch(2, Shaped(8, 6, 4), mask=Shaped(6, 6))
        self.assertEqual([named["mask"].shape for _, named in parts], [(6, 6)] * 2)

    def test_options_can_be_combined(self) -> None:
        split = cushion.split_batch.along(1).whole("state").rows("targets")
        parts = split(2, inputs=Shaped(5, 8, 2), state=Shaped(5, 8), targets=Shaped(8, 8))
        self.assertEqual([it["inputs"].shape for _, it in parts], [(5, 4, 2)] * 2)
        self.assertEqual([it["state"].shape for _, it in parts], [(5, 8)] * 2)
        self.assertEqual([it["targets"].shape for _, it in parts], [(8, 4)] * 2)

    def test_self_is_not_part_of_the_batch(self) -> None:
        """Not even if it has a shape."""

        class Image(Rows):
            @cushion.retry(split=cushion.split_batch, combine=list)
            def step(self, rows: Rows) -> tuple[int, int]:
                if len(rows.values) > 2:
                    raise MemoryError
                return len(self.values), len(rows.values)

        self.assertEqual(Image(range(4)).step(Rows(range(4))), [(4, 2), (4, 2)])

    def test_an_ambiguous_batch_in_a_shortage_is_named_in_the_error(self) -> None:
        """The first call can be split; a later one has as many positions as rows."""

        @cushion.retry(split=cushion.split_batch, combine=list)
        def step(inputs: Any, mask: Any) -> Any:
            return again()

        again = failing(0)
        step(Shaped(8, 6, 4), Shaped(6, 6))
        again = failing(1)
        with self.assertRaises(MemoryError) as raised:
            step(Shaped(8, 8, 4), Shaped(8, 8))
        if hasattr(raised.exception, "__notes__"):
            self.assertIn("a part cannot be made smaller: `mask` has the shape (8, 8)", raised.exception.__notes__[0])


class Tensors(ExactCase):
    def test_tensors_and_arrays(self) -> None:
        import numpy

        inputs, mask, array = self.torch.randn(8, 3), self.torch.randn(5, 5), numpy.arange(16).reshape(8, 2)
        parts = cushion.split_batch(3, inputs, {"mask": mask, "array": array}, 2.5, self.torch.tensor(1.0))
        self.assert_equal_bits([self.torch.cat([args[0] for args, _ in parts])], [inputs])
        self.assertEqual(numpy.concatenate([args[1]["array"] for args, _ in parts]).tolist(), array.tolist())
        for args, _ in parts:
            self.assertIs(args[1]["mask"], mask)
            # A view, not a copy.
            self.assertEqual(args[0].untyped_storage().data_ptr(), inputs.untyped_storage().data_ptr())

    def test_a_packed_sequence_of_pytorch(self) -> None:
        packed = self.torch.nn.utils.rnn.pack_sequence([self.torch.randn(5, 3), self.torch.randn(2, 3)])
        with self.assertRaisesRegex(cushion.CannotSplit, "PackedSequence"):
            cushion.split_batch(2, packed)


if __name__ == "__main__":
    unittest.main()
