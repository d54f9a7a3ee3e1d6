"""The gated delta rule against its definition, a recurrence of one token after another in float64: outputs, last states
and every gradient, inside documents."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.ops.delta.delta import DeltaInputs, delta, delta_step
from phalanx.ops.delta.remembered import delta_remembered
from phalanx.ops.scan.rows import StateSlots
from phalanx.sequence.paged import StateSpans
from tests.ops.test_ops import normal
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


def compared(given: DeltaInputs) -> None:
    leaves = [getattr(given, n) for n in NAMES]
    made, truth = delta(given, "plain"), recurrence(given)
    above = [normal(*y.shape, seed=50 + i) for i, y in enumerate(truth)]
    found, wanted = (torch.autograd.grad(y, leaves, above) for y in (made, truth))
    for name, mine, theirs in zip(("y", "state", *NAMES), (*made, *found), (*truth, *wanted), strict=True):
        assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max().clamp(min=1.0), name


BOTH = pytest.mark.parametrize("by_feature", [False, True], ids=["by head", "by feature"])


@BOTH
@pytest.mark.parametrize("kind", ["none", "tokens", "mixed"])
@pytest.mark.parametrize("length", LENGTHS)
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
def test_single_tokens_are_the_whole_row(by_feature):
    """The one-token form, with states updated in place, at slots in any order."""
    given, slots = inputs(3, 12, by_feature, normalize=True)._replace(initial=None), torch.tensor([4, 0, 2])
    given = given._replace(**{n: getattr(given, n).detach() for n in NAMES[:5]})
    whole, last = delta(given)
    states = torch.zeros(5, HEADS, KEYS, WIDTH, dtype=torch.float64)
    kept = StateSlots(states, slots)
    tokens = [given._replace(**{n: getattr(given, n)[:, t] for n in NAMES[:5]}) for t in range(12)]
    torch.testing.assert_close(torch.stack([delta_step(s, kept) for s in tokens], 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states[slots], last, rtol=1e-12, atol=1e-12)
    assert not states[[1, 3]].any()


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
