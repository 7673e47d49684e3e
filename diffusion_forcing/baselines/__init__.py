"""What we compare with and is not a variant of ours."""
