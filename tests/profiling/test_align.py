import random

from hypothesis import given
from hypothesis import strategies as st

from nearpeak.profiling.assemble import OpKey, align, align_ops

names = st.lists(st.sampled_from("abcdef"), max_size=40)


@given(names)
def test_a_sequence_is_itself(sequence):
    assert align(sequence, sequence) == list(range(len(sequence)))


@given(names, names)
def test_what_is_aligned_is_equal_and_in_order(one, other):
    found = [(at, to) for at, to in enumerate(align(one, other)) if to is not None]
    assert all(one[at] == other[to] for at, to in found)
    assert [to for _, to in found] == sorted({to for _, to in found})


def test_ops_that_only_one_run_has_are_passed_over():
    layer = ["mm", "add", "norm", "mul", "softmax", "mm2"]
    one = [f"{number}.{name}" for number in range(50) for name in layer]
    other = [name for name in one if not name.endswith("add")]
    found = align(one, other)
    assert [one[at] for at, to in enumerate(found) if to is None] == [name for name in one if name.endswith("add")]
    assert align(other, one) == [one.index(name) for name in other]


def test_a_few_random_differences_cost_a_few_ops():
    rng = random.Random(0)
    one = [rng.choice("abcdefghijklmnop") for _ in range(2000)]
    other = [name if rng.random() > 0.02 else "x" for name in one if rng.random() > 0.02]
    found = align(one, other)
    assert sum(to is not None for to in found) > 0.93 * len(one)


def lcs_length(one, other):
    """By the textbook's table."""
    before = [0] * (len(other) + 1)
    for key in one:
        row = [0]
        for at, to in enumerate(other):
            row.append(before[at] + 1 if key == to else max(row[-1], before[at + 1]))
        before = row
    return before[-1]


@given(names, names)
def test_no_longer_alignment_exists(one, other):
    assert sum(to is not None for to in align(one, other)) == lcs_length(one, other)


def ops(*pairs):
    return [OpKey(kind=name, exact=(name, size)) for name, size in pairs]


sized = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3)), max_size=30)


@given(sized, sized)
def test_ops_of_one_kind_are_aligned_in_order(one, other):
    found = [(at, to) for at, to in enumerate(align_ops(ops(*one), ops(*other), {"a"})) if to is not None]
    assert all(one[at][0] == other[to][0] for at, to in found)
    assert [to for _, to in found] == sorted({to for _, to in found})


def test_views_that_only_one_run_has_mislead_nobody():
    one = ["t", "addmm", "gelu", "gelu_backward", "t", "mm", "t", "mm", "sum", "view", "detach"] * 4
    other = ["t", "detach", "detach", "addmm", "detach", "detach", "gelu_backward", "detach", "t", "mm", "t", "mm"]
    other = [*other, "sum", "view", "detach"] * 4
    light = {"t", "detach", "view"}
    found = align_ops(ops(*((name, 1) for name in one)), ops(*((name, 1) for name in other)), light)
    assert {one[at] for at, to in enumerate(found) if to is None} == {"gelu"}
    assert [other[to] for to in found if to is not None] == [name for name in one if name != "gelu"]


def test_a_common_op_at_the_end_blocks_nothing():
    """A text that grows: no op has the sizes that it had, but for the last, which both steps have elsewhere too."""
    one = ops(*[("mm", 7), ("add", 7), ("norm", 7)] * 20, ("argmax", 1))
    other = ops(("argmax", 1), *[("mm", 8), ("add", 8), ("norm", 8)] * 20, ("argmax", 1))
    assert align_ops(one, other) == list(range(1, 62))


def test_ops_of_experts_with_other_rows_are_found():
    chance = random.Random(3)

    def step():
        return ops(
            *(pair for _ in range(300) for pair in [("index", chance.randint(1, 40)), ("mm", chance.randint(1, 40))])
        )

    assert all(to is not None for to in align_ops(step(), step()))


def test_an_op_that_is_missing_is_the_one_of_its_size():
    one = ops(*[("mm", size) for size in range(50)])
    other = [key for key in one if key.exact != ("mm", 20)]
    assert [at for at, to in enumerate(align_ops(one, other)) if to is None] == [20]
