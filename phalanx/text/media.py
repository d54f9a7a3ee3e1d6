"""Media in chats that are prepared: each placeholder of an image that a template writes becomes as many tokens as the
image has features, and a note says which file it is (data/media.py). Recordings have no place in the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.media import BadMedia, MediaReader, media_bytes, reader_of
from phalanx.data.media_notes import MediaNote
from phalanx.sequence.media import MediaSpec
from phalanx.text.chat_masks import ChatSample, Span
from phalanx.text.chat_records import BadChat
from phalanx.text.tokenizer_base import Tokenizer


@dataclass(frozen=True)
class MediaText:
    """How media stand in texts.

    name      of their token, as the tokenizer writes it; empty: they have none
    """

    spec: MediaSpec
    reader: MediaReader
    name: str

    @staticmethod
    def of(spec: MediaSpec, processor: str | None, tokenizer: Tokenizer) -> MediaText:
        """DataError if the tokenizer has no special token for them, the processor does not fit, or a package is
        missing."""
        reader = reader_of(spec, processor)
        reader.check_packages()
        return MediaText.with_reader(spec, reader, tokenizer)

    @staticmethod
    def with_reader(spec: MediaSpec, reader: MediaReader, tokenizer: Tokenizer) -> MediaText:
        """The same of a reader that is known."""
        special = {token: name for name, token in tokenizer.special_tokens.items()}
        if spec.token is not None and spec.token not in special:
            raise DataError(
                f"model.{spec.kind}_token_id={spec.token} is no special token of data.tokenizer (these are: "
                f"{', '.join(f'{name} {token}' for token, name in special.items()) or 'none'})"
            )
        return MediaText(spec, reader, "" if spec.token is None else special[spec.token])

    @property
    def kind(self) -> str:
        """The type of their parts in messages."""
        return self.spec.kind

    @property
    def written(self) -> str:
        """What stands for one in a text, before it is counted."""
        return self.name if self.spec.rewrites is None else self.spec.rewrites[0]

    def rewritten(self, text: str) -> str:
        return text if self.spec.rewrites is None else text.replace(*self.spec.rewrites)

    @property
    def deciding(self) -> str:
        """What prepared chats depend on."""
        return repr(self.reader)

    def expanded(self, sample: ChatSample, names: Sequence[str], folder: Path) -> tuple[ChatSample, list[MediaNote]]:
        """A sample with all tokens of its media, which are the first of `names`, and their notes. BadChat for a file
        that cannot be read."""
        if self.spec.token is None:
            return self._beside(sample, names, folder)
        places = [at for at, token in enumerate(sample.ids) if token == self.spec.token]
        if len(places) > len(names):
            rule = f"the template writes {len(places)} placeholders, and the chat has {len(names)} {self.reader.plural}"
            raise BadChat(self.reader.plural, rule)
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

    def _beside(self, sample: ChatSample, names: Sequence[str], folder: Path) -> tuple[ChatSample, list[MediaNote]]:
        """A text that has one beside it begins with a token of its own, if it does not already."""
        if len(names) != 1:
            raise BadChat(self.reader.plural, f"has {len(names)} {self.reader.plural}; each text has one")
        notes = [self._note(names[0], folder)]
        if self.spec.begins is None or sample.ids[0] == self.spec.begins:
            return sample, notes
        spans = tuple((first + 1, stop + 1) for first, stop in sample.spans)
        return ChatSample((self.spec.begins, *sample.ids), spans), notes

    def _note(self, name: str, folder: Path) -> MediaNote:
        """Decodes the file once, so that what is damaged is found before training."""
        try:
            return MediaNote(name, *self.reader.sizes(media_bytes(folder, name), name))
        except BadMedia as error:
            raise BadChat(f"bad {self.spec.kind}", str(error)) from error


def _without(spans: Sequence[Span], ids: Sequence[int], token: int) -> list[Span]:
    """Ranges of ids without those of media, which nobody is to write."""
    found = list[Span]()
    for first, stop in spans:
        at = first
        for place in range(first, stop):
            if ids[place] == token:
                found += [(at, place)] if at < place else []
                at = place + 1
        found += [(at, stop)] if at < stop else []
    return found
