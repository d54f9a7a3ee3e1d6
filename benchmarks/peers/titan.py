"""torchtitan's own trainer on our workloads, with random tokens in the place of its dataset. W1, W2 and the small
model.

torchrun --nproc-per-node 4 benchmarks/peers/titan.py W2 [--reshard never] [--out titan.jsonl]

Written for torchtitan 0.2 (0.3 needs a newer torch than 2.11). As it is: one GPU runs fp32 parameters under
autocast, several FSDP2; torch.compile on, no activation checkpointing.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist
from torch import Tensor
from workloads import WORKLOADS, Workload, arguments, fresh_tokens, report, timed


class Tokens:
    """What torchtitan takes for a data loader: micro-batches on the CPU, each of fresh tokens."""

    def __init__(self, w: Workload, data_rank: int, count: int):
        self.made = fresh_tokens(w, data_rank, count, device="cpu")

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for ids in self.made:
            yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()


def register(w: Workload, count: int) -> None:
    """A model of this workload's shape under the name "bench"."""
    import torchtitan.models.llama3 as llama3
    from torchtitan.protocols.train_spec import register_train_spec

    if w.hidden == 4096:
        shape = dataclasses.replace(llama3.llama3_args["8B"], n_layers=w.layers, vocab_size=w.vocab)
    else:  # its MLP's width is a rule: 2/3 of 4 * dim, times ffn_dim_multiplier, rounded up to multiple_of
        shape = dataclasses.replace(
            llama3.llama3_args["8B"],
            dim=w.hidden,
            n_layers=w.layers,
            n_heads=w.heads,
            n_kv_heads=w.kv_heads,
            vocab_size=w.vocab,
            rope_theta=w.theta,
            ffn_dim_multiplier=None,
            multiple_of=256,
        )
        width = -(-(2 * 4 * w.hidden // 3) // 256) * 256
        if width != w.inner:
            raise SystemExit(f"torchtitan would make the MLP {width} wide, the workload says {w.inner}")
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        model_args={"bench": shape},
        build_tokenizer_fn=None,
        build_validator_fn=None,
        build_dataloader_fn=lambda dp_world_size, dp_rank, tokenizer, job_config: Tokens(w, dp_rank, count),
    )
    register_train_spec("bench", spec)


def job(w: Workload, compiled: bool, reshard: str) -> Any:
    from torchtitan.config import JobConfig

    c = JobConfig()
    c.model.name = c.model.flavor = "bench"
    c.training.local_batch_size, c.training.global_batch_size, c.training.seq_len = w.micro, w.batch, w.length
    c.training.steps = 10**6
    c.compile.enable = compiled
    c.activation_checkpoint.mode = "none"
    c.optimizer.lr, c.lr_scheduler.warmup_steps = 1e-5, 0
    c.parallelism.fsdp_reshard_after_forward = reshard
    c.metrics.log_freq = 10**9
    c.comm.trace_buf_size = 0
    c.job.dump_folder = tempfile.mkdtemp()
    return c


def main() -> None:
    parser = arguments(__doc__ or "", ("W1", "W2", "small"))
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument(
        "--reshard", choices=["default", "always", "never"], default="default", help="FSDP2: free weights after forward"
    )
    options = parser.parse_args()
    w = WORKLOADS[options.workload]
    world = int(os.environ["WORLD_SIZE"])
    if world != w.gpus:
        raise SystemExit(f"this workload is for {w.gpus} GPUs: torchrun --nproc-per-node {w.gpus}")
    from torchtitan.train import Trainer

    micro_batches = w.batch // (w.micro * world)
    register(w, micro_batches * (options.warmup + options.steps))
    trainer = Trainer(job(w, not options.eager, options.reshard))
    trainer.metrics_processor.should_log = lambda step: False
    batches = trainer.batch_generator(trainer.dataloader)
    losses: list[Tensor] = []
    plain = trainer.forward_backward_step

    def keep_loss(**kwargs: Any) -> Tensor:
        losses.append(plain(**kwargs).detach())
        return losses[-1]

    trainer.forward_backward_step = keep_loss

    def step() -> None:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)

    seconds = timed(step, options.warmup, options.steps)
    ends = [sum(losses[:micro_batches]).item(), sum(losses[-micro_batches:]).item()]  # type: ignore[union-attr]
    report(f"torchtitan{' eager' if options.eager else ''}", w, seconds, ends, options.out, reshard=options.reshard)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
