"""report.html: one self-contained page about a run, drawn from its folder alone."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment
from ruamel.yaml import YAML

from phalanx.base import tree
from phalanx.base.records import Record
from phalanx.config.run import Run
from phalanx.observe import run_records as records
from phalanx.observe.curves import Curve, Plot, draw, smoothed
from phalanx.observe.starts import read_starts, redacted
from phalanx.observe.step_line import duration

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{{ title }}</title>
<style>
 :root { color-scheme: light dark; --text: #1d2733; --soft: #5b6b7c; --page: #fff; --box: #f3f5f7; --line: #dde3e9;
   --c0: #1f6fb5; --c1: #c4561a; --c2: #23834d; --c3: #8a4fb0; --c4: #a77b00; --c5: #b3365f }
 @media (prefers-color-scheme: dark) { :root { --text: #dce3ea; --soft: #93a1b0; --page: #14191f; --box: #1e252d; --line: #2f3944;
   --c0: #63aef0; --c1: #f0935a; --c2: #5fc98d; --c3: #c397e6; --c4: #dcb545; --c5: #ee7fa4 } }
 body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 1.5rem auto; padding: 0 1rem; color: var(--text); background: var(--page) }
 h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
 table { border-collapse: collapse } td { padding: .15rem 1rem .15rem 0; vertical-align: top; overflow-wrap: anywhere }
 td:first-child { color: var(--soft); min-width: 8rem }
 pre { background: var(--box); padding: .8rem; overflow-x: auto; font-size: .85rem; line-height: 1.4; border-radius: .3rem }
 pre.wrap { white-space: pre-wrap; overflow-wrap: anywhere } summary { cursor: pointer; color: var(--soft) }
 .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.2rem 1.5rem }
 figure { margin: 0 } figcaption { font-weight: 600; min-height: 3rem } svg { width: 100%; height: auto; display: block }
 svg text { fill: var(--soft); font-size: 12px } .grid { stroke: var(--line); fill: none }
 polyline { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round } circle { fill: currentColor }
 .faint polyline { stroke-width: .8; opacity: .35 }
 .c0 { color: var(--c0) } .c1 { color: var(--c1) } .c2 { color: var(--c2) } .c3 { color: var(--c3) } .c4 { color: var(--c4) } .c5 { color: var(--c5) }
 .legend { font-weight: 400; font-size: .85rem } .legend span { margin-right: .9rem }
 .legend span::before { content: ""; display: inline-block; width: .9rem; border-top: 2px solid; vertical-align: middle; margin-right: .3rem }
</style></head><body>
<h1>{{ title }}</h1>
<table>{% for key, value in facts %}<tr><td>{{ key }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
<h2>Curves</h2><div class="plots">{% for picture in pictures %}{{ picture | safe }}{% endfor %}</div>
{% if data %}<h2>Data</h2><pre>{{ data }}</pre>{% endif %}
{% if samples %}<h2>Text made during training</h2>{% for step, texts in samples %}<h3>After step {{ "{:,}".format(step) }}</h3>{% for text in texts %}<pre class="wrap">{{ text }}</pre>{% endfor %}{% endfor %}{% endif %}
{% if sample %}<h2>Text made by the model</h2><pre class="wrap">{{ sample }}</pre>{% endif %}
<h2>Config</h2><pre class="wrap">{{ changed }}</pre>
<details><summary>The whole config, defaults included</summary><pre class="wrap">{{ config }}</pre></details>
</body></html>
"""  # noqa: E501
SHOWN_STEPS = 5  # the last ones with text made during training
SMOOTH = 50  # with at least so many points, a curve is smoothed


def write_report(folder: Path, sample: str | None = None) -> Path:
    """Write `folder`/report.html from metrics.jsonl, config.yaml and starts.jsonl; `sample` is shown as text generated
    by the model."""
    rows = read_rows(folder / "metrics.jsonl")
    steps, starts = [r for r in rows if records.is_step(r)], read_starts(folder)
    config = redacted((folder / "config.yaml").read_text(encoding="utf-8"))
    page = Environment(autoescape=True).from_string(PAGE)
    shown, name = [*facts(rows, steps), *circumstances(starts, folder)], records.SAMPLES.name
    text = page.render(
        title=f"Run {folder}",
        facts=shown,
        pictures=[draw(p) for p in plots(rows, steps)],
        data=starts[-1]["data"] if starts else "",
        sample=sample,
        samples=[(row["step"], row[name].values()) for row in rows if name in row][-SHOWN_STEPS:],
        changed=what_was_set(config),
        config=config,
    )
    path = folder / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # cut short
            continue
    return rows


def facts(rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if not steps:
        return [("steps", "none finished")]
    last = steps[-1]
    smooth = smoothed([r["loss"] for r in steps])[-1]
    found = [
        ("steps", f"{last['step']:,}"),
        ("tokens", f"{last['tokens']:,}"),
        (
            "loss",
            f"{steps[0]['loss']:.4f} → {last['loss']:.4f}, smoothed {smooth:.4f} (perplexity {perplexity(smooth)})",
        ),
    ]
    for name in valid_sets(rows):
        best, step = min((r[name], r["step"]) for r in rows if name in r)
        latest = [r[name] for r in rows if name in r][-1]
        set_name = name.removeprefix("valid/")
        found.append(
            (
                f"validation loss: {set_name}",
                f"{latest:.4f}; best {best:.4f} at step {step:,} (perplexity {perplexity(best)})",
            )
        )
    found += [
        ("time in steps", duration(reduced(records.STEP_S, steps))),
        ("tokens per second", f"{reduced(records.TOKENS_PER_S, steps[len(steps) // 10 :]):,.0f} (median)"),
        ("peak memory per rank", f"{reduced(records.MEMORY, steps):.2f} {records.MEMORY.unit}"),
    ]
    if last["skipped"]:
        found.append(("skipped steps", str(last["skipped"])))
    slow = sorted({rank for r in steps for rank in r.get("slow", {})}, key=int)
    for rank in slow[:8]:
        ratios = [r["slow"][rank] for r in steps if rank in r.get("slow", {})]
        found.append(
            (
                f"slow: rank {rank}",
                f"worked up to {records.SLOW.reduce(ratios):.1f} times as long as the others, in {len(ratios)} steps",
            )
        )
    return found


def reduced(record: Record, steps: list[dict[str, Any]]) -> Any:
    return record.reduce(r[record.name] for r in steps)


def perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.4g}" if loss < 50 else "beyond measure"


def circumstances(starts: list[dict[str, Any]], folder: Path) -> list[tuple[str, str]]:
    """When, where and with what the run was made."""
    if not starts:
        return []
    first, last = starts[0], starts[-1]
    begun = datetime.fromisoformat(first["time"])
    ended = datetime.fromtimestamp((folder / "metrics.jsonl").stat().st_mtime, begun.tzinfo)
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    found = [
        ("date", f"{begun:%Y-%m-%d %H:%M} to {ended:%Y-%m-%d %H:%M} UTC"),
        (
            "duration",
            duration((ended - begun).total_seconds()) + (f", in {len(starts)} starts" if len(starts) > 1 else ""),
        ),
        ("machine", f"{last['host']}: {last['machine']}; {last['ranks']} rank{'s' if last['ranks'] > 1 else ''}"),
        ("versions", versions),
    ]
    if last["commit"]:
        found.append(("commit", last["commit"]))
    if last["command"]:
        found.append(("command", last["command"]))
    return found


def what_was_set(config: str) -> str:
    """The keys that differ from their defaults, one on each line."""
    values = YAML(typ="safe", pure=True).load(config)
    defaults = {
        key.path: json.loads(json.dumps(key.default, default=str))
        for key in tree.leaves(Run)
        if key.default is not tree.REQUIRED
    }
    lines = []
    for key, value in _flat(values):
        if key not in defaults and value is not None or key in defaults and value != defaults[key]:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join(lines)


def _flat(values: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _flat(value, f"{above}{key}.") if isinstance(value, dict) and value else [(f"{above}{key}", value)]
    return found


def valid_sets(rows: list[dict[str, Any]]) -> list[str]:
    return sorted({key for r in rows for key in r if key.startswith("valid/")})


def plots(rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[Plot]:
    """The loss over steps and over tokens, then everything else over steps."""
    if not steps:
        return []
    end, tokens = steps[-1]["step"], {r["step"]: r["tokens"] for r in steps}
    at = [r["step"] for r in steps]
    found = [
        Plot(f"Loss over steps ({records.LOSS.unit})", "step", loss_curves(rows, steps, {s: s for s in tokens}), end),
        Plot(
            f"Loss over tokens ({records.LOSS.unit})", "tokens", loss_curves(rows, steps, tokens), steps[-1]["tokens"]
        ),
    ]
    for key, title in (("grad_norm", "Gradient norm"), ("lr", "Learning rate"), ("tokens_per_s", "Tokens per second")):
        values = [r[key] for r in steps]
        curves = [Curve(title, at, values)] if key == "lr" else raw_and_smoothed(title, at, values)
        found.append(Plot(title, "step", curves, end, from_zero=key == "tokens_per_s"))
    return found + task_plots(rows, end) + routing_plots([r for r in steps if "experts" in r], end)


def task_plots(rows: list[dict[str, Any]], end: int) -> list[Plot]:
    """For each of train.eval_tasks its scores."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith(records.TASKS))
    by_task: dict[str, list[Curve]] = {}
    for name in names:
        task, _, metric = name.removeprefix(records.TASKS).rpartition("/")
        points = [(row["step"], row[name]) for row in rows if name in row]
        by_task.setdefault(task, []).append(Curve(metric, [x for x, _ in points], [y for _, y in points], "dots"))
    return [Plot(f"Task {task}", "step", curves, end) for task, curves in by_task.items()]


def raw_and_smoothed(name: str, x: list[float], y: list[float]) -> list[Curve]:
    """If there are many points: the smoothed curve, with the raw one behind it."""
    if len(y) < SMOOTH:
        return [Curve(name, x, y)]
    return [Curve(name, x, y, "faint"), Curve(name, x, smoothed(y))]


def loss_curves(rows: list[dict[str, Any]], steps: list[dict[str, Any]], place: dict[int, float]) -> list[Curve]:
    curves = raw_and_smoothed("train", [place[r["step"]] for r in steps], [r["loss"] for r in steps])
    for name in valid_sets(rows):
        points = [(place[r["step"]], r[name]) for r in rows if name in r and r["step"] in place]
        curves.append(
            Curve(f"validation: {name.removeprefix('valid/')}", [x for x, _ in points], [y for _, y in points], "dots")
        )
    return curves


def routing_plots(steps: list[dict[str, Any]], end: float) -> list[Plot]:
    """For a model with experts: a curve for each layer."""
    found = []
    titles = {
        "load_max": "Load of the fullest expert, over the mean",
        "entropy": "Entropy of the router (nats)",
        "dropped": "Dropped pairs",
    }
    for key, title in titles.items() if steps else ():
        layers = [i for i, v in enumerate(steps[-1]["experts"][key]) if v is not None]
        curves = [
            Curve(f"layer {i}", [r["step"] for r in steps], smoothed([r["experts"][key][i] for r in steps]))
            for i in layers
        ]
        found.append(Plot(title, "step", curves, end))
    return found
