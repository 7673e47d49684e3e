"""Tasks: data and evaluation of each domain."""

from .base import Evaluation, Progress, Table, Task, TaskData
from .composition import Composition
from .forecasting import Forecasting
from .maze2d import Maze2D

TASKS = (Composition, Maze2D, Forecasting)

__all__ = ["TASKS", "Composition", "Evaluation", "Forecasting", "Maze2D", "Progress", "Table", "Task", "TaskData"]
