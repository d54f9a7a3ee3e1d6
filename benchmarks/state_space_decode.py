"""A step of generation of Nemotron-H-8B with random weights, one token of each of 256 sequences, beside the bytes that
it must move at least: weights, and the states of all sequences, which are read and written.

python benchmarks/state_space_decode.py [--small] [--out rows.jsonl]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from generation import Shapes, budget, with_random_weights

from phalanx.bench.ceilings import copy_rate
from phalanx.config.read import load_run
from phalanx.inference.load import without_training
from phalanx.inference.memory import keeping, state_bytes

HERE = Path(__file__).parent
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--small", action="store_true", help="three small layers, on a CPU too")
    reader.add_argument("--out", help="append the result to this file, a line of JSON")
    asked = reader.parse_args()
    if asked.small:
        from state_space import LAYERS, SMALL

        run = load_run(LAYERS, list(SMALL[LAYERS]))
    else:
        kinds = [KINDS[letter] for letter in PATTERN]
        words = [f"model.num_hidden_layers={len(kinds)}", f"model.layers_block_type=[{','.join(kinds)}]"]
        run = load_run(HERE / "configs/nemotron8.yaml", words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = Shapes(many=4, prompt=1, answer=40) if asked.small else Shapes(many=256, prompt=1, answer=64)
    with torch.no_grad():
        model = with_random_weights(without_training(run, 1))
        weights = sum(p.numel() * p.element_size() for block in model.blocks for p in block.parameters())
        embedding = run.model.vocab_size * run.model.hidden_size * model.dtype.itemsize  # of which few rows are read
        states = 2 * shapes.many * state_bytes(keeping(model.blocks), model.dtype)
        floor = (weights - embedding + states) / copy_rate(device)
        kinds_ms = budget(model, replace(shapes), shapes.many, shapes.prompt)
    step = kinds_ms.pop("step")
    row = {"by": "phalanx", "forward_ms": step, "forward_floor_ms": 1e3 * floor, "share": 1e3 * floor / step}
    row |= {"floor": f"{1e3 * floor:.3f} (bytes)", "kinds_ms": kinds_ms}
    print(json.dumps(row), flush=True)
    if asked.out:
        with open(asked.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
