"""A process for which flock, or another system call, does not work: the kernel answers it with an error, as on a file
system that lacks it."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable

# numbers of system calls; "rename" is what Python's os.rename and os.replace make of it
CALLS = {
    "flock": {"x86_64": 73, "aarch64": 32},
    "fsync": {"x86_64": 74, "aarch64": 82},
    "rename": {"x86_64": 82, "aarch64": 38},
}
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2  # of prctl
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # of the kernel's packet filters
ALLOW, ANSWER = 0x7FFF0000, 0x00050000


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def without_flock(number: int = errno.ENOLCK) -> None:
    """From now on flock fails in this process, and in those it starts, with this error."""
    refuse("flock", number)


def refuse(name: str, number: int) -> None:
    """The same of a system call. 0: it does nothing, and says that it did."""
    call = CALLS[name][platform.machine()]
    steps = [(LOAD, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, call), (RETURN, 0, 0, ANSWER | number), (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SECCOMP, FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*words):
            raise OSError(ctypes.get_errno(), "prctl")


def forked(work: Callable[[], object], number: int = errno.ENOLCK) -> int:
    """The process that does `work` without flock: 0 if it did, 1 with a traceback if not."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        without_flock(number)
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def status(child: int) -> int:
    """Waits for the process."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
