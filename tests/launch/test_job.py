"""The description of a cluster's job and its batch script, without a scheduler: what is written, and what is refused.
tests/launch/test_slurm.py submits such scripts."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.cli.main import cli
from phalanx.config.cluster import seconds_of
from phalanx.launch.job import slowest_save
from phalanx.launch.slurm import slurm_time
from phalanx.launch.status import run_lines

CONFIG = """\
model: {family: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
train: {steps: 6, global_batch: 8, micro_batch: 1, seq_length: 16, device: cpu}
data: {mock: true}
"""  # noqa: E501


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launched(*words: str, **env: str) -> Result:
    return CliRunner().invoke(cli, ["launch", "slurm", "run.yaml", *words], env=env)


def options(script: str) -> list[str]:
    return [word for line in script.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]


def refusal(*words: str) -> str:
    done = launched("--dry", *words)
    assert done.exception is not None
    return str(done.exception)


def test_the_script_says_what_the_cluster_file_and_the_command_say(place):
    (place / "cluster.yaml").write_text("{partition: gpu, gpus_per_node: 2, memory: 500G, environment: {A: b c}}")
    assert (
        launched("--nodes", "2-4", "--time", "90m", "--dry", "cluster.account=me", "train.global_batch=24").exit_code
        == 0
    )
    script = (place / "run.sbatch").read_text()
    wanted = {"--partition=gpu", "--gpus-per-node=2", "--mem=500G", "--account=me", "--time=0-01:30:00", "--exclusive"}
    wanted |= {
        "--nodes=2-4",
        "--signal=TERM@120",
        "--requeue",
        "--open-mode=append",
        "--no-kill",
    }
    assert wanted <= set(options(script))
    assert "export A='b c'\n" in script and "export PHALANX_RANKS_PER_NODE=2\n" in script
    assert subprocess.run(["bash", "-n", "run.sbatch"], capture_output=True).stderr == b""


def test_a_container_and_a_chain(place):
    """pyxis gives a container what the job's environment has, but for what the image has set, unless it is named."""
    words = ("cluster.image=registry#phalanx:1", "cluster.mounts=[/data:/data]", "cluster.cpus_per_node=96")
    words += ("cluster.environment.NCCL_DEBUG=WARN", "cluster.secrets.HF_TOKEN=~/.hf")
    assert launched("--chain", "8", "--dry", "dir=runs/a", *words).exit_code == 0
    script = (place / "run.sbatch").read_text()
    assert {"--array=1-8%1", "--dependency=singleton", "--cpus-per-task=96"} <= set(options(script))
    [step] = [line.lstrip() for line in script.splitlines() if line.lstrip().startswith("srun ")]
    mounts = f"--container-mounts={place}:{place},{place}/runs/a:{place}/runs/a,/data:/data"
    own = ("RANKS_PER_NODE", "INTERFACE", "RANK_LOGS", "RUN_SECRET", "ENDS_AT", "HOST_FILE")
    named = f"--container-env={','.join(('NCCL_DEBUG', 'HF_TOKEN', *(f'PHALANX_{name}' for name in own)))}"
    assert {"--container-image=registry#phalanx:1", mounts, "--cpus-per-task=96", named} <= set(
        shlex.split(step.split(" bash -c")[0])
    )
    assert "scontrol requeue" not in script and "scancel --state=PENDING" in script


def test_a_preflight_with_spares_and_an_order_by_topology(place):
    (place / "topology.conf").write_text(
        "SwitchName=a Nodes=n[1-4]\nSwitchName=b Nodes=n[5-8]\nSwitchName=c Switches=a,b\n"
    )
    words = ("--nodes", "4", "--preflight", "--spares", "1", "--topology", "topology.conf", "--dry")
    assert launched(*words, "cluster.ranks_per_node=2").exit_code == 0
    script = (place / "run.sbatch").read_text()
    assert {"--nodes=5", "--switches=2@1:00:00"} <= set(options(script))
    assert f"topology={place}/topology.conf\n" in script and "nodes=$((SLURM_JOB_NUM_NODES - 1))\n" in script
    assert subprocess.run(["bash", "-n", "run.sbatch"], capture_output=True).stderr == b""
    assert launched(*words[:2], "--topology", "topology.conf", "--dry", "cluster.switches=1@2:00:00").exit_code == 0
    script = (place / "run.sbatch").read_text()
    assert "--switches=1@2:00:00" in options(script) and "where=()\n" in script and "--spares" not in script
    (place / "hosts.txt").write_text("n1\nn2\n")
    for refused, said in {
        ("--spares", "1"): "--spares goes with --preflight",
        ("--hosts", "hosts.txt", "--topology", "slurm"): "it takes neither --spares nor --topology",
        ("--nodes", "1-2", "--preflight", "--spares", "1"): "--spares=1: is for one number of nodes",
        ("--topology", "none.conf"): "none.conf",
    }.items():
        done = launched("--dry", *refused)
        assert done.exit_code != 0 and said in done.output + str(done.exception)


def test_one_file_says_how_the_job_starts_and_where_its_nodes_are(place):
    """The plan, the job and the order of its ranks read one file; launchers that have no place for it say so."""
    where = '{nodes: {"n[1-2]": {rack: a}, "n[3-4]": {rack: b}}, links: {rack: 50, cluster: 5}}'
    (place / "cluster.yaml").write_text(f"partition: gpu\ngpus_per_node: 1\ntopology: {where}\n")
    (place / "hosts.txt").write_text("n1\nn3\nn2\nn4\n")
    words = ("layout.tp=2", "train.device=cpu")
    assert launched("--nodes", "4", "--dry", *words).exit_code == 0
    script = (place / "run.sbatch").read_text()
    assert "--partition=gpu" in script and f"topology={place}/cluster.yaml\n" in script and "--switches=2@" in script
    order = ("plan", "run.yaml", "--ranks", "4", "--hosts", "hosts.txt", "--write-hosts", "ordered.txt", *words)
    done = CliRunner().invoke(cli, order)
    assert done.exit_code == 0 and "Order of the hosts (exchanges of a step)" in done.output, repr(done.exception)
    ordered = (place / "ordered.txt").read_text().split()
    assert {frozenset(ordered[:2]), frozenset(ordered[2:])} == {frozenset(("n1", "n2")), frozenset(("n3", "n4"))}
    assert launched("--dry", *words[1:]).exit_code == 0 and "topology=" not in (place / "run.sbatch").read_text()
    done = CliRunner().invoke(cli, ["launch", "ray", "run.yaml", "--dry"])
    refused = "topology='(positions of nodes)': is read by `phalanx plan` and `phalanx launch slurm` alone"
    assert refused in str(done.exception)


def test_the_section_cluster_stays_with_the_launch(place):
    """The ranks read the config without the file beside it, where parts of the section could be nonsense."""

    def started() -> str:
        task = ' bash -c "$task" task "$start" '
        [last] = [line for line in (place / "run.sbatch").read_text().splitlines() if task in line]
        return last.partition(task)[2]

    assert launched("--dry", "cluster.grace_s=30", "train.steps=9", "cluster.environment.A=b").exit_code == 0
    assert started() == 'phalanx train run.yaml train.steps=9 "${layout[@]}"'
    (place / "run.yaml").write_text(f"{CONFIG}cluster: {{time: 60s}}\n")
    (place / "cluster.yaml").write_text("grace_s: 30")
    assert launched("--dry", "train.steps=9").exit_code == 0
    assert started() == 'phalanx train run.yaml train.steps=9 cluster=null "${layout[@]}"'
    (place / "cluster.yaml").unlink()
    assert "must be longer than the time that is kept for the last save" in refusal("train.steps=9")


def test_no_secret_is_written(place):
    assert (
        launched(
            "--dry", "cluster.secrets.HF_TOKEN=~/.hf", PHALANX_RUN_SECRET="5d1c7e" * 8, HF_TOKEN="hf_abc"
        ).exit_code
        == 0
    )
    script = (place / "run.sbatch").read_text()
    assert 'export HF_TOKEN="$(< ~/.hf)"\n' in script and "5d1c7e" not in script and "hf_abc" not in script
    refused = refusal("cluster.environment.WANDB_API_KEY=abc123")
    assert "cluster.environment.WANDB_API_KEY='(not shown)': looks like a secret" in refused and "abc123" not in refused


@pytest.mark.parametrize(
    "words, said",
    [
        (("--nodes", "0"), "--nodes='0': must be a number of nodes, or a range of at most 64 such as 4-8"),
        (("--nodes", "4-2"), "--nodes='4-2': must be a number of nodes"),
        (("--time", "24"), "--time='24': must be a time with its unit"),
        (("--time", "100s"), "--time='100s': must be longer than the time that is kept for the last save"),
        (
            ("--nodes", "2", "--at", "4:layout.tp=2"),
            "--at='4:layout.tp=2': must be for a number of ranks that the job may",
        ),
        (("--nodes", "2", "--at", "layout.tp=2"), "--at='layout.tp=2': must be RANKS:OVERRIDES"),
        # only some numbers of nodes: 3 ranks cannot share 8 sequences
        (
            ("--nodes", "2-4"),
            "train.global_batch=8: must be a multiple of micro_batch * dp on 3 ranks, which --nodes allows",
        ),
        (("cluster.partitoin=gpu",), "is not a key of cluster. Valid near it: cluster.partition"),
        (("cluster.secrets.A-B=f",), "cluster.secrets.A-B='(not shown)': must be the name of an environment variable"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(place, words, said):
    assert said in refusal(*words).replace("which the range of nodes allows", "which --nodes allows")
    assert not (place / "run.sbatch").exists()


def test_a_layout_for_a_number_of_ranks(place):
    assert launched("--nodes", "2-4", "--dry", "--at", "3:layout.tp=1,train.global_batch=9").exit_code == 0
    assert "  3) layout=(layout.tp=1 train.global_batch=9) ;;\n" in (place / "run.sbatch").read_text()


def test_where_no_scheduler_is_the_message_says_what_was_looked_for(place):
    done = launched("--submit", PATH=str(place))
    assert done.exit_code == 1
    said = str(done.exception)
    assert "SLURM is not here: looked for sbatch, squeue, sinfo, scontrol, scancel in" in said and str(place) in said
    assert done.output == ""


def test_a_time_that_leaves_none_for_the_saves_that_the_run_makes(place):
    (place / "runs/default").mkdir(parents=True)
    (place / "runs/default/log.txt").write_text(
        "2026-11-26 10:00:00 saved a/step-00000010 (in 31.25 s; the run waited 0.1 s)\n"
        "2026-11-26 11:00:00 saved a/step-00000020 (in 400.50 s; the run waited 0.1 s)\n"
    )
    assert slowest_save(place / "runs/default/log.txt") == 400.5
    assert "must leave time for the last save, because the slowest save so far, in s=400.5" in refusal("--time", "10m")
    assert launched("--time", "1h", "--dry").exit_code == 0


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("24h", 86400),
        ("90m", 5400),
        ("2d", 172800),
        ("01:30:00", 5400),
        ("30:00", 1800),
        ("1-12", None),
        ("1-12:30", 131400),
        ("1-12:00:30", 129630),
        ("infinite", None),
        ("90", None),
    ],
)
def test_times(text, seconds):
    assert seconds_of(text) == seconds
    assert seconds is None or seconds_of(slurm_time(seconds)) == seconds


def test_status_shows_the_last_words_of_a_failed_job(tmp_path):
    """The run's own log is older than what ended it, or is not there."""
    logs = tmp_path / "logs"
    logs.mkdir()
    assert run_lines(tmp_path) == [f"run  {tmp_path}", "step  none yet"]
    (logs / "slurm-7.log").write_text("config error: a\nsrun: error: n1: task 0: Exited\n\nphalanx: exit code 2\n")
    (logs / "ray-7.txt").write_text("not a log of a job\n")
    assert run_lines(tmp_path)[2:] == ["last  phalanx: exit code 2"]
    assert run_lines(tmp_path, failed=True)[2:] == ["last  config error: a", "last  phalanx: exit code 2"]
    (tmp_path / "log.txt").write_text("12:00 step=7\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    assert run_lines(tmp_path)[1:] == ["step  7", "last  12:00 step=7"]
    assert run_lines(tmp_path, failed=True)[1:] == ["step  7", "last  config error: a", "last  phalanx: exit code 2"]
