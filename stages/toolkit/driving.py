"""Who drives the steps of a sequence: Python, C++ or a CUDA graph. How long a step of stage 60 takes by each.

    python -m stages.toolkit.driving --out stages/measured/driving.json

needs a GPU. Notebook 60 shows what is recorded. The kernels are the same in all three, as are their numbers; what
differs is who starts them, and what lies between the end of one and the start of the next.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from stages.families import lstm
from stages.toolkit import bench, build, nsight
from stages.toolkit.errors import NotAvailable

RECORD = build.PACKAGE / "measured" / "driving.json"
SIZES = ((256, 1, 128, 128), (256, 16, 512, 512), (256, 64, 1024, 1024))  # T, B, I, H
WAYS = {"python": "Python", "cpp": "C++", "graph": "a CUDA graph"}


def ways(sizes: Sequence[int], device: str = "cuda") -> dict[str, Callable[[], object]]:
    """The same sequence, float32, driven from Python, from C++ and, on a GPU, by a graph."""
    stage = importlib.import_module("stages.60_lstm_cell.stage")
    arguments = lstm.make(dict(zip(lstm.SIZES, sizes, strict=True)), torch.float32, device)
    found = {
        "python": lambda: stage.driven_from_python(*arguments),
        "cpp": lambda: stage.stage.lstm(*arguments),
    }
    if device == "cuda":
        found["cpp"]()  # builds, loads and sets up, which a graph may not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found["cpp"]()
        found["graph"] = graph.replay
    return found


def between_steps(seq: int = 256) -> dict[str, float]:
    """Microseconds a step, on this CPU, of a sequence whose batch is empty: nothing is launched, all else is done."""
    calls = ways((seq, 0, 32, 32), "cpu")
    return {name: bench.median_ms(call, 0.5) / seq * 1e3 for name, call in calls.items()}


def record() -> dict[str, object]:
    """Microseconds a step, from the call to the end of its work, for each size and way, and on which machine."""
    if not torch.cuda.is_available():
        raise NotAvailable("this torch finds no GPU here: there is nothing to record")
    rows = []
    for sizes in SIZES:
        calls = ways(sizes)
        with torch.no_grad():
            times = {name: bench.median_ms(finished(call), trials=10) for name, call in calls.items()}
        rows.append({"sizes": list(sizes), **{name: ms / sizes[0] * 1e3 for name, ms in times.items()}})
    return {**nsight.machine(), "unit": "us a step", "rows": rows}


def finished(call: Callable[[], object]) -> Callable[[], None]:
    """The call, and a wait for all that it has launched."""

    def wait() -> None:
        call()
        torch.cuda.synchronize()

    return wait


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.toolkit.driving", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RECORD, metavar="FILE", help="where the record goes")
    options = parser.parse_args(arguments)
    try:
        found = record()
    except NotAvailable as error:
        print(f"error: {error}")
        return 1
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for row in found["rows"]:
        print(row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
