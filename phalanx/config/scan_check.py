"""What models with scans, which hand a state on from token to token, do not support, and what has no effect there."""

from __future__ import annotations

from phalanx.base.errors import Problem
from phalanx.base.rules import no_effect, problem
from phalanx.config.run import Run


def check_scans(run: Run) -> list[Problem]:
    model, layout, train = run.model, run.layout, run.train
    found: list[Problem] = []
    if not model.attends and layout.cp > 1:
        family = {"model.family": model.family}
        found += no_effect("layout", layout, ("cp_attention", "cp_ulysses"), "layers with attention", family)
    if not model.scans:
        return found
    if layout.cp_degree != "fixed":
        rule = "must be fixed: a scan goes through all documents of a sequence in one exchange"
        found.append(problem("layout", layout, "cp_degree", rule, {"model.family": model.family}, ("fixed",)))
    least = 2 * layout.cp * (model.taps - 1)
    if layout.cp > 1 and train.seq_length < least:
        rule = "must give each of the 2 * cp chunks of a sequence as many tokens as a convolution reads before one"
        because = {"layout.cp": layout.cp, "tokens before one": model.taps - 1}
        found.append(problem("train", train, "seq_length", rule, because, (least,)))
    return found
