"""Many adapters in one engine: each request has the text and the log-probabilities that PEFT gives with its adapter, in
float64 on the same weights, whatever else is in the batch and however the model is sharded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file

from phalanx.base.errors import ConfigError
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.forecast.decide import make_plan
from phalanx.inference.adapters import with_adapters
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import load_model, without_training
from phalanx.inference.request import RequestError, SamplingOptions
from phalanx.nn.adapter import find_adapter
from tests.harness.generation import Answer, answers_of, run_of
from tests.harness.parity import MODELS
from tests.models.test_twenty_steps import random_model

FAMILIES = ("llama", "gpt2", "qwen3", "gpt_oss")
LAYOUTS = {
    "llama tp2": ("llama", 2, {"tp": 2}),
    "gpt2 pp2": ("gpt2", 2, {"pp": 2}),
    "llama tp2 pp2": ("llama", 4, {"tp": 2, "pp": 2}),
    "qwen3 cp2": ("qwen3", 2, {"cp": 2}),
    "gpt_oss ep2 tp2": ("gpt_oss", 2, {"tp": 2, "ep": 2}),
    "llama dp2": ("llama", 2, {}),
}
ROOM = EngineOptions(sequences=3, tokens=8, page_size=4, memory_gib=0.001)  # fewer rows than requests, pieces
GREEDY = SamplingOptions(tokens=5, temperature=0, logprobs=0)
PROMPT = [5, 11, 2, 7, 93, 17, 4, 61, 30]
ASKED = ("few", None, "all", "dora", "few", "stabilised", None, "all", "dora")
SCORED = 4  # so many of them; the others find the prompt's pages in memory, but only those of the same adapter


def attention_of(family: str) -> list[str]:
    return ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj"]


def every_of(family: str) -> list[str]:
    if family == "gpt2":
        return ["c_attn", "c_proj", "c_fc"]
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return names if family == "gpt_oss" else [*names, "gate_proj", "up_proj", "down_proj"]  # experts are one tensor


def adapters_of(family: str) -> dict[str, peft.LoraConfig]:
    wide = family == "gpt2"
    few = peft.LoraConfig(r=2, lora_alpha=6, target_modules=attention_of(family), fan_in_fan_out=wide)
    everything = peft.LoraConfig(
        r=3,
        lora_alpha=4,
        target_modules=every_of(family),
        rank_pattern={attention_of(family)[0]: 5},
        alpha_pattern={rf"\w+\.1\.\w+\.{attention_of(family)[0]}": 9},
        fan_in_fan_out=wide,
    )
    last = peft.LoraConfig(
        r=4, lora_alpha=3, use_rslora=True, target_modules=every_of(family)[-1:], fan_in_fan_out=wide
    )
    dora = peft.LoraConfig(r=2, lora_alpha=3, use_dora=True, target_modules=every_of(family)[-2:], fan_in_fan_out=wide)
    return {"few": few, "all": everything, "stabilised": last, "dora": dora}


def base_of(family: str) -> torch.nn.Module:
    return random_model(MODELS[family])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By family: the folder of the model, those of its adapters, and PEFT's model that has them all."""
    made = {}

    def of(family: str) -> tuple[str, dict[str, str], peft.PeftModel]:
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            base = base_of(family)
            base.save_pretrained(root / "base")
            folders = {}
            for seed, (name, config) in enumerate(adapters_of(family).items()):
                torch.manual_seed(seed)
                model = peft.get_peft_model(base_of(family), config).double()
                with torch.no_grad():
                    for key, p in model.named_parameters():
                        if "lora_" in key:
                            p.normal_(0.0, 0.3)
                model.save_pretrained(root / name)
                folders[name] = str(root / name)
            first, *rest = folders
            whole = peft.PeftModel.from_pretrained(base, folders[first], adapter_name=first)
            for name in rest:
                whole.load_adapter(folders[name], adapter_name=name)
            made[family] = str(root / "base"), folders, whole.double().eval()
        return made[family]

    return of


def answers_from(rank: int, world: int, run: Run, weights: str, folders: dict[str, str]) -> list[Answer]:
    run, served = with_adapters(run, folders)
    plan = make_plan(without_training(run, world), world)
    model = load_model(Path(weights), plan, Mesh(plan.grid, rank), served)
    engine = Engine(model, ROOM, wait_s=60)
    if rank:
        engine.follow()
        return []
    how = [replace(GREEDY, adapter=name, prompt_logprobs=0 if i < SCORED else None) for i, name in enumerate(ASKED)]
    found = answers_of(engine, [(PROMPT, each) for each in how], arrive=2)
    engine.pause()
    return found


def check(whole: peft.PeftModel, found: list[Answer]) -> None:
    """Against the forward of everything that was read and made, in float64."""
    for i, (name, (tokens, scores, of_prompt, _)) in enumerate(zip(ASKED, found, strict=True)):
        assert len(of_prompt) == (len(PROMPT) if i < SCORED else 0)
        row = torch.tensor([[*PROMPT, *tokens]])
        with torch.no_grad():
            if name is None:
                with whole.disable_adapter():
                    logits = whole(row).logits[0]
            else:
                whole.set_adapter(name)
                logits = whole(row).logits[0]
        assert logits.dtype == torch.float64
        wanted = torch.log_softmax(logits, -1)
        assert wanted[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens
        every = [score.logprob for score in (*of_prompt[1:], *scores)]
        wanted = wanted[:-1].gather(1, row[0, 1:, None])[-len(every) :, 0]
        np.testing.assert_allclose(every, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_request_has_its_own(written, family):
    weights, folders, whole = written(family)
    found = answers_from(0, 1, run_of(family), weights, folders)
    check(whole, found)
    texts = {name: tokens for name, (tokens, *_) in zip(ASKED, found)}
    assert len({tuple(tokens) for tokens in texts.values()}) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_every_layout(ranks, written, layout):
    family, world, options = LAYOUTS[layout]
    weights, folders, whole = written(family)
    found = ranks.run(f"{__name__}:answers_from", world, run_of(family, **options), weights, folders)
    check(whole, found[0])


def changed(folder: str, to: Path, **config) -> str:
    """A copy of an adapter whose adapter_config.json has other values."""
    to.mkdir()
    for path in Path(folder).iterdir():
        to.joinpath(path.name).write_bytes(path.read_bytes())
    text = json.loads((to / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps({**text, **config}))
    return str(to)


def wider(folder: str, to: Path) -> str:
    """A copy for a model with one feature more."""
    changed(folder, to)
    file = to / "adapter_model.safetensors"
    values = load_file(file)
    save_file({k: np.pad(v, ((0, 0), (0, 1))) if "lora_A" in k else v for k, v in values.items()}, file)
    return str(to)


def test_what_cannot_be_served_is_said_at_once(written, tmp_path):
    _, folders, _ = written("llama")
    _, others, _ = written("gpt2")
    few = folders["few"]
    (tmp_path / "empty").mkdir()
    asked = {
        "dora": (
            changed(few, tmp_path / "dora", use_dora=True),
            "needs all of .lora_A.weight, .lora_B.weight, .lora_mag",
        ),
        "prompt": (changed(few, tmp_path / "prompt", peft_type="PROMPT_TUNING"), "only LORA is served"),
        "start": (changed(few, tmp_path / "start", init_lora_weights="pissa_niter_4"), "not the model's own weights"),
        "bias": (changed(few, tmp_path / "bias", bias="all"), "trained biases are not served"),
        "whole": (changed(few, tmp_path / "whole", modules_to_save=["lm_head"]), "trained whole"),
        "other": (others["few"], "is no linear of this model that can have an adapter"),
        "none": (str(tmp_path / "empty"), "empty"),
        "wide": (
            wider(few, tmp_path / "wide"),
            "is for 48 outputs of 33 inputs; this model has 48 outputs of 32 inputs",
        ),
    }
    with pytest.raises(ConfigError) as told:
        with_adapters(run_of("llama"), {name: folder for name, (folder, _) in asked.items()})
    assert len(told.value.problems) == len(asked)
    for problem, (name, (_, rule)) in zip(told.value.problems, asked.items(), strict=True):
        assert problem.field == "--adapter" and problem.value.startswith(f"{name}=") and rule in problem.rule
    own = replace(run_of("llama"), lora=find_adapter("lora").Config())
    with pytest.raises(ConfigError, match="an adapter of its own"):
        with_adapters(own, {"few": few})


def test_an_unknown_name_is_refused(written):
    weights, folders, _ = written("llama")
    run, served = with_adapters(run_of("llama"), {"few": folders["few"]})
    plan = make_plan(without_training(run, 1), 1)
    engine = Engine(load_model(Path(weights), plan, Mesh(plan.grid, 0), served), ROOM)
    with pytest.raises(RequestError, match="adapter='fwe': must be the name of an adapter; the engine has few"):
        engine.submit(PROMPT, replace(GREEDY, adapter="fwe"))
