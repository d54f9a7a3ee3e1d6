"""What `train.batch_invariant` does not support. Modules and ops that are not batch-invariant refuse it too."""

from __future__ import annotations

from typing import Any

from phalanx.base.errors import Problem
from phalanx.base.rules import problem
from phalanx.config.run import Run
from phalanx.ops.dense.invariant import PARTS


def check_batch_invariant(run: Run) -> list[Problem]:
    """Models, layouts and methods in which the order of some additions depends on the batch or on the layout."""
    train, model, layout = run.train, run.model, run.layout
    if not train.batch_invariant:
        return []
    broken: list[tuple[str, dict[str, Any]]] = []
    if layout.tp > 0 and (PARTS % layout.tp or model.kv_heads % layout.tp):
        rule = f"needs a tp that divides {PARTS}, the parts that sums of linears are cut into, and the kv heads"
        broken.append((rule, {"layout.tp": layout.tp, "kv heads": model.kv_heads}))
    if layout.cp > 1:
        broken.append(("needs attention on one rank of context parallelism", {"layout.cp": layout.cp}))
    if model.routed_experts:
        rule = "needs a dense model: what experts are given follows the batch"
        broken.append((rule, {"experts": model.routed_experts}))
    if train.fp8 is not None:
        broken.append(("needs matmuls in train.precision: scales of FP8 are those of a batch", {"train.fp8": "set"}))
    if run.lora is not None:
        broken.append(("needs full weights, without adapters", {"lora": run.lora.method}))
    chosen = {"train.kernels": train.kernels} if train.kernels != "auto" else {}
    if chosen or train.plain_ops:
        because = chosen | ({"train.plain_ops": ", ".join(train.plain_ops)} if train.plain_ops else {})
        broken.append(("chooses the implementations itself", because))
    return [problem("train", train, "batch_invariant", rule, because, (False,)) for rule, because in broken]
