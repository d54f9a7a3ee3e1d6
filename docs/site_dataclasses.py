"""For the API reference, which is made without running the package: `dataclass` of phalanx/base/dataclass.py is
Python's."""

from __future__ import annotations

from typing import Any

import griffe


class KnownDataclasses(griffe.Extension):
    def on_alias_instance(self, *, alias: griffe.Alias, **_: Any) -> None:
        if alias.target_path == "phalanx.base.dataclass.dataclass":
            alias.target_path = "dataclasses.dataclass"
