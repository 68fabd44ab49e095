"""The classic LSTM of one layer and direction, from the first step to the last.

    z[t] = W x[t] + b + R h[t - 1]                        four gates of each hidden unit, in torch's order i, f, g, o
    c[t] = s(f) c[t - 1] + s(i) u(g)
    h[t] = s(o) u(c[t])

with s = sigmoid and u = tanh ("soft"), or s(z) = min(max(z / 8 + 1/2, 0), 1) and u(z) = min(max(z, -1), 1) ("hard",
whose slopes are 0 where they are at an end). W x + b of all steps is one product, which torch makes, and with it the
gradients of x, W and b; the stages have what comes after another: R h and the cells.

Gradients, from the last step to the first: with d[t] what the loss gives to h[t] in all,

    d[t] = dh[t] + R^T dz[t + 1],  dc[t] = d s(o) u'(c[t]) + dc[t + 1] s(f[t + 1]),  dz[t] = s' or u' of z times
    (dc u(g), dc c[t - 1], dc s(i), d u(c[t])),  dh0 = R^T dz[0],  dc0 = dc[0] s(f[0]),  dR = sum of dz[t] h[t - 1]^T

**Zoneout** (Krueger et al., 2016, https://arxiv.org/abs/1606.01305), here of h alone: h[t] = h[t - 1] + m (h -
h[t - 1]) with m 0 or 1 while training, else the mean of that. **Recurrent dropout** (Wan et al., 2013: DropConnect)
leaves out numbers of R, the same in all steps. Both draw from `generator`, first R's, then m's, so that they can be
drawn again.

LSTM: Hochreiter and Schmidhuber, 1997; the forget gate is of Gers et al., 2000.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.families import (
    FLOATING,
    Choice,
    Work,
    accumulator,
    check_fellow,
    check_tensor,
    listing,
    random,
    shape,
    unit_roundoff,
)
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels

NAME, LAUNCHER = "lstm", "lstm_forward"
CALL = (
    "lstm(x, weight_ih, weight_hh, bias=None, h0=None, c0=None, *, activation='soft', recurrent_dropout=0.0, "
    "zoneout=0.0, training=True, generator=None)"
)
ARGUMENTS = ("x", "weight_ih", "weight_hh", "bias", "h0", "c0")
OUTPUTS = ("h", "h_T", "c_T")
SIZES = ("T", "B", "I", "H")
PROBLEMS = (
    (5, 3, 6, 8),
    (3, 17, 5, 33),
    (4, 1, 40, 31),
    (2, 5, 3, 70),
    (1, 1, 9, 1),
    (0, 2, 3, 4),
    (3, 0, 3, 4),
    (3, 2, 0, 4),
    (2, 2, 3, 0),
)
XRAY = (4, 4, 32, 32)
BENCH = {"cpu": ((8, 16, 64, 64),), "cuda": ((512, 16, 512, 512), (1024, 1, 512, 512), (512, 64, 1024, 1024))}
SWEEP = {
    "cpu": tuple((8, 1 << n, 32, 32) for n in range(5)),
    "cuda": tuple((256, 1 << n, 512, 512) for n in range(0, 9, 2)),
}
DTYPES = FLOATING
INCUMBENT = "torch.nn.LSTM"

ACTIVATIONS = ("soft", "hard")
GATES = 4
WORDS = torch.int32  # of what blocks tell each other

# Of stage 61: a block has so many hidden units, and the R of the largest H goes into the blocks' registers.
UNITS = {4: 512, 8: 1024}
MOST_UNITS_OF_DOUBLE = 4
CPU_BLOCKS = 64  # that the CPU device keeps at once


def cut(hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int] | None:
    """Hidden units of a block of stage 61, and its blocks: a multiple of 4, all at once. None: there is no such cut."""
    at_once = CPU_BLOCKS
    if device.type == "cuda":
        at_once = torch.cuda.get_device_properties(device).multi_processor_count
    for units, most in UNITS.items():
        blocks = GATES * -(-hidden // (GATES * units))
        if hidden <= most and blocks <= at_once and (units <= MOST_UNITS_OF_DOUBLE or dtype is not torch.float64):
            return units, blocks
    return None


def launch_forward(kernels: Kernels, *arguments: object) -> None:
    """The launcher of a stage's module that has this name."""
    kernels.launch("lstm_forward", arguments[0].device, *arguments)


def launch_backward(kernels: Kernels, *arguments: object) -> None:
    """Likewise."""
    kernels.launch("lstm_backward", arguments[0].device, *arguments)


def define(
    name: str,
    kernels: Kernels,
    *,
    launch_forward: Callable = launch_forward,
    launch_backward: Callable = launch_backward,
    check_size: Callable[[Tensor], None] = lambda weight_hh: None,
) -> Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Register the operator of a stage and return its public function.

    The operator begins with the products of the inputs, [T, B, 4 H]. It gives h, the last cells, and for a backward z
    and all cells (none where nobody asks for gradients). Cells are float32 for 16 bits. `stages::<name>_backward` is an
    operator as well.

    Args:
        name: Of the operator.
        kernels: The modules of the stage.
        launch_forward: How the forward is launched, `launch_forward(kernels, products, weight_hh, h0, c0, mask, h,
            c_last, z, cells, activation)`; z, cells and, without zoneout, mask may be empty.
        launch_backward: How the backward is launched, `launch_backward(kernels, dh, dc_last, weight_hh, c0, mask, z,
            cells, dz, dh0, dc0, activation)`.
        check_size: Raises if a weight_hh is too large for the stage.
    """

    def run(products, weight_hh, h0, c0, mask, activation=0, save=True) -> tuple[Tensor, ...]:
        results = fake(products, weight_hh, h0, c0, mask, activation, save)
        if h0.numel():
            launch_forward(kernels, products, weight_hh, h0, c0, mask, *results, activation)
        return results

    def fake(products, weight_hh, h0, c0, mask, activation=0, save=True) -> tuple[Tensor, ...]:
        whole = (*products.shape[:2], weight_hh.shape[1])
        return (
            operator.empty(whole, like=products),
            operator.empty(c0.shape, like=c0),
            operator.empty(products.shape if save else (0, 0, 0), like=products),
            operator.empty(whole if save else (0, 0, 0), like=c0),
        )

    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        _, weight_hh, h0, c0, mask, ctx.activation, _ = inputs
        h, _, z, cells = output
        ctx.save_for_backward(weight_hh, h0, c0, mask, h, z, cells)
        ctx.mark_non_differentiable(z, cells)
        ctx.set_materialize_grads(False)

    def backward(ctx, dh: Tensor | None, dc_last: Tensor | None, *_) -> tuple[Tensor | None, ...]:
        if dh is None and dc_last is None:
            return (None,) * 7
        weight_hh, h0, c0, mask, h, z, cells = ctx.saved_tensors
        dh = operator.nothing(h.shape, like=h) if dh is None else dh
        dc_last = operator.nothing(c0.shape, like=c0) if dc_last is None else dc_last
        dz, dh0, dc0 = compute_backward(dh, dc_last, weight_hh, c0, mask, z, cells, ctx.activation)
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = torch.zeros_like(weight_hh)
            if len(h):
                later = dz[1:].flatten(0, 1).T
                dweight = torch.addmm(dz[0].T @ h0, later, h[:-1].flatten(0, 1))
        return dz, dweight, dh0, dc0, None, None, None

    def run_backward(dh, dc_last, weight_hh, c0, mask, z, cells, activation) -> tuple[Tensor, ...]:
        results = fake_backward(dh, dc_last, weight_hh, c0, mask, z, cells)
        if c0.numel():
            launch_backward(kernels, dh, dc_last, weight_hh, c0, mask, z, cells, *results, activation)
        return results

    def fake_backward(dh, dc_last, weight_hh, c0, mask, z, *_) -> tuple[Tensor, ...]:
        return operator.empty(z.shape, like=z), operator.empty(c0.shape, like=z), operator.empty(c0.shape, like=c0)

    def twice(ctx, *grads: Tensor):
        raise NotImplementedError(f"stages::{name} has no second derivatives: its backward is not differentiable")

    compute_backward = operator.register(
        f"{name}_backward",
        "(Tensor dh, Tensor dc_last, Tensor weight_hh, Tensor c0, Tensor mask, Tensor z, Tensor cells, int activation)"
        " -> (Tensor, Tensor, Tensor)",
        run_backward,
        fake=fake_backward,
        backward=twice,
    )
    compute = operator.register(
        name,
        "(Tensor products, Tensor weight_hh, Tensor h0, Tensor c0, Tensor mask, int activation=0, bool save=True)"
        " -> (Tensor h, Tensor c_last, Tensor z, Tensor cells)",
        run,
        fake=fake,
        setup_context=setup_context,
        backward=backward,
    )

    def lstm(
        x: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None = None,
        h0: Tensor | None = None,
        c0: Tensor | None = None,
        *,
        activation: str = "soft",
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        training: bool = True,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """An LSTM of one layer: z = W x[t] + b + R h[t - 1], c = s(f) c + s(i) u(g), h[t] = s(o) u(c).

        The weights are laid out as torch.nn.LSTM has them, whose parameters can be passed as they are (of its two
        biases the sum). Sums and cells are float32, for float64 float64; h is rounded to x's dtype.

        Args:
            x: [T, B, I], float64, float32, float16 or bfloat16, on a CPU or a CUDA device. Any strides, here and in all
                that follow.
            weight_ih: [4 H, I], W: the rows of i, then those of f, g and o. Of x's dtype and device, as all others.
            weight_hh: [4 H, H], R, likewise.
            bias: [4 H]. None: zeros.
            h0: [B, H], h before the first step. None: zeros.
            c0: [B, H], the cells before the first step, of x's dtype or float32. None: zeros.
            activation: "soft", sigmoid and tanh; or "hard", clamp(z / 8 + 1/2, 0, 1) and clamp(z, -1, 1).
            recurrent_dropout: The probability, below 1, that a number of R is left out of all steps; the others are
                divided by 1 less it. Only while training.
            zoneout: The probability that a unit keeps h[t - 1] for h[t]. While not training, h[t] is the mean of both.
            training: Whether the two before are drawn.
            generator: What they are drawn from, on x's device. None: torch's own.

        Returns:
            h, [T, B, H], contiguous, of x's dtype, and (h_T, c_T), [B, H] each: what h0 and c0 are for the steps that
            follow. c_T is float32, for float64 float64. Without a step they are h0 and c0.

        Raises:
            TypeError: A tensor is none, is not dense, or has another dtype than those above or than x, or an option is
                of the wrong type.
            ValueError: A tensor has another number of dimensions, the sizes do not fit each other, the devices differ,
                a probability is none, the activation is unknown, or H is too large for the stage.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import stages, torch
            >>> x, one = torch.tensor([0.0, 8.0])[:, None, None], torch.ones(4, 1)  # a half of 0, then 1/2 h + 1 of 1
            >>> h, (h_T, c_T) = stages.load("lstm_cell").lstm(x, one, 0 * one, activation="hard")
            >>> h.flatten(), c_T
            (tensor([0., 1.]), tensor([[1.]]))
        """
        options = dict(activation=activation, recurrent_dropout=recurrent_dropout, zoneout=zoneout)
        check(x, weight_ih, weight_hh, bias, h0, c0, **options, training=training, generator=generator)
        check_size(weight_hh)
        if recurrent_dropout and training:
            weight_hh = dropped(weight_hh, recurrent_dropout, generator)
        of_state, sums = (x.shape[1], weight_hh.shape[1]), accumulator(x.dtype)
        mask = zoneout_mask((len(x), *of_state), x, zoneout, training, generator)
        products = F.linear(x.flatten(0, 1), weight_ih, bias).unflatten(0, x.shape[:2])
        h0 = operator.nothing(of_state, like=x) if h0 is None else h0
        c0 = operator.nothing(of_state, like=x.new_empty(0, dtype=sums)) if c0 is None else c0.to(sums)
        save = torch.is_grad_enabled() and any(t.requires_grad for t in (products, weight_hh, h0, c0))
        h, c_last, _, _ = compute(products, weight_hh, h0, c0, mask, ACTIVATIONS.index(activation), save)
        return h, ((h[-1] if len(x) else h0).clone(), c_last)

    return lstm


def dropped(weight: Tensor, probability: float, generator: torch.Generator | None) -> Tensor:
    """The weight with some of its numbers left out, and the others larger, so that the mean stays."""
    kept = torch.rand(weight.shape, generator=generator, device=weight.device) >= probability
    return weight * (kept / (1 - probability)).to(weight.dtype)


def zoneout_mask(
    size: tuple[int, ...], x: Tensor, probability: float, training: bool, generator: torch.Generator | None
) -> Tensor:
    """How much of each new h there is, [T, B, H]: 0 or 1, or the mean of it; without zoneout empty."""
    sums = accumulator(x.dtype)
    if not probability:
        return x.new_empty((0, 0, 0), dtype=sums)
    if not training:
        return x.new_full((), 1 - probability, dtype=sums).expand(size)
    return (torch.rand(size, generator=generator, device=x.device) >= probability).to(sums)


def check(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    *,
    activation: str = "soft",
    recurrent_dropout: float = 0.0,
    zoneout: float = 0.0,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the LSTM of these makes sense."""
    check_tensor(CALL, "x", x, 3)
    for name, value, rank in (("weight_ih", weight_ih, 2), ("weight_hh", weight_hh, 2)):
        check_fellow(CALL, name, value, "x", x, rank)
    for name, value, rank in (("bias", bias, 1), ("h0", h0, 2)):
        if value is not None:
            check_fellow(CALL, name, value, "x", x, rank)
    if c0 is not None:
        check_tensor(CALL, "c0", c0, 2, tuple(dict.fromkeys((x.dtype, accumulator(x.dtype)))))
        if c0.device != x.device:
            raise ValueError(f"{CALL}: c0 is on {c0.device}, but x is on {x.device}; allowed: the same for both")
    (_, batch, inputs), hidden = x.shape, weight_hh.shape[1]
    for name, value, letters, allowed in (
        ("weight_hh", weight_hh, "(4 H, H)", (GATES * hidden, hidden)),
        ("weight_ih", weight_ih, "(4 H, I)", (GATES * hidden, inputs)),
        ("bias", bias, "(4 H,)", (GATES * hidden,)),
        ("h0", h0, "(B, H)", (batch, hidden)),
        ("c0", c0, "(B, H)", (batch, hidden)),
    ):
        if value is not None and value.shape != allowed:
            raise ValueError(
                f"{CALL}: {name} is {shape(value)}, x is {shape(x)} and weight_hh is {shape(weight_hh)}; allowed: "
                f"{letters}, here {allowed}"
            )
    if activation not in ACTIVATIONS:
        raise ValueError(f"{CALL}: activation is {activation!r}; allowed: {listing([repr(a) for a in ACTIVATIONS])}")
    for name, value, one in (("recurrent_dropout", recurrent_dropout, False), ("zoneout", zoneout, True)):
        if not isinstance(value, (float, int)) or isinstance(value, bool):
            raise TypeError(f"{CALL}: {name} must be a real number (float or int), got {type(value).__name__}")
        if not (0 <= value < 1 or (one and value == 1)):
            raise ValueError(f"{CALL}: {name} is {value}; allowed: 0 or more, and {'at most' if one else 'below'} 1")
    if not isinstance(training, bool):
        raise TypeError(f"{CALL}: training must be True or False, got {type(training).__name__}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{CALL}: generator must be a torch.Generator or None, got {type(generator).__name__}")
    if generator is not None and generator.device.type != x.device.type:
        raise ValueError(
            f"{CALL}: generator is on {generator.device}, but x is on {x.device}; allowed: the same for both"
        )


FASTEST = ("61_lstm_persistent", "60_lstm_cell")


def choose(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    *,
    activation: str = "soft",
    recurrent_dropout: float = 0.0,
    zoneout: float = 0.0,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> Choice:
    """By H: stage 61 keeps R in registers, as far as they go."""
    options = dict(activation=activation, recurrent_dropout=recurrent_dropout, zoneout=zoneout)
    check(x, weight_ih, weight_hh, bias, h0, c0, **options, training=training, generator=generator)
    if cut(weight_hh.shape[1], x.dtype, x.device):
        return Choice("61_lstm_persistent", "one launch for all steps, weight_hh stays in registers")
    return Choice("60_lstm_cell", "weight_hh does not fit into the registers of this device, for stage 61")


def make(
    sizes: Mapping[str, int], dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0, **options: object
) -> tuple[Tensor, ...]:
    """Normal x, half as large h0 and c0; weights and a bias as torch.nn.LSTM has them at first."""
    generator = torch.Generator(device).manual_seed(seed)
    seq, batch, inputs, hidden = (sizes[name] for name in SIZES)

    def uniform(*size: int) -> Tensor:
        numbers = torch.rand(*size, generator=generator, dtype=torch.float64, device=generator.device)
        return ((2 * numbers - 1) / math.sqrt(max(hidden, 1))).to(dtype)

    x = random((seq, batch, inputs), dtype, generator)
    weights = [uniform(GATES * hidden, inputs), uniform(GATES * hidden, hidden), uniform(GATES * hidden)]
    h0, c0 = (random((batch, hidden), dtype, generator) / 2 for _ in "hc")
    return x, *weights, h0, c0


def formula(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor | None, h: Tensor, c: Tensor, mask: Tensor, hard: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Step by step in torch, in the tensors' own type."""
    gate, squashed = torch.sigmoid, torch.tanh
    if hard:
        gate, squashed = lambda z: (z / 8 + 0.5).clamp(0, 1), lambda z: z.clamp(-1, 1)
    # Without a step the results have gradients of all, too, which are 0.
    h, c = h + 0 * weight_hh.sum() + 0 * weight_ih.sum() + 0 * x.sum(), c + 0 * weight_hh.sum()
    h = h if bias is None else h + 0 * bias.sum()
    states = []
    for t, products in enumerate(F.linear(x, weight_ih, bias)):
        i, f, g, o = (products + h @ weight_hh.T).chunk(GATES, 1)
        c = gate(f) * c + gate(i) * squashed(g)
        new = gate(o) * squashed(c)
        h = h + mask[t] * (new - h) if mask.numel() else new
        states.append(h)
    return torch.stack(states) if states else h.expand(0, *h.shape), (h, c)


def reference(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    *,
    activation: str = "soft",
    recurrent_dropout: float = 0.0,
    zoneout: float = 0.0,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The formula in float64, step by step. What is drawn is what the function draws from such a generator."""
    given = x.dtype
    x, weight_ih, weight_hh = (tensor.double() for tensor in (x, weight_ih, weight_hh))
    if recurrent_dropout and training:
        kept = dropped(torch.ones_like(weight_hh, dtype=given), recurrent_dropout, generator)
        weight_hh = weight_hh * kept.double()
    size = (x.shape[1], weight_hh.shape[1])
    mask = zoneout_mask((len(x), *size), x, zoneout, training, generator)
    h, c = (x.new_zeros(size) if tensor is None else tensor.double() for tensor in (h0, c0))
    bias = None if bias is None else bias.double()
    return formula(x, weight_ih, weight_hh, bias, h, c, mask, activation == "hard")


def tolerance(sizes: Mapping[str, int], dtype: torch.dtype, **options: object) -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|. Cells are never rounded to 16 bits."""
    finer = unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
    allowed = {
        torch.float64: 1e-5 * finer,
        torch.float32: 1e-5,
        torch.float16: 1.5e-3,
        torch.bfloat16: 1e-2,
    }[dtype]
    return dict.fromkeys((*OUTPUTS, *ARGUMENTS), allowed)


def incumbent(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    *,
    activation: str = "soft",
    **options: object,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What torch.nn.LSTM calls, on a GPU cuDNN; a hard one, or one with zoneout, only as a formula."""
    size = (x.shape[1], weight_hh.shape[1])
    h, c = (x.new_zeros(size) if tensor is None else tensor.to(x.dtype) for tensor in (h0, c0))
    if activation == "hard" or options.get("zoneout") or options.get("recurrent_dropout"):
        mask = zoneout_mask((len(x), *size), x, options.get("zoneout", 0), options.get("training", True), None)
        return formula(x, weight_ih, weight_hh, bias, h, c, mask, activation == "hard")
    biases = () if bias is None else (bias, torch.zeros_like(bias))
    weights, start = [weight_ih, weight_hh, *biases], (h[None], c[None])
    layers, dropout, train, bidirectional, batch_first = 1, 0.0, True, False, False
    y, h_T, c_T = torch.lstm(x, start, weights, bool(biases), layers, dropout, train, bidirectional, batch_first)
    return y, (h_T[0], c_T[0])


def work(sizes: Mapping[str, int], itemsize: int, **options: object) -> Work:
    """A multiplication and an addition for each number of W and R, step and batch; each tensor moved once."""
    seq, batch, inputs, hidden = (sizes[name] for name in SIZES)
    weights = GATES * hidden * (inputs + hidden)
    return Work(2 * seq * batch * weights, itemsize * (seq * batch * (inputs + hidden) + weights))
