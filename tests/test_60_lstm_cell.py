"""Stage 60, lstm_cell."""

import torch
from lstm_cases import LstmCases

import stages
from stages.families import lstm
from stages.toolkit import xray


class TestLstmCell(LstmCases):
    stage = stages.load("60")

    def test_two_launches_a_step(self):
        """And R read again in each."""
        for seq in (2, 5):
            report = self.stage.xray(*self.arguments((seq, 16, 4, 32)))
            assert len(report.launches) == 2 * seq
            requests = sum(s.requests for s in report.sites if s.name == "R" and s.space == "global")
            assert requests == seq * 4 * 32

    def test_the_backward_has_no_faults_and_two_launches_a_step(self):
        for options in self.options():
            arguments = self.arguments((4, 5, 3, 9), requires_grad=True)
            h = self.stage.lstm(*arguments, **options)[0]
            with xray.recording() as report:
                torch.autograd.grad(h, arguments[:3], torch.ones_like(h))
            assert len(report.launches) == 2 * 4 + 1
            assert [str(fault) for fault in report.faults] == []

    def test_any_hidden_size(self):
        """Also those that stage 61 leaves to this one."""
        sizes = (1, 1, 2, max(lstm.UNITS.values()) + 1)
        self.check(sizes, torch.float32, "cpu")
