"""Files of chats: every format becomes the same messages; bad records are named with file, line and turn; what is
prepared is read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from phalanx.base.errors import DataError
from phalanx.data.chats import origin_text, trained_of
from phalanx.data.config import DataConfig
from phalanx.data.index import Corpus, CorpusWriter
from phalanx.data.loader import Loader, train_loader
from phalanx.data.sources import ChatSource
from phalanx.sequence.batch import IGNORE
from phalanx.text import chats
from phalanx.text.cache import find_text, use_text
from phalanx.text.chat_masks import ChatEncoder
from phalanx.text.chat_records import BadChat, Chat, read_record
from phalanx.text.chat_template import load_chat_template
from phalanx.text.tokenizers import load_tokenizer
from tests.harness.chat_model import chat_folder

ASKED, SAID = {"role": "user", "content": "the weather?"}, {"role": "assistant", "content": "fine"}
SYSTEM = {"role": "system", "content": "stop here"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat"))


# ---- formats


@pytest.mark.parametrize(
    "record, messages, answers",
    [
        ({"messages": [ASKED, SAID], "prompt": "an id", "source": 3}, (ASKED, SAID), (1,)),
        ({"messages": [{**ASKED, "name": None}, {**SAID, "tool_calls": None}]}, (ASKED, SAID), (1,)),
        (
            {"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "fine"}]}]},
            (ASKED, SAID),
            (1,),
        ),
        ({"conversations": [ASKED, SAID]}, (ASKED, SAID), (1,)),
        (
            {
                "conversations": [{"from": "human", "value": "the weather?"}, {"from": "gpt", "value": "fine"}],
                "system": "stop here",
            },
            (SYSTEM, ASKED, SAID),
            (2,),
        ),
        ({"prompt": [SYSTEM, ASKED, SAID, ASKED], "completion": [SAID]}, (SYSTEM, ASKED, SAID, ASKED, SAID), (4,)),
        ({"instruction": "the weather?", "input": "", "output": "fine"}, (ASKED, SAID), (1,)),
        (
            {"instruction": "add", "input": "1 2", "output": "fine", "system": "stop here"},
            (SYSTEM, {"role": "user", "content": "add\n\n1 2"}, SAID),
            (2,),
        ),
        ({"messages": [ASKED, {**SAID, "weight": 0}, ASKED, {**SAID, "weight": 1}]}, (ASKED, SAID, ASKED, SAID), (3,)),
        (
            {"messages": [ASKED, {"role": "assistant", "reasoning": "hm", "content": "fine"}]},
            (ASKED, {**SAID, "reasoning_content": "hm"}),
            (1,),
        ),
    ],
)
def test_formats(record, messages, answers):
    found = read_record(record)
    assert isinstance(found, Chat) and found.messages == messages and found.answers == answers


def test_calls_and_tools_in_all_their_forms():
    texts = json.dumps({"a": 1, "b": None})
    for calls in ([CALL], [{"name": "add", "arguments": texts}], [{"function": {"name": "add", "arguments": texts}}]):
        found = read_record({"messages": [ASKED, {"role": "assistant", "tool_calls": calls}], "tools": [TOOL]})
        assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]} and found.tools == (
            TOOL,
        )
    talk = [
        {"from": "human", "value": "the weather?"},
        {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1, "b": None}})},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "fine"},
    ]
    found = read_record({"conversations": talk, "tools": json.dumps([TOOL["function"]])})
    assert found.tools == (TOOL,) and found.answers == (1, 3)
    assert found.messages[1]["tool_calls"] == [CALL] and found.messages[2] == {"role": "tool", "content": "2"}


@pytest.mark.parametrize(
    "record, rule",
    [
        ({"messages": [ASKED, SAID], "conversations": [ASKED]}, "can be read as messages and as conversations"),
        ({"text": "a"}, "has fields text, but none of messages, conversations, prompt with completion, instruction"),
        ({"messages": []}, "messages must be a list of objects that is not empty"),
        ({"messages": [ASKED, {"role": "bot", "content": "a"}]}, "turn 2: role is 'bot', expected one of system, dev"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, "turn 1: from is 'robot', expected one of"),
        ({"messages": [ASKED]}, "no answer: no message of the assistant"),
        ({"messages": [ASKED, {**SAID, "weight": 0}]}, "no answer: no message of the assistant has a weight other"),
        ({"messages": [ASKED, {**SAID, "weight": 2}]}, "turn 2: weight is 2, expected 0 or 1"),
        ({"messages": [ASKED, {**SAID, "content": " "}]}, "turn 2: the answer is empty"),
        ({"messages": [{"role": "user"}, SAID]}, "turn 1: content is missing"),
        ({"messages": [{**ASKED, "content": 3}, SAID]}, "turn 1: content must be a text, not int"),
        ({"messages": [{**ASKED, "content": "\ud800"}, SAID]}, "turn 1: content is not text"),
        ({"messages": [{**ASKED, "content": [{}]}, SAID]}, "turn 1: content has a part of type None"),
        ({"messages": [{**ASKED, "tool_calls": [CALL]}, SAID]}, "turn 1: tool_calls are an assistant's"),
        ({"messages": [{**ASKED, "thinking": "a"}, SAID]}, "turn 1: reasoning is an assistant's"),
        ({"messages": [ASKED, {**SAID, "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "turn 2: arguments of f mu"),
        ({"messages": [ASKED, {**SAID, "tool_calls": [{"function": {}}]}]}, "turn 2: a call needs the name of a"),
        ({"messages": [ASKED, SAID], "tools": [{}]}, "tools must be a list of functions with names"),
        ({"messages": [ASKED, SAID], "tools": "["}, "tools must be JSON"),
        ({"prompt": "a", "completion": [SAID]}, "prompt and completion must both be texts, or both lists"),
        ({"prompt": [ASKED, SAID], "completion": [ASKED]}, "no answer: no message of the assistant in completion"),
        ({"instruction": "a", "output": ""}, "turn 2: the answer is empty"),
        ({"messages": [ASKED, SAID], "chat_template_kwargs": 1}, "chat_template_kwargs must be an object"),
    ],
)  # fmt: skip
def test_what_is_no_chat(record, rule):
    with pytest.raises(BadChat) as caught:
        read_record(record)
    assert rule in str(caught.value)


# ---- files


def chat(number: int, answer: str = "fine") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"what is {number}?"}, {"role": "assistant", "content": answer}]}


def write(path: Path, records: list[Any]) -> str:
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records) + "\n")
    return str(path)


def prepared(folder: Path, where: Path, *chats: str, train_on: Any = "answers", **data: Any) -> DataConfig:
    config = DataConfig(chats=chats, **{"tokenizer": str(folder), "split": "100,0,0", **data})
    return use_text(config, where, 400, train_on=train_on, say=SAID_LINES.append)


SAID_LINES: list[str] = []


def loader_of(config: DataConfig, length: int = 128) -> Loader:
    return train_loader(config, seq_length=length, seed=1, vocab_size=400, samples=2)


def test_labels_are_the_answers(folder, tmp_path):
    """By hand: each answer with the token that ends it, and nothing else; chats do not see each other."""
    config = prepared(folder, tmp_path, write(tmp_path / "a.jsonl", [chat(1), chat(2, "stop here")]))
    tokenizer = load_tokenizer(folder)
    batch = loader_of(config).batch([0])
    labels = batch.labels[batch.labels != IGNORE]
    texts = tokenizer.decode(labels.tolist())
    assert texts in ("fine<|im_end|>stop here<|im_end|>", "stop here<|im_end|>fine<|im_end|>")
    at = (batch.labels != IGNORE).nonzero()[:, 0]
    assert (batch.tokens[at + 1] == batch.labels[at]).all(), "labels are the next tokens"
    assert batch.documents is not None and len(set(batch.documents[batch.real > 0].tolist())) == 2
    [corpus] = loader_of(config).sources[0].corpora
    assert {origin_text(corpus, d) for d in (0, 1)} == {f"{tmp_path}/a.jsonl:1", f"{tmp_path}/a.jsonl:2"}
    assert sum(trained_of(corpus, d).sum() for d in (0, 1)) == len(labels)
    again = DataConfig(chats=(corpus.prefix,), split="100,0,0")
    assert again.is_packed and again.inside_documents
    assert (loader_of(again).batch([0]).labels == batch.labels).all()


def test_formats_in_one_file_and_several_files(folder, tmp_path):
    """JSONL, compressed or not, and Parquet, by patterns: the same chat in four formats is the same four documents."""
    write(tmp_path / "a.jsonl", [{"messages": [ASKED, SAID]}, {"instruction": "the weather?", "output": "fine"}])
    write(
        tmp_path / "b.jsonl",
        [{"conversations": [{"from": "human", "value": "the weather?"}, {"from": "gpt", "value": "fine"}]}],
    )
    rows = [{"messages": [ASKED, SAID], "tools": None}, {"messages": [{**ASKED, "name": "x"}, SAID], "tools": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    config = prepared(folder, tmp_path / "run", str(tmp_path / "[ab].jsonl"), str(tmp_path / "c.parquet"))
    corpus = Corpus(config.chats[0])
    documents = {corpus.tokens(corpus.document_start(d), corpus.document_start(d + 1)).tobytes() for d in range(5)}
    assert corpus.num_documents == 5 and len(documents) == 1
    places = {origin_text(corpus, d).rpartition("/")[2] for d in range(5)}
    assert places == {"a.jsonl:1", "a.jsonl:2", "b.jsonl:1", "c.parquet:0", "c.parquet:1"}


def test_chats_are_prepared_once(folder, tmp_path, monkeypatch):
    where, names = tmp_path / "run", write(tmp_path / "a.jsonl", [chat(n) for n in range(30)])
    config = DataConfig(chats=(names,), tokenizer=str(folder), split="90,10,0")
    assert find_text(config, where, "answers") is None and not where.exists()
    first = use_text(config, where, 400, train_on="answers", say=SAID_LINES.append)
    said: list[str] = []
    again = use_text(config, where, 400, train_on="answers", say=said.append)
    assert again == first == find_text(config, where, "answers") and not said
    assert use_text(config, where, 400, train_on="all", say=said.append) != first, "other tokens are trained"
    (tmp_path / "other.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    )
    other = use_text(
        DataConfig(**{**vars(config), "template": str(tmp_path / "other.jinja")}),
        where,
        400,
        train_on="answers",
        say=said.append,
    )
    assert other.chats != first.chats and other.template is not None
    with pytest.raises(DataError, match="prepared with task.train_on=answers, and the run has all"):
        use_text(first, where, 400, train_on="all")
    corpus = Corpus(first.chats[0])
    lines = [int(origin_text(corpus, d).rpartition(":")[2]) for d in range(30)]
    assert sorted(lines) == list(range(1, 31)) and lines != sorted(lines), "in another order"
    with pytest.raises(DataError, match="ids, the model has model.vocab_size=300"):
        use_text(config, tmp_path / "small", 300, train_on="answers")
    monkeypatch.setattr("phalanx.text.cache.tokens_before", lambda tokenizer: [5])
    assert find_text(config, where, "answers") is None, "a tokenizer that puts another token before texts"


def test_weights_and_validation_files(folder, tmp_path):
    a, b = write(tmp_path / "a.jsonl", [chat(1)] * 5), write(tmp_path / "b.jsonl", [chat(2)] * 5)
    config = prepared(folder, tmp_path / "run", "0.75", a, "0.25", b, valid={"held": b})
    assert len(config.chats) == 4 and config.chats[::2] == ("0.75", "0.25") and config.valid["held"] == config.chats[3:]
    loader = loader_of(config)
    assert [round(use.share, 2) for use in loader.use(8)] == [0.75, 0.25]


def test_workers_write_the_same(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(chats, "PIECE_BYTES", 1000)  # so that each has several
    names = [Path(write(tmp_path / f"{n}.jsonl", [chat(n + i) for i in range(40)])) for n in range(3)]
    found = []
    for workers in (1, 2):
        encoder = ChatEncoder(load_tokenizer(folder), load_chat_template(folder), "answers")
        chats.prepare_chats(names, tmp_path / f"with{workers}", encoder, "stop", workers)
        found.append([(tmp_path / f"with{workers}{end}").read_bytes() for end in (".bin", ".idx", ".lines.npy")])
    assert found[0] == found[1] and not list(tmp_path.glob("*in-order*"))


def test_bad_chats_are_named_or_counted(folder, tmp_path):
    array = write(tmp_path / "array.json", ["[", json.dumps(chat(1)), "]"])
    bad = [
        chat(1),
        "{no",
        {"messages": [ASKED]},
        {"messages": [ASKED, {"role": "bot", "content": "a"}]},
        "",
        {"text": "a"},
        {"messages": [{"role": "developer", "content": "a"}, SAID]},
        {"messages": [ASKED, {**SAID, "reasoning_content": "not written"}]},
    ]
    names = write(tmp_path / "a.jsonl", bad)
    with pytest.raises(DataError) as caught:
        prepared(folder, tmp_path / "run", names)
    lines = str(caught.value).splitlines()
    assert lines[-2:] == ["... 6 bad chats in all", "data.bad_chats=skip leaves them out"] and len(lines) == 7
    for line, (number, text) in zip(
        lines,
        (
            (2, "not JSON"),
            (3, "no answer"),
            (4, "turn 2: role is 'bot'"),
            (6, "has fields text"),
            (7, "turn 2: the template refuses the chat up to here: there are no developers here"),
        ),
    ):
        assert line.startswith(f"{names}:{number}: ") and text in line
    SAID_LINES.clear()
    config = prepared(folder, tmp_path / "run", names, bad_chats="skip")
    assert Corpus(config.chats[0]).num_documents == 1
    assert any("bad chats left out (data.bad_chats=skip): 6 (not JSON 1, no answer 1, unknown" in s for s in SAID_LINES)
    with pytest.raises(DataError, match="no chats, 5 bad ones: .*b.jsonl:1: not JSON"):
        prepared(folder, tmp_path / "none", write(tmp_path / "b.jsonl", ["{no"] * 5), bad_chats="skip")
    with pytest.raises(DataError, match=r"array.json:1: an array, not lines of JSON: jq -c '.\[\]' array.json"):
        prepared(folder, tmp_path / "array", array)
    with pytest.raises(DataError, match="a.jsonl:1: has messages, which need a chat template: data.template=FILE"):
        prepared(folder, tmp_path / "bytes", names, tokenizer="bytes", bad_chats="skip")


# ---- longer than a sequence


def long_chat() -> dict[str, Any]:
    """Of 3 answers, of which 2 fit into 64 tokens."""
    turns = [m for n in range(3) for m in chat(n, "stop here stop here")["messages"]]
    return {"messages": turns}


def test_long_chats(folder, tmp_path):
    names = write(tmp_path / "a.jsonl", [chat(1), long_chat(), chat(2)])
    config = prepared(folder, tmp_path / "run", names)
    tokenizer = load_tokenizer(folder)
    with pytest.raises(DataError) as caught:
        loader_of(config, 64)
    assert f"1 of 3 chats are longer than train.seq_length=64: {names}:2 (" in str(caught.value)
    assert "data.too_long=cut (at the end of an answer) or data.too_long=drop" in str(caught.value)

    def opened(**fields: Any) -> tuple[Loader, ChatSource, list[str]]:
        loader = loader_of(DataConfig(**{**vars(config), **fields}), 64)
        labels = [loader.batch([n]).labels for n in range(loader.num_samples)]
        [source] = loader.sources
        assert isinstance(source, ChatSource)
        return loader, source, [tokenizer.decode(each[each != IGNORE].tolist()) for each in labels]

    loader, source, texts = opened(too_long="cut")
    assert source.long.text(64) == "longer than train.seq_length=64: 1 cut after the last answer that fits"
    assert sorted(texts) == sorted(["stop here stop here<|im_end|>" * 2, "fine<|im_end|>fine<|im_end|>"])
    cut = next(s for s in range(2) if "stop" in texts[s])
    real = loader.batch([loader.locate([cut])[0].sample])
    ends = real.tokens[real.real > 0]
    assert tokenizer.decode(ends.tolist()).endswith("stop here stop here<|im_end|>"), "at a turn"
    _, source, texts = opened(too_long="drop")
    assert source.long.dropped == 1 and "".join(texts) == "fine<|im_end|>" * 2
    with pytest.raises(DataError, match="of 3 chats no answer fits into train.seq_length=8, so all would be cut off"):
        loader_of(DataConfig(**{**vars(config), "too_long": "cut"}), 8)
    for fields in ({"too_long": "cut", "bad_chats": "skip"}, {"too_long": "drop"}):
        with pytest.raises(DataError, match=r"none of 3 chats is left at train\.seq_length=8: all are longer .the sh"):
            loader_of(DataConfig(**{**vars(config), **fields}), 8)


def test_other_token_files_are_no_chats(tmp_path):
    with CorpusWriter(tmp_path / "plain", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    with pytest.raises(DataError, match="document 0 is no chat: it has 1 sequences"):
        loader_of(DataConfig(chats=(str(tmp_path / "plain"),), split="100,0,0"), 8)
