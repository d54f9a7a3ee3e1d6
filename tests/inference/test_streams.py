"""Generation of models that read more than a text, against transformers' `generate` in float64 on the same weights:
encoder-decoders, and texts with images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build_for_inference
from phalanx.forecast.decide import make_plan
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import InferenceModel, run_of_model, without_data, without_training
from phalanx.inference.pictures import PictureReader
from phalanx.inference.request import Prompt, SamplingOptions
from phalanx.layout.config import LayoutConfig
from tests.harness.generation import answers_of, sequences_of
from tests.models import test_llava, test_qwen_vl, test_t5
from tests.models.test_models import load_weights

MADE = 6
GREEDY = SamplingOptions(tokens=MADE, temperature=0, logprobs=0)
ROOM = EngineOptions(sequences=3, tokens=16, page_size=4, memory_gib=0.001)
LAYOUTS = {"one rank": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


def run_of(model, layout: dict[str, int]) -> Run:
    run = without_data(run_of_model(model, None, gpu=False))
    return replace(run, layout=LayoutConfig(**layout), train=replace(run.train, precision="fp64"))


def answers_from(
    rank: int, world: int, run: Run, weights: dict[str, np.ndarray], prompts: Sequence, options: EngineOptions
) -> list[tuple[list[int], list[float]]]:
    """The engine's tokens and their log-probabilities, on these weights."""
    plan = make_plan(without_training(run, world), world)
    mesh = Mesh(plan.grid, rank)
    buffers, stages = build_for_inference(plan, mesh)
    load_weights(SimpleNamespace(buffers=buffers), weights)
    model = InferenceModel(plan, mesh, stages, stages.handlers(), pictures=PictureReader.of(run.model))
    engine = Engine(model, options, wait_s=60)
    if rank:
        engine.follow()
        return []
    pictures = run.model.pictures
    how = GREEDY if pictures is None else replace(GREEDY, bias=((pictures.token, -1e9),))
    found = answers_of(engine, [(prompt, how) for prompt in prompts], arrive=2)
    engine.pause()
    return [(tokens, [score.logprob for score in scores]) for tokens, scores, _, _ in found]


def check_answer(found: tuple[list[int], list[float]], made: list[int], whole: torch.Tensor) -> None:
    """made: by transformers' generate; whole: (answer, vocabulary) logits of its forward of all tokens at once."""
    tokens, logprobs = found
    assert made == tokens and whole.dtype == torch.float64
    wanted = torch.log_softmax(whole, -1).gather(1, torch.tensor(tokens)[:, None])
    np.testing.assert_allclose(logprobs, wanted[:, 0], rtol=0, atol=1e-10)


HOW = {"max_new_tokens": MADE, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
TEXTS = (5, 23, 1, 9, 14)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", list(test_t5.CASES)[:2])
def test_an_encoder_decoder_answers_as_transformers_does(ranks, case, layout):
    """More texts than rows, of unequal lengths, longer than pages and steps."""
    hf = test_t5.transformers_model(case)
    run = run_of(test_t5.CASES[case], LAYOUTS[layout])
    weights = {name: p.detach().numpy() for name, p in hf.named_parameters()}
    texts = sequences_of(TEXTS, run.model.vocab_size)
    world = max(1, *LAYOUTS[layout].values()) if LAYOUTS[layout] else 1
    found = ranks.run("tests.inference.test_streams:answers_from", world, run, weights, texts, ROOM)
    for text, answer in zip(texts, found[0], strict=True):
        asked = torch.tensor([text])
        # its cache has room for as many layers of the decoder as the encoder has
        made = hf.generate(asked, attention_mask=torch.ones_like(asked), use_cache=False, **HOW)
        with torch.no_grad():
            whole = hf(input_ids=asked, decoder_input_ids=made[:, :-1]).logits[0]
        check_answer(answer, made[0, 1:].tolist(), whole)


# ---- images

PICTURED = {
    "llava": (test_llava, test_llava.CLIP),
    "llava, SigLIP": (test_llava, test_llava.SIGLIP),
    "qwen2_5_vl": (test_qwen_vl, test_qwen_vl.CASES["qwen2_5_vl"]),
    "qwen3_vl": (test_qwen_vl, test_qwen_vl.CASES["qwen3_vl"]),
}
SIZES = ((8, 12), (8, 8), (16, 8), (12, 12), (8, 12))


def png(number: int, height: int, width: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def pictured_prompts(reader: PictureReader, vocab: int) -> list[Prompt]:
    """Texts with an image amid, with two, with none, and with one near the end. The last has the tokens
    of the first, and another image."""
    images = [reader.image(png(n, *size), f"{n}.png") for n, size in enumerate(SIZES)]
    token = reader.spec.token
    texts = [[token - 1 if t == token else t for t in row] for row in sequences_of((9, 23, 6, 3), vocab)]
    return [
        reader.prompt([*texts[0][:5], token, *texts[0][5:]], [images[0]]),
        Prompt(tuple(texts[1])),
        reader.prompt([texts[2][0], token, texts[2][1], token, *texts[2][2:]], images[1:3]),
        reader.prompt([*texts[3][:2], token, texts[3][2]], [images[3]]),
        reader.prompt([*texts[0][:5], token, *texts[0][5:]], [images[4]]),
    ]


def inputs_of(reader: PictureReader, prompt: Prompt) -> dict:
    """What transformers is given: patches in the order of reading, without windows, or whole images."""
    tokens = torch.tensor([prompt.tokens])
    found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    pixels = [reader._pixels(image.data, image.name) for image in prompt.images]
    if not reader.spec.grid_positions:
        return found | ({"pixel_values": torch.from_numpy(np.stack(pixels)).double()} if pixels else {})
    found["mm_token_type_ids"] = (tokens == reader.spec.token).int()
    if pixels:
        form = replace(reader.spec.form, window=None)
        rows = np.concatenate([form.units(each).values for each in pixels])
        grids = [[1, *(side // form.size for side in image.size)] for image in prompt.images]
        found |= {"pixel_values": torch.from_numpy(rows).double(), "image_grid_thw": torch.tensor(grids)}
    return found


def truth_of(name: str) -> tuple[dict[str, np.ndarray], list[Prompt], list]:
    """Weights, prompts, and what transformers makes of these."""
    module, model = PICTURED[name]
    reader = PictureReader.of(model)
    assert reader is not None
    case = next(case for case, each in module.CASES.items() if each is model)
    llava = module is test_llava
    with test_qwen_vl.wide():
        hf = module.transformers_model(model if llava else case)
        named = module.saved_names(hf) if llava else module.saved_names(case, hf)
        prompts = pictured_prompts(reader, model.vocab_size)
        with torch.no_grad():
            made = [continued(hf, reader, prompt) for prompt in prompts]
    return {n: p.detach().numpy() for n, p in named.items()}, prompts, made


def continued(hf, reader: PictureReader, prompt: Prompt) -> tuple[list[int], torch.Tensor]:
    """Greedily, without image tokens: the answer, and the logits of all at once that it was drawn from."""
    made = hf.generate(**inputs_of(reader, prompt), **HOW, suppress_tokens=[reader.spec.token])[0].tolist()
    logits = hf(**inputs_of(reader, replace(prompt, tokens=tuple(made[:-1])))).logits[0]
    return made[len(prompt.tokens) :], logits[len(prompt.tokens) - 1 :]


@pytest.mark.parametrize("layout", [*LAYOUTS, "cp2", "tp2 pp2"])
@pytest.mark.parametrize("name", PICTURED)
def test_texts_with_images_go_on_as_those_of_transformers(ranks, name, layout):
    weights, prompts, made = truth_of(name)
    split = {**LAYOUTS, "cp2": {"cp": 2}, "tp2 pp2": {"tp": 2, "pp": 2}}[layout]
    world = int(np.prod(list(split.values()) or [1]))
    run = run_of(PICTURED[name][1], split)
    found = ranks.run("tests.inference.test_streams:answers_from", world, run, weights, prompts, ROOM)[0]
    for answer, each in zip(found, made, strict=True):
        check_answer(answer, *each)
    assert prompts[0].tokens == prompts[4].tokens and found[0] != found[4]
