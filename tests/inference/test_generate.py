"""`phalanx generate`: text as it is made, kept on Ctrl-C, and never past the positions that a model has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import phalanx as px
from phalanx.base.errors import ConfigError, DataError
from phalanx.cli.generate import options_of
from phalanx.inference.engine import EngineOptions
from phalanx.inference.generate import TextStream, generate, read_prompts
from phalanx.inference.request import SamplingOptions
from phalanx.text.tokenizers import load_tokenizer
from tests.training.test_example import started

ROOT = Path(__file__).parents[2]
POSITIONS = 49  # no tp divides it
LONG = SamplingOptions(tokens=1000, temperature=0.8, seed=1)


@pytest.fixture(scope="module")
def runs(warm, tmp_path_factory):
    """Two runs of a byte model: one with few positions, one with many."""
    folder = tmp_path_factory.mktemp("runs")
    for name, positions in (("short", POSITIONS), ("long", 8192)):
        words = [
            f"dir={folder / name}",
            f"model.max_position_embeddings={positions}",
            "train.seq_length=32",
            "train.steps=1",
            "data.tokenizer=bytes",
        ]
        done = warm.phalanx(
            "train", "recipes/tiny_llama.yaml", *words, "optim.warmup_steps=0", "train.eval_interval=null", cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.trust(
    27, "phalanx generate with more tokens than the model has positions", "stops at the last position and says so"
)
def test_generation_stops_where_positions_end(runs, warm):
    stream = TextStream(str(runs / "short"), "Arma virumque", LONG)
    text = "".join(stream)
    prompt = len(load_tokenizer("bytes").encode("Arma virumque"))
    assert stream.notice is None or f"stopped after {POSITIONS - prompt} of 1000 tokens" in stream.notice
    assert (
        len(stream.ids) <= POSITIONS and generate(str(runs / "short"), "Arma virumque", LONG) == "Arma virumque" + text
    )
    done = warm.phalanx("generate", str(runs / "short"), "--prompt", "Arma", "--tokens", "1000", "--seed", "3")
    assert done.returncode == 0 and done.stdout.startswith("Arma") and "max_position_embeddings" in done.stderr
    again = warm.phalanx(
        *("generate", str(runs / "short"), "--prompt", "Arma", "--tokens", "1000", "--seed", "3"),
        "--speculate",
        "ngram:2",
    )
    assert again.stdout == done.stdout and "drafted tokens accepted" in again.stderr
    refused = warm.phalanx("generate", str(runs / "short"), "--prompt", "Arma", "--speculate", "mtq")
    assert refused.returncode == 2 and "must be ngram:N, mtp or mtp:N" in refused.stderr
    refused = warm.phalanx("generate", str(runs / "short"), "--prompt", "Arma", "--speculate", "mtp:2")
    assert refused.returncode == 2 and "needs a model with multi-token prediction modules" in refused.stderr
    schema = runs / "schema.json"
    schema.write_text('{"enum": ["one", {"two": true}]}')
    kept = warm.phalanx("generate", str(runs / "short"), "--prompt", "Arma", "--json-schema", str(schema))
    assert kept.stdout in ('Arma"one"\n', 'Arma{"two": true}\n'), kept.stderr
    schema.write_text('{"type": "two"}')
    refused = warm.phalanx("generate", str(runs / "short"), "--prompt", "Arma", "--json-schema", str(schema))
    assert refused.returncode == 2 and "Invalid type: two" in refused.stderr and refused.stdout == ""
    few = TextStream(str(runs / "short"), "Arma", replace(LONG, tokens=3))
    assert list(few) and few.notice is None and len(few.ids) <= 7


@pytest.mark.trust(
    27,
    "phalanx generate with a prompt longer than the model's positions",
    "exit 2 with both numbers; the prompt was cut in silence",
)
def test_a_prompt_that_is_too_long_is_refused(runs, warm):
    for prompt in ("a" * POSITIONS, "a" * 500):
        with pytest.raises(
            ConfigError, match=f"tokens of the prompt={len(prompt)}, model.max_position_embeddings={POSITIONS}"
        ):
            TextStream(str(runs / "short"), prompt, LONG)
    assert len("".join(TextStream(str(runs / "short"), "a" * (POSITIONS - 1), LONG))) <= 1
    done = warm.phalanx("generate", str(runs / "short"), "--prompt", "b" * 5000)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr) < 400 and "Traceback" not in done.stderr


@pytest.mark.trust(27, "Ctrl-C during phalanx generate", "text appears as it is made, what there is stays, exit 130")
def test_text_appears_as_it_is_made_and_stays_on_ctrl_c(runs, warm):
    """The signal is sent when some of the text is there: it could not be, if all came at the end, and the rest would
    take minutes."""
    words = [
        str(warm.folder / "phalanx"),
        "generate",
        str(runs / "long"),
        "--prompt",
        "Arma",
        "--tokens",
        "8000",
        "--temperature",
        "0",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as program:
        assert program.stdout is not None
        seen = program.stdout.read(len("Arma") + 4)
        program.send_signal(signal.SIGINT)
        rest, errors = program.communicate(timeout=60)
    assert program.returncode == 130 and b"stopped by Ctrl-C" in errors and b"Traceback" not in errors
    text = (seen + rest).decode(errors="replace")
    assert text.startswith("Arma") and text.endswith("\n") and 8 <= len(seen + rest) < 8000


def test_many_prompts_on_ranks_give_the_texts_of_one_process(runs, warm, tmp_path):
    """Answers in the order of the prompts, on any layout; what does nothing, and lines that are no prompts, are
    refused."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "Arma virumque"}\n\n{"prompt": [65, 66]}\n')
    words = [
        "generate",
        str(runs / "long"),
        "--prompts",
        str(prompts),
        "--samples",
        "2",
        "--tokens",
        "6",
        "--seed",
        "5",
    ]
    found = []
    for name, more in (("one", []), ("two", ["layout.cp=2", "--ranks", "2"])):
        done = warm.phalanx(*words, "-o", str(tmp_path / name), "train.precision=fp64", *more)
        assert done.returncode == 0, done.stderr
        found.append([json.loads(line) for line in (tmp_path / name).read_text().splitlines()])
    assert found[0] == found[1]
    assert [(a["prompt"], a["sample"]) for a in found[0]] == [
        ("Arma virumque", 0),
        ("Arma virumque", 1),
        ([65, 66], 0),
        ([65, 66], 1),
    ]
    assert found[0][0]["text"] != found[0][1]["text"] and all(a["tokens"] <= 6 for a in found[0])
    refused = warm.phalanx(*words, "optim.lr=1")
    assert refused.returncode == 2 and "optim.lr" in refused.stderr and "layout.*" in refused.stderr
    refused = warm.phalanx(*words, "layout.tp=0")
    assert refused.returncode == 2 and "layout.tp=0: must be an integer >= 1" in refused.stderr
    prompts.write_text('{"prompt": 3}\n')
    refused = warm.phalanx(*words)
    assert refused.returncode == 3 and "line 1" in refused.stderr


def test_lines_of_prompts_end_at_line_feeds_alone(tmp_path):
    """Python has other ends of lines too, which JSON writes as they are."""
    texts, file = ["a\u2028b\x85c", "d"], tmp_path / "p.jsonl"
    file.write_bytes("\r\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in texts).encode())
    assert read_prompts(str(file)) == tuple(texts)


def test_what_nothing_reads_beside_a_prompt_is_refused(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "seed": 3, "max_tokens": 9}\n')
    with pytest.raises(DataError, match="line 2: .* leave out max_tokens, seed"):
        read_prompts(str(file))


@pytest.mark.parametrize("bad", [b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 100_000])
def test_files_that_are_no_text_are_refused(tmp_path, bad):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n' + bad)
    with pytest.raises(DataError, match="p.jsonl, line 2 is not"):
        read_prompts(str(file))
    file.write_bytes(b"\xff")
    with pytest.raises(DataError, match="p.jsonl: cannot be read"):
        options_of({"json_schema": str(file)})


SCRIPT = """
import json, sys
import phalanx as px
from phalanx.inference.engine import EngineOptions
from phalanx.inference.request import SamplingOptions

how = SamplingOptions(tokens=6, temperature=0.8, seed=5)
room = EngineOptions(sequences=2, length=32)
with px.sampler(sys.argv[1], "train.precision=fp64", *sys.argv[2:], options=room) as s:
    found = {(a.prompt, a.sample): a.text for a in s.generate(["Arma virumque", [65, 66]], how, samples=2)}
    if found:
        print(json.dumps([found[key] for key in sorted(found)]))
"""


OWN = SamplingOptions(tokens=6, temperature=0.8, seed=5)


def test_a_program_of_ones_own_makes_text(runs):
    folder = str(runs / "long")
    with px.sampler(folder, "train.precision=fp64", options=EngineOptions(sequences=2, length=32)) as s:
        found = {a.text for a in s.generate(["Arma virumque", [65, 66]], OWN, samples=2)}
    assert len(found) > 2
    for words, text in ((["layout.tp=2"], "needs 2 ranks.*phalanx generate"), (["optim.lr=1"], "does nothing to gen")):
        with pytest.raises(ConfigError, match=text), px.sampler(folder, *words):
            pass


@pytest.mark.soak
def test_a_program_of_ones_own_makes_the_same_texts_on_ranks(runs, warm, tmp_path):
    """As torchrun starts it; also where tp does not divide the model's positions."""
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    folder = str(runs / "short")
    [alone] = started(warm.python, script, folder)
    texts = json.loads(alone.splitlines()[-1])
    assert len(set(texts)) > 2
    first, second = started(warm.python, script, folder, "layout.tp=2", ranks=2)
    assert json.loads(first.splitlines()[-1]) == texts and not second


def test_a_stop_string_ends_a_text_before_it(runs):
    options = SamplingOptions(tokens=40, temperature=0, seed=1)
    whole = "".join(TextStream(str(runs / "long"), "Arma", options))
    stop = whole[3:5]
    stopped = "".join(TextStream(str(runs / "long"), "Arma", options, stop=[stop]))
    assert stopped == whole[: whole.index(stop)]
