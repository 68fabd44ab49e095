"""Stages side by side while a size grows: what is measured, the tables, the plot. A GPU's figures here are made up."""

import json

import pytest
import torch

import stages
from stages.families import matmul, scan
from stages.toolkit import against, bench, cli

SCANS = [stages.load(number) for number in ("40", "44")]


def problems(*lengths):
    return [{"B": 2, "T": seq, "D": 3} for seq in lengths]


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A GPU that computes what the CPU device computes, and takes 1 ms for the first call, 2 for the second, ..."""
    make = scan.make
    monkeypatch.setattr(
        scan, "make", lambda sizes, dtype, device="cpu", seed=0, **options: make(sizes, dtype, **options)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Card (made up)")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench, "rotated", lambda arguments: [tuple(x.clone() for x in arguments)] * 3)
    monkeypatch.setattr(bench, "compiled", lambda function: function)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 3e12)
    monkeypatch.setattr(bench, "matmul_rate", lambda dtype, tf32=False: 50e12)

    def in_turn(calls, inputs):
        for call in calls:
            for arguments in inputs:
                call(*arguments)
        return [1.0 + i for i in range(len(calls))]

    monkeypatch.setattr(bench, "in_turn", in_turn)


def test_on_the_cpu_device():
    records = list(against.measure(SCANS, problems(8, 16), torch.float32, "cpu"))
    assert [(r["line"], r["sizes"]["T"]) for r in records] == [
        (line, seq) for seq in (8, 16) for line in ("40 sequential", "44 warp, time_dim=2")
    ]
    assert all(0 < r["ms"] and 0 < r["both_ms"] and r["cores"] for r in records)
    text = against.text(records)
    assert text.startswith("B = 2, D = 3, float32, the CPU device on ")
    assert "its own cost, not a GPU's" in text and "torch.compile" not in text and against.LIMIT not in text
    assert text.count("44 warp, time_dim=2") == 2 and "forward and backward, ms" in text


def test_options_that_are_wanted():
    of = [stages.load(number) for number in ("40", "44", "45")]
    records = list(against.measure(of, problems(8), torch.float32, "cpu", {"time_dim": 2}))
    expected = ["40 sequential, time_dim=2", "44 warp, time_dim=2", "45 lookback, time_dim=2"]
    assert [r["line"] for r in records] == expected
    for device in ("cpu", "cuda"):
        assert list(against.measure(of[:1], problems(8), torch.float32, device, {"time_dim": 3})) == []


def test_a_stage_without_a_backward_has_no_time_for_it():
    of = [stages.load("21"), stages.load("22")]
    sizes = [dict(zip(of[0].family.SIZES, (1, 1, seq, 4, 4), strict=True)) for seq in (4, 8)]
    records = list(against.measure(of, sizes, torch.float32, "cpu"))
    assert list(against.series(records, "both_ms")) == ["22 fused"]
    assert list(against.series(records, "ms")) == ["21 split_grid", "22 fused"]


@pytest.mark.usefixtures("pretended_gpu")
def test_on_a_gpu():
    records = list(against.measure(SCANS, problems(1 << 10, 1 << 20)[:1], torch.float32, "cuda"))
    assert [(r["line"], r["ms"]) for r in records[:3]] == [
        *(("40 sequential", 1.0), ("44 warp, time_dim=2", 2.0), ("torch.compile(formula)", 3.0)),
    ]
    assert [r["both_ms"] for r in records[:3]] == [1.0, 2.0, 3.0]
    limit = records[3]
    elements = 2 * (1 << 10) * 3
    assert limit["line"] == against.LIMIT
    assert limit["ms"] == pytest.approx(elements * 12 / 3e9, rel=0.01)
    assert limit["both_ms"] == pytest.approx(elements * 32 / 3e9, rel=0.01)
    assert against.text(records).startswith("T = 1024, D = 3, float32, on one A Card (made up)")


@pytest.mark.usefixtures("pretended_gpu")
def test_what_does_not_fit_is_left_out(monkeypatch, capsys):
    def too_much(*arguments, **options):
        if arguments[0].shape[1] > 8 or arguments[0].requires_grad:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 TiB")
        return incumbent(*arguments, **options)

    incumbent = scan.incumbent
    monkeypatch.setattr(scan, "incumbent", too_much)
    records = list(against.measure(SCANS[:1], problems(8, 16), torch.float32, "cuda"))
    forward, both = (against.series(records, key) for key in ("ms", "both_ms"))
    assert list(forward["torch.compile(formula)"]) == [8] and "torch.compile(formula)" not in both
    assert list(forward["40 sequential"]) == list(both["40 sequential"]) == [8, 16]
    complaint = capsys.readouterr().err
    assert "torch.compile(formula) with its backward: left out at (2, 8, 3): CUDA out of memory\n" in complaint
    assert "torch.compile(formula): left out at (2, 16, 3): CUDA out of memory\n" in complaint
    assert "–" in against.text(records)


def test_the_size_that_grows():
    assert against.growing(problems(1, 2)) == "T"
    assert against.growing([{"M": n, "N": n, "K": n} for n in (1, 2)]) == "M = N = K"
    assert against.growing([{"M": n, "N": 1, "K": n} for n in (1, 2)]) == "M = K"
    assert against.growing([{"M": n, "N": 3 - n, "K": 1} for n in (1, 2)]) is None
    assert against.growing(problems(5)) == "B"


@pytest.mark.usefixtures("pretended_gpu")
def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    records = list(against.measure(SCANS, problems(64, 256, 1024), torch.float32, "cuda"))
    against.plot(records, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    against.plot(records, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()


# ---- the command


@pytest.fixture
def call(capsys):
    def run(*arguments):
        return (cli.main(arguments), *capsys.readouterr())

    return run


def test_bench_of_several_stages(call, tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ("--size", "1,8,4", "--size", "1,16,4", "--device", "cpu")
    code, out, err = call("bench", "40", "41", *sizes, "--plot", str(tmp_path / "a.png"))
    assert code == 0
    assert out.startswith("scan, B = 1, D = 4, float32, the CPU device on ") and "41 pipelined" in out
    assert err == "scan: 1 x 8 x 4\nscan: 1 x 16 x 4\n"
    assert (tmp_path / "a.png").exists()
    code, out, _ = call("bench", "40", "41", *sizes, "--json", "--dtype", "bfloat16")
    assert code == 0
    assert [(r["stage"][:2], r["sizes"]["T"]) for r in json.loads(out)] == [
        ("40", 8),
        ("41", 8),
        ("40", 16),
        ("41", 16),
    ]


def test_bench_of_a_function_is_of_all_its_stages_that_take_the_dtype(call, monkeypatch):
    asked = []

    def measure(chosen, sizes, dtype, device, wanted):
        asked.append(([stage.number for stage in chosen], [tuple(s.values()) for s in sizes], dtype, device))
        return iter(())

    monkeypatch.setattr(against, "measure", measure)
    assert call("bench", "matmul", "--device", "cpu", "--dtype", "float64")[0] == 1
    assert asked[0] == (["10", "11", "12", "13", "14"], list(matmul.BENCH["cpu"]), torch.float64, "cpu")
    assert call("bench", "scan", "--device", "cpu")[2] == "error: nothing could be measured\n"
    assert asked[1][1] == list(scan.SWEEP["cpu"]) and {"40", "41", "44", "45"} <= set(asked[1][0])


def test_ctrl_c_leaves_what_was_measured(call, monkeypatch):
    def measure(*_):
        yield {"line": "40 sequential", "stage": "40", "sizes": {"T": 4}, "dtype": "float32", "ms": 1.5} | cpu
        raise KeyboardInterrupt

    cpu = {"device": "cpu", "cores": 2}
    monkeypatch.setattr(against, "measure", measure)
    code, out, err = call("bench", "scan", "--device", "cpu")
    assert code == 130 and "40 sequential  1.5" in out and err.endswith("interrupted\n")

    def one(stage, sizes, *_):
        if sizes["T"] > 4:
            raise KeyboardInterrupt
        return {"sizes": sizes, "dtype": "float32", **cpu, **dict.fromkeys(columns, 1.5)}

    columns = ("ms", "threads", "ns_per_thread", "xray_ms", "xray_ratio")
    monkeypatch.setattr(bench, "bench", one)
    code, out, err = call("bench", "40", "--device", "cpu", "--size", "1,4,2", "--size", "1,5,2")
    assert code == 130 and "1 x 4 x 2  1.5" in out and "1 x 5 x 2" not in out and err.endswith("interrupted\n")
    assert call("bench", "40", "--device", "cpu", "--size", "1,5,2") == (130, "", "interrupted\n")


def test_bench_with_an_option(call):
    sizes = ("--size", "1,8,4", "--device", "cpu")
    code, out, _ = call("bench", "45", *sizes, "--option", "time_dim=2", "--option", "reverse=True")
    assert code == 0 and "45 lookback, time_dim=2 reverse=True" in out
    assert call("bench", "45", *sizes, "--option", "way=round")[2] == "error: nothing could be measured\n"


def test_what_cannot_be_compared(call):
    code, _, err = call("bench", "45", "--option", "reverse")
    assert (code, err) == (2, "error: --option reverse: allowed: an option and its value, such as time_dim=2\n")
    code, _, err = call("bench", "12", "41")
    assert (code, err) == (2, "error: bench 12 41: allowed: stages of one function; these are 12 matmul, 41 scan\n")
    code, _, err = call("bench", "scan", "--size", "1,2,3", "--size", "2,3,3")
    assert (code, err) == (2, "error: --size: allowed: problems that differ in one size of B, T, D\n")
    code, _, err = call("bench", "scan", "--dtype", "int8")
    assert code == 2 and err.startswith("error: --dtype int8: allowed: float64, float32")
