"""Text for a terminal: tables, and the report of the x-ray."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.toolkit.report import Launch, Report, Site, Traffic

WIDTH = 100  # columns at most


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str, shrink: int | None = None) -> str:
    """Columns two blanks apart under their headings, aligned as `align` says, a '<' or '>' for each.

    The cells of the column `shrink` are cut where the table would be wider than a terminal.
    """
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    if shrink is not None:
        widths[shrink] -= max(0, sum(widths) + 2 * len(widths) - WIDTH)
        rows = [[cut(cell, widths[i]) if i == shrink else cell for i, cell in enumerate(row)] for row in rows]
    lines = ["  " + "  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)) for row in rows]
    lines.insert(1, "  " + "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def cut(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"


def wrap(text: str, indent: str = "") -> str:
    """The text in lines of at most 100 columns, all but the first indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False)


def report(report: Report) -> str:
    """What the x-ray saw: each kernel's launches and lines, the totals of each tensor, and the faults."""
    parts = []
    for kernel in dict.fromkeys((launch.stage, launch.kernel) for launch in report.launches):
        launches = [launch for launch in report.launches if (launch.stage, launch.kernel) == kernel]
        sites = [site for site in report.sites if (site.stage, site.kernel) == kernel]
        parts.append(_launches(launches, report))
        for space in ("global", "shared"):
            if chosen := [site for site in sites if site.space == space]:
                parts.append(_lines(space, chosen))
    if traffic := report.traffic("global"):
        parts.append(_tensors(traffic))
    if report.launches:
        rows = [(name, f"{value:,}") for name, value in report.metrics().items()]
        parts.append("Totals under Nsight Compute's names\n" + table(("metric", "value"), rows, "<>"))
    else:
        parts.append("No kernel was launched on the CPU device.")
    return "\n\n".join([*parts, faults(report), *map(wrap, report.notes)])


def faults(report: Report) -> str:
    """The faults, one item each, with the lines of source that took part."""
    if not report.faults:
        return "No faults."
    items = [f"{len(report.faults)} fault{'s' if len(report.faults) > 1 else ''}"]
    for fault in report.faults:
        items.append(wrap(f"- {fault}", "  "))
        lines = dict.fromkeys(line for line in (fault.line, fault.other_line) if line and line.text)
        items += [cut(f"    {line}  {line.text}", WIDTH) for line in lines]
    return "\n".join(items)


def _launches(launches: list[Launch], report: Report) -> str:
    threads, blocks, barriers = (sum(getattr(n, name) for n in launches) for name in ("threads", "blocks", "barriers"))
    first, count = launches[0], len(launches)
    shape = f"grid {first.grid}, block {first.block}" if count == 1 else f"{count} launches"
    seed = f", seed {report.seed}" if report.schedule == "random" else ""
    return (
        f"{first.stage}: {first.kernel}, schedule {report.schedule}{seed}\n"
        f"  {shape}: {blocks:,} blocks, {threads:,} threads, {barriers:,} barriers"
    )


def _lines(space: str, sites: list[Site]) -> str:
    rows, last = [], None
    for site in sites:
        where = (str(site.line), site.line.text) if str(site.line) != last else ("", "")
        units = (site.sectors,) if space == "global" else (site.wavefronts, site.conflicts)
        numbers = [f"{number:,}" for number in (site.requests, *units)]
        rows.append((*where, f"{site.op} {site.name}", *numbers, f"{site.per_request:.2f}"))
        last = str(site.line)
    if space == "global":
        title = "Global memory: how many sectors of 32 bytes each request of a warp touches"
        header = ("line", "source", "access", "requests", "sectors", "each")
        return title + "\n" + table(header, rows, "<<<>>>", shrink=1)
    title = "Shared memory: how many passes over the 32 banks (wavefronts) each request of a warp takes"
    header = ("line", "source", "access", "requests", "wavefronts", "conflicts", "each")
    return title + "\n" + table(header, rows, "<<<>>>>", shrink=1)


def _tensors(traffic: list[Traffic]) -> str:
    rows = [
        (t.name, t.op, f"{t.requests:,}", f"{t.sectors:,}", f"{t.bytes_asked:,}", f"{t.bytes_moved:,}") for t in traffic
    ]
    header = ("tensor", "access", "requests", "sectors", "bytes asked for", "bytes moved")
    return "Global memory, tensor by tensor\n" + table(header, rows, "<<>>>>")
