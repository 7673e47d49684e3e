"""Tasks: data and evaluation of each domain."""

from .base import Evaluation, Progress, Table, Task, TaskData
from .composition import Composition
from .forecasting import Forecasting
from .imitation import Imitation
from .maze2d import Maze2D
from .video import Video

TASKS = (Composition, Maze2D, Forecasting, Video, Imitation)

__all__ = ["TASKS", "Composition", "Evaluation", "Forecasting", "Imitation", "Maze2D", "Progress", "Table", "Task", "TaskData", "Video"]
