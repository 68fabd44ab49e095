"""The x-ray: every access to memory that kernels make on the CPU device, counted as a GPU would count it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from stages.toolkit import kernels, symbols
from stages.toolkit.report import Access, Counts, Fault, Launch, Report, Site
from stages.toolkit.symbols import Line

__all__ = ["SCHEDULES", "Access", "Counts", "Fault", "Launch", "Line", "Report", "Site", "recording"]

SCHEDULES = ("forward", "reverse", "random")
COUNTS = ("requests", "sectors", "wavefronts", "conflicts", "lanes", "bytes")


@contextmanager
def recording(
    schedule: str = "forward", seed: int = 0, trace: int = 0, trace_block: int = -1, workers: int = 1
) -> Iterator[Report]:
    """Run the CPU operators called inside on their instrumented modules, and report what they did.

    The whole process records, one recording at a time. Results are those of an ordinary call.

    Args:
        schedule: The order in which blocks and threads run: "forward", "reverse" or "random".
        seed: Picks the order of a random schedule.
        trace: How many single requests to keep, for drawing.
        trace_block: The block to keep them from, by its linear index; -1 for all.
        workers: How many cores share the blocks, 0 for all. The counts do not depend on it; with one, neither does
            which of several blocks in a race is named first.

    Yields:
        The report, filled when the block ends, also when it ends in an exception.

    Raises:
        ValueError: The schedule is none of the three.
        RuntimeError: A recording is on already.

    Example:
        >>> import stages, torch
        >>> from stages.toolkit import xray
        >>> x = torch.ones(256)
        >>> with xray.recording() as report:
        ...     out = stages.load("axpy").axpy(2.0, x, x)
        >>> report.counts().load_sectors  # 2 tensors of 1024 bytes, 32 bytes a sector
        64
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; allowed: {', '.join(SCHEDULES)}")
    if kernels.recorder is not None:
        raise RuntimeError("the x-ray is already recording; recordings cannot be nested")
    report = Report(schedule, seed)
    calls: list[_Call] = []

    def recorder(stage: kernels.Kernels, function: str, arguments: tuple[object, ...]) -> None:
        module = stage.module("xray")
        left = trace - sum(len(call.raw["trace"]) for call in calls)
        module.configure(schedule=schedule, seed=seed, workers=workers)
        module.xray_start(trace=left, trace_block=trace_block)
        try:
            kernels.call(module, function, arguments)
        finally:
            calls.append(_Call(stage.name, module, kernels.tensor_names(module, function), module.xray_stop()))
            module.configure()

    kernels.recorder = recorder
    try:
        yield report
    finally:
        kernels.recorder = None
        _fill(report, calls)


class _Call(NamedTuple):
    """One call of a launcher, and what its module recorded."""

    stage: str
    module: ModuleType
    tensors: list[str]
    raw: dict[str, Any]

    def name(self, record: Mapping[str, Any]) -> str:
        """The shared array or the tensor that a record is about, as the source calls it."""
        return record["shared"] or (self.tensors[record["tensor"]] if record["tensor"] >= 0 else "")


def _fill(report: Report, calls: list[_Call]) -> None:
    """Put what the modules recorded into the report, with names and lines."""
    lines = _lines(calls)
    rows: dict[tuple, list[dict[str, Any]]] = {}
    for call in calls:
        found = lines[call.module.__file__]
        launches = [_launch(call.stage, raw) for raw in call.raw["launches"]]
        report.launches += launches
        for raw in call.raw["sites"]:
            # A line may be several positions in the code, and a kernel launched several times: one row for all.
            line, kernel = found[raw["pc"]], launches[raw["launch"]].kernel
            key = (call.stage, kernel, line.file, line.number or line.pc, raw["op"], raw["space"], call.name(raw))
            rows.setdefault((*key, raw["size"]), []).append({"conflicts": _conflicts(raw), **raw, "line": line})
        report.faults += [_fault(call, raw, found) for raw in call.raw["faults"]]
        report.trace += [_access(call, launches, raw, found) for raw in call.raw["trace"]]
    for (stage, kernel, _, _, *what), group in rows.items():
        counts = [sum(raw[name] for raw in group) for name in COUNTS]
        report.sites.append(Site(stage, kernel, group[0]["line"], *what, *counts))
    report.sites.sort(key=lambda s: (s.stage, s.kernel, s.space, s.line.file, s.line.number, s.op, s.name))
    if calls and not symbols.available():
        report.notes.append("addr2line (of the GNU binutils) is not installed: offsets stand in place of lines.")


def _lines(calls: list[_Call]) -> dict[str, dict[int, Line]]:
    """The lines of all code positions, looked up once for each module."""
    positions: dict[str, set[int]] = {}
    for call in calls:
        pcs = positions.setdefault(call.module.__file__, set())
        pcs.update(raw["pc"] for raw in call.raw["sites"])
        pcs.update(raw[key] for raw in call.raw["faults"] for key in ("pc", "other_pc") if raw[key])
        pcs.update(raw[3] for raw in call.raw["trace"])
    return {module: symbols.lines(Path(module), pcs) for module, pcs in positions.items()}


def _launch(stage: str, raw: dict[str, Any]) -> Launch:
    counts = ("threads", "blocks", "dynamic_shared", "static_shared", "barriers", "warp_syncs")
    return Launch(stage, raw["kernel"], raw["grid"], raw["block"], *(raw[name] for name in counts))


def _conflicts(raw: dict[str, Any]) -> int:
    """Wavefronts beyond the fewest: one serves the whole warp's 4 bytes a lane, half a warp's 8, a quarter's 16."""
    if raw["space"] == "global":
        return 0
    fewest = max(raw["requests"], -(-raw["lanes"] * raw["size"] // 128))
    return max(0, raw["wavefronts"] - fewest)


def _fault(call: _Call, raw: dict[str, Any], lines: dict[int, Line]) -> Fault:
    name = call.name(raw)
    places = {"global": f"tensor {name}" if name else "memory outside every tensor", "shared": f"shared array {name}"}
    return Fault(
        raw["kind"],
        lines.get(raw["pc"]),
        lines.get(raw["other_pc"]),
        *(tuple(raw[key]) for key in ("block", "thread", "other_block", "other_thread")),
        places[raw["space"]],
        raw["offset"],
        call.raw["tensors"][raw["tensor"]]["bytes"] if raw["tensor"] >= 0 else 0,
        raw["count"],
    )


def _access(call: _Call, launches: list[Launch], raw: tuple, lines: dict[int, Line]) -> Access:
    launch, block, warp, pc, op, space, tensor, shared, size, offsets = raw
    name = call.name({"tensor": tensor, "shared": shared})
    return Access(call.stage, launches[launch].kernel, block, warp, lines[pc], op, space, name, size, tuple(offsets))
