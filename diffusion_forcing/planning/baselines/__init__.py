"""Planners that we compare with and that are no variants of ours."""
