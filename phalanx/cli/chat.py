"""`phalanx chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.checkpoints import say_ignored
from phalanx.cli.completion import configs
from phalanx.cli.options import ADAPTER
from phalanx.cli.passages import lookup_of, say_sources, takes_passages

if TYPE_CHECKING:
    from phalanx.inference.chat_prompts import ImageFile
    from phalanx.inference.conversation import Conversation
    from phalanx.retrieval.prompting import PassageAdder

GREETING = (
    "Type a message. Ctrl-C ends an answer, Ctrl-D the chat; /new forgets what was said; /image FILE shows an image "
    "with the next message."
)
IMAGE = "/image "


@click.command("chat", short_help="Talk to a checkpoint in the terminal.")
@click.argument("checkpoint", shell_complete=configs)
@click.option("--system", default=None, metavar="TEXT", help="Instructions that come before all messages.")
@click.option("--tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens of an answer.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.7, show_default=True, help="0: always the likeliest token."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Another seed, other answers.")
@takes_passages
@ADAPTER
def chat(
    checkpoint: str,
    system: str | None,
    tokens: int,
    temperature: float,
    seed: int,
    adapter: str | None,
    **passages: Any,
) -> None:
    """Talk to the model in CHECKPOINT: a run folder (its newest), a checkpoint, or a Hugging Face folder. Messages are
    written as its own chat template has them."""
    from phalanx.inference.conversation import Conversation
    from phalanx.inference.request import SamplingOptions
    from phalanx.retrieval.prompting import PassageAdder

    say_ignored(checkpoint)
    lookup = lookup_of(passages)
    add = None if lookup is None else PassageAdder(*lookup)
    options = SamplingOptions(tokens=tokens, temperature=temperature, seed=seed)
    talk = Conversation(checkpoint, options, system, adapter)
    terminal = sys.stdin.isatty()
    if terminal:
        click.echo(GREETING, err=True)
    images: list[ImageFile] = []  # of the next message
    while True:
        try:
            message = input("> " if terminal else "")
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if message.strip() == "/new":
            talk.forget()
            images.clear()
        elif message.strip().startswith(IMAGE):
            images += image_of(talk, message.strip().removeprefix(IMAGE).strip())
        elif message.strip():
            answer(talk, message, add, images)
            images = []


def image_of(talk: Conversation, name: str) -> list[ImageFile]:
    """The file, if it is an image that the model can read; else it is said why not."""
    from phalanx.base.errors import DataError
    from phalanx.data.media import read_bytes
    from phalanx.inference.request import RequestError

    try:
        found = name, read_bytes(Path(name).expanduser())
        talk.check_image(found)
    except (DataError, RequestError) as error:
        click.echo(str(error), err=True)
        return []
    return [found]


def answer(talk: Conversation, message: str, add: PassageAdder | None = None, images: Sequence[ImageFile] = ()) -> None:
    """Write the answer to a message, and the images with it, as it is made. add: puts passages before it, whose sources
    are written first. What cannot be answered, such as a message that is too long, is said, and the chat goes on."""
    from phalanx.base.errors import ConfigError, DataError
    from phalanx.inference.request import RequestError

    written, found = (None, []) if add is None else add.one(message)
    say_sources(found)
    try:
        for piece in talk.answer(message, written, images):
            click.echo(piece, nl=False)
        click.echo()
    except KeyboardInterrupt:
        click.echo(" ...")
    except (ConfigError, DataError, RequestError) as error:
        click.echo(str(error), err=True)
        return
    if talk.notice is not None:
        click.echo(talk.notice, err=True)
