"""Which selections by a mask could leave the shape as it is."""

import torch
from gpu_steps import examined, found_in
from planted import load, planted

NAME = "boolean-selection"
ROWS, WIDTH = 65536, 256


def of(select, share, trained=True):
    """What is found in a step that selects this share of the rows."""

    def build():
        torch.manual_seed(0)
        x = torch.randn(ROWS, WIDTH, requires_grad=trained)
        mask = torch.arange(ROWS) < share * ROWS

        def step():
            x.grad = None
            loss = select(x, mask).square().mean()
            if trained:
                loss.backward()

        return step

    return found_in(examined(build, live=True), NAME)  # how many are selected is in the values


def test_the_corpus():
    module = load("boolean_selection")
    (finding,) = found_in(examined(lambda: module.waste("cuda")), NAME)
    assert finding.source == planted("boolean_selection")
    assert not found_in(examined(lambda: module.clean("cuda")), NAME)


def test_rows_and_elements():
    (finding,) = of(lambda x, mask: x[mask], 0.75)
    assert "75%" in finding.title and "in backward" in finding.evidence
    (finding,) = of(lambda x, mask: x.masked_select(mask[:, None]), 0.75)
    assert "75%" in finding.title


def test_few_rows_are_worth_selecting():
    assert not of(lambda x, mask: x[mask], 0.25)


def test_a_list_of_rows_is_no_mask():
    assert not of(lambda x, mask: x[torch.arange(ROWS - 8, device=x.device)], 1.0)
