"""The parts of README.md that are computed: tables, figures, an excerpt of the x-ray, the picture.

    python -m stages.toolkit.readme            write them
    python -m stages.toolkit.readme --check    only say what is out of date; exit code 1 if anything is

They stand between <!-- NAME:begin --> and <!-- NAME:end --> and come from the stages' declarations, from the x-ray, and
from the records in stages/measured. Pictures are written but not compared: their words are, which say the same.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from stages.toolkit import accuracy, build, chapter, lab, machines, nsight
from stages.toolkit.errors import NotAvailable
from stages.toolkit.report import SECTOR
from stages.toolkit.stage import load, names

README = build.ROOT / "README.md"
PICTURE = "notebooks/readme.png"
PLOT = "notebooks/chapter_{}.png"
MEASURED = build.PACKAGE / "measured"
BUSY = 0.5  # processes beside the measurement; more, and its figures are too high
LAST_BARRIER = "    __syncthreads();  // everyone has read before the next step overwrites\n"


def measured(name: str) -> dict[str, Any] | None:
    """A record of stages/measured, or None if that has not been measured yet."""
    path = MEASURED / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """A table; align has a < or > for each column."""
    lines = [header, [{"<": ":--", ">": "--:"}[a] for a in align], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def quote(text: str) -> str:
    return f"```text\n{text}\n```"


# ---------------------------------------------------------------------------------------------------------------------
# The parts


def stages_table() -> str:
    """Every stage: what it teaches, and what it moves through memory beside what any kernel would have to."""
    rows = []
    for stage in map(load, names()):
        sizes = stage.sizes(stage.bench["cpu"][0])
        options, itemsize = stage.options()[0], stage.dtype.itemsize
        link = f"[{stage.operator}](stages/{stage.name}/{stage.source.name})"
        book = f"[notebook](notebooks/{stage.name}.ipynb)"
        counted = (chapter.MISSING,) * 3  # of a kernel in Triton, or where numbers count
        if stage.cost:
            counts = stage.cost(**sizes, itemsize=itemsize, **options)
            least = stage.family.work(sizes, itemsize, **options).bytes
            moved = SECTOR * (counts.sectors_read + counts.sectors_written)
            problem = times_sign(sizes.values())
            if stage.dtype is not torch.float32:
                problem += f", {str(stage.dtype).removeprefix('torch.')}"
            counted = (problem, size_of(moved), f"{moved / least:.3g}")
        rows.append((stage.number, link, stage.lesson, *counted, book))
    header = ("", "stage", "what it teaches", "problem, float32", "bytes moved", "times the least", "")
    return markdown(header, rows, "<<<>>><")


def times_sign(sizes: Iterable[int]) -> str:
    return "×".join(f"{size:,}" for size in sizes)  # without blanks, so that a narrow column does not break it


def size_of(count: float) -> str:
    """A number of bytes in a unit that suits it."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def figures() -> str:
    """What was measured on a GPU, chapter by chapter, and how the counts compare with the hardware's.

    Each table, sentence and plot is of one machine, and names it.
    """
    chapters = all_chapters()
    parts = [chapter.markdown(c) + plot(c) for c in chapters if c.records and len(c.stages) > 1]
    parts += [one_stage(c) for c in chapters if c.records and len(c.stages) == 1]
    if missing := [n for n in chapter.numbers() if not any(c.records for c in chapters if c.number == n)]:
        parts.append(f"Chapter {', '.join(missing)}: {chapter.NOT_MEASURED}")
    return "\n\n".join([*parts, comparison()])


def all_chapters() -> list[chapter.Chapter]:
    recorded = machines.read(MEASURED / "bench.json")
    return [part for number in chapter.numbers() for part in chapter.parts(number, recorded)]


def plot(c: chapter.Chapter) -> str:
    shown = chapter.plot(c)
    return f"\n\n![{shown.words}]({PLOT.format(c.number)})" if shown else ""


def plots() -> dict[str, Any]:
    """The plots that `figures` shows, by their files."""
    drawn = {PLOT.format(c.number): chapter.plot(c) for c in all_chapters() if len(c.stages) > 1}
    return {path: shown for path, shown in drawn.items() if shown}


def one_stage(c: chapter.Chapter) -> str:
    """A family that is one stage in its chapter, as a sentence: its largest problem."""
    parts = [_beside(row.dtype, row.records[-1]) for row in c.rows if row.records[-1]]
    what = f"{c.stages[0].name} at {times_sign(c.sizes[-1])} beside `{c.stages[0].family.INCUMBENT}`"
    return f"{what}, on one {c.machine['card']}, {c.date}: {'; '.join(parts)}."


def _beside(dtype: str, r: Mapping[str, Any]) -> str:
    limit = f"{r['percent_of_limit']:.3g} % of what the card gave in {chapter.LIMITS[r['limit']]}"
    text = f"{dtype} {r['ms']:.4g} ms against {r['incumbent_ms']:.4g} ms, {limit}"
    if "both_ms" in r:
        text += f", with the backward {r['both_ms']:.4g} ms against {r['incumbent_both_ms']:.4g} ms"
    return text


def comparison() -> str:
    """How the x-ray's counts compare with a GPU's, machine by machine; of several with the stages of each."""
    found = nsight.read(MEASURED / "nsight.json")
    if not found:
        return "**Not compared yet.** The x-ray's counts have not been set beside Nsight Compute's for this version."
    return "\n\n".join(_compared(machine, len(found) > 1) for machine in found)


def _compared(machine: Mapping[str, Any], several: bool) -> str:
    rows = machine["rows"]
    equal = [r for r in rows if r["hardware"] == r["xray"]]
    memory = [r for r in rows if not r["count"].startswith("shared")]
    same = sum(r["hardware"] == r["xray"] for r in memory)
    share = "all" if same == len(memory) else f"{same:,} of"
    numbers = dict.fromkeys(r["stage"].partition("_")[0] for r in rows)
    stages = f", stage{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}" if several else ""
    text = (
        f"The x-ray's counts beside those of Nsight Compute {machine['ncu']} on one {machine['card']}{stages}: "
        f"{len(equal):,} of {len(rows):,} are equal, {share} {len(memory):,} requests and sectors of global "
        "memory among them."
    )
    reasons = [r["reason"] or "not explained yet" for r in rows if r["hardware"] != r["xray"]]
    return text + "".join(f"\n- {reasons.count(why)}: {why}" for why in dict.fromkeys(reasons))


def accuracy_table() -> str:
    """How far the stages' results are from float64 after many steps."""
    record = measured("accuracy")
    if record is None:
        return "**Not measured yet.** `python -m stages accuracy --record`"
    header, rows = accuracy.rows({name: own["entries"] for name, own in record["stages"].items()})
    rows = [[name.replace(" ", chapter.NO_BREAK), *line] for name, *line in rows]
    family = accuracy.stages()[0].family
    return (
        f"{family.LONG}. |x - ref| / |ref| over all channels, ref in float64; {record['device']} on "
        f"{record['processor']}, {record['compiler']}, {record['date']}.\n\n"
    ) + markdown(header, rows, "<<" + ">" * (len(header) - 2))


def device_cost() -> str:
    """What the CPU device costs beside plain loops."""
    record = measured("cpu_device")
    if record is None:
        return "**Not measured yet.** `python -m stages.toolkit.device_cost --json stages/measured/cpu_device.json`"
    ms, cores = record["ms"], record["workers"]
    kinds = {"plain loops": "{}_plain_{}", "the CPU device": "{}_{}", "under the x-ray": "{}_xray_{}"}
    rows = [
        (title, kind, *(f"{ms[pattern.format(name, n)]:.3g}" for n in cores))
        for name, title in (("naive", "a thread for each output"), ("tiled", "through shared memory"))
        for kind, pattern in kinds.items()
    ]
    header = ("256×256×256, float32, blocks of 16×16", "ms", *(f"{n} core{'s' if n > 1 else ''}" for n in cores))
    text = (
        f"On {record['cpu']}, {record['compiler']}, {record['date']}. A thread costs {record['ns_thread']:.0f} ns, "
        f"its first barrier {record['ns_first_barrier']:.0f} ns, each further one {record['ns_barrier']:.0f} ns."
    )
    if record["load"] > BUSY:
        text += f" *The machine was busy with other work (load {record['load']}): these figures are too high.*"
    return text + "\n\n" + markdown(header, rows, "<<" + ">" * len(cores))


def xray_excerpt() -> str:
    """What the x-ray says of stage 10, and of stage 12 without its second barrier."""
    stage = load("10")
    report = stage.xray(*stage.family.make(stage.sizes(stage.xray_sizes), stage.dtype))
    lines = next(part for part in report.text().split("\n\n") if part.startswith("Global memory: "))
    broken = lab.change("12", {LAST_BARRIER: ""})
    race = re.split(r"^- ", lab.faults(broken.xray(32, 32, 64)), flags=re.MULTILINE)[1].rstrip()
    return "\n\n".join(
        (
            quote(f"$ python -m stages xray 10\n...\n{lines}"),
            "Each request of `a` fetches 32 sectors to use 4 bytes of each: that is what stage 11 changes. And this\n"
            "is what it answers when the second `__syncthreads()` of stage 12 is taken out:",
            quote(race),
        )
    )


def picture() -> str:
    """The picture, as a line of Markdown whose words are what it shows."""
    return f"![{draw().words}]({PICTURE})"


def draw() -> Any:
    try:
        from stages.toolkit import picture
    except ImportError:
        raise NotAvailable("the picture needs matplotlib: pip install -e '.[notebooks]'") from None
    panels = {f"stage {number}": lab.kernel(number).xray(32, 32, 32, block=-1) for number in ("10", "11")}
    return picture.product(panels, (32, 32, 32), warp=3, k=9)


PARTS: dict[str, Callable[[], str]] = {
    "picture": picture,
    "stages": stages_table,
    "xray": xray_excerpt,
    "figures": figures,
    "accuracy": accuracy_table,
    "cpu-device": device_cost,
}

# ---------------------------------------------------------------------------------------------------------------------


def refreshed(text: str) -> str:
    """The text of the README with all its parts computed anew.

    Raises:
        ValueError: A part's marks are missing.
    """
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"README.md has no {begin} ... {end}")
        text = f"{head}{begin}\n{part()}\n{end}{tail}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.toolkit.readme", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say what would change")
    options = parser.parse_args(arguments)
    try:
        old = README.read_text(encoding="utf-8")
        new = refreshed(old)
        if options.check:
            lines = (text.splitlines() for text in (old, new))
            print("\n".join(difflib.unified_diff(*lines, "README.md", "README.md, computed anew", lineterm="", n=1)))
            return int(old != new)
        README.write_text(new, encoding="utf-8")
        pictures = {PICTURE: draw(), **plots()}
        for path, shown in pictures.items():
            (build.ROOT / path).write_bytes(shown.png)
    except (OSError, ValueError, NotAvailable, build.BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"README.md: {'as before' if old == new else 'written'}; {', '.join(pictures)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
