"""The benchmark of the CPU device: that it measures, not what it finds on a machine that does other things as well."""

import json

from stages.toolkit import device_cost


def test_a_short_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device_cost, "SIZE", 64)
    monkeypatch.setattr(device_cost, "BLOCKS", 4)
    code = device_cost.main(["--seconds", "0", "--json", str(tmp_path / "cost.json")])
    out = capsys.readouterr().out
    assert code == int("MISSED" in out)
    record = json.loads((tmp_path / "cost.json").read_text())
    assert record["cores"] >= 1 and record["cpu"] and record["compiler"]
    assert all(ms > 0 for ms in record["ms"].values())
    assert {f"{name}_{kind}1" for name in ("naive", "tiled") for kind in ("", "plain_", "xray_")} <= set(record["ms"])
    assert set(record["ratios"]) <= set(device_cost.TARGETS)
    assert "tiled kernel, to plain tiled loops, one core" in out
