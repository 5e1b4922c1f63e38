"""A stand-in until the viewer is there."""
