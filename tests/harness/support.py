"""The support matrix: every pair of features in one run, compared with one process, or refused by the config's rules.

    python -m tests.harness.support docs/support.md --jobs 8 --results pairs.jsonl --minutes 8

runs the pairs that pairs.jsonl does not have yet, and writes the page from all of them; called again it goes on. A
pair takes about half a second of one core. tests/verifying/test_support.py runs some.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import tempfile
import time
import traceback
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from itertools import combinations_with_replacement, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file

from phalanx.base import tree
from phalanx.base.errors import ConfigError, Problem
from phalanx.checkpoint.agree import agree
from phalanx.checkpoint.convert import export
from phalanx.checkpoint.load import load_state, load_weights
from phalanx.checkpoint.save import Snapshot, Target, collect, write
from phalanx.checkpoint.storage import Storage
from phalanx.comm.mesh import Mesh
from phalanx.config.device_check import Facts
from phalanx.config.run import Run
from phalanx.data.index import Corpus, CorpusWriter
from phalanx.data.loader import train_loader
from phalanx.data.packing import make_packing, packing_path, write_packing
from phalanx.engine.build import State, build, init_weights
from phalanx.engine.fp8_state import unsafe
from phalanx.engine.replicas import check_replicas
from phalanx.engine.shadow import gradient_distance
from phalanx.engine.step import accumulate, evaluate_step, shadow_of, update
from phalanx.forecast.check import check
from phalanx.forecast.decide import make_plan
from phalanx.inference.load import load_alone
from phalanx.planning.order import step_samples
from phalanx.planning.plan import storing_all, without_layout
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import Batch
from phalanx.training.saves import numbers_of
from tests.harness.generation import whole_logits
from tests.harness.parity import assemble, compare, parts_of, random_weights, step_batches
from tests.harness.pool import RankPool, warm_imports
from tests.harness.support_features import CORPUS, FEATURES, Feature, Trial, exclude, trial

STEPS = 2
NEAR = {"fp32": 2.0**-16, "bf16": 2.0**-7, "fp16": 2.0**-10}  # of a tensor's gradient, beside 2 x what one process has
NEAR_FP8 = 0.02  # codes of blocks that are cut otherwise
SAVES = {"resume", "export", "init"}
SOURCES = ("support.py", "support_features.py", "parity.py", "pool.py")
DOCUMENTS = 200  # of the file that is packed
PROMPT = [3, 1, 4, 1, 5, 9]

ALLOWED = (
    ("layout.cp_attention", "has no effect without layers with attention"),
    ("layout.cp_ulysses", "has no effect without layers with attention"),
    ("train.fp8.exclude", "must fit names of linears"),
    ("layout.cp_attention", "attention to one part of the keys at a time is fused and has no dropout of probabilities"),
    ("layout.cp_ulysses", "must divide the number of key-value heads of a tensor-parallel rank"),
    (
        "train.cuda_graphs",
        "excludes a schedule that splits backward: type train.cuda_graphs=off or layout.schedule=auto",
    ),
    ("train.cuda_graphs", "excludes train.offload_layers: type train.cuda_graphs=off or train.offload_layers=0"),
    ("train.fp8", "is not built for a model with an encoder beside its decoder"),
    ("train.deterministic", "needs a model whose layers share no weight: their sums have no fixed order"),
    ("train.fp8", "is not built for a model that reads images or sound"),
    (
        "train.cuda_graphs",
        "needs micro-batches of equal sizes, and those of a model that reads sound differ",
    ),
    (
        "train.deterministic",
        "is not built for a model that reads images or sound: which rank has which of them follows tp and cp",
    ),
    ("train.deterministic", "has no fixed order of sums over texts of all ranks, which the task needs"),
    ("layout.cp_degree", "must be fixed: a scan goes through all documents of a sequence in one exchange"),
    ("layout.cp_degree", "balances the documents of one text, and the model reads two: take fixed"),
    ("lora.base", "must be bf16 with train.fp8, which quantizes weights itself"),
    ("train.fp8", "must be null: the method reads the frozen weights, of which only FP8 values may be there"),
)
"""The refusals that there are; another one fails a test."""


@dataclass(frozen=True)
class Outcome:
    """Of a pair. kind: green, refused by a rule, apart (no run has both), or failed. instead: what was
    changed to make a refused run work. code, versions: of what it was found."""

    kind: Literal["green", "refused", "apart", "failed"]
    text: str = ""
    instead: str = ""
    rule: tuple[str, str] | None = None
    world: int = 0
    seconds: float = 0.0
    code: str = ""
    versions: str = ""


# ---- one pair ------------------------------------------------------------------------------------


def judge(ranks: RankPool, a: Feature, b: Feature) -> Outcome:
    """Run the pair, or what the rules say works instead."""
    why, start = exclude(a, b), time.monotonic()
    if why is not None:
        return Outcome("apart", why)
    try:
        t = trial(a, b)
        problems = broken(t)
        kind: Any = "refused" if problems else "green"
        instead, t = mended(t, problems)
        confirm(ranks, t)
        text = " ".join(f"{p.field}={p.value!r}: {p.rule}." for p in problems)
        rule = (problems[0].field, problems[0].rule) if problems else None
        return Outcome(kind, text, instead, rule, t.world, time.monotonic() - start)
    except Exception:  # whatever goes wrong is what the page must tell
        return Outcome("failed", traceback.format_exc(limit=8)[-3000:], world=0, seconds=time.monotonic() - start)


def broken(t: Trial) -> list[Problem]:
    run = replace(t.run, layout=replace(t.run.layout, bucket_mb=max(1, t.run.layout.bucket_mb)))
    return check(run, Facts(world_size=t.world, files=False))


def mended(t: Trial, problems: list[Problem]) -> tuple[str, Trial]:
    """The trial with the first values that its problems offer, until there is none left."""
    told = []
    while problems:
        first = problems[0]
        if not first.valid or len(told) > 4:
            raise ConfigError(problems)
        told.append(f"{first.field}={first.valid[0]}")
        t = replace(t, run=tree.replace_at(t.run, first.field, first.valid[0]))
        problems = broken(t)
    if t.run.train.fp8 is None:
        t = replace(t, also=tuple(each for each in t.also if each != "shadow"))  # which are steps of FP8
    return " ".join(told), t


def confirm(ranks: RankPool, t: Trial) -> None:
    """AssertionError or RanksFailed unless the layout does what one process does."""
    with tempfile.TemporaryDirectory() as folder:
        t = with_files(t, Path(folder))
        alone = one_process(t)
        truth = alone_on_one(ranks, alone, Path(folder))
        found = ranks.run("tests.harness.support:train_and_more", t.world, t, Path(folder) / "ranks")
        equal_enough(ranks, t, alone, found, truth)
        saved = {"ranks": found, "alone": [truth]}
        if "resume" in t.also and t.near:
            for source, savers in saved.items():
                resume_near(ranks, t, alone, Path(folder) / source, savers)
        elif "resume" in t.also:
            for what, n, source in ((alone, 1, "ranks"), (t, t.world, "alone")):
                equal_enough(
                    ranks,
                    t,
                    alone,
                    ranks.run("tests.harness.support:resume", n, what, Path(folder) / source),
                    truth["more"],
                )
        if "export" in t.also and (t.near or generates_nothing(t.run.model)):
            for source, savers in saved.items():
                exports_weights(Path(folder) / source, savers)
        elif "export" in t.also:
            same_exports(Path(folder) / "ranks", Path(folder) / "alone")


def generates_nothing(model: Any) -> bool:
    """Encoders, decoders that read an encoder's memory, and models that read images."""
    return bool(model.reads_beside or model.needs_room) or model.both_ways


def resume_near(ranks: RankPool, t: Trial, alone: Trial, folder: Path, savers: list[dict]) -> None:
    """What was saved is loaded to the bit, and a step from there is near to float64's from there, in the layout and
    on one process."""
    weights = assemble([r["weights"] for r in savers])
    found, [usual], [ideal] = (
        ranks.run("tests.harness.support:resume", n, what, folder)
        for what, n in ((t, t.world), (alone, 1), (exactly(alone), 1))
    )
    for results in (found, [usual]):
        for name, values in assemble([r["loaded"] for r in results]).items():
            np.testing.assert_array_equal(values, weights[name], err_msg=f"{name} as loaded")
    stay_near(t, found, {**usual, "grads": [assemble([usual["grads"][0]])]}, assemble([ideal["grads"][0]]))


def exports_weights(folder: Path, savers: list[dict]) -> None:
    """A Hugging Face folder in fp32 has the masters of those who saved."""
    weights = assemble([r["weights"] for r in savers])
    out = export(folder / "step-00000002", folder / "export", "fp32")
    exported = {name: values for path in out.glob("*.safetensors") for name, values in load_file(path).items()}
    assert exported and exported.keys() <= weights.keys()
    for name, values in exported.items():
        np.testing.assert_array_equal(values.numpy(), weights[name].astype(np.float32), err_msg=f"{name} as exported")


def alone_on_one(ranks: RankPool, alone: Trial, folder: Path | None) -> dict:
    """What one process finds. Trials that differ in their layout alone have one, which is kept for the next."""
    if SAVES & set(alone.also) or alone.run.data.packing != "off":
        [truth] = ranks.run("tests.harness.support:train_and_more", 1, alone, folder and folder / "alone")
        return truth
    return _alone_on_one(ranks, Keyed(repr(alone), alone))


@dataclass(frozen=True)
class Keyed:
    """A trial that is the same where its text is."""

    key: str
    trial: Trial = field(compare=False)


@lru_cache(maxsize=50)
def _alone_on_one(ranks: RankPool, keyed: Keyed) -> dict:
    [truth] = ranks.run("tests.harness.support:train_and_more", 1, keyed.trial, None)
    return truth


def with_files(t: Trial, folder: Path) -> Trial:
    """The trial with its file of documents, if it reads one, and their packing."""
    if not t.run.data.paths:
        return t
    length, prefix = t.run.train.seq_length, str(folder / CORPUS)
    pick = np.random.default_rng(1)
    with CorpusWriter(prefix, np.uint16) as writer:
        for size in pick.integers(1, length * 5 // 8, DOCUMENTS):
            writer.add_document(pick.integers(0, t.run.model.vocab_size, size))
    corpus = Corpus(prefix)
    stop = corpus.num_tokens
    write_packing(packing_path(prefix, 0, stop, length), make_packing(corpus, 0, stop, length, True), corpus, 0, stop)
    return replace(t, run=replace(t.run, data=replace(t.run.data, paths=(prefix,))))


def equal_enough(ranks: RankPool, t: Trial, alone: Trial, found: list[dict], truth: dict) -> None:
    whole = {**truth, "grads": [assemble([g]) for g in truth["grads"]], "weights": assemble([truth["weights"]])}
    if not t.near:
        compare(found, whole, len(truth["grads"]))
        for result in found:
            for name, values in truth["beside"].items():
                np.testing.assert_allclose(result["beside"][name], values, rtol=1e-9, err_msg=name)
        return
    ideal = alone_on_one(ranks, exactly(alone), None)
    stay_near(t, found, whole, assemble([ideal["grads"][0]]))


def stay_near(t: Trial, found: list[dict], alone: dict, ideal: dict[str, np.ndarray]) -> None:
    """No tensor's first gradient is further from float64 than twice what one process in the same precision is, and a
    rounding.

    Other codes of 8 or 4 bits are other noise, by which a small tensor may be far off by chance: of these four
    times, but all together half more.
    """
    room = NEAR_FP8 if t.run.train.fp8 else NEAR[t.run.train.precision]
    times = (
        4 if t.run.train.kernels == "triton" or t.run.train.fp8 else 2
    )  # Triton's interpreter cuts numbers to bf16, a GPU rounds
    every = []
    grads = assemble([r["grads"][0] for r in found])
    largest = max(np.linalg.norm(g) for g in ideal.values())
    for name, exact in ideal.items():
        size = max(np.linalg.norm(exact), 1e-2 * largest)
        off, usual = (np.linalg.norm(g[name] - exact) / size for g in (grads, alone["grads"][0]))
        assert off <= times * usual + room, f"gradient of {name} is off by {off:.3g}, on one process by {usual:.3g}"
        every.append((off, usual))
    off, usual = np.sqrt(np.mean(np.square(every), 0))
    low = t.run.train.fp8 and t.run.train.kernels != "triton"
    assert off <= 1.5 * usual + room or not low, f"all gradients are off by {off:.3g}, on one process by {usual:.3g}"
    for result in found:
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=4 * room, err_msg="losses")


def one_process(t: Trial) -> Trial:
    run = without_layout(storing_all(t.run))
    train = replace(run.train, kernels="auto", deterministic=False, cuda_graphs="auto")
    return replace(
        t,
        run=replace(run, train=train, layout=replace(run.layout, sharding=0, prefetch=1, reshard_after_forward=True)),
        world=1,
    )


def exactly(alone: Trial) -> Trial:
    return replace(alone, run=replace(alone.run, train=replace(alone.run.train, precision="fp64", fp8=None)), also=())


# ---- what each rank runs -------------------------------------------------------------------------


def train_and_more(rank: int, world: int, t: Trial, folder: Path | None) -> dict:
    """Some steps and what the trial does beside them; `more` holds a further step, of a trial that is to be resumed
    before it."""
    state = started(rank, world, t, folder)
    beside: dict[str, Any] = {}
    if "shadow" in t.also:
        batches = batches_of(t, t.run, state.mesh, 0)
        beside["shadow"] = gradient_distance(state, shadow_kept(state, batches))
        beside["shadow"] = beside["shadow"].nan_to_num(7.0).numpy()  # type: ignore[union-attr]
        state.buffers.zero_grads()
    result = steps(state, t, range(STEPS))
    result["beside"] |= beside
    if "evaluate" in t.also:
        loss, tokens, *_ = evaluate_step(state.model, batches_of(t, t.run, state.mesh, 9))
        beside["evaluate"] = np.array([loss.item(), tokens.item()])
    if "replicas" in t.also:
        check_replicas(state)
    if folder is not None and {"resume", "export"} & set(t.also):
        save_to(state, folder)
    if "resume" in t.also:
        result["more"] = steps(state, t, range(STEPS, STEPS + 1))
    return result


def shadow_kept(state: State, batches: list) -> dict:
    kept = shadow_of(state, batches)
    accumulate(state, batches)
    return kept


def started(rank: int, world: int, t: Trial, folder: Path | None) -> State:
    plan = make_plan(t.run, world)
    state = build(plan, Mesh(plan.grid, rank))
    random_weights(state.model)
    state.buffers.publish()
    if "init" in t.also and folder is not None:
        save_to(state, folder.parent / "init" / str(world))
        for flat in state.buffers.flat:
            flat.storage.weight_kept.fill_(5.0)
            flat.master.fill_(5.0)
        load_weights(folder.parent / "init" / "1" / "step-00000002" / "weights", state.buffers, state.mesh)
        init_weights(state.model, lambda spec: not spec.exported)
    state.model.train()
    return state


def steps(state: State, t: Trial, numbers: Iterable[int]) -> dict:
    losses, norms, grads = [], [], []
    for step in numbers:
        growing = "ramp-up" in t.also and step == 0  # the first step has half the batch
        size = t.run.train.global_batch // (2 if growing else 1)
        batches = batches_of(t, replace(t.run, train=replace(t.run.train, global_batch=size)), state.mesh, step)
        kept = begin_low(state, batches, step)
        tokens = accumulate(state, batches)
        distance = gradient_distance(state, kept)
        spoilt = "skip" in t.also and step == 1
        if spoilt:
            spoil(state)
        else:
            grads.append(parts_of(state, "grad"))
        result = update(state, tokens, lr=1e-2)
        losses.append((result.loss.item(), 0.0 if result.mtp_loss is None else result.mtp_loss.item()))
        norms.append(result.grad_norm.item())
        assert bool(result.skipped) == spoilt, f"step {step} skipped: {int(result.skipped)}"
        beside = finish_low(state, result.fp8, distance)
    state.buffers.ready()
    return {"losses": losses, "norms": norms, "grads": grads, "weights": parts_of(state, "master"), "beside": beside}


def begin_low(state: State, batches: list[Batch], step: int) -> dict[int, torch.Tensor] | None:
    """As the loop does before a step: train.fp8.last_steps, and the reference of a shadow step where it decides who
    falls back."""
    low, train = state.model.fp8, state.plan.run.train
    if low is None or train.fp8 is None:
        return None
    low.turn(step + 1 > train.steps - train.fp8.last_steps)
    return shadow_of(state, batches) if train.fp8.min_cosine is not None and not low.over else None


def finish_low(state: State, told: torch.Tensor | None, distance: torch.Tensor | None) -> dict[str, Any]:
    """As the loop does after a step: linears that lost too much fall back. Who has so far."""
    low, fp8 = state.model.fp8, state.plan.run.train.fp8
    if low is None or fp8 is None or told is None:
        return {}
    bad = unsafe(low.names, fp8, told.tolist(), None if distance is None else distance.tolist())
    low.fall_back(name for name in bad if low.is_on(name))
    return {"fell back": low.off.numpy().copy()}


def batches_of(t: Trial, run: Run, mesh: Mesh, step: int) -> list[Batch]:
    """This rank's micro-batches: made up, or as a run reads them from its file."""
    if run.data.packing == "off":
        return step_batches(run, mesh, step, t.documents)
    train, size = run.train, run.train.global_batch
    loader = train_loader(
        run.data,
        seq_length=train.seq_length,
        seed=train.seed,
        vocab_size=run.model.vocab_size,
        samples=size,
        reading=reading_of(run),
    )
    samples = step_samples(run, loader, step * size, mesh.dp.size, mesh.dp.index)
    return [loader.batch(each, mesh.part).cut(mesh.part) for each in samples]


def spoil(state: State) -> None:
    """An infinite gradient on the last rank that has one which the norm counts."""
    counted = [v for f in state.buffers.flat for v in f.counted() if len(v)]
    if state.mesh.rank == max(i for i, n in enumerate(agree(state.mesh.world, lambda: len(counted))) if n):
        counted[-1][:1] = torch.inf


def save_to(state: State, folder: Path) -> None:
    run = state.plan.run
    snapshot = Snapshot(STEPS, STEPS * run.train.global_batch, run.model, {}, {})
    content = collect(snapshot, state, more=numbers_of(state))
    write(content, Target(folder, Storage()), state.mesh.world)


def resume(rank: int, world: int, t: Trial, folder: Path) -> dict:
    """The step after those of a checkpoint."""
    state = started(rank, world, replace(t, also=()), None)
    load_state(
        folder / "step-00000002",
        state,
        t.run.model,
        numbers_of(state),
    )
    if state.model.fp8 is not None:
        state.model.fp8.loaded()
    loaded = parts_of(state, "master")
    return {**steps(state, t, range(STEPS, STEPS + 1)), "loaded": loaded}


def same_exports(folder: Path, other: Path) -> None:
    """Hugging Face folders in fp32 of what both saved make the same logits."""
    found = []
    for path in (folder, other):
        model = load_alone(export(path / "step-00000002", path / "export", "fp32"))
        found.append(whole_logits(model, PROMPT)[-1].numpy())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4 * np.abs(found[1]).max())


# ---- all pairs -----------------------------------------------------------------------------------


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Each pair once; a feature with itself is the feature alone."""
    yield from combinations_with_replacement(FEATURES, 2)


def judge_all(names: Iterable[tuple[str, str]], jobs: int, minutes: float, results: Path) -> None:
    """Judge pairs on so many pools of ranks, and append each outcome to the results as it comes."""
    start, waiting = time.monotonic(), iter(names)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as workers, results.open("a", encoding="utf-8") as file:
        running = {workers.submit(judge_named, *pair) for pair in islice(waiting, 2 * jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                file.write(json.dumps(future.result()) + "\n")
                file.flush()
            if time.monotonic() - start < 60 * minutes:
                running |= {workers.submit(judge_named, *pair) for pair in islice(waiting, len(done))}
        for _ in range(4 * jobs):  # each process closes its pool
            workers.submit(close_pool)


@lru_cache(maxsize=1)
def pool() -> RankPool:
    """Of this process."""
    warm_imports()
    return RankPool()


def close_pool() -> None:
    pool().close()


def judge_named(a: str, b: str) -> dict:
    found = {f.name: f for f in FEATURES}
    outcome = judge(pool(), found[a], found[b])
    if outcome.kind == "failed":
        close_pool()  # whatever state it is in
    return {"a": a, "b": b, **asdict(replace(outcome, code=code_here(), versions=versions_here()))}


@lru_cache(maxsize=1)
def code_here() -> str:
    """A fingerprint of the sources that outcomes follow from."""
    root, found = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted([*root.glob("phalanx/**/*.py"), *(root / "tests/harness" / name for name in SOURCES)]):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def versions_here() -> str:
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, triton "
        f"{metadata.version('triton')}, numpy {np.__version__}"
    )


def known(results: Path) -> dict[tuple[str, str], Outcome]:
    """Outcomes by names; of a pair judged twice the later one."""
    if not results.exists():
        return {}
    found = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        pair, rule = (row.pop("a"), row.pop("b")), tuple(row.pop("rule") or ()) or None
        found[pair] = Outcome(**row, rule=rule)
    return found


def by_pair(outcomes: dict[tuple[str, str], Outcome]) -> dict[tuple[str, str], Outcome]:
    """Those of today's pairs, in their order; what no run has needs none."""
    found = {
        (a.name, b.name): outcomes.get((a.name, b.name)) if exclude(a, b) is None else judge_apart(a, b)
        for a, b in pairs()
    }
    return {pair: o for pair, o in found.items() if o is not None}


def judge_apart(a: Feature, b: Feature) -> Outcome:
    return Outcome("apart", exclude(a, b) or "")


# ---- the page ------------------------------------------------------------------------------------

SIGNS = {"green": "+", "apart": "\u00b7", "failed": "!"}
INTRO = """# What works with what

This page is generated: `python -m tests.harness.support docs/support.md` trains a small model with every pair of features, on the fewest ranks that allow both, and writes
what it found. `{green}` pairs compute what one process computes: losses, norms, every gradient and all weights after two steps agree in float64 to 1e-9. In fp32, bf16 and
fp16, and with Triton kernels (interpreted), no gradient is further from float64 than twice the distance that one process in the same precision has. FP8 recipes are emulated
in float64 unless the row says otherwise, so that a single differing quantized value would show. With experts on several ranks quantized values do differ
(docs/training.md), and gradients are compared as in fp32.

{counts}

Rows and columns are features, by number; on the diagonal a feature is alone.

- `+`: the pair works.
- `\u00b7`: no run can have both: they are two values of one setting, no model family has both, or they are adapters and an export (PEFT folders need none).
- A letter: the config's check refuses the pair, for the reason below.
- `!`: the pair failed.

For CUDA graphs this page compares their use of memory (on CPUs blocks run without capture); `tests/gpu/layouts.py` compares the graphs themselves. `tests/inference/test_engine.py`
compares the text that a layout generates with that of one process, and `tests/inference/test_beside.py` compares text generated during training.
"""  # noqa: E501


def page(outcomes: dict[tuple[str, str], Outcome], made: str) -> str:
    rules = list(dict.fromkeys(o.rule for o in outcomes.values() if o.rule))
    letters = {rule: chr(ord("a") + i) for i, rule in enumerate(rules)}
    kinds = [o.kind for o in outcomes.values()]
    counts = (
        f"{len(kinds)} pairs of {len(FEATURES)} features: {kinds.count('green')} work, "
        f"{kinds.count('refused')} are refused"
    )
    counts += f" by {len(rules)} rules, {kinds.count('failed')} failed; {kinds.count('apart')} cannot be in one run."
    missing = len(list(pairs())) - len(kinds)
    counts += f" {missing} were not run (`?`)." if missing else ""
    parts = [
        INTRO.format(green=kinds.count("green"), counts=counts),
        "```text\n" + table(outcomes, letters) + "\n```\n",
    ]
    parts += ["## Refused\n", *(refusal(letter, rule, outcomes) for rule, letter in letters.items())]
    failed = {pair: o for pair, o in outcomes.items() if o.kind == "failed"}
    if failed:
        parts += [
            "## Failed\n",
            "\n".join(f"- {a} with {b}: `{last_line(o.text)}`" for (a, b), o in failed.items()) + "\n",
        ]
    return "\n".join([*parts, made])


def table(outcomes: dict[tuple[str, str], Outcome], letters: dict[Any, str]) -> str:
    width = max(len(f.name) for f in FEATURES)
    lines: list[str] = []
    numbers = [f"{i + 1:2d}" for i in range(len(FEATURES))]
    head = [" " * (width + 5) + spaced([n[d] for n in numbers]) for d in (0, 1)]
    for i, row in enumerate(FEATURES):
        if i == 0 or row.group != FEATURES[i - 1].group:
            lines += ["", row.group.upper(), *head]
        signs = [sign(outcomes.get((FEATURES[j].name, row.name)), letters) for j in range(i + 1)]
        lines.append(f"{i + 1:2d} {row.name:{width}}  {spaced(signs)}")
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def spaced(signs: list[str]) -> str:
    """A gap between the columns of two groups."""
    return "".join(
        (" " if i and f.group != FEATURES[i - 1].group else "") + s for i, (f, s) in enumerate(zip(FEATURES, signs))
    )


def sign(outcome: Outcome | None, letters: dict[Any, str]) -> str:
    if outcome is None:
        return "?"
    return letters[outcome.rule] if outcome.kind == "refused" else SIGNS[outcome.kind]


def refusal(letter: str, rule: tuple[str, str], outcomes: dict[tuple[str, str], Outcome]) -> str:
    found = [(a, b, o) for (a, b), o in outcomes.items() if o.rule == rule]
    a, b, first = found[0]
    lines = [f"**{letter}** `{rule[0]}` {rule[1]}.\n"]
    lines += [f"- {a} with {b}; `{o.instead}` works instead." for a, b, o in found]
    return "\n".join(lines) + "\n"


def last_line(text: str) -> str:
    return (
        next((line for line in reversed(text.strip().splitlines()) if line.strip()), "").strip()[:200].replace("`", "'")
    )


def how_made(outcomes: Collection[Outcome]) -> str:
    ran = [o for o in outcomes if o.kind != "apart"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    minutes, old = sum(o.seconds for o in ran) / 60, sum(o.code != code_here() for o in ran)
    state = (
        "All runs had the sources of this commit"
        if not old
        else f"{old} of {len(ran)} runs had the sources of earlier commits"
    )
    versions = "; ".join(
        f"{v or 'versions not kept'}: {n} pairs" for v, n in Counter(o.versions for o in ran).most_common()
    )
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, CPU ranks over gloo, {minutes:.0f} minutes of runs.",
        f"{state}. {versions}.",
    ]
    return "## How it was made\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path, help="the Markdown file to write")
    parser.add_argument(
        "--results", type=Path, default=Path("support.jsonl"), help="outcomes so far; new ones are added"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="pools of ranks that run at once (each has up to 8 processes)"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no more runs after so many minutes")
    parser.add_argument(
        "--again",
        choices=("failed", "refused", "old"),
        nargs="*",
        default=[],
        help="judge these again; old: of other sources",
    )
    options = parser.parse_args()
    outcomes = known(options.results)
    names = [(a.name, b.name) for a, b in pairs()]
    todo = [pair for pair in names if pair not in outcomes or outcomes[pair].kind in options.again]
    if "old" in options.again:
        todo = [pair for pair in names if pair in todo or outcomes[pair].code != code_here()]
    judge_all(todo, options.jobs, options.minutes, options.results)
    here = by_pair(known(options.results))
    options.page.write_text(page(here, how_made(here.values())), encoding="utf-8")
    print(f"{len(names) - len(here)} of {len(names)} pairs are still to be run")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is first imported
    main()
