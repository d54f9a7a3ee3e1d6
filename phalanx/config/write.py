"""Writing a run: plain values, YAML, the config.yaml of its folder. Reading is in `read.py`."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.config.run import Run


def to_dict(run: Run) -> dict[str, Any]:
    """Plain values, every field written out; tuples become lists."""
    return plain(dataclasses.asdict(run))


def as_given(run: Run) -> dict[str, Any]:
    """As `to_dict`, without what optim.fallback takes over from optim: read again, it follows optim if that changes."""
    values, optim = to_dict(run), run.optim
    if optim.fallback is not None:
        own = values["optim"]["fallback"]
        values["optim"]["fallback"] = {k: v for k, v in own.items() if optim.for_fallback.get(k) != v}
    return values


def save_run(run: Run, path: str | Path) -> None:
    """Write the resolved config; loading the file gives an equal Run."""
    partial = Path(path).with_suffix(".partial")
    partial.write_text(to_yaml(run), encoding="utf-8")
    os.replace(partial, path)  # a run may be started from this very file, and killed here


def to_yaml(run: Run) -> str:
    from ruamel.yaml import YAML  # start-up time: of a run's ranks only one writes

    yaml, out = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    yaml.dump(as_given(run), out)
    return out.getvalue()


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (tuple, list)) else value
