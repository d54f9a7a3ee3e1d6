"""API keys: a file with one on each line."""

from __future__ import annotations

import hmac
import stat
from hashlib import sha256
from pathlib import Path

from phalanx.base.errors import ConfigError, Problem

LEAST = 16  # characters of a key


class ApiKeys:
    """Compares in a time that says nothing about the keys. Only hashes are kept."""

    def __init__(self, keys: list[str]):
        self._hashes = [sha256(key.encode()).digest() for key in keys]

    def allow(self, key: str) -> bool:
        asked = sha256(key.encode()).digest()
        same = [hmac.compare_digest(asked, known) for known in self._hashes]
        return any(same)


def read_keys(path: str | Path) -> ApiKeys:
    """Lines that are empty or begin with # are none. ConfigError if there is no key, one that is easily guessed, or
    if others on this machine can read the file."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise ConfigError(
            [key_problem(path, "must be a file with one key on each line; there is no such file")]
        ) from None
    except UnicodeDecodeError:
        raise ConfigError([key_problem(path, "must be a text file with one key on each line")]) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        rule = f"must be readable by its owner alone: chmod 600 {path}"
        raise ConfigError([key_problem(path, rule)])
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError([key_problem(path, "must hold a key: openssl rand -hex 32 makes one")])
    if short := [number for number, line in enumerate(lines, 1) if line in keys and len(line) < LEAST]:
        rule = f"must hold keys of {LEAST} characters or more (lines {', '.join(map(str, short))} are shorter)"
        raise ConfigError([key_problem(path, rule)])
    return ApiKeys(keys)


def key_problem(path: Path, rule: str) -> Problem:
    return Problem("--api-keys", str(path), rule, where="command line")
