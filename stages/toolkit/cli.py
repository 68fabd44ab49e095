"""The commands of `python -m stages`."""

import argparse
import ast
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stages.families import selective_scan
from stages.toolkit import (
    accuracy,
    against,
    bench,
    build,
    chapter,
    device,
    diff,
    mutate,
    profile,
    render,
    triton_kernels,
    verify,
    xray,
)
from stages.toolkit.errors import KernelFault, NotAvailable, StageNotFound
from stages.toolkit.kernels import VARIANTS
from stages.toolkit.report import Report
from stages.toolkit.stage import Stage, find, load, names

STAGE_HELP = "a stage: its number, its name, or the beginning of either"


class UsageError(ValueError):
    """An option that does not fit the stage. The text says what was given and what is allowed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 well, 1 failed, 2 asked wrongly, 130 interrupted."""
    options = parser().parse_args(arguments)
    try:
        return options.command(options)
    except (StageNotFound, UsageError) as error:
        return fail(error, 2)
    except (build.BuildError, KernelFault, NotAvailable) as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except BrokenPipeError:  # the reader, `head` perhaps, has gone
        sys.stderr.close()
        return 1


def fail(error: object, code: int) -> int:
    sys.stdout.flush()
    print(f"{'error: ' if code != 130 else ''}{error}", file=sys.stderr)
    return code


# ---------------------------------------------------------------------------------------------------------------------
# The commands


def list_stages(options: argparse.Namespace) -> int:
    stages = [load(name) for name in names()]
    width = max(len(stage.operator) for stage in stages)
    for name, some in itertools.groupby(stages, lambda stage: stage.family.NAME):
        rows = [(s.number, f"{s.operator:{width}}", s.lesson) for s in some]
        print(render.table(("", name, "teaches"), rows, "<<<") + "\n")
    return 0


def info(options: argparse.Namespace) -> int:
    stage = load(options.stage)
    print(f"{stage.name}: {stage.title}\n")
    for heading, text in stage.header.items():
        print(f"  {heading:8}  " + text.replace("\n", "\n" + " " * 12))
    built = [f"_{variant}" for variant in VARIANTS if build.module_path(stage.name, variant).exists()]
    files = f"{stage.source.name}, {'' if stage.in_triton else 'binding.cpp, '}stage.py"
    facts = {
        "function": f"stages.load({stage.operator!r}).{stage.family.CALL}",
        "operator": f"torch.ops.stages.{stage.operator}",
        "dtypes": ", ".join(map(_dtype_name, stage.dtypes)),
        "registers": f"at most {stage.registers} a thread{', may spill' if stage.spills else ''}",
        "built": ", ".join(built) or "not yet",
        "sources": f"{_short(stage.folder)}/ {files}",
    }
    if stage.capability:
        other = f"; on others stage {stage.kernels.instead}" if stage.kernels.instead else ""
        facts["GPUs"] = f"of compute capability {stage.capability} alone{other}"
    if stage.in_triton:
        facts |= {"registers": "as many as Triton uses", "built": "by Triton, at the first call on a GPU"}
    print("\n" + "\n".join(f"  {name:10}  {fact}" for name, fact in facts.items()))
    return 0


def build_stages(options: argparse.Namespace) -> int:
    chosen = names() if "all" in options.stages else [find(name) for name in options.stages]
    modules = build.build(chosen, options.variant, jobs=options.jobs, force=options.force)
    if built := dict.fromkeys(module.parent.name for module in modules):
        print(f"built: {', '.join(built)}")
    for name in chosen:
        if not build.has_modules(name):
            print(f"nothing to build: {name} is in Triton, which compiles at the first call")
    return 0


def run(options: argparse.Namespace) -> int:
    stage = load(options.stage)
    where = pick_device(options.device, [stage])
    problems = [sizes_of(stage, text) for text in options.size or ()] or list(map(stage.sizes, stage.problems))
    dtypes = [dtype_of(stage, options.dtype)] if options.dtype else stage.dtypes
    print(f"{stage.name}: {stage.title}\n")
    what = "Output and gradients" if stage.gradients else "Output (no backward)"
    print(f"{what} on {where} against float64; error and allowed error are |x - ref| / |ref|")
    results = []
    tables: dict[str, list[tuple[str, ...]]] = {}  # by options
    for sizes in problems:
        for dtype, option in ((d, option) for d in dtypes for option in stage.options(d)):
            found = verify.verify(stage, sizes, dtype, where, options=option)
            results += found
            shown = [found[0]]
            if stage.gradients:
                shown += [max(found[1:], key=lambda r: r.error / r.tolerance if r.error == r.error else float("inf"))]
            figures = [f"{number:.1e}" for r in shown for number in (r.error, r.tolerance)]
            verdict = "ok" if all(r.ok for r in found) else "WRONG"
            row = (_sizes(sizes.values()), _dtype_name(dtype), *figures, verdict)
            tables.setdefault(_options(option), []).append(row)
    figures = ("output", "allowed", "worst gradient", "allowed")[: 4 if stage.gradients else 2]
    header = (_sizes(stage.family.SIZES), "dtype", *figures, "")
    for title, rows in tables.items():
        print((f"\n{title}\n" if title else "") + render.table(header, rows, "<<" + ">" * len(figures) + "<"))
    wrong = [r for r in results if not r.ok]
    for r in wrong:
        problem = ", ".join(filter(None, (str(r.sizes), _dtype_name(r.dtype), _options(r.options))))
        print(f"WRONG: {r.what}, {problem}: error {r.error:.1e}, allowed {r.tolerance:.1e}")

    failed = bool(wrong)
    if stage.in_triton:
        print("\n" + render.wrap(triton_kernels.no_xray(stage.name) + "."))
    else:
        report = xrayed(stage, stage.sizes(stage.xray_sizes), stage.dtype)
        print("\nX-ray of " + comparison(stage, stage.sizes(stage.xray_sizes), stage.dtype, report))
        print(f"\n{render.faults(report)}\nLine by line: python -m stages xray {stage.number}")
        failed |= bool(report.faults)
    print(f"\n{stage.name}: {'FAILED' if failed else 'passed'}")
    return int(failed)


def test(options: argparse.Namespace) -> int:
    file = build.PACKAGE.parent / "tests" / f"test_{find(options.stage)}.py"
    if not file.exists():
        raise NotAvailable(f"{file} is not there: the tests are part of a checkout, not of an installed package")
    return subprocess.call([sys.executable, "-m", "pytest", str(file), *options.pytest], cwd=build.PACKAGE.parent)


def xray_stage(options: argparse.Namespace) -> int:
    stage = load(options.stage)
    sizes = sizes_of(stage, options.size) if options.size else stage.sizes(stage.xray_sizes)
    dtype = dtype_of(stage, options.dtype)
    report = xrayed(stage, sizes, dtype, options.schedule, options.seed)
    if options.json:
        problem = {"stage": stage.name, "sizes": sizes, "dtype": _dtype_name(dtype)}
        print(json.dumps(problem | report.to_json(), indent=1))
    else:
        print(report.text())
        print("\n" + comparison(stage, sizes, dtype, report))
    return int(bool(report.faults))


def bench_stages(options: argparse.Namespace) -> int:
    functions: dict[str, list[Stage]] = {}
    for stage in map(load, names()):
        functions.setdefault(stage.family.NAME, []).append(stage)
    groups = [functions.get(name) or [load(name)] for name in options.stages]
    chosen = [stage for group in groups for stage in group]
    if len(set(stage.family.NAME for stage in chosen)) > 1:
        several = ", ".join(f"{stage.number} {stage.family.NAME}" for stage in chosen)
        raise UsageError(f"bench {' '.join(options.stages)}: allowed: stages of one function; these are {several}")
    where = pick_device(options.device, chosen)
    if len(chosen) == 1 and options.stages[0] not in functions and not options.option:
        return bench_stage(chosen[0], where, options)
    return compare_stages(chosen, where, options)


def compare_stages(stages: Sequence[Stage], where: str, options: argparse.Namespace) -> int:
    """The times of several stages while a size grows."""
    family = stages[0].family
    name = options.dtype or _dtype_name(stages[0].dtype)
    taken = [stage for stage in stages if name in map(_dtype_name, stage.dtypes)]
    dtype = dtype_of((taken or stages)[0], name)
    for stage in stages:
        if stage not in taken:
            print(f"left out: {stage.name} takes no {name}", file=sys.stderr)
    standard = getattr(family, "SWEEP", family.BENCH)[where]
    problems = [sizes_of(stages[0], text) for text in options.size or ()] or list(map(stages[0].sizes, standard))
    if against.growing(problems) is None:
        raise UsageError(f"--size: allowed: problems that differ in one size of {', '.join(family.SIZES)}")
    wanted = dict(option_of(text) for text in options.option or ())
    records, code = until_interrupted(against.measure(taken, problems, dtype, where, wanted), family.NAME)
    if not records:
        return code or fail("nothing could be measured", 1)
    print(json.dumps(records, indent=1) if options.json else f"{family.NAME}, {against.text(records)}")
    if options.plot:
        against.plot(records, options.plot)
        if not options.json:
            print(f"\nplot: {options.plot}")
    return code


def until_interrupted(
    found: Iterable[dict[str, Any]], name: str, step: str = "sizes"
) -> tuple[list[dict[str, Any]], int]:
    """The records that are found, or those that were when Ctrl-C came; and the exit code. Progress goes to stderr."""
    records: list[dict[str, Any]] = []
    try:
        for record in found:
            if not records or records[-1][step] != record[step]:
                now = _sizes(record[step].values()) if step == "sizes" else record[step]
                print(f"{name}: {now}", file=sys.stderr, flush=True)
            records.append(record)
    except KeyboardInterrupt:
        return records, fail("interrupted", 130)
    return records, 0


def bench_stage(stage: Stage, where: str, options: argparse.Namespace) -> int:
    dtype = dtype_of(stage, options.dtype)
    problems = [sizes_of(stage, text) for text in options.size or ()] or list(map(stage.sizes, stage.bench[where]))
    found = (bench.bench(stage, sizes, dtype, where) for sizes in problems)
    records, code = until_interrupted(found, stage.name)
    if not records:
        return code
    if options.plot:
        bench.plot(records, options.plot)
    if options.json:
        print(json.dumps(records, indent=1))
        return code
    first, sizes = records[0], _sizes(stage.family.SIZES)
    if where == "cuda":
        print(
            f"{stage.name}, {first['dtype']}, {first['card']}: medians, inputs past the L2 cache\n"
            f"  limits, measured now: copy {first['copy_gbytes_per_s']:,.0f} GB/s, "
            f"torch.matmul 8192^3 {first['matmul_tflops']:,.1f} TFLOP/s\n"
            f"  incumbent: {first['incumbent']}\n"
        )
        columns = ("ms", "incumbent_ms", "ratio", "gbytes_per_s", "tflops", "percent_of_limit", "limit")
        header = (sizes, "ms", "incumbent ms", "times as fast", "GB/s", "TFLOP/s", "% of limit", "limit")
    else:
        print(f"{stage.name}, {first['dtype']}, the CPU device on {first['cores']} cores: its own cost, not a GPU's\n")
        columns = ("ms", "threads", "ns_per_thread", "xray_ms", "xray_ratio")
        header = (sizes, "ms", "threads", "ns a thread", "x-rayed ms", "times as long")
    rows = [(_sizes(r["sizes"].values()), *(_figure(r[column]) for column in columns)) for r in records]
    print(render.table(header, rows, "<" + ">" * len(columns)))
    if "eager_ms" in first:
        print("\nNot compiled, and with the backward; MiB at most beside the inputs\n\n" + _beside(records, sizes))
    if options.plot:
        print(f"\nplot: {options.plot}")
    return code


def _beside(records: Sequence[dict[str, Any]], sizes: str) -> str:
    """The incumbent as it is, and forward and backward together."""
    columns = ("eager_ms", "both_ms", "incumbent_both_ms", "eager_both_ms", "peak_bytes", "incumbent_peak_bytes")
    header = (sizes, "eager ms", "both ms", "incumbent ms", "eager ms", "MiB", "incumbent MiB")
    rows = []
    for r in records:
        values = (r.get(key, chapter.MISSING) for key in columns)
        values = [
            v / 2**20 if key.endswith("bytes") and key in r else v for key, v in zip(columns, values, strict=True)
        ]
        rows.append((_sizes(r["sizes"].values()), *map(_figure, values)))
    return render.table(header, rows, "<" + ">" * len(columns))


def profile_methods(options: argparse.Namespace) -> int:
    where = pick_device(options.device)
    sizes = {
        name: count_of(f"--{name}", given) if (given := getattr(options, name)) else standard
        for name, standard in profile.DEFAULT[where].items()
    }
    if sizes["dstate"] > (most := selective_scan.MOST_STATES):
        raise UsageError(f"--dstate {sizes['dstate']}: allowed: at most {most} states a channel")
    trials = count_of("--n-trials", options.n_trials) if options.n_trials else profile.TRIALS[where]
    methods = options.methods.split(",") if options.methods else profile.METHODS
    if unknown := [method for method in methods if method not in profile.METHODS]:
        raise UsageError(f"--methods {','.join(unknown)}: allowed: {', '.join(profile.METHODS)}")
    dtype = dtype_of(load(selective_scan.FASTEST[0]), options.dtype)
    found = profile.measure(sizes, dtype, where, list(dict.fromkeys(methods)), trials)
    records, code = until_interrupted(found, "profile", "method")
    if not records:
        return code
    if options.plot:
        profile.plot(records, options.plot)
    print(json.dumps(records, indent=1) if options.json else profile.text(records))
    if options.plot and not options.json:
        print(f"\nplot: {options.plot}")
    return code


def chapter_table(options: argparse.Namespace) -> int:
    parts = chapter.parts(options.chapter, chapter.recorded())
    print("\n\n".join(map(chapter.text, [part for part in parts if part.records] or parts[:1])))
    return 0


def diff_stages(options: argparse.Namespace) -> int:
    print(diff.lesson(load(options.before), load(options.after), colour=sys.stdout.isatty()))
    return 0


def mutate_stages(options: argparse.Namespace) -> int:
    return max(mutate.report(load(name), options.jobs, options.list, options.record) for name in options.stages)


def accuracy_of_stages(options: argparse.Namespace) -> int:
    able = accuracy.stages()
    chosen = [load(name) for name in options.stages] or able
    if other := [stage.number for stage in chosen if stage not in able]:
        allowed = ", ".join(stage.number for stage in able)
        raise UsageError(f"accuracy {' '.join(other)}: allowed: stages with many steps, {allowed}")
    family = chosen[0].family
    print(f"{family.NAME}: {family.LONG}\nThe CPU device against float64, |x - ref| / |ref|\n")
    entries = {stage.name: accuracy.measure(stage) for stage in chosen}
    entries[accuracy.FORMULA] = accuracy.measure_formula(family)
    print(accuracy.text(entries))
    if options.record:
        accuracy.write_record(entries)
    return 0


def device_facts(options: argparse.Namespace) -> int:
    parts = {f"GPU {index}": device.gpu_facts(index) for index in range(torch.cuda.device_count())}
    parts["The CPU device"] = device.cpu_facts()
    for title, facts in parts.items():
        print(title)
        for name, fact in facts.items():
            print(render.wrap(f"  {name:38}  {fact}", " " * 42))
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# What several of them need


def xrayed(stage: Stage, sizes: dict[str, int], dtype: torch.dtype, schedule: str = "forward", seed: int = 0) -> Report:
    options = stage.options(dtype)[0]
    return stage.xray(*stage.family.make(sizes, dtype, **options), schedule=schedule, seed=seed, **options)


def comparison(stage: Stage, sizes: dict[str, int], dtype: torch.dtype, report: Report) -> str:
    """The counts, beside the closed forms of the kernel's header where these hold."""
    options = stage.options(dtype)[0]
    problem = ", ".join(filter(None, (*(f"{name} = {size}" for name, size in sizes.items()), _options(options))))
    counts = {name: count for name, count in asdict(report.counts()).items() if count}
    title = f"{problem}, {_dtype_name(dtype)}: the counts"
    if stage.cost is None:
        why = "how its blocks wait for each other" if stage.waits else "the numbers that it is given"
        title += f"\n  (there are no closed forms: what it counts depends on {why})"
        header, rows = ("", "x-ray"), [(name, count) for name, count in counts.items()]
    elif not stage.fits(sizes.values()):
        aligned = ", ".join(f"{name} of {size}" for name, size in zip(sizes, stage.aligned, strict=True))
        title += f"\n  (the header's closed forms hold for multiples: {aligned})"
        header, rows = ("", "x-ray"), [(name, count) for name, count in counts.items()]
    else:
        formulas = asdict(stage.cost(**sizes, itemsize=dtype.itemsize, **options))
        title += ",\n  " if len(title) > 45 else ", "
        title += "and what the closed forms of the header give"
        header = ("", "x-ray", "formula")
        rows = [(name, counts.get(name, 0), formulas[name]) for name in formulas if name in counts or formulas[name]]
    cells = [
        (name.replace("_", " "), *(f"{number:,}" for number in numbers), "differs" if len(set(numbers)) > 1 else "")
        for name, *numbers in rows
    ]
    return title + "\n" + render.table((*header, ""), cells, "<" + ">" * (len(header) - 1) + "<")


def sizes_of(stage: Stage, text: str) -> dict[str, int]:
    wanted = stage.family.SIZES
    values = text.replace("x", ",").split(",")
    if len(values) != len(wanted) or not all(value.strip().isdigit() for value in values):
        count = f"{len(wanted)} whole number{'s' if len(wanted) > 1 else ''}"
        raise UsageError(f"--size {text}: allowed: {count}, {','.join(wanted)} of {stage.family.CALL}")
    return stage.sizes(tuple(map(int, values)))


def count_of(option: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise UsageError(f"{option} {text}: allowed: a whole number from 1 on")
    return int(text)


def option_of(text: str) -> tuple[str, object]:
    """An option of a function: "time_dim=2"."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--option {text}: allowed: an option and its value, such as time_dim=2")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def dtype_of(stage: Stage, name: str | None) -> torch.dtype:
    if name is None:
        return stage.dtype
    allowed = {_dtype_name(dtype): dtype for dtype in stage.dtypes}
    if name not in allowed:
        raise UsageError(f"--dtype {name}: allowed: {', '.join(allowed)}")
    return allowed[name]


def pick_device(name: str | None, stages: Sequence[Stage] = ()) -> str:
    """The device of that name; without one the GPU, if there is one that runs any of the stages."""
    if name == "cpu" or (name is None and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise NotAvailable("--device cuda: this torch finds no GPU here; without the option the CPU device is used")
    reasons = [stage.kernels.unable("cuda") for stage in stages]
    if stages and all(reasons):
        if name:
            raise NotAvailable(f"--device cuda: {reasons[0]}")
        print(f"on the CPU device: {reasons[0]}", file=sys.stderr)
        return "cpu"
    return "cuda"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _options(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _sizes(values: Iterable[object]) -> str:
    return " x ".join(map(str, values))


def _figure(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


# ---------------------------------------------------------------------------------------------------------------------
# The parser


def parser() -> argparse.ArgumentParser:
    def layout(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=render.WIDTH)

    top = argparse.ArgumentParser(
        prog="python -m stages",
        description="GPU kernels as a course: build, run, check, x-ray and measure one stage at a time.",
        epilog="A stage is named by its number (12), its name (matmul_shared) or the beginning of either.\n"
        "Start with:  python -m stages run 00",
        formatter_class=layout,
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, function: Any, summary: str, example: str, detail: str = "") -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=summary,
            description="\n\n".join(filter(None, (summary[0].upper() + summary[1:] + ".", detail))),
            epilog=f"example:  {top.prog} {example}",
            formatter_class=layout,
        )
        sub.set_defaults(command=function)
        return sub

    def add_device(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")

    command("list", list_stages, "list all stages", "list")

    sub = command("info", info, "show what a stage does, by its header and its declarations", "info 12")
    sub.add_argument("stage", help=STAGE_HELP)

    sub = command("build", build_stages, "build stages ahead of their first use", "build 10 11 12")
    sub.add_argument("stages", nargs="+", metavar="stage", help=STAGE_HELP + "; or all")
    sub.add_argument("--variant", action="append", choices=VARIANTS, help="only this module; may be repeated")
    sub.add_argument("--jobs", "-j", type=int, help="compilers at a time; default: one a core")
    sub.add_argument("--force", action="store_true", help="build what is up to date, too")

    sub = command(
        "run",
        run,
        "build and run a stage, check it against float64, x-ray it",
        "run 12",
        "Runs forward and backward in each dtype, on sizes that fit the tiles and on sizes that do not.\n"
        "Exit code 1 if anything is further from the float64 reference than it may be, NaN included,\n"
        "or if the x-ray finds a fault.",
    )
    sub.add_argument("stage", help=STAGE_HELP)
    sub.add_argument("--size", action="append", help="a problem of your own, such as 33,31,127; may be repeated")
    sub.add_argument("--dtype", help="only this dtype, such as float32")
    add_device(sub)

    detail = "What follows the stage goes to pytest."
    sub = command("test", test, "run the tests of a stage", "test 12 -k gradient", detail)
    sub.add_argument("stage", help=STAGE_HELP)
    sub.add_argument("pytest", nargs=argparse.REMAINDER, help="options for pytest")

    sub = command(
        "xray",
        xray_stage,
        "count every access to memory that a stage makes, and name its faults",
        "xray 12 --size 64,48,80 --schedule reverse",
        "Runs on the CPU device; a GPU is not needed. Exit code 1 if there is a fault.",
    )
    sub.add_argument("stage", help=STAGE_HELP)
    sub.add_argument("--size", help="the problem, such as 64,48,80")
    sub.add_argument("--dtype", help="default: float32, or the first that the stage takes")
    sub.add_argument("--schedule", choices=xray.SCHEDULES, default="forward", help="the order of blocks and threads")
    sub.add_argument("--seed", type=int, default=0, help="of a random schedule")
    sub.add_argument("--json", action="store_true", help="all records as JSON")

    sub = command(
        "bench",
        bench_stages,
        "measure a stage, or all of a function: on a GPU beside what you would call instead",
        "bench 12 --size 1024,1024,1024 --dtype bfloat16 --plot bench.png",
        "On a GPU: medians of CUDA events over rotated inputs, the incumbent (float32 without TF32), and\n"
        "the percentage of the card's limit, measured in the same run. Without one: what the CPU device\n"
        "itself costs.\n\n"
        "Several stages, or a function such as scan, which stands for all its stages, are compared while a\n"
        "size grows, T of a scan: forward alone, and forward and backward. Ctrl-C leaves what was measured.",
    )
    sub.add_argument("stages", nargs="+", metavar="stage", help=STAGE_HELP + "; or a function: scan")
    sub.add_argument("--size", action="append", help="a problem, such as 1024,1024,1024; may be repeated")
    sub.add_argument("--dtype", help="default: float32, or the first that the stage takes")
    sub.add_argument("--option", action="append", help="compare stages with time_dim=2, for example; may be repeated")
    sub.add_argument("--json", action="store_true", help="the records as JSON")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="draw the records, as .png, .svg or .pdf")
    add_device(sub)

    sub = command(
        "profile",
        profile_methods,
        "measure the methods of discretization: their coefficients alone, and in the selective scan",
        "profile --dim 256 --seqlen 512 --methods zoh,bilinear --plot profile.png",
        "On a GPU: medians of CUDA events over rotated inputs, beside torch's formulation, compiled, and, for\n"
        "mamba, Mamba's kernel, where mamba_ssm is installed. Without one: what the CPU device itself costs,\n"
        "beside torch on the CPU. Forward alone, and forward and backward. Ctrl-C leaves what was measured.",
    )
    for option, what in (
        ("batch", "sequences"),
        ("dim", "channels"),
        ("seqlen", "steps of a sequence"),
        ("dstate", f"states of a channel, at most {selective_scan.MOST_STATES}"),
    ):
        on_cpu, on_gpu = (profile.DEFAULT[device][option] for device in ("cpu", "cuda"))
        default = f"{on_gpu} on a GPU, else {on_cpu}" if on_gpu != on_cpu else on_cpu
        sub.add_argument(f"--{option}", metavar="N", help=f"{what}; default: {default}")
    default = f"{profile.TRIALS['cuda']} on a GPU, else {profile.TRIALS['cpu']}"
    sub.add_argument("--n-trials", metavar="N", help=f"calls that the median is of; default: {default}")
    sub.add_argument("--methods", help=f"some of {', '.join(profile.METHODS)}; default: all")
    sub.add_argument("--dtype", default="float32", help="default: float32")
    sub.add_argument("--json", action="store_true", help="the records as JSON")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="draw the records, as .png, .svg or .pdf")
    add_device(sub)

    sub = command(
        "chapter",
        chapter_table,
        "show what the stages of a chapter reach and take, as recorded on a GPU",
        "chapter 1",
        "The times, registers and shared memory of the last recorded run of stages.toolkit.measure, and the\n"
        "x-ray's bytes for each floating-point operation. A GPU is not needed.",
    )
    sub.add_argument("chapter", help="the first digit of its stages: 1 for stages 10, 11, 12, ...")

    sub = command("diff", diff_stages, "show the lesson between two stages: two ideas and what changed", "diff 11 12")
    sub.add_argument("before", help=STAGE_HELP)
    sub.add_argument("after", help=STAGE_HELP)

    sub = command(
        "mutate",
        mutate_stages,
        "break a kernel in one place at a time and see whether the checks notice",
        "mutate 12",
        "Takes out each barrier, each bounds test and each padding of shared memory alone, and moves each\n"
        "comparison by one. Exit code 1 if such a mutant passes the checks: values against float64, faults\n"
        "under the x-ray, counts against the closed forms.",
    )
    sub.add_argument("stages", nargs="+", metavar="stage", help=STAGE_HELP)
    sub.add_argument("--jobs", "-j", type=int, default=2, help="mutants at a time; default: 2")
    sub.add_argument("--list", action="store_true", help="only list the mutants")
    sub.add_argument("--record", action="store_true", help="write the score down in stages/measured/mutants.json")

    sub = command(
        "accuracy",
        accuracy_of_stages,
        "measure rounding errors after many steps",
        "accuracy 41 44",
        "Runs scans of 65,536 steps with a near 1, forward and backward, on the CPU device, and compares with\n"
        "float64.",
    )
    sub.add_argument("stages", nargs="*", metavar="stage", help=STAGE_HELP + "; default: all scans")
    sub.add_argument("--record", action="store_true", help="write the errors down in stages/measured/accuracy.json")

    summary = "show the facts of the GPU and of the CPU device that a kernel's author needs"
    command("device", device_facts, summary, "device")
    return top
