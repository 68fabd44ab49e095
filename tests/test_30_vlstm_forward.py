"""Stage 30, vlstm_forward."""

from vlstm_cases import ForwardCases, requests

import stages


class TestVlstmForward(ForwardCases):
    stage = stages.load("30")

    def test_the_gates_between_two_tiles_are_read_again_for_each_pair(self):
        """What stage 31 is about: the words of f that a head reads grow with the cube of T."""
        for tiles in (1, 2, 4, 8):
            report = self.stage.xray(*self.arguments((1, 1, 64 * tiles, 0, 1)))
            between = tiles * (tiles - 1) * (tiles - 2) // 6
            assert requests(report, "i") == tiles * (tiles + 1)  # two of 32 words in a step
            assert requests(report, "f") == 2 * tiles + tiles * (tiles + 1) + 2 * between
