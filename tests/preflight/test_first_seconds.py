"""What a run on several machines looks at by itself: its first seconds, and an address where nobody is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.base.placement import MEETING, SECRET, Placement
from phalanx.preflight.first_seconds import spans_machines
from phalanx.training import main as training  # imported before nodes are forked: they need not do it again
from tests.harness.cluster import Cluster, ClusterNode, Run, Start, cluster, replace_file, run_on
from tests.preflight.test_preflight import CONFIG

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two():
    assert training.train
    with cluster(2, rate="1gbit") as made:
        yield made


def train(made: Cluster, folder: Path, **more) -> Run:
    config = folder / "run.yaml"
    values = {**CONFIG, "data": {"mock": True}, "dir": str(folder / "run"), "log": {"report": False}}
    values["train"] = {**CONFIG["train"], **more.pop("settings", {})}
    config.write_text(json.dumps(values))
    env = {node.letter: {SECRET: "the secret of this run, 32 characters"} for node in made.nodes}
    for letter, changed in more.pop("env", {}).items():
        env[letter] |= changed
    return run_on(made, Start(["train", str(config)], folder, env=env, **more))


def test_good_machines_train(two, tmp_path):
    done = train(two, tmp_path)
    assert done.codes == {"a": 0, "b": 0} and "step=5 loss=" in done.said["a"], done.said
    assert "preflight: " not in done.said["a"] + done.said["b"] and "warning" not in done.said["a"], done.said


def other_code(node: ClusterNode) -> None:
    path = ROOT / "phalanx/nn/norm.py"
    replace_file(path, path.read_text() + "\n")


def test_a_machine_with_other_code_is_named_before_the_first_step(two, tmp_path):
    done = train(two, tmp_path, before={"b": other_code})
    assert done.codes == {"a": 8, "b": 8}, done.said
    assert "preflight: node-b: program: code of phalanx" in done.said["a"] and "step=" not in done.said["a"]
    assert not (tmp_path / "run/config.yaml").exists()


@pytest.mark.soak
def test_so_is_it_where_one_process_of_each_machine_starts_its_ranks(two, tmp_path):
    """The usual form of a job."""
    env = {node.letter: {"PHALANX_RANKS_PER_NODE": "2"} for node in two.nodes}
    done = train(two, tmp_path, before={"b": other_code}, env=env)
    assert done.codes == {"a": 8, "b": 8}, done.said
    assert "preflight: node-b: program: code of phalanx" in done.said["a"] and "step=" not in done.said["a"]


def test_an_address_where_nobody_is(two, tmp_path):
    """A wrong MASTER_ADDR: the host and the reason, long before train.timeout_s (ten minutes)."""

    def hurry(node: ClusterNode) -> None:
        from phalanx.launch import first_host

        assert first_host.SAY_S <= 25
        first_host.SAY_S = 1.0

    env = {"b": {"MASTER_ADDR": "10.79.0.77"}}
    done = train(two, tmp_path, env=env, before={"b": hurry}, missing=("a",), settings={"timeout_s": 5})
    assert done.codes == {"b": 6}, done.said
    warned = [line for line in done.said["b"].splitlines() if "cannot reach rank 0 at 10.79.0.77:29511" in line]
    assert warned and warned[0].startswith("warning: ") and "it goes on trying for train.timeout_s" in warned[0], (
        done.said
    )
    assert "timed out" in warned[0] or "No route to host" in warned[0], done.said


def test_a_name_that_does_not_resolve(two, tmp_path):
    done = train(two, tmp_path, env={"b": {"MASTER_ADDR": "nobody.invalid"}}, missing=("a",))
    assert done.codes == {"b": 2} and "MASTER_ADDR='nobody.invalid'" in done.said["b"], done.said


def test_one_machine_does_not_look():
    assert not spans_machines(Placement())
    assert not spans_machines(Placement(0, 0, 2, f"{MEETING}127.0.0.1:1/ranks"))
    assert not spans_machines(Placement(0, 0, 2, "tcp://127.0.0.1:1"))
    assert not spans_machines(Placement(0, 0, 8, "env://", local_size=8))
    assert spans_machines(Placement(0, 0, 16, "env://", local_size=8))
    assert spans_machines(Placement(0, 0, 2, "tcp://node-a:29511"))
    assert spans_machines(Placement(0, 0, 4, f"{MEETING}node-a:29511/ranks", local_size=2))  # its node started it
