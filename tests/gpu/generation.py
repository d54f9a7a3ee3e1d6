"""Checks of generation: the engine on a GPU against the same model computed whole on the CPU, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.predictor import MtpSpec
from phalanx.inference.request import SamplingOptions
from tests.gpu.truth import ROUNDINGS, off, within
from tests.harness.generation import answers_of, random_model, run_of, sequences_of, whole_logits
from tests.harness.predictor import knowing_model

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
LENGTHS, TOKENS = (5, 9, 3, 11, 2, 7, 30, 41), 5


def engine_check(model: str, precision: str) -> Callable[[torch.device], str]:
    """Log-probabilities of greedy tokens: of prompts in pieces, and of whole ones beside sequences that go on; with
    captured graphs and without."""

    def check(device: torch.device) -> str:
        run = run_of(model, precision)
        if hasattr(run.model, "head_dim"):  # fused kernels take multiples of 8
            run = replace(run, model=replace(run.model, head_dim=16))
        truth = random_model(0, 1, replace(run, train=replace(run.train, precision="fp64")))
        plain = random_model(0, 1, run)
        prompts = sequences_of([n for n in LENGTHS if n + TOKENS < run.model.max_position_embeddings], 131)
        asked = [(p, SamplingOptions(tokens=TOKENS, temperature=0, logprobs=1)) for p in prompts]
        made = random_model(0, 1, run, device)
        worst, usual = 0.0, ROUNDINGS[PRECISIONS[precision]]
        if (
            precision == "bf16"
        ):  # deep enough to be chaotic: as far off as the same model on the CPU, four times at most
            pairs = [[whole_logits(m, p).double() for m in (plain, truth)] for p in prompts]
            usual = 4 * max(off(*(torch.log_softmax(x, -1) for x in pair)) for pair in pairs)
        for tokens, graphs in ((8, True), (64, True), (64, False)):
            engine = Engine(made, EngineOptions(sequences=6, tokens=tokens, page_size=16, memory_gib=0.01))
            engine.runner.graphs.usable &= graphs
            for prompt, (answer, scores, _, _) in zip(prompts, answers_of(engine, asked, 2), strict=True):
                logprobs = torch.log_softmax(whole_logits(truth, prompt + answer), -1)[len(prompt) - 1 : -1]
                wanted = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
                found = torch.tensor([score.logprob for score in scores if score is not None], dtype=torch.float64)
                worst = max(worst, within("a log-probability", found, wanted, usual))
        return f"{worst:.1e}"

    return check


def drafts_check(precision: str) -> Callable[[torch.device], str]:
    """Drafts of modules that are always right are all accepted, greedy and sampled, more than there are modules too;
    texts are those without drafts; with captured graphs and without."""

    def check(device: torch.device) -> str:
        model = knowing_model(0, 1, run_of("deepseek_v3-mtp", precision), device)
        how = SamplingOptions(tokens=TOKENS + 6, temperature=0)
        asked = [(p, replace(how, temperature=t)) for t in (0, 0.7) for p in sequences_of(LENGTHS, 131)]
        room = EngineOptions(sequences=6, tokens=64, page_size=16, memory_gib=0.01)
        wanted = [tokens for tokens, *_ in answers_of(Engine(model, room), asked, 2)]
        for graphs, drafts in ((True, 1), (True, 3), (False, 3)):
            engine = Engine(model, replace(room, drafts=MtpSpec(drafts)))
            engine.runner.graphs.usable &= graphs
            found, counts = [tokens for tokens, *_ in answers_of(engine, asked, 2)], engine.draft_counts
            if found != wanted:
                raise AssertionError(f"drafts={drafts}, graphs={graphs}: another text")
            if not counts.drafted or counts.accepted != counts.drafted:
                raise AssertionError(f"drafts={drafts}, graphs={graphs}: {counts}")
        return str(counts)

    return check


def generation_checks() -> dict[str, Callable[[torch.device], str]]:
    """In bf16 without routers, whose choices flip."""
    models = ("llama", "gpt2", "gpt_oss", "deepseek_v3", "mixtral")
    wanted = [(model, precision) for model in models for precision in ("fp64", "fp32")]
    wanted += [("llama", "bf16"), ("gpt2", "bf16")]
    made = {f"{model}: engine, {precision}": engine_check(model, precision) for model, precision in wanted}
    return made | {f"drafts by modules, {precision}": drafts_check(precision) for precision in ("fp64", "fp32")}
