"""Planning: one model that is policy and planner (paper, section 4.2)."""

from .agent import PlanningAgent
from .options import PlanOptions
from .rewards import Trajectory, arrive, avoid, reach, visit

__all__ = ["PlanOptions", "PlanningAgent", "Trajectory", "arrive", "avoid", "reach", "visit"]
