"""Steps of encoders, encoder-decoders and decoders of other families on one GPU, and what people use for them beside it
in the same call. Random weights, made-up tokens.

python benchmarks/families.py [--rows modernbert,peer-modernbert] [--seconds 500] [--out rows.jsonl]
python benchmarks/families.py --small          models of a few layers, on a CPU too: whether it runs

On one GPU, in calls of ten minutes; on two, the last:

python benchmarks/families.py --seconds 580 --out rows.jsonl --rows modernbert,peer-modernbert,bert,peer-bert
python benchmarks/families.py --seconds 580 --out rows.jsonl --rows t5,t5-without,peer-t5
python benchmarks/families.py --seconds 580 --out rows.jsonl --rows vl,peer-vl
python benchmarks/families.py --seconds 580 --out rows.jsonl --rows w1,gemma3,llama4
python benchmarks/families.py --seconds 580 --out rows.jsonl --rows vl-unequal,vl-unequal-2,vl-unequal-2-own

modernbert   ModernBERT-base, masked tokens (30 %), documents of 1 to 1,023 tokens packed into sequences of 8,192. The
             peer pads: a row for each document, as long as the longest can be. Its tokens are those of documents
bert         BERT-large, masked tokens (15 %), sequences of 512
t5           T5 1.1 large, span corruption, 1,024 tokens of the encoder and 256 of the decoder, in about five documents;
             the peer's are all full, of one document
t5-without   the same without the kernel of its bias
vl           Qwen2.5-VL-7B with 8 of its 28 language layers and the whole tower, both trained, sequences of 4,096 with
             four images of 1,024 patches each, from files
vl-unequal   the same with images of 64 to about 3,000 patches, two sequences in a micro-batch, on one GPU;
             vl-unequal-graphs: the language layers in CUDA graphs; vl-unequal-2: on two GPUs, with as many sequences
             each, which compute each other's images; vl-unequal-2-own: each its own
gemma3       Gemma 3 with W1's sizes, and Llama 4 (chunks of 8,192, layers without rotary embedding, the last layer with
llama4       two experts of which a token takes one): TFLOP/s beside w1's, that is Llama's, in the same call

Peers (benchmarks/peers/families.py) are transformers' models with attention by torch's SDPA, compiled by torch.compile.
Each row is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pictured

HERE = Path(__file__).parent
RECIPES, CONFIGS = HERE.parent / "recipes", HERE / "configs"
LONG = ("data.mock=false", "data.source=documents:Documents", "train.global_batch=16", "train.micro_batch=4")
LARGE = ("model.vocab_size=30522", "model.hidden_size=1024", "model.intermediate_size=4096")
LARGE = (*LARGE, "model.num_hidden_layers=24", "model.num_attention_heads=16", "model.max_position_embeddings=512")
LARGE = (*LARGE, "data.document_attention=false")  # a text fills its sequence, as the peer's
T5 = ("train.seq_length=256", "task.encoder_length=1024", "train.global_batch=64", "train.micro_batch=16")
VL = ("model.num_hidden_layers=8", "layout.tp=1", "train.seq_length=4096", "train.global_batch=8")
VL = (
    *VL,
    f"model.image_token_id={pictured.IMAGE_TOKEN}",
    "data.image_workers=4",
    "data.split=100,0,0",
    "task.name=sft",
    "train.recompute=none",
)
UNEQUAL = (*VL, "train.micro_batch=2")  # kernels of few tokens are shorter than the Python that starts them
ROWS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "modernbert": (RECIPES / "modernbert_base.yaml", LONG),
    "bert": (
        RECIPES / "tiny_bert.yaml",
        (*LARGE, "train.seq_length=512", "train.global_batch=256", "train.micro_batch=64", "train.precision=bf16"),
    ),
    "t5": (RECIPES / "t5_large.yaml", T5),
    "t5-without": (RECIPES / "t5_large.yaml", (*T5, "train.plain_ops=[attention_bias]")),
    "vl": (RECIPES / "qwen2_5_vl_7b.yaml", VL),
    "vl-unequal": (RECIPES / "qwen2_5_vl_7b.yaml", UNEQUAL),
    "vl-unequal-graphs": (RECIPES / "qwen2_5_vl_7b.yaml", (*UNEQUAL, "train.cuda_graphs=on")),
    "vl-unequal-2": (RECIPES / "qwen2_5_vl_7b.yaml", (*UNEQUAL, "train.global_batch=16")),
    "vl-unequal-2-own": (RECIPES / "qwen2_5_vl_7b.yaml", (*UNEQUAL, "train.global_batch=16", "layout.media_group=1")),
    "w1": (CONFIGS / "w1.yaml", ()),
    "gemma3": (CONFIGS / "w1.yaml", ("model.family=gemma3_text", "model.head_dim=128", "model.sliding_window=1024")),
    "llama4": (
        CONFIGS / "w1.yaml",
        (
            "model.family=llama4_text",
            "model.moe_layers=[7]",
            "model.num_local_experts=2",
            "model.intermediate_size_mlp=14336",
        ),
    ),
}
PEERS = ("modernbert", "bert", "t5", "vl")
SMALL_MODEL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL_MODEL |= {"vocab_size": 512}
SMALL = (*(f"model.{key}={value}" for key, value in SMALL_MODEL.items()), "train.global_batch=2", "train.micro_batch=1")
SMALL_OF = {
    "modernbert": ("train.seq_length=256", "data.source_config.longest=63", "train.precision=fp32"),
    "bert": ("train.seq_length=128", "train.precision=fp32"),
    "t5": ("train.seq_length=32", "task.encoder_length=128", "train.precision=fp32"),
    "vl": (
        "model.num_key_value_heads=2",
        "model.mrope_section=[4, 2, 2]",
        "model.vision={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 3, num_attention_heads: 2, "
        "patch_size: 14, fullatt_block_indexes: [1]}",
        "train.seq_length=160",
        "train.precision=fp32",
    ),
    "w1": ("train.seq_length=128", "model.num_key_value_heads=2", "train.precision=fp32"),
    "gemma3": ("train.seq_length=128", "model.num_key_value_heads=2", "model.head_dim=16", "train.precision=fp32"),
    "llama4": (
        "train.seq_length=128",
        "model.num_key_value_heads=2",
        "model.head_dim=16",
        "model.intermediate_size_mlp=128",
        "model.moe_layers=[3]",
        "train.precision=fp32",
    ),
}


def ours(row: str, asked: argparse.Namespace, seconds: float) -> dict[str, Any]:
    config, words = ROWS[row]
    kind, ranks = row.split("-")[0], 2 if "-2" in row else 1
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        command = [sys.executable, "-m", "phalanx", "bench", "step", str(config), *words, "--ranks", str(ranks)]
        command += [*(SMALL + SMALL_OF[kind] if asked.small else ()), "--json", str(out)]
        if kind == "vl":
            tokens, patches, known = (160, 64, 512) if asked.small else (4096, 1024, 50000)
            chats = 16 if asked.small else 64
            data = pictured.write(Path(folder) / "chats", chats, tokens, patches, known, "unequal" in row)
            command += [f"{name}={value}" for name, value in data.items()] + [f"dir={folder}/run"]
        if row == "modernbert":
            command.append(f"data.tokenizer={tokenizer(Path(folder), 512 if asked.small else 50368)}")
        said = call([*command, "--warmup", str(asked.warmup), "--steps", str(asked.steps)], seconds)
        if said or not out.exists():
            return {"row": row, "by": "phalanx", "failed": said or "no figures"}
        found = json.loads(out.read_text(encoding="utf-8"))
    peak = found["peak_bytes"]
    return {
        "row": row,
        "by": "phalanx",
        "tokens_per_s": found["tokens_per_s_per_gpu"],
        "step_ms": 1e3 * found["step"]["median"],
        "tflops": found["flops"] / 1e12,
        "peak_gib": None if peak is None else peak / 2**30,
        "budget": found["budget"],
        "device": found["device"],
        "overrides": " ".join(words),
    }


def tokenizer(folder: Path, vocab: int) -> Path:
    """Of made-up words, with a mask token: masked tokens need to know it."""
    from tokenizers import Tokenizer, models

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"word{n}" for n in range(vocab - len(special)))]
    path = folder / "tokenizer.json"
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    made.add_special_tokens(special)
    made.save(str(path))
    return path


def peer(row: str, asked: argparse.Namespace, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        command = [sys.executable, str(HERE / "peers/families.py"), row.removeprefix("peer-"), "--out", str(out)]
        command += ["--small"] if asked.small else []
        said = call([*command, "--warmup", str(asked.warmup), "--steps", str(asked.steps)], seconds)
        if said or not out.exists():
            return {"row": row, "by": "peer", "failed": said or "no figures"}
        return {**json.loads(out.read_text(encoding="utf-8")), "row": row}


def call(command: list[str], seconds: float) -> str:
    """What went wrong; "": nothing did."""
    try:
        paths = os.pathsep.join(path for path in (str(HERE), os.environ.get("PYTHONPATH")) if path)
        env = {**os.environ, "PYTHONPATH": paths}  # documents.py is found by name
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return "" if done.returncode == 0 else " | ".join(lines[-4:])[-600:]


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--rows", default=",".join((*ROWS, *(f"peer-{row}" for row in PEERS))))
    reader.add_argument("--seconds", type=float, default=1800.0, help="for all rows together")
    reader.add_argument("--warmup", type=int, default=5)
    reader.add_argument("--steps", type=int, default=8)
    reader.add_argument("--small", action="store_true")
    reader.add_argument("--out", help="append the results to this file, a line of JSON each")
    asked = reader.parse_args()
    until, found = time.monotonic() + asked.seconds, list[dict[str, Any]]()
    for row in asked.rows.split(","):
        left = until - time.monotonic()
        if left < 10:
            found.append({"row": row, "by": "", "failed": "no time left"})
            continue
        found.append((ours if row in ROWS else peer)(row, asked, left))
        print(json.dumps({k: v for k, v in found[-1].items() if k != "budget"}), flush=True)
        if asked.out:
            with open(asked.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(found[-1]) + "\n")
    print(f"{'row':18} {'tokens/s':>9} {'ms':>9} {'TFLOP/s':>8} {'peak GiB':>9}")
    for each in found:
        if "failed" in each:
            print(f"{each['row']:18} {each['failed'][:60]}")
        else:
            peak = "n/a" if each["peak_gib"] is None else f"{each['peak_gib']:.2f}"
            tflops = f"{each['tflops']:.1f}" if "tflops" in each else ""
            print(f"{each['row']:18} {each['tokens_per_s']:9,.0f} {each['step_ms']:9.1f} {tflops:>8} {peak:>9}")


if __name__ == "__main__":
    main()
