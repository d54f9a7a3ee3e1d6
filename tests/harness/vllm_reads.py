"""Run by an interpreter that has vLLM: `python vllm_reads.py FOLDER PROMPTS.json OUT.json [ADAPTER]`. Knows nothing of
Phalanx.

Writes what vLLM says of each prompt: log-probabilities of its tokens (from the second on; not with an adapter, for
which vLLM 0.32 has no such logits), and the tokens it goes on with, greedily, with theirs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

GREEDY = 8


def main(folder: str, prompts: str, out: str, adapter: str | None = None) -> None:
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model = LLM(
        model=folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        seed=0,
        enable_lora=adapter is not None,
        max_lora_rank=8,
    )
    of_prompt = 0 if adapter is None else None
    options = SamplingParams(
        temperature=0.0, max_tokens=GREEDY, prompt_logprobs=of_prompt, logprobs=0, detokenize=False, ignore_eos=True
    )
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in json.loads(Path(prompts).read_text())]
    beside = None if adapter is None else LoRARequest("adapter", 1, adapter)
    found = model.generate(asked, options, lora_request=beside)
    answers = [
        {
            "logprobs": [at[token].logprob for token, at in zip(f.prompt_token_ids[1:], (f.prompt_logprobs or [])[1:])],
            "greedy_logprobs": [at[token].logprob for token, at in zip(f.outputs[0].token_ids, f.outputs[0].logprobs)],
            "greedy": list(f.outputs[0].token_ids),
        }
        for f in found
    ]
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
