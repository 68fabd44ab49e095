"""Stage 33, vlstm_tuned."""

from vlstm_cases import VlstmGradientCases

import stages


class TestVlstmTuned(VlstmGradientCases):
    stage = stages.load("33")

    def test_the_first_forget_gate_has_no_gradient(self, device):
        """It has nothing to forget. What rounding makes of q . dq - k . dk in a whole head is taken back."""
        arguments = self.arguments((1, 2, 300, 5, 6), device=device)
        arguments[4][:] -= 5
        for results in self.all_gradients(arguments):
            df = results[5].abs()
            assert (df[..., 0] <= 1e-12 * df.amax(2)).all() and (df.amax(2) > 0).all()
