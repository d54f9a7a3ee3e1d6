"""Heads of encoders: over the vocabulary, for hidden tokens, or over classes of sequences or of tokens, or none; their
fields, rules, and keys of config.json in both directions."""

from __future__ import annotations

from typing import Any, Literal

from phalanx.base.errors import Problem
from phalanx.base.rules import problem, within
from phalanx.models.config_json import LIST_OR_NULL, NONE, ConfigJson, HfKey

HeadKind = Literal["masked", "sequence", "token", "none"]
ARCHITECTURES = {
    "masked": "MaskedLM",
    "sequence": "SequenceClassification",
    "token": "TokenClassification",
    "pretraining": "PreTraining",
}
OVER_CLASSES = ("sequence", "token")
OVER_IDS = ("masked", "pretraining")  # heads over the vocabulary
ONE_LABEL = "single_label_classification"
HEAD_FIELDS = ("head", "labels", "classifier_dropout")

CLASS_KEYS = {
    "architectures": LIST_OR_NULL,
    "id2label": HfKey((dict, NONE), None),
    "num_labels": HfKey((int, NONE), None),
    "problem_type": HfKey((str, NONE), None),
    "classifier_dropout": HfKey((float, int, NONE), None),
}


def architecture(prefix: str, config: Any) -> str:
    """transformers' class of the model, such as BertForMaskedLM."""
    return f"{prefix}Model" if config.headless else f"{prefix}For{ARCHITECTURES[config.head]}"


def class_rules(config: Any) -> list[Problem]:
    """A head over classes has two or more of them, each with a name of its own."""
    labels, because = config.labels, {"model.head": config.head}
    found = within("model", config, "classifier_dropout", "[0, 1)", (0.0, 0.1))
    if config.head not in OVER_CLASSES:
        if labels:
            rule = "has no effect: the head is not over classes; take model.head=sequence or token"
            found.append(problem("model", config, "labels", rule, because, ((),)))
        if config.classifier_dropout:
            rule = "has no effect: the head is not over classes"
            found.append(problem("model", config, "classifier_dropout", rule, because, (0.0,)))
    elif len(labels) < 2 or len(set(labels)) < len(labels):
        rule = "must be the names of the classes: two or more, each once"
        found.append(problem("model", config, "labels", rule, because, (("no", "yes"),)))
    return found


def class_fields(found: ConfigJson, prefix: str) -> dict[str, Any]:
    """`head`, `labels` and `classifier_dropout` of a config.json. A model without a known head has the one for hidden
    tokens."""
    v = found.values
    named = {f"{prefix}For{name}": kind for kind, name in ARCHITECTURES.items()}
    kind = next((named[name] for name in v["architectures"] or () if name in named), "masked")
    if kind in OVER_IDS:
        return {} if kind == "masked" else {"head": kind}
    if kind == "sequence" and v["problem_type"] not in (None, ONE_LABEL):
        found.odd.append(f"problem_type={v['problem_type']!r} (supported: {ONE_LABEL!r})")
    names = v["id2label"]
    count = len(names) if names is not None else v["num_labels"] or 2
    names = {str(i): f"LABEL_{i}" for i in range(count)} if names is None else names
    if sorted(names) != sorted(map(str, range(count))):
        found.odd.append(f"id2label={names!r} (supported: a name for each of 0 .. {count - 1})")
        return {}
    labels = tuple(str(names[str(i)]) for i in range(count))
    return {"head": kind, "labels": labels, "classifier_dropout": v["classifier_dropout"] or 0.0}


def classes_to_hf(config: Any) -> dict[str, Any]:
    if config.head not in OVER_CLASSES:
        return {}
    return {
        "id2label": {str(i): name for i, name in enumerate(config.labels)},
        "label2id": {name: i for i, name in enumerate(config.labels)},
        "classifier_dropout": config.classifier_dropout,
        **({"problem_type": ONE_LABEL} if config.head == "sequence" else {}),
    }
