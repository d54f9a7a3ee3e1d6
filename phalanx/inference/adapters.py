"""Several LoRA adapters over one model, each request with its own, or with none.

The matrices of all adapters of a linear are stacked to one A (R, in) and one B (out, R), R the sum of their ranks.
Each token is multiplied by both; between them what is not its own adapter's becomes zero:

    y = W x + B (m[adapter of the token] * (A x))

where m has the adapters' scales. So two matmuls serve a batch with any mix of adapters, in CUDA graphs too, and what is
stacked is sharded over ranks as one adapter is. See Chen et al., "Punica" (2023), which gathers each token's matrices
instead: that pays when the ranks of all adapters add up to about the width of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.base.errors import CheckpointError, ConfigError, Problem
from phalanx.checkpoint.adapters import PREFIX
from phalanx.checkpoint.lora_folder import DOWN, UP, LoRAFolder, check_base, read_lora_folder
from phalanx.checkpoint.storage import Receipt
from phalanx.checkpoint.tensors import Index, Stored, StoredBox
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.layout.box import Box
from phalanx.nn.adapted_linear import AdaptedMethod
from phalanx.nn.adapter import Adapter, AdapterConfig, LinearPiece
from phalanx.nn.module import Block
from phalanx.planning.adapters import linear_shapes

METHOD = f"{__name__}:StackedLoRA"
NONE = 0  # the number of no adapter


@dataclass(frozen=True, kw_only=True)
class StackedConfig:
    """Of each adapter, by name of the weight that it belongs to: its rank, and its scale."""

    ranks: list[dict[str, int]] = field(default_factory=list)
    scales: list[dict[str, float]] = field(default_factory=list)


class StackedLoRA(Adapter):
    """All adapters of one matrix."""

    Config = StackedConfig
    linear = True

    def __init__(self, piece: LinearPiece, config: Any):
        super().__init__(piece, config)
        ranks = [of_one.get(piece.name, 0) for of_one in config.ranks]
        self.lora_A = self.down(piece, sum(ranks))
        self.lora_B = self.up(piece, sum(ranks))
        self.tokens: TokenAdapters | None = None
        self.factors = torch.zeros(1 + len(ranks), sum(ranks), dtype=torch.float64)
        for number, (rank, begin) in enumerate(zip(ranks, starts(ranks))):
            self.factors[1 + number, begin : begin + rank] = config.scales[number].get(piece.name, 0.0)

    def begin(self, tokens: TokenAdapters, like: Tensor) -> None:
        """From now on `tokens` says which token has which; `like`: where, and in which dtype, they are."""
        self.tokens, self.factors = tokens, self.factors.to(like.device, like.dtype)

    def delta(self, x: Tensor) -> Tensor:
        if self.tokens is None:
            raise RuntimeError("adapters of several requests are computed by an engine alone")
        narrow = self.lora_A(x)
        return self.lora_B(narrow * self.factors[self.tokens.here])


def starts(ranks: Iterable[int]) -> list[int]:
    """Where each adapter's rows begin in what is stacked."""
    found, at = [], 0
    for rank in ranks:
        found.append(at)
        at += rank
    return found


class TokenAdapters:
    """Which adapter each sequence has, and each of this rank's tokens in the step that is computed."""

    def __init__(self, served: ServedAdapters, rows: int, mesh: Mesh):
        """rows: of sequences that run."""
        self._numbers = {name: number for number, name in enumerate(served.folders, NONE + 1)}
        self._other = NONE if served.every is None else self._numbers[served.every]
        self.here = torch.zeros(0, dtype=torch.int64, device=mesh.device)
        self._mesh = mesh
        self._of_rows = torch.zeros(rows, dtype=torch.int64, device=mesh.device)
        self._known = [NONE] * rows

    def begin(self, row: int, adapter: str | None) -> None:
        """A sequence with this adapter has the row now."""
        number = self._other if adapter is None else self._numbers[adapter]
        if number != self._known[row]:
            self._known[row] = number
            self._of_rows[row] = number

    def choose(self, owners: Tensor) -> None:
        """owners (T,): rows of the sequences of a step's tokens, T what tp and cp divide."""
        mesh = self._mesh
        self.here = mesh.tp.own_rows(mesh.cp.own_rows(self._of_rows[owners]))


@dataclass(frozen=True)
class ServedAdapters:
    """folders: by name. every: which of them requests have that name none; None: none."""

    folders: Mapping[str, LoRAFolder]
    every: str | None = None

    @property
    def section(self) -> AdapterConfig:
        """The `lora` section of a run whose linears have them all."""
        ranks, scales = ([getattr(f, name) for f in self.folders.values()] for name in ("ranks", "scales"))
        targets = list(dict.fromkeys(name for each in ranks for name in each))
        config: Any = StackedLoRA.Config  # with the fields that all methods share
        section: AdapterConfig = config(method=METHOD, targets=targets, ranks=ranks, scales=scales)
        return section

    @property
    def index(self) -> Index:
        """Where the values of what is stacked lie."""
        found: Index = {}
        for name in self.section.targets:
            ranks = [folder.ranks.get(name, 0) for folder in self.folders.values()]
            for suffix, dim in ((DOWN, 0), (UP, 1)):
                own = name.removesuffix(".weight") + suffix
                found[own] = self._stacked(own, ranks, dim)
        return found

    def _stacked(self, own: str, ranks: list[int], dim: int) -> Stored:
        width = self._width(own, 1 - dim)
        parts = []
        for folder, rank, begin in zip(self.folders.values(), ranks, starts(ranks)):
            if rank:
                low, high = [0, 0], [width, width]
                low[dim], high[dim] = begin, begin + rank
                parts.append(StoredBox(folder.file, PREFIX + own, Box(tuple(low), tuple(high))))
        shape = (sum(ranks), width) if dim == 0 else (width, sum(ranks))
        return Stored(shape, parts)

    def _width(self, own: str, dim: int) -> int:
        """Inputs of a matrix A, outputs of a matrix B: of the first adapter that has one."""
        return next(f.shapes[own][dim] for f in self.folders.values() if own in f.shapes)

    @property
    def receipts(self) -> dict[str, Receipt | None]:
        return {folder.file: folder.receipt for folder in self.folders.values()}


def with_adapters(run: Run, given: Mapping[str, str], every: str | None = None) -> tuple[Run, ServedAdapters | None]:
    """A run whose linears have several adapters, from folders by name. every: as in ServedAdapters. ConfigError names
    all that cannot be served."""
    if not given:
        return run, None
    problems, folders = list[Problem](), dict[str, LoRAFolder]()
    if run.lora is not None:
        rule = "cannot be given for a run with an adapter of its own: name its base, and the run as --adapter NAME=RUN"
        raise ConfigError([Problem("--adapter", ", ".join(given), rule, where="command line")])
    able = linear_shapes(run.model)
    for name, path in given.items():
        try:
            folders[name] = read_lora_folder(path)
            check_base(folders[name], able)
        except CheckpointError as error:
            shown = path if name == path else f"{name}={path}"
            problems.append(Problem("--adapter", shown, str(error), where="command line"))
    if problems:
        raise ConfigError(problems)
    served = ServedAdapters(folders, every)
    return replace(run, lora=served.section), served


def with_adapter(run: Run, folder: str | None) -> tuple[Run, ServedAdapters | None]:
    """The same of one, which every request has."""
    return with_adapters(run, {} if folder is None else {folder: folder}, folder)


def give_tokens(blocks: Iterable[Block], tokens: TokenAdapters) -> None:
    """Adapters know from now on which token has which."""
    for block in blocks:
        for method in block.modules():
            if isinstance(method, AdaptedMethod):
                for _, adapter in method.adapters:
                    if isinstance(adapter, StackedLoRA):
                        adapter.begin(tokens, next(method.parameters()))
