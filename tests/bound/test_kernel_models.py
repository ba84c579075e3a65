"""What kernels are expected to take on a GPU: the physical terms, and figures that others measured."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import nearpeak
from benchmarks.estimates.expected_cases import FAMILIES, draw_case
from benchmarks.estimates.expected_families import fake_estimate, score, shares, with_host_of
from nearpeak import kernels
from nearpeak.bound.expected import Expectation
from nearpeak.bound.kernel_models import Gpu, kernel_constants, list_seconds
from nearpeak.machines import catalogue

BF16, FP32 = torch.bfloat16, torch.float32


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def estimate(build, on="h200-sxm"):
    """The estimate of what `build` returns: a callable and its arguments."""
    with nearpeak.fake():
        function, *args = build()
    return nearpeak.estimate(function, *args, on=on)


def expected(build, on="h200-sxm"):
    return estimate(build, on).expected_device_s


OPS = {
    "add": lambda: (torch.add, randn(4096, 4096), randn(4096, 4096)),
    "transposing copy": lambda: (lambda x: x.t().contiguous(), randn(4096, 4096)),
    "sum": lambda: (torch.sum, randn(4096, 4096)),
    "softmax": lambda: (lambda x: torch.softmax(x, -1), randn(4096, 4096)),
    "softmax of columns": lambda: (lambda x: torch.softmax(x, 0), randn(4096, 4096)),
    "layer norm": lambda: (lambda x: functional.layer_norm(x, (4096,)), randn(4096, 4096)),
    "batch norm": lambda: (lambda x: functional.batch_norm(x, None, None, training=True), randn(8, 64, 56, 56)),
    "loss": lambda: (functional.mse_loss, randn(4096, 4096), randn(4096, 4096)),
    "embedding": lambda: (functional.embedding, torch.zeros(512, device="cuda", dtype=torch.long), randn(1000, 512)),
    "cumulative sum": lambda: (lambda x: x.cumsum(-1), randn(4096, 4096)),
    "sort": lambda: (torch.sort, randn(64, 4096)),
    "largest": lambda: (lambda x: torch.topk(x, 8), randn(64, 4096)),
    "product": lambda: (torch.mm, randn(1024, 1024), randn(1024, 1024)),
    "attention": lambda: (functional.scaled_dot_product_attention, *(randn(1, 8, 1024, 64) for _ in range(3))),
    "convolution": lambda: (lambda x, w: functional.conv2d(x, w, padding=1), randn(8, 64, 56, 56), randn(64, 64, 3, 3)),
    "depthwise": lambda: (lambda x, w: functional.conv2d(x, w, groups=64), randn(8, 64, 56, 56), randn(64, 1, 3, 3)),
    "pooling": lambda: (lambda x: functional.max_pool2d(x, 2), randn(8, 64, 56, 56)),
    "fourier": lambda: (torch.fft.rfft, randn(64, 4096, dtype=FP32)),
    "zeros": lambda: (lambda x: torch.zeros_like(x), randn(4096, 4096)),
    "random": lambda: (lambda x: torch.randn_like(x), randn(4096, 4096)),
    "lists": lambda: (lambda a, b: torch._foreach_add_([a], [b]), randn(4096), randn(4096)),
}


@pytest.mark.parametrize("name", OPS)
def test_what_is_expected_is_never_below_the_bound(name):
    for machine in ("h200-sxm", "a100-sxm-80gb", "rtx-4090", "mi300x"):
        found = estimate(OPS[name], machine)
        for op in found.ops:
            assert op.expected_seconds is not None and math.isfinite(op.expected_seconds)
            assert op.expected_seconds >= op.seconds
        assert found.expected_device_s > 0.5e-6


def test_a_few_rows_take_as_long_as_one():
    def norm(rows):
        return lambda: (lambda x: functional.layer_norm(x, (8192,)), randn(rows, 8192))

    few = estimate(norm(16))
    assert few.expected_device_s > 10 * few.as_written_s
    assert few.expected_device_s == pytest.approx(expected(norm(1)), rel=0.05)
    assert expected(norm(65536)) > 10 * few.expected_device_s


def test_rows_that_fit_one_warp_are_near_their_bytes():
    """4 x 16 x 2048 rows of 2048 took 572 us on an H200; a block for each row would take more than twice that."""

    def rows(length):
        return expected(lambda: (lambda x: torch.softmax(x, -1), randn(131072, length)))

    assert rows(2048) == pytest.approx(572e-6, rel=0.2)
    assert rows(2064) > 1.8 * rows(2048)


def test_steps_that_follow_each_other_take_their_time():
    def network(steps, hidden=512):
        module = torch.nn.LSTM(128, hidden, 2).to("cuda", BF16)
        return module, randn(steps, 8, 128)

    short, long = expected(lambda: network(64)), expected(lambda: network(512))
    assert long == pytest.approx(8 * short, rel=0.2)
    assert short > 128 * 1e-6  # two layers of 64 steps, none below a microsecond
    assert expected(lambda: (lambda x: x.cumsum(0), randn(4096, 256))) > 4096 * 0.1e-6


def test_casts_down_and_up_are_kernels_of_two_kinds():
    up = expected(lambda: (lambda x: x.float(), randn(2**26)))
    down = expected(lambda: (lambda x: x.bfloat16(), randn(2**26, dtype=FP32)))
    assert up > 1.3 * down


def test_across_the_order_of_memory_each_element_is_an_access():
    copied = expected(lambda: (torch.clone, randn(8192, 8192)))
    transposed = expected(lambda: (lambda x: x.t().contiguous(), randn(8192, 8192)))
    assert transposed > 5 * copied


def test_rows_that_are_not_aligned_slow_a_product_down():
    even = expected(lambda: (torch.mm, randn(4096, 4096), randn(4096, 4096)))
    odd = expected(lambda: (torch.mm, randn(4095, 4095), randn(4095, 4095)))
    assert odd > 3 * even


def test_flash_attention_carries_over_to_another_generation():
    """FlashAttention-2 reaches about 220 TFLOP/s on an A100, by its authors: Dao, 2023, figure 5, width 128."""

    def build():
        return functional.scaled_dot_product_attention, *(randn(4, 16, 4096, 128) for _ in range(3))

    found = estimate(build, "a100-sxm-80gb")
    (op,) = found.ops
    assert "flash" in op.name
    assert found.flops / found.expected_s == pytest.approx(220e12, rel=0.2)


def test_attention_written_out_on_an_h100():
    """64 heads of queries and 4 of keys, 4096 tokens: 11.8 ms were measured on an H100."""

    def written_out(query, key, value):
        key, value = (tensor.repeat_interleave(16, 1) for tensor in (key, value))
        scores = (query @ key.mT).float() * (1 / math.sqrt(query.shape[-1]))
        return torch.softmax(scores, -1).to(value.dtype) @ value

    def build():
        return written_out, randn(1, 64, 4096, 128), *(randn(1, 4, 4096, 128) for _ in range(2))

    assert expected(build, "h100-sxm") == pytest.approx(11.8e-3, rel=0.15)


def test_small_ops_in_a_row_take_the_time_of_the_host():
    def clones(count):
        def call(x):
            for _ in range(count):
                x = x.clone()
            return x

        return lambda: (call, randn(64))

    many, one = estimate(clones(720)), estimate(clones(1))
    assert many.expected_device_s > 720 * 1e-6
    assert many.expected_s == pytest.approx(720 * kernel_constants().constants["host"]["call"], rel=0.05)
    assert one.expected_s == one.expected_device_s  # its launch is hidden behind what ran before


def test_a_kernel_waits_for_the_host_and_for_the_kernel_before_it():
    late = Expectation(seconds=(1.0, 0.0, 1.0), measured_on="", host=(5.0, 5.0, 5.0))
    assert late.total == 16.0  # the second kernel is called after 15 seconds
    early = Expectation(seconds=(9.0, 0.0, 9.0), measured_on="", host=(1.0, 1.0, 1.0), gap=0.5)
    assert early.total == 1.0 + 9.0 + 0.5 + 9.0
    assert early.device == 18.5


def test_figures_of_a_machine_scale_with_what_it_has():
    """Twice the bandwidth halves a copy; a scan does not care."""
    copy = lambda: (torch.clone, randn(2**28))  # noqa: E731
    slow, fast = (catalogue.find(name).achievable.bandwidth for name in ("a100-sxm-40gb", "h200-sxm"))
    assert expected(copy, "a100-sxm-40gb") / expected(copy) == pytest.approx(fast / slow, rel=0.05)


def test_convolutions_are_counted_in_the_direct_form():
    def build():
        return lambda x, w: functional.conv2d(x, w, padding=1), randn(1, 64, 34, 34), randn(64, 64, 3, 3)

    found = estimate(build)
    direct = 2 * 64 * 64 * (3 * 34 - 2) ** 2
    assert found.ops[0].flops == found.flops == direct
    assert sum(found.work.flops.values()) < 0.3 * direct  # what the bound is of: the least that a fast algorithm needs


@pytest.mark.parametrize(
    ("kind", "moved", "item", "launches", "measured"),
    [
        ("fused", 0.470e9, 2, 1, 164e-6),  # AdamW
        ("fused", 0.940e9, 4, 1, 263e-6),
        ("fused", 1.879e9, 2, 1, 679e-6),
        ("fused", 1.342e9, 2, 1, 442e-6),  # SGD with momentum
        ("foreach", 0.537e9, 2, 7, 185e-6),  # mul_
        ("foreach", 0.805e9, 2, 7, 237e-6),  # add_
        ("foreach", 22.65e9, 4, 270, 6.22e-3),  # norm
    ],
)
def test_kernels_over_lists_take_instructions_beside_their_bytes(kind, moved, item, launches, measured):
    """Times of an H200, in which all but the last are far from the bandwidth."""
    constants, machine = kernel_constants().constants, nearpeak.machine("h200-sxm")
    gpu = Gpu.of(machine, constants)
    seconds = list_seconds(moved / gpu.bandwidth, moved / item, launches, kind, gpu, constants)
    assert seconds == pytest.approx(measured, rel=0.15)


def test_narrow_groups_of_a_convolution_are_one_kernel_and_others_are_one_each():
    def grouped(groups, channels):
        def build():
            weight = randn(channels, channels // groups, 3, 3)
            data = randn(4, channels, 14, 14).to(memory_format=torch.channels_last)
            return lambda x, w: functional.conv2d(x, w, padding=1, groups=groups), data, weight

        return expected(build)

    assert grouped(32, 128) < 15e-6
    assert grouped(4, 192) > 4 * 4e-6  # 48 channels in each group, which do not divide a tile


def test_layouts_are_converted_where_the_channels_come_first():
    def strided(order, size):
        def build():
            data, weight = (x.to(memory_format=order) for x in (randn(16, 256, size, size), randn(256, 256, 1, 1)))
            return lambda x, w: functional.conv2d(x, w, stride=2), data, weight

        return expected(build)

    first, last = (strided(order, 64) for order in (torch.contiguous_format, torch.channels_last))
    around = 2 * 2 * (16 * 256 * 64 * 64 + 16 * 256 * 32 * 32) / catalogue.find("h200-sxm").achievable.bandwidth
    assert first - last > around


def test_a_gradient_of_weights_with_many_taps_is_slow():
    def weights_gradient(taps):
        def build():
            data, weight = randn(16, 64, 112, 112), randn(64, 64, taps, taps)

            def call(x, w, gradient):
                mask = [False, True, False]
                options = ([1, 1], [taps // 2] * 2, [1, 1], False, [0, 0], 1, mask)
                return torch.ops.aten.convolution_backward(gradient, x, w, None, *options)

            return call, data, weight, randn(16, 64, 112, 112)

        return expected(build)

    assert weights_gradient(7) > 2.5 * weights_gradient(5)


def test_lists_of_whole_vectors_are_faster():
    def add(elements):
        return expected(
            lambda: (lambda a, b: torch._foreach_add_(a, b), [randn(elements)] * 16, [randn(elements)] * 16)
        )

    assert add(2**21 + 1) > 1.3 * add(2**21)


def test_channels_last_are_averaged_place_after_place():
    def average(order, channels):
        data = lambda: randn(4, channels, 112, 112).to(memory_format=order)  # noqa: E731
        return expected(lambda: (lambda x: functional.adaptive_avg_pool2d(x, 7), data()))

    assert average(torch.channels_last, 16) > 10 * average(torch.contiguous_format, 16)
    assert average(torch.channels_last, 32) == pytest.approx(average(torch.channels_last, 16), rel=0.1)


def test_layers_of_a_recurrent_network_run_beside_each_other():
    def network(layers):
        return expected(lambda: (torch.nn.LSTM(512, 512, layers).to("cuda", BF16), randn(256, 8, 512)))

    assert 1.2 * network(1) < network(4) < 3.5 * network(1)


def chain(count, *, backward):
    def build():
        x = randn(64, dtype=FP32).requires_grad_(backward)

        def call(x):
            for _ in range(count):
                x = torch.nn.functional.softplus(x)
            if backward:
                x.backward(torch.ones_like(x))
            return x

        return call, x

    return build


def test_a_backward_pass_has_a_start_and_then_costs_what_its_nodes_do():
    host = kernel_constants().constants["host"]
    few, many = (estimate(chain(count, backward=True)).expected_s for count in (50, 150))
    forward = estimate(chain(100, backward=False)).expected_s
    assert many - few - forward == pytest.approx(100 * host["backward_call"], rel=0.05)
    assert few > forward / 2 + 50 * host["backward_call"] + 0.9 * host["backward_pass"]


def test_a_result_that_autograd_saves_costs_the_host_nothing():
    """A saved result is traced as a detached alias, which no operator makes in eager mode."""
    calls = {}
    for function in (torch.tanh, torch.sin):  # one saves its result, one its operand

        def build(function=function):
            def call(x):
                for _ in range(100):
                    x = function(x)
                return x

            return call, randn(64, dtype=FP32).requires_grad_()

        calls[function] = estimate(build).expected_s
    assert calls[torch.tanh] == pytest.approx(calls[torch.sin], rel=0.02)


def test_the_host_of_a_calibrated_machine_sets_the_pace_of_small_ops():
    machine = catalogue.find("h200-sxm")
    host = kernel_constants().constants["host"]
    slow = with_host_of([{"host_enqueue": 2 * host["enqueue"]}], machine)
    assert with_host_of([{"seconds": 1.0}], machine) == machine
    usual, slower = (estimate(chain(100, backward=True), on).expected_s for on in (machine, slow))
    assert slower == pytest.approx(2 ** host["pace"] * usual, rel=0.02)
    assert 1.3 * usual < slower < 2 * usual  # Python and autograd vary less than launches


def attention(batch, heads, tokens, width, *, causal=False, mask=False):
    def build():
        q, k, v = (randn(batch, heads, tokens, width) for _ in range(3))
        bias = randn(1, 1, tokens, tokens) if mask else None
        call = lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)  # noqa: E731
        return call, q, k, v

    return expected(build)


def test_causal_attention_lasts_as_long_as_its_longest_block():
    """Where each block has a multiprocessor of its own, the last rows, which see all keys, decide."""
    assert attention(1, 8, 1024, 128, causal=True) == pytest.approx(attention(1, 8, 1024, 128), rel=0.05)
    assert attention(8, 32, 4096, 128, causal=True) < 0.65 * attention(8, 32, 4096, 128)
    assert attention(1, 12, 828, 256, causal=True) == pytest.approx(26.1e-6, rel=0.25)


def test_a_mask_with_rows_of_an_odd_length_is_read_element_by_element():
    assert attention(16, 64, 185, 64, mask=True) > 1.3 * attention(16, 64, 186, 64, mask=True)


@pytest.mark.parametrize(("rows", "measured"), [(302, 627e-6), (980, 1.74e-3)])
def test_tiles_of_a_product_have_any_multiple_of_8_columns(rows, measured):
    """128 experts, padded to the busiest one, as `benchmarks/results/gallery_h200.json` has them."""
    seconds = expected(lambda: (torch.bmm, randn(128, rows, 4096), randn(128, 4096, 1536)))
    assert seconds == pytest.approx(measured, rel=0.25)


def test_a_gradient_of_a_norm_that_is_not_contiguous_is_copied_first():
    def backward(expand):
        def build():
            x, weight = randn(16384, 4096).requires_grad_(), randn(4096).requires_grad_()

            def call(x, weight):
                result = functional.rms_norm(x, (4096,), weight)
                gradient = randn(1, 1).expand(16384, 4096) if expand else randn(16384, 4096)
                return torch.autograd.grad(result, (x, weight), gradient)

            return call, x, weight

        ops = estimate(build).ops
        return sum(op.expected_seconds for op in ops if "norm_backward" in op.name)

    assert backward(True) > backward(False) + 16384 * 4096 * 2 / 4.8e12


def test_a_mean_of_squares_is_faster_than_a_mean_and_a_variance():
    rows = lambda: randn(16384, 4096)  # noqa: E731
    squares = expected(lambda: (lambda x: functional.rms_norm(x, (4096,)), rows()))
    assert squares < 0.9 * expected(lambda: (lambda x: functional.layer_norm(x, (4096,)), rows()))
    assert squares == pytest.approx(76.1e-6, rel=0.25)


def test_the_rows_of_a_loss_are_spread_over_a_block_by_their_number():
    def loss(rows):
        target = lambda: torch.zeros(rows, device="cuda", dtype=torch.long)  # noqa: E731
        return expected(lambda: (lambda x, y: functional.nll_loss(x, y), randn(rows, 100), target()))

    assert loss(1024) == loss(16384) < 0.7 * loss(32768)
    assert loss(1400) > 1.2 * loss(1024)  # 64 threads for both


def test_an_image_with_channels_first_is_resized_by_a_thread_for_each_place():
    resize = lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear")  # noqa: E731
    assert expected(lambda: (resize, randn(32, 32, 224, 224, dtype=FP32))) == pytest.approx(935e-6, rel=0.25)
    assert expected(lambda: (resize, randn(16, 256, 14, 14))) == pytest.approx(1518e-6, rel=0.25)


def test_a_gradient_of_pooling_adds_up_the_windows_that_overlap():
    def backward(window, stride):
        def build():
            x = randn(32, 256, 56, 56).requires_grad_()
            result = functional.avg_pool2d(x, window, stride)
            return lambda: torch.autograd.grad(result, x, torch.empty_like(result), retain_graph=True)

        def built():
            return (build(),)

        return expected(built)

    assert backward(4, 2) > 1.1 * backward(4, 4)


@pytest.mark.parametrize(("batch", "tokens", "measured"), [(64, 256, 218e-6), (8, 2048, 216e-6), (1, 16384, 470e-6)])
def test_linear_attention_takes_turns_and_starts_segments_with_their_states(batch, tokens, measured):
    """`benchmarks/results/kernels_h200.json`, with caches that are warm."""
    build = lambda: (nearpeak.kernels.linear_attention, *(randn(batch, 16, tokens, 128) for _ in range(3)))  # noqa: E731
    assert expected(build) == pytest.approx(measured, rel=0.15)


def test_the_host_takes_longer_for_some_kinds_of_ops():
    host = kernel_constants().constants["host"]
    q = lambda: randn(1, 2, 64, 64)  # noqa: E731
    two = estimate(lambda: (lambda q: functional.scaled_dot_product_attention(q, q, q) + 1, q())).expected_s
    one = estimate(lambda: (lambda q: (q * 2) + 1, q())).expected_s
    assert two - one > 0.8 * (host["attention"] - host["call"])


DRAW = Path(__file__).parents[2] / "benchmarks" / "results" / "expected_cases_h200_7.json"


@pytest.mark.parametrize(("family", "least"), [("normalization", 0.8), ("optimizer", 0.75), ("creation", 0.7)])
def test_cases_that_were_drawn_and_measured_are_as_expected(family, least):
    rows = score([DRAW], catalogue.find("h200-sxm"), every=False, family=family)
    near, far, _ = shares(rows)
    assert near >= least and far >= 0.95


def rows_of_norm(rows, width):
    return expected(lambda: (lambda x: functional.layer_norm(x, (width,)), randn(rows, width)))


def test_a_norm_whose_rows_are_not_whole_vectors_takes_two_kernels():
    assert rows_of_norm(22515, 355) == pytest.approx(140e-6, rel=0.25)
    assert rows_of_norm(22515, 355) > 2 * rows_of_norm(22515, 356)


def test_few_columns_leave_few_blocks_for_the_gradients_of_a_norms_weights():
    def backward(rows, width):
        def build():
            x, weight, bias = randn(rows, width), randn(width), randn(width)
            mean, rstd = randn(rows, 1, dtype=FP32), randn(rows, 1, dtype=FP32)
            call = torch.ops.aten.native_layer_norm_backward
            mask = [True, True, True]
            return lambda g, x: call(g, x, [width], mean, rstd, weight, bias, mask), randn(rows, width), x

        return expected(build)

    assert backward(42992, 80) == pytest.approx(167e-6, rel=0.25)
    assert backward(42992, 80) > 2 * backward(80 * 32, 42992 // 32)  # as many elements, and blocks for all processors


def test_long_rows_of_a_softmax_are_read_once_where_they_are_whole_vectors():
    softmax = lambda width: expected(lambda: (lambda x: torch.softmax(x, -1), randn(5776, width)))  # noqa: E731
    assert softmax(17500) == pytest.approx(218e-6, rel=0.25)
    assert softmax(17500) > 1.1 * softmax(17504)


def test_an_element_that_is_taken_fetches_a_sector_unless_the_table_is_small():
    def take(rows):
        index = lambda: torch.zeros(2**20, device="cuda", dtype=torch.long)  # noqa: E731
        return expected(lambda: (torch.take, randn(rows, 128, dtype=FP32), index()))

    sectors = 32 * 2**20 / catalogue.find("h200-sxm").achievable.bandwidth
    assert take(2**18) - take(2**10) > 0.5 * sectors


def test_a_thread_scatters_up_to_8_elements_one_after_the_other():
    def one_hot(count):
        index = lambda: torch.zeros(count, 1, device="cuda", dtype=torch.long)  # noqa: E731
        return expected(lambda: (lambda t, i: t.scatter_(1, i, 1.0), randn(count, 64, dtype=FP32), index()))

    assert one_hot(1024) > 1.8 * one_hot(64)
    assert one_hot(8192) == pytest.approx(one_hot(1024), rel=0.15)


def fused(name, elements, tensors):
    def build():
        parameters = [torch.nn.Parameter(randn(elements)) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        momentum = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, fused=True, **momentum)
        optimizer.step()
        return (optimizer.step,)

    return expected(build)


def test_a_fused_step_waits_for_the_blocks_of_its_longest_tensor():
    assert fused("SGD", 556976, 4) == pytest.approx(20e-6, rel=0.25)
    assert fused("Adam", 1561048, 4) == pytest.approx(42e-6, rel=0.25)
    assert fused("Adam", 1441286, 16) > 1.2 * fused("Adam", 1441288, 16)  # no vectors


def test_a_launch_of_a_fused_step_has_some_tens_of_tensors():
    assert fused("Adam", 6138, 64) > 1.3 * fused("Adam", 6138, 36)


def test_a_transform_that_fills_a_multiprocessor_loads_computes_and_stores_in_turns():
    transform = lambda rows, width: expected(  # noqa: E731
        lambda: (torch.fft.fft, torch.complex(randn(rows, width, dtype=FP32), randn(rows, width, dtype=FP32)))
    )
    assert transform(1672, 32768) == pytest.approx(417e-6, rel=0.25)
    assert transform(1672, 32768) > 1.5 * transform(1672 * 8, 4096)


def test_a_product_of_a_few_tiles_more_than_a_wave():
    product = lambda rows: expected(lambda: (torch.mm, randn(rows, 8192), randn(8192, 2048)))  # noqa: E731
    assert product(17 * 128) == pytest.approx(138e-6, rel=0.25)
    assert product(17 * 128) > 1.2 * product(16 * 128)


def test_a_convolution_without_taps_is_a_product():
    def build():
        data = randn(2, 96, 64, 64, dtype=FP32).to(memory_format=torch.channels_last)
        return functional.conv2d, data, randn(1024, 96, 1, 1, dtype=FP32)

    assert expected(build) == pytest.approx(19.6e-6, rel=0.25)


def test_a_strided_gradient_of_a_depthwise_convolution_goes_tap_by_tap():
    def backward(stride):
        def build():
            x, weight = randn(64, 512, 32, 32, dtype=torch.float16), randn(512, 1, 5, 5, dtype=torch.float16)
            size = 32 // stride
            gradient = randn(64, 512, size, size, dtype=torch.float16)
            options = ([stride] * 2, [2, 2], [1, 1], False, [0, 0], 512, [True, True, False])
            return lambda g, x, w: torch.ops.aten.convolution_backward(g, x, w, None, *options), gradient, x, weight

        return expected(build)

    assert backward(2) == pytest.approx(1.21e-3, rel=0.25)
    assert backward(2) > 2 * backward(1)


def test_channels_last_pooling_has_instructions_of_its_own():
    def pooled(function, order, shape):
        return expected(lambda: (function, randn(*shape).to(memory_format=order)))

    average = lambda x: functional.avg_pool2d(x, 3, 2, 1)  # noqa: E731
    last, first = (
        pooled(average, order, (1, 256, 112, 112)) for order in (torch.channels_last, torch.contiguous_format)
    )
    assert last > 1.3 * first
    adaptive = lambda x: functional.adaptive_avg_pool2d(x, 7)  # noqa: E731
    assert pooled(adaptive, torch.channels_last, (1, 512, 14, 14)) == pytest.approx(31.5e-6, rel=0.35)


HALF = torch.float16


def integers(limit, *shape):
    return torch.randint(limit, shape, device="cuda")


def channels_last(*shape, dtype):
    return randn(*shape, dtype=dtype).to(memory_format=torch.channels_last)


def pooled_gradient(function, *shape, dtype=BF16):
    def build():
        x = randn(*shape, dtype=dtype).requires_grad_()
        result = function(x)
        gradient = torch.randn_like(result)
        return lambda: torch.autograd.grad(result, x, gradient, retain_graph=True)

    return lambda: (build(),)


def recurrent(kind, inner, hidden, steps, batch, dtype, **options):
    def build():
        network = getattr(torch.nn, kind)(inner, hidden, batch_first=True, **options).to("cuda", dtype)
        return torch.no_grad()(lambda x: network(x)[0]), randn(batch, steps, inner, dtype=dtype)

    return build


MEASURED = {
    "one number on the device": (
        3.05e-6, lambda: (torch.div, randn(1, 8192), randn(1, 1))
    ),
    "a norm by one block, 4 elements at a time": (
        16.5e-6, lambda: (torch.linalg.vector_norm, randn(78001, dtype=HALF))
    ),
    "a scan of single elements": (
        1.0e-6, lambda: (lambda x: x.cumsum(0), randn(1, 16, dtype=HALF))
    ),
    "rows that are taken again": (
        11.5e-6, lambda: (torch.index_select, randn(593, 1792, dtype=FP32), 0, integers(593, 5011))
    ),
    "sums in memory": (
        428e-6,
        lambda: (lambda t, i, s: t.scatter_add_(0, i, s), randn(60448, 2304, dtype=HALF), integers(60448, 3279, 2304),
                 randn(3279, 2304, dtype=HALF)),
    ),
    "sums by compare and swap": (
        24.1e-6, pooled_gradient(lambda x: functional.adaptive_avg_pool2d(x, 7), 2, 32, 32, 32)
    ),
    "planes of a volume in blocks": (
        9.9e-6, lambda: (lambda x: functional.avg_pool3d(x, 2), randn(4, 64, 14, 14, 14, dtype=FP32))
    ),
    "a transform by two kernels": (
        9.1e-6, lambda: (torch.fft.fft, torch.complex(randn(10, 32768, dtype=FP32), randn(10, 32768, dtype=FP32)))
    ),
    "more weights than registers": (78e-6, recurrent("LSTM", 64, 128, 14, 4, HALF)),
    "two directions": (834.6e-6, recurrent("GRU", 1024, 512, 84, 4, HALF, bidirectional=True)),
    "parts with a bias": (
        58.6e-6, lambda: (torch.addmm, randn(64, dtype=FP32), randn(1206, 3264, dtype=FP32),
                          randn(64, 3264, dtype=FP32).t())
    ),
    "parts of a short contraction with a bias": (
        15.2e-6, lambda: (torch.addmm, randn(64, dtype=FP32), randn(64, 128, dtype=FP32),
                          randn(64, 128, dtype=FP32).t())
    ),
    "few channels of each tap": (
        20.4e-6, lambda: (lambda x, w: functional.conv2d(x, w, padding=1),
                          channels_last(8, 16, 112, 112, dtype=HALF), channels_last(64, 16, 3, 3, dtype=HALF))
    ),
    "strides of a depthwise convolution": (
        8.5e-6, lambda: (lambda x, w: functional.conv2d(x, w, stride=2, padding=1, groups=16),
                         channels_last(32, 16, 32, 32, dtype=HALF), channels_last(16, 1, 3, 3, dtype=HALF))
    ),
    "instructions of an activation": (158e-6, lambda: (functional.mish, randn(87255168))),
    "one element at a time": (
        243.5e-6, lambda: (lambda x, m, v: functional.batch_norm(x, m, v), randn(32, 1024, 56, 56),
                           randn(1024, dtype=FP32), randn(1024, dtype=FP32))
    ),
    "cubic": (
        614e-6, lambda: (lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"),
                         randn(16, 64, 56, 56, dtype=FP32))
    ),
    "taps of a small image": (
        30.2e-6, lambda: (lambda x: functional.interpolate(x, size=(12, 12), mode="bilinear", antialias=True),
                          randn(2, 64, 128, 128))
    ),
    "places of a mask": (
        13.3e-6, lambda: (torch.masked_scatter, randn(90, 1152), randn(90, 1152) > 0, randn(90, 1152))
    ),
    "one of each row": (51.7e-6, lambda: (torch.multinomial, randn(1522, 128, dtype=FP32), 1)),
    "bags": (6.3e-6, lambda: (functional.embedding_bag, integers(332, 317, 16), randn(332, 96))),
    "few sums by index": (
        34.3e-6, lambda: (lambda t, i, s: t.index_put_((i,), s, accumulate=True), randn(1710, 128, dtype=FP32),
                          integers(1710, 114), randn(114, 128, dtype=FP32))
    ),
    "distances within": (2.1e-6, lambda: (torch.pdist, randn(44, 15, dtype=FP32))),
    "a bias": (
        144.2e-6, lambda: (functional.conv2d, randn(8, 256, 112, 112, dtype=FP32), randn(256, 256, 1, 1, dtype=FP32),
                           randn(256, dtype=FP32))
    ),
    "overlapping windows that are folded": (
        16.8e-6, lambda: (lambda x, w: functional.conv_transpose2d(x, w, stride=2, padding=1),
                          channels_last(1, 96, 7, 7, dtype=BF16), channels_last(96, 64, 4, 4, dtype=BF16))
    ),
    "groups of one channel, transposed": (
        59.3e-6, lambda: (lambda x, w: functional.conv_transpose2d(x, w, stride=2, groups=48), randn(2, 48, 32, 32),
                          randn(48, 1, 7, 7))
    ),
}  # fmt: skip
"""Seconds on an H200 in draws 2 to 9, and the call."""


@pytest.mark.parametrize("name", MEASURED)
def test_a_kernel_takes_what_one_like_it_took(name):
    seconds, build = MEASURED[name]
    assert expected(build) == pytest.approx(seconds, rel=0.4)


def test_places_of_images_with_classes_are_spread_over_blocks():
    scores = lambda: randn(8, 21, 128, 128)  # noqa: E731
    places = expected(lambda: (functional.nll_loss, scores(), integers(21, 8, 128, 128)))
    rows = expected(lambda: (functional.nll_loss, randn(8 * 128 * 128, 21), integers(21, 8 * 128 * 128)))
    assert places < 0.25 * rows


def test_a_gradient_of_a_resize_goes_through_all_images():
    gradient = lambda images: expected(  # noqa: E731
        pooled_gradient(lambda x: functional.interpolate(x, scale_factor=2), images, 128, 14, 14)
    )
    assert 21e-6 < gradient(32) < 84e-6  # 41.8 us on an H200
    assert gradient(32) > 4 * gradient(4)


def test_places_of_a_volume_go_through_all_planes():
    volume = lambda planes: expected(  # noqa: E731
        lambda: (lambda x: functional.interpolate(x, scale_factor=2, mode="trilinear"), randn(1, planes, 8, 8, 8))
    )
    assert volume(512) > 4 * volume(64)


def test_columns_of_a_factorization_follow_each_other():
    cholesky = lambda *shape: expected(lambda: (torch.linalg.cholesky, randn(*shape, dtype=FP32)))  # noqa: E731
    assert cholesky(2048, 2048) == pytest.approx(1.95e-3, rel=0.3)  # as others measured on an H100
    assert cholesky(512, 512) == pytest.approx(376e-6, rel=0.3)
    assert cholesky(64, 128, 128) < 2 * cholesky(128, 128)  # beside each other
    solve = lambda size: expected(  # noqa: E731
        lambda: (torch.linalg.solve, randn(size, size, dtype=FP32), randn(size, 1, dtype=FP32))
    )
    assert solve(1024) > 3 * solve(256)


def test_the_host_waits_for_what_a_factorization_says_of_itself():
    small = lambda call: estimate(lambda: (call, randn(16, 16, dtype=FP32)))  # noqa: E731
    unchecked, checked = small(torch.linalg.cholesky_ex), small(torch.linalg.cholesky)
    assert checked.expected_s == pytest.approx(136e-6, rel=0.4)
    assert checked.expected_s > unchecked.expected_device_s + 60e-6  # eight launches and the wait


def test_what_the_host_does_not_wait_for_is_selected_at_once():
    rows = lambda: randn(1000, 64, dtype=FP32)  # noqa: E731
    waited = expected(lambda: (torch.unique, integers(1000, 400)))
    assert waited == pytest.approx(61e-6, rel=0.4)
    assert expected(lambda: (torch.masked_scatter, rows(), rows() > 0, rows())) < 0.5 * waited


def test_parts_of_rows_have_an_index_for_each_element():
    around = lambda x: functional.pad(x, (1, 1, 1, 1), mode="circular")  # noqa: E731
    assert expected(lambda: (around, randn(1, 256, 32, 32))) == pytest.approx(18e-6, rel=0.25)


def test_few_channels_make_a_gradient_of_weights_slow():
    def gradient(channels):
        def build():
            x = randn(4, channels, 128, 128, dtype=FP32).requires_grad_()
            w = randn(96, channels, 1, 1, dtype=FP32).requires_grad_()
            result = functional.conv2d(x, w)
            given = torch.randn_like(result)
            return (lambda: torch.autograd.grad(result, (x, w), given, retain_graph=True),)

        return expected(build)

    assert gradient(16) == pytest.approx(90e-6, rel=0.4)
    assert gradient(16) > 1.2 * gradient(32)


def test_distances_have_a_block_for_each_pair_unless_they_are_a_product():
    points = lambda: (randn(2048, 64, dtype=FP32), randn(2048, 64, dtype=FP32))  # noqa: E731
    pairs = expected(lambda: (lambda x, y: torch.cdist(x, y, p=1.0), *points()))
    assert 1e-3 < pairs < 20e-3
    assert expected(lambda: (torch.cdist, *points())) < 0.05 * pairs


def test_what_a_mask_selects_is_counted_by_the_host_first():
    table, mask = (lambda: randn(1024, 512, dtype=FP32)), (lambda: randn(1024, 512) > 0)
    chosen = expected(lambda: (torch.masked_select, table(), mask()))
    assert chosen > 5 * expected(lambda: (torch.where, mask(), table(), table()))
    filled = expected(lambda: (lambda t, i: t.index_fill_(0, i, 0.0), table(), integers(1024, 64)))
    assert filled < 0.2 * chosen


def test_sums_by_index_are_sorted_and_copies_are_not():
    def put(accumulate):
        call = lambda t, i, s: t.index_put_((i,), s, accumulate=accumulate)  # noqa: E731
        return expected(lambda: (call, randn(1000, 64), integers(1000, 5000), randn(5000, 64)))

    assert put(True) > 5 * put(False)


def test_a_bag_adds_up_its_rows_one_after_the_other():
    bags = lambda size: expected(  # noqa: E731
        lambda: (functional.embedding_bag, integers(1000, 64, size), randn(1000, 64))
    )
    assert bags(1) < 20e-6
    assert bags(256) > 3 * bags(1)


def test_a_diagonal_is_a_fill_and_a_short_copy():
    whole = expected(lambda: (torch.zeros_like, randn(4096, 4096, dtype=FP32)))
    assert expected(lambda: (torch.diag, randn(4096, dtype=FP32))) < 1.4 * whole


def test_a_matrix_that_is_added_is_copied_first():
    a, b = (lambda: randn(64, 256, 128)), (lambda: randn(64, 128, 256))
    plain = expected(lambda: (torch.bmm, a(), b()))
    added = expected(lambda: (torch.baddbmm, randn(64, 256, 256), a(), b()))
    copied = expected(lambda: (torch.clone, randn(64, 256, 256)))
    assert added > plain + 0.8 * copied


def test_the_median_of_all_is_a_sort():
    x = lambda: randn(2**22, dtype=FP32)  # noqa: E731
    assert expected(lambda: (torch.median, x())) == pytest.approx(281e-6, rel=0.3)
    assert expected(lambda: (lambda x: torch.histc(x, 64), randn(2**24, dtype=FP32))) == pytest.approx(268e-6, rel=0.3)


def test_groups_of_two_channels_are_one_kernel_each_where_the_channels_come_first():
    def grouped(order):
        convolve = lambda x, w: functional.conv2d(x, w, padding=1, groups=32)  # noqa: E731
        data = lambda: randn(2, 64, 28, 28, dtype=HALF).to(memory_format=order)  # noqa: E731
        return expected(lambda: (convolve, data(), randn(256, 2, 3, 3, dtype=HALF)))

    assert grouped(torch.contiguous_format) == pytest.approx(225e-6, rel=0.5)
    assert grouped(torch.contiguous_format) > 3 * grouped(torch.channels_last)


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_drawn_cases_has_an_expected_time(family):
    result = fake_estimate(draw_case(1, family, 0), nearpeak.machine("h200-sxm"))
    assert result.expected_s is not None
    assert result.as_written_s <= result.expected_device_s < 1.0


def test_a_linear_layer_and_its_loss_take_their_products_and_a_pass_over_the_logits():
    """Also where rows of logits are not aligned. Times of an H200, which no constant was fitted to."""
    measured = Path(__file__).parents[2] / "benchmarks" / "results" / "loss_parts_h200.json"
    for row in json.loads(measured.read_text(encoding="utf-8")):
        tokens, classes, features = row["tokens"], row["vocabulary"], row["features"]

        def build(tokens=tokens, classes=classes, features=features):
            hidden, weight = (randn(rows, features).requires_grad_() for rows in (tokens, classes))
            return kernels.linear_cross_entropy, hidden, weight, torch.zeros(tokens, device="cuda", dtype=torch.long)

        assert expected(build) == pytest.approx(row["seconds"]["whole"], rel=0.2), (tokens, classes)


def test_attention_of_nearpeak_takes_what_its_kernels_were_measured_to_take():
    """And not its bound, so that the saving over torch's is predicted. Times of an H200."""
    measured = Path(__file__).parents[2] / "benchmarks" / "results" / "kernels_h200.json"
    ratios = []
    rows = json.loads(measured.read_text(encoding="utf-8"))["attention"]
    for row in [row for row in rows if row["tokens"] == 4096 and row["causal"]]:
        shape, causal = [row[name] for name in ("batch", "heads", "tokens", "dim")], row["causal"]

        def run(*inputs, row=row, causal=causal):
            result = kernels.attention(*inputs, causal=causal)
            if row["pass"] == "backward":
                result.backward(torch.empty_like(result))

        def build(run=run, shape=shape):
            return run, *(randn(*shape).requires_grad_() for _ in range(3))

        ops = [op for op in estimate(build).ops if op.name.startswith("nearpeak.attention")]
        ratios.append(sum(op.expected_seconds for op in ops if op.phase == row["pass"]) / row["seconds"]["nearpeak"])
    assert ratios == pytest.approx([1.0] * len(ratios), rel=0.2)


def test_a_vector_of_whole_tiles_is_multiplied_at_the_rate_of_memory():
    """8192 x 8192 by 8192 took 32.6 us on an H200, 4934 x 13632 52.6 us: its rows are no multiple of 8."""
    in_tiles = expected(lambda: (torch.mm, randn(8192, 8192), randn(8192, 1)))
    assert in_tiles == pytest.approx(32.6e-6, rel=0.1)
    assert expected(lambda: (torch.mv, randn(8192, 8192), randn(8192))) == in_tiles
    assert expected(lambda: (torch.mv, randn(4934, 13632), randn(13632))) == pytest.approx(52.6e-6, rel=0.1)
    rows_apart = expected(lambda: (functional.linear, randn(1, 892), randn(14976, 892)))
    assert rows_apart == pytest.approx(17.95e-6, rel=0.15)  # rows of 1,784 bytes
    assert expected(lambda: (torch.mv, randn(4018, 1280, dtype=FP32), randn(1280, dtype=FP32))) < 9.5e-6


def test_dropout_takes_vectors_of_four_elements_or_fewer():
    """Measured on an H200: 28.7, 260 and 312 us."""

    def dropout(elements):
        return expected(lambda: (lambda x: torch.native_dropout(x, 0.1, True), randn(elements)))

    assert dropout(4 * 2048 * 2048) == pytest.approx(28.7e-6, rel=0.1)
    assert dropout(103_384_365) == pytest.approx(260e-6, rel=0.1)
    assert dropout(93_725_278) == pytest.approx(312e-6, rel=0.1)
