"""Direct preference optimisation over pairs (chosen, rejected) of answers to one prompt (Rafailov et al., "Direct
preference optimization", 2023, equation 7), with two other losses over the same margin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import problem, within
from phalanx.nn.objective import SequenceObjective, objective

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    beta: float = 0.1
    """dpo: how much a policy that departs from the reference must gain by it, per nat; for ipo, its regularisation."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """dpo: sigmoid (Rafailov et al., 2023), ipo (Azar et al., 2023, equation 17, of summed log-probabilities), or hinge
    (Zhao et al., "SLiC-HF", 2023)."""
    label_smoothing: float = 0.0
    """dpo: how often a preference is expected to be the wrong way round, for loss=sigmoid (Mitchell, "cDPO", 2023)."""
    reference: str | None = None
    """dpo: the reference model's log-probabilities, a file of `phalanx data score CONFIG --teacher FOLDER --top 0 -o
    FILE`; unset: those of the base with adapters off (lora), in a second forward of each step."""


@objective("dpo")
class DPO(SequenceObjective):
    """Metrics are means over the step's pairs: rewards beta (log p - log p_reference) of both answers, their margin,
    and how often the chosen one has the higher reward."""

    Config = DPOConfig
    sequences_per_sample = 2
    needs_reference = True
    scores_field = "task.reference"

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        found = within("task", config, "beta", "(0, inf)") + within("task", config, "label_smoothing", "[0, 0.5)")
        if config.label_smoothing and config.loss != "sigmoid":
            rule = "has no effect with this loss"
            found.append(problem("task", config, "label_smoothing", rule, {"task.loss": config.loss}, (0.0,)))
        return found

    @property
    def scores(self) -> str | None:
        found: str | None = self.config.reference
        return found

    def loss(self, policy_P2: Tensor, reference_P2: Tensor) -> Tensor:  # type: ignore[override]
        from torch.nn.functional import logsigmoid, relu  # start-up time

        c = self.config
        chosen_P, rejected_P = (policy_P2 - reference_P2).unbind(1)
        margin_P = chosen_P - rejected_P
        if c.loss == "hinge":
            return relu(1 - c.beta * margin_P)
        if c.loss == "ipo":
            return (margin_P - 1 / (2 * c.beta)).square()
        right, wrong = logsigmoid(c.beta * margin_P), logsigmoid(-c.beta * margin_P)
        return -(1 - c.label_smoothing) * right - c.label_smoothing * wrong

    def metrics(self, policy_P2: Tensor, reference_P2: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        chosen_P, rejected_P = (self.config.beta * (policy_P2 - reference_P2)).unbind(1)
        return {
            "rewards_chosen": chosen_P,
            "rewards_rejected": rejected_P,
            "rewards_margin": chosen_P - rejected_P,
            "rewards_accuracy": (chosen_P > rejected_P).double(),
        }
