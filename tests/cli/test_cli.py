"""The program and its launcher: exit codes, one clear message and never a traceback, signals, and worlds started by
others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from phalanx.base.errors import ConfigError, DataError, PeerLost
from phalanx.base.log import Log, describe, pairs
from phalanx.base.placement import SECRET, Placement
from phalanx.cli.setup import prepare
from phalanx.launch.env import first_host, read_placement
from phalanx.launch.local import forwarded_signals, rank_environment, signal_ranks, start
from phalanx.launch.network import loopback
from phalanx.launch.outcome import Ended, Outcome, RankFailed, verdict
from tests.harness.pool import free_port

ROOT = Path(__file__).parents[2]
CONFIG = """\
model: {family: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
train: {steps: 2, global_batch: 4, micro_batch: 1, seq_length: 16, device: cpu}
data: {mock: true}
"""  # noqa: E501
JOBS = """
import os, signal, sys, time
from phalanx.base.errors import DataError, NumericalStop, Preempted

def note(placement, folder, **_):
    with open(f"{folder}/{placement.rank}.part", "w") as f:
        f.write(f"{placement.rank} {placement.local_rank} {placement.world_size} {os.environ['OMP_NUM_THREADS']} {os.getpid()}")
    os.rename(f.name, f"{folder}/{placement.rank}")  # whoever waits for it reads all of it

def fail(placement, kind, rank=1):
    while placement.rank != rank and rank >= 0:
        time.sleep(60)
    if kind == "data":
        raise DataError("wiki.bin is cut short")
    if kind == "numbers":
        raise NumericalStop("the loss was NaN for 50 steps")
    if kind == "bug":
        {}["nothing"]
    if kind == "exit":
        sys.exit(4)
    os.kill(os.getpid(), signal.SIGKILL)

def add(placement, folder):
    import torch, torch.distributed as dist
    from phalanx.comm.mesh import init_world
    init_world(placement.rank, placement.world_size, placement.init_method, torch.device("cpu"), timeout_s=60)
    x = torch.tensor([placement.rank + 1.0])
    dist.all_reduce(x)
    with open(f"{folder}/{placement.rank}", "w") as f:
        f.write(str(x.item()))
    dist.destroy_process_group()

def save_on_stop(placement, folder):
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    note(placement, folder)
    while not asked:
        time.sleep(0.02)
    time.sleep(0.5 * placement.rank)  # the last to save must not be ended by the first
    with open(f"{folder}/saved-{placement.rank}", "w") as f:
        f.write(str(len(asked)))
    raise Preempted("step 3 is saved; start the same command again to go on")

def early(placement, folder):
    note(placement, folder)
    time.sleep(60)
"""  # noqa: E501


INTERPRETER = sys.executable


@pytest.fixture
def jobs(warm, tmp_path, monkeypatch):
    """A module of jobs that ranks can import, and a folder for their notes. Ranks are forked, not started
    (tests/harness/warm.py)."""
    monkeypatch.setattr(sys, "executable", warm.python)
    (tmp_path / "phalanx_test_jobs.py").write_text(JOBS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    return str(file)


def program(*args: str) -> subprocess.CompletedProcess[str]:
    """In an interpreter of its own; most tests here have tests/harness/warm.py's."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *args], capture_output=True, text=True, env=env, timeout=120
    )


# ---- the program ---------------------------------------------------------------------------------


def test_bare_and_help():
    bare, help_, version = program(), program("--help"), program("--version")
    assert bare.returncode == help_.returncode == version.returncode == 0
    assert "phalanx train CONFIG" in bare.stdout and "--help" in bare.stdout
    for verb in ("train", "plan", "verify", "generate", "doctor", "explain", "data", "checkpoint"):
        assert verb in help_.stdout
    assert "0.1.0" in version.stdout


def test_help_needs_no_torch():
    code = "import sys; import phalanx.cli.main; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60).returncode
        == 0
    )


@pytest.mark.parametrize(
    "args, hint",
    [
        (["trian"], "Did you mean train?"),
        (["xyzzy"], "There are: doctor, data"),
        (["data", "shwo"], "Did you mean show?"),
        (["train", "x.yaml", "--rank", "2"], "--ranks"),
        (["train"], "CONFIG"),
    ],
)
def test_usage_errors(args, hint):
    done = program(*args)
    assert done.returncode == 2 and hint in done.stderr and "Traceback" not in done.stderr


def test_explain():
    done = program("explain", "train.micro_batch")
    assert (done.returncode, done.stdout) == (
        0,
        "train.micro_batch: int, required\n    Sequences per micro-batch, on one rank.\n",
    )
    done = program("explain", "train.microbatch")
    assert done.returncode == 2 and "train.micro_batch" in done.stderr


@pytest.mark.parametrize("verb", ["train", "plan", "verify"])
def test_a_bad_config_is_exit_2_at_once_with_all_problems_and_nothing_written(warm, config, tmp_path, verb):
    before = sorted(p.name for p in tmp_path.iterdir())
    done = warm.phalanx(
        verb, config, "layout.tp=3", "optim.beta1=1", "train.stepz=3", f"dir={tmp_path}/new", cwd=tmp_path
    )
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert all(line.startswith("config error: ") for line in lines)
    for text in (
        "layout.tp=3: must divide num_attention_heads",
        "optim.beta1=1.0",
        "train.stepz=3: is not a key of train",
        "(set in command line)",
    ):
        assert text in done.stderr
    assert "Valid near it: train.steps." in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_plan_needs_neither_gpu_nor_data(warm, config, tmp_path):
    args = (
        "plan",
        config,
        "data.mock=false",
        "data.paths=[far/away]",
        "train.device=cuda",
        "layout.tp=2",
        "--ranks",
        "4",
        "--device",
    )
    done = warm.phalanx(*args, "H100", cwd=tmp_path)
    assert (
        done.returncode == 0
        and "pp 1 x dp 2 x tp 2" in done.stdout
        and sorted(p.name for p in tmp_path.iterdir()) == ["run.yaml"]
    )
    wrong = warm.phalanx(*args, "H1000")
    assert wrong.returncode == 2 and "H100" in wrong.stderr and "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    "override, code, text",
    [
        ("init_from=nowhere", 4, "checkpoint error: init_from='nowhere': does not exist"),
        ("data.tokenizer=nowhere", 3, "data error: data.tokenizer='nowhere'"),
    ],
)
def test_missing_paths(warm, config, override, code, text):
    done = warm.phalanx("train", config, override)
    assert done.returncode == code and text in done.stderr and "Traceback" not in done.stderr


def test_missing_config_names_near_ones(config):
    done = program("train", config.replace("run", "rnu"))
    assert done.returncode == 2 and f"Valid near it: {config}" in done.stderr


def test_a_bad_world_is_printed_by_rank_0_only(warm, config):
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    first, second = (
        warm.phalanx("train", config, "layout.tp=4", env={**world, "RANK": r, "LOCAL_RANK": r}) for r in "01"
    )
    assert first.returncode == second.returncode == 2 and "layout.tp=4" in first.stderr and second.stderr == ""
    wrong = warm.phalanx("train", config, env={**world, "RANK": "5"})
    assert wrong.returncode == 2 and "RANK=5: must be < WORLD_SIZE, because WORLD_SIZE=2" in wrong.stderr


def test_checkpoint_list(warm, tmp_path):
    (tmp_path / "run1/checkpoints").mkdir(parents=True)
    assert "no checkpoint" in warm.phalanx("checkpoint", "list", str(tmp_path / "run1")).stdout
    (tmp_path / "run1/checkpoints/step-00000100").mkdir()
    (tmp_path / "run1/checkpoints/step-00000200.tmp-x").mkdir()
    [line] = warm.phalanx("checkpoint", "list", str(tmp_path / "run1")).stdout.splitlines()
    assert "step-00000100" in line and "manifest" in line and "good" not in line
    for verb in (("generate", "--prompt", "a"), ("checkpoint", "verify")):
        none = warm.phalanx(*verb, str(tmp_path / "run1/checkpoints/step-00000101"))
        assert none.returncode == 4 and "there is no checkpoint" in none.stderr and "near it: " in none.stderr, (
            none.stderr
        )
    gone = warm.phalanx("checkpoint", "list", str(tmp_path / "rnu1"))
    assert gone.returncode == 4 and f"near it: {tmp_path}/run1" in gone.stderr and "Traceback" not in gone.stderr


def test_data_prepare_and_show(warm, tmp_path):
    from phalanx.text.tokenizers import byte_tokenizer

    byte_tokenizer().save(tmp_path / "tok")
    (tmp_path / "a.txt").write_text("Arma virumque cano")
    done = warm.phalanx(
        "data", "prepare", str(tmp_path / "a.txt"), "-o", str(tmp_path / "a"), "--tokenizer", str(tmp_path / "tok")
    )
    line = rf"1 document, 19 tokens \(18 bytes\) -> {tmp_path}/a.bin in \d\.\d s, [\d.]+ (bytes|kB)/s\n"
    assert done.returncode == 0 and re.fullmatch(line, done.stdout), done
    recomputed = warm.phalanx(
        "data", "prepare", str(tmp_path / "a.txt"), "-o", str(tmp_path / "a"), "--tokenizer", str(tmp_path / "tok")
    )
    assert (
        recomputed.stdout
        == f"1 document, 19 tokens (18 bytes) -> {tmp_path}/a.bin; there already, of the same inputs and settings\n"
    ), recomputed
    done = warm.phalanx("data", "show", str(tmp_path / "a"), "--tokenizer", str(tmp_path / "tok"))
    assert "document 0, 19 tokens: Arma virumque cano" in done.stdout, done.stderr
    other = warm.phalanx("data", "show", str(tmp_path / "a"), "--tokenizer", "null:300")
    assert (
        "warning: " not in done.stdout
        and "made with another tokenizer" in other.stdout
        and "document 0, 19 tokens" in other.stdout
    )
    gone = warm.phalanx("data", "show", str(tmp_path / "b"))
    assert gone.returncode == 3 and "Traceback" not in gone.stderr and gone.stderr.startswith("data error: ")


# ---- ranks ---------------------------------------------------------------------------------------


def test_number_of_ranks(config, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert prepare(config, (), None).ranks == 1
    assert prepare(config, ("layout.tp=2", "layout.pp=2"), None).ranks == 4
    assert prepare(config, ("layout.tp=2",), 4).ranks == 4
    with pytest.raises(ConfigError, match="--ranks=0: must be >= 1"):
        prepare(config, (), 0)
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "1")
    assert prepare(config, (), None).placement == Placement(0, 0, 1, "")
    with pytest.raises(ConfigError, match="--ranks=2: has no effect where the ranks are already started"):
        prepare(config, (), 2)


def test_two_ranks_run(jobs):
    start("phalanx_test_jobs:note", {"folder": str(jobs)}, ranks=2)
    notes = [(jobs / str(rank)).read_text().split() for rank in range(2)]
    assert [n[:3] for n in notes] == [["0", "0", "2"], ["1", "1", "2"]] and notes[0][4] != notes[1][4]
    assert all(int(n[3]) >= 1 for n in notes) and SECRET not in os.environ


def test_two_ranks_meet(jobs):
    start("phalanx_test_jobs:add", {"folder": str(jobs)}, ranks=2)
    assert [(jobs / str(rank)).read_text() for rank in range(2)] == ["3.0", "3.0"]


@pytest.mark.parametrize(
    "kind, rank, code, text",
    [
        ("data", 1, 3, "rank 1 of 2: data error: wiki.bin is cut short"),
        (
            "numbers",
            -1,
            5,
            "numerical stop: the loss was NaN for 50 steps",
        ),  # a rank is named only if the other came too late to say it
        ("kill", 1, 6, "peer lost: rank 1 of 2 was killed by SIGKILL"),
        ("bug", 0, 1, "rank 0 of 2: KeyError: 'nothing'"),
        ("exit", 1, 4, "rank 1 of 2: ended with exit status 4"),
    ],
)
def test_a_failing_rank_is_named_and_its_code_kept(jobs, capfd, kind, rank, code, text):
    """The other one would sleep for ever: it is ended."""
    with pytest.raises(RankFailed) as raised:
        start("phalanx_test_jobs:fail", {"kind": kind, "rank": rank}, ranks=2)
    said = str(raised.value)
    assert raised.value.exit_code == code and (
        said == text or rank == -1 and said in (f"rank 0 of 2: {text}", f"rank 1 of 2: {text}")
    )
    err = capfd.readouterr().err
    assert ("Traceback" in err) == (kind == "bug")


def test_output_goes_to_files(jobs):
    with pytest.raises(RankFailed):
        start("phalanx_test_jobs:fail", {"kind": "bug", "rank": -1}, ranks=2, logs=jobs / "logs")
    written = sorted((jobs / "logs").rglob("stderr.log"))
    assert written and "KeyError: 'nothing'" in "".join(p.read_text() for p in written)


PARENT = """
import sys
from phalanx.cli.main import guarded
from phalanx.launch.local import start
sys.exit(guarded(lambda: start("phalanx_test_jobs:%s", {"folder": sys.argv[1]}, ranks=2)))
"""


def parent_with_ranks(jobs: Path, job: str, python: str | None = None) -> subprocess.Popen[str]:
    made = subprocess.Popen(
        [python or sys.executable, "-c", PARENT % job, str(jobs)], stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: all((jobs / str(rank)).exists() for rank in range(2)))
    return made


def wait_for(condition, limit: float = 120.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_the_ranks_are_waited_for(jobs, signum):
    parent = parent_with_ranks(jobs, "save_on_stop")
    parent.send_signal(signum)
    _, err = parent.communicate(timeout=120)
    assert parent.returncode == 75 and "step 3 is saved" in err and "Traceback" not in err
    assert [(jobs / f"saved-{rank}").read_text() for rank in range(2)] == [
        "1",
        "1",
    ]  # the first to end did not hurry the other


def test_a_signal_before_training_began(jobs):
    parent = parent_with_ranks(jobs, "early")
    parent.send_signal(signal.SIGTERM)
    _, err = parent.communicate(timeout=120)
    assert parent.returncode == 75 and "before training began" in err and "Traceback" not in err


def test_a_second_signal_ends_the_ranks_at_once(tmp_path, capsys):
    """The same signal twice within a second is one request: terminals and schedulers tell everybody, and repeat
    themselves."""
    rank = subprocess.Popen(
        [
            INTERPRETER,
            "-c",
            "import os, signal, time; signal.signal(signal.SIGTERM, lambda *a: os.write(1, b'told\\n')); "
            "print('ready', flush=True); [time.sleep(1) for _ in range(60)]",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert rank.stdout.readline() == "ready\n"
    (tmp_path / "rank-0.pid").write_text(str(rank.pid))
    with forwarded_signals(partial(signal_ranks, tmp_path)) as stops:
        os.kill(os.getpid(), signal.SIGTERM)
        stops.first += 60  # however slow this machine is, the second comes within a second
        os.kill(os.getpid(), signal.SIGTERM)
        assert rank.stdout.readline() == "told\n" and stops.at_once == 0 and rank.poll() is None
        stops.first -= 62
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.at_once == signal.SIGTERM and rank.wait(120) == -signal.SIGKILL
    said = capsys.readouterr().err
    assert said.count("stopping: waiting for the ranks to end") == said.count("stopping") == 1  # nothing is unsaved
    (tmp_path / "rank-0.unsaved").touch()
    with forwarded_signals(partial(signal_ranks, tmp_path)):
        os.kill(os.getpid(), signal.SIGTERM)
    assert "stopping: waiting for the ranks to save" in capsys.readouterr().err


def test_a_rank_saves_on_the_first_signal_and_ends_at_once_on_a_second():
    from phalanx.training.main import StopRequest

    def child(tell) -> int:
        pid = os.fork()
        if pid == 0:
            tell(StopRequest())
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def twice_at_once(stop):
        os.kill(os.getpid(), signal.SIGUSR1)
        stop._first += 60  # however slow this machine is, the second comes within a second
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(75 if stop.asked() else 1)

    def again_later(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        stop._first -= 2
        os.kill(os.getpid(), signal.SIGTERM)

    assert child(twice_at_once) == 75 and child(again_later) == 128 + signal.SIGTERM
    later, over = StopRequest(1000.0), StopRequest(-1.0)
    over.restore()
    later.restore()
    assert not later.asked() and over.asked()


def test_ranks_do_not_outlive_their_launcher(jobs):
    parent = parent_with_ranks(jobs, "save_on_stop", INTERPRETER)
    pids = [int((jobs / str(rank)).read_text().split()[4]) for rank in range(2)]
    parent.kill()
    parent.communicate(timeout=120)
    wait_for(lambda: not any(alive(pid) for pid in pids))


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_what_ranks_inherit():
    """Few threads unless the user says otherwise, loopback as their network whatever the user says, and a secret
    that is new each time."""
    first, second = (
        rank_environment({"GLOO_SOCKET_IFNAME": "eth0"}, 10_000),
        rank_environment({"OMP_NUM_THREADS": "7"}, 2),
    )
    assert first["OMP_NUM_THREADS"] == "1" and second["OMP_NUM_THREADS"] == "7"
    assert first["GLOO_SOCKET_IFNAME"] == first["NCCL_SOCKET_IFNAME"] == loopback() != "eth0"
    assert len(first[SECRET]) >= 32 and first[SECRET] != second[SECRET]


def test_verdict_finds_the_rank_that_began():
    def code_and_text(outcomes, *ended, world=3):
        failed = verdict(world, outcomes, ended)
        return failed and (failed.exit_code, str(failed))

    lost, data, late = (
        Outcome(0, 6, "peer lost: rank 1 is gone", 1.0),
        Outcome(1, 3, "data error: x", 2.0),
        Outcome(2, 4, "checkpoint error: y", 3.0),
    )
    stopped, bug = Outcome(0, 75, "preempted: step 3 is saved", 1.0), Outcome(1, 1, "KeyError: 3", 2.0)
    killed = (6, "peer lost: rank 1 of 3 was killed by SIGKILL")
    assert code_and_text([]) is None
    assert code_and_text([lost, data, late], Ended(0, 6, 1.0)) == (3, "rank 1 of 3: data error: x")
    assert code_and_text([lost], Ended(0, 6, 1.0), Ended(1, -9, 2.0)) == killed
    seen = Outcome(
        0,
        6,
        "peer lost: rank 1 (host a, process 7) is silent: stopped; last seen in step 3 at x.py:1 in f; a "
        "collective failed",
        1.0,
    )
    assert code_and_text([seen], Ended(0, 6), Ended(1, -9)) == (
        6,
        "peer lost: rank 1 of 3 was killed by SIGKILL, last seen in step 3 at x.py:1 in f",
    )
    assert code_and_text([], Ended(1, -9, 1.0), Ended(0, -9, 0.5, by_launcher=True)) == killed
    assert code_and_text([], Ended(2, -11, 2.0), Ended(1, -9, 1.0)) == killed  # the first by time
    assert code_and_text([data], Ended(0, -9, 3.0)) == (3, "rank 1 of 3: data error: x")
    assert code_and_text([data], Ended(0, -9, 1.0)) == (6, "peer lost: rank 0 of 3 was killed by SIGKILL")
    assert code_and_text([bug], Ended(0, -6, 3.0)) == (
        1,
        "rank 1 of 3: KeyError: 3",
    )  # NCCL and gloo abort when a peer is lost
    assert code_and_text([bug], Ended(0, -6, 1.0)) == (6, "peer lost: rank 0 of 3 was killed by SIGABRT")
    assert code_and_text([], Ended(0, -15)) == (6, "peer lost: rank 0 of 3 was killed by SIGTERM")
    assert code_and_text([bug], Ended(0, -15, 1.0), Ended(1, 1, 2.0)) == (1, "rank 1 of 3: KeyError: 3")
    assert code_and_text([data, Outcome(0, 3, "data error: x"), Outcome(2, 3, "data error: x")]) == (
        3,
        "data error: x",
    )  # all say it
    assert code_and_text([lost], Ended(0, 6)) == (6, "rank 0 of 3: peer lost: rank 1 is gone")
    assert code_and_text([stopped], world=1) == (75, "preempted: step 3 is saved")
    assert code_and_text([], Ended(2, 9)) == (9, "rank 2 of 3 ended with status 9 and said nothing")
    assert code_and_text([stopped, bug], Ended(1, 1, 2.0)) == (1, "rank 1 of 3: KeyError: 3")


# ---- worlds that others started ------------------------------------------------------------------

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_NODELIST": "gpu[03-04,9]",
    "SLURM_JOB_ID": "1234567",
}


def test_torchrun_and_slurm_worlds():
    assert read_placement({}) == (None, [])
    assert read_placement(TORCHRUN) == (Placement(3, 1, 4, "tcp://node7:29500"), [])
    assert read_placement({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == (Placement(3, 1, 4, "env://"), [])
    assert read_placement({"RANK": "0", "WORLD_SIZE": "1"}) == (Placement(0, 0, 1, ""), [])
    assert read_placement(SLURM) == (Placement(5, 1, 8, "tcp://gpu03:19567"), [])
    assert read_placement({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "9"})[0] == Placement(5, 1, 8, "tcp://x:9")
    batch_script = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}
    assert read_placement(batch_script) == (None, [])
    inside = {**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}  # torchrun inside an allocation
    assert read_placement(inside)[0] == Placement(3, 1, 4, "tcp://node7:29500")


@pytest.mark.parametrize(
    "env, name, value, because",
    [
        ({**TORCHRUN, "RANK": "5"}, "RANK", 5, {"WORLD_SIZE": 4}),
        ({**TORCHRUN, "RANK": "two"}, "RANK", "two", {}),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "LOCAL_RANK", "-1", {}),
        (
            {k: v for k, v in TORCHRUN.items() if k != "WORLD_SIZE"},
            "WORLD_SIZE",
            None,
            {k: v for k, v in TORCHRUN.items() if k != "WORLD_SIZE"},
        ),
        (
            {k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"},
            "MASTER_PORT",
            None,
            {k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"},
        ),
        ({**SLURM, "SLURM_PROCID": "8"}, "SLURM_PROCID", 8, {"SLURM_NTASKS": 8}),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT", "http", {}),
        ({**TORCHRUN, SECRET: "guess me"}, SECRET, "(not shown)", {"length": 8}),
    ],
)
def test_impossible_worlds(env, name, value, because):
    placement, [problem] = read_placement(env)
    assert placement is None and (problem.field, problem.value, problem.because, problem.where) == (
        name,
        value,
        because,
        "the environment",
    )


@pytest.mark.parametrize(
    "nodes, host", [("a", "a"), ("a,b", "a"), ("n[1-3,7],x", "n1"), ("n[07],x", "n07"), ("r1n[2-3]-ib", "r1n2-ib")]
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host


def test_a_run_joins_the_world_of_torchrun(jobs, config):
    """Two processes with torchrun's variables, without torchrun: each is one rank, and none starts others."""
    code = "import sys\nfrom phalanx.cli.main import run_ranks\nfrom phalanx.cli.setup import prepare\n"
    code += f"run_ranks('phalanx_test_jobs:add', prepare({config!r}, (), None), {{'folder': {str(jobs)!r}}}, None)"
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "RANK": str(r),
                "LOCAL_RANK": str(r),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
            },
        )
        for r in range(2)
    ]
    assert [r.wait(timeout=120) for r in ranks] == [0, 0]
    assert [(jobs / str(rank)).read_text() for rank in range(2)] == ["3.0", "3.0"]


# ---- lines for people ----------------------------------------------------------------------------


def test_log(tmp_path, capsys):
    assert pairs(step=100, loss="3.2101") == "step=100 loss=3.2101"
    assert (
        describe(DataError("x")) == "data error: x"
        and describe(PeerLost("y")) == "peer lost: y"
        and describe(ValueError("z")) == "ValueError: z"
    )
    log = Log(0, tmp_path / "a/log.txt")
    log.info("one"), log.once("two"), log.once("two"), log.close()
    lines = (tmp_path / "a/log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["one", "warning: two"]
    other = Log(3, tmp_path / "b/log.txt")
    other.info("silent"), other.error("loud")
    out, err = capsys.readouterr()
    assert out == "one\n" and err == "warning: two\nrank 3: loud\n" and not (tmp_path / "b").exists()


def test_kernels_are_compiled_as_they_were_tested():
    """Products and sums are fused in every version of Triton, also where it would warn that its default will change."""
    pytest.importorskip("triton")
    code = """
from phalanx.cli.main import main
try:
    main(["--version"])
except SystemExit:
    from triton.knobs import language
    fused = getattr(language, "fp_fusion_enabled", lambda asked: language.default_fp_fusion)
    print("fused", fused(None))
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_DEFAULT_FP_FUSION"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert "fused True" in done.stdout, done.stdout + done.stderr
