"""The stages of the pipeline, the pipeline itself, and the commands around them: `python -m flows NAME`."""
