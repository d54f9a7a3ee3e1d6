"""Distillation: a student learns the next-token distributions of a teacher, which `phalanx data score` has written to a
file, beside the labels (Hinton et al., "Distilling the knowledge in a neural network", 2015)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import problem, within
from phalanx.nn.objective import TokenObjective, objective

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

    from phalanx.ops.dense.token_loss import LogitStats, SparseTargets
    from phalanx.sequence.batch import Batch


@dataclass(frozen=True, kw_only=True)
class DistilConfig:
    teacher: str = ""
    """distil: the teacher's scores, a file of `phalanx data score CONFIG --teacher FOLDER --top 64 -o FILE`."""
    alpha: float = 0.5
    """distil: share of the teacher's divergence in the loss; the rest is cross entropy of the labels."""
    temperature: float = 1.0
    """distil: what the logits of teacher and student are divided by in the divergence, which is multiplied by its
    square."""
    train_on: Literal["answers", "last_answer", "all"] = "answers"
    """distil: with data.chats, tokens with a loss, as in sft."""


@objective("distil")
class Distil(TokenObjective):
    """alpha t^2 KL(teacher || student) + (1 - alpha) cross entropy, a mean over the tokens with a label.

    The teacher's distribution at temperature t is over its top K ids alone, renormalised to 1: p_i ~ exp(log p_i / t).
    The student's is over the whole vocabulary, so it learns to give the other ids nothing. That is a biased estimate of
    the divergence from the whole teacher (Anshumann et al., "Sparse logit sampling", 2025, section 3); it vanishes as
    the K ids cover the teacher's mass.
    """

    Config = DistilConfig
    scores_field = "task.teacher"
    needs_targets = True

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        found = within("task", config, "alpha", "[0, 1]") + within("task", config, "temperature", "(0, inf)")
        if not config.teacher:
            rule = "is required: phalanx data score CONFIG --teacher FOLDER --top 64 -o FILE writes one"
            found.append(problem("task", config, "teacher", rule, {"task.name": config.name}, ("teacher.scores",)))
        return found

    @property
    def scores(self) -> str | None:
        return self.config.teacher or None

    @property
    def train_on(self) -> Any:
        return self.config.train_on

    def targets(self, batch: Batch) -> SparseTargets:
        from phalanx.ops.dense.token_loss import SparseTargets  # start-up time: it imports torch

        if batch.target_ids is None or batch.target_log_probs is None:
            raise RuntimeError("the batch carries no scores of a teacher")
        weights = (batch.target_log_probs.double() / self.config.temperature).softmax(-1)
        return SparseTargets(batch.target_ids, weights)

    def token_loss(self, logits: LogitStats) -> Tensor:
        c = self.config
        label_loss = logits.log_z - logits.target
        return c.alpha * c.temperature**2 * self._divergence(logits) + (1 - c.alpha) * label_loss

    def metrics(self, logits: LogitStats) -> dict[str, Tensor]:
        return {"nll": logits.log_z - logits.target, "kl": self._divergence(logits)}

    def _divergence(self, logits: LogitStats) -> Tensor:
        """(T,) KL(teacher || student) at the temperature: the student's cross entropy of the teacher's distribution,
        less that distribution's entropy."""
        student, weights = logits.at(self.config.temperature), logits.weights
        entropy = -weights.xlogy(weights).sum(-1)
        return student.log_z - student.soft - entropy
