"""Triton's interpreter, with its language made ready once.

The interpreter replaces what kernels call (`tl.load`, `tl.sum`, ...) by functions of numpy at each launch, and again
at each call of a helper inside one, looking through all of triton.language each time: most of the time of a small
kernel. What it puts there depends on no kernel. One fault of Triton 3.9's interpreter is mended too.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any


class Language:
    """Stands in for the interpreter's `_patch_lang`: finds the changes at the first launch, makes them at each, and
    none inside one."""

    def __init__(self, patch: Any, language: Any) -> None:
        self._patch, self._language = patch, language
        self._changes: list[tuple[Any, str, Any, Any]] | None = (
            None  # (of what, name, as it was or None, as it is interpreted)
        )
        self._open = False

    def __call__(self, kernel: Any) -> Language | None:
        if self._open:
            return None  # a helper's: nobody takes it back
        if self._changes is None:
            self._changes = self._found()
        for of, name, _, new in self._changes:
            setattr(of, name, new)
        self._open = True
        return self

    def restore(self) -> None:
        """What the launch does when it is over."""
        for of, name, old, _ in self._changes or ():
            delattr(of, name) if old is None else setattr(of, name, old)
        self._open = False

    def _found(self) -> list[tuple[Any, str, Any, Any]]:
        """Makes the changes, and tells them. (Taken back by the interpreter's own means, what a class inherits would
        be its own.)"""
        tl, scope_class = self._language, self._patch.__globals__["_LangPatchScope"]
        before: dict[tuple[int, str], tuple[Any, Any]] = {}

        class Scope(scope_class):
            def set_attr(self, of: Any, name: str, value: Any) -> None:
                before.setdefault((id(of), name), (of, vars(of).get(name)))
                setattr(of, name, value)

        self._patch.__globals__["_LangPatchScope"] = Scope
        try:
            self._patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        finally:
            self._patch.__globals__["_LangPatchScope"] = scope_class
        return [(of, name, old, vars(of)[name]) for (_, name), (of, old) in before.items()]


def with_memory(types: Any, tuples: Any) -> tuple[Any, Any]:
    """The interpreter's `_get_np_dtype`, which makes a table of all dtypes at each call, and the language's
    `_type_for_tuple_values`, which shapes ask for: the same, of what was asked before from memory."""
    from triton.language.core import block_type, pointer_type

    of_scalar, of_numbers = cache(types), cache(tuples)

    def dtype_of(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, block_type) else dtype
        return types(scalar) if isinstance(scalar, pointer_type) else of_scalar(scalar)

    def type_of(values: Any, fields: Any = None) -> Any:
        return (
            of_numbers(tuple(values))
            if fields is None and all(type(v) is int for v in values)
            else tuples(values, fields)
        )

    return dtype_of, type_of


def with_bits(binary_op: Any, handle: Any, bit: Any) -> Any:
    """The interpreter's `binary_op`, whose comparisons are of type int1. (Triton 3.9 gives them that of what is
    compared: a comparison of two numbers becomes int32 when it is joined with one of tensors, which no load and no
    store takes as a mask.)"""

    def op(self: Any, lhs: Any, rhs: Any, numpys: Any) -> Any:
        made = binary_op(self, lhs, rhs, numpys)
        return handle(made.data, bit) if made.data.dtype == bool else made

    return op


def make_ready_once() -> None:
    """For this process' interpreter, if there is Triton."""
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:  # not on Linux
        return
    if not isinstance(interpreter._patch_lang, Language):
        interpreter._patch_lang = Language(interpreter._patch_lang, language)
        builder = interpreter.InterpreterBuilder
        builder.binary_op = with_bits(builder.binary_op, interpreter.TensorHandle, language.int1)
        core = language.core
        interpreter._get_np_dtype, core._type_for_tuple_values = with_memory(
            interpreter._get_np_dtype, core._type_for_tuple_values
        )
