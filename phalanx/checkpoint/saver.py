"""Saver: the saves of one run, immediately or in the background from a copy in host memory; never two at a time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.free_memory import host_memory
from phalanx.checkpoint.agree import agree
from phalanx.checkpoint.gather import File
from phalanx.checkpoint.host import HostCopies
from phalanx.checkpoint.save import (
    SAVE_FILE_BYTES,
    Content,
    Saved,
    Snapshot,
    Target,
    TrainingState,
    collect,
    copied,
    weights_copied,
    write,
)
from phalanx.comm.axis import Axis

LOOK_S = 0.2
SPARE = 0.8  # fraction of a host's free memory that copies may take


@dataclass(frozen=True)
class SaveOutcome:
    """A completed save: what was saved, seconds that the run waited for it, and seconds from beginning to end."""

    saved: Saved
    waited_s: float
    took_s: float


class Saver:
    """`start` begins a save and, in the background, returns once the copy is under way; `finished` and `wait` return
    the outcome. `release` must be called before anything that is being saved changes.

    axis        for agreements between ranks while they write (comm.host); one thread uses it at a time
    background  write in a thread. If host memory has no room for the copies, the run waits for saves all the same;
                `why_not` says so

    A save that failed raises CheckpointError from `finished`, `wait` or the next `start`, on every rank. A process that
    ends during a save leaves a temporary folder and no checkpoint.
    """

    def __init__(
        self,
        state: TrainingState,
        target: Target,
        axis: Axis,
        *,
        background: bool = False,
        max_file_bytes: int = SAVE_FILE_BYTES,
        more: Mapping[str, Tensor] | None = None,
    ):
        self._collect = lambda snapshot: collect(snapshot, state, max_file_bytes, more, self._files)
        self._files: list[File] = []  # the same in every save
        self.target, self.axis, self.background, self.why_not = target, axis, background, ""
        self._host, self._device = HostCopies(state.mesh.device), state.mesh.device
        self._asked_for_room = self._took_room = False
        self._under_way: _Thread | None = None
        # called regularly while waiting for a save; raises if waiting has become pointless
        self.look: Callable[[], None] = lambda: None

    def prepare(self, snapshot: Snapshot) -> None:
        """Make room for the copies of saves like this one, in a thread, so that the first save does not wait for it.
        Called by all ranks together; saves nothing."""
        if self.background:
            content = self._collect(snapshot)
            self._files = content.files
            self._ask_for_room(content)
        if self.background:
            self._host.prepare(content.room)

    def start(self, snapshot: Snapshot) -> SaveOutcome | None:
        """Save this step. Called by all ranks together. Returns the outcome, unless the save continues in the
        background. A save still in progress is waited for first."""
        began = time.monotonic()
        self.wait()
        content = self._collect(snapshot)
        self._files = content.files
        if self.background and not self._asked_for_room:
            self._ask_for_room(content)
        if self.background and not self._took_room:
            self._take_room(content)
        if not self.background:
            outcome = _Thread(lambda: self._write_at_once(content), began).result(self.look)
            return replace(outcome, waited_s=outcome.took_s)
        content = weights_copied(content, self._host)
        self._under_way = _Thread(lambda: self._copy_and_write(content, began), began)
        return None

    def _write_at_once(self, content: Content) -> Saved:
        """Also in a thread, so that the run can check meanwhile whether the other ranks are alive."""
        self._set_device()
        return write(content, self.target, self.axis)

    def _copy_and_write(self, content: Content, began: float) -> Saved:
        """Weights that ranks gather together have been copied; the rest is a rank's own."""
        self._set_device()
        copy = copied(content, self._host)
        self._host.wait()
        copied_at = time.monotonic()
        return replace(write(copy, self.target, self.axis), copy_s=copied_at - began)

    def _set_device(self) -> None:
        """Each thread has its own."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def release(self) -> None:
        """Called before an update: what the update does on the device runs after the copies of a save in progress."""
        self._host.release()

    def finished(self) -> SaveOutcome | None:
        """The outcome of a save in the background, once, when it is complete; does not wait."""
        return None if self._under_way is None or not self._under_way.over else self.wait()

    def wait(self) -> SaveOutcome | None:
        """Wait for the save in the background; returns its outcome, or None if there is none."""
        thread, self._under_way = self._under_way, None
        return thread.result(self.look) if thread is not None else None

    def _ask_for_room(self, content: Content) -> None:
        """Check whether every host has memory for its ranks' copies. All ranks decide alike."""
        self._asked_for_room = True
        reports = agree(self.axis, lambda: (socket.gethostname(), content.needed, host_memory()))
        for host in {name for name, _, _ in reports}:
            needed = sum(bytes_ for name, bytes_, _ in reports if name == host)
            free = next(free for name, _, free in reports if name == host)
            if free is not None and needed > SPARE * free:
                self.background = False
                self.why_not = (
                    f"copies of {needed} bytes do not fit into {SPARE:.0%} of the {free} bytes of "
                    f"memory that are free on {host}"
                )

    def _take_room(self, content: Content) -> None:
        """What is free may be less than what a process may have: its limits count too. All ranks decide alike."""
        self._took_room = True
        lacking = agree(self.axis, lambda: (socket.gethostname(), self._host.lacks(content.room)))
        for host, why in lacking:
            if why:
                self.background = False
                self.why_not = f"memory for copies cannot be had on {host}: {why}"
        if not self.background:
            self._host = HostCopies(self._device)  # gives back what some ranks have


class _Thread:
    """Work in a separate thread: whether it is done, and its result or error."""

    def __init__(self, work: Callable[[], Saved], began: float):
        self._work, self._began, self._waited_s = work, began, time.monotonic() - began
        self._error: BaseException | None = None
        self._outcome: SaveOutcome | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="save-checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            saved = self._work()
            self._outcome = SaveOutcome(saved, self._waited_s, time.monotonic() - self._began)
        except BaseException as error:
            self._error = error

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def result(self, look: Callable[[], None]) -> SaveOutcome:
        while not self.over:
            self._thread.join(LOOK_S)
            look()
        if self._error is not None:
            raise self._error
        return self._outcome  # type: ignore[return-value]
