"""`phalanx launch slurm` against a real SLURM (tests/harness/slurm.py): its scripts are submitted as they are, and
train on two nodes of this machine. Skipped with the reason where there can be no SLURM."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from phalanx.checkpoint.lock import FolderLock
from tests.harness.slurm import Slurm, missing, until
from tests.harness.warm import ROOT
from tests.launch.test_many_machines import prepare_here, same_bytes, write_texts

CONFIG = """\
model: {family: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
train: {steps: 6, global_batch: 8, micro_batch: 1, seq_length: 16, device: cpu, timeout_s: 60}
data: {mock: true}
log: {report: false}
"""  # noqa: E501
LONG = "train.steps=100000"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    made = Slurm()
    try:
        yield made.start()
    finally:
        made.close()


class Launched:
    """A run of this test: its folder, and `phalanx` on the login node."""

    def __init__(self, slurm: Slurm, place: Path):
        self.slurm, self.place, self.folder = slurm, place, place / "run"
        (place / "run.yaml").write_text(CONFIG)
        cluster = {"ranks_per_node": 1, "interface": "lo", "program": slurm.program, "grace_s": 30}
        (place / "cluster.yaml").write_text(json.dumps(cluster))

    def phalanx(self, *words: str):
        return self.slurm.warm.phalanx(*words, cwd=self.place, env=self.slurm.env)

    def launch(self, *words: str, code: int = 0) -> str:
        done = self.phalanx("launch", "slurm", "run.yaml", f"dir={self.folder}", *words)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, *words: str) -> str:
        said = self.launch("--submit", *words)
        return re.search(r"submitted job (\d+)", said)[1]

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.folder / "logs").glob("slurm-*.log")))

    def steps(self) -> list[int]:
        path = self.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row["step"] for row in rows if "loss" in row]

    def until_step(self, step: int) -> None:
        until(lambda: self.steps()[-1:] >= [step], lambda: f"step {step}: {self.slurm.what_is_there()}\n{self.log()}")

    def until_over(self, job: str, state: str) -> None:
        def over() -> bool:
            now = self.slurm.job(job).get("JobState")
            assert now in (state, "RUNNING", "COMPLETING", "PENDING", "CONFIGURING"), (now, self.log())
            return now == state

        until(over, lambda: f"job {job} {state}: {self.slurm.job(job)}\n{self.log()}")

    def again(self, job: str) -> None:
        """A job that was queued again waits two minutes, because a node refuses one that starts in the second in which
        its last start ended (its credential was revoked); here it waits three seconds."""
        until(
            lambda: self.slurm.job(job).get("JobState") == "PENDING",
            lambda: f"{job} queued again\n{self.slurm.job(job)}\n{self.log()}",
        )
        until(lambda: self.slurm.over_on_nodes(job), self.slurm.what_is_there)
        self.slurm.ask("scontrol", "update", f"jobid={job}", "starttime=now+3")


@pytest.fixture
def run(slurm, tmp_path) -> Iterator[Launched]:
    made = Launched(slurm, tmp_path)
    yield made
    slurm.ask("scancel", "--user=root", check=False)
    until(lambda: not slurm.ask("squeue", "--noheader"), lambda: f"no job is left {slurm.ask('squeue')}")
    for name in slurm.lost():
        slurm.start_node(name)
    until(lambda: slurm.states() == {"idle": 2}, lambda: f"both nodes idle again ({slurm.states()})")


def test_two_nodes_train_and_a_stopped_job_is_queued_again_and_goes_on(run):
    """One task on each node starts two ranks. TERM, as --signal sends it: saved, 75, queued again, continued. In a
    folder whose name shells and SLURM would read otherwise if it were not quoted."""
    run.folder = run.place / "it's 50%j of a run"
    job = run.submit("--nodes", "2", "--time", "20m", LONG, "cluster.ranks_per_node=2")
    run.until_step(3)
    refused = run.launch("--submit", "--nodes", "1", code=7)
    assert f"job {job} (running) already trains {run.folder}" in refused and "#!/bin/bash" not in refused
    run.slurm.ask("scancel", "--signal=TERM", job)
    run.again(job)
    stopped = run.steps()[-1]
    assert f"saved step {stopped}" in run.log()
    run.until_step(stopped + 2)
    said = run.phalanx("status", job)
    assert said.returncode == 0 and re.search(
        rf"job {job}  running  on n\[1-2\] since 20\S+, \S+ left\n", said.stdout
    ), said
    assert re.search(r"\nstep  \d+\nlast  \S+ \S+ step=\d+ loss=", said.stdout), said.stdout
    run.slurm.ask("scancel", "--full", job)
    run.until_over(job, "CANCELLED")
    assert run.steps() == list(range(1, run.steps()[-1] + 1))
    log = run.phalanx("logs", job).stdout
    assert "layout world=4 dp=4" in log and log.count("phalanx: start ") == 2 and "Traceback" not in log
    assert os.environ.get("PHALANX_RUN_SECRET") is None and "PHALANX_RUN_SECRET is not set" not in log


def test_what_the_scheduler_would_never_start_is_refused_before_it_is_submitted(run):
    missing_partition = run.launch("--submit", "-p", "mian", code=2)
    assert "cluster.partition='mian': is no partition of this cluster. Valid near it: main." in missing_partition
    more = run.launch("--submit", "--nodes", "3", "--time", "3h", "train.global_batch=12", code=2)
    assert "--nodes=3: must be <= the nodes of the partition, because partition='main', its nodes=2" in more
    assert "--time='0-03:00:00': must be <= the time limit of the partition" in more and "0-01:00:00" in more
    assert "must be longer than the time that is kept for the last save" in run.launch("--time", "30s", code=2)
    refused = run.launch("--submit", "cluster.cpus_per_node=64", code=2)
    assert "is refused by the scheduler" in refused and "Traceback" not in refused
    assert not any("#!/bin/bash" in said for said in (missing_partition, more, refused)), "the reason alone is shown"
    assert not run.folder.exists() and not run.slurm.ask("squeue", "--noheader")


def test_a_job_that_waits_says_why_and_one_that_is_gone_says_so(run):
    blocks = run.slurm.ask("sbatch", "--parsable", "-N2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    until(lambda: run.slurm.job(blocks).get("JobState") == "RUNNING", lambda: str(run.slurm.job(blocks)))
    job = run.submit("--nodes", "2", "--time", "20m")
    until(lambda: run.slurm.job(job).get("Reason") == "Resources", lambda: str(run.slurm.job(job)))
    said = run.phalanx("status", str(run.folder)).stdout
    why = "Resources: it is next, and waits for nodes to become free"
    assert said == f"job {job}  waits  {why}\nrun  {run.folder}\nstep  none yet\n"
    assert f"job {job} (pending) already trains {run.folder}" in run.launch("--submit", code=7)
    run.slurm.ask("scontrol", "update", "PartitionName=main", "MaxTime=1")
    try:
        until(lambda: run.slurm.job(job).get("Reason") == "PartitionTimeLimit", lambda: str(run.slurm.job(job)))
        said = run.phalanx("status", job).stdout
        assert "PartitionTimeLimit: it will never start: it asks for more time than its partition allows\n" in said
    finally:
        run.slurm.ask("scontrol", "update", "PartitionName=main", "MaxTime=60")
    run.slurm.ask("scancel", job)
    assert f"job {job}  cancelled  on no node" in run.phalanx("status", job).stdout
    gone = run.phalanx("status", "4000000")
    assert gone.returncode == 0 and "the scheduler no longer knows it" in gone.stdout
    nothing = run.phalanx("status", "no-such-run")
    assert nothing.returncode == 1 and "neither the number of a job nor the folder of a run" in nothing.stderr


class Prepared:
    """Texts that a job array of this test prepares, and one process alone."""

    def __init__(self, run: Launched, files: int, documents: int, out: str = "many"):
        self.run, self.place, self.out = run, run.place, out
        write_texts(self.place / "in", files, documents)
        prepare_here(str(self.place / "in"), "--tokenizer", "bytes", "-o", str(self.place / "alone"), "--workers", "1")

    def submit(self, *words: str) -> tuple[str, str]:
        """Numbers of the array's job and of the merge's."""
        typed = ("data", "prepare", "in", "--tokenizer", "bytes", "-o", self.out, "--on", "slurm", *words)
        done = self.run.phalanx(*typed)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"submitted \d+ shards as job (\d+), their merge as job (\d+)", done.stderr)
        return found[1], found[2]

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.place / f"{self.out}.shards").glob("job-*.log")))


def test_an_array_of_shards_and_its_merge_write_the_bytes_of_one_process(run):
    made = Prepared(run, 2, 300, "it's 50%j of many")
    _, merge = made.submit("--shards", "2")
    until(
        lambda: run.slurm.job(merge).get("JobState") == "COMPLETED", lambda: f"{run.slurm.what_is_there()}{made.log()}"
    )
    same_bytes(made.place / made.out, made.place / "alone")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_shard_whose_node_is_lost_is_done_again_and_one_that_is_no_text_ends_all(run):
    """What the lost one had finished is kept. Whether SLURM queues its tasks again or fails them, the merge has them
    all."""
    made = Prepared(run, 4, 200_000)
    shards, merge = made.submit("--shards", "12")
    until(lambda: list((made.place / "many.shards").glob("*.idx")), lambda: f"{run.slurm.what_is_there()}{made.log()}")
    run.slurm.kill_node("n2")
    until(lambda: run.slurm.states().get("down*"), run.slurm.what_is_there)
    run.slurm.start_node("n2")

    def merged() -> bool:
        for job in requeued(run.slurm):
            if run.slurm.over_on_nodes(job):
                run.slurm.ask("scontrol", "update", f"jobid={job}", "starttime=now+3", check=False)
        return (made.place / "many.idx").exists()

    until(merged, lambda: f"{run.slurm.what_is_there()}{made.log()}", 600)
    same_bytes(made.place / "many", made.place / "alone")
    with (made.place / "in" / "0.jsonl").open("a") as file:
        file.write('{"text": 5}\n')
    shards, merge = made.submit("--shards", "2", "--overwrite")
    until(lambda: not run.slurm.ask("squeue", "--noheader"), lambda: f"{run.slurm.what_is_there()}{made.log()}", 600)
    assert run.slurm.job(merge)["ExitCode"] == "3:0" and "ended with exit code 3, so nothing is merged" in made.log()


def requeued(slurm: Slurm) -> list[str]:
    """Tasks that wait for their time, by their own numbers."""
    rows = slurm.ask("squeue", "--noheader", "--states=pending", "--array", "-O", "JobID:|,Reason:|").splitlines()
    return [row.split("|")[0].strip() for row in rows if row.split("|")[1].strip() == "BeginTime"]


@pytest.mark.soak
def test_a_job_whose_time_is_over_has_saved_and_is_queued_again(run):
    job = run.submit("--nodes", "2", "--time", "1m", LONG)
    run.until_step(2)
    run.again(job)
    stopped = run.steps()[-1]
    assert f"saved step {stopped}" in run.log() and "exit code 75" in run.log()
    run.until_step(stopped + 2)
    run.slurm.ask("scancel", job)
    run.until_over(job, "CANCELLED")
    assert run.steps() == list(range(1, run.steps()[-1] + 1))


@pytest.mark.soak
def test_a_preempted_job_has_saved_and_goes_on_afterwards(run):
    job = run.submit("--nodes", "2", "--time", "30m", LONG)
    run.until_step(2)
    above = run.slurm.ask(
        "sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    run.again(job)
    stopped = run.steps()[-1]
    assert f"saved step {stopped}" in run.log()
    run.until_over(above, "COMPLETED")
    run.until_step(stopped + 2)
    run.slurm.ask("scancel", job)
    run.until_over(job, "CANCELLED")
    assert run.steps() == list(range(1, run.steps()[-1] + 1)) and "Traceback" not in run.log()


@pytest.mark.soak
def test_a_lost_node_is_a_failure_that_is_started_again(run):
    job = run.submit("--nodes", "2", "--time", "30m", LONG, "checkpoint.interval=4")
    run.until_step(6)
    run.slurm.kill_node("n2")
    until(lambda: "failure 1 of at most 10" in run.log(), run.log)
    assert "peer lost" in run.log()
    run.slurm.start_node("n2")
    stopped = run.steps()[-1]
    run.again(job)
    run.until_step(stopped + 2)
    run.slurm.ask("scancel", job)
    run.until_over(job, "CANCELLED")
    assert run.steps() == list(range(1, run.steps()[-1] + 1))


@pytest.mark.soak
@pytest.mark.parametrize(
    "override, code, said",
    [
        ("checkpoint.load=/no/such/checkpoint", 4, "checkpoint.load='/no/such/checkpoint': does not exist"),
        ("data.paths=[/no/such/tokens]", 3, "/no/such/tokens"),
        ("cluster.environment.MASTER_ADDR=no-such-host", 2, "MASTER_ADDR='no-such-host': must be the name or address"),
        ("optim.lr=1e38", 5, "step"),
        ("train.steps=7", 7, "folder in use: another run writes to"),
    ],
)
def test_an_end_that_would_repeat_itself_is_not_queued_again(run, override, code, said):
    words = {5: ("optim.clip_grad=0", "optim.schedule=constant", "train.max_skipped=3", "train.steps=50")}
    if code == 3:
        (run.place / "run.yaml").write_text(CONFIG.replace("data: {mock: true}", ""))
    with FolderLock(run.folder) if code == 7 else nullcontext():  # as of a run that somebody has started by hand
        if code == 7:
            said_how = run.launch("--nodes", "2", override)
            start = re.search(r"or `(mkdir -p \S+ && sbatch) (\S+)`", said_how)
            job = run.slurm.ask("bash", "-c", f"cd {run.place} && {start[1]} --parsable {start[2]}")
        else:
            job = run.submit("--nodes", "2", override, *words.get(code, ()))
        run.until_over(job, "FAILED")
    assert run.slurm.job(job)["ExitCode"] == f"{code}:0" and run.slurm.job(job)["Restarts"] == "0"
    assert said in run.log() and f"exit code {code}: the same start would end in the same way" in run.log()


@pytest.mark.soak
@pytest.mark.parametrize("checked", [(), ("--preflight",)])
def test_nodes_without_the_program_end_the_job(run, checked):
    job = run.submit("--nodes", "2", "cluster.program=no-such-phalanx", *checked)
    run.until_over(job, "FAILED")
    assert run.slurm.job(job)["ExitCode"] == "127:0" and run.slurm.job(job)["Restarts"] == "0"
    why = "no node has the program no-such-phalanx (exit code 127), so the job is not queued again"
    assert why in run.log() and why in run.phalanx("status", job).stdout


BY_HAND = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks=4 --output={log}
export PHALANX_INTERFACE=lo PHALANX_RUN_SECRET=0123456789abcdef
srun {words}
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    "words, world",
    [
        ("--ntasks-per-node=2 {phalanx} {arguments}", 4),
        ("-w n2 -n1 {phalanx} {arguments} : -w n1 -n2 {phalanx} {arguments}", 3),
    ],
    ids=["a task for each rank", "a heterogeneous step"],
)
def test_scripts_of_ones_own(run, words, world):
    """One task for each rank, and a step of two kinds of nodes, whose first task is on the second node of the list."""
    log, script = run.folder / "logs/slurm-own.log", run.place / "own.sbatch"
    log.parent.mkdir(parents=True)
    arguments = f"train {run.place}/run.yaml dir={run.folder} train.global_batch=12 cluster=null"
    step = words.format(phalanx=run.slurm.program, arguments=arguments)
    script.write_text(BY_HAND.format(log=log, words=step))
    job = run.slurm.ask("sbatch", "--parsable", str(script))
    run.until_over(job, "COMPLETED")
    assert f"layout world={world} " in run.log() and run.steps() == list(range(1, 7)), run.log()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_chain_of_jobs_goes_on_where_the_last_one_stopped_and_ends_with_the_run(run):
    job = run.submit("--nodes", "2", "--chain", "3", "train.steps=150")
    run.until_step(2)
    run.slurm.ask("scancel", "--signal=TERM", f"{job}_1", check=False)  # it fails if the job ends meanwhile
    until(lambda: run.steps()[-1:] == [150] and not run.slurm.ask("squeue", "--noheader"), run.log, 600)
    assert run.steps() == list(range(1, 151))
    logs = sorted(path.name for path in (run.folder / "logs").glob("slurm-*.log"))
    assert logs == [f"slurm-{job}_1.log", f"slurm-{job}_2.log"]
    assert run.phalanx("logs", f"{job}_2").stdout.count("phalanx: start ") == 1


@pytest.mark.soak
def test_a_range_of_nodes_takes_what_is_free_with_a_layout_for_each_number_of_ranks(run):
    blocks = run.slurm.ask(
        "sbatch", "--parsable", "-w", "n2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600", "--time=20"
    )
    until(lambda: run.slurm.job(blocks).get("JobState") == "RUNNING", lambda: str(run.slurm.job(blocks)))
    words = ("--nodes", "1-2", "--at", "4:layout.tp=2", "cluster.ranks_per_node=2", LONG)
    job = run.submit(*words)
    run.until_step(2)
    assert "layout world=2 dp=2 cp=1 tp=1" in run.log()
    run.slurm.ask("scancel", blocks)
    run.until_over(blocks, "CANCELLED")
    until(lambda: run.slurm.states().get("idle") == 1, run.slurm.what_is_there)
    run.slurm.ask("scancel", "--signal=TERM", job)
    run.again(job)
    stopped = run.steps()[-1]
    run.until_step(stopped + 2)
    assert "layout world=4 dp=2 cp=1 tp=2" in run.log()
    run.slurm.ask("scancel", job)
    run.until_over(job, "CANCELLED")
    assert run.steps() == list(range(1, run.steps()[-1] + 1))


TOPOLOGY = """\
SwitchName=s1 Nodes=n1,n3
SwitchName=s2 Nodes=n2,n4,n5
SwitchName=top Switches=s[1-2]
"""


@pytest.fixture
def five(tmp_path) -> Iterator[Launched]:
    """A cluster of its own: five nodes on two switches, of which n4 lets a process open too few files."""
    if why := missing():
        pytest.skip(why)
    made = Slurm(("n1", "n2", "n3", "n4", "n5"), TOPOLOGY, {"n4": 500})
    try:
        run = Launched(made.start(), tmp_path)
        # not the program that other tests have: its processes have the limits of the server that forks them
        program = f"env PYTHONPATH={ROOT} {sys.executable} -m phalanx"
        (tmp_path / "cluster.yaml").write_text(json.dumps({"interface": "lo", "program": program, "grace_s": 30}))
        yield run
    finally:
        made.close()


def until_ended(run: Launched, job: str) -> str:
    """The state in which it ends; five nodes start a dozen processes each."""

    def state() -> str:
        return run.slurm.job(job).get("JobState", "")

    until(lambda: state() in ("COMPLETED", "FAILED"), lambda: f"{run.slurm.what_is_there()}{run.log()}", 600)
    return state()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_preflight_leaves_the_bad_node_out_and_ranks_have_the_order_of_the_topology(five):
    """SLURM numbers the four that are left n1, n2, n3, n5; tp wants pairs on one switch."""
    words = (
        "--preflight",
        "--spares",
        "1",
        "--topology",
        "slurm",
        "layout.tp=2",
        "cluster.environment.SLURM_LABELIO=1",
    )
    job = five.submit("--nodes", "4", *words)
    assert "#SBATCH --nodes=5\n" in (script := (five.place / "run.sbatch").read_text())
    assert "#SBATCH --switches=2@1:00:00\n" in script
    assert until_ended(five, job) == "COMPLETED", five.log()
    log, [start] = five.log(), list((five.folder / "logs" / f"job-{job}").glob("start-*"))
    assert re.search(r"n4 .*bad", log) and "a process may open only 500 files" in log
    assert (start / "good.txt").read_text().split() == ["n1", "n2", "n3", "n5"]
    order = (start / "hosts.txt").read_text().split()
    assert sorted(order) == ["n1", "n2", "n3", "n5"] and {frozenset(order[:2]), frozenset(order[2:])} == {
        frozenset(("n1", "n3")),
        frozenset(("n2", "n5")),
    }
    assert re.search(r"Order of the hosts \(exchanges of a step\)\n.*axis +order given +order found", log), log
    assert five.steps() == list(range(1, 7)) and "layout world=4 dp=2 cp=1 tp=2" in log


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_too_few_good_nodes_end_the_job_before_ranks_start(five):
    job = five.submit("--nodes", "5", "--preflight", "train.global_batch=10")
    assert until_ended(five, job) == "FAILED", five.log()
    assert five.slurm.job(job)["ExitCode"] == "8:0" and "exit code 8: the same start would end" in five.log()
    assert five.steps() == [] and "n4" in five.log()


@pytest.mark.soak
def test_a_stop_while_nodes_are_checked_is_no_failure(run):
    """Asked before phalanx can hear it, and while it checks."""
    job = run.submit("--nodes", "2", "--preflight", LONG)
    # SLURM drops a signal for a step whose tasks have not begun
    until(lambda: run.slurm.tasks(job), lambda: f"a task\n{run.slurm.what_is_there()}{run.log()}")
    run.slurm.ask("scancel", "--signal=TERM", job)
    run.again(job)
    until(lambda: "phalanx: start 1 " in run.log() and run.slurm.listening(15000 + int(job) % 15000), run.log)
    run.slurm.ask("scancel", "--signal=TERM", job)
    run.again(job)
    run.until_step(2)
    log = run.log()
    assert log.count("stopped, and saved what there was (exit code 75)") == 2 and "failure 1" not in log, log
    assert log.count("2 nodes, none is bad") == 1
    run.slurm.ask("scancel", job)
    run.until_over(job, "CANCELLED")


@pytest.mark.soak
def test_a_stop_that_only_one_node_has_heard_while_nodes_are_checked_is_a_stop(run):
    """The shell of its task and what that runs end as by SLURM's signal; the other node calls it bad."""
    heard = "kill -TERM $PPID; exit 143"
    program = f"sh -c '[ $SLURMD_NODENAME = n1 ] || {{ {heard}; }}; exec {run.slurm.program} \"$@\"' sh"
    job = run.submit("--nodes", "2", "--preflight", f"cluster.program={json.dumps(program)}")
    until(lambda: "stopped, and saved what there was (exit code 75)" in run.log(), run.log)
    run.again(job)
    run.slurm.ask("scancel", job)
    log = run.log()
    assert "2 are needed and 1 are good" in log and "phalanx: exit code 8" not in log, log
    assert "failure 1" not in log


@pytest.mark.soak
def test_a_node_on_which_phalanx_does_not_start_is_left_out(run):
    """What its own task ends with says nothing of the others."""
    program = f"sh -c '[ $SLURMD_NODENAME = n1 ] || exit 127; exec {run.slurm.program} \"$@\"' sh"
    job = run.submit("--nodes", "1", "--preflight", "--spares", "1", f"cluster.program={json.dumps(program)}")
    run.until_over(job, "COMPLETED")
    assert re.search(r"n2 +bad +meeting: rank 1 did not come within 20 s", run.log()), run.log()
    assert run.steps() == list(range(1, 7)) and "layout world=1" in run.log()


@pytest.mark.soak
def test_ranks_have_the_order_of_the_host_file(run):
    """The step lines come from rank 0, on the second task, which SLURM started on n2."""
    (run.place / "hosts.txt").write_text("n2\nn1\n")
    job = run.submit("--nodes", "2", "--hosts", "hosts.txt", "cluster.environment.SLURM_LABELIO=1")
    run.until_over(job, "COMPLETED")
    assert re.search(r"^1: step=6 ", run.log(), re.MULTILINE) and not re.search(r"^0: step=", run.log(), re.MULTILINE)
