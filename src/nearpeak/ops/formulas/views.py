"""Views and metadata: operators that move no bytes; and ops of the host while a device runs the others.

A view gives new sizes and strides to existing memory; the host answers questions about sizes, strides and devices. Both
are free. The schema of a view has an output that aliases an argument, and no write. Operators with such a schema that
copy where they cannot alias are in `MAY_COPY`: free or a copy, by the storages of their outputs.
"""

from __future__ import annotations

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.op import Op

VIEWS = """
    aten._conj aten._fw_primal aten._indices aten._make_dual aten._neg_view aten._nested_get_values
    aten._nested_view_from_buffer aten._nested_view_from_jagged aten._reshape_alias aten._sparse_broadcast_to
    aten._test_autograd_multiple_dispatch_view aten._unpack_dual aten._values aten.adjoint aten.alias
    aten.as_strided aten.broadcast_to aten.ccol_indices aten.chunk aten.col_indices aten.crow_indices
    aten.detach aten.diagonal aten.dsplit aten.expand aten.expand_as aten.hsplit aten.imag aten.indices
    aten.lift_fresh aten.linalg_diagonal aten.mH aten.mT aten.matrix_H aten.moveaxis aten.movedim aten.narrow
    aten.numpy_T aten.permute aten.real aten.row_indices aten.select aten.slice aten.slice_inverse aten.split
    aten.split_with_sizes aten.squeeze aten.swapaxes aten.swapdims aten.t aten.tensor_split aten.transpose
    aten.unbind aten.unflatten aten.unfold aten.unsqueeze aten.values aten.view aten.view_as
    aten.view_as_complex aten.view_as_real aten.vsplit
""".split()

UNMARKED_VIEWS = """
    aten._lazy_clone aten._resize_output aten._sparse_compressed_tensor_unsafe aten._sparse_coo_tensor_unsafe
    aten._sparse_coo_tensor_with_dims_and_tensors aten._sparse_csr_tensor_unsafe aten._unsafe_view aten.lift
    aten.q_per_channel_scales aten.q_per_channel_zero_points aten.resize aten.resize_as aten.set
    aten.unsafe_chunk aten.unsafe_split aten.unsafe_split_with_sizes
""".split()
"""Share memory with their argument, which the schema hides from autograd. `_lazy_clone` copies on the first write."""

IN_PLACE_VIEWS = """
    aten._resize_output_ aten.as_strided_ aten.detach_ aten.requires_grad_ aten.resize_ aten.resize_as_
    aten.set_ aten.squeeze_ aten.swapaxes_ aten.swapdims_ aten.t_ aten.transpose_ aten.unsqueeze_
""".split()
"""Change the sizes, strides or storage of their argument, not its elements."""

MAY_COPY = """
    aten._autocast_to_full_precision aten._autocast_to_reduced_precision aten.conj aten.contiguous aten.cpu
    aten.cuda aten.flatten aten.pin_memory aten.ravel aten.reshape aten.reshape_as aten.resolve_conj
    aten.resolve_neg aten.to
""".split()

METADATA = """
    aten._assert_scalar aten._print aten._use_miopen_ctc_loss aten.q_per_channel_axis aten.q_scale
    aten.q_zero_point aten.qscheme aten._assert_tensor_metadata aten._debug_has_internal_overlap aten._dimI
    aten._dimV aten._fused_sdp_choice aten._functional_assert_scalar aten._functional_sym_constrain_range
    aten._functional_sym_constrain_range_for_size aten._has_compatible_shallow_copy_type
    aten._has_same_storage_numel aten._is_zerotensor aten._nested_get_jagged_dummy aten._nested_get_lengths
    aten._nested_get_max_seqlen aten._nested_get_min_seqlen aten._nested_get_offsets aten._nested_get_ragged_idx
    aten._nnz aten._make_dep_token aten._use_cudnn_ctc_loss aten._version aten.cudnn_is_acceptable
    aten.dense_dim aten.dim aten.element_size aten.get_device aten.is_coalesced aten.is_complex aten.is_conj
    aten.is_contiguous aten.is_distributed aten.is_floating_point aten.is_inference aten.is_leaf aten.is_neg
    aten.is_non_overlapping_and_dense aten.is_pinned aten.is_same_size aten.is_set_to aten.is_signed
    aten.is_strides_like_format aten.numel aten.output_nr aten.record_stream aten.result_type aten.retain_grad
    aten.retains_grad aten.set_data aten.size aten.sparse_dim aten.storage_offset aten.stride
    aten.sym_constrain_range aten.sym_constrain_range_for_size aten.sym_is_contiguous aten.sym_numel
    aten.sym_size aten.sym_storage_offset aten.sym_stride prim.device prim.layout
    profiler._record_function_enter profiler._record_function_enter_new profiler._record_function_exit
""".split()
"""Questions to the host, and marks for the profiler."""


@formula("host", *VIEWS, *UNMARKED_VIEWS, *IN_PLACE_VIEWS, *METADATA)
def view(op: Op) -> Cost:
    """Nothing: no element is read or written by the device."""
    return Cost(family="view")


@formula(*MAY_COPY)
def view_or_copy(op: Op) -> Cost:
    """Nothing where the outputs share the memory of an argument; else each argument read once, the outputs written."""
    storages = {tensor.storage for tensor in op.inputs}
    copies = [tensor for tensor in op.outputs if tensor.storage not in storages]
    if not copies:
        return Cost(family="view")
    return Cost(family="movement", reads=accesses(*op.inputs[:1]), writes=accesses(*copies))
