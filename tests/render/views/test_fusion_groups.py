"""Fusion groups as text."""

from estimates import addition, copy, estimate, product

from nearpeak.bound.fusion import FusionGroup
from nearpeak.render.document import Document
from nearpeak.render.text import text
from nearpeak.render.views.estimate import fusion_groups


def fusion_groups_text(estimate, **options):
    return text(Document(title="", is_titled=False, parts=(fusion_groups(estimate, **options),)))


def group(*members, family="matrix", saved=1e9):
    return FusionGroup(
        members=members, family=family, reads=(), writes=(), flops={}, vector_flops={}, saved_bytes=saved, launches=True
    )


def test_groups_alike_are_one_row_ranked_by_saving():
    ops = [product(), addition(), product(), addition(), copy(), copy(seconds=5e-3)]
    found = fusion_groups_text(
        estimate(
            ops,
            groups=(group(0, 1), group(2, 3), group(4, 5, family="movement")),
            group_seconds=(1e-3, 1.5e-3, 1e-3),
        )
    )
    lines = found.splitlines()
    assert lines[2].split() == ["movement", "forward", "1", "6.00", "ms", "1.00", "ms", "5.00", "ms", "1.00", "GB"]
    assert lines[3] == "    clone x2 (train.py:41)"
    assert lines[4].split() == ["matrix", "forward", "2", "4.00", "ms", "2.50", "ms", "1.50", "ms", "2.00", "GB"]
    assert lines[5] == "    mm, add (train.py:41)"
    assert "In all 6.50 ms, 65.0 % of the as-written time." in found


def test_groups_that_save_nothing_are_not_shown():
    ops = [product(), addition(), copy()]
    found = fusion_groups_text(estimate(ops, groups=(group(0, 1), group(2)), group_seconds=(2e-3, 1e-3)))
    assert found.startswith("Fusion saves nothing here")


def test_views_are_no_members():
    ops = [product(), addition(family="view", seconds=0.0), addition()]
    found = fusion_groups_text(estimate(ops, groups=(group(0, 1, 2),), group_seconds=(1e-3,)))
    assert "mm, add (train.py:41)" in found


def test_many_members_and_hostile_names_stay_within_80_columns():
    ops = [addition(source=f"/x/{'y' * 90}{i}.py:1", name=f"mine.{'z' * 70}{i}.default") for i in range(30)]
    found = fusion_groups_text(estimate(ops, groups=(group(*range(30)),), group_seconds=(1e-6,)))
    assert max(map(len, found.splitlines())) <= 80


def test_rows_beyond_the_top_are_counted():
    ops = [product(), addition(), copy(), copy()]
    found = fusion_groups_text(estimate(ops, groups=(group(0, 1), group(2, 3)), group_seconds=(1e-3, 1e-3)), top=1)
    assert "1 more kinds of groups are not listed" in " ".join(found.split())
