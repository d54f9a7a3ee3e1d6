"""Images in chats that are prepared: each placeholder that a template writes becomes as many tokens as the image has
features, and a note says which file it is (data/pictures.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.base.errors import DataError
from phalanx.data.images import BadImage, ImageSteps, open_image
from phalanx.data.picture_notes import PictureNote
from phalanx.data.pictures import image_bytes, steps_for
from phalanx.sequence.patches import PictureSpec
from phalanx.text.chat_masks import ChatSample, Span
from phalanx.text.chat_records import BadChat
from phalanx.text.tokenizer_base import Tokenizer


@dataclass(frozen=True)
class PictureText:
    """How images stand in texts.

    name      of the image token, as the tokenizer writes it
    """

    spec: PictureSpec
    steps: ImageSteps
    name: str

    @staticmethod
    def of(spec: PictureSpec, processor: str | None, tokenizer: Tokenizer) -> PictureText:
        """DataError if the tokenizer has no special token for images, or the processor does not fit."""
        return PictureText.with_steps(spec, steps_for(spec, processor), tokenizer)

    @staticmethod
    def with_steps(spec: PictureSpec, steps: ImageSteps, tokenizer: Tokenizer) -> PictureText:
        """The same of steps that are known."""
        special = {token: name for name, token in tokenizer.special_tokens.items()}
        if spec.token not in special:
            raise DataError(
                f"model.image_token_id={spec.token} is no special token of data.tokenizer (these are: "
                f"{', '.join(f'{name} {token}' for token, name in special.items()) or 'none'})"
            )
        return PictureText(spec, steps, special[spec.token])

    @property
    def written(self) -> str:
        """What stands for an image in a text, before it is counted."""
        return self.name if self.spec.rewrites is None else self.spec.rewrites[0]

    def rewritten(self, text: str) -> str:
        return text if self.spec.rewrites is None else text.replace(*self.spec.rewrites)

    @property
    def deciding(self) -> str:
        """What prepared chats depend on."""
        return repr((self.spec.form, self.spec.token, self.spec.rewrites, self.steps))

    def expanded(self, sample: ChatSample, names: Sequence[str], folder: Path) -> tuple[ChatSample, list[PictureNote]]:
        """A sample with all tokens of its images, which are the first of `names`, and their notes. BadChat for an image
        that cannot be read."""
        places = [at for at, token in enumerate(sample.ids) if token == self.spec.token]
        if len(places) > len(names):
            rule = f"the template writes {len(places)} placeholders, and the chat has {len(names)} images"
            raise BadChat("images", rule)
        notes = [self._note(name, folder) for name in names[: len(places)]]
        ids, moved, at = list[int](), list[int](), 0
        counts = dict(zip(places, (note.tokens for note in notes)))
        for place, token in enumerate(sample.ids):
            moved.append(at)
            more = counts.get(place, 1)
            ids += [token] * more
            at += more
        moved.append(at)
        spans = [(moved[first], moved[stop]) for first, stop in sample.spans]
        return ChatSample(tuple(ids), tuple(_without(spans, ids, self.spec.token))), notes

    def _note(self, name: str, folder: Path) -> PictureNote:
        """Decodes the image once, so that what is damaged is found before training."""
        try:
            image = open_image(image_bytes(folder, name), name)
            height, width = self.steps.size_after(image.height, image.width)
        except BadImage as error:
            raise BadChat("bad image", str(error)) from error
        form = self.spec.form
        return PictureNote(name, form.rows(height, width), form.tokens(height, width))


def _without(spans: Sequence[Span], ids: Sequence[int], token: int) -> list[Span]:
    """Ranges of ids without those of images, which nobody is to write."""
    found = list[Span]()
    for first, stop in spans:
        at = first
        for place in range(first, stop):
            if ids[place] == token:
                found += [(at, place)] if at < place else []
                at = place + 1
        found += [(at, stop)] if at < stop else []
    return found
