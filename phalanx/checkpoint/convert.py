"""Export and import: from a checkpoint to a Hugging Face folder, and from third-party folders to one, each with a
report of what was compared.

No code from a folder is run: safetensors and JSON are read, and the metadata of torch's distributed checkpoints goes
through an unpickler that accepts only their data classes.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from enum import EnumMeta
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.adapters import adapter_folder, check_wanted
from phalanx.checkpoint.contents import WEIGHTS, Contents
from phalanx.checkpoint.gather import plan_whole
from phalanx.checkpoint.hf_files import INDEX, adapt, read_config, same_values
from phalanx.checkpoint.load import fitting
from phalanx.checkpoint.manifest import inside
from phalanx.checkpoint.places import missing, place
from phalanx.checkpoint.readers.fp8 import with_scaled
from phalanx.checkpoint.readers.megatron import MegatronBox, with_megatron
from phalanx.checkpoint.readers.mxfp4 import with_packed
from phalanx.checkpoint.save import MAX_FILE_BYTES, TOKENIZER_FILES
from phalanx.checkpoint.storage import Storage, sum_of, write_file
from phalanx.checkpoint.tensors import PlainFile, Stored, StoredBox, write_tensors
from phalanx.checkpoint.tools import index_text, new_folder, write_weights
from phalanx.layout.box import Box

REPORT = "parity.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
DCP_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "Metadata",
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "TensorStorageMetadata",
        "StorageMeta",
    },
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}
# the second is Python 3.13's
PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")}


def export(path: str | Path, out: str | Path, dtype: str | None = None) -> Path:
    """The weights of a checkpoint as a separate Hugging Face folder, rounded once from the masters to `dtype` (default:
    that of the run).

    Its report compares what was written, read back, with the masters.
    """
    with Contents(path) as contents:
        check_wanted(contents.weights, adapter_folder(contents.weights), {})

        def rounded(name: str, like: Tensor) -> Tensor:
            return contents.read(contents.best, name).to(like.dtype)

        folder = write_weights(contents, out, rounded, DTYPES[dtype] if dtype else None)
        truth = ((name, contents.read(contents.best, name)) for name in contents.shapes(WEIGHTS))
        return report(folder, truth, f"{contents.best} of {contents.path}")


def report(folder: Path, truth: Iterator[tuple[str, Tensor]], source: str) -> Path:
    """Write a report beside the weights: which values differ from the truth and by how much, for each tensor.
    CheckpointError if rounding does not explain it."""
    lines, wrong = {}, []
    with Contents(folder) as written:
        for name, wanted in truth:
            found = written.read(WEIGHTS, name)
            difference = (found.double() - wanted.double()).abs()
            lines[name] = {
                "shape": list(found.shape),
                "dtype": str(found.dtype).removeprefix("torch."),
                "differing": int((difference != 0).sum()),
                "largest": float(difference.max()) if difference.numel() else 0.0,
            }
            if not torch.equal(found, wanted.to(found.dtype)):
                wrong.append(name)
    files = {path.name: sum_of(path) for path in sorted(folder.glob("*.safetensors"))}
    text = json.dumps(
        {
            "compared_with": source,
            "exact": not any(line["differing"] for line in lines.values()),
            "xxh3": files,
            "tensors": lines,
        }
    )
    write_file(Storage(), folder / REPORT, [text.encode()])
    if wrong:
        raise CheckpointError(f"{folder} does not hold what was to be written: {', '.join(wrong[:5])}")
    return folder


def import_weights(
    path: str | Path, out: str | Path, config: str | Path, wanted: dict[str, tuple[int, ...]], prefix: str = ""
) -> Path:
    """A Hugging Face folder from safetensors files or a torch distributed checkpoint, whatever its metadata. Weights
    packed as MXFP4, or as FP8 with scales, become plain numbers in the dtype that the config names (bf16 holds every
    value of MXFP4).

    config      a folder with config.json (and tokenizer), which are copied into the result
    wanted      names and shapes that the model of that config has; everything else is an error that names it
    prefix      what the names begin with in `path` and not in the model, such as `model.` in a trainer's state
    """
    given = place(path)
    if not given.is_dir():
        raise CheckpointError(missing(given, "folder"))
    with ExitStack() as opened:
        source = DcpFolder(given) if (given / ".metadata").is_file() else SafetensorsFolder(given, opened)
        named = {name: shape for name, shape in source.shapes.items() if name.startswith(prefix)}
        index = {
            n.removeprefix(prefix): Stored(shape, [StoredBox("", n, Box.full(shape))]) for n, shape in named.items()
        }
        config_json = read_config(config)
        index = with_scaled(
            with_packed(with_megatron(index, wanted, config_json, str(given)), str(given)), config_json, str(given)
        )
        same = partial(same_values, files=lambda file: source)
        index = fitting(adapt(index, wanted, str(config), same), wanted, str(given))
        folder = new_folder(out)
        entries = ((name, s.shape, _dtype(s, source, config_json)) for name, s in index.items())
        files = plan_whole(entries, MAX_FILE_BYTES)
        for file in files:
            tensors = (_whole(index[job.name], source).to(job.dtype) for job in file.jobs)
            write_tensors(
                Storage(), folder / file.name, [(job.name, job.shape, job.dtype) for job in file.jobs], tensors
            )
        if len(files) > 1:
            write_file(Storage(), folder / INDEX, [index_text(files)])
        plain = {key: value for key, value in config_json.items() if key != "quantization_config"}
        write_file(Storage(), folder / "config.json", [json.dumps(plain, indent=2).encode()])
        for name in ("generation_config.json", *TOKENIZER_FILES):
            if (Path(config) / name).is_file():
                shutil.copyfile(Path(config) / name, folder / name)
        return report(folder, ((name, _whole(stored, source)) for name, stored in index.items()), str(given))


def _whole(stored: Stored, source: SafetensorsFolder | DcpFolder) -> Tensor:
    """All of a tensor, as plain numbers."""
    return stored.parts[0].read(lambda file: source, Box.full(stored.shape).slices())


def _dtype(stored: Stored, source: SafetensorsFolder | DcpFolder, config: dict[str, Any]) -> torch.dtype:
    """The dtype in which a tensor is written: its own, or the config's if it is packed."""
    part = stored.parts[0]
    if type(part) in (StoredBox, MegatronBox):
        return source.dtype(part.key)
    found = getattr(
        torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."), None
    )
    return found if isinstance(found, torch.dtype) and found in DTYPES.values() else torch.bfloat16


class SafetensorsFolder:
    """Every tensor of every safetensors file of a folder."""

    def __init__(self, folder: Path, opened: ExitStack):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, PlainFile] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = opened.enter_context(PlainFile(path))
            for name in file.keys():
                if name in self.shapes:
                    raise CheckpointError(f"{folder}: {name} is in two files, {path.name} is one of them")
                self.shapes[name], self._files[name] = file.shape(name), file
        if not self.shapes:
            raise CheckpointError(
                f"{folder} holds no .safetensors files and no .metadata (pickled .bin and .pt files are not read)"
            )

    def dtype(self, name: str) -> torch.dtype:
        return self.read(name).dtype

    def read(self, name: str, where: tuple[slice, ...] = ()) -> Tensor:
        return self._files[name].read(name, where)


class DcpFolder:
    """The tensors of a checkpoint of torch.distributed.checkpoint."""

    def __init__(self, folder: Path):
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.folder, self._metadata = folder, _dcp_metadata(folder / ".metadata")
        entries = {n: m for n, m in self._metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
        self.shapes = {name: tuple(entry.size) for name, entry in entries.items()}
        self._dtypes = {name: entry.properties.dtype for name, entry in entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[name]

    def read(self, name: str, where: tuple[slice, ...] = ()) -> Tensor:
        """A box of a tensor. They are stored by torch.save and read with weights_only=True, as torch's own reader
        does."""
        if self._stacked(name) and where and where[0].stop - where[0].start == 1:
            return self._read(f"{name}@{where[0].start}")[:, *where[1:]]
        return self._read(name)[where]

    def _read(self, name: str) -> Tensor:
        from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load

        class Reader(FileSystemReader):
            def read_metadata(reader, *args: Any, **kwargs: Any) -> Any:
                return self._metadata

        entry = self._metadata.state_dict_metadata[name]
        found = {name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)}
        try:
            with warnings.catch_warnings(action="ignore"):  # a warning that there is only one process
                load(found, storage_reader=Reader(self.folder), no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{self.folder}: {name} cannot be read: {type(cause).__name__}: {cause}") from error
        return found[name]

    def _stacked(self, name: str) -> bool:
        """Whether a tensor was stored row by row of its first dim, such as stacked layers: each row then becomes a
        tensor of its own."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

        entries, data = self._metadata.state_dict_metadata, self._metadata.storage_data
        entry = entries[name]
        if any(chunk.sizes[0] != 1 for chunk in entry.chunks):
            return False
        for row in range(entry.size[0] if f"{name}@0" not in entries else 0):
            chunks = [replace(c, offsets=torch.Size((0, *c.offsets[1:]))) for c in entry.chunks if c.offsets[0] == row]
            entries[f"{name}@{row}"] = TensorStorageMetadata(entry.properties, torch.Size((1, *entry.size[1:])), chunks)
            for chunk in chunks:
                stored = data[MetadataIndex(name, (row, *chunk.offsets[1:]))]
                data[MetadataIndex(f"{name}@{row}", chunk.offsets)] = stored
        return True


class _OnlyDcp(pickle.Unpickler):
    """Accepts the data classes of torch.distributed.checkpoint, sizes and dtypes; a file that asks for anything else is
    refused."""

    def find_class(self, module: str, name: str) -> Any:
        of_torch = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        if of_torch or name in DCP_NAMES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) in PATHS:
            return PurePosixPath
        if (module, name) == ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"):
            from torch.distributed.checkpoint.metadata import Metadata

            return type(name, (Metadata,), {})  # a class with the same fields, and one more about optimizers
        if (module, name) == ("builtins", "getattr"):
            return _member  # how Python before 3.11.4 pickles a member of an enumeration
        raise CheckpointError(f"asks for {module}.{name}, which has no place in the metadata of a checkpoint")


def _member(kind: Any, name: Any) -> Any:
    """A member of an enumeration by its name; anything else is refused."""
    if not (isinstance(kind, EnumMeta) and isinstance(name, str) and name in kind.__members__):
        raise CheckpointError(f"asks for {name!r} of {kind!r}, which has no place in the metadata of a checkpoint")
    return kind[name]


def _dcp_metadata(path: Path) -> Any:
    try:
        metadata = _OnlyDcp(io.BytesIO(path.read_bytes())).load()
        odd = [
            info.relative_path
            for info in metadata.storage_data.values()
            if not inside(info.relative_path) or "/" in info.relative_path
        ]
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: it {error}") from error
    except Exception as error:  # damaged bytes can raise anything in an unpickler
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if odd:
        raise CheckpointError(f"{path} names files outside its folder: {', '.join(map(repr, odd[:3]))}")
    return metadata
