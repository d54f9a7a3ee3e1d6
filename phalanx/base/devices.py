"""Devices by name: peak matmul rates, memory and its bandwidth, from the vendors' data sheets. No other file holds such
numbers."""

from __future__ import annotations

import re

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True)
class Device:
    """Dense peaks (no structured sparsity) in FLOP/s with fp32 accumulation; None: the device has no such matmul.
    memory: bytes. bandwidth: of its memory, bytes/s.

    fp32 is the rate without TF32, because torch does not use TF32 by default.
    """

    name: str
    bf16: float | None
    fp16: float | None
    fp32: float
    memory: float
    bandwidth: float

    def peak(self, precision: str) -> float | None:
        """Peak FLOP/s of matmuls in "bf16", "fp16" or "fp32"; None for others (fp64 is only for correctness checks)."""
        return {"bf16": self.bf16, "fp16": self.fp16, "fp32": self.fp32}.get(precision)


def _device(name: str, half: float, fp32: float, gigabytes: float, terabytes_per_s: float, bf16: bool = True) -> Device:
    rates = half * 1e12 if bf16 else None, half * 1e12, fp32 * 1e12
    return Device(name, *rates, gigabytes * 1e9, terabytes_per_s * 1e12)


# TFLOP/s, GB and TB/s. NVIDIA data sheets: Blackwell (2024; HGX B200), H200 and H100 (2023/24; sparse figures halved),
# A100 (2021), L4, L40S, A10, V100, T4; GeForce: Ada (AD102) and GA102 and Blackwell RTX architecture papers, "FP16/BF16
# with FP32 accumulate".
DEVICES = (
    _device("GB200", 2500, 80, 186, 8),
    _device("B200", 2250, 75, 180, 8),
    _device("GH200", 989, 67, 96, 4),
    _device("H200", 989, 67, 141, 4.8),
    _device("H100 PCIe", 756, 51, 80, 2),
    _device("H100 NVL", 835, 60, 94, 3.9),
    _device("H100", 989, 67, 80, 3.35),
    _device("H800", 989, 67, 80, 3.35),
    _device("A100-SXM4-40GB", 312, 19.5, 40, 1.555),
    _device("A100-PCIE-40GB", 312, 19.5, 40, 1.555),
    _device("A100", 312, 19.5, 80, 2.039),
    _device("A800", 312, 19.5, 80, 2.039),
    _device("L40S", 362, 91.6, 48, 0.864),
    _device("L4", 121, 30.3, 24, 0.3),
    _device("A10G", 70, 31.5, 24, 0.6),
    _device("A10", 125, 31.2, 24, 0.6),
    _device("RTX A6000", 154.8, 38.7, 48, 0.768),
    _device("RTX 5090", 209.5, 104.8, 32, 1.792),
    _device("RTX 4090", 165.2, 82.6, 24, 1.008),
    _device("RTX 3090", 71, 35.6, 24, 0.936),
    _device("V100", 125, 15.7, 32, 0.9, bf16=False),
    _device("T4", 65, 8.1, 16, 0.32, bf16=False),
)


def find_device(name: str) -> Device | None:
    """The device that a driver calls `name` (such as "NVIDIA H100 80GB HBM3"), or None if it is not in the table."""
    return next(
        (d for d in DEVICES if re.search(rf"(?<![A-Za-z0-9]){re.escape(d.name)}(?![A-Za-z0-9])", name, re.IGNORECASE)),
        None,
    )
