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
from dataclasses import field, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, ConfigError, Problem
from phalanx.checkpoint.adapters import PREFIX
from phalanx.checkpoint.lora_folder import DOWN, LENGTHS, UP, LoRAFolder, check_base, read_lora_folder
from phalanx.checkpoint.storage import Receipt
from phalanx.checkpoint.tensors import Index, Stored, StoredBox
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.layout.box import Box
from phalanx.nn.adapted_linear import AdaptedMethod
from phalanx.nn.adapter import Adapter, AdapterConfig, LinearPiece
from phalanx.nn.initial import ONES
from phalanx.nn.module import Block
from phalanx.planning.adapters import linear_shapes

METHOD, WITH_LENGTHS = f"{__name__}:StackedLoRA", f"{__name__}:StackedDoRA"
NONE = 0  # the number of no adapter


@dataclass(frozen=True, kw_only=True)
class StackedConfig:
    """Of each adapter, by name of the weight that it belongs to: ranks and scales of what it adds (of one product, or
    of several), and the weights whose rows get lengths."""

    ranks: list[dict[str, list[int]]] = field(default_factory=list)
    scales: list[dict[str, list[float]]] = field(default_factory=list)
    lengths: list[list[str]] = field(default_factory=list)


class StackedLoRA(Adapter):
    """All adapters of one matrix."""

    Config = StackedConfig
    linear = True

    def __init__(self, piece: LinearPiece, config: Any):
        super().__init__(piece, config)
        self.ranks = [sum(of_one.get(piece.name, [])) for of_one in config.ranks]
        self.lora_A = self.down(piece, sum(self.ranks))
        self.lora_B = self.up(piece, sum(self.ranks))
        self.tokens: TokenAdapters | None = None
        self.factors = torch.zeros(1 + len(self.ranks), sum(self.ranks), dtype=torch.float64)
        for number, begin in enumerate(starts(self.ranks)):
            for rank, scale in zip(*(of_all[number].get(piece.name, []) for of_all in (config.ranks, config.scales))):
                self.factors[1 + number, begin : begin + rank] = scale
                begin += rank

    def begin(self, tokens: TokenAdapters, like: Tensor) -> None:
        """From now on `tokens` says which token has which; `like`: where, and in which dtype, they are."""
        self.tokens, self.factors = tokens, self.factors.to(like.device, like.dtype)

    @property
    def known_tokens(self) -> TokenAdapters:
        if self.tokens is None:
            raise RuntimeError("adapters of several requests are computed by an engine alone")
        return self.tokens

    def delta(self, x: Tensor) -> Tensor:
        narrow = self.lora_A(x)
        return self.lora_B(narrow * self.factors[self.known_tokens.here])


class StackedDoRA(StackedLoRA):
    """The same, where some have lengths: what a token's adapter gives together with the matrix is multiplied by their
    ratio to the lengths of the rows of both (nn/adapters/dora.py), which are computed once."""

    Config = StackedConfig
    reads_base = True

    def __init__(self, piece: LinearPiece, config: Any):
        super().__init__(piece, config)
        self.with_lengths = [number for number, names in enumerate(config.lengths) if piece.name in names]
        for number in self.with_lengths:
            setattr(self, lengths_of(number), self.per_output(piece, ONES))
        self._ratios: Tensor | None = None

    def combine(self, base: Tensor, delta: Tensor) -> Tensor:
        if not self.with_lengths:
            return base + delta
        if self._ratios is None:
            raise RuntimeError("adapters with lengths are settled before they are used")
        return (base + delta) * self._ratios[self.known_tokens.of(len(base))]

    def settle(self) -> None:
        """(1 + adapters, outputs here), 1 for those without lengths."""
        if not self.with_lengths:
            return
        weight, first, second = (_wide(t) for t in (self.piece.weight, self.lora_A.weight, self.lora_B.weight))
        ratios = torch.ones(1 + len(self.ranks), len(weight), dtype=weight.dtype, device=weight.device)
        begins = starts(self.ranks)
        for number in self.with_lengths:
            own = slice(begins[number], begins[number] + self.ranks[number])
            scales = self.factors[1 + number, own].to(weight.device, weight.dtype)
            whole = weight + (second[:, own] * scales) @ first[own]
            length = self.piece.sum_over_inputs((whole * whole).sum(-1)).sqrt()
            ratios[1 + number] = _wide(getattr(self, lengths_of(number)).weight) / length
        self._ratios = ratios.to(self.piece.weight.dtype)


def lengths_of(number: int) -> str:
    """The attribute of an adapter's lengths."""
    return f"lora_magnitude_vector_{number}"


def _wide(x: Tensor) -> Tensor:
    """In fp64 if it is, else in fp32; without gradients."""
    x = x.detach()
    return x if x.dtype.itemsize == 8 else x.float()


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
        self.gathered = self.here  # those of all ranks of tp
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
        self.gathered = mesh.cp.own_rows(self._of_rows[owners])
        self.here = mesh.tp.own_rows(self.gathered)

    def of(self, count: int) -> Tensor:
        """Of so many tokens: this rank's, or those that a linear has gathered over tp."""
        return self.here if count == len(self.here) else self.gathered


@dataclass(frozen=True)
class ServedAdapters:
    """folders: by name. every: which of them requests have that name none; None: none."""

    folders: Mapping[str, LoRAFolder]
    every: str | None = None

    @property
    def section(self) -> AdapterConfig:
        """The `lora` section of a run whose linears have them all."""
        folders = self.folders.values()
        ranks = [{name: [term.rank for term in terms] for name, terms in f.terms.items()} for f in folders]
        scales = [{name: [term.scale for term in terms] for name, terms in f.terms.items()} for f in folders]
        targets, lengths = list(dict.fromkeys(name for each in ranks for name in each)), [f.lengths for f in folders]
        config: Any = StackedLoRA.Config  # with the fields that all methods share
        method = WITH_LENGTHS if any(lengths) else METHOD
        own = {"ranks": ranks, "scales": scales, "lengths": [sorted(each) for each in lengths]}
        section: AdapterConfig = config(method=method, targets=targets, **own)
        return section

    @property
    def index(self) -> Index:
        """Where the values of what is stacked lie."""
        found: Index = {}
        for name in self.section.targets:
            module = name.removesuffix(".weight")
            found[module + DOWN] = self._stacked(name, 0)
            found[module + UP] = self._stacked(name, 1)
            for number, folder in enumerate(self.folders.values()):
                if name in folder.lengths:
                    shape = folder.shapes[module + LENGTHS]
                    part = StoredBox(folder.file, PREFIX + module + LENGTHS, Box.full(shape))
                    found[f"{module}.{lengths_of(number)}"] = Stored(shape, [part])
        return found

    def _stacked(self, name: str, dim: int) -> Stored:
        """Of all adapters of a matrix, those of its inputs (dim 0) or of its outputs, by rank one after another."""
        module, parts, begin, width = name.removesuffix(".weight"), list[StoredBox](), 0, 0
        for folder in self.folders.values():
            for term in folder.terms.get(name, ()):
                own = module + (term.up if dim else term.down)
                width = folder.shapes[own][1 - dim]
                low, high = [0, 0], [width, width]
                low[dim], high[dim] = begin, begin + term.rank
                parts.append(StoredBox(folder.file, PREFIX + own, Box(tuple(low), tuple(high))))
                begin += term.rank
        return Stored((begin, width) if dim == 0 else (width, begin), parts)

    @property
    def receipts(self) -> dict[str, Receipt | None]:
        return {folder.file: folder.receipt for folder in self.folders.values()}


def with_adapters(run: Run, given: Mapping[str, str], every: str | None = None) -> tuple[Run, ServedAdapters | None]:
    """A run whose linears have several adapters, from folders by name. every: as in ServedAdapters. ConfigError names
    all that cannot be served."""
    if not given:
        return run, None
    problems, folders = list[Problem](), dict[str, LoRAFolder]()
    if run.model.reads_beside or run.model.reads_units:
        rule = "is not built for a model with an encoder or a vision tower, whose tokens are not the text's: merge it "
        rule += "(phalanx export ADAPTER --merge --base FOLDER), and name the merged folder"
        because = {"model.family": run.model.family}
        raise ConfigError([Problem("--adapter", ", ".join(given), rule, because, where="command line")])
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
