"""The float64 reference of the vLSTM: other implementations' values and gradients, extreme gates, identities."""

import pytest
import torch
from torch import Tensor
from vlstm_cases import GOLDEN, golden_arguments, load_golden

from stages.families import vlstm
from stages.toolkit.verify import relative_error

NAMES = ("q", "k", "v", "i", "f")


def gradients(arguments: list[Tensor], grad: Tensor, **options) -> tuple[Tensor, list[Tensor]]:
    given = [x.detach().clone().requires_grad_() for x in arguments]
    output = vlstm.reference(*given, **options)
    return output.detach(), list(torch.autograd.grad(output, given, grad))


def arguments(seq: int = 40, width: int = 8, seed: int = 0) -> list[Tensor]:
    return list(vlstm.make({"B": 1, "N": 2, "T": seq, "Dk": width, "Dv": width + 3}, torch.float64, seed=seed))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_values_and_gradients_of_another_implementation(path):
    """All of them: with its eps and without, true, with the normaliser held constant, without a normaliser."""
    golden = load_golden(path)
    given, options = golden_arguments(golden)
    eps, seen = golden["eps"].item(), set()
    for output_name, ending, extra in (
        ("h", "", {"eps": eps}),
        ("h", "_nconst", {"eps": eps, "normalizer_gradient": False}),
        ("h_eps0", "_eps0", {}),
        ("h_unnorm", "_unnorm", {"normalize": False}),
    ):
        if output_name not in golden:
            continue
        output, results = gradients(given, golden["gh"], **options, **extra)
        assert relative_error(output, golden[output_name]) < 1e-12
        for name, result in zip(NAMES, results, strict=True):
            key = f"d{name}{ending}"
            if key in golden:
                assert relative_error(result, golden[key]) < 1e-11, key
                seen.add(key)
    assert {key for key in golden if key.startswith("d")} <= seen | {"d"}


@pytest.mark.parametrize("path", [path for path in GOLDEN if "siging" not in path.stem], ids=lambda path: path.stem)
def test_the_gates_are_those_of_another_implementation(path):
    golden = load_golden(path)
    m = vlstm.log_weights(golden["i"], golden["f"]).amax(3)
    assert relative_error(m, golden["m"]) < 1e-13


@pytest.mark.parametrize("input_gate", vlstm.INPUT_GATES)
@pytest.mark.parametrize("eps", [0.0, 1e-3])
@pytest.mark.parametrize("value", [100.0, -100.0, 200.0, -200.0, 800.0, -800.0, -torch.inf])
@pytest.mark.parametrize("which", ["i", "f", "both"])
@pytest.mark.parametrize("where", [slice(None), 0, 7, slice(3, 9), slice(0, None, 5)], ids=str)
def test_extreme_gates_are_finite(where, which, value, eps, input_gate):
    given = arguments()
    for x in {"i": given[3:4], "f": given[4:], "both": given[3:]}[which]:
        x[:, :, where] = value
    output, results = gradients(given, torch.ones(1, 2, 40, 11, dtype=torch.float64), eps=eps, input_gate=input_gate)
    assert all(x.isfinite().all() for x in (output, *results))


def test_a_forget_gate_of_minus_infinity_is_a_reset():
    given = arguments()
    given[4][:, :, 20] = -torch.inf
    whole = vlstm.reference(*given, eps=0.5)
    torch.testing.assert_close(whole[:, :, :20], vlstm.reference(*(x[:, :, :20] for x in given), eps=0.5))
    torch.testing.assert_close(whole[:, :, 20:], vlstm.reference(*(x[:, :, 20:] for x in given), eps=0.5))


def test_an_input_gate_of_minus_infinity_hides_its_position():
    given = arguments()
    given[3][:, :, :5] = -torch.inf
    output = vlstm.reference(*given)
    assert not output[:, :, :5].any() and output[:, :, 5:].all()
    torch.testing.assert_close(output[:, :, 5:], vlstm.reference(*(x[:, :, 5:] for x in given)))


@pytest.mark.parametrize("options", [{}, {"normalizer_gradient": False}, {"input_gate": "sigmoid"}], ids=str)
def test_sums_of_the_gradients(options):
    """k . dk is what i gets at every position, the sum of q . dq over the rows is that of k . dk over the keys."""
    given = arguments(seq=60)
    grad = torch.randn(1, 2, 60, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, (dq, dk, _, di, _) = gradients(given, grad, **options)
    q, k, i = given[0], given[1], given[3]
    through_gate = torch.sigmoid(-i) if options.get("input_gate") == "sigmoid" else 1
    torch.testing.assert_close((k * dk).sum(3) * through_gate, di)
    torch.testing.assert_close((q * dq).sum((2, 3)), (k * dk).sum((2, 3)))


def test_a_normaliser_that_counts_leaves_nothing_along_q():
    """Where |l| > exp(-m), H does not change with the length of q; with the normaliser held constant, it does."""
    given = arguments(seq=60)
    grad = torch.randn(1, 2, 60, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q, k, _, i, f = given
    sums = (vlstm.scale(q) * (q @ k.mT) * vlstm.log_weights(i, f).exp()).sum(3).abs()
    active = sums > 1
    assert active.any() and not active.all()
    along = [(q * gradients(given, grad, normalizer_gradient=true)[1][0]).sum(3) for true in (True, False)]
    assert along[0][active].abs().max() < 1e-12 < 1e-3 < along[1][active].abs().max()
    torch.testing.assert_close(along[0][~active], along[1][~active])


@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 0.3}, {"input_gate": "sigmoid", "eps": 0.3}, {"input_gate": "sigmoid", "normalize": False}],
    ids=str,
)
def test_gradcheck(options):
    given = [x.requires_grad_() for x in arguments(seq=6, width=2)]
    assert torch.autograd.gradcheck(lambda *x: vlstm.reference(*x, **options), given)


def test_eps_takes_the_maximum_of_the_row_into_the_result():
    """With eps, H = u V / (max(|sum u|, 1) + eps exp(m)), straight from the formula."""
    q, k, v, i, f = arguments()
    exponents = vlstm.log_weights(i, f)
    u = vlstm.scale(q) * (q @ k.mT) * exponents.exp()
    expected = (u @ v) / (u.sum(3).abs().clamp(min=1) + 0.7 * exponents.amax(3).exp())[..., None]
    torch.testing.assert_close(vlstm.reference(q, k, v, i, f, eps=0.7), expected)


@pytest.mark.parametrize("seq", [0, 1])
def test_no_position_and_one(seq):
    q, k, v, i, f = arguments(seq=seq)
    weight = vlstm.scale(q) * (q * k).sum(3, keepdim=True) * i[..., None].exp()
    torch.testing.assert_close(vlstm.reference(q, k, v, i, f), weight * v / weight.abs().clamp(min=1))
