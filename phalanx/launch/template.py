"""Templates of generated files (templates/), with the filters that quote for the shell."""

from __future__ import annotations

import json
import shlex

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template(name: str) -> Template:
    """A template by its file name; a value that it lacks is an error."""
    env = Environment(
        loader=PackageLoader("phalanx.launch"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    env.filters["quote"] = lambda value: shlex.quote(str(value))
    env.filters["file"] = quoted_path
    env.filters["log_name"] = log_name
    env.filters["join_quoted"] = shlex.join
    env.filters["json"] = json.dumps
    return env.get_template(name)


def quoted_path(path: str) -> str:
    """A path for the shell, in which `~` still means the home folder."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def log_name(folder: object, name: str) -> str:
    """A log in a folder as #SBATCH --output has it: SLURM replaces what follows a percent sign in `name` alone."""
    return shlex.quote(f"{folder}/".replace("%", "%%") + name)
