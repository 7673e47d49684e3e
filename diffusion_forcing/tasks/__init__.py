"""Tasks: data and evaluation of each domain."""

from .base import Evaluation, Progress, Table, Task, TaskData
from .composition import Composition
from .forecasting import Forecasting
from .maze2d import Maze2D
from .video import Video

TASKS = (Composition, Maze2D, Forecasting, Video)

__all__ = ["TASKS", "Composition", "Evaluation", "Forecasting", "Maze2D", "Progress", "Table", "Task", "TaskData", "Video"]
