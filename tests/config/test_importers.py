"""Configs of other frameworks become ours: published examples, every key of which is accounted for once.

What the examples say is read a second time here, by other means: scripts are run by bash with programs that only print
their arguments, these go through argparse, and TOML and JSON through the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from phalanx.base import tree
from phalanx.base.errors import ConfigError
from phalanx.cli.main import cli
from phalanx.cli.setup import all_problems
from phalanx.config.device_check import Facts
from phalanx.config.importers import deepspeed, megatron, torchtitan
from phalanx.config.importers.shell import UnclosedQuote, read_script
from phalanx.config.importers.translation import (
    Becomes,
    BuiltIn,
    ForeignKey,
    ForeignText,
    Imported,
    OpenValue,
    Refused,
    Translation,
)
from phalanx.config.importing import import_config, listed, read_foreign, report, scalar, yaml_text
from phalanx.config.read import load_run, read
from phalanx.config.run import Run
from phalanx.optim.schedules import learning_rate
from tests.harness.coming_from import FRAMEWORKS

FOLDER = Path(__file__).parents[1] / "fixtures/foreign_configs"
EXAMPLES = {name: sorted(p for p in (FOLDER / name).iterdir() if p.suffix != ".md") for name in os.listdir(FOLDER)}
EVERY = [path for paths in EXAMPLES.values() for path in paths]
SCRIPTS = [path for path in EXAMPLES["megatron"] if path.suffix == ".sh"]
ARGUMENTS = {str(i): f"given{i}" for i in range(1, 7)}


def name_of(path: Path) -> str:
    return path.name


@cache
def imported(path: Path, ranks: int | None = None) -> Imported:
    return import_config(read_foreign(str(path), ranks))


def settings(found: Imported) -> dict[str, Any]:
    return {key: setting.value for key, setting in found.settings.items()}


def test_there_are_twenty_examples_of_each_with_their_origin():
    for framework, paths in EXAMPLES.items():
        page = (FOLDER / framework / "README.md").read_text()
        rows = re.findall(
            r"^\| (\S+) \| ([\w.-]+/[\w.-]+) \| (\S+) \| ([0-9a-f]{40}) \| (\S.*) \|$", page, re.MULTILINE
        )
        assert len(paths) >= 20 and sorted(row[0] for row in rows) == [path.name for path in paths]


# ---- scripts, as bash reads them -----------------------------------------------------------------

PRINTER = '#!{bash}\nprintf \'%s\\0\' "{name}" "$@" >> {out}\n'


def run_by_bash(script: Path, folder: Path, arguments: list[str]) -> list[list[str]]:
    """The words of each command that a script runs. Nothing but programs that print their arguments can be found."""
    bash, programs, out = shutil.which("bash"), folder / "bin", folder / "words"
    programs.mkdir()
    for name in ("torchrun", "python", "mkdir", "sbatch", "dirname", "cat", "git", "srun"):
        text = PRINTER.format(bash=bash, name=name, out=out)
        if name == "sbatch":
            text = f"#!{bash}\nwhile IFS= read -r row; do printf '%s\\n' \"$row\" >> {folder}/batch; done\n"
        elif name == "cat":
            text = f"#!{bash}\nwhile IFS= read -r row; do :; done\n"
        elif name == "dirname":
            text = f"#!{bash}\nprintf '.\\n'\n"
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "pretrain_gpt.py").write_text("")
    (folder / "common.sh").write_text("")
    (folder / "tmp").mkdir()
    (folder / "NO_VALUE_PROVIDED").mkdir()
    shown = 'for v in MODEL_ARGS ENV_DEPENDENT MODEL_OPTIONS; do printf "%s\\0" held ${!v} >> words; done'
    line = f". {shlex.quote(str(script))}; {shown}" if "torchrun" not in script.read_text() else ""
    command = [bash, "--norc", "-c", line, "x"] if line and "sbatch" not in script.name else [bash, str(script)]
    if "sbatch" in script.read_text() or "torch.distributed.run" in script.read_text():
        command = [bash, str(script)]
    environment = {"PATH": str(programs)}
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=30
    )
    assert "command not found" not in done.stderr, done.stderr
    batch = folder / "batch"
    if batch.exists():
        inner = shlex.split(batch.read_text().partition("bash -x -c ")[2])[0]
        return [[word for part in inner.split(";")[-1:] for word in part.split()]]
    words = out.read_text().split("\0")[:-1]
    starts = [i for i, word in enumerate(words) if word in ("torchrun", "python", "held", "mkdir")] + [len(words)]
    return [words[a:b] for a, b in zip(starts, starts[1:])]


def options_of(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def arguments_of(path: Path) -> dict[str, str]:
    """Values for the arguments of a script that takes some, by number."""
    text = path.read_text()
    return ARGUMENTS if re.search(r"\$\{?\d", text) and "case $1" not in text else {}


@cache
def words_by_bash(path: Path, folder: Path) -> list[str]:
    commands = run_by_bash(path, folder, list(arguments_of(path).values()))
    held = [word for words in commands if words[0] == "held" for word in words[1:]]
    programs = [words for words in commands if words[0] in ("torchrun", "python") and options_of(words)]
    return programs[-1] if programs else held


@pytest.fixture(scope="module")
def bash_words(tmp_path_factory) -> Any:
    def words(path: Path) -> list[str]:
        if path not in known:
            known[path] = words_by_bash(path, tmp_path_factory.mktemp(path.stem))
        return known[path]

    known: dict[Path, list[str]] = {}
    return words


def program_and_options(words: list[str]) -> tuple[list[str], list[str]]:
    """Before the program and after it."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
    return words[: max(at, 0)], words[at + 1 :]


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_a_script_is_read_as_bash_runs_it(path, bash_words):
    """Every word of the command, where the script itself says what it is."""
    launched, words = program_and_options(bash_words(path))
    found = import_config(ForeignText(str(path), path.read_text(), variables=arguments_of(path)))
    keys = [o.key for o in found.outcomes if o.key.name.startswith("--")]
    assert [key.name for key in keys] == options_of(words)
    values = iter_values(words)
    for key, (name, given) in zip(keys, values, strict=True):
        if isinstance(key.value, OpenValue):  # of the environment: empty, or a path of this test
            continue
        ours = [] if key.value is True else key.value if isinstance(key.value, list) else [key.value]
        assert [re.sub(r"^'(.*)'$", r"\1", word) for word in given] == ours, name
    prefix = "launcher "
    assert [o.key.name for o in found.outcomes if o.key.name.startswith(prefix)] == [
        prefix + name for name in options_of(launched)
    ]


def iter_values(words: list[str]) -> list[tuple[str, list[str]]]:
    made: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            made.append((name, [value] if equals else []))
        elif made:
            made[-1][1].append(word)
    return made


SHELL = r"""
A=1; B="two words" # a comment; C=3
D=${A:-9}$B'$A' E=$((A * (2 + 3) - 1))
F=(x "y z" $A) ; F+=(--last
  # inside an array
  "${B}")
if [ "$A" = 1 ] && [ -z "" ]; then G=yes; else G=no; fi
if [[ $A -gt 3 ]]; then H=big
elif [[ $A == 1 ]] || [[ $NOBODY == 2 ]]; then H=one; else H=other; fi
for i in 1 2 3; do I=$i; done
J="a\
b" K=${NONE:-${A}${B}}
L() { M=inner; }
case $A in 1) N=1;; esac
O=${#A}
program --a $A "$B" $B ${F[@]} "${F[@]}" --g=$G --h $H 'single $A' "double \$A $D" $E $J "$K" > out 2>&1
"""


def test_expansion_is_that_of_bash(tmp_path):
    out = tmp_path / "words"
    stub = f"program() {{ printf '%s\\0' \"$@\" > {out}; }}\n"
    subprocess.run(["bash", "--norc", "-c", stub + SHELL], cwd=tmp_path, check=True, timeout=30)
    script = read_script(SHELL, {})
    ours = [word.text for word in script.commands[-1][1:]]
    assert ours[:-3] == out.read_text().split("\0")[:-1] and ours[-3:] == [">", "out", "2>&1"]
    assert {u.why for u in script.unread} == {"a loop", "a function", "a case"}
    assert not script.variables["O"][0].known


@pytest.mark.parametrize(
    "text, line",
    [("A=1\nB='x\n", 2), ('A="x\n\n', 1), ("A=(1 2\n", 2), ("echo $(date\n", 1), ("A=`x\n", 1)],
)
def test_a_quote_without_end_is_found(text, line):
    with pytest.raises(UnclosedQuote) as error:
        read_script(text, {})
    assert error.value.line == line


def test_what_is_not_known_is_not_guessed():
    script = read_script('if [ -n "$TOKEN" ]; then ARGS="--x 1"; else ARGS="--x 2"; fi\nrun $ARGS $1 ${2:-two}\n', {})
    words = script.commands[-1]
    assert [w.shown for w in words] == ["run", "$ARGS", "$1", "two"] and [w.known for w in words] == [
        True,
        False,
        False,
        True,
    ]
    assert [(u.first, u.last) for u in script.unread] == [(1, 1)]
    given = read_script('if [ -n "$TOKEN" ]; then ARGS="--x 1"; fi\nrun $ARGS $1\n', {"TOKEN": "t", "1": "one"})
    assert [w.text for w in given.commands[-1]] == ["run", "--x", "1", "one"] and not given.unread


# ---- every key once ------------------------------------------------------------------------------


def flat(data: dict[str, Any], prefix: str = "") -> list[str]:
    """Leaves of a TOML or JSON; an empty table is one."""
    made = []
    for name, value in data.items():
        made += flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [prefix + name]
    return made


def keys_in(path: Path, bash_words: Any) -> list[str]:
    """The keys of an example, without the importers."""
    text = path.read_text()
    if path.suffix == ".toml":
        return flat(tomllib.loads(text))
    if path.suffix == ".json":
        return flat(json.loads(text))
    if path.suffix == ".yaml":
        data = YAML(typ="safe", pure=True).load(text)
        named = [name for name, value in data["MODEL_ARGS"].items() if value is not False]
        rest = [f"test {name}" for name in data if name not in ("ENV_VARS", "MODEL_ARGS")]
        return [*(f"export {name}" for name in data["ENV_VARS"]), *named, *rest]
    launched, words = program_and_options(bash_words(path))
    exported = set(re.findall(r"^\s*export (\w+)=[^;\n]*$", text, re.MULTILINE))
    unset = set(re.findall(r"^\s*unset (\w+)", text, re.MULTILINE))
    return [
        *(f"export {name}" for name in exported - unset),
        *(f"launcher {name}" for name in options_of(launched)),
        *options_of(words),
    ]


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_every_key_is_accounted_for_once(path, bash_words):
    found = imported(path)
    if path in SCRIPTS:
        found = import_config(ForeignText(str(path), path.read_text(), variables=arguments_of(path)))
    named = Counter(o.key.name for o in found.outcomes if not o.key.name.startswith(("line ", "lines ")))
    assert named == Counter(keys_in(path, bash_words))
    known = {key.path for key in tree.keys(Run)}
    for outcome in found.outcomes:
        assert bool(outcome.keys) == (outcome.kind in ("set", "by hand")), outcome
        assert bool(outcome.says) or outcome.kind == "set", outcome
        for key in outcome.keys:
            assert key in found.settings or key in found.by_hand
    for key in (*found.settings, *found.by_hand):
        assert key.replace("optim.fallback.", "optim.") in known or key.startswith("data.valid"), key
    text, table = yaml_text(found, "phalanx import-config", path.name), report(found, "run.yaml")
    joined = re.sub(r"\s", "", table)
    for outcome in found.outcomes:
        if outcome.kind in ("missing", "built in"):
            assert outcome.key.name in text and outcome.key.name.replace(" ", "") in joined
    for key in found.by_hand:
        assert f"#   {key}: " in text
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_keys_become_what_the_page_says(path):
    """docs/coming-from.md says which of our keys each of theirs is."""
    titles = {"megatron": "Megatron-LM", "torchtitan": "torchtitan", "deepspeed": "DeepSpeed"}
    table = FRAMEWORKS[titles[path.parent.name]]
    found = imported(path)
    seen = 0
    for outcome in found.outcomes:
        ours = table.get(outcome.key.name)
        if ours is None or outcome.kind in ("built in", "missing"):
            continue
        assert ours in outcome.keys or (outcome.key.name, outcome.keys) in ELSEWHERE, outcome
        seen += 1
    assert seen >= (1 if path.suffix == ".json" else 5)


NEEDS_NO_KEY = {
    "--sequence-parallel",
    "--use-flash-attn",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--use-mcore-models",
    "--transformer-impl",
    "--moe-grouped-gemm",
    "--calculate-per-token-loss",
    "--attention-softmax-in-fp32",
    "--manual-gc",
    "--ckpt-format",
    "--log-throughput",
    "parallelism.enable_async_tensor_parallel",
    "metrics.save_tb_folder",
    "model.norm_type",
    "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients",
    "zero_allow_untested_optimizer",
    "wall_clock_breakdown",
}
HAS_NONE = {
    "--decoupled-lr",
    "--log-params-norm",
    "--log-num-zeros-in-grad",
    "--step-batch-size-schedule",
    "--no-load-optim",
    "--grpo-kl-beta",
    "job.description",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_optimizer.device",
    "progressive_layer_drop.theta",
    "sparse_attention.mode",
    "torch_autocast.dtype",
}


@pytest.mark.parametrize("framework", EXAMPLES)
def test_what_needs_no_key_and_what_has_none(framework):
    """In every example that has the key; each key is in at least one."""
    kinds: dict[str, set[str]] = {}
    for path in EXAMPLES[framework]:
        for outcome in imported(path).outcomes:
            kinds.setdefault(outcome.key.name, set()).add(outcome.kind)
    needless, missing = NEEDS_NO_KEY & set(kinds), HAS_NONE & set(kinds)
    assert {name: kinds[name] for name in needless} == dict.fromkeys(needless, {"built in"})
    assert {name: kinds[name] for name in missing} == dict.fromkeys(missing, {"missing"})
    assert len(needless) >= 3 and len(missing) >= 1


ELSEWHERE = {  # the same key where the plain one would not say it
    ("--load", ("init_from",)),
    ("training.local_batch_size", ("train.global_batch",)),
    ("--train-iters", ("train.steps", "optim.warmup_steps")),
    ("--use-distributed-optimizer", ("layout.sharding",)),
    ("parallelism.data_parallel_replicate_degree", ("layout.sharding",)),
    ("training.data_parallel_replicate_degree", ("layout.sharding",)),
    ("activation_checkpoint.mode", ("train.recompute_budget_gib",)),
}

# ---- the numbers ---------------------------------------------------------------------------------


def parsed(words: list[str]) -> argparse.Namespace:
    """Some of Megatron-LM's arguments, with its defaults."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (
        "num-layers",
        "hidden-size",
        "num-attention-heads",
        "ffn-hidden-size",
        "kv-channels",
        "num-query-groups",
    ):
        parser.add_argument(f"--{name}", type=int)
    for name in ("micro-batch-size", "global-batch-size", "seq-length", "train-iters", "train-samples", "num-experts"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    defaults = {
        "lr": None,
        "min-lr": 0.0,
        "weight-decay": 0.01,
        "clip-grad": 1.0,
        "adam-beta1": 0.9,
        "adam-beta2": 0.999,
    }
    for name, default in {**defaults, "init-method-std": 0.02, "norm-epsilon": 1e-5, "rotary-base": 10000.0}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    for name in ("bf16", "fp16", "swiglu", "use-distributed-optimizer", "untie-embeddings-and-output-weights"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--group-query-attention", action="store_true")
    parser.add_argument("--lr-decay-style", default="linear")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--log-interval", type=int, default=100)
    parser.add_argument("--encoder-num-layers", type=int)
    return parser.parse_known_args(words)[0]


def words_of_yaml(path: Path) -> list[str]:
    data = YAML(typ="safe", pure=True).load(path.read_text())["MODEL_ARGS"]
    rows = [[name] if value is True else [name, str(value)] for name, value in data.items() if value is not False]
    return [word for row in rows for word in row]


@pytest.mark.parametrize("path", EXAMPLES["megatron"], ids=name_of)
def test_numbers_of_a_command_line(path, bash_words):
    words = words_of_yaml(path) if path.suffix == ".yaml" else program_and_options(bash_words(path))[1]
    words = [word for word in words if word and not word.startswith("given") or word == "given"]
    variables = arguments_of(path) if path.suffix == ".sh" else {}
    unknown = re.findall(r"(--[\w-]+) given\d", " ".join(program_and_options(bash_words(path))[1])) if variables else []
    a = parsed([word for i, word in enumerate(words) if word not in unknown])
    ours = settings(imported(path))
    expected = {
        "layout.tp": a.tensor_model_parallel_size,
        "layout.pp": a.pipeline_model_parallel_size,
        "layout.cp": a.context_parallel_size,
        "train.micro_batch": a.micro_batch_size,
        "train.global_batch": a.global_batch_size,
        "train.precision": "bf16" if a.bf16 else "fp16" if a.fp16 else "fp32",
        "train.seed": a.seed,
        "optim.lr": a.lr,
        "optim.weight_decay": a.weight_decay,
        "optim.clip_grad": a.clip_grad,
        "optim.schedule": a.lr_decay_style,
        "log.interval": a.log_interval,
        "train.steps": a.train_iters
        or (a.train_samples and a.global_batch_size and a.train_samples // a.global_batch_size),
    }
    at = "optim.fallback" if ours.get("optim.name") == "muon" else "optim"
    expected |= {f"{at}.beta1": a.adam_beta1, f"{at}.beta2": a.adam_beta2}
    if a.lr_decay_style != "constant":
        expected["optim.min_lr"] = a.min_lr
    if "model.family" in ours:
        layers = a.num_layers if a.encoder_num_layers is None else a.encoder_num_layers
        gated = int((4 * a.hidden_size * 2 / 3) / 64) * 64 if a.swiglu else 4 * a.hidden_size
        expected |= {
            "model.num_hidden_layers": layers,
            "model.hidden_size": a.hidden_size,
            "model.num_attention_heads": a.num_attention_heads,
            "model.intermediate_size": a.ffn_hidden_size or gated,
        }
        if ours["model.family"] != "t5":
            expected["model.initializer_range"] = a.init_method_std
        if "model.rope_theta" in ours:
            expected["model.rope_theta"] = a.rotary_base
            expected["model.tie_word_embeddings"] = not a.untie_embeddings_and_output_weights
        if a.group_query_attention and "model.num_key_value_heads" in ours:
            expected["model.num_key_value_heads"] = a.num_query_groups
    known = {key: value for key, value in expected.items() if value is not None and key not in imported(path).by_hand}
    assert {key: ours.get(key) for key in known} == known and len(known) >= 12


FAMILY = {
    "bert_340m.sh": "bert",
    "bert_release.yaml": "bert",
    "deepseek_r1.sh": "deepseek_v3",
    "deepseekv3_proxy.yaml": "deepseek_v3",
    "detoxify_1_3b.sh": "gpt2",
    "gpt3_15b_8t_release.yaml": None,
    "gpt3_175b.sh": "gpt2",
    "gptoss.sh": "gpt_oss",
    "llama3_8b_fp8.sh": "llama",
    "megatron_deepspeed_llama2.sh": "llama",
    "mfsdp_deepseek_v3.sh": "deepseek_v3",
    "mixtral_8x7b.sh": "mixtral",
    "mixtral_8x7b_release.yaml": "mixtral",
    "mla.yaml": None,
    "moe_muon.yaml": None,
    "qwen2_5_7b.sh": "qwen2",
    "qwen3_30b_a3b.sh": "qwen3_moe",
    "rl_qwen3_8b.sh": "qwen3",
    "t5_220m.sh": "t5",
    "t5_release.yaml": "t5",
    "virtual_stages.yaml": "gpt2",
    "weekly_fp8.yaml": "gpt2",
}
LISTED = {  # what no family has, by the key that asks for it
    "gpt3_15b_8t_release.yaml": {"--squared-relu", "--group-query-attention"},
    "mixtral_8x7b_release.yaml": {"--rotary-percent"},
    "mla.yaml": {"--multi-latent-attention"},
    "moe_muon.yaml": {"--num-experts", "--muon-scale-mode"},
    "weekly_fp8.yaml": {"--normalization"},
    "rl_qwen3_8b.sh": {"--grpo-kl-beta", "line 9"},
    "llama3_8b_fp8.sh": {"--decoupled-lr", "--grad-reduce-in-bf16"},
    "gpt3_175b.sh": {"--step-batch-size-schedule"},
    "mixtral_8x7b.sh": {"lines 102-107", "--no-load-optim"},
    "gptoss.sh": {"--disable-bias-linear"},
}


@pytest.mark.parametrize("path", EXAMPLES["megatron"], ids=name_of)
def test_the_family_follows_from_the_arguments(path):
    found = imported(path)
    assert settings(found).get("model.family") == FAMILY[path.name]
    assert LISTED.get(path.name, set()) <= {o.key.name for o in found.outcomes if o.kind == "missing"}


@pytest.mark.parametrize("path", EXAMPLES["torchtitan"], ids=name_of)
def test_numbers_of_a_toml(path):
    data, found = tomllib.loads(path.read_text()), imported(path, 512)
    ours, train = settings(found), data["training"]
    old = data.get("experimental", {})
    parallel = {**old, **train, **data.get("parallelism", {})}
    local = train.get("local_batch_size", train.get("batch_size", 8))
    sizes = [parallel.get(f"{name}_parallel_degree", 1) for name in ("tensor", "pipeline", "context")]
    lr = data["optimizer"].get("lr", 8e-4)
    ends = data.get("lr_scheduler", {})
    expected = {
        "layout.tp": sizes[0],
        "layout.pp": sizes[1] if "pipeline_parallel_degree" in parallel and path.name != "2024_debug_2d.toml" else 1,
        "layout.cp": sizes[2],
        "train.steps": train.get("steps", 10000),
        "train.seq_length": train.get("seq_len", 2048),
        "optim.lr": lr,
        "optim.eps": data["optimizer"].get("eps", 1e-8),
        "optim.clip_grad": train.get("max_norm", 1.0),
        "optim.min_lr": lr * ends.get("min_lr_factor", 0.0),
        "log.interval": data.get("metrics", {}).get("log_freq", 10),
        "train.global_batch": local * 512 // (sizes[0] * max(1, sizes[1]) * sizes[2]),
    }
    assert {key: ours[key] for key in expected} == pytest.approx(expected) and ours["optim.beta2"] == 0.95
    flavor = data["model"].get("flavor")
    widths = {"8B": 14336, "70B": 28672, "405B": 53248, "7B": 11008, "17bx16e": 8192, "32B": 25600, "671B": 18432}
    if flavor in widths and "model.family" in ours:  # Meta's, Qwen's and DeepSeek's published config.json
        assert ours["model.intermediate_size"] == widths[flavor]


@pytest.mark.parametrize("path", EXAMPLES["deepspeed"], ids=name_of)
def test_numbers_of_a_json(path):
    data, found = json.loads(path.read_text()), imported(path, 8)
    ours, zero = settings(found), data.get("zero_optimization", {})
    params = data.get("optimizer", {}).get("params", {})
    betas = params.get("betas", (0.9, 0.999))
    expected = {
        "layout.sharding": zero.get("stage", 0),
        "train.micro_batch": data.get("train_micro_batch_size_per_gpu"),
        "train.global_batch": data.get("train_batch_size"),
        "optim.clip_grad": data.get("gradient_clipping", 1.0),
        "optim.lr": params.get("lr"),
        "optim.weight_decay": params.get("weight_decay"),
        "log.interval": data.get("steps_per_print"),
    }
    if ours.get("optim.name") == "adamw" and betas != "auto":
        expected |= {"optim.beta1": betas[0], "optim.beta2": betas[1]}
    if data.get("bf16", {}).get("enabled") is True:
        expected["train.precision"] = "bf16"
    elif data.get("fp16", {}).get("enabled") is True:
        expected["train.precision"] = "fp16"
    known = {key: value for key, value in expected.items() if value not in (None, "auto")}
    assert {key: ours[key] for key in known} == known
    for name, key in {"train_batch_size": "train.global_batch", "gradient_clipping": "optim.clip_grad"}.items():
        assert (data.get(name) == "auto") <= (key in found.by_hand)


def test_the_batch_of_a_json_follows_from_the_ranks():
    def batches(text: str, ranks: int | None) -> list[Any]:
        found = settings(import_config(ForeignText("x.json", text, ranks)))
        return [found.get("train.micro_batch"), found.get("train.global_batch")]

    each = (
        '{"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4, "tensor_parallel": {"autotp_size": 2}}'
    )
    assert batches(each, 16) == [3, 3 * 4 * 16 // 2] and batches(each, None) == [3, None]
    assert batches('{"train_batch_size": 96, "gradient_accumulation_steps": 4}', 8) == [3, 96]


# ---- accepted here -------------------------------------------------------------------------------

BY_HAND = MappingProxyType(
    {
        "dir": "runs/x",
        "init_from": "null",
        "model.vocab_size": "32000",
        "model.num_hidden_layers": "8",
        "train.global_batch": "1536",
        "train.micro_batch": "1",
        "train.seq_length": "1024",
        "train.steps": "20000",
        "train.eval_samples": "64",
        "train.precision": "bf16",
        "train.recompute": "full",
        "train.recompute_budget_gib": "70",
        "optim.name": "adamw",
        "optim.lr": "0.0001",
        "optim.weight_decay": "0.1",
        "optim.beta1": "0.9",
        "optim.beta2": "0.95",
        "optim.eps": "0.00000001",
        "optim.clip_grad": "1.0",
        "optim.schedule": "constant",
        "optim.warmup_steps": "10",
        "optim.decay_steps": "20000",
        "layout.bucket_mb": "100",
        "layout.stages": "null",
        "data.paths": "[prefix]",
        "data.tokenizer": "bytes",
        "log.wandb_name": "name",
    }
)
SIZES = (
    "hidden_size=512",
    "intermediate_size=1024",
    "num_hidden_layers=8",
    "num_attention_heads=8",
    "vocab_size=32000",
)


def overrides_of(found: Imported) -> list[str]:
    made = [f"{key}={BY_HAND[key]}" for key in found.by_hand if key != "model.family"]
    if "model.family" in found.by_hand:
        made = [text for text in made if not text.startswith("model.")]
        made += ["model.family=llama", *(f"model.{size}" for size in SIZES)]
    return made


def set_by_hand(found: Imported) -> dict[str, Any]:
    """The same as plain values, section by section."""
    made: dict[str, Any] = {}
    yaml = YAML(typ="safe", pure=True)
    for text in overrides_of(found):
        key, _, value = text.partition("=")
        *outer, last = key.split(".")
        place = made
        for step in outer:
            place = place.setdefault(step, {})
        place[last] = yaml.load(value)
    return made


def written(path: Path, folder: Path, ranks: int | None = None) -> Path:
    out = folder / "run.yaml"
    out.write_text(yaml_text(imported(path, ranks), "phalanx import-config", path.name))
    return out


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_the_config_is_accepted_once_the_rest_is_set(path, tmp_path):
    loaded = read(written(path, tmp_path), base=set_by_hand(imported(path)))
    assert loaded.run is not None and not loaded.problems, loaded.problems
    ranks = loaded.run.layout.least_ranks
    assert all_problems(loaded, Facts(world_size=ranks, local_ranks=ranks, files=False)) == []
    for key, value in settings(imported(path)).items():  # they are read as they were imported
        place: Any = loaded.run
        for step in key.split("."):
            place = place[step] if isinstance(place, dict) else getattr(place, step)
        if isinstance(value, (int, float, str, bool)):
            assert place == value, key


@pytest.mark.parametrize("name, ranks", [("virtual_stages.yaml", 8), ("qwen3_1.7b.toml", 64), ("bf16_full.json", 64)])
def test_the_config_can_be_planned(name, ranks, tmp_path):
    path = next(p for p in EVERY if p.name == name)
    out = written(path, tmp_path)
    command = ["plan", str(out), *overrides_of(imported(path)), "--ranks", str(ranks), "--device", "H100"]
    done = CliRunner().invoke(cli, command)
    assert "memory" in done.output.lower() and done.exit_code in (0, 2), (done.output, done.exception)


def test_learning_rates_are_theirs():
    """Their formula (OptimizerParamScheduler.get_lr), written once more."""
    line = "--num-layers 2 --hidden-size 64 --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine --train-iters 100 "
    line += "--lr-decay-iters 80 --lr-warmup-fraction 0.1 --micro-batch-size 1 --global-batch-size 4"
    ours = settings(import_config(ForeignText("line", line)))
    from phalanx.optim.adamw import AdamWConfig

    names = ("lr", "min_lr", "schedule", "warmup_steps", "decay_steps")
    config = AdamWConfig(**{name: ours[f"optim.{name}"] for name in names})
    import math

    for step in range(9, 101):
        share = min(1.0, max(0.0, (step - 8) / (80 - 8)))
        theirs = 1e-5 + (1e-3 - 1e-5) * 0.5 * (1 + math.cos(math.pi * share))
        assert learning_rate(config, step, 100) == pytest.approx(theirs)


# ---- single conversions --------------------------------------------------------------------------

SCALED = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FLOAT8 = """[model]
converters = ['quantize.linear.float8']
[quantize.linear.float8]
filter_fqns = ['output', 'attention.wq']"""
WARMUP_COSINE = """"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupCosineLR",
    "params": {"total_num_steps": 50, "cos_min_ratio": 0.1, "warmup_num_steps": 5}}"""
MODEL = "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
MODEL += "--micro-batch-size 2 --global-batch-size 32 --train-samples 3200 --lr 1e-3 "
LLAMA = MODEL + "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
LLAMA += "--hidden-dropout 0 --attention-dropout 0 "


@pytest.mark.parametrize(
    "more, key, value",
    [
        ("", "train.steps", 100),
        ("--lr-warmup-samples 320", "optim.warmup_steps", 10),
        ("--lr-warmup-fraction .2 --lr-decay-samples 1600", "optim.warmup_steps", 10),
        ("--rampup-batch-size 8 8 640", "train.rampup", {"start": 8, "increment": 8, "samples": 640}),
        ("--rampup-batch-size 8 8 640", "train.tokens", 3200 * 32),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", "layout.virtual_stages", 4),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1", "layout.stages", [2, 5, 5, 6]),
        ("--ddp-bucket-size 52428800", "layout.bucket_mb", 200),
        ("--use-torch-fsdp2", "layout.sharding", 3),
        ("--eval-iters 3", "train.eval_samples", 96),
        ("--recompute-granularity full --recompute-method uniform", "train.recompute", "full"),
        (
            "--recompute-granularity selective --recompute-modules layernorm moe_act",
            "train.recompute_ops",
            ["norm", "activation"],
        ),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "train.fp8.recipe", "tensorwise"),
        ("--fp8-format hybrid --fp8-amax-history-len 16", "train.fp8.history", 1),
        ("--qk-clip --qk-clip-threshold 50 --qk-clip-alpha 0.5", "optim.qk_clip", 50.0),
        ("--optimizer muon --muon-momentum 0.95 --qk-clip", "optim.momentum", 0.95),
        ("--lr-decay-style WSD --lr-wsd-decay-samples 320", "optim.wsd_decay_steps", 10),
        ("--vocab-size 1000 --tensor-model-parallel-size 2", "model.vocab_size", 1024),
        ("--vocab-size 1000 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1", "model.vocab_size", 1001),
        ("--profile", "train.profile", "11:13"),
        ("--load there --save here", "dir", "here"),
        ("--reset-position-ids --reset-attention-mask", "data.document_attention", True),
        ("--window-size 127,0", "model.family", "mistral"),
        ("--window-size '(127,0)'", "model.sliding_window", 128),
        ("--add-qkv-bias", "model.family", "qwen2"),
        ("--rotary-percent 0.5", "model.family", "phi3"),
        ("--num-experts 8 --moe-router-score-function sigmoid", "model.family", "glm4_moe"),
        ("--num-experts 8 --qk-layernorm --moe-router-pre-softmax", "model.norm_topk_prob", False),
        (
            "--num-experts 8 --moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type global_aux_loss",
            "model.router_aux_loss_scope",
            "global_batch",
        ),
        ("--use-rope-scaling --rope-scaling-factor 32", "model.rope_scaling", SCALED),
        ("--num-distributed-optimizer-instances 2 --use-distributed-optimizer", "layout.shard_group", 4),
    ],
)
def test_a_value_of_another_meaning_is_converted(more, key, value):
    found = import_config(ForeignText("line", LLAMA + more, ranks=8))
    assert settings(found)[key] == value, {k: v for k, v in settings(found).items()}


RECIPES = Path(__file__).parents[2] / "recipes"
HYBRID = "--normalization RMSNorm --squared-relu --disable-bias-linear --position-embedding-type none "
HYBRID += "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --num-layers 52 "
HYBRID += "--hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --group-query-attention "
HYBRID += "--num-query-groups 8 --kv-channels 128 --mamba-num-heads 128 --mamba-head-dim 64 --vocab-size 131072 "
HYBRID += "--is-hybrid-model --seq-length 4096 --max-position-embeddings 8192 --micro-batch-size 1 "
HYBRID += "--global-batch-size 8 --train-iters 10 --lr 1e-3 --hybrid-override-pattern "
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def test_a_hybrid_is_read_from_its_pattern():
    """The arguments of Nemotron-H-8B: the model that our recipe has."""
    found = settings(import_config(ForeignText("line", HYBRID + PATTERN, ranks=8)))
    ours = {key.removeprefix("model."): value for key, value in found.items() if key.startswith("model.")}
    recipe = load_run(RECIPES / "nemotron_h_8b.yaml").model
    differs = {
        name: (value, getattr(recipe, name))
        for name, value in ours.items()
        if value != (list(getattr(recipe, name)) if isinstance(value, list) else getattr(recipe, name))
    }
    assert set(differs) <= {"max_position_embeddings"}, differs
    wrong = import_config(ForeignText("line", HYBRID + "M-ME", ranks=8))
    assert any("has a layer 'E'" in outcome.says for outcome in wrong.outcomes)


def test_their_defaults_are_written():
    ours = settings(import_config(ForeignText("line", MODEL)))
    assert ours["optim.beta2"] == 0.999 and ours["optim.weight_decay"] == 0.01 and ours["optim.schedule"] == "linear"
    assert ours["model.intermediate_size"] == 256 and ours["model.tie_word_embeddings"] is True
    assert ours["model.dropout"] == ours["model.attention_dropout"] == 0.1 and ours["model.family"] == "gpt2"
    assert settings(import_config(ForeignText("line", LLAMA)))["model.intermediate_size"] == 128
    titan = settings(import_config(ForeignText("x.toml", "[job]\n[training]\nsteps = 10\n")))
    assert titan["optim.lr"] == 8e-4 and titan["train.precision"] == "bf16" and titan["optim.warmup_steps"] == 9


@pytest.mark.parametrize(
    "text, key, value",
    [
        ("[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4", "layout.shard_group", 4),
        ("[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1", "layout.sharding", 0),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'",
            "layout.virtual_stages",
            2,
        ),
        ("[lr_scheduler]\ndecay_ratio = 0.5\nwarmup_steps = 10", "optim.wsd_decay_steps", 50),
        ("[lr_scheduler]\ndecay_ratio = 0.95\nwarmup_steps = 10\ndecay_type = 'cosine'", "optim.schedule", "cosine"),
        (FLOAT8, "train.fp8.exclude", ["*.q_proj.*"]),
        ("[validation]\nenable = true\nfreq = 5\nsteps = 3\nlocal_batch_size = 2", "train.eval_samples", 48),
        ("[checkpoint]\nenable = true\nasync_mode = 'async'", "checkpoint.background", True),
        ("[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'op'", "train.recompute", "pointwise"),
    ],
)
def test_a_value_of_a_toml_is_converted(text, key, value):
    found = import_config(ForeignText("x.toml", f"[job]\n[training]\nsteps = 100\n{text}\n", ranks=8))
    assert settings(found)[key] == value


@pytest.mark.parametrize(
    "text, key, value",
    [
        (
            '"zero_optimization": {"stage": 3, "reduce_bucket_size": 52428800}, "bf16": {"enabled": true}',
            "layout.bucket_mb",
            100,
        ),
        ('"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}', "layout.shard_across", "optimizer"),
        ('"fp16": {"enabled": true, "initial_scale_power": 12}', "train.loss_scale", 4096.0),
        ('"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}', "optim.weight_decay", 0.0),
        (WARMUP_COSINE, "optim.min_lr", 1e-4),
        ('"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50}}', "train.steps", 50),
        ('"sequence_parallel_size": 2', "layout.cp_ulysses", 2),
        ('"compression_training": {"enabled": false, "x": 1}', "layout.sharding", 0),
    ],
)
def test_a_value_of_a_json_is_converted(text, key, value):
    found = import_config(ForeignText("x.json", f'{{"train_batch_size": 8, {text}}}'))
    assert settings(found)[key] == pytest.approx(value)


# ---- tables that change are noticed, and no key is lost --------------------------------------------


def test_a_key_that_an_importer_forgets_is_listed():
    t = Translation("Theirs", [ForeignKey("a", 1), ForeignKey("b", 2), ForeignKey("a", 3, 7)])
    t.apply({"a": Becomes("train.seed")})
    found = t.finish()
    assert [(o.key.name, o.kind) for o in found.outcomes] == [("a", "built in"), ("b", "missing"), ("a", "set")]
    assert "line 7" in found.outcomes[0].says and settings(found) == {"train.seed": 3}


def test_a_key_has_one_outcome():
    t = Translation("Theirs", [ForeignKey("a", 1)])
    t.built_in("a", "so")
    with pytest.raises(ValueError, match="a is missing, but it was built in"):
        t.missing("a", "no")
    with pytest.raises(ValueError, match="is set twice"):
        t.set("train.seed", 1)
        t.set("train.seed", 2)


def test_a_value_that_cannot_be_is_listed_with_the_reason():
    def refuse(value: Any) -> Any:
        raise Refused("there is no such choice")

    t = Translation("Theirs", [ForeignKey("a", 1)])
    t.apply({"a": Becomes("train.seed", refuse), "b": Becomes("optim.lr", refuse, 3)})
    found = t.finish()
    assert found.outcomes[0].kind == "missing" and found.differs == (("b", "there is no such choice"),)


@pytest.mark.parametrize(
    "module, key, example",
    [
        (megatron, "--seed", "rl_qwen3_8b.sh"),
        (megatron, "--sequence-parallel", "llama3_8b_fp8.sh"),
        (torchtitan, "optimizer.lr", "llama3_8b.toml"),
        (torchtitan, "training.max_norm", "llama3_8b.toml"),
        (deepspeed, "gradient_clipping", "pipeline.json"),
        (deepspeed, "steps_per_print", "bf16_full.json"),
    ],
)
def test_a_changed_table_changes_the_import(module, key, example, monkeypatch):
    path = next(p for p in EVERY if p.name == example)
    before = imported(path)
    monkeypatch.setattr(module, "RULES", {name: rule for name, rule in module.RULES.items() if name != key})
    after = import_config(read_foreign(str(path)))
    assert (before.settings, before.outcomes) != (after.settings, after.outcomes)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("x.txt", "hello\n", "of no framework that is known here (Megatron-LM: options such as --num-layers"),
        ("x.toml", "[job]\n[training]\nsteps = = 3\n", "is not TOML"),
        ("x.json", '{\n"train_batch_size": 3,\n"fp16" {}\n}', "is not JSON (Expecting ':' delimiter)"),
        ("x.sh", 'python x.py --num-layers 3 --hidden-size "4\n', "a quote or bracket that begins here has no end"),
        ("x.yaml", "MODEL_ARGS:\n  trainer.num_nodes: 1\n", "no arguments of Megatron-LM"),
        ("x.yaml", "MODEL_ARGS:\n  --num-layers: [1\n", "is not YAML"),
        ("x.sh", "# --num-layers --hidden-size\necho\n", "no command with options of Megatron-LM"),
        (
            "x.toml",
            "[job]\n# --num-layers --hidden-size\n[training]\n",
            "several frameworks, because Megatron-LM='--num-layers, --hidden-size', torchtitan='[job], [training]'",
        ),
    ],
)
def test_bad_input_is_refused(name, text, says, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    done = CliRunner().invoke(cli, ["import-config", str(path), "-o", str(tmp_path / "run.yaml")])
    assert isinstance(done.exception, ConfigError) and says in str(done.exception)
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize("name, line", [("x.toml", 3), ("x.json", 3)])
def test_the_line_of_damage_is_named(name, line):
    texts = {"x.toml": "[job]\n[training]\nsteps = = 3\n", "x.json": '{\n"train_batch_size": 3,\n"fp16" {}\n}'}
    with pytest.raises(ConfigError) as error:
        import_config(ForeignText(name, texts[name]))
    assert error.value.problems[0].where == f"{name}:{line}"


def test_a_framework_is_named_where_two_are_possible(tmp_path):
    text = "[job]\n# --num-layers --hidden-size\n[training]\nsteps = 3\n"
    found = import_config(ForeignText("x", text), "torchtitan")
    assert found.framework == "torchtitan" and settings(found)["train.steps"] == 3
    with pytest.raises(ConfigError, match="--from='titan'"):
        import_config(ForeignText("x", text), "titan")


# ---- the verb ------------------------------------------------------------------------------------


def test_the_verb_writes_a_config_and_says_what_became_of_each_key(tmp_path, monkeypatch):
    out, path = tmp_path / "run.yaml", FOLDER / "megatron/mixtral_8x7b.sh"
    given = ["--var", "1=runs/mixtral", "--var", "2=tok.model", "--var", "3=data/a", "--var", "WANDB_API_KEY=secret"]
    words = ["import-config", str(path), "-o", str(out), *given, "--ranks", "64"]
    monkeypatch.setattr("sys.argv", ["phalanx", *words])
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    text = out.read_text()
    assert text.startswith("# Made by: phalanx import-config ") and "secret" not in text + done.output
    run = read(out, ["model.vocab_size=32000"]).run
    assert (
        run is not None and run.dir == "runs/mixtral" and run.data.paths == ("data/a",) and run.log.wandb == "Mixtral"
    )
    again = CliRunner().invoke(cli, ["import-config", str(path), "-o", str(out)])
    assert isinstance(again.exception, ConfigError) and "is there already" in str(again.exception)


def test_problems_that_remain_are_shown(tmp_path):
    path = FOLDER / "megatron/mixtral_8x7b.sh"
    done = CliRunner().invoke(cli, ["import-config", str(path), "-o", str(tmp_path / "run.yaml"), "--ranks", "8"])
    assert isinstance(done.exception, ConfigError) and "layout.ep=8" in str(done.exception)
    assert (tmp_path / "run.yaml").exists() and "keys" in done.output


def test_an_importer_of_a_package_is_found_by_its_place():
    found = import_config(
        ForeignText("x.json", '{"train_batch_size": 8}'), "phalanx.config.importers.deepspeed:IMPORTER"
    )
    assert settings(found)["train.global_batch"] == 8


def test_values_keep_their_types_in_yaml():
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 2)
    for value in (
        1,
        1.5,
        1e-8,
        6e-05,
        True,
        None,
        "a/b.c",
        "99,1,0",
        "11:13",
        "true",
        "0.5",
        "",
        "ä b",
        [1, "x"],
        {"a": 1.0},
    ):
        assert yaml.load(scalar(value)) == value


def test_lists_are_left_out_where_they_are_empty():
    found = Translation("Theirs", [ForeignKey("a", 1)])
    found.apply({"a": BuiltIn("so")})
    assert list(listed(found.finish())) == ["needs no key"]
