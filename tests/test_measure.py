"""The commands that measure, as far as they go without a GPU."""

import json
import shutil
import statistics
from functools import partial

import pytest
import torch

import stages
from stages.toolkit import bench, check_cuda, machines, measure, nsight, resources
from stages.toolkit.errors import NotAvailable

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6matmulI{}EvPT_' for 'sm_90a'
ptxas info    : Function properties for _Z6matmulI{}EvPT_
    0 bytes stack frame, {} bytes spill stores, {} bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 8192 bytes smem, 400 bytes cmem[0]
"""


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A GPU that answers at once, and an Nsight Compute that is missing."""

    def bench(stage, sizes, dtype, device):
        if sizes == {"N": 1 << 28}:
            raise torch.cuda.OutOfMemoryError
        figures = dict.fromkeys(("ms", "incumbent_ms", "ratio", "gbytes_per_s", "tflops", "percent_of_limit"), 1.5)
        return {"stage": stage.name, "sizes": sizes, "dtype": str(dtype)[6:], "limit": "memory", **figures}

    def record(stages):
        raise NotAvailable("no ncu here")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Card")
    monkeypatch.setattr(measure.build, "build", lambda *_: None)
    monkeypatch.setattr(measure.bench, "bench", bench)
    monkeypatch.setattr(nsight, "machine", lambda: {"card": "A Card", "date": "2026-01-01"})
    monkeypatch.setattr(nsight, "record", record)
    kernel = {"kernel": "matmul<float>", "blocks": 9, "threads": 256, "registers": 40, "shared": 8192}
    monkeypatch.setattr(resources, "kernels", lambda *_: [dict(kernel)])
    monkeypatch.setattr(resources, "spilled", lambda *_: {"matmul<float>": 24})
    monkeypatch.setattr(resources, "of_card", lambda: ["9.0a"])


@pytest.mark.usefixtures("pretended_gpu")
def test_times_are_written_though_counts_cannot_be(tmp_path, capsys):
    assert measure.main(["--out", str(tmp_path / "here"), "--stages", "00,12"]) == 1
    out, err = capsys.readouterr()
    (written,) = machines.read(tmp_path / "here" / "bench.json")
    assert written["card"] == "A Card" and {r["date"] for r in written["records"]} == {"2026-01-01"}
    assert {(r["stage"], r["dtype"]) for r in written["records"]} == {
        (stage, dtype) for stage in ("00_axpy", "12_matmul_shared") for dtype in measure.DTYPES
    }
    assert not any(r["sizes"] == {"N": 1 << 28} for r in written["records"])
    assert all(r["kernels"][0]["registers"] == 40 and r["kernels"][0]["spilled"] == 24 for r in written["records"])
    assert "Medians on A Card" in out and "4096x4096x4096" in out
    assert "does not fit" in err and "error: no comparison with Nsight Compute: no ncu here" in err
    assert measure.main(["--out", str(tmp_path), "--stages", "00", "--skip", "nsight"]) == 0


@pytest.mark.usefixtures("pretended_gpu")
def test_times_are_written_though_the_kernels_cannot_be_asked(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise NotAvailable("no profiler")

    def not_compiled(*_):
        raise stages.BuildError("no nvcc")

    monkeypatch.setattr(resources, "kernels", fail)
    monkeypatch.setattr(resources, "spilled", not_compiled)
    assert measure.main(["--out", str(tmp_path), "--stages", "12", "--skip", "nsight"]) == 1
    (written,) = machines.read(tmp_path / "bench.json")
    assert written["records"] and not any("kernels" in r for r in written["records"])
    complaints = capsys.readouterr().err.splitlines()
    assert [line for line in complaints if line.startswith("error: ")] == [  # each once
        "error: 12_matmul_shared: no compiler's report: no nvcc",
        "error: 12_matmul_shared: its kernels' registers and shared memory are not known: no profiler",
    ]


@pytest.mark.usefixtures("pretended_gpu")
def test_a_dtype_that_a_stage_does_not_take_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.load("12"), "dtypes", (torch.bfloat16,), raising=False)
    assert {r["dtype"] for r in measure.times(["12_matmul_shared"], measure.DTYPES)} == {"bfloat16"}


@pytest.mark.usefixtures("pretended_gpu")
def test_a_stage_that_does_not_run_on_the_card_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(stages.load("12").kernels, "capability", "9.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Card")
    records = measure.times(["11_matmul_coalesced", "12_matmul_shared"], ["float32"])
    assert {r["stage"] for r in records} == {"11_matmul_coalesced"}
    words = "left out: 12_matmul_shared needs a GPU of compute capability 9.0, and A Card (cuda) has 8.0\n"
    assert words in capsys.readouterr().err


def test_what_a_dtype_needs_to_be_taken_is_recorded(monkeypatch):
    stage, seen = stages.load("12"), []
    monkeypatch.setattr(
        stage, "options", lambda dtype=torch.float32: ({"tf32": True} if dtype is torch.float32 else {},), raising=False
    )
    monkeypatch.setattr(bench, "_on_gpu", lambda stage, sizes, dtype: {})
    monkeypatch.setattr(stage, "function", lambda *arguments, **options: seen.append(options))
    for dtype in (torch.float32, torch.bfloat16):
        record = bench.bench(stage, stage.sizes((1, 2, 3)), dtype, "cuda")
        assert record.get("options", {}) == stage.options(dtype)[0]
        stage.function(**stage.options(dtype)[0])
    assert seen == [{"tf32": True}, {}]


# ---------------------------------------------------------------------------------------------------------------------
# Times


@pytest.fixture
def clock(monkeypatch):
    """A GPU whose clock sinks with every call; the log of (call, inputs). A call is its ms."""
    log = []

    def times(call, rotation, repeats):
        found = []
        for _, arguments in zip(range(repeats), rotation, strict=False):
            log.append((call, arguments))
            found.append(call * (1 + 0.01 * len(log)))
        return found

    monkeypatch.setattr(bench, "_event_times", times)
    return log


def test_calls_that_are_compared_take_turns(clock):
    inputs = [(i,) for i in range(7)]
    own, other = bench.in_turn((10.0, 20.0), inputs)
    assert own / other == pytest.approx(0.5, rel=0.07)  # while the clock has sunk to half
    assert clock[-1][0] == 20.0 and len(clock) > 100
    changes = sum(a[0] != b[0] for a, b in zip(clock, clock[1:], strict=False))
    assert changes >= 2 * bench.ROUNDS
    assert [arguments for _, arguments in clock] == [inputs[i % 7] for i in range(len(clock))]


def test_one_after_the_other_would_not_do(clock):
    rotation = iter(lambda: (), None)
    own, other = (statistics.median(bench._event_times(ms, rotation, 50)) for ms in (10.0, 20.0))
    assert abs(own / other - 0.5) > 0.1


def test_slow_calls_are_few(clock):
    bench.in_turn((500.0, 1.0), [()])
    slow = sum(call == 500.0 for call, _ in clock)
    assert slow == 2 + bench.FEW
    assert 40 <= sum(call == 1.0 for call, _ in clock) <= 70


def test_the_incumbent_is_compiled_for_each_of_many_problems(monkeypatch):
    problems, compile_with = [], torch.compile

    def backend(graph, inputs):
        problems.append(inputs[0].shape)
        return graph

    monkeypatch.setattr(torch, "compile", partial(compile_with, backend=backend))
    bench.compiled.cache_clear()
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):  # as they are without
        function = bench.compiled(lambda x: x + 1)
        for size in range(2, 22):
            function(torch.ones(size))
    bench.compiled.cache_clear()
    assert problems == [(size,) for size in range(2, 22)]


def test_a_function_of_several_results_has_a_backward():
    seen = []

    def function(x, y, n):
        seen.append((x.requires_grad, y.requires_grad, n))
        return x * y, torch.complex(x, y)

    x, y = torch.ones(3), torch.ones(3)
    bench.with_backward(function, [x, torch.complex(x, y)])(x, y, 7)
    assert seen == [(True, True, 7)] and not x.requires_grad


# ---------------------------------------------------------------------------------------------------------------------
# What the kernels take


def event(name, ts, registers=40, shared=8192, grid=(4, 2, 1), block=(16, 16, 1), cat="kernel"):
    facts = {"registers per thread": registers, "shared memory": shared, "grid": list(grid), "block": list(block)}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 3.2, "args": facts}


def test_reading_the_profiler():
    name = "void matmul_shared<__nv_bfloat16>(View<__nv_bfloat16 const, 2>, View<__nv_bfloat16, 2>)"
    trace = {
        "traceEvents": [
            event("second(float*)", 20.5),
            event(name, 10.25),
            event(name, 30.0),
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "args": {}},
            {"ph": "M", "name": "process_name", "args": {}},
        ]
    }
    facts = {"blocks": 8, "threads": 256, "registers": 40, "shared": 8192}
    assert resources.parse(trace) == [
        {"kernel": "matmul_shared<__nv_bfloat16>", **facts},
        {"kernel": "second", **facts},
    ]


def test_spills_from_the_compilers_report(monkeypatch):
    text = PTXAS.format("f", "f", 16, 24) + PTXAS.format("d", "d", 0, 0)
    monkeypatch.setattr(check_cuda.build, "make", lambda unit, runner: text)
    monkeypatch.setattr(check_cuda, "nvcc", lambda: check_cuda.build.Compiler(("nvcc",), "nvcc", "13"))
    assert resources.spilled("12_matmul_shared", ["9.0a"]) == {"matmul<float>": 40, "matmul<double>": 0}


@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not on PATH")
def test_the_compiler_and_the_profiler_call_a_kernel_alike():
    (kernel,) = resources.parse({"traceEvents": [event("void matmul_naive<float>(View<float const, 2>)", 1)]})
    assert kernel["kernel"] in resources.spilled("10_matmul_naive", ["9.0a"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_profiler_that_sees_no_kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(NotAvailable, match="saw no kernel"):
        resources.launched(torch.add, (torch.ones(2), torch.ones(2)))
    monkeypatch.setattr(resources.json, "loads", lambda text: {"traceEvents": [{"cat": "kernel", "ts": 1}]})
    with pytest.raises(NotAvailable, match="cannot be read: KeyError"):
        resources.launched(torch.add, (torch.ones(2), torch.ones(2)))


def test_kernels_are_added_to_their_record(monkeypatch):
    monkeypatch.setattr(resources, "of_card", lambda: ["9.0a"])
    monkeypatch.setattr(resources, "spilled", lambda *_: {"a<float>": 40})
    found = [{"kernel": "a<float>", "registers": 255}, {"kernel": "b", "registers": 16}]
    monkeypatch.setattr(resources, "kernels", lambda *_: found)
    record = {"stage": "12_matmul_shared", "sizes": {"M": 1, "N": 1, "K": 1}, "dtype": "float32"}
    assert measure.add_kernels([record]) == []
    assert [kernel["spilled"] for kernel in record["kernels"]] == [40, None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path, capsys):
    assert measure.main(["--out", str(tmp_path)]) == 1
    assert "finds no GPU here" in capsys.readouterr().err


@pytest.mark.usefixtures("pretended_gpu")
def test_what_was_measured_before_stays_with_its_machine(tmp_path, monkeypatch):
    def in_file():
        found = machines.read(tmp_path / "bench.json")
        for machine in found:
            assert len({json.dumps(r) for r in machine["records"]}) == len(machine["records"])
        return [(m["card"], {(r["stage"][:2], r["date"]) for r in m["records"]}) for m in found]

    def times(stages):
        assert measure.main(["--out", str(tmp_path), "--stages", stages, "--skip", "nsight"]) == 0

    for stage in ("12", "00", "12"):
        times(stage)
    old = "2026-01-01"
    assert in_file() == [("A Card", {("00", old), ("12", old)})]
    (before,) = machines.read(tmp_path / "bench.json")
    monkeypatch.setattr(nsight, "machine", lambda: {"card": "Another Card", "date": "2026-02-02"})
    times("10,12")
    assert in_file() == [("A Card", {("00", old)}), ("Another Card", {("10", "2026-02-02"), ("12", "2026-02-02")})]
    after = machines.read(tmp_path / "bench.json")
    assert after[0]["records"] == [r for r in before["records"] if r["stage"] == "00_axpy"]
    assert all(r["kernels"] for machine in after for r in machine["records"])
    monkeypatch.setattr(stages.load("12").kernels, "capability", "9.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A Third Card")
    monkeypatch.setattr(nsight, "machine", lambda: {"card": "A Third Card", "date": "2026-03-03"})
    times("10,12")  # one of which that card does not run
    assert in_file() == [
        ("A Card", {("00", old)}),
        ("Another Card", {("12", "2026-02-02")}),
        ("A Third Card", {("10", "2026-03-03")}),
    ]


@pytest.mark.usefixtures("pretended_gpu")
def test_counts_that_were_compared_before_stay_with_their_machine(tmp_path, monkeypatch):
    def record(card, stages):
        counted = {"size": [1], "dtype": "float32", "count": "load_sectors", "hardware": 1, "xray": 1, "reason": ""}
        rows = [{"stage": stage, **counted, "metric": nsight.METRICS["load_sectors"]} for stage in stages]
        return {"card": card, "date": "2026-01-01", "rows": rows}

    monkeypatch.setattr(nsight, "table", lambda rows: "")
    for card, chosen in (("A Card", "00,10,12"), ("Another Card", "10,11")):
        monkeypatch.setattr(nsight, "record", partial(record, card))
        assert measure.main(["--out", str(tmp_path), "--stages", chosen, "--skip", "bench"]) == 0
    found = [(m["card"], [r["stage"][:2] for r in m["rows"]]) for m in nsight.read(tmp_path / "nsight.json")]
    assert found == [("A Card", ["00", "12"]), ("Another Card", ["10", "11"])]
