"""Worlds to plan in. `maze2d` needs NumPy only; `gym` offers it to Gymnasium."""
