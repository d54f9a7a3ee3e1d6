"""`phalanx launch ray` against a real Ray cluster of this machine (tests/harness/ray_nodes.py), and its RayJob against
KubeRay's published schema."""

from __future__ import annotations

import json
import lzma
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator, ValidationError

from phalanx.cli.main import cli
from tests.harness.ray_nodes import RayNodes
from tests.harness.slurm import until

CONFIG = """\
model: {family: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
train: {steps: 6, global_batch: 8, micro_batch: 1, seq_length: 16, device: cpu, timeout_s: 60}
data: {mock: true}
log: {report: false}
"""  # noqa: E501
CLUSTER = {"interface": "lo", "environment": {"OMP_NUM_THREADS": 1}, "grace_s": 20, "max_restarts": 2}
WAIT_S = 400.0  # three nodes and a job are a dozen processes of Ray, on two cores
pytestmark = pytest.mark.timeout(900)
LONG = "train.steps=100000"
SCHEMA = Path(__file__).parents[1] / "fixtures" / "kuberay" / "ray.io_rayjobs.yaml.xz"


class Launched:
    """A run of this test, and `phalanx` beside the cluster."""

    def __init__(self, nodes: RayNodes, place: Path):
        self.nodes, self.place, self.folder = nodes, place, place / "run"
        (place / "run.yaml").write_text(CONFIG)
        (place / "cluster.yaml").write_text(json.dumps(CLUSTER))

    def phalanx(self, *words: str) -> subprocess.CompletedProcess[str]:
        typed = [self.nodes.python, "-m", "phalanx", *words]
        env = {**self.nodes.env, "RAY_API_SERVER_ADDRESS": self.nodes.url}
        return subprocess.run(typed, cwd=self.place, env=env, capture_output=True, text=True, timeout=200)

    def launch(self, *words: str, code: int = 0) -> str:
        done = self.phalanx("launch", "ray", "run.yaml", "--nodes", "2", f"dir={self.folder}", *words)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, *words: str) -> str:
        return re.search(r"submitted job (\S+);", self.launch("--submit", *words))[1]

    def rows(self, folder: Path | None = None) -> list[dict]:
        path = (folder or self.folder) / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if "loss" in row]

    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows()]

    def until_step(self, step: int) -> None:
        until(lambda: self.steps()[-1:] >= [step], lambda: f"step {step}\n{self.said()}", WAIT_S)

    def job(self) -> tuple[Any, str]:
        """Ray's own client, and the job's number."""
        from ray.job_submission import JobSubmissionClient

        note = json.loads((self.folder / "launch.json").read_text())
        return JobSubmissionClient(note["server"]), note["job"]

    def said(self) -> str:
        """What the job said, as Ray keeps it."""
        client, job = self.job()
        return client.get_job_logs(job)

    def until_over(self, state: str) -> None:
        client, job = self.job()
        until(lambda: client.get_job_status(job).is_terminal(), self.said, WAIT_S)
        assert client.get_job_status(job).value == state, self.said()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    pytest.importorskip("ray", reason="requirements-dev.txt has it")
    nodes = RayNodes(3, jobs=True)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def run(cluster, tmp_path) -> Iterator[Launched]:
    made = Launched(cluster, tmp_path)
    yield made
    client, job = made.job()
    client.stop_job(job)
    until(lambda: client.get_job_status(job).is_terminal(), made.said, WAIT_S)


@pytest.mark.soak
def test_two_nodes_train_to_the_bits_of_two_ranks_here(run):
    run.submit()
    run.until_over("SUCCEEDED")
    alone = run.phalanx("train", "run.yaml", "--ranks", "2", f"dir={run.place / 'alone'}", "cluster=null")
    assert alone.returncode == 0, alone.stderr
    losses = [(row["step"], row["loss"]) for row in run.rows()]
    assert losses == [(row["step"], row["loss"]) for row in run.rows(run.place / "alone")] and len(losses) == 6
    assert "layout world=2 dp=2" in run.phalanx("logs", str(run.folder)).stdout
    said = run.phalanx("status", str(run.folder)).stdout
    assert re.match(r"job raysubmit_\w+  succeeded since 20\S+\n", said) and "\nstep  6\n" in said


@pytest.mark.soak
@pytest.mark.parametrize("override, code", [("checkpoint.load=/no/such/checkpoint", 4)])
def test_an_end_that_would_repeat_itself_is_not_started_again(run, override, code):
    run.submit(override)
    run.until_over("FAILED")
    client, job = run.job()
    assert client.get_job_info(job).driver_exit_code == code and "started again" not in run.said()


@pytest.mark.soak
def test_a_job_that_waits_for_nodes_says_so(run):
    run.submit("cluster.cpus_per_node=64")
    until(lambda: "phalanx: waiting for" in run.said(), run.said, WAIT_S)
    said = run.phalanx("status", str(run.folder)).stdout
    why = r"      waiting for 2 nodes with 64 CPUs each \(the cluster has 0\)"
    assert re.match(rf"job raysubmit_\w+  running since 20\S+\n(      .*\n)?{why}\n", said), said


@pytest.mark.soak
def test_a_killed_node_is_a_failure_that_is_started_again_and_a_stopped_job_has_saved(run):
    """On the two that are left, in their layout. Then the job is stopped as anybody stops one: saved, and not started
    again."""
    run.submit("--nodes", "2-3", "--at", "2:layout.tp=2", LONG, "checkpoint.interval=5", "train.global_batch=12")
    run.until_step(7)
    assert "layout world=3 dp=3 cp=1 tp=1" in run.said()
    refused = run.launch("--submit", code=7)
    assert re.search(
        r"job raysubmit_\w+ \(running\) already trains .*cancel it with `ray job stop --address http", refused
    )
    lost = run.nodes.working()
    run.nodes.kill(lost[-1], at_once=True)
    until(lambda: "failure 1 of at most 2 that are started again" in run.said(), run.said, WAIT_S)
    assert "peer lost" in run.said()
    stopped = run.steps()[-1]
    run.until_step(stopped + 2)
    assert "layout world=2 dp=1 cp=1 tp=2" in run.said()
    client, job = run.job()
    client.stop_job(job)
    run.until_over("STOPPED")
    assert re.search(r"saved step \d+", run.phalanx("logs", str(run.folder)).stdout.split("failure 1")[-1])
    saved = max(int(path.name.removeprefix("step-")) for path in (run.folder / "checkpoints").glob("step-*"))
    assert saved == run.steps()[-1] and set(run.steps()) == set(range(1, saved + 1))


# ---- the RayJob ----------------------------------------------------------------------------------

PODS = """\
gpus_per_node: 2
cpus_per_node: 96
memory: 1500G
mounts: [runs:/runs]
queue: team-a
topology: topology.kubernetes.io/rack
rdma: {rdma/ib: 2}
user: 1000
environment: {NCCL_DEBUG: WARN, A: "it's"}
secrets: {HF_TOKEN: hugging-face/token}
setup: ["ulimit -n 65536"]
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG.replace("global_batch: 8", "global_batch: 16"))
    (tmp_path / "cluster.yaml").write_text(PODS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rayjob(*words: str) -> list[dict[str, Any]]:
    typed = ["launch", "ray", "run.yaml", "--kind", "rayjob", "--nodes", "2", "--image", "example.org/p:1", "--dry"]
    done = CliRunner().invoke(cli, [*typed, *words])
    assert done.exit_code == 0, repr(done.exception)
    return list(yaml.safe_load_all(Path("run.k8s.yaml").read_text()))


def closed(schema: Any) -> Any:
    """Objects take the keys that the schema names and no others, as the API server would drop them; what the schema
    leaves open stays open."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if "properties" in made and made.get("type") == "object" and "additionalProperties" not in made:
        made["additionalProperties"] = bool(made.get("x-kubernetes-preserve-unknown-fields"))
    return made


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    published = yaml.load(lzma.decompress(SCHEMA.read_bytes()), yaml.CSafeLoader)
    [version] = [one for one in published["spec"]["versions"] if one["name"] == "v1"]
    return Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))


@pytest.mark.parametrize("cluster", [PODS, "mounts: [runs:/runs]\n"])
def test_kuberays_schema_takes_the_manifest(place, schema, cluster):
    (place / "cluster.yaml").write_text(cluster)
    config, job = rayjob()
    schema.validate(job)
    assert config["kind"] == "ConfigMap"


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(entry_point="x"),
        lambda spec: spec.update(backoffLimit="none"),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].pop("maxReplicas"),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0].update(command="x"),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"].update(restart="Never"),
    ],
)
def test_the_schema_refuses_wrong_manifests(place, schema, change):
    _, job = rayjob()
    change(job["spec"])
    with pytest.raises(ValidationError):
        schema.validate(job)


def test_what_the_rayjob_says(place):
    """Its entry point reads what it was given; pods have no rights, and secrets are references."""
    _, job = rayjob("--at", "4:layout.tp=2", "cluster.max_restarts=3")
    spec = job["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:6] == ["phalanx", "launch-ray", "--nodes", "2", "/etc/phalanx/run.yaml", "layout.tp=2"]
    section = json.loads(words[6].removeprefix("cluster="))
    assert len(words) == 7 and section["max_restarts"] == 3 and section["setup"] == ["ulimit -n 65536"]
    assert json.loads(spec["runtimeEnvYAML"]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "150"}}
    assert spec["backoffLimit"] == 0 and spec["shutdownAfterJobFinishes"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    head, [nodes] = spec["rayClusterSpec"]["headGroupSpec"], spec["rayClusterSpec"]["workerGroupSpecs"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert {nodes["replicas"], nodes["minReplicas"], nodes["maxReplicas"]} == {2}
    for pod in (head["template"]["spec"], nodes["template"]["spec"]):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        [container] = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        references = {row["name"]: row["valueFrom"] for row in container["env"] if "valueFrom" in row}
        assert references == {"HF_TOKEN": {"secretKeyRef": {"name": "hugging-face", "key": "token"}}}
    [container] = nodes["template"]["spec"]["containers"]
    limits = {"nvidia.com/gpu": "2", "rdma/ib": "2", "memory": "1500Gi"}
    assert container["resources"] == {"requests": {"cpu": "96", "memory": "1500Gi"}, "limits": limits}
    assert nodes["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    text = Path("run.k8s.yaml").read_text()
    assert re.match(r"# phalanx .*\n# Written by phalanx ", text) and "run-secret" not in text


def test_a_ray_pod_that_is_taken_away_asks_the_run_and_waits_for_it(place, tmp_path):
    """The hook's own words, with a process that has the launcher's name. Others are not asked."""
    _, job = rayjob()
    [container] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    name = f"launch-node-of-{os.getpid()}"  # of this test alone: others have launchers too
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    assert "launch-nod[e]" in hook[-1]
    hook = [word.replace("launch-nod[e]", f"{name[:-1]}[{name[-1]}]") for word in hook]
    code = 'trap "echo asked >>asked" TERM; echo up; until [ -e saved ]; do sleep 0.05; done; cat asked'
    run = subprocess.Popen(["bash", "-c", code, name], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "up\n"
    with subprocess.Popen(hook) as asks:
        with pytest.raises(subprocess.TimeoutExpired):
            asks.wait(1.5)
        (tmp_path / "saved").touch()
        assert run.communicate(timeout=120)[0] == "asked\n" and asks.wait(120) == 0


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ("cluster.partition=gpu",),
            "cluster.partition='gpu': is not read by `phalanx launch ray`, only by `phalanx launch slurm`",
        ),
        (("--queue", "a"), "--queue goes with --kind rayjob"),
        (
            ("--kind", "rayjob", "--nodes", "1-2"),
            "must be one number: `phalanx launch ray --kind rayjob` starts all of",
        ),
        (
            ("--nodes", "1-3"),
            "train.global_batch=16: must be a multiple of micro_batch * dp on 3 ranks, which the range",
        ),
        (("--kind", "rayjob", "--address", "http://a:1"), "--address is that of a cluster that runs"),
        (
            ("--kind", "rayjob", "cluster.mounts=[runs:/runs]"),
            "cluster.mounts=['runs:/runs']: has no effect without cluster.image",
        ),
        (("cluster.time=24h",), "only by `phalanx launch slurm` and `phalanx launch ssh`"),
        (("cluster.user=5",), "only by `phalanx launch k8s` and `phalanx launch ray --kind rayjob`"),
        (("layout.tp=3",), "layout.tp"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(place, words, said):
    (place / "cluster.yaml").unlink()
    done = CliRunner().invoke(cli, ["launch", "ray", "run.yaml", "--dry", *words])
    assert done.exit_code != 0 and said in done.output + str(done.exception), done.output
    assert not list(place.glob("run.*.sh")) and not list(place.glob("run.k8s.yaml"))


def test_a_cluster_that_takes_no_jobs_is_one_line(place, monkeypatch):
    pytest.importorskip("ray", reason="requirements-dev.txt has it")
    (place / "cluster.yaml").unlink()
    done = CliRunner().invoke(cli, ["launch", "ray", "run.yaml", "--submit", "--address", "http://127.0.0.1:9"])
    assert "no Ray cluster takes jobs at http://127.0.0.1:9" in str(done.exception), repr(done.exception)
    assert done.output == "", "the reason alone is shown"
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    done = CliRunner().invoke(cli, ["launch", "ray", "run.yaml", "--submit"])
    assert "pip install 'phalanx[ray]'" in str(done.exception)
