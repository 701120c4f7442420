"""Parts of layers in plain PyTorch: matrix products, gates, rotary positions and norms.

They compute the same bits as autograd's step-by-step forms, in fewer passes over memory.

Letters: S tokens that this rank holds, B batch (1 when packed), H hidden, F inner size of an MLP;
I inputs and O outputs of a linear; N heads, D head size, K pairs of rotary channels, D/2 unless
only a part of each head turns.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_ONEDNN = torch.backends.mkldnn.is_available()
_SMALLEST = 2**21
"""M·K·N below which a call of oneDNN costs more than it saves."""


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left (M, K), right (N, K), of any strides -> left · rightᵀ (M, N), written to ``out`` if any.

    In fp32 on a CPU by oneDNN, which on an AMD EPYC (Zen 5) is twice as fast as PyTorch's MKL.
    Whether oneDNN computes it depends on the sizes alone. The result may be transposed in memory.
    """
    (m, k), n = left.shape, right.shape[0]
    is_single = left.dtype == right.dtype == torch.float32
    if not (_ONEDNN and left.is_cpu and is_single and m * k * n >= _SMALLEST):
        return torch.mm(left, right.T, out=out)
    # oneDNN copies a transposed left matrix slowly, so it gets the smaller one there.
    is_swapped = left.stride(1) != 1 and n < m
    first, second = (right, left) if is_swapped else (left, right)
    result = torch.ops.mkldnn._linear_pointwise(first, second, None, "none", [], "")
    result = result.T if is_swapped else result
    return result if out is None else out.copy_(result)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., I), weight (O, I) -> (..., O), by `product` in both directions."""
    return cast("Tensor", _Linear.apply(x, weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return product(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = product(rows, weight.T).view(*gradient.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            grad_weight = product(rows.T, x.flatten(0, -2).T)
        return grad_x, grad_weight


_ACTIVATION_BACKWARD: dict[Any, Callable[..., Tensor]] = {
    functional.silu: torch.ops.aten.silu_backward.grad_input,
    functional.gelu: torch.ops.aten.gelu_backward.grad_input,
}


def gate(both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """both (..., 2F) -> activation(first half) * second half, (..., F), such as SwiGLU.

    activation: SiLU or GELU, or a partial of these. The backward keeps its output, and writes both
    halves of the gradient in place.
    """
    return cast("Tensor", _Gate.apply(both, activation))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        inputs, values = both.chunk(2, dim=-1)
        active = activation(inputs)
        ctx.save_for_backward(both, active)
        ctx.activation = activation
        return active * values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), (both, active) = gradients, ctx.saved_tensors
        inputs, values = both.chunk(2, dim=-1)
        total = both.new_empty(both.shape)
        grad_inputs, grad_values = total.chunk(2, dim=-1)
        torch.mul(gradient, active, out=grad_values)
        torch.mul(gradient, values, out=grad_inputs)
        function, options = ctx.activation, {}
        if isinstance(function, partial):
            function, options = function.func, function.keywords
        backward = _ACTIVATION_BACKWARD[function]
        backward(grad_inputs, inputs, **options, grad_input=grad_inputs)
        return total, None


class MRope(nn.Module):
    """Multimodal rotary embedding, as `GPTModel.rotary_pos_emb`.

    axes: (K,) int64, the axis that each channel follows: 0 time, 1 height, 2 width.
    """

    def __init__(self, axes: Tensor, base: float) -> None:
        super().__init__()
        channel = torch.arange(len(axes), dtype=torch.float32)
        self.inv_freq: Tensor
        self.axes: Tensor
        self.register_buffer("inv_freq", base ** -(channel / len(axes)), persistent=False)
        self.register_buffer("axes", axes, persistent=False)

    def forward(
        self, position_ids: Tensor, mrope_section: object = None, cp_group: object = None
    ) -> Tensor:
        """position_ids (3, B, S) int64 -> frequencies (S, B, 1, 2K) fp32."""
        positions = position_ids.permute(2, 1, 0).to(self.inv_freq.dtype)  # (S, B, 3)
        freqs = positions[..., self.axes] * self.inv_freq  # (S, B, K)
        return torch.cat((freqs, freqs), dim=-1)[:, :, None, :]


def interleaved_axes(section: Sequence[int]) -> Tensor:
    """Return the axes of alternating channels, as in Qwen3-VL: (K,) int64.

    Channel c follows height if c % 3 == 1 and c < 3·section[1], width if c % 3 == 2 and
    c < 3·section[2], else time. Source: transformers
    `Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope`.
    """
    axes = torch.zeros(sum(section), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


def contiguous_axes(section: Sequence[int]) -> Tensor:
    """Return the axes of blocks of channels: time, height, width, as in Qwen2-VL: (K,) int64.

    Source: transformers `Qwen2_5_VLRotaryEmbedding.recomposition_frequencies`. Megatron's class
    cuts the frequencies of packed sequences wrongly under context parallelism.
    """
    return torch.arange(3).repeat_interleave(torch.tensor(section), output_size=sum(section))


def rotate(frequencies: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """Rotate every pair of channels (c, c + K) of each of ``states`` (S, B, N, D).

    frequencies: angles (S, B, 1, 2K) fp32, the second half of the channels like the first. Channels
    from 2K on stay as they are. Bits are those of Megatron's unfused rotary embedding.
    """
    dtype, channels = states[0].dtype, {state.shape[-1] for state in states}
    assert min(channels) >= frequencies.shape[-1], (
        f"frequencies of {frequencies.shape[-1]} channels for heads of {channels}"
    )
    cos, sin = frequencies.cos().to(dtype), frequencies.sin().to(dtype)
    return tuple(_Rotate.apply(state, cos, sin) for state in states)  # type: ignore[misc]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width, half_sin = cos.shape[-1], sin.chunk(2, dim=-1)[0]
    result = x.new_empty(x.shape)
    turning, rotated = x[..., :width], result[..., :width]
    (first, second), (rotated_first, rotated_second) = (
        part.chunk(2, dim=-1) for part in (turning, rotated)
    )
    torch.mul(second, -half_sin, out=rotated_first)
    torch.mul(first, half_sin, out=rotated_second)
    rotated.add_(turning * cos)
    if width < x.shape[-1]:
        result[..., width:] = x[..., width:]
    return result


class _Rotate(torch.autograd.Function):
    """The gradient rotates back, by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, -sin), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., H) of two dimensions or more, weight (H,), both fp32 or fp64 -> (..., H).

    Torch's fused norm on a GPU. On a CPU torch composes the norm of several operators; this
    computes the same bits in half the time.
    """
    if not x.is_cpu:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return cast("Tensor", _RMSNorm.apply(x, weight, eps))


class _RMSNorm(torch.autograd.Function):
    """Torch's composite norm, in place where possible: y = w * (x * r), r = 1 / RMS of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = x.square()
        r = y.mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return torch.mul(x, r, out=y).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight, r) = gradients, ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (x * r).mul_(g).flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            grad_x = g * weight
            # The gradient of r, (..., 1), then of the mean square, times 2.
            slope = (grad_x * x).sum(-1, keepdim=True).mul_(-0.5).mul_(r * r * r)
            grad_x.mul_(r).add_(x * slope.div_(x.shape[-1]).mul_(2))
        return grad_x, grad_weight, None


def _parameter(config, hidden_size: int, value: float) -> nn.Parameter:
    """(H,), marked so that Megatron sums its gradient under sequence parallelism."""
    parameter = nn.Parameter(torch.full((hidden_size,), value, dtype=config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


class _Norm(nn.Module):
    initial = 1.0  # value of the weight

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, hidden_size, self.initial)


class RMSNorm(_Norm):
    """Root-mean-square norm of x (..., H), computed in fp32, in the dtype of its input.

    In 16 bits it is rounded before the factor is applied, as in transformers; torch's fused norm
    with a factor would round once.
    """

    def forward(self, x: Tensor) -> Tensor:
        return _rounded_norm(x, self.weight, self.eps)


def _rounded_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return rms_norm(x, weight, eps)
    return weight * functional.rms_norm(x, (x.shape[-1],), None, eps)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x, gate (..., H), weight (H,) -> `RMSNorm` of x times SiLU of the gate, (..., H).

    In 16 bits the product is computed in fp32, as in transformers' `Qwen3_5RMSNormGated`.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (_rounded_norm(x, weight, eps) * functional.silu(gate.to(wide))).to(x.dtype)


class ZeroCenteredRMSNorm(_Norm):
    """`RMSNorm` with a factor of 1 + weight, applied in fp32, as transformers' `Gemma3RMSNorm`."""

    initial = 0.0
    zero_centered_gamma = True  # the name of Transformer Engine's norms for it

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        factor = 1 + self.weight.to(wide.dtype)
        return rms_norm(wide, factor, self.eps).to(x.dtype)


class LayerNorm(_Norm):
    """Mean and variance norm with a bias, in the dtype of its input."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = _parameter(config, hidden_size, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


def norm_class(config) -> type[_Norm]:
    """Return the class of norms for a stack with this `TransformerConfig`."""
    if config.normalization == "LayerNorm":
        return LayerNorm
    return ZeroCenteredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm
