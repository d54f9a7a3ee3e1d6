"""Rules of streams of units (sequence.units): rows that sequences have room for, and what is not built for models that
read such streams."""

from __future__ import annotations

import os

from phalanx.base.errors import DataError, Problem
from phalanx.base.rules import at_least, missing_data, no_effect, problem
from phalanx.config.run import Run
from phalanx.data.media import reader_of


def check_units(run: Run, files: bool) -> list[Problem]:
    """A capacity for each stream that the model reads, and for no other; a processor that fits. files: whether files
    are there to be read."""
    read, room = {stream.name: stream for stream in run.model.needs_room}, run.data.room
    because = {"model.family": run.model.family}
    found = []
    if unknown := sorted(set(room) - set(read)):
        known = f": this one reads {', '.join(read)}" if read else ", and this model reads none"
        rule = f"must name streams of numbers that the model reads{known}"
        found.append(problem("data", run.data, "room", f"{rule} (not {', '.join(unknown)})", because, ({},)))
    for name, stream in read.items():
        if room.get(name, 0) < stream.joined:
            rule = f"must say how many rows of {name} a sequence has room for: some multiple of those of one file"
            valid = ({**{k: v for k, v in room.items() if k in read}, name: 4 * stream.largest},)
            found.append(problem("data", run.data, "room", rule, because, valid))
    if run.model.media is None or run.model.media.token is None:
        what = "a model with a vision tower, whose images are in its text"
        found += no_effect("layout", run.layout, ("media_group",), what, because)
    elif run.data.source is not None:
        what = "samples with images, and those of your own source have none"
        found += no_effect("layout", run.layout, ("media_group",), what, {"data.source": run.data.source})
    return found + check_media(run, files) + (check_not_built(run) if read else [])


def check_media(run: Run, files: bool) -> list[Problem]:
    """What says how images or recordings become numbers, where the model reads any."""
    data, spec = run.data, run.model.media
    if spec is None:
        because = {"model.family": run.model.family}
        return no_effect("data", data, ("processor", "image_workers"), "a model that reads images or sound", because)
    found = at_least("data", data, 0, "image_workers")
    if not files or data.source is not None:
        return found
    if data.processor is not None and not os.path.exists(data.processor):
        return [*found, missing_data("data.processor", data.processor, "must be a preprocessor_config.json")]
    try:
        reader = reader_of(spec, data.processor)
    except DataError as error:
        return [*found, problem("data", data, "processor", str(error), {}, (None,))]
    if data.chats:
        try:
            reader.check_packages()
        except DataError as error:
            found.append(problem("data", data, "chats", str(error), {"model.family": run.model.family}, ()))
    return found


def check_not_built(run: Run) -> list[Problem]:
    because = {"model.family": run.model.family}
    found = []
    if run.train.fp8 is not None:
        rule = "is not built for a model that reads images or sound"
        found.append(problem("train", run.train, "fp8", rule, because, (None,)))
    if run.train.cuda_graphs == "on" and not run.model.reads_units:
        rule = "needs micro-batches of equal sizes, and those of a model that reads sound differ"
        found.append(problem("train", run.train, "cuda_graphs", rule, because, ("off",)))
    if run.train.samples is not None:
        rule = "is not built for a model that reads images or sound: phalanx generate makes text with its checkpoints"
        found.append(problem("train", run.train, "samples", rule, because, (None,)))
    if run.train.eval_tasks:
        rule = "is not built for a model that reads images or sound: phalanx generate makes text with its checkpoints"
        found.append(problem("train", run.train, "eval_tasks", rule, because, ([],)))
    if run.train.batch_invariant:
        rule = "is not built for a model that reads images or sound"
        found.append(problem("train", run.train, "batch_invariant", rule, because, (False,)))
    if run.train.deterministic:
        rule = "is not built for a model that reads images or sound: which rank has which of them follows tp and cp"
        found.append(problem("train", run.train, "deterministic", rule, because, (False,)))
    return found
