"""Data: sequences cut into windows, and codecs between raw data and tokens."""
