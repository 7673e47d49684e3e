"""One thread for each test process: small networks gain nothing from more, and the processes share the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import torch

torch.set_num_threads(1)
