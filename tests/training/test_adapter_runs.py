"""Runs with `lora`: they go on to the same bits, their checkpoints hold the base once, and whatever reads these takes
the adapters along or says that it does not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from phalanx.base.errors import CheckpointError, ConfigError, DamagedCheckpoint
from phalanx.base.placement import Placement
from phalanx.checkpoint.contents import Contents
from phalanx.checkpoint.convert import export
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.merge import merge
from phalanx.checkpoint.tools import average, diff, reshard
from phalanx.comm.mesh import Mesh
from phalanx.config.read import load_run
from phalanx.config.run import CheckpointConfig, Fp8Config, Run
from phalanx.data.config import DataConfig
from phalanx.engine.build import build
from phalanx.evaluation.perplexity import ForwardOnly
from phalanx.forecast.check import Facts, check
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.forecast.text import num_parameters
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import adapters_of, forward_only, load_alone
from phalanx.inference.request import SamplingOptions
from phalanx.layout.config import LayoutConfig
from phalanx.nn.adapter import find_adapter
from phalanx.nn.objective import find_objective
from phalanx.observe.out_of_memory import held
from phalanx.planning.freeze import num_frozen
from phalanx.planning.merging import merging_of
from phalanx.text.tokenizers import load_tokenizer
from phalanx.training.main import train
from tests.harness.chat_model import chat_folder
from tests.harness.generation import answers_of
from tests.harness.parity import base_run, sample_batch
from tests.training.test_loop import MODEL, make_run

LORA = {
    "rank": 3,
    "alpha": 7.0,
    "targets": ["*.q_proj.weight", "*.v_proj.weight", "*.down_proj.weight", "lm_head.weight"],
}


def with_lora(run: Run, **fields) -> Run:
    return replace(run, lora=find_adapter("lora").Config(**{**LORA, **fields}))


def trained(folder: Path, steps: int = 4, **fields) -> Path:
    """The last checkpoint of a run that saves every two steps."""
    run = replace(with_lora(make_run(folder, steps=steps), **fields), checkpoint=CheckpointConfig(interval=2))
    train(run, Placement())
    return folder / "checkpoints" / f"step-{steps:08d}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("run"))


def masters(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    with Contents(path) as contents:
        return {(kind, name): contents.read(kind, name) for kind in contents.kinds for name in contents.shapes(kind)}


def same(a: Path, b: Path) -> bool:
    first, second = masters(a), masters(b)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_a_run_goes_on_to_the_same_bits(checkpoint, tmp_path):
    """Truth: the run that was never interrupted."""
    shutil.copytree(checkpoint.parents[1], tmp_path / "run")
    last = tmp_path / "run/checkpoints" / checkpoint.name
    shutil.rmtree(last)
    trained(tmp_path / "run")
    assert same(checkpoint, last) and not same(checkpoint, checkpoint.with_name("step-00000002"))


def test_a_checkpoint_holds_the_base_once(checkpoint):
    """In weights/, with the bits of its first step; state/ has what is trained."""
    with Contents(checkpoint) as contents, Contents(checkpoint.with_name("step-00000002")) as before:
        mine = [name for name in contents.shapes("master") if ".lora_" in name]
        assert len(mine) == 2 * 3 * 2 + 2 and set(contents.shapes("m")) == set(mine)
        assert contents.shapes("weights").keys() == contents.frozen
        assert all(torch.equal(t, before.read("weights", name)) for name, t in contents.pairs("weights"))
    stored = [key for file in (checkpoint / "state").glob("*.safetensors") for key in load_file(file)]
    assert stored and all(".lora_" in key for key in stored)


def test_it_is_written_anew_and_continued(checkpoint, tmp_path):
    anew = reshard(checkpoint, tmp_path / "anew", files=2)
    assert not list(diff(checkpoint, anew))
    files = [(path / "adapter" / "adapter_model.safetensors").read_bytes() for path in (checkpoint, anew)]
    assert files[0] == files[1]
    run = with_lora(make_run(tmp_path / "run", steps=6))
    train(replace(run, checkpoint=CheckpointConfig(load=str(anew))), Placement())


def test_generate_and_eval_apply_the_adapters(checkpoint):
    """Truth: transformers with the adapters that PEFT reads from the checkpoint."""
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint / "weights", dtype=torch.float32).eval()
    ids = list(range(3, 14))
    options = SamplingOptions(tokens=1, temperature=0, prompt_logprobs=1)
    engine = Engine(load_alone(checkpoint / "weights"), EngineOptions(sequences=1, tokens=16, memory_gib=0.01))
    ((_, _, scores, _),) = answers_of(engine, [(ids, options)])
    found = torch.tensor([score.logprob for score in scores[1:] if score])
    with torch.no_grad():
        without = base(torch.tensor([ids])).logits[0].log_softmax(-1)[range(10), ids[1:]]
        model = peft.PeftModel.from_pretrained(base, checkpoint / "adapter").eval()
        wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)[range(10), ids[1:]]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert (found - without).abs().max() > 1e-3
    run = forward_only(with_lora(make_run(Path("unused"))))
    model_here = ForwardOnly(make_plan(run, 1), Mesh(make_plan(run, 1).grid, 0), checkpoint / "weights")
    batch = replace(sample_batch([1], False), tokens=torch.arange(16) * 3 % 67, labels=torch.arange(16) * 5 % 67)
    loss, tokens = model_here([batch]).tolist()
    with torch.no_grad():
        logits = model(batch.tokens.view(1, -1)).logits[0]
    assert loss / tokens == pytest.approx(torch.nn.functional.cross_entropy(logits, batch.labels).item(), rel=1e-6)


def test_a_run_on_chats_says_where_answers_end(tmp_path):
    """As transformers reads the checkpoint, and the folder that it is exported to: generation ends with the turn, or
    with a document."""
    folder, chats = chat_folder(tmp_path), tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "the weather?"}, {"role": "assistant", "content": "fine"}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    run = with_lora(make_run(tmp_path / "run", steps=1, seq_length=48))
    data = DataConfig(chats=(str(chats),), tokenizer=str(folder), split="100,0,0")
    run = replace(run, data=data, task=find_objective("sft").Config(name="sft"), model=replace(MODEL, vocab_size=400))
    train(run, Placement())
    step = tmp_path / "run/checkpoints/step-00000001"
    merged = merge(step, tmp_path / "merged", merging_of(run.model, run.lora))
    tokenizer = load_tokenizer(folder)
    for weights in (step / "weights", merged):
        found = transformers.GenerationConfig.from_pretrained(weights).eos_token_id
        assert found == [tokenizer.special_tokens["<|im_end|>"], tokenizer.eod]
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    assert model.generation_config.eos_token_id == found


def test_who_would_leave_the_adapters_out_says_so(checkpoint, tmp_path):
    said = "is the base of adapters, which would be left out"
    with pytest.raises(CheckpointError, match=said):
        export(checkpoint, tmp_path / "exported")
    with pytest.raises(CheckpointError, match=said):
        average([str(checkpoint), str(checkpoint.with_name("step-00000002"))], tmp_path / "mean")
    plain = replace(make_run(tmp_path / "plain", steps=1), init_from=str(checkpoint / "weights"))
    with pytest.raises(CheckpointError, match=said):
        train(plain, Placement())
    with pytest.raises(CheckpointError, match="differs in what must match:\\nlora"):
        train(replace(make_run(tmp_path / "other"), checkpoint=CheckpointConfig(load=str(checkpoint))), Placement())


def test_a_run_starts_from_the_adapters_of_another(checkpoint, tmp_path):
    """Truth: what was saved. Another rank is refused."""
    run = replace(with_lora(make_run(tmp_path / "run", steps=1)), init_from=str(checkpoint / "weights"))
    still = replace(run, optim=replace(run.optim, lr=0.0), checkpoint=CheckpointConfig(interval=1))
    train(still, Placement())
    files = [load_file(f / "adapter/adapter_model.safetensors") for f in (checkpoint, step_one(tmp_path / "run"))]
    assert files[0].keys() == files[1].keys()
    assert all(np.array_equal(files[0][name], files[1][name]) for name in files[0])
    with pytest.raises(ConfigError, match="lora.rank=2: must be that of the adapters that the run starts from"):
        train(replace(with_lora(run, rank=2), dir=str(tmp_path / "two")), Placement())


def step_one(folder: Path) -> Path:
    return folder / "checkpoints" / "step-00000001"


def test_a_damaged_adapter_is_found(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    file = tmp_path / checkpoint.name / "adapter/adapter_model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(DamagedCheckpoint, match="adapter_model"):
        load_alone(tmp_path / checkpoint.name / "weights")


def test_code_of_a_package_is_not_imported_for_a_checkpoint(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    path = tmp_path / checkpoint.name / "manifest.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    body["config"]["lora"]["method"] = "somebody.elses:Code"
    path.write_text(Manifest(**{k: v for k, v in body.items() if "sha256" not in k}).text(), encoding="utf-8")
    with pytest.raises(ConfigError, match="somebody.elses:Code.*is code of a package"):
        adapters_of(tmp_path / checkpoint.name / "weights")


# ---- what is counted


def bytes_on_rank(rank: int, world: int, run: Run) -> tuple[dict[str, int], dict[str, int]]:
    """(forecast, held) bytes by kind."""
    plan = make_plan(run, world)
    state = build(plan, Mesh(plan.grid, rank))
    return rank_uses(plan, 4)[0][state.mesh.at.pp].memory, held(state)


@pytest.mark.parametrize("world, layout", [(1, {}), (4, {"tp": 2, "pp": 2, "sharding": 3, "bucket_mb": 0})])
def test_the_forecast_is_what_is_held(ranks, world, layout):
    run = with_lora(replace(base_run("llama", precision="bf16"), layout=LayoutConfig(**layout)))
    for forecast, actual in ranks.run("tests.training.test_adapter_runs:bytes_on_rank", world, run):
        assert {kind: forecast[kind] for kind in actual} == actual
    whole = rank_uses(make_plan(replace(run, lora=None), world), 4)[0][0].memory
    few = rank_uses(make_plan(run, world), 4)[0][0].memory
    assert all(few[kind] < 0.2 * whole[kind] for kind in ("gradients", "masters", "moments"))


def test_the_plan_counts_what_is_trained():
    """Truth: rank times (inputs + outputs) of each target, by hand."""
    run = with_lora(base_run("llama"))
    plan, plain = make_plan(run, 1), make_plan(replace(run, lora=None), 1)
    trained = 4 * 3 * ((32 + 48) + (32 + 12) + (42 + 32)) + 3 * (32 + 131)
    assert num_frozen(run) == num_parameters(plain) and num_parameters(plan) == num_parameters(plain) + trained


SMALLEST = MODEL.hidden_size  # side of a target
RULES = [
    ({"targets": ["*.w_proj.weight"]}, "lora.targets", "must fit names of tensors", ["*.v_proj.weight"]),
    ({"targets": ["*norm*"]}, "lora.targets", "must fit weights of linears that can carry an adapter", ["*"]),
    ({"targets": ["*norm*", "*.q_proj.weight"]}, "lora.targets", "can carry an adapter", ["*.q_proj.weight"]),
    ({"targets": []}, "lora.targets", "must name linears", ["*"]),
    ({"rank": 0}, "lora.rank", "must be an integer >= 1", 1),
    ({"alpha": 0.0}, "lora.alpha", "must be a number in (0, inf)", 32.0),
    ({"alpha": float("nan")}, "lora.alpha", "must be a number in (0, inf)", 32.0),
    ({"rank": 4096}, "lora.rank", "at most the smaller side of each matrix", SMALLEST),
    ({"rank_pattern": {"v_proj": 0}}, "lora.rank_pattern", "must have integers >= 1", {}),
    ({"rank_pattern": {"(": 2}}, "lora.rank_pattern", "by regular expressions", {}),
    ({"rank_pattern": {"v_proj": 4096}}, "lora.rank_pattern", "at most the smaller side", {"v_proj": SMALLEST}),
    ({"rank_pattern": {"v_porj": 2}}, "lora.rank_pattern", "must have patterns that fit the end of a target", {}),
    ({"alpha_pattern": {"o_proj": 2.0}}, "lora.alpha_pattern", "must have patterns that fit the end of a target", {}),
    ({"alpha_pattern": {"v_proj": -1.0}}, "lora.alpha_pattern", "must have numbers > 0", {}),
    ({"also": ["*nrom*"]}, "lora.also", "must fit names of tensors", []),
    ({"also": ["*.v_proj.weight"]}, "lora.also", "must fit no matrix that has an adapter", []),
    ({"also": ["*.up_proj.weight"]}, "lora.also", "that are stored as one matrix", None),
    ({"targets": ["*", "*embed_tokens*"], "start": "pissa"}, "lora.targets", "PiSSA has no form for it", ["*"]),
    ({"targets": ["*", "*embed*"], "also": ["*embed*"]}, "lora.targets", "it is trained whole", ["*"]),
    ({"targets": ["*", "lm_head*"], "start": "pissa"}, "lora.targets", "the head: PiSSA has no form for it", ["*"]),
    ({"targets": ["*", "lm_head*"], "also": ["lm_head*"]}, "lora.targets", "the head: it is trained whole", ["*"]),
]


@pytest.mark.parametrize("fields, field, rule, valid", RULES)
def test_rules(fields, field, rule, valid):
    """Each suggested value makes the problem go away (forecast.check tries them)."""
    (found,) = check(replace(with_lora(make_run(Path("unused")), **fields)), Facts(files=False))
    assert found.field == field and rule in found.rule and (valid in found.valid or (valid is None and found.valid))


def test_more_rules():
    facts = Facts(files=False)
    run = with_lora(make_run(Path("unused")))
    two = check(replace(run, lora=replace(run.lora, targets=["*.w_proj.weight", "zzz", "*.o_proj.weight"])), facts)
    assert [p.because["fits none"] for p in two] == ["*.w_proj.weight", "zzz"] and all(p.valid for p in two)
    assert ["*.v_proj.weight", "*.o_proj.weight"] in two[0].valid, "zzz means nothing, and none may stay"
    names = check(replace(run, lora=replace(run.lora, targets=["q_proj", "down_proj"])), facts)
    assert [p.valid for p in names] == [(["*.q_proj.weight", "*.down_proj.weight"],)] * 2, "as PEFT names modules"
    fewer = replace(run, model=replace(run.model, num_key_value_heads=1), lora=replace(run.lora, targets=["*"]))
    (found,) = check(replace(fewer, lora=replace(fewer.lora, rank=4096)), facts)
    assert "self_attn.k_proj" in found.because["matrix"] and found.valid == (found.because["outputs"],)
    with pytest.raises(ConfigError, match=r"lora.dropout=0.1: is a key of lora only with method lora"):
        load_run(None, ["lora.method=dora", "lora.dropout=0.1"])
    (found,) = check(replace(run, train=replace(run.train, freeze=["*norm*"])), facts)
    assert found.field == "train.freeze" and "has no effect with lora" in found.rule and found.valid == ([],)
    many = with_lora(replace(run, train=replace(run.train, freeze=["*norm*"])), targets=["*.w_proj.weight"], rank=0)
    assert {p.field for p in check(many, facts)} == {"train.freeze", "lora.targets", "lora.rank"}
    some = with_lora(replace(run, model=base_run("mixtral").model), targets=["*.experts.1.w1.weight"])
    (found,) = check(some, facts)
    assert "must fit all or none of the experts of a layer" in found.rule
    torn = with_lora(replace(run, model=base_run("mixtral").model), targets=["*"], rank_pattern={"experts.1.w1": 2})
    (found,) = check(torn, facts)
    assert "patterns that fit all or none of the experts" in found.rule and found.valid == ({},)
    dora = replace(run, lora=find_adapter("dora").Config(method="dora", rank=3, targets=["*", "*embed_tokens*"]))
    (found,) = check(dora, facts)
    assert "the method dora has no form for it" in found.rule and found.valid == (["*"],)
    tied = with_lora(replace(run, model=replace(run.model, tie_word_embeddings=True)), targets=["*embed_tokens*"])
    (found,) = check(tied, facts)
    assert "it is the head too" in found.rule and found.valid == (["*"],)
    tied = replace(tied, lora=replace(tied.lora, targets=["*", "lm_head.weight"]))
    (found,) = check(tied, facts)
    assert "must not name the head: it is the embedding too" in found.rule and found.valid == (["*"],)
    both = replace(
        dora, lora=replace(dora.lora, targets=["*"]), train=replace(run.train, fp8=Fp8Config(recipe="mxfp8"))
    )
    assert "the method reads the frozen weights" in next(p.rule for p in check(both, facts) if p.field == "train.fp8")
    stacked = with_lora(replace(run, model=base_run("gpt_oss").model), targets=["*", "*.experts.down_proj"])
    (found,) = check(stacked, facts)
    assert "must fit both tensors of a layer's experts" in found.rule and found.valid
    stacked = replace(stacked, lora=replace(stacked.lora, targets=["*", "*.experts.*"], dropout=0.1))
    (found,) = check(stacked, facts)
    assert found.field == "lora.dropout" and "must be 0 on experts" in found.rule
    stacked = replace(stacked, lora=replace(dora.lora, targets=["*", "*.experts.*"]))
    (found,) = check(stacked, facts)
    assert "must not name the experts that are one tensor: the method dora has no form" in found.rule
