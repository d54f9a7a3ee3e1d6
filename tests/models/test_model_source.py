"""Configs that name a Hugging Face folder: what it supplies, what must not differ, and what of it travels into
checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from phalanx.base.errors import CheckpointError, ConfigError
from phalanx.base.placement import Placement
from phalanx.checkpoint.convert import export
from phalanx.checkpoint.hf import model_config_from_hf
from phalanx.config.device_check import Facts
from phalanx.config.read import explain, load_run, read
from phalanx.config.run import Run
from phalanx.config.write import save_run
from phalanx.forecast.check import check
from phalanx.text.tokenizers import load_tokenizer
from phalanx.training.main import train

TRAIN = {
    "train": {"steps": 2, "global_batch": 2, "micro_batch": 1, "seq_length": 16},
    "data": {"mock": True},
    "log": {"report": False},
}
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small Llama as transformers saves it, with a tokenizer, a chat template and settings for generation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("hf") / "theirs"
    sizes = dict(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, rope_theta=5e5, rms_norm_eps=3e-5, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0)
    )
    for name, value in GENERATION.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(path)
    load_tokenizer("bytes").save(path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def problems(*overrides: str, base=TRAIN) -> list:
    loaded = read(None, overrides, base)
    return loaded.problems or check(loaded.run, Facts())


def last_weights(run: Run) -> Path:
    return sorted(Path(run.dir).glob("checkpoints/*"))[-1] / "weights"


@pytest.mark.trust(
    22, "init_from without a model section", "the folder supplies family, sizes and tokenizer, wherever they are unset"
)
@pytest.mark.parametrize("key", ["init_from", "model.from"])
def test_a_folder_supplies_what_is_unset(folder, tmp_path, key):
    run = load_run(None, [f"{key}={folder}"], TRAIN)
    assert run.model == model_config_from_hf(folder) and run.model.rope_theta == 5e5
    assert run.data.tokenizer == str(folder) and run.model_source == str(folder)
    assert run.init_from == (str(folder) if key == "init_from" else None)
    assert problems(f"{key}={folder}") == []
    own = load_run(
        None,
        [f"{key}={folder}", "data.tokenizer=bytes", "model.rope_theta=1e4", "model.tie_word_embeddings=false"],
        TRAIN,
    )
    assert (own.data.tokenizer, own.model.rope_theta, own.model.hidden_size) == ("bytes", 1e4, 32)
    save_run(run, tmp_path / "config.yaml")  # the whole model stands in the resolved config
    assert load_run(tmp_path / "config.yaml") == run
    text = (tmp_path / "config.yaml").read_text()
    assert "hidden_size: 32" in text and "from:" not in text.replace("init_from:", "")


def test_a_folder_without_a_tokenizer_supplies_none(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("token*"))
    assert load_run(None, [f"init_from={tmp_path}/bare"], TRAIN).data.tokenizer is None
    (tmp_path / "bare/tokenizer.json").write_text("{")
    assert load_run(None, [f"init_from={tmp_path}/bare"], TRAIN).data.tokenizer is None  # not one that can be read


def test_yaml_and_python_configs(folder, tmp_path):
    steps = json.dumps(TRAIN["train"])
    (tmp_path / "a.yaml").write_text(
        f"model: {{from: {folder}, initializer_range: 0.1}}\ntrain: {steps}\ndata: {{mock: true}}\n"
    )
    run = load_run(tmp_path / "a.yaml")
    assert run.model == replace(model_config_from_hf(folder), initializer_range=0.1)
    (tmp_path / "b.py").write_text(
        "from phalanx.checkpoint.hf import model_config_from_hf\nfrom phalanx.config.run import Run, TrainConfig\n"
        f"def run():\n    return Run(model=model_config_from_hf({str(folder)!r}), init_from={str(folder)!r},\n"
        "               train=TrainConfig(steps=2, global_batch=2, micro_batch=1, seq_length=16))\n"
    )
    assert load_run(tmp_path / "b.py").data.tokenizer == str(folder)
    assert "supplies family, sizes and tokenizer" in explain("model.from")


@pytest.mark.trust(
    22,
    "a model section of another architecture beside init_from",
    "exit 2, naming each field that differs with both values",
)
def test_another_architecture_than_the_folders(folder, tmp_path):
    [found] = problems(
        f"init_from={folder}", "model.hidden_size=64", "model.num_hidden_layers=3", "model.rope_theta=1e6"
    )
    assert (
        found.field == "init_from"
        and "model.hidden_size 32 -> 64" in found.rule
        and "model.num_hidden_layers 2 -> 3" in found.rule
    )
    assert "rope_theta" not in found.rule  # a longer context is trained so
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "num_attention_heads": 8, "rms_norm_eps": 1e-6}))
    [both] = problems(f"init_from={folder}", f"model.from={tmp_path}/other")
    assert "model.num_attention_heads 4 -> 8" in both.rule and "model.rms_norm_eps 3e-05 -> 1e-06" in both.rule
    [family] = problems(f"model.from={folder}", "model.family=qwen3")
    assert family.field == "model.family" and family.rule.startswith("must be llama, as model.from has it")
    assert "same family" in problems(f"init_from={folder}", "model.family=gpt2", base={**TRAIN, "model": GPT2})[0].rule


GPT2 = {"family": "gpt2", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.trust(22, "phalanx train without a model", "three lines that say how to name one, not 3,300 characters")
def test_a_missing_model_takes_three_lines():
    with pytest.raises(ConfigError) as raised:
        load_run(None, (), TRAIN)
    lines = str(raised.value).splitlines()
    assert len(lines) == 3 and len(str(raised.value)) < 500
    assert "model=None: is required" in lines[0] and "init_from=FOLDER" in lines[1] and "model.from=FOLDER" in lines[2]


@pytest.mark.parametrize("key", ["init_from", "model.from"])
def test_folders_that_supply_nothing(tmp_path, key):
    (tmp_path / "empty").mkdir()
    [none] = problems(f"{key}={tmp_path}/empty")
    assert (none.field, none.rule) == (key, "must be a Hugging Face folder: it has no config.json")
    [typo] = problems(f"{key}={tmp_path}/emtpy")
    assert typo.field == key and typo.valid == (f"{tmp_path}/empty",) and typo.error is CheckpointError
    (tmp_path / "empty/config.json").write_text('{"model_type": "albert"}')
    [other] = problems(f"{key}={tmp_path}/empty")
    assert "model_type='albert' is no family of Phalanx" in other.rule
    rules = ("must be the path of a Hugging Face folder", "must be str or null, got int")
    assert any(p.field == key and p.rule in rules for p in problems(f"{key}=3"))


def test_weights_of_the_folder_or_random_ones(folder, tmp_path):
    truth = load_file(folder / "model.safetensors")
    for key, same in (("init_from", True), ("model.from", False)):
        run = load_run(None, [f"{key}={folder}", f"dir={tmp_path}/{key}", "optim.lr=0", "optim.weight_decay=0"], TRAIN)
        train(run, Placement())
        found = load_file(last_weights(run) / "model.safetensors")
        matrices = [name for name, values in truth.items() if values.ndim > 1]
        assert all(np.array_equal(found[name], truth[name]) == same for name in matrices)


@pytest.mark.parametrize("key", ["init_from", "model.from"])
@pytest.mark.trust(
    22,
    "init_from an instruction-tuned folder",
    "its token ids, generation settings and chat template are in every checkpoint",
)
def test_what_belongs_to_the_source_travels(folder, tmp_path, key):
    moved = tmp_path / "theirs"
    shutil.copytree(folder, moved)
    run = load_run(None, [f"{key}={moved}", f"dir={tmp_path}/run", "checkpoint.interval=1"], TRAIN)
    train(run, Placement())
    for weights in (tmp_path / "run").glob("checkpoints/*/weights"):
        assert_travelled(weights)
    assert len(list((tmp_path / "run").glob("checkpoints/*/weights"))) == 2
    shutil.rmtree(moved)
    recomputed = load_run(tmp_path / "run/config.yaml", ["train.steps=3", "optim.decay_steps=2"])  # the folder is gone
    assert check(recomputed, Facts()) == [] and recomputed.data.tokenizer == f"{tmp_path}/run/source"
    train(recomputed, Placement())
    assert last_weights(run).parent.name == "step-00000003"
    assert_travelled(last_weights(run))
    export(tmp_path / "run", tmp_path / "exported", "bf16")
    assert_travelled(tmp_path / "exported")


def assert_travelled(weights: Path) -> None:
    """Token ids, generation settings and chat template are the source's; transformers reads them."""
    from transformers import AutoTokenizer, GenerationConfig

    config = json.loads((weights / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 3], 0)
    generation = GenerationConfig.from_pretrained(weights)
    assert {name: getattr(generation, name) for name in GENERATION} == GENERATION and generation.eos_token_id == [2, 3]
    assert AutoTokenizer.from_pretrained(weights).chat_template == "{{ messages }}"


def test_another_tokenizer_takes_nothing_of_the_source(folder, tmp_path):
    """Ids of one vocabulary mean nothing in another."""
    run = load_run(None, [f"init_from={folder}", "data.tokenizer=null:299", f"dir={tmp_path}/run"], TRAIN)
    train(run, Placement())
    weights = last_weights(run)
    assert (
        json.loads((weights / "config.json").read_text())["bos_token_id"] is None
        and not (weights / "chat_template.jinja").exists()
    )


def test_a_run_from_python_carries_them_too(folder, tmp_path):
    run = load_run(None, [f"init_from={folder}", f"dir={tmp_path}/run"], TRAIN)
    train(replace(run, model_source=None), Placement())
    assert_travelled(last_weights(run))


def test_a_tokenizer_named_later_is_no_other_data(folder, tmp_path):
    """Runs that began before the folder supplied its tokenizer go on."""
    run = load_run(None, [f"init_from={folder}", f"dir={tmp_path}/run", "optim.decay_steps=2"], TRAIN)
    train(replace(run, data=replace(run.data, tokenizer=None)), Placement())
    train(replace(run, train=replace(run.train, steps=3)), Placement())
    assert json.loads((last_weights(run).parent / "manifest.json").read_text())["model"] == asdict(run.model)
