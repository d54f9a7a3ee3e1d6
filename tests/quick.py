"""What `make quick` runs, and why each of it: `python -m tests.quick` prints the arguments for pytest.

Two minutes on two cores, so that people run it while they work. It finds most mistakes; `make test` finds the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LAYOUT = "verifying/test_parity.py::test_named_layouts"
KERNEL = "ops/test_kernels.py::test_equals_its_reference"
QUICK: Mapping[str, str] = MappingProxyType(
    {
        "layout/test_layout.py": "boxes, grids, stages, buckets, shards: pure, and everything rests on them",
        "schedule/test_schedule.py": "schedules, lowering and the simulator that proves them: pure",
        "base/test_rng.py": "the same bits in every layout",
        "config/test_config.py": "reading, and a failing example of every rule",
        "config/test_removed.py": "removed options name what replaces them",
        "planning/test_plan.py": "FLOPs, bytes and plans of every recipe",
        "optim/test_optim.py": "the optimizer and its schedules",
        "ops/test_ops.py": "every op and its gradients against plain PyTorch, in float64",
        f"{KERNEL}[norm: add_rms_norm-triton-torch.bfloat16]": "a Triton kernel, interpreted: a norm",
        f"{KERNEL}[swiglu: swiglu-triton-torch.bfloat16]": "a gated activation",
        f"{KERNEL}[rope: rope-triton-torch.bfloat16]": "rotary embedding",
        f"{KERNEL}[rows: rows that repeat-triton-torch.bfloat16]": "the gradient of a lookup",
        "doors/test_house.py": "rooms on floors, no circles, the words of the house",
        "doors/test_doors.py": "files at the root, workflows and this list name what exists",
        f"{LAYOUT}[olmo2 tp4 with 2 kv heads, overlapped, selective recompute, documents]": "tensor parallelism",
        f"{LAYOUT}[interleaved, 3 micro-batches on 2 ranks]": "pipeline stages",
        f"{LAYOUT}[qwen3 cp2 tp2, attention and its inputs again]": "context parallelism",
        f"{LAYOUT}[deepseek_v3 tp2 ep2, everything again]": "experts over ranks",
        f"{LAYOUT}[gpt2 tp2 pp2, everything but attention again]": "tp and pp",
        "models/test_round_trip.py::test_there_and_back[llama: tied-{'pp': 2}]": "a checkpoint",
    }
)
"""A file of tests/, or a test in it -> the reason."""


if __name__ == "__main__":
    print("\n".join(f"tests/{name}" for name in QUICK))
