"""Rules of optim.qk_clip: there is attention whose scores can be measured and follow its weights, and these are trained
where they can be scaled."""

from __future__ import annotations

from typing import Any

from phalanx.base.errors import Problem
from phalanx.base.rules import no_effect, problem
from phalanx.config.run import Run
from phalanx.nn.cross_attention import CrossAttention
from phalanx.nn.scored_attention import ScoredAttention
from phalanx.planning.blocks import whole_model
from phalanx.planning.freeze import fits, frozen_by


def check_qk_clip(run: Run) -> list[Problem]:
    """For a run whose model has no problem of its own."""
    c = run.optim
    if not c.qk_clip > 0:
        return []
    modules = [m for block in whole_model(run.model) for m in block.modules()]
    layers = [m for m in modules if isinstance(m, ScoredAttention)]
    if not layers:
        return no_effect("optim", c, ("qk_clip",), "layers of attention", {"model.family": run.model.family})
    why = {layer.unclippable for layer in layers if layer.unclippable is not None}
    if any(isinstance(m, CrossAttention) for m in modules):
        why.add("scores of cross-attention are not measured")
    found: list[tuple[str, dict[str, Any]]] = [
        (f"must be 0 for this model: {each}", {"model.family": run.model.family}) for each in sorted(why)
    ]
    frozen = [o.name for layer in layers for o in layer.score_outputs if fits(o.name, list(frozen_by(run)))]
    if run.lora is not None:
        found.append(
            ("must be 0 with adapters, which keep the weights that it scales", {"lora.method": run.lora.method})
        )
    elif frozen:
        found.append(("must be 0 where the weights that it scales are frozen", {"train.freeze fits": frozen[0]}))
    if c.masters == "split":
        found.append(("scales whole masters", {"optim.masters": c.masters}))
    if c.in_backward:
        rule = "needs the scores of all layers and ranks before weights are updated"
        found.append((rule, {"optim.in_backward": True}))
    return [problem("optim", c, "qk_clip", rule, because, (0.0,)) for rule, because in found]
