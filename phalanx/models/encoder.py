"""Blocks of encoders, whose tokens read both ways: BERT's (norms after each sub-layer, learned positions), ModernBERT's
(norms before it, rotary positions, windows), and the heads over the vocabulary and over classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.base.dataclass import dataclass
from phalanx.layout.box import Box
from phalanx.layout.param import ParamSpec, Piece, Replica
from phalanx.models.family import BlockMaker
from phalanx.models.layer_norm_decoder import Dropping
from phalanx.nn.attention import Attention, AttentionSpec
from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env
from phalanx.nn.head import Head
from phalanx.nn.initial import Normal
from phalanx.nn.linear import ReplicatedLinear
from phalanx.nn.mlp import FusedGeGLU, FusedGeGLUSpec, GeluMLP
from phalanx.nn.module import Block, OutputRows
from phalanx.nn.norm import LayerNorm
from phalanx.nn.objective import Objective, TokenObjective, cross_entropy
from phalanx.nn.parameter import Parameter
from phalanx.nn.pooled_head import TextStates
from phalanx.ops.attention.kind import AttentionKind
from phalanx.ops.dense.activation import gelu
from phalanx.ops.dense.embedding import learned_positions
from phalanx.ops.dense.labelled_rows import labelled_rows
from phalanx.ops.dense.rope_scaling import Rotation
from phalanx.ops.dense.rows import ROWS, lookup
from phalanx.sequence.batch import Batch

BOTH = AttentionKind(direction="both")


def table_spec(env: Env, name: str, rows: int, width: int, std: float) -> ParamSpec:
    """A small table (rows, width) that every rank of tp holds whole and reads for its own tokens."""
    shape = (rows, width)
    local = (slice(0, rows), slice(0, width))
    whole = Piece(name, shape, Box.full(shape), local, Normal(std), replicas=env.everyone)
    return ParamSpec(shape, (whole,), role="embedding")


class BertEmbedding(Dropping):
    """Tokens, positions and segments (token types), normalized."""

    def __init__(self, config: Any, env: Env):
        super().__init__(env)
        c, at, std = config, "bert.embeddings", config.initializer_range
        self.p = c.dropout
        name = f"{at}.word_embeddings.weight"
        self.embed = Embedding(env, name, c.vocab_size, c.hidden_size, std, embedding_replicas(c, env))
        name, positions = f"{at}.position_embeddings.weight", c.max_position_embeddings
        self.positions = self.param(table_spec(env, name, positions, c.hidden_size, std))
        name = f"{at}.token_type_embeddings.weight"
        self.types = self.param(table_spec(env, name, c.type_vocab_size, c.hidden_size, std))
        self.norm = LayerNorm(env, f"{at}.LayerNorm", c.hidden_size, c.layer_norm_eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        a, b = self.env.cut(batch.num_tokens)
        segments = batch.tokens.new_zeros(b - a) if batch.segments is None else batch.segments[a:b]
        kernels = self.env.ops.by_config(ROWS)
        x = self.embed(batch.tokens) + lookup(segments, self.types, kernels)
        x = self.norm(x + learned_positions(batch.positions[a:b], self.positions, kernels))
        return self.drop(x, batch, self.p, 0, 1)


class BertLayer(Dropping):
    """Each sub-layer's output is added to its input, and the sum is normalized."""

    def __init__(self, config: Any, env: Env, layer: int):
        super().__init__(env)
        c, at, width = config, f"bert.encoder.layer.{layer}", config.hidden_size
        self.p, self.layer = c.dropout, layer
        q, k, v = (f"{at}.attention.self.{name}.weight" for name in ("query", "key", "value"))
        spec = AttentionSpec(
            names=(q, k, v, f"{at}.attention.output.dense.weight"),
            width=width,
            heads=c.num_attention_heads,
            kv_heads=c.num_attention_heads,
            head_dim=width // c.num_attention_heads,
            std=c.initializer_range,
            bias="all",
            dropout=c.attention_dropout,
            layer=layer,
            kind=BOTH,
        )
        self.attention = Attention(env, spec)
        self.norm1 = LayerNorm(env, f"{at}.attention.output.LayerNorm", width, c.layer_norm_eps)
        names, std = (f"{at}.intermediate.dense", f"{at}.output.dense"), c.initializer_range
        self.mlp = GeluMLP(env, names, width, c.intermediate_size, std, std, c.hidden_act, transposed=False)
        self.norm2 = LayerNorm(env, f"{at}.output.LayerNorm", width, c.layer_norm_eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        delta = self.drop(self.attention(x, batch), batch, self.p, self.layer, 2)
        x, residual = self.norm1.add_twice(x, delta)
        _, x = self.norm2.add(residual, self.drop(self.mlp(x), batch, self.p, self.layer, 3))
        return x


class ModernBertEmbedding(Block):
    def __init__(self, config: Any, env: Env):
        super().__init__(env)
        c, at = config, "model.embeddings"
        name = f"{at}.tok_embeddings.weight"
        self.embed = Embedding(env, name, c.vocab_size, c.hidden_size, c.initializer_range, embedding_replicas(c, env))
        self.norm = LayerNorm(env, f"{at}.norm", c.hidden_size, c.norm_eps, c.norm_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.norm(self.embed(batch.tokens))


class ModernBertLayer(Block):
    """The first layer reads the embedding's norm as it is."""

    def __init__(self, config: Any, env: Env, layer: int):
        super().__init__(env)
        c, at, width = config, f"model.layers.{layer}", config.hidden_size
        std, std_out = c.initializer_range, c.std_out
        head_dim, window = width // c.num_attention_heads, c.window(layer)
        fused = f"{at}.attn.Wqkv.weight"
        spec = AttentionSpec(
            names=(fused, fused, fused, f"{at}.attn.Wo.weight"),
            width=width,
            heads=c.num_attention_heads,
            kv_heads=c.num_attention_heads,
            head_dim=head_dim,
            std=std,
            std_out=std_out,
            rotation=Rotation(head_dim, c.rope_base(layer), None, c.max_position_embeddings),
            bias="all" if c.attention_bias else "none",
            layer=layer,
            kind=AttentionKind(direction="both", window=window),
        )
        norm = partial(LayerNorm, env, width=width, eps=c.norm_eps, bias=c.norm_bias)
        self.norm1 = norm(f"{at}.attn_norm") if layer else None
        self.attention = Attention(env, spec)
        self.norm2 = norm(f"{at}.mlp_norm")
        mlp = FusedGeGLUSpec(
            names=(f"{at}.mlp.Wi.weight", f"{at}.mlp.Wo.weight"),
            width=width,
            inner=c.intermediate_size,
            std=std,
            std_out=std_out,
            exact=c.hidden_activation == "gelu",
            bias=c.mlp_bias,
        )
        self.mlp = FusedGeGLU(env, mlp)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        normed = x
        if self.norm1 is not None:
            x, normed = self.norm1.add(x)
        x, normed = self.norm2.add(x, self.attention(normed, batch))
        return x + self.mlp(normed)


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """How an encoder's head is made.

    matrix      name of the matrix of the logits: the input embedding, or that of the classes; bias: of their bias.
                None: the model has no head
    classes     names of the classes; none: the logits are over the vocabulary, and the matrix is the embedding
    matrix_std  deviation of the initial weights of the classes' matrix; None: std
    last        name of the model's last norm; None: the layers end with one
    dense       name of a dense layer before the matrix; None: there is none. std: the deviation of its initial weights
    activation  of the dense layer: gelu, gelu_new (its tanh form) or tanh
    norm        name of the norm after it; None: there is none
    eps         of the norms, which have a bias if norm_bias
    """

    matrix: str | None
    bias: str | None
    classes: tuple[str, ...] = ()
    matrix_std: float | None = None
    last: str | None = None
    dense: str | None = None
    dense_bias: bool = True
    activation: str = "gelu"
    norm: str | None = None
    eps: float
    norm_bias: bool = True
    std: float


class EncoderHead(Dropping):
    """What a token was, or its class, or that of the text that begins with it: from a dense layer over it (if any),
    normalized (if there is a norm), one logit for each id or class."""

    recomputable = False

    def __init__(self, config: Any, env: Env, spec: HeadSpec, matrix: str, made: Mapping[str, Parameter]):
        super().__init__(env)
        s, width = spec, config.hidden_size
        self.activation, self.p, self.layer = s.activation, config.classifier_dropout, config.num_hidden_layers
        self.last = nn.Identity() if s.last is None else LayerNorm(env, s.last, width, s.eps, s.norm_bias)
        rows = [OutputRows(f"{s.dense}.weight", width, 0, width, env.everyone)]
        init = Normal(s.std)
        self.dense = None if s.dense is None else ReplicatedLinear(env, rows, width, init, s.dense_bias)
        self.norm = nn.Identity() if s.norm is None else LayerNorm(env, s.norm, width, s.eps, s.norm_bias)
        self.over_classes = bool(s.classes)
        if s.classes:
            std = s.std if s.matrix_std is None else s.matrix_std
            self.head = Head(env, matrix, len(s.classes), width, std, bias=s.bias)
        else:
            shared: Any = {"weight": made.get(matrix), "role": "embedding", "bias": s.bias}
            std = config.initializer_range
            self.head = Head(env, matrix, config.vocab_size, width, std, env.tied(), **shared)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if batch.label_rows and self.reads_labelled:
            x, labels = labelled_rows(x, batch.labels, batch.label_rows)
            batch = batch.with_loss(labels, batch.loss_seed)
        return self.head.loss(self.drop(self.transformed(x), batch, self.p, self.layer, 1), batch)

    @property
    def reads_labelled(self) -> bool:
        """A head over the vocabulary does, on a rank that has all tokens of the micro-batch, if the objective has the
        cross entropy of the labels and nothing else."""
        objective, alone = self.env.objective, self.env.tp.size == self.env.axes.cp.size == 1
        if not isinstance(objective, TokenObjective) or not alone or self.over_classes or self.p:
            return False
        kind = type(objective)
        asks = kind.weights is not Objective.weights or kind.targets is not TokenObjective.targets
        return kind.token_loss is cross_entropy and not asks

    def transformed(self, x: Tensor) -> Tensor:
        """What the matrix reads (T / tp, D)."""
        x = self.last(x)
        if self.dense is not None:
            x = self.dense(x)
            x = torch.tanh(x) if self.activation == "tanh" else gelu(x, self.activation == "gelu")
        return self.norm(x)

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.head.logits(self.transformed(x), rows)

    def log_probs(self, x: Tensor, batch: Batch, top: int = 0) -> Tensor:
        return self.head.log_probs(self.transformed(x), batch, top)

    def flops(self, seq_length: int) -> float:
        return super().flops(seq_length) + (0.0 if self.dense is None else 2.0 * self.dense.weight.numel())


class PairHead(EncoderHead):
    """What hidden tokens were, and of each document the class of its two texts, from a dense layer over its first
    token. Both losses are added, the second one weighted as the batch says (Batch.pair_weights)."""

    def __init__(
        self,
        config: Any,
        env: Env,
        specs: tuple[HeadSpec, HeadSpec],
        matrices: tuple[str, str],
        made: Mapping[str, Parameter],
    ):
        spec, pair = specs
        super().__init__(config, env, spec, matrices[0], made)
        width = config.hidden_size
        rows = [OutputRows(f"{pair.dense}.weight", width, 0, width, env.everyone)]
        self.pooler = ReplicatedLinear(env, rows, width, Normal(pair.std), pair.dense_bias)
        self.pair_head = Head(env, matrices[1], len(pair.classes), width, pair.std, bias=pair.bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        loss = super().forward(x, batch)
        if batch.pair_labels is None or batch.pair_weights is None:
            return loss
        pairs = batch.with_loss(batch.pair_labels, batch.loss_seed)
        return loss + self.pair_head.weighted_cross_entropy(self.pooled(x), pairs, batch.pair_weights)

    def pooled(self, x: Tensor) -> Tensor:
        return torch.tanh(self.pooler(x))

    def flops(self, seq_length: int) -> float:
        return super().flops(seq_length) + 2.0 * self.pooler.weight.numel()


def embedding_replicas(config: Any, env: Env) -> tuple[Replica, ...]:
    """Where else the input embedding is held: by a head over the vocabulary."""
    return () if config.classes or config.headless else env.tied()


def encoder_blocks(
    config: Any,
    env: Env,
    embedding: Callable[[Any, Env], Block],
    layer: Callable[[Any, Env, int], Block],
    head: HeadSpec,
    pair: HeadSpec | None = None,
) -> Sequence[BlockMaker]:
    """Embedding, layers, head, or the last states of a model without one. pair: of the class of pairs of texts."""

    def make(number: int, made: Mapping[str, Parameter]) -> Block:
        return layer(config, env, number)

    def last(made: Mapping[str, Parameter]) -> Block:
        if head.matrix is not None and pair is not None and pair.matrix is not None:
            return PairHead(config, env, (head, pair), (head.matrix, pair.matrix), made)
        if head.matrix is not None:
            return EncoderHead(config, env, head, head.matrix, made)
        if head.last is None:
            return TextStates(env)
        return TextStates(env, LayerNorm(env, head.last, config.hidden_size, head.eps, head.norm_bias))

    layers = (partial(make, i) for i in range(config.num_hidden_layers))
    return [lambda made: embedding(config, env), *layers, last]
