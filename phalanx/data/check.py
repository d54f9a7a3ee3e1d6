"""Rules of the `data` section: where tokens come from, how they are blended and split. The contents of files are
checked when they are opened."""

from __future__ import annotations

import glob
import math
import os
from pathlib import Path
from typing import Any

from phalanx.base.errors import ConfigError, Problem
from phalanx.base.own_fields import made_of
from phalanx.base.registry import NotFound
from phalanx.base.rules import default_of, missing_data, no_effect, problem, within
from phalanx.data.chats import chat_files, is_chat_file
from phalanx.data.config import DataConfig, is_number, prefixes_and_weights
from phalanx.data.files import BYTES, NULL, TOKENIZER_FILES
from phalanx.data.index import strip_suffix
from phalanx.data.mixture import parse_split
from phalanx.data.own_source import find_source
from phalanx.data.pairs import pair_files

VALID = "valid"  # name of the validation part of the training corpora


def check(config: DataConfig, *, evaluates: bool, files: bool = True) -> list[Problem]:
    """evaluates: the run has evaluations. files: check that the files exist (a laptop that only plans may not have
    them)."""
    found = check_source(config) + check_blend(config) + check_sources(config) + check_text(config)
    found += (
        check_split(config, evaluates) + check_valid(config, evaluates) + check_packing(config) + check_pairs(config)
    )
    found += check_chats(config)
    found += within("data", config, "max_epochs", "(0, inf)", (1.0, None))
    if config.mock:
        found += no_effect("data", config, ("max_epochs",), "token files", {"data.mock": True})
    return found + (check_files(config) if files else [])


def check_source(config: DataConfig) -> list[Problem]:
    """Tokens come from one place: mock data, paths, sources or text."""
    given = [name for name in ("paths", "sources", "text", "pairs", "chats", "source") if getattr(config, name)]
    found = []

    def shown(name: str) -> Any:
        return config.source if name == "source" else list(getattr(config, name))

    if config.mock and given:
        name = given[0]
        found.append(problem("data", config, "mock", f"excludes data.{name}", {f"data.{name}": shown(name)}, (False,)))
    for name in given[1:]:
        because = {f"data.{given[0]}": shown(given[0])}
        found.append(
            problem("data", config, name, f"excludes data.{given[0]}", because, (default_of(DataConfig, name),))
        )
    if not config.mock and not given:
        rule = (
            "needs a path to token files (or data.text for text files, data.chats for chats, data.mock=true for "
            "made-up tokens)"
        )
        found.append(problem("data", config, "paths", rule))
    return found + check_own(config)


def check_own(config: DataConfig) -> list[Problem]:
    """data.source exists and accepts its fields; nothing is set that only applies to token files."""
    if config.source is None:
        return no_effect("data", config, ("source_config",), "data.source", {"data.source": None})
    because = {"data.source": config.source}
    found = no_effect("data", config, ("split",), "token files", because)
    if config.packing != "off":
        rule = "needs token files; a source of your own puts its samples together itself"
        found.append(problem("data", config, "packing", rule, because, ("off",)))
    try:
        made_of(find_source(config.source).Config, "data.source_config", config.source_config)
    except NotFound as error:
        found.append(problem("data", config, "source", str(error)))
    except ConfigError as error:
        found += error.problems
    return found


def check_packing(config: DataConfig) -> list[Problem]:
    if config.mock and config.packing == "offline":
        rule = "needs token files: there is nothing beside which a packing of made-up tokens could be stored"
        return [problem("data", config, "packing", rule, {"data.mock": True}, ("online", "off"))]
    return []


def check_blend(config: DataConfig) -> list[Problem]:
    prefixes, inline = prefixes_and_weights(config.paths)
    found = check_words("data.paths", config.paths)
    if not config.weights:
        return found
    if not config.paths:
        return no_effect("data", config, ("weights",), "data.paths", {"data.paths": []})
    even = (1.0,) * len(prefixes)
    if inline:
        return [
            problem(
                "data",
                config,
                "weights",
                "has no effect beside the weights in data.paths",
                {"data.paths": list(config.paths)},
                ((),),
            )
        ]
    if len(config.weights) != len(prefixes):
        because = {"weights": len(config.weights), "paths": len(prefixes)}
        found.append(problem("data", config, "weights", "must have one number per path", because, (even, ())))
    if not all(math.isfinite(w) and w > 0 for w in config.weights):
        found.append(problem("data", config, "weights", "must be numbers > 0", {}, (even, ())))
    return found


def check_words(field: str, given: tuple[str, ...]) -> list[Problem]:
    """Numbers among the prefixes are weights: one before each prefix."""
    prefixes, weights = prefixes_and_weights(given)
    if any(weight <= 0 for weight in weights):
        return [Problem(field, list(given), "must have weights > 0", {"weights": list(weights)})]
    if not weights and any(is_number(word) for word in given):
        return [Problem(field, list(given), "must be prefixes, or a weight before each prefix (`0.7 a 0.3 b`)")]
    return []


def check_sources(config: DataConfig) -> list[Problem]:
    found = []
    for name, source in config.sources.items():
        at = f"data.sources.{name}"
        if not source.paths:
            found.append(Problem(f"{at}.paths", list(source.paths), "needs a path to token files"))
        if any(is_number(word) for word in source.paths):
            rule = "must be prefixes without weights (they are shuffled as one; two weights are two sources)"
            found.append(Problem(f"{at}.paths", list(source.paths), rule))
        if source.weight is not None and not (math.isfinite(source.weight) and source.weight > 0):
            found.append(Problem(f"{at}.weight", source.weight, "must be a number > 0", {}, (1.0, None)))
        if source.tokens is not None and source.tokens < 1:
            found.append(Problem(f"{at}.tokens", source.tokens, "must be an integer >= 1", {}, (None,)))
        if source.tokens is not None and source.weight is not None:
            found.append(
                Problem(
                    f"{at}.tokens",
                    source.tokens,
                    "excludes a weight of the same source",
                    {f"{at}.weight": source.weight},
                    (None,),
                )
            )
    return found + check_some_weights(config)


def check_some_weights(config: DataConfig) -> list[Problem]:
    """Either all or none of the sources without a number of tokens have a weight."""
    loose = {name: source for name, source in config.sources.items() if source.tokens is None}
    weighted = {
        f"data.sources.{name}.weight": source.weight for name, source in loose.items() if source.weight is not None
    }
    without = [name for name, source in loose.items() if source.weight is None]
    if not weighted or not without:
        return []
    return [
        Problem(f"data.sources.{name}.weight", None, "is required where another source has a weight", weighted, (1.0,))
        for name in without
    ]


def check_pairs(config: DataConfig) -> list[Problem]:
    """Pairs are put together by themselves, and need attention inside documents."""
    if not config.pairs:
        return []
    because, found = {"data.pairs": list(config.pairs)}, list[Problem]()
    if config.packing != "off":
        rule = "has no effect with data.pairs: whole pairs are packed"
        found.append(problem("data", config, "packing", rule, because, ("off",)))
    if config.document_attention is False:
        rule = "must be true with data.pairs, whose answers must not see each other"
        found.append(problem("data", config, "document_attention", rule, because, (True,)))
    return found


def check_chats(config: DataConfig) -> list[Problem]:
    """Chats are put together by themselves, and need attention inside documents; files of them need a tokenizer."""
    if not config.chats:
        return no_effect("data", config, ("template", "bad_chats", "too_long"), "data.chats", {"data.chats": []})
    because, found = {"data.chats": list(config.chats)}, check_words("data.chats", config.chats)
    if config.packing != "off":
        rule = "has no effect with data.chats: whole chats are packed"
        found.append(problem("data", config, "packing", rule, because, ("off",)))
    if config.document_attention is False:
        rule = "must be true with data.chats, which must not see each other"
        found.append(problem("data", config, "document_attention", rule, because, (True,)))
    read = chat_files((*config.chats, *(path for paths in config.valid.values() for path in paths)))
    if read and config.tokenizer is None:
        rule = "is required with data.chats: a tokenizer.json, a folder that holds one, or `bytes`"
        found.append(problem("data", config, "tokenizer", rule, because, ("bytes",)))
    return found


def check_text(config: DataConfig) -> list[Problem]:
    if config.pairs or config.chats:
        return no_effect("data", config, ("json_keys", "text_errors"), "data.text", {"data.text": []})
    if not config.text:
        return no_effect("data", config, ("json_keys", "text_errors", "cache"), "data.text", {"data.text": []})
    if config.tokenizer is None and config.text:
        rule = "is required with data.text: a tokenizer.json, a folder that holds one, or `bytes`"
        return [problem("data", config, "tokenizer", rule, {"data.text": list(config.text)}, ("bytes",))]
    return []


def check_split(config: DataConfig, evaluates: bool) -> list[Problem]:
    default = default_of(DataConfig, "split")
    try:
        train, valid, _ = parse_split(config.split)
    except ValueError:
        return [
            problem(
                "data",
                config,
                "split",
                "must be three numbers >= 0 (train,validation,test) with a sum > 0",
                {},
                (default,),
            )
        ]
    if train == 0:
        return [problem("data", config, "split", "leaves no tokens for training", {"train part": 0}, (default,))]
    if evaluates and valid == 0 and not config.valid and not config.mock and config.source is None:
        because = {"validation part": 0, "data.valid": {}}
        return [
            problem(
                "data",
                config,
                "split",
                "leaves no tokens for the evaluations of train.eval_interval",
                because,
                (default,),
            )
        ]
    return []


def check_valid(config: DataConfig, evaluates: bool) -> list[Problem]:
    found = [
        Problem(f"data.valid.{name}", (), "needs a path to token files")
        for name, paths in config.valid.items()
        if not paths
    ]
    found += [p for name, paths in config.valid.items() for p in check_words(f"data.valid.{name}", paths)]
    if VALID in config.valid and (config.mock or config.source is not None or parts_of(config.split)[1] > 0):
        rule = "is the name of the validation part of data.split; give the set another name, or that part 0"
        found.append(Problem(f"data.valid.{VALID}", list(config.valid[VALID]), rule, {"data.split": config.split}))
    if config.valid and not evaluates:
        found += no_effect("data", config, ("valid",), "train.eval_interval", {"train.eval_interval": None})
    return found


def parts_of(split: str) -> tuple[float, float, float]:
    try:
        return parse_split(split)
    except ValueError:  # has its own problem
        return 1.0, 0.0, 0.0


def check_files(config: DataConfig) -> list[Problem]:
    sets = {"data.paths": config.paths}
    sets |= {f"data.sources.{name}.paths": source.paths for name, source in config.sources.items()}
    sets |= {f"data.valid.{name}": paths for name, paths in config.valid.items()}
    found: list[Problem] = []
    sets |= {"data.chats": config.chats}
    for field, given in sets.items():
        prefixes, weights = prefixes_and_weights(given)
        for i, path in enumerate(prefixes):
            if config.chats and is_chat_file(path):
                if not (os.path.exists(path) or glob.glob(path, recursive=True)):
                    rule = "must be a file of chats (.jsonl, .parquet), or a pattern that matches some"
                    found.append(missing_data(f"{field}.{2 * i + 1 if weights else i}", path, rule))
                continue
            prefix = strip_suffix(path)
            suffixes = (".bins" if os.path.exists(prefix + ".bins") else ".bin", ".idx")  # .bins: a merged set
            absent = [prefix + suffix for suffix in suffixes if not os.path.exists(prefix + suffix)]
            if absent and not is_number(path):  # a stray weight has its own problem
                at = f"{field}.{2 * i + 1 if weights else i}"
                found.append(missing_data(at, path, f"{' and '.join(absent)} must exist", ".idx"))
    for i, path in enumerate(config.text):
        if not (os.path.exists(path) or glob.glob(path, recursive=True)):
            found.append(missing_data(f"data.text.{i}", path, "must be a file, a folder or a glob that matches some"))
    for i, path in enumerate(config.pairs):
        prepared, weight = path not in pair_files(config.pairs), is_number(path)
        if not weight and not os.path.exists(f"{strip_suffix(path)}.idx" if prepared else path):
            rule = "must exist: a .jsonl file, or the prefix of token files prepared from one"
            found.append(missing_data(f"data.pairs.{i}", path, rule, ".idx" if prepared else ""))
    if config.template is not None and not os.path.isfile(config.template):
        found.append(missing_data("data.template", config.template, "must be a Jinja file with a chat template"))
    return found + check_tokenizer(config)


def check_tokenizer(config: DataConfig) -> list[Problem]:
    path = config.tokenizer
    if path in (None, BYTES) or os.path.isfile(path) or (path.startswith(NULL) and path.removeprefix(NULL).isdecimal()):
        return []
    if os.path.isdir(path):
        held = any(Path(path, name).exists() for name in TOKENIZER_FILES) or list(Path(path).glob("*.tiktoken"))
        return (
            []
            if held
            else [
                missing_data(
                    "data.tokenizer", path, f"must hold one of {', '.join(TOKENIZER_FILES)}, or a .tiktoken file"
                )
            ]
        )
    return [missing_data("data.tokenizer", path, "must be a tokenizer file, a folder that holds one, bytes, or null:N")]
