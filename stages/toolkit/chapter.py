"""A chapter in one table and one plot: how near each stage comes to the library and to the card, and what it takes.

A chapter is the stages whose numbers begin alike; those of another family than most have a table of their own. Times,
registers and shared memory are those of `python -m stages.toolkit.measure`, recorded in stages/measured/bench.json; the
bytes are the closed forms, which the tests hold against the x-ray. What has not been measured is a dash.

A table is of one machine, which it names: of those that are recorded the one that fills most of it, and of several such
the one that did so last. A stage that was measured on another machine has dashes there, and the text below says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from stages.toolkit import build, machines, render
from stages.toolkit.errors import NotAvailable, StageNotFound
from stages.toolkit.report import SECTOR
from stages.toolkit.stage import Stage, load, names

if TYPE_CHECKING:
    from stages.toolkit.picture import Picture

LIBRARIES = {"torch.matmul": "cuBLAS"}  # what an incumbent calls in the end, where that is better known
LIMITS = {"memory": "copying", "arithmetic": "multiplying"}  # how a limit of `bench` was measured
MISSING, NO_BREAK = "–", "\u00a0"
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
NOT_MEASURED = (
    "**Not measured yet.** No times on a GPU have been recorded for this version. On a machine with one, "
    "`python -m stages.toolkit.measure --out stages/measured` takes them."
)


@dataclass(frozen=True)
class Row:
    """One stage in one dtype: its records at the chapter's sizes, where there are any."""

    stage: Stage
    dtype: str  # as the table shows it: "float32 as tf32"
    records: tuple[Mapping[str, Any] | None, ...]
    bytes_per_flop: float | None

    @property
    def kernels(self) -> Sequence[Mapping[str, Any]]:
        """The kernels that ran, at the first size for which they are known."""
        return next((r["kernels"] for r in self.records if r and r.get("kernels")), ())


@dataclass(frozen=True)
class Chapter:
    """A chapter's stages of one family: what stands in their table, all of it measured on one machine."""

    number: str
    stages: Sequence[Stage]
    machine: Mapping[str, Any]  # empty where no machine is recorded
    sizes: Sequence[tuple[int, ...]]  # the largest two that the family measures
    rows: Sequence[Row]
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # the stages of other machines, and what these are

    @property
    def records(self) -> list[Mapping[str, Any]]:
        """The records that the table shows."""
        return [record for row in self.rows for record in row.records if record]

    @property
    def dates(self) -> list[str]:
        """When the records were taken, the last day at the end."""
        return sorted({record["date"] for record in self.records})

    @property
    def date(self) -> str:
        """The day, or the first and the last: "2026-01-01 to 2026-01-09"."""
        return " to ".join(dict.fromkeys((self.dates[0], self.dates[-1])))

    @property
    def library(self) -> str:
        incumbent = self.stages[0].family.INCUMBENT
        return LIBRARIES.get(incumbent) or incumbent.partition("(")[0]


def numbers() -> list[str]:
    """The chapters: "0", "1", ..."""
    return sorted({name[0] for name in names()})


def recorded() -> list[dict[str, Any]]:
    """The machines that are recorded in stages/measured; `machines` says what there is of each."""
    return machines.read(build.PACKAGE / "measured" / "bench.json")


def parts(number: str, recorded: Sequence[Mapping[str, Any]]) -> list[Chapter]:
    """The chapter of that number, family by family: what is compared solves the same problems.

    Raises:
        StageNotFound: There is none. The text lists those that there are.
    """
    stages = [load(name) for name in names() if name.startswith(number) and len(number) == 1]
    if not stages:
        raise StageNotFound(f"no chapter is called {number!r}; there are: {', '.join(numbers())}")
    families = dict.fromkeys(stage.family for stage in stages)
    return [_part(number, [stage for stage in stages if stage.family is family], recorded) for family in families]


def chapter(number: str, recorded: Sequence[Mapping[str, Any]]) -> Chapter:
    """Of its parts the first."""
    return parts(number, recorded)[0]


def _part(number: str, stages: Sequence[Stage], recorded: Sequence[Mapping[str, Any]]) -> Chapter:
    """On the machine that has most of it."""
    each = [_on(machine, number, stages) for machine in recorded or [{"records": []}]]
    most = max(each, key=lambda part: (len(part.records), part.dates[-1:]))
    elsewhere = {
        short_name(row.stage): machines.different(part.machine, most.machine, "records")
        for part in each
        for row in part.rows
        if part is not most and any(row.records)
    }
    return replace(most, elsewhere=elsewhere)


def _on(machine: Mapping[str, Any], number: str, stages: Sequence[Stage]) -> Chapter:
    """As one machine has it."""
    records = machine["records"]
    sizes = stages[0].family.BENCH["cuda"][-2:]
    dtypes = dict.fromkeys(r["dtype"] for r in records) or {"float32": None}
    rows = []
    for stage in stages:
        for dtype in dtypes:
            if getattr(torch, dtype) in stage.dtypes:
                rows.append(_row(stage, dtype, sizes, records))
    return Chapter(number, stages, machine, sizes, rows)


def _row(stage: Stage, dtype: str, sizes: Sequence[tuple[int, ...]], records: Sequence[Mapping[str, Any]]) -> Row:
    options = stage.options(getattr(torch, dtype))[0]
    found: list[Mapping[str, Any] | None] = []
    for size in sizes:
        wanted = (stage.name, dtype, stage.sizes(size), options)
        own = [r for r in records if (r["stage"], r["dtype"], r["sizes"], r.get("options", {})) == wanted]
        found.append(own[-1] if own else None)
    return Row(stage, dtype_name(dtype, options), tuple(found), bytes_per_flop(stage, sizes[0], dtype))


def dtype_name(dtype: str, options: Mapping[str, Any]) -> str:
    """A dtype and how a stage takes it: "float32 as tf32"."""
    words = ["as tf32" if name == "tf32" else f"{name}={value}" for name, value in options.items() if value]
    return " ".join([dtype, *words])


def bytes_per_flop(stage: Stage, size: tuple[int, ...], dtype: str) -> float | None:
    """What the x-ray counts for each floating-point operation: whole sectors of global memory, read and written.

    None where the closed forms do not hold, and of a stage that has none.
    """
    if not stage.fits(size):
        return None
    sizes, itemsize = stage.sizes(size), getattr(torch, dtype).itemsize
    options = stage.options(getattr(torch, dtype))[0]
    counts, work = stage.cost(**sizes, itemsize=itemsize, **options), stage.family.work(sizes, itemsize, **options)
    sectors = counts.sectors_read + counts.sectors_written + counts.atomic_sectors
    return SECTOR * sectors / work.operations


# ---------------------------------------------------------------------------------------------------------------------
# The table


def markdown(chapter: Chapter) -> str:
    """The table and what it says, for a page."""
    if not chapter.records:
        return NOT_MEASURED
    header = ["stage", "dtype", *_headings(chapter, "{}, ms", "% of {}"), "bytes a flop", "regs", "shared, KiB"]
    page = f"{title(chapter)}\n\n{_table(header, cells(chapter))}\n\n{legend(chapter)}"
    if both := backward(chapter):
        heading, rows, notes = both
        page += f"\n\n{_table(heading, rows)}\n\n{notes}"
    return page


def backward(chapter: Chapter) -> tuple[list[str], list[list[str]], str] | None:
    """Forward and backward together, where that was measured: the headings, the cells, and what they say."""
    rows = [row for row in chapter.rows if any(r and "both_ms" in r for r in row.records)]
    if not rows:
        return None
    eager = any(r and "eager_both_ms" in r for row in rows for r in row.records)  # what is compiled, also was not
    columns = {"incumbent": f"% of {chapter.library}"} | ({"eager": "% of eager"} if eager else {})
    header = ["stage", "dtype"]
    for size in chapter.sizes:
        header += [f"{size_name(size)}, ms", *columns.values(), "MiB"]
    lines, notes = [], ["Forward and backward together; MiB: memory taken at most, beside the inputs."]
    for row in rows:
        line = [short_name(row.stage), row.dtype]
        for r in row.records:
            line += _both(r, columns) if r and "both_ms" in r else [MISSING] * (len(columns) + 2)
        lines.append(line)
    for size, r in zip(chapter.sizes, rows[-1].records, strict=True):
        if r and "both_ms" in r:
            words = [f"At {size_name(size)} {rows[-1].dtype} `{chapter.stages[0].family.INCUMBENT}` takes"]
            for name in columns:
                words += ["the same not compiled (eager)"] if name == "eager" else []
                words.append(f"{r[f'{name}_both_ms']:,.4g} ms and {r[f'{name}_peak_bytes'] / 2**20:,.0f} MiB")
            notes.append(" ".join(words).replace("MiB the same", "MiB, the same") + ".")
    return header, lines, " ".join(notes)


def _both(record: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    percent = (100 * record[f"{name}_both_ms"] / record["both_ms"] for name in names)
    return [f"{record['both_ms']:,.4g}", *map(_percent, percent), f"{record['peak_bytes'] / 2**20:,.0f}"]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a page; names of stages stay on one line."""
    lines = [header, ["--:" if i > 1 else ":--" for i in range(len(header))]]
    lines += ([stage.replace(" ", NO_BREAK), *line] for stage, *line in rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def text(chapter: Chapter) -> str:
    """The same for a terminal."""
    if not chapter.records:
        return render.wrap(NOT_MEASURED.replace("**", "").replace("`", ""))
    header = ["stage", "dtype", *_headings(chapter, "{} ms", "% {}"), "B/flop", "regs", "KiB"]
    body = render.table(header, cells(chapter), "<<" + ">" * (len(header) - 2))
    head, notes = (render.wrap(part(chapter).replace("`", "").replace("**", "")) for part in (title, legend))
    page = f"{head}\n\n{body}\n\n{notes}"
    if both := backward(chapter):
        heading, rows, notes = both
        heading = [word.replace("% of ", "% ") for word in heading]
        body = render.table(heading, rows, "<<" + ">" * (len(heading) - 2))
        page += f"\n\n{body}\n\n{render.wrap(notes.replace('`', ''))}"
    return page


def _headings(chapter: Chapter, ms: str, percent: str) -> list[str]:
    found = []
    for size in chapter.sizes:
        found += [ms.format(size_name(size)), percent.format(chapter.library)]
        if size == chapter.sizes[0]:
            found.append(percent.format("card"))
    return found


def cells(chapter: Chapter) -> list[list[str]]:
    """The cells of the table, a line for each row; a stage's name stands in the first of its lines only."""
    lines, last = [], None
    for row in chapter.rows:
        line = [short_name(row.stage) if row.stage is not last else "", row.dtype]
        for i, record in enumerate(row.records):
            line += [f"{record['ms']:,.4g}", _percent(100 * record["ratio"])] if record else [MISSING] * 2
            if i == 0:
                line.append(_percent(record["percent_of_limit"]) if record else MISSING)
        line.append(MISSING if row.bytes_per_flop is None else f"{row.bytes_per_flop:.3g}")
        line.append(_each(f"{kernel['registers']}" for kernel in row.kernels))
        line.append(_each(f"{kernel['shared'] / 1024:.4g}" for kernel in row.kernels))
        lines.append(line)
        last = row.stage
    return lines


def _percent(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _each(values: Iterable[str]) -> str:
    """What is to be said of the kernels of a call, once where they are alike."""
    return " + ".join(dict.fromkeys(values)) or MISSING


def title(chapter: Chapter) -> str:
    """What was measured, and on what."""
    machine = chapter.machine
    return (
        f"**Chapter {chapter.number}, {chapter.stages[0].family.NAME}**, on one {machine['card']}, "
        f"driver {machine['driver']}, torch {machine['torch']}, {chapter.date}; medians."
    )


def legend(chapter: Chapter) -> str:
    """How to read the columns."""
    family, first = chapter.stages[0].family, size_name(chapter.sizes[0])
    limits = dict.fromkeys(r["limit"] for r in chapter.records)
    calls = f"`{family.INCUMBENT}`" + (", which calls it" if chapter.library in LIBRARIES.values() else "")
    if "arithmetic" in limits:
        dtypes = [row.dtype for row in chapter.rows]
        products = {"float32": "float32 without TF32", "float32 as tf32": "float32 as tf32 with it"}
        calls += "".join(f"; {words}" for dtype, words in products.items() if dtype in dtypes)
    parts = [
        f"100 % of {chapter.library} is as fast as {calls}.",
        f"% of card: of what the card gave in the same run in {' or '.join(map(LIMITS.get, limits))}, at {first}.",
        f"Bytes a flop: all sectors of global memory that the x-ray counts, at {first}.",
        "Registers (regs) of a thread, shared memory of a block.",
    ]
    for row in chapter.rows:
        if spilled := sum(kernel.get("spilled") or 0 for kernel in row.kernels):
            parts.append(f"{short_name(row.stage)} spills {spilled:,} bytes in {row.dtype}.")
    if any(MISSING in line for line in cells(chapter)):
        parts.append(f"{MISSING}: not measured{' on this machine' if chapter.elsewhere else ''}.")
    if chapter.elsewhere:
        others = ", ".join(f"{name} ({machine})" for name, machine in chapter.elsewhere.items())
        parts.append(f"Measured on another machine, and so not in this table: {others}.")
    return " ".join(parts)


def size_name(size: Sequence[int]) -> str:
    """4096³ for a product of square matrices, 2²⁴ for a power of two, otherwise the sizes."""
    if len(size) == 3 and len(set(size)) == 1:
        return f"{size[0]}³"
    if len(size) == 1 and size[0] & (size[0] - 1) == 0:
        return "2" + str(size[0].bit_length() - 1).translate(SUPERSCRIPT)
    return "×".join(f"{n:,}" for n in size)


def short_name(stage: Stage) -> str:
    """For matmul_shared "12 shared": in a chapter all know which function it is."""
    return f"{stage.number} {stage.operator.removeprefix(stage.family.NAME + '_')}"


# ---------------------------------------------------------------------------------------------------------------------
# The plot


def plot(chapter: Chapter) -> Picture | None:
    """Percent of the library, stage by stage, at the first of the sizes; None where nothing has been measured.

    Raises:
        NotAvailable: matplotlib is not installed.
    """
    series: dict[str, dict[int, float]] = {}
    for row in chapter.rows:
        if row.records[0]:
            series.setdefault(row.dtype, {})[chapter.stages.index(row.stage)] = 100 * row.records[0]["ratio"]
    if not series:
        return None
    try:
        from stages.toolkit import picture
    except ImportError:
        raise NotAvailable("the plot needs matplotlib: pip install -e '.[notebooks]'") from None
    figure = picture.Figure(figsize=(picture.WIDTH, 3.9), layout="constrained", facecolor=picture.PANEL)
    axes = figure.subplots()
    for (label, points), colour in zip(series.items(), cycle(picture.BLOCKS), strict=False):
        axes.plot(list(points), list(points.values()), "o-", color=colour, lw=2, ms=6, label=label)
    for place in range(len(chapter.stages)):
        # The highest point of a stage has its figure above it, the others below.
        here = sorted((points[place] for points in series.values() if place in points), reverse=True)
        for i, value in enumerate(here):
            shift, align = ((0, 7), "bottom") if i == 0 else ((0, -7), "top")
            axes.annotate(
                *(f"{_percent(value)} %", (place, value), shift),
                **dict(textcoords="offset points", ha="center", va=align, fontsize=9, color=picture.INK),
                bbox={"facecolor": picture.PANEL, "edgecolor": "none", "pad": 0.5},
            )
    axes.axhline(100, color=picture.INK, lw=1, ls=(0, (4, 3)), zorder=1)
    lowest, highest = (most(100, *(y for points in series.values() for y in points.values())) for most in (min, max))
    axes.set(yscale="log", xlim=(-0.45, len(chapter.stages) - 0.55), ylim=(lowest / 2.5, 2.2 * highest))
    axes.set_xticks(range(len(chapter.stages)), [short_name(stage).replace(" ", "\n", 1) for stage in chapter.stages])
    axes.yaxis.set_major_formatter(lambda value, _: chapter.library if value == 100 else f"{value:g} %")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_facecolor(picture.PANEL)
    axes.tick_params(colors=picture.INK, which="both", length=0)
    axes.grid(axis="y", color=picture.FAINT, alpha=0.3, lw=0.8)
    axes.spines[:].set_visible(False)
    what = f"Speed in percent of {chapter.library} at {size_name(chapter.sizes[0])}"
    where = f"{chapter.machine['card']}, {chapter.date}"
    axes.set_title(f"{what}, on one {where}", fontsize=10, color=picture.INK)
    axes.legend(frameon=False, labelcolor=picture.INK, fontsize=9, loc="lower right")
    words = "; ".join(
        f"{label}: " + ", ".join(f"{short_name(chapter.stages[i])} {_percent(y)} %" for i, y in points.items())
        for label, points in series.items()
    )
    return picture.Picture(figure, f"{what}, {where}. {words}.")
