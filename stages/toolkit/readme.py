"""The parts of README.md that are computed: tables, figures, an excerpt of the x-ray, the picture.

    python -m stages.toolkit.readme            write them
    python -m stages.toolkit.readme --check    only say what is out of date; exit code 1 if anything is

They stand between <!-- NAME:begin --> and <!-- NAME:end --> and come from the stages' declarations, from the x-ray, and
from the records in stages/measured. The picture is written but not compared: its words are, which say the same.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from stages.toolkit import build, lab
from stages.toolkit.errors import NotAvailable
from stages.toolkit.report import SECTOR
from stages.toolkit.stage import load, names

README = build.ROOT / "README.md"
PICTURE = "notebooks/readme.png"
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
        options = stage.options()[0]
        counts, least = stage.cost(**sizes, itemsize=4, **options), stage.family.work(sizes, 4, **options).bytes
        moved = SECTOR * (counts.load_sectors + counts.store_sectors)
        problem = times_sign(sizes.values())
        link = f"[{stage.operator}](stages/{stage.name}/kernel.cu)"
        book = f"[notebook](notebooks/{stage.name}.ipynb)"
        rows.append((stage.number, link, stage.lesson, problem, size_of(moved), f"{moved / least:.3g}", book))
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
    """The times on a GPU beside what a user would call instead, and how the counts compare with the hardware's."""
    return f"{times()}\n\n{comparison()}"


def times() -> str:
    record = measured("bench")
    if record is None:
        return (
            "**Not measured yet.** No times on a GPU have been recorded for this version. On a machine with one, "
            "`python -m stages.toolkit.measure --out stages/measured` takes them."
        )
    rows = [
        (
            r["stage"],
            ", ".join([times_sign(r["sizes"].values()), *(f"{n}={v}" for n, v in r.get("options", {}).items())]),
            r["dtype"],
            f"{r['ms']:.4g}",
            f"{r['incumbent_ms']:.4g}",
            f"{r['percent_of_limit']:.3g} % of {r['limit']}",
        )
        for r in record["records"]
    ]
    ours = "; ".join(
        f"{stage} beside `{incumbent}`"
        for stage, incumbent in {_family(r): r["incumbent"] for r in record["records"]}.items()
    )
    head = (
        f"Medians on one {record['card']}, driver {record['driver']}, torch {record['torch']}, {record['date']}; "
        f"float32 without TF32. {ours[0].upper()}{ours[1:]}. The last column says how near a stage comes to what the "
        "card gave in the same run, in copying or in multiplying."
    )
    return head + "\n\n" + markdown(("stage", "problem", "dtype", "ms", "incumbent, ms", "of the card"), rows, "<<<>>>")


def _family(r: dict[str, Any]) -> str:
    return load(r["stage"]).family.NAME


def comparison() -> str:
    record = measured("nsight")
    if record is None:
        return "**Not compared yet.** The x-ray's counts have not been set beside Nsight Compute's for this version."
    rows = record["rows"]
    equal = [r for r in rows if r["hardware"] == r["xray"]]
    memory = [r for r in rows if not r["count"].startswith("shared")]
    same = all(r["hardware"] == r["xray"] for r in memory)
    text = (
        f"The x-ray's counts beside those of Nsight Compute {record['ncu']} on one {record['card']}: {len(equal):,} of "
        f"{len(rows):,} are equal, {'all' if same else '**not all**'} {len(memory):,} requests and sectors of global "
        "memory among them."
    )
    reasons = [r["reason"] or "not explained yet" for r in rows if r["hardware"] != r["xray"]]
    return text + "".join(f"\n- {reasons.count(why)} in shared memory: {why}" for why in dict.fromkeys(reasons))


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
    report = stage.xray(*stage.family.make(stage.sizes(stage.family.XRAY), torch.float32))
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
        (build.ROOT / PICTURE).write_bytes(draw().png)
    except (OSError, ValueError, NotAvailable, build.BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"README.md: {'as before' if old == new else 'written'}; {PICTURE}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
