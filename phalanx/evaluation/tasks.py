"""Tasks of lm-evaluation-harness: by name from its package, or in a YAML file of the user's; their data from the Hub's
cache, from a folder, or beside the YAML file. Needs the extra `eval`.
"""

from __future__ import annotations

import difflib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry

from phalanx.base.errors import ConfigError, DataError, PhalanxError, Problem

BUILDERS = ("json", "csv", "parquet", "text", "arrow")  # names of file formats in place of a data set's
NEAR = 3  # names that are suggested
ONE_PROCESS = "DISABLE_MULTIPROC"  # the harness's environment variable
SEED, OTHER_SEED = 0, 1234  # the harness's own, of `random` and of everything else
SHOWN = 160  # characters of somebody else's message


def load_tasks(names: Sequence[str], data: str | None = None) -> dict[str, Any]:
    """What the harness evaluates: {"tasks": ..., "groups": ..., "group_map": ...}. data: a folder of data sets, each
    under its name on the Hub; None: the user's Hub cache, or the network.

    ConfigError for unknown names, DataError for data that is not here and for files that are no tasks.
    """
    from_package = any(not is_file(name) or "group:" in read_task(name) for name in names)
    manager = TaskManager(include_defaults=from_package)
    manager._factory = DataFactory(data)
    wanted: list[str] = []
    unknown: list[Problem] = []
    for name in names:
        found = [name] if is_file(name) else manager.match_tasks([name])
        wanted += found
        if not found:
            unknown.append(unknown_task(name, manager.all_tasks))
    if unknown:
        raise ConfigError(unknown)
    with harness_seeds():
        try:
            loaded: dict[str, Any] = dict(manager.load(list(dict.fromkeys(wanted))))
        except PhalanxError:
            raise
        except Exception as error:  # a task is a program, and this is whatever it raises
            raise DataError(f"{', '.join(names)}: not tasks: {first_line(error)}") from error
    raise_refused(loaded["tasks"])
    return loaded


def is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def read_task(path: str) -> str:
    """DataError for a file that is not there."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: a task's file that cannot be read: {error}") from None


def unknown_task(name: str, known: Sequence[str]) -> Problem:
    near = difflib.get_close_matches(name, known, NEAR) or [n for n in known if name.lower() in n.lower()][:NEAR]
    rule = "is no task of lm-evaluation-harness; a task of your own is named by its file, ./NAME.yaml"
    return Problem("--tasks", name, rule, {}, tuple(near), "command line")


def raise_refused(tasks: Mapping[str, Any]) -> None:
    """ConfigError for tasks that run a model's code here, or show it pictures."""
    found = []
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            found.append(
                Problem("--tasks", name, "runs code that the model wrote: not here, use a sandbox of your own")
            )
        if getattr(task, "MULTIMODAL", False):
            found.append(Problem("--tasks", name, "shows pictures or sounds, and the model reads text"))
        if task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"):
            found.append(Problem("--tasks", name, f"asks for {task.OUTPUT_TYPE}, which the engine does not answer"))
    if found:
        raise ConfigError(found)


class DataFactory(TaskFactory):
    """Makes tasks as the harness does, with their data from where the user has it."""

    def __init__(self, data: str | None):
        super().__init__()
        self._data = None if data is None else Path(data)

    def _load_full_config(self, entry: Entry, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        config = dict(super()._load_full_config(entry, overrides))
        name = config.get("dataset_path")
        if name in BUILDERS and entry.yaml_path is not None:
            given = dict(config.get("dataset_kwargs") or {})
            if "data_files" in given:
                config["dataset_kwargs"] = {**given, "data_files": found_beside(given["data_files"], entry)}
        elif self._data is not None and isinstance(name, str) and not Path(name).is_dir():
            folder = self._data / name
            if not folder.is_dir():
                raise DataError(f"{entry.name}: there is no folder {folder}; {how_to_get(name, str(self._data))}")
            config["dataset_path"] = str(folder)
        return config

    def _build_task(self, entry: Entry, overrides: dict[str, Any] | None) -> Task:
        config = self._load_full_config(entry, overrides)
        try:
            return super()._build_task(entry, overrides)
        except PhalanxError:
            raise
        except Exception as error:  # of the data sets' library, the Hub's, or the task's own program
            name = str(config.get("dataset_path", "of its program"))
            part = config.get("dataset_name")
            part = "" if part is None else f" ({part})"
            away = name not in BUILDERS and not Path(name).is_dir() and missing(error)
            hint = f"; {how_to_get(name, 'FOLDER')}" if away else ""
            raise DataError(
                f"{entry.name}: its data set {name}{part} cannot be used: {first_line(error)}{hint}"
            ) from None


def missing(error: Exception) -> bool:
    """Whether a data set is not here, rather than wrong."""
    return isinstance(error, OSError) or "cache" in str(error)


def how_to_get(name: str, folder: str) -> str:
    return (
        f"where there is a network, `hf download {name} --repo-type dataset --local-dir {folder}/{name}`, then "
        f"--data {folder}"
    )


def found_beside(files: Any, entry: Entry) -> Any:
    """Names of files, in lists and by split, of which each is looked for in this folder, then in that of the task's own
    file. DataError if it is in neither."""
    if isinstance(files, Mapping):
        return {split: found_beside(each, entry) for split, each in files.items()}
    if isinstance(files, list | tuple):
        return [found_beside(each, entry) for each in files]
    if "://" in files or "*" in files or Path(files).exists() or entry.yaml_path is None:
        return files
    beside = entry.yaml_path.parent / files
    if not beside.exists():
        raise DataError(f"{entry.yaml_path}: its data file {files} is neither here nor beside it")
    return str(beside)


def first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


@contextmanager
def harness_seeds() -> Iterator[None]:
    """Inside, the generators from which tasks draw are where the harness starts them."""
    state, numbers = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(OTHER_SEED)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)


@contextmanager
def drawn_in_this_process() -> Iterator[None]:
    """Inside, the harness draws for standard errors in this process, the same draws as its pool of processes: a rank
    has threads and perhaps a GPU, and must not fork."""
    before = os.environ.get(ONE_PROCESS)
    os.environ[ONE_PROCESS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ONE_PROCESS]
        else:
            os.environ[ONE_PROCESS] = before


def set_few_shot(tasks: Mapping[str, Any], count: int | None) -> None:
    """Examples before each question, as the harness sets them: a task that says 0 keeps it; None: as each task says."""
    for task in tasks.values():
        said = task.get_config("num_fewshot")
        if count is not None and said != 0:
            task.set_config(key="num_fewshot", value=count)
        elif said is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=OTHER_SEED)
