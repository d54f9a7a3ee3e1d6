"""A run that memory cannot hold is refused before it starts: what a machine has, what its ranks need, and the change
that makes it fit."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.base import tree
from phalanx.base.devices import Device
from phalanx.base.free_memory import host_memory, used_by_uuid
from phalanx.base.placement import Placement
from phalanx.cli.demo import settings
from phalanx.cli.setup import PreparedRun, check_memory
from phalanx.comm.axis import Axis
from phalanx.config.read import load_run
from phalanx.config.run import Run
from phalanx.engine.meeting import Identity, compare, refusals
from phalanx.forecast.capacity import FORECAST_ERROR, PROCESS, DoesNotFit, MachineMemory, check_capacity, generous_bytes
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import OVERHEAD, rank_uses
from phalanx.forecast.smaller import changes
from phalanx.forecast.text import plan_report
from phalanx.launch.env import tasks_on_node
from phalanx.training import machine
from phalanx.training.machine import fit_here, memory_here
from phalanx.training.main import train
from tests.harness.sample import rest_in_soak
from tests.harness.support import broken
from tests.harness.support_features import FEATURES, exclude, trial

ROOT = Path(__file__).parents[2]
TINY = sorted(p.name for p in (ROOT / "recipes").glob("tiny_*.yaml"))
WIDE = [
    "model.hidden_size=512",
    "model.intermediate_size=2048",
    "train.seq_length=512",
    "model.max_position_embeddings=512",
    "train.micro_batch=4",
    "train.precision=fp32",
]


def wide(*overrides: str) -> Run:
    return load_run(ROOT / "recipes/tiny_llama.yaml", [*WIDE, *overrides])


def on_cpu(run: Run, ranks: int = 1) -> int:
    """Bytes that the ranks need on their host."""
    plan = make_plan(replace(run, train=replace(run.train, device="cpu")), ranks)
    uses, _ = rank_uses(plan, plan.num_micro_batches(run.train.global_batch))
    return sum(uses[plan.grid.coords(rank).pp].total + PROCESS for rank in range(ranks))


def need_of(run: Run) -> int:
    """Bytes that one rank needs on a GPU."""
    plan = make_plan(run, 1)
    (use,), _ = rank_uses(plan, plan.num_micro_batches(run.train.global_batch))
    return use.total + OVERHEAD


@pytest.mark.parametrize("seed", rest_in_soak(range(12), range(4)))
def test_what_is_taken_to_fit_without_a_forecast_does(seed):
    """Of random features of the support matrix, in tiny and in wider models, the generous number is above the
    forecast of every rank."""
    dice = random.Random(seed)
    a, b = dice.sample(FEATURES, 2)
    if exclude(a, b) or broken(trial(a, b)):
        a = b = dice.choice(FEATURES)
    made = trial(a, b)
    uses, _ = rank_uses(plan := make_plan(made.run, made.world), plan.num_micro_batches(made.run.train.global_batch))
    assert generous_bytes(made.run, made.world) >= max(use.total + use.host + use.pools for use in uses), (
        a.name,
        b.name,
    )


RECIPES = sorted(p.name for p in (ROOT / "recipes").glob("*.py"))


@pytest.mark.parametrize("recipe", rest_in_soak(RECIPES, RECIPES[::3]))
def test_real_models_are_never_taken_to_fit_too_early(recipe):
    run = load_run(ROOT / "recipes" / recipe)
    layout = run.layout
    world = layout.tp * layout.cp * layout.pp * max(1, layout.ep)
    uses, _ = rank_uses(plan := make_plan(run, world), plan.num_micro_batches(run.train.global_batch))
    assert generous_bytes(run, world) >= max(use.total + use.host + use.pools for use in uses)


def change_of(text: str) -> list[str]:
    """The overrides that a refusal proposes."""
    return text.split("the cheapest change that fits: ")[1].split(" (")[0].split()


# ---- the comparison ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, layout", [(1, ()), (2, ()), (4, ("layout.tp=2", "layout.pp=2"))])
@pytest.mark.trust(
    21,
    "a forecast 7 % above or below the memory of the machine",
    "refused above it, one line of warning near it, nothing below",
)
def test_refused_warned_or_silent_by_the_error_of_the_forecast(ranks, layout):
    run = wide(*layout)
    need = on_cpu(run, ranks)

    def machine(part: float) -> MachineMemory:
        return MachineMemory(range(ranks), host=round(need / part))

    assert check_capacity(run, ranks, machine(1 - FORECAST_ERROR - 0.001)) is None
    for part in (1 - FORECAST_ERROR + 0.001, 1.0, 1 + FORECAST_ERROR - 0.001):
        warning = check_capacity(run, ranks, machine(part))
        assert warning is not None and "\n" not in warning and "memory is tight" in warning and "7%" in warning
    with pytest.raises(DoesNotFit) as refused:
        check_capacity(run, ranks, machine(1 + FORECAST_ERROR + 0.001))
    assert refused.value.exit_code == 2 and "are missing" in str(refused.value) and "--force" in str(refused.value)
    forced = check_capacity(run, ranks, machine(2.0), force=True)
    assert forced is not None and "are missing" in forced and "\n" not in forced


def test_the_change_that_is_named_fits_and_no_cheaper_one_does():
    run = wide()
    for part in (1.2, 1.5):
        machine = MachineMemory(range(1), host=round(on_cpu(run) / part))
        with pytest.raises(DoesNotFit) as refused:
            check_capacity(run, 1, machine)
        named = change_of(str(refused.value))
        assert on_cpu(wide(*named)) <= (machine.host or 0)
        for overrides, _ in changes(run):
            changed = run
            for key, value in overrides.items():
                changed = tree.replace_at(changed, key, value)
            if [f"{key}={value}" for key, value in overrides.items()] == named:
                break
            if "layout.tp" not in overrides and "train.offload_layers" not in overrides:
                assert on_cpu(changed) > (machine.host or 0), overrides


def test_copies_of_a_model_on_one_host_become_fewer():
    """Weights and optimizer state alone are too much four times: no recomputation helps, fewer ranks do."""
    run = wide(
        "model.vocab_size=100000",
        "train.seq_length=16",
        "train.micro_batch=1",
        "layout.sharding=3",
        "model.tie_word_embeddings=true",
    )
    with pytest.raises(DoesNotFit, match="the cheapest change that fits: --ranks 1 "):
        check_capacity(run, 8, MachineMemory(range(8), host=on_cpu(run, 1) + 2**20))
    with pytest.raises(DoesNotFit, match="no change fits on 1 rank"):
        check_capacity(run, 1, MachineMemory(range(1), host=2**20))


def test_the_fullest_gpu_counts_and_what_others_use_of_it():
    run = wide("layout.pp=2")
    plan = make_plan(run, 2)
    needs = [use.total + OVERHEAD for use in rank_uses(plan, plan.num_micro_batches(run.train.global_batch))[0]]
    assert check_capacity(run, 2, MachineMemory(range(2), tuple(round(n / 0.9) for n in needs), 2**40)) is None
    with pytest.raises(DoesNotFit, match="GPU 1 has .* free, and rank 1 needs"):
        check_capacity(run, 2, MachineMemory(range(2), (2**40, needs[1] // 2), 2**40))
    second = MachineMemory(range(2, 4), (2**40, needs[1] // 2), 2**40)
    with pytest.raises(DoesNotFit, match="GPU 1 has .* free, and rank 3 needs"):
        check_capacity(replace(run, train=replace(run.train, global_batch=32)), 4, second)


def test_what_the_driver_says_of_gpus():
    text = "GPU-5ea3b1aa-0c12-11ee-be56-0242ac120002, 1234\nGPU-7, 0\nGPU-8, [N/A]\n\n"
    assert used_by_uuid(text) == {"5ea3b1aa-0c12-11ee-be56-0242ac120002": 1234 * 2**20, "7": 0}
    assert used_by_uuid("NVIDIA-SMI has failed") == {}


@pytest.mark.trust(
    21,
    "phalanx plan recipes/llama3_70b.py --ranks 64 --device H100, which does not fit",
    "exit 2 with the change that train names",
)
def test_plan_of_a_device_names_the_change_of_train(warm):
    run = wide("train.micro_batch=64", "train.global_batch=64")
    need = need_of(run)
    device = Device("X1", None, None, 1.0, need - 2**25, 1.0)
    report = plan_report(run, 1, device)
    text = " ".join(report.text.split())
    assert not report.fits and "It DOES NOT FIT X1" in text and "lacks 32.0 MiB" in text
    changed = wide("train.micro_batch=64", "train.global_batch=64", *change_of(text))
    assert need_of(changed) <= device.memory
    assert plan_report(run, 1, replace(device, memory=need)).fits
    with pytest.raises(DoesNotFit) as refused:
        check_capacity(run, 1, MachineMemory(range(1), (int(0.9 * need),), 2**40))
    assert change_of(" ".join(plan_report(run, 1, replace(device, memory=int(0.9 * need))).text.split())) == change_of(
        str(refused.value)
    )
    words = (
        "recipes/tiny_llama.yaml",
        "model.hidden_size=16384",
        "model.intermediate_size=65536",
        "model.num_hidden_layers=8",
    )
    done = warm.phalanx("plan", *words, "--device", "H100", cwd=ROOT)
    assert done.returncode == 2 and "It DOES NOT FIT H100" in done.stdout, done.stderr
    assert "the cheapest on more: " in done.stdout and done.stderr == ""


# ---- what a machine has --------------------------------------------------------------------------


def machine_of(root: Path, available_kb: int, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A tree that looks like proc and sys."""
    meminfo = f"MemTotal: 1 kB\nMemAvailable:   {available_kb} kB\n"
    for name, text in {
        "proc/meminfo": meminfo,
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts,
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "30 23 0:26 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n31 23 0:27 / "
    "/sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
)


def v2(limit: object, used: int = 0, files: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 7\nactive_file {files}\ninactive_file 0\n",
    }


def v1(limit: int, used: int = 0, files: int = 0) -> dict[str, str]:
    stat = f"cache 9\nactive_file 1\ntotal_active_file 0\ntotal_inactive_file {files}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


def at(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


GROUP = "sys/fs/cgroup"
MACHINES = {
    "no limit": (1000, "0::/\n", V2, {}, 1000 * 1024),
    "v2, its own group": (10**6, "0::/job/step\n", V2, at(f"{GROUP}/job/step", v2(5000, 2000, 500)), 3500),
    "v2, a group around it": (
        10**6,
        "0::/job/step\n",
        V2,
        {**at(f"{GROUP}/job/step", v2("max", 10)), **at(f"{GROUP}/job", v2(4000, 100))},
        3900,
    ),
    "v2, a container that sees only itself": (10**6, "0::/\n", V2, at(GROUP, v2(4000, 1000)), 3000),
    "v2, another namespace": (10**6, "0::/../other\n", V2, at(GROUP, v2(4000, 1000)), 3000),
    "v1, its own group": (
        10**6,
        "4:cpu,memory:/a/b\n3:cpu:/c\n",
        V1,
        at(f"{GROUP}/memory/a/b", v1(8000, 3000, 1000)),
        6000,
    ),
    "v1, a group around it": (
        10**6,
        "4:memory:/a/b\n0::/\n",
        V1,
        {**at(f"{GROUP}/memory/a/b", v1(2**63 - 4096)), **at(f"{GROUP}/memory/a", v1(700))},
        700,
    ),
    "v1, a container with the path of its host": (
        10**6,
        "4:memory:/docker/x1\n",
        V1.replace("0:26 /", "0:26 /docker/x1"),
        at(f"{GROUP}/memory", v1(900, 100)),
        800,
    ),
    "both versions mounted": (
        10**6,
        "4:memory:/a\n0::/\n",
        V1 + V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "),
        at(f"{GROUP}/memory/a", v1(900)),
        900,
    ),
    "more than there is": (1, "0::/\n", V2, at(GROUP, v2(10**9)), 1024),
    "a group that is full": (10**6, "0::/\n", V2, at(GROUP, v2(1000, 5000)), 0),
}


@pytest.mark.parametrize("name", MACHINES)
def test_free_memory_of_a_host_in_its_control_groups(tmp_path, name):
    available, groups, mounts, files, left = MACHINES[name]
    assert host_memory(machine_of(tmp_path, available, groups, mounts, files)) == left


def test_a_system_without_proc_says_nothing(tmp_path):
    assert host_memory(tmp_path) is None
    assert (host_memory() or 1) > 0


def group_here() -> Path | None:
    """A folder where this process may make control groups for memory, if there is one."""
    for folder in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        if os.access(folder, os.W_OK) and any(
            (folder / name).exists() for name in ("memory.limit_in_bytes", "cgroup.subtree_control")
        ):
            return folder
    return None


def test_a_small_control_group_refuses_what_the_machine_would_hold(tmp_path):
    """The real thing: a group with 1.5 GiB, and a run that needs twice that of a machine that has it."""
    parent = group_here()
    if parent is None:
        pytest.skip("no control group can be made here")
    group = parent / f"phalanx-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = next(group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
        limit.write_text(str(3 * 2**29))
    except (OSError, StopIteration):
        pytest.skip("no control group can be made here")
    run = [
        "recipes/tiny_llama.yaml",
        "model.vocab_size=400000",
        "data.mock=true",
        f"dir={tmp_path}/r",
        "train.device=cpu",
    ]
    command = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    try:
        words = [
            "sh",
            "-c",
            command,
            "sh",
            sys.executable,
            "-m",
            "phalanx",
            "train",
            *run,
            "model.hidden_size=512",
            "model.intermediate_size=512",
        ]
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=150
        )
    finally:
        group.rmdir()
    assert done.returncode == 2 and "does not fit: this host has 1." in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "r").exists()


# ---- the program ---------------------------------------------------------------------------------


@pytest.mark.trust(
    21,
    "phalanx train recipes/llama3_8b.py --ranks 2 on a machine of 23 GB",
    "exit 2 before any file, with what is missing",
)
def test_train_refuses_what_no_machine_holds(warm, tmp_path):
    words = ("recipes/llama3_8b.py", "--ranks", "2", "train.device=cpu", "data.mock=true")
    large = (
        "model.num_hidden_layers=100",
        "model.hidden_size=16384",
        "model.intermediate_size=65536",
        "train.global_batch=2",
    )
    done = warm.phalanx("train", *words, *large, f"dir={tmp_path}/r", cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr, done.stderr
    first, second, last = done.stderr.splitlines()
    assert first.startswith("does not fit: this host has ") and "its 2 ranks need" in first
    assert "the fullest, rank 0" in first and "are missing" in first
    assert "no change fits on 2 ranks" in second and "--force" in last
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("recipe", TINY)
@pytest.mark.parametrize("ranks", [1, 2])
def test_small_runs_are_not_warned_of(recipe, ranks):
    run = load_run(ROOT / "recipes" / recipe, [f"train.global_batch={16 * ranks}"])
    assert check_capacity(run, ranks, MachineMemory(range(ranks), host=3 * 2**30)) is None


def test_the_demo_is_not_warned_of():
    run = load_run(base={**settings(False, 4), "data": {"mock": True}})
    assert check_capacity(run, 4, MachineMemory(range(4), host=4 * 2**30)) is None


def test_of_ranks_that_others_started_one_speaks(monkeypatch, capsys):
    run = wide()
    monkeypatch.setattr(machine, "host_memory", lambda: on_cpu(run) // 2)
    first, second = (PreparedRun(run, 2, Placement(rank, rank, 2, "env://", local_size=2)) for rank in (0, 1))
    with pytest.raises(DoesNotFit):
        check_memory(first)
    with pytest.raises(SystemExit) as quiet:
        check_memory(second)
    assert quiet.value.code == 2 and capsys.readouterr().err == ""
    check_memory(first, force=True)
    assert "warning: " in capsys.readouterr().err


@pytest.mark.trust(
    21,
    "train(run, ...) in a notebook of a run that cannot fit: killed by the kernel",
    "DoesNotFit with the text of the command line",
)
def test_python_compares_memory_too(tmp_path):
    run = replace(
        wide("train.device=cpu", "model.hidden_size=65536", "model.intermediate_size=65536"), dir=str(tmp_path / "r")
    )
    with pytest.raises(DoesNotFit, match=r"this host has .* GiB free, and rank 0 needs .* are missing\n"):
        train(run, Placement())
    assert not (tmp_path / "r").exists()


def refused_on_one(rank: int, world: int) -> tuple[str, int, str]:
    """What a rank of two machines hears, the second of which is too small."""
    run = wide("train.device=cpu", *(["model.hidden_size=65536", "model.intermediate_size=65536"] * rank))
    placement = replace(
        fit_here(run, world, Placement(rank, 0, world, "env://", local_size=1)).placement, init_method=""
    )
    axis = Axis("world", tuple(range(world)), rank)
    try:
        compare(axis, Identity({}, refused=placement.refused), "")
    except DoesNotFit as error:
        return type(error).__name__, error.exit_code, str(error)
    return "", 0, ""


@pytest.mark.trust(
    21,
    "One machine of several was too small: its ranks ended alone, the others waited in vain",
    "all end with 2 and its name",
)
def test_a_machine_that_is_too_small_is_told_to_all(ranks):
    first, second = ranks.run("tests.forecast.test_capacity:refused_on_one", 2)
    assert first == second and first[:2] == ("DoesNotFit", 2)
    assert re.match(
        rf"rank 1 on {re.escape(socket.gethostname())}: this host has .* GiB free, and rank 1 needs .* are missing\n",
        first[2],
    )
    assert refusals(["", "a: x", "a: x", "b: y", ""]) == ["ranks 1-2 on a: x", "rank 3 on b: y"]


def test_which_ranks_share_a_machine():
    run = wide("train.device=cpu")
    for placement, ranks in (
        (None, range(0, 8)),
        (Placement(5, 1, 8, "env://", local_size=4), range(4, 8)),
        (Placement(5, 1, 8, "env://"), range(4, 6)),
    ):
        found = memory_here(run, 8, placement)
        assert found.ranks == ranks and found.started == (placement is not None) and found.gpus == ()
    assert [tasks_on_node("8(x2),4", str(node)) for node in range(4)] == ["8", "8", "4", ""] and tasks_on_node(
        "", "0"
    ) == ""
