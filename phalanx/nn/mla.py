"""Multi-head latent attention: keys and values are computed from a narrow latent for each token, and optionally queries
as well. DeepSeek-V2, 2024, section 2.1.

Down-projections and the norms of the latents are whole on each tp rank and see only this rank's tokens, so their
gradients are partial sums over tp, like those of other norms. The latents are narrow, so they are what is gathered over
tp; each rank then computes its own heads.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.layout.param import MatrixOutputs
from phalanx.nn.attention import supported, whole_only
from phalanx.nn.env import Env
from phalanx.nn.initial import Normal
from phalanx.nn.linear import ColumnLinear, ReplicatedLinear, RowLinear
from phalanx.nn.memory import PageSpec
from phalanx.nn.module import OutputRows, own_memory
from phalanx.nn.norm import RMSNorm
from phalanx.nn.rotary import Rotary
from phalanx.nn.scored_attention import ScoredAttention, ScoreOutputs
from phalanx.ops.attention import context
from phalanx.ops.attention.attention import ATTENTION
from phalanx.ops.attention.kind import NOTHING, AttentionKind
from phalanx.ops.dense.rope import turn
from phalanx.ops.dense.rope_scaling import Rotation
from phalanx.ops.experts.exchange import gather
from phalanx.sequence.batch import Batch
from phalanx.sequence.paged import PagedSequences

EPS = 1e-6  # of the latents' norms, whatever epsilon the model's other norms have


@dataclass(frozen=True)
class LatentSizes:
    """Widths: of the latents of queries (None: queries are computed from x) and of keys and values; for each head, of
    the part of a query or key that is not rotated, of the rotated part (one key part shared by all heads), and of a
    value."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def query(self) -> int:
        return self.nope + self.rope

    def num_weights(self, width: int, heads: int) -> int:
        down = width * (self.kv_rank + self.rope) + (width * self.q_rank if self.q_rank else 0)
        return (
            down
            + (self.q_rank or width) * heads * self.query
            + self.kv_rank * heads * (self.nope + self.value)
            + heads * self.value * width
        )


class LatentAttention(ScoredAttention):
    """at: global name of the layer's attention, whose tensors are named as in Hugging Face's deepseek_v3.

    kind: window and scale of the scores (scale None: 1 / sqrt(nope + rope)). interleaved: how the weights pair the
    rotated features. rotation None: nothing is rotated (Kimi Linear); the part of keys that all heads share stays.
    """

    def __init__(
        self,
        env: Env,
        at: str,
        width: int,
        heads: int,
        sizes: LatentSizes,
        std: float,
        rotation: Rotation | None,
        kind: AttentionKind,
        interleaved: bool = True,
    ):
        super().__init__(env)
        env.refuse_invariance("attention to latents, which generation multiplies in another order than training,")
        first, last = env.cut(heads)
        self.sizes, self.all_heads, self.heads, self.first_head = sizes, heads, last - first, first
        self.rotary = None if rotation is None else Rotary(rotation)
        self.kind, self.interleaved = supported(kind, env), interleaved
        self.whole_only = whole_only(self.kind)
        init, s = Normal(std), sizes
        kv_down = OutputRows(f"{at}.kv_a_proj_with_mqa.weight", s.kv_rank + s.rope, 0, s.kv_rank + s.rope, env.everyone)
        q_down = [OutputRows(f"{at}.q_a_proj.weight", s.q_rank, 0, s.q_rank, env.everyone)] if s.q_rank else []
        self.down = ReplicatedLinear(env, [*q_down, kv_down], width, init)
        q_up = OutputRows(
            f"{at}.q_b_proj.weight" if s.q_rank else f"{at}.q_proj.weight",
            heads * s.query,
            first * s.query,
            last * s.query,
            outputs=(MatrixOutputs("q", s.query, heads=True),),
        )
        self.q_up = ColumnLinear(env, [q_up], s.q_rank or width, init)
        each = s.nope + s.value
        both = (MatrixOutputs("k", s.nope, heads=True), MatrixOutputs("v", s.value, heads=True))
        kv_up = OutputRows(f"{at}.kv_b_proj.weight", heads * each, first * each, last * each, outputs=both)
        self.kv_up = ColumnLinear(env, [kv_up], s.kv_rank, init)
        # all heads share the rotated part of keys, so their queries' takes the whole ratio
        self.score_outputs = (
            ScoreOutputs(q_up.name, 0, s.query, s.nope, 0.5),
            ScoreOutputs(q_up.name, s.nope, s.query, s.rope, 1.0),
            ScoreOutputs(kv_up.name, 0, each, s.nope, 0.5),
        )
        values = first * s.value, last * s.value
        self.out = RowLinear(env, f"{at}.o_proj.weight", width, heads * s.value, values, init)
        self.q_norm = RMSNorm(env, f"{at}.q_a_layernorm", s.q_rank, EPS) if s.q_rank else None
        self.kv_norm = RMSNorm(env, f"{at}.kv_a_layernorm", s.kv_rank, EPS)
        self.num_weights = s.num_weights(width, heads)
        self.remembers = PageSpec(1, s.kv_rank + s.rope, s.kv_rank, shared=True, window=kind.window)
        if not self.kv_up.is_plain:  # adapters have a say in each head's keys and values: these are remembered
            self.remembers = PageSpec(self.heads, s.query, s.value, window=kind.window)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T / tp, D) -> (T / tp, D)."""
        if batch.paged is not None:
            return self.out(self._attend_memory(x, batch, batch.paged))
        recompute = self.env.recompute
        q, k, v = recompute.op("rope", partial(self._rotated, batch), *recompute.op("qkv", self._project, x))
        mixed = recompute.by_batch("attention", self._attend, batch, context.likes_of(q, v), q, k, v)
        return self.out(mixed)

    def _attend(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context.attention(q, k, v, batch, self.plan_here)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (T / tp, D) -> q (T, heads, nope + rope), kv (T, heads, nope + value), the rotated part of keys (T, 1,
        rope)."""
        s = self.sizes
        q, kv_from, k_rope = self._latents(x)
        kv = self.kv_up(kv_from).unflatten(-1, (self.heads, s.nope + s.value))
        return q, kv, gather(k_rope, self.env.tp).unsqueeze(1)

    def _latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (T / tp, D) -> q (T, heads, nope + rope), and of this rank's tokens (T / tp, ...) the normed latent of keys
        and values and the part of keys that is to be rotated."""
        s, recompute = self.sizes, self.env.recompute
        q_latent, kv_latent, k_rope = self.down(x).split((s.q_rank or 0, s.kv_rank, s.rope), -1)
        q_from = x if self.q_norm is None else recompute.op("norm", self.q_norm, q_latent.contiguous())
        q = self.q_up(q_from).unflatten(-1, (self.heads, s.query))
        return q, recompute.op("norm", self.kv_norm, kv_latent.contiguous()), k_rope.contiguous()

    def _attend_memory(self, x: Tensor, batch: Batch, paged: PagedSequences) -> Tensor:
        """-> (T, own heads * value), of sequences that go on: what is remembered of a token is its latent and its
        rotated key, which all heads share. The matrices that would make a head's keys and values of latents are
        multiplied into its queries and its output instead (DeepSeek-V2, 2024, section 2.1.2)."""
        s, tp, kernels = self.sizes, self.env.tp, self.env.kernels_for(ATTENTION)
        if not self.kv_up.is_plain:
            q, k, v = (t[0].transpose(0, 1) for t in self._rotated(batch, *self._project(x)))
            return own_memory(self).attend((q, k, v), paged, self.kind, NOTHING, kernels).flatten(1)
        q, latent, k_rope = self._latents(x)
        keys_up, values_up = self._up_matrices()
        q_latent = torch.einsum("thn,hnr->thr", q[..., : s.nope], keys_up)
        q_rope, rotated = self._positioned(batch, q[..., s.nope :], gather(k_rope, tp).unsqueeze(1))
        q = torch.cat((q_latent, q_rope), -1)
        k = torch.cat((gather(latent, tp).unsqueeze(1), rotated), -1)
        scale = 1 / math.sqrt(s.query) if self.kind.scale is None else self.kind.scale
        mixed = own_memory(self).attend((q, k, None), paged, replace(self.kind, scale=scale), NOTHING, kernels)
        return torch.einsum("thr,hvr->thv", mixed, values_up).flatten(1)

    def _up_matrices(self) -> tuple[Tensor, Tensor]:
        """(heads, nope, rank) and (heads, value, rank): what makes a head's keys and values of latents."""
        s = self.sizes
        if not self.kv_up.is_plain:
            raise RuntimeError(
                "the up-projection of latents is no plain matrix, so sequences cannot go on from latents"
            )
        both = self.kv_up.weight.view(self.heads, s.nope + s.value, s.kv_rank)
        return both[:, : s.nope], both[:, s.nope :]

    def _rotated(self, batch: Batch, q: Tensor, kv: Tensor, k_rope: Tensor) -> tuple[Tensor, ...]:
        """The outputs of `_project` -> q, k, v (sequences, heads, S, ...)."""
        s = self.sizes
        k, v = kv.split((s.nope, s.value), -1)
        q_rope, k_rope = self._positioned(batch, q[..., s.nope :], k_rope)
        q = torch.cat((q[..., : s.nope], q_rope), -1)
        k = torch.cat((k, k_rope.expand(-1, self.heads, -1)), -1)
        return tuple(t.unflatten(0, (batch.num_sequences, batch.length)).transpose(1, 2) for t in (q, k, v))

    def _positioned(self, batch: Batch, q_rope: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of queries and keys that have positions, rotated if there is a rotary embedding."""
        if self.rotary is None:
            return q_rope, k_rope
        table = self.rotary.table(batch, q_rope.dtype)
        return turn(q_rope, table, self.interleaved), turn(k_rope, table, self.interleaved)

    def flops(self, seq_length: int) -> float:
        per_key = 2.0 * self.all_heads * (self.sizes.query + self.sizes.value)
        return 2.0 * self.num_weights + per_key * self.kind.keys_per_query(seq_length)
