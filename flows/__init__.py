"""The stages of the pipeline, the pipeline itself, and the commands around them: `agent-r1 NAME`."""
