"""Tensors that cross between processes arrive as they were."""

from __future__ import annotations

import pytest
import torch

from nearpeak.judging.exchange import bytes_of, read_tensors, rescaled, tensors_in, write_tensors

FORMS = {
    "dense": lambda: torch.randn(3, 5),
    "transposed": lambda: torch.randn(5, 3).t(),
    "padded": lambda: torch.randn(3, 8)[:, :5],
    "offset": lambda: torch.randn(16)[1:],
    "expanded": lambda: torch.randn(1, 5).expand(3, 5),
    "empty": lambda: torch.randn(0, 5),
    "scalar": lambda: torch.randn(()),
    "bfloat16": lambda: torch.randn(3, 5).bfloat16(),
    "indices": lambda: torch.arange(7),
    "mask": lambda: torch.rand(4) > 0.5,
    "complex": lambda: torch.randn(3, 5, dtype=torch.complex64),
    "gradient": lambda: torch.randn(3, requires_grad=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_tensor_keeps_values_sizes_strides_and_gradients(name, tmp_path):
    tensor = FORMS[name]()
    write_tensors(tmp_path / "file", tensor)
    new = read_tensors(tmp_path / "file")
    assert torch.equal(new, tensor) and new.dtype == tensor.dtype and new.requires_grad == tensor.requires_grad
    assert not tensor.numel() or new.stride() == tensor.stride()
    assert new.storage_offset() == tensor.storage_offset() or name == "empty"


def test_a_tree_of_arguments_keeps_its_form(tmp_path):
    tree = ((torch.ones(2), [1, 2.5, None, True], float("inf")), {"dim": -1, "dtype": torch.float16})
    write_tensors(tmp_path / "file", tree)
    new = read_tensors(tmp_path / "file")
    assert new[0][1:] == tree[0][1:] and new[1] == tree[1] and torch.equal(new[0][0], tree[0][0])


def test_a_value_that_is_left_to_the_reader_is_written(tmp_path):
    for tensor in (torch.randn(3, dtype=torch.complex64).conj(), torch._neg_view(torch.randn(3))):
        write_tensors(tmp_path / "file", tensor)
        assert torch.equal(read_tensors(tmp_path / "file"), tensor)


def test_other_objects_are_refused(tmp_path):
    with pytest.raises(ValueError, match="neither a tensor nor plain data"):
        write_tensors(tmp_path / "file", object())


def test_a_file_that_ends_early_is_refused(tmp_path):
    write_tensors(tmp_path / "file", torch.ones(100))
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(content[:-4])
    with pytest.raises(ValueError, match="ends early"):
        read_tensors(tmp_path / "file")


def test_rescaled_inputs_are_new_memory_of_the_same_form():
    args = (
        torch.randn(5, 3).t(),
        torch.arange(4),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(2, 3) + 1j,
        torch.tensor(2.0),
    )
    first, second = rescaled(args, 7), rescaled(args, 7)
    for old, a, b in zip(tensors_in(args), tensors_in(first), tensors_in(second), strict=True):
        assert torch.equal(a, b) and a.stride() == old.stride() and a.data_ptr() != old.data_ptr()
    assert torch.equal(first[1], args[1]) and not torch.equal(first[3], args[3])
    assert torch.equal(first[2][0], first[2][1])


def test_rescaled_inputs_are_no_multiples_of_one_another():
    x = torch.randn(6, 6)
    ratios = rescaled((x,), 7)[0] / x
    assert ratios.std(0).min() > 0.01 and ratios.std(1).min() > 0.01
    symmetric = rescaled((x + x.t(),), 7)[0]
    assert torch.allclose(symmetric, symmetric.t())


def test_bytes_are_those_of_the_values():
    x = torch.randn(3, 4, dtype=torch.complex64)
    assert torch.equal(bytes_of(x.conj()), bytes_of(x.conj().resolve_conj()))
    assert torch.equal(bytes_of(x.imag.t()), bytes_of(x.imag.t().contiguous()))
    assert bytes_of(torch.tensor(1.0)).numel() == 4 and bytes_of(torch.randn(1, 128).t()).numel() == 512
    assert bytes_of(torch.randn(2)[::2]).numel() == 4 and bytes_of(torch.empty_strided((0,), (0,))).numel() == 0
