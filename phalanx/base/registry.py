"""The registry: the names that a config may use for each seam (optimizers, model families, ...), and where they are
found.

A name is looked up in this order: registered in this process; ours (BUILT_IN); an entry point in the group
`phalanx.<seam>` of an installed package; or the user's own, `package.module:NAME`. Ours and entry points are also
written as `module:NAME`, so a module is imported when a config names it and not before. Each seam has a protocol: a
class whose abstract methods the thing found must have.

This is the only global state in Phalanx: names are only ever added, and never twice.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, PhalanxError, Problem

BUILT_IN: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "family": MappingProxyType(
            {
                "llama": "phalanx.models.llama:FAMILY",
                "mistral": "phalanx.models.mistral:FAMILY",
                "qwen2": "phalanx.models.qwen2:FAMILY",
                "qwen3": "phalanx.models.qwen3:FAMILY",
                "olmo2": "phalanx.models.olmo2:FAMILY",
                "olmo3": "phalanx.models.olmo3:FAMILY",
                "gemma2": "phalanx.models.gemma2:FAMILY",
                "gemma3_text": "phalanx.models.gemma3_text:FAMILY",
                "gemma4_text": "phalanx.models.gemma4_text:FAMILY",
                "phi3": "phalanx.models.phi3:FAMILY",
                "mixtral": "phalanx.models.mixtral:FAMILY",
                "qwen3_moe": "phalanx.models.qwen3_moe:FAMILY",
                "gpt_oss": "phalanx.models.gpt_oss:FAMILY",
                "deepseek_v3": "phalanx.models.deepseek_v3:FAMILY",
                "gpt2": "phalanx.models.gpt2:FAMILY",
                "t5": "phalanx.models.t5:FAMILY",
                "llama4_text": "phalanx.models.llama4_text:FAMILY",
                "kimi_k25": "phalanx.models.kimi_k25:FAMILY",
                "minimax_m2": "phalanx.models.minimax_m2:FAMILY",
                "glm4_moe": "phalanx.models.glm4_moe:FAMILY",
                "gpt_neox": "phalanx.models.gpt_neox:FAMILY",
                "smollm3": "phalanx.models.smollm3:FAMILY",
                "bert": "phalanx.models.bert:FAMILY",
                "mamba2": "phalanx.models.mamba2:FAMILY",
                "nemotron_h": "phalanx.models.nemotron_h:FAMILY",
                "qwen3_next": "phalanx.models.qwen3_next:FAMILY",
                "qwen3_5_text": "phalanx.models.qwen3_5_text:FAMILY",
                "qwen3_5_moe_text": "phalanx.models.qwen3_5_moe_text:FAMILY",
                "kimi_linear": "phalanx.models.kimi_linear:FAMILY",
                "olmo_hybrid": "phalanx.models.olmo_hybrid:FAMILY",
                "falcon_h1": "phalanx.models.falcon_h1:FAMILY",
                "modernbert": "phalanx.models.modernbert:FAMILY",
                "llava": "phalanx.models.llava:FAMILY",
                "qwen2_5_vl": "phalanx.models.qwen2_5_vl:FAMILY",
                "qwen3_vl": "phalanx.models.qwen3_vl:FAMILY",
                "qwen3_5": "phalanx.models.qwen3_5:FAMILY",
                "qwen3_5_moe": "phalanx.models.qwen3_5_moe:FAMILY",
                "gemma3": "phalanx.models.gemma3:FAMILY",
                "whisper": "phalanx.models.whisper:FAMILY",
            }
        ),
        "optimizer": MappingProxyType(
            {
                "adamw": "phalanx.optim.adamw:AdamW",
                "lion": "phalanx.optim.lion:Lion",
                "muon": "phalanx.optim.muon:Muon",
                "sgd": "phalanx.optim.sgd:SGD",
            }
        ),
        "media": MappingProxyType(
            {"image": "phalanx.data.pictures:Pictures", "audio": "phalanx.data.sound:Recordings"}
        ),
        "sink": MappingProxyType(
            {
                "jsonl": "phalanx.observe.metrics_file:MetricsFile",
                "tensorboard": "phalanx.observe.tensorboard_file:TensorBoardFile",
                "wandb": "phalanx.observe.wandb_run:WandbRun",
            }
        ),
        "op": MappingProxyType(
            {
                "norm": "phalanx.ops.dense.norm:NORM",
                "swiglu": "phalanx.ops.dense.activation:GATED",
                "biased_gelu": "phalanx.ops.dense.biased_gelu:BIASED_GELU",
                "relu2": "phalanx.ops.dense.relu2:RELU2",
                "rope": "phalanx.ops.dense.rope:ROPE",
                "norm_rope": "phalanx.ops.dense.head_norm:NORM_ROPE",
                "width_norm": "phalanx.ops.dense.width_norm:WIDTH_NORM",
                "rows": "phalanx.ops.dense.rows:ROWS",
                "row_sums": "phalanx.ops.dense.row_sums:ROW_SUMS",
                "loss": "phalanx.ops.dense.cross_entropy:LOSS",
                "adamw": "phalanx.ops.optimizer.adamw:ADAMW",
                "adamw_fp8": "phalanx.ops.optimizer.adamw:ADAMW_FP8",
                "adamw_8bit": "phalanx.ops.optimizer.adamw:ADAMW_8BIT",
                "symmetric": "phalanx.ops.optimizer.symmetric:SYMMETRIC",
                "directions": "phalanx.ops.optimizer.directions:DIRECTIONS",
                "route": "phalanx.ops.experts.route:ROUTE",
                "matmul": "phalanx.ops.dense.matmul:MATMUL",
                "wide_matmul": "phalanx.ops.dense.matmul:WIDE_MATMUL",
                "permute": "phalanx.ops.experts.permute:PERMUTE",
                "push": "phalanx.ops.experts.push:PUSH",
                "grouped": "phalanx.ops.experts.grouped:GROUPED",
                "quant": "phalanx.ops.quantized.quantizer:QUANT",
                "quant_emulated": "phalanx.ops.quantized.quantizer:QUANT_EMULATED",
                "quant_matmul": "phalanx.ops.quantized.gemm:QUANT_MATMUL",
                "quant_rows": "phalanx.ops.quantized.expert_quantizer:QUANT_ROWS",
                "quant_products": "phalanx.ops.quantized.expert_quantizer:QUANT_PRODUCTS",
                "stored": "phalanx.ops.quantized.stored:STORED",
                "base_decode": "phalanx.ops.quantized.base_weights:BASE_DECODE",
                "attention": "phalanx.ops.attention.attention:ATTENTION",
                "attention_bias": "phalanx.ops.attention.attention:BIASED_ATTENTION",
                "attention_block": "phalanx.ops.attention.backends:BLOCKS",
                "attention_segments": "phalanx.ops.attention.segments:SEGMENTS",
                "paged_attention": "phalanx.ops.attention.paged:PAGED_ATTENTION",
                "store_pages": "phalanx.ops.attention.paged:STORE_PAGES",
                "join": "phalanx.ops.attention.context:JOIN",
                "largest_scores": "phalanx.ops.attention.largest_scores:LARGEST_SCORES",
                "mlp": "phalanx.ops.dense.gated_mlp:MLP",
                "dropout": "phalanx.ops.dense.dropout:DROPOUT",
                "conv1d": "phalanx.ops.scan.conv1d:CONV1D",
                "scan": "phalanx.ops.scan.scan:SCAN",
                "carried": "phalanx.ops.scan.carried:CARRIED",
                "gated_norm": "phalanx.ops.scan.gated_norm:GATED_NORM",
                "norm_gate": "phalanx.ops.scan.norm_gate:NORM_GATE",
                "conv1d_step": "phalanx.ops.scan.step:CONV1D_STEP",
                "scan_step": "phalanx.ops.scan.step:SCAN_STEP",
                "delta": "phalanx.ops.delta.delta:DELTA",
                "delta_step": "phalanx.ops.delta.step:DELTA_STEP",
            }
        ),
        "fp8_recipe": MappingProxyType(
            {
                name: f"phalanx.ops.quantized.recipes:{name.upper()}"
                for name in ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")
            }
        ),
        "adapter": MappingProxyType({"lora": "phalanx.nn.adapters.lora:LoRA", "dora": "phalanx.nn.adapters.dora:DoRA"}),
        "objective": MappingProxyType(
            {
                "pretrain": "phalanx.engine.objectives.pretrain:Pretrain",
                "sft": "phalanx.engine.objectives.sft:SFT",
                "dpo": "phalanx.engine.objectives.dpo:DPO",
                "distil": "phalanx.engine.objectives.distil:Distil",
                "mlm": "phalanx.engine.objectives.mlm:MLM",
                "classify": "phalanx.engine.objectives.classify:Classify",
                "span": "phalanx.engine.objectives.span:SpanCorruption",
                "ul2": "phalanx.engine.objectives.ul2:UL2",
                "seq2seq": "phalanx.engine.objectives.seq2seq:Seq2Seq",
                "transcribe": "phalanx.engine.objectives.transcribe:Transcribe",
                "fim": "phalanx.engine.objectives.fim:FillInTheMiddle",
                "embed": "phalanx.engine.objectives.embed:Embed",
                "prefix": "phalanx.engine.objectives.prefix:PrefixLM",
            }
        ),
        "pipeline_schedule": MappingProxyType(
            {
                "gpipe": "phalanx.schedule.generators:gpipe",
                "1f1b": "phalanx.schedule.generators:one_forward_one_backward",
                "interleaved": "phalanx.schedule.generators:interleaved",
                "zb_h1": "phalanx.schedule.generators:zb_h1",
            }
        ),
        "preflight_check": MappingProxyType(
            {
                "names": "phalanx.preflight.checks.names:Names",
                "ports": "phalanx.preflight.checks.ports:Ports",
                "mtu": "phalanx.preflight.checks.mtu:Mtu",
                "clock": "phalanx.preflight.checks.clock:Clock",
                "program": "phalanx.preflight.checks.program:ProgramVersions",
                "data": "phalanx.preflight.checks.data_files:DataFiles",
                "folder": "phalanx.preflight.checks.folder:Folder",
                "space": "phalanx.preflight.checks.space:Space",
                "limits": "phalanx.preflight.checks.limits:Limits",
                "machine": "phalanx.preflight.checks.machine:Machine",
                "gpu": "phalanx.preflight.checks.gpu:Gpu",
                "compute": "phalanx.preflight.checks.compute:Compute",
                "links": "phalanx.preflight.checks.links:Links",
                "axes": "phalanx.preflight.checks.axes:Axes",
                "placement": "phalanx.preflight.checks.placement:NodeOrder",
            }
        ),
        "config_importer": MappingProxyType(
            {
                "megatron": "phalanx.config.importers.megatron:IMPORTER",
                "torchtitan": "phalanx.config.importers.torchtitan:IMPORTER",
                "deepspeed": "phalanx.config.importers.deepspeed:IMPORTER",
            }
        ),
        "lr_schedule": MappingProxyType(
            {n: f"phalanx.optim.schedules:{n}" for n in ("constant", "linear", "cosine", "wsd", "inverse_sqrt")}
        ),
    }
)
"""Our own members, by seam and name, as `module:NAME`."""


@dataclass(frozen=True)
class Registered:
    """A value that a module registered under a name; `where`: its `module:NAME`."""

    value: Any
    where: str


_REGISTERED: dict[tuple[str, str], Registered] = {}


class RegisteredTwice(PhalanxError):
    """Two members of a seam have the same name."""

    exit_code = 2


class NotFound(PhalanxError):
    """A name in a seam that leads to nothing usable: the rule that it breaks, and names that would work."""

    exit_code = 2

    def __init__(self, rule: str, valid: tuple[str, ...] = ()):
        self.rule, self.valid = rule, valid
        super().__init__(rule + (f" (near it: {', '.join(valid)})" if valid else ""))

    def problem(self, field: str, value: Any) -> Problem:
        """The same as a problem with a config's field."""
        return Problem(field, value, self.rule, {}, self.valid)


def register(seam: str, name: str, value: Any, where: str = "") -> None:
    """Add a value to a seam under a name. `where`: its place in error messages; by default the value's
    `module:NAME`."""
    where = where or f"{value.__module__}:{value.__qualname__}"
    before = _REGISTERED.get((seam, name))
    other = before.where if before else BUILT_IN.get(seam, {}).get(name, where)
    if before is not None or other != where:
        raise RegisteredTwice(f"{seam} {name!r} is registered twice: by {other} and by {where}; rename one of them")
    _REGISTERED[seam, name] = Registered(value, where)


Named = TypeVar("Named")


def registers(seam: str, name: str) -> Callable[[Named], Named]:
    """A decorator that adds a class or function to a seam under a name, and returns it as it is."""

    def named(value: Named) -> Named:
        register(seam, name, value)
        return value

    return named


def find(seam: str, name: str, protocol: type | None = None) -> Any:
    """What a name refers to. NotFound if nothing has that name, if its module cannot be imported, or if it lacks what
    the `protocol` requires."""
    registered = _REGISTERED.get((seam, name))
    if registered is not None:
        value, where = registered.value, registered.where
    else:
        where = path_of(seam, name)
        value = _imported(where)
    if protocol is not None:
        _check(value, where, protocol)
    return value


def path_of(seam: str, name: str) -> str:
    """The `module:NAME` of a name, by which another process, in which nothing is registered yet, finds the same."""
    if (seam, name) in _REGISTERED:
        return _REGISTERED[seam, name].where
    if name in BUILT_IN.get(seam, {}):
        return BUILT_IN[seam][name]
    if ":" in name:
        return name
    installed = _installed(seam)
    if name in installed:
        return installed[name]
    known = names(seam)
    listed = ", ".join(f'"{n}"' for n in known)
    meant = (":".join(name.rsplit(".", 1)),) if "." in name else ()
    rule = (f"must be one of {listed}, or " if known else "must name ") + "one of your own as PACKAGE.MODULE:NAME"
    raise NotFound(rule, meant or near(name, known) or known)


def lasting(seam: str, name: str) -> str:
    """The name by which other processes find the same: `module:NAME` for what was registered here. Ours, those of
    installed packages and unknown names are returned as they are."""
    return _REGISTERED[seam, name].where if (seam, name) in _REGISTERED and name not in BUILT_IN.get(seam, {}) else name


def names(seam: str) -> tuple[str, ...]:
    """All short names in a seam: ours first, then those registered here, then those of installed packages."""
    here = (name for of, name in _REGISTERED if of == seam)
    return tuple(dict.fromkeys((*BUILT_IN.get(seam, {}), *here, *_installed(seam))))


def configs(seam: str) -> tuple[type, ...]:
    """The config dataclasses of our own members of a seam, each once."""
    return tuple(dict.fromkeys(find(seam, name).Config for name in BUILT_IN[seam]))


Section = TypeVar("Section")


def completed(section: str, config: Section, base: type, find_named: Callable[[str], Any]) -> Section:
    """The section with the fields of the member that it names in its field `base.named_by`, with default values where
    only shared fields (those of `base`) are given. Its name becomes one by which other processes find it. ConfigError
    if there is no such member, or the fields are those of another."""
    seam, key = str(vars(base)["seam"]), str(vars(base)["named_by"])
    name: str = getattr(config, key)
    try:
        cls = find_named(name).Config
    except NotFound as error:
        raise ConfigError([error.problem(f"{section}.{key}", name)]) from error
    lasting = name if name in BUILT_IN[seam] else path_of(seam, name)
    if type(config) is not cls and type(config) is not base:
        rule = f"takes the fields of {cls.__name__}, not of {type(config).__name__}: set the name of its {seam}"
        raise ConfigError([Problem(f"{section}.{key}", name, rule)])
    if type(config) is cls and name == lasting:
        return config
    return cls(**{f.name: getattr(config, f.name) for f in fields(config)} | {key: lasting})  # type: ignore[arg-type]


def registered(seam: str) -> dict[str, Any]:
    """What was registered in this process for a seam, by name."""
    return {name: found.value for (of, name), found in _REGISTERED.items() if of == seam}


def lacking(value: Any, protocol: type) -> tuple[str, ...]:
    """Members that a protocol requires (its abstract methods) and that `value` does not have, with their signatures."""
    asked: frozenset[str] = getattr(protocol, "__abstractmethods__", frozenset())
    return tuple(_signature(name, getattr(protocol, name)) for name in sorted(asked) if not _is_set(value, name))


def near(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Up to three of the known names that resemble this one."""
    lower = {n.lower(): n for n in known}
    return tuple(lower[m] for m in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.6))


def _is_set(value: Any, name: str) -> bool:
    """Whether a member exists and is not the protocol's own abstract one."""
    member = getattr(value, name, None)
    return member is not None and not getattr(member, "__isabstractmethod__", False)


def _signature(name: str, member: Any) -> str:
    function = member.fget if isinstance(member, property) else member
    return name + str(inspect.signature(function)).replace("'", "") if callable(function) else name


def _check(value: Any, where: str, protocol: type) -> None:
    kind = f"phalanx.{protocol.__name__}"
    fits = issubclass(value, protocol) if isinstance(value, type) else isinstance(value, protocol)
    missing = lacking(value, protocol)
    if missing:
        raise NotFound(f"is no {protocol.__name__}: {where} has no {', no '.join(missing)}")
    if not fits:
        raise NotFound(f"is no {protocol.__name__}: {where} is not derived from {kind}")


def _installed(seam: str) -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=f"phalanx.{seam}")}


def _imported(path: str) -> Any:
    """The member NAME of a module, given `module:NAME`."""
    module_name, _, name = path.partition(":")
    parts = module_name.split(".")
    if not (all(p.isidentifier() for p in parts) and name and all(p.isidentifier() for p in name.split("."))):
        raise NotFound("must be a name, or PACKAGE.MODULE:NAME")
    try:
        value: Any = _module(module_name)
    except NotFound as error:
        raise NotFound(error.rule, tuple(f"{module}:{name}" for module in error.valid)) from error
    for part in name.split("."):
        if not hasattr(value, part):
            public = tuple(n for n in vars(value) if not n.startswith("_"))
            valid = tuple(f"{module_name}:{n}" for n in near(part, public)) if value.__name__ == module_name else ()
            raise NotFound(f"leads nowhere: {_named(value)} has no {part}", valid)
        value = getattr(value, part)
    return value


def _named(value: Any) -> str:
    return f"{value.__name__} ({value.__file__})" if isinstance(value, ModuleType) else value.__qualname__


def _module(name: str) -> ModuleType:
    """Import a module. NotFound says which part of its name is missing, or what the import raised and where."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise NotFound(f"cannot be imported: {_raised(error)}") from error
        parts, number = name.split("."), missing.count(".")
        like = (".".join([*parts[:number], n, *parts[number + 1 :]]) for n in _beside(parts, number))
        raise NotFound(_missing(missing), tuple(like)) from error
    except Exception as error:
        raise NotFound(f"cannot be imported: {_raised(error)}") from error


def _missing(name: str) -> str:
    return (
        f"leads nowhere: there is no module {name} on Python's path; install its package, or name the folder that "
        "holds it in PYTHONPATH"
    )


def _beside(parts: list[str], i: int) -> tuple[str, ...]:
    """Modules whose names resemble part `i`, from the place where it was looked for, if they hold the later parts."""
    package = importlib.import_module(".".join(parts[:i])) if i else None
    found = pkgutil.iter_modules(None if package is None else getattr(package, "__path__", []))
    return near(parts[i], tuple(m.name for m in found if not m.name.startswith("_") and _holds(m, parts[i + 1 :])))


def _holds(module: pkgutil.ModuleInfo, below: list[str]) -> bool:
    """Whether a module has others of these names below it. They are looked for, not imported."""
    path = Path(getattr(module.module_finder, "path", ""), module.name, *below)
    return not below or path.is_dir() or path.with_suffix(".py").is_file()


def _raised(error: Exception) -> str:
    """What an import raised, and the last line of the user's code that was running."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames and frames[-1].filename != __file__ else ""
    if isinstance(error, SyntaxError) and error.filename:
        at = f" at {error.filename}:{error.lineno}"
    return f"{type(error).__name__}: {error}{at}"
