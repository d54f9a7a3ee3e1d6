"""Documents of very different lengths on cp ranks: padded batches, packed ones with every document cut over all ranks, and dealt by length.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/dynamic_cp.py      measure, on the GPUs there are (or --tiny on a CPU)
    python benchmarks/dynamic_cp.py --predict                                        count FLOPs and bytes for 2, 4 and 8 ranks instead

Lengths are lognormal with a long tail, cut off at the longest sequence, a form that made-up data for
sequence packing often has. The parameters are ours and fixed here with the seed: median 1,500,
sigma 1.2, longest 32,768 tokens. Padded batches are the good kind: a micro-batch has as many neighbouring documents as fit when each is
filled up to the longest of them. All rows train on the same documents, and tokens are counted without padding.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from phalanx.base.batch import IGNORE, Batch, room_for_documents
from phalanx.base.part import Part
from phalanx.base.placement import Placement
from phalanx.comm.mesh import MEETING, leave_world
from phalanx.data.config import DataConfig
from phalanx.data.packing import first_fit
from phalanx.launch.env import read_placement
from phalanx.layout.config import LayoutConfig
from phalanx.models.config import LlamaConfig
from phalanx.train.build import State, build, init_weights
from phalanx.train.config import Run, TrainConfig
from phalanx.train.main import join
from phalanx.train.plan import make_plan
from phalanx.train.step import train_step

SEED, MEDIAN, SIGMA, LONGEST = 20261122, 1500, 1.2, 32768
MODEL = {
    "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
TINY = {**MODEL, "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8, "num_attention_heads": 4}
TINY = {**TINY, "num_key_value_heads": 2}
MATMULS, ATTENTION, LINK = 600e12, 350e12, 200e9  # FLOP/s and bytes/s of a GPU that --predict assumes

ROWS: dict[str, dict[str, Any]] = {  # name -> layout beside cp
    "padded, static": {},
    "packed, static, all-gather": {"cp_attention": "allgather"},
    "packed, static, heads": {"cp_ulysses": 0},  # 0: as many as cp and the heads allow
    "packed, dynamic": {"cp_degree": "dynamic"},
    "packed, dynamic, heads": {"cp_degree": "dynamic", "cp_ulysses": 0},
}


def lengths_of(tokens: float, longest: int) -> list[int]:
    """Documents of about so many tokens together, in random order."""
    dice, found = np.random.default_rng(SEED), list[int]()
    while sum(found) < tokens:
        found.append(int(min(longest, max(16, dice.lognormal(np.log(MEDIAN * longest / LONGEST), SIGMA)))))
    return found


def padded(lengths: list[int], room: int) -> Iterator[list[list[int]]]:
    """Micro-batches of documents in rows of their own: as many as fit in `room` tokens, each filled up to the longest."""
    rows: list[int] = []
    for length in lengths:
        if rows and max(*rows, length) * (len(rows) + 1) > room:
            yield [[n] for n in rows]
            rows = []
        rows.append(length)
    yield [[n] for n in rows]


def packed(lengths: list[int], room: int) -> list[list[list[int]]]:
    """Micro-batches of one sequence of `room` places, the longest documents first into the first that has room; in random order."""
    lengths = sorted(lengths, reverse=True)
    bins = first_fit(np.array(lengths), room)
    found: list[list[list[int]]] = [[[]] for _ in range(int(bins.max()) + 1)]
    for length, b in zip(lengths, bins.tolist()):
        found[b][0].append(length)
    np.random.default_rng(SEED).shuffle(found)
    return found


def batch_of(rows: list[list[int]], length: int, vocab: int, number: int) -> Batch:
    """Documents of given lengths in each sequence of `length` places, then padding; random tokens."""
    dice = np.random.default_rng(number)
    tokens = torch.from_numpy(dice.integers(0, vocab, len(rows) * length))
    labels, real = tokens.roll(-1), torch.zeros_like(tokens)
    sizes = [n for row in rows for n in (*row, length - sum(row)) if n]
    ends = torch.tensor(sizes).cumsum(0)
    documents = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    positions = torch.arange(len(tokens)) - torch.cat((torch.zeros(1, dtype=torch.int64), ends))[documents]
    labels[ends - 1] = IGNORE
    for row, documents_of_row in enumerate(rows):
        real[row * length : row * length + sum(documents_of_row)] = 1
    labels[real == 0] = IGNORE
    samples = torch.full_like(tokens, number)
    room = room_for_documents(len(sizes), len(tokens))
    return Batch(tokens, labels, positions, samples, len(rows), length, documents, real=real, most_documents=room)


def micro_batches_of(name: str, lengths: list[int], longest: int) -> list[tuple[list[list[int]], int]]:
    """(documents of each sequence, places of a sequence) of each micro-batch of a row of the table."""
    if not name.startswith("padded"):
        return [(rows, longest) for rows in packed(lengths, longest)]
    return [(rows, -(-max(n for row in rows for n in row) // 16) * 16) for rows in padded(lengths, longest)]


def run_of(name: str, cp: int, longest: int, micro_batches: int, tiny: bool) -> Run:
    layout = dict(ROWS[name])
    if layout.get("cp_ulysses") == 0:
        heads = (TINY if tiny else MODEL)["num_key_value_heads"]
        layout["cp_ulysses"] = max(u for u in range(1, cp + 1) if cp % u == 0 and heads % u == 0)
    train = TrainConfig(
        steps=1000, global_batch=micro_batches, micro_batch=1, seq_length=longest, precision="fp32" if tiny else "bf16",
        device="cpu" if tiny else "auto", cuda_graphs="off",
    )  # fmt: skip
    model, data = LlamaConfig(**(TINY if tiny else MODEL)), DataConfig(mock=True, packing="online")
    return Run(model=model, train=train, layout=LayoutConfig(cp=cp, **layout), data=data)


@contextmanager
def state_of(run: Run, placement: Placement) -> Iterator[State]:
    mesh = join(run, placement)
    state = build(make_plan(run, placement.world_size), mesh)
    init_weights(state)
    state.train()
    yield state
    mesh.close()
    leave_world()


def measure(name: str, lengths: list[int], longest: int, placement: Placement, steps: int, tiny: bool, repeats: int) -> dict[str, Any]:
    """Seconds of the fastest of some passes over all documents, the slowest rank's; every step has about as many micro-batches."""
    made = micro_batches_of(name, lengths, longest)
    run = run_of(name, placement.world_size, longest, -(-len(made) // steps), tiny)
    with state_of(run, placement) as state:
        mesh = state.mesh
        batches = [batch_of(rows, n, run.model.vocab_size, i).cut(mesh.part).to(mesh.device) for i, (rows, n) in enumerate(made)]
        groups = [batches[i * len(batches) // steps : (i + 1) * len(batches) // steps] for i in range(steps)]
        seconds = []
        for _ in range(1 + repeats):  # the first compiles kernels and is not counted
            mesh.world.all_reduce(torch.zeros(1, device=mesh.device)).wait()
            wait(mesh.device)
            began = time.perf_counter()
            for group in groups:
                loss = train_step(state, [replace(b, _derived={}) for b in group], 1e-4).loss
            wait(mesh.device)
            seconds.append(time.perf_counter() - began)
        slowest = mesh.world.all_reduce(torch.tensor(seconds[1:], dtype=torch.float64, device=mesh.device), "max").wait().min().item()
    places = sum(len(rows) * n for rows, n in made)
    return {"name": name, "seconds": slowest, "micro-batches": len(made), "fill": sum(lengths) / places, "loss": loss.item()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def predict(name: str, lengths: list[int], longest: int, cp: int) -> dict[str, Any]:
    """Seconds of all micro-batches by counting: the fullest rank's FLOPs forward and backward, and bytes received, nothing hidden.

    Attention counts the pairs that are read, as kernels without masks would do; exchanges carry keys and values there twice (for forward
    and backward) and their gradients home.
    """
    m, layers = MODEL, MODEL["num_hidden_layers"]
    width, inner, kv = m["hidden_size"], m["intermediate_size"], m["num_key_value_heads"] * m["head_dim"]
    heads = m["num_attention_heads"] * m["head_dim"]
    per_token = 6.0 * (layers * (width * (2 * heads + 2 * kv) + 3 * width * inner) + width * m["vocab_size"])
    per_pair, per_exchanged = layers * 3 * 4.0 * heads, layers * 3 * 2 * kv * 2
    seconds = 0.0
    for number, (rows, n) in enumerate(micro_batches_of(name, lengths, longest)):
        like = Part(0, cp, ROWS[name].get("cp_degree") == "dynamic")
        parts = [batch_of(rows, n, 2, number).cut(replace(like, index=i)) for i in range(cp)]
        pairs = max(int((b.positions + 1).sum()) for b in parts)
        whole = parts[0].dealt is None
        exchanged = max(b.all_tokens - b.num_tokens if whole else sum(d.length - d.part.size(d.length) for d in b.shared) for b in parts)
        seconds += per_token * parts[0].most_tokens / MATMULS + per_pair * pairs / ATTENTION + per_exchanged * exchanged / LINK
    return {"name": name, "seconds": seconds}


def table(rows: list[dict[str, Any]], tokens: int, title: str) -> str:
    first, static = rows[0]["seconds"], min(r["seconds"] for r in rows if "packed, static" in r["name"])
    lines = [title, f"{'':<28}{'tokens/s':>12}{'x padded':>10}{'x packed':>10}  "]
    for row in rows:
        more = f"  fill {row['fill']:.1%}, {row['micro-batches']} micro-batches, loss {row['loss']:.4f}" if "fill" in row else ""
        lines.append(f"{row['name']:<28}{tokens / row['seconds']:>12,.0f}{first / row['seconds']:>10.2f}{static / row['seconds']:>10.2f}{more}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=6e5, help="of all documents")
    parser.add_argument("--steps", type=int, default=2, help="that a pass over them is cut into")
    parser.add_argument("--repeats", type=int, default=1, help="passes that are timed, after one that is not")
    every = ",".join(map(str, range(len(ROWS))))
    parser.add_argument("--rows", default=every, help="numbers of the rows to measure, the first and a static one included")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to see that it works")
    parser.add_argument("--predict", action="store_true", help="count instead of measuring")
    options = parser.parse_args()
    longest = 512 if options.tiny else LONGEST
    lengths = lengths_of(8192 if options.tiny else options.tokens, longest)
    about = f"{len(lengths)} documents, {sum(lengths):,} tokens, median {int(np.median(lengths)):,}, longest {max(lengths):,}"
    names = [list(ROWS)[int(i)] for i in options.rows.split(",")]
    if options.predict:
        for cp in (2, 4, 8):
            rows = [predict(name, lengths, longest, cp) for name in names if "heads" not in name]
            print(table(rows, sum(lengths), f"PREDICTION by FLOPs and bytes, cp {cp}: {about}"), end="\n\n")
        return
    placement, problems = read_placement(os.environ)
    if placement is None:
        parser.error("; ".join(map(str, problems)) or "start it with python -m torch.distributed.run, or ask for --predict")
    rows = []
    for number, name in enumerate(names, 1):  # each row in a world of its own
        address = f"{MEETING}{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}/row{number}"
        place = replace(placement, init_method=address if placement.world_size > 1 else "")
        rows.append(measure(name, lengths, longest, place, options.steps, options.tiny, options.repeats))
    if placement.rank == 0:
        device = "CPU" if options.tiny or not torch.cuda.is_available() else torch.cuda.get_device_name()
        print(table(rows, sum(lengths), f"measured on {placement.world_size} x {device}, cp {placement.world_size}: {about}"))


if __name__ == "__main__":
    main()
