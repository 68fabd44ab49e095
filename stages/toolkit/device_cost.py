"""What the CPU device itself costs, beside plain loops of the same compiler on the same machine.

    python -m stages.toolkit.device_cost [--json stages/measured/cpu_device.json]

A 256 x 256 x 256 product in float32 with 16 x 16 blocks, one thread an output (naive) and through shared memory
(tiled), on one core and on all; a barrier for each thread; the x-ray. Each figure is the best of many calls, which are
taken in turn, so that a disturbance of the machine meets all of them. The exit code is 1 if a target is missed. The
kernels are in tests/simt/cost.cu. Run it on a machine that does nothing else.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from stages.toolkit import build, device, kernels, render
from stages.toolkit.errors import NotAvailable

SIZE = 256
BLOCKS, THREADS, BARRIERS = 64, 256, 200
SECONDS = 4.0  # that each group of calls may take

TARGETS = {  # figure: (the most it may be, in words)
    "naive_to_plain": (1.3, "naive kernel, to plain loops, one core"),
    "tiled_to_plain": (25.0, "tiled kernel, to plain tiled loops, one core"),
    "naive_two_to_one": (0.6, "naive kernel, two cores to one"),
    "tiled_two_to_one": (0.6, "tiled kernel, two cores to one"),
    "naive_xray": (25.0, "naive kernel, x-rayed to not, one core"),
    "tiled_xray": (25.0, "tiled kernel, x-rayed to not, one core"),
}


def modules() -> dict[str, ModuleType]:
    """The module `_simt` and `_xray` of tests/simt/cost.cu, built where that is needed."""
    folder = build.ROOT / "tests" / "simt"
    if not (folder / "cost.cu").exists():
        raise NotAvailable(f"{folder}/cost.cu is not there: it is part of a checkout, not of an installed package")
    found = {}
    for variant in ("simt", "xray"):
        path = build.build_module(
            folder / "cost.cu", folder / "cost.cpp", variant, build.OBJECTS / "cost", progress=True
        )
        found[variant] = kernels.load(f"cost._{variant}", path)
    return found


def best_ms(calls: Mapping[str, Callable[[], None]], seconds: float = SECONDS) -> dict[str, float]:
    """The shortest time of each call in ms; they are taken in turn, at least five times each."""
    best, rounds, end = dict.fromkeys(calls, float("inf")), 0, time.perf_counter() + seconds
    while rounds < 5 or time.perf_counter() < end:
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
        rounds += 1
    return {name: 1e3 * shortest for name, shortest in best.items()}


def measure(seconds: float = SECONDS) -> dict[str, Any]:
    """The whole record: the machine, times in ms, what a barrier costs, and the ratios that have targets."""
    load = os.getloadavg()[0]
    simt, xray = modules().values()
    cores = simt.info()["workers"]
    a, b = (torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    c = torch.empty(SIZE, SIZE)

    def on(workers: int, module: ModuleType, function: str) -> None:
        module.configure(workers=workers)
        getattr(module, function)(a, b, c)

    def xrayed(workers: int, function: str) -> None:
        xray.configure(workers=workers)
        xray.xray_start()
        try:
            getattr(xray, function)(a, b, c)
        finally:
            xray.xray_stop()

    calls: dict[str, Callable[[], None]] = {}
    some = sorted({1, min(2, cores), cores})
    for function in ("naive", "tiled"):
        for workers in some:
            calls[f"{function}_plain_{workers}"] = partial(simt.plain, function, a, b, c, workers)
            calls[f"{function}_{workers}"] = partial(on, workers, simt, function)
    truth = a.double() @ b.double()
    for name, call in calls.items():
        c.fill_(torch.nan)
        call()
        if not (c - truth).norm() < 1e-5 * truth.norm():
            raise NotAvailable(f"{name} gives a wrong product: nothing to measure")
    times = best_ms(calls, seconds)
    times |= best_ms({f"{name}_xray_{w}": partial(xrayed, w, name) for name in ("naive", "tiled") for w in some})

    def waiting(barriers: int) -> None:
        simt.configure(workers=1)
        simt.waiting(BLOCKS, barriers)

    waits = best_ms({str(count): partial(waiting, count) for count in (0, 1, 1 + BARRIERS)}, seconds / 4)
    per_thread = {count: 1e6 * ms / (BLOCKS * THREADS) for count, ms in waits.items()}  # ns
    simt.configure()
    ratios = {
        "naive_to_plain": times["naive_1"] / times["naive_plain_1"],
        "tiled_to_plain": times["tiled_1"] / times["tiled_plain_1"],
        "naive_xray": times["naive_xray_1"] / times["naive_1"],
        "tiled_xray": times["tiled_xray_1"] / times["tiled_1"],
    }
    if cores > 1:
        ratios |= {f"{name}_two_to_one": times[f"{name}_2"] / times[f"{name}_1"] for name in ("naive", "tiled")}
    return {
        "cpu": device.cpu_facts()["processor"],
        "cores": cores,
        "workers": some,  # cores that were put to use
        "compiler": simt.info()["compiler"],
        "date": date.today().isoformat(),
        "load": round(load, 1),  # what else ran when this began, in processes: above 0.5 the figures are not to be used
        "ms": times,
        "ns_thread": per_thread["0"],  # a thread that never waits
        "ns_first_barrier": per_thread["1"] - per_thread["0"],  # a stack is made ready for the thread
        "ns_barrier": (per_thread[str(1 + BARRIERS)] - per_thread["1"]) / BARRIERS,  # a switch, for each thread
        "ratios": ratios,
    }


def table(record: Mapping[str, Any]) -> str:
    """For a terminal: the times, the price of a thread and of a barrier, the ratios beside their targets."""
    ms, workers = record["ms"], record["workers"]
    kinds = {"plain loops": "{}_plain_{}", "CPU device": "{}_{}", "CPU device, x-rayed": "{}_xray_{}"}
    rows = [
        (f"{name}, {kind}", *(f"{ms[pattern.format(name, w)]:.2f}" for w in workers))
        for name in ("naive", "tiled")
        for kind, pattern in kinds.items()
    ]
    title = f"{record['cpu']}, {record['compiler']}, {record['date']}, load {record['load']}"
    text = f"{title}\n\n256 x 256 x 256, float32, 16 x 16 blocks; ms, best of many\n"
    header = ("", *(f"{w} core{'s' if w > 1 else ''}" for w in workers))
    text += render.table(header, rows, "<" + ">" * len(workers))
    text += f"\n\na thread {record['ns_thread']:.1f} ns, its first barrier {record['ns_first_barrier']:.1f} ns more, "
    text += f"each further barrier {record['ns_barrier']:.1f} ns\n\n"
    rows = [
        (TARGETS[name][1], f"{ratio:.2f}", f"{TARGETS[name][0]:g}", "" if ratio <= TARGETS[name][0] else "MISSED")
        for name, ratio in record["ratios"].items()
    ]
    return text + render.table(("ratio", "", "at most", ""), rows, "<>><")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.toolkit.device_cost", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of measuring; default: {SECONDS:g} a group")
    options = parser.parse_args(arguments)
    try:
        record = measure(options.seconds)
    except (NotAvailable, build.BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))
    return int(any(ratio > TARGETS[name][0] for name, ratio in record["ratios"].items()))


if __name__ == "__main__":
    sys.exit(main())
