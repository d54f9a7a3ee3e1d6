"""Megatron-LM's steps, batches, evaluation, learning rates and optimizers, and what becomes of each here."""

from __future__ import annotations

from typing import Any

from phalanx.config.importers.megatron_model import TITLE
from phalanx.config.importers.translation import (
    BuiltIn,
    ByValue,
    Missing,
    Refused,
    Translation,
    Undecided,
    one_of,
    real,
    whole,
)

BATCH, MICRO = "--global-batch-size", "--micro-batch-size"
TP = ("--tensor-model-parallel-size", "--model-parallel-size")
PP = ("--pipeline-model-parallel-size",)
CP = ("--context-parallel-size",)


def batch_of(t: Translation, ranks: int | None) -> int:
    """The global batch; without one it is a micro-batch on each data-parallel rank."""
    if t.has(BATCH):
        return whole(t.value(BATCH))
    if ranks is None:
        raise Undecided(f"{BATCH} is not in the text; --ranks gives it, as a micro-batch on each data-parallel rank")
    sizes = [whole(t.value(t.first(*names), 1)) for names in (TP, PP, CP)]
    return whole(t.value(MICRO, 1)) * max(1, ranks // (sizes[0] * sizes[1] * sizes[2]))


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
FROM_0 = "warm-up begins at 0"
ENDS = ("--lr-decay-iters", "--lr-decay-samples")
WSD = ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples")


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


MUON = "optim.adjust=match_rms_adamw makes updates as large as AdamW's"
ADAM = {"--adam-beta1": ("beta1", 0.9), "--adam-beta2": ("beta2", 0.999), "--adam-eps": ("eps", 1e-8)}
STATES = {"fp32": "master", "bf16": "bf16", "fp8": "fp8"}


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
