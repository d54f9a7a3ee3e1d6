"""Memory that is free on this machine: main memory within the limits of this process's control groups, and each
GPU's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

NO_LIMIT = 2**60  # cgroup v1 writes a number near 2**63 where there is no limit


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that this process and its children can still take; None where the system does not say.

    The smaller of MemAvailable and, for each control group around this process that has a limit (v1 or v2), what is
    left of the limit. What a group keeps of files does not count as taken: the kernel gives it back. root: where
    proc and sys lie, for tests.
    """
    known = [available(root), *(left for folder in control_groups(root) if (left := left_in(folder)) is not None)]
    return min((n for n in known if n is not None), default=None)


def available(root: Path) -> int | None:
    """MemAvailable of the whole machine."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def control_groups(root: Path) -> list[Path]:
    """Folders of the control groups that limit this process's memory: its own and all around it, as far as they are
    mounted here."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        mounts = _mounts(root, v2=number == "0" and not controllers)
        if number == "0" or "memory" in controllers.split(","):
            for inside, mount in mounts:
                found += _chain(mount, inside, path)
    return found


def _mounts(root: Path, v2: bool) -> list[tuple[str, Path]]:
    """(path of the group that is mounted, where) of cgroup2, or of version 1's memory controller."""
    found = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = (after.split() + ["", "", ""])[:3]
        if kind == "cgroup2" if v2 else kind == "cgroup" and "memory" in options.split(","):
            inside, mount = before.split()[3:5]
            found.append((inside, root / mount.lstrip("/")))
    return found


def _chain(mount: Path, inside: str, path: str) -> list[Path]:
    """From a mounted group down to the group `path`. A path outside of the mount is that of another namespace: the
    mount itself is ours."""
    if inside != "/" and path != inside and not path.startswith(f"{inside}/"):
        return [mount]
    steps = path.removeprefix(inside.rstrip("/")).strip("/").split("/")
    if ".." in steps:
        return [mount]
    folders = [mount]
    for step in filter(None, steps):
        folders.append(folders[-1] / step)
    return folders


def left_in(group: Path) -> int | None:
    """Bytes left of a group's limit, or None without one."""
    v2 = (group / "memory.current").exists()
    limit, used = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    most, taken = _text(group / limit).strip(), _text(group / used).strip()
    if not most.isdigit() or not taken.isdigit() or int(most) >= NO_LIMIT:
        return None
    names = ("active_file", "inactive_file") if v2 else ("total_active_file", "total_inactive_file")
    kept = dict(line.split(maxsplit=1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    files = sum(int(kept.get(name, "0")) for name in names)
    return max(0, int(most) - max(0, int(taken) - files))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


# ---- GPUs ----------------------------------------------------------------------------------------


def gpu_memory(count: int) -> tuple[int, ...]:
    """Bytes free on each of the first `count` GPUs that this process sees, before it uses any of them: total less
    what others use.

    torch would have to occupy a GPU to ask it; the driver's own program is asked instead, and where it cannot answer
    nobody uses them.
    """
    import torch

    used = used_by_uuid(_driver_says())
    found = []
    for number in range(count):
        device = torch.cuda.get_device_properties(number)
        uuid = str(getattr(device, "uuid", "")).removeprefix("GPU-")
        found.append(device.total_memory - used.get(uuid, 0))
    return tuple(found)


def _driver_says() -> str:
    command = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def used_by_uuid(text: str) -> dict[str, int]:
    """`GPU-5ea3...-..., 1234` (MiB), a line for each GPU -> bytes by the uuid that torch knows, which has no `GPU-`."""
    found = {}
    for line in text.splitlines():
        uuid, _, mib = line.partition(",")
        if mib.strip().isdigit():
            found[uuid.strip().removeprefix("GPU-")] = int(mib) * 2**20
    return found
