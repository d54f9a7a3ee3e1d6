"""`phalanx plan --serve`: memory, sequences and speed of generation with the model of a run, a checkpoint or a
config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.devices import DEVICES, Device
from phalanx.base.errors import ConfigError, Problem
from phalanx.checkpoint.keep import list_checkpoints
from phalanx.cli.generate import check_length
from phalanx.cli.setup import all_problems, elsewhere, fail, say_notes
from phalanx.config.read import COMMAND_LINE, read
from phalanx.config.run import Run, checkpoints_of
from phalanx.config.write import to_dict
from phalanx.forecast.decide import make_plan
from phalanx.forecast.text import FITS_ON
from phalanx.inference.drafter import drafts_named
from phalanx.inference.engine import EngineOptions, check_pages
from phalanx.inference.load import (
    check_generates,
    forward_only,
    run_of_folder,
    run_of_model,
    weights_alone,
    weights_folder,
    without_data,
)
from phalanx.inference.overrides import TAKEN, refuse_others
from phalanx.inference.predictor import MtpSpec, check_takes_drafts
from phalanx.inference.serving_plan import ServingPlan, check_fits, limits_of, serving_text
from phalanx.ops.attention.paged import FP8


@dataclass(frozen=True)
class AskedServing:
    """tokens: of a sequence; None: the model's positions. pages, speculate: as `phalanx serve` takes them."""

    tokens: int | None = None
    pages: str | None = None
    speculate: str | None = None


def plan_serving(
    what: str, overrides: tuple[str, ...], ranks: int | None, device: Device | None, asked: AskedServing
) -> str:
    """The text. ConfigError for a layout, pages or drafts that the model does not allow, more tokens than it has
    positions, or a device that does not hold one sequence."""
    own = tuple(word for word in overrides if word.startswith("model."))
    others = tuple(word for word in overrides if not word.startswith("model."))
    refuse_others(others)
    base = to_dict(without_data(generating(what, own)))
    loaded = read(None, others, base, f"the model of {what}")
    if loaded.run is None:
        return str(fail(loaded.problems, None))
    world = ranks or loaded.run.layout.least_ranks
    loaded = replace(loaded, run=weights_alone(loaded.run, world))
    problems = all_problems(loaded, elsewhere(world, ranks is None))
    if problems or loaded.run is None:
        return str(fail(problems, None))
    say_notes(loaded)
    check_generates(loaded.run.model)
    check_length("--tokens", asked.tokens, loaded.run.model.max_position_embeddings)
    check_pages(loaded.run, asked.pages or "model", "--pages")
    if asked.speculate:
        check_takes_drafts(loaded.run.model, asked.speculate, "--speculate")
    limits, dtype = limits_of(loaded.run, EngineOptions(length=asked.tokens)), FP8 if asked.pages == "fp8" else None
    drafts = drafts_named(asked.speculate) if asked.speculate else None  # n-grams take no memory
    predicted = drafts if isinstance(drafts, MtpSpec) else None
    serving = ServingPlan.of(make_plan(forward_only(loaded.run), world), limits, dtype, predicted)
    if device is not None:
        check_fits(serving, device.memory, device.name, "--tokens")
    known = sorted((d for d in DEVICES if d.name in FITS_ON), key=lambda d: d.memory)
    return serving_text(serving, [device] if device is not None else known)


def generating(what: str, overrides: tuple[str, ...]) -> Run:
    """The run that generates with the model of a config, a run, a checkpoint or a Hugging Face folder, on GPUs.
    ConfigError for overrides of a model that is trained already."""
    path = Path(what)
    of_config = what.endswith((".yaml", ".yml", ".py"))
    if not of_config and (path / "config.yaml").is_file() and not (path / "config.json").is_file():
        kept = read(what, ())  # a run that has no checkpoint yet is planned by its config
        of_config = kept.run is None or not list_checkpoints(checkpoints_of(kept.run))
    if of_config:
        loaded = read(what, overrides)
        if loaded.run is None:
            fail(loaded.problems, None)
        else:
            return run_of_model(loaded.run.model, loaded.run.lora, gpu=True)
    if overrides:
        rule = f"is that of {what}, whose weights are made for it; of a checkpoint, --serve reads {', '.join(TAKEN)}"
        raise ConfigError([Problem(word, "", rule, {}, (), COMMAND_LINE) for word in overrides])
    return run_of_folder(weights_folder(what), gpu=True)
