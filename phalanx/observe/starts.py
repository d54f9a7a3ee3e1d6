"""starts.jsonl: for each start of a run, when, with which command, where and with which versions it ran. Secrets are
removed."""

from __future__ import annotations

import json
import platform
import re
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from phalanx.base.journal import Journal
from phalanx.base.log import Log
from phalanx.base.version import VERSION

NAME = "starts.jsonl"
HIDDEN = "[hidden]"
# of what holds a secret
NAMES = "api[_-]?key|secret|passw(?:or)?d|credential|access[_-]?key|(?:auth|access|hf|api)[_-]?token"
SECRETS = (
    (re.compile(rf"(?i)((?:{NAMES})\w*['\"]?\s*[=:]\s*)\S+"), r"\1"),
    (re.compile(r"(://)[^/\s:@]+:[^/\s@]+(?=@)"), r"\1"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[bp]-)[\w-]{12,}"), ""),
    (re.compile(r"\bAKIA[0-9A-Z]{16}\b"), ""),
    (re.compile(r"\b[0-9a-f]{40}\b"), ""),  # a key of Weights & Biases
)


def redacted(text: str) -> str:
    """The text without anything that looks like a password, a token or a key."""
    for pattern, kept in SECRETS:
        text = pattern.sub(f"{kept}{HIDDEN}", text)
    return text


def note_start(folder: Path, ranks: int, device: torch.device, command: str, data: str, log: Log) -> None:
    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redacted(command),
        "host": socket.gethostname(),
        "machine": machine(device),
        "ranks": ranks,
        "data": redacted(data),
        "versions": versions(),
        "commit": commit(),
    }
    journal = Journal(folder / NAME, log.warn)
    journal.write(json.dumps(row).encode() + b"\n")
    journal.close()


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {platform.system()} {platform.machine()}"
    return f"{processor()}, {platform.system()} {platform.machine()}"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or "CPU"


def versions() -> dict[str, str]:
    found = {"phalanx": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
    return found | ({"CUDA": torch.version.cuda} if torch.version.cuda else {})


def commit() -> str | None:
    """The commit of Phalanx, where it runs from a clone; with `+` if files are changed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def read_starts(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / NAME).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # cut short by a kill
            continue
    return found
