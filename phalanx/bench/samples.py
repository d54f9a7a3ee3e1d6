"""Ops at the shapes of published models, for `bench ops --only`: they can be timed without a config that calls them.

Inputs are random; steps and decays are drawn as models begin with them. On a CPU there are fewer tokens of fewer heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.bench.ops import OpCall, tensors_of
from phalanx.comm.axis import Axis
from phalanx.ops.delta.delta import DELTA, DeltaInputs, delta
from phalanx.ops.op import Op
from phalanx.ops.optimizer.orthogonal import flops, orthogonalized
from phalanx.ops.optimizer.symmetric import SYMMETRIC
from phalanx.ops.scan.conv1d import CONV1D, conv1d
from phalanx.ops.scan.gated_norm import GATED_NORM, NormGroups, gated_norm
from phalanx.ops.scan.scan import SCAN, ScanInputs, scan
from phalanx.optim.muon import polynomials_of

TOKENS = {"cuda": 32768, "cpu": 256}
SMALL = 32  # on a CPU, what counts and widths are divided by
ITERATIONS = 5  # of Newton-Schulz


@dataclass(frozen=True)
class OpSample:
    """A call of an op, and the FLOP of matmuls that no implementation of it can do without, forward and backward.
    dtype: of what the op itself is given, if the call casts its inputs first."""

    call: OpCall
    op: Op
    forward_flop: float = 0.0
    backward_flop: float = 0.0
    dtype: torch.dtype | None = None

    @property
    def given(self) -> Tensor:
        """A tensor of the kind by which the op chooses its implementation."""
        first = tensors_of([*self.call.args, *self.call.kwargs.values()])[0]
        return first if self.dtype is None else first.new_empty(0, dtype=self.dtype)


@dataclass(frozen=True)
class Draw:
    """Draws inputs on a device."""

    device: torch.device
    dtype: torch.dtype

    def size(self, large: int) -> int:
        """A count or width of the published model, or less on a CPU."""
        return large if self.device.type == "cuda" else max(1, large // SMALL)

    @property
    def tokens(self) -> int:
        return TOKENS[self.device.type]

    def normal(self, *shape: int, grad: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)
        return x.requires_grad_(grad)

    def between(self, low: float, high: float, *shape: int) -> Tensor:
        """Uniform, in fp32, with a gradient."""
        return torch.empty(shape, device=self.device).uniform_(low, high).requires_grad_()


def scan_inputs(draw: Draw, heads: int, groups: int, width: int = 64, state: int = 128) -> ScanInputs:
    """One sequence, with steps from 0.001 to 0.1 and decay rates from 1 to 16, as Mamba-2 begins."""
    tokens, heads, state = draw.tokens, draw.size(heads), draw.size(state)
    groups = math.gcd(groups, heads)
    x = draw.normal(1, tokens, heads, width)
    steps = draw.between(math.log(0.001), math.log(0.1), 1, tokens, heads).detach().exp().requires_grad_()
    rates = draw.between(-16.0, -1.0, heads)
    b, c = (draw.normal(1, tokens, groups, state) for _ in range(2))
    return ScanInputs(x, steps, rates, b, c, draw.normal(heads))


def recurrence_flop(inputs: object) -> float | None:
    """Forward FLOP that no form of a recurrence can do without: of a scan's states, an outer product for each token and
    a product with C; of a delta rule's, what a state holds under a key besides. Backward has two products for each.
    None: it is neither."""
    if isinstance(inputs, ScanInputs):
        return 4.0 * inputs.x.numel() * inputs.b.shape[-1]
    if isinstance(inputs, DeltaInputs):
        return 6.0 * inputs.v.numel() * inputs.k.shape[-1]
    return None


def scan_output(s: ScanInputs) -> Tensor:
    return scan(s)[0]


def scan_sample(draw: Draw, heads: int = 80, groups: int = 8) -> OpSample:
    """Mamba-2 2.7B's heads, by default with the groups of Nemotron-H-8B."""
    s = scan_inputs(draw, heads, groups)
    flop = recurrence_flop(s) or 0.0
    return OpSample(OpCall("scan", scan_output, (s,), {}), SCAN, flop, 2 * flop)


def delta_sample(draw: Draw, key_heads: int = 16, value_heads: int = 32, width: int = 128) -> OpSample:
    """Qwen3-Next's heads: normalised keys, one decay of each value head."""
    tokens, width = draw.tokens, draw.size(width)
    key_heads, value_heads = (max(1, draw.size(n)) for n in (key_heads, value_heads))
    q, k = (draw.normal(1, tokens, key_heads, width) for _ in range(2))
    v = draw.normal(1, tokens, value_heads, width)
    decay, beta = draw.between(-0.1, 0.0, 1, tokens, value_heads), draw.between(0.0, 1.0, 1, tokens, value_heads)
    s = DeltaInputs(q, k, v, decay, beta, scale=width**-0.5, normalize=True)
    flop = recurrence_flop(s) or 0.0
    return OpSample(OpCall("delta", delta_output, (s,), {}), DELTA, flop, 2 * flop)


def delta_output(s: DeltaInputs) -> Tensor:
    return delta(s)[0]


def conv_sample(draw: Draw, channels: int = 5376) -> OpSample:
    """Mamba-2 2.7B's channels: four taps, a bias, silu."""
    channels = draw.size(channels)
    x, weight, bias = draw.normal(1, draw.tokens, channels), draw.normal(channels, 1, 4), draw.normal(channels)
    return OpSample(OpCall("conv1d", conv1d, (x, weight, bias), {}), CONV1D)


def norm_sample(draw: Draw, features: int = 8192, groups: int = 8) -> OpSample:
    """Nemotron-H-8B's norm after a scan."""
    features = draw.size(features)
    x, gate = (draw.normal(draw.tokens, features) for _ in range(2))
    shard = NormGroups(groups, features // groups, 1e-5)
    call = OpCall("gated_norm", gated_norm, (x, gate, draw.normal(features), shard, Axis("tp")), {})
    return OpSample(call, GATED_NORM)


def matrices_of(draw: Draw, hidden: int = 4096, inner: int = 14336, kv: int = 1024) -> tuple[Tensor, ...]:
    """The matrices of a layer of Llama-3-8B, those of one shape together: (count, rows, columns) in fp32."""
    hidden, inner, kv = (draw.size(n) for n in (hidden, inner, kv))
    shapes = (2, hidden, hidden), (2, kv, hidden), (2, inner, hidden), (1, hidden, inner)
    return tuple(draw.normal(*shape, grad=False, dtype=torch.float32) for shape in shapes)


def orthogonal_layer(matrices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    polynomials = polynomials_of("jordan", ITERATIONS)
    return tuple(orthogonalized(each, polynomials, True) for each in matrices)


def muon_sample(draw: Draw) -> OpSample:
    """Orthogonalisation of the matrices of a layer of Llama-3-8B."""
    matrices = matrices_of(draw)
    flop = sum(len(each) * flops(each.shape[1], each.shape[2], ITERATIONS) for each in matrices)
    return OpSample(OpCall("muon", orthogonal_layer, (matrices,), {}), SYMMETRIC, flop, dtype=torch.bfloat16)


SAMPLES: dict[str, Callable[[Draw], OpSample]] = {
    "scan": scan_sample,
    "delta": delta_sample,
    "conv": conv_sample,
    "gated_norm": norm_sample,
    "muon": muon_sample,
}
