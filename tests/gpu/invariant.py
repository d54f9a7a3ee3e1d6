"""Checks of train.batch_invariant on a GPU: bits, not numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.config.run import Run
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.request import SamplingOptions
from phalanx.models.llama import LlamaConfig
from phalanx.ops.dense.invariant import PARTS
from phalanx.ops.dense.matmul import MATMUL
from phalanx.ops.in_order import sum_parts
from tests.gpu.truth import ROUNDINGS, within
from tests.harness.generation import (
    answers_of,
    cached_logits,
    invariant_run,
    random_model,
    sequences_of,
    training_logits,
)

LENGTHS = (700, 33, 130, 9, 1, 64, 257)
VOCABULARY = 1000
SHAPES = ((6144, 4096, 1), (4096, 4096, PARTS), (4096, 14336, PARTS), (131, 72, PARTS), (200, 1000, 1))
"""Outputs, inputs and parts: of Llama-3-8B; such that no tile is full."""


def same(what: str, found: Tensor, wanted: Tensor) -> None:
    differing = int((found.reshape(-1).view(torch.uint8) != wanted.reshape(-1).view(torch.uint8)).sum())
    if found.shape != wanted.shape or differing:
        raise AssertionError(f"{what}: {differing} of {wanted.nbytes} bytes differ")


def matmul_check(dtype: torch.dtype) -> Callable[[torch.device], str]:
    """Rows of few and of many, in every tile; outputs and parts of the contraction on two ranks."""

    def check(device: torch.device) -> str:
        worst = 0.0
        for outputs, inputs, parts in SHAPES:
            dice = torch.Generator().manual_seed(outputs)
            x = torch.randn(700, inputs, generator=dice).to(device, dtype)
            weight = (torch.randn(outputs, inputs, generator=dice) * inputs**-0.5).to(device, dtype)
            product = MATMUL.choose("invariant", x).product
            whole = product(x, weight, parts)
            name = f"{outputs} x {inputs} in {parts} parts"
            bound = 1e-5 if dtype != torch.float32 else ROUNDINGS[dtype]
            worst = max(worst, within(name, whole, x.double().cpu() @ weight.double().cpu().t(), bound))
            for rows in (1, 2, 7, 16, 64, 65, 128, 200, 256, 257):
                for first in (0, 5, 700 - rows):
                    few = slice(first, first + rows)
                    same(f"{name}, {rows} rows from {first}", product(x[few], weight, parts), whole[few])
            for rows in (3, 700):
                halves = [product(x[:rows], w.contiguous(), parts) for w in weight.split((64, outputs - 64))]
                same(f"{name}, outputs of two ranks", torch.cat(halves, 1), whole[:rows])
                if parts > 1:
                    pairs = zip(x[:rows].chunk(2, 1), weight.chunk(2, 1))
                    sums = [product(a.contiguous(), b.contiguous(), parts // 2) for a, b in pairs]
                    same(f"{name}, parts of two ranks", sum_parts(torch.stack(sums)), whole[:rows])
        return f"no bit differs; {worst:.1e} off"

    return check


def model_run(precision: str) -> Run:
    """A model whose heads and widths fill tiles."""
    run = invariant_run("llama", precision)
    model = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
    )
    return replace(run, model=model)


def logits_check(model: str | None, precision: str) -> Callable[[torch.device], str]:
    """Training's forward, sequence by sequence and packed; generation in batches of 1, 2, 7, 64 and pieces of any
    size, with pages of 16 tokens."""

    def check(device: torch.device) -> str:
        run = model_run(precision) if model is None else invariant_run(model, precision)
        most = run.model.max_position_embeddings
        lengths = [min(n, most) for n in LENGTHS]
        wanted = training_logits(0, 1, run, lengths, device=device)
        assert wanted is not None
        packed = training_logits(0, 1, run, lengths, sum(lengths) + 6, device)
        assert packed is not None
        for i, (a, b) in enumerate(zip(packed, wanted)):
            same(f"document {i} of a packed batch", a, b)
        for count in (1, 2, 7):
            whole = [tuple(lengths[:count])]
            pieces, rest = [], list(lengths[:count])
            for size in (5, 1, 100, 64, 1, 2048):
                if not any(rest):
                    break
                pieces.append(tuple(min(size + 3 * i, n) for i, n in enumerate(rest)))
                rest = [n - taken for n, taken in zip(rest, pieces[-1])]
            for steps in (whole, pieces):
                found = cached_logits(0, 1, run, lengths[:count], steps, 16, device)
                assert found is not None
                for i, (a, b) in enumerate(zip(found, wanted)):
                    same(f"sequence {i} of {count} in {len(steps)} pieces", a, b)
        many = [lengths[0], *(1 + i % min(40, most) for i in range(63))]
        steps = [
            (many[0] - 2, *(0 if i % 2 else n - 1 for i, n in enumerate(many[1:]))),
            (1, *(i % 2 for i in range(63))),
        ]
        steps.append(tuple(n - a - b for n, a, b in zip(many, *steps)))
        found = cached_logits(0, 1, run, many, steps, 16, device)
        assert found is not None
        same("one of 64 sequences", found[0], wanted[0])
        return "no bit differs"

    return check


def engine_check(device: torch.device) -> str:
    """Log-probabilities of answers: alone, beside others, from graphs and without them."""
    run = model_run("bf16")
    made, prompts = random_model(0, 1, run, device), sequences_of((40, 9, 300, 1, 77, 130), VOCABULARY)
    asked = [(p, SamplingOptions(tokens=20, temperature=0, logprobs=2)) for p in prompts]
    found = []
    for sequences, tokens, graphs in ((1, 512, True), (6, 64, True), (6, 512, False), (3, 50, True)):
        engine = Engine(made, EngineOptions(sequences=sequences, tokens=tokens, page_size=16, memory_gib=0.05))
        if not graphs:
            engine.runner.graphs.sizes = []
        found.append([answer[:2] for answer in answers_of(engine, asked, 2)])
    wrong = [sum(a != b for a, b in zip(each, found[0])) for each in found[1:]]
    if any(wrong):
        raise AssertionError(f"answers that differ from those alone: {wrong}")
    return "no bit differs"


def invariant_checks() -> dict[str, Callable[[torch.device], str]]:
    found: dict[str, Callable[[torch.device], str]] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found[f"invariant: matmuls, {str(dtype)[6:]}"] = matmul_check(dtype)
    for precision in ("bf16", "fp32"):
        found[f"invariant: logits, {precision}"] = logits_check(None, precision)
    for model in ("qwen3", "gpt2", "mistral"):
        found[f"invariant: logits of {model}, bf16"] = logits_check(model, "bf16")
    return found | {"invariant: the engine, bf16": engine_check}
