"""Planning: one model that is policy and planner (paper, section 4.2)."""

from .agent import PlanningAgent, PlanOptions

__all__ = ["PlanOptions", "PlanningAgent"]
