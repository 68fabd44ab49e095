"""Does the x-ray count what a GPU counts? Every stage on both, metric by metric, the GPU's side by Nsight Compute.

    python -m stages.toolkit.nsight [--stages 00,10,11,12] [--json stages/measured/nsight.json]

needs a GPU, nvcc and `ncu`, which may want root to read the counters. Each stage runs its benchmark size for the CPU
device and its own problems, odd ones among them, once on CUDA tensors under `ncu` and once under the x-ray. Requests
and sectors of global memory have to be equal: the exit code is 1 if one is not. Where blocks wait for others, and look
again and again, there are others on a GPU, mostly more, and not as many in every run. Wavefronts of shared memory are
equal wherever the kernel itself says how wide an access is; where nvcc made it wider, the table says so. The file keeps
what it has of other stages, each on the machine that it was compared on.
"""

import argparse
import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from stages.toolkit import build, machines, render, triton_kernels
from stages.toolkit.compilers import capture
from stages.toolkit.errors import KernelFault, NotAvailable, StageNotFound
from stages.toolkit.report import METRICS, Launch
from stages.toolkit.stage import Stage, find, load, names

DTYPES = ("float32", "float64", "bfloat16")
PROBLEM = ("stage", "size", "dtype", "date")  # what the rows of a call have in common
LOADS = ("load_requests", "load_sectors")
EXACT = (*LOADS, "store_requests", "store_sectors")  # must be equal
PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu")
TIMEOUT = 600  # seconds, for one stage

# Why the GPU may count fewer or more in shared memory, where the kernel leaves something to nvcc.
MERGED = "fewer: nvcc has made one wide load or store of neighbouring ones of a thread"
COPIES = "asynchronous copies: of rows that are copied in part, or straddle cache lines, the x-ray knows no exact rule"
UNUSED = "none: nvcc reads nothing where the sum has no terms"
WAITS = "more, all of them waits of the pipe by its conflict counter, and not as many in every run"
LOOKS = "blocks that wait for others look again and again, and tell what those that come later need not know"
ARBITRATION = "more conflicts: this counter also has waits that are no bank conflict; the wavefronts are what they cost"


@dataclass(frozen=True)
class Case:
    """One call of a stage, and what the x-ray counted in it."""

    stage: str
    sizes: tuple[int, ...]
    dtype: str
    launches: tuple[Launch, ...]
    counts: Mapping[str, int]  # under the names of METRICS
    waits: bool = False  # whether blocks wait for others


@dataclass(frozen=True)
class Profile:
    """One launch as Nsight Compute saw it."""

    kernel: str  # "void matmul_shared<float>(View<const T1, 2>, ...)"
    grid: tuple[int, ...]
    block: tuple[int, ...]
    counts: Mapping[str, int]


# ---------------------------------------------------------------------------------------------------------------------
# The x-ray's side


def problems(stage: Stage) -> list[tuple[int, ...]]:
    """The benchmark sizes of the CPU device and all that `run` checks."""
    return list(dict.fromkeys([*stage.bench["cpu"], *stage.problems]))


def cases_of(stage: Stage, sizes: Iterable[tuple[int, ...]], dtypes: Iterable[str]) -> list[Case]:
    """The calls to compare: those that launch anything."""
    cases = []
    for size in sizes:
        for dtype in dtypes:
            options = stage.options(getattr(torch, dtype))[0]
            arguments = stage.family.make(stage.sizes(size), getattr(torch, dtype), **options)
            report = stage.xray(*arguments, **options)
            report.raise_if_faulty()
            if report.launches:
                counts = {name: getattr(report.counts(), name) for name in METRICS}
                launches, blocks = tuple(report.launches), max(math.prod(launch.grid) for launch in report.launches)
                cases.append(Case(stage.name, tuple(size), dtype, launches, counts, stage.waits and blocks > 1))
    return cases


# ---------------------------------------------------------------------------------------------------------------------
# The GPU's side


def find_ncu(given: str | None = None) -> str:
    """The command of Nsight Compute.

    Raises:
        NotAvailable: It is not where it is said to be, nor on the PATH, nor beside the CUDA toolkit.
    """
    if given:
        if found := shutil.which(given):
            return found
        raise NotAvailable(f"--ncu {given}: no such command")
    home = os.environ.get("CUDA_HOME")
    found = [shutil.which("ncu"), home and shutil.which(f"{home}/bin/ncu")]
    found += [str(path) for pattern in PLACES for path in sorted(Path("/").glob(pattern[1:]), reverse=True)]
    for path in filter(None, found):
        return path
    raise NotAvailable("no ncu (Nsight Compute) on the PATH or beside the CUDA toolkit; name it with --ncu")


def command(ncu: str, kernels: Iterable[str], log: Path) -> list[str]:
    """The command line before the program to profile."""
    pattern = "|".join(sorted(re.escape(name) for name in kernels))
    return [
        *(ncu, "--csv", "--page", "raw", "--print-units", "base"),
        *("--target-processes", "all"),
        *("--clock-control", "none"),  # counts need no steady clock, and fixing it may need rights of its own
        *("--kernel-name-base", "function", "--kernel-name", f"regex:^({pattern})$"),
        *("--metrics", ",".join(METRICS.values())),
        *("--log-file", str(log)),
    ]


def profile(ncu: str, stage: Stage, cases: Sequence[Case]) -> list[Profile]:
    """Run the cases in one child process under ncu; its launches, in order.

    Raises:
        NotAvailable: ncu failed, or what it printed is not what was asked for. The text has its last lines.
    """
    kernels = {base_name(launch.kernel) for case in cases for launch in case.launches}
    calls = json.dumps([[case.sizes, case.dtype] for case in cases])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        child = [sys.executable, "-m", "stages.toolkit.nsight", "--call", stage.number, calls]
        try:
            done = subprocess.run(
                [*command(ncu, kernels, log), *child],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIMEOUT,
                cwd=build.ROOT,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotAvailable(f"{stage.name}: ncu did not finish: {error}") from None
        written = log.read_text(errors="replace") if log.exists() else ""
    text = written + "\n" + done.stdout
    if "ERR_NVGPUCTRPERM" in text:
        raise NotAvailable("ncu may not read the GPU's counters here: run this as root (the driver keeps them to root)")
    try:
        found = parse(text)
        if done.returncode != 0:
            raise ValueError(f"exit code {done.returncode}")
    except ValueError as error:
        last = "\n  ".join([line for line in text.splitlines() if line.strip()][-12:])
        raise NotAvailable(f"{stage.name}: ncu: {error}; its last lines:\n  {last}") from None
    return found


def parse(text: str) -> list[Profile]:
    """The launches in what `ncu --csv --page raw` prints, between whatever else is printed there.

    Raises:
        ValueError: There is no table, or a metric is missing or has no value.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise ValueError("no kernel was profiled")
    header, *rows = csv.reader(line for line in lines[start:] if line.startswith('"'))
    column = {}
    for name, metric in METRICS.items():
        places = [i for i, title in enumerate(header) if title == metric or title.startswith(metric + " ")]
        if not places:
            raise ValueError(f"no column {metric}")
        column[name] = places[0]
    kernel, grid, block = (header.index(title) for title in ("Kernel Name", "Grid Size", "Block Size"))
    found = []
    for row in rows:
        if len(row) != len(header) or not row[0].isdigit():  # the row of units, or something printed in between
            continue
        counts = {name: _number(row[i], METRICS[name]) for name, i in column.items()}
        shape = [tuple(map(int, re.findall(r"\d+", row[i]))) for i in (grid, block)]
        found.append(Profile(row[kernel], *shape, counts))
    if not found:
        raise ValueError("no kernel was profiled")
    return found


def _number(text: str, metric: str) -> int:
    """1048576 from "1048576", "1,048,576" or "1048576.0"."""
    plain = re.sub(r"[,'\s\u00a0\u202f]", "", text)
    if not re.fullmatch(r"\d+(\.0*)?", plain):
        raise ValueError(f"{metric} is {text!r}, not a whole number")
    return int(plain.partition(".")[0])


def base_name(kernel: str) -> str:
    """matmul_shared for "matmul_shared<float>", "void matmul_shared<T1>(View<T1, 2>)" or "a::matmul_shared<float>"."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0].split("::")[-1].strip()


def call(number: str, calls: str) -> int:
    """What runs under ncu: each call once. A GPU's counts do not depend on what ran before, so nothing warms up."""
    stage = load(number)
    for sizes, dtype in json.loads(calls):
        options = stage.options(getattr(torch, dtype))[0]
        arguments = stage.family.make(stage.sizes(tuple(sizes)), getattr(torch, dtype), "cuda", **options)
        stage.function(*arguments, **options)
        torch.cuda.synchronize()
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# Side by side


def compare(cases: Sequence[Case], profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """A row for each case and metric: what the GPU and the x-ray counted, and why they differ where that is known.

    Raises:
        ValueError: The launches on the GPU are not those on the CPU device.
    """
    rest, rows = list(profiles), []
    for case in cases:
        own, rest = rest[: len(case.launches)], rest[len(case.launches) :]
        where = f"{case.stage}, {_sizes(case.sizes)}, {case.dtype}"
        if len(own) != len(case.launches):
            raise ValueError(f"{where}: {len(case.launches)} launches on the CPU device, {len(own)} on the GPU")
        for launch, seen in zip(case.launches, own, strict=True):
            expected = (base_name(launch.kernel), tuple(launch.grid), tuple(launch.block))
            found = (base_name(seen.kernel), seen.grid, seen.block)
            if expected != found:
                raise ValueError(f"{where}: launched on the CPU device {expected}, on the GPU {found}")
        gpu = {name: sum(seen.counts[name] for seen in own) for name in METRICS}
        problem = {"stage": case.stage, "size": list(case.sizes), "dtype": case.dtype}
        for name, metric in METRICS.items():
            both = {
                "hardware": gpu[name],
                "xray": case.counts[name],
                "reason": reason(name, gpu, case),
            }
            rows.append({**problem, "count": name, "metric": metric, **both})
    if rest:
        raise ValueError(f"{cases[0].stage}: {len(rest)} more launches on the GPU, the first {rest[0].kernel}")
    return rows


def reason(name: str, gpu: Mapping[str, int], case: Case) -> str:
    """Why a count differs, or "" where it does not, or where only the machine code can tell."""
    xray = case.counts
    if (
        name in EXACT
        and case.waits
        and (gpu[name] > xray[name] or (name.startswith("load") and gpu[name] < xray[name]))
    ):
        return LOOKS
    copied = xray["shared_copy_wavefronts"] and gpu["load_requests"] == xray["load_requests"]
    if name == "shared_copy_wavefronts" or (name == "load_sectors" and copied):
        return COPIES if gpu[name] != xray[name] else ""
    if name.startswith("shared") and gpu[name] < xray[name]:
        return MERGED if gpu[name] else UNUSED
    wavefronts, conflicts = name.replace("conflicts", "wavefronts"), name.replace("wavefronts", "conflicts")
    if name.startswith("shared") and gpu[wavefronts] - xray[wavefronts] == gpu[conflicts] - xray[conflicts] > 0:
        return WAITS
    if name.endswith("conflicts") and gpu[name] > xray[name] and gpu[wavefronts] <= xray[wavefronts]:
        return ARBITRATION
    return ""


def failures(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The counts that must be equal and are not."""
    return [
        f"{r['stage']}, {_sizes(r['size'])}, {r['dtype']}: {r['metric']} is {r['hardware']:,} on the GPU, "
        f"{r['xray']:,} under the x-ray"
        for r in rows
        if r["count"] in EXACT and r["hardware"] != r["xray"] and r["reason"] != LOOKS
    ]


def read(path: Path) -> list[dict[str, Any]]:
    """The machines in a file of `write`, each with its "rows"; none if there is no file."""
    found = []
    for packed in machines.read(path):
        rows = []
        for case in packed.pop("cases"):
            problem = {key: case[key] for key in PROBLEM}
            for name, counted in case["hardware"].items():
                xray, reason = case["different"].get(name, (counted, ""))
                both = {"hardware": counted, "xray": xray, "reason": reason}
                rows.append({**problem, "count": name, "metric": METRICS[name], **both})
        found.append(packed | {"rows": rows})
    return found


def write(path: Path, recorded: Iterable[Mapping[str, Any]]) -> None:
    """The machines, and in place of the rows of each its "cases", a line for each call.

    A case is what the GPU counted, and where the x-ray counts differently, its count and why.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(map(_packed, recorded)) + "\n]\n", encoding="utf-8")


def _packed(machine: Mapping[str, Any]) -> str:
    cases: dict[str, dict[str, Any]] = {}
    for r in machine["rows"]:
        problem = {key: r[key] for key in PROBLEM}
        case = cases.setdefault(json.dumps(problem), problem | {"hardware": {}, "different": {}})
        case["hardware"][r["count"]] = r["hardware"]
        if r["xray"] != r["hardware"]:
            case["different"][r["count"]] = [r["xray"], r["reason"]]
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in machine.items() if key != "rows")
    lines = ",\n".join(f"  {json.dumps(case)}" for case in cases.values())
    return f'{{\n{head} "cases": [\n{lines}\n ]\n}}'


def add(path: Path, record: Mapping[str, Any]) -> None:
    """Put what `record` gives into a file, in place of what that has of the same stages."""
    write(path, machines.joined(read(path), record, "rows"))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For a terminal: what the GPU counted, stage by stage, and each count in which the x-ray differs."""
    columns = [name for name in METRICS if not name.endswith("conflicts")]
    header = ("", "", "loads", "sectors", "stores", "sectors", "shared loads", "stores", "copies")
    parts = []
    for stage in dict.fromkeys(r["stage"] for r in rows):
        own = [r for r in rows if r["stage"] == stage]
        different = [r for r in own if r["hardware"] != r["xray"]]
        lines: dict[tuple[str, str], dict[str, str]] = {}
        for r in own:
            cell = f"{r['hardware']:,}{' *' if r in different else ''}"
            lines.setdefault((_sizes(r["size"]), r["dtype"]), {})[r["count"]] = cell
        cells = [(*case, *(line[name] for name in columns)) for case, line in lines.items()]
        text = f"{stage}, as the GPU counts: requests and sectors, and wavefronts of shared memory\n"
        text += render.table(header, cells, "<<" + ">" * len(columns))
        text += f"\n  The x-ray counts the same in {len(own) - len(different)} of {len(own)}."
        if different:
            cells = [
                (_sizes(r["size"]), r["dtype"], r["count"].replace("_", " "), f"{r['hardware']:,}", f"{r['xray']:,}")
                for r in different
            ]
            text += " Different (*):\n" + render.table(("", "", "", "GPU", "x-ray"), cells, "<<<>>")
        for why in dict.fromkeys(r["reason"] for r in different):
            text += f"\n  {why or 'no reason known for some: look at the machine code, cuobjdump -sass'}"
        parts.append(text)
    return "\n\n".join(parts)


def _sizes(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def machine(ncu: str | None = None) -> dict[str, str]:
    """What measurements were taken on, and with."""
    driver = capture("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
    version = re.search(r"Version (\S+)", (ncu and capture(ncu, "--version")) or "")
    return {
        "card": torch.cuda.get_device_name(),
        "driver": driver.strip().partition("\n")[0],
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "nvcc": build.nvcc().version,
        "ncu": version[1] if version else "",
        "date": date.today().isoformat(),
    }


def record(
    stages: Sequence[str],
    ncu: str | None = None,
    dtypes: Sequence[str] = DTYPES,
    sizes: Sequence[tuple[int, ...]] | None = None,
) -> dict[str, Any]:
    """Compare the stages and return the whole record. Progress goes to stderr.

    Raises:
        NotAvailable: There is no GPU or no ncu, or ncu failed.
    """
    if not torch.cuda.is_available():
        raise NotAvailable("this torch finds no GPU here, and Nsight Compute profiles nothing else")
    ncu = find_ncu(ncu)
    build.build(stages, ("xray", "cuda"))
    rows: list[dict[str, Any]] = []
    for name in stages:
        stage = load(name)
        taken = [dtype for dtype in dtypes if getattr(torch, dtype) in stage.dtypes]
        why = triton_kernels.no_xray(name) if stage.in_triton else stage.kernels.unable("cuda")
        why = why or ("" if taken else f"{name} takes none of {', '.join(dtypes)}")
        if why:
            print(f"left out: {why}", file=sys.stderr)
            continue
        print(f"{name}: x-ray ... ", end="", file=sys.stderr, flush=True)
        cases = cases_of(stage, sizes or problems(stage), taken)
        print(f"ncu on {len(cases)} calls ... ", end="", file=sys.stderr, flush=True)
        profiles = profile(ncu, stage, cases)
        try:
            rows += compare(cases, profiles)
        except ValueError as error:
            raise NotAvailable(f"these cannot be compared: {error}") from None
        print("done", file=sys.stderr, flush=True)
    return {**machine(ncu), "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.toolkit.nsight", description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", default="all", help="such as 10,11,12; default: all")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help=f"default: {','.join(DTYPES)}")
    parser.add_argument("--size", action="append", help="a problem, such as 100,75,53; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--ncu", help="the command of Nsight Compute")
    parser.add_argument("--call", nargs=2, help=argparse.SUPPRESS)  # the child under ncu
    options = parser.parse_args(arguments)
    try:
        if options.call:
            return call(*options.call)
        chosen = names() if options.stages == "all" else [find(name) for name in options.stages.split(",")]
        sizes = [tuple(map(int, re.split("[x,]", text))) for text in options.size or ()]
        result = record(chosen, options.ncu, options.dtypes.split(","), sizes)
    except (NotAvailable, KernelFault, StageNotFound, build.BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        add(options.json, result)
    print(", ".join(f"{name} {value}" for name, value in result.items() if name != "rows") + "\n")
    print(table(result["rows"]))
    wrong = failures(result["rows"])
    for text in wrong:
        print(f"DIFFERENT: {text}")
    print(f"\nglobal memory: {'FAILED' if wrong else 'all requests and sectors equal'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
