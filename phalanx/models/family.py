"""Family: everything that Phalanx must know about a model family, as plain functions. Each of ours has a file here with
its FAMILY; models/registry.py finds them, and those of other packages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, field
from typing import TYPE_CHECKING, Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.models.config_json import ConfigJson, HfKey
from phalanx.models.decoder_config import (
    DECODER_ONLY,
    decoder_rules,
    decoder_tensors,
    fields_from_hf,
    fields_to_hf,
    fill_heads,
    keys_of_fields,
    shrink_decoder,
)
from phalanx.models.model_config import ModelConfig, SmallExperts, SmallSizes, TensorNames

if TYPE_CHECKING:  # families are read together with configs, before torch is imported
    from phalanx.nn.env import Env
    from phalanx.nn.module import Block
    from phalanx.nn.parameter import Parameter

BlockMaker = Callable[["Mapping[str, Parameter]"], "Block"]
"""Builds a block. Its argument holds the parameters of blocks built before it on this rank, by global name, so that
blocks which share a weight share the parameter."""


def _no_problems(config: Any, tp: int) -> list[Problem]:
    return []


def _all_keys(config: dict[str, Any]) -> dict[str, Any]:
    return config


def _two_layers(config: Any) -> int:
    return 2


@dataclass(frozen=True)
class Family:
    """The defaults fit a config derived from DecoderConfig whose additional fields are keys of config.json with the
    same names.

    name             `model_type` of its config.json; for families that come with Phalanx, also model.family
    config           its `model` section: a frozen dataclass, a ModelConfig
    blocks           (config, env) -> a maker of each block: embedding, layers, multi-token prediction (if any), head
    architecture     the class that config.json names, or a function of the config that returns it
    headless         the same of a model without a head; None: as `architecture`, with Model in the place of the task
    tensors          names of tensors in Hugging Face folders
    rules            (config, sequence length) -> problems, in addition to the rules of every model (models/check.py)
    split_rules      (config, tp) -> problems of a config that has no others
    keys             of config.json that are read, with their types and defaults; empty: those of the fields
    other_names      key of config.json -> its other name, which takes precedence
    only             key -> the values that the model computes; a folder with another one is refused
    from_hf          config.json -> the config, or None if something in it is not supported
    to_hf            the config -> keys of config.json; those of every family are added
    text_keys        config.json -> the keys of the text model, where it holds other models too
    also             other names of `model_type` that are read as this family
    packed           quant_method of config.json that the readers unpack while reading
    fill             fields as plain values -> the same with derived fields filled in
    may_change       fields whose value may change when a run continues, because they are not shapes
    head_fields      fields of a head over classes, in which a model may differ from the folder that it starts from
    with_predictors  (config, count) -> the config with so many modules of multi-token prediction, as a folder has
                     them; None: the family has none
    shrink           a smaller config of the same structure, for `phalanx verify`
    shrink_experts   the same for its experts; None: it has none
    least_layers     the smallest number of layers that includes all kinds of them
    """

    name: str
    config: type[ModelConfig]
    blocks: Callable[[Any, Env], Sequence[BlockMaker]]
    _: KW_ONLY
    architecture: str | Callable[[Any], str]
    headless: str | None = None
    tensors: TensorNames = decoder_tensors
    rules: Callable[[Any, int], list[Problem]] = decoder_rules
    split_rules: Callable[[Any, int], list[Problem]] = _no_problems
    keys: Mapping[str, HfKey] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: DECODER_ONLY)
    from_hf: Callable[[ConfigJson], ModelConfig | None] = fields_from_hf
    to_hf: Callable[[Any], dict[str, Any]] = fields_to_hf
    text_keys: Callable[[dict[str, Any]], dict[str, Any]] = _all_keys
    also: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    fill: Callable[[dict[str, Any]], dict[str, Any]] = fill_heads
    may_change: tuple[str, ...] = ("max_position_embeddings",)
    head_fields: tuple[str, ...] = ()
    with_predictors: Callable[[Any, int], ModelConfig] | None = None
    shrink: Callable[[Any, SmallSizes], ModelConfig] = shrink_decoder
    shrink_experts: Callable[[Any, SmallExperts], ModelConfig] | None = None
    least_layers: Callable[[Any], int] = _two_layers

    def class_of(self, config: ModelConfig) -> str:
        """The class that config.json names for this model."""
        if not isinstance(self.architecture, str):
            return self.architecture(config)
        if not config.headless:
            return self.architecture
        return self.headless or re.sub(r"(For\w+|LMHeadModel)$", "Model", self.architecture)

    @property
    def json_keys(self) -> Mapping[str, HfKey]:
        return self.keys or keys_of_fields(self.config)
