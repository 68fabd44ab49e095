"""All that is measured on a GPU, in one go, as the files that the README and the notebooks read.

    python -m stages.toolkit.measure --out stages/measured

builds all stages, times each beside what a user would call instead, asks what its kernels take of the card (both in
bench.json), and compares the x-ray's counts with Nsight Compute's (nsight.json). With --stages the files keep what they
have of other stages, each on the machine that it was measured on; `machines` has the form of the files. The tables
stand at the end of what it prints. The exit code is 1 if a global count differs or if the profiler, the compiler or
Nsight Compute gives no answer; the times are written all the same.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from stages.toolkit import bench, build, chapter, machines, nsight, render, resources
from stages.toolkit.errors import KernelFault, NotAvailable, StageNotFound
from stages.toolkit.stage import find, load, names

DTYPES = ("float32", "bfloat16")


def times(stages: Iterable[str], dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """The records of `bench` on the GPU: every stage that it runs, at its benchmark sizes, in the dtypes that it takes.

    Progress goes to stderr.
    """
    records = []
    for name in stages:
        stage = load(name)
        if why := stage.kernels.unable("cuda"):
            print(f"left out: {why}", file=sys.stderr)
            continue
        for dtype in dtypes:
            if getattr(torch, dtype) not in stage.dtypes:
                continue
            for values in stage.bench["cuda"]:
                began = time.monotonic()
                try:
                    records.append(bench.bench(stage, stage.sizes(values), getattr(torch, dtype), "cuda"))
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    print(f"{name}: {values} does not fit into this card's memory, left out", file=sys.stderr)
                    continue
                print(f"{name}: {values}, {dtype}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return records


def add_kernels(records: Sequence[dict[str, Any]]) -> list[str]:
    """Add to each record the `kernels` that ran, with what they take of the card; the texts of what could not be told.

    After all times, for a profiler may slow down what runs later in the process.
    """
    failed: dict[str, None] = {}  # a set that keeps its order
    spilled = {}
    with ThreadPoolExecutor(build.Runner().jobs) as pool:
        stages = dict.fromkeys(record["stage"] for record in records)
        reports = {name: pool.submit(resources.spilled, name, resources.of_card()) for name in stages}
    for name, report in reports.items():
        try:
            spilled[name] = report.result()
        except build.BuildError as error:
            spilled[name] = {}
            failed[f"{name}: no compiler's report: {error}"] = None
    for record in records:
        name = record["stage"]
        try:
            record["kernels"] = resources.kernels(load(name), record["sizes"], getattr(torch, record["dtype"]))
        except (NotAvailable, RuntimeError) as error:
            failed[f"{name}: its kernels' registers and shared memory are not known: {error}"] = None
            continue
        for kernel in record["kernels"]:
            kernel["spilled"] = spilled[name].get(kernel["kernel"])
    return list(failed)


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """For a terminal: the times beside the incumbent's, and the percentage of what the card can do."""
    rows = [
        (
            r["stage"],
            "x".join(map(str, r["sizes"].values())),
            chapter.dtype_name(r["dtype"], r.get("options", {})),
            *(
                f"{r[key]:,.4g}"
                for key in ("ms", "incumbent_ms", "ratio", "gbytes_per_s", "tflops", "percent_of_limit")
            ),
            r["limit"],
        )
        for r in records
    ]
    header = ("stage", "", "", "ms", "incumbent", "ratio", "GB/s", "TFLOP/s", "%", "of")
    return render.table(header, rows, "<<<>>>>>><")


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.toolkit.measure", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the records go")
    parser.add_argument("--stages", default="all", help="such as 10,11,12; default: all")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help=f"for the times; default: {','.join(DTYPES)}")
    parser.add_argument("--skip", choices=("bench", "nsight"), help="leave this part out")
    options = parser.parse_args(arguments)
    tables, failed = [], []
    try:
        if not torch.cuda.is_available():
            raise NotAvailable("this torch finds no GPU here; the CPU device is measured by stages.toolkit.device_cost")
        chosen = names() if options.stages == "all" else [find(name) for name in options.stages.split(",")]
        build.build(chosen, ("simt", "xray", "cuda"))
        if options.skip != "bench":
            records = times(chosen, options.dtypes.split(","))
            run, path = {**nsight.machine(), "records": records}, options.out / "bench.json"
            before = machines.read(path)
            write(path, machines.joined(before, run, "records"))
            failed += add_kernels(records)
            write(path, machines.joined(before, run, "records"))
            tables.append(f"Medians on {torch.cuda.get_device_name()}\n" + table(records))
        if options.skip != "nsight":
            try:
                record = nsight.record(chosen)
                nsight.add(options.out / "nsight.json", record)
                tables.append(nsight.table(record["rows"]))
                failed += nsight.failures(record["rows"])
            except (NotAvailable, KernelFault) as error:
                failed.append(f"no comparison with Nsight Compute: {error}")
    except (NotAvailable, KernelFault, StageNotFound, build.BuildError) as error:
        failed.append(str(error))
    print("\n\n".join(tables))
    for text in failed:
        print(f"error: {text}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
