"""A format for the state of a training that cannot run code when it is read, unlike pickle.

A state is taken apart into tensors, which travel as raw bytes, and a description in JSON of what is
around them. It may consist of dicts, OrderedDicts, lists, tuples, sets, str, bytes, numbers, None,
tensors, numpy arrays and numbers, and torch's dtypes, devices and sizes. Objects of other classes,
also of subclasses of these, are refused by the sender.

Each value is itself in JSON if it is None, a bool, an int, a float or a str, and otherwise a list:
a letter, then its content.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class TensorPart:
    """A tensor that follows the description."""

    device_type: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def take_apart(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """(the description, the tensors). A tensor that stands in several places goes once.

    Raises TypeError, with the place in `state`, for what the format does not have; ValueError if a
    container contains itself.
    """
    writer = _Writer()
    value = writer.encode(state, "state")
    kinds = [[each.device.type, _name_of(each.dtype), list(each.shape)] for each in writer.tensors]
    return json.dumps([kinds, value], separators=(",", ":")).encode(), writer.tensors


class Parts:
    """A description that has been received.

    Attributes:
        tensors: what `put_together` expects.

    Raises ValueError if `description` is none.
    """

    def __init__(self, description: bytes) -> None:
        try:
            kinds, self._value = json.loads(description)
            self.tensors = [
                TensorPart(str(device), _dtype_named(dtype), _shape(shape))
                for device, dtype, shape in kinds
            ]
        except (RecursionError, TypeError, ValueError) as error:
            raise _no_state(error) from None

    def put_together(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The state that was taken apart. Raises ValueError if the description has none."""
        try:
            return _decode(self._value, tensors)
        except (
            AttributeError,
            IndexError,
            KeyError,
            RecursionError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise _no_state(error) from None


def _no_state(error: Exception) -> ValueError:
    return ValueError(f"what was received does not describe a state: {error!r}")


class _Writer:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        # With the object, so that no other one gets its id meanwhile.
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._open: set[int] = set()

    def encode(self, value: Any, place: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            return ["T", self._number(value, _checked(value, place))]
        if kind in _CONTAINERS:
            if id(value) in self._open:
                raise ValueError(f"{place} contains itself")
            self._open.add(id(value))
            tag, items = _CONTAINERS[kind]
            coded = [tag, *(self._items(items(value), place))]
            self._open.remove(id(value))
            return coded
        if kind is bytes:
            return ["b", value.hex()]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind is np.ndarray and value.dtype.kind in _NUMPY_KINDS:
            return ["A", self._array(value), value.dtype.str, list(value.shape)]
        if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
            return ["N", value.dtype.str, value.tobytes().hex()]
        if kind is torch.dtype:
            return ["K", _name_of(value)]
        if kind is torch.device:
            return ["D", str(value)]
        if kind is torch.Size:
            return ["Z", *value]
        raise TypeError(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be moved: put "
            "tensors and plain containers in its place, such as its state_dict()"
        )

    def _items(self, items: Iterable[tuple[str, Any]], place: str) -> list[Any]:
        return [self.encode(item, place + where) for where, item in items]

    def _number(self, key: Any, tensor: torch.Tensor) -> int:
        if id(key) not in self._numbers:
            self._numbers[id(key)] = (len(self.tensors), key)
            self.tensors.append(tensor)
        return self._numbers[id(key)][0]

    def _array(self, array: np.ndarray[Any, Any]) -> int:
        if id(array) in self._numbers:
            return self._numbers[id(array)][0]
        # A copy: torch wants memory that can be written to. Bytes: not every dtype of numpy is
        # one of torch.
        content = bytearray(array.tobytes())
        plain = torch.frombuffer(content, dtype=torch.uint8) if content else _NO_BYTES
        return self._number(array, plain)


# Without those that have a pointer or fields in them.
_NUMPY_KINDS = "biufcSUmM"
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


def _pairs(items: Any) -> Iterable[tuple[str, Any]]:
    for key, value in items.items():
        yield f" (the key {key!r})", key
        yield f"[{key!r}]", value


def _elements(items: Any) -> Iterable[tuple[str, Any]]:
    return ((f"[{number}]", item) for number, item in enumerate(items))


_CONTAINERS: dict[type, tuple[str, Callable[[Any], Iterable[tuple[str, Any]]]]] = {
    dict: ("d", _pairs),
    collections.OrderedDict: ("o", _pairs),
    list: ("l", _elements),
    tuple: ("t", _elements),
    set: ("s", _elements),
    frozenset: ("f", _elements),
}


def _checked(tensor: torch.Tensor, place: str) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise TypeError(f"{place}: a tensor of the type {type(tensor).__name__} cannot be moved")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(
            f"{place}: a tensor that is sparse, quantized or without data: {tensor.layout}"
        )
    return tensor.detach()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype of torch: {name!r}")
    return dtype


def _shape(sizes: Any) -> tuple[int, ...]:
    shape = tuple(sizes)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"no shape: {shape}")
    return shape


def _decode(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("an object of JSON")
        return value
    tag, *content = value
    return _READERS[tag](content, tensors)


def _all(content: list[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [_decode(each, tensors) for each in content]


def _mapping(content: list[Any], tensors: Sequence[torch.Tensor]) -> list[tuple[Any, Any]]:
    items = _all(content, tensors)
    return list(zip(items[::2], items[1::2], strict=True))


def _read_array(content: list[Any], tensors: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
    number, dtype, shape = content
    flat = tensors[number].cpu().numpy()
    array: np.ndarray[Any, Any] = flat.view(_numpy_dtype(dtype)).reshape(_shape(shape))
    return array


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"no dtype of a plain array: {name!r}")
    return dtype


def _read_number(content: list[Any], _tensors: Sequence[torch.Tensor]) -> Any:
    dtype, digits = content
    (number,) = np.frombuffer(bytes.fromhex(digits), _numpy_dtype(dtype))
    return number


_READERS: dict[str, Callable[[list[Any], Sequence[torch.Tensor]], Any]] = {
    "T": lambda content, tensors: tensors[content[0]],
    "d": lambda content, tensors: dict(_mapping(content, tensors)),
    "o": lambda content, tensors: collections.OrderedDict(_mapping(content, tensors)),
    "l": _all,
    "t": lambda content, tensors: tuple(_all(content, tensors)),
    "s": lambda content, tensors: set(_all(content, tensors)),
    "f": lambda content, tensors: frozenset(_all(content, tensors)),
    "b": lambda content, _: bytes.fromhex(content[0]),
    "c": lambda content, _: complex(content[0], content[1]),
    "A": _read_array,
    "N": _read_number,
    "K": lambda content, _: _dtype_named(content[0]),
    "D": lambda content, _: torch.device(content[0]),
    "Z": lambda content, _: torch.Size(_shape(content)),
}
