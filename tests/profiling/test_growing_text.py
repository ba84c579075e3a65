"""A text that grows between the step that is profiled and the one that is traced."""

import torch

import nearpeak


def test_ops_of_a_growing_text_have_their_times_and_the_shapes_of_the_step_before():
    weight, tokens = torch.randn(256, 256), torch.randn(64, 256)
    seen = []

    def step():
        nonlocal tokens
        tokens = torch.cat([tokens, tokens[-1:]])
        seen.append(len(tokens))
        return (tokens @ weight).relu()

    profile = nearpeak.profile(step, on="h200-sxm")
    assert profile.matched == 1.0
    product = next(op for op in profile.ops if op.name.startswith("aten.mm"))
    # On a busy machine, more steps may follow the profiled one to time it again.
    assert product.shapes[0][0] in seen
    assert product.shapes[0][1] == 256
    assert product.measured_s > 0
