"""Stage 32, vlstm_backward."""

import pytest
from vlstm_cases import VlstmGradientCases

import stages


class TestVlstmBackward(VlstmGradientCases):
    stage = stages.load("32")

    def test_there_are_no_states_and_it_says_who_has_them(self):
        arguments = self.arguments(self.small)
        for options in ({"initial_state": ()}, {"return_last_state": True}):
            with pytest.raises(NotImplementedError, match=f"no {next(iter(options))}.*; stage 36 has it"):
                self.stage.vlstm(*arguments, **options)
