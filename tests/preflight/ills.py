"""What can be wrong with a node or a link, done to one node of a small cluster: each ill with the nodes and the check
that a preflight must name."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.harness.cluster import (
    BIND,
    READ_ONLY,
    REMOUNT,
    SLOW,
    Cluster,
    ClusterNode,
    Start,
    inside,
    mount,
    replace_file,
)
from tests.harness.no_flock import refuse

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Site:
    """Where an ill is done: the cluster, the run's folder and its data on all nodes, and a folder for what it needs."""

    cluster: Cluster
    run: Path
    data: Path
    config: Path
    scratch: Path


@dataclass(frozen=True)
class Ill:
    """check, nodes: what must be named, by check and letters; words: in the reason; severity: of the verdict.

    node      done in the process of node `at` before the program starts
    network   done to the cluster while it runs
    change    changes how the program is started
    meanwhile done while the program runs
    """

    name: str
    check: str
    nodes: str
    words: str
    at: str = "c"
    severity: str = "bad"
    node: Callable[[Site, ClusterNode], None] | None = None
    network: Callable[[Site], contextlib.AbstractContextManager[None]] | None = None
    change: Callable[[Site, Start], None] | None = None
    meanwhile: Callable[[Start], None] = lambda start: None
    needs: Sequence[str] = field(default_factory=tuple)


def hosts_of(site: Site, change: Callable[[str], str]) -> None:
    replace_file("/etc/hosts", change(site.cluster.hosts))


def no_name(site: Site, node: ClusterNode) -> None:
    line = f"{site.cluster['b'].address} node-b\n"
    hosts_of(site, lambda text: text.replace(line, ""))


def wrong_name(site: Site, node: ClusterNode) -> None:
    hosts_of(site, lambda text: text.replace(f"{site.cluster['b'].address} node-b", "10.79.0.77 node-b"))


def swapped_name(site: Site, node: ClusterNode) -> None:
    """Node d's address has also the name of node b, and is found first when addresses are looked up."""
    b, d = site.cluster["b"].address, site.cluster["d"].address
    hosts_of(site, lambda text: text.replace(f"{d} node-d", f"{d} node-b node-d").replace(f"{b} node-b", f"{b} node-b"))


@contextlib.contextmanager
def classful(site: Site, letter: str, rate: str, *match: str) -> Iterator[None]:
    """What node `letter` sends and `match` describes (of tc's u32 filters) goes at `rate`, the rest as before."""
    node = site.cluster[letter]
    tc = ["tc", "qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "htb", "default", "1"]
    inside(node.namespace, "tc", "qdisc", "del", "dev", "eth0", "root")
    inside(node.namespace, *tc)
    for number, speed in (("1", site.cluster.rate), ("2", rate)):
        words = ["tc", "class", "add", "dev", "eth0", "parent", "1:", "classid", f"1:{number}", "htb", "rate", speed]
        inside(node.namespace, *words, "burst", "32kb" if speed == SLOW else "256kb", "quantum", "60000")
    filters = ["tc", "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", "u32", *match, "flowid", "1:2"]
    inside(node.namespace, *filters)
    try:
        yield
    finally:
        inside(node.namespace, "tc", "qdisc", "del", "dev", "eth0", "root")
        site.cluster.cable(node, site.cluster.rate)


@contextlib.contextmanager
def dropping(site: Site, letter: str, *match: str) -> Iterator[None]:
    """The same, and it is lost: its class has a queue in which nothing has room."""
    with classful(site, letter, "8kbit", *match):
        words = ["tc", "qdisc", "add", "dev", "eth0", "parent", "1:2", "handle", "2:", "bfifo", "limit", "1"]
        inside(site.cluster[letter].namespace, *words)
        yield


OPENS = ("match", "ip", "protocol", "6", "0xff", "match", "u8", "0x02", "0x12", "at", "33")  # SYN without ACK


def one_way(site: Site) -> contextlib.AbstractContextManager[None]:
    """Node c opens no connections to node b; b opens them to c."""
    return dropping(site, "c", *OPENS, "match", "ip", "dst", f"{site.cluster['b'].address}/32")


def firewall(site: Site) -> contextlib.AbstractContextManager[None]:
    """No answers come from node c to connections that others open: only its own connection to node a lives."""
    answers = ("match", "ip", "protocol", "6", "0xff", "match", "u8", "0x12", "0x12", "at", "33")
    return dropping(site, "c", *answers)


@contextlib.contextmanager
def small_mtu(site: Site) -> Iterator[None]:
    node = site.cluster["c"]
    subprocess.run(["ip", "-n", node.namespace, "link", "set", "eth0", "mtu", "1400"], check=True, timeout=120)
    try:
        yield
    finally:
        subprocess.run(["ip", "-n", node.namespace, "link", "set", "eth0", "mtu", "1500"], check=True, timeout=120)


@contextlib.contextmanager
def black_hole(site: Site) -> Iterator[None]:
    """Packets of more than 1,024 bytes from c to d are lost on the way, though both nodes have the same MTU."""
    large = ("match", "u16", "0x0400", "0xfc00", "at", "2", "match", "ip", "dst", f"{site.cluster['d'].address}/32")
    with dropping(site, "c", "match", "ip", "protocol", "17", "0xff", *large):
        yield


@contextlib.contextmanager
def slow_cable(site: Site) -> Iterator[None]:
    node = site.cluster["c"]
    site.cluster.cable(node, SLOW)
    try:
        yield
    finally:
        site.cluster.cable(node, site.cluster.rate)


def slow_link(site: Site) -> contextlib.AbstractContextManager[None]:
    return classful(site, "b", SLOW, "match", "ip", "dst", f"{site.cluster['d'].address}/32")


SKEW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(which, at);
    if (which == CLOCK_REALTIME) at->tv_sec += 30;
    return status;
}
"""


def skewed_clock(site: Site, start: Start) -> None:
    source, library = site.scratch / "skew.c", site.scratch / "skew.so"
    source.write_text(SKEW)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=120)
    start.exec_env = {"c": {"LD_PRELOAD": str(library)}}


def other_version(site: Site, node: ClusterNode) -> None:
    import torch

    torch.__version__ = "2.11.0"


def other_code(site: Site, node: ClusterNode) -> None:
    path = ROOT / "phalanx/nn/norm.py"
    replace_file(path, path.read_text() + "\n")


def other_config(site: Site, node: ClusterNode) -> None:
    replace_file(site.config, site.config.read_text().replace('"seed": 1', '"seed": 2'))


def other_data(site: Site, node: ClusterNode) -> None:
    copy = site.scratch / "other.idx"
    data = bytearray(Path(f"{site.data}.idx").read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    mount(copy, f"{site.data}.idx")


def short_data(site: Site, node: ClusterNode) -> None:
    copy = site.scratch / "short.bin"
    copy.write_bytes(Path(f"{site.data}.bin").read_bytes()[:-64])
    mount(copy, f"{site.data}.bin")


def no_data(site: Site, node: ClusterNode) -> None:
    mount("none", site.data.parent, "tmpfs", 0)


def full_disk(site: Site, node: ClusterNode) -> None:
    mount("none", site.run, "tmpfs", 0, "size=64k")
    with contextlib.suppress(OSError):
        (site.run / "fill").write_bytes(bytes(1 << 20))


def no_files_left(site: Site, node: ClusterNode) -> None:
    mount("none", site.run, "tmpfs", 0, "nr_inodes=1")


def other_folder(site: Site, node: ClusterNode) -> None:
    mount("none", site.run, "tmpfs", 0)


def read_only(site: Site, node: ClusterNode) -> None:
    mount(site.run, site.run)
    mount("none", site.run, flags=REMOUNT | BIND | READ_ONLY)


def no_locks(site: Site, node: ClusterNode) -> None:
    refuse("flock", errno.ENOLCK)


def false_locks(site: Site, node: ClusterNode) -> None:
    refuse("flock", 0)


def no_rename(site: Site, node: ClusterNode) -> None:
    refuse("rename", errno.EXDEV)


def no_fsync(site: Site, node: ClusterNode) -> None:
    refuse("fsync", errno.EIO)


def little_shared(site: Site, node: ClusterNode) -> None:
    mount("none", "/dev/shm", "tmpfs", 0, "size=16m")


def few_files(site: Site, node: ClusterNode) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))


def little_locked(site: Site, node: ClusterNode) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, 64 * 1024))


def fewer_cores(site: Site, node: ClusterNode) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def other_settings(site: Site, start: Start) -> None:
    start.env = {**start.env, "c": {**start.env.get("c", {}), "NCCL_ALGO": "Ring"}}


def other_secret(site: Site, start: Start) -> None:
    start.env = {**start.env, "c": {**start.env.get("c", {}), "PHALANX_RUN_SECRET": "of somebody else's run"}}


def missing_node(site: Site, start: Start) -> None:
    start.missing = ("c",)


GROUPS = Path("/sys/fs/cgroup/cpu")


def slow_node(site: Site, node: ClusterNode) -> None:
    """A hundredth of a core while it computes: in a control group of its own, which the test removes."""
    from phalanx.preflight.checks import compute

    group = GROUPS / f"phalanx-{site.scratch.parent.name}-{os.getppid()}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text("100000")
    (group / "cpu.cfs_quota_us").write_text("1000")
    measured = compute.measured

    def slowed(device: torch.device) -> dict[str, list[float]]:
        (group / "tasks").write_text(str(threading.get_native_id()))
        try:
            return measured(device)
        finally:
            (GROUPS / "tasks").write_text(str(threading.get_native_id()))

    compute.measured = slowed


@contextlib.contextmanager
def groups_removed(site: Site) -> Iterator[None]:
    yield
    for group in GROUPS.glob(f"phalanx-{site.scratch.parent.name}-*"):
        for _ in range(100):  # its last process is gone a moment after it was waited for
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)


GPU = """<?xml version="1.0" ?>
<nvidia_smi_log><attached_gpus>1</attached_gpus><gpu id="00000000:01:00.0">
<product_name>NVIDIA H100 80GB HBM3</product_name>
<pci><pci_gpu_link_info><link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width>
</link_widths></pci_gpu_link_info></pci>
<clocks_event_reasons><clocks_event_reason_hw_thermal_slowdown>{slowed}</clocks_event_reason_hw_thermal_slowdown>
</clocks_event_reasons>
<ecc_errors><volatile><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
<dram_uncorrectable>{errors}</dram_uncorrectable></volatile></ecc_errors>
<remapped_rows><remapped_row_pending>{pending}</remapped_row_pending>
<remapped_row_failure>No</remapped_row_failure></remapped_rows>
<gpu_power_readings><current_power_limit>{cap} W</current_power_limit>
<default_power_limit>700.00 W</default_power_limit></gpu_power_readings>
<max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks></gpu></nvidia_smi_log>
"""
GOOD_GPU = {"slowed": "Not Active", "errors": "0", "pending": "No", "cap": "700.00"}


def with_gpu(**values: str) -> Callable[[Site, Start], None]:
    """On every node a program `nvidia-smi` that prints what the real one prints (its documented form); on node c with
    other values."""

    def change(site: Site, start: Start) -> None:
        for node in site.cluster.nodes:
            folder = site.scratch / f"bin-{node.letter}"
            folder.mkdir()
            text = GPU.format(**{**GOOD_GPU, **(values if node.letter == "c" else {})})
            (folder / "answer.xml").write_text(text)
            (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat {folder}/answer.xml\n")
            (folder / "nvidia-smi").chmod(0o755)
            mine = {**start.env.get(node.letter, {}), "PATH": f"{folder}:{os.environ['PATH']}"}
            start.env = {**start.env, node.letter: mine}

    return change


def stopped(start: Start) -> None:
    """Node c stops while it is asked: its process stands still."""
    end = time.monotonic() + 120
    text = start.folder / "serves"
    while not text.exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(start.pids["c"], signal.SIGSTOP)


def marks_begin(site: Site, node: ClusterNode) -> None:
    """Says when node c answers its first question."""
    from phalanx.preflight.checks.names import Names

    real = Names.look

    def look(self: Names, view: object, order: object) -> object:
        (site.run.parent.parent / "out/serves").touch()
        return real(self, view, order)  # type: ignore[arg-type]

    Names.look = look  # type: ignore[method-assign,assignment]


ILLS = [
    Ill("a name is unknown", "names", "c", "node-b does not resolve", node=no_name),
    Ill("a name means another address", "names", "c", "10.79.0.77", node=wrong_name),
    Ill("an address has another node's name", "names", "c", "has the name of node-b", node=swapped_name),
    Ill("a port is open one way", "ports", "c", "node-b from here", network=one_way),
    Ill("a firewall closes a node's ports", "ports", "c", "from all others", network=firewall),
    Ill("an MTU is smaller", "mtu", "c", "MTU 1400, on most nodes 1500", network=small_mtu),
    Ill("large packets are lost on a link", "mtu", "cd", "do not arrive", network=black_hole),
    Ill("a clock is ahead", "clock", "c", "ahead of the others", change=skewed_clock, needs=("cc",)),
    Ill("another version of torch", "program", "c", "torch 2.11.0", node=other_version),
    Ill("another code", "program", "c", "code of phalanx", node=other_code),
    Ill("another config", "program", "c", "config", node=other_config),
    Ill("other settings of NCCL", "program", "c", "NCCL_ALGO=Ring", change=other_settings, severity="warning"),
    Ill("a data file is another", "data", "c", ".idx", node=other_data),
    Ill("a data file is shorter", "data", "c", ".bin", node=short_data),
    Ill("the data is missing", "data", "c", "cannot be read", node=no_data),
    Ill("a full disk", "space", "c", "free for", node=full_disk),
    Ill("a full disk of the first node", "space", "a", "free for", at="a", node=full_disk),
    Ill("another folder on the first node", "folder", "a", "is not that of the others", at="a", node=other_folder),
    Ill("no inodes left", "space", "c", "no inodes", node=no_files_left),
    Ill("another folder", "folder", "c", "is not the folder of node-a", node=other_folder),
    Ill("a folder that cannot be written", "folder", "c", "Read-only", node=read_only),
    Ill("no locks", "folder", "c", "no kernel locks", node=no_locks, severity="warning"),
    Ill("locks that do not lock", "folder", "c", "do not lock", node=false_locks),
    Ill("no rename", "folder", "c", "does not rename", node=no_rename),
    Ill("no fsync", "folder", "c", "fsync", node=no_fsync),
    Ill("little shared memory", "space", "c", "/dev/shm", node=little_shared, severity="warning"),
    Ill("few open files", "limits", "c", "open only 512 files", node=few_files),
    Ill("little locked memory", "limits", "c", "lock only 64 KiB", node=little_locked, severity="warning"),
    Ill("fewer cores", "machine", "c", "usable cores 1", node=fewer_cores, severity="warning", needs=("cores",)),
    Ill("a slow node", "compute", "c", "% of the median", node=slow_node, network=groups_removed, needs=("groups",)),
    Ill("a slow cable", "links", "c", "sends and receives at ", network=slow_cable),
    Ill("a slow link", "links", "bd", "% of the median from node-b", network=slow_link),
    Ill("another secret", "meeting", "c", "not that of the first node", change=other_secret),
    Ill("a node that does not come", "meeting", "c", "did not come", change=missing_node),
    Ill("a node that stops", "meeting", "c", "does not answer", node=marks_begin, meanwhile=stopped),
    Ill("memory errors of a GPU", "gpu", "c", "3 memory errors", change=with_gpu(errors="3")),
    Ill("a row of GPU memory to be remapped", "gpu", "c", "waits to be remapped", change=with_gpu(pending="Yes")),
    Ill("a throttled GPU", "gpu", "c", "hw_thermal_slowdown", change=with_gpu(slowed="Active")),
    Ill("a GPU's power cap", "gpu", "c", "power cap 500 W", change=with_gpu(cap="500.00")),
]


def lacking(ill: Ill) -> str:
    """What this machine lacks for an ill; "" if nothing."""
    if "cc" in ill.needs and shutil.which("cc") is None:
        return "no C compiler"
    if "groups" in ill.needs and not os.access(GROUPS / "cpu.cfs_quota_us", os.F_OK) and not _can_limit():
        return "no control groups for CPU time"
    if "cores" in ill.needs and len(os.sched_getaffinity(0)) < 2:
        return "one core"
    return ""


def _can_limit() -> bool:
    probe = GROUPS / f"phalanx-probe-{os.getpid()}"
    try:
        probe.mkdir()
        return (probe / "cpu.cfs_quota_us").exists()
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()
