"""What the x-ray saw: the records, their totals, and all of it as JSON."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from stages.toolkit import render
from stages.toolkit.errors import KernelFault
from stages.toolkit.symbols import Line

SECTOR = 32  # bytes: the unit in which global memory moves


@dataclass(frozen=True)
class Counts:
    """Totals of one or more launches, as a stage's closed forms give them. A request: one instruction of one warp."""

    load_requests: int = 0
    load_sectors: int = 0
    store_requests: int = 0
    store_sectors: int = 0
    atomic_requests: int = 0
    atomic_sectors: int = 0
    shared_load_wavefronts: int = 0
    shared_load_conflicts: int = 0
    shared_store_wavefronts: int = 0
    shared_store_conflicts: int = 0
    shared_copy_wavefronts: int = 0  # of asynchronous copies
    bulk_load_requests: int = 0  # boxes that the copy engine brings
    bulk_load_sectors: int = 0
    bulk_store_requests: int = 0
    bulk_store_sectors: int = 0
    products: int = 0  # by a warp, straight from shared memory
    barriers: int = 0

    @property
    def sectors_read(self) -> int:
        """From global memory, by loads and by the copy engine."""
        return self.load_sectors + self.bulk_load_sectors

    @property
    def sectors_written(self) -> int:
        return self.store_sectors + self.bulk_store_sectors

    def metrics(self) -> dict[str, int]:
        """The totals under the names that Nsight Compute gives them (barriers, which it does not count, left out)."""
        return {metric: getattr(self, name) for name, metric in METRICS.items()}


# The conflicts of asynchronous copies are left out: the GPU counts them together with what their zeros cost.
METRICS = {
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "shared_copy_wavefronts": "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum",
}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    stage: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    threads: int
    blocks: int
    dynamic_shared: int  # bytes
    static_shared: int
    barriers: int
    warp_syncs: int


@dataclass(frozen=True)
class Site:
    """What one line of source asked of one tensor or shared array, by one kind of access."""

    stage: str
    kernel: str
    line: Line
    op: str  # "load", "store", "atomic", "copy": an asynchronous one, into shared memory, or of Hopper's own machine:
    # "bulk_load", "bulk_store", and "product", which reads its factors from shared memory
    space: str  # "global" or "shared"
    name: str  # of the tensor, or of the shared array
    size: int  # bytes a thread asks for at once
    requests: int
    sectors: int
    wavefronts: int
    conflicts: int  # wavefronts beyond the fewest that the requests could do with
    lanes: int  # thread accesses
    bytes_asked: int

    @property
    def bytes_moved(self) -> int:
        return SECTOR * self.sectors

    @property
    def per_request(self) -> float:
        """Sectors a request in global memory, wavefronts a request in shared memory."""
        return (self.sectors if self.space == "global" else self.wavefronts) / max(self.requests, 1)


@dataclass(frozen=True)
class Traffic:
    """What all lines together asked of one tensor or shared array."""

    name: str
    op: str
    space: str
    requests: int
    sectors: int
    wavefronts: int
    conflicts: int
    bytes_asked: int
    bytes_moved: int


@dataclass(frozen=True)
class Fault:
    """Something that the kernel may not do, seen `count` times; the places are those of the first time."""

    kind: str
    line: Line | None
    other_line: Line | None
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    other_block: tuple[int, int, int]
    other_thread: tuple[int, int, int]
    place: str  # "shared array a_tile", "tensor c", ...
    offset: int  # bytes into the place
    size: int  # bytes of the place, 0 if not known
    count: int

    def __str__(self) -> str:
        who = f"thread {self.thread} of block {self.block}"
        here = f"{self.line}, {who}," if self.line else f"{who},"
        other = f"{self.other_line}, thread {self.other_thread}" if self.other_line else f"thread {self.other_thread}"
        if self.other_block != self.block:
            other += f" of block {self.other_block}"
        byte = f"byte {self.offset:,} of {self.place}"
        elsewhere = "global" if self.place.startswith("shared") else "shared"
        holds = f", which has {self.size:,} bytes" if self.size else ""
        text = {
            "race": f"{here} and {other} touch {byte} with no barrier between them, and at least one writes",
            "block race": f"{here} and {other} touch {byte} in one launch, and at least one writes",
            "out of bounds": f"{here} reaches {byte}{holds}",
            "uninitialised read": f"{here} reads {byte}, which nothing has written",
            "write to input": f"{here} writes {byte}, which is an input",
            "copy in flight": f"{here} touches {byte}, which the copy of {other} has not brought yet",
            "read in flight": f"{here} writes {byte}, which {other} may still have read",
            "missing fence": f"{here} has {byte} read that {other} wrote, with no fence_async since",
            "wrong memory": f"{here} reaches {byte} by an instruction for {elsewhere} memory",
            "misaligned": f"{here} reaches {byte}, which is not aligned to the width of the access",
            "divergent barrier": f"{here} waits at a barrier that not all threads of its block reach",
            "deadlock": f"{here} waits for ever",
        }.get(self.kind, f"{here} {self.place}")
        times = f" ({self.count:,} times)" if self.count > 1 else ""
        return f"{self.kind}: {text}{times}"


@dataclass(frozen=True)
class Access:
    """One request of the trace: what a warp asked for at once."""

    stage: str
    kernel: str
    block: int  # linear index
    warp: int
    line: Line
    op: str
    space: str
    name: str
    size: int  # bytes a lane asks for
    offsets: tuple[int, ...]  # a lane's byte offset into the tensor or array, -1 where the lane takes no part


@dataclass
class Report:
    """All that was recorded. It fills when the recording ends."""

    schedule: str = "forward"
    seed: int = 0
    launches: list[Launch] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    trace: list[Access] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def counts(self) -> Counts:
        """Totals over all launches, under the names that a stage's closed forms use."""
        total = dict.fromkeys((f.name for f in fields(Counts)), 0)
        for site in self.sites:
            if site.space == "global":
                total[f"{site.op}_requests"] += site.requests
                total[f"{site.op}_sectors"] += site.sectors
            elif site.op == "product":
                total["products"] += site.requests
            else:
                op = "store" if site.op == "atomic" else site.op
                total[f"shared_{op}_wavefronts"] += site.wavefronts
                if op != "copy":
                    total[f"shared_{op}_conflicts"] += site.conflicts
        total["barriers"] = sum(launch.barriers for launch in self.launches)
        return Counts(**total)

    def metrics(self) -> dict[str, int]:
        """Totals under Nsight Compute's names."""
        return self.counts().metrics()

    def traffic(self, space: str | None = None) -> list[Traffic]:
        """Totals for each tensor and shared array, loads and stores apart."""
        groups: dict[tuple[str, str, str], list[Site]] = {}
        for site in self.sites:
            if space in (None, site.space):
                groups.setdefault((site.name, site.op, site.space), []).append(site)
        names = ("requests", "sectors", "wavefronts", "conflicts", "bytes_asked", "bytes_moved")
        return [
            Traffic(*key, *(sum(getattr(site, name) for site in group) for name in names))
            for key, group in groups.items()
        ]

    def raise_if_faulty(self) -> None:
        """Raise KernelFault with every fault in its text, if there is one."""
        if self.faults:
            raise KernelFault("\n".join(str(fault) for fault in self.faults))

    def to_json(self) -> dict[str, Any]:
        """Everything, the trace included, in types that `json.dumps` takes."""

        def place(line: Line | None) -> dict[str, Any] | None:
            return line and {"file": str(line), "path": line.file, "line": line.number, "text": line.text}

        def plain(record: Any) -> dict[str, Any]:
            return {f.name: getattr(record, f.name) for f in fields(record)}

        return {
            "schedule": self.schedule,
            "seed": self.seed,
            "launches": [asdict(launch) for launch in self.launches],
            "counts": asdict(self.counts()),
            "metrics": self.metrics(),
            "tensors": [asdict(traffic) for traffic in self.traffic()],
            "lines": [
                plain(s) | {"line": place(s.line), "bytes_moved": s.bytes_moved, "per_request": s.per_request}
                for s in self.sites
            ],
            "faults": [
                plain(f) | {"line": place(f.line), "other_line": place(f.other_line), "text": str(f)}
                for f in self.faults
            ],
            "trace": [plain(access) | {"line": place(access.line)} for access in self.trace],
            "notes": self.notes,
        }

    def text(self) -> str:
        """The report for a terminal, at most 100 columns wide."""
        return render.report(self)
