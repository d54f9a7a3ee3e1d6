"""preflight: checks of all nodes of a run before it starts, under a scheduler or over ssh from a list of hosts."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import click

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import BadNode, ConfigError, PhalanxError, Problem
from phalanx.base.log import describe
from phalanx.base.placement import Placement
from phalanx.cli import completion
from phalanx.cli.hosts import read_hosts
from phalanx.cli.options import JSON, OVERRIDES
from phalanx.launch.remote import SSH

if TYPE_CHECKING:  # they import torch: not for --help
    from phalanx.launch.remote import RemoteProcess
    from phalanx.preflight.agent import AgentStart
    from phalanx.preflight.channel import Channel, Handshake, Member
    from phalanx.preflight.coordinator import Coordinator, Node
    from phalanx.preflight.report import PreflightReport

MEET_S = 20  # for all nodes to come; --wait sets it
BANNERS = 100  # lines that a host's shell may print before the node speaks
AT_ONCE = 64


@click.command(short_help="Check the nodes of a run before it starts.")
@click.argument("config", metavar="[CONFIG]", required=False, shell_complete=completion.configs)
@OVERRIDES
@click.option(
    "--hosts",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    metavar="FILE",
    help="Start on the hosts of this file, one a line, by ssh (default: on the ranks that srun or torchrun started).",
)
@click.option("--ssh", default=SSH, show_default=True, metavar="COMMAND", help="With --hosts: how a host is reached.")
@click.option(
    "--wait",
    "wait_s",
    type=click.IntRange(min=1),
    default=MEET_S,
    show_default=True,
    metavar="SECONDS",
    help="How long the nodes wait for each other to start.",
)
@click.option("--drop-bad", is_flag=True, help="Print the hosts to start with; the table goes to standard error.")
@click.option(
    "--spares", type=click.IntRange(min=0), default=None, metavar="K", help="With --drop-bad: hosts to spare."
)
@JSON
def preflight(config: str | None, overrides: tuple[str, ...], hosts: str | None, ssh: str, **options: Any) -> None:
    """Check all nodes of a run in about 30 s: names, ports, MTU, clocks, programs, data, folder, space, limits, GPUs,
    matmuls and links. A table with a verdict for each node; exits with 8 if one is bad.

    \b
      phalanx preflight run.yaml --hosts hosts.txt
      srun --ntasks-per-node=1 phalanx preflight run.yaml
      phalanx preflight run.yaml --hosts hosts.txt --drop-bad --spares 2 > good.txt
    """
    if ssh != SSH and hosts is None:
        raise click.UsageError("--ssh says how the hosts of --hosts are reached: it goes with it")
    chosen = PreflightOptions(**options)
    words = () if config is None else (config, *overrides)
    code = over_ssh(read_hosts(hosts), ssh, words, chosen) if hosts else under_scheduler(words, chosen)
    if code:
        raise SystemExit(code)


@dataclass(frozen=True)
class PreflightOptions:
    """What is done with the report: the options of the verb. wait_s: how long nodes wait for each other."""

    drop_bad: bool
    spares: int | None
    out: str | None
    wait_s: int

    def __post_init__(self) -> None:
        if self.spares is not None and not self.drop_bad:
            raise click.UsageError("--spares goes with --drop-bad")

    def show(self, report: PreflightReport) -> int:
        """Print it, write it, and return the exit code."""
        if self.out:
            Path(self.out).write_text(report.as_json(), encoding="utf-8")
        click.echo(report.text, err=self.drop_bad)
        if not self.drop_bad:
            return report.exit_code
        try:
            click.echo("\n".join(report.starters(self.spares or 0)))
        except BadNode as error:
            click.echo(describe(error), err=True)
            return error.exit_code
        return 0


def agent_start(words: Sequence[str], address: str, interface: str, ranks: int) -> AgentStart:
    """What this node knows; a config that cannot be read here, or breaks a rule whatever the number of ranks, is a
    finding against this node, not the end."""
    from phalanx.cli.setup import all_problems, elsewhere
    from phalanx.config.read import read
    from phalanx.preflight.agent import AgentStart

    run, refused = None, ""
    if words:
        try:
            loaded = read(words[0], tuple(words[1:]))
            run = loaded.run
            ranks_of_layout = 1 if run is None else run.layout.least_ranks
            refused = texts_of(all_problems(loaded, elsewhere(ranks_of_layout, True)))
        except ConfigError as error:
            refused = texts_of(error.problems)
        except PhalanxError as error:
            refused = describe(error)
    return AgentStart(address, interface, None if refused else run, refused, words, ranks, os.environ)


def texts_of(problems: Sequence[Problem]) -> str:
    """For a finding of `config`, whose name says that they are errors of the config."""
    return "; ".join(str(problem).removeprefix("config error: ") for problem in problems)


# ---- under a scheduler ---------------------------------------------------------------------------


def under_scheduler(words: Sequence[str], options: PreflightOptions) -> int:
    """On the ranks that srun, torchrun or pods started; alone without any. Rank 0 coordinates; one rank of each node
    takes part, the others wait for the exit code."""
    from phalanx.launch.early import listen_early
    from phalanx.launch.env import read_placement
    from phalanx.launch.network import LOOPBACK, interfaces, loopback, settle
    from phalanx.preflight.channel import Member, call

    listen_early()  # a scheduler that takes the nodes away asks the preflight too, which is no failure
    placement, problems = read_placement(os.environ)
    if problems:
        raise ConfigError(problems)
    placement = settle(placement or Placement(), os.environ, options.wait_s)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "") if placement.world_size > 1 else loopback()
    address = next((known for name, known in interfaces() if name == interface), LOOPBACK)
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())  # by which SLURM takes it
    member = Member(placement.rank, placement.local_rank, name, address, interface)
    start = agent_start(words, address, interface, placement.local_size or 1)
    if placement.rank == 0:
        return coordinate(placement, member, start, options)
    host, port = meeting_place(placement, address, None, options.wait_s)
    channel = call(host, port, member, placement.secret, options.wait_s)
    return take_part(channel, start, placement.local_rank == 0)


def meeting_place(placement: Placement, address: str, port: int | None, wait_s: int) -> tuple[str, int]:
    """Where the coordinator listens: where rank 0 would serve its store; under torchrun, whose own store is there,
    where rank 0 says in that store (port: its own)."""
    if placement.init_method.startswith("tcp://"):
        parts = urlsplit(placement.init_method)
        return parts.hostname or "", parts.port or 0
    from datetime import timedelta

    from phalanx.comm.meeting import open_store  # imports torch

    store = open_store(placement.init_method, placement.rank, placement.world_size, timedelta(seconds=wait_s))
    if port is not None:
        store.set("phalanx preflight", f"{address} {port}")
    try:
        host, number = store.get("phalanx preflight").decode().split(" ")
    except RuntimeError as error:
        raise PhalanxError(f"rank 0 did not say within {wait_s} s where the nodes meet: {error}") from error
    return host, int(number)


def take_part(channel: Channel, start: AgentStart, leads: bool) -> int:
    """This rank's part; returns the exit code that the coordinator names."""
    from phalanx.preflight.agent import serve

    return serve(channel, start) if leads else int(channel.receive(None)["end"])


def coordinate(placement: Placement, member: Member, start: AgentStart, options: PreflightOptions) -> int:
    """Rank 0: wait for the others, check, print. Its own node takes part through a pair of sockets."""
    from phalanx.preflight.channel import listener

    parts = urlsplit(placement.init_method)
    served = placement.init_method.startswith("tcp://")
    at = parse_qs(parts.query).get("listen", [start.address])[0]
    listening = listener(at, (parts.port or 0) if served else 0)
    with listening:
        if not served and processes(placement) > 1:
            meeting_place(placement, start.address, listening.getsockname()[1], options.wait_s)
        members = await_members(listening, placement, options.wait_s)
    own, other = pair()
    threading.Thread(target=take_part, args=(other, start, True), daemon=True, name="phalanx-node").start()
    others = [(joined.member, joined.channel) for _, joined in sorted(members.items()) if joined.member is not None]
    nodes = [node_of(member, own), *(node_of(who, channel) for who, channel in others if who.local_rank == 0)]
    coordinator = coordinator_of(nodes, absent_of(members, placement, options.wait_s))
    report = coordinator.run()
    code = options.show(report)
    coordinator.end(code)
    for who, channel in others:
        if who.local_rank != 0 and channel is not None:
            channel.send({"end": code})
    return code


def coordinator_of(nodes: Sequence[Node], absent: Mapping[str, str]) -> Coordinator:
    from phalanx.preflight.coordinator import Coordinator

    def say(name: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{'checking ' + name:<40}\r", err=True, nl=False)

    return Coordinator(nodes, absent, say)


def node_of(member: Member, channel: Channel | None) -> Node:
    from phalanx.preflight.coordinator import Node

    return Node(member.name, member.address, channel)


def pair() -> tuple[Channel, Channel]:
    """A channel between two threads of this process: the coordinator's end and the node's."""
    from phalanx.preflight.channel import Channel

    one, two = (end.detach() for end in socket.socketpair())
    return Channel(one, one, None, True), Channel(two, two, None, False)


def await_members(listening: socket.socket, placement: Placement, wait_s: int) -> dict[int, Handshake]:
    """All ranks that call in time, by rank. Each is talked to by its own thread, so that none holds up the others."""
    from phalanx.preflight.channel import handshake_with

    members: dict[int, Handshake] = {}
    came = threading.Condition()

    def shake(connection: socket.socket) -> None:
        joined = handshake_with(connection, placement.secret)
        with came:
            known = members.get(joined.rank)
            if 0 < joined.rank < placement.world_size and (known is None or known.channel is None):
                members[joined.rank] = joined  # one that was turned away may have been somebody else
            came.notify()

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=shake, args=(connection,), daemon=True, name="phalanx-handshake").start()

    threading.Thread(target=accept, daemon=True, name="phalanx-listening").start()
    with came:
        came.wait_for(lambda: len(members) >= processes(placement) - 1, timeout=wait_s)
        return dict(members)


def processes(placement: Placement) -> int:
    """Processes that a scheduler started: one for each rank, or one for each node, which would start its ranks."""
    return placement.world_size // (placement.starts or 1)


def absent_of(members: Mapping[int, Handshake], placement: Placement, wait_s: int) -> dict[str, str]:
    """Nodes that did not come, or were turned away, and why; named by SLURM's list of hosts where there is one."""
    from phalanx.layout.positions import BadPositions, expand_hosts

    each = placement.local_size or 1
    try:
        hosts = expand_hosts(os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_NODELIST", "")))
    except BadPositions:
        hosts = []
    absent = {}
    step = placement.starts or 1
    for rank in range(step, placement.world_size, step):
        joined = members.get(rank)
        if joined is not None and joined.channel is not None:
            continue
        name = hosts[rank // each] if len(hosts) * each == placement.world_size else f"rank {rank}"
        absent[name] = joined.why if joined is not None else f"rank {rank} did not come within {wait_s} s"
    return absent


# ---- over ssh ------------------------------------------------------------------------------------


@dataclass
class Started:
    """A host on which a node was started: its process, and the node or why there is none."""

    remote: RemoteProcess
    node: Node | None = None
    why: str = ""

    @property
    def host(self) -> str:
        return self.remote.host


def over_ssh(hosts: Sequence[str], ssh: str, words: Sequence[str], options: PreflightOptions) -> int:
    """Start a node on each host and coordinate from here. Nothing but ssh connects to this machine."""
    started = [start_on(host, ssh) for host in hosts]
    try:
        with ThreadPoolExecutor(min(AT_ONCE, len(started))) as pool:
            list(pool.map(lambda one: connect_host(one, words, options.wait_s), started))
        nodes = [one.node for one in started if one.node is not None]
        absent = {one.host: one.why for one in started if one.node is None}
        coordinator = coordinator_of(nodes, absent)
        report = coordinator.run()
        code = options.show(report)
        coordinator.end(code)
        return code
    finally:
        for one in started:
            one.remote.process.kill()
            one.remote.process.wait()


def start_on(host: str, ssh: str) -> Started:
    """A node in the same folder with the same Python."""
    from phalanx.launch.remote import same_program, start_remote

    return Started(start_remote(host, ssh, f"cd {shlex.quote(os.getcwd())} && exec {same_program()} preflight-node"))


def connect_host(one: Started, words: Sequence[str], wait_s: int) -> None:
    """Wait until the node speaks; its host's shell may print something before."""
    from phalanx.preflight.channel import Channel, ChannelLost
    from phalanx.preflight.coordinator import Node

    reads, writes = one.remote.process.stdout, one.remote.process.stdin
    if reads is None or writes is None:
        raise RuntimeError("the process was started without pipes")
    channel = Channel(os.dup(reads.fileno()), os.dup(writes.fileno()), None, True)
    until = time.monotonic() + wait_s
    try:
        channel.send({"name": one.host, "words": list(words)})
        for _ in range(BANNERS):
            said = channel.receive_any(max(0.01, until - time.monotonic()))
            if "address" in said:
                one.node = Node(one.host, str(said["address"]), channel)
                return
        one.why = "its shell prints too much"
    except ChannelLost as error:
        one.why = f"ssh: {one.remote.why(str(error))}"


@click.command("preflight-node", hidden=True)
def preflight_node() -> None:
    """A node's part, started by `phalanx preflight --hosts`: messages on standard input and output."""
    from phalanx.launch.network import own_address
    from phalanx.preflight.channel import Channel

    writes = os.dup(1)
    os.dup2(2, 1)  # what anything prints is not a message
    channel = Channel(0, writes, None, False)
    begin = channel.receive(MEET_S)
    address, interface = own_address(str(begin["name"]))
    start = agent_start([str(word) for word in begin["words"]], address, interface, gpus_or_one())
    channel.send({"address": address})
    take_part(channel, start, True)


def gpus_or_one() -> int:
    """Ranks of a node where no scheduler says it."""
    import torch

    return max(1, torch.cuda.device_count())
