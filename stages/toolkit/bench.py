"""How long a stage takes: on a GPU beside what a user would call instead, on a CPU the CPU device's own cost."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.toolkit.errors import NotAvailable
from stages.toolkit.stage import Stage

REPEATS = 50  # at most


def bench(stage: Stage, sizes: Mapping[str, int], dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Measure the stage's function on one problem; the record's keys say what was measured and in which unit."""
    record = {"stage": stage.name, "sizes": dict(sizes), "dtype": str(dtype).removeprefix("torch."), "device": device}
    record["options"] = stage.options(dtype)[0]
    return record | (_on_gpu if device == "cuda" else _on_cpu)(stage, sizes, dtype)


def _on_cpu(stage: Stage, sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, Any]:
    arguments, options = stage.family.make(sizes, dtype), stage.options(dtype)[0]
    report = stage.xray(*arguments, **options)
    threads = sum(launch.threads for launch in report.launches)
    plain = _median_ms(lambda: stage.function(*arguments, **options))
    xrayed = _median_ms(lambda: stage.xray(*arguments, **options))
    return {
        "ms": plain,
        "threads": threads,
        "ns_per_thread": plain * 1e6 / threads if threads else 0.0,
        "xray_ms": xrayed,
        "xray_ratio": xrayed / plain,
        "cores": stage.kernels.module("simt").info().get("workers"),
    }


def _median_ms(call: Callable[[], object], budget: float = 2.0) -> float:
    """The median of 5 to 50 calls, as many as fit into the budget of seconds."""
    call()
    times, start = [], time.perf_counter()
    while len(times) < 5 or (len(times) < REPEATS and time.perf_counter() - start < budget):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def _on_gpu(stage: Stage, sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, Any]:
    family, options = stage.family, stage.options(dtype)[0]
    inputs = _rotated(family.make(sizes, dtype, "cuda"))
    with exact_float32():
        own = gpu_ms(partial(stage.function, **options), inputs)
        other = gpu_ms(partial(family.incumbent, **options), inputs)
    operations, moved = family.work(sizes, dtype.itemsize, **options)
    bandwidth, rate = copy_bandwidth(), matmul_rate(dtype)
    floor = {"memory": moved / bandwidth * 1e3, "arithmetic": operations / rate * 1e3}  # ms that no kernel can undercut
    limit = max(floor, key=floor.get)
    return {
        "card": torch.cuda.get_device_name(),
        "ms": own,
        "incumbent": family.INCUMBENT,
        "incumbent_ms": other,
        "ratio": other / own,  # above 1: faster than the incumbent
        "limit": limit,
        "percent_of_limit": 100 * floor[limit] / own,
        "gbytes_per_s": moved / own / 1e6,
        "tflops": operations / own / 1e9,
        "copy_gbytes_per_s": bandwidth / 1e9,
        "matmul_tflops": rate / 1e12,
    }


def _rotated(arguments: Sequence[object]) -> list[tuple[object, ...]]:
    """The arguments and copies of them, together well past the L2 cache, so that no call finds its inputs there."""
    size = sum(x.nbytes for x in arguments if isinstance(x, Tensor))
    cache_size = torch.cuda.get_device_properties(None).L2_cache_size
    copies = max(2, min(64, 4 * cache_size // max(size, 1) + 1))
    return [tuple(x.clone() if isinstance(x, Tensor) else x for x in arguments) for _ in range(copies)]


def gpu_ms(call: Callable, inputs: Sequence[Sequence[object]]) -> float:
    """The median time of a call on the GPU, by events, over inputs taken in turn: 5 to 50 calls after a warm-up."""
    _event_times(call, inputs, 1)  # builds, loads, allocates
    repeats = max(5, min(REPEATS, int(1000 / max(_event_times(call, inputs, 1)[0], 1e-3))))
    _event_times(call, inputs, repeats // 5)
    return statistics.median(_event_times(call, inputs, repeats))


def _event_times(call: Callable, inputs: Sequence[Sequence[object]], repeats: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    # All calls queue up behind a pause, so that the time between two events is the GPU's and not Python's.
    torch.cuda._sleep(30_000_000)
    for i, (start, end) in enumerate(events):
        start.record()
        call(*inputs[i % len(inputs)])
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


@contextmanager
def exact_float32() -> Iterator[None]:
    """Products of float32 in float32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def copy_bandwidth() -> float:
    """Bytes a second, read and written together, of a copy of up to 1 GiB on this card."""
    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 8)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / (gpu_ms(target.copy_, [(source,)]) / 1e3)


@cache
def matmul_rate(dtype: torch.dtype) -> float:
    """Operations a second of torch.matmul at 8192^3 on this card; float32 without TF32."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
    with exact_float32():
        return 2 * 8192**3 / (gpu_ms(torch.matmul, [(a, b)]) / 1e3)


def plot(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the records as bars: on a GPU the stage and the incumbent, on a CPU the plain and the x-rayed call.

    Raises:
        NotAvailable: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise NotAvailable("a plot needs matplotlib: pip install matplotlib") from None
    first = records[0]
    on_gpu = first["device"] == "cuda"
    other, label = ("incumbent_ms", first["incumbent"]) if on_gpu else ("xray_ms", "under the x-ray")
    figure = Figure(figsize=(max(4.0, 1.8 * len(records) + 2), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for shift, key, name, color in ((-0.2, "ms", first["stage"], "#2f6db5"), (0.2, other, label, "#b0b0b0")):
        places = [i + shift for i in range(len(records))]
        bars = axes.bar(places, [r[key] for r in records], 0.38, label=name, color=color)
        axes.bar_label(bars, [f"{r[key]:.3g}" for r in records], fontsize=8)
    axes.set_xticks(range(len(records)), [" x ".join(map(str, r["sizes"].values())) for r in records])
    axes.set_ylabel("ms")
    axes.set_yscale("log" if max(r[other] for r in records) > 20 * min(r["ms"] for r in records) else "linear")
    axes.set_title(f"{first['dtype']}, {first['card'] if on_gpu else 'the CPU device'}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
