"""Manifests of Kubernetes: against its published schemas (kubernetes-validate, strict) and Kubeflow's models of JobSet
and TrainJob. What a server does with them: a small one over HTTP that keeps to the API's paths, statuses and schemas
(tests/launch/kube_server.py), because no real one can be installed here."""

from __future__ import annotations

import copy
import itertools
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import certifi
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result
from kubeflow_trainer_api import models

from phalanx.base.placement import Placement
from phalanx.cli.main import cli
from phalanx.launch import kube_pod, network
from phalanx.launch.env import read_placement
from phalanx.launch.programs import NoScheduler, SchedulerRefused
from tests.harness.warm import ROOT
from tests.launch.kube_server import QUEUE, KubeServerStub

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
CRDS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
CONFIG = """\
# blank lines and what a shell or YAML would read otherwise: $(HOME) 'a' "b" \\n é

model: {family: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
train: {steps: 6, global_batch: 32, micro_batch: 1, seq_length: 16, device: cpu}
data: {mock: true}
dir: runs/First_run
"""  # noqa: E501
FULL = """\
gpus_per_node: 2
cpus_per_node: 96
memory: 1500G
mounts: [runs:/runs, corpus:/data]
queue: team-a
topology: topology.kubernetes.io/rack
rdma: {rdma/ib: 2}
user: 1000
interface: eth0
environment: {NCCL_DEBUG: WARN, A: "$(B) c"}
secrets: {HF_TOKEN: hugging-face/token}
setup: ["ulimit -n 65536"]
"""
LEAST = "mounts: [runs:/runs]\n"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "cluster.yaml").write_text(FULL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-config"))
    return tmp_path


def launched(*words: str, **env: str) -> Result:
    typed = ["launch", "k8s", "run.yaml", "--image", "example.org/phalanx:1", *words]
    with patch.object(sys, "argv", ["phalanx", *typed]):
        return CliRunner().invoke(cli, typed, env=env)


def manifest(*words: str) -> list[dict]:
    done = launched("--dry", *words)
    assert done.exit_code == 0, repr(done.exception)
    return list(yaml.safe_load_all(Path("run.k8s.yaml").read_text()))


def of_kind(documents: list[dict], kind: str) -> dict:
    [found] = [document for document in documents if document["kind"] == kind]
    return found


def jobs_in(document: dict) -> list[dict]:
    """Every Job that a document holds, as an object of its own."""
    if document["kind"] == "Job":
        return [document]
    spec = document["spec"]["template"]["spec"] if document["kind"] == "TrainingRuntime" else document["spec"]
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "of-set"}, "spec": job["template"]["spec"]}
        for job in spec.get("replicatedJobs", [])
    ]


def validate(document: dict, version: str) -> None:
    """Raises unless the published schemas take the document, and know every key of it."""
    if document["kind"] in CRDS:
        read = CRDS[document["kind"]].from_dict(copy.deepcopy(document))
        unknown = read.to_dict()
        assert unknown == document, "a key that the model does not know"
    else:
        kubernetes_validate.validate(document, version, strict=True)
    if document["kind"] in ("Job", "JobSet", "TrainingRuntime"):
        for job in jobs_in(document):
            kubernetes_validate.validate(job, version, strict=True)


@pytest.mark.parametrize("cluster", [FULL, LEAST])
@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_the_published_schemas_take_every_manifest(place, kind, cluster):
    (place / "cluster.yaml").write_text(cluster)
    documents = manifest("--nodes", "2", "--kind", kind)
    for document, version in itertools.product(documents, VERSIONS):
        validate(document, version)


def test_the_published_schemas_take_a_range_of_nodes(place):
    documents = manifest("--nodes", "1-2", "--at", "4:layout.tp=2")
    assert [document["kind"] for document in documents][1:] == [
        "Service",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "Job",
    ]
    for document, version in itertools.product(documents[2:], VERSIONS):
        validate(document, version)


@pytest.mark.parametrize(
    "kind, change",
    [
        ("job", lambda job: job["spec"].update(completion_mode="Indexed")),
        ("job", lambda job: job["spec"].update(completions="two")),
        ("job", lambda job: job["spec"]["podFailurePolicy"]["rules"][0].pop("action")),
        ("jobset", lambda jobset: jobset["spec"]["failurePolicy"]["rules"][0].update(onExitCodes=[2])),
        ("jobset", lambda jobset: jobset["spec"]["replicatedJobs"][0]["template"]["spec"].update(backoffLimits=0)),
        ("trainjob", lambda train: train["spec"]["trainer"].update(numNodes="two")),
        ("trainjob", lambda train: train["spec"]["runtimePatches"][0].pop("manager")),
        ("trainjob", lambda train: train["spec"].update(podTemplateOverrides=[])),
    ],
)
def test_the_schemas_refuse_wrong_manifests(place, kind, change):
    workload = of_kind(manifest("--kind", kind), {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[kind])
    change(workload)
    for version in (VERSIONS[0], VERSIONS[-1]):
        with pytest.raises(Exception, match="(?i)required|unexpected|does not know|type|valid"):
            validate(workload, version)


def test_an_nvlink_domain_needs_a_kubernetes_that_has_its_claims(place):
    documents = manifest("--nodes", "2", "cluster.nvlink_domain=true")
    job, domain = of_kind(documents, "Job"), of_kind(documents, "ComputeDomain")
    for version in VERSIONS[1:]:
        validate(job, version)
    with pytest.raises(kubernetes_validate.ValidationError, match="resourceClaimTemplateName"):
        validate(job, "1.30")
    # the CRD of NVIDIA's DRA driver: spec.channel.resourceClaimTemplate.name, and numNodes >= 0
    assert domain["spec"] == {"numNodes": 2, "channel": {"resourceClaimTemplate": {"name": "first-run-nvlink"}}}
    pod = job["spec"]["template"]["spec"]
    [claim] = pod["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == "first-run-nvlink"
    assert pod["containers"][0]["resources"]["claims"] == [{"name": claim["name"]}]


# ---- what the manifests say ----------------------------------------------------------------------


def pod_of(documents: list[dict]) -> dict:
    [job] = [job for document in documents if document["kind"] != "TrainJob" for job in jobs_of(document)]
    return job["spec"]["template"]


def jobs_of(document: dict) -> list[dict]:
    return jobs_in(document) if document["kind"] in ("Job", "JobSet", "TrainingRuntime") else []


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_no_pod_has_rights_that_it_does_not_need(place, kind):
    pod = pod_of(manifest("--kind", kind))["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"] | {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000} == pod["securityContext"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(key in pod for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert not any("hostPath" in volume for volume in pod["volumes"])
    shared = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/tmp", "/dev/shm"} <= shared
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2", "rdma/ib": "2", "memory": "1500Gi"}
    assert pod["terminationGracePeriodSeconds"] == 120


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_what_becomes_of_each_exit_code(place, kind):
    """The first rule that matches counts, as Kubernetes documents it."""
    documents = manifest("--nodes", "2", "--kind", kind, "cluster.max_restarts=3")
    [job] = [job for document in documents for job in jobs_of(document)]

    def action(code: int, disrupted: bool = False) -> str:
        for rule in job["spec"]["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes is not None and codes["operator"] == "In" and code in codes["values"]:
                return str(rule["action"])
            if disrupted and any(found["type"] == "DisruptionTarget" for found in rule.get("onPodConditions", [])):
                return str(rule["action"])
        return "Count"

    assert {code: action(code) for code in (1, 2, 3, 4, 5, 6, 7, 8, 75, 137)} == {
        **dict.fromkeys((2, 3, 4, 5, 7, 8), "FailJob"),
        **dict.fromkeys((1, 6, 137), "Count"),
        75: "Ignore",
    }
    assert action(137, disrupted=True) == "Ignore" and action(4, disrupted=True) == "FailJob"
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    if kind == "job":
        assert job["spec"]["backoffLimit"] == 6
        return
    [owner] = [document for document in documents if document["kind"] in ("JobSet", "TrainingRuntime")]
    spec = owner["spec"] if kind == "jobset" else owner["spec"]["template"]["spec"]
    assert job["spec"]["backoffLimit"] == 0 and spec["failurePolicy"]["maxRestarts"] == 3
    [rule] = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_queue_and_topology_are_where_kueue_reads_them(place, kind):
    documents = manifest("--kind", kind, "--queue", "team-b")
    workload = of_kind(documents, {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[kind])
    assert workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-b"
    if kind == "trainjob":
        [patch] = workload["spec"]["runtimePatches"]
        [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        template = job["template"]["spec"]["template"]
    else:
        template = pod_of(documents)
    near = template["metadata"]["annotations"]["kueue.x-k8s.io/podset-preferred-topology"]
    assert near == "topology.kubernetes.io/rack"


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_each_pod_finds_its_place(place, kind):
    """With the variables of the manifest and the one that the Job controller sets."""
    documents = manifest("--nodes", "2", "--kind", kind)
    [container] = pod_of(documents)["spec"]["containers"]
    env = {row["name"]: row["value"] for row in container["env"] if "value" in row}
    host = {"job": "first-run-0.first-run", "jobset": "first-run-node-0-0.first-run"}[kind]
    found, problems = read_placement({**env, "JOB_COMPLETION_INDEX": "1"})
    assert problems == [] and found == Placement(2, 0, 4, f"tcp://{host}:29500", local_size=2, starts=2)
    if kind == "job":
        service = of_kind(documents, "Service")
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
        assert pod_of(documents)["spec"]["subdomain"] == service["metadata"]["name"] == "first-run"


def test_the_config_travels_and_the_command_is_the_one_that_was_typed(place):
    documents = manifest("--nodes", "2", "layout.tp=2", "cluster.user=7", "--at", "4:train.steps=9")
    assert of_kind(documents, "ConfigMap")["data"] == {"run.yaml": CONFIG}
    [container] = pod_of(documents)["spec"]["containers"]
    shell, words = container["command"][:4], container["command"][4:]
    assert shell == ["/bin/bash", "-c", 'set -e\nulimit -n 65536\nexec "$@"', "bash"]
    assert words == ["phalanx", "train", "/etc/phalanx/run.yaml", "layout.tp=2", "cluster=null", "train.steps=9"]
    assert container["workingDir"] == "/runs"
    # $(NAME) would be replaced by Kubernetes
    assert {"name": "A", "value": "$$(B) c"} in container["env"]
    text = (place / "run.k8s.yaml").read_text()
    assert text.startswith("# phalanx launch k8s run.yaml --image example.org/phalanx:1 --dry --nodes 2 layout.tp=2 ")
    (place / "run.yaml").write_text(CONFIG + "# a tab:\t.\n")
    assert of_kind(manifest("--nodes", "2"), "ConfigMap")["data"]["run.yaml"].rstrip() == CONFIG + "# a tab:\t."


def test_secrets_are_references(place):
    done = launched("--dry", HF_TOKEN="hf_abc", PHALANX_RUN_SECRET="5d1c7e" * 8)
    assert done.exit_code == 0
    text = (place / "run.k8s.yaml").read_text()
    assert "hf_abc" not in text and "5d1c7e" not in text
    [container] = pod_of(list(yaml.safe_load_all(text)))["spec"]["containers"]
    references = {row["name"]: row["valueFrom"]["secretKeyRef"] for row in container["env"] if "valueFrom" in row}
    assert references == {
        "PHALANX_RUN_SECRET": {"name": "first-run", "key": "run-secret"},
        "HF_TOKEN": {"name": "hugging-face", "key": "token"},
    }


def test_a_pod_that_is_taken_away_asks_the_run_once_and_waits_for_it(place, tmp_path):
    """The hook's own words, with a process of ours in the place of process 1."""
    [container] = pod_of(manifest())["spec"]["containers"]
    [shell, flag, words] = container["lifecycle"]["preStop"]["exec"]["command"]
    saves = 'trap "echo asked >>asked" TERM; echo up; until [ -e saved ]; do sleep 0.05; done; cat asked'
    run = subprocess.Popen(["/bin/sh", "-c", saves], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "up\n"
    assert "TERM 1;" in words and "-0 1;" in words
    words = words.replace("TERM 1;", f"TERM {run.pid};").replace("-0 1;", f"-0 {run.pid};")
    with subprocess.Popen([shell, flag, words]) as hook:
        with pytest.raises(subprocess.TimeoutExpired):  # after it Kubernetes would send another signal
            hook.wait(1.5)
        (tmp_path / "saved").touch()
        assert run.communicate(timeout=120)[0] == "asked\n" and run.returncode == 0


# ---- a range of nodes ----------------------------------------------------------------------------


@pytest.fixture
def api(place) -> Iterator[tuple[KubeServerStub, dict[str, str], Path]]:
    """A server with TLS, the variables by which a pod finds it, and the files of the pod's account."""
    account = place / "account"
    account.mkdir()
    key, names = str(place / "key.pem"), ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*made, *names, "-keyout", key, "-out", account / "ca.crt"], check=True, capture_output=True)
    (account / "token").write_text("t0ken")
    (account / "namespace").write_text("research")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(account / "ca.crt", key)
    with KubeServerStub(tls) as server:
        yield server, {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}, account


def test_a_pod_asks_how_many_were_admitted_and_takes_the_layout_for_so_many(place, api, monkeypatch):
    """The command of the manifest, with the number that Kueue writes into the Job. Kueue's documented annotations."""
    server, env, account = api
    documents = manifest("--nodes", "1-2", "--at", "2:layout.tp=2", "cluster.setup=[]")
    job, role = of_kind(documents, "Job"), of_kind(documents, "Role")
    assert job["metadata"]["annotations"] == {
        "kueue.x-k8s.io/job-min-parallelism": "1",
        "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
    }
    assert role["rules"] == [
        {"apiGroups": ["batch"], "resources": ["jobs"], "resourceNames": ["first-run"], "verbs": ["get"]}
    ]
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "first-run" and pod["automountServiceAccountToken"] is True
    [container] = pod["containers"]
    assert "PHALANX_NODES" not in {row["name"] for row in container["env"]} and job["spec"]["completions"] == 2
    monkeypatch.setattr(kube_pod, "ACCOUNT", account)
    program = place / "bin" / "phalanx"
    program.parent.mkdir()
    ask = f"from phalanx.launch.kube_pod import *; print(pods_of_job('$2', {env}, Path('{account}')))"
    program.write_text(f"""#!/bin/sh
if [ "$1" = launch-pods ]; then exec {sys.executable} -c "{ask}"; fi
echo "$PHALANX_NODES" "$@"
""")
    program.chmod(0o755)
    words = [word.replace("$$(", "$(") for word in container["command"]]  # as Kubernetes does
    for count, layout in ((1, " layout.tp=2"), (2, "")):
        job["spec"]["completions"] = job["spec"]["parallelism"] = count
        server.kept["research", "Job", "first-run"] = job
        path = {"PATH": f"{program.parent}:/usr/bin:/bin", "PHALANX_RANKS_PER_NODE": "2", "PYTHONPATH": str(ROOT)}
        said = subprocess.run(words, env=path, capture_output=True, text=True)
        expected = f"{count} train /etc/phalanx/run.yaml cluster.setup=[] cluster=null{layout}\n"
        assert said.stdout == expected.replace("cluster.setup=[] ", ""), said.stderr


def test_a_pod_that_cannot_learn_how_many_there_are_says_why(api, monkeypatch):
    server, env, account = api
    with pytest.raises(SchedulerRefused, match="says nothing of Job first-run: 404 Job .* not found"):
        kube_pod.pods_of_job("first-run", env, account)
    with pytest.raises(NoScheduler, match="this is no pod with a service account"):
        kube_pod.pods_of_job("first-run", {}, account)
    (account / "token").write_text("another")
    with pytest.raises(SchedulerRefused, match="says nothing of Job first-run: 401 Unauthorized"):
        kube_pod.pods_of_job("first-run", env, account)
    monkeypatch.setattr(kube_pod, "PATIENCE_S", 0.05)
    monkeypatch.setattr(kube_pod, "PAUSE_S", 0.01)
    (account / "ca.crt").write_text(Path(certifi.where()).read_text())  # others than the server's
    with pytest.raises(SchedulerRefused, match="does not answer: .*certificate"):
        kube_pod.pods_of_job("first-run", env, account)


# ---- what cannot work ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ("--nodes", "1-2", "--kind", "jobset"),
            "--nodes='1-2': must be one number for this kind: only --kind job may",
        ),
        (("--nodes", "1-2", "cluster.queue=null", "cluster.topology=null"), "is a range, which needs a queue of Kueue"),
        (
            ("--nodes", "1-2", "--at", "3:layout.tp=2"),
            "--at='3:layout.tp=2': must be for a number of ranks that the job",
        ),
        (("--nodes", "0"), "--nodes='0': must be a number of nodes"),
        (("cluster.partition=gpu",), "cluster.partition='gpu': is not read by `phalanx launch k8s`"),
        (("cluster.time=24h",), "cluster.time='24h': is not read by `phalanx launch k8s`"),
        (("cluster.secrets.HF_TOKEN=~/.hf",), "cluster.secrets.HF_TOKEN='~/.hf': must be SECRET/KEY on Kubernetes"),
        (("cluster.mounts=[/nfs:/runs]",), "cluster.mounts='/nfs:/runs': must be CLAIM:INSIDE on Kubernetes"),
        (("cluster.mounts=[]",), "must lie in a volume of cluster.mounts"),
        (("dir=/elsewhere/run",), "dir='/elsewhere/run': must lie in a volume of cluster.mounts"),
        (("cluster.memory='0'",), "cluster.memory='0': must be an amount on Kubernetes"),
        (("dir=" + "x" * 62,), "must end in a shorter name: host names of pods have at most 63 characters"),
        (("--queue", "Team A"), "cluster.queue='Team A': must be a name as Kubernetes allows it"),
        (("cluster.image=null",), "cluster.image=None: must be set, by --image or in the config"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(place, words, said):
    if "cluster.image=null" in words:
        (place / "cluster.yaml").write_text("gpus_per_node: 2\n")
        done = CliRunner().invoke(cli, ["launch", "k8s", "run.yaml", "--dry"])
    else:
        done = launched("--dry", *words)
    assert said in str(done.exception), done.output
    assert not (place / "run.k8s.yaml").exists()


def test_slurm_has_no_place_for_keys_of_kubernetes(place):
    done = CliRunner().invoke(cli, ["launch", "slurm", "run.yaml", "--dry", "cluster.image=i", "cluster.queue=a"])
    said = str(done.exception)
    assert "cluster.queue='a': is not read by `phalanx launch slurm`" in said and "cluster.user=1000" in said


# ---- names of pods -------------------------------------------------------------------------------


def test_a_pod_waits_for_the_name_of_the_first(monkeypatch, capsys):
    """Which is made while the pods start, and after a restart is that of the pod before for a while."""
    answers: list[str | None] = [None, "192.0.2.7", "127.0.0.1"]
    own = next(address for _, address in network.interfaces())

    def resolved(host: str):
        answer = answers.pop(0) if answers else own
        if answer is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return None, None, None, "", (answer, 9)

    monkeypatch.setattr(network, "_resolved", resolved)
    monkeypatch.setattr(network, "PAUSE_S", 0.001)
    monkeypatch.setattr(network, "SAY_S", 0.0)
    network.wait_for_name("run-0.run", 0, 60.0)
    assert answers == []
    said = capsys.readouterr().err
    assert "warning: rank 0 waits for rank 0's name run-0.run (Name or service not known)" in said
    assert said.count("warning") == 1


def test_a_pod_does_not_wait_for_ever(monkeypatch):
    """The interface is asked for after that, which is the error that there was before."""
    monkeypatch.setattr(network, "PAUSE_S", 0.001)
    with pytest.raises(Exception, match="MASTER_ADDR='no-such-host.invalid': must be the name or address of rank 0's"):
        env = {"JOB_COMPLETION_INDEX": "1"}
        network.settle(Placement(1, 0, 2, "tcp://no-such-host.invalid:1"), env, 0.01)


# ---- submission ----------------------------------------------------------------------------------


@pytest.fixture
def server(place, monkeypatch):
    with KubeServerStub() as there:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": there.url}}],
            "users": [{"name": "u", "user": {"token": "t0ken"}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "research"}}],
        }
        (place / "kubeconfig").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(place / "kubeconfig"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield there


@pytest.mark.parametrize("kind, plural", [("job", "jobs"), ("jobset", "jobsets"), ("trainjob", "trainjobs")])
def test_a_submission_is_tried_dry_and_then_made_once(server, kind, plural):
    words = ("--nodes", "2", "--kind", kind, "--queue", QUEUE, "--submit")
    done = launched(*words)
    assert done.exit_code == 0 and done.output.startswith("# phalanx launch k8s run.yaml"), repr(done.exception)
    written = {(d["kind"], d["metadata"]["name"]) for d in yaml.safe_load_all(Path("run.k8s.yaml").read_text())}
    assert set(server.kept) == {("research", *key) for key in written | {("Secret", "first-run")}}
    assert len(server.kept["research", "Secret", "first-run"]["stringData"]["run-secret"]) == 64
    methods = [
        method for method, path, dry in server.changes if path.endswith(f"/{plural}/first-run") or method == "POST"
    ]
    assert methods[0] == "PATCH" and methods[-1] == "POST"
    dry = [dry for _, _, dry in server.changes]
    assert dry == sorted(dry, reverse=True) and sum(dry) == len(written)
    again = launched(*words)
    assert again.exit_code == 1 and getattr(again.exception, "exit_code", None) == 7
    assert "is in namespace research already: remove it with `kubectl delete" in str(again.exception)


def test_without_submit_the_server_only_tries(server):
    assert launched("--nodes", "2").exit_code == 0
    assert server.kept == {} and all(dry for _, _, dry in server.changes) and server.changes


def test_what_the_server_refuses_is_said_before_anything_is_made(server):
    server.absent = {"JobSet"}
    done = launched("--kind", "jobset", "--queue", "team-x", "--submit")
    said = str(done.exception)
    assert "cluster.queue='team-x': is no queue of this namespace" in said and QUEUE in said
    assert "kind='JobSet': is no kind of this cluster: nobody has installed jobset.x-k8s.io/v1alpha2 there" in said
    server.forbidden = {"jobs"}
    done = launched("--submit")
    assert "Job/first-run='research': is refused by the API server: jobs is forbidden" in str(done.exception)
    assert server.kept == {} and done.output == "", "the reason alone is shown"


def test_without_a_cluster_or_the_client_the_message_says_what_was_looked_for(place, monkeypatch):
    done = launched("--submit")
    assert "Kubernetes is not here: looked for the config of kubectl" in str(done.exception)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert "pip install 'phalanx[k8s]'" in str(launched("--submit").exception)


# ---- what became of it ---------------------------------------------------------------------------


def pod(name: str, number: int, **status: object) -> dict:
    labels = {"app.kubernetes.io/instance": "first-run", "batch.kubernetes.io/job-completion-index": str(number)}
    spec = {"nodeName": f"gpu-{number}"} if status["phase"] != "Pending" else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
        "status": status,
    }


def shown(*words: str) -> str:
    done = CliRunner().invoke(cli, list(words))
    assert done.exit_code == 0, repr(done.exception)
    return done.output


def test_status_and_logs_of_a_job_that_runs(server):
    """Pods in the order of their nodes, whatever their names; step and last line of the first."""
    assert "`phalanx status research/job/first-run` shows it" in launched("--nodes", "2", "--submit").output
    job = server.kept["research", "Job", "first-run"]
    job["metadata"] |= {"creationTimestamp": "2026-11-26T06:00:00Z", "uid": "u1"}
    since = "2026-11-26T06:01:00Z"
    ended = [{"name": "node", "state": {"terminated": {"exitCode": 6}}}]
    for made in (
        pod("first-run-1-abcde", 1, phase="Failed", startTime=since, containerStatuses=ended),
        pod("first-run-0-zyxwv", 0, phase="Running", startTime=since),
        pod("first-run-1-bcdef", 1, phase="Pending", conditions=[{"type": "PodScheduled", "status": "True"}]),
    ):
        server.kept["research", "Pod", made["metadata"]["name"]] = made
    server.logs = {"first-run-0-zyxwv": "a\nstep=7 loss=3.1\nsaved\n", "first-run-1-abcde": "warning: b\n"}
    assert shown("status", "research/job/first-run").splitlines() == [
        "job first-run  running, made 2026-11-26T06:00:00Z",
        f"pod first-run-0-zyxwv  running on gpu-0 since {since}",
        f"pod first-run-1-abcde  failed on gpu-1 since {since}  exit code 6",
        "pod first-run-1-bcdef  pending",
        "step  7",
        "last  saved",
    ]
    assert shown("logs", "job/first-run") == "a\nstep=7 loss=3.1\nsaved\nfirst-run-1-abcde: warning: b\n"
    assert shown("logs", "job/first-run", "-n", "1") == "first-run-1-abcde: warning: b\n"


def test_status_of_a_job_that_waits_says_why(server):
    launched("--nodes", "2", "--queue", QUEUE, "--submit")
    job = server.kept["research", "Job", "first-run"]
    job["spec"]["suspend"] = True
    job["metadata"] |= {"creationTimestamp": "2026-11-26T06:00:00Z", "uid": "u1"}
    why = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in flavor h100"
    condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": why}
    server.kept["research", "Workload", "job-first-run-1"] = {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "Workload",
        "metadata": {"name": "job-first-run-1", "ownerReferences": [{"uid": "u1"}]},
        "status": {"conditions": [condition]},
    }
    server.kept["research", "Event", "e1"] = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "e1"},
        "involvedObject": {"name": "first-run"},
        "reason": "Suspended",
        "message": "Job suspended",
        "lastTimestamp": "2026-11-26T06:00:01Z",
    }
    said = shown("status", "job/first-run")
    assert "job first-run  suspended, made" in said and f"Kueue: {why}" in said and "Suspended: Job suspended" in said
    job["spec"]["suspend"] = False
    unschedulable = "0/8 nodes are available: 8 Insufficient nvidia.com/gpu."
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": unschedulable}]
    server.kept["research", "Pod", "p0"] = pod("p0", 0, phase="Pending", conditions=conditions)
    waiting = [{"name": "node", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]
    server.kept["research", "Pod", "p1"] = pod("p1", 1, phase="Pending", containerStatuses=waiting)
    said = shown("status", "job/first-run")
    assert f"Unschedulable: {unschedulable}" in said and "ImagePullBackOff: no such image" in said
    no_program = {"exitCode": 128, "reason": "StartError", "message": 'exec: "phalanx": executable file not found'}
    ended = [{"name": "node", "state": {"terminated": no_program}}]
    server.kept["research", "Pod", "p2"] = pod("p2", 2, phase="Failed", containerStatuses=ended)
    server.logs["p2"] = ""
    said = shown("status", "job/first-run")
    assert 'pod p2  failed on gpu-2  exit code 128\n      StartError: exec: "phalanx": executable file' in said
    del server.kept["research", "Pod", "p2"]
    done = CliRunner().invoke(cli, ["logs", "job/first-run"])
    assert "no pod of job first-run has started" in str(done.exception)
    done = CliRunner().invoke(cli, ["status", "job/none"])
    assert "job none is not in namespace research" in str(done.exception)
    job["status"] = {
        "conditions": [{"type": "Failed", "status": "True", "message": "Container node failed with exit code 4"}]
    }
    assert "job first-run  failed, made" in (said := shown("status", "job/first-run")) and "exit code 4" in said
