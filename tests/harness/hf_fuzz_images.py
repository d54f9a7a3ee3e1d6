"""Random config.json files of the families that read images, as in tests.harness.hf_fuzz: a key of the text's, the
tower's or the outer part is deleted, changed or added; then the logits of a text with two images equal those of
transformers in float64, or the folder is refused.

    python -m tests.harness.hf_fuzz_images 1000 [first seed]
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.base.errors import CheckpointError, ConfigError
from phalanx.checkpoint.hf import read_folder, to_hf
from phalanx.checkpoint.load import load_weights
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.engine.build import build_for_inference
from phalanx.forecast.decide import make_plan
from phalanx.models.check import check
from phalanx.pipeline.execute import execute
from phalanx.sequence.batch import Batch
from phalanx.sequence.patches import PictureSpec, grid_positions
from phalanx.sequence.sample import UnitRoom, Units
from phalanx.sequence.units import unit_batch
from tests.harness import hf_fuzz
from tests.harness.parity import MODELS
from tests.harness.pictures import pixels_of

ROOM = 400  # patches of two images, at most
PARTS = ("", "text_config", "vision_config")
OUTER: dict[str, tuple[Any, ...]] = {
    "image_token_index": (12, 500, -1),
    "image_token_id": (12, 500, -1),
    "boi_token_index": (13, 500),
    "mm_tokens_per_image": (1, 4, 9, 5, 0),
    "vision_feature_layer": (-1, -2, 0, 1, [-1], [-2, -1], -9, 9),
    "vision_feature_select_strategy": ("default", "full", "cls"),
    "projector_hidden_act": ("gelu", "relu"),
    "multimodal_projector_bias": (True, False),
    "tie_word_embeddings": (True, False),
    "image_seq_length": (9, 4),
    "text_config": (None,),
    "vision_config": (None,),
}
TOWER: dict[str, tuple[Any, ...]] = {
    "model_type": ("siglip_vision_model", "clip_vision_model", "pixtral"),
    "hidden_size": (24, 32, 10),
    "intermediate_size": (12, 31),
    "num_hidden_layers": (1, 3),
    "depth": (1, 3),
    "num_attention_heads": (1, 4, 3),
    "num_heads": (1, 4, 3),
    "image_size": (6, 8, 9, 13),
    "patch_size": (1, 2, 4, 20),
    "num_channels": (1, 3),
    "in_channels": (1, 3),
    "in_chans": (3, 4),
    "hidden_act": ("quick_gelu", "gelu", "gelu_pytorch_tanh", "silu", "relu"),
    "layer_norm_eps": (1e-3, 0.1, 0),
    "attention_dropout": (0.0, 0.1),
    "vision_use_head": (True, False),
    "projection_dim": (8,),
    "spatial_merge_size": (1, 2, 4),
    "temporal_patch_size": (1, 2),
    "out_hidden_size": (16, 40),
    "window_size": (4, 8, 16, 6),
    "fullatt_block_indexes": ([], [0], [1], [0, 1], [5], [1, 0]),
    "deepstack_visual_indexes": ([], [0], [1], [0, 1], [5], [1, 0]),
    "num_position_embeddings": (4, 9, 16, 10),
    "rope_parameters": (None, {"rope_type": "axial", "rope_theta": 100.0}, {"rope_theta": 10000.0}),
    "tokens_per_second": (2, 4),
    "initializer_range": (0.1,),
}
TEXT: dict[str, tuple[Any, ...]] = {
    **hf_fuzz.POOL,
    "mrope_section": ([2, 1, 1],),
    "model_type": ("llama", "qwen2", "mistral", "qwen3"),
    "rope_scaling": (
        *hf_fuzz.ROPES,
        *({"type": kind, "mrope_section": s} for kind in ("mrope", "default") for s in ([2, 2, 2], [3, 2, 1], [1, 1])),
    ),
}
REASONS = {
    "a tower of other channels, dropout or activation": r"vision_config: (\w+)=",
    "layers of a tower that are not numbered in order": r"must be ascending numbers of layers",
    "a head of the tower's that does not fit": r"must give heads of a multiple of 4",
    "positions that are no square": r"must be a square number",
    "sections of positions": r"mrope_section|must be three numbers",
    "scaled angles beside positions by rows and columns": r"is not built beside positions by rows",
    "a token beyond the vocabulary": r"must be a token of the vocabulary",
    "features of several layers of a tower": r"vision_feature_layer=",
    "another projector, or other features": r"(projector_hidden_act|vision_feature_select_strategy)=",
    "another text or tower": r"model_type=|must be siglip|is SigLIP's",
    "a size of the tower that is missing": r"vision_config: \w+ is missing",
    "a part that is missing": r"(text_config|vision_config)(=| is missing)",
    "no such layer of the tower": r"must be a layer of the tower",
    "more features between layers than the text has": r"must be no more than the text has layers",
    **hf_fuzz.REASONS,
}


@cache
def base(family: str) -> dict[str, Any]:
    """config.json as transformers saves it, every key of every part."""
    import transformers

    keys = to_hf(MODELS[family], torch.float64)
    kind = getattr(transformers, keys["architectures"][0].replace("ForConditionalGeneration", "Config"))
    found: dict[str, Any] = json.loads(json.dumps(kind(**keys).to_dict(), default=str))
    return {k: v for k, v in found.items() if k not in ("transformers_version", "_name_or_path")}


def mutate(config: dict[str, Any], dice: random.Random) -> list[str]:
    """Change one or two keys of its parts; what was done, in words."""
    done = []
    for _ in range(dice.choices((1, 2), (7, 3))[0]):
        part = dice.choices(PARTS, (2, 4, 4))[0]
        at = config[part] if part and isinstance(config.get(part), dict) else config
        pool = {"text_config": TEXT, "vision_config": TOWER}.get(part, OUTER)
        key = dice.choice(sorted(at)) if dice.random() < 0.6 else dice.choice(sorted(pool))
        if key == "model_type" and at is config:
            continue
        if key in at and dice.random() < 0.25:
            del at[key]
            done.append(f"del {part}.{key}")
            continue
        values = pool[key] if key in pool and dice.random() < 0.85 else hf_fuzz.ANY
        at[key] = deepcopy(dice.choice(values))
        done.append(f"{part}.{key}={at[key]!r}")
    return done


@contextmanager
def wide() -> Iterator[None]:
    """`wide_towers` for the families with images."""
    from transformers import AutoConfig

    with torch.device("meta"):
        for family in hf_fuzz.PICTURED:
            hf_fuzz.auto_class(family).from_config(AutoConfig.for_model(**base(family)))
    with wide_towers():
        yield


@contextmanager
def wide_towers() -> Iterator[None]:
    """hf_fuzz.wide for the modules that are imported already, and for what towers share."""
    from transformers import vision_utils

    before = vision_utils.torch
    with hf_fuzz.wide():
        vision_utils.torch = hf_fuzz._Wide()
        try:
            yield
        finally:
            vision_utils.torch = before


def images_for(config: Any) -> list[np.ndarray]:
    """Two images of sizes that a tower reads, as transformers understands its config."""
    vision = config.vision_config
    if config.model_type in ("llava", "gemma3"):
        sizes = [(vision.image_size, vision.image_size)] * 2
    else:
        unit = vision.patch_size * vision.spatial_merge_size
        sizes = [(2 * unit, 3 * unit), (unit, 2 * unit)]
    if any(h * w > 10_000 for h, w in sizes):
        raise ValueError("images too large to be tried")
    return [pixels_of(number, *size) for number, size in enumerate(sizes)]


def tokens_for(config: Any, images: list[np.ndarray]) -> torch.Tensor:
    """(tokens,) of a text with so many tokens for each image as its published processors write."""
    token = getattr(config, "image_token_id", None) or config.image_token_index
    found = [3, 5]
    for image in images:
        if config.model_type == "llava":
            kind, side = config.vision_config.model_type, image.shape[1] // config.vision_config.patch_size
            classed = kind == "clip_vision_model"
            count = side**2 + classed - (config.vision_feature_select_strategy == "default")
        elif config.model_type == "gemma3":
            count = config.mm_tokens_per_image
        else:
            unit = config.vision_config.patch_size * config.vision_config.spatial_merge_size
            count = image.shape[1] // unit * (image.shape[2] // unit)
        found += [*[token] * count, 6, 8]
    if len(found) > ROOM:
        raise ValueError("too many tokens to be tried")
    return torch.tensor([*found, 9, 2])


def patches_for(vision: Any, images: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches as Qwen's published processor orders them (squares in the order of reading), and their grids."""
    size, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    rows, grids = [], []
    for image in images:
        channels, height, width = image.shape
        down, across = height // size, width // size
        cut = image.reshape(channels, down // merge, merge, size, across // merge, merge, size)
        cut = cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(down * across, channels, 1, size * size)
        rows.append(np.repeat(cut, frames, 2).reshape(down * across, -1))
        grids.append([1, down, across])
    return torch.from_numpy(np.concatenate(rows)).double(), torch.tensor(grids)


def their_logits(folder: Path) -> tuple[torch.Tensor, list[np.ndarray], torch.Tensor] | str:
    """(tokens, vocab), the images and the text; or why there are none."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
        made_by = hf_fuzz.auto_class(config.model_type)
        with torch.device("meta"):
            if sum(p.numel() for p in made_by.from_config(config).parameters()) > hf_fuzz.LARGEST:
                return "too large to be tried"
        how: Any = dict(attn_implementation="eager", experts_implementation="eager", output_loading_info=True)
        model, info = made_by.from_pretrained(folder, dtype=torch.float64, **how)
        if info["missing_keys"]:
            return f"random weights for {sorted(info['missing_keys'])[0]}"
        images = images_for(config)
        tokens = tokens_for(config, images)
        inputs: dict[str, Any] = {"input_ids": tokens[None]}
        marked = (tokens == (getattr(config, "image_token_id", None) or config.image_token_index))[None].long()
        if config.model_type in ("llava", "gemma3"):
            inputs["pixel_values"] = torch.from_numpy(np.stack(images)).double()
            inputs |= {"token_type_ids": marked} if config.model_type == "gemma3" else {}
        else:
            patches, grids = patches_for(config.vision_config, images)
            inputs |= {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": marked.int()}
        out = model.eval()(**inputs, use_cache=False, return_dict=True).logits[0]
    except Exception as error:  # whatever a config does to it: that is what is tried
        return f"{type(error).__name__}: {error}"
    return (out.detach(), images, tokens) if out.isfinite().all() else "not finite"


def our_logits(folder: Path, given: tuple[list[np.ndarray], torch.Tensor] | None) -> torch.Tensor:
    """The same of ours, on one process. PhalanxError: refused. Without images: no more than that it is read."""
    model = read_folder(folder, None).model
    length = hf_fuzz.SEQ if given is None else len(given[1])
    problems = check(model, tp=1, seq_length=length)
    if problems:
        raise ConfigError(problems)
    spec = model.media
    if not isinstance(spec, PictureSpec):
        raise TypeError(f"{model.family} reads no images")
    train = TrainConfig(steps=1, global_batch=1, micro_batch=1, seq_length=length, precision="fp64")
    room = {stream.name: stream.largest for stream in model.needs_room}
    plan = make_plan(Run(model=model, train=train, data=DataConfig(mock=True, room=room)), 1)
    mesh = Mesh(plan.grid, 0)
    buffers, stages = build_for_inference(plan, mesh)
    load_weights(folder, buffers, mesh)
    if given is None:
        return torch.empty(0)
    batch = batch_of(*given, spec)
    if batch.tokens.max() >= model.vocab_size:
        raise CheckpointError("must be <= vocab_size")
    stages.finish = lambda head, x, _: head.logits(x, torch.arange(batch.num_tokens))
    stages.begin([batch], seed=None)
    with torch.no_grad():
        program = plan.proved_program(1, backward=False).lists[0]
        execute([i for i in program if type(i) in stages.handlers()], stages.handlers())
    stages.end()
    return stages.outputs[0]


def batch_of(images: list[np.ndarray], tokens: torch.Tensor, spec: PictureSpec) -> Batch:
    units = Units.together([spec.form.units(image) for image in images], spec.form.stream)
    zeros, length = torch.zeros_like(tokens), len(tokens)
    stream = unit_batch([units], [0], UnitRoom(spec.form.stream, 10 * ROOM, "data.room.patches"))
    own = grid_positions(tokens.numpy(), [(0, length)], units, spec) if spec.grid_positions else None
    return Batch(
        tokens,
        zeros,
        torch.arange(length),
        zeros,
        1,
        length,
        beside={spec.form.stream.name: stream},
        coordinates=None if own is None else torch.from_numpy(own),
    )


def trial(seed: int, folder: Path) -> tuple[str, list[str], hf_fuzz.Outcome]:
    """(family, what was changed, what came of it)."""
    dice = random.Random(seed)
    family = hf_fuzz.PICTURED[seed % len(hf_fuzz.PICTURED)]
    config = deepcopy(base(family))
    done = mutate(config, dice)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if dice.random() < 0.25 or not hf_fuzz.write_weights(config, folder, seed):
        done.append("weights of the unchanged config")
        if not hf_fuzz.write_weights(base(family), folder, seed):
            raise RuntimeError(f"transformers refuses its own config of {family}")
    (folder / "config.json").write_text(json.dumps(config))
    return family, done, outcome(folder)


def outcome(folder: Path) -> hf_fuzz.Outcome:
    with wide():
        theirs = their_logits(folder)
    given = None if isinstance(theirs, str) else theirs[1:]
    return hf_fuzz.compared(
        theirs if isinstance(theirs, str) else theirs[0], lambda: our_logits(folder, given), REASONS
    )


def main(count: int, first: int = 0) -> None:
    torch.set_num_threads(1)
    counts, reasons, _ = hf_fuzz.soak(count, first, trial)
    hf_fuzz.report(counts, reasons)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
