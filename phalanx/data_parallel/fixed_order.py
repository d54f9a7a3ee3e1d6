"""What train.deterministic adds to flat buffers: sums over micro-batches, ranks and elements whose bits do not depend
on the layout.

Gradients are added up in one binary tree over the micro-batches of a step (base.pairwise), first those of a rank, then
over ranks. The squares of the norm are placed differently on every rank and in every layout, so they are added up as
integers, whose sum does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.base.pairwise import merges, pairwise_sum, waiting
from phalanx.comm.axis import Axis

LIMB = 20  # bits of each integer into which a square is split: 2^43 of them can be added up
LIMBS = 3
PART = 1 << 24  # elements processed at once


class GradientTree:
    """The sums of one bucket's gradients that wait for their other half. `grad` (numel,) receives the gradient of one
    micro-batch at a time; after the last of a step it holds the sum over all. Has room for the `most` micro-batches
    that a step may have."""

    def __init__(self, grad: Tensor, most: int):
        self.grad, self.most = grad, most
        self.waiting = grad.new_empty(waiting(most), grad.numel())
        self._merges: list[int] = []
        self._seen = self._held = 0

    def begin(self, leaves: int) -> None:
        self._merges, self._seen, self._held = merges(leaves), 0, 0

    def leaf(self) -> None:
        """One more micro-batch is complete."""
        for _ in range(self._merges[self._seen]):
            self._held -= 1
            self.grad.add_(self.waiting[self._held])
        self._seen += 1
        if self._seen < len(self._merges):
            self.waiting[self._held].copy_(self.grad)
            self._held += 1
            self.grad.zero_()


class GradientTrees:
    """The trees of a bucket that several segments use (tied embeddings): one for each user, in order, whose sums are
    added up last, so that it makes no difference whether the users are on one rank or on several.

    `grads` receive the gradients of one micro-batch and one of the `users` at a time; a bucket with one user has one
    tree, whose sum is in `grads` itself. If experts process several micro-batches at once (ops.experts.exchange), each
    of those has separate `grads`, because those of one rank are consecutive in the tree.
    """

    def __init__(self, grads: Sequence[Tensor], users: Sequence[tuple[int, int]], most: int):
        self.grads, alone = grads, len(users) == 1
        self.sums = [list(grads) if alone else [torch.zeros_like(grad) for grad in grads] for _ in users]
        self.trees = {user: [GradientTree(total, most) for total in sums] for user, sums in zip(users, self.sums)}

    @property
    def tensors(self) -> list[Tensor]:
        """What it keeps beside the first of `grads`."""
        sums = [total for totals in self.sums for total in totals if all(total is not grad for grad in self.grads)]
        return [tree.waiting for trees in self.trees.values() for tree in trees] + sums + list(self.grads[1:])

    def begin(self, leaves: int) -> None:
        for tree in (tree for trees in self.trees.values() for tree in trees):
            tree.begin(leaves)

    def done_with(self, user: tuple[int, int]) -> None:
        """This segment's backward of one micro-batch is done."""
        for tree, grad in zip(self.trees.get(user, ()), self.grads):
            if tree.grad is not grad:
                tree.grad.copy_(grad)
                grad.zero_()
            tree.leaf()

    def sum_over(self, inner: Axis, outer: Axis, whole: bool, cp: int) -> None:
        """Add up over ranks, the sums of each user separately."""
        for first, *further in self.sums:
            if further:  # a power of two together, each with as many micro-batches
                first.copy_(pairwise_sum(torch.stack([first, *further])))
                for total in further:
                    total.zero_()
            sum_over(inner, outer, first, whole, cp)

    def join_users(self) -> None:
        """The first of `grads` gets the sums of all users."""
        if self.sums[0][0] is not self.grads[0]:
            self.grads[0].copy_(sum_from_last([first for first, *_ in self.sums]))


def sum_over(inner: Axis, outer: Axis, grad: Tensor, whole: bool, cp: int = 1) -> None:
    """Add up grad (inner.size * n,) over the ranks of a group and over groups, in place: of this rank's n elements its
    share among groups, or all of them.

    The order of additions is ours: groups of `cp` neighbours have shards of the same micro-batches, and are added up
    last. So a group passes on one sum for each such shard (each as large as what a reduce-scatter sends). `cp` divides
    the size of a group, or the reverse.
    """
    here = min(cp, inner.size)
    sums = pairwise_sum(inner.all_to_all(grad).view(inner.size // here, here, -1))
    n, share = sums.shape[1], sums.shape[1] // outer.size
    rows = sums.view(here, outer.size, share).transpose(0, 1).flatten()
    parts = outer.all_to_all(rows).view(outer.size * here // cp, cp, share)
    part = grad[inner.index * n : (inner.index + 1) * n]
    part[outer.index * share : (outer.index + 1) * share] = pairwise_sum(pairwise_sum(parts))
    if whole:
        outer.all_gather_into(part).wait()


def sum_from_last(terms: Sequence[Tensor]) -> Tensor:
    """a + (b + (c + ...)): head and multi-token prediction first, the embedding last, on whatever ranks they are."""
    total = terms[-1]
    for term in reversed(terms[:-1]):
        total = term + total
    return total


def sum_users(axis: Axis, mine: Sequence[Tensor], most: int) -> Tensor:
    """Sums (n,) of the users of a weight on each rank, at most `most` of them -> (n,) the sum over all ranks, whose
    users are consecutive."""
    nothing = torch.full_like(mine[0], -0.0)  # x + -0 is x to the bit
    rows = torch.stack([*mine, *(nothing for _ in range(most - len(mine)))])
    return sum_from_last(axis.all_gather(rows).wait().unbind())


def sum_replicas(axis: Axis, grad: Tensor) -> Tensor:
    """(n,) of each rank that holds the same piece -> (n,) their sum."""
    return pairwise_sum(axis.all_gather(grad).wait().view(axis.size, -1))


def sum_of_squares(views: list[Tensor], world: Axis, device: torch.device) -> Tensor:
    """() float64: over the elements of all ranks' views. Each square is taken relative to the largest one and split
    into integers of LIMB bits, which are added up exactly; the remainder is below 2^-60 of the largest square. Infinite
    if any element is not finite."""
    views = [v for v in views if len(v)]
    largest = (
        torch.stack([v.abs().max() for v in views]).max().double()
        if views
        else torch.zeros((), dtype=torch.float64, device=device)
    )
    largest = world.all_reduce(torch.where(torch.isfinite(largest), largest, torch.inf), "max").wait()
    scale = torch.where(largest > 0, 1.0 / largest, 0.0)
    total = torch.zeros(LIMBS, dtype=torch.int64, device=device)
    for view in views:
        for part in view.split(PART):
            _add_limbs(total, (part.double() * scale).square_())
    world.all_reduce(total).wait()
    weights = 2.0 ** (-LIMB * torch.arange(1, LIMBS + 1, dtype=torch.float64, device=device))
    return torch.where(torch.isfinite(largest), (total.double() * weights).sum() * largest.square(), torch.inf)


def _add_limbs(total: Tensor, x: Tensor) -> None:
    """Split x, in [0, 1], into integers, the highest bits first. Inf and NaN give arbitrary numbers."""
    for limb in range(LIMBS):
        x = x * 2.0**LIMB
        whole = x.floor()
        total[limb] += whole.long().sum()
        x = x - whole
