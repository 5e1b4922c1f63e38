"""How the process of a stage runs: its rim, its tasks, its children, its place on the machine."""
