"""Stage 51, selective_scan."""

import pytest
import torch
from selective_scan_cases import SelectiveScanCases, allowed, problem

import stages
from stages.families import selective_scan as family


class TestSelectiveScan(SelectiveScanCases):
    stage = stages.load("51")
    odd = (2, 5, 7, 37)
    small = (2, 3, 2, 5)

    def test_there_is_no_backward_and_an_error_says_so(self):
        arguments = problem((1, 2, 3, 20), torch.float32)
        y = self.stage.function(**{name: x.requires_grad_() for name, x in arguments.items()})
        with pytest.raises(NotImplementedError, match="selective_scan has no backward"):
            y.sum().backward()

    @pytest.mark.parametrize("states", [5, 16, 33])
    def test_four_states_a_lane(self, states, device, monkeypatch):
        """What many channels get: here a few, too."""
        monkeypatch.setattr(family, "ENOUGH_WARPS", 0)
        for method in family.METHODS:
            for b in ("variable", "constant"):
                arguments = problem((2, 35, states, 70), torch.float32, device, b=b, c=b)
                assert family.states_of_a_lane(arguments["u"], arguments["A"]) == 4
                self.compare(arguments, allowed(torch.float32), method=method)

    def test_how_many_states_a_lane_has(self):
        """4 where that leaves 8 warps for each multiprocessor of an H100."""
        for sizes, dtype, expected in (
            ((5, 2048, 16, 1), torch.float32, 4),
            ((4, 2048, 16, 1), torch.float32, 2),
            ((64, 2048, 2, 1), torch.float32, 2),
            ((64, 2048, 16, 1), torch.float64, 2),
        ):
            batch, channels, states, seq = sizes
            u, A = torch.empty(batch, channels, seq, device="meta"), torch.empty(channels, states, device="meta")
            assert family.states_of_a_lane(u, A.to(dtype)) == expected
