"""Megatron-LM: a shell script as in its examples, a line of arguments, or the YAML of its functional tests.

Names, defaults and meanings are those of megatron/training/arguments.py (read at core_v0.15.3).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from phalanx.config.importers.megatron_model import TITLE, kind_of, translate_model
from phalanx.config.importers.shell import Script, ShellWord, UnclosedQuote, expand, read_script
from phalanx.config.importers.translation import (
    Becomes,
    BuiltIn,
    ByHand,
    ByValue,
    ConfigImporter,
    ForeignKey,
    ForeignText,
    Imported,
    Missing,
    OpenValue,
    Refused,
    Rule,
    Translation,
    Undecided,
    mebibytes,
    number,
    one_of,
    real,
    whole,
)

# ---- the text -> keys ----------------------------------------------------------------------------

TELLING = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--micro-batch-size",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--max-position-embeddings",
    "--train-iters",
    "--train-samples",
    "--lr-decay-style",
    "--encoder-num-layers",
)
"""Options by which its command lines are known; two of them must be there."""
PROGRAM = re.compile(r"[\w./$\x01\x02{}-]*\.py")
MORE_OPTIONS = re.compile(r"ARG|OPT|EXTRA|FLAG")
RANKS = {"--nproc_per_node": "ranks of a machine", "--nproc-per-node": "ranks of a machine", "--nnodes": "machines"}


def words_of(source: ForeignText, script: Script) -> tuple[list[ShellWord], list[ShellWord]]:
    """The words before the program and its arguments, in the last command that has any."""
    for words in reversed(script.commands):
        found = split_command(words)
        if found is not None:
            return found
    for name in reversed(script.variables):  # a command that another one is to run, in one text
        text = script.variables[name][0].text if len(script.variables[name]) == 1 else ""
        if PROGRAM.search(text) and " --" in text and name not in script.given:
            last = text.rpartition(";")[2]
            line = script.variables[name][0].line
            return split_command([ShellWord(word, line) for word in last.split()]) or ([], [])
    held = [name for name in script.variables if is_options(script, name)]
    return [], [word for name in held for word in split_words(script.variables[name])]


def split_command(words: list[ShellWord]) -> tuple[list[ShellWord], list[ShellWord]] | None:
    """Before the program and after it; None if the command has no options of a program."""
    programs = [i for i, word in enumerate(words) if PROGRAM.fullmatch(word.text)]
    if programs and any(word.text.startswith("--") for word in words[programs[0] :]):
        return words[: programs[0] + 1], words[programs[0] + 1 :]
    if words and words[0].text.startswith("--"):
        return [], words
    return None


def is_options(script: Script, name: str) -> bool:
    """Whether a variable holds options that no other variable repeats."""
    words = split_words(script.variables[name])
    mine = " ".join(word.text for word in words)
    others = (
        " ".join(w.text for w in split_words(found)) for other, found in script.variables.items() if other != name
    )
    return bool(words) and words[0].text.startswith("--") and not any(mine in other for other in others)


def split_words(words: list[ShellWord]) -> list[ShellWord]:
    return [ShellWord(text, word.line) for word in words for text in word.text.split()]


def keys_of(words: Sequence[ShellWord]) -> list[ForeignKey]:
    """Arguments as keys: a switch is True, several values are a list. Words that no option takes are keys too."""
    made: list[ForeignKey] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.text.startswith("--"):
            made.append(ForeignKey(word.shown, opened(word), word.line))
            continue
        name, equals, value = word.text.partition("=")
        values = [ShellWord(value, word.line)] if equals else []
        while at < len(words) and not words[at].text.startswith("--") and not carries_options(words[at]):
            values.append(words[at])
            at += 1
        found = [opened(v) for v in values]
        still_open = next((v for v in found if isinstance(v, OpenValue)), None)
        plain: Any = True if not found else (found[0] if len(found) == 1 else found)
        if still_open is not None:
            plain = OpenValue(" ".join(v.shown for v in values), still_open.why)
        made.append(ForeignKey(name, plain, word.line))
    return made


def carries_options(word: ShellWord) -> bool:
    """Whether a word is an unknown variable that by its name holds more options."""
    return not word.known and word.text.startswith("\x01") and bool(MORE_OPTIONS.search(word.text.upper()))


def opened(word: ShellWord) -> Any:
    """The text of a word without the quotes that a shell would keep, or why it is not known."""
    if word.known:
        return word.text[1:-1] if re.fullmatch(r"'[^']*'", word.text) else word.text
    names = ", ".join(dict.fromkeys(word.unknown))
    argument = re.fullmatch(r"\$\{?(\d)\}?", names)
    if argument:
        return OpenValue(word.shown, f"it is argument {argument[1]} of the script (--var {argument[1]}=VALUE gives it)")
    name = re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?", names)
    if name:
        return OpenValue(word.shown, f"nothing in the text sets {name[1]} (--var {name[1]}=VALUE does)")
    return OpenValue(word.shown, f"{names} is not known before the script runs")


def read_text(source: ForeignText) -> tuple[list[ForeignKey], Script, str, int | None]:
    """Keys, the script, the program's name, and the ranks that the launcher starts."""
    try:
        script = read_script(source.text, source.variables)
        before, words = words_of(source, script)
    except UnclosedQuote as error:
        raise source.refuse(f"is no shell script that can be read: {error}", error.line) from None
    program = before[-1].shown if before else ""
    keys = [ForeignKey(f"export {name}", True, line) for name, line in script.exported.items()]
    keys += launcher_keys(before[:-1])
    keys += keys_of(words)
    for unread in script.unread:
        name = f"line {unread.first}" if unread.first == unread.last else f"lines {unread.first}-{unread.last}"
        keys.append(ForeignKey(name, unread.why, unread.first))
    return keys, script, program, ranks_of(before)


def launcher_keys(words: list[ShellWord]) -> list[ForeignKey]:
    named = [word for word in words if word.text.startswith("--")]
    if not named:
        return []
    first = next(i for i, word in enumerate(words) if word.text.startswith("--"))
    return [ForeignKey(f"launcher {key.name}", key.value, key.line) for key in keys_of(words[first:])]


def ranks_of(words: list[ShellWord]) -> int | None:
    """Ranks of a machine times machines, if the launcher says both and they are numbers."""
    said = {key.name: key.value for key in keys_of(words)}
    each = said.get("--nproc_per_node", said.get("--nproc-per-node"))
    machines = said.get("--nnodes", "1")
    if isinstance(each, str) and isinstance(machines, str) and each.isdigit() and machines.isdigit():
        return int(each) * int(machines)
    return None


def read_yaml_arguments(source: ForeignText) -> tuple[list[ForeignKey], Script, str, int | None]:
    """The MODEL_ARGS of a functional test."""
    try:
        node = YAML(typ="safe", pure=True).compose(source.text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise source.refuse(f"is not YAML ({error.problem or error.context})", mark.line + 1 if mark else 1) from None
    script = Script({name: [ShellWord(value, 0)] for name, value in source.variables.items()})
    keys: list[ForeignKey] = []
    for key, value in node.value if isinstance(node, MappingNode) else ():
        inner = value.value if isinstance(value, MappingNode) else ()
        line = key.start_mark.line + 1
        if key.value == "ENV_VARS":
            keys += [ForeignKey(f"export {k.value}", True, k.start_mark.line + 1) for k, _ in inner]
        elif key.value == "MODEL_ARGS":
            keys += [found for k, v in inner if (found := yaml_key(script, k, v)) is not None]
        else:
            keys.append(ForeignKey(f"test {key.value}", shown(value), line))
    if not any(key.name.startswith("--") for key in keys):
        raise source.refuse("has MODEL_ARGS that are no arguments of Megatron-LM (they do not begin with --)")
    return keys, script, "", None


def shown(node: Any) -> Any:
    return node.value if isinstance(node, ScalarNode) else "..."


def yaml_key(script: Script, key: Any, value: Any) -> ForeignKey | None:
    """One of MODEL_ARGS; false is an option that is not given."""
    line = key.start_mark.line + 1
    if isinstance(value, SequenceNode):
        texts = [item.value for item in value.value]
    elif value.tag.endswith(":bool"):
        return ForeignKey(key.value, True, line) if value.value.lower() == "true" else None
    else:
        texts = [value.value]
    words = [word for text in texts for word in expand(script, quoted(text), line)]
    return keys_of([ShellWord(key.value, line), *words])[0]


def quoted(text: str) -> str:
    """A value of the YAML as its runner passes it on: variables are replaced, and blanks separate values."""
    try:
        return " ".join(f'"{word}"' if "$" not in word else word for word in shlex.split(text))
    except ValueError:
        return shlex.quote(text)


# ---- keys -> ours --------------------------------------------------------------------------------


class Megatron(ConfigImporter):
    title = TITLE
    looks_for = "options such as --num-layers and --micro-batch-size in a script, a line or MODEL_ARGS:"

    def recognises(self, source: ForeignText) -> tuple[str, ...]:
        words = set(re.findall(r"--[a-z][\w-]+", source.text))
        found = tuple(name for name in TELLING if name in words)
        named = ("MODEL_ARGS:",) if re.search(r"^MODEL_ARGS:", source.text, re.MULTILINE) else ()
        return (*named, *found) if named or len(found) > 1 else ()

    def translate(self, source: ForeignText) -> Imported:
        as_yaml = re.search(r"^MODEL_ARGS:", source.text, re.MULTILINE)
        keys, _, program, started = read_yaml_arguments(source) if as_yaml else read_text(source)
        if not any(key.name.startswith("--") for key in keys):
            raise source.refuse("has no command with options of Megatron-LM, and no variable that holds them")
        t = Translation(TITLE, keys)
        ranks = source.ranks or started
        surroundings(t)
        translate_model(t, program)
        for translated in (lengths, schedule, precision, layout, memory, data, saving, logging, optimizer):
            translated(t, ranks)
        if kind_of(t, program) == "gpt":
            t.set("task.name", "pretrain", origin="the program")
        t.apply(RULES)
        return t.finish(ranks)


def surroundings(t: Translation) -> None:
    """Exported variables, the launcher's options, lines that were not read, and the keys of a functional test."""
    for name in t.names():
        kind, _, rest = name.partition(" ")
        if kind == "export":
            ours = rest in OURS_TOO or rest.startswith(("NCCL_", "NVTE_", "TORCH_NCCL_"))
            t.built_in(
                name, OURS_TOO.get(rest, "of its libraries") if ours else "no option: set it where the run starts"
            )
        elif kind == "launcher":
            what = RANKS.get(rest, "how ranks meet")
            t.built_in(name, f"{what}: phalanx train --ranks N, or torchrun and srun as before")
        elif kind in ("line", "lines"):
            t.missing(name, f"not read: {t.value(name)}")
        elif kind == "test":
            t.built_in(name, "of the test that runs it")


OURS_TOO = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "phalanx sets what its streams need",
    "CUBLAS_WORKSPACE_CONFIG": "runs of one layout have the same bits",
}
BATCH, MICRO = "--global-batch-size", "--micro-batch-size"


def batch_of(t: Translation, ranks: int | None) -> int:
    """The global batch; without one it is a micro-batch on each data-parallel rank."""
    if t.has(BATCH):
        return whole(t.value(BATCH))
    if ranks is None:
        raise Undecided(f"{BATCH} is not in the text; --ranks gives it, as a micro-batch on each data-parallel rank")
    sizes = [whole(t.value(t.first(*names), 1)) for names in (TP, PP, CP)]
    return whole(t.value(MICRO, 1)) * max(1, ranks // (sizes[0] * sizes[1] * sizes[2]))


TP = ("--tensor-model-parallel-size", "--model-parallel-size")
PP = ("--pipeline-model-parallel-size",)
CP = ("--context-parallel-size",)


def lengths(t: Translation, ranks: int | None) -> None:
    """Steps, batches and the sequence; evaluation is counted in sequences here."""
    hand(t, "train.micro_batch", MICRO, lambda: whole(t.value(MICRO)))
    if t.has(BATCH):
        t.set("train.global_batch", lambda: batch_of(t, ranks), BATCH)
    elif t.has(MICRO) and ranks is not None:
        t.set("train.global_batch", lambda: batch_of(t, ranks), MICRO, *TP, *PP, *CP)
    else:
        t.by_hand("train.global_batch", f"{BATCH} is not in the text")
    length = t.first("--decoder-seq-length", "--seq-length", "--encoder-seq-length")
    hand(t, "train.seq_length", length, lambda: whole(t.value(length)))
    if t.has("--train-iters"):
        t.set("train.steps", lambda: whole(t.value("--train-iters")), "--train-iters")
        t.apply({"--train-samples": Missing("--train-iters is given too")})
    elif t.has("--train-samples") and t.has("--rampup-batch-size"):

        def tokens() -> int:  # steps of a growing batch are counted by Phalanx
            return whole(t.value("--train-samples")) * whole(t.value(length))

        t.set("train.tokens", tokens, "--train-samples", length)
    elif t.has("--train-samples"):
        t.set("train.steps", lambda: steps_of(t, "--train-samples", ranks), "--train-samples", BATCH)
    else:
        t.by_hand("train.steps", "--train-iters is not in the text")
    ramp(t)
    evaluation(t, ranks)


def hand(t: Translation, key: str, name: str, value: Any) -> None:
    """Set from a key, or by hand if it is absent."""
    if t.has(name):
        t.set(key, value, name)
    else:
        t.by_hand(key, f"{name} is not in the text")


def steps_of(t: Translation, name: str, ranks: int | None) -> int:
    """Samples as whole steps."""
    return max(1, whole(t.value(name)) // batch_of(t, ranks))


def ramp(t: Translation) -> None:
    name = "--rampup-batch-size"
    given = t.value(name)
    if isinstance(given, list) and len(given) == 3:
        values = dict(zip(("start", "increment", "samples"), given))
        t.set("train.rampup", lambda: {key: whole(value) for key, value in values.items()}, name)


def evaluation(t: Translation, ranks: int | None) -> None:
    """eval_iters batches of the global size, every eval_interval steps."""
    every, count = "--eval-interval", "--eval-iters"
    shares = str(t.value("--split", "")).split(",")
    nothing = not t.has("--mock-data") and not t.has("--valid-data-path") and [real(n) for n in shares[1:2]] == [0.0]
    if t.value(count) in ("0", 0) or nothing:
        says = "--split leaves no tokens for it" if nothing else "no evaluation, as here without train.eval_interval"
        t.apply({name: BuiltIn(says) for name in (every, count)})
        return
    t.set("train.eval_interval", lambda: whole(t.value(every, 1000)), every)
    if t.has(BATCH) or ranks is not None:
        t.set("train.eval_samples", lambda: whole(t.value(count, 100)) * batch_of(t, ranks), count, BATCH)
    else:
        t.by_hand("train.eval_samples", f"{count} * global batch", count)


STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}


def schedule(t: Translation, ranks: int | None) -> None:
    style = "--lr-decay-style"
    kind = STYLES.get(str(t.value(style, "linear")), "linear")
    hand(t, "optim.lr", "--lr", lambda: real(t.value("--lr")))
    t.set("optim.schedule", lambda: one_of(STYLES)(t.value(style, "linear")), style)
    end = t.first("--lr-decay-iters", "--lr-decay-samples")
    if kind == "constant":
        t.apply({name: BuiltIn("has no effect on a constant rate") for name in ("--min-lr", *ENDS)})
    else:
        t.set("optim.min_lr", lambda: real(t.value("--min-lr", 0.0)), "--min-lr")
    if kind in ("linear", "cosine", "wsd") and t.has(end):
        t.set("optim.decay_steps", lambda: decay_steps(t, end, ranks), end, *per_batch(end))
    t.apply({name: BuiltIn("an inverse square root has no end") for name in ENDS})
    warmup(t, end, ranks)
    wsd(t, kind, ranks)
    start = "--lr-warmup-init"
    t.apply(
        {start: ByValue({"0": BuiltIn("warm-up begins at 0"), "0.0": BuiltIn("warm-up begins at 0")}, Missing(FROM_0))}
    )


FROM_0 = "warm-up begins at 0"
ENDS = ("--lr-decay-iters", "--lr-decay-samples")


def per_batch(name: str) -> tuple[str, ...]:
    return (BATCH,) if name.endswith("samples") else ()


def decay_steps(t: Translation, end: str, ranks: int | None) -> int:
    if t.is_open(end):
        raise Undecided(f"{end} is not known")
    return steps_of(t, end, ranks) if end.endswith("samples") else whole(t.value(end))


def warmup(t: Translation, end: str, ranks: int | None) -> None:
    """A fraction of the decay, which by default is the whole run; or steps, or samples."""
    share, steps, samples = "--lr-warmup-fraction", "--lr-warmup-iters", "--lr-warmup-samples"

    def within_run(found: int) -> int:
        last = t.setting("train.steps")
        if isinstance(last, int) and found >= last:
            raise Undecided(f"{found} there, more than the run's {last} steps: its rate only rises")
        return found

    if t.has(share):
        length = end if t.has(end) else t.first("--train-iters", "--train-samples")

        def of_decay() -> int:
            return within_run(round(real(t.value(share)) * (decay_steps(t, length, ranks) if t.has(length) else 0)))

        t.set("optim.warmup_steps", of_decay, share, length, *per_batch(length))
    elif t.has(steps):
        t.set("optim.warmup_steps", lambda: within_run(whole(t.value(steps))), steps)
    elif t.has(samples):

        def of_samples() -> int:
            return within_run(whole(t.value(samples)) // batch_of(t, ranks))

        t.set("optim.warmup_steps", of_samples, samples, BATCH)
    t.apply({name: BuiltIn("another of its kind is given and counts") for name in (share, steps, samples)})


def wsd(t: Translation, kind: str, ranks: int | None) -> None:
    steps, how = t.first("--lr-wsd-decay-iters", "--lr-wsd-decay-samples"), "--lr-wsd-decay-style"
    if kind != "wsd":
        t.apply({name: BuiltIn("has no effect without --lr-decay-style WSD") for name in (*WSD, how)})
        return
    if t.has(steps):
        t.set("optim.wsd_decay_steps", lambda: decay_steps(t, steps, ranks), steps, *per_batch(steps))
    if not t.has(how):
        t.differ("exponential decay at the end of WSD", "wsd decays linearly")
    t.apply({how: ByValue({"linear": BuiltIn("wsd decays linearly")}, Missing("wsd decays linearly"))})


WSD = ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples")
SCALE = {
    "--initial-loss-scale": ("train.loss_scale", 2.0**32, real),
    "--min-loss-scale": ("train.loss_scale_min", 1.0, real),
    "--loss-scale-window": ("train.loss_scale_window", 1000, whole),
    "--hysteresis": ("train.loss_scale_hysteresis", 2, whole),
}
SCALING = {"tensorwise": "tensorwise", "delayed": "delayed", "mxfp8": "mxfp8", "blockwise": "blockwise"}


def precision(t: Translation, ranks: int | None) -> None:
    half = t.first("--bf16", "--fp16")
    t.set("train.precision", half.strip("-") if t.has(half) else "fp32", "--bf16", "--fp16")
    if half == "--fp16" and t.has(half):
        for name, (ours, default, convert) in SCALE.items():
            t.set(ours, lambda n=name, d=default, c=convert: c(t.value(n, d)), name)  # type: ignore[misc]
    t.apply({name: BuiltIn("has no effect without --fp16") for name in SCALE})
    skipping = "--no-check-for-nan-in-loss-and-grad"
    if t.has(skipping):
        t.built_in(skipping, "a step that is not finite is never applied; train.guard.policy says what happens")
    elif not t.has("--fp16"):
        t.set("train.guard.policy", "stop", skipping)
    fp8(t)


def fp8(t: Translation) -> None:
    form, recipe, history = "--fp8-format", "--fp8-recipe", "--fp8-amax-history-len"
    if t.has("--fp4-format"):
        t.set("train.fp8.recipe", "nvfp4", "--fp4-format", "--fp4-recipe")
        t.apply({name: BuiltIn("--fp4-format counts") for name in (form, recipe, history)})
        return
    if not t.has(form):
        t.apply({name: BuiltIn("has no effect without --fp8-format") for name in (recipe, history, *FP8)})
        return
    kind = str(t.value(recipe, "delayed"))
    t.set("train.fp8.recipe", lambda: one_of(SCALING)(kind), recipe, form)
    if kind == "delayed":
        most = "--fp8-amax-compute-algo"

        def length() -> int:  # most_recent reads only the last of the history
            return whole(t.value(history, 1)) if t.value(most, "most_recent") == "max" else 1

        t.set("train.fp8.history", length, history, most)
    first, last = "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"
    if t.has("--first-last-layers-bf16"):

        def ends() -> int:
            both = whole(t.value(first, 1)), whole(t.value(last, 1))
            if both[0] != both[1]:
                raise Refused("train.fp8.end_layers is the same number at both ends")
            return both[0]

        t.set("train.fp8.end_layers", ends, "--first-last-layers-bf16", first, last)


FP8 = (
    "--fp8-amax-compute-algo",
    "--fp8-param-gather",
    "--fp8-margin",
    "--fp8-interval",
    "--first-last-layers-bf16",
    "--num-layers-at-start-in-bf16",
    "--num-layers-at-end-in-bf16",
)
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def layout(t: Translation, ranks: int | None) -> None:
    tp = t.first(*TP)
    t.set("layout.tp", lambda: whole(t.value(tp, 1)), tp)
    t.set("layout.pp", lambda: whole(t.value(PP[0], 1)), PP[0])
    t.set("layout.cp", lambda: whole(t.value(CP[0], 1)), CP[0])
    experts = t.setting("model.num_experts_per_tok") is not None and t.has("--num-experts")
    if experts:
        t.set("layout.ep", lambda: whole(t.value(EP, 1)), EP)
        t.set("layout.etp", lambda: whole(t.value(ETP, t.value(tp, 1))), ETP, tp)
        kind = "--moe-token-dispatcher-type"
        dispatchers = {"allgather": "allgather", "alltoall": "alltoall", "alltoall_seq": "alltoall", "flex": "auto"}
        t.set("layout.dispatch", lambda: one_of(dispatchers)(t.value(kind, "allgather")), kind)
    says = "has no effect without --num-experts" if not t.has("--num-experts") else "the model has no experts here"
    t.apply({name: BuiltIn(says) for name in (EP, ETP, "--moe-token-dispatcher-type")})
    sharding(t, ranks)
    stages(t)
    ring = "--cp-comm-type"
    kinds: dict[Any, Rule] = {
        "p2p": Becomes("layout.cp_attention", lambda _: "ring"),
        "all_gather": Becomes("layout.cp_attention", lambda _: "allgather"),
        "a2a": Becomes("layout.cp_ulysses", lambda _: whole(t.value(CP[0], 1))),
    }
    with_cp = t.setting("layout.cp") not in (None, 1)
    t.apply(
        {ring: ByValue(kinds, Missing("layout.cp_ulysses")) if with_cp else BuiltIn("has no effect without cp > 1")}
    )
    bucket = "--ddp-bucket-size"
    t.apply({bucket: Becomes("layout.bucket_mb", lambda value: mebibytes(value, 4))})


EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"


ZERO = "--zero-stage"


def sharding(t: Translation, ranks: int | None) -> None:
    """ZeRO stages: the distributed optimizer is stage 1; Megatron-FSDP says its own."""
    plain, own, torch_own = "--use-distributed-optimizer", "--data-parallel-sharding-strategy", "--use-torch-fsdp2"
    fsdp = t.first("--use-megatron-fsdp", "--use-custom-fsdp")
    if t.has(ZERO):  # of Megatron-DeepSpeed
        t.set("layout.sharding", lambda: whole(t.value(ZERO)), ZERO)
    elif t.has(torch_own):
        t.set("layout.sharding", 3, torch_own, plain)
    elif t.has(fsdp):
        t.set("layout.sharding", lambda: one_of(STRATEGIES)(t.value(own, "no_shard")), fsdp, own, plain)
    else:
        t.set("layout.sharding", 1 if t.has(plain) else 0, plain)
        t.apply({own: BuiltIn("has no effect without --use-megatron-fsdp")})
    keep = "--torch-fsdp2-no-reshard-after-forward"
    if t.has(keep):
        t.set("layout.reshard_after_forward", False, keep)
    groups = "--num-distributed-optimizer-instances"
    if t.value(groups) in ("1", 1):
        t.built_in(groups, "all ranks shard together")
    elif t.has(groups) and ranks is not None:

        def group() -> int:
            sizes = [whole(t.value(t.first(*names), 1)) for names in (TP, PP)]
            return ranks // (sizes[0] * sizes[1] * whole(t.value(groups)))

        t.set("layout.shard_group", group, groups)
    elif t.has(groups):
        t.by_hand("layout.shard_group", f"data-parallel ranks / {t.value(groups)}; --ranks computes it", groups)


def stages(t: Translation) -> None:
    """Layers of stages: virtual ones by number or by layers; and stages at the ends with fewer."""
    each, chunks = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    layers = t.first("--num-layers", "--encoder-num-layers")
    if t.has(chunks):
        t.set("layout.virtual_stages", lambda: whole(t.value(chunks)), chunks)
    elif t.has(each):

        def virtual() -> int:
            per_rank, rest = divmod(whole(t.value(layers, 0)), whole(t.value(PP[0], 1)))
            if rest or per_rank % whole(t.value(each)):
                raise Refused("layers / pp must be a multiple of it")
            return per_rank // whole(t.value(each))

        t.set("layout.virtual_stages", virtual, each, layers, *PP)
    first, last = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
    if (t.has(first) or t.has(last)) and not t.has(chunks) and not t.has(each):

        def uneven() -> list[int]:
            return uneven_stages(t, layers, first, last)

        t.set("layout.stages", uneven, first, last, layers, *PP)
    t.apply(
        {"--pipeline-model-parallel-layout": ByHand("layout.stages", "blocks of each stage; unset: divided by cost")}
    )


def uneven_stages(t: Translation, layers: str, first: str, last: str) -> list[int]:
    """Blocks of each stage: the embedding is the first one's, the head (and multi-token prediction) the last one's."""
    pp, total = whole(t.value(PP[0], 1)), whole(t.value(layers, 0))
    ends = {0: t.value(first), pp - 1: t.value(last)}
    fixed = {at: whole(value) for at, value in ends.items() if value is not None}
    others = pp - len(fixed)
    left = total - sum(fixed.values())
    if pp < 2 or left < 0 or (others and left % others) or (not others and left):
        raise Refused("the other layers must be a multiple of the other stages")
    counts = [fixed.get(at, left // max(1, others)) for at in range(pp)]
    more = 1 if t.setting("model.num_nextn_predict_layers") else 0
    return [counts[0] + 1, *counts[1:-1], counts[-1] + 1 + more]


MODULES = {
    "core_attn": "attention",
    "layernorm": "norm",
    "mlp": "mlp",
    "moe": "experts",
    "moe_act": "activation",
    "mla_up_proj": "qkv",
    "shared_experts": "mlp",
}


def memory(t: Translation, ranks: int | None) -> None:
    """Recomputation: selective is attention's inside there too, or the modules that are named."""
    short, kind, named = "--recompute-activations", "--recompute-granularity", "--recompute-modules"
    old = "--checkpoint-activations"
    if t.value(kind) == "full" or t.has(old):
        t.set("train.recompute", "full", kind if t.has(kind) else old)
        t.apply({short: BuiltIn(f"{kind} counts"), named: BuiltIn("whole layers are recomputed")})
        how, count = "--recompute-method", "--recompute-num-layers"
        whole_layers = {"uniform": BuiltIn("all layers are recomputed")}
        t.apply(
            {how: ByValue(whole_layers, Missing("all layers are recomputed; a budget: train.recompute_budget_gib"))}
        )
        one: dict[Any, Rule] = {"1": BuiltIn("one layer at a time")}
        t.apply({count: ByValue(one, Missing("one layer at a time; a budget: train.recompute_budget_gib"))})
    elif t.has(short) or t.has(kind):
        given = t.value(named, "core_attn")
        modules = [given] if isinstance(given, str) else list(given)
        ops = list(dict.fromkeys(MODULES[m] for m in modules if m in MODULES and m != "core_attn"))
        preset = "selective" if "core_attn" in modules else "none"
        t.set("train.recompute", preset, kind, short, named)
        if ops:
            t.set("train.recompute_ops", ops, named)
    experts = "--moe-layer-recompute"
    if t.has(experts) and t.setting("train.recompute") != "full" and t.setting("train.recompute_ops") is None:
        t.set("train.recompute_ops", ["experts"], experts)
    t.apply({name: BuiltIn("has no effect without recomputation") for name in RECOMPUTE})


RECOMPUTE = ("--recompute-method", "--recompute-num-layers", "--recompute-modules", "--moe-layer-recompute")


def data(t: Translation, ranks: int | None) -> None:
    path, fake = t.first("--data-path", "--train-data-path"), "--mock-data"
    if t.has(fake):
        t.set("data.mock", True, fake)
        t.apply({"--split": BuiltIn("made-up tokens are not split"), path: BuiltIn("made-up tokens are read instead")})
    elif t.has(path):
        t.set("data.paths", lambda: paths(t.value(path)), path)
    else:
        t.by_hand("data.paths", "--data-path is not in the text")
    if not t.has(fake):
        t.set("data.split", lambda: str(t.value("--split", "969,30,1")), "--split")
    valid = "--valid-data-path"
    if t.has(valid):
        t.set("data.valid", lambda: {"valid": paths(t.value(valid))}, valid)
    tokenizer(t)
    reset = [name for name in ("--reset-position-ids", "--reset-attention-mask") if t.has(name)]
    if len(reset) == 2:
        t.set("data.document_attention", True, *reset)
    t.apply({name: Missing("data.document_attention does both: positions and attention") for name in reset})


def paths(value: Any) -> list[str]:
    words = value if isinstance(value, list) else str(value).split()
    return [str(word) for word in words]


def tokenizer(t: Translation) -> None:
    model, kind, vocab, merges = "--tokenizer-model", "--tokenizer-type", "--vocab-file", "--merge-file"
    null = t.value(kind) == "NullTokenizer"
    if t.has(model) and not null:
        value = str(t.value(model))
        if t.is_open(model) or "/" not in value or value.startswith((".", "/")) or value.endswith((".model", ".json")):
            t.set("data.tokenizer", lambda: str(t.value(model)), model, kind)
        else:
            t.by_hand("data.tokenizer", f"a folder with the files of {value}; nothing is downloaded", model)
    elif t.has(vocab):
        both = "a folder with both files as vocab.json and merges.txt" if t.has(merges) else "a tokenizer.json of it"
        t.by_hand("data.tokenizer", both, vocab, merges)
    unused = "the tokenizer's file says what it is; token files need none" if not null else "ids are read as they are"
    t.apply({name: BuiltIn(unused) for name in (kind, model, vocab, merges)})


def saving(t: Translation, ranks: int | None) -> None:
    save, load, keep = "--save", "--load", "--save-retain-interval"
    if t.has(save):
        t.set("dir", lambda: str(t.value(save)), save)
    every = t.first("--save-interval", "--persistent-save-interval")
    if t.has(every):
        t.set("checkpoint.interval", lambda: whole(t.value(every)), every)
    if t.has(keep):
        t.set("checkpoint.keep_every", lambda: whole(t.value(keep)), keep)
        t.set("checkpoint.keep_last", 2, keep)
    else:
        t.set("checkpoint.keep_last", 0, keep)
    same_place = t.has(load) and same_text(t.value(load), t.value(save)) and t.is_open(load) == t.is_open(save)
    if same_place or (t.is_open(load) and t.has(save) and t.is_open(save)):
        t.built_in(load, "a run continues from its own folder by itself")
    elif t.has(load):
        t.by_hand("init_from", f"{load} holds {TITLE}'s checkpoints: {IMPORT}", load)
    for name in ("--pretrained-checkpoint",):
        if t.has(name):
            t.by_hand("init_from", IMPORT, name)
    t.apply({"--async-save": Becomes("checkpoint.background", bool)})


IMPORT = "make a folder of one by `phalanx import PATH -o FOLDER --config HF`"


def same_text(a: Any, b: Any) -> bool:
    return isinstance(a, str) and a == b


def logging(t: Translation, ranks: int | None) -> None:
    t.set("log.interval", lambda: whole(t.value("--log-interval", 100)), "--log-interval")
    folder, project = "--tensorboard-dir", "--wandb-project"
    if t.has(folder):
        t.set("log.tensorboard", True, origin=folder)
        t.built_in(folder, "log.tensorboard writes to tb/ in the run's folder")
    if t.has(project):
        t.set("log.wandb", lambda: str(t.value(project)), project)
        for name, ours in {"--wandb-exp-name": "log.wandb_name", "--wandb-entity": "log.wandb_entity"}.items():
            if t.has(name):
                t.set(ours, lambda name=name: str(t.value(name)), name)  # type: ignore[misc]
    start, end = "--profile-step-start", "--profile-step-end"
    if t.has("--profile"):

        def steps() -> str:  # they count steps that are done
            return f"{whole(t.value(start, 10)) + 1}:{whole(t.value(end, 12)) + 1}"

        t.set("train.profile", steps, "--profile", start, end)
    t.apply({name: BuiltIn("has no effect without --profile") for name in (start, end)})
    limit = "--exit-duration-in-mins"
    if t.has(limit):
        t.set("train.time_limit_s", lambda: 60.0 * number(t.value(limit)), limit)
    timeout = "--distributed-timeout-minutes"
    t.set("train.timeout_s", lambda: 60.0 * number(t.value(timeout, 10)), timeout)
    stop = "--exit-interval"
    if t.has(stop) and not t.is_open(stop):
        done = t.setting("train.steps")
        late = isinstance(done, int) and number(t.value(stop)) >= done
        ends = BuiltIn("the run ends before") if late else Missing("train.steps ends a run")
        t.apply({stop: ends})


def optimizer(t: Translation, ranks: int | None) -> None:
    name = str(t.value("--optimizer", "adam"))
    known = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon", "lion": "lion"}
    t.set("optim.name", lambda: one_of(known, "optimizers here: adamw, muon, lion and sgd")(name), "--optimizer")
    kind = t.setting("optim.name")
    decay = "--weight-decay"
    t.set("optim.weight_decay", lambda: real(t.value(decay, 0.01)), decay)
    t.set("optim.clip_grad", lambda: real(t.value("--clip-grad", 1.0)), "--clip-grad")
    at = "optim" if kind != "muon" else "optim.fallback"
    if kind == "muon":
        t.set("optim.fallback.name", "adamw", origin=f"default of {TITLE}")
        momentum = "--muon-momentum"
        t.set("optim.momentum", lambda: real(t.value(momentum, 0.9)), momentum)
        t.set("optim.nesterov", t.has("--muon-nesterov"), "--muon-nesterov")
        scale = "--muon-scale-mode"
        t.apply({scale: Missing("optim.adjust says how large updates are"), "--muon-extra-scale-factor": Missing(MUON)})
    if kind in ("adamw", "muon"):
        for theirs, (ours, default) in ADAM.items():
            t.set(f"{at}.{ours}", lambda n=theirs, d=default: real(t.value(n, d)), theirs)  # type: ignore[misc]
    if kind == "sgd":
        t.set("optim.momentum", lambda: real(t.value("--sgd-momentum", 0.9)), "--sgd-momentum")
    if kind == "lion":
        t.apply({"--adam-beta1": Missing("optim.beta1 of lion"), "--adam-beta2": Missing("optim.beta2 of lion")})
    t.apply({name: BuiltIn("of another optimizer") for name in (*ADAM, "--sgd-momentum")})
    qk_clip(t)
    moments(t)


def qk_clip(t: Translation) -> None:
    """Theirs divides the excess between queries and keys by alpha; here both take its square root."""
    switch, threshold, alpha = "--qk-clip", "--qk-clip-threshold", "--qk-clip-alpha"
    if not t.has(switch):
        return t.apply({name: BuiltIn("off there, and not done here either") for name in (threshold, alpha)})
    t.set("optim.qk_clip", lambda: real(t.value(threshold, 100.0)), switch, threshold)
    halves = Missing("queries and keys each take the square root, which is 0.5")
    t.apply({alpha: ByValue({0.5: BuiltIn("as here"), "0.5": BuiltIn("as here")}, halves)})


MUON = "optim.adjust=match_rms_adamw makes updates as large as AdamW's"
ADAM = {"--adam-beta1": ("beta1", 0.9), "--adam-beta2": ("beta2", 0.999), "--adam-eps": ("eps", 1e-8)}
STATES = {"fp32": "master", "bf16": "bf16", "fp8": "fp8"}


def moments(t: Translation) -> None:
    """Two dtypes there, one here."""
    first, second = "--exp-avg-dtype", "--exp-avg-sq-dtype"
    switch = "--use-precision-aware-optimizer"
    if t.has(switch) and (t.has(first) or t.has(second)):

        def dtype() -> str:
            names = {str(t.value(name, "fp32")) for name in (first, second)}
            if len(names) > 1:
                raise Refused("optim.moments is one dtype for both moments")
            return str(one_of(STATES)(names.pop()))

        t.set("optim.moments", dtype, first, second, switch)


# ---- the rest ------------------------------------------------------------------------------------

KERNELS = BuiltIn("train.kernels=auto takes the fastest kernels that run")
OVERLAP = BuiltIn("exchanges overlap with computation where that is faster")
FORMAT = BuiltIn("checkpoints have one format, of no layout, and each file one writer")
LOGGED = BuiltIn("metrics.jsonl always has it")
GARBAGE = BuiltIn("collected between steps")
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "--seed": Becomes("train.seed", whole, 1234),
        "--sequence-parallel": BuiltIn("comes with layout.tp"),
        "--deepspeed": BuiltIn("there is one engine"),
        "--deepspeed_config": Missing("import that JSON too: its keys are not read here"),
        "--no-query-key-layer-scaling": BuiltIn("scores are computed in fp32"),
        "--use-mcore-models": BuiltIn("there is one implementation"),
        "--use-legacy-models": BuiltIn("there is one implementation"),
        "--transformer-impl": KERNELS,
        "--attention-backend": KERNELS,
        "--use-flash-attn": KERNELS,
        "--no-masked-softmax-fusion": KERNELS,
        "--masked-softmax-fusion": KERNELS,
        "--no-bias-gelu-fusion": KERNELS,
        "--no-bias-swiglu-fusion": KERNELS,
        "--no-bias-dropout-fusion": KERNELS,
        "--no-rope-fusion": KERNELS,
        "--cross-entropy-loss-fusion": KERNELS,
        "--cross-entropy-fusion-impl": KERNELS,
        "--no-gradient-accumulation-fusion": KERNELS,
        "--gradient-accumulation-fusion": KERNELS,
        "--no-persist-layer-norm": KERNELS,
        "--moe-grouped-gemm": KERNELS,
        "--moe-permute-fusion": KERNELS,
        "--moe-router-fusion": KERNELS,
        "--moe-use-legacy-grouped-gemm": KERNELS,
        "--enable-experimental": KERNELS,
        "--tiktoken-pattern": BuiltIn("of the tokenizer's file"),
        "--overlap-grad-reduce": OVERLAP,
        "--overlap-param-gather": OVERLAP,
        "--overlap-param-gather-with-optimizer-step": OVERLAP,
        "--delay-grad-reduce": OVERLAP,
        "--tp-comm-overlap": BuiltIn("layout.tp_overlap=auto"),
        "--tp-comm-overlap-cfg": BuiltIn("layout.tp_overlap=auto"),
        "--overlap-moe-expert-parallel-comm": BuiltIn("layout.ep_overlap=auto"),
        "--moe-shared-expert-overlap": OVERLAP,
        "--moe-enable-deepep": BuiltIn("layout.dispatch=auto"),
        "--moe-flex-dispatcher-backend": BuiltIn("layout.dispatch=auto"),
        "--defer-embedding-wgrad-compute": OVERLAP,
        "--delay-wgrad-compute": OVERLAP,
        "--no-overlap-p2p-communication": OVERLAP,
        "--fsdp-double-buffer": OVERLAP,
        "--use-nccl-ub": BuiltIn("ranks of a host share memory: layout.dp_overlap"),
        "--ddp-average-in-collective": BuiltIn("gradients are divided by the tokens of the step, once"),
        "--calculate-per-token-loss": BuiltIn("the loss is a mean over the tokens of the step"),
        "--accumulate-allreduce-grads-in-fp32": BuiltIn("gradients are summed in fp32"),
        "--attention-softmax-in-fp32": BuiltIn("softmax is computed in fp32"),
        "--moe-router-dtype": BuiltIn("routers compute in fp32"),
        "--grad-reduce-in-bf16": Missing("gradients are summed in fp32"),
        "--megatron-fsdp-grad-comm-dtype": Missing("gradients are summed in fp32"),
        "--megatron-fsdp-main-grads-dtype": Missing("gradients are summed in fp32"),
        "--disable-bf16-reduced-precision-matmul": BuiltIn("sums in matmuls are fp32"),
        "--apply-query-key-layer-scaling": BuiltIn("scores are computed in fp32"),
        "--init-model-with-meta-device": BuiltIn("weights are made where they stay"),
        "--use-cpu-initialization": BuiltIn("initial weights have the same bits in every layout"),
        "--data-parallel-random-init": Missing("ranks that replicate a weight begin with the same one"),
        "--distributed-backend": BuiltIn("NCCL on GPUs, gloo on a CPU"),
        "--DDP-impl": BuiltIn("there is one implementation"),
        "--manual-gc": GARBAGE,
        "--manual-gc-interval": GARBAGE,
        "--empty-unused-memory-level": BuiltIn("memory is planned before the run"),
        "--deterministic-mode": BuiltIn("a run of one layout always has the same bits"),
        "--account-for-embedding-in-pipeline-split": BuiltIn("stages are divided by cost, embedding included"),
        "--account-for-loss-in-pipeline-split": BuiltIn("stages are divided by cost, head included"),
        "--use-tp-pp-dp-mapping": Missing("tensor-parallel ranks are neighbours, then cp, dp and pp"),
        "--microbatch-group-size-per-virtual-pipeline-stage": BuiltIn("of the schedule: layout.schedule"),
        "--moe-pad-expert-input-to-capacity": BuiltIn("no padding is needed"),
        "--moe-per-layer-logging": LOGGED,
        "--fp8-param-gather": BuiltIn("sharded weights travel as FP8 values"),
        "--fp8-margin": ByValue({"0": BuiltIn("no margin")}, Missing()),
        "--fp8-interval": BuiltIn("scales are computed at every step"),
        "--no-fp8-wgrad": Missing("train.fp8.exclude names linears that stay in train.precision"),
        "--decoupled-lr": Missing('optim.lr_scale={"*embed_tokens*": F, "lm_head*": F} multiplies the rate'),
        "--decoupled-min-lr": Missing("optim.lr_scale multiplies the rate, its end included"),
        "--start-weight-decay": Missing("weight decay is constant"),
        "--end-weight-decay": Missing("weight decay is constant"),
        "--weight-decay-incr-style": ByValue({"constant": BuiltIn("weight decay is constant")}, Missing()),
        "--override-opt_param-scheduler": BuiltIn(
            "the config says the schedule, and a change of it is refused or allowed"
        ),
        "--override-opt-param-scheduler": BuiltIn(
            "the config says the schedule, and a change of it is refused or allowed"
        ),
        "--use-checkpoint-opt_param-scheduler": BuiltIn("a run continues with its schedule"),
        "--use-checkpoint-opt-param-scheduler": BuiltIn("a run continues with its schedule"),
        "--step-batch-size-schedule": Missing("train.rampup grows the batch in equal steps"),
        "--rampup-batch-size": Missing("train.rampup takes start, increment and samples"),
        "--train-data-path": Missing("--data-path is given too"),
        "--test-data-path": Missing("after training: phalanx eval RUN --data PREFIX"),
        "--data-cache-path": BuiltIn("indexes need no cache"),
        "--data-impl": BuiltIn("token files are mapped into memory"),
        "--no-mmap-bin-files": BuiltIn("token files are mapped into memory, and work on network storage too"),
        "--no-create-attention-mask-in-dataloader": BuiltIn("no masks are stored"),
        "--num-workers": BuiltIn("tokens are read ahead by one thread"),
        "--num-dataset-builder-threads": BuiltIn("indexes need no building"),
        "--dataloader-type": ByValue({"single": BuiltIn("each token once an epoch")}, Missing()),
        "--eod-mask-loss": Missing("data.packing gives no loss to padding; ends of documents are learned"),
        "--create-attention-mask-in-dataloader": BuiltIn("no masks are stored"),
        "--ckpt-format": FORMAT,
        "--dist-ckpt-format": FORMAT,
        "--use-dist-ckpt": FORMAT,
        "--ckpt-fully-parallel-save": FORMAT,
        "--no-ckpt-fully-parallel-save": FORMAT,
        "--ckpt-fully-parallel-load": FORMAT,
        "--ckpt-assume-constant-structure": FORMAT,
        "--auto-detect-ckpt-format": FORMAT,
        "--dist-ckpt-strictness": FORMAT,
        "--use-persistent-ckpt-worker": BuiltIn("checkpoints are written in the background"),
        "--no-save-optim": Missing("checkpoints hold everything; phalanx export writes the weights alone"),
        "--no-save-rng": BuiltIn("random numbers follow from train.seed and the position"),
        "--no-load-rng": BuiltIn("random numbers follow from train.seed and the position"),
        "--no-load-optim": Missing("init_from=FOLDER starts from weights alone"),
        "--finetune": Missing("init_from=FOLDER starts from weights alone"),
        "--use-checkpoint-args": BuiltIn("the config says what the model is, and is compared with the checkpoint"),
        "--exit-signal-handler": BuiltIn("SIGTERM saves and ends with 75"),
        "--log-params-norm": Missing("the norm of the gradient is logged"),
        "--log-num-zeros-in-grad": Missing("the norm of the gradient is logged"),
        "--log-validation-ppl-to-tensorboard": LOGGED,
        "--log-timers-to-tensorboard": BuiltIn("the step budget, in the log and metrics.jsonl"),
        "--log-memory-to-tensorboard": LOGGED,
        "--log-loss-scale-to-tensorboard": LOGGED,
        "--log-learning-rate-to-tensorboard": LOGGED,
        "--log-batch-size-to-tensorboard": LOGGED,
        "--log-world-size-to-tensorboard": LOGGED,
        "--tensorboard-log-interval": LOGGED,
        "--tensorboard-queue-size": LOGGED,
        "--log-throughput": LOGGED,
        "--log-progress": LOGGED,
        "--timing-log-level": BuiltIn("the step budget: log.budget"),
        "--timing-log-option": BuiltIn("the step budget: log.budget"),
        "--logging-level": Missing("the log has one level"),
        "--wandb-save-dir": BuiltIn("in the run's folder"),
        "--wandb-exp-name": BuiltIn("has no effect without --wandb-project"),
        "--wandb-entity": BuiltIn("has no effect without --wandb-project"),
        "--check-for-nan-in-loss-and-grad": BuiltIn("a step that is not finite is never applied"),
        "--loss-scale": Missing("the loss scale is dynamic: train.loss_scale is the first one"),
        "--te-rng-tracker": BuiltIn("random numbers follow from train.seed and the position"),
        "--enable-cuda-graph": BuiltIn("train.cuda_graphs=auto"),
        "--cuda-graph-impl": BuiltIn("train.cuda_graphs=auto"),
        "--cuda-graph-scope": BuiltIn("train.cuda_graphs=auto"),
        "--external-cuda-graph": BuiltIn("train.cuda_graphs=auto"),
        "--optimizer-cpu-offload": Missing("optimizer state stays on the GPU; train.offload_layers moves activations"),
        "--distribute-saved-activations": BuiltIn("activations between blocks are sharded along tokens"),
        "--short-seq-prob": Missing("documents fill sequences"),
    }
)
IMPORTER = Megatron()
