"""One thread for each test process: small networks gain nothing from more, and the processes share the cores."""

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["DFORCE_CACHE"] = tempfile.mkdtemp(prefix="dforce-tests-")  # never the user's own data
os.environ.setdefault("MPLBACKEND", "Agg")

import torch

from diffusion_forcing.video import policy

torch.set_num_threads(1)
policy.STEPS = 3  # no test needs a policy that acts well
