"""The JSON files beside a tokenizer: tokenizer_config.json, special_tokens_map.json and such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.base.errors import DataError


def token_text(value: Any) -> str | None:
    """A token as these files write it: a string, or an object with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: must hold a JSON object")
    return value
