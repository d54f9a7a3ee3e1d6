"""`bench ops --only`, and benchmarks of state-space models: floors by formula, peers that compute the same, tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.bench.floors import Rates, UnknownOp, bench_only, called_samples, draw_for, samples_of, time_sample
from phalanx.bench.samples import SAMPLES, TOKENS, Draw
from phalanx.config.read import load_run

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
DRAW = Draw(CPU, torch.float32)
RATES = Rates(gemm=1e12, copy=1e9)


@pytest.fixture
def scripts(monkeypatch):
    """The benchmarks' folders as their scripts see them."""
    before = set(sys.modules)
    for folder in ("benchmarks", "benchmarks/peers"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    yield
    for name in set(sys.modules) - before:
        if "benchmarks" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


# ---- bench ops --only


def test_floors_of_a_scan_are_its_bytes_and_matmuls():
    """Forward reads x, steps, rates, B, C and D and writes y; backward reads them and y's gradient, and writes theirs.
    The states take an outer product and one with C: 4 heads width state FLOP for each token, twice in backward."""
    sample = SAMPLES["scan"](DRAW)
    s = sample.call.args[0]
    tokens, heads, width, groups, state = TOKENS["cpu"], *s.x.shape[2:], *s.b.shape[2:]
    (row,) = time_sample(sample, CPU, RATES, 2)
    inputs = 4 * (tokens * (heads * width + heads + 2 * groups * state) + 2 * heads)
    output, flop = 4 * tokens * heads * width, 4 * tokens * heads * width * state
    assert row.by == "reference" and row.forward.repeats == 2
    assert row.forward_floor.nbytes == pytest.approx((inputs + output) / RATES.copy)
    assert row.both_floor.nbytes == pytest.approx((3 * inputs + 2 * output) / RATES.copy)
    assert row.forward_floor.matmuls == pytest.approx(flop / RATES.gemm)
    assert row.both_floor.matmuls == pytest.approx(3 * flop / RATES.gemm)
    found = row.as_dict()["forward_backward"]
    assert found["share"] == pytest.approx(max(found["bytes_floor"], found["matmul_floor"]) / found["median"])


def test_ops_of_a_config_have_its_shapes_and_others_a_published_models(tmp_path):
    run, said = load_run(ROOT / "recipes/tiny_mamba2.yaml"), []
    called, names = called_samples(run, 1, CPU), ["conv", "gated_norm", "delta"]
    rows = bench_only(names, called, draw_for(run, CPU), 1, str(tmp_path / "ops.json"), said.append)
    m, t = run.model, run.train
    channels = m.num_heads * m.head_dim + 2 * m.n_groups * m.state_size
    shapes = {row.name: row.shape for row in rows}
    assert shapes["conv1d"].split()[0] == f"{t.micro_batch}x{t.seq_length}x{channels}"
    assert shapes["gated_norm"].split()[0] == f"{t.micro_batch * t.seq_length}x{m.num_heads * m.head_dim}"
    assert shapes["delta"].startswith(f"1x{TOKENS['cpu']}x")
    assert {op["by"] for op in json.loads((tmp_path / "ops.json").read_text())["ops"]} == {"reference"}
    assert "reached" in said[-1]


def test_an_unknown_op_is_refused_with_those_near():
    with pytest.raises(UnknownOp, match="no op 'scn' to time; did you mean scan.*there are conv, delta"):
        samples_of(["scn"], [], DRAW)


def test_bench_ops_asks_for_a_config_or_names(warm):
    for words, text in ((), "give CONFIG, or name ops"), (("--only", "scn"), "did you mean scan"):
        done = warm.phalanx("bench", "ops", *words)
        assert done.returncode == 2 and text in done.stderr


# ---- peers


@pytest.mark.parametrize("row", ["scan", "scan1", "delta", "conv", "norm"])
def test_peers_are_given_what_ours_are(row, scripts):
    """Plain torch's recurrences, called as peers' kernels are, have our outputs and gradients."""
    from state_space_ops import contest_rows

    torch.manual_seed(3)
    ours, theirs = contest_rows(row, DRAW, 1, False)
    assert ours["by"] == "phalanx reference" and theirs["by"] == "plain torch"
    assert ours["difference"] == 0 < theirs["difference"] < 1e-4
    assert theirs["both_ms"] >= theirs["both_low_ms"] > 0


def test_a_result_that_is_not_finite_differs(scripts):
    from state_space_ops import difference

    one = torch.ones(3)
    assert difference([one * torch.nan], [one]) != difference([one * torch.nan], [one])
    assert difference([one], [one, one]) != difference([one], [one, one])
    assert difference([one, 2 * one], [one, one]) == 1


def test_the_peers_layers_are_nemotron_h(scripts):
    """Their loss and gradients are those of transformers with the same weights."""
    from hybrid import PLAIN, SMALL, Hybrid
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(0)
    s = replace(SMALL, vocab=61, hidden=32, inner=48)
    kinds = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    config = NemotronHConfig(
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=s.inner,
        layers_block_type=[kinds[letter] for letter in s.pattern],
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head,
        mamba_num_heads=s.scan_heads,
        mamba_head_dim=s.width,
        n_groups=s.groups,
        ssm_state_size=s.state,
        conv_kernel=s.taps,
        chunk_size=s.chunk,
        layer_norm_epsilon=s.eps,
        time_step_min=s.least_step,
        use_mamba_kernels=False,
    )
    theirs, ours = NemotronHForCausalLM(config), Hybrid(s, PLAIN)
    ours.start()
    state = {"model.embeddings.weight": ours.embed.weight, "model.norm_f.weight": ours.norm.weight}
    state["lm_head.weight"] = ours.head.weight
    for i, (norm, mixer) in enumerate(zip(ours.norms, ours.mixers)):
        state |= {f"model.layers.{i}.{name}": value for name, value in weights_of(s, norm, mixer).items()}
    theirs.load_state_dict(state)
    ids = torch.randint(s.vocab, (1, 25))
    loss = ours(ids[:, :-1], ids[:, 1:].contiguous())
    other = torch.nn.functional.cross_entropy(theirs(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    other.backward()
    assert loss.item() == pytest.approx(other.item(), rel=1e-5)
    scan = theirs.model.layers[0].mixer
    for mine, that in ((ours.embed.weight, theirs.model.embeddings.weight), (ours.mixers[0].a_log, scan.A_log)):
        assert torch.allclose(mine.grad, that.grad, rtol=1e-3, atol=1e-6)
    assert torch.allclose(ours.mixers[0].conv.grad, scan.conv1d.weight.grad.squeeze(1), rtol=1e-3, atol=1e-6)


def weights_of(s, norm, mixer):
    """The weights of a layer by transformers' names."""
    found = {"norm.weight": norm.weight}
    if hasattr(mixer, "a_log"):
        names = {"in_proj.weight": mixer.in_proj.weight, "out_proj.weight": mixer.out_proj.weight}
        names |= {"A_log": mixer.a_log, "D": mixer.d, "dt_bias": mixer.dt_bias, "norm.weight": mixer.norm}
        names |= {"conv1d.weight": mixer.conv.unsqueeze(1), "conv1d.bias": mixer.conv_bias}
    elif hasattr(mixer, "qkv"):
        q, k, v = mixer.qkv.weight.split((s.heads * s.head, *(s.kv_heads * s.head,) * 2))
        names = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "o_proj.weight": mixer.out.weight}
    else:
        names = {"up_proj.weight": mixer.up.weight, "down_proj.weight": mixer.down.weight}
    return found | {f"mixer.{name}": value for name, value in names.items()}


# ---- the benchmark's rows


def test_the_table_compares_ours_with_the_best_peer(scripts):
    """The reference is not ours; the least and the goal bound figures of which more or less is better."""
    from state_space import Figures, all_figures, goals, verdicts

    kernel = {"row": "scan", "forward_ms": 1.0, "floor": "1 (bytes)", "share": 0.5}
    found = [
        {**kernel, "by": "phalanx reference", "both_ms": 900.0},
        {**kernel, "by": "phalanx triton", "both_ms": 4.0},
        {**kernel, "by": "mamba-ssm, chunks of 256", "both_ms": 5.0},
        {**kernel, "by": "mamba-ssm, chunks of 128", "both_ms": 4.8},
        {"row": "conv", "by": "peer", "missing": "no archive"},
    ]
    step = {"by": "phalanx", "step_ms": 1.0, "peak_gib": None, "exposed_ms": {}}
    for row, tokens, tflops, share in (
        ("long1", 100.0, 5.0, 0.1),
        ("long2", 190.0, 4.9, 0.1),
        ("muon", 9.0, 1.0, 0.08),
    ):
        found.append({**step, "row": row, "tokens_per_s": tokens, "tflops": tflops, "optimizer_share": share})
    reached = {goal.what: (goal.figure, goal.reached) for goal in goals(Figures(found)) if goal.figure is not None}
    assert reached == {
        "scan: times as fast as mamba-ssm": (pytest.approx(1.2), "least"),
        "scan: share of its floor": (0.5, "not the goal"),
        "long sequence on two GPUs: times one GPU": (pytest.approx(1.9), "least"),
        "Muon on W1: optimizer's share of the step": (0.08, "least"),
    }
    assert "peer missing: no archive" in all_figures(found) and "1.200" in verdicts(found)


def test_rows_run_and_what_is_unknown_is_refused(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "benchmarks/state_space.py", "--small", "--out", str(out), "--rows"]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PEERS": str(tmp_path),
    }
    how = {"capture_output": True, "text": True, "timeout": 200, "env": env, "cwd": ROOT}
    done = subprocess.run([*command, "step,decode"], **how)
    assert done.returncode == 0, done.stderr
    missing, *ours = map(json.loads, out.read_text().splitlines())
    assert "no mamba_ssm-*.tar.gz" in missing["missing"]
    assert [row["row"] for row in ours] == ["step", "decode"] and all(row["forward_ms"] > 0 for row in ours)
    assert "step: peer missing: " in done.stdout
    done = subprocess.run([*command, "scn"], **how)
    assert done.returncode == 2 and "no row scn; there are " in done.stderr
