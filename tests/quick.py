"""What `make quick` runs, and why each of it: `python -m tests.quick` prints the arguments for pytest.

Two minutes on two cores, so that people run it while they work. It finds most mistakes; `make test` finds the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

QUICK: Mapping[str, str] = MappingProxyType(
    {
        "test_layout.py": "boxes, grids, stages, buckets, shards: pure, and everything rests on them",
        "test_schedule.py": "schedules, lowering and the simulator that proves them: pure",
        "test_rng.py": "the same bits in every layout",
        "test_config.py": "reading, and a failing example of every rule",
        "test_removed.py": "removed options name what replaces them",
        "test_plan.py": "FLOPs, bytes and plans of every recipe",
        "test_optim.py": "the optimizer and its schedules",
        "test_ops.py": "every op and its gradients against plain PyTorch, in float64",
        "test_kernels.py": "Triton kernels against their references, interpreted",
        "test_house.py": "rooms on floors, no circles, the words of the house",
        "test_doors.py": "files at the root, workflows and this list name what exists",
        "test_parity.py::test_named_layouts[tp4 with 2 kv heads, odd vocabulary]": "tensor parallelism",
        "test_parity.py::test_named_layouts[interleaved, 3 micro-batches on 2 ranks]": "pipeline stages",
        "test_parity.py::test_named_layouts[cp2, heads]": "context parallelism and documents",
        "test_parity.py::test_named_layouts[mixtral ep2]": "experts over ranks",
        "test_parity.py::test_named_layouts[gpt2 tp2 pp2, pointwise recompute, overlapped]": "recomputation, tp and pp",
        "test_round_trip.py::test_there_and_back[llama: tied-{'pp': 2}]": "a checkpoint, saved, read and saved again",
    }
)
"""A file of tests/, or a test in it -> the reason."""


if __name__ == "__main__":
    print("\n".join(f"tests/{name}" for name in QUICK))
