"""How a run's task reads its data: another model's scores, and what becomes of samples."""

from __future__ import annotations

from phalanx.config.run import Run
from phalanx.data.loader import Reading
from phalanx.data.scores import ScoreFile
from phalanx.nn.objective import make_objective
from phalanx.text.vocabulary import sample_facts


def reading_of(run: Run) -> Reading:
    """DataError if the score file is unreadable, or the tokenizer lacks what the task needs."""
    objective, t = make_objective(run.task), run.train
    facts = sample_facts(run.data, run.model, seq_length=t.seq_length, seed=t.seed)
    scores = None if objective.scores is None else ScoreFile(objective.scores)
    classes = run.model.classes if objective.over_classes else ()
    return Reading(scores, objective.transform(facts), classes)
