"""The run's folder: one and the same on all nodes, writable, with rename, fsync and locks that really work."""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from pathlib import Path
from typing import Any

from phalanx.base.file_lock import HELD, NO_LOCKS
from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView

WRITE, READ, LOCK, RELEASED, CLEAN = "write", "read", "lock", "released", "clean"
ORDERS = (WRITE, READ, LOCK, RELEASED, CLEAN)
SEEN_S = 5.0  # a file of another node becomes visible in this time: caches of network file systems
POLL_S = 0.1
NO_KERNEL_LOCKS = "no kernel locks"


class Folder(NodeCheck):
    """Each node writes a file, renames it and syncs it; reads that of node 0; and tries the lock that node 0 holds,
    then again after its release. Nothing stays behind."""

    name = "folder"
    brief = True
    limit_s = 15.0

    def next_order(self, looks: Looks) -> Any:
        done = len(looks.answers)
        if done == len(ORDERS):
            return None
        if done == 0:
            return [WRITE, uuid.uuid4().hex[:12]]
        return [ORDERS[done], looks.answers[0][0][1]]

    def look(self, view: NodeView, order: Any) -> str | None:
        """What is wrong, "" if nothing is; None without a config."""
        what, token = order
        if view.folder is None:
            return None
        place = FolderPlace(view, token)
        return {
            WRITE: place.write,
            READ: place.read,
            LOCK: place.lock,
            RELEASED: place.released,
            CLEAN: place.clean,
        }[what]()

    def judge(self, looks: Looks) -> list[Finding]:
        """Each node's first trouble. If node 0 could not write, or all others miss its file, it is the odd one, and
        what the others say of its file and lock does not count."""
        orders = [looks.of(number) for number in range(len(looks.answers))]
        if not orders or not orders[0]:
            return []
        texts = {node: [said[node] for said in orders if node in said] for node in orders[0]}
        missing = [node for node, said in (orders[1] if len(orders) > 1 else {}).items() if said and node != 0]
        first = orders[0].get(0, "failed")
        all_miss = len(missing) > 1 and len(missing) == len(texts) - 1
        if all_miss or (first and not first.startswith(NO_KERNEL_LOCKS)):
            wrong = {node: said[:1] for node, said in texts.items()}
            if all_miss and not first:
                wrong[0] = ["its folder is not that of the others: none sees the file that it wrote"]
            texts = wrong
        found = []
        for node, said in texts.items():
            text = next((one for one in said if one), "")
            if text:
                severity = "warning" if text.startswith(NO_KERNEL_LOCKS) else "bad"
                found.append(Finding(self.name, (node,), text, severity))  # type: ignore[arg-type]
        return found


class FolderPlace:
    """This node's files in the run's folder: `base` is what node 0 writes and locks."""

    def __init__(self, view: NodeView, token: str):
        self._folder, self._token, self._view = view.folder or Path(), token, view
        self._base = self._folder / f".preflight-{token}"
        self._own = self._folder / f".preflight-{token}-{view.number}"

    def write(self) -> str:
        """Node 0 also takes the lock that the others will try."""
        made = missing_folders(self._folder)
        self._view.kept["folders made"] = made
        doing = "cannot be made"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            doing = "cannot be written to"
            with open(f"{self._own}.part", "w", encoding="ascii") as opened:
                opened.write(self._token)
                opened.flush()
                doing = "does not sync (fsync)"
                os.fsync(opened.fileno())
            doing = "does not rename"
            os.replace(f"{self._own}.part", self._own)
            doing = "loses what is renamed"
            if self._own.read_text(encoding="ascii") != self._token or Path(f"{self._own}.part").exists():
                return f"{self._folder} {doing}"
            doing = "does not sync folders (fsync)"
            sync_folder(self._folder)
            if self._view.number == self._view.peers[0].number:
                doing = "cannot be written to"
                self._base.write_text(self._token, encoding="ascii")
        except OSError as error:
            return f"{self._folder} {doing}: {error.strerror or error}"
        return self._take_first() if self._view.number == self._view.peers[0].number else ""

    def _take_first(self) -> str:
        said, file = try_lock(self._base)
        self._view.kept["lock"] = file
        return (
            f"{self._folder} does not lock: node 0 is refused a free lock" if said == "held" else self._unlocked(said)
        )

    def _unlocked(self, said: str) -> str:
        """Why the system does not lock, in words; "" if it does."""
        if said in ("held", "taken"):
            return ""
        return f"{NO_KERNEL_LOCKS} in {self._folder} ({said}): phalanx uses a file that its holder keeps changing"

    def read(self) -> str:
        """Whether node 0's file is there."""
        end = time.monotonic() + SEEN_S
        while True:
            try:
                if self._base.read_text(encoding="ascii") == self._token:
                    return ""
                why = "it holds something else"
            except OSError as error:
                why = error.strerror or str(error)
            if time.monotonic() > end:
                first = self._view.peers[0].name
                return f"{self._folder} is not the folder of {first}: a file written there is not seen here ({why})"
            time.sleep(POLL_S)

    def lock(self) -> str:
        """On all nodes but 0, whose lock it is."""
        if self._view.number == self._view.peers[0].number or not self._base.exists():
            return ""
        try:
            said, file = try_lock(self._base)
        except OSError as error:
            return f"{self._folder} does not lock: {error.strerror or error}"
        if file is not None:
            os.close(file)
        if said == "taken":
            first = self._view.peers[0].name
            return f"locks in {self._folder} do not lock: taken here while {first} holds it (mount option nolock?)"
        return self._unlocked(said)

    def released(self) -> str:
        """Node 0 lets go; the others need not try: that a lock is released follows from closing its file."""
        file = self._view.kept.pop("lock", None)
        if file is not None:
            os.close(file)
        return ""

    def clean(self) -> str:
        """Remove this node's files, and folders that it made."""
        names = [self._own, Path(f"{self._own}.part")]
        names += [self._base] if self._view.number == self._view.peers[0].number else []
        for path in names:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                return f"{path} cannot be removed: {error.strerror or error}"
        for folder in self._view.kept.pop("folders made", []):
            try:
                folder.rmdir()
            except OSError:  # another node's file is still there; that node removes the folder
                break
        return ""


def missing_folders(folder: Path) -> list[Path]:
    """The folder and its parents that do not exist, the innermost first."""
    found = []
    while not folder.exists() and folder != folder.parent:
        found.append(folder)
        folder = folder.parent
    return found


def sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def try_lock(path: Path) -> tuple[str, int | None]:
    """("taken", open file), ("held", None) by somebody else, or why the system does not lock."""
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno in HELD:
            return "held", None
        if error.errno in NO_LOCKS:
            return error.strerror or str(error), None
        raise
    return "taken", file
