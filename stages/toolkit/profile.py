"""What the methods of discretization cost: their coefficients alone and in a scan, beside the same in torch.

On a GPU torch's formulation is compiled, all calls of a method take turns, on inputs past the L2 cache, and Mamba's
kernel is measured, too, if it is there. On a CPU it is the CPU device's own cost, beside torch as it is.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stages.families import discretization, selective_scan
from stages.toolkit import bench, render
from stages.toolkit.against import PANELS
from stages.toolkit.errors import NotAvailable
from stages.toolkit.stage import load
from stages.toolkit.verify import outputs

METHODS = selective_scan.METHODS
SIZES = {"batch": "B", "dim": "d", "seqlen": "T", "dstate": "n"}  # options, and what the families call them
DEFAULT = {
    "cpu": {"batch": 1, "dim": 32, "seqlen": 64, "dstate": 16},
    "cuda": {"batch": 2, "dim": 1024, "seqlen": 2048, "dstate": 16},
}
TRIALS = {"cpu": 15, "cuda": 20}
PARTS = {"coefficients": "the coefficients alone", "scan": "the scan"}
OWN, TORCH, MAMBA = "stages", "torch", "mamba_ssm"  # whose code it is
FULL = "does not fit"
COLOURS = {OWN: "#2f6db5", TORCH: "#b0b0b0", MAMBA: "#e0803a"}
COPIES = 8  # of [B, d, n, T], as many as torch's formulation and its backward need, and as coefficients do, about


def measure(
    sizes: Mapping[str, int], dtype: torch.dtype, device: str, methods: Sequence[str], trials: int
) -> Iterator[dict[str, Any]]:
    """A record for each method, part and whose code it is: `ms`, `both_ms` with the backward, on a GPU `peak_bytes`.

    What does not fit into memory has a text, `missing`, instead; and so has Mamba's kernel where it cannot run.
    """
    here = {"sizes": dict(sizes), "dtype": str(dtype).removeprefix("torch."), "device": device, "trials": trials}
    if device == "cuda":
        here["card"] = torch.cuda.get_device_name()
    else:
        here["cores"] = load(selective_scan.FASTEST[0]).kernels.module("simt").info().get("workers")
    for method in methods:
        for part, family, option in (
            ("coefficients", discretization, {"method": method}),
            ("scan", selective_scan, {"discretization_method": method}),
        ):
            problem = {name: sizes[option] for option, name in SIZES.items()}
            if family is discretization:
                problem = {**problem, "D": problem["d"], "N": problem["n"]}
            arguments = family.make(problem, dtype, device, **option)
            formula = bench.compiled(family.incumbent) if device == "cuda" else family.incumbent
            stage = load(family.FASTEST[0])
            calls = {OWN: stage.function, TORCH: formula}
            calls = {by: partial(call, **option) for by, call in calls.items()}
            missing: dict[str, str] = {}
            if method == "mamba" and part == "scan":
                try:
                    calls[MAMBA] = mamba(device)
                except NotAvailable as error:
                    missing[MAMBA] = str(error)
            states = dtype.itemsize * problem["B"] * problem["d"] * problem["n"] * problem["T"]
            if device == "cpu" and COPIES * states > memory():  # a process there is ended and not told
                large = [TORCH, OWN][: 2 if part == "coefficients" else 1]
                calls = {by: call for by, call in calls.items() if by not in large}
                missing |= dict.fromkeys(large, FULL)
            found = times(calls, arguments, device, trials, both=stage.gradients) | {
                by: {"missing": text} for by, text in missing.items()
            }
            for by, record in found.items():
                yield here | {"method": method, "part": part, "by": by} | record


def memory() -> int:
    """The bytes that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def mamba(device: str) -> Callable:
    """Mamba's own kernel, which takes what `selective_scan` takes.

    Raises:
        NotAvailable: It is not installed, or there is no GPU to run it on.
    """
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ImportError:
        raise NotAvailable("mamba_ssm is not installed") from None
    if device != "cuda":
        raise NotAvailable("it runs on a GPU alone")
    return selective_scan_fn


def times(
    calls: Mapping[str, Callable], arguments: Sequence[object], device: str, trials: int, both: bool = True
) -> dict[str, dict[str, Any]]:
    """What each call takes, forward and, if `both`, with its backward; or what keeps it from running, as `missing`."""
    found: dict[str, dict[str, Any]] = {by: {} for by in calls}
    inputs = bench.rotated(arguments) if device == "cuda" else [arguments]
    timed: dict[str, dict[str, Callable]] = {"ms": dict(calls), "both_ms": {}}
    with bench.float32_products():
        for by, call in calls.items():
            try:
                results = outputs(call(*arguments))
                if both:
                    call = bench.with_backward(call, [torch.randn_like(x) for x in results])
                    timed["both_ms"][by] = call
                    call(*arguments)  # builds and compiles
                if device == "cuda":
                    found[by]["peak_bytes"] = bench.peak_bytes(call, arguments)
            except (RuntimeError, NotImplementedError) as error:
                if not (by == MAMBA or full(error)):
                    raise
                found[by] = {"missing": FULL if full(error) else str(error).partition("\n")[0]}
                for some in timed.values():
                    some.pop(by, None)
                if device == "cuda":
                    torch.cuda.empty_cache()
        for key, some in timed.items():
            if device == "cuda":
                measured = bench.in_turn(list(some.values()), inputs, trials) if some else []
            else:
                measured = [bench.median_ms(partial(call, *arguments), trials=trials) for call in some.values()]
            for by, ms in zip(some, measured, strict=True):
                found[by][key] = ms
    return found


def full(error: Exception) -> bool:
    """Whether it says that memory does not suffice; a CPU's has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "not enough memory")
    )


# ---------------------------------------------------------------------------------------------------------------------
# What was found


def title(records: Sequence[Mapping[str, Any]]) -> str:
    """What was measured, on what."""
    first = records[0]
    sizes = ", ".join(f"{name} {size}" for name, size in first["sizes"].items())
    on_gpu = first["device"] == "cuda"
    where = first["card"] if on_gpu else f"the CPU device on {first['cores']} cores: its own cost, not a GPU's"
    return f"{sizes}, {first['dtype']}, medians of {first['trials']},\n{where}"


def text(records: Sequence[Mapping[str, Any]]) -> str:
    """The records as two tables for a terminal, and what there is to say of them."""
    on_gpu = records[0]["device"] == "cuda"
    header = ["method"]
    for words in ("", "both "):
        header += [f"{words}ms", "torch ms"] + ["times"] * on_gpu
    header += ["MiB", "torch MiB"] * on_gpu
    parts = [title(records)]
    for part, what in PARTS.items():
        by_method: dict[str, dict[str, Mapping[str, Any]]] = {}
        for r in records:
            if r["part"] == part:
                by_method.setdefault(r["method"], {})[r["by"]] = r
        if not by_method:
            continue
        rows = []
        for method, found in by_method.items():
            own, other = (found.get(by, {}) for by in (OWN, TORCH))
            row = [method]
            for key in ("ms", "both_ms"):
                row += [cell(own, key), cell(other, key)]
                if on_gpu:
                    row.append(f"{other[key] / own[key]:.3g}" if key in own and key in other else "")
            row += [cell(own, "peak_bytes", 2**20), cell(other, "peak_bytes", 2**20)] * on_gpu
            rows.append(row)
        parts.append(f"{what[0].upper()}{what[1:]}\n" + render.table(header, rows, "<" + ">" * (len(header) - 1)))
    notes = ["both: forward and backward together."]
    if on_gpu:
        notes.append("torch: its formulation, compiled. times: as fast as it. MiB: at most, beside the inputs.")
    else:
        notes.append(
            "The CPU device imitates a GPU, thread by thread: ms are its own times, torch's are those of this CPU. "
            "Neither says anything of a GPU."
        )
    parts.append(render.wrap(" ".join(notes)))
    parts += [of_mamba(r) for r in records if r["by"] == MAMBA]
    return "\n\n".join(parts)


def cell(record: Mapping[str, Any], key: str, unit: float = 1) -> str:
    return f"{record[key] / unit:,.4g}" if key in record else record.get("missing", "")


def of_mamba(record: Mapping[str, Any]) -> str:
    """A line about Mamba's own kernel."""
    if "missing" in record:
        return f"Mamba's own kernel was not measured: {record['missing']}."
    return (
        f"Mamba's own kernel, for mamba: {record['ms']:,.4g} ms, both {record['both_ms']:,.4g} ms, "
        f"{record['peak_bytes'] / 2**20:,.4g} MiB."
    )


def plot(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the records as bars, logarithmic: the coefficients above, the scan below; on the right with the backward.

    Raises:
        NotAvailable: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise NotAvailable("a plot needs matplotlib: pip install matplotlib") from None
    methods = list(dict.fromkeys(r["method"] for r in records))
    labels = {OWN: "this package", TORCH: "torch's formulation", MAMBA: "Mamba's kernel"}
    shown = [by for by in labels if any(r["by"] == by and ("ms" in r or r["missing"] == FULL) for r in records)]
    figure = Figure(figsize=(max(8, 3.2 + 1.1 * len(methods)), 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(len(PARTS), len(PANELS), sharex=True, sharey="row", squeeze=False)
    for line, part in zip(every, PARTS, strict=True):
        for axes, (key, panel) in zip(line, PANELS.items(), strict=True):
            for n, by in enumerate(shown):
                found = {r["method"]: r for r in records if (r["part"], r["by"]) == (part, by)}
                width = 0.8 / len(shown)
                places = {m: i + (n - (len(shown) - 1) / 2) * width for i, m in enumerate(methods) if m in found}
                drawn = [m for m in places if key in found[m]]
                axes.bar([places[m] for m in drawn], [found[m][key] for m in drawn], width, color=COLOURS[by])
                for m in places.keys() - set(drawn):
                    where = axes.get_xaxis_transform()
                    axes.text(places[m], 0.02, FULL, transform=where, rotation=90, ha="center", fontsize=7)
            axes.set_title(f"{PARTS[part]}, {panel}", fontsize=10)
            axes.set(yscale="log")
            axes.set_xticks(range(len(methods)), methods, rotation=40, ha="right")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.grid(axis="y", alpha=0.25, lw=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel("ms")
    figure.suptitle(title(records), fontsize=10)
    handles = [Patch(color=COLOURS[by], label=labels[by]) for by in shown]
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside lower center", ncols=len(shown))
    figure.savefig(path, dpi=150)
