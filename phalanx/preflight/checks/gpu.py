"""GPUs: what the driver reports of each: memory errors, rows to remap, XIDs, throttling, clocks, power caps."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as Xml
from collections.abc import Iterator
from statistics import median
from typing import Any

from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView, Severity

PROGRAM_S = 20.0
SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
# where drivers of several years report the limit now set
POWER_LIMITS = (
    "gpu_power_readings/current_power_limit",
    "gpu_power_readings/power_limit",
    "power_readings/power_limit",
)
# of NVIDIA's list those that mean hardware, driver or link; the others follow from programs
XIDS = {
    48: "double-bit memory error",
    61: "microcontroller halted",
    62: "microcontroller halted",
    63: "a memory row to remap",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "many single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GPU system processor does not answer",
    120: "GPU system processor error",
    140: "memory error that cannot be corrected",
}


class Gpu(NodeCheck):
    """By `nvidia-smi -q -x` and the kernel's log, each if it can be read. Nothing is changed on a GPU."""

    name = "gpu"
    limit_s = 30.0

    def look(self, view: NodeView, order: Any) -> Any:
        """A list of GPUs with what was read; None without NVIDIA's driver."""
        program = shutil.which("nvidia-smi")
        if program is None:
            return None
        done = subprocess.run([program, "-q", "-x"], capture_output=True, text=True, timeout=PROGRAM_S)
        if done.returncode:
            why = (done.stdout or done.stderr).strip().splitlines()
            return {"failed": f"nvidia-smi: {why[-1] if why else f'status {done.returncode}'}"}
        return {"gpus": read_gpus(done.stdout), "xids": read_xids(kernel_log())}

    def judge(self, looks: Looks) -> list[Finding]:
        answers, found = looks.of(0), []
        everyone = [gpu for said in answers.values() for gpu in said.get("gpus", ())]
        usual = {
            key: median(values)
            for key in ("power limit", "max clock")
            if (values := [gpu[key] for gpu in everyone if gpu.get(key) is not None])
        }
        for node, said in answers.items():
            if "failed" in said:
                found.append(Finding(self.name, (node,), said["failed"]))
            for number, gpu in enumerate(said.get("gpus", ())):
                texts = list(troubles(gpu, usual))
                found += [Finding(self.name, (node,), f"GPU {number}: {text}", severity) for severity, text in texts]
            for xid in said.get("xids", ()):
                found.append(Finding(self.name, (node,), f"XID {xid} since the start of the node: {XIDS[xid]}"))
        return found


def read_gpus(text: str) -> list[dict[str, Any]]:
    """What is needed of the XML that `nvidia-smi -q -x` prints; values that a GPU does not have are None."""
    return [read_gpu(gpu) for gpu in Xml.fromstring(text).iter("gpu")]


def read_gpu(gpu: Xml.Element) -> dict[str, Any]:
    def number(*paths: str) -> float | None:
        for path in paths:
            found = re.match(r"\s*(\d+(?:\.\d+)?)", gpu.findtext(path) or "")
            if found:
                return float(found[1])
        return None

    volatile = gpu.find("ecc_errors/volatile")
    counts = [] if volatile is None else [e for e in volatile.iter() if "uncorrectable" in e.tag]
    reasons = [gpu.find(f"clocks_{word}_reasons") for word in ("event", "throttle")]
    slowed = [
        name
        for of in reasons
        if of is not None
        for name in SLOWED
        for reason in of
        if reason.tag.endswith(f"_reason_{name}") and (reason.text or "").strip() == "Active"
    ]
    return {
        "name": gpu.findtext("product_name"),
        "memory errors": sum(int(e.text or 0) for e in counts if (e.text or "").strip().isdigit()),
        "remap pending": (gpu.findtext("remapped_rows/remapped_row_pending") or "").strip() == "Yes",
        "remap failed": (gpu.findtext("remapped_rows/remapped_row_failure") or "").strip() == "Yes",
        "slowed": slowed,
        "power limit": number(*POWER_LIMITS),
        "default limit": number("gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
        "max clock": number("max_clocks/sm_clock"),
        "pcie": number("pci/pci_gpu_link_info/link_widths/current_link_width"),
        "pcie most": number("pci/pci_gpu_link_info/link_widths/max_link_width"),
    }


def troubles(gpu: dict[str, Any], usual: dict[str, float]) -> Iterator[tuple[Severity, str]]:
    """What is wrong with a GPU. usual: the medians over all GPUs."""
    if gpu["memory errors"]:
        yield "bad", f"{gpu['memory errors']} memory errors that could not be corrected since the driver was loaded"
    if gpu["remap failed"]:
        yield "bad", "a memory row could not be remapped: replace the GPU"
    if gpu["remap pending"]:
        yield "bad", "a memory row waits to be remapped: reset the GPU or restart the node"
    if gpu["slowed"]:
        yield "bad", f"slowed down now ({', '.join(gpu['slowed'])}): cooling or power"
    if gpu["power limit"] is not None and gpu["power limit"] < usual.get("power limit", 0.0):
        yield "bad", f"power cap {gpu['power limit']:g} W, of most GPUs {usual['power limit']:g} W"
    elif gpu["default limit"] is not None and (gpu["power limit"] or 0.0) < gpu["default limit"]:
        yield "warning", f"power cap {gpu['power limit']:g} W, by default {gpu['default limit']:g} W"
    if gpu["max clock"] is not None and gpu["max clock"] < usual.get("max clock", 0.0):
        yield "bad", f"clock up to {gpu['max clock']:g} MHz, of most GPUs {usual['max clock']:g} MHz"
    if gpu["pcie"] is not None and gpu["pcie most"] is not None and gpu["pcie"] < gpu["pcie most"]:
        yield "bad", f"PCIe at x{gpu['pcie']:g} of x{gpu['pcie most']:g}: is it seated well?"


def kernel_log() -> str:
    """What `dmesg` prints; "" where it may not be read."""
    program = shutil.which("dmesg")
    if program is None:
        return ""
    return subprocess.run([program], capture_output=True, text=True, errors="replace", timeout=PROGRAM_S).stdout


def read_xids(log: str) -> list[int]:
    """The XIDs of hardware in a kernel log, each once."""
    return sorted({int(n) for n in re.findall(r"NVRM: Xid \([^)]*\): (\d+)", log)} & set(XIDS))
