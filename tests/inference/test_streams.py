"""Generation of models that read more than a text, against transformers' `generate` in float64 on the same weights:
encoder-decoders, and texts with images."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from phalanx.base.errors import ConfigError, DataError
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build_for_inference
from phalanx.forecast.decide import make_plan
from phalanx.inference.adapters import with_adapter
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.generate import read_prompts, shown_prompt
from phalanx.inference.load import InferenceModel, run_of_model, without_data, without_training
from phalanx.inference.memory import kept_by, layer_groups, remembering
from phalanx.inference.pictures import PictureReader
from phalanx.inference.recordings import SoundReader, SpeechPrompts, SpeechRules
from phalanx.inference.request import Finished, NewToken, Prompt, PromptSound, RequestError, SamplingOptions
from phalanx.inference.streams import encoder_batch
from phalanx.layout.config import LayoutConfig
from phalanx.models.whisper import WhisperConfig
from phalanx.sequence.frames import FRAMES
from phalanx.text.tokenizers import load_tokenizer
from tests.harness.chat_model import chat_folder
from tests.harness.generation import answers_of, random_model, sequences_of
from tests.models import test_gemma3, test_llava, test_qwen_vl, test_t5, test_whisper
from tests.models.test_models import load_weights

MADE = 6
GREEDY = SamplingOptions(tokens=MADE, temperature=0, logprobs=0)
ROOM = EngineOptions(sequences=3, tokens=16, page_size=4, memory_gib=0.001)
LAYOUTS = {"one rank": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


def sampled(cases: Iterable[tuple[str, str]], often: Collection[tuple[str, str]]) -> list:
    """Those that are not run often are for `make soak`."""
    return [pytest.param(*case, marks=[] if case in often else pytest.mark.soak) for case in cases]


def run_of(model, layout: dict[str, int]) -> Run:
    run = without_data(run_of_model(model, None, gpu=False))
    return replace(run, layout=LayoutConfig(**layout), train=replace(run.train, precision="fp64"))


def answers_from(
    rank: int,
    world: int,
    run: Run,
    weights: dict[str, np.ndarray],
    prompts: Sequence,
    options: EngineOptions,
    how: SamplingOptions | None = None,
) -> list[tuple[list[int], list[float]]]:
    """The engine's tokens and their log-probabilities, on these weights."""
    plan = make_plan(without_training(run, world), world)
    mesh = Mesh(plan.grid, rank)
    buffers, stages = build_for_inference(plan, mesh)
    load_weights(SimpleNamespace(buffers=buffers), weights)
    readers = {"pictures": PictureReader.of(run.model), "sound": SoundReader.of(run.model)}
    model = InferenceModel(plan, mesh, stages, stages.handlers(), **readers)
    engine = Engine(model, options, wait_s=60)
    if rank:
        engine.follow()
        return []
    pictures = run.model.media
    if how is None:
        how = GREEDY if pictures is None or pictures.token is None else replace(GREEDY, bias=((pictures.token, -1e9),))
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
DEEPER, TIED = list(test_t5.CASES)[:2]
OTHER_BANDS = list(test_whisper.CASES)[1]
SPOKEN = {**LAYOUTS, "tp2 pp2": {"tp": 2, "pp": 2}}
ENCODED = [(DEEPER, "one rank"), (DEEPER, "tp2"), (TIED, "pp2")]


@pytest.mark.parametrize("case, layout", sampled(product((DEEPER, TIED), LAYOUTS), ENCODED))
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


# ---- recordings

SAID = (("de", "translate"), ("en", None), ("en", "transcribe"), ("de", "translate"), ("de", None))  # by recording
HEARD = [(test_whisper.FIRST, "one rank"), (test_whisper.FIRST, "tp2"), (OTHER_BANDS, "pp2")]


def wav(number: int, seconds: float, rate: int = 16_000) -> bytes:
    file = BytesIO()
    sound = np.random.default_rng(number).normal(size=round(seconds * rate)) * 0.1
    soundfile.write(file, sound.astype(np.float32), rate, format="wav")
    return file.getvalue()


def recordings_of(reader: SoundReader) -> list[PromptSound]:
    """More than rows, of unequal lengths."""
    seconds = reader.recordings.steps.seconds
    files = [wav(number, seconds * part) for number, part in enumerate((1, 0.3, 0.7, 1, 0.5))]
    return [reader.recording(data, f"{number}.wav") for number, data in enumerate(files)]


def frames_of(reader: SoundReader, sound: PromptSound) -> torch.Tensor:
    """(1, bands, frames), as transformers takes them."""
    rows = torch.from_numpy(reader.values(sound.data, sound.name))
    return rows.unflatten(1, (FRAMES, -1))[:, 2:4].flatten(0, 1).t()[None].double()


def speaking(model: WhisperConfig):
    """transformers' model, with tokens for languages and tasks."""
    hf = test_whisper.transformers_model(model)
    config = hf.generation_config
    config.lang_to_id, config.task_to_id = {"<|en|>": 7, "<|de|>": 8}, {"transcribe": 9, "translate": 10}
    config.no_timestamps_token_id, config.is_multilingual = 13, True
    config.eos_token_id, config.pad_token_id = model.vocab_size - 1, 0
    return hf


def said_by(hf, frames: torch.Tensor, language: str, task: str | None) -> list[int]:
    """Greedily, with the tokens that it begins by."""
    how = {"max_new_tokens": MADE, "return_timestamps": False, "use_cache": False, "return_dict_in_generate": True}
    found = hf.generate(frames, language=language, task=task, **how)
    return found.sequences[0].tolist()


@pytest.mark.parametrize("case, layout", sampled(product(test_whisper.CASES, SPOKEN), HEARD))
def test_a_recording_is_answered_as_by_transformers(ranks, tmp_path, case, layout):
    """With tokens that are never made, and one that is not the first. The first and the fourth text begin alike."""
    model = test_whisper.CASES[case]
    hf, reader = speaking(model), SoundReader.of(model)
    assert reader is not None
    sounds = recordings_of(reader)
    first, second = said_by(hf, frames_of(reader, sounds[0]), *SAID[0])[-MADE:][:2]
    hf.generation_config.begin_suppress_tokens, hf.generation_config.suppress_tokens = [first], [second, 50]
    hf.generation_config.save_pretrained(tmp_path)
    rules = SpeechRules.of(tmp_path)
    prompts = [Prompt(rules.begins(model.decoder_start_token_id, *how), sound=s) for how, s in zip(SAID, sounds)]
    made = []
    for prompt, how in zip(prompts, SAID):
        frames, count = frames_of(reader, prompt.sound), len(prompt.tokens)
        found = said_by(hf, frames, *how)
        assert tuple(found[:count]) == prompt.tokens
        with torch.no_grad():
            whole = hf(input_features=frames, decoder_input_ids=torch.tensor([found[:-1]])).logits[0]
        made.append((found[count:], whole[count - 1 :]))
    run = run_of(model, SPOKEN[layout])
    weights = {name: p.detach().numpy() for name, p in hf.named_parameters()}
    world = int(np.prod(list(SPOKEN[layout].values()) or [1]))
    never = tuple((token, -math.inf) for token in rules.never)
    options = replace(GREEDY, bias=never, not_first=rules.not_first)
    found = ranks.run("tests.inference.test_streams:answers_from", world, run, weights, prompts, ROOM, options)[0]
    for answer, each in zip(found, made, strict=True):
        check_answer(answer, *each)
    assert found[0] != found[3] and first != found[0][0][0] and second not in found[0][0]


def test_texts_begin_as_those_of_transformers(tmp_path):
    """Models of one language, and with tokens that are forced in old files; what cannot begin says what can."""
    model = test_whisper.CASES[test_whisper.FIRST]
    hf, reader = test_whisper.transformers_model(model), SoundReader.of(model)
    frames, config = frames_of(reader, recordings_of(reader)[0]), hf.generation_config
    config.no_timestamps_token_id, config.eos_token_id, config.pad_token_id = 13, model.vocab_size - 1, 0
    for forced in (None, [[1, 7], [2, 9]], [[1, 7], [2, 9], [3, 13]]):
        config.forced_decoder_ids = forced
        config.save_pretrained(tmp_path)
        found = hf.generate(frames, max_new_tokens=1, return_dict_in_generate=True, use_cache=False).sequences[0]
        begins = SpeechRules.of(tmp_path).begins(model.decoder_start_token_id)
        assert tuple(found[:-1].tolist()) == begins
    with pytest.raises(DataError, match="has no tokens for languages and tasks"):
        SpeechRules.of(tmp_path).begins(3, "en")
    speaking(model).generation_config.save_pretrained(tmp_path)
    rules = SpeechRules.of(tmp_path)
    for asked, said in (
        ((None,), 'needs its language: "chat_template_kwargs".*de, en'),
        (("fr",), "language 'fr' is none that the model says: de, en"),
        (("en", "sing"), "task 'sing' is none that the model has: transcribe, translate"),
    ):
        with pytest.raises(DataError, match=said):
            rules.begins(3, *asked)


BEGINS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{{ language or 'en' }} "
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
)


def test_a_template_writes_how_a_text_begins_as_in_training(tmp_path):
    folder = chat_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(BEGINS)
    model, tokenizer = test_whisper.CASES[test_whisper.FIRST], load_tokenizer(str(folder))
    reader = SoundReader.of(model)
    assert reader is not None
    (folder / "a.wav").write_bytes(wav(1, reader.recordings.steps.seconds))
    (folder / "p.jsonl").write_text(
        '{"audio": "a.wav", "chat_template_kwargs": {"language": "de"}}\n{"audio": "../b"}\n'
    )
    heard, outside = read_prompts(str(folder / "p.jsonl"))
    sampler = SimpleNamespace(speech=SpeechPrompts.of(folder, tokenizer, reader))
    prompt = heard.prompt(sampler)
    assert prompt.tokens == (model.decoder_start_token_id, *tokenizer.encode_with_special("<|im_start|>de "))
    assert prompt.sound.rows == reader.rows and shown_prompt(heard) == {"audio": "a.wav"}
    with pytest.raises(DataError, match="p.jsonl, line 2: .*must be a path below"):
        outside.prompt(sampler)
    with pytest.raises(DataError, match="audio=.*is not heard by this model"):
        heard.prompt(SimpleNamespace(speech=None))


# ---- images

PICTURED = {
    "llava": (test_llava, test_llava.CLIP),
    "llava, SigLIP": (test_llava, test_llava.SIGLIP),
    "qwen2_5_vl": (test_qwen_vl, test_qwen_vl.CASES["qwen2_5_vl"]),
    "qwen3_vl": (test_qwen_vl, test_qwen_vl.CASES["qwen3_vl"]),
    "qwen3_5": (test_qwen_vl, test_qwen_vl.CASES["qwen3_5"]),
    "qwen3_5_moe": (test_qwen_vl, test_qwen_vl.CASES["qwen3_5_moe"]),
    "gemma3": (test_gemma3, test_gemma3.CASES[test_gemma3.FIRST]),
}
SPLIT = {**LAYOUTS, "cp2": {"cp": 2}, "tp2 pp2": {"tp": 2, "pp": 2}}
SHOWN = [
    ("llava", "tp2"),
    ("llava, SigLIP", "one rank"),
    ("qwen2_5_vl", "one rank"),
    ("qwen2_5_vl", "cp2"),
    ("qwen3_vl", "one rank"),
    ("qwen3_vl", "pp2"),
    ("qwen3_5", "one rank"),
    ("qwen3_5", "tp2"),
    ("gemma3", "one rank"),
    ("gemma3", "cp2"),
]
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
    if reader.spec.together:  # which read each other: not those that are made
        found["token_type_ids"] = (tokens == reader.spec.token).long()
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
    llava = module is not test_qwen_vl
    with test_qwen_vl.wide():
        hf = module.transformers_model(model if llava else case)
        named = module.saved_names(hf) if llava else module.saved_names(case, hf)
        prompts = pictured_prompts(reader, model.vocab_size)
        with torch.no_grad():
            made = [continued(hf, reader, prompt) for prompt in prompts]
    weights = test_qwen_vl.expert_by_expert({n: p.detach().numpy() for n, p in named.items()})
    return weights, prompts, made


def continued(hf, reader: PictureReader, prompt: Prompt) -> tuple[list[int], torch.Tensor]:
    """Greedily, without image tokens: the answer, and the logits of all at once that it was drawn from."""
    made = hf.generate(**inputs_of(reader, prompt), **HOW, suppress_tokens=[reader.spec.token])[0].tolist()
    logits = hf(**inputs_of(reader, replace(prompt, tokens=tuple(made[:-1])))).logits[0]
    return made[len(prompt.tokens) :], logits[len(prompt.tokens) - 1 :]


@pytest.mark.parametrize("name, layout", sampled(product(PICTURED, SPLIT), SHOWN))
def test_texts_with_images_go_on_as_those_of_transformers(ranks, name, layout):
    weights, prompts, made = truth_of(name)
    split = SPLIT[layout]
    world = int(np.prod(list(split.values()) or [1]))
    run = run_of(PICTURED[name][1], split)
    found = ranks.run("tests.inference.test_streams:answers_from", world, run, weights, prompts, ROOM)[0]
    for answer, each in zip(found, made, strict=True):
        check_answer(answer, *each)
    assert prompts[0].tokens == prompts[4].tokens and found[0] != found[4]


# ---- one request beside others


def engine_of(name: str, options: EngineOptions) -> Engine:
    """On this process, with random weights."""
    model = test_t5.CASES[name] if name in test_t5.CASES else PICTURED[name][1]
    run = run_of(model, {})
    return Engine(random_model(0, 1, run), options)


def asked_in_turn(engine: Engine, prompts: Sequence) -> list[tuple[list[float], int]]:
    """Of each prompt, after the one before it is over: the log-probabilities of its answer, and how many of its tokens
    were in memory."""
    found = []
    for prompt in prompts:
        engine.submit(prompt, GREEDY)
        events = [event for _ in iter(lambda: engine.idle, True) for event in engine.step()]
        over = [event for event in events if isinstance(event, Finished)]
        found.append(([event.score.logprob for event in events if isinstance(event, NewToken)], over[0].cached))
    return found


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_pages_of_one_image_are_never_read_for_another(name):
    """The first and the last prompt have the same tokens. What comes before the image is shared, and everything with
    the same image; a page that ends amid an image is computed anew with it."""
    reader = PictureReader.of(PICTURED[name][1])
    prompts = pictured_prompts(reader, PICTURED[name][1].vocab_size)
    one, other = prompts[0], prompts[4]
    options = EngineOptions(sequences=2, tokens=32, page_size=2, memory_gib=0.01)
    engine = engine_of(name, options)
    (first, none), (second, before), (again, all_of_it) = asked_in_turn(engine, [one, other, one])
    assert first == pytest.approx(again, abs=1e-10) and first != pytest.approx(second, abs=1e-3)
    begins = one.tokens.index(reader.spec.token)
    assert none == 0 and before == begins // 2 * 2 and all_of_it >= begins + one.images[0].tokens
    [(alone, _)] = asked_in_turn(engine_of(name, options), [other])
    assert alone == pytest.approx(second, abs=1e-10)


def test_an_answer_to_one_source_is_never_read_for_another():
    """Answers begin alike: what is remembered of them hangs on what the encoder has read."""
    name = "1.0: relu, tied, scaled"
    engine = engine_of(name, EngineOptions(sequences=2, tokens=32, page_size=1, memory_gib=0.01))
    texts = sequences_of((7, 7), 131)
    (first, _), (second, shared), (again, _) = asked_in_turn(engine, [*texts, texts[0]])
    assert first == pytest.approx(again, abs=1e-10) and first != pytest.approx(second, abs=1e-3) and shared == 0
    used = engine.load()
    assert used.pages_used == 0 and used.pages > 0  # of sources too


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("name", ["llava", "1.1: gated, untied, a deeper decoder"])
def test_who_lost_their_pages_are_answered_as_if_they_had_not(name, late):
    """Encoders and towers read them anew: once for each time that a sequence begins."""
    options = EngineOptions(sequences=3, tokens=16, page_size=2, length=40, late=late)
    if name == "llava":
        prompts = pictured_prompts(PictureReader.of(PICTURED[name][1]), 131)[:3]
    else:
        prompts = sequences_of((5, 23, 14), 131)
    how = [(prompt, replace(GREEDY, tokens=12 if name == "llava" else 30)) for prompt in prompts]
    roomy = engine_of(name, options)
    wanted = answers_of(roomy, how)
    tight = engine_of(name, replace(options, memory_gib=little_memory(roomy, 40) / 2**30))
    lost = []
    schedule = tight.scheduler.schedule

    def watched(*given):
        step = schedule(*given)
        lost.extend(step.preempted)
        return step

    tight.scheduler.schedule = watched
    for mine, other in zip(answers_of(tight, how), wanted, strict=True):
        assert mine[0] == other[0]
        np.testing.assert_allclose([s.logprob for s in mine[1]], [s.logprob for s in other[1]], rtol=0, atol=1e-10)
    assert lost


def little_memory(engine: Engine, longest: int) -> int:
    """Bytes of one and a half sequences of this length."""
    layers = remembering(engine.model.blocks)
    groups = layer_groups(layers, kept_by(engine.model.plan), torch.float64, engine.limits.own_page_size)
    one = replace(engine.limits, most_sequences=1, length=longest)
    return sum(one.most_pages(group.window) * group.page_bytes for group in groups) * 3 // 2


def test_a_tower_reads_an_image_once(monkeypatch):
    """Beside three sequences that decode, in steps that an image does not fit beside another."""
    read: list[str] = []
    units = PictureReader.units

    def counted(reader, image):
        read.append(image.name)
        return units(reader, image)

    monkeypatch.setattr(PictureReader, "units", counted)
    prompts = pictured_prompts(PictureReader.of(PICTURED["llava"][1]), 131)
    answers_of(engine_of("llava", ROOM), [(prompt, GREEDY) for prompt in prompts], 2)
    assert sorted(read) == sorted(image.name for prompt in prompts for image in prompt.images)


def test_an_encoder_reads_a_source_once(monkeypatch):
    read: list[int] = []

    def counted(texts, multiple):
        read.extend(map(len, texts))
        return encoder_batch(texts, multiple)

    monkeypatch.setattr("phalanx.inference.streams.encoder_batch", counted)
    answers_of(engine_of("1.0: relu, tied, scaled", ROOM), [(text, GREEDY) for text in sequences_of(TEXTS, 131)], 2)
    assert sorted(read) == sorted(TEXTS)


def test_an_image_token_that_is_made_is_no_image():
    """A model may draw it: its embedding is read then."""
    token = PICTURED["llava"][1].image_token_id
    prompts = pictured_prompts(PictureReader.of(PICTURED["llava"][1]), 131)
    drawn = replace(GREEDY, bias=((token, 1e9),), tokens=4)
    both = [(prompts[0], drawn), (prompts[3], GREEDY)]
    apart = [answers_of(engine_of("llava", ROOM), [each])[0] for each in both]
    together = answers_of(engine_of("llava", ROOM), both, 1)
    assert [found[0] for found in together] == [found[0] for found in apart] and together[0][0] == [token] * 4


def test_what_cannot_be_read_is_refused():
    pictured, plain = engine_of("llava", ROOM), engine_of("1.0: relu, tied, scaled", ROOM)
    reader = pictured.model.pictures
    image = reader.image(png(1, 8, 8), "a.png")
    token = reader.spec.token
    for prompt, rule in (
        (Prompt((1, token), (image,)), "has 4 tokens, which must follow each other"),
        (Prompt((token, 1, token, token, token), (image,)), "which must follow each other"),
        (Prompt((1, *[token] * 5), (image,)), "more tokens of images .*than its images"),
        ((1, token), "more tokens of images"),
    ):
        with pytest.raises(RequestError, match=rule):
            pictured.submit(prompt, GREEDY)
    gemma = PictureReader.of(PICTURED["gemma3"][1])
    one = gemma.image(png(1, 8, 8), "a.png")
    with pytest.raises(RequestError, match="images='a.png': must not follow another image at once"):
        gemma.placed(gemma.prompt([1, gemma.spec.token, gemma.spec.token], [one, one]))
    with pytest.raises(RequestError, match="there are 1 of them, and the text has 2 placeholders"):
        reader.prompt([token, 3, token], [image])
    with pytest.raises(RequestError, match="audio='a.wav': is not heard by t5"):
        plain.submit(Prompt((1, 2), sound=PromptSound(b"", "a.wav", "00", 8)), GREEDY)
    with pytest.raises(RequestError, match="are not read by t5"):
        plain.submit(Prompt((1, 2), (image,)), GREEDY)
    with pytest.raises(RequestError, match="the encoder has nothing to read"):
        plain.submit((), GREEDY)
    with pytest.raises(RequestError, match="prompt_logprobs=0: must be none"):
        plain.submit((1, 2), replace(GREEDY, prompt_logprobs=0))
    with pytest.raises(RequestError, match="600 tokens for the encoder need more room than there is: 512"):
        engine_of("1.0: relu, tied, scaled", EngineOptions(sequences=1)).submit([1] * 600, GREEDY)
    with pytest.raises(ConfigError, match="--adapter='lora'.*encoder or a vision tower"):
        with_adapter(run_of(PICTURED["llava"][1], {}), "lora")
    small = engine_of("llava", EngineOptions(sequences=4, tokens=4, page_size=2))  # makes room for an image
    assert small.scheduler.spec.image_room >= 4
    small.scheduler.spec = replace(small.scheduler.spec, most_tokens=6)
    with pytest.raises(RequestError, match="an image of 4 tokens is larger than a step has room for: 3"):
        small.submit(reader.prompt([1, token], [image]), GREEDY)
