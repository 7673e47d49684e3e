"""Simulated worlds that clips are filmed in: a textured maze, a landscape of blocks, Doom."""
