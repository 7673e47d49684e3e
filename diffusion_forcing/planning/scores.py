"""Published scores, and tables of ours beside them."""

from __future__ import annotations

from typing import Literal

from ..engine.task import Table

PolicyName = Literal["agent", "zeroed", "diffuser", "diffuser_pd", "scripted", "random", "mppi"]
POLICIES: dict[PolicyName, str] = {
    "agent": "Diffusion Forcing, own actions",
    "zeroed": "control: the same agent, network zeroed",
    "diffuser": "Diffuser, own actions",
    "diffuser_pd": "Diffuser, PD controller",
    "scripted": "scripted controller that knows the maze",
    "random": "random policy",
    "mppi": "MPPI, true dynamics",
}
MANY_FAILED = 0.2
"""Share of failed plans above which an evaluation says so."""
# Normalised scores as published: fixed goal, then Multi2D. IQL and CQL as the paper quotes them.
PUBLISHED: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "umaze": {
        "MPPI": (33.2, 41.2), "CQL": (5.7, None), "IQL": (47.4, 24.8), "Diffuser, own actions": (6.3, 32.8),
        "Diffuser, PD controller": (113.9, 128.9), "Diffusion Forcing without Monte Carlo": (110.1, 107.7),
        "Diffusion Forcing": (116.7, 119.1),
    },
    "medium": {
        "MPPI": (10.2, 15.4), "CQL": (5.0, None), "IQL": (34.9, 12.1), "Diffuser, own actions": (13.5, 22.0),
        "Diffuser, PD controller": (121.5, 127.2), "Diffusion Forcing without Monte Carlo": (136.1, 145.6),
        "Diffusion Forcing": (149.4, 152.3),
    },
    "large": {
        "MPPI": (5.1, 8.0), "CQL": (12.5, None), "IQL": (58.6, 13.9), "Diffuser, own actions": (6.3, 6.9),
        "Diffuser, PD controller": (123.0, 132.1), "Diffusion Forcing without Monte Carlo": (142.8, 129.8),
        "Diffusion Forcing": (159.0, 167.1),
    },
}  # fmt: skip


def tables(maze: str, multi: bool, policy: PolicyName, metrics: dict[str, float]) -> tuple[Table, Table]:
    """The score of a policy beside the published ones, and what its episodes were like."""
    return _scores(maze, multi, policy, metrics), _details(metrics)


def _scores(maze: str, multi: bool, policy: PolicyName, metrics: dict[str, float]) -> Table:
    stderr = f" ± {metrics['score_stderr']:.1f}" if metrics["episodes"] > 1 else ""
    rows = [(f"here: {POLICIES[policy]}", f"{metrics['score']:.1f}{stderr}")]
    for name, scores in PUBLISHED[maze].items():
        value = scores[int(multi)]
        rows.append((f"published: {name}", "-" if value is None else f"{value:.1f}"))
    return Table(f"Maze2D {maze}, {'Multi2D' if multi else 'fixed goal'}: normalised score", ("policy", "score"), tuple(rows))


def _details(metrics: dict[str, float]) -> Table:
    rows = [
        ("episodes", f"{metrics['episodes']:,.0f}"),
        ("reached the goal", f"{metrics['success']:.1%}"),
        ("first reached after", f"{metrics['first_reach']:.0f} steps" if metrics["success"] else "-"),
        ("in the goal from then on", f"{metrics['stay']:.1%} of the time" if metrics["success"] else "-"),
        ("touching a wall", f"{metrics['wall_contact']:.1%} of the time"),
    ]
    if "plan_error_median" in metrics:
        error = f"{metrics['plan_error_median']:.3f} (median), {metrics['plan_error_mean']:.3f} (mean)"
        rows.append(("metres between plan and execution", error))
        rows.append(("plans that failed (replan_error)", f"{metrics['failed_plans']:.1%}"))
    if "seconds_a_plan" in metrics:
        rows.append(("seconds per plan, batched", f"{metrics['seconds_a_plan']:.3f}"))
        rows.append(("invalid plans, sampled again", f"{metrics['bad_plans']:.0f} of {metrics['plans']:,.0f}"))
    return Table("Of these episodes", ("", ""), tuple(rows))


def failure_warnings(metrics: dict[str, float], replan_error: float) -> tuple[str, ...]:
    """A sentence where many plans do not come true."""
    if metrics.get("failed_plans", 0.0) <= MANY_FAILED:
        return ()
    return (
        f"Plans and world part: {metrics['failed_plans']:.0%} of the plans were off by more than {replan_error:g} m when replaced (median "
        f"{metrics['plan_error_median']:.2f} m); guidance is halved after each. The usual causes are a model trained without the linear "
        "law of motion (--task.linear-dynamics), guidance that pulls plans through walls (lower --task.plan.scale), and too short a "
        "training.",
    )
