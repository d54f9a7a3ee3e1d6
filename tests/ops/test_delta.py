"""The gated delta rule against its definition, a recurrence of one token after another in float64: outputs, last states
and every gradient, inside documents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.comm.mesh import Mesh
from phalanx.layout.grid import Grid
from phalanx.ops import op as ops
from phalanx.ops import proof
from phalanx.ops.delta.context import delta_over_ranks
from phalanx.ops.delta.delta import DELTA, TILES, DeltaGrads, DeltaInputs, delta
from phalanx.ops.delta.remembered import delta_remembered
from phalanx.ops.delta.step import delta_step
from phalanx.ops.op import Kernels, first_right, triton
from phalanx.ops.scan.rows import StateSlots
from phalanx.sequence.batch import Batch
from phalanx.sequence.paged import StateSpans
from tests.ops.test_ops import make_batch, normal
from tests.ops.test_scan import documents

LENGTHS = (1, 2, 17, 63, 64, 65, 130, 257)
KEY_HEADS, KEYS, HEADS, WIDTH, SCALE = 2, 5, 4, 3, 0.7
NAMES = ("q", "k", "v", "decay", "beta", "initial")


def recurrence(s: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Yang et al., 2024 ("Gated Delta Networks"), equation 10, one token after another."""
    each, q, k = s.v.shape[2] // s.k.shape[2], s.q, s.k
    if s.normalize:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(each, 2) for x in (q, k))
    decay = s.decay.exp() if s.by_feature else s.decay.exp().unsqueeze(-1)
    state, made = s.initial, []
    for t in range(s.v.shape[1]):
        if s.numbers is not None and t > 0:
            same = s.numbers[:, t] == s.numbers[:, t - 1]
            state = torch.where(same[:, None, None, None], state, 0)
        state = state * decay[:, t].unsqueeze(-1)
        held = (state * k[:, t].unsqueeze(-1)).sum(2)
        correction = s.beta[:, t].unsqueeze(-1) * (s.v[:, t] - held)
        state = state + k[:, t].unsqueeze(-1) * correction.unsqueeze(2)
        made.append((state * q[:, t].unsqueeze(-1)).sum(2) * s.scale)
    return torch.stack(made, 1), state


def inputs(rows: int, length: int, by_feature: bool, decay: float = 0.1, **how: bool) -> DeltaInputs:
    """decay: the mean of -log of what a token leaves of a state. Keys are no longer than 1, so that states stay."""
    tokens, state = (rows, length, HEADS), (rows, HEADS, KEYS, WIDTH)
    q, k, v = (
        normal(rows, length, KEY_HEADS, KEYS),
        normal(rows, length, KEY_HEADS, KEYS, seed=1),
        normal(*tokens, WIDTH, seed=2),
    )
    logs = -decay * normal(*tokens, *([KEYS] if by_feature else []), seed=3).square()
    k = k if how.get("normalize") else F.normalize(k, dim=-1)
    made = DeltaInputs(q, k, v, logs, normal(*tokens, seed=4).sigmoid(), None, normal(*state, seed=5), SCALE, **how)
    return made._replace(**{n: getattr(made, n).detach().requires_grad_() for n in NAMES})


def compared(given: DeltaInputs, truth: tuple[Tensor, Tensor] | None = None) -> None:
    """truth: the recurrence of these inputs, if it was computed another way."""
    leaves = [getattr(given, n) for n in NAMES]
    made, truth = delta(given, "plain"), truth or recurrence(given)
    above = [normal(*y.shape, seed=50 + i) for i, y in enumerate(truth)]
    found, wanted = (torch.autograd.grad(y, leaves, above) for y in (made, truth))
    for name, mine, theirs in zip(("y", "state", *NAMES), (*made, *found), (*truth, *wanted), strict=True):
        assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max().clamp(min=1.0), name


BOTH = pytest.mark.parametrize("by_feature", [False, True], ids=["by head", "by feature"])


@BOTH
@pytest.mark.parametrize(
    "length, kind", [(n, kind) for n in LENGTHS for kind in ("none", "tokens", "mixed") if n < 257 or kind == "mixed"]
)
def test_delta_equals_its_recurrence(length, kind, by_feature):
    """Lengths around the chunk's, a first state, documents of one token and of several."""
    given = inputs(2, length, by_feature, normalize=length % 2 == 0)
    compared(given._replace(numbers=documents(kind, 2, length)))


@pytest.mark.soak
@BOTH
@pytest.mark.parametrize("length", range(1, 258))
def test_delta_of_every_length(length, by_feature):
    compared(inputs(2, length, by_feature, normalize=True)._replace(numbers=documents("mixed", 2, length)))


@BOTH
@pytest.mark.parametrize("decay", [1e-9, 1e3], ids=["keeps all", "forgets all"])
def test_delta_with_extreme_decays(decay, by_feature):
    compared(inputs(1, 130, by_feature, decay)._replace(numbers=documents("mixed", 1, 130)))


@BOTH
def test_tokens_that_leave_nothing_do_not_blur_what_others_leave(by_feature):
    """In fp32, one token whose decay is -1e6: a sum with it would round the decays of those behind it away. Truth: the
    same where it leaves e^-200, in float64."""
    given = inputs(1, 64, by_feature, 1e-2, normalize=True)
    forgets = (torch.arange(64) == 10).view(1, 64, 1, *([1] if by_feature else []))
    made = []
    for dtype, least in ((torch.float32, -1e6), (torch.float64, -200.0)):
        given = given._replace(**{n: getattr(given, n).detach().to(dtype) for n in NAMES})
        made.append(delta(given._replace(decay=given.decay.masked_fill(forgets, least)), "plain"))
    for mine, theirs in zip(*made):
        assert (mine - theirs).abs().max() <= 2e-5 * theirs.abs().max()


@BOTH
def test_keys_that_are_all_equal(by_feature):
    """The inverse of the triangular system stays small where powers of its matrix do not."""
    given = inputs(1, 130, by_feature, 1e-3, normalize=True)
    same = given.k.detach()[:, :1].expand(1, 130, KEY_HEADS, KEYS).clone().requires_grad_()
    compared(given._replace(k=same, beta=torch.ones_like(given.beta).requires_grad_()))


@BOTH
def test_no_state_crosses_a_border(by_feature):
    """What stands in one document changes no bit of the next."""
    given = inputs(1, 40, by_feature, normalize=True)._replace(
        initial=None, numbers=torch.tensor([[0] * 17 + [1] * 23])
    )
    y, state = delta(given, "plain")
    changed = {n: getattr(given, n).detach().clone() for n in NAMES[:5]}
    for name, x in changed.items():
        x[:, :17] = -1e15 if name == "decay" else 1e15
    other, last = delta(given._replace(**changed), "plain")
    assert torch.equal(y[:, 17:], other[:, 17:]) and torch.equal(state, last) and not torch.equal(y, other)


@BOTH
def test_a_row_goes_on_from_the_one_before(by_feature):
    given = inputs(1, 50, by_feature)
    whole, last = delta(given)
    state, made = given.initial, []
    for rows in (slice(0, 7), slice(7, 30), slice(30, 50)):
        y, state = delta(given._replace(initial=state, **{n: getattr(given, n)[:, rows] for n in NAMES[:5]}))
        made.append(y)
    torch.testing.assert_close(torch.cat(made, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


@BOTH
@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_single_tokens_are_the_whole_row(by_feature, kernels):
    """The one-token form, with states updated in place, at slots in any order. A state of a sequence that begins is not
    read."""
    given, slots = inputs(3, 12, by_feature, normalize=True)._replace(initial=None), torch.tensor([4, 0, 2])
    given = given._replace(**{n: getattr(given, n).detach() for n in NAMES[:5]})
    whole, last = delta(given)
    states = torch.full((5, HEADS, KEYS, WIDTH), torch.nan, dtype=torch.float64)
    found = []
    for t in range(12):
        token = given._replace(**{n: getattr(given, n)[:, t] for n in NAMES[:5]})
        kept = StateSlots(states, slots, torch.full((3,), True) if t == 0 else None)
        found.append(delta_step(token, kept, kernels))
    torch.testing.assert_close(torch.stack(found, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states[slots], last, rtol=1e-12, atol=1e-12)
    assert states[[1, 3]].isnan().all()


@BOTH
def test_sequences_go_on_from_what_is_remembered(by_feature):
    """Two single tokens of running sequences and two prompts, one of which comes in two pieces."""
    given = inputs(4, 9, by_feature, normalize=True)._replace(initial=None)
    given = given._replace(**{n: getattr(given, n).detach() for n in NAMES[:5]})
    whole, last = delta(given)
    states, slots = torch.zeros(6, HEADS, KEYS, WIDTH, dtype=torch.float64), [5, 1, 3, 0]
    done, made = [0] * 4, [[] for _ in range(4)]
    for counts in ((4, 3, 5, 0), (1, 1, 4, 4), (1, 1, 0, 5), (3, 4, 0, 0)):
        order = [i for i in range(4) if counts[i]]
        parts = [{n: getattr(given, n)[i, done[i] : done[i] + counts[i]] for n in NAMES[:5]} for i in order]
        starts = [0, *torch.tensor([counts[i] for i in order]).cumsum(0).tolist()]
        spans = StateSpans.of([slots[i] for i in order], starts, [done[i] for i in order])
        y = delta_remembered(given._replace(**{n: torch.cat([p[n] for p in parts]) for n in NAMES[:5]}), states, spans)
        for i, rows in zip(order, y.split([counts[i] for i in order])):
            made[i].append(rows)
            done[i] += counts[i]
    torch.testing.assert_close(torch.stack([torch.cat(rows) for rows in made]), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states[slots], last, rtol=1e-12, atol=1e-12)


# ---- sequences over ranks

SEQUENCES, LENGTH = 2, 34  # chunks of 2 and 3 ranks are not all equally long
CUTS = {  # where documents begin: at borders of chunks, inside them, in both sequences in other places
    "none": None,
    "packed": ((1, 2, 9, 17, 18, 29), (5, 8, 25)),
    "long": ((3,), ()),
}


def batch_of(documents: str) -> Batch:
    cuts = CUTS[documents]
    if cuts is None:
        return make_batch(SEQUENCES, LENGTH)
    numbers = [[row * LENGTH + sum(t >= cut for cut in found) for t in range(LENGTH)] for row, found in enumerate(cuts)]
    return make_batch(SEQUENCES, LENGTH, sum(numbers, []))


def on_rank(rank: int, world: int, documents: str, by_feature: bool, changed: int | None) -> list[Tensor]:
    """This rank's positions, outputs of its tokens of each sequence, and gradients. The values, keys and decays of
    document `changed` are others."""
    mesh = Mesh(Grid(cp=world), rank)
    whole = inputs(SEQUENCES, LENGTH, by_feature, normalize=True)
    batch = batch_of(documents)
    at = torch.cat([torch.arange(run.start, run.stop) for run in mesh.part.runs(LENGTH)])
    if changed is not None:
        here = (batch.documents.view(SEQUENCES, LENGTH) == changed)[..., None, None]
        whole = whole._replace(k=torch.where(here, 2 * whole.k + 1, whole.k), v=torch.where(here, 3.0, whole.v))
    leaves = [getattr(whole, n).detach()[:, at].requires_grad_() for n in NAMES[:5]]
    mine = batch.cut(mesh.part)
    mesh.watch.on = True
    y = delta_over_ranks(whole._replace(initial=None, **dict(zip(NAMES, leaves))), mine, mesh.cp)
    found = torch.autograd.grad(y, leaves, normal(SEQUENCES, LENGTH, HEADS, WIDTH, seed=9)[:, at])
    sent = {site.op: torch.tensor(count) for site, count in mesh.watch.calls.items() if site.axis == "cp"}
    return [at, y.detach(), *found, sent]


@BOTH
@pytest.mark.parametrize("documents", CUTS)
@pytest.mark.parametrize("world", [2, 3])
def test_sequences_over_ranks(ranks, world, documents, by_feature):
    """Outputs and gradients are those of one process; and the bytes are those of the formula: of each rank two pairs of
    states for each sequence and head, gathered, and their gradients summed."""
    given = inputs(SEQUENCES, LENGTH, by_feature, normalize=True)
    numbers = batch_of(documents).documents
    y, _ = delta(given._replace(initial=None, numbers=None if numbers is None else numbers.view(SEQUENCES, LENGTH)))
    leaves = [getattr(given, n) for n in NAMES[:5]]
    truth = [y, *torch.autograd.grad(y, leaves, normal(SEQUENCES, LENGTH, HEADS, WIDTH, seed=9))]
    pairs = 2 * SEQUENCES * HEADS * KEYS * (KEYS + WIDTH) * 8
    for at, *found, sent in ranks.run("tests.ops.test_delta:on_rank", world, documents, by_feature, None):
        for mine, theirs in zip(found, truth, strict=True):
            assert (mine - theirs[:, at]).abs().max() <= 1e-9 * theirs.abs().max()
        assert {op: count.tolist() for op, count in sent.items()} == {
            "all_gather": [1, pairs],
            "reduce_scatter": [1, world * pairs],
        }


@BOTH
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_document_changes_no_bit_of_another_on_any_rank(ranks, world, by_feature):
    numbers = batch_of("packed").documents.view(SEQUENCES, LENGTH)
    before = ranks.run("tests.ops.test_delta:on_rank", world, "packed", by_feature, None)
    for changed in (1, 3, LENGTH):
        after = ranks.run("tests.ops.test_delta:on_rank", world, "packed", by_feature, changed)
        for (at, old, *grads, _), (_, new, *others, _) in zip(before, after, strict=True):
            here = numbers[:, at] == changed
            assert torch.equal(old[~here], new[~here]) and (not here.any() or not torch.equal(old[here], new[here]))
            assert all(torch.equal(a[~here], b[~here]) for a, b in zip(grads, others))


# ---- Triton kernels, interpreted


def by_documents(s: DeltaInputs, short: int, long: int) -> tuple[Tensor, Tensor]:
    """The recurrence of one row that begins with `short` documents of one token, then has `long` equal ones: documents
    are rows of their own there, of which the first goes on from the row's state."""

    def rows(count: int, tokens: slice, initial: Tensor) -> DeltaInputs:
        own = {n: getattr(s, n)[0, tokens].unflatten(0, (count, -1)) for n in NAMES[:5]}
        return s._replace(**own, initial=initial, numbers=None)

    nothing = torch.zeros_like(s.initial)
    first = torch.cat((s.initial, nothing.expand(short - 1, -1, -1, -1)))
    y, _ = recurrence(rows(short, slice(0, short), first))
    others, last = recurrence(rows(long, slice(short, None), nothing.expand(long, -1, -1, -1)))
    return torch.cat((y.flatten(0, 1), others.flatten(0, 1))).unsqueeze(0), last[-1:]


@pytest.mark.soak
@BOTH
def test_a_long_sequence(by_feature):
    """65,536 tokens with a few long documents and many short ones."""
    numbers = torch.cat((torch.arange(40), torch.arange(40, 48).repeat_interleave(8187)))
    given = inputs(1, 65536, by_feature, 0.01, normalize=True)
    compared(given._replace(numbers=numbers.view(1, -1)), by_documents(given, 40, 8))


def interpreted(given: DeltaInputs, dtype: torch.dtype) -> None:
    """Truth: the reference in float64 on the same rounded inputs. Decays, beta and states stay in at least fp32. In
    fp32, sums of decays of 64 tokens that leave next to nothing are rounded by more than values are: there, results are
    as near the truth as those of the reference in fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    kinds = dict.fromkeys(("q", "k", "v"), dtype) | dict.fromkeys(("decay", "beta", "initial"), wide)
    rounded = {n: getattr(given, n).detach().to(kind) for n, kind in kinds.items()}

    def results(kernels: Kernels, cast: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = [cast(t).requires_grad_() for t in rounded.values()]
        made = delta(given._replace(**dict(zip(rounded, leaves))), kernels)
        above = [normal(*y.shape, seed=50 + i).to(dtype).to(y.dtype) for i, y in enumerate(made)]
        return (*made, *torch.autograd.grad(made, leaves, above))

    mine, truth = results("triton", Tensor.clone), results("plain", Tensor.double)
    narrow = results("plain", Tensor.clone) if dtype == torch.float32 else truth
    rounding = {torch.float64: 1e-11, torch.float32: 2e-5}.get(dtype, 8 * torch.finfo(dtype).eps)
    for name, found, other, wanted in zip(("y", "state", *rounded), mine, narrow, truth, strict=True):
        bound = max(rounding * wanted.abs().max().clamp(min=1e-3), 2 * (other - wanted).abs().max())
        assert (found - wanted).abs().max() <= bound, name


TRITON = pytest.mark.skipif(not ops.has_triton(), reason="needs triton")


DECAYS = {"keeps all": 1e-9, "keeps some": 0.1, "forgets all": 1e3}
ALL = [(dtype, decay) for dtype in (torch.float64, torch.float32, torch.float16) for decay in DECAYS]
SOME = {  # -> by feature or by head
    (torch.float64, "keeps some"): (False, True),
    (torch.float16, "keeps all"): (True,),
    (torch.float16, "forgets all"): (False,),
}


@TRITON
@pytest.mark.parametrize(
    "form, by_feature",
    [
        pytest.param(form, kind, marks=[] if kind in SOME.get(form, ()) else pytest.mark.soak)
        for form in ALL
        for kind in (False, True)
    ],
    ids=lambda value: f"{value[0]} {value[1]}" if isinstance(value, tuple) else "by feature" if value else "by head",
)
def test_kernels_equal_the_reference(form, by_feature):
    """A first state, chunks of which the last is short, documents of one token and of many. In 16 bits fp16, since
    Triton's interpreter has no matmuls in bf16."""
    dtype, decay = form
    given = inputs(1, 80, by_feature, DECAYS[decay], normalize=dtype != torch.float64)
    interpreted(given._replace(numbers=documents("mixed", 1, 80)), dtype)


@TRITON
@pytest.mark.soak
@BOTH
@pytest.mark.parametrize("kind", ["none", "tokens", "mixed"])
@pytest.mark.parametrize("length", [*range(1, 67), 127, 128, 129, 191, 192, 193, 256, 257])
def test_kernels_of_every_length(length, kind, by_feature):
    given = inputs(2, length, by_feature, normalize=length % 2 == 0)
    interpreted(given._replace(numbers=documents(kind, 2, length)), (torch.float32, torch.float16)[length // 2 % 2])


@TRITON
@BOTH
def test_kernels_of_equal_keys(by_feature):
    """As in the reference's test: T has to stay small, in fp32 too."""
    given = inputs(1, 70, by_feature, 1e-3, normalize=True)
    given = given._replace(k=given.k.detach()[:, :1].expand(1, 70, KEY_HEADS, KEYS), beta=torch.ones_like(given.beta))
    interpreted(given, torch.float32)


def planted(tiles):
    """Its gradients of keys are half of what they should be with the first tuning, and right with the others."""
    from phalanx.ops.delta.delta_kernel import DeltaKernels  # optional package

    class HalfOfKeys(DeltaKernels):
        def delta_backward(self, *call) -> DeltaGrads:
            found = super().delta_backward(*call)
            found.k.mul_(0.5 if self.tiles == TILES[0] else 1.0)
            return found

    return HalfOfKeys(tiles)


@TRITON
def test_a_wrong_tuning_is_refused(tmp_path, monkeypatch):
    checks = proof.Checks(tmp_path / proof.FILE)
    monkeypatch.setattr(proof, "checks", lambda: checks)
    made = triton(f"{__name__}:planted", tunings=TILES[:2])
    monkeypatch.setitem(vars(DELTA), "cases", DELTA.cases[:1])
    monkeypatch.setattr(ops, "loaded", lambda op, source: ops.load(source))
    device = torch.device("cpu")
    first_right.cache_clear()
    try:
        assert first_right(DELTA, made, device, torch.float32).number == 1
    finally:
        first_right.cache_clear()
    [why] = checks.refused(proof.setting_of(device)).values()
    assert why.startswith("delta, documents: result 2 differs by 0.5 of the largest value")
