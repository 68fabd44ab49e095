"""Experiments on kernels: change a line, look at the copy with the x-ray, have an answer marked.

>>> from stages.toolkit import lab
>>> broken = lab.change("12", {"__syncthreads();  // everyone has read before the next step overwrites": ""})
>>> lab.faults(broken.xray(32, 32, 64))

Changed copies are built, instrumented, into the build's own folder; the file of the stage stays as it is.
"""

import difflib
import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from stages.toolkit import build, render, stage, triton_kernels, verify, xray
from stages.toolkit.errors import KernelFault, NotAvailable
from stages.toolkit.report import Counts, Fault, Report

SCHEDULES = (("forward", 0), ("reverse", 0), ("random", 1))
TRACE = 1 << 20  # requests, more than any experiment makes
HOW = 'Put the lines to change into `answer`, as {"old text": "new text"}, and run this cell again.'


@dataclass(frozen=True)
class Kernel:
    """A stage's kernel, as it stands or changed."""

    stage: stage.Stage
    source: Path
    dtype: torch.dtype
    options: Mapping[str, object] = field(default_factory=dict)  # of the function: those that the stage is about
    function: Callable | None = None  # another one than the stage's

    @property
    def changed(self) -> bool:
        return self.source != self.stage.source

    def __repr__(self) -> str:
        return f"<Kernel {self.stage.name}{', changed' if self.changed else ''}>"

    def arguments(self, *sizes: int, dtype: torch.dtype | None = None) -> tuple[object, ...]:
        """Random arguments of a problem of these sizes, the same ones every time; in the kernel's dtype or another."""
        return self.stage.family.make(self.stage.sizes(sizes), dtype or self.dtype, **self.options)

    def xray(self, *sizes: int, schedule: str = "forward", seed: int = 0, block: int | None = None) -> Report:
        """The x-ray of one call. With `block`, a block's linear index or -1 for all, it keeps the trace.

        Raises:
            NotAvailable: The kernel is written in Triton.
        """
        if self.stage.in_triton:
            raise NotAvailable(triton_kernels.no_xray(self.stage.name))
        report, _ = self._call(sizes, schedule, seed, block)
        return report

    def is_right(self, *sizes: int, schedule: str = "forward", seed: int = 0) -> bool:
        """Whether the result agrees with the float64 reference. What the kernel did not write is NaN, hence wrong."""
        return self._call(sizes, schedule, seed, None)[1]

    def compiled(self, *sizes: int, architecture: str = "9.0a") -> object:
        """What Triton compiles for a call on a GPU, by default an H100: its `CompiledKernel`, with all texts in `asm`.

        Raises:
            NotAvailable: Triton is not installed.
            ValueError: The kernel is not written in Triton.
        """
        if not self.stage.in_triton:
            raise ValueError(f"{self.stage.name} is not written in Triton")
        arguments = self.arguments(*sizes)
        with self.in_place():
            (found,) = triton_kernels.compiled_for(
                architecture, lambda: self.stage.function(*arguments, **self.options)
            )
        return found

    def error(self, *arguments: object, **options: object) -> float:
        """How far its result for these arguments is from the float64 reference, |x - ref| / |ref|."""
        with self.in_place():
            result = self.stage.function(*arguments, **options)
        return verify.relative_error(result, self.stage.family.reference(*arguments, **options))

    def formula(self, *sizes: int) -> Counts:
        """The counts that the closed forms of the kernel's header give."""
        return self.stage.cost(**self.stage.sizes(sizes), itemsize=self.dtype.itemsize, **self.options)

    def bytes_needed(self, *sizes: int) -> int:
        """What no kernel for this problem can avoid to move: each tensor once."""
        return self.stage.family.work(self.stage.sizes(sizes), self.dtype.itemsize, **self.options).bytes

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """For a while, calls of the stage's functions on CPU tensors run this kernel, instrumented if it can be."""
        variants = triton_kernels.VARIANTS if self.stage.in_triton else ("simt", "xray")
        paths = {variant: self.module() for variant in variants} if self.changed else {}
        with self.stage.kernels.replaced(**paths):
            yield

    def _call(self, sizes: tuple[int, ...], schedule: str, seed: int, block: int | None) -> tuple[Report, bool]:
        family, arguments = self.stage.family, self.arguments(*sizes)
        with ExitStack() as stack:
            stack.enter_context(self.in_place())
            trace = {} if block is None else {"trace": TRACE, "trace_block": block}
            report = Report()
            if not self.stage.in_triton:
                report = stack.enter_context(xray.recording(schedule, seed, **trace))
            output = (self.function or self.stage.function)(*arguments, **self.options)
        report.trace.sort(key=lambda access: access.block)  # blocks run side by side
        expected = verify.outputs(family.reference(*arguments, **self.options))
        tolerance = family.tolerance(self.stage.sizes(sizes), self.dtype, **self.options)
        kinds = verify.output_names(family, self.options)
        found = zip(kinds, verify.outputs(output), expected, strict=True)
        return report, all(verify.relative_error(x, ref) <= tolerance[kind] for kind, x, ref in found)

    def module(self, variant: str = "xray") -> Path:
        """The changed kernel's module, built if need be.

        That of the stage's own dtype has no others and is there in a fraction of the time.
        """
        if self.stage.in_triton:
            return self.source
        flags = (self.stage.type_only,) if self.dtype is self.stage.dtype else ()
        folder = self.source.parent / str(self.dtype).removeprefix("torch.")
        return build.build_module(self.source, self.stage.folder / "binding.cpp", variant, folder, flags)


def kernel(name: str, dtype: torch.dtype | None = None, *, function: str | None = None, **options: object) -> Kernel:
    """The kernel of a stage, by its number or name.

    Args:
        name: As `stages.load` takes it.
        dtype: Of the arguments that it is run on; by default float32, or the first that the stage takes.
        function: The name of another function in the stage's `stage.py` that launches the kernel.
        options: For the function, in place of those that the stage is about: `lab.kernel("23", causal=False)`.
    """
    found = stage.load(name)
    dtype = dtype or found.dtype
    other = function and getattr(importlib.import_module(f"stages.{found.name}.stage"), function)
    return Kernel(found, found.source, dtype, {**found.options(dtype)[0], **options}, other or None)


def change(of: str | Kernel, changes: Mapping[str, str]) -> Kernel:
    """A copy of a kernel with pieces of its text replaced, built so that it can be x-rayed.

    Args:
        of: A stage's number or name, or a kernel that `change` gave before.
        changes: Old text and new text. Each old text has to stand in the file exactly once.

    Raises:
        ValueError: An old text is not in the file, or more than once. The text says where.
        BuildError: The changed kernel does not compile. The text has the compiler's first lines.
    """
    result = edit(of, changes)
    result.module()
    return result


def edit(of: str | Kernel, changes: Mapping[str, str]) -> Kernel:
    """The copy that `change` makes, not built yet.

    Raises:
        ValueError: An old text is not in the file, or more than once.
    """
    base = of if isinstance(of, Kernel) else kernel(of)
    text = base.source.read_text(encoding="utf-8")
    for old, new in changes.items():
        _check_once(base, text, old)
        text = text.replace(old, new)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    source = build.OBJECTS / "lab" / f"{base.stage.name}-{digest}" / base.stage.source.name
    if not source.exists():  # the same text was tried before otherwise
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text, encoding="utf-8")
    return replace(base, source=source)


def _check_once(base: Kernel, text: str, old: str) -> None:
    if not isinstance(old, str) or not old.strip():
        raise ValueError(f"old text {old!r} is empty; give a line of the kernel, or a part of one that is unique")
    where = [text.count("\n", 0, i) + 1 for i in range(len(text)) if text.startswith(old, i)]
    if len(where) == 1:
        return
    file = f"stages/{base.stage.name}/{base.stage.source.name}" + (" (changed)" if base.changed else "")
    if where:
        lines = ", ".join(map(str, where))
        raise ValueError(f"{old!r} stands {len(where)} times in {file}, on lines {lines}; give more text around it")
    lines = {line.strip(): number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    near = difflib.get_close_matches(old.strip(), lines, 1, 0.4)
    hint = f"; the nearest is line {lines[near[0]]}: {near[0]!r}" if near else ""
    raise ValueError(f"{old!r} is not in {file}{hint}")


def bytes_moved(report: Report) -> int:
    """The bytes that global memory moved: whole sectors, whether all of their bytes were asked for or not."""
    return sum(traffic.bytes_moved for traffic in report.traffic("global"))


def wavefronts(report: Report, text: str) -> float:
    """The wavefronts of shared memory that one request takes, at the lines that hold this text."""
    sites = [site for site in report.sites if site.space == "shared" and text in site.line.text]
    if not sites:
        raise ValueError(f"no line that reads or writes shared memory holds {text!r}")
    return sum(site.wavefronts for site in sites) / sum(site.requests for site in sites)


def lanes(report: Report, name: str, text: str) -> int:
    """How many lanes read or write a shared array at the lines that hold this text, each time they do."""
    sites = [site for site in report.sites if site.name == name and text in site.line.text]
    if not sites:
        raise ValueError(f"no line that reads or writes {name} holds {text!r}")
    return sum(site.lanes for site in sites)


def faults(report: Report, most: int | None = None) -> str:
    """The faults of a report as text, one for each pair of lines; with `most`, the first so many."""
    merged: dict[tuple, Fault] = {}
    for fault in report.faults:  # a line may be several places in the machine's code
        key = (fault.kind, fault.line and fault.line.number, fault.other_line and fault.other_line.number, fault.place)
        known = merged.get(key)
        merged[key] = replace(known, count=known.count + fault.count) if known else fault
    order = sorted(merged, key=lambda key: (key[1] or 0, key[2] or 0, key[0], key[3]))
    text = render.faults(Report(faults=[merged[key] for key in order[:most]]))
    if most is None or most >= len(order):
        return text
    return f"{len(order)} faults, the first {most} of them:\n{text.partition(chr(10))[2]}"


def told(of: Kernel, *sizes: int, most: int | None = None) -> str:
    """What a call is told: the faults, at most so many, and why it did not end, a line for each who waits."""
    arguments, ended = of.arguments(*sizes), ""
    with of.in_place(), xray.recording() as report:
        try:
            of.stage.function(*arguments, **of.options)
        except KernelFault as error:
            ended = str(error)
    if not ended:
        return faults(report, most)
    why, *others = ended.partition(" block ")[2].partition(": ")[2].split("; ")
    lines = [faults(report, most)] if report.faults else []
    return "\n".join([*lines, render.wrap(why, "  "), *(render.wrap(f"- {other}", "  ") for other in others)])


def predict(guess: float | None, seen: float, what: str) -> None:
    """Print what the x-ray counted, beside the reader's guess."""
    if guess is None:
        print(f"{what}: {seen:,g}. (You made no guess: write a number in place of None above, and run both cells.)")
    else:
        print(f"{what}: {seen:,g}. You said {guess:,g}: {'right' if guess == seen else 'not so; why?'}.")


def exercise(of: str | Kernel, answer: Mapping[str, str], *sizes: int, at_most: Mapping[str, int]) -> None:
    """Mark an answer, the changes to a kernel, with the x-ray: no fault, the right result, no count above `at_most`.

    Args:
        of: The kernel to start from.
        answer: Changes as `change` takes them; empty: print how to answer.
        sizes: The problem that it is tried on.
        at_most: Names of `Counts`, "threads" or "shared_bytes" (of a block), and what may not be passed.
    """
    if not answer:
        print(f"No answer yet. {HOW}")
        print("Wanted: no faults, the right result, and " + listing(at_most) + ".")
        return
    try:
        tried = change(of, answer)
    except (ValueError, build.BuildError) as error:
        print(f"This cannot be tried: {error}")
        return
    reports = []
    for schedule, seed in SCHEDULES:
        try:
            report, right = tried._call(sizes, schedule, seed, None)
        except KernelFault as error:
            print(f"Not yet. In the {schedule} schedule the kernel did not end: {error}")
            return
        if report.faults:
            print(f"Not yet. In the {schedule} schedule the x-ray reports:\n{faults(report)}")
            return
        if not right:
            print(f"Not yet. No faults, but the result is wrong in the {schedule} schedule.")
            return
        reports.append(report)
    _mark(reports[0], at_most)  # of blocks one after another, as in closed forms: where they wait, counts depend on it


def exercise_error(
    of: str | Kernel, answer: Mapping[str, str], arguments: tuple[object, ...], *sizes: int, at_most: float
) -> None:
    """Mark an answer to an exercise on a kernel in Triton: it compiles, is right on a problem, and close on another.

    Args:
        of: The kernel to start from.
        answer: Changes as `change` takes them; empty: print how to answer.
        arguments: What the result has to be close for, with the kernel's options.
        sizes: A problem on which it has to be right.
        at_most: How far from float64 it may be, |x - ref| / |ref|.
    """
    if not answer:
        print(f"No answer yet. {HOW}")
        print(f"Wanted: the right result, and a relative error of at most {at_most:g}.")
        return
    try:
        tried = change(of, answer)
        tried.compiled(*sizes)  # which is stricter about types than the interpreter
        right, error = tried.is_right(*sizes), tried.error(*arguments, **tried.options)
    except (ValueError, KernelFault) as problem:
        print(f"This cannot be tried: {problem}")
    except Exception as problem:  # whatever a kernel in Python may raise
        print(f"Not yet. It does not compile, or does not run: {str(problem).splitlines()[-1]}")
    else:
        enough = f"{'at most' if error <= at_most else 'more than'} {at_most:g}"
        solved = right and error <= at_most
        print(f"The result is {'right' if right else 'wrong'}, the relative error {enough}.")
        print("\nSolved." if solved else "\nNot yet.")


def exercise_layout(name: str, before: tuple[Tensor, ...], answer: object, at_most: Mapping[str, int]) -> None:
    """Mark another layout of the same tensors: equal values, and no count above `at_most`; like `exercise`."""
    if answer is None:
        print("No answer yet. Return the same matrices, laid out otherwise, from `prepare`, and run this cell again.")
        print("Wanted: the same values, and " + listing(at_most) + ".")
        return
    same = isinstance(answer, tuple) and len(answer) == len(before)
    if not same or not all(isinstance(x, Tensor) and torch.equal(x, y) for x, y in zip(answer, before, strict=True)):
        print("Not yet. The matrices must keep their shapes and values: only their places in memory may change.")
        return
    _mark(stage.load(name).xray(*answer), at_most)


def _mark(report: Report, at_most: Mapping[str, int]) -> None:
    counts = vars(report.counts()) | {
        "threads": sum(launch.threads for launch in report.launches),
        "shared_bytes": max(launch.static_shared + launch.dynamic_shared for launch in report.launches),
    }
    rows = [(name.replace("_", " "), f"{counts[name]:,}", f"{limit:,}") for name, limit in at_most.items()]
    print(render.table(("", "yours", "at most"), rows, "<>>"))
    solved = all(counts[name] <= limit for name, limit in at_most.items())
    print("\nSolved." if solved else "\nNot yet: no faults and the right result, but too much.")


def chapter(number: str) -> object:
    """Show the table of a chapter, and return its plot: the last line of a cell shows that as well."""
    from stages.toolkit import chapter, picture

    shown = chapter.chapter(number, chapter.recorded())
    table = picture.Shown(chapter.markdown(shown), chapter.text(shown))
    try:
        from IPython.display import display
    except ImportError:
        display = print
    display(table)
    return chapter.plot(shown)


def listing(at_most: Mapping[str, int]) -> str:
    """Limits as a phrase: "at most 96 load sectors and 256 threads"."""
    return "at most " + " and ".join(f"{limit:,} {name.replace('_', ' ')}" for name, limit in at_most.items())
