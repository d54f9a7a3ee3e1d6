"""Plain PyTorch: a Llama of one page, torch.compile, FSDP2 over several GPUs. W1, W2 and the small model.

torchrun --nproc-per-node 1 benchmarks/peers/plain.py W1 [--out plain.jsonl] [--eager] [--reshard]

One GPU: fp32 parameters under bf16 autocast, the model compiled whole. Several: FSDP2, bf16 gathered weights,
gradients reduced and summed in fp32 shards each micro-batch, blocks compiled one by one. Fused AdamW, norm and clip
every step, nothing recomputed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import WORKLOADS, Workload, arguments, fresh_tokens, report, start, timed

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


class Attention(nn.Module):
    def __init__(self, w: Workload):
        super().__init__()
        self.w = w
        self.qkv = nn.Linear(w.hidden, (w.heads + 2 * w.kv_heads) * w.head, bias=False)
        self.out = nn.Linear(w.heads * w.head, w.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        w = self.w
        q, k, v = self.qkv(x).unflatten(-1, (-1, w.head)).transpose(1, 2).split((w.heads, w.kv_heads, w.kv_heads), 1)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=w.heads != w.kv_heads
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, w: Workload):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(w.hidden, eps=1e-5), Attention(w)
        self.norm2 = nn.RMSNorm(w.hidden, eps=1e-5)
        self.gate_up = nn.Linear(w.hidden, 2 * w.inner, bias=False)
        self.down = nn.Linear(w.inner, w.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, w: Workload):
        super().__init__()
        self.w = w
        self.embed = nn.Embedding(w.vocab, w.hidden)
        self.layers = nn.ModuleList(Layer(w) for _ in range(w.layers))
        self.norm = nn.RMSNorm(w.hidden, eps=1e-5)
        self.head = nn.Linear(w.hidden, w.vocab, bias=False)

    def start(self) -> None:
        """Initial values, and the rotary table (made here because the model is built on the meta device)."""
        for p in self.parameters():
            nn.init.normal_(p, std=0.02) if p.dim() > 1 else nn.init.ones_(p)
        inverse = self.w.theta ** (-torch.arange(0, self.w.head, 2, device="cuda") / self.w.head)
        angle = torch.arange(self.w.length, device="cuda")[:, None] * inverse
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def build(w: Workload, eager: bool, reshard: bool) -> nn.Module:
    with torch.device("meta"):
        model = Llama(w)
    if w.gpus > 1:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            if not eager:
                layer.compile()
            fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    model.to_empty(device="cuda")
    model.start()
    if w.gpus == 1 and not eager:
        model.compile()
    return model


def main() -> None:
    parser = arguments(__doc__ or "", ("W1", "W2", "small"))
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--reshard", action="store_true", help="FSDP2: free gathered weights after each forward")
    options = parser.parse_args()
    w = WORKLOADS[options.workload]
    rank, world = start(w)
    torch.manual_seed(1)
    model = build(w, options.eager, options.reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    micro_batches = w.batch // (w.micro * world)
    tokens = fresh_tokens(w, rank, micro_batches * (options.warmup + options.steps))
    losses: list[Tensor] = []

    def step() -> None:
        total = torch.zeros((), device="cuda")
        for _ in range(micro_batches):
            ids = next(tokens)
            with torch.autocast("cuda", torch.bfloat16, enabled=world == 1), sdpa_kernel(BACKENDS, set_priority=True):
                loss = model(ids[:, :-1], ids[:, 1:].contiguous()) / micro_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)

    seconds = timed(step, options.warmup, options.steps)
    name = f"plain PyTorch {'eager' if options.eager else 'compiled'}{', FSDP2' if world > 1 else ', autocast'}"
    report(name, w, seconds, [losses[0].item(), losses[-1].item()], options.out, reshard=options.reshard)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
