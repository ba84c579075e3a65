"""The tables of docs/fix.md are those of the runs."""

from benchmarks.pages.fix import BLOCKS, PAGE, fix_table, model_table, ratio_to_best, updated


def test_the_page_has_the_tables_of_the_files_there_are():
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->\n" in page and f"<!-- end of {name} -->" in page for name in BLOCKS)
    assert updated(page) == page


def test_a_row_has_the_ratio_to_the_best_other_way_and_predictions_beside_what_was_realized():
    speed = {"before_s": 0.010, "ratio": 0.8}
    fixes = [
        {"id": "norm", "status": "kept", "predicted_s": 0.0023, "speed": speed},
        {"id": "rotary", "status": "kept", "predicted_s": 0.004, "speed": speed},
        {"id": "attention", "status": "rolled back", "predicted_s": 0.1, "speed": speed},
    ]
    ways = {
        "eager": {"rounds_s": [0.010, 0.011, 0.012]},
        "compiled": {"rounds_s": [0.008, 0.009, 0.010]},
        "fixed": {"rounds_s": [0.004, 0.0045, 0.005]},
        "liger": {"problem": "its process has ended"},
    }
    sites = [{"fix": "norm", "status": "replaced"}] * 3
    row = {"model": "llama", "mode": "training", "ways": ways, "report": {"fixes": fixes, "sites": sites}}
    assert ratio_to_best(row) == 0.5
    expected = "| llama | training | 11.00 | - | 9.00 | 4.50 | 0.50 | norm, rotary |"
    assert model_table([row]).splitlines()[-1] == expected
    table = fix_table([row])
    assert "| llama, training | `norm` | 3 | 2.30 | 2.00 | 1.15 |" in table
    assert table.endswith("1 of 2 predictions are within 20%, of 2 fixes that were kept.")
