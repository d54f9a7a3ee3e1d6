"""Random traces find the mistakes that schedulers have: each line here breaks one thing, and some trace fails."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from phalanx.inference import pages, scheduler
from tests.harness.sample import rest_in_soak
from tests.harness.scheduler_traces import Run, draw_trace

TRACES = 1000

HELD_BACK = """            self._blocked = (sequence.number, available)
            return False
        self._blocked = None
        heapq.heappop(self._waiting)
"""
PASSED_OVER = """            if len(self._waiting) < 2:
                return False
            sequence = self._waiting[1][1]
            if not self._has_room(sequence, []) or sequence.ended or sequence.pending:
                return False
            keys = []
            del self._waiting[1]
            heapq.heapify(self._waiting)
        else:
            heapq.heappop(self._waiting)
"""
KEEPS_KEY = """            del self._page_of[self._key_of(page)]
            self._keys[page] = None
"""
IN_FLIGHT = "                sequence.pending -= sequence.row < 0\n"
LOST = "                if sequence.row < 0:\n                    sequence.pending -= 1\n                    continue\n"

# what is wrong: the file, the text in it, the text instead
MUTATIONS = {
    "a window is a page too short": (
        pages,
        "read(len(keys) * self.page_size,",
        "read(len(keys + keys[:1]) * self.page_size,",
    ),
    "a page leaves a window too early": (
        pages,
        "(position - window + 1) // self.page_size",
        "-(window - position - 2) // self.page_size",
    ),
    "a page leaves a window too late": (pages, "leaves[row] = (end + 1)", "leaves[row] = 1 + (end + 1)"),
    "a shared page has no more users": (pages, "        self.users[page] += 1\n", ""),
    "a shared page is still cached": (pages, "            del self._cached[page]\n", "            pass\n"),
    "a page without key is lost": (pages, "            self._unknown.append(page)\n", "            pass\n"),
    "a page that is taken keeps its key": (pages, KEEPS_KEY, ""),
    "a key is of one page's tokens": (pages, "blake2b(before + tokens + images,", "blake2b(tokens + images,"),
    "a prefix needs no window": (pages, "if all(self._has_window", "if True or all(self._has_window"),
    "a released row keeps its table": (pages, "table[row, :end] = NO_PAGE", "pass"),
    "part of a page is shared": (scheduler, "before // self.spec.page_size", "(before + 2) // self.spec.page_size"),
    "all of a prompt is shared": (scheduler, "before = len(sequence.tokens) - 1", "before = len(sequence.tokens)"),
    "pages are known before they are full": (
        scheduler,
        "further, computed)) // size",
        "further, computed) + 1) // size",
    ),
    "pages are known before they are computed": (
        scheduler,
        "min(len(sequence.tokens) - further, computed)",
        "len(sequence.tokens) - further",
    ),
    "a prefix is known without the tokens after it": (
        scheduler,
        "tokens[first:stop].tobytes()",
        "tokens[first : first + size].tobytes()",
    ),
    "a prefix needs no state": (scheduler, "(states is not None and not states.has(keys[count - 1]))", "False"),
    "a state that is to be begun from is taken": (
        scheduler,
        "self.states.use(keys[-1])",
        "self.states.pool.find(keys[-1])",
    ),
    "a state is kept before it is there": (scheduler, "if stop in sequence.leaves", "if first in sequence.leaves"),
    "a state in use is never free": (scheduler, "self.states.pool.release(sequence.begin_from)", "pass"),
    "pages of rejected drafts are kept": (scheduler, "self.pages.shrink(row,", "max(row,"),
    "a rejected draft is not written over": (scheduler, "self._next[row] = first + kept", "pass"),
    "a preempted sequence waits for its drafts for ever": (scheduler, "        sequence.pending -= row < 0\n", ""),
    "drafts that come late move a row": (
        scheduler,
        "        if row < 0:\n            return len(accepted)",
        "        if False:\n            return len(accepted)",
    ),
    "a surplus token is kept": (scheduler, "            if sequence.ended:\n                continue\n", ""),
    "an end token is overlooked": (scheduler, "if token in sequence.ends:", "if token in ():"),
    "tokens that are left are not counted": (scheduler, "        self._left[rows] -= 1\n", ""),
    "a token that is known is asked of the device": (
        scheduler,
        "np.where(self._pending[rows] > 0",
        "np.where(self._pending[rows] >= 0",
    ),
    "a token of two steps ago": (scheduler, "np.where(self._pending[rows] > 0", "np.where(self._pending[rows] > 1"),
    "a preempted sequence loses its token in flight": (scheduler, IN_FLIGHT, LOST),
    "a preempted sequence does not wait for its token": (scheduler, " or self._waiting[0][1].pending:", ":"),
    "the first by rank is preempted": (scheduler, "self._preempt(max(", "self._preempt(min("),
    "prompts have no bound": (
        scheduler,
        "first + min(budget, total - first, places)",
        "first + min(total - first, places)",
    ),
    "pages have no bound": (
        scheduler,
        "first + min(budget, total - first, places)",
        "first + min(budget, total - first)",
    ),
    "prompts come by arrival": (scheduler, "self.rank = (-request.priority,", "self.rank = (0,"),
    "somebody who fits goes first": (scheduler, HELD_BACK, PASSED_OVER),
    "scored prompts use the cache": (scheduler, "min(before, sequence.scored_from - 1)", "before"),
    "a deadline is overlooked": (scheduler, "self._deadlines[0][0] <= now", "self._deadlines[0][0] < now - 2"),
    "a token is fed before it is drawn": (scheduler, "(self._turn <= self._scheduled)", "True"),
    "who waits longest is last": (scheduler, "np.argsort(self._turn[rows]", "np.argsort(-self._turn[rows]"),
    "an image has no part in a key": (pages, "blake2b(before + tokens + images,", "blake2b(before + tokens,"),
    "a source has no part in a key": (scheduler, "options.adapter, sequence.source)", "options.adapter)"),
    "a piece ends amid an image": (
        scheduler,
        "sequence.between_images(first + min(budget, total - first, places))",
        "first + min(budget, total - first, places)",
    ),
    "a prefix ends amid an image": (
        scheduler,
        "or sequence.between_images(count * size) < count * size",
        "or False",
    ),
    "what an image leaves of a step goes to others": (scheduler, "if self._ends_at_image(sequence):", "if False:"),
    "who leaves keeps the pages of its source": (scheduler, "self.sources.release(row)", "row"),
    "a source has no bound": (scheduler, "not self.sources.has_room(sequence.request.source_length)", "False"),
    "tokens of the second image are the first's": (scheduler, "number += image.tokens", "number = image.tokens"),
    "a row keeps its old next position": (scheduler, "        self._next[row] = len(keys) * self.spec.page_size\n", ""),
}


def broken(module: ModuleType, old: str, new: str) -> ModuleType:
    """The scheduler's module, with one place changed in it or in that of pages."""
    source = Path(module.__file__ or "").read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{source.count(old)} places: {old}"
    changed = ModuleType(module.__name__)
    exec(compile(source.replace(old, new), module.__name__, "exec"), changed.__dict__)
    if module is scheduler:
        return changed
    around = ModuleType(scheduler.__name__)
    exec(compile(Path(scheduler.__file__).read_text(encoding="utf-8"), around.__name__, "exec"), around.__dict__)
    around.__dict__.update(PageTables=changed.PageTables, page_key=changed.page_key)
    return around


@pytest.mark.parametrize("name", rest_in_soak(MUTATIONS, list(MUTATIONS)[::4]))
def test_a_mistake_is_found(name):
    module, old, new = MUTATIONS[name]
    changed = broken(module, old, new)
    for seed in range(TRACES):
        try:
            Run(draw_trace(seed), changed).run()
        except Exception as error:
            print(f"{name}: trace {seed}: {error!r}"[:150])
            return
    raise AssertionError(f"{TRACES} traces do not see that {name}")
