"""`phalanx embed`: folders of vectors are transformers' pooled hidden states, in every layout; they go on where they
were interrupted, and are not mixed with others."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from torch.nn.functional import normalize

from phalanx.base.errors import ConfigError, DataError
from phalanx.base.placement import Placement
from phalanx.checkpoint.embedder_files import EmbedderFacts
from phalanx.cli.main import cli
from phalanx.comm.mesh import Mesh
from phalanx.config.read import load_run
from phalanx.forecast.decide import make_plan
from phalanx.inference.embedder import embedder_alone, embedder_folder, load_embedder, marks_of
from phalanx.inference.load import without_training
from phalanx.layout.config import LayoutConfig
from phalanx.retrieval.documents import PassageFile
from phalanx.retrieval.vectors import VectorsFolder
from phalanx.sequence.sample import Pooling
from phalanx.training.main import train
from tests.harness.embedder import LENGTH, WORDS, text_of, their_vectors, write_folder, write_texts

COUNT = 50
MODELS: dict[str, Pooling] = {"bert": "first", "modernbert": "mean", "qwen3": "last", "qwen3_moe": "mean"}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    at = tmp_path_factory.mktemp("embedders")
    for model, pooling in MODELS.items():
        write_folder(at / model, model, EmbedderFacts(pooling, True, LENGTH))
    write_texts(at / "texts.jsonl", COUNT)
    return at


def vectors_on_rank(rank: int, world: int, path: str, layout: LayoutConfig, micro_batch: int) -> np.ndarray:
    folder = embedder_folder(path)
    run = folder.run(gpu=False)
    run = replace(run, layout=layout, train=replace(run.train, precision="fp64", micro_batch=micro_batch))
    mesh = Mesh(make_plan(without_training(run, world), world).grid, rank)
    embedder, marks = load_embedder(folder, run, mesh), marks_of(folder)
    found = embedder.embed(COUNT, lambda number: marks.encode(text_of(number), embedder.most))
    mesh.close()
    return found.numpy()


LAYOUTS: dict[str, tuple[int, LayoutConfig, int]] = {
    "one rank": (1, LayoutConfig(), 3),
    "tp2 dp2": (4, LayoutConfig(tp=2), 1),
    "pp2": (2, LayoutConfig(pp=2), 2),
    "cp2": (2, LayoutConfig(cp=2), 1),
}


@pytest.mark.parametrize("model, layout", [(m, "one rank") for m in MODELS] + [("modernbert", n) for n in LAYOUTS][1:])
def test_vectors_are_pooled_hidden_states_of_transformers(ranks, root, model, layout):
    world, config, micro_batch = LAYOUTS[layout]
    expected = their_vectors(root / model, MODELS[model], COUNT).numpy()
    for found in ranks.run(
        "tests.retrieval.test_embedding:vectors_on_rank", world, str(root / model), config, micro_batch
    ):
        assert np.abs(found - expected).max() < 1e-10


def test_ranks_that_share_experts_embed_unequally_many(ranks, root):
    """Expert parallelism across data-parallel ranks: they make as many passes as the one with most texts."""
    expected = their_vectors(root / "qwen3_moe", "mean", COUNT).numpy()
    arguments = (str(root / "qwen3_moe"), LayoutConfig(ep=2), 1)
    for found in ranks.run("tests.retrieval.test_embedding:vectors_on_rank", 2, *arguments):
        assert np.abs(found - expected).max() < 1e-10


# ---- the verb


def embedded(*words: str, fails: str | None = None) -> str:
    found = CliRunner().invoke(cli, ["embed", *words, "train.device=cpu"])
    if fails is not None:
        assert found.exception is not None and fails in f"{found.exception} {found.output}", found.output
        return ""
    assert found.exit_code == 0, (found.output, found.exception)
    return found.output


def test_a_folder_of_vectors(root, tmp_path):
    """Shards, texts beside them, a prefix, the first features alone."""
    out = tmp_path / "vectors"
    given = [str(root / "modernbert"), "--input", str(root / "texts.jsonl"), "-o", str(out)]
    embedded(*given, "--shard", "20", "--prefix", "the ", "--dimensions", "8", "train.precision=fp64")
    vectors = VectorsFolder.open(out)
    manifest = vectors.manifest
    assert (manifest.texts, manifest.shards, manifest.width, manifest.whole) == (COUNT, 3, 8, 32)
    assert (manifest.prefix, manifest.pooling, manifest.normalized, manifest.length) == ("the ", "mean", True, LENGTH)
    found = np.concatenate([vectors.vectors(shard) for shard in range(3)])
    expected = normalize(their_vectors(root / "modernbert", "mean", COUNT, "the ")[:, :8], dim=1)
    assert found.dtype == np.float64 and np.abs(found - expected.numpy()).max() < 1e-10
    lines = [json.loads(line) for path in vectors.text_files() for line in path.read_text().splitlines()]
    assert lines == [json.loads(line) for line in (root / "texts.jsonl").read_text().splitlines()]


def test_what_was_interrupted_goes_on(root, tmp_path, monkeypatch):
    """Shards that are there are not made once more."""
    out = tmp_path / "vectors"
    given = [str(root / "qwen3"), "--input", str(root / "texts.jsonl"), "-o", str(out), "--shard", "20"]
    embedded(*given)
    whole = [path.read_bytes() for path in sorted(out.glob("vectors-*"))]
    (out / "vectors-00001.npy").unlink()
    with pytest.raises(DataError, match="1 of 3 shards are not there yet, the first is vectors-00001.npy"):
        VectorsFolder.open(out)
    untouched = (out / "vectors-00000.npy").stat().st_mtime_ns
    assert "(30 were there)" in embedded(*given)
    assert [path.read_bytes() for path in sorted(out.glob("vectors-*"))] == whole
    assert (out / "vectors-00000.npy").stat().st_mtime_ns == untouched


def test_vectors_of_different_origin_are_not_mixed(root, tmp_path):
    out = tmp_path / "vectors"
    texts = ["--input", str(root / "texts.jsonl"), "-o", str(out)]
    embedded(str(root / "qwen3"), *texts)
    embedded(str(root / "modernbert"), *texts, fails="holds other vectors (embedder ")
    embedded(str(root / "qwen3"), *texts, "--prefix", "the ", fails="prefix '' -> 'the '")
    other = write_texts(tmp_path / "other.jsonl", 7)
    embedded(str(root / "qwen3"), "--input", str(other), "-o", str(out), fails="texts 50 -> 7")
    shutil.copytree(root / "qwen3", tmp_path / "moved")
    assert "(50 were there)" in embedded(str(tmp_path / "moved"), *texts)  # the same embedder, in another place
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").touch()
    full = ["-o", str(tmp_path / "full")]
    embedded(str(root / "qwen3"), *texts[:2], *full, fails="is there already and holds no vectors")


def test_bad_input(root, tmp_path):
    given = [str(root / "qwen3"), "--input", str(root / "texts.jsonl"), "-o", str(tmp_path / "out")]
    embedded(*given, "--dimensions", "33", fails="--dimensions=33: must be <= the width of the model's embeddings")
    embedded(*given, "--length", "1", fails="Invalid value for '--length'")
    embedded(*given, "--length", "99", fails="must not be more than the model has positions")
    embedded(*given, "--pooling", "mean", fails="says how its embeddings are made")
    embedded(*given, "optim.lr=1", fails="optim.lr")
    write_folder(tmp_path / "plain", "bert", None)
    embedded(str(tmp_path / "plain"), *given[1:], fails="does not say how its embeddings are made")
    embedded(str(tmp_path / "plain"), *given[1:], "--pooling", "mean")
    assert VectorsFolder.open(tmp_path / "out").manifest.pooling == "mean"
    bad = ['{"text": ""}', '{"id": 1}', '{"text": "a", "source": 3}', "[]", '{"text": "good"}']
    bad.append('{"text": "a", "id": [1]}')
    (tmp_path / "bad.jsonl").write_text("\n".join(bad))
    with pytest.raises(DataError) as error:
        PassageFile(tmp_path / "bad.jsonl")
    expected = ("1: text must be", "2: text is missing", "3: source must", "4: must be", "6: id must")
    for line, words in zip(str(error.value).splitlines(), expected, strict=True):
        assert f"bad.jsonl:{words}" in line


def test_a_model_without_a_head_makes_no_text(root):
    for words, said in (
        (["generate", str(root / "qwen3"), "--prompt", "a"], "no text is generated"),
        (["eval", str(root / "qwen3"), "--data", str(root / "texts.jsonl")], "has no head, so no loss per token"),
    ):
        found = CliRunner().invoke(cli, words)
        assert isinstance(found.exception, ConfigError) and said in str(found.exception)


def test_an_embedder_is_known_by_what_it_computes(root, tmp_path):
    """The same fingerprint wherever it lies, and another one for other weights, pooling or tokenizers."""
    known = embedder_folder(str(root / "bert")).fingerprint
    shutil.copytree(root / "bert", tmp_path / "copy")
    assert embedder_folder(str(tmp_path / "copy")).fingerprint == known
    modes = tmp_path / "copy/1_Pooling/config.json"
    stated = json.loads(modes.read_text())
    other = {**stated, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
    modes.write_text(json.dumps(other))
    assert embedder_folder(str(tmp_path / "copy")).fingerprint != known
    modes.write_text(json.dumps(stated))
    assert embedder_folder(str(tmp_path / "copy")).fingerprint == known
    weights = tmp_path / "copy/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert embedder_folder(str(tmp_path / "copy")).fingerprint != known


def test_adapters_are_part_of_an_embedder(root, tmp_path):
    """A run with LoRA over a folder: its vectors are those of the merged model, and each step is another embedder."""
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps({"query": w, "positive": f"the {w}"}) for w in WORDS))
    words = [f"init_from={root}/qwen3", "task.name=embed", "task.pooling=last", "lora.rank=4", f"dir={tmp_path}/run"]
    words += [f"data.pairs=[{tmp_path}/pairs.jsonl]", "data.split=1,0,0", "train.steps=4", "train.global_batch=2"]
    words += [
        "train.micro_batch=1",
        "train.seq_length=32",
        "checkpoint.interval=2",
        "optim.lr=0.05",
        "train.device=cpu",
    ]
    train(load_run(None, words), Placement())
    steps = [str(path) for path in sorted((tmp_path / "run/checkpoints").iterdir())]
    found = [embedder_folder(path).fingerprint for path in steps]
    assert len(found) == len(set(found)) == 2
    done = CliRunner().invoke(cli, ["export", steps[-1], "--merge", "-o", str(tmp_path / "merged")])
    assert done.exit_code == 0, (done.output, done.exception)
    vectors = []
    for path in (steps[-1], str(tmp_path / "merged")):
        folder = embedder_folder(path)
        embedder, marks = embedder_alone(folder, LENGTH, "fp64"), marks_of(folder)
        vectors.append(embedder.embed(9, lambda number, marks=marks: marks.encode(text_of(number), LENGTH)))
    assert (vectors[0] - vectors[1]).abs().max() < 1e-6  # merged in fp32
    before = their_vectors(root / "qwen3", "last", 9)
    assert (vectors[0] - before).abs().max() > 1e-3
