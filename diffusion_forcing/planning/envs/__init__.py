"""Environments to plan in: `maze2d` (NumPy only), and `gym`, which registers it with Gymnasium."""
