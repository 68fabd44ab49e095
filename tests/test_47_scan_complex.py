"""Stage 47, scan_complex."""

import pytest
import torch
from scan_cases import GOLDEN, VIEWS, WAYS, ScanCases, gradients, load_golden, same_but_fused, viewed

import stages
from stages.families import COMPLEX, FLOATING, scan
from stages.toolkit.verify import relative_error


class TestScanComplex(ScanCases):
    stage = stages.load("47")

    @pytest.mark.parametrize("dtype", COMPLEX, ids=str)
    def test_complex_values_of_another_implementation(self, dtype, device):
        golden = load_golden(GOLDEN / "scan_complex_t48.npz", device)
        self.compare_with(golden, dtype, 1e-14 if dtype is torch.complex128 else 1e-6)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_real_numbers_are_those_of_stage_41(self, dtype, device):
        before = stages.load("41")
        for way in WAYS:
            arguments = self.arguments(self.odd, dtype, device, **{"time_dim": 1, **way})
            g = self.random_grad(arguments)
            one, two = (gradients(stage.scan, arguments, g, **way) for stage in (before, self.stage))
            assert all(same_but_fused(x, y) for x, y in zip(one, two, strict=True))

    @pytest.mark.parametrize("dtype", COMPLEX, ids=str)
    def test_a_complex_scan_of_real_numbers_is_the_real_one(self, dtype, device):
        arguments = [x.real.contiguous() for x in self.arguments(self.odd, dtype, device)]
        g = self.random_grad(arguments)
        real = gradients(self.stage.scan, arguments, g)
        whole = gradients(self.stage.scan, [x.to(dtype) for x in arguments], g.to(dtype))
        for x, y in zip(whole, real, strict=True):
            assert relative_error(x.real, y) <= 1e-6
            assert not x.imag.any()

    @pytest.mark.parametrize("seq", [1, 31, 33, 1000, 4097])
    def test_complex_sequences_of_every_length(self, seq, device):
        for dtype in COMPLEX:
            self.check((2, seq, 5), dtype, device)

    @pytest.mark.parametrize("dtype", COMPLEX, ids=str)
    @pytest.mark.parametrize("view", VIEWS)
    def test_complex_views(self, view, dtype, device):
        for time_dim in (1, 2):
            arguments = [*self.arguments((3, 40, 24), dtype, device, time_dim=time_dim)]
            arguments.append(self.random_grad(arguments))
            expected = self.results(arguments[:3], arguments[3], time_dim=time_dim)
            for n in range(4):
                given = [viewed(view, x) if n == m else x for m, x in enumerate(arguments)]
                found = self.results(given[:3], given[3], time_dim=time_dim)
                assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    def test_a_conjugate_that_torch_only_notes_down(self, device):
        """`x.conj()` moves nothing: it marks the tensor, and whoever reads the memory has to heed that."""
        a, b, h0 = self.arguments(self.odd, torch.complex64, device)
        g = self.random_grad([a, b])
        plain = self.results([a.conj().resolve_conj(), b.conj().resolve_conj(), h0.conj().resolve_conj()], g)
        assert a.conj().is_conj()
        noted = self.results([a.conj(), b.conj(), h0.conj()], g)
        assert all(torch.equal(x, y) for x, y in zip(plain, noted, strict=True))

    def test_conjugates_in_and_out(self, device):
        """The conjugate of all inputs gives the conjugate of all results: nothing tells i from -i."""
        arguments = self.arguments(self.odd, torch.complex64, device)
        g = self.random_grad(arguments)
        results = self.results(list(arguments), g)
        mirrored = self.results([x.conj() for x in arguments], g.conj())
        assert all(torch.equal(x, y.conj().resolve_conj()) for x, y in zip(results, mirrored, strict=True))

    def test_a_state_that_only_turns(self, device):
        """|a| = 1 and b = 0: after T steps the state has turned by the sum of the angles, and is as long as before."""
        seq = 4096
        angles = torch.rand(1, seq, 7, dtype=torch.float64, device=device) * 6.28
        a = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        h0 = torch.ones(1, 7, dtype=torch.complex64, device=device)
        h = self.stage.scan(a, torch.zeros_like(a), h0)
        assert relative_error(h, scan.reference(a, torch.zeros_like(a), h0)) <= 1e-5
        assert (h.abs() - 1).abs().max() <= 1e-4  # float32 rounds each a to a length a little off 1

    def test_gradients_are_those_of_a_loss_of_both_parts(self, device):
        """dL/dRe + i dL/dIm, found from two real scans: the complex one as a scan of 2 x 2 matrices, in float64."""
        a, b, h0 = (x.detach() for x in self.arguments(self.small, torch.complex128, device))
        g = self.random_grad([a, b])
        parts = [part.clone().requires_grad_() for x in (a, b, h0) for part in (x.real, x.imag)]
        ar, ai, br, bi, hr, hi = parts
        loss = 0
        for t in range(a.shape[1]):
            hr, hi = (
                ar[:, t] * hr - ai[:, t] * hi + br[:, t],
                ar[:, t] * hi + ai[:, t] * hr + bi[:, t],
            )
            loss = loss + (g[:, t].real * hr + g[:, t].imag * hi).sum()
        real = torch.autograd.grad(loss, parts)
        whole = gradients(self.stage.scan, [a, b, h0], g)[1:]
        for n, x in enumerate(whole):
            torch.testing.assert_close(x, torch.complex(real[2 * n], real[2 * n + 1]), rtol=1e-12, atol=1e-12)
