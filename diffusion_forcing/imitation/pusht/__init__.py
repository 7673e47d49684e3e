"""Push-T: a disc pushes a T-shaped block onto its outline."""
