"""Traffic classes: what a message carries, and so what may overtake it."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar, final

from torch_resilient import _native

# In order of priority: as in csrc/base/traffic_class.h.
# Paper: SMART §3.1, the application's tag of each message.
CLASSES = ("activation", "activation_gradient", "gradient", "bulk")

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Previous(threading.local):
    """The values to restore, per thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[int] = []


_previous = _Previous()


@final
class traffic_class:
    """Puts the operations that this thread issues into one traffic class.

    A context manager and a decorator::

        with traffic_class("bulk"):
            dist.broadcast(checkpoint, src=0)

    `name` is one of "activation", "activation_gradient", "gradient" and "bulk": what comes
    first in this list goes first on the network. Without it, point-to-point messages are
    activations and collectives are gradients. It holds for operations issued by the calling
    thread, within the block, on any group of this backend; the innermost block counts. Hooks
    that run in autograd's threads are not in the block: put it inside the hook.

    Raises ValueError for another name; ImportError if the backend has not been built.
    """

    __slots__ = ("_index", "name")

    def __init__(self, name: str) -> None:
        if name not in CLASSES:
            raise ValueError(f"traffic class {name!r}: expected one of {', '.join(CLASSES)}")
        self.name = name
        self._index = CLASSES.index(name)

    def __enter__(self) -> traffic_class:
        _previous.stack.append(_native.load().set_traffic_class(self._index))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _native.load().set_traffic_class(_previous.stack.pop())

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorates `function`: its calls run in this class.

        Raises TypeError for coroutine and generator functions, because their bodies would run
        outside of the block.
        """
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(
                f"traffic_class cannot decorate {function.__qualname__}, a coroutine or "
                "generator function: use `with traffic_class(...)` inside of it"
            )

        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return wrapper

    def __repr__(self) -> str:
        return f"traffic_class({self.name!r})"
