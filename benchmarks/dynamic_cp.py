"""Documents of very different lengths on cp ranks: padded batches, packed ones with every document cut over all
ranks, and dealt by length.

    python -m torch.distributed.run --nproc-per-node 4 benchmarks/dynamic_cp.py      measure, on the GPUs there are
    (or --tiny on a CPU) python benchmarks/dynamic_cp.py --predict                                        count FLOPs
    and bytes for 2, 4 and 8 ranks instead

Lengths are lognormal with a long tail, cut off at the longest sequence, a form that made-up data for sequence
packing often has. The parameters are ours and fixed here with the seed: median 1,500, sigma 1.2, longest 32,768
tokens. All rows train on the same documents, and tokens are counted without padding. What is compared with is the
good kind of its sort: padded micro-batches have as many neighbouring documents as fit when each is filled up to the
longest of them, and run kernels for whole sequences; packed ones are nearly full, attention costs nothing between
documents and in padding, and the ratio printed is to the fastest of the ways in which keys or heads travel at a
fixed degree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.base.placement import MEETING, Placement
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.packing import first_fit
from phalanx.engine.build import State, build, init_weights
from phalanx.engine.meeting import device_of, identity, joined_mesh
from phalanx.engine.step import train_step
from phalanx.forecast.decide import make_plan
from phalanx.launch.env import read_placement
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.sequence.batch import IGNORE, PADDING_RUN, Batch, room_for_documents
from phalanx.sequence.shard import SequenceShard

SEED, MEDIAN, SIGMA, LONGEST = 20261122, 1500, 1.2, 32768
MODEL = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    **MODEL,
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
}
TINY = {**TINY, "num_key_value_heads": 2}
MATMULS, ATTENTION, WHOLE_ATTENTION, LINK = (
    600e12,
    350e12,
    500e12,
    200e9,
)  # FLOP/s and bytes/s of a GPU that --predict assumes

GOALS = {"padded": 1.8, "static": 1.2}

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
    """Micro-batches of documents in rows of their own: as many as fit in `room` tokens, each filled up to the
    longest."""
    rows: list[int] = []
    for length in lengths:
        if rows and max(*rows, length) * (len(rows) + 1) > room:
            yield [[n] for n in rows]
            rows = []
        rows.append(length)
    yield [[n] for n in rows]


def packed(lengths: list[int], room: int) -> list[list[list[int]]]:
    """Micro-batches of one sequence of `room` places, the longest documents first into the first that has room; in
    random order."""
    lengths = sorted(lengths, reverse=True)
    bins = first_fit(np.array(lengths), room)
    found: list[list[list[int]]] = [[[]] for _ in range(int(bins.max()) + 1)]
    for length, b in zip(lengths, bins.tolist()):
        found[b][0].append(length)
    np.random.default_rng(SEED).shuffle(found)
    return found


def runs_of_padding(count: int) -> list[int]:
    return [min(PADDING_RUN, count - at) for at in range(0, count, PADDING_RUN)]


def batch_of(rows: list[list[int]], length: int, vocab: int, number: int, whole: bool = False) -> Batch:
    """Documents of given lengths in each sequence of `length` places, then padding; random tokens. `whole`: one
    document in each sequence, behind which padding needs no border."""
    dice = np.random.default_rng(number)
    tokens = torch.from_numpy(dice.integers(0, vocab, len(rows) * length))
    labels, real = tokens.roll(-1), torch.zeros_like(tokens)
    sizes = [n for row in rows for n in (*row, *runs_of_padding(length - sum(row)))]
    ends = torch.tensor(sizes).cumsum(0)
    documents = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    positions = torch.arange(len(tokens)) - torch.cat((torch.zeros(1, dtype=torch.int64), ends))[documents]
    labels[ends - 1] = IGNORE
    for row, documents_of_row in enumerate(rows):
        real[row * length : row * length + sum(documents_of_row)] = 1
    labels[real == 0] = IGNORE
    samples = torch.full_like(tokens, number)
    if whole:
        return Batch(tokens, labels, torch.arange(length).repeat(len(rows)), samples, len(rows), length)
    room = room_for_documents(len(sizes), len(tokens))
    return Batch(tokens, labels, positions, samples, len(rows), length, documents, real=real, most_documents=room)


def micro_batches_of(name: str, lengths: list[int], longest: int) -> list[tuple[list[list[int]], int]]:
    """(documents of each sequence, places of a sequence) of each micro-batch of a row of the table."""
    if not name.startswith("padded"):
        return [(rows, longest) for rows in packed(lengths, longest)]
    return [(rows, -(-max(n for row in rows for n in row) // 16) * 16) for rows in padded(lengths, longest)]


def run_of(name: str, cp: int, longest: int, micro_batches: int, tiny: bool, graphs: str) -> Run:
    layout, padding = dict(ROWS[name]), name.startswith("padded")
    if layout.get("cp_ulysses") == 0:
        layout["cp_ulysses"] = most_heads(cp, tiny)
    train = TrainConfig(
        steps=1000,
        global_batch=micro_batches,
        micro_batch=1,
        seq_length=longest,
        precision="fp32" if tiny else "bf16",
        device="cpu" if tiny else "auto",
        cuda_graphs="off" if padding else graphs,  # type: ignore[arg-type]  # padded shapes hardly come again
    )
    model, data = (
        LlamaConfig(**(TINY if tiny else MODEL)),
        DataConfig(mock=True, packing="off" if padding else "online"),
    )
    return Run(model=model, train=train, layout=LayoutConfig(cp=cp, **layout), data=data)


def most_heads(cp: int, tiny: bool = False) -> int:
    heads = (TINY if tiny else MODEL)["num_key_value_heads"]
    return max(u for u in range(1, cp + 1) if cp % u == 0 and heads % u == 0)


@contextmanager
def state_of(run: Run, placement: Placement) -> Iterator[State]:
    with joined_mesh(run, placement, identity(run, device_of(run, placement))) as (mesh, _):
        state = build(make_plan(run, placement.world_size), mesh)
        init_weights(state.model)
        state.model.train()
        yield state


def measure(
    name: str, lengths: list[int], longest: int, placement: Placement, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of some passes over all documents, the slowest rank's; every step has about as many micro-batches."""
    made, steps = micro_batches_of(name, lengths, longest), options.steps
    run = run_of(name, placement.world_size, longest, -(-len(made) // steps), options.tiny, options.graphs)
    with state_of(run, placement) as state:
        mesh, whole = state.mesh, name.startswith("padded")
        batches = [
            batch_of(rows, n, run.model.vocab_size, i, whole).cut(mesh.part).to(mesh.device)
            for i, (rows, n) in enumerate(made)
        ]
        groups = [batches[i * len(batches) // steps : (i + 1) * len(batches) // steps] for i in range(steps)]
        slowest, losses, left = [], [], options.seconds
        while len(slowest) < 1 + options.repeats and (
            len(slowest) < 2 or left > slowest[-1]
        ):  # the first compiles kernels and is not counted
            began = time.perf_counter()
            for group in groups:
                losses.append(train_step(state, [replace(b, _made={}) for b in group], 1e-4).loss)
            wait(mesh.device)
            now = time.perf_counter()
            times = torch.tensor([now - began, now - options.began], dtype=torch.float64, device=mesh.device)
            taken, since = mesh.world.all_reduce(times, "max").wait().tolist()  # ranks start the next one together
            slowest, left = [*slowest, taken], options.seconds - since
    slowest = slowest[1:]
    places = sum(len(rows) * n for rows, n in made)
    found = {
        "name": name,
        "seconds": statistics.median(slowest),
        "passes": slowest,
        "micro-batches": len(made),
        "fill": sum(lengths) / places,
    }
    return {**found, "loss": losses[0].item(), "last loss": losses[-1].item(), "seconds left": left}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def predict(name: str, lengths: list[int], longest: int, cp: int) -> dict[str, Any]:
    """Seconds of all micro-batches by counting: the fullest rank's FLOPs forward and backward, and bytes received,
    nothing hidden.

    Attention counts the pairs that are read, as kernels without masks do. Keys and values travel twice (for forward
    and backward) and their gradients home; heads once each way, and their gradients.
    """
    m, layers = MODEL, MODEL["num_hidden_layers"]
    width, inner, kv = m["hidden_size"], m["intermediate_size"], m["num_key_value_heads"] * m["head_dim"]
    heads = m["num_attention_heads"] * m["head_dim"]
    per_token = 6.0 * (layers * (width * (2 * heads + 2 * kv) + 3 * width * inner) + width * m["vocab_size"])
    per_pair, per_key, per_place = (
        layers * 3 * 4.0 * heads,
        layers * 3 * 2 * kv * 2,
        layers * 2 * (2 * heads + 2 * kv) * 2,
    )
    by_heads, u = "cp_ulysses" in ROWS[name], most_heads(cp)
    if by_heads and u < cp:
        return {"name": name, "seconds": float("nan")}
    seconds = 0.0
    for number, (rows, n) in enumerate(micro_batches_of(name, lengths, longest)):
        like = SequenceShard(0, cp, ROWS[name].get("cp_degree") == "dynamic", u if by_heads else 1)
        whole = batch_of(rows, n, 2, number, name.startswith("padded"))
        parts = [whole.cut(replace(like, index=i)) for i in range(cp)]
        speed = WHOLE_ATTENTION if whole.documents is None else ATTENTION
        attention = per_pair * max(pairs_of(b, by_heads) for b in parts) / speed
        received = max(per_place * sent_places(b) if by_heads else per_key * other_places(b) for b in parts)
        seconds += per_token * parts[0].most_tokens / MATMULS + attention + received / LINK
    return {"name": name, "seconds": seconds}


def pairs_of(batch: Batch, by_heads: bool) -> float:
    """That a rank's queries read; of all queries, and its part of the heads, where heads are exchanged."""
    if not by_heads:
        return int((batch.positions + 1).sum())
    if batch.balanced is None:
        return int((batch.uncut.positions + 1).sum()) / batch.part.count
    shared = sum(d.part.size(d.length) for d in batch.shared)
    return int((batch.positions[shared:] + 1).sum()) + sum(
        d.length * (d.length + 1) / 2 / d.part.count for d in batch.shared
    )


def sent_places(batch: Batch) -> float:
    """Tokens of which this rank sends heads away, a token of which it sends half of them counted as half."""
    if batch.balanced is None:
        return batch.num_tokens * (batch.part.count - 1) / batch.part.count
    return sum(d.part.size(d.length) * (d.part.count - 1) / d.part.count for d in batch.shared)


def other_places(batch: Batch) -> int:
    """Tokens of other ranks whose keys and values travel."""
    return (
        batch.all_tokens - batch.num_tokens
        if batch.balanced is None
        else sum(d.length - d.part.size(d.length) for d in batch.shared)
    )


def against(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How many times the tokens per second of the padded row, and of the fastest static packed one, the fastest
    dynamic one has."""
    return {
        "padded": least(rows, "padded") / least(rows, "dynamic"),
        "static": least(rows, "packed, static") / least(rows, "dynamic"),
    }


def least(rows: list[dict[str, Any]], words: str) -> float:
    """Seconds of the fastest row whose name has these words."""
    return min((row["seconds"] for row in rows if words in row["name"]), default=float("nan"))


def table(rows: list[dict[str, Any]], tokens: int, title: str) -> str:
    first, static = least(rows, "padded"), least(rows, "packed, static")
    lines = [title, f"{'':<28}{'tokens/s':>12}{'x padded':>10}{'x packed':>10}  "]
    for row in rows:
        more = ""
        if "fill" in row:
            spread = (max(row["passes"]) - min(row["passes"])) / row["seconds"]
            more = (
                f"  spread {spread:.1%}, fill {row['fill']:.1%}, {row['micro-batches']} micro-batches, loss "
                f"{row['loss']:.4f}"
            )
        lines.append(
            f"{row['name']:<28}{tokens / row['seconds']:>12,.0f}{first / row['seconds']:>10.2f}"
            f"{static / row['seconds']:>10.2f}{more}"
        )
    found = against(rows)
    said = ", ".join(f"{found[name]:.2f} times {name} (goal {goal})" for name, goal in GOALS.items())
    return "\n".join([*lines, f"dynamic, the fastest of each sort: {said}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=3.9e5, help="of all documents")
    parser.add_argument("--steps", type=int, default=2, help="that a pass over them is cut into")
    parser.add_argument(
        "--repeats", type=int, default=3, help="passes that are timed, after one that is not; the median counts"
    )
    every = ",".join(map(str, range(len(ROWS))))
    parser.add_argument("--rows", default=every, help="numbers of the rows to measure, in this order")
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600,
        help="after which nothing new begins: the rest of the passes and rows is left out",
    )
    parser.add_argument(
        "--graphs", default="auto", choices=("auto", "on", "off"), help="train.cuda_graphs of packed rows"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to see that it works")
    parser.add_argument("--predict", action="store_true", help="count instead of measuring")
    parser.add_argument("--json", help="file for what was found")
    options = parser.parse_args()
    options.began = time.perf_counter()
    longest = 512 if options.tiny else LONGEST
    lengths = lengths_of(8192 if options.tiny else options.tokens, longest)
    about = (
        f"{len(lengths)} documents, {sum(lengths):,} tokens, median {int(np.median(lengths)):,}, longest "
        f"{max(lengths):,}"
    )
    names = [list(ROWS)[int(i)] for i in options.rows.split(",")]
    if options.predict:
        for cp in (2, 4, 8):
            rows = [predict(name, lengths, longest, cp) for name in names]
            print(table(rows, sum(lengths), f"PREDICTION by FLOPs and bytes, cp {cp}: {about}"), end="\n\n")
        return
    placement, problems = read_placement(os.environ)
    if placement is None:
        parser.error(
            "; ".join(map(str, problems)) or "start it with python -m torch.distributed.run, or ask for --predict"
        )
    device = "CPU" if options.tiny or not torch.cuda.is_available() else torch.cuda.get_device_name()
    title = f"measured on {placement.world_size} x {device}, cp {placement.world_size}: {about}"
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names, 1):  # each row in a world of its own
        address = f"{MEETING}{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}/row{number}"
        place = replace(placement, init_method=address if placement.world_size > 1 else "")
        before = rows[-1]["seconds left"] if rows else options.seconds
        rows.append(measure(name, lengths, longest, place, options))
        if placement.rank == 0:
            print(f"{name}: {rows[-1]['seconds']:.2f} s a pass, {len(rows[-1]['passes'])} passes", flush=True)
            if options.json:
                found = {
                    "title": title,
                    "torch": torch.__version__,
                    "lengths": lengths,
                    "rows": rows,
                    "times": against(rows),
                    "goals": GOALS,
                }
                Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if rows[-1]["seconds left"] < before - rows[-1]["seconds left"]:  # the next would take as long
            break
    if placement.rank == 0:
        print(table(rows, sum(lengths), title))


if __name__ == "__main__":
    main()
