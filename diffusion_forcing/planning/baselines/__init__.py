"""Policies to compare with: Diffuser, MPPI, a scripted controller, random actions, and our own agent with its network zeroed."""
