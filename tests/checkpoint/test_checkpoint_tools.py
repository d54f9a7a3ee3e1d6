"""checkpoint diff, average, reshard, pin; export and import: against safetensors, transformers and torch's own
checkpoints."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from phalanx.base.errors import CheckpointError, PhalanxError
from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.convert import _member, _OnlyDcp, import_weights
from phalanx.checkpoint.hf import model_config_from_hf
from phalanx.checkpoint.keep import Keep, list_checkpoints, pin_of
from phalanx.checkpoint.manifest import verify
from phalanx.checkpoint.names import folded
from phalanx.cli.main import cli
from phalanx.planning.blocks import exported_shapes
from phalanx.training.main import train
from tests.harness.checkpoints import make_run, make_state, save_here, set_state
from tests.harness.sample import rest_in_soak
from tests.harness.warm import Warm
from tests.training.test_loop import make_run as small_run


def said(*words: object) -> tuple[int, str]:
    """Exit code and output of `phalanx ...`."""
    done = CliRunner().invoke(cli, [str(w) for w in words])
    if isinstance(done.exception, PhalanxError):
        return done.exception.exit_code, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    made = replace(small_run(folder, steps=6), checkpoint=CheckpointConfig(interval=2, keep_last=0))
    train(made, Placement())
    return made


def step(run, number: int) -> Path:
    return Path(run.dir) / f"checkpoints/step-{number:08d}"


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


def test_diff(run, tmp_path):
    copy = shutil.copytree(step(run, 4), tmp_path / "step-00000004")
    assert said("checkpoint", "diff", step(run, 4), copy) == (0, "equal\n")
    code, text = said("checkpoint", "diff", step(run, 4), run.dir)
    assert code == 1 and "step: 4 -> 6\n" in text and "scalars.tokens: 512 -> 768\n" in text
    a, b = weights(step(run, 4) / "weights"), weights(step(run, 6) / "weights")
    for name in a:
        difference = (a[name].double() - b[name].double()).abs()
        assert (
            f"weights {name}: {int((difference != 0).sum())} of {difference.numel()} values differ, by up to "
            f"{float(difference.max()):.3g}" in text
        )
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(step(run, 4) / "weights/config.json", other)
    name = "model.norm.weight"
    save_file(
        {**{k: v for k, v in a.items() if k != "lm_head.weight"}, name: a[name][:3].clone()},
        other / "model.safetensors",
    )
    code, text = said("checkpoint", "diff", step(run, 4), other)
    assert (code, text.splitlines()) == (
        1,
        [f"weights lm_head.weight: only in {step(run, 4)}", f"weights {name}: shape [16] -> [3]"],
    )


def test_average_is_the_mean_and_loads_elsewhere(run, tmp_path):
    code, text = said("checkpoint", "average", step(run, 2), step(run, 4), step(run, 6), "-o", tmp_path / "mean")
    assert code == 0, text
    parts = [weights(step(run, n) / "weights") for n in (2, 4, 6)]
    made = weights(tmp_path / "mean")
    assert made.keys() == parts[0].keys()
    for name, tensor in made.items():
        assert torch.equal(tensor, torch.stack([p[name].double() for p in parts]).mean(0).float()), name
    from transformers import AutoModelForCausalLM

    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "mean", output_loading_info=True)
    assert not any(info.values()) and torch.equal(theirs.state_dict()["model.norm.weight"], made["model.norm.weight"])
    assert said("checkpoint", "average", step(run, 2), step(run, 4), "-o", tmp_path / "mean")[0] == 4, (
        "never into a folder with something"
    )
    assert said("checkpoint", "average", step(run, 2), "-o", tmp_path / "one")[0] == 4


@pytest.mark.parametrize("model, world, layout", [("mixtral-full", 4, dict(ep=2, sharding=1)), ("gpt2", 2, dict(tp=2))])
def test_reshard_is_the_same_state_in_other_files(ranks, tmp_path, model, world, layout):
    ranks.run("tests.harness.checkpoints:save_on_rank", world, make_run(model, "bf16", **layout), tmp_path / "a", {})
    (path,) = list_checkpoints(tmp_path / "a")
    code, text = said("checkpoint", "reshard", path, "-o", tmp_path / "b", "--files", 3)
    (made,) = list_checkpoints(tmp_path / "b")
    assert code == 0 and text.strip() == str(made) and verify(made) == []
    sizes = [f.stat().st_size for f in (made / "state").glob("rank-*")]
    assert len(sizes) == 3 and max(sizes) < 1.3 * min(sizes)
    assert said("checkpoint", "diff", path, made) == (0, "equal\n")
    assert (
        ranks.run("tests.harness.checkpoints:load_on_rank", world, make_run(model, "bf16", **layout), made)
        == [[]] * world
    )
    assert said("checkpoint", "reshard", path, "-o", tmp_path / "b", "--files", 3)[0] == 4


def test_a_pinned_checkpoint_stays(tmp_path):
    state = make_state(make_run("llama"))
    set_state(state)
    for number in (1, 2, 3):
        save_here(state, tmp_path, number, keep=Keep(0))
    assert said("checkpoint", "pin", tmp_path / "step-00000001") == (0, f"{tmp_path}/step-00000001 is pinned\n")
    assert "good  pinned" in said("checkpoint", "list", tmp_path)[1].splitlines()[0]
    save_here(state, tmp_path, 4, keep=Keep(2, every=2))
    assert [p.name[-1] for p in list_checkpoints(tmp_path)] == ["1", "2", "3", "4"]
    save_here(state, tmp_path, 6, keep=Keep(2, every=2))
    assert [p.name[-1] for p in list_checkpoints(tmp_path)] == ["1", "2", "4", "6"]
    said("checkpoint", "pin", "--remove", tmp_path / "step-00000001")
    (tmp_path / "best").symlink_to(tmp_path / "step-00000004")
    save_here(state, tmp_path, 7, keep=Keep(2))
    save_here(state, tmp_path, 8, keep=Keep(2))
    assert [p.name[-1] for p in list_checkpoints(tmp_path)] == ["4", "7", "8"], "a link points to 4"
    assert not pin_of(tmp_path / "step-00000001").exists()


def test_export_rounds_the_masters_once(run, tmp_path):
    code, text = said("export", run.dir, "-o", tmp_path / "bf16", "--dtype", "bf16")
    assert code == 0, text
    truth = weights(step(run, 6) / "weights")
    made = weights(tmp_path / "bf16")
    assert made.keys() == truth.keys() and all(torch.equal(made[n], truth[n].bfloat16()) for n in truth)
    assert json.loads((tmp_path / "bf16/config.json").read_text())["dtype"] == "bfloat16"
    report = json.loads((tmp_path / "bf16/parity.json").read_text())
    assert not report["exact"] and report["tensors"].keys() == truth.keys()
    name = "model.embed_tokens.weight"
    difference = (truth[name].double() - truth[name].bfloat16().double()).abs()
    assert report["tensors"][name]["largest"] == float(difference.max()) and report["tensors"][name][
        "differing"
    ] == int((difference != 0).sum())
    assert said("export", run.dir, "-o", tmp_path / "same")[0] == 0
    assert json.loads((tmp_path / "same/parity.json").read_text())["exact"]
    recomputed = replace(small_run(tmp_path / "again", steps=1), init_from=str(tmp_path / "same"))
    train(recomputed, Placement())
    code, text = said("export", str(run.dir).replace("first", "frist"), "-o", tmp_path / "x")
    assert code == 4 and f"near it: {run.dir}" in text


def test_import_of_safetensors_files(run, tmp_path):
    """Any file names, no index, a prefix; what is missing or left over is named."""
    truth = weights(step(run, 6) / "weights")
    parts = [dict(list(truth.items())[i::3]) for i in range(3)]
    (tmp_path / "theirs").mkdir()
    for i, part in enumerate(parts):
        save_file({f"module.{n}": t.contiguous() for n, t in part.items()}, tmp_path / f"theirs/part{i}.safetensors")
    words = ["import", tmp_path / "theirs", "--config", step(run, 6) / "weights", "-o"]
    code, text = said(*words, tmp_path / "ours", "--prefix", "module.")
    assert code == 0, text
    made = weights(tmp_path / "ours")
    assert made.keys() == truth.keys() and all(torch.equal(made[n], truth[n]) for n in truth)
    assert json.loads((tmp_path / "ours/parity.json").read_text())["exact"]
    code, text = said(*words, tmp_path / "b")
    assert code == 4 and not (tmp_path / "b").exists()
    code, text = said(*words, tmp_path / "b", "--prefix", "mistyped.")
    assert code == 4 and "missing: model.norm.weight" in text and "missing: lm_head.weight" in text, text
    (tmp_path / "theirs/part2.safetensors").unlink()
    save_file({"module.stray": torch.ones(2)}, tmp_path / "theirs/x.safetensors")
    code, text = said(*words, tmp_path / "b", "--prefix", "module.")
    missing = folded([f"missing: {n} {tuple(t.shape)}" for n, t in parts[2].items()])
    assert code == 4 and all(line in text for line in missing) and "not in the model: stray (2,)" in text


def test_import_of_a_distributed_checkpoint(run, tmp_path):
    import torch.distributed.checkpoint as dcp

    truth = weights(step(run, 6) / "weights")
    dcp.save(
        {"model": truth, "step": 3, "optim": {"m": torch.ones(3)}}, checkpoint_id=tmp_path / "theirs", no_dist=True
    )
    words = ["import", tmp_path / "theirs", "--config", step(run, 6) / "weights", "--prefix", "model.", "-o"]
    code, text = said(*words, tmp_path / "ours")
    assert code == 0, text
    made = weights(tmp_path / "ours")
    assert made.keys() == truth.keys() and all(torch.equal(made[n], truth[n]) for n in truth)
    metadata = tmp_path / "theirs/.metadata"
    good = metadata.read_bytes()
    metadata.write_bytes(good[:-20])
    assert "is damaged" in said(*words, tmp_path / "b")[1]
    metadata.write_bytes(good.replace(b"__0_0.distcp", b"../0_.distcp"))
    assert "outside its folder" in said(*words, tmp_path / "b")[1]


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_in_metadata_of_other_pythons(module):
    """Python 3.13 tells paths by another name than the ones before and after it."""
    assert _OnlyDcp(io.BytesIO(b"c%b\nPosixPath\n(V/a\nVb\ntR." % module.encode())).load() == PurePosixPath("/a/b")
    with pytest.raises(CheckpointError, match="has no place"):
        _OnlyDcp(io.BytesIO(b"c%b\nos\n." % module.encode())).load()


class Canary:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize(
    "name", [".metadata", "__0_0.distcp", "model.safetensors", "pytorch_model.bin", "tokenizer.json"]
)
def test_nothing_in_a_foreign_folder_is_run(run, tmp_path, name):
    """A pickle that runs a command, under every name that is read: the command never runs."""
    import torch.distributed.checkpoint as dcp

    folder, canary = tmp_path / "theirs", tmp_path / "canary"
    folder.mkdir()
    if name == "__0_0.distcp":
        dcp.save({"model": weights(step(run, 6) / "weights")}, checkpoint_id=folder, no_dist=True)
        torch.save(Canary(canary), folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    code, text = said(
        "import", folder, "--config", step(run, 6) / "weights", "--prefix", "model.", "-o", tmp_path / "ours"
    )
    assert code == 4 and not canary.exists(), text
    if name == ".metadata":
        assert "is refused: it asks for posix.system" in text
    with pytest.raises(CheckpointError):
        train(replace(small_run(tmp_path / "run", steps=1), init_from=str(folder)), Placement())
    assert not canary.exists()


# --- Megatron-Core
# ----------------------------------------------------------------------------------------------------------------

HF_LLAMA = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
    "dtype": "float32",
}

HF_CONFIGS = {
    "llama": {
        **HF_LLAMA,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 120,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "dtype": "float32",
    },
    "mixtral": {
        **HF_LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen3_moe": {
        **HF_LLAMA,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


HF_CONFIGS["mixtral-grouped"] = HF_CONFIGS["mixtral-singleton"] = HF_CONFIGS["mixtral"]
HF_CONFIGS["deepseek_v3"] = HF_CONFIGS["deepseek_v3-singleton"] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_interleave": True,
    "max_position_embeddings": 16,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def megatron() -> Iterator[Warm]:
    """Programs that begin with Megatron-Core imported, which takes longer than what they do with it."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed")
    server = Warm(("megatron.core.dist_checkpointing", "megatron.core.models.gpt", "safetensors.torch")).start()
    yield server
    server.close()


@pytest.mark.parametrize("kind", rest_in_soak(HF_CONFIGS, ("gpt2", "mixtral-grouped", "deepseek_v3-singleton")))
def test_what_megatron_saved_is_imported_with_its_logits(megatron, tmp_path, kind):
    """Saved by Megatron-Core itself; imported under a config with fewer rows of vocabulary than Megatron padded it
    to; run by transformers."""
    transformers = pytest.importorskip("transformers")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    command = [megatron.python, "-m", "tests.harness.megatron_saves", str(tmp_path / "m"), kind]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(HF_CONFIGS[kind]))
    wanted = exported_shapes(model_config_from_hf(str(config)))
    out = import_weights(tmp_path / "m/checkpoint", tmp_path / "out", config, wanted)
    truth = load_file(tmp_path / "m/truth.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    logits = model(truth["ids"]).logits
    torch.testing.assert_close(
        logits, truth["logits"][..., :120], rtol=0, atol=2e-6 * truth["logits"].abs().max().item()
    )
    assert json.loads((out / "parity.json").read_text())["exact"]
    wrong = {
        "llama": ({"intermediate_size": 40}, "does not hold model.layers.0.mlp"),
        "gpt2": ({"n_layer": 3}, "has 2 layers .*, the config has 3"),
        "mixtral": ({"num_local_experts": 3}, "has 4 experts .*, the config has 3|does not hold"),
        "qwen3_moe": ({"moe_intermediate_size": 20}, "does not hold model.layers.0.mlp.experts"),
        "mixtral-singleton": ({"num_local_experts": 3}, r"has not: .*mlp\.experts\.experts\.3\.|does not hold"),
        "deepseek_v3": ({"n_shared_experts": 1}, "does not hold model.layers.1.mlp.shared_experts"),
        "deepseek_v3-singleton": ({"kv_lora_rank": 9}, "does not hold model.layers.0.self_attn.kv"),
    }
    changed, match = wrong[kind.removesuffix("-grouped")]
    other = {**HF_CONFIGS[kind], **changed}
    (config / "config.json").write_text(json.dumps(other))
    wanted = exported_shapes(model_config_from_hf(str(config)))
    with pytest.raises(CheckpointError, match=match):
        import_weights(tmp_path / "m/checkpoint", tmp_path / "wrong", config, wanted)


def test_metadata_gets_members_of_enumerations_and_nothing_else():
    """Older Pythons pickle them as getattr(kind, name); with anything else a file is refused."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as KIND

    assert _member(KIND, "TORCH_CONTIGUOUS_FORMAT") is KIND.TORCH_CONTIGUOUS_FORMAT
    for kind, name in ((KIND, "__class__"), (KIND, "mro"), (torch.Size, "numel"), (os, "system")):
        with pytest.raises(CheckpointError, match="no place in the metadata"):
            _member(kind, name)
