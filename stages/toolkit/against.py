"""How the time of a family's stages grows with a size, the length of a scan: beside what a user would call instead.

On a GPU all calls of a problem take turns, on inputs past the L2 cache. On a CPU it is the CPU device's own cost, which
says nothing about a GPU.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stages.toolkit import bench, chapter, render
from stages.toolkit.errors import NotAvailable
from stages.toolkit.stage import Stage
from stages.toolkit.verify import outputs

PANELS = {"ms": "forward alone", "both_ms": "forward and backward"}
LIMIT = "the card's limit"
Chosen = Sequence[tuple[str, Stage, Mapping[str, Any]]]  # a line's name, its stage, the options that it is called with


def measure(
    stages: Sequence[Stage],
    problems: Sequence[Mapping[str, int]],
    dtype: torch.dtype,
    device: str,
    wanted: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """A record for each stage and problem, in their order: its `line` in a plot, its `ms`, its `both_ms` with backward.

    On a GPU there are also records for the family's incumbent, and for the time below which the card cannot be. What
    does not fit into memory, or cannot run, has none; stderr says so.

    A stage is called with the first of its sets of options that has all that is `wanted`; without one it is left out.
    """
    chosen = []
    for stage in stages:
        sets = [options for options in stage.options(dtype) if (wanted or {}).items() <= options.items()]
        chosen += [(line(stage, sets[0]), stage, sets[0])] if sets else []
    for sizes in problems if chosen else ():
        common = {"sizes": dict(sizes), "dtype": str(dtype).removeprefix("torch."), "device": device}
        for record in (_on_gpu if device == "cuda" else _on_cpu)(chosen, sizes, dtype):
            yield common | record


def line(stage: Stage, options: Mapping[str, Any]) -> str:
    """What a stage is called here, with the options that it is called with: "44 warp, time_dim=2"."""
    return ", ".join(filter(None, (chapter.short_name(stage), chapter.dtype_name("", options).strip())))


def _on_cpu(chosen: Chosen, sizes: Mapping[str, int], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    for name, stage, options in chosen:
        arguments, call = stage.family.make(sizes, dtype, **options), partial(stage.function, **options)
        record = {"line": name, "stage": stage.name, "options": options}
        try:
            record["ms"] = bench.median_ms(partial(call, *arguments), budget=0.5)
            if stage.gradients:
                both = bench.with_backward(call, [x.clone() for x in outputs(call(*arguments))])
                record["both_ms"] = bench.median_ms(partial(both, *arguments), budget=0.5)
        except NotAvailable as error:
            _left_out(name, sizes, error)
            continue
        yield record | {"cores": stage.kernels.module("simt").info().get("workers")}


def _on_gpu(chosen: Chosen, sizes: Mapping[str, int], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    family = chosen[0][1].family
    lines = [(name, stage, stage.function, options) for name, stage, options in chosen]
    formula = getattr(family, "COMPILED", False)
    # What it is called with is what the first stage is.
    lines.append(
        (family.INCUMBENT, None, bench.compiled(family.incumbent) if formula else family.incumbent, lines[0][3])
    )
    inputs: dict[str, list[tuple[object, ...]]] = {}  # by options
    for *_, options in lines:
        if str(options) not in inputs:
            inputs[str(options)] = bench.rotated(family.make(sizes, dtype, "cuda", **options))
    rotation = [(n,) for n in range(min(map(len, inputs.values())))]
    tf32 = any(options.get("tf32") for *_, options in lines)
    records, forward, backward = {}, {}, {}
    with bench.float32_products(tf32):
        for name, stage, function, options in lines:
            own, call = inputs[str(options)], partial(function, **options)
            records[name] = {"line": name, "stage": stage.name if stage else None, "options": options}

            def once(n: int, call: Callable = call, own: Sequence = own) -> object:
                return call(*own[n])

            grads = _tried(name, sizes, lambda once=once: [torch.randn_like(x) for x in outputs(once(0))])
            if grads is None:
                continue
            forward[name] = once
            if stage.gradients if stage else True:
                both = bench.with_backward(call, grads)

                def twice(n: int, both: Callable = both, own: Sequence = own) -> None:
                    both(*own[n])

                if _tried(f"{name} with its backward", sizes, lambda twice=twice: [twice(0)]):
                    backward[name] = twice
        for key, calls in (("ms", forward), ("both_ms", backward)):
            for name, ms in zip(calls, bench.in_turn(list(calls.values()), rotation) if calls else (), strict=True):
                records[name][key] = ms
    card = {"card": torch.cuda.get_device_name()}
    for name, record in records.items():
        if name in forward:
            yield card | record
    options = lines[0][3]
    work, later = family.work(sizes, dtype.itemsize, **options), getattr(family, "backward_work", None)
    rates = (bench.matmul_rate(dtype, tf32), bench.copy_bandwidth())
    limit = {"line": LIMIT, "stage": None, "ms": 1e3 * max(x / rate for x, rate in zip(work, rates, strict=True))}
    if later:
        parts = zip(work, later(sizes, dtype.itemsize, **options), rates, strict=True)
        limit["both_ms"] = 1e3 * max((first + second) / rate for first, second, rate in parts)
    yield card | limit


def _tried(name: str, sizes: Mapping[str, int], call: Callable[[], list]) -> list | None:
    """What the call gives, or None where memory does not suffice or the call cannot run here; builds and compiles."""
    try:
        found = call()
        torch.cuda.synchronize()
        return found
    except (torch.cuda.OutOfMemoryError, NotAvailable) as error:
        _left_out(name, sizes, error)
        torch.cuda.empty_cache()
        return None


def _left_out(name: str, sizes: Mapping[str, int], error: Exception) -> None:
    print(f"{name}: left out at {tuple(sizes.values())}: {str(error).partition('. ')[0]}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# What was found


def growing(problems: Sequence[Mapping[str, int]]) -> str | None:
    """The size that tells the problems apart, "T"; "M = N = K" if several do, and are equal. None: there is no such."""
    names = [name for name in problems[0] if len({sizes[name] for sizes in problems}) > 1] or list(problems[0])[:1]
    alike = all(len({sizes[name] for name in names}) == 1 for sizes in problems)
    return " = ".join(names) if alike else None


def series(records: Sequence[Mapping[str, Any]], key: str) -> dict[str, dict[int, float]]:
    """The lines of a panel: the ms by the size that grows."""
    name = (growing([r["sizes"] for r in records]) or "").partition(" ")[0]
    found: dict[str, dict[int, float]] = {}
    for r in records:
        if key in r:
            found.setdefault(r["line"], {})[r["sizes"][name]] = r[key]
    return found


def title(records: Sequence[Mapping[str, Any]]) -> str:
    """What was measured, on what: "B = 1, D = 1024, float32, on one NVIDIA H100"."""
    first = records[0]
    grows = growing([r["sizes"] for r in records]).split(" = ")
    fixed = [f"{name} = {size}" for name, size in first["sizes"].items() if name not in grows]
    if first["device"] == "cuda":
        where = f"on one {first['card']}"
    else:
        where = f"the CPU device on {first['cores']} cores: its own cost, not a GPU's"
    return ", ".join([*fixed, first["dtype"], where])


def text(records: Sequence[Mapping[str, Any]]) -> str:
    """The times as two tables for a terminal."""
    parts = [title(records)]
    for key, what in PANELS.items():
        if not (lines := series(records, key)):
            continue
        places = sorted({place for points in lines.values() for place in points})
        rows = [
            (name, *(f"{points[place]:,.4g}" if place in points else chapter.MISSING for place in places))
            for name, points in lines.items()
        ]
        header = (f"{growing([r['sizes'] for r in records])} =", *(f"{place:,}" for place in places))
        parts.append(f"{what}, ms\n" + render.table(header, rows, "<" + ">" * len(places)))
    return "\n\n".join(parts)


def plot(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw two panels, forward alone and with the backward, both logarithmic: a line for each stage.

    What a user would call instead is dashed, and the card's limit is thin.

    Raises:
        NotAvailable: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise NotAvailable("a plot needs matplotlib: pip install matplotlib") from None
    names = list(dict.fromkeys(r["line"] for r in records))
    own = [r["line"] for r in records if r["stage"]]
    colours = matplotlib.colormaps["tab10"].colors
    styles = {name: {"color": colours[i % 10], "marker": "o"} for i, name in enumerate(dict.fromkeys(own))}
    panels = {key: series(records, key) for key in PANELS}
    panels = {key: lines for key, lines in panels.items() if lines}
    figure = Figure(figsize=(3.2 + 3.4 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    drawn = {}
    for axes, (key, lines) in zip(every, panels.items(), strict=True):
        for name in names:
            if points := lines.get(name):
                other = {"color": "#22272e", "lw": 0.8 if name == LIMIT else 1.6, "ls": "-" if name == LIMIT else "--"}
                style = {"lw": 1.6, "ms": 4, **styles[name]} if name in styles else other
                (drawn[name],) = axes.plot(list(points), list(points.values()), label=name, **style)
        axes.set(xscale="log", yscale="log", title=PANELS[key], xlabel=growing([r["sizes"] for r in records]))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.tick_params(axis="x", rotation=30)
        axes.grid(alpha=0.25, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    every[0].set_ylabel("ms")
    figure.suptitle(title(records), fontsize=10)
    figure.legend(drawn.values(), drawn, frameon=False, fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=150)
