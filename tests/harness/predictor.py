"""Drafts of multi-token prediction as the modules make them of whole sequences, without memory; and a model whose
modules are always right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.config.run import Run
from phalanx.inference.engine import DraftCounts, Engine, EngineOptions
from phalanx.inference.load import InferenceModel
from phalanx.nn.mtp import MultiTokenPrediction
from phalanx.sequence.batch import IGNORE, Batch
from tests.harness.generation import Answer, Asked, answers_of, forward_logits, random_model


def block_of(model: InferenceModel) -> MultiTokenPrediction:
    return next(block for block in model.blocks if isinstance(block, MultiTokenPrediction))


def whole_batch(tokens: Sequence[int]) -> Batch:
    row = torch.tensor(tokens)
    return Batch(row, torch.full_like(row, IGNORE), torch.arange(len(row)), torch.zeros_like(row), 1, len(row))


def whole_drafts(model: InferenceModel, tokens: list[int], width: int) -> tuple[list[int], Tensor]:
    """Greedy drafts of what comes after `tokens`, of which the last was drawn, and the hidden states (width, D) that
    predict them: each depth over the whole sequence."""
    block, j = block_of(model), len(tokens) - 2
    states = [last_hidden(model, tokens[: j + 1])]
    drafts: list[int] = []
    hidden: list[Tensor] = []
    modules = len(block.depths)
    for n in range(width):
        known = tokens + drafts
        if n < modules:
            made = depth_over(block, n, states[-1], known[n + 1 : n + 2 + j])
            states.append(made)
        else:  # the last one reads what it made itself
            entering = torch.cat((states[modules - 1], states[modules][j : j + n - modules + 1]))
            whole = depth_over(block, modules - 1, entering, known[modules : modules + len(entering)])
            states[modules] = torch.cat((states[modules], whole[-1:]))
            made = whole
        logits = block.head.logits(made, torch.tensor([len(made) - 1]))
        drafts.append(int(logits.argmax()))
        hidden.append(made[-1])
    return drafts, torch.stack(hidden)


@torch.no_grad()
def depth_over(block: MultiTokenPrediction, depth: int, h: Tensor, tokens: Sequence[int]) -> Tensor:
    batch = whole_batch(tokens)
    return block.draft(depth, h, batch.tokens, batch)


def last_hidden(model: InferenceModel, tokens: Sequence[int]) -> Tensor:
    """(tokens, D), normed."""
    found: list[Tensor] = []
    handle = block_of(model).register_forward_hook(lambda _module, _inputs, out: found.append(out))
    forward_logits(model, whole_batch(tokens))
    handle.remove()
    return found[0]


def knowing_model(rank: int, world: int, run: Run, device: torch.device | str = "cpu") -> InferenceModel:
    """Its next token follows from the last one alone, and each module knows that."""
    model = random_model(rank, world, run, device)
    for block in model.blocks:
        for p in block.parameters():
            for piece in p.spec.pieces:
                mine, width = piece.of(p.data), p.shape[-1] // 2
                if piece.name.endswith(("o_proj.weight", "down_proj.weight")):
                    mine.zero_()
                elif piece.name.endswith("eh_proj.weight"):
                    mine.zero_()[:, :width].fill_diagonal_(1.0)
                elif piece.name.endswith("norm.weight"):
                    mine.fill_(1.0)
    return model


def counted_answers(
    rank: int, world: int, run: Run, asked: Sequence[Asked], options: EngineOptions, arrive: int, knows: bool
) -> tuple[list[Answer], DraftCounts]:
    """What an engine answers, on rank 0, and what became of its drafts."""
    model = (knowing_model if knows else random_model)(rank, world, run)
    engine = Engine(model, options, wait_s=60)
    if rank:
        engine.follow()
        return [], engine.draft_counts
    found = answers_of(engine, asked, arrive)
    engine.pause()
    return found, engine.draft_counts
