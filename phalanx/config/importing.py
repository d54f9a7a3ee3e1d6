"""From a config of another framework to ours: which importer reads it, the YAML with its comments, and a report."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.base.errors import ConfigError, Problem
from phalanx.base.registry import NotFound, find, names
from phalanx.base.rules import near_paths
from phalanx.config.importers.translation import SEAM, ConfigImporter, ForeignText, Imported, KeyOutcome, OpenValue

MAX_BYTES = 1 << 20  # of a config
WIDTH = 80
LONGEST = 40  # characters of a value that are shown
SECRET = re.compile(r"key|token$|secret|password", re.IGNORECASE)
SECTIONS = ("dir", "init_from", "model", "task", "lora", "layout", "train", "optim", "data", "checkpoint", "log")


def import_config(source: ForeignText, framework: str | None = None) -> Imported:
    """Read a config of another framework. framework: the importer to take, by name; None: the one that recognises it.
    ConfigError if it cannot be read or decided."""
    return importer_of(source, framework).translate(source)


def read_foreign(path: str, ranks: int | None = None, variables: Mapping[str, str] | None = None) -> ForeignText:
    """A file's text. ConfigError if it is none."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ConfigError([Problem("FILE", path, f"cannot be read ({reason})", {}, near_paths(path))]) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError([Problem("FILE", path, f"is no config: it has more than {MAX_BYTES:,} bytes")])
    return ForeignText(path, text, ranks, variables or {})


def importer_of(source: ForeignText, framework: str | None) -> ConfigImporter:
    known = {name: importer_named(name) for name in names(SEAM)}
    if framework is not None:
        return known.get(framework) or importer_named(framework)
    found = {name: marks for name, one in known.items() if (marks := one.recognises(source))}
    if len(found) == 1:
        return known[next(iter(found))]
    if found:
        because = {known[name].title: ", ".join(marks[:4]) for name, marks in found.items()}
        options = tuple(f"--from {name}" for name in found)
        raise ConfigError([Problem("FILE", source.path, "may be of several frameworks", because, options)])
    looked = "; ".join(f"{one.title}: {one.looks_for}" for one in known.values())
    options = tuple(f"--from {name}" for name in known)
    raise ConfigError([Problem("FILE", source.path, f"is of no framework that is known here ({looked})", {}, options)])


def importer_named(name: str) -> ConfigImporter:
    try:
        found: ConfigImporter = find(SEAM, name, ConfigImporter)
    except NotFound as error:
        raise ConfigError([error.problem("--from", name)]) from None
    return found


# ---- YAML ----------------------------------------------------------------------------------------


def yaml_text(imported: Imported, command: str, path: str) -> str:
    """Our config: the command that made it, what is to be known about it, and the settings, each with its origin."""
    head = [f"# Made by: {command}", f"# from {imported.framework}: {path}"]
    for title, rows in listed(imported).items():
        head += ["#", f"# {title}:"]
        for name, says in rows:
            head += textwrap.wrap(f"{name}: {says}", 116, initial_indent="#   ", subsequent_indent="#     ", **WRAP)
    return "\n".join([*head, *sections(imported), ""])


WRAP: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def sections(imported: Imported) -> Iterator[str]:
    """Lines of YAML, section by section."""
    nested: dict[str, Any] = {}
    for key, setting in imported.settings.items():
        *outer, last = key.split(".")
        place = nested
        for step in outer:
            place = place.setdefault(step, {})
        place[last] = (setting.value, setting.origin)
    order = sorted(nested, key=lambda name: SECTIONS.index(name) if name in SECTIONS else len(SECTIONS))
    for name in order:
        yield from lines_of(name, nested[name], 0)


def lines_of(name: str, value: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(value, dict):
        yield f"{indent}{name}:"
        for key, inner in value.items():
            yield from lines_of(key, inner, depth + 1)
    else:
        plain, origin = value
        yield f"{indent}{name}: {scalar(plain)}  # {' '.join(origin.split())}"


def scalar(value: Any) -> str:
    """A value in YAML 1.2, on one line."""
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_./][\w./-]*", value) and value not in ("true", "false", "null", ".", "..")
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {scalar(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(scalar(inner) for inner in value) + "]"
    return json.dumps(value)


# ---- the report ----------------------------------------------------------------------------------


def listed(imported: Imported) -> dict[str, list[tuple[str, str]]]:
    """What is to be read about an import: title -> rows of a name and a sentence; empty lists are left out."""
    kinds = {kind: [o for o in imported.outcomes if o.kind == kind] for kind in ("built in", "missing")}
    made = {
        "to be set by hand": list(imported.by_hand.items()),
        "without counterpart": [(shown(o), o.says) for o in kinds["missing"]],
        f"default of {imported.framework} that cannot be had": list(imported.differs),
        "needs no key": [(shown(o), o.says) for o in kinds["built in"]],
    }
    return {title: rows for title, rows in made.items() if rows}


def shown(outcome: KeyOutcome) -> str:
    """Their key with its value, as far as that is short and no secret."""
    name, value = outcome.key.name, outcome.key.value
    if value is True or SECRET.search(name) or name.startswith(("line ", "lines ")):
        return name
    text = value.text if isinstance(value, OpenValue) else value if isinstance(value, str) else json.dumps(value)
    cut = text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
    return f"{name} {cut}" if name.startswith("--") or " " in name else f"{name}={cut}"


def report(imported: Imported, out: str) -> str:
    """The import as a table of 80 columns."""
    count = len([o for o in imported.outcomes if o.kind == "set"])
    lines = [f"{imported.framework}: {len(imported.outcomes)} keys, {count} of them are set in {out}"]
    for title, rows in listed(imported).items():
        lines += ["", f"{title} ({len(rows)})", *table(rows)]
    return "\n".join(lines)


def table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Two columns; a name too long for the first one has a line of its own."""
    first = min(32, max(len(name) for name, _ in rows))
    for name, says in rows:
        lines = textwrap.wrap(says, WIDTH - first - 4, break_on_hyphens=False) or [""]
        if len(name) > first:
            indents = {"initial_indent": "  ", "subsequent_indent": "    "}
            yield from textwrap.wrap(name, WIDTH, break_on_hyphens=False, **indents)  # type: ignore[arg-type]
            name = ""
        for i, line in enumerate(lines):
            yield f"  {(name if i == 0 else '').ljust(first)}  {line}".rstrip()


def write(text: str, out: Path) -> None:
    """A new file. ConfigError if it is there already."""
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError([Problem("-o", str(out), "is there already: choose another name, or remove it")]) from None
    except OSError as error:
        raise ConfigError([Problem("-o", str(out), f"cannot be written ({error.strerror})")]) from None
