"""How a run's task reads its data: another model's scores, and what becomes of samples."""

from __future__ import annotations

from phalanx.config.run import Run
from phalanx.data.loader import Reading, SampleMedia
from phalanx.data.media import ChatMedia, MockMedia, reader_of
from phalanx.data.scores import ScoreFile
from phalanx.nn.objective import EmbeddingObjective, make_objective
from phalanx.planning.blocks import unit_rooms
from phalanx.sequence.sample import SampleTransform
from phalanx.text.vocabulary import sample_facts


def reading_of(run: Run) -> Reading:
    """DataError if the score file is unreadable, or the tokenizer lacks what the task needs."""
    objective = make_objective(run.task)
    scores = None if objective.scores is None else ScoreFile(objective.scores)
    classes = run.model.classes if objective.over_classes else ()
    texts = isinstance(objective, EmbeddingObjective)
    return Reading(scores, transform_of(run), classes, texts, unit_rooms(run), media_of(run))


def media_of(run: Run) -> SampleMedia | None:
    """What gives samples their images or recordings, where the model reads any; tokens of a run's own source have none.
    DataError for a processor that does not fit."""
    spec = run.model.media
    if spec is None or run.data.source is not None:
        return None
    reader = reader_of(spec, run.data.processor)
    if run.data.mock:
        return MockMedia(spec, reader, run.data.room.get(spec.stream.name, 0), run.train.seed)
    reader.check_packages()
    return ChatMedia(spec, reader, run.data.image_workers)


def window_length(run: Run) -> int:
    """Tokens of the data in a sample, which documents are packed into."""
    return Reading(None, transform_of(run)).length(run.train.seq_length)


def transform_of(run: Run) -> SampleTransform | None:
    """What the task makes of samples. DataError if the tokenizer lacks what it needs."""
    facts = sample_facts(run.data, run.model, seq_length=run.train.seq_length, seed=run.train.seed)
    return make_objective(run.task).transform(facts)
