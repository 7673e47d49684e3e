"""Tasks: data and evaluation of each domain."""

from .base import Evaluation, Progress, Table, Task, TaskData
from .composition import Composition

TASKS = (Composition,)

__all__ = ["TASKS", "Composition", "Evaluation", "Progress", "Table", "Task", "TaskData"]
