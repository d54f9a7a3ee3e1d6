"""`phalanx chat`: messages as the model's template writes them, answers as they are made."""

from __future__ import annotations

import signal

import pytest

from phalanx.base.errors import CheckpointError, ConfigError
from phalanx.inference.conversation import Conversation
from phalanx.inference.generate import TextSampler
from phalanx.inference.request import SamplingOptions
from tests.inference.test_generate import ROOT

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
GREEDY = SamplingOptions(tokens=6, temperature=0)


@pytest.fixture(scope="module")
def folder(warm, tmp_path_factory):
    """A run of a byte model, whose weights have a chat template."""
    run = tmp_path_factory.mktemp("chat") / "run"
    words = [f"dir={run}", "train.steps=1", "data.tokenizer=bytes", "optim.warmup_steps=0", "train.eval_interval=null"]
    more = ["model.max_position_embeddings=96", "train.seq_length=32"]
    done = warm.phalanx("train", "recipes/tiny_llama.yaml", *words, *more, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    weights = next((run / "checkpoints").glob("step-*")) / "weights"
    (weights / "chat_template.jinja").write_text(TEMPLATE)
    return weights


def test_answers_are_those_of_the_text_that_the_template_writes(folder):
    talk = Conversation(str(folder), GREEDY, system="be brief")
    first = "".join(talk.answer("one"))
    chat = "[system] be brief\n[user] one\n[assistant] "
    with TextSampler(str(folder)) as s:
        assert first == next(s.generate([chat], GREEDY)).text
        second = "".join(talk.answer("two"))
        more = f"{chat}{first}\n[user] two\n[assistant] "
        assert second == next(s.generate([more], GREEDY)).text
    talk.forget()
    assert "".join(talk.answer("one")) == first
    assert talk.notice == "the answer was cut off after 6 tokens" or len(first) < 6


def test_an_answer_that_is_given_up_leaves_nothing_under_way(folder):
    talk = Conversation(str(folder), SamplingOptions(tokens=30, temperature=0))
    pieces = talk.answer("one")
    next(pieces)
    pieces.close()
    assert talk._sampler.engine.idle
    assert "".join(talk.answer("two")) is not None


def test_ctrl_c_amid_a_step_leaves_an_engine_that_goes_on(folder, monkeypatch):
    """It comes while a step is computed, and while what is under way is given up."""
    talk = Conversation(str(folder), SamplingOptions(tokens=30, temperature=0))
    runner = talk._sampler.engine.runner
    run = runner.run

    def interrupted(*given):
        signal.raise_signal(signal.SIGINT)
        return run(*given)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(talk.answer("one"))
    monkeypatch.undo()
    talk.forget()
    assert "".join(talk.answer("two")) == "".join(Conversation(str(folder), talk._options).answer("two"))
    assert signal.getsignal(signal.SIGINT) is before


def test_a_chat_goes_on_after_a_message_that_is_too_long(warm, folder):
    words = ["chat", str(folder), "--tokens", "4", "--temperature", "0"]
    done = warm.phalanx(*words, cwd=ROOT, typed=f"{'x' * 100}\n/new\none\n")
    assert done.returncode == 0 and "type /new, or a shorter message" in done.stderr
    assert done.stdout == warm.phalanx(*words, cwd=ROOT, typed="one\n").stdout


def test_a_chat_that_fills_all_positions_is_refused(folder):
    talk = Conversation(str(folder), GREEDY)
    with pytest.raises(ConfigError, match="/new"):
        list(talk.answer("x" * 100))


def test_chat_in_a_pipe_and_without_a_template(warm, folder, tmp_path):
    words = ["chat", str(folder), "--tokens", "4", "--temperature", "0"]
    done = warm.phalanx(*words, cwd=ROOT, typed="one\n/new\none\n")
    assert done.returncode == 0, done.stderr
    with TextSampler(str(folder)) as s:
        answer = next(s.generate(["[user] one\n[assistant] "], SamplingOptions(tokens=4, temperature=0))).text
    assert done.stdout == f"{answer}\n" * 2 + "\n" and "Traceback" not in done.stderr
    with pytest.raises(CheckpointError, match="chat template"):
        (folder / "chat_template.jinja").rename(tmp_path / "kept")
        try:
            Conversation(str(folder), GREEDY)
        finally:
            (tmp_path / "kept").rename(folder / "chat_template.jinja")
