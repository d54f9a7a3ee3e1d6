"""The network of a run: nothing listens beyond loopback on one host, nothing from a socket is unpickled, and only
this run's ranks are believed."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.base.errors import ConfigError, PeerLost
from phalanx.base.placement import MEETING, Placement
from phalanx.comm.meeting import SignedStore, recognise
from phalanx.launch.local import start
from phalanx.launch.network import interfaces, loopback, settle
from phalanx.launch.outcome import RankFailed
from tests.cli.test_cli import wait_for
from tests.harness.hostile import fuzz, listeners, overwrite

ROOT = Path(__file__).parents[2]
JOB = '''
import json, os, time
from pathlib import Path

def meet(placement, folder):
    """Meet, beat, and wait until the test has done what it wants to; then meet again."""
    import torch
    from phalanx.comm.health.heartbeat import Heartbeat
    from phalanx.comm.mesh import Mesh, init_world, leave_world
    from phalanx.layout.grid import Grid
    world, device = placement.world_size, torch.device("cpu")
    store = init_world(placement.rank, world, placement.init_method, device, 60, placement.secret)
    mesh = Mesh(Grid(dp=world), placement.rank, device, 60)
    mesh.warm_up()
    counted = [0]
    with Heartbeat(placement.rank, world, 5.0, store=store) as heartbeat:
        heartbeat.unsigned = lambda count: counted.append(count)
        note = Path(folder) / f"{placement.rank}.partial"
        note.write_text(json.dumps([os.getpid(), placement.init_method]))
        note.rename(note.with_suffix(".here"))
        while not (Path(folder) / "go").exists():
            if counted[-1]:
                (Path(folder) / "counted").touch()
            time.sleep(0.05)
        total = torch.ones(1)
        mesh.world.all_reduce(total)
        (Path(folder) / f"{placement.rank}.end").write_text(json.dumps([total.item(), counted[-1]]))
    mesh.close()
    leave_world()
'''


@dataclass
class Seen:
    """What was there while two ranks ran, and what became of them."""

    sockets: dict[str, list[tuple[str, int]]]
    written: int
    bombed: bool
    ended: list[list[float]]


def disturbed(folder: Path, python: str, messages: int) -> Seen:
    """Two ranks of `phalanx_network_job`, a hostile program that writes to their store, and random messages to each
    port."""
    (folder / "phalanx_network_job.py").write_text(JOB)
    seen = Seen({}, 0, False, [])

    def attack() -> None:
        here = [folder / f"{rank}.here" for rank in range(2)]
        wait_for(lambda: all(path.exists() for path in here))
        notes = [json.loads(path.read_text()) for path in here]
        seen.sockets = {
            "launcher": listeners([os.getpid()]),
            **{f"rank {r}": listeners([pid]) for r, (pid, _) in enumerate(notes)},
        }
        port = int(notes[0][1].removeprefix(MEETING).partition("/")[0].rpartition(":")[2])

        def counted() -> bool:
            seen.written += overwrite("127.0.0.1", port, folder / "bombed")  # the ranks overwrite it with what they say
            return (folder / "counted").exists()

        wait_for(counted)
        for number, (_, other) in enumerate(
            dict.fromkeys([("", port), *seen.sockets["rank 0"], *seen.sockets["rank 1"]])
        ):
            fuzz("127.0.0.1", other, messages, seed=number)

    def attack_and_go() -> None:
        try:
            attack()
        finally:
            (folder / "go").touch()

    attacker = threading.Thread(target=attack_and_go)
    attacker.start()
    before = sys.executable
    sys.executable = python
    try:
        start("phalanx_network_job:meet", {"folder": str(folder)}, ranks=2)
    finally:
        sys.executable = before
        attacker.join()
    seen.bombed = (folder / "bombed").exists()
    seen.ended = [json.loads((folder / f"{rank}.end").read_text()) for rank in range(2)]
    return seen


def run_disturbed(tmp_path_factory, warm, messages: int) -> Seen:
    if sys.platform != "linux":
        pytest.skip("reads Linux' tables of sockets")
    folder = tmp_path_factory.mktemp("network")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        return disturbed(folder, warm.python, messages)


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm) -> Seen:
    return run_disturbed(tmp_path_factory, warm, 20)


@pytest.mark.trust(1, "list the listening sockets during phalanx train --ranks 2: on all interfaces", "loopback only")
def test_on_one_host_nothing_listens_beyond_loopback(seen):
    assert all(seen.sockets.values()), "the launcher serves the store, and each rank listens"
    assert {address for sockets in seen.sockets.values() for address, _ in sockets} == {"127.0.0.1"}, seen.sockets


@pytest.mark.trust(
    1,
    "write a pickle that runs a command into the store of a run: it ran",
    "it is ignored and counted, no code runs, and the run ends as it would have",
)
def test_what_a_stranger_writes_is_ignored_and_counted(seen):
    assert seen.written > 0 and not seen.bombed
    assert seen.ended[0][1] > 0, "rank 0 counted messages that nobody of the run signed"


def test_random_messages_to_every_port_change_nothing(seen):
    assert [total for total, _ in seen.ended] == [2.0, 2.0] and not seen.bombed


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_thousand_random_messages_to_every_port_change_nothing(tmp_path_factory, warm):
    seen = run_disturbed(tmp_path_factory, warm, 1000)
    assert [total for total, _ in seen.ended] == [2.0, 2.0] and not seen.bombed


# ---- who is believed -----------------------------------------------------------------------------


def test_a_text_is_believed_only_where_it_was_signed_and_by_this_run():
    store = dist.HashStore()
    ours, other = SignedStore(store, b"key of this start"), SignedStore(store, b"key of another start")
    ours.set("heartbeat/0", "{}")
    assert ours.get("heartbeat/0") == "{}" and ours.get("heartbeat/1") is None and ours.refused == 0
    store.set("heartbeat/1", store.get("heartbeat/0"))  # under another key
    store.set("heartbeat/2", store.get("heartbeat/0") + b" ")
    store.set("heartbeat/3", b"")
    other.set("heartbeat/4", "{}")
    assert ours.read([f"heartbeat/{rank}" for rank in range(5)]) == {"heartbeat/0": "{}"} and ours.refused == 4


def met(secrets: list[str], timeout_s: float = 20.0, absent: tuple[int, ...] = ()) -> list[str]:
    """What came of the meeting of ranks with these secrets, in words."""
    store, came = dist.HashStore(), [""] * len(secrets)

    def come(rank: int) -> None:
        try:
            signed = recognise(store, rank, len(secrets), secrets[rank], timeout_s)
            came[rank] = "closed" if signed is None else "open"
        except (ConfigError, PeerLost) as error:
            came[rank] = f"{type(error).__name__}: {error}"

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(len(secrets)) if rank not in absent]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return came


def test_ranks_with_the_same_secret_or_none_meet():
    assert met(["s" * 32] * 4) == ["open"] * 4
    assert met([""] * 3) == ["closed"] * 3


@pytest.mark.parametrize(
    "secrets, named",
    [
        (["right", "right", "wrong"], "rank 2 of 3"),
        (["wrong", "right", "right"], "rank"),
        (["right", "", "right"], "rank 1 of 3"),
        (["", "right", "right"], "rank 0 of 3"),
    ],
)
def test_ranks_with_different_secrets_are_all_refused(secrets, named):
    came = met([s * 8 for s in secrets])
    assert all(text.startswith("ConfigError: config error: PHALANX_RUN_SECRET='(not shown)'") for text in came), came
    assert all(named in text for text in came if "for other ranks than this one" not in text), came
    assert not any(s * 8 in text for s in secrets for text in came if s)


def test_ranks_that_do_not_come_are_named():
    came = met(["s" * 32] * 4, timeout_s=0.5, absent=(1, 3))
    assert came[0] == "PeerLost: ranks 1, 3 of 4 did not come to where the ranks meet" and came[2].startswith(
        "PeerLost: rank 0 of 4"
    )


# ---- where ranks listen --------------------------------------------------------------------------


def placed(env: dict[str, str], init_method: str = "tcp://127.0.0.1:29500", rank: int = 0) -> Placement:
    return settle(Placement(rank, 0, 4, init_method), env)


@pytest.mark.parametrize("env", [{"LOCAL_WORLD_SIZE": "4"}, {"SLURM_NNODES": "1", "GLOO_SOCKET_IFNAME": "eth7"}, {}])
def test_ranks_that_others_started_on_one_host_stay_on_loopback(env):
    name = "127.0.0.1" if not env else "some-node"
    assert placed(env, f"tcp://{name}:29500").init_method == "tcp://127.0.0.1:29500"
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == loopback()


def outside() -> tuple[str, str]:
    found = next(
        ((name, address) for name, address in interfaces() if not address.startswith("127.") and ":" not in address),
        None,
    )
    return found or pytest.skip("this machine has no network interface but loopback")


def test_between_hosts_ranks_listen_at_one_interface():
    name, address = outside()
    env = {"SLURM_NNODES": "2"}
    assert placed(env, f"tcp://{address}:29500").init_method == f"tcp://{address}:29500?listen={address}"
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == name
    chosen = {"SLURM_NNODES": "2", "PHALANX_INTERFACE": name, "NCCL_SOCKET_IFNAME": "ib0"}
    assert placed(chosen, f"tcp://{address}:29500", rank=3).init_method == f"tcp://{address}:29500"
    assert chosen["GLOO_SOCKET_IFNAME"] == chosen["NCCL_SOCKET_IFNAME"] == name


@pytest.mark.parametrize(
    "env, text",
    [
        ({"PHALANX_INTERFACE": "nope0"}, "PHALANX_INTERFACE='nope0': must be a network interface of this host"),
        ({}, "MASTER_ADDR='127.0.0.1': means 127.0.0.1 on this host, where no other host can reach it"),
        ({"PHALANX_INTERFACE": "", "MASTER": "no.such.host.invalid"}, "this host cannot reach it"),
    ],
)
def test_an_interface_that_cannot_be_used_is_refused_before_anything_listens(env, text):
    host = env.pop("MASTER", "127.0.0.1")
    if not env.get("PHALANX_INTERFACE", "x"):
        env.pop("PHALANX_INTERFACE")
    with pytest.raises(ConfigError) as refused:
        placed({"SLURM_NNODES": "2", **env}, f"tcp://{host}:29500")
    assert text in str(refused.value)


@pytest.mark.trust(
    1,
    "GLOO_DEVICE_TRANSPORT=TCP_TLS with a torch that has no TLS: exit 6 and words of gloo",
    "exit 2, saying that this torch cannot",
)
def test_tls_that_this_torch_lacks_is_said(tmp_path, monkeypatch):
    """In interpreters of their own: gloo looks at the environment when it is loaded."""
    (tmp_path / "phalanx_network_job.py").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    (tmp_path / "go").touch()
    with pytest.raises(RankFailed) as refused:
        start("phalanx_network_job:meet", {"folder": str(tmp_path)}, ranks=2)
    assert refused.value.exit_code == 2 and "GLOO_DEVICE_TRANSPORT='TCP_TLS': is no way to connect" in str(
        refused.value
    )


UNPICKLE = re.compile(
    r"\b(all_gather_object|gather_object|broadcast_object_list|scatter_object_list|recv_object_list|send_object_list|torch\.load|"
    r"pickle\.loads?)\b"
)


def test_nothing_in_the_package_unpickles():
    """But checkpoint/convert.py, which reads other programs' files with an unpickler that knows their data classes
    alone."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "phalanx").rglob("*.py")
        if UNPICKLE.search(path.read_text(encoding="utf-8"))
    }
    assert found <= {"phalanx/checkpoint/convert.py"}, found
