"""Classification of texts and of tokens: cross entropy of the class, which stands beside token files
(data/classes.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.nn.objective import TokenObjective, cross_entropy, objective

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

    from phalanx.ops.dense.token_loss import LogitStats


@objective("classify")
class Classify(TokenObjective):
    """A mean over the texts, or tokens, of the step that have a class; `accuracy` is how often the likeliest class is
    theirs. The head is over the classes of model.labels (model.head)."""

    both_ways = True
    over_classes = True
    token_loss = staticmethod(cross_entropy)

    def metrics(self, logits: LogitStats) -> dict[str, Tensor]:
        return {"accuracy": (logits.target >= logits.largest).to(logits.target.dtype)}
