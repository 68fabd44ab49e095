"""The commands that measure, as far as they go without a GPU."""

import json

import pytest
import torch

from stages.toolkit import measure, nsight
from stages.toolkit.errors import NotAvailable


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
    monkeypatch.setattr(nsight, "machine", lambda: {"card": "A Card"})
    monkeypatch.setattr(nsight, "record", record)


@pytest.mark.usefixtures("pretended_gpu")
def test_times_are_written_though_counts_cannot_be(tmp_path, capsys):
    assert measure.main(["--out", str(tmp_path / "here"), "--stages", "00,12"]) == 1
    out, err = capsys.readouterr()
    written = json.loads((tmp_path / "here" / "bench.json").read_text())
    assert written["card"] == "A Card"
    assert {(r["stage"], r["dtype"]) for r in written["records"]} == {
        (stage, dtype) for stage in ("00_axpy", "12_matmul_shared") for dtype in measure.DTYPES
    }
    assert not any(r["sizes"] == {"N": 1 << 28} for r in written["records"])
    assert "Medians on A Card" in out and "4096x4096x4096" in out
    assert "does not fit" in err and "error: no comparison with Nsight Compute: no ncu here" in err
    assert measure.main(["--out", str(tmp_path), "--stages", "00", "--skip", "nsight"]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path, capsys):
    assert measure.main(["--out", str(tmp_path)]) == 1
    assert "finds no GPU here" in capsys.readouterr().err
