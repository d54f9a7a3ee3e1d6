"""Made-up chats with four images each for benchmarks: a folder with images, chats, a tokenizer and a processor, as
data.chats, data.tokenizer and data.processor name them. Each chat fills a sequence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

IMAGES = 4  # in a chat
PATCH, SIDE = 14, 2  # pixels of a patch, patches of a side of what becomes a token
SPECIAL = ["<pad>", "<|image_pad|>", "<|end|>"]
IMAGE_TOKEN = SPECIAL.index("<|image_pad|>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|end|>{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def sizes_of(rng: np.random.Generator, patches: int, unequal: bool) -> list[tuple[int, int]]:
    """Height and width, in squares that become a token, of a chat's images: all alike, or from a sixteenth to about
    three times as many patches, on average as many in a chat."""
    side = round((patches / SIDE**2) ** 0.5)
    if not unequal:
        return [(side, side)] * IMAGES
    while True:
        sides = rng.integers(side // 4, side + side * 3 // 4 + 1, (IMAGES, 2))
        if sides.prod(1).sum() <= 1.5 * IMAGES * side * side:
            return [(int(a), int(b)) for a, b in sides]


def write(folder: Path, chats: int, tokens: int, patches: int, words: int, unequal: bool) -> dict[str, str]:
    """Chats of `tokens` tokens, images included, with images of so many patches each -> the settings of `data` that
    name them."""
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers

    rng, lines, most = np.random.default_rng(1), list[str](), 0
    (folder / "images").mkdir(parents=True)
    vocabulary = {word: n for n, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(words - len(SPECIAL)))])}
    core = Tokenizer(models.WordLevel(vocabulary, "<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(SPECIAL)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "pad_token": "<pad>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    steps = {"patch_size": PATCH, "merge_size": SIDE, "temporal_patch_size": 2}
    steps |= {"min_pixels": (PATCH * SIDE) ** 2, "max_pixels": 64 * patches * PATCH**2}
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(kind | steps))
    for chat in range(chats):
        parts, inside = list[dict[str, str]](), 0
        for number, (high, wide) in enumerate(sizes_of(rng, patches, unequal)):
            name, inside = f"images/{chat}-{number}.png", inside + high * wide
            pixels = rng.integers(0, 256, (high, wide, 3), np.uint8)  # large squares: files are small
            size = (wide * PATCH * SIDE, high * PATCH * SIDE)
            Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST).save(folder / name)
            parts.append({"type": "image", "image": name})
        most = max(most, inside * SIDE**2)
        said = " ".join(f"w{n}" for n in rng.integers(0, words - len(SPECIAL), tokens - inside - 1))
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": turns}) + "\n")
    (folder / "chats.jsonl").write_text("".join(lines))
    found = {"data.chats": f"[{folder / 'chats.jsonl'}]", "data.tokenizer": str(folder), "data.processor": str(folder)}
    return {**found, "data.room": f"{{patches: {most}}}", "data.mock": "false"}
