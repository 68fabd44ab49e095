"""The x-ray from Python: recordings, the report, faults told with their lines."""

import json

import pytest
import torch

import stages
from stages.toolkit import build, render, symbols, xray
from stages.toolkit.report import METRICS, Counts

STAGE = "12_matmul_shared"


@pytest.fixture(scope="module")
def report():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    return stages.load("12").xray(a, b, trace=100)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """X-rays stage 12 with pieces of its source replaced."""

    def run(changes: dict[str, str], sizes=(40, 33, 35)):
        folder = build.PACKAGE / STAGE
        source = (folder / "kernel.cu").read_text()
        for old, new in changes.items():
            assert old in source
            source = source.replace(old, new)
        changed = tmp_path_factory.mktemp("broken") / "kernel.cu"
        changed.write_text(source)
        module = build.build_module(changed, folder / "binding.cpp", "xray", changed.parent)
        stage = stages.load("12")
        with stage.kernels.replaced(xray=module):
            return changed, stage.xray(*stage.family.make(stage.sizes(sizes), torch.float32))

    return run


def test_lines_are_those_of_the_kernel(report):
    source = (build.PACKAGE / STAGE / "kernel.cu").read_text().splitlines()
    assert {site.name for site in report.sites} == {"a", "b", "c", "a_tile", "b_tile"}
    for site in report.sites:
        assert site.line.file.endswith(f"{STAGE}/kernel.cu")
        assert site.line.text == source[site.line.number - 1].strip()
        assert site.name in site.line.text


def test_sums_agree(report):
    counts = report.counts()
    traffic = report.traffic()
    assert counts.load_sectors == sum(t.sectors for t in traffic if (t.op, t.space) == ("load", "global"))
    assert counts.shared_load_wavefronts == sum(t.wavefronts for t in traffic if (t.op, t.space) == ("load", "shared"))
    assert all(t.bytes_moved == 32 * t.sectors for t in traffic)
    (c,) = (t for t in traffic if t.name == "c")
    assert (c.op, c.bytes_asked, c.bytes_moved) == ("store", 64 * 64 * 4, 64 * 64 * 4)
    assert report.metrics() == {metric: getattr(counts, name) for name, metric in METRICS.items()}


def test_two_calls_add_up():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    with xray.recording() as once:
        stages.load("12").matmul(a, b)
    with xray.recording() as twice:
        stages.load("12").matmul(a, b)
        stages.load("12").matmul(a, b)
    assert len(twice.launches) == 2
    assert twice.counts() == Counts(**{name: 2 * count for name, count in vars(once.counts()).items()})
    assert len(twice.sites) == len(once.sites)


def test_several_stages_in_one_recording():
    x = torch.ones(32, 32)
    with xray.recording() as report:
        stages.load("00").axpy(2.0, x, stages.load("12").matmul(x, x))
    assert {launch.stage for launch in report.launches} == {"00_axpy", STAGE}
    assert "00_axpy" in report.text() and STAGE in report.text()


def test_trace_holds_single_requests(report):
    assert len(report.trace) == 100
    first = next(access for access in report.trace if access.name == "a")
    assert (first.stage, first.op, first.space, first.size) == (STAGE, "load", "global", 4)
    assert first.offsets == tuple(range(first.offsets[0], first.offsets[0] + 128, 4))


def test_text_fits_a_terminal_and_json_holds_everything(report):
    assert max(map(len, report.text().splitlines())) <= render.WIDTH
    assert "No faults." in report.text()
    data = json.loads(json.dumps(report.to_json()))
    assert len(data["lines"]) == len(report.sites) and len(data["trace"]) == 100
    assert data["metrics"] == report.metrics()
    assert data["lines"][0]["line"]["file"].startswith("kernel.cu:")


def test_recordings_are_one_at_a_time_and_end():
    with xray.recording():
        with pytest.raises(RuntimeError, match="already recording"), xray.recording():
            pass
    with pytest.raises(ValueError, match="schedule is 'sideways'; allowed: forward, reverse, random"):
        with xray.recording("sideways"):
            pass
    with pytest.raises(ZeroDivisionError), xray.recording() as report:
        stages.load("00").axpy(1.0, torch.ones(3), torch.ones(3))
        raise ZeroDivisionError
    assert len(report.launches) == 1  # what was seen before is kept
    with xray.recording() as report:
        pass
    assert report.counts() == Counts()
    assert "No kernel was launched" in report.text()


def test_without_addr2line_offsets_are_shown(monkeypatch):
    monkeypatch.setattr(symbols, "available", lambda: False)
    report = stages.load("00").xray(1.0, torch.ones(3), torch.ones(3))
    assert all("+0x" in str(site.line) for site in report.sites)
    assert "addr2line" in report.text()


def test_a_missing_barrier_is_a_race_between_two_lines(broken):
    path, report = broken({"__syncthreads();  // both": "// both"})
    races = [fault for fault in report.faults if fault.kind == "race"]
    assert races
    source = path.read_text().splitlines()
    for fault in races:
        assert fault.line.file == fault.other_line.file == str(path)
        assert "_tile" in source[fault.line.number - 1] and "_tile" in source[fault.other_line.number - 1]
        assert str(fault).startswith(f"race: kernel.cu:{fault.line.number}, thread (")
    assert max(map(len, report.text().splitlines())) <= render.WIDTH
    with pytest.raises(stages.KernelFault, match="race: kernel.cu"):
        report.raise_if_faulty()


def test_a_copy_that_nobody_waits_for_is_told_with_both_lines(broken):
    old = "a_tile[y][x] = row < rows && k0 + x < inner ? a(row, k0 + x) : T(0);"
    copy = "async_copy<4>(&a_tile[y][x], &a(row, k0 + x), row < rows && k0 + x < inner);"
    path, report = broken({'"common/device.h"': '"common/async_copy.h"', old: f"if constexpr (sizeof(T) == 4) {copy}"})
    source = path.read_text().splitlines()
    issued = next(number for number, text in enumerate(source, 1) if "async_copy<4>" in text)
    found = [fault for fault in report.faults if fault.kind == "copy in flight"]
    assert found
    for fault in found:
        assert fault.other_line.number == issued and "a_tile" in source[fault.line.number - 1]
        assert str(fault).startswith(f"copy in flight: kernel.cu:{fault.line.number}, thread (")
        assert f"of shared array a_tile, which the copy of kernel.cu:{issued}, thread (" in str(fault)
        assert "has not brought yet" in str(fault)
    assert f"kernel.cu:{issued}  if constexpr" in report.text()
    counts = {(site.op, site.name): site for site in report.sites if site.line.number == issued}
    assert counts.keys() == {("load", "a"), ("copy", "a_tile")}
    assert counts["load", "a"].bytes_asked == 4 * counts["load", "a"].lanes


def test_a_fault_that_ends_the_kernel_is_an_exception_with_lines(broken):
    barrier = "__syncthreads();  // both"
    with pytest.raises(stages.KernelFault, match=r"kernel\.cu:\d+") as caught:
        broken({barrier: f"if (y != 0) {barrier}"})
    assert "{pc" not in str(caught.value)
    a, b = torch.randn(33, 20), torch.randn(20, 31)
    torch.testing.assert_close(stages.load("12").matmul(a, b), a @ b)  # the next launch works
