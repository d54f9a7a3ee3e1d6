"""Places Offload and Fetch in a rank's list of instructions.

Forward  Offload  ...  Fetch  one compute instruction  Backward (or InputGrad)     of one segment and micro-batch
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from phalanx.schedule.actions import Backward, Compute, Fetch, Forward, InputGrad, Instruction, Offload


def with_offload(program: Sequence[Instruction], segments: Set[tuple[int, int]]) -> tuple[Instruction, ...]:
    """Add an Offload after the forward of each of these (stage, segment) pairs, and a Fetch one compute instruction
    before its backward, which hides the copy. If nothing would be computed while the activations are on the host, they
    stay on the device."""
    compute = [i for i in program if isinstance(i, Compute)]
    place = {i: n for n, i in enumerate(compute)}
    before: dict[Instruction, list[Instruction]] = {}
    after: dict[Instruction, list[Instruction]] = {}
    for backward in compute:
        where = (backward.stage, backward.segment, backward.mb)
        if not isinstance(backward, Backward | InputGrad) or where[:2] not in segments:
            continue
        forward = Forward(*where)
        if place[backward] - place[forward] > 2:
            after.setdefault(forward, []).append(Offload(*where))
            before.setdefault(compute[place[backward] - 1], []).append(Fetch(*where))
    return tuple(x for i in program for x in (*before.get(i, ()), i, *after.get(i, ())))
