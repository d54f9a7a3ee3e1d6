"""Indexes: exact ones are brute force, inverted files find what their manifest says; passages in prompts of generate,
chat and the server; an index of another embedder is refused before anything starts."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import openai
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from phalanx.base.errors import ConfigError, DataError
from phalanx.checkpoint.embedder_files import EmbedderFacts
from phalanx.cli.main import cli
from phalanx.inference.conversation import Conversation
from phalanx.inference.embedder import embedder_folder
from phalanx.inference.request import SamplingOptions
from phalanx.retrieval.documents import TextPassage
from phalanx.retrieval.index import IndexOptions, VectorIndex, build_index, read_index_manifest, recall_of
from phalanx.retrieval.prompting import PassageAdder, PassageTemplate
from phalanx.retrieval.retriever import FoundPassage, Lookup, Retriever, checked
from phalanx.retrieval.vectors import VectorsFolder, VectorsManifest
from tests.harness.embedder import LENGTH, WORDS, text_of, their_vectors, write_folder, write_texts

needs_faiss = pytest.importorskip("faiss", reason="indexes need the extra index")

COUNT, WIDTH = 60, 24


def around_centres(count: int, seed: int) -> np.ndarray:
    dice = np.random.default_rng(seed)
    centres = np.random.default_rng(100).normal(size=(50, WIDTH))
    rows = centres[dice.integers(0, 50, count)] + 0.7 * dice.normal(size=(count, WIDTH))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def made_up(folder: Path, texts: int, shard: int) -> VectorsFolder:
    """Vectors around 50 directions, as those of texts are, of length 1."""
    manifest = VectorsManifest(
        embedder="made up",
        model="nowhere",
        pooling="mean",
        normalized=True,
        width=WIDTH,
        whole=WIDTH,
        prefix="",
        length=8,
        input="",
        texts=texts,
        shard=shard,
    )
    made = VectorsFolder.begin(folder, manifest)
    for number in range(manifest.shards):
        first, stop = manifest.part(number)
        rows = around_centres(stop - first, number)
        made.write(number, rows, [TextPassage(f"text {i}", str(i)) for i in range(first, stop)])
    return made


@pytest.fixture(scope="module")
def vectors(tmp_path_factory) -> VectorsFolder:
    return made_up(tmp_path_factory.mktemp("vectors") / "v", 3000, 1100)


def brute_force(vectors: VectorsFolder, queries: np.ndarray, count: int) -> np.ndarray:
    every = np.concatenate([vectors.vectors(n) for n in range(vectors.manifest.shards)])
    return np.argsort(-(queries @ every.T), axis=1, kind="stable")[:, :count]


def queries() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(40, WIDTH)).astype(np.float32)


def test_an_exact_index_is_brute_force(vectors, tmp_path):
    manifest = build_index(vectors, tmp_path / "index", IndexOptions(), say=lambda line: None)
    assert (manifest.kind, manifest.recall, manifest.texts) == ("exact", 1.0, 3000)
    index = VectorIndex(tmp_path / "index")
    scores, found = index.search(queries(), 10)
    assert np.array_equal(found, brute_force(vectors, queries(), 10))
    every = np.concatenate([vectors.vectors(n) for n in range(3)])
    np.testing.assert_allclose(scores, np.take_along_axis(queries() @ every.T, found, 1), rtol=1e-5, atol=1e-5)
    assert index.texts[2345] == TextPassage("text 2345", "2345") and index.texts[0].id == "0"


def test_an_inverted_file_finds_what_its_manifest_says(vectors, tmp_path):
    """recall@10 is measured against exact search, with the fewest cells that reach what is asked for; the folder may
    move."""
    manifest = build_index(
        vectors, tmp_path / "first", IndexOptions(kind="ivf", lists=60, recall=0.95), say=lambda line: None
    )
    assert manifest.kind == "ivf" and manifest.lists == 60 and 1 < manifest.probes < 60 and manifest.recall >= 0.95
    shutil.move(tmp_path / "first", tmp_path / "moved")
    index = VectorIndex(tmp_path / "moved")
    every = np.concatenate([vectors.vectors(n) for n in range(3)])
    asked = around_centres(400, seed=50)  # which it does not hold
    assert recall_of(index.search(asked, 10)[1], brute_force(vectors, asked, 10)) >= 0.95
    some = every[::7]
    truth = brute_force(vectors, some, 11)[:, 1:]
    few = build_index(vectors, tmp_path / "few", IndexOptions(kind="ivf", lists=60, probes=1), say=lambda line: None)
    assert few.probes == 1 and few.recall < manifest.recall
    measured = recall_of(VectorIndex(tmp_path / "few").search(some, 11)[1][:, 1:], truth)
    assert abs(measured - few.recall) < 0.08
    assert read_index_manifest(tmp_path / "few") == few


def test_indexes_that_are_damaged_or_unfinished(vectors, tmp_path, monkeypatch):
    out = tmp_path / "index"
    build_index(vectors, out, IndexOptions(kind="ivf", lists=20), say=lambda line: None)
    with pytest.raises(DataError, match="is there already"):
        build_index(vectors, out, IndexOptions(), say=lambda line: None)
    (out / "lists.data").write_bytes((out / "lists.data").read_bytes()[:-1])
    with pytest.raises(DataError, match="is damaged: lists.data is missing or has another size"):
        VectorIndex(out)
    with pytest.raises(DataError, match="is no index"):
        VectorIndex(tmp_path)
    monkeypatch.setattr("phalanx.retrieval.index._write_exact", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build_index(vectors, tmp_path / "half", IndexOptions(), say=lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index"]


# ---- with an embedder


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """An embedder, its vectors of some texts, and an index of them."""
    at = tmp_path_factory.mktemp("retrieval")
    write_folder(at / "embedder", "modernbert", EmbedderFacts("mean", True, LENGTH))
    write_texts(at / "texts.jsonl", COUNT)
    for words in (
        ["embed", str(at / "embedder"), "--input", str(at / "texts.jsonl"), "-o", str(at / "vectors"), "--shard", "25"],
        ["index", str(at / "vectors"), "-o", str(at / "index"), "--query-prefix", "the "],
    ):
        found = CliRunner().invoke(cli, words)
        assert found.exit_code == 0, (found.output, found.exception)
    return at


def test_the_nearest_passages_are_those_of_transformers(root):
    retriever = Retriever(Lookup(index=str(root / "index"), neighbours=3))
    asked = [text_of(i) for i in range(8)]
    passages = their_vectors(root / "embedder", "mean", COUNT).numpy()
    scores = their_vectors(root / "embedder", "mean", 8, "the ").numpy() @ passages.T
    found = retriever.find(asked)
    for row, true in zip(found, scores):  # texts may be alike, so it is scores that are compared
        numbers = [int(each.passage.id[1:]) for each in row]
        assert len(set(numbers)) == 3
        np.testing.assert_allclose(true[numbers], np.sort(true)[:-4:-1], rtol=0, atol=1e-6)
        np.testing.assert_allclose([each.score for each in row], true[numbers], rtol=0, atol=1e-5)
    first = found[0][0].passage
    assert first.text == text_of(int(first.id[1:])) and first.source == f"book {int(first.id[1:]) % 3}"


def test_an_index_of_another_embedder_is_refused_before_anything_starts(root, tmp_path, monkeypatch):
    """Other weights, or a folder that is gone; the same model in another place is taken."""
    lookup = Lookup(index=str(root / "index"))
    assert checked(lookup)[0].texts == COUNT
    shutil.copytree(root / "embedder", tmp_path / "other")
    assert checked(replace(lookup, embedder=str(tmp_path / "other")))
    weights = load_file(tmp_path / "other/model.safetensors")
    save_file({name: value + 0.01 for name, value in weights.items()}, tmp_path / "other/model.safetensors")
    monkeypatch.setattr("phalanx.retrieval.retriever.embedder_alone", lambda *given: 1 / 0)
    monkeypatch.setattr("phalanx.retrieval.retriever.VectorIndex", lambda *given: 1 / 0)
    given = ["--index", str(root / "index"), "--embedder", str(tmp_path / "other")]
    for verb in (["generate", "nowhere", "--prompt", "a"], ["chat", "nowhere"], ["serve", "nowhere"]):
        found = CliRunner().invoke(cli, [*verb, *given])
        assert isinstance(found.exception, ConfigError) and "is of another embedder" in str(found.exception)
    moved = tmp_path / "index"
    shutil.copytree(root / "index", moved)
    stated = json.loads((moved / "manifest.json").read_text())
    (moved / "manifest.json").write_text(json.dumps({**stated, "model": str(tmp_path / "gone")}))
    with pytest.raises(ConfigError, match="name it with --embedder RUN"):
        checked(Lookup(index=str(moved)))


def test_without_faiss_it_is_said_what_to_install(root, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    for words in (
        ["index", str(root / "vectors"), "-o", str(tmp_path / "new")],
        ["generate", "nowhere", "--prompt", "a", "--index", str(root / "index")],
    ):
        found = CliRunner().invoke(cli, words)
        assert isinstance(found.exception, DataError), found.output
        assert "indexes of vectors need faiss: pip install 'phalanx[index]'" in str(found.exception)


def test_options_that_do_nothing(root, tmp_path):
    lists = ["index", str(root / "vectors"), "-o", str(tmp_path / "i"), "--lists", "4"]
    for words, said in (
        (["generate", "x", "--prompt", "a", "--neighbours", "2"], "--neighbours does nothing without --index"),
        (lists, "--lists does nothing for an exact index"),
    ):
        found = CliRunner().invoke(cli, words)
        assert found.exit_code == 2 and said in found.output


# ---- prompts


def test_the_template(tmp_path):
    found = [
        FoundPassage(TextPassage("Joins paths.", "7", "os.path"), 0.9),
        FoundPassage(TextPassage("{{ 1 + 1 }}", "8"), 0.5),
    ]
    assert PassageTemplate().render("How?", found) == "[1] (os.path) Joins paths.\n\n[2] {{ 1 + 1 }}\n\nHow?"
    own = tmp_path / "own.jinja"
    own.write_text("{{ prompt }}: {% for p in passages %}{{ p.id }}={{ p.text }};{% endfor %}")
    assert PassageTemplate(own).render("Q", found) == "Q: 7=Joins paths.;8={{ 1 + 1 }};"
    for text, words in (
        ("{{ prompt }}", "does not read passages"),
        ("{{ passages }}{{ prompt }}{{ other }}", "reads other, which there is not"),
        ("{% for %}", "not a template: line 1"),
        ("{{ passages.__class__.__mro__ }}{{ prompt }}", "unsafe"),
    ):
        own.write_text(text)
        with pytest.raises(DataError, match=words):
            PassageTemplate(own).render("Q", found)


@pytest.fixture(scope="module")
def generator(tmp_path_factory) -> Path:
    """A tiny decoder with a tokenizer that knows the texts."""
    import torch
    import transformers

    from phalanx.checkpoint.hf import to_hf
    from phalanx.text.tokenizers import train_wordpiece
    from tests.harness import parity

    at = tmp_path_factory.mktemp("generator")
    config = replace(parity.MODELS["qwen3"], max_position_embeddings=256)
    torch.manual_seed(1)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**to_hf(config, torch.float32))).save_pretrained(at)
    train_wordpiece([" ".join(WORDS) + " how ? [ ] ( ) 1 2 3 4"] * 3, 100, at)
    return at


def test_generate_reads_passages_and_says_their_sources(root, generator, tmp_path):
    """The continuation is that of the prompt written out, and each line of the file has the passages."""
    adder = PassageAdder(Lookup(index=str(root / "index"), neighbours=2))
    prompts = ["stone sea", "rose moss"]
    written, found = adder.add(prompts)
    for name, texts in (("short", prompts), ("written", written)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    common = ["--tokens", "5", "--temperature", "0"]
    rows = {}
    for name, more in (("short", ["--index", str(root / "index"), "--neighbours", "2"]), ("written", [])):
        out = tmp_path / f"{name}.out"
        words = ["generate", str(generator), "--prompts", str(tmp_path / f"{name}.jsonl"), "-o", str(out)]
        made = CliRunner().invoke(cli, [*words, *common, *more])
        assert made.exit_code == 0, (made.output, made.exception)
        rows[name] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["text"] for row in rows["short"]] == [row["text"] for row in rows["written"]]
    assert [row["prompt"] for row in rows["short"]] == prompts
    assert [[p["id"] for p in row["passages"]] for row in rows["short"]] == [[f.passage.id for f in r] for r in found]
    one = ["generate", str(generator), "--prompt", prompts[0], *common, "--index", str(root / "index")]
    said = CliRunner().invoke(cli, one)
    assert said.exit_code == 0 and said.stdout.startswith(prompts[0])
    assert said.stderr.startswith(f"[1] {found[0][0].passage.id} ({found[0][0].passage.source}) score=")


def test_a_chat_reads_passages_and_says_their_sources(root, generator, tmp_path):
    """The answer is that to the message written out; what was said before is remembered without its passages."""
    folder = tmp_path / "chat"
    shutil.copytree(generator, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[ {{ m.content }} ] {% endfor %}")
    [written, later], found = PassageAdder(Lookup(index=str(root / "index"), neighbours=2)).add(["stone sea", "rose"])
    words = ["chat", str(folder), "--tokens", "5", "--temperature", "0", "--index", str(root / "index")]
    made = CliRunner().invoke(cli, [*words, "--neighbours", "2"], input="stone sea\nrose\n")
    assert made.exit_code == 0, (made.output, made.exception)
    talk = Conversation(str(folder), SamplingOptions(tokens=5, temperature=0))
    answers = ["".join(talk.answer("stone sea", written)), "".join(talk.answer("rose", later))]
    assert [line for line in made.stdout.splitlines() if line] == answers
    said = [line for line in made.stderr.splitlines() if line.startswith("[")]
    assert [line.split()[1] for line in said] == [each.passage.id for row in found for each in row]


def test_the_server_puts_passages_into_prompts(root, start):
    """Completions and the last message of chats; answers have the passages; ids get none."""
    adder = PassageAdder(Lookup(index=str(root / "index"), neighbours=2))
    server = start(positions=2048)
    model = server.server.service.model
    server.server.service.model = replace(model, passages=adder)
    plain = start(positions=2048)
    [written], [found] = adder.add(["stone sea"])
    ids = [each.passage.id for each in found]
    made = server.client().completions.create(model="stub", prompt="stone sea", max_tokens=4, echo=True)
    assert made.choices[0].text.startswith(written) and [p["id"] for p in made.passages[0]] == ids
    expected = plain.client().completions.create(model="stub", prompt=written, max_tokens=4)
    assert made.usage.prompt_tokens == expected.usage.prompt_tokens
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = [*messages, {"role": "user", "content": "stone sea"}]
    made = server.client().chat.completions.create(model="stub", messages=asked, max_tokens=4)
    same = [*messages, {"role": "user", "content": written}]
    expected = plain.client().chat.completions.create(model="stub", messages=same, max_tokens=4)
    assert made.usage.prompt_tokens == expected.usage.prompt_tokens and [p["id"] for p in made.passages] == ids
    chunks = list(server.client().chat.completions.create(model="stub", messages=asked, max_tokens=4, stream=True))
    assert [p["id"] for p in chunks[0].passages] == ids and chunks[0].choices == []
    with pytest.raises(openai.BadRequestError, match="passages are found for texts"):
        server.client().completions.create(model="stub", prompt=[1, 2], max_tokens=4)


def test_a_look_up_holds_up_nobody(root, start):
    """What a look-up costs is exposed to its own request alone: another one's answer, whose own look-up is over, comes
    to its end while this one waits."""
    adder = PassageAdder(Lookup(index=str(root / "index"), neighbours=2))
    waits, goes_on = threading.Event(), threading.Event()

    class Slow:
        def add(self, prompts):
            if prompts == ["rose moss"]:
                waits.set()
                assert goes_on.wait(60), "the test never let it go on"
            return adder.add(prompts)

    server = start(positions=2048)
    server.server.service.model = replace(server.server.service.model, passages=Slow())
    server.engine.gate.clear()
    asked = {"model": "stub", "max_tokens": 16}
    stream = server.client().completions.create(prompt="stone sea", stream=True, **asked)
    assert next(iter(stream)).passages
    with ThreadPoolExecutor(1) as other:
        late = other.submit(lambda: server.client().completions.create(prompt="rose moss", **asked))
        try:
            assert waits.wait(60)
            server.engine.gate.set()
            rest = list(stream)
            assert rest[-1].choices[0].finish_reason == "length" and not late.done()
        finally:
            goes_on.set()
        assert late.result(60).passages


def test_manifests_of_vectors_and_index_agree(root):
    vectors, index = VectorsFolder.open(root / "vectors").manifest, read_index_manifest(root / "index")
    both = {k: v for k, v in asdict(vectors).items() if k in asdict(index)}
    assert both == {k: v for k, v in asdict(index).items() if k in both}
    assert index.embedder == embedder_folder(str(root / "embedder")).fingerprint and index.query_prefix == "the "
