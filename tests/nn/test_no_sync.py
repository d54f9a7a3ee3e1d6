"""Nothing in a micro-batch copies from the host or waits for the device: such a call would stall a GPU and break
CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.comm.axis import ModelAxes
from phalanx.comm.dry import DryAxis
from phalanx.config.device_check import Facts
from phalanx.forecast.check import check
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import DryBlock, FusedAttention
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.nn.env import Env, OpChoices, WeightRules
from phalanx.nn.recompute import PRESETS
from phalanx.nn.relative_bias import RelativeBiasTable
from phalanx.nn.run_block import run_block
from phalanx.ops.attention.relative_bias import thresholds
from phalanx.planning.blocks import make_blocks, num_blocks
from phalanx.sequence.batch import Batch
from phalanx.sequence.streams import hidden
from phalanx.sequence.units import meta_units
from tests.harness.parity import MODELS, SEQ, base_run


class NoHost(TorchDispatchMode):
    """Fails on any operation that has a CPU tensor beside tensors of the device (a copy, or an upload), or reads a
    value."""

    READS = ("_local_scalar_dense", "nonzero", "item", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        out = func(*args, **(kwargs or {}))
        tensors += [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        kinds = {t.device.type for t in tensors if t.numel()}
        name = func.overloadpacket.__name__
        if "cpu" in kinds or name in self.READS:
            raise AssertionError(f"{func} on {kinds}")
        return out


class NoLists(TorchFunctionMode):
    """Fails on Python numbers that become a tensor: on a GPU they are copied there, which no graph captures. No
    operation on the meta device shows it."""

    MADE = (torch.tensor, torch.as_tensor, Tensor.new_tensor)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        index = args[1] if func in (Tensor.__getitem__, Tensor.__setitem__) else ()
        if func in self.MADE or any(isinstance(i, list) for i in (index if isinstance(index, tuple) else (index,))):
            raise AssertionError(f"{func.__name__} of {args}")
        return func(*args, **(kwargs or {}))


RECOMPUTE = ["none", "pointwise", "selective", "full"]
# Each model with one way to recompute, which take turns, every second with documents; the others in `make soak`.
CASES = [
    pytest.param(model, recompute, documents, marks=[] if (r, documents) == (m % 4, m // 4 % 2) else [pytest.mark.soak])
    for m, model in enumerate(MODELS)
    for r, recompute in enumerate(RECOMPUTE)
    for documents in (False, True)
]


@pytest.mark.parametrize("model, recompute, documents", CASES)
def test_a_micro_batch_needs_nothing_from_the_host(model, recompute, documents):
    """The model's blocks, forward and backward, on the meta device, after a first time in which constants may move
    there."""
    needs_nothing(MODELS[model], Env(weights=WeightRules(dtype=torch.float32)), documents, recompute)


@pytest.mark.parametrize("model", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("dispatch, recompute", [("allgather", "none"), ("push", "none"), ("push", "full")])
def test_experts_elsewhere_need_nothing_from_the_host(model, dispatch, recompute):
    """Over axes that only count: the host learns no number of tokens."""
    axes = ModelAxes(ep=DryAxis("ep", 4), experts=DryAxis("ep x etp", 4))
    needs_nothing(
        MODELS[model], Env(grid=Grid(dp=4, ep=4), axes=axes, ops=OpChoices(dispatch=dispatch)), False, recompute
    )
    assert axes.experts.sent["push" if dispatch == "push" else "reduce_scatter"] > 0


def needs_nothing(config, env: Env, documents: bool, recompute: str) -> None:
    blocks = make_blocks(config, env, range(num_blocks(config)))
    for block in blocks:
        block.recomputed = frozenset(PRESETS[recompute])
        for module in block.modules():
            if getattr(module, "rotary", None) is not None:
                module.rotary.frequencies(SEQ, torch.device("meta"))
                module.rotary.axes(torch.device("meta"))
            table = getattr(module, "table", None)
            if isinstance(table, RelativeBiasTable):
                thresholds(table.bias)
        for p in block.parameters():
            p.grad = torch.empty_like(p)
    ids = torch.empty(2 * SEQ, dtype=torch.int64, device="meta")
    batch = Batch(ids, ids, ids, ids, 2, SEQ, ids if documents else None, loss_seed=torch.empty((), device="meta"))
    beside = {name: replace(batch, loss_seed=None) for name in config.reads_beside}
    units = {stream.name: meta_units(stream, 4 * stream.largest) for stream in config.reads_units}
    for stream in config.numbers_beside:
        values = torch.empty(2 * SEQ, stream.width, device="meta")
        beside[stream.name] = replace(beside[stream.name], values=values)
    batch = replace(batch, beside=beside | units)
    with NoHost(), NoLists():
        x = torch.empty(0, device="meta")
        for block in blocks:
            x = run_block(block, x, replace(batch))
        hidden(x).backward()


@pytest.mark.parametrize("model", MODELS)
def test_sequences_over_ranks_need_nothing_from_the_host(model):
    """Each block with cp, its tokens packed: CUDA graphs of it are captured with their exchanges."""
    run = base_run(model, 4)
    run = replace(run, layout=LayoutConfig(cp=2), data=replace(run.data, mock=True, document_attention=True))
    if problems := check(run, Facts(world_size=2, files=False)):
        pytest.skip(str(problems[0]))
    plan = make_plan(run, 2)
    for number in range(len(plan.facts)):
        dry = DryBlock.of(plan, number)
        for p in dry.block.parameters():
            p.grad = torch.empty_like(p)
        with dry.known, FusedAttention():
            dry.forward(dry.new_input())  # constants move
            another = replace(dry, batch=replace(dry.batch, _made={}))
            streams = {name: x.requires_grad_(x.is_floating_point()) for name, x in dry.new_input().items()}
            with NoHost(), NoLists():
                made = [y for y in another.forward(streams) if y.requires_grad]
                torch.autograd.backward(made, [torch.empty_like(y) for y in made])
