"""What we simulate. `maze2d` needs NumPy only; `gym` offers it to Gymnasium."""
