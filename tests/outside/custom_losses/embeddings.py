"""A loss over embeddings from outside: triplets with a margin (Schroff et al., "FaceNet", 2015), the negative being the
nearest passage of another query in the whole step."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize, relu

import phalanx as px


@dataclass(frozen=True, kw_only=True)
class TripletConfig:
    margin: float = 0.2


class Triplet(px.EmbeddingObjective):
    Config = TripletConfig
    pooling = "mean"

    def loss(self, texts: px.StepTexts) -> Tensor:
        unit = normalize(texts.embeddings, dim=1)
        distances = 1 - unit[texts.mine] @ unit.T
        own = texts.query[texts.mine].unsqueeze(1) == texts.query
        positive = (distances * (own & (texts.role == 1))).sum(1)
        others = (texts.role >= 1) & (texts.query >= 0) & ~own
        return relu(positive - distances.masked_fill(~others, 2.0).amin(1) + self.config.margin)
