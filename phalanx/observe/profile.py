"""Recording real steps: a Chrome/Perfetto trace with readable names. `observe/step_budget.py` reads from it where the
time goes.

Names are added while a recording runs and removed afterwards, so steps that are not recorded pay nothing for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from phalanx.comm.axis import Axis
from phalanx.engine.build import State
from phalanx.schedule.actions import Instruction

STEP, COMM, BLOCK = "step ", "comm ", "block "  # prefixes in the names of steps, communication and blocks
INSTRUCTIONS = (
    "forward",
    "backward",
    "inputgrad",
    "weightgrad",
    "recv",
    "wait",
    "send",
    "gather",
    "reduce",
    "open",
    "close",
)
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into",
    "all_gather_to",
    "reduce_scatter",
    "reduce_scatter_within",
    "broadcast",
    "send",
    "recv",
    "gather",
    "scatter",
)


class Recording:
    """A trace of the steps between `start` and `stop`, written to `path` (.json, or .json.gz). One at a time in a
    process."""

    def __init__(self, state: State, path: str | Path):
        self.state, self.path = state, Path(path)
        self._names = ExitStack()
        self._profiler: torch.profiler.profile | None = None

    def start(self) -> None:
        """Waits for the device first, so that nothing from an earlier step is in the trace."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.state.mesh.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._wait()
        self._names.enter_context(named(self.state))
        with warnings.catch_warnings(
            action="ignore"
        ):  # torch 2.11 says that of several cycles the last is kept; here is one
            self._profiler.start()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step: it begins when the device is idle (otherwise work that the host queued before would count as
        this step's) and ends when the device has done its work. An error in it ends the recording too."""
        self._wait()
        try:
            with record_function(f"{STEP}{number}"):
                yield
                self._wait()
        except BaseException:
            self.abandon()
            raise

    def stop(self) -> None:
        """Write the file; does nothing if nothing is being recorded."""
        if self._profiler is None:
            return
        self._wait()
        profiler = self._profiler
        self.abandon()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.path))

    def abandon(self) -> None:
        """Stop without a file. A profiler that is left running makes the process crash at its end."""
        if self._profiler is not None:
            self._profiler.stop()
            self._names.close()
            self._profiler = None

    def _wait(self) -> None:
        if self.state.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.state.mesh.device)


@contextmanager
def named(state: State) -> Iterator[None]:
    """While inside, the trace shows instructions, blocks and communication (by axis) under their names."""
    with ExitStack() as undo:
        plain = state.model.handlers
        state.model.handlers = {kind: _named_handler(handler) for kind, handler in plain.items()}
        undo.callback(setattr, state.model, "handlers", plain)
        for (stage, segment), blocks in state.model.blocks.items():
            for number, block in zip(state.plan.segments[stage][segment], blocks):
                _name_block(block, f"{BLOCK}{number} {type(block).__name__}", undo)
        for axis in state.mesh.axes:
            if axis.size > 1:
                _name_axis(axis, undo)
        yield


def instruction_name(instruction: Instruction) -> str:
    """Such as "forward stage 0 segment 1 mb 3"."""
    values = (f"{f.name} {getattr(instruction, f.name)}" for f in fields(instruction))
    return " ".join([type(instruction).__name__.lower(), *values])


def axis_kind(axis_name: str) -> str:
    """The mesh axis of a communicator: edges between stages belong to the pipeline."""
    return "pp" if axis_name.startswith("edge") else axis_name.split()[0]


def _named_handler(handler: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(instruction: Instruction) -> None:
        with record_function(instruction_name(instruction)):
            handler(instruction)

    return run


def _name_block(block: nn.Module, name: str, undo: ExitStack) -> None:
    """Hooks that open and close a range around each call of the block (in backward too, where it is recomputed)."""
    open_ranges: list[record_function] = []

    def begin(module: nn.Module, args: Any) -> None:
        open_ranges.append(record_function(name).__enter__())

    def end(module: nn.Module, args: Any, result: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    undo.callback(block.register_forward_pre_hook(begin).remove)
    undo.callback(block.register_forward_hook(end, always_call=True).remove)


def _name_axis(axis: Axis, undo: ExitStack) -> None:
    for op in COLLECTIVES:
        setattr(axis, op, _named_collective(getattr(axis, op), f"{COMM}{axis_kind(axis.name)} {op}"))
        undo.callback(delattr, axis, op)


def _named_collective(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            result = call(*args, **kwargs)
        if hasattr(result, "wait"):  # Work, or parts that come one by one
            result.wait = _named_wait(result.wait, f"{name} wait")
        return result

    return run


def _named_wait(wait: Callable[[], Any], name: str) -> Callable[[], Any]:
    def run() -> Any:
        with record_function(name):
            return wait()

    return run
