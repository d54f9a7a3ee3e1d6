"""Object storage that does not answer: one kind of error for whatever its clients raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.base.errors import CheckpointError

T = TypeVar("T")
ANSWERS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError)  # of a server that can be reached


class Unreachable(CheckpointError, OSError):
    """Object storage that does not answer, or refuses. This says nothing about what is stored there."""

    kind = "checkpoint error: "

    def __init__(self, path: Any, error: BaseException):
        super().__init__(f"{path}: object storage does not answer or refuses: {type(error).__name__}: {error}")


def ask(path: Any, work: Callable[[], T]) -> T:
    """The result of `work`. Unreachable for whatever a client of object storage raises: no connection, no permission, a
    time-out."""
    try:
        return work()
    except (Unreachable, *ANSWERS):
        raise
    except Exception as error:  # each client has kinds of its own
        raise Unreachable(path, error) from error
