"""Stage 31, vlstm_gate_sums."""

import torch
from vlstm_cases import ForwardCases, requests

import stages


class TestVlstmGateSums(ForwardCases):
    stage = stages.load("31")

    def test_each_gate_is_read_once_a_step(self):
        """Two requests of 32 words for a tile of i, and two for one of f, in each of n (n + 1) / 2 steps."""
        for tiles in (1, 2, 4, 8):
            report = self.stage.xray(*self.arguments((1, 1, 64 * tiles, 0, 1)))
            assert requests(report, "i") == requests(report, "f") == tiles * (tiles + 1)

    def test_the_gates_between_two_tiles_are_not_read_again(self):
        """Stage 30 against 31: the same requests for q, k, v and i, and for f what the walk turned round saves."""
        before = stages.load("30")
        for tiles in (1, 2, 4, 8):
            arguments = self.arguments((1, 1, 64 * tiles, 16, 32))
            old, new = before.xray(*arguments), self.stage.xray(*arguments)
            for name in ("q", "k", "v", "i", "h"):
                assert requests(old, name) == requests(new, name) > 0
            between = tiles * (tiles - 1) * (tiles - 2) // 6
            assert requests(old, "f") - requests(new, "f") == 2 * (between + tiles)

    def test_the_order_of_the_walk_changes_nothing_but_rounding(self, device):
        arguments = self.arguments((2, 3, 200, 17, 35), torch.float64, device=device)
        for options in self.options(torch.float64):
            one, two = (stage.vlstm(*arguments, **options) for stage in (stages.load("30"), self.stage))
            torch.testing.assert_close(one, two)
