"""Free memory on this machine: main memory within the limits of this process's control groups, and that of each GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

NO_LIMIT = 2**60  # without a limit, cgroup v1 reports a number near 2**63


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that this process and its children can still allocate; None where the system does not say.

    The minimum of MemAvailable and, for each control group around this process that has a limit (v1 or v2), what is
    left of the limit. A group's page cache does not count as used, because the kernel reclaims it. root: the folder
    that contains proc and sys, for tests.
    """
    known = [available(root), *(left for folder in control_groups(root) if (left := left_in(folder)) is not None)]
    return min((n for n in known if n is not None), default=None)


def available(root: Path) -> int | None:
    """MemAvailable of the whole machine."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def control_groups(root: Path) -> list[Path]:
    """Folders of the control groups that limit this process's memory: its own and all those around it, as far as they
    are mounted here."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        mounts = _mounts(root, v2=number == "0" and not controllers)
        if number == "0" or "memory" in controllers.split(","):
            for inside, mount in mounts:
                found += _chain(mount, inside, path)
    return found


def _mounts(root: Path, v2: bool) -> list[tuple[str, Path]]:
    """(path of the mounted group, mount point) for cgroup2, or for version 1's memory controller."""
    found = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = (after.split() + ["", "", ""])[:3]
        if kind == "cgroup2" if v2 else kind == "cgroup" and "memory" in options.split(","):
            inside, mount = before.split()[3:5]
            found.append((inside, root / mount.lstrip("/")))
    return found


def _chain(mount: Path, inside: str, path: str) -> list[Path]:
    """From a mounted group down to the group `path`. A path outside the mount belongs to another namespace; then the
    mount itself is this process's group."""
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
    """Bytes left until a group's limit; None without one."""
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
    """Bytes free on each of the first `count` GPUs visible to this process, before it uses any: total minus what others
    use.

    torch would have to create a context on a GPU to ask it, so nvidia-smi is asked instead. Where that cannot answer,
    the GPUs count as unused.
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
    """Lines of `GPU-5ea3...-..., 1234` (MiB), one for each GPU -> bytes by torch's uuid, which lacks the `GPU-`."""
    found = {}
    for line in text.splitlines():
        uuid, _, mib = line.partition(",")
        if mib.strip().isdigit():
            found[uuid.strip().removeprefix("GPU-")] = int(mib) * 2**20
    return found
