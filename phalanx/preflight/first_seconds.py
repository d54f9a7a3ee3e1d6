"""The preflight of a run's first seconds: the cheap checks of `phalanx preflight`, before ranks connect to each other.

One rank of each machine looks. They talk through the store where ranks meet, in rounds in which every check is asked
that still has an order. Texts there are signed with the run's secret if it has one, as all that ranks write there.

  rank 0  -> begin        the token of the probe servers, and rank 0's folder, if any; or that nothing is looked at
  rank r  -> node/r       host, address and port of its probe server; {} of a rank that does not look for its machine
  rank 0  -> nodes        all of those, in the order of ranks; empty: all ranks are on one machine
  rank 0  -> order/k      the orders of round k, by check; none: the last round is over
  node n  -> answer/k/n   what it found
  rank 0  -> verdict      [severity, line] of what is wrong

Config and versions are compared once more, by field and on every rank, when ranks have met (engine/meeting.py).
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import BadNode, PeerLost
from phalanx.base.log import Log
from phalanx.base.placement import Placement
from phalanx.comm.meeting import SignedStore
from phalanx.comm.reach import is_loopback
from phalanx.config.run import Run
from phalanx.preflight.agent import answer, checks
from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView, Peer
from phalanx.preflight.probe import ProbeServer

PREFIX = "first seconds/"
PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1  # between two polls
LAST_S = 3.0  # for which rank 0, whose process may hold the store, waits until all others know the verdict
SHOWN = 4  # machines in a warning
CLOSER = "`phalanx preflight` with the same config looks closer; PHALANX_CHECK_NODES=0 leaves these checks out"
Spoken = tuple[str, str]  # severity, line


def spans_machines(placement: Placement) -> bool:
    """Whether the ranks may be on several machines, by what is known without asking them; the same on all ranks."""
    host = urlsplit(placement.init_method).hostname or ""
    return placement.world_size > 1 and not is_loopback(host) and placement.local_size != placement.world_size


@dataclass(frozen=True)
class FirstSeconds:
    """What this rank does in the first seconds of a job on several machines.

    patience_s  for which it waits for the other ranks
    run         whose folder and data files are looked at too; None: neither, as where weights are only read
    """

    placement: Placement
    patience_s: float
    log: Log
    run: Run | None = None

    def before_ranks_connect(self, store: dist.Store, signed: SignedStore | None) -> None:
        """Look at each machine, all ranks together. BadNode on all ranks if a machine is bad; warnings go to the log of
        rank 0. PeerLost if a rank does not come."""
        if not spans_machines(self.placement):
            return
        # without a secret the key is known to everybody, and the signatures protect nothing, as in a preflight
        texts = Texts(signed or SignedStore(store, b""), self.patience_s)
        spoken = self._looked(texts)
        bad = [line for severity, line in spoken if severity == "bad"]
        if bad:
            self._seen(texts)
            raise BadNode("\n".join([*bad, CLOSER]))
        if self.placement.rank == 0:
            for _, line in spoken:
                self.log.warn(line)

    def _seen(self, texts: Texts) -> None:
        """Rank 0, which may hold the store, ends last."""
        rank, world = self.placement.rank, self.placement.world_size
        texts.write(f"seen/{rank}", 1)
        if rank == 0:
            texts.wait_for([f"seen/{r}" for r in range(world)], LAST_S)

    def _looked(self, texts: Texts) -> list[Spoken]:
        """The verdict, which rank 0 gives."""
        rank, world = self.placement.rank, self.placement.world_size
        if rank == 0:
            looks = self.placement.check_nodes
            folder = None if self.run is None else self.run.dir
            texts.write("begin", {"token": secrets.token_hex(16), "folder": folder} if looks else {})
        begin = texts.read("begin")
        if not begin:
            return []
        with ExitStack() as after:
            texts.write(f"node/{rank}", self._node(str(begin["token"]), after))
            if rank == 0:
                said = texts.read_all([f"node/{r}" for r in range(world)])
                nodes = [[r, of["name"], of["address"], of["port"]] for r, of in enumerate(said) if of]
                texts.write("nodes", nodes if len({name for _, name, _, _ in nodes}) > 1 else [])
            nodes = texts.read("nodes")
            if not nodes:
                return []
            mine = next((number for number, of in enumerate(nodes) if of[0] == rank), None)
            if mine is None:
                return [(str(severity), str(line)) for severity, line in texts.read("verdict")]
            peers = [Peer(n, str(name), str(address), int(port)) for n, (_, name, address, port) in enumerate(nodes)]
            run = None if self.run is None else replace(self.run, dir=str(begin["folder"]))
            view = NodeView(mine, peers, str(begin["token"]), run, brief=True)
            view = replace(view, interface=self.placement.interface, ranks=self.placement.local_size or 1)
            made = {check.name: check for check in checks(brief=True)}
            if rank == 0:
                return Conductor(texts, view, made).conducted()
            return follow(texts, view, made)

    def _node(self, token: str, after: ExitStack) -> dict[str, Any]:
        """What this rank says of its machine; {} if another one looks there."""
        if self.placement.local_rank != 0:
            return {}
        address, port = self.placement.address, 0
        if address:
            port = after.enter_context(ProbeServer(address, bytes.fromhex(token))).port
        return {"name": socket.gethostname(), "address": address, "port": port}


class Texts:
    """JSON values in the ranks' store, under keys that begin with PREFIX. Waiting polls, because signals are not
    handled while torch waits."""

    def __init__(self, store: SignedStore, patience_s: float):
        self._store, self._patience_s = store, patience_s

    def write(self, key: str, value: object) -> None:
        self._store.set(PREFIX + key, json.dumps(value))

    def read(self, key: str) -> Any:
        """What was written there, once it is. PeerLost if nothing is in time."""
        return self.read_all([key])[0]

    def read_all(self, keys: Sequence[str]) -> list[Any]:
        missing = self.wait_for(keys, self._patience_s)
        found = {} if missing else self._signed(keys)
        if len(found) < len(keys):
            why = (
                f"{', '.join(missing[:SHOWN])} did not come" if missing else "somebody else writes to the ranks' store"
            )
            raise PeerLost(f"in the checks of the machines {why}")
        return [found[key] for key in keys]

    def read_some(self, keys: Sequence[str], limit_s: float) -> dict[str, Any]:
        """Those that come in time."""
        missing = set(self.wait_for(keys, limit_s))
        return self._signed([key for key in keys if key not in missing])

    def _signed(self, keys: Sequence[str]) -> dict[str, Any]:
        said = self._store.read([PREFIX + key for key in keys]) if keys else {}
        return {key.removeprefix(PREFIX): json.loads(text) for key, text in said.items()}

    def wait_for(self, keys: Sequence[str], limit_s: float) -> list[str]:
        """Wait until all keys exist; returns those that do not in time."""
        until, pause = time.monotonic() + limit_s, PAUSE_S
        while keys and not self._store.has([PREFIX + key for key in keys]):
            if time.monotonic() > until:
                return [key for key in keys if not self._store.has([PREFIX + key])]
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return []


def follow(texts: Texts, view: NodeView, made: Mapping[str, NodeCheck]) -> list[Spoken]:
    """Answer the orders of rank 0, round by round, until its verdict."""
    number = 0
    while orders := texts.read(f"order/{number}"):
        texts.write(f"answer/{number}/{view.number}", answered(view, made, orders))
        number += 1
    return [(str(severity), str(line)) for severity, line in texts.read("verdict")]


def answered(view: NodeView, made: Mapping[str, NodeCheck], orders: Mapping[str, object]) -> dict[str, object]:
    """By check. An entry point may have brought a check to one machine alone: it is not known on the others."""
    return {name: answer(made[name], view, order) for name, order in orders.items() if name in made}


@dataclass(frozen=True)
class Conductor:
    """Rank 0: asks all nodes, round by round, and judges."""

    texts: Texts
    view: NodeView
    made: Mapping[str, NodeCheck]

    def conducted(self) -> list[Spoken]:
        """The verdict, after everybody can read it."""
        names = [peer.name for peer in self.view.peers]
        looks = {name: Looks(names, brief=True) for name in self.made}
        findings: list[Finding] = []
        number, there, failed = 0, set(range(len(names))), set[tuple[str, int]]()
        while orders := self._orders(looks):
            said = self._round(number, orders, there)
            for node in sorted(there - set(said)):
                findings.append(Finding("meeting", (node,), f"no answer while it was asked about {', '.join(orders)}"))
            there &= set(said)
            for name, order in orders.items():
                of = {node: found[name] for node, found in said.items() if name in found}
                for node, found in of.items():
                    if "failed" in found and (name, node) not in failed:
                        failed.add((name, node))
                        findings.append(Finding(name, (node,), str(found["failed"])))
                good = {n: f["answer"] for n, f in of.items() if "answer" in f and (name, n) not in failed}
                looks[name] = replace(looks[name], answers=[*looks[name].answers, (order, good)])
            number += 1
        self.texts.write(f"order/{number}", {})
        for name, check in self.made.items():
            findings += check.judge(looks[name])
        spoken = lines(findings, names)
        self.texts.write("verdict", spoken)
        return spoken

    def _orders(self, looks: Mapping[str, Looks]) -> dict[str, Any]:
        orders = {name: check.next_order(looks[name]) for name, check in self.made.items()}
        return {name: order for name, order in orders.items() if order is not None}

    def _round(self, number: int, orders: Mapping[str, Any], there: set[int]) -> dict[int, Mapping[str, Any]]:
        """The answers by node. A node has as long as the checks that it is asked for may take."""
        self.texts.write(f"order/{number}", orders)
        mine = answered(self.view, self.made, orders)
        keys = {f"answer/{number}/{node}": node for node in sorted(there) if node != self.view.number}
        limit_s = sum(self.made[name].limit_s for name in orders)
        others = self.texts.read_some(list(keys), limit_s)
        return {self.view.number: mine, **{keys[key]: said for key, said in others.items()}}


def lines(findings: Sequence[Finding], names: Sequence[str]) -> list[Spoken]:
    """A line for each bad node and reason; warnings that are the same on several nodes are one line."""
    bad = [("bad", f"{shown(f.nodes, names)}: {f.check}: {f.text}") for f in findings if f.severity == "bad"]
    alike: dict[str, list[int]] = {}
    for finding in findings:
        if finding.severity == "warning":
            alike.setdefault(f"{finding.check}: {finding.text}", []).extend(finding.nodes)
    return [*dict.fromkeys(bad), *(("warning", f"{shown(of, names)}: {text}") for text, of in alike.items())]


def shown(nodes: Sequence[int], names: Sequence[str]) -> str:
    there = [names[node] for node in dict.fromkeys(nodes)]
    more = f" and {len(there) - SHOWN} more" if len(there) > SHOWN else ""
    return ", ".join(there[:SHOWN]) + more
