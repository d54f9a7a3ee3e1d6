"""Checks of the smallest documents and blocks of attention. What is larger: the cases of its ops."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from phalanx.ops.attention import backends
from phalanx.ops.attention.context import JOIN, Joint, block_of
from phalanx.ops.attention.flash import ByTorchFlash
from phalanx.ops.attention.kind import CAUSAL, NOTHING
from phalanx.sequence.batch import Batch
from phalanx.sequence.shard import SequenceShard
from tests.gpu.truth import ROUNDINGS, within
from tests.ops.test_ops import normal


def one_token_check(device: torch.device) -> str:
    """A sequence of one token in a batch with room for 64 documents: it reads itself, so the output is its value."""
    q, k, v = (
        normal(1, heads, 1, 128, seed=heads, dtype=torch.bfloat16).to(device).requires_grad_() for heads in (8, 2, 2)
    )
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    out = ByTorchFlash.attend(q, k, v, Batch(ids, ids, ids, ids, 1, 1, ids, most_documents=64), CAUSAL, NOTHING)
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
                block = block_of(mine, theirs, 5, CAUSAL, False)
                if block is not None:
                    queries, keys = rows[block.queries], _places(theirs)[block.keys]
                    read = (q[:, :, queries], k[:, :, keys], v[:, :, keys])
                    how = backends.Scoring(None, block.how == "causal", scale)
                    out, lse, *kept = backend.forward(*read, how)
                    joint.add(block.queries, out, lse, None)
                    saved = backends.SavedBlock(*read, out, lse.contiguous(), tuple(kept))
                    back = backend.backward(dout[:, :, queries], saved, how)
                    # of one key alone dq and dk are zero but for rounding; there are no learned scores
                    found += [t.double() for t in back[0 if len(keys) > 1 else 2 :] if t is not None]
            found.append(joint.out.double())
        results.append(found)
    worst = max(
        within(f"tensor {i}", a, b.cpu(), 4 * ROUNDINGS[torch.bfloat16]) for i, (a, b) in enumerate(zip(*results))
    )
    return f"{worst:.1e}"


def _places(part: SequenceShard) -> list[int]:
    return [place for run in part.runs(5) for place in run]


def context_checks() -> dict[str, Callable[[torch.device], str]]:
    return {
        "documents of a block, one token, room for many": one_token_check,
        "blocks of one or two tokens": few_tokens_check,
    }
