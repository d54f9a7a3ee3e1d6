"""ModelConfig: what code outside the families asks of the `model` section, whatever the family; and the plain values
that a family and its readers exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import multiples, problem
from phalanx.sequence.media import MediaSpec
from phalanx.sequence.sample import UnitStream


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The base of every family's config: a frozen dataclass with the field names of Hugging Face's configs."""

    if TYPE_CHECKING:  # each family declares these itself, with its own meanings, defaults and order
        family: str
        vocab_size: int
        hidden_size: int
        intermediate_size: int | None
        num_hidden_layers: int
        num_attention_heads: int
        max_position_embeddings: int
        tie_word_embeddings: bool
        initializer_range: float

    heads_field: ClassVar[str] = "num_attention_heads"
    """The field that says how many heads there are, of attention or of a scan."""
    kv_heads_field: ClassVar[str] = "num_key_value_heads"
    """The field that says how many of these share what they read: key-value heads, or groups of a scan."""

    @property
    def taps(self) -> int:
        """Tokens that the convolutions before scans read, the token itself included; 0: no layer has a scan."""
        return 0

    @property
    def scans(self) -> bool:
        """Whether layers hand a state on from token to token."""
        return self.taps > 0

    @property
    def recurrence(self) -> str | None:
        """The op by which layers hand a state on, as train.recompute_ops names it; None: there is none."""
        return "scan" if self.scans else None

    @property
    def attends(self) -> bool:
        """Whether layers have attention."""
        return True

    @property
    def kv_heads(self) -> int:
        """Key and value heads that attention uses, or groups of a scan."""
        return self.num_attention_heads

    @property
    def head_widths(self) -> tuple[int, int]:
        """Features of a query (and a key) and of a value of one head."""
        width = self.hidden_size // max(1, self.num_attention_heads)
        return width, width

    @property
    def rotary(self) -> bool:
        """Whether positions are rotary embeddings."""
        return True

    @property
    def both_ways(self) -> bool:
        """Whether tokens read what follows them (encoders). Such a model generates no text, and the next token is no
        task for it."""
        return False

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes that its head is over; none: the head is over the vocabulary."""
        return ()

    @property
    def headless(self) -> bool:
        """Whether the model ends with its hidden states, of which embeddings of texts are made (task.name=embed)."""
        return getattr(self, "head", None) == "none"

    @property
    def tied(self) -> bool:
        """Whether the embedding is the head's matrix too."""
        return bool(getattr(self, "tie_word_embeddings", False)) and not self.headless

    @property
    def pair_head(self) -> bool:
        """Whether its head also says the class of each pair of texts."""
        return False

    @property
    def gated_mlp(self) -> bool:
        """Whether the dense MLP has a gate, stored in one matrix with its input projection (SwiGLU)."""
        return True

    @property
    def routed_experts(self) -> int:
        """Experts in a layer to which tokens are routed; 0 for a dense model."""
        return 0

    @property
    def expert_size(self) -> int:
        """Width of an expert; 0 for a dense model."""
        return 0

    @property
    def predict_layers(self) -> int:
        """Depths of multi-token prediction, layers after the last one, all in one block; 0 if there are none."""
        return 0

    @property
    def embedding_block(self) -> int:
        """The number of the block that embeds the text."""
        return 0

    @property
    def layer_blocks(self) -> Sequence[int]:
        """The numbers, among all blocks, of those that are transformer layers."""
        return range(1, self.num_hidden_layers + 1)

    @property
    def num_blocks(self) -> int:
        """Blocks, in order: embedding, layers, multi-token prediction (if any), head."""
        return self.num_hidden_layers + 2 + (self.predict_layers > 0)

    @property
    def reads_beside(self) -> tuple[str, ...]:
        """The streams of tokens that it reads beside the text (Batch.beside); the task makes them."""
        return ()

    @property
    def numbers_beside(self) -> tuple[UnitStream, ...]:
        """Of `reads_beside`, the streams that have numbers in place of tokens (Sample.values), such as frames of
        sound."""
        return ()

    @property
    def needs_room(self) -> tuple[UnitStream, ...]:
        """The streams of numbers for which data.room says how many rows a sequence has room for."""
        return (*self.reads_units, *self.numbers_beside)

    @property
    def reads_units(self) -> tuple[UnitStream, ...]:
        """The streams of units (sequence.units) that it reads, such as patches of images."""
        return ()

    @property
    def media(self) -> MediaSpec | None:
        """What is to be known of files that its chats name, such as images; None: it reads none."""
        return None

    @property
    def decoder_start(self) -> int | None:
        """The token with which texts of a decoder begin; None: it has none beside an encoder."""
        return None

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts or a dense MLP."""
        return False

    def window(self, layer: int) -> int | None:
        """Number of tokens that attention of a layer reads, the token itself included; None: all before it."""
        return None


@dataclass(frozen=True)
class TensorNames:
    """What readers of Hugging Face folders need to know about names, beyond those that the modules define.

    also        other tensors that each model of the family has, by which it is told from one with the same embedding
    prefix      of all tensors but the head; a base model saved without its head omits it
    embedding   the input embedding
    layer       of the tensors of layer {}
    head        the output matrix of an untied model
    copies      a regular expression: further copies of the embedding and the head in published folders
    predictors  a regular expression with a group for the number: tensors of each multi-token prediction module
    constants   suffixes of tensor names that are not weights
    others      a regular expression: tensors of heads. A model leaves out those of other tasks, and begins with new
                ones where a folder that it starts from lacks its own
    unread      a regular expression: tensors that published folders have in layers that do not read them
    renames     former ends of tensor names in published folders -> those of today; with a dot at the end, beginnings
    modules     beginnings of names -> what transformers calls these modules in memory, where PEFT looks for adapters;
                with a dot at the start, inner parts
    """

    prefix: str
    embedding: str
    layer: str
    head: str = "lm_head.weight"
    also: tuple[str, ...] = ()
    copies: str | None = None
    predictors: str | None = None
    constants: tuple[str, ...] = ()
    others: str | None = None
    unread: str | None = None
    renames: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)

    def in_memory(self, name: str) -> str:
        """What transformers calls a tensor, or a module, in memory."""
        return _exchanged(name, self.modules.items())

    def in_files(self, name: str) -> str:
        """The other way round; a name that is one of files already stays."""
        return _exchanged(name, ((there, here) for here, there in self.modules.items()))

    def today(self, name: str) -> str:
        """The name of a tensor, if it was written under a former one."""
        for former, now in self.renames.items():
            if former.endswith(".") and name.startswith(former):
                return now + name.removeprefix(former)
            if name.endswith(former):
                return name.removesuffix(former) + now
        return name


def _exchanged(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A name in which the first of the parts that it has is exchanged for another."""
    for before, after in pairs:
        if name.startswith(before) or (before.startswith(".") and before in name):
            return name.replace(before, after, 1)
    return name


@dataclass(frozen=True)
class SmallSizes:
    """The sizes of a small copy for `phalanx verify`. `head_dim` is even; `given_length` is the sequence length of the
    original run."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    seq_length: int
    given_length: int


@dataclass(frozen=True)
class SmallExperts:
    """The same for experts: how many, how wide, and how many of them a token chooses."""

    count: int
    width: int
    chosen: int


def check_learned_positions(config: ModelConfig, seq_length: int) -> list[Problem]:
    """No sequence is longer than the positions that the model has."""
    most = config.max_position_embeddings
    if not seq_length > most >= 1:
        return []
    rule = "must be <= max_position_embeddings (positions are learned)"
    return [Problem("train.seq_length", seq_length, rule, {"model.max_position_embeddings": most}, (most,))]


def check_head_dim(config: ModelConfig) -> list[Problem]:
    """Rotary embeddings rotate pairs of features, so a head has an even number of them."""
    heads, given, rotary = config.num_attention_heads, getattr(config, "head_dim", None), config.rotary
    because = {"model.num_attention_heads": heads}
    valid = multiples(config.hidden_size, 2 * heads if rotary else heads)
    if given is not None:
        rule = "must be even (rotary embedding turns pairs)"
        return [problem("model", config, "head_dim", rule, {}, multiples(given, 2))] if given % 2 else []
    if config.hidden_size % heads:
        unless = " unless head_dim is set" if rotary else ""
        rule = f"must be a multiple of num_attention_heads{unless}"
        return [problem("model", config, "hidden_size", rule, because, valid)]
    if rotary and config.hidden_size // heads % 2:
        because["head_dim"] = config.hidden_size // heads
        rule = "must give an even head_dim (rotary embedding turns pairs)"
        return [problem("model", config, "hidden_size", rule, because, valid)]
    return []
