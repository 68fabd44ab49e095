"""Stage 16 with one idea more at a time: what notebook 16 shows of a GPU, if it is recorded."""

import json

import pytest
import torch
from conftest import GPU

from stages.toolkit import ideas, lab
from stages.toolkit.errors import NotAvailable


def test_each_is_right_and_has_no_fault():
    """Several tiles of C for a block that stays, several steps for a ring."""
    size, found = (512, 768, 192), ideas.variants()
    assert list(found) == list(ideas.IDEAS)
    assert [kernel.changed for kernel in found.values()] == [True] * (len(found) - 1) + [False]
    for name, kernel in found.items():
        for schedule in ("forward", "random"):
            report = kernel.xray(*size, schedule=schedule, seed=1)
            assert not report.faults, (name, lab.faults(report))
            assert kernel.is_right(*size, schedule=schedule, seed=1), name


def test_a_text_that_is_another_one_is_refused(monkeypatch):
    monkeypatch.setitem(ideas.IDEAS, "one idea more", {"no such line": ""})
    with pytest.raises(ValueError, match="'no such line' is not in stages/16_matmul_hopper/kernel.cu"):
        ideas.variants()


def test_a_record_is_shown_of_the_kernel_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(ideas, "RECORD", tmp_path / "ideas.json")
    assert ideas.recorded() is None
    rows = [{"sizes": [100, 100, 100], "torch.matmul": 0.001, "ms": {"one tile": 0.004, "a ring": 0.002}}]
    ideas.RECORD.write_text(json.dumps({"kernel": "of another text", "rows": rows}))
    assert ideas.recorded() is None
    ideas.RECORD.write_text(json.dumps({"kernel": ideas.fingerprint(), "rows": rows}))
    header, lines = ideas.table(ideas.recorded())
    assert header == ["with", "100x100x100, ms", "TFLOP/s", "% of torch.matmul"]
    assert lines == [["one tile", "0.004", "0", "25.0"], ["a ring", "0.002", "1", "50.0"]]


def test_what_limits_it_is_told_of_the_last_size_and_kernel():
    rows = [{"sizes": [4096, 4096, 4096], "torch.matmul": 0.1, "ms": {"one tile": 0.4, "a ring": 0.1}}]
    load = {"ms": 0.2, "watts": 651.2, "most_watts": 700.0, "mhz": 1600.0, "most_mhz": 1980.0, "multiprocessors": 128}
    text = ideas.limit({"rows": rows, "load": load})
    assert "draws 651 of 700 W" in text and "at 1600 of 1980 MHz" in text
    assert text.endswith("at work in 82 %.")  # 4096^3 / 2048 / 128 = 262144 cycles of 320000


@pytest.mark.parametrize("answer", [None, "", "no devices were found", "1, 2, 3"])
def test_a_driver_that_does_not_tell(monkeypatch, answer):
    properties = type("Properties", (), {"uuid": "12"})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(ideas, "capture", lambda *command: answer)
    with pytest.raises(NotAvailable, match="does not tell the card's power and clock"):
        ideas.under_load(lambda: None, seconds=0)


def test_without_a_gpu_nothing_is_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ideas.main(["--out", str(tmp_path / "ideas.json")]) == 1
    assert "finds no GPU here" in capsys.readouterr().out and not list(tmp_path.iterdir())


@GPU
def test_a_record(tmp_path, monkeypatch):
    if why := lab.kernel(ideas.STAGE).stage.kernels.unable("cuda"):
        pytest.skip(why)
    monkeypatch.setattr(ideas, "SIZES", ((512, 512, 512),))
    assert ideas.main(["--out", str(tmp_path / "ideas.json")]) == 0
    (row,) = json.loads((tmp_path / "ideas.json").read_text())["rows"]
    assert list(row["ms"]) == list(ideas.IDEAS) and min(*row["ms"].values(), row["torch.matmul"]) > 0
    load = json.loads((tmp_path / "ideas.json").read_text())["load"]
    assert 0 < load["watts"] and 0 < load["mhz"] <= load["most_mhz"]
