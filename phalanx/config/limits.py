"""How large the numbers of a config may be: far beyond any existing run, and small enough that a plan is made in
seconds and sizes fit in 64 bits.

Checked before all other rules, which count layers, ranks and micro-batches one by one.
"""

from __future__ import annotations

from phalanx.base import tree
from phalanx.base.errors import Problem
from phalanx.base.rules import problem
from phalanx.config.run import Run
from phalanx.nn.objective import make_objective

WIDTH, EXPERTS = 2**20, 2**12
LIMITS = {
    "model.vocab_size": 2**31 - 1,
    "model.hidden_size": WIDTH,
    "model.intermediate_size": WIDTH,
    "model.moe_intermediate_size": WIDTH,
    "model.q_lora_rank": WIDTH,
    "model.kv_lora_rank": WIDTH,
    "model.num_hidden_layers": 2**10,
    "model.num_nextn_predict_layers": 2**6,
    "model.num_attention_heads": 2**14,
    "model.num_key_value_heads": 2**14,
    "model.head_dim": 2**14,
    "model.qk_nope_head_dim": 2**14,
    "model.qk_rope_head_dim": 2**14,
    "model.v_head_dim": 2**14,
    "model.num_local_experts": EXPERTS,
    "model.num_experts": EXPERTS,
    "model.n_routed_experts": EXPERTS,
    "model.n_shared_experts": 2**6,
    "model.num_experts_per_tok": 2**8,
    "train.seq_length": 2**24,
    "train.tokens": 2**50,
    "train.rampup.samples": 2**48,
    "train.fp8.history": 2**20,
    "train.guard.window": 2**20,
    "layout.cp": 2**10,
}
OTHERS = 2**31 - 1
RANKS = 2**20
TOKENS = 2**26  # in a micro-batch
MICRO_BATCHES = 2**14  # of a rank in a step


def check_limits(run: Run, world_size: int) -> list[Problem]:
    """Numbers that are too large, one by one; if none is, too many tokens in a micro-batch, and too many
    micro-batches."""
    found = [Problem("--ranks", world_size, f"must be <= {RANKS}", {}, (RANKS,))] if world_size > RANKS else []
    for path, value in sorted(tree.integers(run)):
        limit = LIMITS.get(path, OTHERS)
        if value > limit and path != "train.seed":  # a seed has 63 bits, by a rule of its own
            found.append(Problem(path, value, f"must be an integer <= {limit}", {}, (limit,)))
    return found or check_micro_batches(run, world_size)


def check_micro_batches(run: Run, world_size: int) -> list[Problem]:
    c, layout = run.train, run.layout
    if min(c.global_batch, c.micro_batch, c.seq_length, layout.tp, layout.cp, layout.pp) < 1:
        return []
    lengths = {"train.seq_length": c.seq_length}
    lengths |= {f"task.{name}_length": length for name, length in make_objective(run.task).beside.items()}
    lengths |= {f"data.room.{s.name}": run.data.room.get(s.name, 0) for s in run.model.numbers_beside}
    name, longest = max(lengths.items(), key=lambda pair: pair[1])
    if c.micro_batch * longest > TOKENS:
        rule = f"micro_batch * {name.split('.', 1)[1]} must be <= {TOKENS}"
        return [problem("train", c, "micro_batch", rule, {name: longest}, (TOKENS // longest,))]
    dp = max(1, world_size // (layout.tp * layout.cp * layout.pp))
    most = MICRO_BATCHES * c.micro_batch * dp
    if c.global_batch > most:
        because = {"train.micro_batch": c.micro_batch, "dp": dp}
        rule = f"must be <= {MICRO_BATCHES} * micro_batch * dp: a rank's micro-batches of a step"
        return [problem("train", c, "global_batch", rule, because, (most,))]
    return []
