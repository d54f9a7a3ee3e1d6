"""Megatron-LM's data, tokenizers, checkpoints, logs and limits, and what becomes of each here."""

from __future__ import annotations

from typing import Any

from phalanx.config.importers.megatron_model import TITLE
from phalanx.config.importers.translation import (
    Becomes,
    BuiltIn,
    Missing,
    Translation,
    number,
    whole,
)


def data(t: Translation, ranks: int | None) -> None:
    path, fake = t.first("--data-path", "--train-data-path"), "--mock-data"
    if t.has(fake):
        t.set("data.mock", True, fake)
        t.apply({"--split": BuiltIn("made-up tokens are not split"), path: BuiltIn("made-up tokens are read instead")})
    elif t.has(path):
        t.set("data.paths", lambda: paths(t.value(path)), path)
    else:
        t.by_hand("data.paths", "--data-path is not in the text")
    if not t.has(fake):
        t.set("data.split", lambda: str(t.value("--split", "969,30,1")), "--split")
    valid = "--valid-data-path"
    if t.has(valid):
        t.set("data.valid", lambda: {"valid": paths(t.value(valid))}, valid)
    tokenizer(t)
    reset = [name for name in ("--reset-position-ids", "--reset-attention-mask") if t.has(name)]
    if len(reset) == 2:
        t.set("data.document_attention", True, *reset)
    t.apply({name: Missing("data.document_attention does both: positions and attention") for name in reset})


def paths(value: Any) -> list[str]:
    words = value if isinstance(value, list) else str(value).split()
    return [str(word) for word in words]


def tokenizer(t: Translation) -> None:
    model, kind, vocab, merges = "--tokenizer-model", "--tokenizer-type", "--vocab-file", "--merge-file"
    null = t.value(kind) == "NullTokenizer"
    if t.has(model) and not null:
        value = str(t.value(model))
        if t.is_open(model) or "/" not in value or value.startswith((".", "/")) or value.endswith((".model", ".json")):
            t.set("data.tokenizer", lambda: str(t.value(model)), model, kind)
        else:
            t.by_hand("data.tokenizer", f"a folder with the files of {value}; nothing is downloaded", model)
    elif t.has(vocab):
        both = "a folder with both files as vocab.json and merges.txt" if t.has(merges) else "a tokenizer.json of it"
        t.by_hand("data.tokenizer", both, vocab, merges)
    unused = "the tokenizer's file says what it is; token files need none" if not null else "ids are read as they are"
    t.apply({name: BuiltIn(unused) for name in (kind, model, vocab, merges)})


IMPORT = "make a folder of one by `phalanx import PATH -o FOLDER --config HF`"


def saving(t: Translation, ranks: int | None) -> None:
    save, load, keep = "--save", "--load", "--save-retain-interval"
    if t.has(save):
        t.set("dir", lambda: str(t.value(save)), save)
    every = t.first("--save-interval", "--persistent-save-interval")
    if t.has(every):
        t.set("checkpoint.interval", lambda: whole(t.value(every)), every)
    if t.has(keep):
        t.set("checkpoint.keep_every", lambda: whole(t.value(keep)), keep)
        t.set("checkpoint.keep_last", 2, keep)
    else:
        t.set("checkpoint.keep_last", 0, keep)
    same_place = t.has(load) and same_text(t.value(load), t.value(save)) and t.is_open(load) == t.is_open(save)
    if same_place or (t.is_open(load) and t.has(save) and t.is_open(save)):
        t.built_in(load, "a run continues from its own folder by itself")
    elif t.has(load):
        t.by_hand("init_from", f"{load} holds {TITLE}'s checkpoints: {IMPORT}", load)
    if t.has("--pretrained-checkpoint"):
        t.by_hand("init_from", IMPORT, "--pretrained-checkpoint")
    t.apply({"--async-save": Becomes("checkpoint.background", bool)})


def same_text(a: Any, b: Any) -> bool:
    return isinstance(a, str) and a == b


def logging(t: Translation, ranks: int | None) -> None:
    t.set("log.interval", lambda: whole(t.value("--log-interval", 100)), "--log-interval")
    folder, project = "--tensorboard-dir", "--wandb-project"
    if t.has(folder):
        t.set("log.tensorboard", True, origin=folder)
        t.built_in(folder, "log.tensorboard writes to tb/ in the run's folder")
    if t.has(project):
        t.set("log.wandb", lambda: str(t.value(project)), project)
        for name, ours in {"--wandb-exp-name": "log.wandb_name", "--wandb-entity": "log.wandb_entity"}.items():
            if t.has(name):
                t.set(ours, lambda name=name: str(t.value(name)), name)  # type: ignore[misc]
    start, end = "--profile-step-start", "--profile-step-end"
    if t.has("--profile"):

        def steps() -> str:  # they count steps that are done
            return f"{whole(t.value(start, 10)) + 1}:{whole(t.value(end, 12)) + 1}"

        t.set("train.profile", steps, "--profile", start, end)
    t.apply({name: BuiltIn("has no effect without --profile") for name in (start, end)})
    limit = "--exit-duration-in-mins"
    if t.has(limit):
        t.set("train.time_limit_s", lambda: 60.0 * number(t.value(limit)), limit)
    timeout = "--distributed-timeout-minutes"
    t.set("train.timeout_s", lambda: 60.0 * number(t.value(timeout, 10)), timeout)
    stop = "--exit-interval"
    if t.has(stop) and not t.is_open(stop):
        done = t.setting("train.steps")
        late = isinstance(done, int) and number(t.value(stop)) >= done
        ends = BuiltIn("the run ends before") if late else Missing("train.steps ends a run")
        t.apply({stop: ends})
