"""Stage 30, vlstm_forward."""

import pytest
import torch
from vlstm_cases import VlstmCases

import stages


class TestVlstmForward(VlstmCases):
    stage = stages.load("30")

    def test_there_is_no_backward_and_it_says_who_has_one(self):
        arguments = self.arguments(self.small, requires_grad=True)
        with pytest.raises(NotImplementedError, match="vlstm_forward has no backward; stage 32 has one"):
            self.stage.vlstm(*arguments).sum().backward()

    def test_there_are_no_states_and_it_says_who_has_them(self):
        arguments = self.arguments(self.small)
        for options in ({"initial_state": ()}, {"return_last_state": True}):
            with pytest.raises(NotImplementedError, match=f"no {next(iter(options))}.*; stage 36 has it"):
                self.stage.vlstm(*arguments, **options)

    def test_the_gates_between_two_tiles_are_read_again_for_each_pair(self):
        """What stage 31 is about: the words of f that a head reads grow with the cube of T."""
        words = []
        for tiles in (2, 4, 8):
            report = self.stage.xray(*self.arguments((1, 1, 64 * tiles, 0, 1)))
            words.append(sum(site.requests for site in report.sites if site.name == "f" and site.space == "global"))
        between = [tiles * (tiles - 1) * (tiles - 2) // 3 for tiles in (2, 4, 8)]
        assert words == [2 * tiles + tiles * (tiles + 1) + more for tiles, more in zip((2, 4, 8), between, strict=True)]
