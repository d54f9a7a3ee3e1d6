"""`phalanx serve` on each rank: rank 0 listens, all ranks compute."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.base.garbage import settled
from phalanx.base.log import Log
from phalanx.base.placement import Placement
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.data.files import TOKENIZER_FILES
from phalanx.engine.meeting import device_of, identity, joined_mesh
from phalanx.forecast.decide import make_plan
from phalanx.inference.adapters import with_adapters
from phalanx.inference.drafter import Drafts
from phalanx.inference.embedder import embedder_folder, load_embedder
from phalanx.inference.embedding_engine import EmbeddingEngine
from phalanx.inference.ends import end_tokens
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import load_model, without_training
from phalanx.inference.recordings import SpeechPrompts
from phalanx.inference.request import EngineLoad, Event, Prompt, SamplingOptions
from phalanx.retrieval.prompting import PassageAdder
from phalanx.retrieval.retriever import Lookup
from phalanx.sequence.sample import Pooling
from phalanx.server.keys import read_keys
from phalanx.server.listen import HttpServer, is_loopback, open_socket
from phalanx.server.served import ServedEmbedder, ServedModel
from phalanx.server.service import ServerLimits
from phalanx.text.chat_template import load_chat_template
from phalanx.text.marked import TextMarks
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.tokenizers import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """weights: a Hugging Face folder or a checkpoint's. name: that clients ask for. sequences: generated at once;
    queue: that run or wait at once. length: of a sequence; None: the model's positions. memory_gib: for what is
    remembered, on each rank; pages: its dtype ("model", "fp8"). drain_seconds: for running requests when the server is
    to stop. drafts: of tokens, which the model checks several at a time. prefix_states: of prompts' beginnings that
    recurrent layers keep. adapters: folders of LoRA adapters, by the names of the models that they make. pooling: of a
    model whose folder does not say how embeddings are made. passages: what is looked up for prompts, and the file of
    the template that puts it there."""

    weights: str
    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: str | None = None
    sequences: int = 64
    queue: int = 256
    length: int | None = None
    memory_gib: float | None = None
    pages: str = "model"
    drain_seconds: float = 60.0
    drafts: Drafts | None = None
    prefix_states: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)
    pooling: Pooling | None = None
    passages: tuple[Lookup, str | None] | None = None


class RunEngine:
    """The engine as the server asks it."""

    def __init__(self, engine: Engine, name: str):
        self._engine = engine
        self.model_name = name
        self.positions = engine.positions

    @property
    def idle(self) -> bool:
        return self._engine.idle

    def submit(
        self, prompt: Sequence[int] | Prompt, options: SamplingOptions, priority: int = 0, deadline: float | None = None
    ) -> int:
        return self._engine.submit(prompt, options, priority, deadline)

    def cancel(self, number: int) -> None:
        self._engine.cancel(number)

    def step(self) -> list[Event]:
        return self._engine.step()

    def load(self) -> EngineLoad:
        return self._engine.load()


def serve_rank(run: Run, placement: Placement, options: ServeOptions) -> None:
    """Until it is asked to stop, or the engine fails. ConfigError if the address or the keys cannot be had."""
    with ExitStack() as after:
        first = placement.rank == 0
        listener = after.enter_context(open_socket(options.host, options.port)) if first else None
        keys = read_keys(options.api_keys) if first and options.api_keys else None
        mesh, _ = after.enter_context(joined_mesh(run, placement, identity(run, device_of(run, placement))))
        # before the engine, which takes the memory that is free
        adder = PassageAdder(*options.passages) if first and options.passages is not None else None
        engine = load_engine(run, mesh, options)
        after.enter_context(settled())
        if listener is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # rank 0 lets requests end, and the others with them
            engine.follow()
            return
        model, log = replace(served_model(options, engine), passages=adder), Log()
        limits = ServerLimits(sequences=options.queue, drain_seconds=options.drain_seconds)
        asked = engine if isinstance(engine, EmbeddingEngine) else RunEngine(engine, options.name)
        server = HttpServer(model, asked, listener, log, limits, keys)
        what = "a chat page; " if model.embeds is None and model.speech is None else ""
        log.info(f"{options.name} is served at {server.url} ({what}OpenAI's API: {server.url}/v1)")
        for text in notes(model, server, keys is not None):
            log.info(text)
        server.run()
        engine.close()


def load_engine(run: Run, mesh: Mesh, options: ServeOptions) -> Engine | EmbeddingEngine:
    """Collective. Of a model without a head, the engine makes embeddings."""
    if run.model.headless:
        folder = embedder_folder(options.weights, options.pooling)
        return EmbeddingEngine(load_embedder(folder, run, mesh), options.name, run.train.timeout_s)
    run, adapters = with_adapters(run, options.adapters)
    plan = make_plan(without_training(run, mesh.world.size), mesh.world.size)
    model = load_model(Path(options.weights), plan, mesh, adapters)
    wanted = EngineOptions(
        sequences=options.sequences,
        length=options.length,
        memory_gib=options.memory_gib,
        pages=options.pages,
        capture=True,
        drafts=options.drafts,
        prefix_states=options.prefix_states,
    )
    return Engine(model, wanted, run.train.timeout_s, tokenizer=tokenizer_in(Path(options.weights)))


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """None: the folder holds none."""
    return load_tokenizer(folder) if any((folder / name).exists() for name in TOKENIZER_FILES) else None


def served_model(options: ServeOptions, engine: Engine | EmbeddingEngine) -> ServedModel:
    folder = Path(options.weights)
    tokenizer = tokenizer_in(folder)
    if isinstance(engine, EmbeddingEngine):
        embedder = engine.embedder
        marks = None if tokenizer is None else TextMarks.of(str(folder))
        embeds = ServedEmbedder(embedder.width, embedder.facts.normalized, marks)
        vocab_size = embedder.model.plan.run.model.vocab_size
        return ServedModel(options.name, engine.positions, tokenizer, vocab_size=vocab_size, embeds=embeds)
    template = load_chat_template(folder) if tokenizer else None
    vocab_size = engine.model.plan.run.model.vocab_size
    ends = end_tokens(folder, tokenizer, template)
    speech = None
    if engine.model.sound is not None:
        if tokenizer is None:
            raise DataError(f"{folder}: holds no tokenizer, which writes the text of recordings")
        speech = SpeechPrompts.of(folder, tokenizer, engine.model.sound)
    return ServedModel(
        options.name,
        engine.positions,
        tokenizer,
        template,
        ends,
        vocab_size,
        engine.grammars,
        engine.adapters,
        pictures=engine.model.pictures,
        encodes=engine.encodes,
        speech=speech,
    )


def notes(model: ServedModel, server: HttpServer, has_keys: bool) -> list[str]:
    """What somebody who starts it should know."""
    found = []
    if model.tokenizer is None:
        where = "/v1/completions" if model.embeds is None else "/v1/embeddings"
        found.append(f"the model's folder holds no tokenizer: token ids alone are served, on {where}")
    elif model.embeds is not None:
        found.append(f"it makes embeddings of {model.embeds.width} features, on /v1/embeddings")
    elif model.speech is not None:
        found.append("it writes the text of recordings, on /v1/audio/transcriptions")
    elif model.template is None:
        found.append("the model's folder holds no chat template: texts are continued, chats are refused")
    if not is_loopback(server.listener) and not has_keys:
        found.append("warning: whoever reaches this address may use the model: --api-keys FILE asks for a key")
    return found
