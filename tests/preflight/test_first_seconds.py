"""What a run on several machines looks at by itself: its first seconds, and an address where nobody is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from phalanx.base.errors import ConfigError
from phalanx.base.placement import MEETING, SECRET, Placement
from phalanx.launch.network import CHECK_NODES, asks_for_checks
from phalanx.preflight.first_seconds import spans_machines
from phalanx.training import main as training  # imported before nodes are forked: they need not do it again
from tests.harness.cluster import Cluster, ClusterNode, Run, Start, cluster, mount, replace_file, run_on
from tests.preflight.ills import ILLS, Ill, lacking, no_rename, other_version
from tests.preflight.test_preflight import CONFIG, four, id_of, prepared, site  # noqa: F401  (fixtures)

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


@pytest.mark.soak
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


def after_training(made: Cluster, folder: Path, words: list[str], before: dict | None = None) -> Run:
    """A command of one rank on each machine, after a run there. Words that name something in `folder` mean that."""
    assert set(train(made, folder).codes.values()) == {0}
    shown = [str(folder / word) if (folder / word).exists() else word for word in words]
    env = {node.letter: {SECRET: "the secret of this run, 32 characters"} for node in made.nodes}
    return run_on(made, Start(shown, folder, env=env, before=before or {}))


@pytest.mark.soak
def test_good_machines_evaluate(two, tmp_path):
    done = after_training(two, tmp_path, ["eval", "run"])
    assert done.codes == {"a": 0, "b": 0} and "perplexity" in done.said["a"], done.said
    assert "preflight: " not in done.said["a"] + done.said["b"] and "warning" not in done.said["a"], done.said


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["bench", "step", "run.yaml", "--steps", "1", "--ranks", "2"], id="bench"),
        pytest.param(["eval", "run"], marks=pytest.mark.soak, id="eval"),
        pytest.param(["serve", "run", "--port", "0"], marks=pytest.mark.soak, id="serve"),
    ],
)
def test_machines_are_looked_at_for_other_verbs_too(two, tmp_path, words):
    done = after_training(two, tmp_path, words, {"b": other_code})
    assert done.codes == {"a": 8, "b": 8}, done.said
    assert "preflight: node-b: program: code of phalanx" in done.said["a"], done.said


# not among them: what a node refuses by itself before it meets the others, as a read-only folder and damaged files
NAMED = (
    "a port is open one way",
    "a firewall closes a node's ports",
    "an MTU is smaller",
    "large packets are lost on a link",
    "a clock is ahead",
    "another version of torch",
    "another code",
    "a full disk",
    "another folder",
    "locks that do not lock",
    "no rename",
    "no fsync",
    "few open files",
)


def another_set(site, node: ClusterNode) -> None:  # noqa: F811
    """A set of token files of as many bytes, in good order: another text was prepared on this node."""
    made = prepared(site.scratch / "other", word="other")
    for path in made.parent.iterdir():
        mount(path, site.data.parent / path.name.replace(made.name, site.data.name))


OWN = [Ill("another data set", "data", "c", "elsewhere", node=another_set)]


def train_on_four(site, ill: Ill | None = None, ranks: int = 1, env: Mapping[str, str] | None = None) -> Run:  # noqa: F811
    """`phalanx train` on four nodes, of one rank each, or of one process that starts `ranks`."""
    out = site.run.parent.parent / "out"
    every = {SECRET: "the secret of this run, 32 characters", **(env or {})}
    every |= {"PHALANX_RANKS_PER_NODE": str(ranks)} if ranks > 1 else {}
    words = [
        "train",
        str(site.config),
        "log.report=false",
        "train.timeout_s=30",
        f"train.global_batch={4 * ranks}",
    ]
    start = Start(words, out, env={node.letter: every for node in site.cluster.nodes})
    with contextlib.ExitStack() as during:
        if ill is not None and ill.change is not None:
            ill.change(site, start)
        if ill is not None and ill.node is not None:
            done = ill.node
            start.before = {ill.at: lambda node: done(site, node)}
        if ill is not None and ill.network is not None:
            during.enter_context(ill.network(site))
        ran = run_on(site.cluster, start)
    print(f"{ill.name if ill else 'none'}: {ran.seconds:.1f} s from the start of all nodes to the end of the last")
    return ran


def named(ran: Run, ill: Ill, site) -> None:  # noqa: F811
    """All ranks end with 8, a line names the node with the reason, no other node is named, and nothing is left."""
    who = ", ".join(f"node-{letter}" for letter in ill.nodes)
    assert set(ran.codes.values()) == {8}, ran.said
    for said in ran.said.values():
        reasons = [line.removeprefix("preflight: ") for line in said.splitlines() if line.count(": ") >= 2]
        reasons = [line for line in reasons if line.startswith("node-")]
        assert any(line.startswith(f"{who}: {ill.check}: ") and ill.words in line for line in reasons), said
        assert all(line.startswith(f"{who}: ") for line in reasons), said
        assert "step=" not in said and "Traceback" not in said, said
    assert not (site.run / "config.yaml").exists() and not list(site.run.glob(".preflight-*")), "files stay behind"


def test_a_port_that_is_closed_one_way_is_named_before_ranks_connect(site):  # noqa: F811
    """Without this, ranks would wait for each other for train.timeout_s, and nobody would be named."""
    ill = next(ill for ill in ILLS if ill.name == "a port is open one way")
    named(train_on_four(site, ill), ill, site)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("ill", [*OWN, *(ill for ill in ILLS if ill.name in NAMED)], ids=id_of)
def test_ills_are_named_before_ranks_connect(site, ill, ranks):  # noqa: F811
    """One task for each GPU, and one process on each node that starts its ranks."""
    if why := lacking(ill):
        pytest.skip(why)
    if ranks > 1 and ill.node is other_version:
        pytest.skip("the other version is that of one process, and ranks that it starts are new ones")
    if ranks > 1 and ill.node is no_rename:
        pytest.skip("no file at all can be renamed in these processes, those between a rank and its launcher included")
    named(train_on_four(site, ill, ranks), ill, site)


@pytest.mark.soak
def test_a_warning_is_no_reason_not_to_start(site):  # noqa: F811
    ill = next(ill for ill in ILLS if ill.name == "no locks")
    ran = train_on_four(site, ill)
    assert set(ran.codes.values()) == {0} and "step=5 loss=" in ran.said["a"], ran.said
    assert "warning: node-c: folder: no kernel locks" in ran.said["a"], ran.said["a"]


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_good_nodes_start_without_a_word(site, ranks):  # noqa: F811
    ran = train_on_four(site, ranks=ranks)
    assert set(ran.codes.values()) == {0} and "step=5 loss=" in ran.said["a"], ran.said
    assert not any(word in text for text in ran.said.values() for word in ("preflight", "warning")), ran.said
    assert not list(site.run.glob(".preflight-*")), "files stay behind"


@pytest.mark.soak
def test_they_can_be_left_out(site):  # noqa: F811
    ill = next(ill for ill in ILLS if ill.name == "an MTU is smaller")
    ran = train_on_four(site, ill, env={"PHALANX_CHECK_NODES": "0"})
    assert set(ran.codes.values()) == {0} and "step=5 loss=" in ran.said["a"], ran.said


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


def test_what_asks_for_the_checks():
    assert asks_for_checks({}) and asks_for_checks({CHECK_NODES: "1"}) and not asks_for_checks({CHECK_NODES: "0"})
    with pytest.raises(ConfigError, match="PHALANX_CHECK_NODES='no': must be 1 .* or 0"):
        asks_for_checks({CHECK_NODES: "no"})
