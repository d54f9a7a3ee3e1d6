"""Rules of the `task` section: the objective's own, what it needs of model and data, and the score file it reads."""

from __future__ import annotations

import os
from typing import Any

from phalanx.base.errors import DataError, Problem
from phalanx.base.rules import missing_data, no_effect, problem
from phalanx.config.device_check import Facts
from phalanx.config.run import Run
from phalanx.data.check import check_tokenizer
from phalanx.data.pairs import SEQUENCES
from phalanx.data.scores import ScoreFile
from phalanx.nn.objective import (
    EmbeddingObjective,
    Objective,
    SequenceObjective,
    find_objective,
    make_objective,
    usual_task,
)

NO_LOSS_PER_TOKEN = (
    "has no loss per token, which multi-token prediction needs: take a model without it (of Qwen's folders the module "
    "may be left out, model.num_nextn_predict_layers=0)"
)


def check_task(run: Run, facts: Facts) -> list[Problem]:
    """The objective's own rules, and what it needs of model and data."""
    kind, config = find_objective(run.task.name), run.task
    found = kind.check(config)
    found += check_direction(run) + check_pairs(run) + check_beside(run) + check_scores(run, facts) + check_chats(run)
    if facts.files and not found and not check_tokenizer(run.data):
        found += check_transform(run)
    found += check_prefix(run) if kind.makes_prefix else []
    if issubclass(kind, EmbeddingObjective):
        return found + check_embeddings(run, kind)
    if not issubclass(kind, SequenceObjective):
        if run.data.pairs:
            rule = "needs an objective over pairs, such as task.name=dpo, or over texts, such as task.name=embed"
            found.append(problem("data", run.data, "pairs", rule, {"task.name": config.name}, ((),)))
        return found
    if kind.needs_reference and run.lora is None and make_objective(config).scores is None:
        rule = "needs a reference: adapters (lora), whose base it is, or a file of phalanx data score"
        found.append(problem("task", config, "name", rule, {"lora": None}, ()))
    if run.model.predict_layers:
        rule = NO_LOSS_PER_TOKEN
        found.append(problem("task", config, "name", rule, {"layers that predict": run.model.predict_layers}, ()))
    if not run.data.inside_documents:
        rule = "must be true with an objective that compares documents"
        found.append(problem("data", run.data, "document_attention", rule, {"task.name": config.name}, (True,)))
    if run.data.pairs and kind.sequences_per_sample != SEQUENCES // 2:
        rule = "holds groups of two documents, and the objective compares groups of another size"
        because = {"task.name": config.name, "documents in a group": kind.sequences_per_sample}
        found.append(problem("data", run.data, "pairs", rule, because, ((),)))
    if run.data.packing != "off" and not run.data.mock:
        rule = "reorders documents, and the objective compares documents that follow each other"
        found.append(problem("data", run.data, "packing", rule, {"task.name": config.name}, ("off",)))
    return found


def check_embeddings(run: Run, kind: type[EmbeddingObjective]) -> list[Problem]:
    """Groups of texts that do not read each other, and a model whose hidden states nothing else reads."""
    because, found = {"task.name": run.task.name}, kind.check_model(run.task, run.model)
    if not run.data.inside_documents:
        rule = "must be true with an objective over embeddings: texts do not read each other"
        found.append(problem("data", run.data, "document_attention", rule, because, (True,)))
    if not run.data.pairs and not run.data.mock and run.data.source is None:
        rule = "is required: files of queries and passages, such as data.pairs=train.jsonl"
        found.append(problem("data", run.data, "pairs", rule, because))
    if run.model.predict_layers:
        rule = NO_LOSS_PER_TOKEN
        found.append(problem("task", run.task, "name", rule, {"layers that predict": run.model.predict_layers}, ()))
    if run.train.deterministic:
        rule = "has no fixed order of sums over texts of all ranks, which the task needs"
        found.append(problem("train", run.train, "deterministic", rule, because, (False,)))
    return found


def check_direction(run: Run) -> list[Problem]:
    """A model that reads what follows needs labels that do not stand there; for the others there is the next token."""
    both, kind = run.model.both_ways, find_objective(run.task.name)
    if kind.both_ways in (None, both):
        return check_head(run) or check_classes(run)
    rule = (
        "predicts the next token, which a model that reads both ways sees: take an objective for such models"
        if both
        else "is for models that read both ways, and this one reads what comes before: take one for it"
    )
    rule += f", such as {task_for(run)}"
    return [problem("task", run.task, "name", rule, {"model.family": run.model.family}, ())]


def task_for(run: Run) -> str:
    """The whole section of a task for the run's model, to be typed in the place of this one: with the name alone, other
    fields would stay, and those that the task needs would be missing."""
    usual = usual_task(run.model)
    needed = {p.field.removeprefix("task."): p.valid[0] for p in find_objective(usual.name).check(usual) if p.valid}
    fields = {"name": usual.name, **needed}
    return f"task={{{', '.join(f'{name}: {value}' for name, value in fields.items())}}}"


def check_head(run: Run) -> list[Problem]:
    """Embeddings are made of hidden states; every other task needs a head."""
    needs, headless = find_objective(run.task.name).needs_head, run.model.headless
    if needs != headless:
        return []
    if needs:
        rule = "needs a head, and the model has none: take task.name=embed"
        return [problem("task", run.task, "name", rule, {"model.head": "none"}, ("embed",))]
    rule = "makes embeddings of a model without a head"
    if not hasattr(run.model, "head"):
        rule += f": {run.model.family} cannot leave its head out, take another family, such as modernbert or qwen3"
        return [problem("task", run.task, "name", rule, {"model.family": run.model.family}, ())]
    because = {"task.name": run.task.name}
    return [problem("model", run.model, "head", f"must be none: the task {rule}", because, ("none",))]


def check_classes(run: Run) -> list[Problem]:
    """A head over classes is for tasks whose labels are classes, of whole texts."""
    asked, has = find_objective(run.task.name).over_classes, bool(run.model.classes)
    if asked != has:
        rule = (
            "needs a head over classes: model.head=sequence or token, and model.labels; or take a task for this one"
            if asked
            else "needs a head over the vocabulary, and this one is over classes: take one for it"
        )
        rule += f", such as {task_for(run)}"
        return [problem("task", run.task, "name", rule, {"model.labels": run.model.classes}, ())]
    if asked and not run.data.inside_documents:
        rule = "must be true with classes: texts do not read each other"
        return [problem("data", run.data, "document_attention", rule, {"task.name": run.task.name}, (True,))]
    return []


def check_pairs(run: Run) -> list[Problem]:
    """Pairs of texts are for a head that says their class, and the other way round."""
    asked, has = make_objective(run.task).makes_pairs, run.model.pair_head
    if has and not asked:
        because = {"task.name": run.task.name}
        rule = "needs a task that makes pairs of texts, such as task={name: mlm, pairs: next}"
        return [problem("model", run.model, "head", rule, because, ("masked",))]
    if not asked:
        return []
    found, because = list[Problem](), {"task.pairs": run.task.pairs}  # type: ignore[attr-defined]
    if not has:
        rule = "needs a head that says the class of pairs: model.head=pretraining, which bert has"
        found.append(problem("task", run.task, "pairs", rule, {"model.family": run.model.family}, (None,)))
    if not run.data.inside_documents:
        rule = "must be true with pairs of texts: they do not read each other"
        found.append(problem("data", run.data, "document_attention", rule, because, (True,)))
    return found


def check_prefix(run: Run) -> list[Problem]:
    """Prefixes are those of documents, and not every kernel has them."""
    because, found = {"task.name": run.task.name}, list[Problem]()
    if not run.data.inside_documents:
        rule = "must be true: prefixes are those of documents"
        found.append(problem("data", run.data, "document_attention", rule, because, (True,)))
    if run.train.batch_invariant:
        rule = "has attention without prefixes, which the task makes"
        found.append(problem("train", run.train, "batch_invariant", rule, because, (False,)))
    if run.train.kernels == "optional":
        rule = "has attention without prefixes, which the task makes"
        found.append(problem("train", run.train, "kernels", rule, because, ("auto",)))
    return found


def check_beside(run: Run) -> list[Problem]:
    """What a model reads beside its text is what the task makes, of whole documents."""
    made, read = find_objective(run.task.name).makes_beside, run.model.reads_beside
    if set(made) == set(read):
        if not made or (run.data.is_packed and run.data.inside_documents):
            return []
        name, valid = ("packing", ("online",)) if not run.data.is_packed else ("document_attention", (True, None))
        rule = "must be on: the task makes two texts of each document, and pads sequences"
        return [problem("data", run.data, name, rule, {"task.name": run.task.name}, valid)]
    because = {"model.family": run.model.family}
    rule = (
        f"makes no {' and '.join(read)} text, which the model reads beside its own"
        if read
        else f"makes a text of the {' and the '.join(made)} beside the model's own, which this model does not read"
    )
    rule += f": take one for it, such as {task_for(run)}"
    return [problem("task", run.task, "name", rule, because)]


def check_transform(run: Run) -> list[Problem]:
    """What the task makes of samples, if the tokenizer has what it needs."""
    from phalanx.text.vocabulary import sample_facts  # takes time to import

    facts = sample_facts(run.data, run.model, seq_length=run.train.seq_length, seed=run.train.seed)
    try:
        make_objective(run.task).transform(facts)
    except DataError as error:
        because = {"task.name": run.task.name}
        return [problem("data", run.data, "tokenizer", str(error), because, ())]
    return []


def check_chats(run: Run) -> list[Problem]:
    """Chats and the objectives that train on them go together."""
    config, train_on = run.task, make_objective(run.task).train_on
    if run.data.chats and train_on is None:
        rule = "needs an objective that trains on chats, such as task.name=sft"
        return [problem("data", run.data, "chats", rule, {"task.name": config.name}, ((),))]
    if run.data.chats or run.data.mock or train_on is None:
        return []
    if not find_objective(config.name).needs_chats:
        return no_effect("task", config, ("train_on",), "data.chats", {"data.chats": []})
    rule = "is required: files of chats, such as data.chats=train.jsonl"
    return [problem("data", run.data, "chats", rule, {"task.name": config.name}, ())]


def check_scores(run: Run, facts: Facts) -> list[Problem]:
    """An objective that reads another model's scores of the run's tokens."""
    config, made = run.task, make_objective(run.task)
    found = list[Problem]()
    if made.scores is None:
        return found
    if run.model.predict_layers and not isinstance(made, SequenceObjective):
        rule = "reads scores of the next token alone, and multi-token prediction needs further ones: take a model "
        rule += "without it"
        found.append(problem("task", config, "name", rule, {"layers that predict": run.model.predict_layers}, ()))
    if run.data.mock or run.data.source is not None:
        name = "mock" if run.data.mock else "source"
        rule = "has no tokens in files, to which the scores that the task reads belong"
        valid = (False,) if run.data.mock else (None,)
        found.append(problem("data", run.data, name, rule, {"task.name": config.name}, valid))
    elif facts.files:
        found += check_score_file(run, made)
    return found


def check_score_file(run: Run, made: Objective) -> list[Problem]:
    """The file is there and readable, and was written for these windows and this vocabulary. Which tokens it has is
    compared when they are opened."""
    field, path = made.scores_field, str(made.scores)
    if not os.path.exists(path):
        return [missing_data(field, path, "must be a file of phalanx data score")]
    try:
        scores = ScoreFile(path)
    except DataError as error:
        return [Problem(field, path, str(error).removeprefix(f"{path}: "))]
    values = {**scored_windows(run), "model.vocab_size": run.model.vocab_size}
    found = [
        Problem(key, values.get(key), rule, {field: path}, (valid,))
        for key, valid, rule in scores.problems(scored_windows(run), run.model.vocab_size)
    ]
    if made.needs_targets and not scores.top:
        rule = "has log-probabilities of labels alone: write it with --top 64"
        found.append(Problem(field, path, rule))
    return found


def scored_windows(run: Run) -> dict[str, Any]:
    """What a token's context depends on, by config key: scores are of these windows alone."""
    return {
        "train.seq_length": run.train.seq_length,
        "data.packing": run.data.packing,
        "data.document_attention": run.data.inside_documents,
        "data.split": run.data.split,
    }
