"""What people type: other programs' words and forms, completion in shells, the schema for editors, and our last word
under torchrun."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import jsonschema
import pytest
from ruamel.yaml import YAML

from phalanx.base import tree
from phalanx.base.errors import ConfigError
from phalanx.cli.completion import values_of
from phalanx.cli.main import cli
from phalanx.cli.verbs import Verbs, as_overrides
from phalanx.config.read import load_run, read
from phalanx.config.run import Run
from phalanx.config.schema import config_schema
from phalanx.config.synonyms import NOT_BUILT, SYNONYMS, VALUES
from phalanx.config.write import save_run
from tests.cli.test_cli import CONFIG, ROOT

RECIPES = sorted((ROOT / "recipes").glob("tiny_*.yaml"))


@pytest.fixture
def config(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    return str(tmp_path / "run.yaml")


# ---- forms of arguments --------------------------------------------------------------------------


@pytest.mark.trust(
    26, "phalanx train runs/first, a run's folder in the place of a config", "continues that run, from any folder"
)
def test_the_folder_of_a_run_is_a_config(warm, config, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    first = warm.phalanx("train", config, "dir=runs/first", cwd=tmp_path)
    more = warm.phalanx("train", "../runs/first", "train.steps=4", cwd=tmp_path / "elsewhere")
    assert first.returncode == more.returncode == 0, more.stderr
    assert "continue from ../runs/first/checkpoints/step-00000002" in more.stdout and "done step=4" in more.stdout
    assert sorted(p.name for p in (tmp_path / "runs/first/checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    assert not (tmp_path / "elsewhere/runs").exists()
    plan = warm.phalanx("plan", "runs/first", cwd=tmp_path)
    assert plan.returncode == 0 and "4 steps" in plan.stdout
    wrong = warm.phalanx("train", "elsewhere", cwd=tmp_path)
    assert (
        wrong.returncode == 2
        and "is a folder without a config.yaml" in wrong.stderr
        and "Traceback" not in wrong.stderr
    )


@pytest.mark.parametrize(
    "words, found",
    [
        (["--train.steps=5"], ["train.steps=5"]),
        (["--train.steps", "5", "--ranks", "2"], ["train.steps=5", "--ranks", "2"]),
        (["--optim.lr", "-1", "a.b=c"], ["optim.lr=-1", "a.b=c"]),
        (["--data.paths=[a=b, c]"], ["data.paths=[a=b, c]"]),
        (["--optim.lr_scale.*embed*=0.1"], ["optim.lr_scale.*embed*=0.1"]),
        (["--", "--train.steps=5"], ["--", "--train.steps=5"]),
        (["--logs", "x.y", "--ranks=2"], ["--logs", "x.y", "--ranks=2"]),
    ],
)
@pytest.mark.trust(26, "phalanx train run.yaml --train.steps=5", "means train.steps=5")
def test_overrides_as_options(words, found):
    assert as_overrides(words) == found


def test_overrides_as_options_in_the_program(warm, config):
    done = warm.phalanx("plan", config, "--train.steps", "5", "--layout.tp=2", "--ranks", "2")
    assert done.returncode == 0 and "5 steps" in done.stdout and "tp 2" in done.stdout
    lacking = warm.phalanx("plan", config, "--train.steps", "--ranks", "2")
    assert lacking.returncode == 2 and "train.steps=VALUE" in lacking.stderr


# ---- words ---------------------------------------------------------------------------------------


def test_every_synonym_is_of_a_key_and_is_none():
    keys = {k.path for k in tree.keys(Run)}
    names = {k.name for k in tree.keys(Run)}
    assert set(SYNONYMS.values()) <= keys
    assert not (set(NOT_BUILT) | set(VALUES)) & names
    mentioned = {
        word for text in (*NOT_BUILT.values(), *VALUES.values()) for word in re.findall(r"\b[a-z]+\.[a-z_]+", text)
    } - {"torch.compile"}
    assert mentioned <= keys


@pytest.mark.parametrize(
    "override, texts",
    [
        ("layout.fsdp=true", ("layout.sharding=3", "Valid near it: layout.sharding")),
        ("layout.hsdp=8", ("layout.shard_group",)),
        ("zero_stage=2", ("layout.sharding",)),
        ("train.zero=3", ("layout.sharding=0 to 3",)),
        ("layout.ddp=true", ("layout.sharding=0",)),
        ("optim.name=shampoo", ("Shampoo is not built yet", "optim.name=adamw")),
        ("optim.soap=true", ("SOAP is not built yet",)),
        ("optim.muon=true", ("Muon is an optimizer: optim.name=muon",)),
        ("lora.use_dora=true", ("Valid near it: lora.method",)),
        ("context_parallel_size=2", ("Valid near it: layout.cp",)),
        ("train.gradient_accumulation_steps=4", ("train.global_batch",)),
    ],
)
@pytest.mark.trust(
    26,
    "layout.fsdp=true, optim.name=shampoo, lora.use_dora=true",
    "says what it is called here, or that it does not exist yet",
)
def test_words_of_others(config, override, texts):
    found = "\n".join(str(p) for p in read(config, [override]).problems)
    assert all(text in found for text in texts), found


def test_explain_lists_searches_and_says_all(warm):
    sections, every, fsdp, warm_up, soap, none = (
        warm.phalanx("explain", *words)
        for words in (
            (),
            ("--all",),
            ("--search", "fsdp"),
            ("--search", "warm-up"),
            ("--search", "soap"),
            ("--search", "xyzzy"),
        )
    )
    for name in tree.field_names(Run):
        assert re.search(rf"^{name} ", sections.stdout, re.MULTILINE)
    assert len(sections.stdout.splitlines()) < 20 and max(map(len, sections.stdout.splitlines())) <= 120
    assert all(f"\n{k.path}: " in f"\n{every.stdout}" for k in tree.leaves(Run))
    assert (
        fsdp.stdout.startswith("layout.sharding: ")
        and "optim.warmup_steps" in warm_up.stdout
        and "not built yet" in soap.stdout
    )
    assert none.returncode == 2 and "Traceback" not in none.stderr
    both = warm.phalanx("explain", "layout", "--all")
    assert both.returncode == 2 and "one of KEY" in both.stderr


def inner_verbs(command: click.Command) -> dict[str, click.Command]:
    return command.every() if isinstance(command, Verbs) else {}


def test_lines_of_verbs_that_are_imported_later_are_their_own():
    """A new process: in this one they are imported by now."""
    code = (
        "import sys, click\n"
        "from phalanx.cli.main import cli\n"
        "from phalanx.cli.verbs import Verbs, one_line\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "heavy = {'phalanx.cli.launch', 'subprocess', 'socket', 'tempfile', 'logging', 'json'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "groups = [cli, cli.commands['data']]\n"
        "count = 0\n"
        "for group in groups:\n"
        "    for name, verb in dict(group.elsewhere).items():\n"
        "        found = group.get_command(click.Context(group), name)\n"
        "        assert found.name == name and found.hidden == verb.hidden, name\n"
        "        assert verb.hidden or one_line(found) == verb.help, name\n"
        "        count += 1\n"
        "assert count >= 19 and not cli.elsewhere, count\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def groups(command: click.Command, name: str = "phalanx") -> list[tuple[str, click.Group]]:
    inside = [g for child, one in inner_verbs(command).items() for g in groups(one, f"{name} {child}")]
    return [(name, command), *inside] if isinstance(command, click.Group) else []


@pytest.mark.parametrize("name, group", groups(cli), ids=[name for name, _ in groups(cli)])
def test_every_verb_has_its_help_on_one_whole_line(name, group):
    text = group.get_help(click.Context(group, info_name=name, terminal_width=80, max_content_width=80))
    assert "..." not in text.partition("Commands:")[2]
    lines = text.partition("Commands:")[2].splitlines()
    shown = [command for command in group.every().values() if not command.hidden]
    assert len([line for line in lines if line.strip()]) == len(shown) and max(map(len, lines)) <= 80


# ---- completion ----------------------------------------------------------------------------------


def completed(*words: str, shell: str = "bash", cwd: Path | None = None) -> list[str]:
    """What a shell is offered for the last word, asked as its script asks."""
    asked = {"_PHALANX_COMPLETE": f"{shell}_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    env = {**os.environ, "PYTHONPATH": str(ROOT), **asked}
    done = subprocess.run(
        [sys.executable, "-m", "phalanx"], capture_output=True, text=True, env=env, cwd=cwd, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return (
        [line.partition(",")[2] for line in lines]
        if shell == "bash"
        else [line for line in lines if line not in ("plain", "_")]
    )


@pytest.mark.trust(26, "Tab in a shell", "completes verbs, config keys and their values")
def test_bash_completes_verbs_keys_and_values():
    assert {"train", "plan", "eval"} <= set(completed("phalanx", ""))
    assert completed("phalanx", "pl") == ["plan"]
    assert {"train.", "layout.", "dir="} <= set(completed("phalanx", "train", "x.yaml", ""))
    assert completed("phalanx", "train", "x.yaml", "optim.warm") == ["optim.warmup_steps="]
    assert {"train.precision=", "train.profile="} <= set(completed("phalanx", "train", "x.yaml", "train.pr"))
    # bash cuts words at `=`
    assert completed("phalanx", "train", "x.yaml", "train.precision", "=") == ["fp32", "bf16", "fp16", "fp64"]
    assert completed("phalanx", "train", "x.yaml", "train.precision", "=", "b") == ["bf16"]
    assert completed("phalanx", "train", "x.yaml", "layout.tp", "=", "2", "data.mock", "=", "") == ["true", "false"]
    assert completed("phalanx", "explain", "layout.cp_") == [
        "layout.cp_attention",
        "layout.cp_ulysses",
        "layout.cp_degree",
    ]


def test_names_of_seams_are_completed():
    assert values_of("train.fp8.recipe") == ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"]
    assert "1f1b" in values_of("layout.schedule") and "muon" in values_of("--optim.name")


def test_other_shells_complete_whole_words():
    assert completed("phalanx", "train", "x.yaml", "train.precision=b", shell="zsh") == ["train.precision=bf16"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_itself(tmp_path):
    """The script that a user puts into .bashrc, with what bash makes of a line."""
    program = tmp_path / "phalanx"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m phalanx "$@"\n')
    program.chmod(0o755)
    ask = """
        eval "$(_PHALANX_COMPLETE=bash_source phalanx)"
        complete -p phalanx
        compopt() { :; }  # outside of a completion bash refuses it
        COMP_WORDS=(phalanx train x.yaml train.precision = f); COMP_CWORD=5
        _phalanx_completion phalanx
        echo "${COMPREPLY[@]}"
    """
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, env=env, timeout=60)
    assert "_phalanx_completion" in done.stdout.splitlines()[0] and done.stdout.splitlines()[1] == "fp32 fp16 fp64", (
        done.stderr
    )


# ---- the schema ----------------------------------------------------------------------------------


def plain(path: Path) -> dict:
    return YAML(typ="safe", pure=True).load(path.read_text())


@pytest.mark.trust(
    26, "an editor that knows nothing of our config files", "phalanx explain --schema writes a JSON schema of them"
)
def test_recipes_are_valid_by_the_schema_and_mistakes_are_not(tmp_path):
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    for recipe in RECIPES:
        check.validate(plain(recipe))
        save_run(load_run(recipe), tmp_path / "whole.yaml")
        check.validate(plain(tmp_path / "whole.yaml"))
    base = plain(RECIPES[0])
    for section, key, value in (
        ("train", "stepz", 1),
        ("train", "steps", "many"),
        ("train", "precision", "bf17"),
        ("train", "fp8", {"recipe": "blockwize"}),
        ("layout", "tp", 1.5),
        ("data", "mock", "yes"),
        ("model", "family", "x"),
    ):
        assert not check.is_valid({**base, section: {**base.get(section, {}), key: value}}), key
    train = base["train"]
    for good in (
        {"train": train, "init_from": "f"},
        {"train": train, "init_from": "f", "model": {"num_hidden_layers": 2}},
        {"train": train, "model": {"from": "f"}},
        {"train": train, "model": {"from": "f", "family": "gpt2", "max_position_embeddings": 64}},
        {**base, "init_from": None},
    ):
        check.validate(good)
    for bad in (
        {"train": train},
        {"train": train, "init_from": None},
        {"train": train, "model": {"family": "llama"}},
        {"model": {"from": "f"}},
        {"train": train, "model": {"from": 3}},
        {"train": train, "model": {"from": "f", "sizes": 3}},
        {"train": train, "init_from": "f", "model": {"x": 1}},
        {"train": train, "model": {"from": "f", "num_hidden_layers": "two"}},
    ):
        assert not check.is_valid(bad), bad
    assert check.is_valid({**base, "data": {"paths": "0.7 a 0.3 b"}})
    assert check.is_valid({**base, "train": {**train, "fp8": {"recipe": "package.module:RECIPE"}}})


def test_every_key_of_the_schema_says_what_it_means():
    schema = config_schema()
    places = [schema, *(place for place in schema["$defs"].values() if "properties" in place)]
    fields = [(name, field) for place in places for name, field in place["properties"].items() if "const" not in field]
    lacking = {name for name, field in fields if not field.get("description")}
    assert lacking <= set(tree.field_names(Run)) | {"family"}, lacking
    assert len(fields) > 150


def test_the_program_prints_the_schema(warm):
    done = warm.phalanx("explain", "--schema")
    assert done.returncode == 0 and json.loads(done.stdout) == json.loads(json.dumps(config_schema()))


# ---- torchrun ------------------------------------------------------------------------------------


@pytest.mark.trust(
    26,
    "torchrun -m phalanx train run.yaml layout.tp=3",
    "the reason stands again at the end, below torchrun's traceback",
)
def test_torchruns_report_ends_with_our_message(config):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "phalanx",
        "train",
        config,
        "layout.tp=3",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 1
    report = done.stderr.rpartition("ChildFailedError")[2]
    assert "layout.tp=3: must divide num_attention_heads" in report.partition("Root Cause")[2], done.stderr


def test_a_word_to_torchrun_is_left_only_where_it_asks(monkeypatch, tmp_path):
    from phalanx.cli.main import guarded

    def fail():
        raise ConfigError([])

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert guarded(fail) == 2
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone/error.json"))
    assert guarded(fail) == 2 and not (tmp_path / "gone").exists()
