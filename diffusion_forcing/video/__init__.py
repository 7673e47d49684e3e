"""Video: world models that roll out far beyond their training length (paper, section 4.1)."""
