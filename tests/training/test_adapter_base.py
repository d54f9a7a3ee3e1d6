"""Runs with `lora` over a folder: checkpoints name the folder and its checksums and hold none of its bytes; whatever
reads them finds it; adapters are merged, exported and started from."""

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
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from phalanx.base.errors import CheckpointError, ConfigError
from phalanx.base.placement import Placement
from phalanx.checkpoint.adapters import adapter_source
from phalanx.checkpoint.base import rebase
from phalanx.checkpoint.contents import Contents
from phalanx.checkpoint.manifest import read_manifest, verify
from phalanx.checkpoint.merge import merge, merge_folder
from phalanx.checkpoint.storage import sum_of
from phalanx.checkpoint.tools import diff, reshard
from phalanx.cli.checkpoints import adapter_alone
from phalanx.cli.main import cli
from phalanx.config.run import CheckpointConfig, Run
from phalanx.forecast.check import Facts, check
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import load_alone
from phalanx.inference.request import SamplingOptions
from phalanx.nn.adapter import find_adapter
from phalanx.planning.merging import merging_of, section_of_folder
from phalanx.training.main import train
from tests.faults.runs import disturbed, full_disk, kills
from tests.harness.generation import answers_of
from tests.harness.pool import warm_imports
from tests.models.test_twenty_steps import MODELS, random_model
from tests.training.test_adapter_runs import same
from tests.training.test_loop import MODEL, make_run

FIELDS = {"rank": 3, "alpha": 7.0, "targets": ["*.q_proj.weight", "*.v_proj.weight", "*.down_proj.weight"]}
METHODS = {
    "lora": FIELDS,
    "dora": {**FIELDS, "method": "dora", "also": ["*norm*", "lm_head.weight"]},
    "patterns": {
        **FIELDS,
        "rank_pattern": {"0.self_attn.q_proj": 2, "down_proj": 5},
        "alpha_pattern": {r"layers\.1\..*v_proj": 3.0},
        "rank_stabilised": True,
    },
    "embedding": {**FIELDS, "targets": [*FIELDS["targets"], "*embed_tokens*"]},
    "pissa": {**FIELDS, "start": "pissa", "rank_pattern": {"down_proj": 5}, "rank_stabilised": True},
}
IDS = [list(range(3, 14))]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A Hugging Face folder in several files, in float64."""
    folder = tmp_path_factory.mktemp("hf") / "base"
    random_model(MODEL).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def run_over(over: Path, folder: Path, steps: int = 4, **fields) -> Run:
    lora = find_adapter(fields.get("method", "lora")).Config(**{**FIELDS, **fields})
    run = replace(make_run(folder, steps=steps, precision="fp64"), init_from=str(over), lora=lora)
    return replace(run, checkpoint=CheckpointConfig(interval=2))


def trained(run: Run) -> Path:
    """Its last checkpoint."""
    train(run, Placement())
    return Path(run.dir) / "checkpoints" / f"step-{run.train.last_step:08d}"


@pytest.fixture(scope="module", params=METHODS)
def checkpoint(request, base, tmp_path_factory) -> Path:
    return trained(run_over(base, tmp_path_factory.mktemp("run"), **METHODS[request.param]))


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(IDS)).logits[0].log_softmax(-1)


def folder_model(folder: Path) -> torch.nn.Module:
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def with_peft(base: Path, adapter: Path) -> torch.nn.Module:
    return peft.PeftModel.from_pretrained(folder_model(base), adapter, autocast_adapter_dtype=False).eval()


def as_peft_reads(checkpoint: Path, tmp_path: Path) -> Path:
    """The adapters of a checkpoint: in it, or exported."""
    inside = checkpoint / "adapter"
    if (inside / "adapter_config.json").is_file():
        return inside
    return adapter_alone(str(checkpoint), str(tmp_path / "for_peft"))


def test_a_checkpoint_holds_no_byte_of_the_base(checkpoint, base):
    manifest = read_manifest(checkpoint)
    assert manifest.base.folder == str(base)
    assert {path.name for path in base.iterdir() if "safetensors" in path.name} == manifest.base.files.keys()
    assert not verify(checkpoint) and not list((checkpoint / "weights").glob("*.safetensors"))
    assert (checkpoint / "weights/config.json").is_file(), "tokenizer and config stay with it"
    held = {key for file in checkpoint.rglob("*.safetensors") for key in load_file(file)}
    mine = ("lora_", "start_", "norm", "lm_head")
    assert held and all(any(word in key for word in mine) for key in held)


def test_it_goes_on_to_the_same_bits(checkpoint, tmp_path):
    """Truth: the run that was never interrupted."""
    shutil.copytree(checkpoint.parents[1], tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints" / checkpoint.name)
    manifest = read_manifest(checkpoint)
    section = {k: v for k, v in manifest.config["lora"].items()}
    assert same(checkpoint, trained(run_over(Path(manifest.base.folder), tmp_path / "run", **section)))


def test_generate_applies_base_and_adapters_as_peft_does(checkpoint, base, tmp_path):
    """Truth: PEFT over transformers, in float64, which also reads what is exported for it."""
    wanted = logits_of(with_peft(base, as_peft_reads(checkpoint, tmp_path)))
    assert (wanted - logits_of(folder_model(base))).abs().max() > 1e-3
    found = logprobs_of(checkpoint / "weights")
    torch.testing.assert_close(found, wanted[range(10), IDS[0][1:]].float(), rtol=0, atol=2e-5)


def test_merged_weights_do_what_base_and_adapters_do(checkpoint, base, tmp_path):
    model = read_manifest(checkpoint).config["lora"]
    section = find_adapter(model["method"]).Config(**model)
    folder = merge(checkpoint, tmp_path / "merged", merging_of(MODEL, section))
    wanted = logits_of(with_peft(base, as_peft_reads(checkpoint, tmp_path)))
    torch.testing.assert_close(logits_of(folder_model(folder)), wanted, rtol=0, atol=1e-12)
    assert json.loads((folder / "parity.json").read_text())["exact"]
    alone = adapter_alone(str(checkpoint), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_of(with_peft(base, alone)), wanted, rtol=0, atol=1e-12)
    section, named = section_of_folder(str(alone))
    assert named == str(base)
    again = merge_folder(str(alone), str(base), tmp_path / "again", merging_of(MODEL, section))
    told = CliRunner().invoke(cli, ["export", str(alone), "-o", str(tmp_path / "none")])
    assert told.exit_code == 2 and "is a folder of PEFT: --merge" in told.output
    torch.testing.assert_close(logits_of(folder_model(again)), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapters_of_a_quantized_base_are_merged_into_the_values_that_it_stands_for(method, base, tmp_path):
    """Truth: what the run generates with, which decodes its base."""
    fields = {**FIELDS, "base": "int8", "method": method}
    checkpoint = trained(run_over(base, tmp_path / "run", **fields))
    section = find_adapter(method).Config(**fields)
    folder = merge(checkpoint, tmp_path / "merged", merging_of(MODEL, section))
    found = logprobs_of(checkpoint / "weights")
    torch.testing.assert_close(found, logprobs_of(folder), rtol=0, atol=2e-5)
    plain = trained(run_over(base, tmp_path / "plain", **{**fields, "base": "bf16"}))
    assert (found - logprobs_of(plain / "weights")).abs().max() > 1e-4


def logprobs_of(weights: Path, adapter: str | None = None) -> torch.Tensor:
    """Of the ids but the first, as they are generated with, in fp32."""
    engine = Engine(load_alone(weights, adapter), EngineOptions(sequences=1, tokens=16, memory_gib=0.01))
    options = SamplingOptions(tokens=1, temperature=0, prompt_logprobs=1)
    ((_, _, scores, _),) = answers_of(engine, [(IDS[0], options)])
    return torch.tensor([score.logprob for score in scores[1:] if score])


def test_what_peft_saves_again_is_read_as_before(checkpoint, base, tmp_path):
    given = as_peft_reads(checkpoint, tmp_path)
    with_peft(base, given).save_pretrained(tmp_path / "again")
    before, after = adapter_source(str(given)), adapter_source(str(tmp_path / "again"))
    assert before.index.keys() == after.index.keys()
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.index)


def test_it_is_written_anew_and_compared(checkpoint, tmp_path):
    anew = reshard(checkpoint, tmp_path / "anew", files=2)
    assert not list(diff(checkpoint, anew)) and read_manifest(anew).base == read_manifest(checkpoint).base
    with Contents(checkpoint) as contents, Contents(checkpoint.with_name("step-00000002")) as before:
        assert contents.shapes("weights") == before.shapes("weights")
        assert all(torch.equal(contents.read("master", n), before.read("master", n)) for n in contents.frozen)


def test_a_run_starts_from_adapters_of_a_folder(checkpoint, base, tmp_path):
    """Truth: the files. With a rate of zero the first step changes nothing."""
    section = read_manifest(checkpoint).config["lora"]
    for number, source in enumerate((checkpoint, as_peft_reads(checkpoint, tmp_path))):
        if source.name == "for_peft":
            section = {
                **section,
                "start": "random",
                "rank": 6,
                "alpha": 7.0 * 2**0.5,
                "rank_pattern": {"down_proj": 10},
            }
        run = run_over(base, tmp_path / str(number), steps=1, **{**section, "init_from": str(source)})
        assert not check(run, Facts())
        last = trained(replace(run, optim=replace(run.optim, lr=0.0)))
        before = source / "adapter" if source == checkpoint else source
        files = [load_file(path / "adapter_model.safetensors") for path in (before, last / "adapter")]
        assert files[0].keys() == files[1].keys()
        assert all(np.array_equal(files[0][name], files[1][name]) for name in files[0])


# ---- faults


FAULTS = [(kills, seed, [(1, {}), (2, {"tp": 2}), (2, {"sharding": 3})]) for seed in range(3)]
FAULTS += [(full_disk, seed, [(1, {})]) for seed in range(2)]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault, seed, layouts", FAULTS, ids=[f"{f.__name__} {seed}" for f, seed, _ in FAULTS])
def test_a_disturbed_run_of_adapters_loses_nothing(fault, seed, layouts, base, tmp_path):
    """Truth: the run that nobody disturbs: losses, every file of the last checkpoint, and no damage. Beside it the
    base's files are what they were."""
    before = {path.name: sum_of(path) for path in base.iterdir()}
    lora = find_adapter("lora").Config(rank=16, alpha=7.0)
    warm_imports()

    def adapted(run: Run) -> Run:
        return replace(run, model=MODEL, init_from=str(base), lora=lora)

    tally = disturbed(tmp_path, fault, seed, layouts, adapted)
    assert tally.faults > 0 and tally.runs == 1 and tally.differing == 0
    assert {path.name: sum_of(path) for path in base.iterdir()} == before
    assert list((tmp_path / "other/run/checkpoints").glob("*/adapter/adapter_model.safetensors"))


# ---- what is refused


@pytest.fixture
def copied(base, tmp_path) -> tuple[Path, Path]:
    """A base, and the checkpoint of a run over it."""
    folder = shutil.copytree(base, tmp_path / "base")
    return folder, trained(run_over(folder, tmp_path / "run", steps=2))


def test_a_base_that_moved_is_found_where_it_is_said_to_be(copied, tmp_path):
    folder, checkpoint = copied
    new = folder.rename(tmp_path / "elsewhere")
    run = run_over(folder, tmp_path / "run")
    (found,) = check(run, Facts())
    assert found.field == "init_from" and "where the base of the run's adapters is now" in found.rule
    with pytest.raises(CheckpointError, match="is not where it was.*init_from=FOLDER.*phalanx checkpoint rebase"):
        load_alone(checkpoint / "weights")
    last = trained(replace(run, init_from=str(new)))
    assert read_manifest(last).base.folder == str(new)
    rebase(checkpoint, str(new))
    assert not verify(checkpoint) and read_manifest(checkpoint).base == read_manifest(last).base
    load_alone(checkpoint / "weights")


def test_another_base_is_refused_with_both_checksums(copied, tmp_path):
    folder, checkpoint = copied
    file = sorted(folder.glob("*.safetensors"))[0]
    before = read_manifest(checkpoint).base.files[file.name]
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    for work in (
        lambda: load_alone(checkpoint / "weights"),
        lambda: train(run_over(folder, tmp_path / "run"), Placement()),
        lambda: rebase(checkpoint, str(folder)),
        lambda: Contents(checkpoint),
    ):
        with pytest.raises(CheckpointError, match=f"{file.name} has .* checksum .*{before.xxh3}") as error:
            work()
        assert str(error.value).count("checksum") == 2


def test_adapters_of_experts_that_are_one_tensor(tmp_path):
    """Truth: base and adapters as PEFT applies them. Merged, by generation, and from the folder that PEFT reads."""
    folder, model = tmp_path / "gpt_oss", replace(MODELS["gpt_oss"], vocab_size=67)
    random_model(model).save_pretrained(folder)
    run = replace(run_over(folder, tmp_path / "run", steps=2, targets=["*.q_proj.weight", "*.experts.*"]), model=model)
    step = trained(run)
    truth = logits_of(with_peft(folder, step / "adapter"))
    assert (truth - logits_of(folder_model(folder))).abs().max() > 1e-4
    merged = merge(step, tmp_path / "merged", merging_of(model, run.lora))
    torch.testing.assert_close(logits_of(folder_model(merged)), truth, rtol=0, atol=1e-12)
    again = merge_folder(str(step / "adapter"), str(folder), tmp_path / "again", merging_of(model, run.lora))
    torch.testing.assert_close(logits_of(folder_model(again)), truth, rtol=0, atol=1e-12)
    scores = logprobs_of(step / "weights")
    torch.testing.assert_close(scores, truth[range(len(IDS[0]) - 1), IDS[0][1:]].float(), rtol=0, atol=1e-4)
    new = replace(run, dir=str(tmp_path / "new"), lora=replace(run.lora, init_from=str(step / "adapter")))
    assert not check(new, Facts())
    first = trained(replace(new, train=replace(new.train, steps=1)))
    assert logits_of(with_peft(folder, first / "adapter")).sub(truth).abs().max() < 0.5


def test_adapters_of_a_run_are_served_over_its_base(checkpoint, base, tmp_path):
    """Truth: what the run itself generates with. What is more than an adapter of linears is refused."""
    lora = read_manifest(checkpoint).config["lora"]
    if lora["also"] or "*embed_tokens*" in lora["targets"]:
        with pytest.raises(ConfigError, match="trained whole|are read"):
            load_alone(base, str(checkpoint))
        return
    torch.testing.assert_close(
        logprobs_of(base, str(checkpoint)), logprobs_of(checkpoint / "weights"), rtol=0, atol=2e-5
    )
    assert (logprobs_of(base) - logprobs_of(checkpoint / "weights")).abs().max() > 1e-4


def test_adapters_over_another_base_of_the_same_shapes_are_refused(copied, tmp_path):
    """By `--adapter` too, with both checksums; over a copy of the base, or without a checkpoint, they are applied."""
    base, step = copied
    run, other = tmp_path / "run", shutil.copytree(base, tmp_path / "other")
    for adapter in (run, step / "adapter"):
        load_alone(other, str(adapter))
    file = sorted(other.glob("*.safetensors"))[1]
    tensors = load_file(file)
    save_file({name: value + 1 for name, value in tensors.items()}, file, {"format": "pt"})
    wanted = read_manifest(step).base.files[file.name].xxh3
    for adapter in (run, step / "adapter"):
        with pytest.raises(CheckpointError, match="is not the base of the adapters") as caught:
            load_alone(other, str(adapter))
        assert wanted in str(caught.value) and sum_of(file) in str(caught.value)
        assert "--to peft" in str(caught.value)
    load_alone(other, adapter_alone(str(run), str(tmp_path / "alone")))


def test_what_does_not_fit_a_folder_of_adapters_is_said(copied, base, tmp_path):
    _, checkpoint = copied
    run = run_over(base, tmp_path / "other", rank=2, init_from=str(checkpoint / "adapter"))
    (found,) = check(run, Facts())
    assert found.field == "lora.rank" and found.valid == (3,)
    run = run_over(base, tmp_path / "other", init_from=str(tmp_path / "nowhere"))
    (found,) = check(run, Facts())
    assert found.field == "lora.init_from" and "must hold adapters" in found.rule
    with pytest.raises(CheckpointError, match=f"is the folder of a run: name one of its checkpoints, {checkpoint}$"):
        train(replace(run_over(base, tmp_path / "other"), init_from=str(checkpoint.parents[1])), Placement())
    run = run_over(base, tmp_path / "other", targets=["*.q_proj.weight"], init_from=str(checkpoint))
    with pytest.raises(CheckpointError, match="not in the model: .*lora_A"):
        train(run, Placement())
    with pytest.raises(ConfigError):
        train(run_over(base, tmp_path / "other", method="dora", init_from=str(checkpoint)), Placement())


TIED = replace(MODEL, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "tied"
    random_model(TIED).save_pretrained(folder)
    return folder


def test_peft_reads_a_trained_embedding_that_is_the_head_too(tied, tmp_path):
    """Truth: the merged folder. PEFT wraps embedding and head apart, so it gets the matrix under both names."""
    run = replace(run_over(tied, tmp_path / "run", steps=2, also=["*embed_tokens*"]), model=TIED)
    step = trained(run)
    assert not (step / "adapter" / "adapter_config.json").exists()
    alone = as_peft_reads(step, tmp_path)
    truth = logits_of(folder_model(merge(step, tmp_path / "merged", merging_of(TIED, run.lora))))
    assert (truth - logits_of(folder_model(tied))).abs().max() > 1e-4
    torch.testing.assert_close(logits_of(with_peft(tied, alone)), truth, rtol=0, atol=1e-12)
    again = merge_folder(str(alone), str(tied), tmp_path / "again", merging_of(TIED, run.lora))
    torch.testing.assert_close(logits_of(folder_model(again)), truth, rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match=r"lora\.also.*export --merge"):
        load_alone(tied, str(step))


def adapters_of_peft(tied: Path, folder: Path, **fields) -> torch.Tensor:
    """Saves adapters of PEFT with weights of some size, and returns their logits."""
    config = peft.LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", **fields)
    model = peft.get_peft_model(folder_model(tied), config, autocast_adapter_dtype=False).eval()
    own = {id(p): p for p in model.parameters() if p.requires_grad}
    for p in own.values():
        p.data += 0.1 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    return logits_of(model)


def test_adapters_of_peft_beside_a_head_that_stays_are_not_those_of_a_tied_model(tied, tmp_path):
    """Truth: PEFT's logits, which no tied model has where the embedding alone is trained."""
    whole = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    for name, fields in {"whole": whole, "adapter": {"target_modules": ["q_proj", "embed_tokens"]}}.items():
        adapters_of_peft(tied, tmp_path / name, **fields)
        section, _ = section_of_folder(str(tmp_path / name))
        with pytest.raises(CheckpointError, match="are one matrix, and here they are two"):
            merge_folder(str(tmp_path / name), str(tied), tmp_path / "out", merging_of(TIED, section))
        run = run_over(tied, tmp_path / "run", targets=["*.q_proj.weight"], init_from=str(tmp_path / name))
        (found,) = check(replace(run, model=TIED), Facts())
        assert found.field == "lora.init_from" and "are one matrix" in found.rule
    truth = adapters_of_peft(tied, tmp_path / "both", ensure_weight_tying=True, **whole)
    section, _ = section_of_folder(str(tmp_path / "both"))
    merged = merge_folder(str(tmp_path / "both"), str(tied), tmp_path / "out", merging_of(TIED, section))
    torch.testing.assert_close(logits_of(folder_model(merged)), truth, rtol=0, atol=1e-12)
    fields = {"targets": ["*.q_proj.weight"], "also": ["*embed_tokens*"], "init_from": str(tmp_path / "both")}
    run = replace(run_over(tied, tmp_path / "run", steps=1, **fields), model=TIED)
    train(replace(run, optim=replace(run.optim, lr=0.0)), Placement())
    torch.testing.assert_close(logprobs_of(tmp_path / "run/checkpoints/step-00000001/weights"), scored(truth))


def scored(logits: torch.Tensor) -> torch.Tensor:
    return logits[range(len(IDS[0]) - 1), IDS[0][1:]].float()


def test_a_bias_beside_an_adapter_is_nothing_that_peft_reads(tmp_path):
    model = MODELS["qwen2"]
    random_model(model).save_pretrained(tmp_path / "base")
    run = replace(run_over(tmp_path / "base", tmp_path / "run", steps=1, also=["*bias"]), model=model)
    step = trained(run)
    assert not (step / "adapter" / "adapter_config.json").exists()
    with pytest.raises(CheckpointError, match=r"trains model\.layers\.0\.self_attn\.q_proj\.bias .*--merge"):
        adapter_alone(str(step), str(tmp_path / "alone"))


def test_what_adapters_were_trained_with_is_compared_without_peft_too(base, checkpoint, tmp_path):
    """Of a run, whether PEFT has its method or not, and of init_from."""
    lora = read_manifest(checkpoint).config["lora"]
    lora = {name: value for name, value in lora.items() if name != "init_from"}
    for over, source in ((base, str(checkpoint)), (base, str(checkpoint / "adapter")), (checkpoint, None)):
        run = run_over(over, tmp_path / "run", **lora, init_from=source)
        assert not check(run, Facts())
        (found,) = check(run_over(over, tmp_path / "run", **{**lora, "alpha": 3.0}, init_from=source), Facts())
        assert found.field == "lora.alpha" and found.valid == (7.0,)
    (found,) = check(run_over(checkpoint, tmp_path / "run", **lora, init_from=str(checkpoint)), Facts())
    assert found.field == "lora.init_from" and "has no effect" in found.rule
