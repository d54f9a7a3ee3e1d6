"""Embeddings for retrieval: a query is closer to its positive than to every other passage of the step (InfoNCE: van den
Oord et al., "Representation learning with contrastive predictive coding", 2018, equation 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import problem, within
from phalanx.nn.objective import EmbeddingObjective, StepTexts, objective
from phalanx.sequence.sample import POSITIVE, Pooling

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

SMALL = 3  # widths in a small copy of a run (phalanx verify), which is at least that wide


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    pooling: Pooling = "mean"
    """embed: how a text's embedding is made of the last hidden states of its tokens: mean, or that of the first or the
    last token (for models that read what comes before)."""
    temperature: float = 0.05
    """embed: cosines are divided by it; the smaller, the more the nearest passages count."""
    matryoshka: tuple[int, ...] = ()
    """embed: widths at which the first features alone are to serve as embeddings (Kusupati et al., "Matryoshka
    representation learning", 2022): the loss is summed over them; none: the whole width alone."""
    matryoshka_weights: tuple[float, ...] = ()
    """embed: the weight of each of these widths in the loss; none: 1."""


@objective("embed")
class Embed(EmbeddingObjective):
    """A mean over the step's queries. Negatives are all passages of the step but the query's own positive: those of
    other queries, and hard negatives. `accuracy` is how often the positive is the nearest of them all."""

    Config = EmbedConfig

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        found = within("task", config, "temperature", "(0, inf)")
        widths, weights = config.matryoshka, config.matryoshka_weights
        if any(width < 1 for width in widths) or len(set(widths)) < len(widths):
            rule = "must be widths >= 1, each once"
            found.append(problem("task", config, "matryoshka", rule, {}, ((),)))
        if weights and len(weights) != len(widths):
            rule, because = "must have a weight for each width", {"task.matryoshka": widths}
            found.append(problem("task", config, "matryoshka_weights", rule, because, ((),)))
        elif not all(0 < weight < float("inf") for weight in weights):
            found.append(problem("task", config, "matryoshka_weights", "must be numbers > 0", {}, ((),)))
        return found

    @classmethod
    def check_model(cls, config: Any, model: Any) -> list[Problem]:
        if all(width <= model.hidden_size for width in config.matryoshka):
            return []
        fitting = tuple(width for width in config.matryoshka if width <= model.hidden_size)
        rule, because = "must be widths <= model.hidden_size", {"model.hidden_size": model.hidden_size}
        valid = () if config.matryoshka_weights else (fitting or (model.hidden_size,),)
        return [problem("task", config, "matryoshka", rule, because, valid)]

    @classmethod
    def shrunk(cls, config: Any, seq_length: int) -> Any:
        widths = tuple(range(1, 1 + min(SMALL, len(config.matryoshka))))
        return replace(config, matryoshka=widths, matryoshka_weights=config.matryoshka_weights[: len(widths)])

    @property
    def pooling(self) -> Pooling:
        found: Pooling = self.config.pooling
        return found

    def loss(self, texts: StepTexts) -> Tensor:
        c, whole = self.config, texts.embeddings.shape[1]
        widths = c.matryoshka or (whole,)
        weights = c.matryoshka_weights or (1.0,) * len(widths)
        parts = [weight * self._loss(self._scores(texts, width), texts) for width, weight in zip(widths, weights)]
        total: Tensor = sum(parts[1:], parts[0])
        return total

    def metrics(self, texts: StepTexts) -> dict[str, Tensor]:
        scores = self._scores(texts, texts.embeddings.shape[1])
        return {"accuracy": (self._of_positive(scores, texts) >= scores.amax(1)).double()}

    def _scores(self, texts: StepTexts, width: int) -> Tensor:
        """(M, N) cosine of each own row and every passage of the step, by the temperature; far below all where there is
        no passage."""
        import torch  # start-up time
        from torch.nn.functional import normalize

        units = normalize(texts.embeddings[:, :width], dim=1)
        scores = units[texts.mine] @ units.T / self.config.temperature
        passage = (texts.role >= POSITIVE) & (texts.query >= 0)
        return scores.masked_fill(~passage, torch.finfo(scores.dtype).min / 2)

    def _loss(self, scores: Tensor, texts: StepTexts) -> Tensor:
        return scores.logsumexp(1) - self._of_positive(scores, texts)

    def _of_positive(self, scores: Tensor, texts: StepTexts) -> Tensor:
        """(M,) the score of each own query's positive."""
        own = texts.query[texts.mine].unsqueeze(1) == texts.query
        found: Tensor = (scores * (own & (texts.role == POSITIVE) & (texts.query >= 0))).sum(1)
        return found
