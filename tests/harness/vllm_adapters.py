"""Run by an interpreter that has vLLM: `python vllm_adapters.py JOBS.json OUT`. Knows nothing of Phalanx.

JOBS.json lists {"name", "base", "adapter"}: folders of a model and of an adapter. Of each, vLLM makes the model
(without its weights), checks the adapter's config, and reads its tensors for that model. OUT/NAME.safetensors gets what
it has read, by the names in the adapter's file, and the scale of each; OUT/answers.json what it said. A model without
experts is also given the adapter, as in an engine; vLLM 0.32 has no adapters of experts on CPUs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 16,
    "max_num_seqs": 2,
    "enable_lora": True,
    "max_lora_rank": 16,
}
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def read(job: dict[str, str], out: Path) -> dict[str, Any]:
    """What vLLM has read: the number of modules, those for which its model has no place, and, where it was given the
    adapter, how many of its layers have one then."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import get_supported_lora_modules, parse_fine_tuned_lora_name, process_packed_modules_mapping
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(model=job["base"], **OPTIONS).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        meet()
        model: Any = initialize_model(config)
        supported, packed = get_supported_lora_modules(model), process_packed_modules_mapping(model)
        helper = PEFTHelper.from_local_dir(job["adapter"], OPTIONS["max_model_len"])
        helper.validate_legal(config.lora_config)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        adapter = LoRAModel.from_local_checkpoint(
            job["adapter"],
            {name for each in supported for name in (*packed.get(each, [each]), *(["experts"] * (each == "experts")))},
            helper,
            lora_model_id=1,
            device="cpu",
            dtype=torch.float32,
            model_vocab_size=config.model_config.get_vocab_size(),
            weights_mapper=mapper,
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )
        found = {}
        with safe_open(f"{job['adapter']}/adapter_model.safetensors", "pt") as file:
            for name in file.keys():
                module, is_a = parse_fine_tuned_lora_name(name, mapper)
                pair = adapter.loras[module]
                found[name] = (pair.lora_a if is_a else pair.lora_b).contiguous().clone()
                found[f"{name} scale"] = torch.tensor(float(pair.scaling))
        save_file(found, out / f"{job['name']}.safetensors")
        homeless = sorted(set(adapter.loras) - places(model, supported, packed))
        return {"modules": len(adapter.loras), "homeless": homeless, "set": layers_with(adapter, model, config)}


def places(model: Any, supported: list[str], packed: dict[str, list[str]]) -> set[str]:
    """Names of what may have an adapter, as adapters' files call them."""
    from vllm.lora.utils import is_supported_lora_module

    found = set[str]()
    for name, module in model.named_modules():
        if is_supported_lora_module(name, module, supported):
            before, _, last = name.rpartition(".")
            found |= {name, *(f"{before}.{part}" for part in packed.get(last, []))}
            found |= {f"{name}.base_layer"} if last == "experts" and model.is_3d_moe_weight else set()
    return found


def layers_with(adapter: Any, model: Any, config: Any) -> int | None:
    import torch
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.utils import is_moe_model

    if is_moe_model(model):
        return None
    size = config.model_config.get_vocab_size()
    manager = LoRAModelManager(model, 2, 16, size, config.lora_config, torch.device("cpu"), config)
    manager.add_adapter(adapter)
    manager.activate_adapter(1)
    stacked = [layer.lora_b_stacked for layer in manager.modules.values()]
    return sum(any(bool(part.any()) for part in (b if isinstance(b, tuple | list) else [b])) for b in stacked)


def meet() -> None:
    """Make the groups of one rank anew: which there are depends on the model."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.init_distributed_environment(1, 0, f"file://{os.getcwd()}/meet", 0, "gloo")
    parallel_state.ensure_model_parallel_initialized(1, 1)


def main(jobs: str, out: str) -> None:
    os.environ.update(ENV)
    answers = dict[str, Any]()
    for job in json.loads(Path(jobs).read_text()):
        try:
            answers[job["name"]] = read(job, Path(out))
        except Exception as error:  # of any kind: the others are read nevertheless
            answers[job["name"]] = {"error": f"{type(error).__name__}: {error}"}
    (Path(out) / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
