"""A persistent pool of forked ranks: a distributed test is one call, and costs milliseconds instead of a spawn."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import multiprocessing as mp
import os
import socket
import struct
import sys
import tempfile
import threading
import traceback
from typing import Any

NEW_NETWORK = 0x40000000  # Linux' CLONE_NEWNET
SET_FLAGS, IS_UP = 0x8914, 1


class RanksFailed(Exception):
    """A rank raised, died or did not answer; the text holds each rank's traceback."""


def own_network() -> int | None:
    """A file that is a network with nothing but loopback, or None where only the superuser of Linux may make one.

    Ports stay taken for a minute after a connection: many pools in one network find none.
    """
    made: list[int] = []

    def make() -> None:
        if ctypes.CDLL(None).unshare(NEW_NETWORK) == 0:  # of this thread alone
            with socket.socket() as any_socket:
                fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", IS_UP))
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))

    if sys.platform == "linux":
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    return made[0] if made else None


def join_network(number: int) -> None:
    """Make the network of that file this process' own."""
    if ctypes.CDLL(None, use_errno=True).setns(number, NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot enter the network")


def free_port() -> int:
    [port] = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """Ports that no connection is given by the kernel (those are above 32768), no other process that runs tests looks
    at first, and no job of a SLURM of the tests meets at (15000 and its number)."""
    first = 10000 + os.getpid() * 16 % 20000
    found: list[int] = []
    with contextlib.ExitStack() as opened:
        for port in [*range(first, first + 16), *range(10000, 30000)]:
            if port in range(15000, 15200):
                continue
            with contextlib.suppress(OSError):
                opened.enter_context(socket.create_server(("localhost", port)))
                found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError("too few ports are free")


def _serve(pipe: Any, rank: int, network: int | None) -> None:
    import torch

    if network is not None:
        join_network(network)
    torch.set_num_threads(1)  # must be the first torch call after the fork: an inherited thread pool would hang
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # connect where something is sent: a third of the time
    while True:
        job = pipe.recv()
        if job is None:
            return
        world, store, target, args, timeout = job
        faulthandler.dump_traceback_later(
            timeout - 5, file=sys.__stderr__
        )  # where a rank that will not answer in time is
        try:
            pipe.send((True, _run(rank, world, store, target, args)))
            faulthandler.cancel_dump_traceback_later()
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            if world > 1:
                os._exit(1)  # the others may hang in a collective: the pool starts anew


def _run(rank: int, world: int, store: str, target: str, args: tuple) -> Any:
    import torch

    from phalanx.comm.mesh import init_world, leave_world

    module, name = target.split(":")
    init_world(rank, world, f"file://{store}", torch.device("cpu"), timeout_s=60.0)
    try:
        return getattr(importlib.import_module(module), name)(rank, world, *args)
    finally:
        leave_world()


class RankPool:
    """`run("tests.x:function", world, *args)` calls function(rank, world, *args) on `world` ranks with a gloo world,
    and returns all results."""

    def __init__(self) -> None:
        self.workers: list[tuple[Any, Any]] = []
        self.network = own_network()

    def _ensure(self, count: int) -> None:
        import torch

        if torch.Tensor.float is torch.Tensor.double:
            raise RuntimeError("ranks that are started within hf_fuzz.wide() would compute in float64 from then on")
        context = mp.get_context("fork")
        while len(self.workers) < count:
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, len(self.workers), self.network), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, mine))

    def run(self, target: str, world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        self._ensure(world)
        with tempfile.TemporaryDirectory() as folder:
            for _, pipe in self.workers[:world]:
                pipe.send((world, os.path.join(folder, "store"), target, args, timeout))
            return self._collect(world, timeout)

    def _collect(self, world: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {pipe: i for i, (_, pipe) in enumerate(self.workers[:world])}
        while waiting and not failures:
            ready = mp.connection.wait(list(waiting), timeout)
            if not ready:
                failures = {i: f"no answer in {timeout} s" for i in waiting.values()}
            for pipe in ready:
                i = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "died"
                (results if ok else failures)[i] = value
        if failures:
            self.close(kill=True)
            raise RanksFailed("\n".join(f"rank {i}: {text}" for i, text in sorted(failures.items())))
        return [results[i] for i in range(world)]

    def close(self, kill: bool = False) -> None:
        for process, pipe in self.workers:
            if kill:
                process.kill()
            else:
                pipe.send(None)
            process.join(10)
            pipe.close()
        self.workers = []


def warm_imports() -> None:
    """Import what ranks need before they are forked, and keep it out of their garbage collections, which would copy
    every page."""
    import torch._dynamo
    import torch.distributed  # noqa: F401

    import phalanx.engine.build
    import phalanx.engine.step  # noqa: F401

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 3000))
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()
