"""report.html: one self-contained page about a run, drawn from its folder alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
 body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2733; background: #fff }
 h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
 table { border-collapse: collapse }
 td { padding: .2rem 1.2rem .2rem 0; vertical-align: top }
 td:first-child { color: #5b6b7c } pre { background: #f3f5f7; padding: 1rem; overflow-x: auto; white-space: pre-wrap }
 svg { max-width: 100%; height: auto }
</style></head><body>
<h1>{{ title }}</h1>
<table>{% for key, value in facts %}<tr><td>{{ key }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
{% for name, picture in pictures %}<h2>{{ name }}</h2>{{ picture | safe }}{% endfor %}
{% if sample %}<h2>Text made by the model</h2><pre>{{ sample }}</pre>{% endif %}
<h2>Config</h2><pre>{{ config }}</pre>
</body></html>
"""


def write_report(folder: Path, sample: str | None = None) -> Path:
    """Write `folder`/report.html from metrics.jsonl and config.yaml; `sample` is shown as text made by the model."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [r for r in rows if "loss" in r]
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    page = Environment(autoescape=True).from_string(PAGE)
    text = page.render(title=f"Run {folder}", facts=facts(rows, steps), pictures=pictures(rows, steps), sample=sample, config=config)
    path = folder / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def facts(rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if not steps:
        return [("steps", "none finished")]
    last = steps[-1]
    rates = sorted(r["tokens_per_s"] for r in steps[len(steps) // 10 :])
    found = [
        ("steps", str(last["step"])),
        ("tokens", f"{last['tokens']:,}"),
        ("first and last loss", f"{steps[0]['loss']:.4f} → {last['loss']:.4f}"),
        ("tokens per second", f"{rates[len(rates) // 2]:,.0f} (median)"),
        ("peak memory per rank", f"{max(r['memory_gib'] for r in steps):.2f} GiB"),
        ("skipped steps", str(last["skipped"])),
    ]
    slow = sorted({rank for r in steps for rank in r.get("slow", {})}, key=int)
    for rank in slow[:8]:
        ratios = [r["slow"][rank] for r in steps if rank in r.get("slow", {})]
        found.append((f"slow: rank {rank}", f"worked up to {max(ratios):.1f} times as long as the others, in {len(ratios)} steps"))
    for name in valid_sets(rows):
        found.append((f"validation loss: {name.removeprefix('valid/')}", f"{[r[name] for r in rows if name in r][-1]:.4f}"))
    return found


def valid_sets(rows: list[dict[str, Any]]) -> list[str]:
    return sorted({key for r in rows for key in r if key.startswith("valid/")})


def pictures(rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(title, svg) of each curve."""
    curves = {"train": ([r["step"] for r in steps], [r["loss"] for r in steps])}
    for name in valid_sets(rows):
        points = [(r["step"], r[name]) for r in rows if name in r]
        curves[name] = ([p[0] for p in points], [p[1] for p in points])
    made = [("Loss (nats per token)", draw(curves, "loss"))]
    for key, title in (("grad_norm", "Gradient norm"), ("lr", "Learning rate"), ("tokens_per_s", "Tokens per second")):
        made.append((title, draw({key: ([r["step"] for r in steps], [r[key] for r in steps])}, key, height=1.8)))
    return made + routing_pictures([r for r in steps if "experts" in r])


def routing_pictures(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Of a model with experts: a curve per layer."""
    made = []
    titles = {"load_max": "Load of the fullest expert, over the mean", "entropy": "Entropy of the router (nats)", "dropped": "Dropped pairs"}
    for key, title in titles.items() if steps else ():
        layers = [i for i, v in enumerate(steps[-1]["experts"][key]) if v is not None]
        curves = {f"layer {i}": ([r["step"] for r in steps], [r["experts"][key][i] for r in steps]) for i in layers}
        made.append((title, draw(curves, key, height=2.4)))
    return made


def draw(curves: dict[str, tuple[list[int], list[float]]], label: str, height: float = 3.6) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    for name, (x, y) in curves.items():
        many = len(x) > 60
        axes.plot(x, y, label=name, linewidth=1.2, marker=None if many else "o", markersize=3)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend(frameon=False)
    out = io.StringIO()
    figure.savefig(out, format="svg")
    svg = out.getvalue()
    return svg[svg.index("<svg") :]
