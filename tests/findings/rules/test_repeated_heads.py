"""Which copies of keys and values attention does not need."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch.nn.functional import scaled_dot_product_attention

HEADS, GROUPS = 16, 4


def attending(fn):
    def build():
        query = torch.randn(2, HEADS, 256, 64, dtype=torch.bfloat16)
        key, value = (torch.randn(2, GROUPS, 256, 64, dtype=torch.bfloat16) for _ in "kv")

        def step():
            with torch.no_grad():
                return fn(query, key, value)

        return step

    return build


def interleaved(part):
    return part.repeat_interleave(HEADS // GROUPS, dim=1)


def expanded(part):
    return part[:, :, None].expand(-1, -1, HEADS // GROUPS, -1, -1).reshape(2, HEADS, 256, 64)


@pytest.mark.parametrize("repeat", [interleaved, expanded])
def test_copies_for_each_head_of_a_group_are_named(repeat):
    step = examined(attending(lambda q, k, v: scaled_dot_product_attention(q, repeat(k), repeat(v))))
    (found,) = found_in(step, "repeated-heads")
    assert found.places == 2
    assert found.saving_s == pytest.approx(step.seconds(found.ops))
    assert "4 times" in found.title
    assert "enable_gqa=True" in found.remedy


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda q, k, v: [(big := interleaved(k)).sum(), scaled_dot_product_attention(q, big, big)],
        lambda q, k, v: interleaved(k).sin(),
    ],
    ids=["as they are", "read by others too", "no attention"],
)
def test_other_copies_are_not_named(fn):
    assert not found_in(examined(attending(fn)), "repeated-heads")


def test_one_query_reads_the_keys_of_its_group_once():
    """Decoding reads the cache for each query head; as rows of one head, the queries of a group read it once."""

    def build():
        query = torch.randn(8, HEADS, 1, 64, dtype=torch.bfloat16)
        key, value = (torch.randn(8, GROUPS, 4096, 64, dtype=torch.bfloat16) for _ in "kv")

        def step():
            with torch.no_grad():
                return scaled_dot_product_attention(query, interleaved(key), interleaved(value))

        return step

    step = examined(build)
    (found,) = found_in(step, "repeated-heads")
    attention = next(index for index in found.ops if step.costs[index].family == "attention")
    copies = step.seconds(index for index in found.ops if index != attention)
    assert copies + 0.5 * step.time(attention) < found.saving_s < copies + 0.9 * step.time(attention)
    assert "rows of one head" in found.reasoning
    assert found.remedy.startswith("out = scaled_dot_product_attention(query.unflatten")
