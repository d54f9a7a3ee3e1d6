"""bash completion that leaves no space where a value follows."""

from __future__ import annotations

from click.shell_completion import BashComplete


class Bash(BashComplete):
    """bash, without a space after `key=`, where a value follows."""

    source_template = BashComplete.source_template.replace(
        "    return 0\n",
        "    [[ ${COMPREPLY[0]} == *= || ${COMPREPLY[0]} == *. ]] && compopt -o nospace\n\n    return 0\n",
        1,
    )
