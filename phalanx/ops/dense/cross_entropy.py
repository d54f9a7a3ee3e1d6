"""Chunked, vocabulary-parallel linear cross entropy: the full logits never exist on any rank.

loss_t = logsumexp_v(x_t . w_v + b_v) - x_t . w_label - b_label, with or without a bias b. Each rank computes the logits
of its own rows of the vocabulary, one chunk of tokens at a time. Logits may be capped (`soft_capped`). When the
gradient of the loss is known beforehand
(`seed`), forward turns each chunk's logits into their gradient and multiplies on, so logits are computed once.
Otherwise backward computes each chunk's logits a second time.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.ops.dense.grads import add_grad, add_product_grad
from phalanx.ops.dense.matmul import ALONE, MATMUL
from phalanx.ops.op import Case, Kernels, Op, invariant, triton
from phalanx.sequence.batch import IGNORE

CHUNK_ELEMENTS = 1 << 28  # logits of a chunk (1 GiB in fp32)


class HeadMatrix(NamedTuple):
    """What a head multiplies by: `weight` (rows, D) and, if an adapter adds to the logits, `up` (ids, r) of the first
    rows. x then has r more features: logits = x[:, :D] weight^T + x[:, D:] up^T + bias. bias (rows,); None: there is
    none."""

    weight: Tensor
    up: Tensor | None = None
    bias: Tensor | None = None

    @staticmethod
    def of(given: Tensor | HeadMatrix) -> HeadMatrix:
        return given if isinstance(given, HeadMatrix) else HeadMatrix(given)

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features that each of both multiplies."""
        width = self.weight.shape[1]
        return x[:, :width], x[:, width:]

    def logits(self, x: Tensor, kernels: Kernels) -> Tensor:
        """x (T, D + r) -> (T, rows) in the dtype of x, without gradients."""
        own, beside = self.split(x)
        logits: Tensor = MATMUL.choose(kernels, own).gathered(own, self.weight, self.bias, ALONE)
        if self.up is not None:
            logits[:, : len(self.up)].addmm_(beside, self.up.t())
        return logits


def local_logits(x: Tensor, weight: Tensor | HeadMatrix, count: int, kernels: Kernels = "auto") -> Tensor:
    """Logits (T, rows) in at least fp32 of this rank's rows; rows past `count` are padding and get -inf."""
    matrix = HeadMatrix.of(weight)
    logits = matrix.logits(x, kernels)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if count < matrix.rows:
        logits[:, count:] = -torch.inf
    return logits


@dataclass(frozen=True)
class Columns:
    """What a chunk of logits means: its first `count` columns are ids, the others padding, and logits are capped at
    +-cap (None: they are not)."""

    count: int
    cap: float | None = None

    def capped(self, logits: Tensor) -> Tensor:
        """Logits in at least fp32, capped."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return soft_capped(wide, self.cap)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap). Gemma team, "Gemma 2", 2024."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def softmax_stats(logits: Tensor, rows: Tensor, here: Tensor, columns: Columns) -> Tensor:
    """(2, T): log-sum-exp of the columns that are ids, and the label's logit, 0 where not `here`; of capped logits."""
    wide = columns.capped(logits[:, : columns.count])
    if columns.count == 0:
        return torch.stack((wide.new_full((len(rows),), -torch.inf), wide.new_zeros(len(rows))))
    label = torch.where(here, wide.gather(1, rows.unsqueeze(-1))[:, 0], 0)
    return torch.stack((torch.logsumexp(wide, -1), label))


def softmax_gradient_(
    logits: Tensor, rows: Tensor, here: Tensor, lse: Tensor, scale: Tensor, columns: Columns
) -> Tensor:
    """Replace the logits by (softmax - one hot) * scale[t], 0 in the padding; by its product with 1 - (capped / cap)^2
    where they are capped."""
    wide = columns.capped(logits)
    d = torch.exp(wide - lse.unsqueeze(-1))
    d[:, columns.count :] = 0
    d.scatter_add_(1, rows.unsqueeze(-1), -here.unsqueeze(-1).to(d.dtype))
    if columns.cap is not None:
        d *= 1 - (wide / columns.cap).square()
    return logits.copy_(d * scale.unsqueeze(-1))


def chunks_of(tokens: int, rows: int, elements: int) -> list[slice]:
    """Slices of about equally many tokens, each with at most `elements` logits."""
    most = max(1, elements // max(1, rows))
    step = -(-tokens // max(1, -(-tokens // most)))
    return [slice(a, min(a + step, tokens)) for a in range(0, tokens, max(1, step))]


class HeadGrads:
    """Computes the gradients of all tokens (T, D + r) and of the matrix from those of the logits, chunk by chunk."""

    def __init__(self, x_all: Tensor, matrix: HeadMatrix, needed: tuple[bool, ...]):
        """needed: whether x, weight, up and bias have gradients."""
        self.x_all, self.matrix, self.needed = x_all, matrix, needed[1:3]
        self.dx_all = torch.empty_like(x_all) if needed[0] else None
        self.dw: list[Tensor | None] = [None, None]
        bias = matrix.bias if needed[3] else None
        self.db = None if bias is None else torch.zeros_like(bias, dtype=widest(bias.dtype))

    def add(self, d: Tensor, chunk: slice) -> None:
        (weight, up, _), of_all = self.matrix, self.matrix.split(self.x_all[chunk])
        of_up = d if up is None else d[:, : len(up)]
        if self.dx_all is not None:
            own, beside = self.matrix.split(self.dx_all[chunk])
            torch.mm(d, weight, out=own)
            if up is not None:
                torch.mm(of_up, up, out=beside)
        for n, (part, of_part) in enumerate(((weight, d), (up, of_up))):
            if self.needed[n] and part is not None:
                made, before = add_product_grad(part, of_part, of_all[n]), self.dw[n]
                self.dw[n] = made if before is None or made is None else before + made
        if self.db is not None:
            self.db += d.sum(0, dtype=self.db.dtype)

    def results(self, tp: Axis) -> tuple[Tensor | None, ...]:
        """Of x, weight, up and bias."""
        dx = None if self.dx_all is None else tp.reduce_scatter(self.dx_all).wait()
        bias = self.matrix.bias
        return dx, *self.dw, None if bias is None or self.db is None else add_grad(bias, self.db)


def widest(dtype: torch.dtype) -> torch.dtype:
    """In which sums over tokens are made."""
    return dtype if dtype == torch.float64 else torch.float32


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        up: Tensor | None,
        bias: Tensor | None,
        labels: Tensor,
        first: int,
        count: int,
        tp: Axis,
        seed: Tensor | None,
        kernels: Kernels,
        weights: Tensor | None,
        cap: float | None,
    ) -> Tensor:  # type: ignore[override]
        columns, matrix = Columns(count, cap), HeadMatrix(weight, up, bias)
        x_all, by = tp.all_gather(x).wait(), LOSS.choose(kernels, x)
        here = (labels >= first) & (labels < first + count)
        rows, valid = torch.where(here, labels - first, 0), labels != IGNORE
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        counted = valid if weights is None else torch.where(valid, weights.to(wide), 0)
        scale = None if seed is None else (seed * counted).to(wide)
        lse, label_logit = (torch.empty(len(labels), dtype=wide, device=x.device) for _ in range(2))
        grads = HeadGrads(x_all, matrix, ctx.needs_input_grad)
        for c in chunks_of(len(labels), matrix.rows, by.CHUNK_ELEMENTS):
            logits = matrix.logits(x_all[c], kernels)
            everyone = tp.all_gather(by.softmax_stats(logits, rows[c], here[c], columns).unsqueeze(0)).wait()
            lse[c], label_logit[c] = torch.logsumexp(everyone[:, 0], 0), everyone[:, 1].sum(0)
            if scale is not None:
                grads.add(by.softmax_gradient_(logits, rows[c], here[c], lse[c], scale[c], columns), c)
        ctx.matrix, ctx.columns, ctx.tp, ctx.kernels, ctx.done = matrix, columns, tp, kernels, seed is not None
        if seed is None:
            ctx.save_for_backward(x, rows, here, counted, lse)
        else:
            ctx.grads = grads.results(tp)
        losses = lse - label_logit
        return torch.where(valid, losses if weights is None else losses * counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.done:
            return *ctx.grads, *(None,) * 8
        (x, rows, here, counted, lse), matrix, tp = ctx.saved_tensors, ctx.matrix, ctx.tp
        x_all, by = tp.all_gather(x).wait(), LOSS.choose(ctx.kernels, x)
        scale = (dloss * counted).to(lse.dtype)
        grads = HeadGrads(x_all, matrix, ctx.needs_input_grad)
        for c in chunks_of(len(rows), matrix.rows, by.CHUNK_ELEMENTS):
            logits = matrix.logits(x_all[c], ctx.kernels)
            d = by.softmax_gradient_(logits, rows[c], here[c], lse[c], scale[c], ctx.columns)
            grads.add(d, c)
        return *grads.results(tp), *(None,) * 8


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor | HeadMatrix,
    labels: Tensor,
    first: int,
    count: int,
    tp: Axis,
    seed: Tensor | None = None,
    kernels: Kernels = "auto",
    weights: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Sum over tokens of the cross entropy of x W^T + bias against labels: a scalar, the same on every tp rank.

    x (T / tp, D) this rank's tokens; weight (rows, D) holding ids first..first+count-1, the other rows padding, or a
    HeadMatrix, which says what else x has, and a bias; labels (T,) of all tokens, IGNORE where there is no loss.
    `weights` (T,): what each token's loss is multiplied by; None: 1. `cap`: logits become cap * tanh(logit / cap);
    None: they stay as they are. `seed` (): the gradient of the returned sum, if it is known beforehand. Then the
    gradients are computed here, the weight's is added at once, and backward ignores the gradient that it is given.
    """
    seed = seed if torch.is_grad_enabled() else None
    return _LinearCrossEntropy.apply(x, *HeadMatrix.of(weight), labels, first, count, tp, seed, kernels, weights, cap)


def _biased(x: Tensor, weight: Tensor, bias: Tensor, kernels: Kernels) -> Tensor:
    return _case(x, HeadMatrix(weight, bias=bias), kernels, known=True)


def _case(
    x: Tensor,
    weight: Tensor | HeadMatrix,
    kernels: Kernels,
    known: bool = False,
    elsewhere: int = 0,
    cap: float | None = None,
) -> Tensor:
    """The last three rows are padding. `known`: the gradient of the loss is known beforehand. `elsewhere`: ids on other
    ranks."""
    count = HeadMatrix.of(weight).rows - 3
    labels = torch.arange(len(x), device=x.device) * 7 % (count + elsewhere)
    labels[::3] = IGNORE
    seed = torch.tensor(0.37, dtype=torch.float64, device=x.device) if known else None
    return linear_cross_entropy(x, weight, labels, 0, count, Axis("tp"), seed, kernels, None, cap)


LOSS = Op(
    "loss",
    "chunked cross entropy of a linear head, cut over the vocabulary",
    __name__,
    ("softmax_stats", "softmax_gradient_", "CHUNK_ELEMENTS"),
    (triton("phalanx.ops.dense.loss_kernel", invariant=True), invariant(__name__)),
    cases=(
        Case("cross entropy", _case, ((7, 5), (13, 5)), (1,)),
        Case("cross entropy, many ids", _case, ((4, 3), (4200, 3)), (1,)),
        Case("cross entropy, ids held elsewhere", partial(_case, elsewhere=9), ((8, 5), (13, 5)), (1,)),
        Case("cross entropy, gradient in forward", partial(_case, known=True), ((7, 5), (13, 5)), (1,)),
        Case("cross entropy of capped logits", partial(_case, cap=1.5), ((7, 5), (13, 5)), (1,)),
        Case(
            "cross entropy of capped logits, many ids", partial(_case, known=True, cap=3.0), ((4, 3), (4200, 3)), (1,)
        ),
        Case("cross entropy, with a bias", _biased, ((7, 5), (13, 5), (13,)), (1, 2)),
        Case(
            "cross entropy over 32,061 ids",
            lambda x, w, k: _case(x * 0.1, w, k, known=True),
            ((1030, 64), (32064, 64)),
            (1,),
            large=True,
        ),
    ),
)
