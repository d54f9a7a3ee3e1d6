"""Attention over pages against attention over whole sequences, what is stored in FP8, what is refused.

Truth: ops.attention.attention in float64. The kernels are compared with the reference in tests/ops/test_kernels.py.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.nn.memory import PageSpec
from phalanx.ops.attention import paged
from phalanx.ops.attention.attention import attention
from phalanx.ops.attention.kind import CAUSAL, NOTHING, AttentionKind, Learned, UnsupportedAttention
from phalanx.ops.attention.paged import (
    FP8,
    PagedExample,
    Pages,
    in_fp8,
    paged_attention,
    paged_attention_parts,
    store_pages,
)
from phalanx.ops.attention.paged_context import joined_parts
from phalanx.sequence.paged import NO_PAGE
from tests.ops.test_ops import make_batch, normal

MIXED = ((1, 5), (0, 9), (37, 237), (1, 1), (3, 3), (0, 0), (1, 130))
KINDS = {
    "causal": CAUSAL,
    "window": AttentionKind(window=48),
    "window of one": AttentionKind(window=1),
    "chunk": AttentionKind(chunk=32, window=20),
    "sinks": AttentionKind(sinks=True, window=48),
    "soft cap, scale": AttentionKind(soft_cap=2.0, scale=0.4),
}


def drawn(example: PagedExample, heads: int, kv_heads: int, key: int, value: int) -> tuple[Tensor, ...]:
    """q of the tokens here, k and v of all, sinks."""
    q, k = normal(example.tokens, heads, key), normal(example.memory, kv_heads, key, seed=1)
    v = k[..., :value] if example.shared else normal(example.memory, kv_heads, value, seed=2)
    return q, k, v, normal(heads, seed=3)


def whole(example: PagedExample, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """(tokens, heads, V) of each sequence by itself, without pages; padding gets zeros."""
    out, first, before = q.new_zeros(*q.shape[:2], v.shape[-1]), 0, 0
    for here, length in example.sequences:
        if here:
            keys, values = (x[before : before + length].transpose(0, 1).unsqueeze(0) for x in (k, v))
            queries = q.new_zeros(1, q.shape[1], length, q.shape[2])
            queries[0, :, length - here :] = q[first : first + here].transpose(0, 1)
            given = Learned(sinks) if example.kind.sinks else NOTHING
            made = attention(queries, keys, values, make_batch(1, length), example.kind, given)
            out[first : first + here] = made.view(length, q.shape[1], -1)[length - here :]
        first, before = first + here, before + length
    return out


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("heads, kv_heads, page_size", [(8, 1, 16), (4, 2, 32), (3, 3, 64)])
def test_equals_attention_to_whole_sequences(name, heads, kv_heads, page_size):
    example = PagedExample(MIXED, page_size, KINDS[name], padding=3)
    drawn_ones = drawn(example, heads, kv_heads, 10, 6)
    found = example.attend(*drawn_ones, "plain")[..., :-1]
    torch.testing.assert_close(found, whole(example, *drawn_ones), rtol=1e-12, atol=1e-12)
    assert (found[-3:] == 0).all()


def test_latents_are_keys_and_values():
    example = PagedExample(MIXED, 16, AttentionKind(scale=0.2), padding=1, shared=True)
    drawn_ones = drawn(example, 16, 1, 18, 16)
    found = example.attend(*drawn_ones, "plain")[..., :-1]
    torch.testing.assert_close(found, whole(example, *drawn_ones), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("elements", [1, 3000, 2**40])
def test_how_much_is_computed_at_once_changes_nothing(monkeypatch, elements):
    example = PagedExample(MIXED, 16, AttentionKind(window=48), padding=2)
    drawn_ones = drawn(example, 4, 2, 8, 8)
    expected = example.attend(*drawn_ones, "plain")
    monkeypatch.setattr(paged, "ELEMENTS", elements)
    torch.testing.assert_close(example.attend(*drawn_ones, "plain"), expected, rtol=1e-14, atol=1e-14)


def test_bounds_stand_for_lengths_that_lie_on_a_device(monkeypatch):
    """On a GPU the reference pads everything to the bounds instead of waiting."""
    example = PagedExample(MIXED, 16, AttentionKind(window=48), padding=2)
    drawn_ones = drawn(example, 4, 2, 8, 8)
    expected = example.attend(*drawn_ones, "plain")
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    torch.testing.assert_close(example.attend(*drawn_ones, "plain"), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("window", [None, 20])
def test_parts_of_the_keys_are_joined_by_their_log_sum_exp(window):
    """Pages dealt out to three: what each has not is NO_PAGE in its table. Truth: all pages, and the sinks."""
    example = PagedExample(MIXED, 16, AttentionKind(window=window, sinks=True), padding=2)
    q, k, v, sinks = drawn(example, 4, 2, 8, 8)
    (spans, slots), pages = example.laid_out(q.device), example.pages(k, v)
    store_pages(k, v, pages, slots)
    out, lse = paged_attention_parts(q, pages, spans, example.kind, Learned(sinks))
    joint, total = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for part in range(3):
        mine = spans.table.where(torch.arange(spans.table.shape[1]) % 3 == part, NO_PAGE)
        given = Learned(sinks) if part == 0 else NOTHING
        kind = replace(example.kind, sinks=part == 0)
        more, more_lse = paged_attention_parts(q, pages, replace(spans, table=mine), kind, given)
        assert more.isfinite().all()
        both = torch.logaddexp(total, more_lse)
        weights = [(x - both.nan_to_num(neginf=0)).exp().unsqueeze(-1) for x in (total, more_lse)]
        joint, total = joint * weights[0] + more * weights[1], both
    torch.testing.assert_close((joint, total), (out, lse), rtol=1e-12, atol=1e-12)
    assert (total[:-2] > -torch.inf).all() and (total[-2:] == -torch.inf).all()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_remember_every_so_many_th_token_join_their_parts(name, ranks):
    """Truth: attention to whole sequences. What no rank has written is NaN."""
    kind, given = replace(KINDS[name], sinks=False), KINDS[name].sinks
    examples = [PagedExample(MIXED, 16, kind, padding=2, offset=rank, stride=ranks) for rank in range(ranks)]
    q, k, v, sinks = drawn(examples[0], 4, 2, 8, 6)
    found = []
    for example in examples:
        (spans, slots), pages = example.laid_out(q.device), example.pages(k, v)
        store_pages(k, v, pages, slots)
        assert sum(page.isfinite().all((1, 2)).sum() for page in pages.keys[1:]) == len(slots[slots >= 16])
        found.append(paged_attention_parts(q, pages, spans, kind))
    joined = joined_parts(*(torch.stack(each) for each in zip(*found)), sinks if given else None)
    torch.testing.assert_close(
        joined, whole(replace(examples[0], kind=KINDS[name]), q, k, v, sinks), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_batch_invariant_bits_depend_on_the_sequence_alone(monkeypatch, kernels):
    """A prompt in one piece, in several, and by single tokens, beside other sequences; fewer heads, as over tp."""
    if kernels == "triton":
        kernel = importlib.import_module("phalanx.ops.attention.paged_kernel")
        monkeypatch.setattr(kernel, "INVARIANT_KEYS", 32)  # parts of 32 keys, from position 64 on of 64
        monkeypatch.setattr(kernel, "INVARIANT_PARTS", 4)
    kind, length = AttentionKind(window=70, sinks=True), 90
    q, k, v, sinks = (x.float() for x in drawn(PagedExample(((length, length),), 16), 2, 2, 16, 16))
    found = []
    for others, sizes in (((), (length,)), (((1, 30),), (70, 1, 18, 1)), (((5, 37),), (33, 33))):
        done, parts = 0, []
        for size in sizes:
            example = PagedExample((*others, (size, done + size)), 16, kind, padding=2)
            before, remembered = example.tokens - 2 - size, example.memory - done - size
            spans, slots = example.laid_out(q.device)
            spans = replace(spans, batch_invariant=True)
            queries = torch.cat((q[:before] * 2, q[done : done + size], q[:2]))
            keys, values = (torch.cat((x[:remembered] * 3, x[: done + size])) for x in (k, v))
            pages = example.pages(keys, values)
            store_pages(keys, values, pages, slots)
            out = paged_attention_parts(queries, pages, spans, kind, Learned(sinks), kernels)
            parts.append([t[before : before + size] for t in out])
            done += size
        if not others:  # the second half of the heads alone
            half = Pages(pages.keys[:, :, 1:].clone(), pages.values[:, :, 1:].clone(), 16)
            alone = paged_attention_parts(queries[:, 1:], half, spans, kind, Learned(sinks[1:]), kernels)
            assert all(torch.equal(a[:length], b[:, 1:]) for a, b in zip(alone, parts[0]))
        found.append([torch.cat(pieces) for pieces in zip(*parts)])
    assert all(torch.equal(a[: len(b)], b) for pieces in found[1:] for a, b in zip(found[0], pieces))


def test_what_is_not_read_may_be_anything():
    """Pages that have left the window are given back: others write into them."""
    example = PagedExample(((1, 200), (5, 70)), 16, AttentionKind(window=20), padding=1)
    q, k, v, _ = drawn(example, 4, 2, 8, 8)
    (spans, slots), pages = example.laid_out(q.device), example.pages(k, v)
    store_pages(k, v, pages, slots)
    expected = paged_attention(q, pages, spans, example.kind)
    unread = torch.ones(len(pages.keys), dtype=torch.bool)
    unread[spans.table.long()] = False
    unread[NO_PAGE] = True
    assert unread.sum() > 12
    for t in pages.tensors:
        t[unread] = torch.inf
    assert torch.equal(paged_attention(q, pages, spans, example.kind), expected) and expected.isfinite().all()


@pytest.mark.parametrize("shared", [False, True])
def test_fp8_pages_lose_no_more_than_their_roundings(shared):
    """A rounding to e4m3 loses at most 2^-4 of a number or, near zero, 2^-10 of its scale. So scores move by at most
    e = sum |q| |loss of k| / sqrt(K), probabilities by a factor within exp(+-2 e), and outputs by at most
    (exp(2 e) - 1) sum p |v| + exp(2 e) sum p |loss of v|."""
    example = PagedExample(MIXED, 16, padding=2, shared=shared, fp8=True)
    exact = replace(example, fp8=False, shared=False)
    q, k, v, sinks = (x * 0.5 for x in drawn(example, 4, 2, 32, 32))

    def lost(x: Tensor) -> Tensor:
        return torch.maximum(x.abs() * 2**-4, in_fp8(x)[0].double().unsqueeze(-1) * 2**-10)

    def mean(x: Tensor) -> Tensor:
        return exact.attend(q, k, x, sinks, "plain")[..., :-1]

    loss_of_k = lost(k).repeat_interleave(2, dim=1)
    e = torch.einsum("thk,mhk->thm", q.abs(), loss_of_k).amax(-1, keepdim=True) / math.sqrt(32)
    bound = torch.expm1(2 * e) * mean(v.abs()) + (2 * e).exp() * mean(lost(v))
    error = (example.attend(q, k, v, sinks, "plain")[..., :-1] - mean(v)).abs()
    assert (error <= bound).all()
    assert 1e-3 < error.max() < 0.1


def test_fp8_keeps_zeros_and_the_largest():
    x = torch.tensor([[0.0, 0.0], [1e-44, 0.0], [448.0, -1.0], [3e38, 1.0]])
    scales, quantized = in_fp8(x)
    assert (quantized[:2].float() == 0).all() and (quantized[2:, 0].float() == 448).all()
    torch.testing.assert_close(scales[2:] * 448, x[2:, 0])


def test_what_is_stored_and_what_is_refused():
    k, v = normal(3, 2, 4, dtype=torch.float32), normal(3, 2, 6, seed=1, dtype=torch.float32)
    slots = torch.tensor([17, 5, 5])
    spec = PageSpec(2, 4, 6)
    pages = spec.allocate(4, 16, torch.float32, "cpu")
    store_pages(k[:2], v[:2], pages, slots[:2])
    assert torch.equal(pages.keys[1, 1], k[0]) and torch.equal(pages.values[0, 5], v[1])
    assert pages.keys.count_nonzero() == 2 * k[0].numel()
    store_pages(k, v, pages, slots)  # two of padding, in the page that is nobody's
    with pytest.raises(ValueError, match="both or none"):
        store_pages(k, None, pages, slots)
    with pytest.raises(ValueError, match="pages in FP8 have some"):
        Pages(pages.keys, pages.values.to(FP8), 6)
    with pytest.raises(ValueError, match="no part of a key"):
        Pages(pages.keys, None, 6)
    with pytest.raises(ValueError, match="beside keys"):
        Pages(pages.keys, pages.values, 4)
    spans, _ = PagedExample(((3, 3),), 16).laid_out(k.device)
    q = torch.zeros(3, 4, 4)
    refused = "paged attention has no direction"
    with pytest.raises(UnsupportedAttention, match=refused):
        paged_attention(q, pages, spans, AttentionKind(direction="both"))
    with pytest.raises(ValueError, match="sinks=True"):
        paged_attention(q, pages, spans, AttentionKind(sinks=True))
    with pytest.raises(ValueError, match="do not fit keys"):
        paged_attention(q[:, :3], pages, spans)
    with pytest.raises(ValueError, match="spans count with 32"):
        paged_attention(q, pages, replace(spans, page_size=32))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8], ids=str)
def test_bytes_of_a_token_are_those_allocated(shared, dtype):
    spec = PageSpec(2, 8, 6, shared=shared)
    pages = spec.allocate(5, 16, dtype, "cpu")
    assert sum(t.numel() * t.itemsize for t in pages.tensors) == 5 * 16 * spec.token_bytes(dtype)
    assert pages.kv_heads == 2 and pages.page_size == 16 and pages.width == 6
