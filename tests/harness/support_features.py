"""The features of the support matrix, each a named change of one tiny run, and the run that has two of them on the
fewest ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from phalanx.config.run import Fp8Config, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import OVERHEAD, rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.models.bert import BertConfig
from phalanx.models.deepseek_v3 import DeepseekV3Config
from phalanx.models.falcon_h1 import FalconH1Config
from phalanx.models.gemma2 import Gemma2Config
from phalanx.models.gemma3 import Gemma3Config
from phalanx.models.gemma3_text import Gemma3TextConfig
from phalanx.models.gemma4_text import Gemma4TextConfig
from phalanx.models.glm4_moe import Glm4MoEConfig
from phalanx.models.gpt2 import GPT2Config
from phalanx.models.gpt_neox import GPTNeoXConfig
from phalanx.models.gpt_oss import GptOssConfig
from phalanx.models.kimi_k25 import KimiK25Config
from phalanx.models.kimi_linear import KimiLinearConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.llama4_text import Llama4TextConfig
from phalanx.models.llava import LlavaConfig
from phalanx.models.mamba2 import Mamba2Config
from phalanx.models.minimax_m2 import MiniMaxM2Config
from phalanx.models.mistral import MistralConfig
from phalanx.models.mixtral import MixtralConfig
from phalanx.models.modernbert import ModernBertConfig
from phalanx.models.nemotron_h import NemotronHConfig
from phalanx.models.olmo2 import Olmo2Config
from phalanx.models.olmo3 import Olmo3Config
from phalanx.models.olmo_hybrid import OlmoHybridConfig
from phalanx.models.phi3 import Phi3Config
from phalanx.models.qwen2 import Qwen2Config
from phalanx.models.qwen2_5_vl import Qwen25Vision, Qwen25VLConfig
from phalanx.models.qwen3 import Qwen3Config
from phalanx.models.qwen3_5 import Qwen35Config
from phalanx.models.qwen3_5_moe import Qwen35MoEConfig
from phalanx.models.qwen3_moe import Qwen3MoEConfig
from phalanx.models.qwen3_next import Qwen3NextConfig
from phalanx.models.qwen3_vl import Qwen3Vision, Qwen3VLConfig
from phalanx.models.qwen_vision import LearnedVision
from phalanx.models.registry import load_family
from phalanx.models.rope import RopeScaling
from phalanx.models.smollm3 import SmolLM3Config
from phalanx.models.t5 import T5Config
from phalanx.models.vision_config import VisionConfig
from phalanx.models.whisper import WhisperConfig
from phalanx.nn.adapter import find_adapter
from phalanx.nn.objective import TaskConfig, find_objective
from phalanx.optim.config import OptimConfig

DENSE = (
    "llama",
    "qwen3",
    "mistral",
    "qwen2",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "smollm3",
    "gemma4_text",
)
LATENT = ("deepseek_v3", "kimi_k25")
GROUPED = ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "minimax_m2", "glm4_moe")
SCANS = ("mamba2", "nemotron_h", "falcon_h1", "qwen3_next", "kimi_linear", "olmo_hybrid")
OF_ATTENTION = (*GROUPED[:3], *LATENT, *GROUPED[3:])
EXPERTS = (*OF_ATTENTION, "nemotron_h", "qwen3_next", "kimi_linear", "qwen3_5_moe")
DECODERS = (*DENSE, "gpt2", "gpt_neox", *OF_ATTENTION, "kinds", *SCANS)
ENCODERS = ("bert", "modernbert")
PICTURES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "qwen3_5", "qwen3_5_moe")
FAMILIES = (*DECODERS, *ENCODERS, "t5", "embeddings", *PICTURES, "whisper")
FAMILY_NAMES = {"kinds": "chunks, caps, bias, both ways", "embeddings": "modernbert, embeddings"}
"""Of a family that is not ours, whose layers attend in other ways: the ways; of one without a head: what it makes."""
MIXED = ("sliding_attention", "full_attention")  # kinds of the two layers
TOWER = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2)
Also = Literal["evaluate", "resume", "export", "init", "shadow", "replicas", "ramp-up", "skip"]


def model_of(family: str, unit: int, length: int) -> Any:
    """Two layers whose linears are multiples of `unit` on each of two tp ranks; odd vocabulary. Families that have
    experts have four."""
    common: dict[str, Any] = dict(vocab_size=131, hidden_size=2 * unit, num_hidden_layers=2)
    heads = dict(**common, intermediate_size=2 * unit, num_attention_heads=8, num_key_value_heads=4, head_dim=unit // 2)
    chosen = dict(num_experts_per_tok=2, router_aux_loss_coef=0.1, router_z_loss_coef=0.01)
    latent = dict(
        q_lora_rank=unit,
        kv_lora_rank=unit,
        qk_nope_head_dim=unit,
        qk_rope_head_dim=unit,
        v_head_dim=unit,
        num_attention_heads=4,
    )
    grouped = dict(
        first_k_dense_replace=1,
        n_routed_experts=4,
        moe_intermediate_size=2 * unit,
        n_group=2,
        topk_group=1,
        router_bias_update_rate=0.05,
    )
    match family:
        case "llama":
            return LlamaConfig(**heads)
        case "qwen3":
            return Qwen3Config(**heads)
        case "mistral":
            return MistralConfig(**heads, sliding_window=5)
        case "qwen2":
            return Qwen2Config(**heads, sliding_window=9, max_window_layers=1)
        case "olmo2":
            return Olmo2Config(**heads)
        case "olmo3":
            return Olmo3Config(**heads, sliding_window=5, layer_types=MIXED, rope_local_base_freq=700.0)
        case "gemma2":
            return Gemma2Config(**heads, sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
        case "gemma3_text":
            return Gemma3TextConfig(**heads, sliding_window=5, layer_types=MIXED)
        case "gemma4_text":
            own = dict(global_head_dim=unit, num_global_key_value_heads=2, attention_k_eq_v=True)
            more = dict(hidden_size_per_layer_input=unit, num_hidden_layers=4, num_kv_shared_layers=2)
            return Gemma4TextConfig(**heads | more, **own, sliding_window=5, layer_types=MIXED * 2)
        case "phi3":
            return Phi3Config(**heads, sliding_window=9)
        case "gpt2":
            own = dict(
                hidden_size=4 * unit, num_attention_heads=8, intermediate_size=2 * unit, max_position_embeddings=length
            )
            return GPT2Config(**{**common, **own})
        case "smollm3":
            return SmolLM3Config(**heads, no_rope_layer_interval=2, sliding_window=5, tie_word_embeddings=False)
        case "gpt_neox":
            own = dict(intermediate_size=2 * unit, num_attention_heads=4, partial_rotary_factor=0.5)
            return GPTNeoXConfig(**common, **own)
        case "mixtral":
            return MixtralConfig(**heads, **chosen, num_local_experts=4)
        case "qwen3_moe":
            return Qwen3MoEConfig(
                **heads, **chosen, num_experts=4, moe_intermediate_size=2 * unit, decoder_sparse_step=2
            )
        case "gpt_oss":
            return GptOssConfig(**heads, **chosen, num_local_experts=4, sliding_window=5)
        case "deepseek_v3":
            return DeepseekV3Config(**common, **latent, **chosen, **grouped, intermediate_size=2 * unit)
        case "kimi_k25":
            return KimiK25Config(**common, **latent, **chosen, **grouped, intermediate_size=2 * unit)
        case "glm4_moe":
            return Glm4MoEConfig(**heads, **chosen, **grouped, use_qk_norm=True)
        case "minimax_m2":
            return MiniMaxM2Config(**heads, **chosen, num_local_experts=4, router_bias_update_rate=0.05)
        case "llama4_text":
            own = dict(num_local_experts=4, intermediate_size_mlp=4 * unit, interleave_moe_layer_step=2)
            return Llama4TextConfig(
                **heads, **chosen, **own, no_rope_layer_interval=2, attention_chunk_size=5, floor_scale=3
            )
        case "mamba2":
            own = dict(num_heads=2 * unit, head_dim=2, n_groups=4, state_size=unit, conv_kernel=3)
            return Mamba2Config(**common, **own)
        case "nemotron_h":
            kinds = ("linear_attention", "moe", "full_attention", "mlp")
            scan = dict(mamba_num_heads=2 * unit, mamba_head_dim=2, n_groups=4, ssm_state_size=unit, conv_kernel=3)
            own = dict(num_hidden_layers=4, layers_block_type=kinds, moe_shared_expert_intermediate_size=2 * unit)
            of_groups = {k: v for k, v in grouped.items() if k != "first_k_dense_replace"}
            return NemotronHConfig(**heads | own, **chosen, **of_groups, **scan)
        case "qwen3_next":
            delta = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_conv_kernel_dim=3)
            sizes = dict(linear_key_head_dim=unit, linear_value_head_dim=unit, head_dim=2 * unit)
            own = dict(num_experts=4, moe_intermediate_size=2 * unit, shared_expert_intermediate_size=unit)
            kinds = ("linear_attention", "full_attention")
            return Qwen3NextConfig(**heads | sizes, **chosen, **own, **delta, layer_types=kinds)
        case "kimi_linear":
            own = dict(linear_num_heads=8, linear_head_dim=unit, linear_conv_kernel_dim=3, intermediate_size=2 * unit)
            kinds = ("linear_attention", "full_attention")
            whole = {k: v for k, v in latent.items() if k != "q_lora_rank"}
            kept = {k: v for k, v in grouped.items() if k != "router_bias_update_rate"}
            return KimiLinearConfig(**common, **whole, **chosen, **kept, **own, layer_types=kinds)
        case "olmo_hybrid":
            delta = dict(linear_num_key_heads=8, linear_num_value_heads=8, linear_conv_kernel_dim=3)
            sizes = dict(linear_key_head_dim=unit, linear_value_head_dim=unit)
            return OlmoHybridConfig(**heads, **delta, **sizes, layer_types=("linear_attention", "full_attention"))
        case "qwen3_5" | "qwen3_5_moe":
            delta = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_conv_kernel_dim=3)
            sizes = dict(linear_key_head_dim=unit, linear_value_head_dim=unit, head_dim=2 * unit)
            tower = LearnedVision(**TOWER, patch_size=2, num_position_embeddings=9)
            pairs = unit // 4  # a quarter of a head is rotated
            seen = dict(image_token_id=7, mrope_section=(pairs - 1, 1, 0), vision=tower)
            seen |= dict(layer_types=("linear_attention", "full_attention"))
            if family == "qwen3_5":
                return Qwen35Config(**heads | sizes, **delta, **seen)
            own = dict(num_experts=4, moe_intermediate_size=2 * unit, shared_expert_intermediate_size=unit)
            dense = {k: v for k, v in heads.items() if k != "intermediate_size"}
            return Qwen35MoEConfig(**dense | sizes, **chosen, **own, **delta, **seen)
        case "falcon_h1":
            scan = dict(mamba_n_heads=2 * unit, mamba_d_head=2, mamba_n_groups=4, mamba_d_state=unit, mamba_d_conv=3)
            scales = dict(
                key_multiplier=0.6, lm_head_multiplier=0.3, mlp_multipliers=(0.9, 0.6), ssm_out_multiplier=0.4
            )
            own = dict(ssm_multipliers=(0.4, 0.3, 0.7, 0.5, 0.8), attention_out_multiplier=0.9)
            return FalconH1Config(**heads, **scan, **scales, **own)
        case "kinds":
            return load_family("tests.outside.kinds:FAMILY").config(
                **heads, family="tests.outside.kinds:FAMILY", attends="chunk window"
            )
        case "bert":
            own = dict(intermediate_size=2 * unit, num_attention_heads=4, max_position_embeddings=length)
            return BertConfig(**common, **own)
        case "modernbert":
            own = dict(intermediate_size=2 * unit, num_attention_heads=4, local_attention=6)
            return ModernBertConfig(**common, **own)
        case "embeddings":
            return replace(model_of("modernbert", unit, length), head="none")
        case "llava":
            vision = VisionConfig(**TOWER, image_size=6, patch_size=3)
            return LlavaConfig(**heads, image_token_id=7, vision=vision)
        case "qwen2_5_vl":
            tower = Qwen25Vision(**TOWER, patch_size=2, window_size=8, fullatt_block_indexes=(1,))
            return Qwen25VLConfig(**{**heads, "head_dim": 8}, image_token_id=7, mrope_section=(2, 1, 1), vision=tower)
        case "qwen3_vl":
            own = dict(num_position_embeddings=9, deepstack_visual_indexes=(0, 1))
            tower = Qwen3Vision(**TOWER, patch_size=2, **own)
            return Qwen3VLConfig(**{**heads, "head_dim": 8}, image_token_id=7, mrope_section=(2, 1, 1), vision=tower)
        case "gemma3":
            vision = VisionConfig(**TOWER, tower="siglip", image_size=12, patch_size=3, hidden_act="gelu_pytorch_tanh")
            own = dict(image_token_id=7, boi_token_id=8, eoi_token_id=9, mm_tokens_per_image=4, vision=vision)
            return Gemma3Config(**heads, **own, sliding_window=3, layer_types=MIXED)
        case "whisper":
            own = dict(intermediate_size=2 * unit, num_attention_heads=8, num_decoder_layers=3, num_mel_bins=5)
            return WhisperConfig(
                **{**common, "hidden_size": 4 * unit},
                **own,
                max_source_positions=8,
                max_position_embeddings=length,
                decoder_start_token_id=3,
            )
        case "t5":
            own = dict(intermediate_size=2 * unit, num_attention_heads=8, head_dim=unit // 2, num_decoder_layers=3)
            return T5Config(**common, **own, relative_attention_num_buckets=8, relative_attention_max_distance=10)
    raise KeyError(family)


@dataclass(frozen=True)
class Feature:
    """A change of the run.

    families   that have it; the first that both features of a pair have is taken
    kind       of several features of one kind a run has one
    model, layout, train, optim, fp8, lora   values of these sections
    least      ZeRO stage that it needs at least
    dp, data   ranks of dp, and of dp and cp together, that it needs at least
    reads      values of the section `data`
    documents  several in a sequence ("packed": and padding), where `reads` packs none
    micro      micro-batches of a rank
    budget     of memory for activations: half of what they take
    unit       sizes of linears are multiples of it
    also       what is done beside training
    near       compared with float64 as one process in the same precision is, rather than to 1e-9
    """

    name: str
    group: str
    kind: str = ""
    families: tuple[str, ...] = FAMILIES
    model: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    fp8: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    reads: dict[str, Any] = field(default_factory=dict)
    least: int = 0
    dp: int = 1
    data: int = 1
    micro: int = 1
    documents: bool | str = False
    budget: bool = False
    unit: int = 8
    also: Also | None = None
    near: bool = False


def family(name: str) -> Feature:
    return Feature(FAMILY_NAMES.get(name, name), "Models", "family", (name,))


def model(name: str, families: tuple[str, ...] = FAMILIES, kind: str = "", **changes: Any) -> Feature:
    return Feature(name, "Models", kind, families, model=changes)


def ranks(
    name: str,
    kind: str,
    families: tuple[str, ...] = FAMILIES,
    dp: int = 1,
    data: int = 1,
    micro: int = 1,
    **layout: Any,
) -> Feature:
    return Feature(name, "Layout", kind, families, layout=layout, dp=dp, data=data, micro=micro)


def packed(name: str, **reads: Any) -> Feature:
    """T5 packs whatever it reads, and needs a tokenizer for files."""
    return Feature(name, "Data", "documents", DECODERS, reads=reads)


def sharded(name: str, kind: str = "level", least: int = 0, data: int = 2, **layout: Any) -> Feature:
    return Feature(name, "Sharding", kind, layout=layout, least=least, data=data, micro=2)


def recipe(name: str, unit: int = 16) -> Feature:
    return Feature(f"FP8 {name}", "Precision", "recipe", fp8={"recipe": name}, unit=unit)


def made_again(
    name: str, families: tuple[str, ...] = FAMILIES, kind: str = "recompute", budget: bool = False, **train: Any
) -> Feature:
    return Feature(name, "Memory", kind, families, train=train, budget=budget)


def beside(name: str, also: Also, **changes: Any) -> Feature:
    return Feature(name, "Beside training", "beside", also=also, **changes)


ROTARY = tuple(f for f in DECODERS if f not in ("gpt2", "mamba2", "nemotron_h", "kimi_linear", "olmo_hybrid"))
KEYS = (*DENSE, *GROUPED)  # families with heads of keys and values of their own number
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)

CORPUS = "documents"  # prefix of the file that a trial with packing gets
SMALL_BUCKETS = (
    0  # MiB: each block has its own; the config's rules want at least 1, which would hold the whole of these models
)

FEATURES = (
    *(family(name) for name in FAMILIES),
    model(
        "tied embeddings",
        tuple(f for f in FAMILIES if f not in ("nemotron_h", "kimi_linear")),
        tie_word_embeddings=True,
    ),
    model("one key-value head", KEYS, num_key_value_heads=1),
    model(
        "sliding window",
        ("mistral", "qwen2", "gpt_oss", "olmo3", "gemma2", "gemma3_text", "phi3", "smollm3", "gemma4_text"),
    ),
    model("attention sinks", ("gpt_oss",)),
    model("scaled rotary embedding", tuple(f for f in ROTARY if f not in ("phi3", "llama4_text")), rope_scaling=YARN),
    model("further tokens (MTP)", (*LATENT, "glm4_moe"), num_nextn_predict_layers=1),
    model("capacity of experts", EXPERTS, expert_capacity_factor=1.0, expert_capacity_drop="position"),
    model("balance of each sequence", EXPERTS, "balance", router_aux_loss_scope="sequence"),
    model("balance of the global batch", EXPERTS, "balance", router_aux_loss_scope="global_batch"),
    model("dropout", ("gpt2", "gpt_neox"), dropout=0.1),
    model("attention dropout", ("gpt2", "gpt_neox"), attention_dropout=0.1),
    ranks("tp", "", tp=2),
    ranks("tp in the matmuls", "", tp=2, tp_overlap="on"),
    ranks("pp, GPipe", "schedule", micro=2, pp=2, schedule="gpipe"),
    ranks("pp, 1F1B", "schedule", micro=2, pp=2),
    ranks("pp, interleaved", "schedule", micro=2, pp=2, virtual_stages=2),
    ranks("pp, ZB-H1 (split backward)", "schedule", micro=2, pp=2, schedule="zb_h1"),
    ranks("pp, stages given", "stages", micro=2, pp=2, stages=()),
    ranks("dp", "", dp=2),
    ranks("dp, images of both ranks", "", PICTURES, dp=2, media_group=2),
    replace(ranks("cp of each document (dynamic)", "", cp=2, cp_degree="dynamic"), documents="packed"),
    ranks("cp, ring", "cp", cp=2, cp_attention="ring"),
    ranks("cp, all-gather", "cp", cp=2, cp_attention="allgather"),
    ranks("cp, heads (Ulysses)", "cp", cp=2, cp_ulysses=2),
    ranks("cp, heads and ring", "cp", cp=4, cp_ulysses=2),
    ranks("ep, all-to-all", "dispatch", EXPERTS, ep=2, dispatch="alltoall"),
    ranks("ep, all-gather", "dispatch", EXPERTS, ep=2, dispatch="allgather"),
    ranks("ep, all-gather in memory", "dispatch", EXPERTS, ep=2, dispatch="allgather", ep_overlap="on"),
    ranks("ep, push", "dispatch", EXPERTS, ep=2, dispatch="push"),
    ranks("etp", "", EXPERTS, etp=2),
    sharded("level 0", sharding=0),
    sharded("level 1", sharding=1),
    sharded("level 2", sharding=2),
    sharded("level 3", sharding=3),
    sharded("level 3, weights kept", sharding=3, reshard_after_forward=False),
    sharded("no prefetch", "", 2, prefetch=0),
    sharded("copies through shared memory", "", 1, dp_overlap="on"),
    sharded("groups", "groups", 1, 4, shard_group=2),
    sharded("groups, optimizer over all", "groups", 1, 4, shard_group=2, shard_across="optimizer"),
    Feature("places for CUDA graphs", "Sharding", train={"cuda_graphs": "on"}, least=2, data=2, micro=2),
    Feature("large buckets", "Sharding", layout={"bucket_mb": 100}),
    Feature("attention inside documents", "Data", "documents", DECODERS, documents=True),
    packed("packing, online", packing="online"),
    packed("packing, offline", packing="offline"),
    packed("packing, attention across", packing="online", document_attention=False),
    Feature("accumulation", "Data", micro=3),
    Feature("2 sequences a micro-batch", "Data", train={"micro_batch": 2}),
    made_again("recompute pointwise", recompute="pointwise"),
    made_again("recompute selective", recompute="selective"),
    made_again("recompute full", recompute="full"),
    made_again("recompute for long sequences", recompute="long"),
    made_again("recompute by op", recompute_ops=["norm", "qkv", "up"]),
    made_again("recompute experts", EXPERTS, recompute_ops=["experts"]),
    made_again("recompute by budget", budget=True),
    made_again("frozen attention", ("gpt2", *ROTARY), "freeze", freeze=["*att[en]*"]),
    made_again("frozen first blocks", ROTARY, "freeze", freeze=["*embed_[ti]*", "*layers.0.*"]),
    made_again("frozen experts", EXPERTS, "freeze", freeze=["*.experts.*"]),
    Feature("LoRA", "Memory", "freeze", lora={"rank": 3, "alpha": 5.0}),
    Feature("QLoRA (NF4)", "Memory", "freeze", lora={"rank": 3, "alpha": 5.0, "base": "nf4"}),
    Feature("DoRA", "Memory", "freeze", lora={"rank": 3, "alpha": 5.0, "method": "dora"}),
    Feature("LoRA with dropout", "Memory", "freeze", (*DENSE, "gpt2"), lora={"rank": 3, "alpha": 5.0, "dropout": 0.3}),
    made_again("offload", kind="", offload_layers=1),
    Feature("fp32", "Precision", "precision", train={"precision": "fp32"}, near=True),
    Feature("bf16", "Precision", "precision", train={"precision": "bf16"}, near=True),
    Feature("fp16", "Precision", "precision", train={"precision": "fp16", "loss_scale": 128.0}, near=True),
    recipe("tensorwise"),
    recipe("delayed"),
    recipe("rowwise"),
    recipe("blockwise", 128),
    recipe("mxfp8", 32),
    recipe("nvfp4"),
    Feature("FP8 experts, not attention", "Precision", families=EXPERTS, fp8={"exclude": ["*attn*"]}, unit=16),
    Feature("moments in bf16", "Precision", "moments", optim={"moments": "bf16"}),
    Feature("moments in FP8", "Precision", "moments", optim={"moments": "fp8"}),
    Feature("deterministic", "Precision", train={"deterministic": True}, micro=2),
    Feature("Triton kernels", "Precision", "kernels", train={"kernels": "triton"}, near=True),
    Feature("learning rates by name", "Optimizer", optim={"lr_scale": {"*mlp*": 0.5, "*norm*": 0.0}}),
    Feature("no clipping", "Optimizer", optim={"clip_grad": 0.0}),
    beside("a growing batch", "ramp-up"),
    beside("evaluation", "evaluate"),
    beside("save, resume on one rank", "resume"),
    beside("export", "export"),
    beside("start from Hugging Face", "init"),
    beside("FP8 shadow steps", "shadow", families=DECODERS, fp8={"shadow_interval": 1}, unit=16),
    beside("comparing replicas", "replicas"),
    beside("a bad step skipped", "skip"),
)


@dataclass(frozen=True)
class Trial:
    """A run with two features, on `world` ranks; the rest as of Feature."""

    run: Run
    world: int
    documents: bool | str
    also: tuple[Also, ...]
    near: bool


def exclude(a: Feature, b: Feature) -> str | None:
    """Why no run can have both, if so: they are values of one setting, no family has both, or nothing is exported."""
    if a is b:
        return None
    given = a.layout.get("sharding"), b.layout.get("sharding")
    if (a.kind and a.kind == b.kind) or any(level is not None and level < max(a.least, b.least) for level in given):
        return "two values of one setting"
    if (a.lora or b.lora) and "export" in (a.also, b.also):
        return "adapters are written as a PEFT folder, without an export"
    if (a.lora | b.lora).get("base", "bf16") != "bf16" and "init" in (a.also, b.also):
        return "a checkpoint does not hold a quantized base"
    return None if set(a.families) & set(b.families) else "no family of models has both"


def trial(a: Feature, b: Feature) -> Trial:
    """The run with both features, or with one if they are the same."""
    layout, train, fp8, lora = ({**getattr(a, part), **getattr(b, part)} for part in ("layout", "train", "fp8", "lora"))
    layout = {"bucket_mb": SMALL_BUCKETS, "sharding": max(1, a.least, b.least), **layout}
    tp, cp, pp = (layout.get(axis, 1) for axis in ("tp", "cp", "pp"))
    dp = max(a.dp, b.dp, -(-max(a.data, b.data) // cp))
    while dp * cp * tp % (layout.get("ep", 1) * layout.get("etp", 1)):
        dp += 1
    also = tuple(dict.fromkeys(x.also for x in (a, b) if x.also))
    documents, unit = b.documents or a.documents, max(a.unit, b.unit)
    near = a.near or b.near
    # other tokens share scales than on one process: those of several micro-batches, or of the documents of a rank
    other_codes = bool(fp8) and (
        max(layout.get("ep", 1), layout.get("etp", 1)) > 1 or layout.get("cp_degree") == "dynamic"
    )
    length = unit * tp * 2 * cp if fp8 else 16  # each rank's tokens are whole blocks of scales
    made = changed_model(a, b, unit, length, near or other_codes)
    sequences = train.get("micro_batch", 2 if made.headless else 1)  # a step needs a query and a text that answers it
    if "stages" in layout:  # all but one have one block
        blocks, count = made.num_blocks, pp * layout.get("virtual_stages", 1)
        layout["stages"] = (*(1,) * (count - 1), blocks - count + 1)
    micro = max(a.micro, b.micro) * (2 if "ramp-up" in also else 1)
    options = {
        "global_batch": dp * micro * sequences,
        "micro_batch": sequences,
        "seq_length": length,
        "steps": 10,
        "precision": "fp32" if near else "fp64",
        "fp8": Fp8Config(**{"recipe": "tensorwise", **fp8}) if fp8 else None,
    }
    run = Run(
        model=made,
        train=TrainConfig(**{**options, **train}),
        layout=LayoutConfig(**layout),
        optim=OptimConfig(**{**a.optim, **b.optim}),
        lora=find_adapter(lora.get("method", "lora")).Config(**{"method": "lora", **lora}) if lora else None,
        data=data_of({**a.reads, **b.reads}, bool(documents), made),
        task=task_of(made, length),
    )
    world = tp * cp * pp * dp
    return Trial(with_budget(run, world) if a.budget or b.budget else run, world, documents, also, near or other_codes)


def task_of(model: Any, length: int) -> TaskConfig:
    """What makes the streams that a model reads."""
    if model.both_ways and not model.headless:
        return find_objective("mlm").Config(name="mlm", rate=0.3)
    if model.headless or model.numbers_beside or not model.reads_beside:
        name = "embed" if model.headless else "transcribe" if model.numbers_beside else "pretrain"
        made: TaskConfig = find_objective(name).Config(name=name)
        return made
    task: TaskConfig = find_objective("span").Config(name="span", encoder_length=length * 3 // 2)
    return task


def data_of(reads: dict[str, Any], documents: bool, model: Any) -> DataConfig:
    """Documents that are packed lie in a file; others are made up, and packed where texts are made beside them, or
    embeddings of them."""
    room = {stream.name: 4 * stream.largest for stream in model.needs_room}
    if model.reads_beside or model.headless:
        return DataConfig(mock=True, packing="online", room=room)
    if room:
        return DataConfig(mock=True, document_attention=documents, room=room)
    return (
        DataConfig(paths=(CORPUS,), split="1,0,0", **reads)
        if reads
        else DataConfig(mock=True, document_attention=documents)
    )


def changed_model(a: Feature, b: Feature, unit: int, length: int, near: bool) -> Any:
    family = next(f for f in a.families if f in b.families)
    made = model_of(family, unit, length)
    changes = {k: v for k, v in {**a.model, **b.model}.items() if hasattr(made, k)}  # gpt2 is tied as it is
    made = replace(made, **changes)
    return every_expert(made) if near and made.routed_experts else made


def every_expert(made: Any) -> Any:
    """Each token goes to all experts: rounding chooses none."""
    whole = {"n_group": 1, "topk_group": 1} if hasattr(made, "n_group") else {}
    return replace(made, num_experts_per_tok=made.routed_experts, **whole)


def with_budget(run: Run, world: int) -> Run:
    """A budget half-way between all stored and whole layers recomputed; for all stored if backward is split, where
    what weight gradients wait with leaves little to recompute."""
    micro = run.train.global_batch // run.train.micro_batch
    plans = [make_plan(replace(run, train=replace(run.train, recompute=how)), world) for how in ("none", "full")]
    needs = [max(use.total for use in rank_uses(plan, micro)[0]) for plan in plans]
    budget = max(needs) if plans[0].splits_backward else sum(needs) / 2
    return replace(run, train=replace(run.train, recompute_budget_gib=(OVERHEAD + budget) / 2**30))
