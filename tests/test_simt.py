"""The CPU device itself: planted faults found at their lines, correct kernels right in every schedule, launches that
fail and leave the process well."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.toolkit import build, check_cuda, compilers, symbols
from stages.toolkit.kernels import call, load, tensor_names

HERE = Path(__file__).parent / "simt"
SCHEDULES = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2), ("random", 3)]


class Bench:
    """The modules of one file of test kernels, which take a name, x, y and a number."""

    made = []

    def __init__(self, name: str, folder: Path, flags=()) -> None:
        self.source = HERE / f"{name}.cu"
        binding = HERE / (f"{name}.cpp" if name in ("faults", "order", "hopper") else "operations.cpp")
        self.lines = {}  # of the x-rayed module, by position
        self.paths = {
            variant: build.build_module(self.source, binding, variant, folder, flags) for variant in ("simt", "xray")
        }
        # pybind11 knows modules by name: one for each.
        self.modules = {variant: load(f"{folder.name}._{variant}", path) for variant, path in self.paths.items()}
        Bench.made.append(self)
        self.usual_settings()
        self.kernels = re.findall(r"KERNEL\(\"?(\w+)", self.source.read_text().partition("define KERNEL")[2])

    def usual_settings(self) -> None:
        for module in self.modules.values():
            module.configure(timeout=1.0)

    def line_of(self, name: str, what: str = "fault") -> int:
        """The line whose comment says that it is a kernel's fault, or the copy that the fault meets."""
        lines = self.source.read_text().splitlines()
        return next(n for n, text in enumerate(lines, 1) if re.search(rf"// {what}:.* {name}(,|$)", text))

    def simt(self, *arguments) -> None:
        call(self.modules["simt"], "run", arguments)

    def xray(self, *arguments, trace=0):
        """The raw recording, places turned into line numbers; the exception's text, if there was one."""
        module = self.modules["xray"]
        module.xray_start(trace=trace)
        message = None
        try:
            call(module, "run", arguments)
        except RuntimeError as error:
            message = str(error)
        finally:
            recording = module.xray_stop()
        for item in recording["faults"] + recording["sites"]:
            for key in ("pc", "other_pc"):
                if item.get(key):
                    item[key.replace("pc", "line")] = self.line(item[key])
        return recording, message

    def line(self, pc: int) -> int:
        if pc not in self.lines:
            self.lines[pc] = self.find_line(pc)
        return self.lines[pc]

    def find_line(self, pc: int) -> int:
        text = symbols.resolve(f"{{pc:{pc:#x}}}", self.paths["xray"])
        found = re.search(rf"{self.source.name}:(\d+)", text)
        return int(found[1]) if found else 0  # clang has stores that belong to two lines, and then to none


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    bench = Bench("faults", tmp_path_factory.mktemp("faults"))
    yield bench


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    yield Bench("operations", tmp_path_factory.mktemp("operations"))


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    yield Bench("copies", tmp_path_factory.mktemp("copies"))


@pytest.fixture(scope="module")
def matrices(tmp_path_factory):
    yield Bench("matrices", tmp_path_factory.mktemp("matrices"))


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    yield Bench("order", tmp_path_factory.mktemp("order"))


@pytest.fixture(autouse=True)
def usual_settings():
    yield
    for bench in Bench.made:
        bench.usual_settings()


# ---- planted faults -------------------------------------------------------------------------------------------------

RACES = ["no_barrier", "no_second_barrier", "no_warp_barrier", "other_half", "same_word"]
IN_FLIGHT = ["no_commit", "no_wait", "wait_too_short", "store_in_flight", "two_copies", "rows_in_flight"]
FOUND = {
    **{name: "race" for name in RACES},
    "no_barrier_after_wait": "race",
    "refill_too_early": "race",
    **{name: "copy in flight" for name in IN_FLIGHT},
    "copy_misaligned": "misaligned",
    "copy_past": "out of bounds",
    "copy_unwritten": "uninitialised read",
    "copy_from_shared": "wrong memory",
    "copy_to_global": "wrong memory",
    "row_race": "race",
    "row_unwritten": "uninitialised read",
    "row_misaligned": "misaligned",
    "rows_of_global": "wrong memory",
    "blocks_write": "block race",
    "block_reads": "block race",
    "read_past": "out of bounds",
    "read_before": "out of bounds",
    "write_past": "out of bounds",
    "atomic_past": "out of bounds",
    "read_gap": "out of bounds",
    "read_far": "out of bounds",
    "write_input": "write to input",
    "shared_past": "out of bounds",
    "unwritten_shared": "uninitialised read",
    "unwritten_output": "uninitialised read",
    "unwritten_by_both_launches": "uninitialised read",
    "misaligned": "misaligned",
}
RAISED = {
    "divergent": r"divergent barrier: thread \(\d+, 0, 0\) waits at __syncthreads, faults.cu:(\d+), thread .*cu:\d+",
    "deadlock": r"deadlock: 32 threads wait at __shfl_xor_sync.*32 threads wait at __syncthreads, faults.cu:(\d+)",
    "spin": r"deadlock: 64 threads wait in a loop at .*faults.cu:(\d+)",
    "endless": r"timeout: thread \(\d+, 0, 0\) ran for 1 s at .*faults.cu:(\d+)",
    "wrong_mask": r"__shfl_sync, faults.cu:(\d+): thread \(\d+, 0, 0\) is lane \d+, which its own mask 0x0000ffff",
    "null_pointer": r"crash: thread \(\d+, 0, 0\) at .*faults.cu:(\d+).*access to memory that is not there, address 0x",
    "read_far": r"crash: thread \(\d+, 0, 0\) at .*faults.cu:(\d+).*access to memory that is not there",
    "divide": r"crash: thread \(\d+, 0, 0\) at .*faults.cu:(\d+): Floating point exception",
    "past_row": r"crash: thread \(\d+, 0, 0\) at .*faults.cu:(\d+): an index outside its array",
    "past_local": r"crash: thread \(0, 0, 0\) at .*faults.cu:(\d+): an index outside its array",
    "missing_lane": r"deadlock: 33 .*; 31 threads wait at load_matrices, faults.cu:(\d+), for .* mask 0xffffffff",
    "lane_gone": r"thread \(\d+, 0, 0\) stopped at mma, which needs all 32 lanes of the warp, faults.cu:(\d+)",
    "trap": r"thread \(40, 0, 0\) stopped at __trap, faults.cu:(\d+)",
}
ONLY_XRAY = {"read_far", "past_row", "past_local"}  # without it the access may be to somebody's memory
CORRECT = ["neighbour", "reuse", "lanes", "half_warps", "copied", "two_groups", "refill", "four_at_once", "rows"]
CORRECT += ["block_of_an_earlier_launch"]


def problem(name: str):
    """x, y and the number of blocks for a kernel of faults.cu."""
    x = torch.arange(1, 129.0)
    x = {"read_gap": x[::2], "block_reads": x, "misaligned": x[:80], "copy_misaligned": x[:80]}.get(name, x[:64])
    blocks = 2 if name.startswith("block") else 1
    long = name in ("block_reads", "block_of_an_earlier_launch", "unwritten_by_both_launches")
    return x, torch.full((128 if long else 64,), float("nan")), blocks


def test_every_kernel_of_the_file_is_tested(faults):
    assert sorted({*FOUND, *RAISED, *CORRECT, "local_memory", "no_end"}) == sorted(faults.kernels)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}{s[1]}")
def test_found_at_their_lines(faults, schedule):
    """Every planted fault is found, at its line, in every schedule; for a race either side may come last."""
    faults.modules["xray"].configure(schedule=schedule[0], seed=schedule[1], timeout=1.0)
    for name, kind in FOUND.items():
        recording, _ = faults.xray(name, *problem(name))
        assert recording["faults"], name
        places = {(f["kind"], line) for f in recording["faults"] for line in (f["line"], f.get("other_line", 0))}
        assert (kind, faults.line_of(name)) in places, (name, recording["faults"])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}{s[1]}")
def test_both_lines_of_a_copy_and_who_meets_it(faults, schedule):
    faults.modules["xray"].configure(schedule=schedule[0], seed=schedule[1], timeout=1.0)
    for name in [*IN_FLIGHT, "no_barrier_after_wait", "refill_too_early"]:
        recording, _ = faults.xray(name, *problem(name))
        lines = {faults.line_of(name), faults.line_of(name, "copy")}
        found = [
            f for f in recording["faults"] if {f["line"], f.get("other_line")} == lines and f["kind"] == FOUND[name]
        ]
        assert found, (name, recording["faults"])
        if name in IN_FLIGHT:
            assert {f["other_line"] for f in found} == {faults.line_of(name, "copy")}
            assert {f["shared"] for f in found} == {"tile"}


def test_what_nobody_waits_for_is_never_there(faults):
    """Without the x-ray, too: a copy without a commit or a wait leaves in shared memory what was there before."""
    x, y, _ = problem("no_wait")
    for name in ("no_wait", "no_commit", "wait_too_short"):
        faults.simt(name, x, y.zero_(), 1)
        assert y.isnan().all(), name


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}{s[1]}")
def test_no_fault_in_their_correct_twins(faults, schedule):
    for variant in faults.modules.values():
        variant.configure(schedule=schedule[0], seed=schedule[1])
    for name in CORRECT:
        x, y, blocks = problem(name)
        recording, message = faults.xray(name, x, y, blocks)
        assert (recording["faults"], message) == ([], None), name
        plain = torch.full_like(y, float("nan"))
        faults.simt(name, x, plain, blocks)
        assert torch.equal(y, plain), name


def test_what_a_fault_says(faults):
    recording, _ = faults.xray("read_past", *problem("read_past"))
    (fault,) = recording["faults"]
    assert (fault["thread"], fault["block"], fault["tensor"]) == ((63, 0, 0), (0, 0, 0), 0)
    assert (fault["offset"], fault["count"], fault["space"]) == (256, 1, "global")
    recording, _ = faults.xray("no_warp_barrier", *problem("no_warp_barrier"))
    (fault,) = recording["faults"]
    assert (fault["shared"], fault["count"], fault["other_line"]) == ("tile", 64, fault["line"] - 2)


@pytest.mark.parametrize(
    ("variant", "name"), [(v, n) for v in ("simt", "xray") for n in RAISED if v == "xray" or n not in ONLY_XRAY]
)
def test_raised_and_the_next_launch_works(faults, variant, name):
    """What ends a launch is a Python exception that names the line; the process and the device live on."""
    if name in ("past_row", "past_local") and "clang" in faults.modules["xray"].info()["compiler"]:
        pytest.skip("clang's traps have no line, so it is not asked for them")
    x, y, blocks = problem(name)
    if variant == "simt":
        with pytest.raises(RuntimeError) as caught:
            faults.simt(name, x, y, blocks)
        message = str(caught.value)
    else:
        message = faults.xray(name, x, y, blocks)[1]
    found = re.search(RAISED[name], message)
    assert found and int(found[1]) == faults.line_of(name), message
    assert name in message  # the kernel
    for _ in range(2):
        good = torch.full((64,), float("nan"))
        faults.simt("neighbour", x[:64], good, 1)
        assert torch.equal(good, x[:64].flip(0))


@pytest.mark.parametrize("variant", ["simt", "xray"])
@pytest.mark.parametrize("name", ["local_memory", "no_end"])
def test_recursion_past_the_stack(faults, variant, name):
    x, y, _ = problem(name)
    with pytest.raises(RuntimeError, match=rf"{name}.*thread \(0, 0, 0\).* used more local memory than its 64 KiB"):
        call(faults.modules[variant], "run", (name, x, y, 1))
    faults.simt("neighbour", x, y, 1)
    assert torch.equal(y, x.flip(0))


def test_a_frame_past_the_stack_does_not_compile(tmp_path):
    source = (HERE / "faults.cu").read_text().replace("volatile float local[100];", "volatile float local[100000];")
    (tmp_path / "faults.cu").write_text(source)
    with pytest.raises(build.BuildError, match="frame size.*4000"):
        build.build_module(tmp_path / "faults.cu", HERE / "faults.cpp", "simt", tmp_path)


def test_faulthandler_keeps_its_signals(faults):
    """A crash outside the kernels is Python's own matter, before and after ours."""
    code = f"""
import faulthandler, sys, torch
sys.path[:0] = {sys.path!r}
from pathlib import Path
from stages.toolkit.kernels import call, load
faulthandler.enable()
module = load("faults._simt", Path({str(faults.paths["simt"])!r}))
x = torch.ones(64)
try:
    call(module, "run", ("null_pointer", x, x.clone(), 1))
except RuntimeError as error:
    print("told:", error, flush=True)
faulthandler._sigsegv()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "told: kernel null_pointer" in done.stdout
    assert done.returncode == -signal.SIGSEGV and "Fatal Python error: Segmentation fault" in done.stderr


# ---- operations -----------------------------------------------------------------------------------------------------


def expected(name: str, x: np.ndarray) -> np.ndarray:
    """The result of a kernel of operations.cu, in numpy."""
    n = len(x)
    i = np.arange(n)
    lane, warp = i % 32, i // 32
    by_warp = [np.flatnonzero(warp == w) for w in range(warp[-1] + 1)]

    def each_warp(of):
        return np.concatenate([np.broadcast_to(of(x[w]), len(w)) for w in by_warp])

    match name:
        case "shuffle":
            return x[i - lane % 8 + (3 + i) % 8]
        case "shuffle_up":
            return np.where(lane >= 3, x[np.maximum(i - 3, 0)], x)
        case "shuffle_down":
            return np.where(lane % 16 < 11, x[np.minimum(i + 5, n - 1)], x)
        case "shuffle_xor":
            return x[i ^ 9]
        case "halves":
            return np.where(lane < 16, x[i ^ 1], x[i ^ 2])
        case "votes":
            match_count = np.concatenate([[np.sum(np.trunc(x[w]) == np.trunc(v)) for v in x[w]] for w in by_warp])
            return (
                each_warp(lambda v: np.sum(v > 0))
                + 100 * each_warp(lambda v: np.any(v > 2))
                + 1000 * each_warp(lambda v: np.all(v > -9))
                + 10000 * match_count
            )
        case "reductions":
            v = np.trunc(x * 8)
            sums = [(v[w].sum() + 3 * v[w].min() + 7 * v[w].max()) * np.ones(len(w)) for w in by_warp]
            return np.concatenate(sums)
        case "block_sum":
            return np.full(n, x.astype(np.float64).sum())
        case "counting":
            return np.full(n, np.sum(x > 0) + 10000 * np.any(x > 2) + 100000 * np.all(x > -9))
        case "early":
            return np.where(i % 2 == 1, -1, x[(i + 2) % n])
        case "histogram":
            return np.bincount(np.trunc(x).astype(int) & 15, minlength=16)[i & 15]
        case "reversed":
            return x[::-1]
        case "wide_copy":
            return x
        case "transpose_conflicts" | "transpose_padded":
            return x.reshape(32, 32).T.reshape(-1)
        case "uneven":
            return np.array([x[np.arange(200 + 3 * t) % n].astype(np.float64).sum() for t in i])
        case "catching_up":
            return np.where(i % 2 == 1, 3 * x, x)
        case "from_shared":
            return x[(i + 1) % n]
        case "rounding":
            t = torch.from_numpy(x)
            return torch.where(torch.from_numpy(i % 2 == 1), t.half().float(), t.bfloat16().float()).numpy()
        case "handshake":
            return np.full(n, x[0])
    raise KeyError(name)


SIZES = {"transpose_conflicts": [1024], "transpose_padded": [1024], "handshake": [64, 160]}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}{s[1]}")
def test_operations(operations, schedule):
    """Values against numpy, no fault and the same bits from both modules, for whole and broken warps and blocks."""
    for module in operations.modules.values():
        module.configure(schedule=schedule[0], seed=schedule[1])
    generator = np.random.default_rng(schedule[1])
    for name in [*operations.kernels, "reversed"]:
        for n in SIZES.get(name, [32, 64, 96, 1024]):
            x = (3 * generator.standard_normal(n)).astype(np.float32)
            plain, seen = torch.full((n,), float("nan")), torch.full((n,), float("nan"))
            operations.simt(name, torch.from_numpy(x), plain, n)
            recording, message = operations.xray(name, torch.from_numpy(x), seen, n)
            assert (recording["faults"], message) == ([], None), (name, n)
            np.testing.assert_allclose(plain, expected(name, x), rtol=1e-5, atol=1e-4, err_msg=f"{name} {n}")
            assert torch.equal(plain, seen), (name, n)


def test_thread_local_variables_of_libraries_are_no_shared_memory(operations):
    """Shared memory is nonsense when a block begins; what else is thread-local stays as it is."""
    y = torch.full((64,), float("nan"))
    operations.simt("beside_a_library", torch.zeros(64), y, 64)
    assert torch.equal(y, torch.full((64,), 7.0))


@pytest.mark.parametrize("n", [1, 2, 31, 33, 1023])
@pytest.mark.parametrize("name", ["block_sum", "counting", "early", "reversed", "wide_copy"])
def test_warps_with_missing_lanes(operations, name, n):
    if name == "block_sum" and n % 32:
        n = -(-n // 32) * 32  # a lane that does not exist has no value to give
    if name == "early" and n % 2:
        n += 1
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    y = torch.full((n,), float("nan"))
    recording, message = operations.xray(name, torch.from_numpy(x), y, n)
    assert (recording["faults"], message) == ([], None)
    np.testing.assert_allclose(y, expected(name, x), rtol=1e-5, atol=1e-4)


def test_half_conversions(operations):
    """Rounding to float16 and bfloat16 as torch does it, ties, subnormals, overflow, infinities and NaN included."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, 40_000, dtype=np.uint64).astype(np.uint32)
    near = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)  # every half, and around it
    with np.errstate(all="ignore"):
        x = np.concatenate([bits.view(np.float32), near, near * np.float32(1 + 2**-11), near * np.float32(1 + 2**-12)])
    x = x[: len(x) // 1024 * 1024]
    for part in x.reshape(-1, 1024):
        y = torch.full((1024,), 7.0)
        operations.simt("rounding", torch.from_numpy(part), y, 1024)
        np.testing.assert_array_equal(y.numpy(), expected("rounding", part))


def counts(recording, kernel_line_part, space, op):
    return [s for s in recording["sites"] if s["space"] == space and s["op"] == op]


def test_counts_of_vector_accesses(operations):
    """A float4 is one request of four sectors a lane group: 16 sectors for a warp."""
    x = torch.randn(512)
    recording, _ = operations.xray("wide_copy", x, torch.empty(512), 128)
    for site in recording["sites"]:
        assert (site["size"], site["requests"], site["sectors"], site["bytes"]) == (16, 4, 64, 2048)
    assert len(recording["sites"]) == 2


def test_bank_conflicts_and_padding(operations):
    """32 rows of 32 words: a column costs 32 wavefronts a request, with a padded row 1."""
    x = torch.randn(1024)
    for name, wavefronts in {"transpose_conflicts": 1024, "transpose_padded": 32}.items():
        recording, _ = operations.xray(name, x, torch.empty(1024), 1024)
        (load,) = (s for s in recording["sites"] if (s["space"], s["op"]) == ("shared", "load"))
        (store,) = (s for s in recording["sites"] if (s["space"], s["op"]) == ("shared", "store"))
        assert (load["requests"], load["wavefronts"]) == (32, wavefronts)
        assert (store["requests"], store["wavefronts"]) == (32, 32)


def test_wavefronts_and_conflicts_as_an_h100_counts_them(operations):
    """447 patterns of lanes over shared memory, 4, 8 and 16 bytes wide, against what Nsight Compute counted."""
    golden = json.loads((HERE.parent / "golden" / "shared_wavefronts.json").read_text())
    for width, offsets, *passes in golden["rows"]:
        x = torch.tensor(offsets, dtype=torch.float32)
        for name, expected in {"load": passes[:2], "store": passes[2:]}.items():
            recording, _ = operations.xray(f"pattern_{name}_{width}", x, torch.zeros(32), 32)
            sites = [s for s in recording["sites"] if s["space"] == "shared" and s["op"] == name]
            (site,) = (s for s in sites if s["size"] == 4 * width)
            assert (site["requests"], site["wavefronts"], site["conflicts"]) == (1, *expected), (name, width, offsets)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}{s[1]}")
def test_requests_of_lanes_that_part(operations, schedule):
    """Lanes with loops of unequal length: the n-th access of all lanes that make one is one request, always."""
    operations.modules["xray"].configure(schedule=schedule[0], seed=schedule[1])
    recording, _ = operations.xray("uneven", torch.randn(64), torch.empty(64), 64)
    (load,) = (s for s in recording["sites"] if s["op"] == "load")
    assert load["requests"] == (200 + 3 * 31) + (200 + 3 * 63)
    assert load["lanes"] == sum(200 + 3 * t for t in range(64))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}{s[1]}")
def test_requests_of_lanes_with_full_logs(operations, schedule):
    """A lane whose log is full, with nothing in it that is known to be whole, has room for what it does next."""
    operations.modules["xray"].configure(schedule=schedule[0], seed=schedule[1])
    recording, message = operations.xray("apart", torch.randn(256), torch.empty(3), 3)
    assert (recording["faults"], message) == ([], None)
    loads = [(s["requests"], s["lanes"]) for s in recording["sites"] if s["op"] == "load"]
    assert sorted(loads) == [(1, 2), (1, 2), (62, 62), (63, 63), (200, 200), (200, 200)]


def test_trace(operations):
    recording, _ = operations.xray("reversed", torch.randn(64), torch.empty(64), 64, trace=100)
    rows = [row for row in recording["trace"] if row[5] == "shared"]
    assert [row[4] for row in rows] == ["store", "store", "load", "load"]
    assert rows[0][9] == [4 * lane for lane in range(32)]
    assert rows[3][9] == [4 * (31 - lane) for lane in range(32)]


# ---- asynchronous copies and vectors --------------------------------------------------------------------------------


def both(bench, name, x, size, threads=32):
    """The result of a kernel, after a look at its faults (none) and at the plain module's result (the same bits)."""
    plain, seen = torch.full((size,), float("nan")), torch.full((size,), float("nan"))
    bench.simt(name, x, plain, threads)
    recording, message = bench.xray(name, x, seen, threads)
    assert (recording["faults"], message) == ([], None), name
    assert torch.equal(plain.view(torch.int32), seen.view(torch.int32)), name
    return plain, recording["sites"]


def only(sites, space, op):
    return [site for site in sites if (site["space"], site["op"]) == (space, op)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}{s[1]}")
def test_copies(copies, schedule):
    for module in copies.modules.values():
        module.configure(schedule=schedule[0], seed=schedule[1])
    generator = torch.Generator().manual_seed(schedule[1])
    for name in copies.kernels:
        for n in (32, 96):
            each = int(re.findall(r"\d+", name)[-1]) if name != "by_warps" and name != "groups" else 1
            match name.partition("_")[0]:
                case "edge":
                    each //= 4
                    for length in (each * n, each * n - 1, each * n - 2, each * 5 + 3, 1):
                        x = torch.randn(length, generator=generator)
                        y, _ = both(copies, name, x, each * n, n)
                        whole = length // each * each
                        assert torch.equal(y, torch.cat([x[:whole], torch.zeros(each * n - whole)])), (name, length)
                case "pipeline":
                    for steps in (0, 1, each - 1, each, 7):
                        x = torch.randn(steps * n, generator=generator)
                        y, _ = both(copies, name, x, n, n)
                        torch.testing.assert_close(y, x.reshape(steps, n).sum(0).flip(0))
                case "ragged":
                    for steps in (1, 2, 7):
                        x = torch.randn(steps * 75, generator=generator)
                        y, _ = both(copies, name, x, n, n)
                        torch.testing.assert_close(y, x.reshape(steps, 75).sum(0)[(7 * torch.arange(n) + 3) % 75])
                case "by":
                    x = torch.randn(n, generator=generator)
                    assert torch.equal(both(copies, name, x, n, n)[0], x.reshape(-1, 2).flip(1).reshape(-1))
                case "groups":
                    x = torch.arange(1.0, n + 1)
                    assert torch.equal(both(copies, name, x, n, n)[0], 7 * x)
                case "vectors":
                    x = torch.randint(-99, 99, (each * n,), generator=generator).float()
                    assert torch.equal(both(copies, name, x, each * n, n)[0], 2 * x)
                case "built":
                    x = torch.randn(each * n, generator=generator)
                    assert torch.equal(both(copies, name, x, each * n, n)[0].reshape(n, each).flip(0).reshape(-1), x)


def test_counts_of_copies(copies):
    """A copy is one request to read and one to write; lanes past the end read nothing and write zeros."""
    x, y = torch.randn(4 * 64 - 37), torch.empty(4 * 64)
    recording, _ = copies.xray("edge_16", x, y, 64)
    (load,) = (s for s in only(recording["sites"], "global", "load"))
    (store,) = (s for s in only(recording["sites"], "shared", "copy"))
    assert load["line"] == store["line"]
    assert (load["size"], load["requests"], load["sectors"], load["lanes"]) == (16, 2, 27, 54)
    assert load["bytes"] == 16 * 54
    # Four passes for a whole warp; three for 22 lanes of the other one, and four for its zeros.
    assert (store["size"], store["requests"], store["wavefronts"], store["conflicts"]) == (16, 2, 4 + 3 + 4, 0)
    recording, _ = copies.xray("pipeline_3", torch.randn(7 * 64), torch.empty(64), 64)
    assert sum(s["requests"] for s in only(recording["sites"], "global", "load")) == 7 * 2
    assert sum(s["sectors"] for s in only(recording["sites"], "global", "load")) == 7 * 8
    assert sum(s["wavefronts"] for s in only(recording["sites"], "shared", "copy")) == 7 * 2


@pytest.mark.parametrize("flags", [(), ("-O1", "-g1")], ids=["as built", "O1"])
def test_a_vector_is_one_access(copies, flags, tmp_path):
    bench = Bench("copies", tmp_path, flags) if flags else copies
    text = bench.source.read_text().splitlines()
    for name in bench.kernels:
        if not name.startswith(("vectors", "built_in")):
            continue
        each = int(name[-1])
        size = each * {"float": 4, "double": 8, "half": 2, "bfloat16": 2}.get(name.split("_")[1], 4)
        x = torch.arange(each * 32.0)
        recording, _ = bench.xray(name, x, torch.empty(each * 32), 32)
        for op, places in {"load": 1 + name.startswith("vectors"), "store": 1}.items():
            wide = [s for s in only(recording["sites"], "shared", op) if s["size"] == size]
            assert [s["requests"] for s in wide] == [1] * places, (name, op)
            wanted = "load_vector|reinterpret_cast<const" if op == "load" else "store_vector|reinterpret_cast<Word"
            assert all(re.search(wanted, text[s["line"] - 1]) for s in wide), (name, op)
            if op == "load" and name.startswith("vectors"):
                assert len(only(recording["sites"], "shared", op)) == 2  # nothing is read twice, or in parts


# ---- ldmatrix, mma --------------------------------------------------------------------------------------------------

ROUNDED = {
    "half": lambda v: v.half().float(),
    "bfloat16": lambda v: v.bfloat16().float(),
    "tf32": lambda v: (v.view(torch.int32) & ~0x1FFF).view(torch.float32),
    "double": lambda v: v,
}


@pytest.mark.parametrize("name", ["half", "bfloat16", "tf32", "double", "shared_half", "shared_bfloat16"])
def test_products(matrices, name):
    """The fragments are filled from the layouts in mma.h, or by ldmatrix; the truth is in float64."""
    inner, rounded = 8 if name in ("tf32", "double") else 16, ROUNDED[name.removeprefix("shared_")]
    for seed, schedule in enumerate(("forward", "reverse", "random")):
        for module in matrices.modules.values():
            module.configure(schedule=schedule, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.randn(16, inner, generator=generator), torch.randn(inner, 8, generator=generator)
        y, _ = both(matrices, name, torch.cat([a.reshape(-1), b.reshape(-1)]), 128)
        truth = rounded(a).double() @ rounded(b).double() + 1
        torch.testing.assert_close(y.reshape(16, 8).double(), truth, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["half", "bfloat16", "tf32", "double"])
def test_products_of_infinities_and_nan(matrices, name):
    inner = 8 if name in ("tf32", "double") else 16
    a, b = torch.ones(16, inner), torch.ones(inner, 8)
    a[2, 1], a[5, 3], a[9, 0], b[3, 6] = torch.inf, torch.nan, -torch.inf, 0
    a[11, 3], b[0, 2], b[1, 4] = torch.inf, 0, -1
    y, _ = both(matrices, name, torch.cat([a.reshape(-1), b.reshape(-1)]), 128)
    assert torch.equal(y.reshape(16, 8).nan_to_num(7, 8, 9), (a @ b + 1).nan_to_num(7, 8, 9))
    assert y.reshape(16, 8)[5].isnan().all() and y.reshape(16, 8)[11, 6].isnan()


@pytest.mark.parametrize("count", [4, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_gathered(matrices, count, transposed):
    name = f"gather_{count}" + "_transposed" * transposed
    rows = torch.from_numpy(np.random.default_rng(count).integers(0, 256, 32)).float()
    rows[8 * count :] = -1  # no address
    y, _ = both(matrices, name, rows, 64 * count)
    stored = 8 * rows.reshape(4, 8, 1)[:count] + torch.arange(8)
    wanted = stored.mT if transposed else stored  # [matrix][row][value] = [matrix][lane / 4][lane % 4 and low or high]
    assert torch.equal(y.reshape(count, 8, 8), wanted)


@pytest.mark.parametrize("count", [4, 2])
def test_wavefronts_of_ldmatrix(matrices, count):
    """One for a matrix whose eight rows lie in different banks, eight where all lie in the same; none are shared."""
    lane = torch.arange(32)
    patterns = {
        1: lane,  # side by side
        8: 8 * lane % 256 + lane // 32,  # 128 bytes apart
        4: 4 * lane % 128,
        2: 9 * (lane % 8) % 4 + 8 * (lane % 8) + 64 * (lane // 16),  # swizzled by half
    }
    patterns[1 + 0.5] = 8 * (lane % 8) + (lane % 8 ^ lane // 8)  # 128 bytes apart, swizzled
    patterns[1 + 0.25] = lane % 8  # all matrices the same one
    for each, rows in patterns.items():
        recording, _ = matrices.xray(f"gather_{count}", rows.float(), torch.empty(64 * count), 32)
        (load,) = (s for s in only(recording["sites"], "shared", "load"))
        assert (load["size"], load["requests"], load["lanes"]) == (16, 1, 8 * count)
        assert (load["wavefronts"], load["conflicts"]) == (count * int(each), count * (int(each) - 1)), each
        assert not recording["faults"]


def test_rounding_to_tf32(matrices):
    """To nearest, ties away from zero: against float64; subnormals, overflow, infinities and NaN included."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, 40_960, dtype=np.uint64).astype(np.uint32)
    ties = bits[:8192] & np.uint32(0xFFFFE000) | np.uint32(0x1000)
    small = bits[:8192] & np.uint32(0x807FFFFF)
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7FEFFF, 0x7F7FF000], np.uint32)
    x = np.concatenate([bits, ties, ties - 1, ties + 1, small, np.resize(special, 1024)]).view(np.float32)
    with np.errstate(all="ignore"):
        value = np.abs(x.astype(np.float64))
        step = np.exp2(np.maximum(np.floor(np.log2(value)), -126) - 10)  # between neighbours with 10 bits
        wanted = np.copysign(np.floor(value / step + 0.5) * step, x).astype(np.float32)
    wanted = np.where(np.isfinite(x) & (x != 0), wanted, x)
    for part, expected in zip(x.reshape(-1, 1024), wanted.reshape(-1, 1024), strict=True):
        y = torch.full((1024,), 7.0)
        matrices.simt("rounded", torch.from_numpy(part), y, 1024)
        found = y.numpy().view(np.uint32)
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(found[numbers], expected.view(np.uint32)[numbers])
        assert np.isnan((found[~numbers] & np.uint32(0xFFFFE000)).view(np.float32)).all()


@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not on PATH")
@pytest.mark.parametrize("name", ["copies", "matrices", "order", "hopper"])
def test_the_same_kernels_compile_for_gpus(name, tmp_path):
    architectures = ["9.0a"] if name == "hopper" else compilers.DEFAULT_ARCHITECTURES
    targets = [flag for architecture in architectures for flag in compilers.gencode(architecture)]
    flags = (*targets, *compilers.nvcc_host(), *check_cuda.STRICT, "-Xptxas=-v")
    unit = build.compile_unit("cuda", name, HERE / f"{name}.cu", tmp_path, compilers.nvcc(), flags)
    found = check_cuda.parse_ptxas(build.make(unit, build.Runner()))
    assert {kernel.architecture for kernel in found} == {"sm_90a"} | ({"sm_80"} if name != "hopper" else set())
    assert not any(kernel.complaints(registers=168 if name == "hopper" else 64, spills=False) for kernel in found)


# ---- order between blocks -------------------------------------------------------------------------------------------

BLOCKS = 64  # threads of each
RUNS = [(schedule, seed, workers) for schedule, seed in SCHEDULES for workers in (1, 2)]
each_run = pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r[0]}{r[1]} on {r[2]}")


def place(bench, run, timeout=5.0) -> None:
    for module in bench.modules.values():
        module.configure(schedule=run[0], seed=run[1], workers=run[2], timeout=timeout)


def ask(bench, name: str, x: torch.Tensor, blocks: int, size: int, variant="simt"):
    """What a kernel of order.cu leaves in y and, from the x-ray, the recording."""
    y, words = torch.full((size,), float("nan")), torch.zeros(2 * blocks + 8)
    if variant == "simt":
        bench.simt(name, x, y, words, blocks)
        return y, None
    recording, message = bench.xray(name, x, y, words, blocks)
    assert message is None, (name, message)
    return y, recording


def ordered_result(name: str, x: torch.Tensor, blocks: int) -> torch.Tensor:
    """The truth of a kernel of order.cu; x holds small integers, so that every order of sums gives the same."""
    rows = x.reshape(blocks, 64)
    match name:
        case "chain" | "fenced":
            out = [rows[0]]
            for row in rows[1:]:
                out.append(row + out[-1].flip(0))
            return torch.cat(out)
        case "look_back":
            return x.cumsum(0)
        case "look_by_warp":
            return torch.cat([x[:blocks], x[:blocks].cumsum(0)])
        case "round":
            states = [rows]
            for _ in range(5):
                states.append(states[-1].roll(65) + 1)
            return torch.cat([states[4].reshape(-1), states[5].reshape(-1)])
        case "in_place":
            for _ in range(3):
                rows = rows.roll(-1, 0) + rows.roll(-2, 0)
            return rows.reshape(-1)
        case "write_before_release":
            return x[:1].expand(blocks)
        case "handed_through":
            return torch.cat([rows[0], rows[0].flip(0).repeat(blocks - 1)])
        case "inside":
            return x[:blocks].repeat_interleave(2)
    raise KeyError(name)


ORDERED = "chain fenced look_back look_by_warp round in_place write_before_release handed_through inside".split()
DISORDERED = {  # kernel: names at the lines of which it is told
    "chain_no_release": ["chain_no_release", "chain_no_barrier"],
    "chain_no_acquire": ["chain_no_acquire", "chain_no_barrier"],
    "chain_relaxed": ["chain_no_barrier"],
    "chain_no_barrier": ["chain_no_barrier"],
    "chain_none_after": ["chain_none_after"],
    "fenced_once": ["fenced_once"],
    "fenced_after": ["fenced_after"],
    "warp_no_acquire": ["warp_no_acquire"],
    "round_no_fence": ["round"],
    "round_no_acquire": ["round"],
    "round_none_before": ["round"],
    "round_none_after": ["round"],
    "in_place_one_barrier": ["in_place_one_barrier"],
    "write_after_release": ["write_after_release"],
    "read_before_acquire": ["read_before_acquire"],
}
WAITING = ["never_written", "all_need_all", "plain_spin"]


def test_every_kernel_of_order_is_tested(order):
    assert sorted({*ORDERED, *DISORDERED, *WAITING}) == sorted(order.kernels)


@each_run
def test_blocks_that_wait_for_blocks(order, run):
    """Right in every schedule, on one core and on two, and the x-ray has nothing to tell."""
    place(order, run)
    for name in ORDERED:
        for blocks in (2, 3, 33, 64):
            x = torch.randint(-9, 9, (64 * blocks,), generator=torch.Generator().manual_seed(blocks)).float()
            wanted = ordered_result(name, x, blocks)
            for variant in ("simt", "xray") if blocks < 64 or run[0] == "random" else ("simt",):
                y, recording = ask(order, name, x, blocks, len(wanted), variant)
                assert torch.equal(y, wanted), (name, blocks, variant)
                assert not (recording and recording["faults"]), (name, blocks, recording["faults"])


@each_run
def test_far_more_blocks_than_may_wait(order, run):
    """Blocks that take numbers need only those that began before them: any number of them ends."""
    place(order, run, timeout=20.0)
    blocks = 2000
    x = torch.randint(-9, 9, (64 * blocks,), generator=torch.Generator().manual_seed(0)).float()
    for name in ("fenced", "look_back"):
        assert torch.equal(ask(order, name, x, blocks, 64 * blocks)[0], ordered_result(name, x, blocks))


@each_run
def test_what_does_not_order_blocks_is_told_with_its_line(order, run):
    place(order, run)
    for name, places in DISORDERED.items():
        blocks = 3 if name.startswith(("chain", "fenced", "round", "in_place")) else 2
        wanted, lines = {order.line_of(where) for where in places}, set()
        # On two cores another block may look at a plain store before it is counted: then the look is not told.
        for _ in range(1 if run[2] == 1 else 5):
            _, recording = ask(order, name, torch.ones(64 * blocks), blocks, 2 * 64 * blocks, "xray")
            races = [fault for fault in recording["faults"] if fault["kind"] == "block race"]
            assert all(fault["block"] != fault["other_block"] for fault in races)
            lines |= {line for fault in races for line in (fault["line"], fault["other_line"])}
            if lines >= wanted:
                break
        assert lines >= wanted, (name, recording["faults"])


def test_the_random_schedule_parts_the_steps_of_a_protocol(order):
    """A block finds others' own sums, not only sums of all before: it is let in between, on one core, too."""
    x, loads = torch.ones(64 * 40), set()
    for seed in range(8):
        place(order, ("random", seed, 1))
        _, recording = ask(order, "look_back", x, 40, 64 * 40, "xray")
        _, again = ask(order, "look_back", x, 40, 64 * 40, "xray")
        assert again["sites"] == recording["sites"]  # the same seed, the same run
        (look,) = (s for s in only(recording["sites"], "global", "load") if s["size"] == 8)
        loads.add(look["requests"])
    assert max(loads) > 39 and len(loads) > 1


def test_counts_of_release_and_acquire(order):
    """In the forward schedule no block has to wait: each acquire is a load of one sector, each release a store."""
    place(order, ("forward", 0, 1))
    _, recording = ask(order, "chain", torch.ones(64 * 5), 5, 64 * 5, "xray")
    text = order.source.read_text().splitlines()
    sites = {re.search("load_acquire|store_release|$", text[s["line"] - 1])[0]: s for s in recording["sites"]}
    for name, op, count in (("load_acquire", "load", 4), ("store_release", "store", 5)):
        site = sites[name]
        assert (site["op"], site["space"], site["tensor"], site["size"]) == (op, "global", 2, 4)
        assert (site["requests"], site["sectors"], site["lanes"]) == (count, count, count)
    _, recording = ask(order, "fenced", torch.ones(64 * 5), 5, 64 * 5, "xray")
    assert sum(s["requests"] for s in only(recording["sites"], "global", "atomic")) == 5 + 4 + 5


@each_run
@pytest.mark.parametrize("variant", ["simt", "xray"])
def test_waiting_for_ever_is_an_error(order, run, variant):
    at = {name: rf"order\.cu:{order.line_of(name)}" for name in WAITING}
    cases = [
        ("never_written", 4, rf"deadlock: .*in a loop at .*{at['never_written']}.*so do all blocks that have not "
         r"ended, 2 of 4: what they wait for was never written"),
        ("never_written", 2, r"what they wait for was never written"),
        ("all_need_all", BLOCKS + 6, rf"deadlock: .*in a loop at .*{at['all_need_all']}.*so do all {BLOCKS} blocks "
         rf"that have begun and not ended, and 6 never began: at most {BLOCKS} blocks may wait"),
    ]  # fmt: skip
    module = order.modules[variant]
    assert module.info()["resident_blocks"] == BLOCKS
    place(order, run, timeout=0.3)
    for name, blocks, says in cases:
        arguments = (name, torch.ones(64 * blocks), torch.zeros(64 * blocks), torch.zeros(8), blocks)
        with pytest.raises(RuntimeError, match=says):
            call(module, "run", arguments)
    place(order, run)
    x = torch.ones(64 * BLOCKS)  # as many as may wait, and the device works on
    call(module, "run", ("all_need_all", x, torch.zeros(64 * BLOCKS), torch.zeros(8), BLOCKS))
    assert torch.equal(ask(order, "round", x, BLOCKS, 128 * BLOCKS)[0], ordered_result("round", x, BLOCKS))


def test_a_plain_spin_is_told(order):
    """The block that is waited for never gets the core: an error with the line. Where it came first: a race."""
    x, line = torch.ones(64), order.line_of("plain_spin")
    for variant in ("simt", "xray"):
        place(order, ("forward", 0, 1), timeout=0.3)
        with pytest.raises(RuntimeError, match=r"timeout: thread \(0, 0, 0\) ran for 0.3 s at ") as caught:
            call(order.modules[variant], "run", ("plain_spin", x, torch.zeros(64), torch.zeros(8), 2))
        assert f"order.cu:{line}" in symbols.resolve(str(caught.value), order.paths[variant])
    place(order, ("reverse", 0, 1))
    _, recording = ask(order, "plain_spin", x, 2, 2, "xray")
    assert ("block race", line) in {(fault["kind"], fault["line"]) for fault in recording["faults"]}


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupt_while_blocks_wait(order, workers):
    place(order, ("forward", 0, workers), timeout=30.0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        order.simt("never_written", torch.ones(64), torch.zeros(64 * 40), torch.zeros(8), 40)
    assert time.monotonic() - begin < 3
    x = torch.ones(64 * 4)
    assert torch.equal(ask(order, "chain", x, 4, 256)[0], ordered_result("chain", x, 4))


# ---- launches -------------------------------------------------------------------------------------------------------


def test_blocks_and_threads_in_three_dimensions(operations):
    x = torch.randn(720)
    y = torch.full((720,), float("nan"))
    operations.simt("spread", x, y, 0)
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wide_grid", r"spread cannot be launched with grid \(1, 65536, 1\).*a grid has at most"),
        ("wide_block", r"spread cannot be launched with.*block \(2048, 1, 1\).*at most 1024 threads"),
        ("much_shared", r"reversed cannot be launched with.*1048576 bytes of dynamic shared memory, at most \d+"),
    ],
)
def test_launches_past_the_limits_are_refused(operations, name, says):
    with pytest.raises(ValueError, match=says):
        operations.simt(name, torch.zeros(64), torch.zeros(64), 64)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (([1.0], torch.zeros(4)), TypeError, "expected a torch.Tensor, got list"),
        ((torch.zeros(4, dtype=torch.int16), torch.zeros(4)), TypeError, "got torch.int16"),
        ((torch.zeros(4, 4), torch.zeros(4)), ValueError, "expected a tensor of 1 dimensions, got 2"),
        ((torch.zeros(4), torch.zeros(1).expand(4)), ValueError, "an output may not be expanded"),
        ((torch.zeros(4), torch.zeros(4, dtype=torch.float64)), ValueError, "must share a dtype"),
    ],
)
def test_arguments_that_no_launcher_takes(operations, arguments, error, says):
    with pytest.raises(error, match=says):
        operations.simt("reversed", *arguments, 4)


def test_several_launches_at_once(operations):
    """Launches from several Python threads, each with its own shared memory and stacks."""
    results = {}

    def work(seed):
        x = torch.from_numpy(np.random.default_rng(seed).standard_normal(1024).astype(np.float32))
        for _ in range(20):
            y = torch.full((1024,), float("nan"))
            operations.simt("reversed", x, y, 1024)
            results.setdefault(seed, []).append(torch.equal(y, x.flip(0)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {seed: [True] * 20 for seed in range(6)}


def test_launch_after_fork(operations):
    """The device keeps no threads between launches, so a forked process has all it needs."""
    code = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
import torch
from stages.toolkit.kernels import load
module = load("operations._simt", Path({str(operations.paths["simt"])!r}))
x, y = torch.arange(64.0), torch.zeros(64)
module.run("reversed", x, y, 64, None)
child = os.fork()
if child == 0:
    z = torch.zeros(64)
    module.run("reversed", x, z, 64, None)
    os._exit(0 if z.tolist() == y.tolist() == x.tolist()[::-1] else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_interrupt_ends_a_long_launch(operations):
    """Ctrl-C while a kernel of many blocks runs: KeyboardInterrupt, soon, and the device works on."""
    import stages

    a = torch.randn(2048, 2048)
    stages.load("10").matmul(a[:32], a[:, :32])  # built
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(20):
            stages.load("10").matmul(a, a)
    assert time.monotonic() - begin < 5
    x, y = torch.arange(64.0), torch.zeros(64)
    operations.simt("reversed", x, y, 64)
    assert torch.equal(y, x.flip(0))


def test_interrupt_inside_a_long_block(operations):
    x, y = torch.arange(64.0), torch.zeros(64)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        operations.simt("long_block", x, y, 64)
    assert time.monotonic() - begin < 0.9
    operations.simt("reversed", x, y, 64)
    assert torch.equal(y, x.flip(0))


def test_settings(operations):
    module = operations.modules["simt"]
    for wrong in ({"schedule": "sideways"}, {"workers": -1}, {"timeout": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            module.configure(**wrong)
    facts = module.info()
    assert facts["warp_size"] == 32 and facts["workers"] >= 1 and "+" in facts["compiler"]
    assert tensor_names(module, "run") == ["x", "y"]
