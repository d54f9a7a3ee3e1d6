"""Whisper: an encoder of sound, with two convolutions in front and fixed positions, and a decoder of text beside it.
Radford et al., "Robust speech recognition via large-scale weak supervision", 2022."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, multiples, problem
from phalanx.models.config_json import NEEDED, ConfigJson, integer, integer_or_null, number, switch, text
from phalanx.models.family import Family
from phalanx.models.model_config import ModelConfig, SmallSizes, TensorNames
from phalanx.sequence.frames import FRAMES
from phalanx.sequence.media import MediaBeside, MediaSpec
from phalanx.sequence.sample import SOUND, UnitStream

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(ModelConfig):
    family: Literal["whisper"] = "whisper"
    """Which model this section describes: whisper."""
    vocab_size: int
    """Size of the vocabulary."""
    hidden_size: int
    """Width of the residual stream (d_model)."""
    intermediate_size: int
    """Width of the MLPs (encoder_ffn_dim, decoder_ffn_dim)."""
    num_hidden_layers: int
    """Number of layers of the encoder (encoder_layers)."""
    num_decoder_layers: int | None = None
    """Number of layers of the decoder (decoder_layers); unset: as many as the encoder's."""
    num_attention_heads: int
    """Number of heads (encoder_attention_heads, decoder_attention_heads)."""
    num_mel_bins: int = 80
    """Numbers in a frame of sound: bands of its mel spectrogram."""
    max_source_positions: int = 1500
    """Rows of a recording, two frames each; all recordings have as many."""
    max_position_embeddings: int = 448
    """Learned positions of the decoder (max_target_positions): the longest text."""
    tie_word_embeddings: bool = True
    """Use the decoder's input embedding as output head."""
    decoder_start_token_id: int = 50257
    """The token with which every text of the decoder begins."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights (init_std)."""

    @property
    def rotary(self) -> bool:
        return False

    @property
    def gated_mlp(self) -> bool:
        return False

    @property
    def decoder_layers(self) -> int:
        return self.num_hidden_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def encoder_blocks(self) -> range:
        """The blocks that are layers of the encoder. After them comes the decoder's embedding."""
        return range(1, 1 + self.num_hidden_layers)

    @property
    def embedding_block(self) -> int:
        return self.encoder_blocks.stop

    @property
    def layer_blocks(self) -> Sequence[int]:
        first = self.embedding_block + 1
        return (*self.encoder_blocks, *range(first, first + self.decoder_layers))

    @property
    def num_blocks(self) -> int:
        return self.num_hidden_layers + self.decoder_layers + 3

    @property
    def decoder_start(self) -> int | None:
        return self.decoder_start_token_id

    @property
    def sound(self) -> UnitStream:
        """A recording as rows: each has the frames that the convolutions read for it."""
        n = self.max_source_positions
        return UnitStream(SOUND, FRAMES * self.num_mel_bins, axes=0, joined=1, largest=n)

    @property
    def reads_beside(self) -> tuple[str, ...]:
        return (SOUND,)

    @property
    def numbers_beside(self) -> tuple[UnitStream, ...]:
        return (self.sound,)

    @property
    def media(self) -> MediaSpec | None:
        seconds = self.max_source_positions / 50  # the usual processor makes 100 frames of a second
        usual = {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": self.num_mel_bins,
            "chunk_length": int(seconds) if seconds.is_integer() else seconds,
        }
        return MediaBeside("audio", self.sound, self.decoder_start_token_id, usual)


def blocks(config: WhisperConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.whisper_blocks import whisper_blocks  # imports torch, which reading a config need not

    return whisper_blocks(config, env)


def rules(config: WhisperConfig, seq_length: int) -> list[Problem]:
    names = ("num_decoder_layers", "num_mel_bins", "max_source_positions", "max_position_embeddings")
    found = at_least("model", config, 1, *names) + at_least("model", config, 0, "decoder_start_token_id")
    if config.decoder_start_token_id >= config.vocab_size:
        because = {"model.vocab_size": config.vocab_size}
        found.append(problem("model", config, "decoder_start_token_id", "must be < vocab_size", because, (0,)))
    if config.hidden_size % max(1, config.num_attention_heads):
        because = {"model.num_attention_heads": config.num_attention_heads}
        valid = multiples(config.hidden_size, config.num_attention_heads)
        found.append(
            problem("model", config, "hidden_size", "must be a multiple of num_attention_heads", because, valid)
        )
    if config.hidden_size % 2 or config.hidden_size < 4:
        rule = "must be an even number >= 4: half of a fixed position is sines, half cosines"
        found.append(problem("model", config, "hidden_size", rule, {}, (config.hidden_size + 4 & ~3,)))
    if config.max_position_embeddings < seq_length:
        rule, because = "must be >= train.seq_length", {"train.seq_length": seq_length}
        found.append(problem("model", config, "max_position_embeddings", rule, because, (seq_length,)))
    return found


# key of config.json -> field
FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "encoder_ffn_dim": "intermediate_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "num_mel_bins": "num_mel_bins",
    "max_source_positions": "max_source_positions",
    "max_target_positions": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "decoder_start_token_id": "decoder_start_token_id",
    "init_std": "initializer_range",
}
KEYS = {
    **{name: integer(NEEDED) for name in ("vocab_size", "d_model", "encoder_layers", "decoder_layers")},
    **{name: integer(NEEDED) for name in ("encoder_attention_heads", "decoder_attention_heads")},
    **{name: integer(NEEDED) for name in ("encoder_ffn_dim", "decoder_ffn_dim")},
    "num_mel_bins": integer(80),
    "max_source_positions": integer(1500),
    "max_target_positions": integer(448),
    "decoder_start_token_id": integer(50257),
    "pad_token_id": integer_or_null(50256),
    "init_std": number(0.02),
    "tie_word_embeddings": switch(True),
    "is_encoder_decoder": switch(True),
    "activation_function": text("gelu"),
    "scale_embedding": switch(False),
    "apply_spec_augment": switch(False),
    **{name: number(0.0) for name in ("dropout", "attention_dropout", "activation_dropout")},
    **{name: number(0.0) for name in ("encoder_layerdrop", "decoder_layerdrop")},
}
ONLY: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (True,),
    "activation_function": ("gelu",),
    "scale_embedding": (False,),
    "apply_spec_augment": (False,),
    **{name: (0.0,) for name in ("dropout", "attention_dropout", "activation_dropout")},
    **{name: (0.0,) for name in ("encoder_layerdrop", "decoder_layerdrop")},
}


def from_hf(found: ConfigJson) -> WhisperConfig | None:
    v = found.values
    for name in ("attention_heads", "ffn_dim"):
        if v[f"decoder_{name}"] != v[f"encoder_{name}"]:
            found.odd.append(f"decoder_{name}={v[f'decoder_{name}']} (supported: encoder_{name})")
    heads = v["encoder_attention_heads"]
    if found.stated.get("num_key_value_heads", heads) != heads:  # transformers takes it for the encoder's heads
        found.odd.append(f"num_key_value_heads={found.stated['num_key_value_heads']!r} (supported: {heads})")
    if found.odd:
        return None
    layers = None if v["decoder_layers"] == v["encoder_layers"] else v["decoder_layers"]
    return WhisperConfig(**{name: v[key] for key, name in FIELDS.items()}, num_decoder_layers=layers)


def to_hf(config: WhisperConfig) -> dict[str, Any]:
    return {
        **{key: getattr(config, name) for key, name in FIELDS.items()},
        "decoder_layers": config.decoder_layers,
        "decoder_attention_heads": config.num_attention_heads,
        "decoder_ffn_dim": config.intermediate_size,
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "scale_embedding": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    decoder = model.get("num_decoder_layers")
    return {**model, "num_decoder_layers": model["num_hidden_layers"] if decoder is None else decoder}


def shrink(config: WhisperConfig, small: SmallSizes) -> WhisperConfig:
    """Recordings of a few rows. An encoder and a decoder of different depths stay different."""
    layers = max(1, small.layers - 1)
    return replace(
        config,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        intermediate_size=small.intermediate_size,
        num_hidden_layers=layers,
        num_decoder_layers=small.layers if config.decoder_layers != config.num_hidden_layers else None,
        num_attention_heads=small.heads,
        num_mel_bins=5,
        max_source_positions=max(4, small.seq_length // 2),
        max_position_embeddings=max(small.seq_length, 8),
        decoder_start_token_id=min(config.decoder_start_token_id, small.vocab_size - 1),
    )


FAMILY = Family(
    "whisper",
    WhisperConfig,
    blocks,
    architecture="WhisperForConditionalGeneration",
    tensors=TensorNames(
        prefix="model.",
        embedding="model.decoder.embed_tokens.weight",
        layer="model.encoder.layers.{}",
        head="proj_out.weight",
    ),
    rules=rules,
    keys=KEYS,
    other_names={
        "d_model": "hidden_size",
        "encoder_layers": "num_hidden_layers",
        "encoder_attention_heads": "num_attention_heads",
    },
    only=ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    shrink=shrink,
)
