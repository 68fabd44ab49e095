"""The table and the plot of a chapter, from made-up records."""

import copy

import pytest
import torch

pytest.importorskip("matplotlib")

from conftest import XRAYED  # noqa: E402

import stages  # noqa: E402
from stages.toolkit import chapter  # noqa: E402
from stages.toolkit.errors import StageNotFound  # noqa: E402
from stages.toolkit.report import SECTOR  # noqa: E402

MACHINE = {"card": "A Card", "driver": "1.2", "torch": "2"}
OTHER = {"card": "Another Card", "driver": "1.2", "torch": "2"}


def record(stage, size, dtype="float32", ms=2.0, ratio=0.5, **more):
    sizes = dict(zip("MNK", (size,) * 3, strict=True))
    figures = {"ms": ms, "incumbent_ms": ms * ratio, "ratio": ratio, "percent_of_limit": 40.0, "limit": "arithmetic"}
    what = {"stage": stage, "sizes": sizes, "dtype": dtype, "date": "2026-01-01", "incumbent": "torch.matmul"}
    return {**what, **figures, **more}


def kernel(registers=40, shared=8192, spilled=0):
    return {
        "kernel": "k<float>",
        "blocks": 9,
        "threads": 256,
        "registers": registers,
        "shared": shared,
        "spilled": spilled,
    }


def of(*records):
    return chapter.chapter("1", [{**MACHINE, "records": list(records)}])


def of_two(records, others):
    """The chapter from the records of two machines; the same in whatever order the file has them."""
    both = [{**MACHINE, "records": records}, {**OTHER, "records": others}]
    shown, turned = chapter.chapter("1", both), chapter.chapter("1", both[::-1])
    assert chapter.markdown(shown) == chapter.markdown(turned)
    return shown


def cells(shown, name, dtype="float32"):
    """The cells of a row by their headings, as the page has them."""
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in chapter.markdown(shown).split("\n") if "|" in line
    ]
    header, _, *rows = lines
    stage = ""
    for row in rows:
        stage = row[0] or stage
        if stage.replace("\u00a0", " ") == name and row[1] == dtype:
            return list(zip(header, row, strict=True))[2:]
    raise AssertionError(f"no row {name}, {dtype}")


def test_a_row_has_what_was_measured():
    shown = of(
        record("12_matmul_shared", 1024, ms=77.0),
        record("12_matmul_shared", 4096, ratio=0.1234, kernels=[kernel()]),
        record("12_matmul_shared", 8192, ms=1234.5, ratio=1.25),
    )
    assert cells(shown, "12 shared") == [
        ("4096³, ms", "2"),
        ("% of cuBLAS", "12.3"),
        ("% of card", "40.0"),
        ("8192³, ms", "1,234"),
        ("% of cuBLAS", "125"),
        ("bytes a flop", "0.125"),
        ("regs", "40"),
        ("shared, KiB", "8"),
    ]
    text = chapter.markdown(shown)
    assert text.startswith("**Chapter 1, matmul**, on one A Card, driver 1.2, torch 2, 2026-01-01; medians.")
    assert "is as fast as `torch.matmul`, which calls it; float32 without TF32" in text
    assert "what the card gave in the same run in multiplying, at 4096³." in text


def test_what_is_missing_is_a_dash():
    old = record("12_matmul_shared", 4096)  # as records were before the kernels were told
    shown = of(old)
    values = [cell for _, cell in cells(shown, "12 shared")]
    assert values == ["2", "50.0", "40.0", "–", "–", "0.125", "–", "–"]
    assert [cell for _, cell in cells(shown, "13 register")][:5] == ["–"] * 5
    assert "–: not measured." in chapter.markdown(shown)
    everywhere = [
        record(name, size, kernels=[kernel()], options=stages.load(name).options()[0])
        for name in stages.names()
        if name.startswith("1")
        for size in (4096, 8192)
    ]
    full = chapter.markdown(of(*everywhere))
    assert "–" not in full


def test_nothing_measured():
    for recorded in ([], [{**MACHINE, "records": []}]):
        shown = chapter.chapter("1", recorded)
        assert chapter.markdown(shown).startswith("**Not measured yet.**")
        assert chapter.text(shown).startswith("Not measured yet.")
        assert chapter.plot(shown) is None


def test_several_kernels_and_spills():
    several = [kernel(32, 0), kernel(32, 49152, spilled=24), kernel(64, 49152, spilled=None)]
    shown = of(record("12_matmul_shared", 4096), record("12_matmul_shared", 8192, kernels=several))
    assert cells(shown, "12 shared")[-2:] == [("regs", "32 + 64"), ("shared, KiB", "0 + 48")]
    assert "12 shared spills 24 bytes in float32." in chapter.markdown(shown)


def test_dtypes_and_options_of_a_stage():
    shown = of(
        record("15_matmul_tensor", 4096, ms=9.0),  # from before the stage took an option
        record("15_matmul_tensor", 4096, options={"tf32": True}, ms=3.0),
        record("15_matmul_tensor", 4096, "bfloat16", ms=4.0),
        record("12_matmul_shared", 4096, "float16"),
    )
    assert cells(shown, "15 tensor", "float32 as tf32")[0] == ("4096³, ms", "3")
    assert cells(shown, "15 tensor", "bfloat16")[0] == ("4096³, ms", "4")
    dtypes = [row.dtype for row in shown.rows if row.stage is stages.load("15")]
    assert dtypes == ["float32 as tf32", "bfloat16", "float16"]
    assert "float32 without TF32; float32 as tf32 with it." in chapter.markdown(shown)
    assert "15 tensor 50.0 %" in chapter.plot(shown).words.partition("float32 as tf32: ")[2]


def test_for_a_terminal():
    rows = [record(name, 4096, dtype) for name in stages.names()[1:] for dtype in ("float32", "bfloat16")]
    text = chapter.text(of(*rows))
    assert max(map(len, text.splitlines())) <= 100
    assert "`" not in text and "**" not in text
    assert text.count("13 register") == 1  # and the line of bfloat16 below it


COSTED = [name for name in XRAYED if stages.load(name).cost]  # of the others there are no closed forms


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in COSTED for d in ("float32", "bfloat16") if getattr(torch, d) in stages.load(n).dtypes],
)
def test_bytes_are_those_of_the_xray(name, dtype):
    stage = stages.load(name)
    size = tuple(2 * n for n in stage.aligned) if len(stage.aligned) > 1 else (512,)
    options = stage.options(getattr(torch, dtype))[0]
    report = stage.xray(*stage.family.make(stage.sizes(size), getattr(torch, dtype), **options), **options)
    moved = sum(traffic.bytes_moved for traffic in report.traffic("global"))
    operations = stage.family.work(stage.sizes(size), 4, **options).operations
    assert chapter.bytes_per_flop(stage, size, dtype) * operations == pytest.approx(moved)
    assert moved % SECTOR == 0


def test_bytes_where_the_closed_forms_do_not_hold():
    assert chapter.bytes_per_flop(stages.load("12"), (4096, 4096, 4095), "float32") is None
    for name, size in (("46", (1, 4096, 4096)), ("53", (8, 16, 4))):  # there are none
        assert chapter.bytes_per_flop(stages.load(name), size, "float32") is None


def test_sizes_read_well():
    assert [chapter.size_name(size) for size in ((4096,) * 3, (1 << 24,), (3, 4, 4), (1000,))] == [
        *("4096³", "2²⁴", "3×4×4", "1,000"),
    ]


def test_chapters():
    assert chapter.numbers() == sorted({name[0] for name in stages.names()})
    assert chapter.chapter("0", []).library == "torch.add"
    with pytest.raises(StageNotFound, match="no chapter is called '77'; there are: 0, 1"):
        chapter.chapter("77", [])


def test_a_family_of_its_own_in_a_chapter_has_its_own_table():
    first, second = chapter.parts("4", [])
    assert {stage.family.NAME for stage in first.stages} == {"scan"}
    assert [stage.number for stage in second.stages] == ["48"]
    assert chapter.chapter("4", []).stages == first.stages
    sizes = dict(zip(second.stages[0].family.SIZES, second.sizes[-1], strict=True))
    own = record("48_adaptive_unitary", 1, both_ms=9.0, incumbent_both_ms=18.0, sizes=sizes)
    own |= {"peak_bytes": 1 << 20, "incumbent_peak_bytes": 1 << 30, "eager_both_ms": 27.0}
    own |= {"eager_peak_bytes": 1 << 31}
    first, second = chapter.parts("4", [{**MACHINE, "records": [own]}])
    assert not first.records and second.records
    text = chapter.text(second)
    assert text.startswith("Chapter 4, ssm_adaptive_unitary, on one A Card") and "48 adaptive_unitary" in text
    assert "Forward and backward together" in text and "the same not compiled (eager) 27 ms" in text


def test_an_incumbent_that_is_not_compiled_has_no_column_of_its_eager_self():
    (own,) = chapter.parts("6", [])
    sizes = dict(zip(own.stages[0].family.SIZES, own.sizes[-1], strict=True))
    row = record("61_lstm_persistent", 1, both_ms=9.0, incumbent_both_ms=18.0, sizes=sizes)
    row |= {"peak_bytes": 1 << 20, "incumbent_peak_bytes": 1 << 30}
    (shown,) = chapter.parts("6", [{**MACHINE, "records": [row]}])
    heading, lines, notes = chapter.backward(shown)
    assert len(heading) == len(lines[0]) == 8 and "% of eager" not in heading and "eager" not in notes
    assert lines[0][-3:] == ["9", "200", "1"] and "takes 18 ms and 1,024 MiB." in notes


def test_the_plot_is_the_same_on_every_run_and_names_its_card():
    rows = [record(name, 4096, ratio=0.01 * (1 + i)) for i, name in enumerate(stages.names()[1:])]
    rows.append(record("13_matmul_register", 4096, "bfloat16", ratio=1.5))
    first, second = chapter.plot(of(*rows)), chapter.plot(of(*copy.deepcopy(rows)))
    assert first.png == second.png and first.png.startswith(b"\x89PNG")
    assert first.words.startswith("Speed in percent of cuBLAS at 4096³, A Card, 2026-01-01. float32: 10 naive 1.00 %, ")
    assert first.words.endswith("; bfloat16: 13 register 150 %.")


# ---------------------------------------------------------------------------------------------------------------------
# Several machines


def test_a_table_is_of_the_machine_that_fills_most_of_it():
    few = [record("12_matmul_shared", 4096, ms=7.0), record("13_matmul_register", 4096, ms=7.0)]
    many = [record(f"1{i}_matmul_{name}", 4096, ms=5.0) for i, name in enumerate(("naive", "coalesced"))]
    many.append(record("14_matmul_pipelined", 4096, ms=5.0))
    small = [record("11_matmul_coalesced", 1024) for _ in range(9)]  # no table shows them
    for shown in (of_two(few + small, many), of_two(many, few + small)):
        card, other = (MACHINE, OTHER) if shown.machine["card"] == "A Card" else (OTHER, MACHINE)
        assert {r["ms"] for r in shown.records} == {5.0} and len(shown.records) == 3
        assert [cells(shown, name)[0][1] for name in ("10 naive", "11 coalesced", "14 pipelined")] == ["5"] * 3
        for name in ("12 shared", "13 register"):
            assert {value for heading, value in cells(shown, name) if heading != "bytes a flop"} == {"–"}
        text = chapter.markdown(shown)
        assert text.startswith(f"**Chapter 1, matmul**, on one {card['card']}, driver 1.2, torch 2, 2026-01-01; ")
        words = f"Measured on another machine, and so not in this table: 12 shared (card {other['card']}), 13 register"
        assert f"–: not measured on this machine. {words} (card {other['card']})." in text
        assert " ".join(words.split()) in " ".join(chapter.text(shown).split())
        plot = chapter.plot(shown).words
        assert f"at 4096³, {card['card']}, 2026-01-01." in plot and "14 pipelined" in plot
        assert other["card"] not in plot and "12 shared" not in plot
    assert of_two(few, many).machine["card"] == "Another Card" and of_two(many, few).machine["card"] == "A Card"


def test_of_two_machines_that_fill_as_much_the_last_is_shown():
    old = record("12_matmul_shared", 4096, ms=7.0)
    new = record("13_matmul_register", 4096, ms=5.0, date="2026-02-02")
    for shown in (of_two([old], [new]), of_two([new], [old])):
        assert [r["ms"] for r in shown.records] == [5.0]
        assert "2026-02-02; medians" in chapter.title(shown)


def test_another_driver_is_another_machine():
    both = [
        {**MACHINE, "records": [record("12_matmul_shared", size) for size in (4096, 8192)]},
        {**MACHINE, "driver": "1.3", "records": [record("13_matmul_register", 4096)]},
    ]
    text = chapter.markdown(chapter.chapter("1", both))
    assert "on one A Card, driver 1.2" in text and "not in this table: 13 register (driver 1.3)." in text


def test_each_chapter_and_each_of_its_families_has_its_own_machine():
    recorded = [
        {**MACHINE, "records": [record("12_matmul_shared", 4096), record("00_axpy", 1, sizes={"N": 1 << 28})]},
        {**OTHER, "records": []},
    ]
    for number in ("40", "48"):
        stage = stages.load(number)
        sizes = stage.sizes(stage.family.BENCH["cuda"][-1])
        where = recorded[number == "40"]
        where["records"].append(record(stage.name, 1, sizes=sizes, options=stage.options()[0]))
    cards = [part.machine["card"] for number in "014" for part in chapter.parts(number, recorded)]
    assert cards == ["A Card", "A Card", "Another Card", "A Card"]
    texts = [chapter.markdown(part) for number in "014" for part in chapter.parts(number, recorded)]
    assert not any("another machine" in text for text in texts)


def test_runs_of_one_machine_stand_in_one_table_with_their_dates():
    shown = of(record("12_matmul_shared", 4096, date="2026-02-02"), record("13_matmul_register", 4096))
    assert "torch 2, 2026-01-01 to 2026-02-02; medians." in chapter.title(shown)
    assert "A Card, 2026-01-01 to 2026-02-02. float32" in chapter.plot(shown).words
