"""How long a stage takes: on a GPU beside what a user would call instead, on a CPU the CPU device's own cost."""

import itertools
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
from stages.toolkit.verify import outputs

REPEATS = 50  # at most
ROUNDS = 5  # in which the calls that are compared take turns
SLOW, FEW = 200.0, 3  # a call of more ms is measured only so often


def bench(stage: Stage, sizes: Mapping[str, int], dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Measure the stage's function on one problem; the record's keys say what was measured and in which unit."""
    record = {"stage": stage.name, "sizes": dict(sizes), "dtype": str(dtype).removeprefix("torch."), "device": device}
    if options := stage.options(dtype)[0]:
        record["options"] = options
    return record | (_on_gpu if device == "cuda" else _on_cpu)(stage, sizes, dtype)


def _on_cpu(stage: Stage, sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, Any]:
    if stage.in_triton:
        raise NotAvailable(
            f"{stage.name}: without a GPU `bench` measures the CPU device, which does not run Triton, and how long "
            "Triton's interpreter takes says nothing; with one, it measures the kernel"
        )
    options = stage.options(dtype)[0]
    arguments = stage.family.make(sizes, dtype, **options)
    report = stage.xray(*arguments, **options)
    threads = sum(launch.threads for launch in report.launches)
    plain = median_ms(lambda: stage.function(*arguments, **options))
    xrayed = median_ms(lambda: stage.xray(*arguments, **options))
    return {
        "ms": plain,
        "threads": threads,
        "ns_per_thread": plain * 1e6 / threads if threads else 0.0,
        "xray_ms": xrayed,
        "xray_ratio": xrayed / plain,
        "cores": stage.kernels.module("simt").info().get("workers"),
    }


def median_ms(call: Callable[[], object], budget: float = 2.0, trials: int | None = None) -> float:
    """The median of 5 to 50 calls, as many as fit into the budget of seconds, or of so many trials."""
    call()
    times, start = [], time.perf_counter()
    least, most = (trials, trials) if trials else (5, REPEATS)
    while len(times) < least or (len(times) < most and time.perf_counter() - start < budget):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def _on_gpu(stage: Stage, sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, Any]:
    family, options = stage.family, stage.options(dtype)[0]
    inputs = rotated(family.make(sizes, dtype, "cuda", **options))
    tf32 = bool(options.get("tf32"))
    formula = getattr(family, "COMPILED", False)
    calls = {"": stage.function, "incumbent_": compiled(family.incumbent) if formula else family.incumbent}
    if formula:
        calls["eager_"] = family.incumbent
    calls = {name: partial(call, **options) for name, call in calls.items()}
    with float32_products(tf32):
        own, other, *more = in_turn(list(calls.values()), inputs)
        both = stage.gradients and (formula or getattr(family, "BACKWARD", False))
        backward = _with_backward(calls, inputs) if both else {}
    operations, moved = family.work(sizes, dtype.itemsize, **options)
    bandwidth, rate = copy_bandwidth(), matmul_rate(dtype, tf32)
    floor = {"memory": moved / bandwidth * 1e3, "arithmetic": operations / rate * 1e3}  # ms that no kernel can undercut
    limit = max(floor, key=floor.get)
    return {
        "card": torch.cuda.get_device_name(),
        "ms": own,
        "incumbent": family.INCUMBENT,
        "incumbent_ms": other,
        **dict(zip(("eager_ms",), more, strict=False)),  # of the incumbent, not compiled
        "ratio": other / own,  # above 1: faster than the incumbent
        **backward,
        "limit": limit,
        "percent_of_limit": 100 * floor[limit] / own,
        "gbytes_per_s": moved / own / 1e6,
        "tflops": operations / own / 1e9,
        "copy_gbytes_per_s": bandwidth / 1e9,
        "matmul_tflops": rate / 1e12,
    }


@cache
def compiled(function: Callable) -> Callable:
    """The function, compiled for each problem anew."""
    # More of them than torch compiles before it goes on without, and says nothing.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 16
    return torch.compile(function, dynamic=False)


def _with_backward(calls: Mapping[str, Callable], inputs: Sequence[Sequence[object]]) -> dict[str, float]:
    """The times of forward and backward together, and the memory that they take at most beside the inputs.

    The keys begin as those of the calls.
    """
    grads = [torch.randn_like(x) for x in outputs(next(iter(calls.values()))(*inputs[0]))]
    both = {name: with_backward(call, grads) for name, call in calls.items()}
    found = {f"{name}both_ms": ms for name, ms in zip(both, in_turn(list(both.values()), inputs), strict=True)}
    for name, call in both.items():
        found[f"{name}peak_bytes"] = peak_bytes(call, inputs[0])
    found["both_ratio"] = found["incumbent_both_ms"] / found["both_ms"]
    return found


def peak_bytes(call: Callable, arguments: Sequence[object]) -> int:
    """The memory of the GPU that a call takes at most beside what is there before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(*arguments)
    return torch.cuda.max_memory_allocated() - before


def with_backward(call: Callable, grads: Sequence[Tensor]) -> Callable[..., None]:
    """The call, and the gradients of all tensors that it is given, from those of its results."""

    def both(*arguments: object) -> None:
        given = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in arguments]
        # A result that depends on none of them, as a gain of impulses, has no gradient to hand on.
        some = [(x, g) for x, g in zip(outputs(call(*given)), grads, strict=True) if x.requires_grad]
        results, own_grads = zip(*some, strict=True)
        torch.autograd.grad(results, [x for x in given if isinstance(x, Tensor)], own_grads)

    return both


def rotated(arguments: Sequence[object]) -> list[tuple[object, ...]]:
    """The arguments and copies of them, together well past the L2 cache, so that no call finds its inputs there."""
    size = sum(x.nbytes for x in arguments if isinstance(x, Tensor))
    cache_size = torch.cuda.get_device_properties(None).L2_cache_size
    copies = max(2, min(64, 4 * cache_size // max(size, 1) + 1))
    return [tuple(x.clone() if isinstance(x, Tensor) else x for x in arguments) for _ in range(copies)]


def in_turn(calls: Sequence[Callable], inputs: Sequence[Sequence[object]], trials: int | None = None) -> list[float]:
    """The median time of each call on the GPU, in ms, by events, over inputs taken in turn.

    Each is called `trials` times after a warm-up; if that is not said, 5 to 50 times, and one that is SLOW only FEW
    times. The calls take turns, a few of the one, a few of the next, so that what drifts meanwhile, the clock and the
    power, is the same for all.
    """
    rotation = itertools.cycle(inputs)
    repeats = []
    for call in calls:
        _event_times(call, rotation, 1)  # builds, loads, allocates
        (ms,) = _event_times(call, rotation, 1)
        repeats.append(trials or (FEW if ms > SLOW else max(5, min(REPEATS, int(1000 / max(ms, 1e-3))))))
    for call, count in zip(calls, repeats, strict=True):
        if count > FEW:
            _event_times(call, rotation, count // 5)
    rounds = min(ROUNDS, *repeats)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, found in zip(calls, repeats, times, strict=True):
            found += _event_times(call, rotation, -(-count // rounds))
    return [statistics.median(found) for found in times]


def _event_times(call: Callable, rotation: Iterator[Sequence[object]], repeats: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    # All calls queue up behind a pause, so that the time between two events is the GPU's and not Python's.
    torch.cuda._sleep(30_000_000)
    for (start, end), arguments in zip(events, rotation, strict=False):
        start.record()
        call(*arguments)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


@contextmanager
def float32_products(tf32: bool = False) -> Iterator[None]:
    """Products of float32 by torch in float32, or in TF32."""
    before, of_cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32  # true unless one says so, and an LSTM's products are cuDNN's
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = of_cudnn


@cache
def copy_bandwidth() -> float:
    """Bytes a second, read and written together, of a copy of up to 1 GiB on this card."""
    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 8)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    (ms,) = in_turn([target.copy_], [(source,)])
    return 2 * size / (ms / 1e3)


@cache
def matmul_rate(dtype: torch.dtype, tf32: bool = False) -> float:
    """Operations a second of torch.matmul at 8192^3 on this card; float32 in TF32 only where that is said."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
    with float32_products(tf32):
        (ms,) = in_turn([torch.matmul], [(a, b)])
    return 2 * 8192**3 / (ms / 1e3)


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
