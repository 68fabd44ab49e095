"""Rounding errors after many steps: what is recorded is that of the kernels as they are, and can be measured again."""

import pytest
import torch

import stages
from stages.families import scan
from stages.toolkit import accuracy, build, cli, device

RECORD = accuracy.read_record()
NAMES = [stage.name for stage in accuracy.stages()]


@pytest.fixture
def short(monkeypatch, tmp_path):
    """300 steps instead, and a record of its own."""
    make = scan.make_long

    def make_short(*arguments, **options):
        dim = options.get("time_dim", 1)
        return tuple(
            tuple(x.narrow(dim, 0, 300) if x.dim() == 3 else x for x in tensors)
            for tensors in make(*arguments, **options)
        )

    monkeypatch.setattr(scan, "make_long", make_short)
    monkeypatch.setattr(accuracy, "PATH", tmp_path / "accuracy.json")
    accuracy._truth.cache_clear()
    yield
    accuracy._truth.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_of_the_present_kernel(name):
    """By `python -m stages accuracy NN --record`, which is to be run after a change of a kernel."""
    own = RECORD["stages"][name]
    assert own["kernel"] == accuracy.fingerprint(name)
    dtypes = [str(dtype)[6:] for dtype in accuracy.DTYPES if dtype in stages.load(name).dtypes]
    assert list(dict.fromkeys(entry["dtype"] for entry in own["entries"])) == dtypes
    for entry in own["entries"]:
        assert list(entry["errors"]) == ["output", "a", "b", "h0"]
        most = 5e-3 if entry["dtype"] == "bfloat16" else 1e-4
        assert all(0 < error < most for error in entry["errors"].values())


def test_the_record_holds_nothing_else():
    assert set(RECORD["stages"]) == {*NAMES, accuracy.FORMULA}
    assert {"device", "processor", "compiler", "date"} <= set(RECORD)


def test_measured_again_a_stage_has_the_same_errors():
    name = "44_scan_warp"
    again = accuracy.measure(stages.load(name))
    recorded = RECORD["stages"][name]["entries"]
    assert [(e["dtype"], e["options"]) for e in again] == [(e["dtype"], e["options"]) for e in recorded]
    # Another compiler may make one rounding of a multiplication and an addition.
    same = (RECORD["compiler"], RECORD["processor"][-6:]) == (build.host_compiler().version, device.processor()[-6:])
    for entry, old in zip(again, recorded, strict=True):
        assert entry["errors"] == (old["errors"] if same else pytest.approx(old["errors"], rel=1))


@pytest.mark.usefixtures("short")
def test_errors_are_those_of_the_function():
    def rounded(a, b, h0, **options):
        return scan.reference(a, b, h0, **options).bfloat16().to(a.dtype)

    def wrong(a, b, h0, **options):
        return 1.5 * scan.reference(a, b, h0, **options).to(a.dtype)

    for options in ({}, {"time_dim": 2}):
        exact = accuracy.compare(scan, scan.reference, torch.float64, "cpu", options)
        assert exact == dict.fromkeys(("output", "a", "b", "h0"), 0)
        assert 1e-4 < accuracy.compare(scan, rounded, torch.float32, "cpu", options)["output"] < 3e-3
        found = accuracy.compare(scan, wrong, torch.float32, "cpu", options)
        assert found == pytest.approx(dict.fromkeys(exact, 0.5), rel=1e-3)


@pytest.mark.usefixtures("short")
def test_layouts_with_the_same_errors_are_one_entry():
    found = accuracy.measure(stages.load("40"))
    assert [(entry["dtype"], entry["options"]) for entry in found] == [("float32", {}), ("bfloat16", {})]


@pytest.mark.usefixtures("short")
def test_the_command(capsys):
    assert cli.main(["accuracy", "40", "41", "--record"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("scan: B = 1, T = 65,536") and "gradient of h0" in out and "the formula in torch" in out
    assert max(map(len, out.splitlines()[2:])) <= 100
    record = accuracy.read_record()
    assert set(record["stages"]) == {"40_scan_sequential", "41_scan_pipelined", accuracy.FORMULA}
    assert record["stages"]["41_scan_pipelined"]["entries"] == accuracy.measure(stages.load("41"))
    assert cli.main(["accuracy", "44", "--record"]) == 0
    assert len(accuracy.read_record()["stages"]) == 4
    capsys.readouterr()
    assert cli.main(["accuracy", "12"]) == 2
    assert capsys.readouterr().err.startswith("error: accuracy 12: allowed: stages with many steps, 40, 41, ")
