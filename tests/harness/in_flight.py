"""Whether anything touches a collective that is in flight: reads or writes what it gives, or writes what it sends,
before it was waited for. On a GPU each would be a race between streams, seldom seen; on a CPU gloo hides it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.comm import axis

RECEIVED = {"_reduce_scatter_base_": 0, "_allgather_base_": 0, "alltoall_base_": 0, "allreduce_": 0, "broadcast_": 0}
SENT = {"_reduce_scatter_base_": 1, "_allgather_base_": 1, "alltoall_base_": 1}
"""Numbers of the arguments of torch's ops (c10d) that hold what is received, and what is sent."""


class InFlight(TorchDispatchMode):
    """found   what was touched too early, a line each
    waited   how many collectives were waited for
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.waited = 0
        self._posted: dict[int, tuple[str, set[int], set[int]]] = {}  # by handle: what may not be touched, or written
        self._last: tuple[str, set[int], set[int]] | None = None

    @property
    def unwaited(self) -> list[str]:
        """Collectives that nobody has waited for. In a CUDA graph they would be an error at the end of the capture."""
        return [name for name, _, _ in self._posted.values()]

    @contextmanager
    def watching(self) -> Iterator[InFlight]:
        """Inside, what this rank computes and exchanges is watched."""
        init, wait, mode = axis.Work.__init__, axis.Work.wait, self

        def noted(work: axis.Work, result: Any, handle: Any = None, *more: Any, **named: Any) -> None:
            init(work, result, handle, *more, **named)
            if handle is not None and mode._last is not None:
                name, received, sent = mode._last
                mode._posted[id(work)] = name, received | storages(result), sent
            mode._last = None

        def over(work: axis.Work) -> torch.Tensor:
            mode.waited += mode._posted.pop(id(work), None) is not None
            return wait(work)

        with mock.patch.object(axis.Work, "__init__", noted), mock.patch.object(axis.Work, "wait", over), self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if func.namespace == "c10d":
            received, sent = (args[where[name]] if name in where else () for where in (RECEIVED, SENT))
            self._last = name, storages(received), storages(sent)
        elif not is_view(func) and self._posted:
            self._check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        schema = func._schema.arguments
        named = {argument.name: value for argument, value in zip(schema, args)} | kwargs
        written = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write}
        for what, received, sent in self._posted.values():
            for argument, value in named.items():
                touched = storages(value)
                if touched & received or (argument in written and touched & sent):
                    self.found.append(f"{func} touches what {what} has in flight")


def storages(values: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.numel()}


def is_view(func: Any) -> bool:
    """Whether an operation only says where a tensor lies."""
    given = [r.alias_info for r in func._schema.returns]
    return func._schema.name in ("aten::empty", "aten::set_") or any(
        alias is not None and not alias.is_write for alias in given
    )
