"""Loads a model without training state on this rank of a layout: from a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import math
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import precision
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.own_fields import made_of
from phalanx.base.registry import BUILT_IN
from phalanx.checkpoint.base import check_served_base
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.hf import model_config_from_hf
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.load import HeadWanted, load_adapters, load_weights
from phalanx.checkpoint.manifest import NAME, parse
from phalanx.comm.mesh import Mesh, local_device
from phalanx.config.check import sequences_unit
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data_parallel.buffers import Buffers
from phalanx.engine.adapter_start import initial_tensors
from phalanx.engine.build import build_for_inference
from phalanx.forecast.decide import make_plan
from phalanx.inference.adapters import ServedAdapters, with_adapter
from phalanx.models.model_config import ModelConfig
from phalanx.models.registry import family_of
from phalanx.nn.adapter import AdapterConfig, find_adapter
from phalanx.nn.module import Block
from phalanx.nn.moe import MoE
from phalanx.nn.objective import SEAM, TaskConfig, find_objective, usual_task
from phalanx.pipeline.execute import Handlers, Stages, execute
from phalanx.planning.plan import Plan, storing_all
from phalanx.schedule.actions import Instruction
from phalanx.sequence.batch import Batch

if TYPE_CHECKING:
    from phalanx.inference.pictures import PictureReader
    from phalanx.inference.recordings import SoundReader


def weights_folder(path: str) -> Path:
    """The Hugging Face folder meant by a path: a run (its newest checkpoint), a checkpoint, or such a folder itself."""
    if (Path(path) / "config.json").exists():
        return Path(path)
    return find(path) / "weights"


def run_of_folder(folder: Path, gpu: bool) -> Run:
    """The config of a folder's model as it is run without training: in bf16 on a GPU and in fp32 on a CPU, on one
    rank. Overrides may name another layout and precision."""
    run, config = run_of_model(model_config_from_hf(folder), adapters_of(folder), gpu), config_of(folder)
    invariant = bool(config.get("train", {}).get("batch_invariant", False))
    task = config.get("task", {}).get("name", "")
    if task in BUILT_IN[SEAM] and find_objective(task).makes_prefix:  # it says what the layers read
        run = replace(run, task=find_objective(task).Config(name=task))
    return replace(run, train=replace(run.train, batch_invariant=invariant))


def run_of_model(model: ModelConfig, lora: AdapterConfig | None, gpu: bool) -> Run:
    """The same of a model's config. ConfigError for a model that cannot be run without training."""
    length = min(1024, model.max_position_embeddings)
    train = TrainConfig(steps=1, global_batch=1, micro_batch=1, seq_length=length, precision="bf16" if gpu else "fp32")
    task: Any = usual_task(model)
    if model.reads_beside and getattr(task, "encoder_length", 0) is None:  # it makes an encoder's texts
        task = replace(task, encoder_length=length)
    return Run(model=model, train=train, lora=lora, task=task)


def without_data(run: Run) -> Run:
    """The run of a model that generates: no data is read, and a step has as much beside its text as its requests
    have."""
    room = {stream.name: 4 * stream.largest for stream in run.model.needs_room}
    texts: dict[str, Any] = {"packing": "online", "document_attention": True} if run.model.reads_beside else {}
    return replace(run, data=DataConfig(mock=True, room=room, **texts))


def refuse_further_streams(model: ModelConfig, what: str) -> None:
    """ConfigError for a model that reads more than a text, where nothing gives it that. what: is to be done with it."""
    numbers = [stream.name for stream in model.needs_room]
    named = [*(f"an {name}'s text" for name in model.reads_beside if name not in numbers), *numbers]
    if named:
        rule = f"reads {' and '.join(named)} beside its text, which {what} does not give it"
        raise ConfigError([Problem("model.family", model.family, rule)])


def refuse_sound(model: ModelConfig, what: str) -> None:
    """ConfigError for a model that hears recordings, which `what` does not give it."""
    if model.numbers_beside:
        rule = f"hears a recording, which {what} does not give it: phalanx generate RUN --prompts FILE, with lines "
        rule += '{"audio": "a.flac"}'
        raise ConfigError([Problem("model.family", model.family, rule)])


def check_generates(model: ModelConfig) -> None:
    """ConfigError for a model that generates no text: its tokens read what follows them, or it has no head."""
    if model.both_ways:
        rule = "reads both ways, so it does not continue text: take a decoder; of an encoder there are its loss "
        rule += "(phalanx eval) and the tasks of docs/encoders.md"
        raise ConfigError([Problem("model.family", model.family, rule)])
    if model.headless:
        rule = "leaves out what predicts tokens, so no text is generated: phalanx embed makes embeddings"
        raise ConfigError([Problem("model.head", "none", rule)])


def config_of(weights: Path) -> dict[str, Any]:
    """The config of the run whose checkpoint has this folder of weights; empty: there is no run."""
    if weights.name != "weights" or not (weights.parent / NAME).is_file():
        return {}
    return parse(weights.parent).config


def adapters_of(weights: Path) -> AdapterConfig | None:
    """The `lora` section of the run whose checkpoint has this folder of weights; None: there is none, or no run.
    ConfigError for a method of a package: nothing but the user's own word imports that."""
    given = config_of(weights).get("lora")
    if given is None:
        return None
    name = given["method"]
    if ":" in name:
        rule = "is code of a package, which is not imported here; its loss: phalanx eval CHECKPOINT lora.method=..."
        raise ConfigError([Problem("lora.method", name, rule, where=f"the config of {weights.parent}")])
    section: AdapterConfig = made_of(find_adapter(name).Config, "lora", given)
    return section


@dataclass(frozen=True)
class DrawnBase:
    """A base of adapters that was drawn at random and kept as quantized values, so that it is in no file. dtype: in
    which it was quantized."""

    seed: int
    dtype: torch.dtype

    def run_of(self, model: ModelConfig) -> Run:
        """A run that draws the same."""
        run = run_of_model(model, None, False)
        return replace(run, train=replace(run.train, seed=self.seed))


def drawn_base(weights: Path) -> DrawnBase | None:
    """Of the run whose checkpoint has this folder of weights; None: its base is in a folder, or it has none."""
    config = config_of(weights)
    lora, train = config.get("lora") or {}, config.get("train") or {}
    if lora.get("base", "bf16") == "bf16" or parse(weights.parent).base is not None:
        return None
    return DrawnBase(train["seed"], precision(train["precision"]).compute)


def load_all(weights: Path, model: ModelConfig, buffers: Buffers, mesh: Mesh) -> None:
    """Collective: the weights in a folder, and a base that has to be drawn anew."""
    drawn = drawn_base(weights)
    head: HeadWanted = "none" if model.headless else "the folder's"
    load_weights(weights, buffers, mesh, head, encodes=drawn is None)
    if drawn is not None:
        read = initial_tensors(drawn.run_of(model), drawn.dtype)
        for keeper, matrix in buffers.encoded:
            piece = matrix.source_piece
            keeper.encode(matrix, read(piece.name)[piece.box.slices()].to(keeper.weight))


def weights_alone(run: Run, world: int) -> Run:
    """The run without what only training needs: one micro-batch on each rank, of as many more sequences as tp needs to
    divide its tokens, whatever their length, and nothing is loaded but the named weights."""
    layout = run.layout
    dp = max(1, world // max(1, layout.tp * layout.cp * layout.pp))
    unit, micro_batch = sequences_unit(run), run.train.micro_batch
    micro_batch *= unit // math.gcd(unit, micro_batch)
    train = replace(run.train, micro_batch=micro_batch, global_batch=micro_batch * dp, rampup=None)
    lora = None if run.lora is None else replace(run.lora, init_from=None)
    return replace(run, train=train, lora=lora, init_from=None, checkpoint=CheckpointConfig(interval=1))


def without_idle_modules(run: Run) -> ModelConfig:
    """Its model without modules of multi-token prediction that would never draft, because layers keep a state. With
    adapters they stay: their files hold those of the modules too."""
    with_predictors = family_of(run.model).with_predictors
    if with_predictors is None or not run.model.scans or run.lora is not None:
        return run.model
    return with_predictors(run.model, 0)


def forward_only(run: Run) -> Run:
    """How it is computed: by cross entropy, whatever the objective (one that makes prefixes, or an encoder's text, says
    what is read); nothing is sharded, recomputed, captured or quantized, and experts accept all tokens."""
    layout = replace(
        run.layout,
        sharding=0,
        shard_group=None,
        shard_across="nothing",
        tp_overlap="off",
        ep_overlap="off",
        dp_overlap="off",
        dispatch="alltoall",
    )
    train = replace(storing_all(run).train, fp8=None, cuda_graphs="off", deterministic=False, freeze=[])
    task = run.task if find_objective(run.task.name).makes_prefix or run.model.reads_beside else TaskConfig()
    return replace(run, model=without_idle_modules(run), task=task, layout=layout, train=train)


def without_training(run: Run, world: int) -> Run:
    """The run as `world` ranks compute it forward alone."""
    return forward_only(weights_alone(run, world))


@dataclass(frozen=True)
class Outputs:
    """Of a batch: logits (R, vocabulary), and hidden (T / tp / cp, D), the input of the model's last block. With
    multi-token prediction that is the model's normed hidden state, which the first depth reads."""

    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class InferenceModel:
    """The weights and blocks of one rank.

    handlers  of the instructions that it carries out: those of its stages, or of a model that trains
    trains    the blocks are those of such a model, which has them back afterwards
    programs  by number of batches
    adapters  which of several a request may name; None: there are none
    pictures  reads the images of prompts; None: they have none
    sound     reads the recordings of prompts; None: they have none
    """

    plan: Plan
    mesh: Mesh
    stages: Stages
    handlers: Handlers
    trains: bool = False
    programs: dict[int, list[Instruction]] = field(default_factory=dict)
    adapters: ServedAdapters | None = None
    pictures: PictureReader | None = None
    sound: SoundReader | None = None

    def __post_init__(self) -> None:
        """Where all ranks that share experts compute the same step, all of its tokens go to all of them: they are few,
        and the host need not wait for how many go where."""
        for layer in self.routed:
            layer.dispatch = "allgather" if self.mesh.grid.dp == 1 else "alltoall"

    @property
    def routed(self) -> list[MoE]:
        """The layers with experts."""
        return [m for block in self.blocks for m in block.modules() if isinstance(m, MoE)]

    @property
    def capturable(self) -> bool:
        """Whether CUDA graphs can hold the forward: no message between stages, nothing that the host waits for, as in
        the exchange of sizes and in reference implementations, and no stream beside the text."""
        kernels = self.plan.env(self.mesh.at).ops.kernels != "plain" and self.dtype != torch.float64
        waits = any(layer.dispatch == "alltoall" for layer in self.routed)
        config = self.plan.run.model
        alone = self.mesh.grid.pp == 1 and not self.trains and not config.reads_beside and not config.reads_units
        return self.mesh.device.type == "cuda" and alone and kernels and not waits

    @property
    def in_step(self) -> bool:
        """Whether replicas must make each step together: they share experts, or parts of weights."""
        grid, plan = self.mesh.grid, self.plan
        experts = grid.ep > 1 and bool(plan.run.model.routed_experts)
        return grid.dp > 1 and (experts or (self.trains and plan.sharding.level == 3))

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn here: on the last stage of a pipeline."""
        return self.mesh.at.pp == self.mesh.grid.pp - 1

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's logits are to have the same bits in any batch (train.batch_invariant)."""
        return self.plan.run.train.batch_invariant

    @property
    def blocks(self) -> list[Block]:
        return [block for _, segment in sorted(self.stages.segments.items()) for block in segment]

    @property
    def dtype(self) -> torch.dtype:
        """That the model computes in."""
        return self.plan.env(self.mesh.at).weights.dtype

    def logits(self, batches: list[Batch]) -> list[Tensor]:
        """(R, vocabulary) of each batch of sequences that go on, for the tokens at `paged.ends`; nothing on ranks
        without the model's last block. Collective over tp, pp and the ranks that share experts."""
        return [made.logits for made in self.outputs(batches)]

    @torch.no_grad()
    def outputs(self, batches: list[Batch]) -> list[Outputs]:
        """The same, with the input of the model's last block."""
        stages, given = self.stages, dict[int, Tensor]()

        def finish(block: Block, x: Tensor, batch: Batch) -> Tensor:
            given[len(given)] = x  # the last stage has one batch after another
            return last_logits(block, x, batch)

        stages.finish = finish
        stages.begin(batches, seed=None)
        execute(self.program(len(batches)), self.handlers)
        stages.end()
        return [Outputs(stages.outputs[number], given[number]) for number in sorted(stages.outputs)]

    def program(self, count: int) -> list[Instruction]:
        """The instructions of this rank for so many batches."""
        if count not in self.programs:
            proved = self.plan.proved_program(count, backward=False)
            self.programs[count] = [i for i in proved.lists[self.mesh.at.pp] if type(i) in self.handlers]
        return self.programs[count]


def last_logits(block: Block, x: Tensor, batch: Batch) -> Tensor:
    """What a model's last block makes of the tokens that a batch asks for."""
    if batch.paged is None:
        raise RuntimeError("a batch of generation says which tokens' logits it wants")
    logits: Tensor = block.logits(x, batch.paged.ends)  # type: ignore[operator]
    return logits


def load_model(folder: Path, plan: Plan, mesh: Mesh, adapters: ServedAdapters | None = None) -> InferenceModel:
    """Collective. adapters: those of `with_adapters`, by which the plan was made. CheckpointError for those of one of
    our checkpoints whose base has other bytes."""
    for owner in [] if adapters is None else dict.fromkeys(f.owner for f in adapters.folders.values()):
        if owner is not None:
            check_served_base(owner, folder, mesh.world)
    buffers, stages = build_for_inference(plan, mesh)
    load_all(folder, plan.run.model, buffers, mesh)
    if adapters is not None:
        load_adapters(adapters.index, adapters.receipts, buffers, mesh)
    readers = media_readers(plan.run.model, folder)
    model = InferenceModel(plan, mesh, stages, stages.handlers(), adapters=adapters, **readers)
    for where in stages.segments:
        stages.settle(where)
    stages.settles = False  # their weights do not change again
    return model


class MediaReaders(TypedDict):
    """What reads the media of a model's prompts; None: it reads none."""

    pictures: PictureReader | None
    sound: SoundReader | None


def media_readers(model: ModelConfig, weights: Path) -> MediaReaders:
    """DataError if what says how does not fit."""
    if model.media is None:
        return {"pictures": None, "sound": None}
    from phalanx.inference.pictures import PictureReader  # Pillow: start-up time of models without images
    from phalanx.inference.recordings import SoundReader

    processor = config_of(weights).get("data", {}).get("processor")
    readers = PictureReader.of(model, weights, processor), SoundReader.of(model, weights, processor)
    return {"pictures": readers[0], "sound": readers[1]}


def load_alone(folder: Path, adapter: str | None = None) -> InferenceModel:
    """On this process alone. adapter: a folder, whose adapter is added for every request."""
    gpu = torch.cuda.is_available()
    run, served = with_adapter(without_data(run_of_folder(folder, gpu)), adapter)
    plan = make_plan(without_training(run, 1), 1)
    return load_model(folder, plan, Mesh(plan.grid, 0, local_device("cuda" if gpu else "cpu", 0)), served)
