"""`phalanx eval`: a checkpoint's loss on any set and in any layout is the run's own, and that of transformers."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from phalanx.checkpoint.keep import find
from phalanx.cli.main import cli
from phalanx.comm.mesh import Mesh
from phalanx.config.check import check_sequences
from phalanx.config.read import load_run
from phalanx.config.run import Run
from phalanx.evaluation.perplexity import Evaluation, base_config, open_sets, results_of
from phalanx.inference.load import run_of_model, weights_alone
from phalanx.layout.config import LayoutConfig
from phalanx.planning.plan import grid_of
from phalanx.text.prepare import prepare
from phalanx.text.tokenizers import load_tokenizer
from tests.harness import parity
from tests.harness.sample import rest_in_soak

ROOT = Path(__file__).parents[2]
TEXT = (
    "Arma virumque cano, Troiae qui primus ab oris Italiam, fato profugus, Laviniaque venit litora, "
    "multum ille et terris iactatus et alto. "
)
SAMPLES = 7  # no multiple of any batch
LAYOUTS = {
    "llama": [
        ((), 2),
        (("layout.tp=2", "layout.pp=2"), 4),
        (("layout.cp=2",), 4),
        (("layout.pp=2", "layout.virtual_stages=2"), 2),
    ],
    "mixtral": [(("layout.ep=2",), 2), (("layout.ep=2", "layout.tp=2", "layout.pp=2"), 4)],
    "deepseek_v3": [(("layout.ep=2",), 4)],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Token files of bytes, and their text."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": TEXT[i % 40 :] * (1 + i % 3)}) for i in range(30)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    prepare([folder / "text.jsonl"], folder / "tokens", load_tokenizer("bytes"))
    return folder


@pytest.fixture(scope="module")
def trained(warm, corpus, tmp_path_factory):
    """A function: the folder of a short run of a family in float64, with two validation sets."""
    made: dict[str, Path] = {}

    def run_of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "run"
            data = [
                "data.mock=false",
                f"data.paths=[{corpus}/tokens]",
                "data.split='60,40,0'",
                f"data.valid={{all: [{corpus}/tokens]}}",
            ]
            train = [
                "train.steps=2",
                "train.eval_interval=2",
                f"train.eval_samples={SAMPLES}",
                "train.precision=fp64",
                "optim.warmup_steps=0",
            ]
            words = [
                f"recipes/tiny_{family}.yaml",
                f"dir={made[family]}",
                "data.tokenizer=bytes",
                "train.device=cpu",
                *data,
                *train,
            ]
            done = warm.phalanx("train", *words, cwd=ROOT)
            assert done.returncode == 0, done.stderr
        return made[family]

    return run_of


def own_losses(folder: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        name.removeprefix("valid/"): value for row in rows for name, value in row.items() if name.startswith("valid/")
    }


def evaluated(rank: int, world: int, run: Run, what: Evaluation) -> dict[str, tuple[int, float]]:
    """What a rank finds."""
    loaders = open_sets(run, what)
    mesh = Mesh(grid_of(run, world), rank)
    return {r.name: (r.tokens, r.loss) for r in results_of(run, mesh, what, loaders)}


@pytest.mark.parametrize("family", rest_in_soak(LAYOUTS, ("llama", "deepseek_v3")))
@pytest.mark.trust(
    28,
    "a finished run could not be evaluated again",
    "phalanx eval RUN gives the run's own validation loss, in every layout",
)
def test_every_layout_finds_the_loss_of_the_run(trained, ranks, family):
    """Truth: what the run itself wrote at its last step."""
    folder = trained(family)
    weights, own = find(folder) / "weights", own_losses(folder)
    assert set(own) == {"valid", "all"}
    for overrides, world in [((), 1), *LAYOUTS[family]]:
        run = weights_alone(load_run(base=base_config(weights, gpu=False), overrides=overrides), world)
        for found in ranks.run("tests.evaluation.test_eval:evaluated", world, run, Evaluation(str(weights), {})):
            for name, loss in own.items():
                tokens, other = found[name]
                assert tokens == SAMPLES * run.train.seq_length
                assert other == loss if world == 1 and family == "llama" else other == pytest.approx(loss, rel=1e-12), (
                    overrides,
                    name,
                )


def test_keys_of_training_alone_are_refused():
    done = CliRunner().invoke(cli, ["eval", "runs/none", "train.steps=3", "layout.tp=2", "optim.lr=1"])
    assert "train.steps='3': does nothing to an evaluation" in str(done.exception) and "optim.lr='1'" in str(
        done.exception
    )
    assert "layout.tp" not in str(done.exception)


def test_the_program_and_transformers(warm, trained, corpus, tmp_path):
    """Token files, text, a copy of the weights as a Hugging Face folder: one loss, which is that of transformers on
    the same sequences."""
    transformers = pytest.importorskip("transformers")
    folder = trained("llama")
    shutil.copytree(find(folder) / "weights", tmp_path / "hf")
    sets = ("--data", f"{corpus}/tokens.idx", "--data", f"again={corpus}/text.jsonl", "--samples", "3")
    words = (*sets, "train.seq_length=64", "train.precision=fp64")
    losses = []
    for what in (folder, find(folder), tmp_path / "hf"):
        done = warm.phalanx("eval", str(what), *words, "--json", str(tmp_path / "out.json"), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        record = json.loads((tmp_path / "out.json").read_text())
        first, second = record["sets"]
        assert (first["name"], second["name"], first["tokens"]) == ("tokens", "again", 192) and first["loss"] > 0
        assert "bits/byte" in done.stdout and f"{first['perplexity']:,.4f}" in done.stdout
        losses.append(first["loss"])
        bits = first["loss"] / torch.log(torch.tensor(2.0, dtype=torch.float64)).item() / first["bytes_per_token"]
        assert (
            first["bits_per_byte"] == pytest.approx(bits) and 0.9 < first["bytes_per_token"] < 1.0
        )  # a byte a token, less ends of documents
    assert losses[0] == losses[1] == losses[2]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    from phalanx.data.index import Corpus

    tokens = torch.from_numpy(Corpus(f"{corpus}/tokens").tokens(0, 3 * 64 + 1).astype("int64"))
    rows = torch.stack([tokens[i * 64 : i * 64 + 65] for i in range(3)])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    assert losses[0] == pytest.approx(loss.item(), rel=1e-9)


def test_ranks_that_the_program_starts(warm, trained):
    folder = trained("llama")
    alone, four = (warm.phalanx("eval", str(folder), *words) for words in ((), ("layout.tp=2", "layout.pp=2")))
    assert alone.returncode == four.returncode == 0, four.stderr
    assert alone.stdout.splitlines()[2:] == four.stdout.splitlines()[2:] and "pp 2 x dp 1 x tp 2" in four.stdout


@pytest.mark.parametrize(
    "what, words, code, text",
    [
        ("hf", (), 2, "--data=None: is needed: a Hugging Face folder has no validation set of its own"),
        ("run", ("layout.tp=3",), 2, "layout.tp=3: must divide"),
        ("run", ("--data", "a/x", "--data", "b/x"), 2, "two sets are called x"),
        ("run", ("--data", "nowhere"), 3, "nowhere"),
        ("run", ("--data", "OTHER"), 3, "made with another tokenizer"),
        ("nothing", (), 4, "nothing"),
    ],
)
def test_what_cannot_be_evaluated(warm, trained, corpus, tmp_path, what, words, code, text):
    folder = trained("llama")
    if what == "hf":
        shutil.copytree(find(folder) / "weights", tmp_path / "hf")
    if "OTHER" in words:
        (tmp_path / "ids.txt").write_text("1 2 3")
        prepare([tmp_path / "ids.txt"], tmp_path / "other", load_tokenizer("null:300"))
        words = ("--data", str(tmp_path / "other"))
    done = warm.phalanx("eval", str(folder if what == "run" else tmp_path / what), *words, cwd=tmp_path)
    assert done.returncode == code and text in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_run_that_starts_from_text_is_evaluated_again(warm, tmp_path):
    (tmp_path / "notes.txt").write_text(TEXT * 40)
    (tmp_path / "more.txt").write_text(TEXT * 20)
    words = [
        "data.mock=false",
        "data.text=[notes.txt, more.txt]",
        "data.tokenizer=bytes",
        "data.split='1,1,0'",
        "train.eval_interval=1",
    ]
    run = ["train.steps=1", "train.device=cpu", "optim.warmup_steps=0", "dir=r"]
    done = warm.phalanx("train", str(ROOT / "recipes/tiny_llama.yaml"), *words, *run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recomputed = warm.phalanx("eval", "r", cwd=tmp_path)
    assert recomputed.returncode == 0 and f"{own_losses(tmp_path / 'r')['valid']:.6f}" in recomputed.stdout, (
        recomputed.stderr
    )


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_no_layout_refuses_a_length_that_tp_does_not_divide(family):
    """Micro-batches of a run that does not train have as many more sequences as that takes, and no more."""
    for tp, cp, length, given in itertools.product((1, 2, 3, 4), (1, 2, 3), (16, 49, 50), (1, 2)):
        run = run_of_model(replace(parity.MODELS[family], max_position_embeddings=length), None, gpu=False)
        run = replace(run, layout=LayoutConfig(tp=tp, cp=cp), train=replace(run.train, micro_batch=given))
        found = weights_alone(run, 2 * tp * cp).train
        assert found.seq_length == length and found.global_batch == 2 * found.micro_batch
        counts = range(given, found.micro_batch + 1, given)
        refused = [check_sequences(replace(run, train=replace(run.train, micro_batch=count))) for count in counts]
        assert not refused[-1] and all(refused[:-1])


def test_what_a_layout_adds_to_training_alone_is_left_out():
    run = load_run(
        ROOT / "recipes/tiny_llama.yaml",
        ["layout.sharding=3", "train.recompute=full", "checkpoint.load=gone", "train.global_batch=48"],
    )
    found = weights_alone(replace(run, init_from="gone"), 6)
    assert (
        found.init_from is None
        and found.checkpoint.load is None
        and found.train.global_batch == 6 * run.train.micro_batch
    )
