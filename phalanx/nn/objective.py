"""The Objective protocol: what a file must define to add a loss. Per token (TokenObjective), over groups of sequences
such as pairs (SequenceObjective), or over the embeddings of all texts of a step (EmbeddingObjective).

An objective does not deal with how logits are computed, sharded and differentiated (nn/head.py). Torch is not imported
here, so that a config that names an objective can be read without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.own_fields import section_of
from phalanx.base.registry import NotFound, completed, find, names, registers
from phalanx.sequence.sample import QUERY, Pooling

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

    from phalanx.ops.dense.token_loss import LogitStats, SparseTargets
    from phalanx.sequence.batch import Batch
    from phalanx.sequence.sample import SampleFacts, SampleTransform

SEAM = "objective"


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The `task` section: the objective's name, and beside it the objective's own fields."""

    seam: ClassVar[str] = SEAM  # its members add fields to this section (base/registry.py)
    named_by: ClassVar[str] = "name"

    name: str = "pretrain"
    """What is minimised: pretrain (cross entropy of the next token), sft (supervised fine-tuning on the answers of
    chats), dpo (preferences between pairs of answers), distil (a teacher's distributions), mlm (hidden tokens, for
    models that read both ways), classify (classes of texts or tokens), embed (embeddings of queries and passages, for
    retrieval), span and ul2 (hidden spans, for encoder-decoders), seq2seq (answers of chats, for encoder-decoders),
    transcribe (texts of recordings), fim (fill-in-the-middle), prefix (the rest of a document whose beginning is read
    both ways), or an objective of your own as PACKAGE.MODULE:NAME. Its own fields stand beside the name."""


class Objective(ABC):
    """What is minimised. Derive from TokenObjective, SequenceObjective or EmbeddingObjective, and refer to it by
    `@objective("name")` or by `module:NAME`.

    Config        a frozen dataclass of its fields in the `task` section
    scores_field  the config key of `scores`, for messages; needs_targets: its file must have the likeliest ids
    both_ways     its labels cannot be read off a token's own context, so models that read both ways can be trained on
                  it; False: labels are next tokens, which such models see; None: it trains either kind
    needs_head    whether the model must have a head; False: it must have none (model.head=none)
    over_classes  its labels are classes, which stand beside the data; the model's head is over them
    makes_prefix  its batches say which first tokens of each document read each other (Batch.prefix), and causal
                  attention becomes attention with prefixes
    makes_beside  the streams that its transform makes beside the text (Sample.beside); `beside` has the lengths of
                  those of tokens, data.room of those of numbers
    needs_chats   whether it trains on chats and on nothing else
    """

    scores_field: ClassVar[str] = "task"
    needs_targets: ClassVar[bool] = False
    both_ways: ClassVar[bool | None] = False
    needs_head: ClassVar[bool] = True
    over_classes: ClassVar[bool] = False
    makes_prefix: ClassVar[bool] = False
    makes_beside: ClassVar[tuple[str, ...]] = ()
    needs_chats: ClassVar[bool] = False
    Config: ClassVar[Any] = TaskConfig  # in a subclass: its dataclass, with `name` added to its fields

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "Config" in vars(cls):
            cls.Config = section_of(cls.Config, TaskConfig)

    def __init__(self, config: TaskConfig):
        self.config: Any = config

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        """Problems with the fields of `Config`."""
        return []

    @classmethod
    def check_model(cls, config: Any, model: Any) -> list[Problem]:
        """Problems of these fields with the `model` section (models.model_config.ModelConfig)."""
        return []

    def weights(self, batch: Batch) -> Tensor | None:
        """(T,) the weight of each token's loss (over sequences: of its log-probability); None: 1. Tokens without a
        label have no loss, whatever their weight. In multi-token prediction `batch` has the labels of one depth."""
        return None

    @property
    def scores(self) -> str | None:
        """The file of `phalanx data score` with another model's log-probabilities that batches are to carry
        (Batch.reference; Batch.target_ids and Batch.target_log_probs if it has any); None: they carry none."""
        return None

    def transform(self, facts: SampleFacts) -> SampleTransform | None:
        """How samples of the data become inputs and labels (sequence/sample.py); None: they stay as they are, with the
        next tokens as labels. DataError if the tokenizer lacks what it needs."""
        return None

    @classmethod
    def shrunk(cls, config: Any, seq_length: int) -> Any:
        """`config` for a small copy of a run (phalanx verify), whose sequences have so many tokens."""
        return config

    @property
    def beside(self) -> Mapping[str, int]:
        """Streams of tokens that batches carry beside the text (Batch.beside), by name: tokens in a sequence."""
        return {}

    def label_rows(self, tokens: int) -> int:
        """As SampleTransform.label_rows of its samples."""
        return 0

    @property
    def label_share(self) -> float:
        """The share of tokens that have a label, where label_rows bounds it."""
        return 1.0

    @property
    def makes_pairs(self) -> bool:
        """Whether documents become pairs of texts, each with a class (Batch.pair_labels), which the model's head says
        beside what it says of tokens."""
        return False

    @property
    def train_on(self) -> Literal["answers", "last_answer", "all"] | None:
        """What of chats has a label, where the data is chats (data.chats); None: the objective takes none."""
        return None

    @abstractmethod
    def divisor(self, batch: Batch) -> Tensor:
        """() what these tokens contribute to the divisor of the step's summed loss and metrics. Its sum over all
        micro-batches and ranks is known before the first forward."""


class TokenObjective(Objective):
    """A loss per token, computed from statistics of its logits. The head computes its gradients in one pass, in chunks
    of tokens.

    All values are (T,) for some of a micro-batch's tokens, equal on all tp ranks, in at least fp32. Functions must work
    token by token: which tokens come together depends on the layout. Do not read values from the device (`item`, `if
    tensor`), because that makes the host wait.
    """

    @abstractmethod
    def token_loss(self, logits: LogitStats) -> Tensor:
        """(T,) loss of each token, differentiable."""

    def metrics(self, logits: LogitStats) -> dict[str, Tensor]:
        """Further values (T,) by name; the log has their weighted means over the step."""
        return {}

    def targets(self, batch: Batch) -> SparseTargets | None:
        """Targets of each token besides its label, such as a teacher's most likely ids with their probabilities:
        `logits.soft` is the weighted sum of their logits. None: there are none."""
        return None

    def divisor(self, batch: Batch) -> Tensor:
        """The sum of the weights of tokens with a label."""
        weights, labelled = self.weights(batch), batch.labelled
        return (labelled if weights is None else weights.double().masked_fill(~labelled, 0)).sum()


class SequenceObjective(Objective):
    """A loss over groups of sequences (pairs), computed from the summed log-probabilities of each sequence's labels.

    The sequences of a group are consecutive documents in a sample's window (data.document_attention): the first
    `sequences_per_sample` form a group, then the next, and so on. Documents left over at the end of a window, and
    groups in which a sequence has no labels, have no loss. A group is always within one micro-batch, so no rank sees
    half of it; sums over cp are complete before `loss` is called. Logits are computed twice: for the log-probabilities,
    and for the gradients.

    sequences_per_sample   sequences in a group; n below. P groups
    needs_reference        `loss` and `metrics` take a second argument, the log-probabilities of a reference model:
                           those that batches carry (`scores`), else those of the model without its adapters (`lora`)
    """

    sequences_per_sample: ClassVar[int] = 2
    needs_reference: ClassVar[bool] = False

    @abstractmethod
    def loss(self, policy_P2: Tensor) -> Tensor:
        """(P, n) float64 log-probabilities -> (P,) losses, each of its own group. Missing groups are zeros, and their
        losses are ignored."""

    def metrics(self, policy_P2: Tensor) -> dict[str, Tensor]:
        """Further values (P,) by name; the log has their means over the step's groups."""
        return {}

    def divisor(self, batch: Batch) -> Tensor:
        """The number of groups, counted on one of the ranks that share them."""
        from phalanx.nn.sequence_groups import groups_of  # start-up time: it imports torch

        return groups_of(batch, self.sequences_per_sample).count


@dataclass(frozen=True)
class StepTexts:
    """The embeddings of a step's texts: of all micro-batches and all data-parallel ranks.

    embeddings  (N, D) pooled hidden states in at least fp32, not normalized, with gradients
    role        (N,) int64: QUERY, POSITIVE, or from 2 on the number of a negative; -1: the row is no text
    query       (N,) int64 row of the query to which the text belongs, of a query its own; -1: it belongs to none
    mine        the M rows of this rank
    """

    embeddings: Tensor
    role: Tensor
    query: Tensor
    mine: slice

    @property
    def is_query(self) -> Tensor:
        """(N,) whether a row is a query, whose positive is there too."""
        return (self.role == QUERY) & (self.query >= 0)


class EmbeddingObjective(Objective):
    """A loss over embeddings of texts, each of which may be compared with every other text of the step. The model has
    no head.

    Texts are documents (data.document_attention) in groups: a query, its positive, and perhaps negatives. The label of
    a text's first token is its number in its group. Embeddings are computed twice: without gradients, for the loss over
    all of them and its derivatives; then micro-batch by micro-batch with the gradients that these give (GradCache: Gao
    et al., "Scaling deep contrastive learning batch size under memory limited setup", 2021). So the loss is that of one
    process with all texts, however they are cut into micro-batches and over ranks.
    """

    both_ways = None
    needs_head = False

    @property
    @abstractmethod
    def pooling(self) -> Pooling:
        """How embeddings are made of hidden states."""

    @abstractmethod
    def loss(self, texts: StepTexts) -> Tensor:
        """(M,) losses of this rank's rows, differentiable by all embeddings. Those of rows that are no query are
        ignored."""

    def metrics(self, texts: StepTexts) -> dict[str, Tensor]:
        """Further values (M,) by name; the log has their means over the step's queries."""
        return {}

    def divisor(self, batch: Batch) -> Tensor:
        """The number of queries, counted on one of the ranks that share them."""
        from phalanx.nn.text_rows import text_rows  # start-up time: it imports torch

        return text_rows(batch).count


def cross_entropy(logits: LogitStats) -> Tensor:
    """(T,) negative log-probability of each token's label. Objectives that use this function as `token_loss` run the
    fused op."""
    return logits.log_z - logits.target


def completed_task(config: TaskConfig) -> TaskConfig:
    """As base.registry.completed, of the `task` section."""
    return completed("task", config, TaskConfig, find_objective)


# ---- by name

T = TypeVar("T", bound=type[Objective])


def objective(name: str) -> Callable[[T], T]:
    """Name an Objective: `task.name` may be that name wherever its module has been imported."""
    return registers(SEAM, name)


def find_objective(name: str) -> type[Objective]:
    """The objective that `task.name` refers to. NotFound says what is wrong with it."""
    found = find(SEAM, name)
    bases = (TokenObjective, SequenceObjective, EmbeddingObjective)
    kinds = [k for k in bases if isinstance(found, type) and issubclass(found, k)]
    if len(kinds) != 1:
        where = getattr(found, "__qualname__", type(found).__name__)
        rule = "must be derived from one of phalanx.TokenObjective, SequenceObjective, EmbeddingObjective"
        raise NotFound(f"is no Objective: {where} {rule}")
    return find(SEAM, name, kinds[0])


def make_objective(config: TaskConfig) -> Objective:
    """The objective of a `task` section."""
    made: Objective = find_objective(config.name)(config)
    return made


def usual_task(model: Any) -> TaskConfig:
    """The first of our objectives for models of this kind (models.model_config.ModelConfig): what they read, and what
    their head is over."""

    def fits(kind: type[Objective]) -> bool:
        reads = kind.both_ways in (None, model.both_ways) and set(kind.makes_beside) == set(model.reads_beside)
        return reads and kind.over_classes == bool(model.classes) and kind.needs_head != model.headless

    found = (name for name in names(SEAM) if fits(find_objective(name)))
    return completed_task(TaskConfig(name=next(found)))


@cache
def pretraining() -> Objective:
    """Cross entropy of the next token, the default objective."""
    return make_objective(TaskConfig())
