"""How adapters of a model are merged into its weights, and what a folder of PEFT says of its own."""

from __future__ import annotations

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.adapters import adapter_source
from phalanx.checkpoint.lora_folder import STARTED_FROM, read_peft_config
from phalanx.checkpoint.merge import Merging
from phalanx.models.model_config import ModelConfig
from phalanx.nn.adapted_linear import pieces_of
from phalanx.nn.adapter import AdapterConfig, find_adapter
from phalanx.planning.adapters import adapted_names, linears_in, quantized_names
from phalanx.planning.blocks import exported_shapes, whole_model, whole_specs


def merging_of(model: ModelConfig, lora: AdapterConfig) -> Merging:
    """How adapters of this section are merged into a model's weights. CheckpointError for a method that cannot be."""
    method = find_adapter(lora.method)
    if not method.merges():
        raise CheckpointError(f"adapters of the method {lora.method} cannot be merged: it has no `merge`")
    specs, shapes = [spec for spec in whole_specs(model) if spec.exported], exported_shapes(model)
    transposed = frozenset(piece.name for spec in specs for piece in spec.pieces if piece.transposed)
    transposed |= frozenset(adapted_names(model).embeddings)  # (vocabulary, width)
    wide = frozenset(piece.name for spec in specs for piece in spec.pieces if not spec.trained)
    found = [piece for linear in linears_in(whole_model(model)) for piece in pieces_of(linear)]
    stacks = {f"{piece.stack}.weight": piece.name for piece in found if piece.stack is not None}
    return Merging(method, lora, shapes, transposed, wide, quantized_names(model, lora), stacks, model.tied)


def section_of_folder(folder: str) -> tuple[AdapterConfig, str | None]:
    """The `lora` section that says what the adapters of a folder of PEFT do, and the base that the folder names."""
    found = adapter_source(folder)
    stated = read_peft_config(found.path, STARTED_FROM)
    fields = find_adapter("lora").from_peft(stated)
    base = stated.get("base_model_name_or_path")
    return find_adapter(fields["method"]).Config(**fields), None if base is None else str(base)
