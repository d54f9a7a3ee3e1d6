"""Files of hosts: read, and written in the order that suits a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.base.dataclass import dataclass

if TYPE_CHECKING:  # it imports torch: not for --help
    from phalanx.config.run import Run


def read_hosts(path: str) -> list[str]:
    """Names of hosts, one a line; SLURM's lists such as gpu[01-16] too; what follows # is a comment."""
    from phalanx.layout.positions import BadPositions, expand_hosts

    lines = Path(path).read_text(encoding="utf-8").splitlines()
    try:
        hosts = [host for line in lines for host in expand_hosts(line.partition("#")[0])]
    except BadPositions as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--hosts") from None
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice or not hosts:
        why = f"{', '.join(twice)} is listed twice" if twice else "no host is listed"
        raise click.BadParameter(f"{path}: {why}", param_hint="--hosts")
    wrong = next((host for host in hosts if host.startswith("-")), None)
    if wrong is not None:  # ssh would take it for an option
        raise click.BadParameter(f"{path}: {wrong!r} is no host", param_hint="--hosts")
    return hosts


@dataclass(frozen=True)
class HostFiles:
    """Options of a verb that orders hosts: the file of hosts, that of their topology, and where to write the order."""

    hosts: str | None
    topology: str | None
    write_hosts: str | None

    def __post_init__(self) -> None:
        if (self.hosts is None) != (self.topology is None):
            raise click.UsageError(
                "--hosts and --topology go together: which hosts, and where they are (cluster.yaml beside CONFIG may "
                "say that too, in a section `topology`)"
            )
        if self.write_hosts is not None and self.hosts is None:
            raise click.UsageError("--write-hosts goes with --hosts and --topology")

    def text(self, run: Run, world: int) -> str:
        """What both orders cost; the best one is written."""
        from phalanx.config.topology_file import read_topology
        from phalanx.forecast.host_order import best_order, order_text

        topology = read_topology(str(self.topology))
        order = best_order(run, world, read_hosts(str(self.hosts)), topology)
        if self.write_hosts is not None:
            Path(self.write_hosts).write_text("\n".join([*order.hosts, ""]), encoding="utf-8")
        return f"Order of the hosts (exchanges of a step)\n{order_text(order, topology)}"
