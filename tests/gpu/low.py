"""Checks of low precision on a GPU: codes, scales and counts against the CPU's reference implementations to the bit,
products within their sums' rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl

from phalanx.comm.axis import Axis, ModelAxes
from phalanx.ops.dense.activation import (
    Gated,
    GatedGrad,
    GatedRows,
    GatedRowsGrad,
    gated_backward,
    gated_rows,
    parts_of_sums,
)
from phalanx.ops.dense.gate import CLAMPED_SWIGLU, SWIGLU
from phalanx.ops.dense.norm import Normed
from phalanx.ops.dense.rope import ROPE, Angles, RopeGrad, rotary_table
from phalanx.ops.experts.permute import PERMUTE, Gathered, combine_rows, gather_rows, plan_rows
from phalanx.ops.experts.rows import ExpertRows
from phalanx.ops.quantized import quantize_kernel as kernels
from phalanx.ops.quantized.casts import GIVEN, CastSpec
from phalanx.ops.quantized.cublaslt import cublaslt
from phalanx.ops.quantized.expert_quantizer import ExpertQuantizer
from phalanx.ops.quantized.experts import quantized_grouped_matmul, quantized_grouped_mlp
from phalanx.ops.quantized.gemm import add_fast_product_, fast_product
from phalanx.ops.quantized.linear import quantized_gather_matmul
from phalanx.ops.quantized.quantize_tile import multiplier_of, reciprocal, scales_of
from phalanx.ops.quantized.quantizer import DY, W, WeightQuantizer, X
from phalanx.ops.quantized.recipes import (
    COUNTS,
    E4M3,
    E5M2,
    SLOTS,
    Scaled,
    block_amax,
    cast,
    find_recipe,
    multipliers,
    quantize,
    scaled_product,
)
from tests.gpu.experts import no_host_sync
from tests.harness.weights import make_weight

ONE = Axis("tp")
CAST_SHAPES = [(16, 16), (272, 144), (4096, 1408), (1000, 1024)]


def on(device: torch.device, q: Scaled) -> Scaled:
    return Scaled(q.quantized.to(device), q.scales.to(device), q.block)


def spread_out(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * torch.exp(3 * torch.randn(shape, generator=g))).bfloat16()


def quantizer_of(recipe: str, twin: str, device: torch.device) -> WeightQuantizer:
    low = WeightQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), twin)  # type: ignore[arg-type]
    low.counts, low.amax = (
        torch.zeros(3, SLOTS, COUNTS, dtype=torch.int64, device=device),
        torch.zeros(3, device=device),
    )
    if recipe == "delayed":
        low.multiplier = torch.tensor([3.0, 40.0, 0.01], device=device)
    return low


def same(what: str, a: Scaled, b: Scaled) -> None:
    equal = torch.equal(a.quantized.cpu().view(torch.uint8), b.quantized.view(torch.uint8)) and torch.equal(
        a.scales.cpu(), b.scales
    )
    if a.block != b.block or not equal:
        raise AssertionError(f"{what}: codes or scales differ")


def plain_casts(device: torch.device) -> str:
    """The definition on a GPU is that on the CPU."""
    for shape in CAST_SHAPES:
        x = spread_out(*shape)
        for which in (X, W, DY):
            found, truth = (quantizer_of("tensorwise", "plain", where) for where in (device, torch.device("cpu")))
            pairs = zip(found.both(which, x.to(device), 0, True), truth.both(which, x, 0, True))
            for i, (a, b) in enumerate(pairs):
                same(f"{shape} {which} {i}", a, b)
            if not torch.equal(found.counts.cpu(), truth.counts) or not torch.equal(found.amax.cpu(), truth.amax):  # type: ignore[union-attr]
                raise AssertionError(f"{shape}: counts differ")
    return "to the bit"


def every_number(device: torch.device) -> str:
    """All bf16 numbers, by the GPU's own rounding."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    for format in (E4M3, E5M2):
        made, _ = kernels.cast_both(x.to(device), CastSpec(format, GIVEN, torch.ones(1, device=device)), False)
        truth, found = cast(x.float(), format), made.quantized.cpu()
        nan = truth.float().isnan()
        if not found.float()[nan].isnan().all() or not torch.equal(
            found.view(torch.uint8)[~nan], truth.view(torch.uint8)[~nan]
        ):
            raise AssertionError(f"{format.name}: codes differ")
    return "to the bit"


def no_numbers(device: torch.device) -> str:
    """Where a value is no number: codes and scales that are none, where the reference implementation's are none, and
    else equal."""
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise"):
        for bad in (torch.nan, torch.inf, -torch.inf):
            x = spread_out(272, 144)
            x[3, 5], x[200, 130] = bad, 0.0
            made = quantizer_of(recipe, "auto", device).both(X, x.to(device), 0, True)
            for i, (a, b) in enumerate(
                zip(made, quantizer_of(recipe, "plain", torch.device("cpu")).both(X, x, 0, True))
            ):
                for what, found, truth in (
                    ("codes", a.quantized.cpu().float(), b.quantized.float()),
                    ("scales", a.scales.cpu(), b.scales),
                ):
                    if not torch.equal(found.isnan(), truth.isnan()) or not torch.equal(
                        found.nan_to_num(), truth.nan_to_num()
                    ):
                        raise AssertionError(f"{recipe}, {bad}: {what} {i} differ")
    return "as the reference implementation"


@triton.jit
def _scales(bits, found, truth, BLOCK: tl.constexpr, MAX: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(bits + i)
    m, scale = scales_of(amax, MAX, FLOOR=2.0**-100, ROUND=False)
    tl.store(found + 2 * i, m.to(tl.int32, bitcast=True))
    tl.store(found + 2 * i + 1, scale.to(tl.int32, bitcast=True))
    m = multiplier_of(amax, MAX, FLOOR=2.0**-100)
    tl.store(truth + 2 * i, m.to(tl.int32, bitcast=True))
    tl.store(truth + 2 * i + 1, reciprocal(m).to(tl.int32, bitcast=True))


def every_scale(device: torch.device) -> str:
    """Multipliers and scales made without a division, of all mantissas of amaxes, and of what is no number or next
    to it."""
    for format in (E4M3, E5M2):
        for exponent in (0, 26, 27, 28, 100, 126, 127, 128, 200, 252, 253, 254, 255):
            bits = (exponent << 23) + torch.arange(2**23, dtype=torch.int32, device=device)
            found, truth = (
                torch.empty(2**23, 2, dtype=torch.int32, device=device),
                torch.empty(2**23, 2, dtype=torch.int32, device=device),
            )
            _scales[(2**23 // 1024,)](bits, found, truth, BLOCK=1024, MAX=format.max)
            nan = truth.view(torch.float32).isnan() & found.view(torch.float32).isnan()
            if not torch.equal(found[~nan], truth[~nan]):
                raise AssertionError(
                    f"{format.name}, exponent {exponent}: {(found != truth).sum()} scales are others than by division"
                )
    return "to the bit"


def products(recipe: str, weight: bool) -> Callable[[torch.device], str]:
    """Forward (with a weight) and a weight's gradient added to fp32: against float64 sums of the same codes."""

    def check(device: torch.device) -> str:
        r, worst = find_recipe(recipe), 0.0
        for m, n, k in ((256, 512, 1024), (272, 144, 400), (4096, 1024, 2048)):
            if recipe == "blockwise" and k % 128:
                k = 512
            a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
            blocks, first = (r.tokens, r.weight if weight else r.tokens), r.forward if weight else r.backward
            qa, qb = (
                quantize(x, bl, f, multipliers(block_amax(x, bl), f))
                for x, bl, f in zip((a, b), blocks, (first, r.forward))
            )
            exact = scaled_product(qa, qb, torch.float64)
            for fast in (True, False):
                if weight:
                    found = fast_product(on(device, qa), on(device, qb), torch.bfloat16, fast)
                    bound = 2**-8
                else:
                    found = torch.zeros(m, n, device=device)
                    for _ in range(2):
                        add_fast_product_(found, on(device, qa), on(device, qb), fast)
                    found = found / 2
                    bound = 2**-11 if r.tokens == (0, 0) else 2**-8  # torch's GEMMs with scales of their own give bf16
                sums = (
                    2.0**-14 * k / 32 if fast else 0.0
                )  # the tensor cores' own sums drop what is below 14 bits, 32 terms at a time
                off = ((found.double().cpu() - exact).abs().max() / exact.abs().max()).item()
                worst = max(worst, off)
                if not off <= bound + sums:
                    raise AssertionError(f"{m}x{n}x{k} fast={fast}: off by {off:.2e}")
        return f"{worst:.1e}"

    return check


def gated_casts(recipe: str) -> Callable[[torch.device], str]:
    """What SwiGLU makes, and its gradient, cast as it is made: against its own kernels and a cast of what they
    wrote, on the same GPU."""

    def check(device: torch.device) -> str:
        for rows, inner in ((272, 144), (1024, 1408)):
            x, dy = spread_out(rows, 2 * inner).to(device), spread_out(rows, inner, seed=1).to(device)
            for which, source in ((X, Gated(x)), (DY, GatedGrad(dy, x))):
                fused, gradient_distance = (
                    quantizer_of(recipe, "triton", device),
                    quantizer_of(recipe, "triton", device),
                )
                for i, (a, b) in enumerate(
                    zip(fused.both(which, source, 1, True), gradient_distance.both(which, source.tensor(), 1, True))
                ):
                    same(f"{recipe} {rows} {inner} {which} {i}", a, Scaled(b.quantized.cpu(), b.scales.cpu(), b.block))
                if not torch.equal(fused.counts[..., -1].amax(1), gradient_distance.counts[..., -1].amax(1)):  # type: ignore[index]
                    raise AssertionError(f"{recipe} {rows} {inner}: amaxes differ")
        return "to the bit"

    return check


def lazy_casts(recipe: str) -> Callable[[torch.device], str]:
    """RMSNorm's output and the gradient of rope, cast as they are made: against the plain formulas and casts on the
    CPU."""

    def check(device: torch.device) -> str:
        for rows, inner in ((272, 144), (1024, 4096)):
            x, weight = spread_out(rows, inner), spread_out(1, inner, seed=1)[0].clamp(-4, 4)
            scale = torch.rsqrt(x.float().square().mean(-1) + 1e-5)
            told(
                recipe,
                f"norm {rows} {inner}",
                X,
                Normed(*(t.to(device) for t in (x, scale, weight))),
                Normed(x, scale, weight).tensor(),
                device,
            )
        for length, width in ((136, 16), (512, 128)):
            q, k, v = (
                spread_out(2 * length * n, width, seed=n).view(2, length, n, width).transpose(1, 2) for n in (6, 2, 2)
            )
            cos, sin, _ = rotary_table(
                torch.arange(2 * length) % length, 1e4 ** (-torch.arange(width // 2) * 2 / width), torch.bfloat16
            )
            c, s = (t.float().view(2, 1, length, -1) for t in (cos, sin))
            back = [
                torch.cat((a * c + b * s, b * c - a * s), -1).bfloat16()
                for a, b in (t.float().chunk(2, -1) for t in (q, k))
            ]
            truth = torch.cat((*back, v), 1).transpose(1, 2).reshape(2 * length, -1)
            by = ROPE.choose("triton", q)
            source = RopeGrad(*(t.to(device) for t in (q, k, v)), Angles(cos.to(device), sin.to(device)), by)
            if recipe != "blockwise" or width == 128:
                told(recipe, f"rope {length} {width}", DY, source, truth, device)
        return "to the bit"

    def told(
        recipe: str, what: str, which: int, source: Normed | RopeGrad, truth: torch.Tensor, device: torch.device
    ) -> None:
        low, plain = quantizer_of(recipe, "triton", device), quantizer_of(recipe, "plain", torch.device("cpu"))
        for i, (a, b) in enumerate(zip(low.both(which, source, 1, True), plain.both(which, truth, 1, True))):
            same(f"{recipe} {what} {i}", a, b)

    return check


def by_cublaslt(device: torch.device) -> str:
    """Every GEMM that cuBLASLt is asked for, and which of them it has: against float64 sums of the same codes."""
    library, told = cublaslt(device.index or 0), []
    if library is None:
        raise AssertionError("no cuBLASLt: weights' gradients are added by other GEMMs")
    m, n, k = 256, 384, 1024
    kinds = {
        "one scale": ("tensorwise", False),
        "lines": ("rowwise", False),
        "blocks": ("blockwise", False),
        "squares": ("blockwise", True),
    }
    for name, (recipe, weight) in kinds.items():
        r = find_recipe(recipe)
        blocks, formats = (r.tokens, r.weight if weight else r.tokens), (r.forward if weight else r.backward, r.forward)
        a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        qa, qb = (quantize(x, bl, f, multipliers(block_amax(x, bl), f)) for x, bl, f in zip((a, b), blocks, formats))
        exact = scaled_product(qa, qb, torch.float64)
        for add, dtype in ((True, torch.float32), (False, torch.bfloat16)):
            out = torch.full((m, n), 2.0, dtype=dtype, device=device)
            if not library.product(out, on(device, qa), on(device, qb), False, add):
                told.append(f"no {name}{' added' if add else ''}")
                continue
            off = ((out.double().cpu() - exact - 2.0 * add).abs().max() / exact.abs().max()).item()
            if not off <= (2**-11 if add else 2**-8):
                raise AssertionError(f"{name}, add={add}: off by {off:.2e}")
            told.append(f"{name}{' added' if add else ''} {off:.0e}")
    return ", ".join(told)


def linear(recipe: str) -> Callable[[torch.device], str]:
    """A whole linear, forward and backward, against the CPU's reference implementation of the same recipe: same codes,
    sums in another order."""

    def check(device: torch.device) -> str:
        found = []
        for where, twin in ((device, "auto"), (torch.device("cpu"), "plain")):
            sizes = enumerate(((512, 384), (256, 384), (512, 256)))
            x, w, dy = (torch.randn(*s, generator=torch.Generator().manual_seed(i)).bfloat16() for i, s in sizes)
            weight = w.to(where).requires_grad_()
            weight.grad_dtype, weight.grad = torch.float32, torch.zeros(256, 384, device=where)
            low = quantizer_of(recipe, twin, where)
            if recipe == "delayed":
                low.multiplier = torch.tensor([100.0, 100.0, 12000.0], device=where)
            x = x.to(where).requires_grad_()
            y = quantized_gather_matmul(x, weight, ONE, None, low)
            y.backward(dy.to(where))
            found.append([t.detach().double().cpu() for t in (y, x.grad, weight.grad)])  # type: ignore[union-attr]
        worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found))
        if not worst <= 2**-7:
            raise AssertionError(f"off by {worst:.2e}")
        return f"{worst:.1e}"

    return check


ENDS = torch.tensor(
    [300, 1711, 1711, 1712, 3000, 3128, 3129, 4990], dtype=torch.int32
)  # of 5100 rows: the rest is nobody's


def experts_of(recipe: str, twin: str, device: torch.device) -> ExpertQuantizer:
    low = ExpertQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), twin)  # type: ignore[arg-type]
    low.counts, low.amax = (
        torch.zeros(3, SLOTS, COUNTS, dtype=torch.int64, device=device),
        torch.zeros(3, device=device),
    )
    if recipe == "delayed":
        low.multiplier = torch.tensor([100.0, 100.0, 12000.0], device=device)
    return low


def routed(device: torch.device) -> tuple[ExpertRows, int]:
    """Rows of 1,300 tokens, each at 4 of 8 experts, some pairs dropped; 5,100 rows of room."""
    experts = torch.rand(1300, 8, generator=torch.Generator().manual_seed(5)).argsort(1)[:, :4]
    experts[::13, 0] = 8
    return plan_rows(experts.to(device), 0, 8, 5100, "triton"), 1300


def expert_made_casts(recipe: str) -> Callable[[torch.device], str]:
    """Gathered tokens, what the activation makes of rows, and its gradient, cast as they are made: against their own
    kernels and casts of what they wrote, on the same GPU."""

    def check(device: torch.device) -> str:
        rows, tokens = routed(device)
        last, inner = rows.ends_E[-1], 384
        x, dy, t = (
            spread_out(n, w, seed=i).to(device)
            for i, (n, w) in enumerate(((5100, 2 * inner), (5100, inner), (tokens, 512)))
        )
        weights = torch.rand(5100, generator=torch.Generator().manual_seed(3)).to(device)
        for gate in (SWIGLU, replace(CLAMPED_SWIGLU, interleaved=False)):
            sums = of_weights = torch.zeros(parts_of_sums(inner), 5100, device=device)
            sources = [
                (X, GatedRows(x, weights, last, gate)),
                (DY, GatedRowsGrad(x, weights, last, gate, dy=dy, sums=sums)),
                (X, Gathered(t, rows, PERMUTE.choose("auto", t))),
            ]
            for which, source in sources:
                fused, gradient_distance = experts_of(recipe, "triton", device), experts_of(recipe, "triton", device)
                made, summed = (
                    fused.rows(which, source, rows.ends_E),
                    sums.sum(0),
                )  # before `tensor`, which leaves its own there
                truth = gradient_distance.rows(which, source.tensor(), rows.ends_E)
                of_weights = summed if which == DY else of_weights
                told = f"{recipe} {type(source).__name__}"
                same_rows(told, made, truth, rows.ends_E)
                if not torch.equal(fused.counts[..., -1].amax(1), gradient_distance.counts[..., -1].amax(1)):  # type: ignore[index]
                    raise AssertionError(f"{told}: amaxes differ")
            exact = gated_backward(dy.double(), x.double(), gate, weights.double(), last)[1]
            off = ((of_weights.double() - exact)[:last].abs().max() / exact[:last].abs().max()).item()  # type: ignore[index]
            if not off <= 2**-16:
                raise AssertionError(f"gradients of weights off by {off:.2e}")
        return "to the bit"

    return check


def same_rows(what: str, made: tuple[Scaled, Scaled], truth: tuple[Scaled, Scaled], ends: torch.Tensor) -> None:
    """Codes and scales of both kinds, of rows that there are and places that are used."""
    last, tiles = int(ends[-1]), int(((ends.diff(prepend=ends.new_zeros(1)) + 127) // 128).sum())
    for i, (a, b) in enumerate(zip(made, truth)):
        cut = slice(0, last) if i == 0 else slice(None), slice(None) if i == 0 else slice(0, 128 * tiles)
        if not torch.equal(a.quantized.view(torch.uint8)[cut], b.quantized.view(torch.uint8)[cut]):
            raise AssertionError(f"{what}: codes {i} differ")
    lines = made[0].scales[:last] if len(made[0].scales) > 1 else made[0].scales
    if not torch.equal(lines, truth[0].scales[: len(lines)]):
        raise AssertionError(f"{what}: scales differ")


def expert_mlp(recipe: str) -> Callable[[torch.device], str]:
    """Experts as one op, their rows and the gradient of them never in memory: against the ops one after another, on
    the same GPU."""

    def check(device: torch.device) -> str:
        rows, tokens = routed(device)
        found = []
        for whole in (True, False):
            sizes = enumerate(((tokens, 512), (8, 768, 512), (8, 512, 384), (tokens, 512)))
            x, up, down, dy = (
                torch.randn(*s, generator=torch.Generator().manual_seed(i)).bfloat16().to(device) for i, s in sizes
            )
            weights = torch.rand(5100, generator=torch.Generator().manual_seed(9)).to(device).requires_grad_()
            quantizers = experts_of(recipe, "auto", device), experts_of(recipe, "auto", device)
            up, down = (
                make_weight(w, quantizer, torch.full(w.shape, 3.0, device=device))
                for w, quantizer in zip((up, down), quantizers)
            )
            x.requires_grad_()
            with no_host_sync(device):
                h = gather_rows(x, rows, "auto", lazy=whole)
                if whole:
                    h = quantized_grouped_mlp(h, up, down, rows.ends_E, weights, SWIGLU, quantizers=quantizers)
                else:
                    h = gated_rows(quantized_grouped_matmul(h, up, rows.ends_E, quantizers[0]), rows.ends_E, weights)
                    h = quantized_grouped_matmul(h, down, rows.ends_E, quantizers[1])
                y = combine_rows(h, None, rows, tokens, "auto", lazy_grad=whole)
                y.backward(dy)
            last = int(rows.ends_E[-1])
            found.append([t.detach() for t in (y, x.grad, up.grad, down.grad, weights.grad[:last])])  # type: ignore[union-attr,index]
        for name, a, b in zip(("outputs", "inputs' gradients", "gate and up", "down"), *found):
            if not torch.equal(a, b):
                raise AssertionError(f"{name} differ by {(a - b).abs().max().item():.2e}")
        off = ((found[0][4] - found[1][4]).abs().max() / found[1][4].abs().max()).item()
        if not off <= 2**-16:
            raise AssertionError(f"gradients of weights off by {off:.2e}")
        return "to the bit"

    return check


def expert_layer(recipe: str, fast: bool) -> Callable[[torch.device], str]:
    """The products of a stack of experts, forward and backward, without a wait of the host, against the CPU's plain
    twin: same codes, sums in another order."""

    def check(device: torch.device) -> str:
        found = []
        for where, twin in ((device, "auto"), (torch.device("cpu"), "plain")):
            sizes = enumerate(((5100, 384), (8, 256, 384), (8, 256), (5100, 256)))
            x, w, bias, dy = (
                torch.randn(*s, generator=torch.Generator().manual_seed(i)).bfloat16().to(where) for i, s in sizes
            )
            ends = ENDS.to(where)
            weight = w.requires_grad_()
            weight.grad_dtype, weight.grad = torch.float32, torch.full((8, 256, 384), 3.0, device=where)
            low = experts_of(recipe, twin, where)
            low.fast_forward = low.fast_backward = fast
            x[4990:], dy[4990:] = torch.nan, torch.nan
            x = x.requires_grad_()
            with no_host_sync(where):
                y = quantized_grouped_matmul(x, weight, ends, low, bias)
                y.backward(dy)
            found.append([t.detach().double().cpu() for t in (y[:4990], x.grad[:4990], weight.grad)])  # type: ignore[union-attr,index]
        worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found))
        if not worst <= 2**-7:
            raise AssertionError(f"off by {worst:.2e}")
        return f"{worst:.1e}"

    return check


def low_checks() -> dict[str, Callable[[torch.device], str]]:
    found: dict[str, Callable[[torch.device], str]] = {"low precision, every bf16 number": every_number}
    found |= {"low precision, every scale": every_scale, "low precision, what is no number": no_numbers}
    found["low precision, GEMMs of cuBLASLt"] = by_cublaslt
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise"):
        found[f"low precision, SwiGLU and casts {recipe}"] = gated_casts(recipe)
        found[f"low precision, norm, rope and casts {recipe}"] = lazy_casts(recipe)
        found[f"low precision, linear {recipe}"] = linear(recipe)
        found[f"low precision, what experts make, cast {recipe}"] = expert_made_casts(recipe)
        found[f"low precision, experts as one op {recipe}"] = expert_mlp(recipe)
        for fast in (False, True):
            found[f"low precision, experts {recipe}, {'fast' if fast else 'precise'} sums"] = expert_layer(recipe, fast)
        if recipe != "delayed":
            found[f"low precision, product {recipe}"] = products(recipe, True)
            found[f"low precision, weight gradient {recipe}"] = products(recipe, False)
    for recipe in ("mxfp8", "nvfp4"):
        found[f"low precision, linear {recipe}"] = linear(recipe)
    found["low precision, casts in plain PyTorch"] = plain_casts
    return found
