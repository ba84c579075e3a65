"""Keys that a mask hides from all queries."""

import dataclasses
import inspect

import pytest
import torch
from gpu_steps import examined, found_in, with_times
from planted import load, planted
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from nearpeak.findings.rules.masked_keys import masked_keys
from nearpeak.ops.op import VisibleKeys
from nearpeak.trace.trace import trace

NAME = "masked-keys"
ROWS, HEADS, KEYS, SHOWN, WIDTH = 2, 4, 1024, 256, 64
GROUPS = 2


def tensors(queries=1, heads=HEADS, **options):
    torch.manual_seed(0)
    query = torch.randn(ROWS, HEADS, queries, WIDTH, **options)
    return query, *(torch.randn(ROWS, heads, KEYS, WIDTH, **options) for _ in "kv")


def shown_keys(first=0, end=SHOWN):
    places = torch.arange(KEYS)
    return ((places >= first) & (places < end))[None]


def added(mask, value=-torch.inf):
    return torch.zeros(mask.shape).masked_fill(~mask, value)


def written_out(query, key, value, attn_mask):
    scores = query @ key.transpose(-2, -1) / WIDTH**0.5
    scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(dim=-1) @ value


def where_written_out(query, key, value, attn_mask):
    scores = torch.where(attn_mask, query @ key.transpose(-2, -1), -1e9)
    return scores.softmax(dim=-1) @ value


def math(*args, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(*args, **options)


fused = functional.scaled_dot_product_attention


def attending(attention=fused, mask=None, queries=1, cut=slice(None)):
    """A step that attends to the keys of `cut`."""
    mask = shown_keys() if mask is None else mask

    def build():
        query, key, value = tensors(queries)

        def step():
            with torch.no_grad():
                return attention(query, key[:, :, cut], value[:, :, cut], attn_mask=mask[..., cut])

        return step

    return build


def found(build):
    return found_in(examined(build, live=True), NAME)


def test_the_corpus():
    module = load("masked_keys")
    (finding,) = found(lambda: module.waste("cpu"))
    assert finding.source == planted("masked_keys")
    assert "88 % of the keys" in finding.title
    assert not found(lambda: module.clean("cpu"))


@pytest.mark.parametrize("attention", [fused, math, written_out, where_written_out])
@pytest.mark.parametrize("queries", [1, 32])
def test_the_step_with_the_keys_that_are_shown_is_as_fast_as_predicted(attention, queries):
    whole = examined(attending(attention, queries=queries), live=True)
    shorter = examined(attending(attention, queries=queries, cut=slice(SHOWN)), live=True)
    (finding,) = found_in(whole, NAME)
    assert not found_in(shorter, NAME)
    saved = whole.profile.wall_s - shorter.profile.wall_s
    assert finding.saving_s == pytest.approx(saved, rel=0.1)
    assert finding.saving_s > 0.1 * whole.profile.wall_s


@pytest.mark.parametrize(
    ("mask", "cut"),
    [
        (added(shown_keys()), ":end"),
        (added(shown_keys(), torch.finfo(torch.float32).min), ":end"),
        (added(shown_keys(), -1e4), ":end"),
        (shown_keys(512, KEYS), "start:"),
        (shown_keys(512, 700), "start:end"),
        (added(shown_keys())[None, None].expand(ROWS, HEADS, 1, KEYS), ":end"),
        (torch.stack([shown_keys(), shown_keys(64, 128)])[:, None], ":end"),
    ],
    ids=["-inf", "least", "-1e4", "later keys", "keys between", "expanded", "rows that differ below the longest"],
)
@pytest.mark.parametrize("attention", [fused, math, written_out])
def test_masks_of_all_kinds_tell(attention, mask, cut):
    (finding,) = found(attending(attention, mask))
    assert f"key[:, :, {cut}]" in finding.remedy


def causal(size=KEYS):
    return torch.ones(size, size, dtype=torch.bool).tril()


def differing():
    return torch.stack([shown_keys(), shown_keys(0, KEYS)])[:, None]


@pytest.mark.parametrize("attention", [fused, math, written_out])
@pytest.mark.parametrize(
    ("mask", "queries"),
    [
        (causal(), KEYS),
        (added(causal()), KEYS),
        (differing(), 1),
        (shown_keys(0, KEYS), 1),
        (shown_keys(0, 950), 1),
        (torch.arange(KEYS)[None] % 2 == 0, 1),
        (torch.zeros(1, KEYS, dtype=torch.bool), 1),
        (-torch.arange(KEYS)[None].float(), 1),
    ],
    ids=["causal", "causal, added", "padding by row", "all shown", "few hidden", "every other", "none shown", "bias"],
)
def test_other_masks_say_nothing(attention, mask, queries):
    assert not found(attending(attention, mask, queries=queries))


def test_a_causal_mask_of_one_query_in_many_shows_what_its_last_row_shows():
    mask = torch.zeros(300, KEYS, dtype=torch.bool)
    mask[:, :SHOWN] = True
    mask[137, -1] = True  # no row of a sample
    assert not found(attending(fused, mask, queries=300))


def test_what_only_prepares_the_keys_is_part_of_it():
    def build():
        query, key, value = tensors(heads=GROUPS, dtype=torch.bfloat16)
        query = query.float()

        def step():
            with torch.no_grad():
                key_now, value_now = (part.float().repeat_interleave(HEADS // GROUPS, dim=1) for part in (key, value))
                return fused(query, key_now, value_now, attn_mask=shown_keys())

        return step

    step = examined(build, live=True)
    (finding,) = found_in(step, NAME)
    packets = [step.ops[index].packet for index in finding.ops]
    assert packets.count("aten._to_copy") == 2 and packets.count("aten.clone") == 2


def test_what_others_read_is_left_out():
    def build():
        query, key, value = tensors()

        def step():
            with torch.no_grad():
                doubled = key * 2
                return fused(query, doubled, value, attn_mask=shown_keys()), doubled.sum()

        return step

    step = examined(build, live=True)
    (finding,) = found_in(step, NAME)
    assert "aten.mul" not in [step.ops[index].packet for index in finding.ops]


@pytest.mark.parametrize("attention", [fused, written_out])
def test_the_backward_pass_is_part_of_it(attention):
    def build():
        inputs = [tensor.requires_grad_() for tensor in tensors(queries=32)]
        return lambda: attention(*inputs, attn_mask=shown_keys()).sum().backward()

    step = examined(build, live=True)
    (finding,) = found_in(step, NAME)
    assert {step.ops[index].phase for index in finding.ops} == {"forward", "backward"}


def cached(cut=slice(None)):
    """Steps that write to a cache, and read it by a view at a line of its own."""

    def build():
        query, *_ = tensors()
        cache = torch.zeros(2, ROWS, HEADS, KEYS, WIDTH)

        def step():
            with torch.no_grad():
                cache[0, :, :, SHOWN - 1 : SHOWN] = query
                key = cache[0][:, :, cut]  # the keys
                value = cache[1][:, :, cut]
                mask = shown_keys()[:, cut]
                return fused(query, key, value, attn_mask=mask)  # attention

        return step

    return build


def line_of(text):
    lines, first = inspect.getsourcelines(cached)
    return f"test_masked_keys.py:{first + next(at for at, line in enumerate(lines) if line.endswith(text))}"


def test_the_line_is_the_one_that_reads_the_cache():
    (finding,) = found(cached())
    assert finding.source == line_of("# the keys\n")
    assert not found(cached(slice(SHOWN)))


def test_without_a_view_of_a_cache_the_line_is_that_of_attention():
    (finding,) = found(attending())
    lines, first = inspect.getsourcelines(attending)
    number = first + next(at for at, line in enumerate(lines) if "return attention(" in line)
    assert finding.source == f"test_masked_keys.py:{number}"


def test_each_attention_of_a_step_has_its_own_keys():
    def build():
        query, key, value = tensors()
        mask = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()

        def step():
            with torch.no_grad():
                return [fused(query, key, value, attn_mask=mask[at : at + 1]) for at in (127, 255, 1023)]

        return step

    step = examined(build, live=True)
    assert sorted(visible.end for visible in step.trace.visible_keys.values()) == [128, 256]
    (finding,) = found_in(step, NAME)
    assert finding.places == 2


@pytest.mark.parametrize("backend", ["cudnn", "efficient"])
def test_the_kernels_of_a_gpu_are_known(backend):
    """Fake tensors have no values: what a look would have seen is given."""

    def build(cut=slice(None)):
        inputs = [part.requires_grad_() for part in tensors(32, dtype=torch.bfloat16)]
        mask = torch.ones(1, KEYS, dtype=torch.bool)[:, cut]

        def step():
            query, key, value = inputs
            with sdpa_kernel(getattr(SDPBackend, f"{backend.upper()}_ATTENTION")):
                fused(query, key[:, :, cut], value[:, :, cut], attn_mask=mask).sum().backward()

        return step

    step, shorter = examined(build), examined(lambda: build(slice(SHOWN)))
    packet = f"aten._scaled_dot_product_{backend}_attention"
    (index,) = (index for index, op in enumerate(step.ops) if op.packet == packet)
    seen = {index: VisibleKeys(keys=KEYS, first=0, end=SHOWN)}
    step = dataclasses.replace(step, trace=dataclasses.replace(step.trace, visible_keys=seen))
    (finding,) = found_in(step, NAME)
    assert {packet, f"{packet}_backward"} <= {step.ops[index].packet for index in finding.ops}

    def of_attention(examined_step):
        return sum(
            examined_step.time(index) for index, op in enumerate(examined_step.ops) if op.packet.startswith(packet)
        )

    (waste,) = masked_keys(step)
    gains = sum(gain for index, gain in waste.gains.items() if step.ops[index].packet.startswith(packet))
    assert gains == pytest.approx(of_attention(step) - of_attention(shorter), rel=0.1)


def test_what_compiled_code_reads_is_silent():
    build = attending()
    torch._dynamo.reset()
    compiled = torch.compile(build(), backend="aot_eager")
    compiled()
    traced = trace(compiled, live=True, keep_compiled=True)
    assert any("_scaled_dot_product_" in op.name for op in traced.ops)
    assert not found_in(with_times(traced, lambda op, expected: expected), NAME)
    assert found(build)


def test_what_was_not_looked_at_is_silent():
    """As in a CUDA graph, whose ops are those of its capture."""
    step = examined(attending(), live=True)
    assert found_in(step, NAME)
    unseen = dataclasses.replace(step, trace=dataclasses.replace(step.trace, visible_keys={}))
    assert not found_in(unseen, NAME)


def test_padding_that_a_batch_has_is_padding():
    def build():
        torch.manual_seed(0)
        lengths = torch.tensor([200, 256, 120, 230])
        ids = torch.randint(1, 100, (4, KEYS)) * (torch.arange(KEYS) < lengths[:, None])
        table, weight = torch.randn(100, WIDTH), torch.randn(3 * WIDTH, WIDTH)

        def step():
            with torch.no_grad():
                rows = functional.linear(functional.embedding(ids, table), weight)
                query, key, value = rows.unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
                return fused(query, key, value, attn_mask=(ids != 0)[:, None, None])

        return step

    step = examined(build, live=True)
    assert step.trace.visible_keys
    assert [finding.rule for finding in found_in(step) if finding.rule in (NAME, "padded-batch")] == ["padded-batch"]
