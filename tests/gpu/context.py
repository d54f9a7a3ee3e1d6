"""Checks of kernels that attention over ranks is made of: a causal block and a whole one, joined, against float64 on
the same device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from phalanx.ops.attention import backends
from phalanx.ops.attention.context import JOIN, Joint, block_of
from phalanx.ops.attention.flash import FLASH_ATTN, Spans, flash_attention
from phalanx.ops.op import unusable
from phalanx.sequence.shard import SequenceShard
from tests.gpu.truth import ROUNDINGS, within
from tests.ops.test_ops import normal


def joined(name: str, q: torch.Tensor, own: tuple, other: tuple, dout: torch.Tensor) -> list[torch.Tensor]:
    """Output, dq, and dk and dv of own keys (as many as queries, causal) and of other ones (all read by the second
    half of the queries)."""
    backend, scale, half = getattr(backends, name), 1 / math.sqrt(q.shape[-1]), slice(q.shape[2] // 2, None)
    joint = Joint(JOIN.choose("plain" if q.dtype == torch.float64 else "auto", q))
    out, lse, *kept = backend.forward(q, *own, None, True, scale)
    joint.add(slice(None), out, lse, None)
    out, lse, *kept_half = backend.forward(q[:, :, half], *other, None, False, scale)
    joint.add(half, out, lse, None)
    out = joint.out.to(q.dtype)
    dq, *found = backend.backward(dout, q, *own, out, joint.lse, None, True, scale, *kept)
    given = (dout[:, :, half], q[:, :, half], *other, out[:, :, half], joint.lse[:, :, half].contiguous())
    more, *found_other = backend.backward(*given, None, False, scale, *kept_half)
    dq = dq.to(joint.lse.dtype)
    dq[:, :, half] += more
    return [out, dq, *found, *found_other]


def block_check(
    name: str, width: int, value: int, kv_heads: int, length: int, dtype: torch.dtype
) -> Callable[[torch.device], str]:
    def check(device: torch.device) -> str:
        if name == "FLASH_ATTN" and (
            why := "not a GPU" if device.type != "cuda" else unusable(FLASH_ATTN, device.index or 0)
        ):
            return f"not run: {why}"
        shapes = (
            (8, length, width),
            *((kv_heads, n, w) for n in (length, length + 64) for w in (width, value)),
            (8, length, value),
        )
        q, k, v, k2, v2, dout = (normal(2, *shape, seed=i, dtype=dtype).to(device) for i, shape in enumerate(shapes))
        found = joined(name, q, (k, v), (k2, v2), dout)
        exact = [t.double() for t in (q, k, v, k2, v2, dout)]
        truth = joined("PLAIN", exact[0], tuple(exact[1:3]), tuple(exact[3:5]), exact[5])
        return f"{max(within(f'block {i}', a, b.cpu(), 4 * ROUNDINGS[dtype]) for i, (a, b) in enumerate(zip(found, truth))):.1e}"  # noqa: E501

    return check


def segments_check(
    wheel: bool, width: int, value: int, kv_heads: int, dtype: torch.dtype
) -> Callable[[torch.device], str]:
    """Two sequences of 1,024 tokens in documents; then other keys, which some documents lack, and some of which no
    query reads."""
    own, more = ([0, 300, 1, 723, 1000, 24, 0], [760, 64, 0, 200, 0, 24, 1000])

    def masks(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        ids, other = (torch.arange(7).repeat_interleave(torch.tensor(sizes)).view(2, -1) for sizes in (own, more))
        seen = (ids[:, :, None] == ids[:, None]).tril(), ids[:, :, None] == other[:, None]
        return tuple(torch.zeros(s.shape).masked_fill(~s, -math.inf)[:, None].double().to(device) for s in seen)  # type: ignore[return-value]

    def check(device: torch.device) -> str:
        if wheel and (why := unusable(FLASH_ATTN, device.index or 0)):
            return f"not run: {why}"
        n = 1024
        shapes = (
            (8, n, width),
            (kv_heads, n, width),
            (kv_heads, n, value),
            (kv_heads, n, width),
            (kv_heads, n, value),
            (8, n, value),
        )
        q, k, v, k2, v2, dout = (normal(2, *shape, seed=i, dtype=dtype).to(device) for i, shape in enumerate(shapes))
        scale, (first, second), results = 1 / math.sqrt(width), masks(device), []
        blind = torch.isinf(second).all(-1)
        ways = [((segments_backend(own, own, device, wheel), None), (segments_backend(own, more, device, wheel), None))]
        ways.append(((backends.PLAIN, first), (backends.PLAIN, second)))
        for (a, mask_a), (b, mask_b) in ways:
            if a is backends.PLAIN:
                q, k, v, k2, v2, dout = (t.double() for t in (q, k, v, k2, v2, dout))
            joint = Joint(JOIN.choose("plain" if q.dtype == torch.float64 else "triton", q))
            out, lse, *kept = a.forward(q, k, v, mask_a, mask_a is None, scale)
            joint.add(slice(None), out, lse, None)
            out, lse, *kept_b = b.forward(q, k2, v2, mask_b, False, scale)
            joint.add(slice(0, n), out, lse, blind)
            out = joint.out.to(q.dtype)
            dq, dk, dv = a.backward(dout, q, k, v, out, joint.lse, mask_a, mask_a is None, scale, *kept)
            more_q, dk2, dv2 = b.backward(dout, q, k2, v2, out, joint.lse, mask_b, False, scale, *kept_b)
            results.append([out, dq.to(joint.lse.dtype) + more_q, dk, dv, dk2, dv2])
        pairs = enumerate(zip(*results))
        return f"{max(within(f'segments {i}', a, b.cpu(), 4 * ROUNDINGS[dtype]) for i, (a, b) in pairs):.1e}"

    return check


def one_token_check(device: torch.device) -> str:
    """A sequence of one token in a batch with room for 64 documents: it reads itself, so the output is its value."""
    q, k, v = (
        normal(1, heads, 1, 128, seed=heads, dtype=torch.bfloat16).to(device).requires_grad_() for heads in (8, 2, 2)
    )
    offsets = torch.ones(65, dtype=torch.int32, device=device)
    offsets[0] = 0
    out = flash_attention(q, k, v, Spans(offsets, 1, False), flash_attn=False)
    out.sum().backward()
    truth = v.detach().repeat_interleave(4, 1).flatten()
    if not (torch.equal(out.flatten(), truth) and torch.equal(v.grad, torch.full_like(v, 4)) and not q.grad.any()):
        raise AssertionError("a token alone does not read itself")
    return "to the bit"


def few_tokens_check(device: torch.device) -> str:
    """A document of 5 tokens on two ranks: kernels for blocks of one or two queries and keys, which few documents
    have."""
    parts, results = SequenceShard.of_sizes([3, 2]).all, []
    shapes = [(heads, 5, 128) for heads in (8, 2, 2, 8)]
    given = [normal(1, *shape, seed=i, dtype=torch.bfloat16).to(device) for i, shape in enumerate(shapes)]
    for name, tensors in (("FLASH", given), ("PLAIN", [t.double() for t in given])):
        q, k, v, dout = tensors
        backend, scale, found = getattr(backends, name), 1 / math.sqrt(128), []
        for mine in parts:
            joint, rows = Joint(JOIN.choose("auto" if name == "FLASH" else "plain", q)), _places(mine)
            for theirs in (mine, *(p for p in parts if p != mine)):
                block = block_of(mine, theirs, 5, None, False)
                if block is not None:
                    queries, keys = rows[block.queries], _places(theirs)[block.keys]
                    read = (q[:, :, queries], k[:, :, keys], v[:, :, keys])
                    out, lse, *kept = backend.forward(*read, None, block.how == "causal", scale)
                    joint.add(block.queries, out, lse, None)
                    back = backend.backward(
                        dout[:, :, queries], *read, out, lse.contiguous(), None, block.how == "causal", scale, *kept
                    )
                    found += [
                        t.double() for t in back[0 if len(keys) > 1 else 2 :]
                    ]  # of one key alone dq and dk are zero but for rounding
            found.append(joint.out.double())
        results.append(found)
    worst = max(
        within(f"tensor {i}", a, b.cpu(), 4 * ROUNDINGS[torch.bfloat16]) for i, (a, b) in enumerate(zip(*results))
    )
    return f"{worst:.1e}"


def _places(part: SequenceShard) -> list[int]:
    return [place for run in part.runs(5) for place in run]


def segments_backend(own: list[int], other: list[int], device: torch.device, wheel: bool) -> backends.Backend:
    ends = [torch.tensor([0, *sizes]).cumsum(0).int().to(device) for sizes in (own, other)]
    return backends.segments_backend(backends.Segments(*ends, 1024, 1024 if own is other else 2048), wheel)


def context_checks() -> dict[str, Callable[[torch.device], str]]:
    found = {}
    for name in ("FLASH", "CUDNN", "FLASH_ATTN", "EFFICIENT"):
        for width, value, kv_heads in ((128, 128, 2), (64, 64, 8)):
            found[f"block of attention {name}, {kv_heads} kv heads of {width}"] = block_check(
                name, width, value, kv_heads, 1024, torch.bfloat16
            )
    found["block of attention EFFICIENT, fp32"] = block_check("EFFICIENT", 64, 64, 2, 1000, torch.float32)
    found["block of attention EFFICIENT, 192 and 128"] = block_check("EFFICIENT", 192, 128, 8, 1024, torch.bfloat16)
    found["block of attention FLASH_ATTN, 192 and 128"] = block_check("FLASH_ATTN", 192, 128, 8, 1024, torch.bfloat16)
    found["documents of a block, one token, room for many"] = one_token_check
    found["blocks of one or two tokens"] = few_tokens_check
    for wheel, width, value, kv_heads in (
        (False, 128, 128, 2),
        (False, 64, 64, 8),
        (False, 192, 128, 8),
        (True, 128, 128, 2),
        (True, 192, 128, 8),
    ):
        name = (
            f"documents of a block, {'flash-attn-4' if wheel else 'torch'}, {kv_heads} kv heads of {width} and {value}"
        )
        found[name] = segments_check(wheel, width, value, kv_heads, torch.bfloat16)
    return found
