"""Stage 21, qkv_split_grid: the failure is seen, its repair is right, and what it costs is counted."""

import pytest
import torch
from qkv_cases import QkvCases
from stage_cases import SCHEDULES

import stages
from stages.toolkit import lab

SIZES = (1, 2, 96, 16, 40)  # three slices


class TestQkvSplitGrid(QkvCases):
    stage = stages.load("21")

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}{s[1]}")
    def test_as_it_failed_its_blocks_race(self, schedule):
        """In every schedule, on the line that adds, between blocks of one row: a read against a write."""
        failed = lab.kernel("21", function="as_it_failed")
        report = failed.xray(*SIZES, schedule=schedule[0], seed=schedule[1])
        races = [fault for fault in report.faults if fault.kind == "block race"]
        assert races and {fault.kind for fault in report.faults} <= {"block race", "uninitialised read"}
        for fault in races:
            assert "Accumulator<T>(word) + sum" in fault.line.text and fault.line.number == fault.other_line.number
            assert fault.place == "tensor o"
            assert fault.block[0] // 3 == fault.other_block[0] // 3  # a row's three slices are neighbours
        assert any(fault.block != fault.other_block for fault in races)
        again = failed.xray(*SIZES, schedule=schedule[0], seed=schedule[1])
        assert [str(fault) for fault in again.faults] == [str(fault) for fault in report.faults]

    def test_as_it_failed_it_is_right_in_one_order_only(self):
        failed = lab.kernel("21", function="as_it_failed")
        assert failed.is_right(*SIZES)
        assert not failed.is_right(*SIZES, schedule="reverse")

    def test_alone_a_slice_does_not_race(self):
        failed = lab.kernel("21", function="as_it_failed")
        assert failed.is_right(1, 2, 32, 16, 40, schedule="reverse")
        assert failed.xray(1, 2, 32, 16, 40, schedule="reverse").faults == []

    def test_what_the_repair_costs(self):
        """The parts go out and come back; at Dv = 32 they are as large as S, at 64 twice as large."""
        for dv in (32, 64):
            traffic = {
                number: {
                    t.op: t.bytes_moved
                    for t in lab.kernel(number).xray(1, 2, 128, 64, dv).traffic("global")
                    if t.name == name
                }
                for number, name in (("20", "s"), ("21", "parts"))
            }
            s = 2 * 128 * 128 * 4
            assert traffic["20"] == {"store": s, "load": s}
            assert traffic["21"] == {"store": s * dv // 32, "load": s * dv // 32}

    def test_it_has_no_backward_and_says_who_has(self):
        x = torch.ones(1, 1, 2, 2, requires_grad=True)
        output = self.stage.qkv(x, x, x)
        words = r"qkv_split_grid has no backward; stage 22 has one: stages.load\('22'\).qkv"
        with pytest.raises(NotImplementedError, match=words):
            output.sum().backward()
