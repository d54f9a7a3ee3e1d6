"""Free space: in the run's folder for its checkpoints, and of shared memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from phalanx.base.dtypes import precision
from phalanx.base.sizes import size_text
from phalanx.config.run import Run
from phalanx.planning.blocks import facts_of
from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView

MASTER, MOMENTS = 4, 8  # bytes of a parameter in a checkpoint's state: the fp32 master, and AdamW's two moments
SHARED_MEMORY = Path("/dev/shm")
SHARED_EACH = 48 * 2**20  # bytes for each rank of the node: NCCL's buffers to its neighbours, or ours


class Space(NodeCheck):
    """A checkpoint must fit beside the one that it replaces; more is wanted for all that checkpoint.keep_last keeps."""

    name = "space"
    brief = True

    def look(self, view: NodeView, order: Any) -> dict[str, Any]:
        """Bytes free and needed."""
        found: dict[str, Any] = {"gpus": torch.cuda.device_count()}
        if SHARED_MEMORY.is_dir():
            found["shared"] = shutil.disk_usage(SHARED_MEMORY).free
        if view.run is not None and view.folder is not None:
            place = existing(view.folder)
            found |= {"folder": str(view.folder), "free": shutil.disk_usage(place).free}
            found |= {"files": free_files(place), "kept": view.run.checkpoint.keep_last}
            found["least"], found["checkpoint"] = checkpoint_bytes(view.run)
        return found

    def judge(self, looks: Looks) -> list[Finding]:
        found = []
        for node, said in looks.of(0).items():
            found += [
                Finding(self.name, (node,), text, severity)  # type: ignore[arg-type]
                for severity, text in (*disk(said), *shared(said))
            ]
        return found


def disk(said: dict[str, Any]) -> list[tuple[str, str]]:
    """(severity, text) of what is wrong with the folder's file system."""
    if "free" not in said:
        return []
    least, each, free, folder = said["least"], said["checkpoint"], said["free"], said["folder"]
    if free < least or free == 0:
        return [("bad", f"{size_text(free)} free for {folder}, but a checkpoint takes {size_text(least)} or more")]
    if said["files"] == 0:
        return [("bad", f"no file can be created in the file system of {folder}: it has no inodes left")]
    if free < each * (said["kept"] + 1):
        wanted = f"checkpoint.keep_last={said['kept']} and a new one take {size_text(each * (said['kept'] + 1))}"
        return [("warning", f"{size_text(free)} free for {folder}, but {wanted}")]
    return []


def shared(said: dict[str, Any]) -> list[tuple[str, str]]:
    """The same of shared memory, through which ranks of a node exchange tensors."""
    needed = SHARED_EACH * max(1, said["gpus"])
    if "shared" not in said or said["shared"] >= needed:
        return []
    text = f"{size_text(said['shared'])} free in {SHARED_MEMORY}, {size_text(needed)} needed (docker: --shm-size=8g)"
    return [("bad" if said["gpus"] else "warning", text)]


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def free_files(place: Path) -> int | None:
    """Files that may still be created; None where the file system has no such limit."""
    stat = os.statvfs(place)
    return stat.f_favail if stat.f_files else None


def checkpoint_bytes(run: Run) -> tuple[int, int]:
    """(least, with AdamW) bytes of a checkpoint: weights, masters and moments. With adapters it holds little more than
    these: 0."""
    if run.lora is not None:
        return 0, 0
    numel = sum(block.numel for block in facts_of(run))
    least = numel * (MASTER + precision(run.train.precision).compute.itemsize)
    return least, least + MOMENTS * numel
