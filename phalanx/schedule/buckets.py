"""Places bucket instructions between compute: when weights are gathered and freed, and gradients allocated and reduced.

    Gather ... Ready  first use ... last use  Free                      weights of a sharded bucket (ZeRO-3 / FSDP)
    Open  first add ... last add  Reduce ... Close                      its gradients
    Open  first add ... last add  Reduce ... Apply                      the same, applied in backward

A use is a Forward, a Backward or an InputGrad; a Backward and a WeightGrad add to gradients.

Everything follows from where a bucket is used, so tied weights, virtual stages and any order of micro-batches need no
rule of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import field

from phalanx.base.dataclass import dataclass
from phalanx.schedule.actions import (
    Apply,
    Backward,
    Buckets,
    Close,
    Compute,
    Flow,
    Forward,
    Free,
    Gather,
    Instruction,
    Open,
    Ready,
    Reduce,
    ScheduleError,
    Send,
    WeightGrad,
)


@dataclass
class _Moments:
    """What is done before and after each compute instruction, by its number k.

    After k, in this order: frees (the next gather may use the memory), reductions (other ranks wait for them), the
    ends of older reductions in the order in which they began, gathers in the order of their use. Before k: what k
    needs. A gather that must start before the first compute instruction comes after number -1.
    """

    frees: defaultdict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    reduces: defaultdict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    closes: defaultdict[int, list[tuple[int, Instruction]]] = field(default_factory=lambda: defaultdict(list))
    gathers: defaultdict[int, list[tuple[int, Instruction]]] = field(default_factory=lambda: defaultdict(list))
    needs: defaultdict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))

    def after(self, k: int) -> list[Instruction]:
        timed = [
            x
            for entries in (self.closes.get(k, ()), self.gathers.get(k, ()))
            for _, x in sorted(entries, key=lambda entry: entry[0])
        ]
        return [*self.frees.get(k, ()), *self.reduces.get(k, ()), *timed]


def with_buckets(
    program: Sequence[Instruction],
    buckets: Buckets,
    flows: Mapping[int, Flow],
    early: Set[tuple[int, int]] = frozenset(),
    bucket_prefetch: int = 1,
    keep: bool = False,
) -> tuple[Instruction, ...]:
    """The instructions of a rank with those of its buckets added.

    early             (stage, segment) pairs whose forward adds to gradients
    bucket_prefetch   weights are gathered this many compute instructions before their use, and a reduction may last
                      as many
    keep              gathered weights stay until their last use
    """
    compute = [x for x in program if isinstance(x, Compute)]
    trains = any(isinstance(x, Backward | WeightGrad) for x in compute)
    moments, numbers = _Moments(), defaultdict[tuple[int, int], list[int]](list)
    for k, x in enumerate(compute):
        numbers[x.stage, x.segment].append(k)
    for bucket, users in buckets.items():  # the mapping's order, the same on every data-parallel peer
        flow = flows.get(bucket, Flow())
        uses = sorted(k for user in users for k in numbers.get(user, ()))
        if not uses:
            continue
        needed = [k for k in uses if not isinstance(compute[k], WeightGrad)]
        _place_weights(moments, bucket, flow, needed, bucket_prefetch if flow.prefetched else 0, keep)
        adds = [k for k in uses if _adds(compute[k], early)] if trains else []
        if adds:
            _place_gradients(moments, bucket, flow, adds, compute, bucket_prefetch)
    return tuple(_woven(program, moments))


def _adds(x: Compute, early: Set[tuple[int, int]]) -> bool:
    """Whether an instruction adds to the gradients of its segment."""
    return isinstance(x, Backward | WeightGrad) or isinstance(x, Forward) and (x.stage, x.segment) in early


def _place_weights(
    moments: _Moments, bucket: int, flow: Flow, uses: list[int], bucket_prefetch: int, keep: bool
) -> None:
    if not flow.gathers:
        moments.needs[uses[0]].append(Ready(bucket))
        return
    for first, last in _spans(uses, uses[-1] if keep else max(bucket_prefetch, 1)):
        moments.gathers[max(-1, first - 1 - bucket_prefetch)].append((first, Gather(bucket)))
        moments.needs[first].append(Ready(bucket))
        moments.frees[last].append(Free(bucket))


def _spans(uses: list[int], near: int) -> Iterator[tuple[int, int]]:
    """(first, last) of each group of uses that are at most `near` instructions apart: between them the weights are
    kept rather than gathered again."""
    first = last = uses[0]
    for use in uses[1:]:
        if use - last > near:
            yield first, last
            first = use
        last = use
    yield first, last


def _place_gradients(
    moments: _Moments, bucket: int, flow: Flow, adds: list[int], compute: Sequence[Compute], bucket_prefetch: int
) -> None:
    """Reduce after the last add of the step or, if gradients are sharded, of each micro-batch. Each reduction includes
    what other micro-batches have added by then."""
    last_of_mb = {compute[k].mb: k for k in adds}
    if flow.applies and len(last_of_mb) > 1:
        raise ScheduleError(
            f"bucket {bucket}: gradients of {len(last_of_mb)} micro-batches are complete only after the last of them; "
            "optim.in_backward=true needs one micro-batch a step"
        )
    is_open = False
    for n, k in enumerate(adds):
        if flow.opens and not is_open:
            moments.needs[k].append(Open(bucket))
            is_open = True
        final = n == len(adds) - 1
        if final or (flow.opens and last_of_mb[compute[k].mb] == k):
            moments.reduces[k].append(Reduce(bucket))
            is_open = False
            if flow.applies:
                at = min(k + (bucket_prefetch if flow.closes else 0), len(compute) - 1)
                moments.closes[at].append((k, Apply(bucket)))
            elif flow.closes or flow.opens:
                latest = len(compute) - 1 if final else adds[n + 1] - 1
                moments.closes[min(k + bucket_prefetch, latest)].append((k, Close(bucket, final)))


def _woven(program: Sequence[Instruction], moments: _Moments) -> Iterator[Instruction]:
    """The program with the bucket instructions in it. Those after a compute instruction come after the sends of its
    result, because peers wait for these."""
    yield from moments.after(-1)
    k, due = -1, False
    for instruction in program:
        if due and not isinstance(instruction, Send):
            yield from moments.after(k)
            due = False
        if isinstance(instruction, Compute):
            k += 1
            yield from moments.needs.get(k, ())
            due = True
        yield instruction
    if due:
        yield from moments.after(k)


def fullest(
    instructions: Sequence[Instruction],
    weights: Mapping[int, int],
    gradients: Mapping[int, int],
    coming: Mapping[int, int],
) -> tuple[int, int]:
    """(gathered weights, open gradients) in bytes, at the moment when their sum is largest. `weights`, `gradients`:
    bytes of each bucket. coming: of those whose weights have memory only when they are ready, bytes from Gather to the
    end of Ready."""
    gathered = opened = 0
    most = (0, 0)
    for x in instructions:
        match x:
            case Gather(bucket):
                gathered += coming.get(bucket, weights[bucket])
            case Ready(bucket) if bucket in coming:
                gathered += weights[bucket]
                most = max(most, (gathered, opened), key=sum)
                gathered -= coming[bucket]
            case Free(bucket):
                gathered -= weights[bucket]
            case Open(bucket):
                opened += gradients[bucket]
            case Close(bucket) | Apply(bucket):
                opened -= gradients.get(bucket, 0)
        most = max(most, (gathered, opened), key=sum)
    return most
