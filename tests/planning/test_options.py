"""What options of planning are refused."""

import pytest

from diffusion_forcing.planning.options import PlanOptions


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *(({name: 0}, name) for name in ("draws", "candidates", "replan", "short_plan_replan", "min_tokens", "lookahead")),
        ({"memory": -1}, "memory"),
        ({"extra_tokens": -1}, "extra_tokens"),
        ({"replan_error": -0.1}, "replan_error"),
        ({"verify_tolerance": float("nan")}, "verify_tolerance"),
        ({"hold_scale": 0.0}, "hold_scale"),
        ({"hold_scale": 1.0, "scale": 0.0}, "hold_scale"),
        ({"guidance_levels": (0.5, 0.2)}, "guidance_levels"),
        ({"guidance_levels": (0.0, 1.1)}, "guidance_levels"),
        ({"short_plan_scale": -1.0}, "short_plan_scale"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": 0.1, "short_plan_scale": 0.0}, "short_plan_scale"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, name):
    with pytest.raises(ValueError, match=name):
        PlanOptions(**options)


def test_a_refusal_names_the_rule_and_the_value():
    with pytest.raises(ValueError, match="lookahead counts tokens from 1, or is None for an adaptive horizon; got 0"):
        PlanOptions(lookahead=0)
