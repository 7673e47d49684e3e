"""Imitation: a robot's policy with memory, learned from demonstrations (paper, section 4.4)."""

from .agent import AgentOptions, ImitationAgent

__all__ = ["AgentOptions", "ImitationAgent"]
