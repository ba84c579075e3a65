"""Quantization, its simulation in training, and products with packed integer weights.

Going to integers or back takes one multiplication per element; rounding, clamping and zero points are not counted. A
product with packed weights multiplies in the dtype of the activations, as the weights are unpacked on the way; it reads
the packed bytes.
"""

from __future__ import annotations

from dataclasses import replace

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.formulas.matrix import matrix_product, result, vector_dtype
from nearpeak.ops.op import Op

_FORMS = ("tensor", "channel", "token", "channel_group")

FLOPS_PER_ELEMENT: dict[str, int] = {
    **dict.fromkeys((f"quantized_decomposed.quantize_per_{form}" for form in _FORMS), 1),
    **dict.fromkeys((f"quantized_decomposed.dequantize_per_{form}" for form in _FORMS), 1),
    "aten.quantize_per_tensor": 1,
    "aten.quantize_per_tensor_dynamic": 1,
    "aten.quantize_per_channel": 1,
    "aten.dequantize": 1,
    # There and back. The mask that backward needs is written.
    "aten.fake_quantize_per_tensor_affine": 2,
    "aten.fake_quantize_per_channel_affine": 2,
    "aten.fake_quantize_per_tensor_affine_cachemask": 2,
    "aten.fake_quantize_per_channel_affine_cachemask": 2,
    "aten._fake_quantize_learnable_per_tensor_affine": 2,
    "aten._fake_quantize_learnable_per_channel_affine": 2,
    "quantized_decomposed.fake_quant_per_channel": 2,
    # Copies, repacking and selection by a mask. The first has a switch whose value is data: off, it only copies.
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams": 0,
    "aten.fake_quantize_per_tensor_affine_cachemask_backward": 0,
    "aten.fake_quantize_per_channel_affine_cachemask_backward": 0,
    "aten.int_repr": 0,
    "aten._make_per_tensor_quantized_tensor": 0,
    "aten._make_per_channel_quantized_tensor": 0,
    "aten._convert_weight_to_int4pack": 0,
    "aten._convert_weight_to_int4pack_for_cpu": 0,
    "aten._dyn_quant_pack_4bit_weight": 0,
}
"""What operators do that go over their operands once."""


@formula(*FLOPS_PER_ELEMENT)
def _elementwise(op: Op) -> Cost:
    """Reads all operands that are not just written, writes the outputs."""
    elements = sum(tensor.elements for tensor in op.outputs if tensor.dtype != "bool")
    if not elements:
        return Cost(family="quantization")
    given = tuple(tensor for tensor in op.inputs if tensor not in op.outputs)
    dtypes = {tensor.dtype for tensor in (*given, *op.outputs)}
    count = float(FLOPS_PER_ELEMENT[op.packet] * elements)
    return Cost(
        family="quantization",
        reads=accesses(*given),
        writes=accesses(*op.written),
        vector_flops={vector_dtype("float64" if "float64" in dtypes else "float32"): count} if count else {},
    )


@formula(
    "aten._fused_moving_avg_obs_fq_helper",
    "aten._fused_moving_avg_obs_fq_helper_functional",
    "aten.fused_moving_avg_obs_fake_quant",
)
def _observed(op: Op) -> Cost:
    """Whether it observes and quantizes is data; the input is read and the outputs are written either way."""
    return Cost(family="quantization", reads=accesses(*(op.tensor("self"),)), writes=accesses(*op.outputs))


@formula(
    "aten._fake_quantize_learnable_per_tensor_affine_backward",
    "aten._fake_quantize_learnable_per_channel_affine_backward",
)
def _learnable_backward(op: Op) -> Cost:
    """The gradient of the scale takes a multiply-add per element at the least."""
    read = (op.tensor("grad"), op.tensor("self"), op.tensor("scale"), op.tensor("zero_point"))
    grad = op.tensor("grad")
    flops = {vector_dtype(grad.dtype): 2.0 * grad.elements} if grad.elements else {}
    return Cost(family="quantization", reads=accesses(*read), writes=accesses(*op.written), vector_flops=flops)


@formula("aten._weight_int4pack_mm", "aten._weight_int4pack_mm_for_cpu", "aten._weight_int8pack_mm")
def _packed_product(op: Op) -> Cost:
    scales = op.tensor("scales" if "scales" in op.arguments else "qScaleAndZeros")
    return _as_quantization(matrix_product(op, "self", "mat2", extra=(scales,)))


@formula("aten._weight_int4pack_mm_with_scales_and_zeros")
def _packed_product_with_zeros(op: Op) -> Cost:
    return _as_quantization(matrix_product(op, "self", "mat2", extra=(op.tensor("qScale"), op.tensor("qZeros"))))


@formula("aten._dyn_quant_matmul_4bit")
def _dynamic_product(op: Op) -> Cost:
    """Activations and packed weights read, the result written; in which dtype it multiplies is the kernel's choice."""
    return Cost(
        family="quantization",
        reads=accesses(*op.tensors("inp", "packed_weights")),
        writes=accesses(*op.written),
    )


@formula("aten._mixed_dtypes_linear")
def _mixed_dtypes_linear(op: Op) -> Cost:
    elements = float(result(op).elements)
    activation = {"float32": elements} if op.arguments.get("activation") not in (None, "", "none") else {}
    cost = matrix_product(op, "input", "weight", added="bias", extra=(op.tensor("scale"),), vector=activation)
    return _as_quantization(cost)


def _as_quantization(cost: Cost) -> Cost:
    return replace(cost, family="quantization")
