"""llama.cpp's own converter reads the weights folder of a live run as it lies: every tensor, and what the GGUF file
says of the model.

The converter is in the source archive of llama-cpp-python on PyPI, GPT-2's vocabulary in that of openai-whisper
(neither is installed); where they cannot be had the tests are skipped, with the reason. It knows a BPE tokenizer by
a hash of what it makes of a text: an unknown one is refused, whoever made it. A SentencePiece model of any kind is
taken.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from phalanx.base.placement import Placement
from phalanx.checkpoint.keep import find
from phalanx.config.run import LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.models.rope import RopeScaling
from phalanx.optim.config import OptimConfig
from phalanx.text.tokenizers import load_tokenizer
from phalanx.training.main import train
from tests.harness.parity import MODELS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

LLAMA_CPP = (
    "llama-cpp-python",
    "llama_cpp_python-0.3.36.tar.gz",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
)
WHISPER = (
    "openai-whisper",
    "openai_whisper-20250625.tar.gz",
    "37a91a3921809d9f44748ffc73c0a55c9f366c85a3ef5c2ae0cc09540432eb96",
)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
FAMILIES = {
    "llama": replace(MODELS["llama"], rope_scaling=LLAMA3),
    "llama-tied": MODELS["llama-tied"],
    "mistral": MODELS["mistral"],
    "mixtral": MODELS["mixtral"],
    "qwen3": MODELS["qwen3"],
    "gpt_oss": MODELS["gpt_oss"],
    "gpt2": MODELS["gpt2"],
    "qwen3_moe": replace(MODELS["qwen3_moe"], decoder_sparse_step=1),  # llama.cpp has experts in every layer of it
    "deepseek_v3": MODELS["deepseek_v3"],
    "deepseek_v3-mtp": MODELS["deepseek_v3-mtp"],
    "qwen2": MODELS["qwen2"],
}


def fetch(package: str, name: str, sha256: str) -> tarfile.TarFile:
    """A source archive as the registry's index names it."""
    index = f"https://pypi.org/simple/{package}/"
    try:
        with urllib.request.urlopen(index, timeout=30) as page:
            found = re.search(rf'href="([^"#]*/{re.escape(name)})', page.read().decode())
        if found is None:
            pytest.skip(f"{index} has no {name}")
        with urllib.request.urlopen(urllib.request.urljoin(index, found[1]), timeout=120) as file:  # type: ignore[attr-defined]
            data = file.read()
    except OSError as error:
        pytest.skip(f"{name} cannot be had: {error}")
    assert hashlib.sha256(data).hexdigest() == sha256
    return tarfile.open(fileobj=io.BytesIO(data))


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory) -> Path:
    """The folder of llama.cpp's Python programs."""
    folder = tmp_path_factory.mktemp("llama_cpp")
    inner = f"{LLAMA_CPP[1].removesuffix('.tar.gz')}/vendor/llama.cpp/"
    with fetch(*LLAMA_CPP) as archive:
        wanted = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/")
        archive.extractall(
            folder, [m for m in archive.getmembers() if m.name.removeprefix(inner).startswith(wanted)], filter="data"
        )
    return folder / inner


@pytest.fixture(scope="module")
def gpt2_tokenizer(tmp_path_factory) -> Path:
    """A folder with GPT-2's tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("gpt2")
    with fetch(*WHISPER) as archive:
        ranks = archive.extractfile(next(m for m in archive.getmembers() if m.name.endswith("assets/gpt2.tiktoken")))
        (folder / "r50k_base.tiktoken").write_bytes(ranks.read())  # type: ignore[union-attr]
    load_tokenizer(folder / "r50k_base.tiktoken").save(folder / "saved")
    (folder / "saved/chat_template.jinja").write_text(TEMPLATE)
    return folder / "saved"


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text").write_text("".join(f"{n} words and {n * n % 97} more of them\n" for n in range(2000)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=400,
        byte_fallback=True,
        minloglevel=2,
        num_threads=1,
    )
    return folder / "m.model"


def live(model: Any, tokenizer: Path, folder: Path, precision: str) -> Path:
    """The weights folder of the last checkpoint of a short run."""
    settings = TrainConfig(steps=2, global_batch=1, micro_batch=1, seq_length=16, device="cpu", precision=precision)  # type: ignore[arg-type]
    train(
        Run(
            model=model,
            train=settings,
            data=DataConfig(mock=True, tokenizer=str(tokenizer)),
            optim=OptimConfig(lr=1e-2),
            log=LogConfig(report=False),
            dir=str(folder),
        ),
        Placement(),
    )
    return find(str(folder)) / "weights"


def converted(llama_cpp: Path, weights: Path, out: Path, kind: str) -> None:
    command = [
        sys.executable,
        str(llama_cpp / "convert_hf_to_gguf.py"),
        str(weights),
        "--outtype",
        kind,
        "--outfile",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def gguf(llama_cpp):
    sys.path.insert(0, str(llama_cpp / "gguf-py"))
    import gguf

    yield gguf
    sys.path.remove(str(llama_cpp / "gguf-py"))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_converter_reads_a_live_folder(name, llama_cpp, gguf, request, tmp_path):
    """llama-tied and qwen2 with a SentencePiece model; of qwen2, transformers 5 splits text as the published Qwen2
    does, whatever its tokenizer.json says, so that the converter does not know GPT-2's."""
    pieces = name in ("llama-tied", "qwen2")
    tokenizer = request.getfixturevalue("sentencepiece_model" if pieces else "gpt2_tokenizer")
    precision = "bf16" if name in ("llama", "mixtral") else "fp32"
    weights = live(replace(FAMILIES[name], vocab_size=512 if pieces else 50304), tokenizer, tmp_path / "run", precision)
    converted(llama_cpp, weights, tmp_path / "out.gguf", {"fp32": "f32", "bf16": "bf16"}[precision])
    file = gguf.GGUFReader(tmp_path / "out.gguf")
    said = {key: field.contents() for key, field in file.fields.items()}
    config = json.loads((weights / "config.json").read_text())
    check_metadata(said, weights, pieces)
    names = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == said["general.architecture"]), 8
    )
    ours = expected(config, load_file(weights / "model.safetensors"))
    wanted = {names.get_name(key, try_suffixes=(".weight", ".bias")): x for key, x in ours.items()}
    there = {t.name: values(gguf, t) for t in file.tensors}
    extra = there.keys() - wanted.keys()
    assert extra == ({"rope_freqs.weight"} if name == "llama" else set()) and not wanted.keys() - there.keys()
    differing = [key for key, x in wanted.items() if not np.array_equal(there[key].reshape(x.shape), x.float().numpy())]
    assert differing == [] and len(wanted) > 20
    if extra:
        check_llama3(there["rope_freqs.weight"], config)


def values(gguf: Any, tensor: Any) -> np.ndarray:
    """A tensor of the file in float32, its dims in torch's order."""
    return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(n) for n in reversed(tensor.shape)))


def check_metadata(said: dict[str, Any], weights: Path, pieces: bool) -> None:
    config = json.loads((weights / "config.json").read_text())
    arch, gpt2 = said["general.architecture"], config["model_type"] == "gpt2"
    get = lambda theirs, ours: config[theirs if gpt2 else ours]  # noqa: E731
    kinds = {
        "gpt_oss": "gpt-oss",
        "qwen3_moe": "qwen3moe",
        "mistral": "llama",
        "mixtral": "llama",
        "deepseek_v3": "deepseek2",
    }
    assert arch == kinds.get(config["model_type"], config["model_type"])
    assert said[f"{arch}.block_count"] >= get(
        "n_layer", "num_hidden_layers"
    )  # modules that predict further tokens are counted, not written
    assert said[f"{arch}.embedding_length"] == get("n_embd", "hidden_size")
    assert said[f"{arch}.context_length"] == get("n_positions", "max_position_embeddings")
    assert said[f"{arch}.attention.head_count"] == get("n_head", "num_attention_heads")
    if not gpt2:
        assert said[f"{arch}.feed_forward_length"] == config["intermediate_size"]
        heads = (
            1 if arch == "deepseek2" else config["num_key_value_heads"]
        )  # of the latent, which llama.cpp keeps instead of keys
        assert said[f"{arch}.attention.head_count_kv"] == heads
        assert said[f"{arch}.rope.freq_base"] == config["rope_theta"]
        assert said[f"{arch}.attention.layer_norm_rms_epsilon"] == np.float32(config["rms_norm_eps"])
    experts = next((config[k] for k in ("num_local_experts", "num_experts", "n_routed_experts") if k in config), None)
    assert said.get(f"{arch}.expert_count") == experts
    assert experts is None or said[f"{arch}.expert_used_count"] == config["num_experts_per_tok"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn":
        assert (said[f"{arch}.rope.scaling.type"], said[f"{arch}.rope.scaling.factor"]) == ("yarn", scaling["factor"])
        assert said[f"{arch}.rope.scaling.original_context_length"] == scaling["original_max_position_embeddings"]
    assert said["tokenizer.ggml.model"] == ("llama" if pieces else "gpt2") and said.get("tokenizer.ggml.pre") == (
        "default" if pieces else "gpt-2"
    )
    assert (
        said["tokenizer.ggml.eos_token_id"] == load_tokenizer(weights).eod
        and len(said["tokenizer.ggml.tokens"]) == config["vocab_size"]
    )
    assert said.get("tokenizer.chat_template") == (None if pieces else TEMPLATE)
    if not pieces:
        vocab = json.loads((weights / "tokenizer.json").read_text())["model"]["vocab"]
        assert all(said["tokenizer.ggml.tokens"][i] == token for token, i in vocab.items())


def check_llama3(factors: np.ndarray, config: dict[str, Any]) -> None:
    """What the converter divides frequencies by, against ours."""
    from phalanx.ops.dense.rope_scaling import Rotation, inverse_frequencies

    plain = inverse_frequencies(config["head_dim"], config["rope_theta"])
    scaled, _ = Rotation(config["head_dim"], config["rope_theta"], LLAMA3).frequencies(16)
    torch.testing.assert_close(
        torch.from_numpy(factors.copy()).double(), plain.double() / scaled.double(), rtol=1e-6, atol=0
    )


# ---- the converter's changes, as its sources say them --------------------------------------------


def expected(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our tensors under names that gguf's table knows, changed as the converter documents it."""
    family = config["model_type"]
    change: Callable[..., dict[str, torch.Tensor]] = {
        "gpt2": of_gpt2,
        "gpt_oss": of_gpt_oss,
        "deepseek_v3": of_latents,
    }.get(family, of_llama)
    found: dict[str, torch.Tensor] = {}
    for name, x in with_stacked_experts(tensors).items():
        found |= change(name, x, config)
    return found


def with_stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor for the experts of a layer."""
    found: dict[str, Any] = {}
    for name, x in tensors.items():
        if part := re.fullmatch(r"(.*)\.experts\.(\d+)\.(.*)", name):
            found.setdefault(f"{part[1].replace('block_sparse_moe', 'feed_forward')}.experts.{part[3]}", {})[
                int(part[2])
            ] = x
        else:
            found[name] = x
    return {n: torch.stack([x[i] for i in range(len(x))]) if isinstance(x, dict) else x for n, x in found.items()}


def of_llama(name: str, x: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of Llama's kind: rows of queries and keys so that the two halves of a rotated pair are neighbours."""
    if config["model_type"] in ("llama", "mistral", "mixtral") and re.search(r"\.[qk]_proj\.weight", name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        x = x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)
    return {name.replace("model.layers", "layers") if "feed_forward.experts" in name else name: x}


def of_gpt2(name: str, x: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: x.T if re.search(r"\.c_(attn|proj|fc)\.weight", name) else x}


def of_gpt_oss(name: str, x: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gate and up apart, experts' matrices as linears have them."""
    if name.endswith("sinks"):
        return {f"{name}.weight": x}
    if "experts.down_proj" in name:
        return {name.replace("_bias", ".bias"): x} if name.endswith("_bias") else {f"{name}.weight": x.transpose(1, 2)}
    if "experts.gate_up_proj" in name:
        whole, kind = (x, "bias") if name.endswith("_bias") else (x.transpose(1, 2), "weight")
        base = name[: name.index("gate_up_proj")]
        return {f"{base}{part}_proj.{kind}": whole[:, at::2] for at, part in enumerate(("gate", "up"))}
    return {name: x}


def of_latents(name: str, x: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Keys and values made from the latent are apart, keys transposed; modules that predict further tokens are left
    out."""
    if (layer := re.match(r"model\.layers\.(\d+)\.", name)) and int(layer[1]) >= config["num_hidden_layers"]:
        return {}
    if not name.endswith("kv_b_proj.weight"):
        return {name.replace("correction_bias", "correction.bias"): x}
    whole = x.view(config["num_attention_heads"], -1, x.shape[1])
    keys, made = whole.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
    return {name.replace("kv_b_proj", "k_b_proj"): keys.transpose(1, 2), name.replace("kv_b_proj", "v_b_proj"): made}
