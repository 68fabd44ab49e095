"""Stage 60, lstm_cell."""

import json
from importlib import import_module

import pytest
import torch
from conftest import GPU
from lstm_cases import LstmCases, gradients

import stages
from stages.families import FLOATING
from stages.families import lstm as family
from stages.toolkit import driving, xray

module = import_module("stages.60_lstm_cell.stage")


class TestLstmCell(LstmCases):
    stage = stages.load("60")

    @pytest.mark.parametrize("seq", [0, 1, 2, 5])
    def test_two_launches_a_step(self, seq):
        arguments = self.arguments((seq, 2, 3, 5), requires_grad=True)
        with xray.recording() as report:
            h, (_, c) = self.stage.lstm(*arguments)
        assert len(report.launches) == 2 * seq
        with xray.recording() as report:
            torch.autograd.grad((h.sum(), c.sum()), arguments)
        assert len(report.launches) == 2 * seq

    def test_the_recurrent_weights_are_read_at_each_step(self):
        for batch, times in ((1, 1), (32, 1), (33, 2)):  # and by each ROWS batches
            with xray.recording() as report:
                self.stage.lstm(*self.arguments((4, batch, 8, 64)))
            (read,) = [traffic.bytes_asked for traffic in report.traffic("global") if traffic.name == "weight_hh"]
            assert read == 4 * times * 4 * 64 * 64 * 4

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes", [(1, 32, 3, 64), (3, 64, 32, 32)], ids=str)
    def test_counts_of_the_backward_equal_their_closed_forms(self, sizes, dtype):
        arguments = self.arguments(sizes, dtype, requires_grad=True)
        h, (_, c) = self.stage.lstm(*arguments)
        with xray.recording() as report:
            torch.autograd.grad((h, c), arguments, (torch.ones_like(h), torch.ones_like(c)))
        assert report.counts() == module.backward_cost(*sizes, itemsize=dtype.itemsize)
        assert [str(fault) for fault in report.faults] == []

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_counts_where_z_and_c_are_kept(self, dtype):
        """c is stored once more, for the backward."""
        sizes = (3, 32, 4, 32)
        arguments = self.arguments(sizes, dtype, requires_grad=True)
        with xray.recording() as report:
            self.stage.lstm(*arguments)
        alone = module.cost(*sizes, itemsize=dtype.itemsize)
        warps, sums = 3 * 32 * 32 // 32, max(4, dtype.itemsize)
        assert report.counts().load_sectors == alone.load_sectors
        assert report.counts().store_requests == alone.store_requests + warps
        assert report.counts().store_sectors == alone.store_sectors + warps * sums

    def test_without_gradients_no_z_of_all_steps_is_kept(self, monkeypatch):
        seen, empty = [], family.operator.empty
        monkeypatch.setattr(family.operator, "empty", lambda s, *a, **k: seen.append(tuple(s)) or empty(s, *a, **k))
        arguments = self.arguments((7, 2, 3, 5))
        self.stage.lstm(*arguments)
        assert (1, 2, 20) in seen and (7, 2, 20) not in seen
        self.stage.lstm(*(x.requires_grad_() for x in arguments))
        assert (7, 2, 20) in seen

    @pytest.mark.parametrize("seq", [0, 1, 2, 3, 6])
    def test_step_by_step_from_python_is_the_same(self, seq, device):
        for dtype in FLOATING:
            arguments = self.arguments((seq, 3, 5, 35), dtype, device)
            for number, activation in enumerate(family.ACTIVATIONS):
                h, (h_last, c_last) = self.stage.lstm(*arguments, activation=activation)
                other, (h_other, c_other) = module.driven_from_python(*arguments, number)
                assert torch.equal(h, other) and torch.equal(h_last, h_other) and torch.equal(c_last, c_other)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_results_and_gradients_of_tiles_of_all_kinds(self, dtype, device):
        """Several tiles along each side and along the sum of a product, the last ones not whole."""
        arguments = self.arguments((2, 70, 3, 70), dtype, device)
        self.compare(list(arguments), family.tolerance({}, dtype)["h"])
        assert len(gradients(self.stage.lstm, arguments)) == 9


class TestDriving:
    """What notebook 60 measures, or shows if it is recorded."""

    def test_between_two_steps_python_takes_longer(self):
        between = driving.between_steps(64)
        assert between["python"] > between["cpp"] > 0

    def test_without_a_gpu_nothing_is_recorded(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert driving.main(["--out", str(tmp_path / "driving.json")]) == 1
        assert "finds no GPU here" in capsys.readouterr().out and not list(tmp_path.iterdir())

    @GPU
    def test_a_record(self, tmp_path, monkeypatch):
        monkeypatch.setattr(driving, "SIZES", ((8, 2, 16, 16),))
        assert driving.main(["--out", str(tmp_path / "driving.json")]) == 0
        (row,) = json.loads((tmp_path / "driving.json").read_text())["rows"]
        assert row["sizes"] == [8, 2, 16, 16] and all(row[way] > 0 for way in driving.WAYS)
