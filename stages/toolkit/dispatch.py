"""Where the time of a sequence goes that is driven step by step: notebook 60's measurement, on a GPU.

    python -m stages.toolkit.dispatch --out stages/measured/dispatch.json

One problem after the other, without gradients: stage 60's steps launched by Python one by one, by one call from C++,
and by a CUDA graph of that call; stage 61, which is one launch; and torch.nn.LSTM. Of each the median time from the
call to the end of its work, in ms; and beside them what stage 60's kernels take by themselves, as the profiler has it.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stages.families import lstm
from stages.toolkit import bench, nsight
from stages.toolkit.errors import NotAvailable
from stages.toolkit.stage import load

PROBLEMS = ((256, 1, 128, 128), (256, 16, 512, 512), (256, 64, 1024, 1024))  # T, B, I, H


def measure(sizes: Sequence[int], trials: int = 10) -> dict[str, Any]:
    """The times of one problem in float32, in ms, by the names that the notebook shows."""
    by_step, persistent = load("60"), load("61")
    from_python = importlib.import_module(f"stages.{by_step.name}.stage").driven_from_python
    arguments = lstm.make(by_step.sizes(tuple(sizes)), torch.float32, "cuda")
    with torch.no_grad(), bench.float32_products():
        by_step.lstm(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            by_step.lstm(*arguments)
        calls = {
            "stage 60, from Python": lambda: from_python(*arguments),
            "stage 60, from C++": lambda: by_step.lstm(*arguments),
            "stage 60, a CUDA graph": graph.replay,
            "stage 61": lambda: persistent.lstm(*arguments),
            lstm.INCUMBENT: lambda: lstm.incumbent(*arguments),
        }
        times = {name: bench.median_ms(finished(call), trials=trials) for name, call in calls.items()}
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            by_step.lstm(*arguments)
            torch.cuda.synchronize()
    kernels = sum(event.device_time_total for event in profiler.key_averages()) / 1e3
    return {"sizes": list(sizes), "ms": {**times, "stage 60's kernels by themselves": kernels}}


def finished(call: Callable[[], object]) -> Callable[[], None]:
    """The call, and a wait for all that it has launched."""

    def wait() -> None:
        call()
        torch.cuda.synchronize()

    return wait


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.toolkit.dispatch", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the record goes")
    options = parser.parse_args(arguments)
    try:
        if not torch.cuda.is_available():
            raise NotAvailable("this torch finds no GPU here, and without one nothing is launched")
        record = {**nsight.machine(), "problems": [measure(sizes) for sizes in PROBLEMS]}
    except NotAvailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for problem in record["problems"]:
        print(*problem["sizes"], *(f"{name}: {ms:.3f} ms" for name, ms in problem["ms"].items()), sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
