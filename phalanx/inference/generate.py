"""Text from a checkpoint: next-token sampling on one process, with the whole window computed again for each token (no
cache yet)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from phalanx.base.errors import CheckpointError, ConfigError, Problem
from phalanx.checkpoint.hf import model_config_from_hf
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.load import load_weights
from phalanx.comm.mesh import Mesh, local_device
from phalanx.config.run import Run, TrainConfig
from phalanx.data.files import TOKENIZER_FILES
from phalanx.engine.build import build_for_inference
from phalanx.forecast.decide import make_plan
from phalanx.nn.module import Block
from phalanx.pipeline.execute import Stages, execute
from phalanx.planning.plan import Plan
from phalanx.sequence.batch import Batch
from phalanx.text.tokenizers import Tokenizer, load_tokenizer

SHOWN = 60  # characters of a prompt shown in a message
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder returns for bytes that are not a whole character


def weights_folder(path: str) -> Path:
    """The Hugging Face folder for a path: of a run (its newest checkpoint), of a checkpoint, or the path itself."""
    if (Path(path) / "config.json").exists():
        return Path(path)
    return find(path) / "weights"


def generate(path: str, prompt: str, tokens: int = 128, temperature: float = 0.8, seed: int = 0) -> str:
    """`prompt` continued by up to `tokens` tokens, or until the end-of-document token. temperature 0: always the
    likeliest token."""
    return prompt + "".join(TextStream(path, prompt, tokens, temperature, seed))


class TextStream:
    """The continuation of a prompt, piece by piece as tokens are generated. ConfigError if the prompt leaves no
    position for a token.

    notice   after the end: why it ended before `tokens`, if that needs an explanation; otherwise None
    """

    def __init__(self, path: str, prompt: str, tokens: int = 128, temperature: float = 0.8, seed: int = 0):
        folder = weights_folder(path)
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            raise CheckpointError(
                f"{folder} holds no tokenizer, so text cannot be made with it (data.tokenizer was not set in its run)"
            )
        self.tokenizer, self.tokens, self.temperature = load_tokenizer(str(folder)), tokens, temperature
        self.positions = model_config_from_hf(folder).max_position_embeddings
        self.ids = self.tokenizer.encode(prompt) or [self.tokenizer.eod or 0]
        if len(self.ids) >= self.positions:
            raise ConfigError([too_long(prompt, len(self.ids), self.positions)])
        self.plan, self.mesh, self.stages = load_for_inference(folder)
        self.dice = torch.Generator().manual_seed(seed)
        self.notice: str | None = None

    def __iter__(self) -> Iterator[str]:
        first, text = len(self.ids), Pieces(self.tokenizer)
        for count in range(self.tokens):
            if len(self.ids) == self.positions:
                room = (
                    f"the model has {self.positions} positions (max_position_embeddings), and the prompt "
                    f"takes {first} of them"
                )
                self.notice = f"stopped after {count} of {self.tokens} tokens: {room}"
                break
            self.ids.append(pick(next_logits(self.plan, self.mesh, self.stages, self.ids), self.temperature, self.dice))
            if self.ids[-1] == self.tokenizer.eod:
                break
            yield text.add(self.ids[-1])
        yield text.rest()


def too_long(prompt: str, tokens: int, positions: int) -> Problem:
    shown = prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]}..."
    rule = "must leave a position for the next token; give a shorter one"
    return Problem(
        "--prompt",
        shown,
        rule,
        {"tokens of the prompt": tokens, "model.max_position_embeddings": positions},
        (),
        "command line",
    )


class Pieces:
    """Text of tokens that arrive one by one. Incomplete characters are held back until all their bytes have arrived."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = ""

    def add(self, token: int) -> str:
        """The text that this token completes."""
        self._ids.append(token)
        return self._beyond(self._text().removesuffix(UNFINISHED))

    def rest(self) -> str:
        """What is left at the end."""
        return self._beyond(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)

    def _beyond(self, text: str) -> str:
        more = text.removeprefix(self._given) if text.startswith(self._given) else ""
        self._given += more
        return more


def load_for_inference(folder: Path) -> tuple[Plan, Mesh, Stages]:
    """The model of a Hugging Face folder on this process, in its own dtype on a GPU and in fp32 on a CPU."""
    model = model_config_from_hf(folder)
    gpu = torch.cuda.is_available()
    length = min(64, model.max_position_embeddings)
    train = TrainConfig(steps=1, global_batch=1, micro_batch=1, seq_length=length, precision="bf16" if gpu else "fp32")
    plan = make_plan(Run(model=model, train=train), 1)
    mesh = Mesh(plan.grid, 0, local_device("cuda" if gpu else "cpu", 0))
    buffers, stages = build_for_inference(plan, mesh)
    load_weights(folder, buffers, mesh)
    return plan, mesh, stages


@torch.no_grad()
def next_logits(plan: Plan, mesh: Mesh, stages: Stages, ids: list[int]) -> Tensor:
    """(vocab,) logits of the token after `ids`."""
    window = torch.tensor(ids, device=mesh.device)
    n = len(window)
    zeros = torch.zeros_like(window)
    batch = Batch(window, zeros, torch.arange(n, device=mesh.device), zeros, 1, n)
    stages.finish = lambda block, x, _: last_logits(block, x, n)
    stages.begin([batch], seed=None)
    execute([i for i in plan.programs(1, backward=False).lists[0] if type(i) in stages.handlers()], stages.handlers())
    stages.end()
    return stages.outputs[0][0]


def last_logits(block: Block, x: Tensor, n: int) -> Tensor:
    return block.logits(x, torch.tensor([n - 1], device=x.device))  # type: ignore[operator]


def pick(logits: Tensor, temperature: float, dice: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits.float().cpu() / temperature, -1), 1, generator=dice))
