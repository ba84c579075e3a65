import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.moe_degrees import DEGREES, MoeLayer, crossover, degrees

LAYER = MoeLayer(experts=256, active=8, hidden=4096, intermediate=1536)
H100 = Cluster.of("h100-sxm x 64")


def pairs(tokens: int, cluster: Cluster = H100):
    found = degrees(LAYER, tokens, cluster)
    return list(zip(found[::2], found[1::2], strict=True))


def test_both_ways_at_every_degree() -> None:
    for (tensor, expert), degree in zip(pairs(8192), DEGREES, strict=True):
        assert (tensor.split, expert.split) == ("tensor", "expert")
        assert tensor.degree == expert.degree == degree


def test_weights_read_are_the_same_and_fall_with_the_degree() -> None:
    # 8192 tokens reach all 256 experts: 256 x 3 x 4096 x 1536 x 2 bytes = 9.66 GB over the degree
    for tensor, expert in pairs(8192):
        assert tensor.weight_bytes == pytest.approx(9.6637e9 / tensor.degree, rel=1e-4)
        assert expert.weight_bytes == pytest.approx(tensor.weight_bytes)


def test_work_is_the_whole_over_the_degree() -> None:
    whole = 2 * 8192 * 8 * 3 * 4096 * 1536
    for tensor, expert in pairs(8192):
        assert tensor.flops == pytest.approx(whole / tensor.degree)
        assert expert.flops == pytest.approx(whole / expert.degree * expert.imbalance)
        assert tensor.padded_flops >= tensor.flops
        assert expert.padded_flops >= expert.flops


def test_narrow_slices_are_padded() -> None:
    tensor = dict((pair[0].degree, pair[0]) for pair in pairs(8192))
    assert tensor[64].padded_flops == tensor[32].padded_flops  # 24 columns cost as much as 48: one tile


def test_few_tokens_hit_few_experts() -> None:
    assert LAYER.experts_hit(1) == pytest.approx(8)
    assert LAYER.experts_hit(64) == pytest.approx(222.4, abs=0.1)
    assert LAYER.experts_hit(8192) == pytest.approx(256)
    assert pairs(1)[0][0].weight_bytes < pairs(8192)[0][0].weight_bytes / 30


def test_many_tokens_favor_expert_and_few_favor_tensor_parallel() -> None:
    # what 44 measured pairs on 2 to 4 GPUs say: tensor parallel decodes faster, expert parallel has the faster prefill
    assert crossover(degrees(LAYER, 8192, H100)) == 2
    for tensor, expert in pairs(64):
        assert tensor.seconds < expert.seconds


def test_expert_parallel_pays_for_leaving_the_node() -> None:
    expert = {pair[1].degree: pair[1] for pair in pairs(8192)}
    rack = {pair[1].degree: pair[1] for pair in pairs(8192, Cluster.of("gb200 x 64"))}
    assert expert[16].communication_seconds > 2 * expert[8].communication_seconds
    assert rack[16].communication_seconds < rack[8].communication_seconds
    assert expert[16].limiter == "communication"
    assert expert[8].limiter == "memory"


def test_skew_makes_expert_parallel_slower_and_leaves_tensor_parallel_alone() -> None:
    plain = degrees(LAYER, 8192, H100, at=(8,))
    skewed = degrees(LAYER, 8192, H100, at=(8,), skew=2.0)
    assert skewed[0] == plain[0]
    assert skewed[1].compute_seconds > 1.8 * plain[1].compute_seconds


def test_smaller_types_read_less() -> None:
    half, quarter = (degrees(LAYER, 64, H100, at=(8,), dtype=dtype)[0] for dtype in ("bfloat16", "float8"))
    assert quarter.weight_bytes == pytest.approx(half.weight_bytes / 2)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: degrees(LAYER, 8, H100, at=(3,)), "degree=4|degree=2"),
        (lambda: degrees(LAYER, 8, H100, at=(128,)), "degree=64"),
        (lambda: degrees(LAYER, 0, H100), "tokens=1"),
        (lambda: degrees(LAYER, 8, H100, skew=0.5), "skew=1"),
        (lambda: MoeLayer(experts=4, active=8, hidden=16, intermediate=16), "active=4"),
        (lambda: MoeLayer(experts=0, active=8, hidden=16, intermediate=16), "experts=1"),
    ],
)
def test_errors_name_the_nearest_value(call, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        call()
