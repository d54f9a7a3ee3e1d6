"""Checkpoints: saved under one layout and loaded under another bit for bit; Hugging Face both ways; no crash or
damage goes unseen."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from phalanx.base.errors import CheckpointError, FolderInUse, PeerLost
from phalanx.checkpoint.agree import agree
from phalanx.checkpoint.boxes import items_in
from phalanx.checkpoint.hf import differences, from_hf, model_config_from_hf, to_hf
from phalanx.checkpoint.keep import Keep, find, latest, list_checkpoints
from phalanx.checkpoint.lock import FolderLock, writer_of
from phalanx.checkpoint.manifest import NAME, read_manifest, verify
from phalanx.checkpoint.names import folded
from phalanx.checkpoint.storage import Storage
from phalanx.checkpoint.tensors import natural
from phalanx.comm.mesh import Mesh
from phalanx.layout.box import Box
from phalanx.layout.buckets import make_buckets
from phalanx.layout.grid import Grid
from phalanx.layout.param import ParamSpec, Piece
from phalanx.models.deepseek_v3 import DeepseekV3Config
from phalanx.models.experts import ExpertsConfig
from phalanx.models.gpt2 import GPT2Config
from phalanx.models.gpt_oss import GptOssConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.rope import RopeScaling
from phalanx.nn.initial import ZEROS
from recipes import deepseek_v3
from tests.harness.checkpoints import (
    Failing,
    Lossy,
    error_on_rank,
    load_here,
    make_run,
    make_state,
    save_here,
    set_state,
)
from tests.harness.parity import MODELS
from tests.harness.sample import covering, rest_in_soak

TINY = replace(
    MODELS["llama"],
    num_hidden_layers=1,
    hidden_size=8,
    intermediate_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=11,
)


def tiny_run(**changes):
    return replace(make_run("llama", "fp32", 100), model=replace(TINY, **changes))


@pytest.fixture(scope="module")
def tiny():
    state = make_state(tiny_run())
    set_state(state)
    return state


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


# --- any layout to any layout
# ---------------------------------------------------------------------------------------------------

LAYOUTS = {
    "1": (1, dict()),
    "tp4": (4, dict(tp=4)),
    "pp2 tp2": (4, dict(pp=2, tp=2)),
    "pp2 x 2 virtual, dp2": (4, dict(pp=2, virtual_stages=2, sharding=1)),
    "dp4 level 1, one bucket": (4, dict(sharding=1, bucket_mb=100)),
    "dp2 tp2 level 0": (4, dict(tp=2, sharding=0)),
    "dp3": (3, dict(sharding=1)),
    "cp2 dp2": (4, dict(cp=2, sharding=1)),
    "cp3 in uneven parts": (3, dict(cp=3, sharding=1)),
    "dp4 level 2": (4, dict(sharding=2)),
    "dp2 pp2 level 3": (4, dict(pp=2, sharding=3)),
    "dp4 level 3 in pairs, optimizer over both": (4, dict(sharding=3, shard_group=2, shard_across="optimizer")),
}


def pairs():
    """Each layout is saved once or twice per model, each time for another to load; gpt2 and llama differ in all that
    can be cut."""
    for model, precision in (
        ("llama", "bf16"),
        ("llama-tied", "fp32"),
        ("gpt2", "bf16"),
        ("gpt2", "fp64"),
        ("llama", "fp16"),
    ):
        pick = random.Random(f"{model} {precision}")
        names = pick.sample(list(LAYOUTS), 5)
        for a, b in zip(names, names[1:] + names[:1]):
            yield model, precision, a, b


PAIRS = {" ".join((model, precision, a, "->", b)): (model, precision, a, b) for model, precision, a, b in pairs()}
FAST = covering({name: (f"{model} {precision}", a, b) for name, (model, precision, a, b) in PAIRS.items()})


LAYOUTS_OF_EXPERTS = {
    "1": (1, dict()),
    "ep4": (4, dict(ep=4, sharding=1)),
    "ep2 etp2": (4, dict(ep=2, etp=2, tp=2)),
    "pp2 ep2": (4, dict(pp=2, ep=2, sharding=1)),
    "edp2 ep2": (4, dict(ep=2, sharding=1)),
    "cp4 ep2": (4, dict(cp=4, ep=2, sharding=1)),
    "edp2 ep2 level 3": (4, dict(ep=2, sharding=3)),
}


PAIRS_OF_EXPERTS = [
    ("mixtral-full", "bf16", "edp2 ep2", "ep4"),
    ("mixtral-full", "bf16", "ep4", "pp2 ep2"),
    ("qwen3_moe", "fp32", "1", "ep2 etp2"),
    ("qwen3_moe", "bf16", "pp2 ep2", "1"),
    ("mixtral-full", "fp16", "ep2 etp2", "edp2 ep2"),
    ("gpt_oss", "bf16", "cp4 ep2", "pp2 ep2"),
    ("gpt_oss", "bf16", "ep2 etp2", "cp4 ep2"),
    ("gpt_oss", "fp32", "edp2 ep2", "ep2 etp2"),
    ("mixtral-full", "bf16", "edp2 ep2 level 3", "ep4"),
    ("gpt_oss", "bf16", "1", "edp2 ep2 level 3"),
]
FAST_OF_EXPERTS = covering({str(number): case for number, case in enumerate(PAIRS_OF_EXPERTS)})


@pytest.mark.parametrize(
    "model, precision, saved, loaded",
    [
        pytest.param(*case, marks=() if str(number) in FAST_OF_EXPERTS else pytest.mark.soak)
        for number, case in enumerate(PAIRS_OF_EXPERTS)
    ],
)
def test_experts_and_what_is_not_trained_go_from_any_layout_to_any(ranks, root, model, precision, saved, loaded):
    world, layout = LAYOUTS_OF_EXPERTS[saved]
    ranks.run("tests.harness.checkpoints:save_on_rank", world, make_run(model, precision, **layout), root, {})
    path = latest(root)
    assert verify(path) == []
    with safe_open(path / "weights/model.safetensors", framework="pt") as tensors:
        assert not any(name.endswith(".load") for name in tensors.keys()), "Hugging Face has no such tensor"
    kept = json.loads((path / "state/index.json").read_text())["kept"]
    assert any(boxes for boxes in kept.values()) == (model == "mixtral-full")
    world, layout = LAYOUTS_OF_EXPERTS[loaded]
    assert (
        ranks.run("tests.harness.checkpoints:load_on_rank", world, make_run(model, precision, **layout), path)
        == [[]] * world
    )


def test_no_rank_reads_a_byte_twice(ranks, root):
    """Shards that end in the middle of rows: two boxes of a tensor on one rank, read together."""
    for saved, loaded in (((1, dict()), (4, dict(bucket_mb=100))), ((2, dict(tp=2)), (4, dict(bucket_mb=100)))):
        folder = root / str(saved[0])
        ranks.run("tests.harness.checkpoints:save_on_rank", saved[0], make_run("llama", **saved[1]), folder, {})
        found = ranks.run(
            "tests.harness.checkpoints:load_and_count_on_rank",
            loaded[0],
            make_run("llama", **loaded[1]),
            latest(folder),
        )
        assert found == [([], 0)] * loaded[0]


@pytest.mark.parametrize("name", rest_in_soak(PAIRS, FAST))
def test_any_layout_loads_what_any_other_saved(ranks, root, name):
    model, precision, saved, loaded = PAIRS[name]
    world, layout = LAYOUTS[saved]
    ranks.run("tests.harness.checkpoints:save_on_rank", world, make_run(model, precision, **layout), root, {})
    path = latest(root)
    assert verify(path) == []
    world, layout = LAYOUTS[loaded]
    wrong = ranks.run("tests.harness.checkpoints:load_on_rank", world, make_run(model, precision, **layout), path)
    assert wrong == [[]] * world


@pytest.mark.parametrize(
    "model, saved, loaded",
    [
        ("llama", "pp2 tp2", "dp4 level 2"),
        ("llama-tied", "dp2 pp2 level 3", "tp4"),
        ("gpt2", "pp2 x 2 virtual, dp2", "cp2 dp2"),
        ("mixtral-full", "ep2 etp2", "edp2 ep2 level 3"),
    ],
)
def test_a_model_moves_to_another_layout_without_files(ranks, model, saved, loaded):
    every = {**LAYOUTS, **LAYOUTS_OF_EXPERTS}
    runs = [make_run(model, "bf16", **every[name][1]) for name in (saved, loaded)]
    assert ranks.run("tests.harness.checkpoints:reshard_on_rank", 4, *runs) == [[]] * 4


TWELVE = {
    "1": (1, dict()),
    "tp2": (2, dict(tp=2)),
    "tp4, small buckets": (4, dict(tp=4)),
    "pp2": (2, dict(pp=2)),
    "pp2 x 2 virtual": (2, dict(pp=2, virtual_stages=2)),
    "dp4": (4, dict(bucket_mb=100)),
    "dp2 level 0": (2, dict(sharding=0)),
    "ep4": (4, dict(ep=4)),
    "ep2 x etp2 of tp2": (4, dict(ep=2, etp=2, tp=2)),
    "pp2 ep2": (4, dict(pp=2, ep=2)),
    "cp2 tp2": (4, dict(cp=2, tp=2)),
    "cp2 dp2 ep2": (4, dict(cp=2, ep=2, bucket_mb=100)),
}
EVERY_PAIR = [(a, b) for a in TWELVE for b in TWELVE]
SAMPLED = random.Random(12).sample([pair for pair in EVERY_PAIR if pair[0] != pair[1]], 6)


@pytest.fixture(scope="module")
def saved_by_twelve(ranks, tmp_path_factory):
    """The state of a model with experts and tied embeddings as each layout saved it, when it is first asked for."""
    saved: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in saved:
            folder, (world, layout) = tmp_path_factory.mktemp("saved"), TWELVE[name]
            ranks.run(
                "tests.harness.checkpoints:save_on_rank", world, make_run("qwen3_moe", "bf16", **layout), folder, {}
            )
            saved[name] = latest(folder)
            assert verify(saved[name]) == []
        return saved[name]

    return of


@pytest.mark.parametrize("saved, loaded", [pytest.param(a, b, id=f"{a} -> {b}") for a, b in SAMPLED])
def test_twelve_layouts_load_what_twelve_saved(ranks, saved_by_twelve, saved, loaded):
    loads_exactly(ranks, saved_by_twelve(saved), loaded)


def loads_exactly(ranks, path: Path, name: str) -> None:
    """Every element of masters, moments and weights is what was saved, and no rank reads a byte of the tensors
    twice."""
    world, layout = TWELVE[name]
    found = ranks.run(
        "tests.harness.checkpoints:load_and_count_on_rank", world, make_run("qwen3_moe", "bf16", **layout), path
    )
    for rank, (wrong, twice) in enumerate(found):
        assert wrong == [] and twice == 0, f"rank {rank} under {name}: {wrong[:3]}, {twice} bytes read twice"


ALL_OPTIONS = ["1", *covering({name: layout for name, (_, layout) in LAYOUTS.items()})]


@pytest.mark.parametrize("names", [ALL_OPTIONS, pytest.param(list(LAYOUTS), marks=pytest.mark.soak)], ids=len)
def test_every_layout_writes_the_same_weight_files(ranks, tmp_path, names):
    """Bytes included: they depend on the model alone. And they are the cast of the masters in `state/`."""
    written = {}
    for number, (world, layout) in enumerate(LAYOUTS[name] for name in names):
        run = make_run("gpt2", **layout)
        ranks.run(
            "tests.harness.checkpoints:save_on_rank", world, run, tmp_path / str(number), {"max_file_bytes": 20000}
        )
        path = latest(tmp_path / str(number))
        written[number] = {n: r.xxh3 for n, r in read_manifest(path).files.items() if n.startswith("weights/")}
        states = [n for n in read_manifest(path).files if n.endswith(".safetensors") and n.startswith("state/")]
        assert {n[:16] for n in states} == {f"state/rank-{rank:05d}" for rank in range(world)}, (
            "every rank writes its share"
        )
        check_weights_are_cast_masters(path)
        order = list(json.loads((path / "weights/model.safetensors.index.json").read_text())["weight_map"])
        assert order == sorted(order, key=natural), (
            "files are filled in an order of names, so the next process fills them alike"
        )
    assert len(written[0]) > 5
    assert all(w == written[0] for w in written.values())


def check_weights_are_cast_masters(path: Path) -> None:
    whole = {}
    for file, boxes in json.loads((path / "state/index.json").read_text())["files"].items():
        with safe_open(path / file, framework="pt") as tensors:
            assert len(tensors.keys()) == 3 * len(boxes)
            for name, shape, start, stop in boxes:
                where = ",".join(f"{a}:{b}" for a, b in zip(start, stop))
                target = whole.setdefault(name, torch.full(shape, torch.nan))
                target[Box(tuple(start), tuple(stop)).slices()] = tensors.get_tensor(f"master/{name}[{where}]")
    weights = {}
    for file in (path / "weights").glob("*.safetensors"):
        weights.update(load_file(file))
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[n], whole[n].to(torch.bfloat16)) for n in weights)


def test_holdings_of_strided_and_transposed_pieces():
    """Any range of an interleaved, padded, transposed storage is cut into boxes whose views are the right elements."""
    rows = [
        Piece("gate", (4, 6), Box.full((4, 6)), (slice(0, 8, 2), slice(0, 6)), ZEROS),
        Piece("up", (4, 6), Box.full((4, 6)), (slice(1, 8, 2), slice(0, 6)), ZEROS),
    ]
    conv = [Piece("conv", (9, 9), Box((2, 3), (7, 9)), (slice(1, 7), slice(0, 10, 2)), ZEROS, transposed=True)]
    stack = [
        Piece(f"expert {e}", (9, 4), Box((1, 0), (4, 4)), (e, slice(0, 4), slice(3, 6)), ZEROS, transposed=True)
        for e in (0, 2)
    ]
    users = frozenset({(0, 0)})
    specs = [ParamSpec((8, 6), tuple(rows)), ParamSpec((7, 10), tuple(conv)), ParamSpec((3, 4, 7), tuple(stack))]
    (bucket,) = make_buckets([(spec, users) for spec in specs], Grid())
    flat = torch.arange(bucket.numel)
    truth = {}
    for slot in bucket.slots:
        for piece in slot.spec.pieces:
            whole = truth.setdefault(piece.name, torch.full(piece.shape, -1))
            whole[piece.box.slices()] = piece.of(flat[slot.offset : slot.offset + slot.numel].view(slot.spec.shape))
    for lo, hi in [(0, bucket.numel), *itertools.pairwise(sorted(random.Random(1).sample(range(bucket.numel), 40)))]:
        seen = []
        for item in items_in(bucket, flat[lo:hi], lo, lo, hi):
            assert torch.equal(item.view, truth[item.name][item.box.slices()])
            seen += item.view.flatten().tolist()
        assert sorted(seen) == sorted(x for t in truth.values() for x in t.flatten().tolist() if lo <= x < hi)


def test_training_goes_on_in_another_precision(ranks, root):
    """The masters of a bf16 run are float32: an fp32 run continues from them exactly."""
    ranks.run("tests.harness.checkpoints:save_on_rank", 2, make_run("llama", "bf16", tp=2), root, {})
    assert ranks.run("tests.harness.checkpoints:load_on_rank", 1, make_run("llama", "fp32"), latest(root)) == [[]]


# --- Hugging Face
# -----------------------------------------------------------------------------------------------------------------


def truth_of(model: str) -> dict[str, torch.Tensor]:
    """Whole tensors of `set_state`, assembled from the pieces of one process."""
    state = make_state(make_run(model, "fp32"))
    set_state(state)
    found = {}
    for flat in state.buffers.flat:
        for slot in flat.bucket.slots:
            for piece in slot.spec.pieces:
                whole = found.setdefault(piece.name, torch.full(piece.shape, torch.nan))
                whole[piece.box.slices()] = piece.of(
                    flat.weight[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
                )
    return found


@pytest.mark.parametrize(
    "model, precision, world, layout, limit",
    [
        ("llama", "fp32", 4, dict(tp=2, pp=2), 1 << 30),
        ("llama-tied", "bf16", 2, dict(tp=2), 30000),
        ("gpt2", "fp32", 4, dict(tp=2), 1 << 30),
        ("gpt2", "bf16", 2, dict(pp=2), 20000),
        ("qwen3", "fp32", 4, dict(tp=2, pp=2), 1 << 30),
        ("mistral", "bf16", 2, dict(tp=2), 20000),
        ("qwen2", "fp32", 4, dict(tp=4), 1 << 30),
        ("deepseek_v3-dense", "bf16", 4, dict(tp=2, pp=2), 20000),
        ("gpt_oss", "bf16", 4, dict(tp=2, ep=2, etp=2), 30000),
    ],
)
def test_hugging_face_loads_what_we_save(ranks, root, model, precision, world, layout, limit):
    ranks.run(
        "tests.harness.checkpoints:save_on_rank",
        world,
        make_run(model, precision, **layout),
        root,
        {"max_file_bytes": limit},
    )
    folder = latest(root) / "weights"
    assert ((folder / "model.safetensors").exists()) == (limit == 1 << 30)
    from transformers import AutoModelForCausalLM

    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert theirs.dtype == dtype
    values = theirs.state_dict()
    for name, tensor in truth_of(model).items():
        assert torch.equal(values.pop(name), tensor.to(dtype)), name
    assert set(values) <= {"lm_head.weight"}
    assert theirs.generation_config.eos_token_id is None
    assert model_config_from_hf(folder) == comparable(MODELS[model])
    if model == "llama":
        from phalanx.ops.dense.rope_scaling import Rotation

        ours, _ = Rotation(MODELS[model].head_dim, MODELS[model].rope_theta, MODELS[model].rope_scaling).frequencies(8)
        torch.testing.assert_close(theirs.model.rotary_emb.inv_freq, ours.float(), rtol=1e-6, atol=0)


def comparable(model):
    """With the defaults filled in that Hugging Face writes down, and without what it has no key for."""
    if isinstance(model, GPT2Config | DeepseekV3Config):
        return model
    head_dim = model.head_dim or model.hidden_size // model.num_attention_heads
    ours = {"router_z_loss_coef": 0.0} if isinstance(model, ExpertsConfig) else {}
    if isinstance(model, GptOssConfig):
        ours["router_aux_loss_coef"] = GptOssConfig.router_aux_loss_coef
    return replace(
        model, num_key_value_heads=model.num_key_value_heads or model.num_attention_heads, head_dim=head_dim, **ours
    )


def their_model(model: str, dtype: torch.dtype):
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(MODELS[model].family, **their_config(model))
    made = transformers.AutoModelForCausalLM.from_config(config)
    for p in made.parameters():
        p.data.normal_()
    return made.to(dtype)


def their_config(model: str) -> dict:
    left_out = ("model_type", "dtype", "torch_dtype", "rope_scaling", "rope_theta", "architectures")
    return {k: v for k, v in to_hf(MODELS[model], torch.float32).items() if k not in left_out}


@pytest.mark.parametrize(
    "model, dtype, shard, world, layout",
    [
        ("llama", torch.float32, "5GB", 4, dict(tp=4)),
        ("llama", torch.bfloat16, "10KB", 4, dict(tp=2, pp=2)),
        ("llama-tied", torch.float32, "20KB", 2, dict(pp=2)),
        ("gpt2", torch.float32, "10KB", 4, dict(tp=2)),
        ("gpt2", torch.float16, "5GB", 1, dict()),
        ("qwen3", torch.bfloat16, "10KB", 4, dict(tp=4)),
        ("mistral", torch.bfloat16, "5GB", 2, dict(tp=2)),
        ("qwen2", torch.float32, "10KB", 4, dict(tp=2, pp=2)),
        ("deepseek_v3-dense", torch.float32, "10KB", 2, dict(tp=2)),
        ("gpt_oss", torch.bfloat16, "30KB", 4, dict(tp=2, ep=2, etp=2)),
    ],
)
def test_we_load_what_hugging_face_saves(ranks, tmp_path, model, dtype, shard, world, layout):
    theirs = their_model(model, dtype)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size=shard)
    assert (tmp_path / "hf/model.safetensors.index.json").exists() == (shard != "5GB")
    assert differences(asdict(model_config_from_hf(tmp_path / "hf")), asdict(MODELS[model])) == []
    truth = {n: t.double().numpy() for n, t in theirs.state_dict().items()}
    wrong = ranks.run(
        "tests.harness.checkpoints:load_weights_on_rank",
        world,
        make_run(model, "bf16", **layout),
        tmp_path / "hf",
        truth,
    )
    assert wrong == [[]] * world


def test_base_models_and_constants_of_old_files_load(tmp_path):
    tensors = {n.removeprefix("transformer."): t.contiguous() for n, t in truth_of("gpt2").items()}
    (tmp_path / "hf").mkdir()
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "hf/model.safetensors")
    assert error_on_rank(0, 1, make_run("gpt2"), "load_weights", tmp_path / "hf") == "no error"


def test_our_own_checkpoint_starts_another_run(tmp_path, tiny):
    path = save_here(tiny, tmp_path).path
    assert error_on_rank(0, 1, tiny_run(), "load_weights", path) == "no error"


def hf_folder(path: Path, run=None, drop=(), extra=None, **config) -> Path:
    """A Hugging Face folder of the tiny model with something wrong."""
    state = make_state(run or tiny_run())
    set_state(state)
    weights = shutil.copytree(save_here(state, path / "made").path / "weights", path / "hf")
    tensors = {n: t for n, t in load_file(weights / "model.safetensors").items() if n not in drop}
    save_file({**tensors, **(extra or {})}, weights / "model.safetensors")
    (weights / "config.json").write_text(json.dumps({**json.loads((weights / "config.json").read_text()), **config}))
    return weights


def test_tensors_that_do_not_fit_are_named(tmp_path):
    def error(run, folder):
        return error_on_rank(0, 1, run, "load_weights", folder)

    norm = "model.layers.0.input_layernorm.weight"
    text = error(tiny_run(), hf_folder(tmp_path / "a", drop=[norm], extra={"stray": torch.ones(2)}))
    assert f"missing: {norm} (8,)" in text and "not in the model: stray (2,)" in text
    text = error(tiny_run(vocab_size=12), hf_folder(tmp_path / "b"))
    assert "model.embed_tokens.weight has (11, 8), the model wants (12, 8) (vocabulary of 11 instead of 12)" in text
    tied = tiny_run(tie_word_embeddings=True)
    assert "set model.tie_word_embeddings=true" in error(tiny_run(), hf_folder(tmp_path / "c", tied))
    assert "set model.tie_word_embeddings=false" in error(tied, hf_folder(tmp_path / "d"))
    folder = hf_folder(tmp_path / "e", tied)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    assert error(tied, folder) == "no error"
    save_file({**tensors, "lm_head.weight": embedding + 1}, folder / "model.safetensors")
    assert (
        "differs from its model.embed_tokens.weight" in (text := error(tied, folder))
        and "tie_word_embeddings=false" in text
    )
    del tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding}, folder / "model.safetensors")
    assert error(tied, folder) == "no error"
    os.truncate(tmp_path / "a/hf/model.safetensors", 500)
    assert "cannot be read" in error(tiny_run(), tmp_path / "a/hf")


def test_every_tensor_of_an_expert_that_does_not_fit_is_named(tmp_path):
    """Names that differ in numbers alone share a line, and no other."""
    run = make_run("qwen3_moe", "fp32")  # experts in layers 1 and 3
    lost = [f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for layer in (1, 3) for e in (0, 1, 2, 5, 7)]
    lost += ["model.layers.3.mlp.experts.4.down_proj.weight", "model.layers.1.mlp.gate.weight"]
    extra = {
        f"model.layers.{layer}.mlp.experts.{e}.gate_proj.weight": torch.ones(14, 32) for layer in (0, 1) for e in (8, 9)
    }
    wide = {f"model.layers.3.mlp.experts.{e}.gate_proj.weight": torch.ones(15, 32) for e in (2, 3)}
    text = error_on_rank(0, 1, run, "load_weights", hf_folder(tmp_path, run, drop=lost, extra=extra | wide))
    assert sorted(text.splitlines()[1:]) == [
        "another shape: model.layers.3.mlp.experts.2-3.gate_proj.weight has (15, 32), the model wants (14, "
        "32) (2 tensors)",
        "missing: model.layers.1,3.mlp.experts.0-2,5,7.up_proj.weight (14, 32) (10 tensors)",
        "missing: model.layers.1.mlp.gate.weight (8, 32)",
        "missing: model.layers.3.mlp.experts.4.down_proj.weight (32, 14)",
        "not in the model: model.layers.0-1.mlp.experts.8-9.gate_proj.weight (14, 32) (4 tensors)",
    ]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(0, 12), st.sampled_from("xy")), unique=True
    )
)
def test_folded_lines_say_every_name_once(names):
    lines = [f"{a}.{i}.e.{j}.{b} (2, 3)" for a, i, j, b in names]
    told = []
    for line in folded(lines):
        a, i, _, j, rest = line.split(" (", 1)[0].split(".")
        told += [f"{a}.{m}.e.{n}.{rest} (2, 3)" for m in numbers_of(i) for n in numbers_of(j)]
        assert line.endswith(" tensors)") == any(c in i + j for c in "-,")
    assert sorted(told) == sorted(lines)


def numbers_of(text: str) -> list[int]:
    return [n for run in text.split(",") for n in range(int(run.split("-")[0]), int(run.split("-")[-1]) + 1)]


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "sub/x.safetensors", ""])
def test_an_index_cannot_leave_its_folder(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert "outside its folder" in error_on_rank(0, 1, tiny_run(), "load_weights", tmp_path)


def test_missing_folders_are_told_with_names_near_them(tmp_path, tiny):
    path = save_here(tiny, tmp_path / "run").path
    text = error_on_rank(0, 1, tiny_run(), "load_state", path.with_name("step-00000012"))
    assert "there is no checkpoint" in text and str(path) in text
    (tmp_path / "llama-3b").mkdir()
    assert "llama-3b" in error_on_rank(0, 1, tiny_run(), "load_weights", tmp_path / "llama-3")
    assert "pickled" in error_on_rank(0, 1, tiny_run(), "load_weights", tmp_path / "llama-3b")


LLAMA_HF = to_hf(MODELS["llama"], torch.float32)


def test_rotary_scaling_in_both_spellings():
    old = {k: v for k, v in LLAMA_HF.items() if k != "rope_parameters"}
    new = {k: v for k, v in LLAMA_HF.items() if k not in ("rope_scaling", "rope_theta")}
    assert from_hf(old) == from_hf(new) == from_hf(LLAMA_HF) == MODELS["llama"]
    assert from_hf({**old, "rope_scaling": None}).rope_scaling is None


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(attention_bias=1), "attention_bias=1 (it must be true or false)"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(rope_parameters=dict(rope_type="axial"), rope_scaling=None), "rope_type='axial'"),
        (dict(rope_scaling=dict(type="mrope"), rope_parameters=None), "rope_type='mrope'"),
        (dict(rope_parameters=dict(rope_type="yarn"), rope_scaling=None), "factor is missing"),
        (dict(per_layer_config={"0": {}}), "per_layer_config"),
        (dict(model_type="mamba"), "model_type='mamba'"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(vocab_size=None), None),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(change, named):
    config = {**LLAMA_HF, **change}
    if named is None:
        del config["vocab_size"]
        named = "vocab_size is missing"
    with pytest.raises(CheckpointError, match=re.escape(named)):
        from_hf(config)
    with pytest.raises(CheckpointError, match="activation_function='relu'"):
        from_hf({**to_hf(MODELS["gpt2"], torch.float32), "activation_function": "relu"})


OSS_HF = to_hf(MODELS["gpt_oss"], torch.float32)


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(layer_types=["full_attention"]), "for each of 3 layers"),
        (dict(layer_types=["linear_attention"] * 3), "linear_attention"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    ],
)
def test_what_gpt_oss_does_not_have_is_refused_by_name(change, named):
    with pytest.raises(CheckpointError, match=re.escape(named)):
        from_hf({**OSS_HF, **change})


def test_gpt_oss_of_others():
    """Truth: what transformers' GptOssConfig takes for keys that are absent, and the published config's own keys."""
    import transformers

    theirs = transformers.GptOssConfig(num_hidden_layers=4).to_dict()
    short = {
        k: theirs[k]
        for k in (
            "model_type",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
    }
    assert from_hf(short) == from_hf(theirs)
    assert from_hf(theirs).rope_scaling == RopeScaling(
        rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
    )
    assert [from_hf(theirs).window(i) for i in range(4)] == [128, None, 128, None] and from_hf(
        theirs
    ).layer_types is None
    given = from_hf({**theirs, "layer_types": ["full_attention"] * 4})
    told = [
        from_hf({**theirs, "router_aux_loss_coef": 0.9, "output_router_logits": used}).router_aux_loss_coef
        for used in (False, True)
    ]
    assert told == [0.001, 0.9]  # the published configs say 0.9 and make no loss of it
    assert (
        given.layer_types == ("full_attention",) * 4
        and to_hf(given, torch.float32)["layer_types"] == ["full_attention"] * 4
    )


@pytest.mark.parametrize(
    "name, near",
    [
        ("qwen2_moe", "nearest: qwen"),
        ("gpt-oss", "nearest: gpt_oss"),
        ("Mixtral", "nearest: mixtral"),
        ("x", "deepseek_v3"),
        (None, "llama"),
    ],
)
def test_an_unknown_architecture_is_told_the_nearest_and_how_to_add_one(tmp_path, name, near):
    folder = hf_folder(tmp_path, model_type=name, auto_map={"AutoModelForCausalLM": "code.Model"})
    (folder / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(CheckpointError) as raised:
        model_config_from_hf(folder)
    text = str(raised.value)
    assert (
        f"model_type={name!r} is no family of Phalanx" in text
        and near in text
        and "docs/ops-and-modules.md" in text
        and str(folder) in text
    )
    assert "## Adding a model family" in Path("docs/ops-and-modules.md").read_text()


PUBLISHED_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_published_config_of_deepseek_v3():
    """It is the recipe's model, but for the longer context that it was trained on in the end."""
    found, ours = from_hf(PUBLISHED_DEEPSEEK), deepseek_v3.run().model
    assert [d.split()[0] for d in differences(asdict(ours), asdict(found))] == ["model.rope_scaling"]
    assert found.rope_scaling.factor == 40 and found.max_position_embeddings == 163840


LATENT_HF = to_hf(MODELS["deepseek_v3-dense"], torch.float32)


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(num_key_value_heads=2), "num_key_value_heads=2"),
        (dict(scoring_func="softmax"), "scoring_func='softmax'"),
        (dict(topk_method="greedy"), "topk_method='greedy'"),
        (dict(moe_layer_freq=2), "moe_layer_freq=2"),
    ],
)
def test_what_latent_attention_does_not_have_is_refused_by_name(change, named):
    assert from_hf(LATENT_HF) == MODELS["deepseek_v3-dense"]
    for name in ("deepseek_v3", "deepseek_v3-mtp"):
        assert differences(asdict(from_hf(to_hf(MODELS[name], torch.float32))), asdict(MODELS[name])) == []
    with pytest.raises(CheckpointError, match=named):
        from_hf({**LATENT_HF, **change})


def test_another_model_is_told_field_by_field(root, tiny):
    path = save_here(tiny, root).path
    text = error_on_rank(
        0, 1, tiny_run(hidden_size=16, num_hidden_layers=2, max_position_embeddings=7), "load_state", path
    )
    assert "model.hidden_size 8 -> 16, model.num_hidden_layers 1 -> 2" in text and "max_position" not in text
    assert differences(asdict(TINY), asdict(replace(TINY, num_key_value_heads=2))) == [
        "model.num_key_value_heads 1 -> 2"
    ]
    same = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    assert differences(asdict(same), asdict(comparable(same))) == []


# --- crashes and damage
# -----------------------------------------------------------------------------------------------------------


def test_tokenizers_travel_with_the_weights(tmp_path, tiny):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer

    from phalanx.checkpoint.save import Snapshot
    from tests.harness.checkpoints import save

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "words.json"))
    snapshot = Snapshot(1, 1, TINY, tokenizer=str(tmp_path / "words.json"), token_ids={"eos_token_id": 2})
    path = save(tmp_path / "run", snapshot, tiny).path
    assert AutoTokenizer.from_pretrained(path / "weights")("b a")["input_ids"] == [1, 0]
    assert json.loads((path / "weights/generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((path / "weights/config.json").read_text())["eos_token_id"] == 2
    assert verify(path) == []


def operations(tiny, root) -> int:
    disk = Failing(0)
    prepare(tiny, root)
    save_here(tiny, root, 30, storage=disk)
    return disk.count


def prepare(tiny, root) -> None:
    """Two checkpoints and the rest of a killed save: the next save has something to sweep and something to retire."""
    shutil.rmtree(root, ignore_errors=True)
    before = root.with_name("before")
    if not before.exists():
        save_here(tiny, before, 10)
        save_here(tiny, before, 20)
        shutil.copytree(before / "step-00000010", before / "step-00000015.tmp-new-0")
    shutil.copytree(before, root)


def check_survived(tiny, root, k) -> None:
    newest = latest(root)
    assert newest.name in ("step-00000020", "step-00000030"), f"operation {k}"
    assert verify(newest) == [], f"operation {k}"
    assert all(verify(p) == [] for p in list_checkpoints(root)), f"operation {k}"
    save_here(tiny, root, 40)
    assert latest(root).name == "step-00000040"
    assert len(list(root.iterdir())) == 2, f"operation {k} left something behind: {sorted(root.iterdir())}"


def test_a_save_that_fails_at_any_operation_harms_nothing(tiny, root):
    count = operations(tiny, root)
    assert count > 50
    for k in range(1, count + 1):
        prepare(tiny, root)
        try:
            saved = save_here(tiny, root, 30, storage=Failing(k))
            assert saved.warnings, f"operation {k} failed and nobody was told"
        except CheckpointError as error:
            assert "No space left on device" in str(error)
        check_survived(tiny, root, k)


def test_a_process_that_dies_at_any_operation_harms_nothing(tiny, root):
    for k in range(1, operations(tiny, root) + 1, 2):  # the other half: above
        prepare(tiny, root)
        child = os.fork()
        if child == 0:
            save_here(tiny, root, 30, storage=Failing(k, "exit"))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137
        check_survived(tiny, root, k)


@pytest.mark.parametrize("undo_renames", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_power_cut_at_any_operation_harms_nothing(tiny, root, undo_renames):
    """The disk forgets what was not synced. After a save has returned, it must not forget that save."""
    count = operations(tiny, root)
    for k in [*range(1, count + 1), 0]:
        prepare(tiny, root)
        disk = Lossy(k)
        try:
            save_here(tiny, root, 30, storage=disk)
        except CheckpointError:
            pass
        disk.crash(root, undo_renames)
        if k == 0:
            assert latest(root).name == "step-00000030"
        good = [p for p in list_checkpoints(root) if verify(p) == []]
        assert good and latest(root) == good[-1] and good[-1].name >= "step-00000020", f"operation {k}"


def test_a_first_save_lasts_once_it_has_returned(tiny, root):
    """With nothing to retire, no later sync can make up for one that the commit forgot."""
    disk = Lossy(0)
    save_here(tiny, root, 10, storage=disk)
    disk.crash(root, undo_renames=True)
    assert latest(root).name == "step-00000010" and verify(latest(root)) == []


def test_one_rank_with_a_full_disk_fails_on_all_ranks(ranks, root):
    run = make_run("llama", tp=2)
    ranks.run("tests.harness.checkpoints:save_on_rank", 2, run, root, {})
    for operation in (1, 2, 3, 5):
        errors = ranks.run("tests.harness.checkpoints:error_on_rank", 2, run, "save", root, 1, operation)
        assert errors[0] == errors[1] and "rank 1: could not write" in errors[0] and "No space left" in errors[0]
    errors = ranks.run("tests.harness.checkpoints:error_on_rank", 2, run, "save", root, 0, 9)
    assert errors[0] == errors[1] and "rank 0" in errors[0]
    assert [p.name for p in list_checkpoints(root)] == ["step-00000010"]
    assert len(list(root.iterdir())) == 2, (
        "the failures of rank 1 left nothing; rank 0, with its disk gone, could not tidy up"
    )


def test_a_disk_without_room_is_found_before_writing(root, tiny, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100})())
    with pytest.raises(CheckpointError, match=r"it needs \d+ bytes, 100 are free"):
        save_here(tiny, root)
    assert list(root.iterdir()) == []


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def test_damage_is_seen(tmp_path, tiny):
    made = save_here(tiny, tmp_path / "good").path
    pick = random.Random(0)
    for number, file in enumerate(files_of(made)):
        for what in ("flip", "cut", "empty", "drop", "link"):
            path = shutil.copytree(made, tmp_path / f"{number}{what}/step-00000010")
            target = path / file.relative_to(made)
            data = bytearray(target.read_bytes())
            if what == "flip":
                data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
                target.write_bytes(data)
            elif what in ("cut", "empty"):
                target.write_bytes(data[:-1] if what == "cut" else b"")
            else:
                target.unlink()
            if what == "link":
                target.symlink_to(file)
            if (what, target.name) == ("link", NAME):
                continue  # the same bytes, nothing is wrong with them
            assert verify(path) != [], f"{what} {target}"
            if what != "flip":
                with pytest.raises(CheckpointError):
                    latest(path.parent)
                assert "no error" != error_on_rank(0, 1, tiny_run(), "load_state", path)
    (made / "weights/stray").write_text("x")
    assert verify(made) == ["weights/stray is not in the manifest"]


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "damaged"),
        ("[" * 100000, "damaged"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        ('{"sha256": "", "format": 2}', "damaged"),
        ('{"sha256": "", "format": 99}', "format 99; this version of phalanx reads formats 2 to 4"),
    ],
)
def test_manifests_that_are_none(root, tiny, text, named):
    path = save_here(tiny, root).path
    (path / NAME).write_text(text)
    with pytest.raises(CheckpointError, match=named):
        read_manifest(path)


def test_an_edited_manifest_is_damaged(root, tiny):
    path = save_here(tiny, root).path
    (path / NAME).write_text((path / NAME).read_text().replace('"step": 10', '"step": 11'))
    with pytest.raises(CheckpointError, match="its checksum is wrong"):
        read_manifest(path)


def test_a_manifest_cannot_name_files_outside(root, tiny):
    path = save_here(tiny, root).path
    good = read_manifest(path)
    for name in ("../x", "/etc/passwd", "weights/../../x"):
        (path / NAME).write_text(replace(good, files={name: next(iter(good.files.values()))}).text())
        with pytest.raises(CheckpointError, match="outside the checkpoint"):
            read_manifest(path)


def test_the_newest_good_one_is_found_and_never_none_of_bad_ones(tmp_path, root, tiny):
    assert latest(root) is None and list_checkpoints(root) == []
    for step in (5, 10, 15):
        save_here(tiny, root, step, keep=Keep(0))
    shutil.copytree(root / "step-00000015", root / "step-00000099.tmp-new-1")
    assert find(tmp_path) == find(root) == find(root / "step-00000015") == root / "step-00000015"
    os.truncate(root / "step-00000015/weights/model.safetensors", 9)
    assert latest(root).name == "step-00000010"
    for path in list_checkpoints(root):
        (path / NAME).unlink()
    with pytest.raises(CheckpointError, match=r"(?s)step-00000015.*step-00000005"):
        latest(root)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        find(tmp_path / "nothing")


def test_retention_keeps_the_newest_good_ones_and_protected_ones(root, tiny):
    for step in (1, 2, 3, 4):
        save_here(tiny, root, step, keep=Keep(0))
    assert len(list_checkpoints(root)) == 4
    os.truncate(root / "step-00000004/weights/config.json", 1)
    save_here(tiny, root, 5, keep=Keep(2), protect=[root / "step-00000001"])
    assert [p.name for p in list_checkpoints(root)] == [
        "step-00000001",
        "step-00000003",
        "step-00000004",
        "step-00000005",
    ]
    save_here(tiny, root, 6, keep=Keep(2))
    assert [p.name for p in list_checkpoints(root)] == ["step-00000005", "step-00000006"]


class CannotDelete(Storage):
    def remove_file(self, path):
        raise OSError(13, "Permission denied")


def test_a_removal_that_fails_is_told_and_tried_again(root, tiny):
    for step in (1, 2):
        save_here(tiny, root, step)
    saved = save_here(tiny, root, 3, storage=CannotDelete())
    assert saved.written and len(saved.warnings) == 1 and "step-00000001: Permission denied" in saved.warnings[0]
    save_here(tiny, root, 4)
    assert sorted(p.name for p in root.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_step_is_saved_once_unless_it_is_damaged(root, tiny):
    assert save_here(tiny, root).written and not save_here(tiny, root).written
    weights = root / "step-00000010/weights/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert save_here(tiny, root).written and verify(weights.parent.parent) == []


def test_scalars_come_back_exactly(root):
    state = make_state(make_run("llama", "fp16"))
    set_state(state)
    path = save_here(state, root).path
    other = make_state(make_run("llama", "fp16"))
    loop = load_here(other, path)
    assert loop["loss"].hex() == (0.1 + 0.2).hex() and loop["tokens"] == 2**53 + 1 and loop["list"][1] == 1e-310
    assert (
        other.scaler.scale.item() == state.scaler.scale.item() and other.scaler.left.item() == state.scaler.left.item()
    )


# --- lock


def test_one_run_at_a_time_writes_to_a_folder(tmp_path):
    with FolderLock(tmp_path):
        with pytest.raises(FolderInUse, match=f"process {os.getpid()} on host"):
            FolderLock(tmp_path)
        assert (writer_of(tmp_path) or "").startswith(f"process {os.getpid()} on host")
    FolderLock(tmp_path).release()
    assert writer_of(tmp_path) is None


def test_the_lock_of_a_dead_process_is_free(tmp_path):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        FolderLock(tmp_path)
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(0)
    assert os.read(reader, 1) == b"x"
    with pytest.raises(FolderInUse, match=f"process {child} "):
        FolderLock(tmp_path)
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert writer_of(tmp_path).startswith(f"process {child} on host ") and writer_of(tmp_path).endswith(", was killed")
    lock = FolderLock(tmp_path)
    assert lock.took_over.startswith(f"process {child} on host ")
    lock.keep()
    lock.release()
    assert FolderLock(tmp_path).took_over is None, "the last one let go of it itself"


def mixed_up(rank: int, world: int) -> str:
    """Rank 1 left out a collective and sends its next bytes where an answer belongs."""
    axis = Mesh(Grid(dp=world), rank).dp
    try:
        if rank == 0:
            agree(axis, lambda: 1)
        else:
            axis.all_gather_text('{"result": 1')
    except PeerLost as error:
        return str(error)
    return ""


def test_an_answer_that_is_none_is_told_of_a_peer(ranks):
    said, other = ranks.run("tests.checkpoint.test_checkpoint:mixed_up", 2)
    assert "went another way" in said and not other
