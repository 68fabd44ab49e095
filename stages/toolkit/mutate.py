"""Are the tests good enough to miss nothing? Breaks a kernel in one place at a time and sees whether they notice.

Each barrier, each bounds test and each padding of shared memory is taken out of `kernel.cu` alone, each comparison is
moved by one, and what comes out, a mutant, goes through the checks that a stage has to pass: values and gradients
against float64 on odd shapes, no fault under the x-ray in several schedules, counts equal to the closed forms. A mutant
that passes all of them has survived: either a check is missing, or what was taken out is not needed. Where it is truly
of no consequence, `stage.py` says so and why, by the name that the table gives the mutant:

    EQUIVALENT = {"if (x < N) y(x) = 0;  [x < N -> x <= N]": "y has a place more than it needs"}

To try all mutants of all stages takes too long for each run of the tests. So `mutate --record` writes down, in
`stages/measured/mutants.json`, of which kernel it has tried all and how many were caught. A test sees that this is the
kernel that stands there, comments aside, and tries some of its mutants again.
"""

import hashlib
import importlib
import json
import multiprocessing
import re
import resource
import signal
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from stages.toolkit import build, compilers, operator, render, verify, xray
from stages.toolkit.errors import KernelFault, NotAvailable
from stages.toolkit.stage import Stage, load

FLAGS = ("-Og", "-g1")  # and the stage's `type_only`: compiles in a fraction of the time and counts the same
SCHEDULES = (("forward", 0), ("reverse", 0), ("random", 1))
LAUNCH_SECONDS = 2.0  # after which the CPU device gives up a launch that waits for itself
MUTANT_SECONDS = 120  # of computing, after which a mutant's process is ended; waiting for a core is none
UNCHANGED = "(unchanged)"
RECORD = Path(__file__).resolve().parents[1] / "measured" / "mutants.json"


@dataclass(frozen=True)
class Mutant:
    """A kernel with one thing broken."""

    kind: str  # "barrier", "bounds", "off by one", "padding" or "swizzle"
    line: int
    text: str  # of the line, as it was
    change: str  # "row < rows -> true"
    source: str  # the whole file

    @property
    def name(self) -> str:
        """What EQUIVALENT calls it; does not change when lines move."""
        return f"{self.text}  [{self.change}]"


@dataclass(frozen=True)
class Outcome:
    """What the checks said of a mutant."""

    kind: str
    line: int
    name: str
    change: str
    caught: tuple[str, ...]  # by what; empty if it has survived
    excuse: str = ""  # why it may survive
    compiled: bool = True

    @property
    def survived(self) -> bool:
        return self.compiled and not self.caught and not self.excuse


# ---------------------------------------------------------------------------------------------------------------------
# Reading a kernel. No parser: brackets are matched, and a comparison is told from a template's brackets by the blanks
# that clang-format puts around it.

NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'"""
    r"""|^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
PAIRS = {"(": ")", "[": "]", "{": "}"}
COMPARISON = re.compile(r"(?<=\s)(<=|>=|<|>)(?=\s)")
MOVED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
# What a comparison's operands end at: all that binds less tightly, brackets aside.
LOOSER = re.compile(
    r"&&|\|\||[;,?]|(?<!:):(?!:)|[=!]=|(?<=\s)[-+*/%&|^]?=(?=\s)|(?<=\s)[&|^](?=\s)|\breturn\b|\bcase\b"
)
BARRIER = re.compile(
    r"(?:\b[A-Za-z_]\w*(?:::|\.|->))*"
    r"\b\w*(?:sync|wait|barrier|arrive|wgmma_fence|wgmma_commit|store_commit|_registers)\w*(?:<[^;<>]*>)?\s*(?=\()"
)
SHARED = re.compile(r"\b__shared__\b[^;{}]*;")
CONSTANT = re.compile(r"\bconstexpr\b[^;=(){}]*?\b(\w+) = ([^;{}]*);")
EXIT = re.compile(r"\s*(?:\{\s*)?(?:return|continue|break)\b")


def blank(source: str) -> str:
    """The source with comments, strings and preprocessor lines as blanks, every other character in its place."""
    return NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def closing(code: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for i in range(start, len(code)):
        depth += (code[i] in PAIRS) - (code[i] in PAIRS.values())
        if depth == 0:
            return i
    raise ValueError(f"a bracket that opens at character {start} does not close")


def bodies(code: str) -> list[tuple[int, int]]:
    """The spans of all functions that run on the device."""
    spans: list[tuple[int, int]] = []
    for found in re.finditer(r"\b__(?:global|device)__\b", code):
        i = found.end()
        while i < len(code) and code[i] not in ";{=":  # of a variable, not a function
            i = closing(code, i) + 1 if code[i] in "([" else i + 1
        if i < len(code) and code[i] == "{" and not any(start <= i < end for start, end in spans):
            spans.append((i, closing(code, i) + 1))
    return spans


def enclosing(code: str, position: int, start: int) -> Iterator[int]:
    """The brackets that are open at a position, the innermost first, as far as `start`."""
    depth = 0
    for i in range(position - 1, start - 1, -1):
        if code[i] in PAIRS.values():
            depth += 1
        elif code[i] in PAIRS:
            if depth == 0:
                yield i
            else:
                depth -= 1


def operands(code: str, begin: int, end: int, start: int) -> tuple[int, int]:
    """The span of the comparison whose operator has the span (begin, end)."""
    opened = next(enclosing(code, begin, start))
    closed = closing(code, opened)
    flat = list(code[opened + 1 : closed])  # with what stands in deeper brackets left out
    i = 0
    while i < len(flat):
        if flat[i] in PAIRS:
            last = closing(code, opened + 1 + i) - opened - 1
            flat[i + 1 : last] = "_" * (last - i - 1)
            if flat[i] == "{":
                flat[i], flat[last] = ";", ";"  # a block ends what was before it
            i = last
        i += 1
    flat, middle = "".join(flat), begin - opened - 1
    left = max((found.end() for found in LOOSER.finditer(flat) if found.end() <= middle), default=0)
    after = end - opened - 1
    right = min((found.start() for found in LOOSER.finditer(flat) if found.start() >= after), default=len(flat))
    left += len(flat[left:middle]) - len(flat[left:middle].lstrip())
    right -= len(flat[after:right]) - len(flat[after:right].rstrip())
    return opened + 1 + left, opened + 1 + right


def statement(code: str, position: int, start: int) -> str:
    """The text of a statement up to a position in it, from the last ; or brace on."""
    return code[max(code.rfind(mark, start, position) for mark in ";{}") + 1 : position]


def mutants(source: str) -> list[Mutant]:
    """All mutants of a kernel, in the order of its lines."""
    code = blank(source)
    starts = [0] + [found.end() for found in re.finditer("\n", source)]
    found: dict[tuple[int, int, str], Mutant] = {}

    def add(kind: str, begin: int, end: int, new: str, change: str | None = None) -> None:
        line = bisect_right(starts, begin)
        text = " ".join(source.splitlines()[line - 1].partition("//")[0].split())
        change = change or f"{' '.join(source[begin:end].split())} -> {new}"
        lines_lost = "\n" * (source.count("\n", begin, end) - new.count("\n"))
        mutated = source[:begin] + new + lines_lost + source[end:]
        found.setdefault((begin, end, new), Mutant(kind, line, text, change, mutated))

    for start, end in bodies(code):
        for call in BARRIER.finditer(code, start, end):
            last = closing(code, call.end()) + 1
            # A statement of its own, not an operand such as __shfl_sync(...), nor a declaration.
            if code[last:].lstrip()[:1] == ";" and re.search(r"(?:[;{})]|\belse)\s*$", code[start : call.start()]):
                add("barrier", call.start(), last, "(void)0", f"{source[call.start() : last]} removed")
        for test in COMPARISON.finditer(code, start, end):
            _comparison(source, code, start, *test.span(), add)
        _swizzles(source, code, start, end, add)
    _paddings(source, code, add)
    return sorted(found.values(), key=lambda mutant: mutant.line)


def _comparison(source: str, code: str, start: int, begin: int, end: int, add: Callable) -> None:
    """A comparison moved by one, and a test that always lets pass what it should hold back."""
    if re.search(r"\bconstexpr\b|\bstatic_assert\b|\btemplate\b", statement(code, begin, start)):
        return  # decided while compiling
    sign, (left, right) = code[begin:end], operands(code, begin, end, start)
    if "{" in code[left:right] or left >= begin or right <= end:
        return
    whole = " ".join(source[left:right].split())
    moved = f"{source[left:begin]}{MOVED[sign]}{source[end:right]}"
    add("off by one", left, right, moved, f"{whole} -> {' '.join(moved.split())}")
    negated = leaves = False
    for opened in enclosing(code, left, start):
        if code[opened] == "{":
            break
        before = code[start:opened].rstrip()
        if re.search(r"\b(?:for|while)$", before):
            return  # how far a loop goes is no bounds test: only moved by one
        if re.search(r"\bif$", before):
            leaves = bool(EXIT.match(code, closing(code, opened) + 1))
            break
        negated ^= before.endswith("!")
    if leaves:
        values = {negated}  # never leave
    else:
        # `i < n` is true inside; `i >= n` may guard what is inside (`i > 0`) or outside (`i >= n ? 0 : x(i)`).
        values = {not negated} if sign in ("<", "<=") else {True, False}
    for value in sorted(values):
        add("bounds", left, right, str(value).lower())


def _paddings(source: str, code: str, add: Callable) -> None:
    """What is added to a bound of a shared array, and constants that say they are padding."""
    constants = {constant[1]: constant for constant in CONSTANT.finditer(code)}
    lines = source.splitlines()
    zeroed = set()

    def zero(name: str) -> None:
        constant = constants[name]
        if name not in zeroed and constant[2].strip() != "0":
            add("padding", *constant.span(2), "0", f"{name} = {constant[2]} -> 0")
            zeroed.add(name)

    for array in SHARED.finditer(code):
        for term in _added(code, array.start(), array.end()):
            name = code[slice(*term)].lstrip("+ ")
            zero(name) if name in constants else add(
                "padding", *term, "", f"{' '.join(code[slice(*term)].split())} removed from a bound"
            )
    for name, constant in constants.items():
        comment = lines[source.count("\n", 0, constant.start())].partition("//")[2]
        if re.search(r"(?:^|_)PAD", name, re.IGNORECASE):
            zero(name)
        elif re.search(r"\bpad", comment, re.IGNORECASE):
            for found in re.finditer(r"\s*\+ (\w+)", constant[2]):
                begin, end = (constant.start(2) + i for i in found.span())
                zero(found[1]) if found[1] in constants else add(
                    "padding", begin, end, "", f"{found[0].strip()} removed"
                )


def _added(code: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The spans of `+ 1`, `+ PAD` and the like inside the bounds of an array."""
    i = start
    while (i := code.find("[", i, end)) >= 0:
        closed = closing(code, i)
        for found in re.finditer(r"\s*\+ (\w+)(?=\s*(?:\]|[-+] ))", code[i : closed + 1]):
            yield i + found.start(), i + found.end()
        i = closed


def _swizzles(source: str, code: str, start: int, end: int, add: Callable) -> None:
    """`column ^ row` in a function called ...swizzle..., or on a line whose comment speaks of a swizzle."""
    head = code[max(code.rfind(mark, 0, start) for mark in ";{}") + 1 : start]
    for found in re.finditer(r"(?<=\s)\^(?=\s)", code[start:end]):
        begin = start + found.start()
        line = source[source.rfind("\n", 0, begin) + 1 : source.find("\n", begin)]
        if "swizzle" in (head + line).lower():
            last = begin + 1
            while code[last] not in ",;?:)]}&|" and code[last : last + 2] != " ^":
                last = closing(code, last) + 1 if code[last] in "([" else last + 1
            before = begin - (code[begin - 1] == " ")
            add("swizzle", before, last, "", f"{' '.join(code[begin:last].split())} removed")


# ---------------------------------------------------------------------------------------------------------------------
# The checks, in a process of their own for each mutant: it may crash, hang or write where it likes.


def cases(stage: Stage) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Sizes for the counts, multiples of the tiles, no two alike; and those for the values, the odd ones first."""
    aligned = tuple(size * (2 + i % 2) for i, size in enumerate(stage.aligned))  # several tiles along each size
    return stage.sizes(aligned), [stage.sizes(sizes) for sizes in sorted(stage.problems, key=stage.fits)]


def check(stage: Stage, module: Path) -> list[str]:
    """What the checks of a stage find wrong with a module `_xray`. They stop at the first case that finds anything."""
    operator.empty = operator.poisoned  # what a kernel leaves out shows
    with stage.kernels.replaced(xray=module):
        device = stage.kernels.module("xray")
        device.configure = partial(device.configure, workers=1, timeout=LAUNCH_SECONDS)
        aligned, problems = cases(stage)
        runs = [(problems[0], *SCHEDULES[0]), (aligned, *SCHEDULES[0])]
        runs += [(sizes, *schedule) for schedule in SCHEDULES for sizes in problems if (sizes, *schedule) not in runs]
        for sizes, schedule, seed in runs:
            for options in stage.options():
                found = _values_and_faults(stage, sizes, schedule, seed, options)
                if schedule == SCHEDULES[0][0] and stage.fits(sizes.values()):
                    found += _counts(stage, sizes, options)
                if found:
                    return list(dict.fromkeys(found))
    return []


def _values_and_faults(
    stage: Stage, sizes: Mapping[str, int], schedule: str, seed: int, options: Mapping[str, Any]
) -> list[str]:
    found = []
    with xray.recording(schedule, seed) as report:
        try:
            results = verify.verify(stage, sizes, stage.dtype, options=options)
        except KernelFault as fault:
            return [str(fault).partition("\n")[0]]
    for result in results:
        if not result.ok:
            off = f"off by {result.error:.1e}" if result.error == result.error else "NaN"
            found.append(f"{result.what} {off}")
            break
    return found + [f"{fault.kind}, line {fault.line.number if fault.line else '?'}" for fault in report.faults]


def _counts(stage: Stage, sizes: Mapping[str, int], options: Mapping[str, Any]) -> list[str]:
    try:
        report = stage.xray(*stage.family.make(sizes, stage.dtype, **options), **options)
    except KernelFault:
        return []  # told already
    cost = stage.cost(**sizes, itemsize=stage.dtype.itemsize, **options)
    counts, expected = asdict(report.counts()), asdict(cost)
    return [
        f"{counts[name]:,} {name.replace('_', ' ')}, not {expected[name]:,}"
        for name in counts
        if counts[name] != expected[name]
    ]


def _child(connection: Connection, stage: str, module: Path, seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    torch.set_num_threads(1)
    try:
        connection.send(check(load(stage), module))
    except BaseException as error:  # whatever it is, the kernel's change has led to it
        connection.send([f"{type(error).__name__}: {error}"])


def isolated(stage: str, module: Path, seconds: int = MUTANT_SECONDS) -> list[str]:
    """`check` in a fresh process; its end by a signal is a finding, too, that of computing too long among them.

    Raises:
        NotAvailable: The process has not come to an end, though it had hours: nothing can be said of the mutant.
    """
    context = multiprocessing.get_context("forkserver")
    # Imported once, for all of them: torch, and what its first backward would import.
    context.set_forkserver_preload(["stages.toolkit.mutate", "torch.fx.experimental.symbolic_shapes"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, stage, module, seconds), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(60 * seconds):
            raise NotAvailable(f"a mutant of {stage} has not been tried: its process neither computes nor ends")
        return receiver.recv()
    except EOFError:
        process.join(10)
        if process.exitcode == -signal.SIGXCPU:
            return [f"no end: it computed for {seconds} s"]
        return [f"crash: its process ended with code {process.exitcode}"]
    finally:
        if process.is_alive():
            process.join(1)
        process.kill()
        process.join()
        receiver.close()


# ---------------------------------------------------------------------------------------------------------------------
# All mutants of a stage


def parsed_headers(source: str, folder: Path, flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags that give all mutants of a kernel its common headers, parsed once: that takes as long as the rest."""
    header = folder / "headers.h"
    header.write_text("\n".join(re.findall(r'^#include "common/.*', source, re.MULTILINE)) + "\n", encoding="utf-8")
    as_header = (*flags, "-x", "c++-header")
    unit = build.compile_unit("xray", "mutants", header, folder, compilers.host_compiler(), as_header)
    build.make(replace(unit, output=folder / "headers.h.gch"), build.Runner())
    return "-include", str(header)


def run(
    stage: Stage,
    kernel: Path | None = None,
    equivalent: Mapping[str, str] | None = None,
    jobs: int = 2,
    progress: Callable[[Outcome], None] = lambda outcome: None,
    some: int | None = None,
) -> list[Outcome]:
    """Try all mutants of a stage's kernel, or of another kernel that takes its place.

    Args:
        equivalent: Which mutants may survive, and why; by default what `stage.py` declares in EQUIVALENT.
        jobs: How many to build and check at a time.
        progress: Called with each outcome as soon as there is one.
        some: Try no more than so many, spread over the kernel.

    Raises:
        NotAvailable: The kernel as it stands does not pass, or an entry of `equivalent` is no survivor of this kernel.
        BuildError: The kernel as it stands does not compile.
    """
    source = (kernel or stage.source).read_text(encoding="utf-8")
    if equivalent is None:
        equivalent = getattr(importlib.import_module(f"stages.{stage.name}.stage"), "EQUIVALENT", {})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        flags = (*FLAGS, stage.type_only, f"-I{stage.folder}")
        flags += parsed_headers(source, Path(folder), flags)

        def attempt(number: int, mutant: Mutant) -> Outcome:
            place = Path(folder) / str(number)
            place.mkdir()
            (place / "kernel.cu").write_text(mutant.source, encoding="utf-8")
            outcome = Outcome(mutant.kind, mutant.line, mutant.name, mutant.change, ())
            try:
                module = build.build_module(place / "kernel.cu", stage.folder / "binding.cpp", "xray", place, flags)
            except build.BuildError:
                if mutant.change == UNCHANGED:
                    raise
                return replace(outcome, compiled=False)
            caught = isolated(stage.name, module)
            outcome = replace(outcome, caught=tuple(caught), excuse="" if caught else equivalent.get(mutant.name, ""))
            progress(outcome)
            return outcome

        unchanged = attempt(0, Mutant("", 0, "", UNCHANGED, source))
        if unchanged.caught:
            raise NotAvailable(f"{stage.name}: the kernel as it stands does not pass: {'; '.join(unchanged.caught)}")
        with ThreadPoolExecutor(jobs) as pool:
            chosen = mutants(source)
            if some is not None:
                chosen = chosen[:: -(-len(chosen) // some)]
            outcomes = list(pool.map(attempt, range(1, len(chosen) + 1), chosen))
    if some is not None:
        return outcomes
    excused = {outcome.name for outcome in outcomes if outcome.excuse}
    for name in equivalent:
        if name not in excused:
            raise NotAvailable(f"{stage.name}: EQUIVALENT has an entry that is no survivor of this kernel: {name}")
    return outcomes


def table(stage: Stage, outcomes: list[Outcome]) -> str:
    """For a terminal: every mutant, what caught it, and the score; the survivors by name."""
    rows = []
    for outcome in outcomes:
        if not outcome.compiled:
            verdict = "does not compile"
        else:
            verdict = "; ".join(outcome.caught) or (outcome.excuse and f"may survive: {outcome.excuse}") or "SURVIVED"
        rows.append((str(outcome.line), outcome.kind, render.cut(outcome.change, 40), verdict))
    tried = [outcome for outcome in outcomes if outcome.compiled]
    caught, survivors = sum(bool(o.caught) for o in tried), [o for o in tried if o.survived]
    excused = len(tried) - caught - len(survivors)
    text = render.table(("line", "", "changed", "caught by"), rows, "><<<", shrink=3)
    text += f"\n\n{stage.name}: {caught} of {len(tried)} mutants caught"
    text += f", {excused} of no consequence" if excused else ""
    for outcome in survivors:
        text += f"\nSURVIVED: kernel.cu:{outcome.line}  {outcome.name}"
    return text


def fingerprint(source: str) -> str:
    """What a kernel is, however it is commented."""
    return hashlib.sha256(" ".join(blank(source).split()).encode()).hexdigest()[:16]


def read_record() -> dict[str, dict[str, object]]:
    """For each stage all of whose mutants were tried: the kernel's fingerprint, and how many were caught or excused."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def write_record(stage: Stage, outcomes: list[Outcome]) -> None:
    """Write down that all mutants of the kernel as it stands were tried."""
    tried = [outcome for outcome in outcomes if outcome.compiled]
    entry = {
        "kernel": fingerprint(stage.source.read_text(encoding="utf-8")),
        "mutants": len(outcomes),
        "caught": sum(bool(outcome.caught) for outcome in tried),
        "of no consequence": sum(bool(outcome.excuse) for outcome in tried),
        "survived": sum(outcome.survived for outcome in tried),
    }
    record = read_record() | {stage.name: entry}
    lines = (f"  {json.dumps(name)}: {json.dumps(record[name])}" for name in sorted(record))
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def report(stage: Stage, jobs: int = 2, listed: bool = False, recorded: bool = False) -> int:
    """The command `mutate`: prints the table, gives the exit code.

    Raises:
        NotAvailable: The kernel is written in Triton, or `run` says so.
    """
    if stage.in_triton:
        raise NotAvailable(
            f"{stage.name}: `mutate` breaks CUDA C++ and has the x-ray look at it; of a kernel in Triton the stage's "
            f"own tests break some places: python -m stages test {stage.number} -k broken"
        )
    if listed:
        rows = [(str(m.line), m.kind, m.change) for m in mutants(stage.source.read_text(encoding="utf-8"))]
        print(render.table(("line", "", "changed"), rows, "><<"))
        return 0
    began = time.monotonic()
    outcomes = run(stage, jobs=jobs)
    print(table(stage, outcomes))
    print(f"{time.monotonic() - began:.0f} s")
    if recorded:
        write_record(stage, outcomes)
    return int(any(outcome.survived for outcome in outcomes))
