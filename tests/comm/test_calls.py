"""Who left out a collective, or made one more: from the ranks' last calls alone."""

from __future__ import annotations

import random

import pytest

from phalanx.comm.health.calls import KEPT, Calls, culprit

TP, WORLD = "tp of 2 ranks from 0", "world of 4 ranks from 0"
STEP = [
    (TP, "all_gather", 64),
    (TP, "reduce_scatter", 128),
    (TP, "all_gather", 64),
    (TP, "reduce_scatter", 128),
    (WORLD, "all_reduce", 12),
    (TP, "all_reduce", 1),
]


def calls_of(
    steps: int, but: int | None = None, groups: tuple[str, ...] = (TP, WORLD), more: int = 0, save: bool = False
):
    """Of so many steps; without call number `but` of the last one, without the `more` last calls, with a save before
    the last step."""
    made, calls = [c for _ in range(steps - 1) for c in STEP] + [(WORLD, "all_gather", 2320)] * 2 * save + STEP, Calls()
    if but is not None:
        made = made[: -len(STEP) + but] + made[-len(STEP) + but + 1 :]
    for call in made[: len(made) - more]:
        if call[0] in groups:
            calls.note(*call)
    return calls.last()


@pytest.mark.parametrize("but", range(len(STEP) - 1))
@pytest.mark.parametrize("victim, save", [(0, False), (1, False), (1, True)])
def test_of_two_ranks_the_one_that_did_not_do_as_in_the_step_before(but, victim, save):
    calls = {victim: calls_of(5, but, save=save), 1 - victim: calls_of(5, save=save)}
    named, words = culprit(calls)
    assert named == (victim,) and words.startswith("rank 0 called ") and STEP[but][0] in words


def test_by_most_where_nothing_was_before():
    calls = {r: calls_of(1, groups=(WORLD,)) for r in range(4)}
    calls[2][-1] = calls[2][-1]._replace(op="all_gather")
    assert culprit(calls) == (
        (2,),
        f"rank 2 called all_gather of 12 elements over {WORLD} (its call 1), "
        f"rank 3 called all_reduce of 12 elements over {WORLD} (its call 1)",
    )
    assert culprit({r: calls[r] for r in (1, 2)})[0] == (1, 2), "of two that nothing tells apart, both"


def test_who_is_only_behind_or_shares_nothing_is_not_named():
    pick = random.Random(0)
    for _ in range(20):
        calls = {
            0: calls_of(400, more=pick.randrange(9)),
            1: calls_of(400, more=pick.randrange(9)),
            2: calls_of(400, groups=(WORLD,)),
        }
        assert culprit(calls) is None and len(calls[0]) == KEPT
    assert culprit({0: calls_of(3), 1: [c._replace(group="dp of 2 ranks from 1") for c in calls_of(2)]}) is None
    assert culprit({0: calls_of(3)}) is None


def test_what_two_ends_call_differently_is_no_parting():
    sent, received = Calls(), Calls()
    for calls, n in ((sent, 5), (received, 7)):
        calls.note(TP, "all_to_all", n)
        calls.note(TP, "send", n) if calls is sent else None
        calls.note(TP, "all_reduce", 3)
    assert culprit({0: sent.last(), 1: received.last()}) is None
