"""`phalanx launch sky`: its task is read by the parser of SkyPilot itself, which `make soak` installs into an
environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from phalanx.base.placement import Placement
from phalanx.cli.main import cli
from phalanx.launch.env import read_placement

SKYPILOT = "skypilot==0.14.1"
CONFIG = """\
model: {family: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
train: {steps: 6, global_batch: 16, micro_batch: 1, seq_length: 16, device: cpu}
data: {mock: true}
dir: /runs/First_run
"""  # noqa: E501
FULL = """\
cpus_per_node: 96
memory: 1500G
image: example.org/phalanx:1
mounts: ["s3://corpus:/data", "shared:/runs"]
interface: eth0
environment: {NCCL_DEBUG: WARN, A: "$(B) 'c'"}
secrets: {HF_TOKEN: ~/.hf-token}
setup: ["pip install phalanx"]
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "cluster.yaml").write_text(FULL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launched(*words: str) -> Result:
    return CliRunner().invoke(cli, ["launch", "sky", "run.yaml", *words])


def task(*words: str) -> dict:
    done = launched(*words)
    assert done.exit_code == 0, repr(done.exception)
    return yaml.safe_load(Path("run.sky.yaml").read_text())


def test_what_the_task_says(place):
    made = task("--gpus", "16xH100", "--spot", "layout.tp=2", "cluster.user=null")
    assert (made["name"], made["num_nodes"], made["workdir"]) == ("first-run", 2, ".")
    assert made["resources"] == {
        "accelerators": "H100:8",
        "use_spot": True,
        "job_recovery": {"recover_on_exit_codes": [6, 75]},
        "cpus": "96+",
        "memory": "1500+",
        "image_id": "docker:example.org/phalanx:1",
    }
    assert made["file_mounts"] == {"/data": {"source": "s3://corpus", "mode": "MOUNT_CACHED"}}
    assert made["volumes"] == {"/runs": "shared"}
    assert made["envs"] == {"NCCL_DEBUG": "WARN", "A": "$(B) 'c'"}
    assert made["secrets"] == {"HF_TOKEN": None, "PHALANX_RUN_SECRET": None}
    text = Path("run.sky.yaml").read_text()
    assert text.startswith("# phalanx ") and "sky jobs launch --secret HF_TOKEN --secret PHALANX_RUN_SECRET" in text
    made = task("--gpus", "4xA100", "--cluster", "/dev/null", "train.global_batch=8")
    assert (made["num_nodes"], made["resources"]) == (1, {"accelerators": "A100:4"}) and "secrets" not in made


def test_each_machine_finds_its_place(place):
    """The task's own shell, with the variables that SkyPilot documents, up to what it starts."""
    script = task("--gpus", "32xH100", "cluster.setup=[]", "train.global_batch=32")["run"]
    assert script.rstrip().splitlines()[-1] == "exec phalanx train run.yaml train.global_batch=32"
    env = {
        "SKYPILOT_NODE_RANK": "3",
        "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
    }
    shown = subprocess.run(
        ["bash", "-c", script.replace("exec phalanx", "env #")],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
    )
    found = dict(line.split("=", 1) for line in shown.stdout.splitlines() if line.startswith(("PHALANX", "MASTER")))
    placement, problems = read_placement(found)
    assert problems == [] and found["PHALANX_INTERFACE"] == "eth0"
    assert placement == Placement(24, 0, 32, "tcp://10.0.0.1:29511", local_size=8, starts=8)


@pytest.mark.parametrize(
    "words, said",
    [
        (("--gpus", "12xH100"), "--gpus='12xH100': must be whole machines"),
        (("--gpus", "H100"), "--gpus='H100': must be how many GPUs of which kind"),
        (("--gpus", "8xH100", "--spot", "dir=runs/a"), "must be in object storage with --spot"),
        (("--gpus", "8xH100", "cluster.mounts=[x]"), "must be SOURCE:INSIDE on clouds"),
        (
            ("--gpus", "8xH100", "cluster.partition=a"),
            "is not read by `phalanx launch sky`, only by `phalanx launch slurm`",
        ),
        (("--gpus", "8xH100", "cluster.time=24h"), "is not read by `phalanx launch sky`"),
        (("--gpus", "8xH100", "--submit", "--dry"), "--dry launches nothing"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(place, words, said):
    done = launched(*words)
    assert done.exit_code != 0 and said in done.output + str(done.exception), done.output
    assert not list(place.glob("*.sky.yaml"))


def test_checkpoints_in_object_storage_are_enough_for_spot(place):
    pytest.importorskip("upath", reason="the extra s3")
    assert task("--gpus", "8xH100", "--spot", "dir=runs/a", "checkpoint.dir=s3://b/a")["resources"]["use_spot"]


def test_submission_calls_sky_with_secrets_that_are_in_no_file(place, monkeypatch):
    """A program `sky` that says how it was called."""
    (place / "bin").mkdir()
    (place / "bin" / "sky").write_text(
        '#!/bin/sh\necho "$@" >called\necho "$HF_TOKEN ${#PHALANX_RUN_SECRET}" >>called\n'
    )
    (place / "bin" / "sky").chmod(0o755)
    monkeypatch.setenv("HOME", str(place))
    (place / ".hf-token").write_text("hf_abc\n")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    missing = launched("--gpus", "16xH100", "--submit")
    assert "SkyPilot is not here: looked for sky in PATH; pip install 'phalanx[sky]'" in str(missing.exception)
    assert missing.output == "", "the reason alone is shown"
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    done = launched("--gpus", "16xH100", "--submit")
    assert done.exit_code == 0, repr(done.exception)
    words = "launch --down --cluster first-run --secret HF_TOKEN --secret PHALANX_RUN_SECRET run.sky.yaml"
    assert (place / "called").read_text() == f"{words}\nhf_abc 64\n"
    assert "hf_abc" not in Path("run.sky.yaml").read_text()
    (place / "bin" / "sky").write_text("#!/bin/sh\nexit 3\n")
    assert "sky ended with exit status 3" in str(launched("--gpus", "16xH100", "--submit").exception)


PARSE = """\
import sys, yaml, sky
task = sky.Task.from_yaml(sys.argv[1])
[resources] = task.resources
found = {"name": task.name, "nodes": task.num_nodes, "gpus": resources.accelerators, "spot": resources.use_spot}
print(yaml.safe_dump(found))
"""


@pytest.fixture(scope="module")
def skypilot(tmp_path_factory) -> Path:
    """A Python with SkyPilot: PHALANX_SKY_PYTHON, or one that is made here from the registry."""
    if given := os.environ.get("PHALANX_SKY_PYTHON"):
        return Path(given)
    folder = tmp_path_factory.mktemp("sky")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    done = subprocess.run(
        [folder / "bin" / "pip", "install", "--quiet", "--no-compile", SKYPILOT], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"{SKYPILOT} cannot be installed: {done.stderr[-300:]}")
    return folder / "bin" / "python"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("spot", [True, False])
def test_skypilots_own_parser_takes_the_task_and_refuses_a_wrong_key(place, skypilot, spot):
    def parsed() -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "HOME": str(place)}
        return subprocess.run(
            [skypilot, "-c", PARSE, "run.sky.yaml"], env=env, capture_output=True, text=True, timeout=300
        )

    task("--gpus", "16xH100", *(["--spot"] if spot else []))
    done = parsed()
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == {"name": "first-run", "nodes": 2, "gpus": {"H100": 8}, "spot": spot}
    text = Path("run.sky.yaml").read_text()
    for right, wrong in (("num_nodes:", "nodes:"), ("  accelerators:", "  accelerator:")):
        Path("run.sky.yaml").write_text(text.replace(right, wrong))
        refused = parsed()
        assert refused.returncode != 0 and wrong.strip(" :") in refused.stderr, refused.stderr
