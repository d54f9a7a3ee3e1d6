"""One plan for all ranks: whatever machines and groups find, every rank acts on the same decision; a context that an
error leaves is as before."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from phalanx.base.errors import ConfigError
from phalanx.base.log import ranks_text
from phalanx.comm import symmetric
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Fp8Config
from phalanx.engine.agree import (
    EXPERTS,
    NO_GRAPHS_GPU,
    NO_GRAPHS_LONG,
    NO_GRAPHS_OFFLOAD,
    NO_GRAPHS_ROOM,
    NO_GRAPHS_ROWS,
    NO_GRAPHS_SIZES,
    NO_GRAPHS_UNITS,
    ON,
    OVERHEAD,
    ROOM_FOR_POOLS,
    TP,
    LocalFacts,
    among_equals,
    decide,
    layer_flops,
    used_ops,
)
from phalanx.engine.build import build, choices
from phalanx.engine.shadow import aside
from phalanx.engine.step import accumulate, update
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.observe.record import Recorder
from phalanx.ops.proof import setting_of
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.muon import MuonConfig
from tests.harness.parity import base_run, random_weights, step_batches

GPU = LocalFacts(
    "NVIDIA H200", 140 << 30, triton=True, no_optional_kernels=(), cublaslt=True, nccl="2.27.5", driver="580.65.06"
)
WHY = "off: the ranks are on 2 hosts"


def opened(facts: LocalFacts, **said: str) -> LocalFacts:
    return replace(facts, opened={TP: "off", "dp": "off", **said})


# ---- the decision alone


def moe_plan(**layout):
    return make_plan(replace(base_run("mixtral"), layout=LayoutConfig(ep=4, **layout)), 8)


def test_a_kernel_that_is_wrong_on_one_rank_runs_on_none():
    """It is said with its cost; a config that insists on kernels is refused."""
    plan, right = make_plan(base_run("llama"), 2), opened(GPU)
    wrong = replace(right, wrong={"norm": "triton: rms_norm: result 1 differs by 0.5 of the largest value"})
    found = decide(plan, [right, wrong])
    assert found.plan.kernels.plain_ops == ("norm",) and found.plan.kernels.triton
    [said] = found.warnings
    assert "op norm runs its reference" in said and "rank 1" in said and "costs time" in said
    assert not decide(plan, [right, right]).plan.kernels.plain_ops
    run = replace(plan.run, train=replace(plan.run.train, kernels="triton"))
    with pytest.raises(ConfigError) as error:
        decide(make_plan(run, 2), [right, wrong])
    [problem] = error.value.problems
    assert problem.field == "train.kernels" and "norm" in problem.rule and "plain" in problem.valid


def test_the_ops_of_a_run_are_checked():
    """Not those of other models, formats and optimizers, which it will not call."""
    names = {op.name for op in used_ops(make_plan(base_run("llama"), 1))}
    assert {"norm", "rope", "loss", "adamw"} <= names and not names & {
        "grouped",
        "quant",
        "symmetric",
        "store_pages",
        "largest_scores",
        "relu2",
    }
    for model in ("nemotron_h", "nemotron_h-moe"):
        assert "relu2" in {op.name for op in used_ops(make_plan(base_run(model), 1))}
    scan, rule = ({op.name for op in used_ops(make_plan(base_run(model), 1))} for model in ("mamba2", "qwen3_next"))
    assert {"scan", "conv1d", "gated_norm"} <= scan and not scan & {"delta", "norm_gate", "scan_step"}
    cp = make_plan(replace(base_run("mamba2"), layout=LayoutConfig(cp=2)), 2)
    assert "carried" in {op.name for op in used_ops(cp)} and "carried" not in scan | rule
    assert {"delta", "conv1d", "norm_gate"} <= rule and not rule & {"scan", "gated_norm", "delta_step"}
    run = base_run("mixtral")
    run = replace(run, optim=MuonConfig(name="muon", fallback=AdamWConfig()))
    assert {"grouped", "route", "symmetric", "adamw"} <= {op.name for op in used_ops(make_plan(run, 1))}
    for optim in (AdamWConfig(moments="8bit"), MuonConfig(name="muon", fallback=AdamWConfig(moments="8bit"))):
        names = {op.name for op in used_ops(make_plan(replace(run, optim=optim), 1))}
        assert "adamw_8bit" in names and "adamw_fp8" not in names


def test_ranks_of_a_machine_share_the_first_comparisons_of_kernels(monkeypatch):
    """Every rank's number among those of its machine: together they have each op once."""
    hosts = ["a", "b", "a", "a", "b"]
    setting = setting_of(torch.device("cpu"))
    found = []
    for rank, host in enumerate(hosts):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        said = [f"{each} {setting}" for each in hosts]
        world = SimpleNamespace(
            index=rank, all_gather_text=lambda text, rank=rank, said=said: said[:rank] + [text] + said[rank + 1 :]
        )
        found.append(among_equals(world, torch.device("cpu")))
    assert found == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]


@pytest.mark.parametrize("groups", product((ON, WHY), repeat=2))
def test_push_only_where_every_group_has_memory(groups):
    """All 16 mixtures of two groups: whoever decides, and in whatever order the groups come, all of them do the
    same."""
    everyone = [opened(GPU, experts=groups[rank // 4]) for rank in range(8)]
    agreed = decide(moe_plan(), everyone)
    wanted = "push" if groups == (ON, ON) else "alltoall"
    assert agreed.plan.experts.dispatch == wanted and (agreed.memory[EXPERTS] == ON) == (wanted == "push")
    assert agreed.graphs == ("on" if wanted == "push" else NO_GRAPHS_SIZES)
    if len(set(groups)) > 1:
        assert ranks_text(r for r in range(8) if groups[r // 4] != ON) in agreed.memory[EXPERTS]


def test_the_config_of_a_model_without_experts_stays_as_it_is():
    """It is recorded in checkpoints, and read again."""
    plan = make_plan(base_run("llama", device="auto"), 1)
    assert decide(plan, [opened(GPU)]).plan.run == plan.run


@pytest.mark.parametrize(
    ("layout", "use", "field"),
    [
        ({"ep": 4, "dispatch": "push"}, EXPERTS, "layout.dispatch"),
        ({"ep": 4, "dispatch": "allgather", "ep_overlap": "on"}, EXPERTS, "layout.ep_overlap"),
        ({"tp": 2, "tp_overlap": "on"}, TP, "layout.tp_overlap"),
        ({"dp_overlap": "on"}, "dp", "layout.dp_overlap"),
        ({"dp_overlap": "on"}, "edp", "layout.dp_overlap"),
    ],
)
def test_what_a_config_insists_on_is_refused_on_all_ranks(layout, use, field):
    plan = make_plan(replace(base_run("mixtral"), layout=LayoutConfig(**layout)), 8)
    everyone = [opened(GPU, **{use: WHY if rank == 5 else ON}) for rank in range(8)]
    with pytest.raises(ConfigError) as caught:
        decide(plan, everyone)
    [problem] = caught.value.problems
    assert (
        problem.field == field
        and "share (the ranks are on 2 hosts (rank 5))" in problem.rule
        and "auto" in problem.valid
    )
    decide(plan, [opened(GPU, **{use: ON})] * 8)


@pytest.mark.parametrize("pp", [1, 2])
def test_graphs_by_the_smallest_gpu(pp):
    """Pools have to fit on the smallest GPU of all; one rank without a GPU ends graphs on all."""
    run = base_run("llama")
    plan = make_plan(replace(run, layout=LayoutConfig(pp=pp)), 4)
    uses, _ = rank_uses(plan, plan.num_micro_batches(run.train.global_batch))
    need = int((max(use.total + use.pools for use in uses) + OVERHEAD) / ROOM_FOR_POOLS)
    large, small = replace(GPU, memory=need + 2), replace(GPU, memory=need - 2)
    assert decide(plan, [opened(large)] * 4).graphs == "on"
    assert decide(plan, [opened(large)] * 3 + [opened(small)]).graphs == NO_GRAPHS_ROOM
    assert decide(plan, [opened(large)] * 3 + [opened(LocalFacts())]).graphs == NO_GRAPHS_GPU


def test_no_graphs_of_layers_that_hide_their_launches(monkeypatch):
    """FLOPs by hand: q, k, v, o and three matrices of the MLP, two for each weight, and scores and their sums over half
    the tokens. A rank of tp or cp has its part of them."""
    run = base_run("llama")
    m, t = run.model, run.train
    heads, width, keys = m.num_attention_heads, m.hidden_size, m.num_key_value_heads * m.head_dim
    weights = 2 * width * (heads * m.head_dim + keys) + 3 * width * m.intermediate_size
    layers = m.num_hidden_layers * (2 * weights + 2 * heads * m.head_dim * t.seq_length)
    flops = t.micro_batch * t.seq_length * (layers + 2 * width * m.vocab_size) / (m.num_hidden_layers + 2)
    for layout, share in (({}, 1), ({"tp": 2}, 2), ({"cp": 2}, 2)):
        plan = make_plan(replace(run, layout=LayoutConfig(**layout)), share)
        assert layer_flops(plan) == pytest.approx(flops / share)
        monkeypatch.setattr("phalanx.engine.agree.LONG_LAYER", flops / share * 0.999)
        assert decide(plan, [opened(GPU)] * share).graphs == NO_GRAPHS_LONG
        asked = replace(plan, run=replace(plan.run, train=replace(plan.run.train, cuda_graphs="on")))
        assert decide(asked, [opened(GPU)] * share).graphs == "on"
        monkeypatch.setattr("phalanx.engine.agree.LONG_LAYER", flops / share * 1.001)
        assert decide(plan, [opened(GPU)] * share).graphs == "on"


def test_activations_on_the_host_end_graphs():
    """Whatever else ends them, it is named: `on` is refused with it. The forecast has no pools for graphs then."""
    run = base_run("mixtral", offload_layers=1)
    plan = make_plan(replace(run, layout=LayoutConfig(pp=2, ep=2, dispatch="alltoall")), 4)
    assert decide(plan, [opened(GPU)] * 4).graphs == NO_GRAPHS_OFFLOAD
    uses, _ = rank_uses(plan, plan.num_micro_batches(run.train.global_batch))
    assert not any(use.pools for use in uses) and any(use.host for use in uses)


def test_models_that_read_images_are_not_captured():
    """How many rows images have changes from micro-batch to micro-batch; `on` is refused by the config's rules."""
    assert decide(make_plan(base_run("llava"), 1), [opened(GPU)]).graphs == NO_GRAPHS_UNITS


def test_kernels_are_those_that_run_everywhere():
    """With Triton missing on one machine its kernels run nowhere, and experts that then count rows on the host end
    graphs everywhere."""
    plan = moe_plan(dispatch="allgather")
    without, bare = replace(GPU, triton=False), replace(GPU, no_optional_kernels=("attention",))
    every = {
        name: [opened(f, experts=ON) for f in facts]
        for name, facts in {
            "alike": [GPU] * 8,
            "no triton": [GPU] * 7 + [without],
            "no wheel": [bare] + [GPU] * 7,
        }.items()
    }
    alike = decide(plan, every["alike"])
    assert alike.plan.ops == plan.ops and alike.graphs == "on" and alike.plan.kernels.triton
    assert plan.kernels.triton is None
    mixed = decide(plan, every["no triton"])
    assert (
        mixed.plan.kernels.mode == "plain"
        and not mixed.plan.kernels.triton
        and mixed.graphs == NO_GRAPHS_ROWS
        and mixed.plan.uncaptured == {"experts"}
    )
    assert decide(plan, every["no wheel"]).plan.kernels.mode == "triton" and plan.run.train.kernels == "auto"
    asked = replace(plan, kernels=replace(plan.kernels, mode="plain"))
    assert decide(asked, every["no wheel"]).plan.ops == asked.ops


def test_differences_of_machines_are_one_warning_each():
    other = replace(GPU, device="NVIDIA H100", driver="570.1", nccl="2.26.2")
    agreed = decide(make_plan(base_run("llama"), 8), [opened(GPU)] * 5 + [opened(other)] + [opened(GPU)] * 2)
    assert [text for text in agreed.warnings if "ranks 0-4, 6-7: NVIDIA H200; rank 5: NVIDIA H100" in text]
    assert len(agreed.warnings) == 3 and any(
        "ranks 0-4, 6-7: 580.65.06; rank 5: 570.1" in text for text in agreed.warnings
    )
    assert decide(make_plan(base_run("llama"), 8), [opened(GPU)] * 8).warnings == ()


def test_facts_travel_as_text():
    facts = opened(GPU, experts=ON)
    assert LocalFacts(**{**json.loads(json.dumps(asdict(facts))), "no_optional_kernels": ()}) == facts


# ---- real ranks


class SharingMesh(Mesh):
    """Shares memory on CPUs as on GPUs: wherever it can be had, unasked."""

    def wants_memory(self, mode):
        return mode != "off"


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def unlike(reason: str, rank: int):
    """What ranks 4 to 7 find: two hosts, or no room for files in memory on their machine."""
    if rank < 4:
        return ExitStack()
    if reason == "hosts":
        return mock.patch("socket.gethostname", lambda: f"host-{rank % 2}")
    if reason == "folder":
        return mock.patch.object(symmetric, "FOLDER", os.path.join(tempfile.gettempdir(), "there-is-no-such-folder"))
    return mock.patch("os.posix_fallocate", full)


def two_groups(rank: int, world: int, run, reason: str) -> tuple:
    """Two steps; one group of ep cannot share memory."""
    plan = make_plan(run, world)
    with unlike(reason, rank):
        state = build(plan, SharingMesh(plan.grid, rank))
    random_weights(state.model)
    state.buffers.publish()
    state.model.train()
    losses = []
    for step in range(2):
        tokens = accumulate(state, step_batches(run, state.mesh, step, False))
        losses.append(update(state, tokens, 1e-2).loss.item())
    return losses, state.plan.experts.dispatch, choices(state)


@pytest.mark.trust(
    3,
    "Two groups of ep=4, of which one shares no memory, with the default dispatch: all 8 ranks hung",
    "all ranks take all-to-all, and the run says why",
)
@pytest.mark.parametrize("reason", ["hosts", "folder", "room"])
def test_two_groups_that_differ_train(ranks, reason):
    """expert_room is so small that every step asks whether rows lack room: only some ranks asked, and waited for the
    others for ever."""
    run = base_run("mixtral")
    found = ranks.run(
        "tests.engine.test_decide:two_groups", 8, replace(run, layout=LayoutConfig(ep=4, expert_room=0.3)), reason
    )
    [alone] = ranks.run("tests.engine.test_decide:two_groups", 1, run, reason)
    assert {dispatch for _, dispatch, _ in found} == {"alltoall"}
    for losses, _, said in found:
        assert losses == pytest.approx(alone[0], rel=1e-9)
        assert "no push: " in said and "ranks 4-7" in said


def refused(rank: int, world: int, reason: str) -> str:
    plan = make_plan(replace(base_run("mixtral"), layout=LayoutConfig(ep=4, dispatch="push")), world)
    with unlike(reason, rank), pytest.raises(ConfigError) as caught:
        build(plan, Mesh(plan.grid, rank))
    return str(caught.value)


def test_push_by_name_is_refused_on_all_ranks(ranks):
    for text in ranks.run("tests.engine.test_decide:refused", 8, "hosts"):
        assert (
            "layout.dispatch='push'" in text
            and "the ranks are on 2 hosts (ranks 4-7)" in text
            and "auto, allgather, alltoall" in text
        )


# ---- contexts


def broken_off(state, name: str) -> None:
    """An error passes through a context; what it changes is as before."""
    recorder = Recorder(state, 1, mock.Mock(rank=0))
    contexts = {
        "all-to-all": state.model.by_all_to_all,
        "shadow": lambda: aside(state),
        "in full precision": state.model.fp8.without,
        "measuring": state.model.fp8.measuring,
        "recording": lambda: recorder.around(6, None),
        "before what is recorded": lambda: recorder.around(5, None),
    }

    def seen() -> tuple:
        lows = [(low.on, low.current) for low, _ in state.model.fp8.here]
        return (
            state.model.stages.runner,
            [layer.dispatch for layer in state.model.routed],
            lows,
            recorder._recording,
            list(state.model.handlers.values()),
        )

    before = seen()
    with pytest.raises(KeyError, match="passes"), contexts[name]():
        assert seen() != before
        raise KeyError("passes")
    assert seen() == before
    assert not torch.autograd._profiler_enabled()


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    run = base_run("mixtral")
    fp8 = Fp8Config(recipe="delayed", history=4, shadow_interval=2)
    train = replace(run.train, precision="bf16", fp8=fp8, steps=20, seq_length=run.train.seq_length)
    model = replace(run.model, hidden_size=32, intermediate_size=32)
    run = replace(
        run,
        model=model,
        train=train,
        layout=LayoutConfig(dispatch="allgather"),
        dir=str(tmp_path_factory.mktemp("run")),
        log=replace(run.log, budget=True),
    )
    return build(make_plan(run, 1), Mesh(Grid()))


@pytest.mark.trust(
    6,
    "An error inside a shadow step, a retry of experts or a recording left their switches set",
    "each is put back, whatever passes through",
)
@pytest.mark.parametrize(
    "name", ["all-to-all", "shadow", "in full precision", "measuring", "recording", "before what is recorded"]
)
def test_contexts_are_left_as_they_were_found(state, name):
    broken_off(state, name)
