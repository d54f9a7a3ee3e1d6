"""`phalanx preflight` on four nodes (network namespaces): every ill of tests/preflight/ills.py is found and its node
named, and good nodes are called good."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from phalanx.base.placement import SECRET
from phalanx.cli.main import cli  # imported before nodes are forked: they need not do it again  # noqa: F401
from phalanx.cli.setup import prepare  # noqa: F401
from phalanx.data.index import Corpus
from phalanx.preflight.agent import checks
from tests.harness.cluster import Cluster, Start, cluster, run_on
from tests.preflight.ills import ILLS, Ill, Site, lacking

CLEAN_RUNS = 30
COVERING = ("a full disk", "no locks", "a slow link")  # and a closed port in test_first_seconds.py
CONFIG = {
    "model": {
        "family": "llama",
        "vocab_size": 131,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "train": {"steps": 5, "global_batch": 4, "micro_batch": 1, "seq_length": 32, "device": "cpu", "seed": 1},
    "optim": {"lr": 3e-3},
}


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    checks()  # imported here, not in each node
    with cluster(4) as made:
        yield made


def prepared(folder: Path, word: str = "words") -> Path:
    """The prefix of token files made of some documents."""
    from phalanx.text.prepare import PrepareOptions
    from phalanx.text.prepare import prepare as prepare_text
    from phalanx.text.tokenizers import load_tokenizer

    folder.mkdir(exist_ok=True)
    text, data = folder.with_suffix(".jsonl"), folder / "tokens"
    text.write_text("".join(json.dumps({"text": f"document {n} of some {word}"}) + "\n" for n in range(200)))
    prepare_text([str(text)], str(data), load_tokenizer("bytes"), PrepareOptions(workers=1))
    assert Corpus(str(data)).num_tokens > 1000
    return data


@pytest.fixture
def site(four, tmp_path) -> Site:
    for name in ("out", "scratch", "data", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "runs/one").mkdir()
    data = prepared(tmp_path / "data")
    config = tmp_path / "run.yaml"
    values = {**CONFIG, "data": {"paths": [str(data)]}, "dir": str(tmp_path / "runs/one")}
    values["model"] = {**CONFIG["model"], "vocab_size": 300}
    config.write_text(json.dumps(values))
    return Site(four, tmp_path / "runs/one", data, config, tmp_path / "scratch")


@dataclass
class Reported:
    """What a preflight said: exit codes, the table, its JSON."""

    codes: dict[str, int]
    text: str
    said: dict[str, str]
    report: dict

    def verdicts(self) -> dict[str, str]:
        return {node["name"].removeprefix("node-"): node["verdict"] for node in self.report["nodes"]}


def preflight(site: Site, ill: Ill | None = None) -> Reported:
    out = site.run.parent.parent / "out"
    words = ["preflight", str(site.config), "--json", str(out / "report.json")]
    if ill is None or ill.name != "a node that does not come":
        words += ["--wait", "60"]  # other tests may keep the machine busy
    env = {node.letter: {SECRET: "the secret of this run, 32 characters"} for node in site.cluster.nodes}
    start = Start(words, out, env=env)
    with contextlib.ExitStack() as during:
        if ill is not None and ill.change is not None:
            ill.change(site, start)
        if ill is not None and ill.node is not None:
            done = ill.node
            start.before = {ill.at: lambda node: done(site, node)}
        if ill is not None and ill.network is not None:
            during.enter_context(ill.network(site))
        ran = run_on(site.cluster, start, ill.meanwhile if ill is not None else lambda start: None)
    report = json.loads((out / "report.json").read_text()) if (out / "report.json").exists() else {}
    checks_s = report.get("seconds", 0.0)  # from the first question to the verdict
    whole = f"{ran.seconds:.1f} s from the start of all nodes to the end of the last"
    print(f"{ill.name if ill else 'none'}: {whole}, {checks_s:.1f} s of checks")
    return Reported(ran.codes, ran.said["a"], ran.said, report)


def found(site: Site, ill: Ill) -> None:
    """The ill is named with its nodes, no other node is, and the exit codes say so."""
    if why := lacking(ill):
        pytest.skip(why)
    reported = preflight(site, ill)
    assert reported.report, reported.said
    named = {name: verdict for name, verdict in reported.verdicts().items() if verdict != "ok"}
    assert named == dict.fromkeys(ill.nodes, ill.severity), reported.said
    reasons = [f for f in reported.report["findings"] if f["check"] == ill.check and ill.words in f["text"]]
    assert reasons and all(set(f["nodes"]) == {f"node-{x}" for x in ill.nodes} for f in reasons), reported.said
    assert f"{ill.check}: " in reported.text and max(map(len, reported.text.splitlines())) <= 80, reported.text
    code = 8 if ill.severity == "bad" else 0
    assert reported.codes["a"] == reported.codes["b"] == code, reported.said
    assert not list(site.run.glob(".preflight-*")), "files stay behind"


def id_of(ill: Ill) -> str:
    return ill.name.replace(" ", "-")


@pytest.mark.parametrize("ill", [ill for ill in ILLS if ill.name in COVERING], ids=id_of)
def test_some_ills_are_found_and_named(site, ill):
    found(site, ill)


@pytest.mark.soak
@pytest.mark.parametrize("ill", [ill for ill in ILLS if ill.name not in COVERING], ids=id_of)
def test_other_ills_are_found_and_named(site, ill):
    found(site, ill)


def test_good_nodes_are_called_good(site):
    clean(site)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(CLEAN_RUNS))
def test_good_nodes_are_called_good_every_time(site, number):
    clean(site)


def clean(site: Site) -> None:
    reported = preflight(site)
    assert set(reported.verdicts().values()) == {"ok"} and len(reported.verdicts()) == 4, reported.text
    assert set(reported.codes.values()) == {0}
    assert not reported.report["findings"] and not any(reported.said[letter] for letter in "bcd"), reported.said
    assert not list(site.run.iterdir()), "files stay behind"
