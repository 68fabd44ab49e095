"""What a notebook shows: lines of a kernel from its file, tables, and pictures drawn from the trace of the x-ray.

Pictures stand on a pale panel of their own, so that they read alike on a light and on a dark page.
"""

import base64
import difflib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from stages.toolkit import build, lab, render, triton_kernels
from stages.toolkit import nsight as comparison
from stages.toolkit.lab import Kernel
from stages.toolkit.report import METRICS, SECTOR, Access, Counts, Report

PANEL, INK, FAINT = "#f4f5f7", "#22272e", "#8b949e"
EMPTY = to_rgb("#dde1e6")  # memory that nobody asks for
WASTE = to_rgb("#f2b880")  # fetched, because it lies in the same sector as something asked for; not used
DONE = to_rgb("#b4bcc8")  # touched in an earlier step
SHARED = to_rgb("#24292f")  # one address that several lanes ask for
COLOURS = 128  # of a picture, at most
WIDTH, DPI = 9.0, 110  # inches, dots an inch: 990 dots, shown on 760 points of a page
LANES = [matplotlib.colormaps["viridis"](0.12 + 0.83 * i / 31)[:3] for i in range(32)]
BLOCKS = [to_rgb(colour) for colour in ("#4c78a8", "#e0803a", "#54a24b", "#b279a2")]


class Shown:
    """Something to see: Markdown in a notebook, plain text in a terminal."""

    def __init__(self, markdown: str, plain: str | None = None) -> None:
        self.markdown, self.plain = markdown, plain or markdown

    def _repr_markdown_(self) -> str:
        return self.markdown

    def __repr__(self) -> str:
        return self.plain


class Picture:
    """A drawing, and what it shows in words."""

    def __init__(self, figure: Figure, words: str) -> None:
        buffer = io.BytesIO()
        FigureCanvasAgg(figure)
        figure.savefig(buffer, format="png", dpi=DPI * 2, facecolor=PANEL)
        # Few colours are in a drawing, and a notebook that counts them takes a third of the bytes.
        drawn, buffer = Image.open(buffer).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE), io.BytesIO()
        drawn.save(buffer, format="png", optimize=True)
        self.png, self.words = buffer.getvalue(), words
        self.width = round(figure.get_figwidth() / WIDTH * 760)

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        data = {"image/png": base64.b64encode(self.png).decode(), "text/plain": self.words}
        return data, {"image/png": {"width": self.width, "alt": self.words}}

    def __repr__(self) -> str:
        return self.words


# ---------------------------------------------------------------------------------------------------------------------
# Text


def say(text: str) -> Shown:
    """A sentence with computed numbers in it."""
    return Shown(text)


def code(kernel: Kernel, first: str, last: str) -> Shown:
    """The lines of a kernel's file from the first that holds the text `first` to the next that holds `last`."""
    return _lines(kernel.source, f"stages/{kernel.stage.name}/{kernel.stage.source.name}", first, last)


def header(name: str, first: str, last: str) -> Shown:
    """Lines of a header, common/<name>, likewise."""
    return _lines(build.INCLUDE / "common" / name, f"common/{name}", first, last)


def _lines(source: Path, name: str, first: str, last: str) -> Shown:
    lines = source.read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if first in line), len(lines))
    end = next((i for i in range(start, len(lines)) if last in lines[i]), None)
    if end is None:
        raise ValueError(f"no line of {name} holds {(first if start == len(lines) else last)!r}")
    body = "\n".join(f"{i + 1:3}  {lines[i]}" for i in range(start, end + 1))
    title = f"{name}, lines {start + 1} to {end + 1}"
    return _fenced("python" if source.suffix == ".py" else "cpp", body, f"{title}\n{body}", title)


def difference(before: Kernel, after: Kernel) -> Shown:
    """The lines of code that differ between two kernels, but for the kernel's name, blanks and the header comment."""
    lines, keys = zip(*(_code_lines(kernel) for kernel in (before, after)), strict=True)
    changes = []
    for tag, i, j, k, n in difflib.SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if tag != "equal":
            changes += [f"-{line}" for line in lines[0][i:j]] + [f"+{line}" for line in lines[1][k:n]] + [""]
    body = "\n".join(changes[:-1])
    return _fenced("diff", body, body)


def _code_lines(kernel: Kernel) -> tuple[list[str], list[str]]:
    """The lines of a kernel's code, and the same for comparison."""
    lines = kernel.source.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("#include"))
    lines = [line for line in lines[start:] if line.strip()]
    return lines, [" ".join(line.replace(kernel.stage.operator, "").split()) for line in lines]


def _fenced(language: str, body: str, plain: str, title: str = "") -> Shown:
    # The division is for pages made by nbconvert, which show a fenced block of an output in the font around it.
    title = title and f"`{title}`\n\n"
    return Shown(f'{title}<div style="font-family: monospace">\n\n```{language}\n{body}\n```\n\n</div>', plain)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Shown:
    """A small table: the first column text, the others numbers."""
    cells = [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in rows]
    align = "<" + ">" * (len(header) - 1)
    lines = [header, [":--" if a == "<" else "--:" for a in align], *cells]
    return Shown("\n".join("| " + " | ".join(line) + " |" for line in lines), render.table(header, cells, align))


def counts(columns: Mapping[str, Report | Counts], times_less: bool = False) -> Shown:
    """Counts side by side; with `times_less`, what the second column saves against the first."""
    values = {
        title: asdict(column.counts() if isinstance(column, Report) else column) for title, column in columns.items()
    }
    header, rows = ["", *values], []
    for name in (f.name for f in fields(Counts)):
        row: list[object] = [column[name] for column in values.values()]
        if any(row):
            if times_less:
                row.insert(2, f"{row[0] / row[1]:.3g} ×" if row[0] and row[1] and row[0] != row[1] else "")
            rows.append((name.replace("_", " "), *row))
    if times_less:
        header.insert(3, "times less")
    return table(header, rows)


def ratios(problems: Mapping[str, tuple[Kernel, tuple[int, ...]]]) -> Shown:
    """What kernels pay for each request and for each byte that their problem needs."""
    rows = []
    for title, (kernel, sizes) in problems.items():
        report = kernel.xray(*sizes)
        count, factor = report.counts(), lab.bytes_moved(report) / kernel.bytes_needed(*sizes)
        loads, stores = count.load_sectors / count.load_requests, count.store_sectors / count.store_requests
        rows.append((title, f"{loads:.2f}", f"{stores:.2f}", f"{factor:.2f}"))
    return table(("", "sectors a load request", "sectors a store request", "bytes moved for each needed"), rows)


def nsight(last: str = "99", dtype: str = "float32") -> Shown:
    """What Nsight Compute counted on a GPU and what the x-ray counted, as recorded in stages/measured/nsight.json.

    Of the stages up to the last that is named. The table has the problems of one dtype; a second number in a cell is
    the x-ray's where it is another one. The sentences around it are about all dtypes that were recorded. Each machine
    has a table of its own, with the stages that were compared there.
    """
    shown = []
    for machine in comparison.read(build.PACKAGE / "measured" / "nsight.json"):
        if found := [row for row in machine["rows"] if row["stage"][:2] <= last]:
            shown.append(_compared(machine["card"], found, dtype))
    if not shown:
        return say("**Not measured yet.** No comparison with a GPU has been recorded.")
    return Shown("\n\n".join(part.markdown for part in shown), "\n\n".join(part.plain for part in shown))


def _compared(card: str, found: Sequence[Mapping[str, Any]], dtype: str) -> Shown:
    names = {metric: name.replace("_", " ") for name, metric in METRICS.items()}
    columns = [name for name in names.values() if "conflicts" not in name]
    lines: dict[str, dict[str, str]] = {}
    reasons: dict[str, int] = {}
    for row in found:
        gpu, xray, name = row["hardware"], row["xray"], names.get(row["metric"], row["metric"])
        if gpu != xray:
            reason = row.get("reason") or "no reason known"
            reasons[reason] = reasons.get(reason, 0) + 1
        if row.get("dtype", dtype) == dtype:
            size = row["size"] if isinstance(row["size"], str) else " x ".join(map(str, row["size"]))
            line = lines.setdefault(f"stage {row['stage'].partition('_')[0]}, {size}", dict.fromkeys(columns, ""))
            line[name] = f"{gpu:,}" if gpu == xray else f"**{gpu:,}** ({xray:,})"
    rows = [(problem, *(line[name] for name in columns)) for problem, line in lines.items()]
    body = table((dtype, *columns), rows)
    total, equal = len(found), len(found) - sum(reasons.values())
    head = f"Nsight Compute on one {card}: {equal:,} of {total:,} counts are equal to the x-ray's."
    tail = "".join(f"\n- {count:,} differ, {reason}" for reason, count in reasons.items())
    return Shown(f"{head}\n\n{body.markdown}\n{tail}", f"{head}\n{body.plain}\n{tail}".rstrip())


# ---------------------------------------------------------------------------------------------------------------------
# Requests of the trace


def requests(report: Report, name: str, op: str | None = None, warp: int | None = None) -> list[Access]:
    """The requests of the trace that a tensor or shared array was asked for, in order.

    Raises:
        ValueError: The trace has none. Take the x-ray with `block=` to keep it.
    """
    found = [a for a in report.trace if a.name == name and op in (None, a.op) and warp in (None, a.warp)]
    if not found:
        raise ValueError(f"the trace has no request for {name!r}; take the x-ray with block=0, or block=-1 for all")
    return found


def sectors(access: Access) -> list[int]:
    """The sectors that a request touches, counted from the start of its tensor."""
    return sorted({offset // SECTOR for offset in access.offsets if offset >= 0})


def _who(access: Access) -> dict[int, list[int]]:
    """The lanes that ask for each word (of the access's own size), by the word's index."""
    lanes: dict[int, list[int]] = {}
    for lane, offset in enumerate(access.offsets):
        if offset >= 0:
            lanes.setdefault(offset // access.size, []).append(lane)
    return lanes


def threads(report: Report, name: str) -> Picture:
    """Every thread of a launch as a dot, a warp to a row; those that touch the tensor coloured by their block."""
    launch = report.launches[0]
    per_block = launch.threads // launch.blocks // 32
    image = np.ones((launch.blocks * per_block, 32, 3)) * EMPTY
    for access in requests(report, name):
        for lane, offset in enumerate(access.offsets):
            if offset >= 0:
                image[access.block * per_block + access.warp, lane] = BLOCKS[access.block % len(BLOCKS)]
    active = int((image != EMPTY).any(axis=2).sum())
    figure, axes = _figure(WIDTH * 0.75, 0.11 * len(image) + 0.95)
    _cells(axes, image, 0, 0, gap=True)
    for block in range(launch.blocks):
        axes.text(-0.8, (block + 0.5) * per_block, f"block {block}", ha="right", va="center", color=INK)
        if block:
            axes.axhline(block * per_block, color=INK, lw=1)
    _lane_axis(axes, len(image))
    words = f"{launch.threads:,} threads, a warp to a row: {active:,} touch {name}, {launch.threads - active:,} do not"
    axes.set_title(words, fontsize=10)
    axes.set(xlim=(-5.5, 32.2), ylim=(len(image) + 2.2, -0.3))
    return Picture(figure, words + ".")


def strips(chosen: Mapping[str, Access]) -> Picture:
    """Single requests: memory as a row of words, cut into sectors, each word with the lane that asks for it."""
    words, scale = [], 32 / max(sectors(a)[-1] - sectors(a)[0] + 1 for a in chosen.values())  # width of a sector
    figure, axes = _figure(WIDTH, 0.52 * len(chosen) + 0.15)
    for row, (label, access) in enumerate(chosen.items()):
        touched, per_sector = sectors(access), SECTOR // access.size
        first, span = touched[0], touched[-1] - touched[0] + 1
        y, unit = 2.0 * row, scale / per_sector
        image = np.ones((1, span * per_sector, 3)) * EMPTY
        for sector in touched:
            image[0, (sector - first) * per_sector : (sector - first + 1) * per_sector] = WASTE
        who = _who(access)
        for word, lanes in who.items():
            image[0, word - first * per_sector] = LANES[lanes[0]] if len(lanes) == 1 else SHARED
        axes.imshow(image, extent=(0, span * scale, y + 1, y), interpolation="nearest", zorder=1)
        edges = [((i * unit, y), (i * unit, y + 1)) for i in range(image.shape[1])]
        axes.add_collection(LineCollection(edges, color=PANEL))
        if unit > 0.6:
            for word, lanes in who.items():
                x, text = (word - first * per_sector + 0.5) * unit, str(lanes[0]) if len(lanes) == 1 else "all"
                white = len(lanes) > 1 or lanes[0] < 20
                axes.text(x, y + 0.5, text, ha="center", va="center", fontsize=8, color="w" if white else INK)
        for i in range(span):
            axes.add_patch(Rectangle((i * scale, y), scale, 1, fill=False, ec=INK, lw=1.4, zorder=3))
            if scale > 3:
                where, text = (i + 0.5) * scale, f"sector {first + i}"
                axes.text(where, y + 1.12, text, ha="center", va="top", fontsize=8, color=INK)
        axes.text(-0.4, y + 0.5, label, ha="right", va="center", color=INK)
        active = sum(offset >= 0 for offset in access.offsets)
        words.append(f"{label}: {active} lanes, {len(touched)} sector{'s' if len(touched) > 1 else ''}")
    axes.set(xlim=(-7.5, 32.2), ylim=(2 * len(chosen) - 0.2, -0.3))
    return Picture(figure, "; ".join(words) + ".")


# ---------------------------------------------------------------------------------------------------------------------
# Matrices of a product: A to the left of C, B above it, so that a row of A and a column of B meet in C


def product(panels: Mapping[str, Report], sizes: tuple[int, int, int], warp: int = 0, k: int = 0) -> Picture:
    """One request for each matrix, by one warp: whose words they are (lanes by colour), and what comes with them."""
    chosen = {
        title: {name: [requests(report, name, warp=warp)[0 if name == "c" else k]] for name in "abc"}
        for title, report in panels.items()
    }
    notes = {
        title: {
            name: f"{name.upper()}: {_plural(len(sectors(accesses[0])), 'sector')}" for name, accesses in now.items()
        }
        for title, now in chosen.items()
    }
    figure = _matrices(chosen, {}, notes, sizes, lambda access, lane: LANES[lane])
    handles = [
        *(Patch(color=LANES[lane], label=f"lane {lane}") for lane in (0, 16, 31)),
        Patch(color=SHARED, label="one word for several lanes"),
        Patch(color=WASTE, label="fetched with them, not used"),
    ]
    _legend(figure, handles)
    return Picture(figure, "; ".join(f"{title}: {', '.join(note.values())}" for title, note in notes.items()) + ".")


def steps(report: Report, sizes: tuple[int, int, int]) -> Picture:
    """What one block reads in each of its steps, coloured by the warp that fetches it, and the patch of C it owns."""
    seen: dict[tuple[str, int], int] = {}
    rounds: list[dict[str, list[Access]]] = []
    for access in report.trace:
        if access.name not in ("a", "b") or access.op != "load":
            continue
        step = seen[access.name, access.warp] = seen.get((access.name, access.warp), -1) + 1
        while len(rounds) <= step:
            rounds.append({"a": [], "b": []})
        rounds[step][access.name].append(access)
    own = requests(report, "c", "store")
    panels, before, notes = {}, {}, {}
    for i, now in enumerate(rounds):
        title = f"step {i}"
        panels[title] = {**now, "c": own}
        before[title] = {name: [a for past in rounds[:i] for a in past[name]] for name in "ab"}
        notes[title] = {
            name: f"{name.upper()}: {_plural(sum(len(sectors(a)) for a in now[name]), 'sector')}" for name in "ab"
        }
        notes[title]["c"] = "C"
    warps = 1 + max(access.warp for access in own)
    figure = _matrices(panels, before, notes, sizes, lambda access, lane: LANES[access.warp * 31 // max(warps - 1, 1)])
    handles = [
        *(Patch(color=LANES[w * 31 // (warps - 1)], label=f"warp {w}") for w in (0, warps // 2, warps - 1)),
        Patch(color=DONE, label="read in an earlier step"),
    ]
    _legend(figure, handles)
    return Picture(figure, "; ".join(f"{title}: {note['a']}, {note['b']}" for title, note in notes.items()) + ".")


def owners(report: Report, cols: int, name: str = "c", warp: int = 0, lane: int = 0, corner: int = 32) -> Picture:
    """Who stores each word of a matrix: by warp, and a corner of it by lane; the words of one thread stand out."""
    stores = requests(report, name, "store")
    warps, rows = 1 + max(a.warp for a in stores), 1 + max(max(a.offsets) // a.size // cols for a in stores)
    images = {"colour: warp": np.ones((rows, cols, 3)) * EMPTY, "colour: lane": np.ones((rows, cols, 3)) * EMPTY}
    own = []
    for access in stores:
        for word, lanes in _who(access).items():
            colours = [LANES[access.warp * 31 // max(warps - 1, 1)], LANES[lanes[0]]]
            if access.warp == warp and lane in lanes:
                own.append(word)
                colours = [SHARED] * 2
            for image, colour in zip(images.values(), colours, strict=True):
                image[divmod(word, cols)] = colour
    columns = sorted({word % cols for word in own})
    figure, axes = _figure(WIDTH, WIDTH / 2 * 0.92 + 0.5, 2)
    for ax, (colour, image), extent in zip(axes, images.items(), ((rows, cols), (corner, corner)), strict=True):
        _cells(ax, image[: extent[0], : extent[1]], 0, 0, gap=max(extent) <= 40)
        what = "the block's patch" if extent == (rows, cols) else f"its first {corner} rows and columns"
        ax.set_title(f"{what}; {colour}", fontsize=10)
        ax.set(xlim=(-0.01 * extent[1], 1.01 * extent[1]), ylim=(1.01 * extent[0], -0.01 * extent[0]))
    handles = [
        Patch(color=LANES[0], label="warp 0, lane 0"),
        Patch(color=LANES[31], label=f"warp {warps - 1}, lane 31"),
        Patch(color=SHARED, label=f"one thread: warp {warp}, lane {lane}"),
    ]
    _legend(figure, handles)
    words = f"Lane {lane} of warp {warp} owns {len(own)} words of {name.upper()}, in columns {_listed(columns)}"
    return Picture(figure, words + ".")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _matrices(
    panels: Mapping[str, Mapping[str, list[Access]]],
    before: Mapping[str, Mapping[str, list[Access]]],
    notes: Mapping[str, Mapping[str, str]],
    sizes: tuple[int, int, int],
    colour: Callable[[Access, int], tuple[float, float, float]],
) -> Figure:
    m, n, k = sizes
    gap = max(sizes) * 0.14
    places = {"a": (-k - gap, 0, m, k), "b": (0, -k - gap, k, n), "c": (0, 0, m, n)}
    height = min(WIDTH / len(panels), 4.6) * (k + m + 2 * gap) / (k + n + gap)
    figure, axes = _figure(WIDTH, height + 0.3, len(panels))
    for ax, (title, now) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        for name, (x, y, rows, cols) in places.items():
            image = np.ones((rows * cols, 3)) * EMPTY
            for access in before.get(title, {}).get(name, ()):
                for offset in access.offsets:
                    if offset >= 0:
                        image[offset // access.size] = DONE
            for access in now[name]:
                for sector in sectors(access):
                    image[sector * SECTOR // access.size : (sector + 1) * SECTOR // access.size] = WASTE
            for access in now[name]:
                for word, lanes in _who(access).items():
                    image[word] = colour(access, lanes[0]) if len(lanes) == 1 else SHARED
            _cells(ax, image.reshape(rows, cols, 3), x, y, gap=max(sizes) <= 40)
            per_sector = SECTOR // now[name][0].size
            edges = [((x + i, y), (x + i, y + rows)) for i in range(0, cols + 1, per_sector)]
            ax.add_collection(LineCollection(edges, color=FAINT, lw=0.8, zorder=3))
            ax.text(
                x + cols / 2, y + rows + gap * 0.12, notes[title][name], ha="center", va="top", color=INK, fontsize=9
            )
        ax.text(-k / 2 - gap, -k / 2 - gap, title, ha="center", va="center", color=INK, fontsize=11, fontweight="bold")
        ax.set(xlim=(-k - gap - 0.5, n + 0.5), ylim=(m + gap * 0.9, -k - gap - 0.5))
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# (Q K^T) V: which block computes which part of S, and when


def traffic(panels: Mapping[str, Report], names: Sequence[str]) -> Picture:
    """The bytes that each tensor moves, as bars, loads and stores apart; the panels share their scale."""
    moved: dict[str, dict[tuple[str, str], int]] = {title: {} for title in panels}
    for title, report in panels.items():
        for t in report.traffic("global"):
            key = (t.name, t.op.removeprefix("bulk_"))  # the copy engine's in with the threads' own
            moved[title][key] = moved[title].get(key, 0) + t.bytes_moved
    most = max(sum(amount for (name, _), amount in m.items() if name == n) for m in moved.values() for n in names)
    figure = Figure(figsize=(WIDTH, 0.34 * len(names) + 0.95), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    words = []
    for ax, (title, amounts) in zip(axes, moved.items(), strict=True):
        for row, name in enumerate(names):
            left = 0
            for op, colour in (("load", BLOCKS[0]), ("store", BLOCKS[1])):
                ax.barh(row, amounts.get((name, op), 0), 0.7, left=left, color=colour)
                left += amounts.get((name, op), 0)
            ax.text(left + most * 0.02, row, _bytes(left), va="center", color=INK, fontsize=9)
        parts = [f"{name} {_bytes(sum(amounts.get((name, op), 0) for op in ('load', 'store')))}" for name in names]
        words.append(f"{title}: {', '.join(parts)}")
        ax.set_title(title, fontsize=10, color=INK)
        ax.set(xlim=(0, most * 1.32), ylim=(len(names) - 0.5, -0.5), xticks=[], facecolor=PANEL)
        ax.set_yticks(range(len(names)), names, color=INK)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    _legend(figure, [Patch(color=BLOCKS[0], label="loaded"), Patch(color=BLOCKS[1], label="stored")])
    return Picture(figure, "; ".join(words) + ".")


def scores(panels: Mapping[str, Report], seq: int, by: str = "step") -> Picture:
    """Who computes each element of S, a row of it for each row of Q and a column for each key, or in which step.

    One head, and a trace of all blocks (`block=-1`): a block computes the elements whose row of q and whose row of k it
    loads; its steps are parted by its loads of v. Pale lines part the blocks.
    """
    images, words, most = {}, [], 1
    for title, report in panels.items():
        steps = _steps_of_s(report, seq)
        known = sorted({block for block, _ in steps.values()})
        most = max(most, 1 + max(step for _, step in steps.values()))
        images[title] = steps, known
        blocks = f"{_plural(len(known), 'block')}, {100 * len(steps) / seq**2:.3g} % of S"
        words.append(f"{title}: {blocks}")
    figure, axes = _figure(WIDTH, min(WIDTH / max(len(panels), 2), 4.2) + 0.5, len(panels))
    for ax, title, text in zip(np.atleast_1d(axes), images, words, strict=True):
        steps, known = images[title]
        image = np.ones((seq, seq, 3)) * EMPTY
        for (row, key), (block, step) in steps.items():
            if by == "block":
                shade = LANES[known.index(block) * 31 // max(len(known) - 1, 1)]
            else:
                shade = LANES[step * 31 // max(most - 1, 1)]
            image[row, key] = shade
        _cells(ax, image, 0, 0, gap=False)
        first = {block: (seq, seq) for block in known}  # row and key
        for (row, key), (block, _) in steps.items():
            first[block] = min(first[block][0], row), min(first[block][1], key)
        lines = [((0, y), (seq, y)) for y in {row for row, _ in first.values()} - {0}]
        lines += [((x, 0), (x, seq)) for x in {key for _, key in first.values()} - {0}]
        ax.add_collection(LineCollection(lines, color=PANEL, zorder=2))
        ax.set_title(text.replace(": ", "\n", 1), fontsize=10)
        ax.text(seq / 2, seq * 1.02, "keys j", ha="center", va="top", color=INK, fontsize=9)
        ax.text(-seq * 0.02, seq / 2, "rows t", ha="right", va="center", rotation=90, color=INK, fontsize=9)
        ax.set(xlim=(-seq * 0.06, seq * 1.01), ylim=(seq * 1.09, -seq * 0.01))
    last = len(images[max(images, key=lambda t: len(images[t][1]))][1]) if by == "block" else most
    shown = range(last) if last <= 6 else (0, last // 2, last - 1)
    handles = [Patch(color=LANES[i * 31 // max(last - 1, 1)], label=f"{by} {i}") for i in shown]
    if any(len(steps) < seq * seq for steps, _ in images.values()):
        handles.append(Patch(color=EMPTY, label="not computed"))
    _legend(figure, handles)
    return Picture(figure, "; ".join(words) + ".")


def _steps_of_s(report: Report, seq: int) -> dict[tuple[int, int], tuple[int, int]]:
    """For each (row, key) of S the block and the step that compute it."""
    rows: dict[int, set[int]] = {}
    keys: dict[int, dict[int, int]] = {}
    step: dict[int, int] = {}
    between: dict[int, bool] = {}
    for name in "qk":
        requests(report, name, "load")
    widths = {name: _width(report, name, seq) for name in "qk"}
    for access in report.trace:
        if access.op != "load" or access.name not in ("q", "k", "v"):
            continue
        if access.name == "v":
            between[access.block] = True
            continue
        touched = {offset // access.size // widths[access.name] for offset in access.offsets if offset >= 0}
        if access.name == "q":
            rows.setdefault(access.block, set()).update(touched)
            continue
        known = keys.setdefault(access.block, {})
        if touched - known.keys() and between.pop(access.block, False):
            step[access.block] = step.get(access.block, 0) + 1
        for key in touched:
            known.setdefault(key, step.get(access.block, 0))
    return {
        (row, key): (block, when) for block, seen in keys.items() for key, when in seen.items() for row in rows[block]
    }


def _width(report: Report, name: str, rows: int) -> int:
    """The columns of a tensor with so many rows, all of which the trace reads."""
    return (1 + max(max(a.offsets) // a.size for a in requests(report, name))) // rows


def weights(panels: Mapping[str, np.ndarray]) -> Picture:
    """What is left of each key in each row, numbers from 0 to 1: a row of a matrix for each row, a column for a key."""
    figure, axes = _figure(WIDTH, WIDTH / max(len(panels), 3) + 0.6, len(panels))
    shades, words = np.array([EMPTY, *LANES]), []
    for ax, (title, left) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        seq = len(left)
        image = np.ceil(np.clip(np.nan_to_num(left), 0, 1) * len(LANES) - 0.5).astype(int)
        _cells(ax, shades[image], 0, 0, gap=False)
        ax.set_title(title, fontsize=10)
        ax.text(seq / 2, seq * 1.02, "keys j", ha="center", va="top", color=INK, fontsize=9)
        ax.text(-seq * 0.02, seq / 2, "rows t", ha="right", va="center", rotation=90, color=INK, fontsize=9)
        ax.set(xlim=(-seq * 0.06, seq * 1.01), ylim=(seq * 1.09, -seq * 0.01))
        words.append(f"{title}: {(left >= 0.5).sum() / seq:.1f} keys a row have at least a half")
    marks = {"nothing": 0, "a quarter": len(LANES) // 4, "a half": len(LANES) // 2, "all": len(LANES)}
    _legend(figure, [Patch(color=shades[shade], label=label) for label, shade in marks.items()])
    return Picture(figure, "; ".join(words) + ".")


def stability(panels: Mapping[str, np.ndarray], extent: tuple[float, float, float, float]) -> Picture:
    """Where in the plane of z a state fades, |A_bar| < 1, the darker the faster; pale where it grows.

    Args:
        panels: |A_bar| at the middles of a grid's cells, a row for each imaginary part, the largest one first.
        extent: The grid's edges: least and largest real part, least and largest imaginary part.
    """
    left, right, low, high = extent
    figure, axes = _figure(WIDTH, WIDTH / len(panels) * (high - low) / (right - left) + 0.7, len(panels))
    shades, words = np.array([*LANES, EMPTY]), []
    for ax, (title, size) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        image = shades[np.clip(size * len(LANES), 0, len(LANES)).astype(int)]
        ax.imshow(image, extent=(left, right, low, high), interpolation="nearest", zorder=1)
        for line in (ax.axhline, ax.axvline):
            line(0, color=PANEL, lw=0.8, zorder=2)
        ax.set_title(title, fontsize=10)
        ax.text(
            (left + right) / 2, low, f"Re z from {left:g} to {right:g}", ha="center", va="top", color=INK, fontsize=8
        )
        real = left + (right - left) * (np.arange(size.shape[1]) + 0.5) / size.shape[1]
        parts = [f"{100 * (size[:, side] < 1).mean():.0f} %" for side in (real < 0, real > 0)]
        words.append(f"{title}: fades in {parts[0]} of the left half, {parts[1]} of the right")
    marks = {"|A_bar| near 0": LANES[0], "near 1": LANES[-1], "1 or more": EMPTY}
    _legend(figure, [Patch(color=colour, label=label) for label, colour in marks.items()])
    return Picture(figure, "; ".join(words) + ".")


def curves(panels: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]], log: bool = False) -> Picture:
    """Lines in one plot or several, {title: {name: (x, y)}}, the first of each dark; with `log`, both axes are so."""
    figure, axes = _figure(WIDTH, 3.4, len(panels))
    names, words = list(next(iter(panels.values()))), []
    shades = dict(zip(names, [INK, *(matplotlib.colormaps["tab10"](i) for i in range(len(names) - 1))], strict=True))
    for ax, (title, lines) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        ax.axis("on")
        ax.set_aspect("auto")
        ax.set_facecolor(PANEL)
        ax.tick_params(colors=INK, labelsize=8)
        ax.grid(color=EMPTY, lw=0.8)
        ax.set_title(title, fontsize=10)
        if log:
            ax.set(xscale="log", yscale="log")
        for name, (x, y) in lines.items():
            first = name == names[0]
            ax.plot(x, y, color=shades[name], lw=2.4 if first else 1.2, zorder=2 if first else 3)
        words.append(f"{title}: at the right " + ", ".join(f"{name} {y[-1]:.2g}" for name, (_, y) in lines.items()))
    _legend(figure, [Line2D([], [], color=colour, lw=2, label=name) for name, colour in shades.items()])
    return Picture(figure, "; ".join(words) + ".")


def writers(panels: Mapping[str, Report], name: str, cols: int) -> Picture:
    """How many blocks store to each word of a tensor: a colour for each block, dark where there are several."""
    images, words = {}, []
    for title, report in panels.items():
        who: dict[int, set[int]] = {}
        for access in requests(report, name, "store"):
            for word in _who(access):
                who.setdefault(word, set()).add(access.block)
        blocks = sorted(set().union(*who.values()))
        image = np.ones((1 + max(who), 3)) * EMPTY
        for word, several in who.items():
            (first, *more) = sorted(several)
            image[word] = SHARED if more else LANES[blocks.index(first) * 31 // max(len(blocks) - 1, 1)]
        images[title] = image.reshape(-1, cols, 3)
        most = max(map(len, who.values()))
        words.append(f"{title}: {_plural(len(blocks), 'block')}, {'1' if most == 1 else f'up to {most}'} for a word")
    rows = max(len(image) for image in images.values())
    figure, axes = _figure(WIDTH, min(WIDTH / len(panels) * rows / cols, 4.0) + 0.9, len(panels))
    for ax, image, text in zip(np.atleast_1d(axes), images.values(), words, strict=True):
        _cells(ax, image, 0, 0, gap=False)
        ax.set_title(text.replace(": ", "\n", 1), fontsize=10)
        ax.set(xlim=(-0.02 * cols, 1.02 * cols), ylim=(1.02 * len(image), -0.02 * len(image)))
    handles = [Patch(color=LANES[0], label="the first block"), Patch(color=LANES[31], label="the last block")]
    handles.append(Patch(color=SHARED, label="several blocks"))
    _legend(figure, handles)
    return Picture(figure, "; ".join(words) + ".")


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB"


# ---------------------------------------------------------------------------------------------------------------------
# Shared memory: a word lies in bank (address / 4) mod 32


def banks(panels: Mapping[str, Access], lanes: range = range(32)) -> Picture:
    """Single requests to shared memory: a row is 32 words of 4 bytes, a column is a bank, lanes by colour.

    With fewer lanes, what these ask for, and only the rows in which they do: a quarter of a warp is served at a time
    where a lane asks for 16 bytes, or gives ldmatrix the address of a row.
    """
    asked = {title: _words(access, lanes) for title, access in panels.items()}
    whole = len(lanes) == 32
    places = {title: sorted({word // 32 for word in who}) for title, who in asked.items()}  # rows of memory
    if whole:
        places = {title: list(range(max(32, rows[-1] + 1))) for title, rows in places.items()}
    height = max(map(len, places.values()))
    high = WIDTH / max(len(panels), 2) * 0.92 * (height + 3.5) / 35.5
    figure, axes = _figure(WIDTH, high + (0.5 if whole else 0.95), len(panels))
    if not whole:
        figure.get_layout_engine().set(h_pad=0.13)  # low axes leave their titles no room
    words = []
    for ax, (title, who) in zip(np.atleast_1d(axes), asked.items(), strict=True):
        image, depth = np.ones((height, 32, 3)) * EMPTY, [0] * 32
        for word, owners in who.items():
            colour = LANES[lanes.index(owners[0]) * 31 // (len(lanes) - 1)]
            image[places[title].index(word // 32), word % 32] = colour if len(owners) == 1 else SHARED
            depth[word % 32] += 1
        _cells(ax, image, 0, 0, gap=True)
        ax.text(16, height + 0.6, "bank 0 … 31", ha="center", va="top", color=INK, fontsize=9)
        busiest = f"{_plural(len(who), 'word')}, at most {max(depth)} in a bank: {_plural(max(depth), 'wavefront')}"
        ax.set_title(f"{title}\n{busiest}", fontsize=10)
        ax.set(xlim=(-0.5, 32.5), ylim=(height + (3 if whole else 1.6), -0.5))
        words.append(f"{title}: {busiest}")
    owners = [owners for who in asked.values() for owners in who.values()]
    handles = []
    if any(len(lanes) == 1 for lanes in owners):
        shown = [(0, lanes[0]), (16, lanes[len(lanes) // 2]), (31, lanes[-1])]
        handles += [Patch(color=LANES[shade], label=f"lane {lane}") for shade, lane in shown]
    if whole or any(len(lanes) > 1 for lanes in owners):
        handles.append(Patch(color=SHARED, label="one word for several lanes"))
    _legend(figure, handles)
    return Picture(figure, "; ".join(words) + ".")


def box(panels: Mapping[str, Sequence[Access]], chunk: int = 0) -> Picture:
    """Where the chunks of 16 bytes of the first 8 rows of a box lie, and what 8 of them below each other take.

    Args:
        panels: The requests that store the rows: lane l of request i has chunk 2 i + l / 16 of row l % 16.
        chunk: Which one is looked for in each row.
    """
    figure, axes = _figure(WIDTH, WIDTH / max(len(panels), 2) * 0.92 * 9.8 / 19 + 0.55, len(panels))
    figure.get_layout_engine().set(h_pad=0.15)  # low axes leave their titles no room
    words = []
    for ax, (title, stores) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        first = min(offset for access in stores for offset in access.offsets)
        image, places = np.ones((8, 8, 3)) * EMPTY, []
        for i, access in enumerate(stores):
            for lane, offset in enumerate(access.offsets):
                row, place = divmod((offset - first) // 16, 8)
                named = 2 * i + lane // 16
                if row >= 8:
                    continue
                if named == chunk:
                    image[row, place] = BLOCKS[0]
                    places.append((row, place))
                ax.text(
                    2 * place + 1, row + 0.5, str(named), ha="center", va="center", fontsize=9, zorder=4,
                    color="w" if named == chunk else INK,
                )  # fmt: skip
        _cells(ax, image.repeat(2, axis=1), 0, 0, gap=False)
        for row in range(8):
            ax.text(-0.3, row + 0.5, f"row {row}", ha="right", va="center", fontsize=8, color=INK)
        ax.text(8, 8.3, "bank 0 … 31", ha="center", va="top", color=INK, fontsize=9)
        lie = [place for _, place in sorted(places)]
        most = max(map(lie.count, lie))
        ax.set_title(f"{title}\nthe chunks {chunk}: {_plural(most, 'wavefront')}", fontsize=10)
        ax.set(xlim=(-2.8, 16.2), ylim=(9.6, -0.2))
        words.append(f"{title}: chunk {chunk} of rows 0 to 7 is at places {_listed(lie)}, {_plural(most, 'wavefront')}")
    return Picture(figure, "; ".join(words) + ".")


def wavefronts(access: Access) -> int:
    """What a request for words of 4 bytes takes: as many wavefronts as the busiest bank has words."""
    asked = [word % 32 for word in _words(access, range(32))]
    return max(map(asked.count, asked))


def _words(access: Access, lanes: Iterable[int]) -> dict[int, list[int]]:
    """The lanes that ask for each word of 4 bytes, by the word's index."""
    who: dict[int, list[int]] = {}
    for lane in lanes:
        first = access.offsets[lane] // 4
        for word in range(first, first + access.size // 4 if first >= 0 else first):
            who.setdefault(word, []).append(lane)
    return who


def lanes(panels: Mapping[str, tuple[Access, Access]]) -> Picture:
    """How the lanes of a warp are laid over its patch, from a request for rows of it and one for columns.

    Lanes side by side ask for the same rows, lanes below each other for the same columns.
    """
    figure, axes = _figure(WIDTH * 0.72, 3.1, len(panels))
    words = []
    for ax, (title, accesses) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        ys, xs = ([sorted(set(a.offsets)).index(offset) for offset in a.offsets] for a in accesses)
        high, wide = max(ys) + 1, max(xs) + 1
        image = np.ones((high, wide, 3)) * EMPTY
        for lane in range(32):
            image[ys[lane], xs[lane]] = BLOCKS[lane // 8]
            ax.text(xs[lane] + 0.5, ys[lane] + 0.5, str(lane), ha="center", va="center", fontsize=9, color="w")
        _cells(ax, image, 0, 0, gap=True)
        ax.set_aspect(0.45)
        ax.set_title(title, fontsize=10)
        ax.set(xlim=(-0.1, wide + 0.1), ylim=(high + 0.1, -0.1))
        right, below = (next(i for i in range(32) if (xs[i], ys[i]) == at) for at in ((1, 0), (0, 1)))
        words.append(f"{title}: {high} rows of {wide} lanes, right of lane 0 lane {right}, below it lane {below}")
    _legend(figure, [Patch(color=BLOCKS[i], label=f"lanes {8 * i} to {8 * i + 7}") for i in range(4)])
    return Picture(figure, "; ".join(words) + ".")


# ---------------------------------------------------------------------------------------------------------------------
# Pipelines: shared memory that holds one or several buffers, each filled and read in turn


def ring(panels: Mapping[str, tuple[Report, int]], warp: int = 0) -> Picture:
    """Into which buffer a warp brings words, and which it reads, request by request.

    Args:
        panels: A trace, and of how many buffers its shared memory is made.
        warp: Whose requests.
    """
    drawn = {title: _fills(report, count, warp) for title, (report, count) in panels.items()}
    figure = Figure(figsize=(WIDTH, 0.45 + sum(0.36 * count + 0.62 for _, count in panels.values())))
    figure.set_layout_engine("constrained")
    axes = np.atleast_1d(
        figure.subplots(len(panels), 1, gridspec_kw={"height_ratios": [count for _, count in panels.values()]})
    )
    words = []
    for ax, (title, (end, fills)) in zip(axes, drawn.items(), strict=True):
        count = panels[title][1]
        for n, fill in enumerate(fills):
            y, first_read = fill.buffer + 0.1, fill.first_read if fill.first_read is not None else end
            colour = BLOCKS[1] if fill.copied else SHARED
            bars = [(fill.start, fill.filled, colour), (fill.first_read, fill.last_read, BLOCKS[0])]
            if fill.copied:
                bars.insert(0, (fill.start, first_read, WASTE))
            for left, right, shade in bars:
                if left is not None:
                    ax.add_patch(Rectangle((left, y), right - left, 0.8, color=shade, lw=0))
            name = "zeros" if fill.zeros else str(n)
            for left, right, shade in ((fill.filled, first_read, INK), (fill.first_read, fill.last_read, "w")):
                if left is not None and right - left > end * 0.045:
                    ax.text((left + right) / 2, y + 0.4, name, ha="center", va="center", fontsize=9, color=shade)
        ahead = [
            sum(f.copied and f.start < fill.last_read and (f.first_read or end) >= fill.last_read for f in fills)
            for fill in fills
            if fill.first_read is not None and not fill.zeros
        ]
        most = max(ahead)
        most = f"up to {most}" if most else "none"
        what = f"{_plural(count, 'buffer')}; while one is read, {most} on the way"
        words.append(f"{title}: {what}")
        ax.set_title(f"{title}: {what}", fontsize=10, color=INK, loc="left")
        ax.set(xlim=(0, end), ylim=(count, 0), xticks=[], facecolor=EMPTY)
        ax.set_yticks([i + 0.5 for i in range(count)], [f"buffer {i}" for i in range(count)], color=INK, fontsize=9)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    axes[-1].set_xlabel(f"requests of warp {warp} to shared memory, in order →", color=INK, fontsize=9)
    shades = {"waited for, then stored": SHARED, "copies started": BLOCKS[1], "on the way": WASTE, "read": BLOCKS[0]}
    _legend(figure, [Patch(color=shade, label=label) for label, shade in shades.items()])
    return Picture(figure, "; ".join(words) + ".")


@dataclass
class _Fill:
    """A buffer from the first request that fills it to the last that reads it, as places in a warp's requests."""

    buffer: int
    start: int
    copied: bool
    filled: int = 0
    first_read: int | None = None
    last_read: int | None = None
    zeros: bool = True  # nothing was read from global memory for it


def _fills(report: Report, count: int, warp: int) -> tuple[int, list[_Fill]]:
    """How many requests to shared memory there are, and the fills of the buffers in order."""
    launch = report.launches[0]
    size = (launch.static_shared + launch.dynamic_shared) // count
    fills: list[_Fill] = []
    now: dict[int, _Fill] = {}
    x, fetched = 0, False
    for access in report.trace:
        if access.warp != warp or access.space == "global":
            fetched = access.warp == warp and access.op == "load"
            continue
        buffer = 0 if count == 1 else max(access.offsets) // size
        fill = now.get(buffer)
        if access.op != "load":
            if fill is None or fill.first_read is not None:
                fill = now[buffer] = _Fill(buffer, x, access.op == "copy")
                fills.append(fill)
            fill.filled = x + 1
            fill.zeros &= not fetched
        elif fill:
            fill.first_read = x if fill.first_read is None else fill.first_read
            fill.last_read = x + 1
        x, fetched = x + 1, False
    return x, fills


# ---------------------------------------------------------------------------------------------------------------------
# Scans: when a warp asks for which steps of time


def walk(
    panels: Mapping[str, Report],
    seq: int,
    channels: int,
    reads: str = "ab",
    writes: str = "h",
    itemsizes: Sequence[int] | None = None,
) -> Picture:
    """Which steps a warp asks for and which it stores, request by request: a column for each, a row for each step.

    Args:
        panels: Traces of one block, [B, T, D].
        seq, channels: T and D.
        reads, writes: The names of the tensors.
        itemsizes: Bytes of a number in each panel; 4 in all if left out.
    """
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained", facecolor=PANEL)
    axes = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    words = []
    itemsizes = itemsizes or [4] * len(panels)
    for ax, itemsize, (title, report) in zip(axes, itemsizes, panels.items(), strict=True):
        trace = [a for a in report.trace if a.space == "global" and a.warp == 0 and a.name in (*reads, *writes)]
        image = np.ones((seq, len(trace), 3)) * EMPTY
        asked, ahead = 0, set()
        for x, access in enumerate(trace):
            steps = {offset // (itemsize * channels) % seq for offset in access.offsets if offset >= 0}
            image[sorted(steps), x] = BLOCKS[access.op == "store"]
            if access.op == "load":
                asked = max(asked, *steps)
            elif asked < seq - 1:  # at the end there is nothing left to ask for
                ahead.add(asked - max(steps))
        ax.imshow(image, extent=(0, len(trace), seq, 0), aspect="auto", interpolation="nearest")
        most = max(ahead, default=0)
        ahead_of_it = f"up to {_plural(most, 'step')}" if most else "no step"
        what = f"{len(trace):,} requests, {ahead_of_it} ahead"
        words.append(f"{title}: {what}")
        ax.set_title(words[-1], fontsize=10, color=INK)
        ax.set_xlabel("requests of a warp to global memory, in order →", color=INK, fontsize=9)
        ax.set(xticks=[], facecolor=EMPTY)
        ax.tick_params(length=0, colors=INK, labelsize=9)
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("← time", color=INK, fontsize=9)
    handles = [Patch(color=BLOCKS[0], label=f"{' and '.join(reads)} asked for")]
    handles.append(Patch(color=BLOCKS[1], label=f"{' and '.join(writes)} stored"))
    _legend(figure, handles)
    return Picture(figure, "; ".join(words) + ".")


def joins(panels: Mapping[str, Report], array: str = "b_chunk", result: str = "h") -> Picture:
    """Which steps of time a parallel scan joins, and when: a column for each, a row for what waits for the one above.

    Args:
        panels: Traces of one block that scans one chunk, time last.
        array: The shared array in which the steps' values lie. A place is first written by the thread of its step.
        result: The tensor to which they go in the end.
    """
    flows = {title: _joins(report, array, result) for title, report in panels.items()}
    deepest = max(level for flow in flows.values() for _, _, level in flow)
    figure = Figure(figsize=(WIDTH, 0.38 * deepest + 1.1), layout="constrained", facecolor=PANEL)
    axes = np.atleast_1d(figure.subplots(1, len(flows), sharey=True))
    words = []
    for ax, (title, flow) in zip(axes, flows.items(), strict=True):
        seq, end = (1 + max(flow)[0], max(level for _, _, level in flow))
        ax.vlines(range(seq), 0, end, color=EMPTY, lw=1.2, zorder=1)
        older, newer = ({(a, b, level) for a, b, level in flow if (b - a) * sign > 0} for sign in (1, -1))
        for moved, colour in ((newer, BLOCKS[1]), (older, BLOCKS[0])):
            lines = [((start, level - 1), (to, level)) for start, to, level in sorted(moved)]
            ax.add_collection(LineCollection(lines, color=colour, lw=1.2, zorder=2))
        joined = sorted({(to, level) for _, to, level in older})
        ax.scatter(*zip(*joined, strict=True), s=14, color=BLOCKS[0], zorder=3)
        levels = {level for _, level in joined}
        words.append(f"{title}: {len(joined)} combines in {_plural(len(levels), 'round')}")
        ax.set_title(words[-1], fontsize=10, color=INK)
        ax.set(xlim=(-0.7, seq - 0.3), ylim=(deepest + 0.3, -0.3), yticks=[], facecolor=PANEL)
        ax.set_xticks(range(0, seq, max(1, seq // 16)))
        ax.xaxis.tick_top()
        ax.tick_params(length=0, colors=INK, labelsize=8)
        ax.spines[:].set_visible(False)
    handles = [Line2D([], [], color=BLOCKS[0], marker="o", ms=4, label="what is older, joined with what is newer")]
    if any(start > to for flow in flows.values() for start, to, _ in flow):
        handles.append(Line2D([], [], color=BLOCKS[1], label="a state, handed to the older half"))
    _legend(figure, handles)
    return Picture(figure, "; ".join(words) + ".")


def _joins(report: Report, array: str, result: str) -> list[tuple[int, int, int]]:
    """What went into each value that was written, as (its step, the value's step, the value's level).

    A value's level is one more than the deepest of what went into it.
    """
    holds: dict[int, tuple[int, int]] = {}  # a place of the array: the step and the level of its value
    newest: dict[int, int] = {}  # of each step, the level
    read: dict[int, set[tuple[int, int]]] = {}  # by each thread, before it wrote
    wrote: dict[int, set[int]] = {}  # by each thread, since it read
    flow = []
    for access in report.trace:
        if access.name not in (array, result):
            continue
        written = {}
        for lane, offset in enumerate(access.offsets):
            if offset < 0:
                continue
            place, thread = offset // access.size, 32 * access.warp + lane
            if access.op == "load":
                if wrote.pop(thread, None):
                    read[thread] = set()
                read.setdefault(thread, set()).add(holds[place])
                continue
            to = place if access.name == result else holds.get(place, (thread,))[0]
            if to in wrote.setdefault(thread, set()):  # it has read nothing since
                read[thread], wrote[thread] = set(), set()
            wrote[thread].add(to)
            before = read.get(thread, set()) | ({(to, newest[to])} if to in newest else set())
            level = 1 + max((level for _, level in before), default=-1)
            flow += [(step, to, level) for step, _ in sorted(before)]
            written[place] = to, level
        newest |= dict(written.values())
        if access.name == array:
            holds |= written
    return flow


def pieces(report: Report, seq: int, reads: str = "ab", writes: str = "h") -> Picture:
    """Which piece of time every warp of a block asks for and stores: a row for each request, a column for each step.

    Args:
        report: The trace of one block that has one channel, float32, [B, D, T] with D = 1.
        seq: T.
        reads, writes: The names of the tensors.
    """
    trace = [a for a in report.trace if a.space == "global" and a.name in (*reads, *writes)]
    warps = 1 + max(access.warp for access in trace)
    colours = [matplotlib.colormaps["viridis"](0.12 + 0.83 * warp / max(warps - 1, 1))[:3] for warp in range(warps)]
    image = np.ones((len(trace), seq, 3)) * EMPTY
    for y, access in enumerate(trace):
        for offset in (offset for offset in access.offsets if offset >= 0):
            steps = slice(offset // 4 % seq, offset // 4 % seq + access.size // 4)
            image[y, steps] = colours[access.warp] if access.op == "load" else BLOCKS[1]
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained", facecolor=PANEL)
    ax = figure.subplots()
    ax.imshow(image, extent=(0, seq, len(trace), 0), aspect="auto", interpolation="nearest")
    before = next(y for y, access in enumerate(trace) if access.op == "store")
    asked = max(max(a.offsets) // 4 % seq + a.size // 4 for a in trace[:before])
    words = f"{_plural(len(trace), 'request')} of {_plural(warps, 'warp')}; {asked:,} steps asked for before a store"
    ax.set_title(words, fontsize=10, color=INK)
    ax.set_xlabel("time →", color=INK, fontsize=9)
    ax.set_ylabel("← requests of a block to global memory, in order", color=INK, fontsize=9)
    ax.set(yticks=[], facecolor=EMPTY)
    ax.tick_params(length=0, colors=INK, labelsize=9)
    ax.spines[:].set_visible(False)
    handles = [Patch(color=colours[warp], label=f"warp {warp}") for warp in sorted({0, warps // 2, warps - 1})]
    _legend(figure, [*handles, Patch(color=BLOCKS[1], label=f"{' and '.join(writes)} stored")])
    return Picture(figure, words + ".")


def look_back(panels: Mapping[str, Report], tiles: int) -> Picture:
    """At which tiles before it each tile of a chain looks, and whether it has to look again: a row for each that looks.

    Args:
        panels: Traces of all blocks, of a problem that is one strip of channels, [1, T, 32] in float32.
        tiles: How many there are.
    """
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained", facecolor=PANEL)
    axes = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    line, lanes = 16, 32  # words of 8 bytes: before what is told, and of a tile for each of a and b
    words = []
    for ax, (title, report) in zip(axes, panels.items(), strict=True):
        looks, tile_of = np.zeros((tiles, tiles)), {}
        trace = [a for a in report.trace if a.space == "global" and a.name == "words" and a.op != "atomic"]
        for access in sorted(trace, key=lambda a: a.op, reverse=True):  # stores first: whose block is it
            asked = [o // 8 - line for o in access.offsets if o >= 0]
            tile, what = divmod(asked[0] // lanes, 2)
            if access.op == "store":
                tile_of[access.block] = tile
            elif what == 1:  # b, which is looked at whatever a is; the last tile tells nothing
                looks[tile_of.get(access.block, tiles - 1), tile] += len(asked) / lanes
        image = np.ones((tiles, tiles, 3)) * EMPTY
        image[looks > 0], image[looks > 1] = BLOCKS[1], BLOCKS[0]
        image[np.eye(tiles, dtype=bool)] = to_rgb(FAINT)
        ax.imshow(image, interpolation="nearest")
        again = int((looks > 1).any(1).sum())
        words.append(f"{title}: {again if again else 'none'} of {tiles} look again")
        ax.set_title(words[-1], fontsize=10, color=INK)
        ax.set_xlabel("tiles of time, first to last →", color=INK, fontsize=9)
        ax.set(xticks=[], yticks=[], facecolor=EMPTY)
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("← who looks back", color=INK, fontsize=9)
    handles = [Patch(color=BLOCKS[1], label="looked at once"), Patch(color=BLOCKS[0], label="more than once")]
    _legend(figure, [*handles, Patch(color=FAINT, label="the tile itself")])
    return Picture(figure, "; ".join(words) + ".")


def handed_out(panels: Mapping[str, object], lane: int = 9, warp: int = 2) -> Picture:
    """Which thread holds which word of a tile of [steps, channels] in what Triton has compiled: a colour for each warp.

    Args:
        panels: Kernels as `lab.Kernel.compiled` gives them. A tile of one channel is drawn in rows of steps.
        lane, warp: A thread whose words are marked.
    """
    figure, axes = _figure(WIDTH, 4.9, len(panels))
    words = []
    for ax, (title, kernel) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        layout = triton_kernels.layout(kernel)
        owners = layout.owners()  # of [steps, channels]: warp and lane
        steps, channels = owners.shape[:2]
        own = (owners == (warp, lane)).all(-1)
        of_steps, of_channels = own.any(1).sum(), own.any(0).sum()
        if channels == 1:
            owners = owners.reshape(max(steps // 32, 1), -1, 2)
            own = own.reshape(owners.shape[:2])
        shade = 0.35 + 0.65 * owners[..., 1:] / 31
        image = shade * np.array(BLOCKS)[owners[..., 0] % len(BLOCKS)] + (1 - shade)
        image[own] = SHARED
        _cells(ax, image, 0, 0, gap=True)
        rows, cols = image.shape[:2]
        along, down = ("steps →", "← rows of steps") if channels == 1 else ("channels →", "← steps")
        ax.text(cols / 2, rows + 0.5, along, ha="center", va="top", color=INK, fontsize=9)
        ax.text(-0.5, rows / 2, down, ha="right", va="center", color=INK, fontsize=9, rotation=90)
        ax.set(xlim=(-2.5, cols + 0.5), ylim=(rows + 2.5, -0.5))
        ax.set_title(f"{title}: {steps:,} × {channels}", fontsize=10)
        words.append(f"{title}: {_plural(of_steps, 'step')} of {_plural(of_channels, 'channel')}")
    handles = [Patch(color=colour, label=f"warp {i}") for i, colour in enumerate(BLOCKS)]
    _legend(figure, [*handles, Patch(color=SHARED, label=f"lane {lane} of warp {warp}")])
    return Picture(figure, f"What lane {lane} of warp {warp} holds of a tile; {'; '.join(words)}.")


# ---------------------------------------------------------------------------------------------------------------------
# Tensor cores


def fragments(report: Report, k: int, n: int, warp: int = 0, lane: int = 0) -> Picture:
    """Which lane holds what of the first A, 16 x 16, and B, 16 x 8, that a warp multiplies, and of C, 16 x 8.

    Of A and B it is the rows that ldmatrix was given, spread over the lanes as common/mma.h says, each place of shared
    memory standing for what was copied there; of C it is what the lanes store. One lane stands out.

    Args:
        report: The trace of a kernel for 16 bits, A and B row-major.
        k: The columns of A.
        n: The columns of B and C.
    """
    held = _held(report, k, n, warp)
    gap = 2.4
    places = {"a": (0, 16 + gap, 16, 16), "b": (16 + gap, 0, 16, 8), "c": (16 + gap, 16 + gap, 16, 8)}
    figure, ax = _figure(WIDTH * 0.66, WIDTH * 0.66 * 1.22)
    words = []
    for name, (x, y, rows, cols) in places.items():
        inside = {at: who for at, who in held[name].items() if at[0] < rows and at[1] < cols}
        image = np.ones((rows, cols, 3)) * EMPTY
        for at, (owner, _) in inside.items():
            image[at] = LANES[owner]
        _cells(ax, image, x, y, gap=False)
        pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for at, who in sorted(inside.items()):
            pairs.setdefault(who, []).append(at)
        own = []
        for (owner, _), ((row, col), (last_row, last_col)) in pairs.items():
            wide, high = last_col - col + 1, last_row - row + 1
            mine = owner == lane
            style = dict(fill=False, ec=INK if mine else PANEL, lw=2.2 if mine else 0.5, zorder=5 if mine else 2)
            ax.add_patch(Rectangle((x + col, y + row), wide, high, **style))
            style = dict(ha="center", va="center", fontsize=7.5, color="w" if owner < 20 else INK, zorder=6)
            ax.text(x + col + wide / 2, y + row + high / 2, str(owner), **style)
            if mine:
                span = f"[{row}][{col}..{last_col}]" if wide == 2 else f"[{row}..{last_row}][{col}]"
                own.append(name.upper() + span)
        for row in range(0, rows, 8):
            for col in range(0, cols, 8):
                ax.add_patch(Rectangle((x + col, y + row), 8, 8, fill=False, ec=INK, lw=1, zorder=4))
                _, register = inside[row, col]
                text = f"d[{2 * register}]\nd[{2 * register + 1}]" if name == "c" else f"{name}[{register}]"
                if name == "a":
                    where, align = (x + col + 4, y - 0.3 if row == 0 else y + rows + 0.3), ("center", "bottom")
                    align = align if row == 0 else ("center", "top")
                else:
                    where, align = (x + cols + 0.4, y + row + 4), ("left", "center")
                ax.text(*where, text, ha=align[0], va=align[1], fontsize=9, color=INK)
        words.append(f"{', '.join(own)}")
    text = f"one mma.sync: C += A B\n\na number: the lane that\nholds these two elements\n\nframed: lane {lane}"
    ax.text(8, 8, text, ha="center", va="center", fontsize=10, color=INK)
    ax.set(xlim=(-0.3, 16 + gap + 8 + 2.6), ylim=(32 + gap + 1.6, -0.3))
    return Picture(figure, f"Lane {lane} holds " + "; ".join(words) + ".")


def _held(report: Report, k: int, n: int, warp: int) -> dict[str, dict[tuple[int, int], tuple[int, int]]]:
    """Of each matrix the lane and its register, or pair of sums, for (row, column)."""
    origin: dict[int, tuple[str, int]] = {}  # of 16 bytes of shared memory: a tensor, and bytes into it
    results: dict[int, int] = {}  # of 16 bytes of shared memory: where in C they go
    held: dict[str, dict[tuple[int, int], tuple[int, int]]] = {"a": {}, "b": {}, "c": {}}
    last, stores = None, []
    for access in report.trace:
        if access.op == "copy" and last and last.op == "load":
            for to, start in zip(access.offsets, last.offsets, strict=True):
                origin.setdefault(to, (last.name, start))
        elif access.warp == warp and access.name == "c" and last:
            results.update(zip(last.offsets, access.offsets, strict=True))
        elif access.warp == warp and access.space == "shared" and access.op == "store":
            stores.append(access)
        elif access.warp == warp and "load_matrices" in access.line.text:
            name, _ = origin.get(access.offsets[0], ("c", 0))  # past the end of K only zeros are read
            if name in "ab" and not held[name]:
                held[name] = _spread(access, origin, k if name == "a" else n)
        last = access
    for access in stores:
        for lane, offset in enumerate(access.offsets):
            row, col = divmod((results[offset // 16 * 16] + offset % 16) // 2, n)
            for i in range(access.size // 2):
                held["c"][row, col + i] = lane, row // 8 % 2
    return held


def _spread(access: Access, origin: Mapping[int, tuple[str, int]], cols: int) -> dict[tuple[int, int], tuple[int, int]]:
    """ldmatrix: the lane and the register that get the elements of each (row, column)."""
    held = {}
    for lane in range(32):
        for register in range(4):
            for i in range(2):
                row, element = lane // 4, lane % 4 * 2 + i
                if "transposed" in access.line.text:
                    row, element = element, row
                _, start = origin[access.offsets[register * 8 + row]]
                held[divmod(start // 2 + element, cols)] = lane, register
    return held


# ---------------------------------------------------------------------------------------------------------------------


def _figure(width: float, height: float, panels: int = 1):
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, panels)
    figure.get_layout_engine().set(w_pad=0.08, wspace=0.04)
    for ax in np.atleast_1d(axes):
        ax.axis("off")
        ax.set_aspect("equal")
        ax.title.set_color(INK)
    return figure, axes


def _cells(ax, image: np.ndarray, x: float, y: float, gap: bool) -> None:
    """A matrix of colours with its upper left corner at (x, y), a unit a cell."""
    rows, cols = image.shape[:2]
    ax.imshow(image, extent=(x, x + cols, y + rows, y), interpolation="nearest", zorder=1)
    if gap:
        lines = [((x + i, y), (x + i, y + rows)) for i in range(1, cols)]
        lines += [((x, y + i), (x + cols, y + i)) for i in range(1, rows)]
        ax.add_collection(LineCollection(lines, color=PANEL, lw=0.5, zorder=2))
    ax.add_patch(Rectangle((x, y), cols, rows, fill=False, ec=FAINT, lw=0.8, zorder=3))


def _lane_axis(ax, y: float) -> None:
    for lane in (0, 8, 16, 24, 31):
        ax.text(lane + 0.5, y + 0.4, f"lane {lane}", ha="center", va="top", fontsize=8, color=INK)


def _legend(figure: Figure, handles: list[Patch]) -> None:
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, labelcolor=INK, fontsize=9
    )


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"
