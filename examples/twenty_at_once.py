"""20 requests at once, against the plain loop: one text after another, of which everything is computed anew for each
token. Prints both in tokens/s.

    python examples/twenty_at_once.py runs/first --tokens 64
"""

from __future__ import annotations

import argparse
import time

import torch

from phalanx.inference.engine import EngineOptions
from phalanx.inference.generate import TextEngine, TextSampler
from phalanx.inference.load import InferenceModel
from phalanx.inference.request import SamplingOptions
from phalanx.sequence.batch import IGNORE, Batch

PROMPTS = [f"{number} green bottles, hanging on the wall, and if" for number in range(1, 21)]
PLAIN = 2  # texts by the plain loop: enough to time it


def plain_loop(model: InferenceModel, ids: list[int], tokens: int) -> list[int]:
    """The likeliest tokens, one by one, each by a forward of the whole text."""

    def last_logits(block, x, batch):
        return block.logits(x, torch.tensor([batch.num_tokens - 1]))

    model.stages.finish = last_logits
    for _ in range(tokens):
        row = torch.tensor(ids)
        batch = Batch(row, torch.full_like(row, IGNORE), torch.arange(len(ids)), torch.zeros_like(row), 1, len(ids))
        model.stages.begin([batch], seed=None)
        for instruction in model.program(1):
            model.handlers[type(instruction)](instruction)
        model.stages.end()
        ids = [*ids, int(model.stages.outputs[0].argmax())]
    return ids


def at_once(maker: TextEngine, tokens: int) -> list[tuple[int, ...]]:
    how = SamplingOptions(tokens=tokens, temperature=0)
    answers = maker.generate(PROMPTS, how)
    return [answer.tokens for answer in sorted(answers, key=lambda answer: answer.prompt)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="a run, a checkpoint or a Hugging Face folder")
    parser.add_argument("--tokens", type=int, default=64, help="that each text gets")
    given = parser.parse_args()
    with TextSampler(given.checkpoint, EngineOptions(sequences=len(PROMPTS), tokens=1024)) as maker:
        maker.ends = ()  # all texts are equally long
        at_once(maker, 2)  # what is loaded at first use
        began = time.perf_counter()
        texts = at_once(maker, given.tokens)
        together = len(PROMPTS) * given.tokens / (time.perf_counter() - began)
        began = time.perf_counter()
        plain = [
            plain_loop(maker.engine.model, list(maker.ready(prompt).tokens), given.tokens) for prompt in PROMPTS[:PLAIN]
        ]
        alone = PLAIN * given.tokens / (time.perf_counter() - began)
    same = all(tuple(ids[-given.tokens :]) == text for ids, text in zip(plain, texts))
    print(f"the plain loop: {alone:.0f} tokens/s; {len(PROMPTS)} requests at once: {together:.0f} tokens/s")
    print(f"{together / alone:.1f} times as fast; the same texts: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
