"""AdamW against torch's, learning rates against closed forms and transformers', loss scaling against a plain model,
clipping."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, train_step
from phalanx.forecast.decide import make_plan
from phalanx.layout.box import Box
from phalanx.layout.buckets import Bucket, make_buckets
from phalanx.layout.grid import Grid
from phalanx.layout.param import ParamSpec, Piece
from phalanx.nn.initial import ZEROS
from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange, adamw_, adamw_reference_
from phalanx.ops.optimizer.shard import Shard, zero_state
from phalanx.optim import sharded
from phalanx.optim.adamw import AdamW, AdamWConfig
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import StepScalars
from phalanx.optim.scaler import LossScaler
from phalanx.optim.schedules import learning_rate
from phalanx.optim.sharded import ShardedOptimizer, group_ranges, moment_dtype, update_in_chunks
from tests.harness.parity import base_run, random_weights, sample_batch

SHAPES = {"embed.weight": (13, 5), "norm.weight": (5,), "up.weight": (7, 5), "up.bias": (7,), "down.weight": (5, 7)}
CONFIG = AdamWConfig(
    lr=1.0, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.3, lr_scale={"embed*": 0.1, "*.bias": 2.0, "*": 1.0}
)
CPU = torch.device("cpu")


def one_bucket(shards: int) -> Bucket:
    specs = []
    for name, shape in SHAPES.items():
        whole = tuple(slice(0, n) for n in shape)
        specs.append(
            (
                ParamSpec(shape, (Piece(name, shape, Box.full(shape), whole, ZEROS, len(shape) > 1),)),
                frozenset({(0, 0)}),
            )
        )
    (bucket,) = make_buckets(specs, Grid(dp=shards))
    return bucket


def make_shards(bucket: Bucket, count: int, values: torch.Tensor) -> list[Shard]:
    made = []
    for i in range(count):
        lo, hi = bucket.shard(i, count)
        made.append(
            Shard(
                bucket,
                lo,
                hi,
                (lo, hi),
                values[lo:hi].clone(),
                torch.zeros(hi - lo, dtype=values.dtype),
                {name: torch.zeros(hi - lo, dtype=values.dtype) for name in AdamW.state},
            )
        )
    return made


@pytest.mark.parametrize("count", [1, 2, 3])
def test_adamw_equals_torch(count):
    """Truth: torch.optim.AdamW in float64, one parameter group per (decay, rate), over steps of changing rate; in
    shards too."""
    bucket, generator = one_bucket(count), torch.Generator().manual_seed(0)
    values = torch.randn(bucket.numel, dtype=torch.float64, generator=generator)
    shards = make_shards(bucket, count, values)
    ours = ShardedOptimizer([(AdamW(CONFIG), shards)], CPU)
    theirs = {s.spec.name: values[s.offset : s.offset + s.numel].clone().requires_grad_() for s in bucket.slots}
    scales = {name: 0.1 if "embed" in name else 2.0 if "bias" in name else 1.0 for name in SHAPES}
    groups = [
        {"params": [p], "weight_decay": 0.3 if len(SHAPES[n]) > 1 else 0.0, "scale": scales[n]}
        for n, p in theirs.items()
    ]
    peer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-3, foreach=False, fused=False)
    for step in range(5):
        lr, grad = 0.1 / (step + 1), torch.randn(bucket.numel, dtype=torch.float64, generator=generator)
        for s in shards:
            s.grad.copy_(grad[s.lo : s.hi])
        for group in peer.param_groups:
            group["lr"] = lr * group["scale"]
        for s in bucket.slots:
            theirs[s.spec.name].grad = grad[s.offset : s.offset + s.numel].clone()
        ours.update(lr, torch.tensor(0.0))
        peer.step()
    whole = torch.cat([s.master for s in shards])
    for s in bucket.slots:
        torch.testing.assert_close(
            whole[s.offset : s.offset + s.numel], theirs[s.spec.name].detach(), rtol=1e-12, atol=1e-13
        )
    assert ours.step == 5


def test_groups_cover_every_element_once():
    """Runs of a shard follow each other without a gap, and each tensor's elements are in its own group."""
    bucket = one_bucket(2)
    for shards in (1, 2):
        for lo, hi in (bucket.shard(i, shards) for i in range(shards)):
            runs = group_ranges(bucket, lo, hi, CONFIG)
            assert [a for a, *_ in runs] + [hi] == [lo] + [b for _, b, _ in runs]
    groups = {e: g for a, b, g in group_ranges(bucket, 0, bucket.numel, CONFIG) for e in range(a, b)}
    for s in bucket.slots:
        decay = 0.3 if len(s.spec.shape) > 1 else 0.0
        scale = {"embed.weight": 0.1, "up.bias": 2.0}.get(s.spec.name, 1.0)
        assert {groups[e] for e in range(s.offset, s.offset + s.numel)} == {(decay, scale)}


def tensors(dtype: torch.dtype, seed: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    p, g, m, v = (
        [torch.randn(n, dtype=torch.float64, generator=generator).to(dtype) for n in (1, 7, 300)] for _ in range(4)
    )
    return [p, g, m, [x.abs() for x in v]]


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_adamw_equals_its_slow_twin(dtype, rtol, step):
    """Gradients scaled by 0.3 on the way; the weights' copy in bf16 is the rounded master; gradients end at zero."""
    options = (torch.tensor(float(step)), AdamOptions(0.01, 0.9, 0.95, 1e-8, 0.1), torch.tensor(0.3), torch.tensor(0.0))
    found = []
    for update in (adamw_, adamw_reference_):
        parts = [AdamRange(*ts, torch.zeros(len(ts[0]), dtype=torch.bfloat16)) for ts in zip(*tensors(dtype, step))]
        update(parts, *options)
        assert all(torch.equal(p.out, p.master.bfloat16()) and (p.grad == 0).all() for p in parts)
        found.append([(p.master, p.m, p.v) for p in parts])
    torch.testing.assert_close(*found, rtol=rtol, atol=rtol)
    adamw_([], *options)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_update_changes_no_bit(bad):
    """Masters, moments and the count of steps stay; the next good step is the one that would have come."""
    bucket, generator = one_bucket(1), torch.Generator().manual_seed(0)
    values = torch.randn(bucket.numel, generator=generator)
    grads = [torch.randn(bucket.numel, generator=generator) for _ in range(2)]
    found = []
    for skipping in (False, True):
        (shard,) = make_shards(bucket, 1, values)
        optimizer = ShardedOptimizer([(AdamW(CONFIG), [shard])], CPU)
        shard.grad.copy_(grads[0])
        optimizer.update(0.1, torch.tensor(0.0))
        if skipping:
            before = [t.clone() for t in (shard.master, *shard.state.values(), optimizer.step)]
            shard.grad.fill_(bad)
            optimizer.update(0.1, torch.tensor(1.0))
            assert all(torch.equal(a, b) for a, b in zip(before, (shard.master, *shard.state.values(), optimizer.step)))
        shard.grad.copy_(grads[1])
        optimizer.update(0.1, torch.tensor(0.0))
        found.append((shard.master, *shard.state.values(), optimizer.step))
    assert all(torch.equal(a, b) for a, b in zip(*found))


# learning rates

WARMUP, TOTAL, DECAY = 10, 50, 15


def their_schedule(name: str, optimizer):
    import transformers as t

    return {
        "constant": lambda: t.get_constant_schedule_with_warmup(optimizer, WARMUP),
        "linear": lambda: t.get_linear_schedule_with_warmup(optimizer, WARMUP, TOTAL),
        "cosine": lambda: t.get_cosine_schedule_with_warmup(optimizer, WARMUP, TOTAL),
        "cosine to min_lr": lambda: t.get_cosine_with_min_lr_schedule_with_warmup(optimizer, WARMUP, TOTAL, min_lr=0.2),
        "inverse_sqrt": lambda: t.get_inverse_sqrt_schedule(optimizer, WARMUP),
        "wsd": lambda: t.get_wsd_schedule(
            optimizer,
            WARMUP,
            DECAY,
            num_training_steps=TOTAL,
            warmup_type="linear",
            decay_type="linear",
            min_lr_ratio=0.1,
        ),
    }[name]()


OURS = {
    "constant": dict(schedule="constant"),
    "linear": dict(schedule="linear"),
    "cosine": dict(schedule="cosine"),
    "cosine to min_lr": dict(schedule="cosine", min_lr=0.2),
    "inverse_sqrt": dict(schedule="inverse_sqrt"),
    "wsd": dict(schedule="wsd", min_lr=0.2, wsd_decay_steps=DECAY),
}


@pytest.mark.parametrize("name", OURS)
def test_schedules_equal_transformers(name):
    """Truth: transformers' multiplier of scheduler step s is our rate of step s (theirs wastes its first step on
    rate 0)."""
    config = OptimConfig(lr=2.0, warmup_steps=WARMUP, **OURS[name])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = their_schedule(name, optimizer)
    for step in range(1, TOTAL + 10):
        optimizer.step()
        theirs.step()
        after_the_end = step > TOTAL and "cosine" in name  # theirs comes up again
        warm_up = step < WARMUP and name == "wsd"  # theirs starts from min_lr
        if not (after_the_end or warm_up):
            assert learning_rate(config, step, TOTAL) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-15), (
                step
            )


@pytest.mark.parametrize("decay_steps", [None, 40])
def test_schedules_at_their_corners(decay_steps):
    """Truth: closed forms. Full rate at the last warm-up step, half-way down in the middle, min_lr at decay_steps
    and after."""
    end = decay_steps or TOTAL
    for schedule in ("linear", "cosine", "wsd"):
        c = OptimConfig(lr=3.0, min_lr=1.0, warmup_steps=WARMUP, schedule=schedule, decay_steps=decay_steps)
        rate = lambda step, c=c: learning_rate(c, step, TOTAL)  # noqa: E731
        assert [rate(1), rate(5), rate(WARMUP)] == pytest.approx([0.3, 1.5, 3.0])
        assert rate(WARMUP + 1) <= 3.0 and rate(end) == pytest.approx(1.0) and rate(end + 7) == pytest.approx(1.0)
        middle = (WARMUP + end) // 2 if schedule != "wsd" else end - end // 20
        assert rate(middle) == pytest.approx(
            2.0 if schedule != "wsd" else 3.0 - 2.0 * (end // 10 - end // 20) / (end // 10)
        )
        assert all(rate(s) >= rate(s + 1) for s in range(WARMUP, TOTAL))
        if schedule == "wsd":
            assert rate(end - end // 10) == 3.0 > rate(end - end // 10 + 1)
    c = OptimConfig(lr=3.0, min_lr=1.0, warmup_steps=4, schedule="inverse_sqrt")
    assert [learning_rate(c, s, 99) for s in (4, 16, 36, 10**6)] == pytest.approx([3.0, 1.5, 1.0, 1.0])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd", "inverse_sqrt"])
def test_schedules_without_warmup(schedule):
    c = OptimConfig(lr=3.0, schedule=schedule)
    rates = [learning_rate(c, s, 5) for s in range(1, 7)]
    assert all(math.isfinite(r) and 0 <= r <= 3.0 for r in rates) and rates[0] > 0


# loss scaling


class PlainScaler:
    """The rules in words: `hysteresis` overflows halve the scale (not below the minimum), `window` good steps in a
    row double it."""

    def __init__(self, scale: float, window: int, hysteresis: int, minimum: float):
        self.scale, self.window, self.hysteresis, self.minimum = scale, window, hysteresis, minimum
        self.good, self.overflows = 0, 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good, self.overflows = 0, self.overflows + 1
            if self.overflows == self.hysteresis:
                self.scale, self.overflows = max(self.scale / 2, self.minimum), 0
        else:
            self.good += 1
            if self.good == self.window:
                self.scale, self.good, self.overflows = self.scale * 2, 0, 0


@pytest.mark.parametrize("number", range(20))
def test_loss_scaler_follows_its_rules(number):
    """Truth: the plain model above over random sequences of overflows."""
    pick = random.Random(number)
    options = (2.0 ** pick.randint(0, 8), pick.randint(1, 6), pick.randint(1, 4), pick.choice([1.0, 4.0, 0.25]))
    ours, plain, share = LossScaler(CPU, *options, dynamic=True), PlainScaler(*options), pick.random()
    for _ in range(100):
        overflow = pick.random() < share
        ours.update(torch.tensor(float(overflow)))
        plain.update(overflow)
        assert ours.scale.item() == plain.scale


def test_static_loss_scale_never_changes():
    scaler = LossScaler(CPU, 1.0)
    for bad in (1.0, 1.0, 0.0, 1.0):
        scaler.update(torch.tensor(bad))
    assert scaler.scale == 1.0


# clipping


@pytest.mark.parametrize("share", [0.25, 4.0, 0.0])
def test_clipping(share):
    """Truth: torch's clip_grad_norm_ on the global gradient. `share`: clip_grad / norm; 0 turns clipping off."""

    def one_step(clip: float):
        run = base_run("llama", global_batch=2)
        plan = make_plan(replace(run, optim=OptimConfig(clip_grad=clip)), 1)
        state = build(plan, Mesh(Grid()))
        random_weights(state.model)
        state.model.train()
        batches = [sample_batch([1], False), sample_batch([2], False)]
        accumulate(state, batches)
        grads = torch.cat([f.grad.clone() for f in state.buffers.flat])
        state.buffers.zero_grads()
        norm = train_step(state, batches, lr=0.1).grad_norm
        return (
            grads,
            norm,
            torch.cat([s.state["m"] / (1 - state.optimizer.config.beta1) for s in state.optimizer.shards]),
        )

    grads, norm, _ = one_step(0.0)
    assert norm.item() == pytest.approx(grads.norm().item(), rel=1e-12)
    expected = torch.nn.Parameter(torch.zeros_like(grads))
    expected.grad = grads.clone()
    if share:
        torch.nn.utils.clip_grad_norm_([expected], share * norm.item())
    _, norm_again, used = one_step(share * norm.item())
    assert norm_again == norm  # the norm told is the one before clipping
    torch.testing.assert_close(used, expected.grad, rtol=1e-12, atol=1e-15)


# moments in bf16


@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_moments_in_bf16(kernels):
    """Truth: the reference, and of the first step the formula: m and v are those in fp32 rounded to bf16, the master
    is as in fp32."""
    drawn = [torch.randn(3000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    options = AdamOptions(0.01, 0.9, 0.95, 1e-8, 0.1)

    def parts(narrow: bool) -> list[AdamRange]:
        kept = torch.bfloat16 if narrow else torch.float32
        return [
            AdamRange(drawn[0].clone(), drawn[1].clone(), torch.zeros(3000, dtype=kept), torch.zeros(3000, dtype=kept))
        ]

    found, slow, wide = parts(True), parts(True), parts(False)
    for number in (1.0, 2.0, 3.0):
        updates = (lambda *a: adamw_(*a, kernels=kernels), adamw_reference_, lambda *a: adamw_(*a, kernels="plain"))
        for made, update in zip((found, slow, wide), updates):
            made[0].grad.copy_(drawn[int(number)])
            update(made, torch.tensor(number), options, torch.tensor(1.0), torch.tensor(0.0))
        if number == 1.0 and kernels == "plain":  # the interpreter cuts fp32 to bf16, a GPU rounds
            assert torch.equal(found[0].m, wide[0].m.bfloat16()) and torch.equal(found[0].v, wide[0].v.bfloat16())
    assert found[0].m.dtype == found[0].v.dtype == torch.bfloat16
    rounding = 2**-7 if kernels == "triton" else 1e-6
    for name in ("m", "v"):
        a, b = getattr(found[0], name).float(), getattr(slow[0], name).float()
        assert (a - b).abs().max() <= 2 * rounding * b.abs().max() + 2**-8 * b.abs().max() * (kernels == "plain")
    torch.testing.assert_close(found[0].master, slow[0].master, rtol=0, atol=1e-3 if kernels == "triton" else 1e-4)
    assert 0 < (found[0].master - wide[0].master).abs().max() < 1e-3
    before = [t.clone() for t in (found[0].master, found[0].m, found[0].v)]
    adamw_(found, torch.tensor(3.0), options, torch.tensor(1.0), torch.tensor(1.0), kernels=kernels)
    assert all(torch.equal(a, b) for a, b in zip(before, (found[0].master, found[0].m, found[0].v)))


# an optimizer's own update


@pytest.mark.parametrize("moments", ["master", "bf16", "fp8", "8bit"])
def test_the_update_of_adamw_is_its_fused_one(moments, monkeypatch):
    """What FusedOptimizer promises: `update` on chunks of working copies does what `update_ranges` does in place.
    Moments are rounded alike but for the last bit before it, which decides what is rounded up."""
    bucket, generator = one_bucket(1), torch.Generator().manual_seed(0)
    values = torch.randn(bucket.numel, dtype=torch.float64, generator=generator)
    config = replace(CONFIG, moments=moments, beta1=0.5, beta2=0.5)
    grads = [torch.randn(bucket.numel, dtype=torch.float64, generator=generator) for _ in range(3)]
    found = []
    for chunk in (None, 64, 1 << 22):
        (shard,) = make_shards(bucket, 1, values)
        shard.state = zero_state(AdamW.state, shard.master, moment_dtype(config))
        optimizer = ShardedOptimizer([(AdamW(config), [shard])], CPU)
        for number, grad in enumerate(grads):
            shard.grad.copy_(grad)
            skip, factor = torch.tensor(float(number == 1)), torch.tensor(0.3)
            if chunk is None:
                optimizer.update(0.1, skip, factor)
            else:
                monkeypatch.setattr(sharded, "CHUNK", chunk)
                optimizer.step.add_(1.0 - skip)
                for (decay, scale), ranges in optimizer.rules[0].groups.items():
                    scalars = StepScalars(optimizer.step, factor, skip)
                    update_in_chunks(optimizer.rules[0].optimizer, ranges, 0.1 * scale, decay, scalars)
            assert not shard.grad.any()
        found.append([shard.master, *(shard.values(kind).double() for kind in AdamW.state)])
    rounding = {"master": 1e-12, "bf16": 2**-7, "fp8": 2**-3, "8bit": 2**-6}[moments]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=rounding, atol=rounding / 10)
