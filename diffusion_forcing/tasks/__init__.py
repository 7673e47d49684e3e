"""Tasks: data and evaluation of each domain."""

from .base import Evaluation, Progress, Table, Task, TaskData
from .composition import Composition
from .maze2d import Maze2D

TASKS = (Composition, Maze2D)

__all__ = ["TASKS", "Composition", "Evaluation", "Maze2D", "Progress", "Table", "Task", "TaskData"]
