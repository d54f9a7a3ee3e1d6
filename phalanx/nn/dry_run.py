"""Memory before anything runs: the bytes that a module's forward saves and its backward needs (traced on the meta
device), and what buckets hold.

Knows tensors and buckets but no model. The caller decides what is measured, and how many of it are alive at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.base.dataclass import dataclass
from phalanx.layout.buckets import Bucket
from phalanx.layout.grid import Grid
from phalanx.layout.shards import Cut, Sharding
from phalanx.nn.parameter import Parameter
from phalanx.ops.attention.backends import fused_gradients
from phalanx.ops.dense.grads import GradientQueue
from phalanx.ops.quantized.base_bucket import stored_bytes


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors created inside the context that are still alive, and their peak. Works on meta
    tensors too.

    A storage counts once, whatever views it has, until Python releases it: as a GPU's allocator sees it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_key(t) for t in _tensors((args, kwargs))}
        for t in _tensors(out):
            if _key(t) not in given and _key(t) not in self._known:
                self._add(t.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def _key(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _tensors(given: Any) -> Iterator[Tensor]:
    """The tensors among an op's arguments or results."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple | dict):
        for x in given.values() if isinstance(given, dict) else given:
            yield from _tensors(x)


class KnownShapes(TorchDispatchMode):
    """On the meta device, repeats the outputs of an earlier call of the same op with similar inputs: new memory of the
    same size, stride and dtype.

    The meta device's kernels are written in Python and take ten times as long, and FP8 blocks have thousands of ops.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[Any, list[tuple[torch.Size, tuple[int, ...], torch.dtype]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = (func, _like(args), _like(kwargs))
        try:
            known = self._made.get(call)
        except TypeError:  # an argument that has no hash
            return func(*args, **kwargs)
        if known:
            return _new(*known[0]) if len(func._schema.returns) == 1 else tuple(_new(*each) for each in known)
        out = func(*args, **kwargs)
        if known is None:
            outputs = out if isinstance(out, tuple) else (out,)
            new = _only_new(func, [*_tensors((args, kwargs))], outputs)
            self._made[call] = [(t.shape, t.stride(), t.dtype) for t in outputs] if new else []
        return out


def _like(given: Any) -> Any:
    """A hashable value that determines the outputs of an op."""
    if isinstance(given, Tensor):
        return Tensor, given.shape, given.stride(), given.dtype, given.device
    if isinstance(given, list | tuple):
        return type(given), *map(_like, given)
    return tuple((name, _like(x)) for name, x in given.items()) if isinstance(given, dict) else (type(given), given)


def _only_new(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Any]) -> bool:
    """Whether a call's outputs are meta tensors with memory of their own, and nothing else was changed."""
    if func._schema.is_mutable or not all(isinstance(t, Tensor) and t.is_meta for t in (*inputs, *outputs)):
        return False
    if any(
        t.untyped_storage().nbytes() != _new(t.shape, t.stride(), t.dtype).untyped_storage().nbytes() for t in outputs
    ):
        return False  # views
    return len({*map(_key, (*inputs, *outputs))}) == len({*map(_key, inputs)}) + len(outputs)


def _new(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


class _FusedAttention(Function):
    """Saves what cuDNN, flash and memory-efficient attention save: q, k, v, the output and a log-sum-exp for each
    query, not the S x S scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        sequences, heads, length, _ = q.shape
        out = q.new_empty(sequences, length, heads, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(sequences, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return fused_gradients(*ctx.saved_tensors[:3])


class FusedAttention(TorchFunctionMode):
    """On the meta device torch decomposes scaled_dot_product_attention into its formula, including S x S probabilities.

    On the devices used for training it is one kernel; inside this context it allocates like one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*args[:3])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Use:
    """Bytes that one block needs for one micro-batch.

    kept     alive from its forward to its backward, including its input but not its output (the next block's input)
    working  needed on top of `kept` at the worst moment of forward or backward; with recompute, what is recomputed too
    output   of the block's outputs
    pending  where weight gradients wait: alive from the gradients of the block's inputs to those of its weights
    """

    kept: int
    working: int
    output: int
    pending: int = 0


def measure(
    forward: Callable[[Any], Any],
    x: Callable[[], Any],
    params: Iterable[Parameter],
    grad_dtype: torch.dtype,
) -> Use:
    """Run a block forward and backward on the meta device: `forward` is called with what `x` returns, each a tensor or
    several. Weight gradients are added to buffers of `grad_dtype`, as in training."""
    make_gradients(params, grad_dtype)
    return _measured(forward, x)


def make_gradients(params: Iterable[Parameter], dtype: torch.dtype) -> None:
    for p in params:
        p.grad_dtype = dtype
        p.grad = torch.empty_like(p, dtype=dtype)


def _measured(forward: Callable[[Any], Any], x: Callable[[], Any]) -> Use:
    with Allocations() as seen, FusedAttention():
        y = forward(leaves(x()))
        output = sum({_key(t): t.untyped_storage().nbytes() for t in _tensors(y)}.values())
        kept = seen.live - output
        # autograd.backward leaves the modes before it starts, but recomputation inside it needs them
        roots = tuple(t for t in _tensors(y) if t.requires_grad)
        if roots:
            grads = tuple(torch.empty_like(t) for t in roots)
            _engine_run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)
    return Use(kept, max(0, seen.peak - kept), output)


def measure_split(
    forward: Callable[[Any], Any],
    x: Callable[[], Any],
    params: Iterable[Parameter],
    grad_dtype: torch.dtype,
    queue: GradientQueue,
) -> Use:
    """As `measure`, of a backward whose weight gradients wait in the queue of these parameters."""
    make_gradients(params, grad_dtype)
    with Allocations() as seen, queue.open() as pending:
        use = _measured(forward, x)
    waiting = seen.live
    pending.run()
    return replace(use, pending=waiting)


def leaves(x: Any) -> Any:
    """The same tensor or tensors as leaves that receive gradients."""
    for t in _tensors(x):
        t.requires_grad_(t.is_floating_point())
    return x


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of an element of a bucket: of a weight; of a master (and a gradient) as a number; of what is stored of a
    master beside the weight, if these differ in dtype; of the state of each optimizer (layout.buckets.Updater)."""

    weight: int
    master: int
    beside: float
    state: Sequence[float]


def bucket_bytes(buckets: Iterable[Bucket], each: ElementBytes, grid: Grid, sharding: Sharding) -> dict[str, int]:
    """Bytes by kind that flat buffers hold permanently, sharded as `sharding` says.

    Weights in the master dtype are their own masters, as are weights that are frozen or not trained. Masters and state
    of whole matrices are on their home ranks and are not counted here.
    """
    weight, master = each.weight, each.master
    found = {"weights": 0, "gradients": 0, "masters": 0, "moments": 0}
    for b in buckets:
        cut = sharding.cut(b, grid)
        part = b.numel // cut.inner
        updated = part // cut.outer if cut.outside else part
        if b.base_format is not None:  # the weights themselves come and go
            found["weights"] += base_bytes(b, cut)
            continue
        found["weights"] += (
            part * b.sent_bytes(weight) if cut.cuts_weights else b.numel * b.weight_bytes(weight, master)
        )
        if b.learns:
            if not cut.applied:  # else they come and go
                found["gradients"] += (part if cut.cuts_gradients else b.numel) * master
            own = (weight == master or b.updater.matrix) and not b.coded
            found["masters"] += 0 if own else round(updated * each.beside)
            found["moments"] += 0 if b.updater.matrix else round(updated * each.state[b.updater.number])
    return found


def base_bytes(bucket: Bucket, cut: Cut) -> int:
    """Bytes of a bucket's quantized base values (lora.base) that stay on a rank."""
    shards = cut.inner if cut.cuts_weights else 1
    return stored_bytes(bucket, shards) // shards


def pulled_bytes(bucket: Bucket, cut: Cut, weight: int) -> int:
    """Bytes of a bucket's weights that always stay in shared memory, so that neighbours can pull their shards from
    there."""
    if cut.level == 0:
        return 0
    if bucket.base_format is not None:
        return base_bytes(bucket, cut)
    if cut.cuts_weights:
        return cut.numel // cut.inner * bucket.sent_bytes(weight)
    return cut.numel * (2 if bucket.coded else weight)


def summed_bytes(bucket: Bucket, cut: Cut, master: int) -> int:
    """Bytes of the shard of a bucket's gradients that a rank sums for its neighbours; not used with a fixed order."""
    return cut.numel // cut.inner * master if cut.level > 0 and bucket.learns and not cut.in_order else 0
