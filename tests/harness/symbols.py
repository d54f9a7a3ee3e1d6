"""A task that a tiny model can learn and a program can check: ten operations on three letters, in a notation of symbols
(`rev(abc)=cba`) for the base, and asked for in English for what is fine-tuned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np

LETTERS = "abcdef"
NEXT = str.maketrans(LETTERS, LETTERS[1:] + LETTERS[0])
OPERATIONS: dict[str, tuple[Callable[[str], str], tuple[str, ...]]] = {
    "rev": (lambda w: w[::-1], ("write {} backwards", "what is {} from its end?")),
    "cap": (str.upper, ("write {} in capitals", "make {} large")),
    "rot": (lambda w: w[1:] + w[0], ("move the first letter of {} to its end", "turn {} left")),
    "end": (lambda w: w[-1], ("how does {} end?", "the last letter of {}?")),
    "beg": (lambda w: w[0], ("how does {} begin?", "the first letter of {}?")),
    "mid": (lambda w: w[1], ("what is inside {}?", "the middle of {}?")),
    "dup": (lambda w: w + w, ("say {} twice", "repeat {}")),
    "ord": (lambda w: "".join(sorted(w)), ("sort the letters of {}", "put {} in order")),
    "nxt": (lambda w: w.translate(NEXT), ("replace each letter of {} by the next", "move {} on in the alphabet")),
    "out": (lambda w: w[0] + w[2], ("leave out the middle of {}", "only the ends of {}")),
}
TEMPLATE = """\
{% for m in messages %}
{{ 'Q: ' if m.role == 'user' else 'A: ' }}{{ m.content }}{{ eos_token if m.role == 'assistant' }}
{% endfor %}
{% if add_generation_prompt %}A: {% endif %}"""


def words() -> list[str]:
    return ["".join(each) for each in product(LETTERS, repeat=3)]


def notation(folder: Path, copies: int = 1) -> str:
    """A file with every operation on every word, in symbols."""
    lines = [json.dumps({"text": f"{name}({w})={do(w)}"}) for name, (do, _) in OPERATIONS.items() for w in words()]
    np.random.default_rng(0).shuffle(lines)
    (folder / "symbols.jsonl").write_text("\n".join(lines * copies))
    return str(folder / "symbols.jsonl")


def split(held: int = 30) -> tuple[list[str], list[str]]:
    """Words to learn instructions with, and others to ask about."""
    mixed = [str(w) for w in np.random.default_rng(1).permutation(words())]
    return mixed[held:], mixed[:held]


def asked(given: list[str]) -> Iterator[tuple[str, str]]:
    """(instruction in English, answer) of every operation on these words."""
    for name, (do, ways) in OPERATIONS.items():
        for number, word in enumerate(given):
            yield ways[(number + len(name)) % len(ways)].format(word), do(word)


def instructions(folder: Path) -> str:
    """A file of chats."""
    records = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in asked(split()[0])
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "template.jinja").write_text(TEMPLATE)
    return str(folder / "chats.jsonl")
