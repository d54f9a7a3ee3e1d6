"""The ops of state-space layers against their definitions, recurrences of one token after another in float64: outputs,
last states and every gradient, inside documents."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh
from phalanx.layout.grid import Grid
from phalanx.ops import op as ops
from phalanx.ops.scan.carried import carried_output
from phalanx.ops.scan.conv1d import conv1d, last_tokens
from phalanx.ops.scan.gated_norm import NormGroups, gated_norm
from phalanx.ops.scan.rows import StateSlots, TokenRows
from phalanx.ops.scan.scan import SCAN, ScanInputs, decay_rates, scan, steps_of, whole_decay
from phalanx.ops.scan.step import StepInputs, conv1d_step, scan_step
from tests.ops.test_ops import normal

LENGTHS = (1, 2, 3, 63, 64, 65, 127, 128, 129, 257)
HEADS, WIDTH, GROUPS, STATE = 4, 3, 2, 5
NAMES = ("x", "dt", "a", "b", "c", "d", "initial")
TRITON = pytest.mark.skipif(not ops.has_triton(), reason="needs triton")


def recurrence(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, numbers: Tensor | None, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Dao & Gu, 2024, equation 1, one token after another."""
    each, state, made = x.shape[2] // b.shape[2], initial, []
    for t in range(x.shape[1]):
        if numbers is not None and t > 0:
            same = numbers[:, t] == numbers[:, t - 1]
            state = torch.where(same[:, None, None, None], state, 0)
        b_t, c_t = (m[:, t].repeat_interleave(each, 1) for m in (b, c))
        state = (
            torch.exp(dt[:, t] * a)[..., None, None] * state
            + (dt[:, t, :, None] * x[:, t])[..., None] * b_t[:, :, None]
        )
        made.append((state * c_t[:, :, None]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(made, 1), state


def inputs(rows: int, length: int, decay: float = 1.0) -> dict[str, Tensor]:
    """decay: the mean of -log of what a token leaves of a state."""
    shapes = {
        "x": (rows, length, HEADS, WIDTH),
        "dt": (rows, length, HEADS),
        "a": (HEADS,),
        "b": (rows, length, GROUPS, STATE),
        "c": (rows, length, GROUPS, STATE),
        "d": (HEADS,),
        "initial": (rows, HEADS, WIDTH, STATE),
    }
    found = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    found["dt"], found["a"] = F.softplus(found["dt"]), -decay * found["a"].exp()
    return {name: x.requires_grad_() for name, x in found.items()}


def documents(kind: str, rows: int, length: int) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "tokens":
        return torch.arange(rows * length).view(rows, length)
    drawn = torch.rand(rows * length, generator=torch.Generator().manual_seed(length)) < 0.15
    return drawn.long().cumsum(0).view(rows, length)


def compared(given: dict[str, Tensor], numbers: Tensor | None) -> None:
    made = scan(ScanInputs(**given, numbers=numbers), "plain")
    truth = recurrence(*(given[n] for n in NAMES[:6]), numbers, given["initial"])
    above = [normal(*y.shape, seed=50 + i) for i, y in enumerate(truth)]
    found = torch.autograd.grad(made, list(given.values()), above)
    wanted = torch.autograd.grad(truth, list(given.values()), above)
    for name, mine, theirs in zip(("y", "state", *NAMES), (*made, *found), (*truth, *wanted), strict=True):
        assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max().clamp(min=1.0), name


@pytest.mark.parametrize("kind", ["none", "tokens", "mixed"])
@pytest.mark.parametrize("length", LENGTHS)
def test_scan_equals_its_recurrence(length, kind):
    """Lengths around the chunk's, a first state, documents of one token and of several."""
    compared(inputs(2, length), documents(kind, 2, length))


@pytest.mark.soak
@pytest.mark.parametrize("length", range(1, 258))
def test_scan_of_every_length(length):
    compared(inputs(2, length), documents("mixed", 2, length))


@pytest.mark.parametrize("decay", [1e-9, 1e3], ids=["keeps all", "forgets all"])
def test_scan_with_extreme_decays(decay):
    compared(inputs(1, 130, decay), documents("mixed", 1, 130))


@pytest.mark.parametrize("kernels", ["plain", pytest.param("triton", marks=TRITON)])
def test_tokens_that_leave_nothing_do_not_blur_what_others_leave(kernels):
    """In fp32, one token whose decay is e^-1e6: a sum with its logarithm would round those of the tokens behind it
    away. Truth: the same where it leaves e^-200 and adds as much, in float64."""
    given = {n: t.detach() for n, t in inputs(1, 64).items()}
    given["x"][:, 10] = 0
    made = []
    for how, dtype, step in ((kernels, torch.float32, 1e6), ("plain", torch.float64, 200.0)):
        cast = {n: t.to(torch.float32).to(dtype) for n, t in given.items()} | {"a": -torch.ones(HEADS, dtype=dtype)}
        cast["dt"][:, 10] = step
        made.append(scan(ScanInputs(**cast), how))
    for mine, theirs in zip(*made):
        assert (mine - theirs).abs().max() <= 2e-5 * theirs.abs().max()


# ---- Triton kernels, interpreted


def interpreted(given: dict[str, Tensor], numbers: Tensor | None, dtype: torch.dtype) -> None:
    """Truth: the reference in float64 on the same rounded inputs. Steps, decays and states stay in at least fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    rounded = {n: t.detach().to(dtype if n in ("x", "b", "c") else wide) for n, t in given.items()}
    results = []
    for kernels, cast in (("triton", lambda t: t), ("plain", lambda t: t.double())):
        leaves = {n: cast(t).requires_grad_() for n, t in rounded.items()}
        made = scan(ScanInputs(**leaves, numbers=numbers), kernels)
        above = [normal(*y.shape, seed=50 + i).to(dtype).to(y.dtype) for i, y in enumerate(made)]
        results.append((*made, *torch.autograd.grad(made, list(leaves.values()), above)))
    rounding = {torch.float64: 1e-11, torch.float32: 2e-5}.get(dtype, 8 * torch.finfo(dtype).eps)
    for name, mine, theirs in zip(("y", "state", *rounded), *results, strict=True):
        assert (mine - theirs).abs().max() <= rounding * theirs.abs().max().clamp(min=1e-3), name


@TRITON
@pytest.mark.soak
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("decay", [1e-9, 0.1, 1e3], ids=["keeps all", "keeps some", "forgets all"])
def test_kernels_with_extreme_decays(decay, dtype):
    """A first state, chunks of which the last is short, documents of one token and of many. In 16 bits fp16, since
    Triton's interpreter has no matmuls in bf16."""
    interpreted(inputs(1, 80, decay), documents("mixed", 1, 80), dtype)


@TRITON
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["none", "tokens", "mixed"])
@pytest.mark.parametrize("length", [*range(1, 67), 127, 128, 129, 191, 192, 193, 256, 257])
def test_kernels_of_every_length(length, kind):
    interpreted(inputs(2, length), documents(kind, 2, length), (torch.float32, torch.float16)[length % 2])


# ---- documents and rows


def test_no_state_crosses_a_border():
    """What stands in one document changes no bit of the next."""
    given, numbers = inputs(1, 40), torch.tensor([[0] * 17 + [1] * 23])
    y, state = scan(ScanInputs(**given | {"initial": None}, numbers=numbers), "plain")
    changed = {n: x.detach().clone() for n, x in given.items()}
    for name in ("x", "dt", "b", "c"):
        changed[name][:, :17] = 1e30
    other, last = scan(ScanInputs(**changed | {"initial": None}, numbers=numbers), "plain")
    assert torch.equal(y[:, 17:], other[:, 17:]) and torch.equal(state, last) and not torch.equal(y, other)


def test_a_row_goes_on_from_the_one_before():
    """Three pieces with their states handed on, and three pieces that begin without a state, whose outputs are
    corrected by what came before, are the whole row."""
    given = inputs(1, 50)
    x, dt, a, b, c, d, _ = (given[n].detach() for n in NAMES)
    whole, last = scan(ScanInputs(x, dt, a, b, c, d))
    state, handed, corrected = None, [], []
    for rows in (slice(0, 7), slice(7, 30), slice(30, 50)):
        piece = ScanInputs(x[:, rows], dt[:, rows], a, b[:, rows], c[:, rows], d)
        alone, added = scan(piece)
        if state is None:
            corrected.append(alone)
            y, state = alone, added
        else:
            corrected.append(carried_output(alone.clone(), piece, state))
            y, after = scan(piece._replace(initial=state))
            state = added + whole_decay(dt[:, rows], a)[..., None, None] * state
            torch.testing.assert_close(after, state, rtol=1e-12, atol=1e-12)
        handed.append(y)
    for pieces in (handed, corrected):
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_single_tokens_are_the_whole_row(kernels):
    """The one-token forms of scan and convolution, with states updated in place, at slots in any order. A state of a
    sequence that begins is not read."""
    given, slots, limits = inputs(3, 12), torch.tensor([4, 0, 2]), (0.2, 2.0)
    x, raw, log, b, c, d, _ = (given[n].detach() for n in NAMES)
    bias = normal(HEADS, seed=8)
    whole, last = scan(ScanInputs(x, steps_of(raw, bias, limits), decay_rates(log), b, c, d))
    states = torch.full((5, HEADS, WIDTH, STATE), torch.nan, dtype=x.dtype)
    found = []
    for t in range(12):
        kept = StateSlots(states, slots, torch.full((3,), True) if t == 0 else None)
        found.append(scan_step(StepInputs(x[:, t], raw[:, t], b[:, t], c[:, t], bias, log, d, limits), kept, kernels))
    torch.testing.assert_close(torch.stack(found, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states[slots], last, rtol=1e-12, atol=1e-12)
    assert states[[1, 3]].isnan().all()
    x, weight, bias = normal(3, 12, 7), normal(7, 1, 4), normal(7)
    states = torch.zeros(5, 3, 7, dtype=x.dtype)
    found = [conv1d_step(x[:, t], StateSlots(states, slots), weight, bias, True, kernels) for t in range(12)]
    torch.testing.assert_close(torch.stack(found, 1), conv1d(x, weight, bias), rtol=1e-12, atol=1e-12)
    assert torch.equal(states[slots], last_tokens(x, None, 4)) and not states[[1, 3]].any()


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)], ids=str)
def test_steps_and_rates(limits):
    """Truth: the formulas in plain torch, gradients of the parameters included."""
    dt, bias, log = (normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(((6, 4), (4,), (4,))))
    made = steps_of(dt, bias, limits) * decay_rates(log)
    truth = torch.clamp(torch.log(1 + torch.exp(dt + bias)), *limits) * -torch.exp(log)
    torch.testing.assert_close(made, truth, rtol=1e-13, atol=1e-13)
    given = (dt, bias, log)
    found, wanted = (torch.autograd.grad(y.square().sum(), given) for y in (made, truth))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("kind", ["none", "tokens", "mixed"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 70])
def test_conv1d_equals_its_sum(length, kind, silu):
    """Truth: for a whole row torch's conv1d; with documents, each token's sum written out."""
    taps, channels = 4, 3
    numbers = documents(kind, 2, length)
    x, weight, bias = normal(2, length, channels), normal(channels, 1, taps, seed=1), normal(channels, seed=2)
    before = normal(2, taps - 1, channels, seed=3)
    given = [t.requires_grad_() for t in (x, weight, bias, before)]
    made = conv1d(x, weight, bias, TokenRows(numbers, before), silu)
    if numbers is None:
        joined = torch.cat((before, x), 1).transpose(1, 2)
        truth = F.conv1d(joined, weight, bias, groups=channels).transpose(1, 2)
    else:
        truth = torch.stack([torch.stack([_sum(given, numbers, r, t) for t in range(length)]) for r in range(2)])
    truth = F.silu(truth) if silu else truth
    above = normal(*truth.shape, seed=9)
    found, wanted = (torch.autograd.grad(y, given, above, materialize_grads=True) for y in (made, truth))
    torch.testing.assert_close([made, *found], [truth, *wanted], rtol=1e-12, atol=1e-12)


def _sum(given: list[Tensor], numbers: Tensor, row: int, token: int) -> Tensor:
    x, weight, bias, before = given
    total = bias
    for back in range(weight.shape[-1]):
        at, w = token - back, weight[:, 0, weight.shape[-1] - 1 - back]
        if at < 0 and numbers[row, token] == numbers[row, 0]:
            total = total + w * before[row, at]
        elif at >= 0 and numbers[row, at] == numbers[row, token]:
            total = total + w * x[row, at]
    return total


@pytest.mark.parametrize("order", ["gate first", "norm first"])
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm_equals_its_formula(groups, order):
    x, z, weight = (normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(((5, 12), (5, 12), (12,))))
    shard = NormGroups(groups, 12 // groups, 1e-3, order=order)
    made = gated_norm(x, z, weight, shard, Axis("tp"), "plain")

    def normed(u: Tensor) -> Tensor:
        by_group = u.view(5, groups, -1)
        return (by_group / torch.sqrt(by_group.square().mean(-1, keepdim=True) + 1e-3)).view(5, 12) * weight

    truth = normed(x * F.silu(z)) if order == "gate first" else normed(x) * F.silu(z)
    above = normal(5, 12, seed=9)
    found, wanted = (torch.autograd.grad(y, (x, z, weight), above) for y in (made, truth))
    torch.testing.assert_close([made, *found], [truth, *wanted], rtol=1e-12, atol=1e-12)


def spread_norms(rank: int, world: int, order: str) -> list[list[Tensor]]:
    """Output and gradients of this rank's half of 12 features in one group, by the reference and by the kernel."""
    tp = Mesh(Grid(tp=world), rank).tp
    own = slice(rank * 6, rank * 6 + 6)
    found = []
    for kernels in ("plain", "triton"):
        x, z, weight = (normal(*shape, seed=i)[..., own].requires_grad_() for i, shape in enumerate(HALVES))
        shard = NormGroups(1, 12, 1e-3, spread=True, order=order)
        y = gated_norm(x, z, weight, shard, tp, kernels)
        found.append([y.detach(), *torch.autograd.grad(y, (x, z, weight), normal(5, 12, seed=9)[:, own])])
    return found


HALVES = ((5, 12), (5, 12), (12,))


@pytest.mark.parametrize("order", ["gate first", "norm first"])
def test_gated_norm_of_a_group_on_two_ranks(ranks, order):
    """The kernel's sums travel as the reference's do, and both are the norm of one rank."""
    x, z, weight = (normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(HALVES))
    whole = gated_norm(x, z, weight, NormGroups(1, 12, 1e-3, order=order), Axis("tp"), "plain")
    truth = [whole.detach(), *torch.autograd.grad(whole, (x, z, weight), normal(5, 12, seed=9))]
    halves = ranks.run("tests.ops.test_scan:spread_norms", 2, order)
    for by in (0, 1):
        made = [torch.cat(parts, -1) for parts in zip(*(half[by] for half in halves))]
        torch.testing.assert_close(made, truth, rtol=1e-12, atol=1e-12)


@TRITON
@pytest.mark.parametrize(
    "width, state, dtype, wanted",
    [
        (64, 128, torch.bfloat16, "kernel"),
        (128, 256, torch.bfloat16, "kernel"),
        (128, 256, torch.float32, "reference"),
        (256, 64, torch.bfloat16, "reference"),
        (16, 1024, torch.bfloat16, "reference"),
        (8, 200, torch.float32, "kernel"),
    ],
    ids=str,
)
def test_sizes_that_kernels_have_no_room_for_run_the_reference(width, state, dtype, wanted):
    assert SCAN.implementations[0].fits(width, state, dtype.itemsize) == (wanted == "kernel")


@TRITON
def test_loops_of_gradients_have_as_many_stages_as_there_is_room_for():
    """Shared memory as compiled for Hopper (tests/harness/compile_kernels.py compiles both sizes, and would say if it
    were exceeded): of Falcon-H1-7B's heads, three stages take 290 KiB of 227."""
    from phalanx.ops.scan.scan_kernel import grad_stages

    assert [grad_stages(*size, room=232448) for size in ((64, 128), (64, 256), (128, 256))] == [3, 3, 2]
    assert grad_stages(128, 256, room=166912) == 1  # A100
