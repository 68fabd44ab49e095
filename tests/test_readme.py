"""The README: its computed parts are current, its commands and its links lead somewhere, its code runs."""

import json
import re

import pytest
import torch

pytest.importorskip("matplotlib")

import stages  # noqa: E402
from stages.toolkit import build, chapter, cli, nsight, readme  # noqa: E402
from stages.toolkit.report import METRICS  # noqa: E402

TEXT = readme.README.read_text(encoding="utf-8")


def test_what_is_computed_is_current(capsys):
    assert readme.main(["--check"]) == 0, capsys.readouterr().out


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 10
    assert [link for link in links if "://" not in link and not (build.ROOT / link).exists()] == []


def test_commands_exist():
    known = set(cli.parser()._subparsers._group_actions[0].choices)
    named = set(re.findall(r"python -m stages ([a-z]+)", TEXT))
    assert {"run", "info", "diff", "xray"} <= named <= known
    for module in re.findall(r"python -m stages\.toolkit\.(\w+)", TEXT):
        assert (build.PACKAGE / "toolkit" / f"{module}.py").exists()
    assert "pip install -r requirements.txt -e '.[test]'" in TEXT  # .ci/run installs by this line
    assert re.search(
        r"^<!-- test-command -->\n```bash\npython -m pytest\n```$", TEXT, re.MULTILINE
    )  # and tests by this


def test_its_code_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(code.replace("fullgraph=True", "fullgraph=True, backend='aot_eager'"), {})  # the default takes its time
    assert capsys.readouterr().out == (
        "torch.Size([300, 100])\nChoice(stage='14_matmul_pipelined', reason='tensor cores would not keep all bits')\n"
    )


def test_marks_that_are_missing_are_named():
    with pytest.raises(ValueError, match="README.md has no <!-- stages:begin -->"):
        readme.refreshed(TEXT.replace("<!-- stages:begin -->", ""))


def test_another_dtype_than_float32_is_named(monkeypatch):
    stage = stages.load("12")
    (before,) = (line for line in readme.stages_table().splitlines() if line.startswith("| 12 |"))
    assert "| 256×256×256 | 4.25 MiB |" in before
    monkeypatch.setattr(stage, "dtypes", (torch.float16, torch.bfloat16))
    (line,) = (line for line in readme.stages_table().splitlines() if line.startswith("| 12 |"))
    assert "| 256×256×256, float16 | 2.12 MiB |" in line


def test_chapters_that_were_not_measured_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "MEASURED", tmp_path)
    (tmp_path / "bench.json").write_text(json.dumps([{"card": "A Card", "records": []}]))
    assert f"Chapter {', '.join(chapter.numbers())}: **Not measured yet.**" in readme.figures()
    assert readme.plots() == {}


def test_records_become_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "MEASURED", tmp_path)
    assert "Not measured yet" in readme.figures() and "Not compared yet" in readme.figures()
    assert "Not measured yet" in readme.device_cost()
    machine = {"card": "A Card", "driver": "1.2", "torch": "2", "ncu": "3"}
    other = {**machine, "card": "Another Card"}
    bench = {"stage": "12_matmul_shared", "sizes": {"M": 4096, "N": 4096, "K": 4096}, "dtype": "float32", "ms": 1.5}
    bench |= {"incumbent": "torch.matmul", "incumbent_ms": 0.5, "percent_of_limit": 12.34, "limit": "arithmetic"}
    bench |= {"ratio": 0.75, "date": "2026-01-01"}
    axpy = {**bench, "stage": "00_axpy", "sizes": {"N": 1 << 28}, "limit": "memory"}
    unitary = {**bench, "stage": "48_adaptive_unitary", "both_ms": 3.0, "incumbent_both_ms": 4.5}
    unitary["sizes"] = {"b": 16, "d": 32, "n": 64, "T": 16384}
    (tmp_path / "bench.json").write_text(json.dumps([{**machine, "records": [bench, axpy, unitary]}]))
    row = {"stage": "12_matmul_shared", "size": [1], "dtype": "float32", "xray": 2, "reason": "", "date": "2026-01-01"}
    rows = [{**row, "count": name, "hardware": 2} for name in METRICS]
    rows[4] |= {"hardware": 1, "reason": nsight.MERGED}
    nsight.write(tmp_path / "nsight.json", [{**machine, "rows": rows}])
    text = readme.figures()
    assert "| 12\u00a0shared | float32 | 1.5 | 75.0 | 12.3 | – |" in text
    assert "**Chapter 1, matmul**, on one A Card, driver 1.2, torch 2, 2026-01-01; medians." in text
    assert "![Speed in percent of cuBLAS at 4096³, A Card, 2026-01-01. float32: 12 shared 75.0 %.]" in text
    assert list(readme.plots()) == ["notebooks/chapter_1.png"]
    assert (
        "00_axpy at 268,435,456 beside `torch.add(y, x, alpha=alpha)`, on one A Card, 2026-01-01: float32 1.5 ms "
        "against 0.5 ms, 12.3 % of what the card gave in copying."
    ) in text
    assert (
        "48_adaptive_unitary at 16×32×64×16,384 beside `torch.compile(formula)`, on one A Card, 2026-01-01: float32 "
        "1.5 ms against 0.5 ms, 12.3 % of what the card gave in multiplying, with the backward 3 ms against 4.5 ms."
    ) in text
    assert "Chapter 2, 3" in text and "Chapter 2, 3, 4" not in text  # were not measured
    assert "Nsight Compute 3 on one A Card: 8 of 9 are equal, all 4 requests and sectors" in text
    assert f"- 1: {nsight.MERGED}" in text
    rows[0]["hardware"] = 1
    nsight.write(tmp_path / "nsight.json", [{**machine, "rows": rows}])
    assert "3 of 4 requests and sectors" in readme.figures()

    unitary["date"] = "2026-02-02"
    both = [{**machine, "records": [bench, axpy]}, {**other, "records": [unitary]}]
    (tmp_path / "bench.json").write_text(json.dumps(both))
    more = [{**rows[1], "stage": stage} for stage in ("50_discretize", "60_lstm_cell")]
    nsight.write(tmp_path / "nsight.json", [{**machine, "rows": rows}, {**other, "rows": more}])
    text = readme.figures()
    assert "**Chapter 1, matmul**, on one A Card, driver 1.2" in text
    assert "alpha=alpha)`, on one A Card, 2026-01-01: float32 1.5 ms" in text
    assert "`torch.compile(formula)`, on one Another Card, 2026-02-02: float32 1.5 ms" in text
    assert "Nsight Compute 3 on one A Card, stage 12: 7 of 9 are equal, 3 of 4 requests and sectors" in text
    assert "Nsight Compute 3 on one Another Card, stages 50, 60: 2 of 2 are equal, all 2 requests" in text
