"""Text from a checkpoint: next-token sampling with the whole window run again for each token (no cache yet), on one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from phalanx.base.batch import Batch
from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.hf import model_config_from_hf
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.load import load_weights
from phalanx.comm.mesh import Mesh, local_device
from phalanx.data.files import TOKENIZER_FILES
from phalanx.data.tokenizers import load_tokenizer
from phalanx.nn.module import Block
from phalanx.pipeline.execute import Stages, execute
from phalanx.train.build import build_for_inference
from phalanx.train.config import Run, TrainConfig
from phalanx.train.plan import Plan, make_plan


def weights_folder(path: str) -> Path:
    """The Hugging Face folder meant by a path: a run (its newest checkpoint), a checkpoint, or such a folder itself."""
    if (Path(path) / "config.json").exists():
        return Path(path)
    return find(path) / "weights"


def generate(path: str, prompt: str, tokens: int = 128, temperature: float = 0.8, seed: int = 0) -> str:
    """`prompt` continued by up to `tokens` tokens, ended early by the end-of-document token. temperature 0: the likeliest token."""
    folder = weights_folder(path)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise CheckpointError(f"{folder} holds no tokenizer, so text cannot be made with it (data.tokenizer was not set in its run)")
    tokenizer = load_tokenizer(str(folder))
    plan, mesh, stages = load_for_inference(folder)
    ids = tokenizer.encode(prompt) or [tokenizer.eod or 0]
    first = len(ids)
    dice = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        ids.append(pick(next_logits(plan, mesh, stages, ids), temperature, dice))
        if ids[-1] == tokenizer.eod:
            break
    return prompt + tokenizer.decode(ids[first:], skip_special_tokens=True)


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
    """(vocab,) logits of the token after `ids`, of which the model sees as many as it has positions for."""
    window = torch.tensor(ids[-plan.run.model.max_position_embeddings :], device=mesh.device)
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
