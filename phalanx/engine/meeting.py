"""What ranks compare as soon as they have met: one config, one program, the same data. If they differ, no rank trains.

A path stands for its contents: token files, a tokenizer or weights may have different names on different machines. What
only rank 0 uses (`log`, `model_source`) or decides (`dir`), or a launcher reads (`cluster`), is not compared.
Everything is text: nothing sent by another process is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, PhalanxError, Problem
from phalanx.base.log import Log, ranks_text
from phalanx.base.placement import Placement
from phalanx.base.version import VERSION
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.manifest import NAME as MANIFEST
from phalanx.comm.axis import Axis
from phalanx.comm.host import host_axis
from phalanx.comm.mesh import Mesh, join_world, leave_world, local_device
from phalanx.config.run import Run
from phalanx.config.write import to_dict
from phalanx.data.config import DataConfig, is_number
from phalanx.data.index import Corpus
from phalanx.data.scores import ScoreFile
from phalanx.forecast.capacity import DoesNotFit
from phalanx.nn.objective import make_objective
from phalanx.planning.plan import grid_of
from phalanx.preflight.first_seconds import FirstSeconds
from phalanx.text.tokenizer import load_tokenizer

NOT_COMPARED = ("dir", "log", "model_source", "cluster")
UNSET = "unset"
SAMPLES, SAMPLE = 16, 2**12  # of a large file: pieces, and bytes of each
SMALL = 2**20  # bytes of a file that is read whole
LONGEST = 100  # characters of a value in a message
MOST_VALUES = 6  # different values of a field in a message
SAME_CONFIG = "must be the same on all ranks: start every one with the same config and overrides"
SAME_PROGRAM = "must be the same on all ranks: install one version on every machine"
SAME_DEVICE = "must be the same on all ranks: set train.device, or leave out the machines that differ"
SAME_CONTENTS = "must hold the same on all ranks, whatever its name is: copy one machine's to the others"


@dataclass(frozen=True)
class Identity:
    """What a rank brings to the meeting. `values`: nested, of plain types; `names`: by dotted key, the path in the
    config where a value is the contents of a path; `refused`: why its machine cannot hold its ranks."""

    values: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    refused: str = ""

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps(self.values, sort_keys=True).encode())


def identity(
    run: Run, device: torch.device, data: DataConfig | None = None, facts: Mapping[str, Any] | None = None
) -> Identity:
    """The identity of this rank. data: the run's, with its text prepared into token files, None: not opened; facts:
    what was read from them (resume.facts)."""
    values: dict[str, Any] = json.loads(json.dumps(to_dict(run)))
    for name in NOT_COMPARED:
        del values[name]
    names = replace_paths(values, run, data or run.data) if data is not None else {}
    values["device kind"] = device.type
    values["versions"] = {"phalanx": VERSION, "torch": torch.__version__}
    values["tokens read"] = dict(facts or {})
    return Identity(values, names)


def replace_paths(values: dict[str, Any], run: Run, data: DataConfig) -> dict[str, str]:
    """Replace paths by their contents; returns what the paths were, by key."""
    names: dict[str, str] = {}

    def contents(section: dict[str, Any], at: str, key: str, held: Any, name: Any) -> None:
        section[key] = held
        names[f"{at}{key}"] = " ".join(map(str, name)) if isinstance(name, (list, tuple)) else str(name)

    given = values["data"]
    if run.data.paths:
        contents(given, "data.", "paths", token_files(run.data.paths), run.data.paths)
    for name, source in run.data.sources.items():
        contents(given["sources"][name], f"data.sources.{name}.", "paths", token_files(source.paths), source.paths)
    for name, paths in run.data.valid.items():
        contents(given["valid"], "data.valid.", name, token_files(paths), paths)
    task = make_objective(run.task)
    if task.scores is not None:
        name = task.scores_field.removeprefix("task.")
        contents(values["task"], "task.", name, ScoreFile(task.scores).checksum, task.scores)
    if run.data.pairs:
        given["cache"] = None
        contents(given, "data.", "pairs", token_files(data.pairs), run.data.pairs)
    if run.data.text:
        given["cache"] = None
        contents(
            given,
            "data.",
            "text",
            [held for s in data.sources.values() for held in token_files(s.paths)],
            run.data.text,
        )
    if run.data.tokenizer is not None:
        contents(given, "data.", "tokenizer", load_tokenizer(run.data.tokenizer).fingerprint, run.data.tokenizer)
    if run.init_from is not None:
        contents(values, "", "init_from", folder(Path(run.init_from)), run.init_from)
    if run.checkpoint.load is not None:
        contents(values["checkpoint"], "checkpoint.", "load", checkpoint(run.checkpoint.load), run.checkpoint.load)
    return names


def token_files(words: Iterable[str]) -> list[str]:
    """From prefixes with or without weights before them: the weights as they are, and size and checksums for each
    prefix."""
    return [word if is_number(word) else token_file(word) for word in words]


def token_file(prefix: str) -> str:
    """The size of its .bin, the checksum of its .idx, and a digest of the checksums of the .bin and of files
    beside it, if they have any."""
    corpus = Corpus(prefix)
    size = sum(size for _, size in corpus.bins)
    sums = [segment for file in corpus.checked_files for segment in file.segments or ()]
    known = f", .bin {xxhash.xxh3_64_hexdigest(repr(sums).encode())}" if sums else ""
    return f"{size} bytes, .idx {corpus.idx_xxh3}{known}"


def folder(path: Path) -> str:
    """Names, sizes and (of large files some of) the bytes of the files of a model's folder."""
    total = xxhash.xxh3_64()
    try:
        for file in sorted(
            file for file in path.iterdir() if file.suffix in (".json", ".safetensors", ".bin", ".model")
        ):
            size = file.stat().st_size
            total.update(f"{file.name} {size}".encode())
            total.update(file.read_bytes() if size <= SMALL else sampled(file, size))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"files {total.hexdigest()}"


def sampled(file: Path, size: int) -> bytes:
    """Some samples of a file's bytes, including its beginning and its end."""
    with open(file, "rb") as opened:
        pieces = []
        for i in range(SAMPLES):
            opened.seek((size - SAMPLE) * i // (SAMPLES - 1))
            pieces.append(opened.read(SAMPLE))
    return b"".join(pieces)


def checkpoint(path: str) -> str:
    """The manifest of the checkpoint at a path, which has the checksum of every file."""
    try:
        return f"manifest {xxhash.xxh3_64_hexdigest((find(path) / MANIFEST).read_bytes())}"
    except (OSError, PhalanxError) as error:
        return f"cannot be read: {error}"


# ---- the comparison ------------------------------------------------------------------------------


def meet(rank: int, world: int, mine: Identity, folder: str, timeout_s: float) -> str:
    """Compare identities right after joining the world. Returns the run's folder as rank 0 names it; ConfigError on
    every rank if anything differs.

    Uses a separate communicator between hosts, because ranks may even differ in the kind of their devices.
    """
    if world == 1:
        return folder
    axis = host_axis(Axis("world", tuple(range(world)), rank), timeout_s, timeout_s)
    try:
        return compare(axis, mine, folder)
    finally:
        dist.destroy_process_group(axis.group)


def compare(axis: Axis, mine: Identity, folder: str) -> str:
    """Compares refusals and digests first; everything only if digests differ."""
    sent = axis.all_gather_text(json.dumps([mine.digest, folder if axis.index == 0 else "", mine.refused]))
    met = [json.loads(text) for text in sent]
    if refused := refusals([why for _, _, why in met]):
        raise DoesNotFit("\n".join(refused))
    if len({digest for digest, _, _ in met}) > 1:
        everyone = [
            Identity(**json.loads(text))
            for text in axis.all_gather_text(json.dumps({"values": mine.values, "names": mine.names}))
        ]
        raise ConfigError(problems(everyone))
    return str(met[0][1])


def refusals(why: Sequence[str]) -> list[str]:
    """Each reason once, with the ranks that have it. why: by rank; empty: none."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(why):
        if text:
            ranks.setdefault(text, []).append(rank)
    return [f"{ranks_text(of)} on {text}" for text, of in ranks.items()]


def problems(everyone: Sequence[Identity]) -> list[Problem]:
    """A problem for each field in which ranks differ."""
    found = [problem(key, values, everyone) for key, values in differences([one.values for one in everyone])]
    plain = [p for p in found if not p.field.startswith("tokens read")]
    return plain or found  # the other fields explain why different tokens were read


def differences(values: Sequence[Any], path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """(dotted key, each rank's value) of everything that differs; for models of different families only the family."""
    if not all(isinstance(value, dict) for value in values):
        if any(value != values[0] or type(value) is not type(values[0]) for value in values):
            yield path, list(values)
        return
    keys = list(dict.fromkeys(key for value in values for key in value))
    if path == "model" and len({value.get("family") for value in values}) > 1:
        keys = ["family"]
    for key in keys:
        yield from differences([value.get(key, UNSET) for value in values], f"{path}.{key}" if path else key)


def problem(key: str, values: list[Any], everyone: Sequence[Identity]) -> Problem:
    """`because` names the ranks that have each value."""
    shown = [
        f"{one.names[key]} ({_text(value)})" if key in one.names else _short(value)
        for one, value in zip(everyone, values)
    ]
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(json.dumps(value, sort_keys=True), []).append(rank)
    because = {ranks_text(of): shown[of[0]] for of in list(ranks.values())[:MOST_VALUES]}
    if len(ranks) > MOST_VALUES:
        because["different values in all"] = len(ranks)
    if key.startswith("versions."):
        rule = SAME_PROGRAM
    elif key == "device kind":
        rule = SAME_DEVICE
    else:
        rule = (
            SAME_CONTENTS if any(key in one.names for one in everyone) or key.startswith("tokens read") else SAME_CONFIG
        )
    return Problem(key, shown[0], rule, because)


def _text(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _short(value: Any) -> Any:
    """A value too long for a message, as the beginning of its text."""
    text = json.dumps(value)
    return value if len(text) <= LONGEST else f"{text[:LONGEST]}..."


@contextmanager
def joined_mesh(
    run: Run,
    placement: Placement,
    mine: Identity,
    looks: FirstSeconds | None = None,
) -> Iterator[tuple[Mesh, str]]:
    """Meet the other ranks, and leave them at the end; gives the mesh, and the folder of the run as rank 0 names it.
    ConfigError on all ranks if they do not belong to one run, DoesNotFit if a machine cannot hold its ranks; the latter
    is found out before groups are created that depend on it; BadNode if a machine is bad. looks: how machines are
    looked at; None: without folders and data, and warnings go to the console.

    After an error inside, a rank with a GPU does not leave: NCCL's way out waits for kernels that wait for peers, which
    may be waiting for this rank, and the error would not be seen before the time limit. The end of the process frees
    all. A rank that is alone leaves, because its process may go on, as a notebook's does.
    """
    device, timeout_s = device_of(run, placement), run.train.timeout_s
    with ExitStack() as leaving:
        leaving.callback(leave_world)
        looks = looks or FirstSeconds(placement, timeout_s, Log(placement.rank))
        store = join_world(placement, device, timeout_s, looks.before_ranks_connect)
        mine = replace(mine, refused=placement.refused)
        folder = meet(placement.rank, placement.world_size, mine, run.dir, timeout_s)
        mesh = Mesh(grid_of(run, placement.world_size), placement.rank, device, timeout_s)
        leaving.callback(mesh.close)
        mesh.store = store
        try:
            yield mesh, folder
        except BaseException:
            if device.type == "cuda" and placement.world_size > 1:
                leaving.pop_all()
            raise


def device_of(run: Run, placement: Placement) -> torch.device:
    kind = run.train.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return local_device(kind, placement.local_rank)
