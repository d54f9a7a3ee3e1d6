"""Multi-token prediction in families that have it: fields of the `model` section, rules, the block (nn/mtp.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, no_effect, within
from phalanx.models.decoder_config import DecoderConfig

if TYPE_CHECKING:
    from phalanx.nn.env import Env
    from phalanx.nn.mtp import Depth, MultiTokenPrediction
    from phalanx.nn.parameter import Parameter


@dataclass(frozen=True, kw_only=True)
class PredictorsConfig(DecoderConfig):
    """Llama's fields, and modules of multi-token prediction."""

    num_nextn_predict_layers: int = 0
    """Multi-token prediction modules after the last layer, each with a layer of its own; in training each predicts one
    token further ahead (DeepSeek-V3, Qwen3-Next and Qwen3.5: 1)."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean of their losses, relative to the main loss."""

    @property
    def predict_layers(self) -> int:
        return self.num_nextn_predict_layers


def check_predictors(config: PredictorsConfig) -> list[Problem]:
    found = at_least("model", config, 0, "num_nextn_predict_layers")
    found += within("model", config, "mtp_loss_weight", "[0, inf)", (0.3,))
    if config.num_nextn_predict_layers:
        return found
    because = {"model.num_nextn_predict_layers": 0}
    return found + no_effect("model", config, ["mtp_loss_weight"], "model.num_nextn_predict_layers", because)


# a function that builds blocks imports torch itself, because reading a config must not
def predictor_block(
    make_depth: Callable[[PredictorsConfig, Env, int], Depth],
    config: PredictorsConfig,
    env: Env,
    made: Mapping[str, Parameter],
) -> MultiTokenPrediction:
    """All modules, numbered as layers after the last one, with the model's embedding and head."""
    from phalanx.models.decoder import embedding_replicas, make_head, norm
    from phalanx.nn.embedding import Embedding
    from phalanx.nn.mtp import MultiTokenPrediction

    c, name = config, f"{config.base}embed_tokens.weight"
    replicas = embedding_replicas(c, env)
    embed = Embedding(env, name, c.vocab_size, c.hidden_size, c.initializer_range, replicas, made.get(name))
    head = make_head(c, env, {name: embed.weight})
    last = c.num_hidden_layers + c.num_nextn_predict_layers
    depths = [make_depth(c, env, number) for number in range(c.num_hidden_layers, last)]
    return MultiTokenPrediction(env, norm(c, env, f"{c.base}norm"), embed, head, depths, c.mtp_loss_weight)
