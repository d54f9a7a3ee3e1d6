"""Rules of streams of units (sequence.units): rows that sequences have room for, and what is not built for models that
read such streams."""

from __future__ import annotations

from phalanx.base.errors import Problem
from phalanx.base.rules import problem
from phalanx.config.run import Run


def check_units(run: Run) -> list[Problem]:
    """A capacity for each stream that the model reads, and for no other."""
    read, room = {stream.name: stream for stream in run.model.reads_units}, run.data.room
    because = {"model.family": run.model.family}
    found = []
    if unknown := sorted(set(room) - set(read)):
        known = f": this one reads {', '.join(read)}" if read else ", and this model reads none"
        rule = f"must name streams of numbers that the model reads{known}"
        found.append(problem("data", run.data, "room", f"{rule} (not {', '.join(unknown)})", because, ({},)))
    for name, stream in read.items():
        if room.get(name, 0) < stream.joined:
            rule = f"must say how many rows of {name} a sequence has room for: some multiple of the rows of an image"
            valid = ({**{k: v for k, v in room.items() if k in read}, name: 4 * stream.largest},)
            found.append(problem("data", run.data, "room", rule, because, valid))
    return found + (check_not_built(run) if read else [])


def check_not_built(run: Run) -> list[Problem]:
    because = {"model.family": run.model.family}
    found = []
    if run.train.fp8 is not None:
        rule = "is not built for a model that reads images or sound"
        found.append(problem("train", run.train, "fp8", rule, because, (None,)))
    if run.train.cuda_graphs == "on":
        rule = "needs micro-batches of equal sizes, and a model that reads images or sound has others in each: take off"
        found.append(problem("train", run.train, "cuda_graphs", rule, because, ("off",)))
    if run.train.batch_invariant:
        rule = "is not built for a model that reads images or sound"
        found.append(problem("train", run.train, "batch_invariant", rule, because, (False,)))
    if run.train.deterministic:
        rule = "is not built for a model that reads images or sound: which rank has which of them follows tp and cp"
        found.append(problem("train", run.train, "deterministic", rule, because, (False,)))
    return found
