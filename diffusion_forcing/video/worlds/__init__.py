"""Worlds that make clips to learn from: a maze with painted walls, a landscape of blocks, Doom."""
