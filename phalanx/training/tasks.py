"""train.eval_tasks: tasks of lm-evaluation-harness on the weights that train, on the layout that trains them. Needs the
extra `eval`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from functools import cached_property
from io import StringIO
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, DataError, NumericalStop
from phalanx.base.log import Log
from phalanx.config.run import Run
from phalanx.engine.model import Model
from phalanx.evaluation.harness import AnswerSource, HarnessModel
from phalanx.evaluation.harness_run import PATIENCE_S, TaskEvaluation, engine_options, evaluated
from phalanx.evaluation.model_text import ModelText, text_of_tokenizer
from phalanx.evaluation.task_report import NO_FILTER, results_of
from phalanx.evaluation.tasks import load_tasks
from phalanx.inference.beside import TrainedModel
from phalanx.inference.engine import Engine
from phalanx.inference.request import RequestError

MOST_AT_ONCE = 64  # sequences: their keys and values lie beside what trains


@dataclass(frozen=True)
class TrainingTasks:
    """Tasks with their data, and the text that the model reads."""

    loaded: Mapping[str, Any]
    text: ModelText
    what: TaskEvaluation

    @staticmethod
    def read(run: Run) -> TrainingTasks:
        """ConfigError and DataError for what is not there."""
        train = run.train
        what = TaskEvaluation(weights="", tasks=tuple(train.eval_tasks), data=train.eval_data, limit=train.eval_limit)
        return TrainingTasks(load_tasks(what.tasks, what.data), text_of_tokenizer(str(run.data.tokenizer)), what)


class TaskScorer:
    """Scores a model between two of its steps. Made on all ranks together; rank 0 alone has the tasks."""

    def __init__(self, model: Model, asked: TrainingTasks | None, log: Log):
        self._model, self._asked, self._log = model, asked, log

    @cached_property
    def _trained(self) -> TrainedModel:
        return TrainedModel(self._model, max(PATIENCE_S, self._model.plan.run.train.timeout_s))

    def score(self) -> dict[tuple[str, str], float]:
        """(task, metric) -> score, on rank 0; elsewhere nothing. Collective. Without memory for questions, or for one
        that cannot be asked, a warning says so, and there are no scores."""
        try:
            options = replace(engine_options(self._model.plan.run), sequences=MOST_AT_ONCE)
            with self._trained.engine(options) as engine:
                if self._asked is None:
                    engine.follow()
                    return {}
                return self._ask(engine, self._asked)
        except ConfigError as error:  # on all ranks alike, before the first step of the engine
            if self._model.mesh.rank == 0:
                self._log.warn(f"no scores of train.eval_tasks: {error}")
            return {}

    def _ask(self, engine: Engine, asked: TrainingTasks) -> dict[tuple[str, str], float]:
        source = AnswerSource("", self._model.plan.run.train.precision, asked.text.tokenizer.fingerprint)
        try:
            with redirect_stderr(StringIO()):  # the harness's progress
                found = evaluated(HarnessModel(engine, asked.text, source), asked.loaded, asked.what, draws=0)
        except (DataError, RequestError, NumericalStop) as error:  # between two steps of the engine
            engine.close()
            self._log.warn(f"no scores of train.eval_tasks: {error}")
            return {}
        engine.close()
        results = results_of(found, asked.loaded["tasks"])
        scores = {
            (each.task, each.metric if each.filter == NO_FILTER else f"{each.metric}-{each.filter}"): each.value
            for each in results.scores
        }
        return scores | {(name, "ece"): each.ece for name, each in results.calibrations.items()}
