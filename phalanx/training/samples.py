"""train.samples: prompts that the model continues as it trains, on the layout that trains it."""

from __future__ import annotations

from functools import cached_property, partial

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, DataError
from phalanx.base.log import Log
from phalanx.config.run import Run
from phalanx.engine.model import Model
from phalanx.inference.beside import TrainedModel
from phalanx.inference.chat_prompts import encoder_text
from phalanx.inference.engine import EngineOptions
from phalanx.inference.generate import ChatLine, TextEngine, read_prompts
from phalanx.inference.request import SamplingOptions
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.tokenizers import load_tokenizer

MOST_AT_ONCE = 64  # sequences: their keys and values lie beside what trains


@dataclass(frozen=True)
class Prompts:
    """Those of train.samples: texts (or ids decoded), and their tokens."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    tokenizer: Tokenizer

    @staticmethod
    def read(run: Run) -> Prompts | None:
        """None without train.samples. DataError for a file that cannot be read, and a prompt that cannot be continued:
        before ranks meet."""
        if run.train.samples is None or run.data.tokenizer is None:
            return None
        try:
            given = read_prompts(run.train.samples)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"train.samples={run.train.samples} cannot be read: {error}") from error
        plain = [each for each in given if not isinstance(each, ChatLine)]
        if len(plain) < len(given):
            raise DataError(
                f"train.samples={run.train.samples}: must hold texts or token ids, and some lines are chats"
            )
        tokenizer = load_tokenizer(run.data.tokenizer)
        encode = tokenizer.encode if run.model.decoder_start is None else partial(encoder_text, tokenizer)
        tokens = [tuple(encode(each)) or (tokenizer.eod or 0,) if isinstance(each, str) else each for each in plain]
        texts = [each if isinstance(each, str) else tokenizer.decode(list(each)) for each in plain]
        room, vocabulary = run.model.max_position_embeddings - run.train.samples_tokens, run.model.vocab_size
        for number, each in enumerate(tokens):
            where = f"train.samples={run.train.samples}, prompt {number}"
            if len(each) > room:
                raise DataError(
                    f"{where} has {len(each)} tokens: with train.samples_tokens={run.train.samples_tokens} and "
                    f"model.max_position_embeddings={run.model.max_position_embeddings} at most {room} fit"
                )
            if not all(0 <= token < vocabulary for token in each):
                raise DataError(f"{where} has tokens beyond model.vocab_size={vocabulary}")
        return Prompts(tuple(texts), tuple(tokens), tokenizer)


class TrainingSamples:
    """Continues prompts with a model between two of its steps. Made on all ranks together."""

    def __init__(self, model: Model, prompts: Prompts, log: Log):
        self._model, self._prompts, self._log = model, prompts, log

    @cached_property
    def _trained(self) -> TrainedModel:
        return TrainedModel(self._model, self._model.plan.run.train.timeout_s)

    def make(self) -> dict[str, str]:
        """Number of a prompt -> the prompt with its continuation, on rank 0; elsewhere nothing. Collective. Without
        memory for one sequence, a warning says so, and there is no text."""
        train, prompts = self._model.plan.run.train, self._prompts
        options = EngineOptions(
            sequences=min(MOST_AT_ONCE, len(prompts.tokens)),
            length=max(map(len, prompts.tokens)) + train.samples_tokens,
        )
        how = SamplingOptions(tokens=train.samples_tokens, temperature=train.samples_temperature, seed=train.seed)
        try:
            with self._trained.engine(options) as engine:
                ends = [] if prompts.tokenizer.eod is None else [prompts.tokenizer.eod]
                answers = list(TextEngine(engine, prompts.tokenizer, ends).generate(prompts.tokens, how))
        except ConfigError as error:  # on all ranks alike, before the first step of the engine
            if self._model.mesh.rank == 0:
                self._log.warn(f"no text of train.samples: {error}")
            return {}
        between = "" if self._model.plan.run.model.decoder_start is None else "\n"  # an answer to what an encoder reads
        return {
            str(answer.prompt): prompts.texts[answer.prompt] + between + answer.text
            for answer in sorted(answers, key=lambda answer: answer.prompt)
        }
