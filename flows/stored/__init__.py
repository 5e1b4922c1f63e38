"""What the stages leave on disk, and where."""
