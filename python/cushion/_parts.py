"""Splits a batch into parts.

`cushion.retry` runs a step in smaller parts when the whole batch does not fit. This module makes the arguments of the
parts. It never guesses: if arguments could be split in two ways, it raises, and the message says what to write."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

# The arguments of one part: positional and keyword.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Split = Callable[..., Sequence[Arguments]]

# A tensor of three dimensions whose first has one of these lengths may be one image: (channels, height, width).
_CHANNELS = (1, 3, 4)


class CannotSplit(ValueError):
    """A batch cannot be split into that many parts. A `split` of `cushion.retry` raises it, and `retry` gives up."""


class SplitBatch:
    """Splits a batch by rows. `cushion.split_batch` is one, and `cushion.split_batch.along(1)` splits by columns.

    The first tensor among the arguments gives the length of the batch. Every tensor of that length, also inside
    tuples, lists, mappings and dataclasses, is split into parts of nearly equal length; every part gets all other
    arguments whole. A tensor is any value that has a `shape` and can be sliced.

    Some arguments can be split in two ways. Then CannotSplit is raised until the program says which is meant:

    - for a list of samples with different shapes, such as images for a detector: `cushion.split_batch.samples`;
    - for an argument that has no rows, such as a mask over positions: `cushion.split_batch.whole("mask")`;
    - for a square tensor as long as the batch that has one row per sample: `cushion.split_batch.rows("targets")`.
    """

    def __init__(
        self,
        dim: int = 0,
        *,
        by_sample: bool = False,
        whole: frozenset[str] = frozenset(),
        rows: frozenset[str] = frozenset(),
    ) -> None:
        if dim < 0:
            raise ValueError(f"a batch cannot be split along dimension {dim}: count from the first, which is 0")
        self.dim = dim
        self._by_sample, self._whole, self._rows = by_sample, whole, rows

    def along(self, dim: int) -> SplitBatch:
        """Returns the same split along another dimension."""
        return SplitBatch(dim, by_sample=self._by_sample, whole=self._whole, rows=self._rows)

    @property
    def samples(self) -> SplitBatch:
        """The same split for lists of samples: a list is split between its elements, and its length is the batch's."""
        return SplitBatch(self.dim, by_sample=True, whole=self._whole, rows=self._rows)

    def whole(self, *names: str) -> SplitBatch:
        """Returns the same split, where every part gets these arguments, or keys of a mapping, whole."""
        return SplitBatch(self.dim, by_sample=self._by_sample, whole=self._whole | {*names}, rows=self._rows)

    def rows(self, *names: str) -> SplitBatch:
        """Returns the same split, where these arguments, or keys of a mapping, have one row for each sample."""
        return SplitBatch(self.dim, by_sample=self._by_sample, whole=self._whole, rows=self._rows | {*names})

    def named(self, names: Sequence[str]) -> Callable[..., list[Arguments]]:
        """Returns the same split for a function whose positional parameters have these names. `whole` and `rows` refer
        to them."""
        return lambda parts, *args, **kwargs: self._split(parts, args, kwargs, names)

    def __call__(self, parts: int, /, *args: Any, **kwargs: Any) -> list[Arguments]:
        """Returns the arguments of `parts` parts, or of one part per row if there are fewer rows."""
        return self._split(parts, args, kwargs, ())

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ()) -> None:
        """Raises CannotSplit if these arguments can never be split. Called at the first call, before any shortage."""
        length = self.length(args, kwargs, names)
        if length > 1:
            self._cut_all(args, kwargs, names, length, slice(0, 1))

    def _split(
        self, parts: int, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]
    ) -> list[Arguments]:
        length = self.length(args, kwargs, names)
        parts = min(parts, length)
        cuts = [slice(length * part // parts, length * (part + 1) // parts) for part in range(parts)]
        return [self._cut_all(args, kwargs, names, length, rows) for rows in cuts]

    def length(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ()) -> int:
        """Returns how many samples these arguments hold."""
        for name, value in _named(args, kwargs, names):
            if name != "self" and name not in self._whole:
                found = self._length_of(value)
                if found is not None:
                    return found
        if self._by_sample:
            raise CannotSplit("no argument is a list of samples")
        raise CannotSplit(f"no argument is a tensor with a dimension {self.dim}")

    def _length_of(self, value: Any) -> int | None:
        if self._by_sample and isinstance(value, list):
            return len(value)
        if _is_tensor(value):
            return int(value.shape[self.dim]) if not self._by_sample and len(value.shape) > self.dim else None
        items: Any = ()
        if isinstance(value, (tuple, list)):
            items = value
        elif isinstance(value, Mapping):
            items = (inner for key, inner in value.items() if key not in self._whole)
        elif _is_dataclass(value):
            items = (getattr(value, it.name) for it in dataclasses.fields(value) if it.name not in self._whole)
        return next((found for found in map(self._length_of, items) if found is not None), None)

    def _cut_all(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str], length: int, rows: slice
    ) -> Arguments:
        cut = _Cut(self, length, rows)
        values = [cut.value(name, value) for name, value in _named(args, kwargs, names)]
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :]))


class _Cut:
    """Makes the arguments of one part. The first tensor gives the length of the batch, so it is always split."""

    def __init__(self, split: SplitBatch, length: int, rows: slice) -> None:
        self._split, self._length, self._rows_of_part = split, length, rows
        self._first: tuple[int, ...] | None = None

    def value(self, name: str, value: Any) -> Any:
        split = self._split
        if name == "self" or name in split._whole:
            return value
        if _is_tensor(value):
            return self._tensor(name, value)
        if isinstance(value, list) and split._by_sample:
            return value[self._rows_of_part] if len(value) == self._length else value
        if isinstance(value, (tuple, list)):
            self._check_several(name, value)
            cut = [self.value(name, inner) for inner in value]
            named = getattr(type(value), "_make", None)
            return named(cut) if named is not None else type(value)(cut)
        if isinstance(value, Mapping):
            return _like(value, {key: self.value(str(key), inner) for key, inner in value.items()})
        if _is_dataclass(value):
            fields = [it.name for it in dataclasses.fields(value) if it.init]
            return dataclasses.replace(value, **{field: self.value(field, getattr(value, field)) for field in fields})
        return value

    def _tensor(self, name: str, value: Any) -> Any:
        dim = self._split.dim
        if len(value.shape) <= dim or value.shape[dim] != self._length:
            return value
        shape = tuple(value.shape)
        if self._first is None:
            self._first = shape
        elif self._may_be_a_mask(name, shape):
            what = f"`{name}`" if name else "an argument"
            hint = name or "NAME"
            raise CannotSplit(
                f"{what} has the shape {shape}, which can be {self._length} rows of the batch or a square "
                f'that every part needs whole: write split=cushion.split_batch.rows("{hint}") or .whole("{hint}")'
            )
        return value[(slice(None),) * dim + (self._rows_of_part,)]

    def _may_be_a_mask(self, name: str, shape: tuple[int, ...]) -> bool:
        """Returns whether a tensor is a square as long as the batch: its rows, or a mask over as many positions."""
        square = len(shape) == 2 and shape[0] == shape[1] > 1
        looks_like_the_batch = shape == self._first and "mask" not in name
        return square and not looks_like_the_batch and name not in self._split._rows

    def _check_several(self, name: str, value: tuple[Any, ...] | list[Any]) -> None:
        """Raises CannotSplit if a list or tuple may hold samples. A list holds samples, or the tensors of one batch as
        PyTorch's DataLoader returns them. A tuple holds the tensors of one batch, unless they look like images of
        several sizes."""
        if type(value).__name__ == "PackedSequence":
            raise CannotSplit(
                "the rows of a PackedSequence are not those of a batch: write your own function for split="
            )
        if len(value) < 2 or hasattr(value, "_make") or name in self._split._rows:
            return
        shapes = [tuple(tensor.shape) for tensor in value if _is_tensor(tensor)]
        only_tensors = len(shapes) == len(value)
        images = only_tensors and all(len(shape) == 3 and shape[0] in _CHANNELS for shape in shapes)
        if isinstance(value, tuple):
            if images and len(set(shapes)) > 1:
                self._refuse_several(name, f"a tuple of {len(shapes)} tensors, the first of shape {shapes[0]},")
            return
        if _are_samples(value):
            self._refuse_several(name, f"a list of {len(value)} values of type {type(value[0]).__name__}")
        lengths = {shape[self._split.dim] for shape in shapes if len(shape) > self._split.dim}
        if images or (only_tensors and lengths != {self._length}):
            self._refuse_several(name, f"a list of {len(shapes)} tensors, the first of shape {shapes[0]},")

    def _refuse_several(self, name: str, what: str) -> NoReturn:
        otherwise = f'.rows("{name}")' if name else "give the tensors as separate arguments"
        raise CannotSplit(
            f"{what} can be a batch of samples or the tensors of one batch: write split=cushion.split_batch.samples "
            f"and give a list for samples, or {otherwise} for the tensors of one batch"
        )


def _are_samples(values: list[Any]) -> bool:
    """Returns whether the values have the same form, each with tensors inside: each value is then a sample. A list of
    lists does not count, since PyTorch's DataLoader makes those from the tensors of one batch."""
    first = values[0]
    if not any(True for _ in tensors(first)) or _is_tensor(first):
        return False
    if isinstance(first, Mapping):
        return all(isinstance(it, Mapping) and it.keys() == first.keys() for it in values)
    if type(first) is tuple:
        return all(type(it) is tuple and len(it) == len(first) for it in values)
    return _is_dataclass(first) and all(type(it) is type(first) for it in values)


split_batch = SplitBatch()


def size(arguments: Arguments) -> int:
    """Returns the size of a part: the number of elements of all its tensors."""
    return sum(math.prod(tensor.shape) for tensor in tensors(arguments))


def rows(arguments: Arguments) -> int:
    """Returns how many samples a part has that the program's own `split` made: the length of its first tensor, or of
    its first list if there are no tensors."""
    for tensor in tensors(arguments):
        if len(tensor.shape) > 0:
            return int(tensor.shape[0])
    for value in (*arguments[0], *arguments[1].values()):
        if isinstance(value, Sequence) and not isinstance(value, str):
            return len(value)
    raise CannotSplit('the parts have no tensors whose rows can be counted: give weight=, or loss="sum"')


def tensors(value: Any) -> Iterator[Any]:
    if _is_tensor(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors(inner)
    elif _is_dataclass(value):
        for it in dataclasses.fields(value):
            yield from tensors(getattr(value, it.name))


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "__getitem__")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for at, value in enumerate(args):
        yield (names[at] if at < len(names) else ""), value
    yield from kwargs.items()


def _like(mapping: Mapping[Any, Any], cut: dict[Any, Any]) -> Mapping[Any, Any]:
    """Returns a mapping of the same type with other values."""
    if isinstance(mapping, MutableMapping):
        same = copy.copy(mapping)
        for key, value in cut.items():
            # Not update(): the mappings that Hugging Face models return raise in it.
            same[key] = value
        return same
    try:
        made: Mapping[Any, Any] = type(mapping)(cut)  # type: ignore[call-arg]
    except TypeError as error:
        raise CannotSplit(f"a {type(mapping).__name__} cannot be made from a dict, so it cannot be split") from error
    return made
